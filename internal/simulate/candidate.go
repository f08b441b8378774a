package simulate

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/policy"
)

// mostKept bounds the admissions that a candidate keeps to find its fullest window: 16 bytes each.
const mostKept = 12 << 20

// mostRefused is how many keys a report lists.
const mostRefused = 10

// candidate is a policy with the states of all keys. One goroutine at a time may use it.
type candidate struct {
	policy *policy.Policy
	scaled map[*policy.Rule]algo.Limits // limits of rules in place of their own, for a suggestion
	window int64                        // length of Worst's window, ns; 0: none
	from   int64
	newest int64 // Mono instant of the last decision: the clock never runs backwards

	arena  *algo.Arena
	states []keyState

	out      Candidate // the counts so far
	line     timeline
	worstKey uint32
	kept     int // admissions in all states; -1: no longer kept
}

// keyState is the state of one key.
type keyState struct {
	limits            algo.Limits // nil: unlimited or blocked
	blocked           bool
	ref               algo.Ref
	begun             bool
	banned            int64 // Mono instant at which the key's ban ends
	admitted, refused uint32
	recent            []admission // admissions of the last window
	// sum is the units of recent.
	sum int64
}

// admission is the units that were admitted at one instant.
type admission struct{ at, units int64 }

func newCandidate(p *policy.Policy) *candidate {
	c := &candidate{policy: p, arena: algo.NewArena(nil), line: timeline{width: minBin}}
	for _, r := range p.Rules() {
		if len(r.Limits) > 0 && c.window == 0 {
			c.window = int64(span(&r.Limits[0]))
		}
	}
	return c
}

// span returns the length of a limit's window. For a calendar window, it is the longest that no change of clocks makes
// longer.
func span(l *algo.Limit) time.Duration {
	if l.Period == 0 {
		return l.Window
	}
	start, end := l.Period.Around(time.Date(2024, time.July, 1, 0, 0, 0, 0, time.UTC))
	return end.Sub(start)
}

func (c *candidate) take(b *batch) {
	c.from = b.from
	for _, name := range b.fresh {
		c.meet(name)
	}
	for i := range b.entries {
		c.decide(&b.entries[i])
	}
}

// meet adds a key; its number is the next one.
func (c *candidate) meet(name string) {
	r := c.policy.Rule(name)
	limits := r.Limits
	if scaled, ok := c.scaled[r]; ok {
		limits = scaled
	}
	c.states = append(c.states, keyState{limits: limits, blocked: r.Blocked})
}

func (c *candidate) decide(e *entry) {
	k := &c.states[e.key]
	now := instant(e.at, c.from)
	var d algo.Decision
	switch {
	case k.limits == nil && k.blocked:
		d.RetryAfter = algo.Never
	case k.limits == nil:
		d.Allowed, d.Granted = true, e.cost
	default:
		words := k.limits.Words()
		if !k.begun {
			k.ref, k.begun = c.alloc(words), true
			k.limits.Init(c.arena.Block(k.ref, words), now)
		}
		c.newest = max(c.newest, now.Mono)
		if e.cost > 0 && c.newest < k.banned {
			if d.RetryAfter = time.Duration(k.banned - c.newest); e.cost > k.limits.Largest() {
				d.RetryAfter = algo.Never
			}
			break
		}
		req := algo.Request{Cost: e.cost}
		// Without a budget there is no error.
		_ = k.limits.DecideTo(c.arena, c.arena.Block(k.ref, words), now, &req, nil, &d)
		if !d.Allowed && e.cost > 0 && c.policy.Ban > 0 && d.RetryAfter != algo.Never {
			k.banned = c.newest + int64(c.policy.Ban)
			d.RetryAfter = max(d.RetryAfter, c.policy.Ban)
		}
	}
	if e.cost == 0 {
		return // a peek
	}
	c.line.add(e.at, d.Allowed)
	if d.Allowed {
		c.out.Admitted++
		c.out.AdmittedUnits += d.Granted
		k.admitted++
		c.out.LongestWait = max(c.out.LongestWait, d.Delay)
		c.saw(k, e, d.Granted)
		return
	}
	c.out.Refused++
	c.out.RefusedUnits += e.cost
	if k.refused++; k.refused == 1 {
		c.out.CallersTouched++
	}
	if d.RetryAfter == algo.Never {
		c.out.Impossible++
	} else {
		c.out.LongestWait = max(c.out.LongestWait, d.RetryAfter)
	}
}

func (c *candidate) alloc(words int) algo.Ref {
	ref, ok := c.arena.Alloc(words)
	if !ok {
		panic("simulate: an arena without a budget refused memory")
	}
	return ref
}

