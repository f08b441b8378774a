package observe

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/weirlimit/weir/limiter"
)

// HistoryStep is how long a step takes, and HistorySteps how many complete ones are remembered.
const (
	HistoryStep  = 5 * time.Second
	HistorySteps = 60
)

// StepCounts are decisions by their results, and errors.
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
		c.FailedOpen - before.FailedOpen, c.FailedClosed - before.FailedClosed, c.Errors - before.Errors, c.Banned - before.Banned}
}

// Total is the number of decisions.
func (c *StepCounts) Total() uint64 {
	return c.Allowed + c.Refused + c.Shadowed + c.FailedOpen + c.FailedClosed
}

// PolicyHistory is what one policy did.
type PolicyHistory struct {
	Name string // as limiter.PolicyStats has it
	// Steps are the present one, which is not complete, and then backwards; as many as there have been, at most HistorySteps+1.
	Steps []StepCounts
}

// History is what a node's policies did. It is safe for concurrent use.
//
// Steps of different nodes do not begin at the same time, and a step ends with the first Tick after HistoryStep.
type History struct {
	source func() []limiter.PolicyStats

	mu      sync.Mutex
	started bool
	began   int64                 // of the present step, Mono
	last    map[string]StepCounts // at that time
	steps   []map[string]StepCounts
}

// NewHistory returns an empty History of the counters that source reads, which only ever grow.
func NewHistory(source func() []limiter.PolicyStats) *History {
	return &History{source: source, last: make(map[string]StepCounts)}
}

// Tick ends the present step when it is over. It is to be called several times a second, with a time that does not go back.
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
	// Where the process has stood still there are steps that nobody has ended. What was counted is taken for the last of them.
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

// presentLocked returns what was counted in the present step, of the policies that have counted anything.
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

// Read returns the policies that have counted anything in the time that is remembered, by name, and the age of the newest
// complete step's end. now is the time as Tick is told it.
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
