package client

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// One by one, each code of a node's answer becomes the client's error, or the fail policy's answer.
func TestCodes(t *testing.T) {
	var answer error
	addr, _ := serve(t, newNode(func(context.Context, *weirv1.CheckRequest) error { return answer }))
	c := dial(t, addr, WithBreaker(0, 0), WithTimeout(time.Minute))
	for code := codes.Code(1); code <= codes.Unauthenticated; code++ {
		answer = status.Error(code, "key: is odd")
		d, err := c.Policy("five").Allow(t.Context(), "a")
		switch code {
		case codes.InvalidArgument:
			wantError(t, err, ErrInvalid, "key", "is odd")
		case codes.NotFound:
			wantError(t, err, ErrNotFound, "key", "is odd")
		case codes.ResourceExhausted:
			wantError(t, err, ErrTooLarge, "key", "is odd")
		case codes.Unauthenticated:
			wantError(t, err, ErrUnauthenticated, "", "key: is odd")
		case codes.PermissionDenied:
			wantError(t, err, ErrDenied, "", "key: is odd")
		case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.Aborted, codes.Internal, codes.Unknown:
			expect.True(t, err == nil && d.FailedOpen, "%v: %+v, %v", code, d, err)
		default:
			var e *Error
			expect.True(t, err != nil && !errors.As(err, &e) && status.Code(err) == code, "%v: %+v, %v", code, d, err)
		}
	}
	for message, want := range map[string]string{
		"checks[3].limit.window: is odd": "checks[3].limit.window",
		"no field here":                  "",
		"Not: a field":                   "",
		": nothing":                      "",
		"grpc: message too large":        "",
	} {
		if field, rest := splitField(message); field != want || field == "" && rest != message {
			t.Errorf("%q: field %q, message %q", message, field, rest)
		}
	}
}

// odd answers what no node should.
type odd struct {
	weirv1.UnimplementedLimiterServer
}

func (odd) Check(_ context.Context, req *weirv1.CheckRequest) (*weirv1.CheckResponse, error) {
	if len(req.Checks) == 0 {
		return nil, status.Error(codes.Unimplemented, "no checks here")
	}
	if req.Checks[0].Target.Key == "none" {
		return &weirv1.CheckResponse{}, nil
	}
	return &weirv1.CheckResponse{Results: []*weirv1.Result{{}}}, nil
}

func TestOddAnswers(t *testing.T) {
	n := newNode(nil)
	n.LimiterServer = odd{}
	addr, _ := serve(t, n)
	c := dial(t, addr, WithTimeout(time.Minute))
	for _, key := range []string{"none", "empty"} {
		d, err := c.Policy("five").Allow(t.Context(), key)
		expect.True(t, err != nil && !d.Allowed, "%s: %+v, %v", key, d, err)
	}
	// A lease cannot be had from a node without leases: no fail policy hides that.
	l, _, err := c.Policy("jobs").Acquire(t.Context(), "a")
	expect.True(t, l == nil && status.Code(err) == codes.Unimplemented, "%v, %v", l, err)
	err = c.Ready(t.Context())
	expect.Equal(t, status.Code(err), codes.Unimplemented, "Ready: %v", err)
}

// All nodes get their share, and when one dies the others take over without anybody noticing.
func TestFailover(t *testing.T) {
	a, b := newNode(nil), newNode(nil)
	addrA, stopA := serve(t, a)
	addrB, _ := serve(t, b)
	c := dial(t, addrA+", "+addrB, WithTimeout(time.Minute))
	askAll(t, c, a, b)

	// Some are on their way when it happens.
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 200 {
				peek(t, c)
			}
		})
	}
	stopA()
	wg.Wait()

	before := b.asked.Load()
	for range 10 {
		peek(t, c)
	}
	expect.Equal(t, b.asked.Load()-before, 10, "questions of 10 went to the node that lives")
}

