package store

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
)

// sideHistory is a partition of one key that several processes may hold at once, each with the charges that its content has been
// told of, and how many units of each are left.
type sideHistory struct {
	t      *testing.T
	rng    *rand.Rand
	rule   *Rule
	now    time.Duration
	rest   time.Duration // in which nothing is asked, now and then
	claims uint64
	at     []time.Duration // of the charges
	sides  []*side
}

type side struct {
	store *Store
	open  bool
	units map[int]int64 // by charge
}

func (h *sideHistory) key(s *side) Key { return s.store.key(h.rule.Scope, "k") }

func (h *sideHistory) charge(s *side, reserve bool) {
	h.t.Helper()
	call := cost(1 + h.rng.Int64N(4))
	n := len(h.at)
	if reserve {
		call.Reservation, call.ReserveFor = reservationOf(uint64(n)+1), minute
	}
	d, err := s.store.Decide(h.key(s), h.rule, at(h.now), call, nil)
	if err != nil {
		h.t.Fatal(err)
	}
	if d.Granted > 0 {
		s.units[n] = d.Granted
		h.at = append(h.at, h.now)
	}
}

// settle ends one of the reservations that the side knows of, if any of them is pending there.
func (h *sideHistory) settle(s *side) {
	h.t.Helper()
	for n := range len(h.at) {
		if s.units[n] == 0 || h.rng.IntN(4) > 0 {
			continue
		}
		keep := h.rng.Int64N(s.units[n] + 1)
		_, known, err := settle(s.store, h.key(s), h.rule, at(h.now), reservationOf(uint64(n)+1), keep)
		if err != nil {
			h.t.Fatal(err)
		}
		if known {
			s.units[n] = keep
			return
		}
	}
}

// copied gives one side's content to another one, which holds it or is about to.
func (h *sideHistory) copied(from, to *side) {
	h.t.Helper()
	to.store.Stage(0)
	from.store.Attach(0, ownership.Target, true)
	for more := true; more; {
		var chunk []byte
		chunk, _, more = from.store.Drain(0, ownership.Target, at(h.now), 1+h.rng.IntN(300))
		if err := to.store.Apply(0, true, at(h.now), chunk); err != nil {
			h.t.Fatal(err)
		}
	}
	from.store.Detach(0, ownership.Target)
}

func (h *sideHistory) claim(s *side) {
	h.claims++
	s.store.TakeOver(0, at(h.now), ownership.Claim{Term: ownership.Term{Epoch: 1, N: h.claims}, Boot: h.claims})
	s.store.Open(0)
	s.open = true
}

func (h *sideHistory) close(s *side) {
	s.store.Shut(0)
	s.store.Discard(0)
	s.open, s.units = false, make(map[int]int64)
}

func (h *sideHistory) merge(from, to *side) {
	h.t.Helper()
	from.store.Shut(0)
	h.copied(from, to)
	if err := to.store.Merge(0, at(h.now)); err != nil {
		h.t.Fatal(err)
	}
	for n, units := range from.units {
		if known, ok := to.units[n]; !ok || units < known {
			to.units[n] = units
		}
	}
	h.close(from)
	h.claim(to)
}

// counted is how much of the charges that a side knows of one process that had made them all would still count, at least.
func (h *sideHistory) counted(s *side) int64 {
	l := &h.rule.Limits[0]
	var live int64
	owed := new(bucketOracle)
	for n, when := range h.at {
		units := s.units[n]
		if when > h.now-l.Window {
			live += units
		}
		if units > 0 {
			owed.charge(l, when, units)
		}
	}
	if l.Algorithm == algo.TokenBucket || l.Algorithm == algo.LeakyBucket {
		return owed.left(l, h.now)
	}
	return live
}

// bucketOracle is what one bucket owes, in units times nanoseconds of its window.
type bucketOracle struct {
	owes int64
	at   time.Duration
}

func (b *bucketOracle) charge(l *algo.Limit, now time.Duration, units int64) {
	b.owes = max(0, b.owes-l.Limit*int64(now-b.at)) + units*int64(l.Window)
	b.at = now
}

func (b *bucketOracle) left(l *algo.Limit, now time.Duration) int64 {
	owes := max(0, b.owes-l.Limit*int64(now-b.at))
	return (owes + int64(l.Window) - 1) / int64(l.Window)
}

// mixed says that there have been so many claims that for some of them there is no table of what was charged under them any
// more. Two sides with a common past then count it twice, and buckets that were refilled on both are both taken as they are.
func (h *sideHistory) mixed() bool {
	return slices.ContainsFunc(h.sides, func(s *side) (is bool) {
		s.store.with(0, func(_ *shard, part *partition) { is = part.extras != nil && len(part.extras.lineage) == maxLineage })
		return is
	})
}

