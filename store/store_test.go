package store

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

const minute = time.Minute

// hashOf stands in for the ring's hash: well spread, and different for different pairs.
func hashOf(scope, key string) uint64 {
	h := uint64(14695981039346656037)
	for _, s := range []string{scope, "\x00", key} {
		for i := range len(s) {
			h = (h ^ uint64(s[i])) * 1099511628211
		}
	}
	h ^= h >> 29
	h *= 0xbf58476d1ce4e5b9
	return h ^ h>>32
}

func (s *Store) key(scope, key string) Key {
	h := hashOf(scope, key)
	return Key{Hash: h, Partition: int(h % uint64(s.cfg.Partitions)), Key: key}
}

func at(d time.Duration) algo.Instant { return algo.Instant{Mono: int64(d)} }

func cost(n int64) Call { return Call{Request: algo.Request{Cost: n}} }

func withID(n int64, id string) Call { return Call{Request: algo.Request{Cost: n}, RequestID: id} }

func reserveFor(id uint64, n int64, ttl time.Duration) Call {
	return Call{Request: algo.Request{Cost: n}, Reservation: reservationOf(id), ReserveFor: ttl}
}

func rule(scope string, limits ...algo.Limit) *Rule { return &Rule{Scope: scope, Limits: limits} }

// under is the rule with a durability, strict and banning with what they are named after.
func (r *Rule) under(d Durability) *Rule        { r.Durability = d; return r }
func (r *Rule) strict() *Rule                   { r.Strict = true; return r }
func (r *Rule) banning(ban time.Duration) *Rule { r.Ban = ban; return r }

// take has a store decide by what it has, grant under strict rules as well.
func take(s *Store, now algo.Instant) { s.TakeOver(0, now); s.Open(0) }
func grant(s *Store)                  { s.Lease(0, int64(time.Hour)); s.Unguarded(0, true) }

func log(n int64, w time.Duration) algo.Limit {
	return algo.Limit{Algorithm: algo.SlidingLog, Limit: n, Window: w}
}

func window(n int64, w time.Duration) algo.Limit {
	return algo.Limit{Algorithm: algo.FixedWindow, Limit: n, Window: w}
}

// decide fails the test on an error.
func decide(t *testing.T, s *Store, r *Rule, key string, now algo.Instant, c Call) algo.Decision {
	t.Helper()
	d, err := s.Decide(s.key(r.Scope, key), r, now, c, nil)
	must.NoError(t, err, "%s/%s", r.Scope, key)
	return d.Decision
}

// seeds is how many random histories a test goes through. Each is the work of one goroutine, and takes ten times as
// long under the race detector, which has nothing to find there.
func seeds(n uint64) uint64 {
	if underRace {
		return n / 10
	}
	return n
}

