package store

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// link carries one partition's chunks from a holder to a follower, whose clock has another origin.
type link struct {
	from, to *Store
	slot     ownership.Slot
	shift    time.Duration // of the holder's clock
	offset   time.Duration // of the follower's clock
	most     int
	queue    []message
	whole    bool // the copy is being built in the staging area
}

type message struct {
	chunk    []byte
	version  uint64
	complete bool
}

func newLink(from, to *Store, slot ownership.Slot) *link {
	return &link{from: from, to: to, slot: slot, offset: 1000 * time.Hour, most: 1 << 20}
}

func (l *link) there(now time.Duration) algo.Instant {
	return algo.Instant{Mono: int64(now + l.offset), Wall: int64(now)}
}

// attach begins anew.
func (l *link) attach(all bool) {
	l.queue, l.whole = nil, true
	l.from.Attach(0, l.slot, all)
	l.to.Stage(0)
}

// drain sends one chunk.
func (l *link) drain(now time.Duration) {
	chunk, version, more := l.from.Drain(0, l.slot, algo.Instant{Mono: int64(now + l.shift), Wall: int64(now)}, l.most)
	l.queue = append(l.queue, message{chunk, version, l.whole && !more})
	if !more {
		l.whole = false
	}
}

// deliver takes in the oldest message on the way and confirms it.
func (l *link) deliver(t *testing.T, now time.Duration, staged *bool) {
	t.Helper()
	m := l.queue[0]
	l.queue = l.queue[1:]
	must.NoError(t, l.to.Apply(0, *staged, l.there(now), m.chunk))
	if m.complete {
		l.to.Promote(0)
		*staged = false
	}
	if l.from.Awaited(0) {
		l.from.Confirm(0, l.slot, m.version)
	}
	if m.complete {
		l.from.Caught(0, l.slot)
	}
}

// sync brings the follower up to date at once, by a whole copy or the changes.
func (l *link) sync(t *testing.T, now time.Duration, whole bool) {
	t.Helper()
	if whole {
		l.attach(true)
	}
	staged := whole
	for {
		l.drain(now)
		l.deliver(t, now, &staged)
		if l.from.Pending(0, l.slot) == 0 {
			return
		}
	}
}

// contents renders a partition's records in an order of their own. What is idle is left out.
func contents(s *Store, now algo.Instant) []string {
	var out []string
	s.with(0, func(sh *shard, part *partition) {
		sh.eachRecord(&part.table, func(r record) {
			if !r.spec.rule.Limits.Idle(sh.arena, r.state, now) {
				data := normal(r.spec.rule.Limits, sh.arena, r.state, now)
				out = append(out, fmt.Sprintf("%s/%s %v: %x", r.spec.rule.Scope, r.key, r.spec.rule.Limits, data))
			}
			if left := r.banLeft(now); left > 0 {
				out = append(out, fmt.Sprintf("%s/%s banned for %v of %v", r.spec.rule.Scope, r.key, left,
					r.spec.rule.Ban))
			}
		})
		if a := part.extras; a != nil {
			for k, m := range a.answers.by {
				if now.Mono < m.until {
					out = append(out, fmt.Sprintf("id %v of %q: %d %v %x for %d", k, m.of.account.label, m.granted,
						m.delay, m.lease, m.until-now.Mono))
				}
			}
			for of, p := range a.reservations.by {
				for _, e := range p.list {
					if now.Mono < e.until {
						out = append(out, fmt.Sprintf("reservation %s %x: %d for %d", of, e.id, e.units,
							e.until-now.Mono))
					}
				}
			}
			for of, l := range a.lent {
				for _, e := range l.Most() {
					out = append(out, fmt.Sprintf("loan %s %v: %v for %d", of, e.ID, e.Totals,
						max(e.Until-now.Mono, 0)))
				}
				out = append(out, fmt.Sprintf("%d loans of %s", l.Len(), of))
			}
		}
	})
	slices.Sort(out)
	return out
}

// normal is a state's snapshot once it has been through one: a log can be written in several ways.
func normal(limits algo.Limits, a *algo.Arena, state algo.State, now algo.Instant) []byte {
	twin := make(algo.State, limits.Words())
	limits.Init(twin, now)
	if _, err := limits.Extend(a, twin, now, limits.AppendSince(nil, a, state, now, 0)); err != nil {
		return []byte(err.Error())
	}
	defer limits.Free(a, twin)
	return limits.AppendSince(nil, a, twin, now, 0)
}

// accounted fails the test when the bytes that a store counts are not those that it holds, its tables and queues aside.
func accounted(t *testing.T, s *Store) {
	t.Helper()
	loansCounted(t, s)
	s.Discard(0)
	loansCounted(t, s)
	sh := &s.shards[0]
	if got := s.Stats(); got.Bytes != int64(sh.arena.Bytes()) || got.Keys != 0 || got.Pending != 0 {
		t.Errorf("after a discard %d bytes are counted, of which pages hold %d; %d keys, %d pending", got.Bytes,
			sh.arena.Bytes(), got.Keys, got.Pending)
	}
	expect.Equal(t, len(sh.specOf), 0, "specs are left: %v", sh.specOf)
}

