package dial

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/pflag"
	"google.golang.org/grpc"

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
