package store

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// banned is a store whose rule has a ban, beside one whose rule has none and which is asked only what gets past the
// ban, and what is known of the bans of its keys.
type banned struct {
	t           *testing.T
	store, twin *Store
	rule, plain *Rule
	now         time.Duration
	end         map[string]time.Duration // of the bans
	begun, told int
}

func (b *banned) both(do func(s *Store, r *Rule) error) {
	b.t.Helper()
	for s, r := range map[*Store]*Rule{b.store: b.rule, b.twin: b.plain} {
		must.NoError(b.t, do(s, r))
	}
}

func (b *banned) at() algo.Instant { return algo.Instant{Mono: int64(b.now), Wall: int64(b.now)} }

// move moves both to other nodes, whose clocks have other origins.
func (b *banned) move() {
	moved := func(s *Store) *Store {
		to := New(Config{Shut: true})
		l := newLink(s, to, ownership.Target)
		l.offset, l.most = 0, 300
		l.sync(b.t, b.now, true)
		s.Discard(0)
		to.Open(0)
		return to
	}
	b.store, b.twin = moved(b.store), moved(b.twin)
}

// setBan changes how long bans last, for those that there are as well.
func (b *banned) setBan(ban time.Duration) {
	before := b.rule.Ban
	after := *b.rule
	after.Ban, b.rule = ban, &after
	b.store.Reconcile(func() algo.Instant { return b.at() }, func(string, []byte) *Rule { return b.rule })
	for key := range b.end {
		if b.end[key] <= b.now || ban == 0 {
			delete(b.end, key)
		} else if b.end[key] += ban - before; b.end[key] <= b.now {
			delete(b.end, key)
		}
	}
}

// room is what the limits alone have left of a key.
func (b *banned) room(key string) int64 {
	each, _, left, err := b.twin.Look(b.twin.key("p", key), b.plain, b.at(), 1)
	must.True(b.t, err == nil && left == 0, "%v %v", left, err)
	least := algo.MaxLimit
	for _, d := range each {
		least = min(least, d.Remaining)
	}
	return least
}

// ask compares the answers to a call.
func (b *banned) ask(key string, c Call) {
	b.t.Helper()
	left := max(b.end[key]-b.now, 0)
	pass := max(c.Cost, 1)
	if c.Partial {
		pass = 1
	}
	var want algo.Decision
	if left == 0 || c.Always || b.room(key) < pass {
		want = decide(b.t, b.twin, b.plain, key, b.at(), c)
	} else {
		want = decide(b.t, b.twin, b.plain, key, b.at(), Call{})
	}
	begins := left == 0 && b.rule.Ban > 0 && !want.Allowed && c.Cost > 0 && !c.Spent && want.RetryAfter != algo.Never
	if begins {
		left = b.rule.Ban
		b.end[key] = b.now + left
		b.begun++
	}
	if left > 0 && !c.Spent {
		want.Allowed, want.Remaining, want.Delay = false, 0, 0
		if want.RetryAfter != algo.Never {
			want.RetryAfter = max(want.RetryAfter, left)
		}
		want.ResetAfter = max(want.ResetAfter, left)
	}
	got, err := b.store.Decide(b.store.key("p", key), b.rule, b.at(), c, nil)
	if want.Lease = got.Lease; err != nil || got.Decision != want || got.Banned != (left > 0) || got.Bans != begins {
		b.t.Fatalf("%s, %+v at %v, banned until %v\ngot  %+v, %v\nwant %+v", key, c, b.now, b.end[key], got, err, want)
	}
	if got.Banned {
		b.told++
	}
	_, _, is, err := b.store.Look(b.store.key("p", key), b.rule, b.at(), 1)
	must.True(b.t, err == nil && is == left, "%s: banned for %v, %v, want %v", key, is, err, left)
}

