package store

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// party is one process of a test of splits, with the admissions that its content counts: the instants, by scope and
// key.
type party struct {
	store  *Store
	counts map[string][]time.Duration
}

// split is a partition held by several processes at once.
type split struct {
	t       *testing.T
	rules   []*Rule
	now     time.Duration
	parties []*party
}

// newSplit has the first of the parties hold the partition.
func newSplit(t *testing.T, parties int, rules ...*Rule) *split {
	s := &split{t: t, rules: rules}
	for range parties {
		s.parties = append(s.parties, &party{New(Config{Shut: true}), make(map[string][]time.Duration)})
	}
	s.claim(0)
	return s
}

// admit has a party admit one unit.
func (s *split) admit(i int, r *Rule, key string) {
	s.t.Helper()
	p := s.parties[i]
	d, err := p.store.Decide(p.store.key(r.Scope, key), r, at(s.now), cost(1), nil)
	must.True(s.t, err == nil && d.Allowed, "%v %v", d, err)
	of := r.Scope + "/" + key
	p.counts[of] = append(slices.Clone(p.counts[of]), s.now)
}

// replicate gives one party a whole copy of what another has.
func (s *split) replicate(from, to int) {
	s.t.Helper()
	a, b := s.parties[from], s.parties[to]
	l := newLink(a.store, b.store, ownership.Target)
	l.offset, l.most = 0, 500
	l.sync(s.t, s.now, true)
	b.counts = make(map[string][]time.Duration)
	for of, list := range a.counts {
		b.counts[of] = list
	}
}

// fork has another party claim a copy of what one has.
func (s *split) fork(from, to int) { s.t.Helper(); s.replicate(from, to); s.claim(to) }

// claim opens a party's content under a claim of its own.
func (s *split) claim(i int) {
	take(s.parties[i].store, at(s.now))
}

// merge has one party give what it has to another.
func (s *split) merge(from, to int) {
	s.t.Helper()
	a, b := s.parties[from], s.parties[to]
	a.store.Shut(0)
	s.stage(from, to)
	must.NoError(s.t, b.store.Merge(0, at(s.now)))
	a.store.Discard(0)
	for of, list := range a.counts {
		b.counts[of] = larger(b.counts[of], list)
	}
	a.counts = make(map[string][]time.Duration)
}

// stage brings what one party has into the staging area of another.
func (s *split) stage(from, to int) {
	s.t.Helper()
	stage(s.t, s.parties[from].store, s.parties[to].store, at(s.now), 700)
}

// stage brings all that a store has into the staging area of another.
func stage(t *testing.T, from, to *Store, now algo.Instant, most int) {
	t.Helper()
	from.Attach(0, ownership.Target, true)
	to.Stage(0)
	for more := true; more; {
		var chunk []byte
		chunk, _, more = from.Drain(0, ownership.Target, now, most)
		must.NoError(t, to.Apply(0, true, now, chunk))
	}
}

// larger is the join of two lists of admissions: from each instant on as many as the larger of the two.
func larger(x, y []time.Duration) (joined []time.Duration) {
	from := func(list []time.Duration, at time.Duration) (n int) {
		for _, e := range list {
			if e >= at {
				n++
			}
		}
		return n
	}
	all := slices.Concat(x, y)
	slices.SortFunc(all, func(a, b time.Duration) int { return cmp.Compare(b, a) })
	for _, at := range slices.Compact(all) {
		for range max(from(x, at), from(y, at)) - len(joined) {
			joined = append(joined, at)
		}
	}
	slices.Sort(joined)
	return joined
}

// used is how many units of a key a party counts.
func (s *split) used(i int, r *Rule, key string) int64 {
	s.t.Helper()
	p := s.parties[i].store
	d := must.Value(p.Decide(p.key(r.Scope, key), r, at(s.now), cost(0), nil))(s.t)
	return max(r.Limits[0].Limit, r.Limits[0].Capacity) - d.Remaining
}

