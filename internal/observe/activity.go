package observe

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/weirlimit/weir/limiter"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// HistoryStep is the length of a step. HistorySteps is how many complete steps are kept.
const (
	HistoryStep  = 5 * time.Second
	HistorySteps = 60
)

// since returns the decisions and errors since before, without the policy's name.
func since(s *limiter.PolicyStats, before *weirv1.PolicyUse) *weirv1.PolicyUse {
	return &weirv1.PolicyUse{Allowed: s.Allowed - before.GetAllowed(), Refused: s.Refused - before.GetRefused(),
		Shadowed: s.Shadowed - before.GetShadowed(), FailedOpen: s.FailedOpen - before.GetFailedOpen(),
		FailedClosed: s.FailedClosed - before.GetFailedClosed(), Errors: s.Errors - before.GetErrors(),
		Banned: s.Banned - before.GetBanned()}
}

// AddUse adds the decisions and errors of u to sum.
func AddUse(sum, u *weirv1.PolicyUse) {
	sum.Allowed += u.GetAllowed()
	sum.Refused += u.GetRefused()
	sum.Shadowed += u.GetShadowed()
	sum.FailedOpen += u.GetFailedOpen()
	sum.FailedClosed += u.GetFailedClosed()
	sum.Errors += u.GetErrors()
	sum.Banned += u.GetBanned()
}

// Decisions returns the number of decisions.
func Decisions(u *weirv1.PolicyUse) uint64 {
	return u.Allowed + u.Refused + u.Shadowed + u.FailedOpen + u.FailedClosed
}

// History is the history of a node's policies. It is safe for concurrent use.
//
// The steps of different nodes begin at different times. A step ends with the first Tick after HistoryStep.
type History struct {
	source func() []limiter.PolicyStats

	mu      sync.Mutex
	started bool
	began   int64                        // when the present step began, by Tick's clock
	last    map[string]*weirv1.PolicyUse // the counters at began
	steps   []map[string]*weirv1.PolicyUse
}

// NewHistory returns an empty History. source reads counters, which must never fall.
func NewHistory(source func() []limiter.PolicyStats) *History {
	return &History{source: source, last: make(map[string]*weirv1.PolicyUse)}
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
	ended := make([]map[string]*weirv1.PolicyUse, min(over, HistorySteps))
	ended[0] = h.presentLocked()
	for name, c := range ended[0] {
		if h.last[name] == nil {
			h.last[name] = new(weirv1.PolicyUse)
		}
		AddUse(h.last[name], c)
	}
	h.steps = append(ended, h.steps[:min(len(h.steps), HistorySteps-len(ended))]...)
	h.began += over * int64(HistoryStep)
}

// presentLocked returns the counts of the present step, without policies that have counted nothing.
func (h *History) presentLocked() map[string]*weirv1.PolicyUse {
	counts := make(map[string]*weirv1.PolicyUse)
	for _, s := range h.source() {
		if c := since(&s, h.last[s.Policy]); Decisions(c)+c.Errors > 0 {
			counts[s.Policy] = c
		}
	}
	return counts
}

// Read returns the policies that have counted anything in the steps that are kept, in order of name, and the time since
// the end of the newest complete step. The names are in the form of limiter.PolicyStats. The steps begin with the
// present one, which is not complete, and go back from there; there are at most HistorySteps+1. They must not be
// changed. now is an instant of Tick's clock.
func (h *History) Read(now int64) (policies []*peerv1.PolicyHistory, age time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.started {
		return nil, 0
	}
	steps := append([]map[string]*weirv1.PolicyUse{h.presentLocked()}, h.steps...)
	names := make(map[string]struct{})
	for _, step := range steps {
		for name := range step {
			names[name] = struct{}{}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		p := &peerv1.PolicyHistory{Policy: name}
		for _, step := range steps {
			p.Steps = append(p.Steps, cmp.Or(step[name], new(weirv1.PolicyUse)))
		}
		policies = append(policies, p)
	}
	return policies, time.Duration(now - h.began)
}
