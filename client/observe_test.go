package client

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/testkit"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// A wrong address admits everything, and the log says so once, with the reason; every decision is counted and observed.
func TestWrongAddressIsNotSilent(t *testing.T) {
	l := must.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	addr := l.Addr().String()
	_ = l.Close()
	log := &testkit.Buffer{}
	var mu sync.Mutex
	var seen []Observed
	c := dial(t, addr, WithLogger(log.Logger()), WithObserver(func(o Observed) {
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, o)
	}))
	for range 20 {
		d, err := c.Policy("five").Allow(t.Context(), "a")
		must.True(t, err == nil && d.FailedOpen, "%+v, %v", d, err)
	}
	_, err := c.All(t.Context(), []Check{{Policy: "five", Key: "a"}, {Policy: "five", Key: "b"}})
	must.NoError(t, err)
	_, err = c.Check(t.Context(), []Check{{Policy: "five", Key: "a"}, {Policy: "five", Key: "b"}})
	must.NoError(t, err)
	text := log.String()
	expect.True(t, strings.Count(text, "no rate limit node answers") == 1 && strings.Contains(text, "refused") &&
		strings.Contains(text, "WARN"), "the log says %q", text)
	s := c.Stats()
	expect.True(t, s.FailedOpen == 24 && s.Unanswered == 24 && s.Admitted+s.Refused+s.FailedClosed+s.Errors == 0 &&
		s.Nodes == 1 && s.Ready == 0 && s.WithoutNode && strings.Contains(s.Reason, "refused"), "%+v", s)
	mu.Lock()
	defer mu.Unlock()
	last := seen[len(seen)-1]
	expect.True(t, len(seen) == 24 && last.Policy == "five" && last.Key == "b" && last.Cost == 1 &&
		last.Decision.FailedOpen, "%d observed, %+v", len(seen), last)
}

// What nodes answer is counted and observed, errors too.
func TestCounts(t *testing.T) {
	addr, _ := serve(t, newNode(nil))
	c := dial(t, addr, WithTimeout(time.Minute))
	five := c.Policy("five")
	for range 7 {
		_, err := five.Allow(t.Context(), "a")
		must.NoError(t, err)
	}
	_, err := c.Policy("missing").Allow(t.Context(), "a")
	must.ErrorIs(t, err, ErrNotFound)
	_, err = five.Allow(t.Context(), "")
	must.ErrorIs(t, err, ErrInvalid)
	s := c.Stats()
	want := (Counts{Admitted: 5, Refused: 2, Errors: 2})
	expect.True(t, s.Counts == want && !s.WithoutNode && s.Unanswered == 0 && s.Nodes == 1 && s.Ready == 1, "%+v", s)
}

// The log has a line for the beginning of an outage and one for its end, and none for each failure of a cluster that
// answers only sometimes.
func TestOutage(t *testing.T) {
	log := &testkit.Buffer{}
	o := outage{log: log.Logger(), onError: FailClosed}
	now := time.Minute
	for range 100 {
		o.failed(now, limit.NewError(ErrUnavailable, "", "why"))
		o.answered(now + time.Second)
		now += 2 * time.Second
	}
	text := log.String()
	expect.True(t, strings.Count(text, "\n") == 1 && strings.Contains(text, "reason=why") &&
		strings.Contains(text, "on_error=closed"), "the log says %q", text)
	o.answered(now - 2*time.Second + outageQuiet)
	text = log.String()
	expect.True(t, strings.Count(text, "\n") == 2 && strings.Contains(text, "answer again") &&
		strings.Contains(text, "answered_without_node=100"), "the log says %q", text)
	o.answered(now + time.Hour)
	o.failed(now+time.Hour, errors.New("another"))
	text = log.String()
	expect.True(t, strings.Count(text, "\n") == 3 && strings.Contains(text, "reason=another"), "the log says %q", text)
}

// A caller with the role check alone is ready. One who may not check, or whose credentials are wrong, is told so.
func TestReadySays(t *testing.T) {
	n := newNode(nil)
	denies := &denying{LimiterServer: n.LimiterServer}
	n.LimiterServer = denies
	addr, _ := serve(t, n)
	c := dial(t, addr, WithTimeout(time.Minute))
	for code, want := range map[codes.Code]error{codes.Unauthenticated: ErrUnauthenticated,
		codes.PermissionDenied: ErrDenied, codes.InvalidArgument: nil} {
		denies.check = status.Error(code, "so")
		expect.ErrorIs(t, c.Ready(t.Context()), want, "%v", code)
	}
}

// denying is a node that does not let its caller read, and answers checks with an error.
type denying struct {
	weirv1.LimiterServer
	check error
}

func (d *denying) Check(context.Context, *weirv1.CheckRequest) (*weirv1.CheckResponse, error) {
	return nil, d.check
}

func (d *denying) Status(context.Context, *weirv1.StatusRequest) (*weirv1.StatusResponse, error) {
	return nil, status.Error(codes.PermissionDenied, "read is needed")
}