// check compares what a party counts, under rules of logs, with what it is to count.
func (s *split) check(i int) {
	s.t.Helper()
	for _, r := range s.rules {
		for k := range 5 {
			key := fmt.Sprint(k)
			var live int64
			for _, at := range s.parties[i].counts[r.Scope+"/"+key] {
				if at > s.now-r.Limits[len(r.Limits)-1].Window {
					live++
				}
			}
			used := s.used(i, r, key)
			must.True(s.t, used == live, "%s/%s: party %d counts %d at %v, want %d", r.Scope, key, i, used, s.now, live)
		}
	}
}

// TestMergeAny lets splits happen within splits. Whatever the order of claims, moves, reloads and merges, a merged
// content counts as much as the larger of both sides did, at every instant.
func TestMergeAny(t *testing.T) {
	for seed := range seeds(300) {
		rng := rand.New(rand.NewPCG(seed, 12))
		s := newSplit(t, 4, rule("long", log(10_000, minute)),
			rule("short", log(10_000, 5*time.Second), log(10_000, minute)))
		open := []int{0}
		for range 120 {
			s.now += time.Duration(rng.Int64N(int64(time.Second)))
			i := open[rng.IntN(len(open))]
			switch n := rng.IntN(22); {
			case n < 14:
				s.admit(i, s.rules[rng.IntN(2)], fmt.Sprint(rng.IntN(5)))
			case n == 14:
				s.parties[i].store.Sweep(at(s.now), 1)
			case n < 18 && len(open) < 4:
				if to := rng.IntN(4); !slices.Contains(open, to) {
					s.replicate(i, to)
					s.parties[i].store.Detach(0, ownership.Target)
					s.claim(to)
					open = append(open, to)
				}
			case n < 20 && len(open) > 1:
				if to := open[rng.IntN(len(open))]; to != i {
					s.merge(i, to)
					open = slices.DeleteFunc(open, func(o int) bool { return o == i })
				}
			case n == 20: // a reload on one side: its states are under another limit
				r := rule("long", log(int64(10_000+rng.IntN(5)), minute))
				s.parties[i].store.Reconcile(func() algo.Instant { return at(s.now) },
					func(scope string, _ []byte) *Rule {
						if scope == "long" {
							return r
						}
						return nil
					})
			case n == 21: // it meets what it knows already
				s.stage(i, i)
				must.NoError(t, s.parties[i].store.Merge(0, at(s.now)))
			}
			for _, o := range open {
				s.check(o)
			}
		}
		for len(open) > 1 {
			s.merge(open[1], open[0])
			open = slices.Delete(open, 1, 2)
		}
		s.check(open[0])
		for _, p := range s.parties {
			accounted(t, p.store)
		}
	}
}

// TestMergeReloaded: sides that count under other limits, calendar windows and several limits among them. A merged key
// counts no less than either side did, as far as its count passes from the giver's limits to the receiver's, and it is
// in the receiver's terms.
func TestMergeReloaded(t *testing.T) {
	kinds := []algo.Limits{
		{log(100, minute)}, {window(100, minute)}, {{Algorithm: algo.SlidingCounter, Limit: 100, Window: minute}},
		{{Algorithm: algo.FixedWindow, Limit: 100, Window: minute}},
		{{Algorithm: algo.FixedWindow, Limit: 100, Period: algo.Hour}},
		{{Algorithm: algo.TokenBucket, Limit: 100, Window: minute}},
		{log(100, minute), {Algorithm: algo.FixedWindow, Limit: 100, Period: algo.Day}},
	}
	for i, mine := range kinds {
		for j, other := range kinds {
			for _, known := range []bool{true, false} {
				first, second := rule("p", mine...), rule("p", other...)
				s := newSplit(t, 2, first)
				s.now = time.Second
				s.claim(0)
				if known {
					s.admit(0, first, "k")
				}
				s.fork(0, 1)
				for range 10 {
					if known {
						s.admit(0, first, "k")
					}
				}
				for range 20 {
					s.admit(1, second, "k")
				}
				want := s.used(1, second, "k")
				s.merge(1, 0)
				got := s.used(0, first, "k")
				expect.True(t, got == want, "kind %d into %d, known %v: %d in use, want %d", j, i, known, got, want)
				for _, p := range s.parties {
					accounted(t, p.store)
				}
			}
		}
	}
}

