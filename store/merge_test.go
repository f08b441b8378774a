package store

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
)

// party is one process of a test of splits, with what its content has been told of: the admissions by number.
type party struct {
	store *Store
	knows map[int]bool // admissions that its content is to count
}

// split is a partition held by several processes at once.
type split struct {
	t       *testing.T
	rules   []*Rule
	now     time.Duration
	claims  uint64
	at      []time.Duration // of the admissions
	of      []string        // whose they are: scope/key
	parties []*party
}

func newSplit(t *testing.T, parties int, rules ...*Rule) *split {
	s := &split{t: t, rules: rules}
	for range parties {
		s.parties = append(s.parties, &party{New(Config{Shut: true}), make(map[int]bool)})
	}
	return s
}

// admit has a party admit one unit.
func (s *split) admit(i int, r *Rule, key string) {
	s.t.Helper()
	p := s.parties[i]
	d, err := p.store.Decide(p.store.key(r.Scope, key), r, at(s.now), cost(1), nil)
	if err != nil || !d.Allowed {
		s.t.Fatal(d, err)
	}
	p.knows[len(s.at)] = true
	s.at = append(s.at, s.now)
	s.of = append(s.of, r.Scope+"/"+key)
}

// replicate gives one party a whole copy of what another has.
func (s *split) replicate(from, to int) {
	s.t.Helper()
	a, b := s.parties[from], s.parties[to]
	l := newLink(a.store, b.store, ownership.Target)
	l.offset, l.most = 0, 500
	l.sync(s.t, s.now, true)
	b.knows = make(map[int]bool)
	for n := range a.knows {
		b.knows[n] = true
	}
}

// changes brings a copy up to date.
func (s *split) changes(from, to int) {
	s.t.Helper()
	a, b := s.parties[from], s.parties[to]
	l := newLink(a.store, b.store, ownership.Target)
	l.offset = 0
	l.sync(s.t, s.now, false)
	for n := range a.knows {
		b.knows[n] = true
	}
}

// claim opens a party's content under a claim of its own.
func (s *split) claim(i int) {
	s.claims++
	s.parties[i].store.TakeOver(0, at(s.now), claim(1, s.claims, uint64(i)))
	s.parties[i].store.Open(0)
}

// merge has one party give what it has to another.
func (s *split) merge(from, to int) {
	s.t.Helper()
	a, b := s.parties[from], s.parties[to]
	l := newLink(a.store, b.store, ownership.Target)
	l.offset, l.most = 0, 700
	l.attach(true)
	a.store.Shut(0)
	for more := true; more; {
		var chunk []byte
		chunk, _, more = a.store.Drain(0, ownership.Target, at(s.now), l.most)
		if err := b.store.Apply(0, true, at(s.now), chunk); err != nil {
			s.t.Fatal(err)
		}
	}
	if err := b.store.Merge(0, at(s.now)); err != nil {
		s.t.Fatal(err)
	}
	a.store.Discard(0)
	for n := range a.knows {
		b.knows[n] = true
	}
	a.knows = make(map[int]bool)
}

// check compares what a party counts with what it is to count: never less, and not more where it is told to be exact.
func (s *split) check(i int, exact bool) {
	s.t.Helper()
	p := s.parties[i]
	for _, r := range s.rules {
		for k := range 5 {
			key := fmt.Sprint(k)
			var live int64
			for n := range p.knows {
				if s.of[n] == r.Scope+"/"+key && s.at[n] > s.now-r.Limits[0].Window {
					live++
				}
			}
			d, err := p.store.Decide(p.store.key(r.Scope, key), r, at(s.now), cost(0), nil)
			if err != nil {
				s.t.Fatal(err)
			}
			if used := mostOf(r) - d.Remaining; used < live || exact && used > live {
				s.t.Fatalf("%s/%s: party %d counts %d at %v, of %d admissions", r.Scope, key, i, used, s.now, live)
			}
		}
	}
}

// TestMergePair: one process goes on, its backup claims and goes on, and one gives what it has to the other: the sum is
// exact, whoever wins, however often the partition has been claimed before, and for keys from before and after.
func TestMergePair(t *testing.T) {
	for seed := range seeds(200) {
		rng := rand.New(rand.NewPCG(seed, 11))
		// Logs tell exactly what counts; the limits are never reached.
		long, short := rule("long", log(10_000, minute)), rule("short", log(10_000, 5*time.Second))
		s := newSplit(t, 3, long, short)
		use := func(i, n int) {
			for range n {
				s.now += time.Duration(rng.Int64N(int64(300 * time.Millisecond)))
				s.admit(i, s.rules[rng.IntN(2)], fmt.Sprint(rng.IntN(5)))
				if rng.IntN(20) == 0 {
					s.parties[i].store.Sweep(at(s.now), 1)
				}
			}
		}
		holder, backup := 0, 1
		s.claim(holder)
		use(holder, 20)
		for range rng.IntN(6) {
			s.replicate(holder, backup)
			s.parties[holder].store.Shut(0)
			holder, backup = backup, holder
			s.claim(holder)
			use(holder, rng.IntN(20))
		}
		s.replicate(holder, backup)
		use(holder, rng.IntN(10))
		s.changes(holder, backup)
		s.check(holder, true)
		s.parties[holder].store.Detach(0, ownership.Target)
		use(holder, rng.IntN(10)) // unknown to the backup
		s.claim(backup)
		for range rng.IntN(4) {
			use(holder, rng.IntN(20))
			use(backup, rng.IntN(20))
			if rng.IntN(3) == 0 {
				// A planned move changes nothing about the lineage.
				s.replicate(backup, 2)
				s.parties[backup].store.Discard(0)
				s.parties[backup], s.parties[2] = s.parties[2], s.parties[backup]
				s.parties[backup].store.Open(0)
			}
		}
		if rng.IntN(2) == 0 {
			holder, backup = backup, holder
		}
		s.merge(holder, backup)
		s.check(backup, true)
		s.claim(backup)
		use(backup, 10)
		s.check(backup, true)
	}
}

