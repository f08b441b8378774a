package client

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
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
			if err != nil || !d.FailedOpen {
				t.Errorf("%v: %+v, %v", code, d, err)
			}
		default:
			var e *Error
			if err == nil || errors.As(err, &e) || status.Code(err) != code {
				t.Errorf("%v: %+v, %v", code, d, err)
			}
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
		if d, err := c.Policy("five").Allow(t.Context(), key); err == nil || d.Allowed {
			t.Errorf("%s: %+v, %v", key, d, err)
		}
	}
	// A lease cannot be had from a node without leases: no fail policy hides that.
	if l, _, err := c.Policy("jobs").Acquire(t.Context(), "a"); l != nil || status.Code(err) != codes.Unimplemented {
		t.Errorf("%v, %v", l, err)
	}
	if err := c.Ready(t.Context()); status.Code(err) != codes.Unimplemented {
		t.Errorf("Ready: %v", err)
	}
}

// All nodes get their share, and when one dies the others take over without anybody noticing.
func TestFailover(t *testing.T) {
	a, b := newNode(nil), newNode(nil)
	addrA, stopA := serve(t, a)
	addrB, _ := serve(t, b)
	c := dial(t, addrA+", "+addrB, WithTimeout(time.Minute))
	ask := func() {
		t.Helper()
		if d, err := c.Policy("five").Peek(t.Context(), "a"); err != nil || !d.Allowed || d.FailedOpen {
			t.Errorf("%+v, %v", d, err)
		}
	}
	wait(t, "both nodes to be asked", func() bool {
		ask()
		return a.asked.Load() > 0 && b.asked.Load() > 0
	})

	// Some are on their way when it happens.
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 200 {
				ask()
			}
		})
	}
	stopA()
	wg.Wait()

	before := b.asked.Load()
	for range 10 {
		ask()
	}
	if n := b.asked.Load() - before; n != 10 {
		t.Errorf("%d questions of 10 went to the node that lives", n)
	}
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
	wait(t, "the node that hangs to be asked", func() bool {
		mu.Lock()
		ids = nil
		mu.Unlock()
		if d, err := c.Policy("five").Allow(t.Context(), "a"); err != nil || d.FailedOpen {
			t.Errorf("%+v, %v", d, err)
		}
		return a.asked.Load() > 0
	})
	if len(ids) != 2 || ids[0] != ids[1] || ids[0] == "" {
		t.Errorf("request ids %q, want the same one twice", ids)
	}
}

// A node that hangs costs a question half its time.
func TestHungNodeAmongOthers(t *testing.T) {
	var hung, met atomic.Bool
	a := newNode(func(ctx context.Context, _ *weirv1.CheckRequest) error {
		if hung.Load() {
			met.Store(true)
			<-ctx.Done()
		}
		return ctx.Err()
	})
	b := newNode(nil)
	addrA, _ := serve(t, a)
	addrB, _ := serve(t, b)
	c := dial(t, addrA+","+addrB, WithTimeout(4*time.Second))
	ask := func() {
		t.Helper()
		if d, err := c.Policy("five").Peek(t.Context(), "a"); err != nil || d.FailedOpen {
			t.Errorf("%+v, %v", d, err)
		}
	}
	wait(t, "both nodes to be connected", func() bool {
		ask()
		return a.asked.Load() > 0 && b.asked.Load() > 0
	})
	hung.Store(true)
	wait(t, "the node that hangs to be asked", func() bool {
		ask()
		return met.Load()
	})
}

// A cluster that hangs is answered by the fail policy in time.
func TestHungCluster(t *testing.T) {
	addr, _ := serve(t, newNode(func(ctx context.Context, _ *weirv1.CheckRequest) error {
		<-ctx.Done()
		return ctx.Err()
	}))
	c := dial(t, addr, WithTimeout(200*time.Millisecond), WithOnError(FailClosed))
	start := time.Now()
	d, err := c.Policy("five").Allow(t.Context(), "a")
	if err != nil || d.Allowed || !d.FailedClosed {
		t.Errorf("%+v, %v", d, err)
	}
	if took := time.Since(start); took < 200*time.Millisecond || took > 5*time.Second {
		t.Errorf("took %v", took)
	}
}

