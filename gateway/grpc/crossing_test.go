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

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/rpc/wire"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/scripted"
	"github.com/weirlimit/weir/test/testkit"
)

// halves is a view in which every second partition is another node's.
type halves struct{}

func (halves) Route(partition int) *ownership.Route {
	if partition%2 == 0 {
		return &ownership.Route{Standing: ownership.Owned}
	}
	return &ownership.Route{Standing: ownership.Elsewhere, Node: ownership.Node{Name: "other", Boot: 1}}
}

func (h halves) Await(_ context.Context, partition int, _ *ownership.Route) *ownership.Route {
	return h.Route(partition)
}

func (halves) AwaitProgress(context.Context, int, uint64, bool) (degraded, ok bool) {
	return true, true
}

// echo is the other node: its answer tells what was asked, after a while of its own. It refuses every third limit, for
// a moment.
type echo struct{ asked atomic.Int64 }

func (e *echo) Forward(_ context.Context, _ ownership.Node, ops []*limiter.Op) {
	e.asked.Add(int64(len(ops)))
	<-time.After(rand.N(2 * time.Millisecond))
	for _, op := range ops {
		d := limit.Decision{Allowed: true, Granted: op.Cost, Limit: op.Limit.Limit, Remaining: int64(len(op.Key))}
		if op.Limit.Limit%3 == 0 {
			d.Allowed, d.Granted, d.RetryAfter, d.RememberFor = false, 0, 3*time.Millisecond, 3*time.Millisecond
		}
		op.Outcome, *op.Decision = limiter.Outcome{}, d
	}
}

// TestAnswersDoNotCross has many callers, some of whom leave early, ask at once for few keys under many limits: memory
// that is used again must not bring one the answer to what another has asked.
func TestAnswersDoNotCross(t *testing.T) {
	noLeaks(t)
	other := new(echo)
	states := limiter.NewStore(store.Config{}, false)
	l := limiter.New(limiter.Config{Store: states, Ownership: halves{}, Peers: other})
	t.Cleanup(l.Close)
	for p := range ring.Partitions {
		states.Open(p)
	}
	c := client(t, ServerConfig{Service: l})

	const kinds = 30
	limitOf := func(n uint32) *weirv1.Limit {
		return &weirv1.Limit{Algorithm: weirv1.Algorithm_ALGORITHM_TOKEN_BUCKET, Limit: 1000 + int64(n), WindowNs: 1e6}
	}
	key := func() string { return strings.Repeat("k", 1+rand.N(60)) }
	type question struct {
		key    string
		target uint32
		cost   int64
	}
	// The other node's answers tell the length of the key, which is below what is left of any limit here.
	right := func(q question, allowed bool, granted, lim, remaining int64) bool {
		if lim != 1000+int64(q.target) || allowed && granted != q.cost || !allowed && granted != 0 {
			return false
		}
		if remaining < 100 {
			return remaining == int64(len(q.key)) && allowed == (lim%3 != 0)
		}
		return allowed
	}
	ask := func() []question {
		qs := make([]question, 1+rand.N(40))
		for i := range qs {
			qs[i] = question{key(), rand.Uint32N(kinds), 1 + rand.Int64N(5)}
		}
		return qs
	}
	var answers atomic.Int64
	stream := func(requests int, leaves bool) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		stream, err := c.CheckStream(ctx)
		if err != nil {
			t.Error(err)
			return
		}
		var mu sync.Mutex
		sent := make(map[uint64][]question)
		var writing sync.WaitGroup
		writing.Go(func() {
			for n := range uint64(requests) {
				in := &weirv1.CheckStreamRequest{Sequence: n, TimeoutMs: 10_000}
				if n%16 == 0 { // other numbers from now on
					for i := range uint32(kinds) {
						in.Define = append(in.Define,
							&weirv1.StreamTarget{Number: (i + uint32(n)) % kinds, Limit: limitOf(i), Namespace: "n"})
					}
				}
				qs := ask()
				for _, q := range qs {
					in.Targets = append(in.Targets, (q.target+uint32(n/16*16))%kinds)
					in.Keys = append(in.Keys, q.key...)
					in.KeyLengths = append(in.KeyLengths, uint32(len(q.key)))
					in.Costs = append(in.Costs, q.cost)
				}
				mu.Lock()
				sent[n] = qs
				mu.Unlock()
				if stream.Send(in) != nil {
					return
				}
				if n%8 == 7 {
					<-time.After(time.Millisecond)
				}
			}
		})
		defer writing.Wait()
		defer cancel()
		for left := requests; left > 0; {
			out, err := stream.Recv()
			if err != nil {
				t.Error(err)
				return
			}
			if out.Error != nil {
				t.Errorf("%v", out.Error)
				return
			}
			mu.Lock()
			qs := sent[out.Sequence]
			mu.Unlock()
			n := len(out.Checks)
			if n == 0 && !out.More {
				n = len(qs)
			}
			for i := range n {
				q := qs[wire.At(out.Checks, i, uint32(i))]
				if len(out.Checks) == 1 {
					q = qs[out.Checks[0]]
				}
				if !right(q, wire.At(out.Flags, i, 0)&1 != 0, wire.At(out.Granted, i, 0), wire.At(out.Limit, i, 0),
					wire.At(out.Remaining, i, 0)) {
					t.Errorf("%+v: %v", q, out)
					return
				}
				answers.Add(1)
			}
			if !out.More {
				left--
			}
			if leaves && left < requests/2 {
				return
			}
		}
	}
	var callers sync.WaitGroup
	for range 8 {
		callers.Go(func() { stream(100, false) })
		callers.Go(func() {
			for range 5 {
				stream(40, true)
			}
		})
	}
	callers.Wait()
	if asked := other.asked.Load(); asked < 1000 || answers.Load() < 10_000 {
		t.Errorf("%d answers, of which %d from the other node: too few to say anything", answers.Load(), asked)
	}
}