// TestAgainstStates compares a Store with one plain state per key, over random calls, sweeps, resets and changes of
// rule.
func TestAgainstStates(t *testing.T) {
	type model struct {
		arena *algo.Arena
		state algo.State
		rule  *Rule
	}
	algorithms := [][]algo.Limit{
		{log(7, minute)}, {log(12, minute)}, {log(3, time.Second), log(9, minute)}, {window(5, minute)},
		{{Algorithm: algo.TokenBucket, Limit: 6, Window: minute}},
		{{Algorithm: algo.SlidingWindow, Limit: 8, Window: minute, Slots: 6}},
	}
	for seed := range seeds(20) {
		rng := rand.New(rand.NewPCG(seed, 1))
		s := New(Config{Partitions: 7})
		models := make(map[string]*model)
		var now time.Duration
		for step := range 4000 {
			now += time.Duration(rng.Int64N(int64(2 * time.Second)))
			scope := fmt.Sprintf("p%d", rng.IntN(3))
			key := fmt.Sprintf("%0*d", 1+rng.IntN(30), rng.IntN(40))
			r := rule(scope, algorithms[rng.IntN(len(algorithms))]...)
			id := scope + "/" + key
			m := models[id]
			if m == nil {
				m = &model{arena: algo.NewArena(nil), rule: r}
				m.state = make(algo.State, r.Limits.Words())
				r.Limits.Init(m.state, at(now))
				models[id] = m
			}
			if rng.IntN(4) > 0 {
				r = rule(scope, m.rule.Limits...) // mostly the rule it is under already
			} else {
				next := make(algo.State, r.Limits.Words())
				must.NoError(t, m.rule.Limits.Convert(m.arena, m.state, at(now), r.Limits, next))
				m.state, m.rule = next, r
			}
			switch rng.IntN(20) {
			case 0:
				s.Reset(s.key(scope, key), scope)
				m.rule.Limits.Free(m.arena, m.state)
				m.rule.Limits.Init(m.state, at(now))
			case 1:
				n := 1 + rng.Int64N(4)
				got, err := s.Refund(s.key(scope, key), r, at(now), n, "", "")
				if want := r.Limits.Refund(m.arena, m.state, at(now), n); err != nil || got != want {
					t.Fatalf("seed %d step %d: refunded %d (%v), want %d", seed, step, got, err, want)
				}
			case 2:
				s.Sweep(at(now), 1)
			default:
				call := Call{Request: algo.Request{Cost: rng.Int64N(4), Partial: rng.IntN(3) == 0}}
				got := decide(t, s, r, key, at(now), call)
				want, err := r.Limits.Decide(m.arena, m.state, at(now), call.Request, nil)
				must.True(t, err == nil && got == want,
					"seed %d step %d: %s under %v at %v, %+v:\n got %+v\nwant %+v", seed, step, id, r.Limits, now, call,
					got, want)
			}
		}
		// A sweep after everything has run out leaves nothing behind, and no memory counted.
		s.Sweep(at(now+10*minute), 1)
		st := s.Stats()
		expect.True(t, st.Keys == 0, "seed %d: %d keys are left", seed, st.Keys)
		for i := range s.shards {
			sh := &s.shards[i]
			expect.True(t, len(sh.specOf) == 0 && len(sh.free) == len(sh.specs),
				"seed %d: specs are left: %v", seed, sh.specOf)
			for j := range sh.partitions {
				expect.True(t, sh.partitions[j].index == nil && sh.partitions[j].count == 0,
					"seed %d: a table is left", seed)
			}
		}
		var pages int
		for i := range s.shards {
			pages += s.shards[i].arena.Bytes()
		}
		got := s.Stats().Bytes
		expect.True(t, got == int64(pages), "seed %d: %d bytes are counted, of which pages hold %d", seed, got, pages)
	}
}

func TestMaxKeys(t *testing.T) {
	s := New(Config{Partitions: 100, MaxKeys: 50})
	short, long := rule("short", log(1, time.Second)), rule("long", log(1, minute))
	for i := range 25 {
		decide(t, s, short, fmt.Sprint("s", i), at(0), cost(1))
		decide(t, s, long, fmt.Sprint("l", i), at(0), cost(1))
	}
	must.ErrorIs(t, expect.Err(s.Decide(s.key("long", "new"), long, at(0), cost(1), nil)), ErrFull, "at the bound")
	d := must.Value(s.Decide(s.key("long", "new"), long, at(0), cost(0), nil))(t)
	expect.True(t, d.Allowed, "a peek needs no room: %+v", d)
	if d := decide(t, s, long, "l3", at(0), cost(1)); d.Allowed {
		t.Error("a key that is being limited was evicted")
	}
	got := s.Stats()
	expect.True(t, got.Full == 1 && got.Keys == 50, "stats: %+v", got)
	// Once the short ones are as good as new they make way, all 25 of them and not one of the others.
	for i := range 25 {
		expect.True(t, decide(t, s, long, fmt.Sprint("n", i), at(2*time.Second), cost(1)).Allowed, "new key %d", i)
	}
	_, err := s.Decide(s.key("long", "more"), long, at(2*time.Second), cost(1), nil)
	expect.ErrorIs(t, err, ErrFull, "at the bound again")
	for i := range 25 {
		expect.True(t, !decide(t, s, long, fmt.Sprint("l", i), at(2*time.Second), cost(1)).Allowed,
			"l%d was evicted while it was limited", i)
	}
}

func TestMaxBytes(t *testing.T) { testMaxBytes(t, 1<<20, Config{Partitions: 1, MaxBytes: 1 << 20}) }

// TestMaxBytesBesideCopies: states that grow leave the copies their room.
func TestMaxBytesBesideCopies(t *testing.T) {
	testMaxBytes(t, 1<<20-1<<20/copyReserve, Config{Partitions: 1, MaxBytes: 1 << 20, Copies: true})
}