// TestCopyEquals makes random calls on a holder and compares both sides whenever everything has been delivered: where
// all rules have Persist, also what is on the disk that follows the copy.
func TestCopyEquals(t *testing.T) {
	limits := []algo.Limits{
		{log(20, minute)}, {log(30, minute), log(5, time.Second)}, {window(10, minute)}, {log(12, 2*minute)},
		{{Algorithm: algo.SlidingLog, Limit: 8, Window: minute, CountDenied: true}},
		{{Algorithm: algo.TokenBucket, Limit: 9, Window: minute}},
		{{Algorithm: algo.LeakyBucket, Limit: 9, Window: minute}},
		{{Algorithm: algo.SlidingWindow, Limit: 9, Window: minute}},
		{{Algorithm: algo.SlidingCounter, Limit: 9, Window: minute}},
		{{Algorithm: algo.FixedWindow, Limit: 9, Period: algo.Hour}},
	}
	lendable := []algo.Limits{{log(300, minute)}, {{Algorithm: algo.TokenBucket, Limit: 200, Window: minute}},
		{window(500, minute), log(400, minute)}}
	leases := &Rule{Scope: "leases", Limits: algo.Limits{{Algorithm: algo.Concurrency, Limit: 5, Window: minute}}}
	for seed := range seeds(40) {
		rng := rand.New(rand.NewPCG(seed, 7))
		holder, copy := New(Config{}), New(Config{Shut: true})
		l := newLink(holder, copy, ownership.Slot(rng.IntN(2)))
		persist, disk := seed%3 == 0, New(Config{Shut: true})
		saved := &link{from: copy, to: disk, slot: ownership.Disk, shift: l.offset, offset: 2 * l.offset, most: 1 << 20}
		leases.Persist = persist
		now := time.Duration(0)
		holder.TakeOver(0, at(now))
		if seed%2 == 1 {
			holder.TakeOver(0, at(now))
		}
		l.most = 1 << (4 + rng.IntN(10))
		l.sync(t, now, true)
		saved.sync(t, now, true)
		for step := range 1500 {
			now += time.Duration(rng.Int64N(int64(200 * time.Millisecond)))
			if rng.IntN(100) == 0 {
				now += time.Duration(rng.Int64N(int64(5 * minute)))
			}
			instant := algo.Instant{Mono: int64(now), Wall: int64(now)}
			scope := rng.IntN(6)
			r := rule(fmt.Sprint("p", scope), limits[(scope+rng.IntN(20)/19)%len(limits)]...)
			r.Durability, r.Persist = []Durability{Async, Sync, Escrow, None}[scope%4], persist
			if scope < 2 {
				r.Ban = time.Duration(1+rng.IntN(20)/19) * 10 * time.Second
			}
			k := holder.key(r.Scope, fmt.Sprint(rng.IntN(8)))
			var err error
			switch rng.IntN(20) {
			case 0:
				_, err = holder.Refund(k, r, instant, 1+rng.Int64N(3), "", "")
			case 1:
				err = holder.Reset(k, r.Scope)
			case 2:
				holder.Sweep(instant, 1)
			case 3:
				copy.Sweep(l.there(now), 1)
			case 4, 5:
				_, err = holder.Decide(holder.key("leases", "x"), leases, instant,
					Call{Request: algo.Request{Cost: 1, Nonce: 9, TTL: 10 * time.Second}}, nil)
			case 6:
				// A lease of slot 0 and the nonce above, if it lives.
				if rng.IntN(2) == 0 {
					_, err = holder.Release(holder.key("leases", "x"), leases, instant, 9<<24)
				} else {
					_, err = holder.Renew(holder.key("leases", "x"), leases, instant, 9<<24, 0, 0)
				}
			case 7:
				_, _, err = settle(holder, k, r, instant, reservationOf(1+rng.Uint64N(5)), 0)
			case 16, 17, 18:
				i := rng.IntN(len(lendable))
				r := rule(fmt.Sprint("lent", i), lendable[i]...)
				r.Durability, r.Persist = Durability(rng.IntN(4)), persist
				k := holder.key(r.Scope, fmt.Sprint(rng.IntN(3)))
				b := Borrow{ID: algo.LoanID{Borrower: rng.Uint64N(3)}, Want: rng.Int64N(60)}
				if known, ok := holderLoan(holder, k, r.Scope, b.ID); ok {
					b.Totals = known.Totals
					b.Totals.Spent += rng.Int64N(known.Left() + 1)
					b.Totals.Returned += rng.Int64N(b.Totals.Left() + 1)
				}
				if rng.IntN(3) > 0 {
					_, err = holder.Lend(k, r, instant, b)
				} else {
					_, err = holder.Decide(k, r, instant, cost(1+rng.Int64N(100)), nil)
				}
			case 8:
				staged := false
				l.drain(now)
				l.deliver(t, now, &staged)
			default:
				c := cost(1 + rng.Int64N(2))
				if rng.IntN(4) == 0 {
					c.RequestID = fmt.Sprint(rng.Uint64())
				}
				if rng.IntN(6) == 0 {
					c.Reservation, c.ReserveFor = reservationOf(1+rng.Uint64N(5)), time.Minute
				}
				_, err = holder.Decide(k, r, instant, c, nil)
			}
			must.NoError(t, err)
			if rng.IntN(10) > 0 {
				continue
			}
			whole := rng.IntN(50) == 0
			l.sync(t, now, whole)
			want, got := contents(holder, instant), contents(copy, l.there(now))
			for i, w := range want {
				if i >= len(got) || got[i] != w {
					t.Fatalf("seed %d step %d: item %d of %d is\n%q\nat the holder, of %d\n%q\nat the copy", seed, step,
						i, len(want), w, len(got), got[min(i, len(got)-1)])
				}
			}
			if saved.sync(t, now, whole); persist {
				expect.Equal(t, strings.Join(contents(disk, saved.there(now)), "\n"), strings.Join(want, "\n"),
					"seed %d step %d: on the disk", seed, step)
			} else {
				expect.Equal(t, len(contents(disk, saved.there(now))), 0, "seed %d step %d: on the disk", seed, step)
			}
			must.True(t, !t.Failed(), "the disk of the copy")
		}
		accounted(t, holder)
		accounted(t, copy)
	}
}