// step lets something happen, and says what.
func (h *sideHistory) step() string {
	h.now += time.Duration(h.rng.Int64N(int64(200 * time.Millisecond)))
	if h.rng.IntN(40) == 0 {
		h.now += h.rest
		for _, s := range h.sides {
			s.store.Sweep(at(h.now), 1)
		}
	}
	i, j := h.rng.IntN(len(h.sides)), h.rng.IntN(len(h.sides))
	s, other := h.sides[i], h.sides[j]
	switch op := h.rng.IntN(40); {
	case !s.open:
		return ""
	case op < 16:
		h.charge(s, false)
		return fmt.Sprintf("%d is charged", i)
	case op < 24:
		h.charge(s, true)
		return fmt.Sprintf("%d reserves", i)
	case op < 32:
		h.settle(s)
		return fmt.Sprintf("%d settles", i)
	case op == 32:
		s.store.Sweep(at(h.now), 1)
		return fmt.Sprintf("%d sweeps", i)
	case i == j:
		return ""
	case other.open && op < 35:
		h.merge(s, other)
		return fmt.Sprintf("%d is merged with %d", i, j)
	case other.open:
		return ""
	case op < 36:
		h.copied(s, other)
		other.store.Promote(0)
		clear(other.units)
		for n, units := range s.units {
			other.units[n] = units
		}
		h.claim(other)
		return fmt.Sprintf("%d is claimed by %d from a copy", i, j)
	case op < 38:
		h.copied(s, other)
		other.store.Promote(0)
		units := s.units
		h.close(s)
		other.units, other.open = units, true
		other.store.Open(0)
		return fmt.Sprintf("%d moves to %d", i, j)
	default:
		h.claim(other)
		other.store.Cold(0, at(h.now))
		return fmt.Sprintf("%d is claimed by %d without a copy", i, j)
	}
}

// TestMergeForgetsNothing has several processes hold a partition at once, with a common past or none, each of which charges,
// reserves and settles, and merges them: what is then counted is never less than what one process had counted that saw it all.
func TestMergeForgetsNothing(t *testing.T) {
	for name, limit := range map[string]algo.Limit{
		"sliding_log":    log(60, 5*time.Second),
		"sliding_window": {Algorithm: algo.SlidingWindow, Limit: 60, Window: 5 * time.Second},
		// Of a window that has ended nothing counts: it is longer than a run.
		"sliding_counter": {Algorithm: algo.SlidingCounter, Limit: 400, Window: minute},
		"fixed_window":    window(400, minute),
		// What was charged to a bucket is told apart for as long as it takes to fill, which is longer than a run, too.
		"token_bucket": {Algorithm: algo.TokenBucket, Limit: 20, Capacity: 400, Window: time.Second},
		"leaky_bucket": {Algorithm: algo.LeakyBucket, Limit: 20, Capacity: 400, Window: time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range seeds(1000) {
				h := &sideHistory{t: t, rng: rand.New(rand.NewPCG(seed, 21)), rule: rule("p", limit)}
				for range 4 {
					h.sides = append(h.sides, &side{store: New(Config{Shut: true}), units: make(map[int]int64)})
				}
				if limit.Window == 5*time.Second {
					h.rest = time.Duration(h.rng.Int64N(int64(limit.Window)))
				} else if repaid(h.rule.Limits) {
					h.rest = 300 * time.Millisecond // in which a bucket that was used little is full again
				}
				h.claim(h.sides[0])
				var told []string
				for range 150 {
					if repaid(h.rule.Limits) && h.mixed() {
						break
					}
					if what := h.step(); what != "" {
						told = append(told, fmt.Sprintf("%v: %s", h.now, what))
					}
					for i, s := range h.sides {
						if !s.open {
							continue
						}
						d, err := s.store.Decide(h.key(s), h.rule, at(h.now), cost(0), nil)
						if err != nil {
							t.Fatal(err)
						}
						most := max(limit.Limit, limit.Capacity)
						if used, want := most-d.Remaining, min(most, h.counted(s)); used < want {
							t.Fatalf("seed %d: at %v side %d counts %d of %d\n%s", seed, h.now, i, used, want, told[max(0, len(told)-25):])
						}
					}
				}
				for _, s := range h.sides {
					accounted(t, s.store)
				}
			}
		})
	}
}

// TestMergeAfterManyClaims splits and merges a partition more often than its lineage has room for, each time after all that was
// charged before has expired: a split soon after such a merge is merged like any other.
func TestMergeAfterManyClaims(t *testing.T) {
	for name, limit := range map[string]algo.Limit{
		"sliding_log":  log(40, 2*time.Second),
		"fixed_window": window(40, 2*time.Second),
		"token_bucket": {Algorithm: algo.TokenBucket, Limit: 20, Capacity: 40, Window: time.Second},
		"leaky_bucket": {Algorithm: algo.LeakyBucket, Limit: 20, Capacity: 40, Window: time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range seeds(50) {
				h := &sideHistory{t: t, rng: rand.New(rand.NewPCG(seed, 22)), rule: rule("p", limit)}
				for range 2 {
					h.sides = append(h.sides, &side{store: New(Config{Shut: true}), units: make(map[int]int64)})
				}
				holder, other := h.sides[0], h.sides[1]
				h.claim(holder)
				// split ends with what both sides admitted counted by the one that holds the partition then.
				split := func(charges int) {
					h.copied(holder, other)
					other.store.Promote(0)
					for n, units := range holder.units {
						other.units[n] = units
					}
					h.claim(other)
					for range charges {
						h.now += time.Duration(h.rng.Int64N(int64(100 * time.Millisecond)))
						h.charge(h.sides[h.rng.IntN(2)], false)
					}
					if h.rng.IntN(2) == 0 {
						holder, other = other, holder
					}
					h.merge(other, holder)
					d, err := holder.store.Decide(h.key(holder), h.rule, at(h.now), cost(0), nil)
					if err != nil {
						t.Fatal(err)
					}
					most := max(limit.Limit, limit.Capacity)
					if used, want := most-d.Remaining, min(most, h.counted(holder)); used < want || used > want && limit.Algorithm == algo.SlidingLog {
						t.Fatalf("seed %d: after %d claims %d are in use, want %d", seed, h.claims, used, want)
					}
				}
				for range maxLineage {
					split(4)
					h.now += 5 * time.Second // nothing of it is left, and the claims are remembered
				}
				split(4)
				split(14)
				accounted(t, holder.store)
			}
		})
	}
}
