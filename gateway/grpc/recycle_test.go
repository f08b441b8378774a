package grpc

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/scripted"
	"github.com/weirlimit/weir/test/testkit"
)

// TestCallsDoNotCross has many callers make calls that end in every way there is: memory that is used again must not bring one what
// belongs to another. Every check has a key and a cost of its own, so that its answer tells what it answers.
func TestCallsDoNotCross(t *testing.T) {
	const tenants = 20
	text := "policies:\n"
	for i := range tenants {
		text += fmt.Sprintf("  - {name: tenant%d, algorithm: token_bucket, limit: %d, window: 366d}\n", i, 1_000_000_000+i)
	}
	// The handler panics, or another error takes the place of an answer, before or after it is there.
	spoil := func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (out any, err error) {
		defer func() {
			if p := panics.From(recover()); p != nil {
				err = status.Error(codes.Internal, "panicked")
			}
		}()
		how := rand.N(40)
		if how == 0 {
			panic("before")
		}
		if how == 1 {
			return nil, status.Error(codes.Aborted, "before")
		}
		out, err = handle(ctx, req)
		switch how {
		case 2:
			panic("after")
		case 3:
			return out, status.Error(codes.Aborted, "after")
		case 4:
			return nil, status.Error(codes.Aborted, "after")
		}
		return out, err
	}
	nodes := trio(t, text, grpc.UnaryInterceptor(spoil), grpc.MaxSendMsgSize(20<<10))
	var costs, answers atomic.Int64
	var seen sync.Map
	call := func() {
		in := &weirv1.CheckRequest{Atomic: rand.N(4) == 0}
		n := 1 + rand.N(30)
		switch rand.N(20) {
		case 0:
			n = 1000 // too large an answer
		case 1, 2, 3, 4, 5, 6:
			n = 1
		}
		bad := -1
		if rand.N(10) == 0 {
			bad = rand.N(n)
		}
		var limits []int64
		for i := range n {
			cost := costs.Add(1)
			target := &weirv1.Target{Key: fmt.Sprint("key", cost)}
			limit := int64(1_000_000_000 + rand.N(tenants))
			if rand.N(2) == 0 {
				target.Policy = fmt.Sprint("tenant", limit-1_000_000_000)
			} else {
				limit += 1_000_000
				target.Namespace = fmt.Sprint("n", cost%7)
				target.Limit = &weirv1.Limit{Algorithm: weirv1.Algorithm_ALGORITHM_TOKEN_BUCKET, Limit: limit, WindowNs: int64(366 * 24 * time.Hour)}
			}
			if i == bad {
				target = &weirv1.Target{Policy: fmt.Sprint("nobody", cost), Key: "k"}
			}
			c := &weirv1.Check{Target: target, Cost: &cost}
			if rand.N(5) == 0 && !in.Atomic {
				c.RequestId = fmt.Sprint("id", cost)
			}
			limits = append(limits, limit)
			in.Checks = append(in.Checks, c)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		switch rand.N(4) {
		case 0:
			ctx, cancel = context.WithTimeout(ctx, rand.N(4*time.Millisecond))
			defer cancel()
		case 1:
			defer time.AfterFunc(rand.N(4*time.Millisecond), cancel).Stop()
		}
		out, err := nodes[rand.N(3)].Check(ctx, in)
		if err != nil {
			code := status.Code(err)
			seen.Store(code, true)
			if bad >= 0 && code == codes.NotFound {
				return
			}
			switch code {
			case codes.Canceled, codes.DeadlineExceeded, codes.Aborted, codes.Internal:
			case codes.ResourceExhausted:
				expect.True(t, n >= 100, "%v", err)
			default:
				t.Error(err)
			}
			return
		}
		if len(out.Results) != n {
			t.Errorf("%d answers to %d checks, of which %d is bad: %v", len(out.Results), n, bad, out)
			return
		}
		for i, r := range out.Results {
			d, c := r.GetDecision(), in.Checks[i]
			if i == bad && !d.GetFailedOpen() {
				e := r.GetError()
				expect.True(t, e.GetCode() == int32(codes.NotFound) &&
					strings.Contains(e.GetMessage(), c.Target.Policy), "%v: %v", c, r)
				continue
			}
			if d == nil || d.Limit != limits[i] && i != bad || d.Policy != cmp.Or(c.Target.Policy, "inline") || d.RequestId != "" && d.RequestId != c.RequestId {
				t.Errorf("%v: %v", c, r)
				return
			}
			if d.FailedOpen || d.FailedClosed {
				continue
			}
			if !d.Allowed || d.Granted != *c.Cost || d.Remaining != limits[i]-*c.Cost || d.ReservationId != "" || d.LeaseId != "" {
				t.Errorf("%v: %v", c, r)
				return
			}
			answers.Add(1)
		}
	}
	var callers sync.WaitGroup
	for range 48 {
		callers.Go(func() {
			for range 40 {
				call()
			}
		})
	}
	callers.Wait()
	for _, code := range []codes.Code{codes.Canceled, codes.DeadlineExceeded, codes.Aborted, codes.Internal, codes.NotFound, codes.ResourceExhausted} {
		_, ok := seen.Load(code)
		expect.True(t, ok, "no call ended with %v", code)
	}
	expect.True(t, answers.Load() >= 1000, "%d answers: too few to say anything", answers.Load())
}

// TestTracedCallsAreNotUsedAgain: gRPC's traces write the messages of calls out later.
func TestTracedCallsAreNotUsedAgain(t *testing.T) {
	for _, traced := range []bool{false, true} {
		s := NewServer(ServerConfig{Service: &scripted.Service{}})
		s.traced = traced
		c := s.calls.Get().(*call)
		c.grow(1)
		c.Results[0] = &weirv1.Result{}
		data := must.Value(wire.Codec().Marshal(c))(t)
		data.Free()
		kept := len(c.Results) > 0 && c.Results[0] != nil
		expect.True(t, kept == traced, "traced: %v, what was sent is there: %v", traced, kept)
	}
}

// measured is a service that notes the room that checks have.
type measured struct {
	scripted.Service
	most *atomic.Int64 // of one check
}

func (m *measured) CheckTo(_ context.Context, checks []limit.Check, _ limit.Denials, results []limit.Result) error {
	if len(checks) == 1 {
		m.most.Store(max(m.most.Load(), int64(cap(checks)), int64(cap(results))))
	}
	return nil
}

// TestFewChecksKeepLittle: a call of one check, which is not counted, does not keep the room that a thousand checks have had, and a call whose
// request has not come keeps none.
func TestFewChecksKeepLittle(t *testing.T) {
	noLeaks(t)
	m := &measured{most: new(atomic.Int64)}
	s := NewServer(ServerConfig{Service: m})
	c := weirv1.NewLimiterClient(testkit.Dial(t, serve(t, s.Register)))
	ask := func(n int) {
		in := new(weirv1.CheckRequest)
		for range n {
			in.Checks = append(in.Checks, named("p", "k", 1))
		}
		out, err := c.Check(t.Context(), in)
		must.True(t, err == nil && len(out.Results) == n, "%v %v", out, err)
	}
	for range 50 {
		ask(limit.MaxBatch)
		ask(1)
		waiting := s.calls.Get().(*call)
		must.True(t, waiting.in == nil && waiting.room == nil, "a call that waits for its request has room")
		s.calls.Put(waiting)
	}
	most := m.most.Load()
	expect.True(t, most <= 1, "one check had room for %d", most)
	for n := 1; n <= limit.MaxBatch; n++ {
		c := s.calls.Get().(*call)
		if c.grow(n); len(c.Results) != n || len(c.checks) != n || cap(c.answers) > 2*n || cap(c.results) > 2*n {
			t.Fatalf("%d checks have room for %d", n, cap(c.answers))
		}
		c.Recycle()
	}
}