// admissions are what was answered: units at instants, with nobody's help.
type admissions []struct {
	at    time.Duration
	units int64
}

func (a *admissions) add(at time.Duration, units int64) {
	*a = append(*a, struct {
		at    time.Duration
		units int64
	}{at, units})
}

// most is the largest number in any half-open window of the length.
func (a admissions) most(w time.Duration) (most int64) {
	for _, end := range a {
		var n int64
		for _, e := range a {
			if e.at > end.at-w && e.at <= end.at {
				n += e.units
			}
		}
		most = max(most, n)
	}
	return most
}

// TestEscrowSeldomWaits shows what escrow is for: with a drain whenever one is asked for, a key in steady use waits
// once.
func TestEscrowSeldomWaits(t *testing.T) {
	urgent := 0
	holder, copy := New(Config{Urgent: func(int) { urgent++ }}), New(Config{Shut: true})
	l := newLink(holder, copy, ownership.Backup)
	holder.TakeOver(0, at(0))
	l.sync(t, 0, true)
	r := rule("p", log(1000, minute)).under(Escrow)
	waited, drains := 0, 0
	now := time.Duration(0)
	for range 1000 {
		now += time.Millisecond
		urgent = 0
		a := must.Value(holder.Decide(holder.key("p", "k"), r, at(now), cost(1), nil))(t)
		must.True(t, a.Allowed, "%v", a)
		if a.Ticket > 0 {
			waited++
		}
		if urgent > 0 {
			drains++
			l.sync(t, now, false)
		}
	}
	expect.True(t, waited == 1 && drains >= 10 && drains <= 25,
		"%d answers waited, %d drains were asked for; want 1 and about 1000/50", waited, drains)
	used := func() int64 {
		var n int64
		copy.with(0, func(_ *shard, part *partition) {
			for _, o := range part.extras.owed {
				n += o.units
			}
		})
		return n
	}
	n := used()
	expect.True(t, n == 100, "the copy takes %d more for spent, want two chunks of 50", n)
	// Unused for a second, it is given back.
	now += 2 * quietAfter
	holder.Sweep(at(now), 1)
	must.True(t, holder.Pending(0, ownership.Backup) != 0, "nothing became pending")
	l.sync(t, now, false)
	expect.Equal(t, used(), 0, "are still taken for spent")
	now += 2 * quietAfter
	holder.Sweep(at(now), 1)
	holder.with(0, func(_ *shard, part *partition) {
		expect.Equal(t, len(part.role.advances.by), 0, "keys still have an allowance")
	})
	// A move's last chunk ends every allowance.
	holder.Decide(holder.key("p", "k"), r, at(now), cost(1), nil)
	l.sync(t, now, false)
	holder.Shut(0)
	l.sync(t, now, false)
	n = used()
	expect.True(t, n == 0, "after the last chunk of a move %d are taken for spent", n)
	accounted(t, holder)
	accounted(t, copy)
}