// saw adds an admission to the key's last window (x-W, x], and updates Worst.
func (c *candidate) saw(k *keyState, e *entry, units int64) {
	if c.window == 0 || c.kept < 0 {
		return
	}
	for len(k.recent) > 0 && k.recent[0].at <= e.at-c.window {
		k.sum -= k.recent[0].units
		k.recent = k.recent[1:]
		c.kept--
	}
	if n := len(k.recent); n > 0 && k.recent[n-1].at == e.at {
		k.recent[n-1].units += units
	} else {
		if c.kept++; c.kept > mostKept {
			c.forget()
			return
		}
		k.recent = append(k.recent, admission{e.at, units})
	}
	if k.sum += units; k.sum > c.out.Worst.Units {
		c.out.Worst.Units, c.worstKey = k.sum, e.key
		c.out.Worst.End = time.Unix(0, c.from+e.at).UTC()
	}
}

// forget ends the search for the fullest window, because it takes too much memory.
func (c *candidate) forget() {
	for i := range c.states {
		c.states[i].recent = nil
	}
	c.kept, c.out.Worst.Incomplete = -1, true
}

func (c *candidate) result(names []string) Candidate {
	r := c.out
	r.Policy, r.Algorithm, r.Limits = c.policy.Name, algorithms(c.policy.Limits), Describe(c.policy.Limits)
	r.StateBytes, r.Timeline, r.MostDenied = int64(c.arena.Bytes()), c.line.bins, []KeyRefusal{}
	r.Worst.Window = time.Duration(c.window)
	if r.Worst.Units > 0 {
		r.Worst.Key = names[c.worstKey]
	}
	if len(names) > 0 {
		r.ShareTouched = float64(r.CallersTouched) / float64(len(names))
	}
	var order []uint32
	for i := range c.states {
		if c.states[i].refused > 0 {
			order = append(order, uint32(i))
		}
	}
	slices.SortFunc(order, func(a, b uint32) int {
		return cmp.Or(cmp.Compare(c.states[b].refused, c.states[a].refused), cmp.Compare(names[a], names[b]))
	})
	for _, i := range order[:min(len(order), mostRefused)] {
		k := &c.states[i]
		r.MostDenied = append(r.MostDenied, KeyRefusal{names[i], int64(k.admitted), int64(k.refused)})
	}
	return r
}

// algorithms returns the names of the algorithms of limits.
func algorithms(limits algo.Limits) string {
	if len(limits) == 0 {
		return "unlimited"
	}
	var names []string
	for i := range limits {
		if name := limits[i].Algorithm.String(); !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return strings.Join(names, ", ")
}

// Describe returns limits as text, such as "10 per 1s and 1000 per 1h0m0s".
func Describe(limits algo.Limits) string {
	if len(limits) == 0 {
		return "unlimited"
	}
	var parts []string
	for i := range limits {
		l := &limits[i]
		if l.Limit == algo.Unlimited {
			parts = append(parts, "unlimited")
			continue
		}
		per := strings.TrimSuffix(strings.TrimSuffix(l.Window.String(), "0s"), "0m")
		if l.Window%time.Minute != 0 || l.Window == 0 {
			per = l.Window.String()
		}
		if l.Period != 0 {
			per = "calendar " + l.Period.String()
		}
		s := fmt.Sprintf("%d per %s", l.Limit, per)
		if l.Capacity != 0 && l.Capacity != l.Limit {
			s += fmt.Sprintf(", capacity %d", l.Capacity)
		}
		parts = append(parts, s)
	}
	return strings.Join(parts, " and ")
}

// A timeline starts with bins of minBin. It never has more than mostBins of them: it doubles their length instead.
const (
	minBin   = int64(time.Millisecond)
	mostBins = 512
)

// timeline counts requests by time in bins of equal length.
type timeline struct {
	width int64
	bins  []Bin
}

func (t *timeline) add(at int64, admitted bool) {
	i := at / t.width
	for i >= mostBins {
		t.widen(2 * t.width)
		i = at / t.width
	}
	for int64(len(t.bins)) <= i {
		t.bins = append(t.bins, Bin{})
	}
	if admitted {
		t.bins[i].Admitted++
	} else {
		t.bins[i].Refused++
	}
}

// widen makes the bins width long: their present length times a power of two.
func (t *timeline) widen(width int64) {
	for ; t.width < width; t.width *= 2 {
		for i := range t.bins {
			b := t.bins[i]
			t.bins[i] = Bin{}
			t.bins[i/2].Admitted += b.Admitted
			t.bins[i/2].Refused += b.Refused
		}
		t.bins = t.bins[:(len(t.bins)+1)/2]
	}
}
