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
)

// TestConformance holds both backends to the same behaviour.
func TestConformance(t *testing.T) {
	t.Run("local", func(t *testing.T) {
		conformance(t, func(t *testing.T, b *book) *Client {
			c := New(b, b.stop)
			t.Cleanup(func() {
				if err := c.Close(); err != nil && err != ErrClosed {
					t.Errorf("Close: %v", err)
				}
				if !b.stopped {
					t.Error("Close left the service running")
				}
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
	must := func(t *testing.T) func(Decision, error) Decision {
		return func(d Decision, err error) Decision {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
			return d
		}
	}

	t.Run("allow", func(t *testing.T) {
		c := open(t, newBook())
		five := c.Policy("five")
		if d := must(t)(five.Allow(ctx, "a")); !d.Allowed || d.Granted != 1 || d.Remaining != 4 || d.Limit != 5 || d.Policy != "five" || d.Window != time.Minute {
			t.Errorf("Allow = %+v", d)
		}
		if d := must(t)(five.Peek(ctx, "a")); !d.Allowed || d.Granted != 0 || d.Remaining != 4 {
			t.Errorf("Peek = %+v", d)
		}
		if d := must(t)(five.AllowN(ctx, "a", 4)); !d.Allowed || d.Granted != 4 || d.Remaining != 0 {
			t.Errorf("AllowN 4 = %+v", d)
		}
		if d := must(t)(five.Allow(ctx, "a")); d.Allowed || d.Granted != 0 || d.RetryAfter != 250*time.Millisecond {
			t.Errorf("refused Allow = %+v", d)
		}
		if d := must(t)(five.AllowN(ctx, "b", 6)); d.Allowed || d.RetryAfter != Never {
			t.Errorf("AllowN above the limit = %+v", d)
		}
	})

	t.Run("refund and reset", func(t *testing.T) {
		c := open(t, newBook())
		five := c.Policy("five")
		must(t)(five.AllowN(ctx, "a", 3))
		if n, err := five.Refund(ctx, "a", 2); n != 2 || err != nil {
			t.Errorf("Refund = %d, %v", n, err)
		}
		if n, err := five.Refund(ctx, "a", 2); n != 1 || err != nil {
			t.Errorf("Refund of more than there is = %d, %v", n, err)
		}
		must(t)(five.AllowN(ctx, "a", 5))
		if err := five.Reset(ctx, "a"); err != nil {
			t.Error(err)
		}
		if d := must(t)(five.Peek(ctx, "a")); d.Remaining != 5 {
			t.Errorf("after Reset: %+v", d)
		}
	})

	t.Run("every field", func(t *testing.T) {
		c := open(t, newBook())
		want := Decision{
			Policy: "full", Allowed: false, Granted: 2, Limit: 3, Window: 4, Remaining: 5, RetryAfter: 6, ResetAfter: 7, Delay: 8,
			Shadow: true, Degraded: true, FailedOpen: true, FailedClosed: true, RetryAfterEstimated: true, Banned: true, NearLimit: true,
			Limits: []LimitStatus{
				{Limit: 9, Window: 10, Remaining: 11, RetryAfter: 12, ResetAfter: 13},
				{Limit: Unlimited, RetryAfter: Never},
			},
		}
		if d := must(t)(c.Policy("full").Allow(ctx, "a")); !reflect.DeepEqual(d, want) {
			t.Errorf("got  %+v\nwant %+v", d, want)
		}
	})

	t.Run("inline", func(t *testing.T) {
		b := newBook()
		c := open(t, b)
		berlin, err := time.LoadLocation("Europe/Berlin")
		if err != nil {
			t.Fatal(err)
		}
		for _, inline := range []algo.Limit{
			{Algorithm: algo.SlidingWindow, Limit: 2, Window: time.Minute, Slots: 7, CountDenied: true},
			{Algorithm: algo.TokenBucket, Limit: 3, Capacity: 4, Window: time.Second},
			{Algorithm: algo.FixedWindow, Limit: Unlimited, Period: algo.Week, Zone: berlin},
		} {
			must(t)(c.Inline("api", inline).Allow(ctx, "a"))
			want := limit.Target{Limit: &inline, Namespace: "api", Key: "a"}
			got := b.targets[len(b.targets)-1]
			if got.Limit != nil && got.Limit.Zone != nil && inline.Zone != nil && got.Limit.Zone.String() == inline.Zone.String() {
				got.Limit.Zone = inline.Zone
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("sent %+v of %+v, want %+v", got, got.Limit, want)
			}
		}
		_, err = c.Inline("", algo.Limit{Algorithm: algo.SlidingLog}).Allow(ctx, "a")
		wantError(t, err, ErrInvalid, "limit.limit", "must not be 0")
	})

	t.Run("batch", func(t *testing.T) {
		c := open(t, newBook())
		results, err := c.Check(ctx, []Check{
			{Policy: "five", Key: "a"},
			{Policy: "missing", Key: "a"},
			{Policy: "five", Key: "a", Cost: 7, Partial: true},
			{Policy: "five", Key: "b", Peek: true},
			{Policy: "down", Key: "a", Cost: 3},
			{Limit: &algo.Limit{Algorithm: algo.SlidingLog, Limit: 1, Window: time.Second}, Namespace: "n", Key: "a", Cost: 2},
		})
		if err != nil || len(results) != 6 {
			t.Fatalf("%d results, %v", len(results), err)
		}
		if r := results[0]; r.Err != nil || !r.Allowed || r.Granted != 1 {
			t.Errorf("0: %+v", r)
		}
		wantError(t, results[1].Err, ErrNotFound, "policy", `"missing" is not known here`)
		if r := results[2]; r.Err != nil || !r.Allowed || r.Granted != 4 {
			t.Errorf("2: %+v", r)
		}
		if r := results[3]; r.Err != nil || !r.Allowed || r.Granted != 0 || r.Remaining != 5 {
			t.Errorf("3: %+v", r)
		}
		if r := results[4]; r.Err != nil || !r.Allowed || !r.FailedOpen || r.Granted != 3 || r.Policy != "down" {
			t.Errorf("4: %+v", r)
		}
		if r := results[5]; r.Err != nil || r.Allowed || r.RetryAfter != Never || r.Policy != "inline" {
			t.Errorf("5: %+v", r)
		}
		if results, err := c.Check(ctx, nil); len(results) != 0 || err != nil {
			t.Errorf("empty batch = %v, %v", results, err)
		}
		if _, err := c.Check(ctx, make([]Check, 1001)); !errors.Is(err, ErrTooLarge) {
			t.Errorf("1001 checks: %v", err)
		}
		_, err = c.Check(ctx, []Check{{Policy: "missing", Key: "a"}, {Policy: "missing", Key: "b"}})
		wantError(t, err, ErrNotFound, "policy", `"missing" is not known here`)
		_, err = c.Check(ctx, []Check{{Policy: "five"}})
		wantError(t, err, ErrInvalid, "key", "is empty or missing: name what is limited, such as a user or an address")
		results, err = c.Check(ctx, []Check{{Policy: "five", Key: "b"}, {Policy: "jobs", Key: "a"}})
		if err != nil || results[0].Err != nil || !results[0].Allowed {
			t.Errorf("beside one that cannot be asked: %+v, %v", results, err)
		}
		wantError(t, results[1].Err, ErrInvalid, "cost", "could not be released")
		_, err = c.Check(ctx, []Check{{Policy: "five", Key: "b"}, {Limit: &algo.Limit{Algorithm: algo.SlidingLog}, Key: "b"}})
		if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "checks[1].limit.limit") {
			t.Errorf("a limit that cannot be: %v", err)
		}
		if d := must(t)(c.Policy("five").Peek(ctx, "b")); d.Remaining != 4 {
			t.Errorf("something was charged beside it: %+v", d)
		}
	})

	t.Run("all", func(t *testing.T) {
		c := open(t, newBook())
		all, err := c.All(ctx, []Check{{Policy: "five", Key: "a", Cost: 2}, {Policy: "queue", Key: "a"}})
		if err != nil || !all.Allowed || all.Delay != 10*time.Second || len(all.Decisions) != 2 || all.Decisions[0].Granted != 2 || all.Decisions[1].Delay != 10*time.Second {
			t.Errorf("%+v, %v", all, err)
		}
		all, err = c.All(ctx, []Check{{Policy: "five", Key: "a"}, {Policy: "five", Key: "a", Cost: 4}})
		if err != nil || all.Allowed || !all.Decisions[0].Allowed || all.Decisions[1].RetryAfter != 250*time.Millisecond {
			t.Errorf("refused: %+v, %v", all, err)
		}
		_, err = c.All(ctx, []Check{{Policy: "five", Key: "a"}, {Policy: "missing", Key: "a"}})
		wantError(t, err, ErrNotFound, "checks[1].policy", `"missing" is not known here`)
		all, err = c.All(ctx, []Check{{Policy: "five", Key: "b"}, {Policy: "down", Key: "a", Cost: 3}})
		if err != nil || !all.Allowed || !all.Decisions[1].FailedOpen || all.Decisions[1].Granted != 3 {
			t.Errorf("nobody to be asked: %+v, %v", all, err)
		}
		for field, bad := range map[string]Check{
			"partial": {Policy: "five", Key: "a", Partial: true}, "cost": {Policy: "five", Key: "a", Peek: true},
			"request_id": {Policy: "five", Key: "a", RequestID: "r"}, "key": {Policy: "five"},
		} {
			var e *Error
			if _, err := c.All(ctx, []Check{{Policy: "five", Key: "a"}, bad}); !errors.As(err, &e) || e.Field != "checks[1]."+field || e.Kind != ErrInvalid {
				t.Errorf("%s: %v", field, err)
			}
		}
		if _, err := c.All(ctx, nil); !errors.Is(err, ErrInvalid) {
			t.Errorf("none: %v", err)
		}
		if _, err := c.All(ctx, make([]Check, 1001)); !errors.Is(err, ErrTooLarge) {
			t.Errorf("1001: %v", err)
		}
	})

	t.Run("reserve", func(t *testing.T) {
		b := newBook()
		c := open(t, b)
		five := c.Policy("five")
		r, d, err := five.ReserveN(ctx, "a", 4, time.Minute)
		if err != nil || r == nil || !d.Allowed || d.Granted != 4 || d.Remaining != 1 || b.reserved[0].TTL != time.Minute {
			t.Fatalf("%+v, %+v, %v", r, d, err)
		}
		if r, d, err := five.Reserve(ctx, "a"); err != nil || r == nil || d.Granted != 1 {
			t.Errorf("Reserve: %+v, %+v, %v", r, d, err)
		}
		if r, d, err := five.ReserveN(ctx, "a", 2, 0); err != nil || r != nil || d.Allowed || d.RetryAfter != 250*time.Millisecond {
			t.Errorf("refused: %+v, %+v, %v", r, d, err)
		}
		for _, cost := range []int64{-1, 1<<53 + 1} {
			if err := r.Commit(cost); !errors.Is(err, ErrInvalid) {
				t.Errorf("commit of %d: %v", cost, err)
			}
		}
		for _, settle := range []func() error{func() error { return r.Commit(3) }, func() error { return r.Commit(0) }, r.Cancel} {
			if err := settle(); err != nil {
				t.Error(err)
			}
		}
		if d := must(t)(five.Peek(ctx, "a")); d.Remaining != 1 {
			t.Errorf("%d left", d.Remaining)
		}
		r, _, _ = five.ReserveN(ctx, "b", 4, 0)
		b.reserved = b.reserved[1:]
		if err := r.Cancel(); err != nil {
			t.Error(err)
		}
		if d := must(t)(five.Peek(ctx, "b")); d.Remaining != 5 {
			t.Errorf("%d left after a cancel", d.Remaining)
		}
		if r, _, err := c.Policy("missing").Reserve(ctx, "a"); r != nil || !errors.Is(err, ErrNotFound) {
			t.Errorf("%v, %v", r, err)
		}
		r, d, err = c.Policy("down").ReserveN(ctx, "a", 3, 0)
		if err != nil || r == nil || !d.FailedOpen || d.Granted != 3 || r.Commit(2) != nil || r.Cancel() != nil {
			t.Errorf("nobody to be asked: %+v, %+v, %v", r, d, err)
		}
		if d, err := r.Extend(ctx, 5, 0); err != nil || !d.Allowed || d.Granted != 5 {
			t.Errorf("an empty reservation: %+v, %v", d, err)
		}
		var none *Reservation
		if none.Commit(1) != nil || none.Cancel() != nil || none.Units() != 0 {
			t.Error("a nil reservation can fail")
		}
	})

	t.Run("work", func(t *testing.T) {
		b := newBook()
		c := open(t, b)
		five := c.Policy("five")
		r, d, err := five.ReserveWork(ctx, "a", Work{Class: "m", TTL: time.Minute})
		if err != nil || r == nil || !d.Allowed || !b.reserved[0].Estimate || b.reserved[0].Class != "m" || b.reserved[0].Cost != 1 || b.reserved[0].TTL != time.Minute {
			t.Fatalf("%+v, %+v, %v: %+v", r, d, err, b.reserved)
		}
		if d, err := r.Extend(ctx, 2, 30*time.Second); err != nil || !d.Allowed || r.Units() != 3 || b.extended[0].TTL != 30*time.Second {
			t.Errorf("%+v, %v", d, err)
		}
		if d, err := r.Extend(ctx, 3, 0); err != nil || d.Allowed || r.Units() != 3 {
			t.Errorf("refused: %+v, %v", d, err)
		}
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
			if err := bad(); !errors.Is(err, ErrInvalid) {
				t.Errorf("%v", err)
			}
		}
		if got, err := r.CommitCost(7); err != nil || got != (Settled{Excess: 4, Over: true}) || b.committed[0].Class != "m" {
			t.Errorf("%+v, %v", got, err)
		}
		if _, err := r.Extend(ctx, 1, 0); !errors.Is(err, ErrNotFound) {
			t.Errorf("extended after it was settled: %v", err)
		}

		r, _, err = five.ReserveWork(ctx, "u", Work{Usage: Usage{"input": 2}})
		if err != nil || b.reserved[0].Usage["input"] != 2 || b.reserved[0].Estimate || b.reserved[0].Cost != 0 {
			t.Errorf("%+v, %v", b.reserved, err)
		}
		if _, err := r.CommitUsage(Usage{"output": 3}); err != nil || b.committed[1].Usage["output"] != 3 {
			t.Errorf("%+v, %v", b.committed, err)
		}

		d, err = five.ChargeWithID(ctx, "a", 9, "id")
		if err != nil || d.Allowed || d.Granted != 9 || b.charges[0].Cost != 9 || b.charges[0].RequestID != "id" {
			t.Errorf("%+v, %v: %+v", d, err, b.charges)
		}
		if _, err := five.ChargeUsage(ctx, "a", Usage{"input": 4}, ""); err != nil || b.charges[1].Usage["input"] != 4 {
			t.Errorf("%v: %+v", err, b.charges)
		}
		if _, err := c.Policy("down").Charge(ctx, "a", 1); !errors.Is(err, ErrUnavailable) {
			t.Errorf("a charge that nobody was asked for: %v", err)
		}

		rs, all, err := c.ReserveAll(ctx, []Claim{{five, "x", Work{Cost: 2}}, {five, "y", Work{Cost: 3}}})
		if err != nil || !all.Allowed || len(rs) != 2 || rs[0].Units() != 2 || rs[1].Units() != 3 {
			t.Fatalf("%+v, %+v, %v", rs, all, err)
		}
		for _, r := range rs {
			if err := r.Cancel(); err != nil {
				t.Error(err)
			}
		}
		rs, _, err = c.ReserveAll(ctx, []Claim{{five, "x", Work{Cost: 2}}, {five, "y", Work{Cost: 3}}})
		if err != nil {
			t.Fatal(err)
		}
		costs := []Cost{{Reservation: rs[0], Units: 1}, {Reservation: rs[1], Units: 7}, {}, {Reservation: rs[0], Units: 2}}
		for i, want := range [][]SettledResult{{{Settled: Settled{Refunded: 1}}, {Settled: Settled{Excess: 4, Over: true}}, {}, {}}, make([]SettledResult, 4)} {
			if got, err := c.CommitEach(costs); err != nil || !slices.Equal(got, want) {
				t.Errorf("%d: %+v, %v", i, got, err)
			}
		}
		if _, err := c.CommitEach([]Cost{{Reservation: rs[0], Units: -1}}); !errors.Is(err, ErrInvalid) {
			t.Errorf("a negative cost: %v", err)
		}
		rs, all, err = c.ReserveAll(ctx, []Claim{{five, "x", Work{Cost: 2}}, {five, "y", Work{Cost: 6}}})
		if err != nil || all.Allowed || rs != nil || !all.Decisions[0].Allowed || all.Decisions[1].Allowed {
			t.Errorf("%+v, %+v, %v", rs, all, err)
		}
		rs, all, err = c.ReserveAll(ctx, []Claim{{c.Policy("down"), "x", Work{Cost: 2}}})
		if err != nil || !all.Allowed || !all.Decisions[0].FailedOpen || len(rs) != 1 || rs[0].Commit(1) != nil {
			t.Errorf("nobody to be asked: %+v, %+v, %v", rs, all, err)
		}
		for _, ttl := range []time.Duration{-1, 1, time.Hour + 1} {
			if _, _, err := five.ReserveN(ctx, "a", 1, ttl); !errors.Is(err, ErrInvalid) {
				t.Errorf("ttl %v: %v", ttl, err)
			}
		}
	})

	t.Run("request id", func(t *testing.T) {
		c := open(t, newBook())
		for range 2 {
			results, err := c.Check(ctx, []Check{{Policy: "five", Key: "a", Cost: 2, RequestID: "r1"}})
			if err != nil || results[0].Granted != 2 || results[0].Remaining != 3 {
				t.Errorf("%+v, %v", results, err)
			}
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
			{"namespace that is not UTF-8", Check{Limit: &algo.Limit{}, Namespace: "\xff", Key: "a"}, ErrInvalid, "namespace"},
			{"negative cost", Check{Policy: "five", Key: "a", Cost: -1}, ErrInvalid, "cost"},
			{"huge cost", Check{Policy: "five", Key: "a", Cost: 1<<53 + 1}, ErrInvalid, "cost"},
			{"peek with a cost", Check{Policy: "five", Key: "a", Peek: true, Cost: 1}, ErrInvalid, "cost"},
			{"long request id", Check{Policy: "five", Key: "a", RequestID: long[:129]}, ErrTooLarge, "request_id"},
			{"request id that is not UTF-8", Check{Policy: "five", Key: "a", RequestID: "\xff"}, ErrInvalid, "request_id"},
		} {
			_, err := c.Check(ctx, []Check{{Policy: "five", Key: "a"}, tt.check})
			var e *Error
			if !errors.As(err, &e) || !errors.Is(err, tt.kind) || e.Field != "checks[1]."+tt.field {
				t.Errorf("%s: %v", tt.name, err)
			}
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
			wantError(t, call("", 1), ErrInvalid, "key", "is empty or missing: name what is limited, such as a user or an address")
			if err := call("a", -1); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "cost") {
				t.Errorf("%s of -1: %v", name, err)
			}
		}
		wantError(t, five.Reset(ctx, ""), ErrInvalid, "key", "is empty or missing: name what is limited, such as a user or an address")
		for _, ttl := range []time.Duration{-1, 1, 367 * 24 * time.Hour} {
			if _, _, err := c.Policy("jobs").AcquireN(ctx, "a", 1, ttl); !errors.Is(err, ErrInvalid) {
				t.Errorf("ttl %v: %v", ttl, err)
			}
		}
		if len(b.targets) != 0 {
			t.Errorf("%d questions were sent", len(b.targets))
		}
	})

	t.Run("errors", func(t *testing.T) {
		c := open(t, newBook())
		_, err := c.Policy("missing").Allow(ctx, "a")
		wantError(t, err, ErrNotFound, "policy", `"missing" is not known here`)
		_, err = c.Policy("missing").Wait(ctx, "a")
		wantError(t, err, ErrNotFound, "policy", `"missing" is not known here`)
		_, _, err = c.Policy("missing").Acquire(ctx, "a")
		wantError(t, err, ErrNotFound, "policy", `"missing" is not known here`)
		_, err = c.Policy("jobs").Allow(ctx, "a")
		wantError(t, err, ErrInvalid, "cost", "could not be released")
		_, err = c.Policy("down").Refund(ctx, "a", 1)
		wantError(t, err, ErrUnavailable, "", "the owner cannot be reached")
		wantError(t, c.Policy("down").Reset(ctx, "a"), ErrUnavailable, "", "the owner cannot be reached")
		if d := must(t)(c.Policy("down").Allow(ctx, "a")); !d.Allowed || !d.FailedOpen || d.Granted != 1 {
			t.Errorf("nobody to ask: %+v", d)
		}
		l, d, err := c.Policy("down").Acquire(ctx, "a")
		if l == nil || !d.FailedOpen || err != nil {
			t.Errorf("nobody to ask for a lease: %v, %+v, %v", l, d, err)
		}
		if err := l.Release(); err != nil {
			t.Errorf("release of an empty lease: %v", err)
		}
		ended, cancel := context.WithCancel(ctx)
		cancel()
		if _, err := c.Policy("five").Allow(ended, "a"); !errors.Is(err, context.Canceled) {
			t.Errorf("context that has ended: %v", err)
		}
	})

	t.Run("lease", func(t *testing.T) {
		b := newBook()
		c := open(t, b)
		jobs := c.Policy("jobs")
		l, d, err := jobs.Acquire(ctx, "a")
		if err != nil || l == nil || !d.Allowed || d.Granted != 1 {
			t.Fatalf("Acquire = %v, %+v, %v", l, d, err)
		}
		if l, d, err := jobs.Acquire(ctx, "a"); l != nil || d.Allowed || err != nil || d.RetryAfter != 30*time.Second {
			t.Errorf("second Acquire = %v, %+v, %v", l, d, err)
		}
		for range 2 {
			if err := l.Release(); err != nil {
				t.Errorf("Release: %v", err)
			}
		}
		select {
		case <-l.Lost():
			t.Error("a released lease is lost")
		default:
		}

		// A short life makes it renew itself soon; on a busy machine it may be over before that, and another try is due.
		short := func() *Lease {
			l, _, err := jobs.AcquireN(ctx, "b", 1, 100*time.Millisecond)
			if err != nil || l == nil {
				t.Fatal(l, err)
			}
			return l
		}
		l = short()
		wait(t, "a renewal", func() bool {
			if isLost(l) {
				b.expire("b")
				l = short()
			}
			b.mu.Lock()
			defer b.mu.Unlock()
			return b.renewed["lease of b"]
		})
		b.expire("b")
		<-l.Lost()
		if err := l.Release(); err != nil {
			t.Errorf("Release of a lost lease: %v", err)
		}
	})

	t.Run("ready", func(t *testing.T) {
		c := open(t, newBook())
		if err := c.Ready(ctx); err != nil {
			t.Error(err)
		}
	})

	t.Run("closed", func(t *testing.T) {
		b := newBook()
		c := open(t, b)
		l, _, err := c.Policy("jobs").Acquire(ctx, "a")
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
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
			if err := call(); err != ErrClosed {
				t.Errorf("%s on a closed client: %v", name, err)
			}
		}
	})
}

func wantError(t *testing.T, err, kind error, field, message string) {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) || !errors.Is(err, kind) || e.Field != field || e.Message != message {
		t.Errorf("got %v, want %v of %q: %s", err, kind, field, message)
	}
}
