package cli

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net"
	"strings"
	"testing"

	"github.com/weirlimit/weir/internal/node"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// startDev runs a development cluster until stop, which returns all that it has printed. said is what it prints once it
// is up.
func startDev(t *testing.T, cfg devConfig) (said string, stop func() (all string, err error)) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	r, w := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		ended <- runDev(ctx, w, cfg)
		w.Close()
	}()
	var all strings.Builder
	buf := make([]byte, 1024)
	for !strings.Contains(all.String(), "Ctrl-C") {
		n, err := r.Read(buf)
		all.Write(buf[:n])
		if err != nil {
			t.Fatal(<-ended)
		}
	}
	return all.String(), func() (string, error) {
		cancel()
		_, _ = io.Copy(&all, r)
		return all.String(), <-ended
	}
}

// TestDev runs the development cluster until its context ends.
func TestDev(t *testing.T) {
	testkit.NoLeaks(t, "github.com/weirlimit/weir/")
	_, stop := startDev(t, devConfig{
		Command: "bin/weir", Nodes: 2, HTTP: node.PortAny, GRPC: node.PortAny, Logger: slog.New(slog.DiscardHandler),
		Policies: testkit.WriteFile(t, "policies.yaml",
			"policies:\n  - {name: leases, algorithm: concurrency, limit: 1, ttl: 1m}\n"),
	})
	said := must.Value(stop())(t)
	for _, want := range []string{"A cluster of 2 is up", "Policies: leases", `-d '{"limit":{"algorithm":"sliding_log"`,
		"  bin/weir check alice --limit 5/1m", "  bin/weir status ", "stopping"} {
		expect.True(t, strings.Contains(said, want), "lacks %q:\n%s", want, said)
	}
}

// TestCommand: the examples run the program as it was run.
func TestCommand(t *testing.T) {
	for name, want := range map[string]string{
		"weir": "weir", "bin/weir": "bin/weir", "/usr/bin/weir": "/usr/bin/weir", "./node": "./node", "node": "node",
		"/tmp/go-build123/b001/exe/node":         "go run ./cmd/node",
		"/root/.cache/go-build/a7/a7698c-d/node": "go run ./cmd/node",
		"/tmp/go-build123/b001/exe/weir":         "go run ./cmd/weir",
		"/root/.cache/go-build/a7/a7698c-d/weir": "go run ./cmd/weir",
	} {
		expect.Equal(t, command(name), want, "%s", name)
	}
}

// TestErrors: what a cluster cannot start with names the setting, and leaves nothing behind.
func TestErrors(t *testing.T) {
	testkit.NoLeaks(t, "github.com/weirlimit/weir/")
	busy := must.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer busy.Close()
	taken := node.Port(busy.Addr().(*net.TCPAddr).Port)
	for _, c := range []struct {
		want  string
		spoil func(*devConfig)
	}{
		{"http-port: ", func(c *devConfig) { c.HTTP = taken }},
		{"grpc-port: ", func(c *devConfig) { c.GRPC = taken }},
		{"policies: ", func(c *devConfig) { c.Policies = "/none" }},
	} {
		cfg := devConfig{Nodes: 2, HTTP: node.PortAny, GRPC: node.PortAny, Logger: slog.New(slog.DiscardHandler)}
		c.spoil(&cfg)
		var out bytes.Buffer
		err := runDev(t.Context(), &out, cfg)
		expect.True(t, err != nil && strings.HasPrefix(err.Error(), c.want) && out.Len() == 0,
			"%v, want %s; printed %s", err, c.want, &out)
	}
}

// TestAnyPort: with AnyPort a taken port is no error; and a cluster that is told to end before it is up just ends.
func TestAnyPort(t *testing.T) {
	testkit.NoLeaks(t, "github.com/weirlimit/weir/")
	busy := must.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer busy.Close()
	taken := node.Port(busy.Addr().(*net.TCPAddr).Port)
	ended, end := context.WithCancel(t.Context())
	end()
	var out bytes.Buffer
	expect.NoError(t, runDev(ended, &out, devConfig{Nodes: 3, HTTP: taken, GRPC: taken, AnyPort: true,
		Logger: slog.New(slog.DiscardHandler)}), "printed %s", &out)
}
