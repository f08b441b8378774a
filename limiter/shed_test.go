package limiter

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

const shedding = `policies:
  - {name: open, algorithm: fixed_window, limit: 10, window: 1m}
  - {name: closed, algorithm: fixed_window, limit: 10, window: 1m, on_error: closed}
  - {name: leases, algorithm: concurrency, limit: 3, ttl: 1m}
`

// gate is a wire that carries nothing until it is opened.
func gate() (w wire, open func()) {
	opened := make(chan struct{})
	return func(ctx context.Context, _ *testNode, _ ownership.Node, _ []*Op, deliver func()) {
		select {
		case <-opened:
			deliver()
		case <-ctx.Done():
		}
	}, func() { close(opened) }
}

func TestMaxInFlight(t *testing.T) {
	inBubble(t, 2, Config{Policies: policies(t, shedding), MaxInFlight: 3}, func(t *testing.T, c *testCluster) {
		n := c.nodes[0]
		w, open := gate()
		c.tamper(w)
		away := func(policy string, i int) limit.Check { return named(policy, c.owned(policy, 1, i), 1) }
		waiting := make(chan []limit.Result)
		go func() {
			got, err := n.Check(t.Context(), []limit.Check{away("closed", 0), away("closed", 1), away("closed", 2),
				away("closed", 3), away("open", 0)})
			expect.NoError(t, err)
			waiting <- got
		}()
		synctest.Wait()
		expect.Equal(t, n.Load(), LoadStats{InFlight: 3, MaxInFlight: 3, Full: 2})
		// Beyond the bound on_error answers at once. What is decided here has nothing to wait for.
		start := time.Now()
		got, err := n.Check(t.Context(),
			[]limit.Check{away("closed", 4), away("open", 1), named("closed", c.owned("closed", 0, 0), 1)})
		expect.True(t, err == nil && got[0].FailedClosed && got[1].FailedOpen && got[2].Allowed &&
			!got[2].FailedOpen && got[2].Remaining == 9, "%+v, %v", got, err)
		_, err = n.Release(t.Context(), onPolicy("leases", c.owned("leases", 1, 0)), "0000000000000001")
		wantError(t, err, limit.Unavailable, "")
		d := must.Value(n.CheckAll(t.Context(), []limit.Check{away("closed", 5), away("closed", 6)}))(t)
		expect.True(t, !d.Allowed, "%+v", d)
		expect.Equal(t, time.Since(start), 0, "answered after")
		open()
		for i, r := range <-waiting {
			expect.True(t, r.Err == nil && r.FailedClosed == (i == 3) && r.FailedOpen == (i == 4),
				"check %d of the batch: %+v", i, r)
		}
		synctest.Wait()
		expect.Equal(t, n.Load(), LoadStats{MaxInFlight: 3, Full: 7})
		// Nothing was charged for what was turned away.
		for i, want := range []int64{9, 9, 9, 10, 10, 10, 10} {
			expect.Equal(t, n.check(t, limit.Check{Target: away("closed", i).Target}).Remaining, want, "key %d left", i)
		}
		if d := n.check(t, limit.Check{Target: away("open", 1).Target}); d.Remaining != 10 {
			t.Errorf("%+v", d)
		}
	})
}

// TestSettlingIsNotTurnedAway: what an atomic check has charged is given back however much there is to do.
func TestSettlingIsNotTurnedAway(t *testing.T) {
	inBubble(t, 3, Config{Policies: policies(t, shedding), MaxInFlight: 2}, func(t *testing.T, c *testCluster) {
		n, charged, full := c.nodes[0], c.owned("closed", 1, 0), c.owned("closed", 2, 0)
		n.check(t, named("closed", full, 10))
		w, open := gate()
		settling := false
		c.tamper(func(ctx context.Context, from *testNode, to ownership.Node, ops []*Op, deliver func()) {
			switch {
			case ops[0].Kind == OpCheck: // those who take all the room
				w(ctx, from, to, ops, deliver)
				return
			case ops[0].Kind == OpSettle:
				settling = true
				expect.Equal(t, n.Load().InFlight, 3, "%+v", n.Load())
			default:
				n.load.places.Force(2) // the room goes while the atomic check is decided
				defer n.load.places.Release(1)
			}
			deliver()
		})
		d, err := n.CheckAll(t.Context(), []limit.Check{named("closed", charged, 4), named("closed", full, 1)})
		expect.True(t, err == nil && !d.Allowed, "%+v, %v", d, err)
		n.load.places.Release(2)
		open()
		if d := n.check(t, limit.Check{Target: onPolicy("closed", charged)}); d.Remaining != 10 || !settling {
			t.Errorf("%+v, settled %t", d, settling)
		}
	})
}

