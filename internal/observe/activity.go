package observe

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/weirlimit/weir/limiter"
)

// HistoryStep is the length of a step. HistorySteps is how many complete steps are kept.
const (
	HistoryStep  = 5 * time.Second
	HistorySteps = 60
)

// StepCounts has the decisions of a step by result, and the errors.
type StepCounts struct {
	Allowed, Refused, Shadowed, FailedOpen, FailedClosed, Errors uint64
	Banned                                                       uint64 // of Refused and Shadowed
}

func countsOf(s *limiter.PolicyStats) StepCounts {
	return StepCounts{s.Allowed, s.Refused, s.Shadowed, s.FailedOpen, s.FailedClosed, s.Errors, s.Banned}
}

// Add adds other to c.
func (c *StepCounts) Add(other StepCounts) {
	c.Allowed += other.Allowed
	c.Refused += other.Refused
	c.Shadowed += other.Shadowed
	c.FailedOpen += other.FailedOpen
	c.FailedClosed += other.FailedClosed
	c.Errors += other.Errors
	c.Banned += other.Banned
}

func (c *StepCounts) since(before StepCounts) StepCounts {
	return StepCounts{c.Allowed - before.Allowed, c.Refused - before.Refused, c.Shadowed - before.Shadowed,
		c.FailedOpen - before.FailedOpen, c.FailedClosed - before.FailedClosed, c.Errors - before.Errors,
		c.Banned - before.Banned}
}

// Total returns the number of decisions.
func (c *StepCounts) Total() uint64 {
	return c.Allowed + c.Refused + c.Shadowed + c.FailedOpen + c.FailedClosed
}

// PolicyHistory is the history of one policy.
type PolicyHistory struct {
	Name string // in the form of limiter.PolicyStats
	// Steps begin with the present step, which is not complete, and go back from there. There are at most
	// HistorySteps+1.
	Steps []StepCounts
}

// History is the history of a node's policies. It is safe for concurrent use.
//
// The steps of different nodes begin at different times. A step ends with the first Tick after HistoryStep.
type History struct {
	source func() []limiter.PolicyStats

	mu      sync.Mutex
	started bool
	began   int64                 // when the present step began, by Tick's clock
	last    map[string]StepCounts // the counters at began
	steps   []map[string]StepCounts
}

// NewHistory returns an empty History. source reads counters, which must never fall.
func NewHistory(source func() []limiter.PolicyStats) *History {
	return &History{source: source, last: make(map[string]StepCounts)}
}

// Tick ends the present step if it is over. The caller must call it several times a second, with a clock that never
// runs backwards.
func (h *History) Tick(mono int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.started {
		h.started, h.began = true, mono
	}
	over := (mono - h.began) / int64(HistoryStep)
	if over < 1 {
		return
	}
	// If the process stood still for longer than a step, all counts go to the last of the steps that have passed.
	ended := make([]map[string]StepCounts, min(over, HistorySteps))
	ended[0] = h.presentLocked()
	for name, c := range ended[0] {
		h.last[name] = sum(h.last[name], c)
	}
	h.steps = append(ended, h.steps[:min(len(h.steps), HistorySteps-len(ended))]...)
	h.began += over * int64(HistoryStep)
}

func sum(a, b StepCounts) StepCounts {
	a.Add(b)
	return a
}

// presentLocked returns the counts of the present step, without policies that have counted nothing.
func (h *History) presentLocked() map[string]StepCounts {
	counts := make(map[string]StepCounts)
	for _, s := range h.source() {
		c := countsOf(&s)
		if delta := c.since(h.last[s.Policy]); delta != (StepCounts{}) {
			counts[s.Policy] = delta
		}
	}
	return counts
}

// Read returns the policies that have counted anything in the steps that are kept, in order of name, and the time since
// the end of the newest complete step. now is an instant of Tick's clock.
func (h *History) Read(now int64) (policies []PolicyHistory, age time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.started {
		return nil, 0
	}
	steps := append([]map[string]StepCounts{h.presentLocked()}, h.steps...)
	names := make(map[string]struct{})
	for _, step := range steps {
		for name := range step {
			names[name] = struct{}{}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		p := PolicyHistory{Name: name, Steps: make([]StepCounts, len(steps))}
		for i, step := range steps {
			p.Steps[i] = step[name]
		}
		policies = append(policies, p)
	}
	return policies, time.Duration(now - h.began)
}
