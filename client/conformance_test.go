package client

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// TestConformance holds both backends to the same behaviour.
func TestConformance(t *testing.T) {
	t.Run("local", func(t *testing.T) {
		conformance(t, func(t *testing.T, b *book) *Client {
			c := New(b, b.stop)
			t.Cleanup(func() {
				err := c.Close()
				expect.True(t, err == nil || err == ErrClosed, "Close: %v", err)
				expect.True(t, b.stopped, "Close left the service running")
			})
			return c
		})
	})
	t.Run("remote", func(t *testing.T) {
		conformance(t, func(t *testing.T, b *book) *Client {
			addr, _ := serve(t, nodeOf(b, nil))
			return dial(t, addr, WithTimeout(time.Minute))
		})
	})
}

func conformance(t *testing.T, open func(*testing.T, *book) *Client) {
	ctx := context.Background()
	t.Run("allow", func(t *testing.T) {
		c := open(t, newBook())
		five := c.Policy("five")
		d := must.Value(five.Allow(ctx, "a"))(t)
		expect.True(t, d.Allowed && d.Granted == 1 && d.Remaining == 4 && d.Limit == 5 && d.Policy == "five" &&
			d.Window == time.Hour, "Allow = %+v", d)
		d = must.Value(five.Peek(ctx, "a"))(t)
		expect.True(t, d.Allowed && d.Granted == 0 && d.Remaining == 4, "Peek = %+v", d)
		d = must.Value(five.AllowN(ctx, "a", 4))(t)
		expect.True(t, d.Allowed && d.Granted == 4 && d.Remaining == 0, "AllowN 4 = %+v", d)
		d = must.Value(five.Allow(ctx, "a"))(t)
		expect.True(t, !d.Allowed && d.Granted == 0 && d.RetryAfter > 0, "refused Allow = %+v", d)
		d = must.Value(five.AllowN(ctx, "b", 6))(t)
		expect.True(t, !d.Allowed && d.RetryAfter == Never, "AllowN above the limit = %+v", d)
	})

	t.Run("refund and reset", func(t *testing.T) {
		c := open(t, newBook())
		five := c.Policy("five")
		must.Value(five.AllowN(ctx, "a", 3))(t)
		n, err := five.Refund(ctx, "a", 2)
		expect.True(t, n == 2 && err == nil, "Refund = %d, %v", n, err)
		n, err = five.Refund(ctx, "a", 2)
		expect.True(t, n == 1 && err == nil, "Refund of more than there is = %d, %v", n, err)
		must.Value(five.AllowN(ctx, "a", 5))(t)
		expect.NoError(t, five.Reset(ctx, "a"))
		d := must.Value(five.Peek(ctx, "a"))(t)
		expect.Equal(t, d.Remaining, 5, "after Reset: %+v", d)
	})

	t.Run("every field", func(t *testing.T) {
		c := open(t, newBook())
		d := must.Value(c.Policy("full").Allow(ctx, "a"))(t)
		expect.True(t, reflect.DeepEqual(d, fullDecision), "got  %+v\nwant %+v", d, fullDecision)
	})

	t.Run("inline", func(t *testing.T) {
		b := newBook()
		c := open(t, b)
		berlin := must.Value(time.LoadLocation("Europe/Berlin"))(t)
		for _, inline := range []algo.Limit{
			{Algorithm: algo.SlidingWindow, Limit: 2, Window: time.Minute, Slots: 7, CountDenied: true},
			{Algorithm: algo.TokenBucket, Limit: 3, Capacity: 4, Window: time.Second},
			{Algorithm: algo.FixedWindow, Limit: Unlimited, Period: algo.Week, Zone: berlin},
		} {
			must.Value(c.Inline("api", inline).Allow(ctx, "a"))(t)
			want := limit.Target{Limit: &inline, Namespace: "api", Key: "a"}
			got := b.targets[len(b.targets)-1]
			if got.Limit != nil && got.Limit.Zone != nil && inline.Zone != nil &&
				got.Limit.Zone.String() == inline.Zone.String() {
				got.Limit.Zone = inline.Zone
			}
			expect.True(t, reflect.DeepEqual(got, want), "sent %+v of %+v, want %+v", got, got.Limit, want)
		}
		_, err := c.Inline("", algo.Limit{Algorithm: algo.SlidingLog}).Allow(ctx, "a")
		wantError(t, err, ErrInvalid, "limit.limit",
			"must be between 1 and 9007199254740992, or -1 for unlimited; it is 0")
	})

	t.Run("batch", func(t *testing.T) {
		c := open(t, newBook())
		results, err := c.Check(ctx, []Check{
			{Policy: "five", Key: "a"},
			{Policy: "missing", Key: "a"},
			{Policy: "five", Key: "a", Cost: 7, Partial: true},
			{Policy: "five", Key: "b", Peek: true},
			{Policy: "down", Key: "a", Cost: 3},
			{Limit: &algo.Limit{Algorithm: algo.SlidingLog, Limit: 1, Window: time.Second}, Namespace: "n", Key: "a",
				Cost: 2},
		})
		must.True(t, err == nil && len(results) == 6, "%d results, %v", len(results), err)
		r := results[0]
		expect.True(t, r.Err == nil && r.Allowed && r.Granted == 1, "0: %+v", r)
		wantError(t, results[1].Err, ErrNotFound, "policy", noPolicy)
		r = results[2]
		expect.True(t, r.Err == nil && r.Allowed && r.Granted == 4, "2: %+v", r)
		r = results[3]
		expect.True(t, r.Err == nil && r.Allowed && r.Granted == 0 && r.Remaining == 5, "3: %+v", r)
		r = results[4]
		expect.True(t, r.Err == nil && r.Allowed && r.FailedOpen && r.Granted == 3 && r.Policy == "down", "4: %+v", r)
		r = results[5]
		expect.True(t, r.Err == nil && !r.Allowed && r.RetryAfter == Never && r.Policy == "inline", "5: %+v", r)
		results, err = c.Check(ctx, nil)
		expect.True(t, len(results) == 0 && err == nil, "empty batch = %v, %v", results, err)
		_, err = c.Check(ctx, make([]Check, 1001))
		expect.ErrorIs(t, err, ErrTooLarge, "1001 checks")
		_, err = c.Check(ctx, []Check{{Policy: "missing", Key: "a"}, {Policy: "missing", Key: "b"}})
		wantError(t, err, ErrNotFound, "policy", noPolicy)
		_, err = c.Check(ctx, []Check{{Policy: "five"}})
		wantError(t, err, ErrInvalid, "key", "is empty or missing: name what is limited, such as a user or an address")
		results, err = c.Check(ctx, []Check{{Policy: "five", Key: "b"}, {Policy: "jobs", Key: "a"}})
		expect.True(t, err == nil && results[0].Err == nil && results[0].Allowed,
			"beside one that cannot be asked: %+v, %v", results, err)
		wantError(t, results[1].Err, ErrInvalid, "policy", noLease)
		_, err = c.Check(ctx, []Check{{Policy: "five", Key: "b"},
			{Limit: &algo.Limit{Algorithm: algo.SlidingLog}, Key: "b"}})
		expect.True(t, errors.Is(err, ErrInvalid) && strings.Contains(err.Error(), "checks[1].limit.limit"),
			"a limit that cannot be: %v", err)
		d := must.Value(c.Policy("five").Peek(ctx, "b"))(t)
		expect.Equal(t, d.Remaining, 4, "something was charged beside it: %+v", d)
	})

	t.Run("all", func(t *testing.T) {
		c := open(t, newBook())
		must.Value(c.Policy("queue").Allow(ctx, "a"))(t)
		all, err := c.All(ctx, []Check{{Policy: "five", Key: "a", Cost: 2}, {Policy: "queue", Key: "a"}})
		expect.True(t, err == nil && all.Allowed && all.Delay > 0 && len(all.Decisions) == 2 &&
			all.Decisions[0].Granted == 2 && all.Decisions[1].Delay == all.Delay, "%+v, %v", all, err)
		all, err = c.All(ctx, []Check{{Policy: "five", Key: "a"}, {Policy: "five", Key: "b", Cost: 6}})
		expect.True(t, err == nil && !all.Allowed && all.Decisions[0].Allowed && all.Decisions[1].RetryAfter == Never,
			"refused: %+v, %v", all, err)
		_, err = c.All(ctx, []Check{{Policy: "five", Key: "a"}, {Policy: "missing", Key: "a"}})
		wantError(t, err, ErrNotFound, "checks[1].policy", noPolicy)
		all, err = c.All(ctx, []Check{{Policy: "five", Key: "b"}, {Policy: "down", Key: "a", Cost: 3}})
		expect.True(t, err == nil && all.Allowed && all.Decisions[1].FailedOpen && all.Decisions[1].Granted == 3,
			"nobody to be asked: %+v, %v", all, err)
		for field, bad := range map[string]Check{
			"partial": {Policy: "five", Key: "a", Partial: true}, "cost": {Policy: "five", Key: "a", Peek: true},
			"request_id": {Policy: "five", Key: "a", RequestID: "r"}, "key": {Policy: "five"},
		} {
			var e *Error
			_, err := c.All(ctx, []Check{{Policy: "five", Key: "a"}, bad})
			expect.True(t, errors.As(err, &e) && e.Field == "checks[1]."+field && e.Kind == ErrInvalid,
				"%s: %v", field, err)
		}
		_, err = c.All(ctx, nil)
		expect.ErrorIs(t, err, ErrInvalid, "none")
		_, err = c.All(ctx, make([]Check, 1001))
		expect.ErrorIs(t, err, ErrTooLarge, "1001")
	})

	t.Run("reserve", func(t *testing.T) {
		b := newBook()
		c := open(t, b)
		five := c.Policy("five")
		r, d, err := five.ReserveN(ctx, "a", 4, time.Minute)
		must.True(t, err == nil && r != nil && d.Allowed && d.Granted == 4 && d.Remaining == 1 &&
			b.reserved[0].TTL == time.Minute, "%+v, %+v, %v", r, d, err)
		if r, d, err := five.Reserve(ctx, "a"); err != nil || r == nil || d.Granted != 1 {
			t.Errorf("Reserve: %+v, %+v, %v", r, d, err)
		}
		if r, d, err := five.ReserveN(ctx, "a", 2, 0); err != nil || r != nil || d.Allowed || d.RetryAfter <= 0 {
			t.Errorf("refused: %+v, %+v, %v", r, d, err)
		}
		for _, cost := range []int64{-1, 1<<53 + 1} {
			expect.ErrorIs(t, r.Commit(cost), ErrInvalid, "commit of %d", cost)
		}
		for _, settle := range []func() error{func() error { return r.Commit(3) }, func() error { return r.Commit(0) },
			r.Cancel} {
			expect.NoError(t, settle())
		}
		d = must.Value(five.Peek(ctx, "a"))(t)
		expect.Equal(t, d.Remaining, 1, "left")
		r, _, _ = five.ReserveN(ctx, "b", 4, 0)
		expect.NoError(t, r.Cancel())
		d = must.Value(five.Peek(ctx, "b"))(t)
		expect.Equal(t, d.Remaining, 5, "left after a cancel")
		r, _, err = c.Policy("missing").Reserve(ctx, "a")
		expect.True(t, r == nil && errors.Is(err, ErrNotFound), "%v, %v", r, err)
		r, d, err = c.Policy("down").ReserveN(ctx, "a", 3, 0)
		expect.True(t, err == nil && r != nil && d.FailedOpen && d.Granted == 3 && r.Commit(2) == nil &&
			r.Cancel() == nil, "nobody to be asked: %+v, %+v, %v", r, d, err)
		d, err = r.Extend(ctx, 5, 0)
		expect.True(t, err == nil && d.Allowed && d.Granted == 5, "an empty reservation: %+v, %v", d, err)
		var none *Reservation
		expect.True(t, none.Commit(1) == nil && none.Cancel() == nil && none.Units() == 0, "a nil reservation can fail")
	})

	t.Run("work", func(t *testing.T) {
		b := newBook()
		c := open(t, b)
		five := c.Policy("five")
		r, d, err := five.ReserveWork(ctx, "a", Work{Class: "m", TTL: time.Minute})
		must.True(t, err == nil && r != nil && d.Allowed && b.reserved[0].Estimate && b.reserved[0].Class == "m" &&
			b.reserved[0].Cost == 1 && b.reserved[0].TTL == time.Minute, "%+v, %+v, %v: %+v", r, d, err, b.reserved)
		d, err = r.Extend(ctx, 2, 30*time.Second)
		expect.True(t, err == nil && d.Allowed && r.Units() == 3 && b.extended[0].TTL == 30*time.Second,
			"%+v, %v", d, err)
		d, err = r.Extend(ctx, 3, 0)
		expect.True(t, err == nil && !d.Allowed && r.Units() == 3, "refused: %+v, %v", d, err)
		for _, bad := range []func() error{
			func() error { _, err := r.Extend(ctx, 0, 0); return err },
			func() error { _, err := r.Extend(ctx, -1, 0); return err },
			func() error { _, err := r.Extend(ctx, 1, time.Hour+1); return err },
			func() error { _, err := r.ExtendUsage(ctx, nil, 0); return err },
			func() error { _, err := r.CommitUsage(Usage{}); return err },
			func() error { _, _, err := five.ReserveWork(ctx, "a", Work{Cost: 1, Usage: Usage{"a": 1}}); return err },
			func() error { _, _, err := five.ReserveWork(ctx, "a", Work{Cost: -1}); return err },
			func() error { _, _, err := five.ReserveWork(ctx, "a", Work{TTL: 1}); return err },
			func() error { _, _, err := c.ReserveAll(ctx, nil); return err },
			func() error { _, err := five.Charge(ctx, "a", 0); return err },
			func() error { _, err := five.ChargeUsage(ctx, "a", nil, ""); return err },
		} {
			expect.ErrorIs(t, bad(), ErrInvalid)
		}
		got, err := r.CommitCost(7)
		expect.True(t, err == nil && got == (Settled{Excess: 4, Over: true}) && b.committed[0].Class == "m",
			"%+v, %v", got, err)
		_, err = r.Extend(ctx, 1, 0)
		expect.ErrorIs(t, err, ErrNotFound, "extended after it was settled")

		r, _, err = five.ReserveWork(ctx, "u", Work{Usage: Usage{"input": 2}})
		expect.True(t, err == nil && b.reserved[2].Usage["input"] == 2 && !b.reserved[2].Estimate &&
			b.reserved[2].Cost == 0, "%+v, %v", b.reserved, err)
		_, err = r.CommitUsage(Usage{"output": 3})
		expect.True(t, err == nil && b.committed[1].Usage["output"] == 3, "%+v, %v", b.committed, err)

		d, err = five.ChargeWithID(ctx, "a", 9, "id")
		expect.True(t, err == nil && !d.Allowed && d.Granted > 0 && b.charges[0].Cost == 9 &&
			b.charges[0].RequestID == "id", "%+v, %v: %+v", d, err, b.charges)
		_, err = five.ChargeUsage(ctx, "a", Usage{"input": 4}, "")
		expect.True(t, err == nil && b.charges[1].Usage["input"] == 4, "%v: %+v", err, b.charges)
		_, err = c.Policy("down").Charge(ctx, "a", 1)
		expect.ErrorIs(t, err, ErrUnavailable, "a charge that nobody was asked for")

		rs, all, err := c.ReserveAll(ctx, []Claim{{five, "x", Work{Cost: 2}}, {five, "y", Work{Cost: 3}}})
		must.True(t, err == nil && all.Allowed && len(rs) == 2 && rs[0].Units() == 2 && rs[1].Units() == 3,
			"%+v, %+v, %v", rs, all, err)
		for _, r := range rs {
			expect.NoError(t, r.Cancel())
		}
		rs, _, err = c.ReserveAll(ctx, []Claim{{five, "x", Work{Cost: 2}}, {five, "y", Work{Cost: 3}}})
		must.NoError(t, err)
		costs := []Cost{{Reservation: rs[0], Units: 1}, {Reservation: rs[1], Units: 7}, {},
			{Reservation: rs[0], Units: 2}}
		for i, want := range [][]SettledResult{{{Settled: Settled{Refunded: 1}},
			{Settled: Settled{Excess: 4, Over: true}}, {}, {}}, make([]SettledResult, 4)} {
			got, err := c.CommitEach(costs)
			expect.True(t, err == nil && slices.Equal(got, want), "%d: %+v, %v", i, got, err)
		}
		_, err = c.CommitEach([]Cost{{Reservation: rs[0], Units: -1}})
		expect.ErrorIs(t, err, ErrInvalid, "a negative cost")
		_, err = c.CommitEach(make([]Cost, 1001))
		expect.ErrorIs(t, err, ErrTooLarge, "too many costs")
		_, _, err = c.ReserveAll(ctx, make([]Claim, 1001))
		expect.ErrorIs(t, err, ErrTooLarge, "too many claims")
		_, _, err = c.ReserveAll(ctx, []Claim{{five, "x", Work{}}, {five, "", Work{}}})
		bad, _ := errors.AsType[*Error](err)
		expect.True(t, bad != nil && bad.Field == "reserves[1].key", "%v", err)
		rs, all, err = c.ReserveAll(ctx, []Claim{{five, "x", Work{Cost: 2}}, {five, "y", Work{Cost: 6}}})
		expect.True(t, err == nil && !all.Allowed && rs == nil && all.Decisions[0].Allowed && !all.Decisions[1].Allowed,
			"%+v, %+v, %v", rs, all, err)
		rs, all, err = c.ReserveAll(ctx, []Claim{{c.Policy("down"), "x", Work{Cost: 2}}})
		expect.True(t, err == nil && all.Allowed && all.Decisions[0].FailedOpen && len(rs) == 1 &&
			rs[0].Commit(1) == nil, "nobody to be asked: %+v, %+v, %v", rs, all, err)
		for _, ttl := range []time.Duration{-1, 1, time.Hour + 1} {
			_, _, err := five.ReserveN(ctx, "a", 1, ttl)
			expect.ErrorIs(t, err, ErrInvalid, "ttl %v", ttl)
		}
	})

	t.Run("request id", func(t *testing.T) {
		c := open(t, newBook())
		for range 2 {
			results, err := c.Check(ctx, []Check{{Policy: "five", Key: "a", Cost: 2, RequestID: "r1"}})
			expect.True(t, err == nil && results[0].Granted == 2 && results[0].Remaining == 3, "%+v, %v", results, err)
		}
	})

	t.Run("mistakes are not sent", func(t *testing.T) {
		b := newBook()
		c := open(t, b)
		long := strings.Repeat("x", 1025)
		for _, tt := range []struct {
			name  string
			check Check
			kind  error
			field string
		}{
			{"no key", Check{Policy: "five"}, ErrInvalid, "key"},
			{"long key", Check{Policy: "five", Key: long}, ErrTooLarge, "key"},
			{"key that is not UTF-8", Check{Policy: "five", Key: "\xff"}, ErrInvalid, "key"},
			{"no policy", Check{Key: "a"}, ErrInvalid, "policy"},
			{"policy with a slash", Check{Policy: "a/b", Key: "a"}, ErrInvalid, "policy"},
			{"long policy", Check{Policy: long[:129], Key: "a"}, ErrInvalid, "policy"},
			{"policy and limit", Check{Policy: "five", Limit: &algo.Limit{}, Key: "a"}, ErrInvalid, "limit"},
			{"policy and namespace", Check{Policy: "five", Namespace: "n", Key: "a"}, ErrInvalid, "namespace"},
			{"long namespace", Check{Limit: &algo.Limit{}, Namespace: long[:257], Key: "a"}, ErrTooLarge, "namespace"},
			{"namespace that is not UTF-8", Check{Limit: &algo.Limit{}, Namespace: "\xff", Key: "a"}, ErrInvalid,
				"namespace"},
			{"negative cost", Check{Policy: "five", Key: "a", Cost: -1}, ErrInvalid, "cost"},
			{"huge cost", Check{Policy: "five", Key: "a", Cost: 1<<53 + 1}, ErrInvalid, "cost"},
			{"peek with a cost", Check{Policy: "five", Key: "a", Peek: true, Cost: 1}, ErrInvalid, "cost"},
			{"long request id", Check{Policy: "five", Key: "a", RequestID: long[:129]}, ErrTooLarge, "request_id"},
			{"request id that is not UTF-8", Check{Policy: "five", Key: "a", RequestID: "\xff"}, ErrInvalid,
				"request_id"},
		} {
			_, err := c.Check(ctx, []Check{{Policy: "five", Key: "a"}, tt.check})
			var e *Error
			expect.True(t, errors.As(err, &e) && errors.Is(err, tt.kind) && e.Field == "checks[1]."+tt.field,
				"%s: %v", tt.name, err)
		}
		five := c.Policy("five")
		for name, call := range map[string]func(key string, n int64) error{
			"AllowN": func(key string, n int64) error { _, err := five.AllowN(ctx, key, n); return err },
			"WaitN":  func(key string, n int64) error { _, err := five.WaitN(ctx, key, n); return err },
			"Refund": func(key string, n int64) error { _, err := five.Refund(ctx, key, n); return err },
			"AcquireN": func(key string, n int64) error {
				_, _, err := five.AcquireN(ctx, key, n, 0)
				return err
			},
			"ReserveN": func(key string, n int64) error {
				_, _, err := five.ReserveN(ctx, key, n, 0)
				return err
			},
		} {
			wantError(t, call("", 1), ErrInvalid, "key",
				"is empty or missing: name what is limited, such as a user or an address")
			if err := call("a", -1); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "cost") {
				t.Errorf("%s of -1: %v", name, err)
			}
		}
		wantError(t, five.Reset(ctx, ""), ErrInvalid, "key",
			"is empty or missing: name what is limited, such as a user or an address")
		expect.Equal(t, len(b.targets), 0, "questions were sent")
		for _, ttl := range []time.Duration{-1, 1, 367 * 24 * time.Hour} { // which nodes judge
			_, _, err := c.Policy("jobs").AcquireN(ctx, "a", 1, ttl)
			expect.ErrorIs(t, err, ErrInvalid, "ttl %v", ttl)
		}
	})

	t.Run("errors", func(t *testing.T) {
		c := open(t, newBook())
		_, err := c.Policy("missing").Allow(ctx, "a")
		wantError(t, err, ErrNotFound, "policy", noPolicy)
		_, err = c.Policy("missing").Wait(ctx, "a")
		wantError(t, err, ErrNotFound, "policy", noPolicy)
		_, _, err = c.Policy("missing").Acquire(ctx, "a")
		wantError(t, err, ErrNotFound, "policy", noPolicy)
		_, err = c.Policy("jobs").Allow(ctx, "a")
		wantError(t, err, ErrInvalid, "policy", noLease)
		_, err = c.Policy("down").Refund(ctx, "a", 1)
		wantError(t, err, ErrUnavailable, "", "the owner cannot be reached")
		wantError(t, c.Policy("down").Reset(ctx, "a"), ErrUnavailable, "", "the owner cannot be reached")
		d := must.Value(c.Policy("down").Allow(ctx, "a"))(t)
		expect.True(t, d.Allowed && d.FailedOpen && d.Granted == 1, "nobody to ask: %+v", d)
		l, d, err := c.Policy("down").Acquire(ctx, "a")
		expect.True(t, l != nil && d.FailedOpen && err == nil, "nobody to ask for a lease: %v, %+v, %v", l, d, err)
		expect.NoError(t, l.Release(), "release of an empty lease")
		ended, cancel := context.WithCancel(ctx)
		cancel()
		_, err = c.Policy("five").Allow(ended, "a")
		expect.ErrorIs(t, err, context.Canceled, "context that has ended")
	})

	t.Run("lease", func(t *testing.T) {
		b := newBook()
		c := open(t, b)
		jobs := c.Policy("jobs")
		l, d, err := jobs.Acquire(ctx, "a")
		must.True(t, err == nil && l != nil && d.Allowed && d.Granted == 1, "Acquire = %v, %+v, %v", l, d, err)
		if l, d, err := jobs.Acquire(ctx, "a"); l != nil || d.Allowed || err != nil || d.RetryAfter <= 0 {
			t.Errorf("second Acquire = %v, %+v, %v", l, d, err)
		}
		for range 2 {
			expect.NoError(t, l.Release(), "Release")
		}
		select {
		case <-l.Lost():
			t.Error("a released lease is lost")
		default:
		}

		// A short life makes it renew itself soon; on a busy machine it may be over before that, and another try is
		// due.
		short := func() *Lease {
			l, _, err := jobs.AcquireN(ctx, "b", 1, 100*time.Millisecond)
			must.True(t, err == nil && l != nil, "%v %v", l, err)
			return l
		}
		l = short()
		testkit.Eventually(t, "a renewal", func() bool {
			if isLost(l) {
				l = short()
			}
			b.mu.Lock()
			defer b.mu.Unlock()
			return b.renewed > 0
		})
		must.NoError(t, b.Limiter.Reset(ctx, limit.Target{Policy: "jobs", Key: "b"})) // which ends the lease
		<-l.Lost()
		expect.NoError(t, l.Release(), "Release of a lost lease")
	})

	t.Run("ready", func(t *testing.T) {
		c := open(t, newBook())
		expect.NoError(t, c.Ready(ctx))
	})

	t.Run("closed", func(t *testing.T) {
		b := newBook()
		c := open(t, b)
		l, _, err := c.Policy("jobs").Acquire(ctx, "a")
		must.NoError(t, err)
		expect.NoError(t, c.Close())
		<-l.Lost()
		five := c.Policy("five")
		for name, call := range map[string]func() error{
			"Allow":   func() error { _, err := five.Allow(ctx, "a"); return err },
			"Wait":    func() error { _, err := five.Wait(ctx, "a"); return err },
			"Acquire": func() error { _, _, err := five.Acquire(ctx, "a"); return err },
			"Refund":  func() error { _, err := five.Refund(ctx, "a", 1); return err },
			"Reset":   func() error { return five.Reset(ctx, "a") },
			"Check":   func() error { _, err := c.Check(ctx, nil); return err },
			"Ready":   func() error { return c.Ready(ctx) },
			"Release": l.Release,
			"Close":   c.Close,
		} {
			expect.Equal(t, call(), ErrClosed, "%s on a closed client", name)
		}
	})
}

// What a limiter says of a policy that it does not know, and of a check under one of concurrency.
const (
	noPolicy = "there is no policy named missing on the node that decides for this key"
	noLease  = "is a concurrency limit: acquire a lease in place of a check, which could not be released"
)

func wantError(t *testing.T, err, kind error, field, message string) {
	t.Helper()
	var e *Error
	expect.True(t, errors.As(err, &e) && errors.Is(err, kind) && e.Field == field && e.Message == message,
		"got %v, want %v of %q: %s", err, kind, field, message)
}