// TestMergeForgetsStrictIDs: the side without a grant has charged two ids that it never answers, and the join holds one
// of these charges. A repetition of one is not answered as admitted without a charge. What both sides know, and what is
// not strict, is answered as before.
func TestMergeForgetsStrictIDs(t *testing.T) {
	for _, strict := range []bool{false, true} {
		r := &Rule{Scope: "p", Limits: algo.Limits{{Algorithm: algo.SlidingLog, Limit: 10, Window: minute}},
			Strict: strict}
		s := newSplit(t, 2, r)
		charge := func(i int, id string) {
			t.Helper()
			decide(t, s.parties[i].store, r, "k", at(s.now), withID(1, id))
		}
		decides := func(i int) {
			s.claim(i)
			grant(s.parties[i].store)
		}
		decides(0)
		charge(0, "both")
		s.replicate(0, 1)
		decides(1)
		charge(0, "granted")
		charge(1, "one")
		charge(1, "two")
		s.merge(1, 0)
		before := s.used(0, r, "k")
		charge(0, "both")
		got := s.used(0, r, "k")
		expect.True(t, got == before,
			"strict %v: an id that both sides know is charged again: %d units in use, want %d", strict, got, before)
		charge(0, "one")
		charge(0, "two")
		want := before
		if strict {
			want += 2
		}
		got = s.used(0, r, "k")
		expect.True(t, got == want, "strict %v: %d units in use after the repetitions, want %d", strict, got, want)
	}
}

// TestMergeForgetsStrictIDsOfStatesThatEnded: a strict charge that was never answered leaves the window before the
// merge, and its id is still known. A repetition is not answered as admitted: the other side may have admitted as much
// in that window.
func TestMergeForgetsStrictIDsOfStatesThatEnded(t *testing.T) {
	for _, merging := range []int{0, 1} { // the side that takes the other's content in
		r := &Rule{Scope: "p", Limits: algo.Limits{{Algorithm: algo.SlidingLog, Limit: 2, Window: time.Second}},
			Strict: true}
		s := newSplit(t, 2, r)
		charge := func(i int, id string) {
			t.Helper()
			decide(t, s.parties[i].store, r, "k", at(s.now), withID(1, id))
		}
		for i := range 2 {
			s.claim(i)
			grant(s.parties[i].store)
		}
		charge(0, "unanswered")
		s.now += 10 * time.Second
		charge(1, "other")
		s.merge(1-merging, merging)
		before := s.used(merging, r, "k")
		charge(merging, "unanswered")
		got := s.used(merging, r, "k")
		expect.True(t, got == before+1, "side %d: %d units in use after the repetition, want %d", merging, got,
			before+1)
	}
}

