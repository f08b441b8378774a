package limiter

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestBadInput: every field, at every method that takes it: the error names the field and nothing is charged.
func TestBadInput(t *testing.T) {
	const text = `policies:
  - {name: p, algorithm: sliding_log, limit: 10, window: 1m}
  - {name: c, algorithm: concurrency, limit: 10, ttl: 1m}`
	const lease = "0123456789abcdef"
	inBubble(t, 2, Config{Policies: policies(t, text)}, func(t *testing.T, c *testCluster) {
		ctx := t.Context()
		inlineLimit := func(change func(*algo.Limit)) *algo.Limit {
			l := algo.Limit{Algorithm: algo.SlidingWindow, Limit: 10, Window: time.Minute}
			change(&l)
			return &l
		}
		along := func(change func(*algo.Limit)) limit.Target { return limit.Target{Limit: inlineLimit(change), Key: "k"} }
		// Of targets, at all methods.
		for _, test := range []struct {
			target limit.Target
			kind   limit.Kind
			field  string
		}{
			{limit.Target{Policy: "p"}, limit.Invalid, "key"},
			{onPolicy("p", strings.Repeat("k", limit.MaxKey+1)), limit.TooLarge, "key"},
			{onPolicy("p", "\xff"), limit.Invalid, "key"},
			{onPolicy("p", "k\xc3"), limit.Invalid, "key"},
			{limit.Target{Key: "k"}, limit.Invalid, "policy"},
			{onPolicy("p/q", "k"), limit.Invalid, "policy"},
			{onPolicy("inline/4/1", "k"), limit.Invalid, "policy"},
			{onPolicy(" ", "k"), limit.Invalid, "policy"},
			{onPolicy("\xff", "k"), limit.Invalid, "policy"},
			{limit.Target{Policy: strings.Repeat("p", 129), Key: "k"}, limit.Invalid, "policy"},
			{limit.Target{Policy: "p", Namespace: "n", Key: "k"}, limit.Invalid, "namespace"},
			{limit.Target{Policy: "p", Limit: inlineLimit(func(*algo.Limit) {}), Key: "k"}, limit.Invalid, "limit"},
			{limit.Target{Limit: inlineLimit(func(*algo.Limit) {}),
				Namespace: strings.Repeat("n", limit.MaxNamespace+1), Key: "k"}, limit.TooLarge, "namespace"},
			{limit.Target{Limit: inlineLimit(func(*algo.Limit) {}), Namespace: "\xff", Key: "k"}, limit.Invalid,
				"namespace"},
			{limit.Target{Limit: new(algo.Limit), Key: "k"}, limit.Invalid, "limit.algorithm"},
			{along(func(l *algo.Limit) { l.Algorithm = 8 }), limit.Invalid, "limit.algorithm"},
			{along(func(l *algo.Limit) { l.Limit = 0 }), limit.Invalid, "limit.limit"},
			{along(func(l *algo.Limit) { l.Limit = -2 }), limit.Invalid, "limit.limit"},
			{along(func(l *algo.Limit) { l.Limit = algo.MaxLimit + 1 }), limit.Invalid, "limit.limit"},
			{along(func(l *algo.Limit) { l.Algorithm, l.Limit, l.MaxLog = algo.SlidingLog, 1<<30, 1<<31 }),
				limit.Invalid, "limit.limit"},
			{along(func(l *algo.Limit) { l.Window = 0 }), limit.Invalid, "limit.window"},
			{along(func(l *algo.Limit) { l.Window = -1 }), limit.Invalid, "limit.window"},
			{along(func(l *algo.Limit) { l.Window = math.MaxInt64 }), limit.Invalid, "limit.window"},
			{along(func(l *algo.Limit) { l.Period = algo.Epoch + 1 }), limit.Invalid, "limit.period"},
			{along(func(l *algo.Limit) { l.Period, l.Window = algo.Day, 0 }), limit.Invalid, "limit.align"},
			{along(func(l *algo.Limit) { l.Slots = 101 }), limit.Invalid, "limit.slots"},
			{along(func(l *algo.Limit) { l.Slots = -1 }), limit.Invalid, "limit.slots"},
			{along(func(l *algo.Limit) { l.Capacity = 1 }), limit.Invalid, "limit.capacity"},
			{along(func(l *algo.Limit) { l.Zone = time.UTC }), limit.Invalid, "limit.time_zone"},
			{along(func(l *algo.Limit) { l.Algorithm, l.CountDenied = algo.TokenBucket, true }), limit.Invalid,
				"limit.count_denied"},
		} {
			n := c.nodes[0]
			n.checkError(t, limit.Check{Target: test.target, Cost: 1}, test.kind, test.field)
			n.checkError(t, limit.Check{Target: test.target}, test.kind, test.field) // a peek is checked as well
			wantError(t, expect.Err(n.Acquire(ctx, limit.Acquire{Target: test.target, Cost: 1})), test.kind, test.field)
			wantError(t, expect.Err(n.Renew(ctx, test.target, lease, 0)), test.kind, test.field)
			wantError(t, expect.Err(n.Release(ctx, test.target, lease)), test.kind, test.field)
			wantError(t, expect.Err(n.Refund(ctx, test.target, 1, "")), test.kind, test.field)
			wantError(t, n.Reset(ctx, test.target), test.kind, test.field)
			// In a batch the error names the element, and nothing of it is charged.
			_, err := n.Check(ctx, []limit.Check{named("p", "k", 1), {Target: test.target, Cost: 1},
				named("p", "k", 1)})
			wantError(t, err, test.kind, "checks[1]."+test.field)
		}

		p, leases := onPolicy("p", "k"), onPolicy("c", "k")
		for i, bad := range []struct {
			cost int64
			id   string
			ttl  time.Duration
			kind limit.Kind
			want string
		}{
			{-1, "", 0, limit.Invalid, "cost"},
			{math.MinInt64, "", 0, limit.Invalid, "cost"},
			{algo.MaxLimit + 1, "", 0, limit.Invalid, "cost"},
			{math.MaxInt64, "", 0, limit.Invalid, "cost"},
			{1, strings.Repeat("i", limit.MaxRequestID+1), 0, limit.TooLarge, "request_id"},
			{1, "\xff", 0, limit.Invalid, "request_id"},
			{1, "", -1, limit.Invalid, "ttl"},
			{1, "", time.Millisecond - 1, limit.Invalid, "ttl"},
			{1, "", math.MinInt64, limit.Invalid, "ttl"},
			{1, "", math.MaxInt64, limit.Invalid, "ttl"},
			{1, "", time.Minute + 1, limit.Invalid, "ttl"},
		} {
			n := c.nodes[i%2]
			if bad.want != "ttl" {
				n.checkError(t, limit.Check{Target: p, Cost: bad.cost, RequestID: bad.id}, bad.kind, bad.want)
				n.checkError(t, limit.Check{Target: p, Cost: bad.cost, RequestID: bad.id, Partial: true}, bad.kind,
					bad.want)
			}
			_, err := n.Acquire(ctx, limit.Acquire{Target: leases, Cost: bad.cost, RequestID: bad.id, TTL: bad.ttl})
			wantError(t, err, bad.kind, bad.want)
			if bad.want == "cost" {
				_, err = n.Refund(ctx, p, bad.cost, "")
				wantError(t, err, bad.kind, bad.want)
			}
			if bad.want == "ttl" {
				_, err = n.Renew(ctx, leases, lease, bad.ttl)
				wantError(t, err, bad.kind, bad.want)
			}
		}
		wantError(t, expect.Err(c.nodes[0].Acquire(ctx, limit.Acquire{Target: leases})), limit.Invalid, "cost")
		_, err := c.nodes[0].Refund(ctx, p, 0, "")
		wantError(t, err, limit.Invalid, "cost")
		for _, id := range []string{
			"", "0", "0000000000000000", "0123456789abcdeg", "0123456789abcdef0", "-123456789abcdef",
			"+123456789abcdef", "0x23456789abcdef", "\xff",
		} {
			wantError(t, expect.Err(c.nodes[0].Renew(ctx, leases, id, 0)), limit.Invalid, "lease_id")
			_, err = c.nodes[1].Release(ctx, leases, id)
			wantError(t, err, limit.Invalid, "lease_id")
		}
		wantError(t, expect.Err(c.nodes[0].Check(ctx, nil)), limit.Invalid, "checks")
		wantError(t, expect.Err(c.nodes[0].Check(ctx, make([]limit.Check, limit.MaxBatch+1))), limit.TooLarge, "checks")

		// What is just within the bounds is taken.
		q := limit.Check{Target: onPolicy("p", strings.Repeat("é", limit.MaxKey/2)), Cost: algo.MaxLimit,
			RequestID: strings.Repeat("i", limit.MaxRequestID)}
		expect.True(t, !c.nodes[0].check(t, q).Allowed, "admitted")
		q.Target = limit.Target{Limit: inlineLimit(func(*algo.Limit) {}),
			Namespace: strings.Repeat("n", limit.MaxNamespace), Key: "\x00"}
		c.nodes[1].check(t, q)

		for _, n := range c.nodes {
			for _, target := range []limit.Target{p, leases, along(func(*algo.Limit) {})} {
				expect.Equal(t, n.check(t, limit.Check{Target: target}).Remaining, 10, "something was charged")
			}
		}
		for _, n := range c.nodes {
			if n.Store().Keys != 0 {
				t.Errorf("%d states are left", n.Store().Keys)
			}
		}
	})
}

