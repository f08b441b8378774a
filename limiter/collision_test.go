package limiter

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/test/collision"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestEqualHashes gives 60 states 16 hashes between them, and holds every answer of three nodes to a node alone, with
// proper hashes, that is asked the same: whatever belongs to a key is found by the key.
func TestEqualHashes(t *testing.T) {
	const text = `policies:
  - {name: log, algorithm: sliding_log, limit: 5, window: 10s}
  - {name: counter, algorithm: fixed_window, limit: 4, window: 3s}
  - {name: bucket, algorithm: token_bucket, limit: 4, window: 1s, capacity: 3}
  - {name: jobs, algorithm: concurrency, limit: 3, ttl: 5s}
`
	for _, bits := range []int{64, 4, 0} {
		t.Run(fmt.Sprint(bits, " bits"), func(t *testing.T) {
			set := policies(t, text)
			inBubble(t, 3, Config{Policies: set, HashKey: testKey.Truncated(bits)}, func(t *testing.T, c *testCluster) {
				clock := func() algo.Instant { return algo.Instant{Mono: c.mono.Load(), Wall: 1_800_000_000e9 + c.mono.Load()} }
				oracle := started(t, Config{Policies: set, HashKey: testKey, Clock: clock})
				own := &algo.Limit{Algorithm: algo.SlidingLog, Limit: 2, Window: 3 * time.Second}
				random := rand.New(rand.NewPCG(1, uint64(bits)))
				anything := func() (at limit.Target) {
					at.Key = fmt.Sprintf("key-%d", random.IntN(12))
					switch i := random.IntN(4); i {
					case 3:
						at.Limit = own
					default:
						at.Policy = []string{"log", "counter", "bucket"}[i]
					}
					return at
				}
				var reservations, leases [][2]string // here and at the oracle
				for step := range 20000 {
					c.advance(time.Duration(random.ExpFloat64() * float64(30*time.Millisecond)))
					entry, at := c.nodes[random.IntN(3)], anything()
					job := onPolicy("jobs", at.Key)
					id := ""
					if random.IntN(4) == 0 {
						id = fmt.Sprintf("request-%d", random.IntN(20))
					}
					var what string
					var got, want any
					one := func(from *Limiter, q limit.Check) string {
						r, err := from.Check(t.Context(), []limit.Check{q})
						if err != nil {
							return err.Error()
						}
						d := r[0].Decision
						return fmt.Sprintf("%v %d, %v", d.Allowed, d.Granted, r[0].Err)
					}
					gaveBack := false
					switch random.IntN(12) {
					default:
						q := limit.Check{Target: at, Cost: random.Int64N(3), RequestID: id,
							Partial: random.IntN(8) == 0}
						what, got, want = fmt.Sprintf("check %+v", q), one(entry.Limiter, q), one(oracle, q)
					case 0:
						n := 1 + random.Int64N(2)
						what = fmt.Sprintf("refund %+v %d", at, n)
						got, want = said(entry.Refund(t.Context(), at, n, id)),
							said(oracle.Refund(t.Context(), at, n, id))
						gaveBack = true
					case 1:
						what = fmt.Sprintf("reset %+v", at)
						got, want = said(0, entry.Reset(t.Context(), at)), said(0, oracle.Reset(t.Context(), at))
						gaveBack = true
					case 2, 3:
						r := limit.Reserve{Target: at, Amount: units(1 + random.Int64N(2)), TTL: time.Minute,
							RequestID: id}
						d, err := entry.Reserve(t.Context(), r)
						o, wrong := oracle.Reserve(t.Context(), r)
						what, got, want = fmt.Sprintf("reserve %+v", r), said(d.Granted, err), said(o.Granted, wrong)
						if d.Allowed && o.Allowed {
							reservations = append(reservations, [2]string{d.ReservationID, o.ReservationID})
						}
					case 4, 5:
						if len(reservations) == 0 {
							continue
						}
						// Most are of another key than they are settled at.
						r := reservations[max(len(reservations)-1-random.IntN(8), 0)]
						keep := random.Int64N(4)
						commit := func(id string) limit.Commit {
							return limit.Commit{Target: at, ReservationID: id, Amount: units(keep)}
						}
						what = fmt.Sprintf("commit %+v %s %d", at, r[0], keep)
						got, want = said(entry.Commit(t.Context(), commit(r[0]))),
							said(oracle.Commit(t.Context(), commit(r[1])))
						gaveBack = true
					case 8:
						all := make([]limit.Check, 2)
						for i := range all {
							all[i] = limit.Check{Target: anything(), Cost: 1 + random.Int64N(2)}
						}
						d, err := entry.CheckAll(t.Context(), all)
						o, wrong := oracle.CheckAll(t.Context(), all)
						what, got, want = fmt.Sprintf("check all %+v", all), said(d.Allowed, err),
							said(o.Allowed, wrong)
						synctest.Wait() // until it is settled
						gaveBack = true
					case 6:
						a := limit.Acquire{Target: job, Cost: 1, RequestID: id}
						d, err := entry.Acquire(t.Context(), a)
						o, wrong := oracle.Acquire(t.Context(), a)
						what, got, want = fmt.Sprintf("acquire %+v", a), said(d.Granted, err), said(o.Granted, wrong)
						if d.Allowed && o.Allowed {
							leases = append(leases, [2]string{d.LeaseID, o.LeaseID})
						}
					case 7:
						if len(leases) == 0 {
							continue
						}
						l := leases[max(len(leases)-1-random.IntN(8), 0)]
						what = fmt.Sprintf("release %+v %s", job, l[0])
						got, want = said(entry.Release(t.Context(), job, l[0])),
							said(oracle.Release(t.Context(), job, l[1]))
						gaveBack = true
					}
					must.Equal(t, got, want, "step %d: %s", step, what)
					if gaveBack {
						c.advance(limit.MaxRemember) // so long others may still remember a refusal
					}
				}
			})
		})
	}
}