// Nobody at home: the fail policy answers, Ready says why, and once somebody is, questions reach them.
func TestNobodyThenSomebody(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	c := dial(t, addr, WithBreaker(2, 10*time.Millisecond))
	if d, err := c.Policy("five").Allow(t.Context(), "a"); err != nil || !d.FailedOpen {
		t.Errorf("%+v, %v", d, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := c.Ready(ctx); !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "refused") {
		t.Errorf("Ready: %v", err)
	}
	if _, err := c.Policy("five").Refund(t.Context(), "a", 1); !errors.Is(err, ErrUnavailable) {
		t.Errorf("Refund: %v", err)
	}

	l, err = net.Listen("tcp", addr)
	if err != nil {
		t.Skipf("the port was taken in the meantime: %v", err)
	}
	newNode(nil).serve(t, l)
	if err := c.Ready(t.Context()); err != nil {
		t.Errorf("Ready: %v", err)
	}
	wait(t, "the breaker to close", func() bool {
		d, err := c.Policy("five").Allow(t.Context(), "a")
		if err != nil {
			t.Error(err)
		}
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
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	for range 10 {
		if err := <-errs; err != ErrClosed {
			t.Errorf("got %v", err)
		}
	}
}

// A node that says that it is not ready is left alone.
func TestNotReady(t *testing.T) {
	a, b := newNode(nil), newNode(nil)
	addrA, _ := serve(t, a)
	addrB, _ := serve(t, b)
	c := dial(t, addrA+","+addrB, WithTimeout(time.Minute))
	ask := func() {
		t.Helper()
		if d, err := c.Policy("five").Peek(t.Context(), "a"); err != nil || d.FailedOpen {
			t.Errorf("%+v, %v", d, err)
		}
	}
	wait(t, "both nodes to be asked", func() bool {
		ask()
		return a.asked.Load() > 0 && b.asked.Load() > 0
	})
	a.ready.set(false)
	wait(t, "the node to be left alone", func() bool {
		before := a.asked.Load()
		for range 10 {
			ask()
		}
		return a.asked.Load() == before
	})
	a.ready.set(true)
	wait(t, "the node to be asked again", func() bool {
		before := a.asked.Load()
		ask()
		return a.asked.Load() > before
	})
}

// Everything at once, for the race detector.
func TestConcurrentUse(t *testing.T) {
	addr, _ := serve(t, newNode(nil))
	c := dial(t, addr, WithTimeout(time.Minute))
	five, jobs := c.Policy("five"), c.Policy("jobs")
	var admitted atomic.Int64
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 20 {
				d, err := five.Allow(t.Context(), "a")
				if err != nil {
					t.Error(err)
				}
				admitted.Add(d.Granted)
				l, _, err := jobs.Acquire(t.Context(), "a")
				if err != nil {
					t.Error(err)
				}
				if err := l.Release(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if n := admitted.Load(); n != 5 {
		t.Errorf("%d admitted, want 5", n)
	}
}

func TestDialAddress(t *testing.T) {
	for _, address := range []string{
		"", "localhost", ":8081", "localhost:", "localhost:0", "localhost:70000", "localhost:http", "a:1,", "a:1,,b:2", "a:1,b",
		"http://localhost:8080",
	} {
		c, err := Dial(t.Context(), address)
		var e *Error
		if !errors.As(err, &e) || !errors.Is(err, ErrInvalid) || e.Field != "address" {
			t.Errorf("%q: %v", address, err)
		}
		if c != nil {
			_ = c.Close()
		}
	}
	for _, address := range []string{"localhost:1", "[::1]:1", "a:1, b:2", "dns:///localhost:1", "unix:/no/such/socket"} {
		c, err := Dial(t.Context(), address)
		if err != nil {
			t.Errorf("%q: %v", address, err)
			continue
		}
		if err := c.Close(); err != nil {
			t.Errorf("%q: %v", address, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Dial(ctx, "localhost:1"); err != context.Canceled {
		t.Errorf("context that has ended: %v", err)
	}
}

// With TLS asked for, plain text is not spoken.
func TestTLS(t *testing.T) {
	addr, _ := serve(t, newNode(nil))
	c := dial(t, addr, WithTLS(&tls.Config{MinVersion: tls.VersionTLS12}))
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := c.Ready(ctx); !errors.Is(err, ErrUnavailable) {
		t.Errorf("Ready: %v", err)
	}
}

// overloadedNode rejects everything for want of room, as a node does before it reads anything.
type overloadedNode struct{ weirv1.LimiterServer }

var errOverload = status.Error(codes.ResourceExhausted, "there are 5 streams at a time already, as many as this node has memory for")

func (overloadedNode) CheckStream(weirv1.Limiter_CheckStreamServer) error { return errOverload }

func (overloadedNode) Check(context.Context, *weirv1.CheckRequest) (*weirv1.CheckResponse, error) {
	return nil, errOverload
}

func (overloadedNode) Acquire(context.Context, *weirv1.AcquireRequest) (*weirv1.Decision, error) {
	return nil, errOverload
}

// A node that has no room is no error of the caller's: another node is asked, and where there is none the fail policy answers.
func TestOverload(t *testing.T) {
	full := newNode(nil)
	full.LimiterServer, full.direct = overloadedNode{full.LimiterServer}, true
	addr, _ := serve(t, full)
	c := dial(t, addr, WithTimeout(time.Minute), WithBreaker(0, 0))
	p := c.Policy("five")
	if d, err := p.Allow(t.Context(), "a"); err != nil || !d.FailedOpen {
		t.Errorf("Allow: %+v, %v", d, err)
	}
	results, err := c.Check(t.Context(), []Check{{Policy: "five", Key: "a"}, {Policy: "five", Key: "b"}})
	if err != nil || !results[0].FailedOpen || !results[1].FailedOpen {
		t.Errorf("Check: %+v, %v", results, err)
	}
	if all, err := c.All(t.Context(), []Check{{Policy: "five", Key: "a"}}); err != nil || !all.Decisions[0].FailedOpen {
		t.Errorf("All: %+v, %v", all, err)
	}
	if _, d, err := c.Policy("jobs").Acquire(t.Context(), "a"); err != nil || !d.FailedOpen {
		t.Errorf("Acquire: %+v, %v", d, err)
	}
	if s := c.Stats(); !strings.Contains(s.Reason, "as many as this node has memory for") {
		t.Errorf("%+v", s)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}

	other, _ := serve(t, newNode(nil))
	c = dial(t, addr+","+other, WithTimeout(time.Minute))
	for i := range 20 {
		if d, err := c.Policy("five").Peek(t.Context(), "a"); err != nil || d.FailedOpen {
			t.Errorf("%d: %+v, %v", i, d, err)
		}
		if all, err := c.All(t.Context(), []Check{{Policy: "five", Key: fmt.Sprint(i)}}); err != nil || all.Decisions[0].FailedOpen {
			t.Errorf("%d: %+v, %v", i, all, err)
		}
	}
}
