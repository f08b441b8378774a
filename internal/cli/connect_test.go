package cli

import (
	"context"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/testkit"
)

// TestTokenFile: a token is one word, and travels in plain text to this host alone.
func TestTokenFile(t *testing.T) {
	one := testkit.WriteFile(t, "token", " secret \n")
	for _, c := range []struct {
		id         identity
		addr, want string
		says       string
	}{
		{identity{}, "192.0.2.1:1", "", ""},
		{identity{TokenFile: one}, "127.0.0.1:1", "secret", ""},
		{identity{TokenFile: one}, "[::1]:1", "secret", ""},
		{identity{TokenFile: one}, "[::ffff:127.0.0.1]:1", "secret", ""},
		{identity{TokenFile: one}, "localhost:1", "secret", ""},
		{identity{TokenFile: one}, "192.0.2.1:1", "", "in plain text: give tls-ca-file"},
		{identity{TokenFile: one}, "localhost.example:1", "", "in plain text"},
		{identity{TokenFile: one}, "127.0.0.1", "", "in plain text"}, // whatever that is
		{identity{TokenFile: one, CA: "ca.pem"}, "192.0.2.1:1", "secret", ""},
		{identity{TokenFile: testkit.WriteFile(t, "two", "a b")}, "127.0.0.1:1", "", "one token and nothing else"},
		{identity{TokenFile: testkit.WriteFile(t, "none", "\n")}, "127.0.0.1:1", "", "one token and nothing else"},
		{identity{TokenFile: "/none"}, "127.0.0.1:1", "", "no such file"},
	} {
		got, err := c.id.token(c.addr)
		expect.True(t, got == c.want && (err == nil) == (c.says == "") &&
			(err == nil || strings.HasPrefix(err.Error(), "token-file: ") && strings.Contains(err.Error(), c.says)),
			"%+v at %s: %q, %v", c.id, c.addr, got, err)
		expect.True(t, err == nil || !strings.Contains(err.Error(), "secret"), "the error tells the token: %v", err)
	}
}

// service refuses to be asked without a token, and then waits for its caller's patience to end.
type service struct {
	weirv1.UnimplementedLimiterServer
}

func (service) Status(ctx context.Context, _ *weirv1.StatusRequest) (*weirv1.StatusResponse, error) {
	if len(metadata.ValueFromIncomingContext(ctx, "authorization")) == 0 {
		return nil, status.Error(codes.Unauthenticated, "present a token")
	}
	<-ctx.Done()
	return nil, ctx.Err()
}

// TestConnect: what a node says is passed on, and what is not its word names the flag.
func TestConnect(t *testing.T) {
	addr := testkit.Serve(t, func(r grpc.ServiceRegistrar) { weirv1.RegisterLimiterServer(r, service{}) })
	ask := func(ctx context.Context, c *grpc.ClientConn) error {
		_, err := weirv1.NewLimiterClient(c).Status(ctx, &weirv1.StatusRequest{})
		return err
	}
	token := identity{TokenFile: testkit.WriteFile(t, "token", "secret")}
	for _, c := range []struct {
		node connection
		want string
	}{
		{connection{addr: addr}, "timeout: 0s is not a time"},
		{connection{addr: "127.0.0.1", timeout: time.Minute}, `addr: "127.0.0.1" is not HOST:PORT`},
		{connection{addr: ":1", timeout: time.Minute}, `addr: ":1" is not HOST:PORT`},
		{connection{addr: addr, timeout: time.Minute}, "present a token"},
		{connection{addr: addr, timeout: 50 * time.Millisecond, tls: token},
			"addr: no answer from " + addr + " within 50ms"},
		{connection{addr: "127.0.0.1:1", timeout: time.Minute}, "addr: no node answers gRPC at 127.0.0.1:1"},
		{connection{addr: "192.0.2.1:1", timeout: time.Minute, tls: token}, "token-file: "},
	} {
		c.node.output = "text"
		err := c.node.connect(t.Context(), ask)
		expect.True(t, err != nil && strings.HasPrefix(err.Error(), c.want), "%+v: %v, want %s", c.node, err, c.want)
	}
	here, away := (&connection{addr: addr}).private(), (&connection{addr: "192.0.2.1:1"}).private()
	expect.True(t, here && !away, "private: here %t, away %t", here, away)
}

// TestOwnNames: of what a node says, the field that it begins with has the name that commands have for it.
func TestOwnNames(t *testing.T) {
	for message, want := range map[string]string{
		"target.policy: is unknown": "policy: is unknown", "ttl_ns: is short": "ttl: is short",
		"target.limit.window_ns: is long": "limit.window: is long",
		"override.settings.limit: is 0":   "settings.limit: is 0", "id: is missing": "id: is missing",
		"reservation_id: is short": "reservation: is short", "request_id: is long": "request-id: is long",
		"present a token": "present a token", "grpc: received: 3": "grpc: received: 3",
	} {
		expect.Equal(t, ownNames(message), want, "%q", message)
	}
}