// TestMergeAny lets splits happen within splits: whatever the order, nothing that a content was told of is forgotten.
func TestMergeAny(t *testing.T) {
	exactly, total := 0, 0
	for seed := range seeds(300) {
		rng := rand.New(rand.NewPCG(seed, 12))
		s := newSplit(t, 4, rule("long", log(10_000, minute)), rule("short", log(10_000, 5*time.Second)))
		s.claim(0)
		open := []int{0}
		for range 120 {
			s.now += time.Duration(rng.Int64N(int64(time.Second)))
			i := open[rng.IntN(len(open))]
			switch n := rng.IntN(20); {
			case n < 14:
				s.admit(i, s.rules[rng.IntN(2)], fmt.Sprint(rng.IntN(5)))
			case n == 14:
				s.parties[i].store.Sweep(at(s.now), 1)
			case n < 18 && len(open) < 4:
				to := rng.IntN(4)
				if !slices.Contains(open, to) {
					s.replicate(i, to)
					s.parties[i].store.Detach(0, ownership.Target)
					if rng.IntN(2) == 0 {
						s.admit(i, s.rules[0], "0")
					}
					s.claim(to)
					open = append(open, to)
				}
			case n >= 18 && len(open) > 1:
				to := open[rng.IntN(len(open))]
				if to != i {
					s.merge(i, to)
					open = slices.DeleteFunc(open, func(o int) bool { return o == i })
					if true {
						s.claim(to)
					}
				}
			}
			for _, o := range open {
				s.check(o, false)
			}
		}
		for len(open) > 1 {
			s.merge(open[1], open[0])
			open = slices.Delete(open, 1, 2)
		}
		s.check(open[0], false)
		total++
		p := s.parties[open[0]]
		d, err := p.store.Decide(p.store.key("long", "0"), s.rules[0], at(s.now), cost(0), nil)
		if err != nil {
			t.Fatal(err)
		}
		live := int64(0)
		for n := range p.knows {
			if s.of[n] == "long/0" && s.at[n] > s.now-minute {
				live++
			}
		}
		if 10_000-d.Remaining == live {
			exactly++
		}
		for _, p := range s.parties {
			accounted(t, p.store)
		}
	}
	t.Logf("%d of %d exact", exactly, total)
	if exactly < total/3 {
		t.Errorf("only %d of %d merges were exact", exactly, total)
	}
}

// TestMergeSweptDelta: what a bucket's delta holds stays whole while the bucket fills, also when a sweep looks at it.
func TestMergeSweptDelta(t *testing.T) {
	r := rule("p", algo.Limit{Algorithm: algo.TokenBucket, Limit: 10, Window: 10 * time.Second})
	s := newSplit(t, 2, r)
	s.claim(0)
	s.replicate(0, 1)
	s.claim(1)
	for range 8 {
		s.admit(1, r, "k")
	}
	s.now = 8 * time.Second // full again
	for range 8 {
		s.admit(0, r, "k")
	}
	s.parties[1].store.Sweep(at(s.now), 1)
	s.merge(1, 0)
	// One that had seen all of it had gone from 8 of 10 to none in use, and had admitted 8 then.
	p := s.parties[0].store
	if d, err := p.Decide(p.key("p", "k"), r, at(s.now), cost(0), nil); err != nil || d.Remaining != 0 {
		t.Errorf("%d remain (%v), where 8 were admitted a moment ago and 8 beside them while they were apart", d.Remaining, err)
	}
}

// TestMergeOfPartialGrant: what is added of a request that was granted in part is what was granted.
func TestMergeOfPartialGrant(t *testing.T) {
	r := rule("p", log(100, minute))
	s := newSplit(t, 2, r)
	s.claim(0)
	s.admit(0, r, "k")
	s.replicate(0, 1)
	s.claim(1)
	if d := decide(t, s.parties[1].store, r, "k", at(0), Call{Request: algo.Request{Cost: 500, Partial: true}}); d.Granted != 99 {
		t.Fatalf("%+v", d)
	}
	s.merge(1, 0)
	p := s.parties[0].store
	if n, err := p.Refund(p.key("p", "k"), r, at(0), 500, "", ""); n != 100 || err != nil {
		t.Errorf("%d were in use, want 100 (%v)", n, err)
	}
}

// TestMergeOfReservations: pending reservations of a key that is merged, of both sides, give nothing back, and one that was made afterwards does.
func TestMergeOfReservations(t *testing.T) {
	for _, limit := range []algo.Limit{log(100, minute), {Algorithm: algo.TokenBucket, Limit: 100, Window: time.Hour}} {
		r := rule("p", limit)
		s := newSplit(t, 2, r)
		s.claim(0)
		s.admit(0, r, "k")
		s.replicate(0, 1)
		s.claim(1)
		reserve := func(i int, n uint64) {
			decide(t, s.parties[i].store, r, "k", at(0), Call{Request: algo.Request{Cost: 3}, Reservation: reservationOf(n), ReserveFor: minute})
		}
		reserve(0, 1)
		reserve(1, 2)
		s.merge(1, 0)
		p := s.parties[0].store
		reserve(0, 3)
		before := decide(t, p, r, "k", at(0), cost(0)).Remaining
		for i, want := range []int64{0, 0, 3} {
			if n, known, err := settle(p, p.key("p", "k"), r, at(0), reservationOf(uint64(i+1)), 0); n != want || !known || err != nil {
				t.Errorf("%v: %d were given back of reservation %d, want %d (%v, %v)", limit.Algorithm, n, i+1, want, known, err)
			}
		}
		if d := decide(t, p, r, "k", at(0), cost(0)); d.Remaining != before+3 {
			t.Errorf("%v: %d are left, want %d", limit.Algorithm, d.Remaining, before+3)
		}
	}
}

// TestMergeOfMovedReservations: no chunk says under which claim a reservation was charged. Where it has come from another process, what is given back of
// it stays in what is added of that claim, until it leaves by itself: the sum is never less than what was admitted.
func TestMergeOfMovedReservations(t *testing.T) {
	for _, before := range []bool{false, true} { // it is cancelled before the merge
		for _, to := range []int{0, 2} {
			r := rule("p", log(100, minute))
			s := newSplit(t, 3, r)
			s.claim(0)
			s.admit(0, r, "k")
			s.replicate(0, 1)
			s.claim(1)
			decide(t, s.parties[1].store, r, "k", at(0), Call{Request: algo.Request{Cost: 3}, Reservation: reservationOf(1), ReserveFor: minute})
			s.replicate(1, 2) // it moves there, under the same claim
			s.parties[1].store.Shut(0)
			s.parties[2].store.Open(0)
			cancel := func(i int) {
				p := s.parties[i].store
				if n, known, err := settle(p, p.key("p", "k"), r, at(0), reservationOf(1), 0); n > 3 || !known || err != nil {
					t.Errorf("before %t, to %d: %d were given back (%v, %v)", before, to, n, known, err)
				}
			}
			if before {
				cancel(2)
			}
			s.admit(0, r, "k")
			s.admit(2, r, "k")
			s.merge(2-to, to)
			if !before {
				cancel(to)
			}
			d := decide(t, s.parties[to].store, r, "k", at(0), cost(0))
			if used := 100 - d.Remaining; used < 3 || used > 3+3 {
				t.Errorf("before %t, to %d: %d count of 3 that were admitted and 3 that were given back", before, to, used)
			}
			s.now = minute + time.Second
			if d := decide(t, s.parties[to].store, r, "k", at(s.now), cost(0)); d.Remaining != 100 {
				t.Errorf("before %t, to %d: %d are left of 100 a window later", before, to, d.Remaining)
			}
		}
	}
}