// TestCallsDoNotCross has many callers make calls that end in every way there is: memory that is used again must not
// bring one what belongs to another. Every check has a key and a cost of its own, so that its answer tells what it
// answers.
func TestCallsDoNotCross(t *testing.T) {
	const tenants = 20
	text := "policies:\n"
	for i := range tenants {
		text += fmt.Sprintf("  - {name: tenant%d, algorithm: token_bucket, limit: %d, window: 366d}\n", i,
			1_000_000_000+i)
	}
	// The handler panics, or another error takes the place of an answer, before or after it is there.
	spoil := func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (out any,
		err error) {
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
				target.Limit = &weirv1.Limit{Algorithm: weirv1.Algorithm_ALGORITHM_TOKEN_BUCKET, Limit: limit,
					WindowNs: int64(366 * 24 * time.Hour)}
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
			if d == nil || d.Limit != limits[i] && i != bad || d.Policy != cmp.Or(c.Target.Policy, "inline") ||
				d.RequestId != "" && d.RequestId != c.RequestId {
				t.Errorf("%v: %v", c, r)
				return
			}
			if d.FailedOpen || d.FailedClosed {
				continue
			}
			if !d.Allowed || d.Granted != *c.Cost || d.Remaining != limits[i]-*c.Cost || d.ReservationId != "" ||
				d.LeaseId != "" {
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
	for _, code := range []codes.Code{codes.Canceled, codes.DeadlineExceeded, codes.Aborted, codes.Internal,
		codes.NotFound, codes.ResourceExhausted} {
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
		expect.Equal(t, len(c.Results) > 0 && c.Results[0] != nil, traced, "what was sent is there")
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

// TestFewChecksKeepLittle: a call of one check, which is not counted, does not keep the room that a thousand checks
// have had, and a call whose request has not come keeps none.
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
