package load

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// said is what a node answers to a key: its name.
var said = map[string]Answer{
	"allowed": {Allowed: true}, "refused": {}, "failed_open": {Allowed: true, FailedOpen: true},
	"failed_closed": {FailedClosed: true},
}

// limiter answers by key, to who presents the token.
type limiter struct {
	weirv1.UnimplementedLimiterServer
}

func (limiter) Check(ctx context.Context, r *weirv1.CheckRequest) (*weirv1.CheckResponse, error) {
	if got := metadata.ValueFromIncomingContext(ctx, "authorization"); len(got) != 1 || got[0] != "Bearer secret" {
		return nil, status.Error(codes.Unauthenticated, "who is it")
	}
	c := r.Checks[0]
	result := &weirv1.Result{Outcome: &weirv1.Result_Error{Error: &weirv1.Error{Message: "a mistake"}}}
	if a, ok := said[c.Target.Key]; ok && c.Target.Policy == "p" && c.GetCost() == 3 {
		result.Outcome = &weirv1.Result_Decision{Decision: &weirv1.Decision{Allowed: a.Allowed,
			FailedOpen: a.FailedOpen, FailedClosed: a.FailedClosed}}
	}
	return &weirv1.CheckResponse{Results: []*weirv1.Result{result}}, nil
}

func serveHTTP(t *testing.T) string {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		key := ""
		for k := range said {
			if string(body) == fmt.Sprintf(`{"policy":"p","key":%q,"cost":3}`, k) {
				key = k
			}
		}
		if err != nil || key == "" || r.URL.Path != "/v1/check" || r.Header.Get("Authorization") != "Bearer secret" {
			w.WriteHeader(http.StatusBadRequest)
			fmt.Fprint(w, `{"detail":"a mistake"}`)
			return
		}
		a := said[key]
		if !a.Allowed {
			w.WriteHeader(http.StatusTooManyRequests) // with the decision, all the same
		}
		fmt.Fprintf(w, `{"allowed":%t,"failed_open":%t,"failed_closed":%t}`, a.Allowed, a.FailedOpen, a.FailedClosed)
	}))
	t.Cleanup(srv.Close)
	return srv.Listener.Addr().String()
}

// TestAnswers: each protocol's answers mean the same, and carry the token.
func TestAnswers(t *testing.T) {
	for over, addr := range map[string]string{
		"grpc": testkit.Serve(t, func(r grpc.ServiceRegistrar) { weirv1.RegisterLimiterServer(r, limiter{}) }),
		"http": serveHTTP(t),
	} {
		askers, closeAll, err := Nodes{
			Over: over, Addrs: []string{addr, addr}, Connections: 1, Concurrency: 2, Timeout: 10 * time.Second,
			Target: &weirv1.Target{Policy: "p"}, Cost: 3, Token: func(string) (string, error) { return "secret", nil },
		}.Open()
		must.NoError(t, err, "%s", over)
		expect.True(t, len(askers) == 2, "%s: %d askers for 2 addresses", over, len(askers))
		for _, a := range askers {
			for key, want := range said {
				got, err := a(t.Context(), key)
				expect.True(t, got == want && err == nil, "%s: %s is %+v, %v", over, key, got, err)
			}
			got, err := a(t.Context(), "other")
			expect.True(t, err != nil && strings.Contains(err.Error(), "a mistake") && got == (Answer{}),
				"%s: a mistake is %+v, %v", over, got, err)
		}
		closeAll()
	}
}

// TestNobodyAnswers: what no node has answered is an error, and no decision, over each protocol.
func TestNobodyAnswers(t *testing.T) {
	l := must.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	addr := l.Addr().String()
	must.NoError(t, l.Close())
	for _, over := range []string{"grpc", "stream", "http", "resp"} {
		askers, closeAll, err := Nodes{
			Over: over, Addrs: []string{addr}, Connections: 1, Concurrency: 1, Timeout: 200 * time.Millisecond,
			Target: &weirv1.Target{Policy: "p"}, Cost: 1,
		}.Open()
		must.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		got, err := askers[0](ctx, "key")
		expect.True(t, err != nil && !got.Allowed && !errors.Is(err, context.DeadlineExceeded),
			"%s: %+v, %v", over, got, err)
		cancel()
		closeAll()
	}
}