// TestMergeOfWholes: where whole states are merged, a table of what was charged under a claim that both knew, one of them
// less of it, does not pass for the whole of that any more.
func TestMergeOfWholes(t *testing.T) {
	r := rule("p", log(100, 5*time.Second))
	s := newSplit(t, 4, r)
	s.claim(0)
	s.admit(0, r, "0")
	s.replicate(0, 1)
	s.claim(1) // the second claim
	s.replicate(1, 2)
	s.claim(2)        // the third
	s.replicate(0, 3) // of the first: it knows as much as all others
	s.claim(3)
	s.now += 2 * time.Hour
	for i := range 3 {
		s.admit(i, r, "0")
	}
	s.parties[1].store.Sweep(at(s.now), 1) // which takes the first claim off its lineage
	s.admit(1, r, "0")
	s.merge(1, 2)
	s.check(2, false)
	s.admit(3, r, "0")
	s.merge(2, 3)
	s.check(3, false)
}

// TestMergeOfLateCharges: what was charged under an old claim shortly before a merge is remembered with its claim for as long as it
// counts, and not only until everything from before the next claim has expired.
func TestMergeOfLateCharges(t *testing.T) {
	for late := range 3 { // who charged it: 0 under the first claim, 1 under none, 2 under one of which the receiver knows something
		r := rule("p", log(100, 2*time.Hour))
		s := newSplit(t, 4, r)
		s.claim(0)
		s.admit(0, r, "0")
		for i := range 3 {
			s.replicate(i, i+1)
			s.claim(i + 1)
			s.admit(i+1, r, "0")
		}
		s.admit(1, r, "0")
		s.merge(1, 3)
		s.now = 20 * time.Minute
		s.claim(3)
		s.replicate(3, 1)
		s.claim(1) // goes on beside all of it
		s.now = 90 * time.Minute
		if late == 1 {
			late = len(s.parties)
			s.parties = append(s.parties, &party{New(Config{}), make(map[int]bool)})
		}
		s.admit(late, r, "0")
		s.merge(late, 3)
		s.claim(3)
		s.now = 130 * time.Minute
		s.parties[3].store.Sweep(at(s.now), 1) // which takes claims off a lineage
		s.admit(3, r, "0")
		s.merge(3, 1)
		s.check(1, false)
	}
}

// TestMergeBesideShortLived: that all keys of a partition count for a second says nothing of one that is asked about next.
func TestMergeBesideShortLived(t *testing.T) {
	short := rule("short", log(10, time.Second))
	r := rule("p", algo.Limit{Algorithm: algo.TokenBucket, Limit: 10, Window: 10 * time.Second})
	s := newSplit(t, 2, short, r)
	s.claim(0)
	s.admit(0, short, "0")
	s.replicate(0, 1)
	s.claim(1)
	s.now = 2 * time.Second
	s.admit(1, short, "0")
	s.parties[1].store.Sweep(at(s.now), 1)
	for i := range 2 {
		for range 5 {
			s.admit(i, r, "1")
		}
	}
	s.now = 5 * time.Second // 3 of 10 are repaid
	s.merge(1, 0)
	p := s.parties[0].store
	if d, err := p.Decide(p.key("p", "1"), r, at(s.now), cost(0), nil); err != nil || d.Remaining != 3 {
		t.Errorf("%d of 10 remain (%v), want 3", d.Remaining, err)
	}
}

// TestMergeFollowers: what a merge has changed reaches the followers.
func TestMergeFollowers(t *testing.T) {
	for n := range 4 {
		claimed, told := n%2 == 1, n >= 2
		s := newSplit(t, 3, rule("p", log(100, minute)))
		s.claim(0)
		s.admit(0, s.rules[0], "0")
		s.admit(0, s.rules[0], "gone")
		s.replicate(0, 1)
		s.claim(1)
		winner, loser := 0, 1
		if claimed {
			winner, loser = 1, 0
		}
		l := newLink(s.parties[winner].store, s.parties[2].store, ownership.Backup)
		l.offset = 0
		l.sync(t, s.now, true)
		for i := range 2 {
			s.admit(i, s.rules[0], fmt.Sprint(i))
			decide(t, s.parties[i].store, s.rules[0], fmt.Sprint(i), at(s.now), Call{Request: algo.Request{Cost: 1}, RequestID: fmt.Sprint(i)})
			decide(t, s.parties[i].store, s.rules[0], fmt.Sprint(i), at(s.now), Call{Request: algo.Request{Cost: 1}, Reservation: reservationOf(uint64(i + 1)), ReserveFor: minute})
		}
		if err := s.parties[0].store.Reset(s.parties[0].store.key("p", "gone"), "p"); err != nil {
			t.Fatal(err)
		}
		if told {
			l.sync(t, s.now, false)
		}
		s.merge(loser, winner)
		l.sync(t, s.now, false)
		want, got := contents(s.parties[winner].store, at(s.now)), contents(s.parties[2].store, at(s.now))
		if !slices.Equal(got, want) {
			t.Errorf("claimed %v, told before %v: the copy has\n%q\nwant\n%q", claimed, told, got, want)
		}
		for _, p := range s.parties {
			accounted(t, p.store)
		}
	}
}

// TestMergeLeases: a lease that both sides know is one lease.
func TestMergeLeases(t *testing.T) {
	r := rule("p", algo.Limit{Algorithm: algo.Concurrency, Limit: 10, Window: minute})
	s := newSplit(t, 2, r)
	s.claim(0)
	acquire := func(i int, nonce uint64) uint64 {
		p := s.parties[i].store
		d, err := p.Decide(p.key("p", "k"), r, at(0), Call{Request: algo.Request{Cost: 1, Nonce: nonce}}, nil)
		if err != nil || !d.Allowed {
			t.Fatal(d, err)
		}
		return d.Lease
	}
	acquire(0, 1)
	s.replicate(0, 1)
	s.claim(1)
	acquire(0, 2)
	last := acquire(1, 3)
	s.merge(0, 1)
	p := s.parties[1].store
	if d, err := p.Decide(p.key("p", "k"), r, at(0), cost(0), nil); err != nil || d.Remaining != 7 {
		t.Errorf("%d of 10 remain (%v), want 7", d.Remaining, err)
	}
	if ok, err := p.Release(p.key("p", "k"), r, at(0), last); !ok || err != nil {
		t.Errorf("a lease got lost: %v, %v", ok, err)
	}
}

