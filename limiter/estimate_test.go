package limiter

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/weirlimit/weir/test/expect"
)

// TestEstimate holds estimates to their definition: of the last n costs, the smallest that at least nine tenths do not
// exceed.
func TestEstimate(t *testing.T) {
	var e estimator
	rng := rand.New(rand.NewPCG(1, 2))
	var all []int64
	byClass := make(map[string][]int64)
	want := func(costs []int64) (int64, bool) {
		if len(costs) < enoughCosts {
			return 0, false
		}
		costs = slices.Clone(costs[max(0, len(costs)-lastCosts):])
		slices.Sort(costs)
		for _, c := range costs {
			below := 0
			for _, o := range costs {
				if o <= c {
					below++
				}
			}
			if 10*below >= 9*len(costs) {
				return c, true
			}
		}
		return 0, false
	}
	for step := range 2000 {
		class := []string{"", "small", "large", "rare"}[min(rng.IntN(4)*rng.IntN(2)+rng.IntN(2), 3)]
		cost := rng.Int64N(1000)
		e.Add("p", class, "", cost)
		all = append(all, cost)
		if class != "" {
			byClass[class] = append(byClass[class], cost)
		}
		for _, c := range []string{"", "small", "large", "rare", "never"} {
			should, ok := want(byClass[c])
			if !ok {
				should, ok = want(all)
			}
			if got, known := e.Estimate("p", c); got != should || known != ok {
				t.Fatalf("step %d, class %q: %d, %v, want %d, %v", step, c, got, known, should, ok)
			}
		}
	}
	_, ok := e.Estimate("q", "")
	expect.True(t, !ok, "an estimate of a policy that nothing is known of")
	e.Keep(func(string) bool { return false })
	_, ok = e.Estimate("p", "")
	expect.True(t, !ok, "an estimate of a policy that was forgotten")
}

func TestClassesAreBounded(t *testing.T) {
	var e estimator
	for i := range 10 * maxClasses {
		for range enoughCosts {
			e.Add("p", fmt.Sprint("class ", i), "", int64(i))
		}
	}
	expect.Equal(t, len(e.by["p"]), maxClasses+1, "classes are remembered")
	got, ok := e.Estimate("p", "class 3")
	expect.True(t, ok && got == 3, "%d, %v", got, ok)
	all, _ := e.Estimate("p", "")
	got, ok = e.Estimate("p", fmt.Sprint("class ", 10*maxClasses-1))
	expect.True(t, ok && got == all, "beyond the bound: %d, %v", got, ok)
}

// TestClassesOfOneCaller: a caller that invents classes leaves room for those of others.
func TestClassesOfOneCaller(t *testing.T) {
	var e estimator
	tell := func(caller string, classes int) {
		for i := range classes {
			for range enoughCosts {
				e.Add("p", fmt.Sprint(caller, " ", i), caller, int64(len(caller)))
			}
		}
	}
	tell("a", 10*maxClasses)
	n := len(e.by["p"]) - 1
	expect.True(t, n == maxClasses/2, "one caller has begun %d classes", n)
	tell("another", 10)
	for i := range 10 {
		got, ok := e.Estimate("p", fmt.Sprint("another ", i))
		expect.True(t, ok && got == int64(len("another")), "class %d of the other caller: %d, %v", i, got, ok)
	}
}