// TestBan: whatever the algorithm, a refusal begins a ban, during which all is refused and nothing charged, and which
// does not get longer by that; through moves, sweeps, refunds, resets and changes of the ban.
func TestBan(t *testing.T) {
	for name, limits := range map[string]algo.Limits{
		"sliding_log": {log(5, minute)}, "fixed_window": {window(5, minute)},
		"calendar":        {{Algorithm: algo.FixedWindow, Limit: 5, Period: algo.Minute}},
		"sliding_window":  {{Algorithm: algo.SlidingWindow, Limit: 5, Window: minute}},
		"sliding_counter": {{Algorithm: algo.SlidingCounter, Limit: 5, Window: minute}},
		"token_bucket":    {{Algorithm: algo.TokenBucket, Limit: 5, Window: minute}},
		"leaky_bucket":    {{Algorithm: algo.LeakyBucket, Limit: 5, Window: minute}},
		"concurrency":     {{Algorithm: algo.Concurrency, Limit: 5, Window: minute}},
		"several":         {log(2, time.Second), {Algorithm: algo.TokenBucket, Limit: 5, Window: minute}},
	} {
		t.Run(name, func(t *testing.T) {
			leases := limits[0].Algorithm == algo.Concurrency
			begun, told := 0, 0
			for seed := range seeds(10) {
				rng := rand.New(rand.NewPCG(seed, 23))
				b := &banned{t: t, store: New(Config{}), twin: New(Config{}), end: make(map[string]time.Duration)}
				b.plain = rule("p", limits...)
				b.rule = rule("p", limits...)
				b.rule.Ban = minute
				for range 800 {
					b.now += time.Duration(rng.Int64N(int64(6 * time.Second)))
					key := fmt.Sprint(rng.IntN(4))
					c := cost(rng.Int64N(4))
					c.Partial = rng.IntN(8) == 0
					switch rng.IntN(30) {
					case 0:
						b.both(func(s *Store, r *Rule) error { return s.Reset(s.key("p", key), "p") })
						delete(b.end, key)
					case 1:
						b.setBan(time.Duration(rng.IntN(4)) * minute / 2)
					case 2:
						b.move()
					case 3:
						b.both(func(s *Store, r *Rule) error { s.Sweep(b.at(), 1); return nil })
					case 4, 5:
						if !leases {
							b.both(func(s *Store, r *Rule) error {
								_, err := s.Refund(s.key("p", key), r, b.at(), 2, "", "")
								return err
							})
						}
					case 6, 7, 8:
						if !leases {
							c.Always, c.Partial, c.Spent = true, false, rng.IntN(2) == 0
						}
						b.ask(key, c)
					case 9:
						b.ask(key, cost(6)) // never passes
					default:
						b.ask(key, c)
					}
				}
				// not at the beginning of a calendar window
				b.now = (b.now + 1000*time.Hour).Truncate(time.Minute) + 30*time.Second
				if b.store.Sweep(b.at(), 1); b.store.Stats().Keys != 0 {
					t.Fatalf("%d keys are left", b.store.Stats().Keys)
				}
				begun, told = begun+b.begun, told+b.told
				accounted(t, b.store)
			}
			expect.True(t, begun != 0 && told >= 2*begun, "%d bans, %d answers by them: nothing is tested", begun, told)
		})
	}
}

// TestBanMerged: of the bans of two sides the one that ends later counts, whichever side goes on and whether or not it
// knew the key.
func TestBanMerged(t *testing.T) {
	for _, limits := range []algo.Limits{{log(2, minute)}, {{Algorithm: algo.TokenBucket, Limit: 2, Window: minute}},
		{{Algorithm: algo.Concurrency, Limit: 2, Window: minute}}} {
		for from := range 2 {
			r := rule("p", limits...).banning(10 * minute)
			s := newSplit(t, 2, r)
			refuse := func(i int, key string) {
				t.Helper()
				for range 3 {
					decide(t, s.parties[i].store, r, key, at(s.now), cost(1))
				}
				_, _, left, err := s.parties[i].store.Look(s.parties[i].store.key("p", key), r, at(s.now), 1)
				must.True(t, err == nil && left != 0, "not banned %v %v", left, err)
			}
			refuse(0, "before")
			s.fork(0, 1)
			s.now += time.Second
			refuse(0, "zero")
			refuse(1, "both")
			s.now += time.Second
			refuse(1, "one")
			refuse(0, "both")
			s.now += 2 * minute
			s.merge(from, 1-from)
			end := s.parties[1-from].store
			for key, want := range map[string]time.Duration{
				"before": 8*minute - 2*time.Second, "zero": 8*minute - time.Second, "one": 8 * minute,
				"both": 8 * minute,
			} {
				d, err := end.Decide(end.key("p", key), r, at(s.now), cost(1), nil)
				if err != nil || d.Allowed || !d.Banned || d.RetryAfter != want {
					t.Errorf("%v into %d: %s: %+v, %v, want %v", limits[0].Algorithm, 1-from, key, d, err, want)
				}
			}
			s.now += 8 * minute
			expect.True(t, decide(t, end, r, "one", at(s.now), cost(1)).Allowed, "after the ban")
		}
	}
}

