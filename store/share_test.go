package store

import (
	"errors"
	"fmt"
	"math"
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

// shareOf is a Config.ShareOf for tests: scopes "ns/NAME/…" are inline, in the share NAME.
func shareOf(scope string) (string, bool) {
	if rest, ok := strings.CutPrefix(scope, "ns/"); ok {
		name, _, _ := strings.Cut(rest, "/")
		return name, true
	}
	return scope, false
}

// walked compares the counters of shares and callers with a walk over all records.
func walked(t *testing.T, s *Store) {
	t.Helper()
	keys := make(map[string]int64)
	var blocks int64
	for i := range s.shards {
		sh := &s.shards[i]
		sh.mu.Lock()
		blocks += int64(sh.arena.InUse())
		visit := func(c *content) {
			sh.eachRecord(&c.table, func(r record) {
				share, inline := s.shares.of(r.spec.rule.Scope)
				kind := "policy "
				if inline {
					kind = "inline "
					keys["all inline"]++
				}
				keys[kind+share]++
				keys["caller "+r.spec.caller.label]++
			})
		}
		for j := range sh.partitions {
			part := &sh.partitions[j]
			visit(&part.content)
			if part.role != nil {
				visit(&part.role.staging)
			}
		}
		sh.mu.Unlock()
	}
	counted := make(map[string]int64)
	var bytes, ofCallers int64
	policies, inline, callers := s.Shares()
	for _, list := range []struct {
		kind string
		of   []Share
	}{{"policy ", policies}, {"inline ", inline}, {"caller ", callers}} {
		for _, one := range list.of {
			if one.Keys != 0 {
				counted[list.kind+one.Name] = one.Keys
			}
			if list.kind == "caller " {
				ofCallers += one.Bytes
			} else {
				bytes += one.Bytes
			}
			// its reservations of others' keys
			must.True(t, one.Bytes >= 0 && one.Keys >= 0 && (one.Keys != 0 || one.Bytes == 0 || list.kind == "caller "),
				"%s%q has %+v", list.kind, one.Name, one)
		}
	}
	ids, of := make(map[string]int64), make(map[string]int64)
	for _, one := range callers {
		if one.IDBytes != 0 {
			of[one.Name] = one.IDBytes
		}
	}
	owned, reserved, reservedBytes := make(map[string]int), int64(0), int64(0)
	for i := range s.shards {
		for j := range s.shards[i].partitions {
			part := &s.shards[i].partitions[j]
			for _, a := range []*extras{part.extras, part.stagedExtras()} {
				if a == nil {
					continue
				}
				n := make(map[string]int)
				for e := range a.answers.from(0) {
					ids[e.of.account.label] += int64(e.key.bytes())
					n[e.of.account.label]++
				}
				for label, of := range a.answers.askers {
					must.True(t, n[label] == of.n && of.account.label == label,
						"%q has %d answers remembered, counted are %d", label, n[label], of.n)
				}
			}
			if part.extras == nil {
				continue
			}
			for _, p := range part.extras.reservations.by {
				for _, e := range p.list {
					reserved++
					reservedBytes += int64(reservationBytes + p.of.size())
					owned[e.caller.label]++
				}
			}
		}
	}
	must.Equal(t, fmt.Sprint(ids), fmt.Sprint(of), "request ids take %v, counted are %v", ids, of)
	delete(owned, "")
	counts := make(map[string]int)
	for label, a := range s.shares.callers.by {
		if n := a.reserved.Load(); n != 0 {
			counts[label] = int(n)
		}
	}
	must.Equal(t, fmt.Sprint(counts), fmt.Sprint(owned), "reservations are counted as %v, there are %v", counts, owned)
	got := s.budget.reservations.Load()
	must.True(t, got == reserved, "%d reservations are counted, there are %d", got, reserved)
	if n := s.shares.inline.keys.Load(); n != 0 {
		counted["all inline"] = n
	}
	must.Equal(t, fmt.Sprint(counted), fmt.Sprint(keys), "counted %v, there are %v", counted, keys)
	ofCallers -= reservedBytes
	must.True(t, bytes == blocks && ofCallers == blocks,
		"%d bytes are counted to shares and %d to callers, %d are in use", bytes, ofCallers, blocks)
}

func (p *partition) stagedExtras() *extras {
	if p.role == nil {
		return nil
	}
	return p.role.staging.extras
}

// emptied drops everything in a store, and fails the test when anything is counted then. As each record takes off its
// share what it held, no share had another's bytes before.
func emptied(t *testing.T, s *Store) {
	t.Helper()
	s.shares.mu.RLock()
	all, kinds := []*account{&s.shares.inline}, []*accounts{&s.shares.policies, &s.shares.inlines, &s.shares.callers}
	for _, as := range kinds {
		all = append(all, &as.rest)
		for _, a := range as.by {
			all = append(all, a)
		}
	}
	s.shares.mu.RUnlock()
	for p := range s.cfg.Partitions {
		s.Discard(p)
	}
	for _, a := range all {
		if a.keys.Load() != 0 || a.bytes.Load() != 0 || a.refs != 0 || a.ids.Load() != 0 || a.reserved.Load() != 0 {
			t.Errorf("%q is left with %d keys, %d bytes, %d of request ids and %d references", a.label, a.keys.Load(),
				a.bytes.Load(), a.ids.Load(), a.refs)
		}
	}
	for _, as := range kinds {
		n := len(as.by)
		expect.True(t, n == 0 && as.n.Load() == 0, "%d accounts are left", n)
	}
}

// TestSharesAgainstWalk makes random histories of calls by several callers, of sweeps, resets, changed policies,
// copies, moves, claims and merges, and compares the counters with a walk all along.
func TestSharesAgainstWalk(t *testing.T) {
	for seed := range seeds(200) {
		rng := rand.New(rand.NewPCG(seed, 21))
		rules := [][]*Rule{
			{rule("log", log(50, minute)), rule("log", log(20, minute)), rule("log", window(20, minute))},
			{rule("ns/a/1", log(1000, 5*time.Second)), rule("ns/a/1", log(2000, 5*time.Second))},
			{rule("ns/a/2", window(1000, time.Second))},
			{rule("ns/b/1", algo.Limit{Algorithm: algo.TokenBucket, Limit: 100, Window: time.Second})},
			{rule("leases", algo.Limit{Algorithm: algo.Concurrency, Limit: 50, Window: 10 * time.Second})},
		}
		rules[0][0].ColdClosed, rules[0][1].ColdClosed = true, true
		s := newSplit(t, 3)
		for _, p := range s.parties {
			p.store = New(Config{Shut: true, ShareOf: shareOf})
		}
		s.claim(0)
		open := []int{0}
		var reserved []ReservationID
		current := make([]int, len(rules))
		for range 150 {
			s.now += time.Duration(rng.Int64N(int64(2 * time.Second)))
			i := open[rng.IntN(len(open))]
			store := s.parties[i].store
			which := rng.IntN(len(rules))
			r := rules[which][current[which]]
			k := store.key(r.Scope, fmt.Sprint(rng.IntN(8)))
			switch n := rng.IntN(24); {
			case n < 14:
				c := Call{Request: algo.Request{Cost: rng.Int64N(4)}, Caller: []string{"", "x", "y"}[rng.IntN(3)]}
				if c.Cost > 0 && which != 4 && rng.IntN(4) == 0 {
					c.Reservation, c.ReserveFor = reservationOf(rng.Uint64()|1), time.Minute
					reserved = append(reserved, c.Reservation)
				}
				if c.Cost > 0 && rng.IntN(4) == 0 {
					c.RequestID = fmt.Sprint(rng.Uint64())
				}
				must.Value(store.Decide(k, r, at(s.now), c, nil))(t)
			case n == 14:
				store.Sweep(at(s.now), 100)
				for _, id := range reserved { // whoever's they are: of one key some are its
					_, _, err := settle(store, k, r, at(s.now), id, 0)
					must.NoError(t, err)
				}
			case n == 15:
				must.Value(store.Refund(k, r, at(s.now), 2, "", ""))(t)
			case n == 16:
				must.NoError(t, store.Reset(k, r.Scope))
			case n == 17:
				current[which] = rng.IntN(len(rules[which]))
				now := rules[which][current[which]]
				store.Reconcile(func() algo.Instant { return at(s.now) }, func(scope string, _ []byte) *Rule {
					if scope == now.Scope {
						return now
					}
					return nil
				})
			case n == 18:
				store.Cold(0, at(s.now))
			case n < 21 && len(open) < 3:
				to := rng.IntN(3)
				if !slices.Contains(open, to) {
					s.replicate(i, to)
					store.Detach(0, ownership.Target)
					s.claim(to)
					open = append(open, to)
				}
			case len(open) > 1:
				if to := open[rng.IntN(len(open))]; to != i {
					s.merge(i, to)
					open = slices.DeleteFunc(open, func(o int) bool { return o == i })
				}
			}
			for _, p := range s.parties {
				walked(t, p.store)
			}
		}
		for _, p := range s.parties {
			emptied(t, p.store)
		}
	}
}

// TestFullShare: a share at its bound has no room for new keys. Its known keys and everybody else go on, and what
// becomes idle makes room.
func TestFullShare(t *testing.T) {
	s := New(Config{})
	full, other := rule("full", window(5, minute)), rule("other", window(5, minute))
	full.MaxKeys = 3
	for i := range 3 {
		decide(t, s, full, fmt.Sprint(i), at(0), cost(1))
	}
	_, err := s.Decide(s.key("full", "3"), full, at(1), cost(1), nil)
	must.True(t, errors.Is(err, ErrShareFull) && errors.Is(err, ErrFull), "%v", err)
	d := decide(t, s, full, "1", at(2), cost(1))
	expect.True(t, d.Allowed && d.Remaining == 3, "%+v", d)
	expect.Equal(t, decide(t, s, full, "4", at(3), cost(0)).Remaining, 5, "a peek needs no room")
	for i := range 10 {
		decide(t, s, other, fmt.Sprint(i), at(4), cost(1))
	}
	policies, _, _ := s.Shares()
	expect.True(t, len(policies) == 2 && policies[0].Name == "other" && policies[0].Keys == 10 &&
		policies[1].Keys == 3 && policies[1].Refused == 1, "%+v", policies)
	expect.True(t, decide(t, s, full, "3", at(time.Hour), cost(1)).Allowed, "refused")
	st := s.Stats()
	expect.True(t, st.Full == 0 && st.ShareFull == 1, "%+v", st)
	// A larger bound counts at once.
	more := *full
	more.MaxKeys = 5
	for i := range 5 {
		decide(t, s, &more, fmt.Sprint("more", i), at(2*time.Hour), cost(1))
	}
}

// TestShareBytes: what states grow by is bounded as new keys are.
func TestShareBytes(t *testing.T) {
	s := New(Config{})
	grows, other := rule("grows", log(100_000, 1000*time.Hour)), rule("other", log(100_000, 1000*time.Hour))
	grows.MaxBytes = 100_000
	var err error
	n := 0
	for ; err == nil && n < 100_000; n++ {
		_, err = s.Decide(s.key("grows", "k"), grows, at(time.Duration(n)*time.Second), cost(1), nil)
	}
	policies, _, _ := s.Shares()
	must.True(t, errors.Is(err, ErrShareFull) && policies[0].Bytes >= 50_000 &&
		policies[0].Bytes <= 100_000+2*algo.PageBytes, "%v after %d: %+v", err, n, policies)
	for i := range n {
		decide(t, s, other, "k", at(time.Duration(n+i)*time.Second), cost(1))
	}
}

// crowd has a caller make new keys until they are refused, and returns how many there were.
func crowd(t *testing.T, s *Store, r *Rule, caller string, most int) (n int) {
	t.Helper()
	for ; n < most; n++ {
		c := cost(1)
		c.Caller = caller
		_, err := s.Decide(s.key(r.Scope, fmt.Sprint(caller, n)), r, at(time.Second), c, nil)
		if errors.Is(err, ErrShareFull) {
			return n
		} else if err != nil {
			t.Fatal(caller, n, err)
		}
	}
	return n
}

// TestFairPartOfCallers: a caller who takes all the room it gets leaves some for the others, under the same policy too.
func TestFairPartOfCallers(t *testing.T) {
	s := New(Config{MaxKeys: 800, Partitions: 8})
	r := rule("login", window(5, minute))
	n := crowd(t, s, r, "greedy", 1000)
	expect.True(t, n == 700, "the first caller has %d keys of 800", n)
	// Each of them has less than a fair part of the store: with k of them and the greedy one a (k+2)th.
	for _, caller := range []string{"a", "b", "c", "d"} {
		n := crowd(t, s, r, caller, 20)
		expect.True(t, n == 20, "%s gets %d keys", caller, n)
	}
	_, err := s.Decide(s.key("login", "new"), r, at(time.Second),
		Call{Request: algo.Request{Cost: 1}, Caller: "greedy"}, nil)
	expect.ErrorIs(t, err, ErrShareFull, "the greedy caller goes on")
	_, err = s.Decide(s.key("login", "greedy1"), r, at(time.Second),
		Call{Request: algo.Request{Cost: 1}, Caller: "greedy"}, nil)
	expect.NoError(t, err, "a known key")
	_, _, callers := s.Shares()
	st := s.Stats()
	expect.True(t, st.Full == 2 && st.ShareFull == 0, "%+v", st)
	expect.True(t, callers[0].Name == "greedy" && callers[0].Keys == 700 && callers[0].Refused == 2, "%+v", callers)
}

// TestReservationsOfOneCaller: who takes all the reservations that it gets leaves some for the others, on the node that
// the partition moves to, too.
func TestReservationsOfOneCaller(t *testing.T) {
	s, copied := New(Config{MaxReservations: 80}), New(Config{MaxReservations: 80, Shut: true})
	r := rule("login", window(5, minute))
	n := 0
	reserve := func(s *Store, caller string) error {
		n++
		c := cost(1)
		c.Caller, c.Reservation, c.ReserveFor = caller, reservationOf(uint64(n)), minute
		_, err := s.Decide(s.key("login", fmt.Sprint(n)), r, at(time.Second), c, nil)
		return err
	}
	var err error
	for n < 100 && err == nil {
		err = reserve(s, "greedy")
	}
	expect.True(t, errors.Is(err, ErrShareFull) && n == 71, "after %d: %v", n, err)
	l := newLink(s, copied, ownership.Target)
	l.offset = 0
	l.sync(t, time.Second, true)
	s.Shut(0)
	copied.Open(0)
	for range 5 {
		expect.NoError(t, reserve(copied, "other"))
	}
	expect.ErrorIs(t, reserve(copied, "greedy"), ErrShareFull, "after the move")
	expect.NoError(t, reserve(copied, ""))
	_, _, callers := copied.Shares()
	expect.True(t, callers[0].Name == "greedy" && callers[0].Refused == 1, "%+v", callers)
}

// TestRequestIDsOfOneCaller: however many request ids a caller uses, those of others with fewer go on being remembered,
// in copies and after a move as well.
func TestRequestIDsOfOneCaller(t *testing.T) {
	for _, test := range []struct {
		what string
		cfg  Config
	}{
		{"in one partition", Config{MaxRequestIDs: 80}},
		{"in an eighth of the memory", Config{MaxBytes: 1 << 20, Partitions: 64}},
	} {
		t.Run(test.what, func(t *testing.T) {
			shut := test.cfg
			shut.Shut = true
			s, copied := New(test.cfg), New(shut)
			r := rule("p", window(1<<20, minute))
			// granted charges a key once more, and returns what the answer says that was granted for its id.
			charge := func(s *Store, p int, caller, id string, units int64) int64 {
				c := cost(units)
				c.Caller, c.RequestID = caller, id
				a, err := s.Decide(Key{Hash: uint64(p)<<32 | hashOf("p", "k")>>32, Partition: p, Key: "k"}, r,
					at(time.Second), c, nil)
				if err == ErrRequestID {
					return 0 // it is known
				}
				must.NoError(t, err)
				return a.Granted
			}
			known := func(s *Store, caller string, n int) (known int) {
				for i := range n {
					if charge(s, 0, caller, fmt.Sprint(caller, i), 2) == 0 {
						known++
					}
				}
				return known
			}
			for i := range 10 {
				charge(s, 0, "early", fmt.Sprint("early", i), 1)
			}
			flood := func(s *Store, from, to int) {
				for i := from; i < to; i++ {
					charge(s, i%max(test.cfg.Partitions, 1), "greedy", fmt.Sprint("greedy", i), 1)
				}
			}
			flood(s, 0, 4000)
			for i := range 10 {
				charge(s, 0, "late", fmt.Sprint("late", i), 1)
			}
			flood(s, 4000, 8000)
			walked(t, s)
			a, b := known(s, "early", 10), known(s, "late", 10)
			expect.True(t, a == 10 && b == 10, "%d and %d of 10 request ids are remembered", a, b)
			expect.Equal(t, charge(s, 7999%max(test.cfg.Partitions, 1), "greedy", "greedy7999", 2), 0,
				"the newest of who has too many is not remembered")
			_, _, callers := s.Shares()
			for _, c := range callers {
				expect.Equal(t, (c.RequestIDsLost > 0), c.Name == "greedy", "%+v", c)
			}

			l := newLink(s, copied, ownership.Target)
			l.offset = 0
			l.sync(t, time.Second, true)
			s.Shut(0)
			copied.Open(0)
			for p := 1; p < test.cfg.Partitions; p++ {
				copied.Open(p)
			}
			flood(copied, 8000, 12000)
			a, b = known(copied, "early", 10), known(copied, "late", 10)
			expect.True(t, a == 10 && b == 10, "after the move %d and %d of 10 request ids are remembered", a, b)
			walked(t, copied)
			emptied(t, copied)
			emptied(t, s)
		})
	}
}

// TestFairPartOfShares: without callers policies leave room for each other, and inline limits have one part together,
// however many namespaces somebody makes up.
func TestFairPartOfShares(t *testing.T) {
	s := New(Config{MaxKeys: 800, Partitions: 8, ShareOf: shareOf})
	s.SetShares(3)
	n := 0
	for ; ; n++ {
		r := rule(fmt.Sprintf("ns/made-up-%d/x", n), window(5, minute))
		if crowd(t, s, r, "", 1) == 0 {
			break
		}
	}
	expect.True(t, n == 700, "made-up namespaces have %d keys of 800", n)
	n = crowd(t, s, rule("login", window(5, minute)), "", 90)
	expect.True(t, n == 90, "a policy gets %d keys", n)

	alone := New(Config{MaxKeys: 800, Partitions: 8, ShareOf: shareOf})
	alone.SetShares(1)
	r := rule("login", window(5, minute))
	for i := range 800 {
		decide(t, alone, r, fmt.Sprint(i), at(0), cost(1))
	}
}

// TestAccountsAreBounded: names that somebody makes up are not kept beyond a bound, and all of them go with the last
// record.
func TestAccountsAreBounded(t *testing.T) {
	s := New(Config{ShareOf: shareOf})
	for i := range 2 * maxAccounts {
		c := cost(1)
		c.Caller = fmt.Sprint("caller", i)
		decide(t, s, rule(fmt.Sprintf("ns/%d/x", i), window(5, time.Second)), "k", at(0), c)
	}
	shares := func() (inline, callers []Share) { _, inline, callers = s.Shares(); return }
	inline, callers := shares()
	must.True(t, len(inline) == maxAccounts+1 && len(callers) == maxAccounts+1,
		"%d namespaces and %d callers are told apart", len(inline), len(callers))
	if inline[0].Name != "" || inline[0].Keys != maxAccounts || callers[0].Keys != maxAccounts {
		t.Errorf("%+v %+v", inline[0], callers[0])
	}
	s.Sweep(at(minute), 3*maxAccounts)
	inline, callers = shares()
	expect.Equal(t, len(inline)+len(callers), 0, "%d namespaces and %d callers are left", len(inline), len(callers))
}

// TestNoRoomIsFull: whatever finds no room says so by ErrFull, and that it is the share's by ErrShareFull.
func TestNoRoomIsFull(t *testing.T) {
	s := New(Config{})
	before, after := rule("p", log(5, minute)), rule("p", log(5, minute), log(9, time.Hour))
	k, id := s.key("p", "k"), reservationOf(1)
	decide(t, s, before, "k", at(0), Call{Request: algo.Request{Cost: 1}, Reservation: id, ReserveFor: time.Hour})
	s.budget.max = s.budget.used.Load()
	for what, call := range map[string]func() error{
		"a check":   func() error { _, err := s.Decide(k, after, at(0), cost(1), nil); return err },
		"a refund":  func() error { _, err := s.Refund(k, after, at(0), 1, "", ""); return err },
		"a renewal": func() error { _, err := s.Renew(k, after, at(0), 1, minute, 0); return err },
		"a release": func() error { _, err := s.Release(k, after, at(0), 1); return err },
		"a cancel":  func() error { _, err := s.Settle(k, after, at(0), Settlement{ID: id}); return err },
		"a commit":  func() error { _, err := s.Settle(k, after, at(0), Settlement{ID: id, Keep: 2}); return err },
		"a look":    func() error { _, _, _, err := s.Look(k, after, at(0), 1); return err },
	} {
		full := s.Stats().Full
		if err := call(); !errors.Is(err, ErrFull) || s.Stats().Full == full {
			t.Errorf("%s: %v, %d calls counted", what, err, s.Stats().Full-full)
		}
	}
}

// TestReservationsLeaveRoomForKeys: what the reservations of one caller take is counted to it, so that there is room
// for keys and reservations of another one. It is given back with them.
func TestReservationsLeaveRoomForKeys(t *testing.T) {
	for _, keys := range []int{100, math.MaxInt} {
		s := New(Config{MaxBytes: 4 << 20, Partitions: 8})
		r := rule("p", window(1<<40, minute))
		n := uint64(0)
		reserve := func(caller, key string) error {
			n++
			c := cost(1)
			c.Caller, c.Reservation, c.ReserveFor = caller, reservationOf(n), minute
			_, err := s.Decide(s.key("p", key), r, at(time.Second), c, nil)
			return err
		}
		var err error
		for i := 0; i < 10_000 && err == nil; i++ {
			err = reserve("greedy", fmt.Sprint(strings.Repeat("x", 900), i%keys))
		}
		must.True(t, errors.Is(err, ErrShareFull) && n >= 1000, "after %d: %v", n, err)
		for i := range 100 {
			must.True(t, reserve("modest", fmt.Sprint("modest", i)) == nil, "reservation %d of another caller", i)
		}
		s.Sweep(at(time.Hour), 1)
		_, _, callers := s.Shares()
		expect.True(t, len(callers) == 0, "callers have something when all is over: %+v", callers)
	}
}