// untold is a context whose deadline is over and that has not been told yet.
type untold struct{ context.Context }

func (untold) Deadline() (time.Time, bool) { return time.Now(), true }

func TestExpiredCallsAreNotDecided(t *testing.T) {
	inBubble(t, 2, Config{Policies: policies(t, shedding)}, func(t *testing.T, c *testCluster) {
		n := c.nodes[0]
		over, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		<-over.Done()
		gone, cancel := context.WithCancel(t.Context())
		cancel()
		for _, test := range []struct {
			ctx  context.Context
			want error
		}{{over, context.DeadlineExceeded}, {untold{t.Context()}, context.DeadlineExceeded}, {gone, context.Canceled}} {
			for owner := range c.nodes {
				target := onPolicy("closed", c.owned("closed", owner, 0))
				ask := []limit.Check{{Target: target, Cost: 1}, {Target: target, Cost: 1}}
				before := n.Load().Late
				results, err := n.Check(test.ctx, ask)
				_, err2 := n.CheckAll(test.ctx, ask)
				_, err3 := n.Reserve(test.ctx, limit.Reserve{Target: target, Amount: units(1)})
				err4 := n.Reset(test.ctx, target)
				for i, err := range []error{err, err2, err3, err4} {
					expect.ErrorIs(t, err, test.want, "call %d", i)
				}
				expect.True(t, results == nil, "%+v", results)
				expect.Equal(t, n.Load().Late-before, 5, "counted") // the atomic check is of one state
				expect.Equal(t, n.check(t, limit.Check{Target: target}).Remaining, 10, "charged")
			}
		}
		// What is wrong with a call is said before.
		_, err := n.Check(gone, nil)
		expect.True(t, err != nil && !errors.Is(err, context.Canceled), "%v", err)
	})
}

// TestReceivedLate: an operation of another node is not decided when no caller of its message waits any more.
func TestReceivedLate(t *testing.T) {
	for wait, decided := range map[time.Duration]bool{100 * time.Millisecond: false, 300 * time.Millisecond: true} {
		inBubble(t, 1, Config{Policies: policies(t, shedding)}, func(t *testing.T, c *testCluster) {
			n, op := c.nodes[0], &Op{Kind: OpCheck, Check: new(named("closed", "k", 1))}
			c.see(n, func(int) ownership.Route { return ownership.Route{} })
			rest := n.Receive([]*Op{op})
			must.True(t, rest != nil, "nothing waits")
			done := make(chan struct{})
			go func() {
				ctx, cancel := context.WithTimeout(t.Context(), wait)
				defer cancel()
				rest(ctx)
				close(done)
			}()
			time.Sleep(200 * time.Millisecond) // in the bubble
			c.see(n, func(int) ownership.Route { return ownership.Route{Standing: ownership.Owned} })
			<-done
			out := &op.Outcome
			expect.True(t, op.Decision.Allowed == decided && (out.Unreachable || out.NotHolder != nil) != decided,
				"%+v", out)
			d := n.check(t, limit.Check{Target: onPolicy("closed", "k")})
			expect.True(t, d.Remaining == 9 == decided, "%+v", d)
		})
	}
}

// TestChargedAndTurnedAway: what was decided here and waits for a copy to have it counts as waiting. Beyond the bound
// it is answered by on_error, and stays charged: never the reverse.
func TestChargedAndTurnedAway(t *testing.T) {
	inBubble(t, 1, Config{Policies: policies(t, shedding), MaxInFlight: 1}, func(t *testing.T, c *testCluster) {
		n := c.nodes[0]
		op := &Op{Kind: OpCheck, Check: new(named("closed", "k", 1))}
		must.Equal(t, n.plan(n.table.Load(), op), nil)
		n.load.places.Force(1)
		op.Outcome.ticket = 7
		in := n.takeIn([]*Op{op})
		expect.True(t, len(in.ops) == 0 && n.Load().InFlight == 1 && op.Decision.FailedClosed && op.Outcome.ticket == 0,
			"%+v", op.Outcome)
		// Of one that gives back nobody says that nothing was done.
		op = &Op{Kind: OpRefund, Check: new(named("closed", "k", 1))}
		must.Equal(t, n.plan(n.table.Load(), op), nil)
		for ticket, done := range map[uint64]bool{0: false, 7: true} {
			op.Outcome = Outcome{ticket: ticket}
			n.turnAway(op)
			if err := op.Outcome.Err; err == nil || strings.Contains(err.Message, "nothing was done") == done {
				t.Errorf("turned away with the ticket %d: %v", ticket, err)
			}
		}
		// But a refusal that began a ban stands.
		op = &Op{Kind: OpCheck, Check: new(named("open", "k", 1))}
		must.Equal(t, n.plan(n.table.Load(), op), nil)
		op.Outcome.ticket, *op.Decision = 7, limit.Decision{Policy: "open", Banned: true, RetryAfter: time.Hour}
		in = n.takeIn([]*Op{op})
		expect.True(t, len(in.ops) == 0 && !op.Decision.Allowed && op.Decision.RetryAfter == time.Hour &&
			op.Outcome.ticket == 0, "%+v", op.Outcome)
	})
}