// TestBanBesideLoans: before a ban begins all that is on loan is called back, and nothing is lent while it lasts.
func TestBanBesideLoans(t *testing.T) {
	r := rule("p", log(200, minute)).banning(5 * minute)
	s := New(Config{})
	must.Equal(t, borrow(t, s, r, 0, Borrow{ID: loanID, Want: 20}).Granted, 20)
	decide(t, s, r, "k", at(0), cost(180))
	// Whatever is on loan it would be refused, but whoever has a loan could go on.
	got := must.Value(s.Decide(s.key("p", "k"), r, at(0), cost(50), nil))(t)
	must.True(t, !got.Allowed && !got.Banned && got.OnLoan == 20, "before what is on loan is back: %+v", got)
	borrow(t, s, r, 0, Borrow{ID: loanID, Totals: algo.Totals{Granted: 20, Returned: 20}})
	got = must.Value(s.Decide(s.key("p", "k"), r, at(0), cost(50), nil))(t)
	must.True(t, !got.Allowed && got.Banned && got.Bans && got.OnLoan == 0, "afterwards: %+v", got)
	a := borrow(t, s, r, 2*minute, Borrow{ID: algo.LoanID{Borrower: 2, Number: 1}, Want: 20})
	expect.Equal(t, a.Granted, 0, "lent of a banned key: %+v", a)
	quota := algo.Quota{Demand: 3600 * 20, Ahead: time.Second, Term: time.Second}
	a = borrow(t, s, r, 2*minute, Borrow{ID: algo.LoanID{Borrower: 4, Number: 1}, Quota: quota})
	expect.Equal(t, a.Granted, 0, "a quota of a banned key: %+v", a)
	expect.Equal(t, onLoanOf(s, "p"), 0, "are on loan of a banned key")
	// One that was lent by an owner that is lost stays on loan as long as its borrower has it.
	left := algo.Totals{Granted: 10, Spent: 4}
	a = borrow(t, s, r, 2*minute, Borrow{ID: algo.LoanID{Borrower: 5, Number: 1}, Totals: left, Known: 4, Quota: quota})
	expect.True(t, a.Granted == 10 && !a.Ended, "a quota that a lost owner lent: %+v", a)
	_, loans := s.Lending(s.key("p", "k"), "p", at(2*minute))
	expect.True(t, onLoanOf(s, "p") == 6 && loans[len(loans)-1].Until >= int64(2*minute+time.Second),
		"it is on loan as %+v", loans)
	a = borrow(t, s, r, 5*minute, Borrow{ID: algo.LoanID{Borrower: 3, Number: 1}, Want: 20})
	expect.True(t, a.Granted != 0, "not lent after the ban: %+v", a)
}

// TestBanCountsFromTheNewestInstant: a call that read its clock before another one, and came after it, makes no ban
// shorter.
func TestBanCountsFromTheNewestInstant(t *testing.T) {
	r := rule("p", log(1, minute)).banning(5 * minute)
	s := New(Config{})
	decide(t, s, r, "k", at(time.Second), cost(1))
	decide(t, s, r, "k", at(time.Second/2), cost(1))
	_, _, left, err := s.Look(s.key("p", "k"), r, at(time.Second), 1)
	expect.True(t, err == nil && left == r.Ban, "banned for %v (%v), want %v", left, err, r.Ban)
}

// TestNoBan: what is refused for want of units that may turn out to be free, or in the place of what was lost, begins
// no ban.
func TestNoBan(t *testing.T) {
	r := rule("p", log(2, minute))
	r.Ban, r.ColdClosed = 5*minute, true
	s := New(Config{})
	wantBan := func(what string, key string, now time.Duration, want bool) {
		t.Helper()
		got, err := s.Decide(s.key("p", key), r, at(now), cost(1), nil)
		expect.True(t, err == nil && !got.Allowed && got.Banned == want, "%s: %+v, %v", what, got, err)
	}
	once := Call{Request: algo.Request{Cost: 2}, Reservation: reservationOf(1), ReserveFor: time.Second,
		ReserveOnce: true}
	decide(t, s, r, "atomic", at(0), once)
	wantBan("while an atomic check is in flight", "atomic", 0, false)
	wantBan("when its time is over", "atomic", time.Second, true)
	reserve := reserveFor(2, 2, time.Second)
	decide(t, s, r, "reserved", at(0), reserve)
	wantBan("beside a reservation", "reserved", 0, true)
	_, known, err := settle(s, s.key("p", "reserved"), r, at(0), reservationOf(2), 1)
	expect.True(t, err == nil && known, "a commit during a ban: %v %v", known, err)
	decide(t, s, r, "known", at(10*minute), cost(2))
	s.Cold(0, at(10*minute))
	wantBan("what was counted is lost, of a known key", "known", 10*minute, false)
	wantBan("what was counted is lost", "cold", 10*minute, false)
	expect.True(t, decide(t, s, r, "cold", at(11*minute), cost(1)).Allowed, "once it does not matter any more")
}

