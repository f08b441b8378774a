package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// remote is how a command asks a node.
type remote struct {
	addr    string
	timeout time.Duration
	output  string
	tls     clientTLS
}

func (r *remote) register(fs *pflag.FlagSet) {
	fs.StringVar(&r.addr, "addr", "127.0.0.1:8081", "gRPC address of a node, HOST:PORT")
	fs.DurationVar(&r.timeout, "timeout", 2*time.Second, "longest time to wait for the answer")
	r.tls.register(fs)
	fs.StringVarP(&r.output, "output", "o", "text", "how to print the answer: text or json")
}

// ask calls f with the node's service.
func (r *remote) ask(ctx context.Context, f func(context.Context, weirv1.LimiterClient) error) error {
	return r.connect(ctx, func(ctx context.Context, conn *grpc.ClientConn) error { return f(ctx, weirv1.NewLimiterClient(conn)) })
}

// connect calls f with a connection to the node.
func (r *remote) connect(ctx context.Context, f func(context.Context, *grpc.ClientConn) error) error {
	if r.output != "text" && r.output != "json" {
		return fmt.Errorf("--output: %q is not one of text and json", r.output)
	}
	if r.timeout <= 0 {
		return fmt.Errorf("--timeout: %v is not a time to wait", r.timeout)
	}
	// gRPC would take an address without a port for one with port 443.
	if host, port, err := net.SplitHostPort(r.addr); err != nil || host == "" || port == "" {
		return fmt.Errorf("--addr: %q is not HOST:PORT", r.addr)
	}
	creds, err := r.tls.transport()
	if err != nil {
		return err
	}
	if ctx, err = r.tls.with(ctx, r.addr); err != nil {
		return err
	}
	conn, err := grpc.NewClient("dns:///"+r.addr, grpc.WithTransportCredentials(creds), grpc.WithNoProxy())
	if err != nil {
		return fmt.Errorf("--addr: %q is not HOST:PORT: %w", r.addr, err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	err = f(ctx, conn)
	switch s := status.Convert(err); {
	case err == nil || errors.Is(err, errNegative):
		return err
	case s.Code() == codes.Unavailable:
		return fmt.Errorf("--addr: no node answers gRPC at %s (its port is 8081 unless set otherwise): %s", r.addr, s.Message())
	case s.Code() == codes.DeadlineExceeded:
		return fmt.Errorf("--addr: no answer from %s within %v (--timeout)", r.addr, r.timeout)
	default:
		return errors.New(s.Message())
	}
}