func testMaxBytes(t *testing.T, most int64, config Config) {
	s := New(config)
	r := rule("p", log(1<<20, minute))
	var admitted int64
	for {
		d, err := s.Decide(s.key("p", "k"), r, at(time.Duration(admitted)*100), cost(1), nil)
		if errors.Is(err, ErrFull) {
			break
		}
		must.True(t, err == nil && d.Allowed, "after %d: %+v, %v", admitted, d, err)
		admitted++
	}
	if used := s.Stats().Bytes; used > most || used < most*9/10 {
		t.Errorf("%d of %d bytes are used when the log can grow no more", used, most)
	}
	// Nothing of the refused one was charged, and what is there still counts.
	d := decide(t, s, r, "k", at(time.Duration(admitted)*100), cost(0))
	expect.Equal(t, d.Remaining, 1<<20-admitted, "remain after %d of %d", admitted, 1<<20)
	expect.True(t, decide(t, s, r, "k", at(2*minute), cost(1)).Allowed, "after the window")
}

// TestMemoryComesBack fills a small store, lets everything expire, and fills it again with other keys and states of
// other sizes: as many fit as in a new store, whatever pages and tables were left in whose reserve.
func TestMemoryComesBack(t *testing.T) {
	fill := func(s *Store, prefix string, r *Rule, now time.Duration) (n int) {
		for i := range 200 {
			now += 2 * reclaimPause // so that each call may look for room
			_, err := s.Decide(s.key("p", fmt.Sprint(prefix, i)), r, at(now), cost(1), nil)
			if errors.Is(err, ErrFull) {
				continue
			}
			must.NoError(t, err)
			n++
		}
		return n
	}
	used := New(Config{Partitions: 4093, MaxBytes: 200_000})
	for round, r := range []*Rule{rule("p", log(3, minute)), rule("p", window(3, minute)), rule("p", log(30, minute))} {
		prefix := string(rune('a' + round))
		got := fill(used, prefix, r, time.Duration(round)*time.Hour)
		want := fill(New(Config{Partitions: 4093, MaxBytes: 200_000}), prefix, r, 0)
		expect.True(t, got == want, "round %d: %d keys fit, %d in a new store", round, got, want)
	}
}

// TestFloodAtTheBound shows that a full store looks for room once in a while and not for every new key: between two
// searches even an idle state stays, and after the pause it makes way.
func TestFloodAtTheBound(t *testing.T) {
	s := New(Config{Partitions: 10, MaxKeys: 2})
	r := rule("p", window(1, time.Second))
	decide(t, s, r, "a", at(0), cost(1))
	decide(t, s, r, "b", at(time.Second-reclaimPause/2), cost(1))
	full := func(now time.Duration) bool {
		_, err := s.Decide(s.key("p", "new"), r, at(now), cost(1), nil)
		return errors.Is(err, ErrFull)
	}
	expect.True(t, full(time.Second-reclaimPause/2), "there was room before anything was idle")
	expect.True(t, full(time.Second), "the store was searched again at once")
	expect.True(t, !full(time.Second+reclaimPause/2), "an idle state did not make way")
	expect.Equal(t, s.Stats().Full, 2, "calls counted as refused for want of room")
}

// TestTablesShrink shows that a flood of keys that is over does not leave its tables behind.
func TestTablesShrink(t *testing.T) {
	s := New(Config{Partitions: 1})
	r := rule("p", window(1, time.Second))
	for i := range 20_000 {
		decide(t, s, r, fmt.Sprint(i), at(0), cost(1))
	}
	for i := range 10 {
		decide(t, s, rule("q", window(1, time.Hour)), fmt.Sprint(i), at(0), cost(1))
	}
	s.Sweep(at(time.Minute), 1)
	if n := len(s.shards[0].partitions[0].index); n > 128 {
		t.Errorf("a table of %d slots for %d keys", n, s.Stats().Keys)
	}
	for i := range 10 {
		expect.True(t, !decide(t, s, rule("q", window(1, time.Hour)), fmt.Sprint(i), at(0), cost(1)).Allowed,
			"key %d is lost", i)
	}
}

