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

// TestReleaseAtExpiry: the units of an expired reservation and of its extensions come back once, before the next
// decision on the key or in the sweep.
func TestReleaseAtExpiry(t *testing.T) {
	for _, a := range []algo.Algorithm{algo.SlidingLog, algo.SlidingWindow, algo.SlidingCounter, algo.FixedWindow,
		algo.TokenBucket, algo.LeakyBucket} {
		for _, sweep := range []bool{false, true} {
			s := New(Config{})
			r := releasing(Async, algo.Limit{Algorithm: a, Limit: 10, Window: time.Hour, Capacity: 10})
			charge := rule("p", r.Limits...)
			decide(t, s, r, "k", at(0), cost(1))
			decide(t, s, r, "k", at(0), reserveFor(1, 3, time.Second))
			more := reserveFor(1, 2, 0)
			more.Extend = true
			decide(t, s, r, "k", at(0), more)
			decide(t, s, charge, "k", at(0), reserveFor(2, 1, time.Second)) // before a reload
			once := reserveFor(3, 1, time.Second)
			once.ReserveOnce = true
			decide(t, s, r, "k", at(0), once)
			wantUsed(t, a.String(), s, charge, at(time.Second-1), 8)
			if sweep {
				s.Sweep(at(time.Second), 1)
				expect.Equal(t, s.Stats().Reservations, 0, "reservations are left")
			}
			for range 2 {
				wantUsed(t, a.String(), s, charge, at(time.Second), 3) // after a reload back
				s.Sweep(at(time.Second), 1)
			}
			_, known, err := settle(s, s.key("p", "k"), r, at(time.Second), reservationOf(1), 0)
			expect.True(t, !known && err == nil, "%v: settled after its end: %v, %v", a, known, err)
			accounted(t, s)
		}
	}
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

// TestReleaseAfterMerge: reservations of a key that both sides know give nothing back when they expire.
func TestReleaseAfterMerge(t *testing.T) {
	r := releasing(Async, log(10, minute))
	for from := range 2 {
		s := newSplit(t, 2, r)
		decide(t, s.parties[0].store, r, "k", at(s.now), reserveFor(1, 3, time.Second))
		s.fork(0, 1)
		s.merge(from, 1-from)
		p := s.parties[1-from].store
		wantUsed(t, "joined", p, r, at(s.now+2*time.Second), 3)
		expect.Equal(t, p.Stats().Reservations, 0, "reservations are left")
		accounted(t, p)
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

// TestCommitBesideExpiry: a commit charges its excess although another reservation of the key has expired.
func TestCommitBesideExpiry(t *testing.T) {
	s := New(Config{})
	r := releasing(Async, log(10, time.Hour))
	decide(t, s, r, "k", at(0), reserveFor(1, 3, time.Second))
	decide(t, s, r, "k", at(0), reserveFor(2, 2, minute))
	out, err := s.Settle(s.key("p", "k"), r, at(time.Second), Settlement{ID: reservationOf(2), Keep: 6})
	want := (Settled{Known: true, Excess: 4})
	expect.True(t, out == want && err == nil, "%+v, %v", out, err)
	wantUsed(t, "committed", s, r, at(time.Second), 6)
	accounted(t, s)
}