// TestDecideAgainstEverything has callers decide while drains, moves and merges go on: no admission is lost or made twice.
func TestDecideAgainstEverything(t *testing.T) {
	const callers, keys = 4, 50
	rounds := 3000
	if underRace {
		rounds = 500
	}
	stores := [2]*Store{New(Config{Shut: true, Urgent: func(int) {}}), New(Config{Shut: true, Urgent: func(int) {}})}
	stores[0].TakeOver(0, at(0), claim(1, 1, 1))
	stores[0].Open(0)
	rules := []*Rule{rule("a", window(1<<40, time.Hour)), rule("b", window(1<<40, time.Hour)), rule("c", log(1<<20, time.Hour))}
	rules[1].Durability, rules[2].Durability = Escrow, Sync
	var admitted [3][keys]atomic.Int64
	var work sync.WaitGroup
	for c := range callers {
		work.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(c), 5))
			for n := 0; n < rounds; {
				r, k := rng.IntN(3), rng.IntN(keys)
				s := stores[rng.IntN(2)]
				d, err := s.Decide(s.key(rules[r].Scope, fmt.Sprint(k)), rules[r], at(1), Call{Request: algo.Request{Cost: 1}, RequestID: fmt.Sprint(rng.Uint64())}, nil)
				switch {
				case errors.Is(err, ErrShut):
				case err != nil || !d.Allowed:
					t.Error(d, err)
					return
				default:
					n++
					admitted[r][k].Add(1)
				}
			}
		})
	}
	stop := make(chan struct{})
	var mover, sweeper sync.WaitGroup
	sweeper.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				for _, s := range stores {
					s.Sweep(at(1), 1)
					s.Stats()
					s.Pending(0, ownership.Backup)
				}
			}
		}
	})
	mover.Go(func() {
		rng := rand.New(rand.NewPCG(9, 9))
		holder := 0
		for n := uint64(2); ; n++ {
			from, to := stores[holder], stores[1-holder]
			to.Discard(0)
			to.Stage(0)
			from.Attach(0, ownership.Backup, true)
			drain := func(staged bool) {
				for more := true; more; {
					var chunk []byte
					var version uint64
					chunk, version, more = from.Drain(0, ownership.Backup, at(1), 2000)
					if err := to.Apply(0, staged, at(1), chunk); err != nil {
						t.Error(err)
					}
					from.Confirm(0, ownership.Backup, version)
				}
			}
			drain(true)
			if rng.IntN(3) == 0 {
				// The other claims from its copy and is merged in again, with nothing of its own. It must not add anything.
				other := New(Config{Shut: true})
				other.TakeOver(0, at(1), claim(2, n, 2))
				l := newLink(other, from, ownership.Target)
				l.offset = 0
				from.Stage(0)
				l.attach(true)
				l.drain(0)
				if err := from.Apply(0, true, at(1), l.queue[0].chunk); err != nil {
					t.Error(err)
				}
				if err := from.Merge(0, at(1)); err != nil {
					t.Error(err)
				}
				from.TakeOver(0, at(1), claim(3, n, 1))
			}
			to.Promote(0)
			from.Caught(0, ownership.Backup)
			drain(false)
			from.Shut(0)
			drain(false)
			to.Open(0)
			holder = 1 - holder
			select {
			case <-stop:
				return
			default:
			}
		}
	})
	work.Wait()
	close(stop)
	mover.Wait()
	sweeper.Wait()
	holder := stores[0]
	if _, err := holder.Refund(holder.key("a", "0"), rules[0], at(1), 0, "", ""); err != nil {
		holder = stores[1]
	}
	for r := range rules {
		for k := range keys {
			d, err := holder.Decide(holder.key(rules[r].Scope, fmt.Sprint(k)), rules[r], at(1), cost(0), nil)
			if err != nil {
				t.Fatal(err)
			}
			if got, want := rules[r].Limits[0].Limit-d.Remaining, admitted[r][k].Load(); got != want {
				t.Errorf("%s/%d: %d are counted of %d", rules[r].Scope, k, got, want)
			}
		}
	}
	for _, s := range stores {
		accounted(t, s)
	}
}

// TestMergeWindowTurnedBucket: a policy that becomes a bucket while a partition is split counts what both sides have admitted, and
// takes off once what a bucket has repaid since then: also of a key that was new under a claim, and where the window that it was
// counted in has ended since.
func TestMergeWindowTurnedBucket(t *testing.T) {
	old := rule("p", log(100, 10*time.Second))
	bucket := rule("p", algo.Limit{Algorithm: algo.TokenBucket, Limit: 100, Window: 1000 * time.Second})
	for _, known := range []bool{false, true} { // before they parted
		for _, charged := range []bool{false, true} { // also once it is a bucket
			t.Run(fmt.Sprintf("known=%v,charged=%v", known, charged), func(t *testing.T) {
				s := newSplit(t, 2, old)
				s.claim(0)
				if known {
					s.admit(0, old, "k")
				}
				s.replicate(0, 1)
				s.claim(1)
				total := int64(len(s.at))
				for i := range s.parties {
					for range 30 {
						s.admit(i, old, "k")
						total++
					}
				}
				for i, p := range s.parties {
					p.store.Reconcile(func() algo.Instant { return at(s.now) }, func(string, []byte) *Rule { return bucket })
					if charged {
						s.admit(i, bucket, "k")
						total++
					}
				}
				s.now = 50 * time.Second // 5 are repaid, and the window has ended
				if charged {
					for i := range s.parties {
						s.admit(i, bucket, "k")
						total++
					}
				}
				for _, p := range s.parties {
					p.store.Sweep(at(s.now), 1)
				}
				s.merge(1, 0)
				p := s.parties[0].store
				d, err := p.Decide(p.key("p", "k"), bucket, at(s.now), cost(0), nil)
				if err != nil {
					t.Fatal(err)
				}
				if used, want := 100-d.Remaining, total-5; used < want {
					t.Errorf("%d of 100 are in use, where %d were admitted and 5 repaid", used, total)
				}
				for _, p := range s.parties {
					accounted(t, p.store)
				}
			})
		}
	}
}