func TestGate(t *testing.T) {
	s := New(Config{Shut: true})
	r := rule("p", log(5, minute))
	k := s.key("p", "k")
	calls := map[string]func() error{
		"decide":  func() error { _, err := s.Decide(k, r, at(0), cost(1), nil); return err },
		"peek":    func() error { _, err := s.Decide(k, r, at(0), cost(0), nil); return err },
		"refund":  func() error { _, err := s.Refund(k, r, at(0), 1, "", ""); return err },
		"renew":   func() error { _, err := s.Renew(k, r, at(0), 1, 0, 0); return err },
		"release": func() error { _, err := s.Release(k, r, at(0), 1); return err },
		"settle":  func() error { _, _, err := settle(s, k, r, at(0), reservationOf(1), 0); return err },
		"reset":   func() error { return s.Reset(k, "p") },
	}
	for name, call := range calls {
		expect.ErrorIs(t, call(), ErrShut, "%s", name)
	}
	expect.Equal(t, s.Stats().Keys, 0, "keys were made")
	s.Open(0)
	for name, call := range calls {
		expect.NoError(t, call(), "%s of an open partition", name)
	}
	s.Shut(0)
	expect.ErrorIs(t, calls["decide"](), ErrShut, "shut again")
}

func TestStrict(t *testing.T) {
	s := New(Config{})
	r := rule("p", log(50, minute)).under(Sync).strict()
	ask := func(boot int64) (Answer, error) {
		c := cost(1)
		c.Boot = boot
		return s.Decide(s.key("p", "k"), r, at(0), c, nil)
	}
	refused := func(what string, boot int64) {
		t.Helper()
		expect.ErrorIs(t, expect.Err(ask(boot)), ErrNoGrant, "%s", what)
	}
	refused("without anything", 0)
	s.Lease(0, 100)
	refused("without a backup", 0)
	s.Unguarded(0, true)
	if a, err := ask(99); err != nil || !a.Allowed || !a.Degraded || a.Ticket != 0 || a.Until != 100 {
		t.Errorf("unguarded: %+v, %v", a, err)
	}
	refused("after the lease", 100)
	giveBack := Call{Request: algo.Request{Cost: -1, Always: true}, Boot: 100}
	_, err := s.Decide(s.key("p", "k"), r, at(0), giveBack, nil)
	expect.True(t, errors.Is(err, ErrNoGrant), "a negative cost after the lease: %v", err)
	d := decide(t, s, r, "k", at(0), cost(0))
	expect.Equal(t, d.Remaining, 49, "are left of 50 after 1, of which nothing is to be given back without an answer")
	s.Unguarded(0, false)
	s.Attach(0, ownership.Backup, true)
	refused("while the backup catches up", 0)
	s.Caught(0, ownership.Backup)
	a, err := ask(99)
	expect.True(t, err == nil && !a.Degraded && a.Ticket != 0, "with a backup: %+v, %v", a, err)
	s.Detach(0, ownership.Backup)
	refused("after the backup", 0)
	// Others go on.
	a, err = s.Decide(s.key("q", "k"), &Rule{Scope: "q", Limits: r.Limits, Durability: Sync}, at(0), cost(1), nil)
	expect.True(t, err == nil && a.Degraded && a.Ticket == 0, "available: %+v, %v", a, err)
}

// TestRepeatWaitsToo: the answer to a repeated request id must not overtake the first one's.
func TestRepeatWaitsToo(t *testing.T) {
	for _, durability := range []Durability{Escrow, Sync} {
		s := New(Config{})
		r := rule("p", log(50, minute)).under(durability)
		s.AttachCurrent(0, ownership.Backup, true)
		s.Caught(0, ownership.Backup)
		c := cost(1)
		c.RequestID = "5"
		first, err := s.Decide(s.key("p", "k"), r, at(0), c, nil)
		again, err2 := s.Decide(s.key("p", "k"), r, at(0), c, nil)
		expect.True(t, err == nil && err2 == nil && again.Ticket >= first.Ticket && first.Ticket != 0,
			"%v: tickets %d and %d (%v, %v)", durability, first.Ticket, again.Ticket, err, err2)
		expect.Equal(t, first.Remaining, again.Remaining, "%v: charged twice", durability)
		s.Drain(0, ownership.Backup, at(0), 1<<20)
		again, err = s.Decide(s.key("p", "k"), r, at(0), c, nil)
		expect.True(t, err == nil && again.Ticket != 0, "%v: told and not confirmed: %+v, %v", durability, again, err)
	}
}