// TestOneCallerTakesNotAllPlacesOfAnOwner is the same attack by way of all other nodes at once: the owner tells their
// callers apart.
func TestOneCallerTakesNotAllPlacesOfAnOwner(t *testing.T) {
	inBubble(t, 1, Config{Policies: policies(t, shedding), MaxInFlight: 40}, func(t *testing.T, c *testCluster) {
		n := c.nodes[0]
		c.see(n, func(int) ownership.Route { return ownership.Route{} })
		receive := func(callers ...string) (rest func(context.Context), waiting int) {
			ops := make([]*Op, len(callers))
			for i, caller := range callers {
				ops[i] = &Op{Kind: OpCheck, Check: new(named("open", "k", 1)), Left: time.Second}
				ops[i].Caller = caller
			}
			rest = n.Receive(ops)
			for _, op := range ops {
				if !op.Outcome.Unreachable {
					waiting++
				}
			}
			return rest, waiting
		}
		var all []func(context.Context)
		greedy := 0
		for range 100 { // messages of several nodes
			rest, waiting := receive("greedy", "greedy")
			all = append(all, rest)
			greedy += waiting
		}
		expect.True(t, greedy >= 20 && greedy <= 30, "one caller has %d of 40 places", greedy)
		rest, waiting := receive("greedy", "greedy", "greedy", "modest", "modest", "greedy")
		all = append(all, rest)
		expect.Equal(t, waiting, 2, "of 2 operations of another caller wait")
		c.see(n, func(int) ownership.Route { return ownership.Route{Standing: ownership.Owned} })
		for _, rest := range all {
			rest(t.Context())
		}
		expect.Equal(t, n.Load().InFlight, 0)
	})
}

// TestOneCallerTakesNotAllPlaces is an attack: one caller has as many checks wait as it can. Those of another caller
// are decided, and not answered by on_error.
func TestOneCallerTakesNotAllPlaces(t *testing.T) {
	inBubble(t, 2, Config{Policies: policies(t, shedding), MaxInFlight: 40}, func(t *testing.T, c *testCluster) {
		n := c.nodes[0]
		w, open := gate()
		c.tamper(w)
		of := func(caller string, i int) limit.Check {
			check := named("open", c.owned("open", 1, i), 1)
			check.Caller = caller
			return check
		}
		var flood []limit.Check
		for i := range 100 {
			flood = append(flood, of("greedy", i))
		}
		answers := make(chan []limit.Result, 2)
		ask := func(checks []limit.Check) {
			got, err := n.Check(t.Context(), checks)
			expect.NoError(t, err)
			answers <- got
		}
		go ask(flood)
		synctest.Wait()
		if got := n.Load(); got.InFlight < 20 || got.InFlight > 30 {
			t.Errorf("one caller has %d of %d places", got.InFlight, got.MaxInFlight)
		}
		waiting := n.Load().InFlight
		go ask([]limit.Check{of("modest", 200), of("modest", 201), of("modest", 202)})
		synctest.Wait()
		got := n.Load()
		expect.Equal(t, got.InFlight, waiting+3, "another one has %d", got.InFlight-waiting)
		open()
		for range 2 {
			if got := <-answers; len(got) == 3 && (got[0].FailedOpen || got[1].FailedOpen || got[2].FailedOpen) {
				t.Errorf("another caller's checks were not decided: %+v", got)
			}
		}
		synctest.Wait()
		expect.Equal(t, n.Load().InFlight, 0)
	})
}
