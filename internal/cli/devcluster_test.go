package cli

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"strings"
	"testing"

	"github.com/weirlimit/weir/internal/node"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

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