// TestOtherAnswersWait: a renewal waits for the copy, and so do an extension of a reservation's time alone and a commit
// that charges more, also when it is repeated. Under escrow the reservation of an atomic check does not.
func TestOtherAnswersWait(t *testing.T) {
	for _, durability := range []Durability{Escrow, Sync} {
		s := New(Config{})
		jobs := rule("jobs", algo.Limit{Algorithm: algo.Concurrency, Limit: 10, Window: minute})
		units := rule("units", log(10, minute))
		jobs.Durability, units.Durability = durability, durability
		s.AttachCurrent(0, ownership.Backup, true)
		s.Caught(0, ownership.Backup)
		told := func() {
			_, version, _ := s.Drain(0, ownership.Backup, at(0), 1<<20)
			s.Confirm(0, ownership.Backup, version)
		}
		lease := decide(t, s, jobs, "k", at(0), Call{Request: algo.Request{Cost: 1, TTL: time.Second, Nonce: 5}})
		id := reservationOf(1)
		decide(t, s, units, "k", at(0), Call{Request: algo.Request{Cost: 1}, Reservation: id, ReserveFor: minute})
		told()
		a, err := s.Renew(s.key("jobs", "k"), jobs, at(0), lease.Lease, minute, 0)
		expect.True(t, err == nil && a.Alive && a.Ticket != 0, "%v: renewed: %+v, %v", durability, a, err)
		once := Call{Request: algo.Request{Cost: 1}, Reservation: reservationOf(2), ReserveFor: minute,
			ReserveOnce: true}
		told()
		if a := answer(t, s, units, "k", at(0), once); (a.Ticket == 0) != (durability == Escrow) {
			t.Errorf("%v: reserved by an atomic check: %+v", durability, a)
		}
		told()
		if a := answer(t, s, units, "k", at(0),
			Call{Reservation: id, ReserveFor: time.Hour, Extend: true}); a.Ticket == 0 {
			t.Errorf("%v: extended: %+v", durability, a)
		}
		told()
		for _, what := range []string{"first", "repeated"} {
			out := must.Value(s.Settle(s.key("units", "k"), units, at(0), Settlement{ID: id, Keep: 6}))(t)
			expect.True(t, out.Excess == 5 && out.Ticket != 0, "%v: %s: %+v", durability, what, out)
		}
	}
}

func TestDurabilityNone(t *testing.T) {
	holder, copy := New(Config{}), New(Config{Shut: true})
	l := newLink(holder, copy, ownership.Target)
	kept, none := rule("kept", log(5, minute)), rule("none", log(5, minute)).under(None)
	both := func(key string) {
		decide(t, holder, kept, key, at(0), cost(1))
		decide(t, holder, none, key, at(0), cost(1))
	}
	both("before")
	l.attach(false)
	both("after")
	l.drain(0)
	staged := true
	l.deliver(t, 0, &staged)
	n := copy.Stats().Keys
	expect.True(t, n == 2, "the copy has %d keys, want 2", n)
	// A policy that begins to be replicated is told as a whole when it is next used.
	changed := rule("none", log(5, minute))
	decide(t, holder, changed, "before", at(0), cost(1))
	l.sync(t, 0, false)
	n = copy.Stats().Keys
	expect.True(t, n == 3, "the copy has %d keys, want 3", n)
	holder.Widen(0, ownership.Target)
	l.sync(t, 0, false)
	both("last")
	l.sync(t, 0, false)
	got, want := contents(copy, l.there(0)), contents(holder, at(0))
	expect.True(t, slices.Equal(got, want), "the copy has %q, want %q", got, want)
}

// reservationOf is the id of a reservation by its number.
func reservationOf(n uint64) (id ReservationID) {
	binary.BigEndian.PutUint64(id[:8], n)
	return id
}

// settle ends a reservation that is to keep no more than it charged.
func settle(s *Store, k Key, r *Rule, now algo.Instant, id ReservationID,
	keep int64) (returned int64, known bool, err error) {
	out, err := s.Settle(k, r, now, Settlement{ID: id, Keep: keep, Exact: true})
	return out.Returned, out.Known, err
}

// TestReservationEndsWithHolders: a copy reads how long a reservation is still pending when the message arrives, so
// later than the holder counts. What the holder tells of the record after its end ends it there as well: there would be
// nothing to undo.
func TestReservationEndsWithHolders(t *testing.T) {
	for _, d := range []Durability{None, Sync} {
		a, b := New(Config{}), New(Config{Shut: true})
		r := rule("p", log(10, minute)).under(d)
		k := a.key("p", "k")
		reserve := func(id uint64, n int64, ttl time.Duration) {
			t.Helper()
			must.True(t, must.Value(a.Decide(k, r, at(0), reserveFor(id, n, ttl), nil))(t).Allowed, "refused")
		}
		a.TakeOver(0, at(0))
		l := newLink(a, b, ownership.Backup)
		l.attach(false)
		reserve(1, 2, 10*time.Second)
		reserve(2, 3, minute)
		l.drain(time.Second)
		staged := true
		l.deliver(t, 9*time.Second, &staged) // late: the first is pending here until 18 s
		a.Sweep(at(12*time.Second), 100)
		a.Widen(0, ownership.Backup)
		must.True(t, must.Value(a.Decide(k, r, at(12*time.Second), cost(1), nil))(t).Allowed, "refused")
		l.drain(13 * time.Second)
		a.Shut(0)
		l.deliver(t, 13*time.Second, &staged)
		b.Open(0)
		there := l.there(14 * time.Second)
		if n, known, err := settle(b, k, r, there, reservationOf(1), 0); known || n != 0 || err != nil {
			t.Errorf("durability %v: cancelled after its end: %d, %v, %v", d, n, known, err)
		}
		n, known, err := settle(b, k, r, there, reservationOf(2), 1)
		expect.True(t, known && n == 2 && err == nil, "durability %v: commit: %d, %v, %v", d, n, known, err)
		got, err := b.Decide(k, r, there, cost(0), nil)
		expect.True(t, err == nil && got.Remaining == 10-2-1-1 && !got.Pending, "durability %v: %+v, %v", d, got, err)
		n = b.budget.reservations.Load()
		expect.True(t, n == 0, "durability %v: %d reservations are left", d, n)
		accounted(t, b)
	}
}