func TestRequestIDs(t *testing.T) {
	s := New(Config{Partitions: 3, MaxRequestIDs: 2})
	r := rule("p", log(3, minute))
	with := func(id uint64, n int64) Call { return withID(n, fmt.Sprint(id)) }

	d := decide(t, s, r, "k", at(0), with(1, 2))
	must.True(t, d.Allowed && d.Remaining == 1, "first: %+v", d)
	d = decide(t, s, r, "k", at(time.Second), with(1, 2))
	expect.True(t, d.Allowed && d.Granted == 2 && d.Remaining == 1, "repeated: %+v", d)
	_, err := s.Decide(s.key("p", "k"), r, at(0), with(1, 1), nil)
	expect.ErrorIs(t, err, ErrRequestID, "with another cost")
	expect.True(t, decide(t, s, r, "other", at(0), with(1, 3)).Allowed, "the same id for another key")
	// A refusal is not remembered: the same id passes later.
	expect.True(t, !decide(t, s, r, "k", at(time.Second), with(2, 2)).Allowed, "over the limit")
	expect.True(t, decide(t, s, r, "k", at(61*time.Second), with(2, 2)).Allowed, "the refused id later")
	// Forgotten after max(window, 1 min): charged again.
	d = decide(t, s, r, "k", at(122*time.Second), with(1, 2))
	expect.True(t, d.Allowed && d.Remaining == 1, "after its time: %+v", d)
	// A reset forgets what was charged, ids included.
	s.Reset(s.key("p", "k"), "p")
	d = decide(t, s, r, "k", at(122*time.Second), with(1, 2))
	expect.True(t, d.Allowed && d.Remaining == 1, "after a reset: %+v", d)
	// Beyond the bound the oldest goes.
	one := New(Config{Partitions: 1, MaxRequestIDs: 2})
	for id := uint64(1); id <= 3; id++ {
		decide(t, one, r, "k", at(0), with(id, 1))
	}
	expect.True(t, decide(t, one, r, "k", at(0), with(3, 1)).Allowed, "the newest id is not remembered")
	expect.True(t, !decide(t, one, r, "k", at(0), with(1, 1)).Allowed, "the oldest id of three is remembered")
	none := New(Config{Partitions: 1, MaxRequestIDs: -1})
	decide(t, none, r, "k", at(0), with(1, 1))
	expect.Equal(t, decide(t, none, r, "k", at(0), with(1, 1)).Remaining, 1, "with none remembered")
}

// TestRepeatedAnswers: all that the first answer said of the charge is said again, here and where the partition goes.
func TestRepeatedAnswers(t *testing.T) {
	queue := rule("queue", algo.Limit{Algorithm: algo.LeakyBucket, Limit: 10, Window: 10 * time.Second})
	jobs := rule("jobs", algo.Limit{Algorithm: algo.Concurrency, Limit: 10, Window: minute})
	over := rule("over", log(10, minute))
	call := func(n int64, always bool) Call {
		return Call{Request: algo.Request{Cost: n, Always: always, Nonce: 77, TTL: minute}, RequestID: "id"}
	}
	for _, test := range []struct {
		rule   *Rule
		before int64 // units in use
		call   Call
	}{
		{queue, 5, call(2, false)},
		{jobs, 0, call(2, false)},
		{over, 9, call(2, true)},
	} {
		s, moved := New(Config{}), New(Config{Shut: true})
		decide(t, s, test.rule, "k", at(0), cost(test.before))
		want := decide(t, s, test.rule, "k", at(0), test.call)
		if want.Granted != 2 || want.Delay == 0 && want.Lease == 0 && want.Allowed {
			t.Fatalf("%s: %+v", test.rule.Scope, want)
		}
		l := newLink(s, moved, ownership.Target)
		l.sync(t, 0, true)
		moved.Open(0)
		for store, now := range map[*Store]algo.Instant{s: at(0), moved: l.there(0)} {
			got := decide(t, store, test.rule, "k", now, test.call)
			if got.Granted != want.Granted || got.Allowed != want.Allowed || got.Delay != want.Delay ||
				got.Lease != want.Lease {
				t.Errorf("%s: %+v, repeated %+v", test.rule.Scope, want, got)
			}
		}
	}
}

// TestReconcileOfCopies: records are converted by who decides about them, and its follower is told.
func TestReconcileOfCopies(t *testing.T) {
	holder, copied, l := followed(t)
	old, fresh := rule("p", log(10, minute)), rule("p", log(20, time.Hour))
	decide(t, holder, old, "k", at(0), cost(1))
	l.sync(t, 0, false)
	reconcile := func(s *Store, now algo.Instant) {
		s.Reconcile(func() algo.Instant { return now }, func(string, []byte) *Rule { return fresh })
	}
	reconcile(copied, l.there(0))
	l.same(t, "a copy, reconciled", 0)
	reconcile(holder, at(0))
	expect.True(t, holder.Pending(0, ownership.Backup) != 0, "the follower is not told what was converted")
	l.sync(t, 0, false)
	l.same(t, "its holder, reconciled", 0)
}