// TestMergeColdStrict: strict keys that start full, because nobody knows what a lost holder has admitted, do so as well once they
// are merged into the content of another claimant, whichever of the two copies is the later one: keys that were known and others.
func TestMergeColdStrict(t *testing.T) {
	for _, order := range [][]int{{1, 2}, {2, 1}} {
		r := rule("p", log(100, minute))
		r.Strict, r.Durability = true, Sync
		s := newSplit(t, 3, r)
		grant := func(i int) {
			s.parties[i].store.Lease(0, int64(time.Hour))
			s.parties[i].store.Unguarded(0, true)
		}
		s.claim(0)
		grant(0)
		s.admit(0, r, "known")
		for _, i := range order {
			s.replicate(0, i)
		}
		s.claim(1)
		s.claim(2)
		s.parties[2].store.ColdStrict(0, at(s.now))
		s.merge(2, 1)
		grant(1)
		for _, key := range []string{"known", "new"} {
			p := s.parties[1].store
			d, err := p.Decide(p.key("p", key), r, at(s.now), cost(0), nil)
			if err != nil || d.Remaining != 0 {
				t.Errorf("copies in the order %v: %q has %d left: %v", order, key, d.Remaining, err)
			}
		}
	}
}

// TestMergeOfLosses: of two losses for strict rules the later one counts, and that of either side what its own holder had lost.
func TestMergeOfLosses(t *testing.T) {
	strict, closed := rule("strict", log(100, minute)), rule("closed", log(100, minute))
	strict.Strict, closed.ColdClosed = true, true
	for _, earlier := range []int{0, 1} {
		s := newSplit(t, 2, strict, closed)
		s.claim(0)
		s.admit(0, closed, "known")
		s.replicate(0, 1)
		s.claim(1)
		s.parties[0].store.Cold(0, at(0))
		s.parties[earlier].store.ColdStrict(0, at(0))
		s.parties[1-earlier].store.ColdStrict(0, at(30*time.Second))
		s.admit(1, closed, "other")
		s.now = 40 * time.Second
		s.merge(0, 1)
		p := s.parties[1].store
		p.Lease(0, int64(time.Hour))
		p.Unguarded(0, true)
		for _, step := range []struct {
			now  time.Duration
			rule *Rule
			want int64
		}{
			{40 * time.Second, closed, 100}, {61 * time.Second, strict, 0}, {91 * time.Second, strict, 100},
		} {
			if d := decide(t, p, step.rule, "new", at(step.now), cost(0)); d.Remaining != step.want {
				t.Errorf("the earlier one on side %d, %s at %v: %d are left, want %d", earlier, step.rule.Scope, step.now, d.Remaining, step.want)
			}
		}
	}
}

// TestMergeOfOneReservation: a reservation that both sides know stays one, whose units are where they were charged.
func TestMergeOfOneReservation(t *testing.T) {
	r := rule("p", log(100, minute))
	for from := range 2 {
		s := newSplit(t, 2, r)
		s.claim(0)
		decide(t, s.parties[0].store, r, "k", at(s.now), Call{Request: algo.Request{Cost: 3}, Reservation: reservationOf(1), ReserveFor: minute})
		s.replicate(0, 1)
		s.claim(1)
		s.merge(from, 1-from)
		p := s.parties[1-from].store
		if n, known, err := settle(p, p.key("p", "k"), r, at(s.now), reservationOf(1), 0); n != 3 || !known || err != nil {
			t.Errorf("merged from %d: %d were given back of 3 (%v, %v)", from, n, known, err)
		}
	}
}

// TestMergeOfWhatIsOwed: what the lost holders of both sides may have admitted is owed.
func TestMergeOfWhatIsOwed(t *testing.T) {
	r := rule("p", log(100, minute))
	r.Strict = true
	for n := range 6 {
		from, without := n%2, n/2 // by both, or by one
		s := newSplit(t, 2, r)
		grant := func(i int) {
			s.parties[i].store.Lease(0, int64(time.Hour))
			s.parties[i].store.Unguarded(0, true)
		}
		s.claim(0)
		grant(0)
		s.admit(0, r, "k")
		s.replicate(0, 1)
		s.claim(1)
		var owed int64
		for i, o := range []owing{{advanced: 1, inherited: 10}, {advanced: 2, inherited: 20}} {
			if i+1 == without {
				continue
			}
			owed += o.advanced + o.inherited
			change(t, s.parties[i].store, r, "k", func(part *partition, rec record) {
				o.hash = rec.hash()
				rec.set(owedFlag)
				part.extras.owed = map[stateID]owing{{"p", "k"}: o}
			})
		}
		s.merge(from, 1-from)
		grant(1 - from)
		p := s.parties[1-from].store
		change(t, p, r, "k", func(_ *partition, rec record) {
			if !rec.has(owedFlag) {
				t.Error("the record is not marked")
			}
		})
		p.TakeOverStrict(0, at(s.now))
		if d := decide(t, p, r, "k", at(s.now), cost(0)); d.Remaining != 100-1-owed {
			t.Errorf("%d are left of 100 after 1, and %d that are owed", d.Remaining, owed)
		}
	}
}

// TestTableOfTheNewestClaim: a key from before a claim has what was charged since in its table, for as long as anything from before can count; from
// then on its state is that.
func TestTableOfTheNewestClaim(t *testing.T) {
	s := New(Config{})
	r := rule("p", log(100, time.Hour))
	s.TakeOver(0, at(0), claim(1, 1, 7))
	decide(t, s, r, "k", at(0), cost(1))
	s.TakeOver(0, at(30*time.Minute), claim(1, 2, 7))
	part := &s.shards[0].parts[0]
	for _, step := range []struct {
		now          time.Duration
		table, since int
	}{
		{30 * time.Minute, 1, 0}, {time.Hour + time.Minute, 1, 0}, {91 * time.Minute, 0, 1},
	} {
		decide(t, s, r, "k", at(step.now), cost(1))
		change(t, s, r, "k", func(_ *partition, rec record) {
			if n := part.newestDelta().count; n != step.table || rec.since() != step.since {
				t.Errorf("%v: the table has %d keys, and the state stands for %d, want %+v", step.now, n, rec.since(), step)
			}
		})
	}
	// A partition that has no keys may get some that count for longer than any so far.
	none := New(Config{})
	none.TakeOver(0, at(0), claim(1, 1, 7))
	none.TakeOver(0, at(1), claim(1, 2, 7))
	none.Sweep(at(100*time.Hour), 1)
	if n := len(none.shards[0].parts[0].extras.lineage); n != 2 {
		t.Errorf("%d claims of 2 are left", n)
	}
}

