// Command llm-proxy stands in front of an OpenAI-compatible API and holds each caller to a budget of tokens that Weir
// keeps: it reserves before a call begins, extends the reservation while the answer streams, cuts the stream off when
// the budget is used up, and commits what was used.
//
// It is an example of how to use package client, not a product: it knows one path, and only streaming calls.
package main

import (
	"context"
	"errors"
	"flag"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/weirlimit/weir/client"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		slog.Error("proxy ended", "error", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	fs := flag.NewFlagSet("llm-proxy", flag.ContinueOnError)
	listen := fs.String("listen", "127.0.0.1:8088", "address to serve")
	upstream := fs.String("upstream", "",
		"base URL of the API, such as https://api.example.com; empty: a fake one of its own")
	weir := fs.String("weir", "127.0.0.1:8081", "gRPC address of a Weir node")
	policy := fs.String("policy", "tokens", "policy with prices for input and output")
	step := fs.Int64("step", 64, "tokens by which a reservation is extended")
	if err := fs.Parse(args); err != nil {
		return err
	}
	var answer http.RoundTripper = http.DefaultTransport
	base := *upstream
	if base == "" {
		base, answer = "http://fake", fakeTransport{chunk: 4, pause: 50 * time.Millisecond}
	}
	to, err := url.Parse(base)
	if err != nil {
		return err
	}
	c, err := client.Dial(ctx, *weir)
	if err != nil {
		return err
	}
	defer c.Close()
	server := &http.Server{
		Addr: *listen,
		Handler: &proxy{upstream: to, transport: answer, budget: c.Policy(*policy), step: *step,
			log: slog.Default()},
		ReadHeaderTimeout: 10 * time.Second,
	}
	stopped := make(chan error, 1)
	go func() {
		<-ctx.Done()
		drain, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		stopped <- server.Shutdown(drain)
	}()
	slog.Info("proxy listening", "address", *listen, "upstream", base)
	if err := server.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return <-stopped
}