func TestErrorText(t *testing.T) {
	e := limit.NewError(limit.Invalid, "key", "is empty")
	expect.Equal(t, e.Error(), "key: is empty")
	expect.Equal(t, e.In(0, 1), e, "a batch of one is spoken of as one")
	expect.Equal(t, e.In(3, 4).Error(), "checks[3].key: is empty")
	expect.Equal(t, (limit.NewError(limit.Unavailable, "", "gone")).Error(), "gone")
}

// FuzzOp: whatever comes over a network is accepted or gets an error that names a field, and what is accepted is
// decided without a panic, whatever it does to the state that others left.
func FuzzOp(f *testing.F) {
	f.Add(uint8(1), "p", "k", "", int64(1), int64(0), "", "", uint8(0), int64(0), int64(0), int64(0), int32(0),
		uint8(0), true)
	f.Add(uint8(2), "c", "k", "", int64(1), int64(time.Second), "r", "", uint8(0), int64(0), int64(0), int64(0),
		int32(0), uint8(0), false)
	f.Add(uint8(3), "c", "k", "", int64(0), int64(0), "", "0123456789abcdef", uint8(0), int64(0), int64(0), int64(0),
		int32(0), uint8(0), false)
	f.Add(uint8(5), "", "k", "n", int64(3), int64(0), "", "", uint8(4), int64(10), int64(time.Minute), int64(0),
		int32(0), uint8(0), false)
	f.Add(uint8(6), "", "k", "n//", int64(0), int64(0), "", "", uint8(1), int64(10), int64(0), int64(0), int32(0),
		uint8(3), false)
	f.Add(uint8(1), "", "k", "", int64(1)<<53, int64(0), "", "", uint8(6), int64(1)<<53, int64(time.Hour), int64(1),
		int32(0), uint8(0), true)
	l := started(f, Config{HashKey: testKey, Store: NewStore(store.Config{MaxKeys: 1000, MaxBytes: 1 << 20}, true), Policies: policies(f, `policies:
  - {name: p, limits: [10/1s, 20/1m], algorithm: sliding_log}
  - {name: c, algorithm: concurrency, limit: 3, ttl: 30s}`)})
	f.Fuzz(func(t *testing.T, kind uint8, policy, key, namespace string, cost, ttl int64, id, lease string,
		algorithm uint8, lim, window, capacity int64, slots int32, period uint8, flag bool) {
		op := NewOp(OpKind(kind%9+1), limit.Check{
			Target: limit.Target{Policy: policy, Key: key, Namespace: namespace}, Cost: cost, Partial: flag,
			RequestID: id,
		}, Extra{LeaseID: lease, TTL: time.Duration(ttl)})
		copy(op.Reservation[:12], lease)
		op.Exact = flag
		if algorithm != 0 {
			op.Limit = &algo.Limit{Algorithm: algo.Algorithm(algorithm), Limit: lim, Window: time.Duration(window),
				Capacity: capacity,
				Slots:    slots, Period: algo.Period(period), CountDenied: flag, CarryDebt: flag, MaxDebt: ttl}
		}
		must.True(t, l.Receive([]*Op{op}) == nil, "handed on to nobody")
		p := op.partition
		must.True(t, p >= 0 && p < ring.Partitions, "partition %d", p)
		out := op.Outcome
		must.True(t, out.NotHolder == nil && !out.Unreachable, "%+v", out)
		if e := out.Err; e != nil {
			must.True(t, e.Message != "" && (e.Field != "" || e.Kind == limit.Unavailable) && e.Kind != 0, "%+v", e)
			return
		}
		d := op.Decision
		must.True(t, !d.Allowed || d.FailedOpen || cost <= 0 || !op.asks() || d.Granted >= 1 && d.Granted <= cost,
			"%s", fmt.Sprintf("%+v", d))
	})
}