// TestTablesOfBuckets: what was charged to a bucket is in the tables of claims for as long as it may count, whatever the bucket was repaid, and
// its state is never all of it.
func TestTablesOfBuckets(t *testing.T) {
	s := New(Config{})
	bucket, window := rule("b", algo.Limit{Algorithm: algo.TokenBucket, Limit: 100, Window: minute}), rule("w", window(100, minute))
	s.TakeOver(0, at(0), claim(1, 1, 7))
	s.Cold(0, at(0)) // of a content without keys: the first claim has a table, too
	part := &s.shards[0].parts[0]
	tables := func(now time.Duration, want ...int) {
		t.Helper()
		for i, n := range want {
			if got := part.extras.lineage[i].delta.count; got != n {
				t.Errorf("%v: %d keys are in table %d, want %d", now, got, i, n)
			}
		}
	}
	stands := func(r *Rule, key string, want bool) {
		t.Helper()
		change(t, s, r, key, func(p *partition, rec record) {
			if got := s.shards[0].stands(&p.content, rec); got != want {
				t.Errorf("the state of %s/%s stands for its claim: %v", r.Scope, key, got)
			}
		})
	}
	for _, r := range []*Rule{bucket, window} {
		decide(t, s, r, "k", at(0), cost(1))
	}
	tables(0, 1)
	stands(bucket, "k", false)
	stands(window, "k", true)
	s.TakeOver(0, at(90*time.Second), claim(1, 2, 7))
	decide(t, s, bucket, "new", at(91*time.Second), cost(1))
	tables(91*time.Second, 1, 1)
	stands(bucket, "new", false)
	s.Sweep(at(140*time.Second), 1)
	tables(140*time.Second, 1, 1)
	s.Sweep(at(151*time.Second), 1)
	tables(151*time.Second, 0, 0)
}

// TestMergeOfUnnamedClaims: after a merge with what is charged under no claim, or under one for which the lineage has no place, the first claim is one under
// which not all is known.
func TestMergeOfUnnamedClaims(t *testing.T) {
	mixed := func(s *Store) bool { return s.shards[0].parts[0].extras.lineage[0].mixed }
	r := rule("p", log(100, minute))
	s := newSplit(t, 2, r)
	s.claim(0)
	s.admit(0, r, "a")
	s.parties[1].store.Open(0)
	s.admit(1, r, "b")
	s.merge(1, 0)
	if !mixed(s.parties[0].store) {
		t.Error("merged with a content without claims: all is known under the first claim")
	}
	s = newSplit(t, 2, r)
	for i := range s.parties {
		for range maxLineage {
			s.claim(i)
		}
	}
	s.now = time.Second
	s.merge(1, 0)
	if !mixed(s.parties[0].store) {
		t.Error("merged with as many claims as a lineage names: all is known under the first claim")
	}
}

// TestThin: where the tables of claims have too much in them, the oldest are given up first.
func TestThin(t *testing.T) {
	s := New(Config{})
	r := rule("p", algo.Limit{Algorithm: algo.TokenBucket, Limit: 100, Window: time.Hour})
	const keys = 10
	claims := 0
	for range 7 {
		claims++
		s.TakeOver(0, at(0), claim(1, uint64(claims), 7))
		for k := range keys {
			decide(t, s, r, fmt.Sprint(k), at(0), cost(1))
		}
	}
	var tables []int
	s.TakeOver(0, at(0), claim(1, 8, 7))
	for _, e := range s.shards[0].parts[0].extras.lineage {
		n := -1
		if e.delta != nil {
			n = e.delta.count
		}
		tables = append(tables, n)
	}
	if want := []int{-1, -1, -1, keys, keys, keys, keys, 0}; !slices.Equal(tables, want) {
		t.Errorf("the tables have %v keys, want %v", tables, want)
	}
}

// TestMergeAfterEscrowIsCharged: what a claimant charges for the lost holder's allowances, before its claim, is no change under the
// holder's claim. If it were counted as such, the copy would seem to know what the holder admitted after its last chunk.
func TestMergeAfterEscrowIsCharged(t *testing.T) {
	plain, escrow := rule("plain", log(100, minute)), rule("escrow", log(100, minute))
	escrow.Durability = Escrow
	for _, receiver := range []int{0, 1} {
		s := newSplit(t, 2, plain)
		s.claim(0)
		s.claim(1)
		s.parties[1].store.Cold(0, at(s.now))
		s.admit(1, plain, "0")
		s.merge(1, 0) // so that the newest claim has a table of its own
		s.admit(0, plain, "1")
		l := newLink(s.parties[0].store, s.parties[1].store, ownership.Backup)
		l.offset = 0
		l.sync(t, s.now, true)
		for k := range 5 {
			s.admit(0, escrow, fmt.Sprint(k))
		}
		l.sync(t, s.now, false)
		for n := range s.parties[0].knows {
			s.parties[1].knows[n] = true
		}
		s.admit(0, plain, "2") // the copy does not hear of it
		s.claim(1)
		s.admit(1, plain, "2")
		s.merge(1-receiver, receiver)
		s.check(receiver, true)
	}
}

// TestMergeOfTurnedWindow: a window of a claimant ends in the midst of the claim. What it admits in the next one counts, after a
// merge, until that has ended, and what it admitted in the one before does not.
func TestMergeOfTurnedWindow(t *testing.T) {
	r := rule("p", window(10, 10*time.Second))
	long := &Rule{Scope: "long", Limits: algo.Limits{window(10, 10*time.Second), window(1000, minute)}}
	s := newSplit(t, 2, r, long)
	used := func(i int, r *Rule, want int64) {
		t.Helper()
		store := s.parties[i].store
		d, err := store.Decide(store.key(r.Scope, "0"), r, at(s.now), cost(0), nil)
		if used := r.Limits[0].Limit - d.Remaining; err != nil || used != want {
			t.Fatalf("%s: %d in use at %v, %v; want %d", r.Scope, used, s.now, err, want)
		}
	}
	admit := func(i, n int) {
		t.Helper()
		for range n {
			s.admit(i, r, "0")
			s.admit(i, long, "0")
		}
	}
	s.claim(0)
	admit(0, 1) // a window until 10 s
	s.replicate(0, 1)
	s.now = 7 * time.Second
	s.claim(1)
	admit(1, 3)
	s.now = 11 * time.Second
	admit(1, 6) // a window until 21 s
	s.now = 12 * time.Second
	s.merge(1, 0)
	for _, r := range s.rules {
		used(0, r, 6)
	}
	s.now = 20 * time.Second
	for _, r := range s.rules {
		used(0, r, 6)
	}
	s.now = 21 * time.Second
	for _, r := range s.rules {
		used(0, r, 0)
	}
}

