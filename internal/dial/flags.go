package dial

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/pflag"
	"google.golang.org/grpc"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/policy"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// Flags are those that say which node a command asks, and how it prints the answer.
type Flags struct {
	Node
	Output string // text or json, or id
	WithID bool   // id is an output
}

// Register adds them.
func (r *Flags) Register(fs *pflag.FlagSet) {
	fs.StringVar(&r.Addr, "addr", "127.0.0.1:8081", "gRPC address of a node, HOST:PORT")
	fs.DurationVar(&r.Timeout, "timeout", 2*time.Second, "longest time to wait for the answer")
	r.TLS.Register(fs)
	if r.WithID {
		fs.StringVarP(&r.Output, "output", "o", "text", "how to print the answer: text, json, or id (the reservation_id alone)")
		return
	}
	fs.StringVarP(&r.Output, "output", "o", "text", "how to print the answer: text or json")
}

// Register adds the flags that say how a command proves itself.
func (c *Identity) Register(fs *pflag.FlagSet) {
	fs.StringVar(&c.CA, "tls-ca-file", "", "authorities (PEM) of the node's certificate; without any of --tls-…: plain text")
	fs.StringVar(&c.Cert, "tls-cert-file", "", "certificate (PEM) to present")
	fs.StringVar(&c.Key, "tls-key-file", "", "private key (PEM) of --tls-cert-file")
	fs.StringVar(&c.Name, "tls-server-name", "", "name in the node's certificate (default: the host of --addr)")
	fs.StringVar(&c.TokenFile, "token-file", "", "file with the token to present")
}

// Ask calls f with the node's service.
func (r *Flags) Ask(ctx context.Context, f func(context.Context, weirv1.LimiterClient) error) error {
	return r.Connect(ctx, func(ctx context.Context, conn *grpc.ClientConn) error { return f(ctx, weirv1.NewLimiterClient(conn)) })
}

// Connect calls f with a connection to the node.
func (r *Flags) Connect(ctx context.Context, f func(context.Context, *grpc.ClientConn) error) error {
	if err := CheckOutput(r.Output); err != nil && !(r.WithID && r.Output == "id") {
		return err
	}
	return r.Node.Connect(ctx, f)
}

// CheckOutput says what is wrong with an --output.
func CheckOutput(output string) error {
	if output != "text" && output != "json" {
		return fmt.Errorf("output: %q is not one of text and json", output)
	}
	return nil
}

// Target is what a command has decided about, by its flags: a policy, or a limit that it sends along.
type Target struct {
	Policy, Namespace, limit, algorithm string
}

// Register adds the flags.
func (f *Target) Register(fs *pflag.FlagSet) {
	fs.StringVar(&f.Policy, "policy", "", "policy to decide by")
	fs.StringVar(&f.limit, "limit", "", "limit to decide by in place of a policy, as 5/1m")
	fs.StringVar(&f.algorithm, "algorithm", "sliding_log", "algorithm of --limit")
	fs.StringVar(&f.Namespace, "namespace", "", "namespace of --limit")
}

// Inline returns the limit to send along, nil where a policy decides. An error names the setting that is to blame.
func (f *Target) Inline(fs *pflag.FlagSet) (*algo.Limit, error) {
	switch {
	case f.Policy == "" && f.limit == "":
		return nil, errors.New("policy: name a policy, or give a --limit such as 5/1m")
	case f.Policy != "" && f.limit != "":
		return nil, errors.New("limit: goes without --policy")
	case f.limit == "" && fs.Changed("algorithm"):
		return nil, errors.New("algorithm: goes with --limit; a policy has its own")
	case f.limit == "":
		return nil, nil
	}
	a, ok := algo.ParseAlgorithm(f.algorithm)
	if !ok {
		return nil, fmt.Errorf("algorithm: %q is not an algorithm, such as sliding_log or token_bucket", f.algorithm)
	}
	n, window, err := policy.ParseRate(f.limit)
	if err != nil {
		return nil, fmt.Errorf("limit: %w", err)
	}
	return &algo.Limit{Algorithm: a, Limit: n, Window: window}, nil
}

// Message is the target as weir.v1 has it. inline is what the method of that name returned.
func (f *Target) Message(inline *algo.Limit, key string) *weirv1.Target {
	t := &weirv1.Target{Policy: f.Policy, Namespace: f.Namespace, Key: key}
	if inline != nil {
		t.Limit = &weirv1.Limit{Algorithm: weirv1.Algorithm(inline.Algorithm), Limit: inline.Limit, WindowNs: int64(inline.Window)}
	}
	return t
}
