package load

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/weirlimit/weir/algo"
)

// Bound is what the answers are held to: of each key, at most Units are admitted in any window of length Window.
//
// The owner's clock decides, and is not seen here. What is seen is that each admission was decided between the moment its check
// was sent and the moment its answer came. So an excess is only reported where it is certain: when admissions of more than Units
// were all sent at or after some moment, and all answered before that moment plus Window, less a thousandth for clocks that do not
// run at the same rate. Admissions by a fail policy count.
type Bound struct {
	Units  int64         `json:"units"`
	Window time.Duration `json:"window_ns"`
}

// driftParts is the part of a window that two clocks may differ by over its length: clocks are disciplined to 500 parts in a million.
const driftParts = 1000

// Verdict says whether a Bound was kept.
type Verdict struct {
	Bound
	Holds bool `json:"holds"`
	// Most is the largest number of units that one key was certainly admitted in one window, and Key that key, empty when none
	// was admitted.
	Most int64  `json:"most"`
	Key  string `json:"key,omitempty"`

	key int32
}

// BoundOf is what a limit lets through in its window at most; nil for none.
func BoundOf(l *algo.Limit) (*Bound, error) {
	if l == nil {
		return nil, nil
	}
	b := &Bound{Units: l.Limit, Window: l.Window}
	switch l.Algorithm {
	case algo.Concurrency:
		return nil, errors.New("algorithm: concurrency takes leases, not checks")
	case algo.SlidingLog, algo.SlidingWindow:
	default: // across a boundary, or a full bucket and what comes back meanwhile
		b.Units *= 2
	}
	return b, nil
}

// Learn returns the bound for a policy, from the limit of a key that a node tells: under every algorithm, no more than twice the limit
// passes in a window. It is nil where no node tells a limit.
func (n Nodes) Learn(ctx context.Context, key string) *Bound {
	n.Cost, n.Connections = 0, 1 // a peek
	askers, closeAll, err := n.Open()
	if err != nil {
		return nil
	}
	defer closeAll()
	within, cancel := context.WithTimeout(ctx, n.Timeout)
	defer cancel()
	a, err := askers[0].Ask(within, key)
	if err != nil || a.FailedOpen || a.FailedClosed || a.Limit <= 0 || a.Window <= 0 {
		return nil
	}
	return &Bound{Units: 2 * a.Limit, Window: a.Window}
}

// admission is an admitted check. The times count from the start of the run.
type admission struct {
	key            int32
	sent, answered time.Duration
}

// judge looks at the admissions, each of cost units. It reorders them.
func (b Bound) judge(lists [][]admission, cost int64) Verdict {
	v := Verdict{Bound: b}
	all := slices.Concat(lists...)
	slices.SortFunc(all, func(a, b admission) int { return cmp.Or(cmp.Compare(a.key, b.key), cmp.Compare(a.sent, b.sent)) })
	for len(all) > 0 {
		n := 1
		for n < len(all) && all[n].key == all[0].key {
			n++
		}
		if most := b.most(all[:n]) * cost; most > v.Most {
			v.Most, v.key = most, all[0].key
		}
		all = all[n:]
	}
	v.Holds = v.Most <= b.Units
	return v
}

// most is the largest number of admissions that were certainly decided within one window. They are sorted by when they were sent.
func (b Bound) most(sent []admission) (most int64) {
	window := b.Window - b.Window/driftParts
	answered := make([]int, len(sent)) // indices in sent, by when the answers came
	for i := range answered {
		answered[i] = i
	}
	slices.SortFunc(answered, func(i, j int) int { return cmp.Compare(sent[i].answered, sent[j].answered) })
	// The window begins when the i-th was sent: what was sent before is out of it.
	var inside int64
	next := 0
	counted := make([]bool, len(sent))
	for i := range sent {
		for ; next < len(answered) && sent[answered[next]].answered < sent[i].sent+window; next++ {
			if at := answered[next]; at >= i {
				counted[at] = true
				inside++
			}
		}
		most = max(most, inside)
		if counted[i] {
			inside--
		}
	}
	return most
}