func TestCold(t *testing.T) {
	s := New(Config{Shut: true})
	s.Cold(0, at(0))
	s.ColdStrict(0, at(20*time.Second))
	take(s, at(20*time.Second))
	s.Lease(0, 1)
	s.Unguarded(0, true)
	remaining := func(r *Rule, now time.Duration) int64 {
		t.Helper()
		peek := decide(t, s, r, "k", at(now), cost(0))
		return peek.Remaining
	}
	open := rule("open", log(5, minute))
	closed, strict := rule("closed", log(5, minute)), rule("strict", log(5, minute))
	closed.ColdClosed = true
	strict.Strict, strict.Durability = true, Sync
	both := rule("both", log(5, minute))
	both.ColdClosed, both.Strict, both.Durability = true, true, Sync
	for _, c := range []struct {
		rule *Rule
		at   time.Duration
		want int64
	}{
		{open, 30 * time.Second, 5}, {closed, 30 * time.Second, 0}, {strict, 30 * time.Second, 0},
		{closed, 61 * time.Second, 5}, {strict, 61 * time.Second, 0}, {strict, 81 * time.Second, 5},
		{both, 61 * time.Second, 0}, {both, 81 * time.Second, 5},
	} {
		if got := remaining(c.rule, c.at); got != c.want {
			t.Errorf("%s at %v: %d remain, want %d", c.rule.Scope, c.at, got, c.want)
		}
	}
	expect.Equal(t, s.Stats().Keys, 0, "keys were made by peeks")
	decide(t, s, closed, "x", at(30*time.Second), cost(1))
	expect.Equal(t, s.Stats().Keys, 0, "keys were kept for a refusal that the next check would get again")
	// A loss that concerns strict rules alone.
	alone := New(Config{})
	alone.ColdStrict(0, at(0))
	alone.Lease(0, 1)
	alone.Unguarded(0, true)
	for r, want := range map[*Rule]int64{closed: 5, strict: 0, both: 0} {
		if d := decide(t, alone, r, "k", at(time.Second), cost(0)); d.Remaining != want {
			t.Errorf("%s after a loss for strict rules: %d remain, want %d", r.Scope, d.Remaining, want)
		}
	}
	// Known keys of strict rules are filled, too.
	decide(t, s, strict, "known", at(90*time.Second), cost(1))
	decide(t, s, open, "known", at(90*time.Second), cost(1))
	s.ColdStrict(0, at(91*time.Second))
	for _, c := range []struct {
		rule *Rule
		want int64
	}{{strict, 0}, {open, 4}} {
		if d := decide(t, s, c.rule, "known", at(92*time.Second), cost(0)); d.Remaining != c.want {
			t.Errorf("%s: %d remain, want %d", c.rule.Scope, d.Remaining, c.want)
		}
	}
	accounted(t, s)
}

// TestResetOfWhatIsOwed: what a lost holder may have admitted to a strict rule ahead of its copy is reset like the
// rest, also where the record stays for what is on loan.
func TestResetOfWhatIsOwed(t *testing.T) {
	for _, lent := range []int64{0, 16} {
		holder, copied, l := followed(t)
		r := rule("p", log(100, minute)).under(Escrow).strict()
		holder.Lease(0, int64(time.Hour))
		borrow(t, holder, r, 0, Borrow{ID: loanID, Want: lent})
		spend(t, holder, r, 0)
		l.sync(t, 0, false)
		take(copied, l.there(0))
		grant(copied)
		must.NoError(t, copied.Reset(copied.key("p", "k"), "p"))
		decide(t, copied, r, "k", l.there(0), cost(1))
		copied.TakeOverStrict(0, l.there(0))
		d := decide(t, copied, r, "k", l.there(0), cost(0))
		expect.Equal(t, d.Remaining, 99-lent, "are left of 100 after 1 and beside %d on loan", lent)
		for range 3 {
			copied.Sweep(l.there(time.Hour), 1)
		}
		expect.Equal(t, copied.Stats().Keys, 0, "keys are left when all is over")
	}
}