// TestMergeOfRepaidReservation: a reservation whose units a bucket was repaid before a merge gives nothing back after it, on whichever side
// it was made and whichever holds the partition then, with a common past or none: what the other side charged stays.
func TestMergeOfRepaidReservation(t *testing.T) {
	r := rule("p", algo.Limit{Algorithm: algo.TokenBucket, Limit: 1, Window: time.Second, Capacity: 100})
	for i := range 8 {
		of, to, common := i&1, i>>1&1, i>>2 == 1
		s := newSplit(t, 2, r)
		s.claim(0)
		if common {
			s.replicate(0, 1)
		}
		s.claim(1)
		p := s.parties[of].store
		call := cost(2)
		call.Reservation, call.ReserveFor = reservationOf(1), minute
		if d, err := p.Decide(p.key("p", "0"), r, at(s.now), call, nil); err != nil || !d.Allowed {
			t.Fatal(d, err)
		}
		s.now = 3 * time.Second
		for range 4 {
			s.admit(1-of, r, "0")
		}
		s.merge(1-to, to)
		p = s.parties[to].store
		if _, known, err := settle(p, p.key("p", "0"), r, at(s.now), reservationOf(1), 0); err != nil || !known {
			t.Fatal(known, err)
		}
		if d, err := p.Decide(p.key("p", "0"), r, at(s.now), cost(0), nil); err != nil || d.Remaining > 96 {
			t.Errorf("reserved on %d, merged into %d, common past %t: %d remain of 100, %v; 4 have just been charged", of, to, common, d.Remaining, err)
		}
	}
}

// TestMergeAfterMovesThereAndBack: a partition that moves to its copy and back, with nothing charged in between, comes back with the version
// that it had there: otherwise what is left there would pass for newer than what is charged after that.
func TestMergeAfterMovesThereAndBack(t *testing.T) {
	r := rule("p", log(100, minute))
	for _, receiver := range []int{0, 1} {
		s := newSplit(t, 2, r)
		a, b := s.parties[0].store, s.parties[1].store
		s.claim(1)
		for range 50 { // b has counted further than a will
			b.Attach(0, ownership.Target, true)
			b.Detach(0, ownership.Target)
		}
		b.Discard(0)
		b.Shut(0)
		s.claim(0)
		s.claim(0) // so that the newest claim has a table
		to := func(from, to *Store, l *link) {
			from.Shut(0)
			l.offset = 0
			l.sync(t, s.now, false)
			from.Detach(0, ownership.Backup)
			to.AttachCurrent(0, ownership.Backup, true)
			to.Caught(0, ownership.Backup)
			to.Open(0)
		}
		l := newLink(a, b, ownership.Backup)
		l.offset = 0
		l.sync(t, s.now, true)
		to(a, b, l)
		to(b, a, newLink(b, a, ownership.Backup))
		s.admit(0, r, "0")
		s.claim(1) // with what it has
		s.admit(1, r, "0")
		a.Detach(0, ownership.Backup)
		s.merge(1-receiver, receiver)
		s.check(receiver, true)
	}
}

// follow gives one party a copy of what another has that leaves out what is kept under a durability of None, and keeps it up to date
// once more.
func (s *split) follow(from, to int) *link {
	s.t.Helper()
	a, b := s.parties[from], s.parties[to]
	l := newLink(a.store, b.store, ownership.Backup)
	l.offset, l.most = 0, 300
	l.attach(false)
	staged := true
	for more := true; more; more = l.whole {
		l.drain(s.now)
		l.deliver(s.t, s.now, &staged)
	}
	b.knows = make(map[int]bool)
	s.told(from, to)
	return l
}

// told is what a copy has heard that leaves out what is kept under None.
func (s *split) told(from, to int) {
	for n := range s.parties[from].knows {
		if !strings.HasPrefix(s.of[n], "none/") {
			s.parties[to].knows[n] = true
		}
	}
}

// hand moves a partition: the one who had it has nothing any more.
func (s *split) hand(from, to int) {
	s.t.Helper()
	s.parties[from].store.Shut(0)
	s.replicate(from, to)
	s.parties[from].store.Discard(0)
	clear(s.parties[from].knows)
	s.parties[to].store.Open(0)
}

