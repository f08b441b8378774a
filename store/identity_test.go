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

func TestRequestIDsLost(t *testing.T) {
	r := rule("p", log(1000, minute))
	use := func(s *Store, n int, now time.Duration) {
		for i := range n {
			call := cost(1)
			call.RequestID = string(rune('a' + i))
			decide(t, s, r, "k", at(now), call)
		}
	}
	s := New(Config{MaxRequestIDs: 3})
	use(s, 5, 0)
	expect.Equal(t, s.Stats().RequestIDsLost, 2, "lost")
	s.Sweep(at(minute), 10)
	expect.Equal(t, s.Stats().RequestIDsLost, 2, "lost after the others' time")
	// An eighth of 64 KiB has room for some 30; the store has room for more.
	s = New(Config{MaxBytes: 64 << 10})
	use(s, 100, 0)
	part := &s.shards[0].partitions[0]
	if got := part.extras.answers.n; got < 25 || got > 31 || s.Stats().RequestIDsLost != uint64(100-got) {
		t.Errorf("%d remembered, %d lost", got, s.Stats().RequestIDsLost)
	}
}

// TestEqualHashesAcrossStores: what belongs to one key is not found under another one of the same hash, on copies
// neither. It does the same at random to stores whose 60 states have 16 hashes between them and to stores whose hashes
// differ, while the partition is copied, moved, claimed from its copy and merged, and compares all answers.
func TestEqualHashesAcrossStores(t *testing.T) {
	rules := []*Rule{
		rule("log", log(6, time.Second)), rule("window", window(6, time.Second)),
		rule("bucket", algo.Limit{Algorithm: algo.TokenBucket, Limit: 6, Window: time.Second}),
		rule("jobs", algo.Limit{Algorithm: algo.Concurrency, Limit: 3, Window: time.Second}),
	}
	rules[0].Durability, rules[1].Durability = Escrow, Sync
	run := func(seed uint64, mask uint64) (out []string) {
		rng := rand.New(rand.NewPCG(seed, 11))
		stores := [2]*Store{New(Config{}), New(Config{Shut: true})}
		holder, claims, now := 0, uint64(1), time.Duration(0)
		pass := func(from int, staged bool) {
			for more := true; more; {
				var chunk []byte
				var version uint64
				// As a whole: what is in which of several chunks depends on the hashes.
				chunk, version, more = stores[from].Drain(0, ownership.Backup, at(now), 1<<20)
				must.NoError(t, stores[1-from].Apply(0, staged, at(now), chunk), "seed %d", seed)
				stores[from].Confirm(0, ownership.Backup, version)
			}
		}
		stores[0].TakeOver(0, at(0))
		stores[0].Attach(0, ownership.Backup, true)
		stores[0].Caught(0, ownership.Backup)
		var leases []uint64
		for step := range 400 {
			now += time.Duration(rng.Int64N(int64(30 * time.Millisecond)))
			s, r := stores[holder], rules[rng.IntN(len(rules))]
			k := s.key(r.Scope, fmt.Sprint(rng.IntN(15)))
			k.Hash &= mask
			// Most ids are of other keys.
			id, n := rng.Uint64N(20), 1+rng.Int64N(3)
			leased := r == rules[3]
			var got any
			switch op := rng.IntN(14); {
			case op < 6:
				call := cost(n)
				if leased {
					call.Cost, call.Nonce = 1, rng.Uint64()|1
				}
				if op < 2 && !leased {
					call.Reservation, call.ReserveFor = reservationOf(uint64(step)<<8|1), minute
				}
				if op == 3 {
					call.RequestID = fmt.Sprint(id)
				}
				a, err := s.Decide(k, r, at(now), call, nil)
				if a.Lease != 0 {
					leases = append(leases, a.Lease)
				}
				got = fmt.Sprint(a.Decision, a.Pending, a.Reservation, err)
			case op < 8 && !leased:
				back, known, err := settle(s, k, r, at(now), reservationOf(uint64(max(step-rng.IntN(20), 0))<<8|1),
					rng.Int64N(2))
				got = fmt.Sprint(back, known, err)
			case op == 8 && !leased:
				back, err := s.Refund(k, r, at(now), n, fmt.Sprint(id), "")
				got = fmt.Sprint(back, err)
			case op == 9:
				must.NoError(t, s.Reset(k, r.Scope), "seed %d", seed)
			case op == 10 && len(leases) > 0:
				lease := leases[rng.IntN(len(leases))]
				renewed, err := s.Renew(k, r, at(now), lease, 0, 0)
				released, wrong := s.Release(k, r, at(now), lease)
				got = fmt.Sprint(renewed.Alive, err, released, wrong)
			case op == 11:
				s.Sweep(at(now), 1) // what is dropped has to be told apart from what shares its hash
				pass(holder, false)
			case op == 12: // a move
				s.Shut(0)
				pass(holder, false)
				holder = 1 - holder
				stores[holder].Open(0)
				stores[holder].AttachCurrent(0, ownership.Backup, true)
				stores[holder].Caught(0, ownership.Backup)
			case op == 13 && rng.IntN(3) == 0: // a claim from the copy, and a merge with what was lost
				holder = 1 - holder
				claims++
				next := stores[holder]
				take(next, at(now))
				s.Attach(0, ownership.Backup, true)
				s.Shut(0)
				next.Stage(0)
				pass(1-holder, true)
				must.NoError(t, next.Merge(0, at(now)), "seed %d", seed)
				s.Discard(0)
				next.Attach(0, ownership.Backup, true)
				next.Caught(0, ownership.Backup)
				pass(holder, false)
			}
			out = append(out, fmt.Sprintf("%v %s %s: %v", now, r.Scope, k.Key, got))
		}
		return out
	}
	for seed := range uint64(60) {
		few, all := run(seed, 0xf<<32), run(seed, ^uint64(0))
		for i := range all {
			must.True(t, few[i] == all[i], "seed %d, step %d: %s, with other hashes %s", seed, i, few[i], all[i])
		}
	}
}