// TestDecideAgainstEverything has callers decide while drains, moves, merges and reloads go on: no admission is lost or
// made twice.
func TestDecideAgainstEverything(t *testing.T) {
	const callers, keys = 4, 50
	rounds := 3000
	if underRace {
		rounds = 500
	}
	stores := [2]*Store{New(Config{Shut: true, Urgent: func(int) {}}), New(Config{Shut: true, Urgent: func(int) {}})}
	take(stores[0], at(0))
	rulesOf := func(n int64) []*Rule {
		return []*Rule{rule("a", window(n<<40, time.Hour)), rule("b", window(n<<40, time.Hour)).under(Escrow),
			rule("c", log(n<<20, time.Hour)).under(Sync)}
	}
	rules, reloaded := rulesOf(1), rulesOf(2)
	var admitted [3][keys]atomic.Int64
	var work sync.WaitGroup
	for c := range callers {
		work.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(c), 5))
			for n := 0; n < rounds; {
				r, k := rng.IntN(3), rng.IntN(keys)
				s := stores[rng.IntN(2)]
				d, err := s.Decide(s.key(rules[r].Scope, fmt.Sprint(k)), rules[r], at(1),
					withID(1, fmt.Sprint(rng.Uint64())), nil)
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
					s.Reconcile(func() algo.Instant { return at(1) },
						func(scope string, _ []byte) *Rule { return reloaded[scope[0]-'a'] })
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
					expect.NoError(t, to.Apply(0, staged, at(1), chunk))
					from.Confirm(0, ownership.Backup, version)
				}
			}
			drain(true)
			if rng.IntN(3) == 0 {
				// The other claims from its copy and is merged in again, with nothing of its own. It must not add
				// anything.
				other := New(Config{Shut: true})
				other.TakeOver(0, at(1))
				l := newLink(other, from, ownership.Target)
				l.offset = 0
				from.Stage(0)
				l.attach(true)
				l.drain(0)
				expect.NoError(t, from.Apply(0, true, at(1), l.queue[0].chunk))
				expect.NoError(t, from.Merge(0, at(1)))
				from.TakeOver(0, at(1))
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
			d := must.Value(holder.Decide(holder.key(rules[r].Scope, fmt.Sprint(k)), rules[r], at(1), cost(0), nil))(t)
			if got, want := rules[r].Limits[0].Limit-d.Remaining, admitted[r][k].Load(); got != want {
				t.Errorf("%s/%d: %d are counted of %d", rules[r].Scope, k, got, want)
			}
		}
	}
	for _, s := range stores {
		accounted(t, s)
	}
}

// TestMergeColdStrict: strict keys that start full, because nobody knows what a lost holder has admitted, do so as well
// once they are merged into the content of another claimant, whichever of the two copies is the later one: keys that
// were known and others.
func TestMergeColdStrict(t *testing.T) {
	for _, order := range [][]int{{1, 2}, {2, 1}} {
		r := rule("p", log(100, minute)).under(Sync).strict()
		s := newSplit(t, 3, r)
		grant(s.parties[0].store)
		s.admit(0, r, "known")
		for _, i := range order {
			s.replicate(0, i)
		}
		s.claim(1)
		s.claim(2)
		s.parties[2].store.ColdStrict(0, at(s.now))
		s.merge(2, 1)
		grant(s.parties[1].store)
		for _, key := range []string{"known", "new"} {
			p := s.parties[1].store
			d := must.Value(p.Decide(p.key("p", key), r, at(s.now), cost(0), nil))(t)
			expect.True(t, d.Remaining == 0, "copies in the order %v: %q has %d left", order, key, d.Remaining)
		}
	}
}

// TestMergeColdOfADroppedKey: a strict key that the side which starts full has dropped as idle starts full in the join
// too, although the other side has a record of it.
func TestMergeColdOfADroppedKey(t *testing.T) {
	for _, to := range []int{1, 2} {
		r := rule("p", log(100, minute)).under(Sync).strict()
		s := newSplit(t, 3, r)
		grant(s.parties[0].store)
		s.admit(0, r, "known")
		s.replicate(0, 1)
		s.claim(1)
		s.claim(2)
		s.parties[2].store.ColdStrict(0, at(s.now))
		s.merge(3-to, to)
		grant(s.parties[to].store)
		p := s.parties[to].store
		d := must.Value(p.Decide(p.key("p", "known"), r, at(s.now), cost(0), nil))(t)
		expect.True(t, d.Remaining == 0, "merged into party %d: %d left", to, d.Remaining)
	}
}