// TestMergeOfPartialCopy: a copy without what is kept under None names the versions of its holder, and is claimed. A merge with another
// content that has some of these keys forgets none of them, and counts nothing twice but for buckets, whoever receives it.
func TestMergeOfPartialCopy(t *testing.T) {
	async, none := rule("async", log(1000, minute)), rule("none", log(1000, minute))
	none.Durability = None
	bucket := rule("none/bucket", algo.Limit{Algorithm: algo.TokenBucket, Limit: 1, Capacity: 1000, Window: time.Hour})
	bucket.Durability = None
	// The holder goes on under the claim of another process, which merges with it, and so gives itself away by no version.
	underAnother := func(s *split, admit func(i, n int), claims int) (to, from int, exact bool) {
		for range claims {
			s.claim(0)
		}
		admit(0, 3)
		s.follow(0, 1)
		s.cold(2)
		admit(2, 2)
		s.merge(2, 0)
		s.parties[0].store.Detach(0, ownership.Backup)
		s.hand(0, 3)
		admit(3, 1)
		s.claim(1)
		admit(1, 4)
		return 1, 3, true
	}
	for name, play := range map[string]func(s *split, admit func(i, n int)) (to, from int, exact bool){
		"holder under another's claim": func(s *split, admit func(i, n int)) (to, from int, exact bool) { return underAnother(s, admit, 1) },
		// The same with a table of what was charged.
		"table": func(s *split, admit func(i, n int)) (to, from int, exact bool) { return underAnother(s, admit, 2) },
		// A whole copy that is older than the one without.
		"older whole copy": func(s *split, admit func(i, n int)) (to, from int, exact bool) {
			s.claim(0)
			admit(0, 3)
			s.replicate(0, 2)
			s.parties[0].store.Detach(0, ownership.Target)
			admit(0, 2)
			s.follow(0, 1)
			s.claim(1)
			s.claim(2)
			admit(1, 4)
			admit(2, 1)
			return 1, 2, true
		},
		// It says so as well where it has gone on to another process as a whole, and under a claim of that one.
		"moved": func(s *split, admit func(i, n int)) (to, from int, exact bool) {
			s.claim(0)
			admit(0, 3)
			s.replicate(0, 2)
			s.parties[0].store.Detach(0, ownership.Target)
			s.follow(0, 1)
			s.claim(1)
			admit(1, 2)
			s.hand(1, 3)
			s.claim(3)
			s.claim(2)
			admit(3, 4)
			admit(2, 1)
			return 3, 2, true
		},
		// What has been added once is known from then on.
		"added before": func(s *split, admit func(i, n int)) (to, from int, exact bool) {
			s.claim(0)
			admit(0, 3)
			s.replicate(0, 3)
			s.parties[0].store.Detach(0, ownership.Target)
			s.replicate(0, 2)
			s.parties[0].store.Detach(0, ownership.Target)
			s.follow(0, 1)
			s.claim(1)
			s.claim(2)
			s.claim(3)
			admit(1, 2)
			admit(2, 1)
			s.merge(2, 1)
			admit(1, 1)
			admit(3, 1)
			return 1, 3, true
		},
		// The copy is told everything at last, and is newer than the other one then.
		"widened": func(s *split, admit func(i, n int)) (to, from int, exact bool) {
			s.claim(0)
			admit(0, 3)
			s.replicate(0, 2)
			s.parties[0].store.Detach(0, ownership.Target)
			l := s.follow(0, 1)
			s.parties[0].store.Widen(0, ownership.Backup)
			admit(0, 2)
			l.sync(s.t, s.now, false)
			maps.Copy(s.parties[1].knows, s.parties[0].knows)
			s.claim(1)
			s.claim(2)
			admit(1, 4)
			admit(2, 1)
			return 1, 2, true
		},
		// A copy is widened that lacks nothing: the holder says so with what it tells next.
		"widened with nothing": func(s *split, admit func(i, n int)) (to, from int, exact bool) {
			s.claim(0)
			l := s.follow(0, 1)
			s.parties[0].store.Widen(0, ownership.Backup)
			admit(0, 3)
			s.replicate(0, 2)
			s.parties[0].store.Detach(0, ownership.Target)
			admit(0, 1)
			l.sync(s.t, s.now, false)
			maps.Copy(s.parties[1].knows, s.parties[0].knows)
			s.claim(1)
			s.claim(2)
			admit(1, 4)
			admit(2, 1)
			return 1, 2, true
		},
		// What was charged to keys under None since a claim of a copy without them is in that claim's table, or is all that their states hold.
		"older table": func(s *split, admit func(i, n int)) (to, from int, exact bool) {
			s.tables(admit)
			return 3, 2, true
		},
		// It is in the receiver's from then on.
		"older table, added before": func(s *split, admit func(i, n int)) (to, from int, exact bool) {
			s.tables(admit)
			s.merge(2, 3)
			admit(3, 1)
			return 0, 3, false // what was charged under two claims to a state that is all of the former
		},
		// A former holder keeps what it has as the copy, and is told no more of such keys. The other claimant has heard of it all.
		"former holder": func(s *split, admit func(i, n int)) (to, from int, exact bool) {
			s.claim(0)
			admit(0, 3)
			a, b := s.parties[0].store, s.parties[1].store
			a.Shut(0)
			s.replicate(0, 1)
			a.Detach(0, ownership.Target)
			b.AttachCurrent(0, ownership.Backup, false)
			b.Open(0)
			admit(1, 2)
			l := newLink(b, a, ownership.Backup)
			l.offset = 0
			l.sync(s.t, s.now, false)
			s.told(1, 0)
			s.cold(3)
			admit(3, 1)
			s.merge(3, 1)
			b.Detach(0, ownership.Backup)
			s.hand(1, 2)
			s.claim(0)
			admit(0, 1)
			return 0, 2, true
		},
		// The same after a merge, and with a copy that was whole for longer.
		"former holder after a merge": func(s *split, admit func(i, n int)) (to, from int, exact bool) {
			s.claim(0)
			admit(0, 3)
			s.cold(2)
			admit(2, 1)
			s.merge(2, 0)
			a, b := s.parties[0].store, s.parties[1].store
			a.Shut(0)
			s.replicate(0, 1)
			a.Detach(0, ownership.Target)
			b.AttachCurrent(0, ownership.Backup, false)
			b.Open(0)
			admit(1, 2)
			s.replicate(1, 2)
			b.Detach(0, ownership.Target)
			l := newLink(b, a, ownership.Backup)
			l.offset = 0
			l.sync(s.t, s.now, false)
			s.told(1, 0)
			s.claim(0)
			s.claim(2)
			admit(0, 1)
			admit(2, 1)
			return 0, 2, false // the later one knows a part of what both have been told under that claim
		},
	} {
		for _, swap := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s,swap=%v", name, swap), func(t *testing.T) {
				s := newSplit(t, 4, async, none, bucket)
				to, from, exact := play(s, func(i, n int) {
					s.now += time.Second
					for range n {
						for k, r := range s.rules {
							s.admit(i, r, fmt.Sprint(k%2))
						}
					}
				})
				if swap {
					from, to = to, from
				}
				s.merge(from, to)
				s.rules = []*Rule{async}
				s.check(to, true)
				s.rules = []*Rule{none}
				s.check(to, exact)
				s.rules = []*Rule{bucket} // of which what is left of a delta may count twice
				s.check(to, false)
			})
		}
	}
}

// TestMergeOfPartialCopyRepaid: of a bucket that a copy leaves out, and that has been repaid with another content, what was charged to it
// under that content's claim is added to the copy's.
func TestMergeOfPartialCopyRepaid(t *testing.T) {
	r := rule("none", algo.Limit{Algorithm: algo.TokenBucket, Limit: 1, Capacity: 100, Window: time.Second})
	r.Durability = None
	for _, to := range []int{1, 2} {
		s := newSplit(t, 3, r)
		admit := func(i, n int) {
			for range n {
				s.admit(i, r, "0")
			}
		}
		s.claim(0)
		admit(0, 1)
		s.replicate(0, 2)
		s.parties[0].store.Detach(0, ownership.Target)
		s.follow(0, 1)
		s.claim(1)
		s.claim(2)
		admit(1, 20)
		admit(2, 5)
		s.now = 10 * time.Second
		s.merge(3-to, to)
		p := s.parties[to].store
		if d, err := p.Decide(p.key("none", "0"), r, at(s.now), cost(0), nil); err != nil || d.Remaining > 100-(20+5-10) {
			t.Errorf("merged into %d: %d remain of 100, %v; 25 were admitted since the claims, and 10 repaid", to, d.Remaining, err)
		}
	}
}

// tables has parties 2 and 3 claim copies of what 1 has, who has claimed a copy of what 0 has. The former copy is whole, and the older one.
func (s *split) tables(admit func(i, n int)) {
	s.claim(0)
	admit(0, 3)
	s.follow(0, 1)
	s.parties[0].store.Detach(0, ownership.Backup)
	s.claim(1)
	admit(1, 3)
	s.replicate(1, 2)
	s.parties[1].store.Detach(0, ownership.Target)
	s.follow(1, 3)
	s.claim(2)
	s.claim(3)
	admit(2, 1)
	admit(3, 2)
}

// cold claims a partition of which a party has nothing.
func (s *split) cold(i int) {
	s.parties[i].store.Discard(0)
	s.claim(i)
	s.parties[i].store.Cold(0, at(s.now))
}
