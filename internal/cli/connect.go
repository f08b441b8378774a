package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/netaddr"
	"github.com/weirlimit/weir/policy"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
)

// connection is how a command reaches a node over gRPC, and how it prints the answer, as its flags say. It makes one
// attempt, and does not look for other nodes.
type connection struct {
	addr    string // HOST:PORT
	timeout time.Duration
	tls     identity
	output  string // text or json, or id
	withID  bool   // output may be id
}

// connect calls f with a connection to the node, and turns f's error into one that names the flag to change.
func (r *connection) connect(ctx context.Context, f func(context.Context, *grpc.ClientConn) error) error {
	if err := checkOutput(r.output); err != nil && !(r.withID && r.output == "id") {
		return err
	}
	if r.timeout <= 0 {
		return fmt.Errorf("timeout: %v is not a time to wait", r.timeout)
	}
	// gRPC would use port 443 for an address without a port.
	if host, port, err := net.SplitHostPort(r.addr); err != nil || host == "" || port == "" {
		return fmt.Errorf("addr: %q is not HOST:PORT", r.addr)
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
		return fmt.Errorf("addr: %q is not HOST:PORT: %w", r.addr, err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	err = f(ctx, conn)
	s, answered := status.FromError(err)
	switch {
	case err == nil || !answered:
		return err
	case s.Code() == codes.Unavailable:
		with := "without TLS: give tls-ca-file if it speaks TLS"
		if r.tls.encrypted() {
			with = "with TLS: leave tls-ca-file out if it speaks plain text"
		}
		return fmt.Errorf("addr: no node answers gRPC at %s (its port is 8081 unless set otherwise) %s: %s", r.addr,
			with, s.Message())
	case s.Code() == codes.DeadlineExceeded:
		return fmt.Errorf("addr: no answer from %s within %v (timeout)", r.addr, r.timeout)
	default:
		return errors.New(ownNames(s.Message()))
	}
}

// ownNames replaces the field that a node's message begins with by the command's name for it: target.key by key, ttl_ns
// by ttl, reservation_id by reservation, request_id by request-id.
func ownNames(message string) string {
	field, rest, ok := strings.Cut(message, ": ")
	if !ok || strings.Contains(field, " ") {
		return message
	}
	field = strings.ReplaceAll(strings.Replace(wire.FieldOf(field), "reservation_id", "reservation", 1), "_", "-")
	return field + ": " + rest
}

// private reports whether the connection is encrypted or stays on this host.
func (r *connection) private() bool { return r.tls.encrypted() || netaddr.LoopbackHostPort(r.addr) }

// register adds the flags of a connection.
func (r *connection) register(fs *pflag.FlagSet) {
	fs.StringVar(&r.addr, "addr", "127.0.0.1:8081", "gRPC address of a node, HOST:PORT")
	fs.DurationVar(&r.timeout, "timeout", 2*time.Second, "longest time to wait for the answer")
	registerSettings(fs, &r.tls)
	if r.withID {
		fs.StringVarP(&r.output, "output", "o", "text",
			"how to print the answer: text, json, or id (the reservation_id alone)")
		return
	}
	fs.StringVarP(&r.output, "output", "o", "text", "how to print the answer: text or json")
}

// command returns a command that calls f with a connection to the node. f prints the answer to out.
func (r *connection) command(use, short string,
	f func(ctx context.Context, conn *grpc.ClientConn, args []string, out io.Writer) error) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Args: namedArgs, RunE: func(cmd *cobra.Command, args []string) error {
		return r.connect(cmd.Context(),
			func(ctx context.Context, conn *grpc.ClientConn) error { return f(ctx, conn, args, cmd.OutOrStdout()) })
	}}
	r.register(cmd.Flags())
	return cmd
}

// checkOutput returns what is wrong with an --output.
func checkOutput(output string) error {
	if output != "text" && output != "json" {
		return fmt.Errorf("output: %q is not one of text and json", output)
	}
	return nil
}

// targetFlags are the flags for what a command asks about: a policy, or an inline limit.
type targetFlags struct {
	Policy    string `flag:"policy" help:"policy to decide by"`
	Limit     string `flag:"limit" help:"limit to decide by in place of a policy, as 5/1m"`
	Algorithm string `flag:"algorithm" default:"sliding_log" help:"algorithm of --limit"`
	Namespace string `flag:"namespace" help:"namespace of --limit"`
}

// inline returns the inline limit; nil: a policy decides. Its errors name the setting.
func (f *targetFlags) inline(fs *pflag.FlagSet) (*algo.Limit, error) {
	switch {
	case f.Policy == "" && f.Limit == "":
		return nil, errors.New("policy: name a policy, or give a --limit such as 5/1m")
	case f.Policy != "" && f.Limit != "":
		return nil, errors.New("limit: goes without --policy")
	case f.Limit == "" && fs.Changed("algorithm"):
		return nil, errors.New("algorithm: goes with --limit; a policy has its own")
	case f.Limit == "":
		return nil, nil
	}
	a, ok := algo.ParseAlgorithm(f.Algorithm)
	if !ok {
		return nil, fmt.Errorf("algorithm: %q is not an algorithm, such as sliding_log or token_bucket", f.Algorithm)
	}
	n, window, err := policy.ParseRate(f.Limit)
	if err != nil {
		return nil, fmt.Errorf("limit: %w", err)
	}
	return &algo.Limit{Algorithm: a, Limit: n, Window: window}, nil
}

// message returns the target in the form of weir.v1. inline is the result of the method of that name.
func (f *targetFlags) message(inline *algo.Limit, key string) *weirv1.Target {
	t := &weirv1.Target{Policy: f.Policy, Namespace: f.Namespace, Key: key}
	if inline != nil {
		t.Limit = &weirv1.Limit{Algorithm: weirv1.Algorithm(inline.Algorithm), Limit: inline.Limit,
			WindowNs: int64(inline.Window)}
	}
	return t
}