// TestTakeOverStrict charges what is owed once, and to strict rules when it is asked for.
func TestTakeOverStrict(t *testing.T) {
	holder, copy, l := followed(t)
	holder.Lease(0, 100)
	rules := []*Rule{rule("available", log(100, minute)), rule("strict", log(100, minute))}
	for _, r := range rules {
		r.Durability, r.Strict = Escrow, r.Scope == "strict"
		decide(t, holder, r, "k", at(0), cost(1))
	}
	l.sync(t, 0, false)
	copy.Lease(0, 100)
	copy.Unguarded(0, true)
	copy.Open(0)
	check := func(when string, available, strict int64) {
		t.Helper()
		for i, want := range []int64{available, strict} {
			d, err := copy.Decide(copy.key(rules[i].Scope, "k"), rules[i], l.there(0), cost(0), nil)
			if err != nil || d.Remaining != want {
				t.Errorf("%s, %s: %d remain (%v), want %d", when, rules[i].Scope, d.Remaining, err, want)
			}
		}
	}
	check("before", 99, 99)
	copy.TakeOver(0, l.there(0))
	check("after TakeOver", 89, 99)
	// What is owed on strict rules survives a move.
	third := New(Config{Shut: true})
	m := newLink(copy, third, ownership.Target)
	m.offset = 0
	m.sync(t, l.offset, true)
	copy, l = third, &link{offset: l.offset}
	copy.Lease(0, 100)
	copy.Unguarded(0, true)
	copy.Open(0)
	check("moved", 89, 99)
	for range 2 {
		copy.TakeOverStrict(0, l.there(0))
		check("after TakeOverStrict", 89, 89)
	}
}

// TestChunkIsChecked truncates and changes a chunk in every place: an error or not, but no panic, and the store still
// adds up afterwards.
func TestChunkIsChecked(t *testing.T) {
	chunk := sampleChunk(t)
	for i := range chunk {
		for _, flip := range []byte{0, 1, 0x80, 0xff} {
			data := bytes.Clone(chunk)
			if flip == 0 {
				data = data[:i]
			} else {
				data[i] ^= flip
			}
			s := New(Config{Shut: true, MaxBytes: 1 << 24})
			s.Stage(0)
			_ = s.Apply(0, true, at(time.Hour), data)
			accounted(t, s)
		}
	}
}

// sampleChunk has something of every kind.
func sampleChunk(tb testing.TB) []byte {
	s := New(Config{})
	s.TakeOver(0, at(0))
	s.Cold(0, at(0))
	rules := []*Rule{
		rule("log", log(5, minute), log(50, time.Hour)), rule("window", window(5, minute)),
		rule("lease", algo.Limit{Algorithm: algo.Concurrency, Limit: 5, Window: minute}),
		rule("bucket", algo.Limit{Algorithm: algo.TokenBucket, Limit: 5, Window: minute}),
	}
	rules[1].Durability = Escrow
	ban := rule("banned", log(1, minute)).banning(time.Hour)
	for range 2 {
		must.Value(s.Decide(s.key("banned", "k"), ban, at(0), cost(1), nil))(tb)
	}
	loan := rule("lent", log(500, minute))
	must.Value(s.Lend(s.key("lent", "k"), loan, at(0), Borrow{ID: algo.LoanID{Borrower: 1, Number: 2}, Want: 20}))(tb)
	use := func(id uint64) {
		for _, r := range rules {
			call := Call{Request: algo.Request{Cost: 1, Nonce: 1}, RequestID: fmt.Sprint(id),
				Reservation: reservationOf(id), ReserveFor: minute}
			must.Value(s.Decide(s.key(r.Scope, "k"), r, at(0), call, nil))(tb)
		}
	}
	use(1)
	s.TakeOver(0, at(0))
	s.Attach(0, ownership.Backup, true)
	s.Caught(0, ownership.Backup)
	use(2)
	must.NoError(tb, s.Reset(s.key("log", "k"), "log"))
	use(3)
	s.Shut(0)
	chunk, _, more := s.Drain(0, ownership.Backup, at(0), 1<<20)
	must.True(tb, !more, "more")
	return chunk
}

func FuzzApply(f *testing.F) {
	f.Add(sampleChunk(f), true)
	f.Add([]byte{chunkVersion, itemGone, itemGone}, false)
	f.Fuzz(func(t *testing.T, chunk []byte, staged bool) {
		s := New(Config{Shut: true, MaxBytes: 1 << 24})
		s.Stage(0)
		if s.Apply(0, staged, at(time.Hour), chunk) == nil && staged {
			_ = s.Apply(0, false, at(time.Hour), sampleChunk(t))
			expect.NoError(t, s.Merge(0, at(time.Hour)))
		}
		s.TakeOver(0, at(time.Hour))
		s.TakeOverStrict(0, at(time.Hour))
		s.Open(0)
		for _, scope := range []string{"log", "window", "lent"} {
			_, err := s.Decide(s.key(scope, "k"), rule(scope, log(5, minute)), at(time.Hour), cost(1), nil)
			expect.True(t, err == nil || errors.Is(err, ErrFull), "%v", err)
		}
		s.Sweep(at(2*time.Hour), 1)
		accounted(t, s)
	})
}