// A question whose node dies before it answers is asked again, under the same request id.
func TestRetryElsewhere(t *testing.T) {
	var mu sync.Mutex
	var ids []string
	record := func(req *weirv1.CheckRequest) {
		mu.Lock()
		defer mu.Unlock()
		ids = append(ids, req.Checks[0].RequestId)
	}
	arrived := make(chan struct{})
	var once sync.Once
	a := newNode(func(ctx context.Context, req *weirv1.CheckRequest) error {
		record(req)
		once.Do(func() { close(arrived) })
		<-ctx.Done() // until the node is stopped
		return ctx.Err()
	})
	b := newNode(func(_ context.Context, req *weirv1.CheckRequest) error {
		record(req)
		return nil
	})
	addrA, stopA := serve(t, a)
	addrB, _ := serve(t, b)
	// Should the first question go out before the second connection is up, the retry waits for it.
	c := dial(t, addrA+","+addrB, WithTimeout(time.Minute), WithRetry())
	go func() {
		<-arrived
		stopA()
	}()
	testkit.Eventually(t, "the node that hangs to be asked", func() bool {
		mu.Lock()
		ids = nil
		mu.Unlock()
		d, err := c.Policy("five").Allow(t.Context(), "a")
		expect.True(t, err == nil && !d.FailedOpen, "%+v, %v", d, err)
		return a.asked.Load() > 0
	})
	expect.True(t, len(ids) == 2 && ids[0] == ids[1] && ids[0] != "", "request ids %q, want the same one twice", ids)
}

// Nobody at home: the fail policy answers, Ready says why, and once somebody is, questions reach them.
func TestNobodyThenSomebody(t *testing.T) {
	l := must.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	addr := l.Addr().String()
	must.NoError(t, l.Close())
	c := dial(t, addr, WithBreaker(2, 10*time.Millisecond))
	d, err := c.Policy("five").Allow(t.Context(), "a")
	expect.True(t, err == nil && d.FailedOpen, "%+v, %v", d, err)
	ctx := testkit.Within(t, 100*time.Millisecond)
	err = c.Ready(ctx)
	expect.True(t, errors.Is(err, ErrUnavailable) && strings.Contains(err.Error(), "refused"), "Ready: %v", err)
	_, err = c.Policy("five").Refund(t.Context(), "a", 1)
	expect.ErrorIs(t, err, ErrUnavailable, "Refund")

	l, err = net.Listen("tcp", addr)
	if err != nil {
		t.Skipf("the port was taken in the meantime: %v", err)
	}
	newNode(nil).serve(t, l)
	expect.NoError(t, c.Ready(t.Context()), "Ready")
	testkit.Eventually(t, "the breaker to close", func() bool {
		d, err := c.Policy("five").Allow(t.Context(), "a")
		expect.NoError(t, err)
		return !d.FailedOpen
	})
}

// Calls in flight end when the client is closed.
func TestCloseEndsCalls(t *testing.T) {
	arrived := make(chan struct{}, 10)
	addr, _ := serve(t, newNode(func(ctx context.Context, _ *weirv1.CheckRequest) error {
		arrived <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	}))
	c := dial(t, addr, WithTimeout(time.Minute))
	errs := make(chan error)
	for range 10 {
		go func() {
			_, err := c.Policy("five").Allow(t.Context(), "a")
			errs <- err
		}()
	}
	for range 10 {
		<-arrived
	}
	expect.NoError(t, c.Close())
	for range 10 {
		expect.Equal(t, <-errs, ErrClosed)
	}
}

// A node that says that it is not ready is left alone.
func TestNotReady(t *testing.T) {
	all, addrs := several(t, 2)
	a, c := all[0], dial(t, strings.Join(addrs, ","), WithTimeout(time.Minute))
	askAll(t, c, all...)
	a.ready.set(false)
	testkit.Eventually(t, "the node to be left alone", func() bool {
		before := a.asked.Load()
		for range 10 {
			peek(t, c)
		}
		return a.asked.Load() == before
	})
	a.ready.set(true)
	testkit.Eventually(t, "the node to be asked again", func() bool {
		before := a.asked.Load()
		peek(t, c)
		return a.asked.Load() > before
	})
}

