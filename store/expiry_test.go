package store

import (
	"fmt"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/test/expect"
)

// releasing returns a rule under which what expires is given back.
func releasing(d Durability, limits ...algo.Limit) *Rule {
	return &Rule{Scope: "p", Limits: limits, Durability: d, ReleaseExpired: true}
}

// wantUsed checks how many units of a limit of 10 are in use.
func wantUsed(t *testing.T, what string, s *Store, r *Rule, now algo.Instant, want int64) {
	t.Helper()
	d := decide(t, s, r, "k", now, cost(0))
	expect.True(t, 10-d.Remaining == want, "%s: %d are in use, want %d", what, 10-d.Remaining, want)
}

// TestReleaseWhereTheUnitsAre: an expiry gives back no more than a cancel.
func TestReleaseWhereTheUnitsAre(t *testing.T) {
	for name, between := range map[string]func(s *Store, k Key, r *Rule){
		"refunded": func(s *Store, k Key, r *Rule) { _, _ = s.Refund(k, r, at(time.Millisecond), 10, "", "") },
		"reset":    func(s *Store, k Key, r *Rule) { _ = s.Reset(k, "p") },
		"reloaded": func(s *Store, k Key, r *Rule) {
			reload(s, releasing(Async, log(10, 2*time.Hour)), at(time.Millisecond))
			reload(s, r, at(time.Millisecond))
			if _, err := s.Refund(k, r, at(time.Millisecond), 3, "", ""); err != nil {
				panic(err)
			}
		},
	} {
		s := New(Config{})
		r := releasing(Async, log(10, time.Hour))
		decide(t, s, r, "k", at(0), reserveFor(1, 3, time.Second))
		between(s, s.key("p", "k"), r)
		decide(t, s, r, "k", at(2*time.Millisecond), cost(4))
		wantUsed(t, name, s, r, at(time.Second), 4)
		s.Sweep(at(time.Second), 1)
		wantUsed(t, name, s, r, at(time.Second), 4)
		accounted(t, s)
	}
}

// TestReleaseByTheHolder: a copy keeps the units until the holder has given them back, also past the ttl, and gives
// them back if it takes over before that.
func TestReleaseByTheHolder(t *testing.T) {
	for _, d := range []Durability{Async, Escrow, Sync} {
		for _, told := range []bool{false, true} {
			holder, copied, l := followed(t)
			r := releasing(d, log(10, time.Hour))
			decide(t, holder, r, "k", at(0), cost(2))
			decide(t, holder, r, "k", at(0), reserveFor(1, 3, time.Second))
			l.sync(t, 0, false)
			copied.Sweep(l.there(2*time.Second), 1)
			n := copied.Stats().Reservations
			expect.True(t, n == 1, "%v: the copy has %d reservations, want 1", d, n)
			if told {
				holder.Sweep(at(2*time.Second), 1)
				wantUsed(t, "holder", holder, r, at(2*time.Second), 2)
				l.sync(t, 2*time.Second, false)
				n := copied.Stats().Reservations
				expect.True(t, n == 0, "%v: the copy has %d reservations after it was told", d, n)
			}
			take(copied, l.there(2*time.Second))
			if d == Escrow { // what the holder may have admitted ahead of its copy is charged
				got := decide(t, copied, r, "k", l.there(2*time.Second), cost(0))
				expect.True(t, got.Remaining >= 6, "%+v", got)
			} else {
				wantUsed(t, "new holder, told "+fmt.Sprint(told), copied, r, l.there(2*time.Second), 2)
			}
			accounted(t, copied)
		}
	}
}

// TestCommitWaitsUnderRelease: a copy without a commit would give back what is kept.
func TestCommitWaitsUnderRelease(t *testing.T) {
	for _, d := range []Durability{Async, Escrow, Sync} {
		for _, keep := range []int64{0, 2} {
			holder, _, l := followed(t)
			r := releasing(d, log(10, minute))
			decide(t, holder, r, "k", at(0), reserveFor(1, 3, time.Second))
			l.sync(t, 0, false)
			for range 2 { // and when it is repeated
				out, err := holder.Settle(holder.key("p", "k"), r, at(0), Settlement{ID: reservationOf(1), Keep: keep})
				if waits := out.Ticket != 0; err != nil || !out.Known || waits != (keep > 0 && d >= Escrow) {
					t.Errorf("%v, %d kept: waits %v, %v", d, keep, waits, err)
				}
			}
		}
	}
}