// TestDecideKnown: what it does not decide it leaves to Decide, with nothing changed.
func TestDecideKnown(t *testing.T) {
	plain, bans, strict := rule("p", log(2, minute)), rule("p", log(2, minute)), rule("p", log(2, minute))
	bans.Ban, strict.Strict = minute, true
	for _, test := range []struct {
		name    string
		rule    *Rule
		prepare func(*Store, Key)
		cost    int64
		want    bool
	}{
		{"a check that passes", plain, func(*Store, Key) {}, 1, true},
		{"a refusal", plain, func(*Store, Key) {}, 2, true},
		{"a check that passes, under a rule with a ban", bans, func(*Store, Key) {}, 1, true},
		{"a refusal that begins a ban", bans, func(*Store, Key) {}, 2, false},
		{"another rule", rule("p", log(3, minute)), func(*Store, Key) {}, 1, false},
		{"a strict rule", strict, func(*Store, Key) {}, 1, false},
		{"an unknown key", plain, func(s *Store, k Key) { s.Reset(k, "p") }, 1, false},
		{"a partition that is shut", plain, func(s *Store, k Key) { s.Shut(0) }, 1, false},
		{"a partition that is followed", plain, func(s *Store, k Key) { s.Attach(0, ownership.Backup, true) }, 1,
			false},
		{"beside reservations", plain, func(s *Store, k Key) {
			other := s.key("p", "other")
			must.True(t, must.Value(s.Decide(other, plain, at(0), reserveFor(1, 1, minute), nil))(t).Allowed, "refused")
		}, 1, false},
	} {
		s := New(Config{})
		first := test.rule
		if first.Guarded() || first.Limits[0].Limit > 2 {
			first = plain
		}
		decide(t, s, first, "k", at(0), cost(1))
		k := s.key("p", "k")
		test.prepare(s, k)
		d := algo.Decision{Limit: 99}
		if got := s.DecideKnown(&k, test.rule, at(0), &algo.Request{Cost: test.cost}, &d); got != test.want {
			t.Errorf("%s is decided: %v, want %v", test.name, got, test.want)
		} else if got && (d.Limit != 2 || d.Allowed != (d.Remaining == 0) || d.Allowed != (test.cost == 1)) {
			t.Errorf("%s: %+v", test.name, d)
		}
	}
}

// TestManyRules has each key come with a limit of its own, as a hostile caller's inline limits may.
func TestManyRules(t *testing.T) {
	s := New(Config{Partitions: 1, MaxBytes: 1 << 20})
	full := 0
	for i := range 5000 {
		r := rule("p", log(int64(i+1), minute))
		if _, err := s.Decide(s.key("p", fmt.Sprint(i)), r, at(0), cost(1), nil); errors.Is(err, ErrFull) {
			full++
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if st := s.Stats(); full == 0 || st.Bytes > 1<<20 {
		t.Errorf("%d refused, %d bytes used: the rules themselves must count", full, st.Bytes)
	}
	s.Sweep(at(2*minute), 1)
	if st := s.Stats(); st.Keys != 0 || len(s.shards[0].specOf) != 0 {
		t.Errorf("%+v, %d scopes left", st, len(s.shards[0].specOf))
	}
}

// TestAPanicLeavesNoLock: whoever recovers a panic of a call goes on, and so do other calls on the shard.
func TestAPanicLeavesNoLock(t *testing.T) {
	s := New(Config{})
	good, k := rule("p", algo.Limit{Algorithm: algo.TokenBucket, Limit: 10, Window: time.Second}), s.key("p", "k")
	decide := func() {
		t.Helper()
		expect.True(t, must.Value(s.Decide(k, good, at(0), cost(1), nil))(t).Allowed, "refused")
	}
	decide()
	for name, call := range map[string]func(){
		"Decide":      func() { _, _ = s.Decide(k, rule("p", algo.Limit{Algorithm: 99, Limit: 1}), at(0), cost(1), nil) },
		"DecideKnown": func() { s.DecideKnown(&k, good, at(0), nil, nil) },
		"Reconcile": func() {
			s.Reconcile(func() algo.Instant { return at(0) }, func(string, []byte) *Rule { panic("apply") })
		},
		"Refund": func() { _, _ = s.Refund(k, nil, at(0), 1, "", "") },
	} {
		func() {
			defer func() {
				expect.True(t, recover() != nil, "%s: no panic", name)
			}()
			call()
		}()
		for i := range s.shards {
			must.True(t, s.shards[i].mu.TryLock(), "%s: a lock is held", name)
			s.shards[i].mu.Unlock()
		}
		decide()
	}
}