func TestDialAddress(t *testing.T) {
	for _, address := range []string{
		"", "localhost", ":8081", "localhost:", "localhost:0", "localhost:70000", "localhost:http", "a:1,", "a:1,,b:2",
		"a:1,b",
		"http://localhost:8080",
	} {
		c, err := Dial(t.Context(), address)
		var e *Error
		expect.True(t, errors.As(err, &e) && errors.Is(err, ErrInvalid) && e.Field == "address", "%q: %v", address, err)
		if c != nil {
			_ = c.Close()
		}
	}
	for _, address := range []string{"localhost:1", "[::1]:1", "a:1, b:2", "dns:///localhost:1",
		"unix:/no/such/socket"} {
		c, err := Dial(t.Context(), address)
		if err != nil {
			t.Errorf("%q: %v", address, err)
			continue
		}
		expect.NoError(t, c.Close(), "%q", address)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := Dial(ctx, "localhost:1")
	expect.Equal(t, err, context.Canceled, "context that has ended")
}

// With TLS asked for, plain text is not spoken.
func TestTLS(t *testing.T) {
	addr, _ := serve(t, newNode(nil))
	c := dial(t, addr, WithTLS(&tls.Config{MinVersion: tls.VersionTLS12}))
	ctx := testkit.Within(t, 200*time.Millisecond)
	expect.ErrorIs(t, c.Ready(ctx), ErrUnavailable, "Ready")
}

// overloadedNode rejects everything for want of room, as a node does before it reads anything.
type overloadedNode struct{ weirv1.LimiterServer }

var errOverload = status.Error(codes.ResourceExhausted,
	"there are 5 streams at a time already, as many as this node has memory for")

func (overloadedNode) CheckStream(weirv1.Limiter_CheckStreamServer) error { return errOverload }

func (overloadedNode) Check(context.Context, *weirv1.CheckRequest) (*weirv1.CheckResponse, error) {
	return nil, errOverload
}

func (overloadedNode) Acquire(context.Context, *weirv1.AcquireRequest) (*weirv1.Decision, error) {
	return nil, errOverload
}

// A node that has no room is no error of the caller's: another node is asked, and where there is none the fail policy
// answers.
func TestOverload(t *testing.T) {
	full := newNode(nil)
	full.LimiterServer, full.direct = overloadedNode{full.LimiterServer}, true
	addr, _ := serve(t, full)
	c := dial(t, addr, WithTimeout(time.Minute), WithBreaker(0, 0))
	p := c.Policy("five")
	d, err := p.Allow(t.Context(), "a")
	expect.True(t, err == nil && d.FailedOpen, "Allow: %+v, %v", d, err)
	results, err := c.Check(t.Context(), []Check{{Policy: "five", Key: "a"}, {Policy: "five", Key: "b"}})
	expect.True(t, err == nil && results[0].FailedOpen && results[1].FailedOpen, "Check: %+v, %v", results, err)
	all, err := c.All(t.Context(), []Check{{Policy: "five", Key: "a"}})
	expect.True(t, err == nil && all.Decisions[0].FailedOpen, "All: %+v, %v", all, err)
	_, d, err = c.Policy("jobs").Acquire(t.Context(), "a")
	expect.True(t, err == nil && d.FailedOpen, "Acquire: %+v, %v", d, err)
	s := c.Stats()
	expect.True(t, strings.Contains(s.Reason, "as many as this node has memory for"), "%+v", s)
	must.NoError(t, c.Close())

	other, _ := serve(t, newNode(nil))
	c = dial(t, addr+","+other, WithTimeout(time.Minute))
	for i := range 20 {
		d, err := c.Policy("five").Peek(t.Context(), "a")
		expect.True(t, err == nil && !d.FailedOpen, "%d: %+v, %v", i, d, err)
		all, err := c.All(t.Context(), []Check{{Policy: "five", Key: fmt.Sprint(i)}})
		expect.True(t, err == nil && !all.Decisions[0].FailedOpen, "%d: %+v, %v", i, all, err)
	}
}
