package lend

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// TestSteady has a borrower ask for a key at a steady rate: all is admitted from loans, though the owner waits before
// it answers, and reported a few times in each term.
func TestSteady(t *testing.T) {
	const span, way, copied = 10, 300 * time.Microsecond, 20 * time.Millisecond
	for _, rate := range []int64{200, 2000, 50_000} {
		o := newOwner(t, algo.Limit{Algorithm: algo.TokenBucket, Limit: 1_000_000_000, Window: time.Minute})
		var events testkit.Timeline
		now, reported, turn := int64(time.Hour), int64(0), 0
		admitted, asked, loans := 0, 0, 0
		after := func(d time.Duration, do func()) { events.At(now+int64(d), do) }
		run := func(d time.Duration) { events.Run(now+int64(d), func(at int64) { now = at }) }
		var report func()
		due := func(d time.Duration) {
			turn++
			mine := turn
			after(max(d, time.Duration(reported-now)+time.Millisecond), func() {
				if mine == turn {
					report()
				}
			})
		}
		b := newBook(func() { due(0) })
		report = func() {
			reports, next := b.Report(now)
			sent := now
			if reported = now; next > 0 {
				due(next)
			}
			loans += len(reports)
			after(way, func() {
				var answers []Answer[int]
				for _, r := range reports {
					answers = append(answers, o.lend(now, 1, r))
				}
				after(copied+way, func() { b.Answered(sent, now, answers) })
			})
		}
		var ask func()
		ask = func() {
			after(time.Second/time.Duration(rate), ask)
			if _, _, ok := b.Take("k", 1, at(now)); ok {
				admitted++
				return
			}
			asked++
			expect.True(t, o.check(now, 1), "refused")
			b.Missed("k", 1, at(now), nil)
		}
		ask()
		run(2 * time.Second)
		admitted, asked, loans = 0, 0, 0
		run(span * time.Second)
		expect.True(t, asked == 0 && loans <= span*(perTerm+1) && admitted >= span*int(rate)-1,
			"%d a second: %d admitted, %d asked, %d reports", rate, admitted, asked, loans)
	}
}

// TestKeepsToWhatItWasTold holds a Cache to a list that keeps everything.
func TestKeepsToWhatItWasTold(t *testing.T) {
	type entry struct {
		key string
		Refusal[int]
	}
	keys := []string{"a", "b", "c", "d", "e", "f", "g"}
	// Few hashes, all in one set, so that keys share hashes and drive one another out.
	hash := func(key string) uint64 { return uint64(key[0]) % 5 * shardCount * sets }
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 1))
		var r Refusals[string, int]
		var known []entry // what may be found
		marks := map[string]uint64{}
		now := int64(1)
		for step := range 200 {
			key := keys[random.IntN(len(keys))]
			h := hash(key)
			switch random.IntN(5) {
			case 0, 1:
				cost := 1 + random.Int64N(4)
				got, ok := r.Find(h, key, cost, now)
				marks[key] = r.Mark(h)
				must.True(t, !ok || slices.ContainsFunc(known, func(e entry) bool {
					return e.key == key && e.Refusal == got && e.Cost == cost && now < e.Until
				}), "seed %d: %s, cost %d at %d: found %+v, known are %+v", seed, key, cost, now, got, known)
			case 2:
				mark := marks[key]
				cost := 1 + random.Int64N(3)
				e := entry{key, Refusal[int]{step, cost, now, now + random.Int64N(10)}}
				r.Remember(h, key, mark, e.Refusal)
				keep := mark == r.Mark(h) && e.Until > now
				got, ok := r.Find(h, key, cost, now)
				must.True(t, (!keep || ok && got == e.Refusal) && (keep || !ok || got != e.Refusal),
					"seed %d: %+v: found %v %+v, though it was to be kept: %v", seed, e, ok, got, keep)
				if keep {
					known = slices.DeleteFunc(known, func(o entry) bool { return o.key == key && o.Cost == cost })
					known = append(known, e)
				}
			case 3:
				if random.IntN(2) == 0 {
					r.Admitted(h)
				} else {
					r.Forget(h)
				}
				known = slices.DeleteFunc(known, func(e entry) bool { return hash(e.key) == h })
			case 4:
				now += random.Int64N(4)
			}
		}
	}
}

func TestReplacesWhatEndsFirst(t *testing.T) {
	var r Refusals[int, int]
	const set = shardCount * sets // hashes that far apart fall into one set
	for i := range ways {
		r.Remember(uint64(i*set), i, 0, Refusal[int]{i, 1, 0, int64(100 - i)})
	}
	r.Remember(uint64(ways*set), ways, 0, Refusal[int]{9, 1, 0, 50})
	for i := range ways + 1 {
		_, ok := r.Find(uint64(i*set), i, 1, 1)
		want := i != ways-1
		expect.Equal(t, ok, want, "%d is remembered", i)
	}
}

// TestAdmittedKeepsWhatIsInFlight: a refusal that is on its way while something is admitted is no less true for that.
func TestAdmittedKeepsWhatIsInFlight(t *testing.T) {
	var r Refusals[int, int]
	mark := r.Mark(1)
	r.Remember(1, 1, mark, Refusal[int]{1, 9, 0, 100}) // of another cost, so that there is something to forget
	r.Admitted(1)
	r.Remember(1, 1, mark, Refusal[int]{1, 1, 0, 100})
	_, ok := r.Find(1, 1, 1, 1)
	expect.True(t, ok, "what came after an admission is not remembered")
	r.Forget(1)
	r.Remember(1, 1, mark, Refusal[int]{1, 1, 0, 100})
	_, ok = r.Find(1, 1, 1, 1)
	expect.True(t, !ok, "what was asked before something was given back is remembered")
}

func TestFindAllocatesNothing(t *testing.T) {
	var r Refusals[string, [30]int64]
	const k = "k"
	r.Remember(1, k, 0, Refusal[[30]int64]{Cost: 2, Until: 100})
	allocs := testing.AllocsPerRun(100, func() {
		_, ok := r.Find(1, k, 2, 50)
		expect.True(t, ok, "forgotten")
	})
	expect.Equal(t, allocs, 0, "allocations")
}