// A store that hears of a time zone for the first time finds it, outside its locks; a zone that nobody knows makes no
// state.
func TestCopyZones(t *testing.T) {
	berlin := must.Value(time.LoadLocation("Europe/Berlin"))(t)
	for _, tt := range []struct {
		zone *time.Location
		err  error
	}{{berlin, nil}, {time.FixedZone("Europe/Atlantis", 3600), ErrChunk},
		{time.FixedZone("/etc/localtime", 0), ErrChunk}} {
		holder, copy := New(Config{}), New(Config{Shut: true})
		holder.TakeOver(0, at(0))
		l := newLink(holder, copy, ownership.Backup)
		l.attach(true)
		r := rule("day", algo.Limit{Algorithm: algo.FixedWindow, Limit: 5, Period: algo.Day, Zone: tt.zone})
		k := holder.key("day", "k")
		must.Value(holder.Decide(k, r, at(0), Call{Request: algo.Request{Cost: 2}}, nil))(t)
		l.drain(0)
		expect.Equal(t, copy.Apply(0, true, l.there(0), l.queue[0].chunk), tt.err, "%v", tt.zone)
		if tt.err == nil {
			copy.Promote(0)
			got, want := contents(copy, l.there(0)), contents(holder, at(0))
			expect.True(t, slices.Equal(got, want) && strings.Contains(strings.Join(got, " "), "Europe/Berlin"),
				"copied %v of %v", got, want)
		}
	}
}

// TestReloadTellsKeptKeys: a key that was under a durability of None is told to the backup as a whole once a reload has
// changed that.
func TestReloadTellsKeptKeys(t *testing.T) {
	none, kept := rule("p", log(100, minute)), rule("p", log(100, minute))
	none.Durability = None
	holder, backup := New(Config{}), New(Config{Shut: true})
	l := newLink(holder, backup, ownership.Backup)
	l.offset = 0
	l.attach(false)
	for staged := true; staged; {
		l.drain(0)
		l.deliver(t, 0, &staged)
	}
	decide(t, holder, none, "k", at(0), cost(20))
	l.sync(t, 0, false)
	n := backup.Stats().Keys
	must.True(t, n == 0, "the backup has %d keys under none", n)
	holder.Reconcile(func() algo.Instant { return at(0) }, func(string, []byte) *Rule { return kept })
	l.sync(t, 0, false)
	take(backup, at(0))
	expect.Equal(t, decide(t, backup, kept, "k", at(0), cost(0)).Remaining, 80, "are left on the backup")
}

// TestReloadForgetsUncopiedKeys: once a reload has brought a key under a durability of None, the backup has neither the
// key nor its reservations and allowance.
func TestReloadForgetsUncopiedKeys(t *testing.T) {
	for _, d := range []Durability{Async, Escrow, Sync} {
		none := rule("p", log(100, minute)).under(None)
		holder, backup := New(Config{}), New(Config{Shut: true})
		l := newLink(holder, backup, ownership.Backup)
		l.attach(false)
		for staged := true; staged; {
			l.drain(0)
			l.deliver(t, 0, &staged)
		}
		kept := releasing(d, log(100, minute))
		decide(t, holder, kept, "k", at(0), reserveFor(1, 3, time.Second))
		decide(t, holder, kept, "k", at(0), cost(1))
		l.sync(t, 0, false)
		must.True(t, backup.Stats().Keys == 1 && backup.Stats().Reservations == 1, "%v: not copied", d)
		holder.Reconcile(func() algo.Instant { return at(0) }, func(string, []byte) *Rule { return none })
		for _, now := range []time.Duration{0, 2 * quietAfter} {
			l.sync(t, now, false)
			holder.Sweep(at(now), 1)
		}
		st := backup.Stats()
		expect.True(t, st.Keys == 0 && st.Reservations == 0, "%v: the backup has %+v", d, st)
		_, part := holder.at(0)
		expect.True(t, len(part.role.advances.by) == 0, "%v: an allowance is left", d)
		expect.Equal(t, decide(t, holder, none, "k", at(0), cost(0)).Remaining, 99, "%v: are left on the holder", d)
		accounted(t, holder)
		accounted(t, backup)
	}
}

// TestColdOfADroppedKey: a strict key that the holder has dropped as idle, and then starts full as a new key, starts
// full at the follower too, which has its record still.
func TestColdOfADroppedKey(t *testing.T) {
	holder, copied, l := followed(t)
	r := rule("p", log(10, minute)).under(Sync).strict()
	grant(holder)
	decide(t, holder, r, "k", at(0), cost(1))
	l.sync(t, 0, false)
	expect.Equal(t, holder.Sweep(at(2*time.Minute), 1), 1, "records that the holder drops")
	holder.ColdStrict(0, at(2*time.Minute))
	l.sync(t, 2*time.Minute, false)
	grant(copied)
	got := left(t, copied, r, 2*time.Minute+time.Second, l)
	expect.Equal(t, got, int64(0), "units left at the follower")
	accounted(t, copied)
}