// said is what an operation says, with an error by its kind and field.
func said(value any, err error) string {
	var e *limit.Error
	if errors.As(err, &e) {
		return fmt.Sprintf("error %d of %s", e.Kind, e.Field)
	}
	return fmt.Sprint(value, " ", err)
}

// TestRefusalsOfEqualHashes has one entry node refuse one key from memory, and ask for others of the same hash.
func TestRefusalsOfEqualHashes(t *testing.T) {
	cfg := Config{Policies: policies(t, refusing), HashKey: testKey.Truncated(0)}
	inBubble(t, 2, cfg, func(t *testing.T, c *testCluster) {
		entry, own := c.nodes[1], &algo.Limit{Algorithm: algo.SlidingLog, Limit: 5, Window: 10 * time.Second}
		entry.check(t, named("log", "a", 5))
		must.True(t, !entry.check(t, named("log", "a", 1)).Allowed, "admitted")
		c.wantMessages(0, "the key that was refused", func() { entry.check(t, named("log", "a", 1)) })
		for _, other := range []limit.Check{
			named("log", "b", 1), named("two", "a", 1), {Target: limit.Target{Limit: own, Key: "a"}, Cost: 1},
			{Target: limit.Target{Limit: own, Namespace: "log", Key: "a"}, Cost: 1},
		} {
			c.wantMessages(1, fmt.Sprintf("%+v", other), func() {
				expect.True(t, entry.check(t, other).Allowed, "%+v", other)
			})
		}
	})
}

// TestCollisionsAreKeysLikeOthers sends 65,536 keys that XXH64 gives one hash: each has a state of its own, found at
// the price of any other's; one by one in a list they would take minutes.
func TestCollisionsAreKeysLikeOthers(t *testing.T) {
	l := started(t, Config{HashKey: testKey,
		Policies: policies(t, `policies: [{name: login, algorithm: fixed_window, limit: 2, window: 1h}]`)})
	partitions := map[int]int{}
	for round := range int64(2) {
		for key := range collision.Keys(8+len("login"), 1<<16) {
			r := must.Value(l.Check(t.Context(), []limit.Check{named("login", key, 1)}))(t)
			must.True(t, r[0].Err == nil && r[0].Allowed && r[0].Remaining == 1-round, "%q: %+v", key, r)
			partitions[ring.Partition(ring.Hash(testKey, "login", key))]++
		}
	}
	for p, n := range partitions {
		if n > 2*48 { // 16 on the mean, and 4 is the deviation
			t.Errorf("partition %d has %d of the keys", p, n/2)
		}
	}
}
