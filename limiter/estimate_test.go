package limiter

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// TestEstimate holds estimates to their definition: of the last n costs, the smallest that at least nine tenths do not exceed.
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
	if _, ok := e.Estimate("q", ""); ok {
		t.Error("an estimate of a policy that nothing is known of")
	}
	e.Keep(func(string) bool { return false })
	if _, ok := e.Estimate("p", ""); ok {
		t.Error("an estimate of a policy that was forgotten")
	}
}

func TestClassesAreBounded(t *testing.T) {
	var e estimator
	for i := range 10 * maxClasses {
		for range enoughCosts {
			e.Add("p", fmt.Sprint("class ", i), "", int64(i))
		}
	}
	if n := len(e.by["p"]); n != maxClasses+1 {
		t.Errorf("%d classes are remembered", n)
	}
	if got, ok := e.Estimate("p", "class 3"); !ok || got != 3 {
		t.Errorf("%d, %v", got, ok)
	}
	all, _ := e.Estimate("p", "")
	if got, ok := e.Estimate("p", fmt.Sprint("class ", 10*maxClasses-1)); !ok || got != all {
		t.Errorf("beyond the bound: %d, %v", got, ok)
	}
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
	if n := len(e.by["p"]) - 1; n != maxClasses/2 {
		t.Errorf("one caller has begun %d classes", n)
	}
	tell("another", 10)
	for i := range 10 {
		if got, ok := e.Estimate("p", fmt.Sprint("another ", i)); !ok || got != int64(len("another")) {
			t.Errorf("class %d of the other caller: %d, %v", i, got, ok)
		}
	}
}