// TestRefused: what is refused beforehand is not looked at, keeps its place, and charges nothing; whether or not the
// call is traced.
func TestRefused(t *testing.T) {
	for name, tracer := range map[string]Tracer{"untraced": nil, "traced": &spans{ended: make(map[string][]Traced)}} {
		t.Run(name, func(t *testing.T) {
			l := started(t, Config{Policies: policies(t, plain), Tracer: tracer})
			own := &limit.Error{Kind: limit.Denied, Field: "policy"}
			checks := []limit.Check{named("p", "", -1), named("p", "k", 1), named("p", "k", 1), named("p", "k", 1)}
			results := make([]limit.Result, len(checks))
			for i := range results {
				results[i] = limit.Result{Decision: limit.Decision{Granted: 99}, Err: own} // of another call
			}
			must.NoError(t, l.CheckTo(t.Context(), checks, limit.Denials{0: own, 2: own}, results))
			for i, want := range []int64{-1, 9, -1, 8} {
				r := results[i]
				refused := want < 0
				expect.True(t, (r.Err != nil) == refused && (!refused || r.Err == own && r.Granted == 0) &&
					(refused || r.Remaining == want), "check %d: %+v", i, r)
			}
			checks[3].Key = ""
			wantError(t, l.CheckTo(t.Context(), checks, limit.Denials{0: own}, results), limit.Invalid, "checks[3].key")
		})
	}
}