// TestResetOfABanBesideLoans: a reset ends a ban also of a key whose record stays for what is on loan.
func TestResetOfABanBesideLoans(t *testing.T) {
	s := New(Config{})
	r := rule("p", log(20, minute)).banning(time.Hour)
	decide(t, s, r, "k", at(0), cost(20))
	must.True(t, !decide(t, s, r, "k", at(0), cost(1)).Allowed, "admitted")
	borrow(t, s, r, 0, Borrow{ID: loanID, Totals: algo.Totals{Granted: 16}})
	must.Equal(t, onLoanOf(s, "p"), 16, "are on loan of what a lost owner lent")
	must.NoError(t, s.Reset(s.key("p", "k"), "p"))
	d := decide(t, s, r, "k", at(0), cost(1))
	expect.True(t, d.Allowed && d.Remaining == 3, "%+v, want 3 left of 20 beside 16 on loan", d)
}

// TestBanIsCopied: where the durability asks for it, the refusal that begins a ban waits for the copy to know of it;
// those after it do not.
func TestBanIsCopied(t *testing.T) {
	for _, durability := range []Durability{Escrow, Sync} {
		r := rule("p", log(1, minute)).banning(5 * minute).under(durability)
		holder, copy, l := followed(t)
		l.offset = 0
		k := holder.key("p", "k")
		for range 2 {
			must.Value(holder.Decide(k, r, at(0), cost(1), nil))(t)
			l.sync(t, 0, false)
		}
		holder.Reset(k, "p")
		l.sync(t, 0, false)
		must.True(t, must.Value(holder.Decide(k, r, at(0), cost(1), nil))(t).Allowed, "refused")
		l.sync(t, 0, false)
		got, err := holder.Decide(k, r, at(0), cost(1), nil)
		expect.True(t, err == nil && got.Bans && got.Ticket != 0, "%v: %+v, %v", durability, got, err)
		l.sync(t, time.Second, false)
		got, err = holder.Decide(k, r, at(time.Second), cost(1), nil)
		expect.True(t, err == nil && got.Banned && got.Ticket == 0, "%v, the next one: %+v, %v", durability, got, err)
		take(copy, at(2*time.Second))
		got = must.Value(copy.Decide(k, r, at(2*minute), cost(1), nil))(t)
		expect.True(t, got.Banned && got.RetryAfter >= 3*minute, "%v, after the holder was lost: %+v", durability, got)
	}
}

// TestRefusalOfANewKey: a new key that is refused leaves no record, whatever concerns the call has, and its answer
// waits for nobody.
func TestRefusalOfANewKey(t *testing.T) {
	for _, denied := range []bool{false, true} {
		l := log(5, minute)
		l.CountDenied = denied
		r := rule("p", l)
		if r.Durability = Sync; !denied {
			r.Ban = minute
		}
		s, to := New(Config{}), New(Config{Shut: true})
		link := newLink(s, to, ownership.Backup)
		link.attach(true)
		link.sync(t, 0, true)
		s.Caught(0, ownership.Backup)
		call := Call{Request: algo.Request{Cost: 6}, RequestID: "id", Reservation: reservationOf(1),
			ReserveFor: time.Minute}
		a, err := s.Decide(s.key("p", "k"), r, at(0), call, nil)
		must.True(t, err == nil && !a.Allowed && a.Granted == 0 && a.Ticket == 0 && !a.Degraded && !a.Banned, "%+v, %v",
			a, err)
		expect.Equal(t, s.Pending(0, ownership.Backup) > 0, denied, "something is to be told")
		a, err = s.Decide(s.key("p", "k"), r, at(1), cost(5), nil)
		expect.True(t, err == nil && a.Allowed != denied, "%+v, %v", a, err)
		expect.Equal(t, a.Ticket == 0, denied, "an admission waits for the backup, a refusal does not")
	}
}
