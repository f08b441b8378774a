package limiter

import (
	"slices"
	"sync"
)

// Bounds of what is remembered of one policy: at most 64 KiB.
const (
	lastCosts   = 128 // costs of a class, and of a policy whatever the class
	enoughCosts = 10  // of them are needed for an estimate
	maxClasses  = 64  // of a policy; what is beyond has the estimate of the policy
)

// estimator estimates the cost of work from the cost of earlier work of its class: the 90th percentile of the last
// costs of a class, by the nearest-rank definition (R. J. Hyndman and Y. Fan, Sample quantiles in statistical packages,
// The American Statistician 50, 1996, definition 1). It does not promise that an estimate suffices (one in ten costs
// more), that nodes agree on it (each learns from the costs it is told), or that anything is remembered when the
// process ends. The zero value has seen no cost and is ready for use. Its methods are safe for concurrent use.
type estimator struct {
	mu sync.Mutex
	by map[string]map[string]*costs // by policy and class; the empty class stands for all of the policy's
}

// costs are the last of a class.
type costs struct {
	last  [lastCosts]int64
	added int // ever

	caller string // that was the first to tell a cost of the class
}

// Add remembers what work has cost, as a caller has told. The class may be empty, and so may the caller: it is not
// known then. Once half of the policy's classes are taken, a known caller begins no more of them than are free.
func (e *estimator) Add(policy, class, caller string, cost int64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	of := e.by[policy]
	if of == nil {
		if e.by == nil {
			e.by = make(map[string]map[string]*costs)
		}
		of = make(map[string]*costs)
		e.by[policy] = of
	}
	add(of, "", caller, cost)
	if class != "" && (of[class] != nil || begins(of, caller)) {
		add(of, class, caller, cost)
	}
}

// begins reports whether a caller may begin one more class.
func begins(of map[string]*costs, caller string) bool {
	free, begun := maxClasses+1-len(of), 0
	for class, c := range of {
		if class != "" && caller != "" && c.caller == caller {
			begun++
		}
	}
	return free > 0 && (free > maxClasses/2 || begun < free)
}

func add(of map[string]*costs, class, caller string, cost int64) {
	c := of[class]
	if c == nil {
		c = &costs{caller: caller}
		of[class] = c
	}
	c.last[c.added%lastCosts] = cost
	c.added++
}

// Estimate returns what work of a class may cost; what any work of the policy may, while too little is known of the
// class; and false while too little is known of that, too.
func (e *estimator) Estimate(policy, class string) (cost int64, ok bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	of := e.by[policy]
	for _, name := range [...]string{class, ""} {
		if c := of[name]; c != nil && c.added >= enoughCosts {
			return c.estimate(), true
		}
	}
	return 0, false
}

func (c *costs) estimate() int64 {
	n := min(c.added, lastCosts)
	sorted := c.last
	slices.Sort(sorted[:n])
	return sorted[(9*n+9)/10-1]
}

// Keep forgets the policies of which keep says no.
func (e *estimator) Keep(keep func(policy string) bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for policy := range e.by {
		if !keep(policy) {
			delete(e.by, policy)
		}
	}
}
