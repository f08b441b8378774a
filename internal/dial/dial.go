// Package dial connects a command to a node: over gRPC, in plain text or over TLS, with a certificate or a token.
//
// It makes one attempt, and does not look for other nodes: see package client for that.
package dial

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/internal/netaddr"
	"github.com/weirlimit/weir/rpc/wire"
)

// Node is how a command asks a node.
type Node struct {
	Addr    string // of its port for gRPC, HOST:PORT
	Timeout time.Duration
	TLS     Identity
}

// Connect calls f with a connection to the node.
func (r *Node) Connect(ctx context.Context, f func(context.Context, *grpc.ClientConn) error) error {
	if r.Timeout <= 0 {
		return fmt.Errorf("timeout: %v is not a time to wait", r.Timeout)
	}
	// gRPC would take an address without a port for one with port 443.
	if host, port, err := net.SplitHostPort(r.Addr); err != nil || host == "" || port == "" {
		return fmt.Errorf("addr: %q is not HOST:PORT", r.Addr)
	}
	creds, err := r.TLS.Transport()
	if err != nil {
		return err
	}
	if ctx, err = r.TLS.with(ctx, r.Addr); err != nil {
		return err
	}
	conn, err := grpc.NewClient("dns:///"+r.Addr, grpc.WithTransportCredentials(creds), grpc.WithNoProxy())
	if err != nil {
		return fmt.Errorf("addr: %q is not HOST:PORT: %w", r.Addr, err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, r.Timeout)
	defer cancel()
	err = f(ctx, conn)
	s, answered := status.FromError(err)
	switch {
	case err == nil || !answered:
		return err
	case s.Code() == codes.Unavailable && !r.TLS.encrypted() && speaksTLS(ctx, r.Addr):
		return fmt.Errorf("addr: %s speaks TLS: give tls-ca-file, with the authority of its certificate", r.Addr)
	case s.Code() == codes.Unavailable:
		return fmt.Errorf("addr: no node answers gRPC at %s (its port is 8081 unless set otherwise): %s", r.Addr, s.Message())
	case s.Code() == codes.DeadlineExceeded:
		return fmt.Errorf("addr: no answer from %s within %v (timeout)", r.Addr, r.Timeout)
	default:
		return errors.New(ownNames(s.Message()))
	}
}

// speaksTLS reports whether who listens at an address answers a TLS handshake. Nothing is sent to it after that.
func speaksTLS(ctx context.Context, addr string) bool {
	dialer := tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true}} // it is told of, and not trusted
	conn, err := dialer.DialContext(ctx, "tcp", addr)
	if err == nil {
		_ = conn.Close() // which has nothing to say
	}
	_, alert := errors.AsType[tls.AlertError](err)
	return err == nil || alert
}

// ownNames is a node's message with the field that it begins with named as commands name it: target.key as key, ttl_ns as ttl.
func ownNames(message string) string {
	field, rest, ok := strings.Cut(message, ": ")
	if !ok || strings.Contains(field, " ") {
		return message
	}
	return wire.FieldOf(field) + ": " + rest
}

// Private reports whether nobody on the way can read what is sent to the node.
func (r *Node) Private() bool { return r.TLS.encrypted() || netaddr.LoopbackHostPort(r.Addr) }
