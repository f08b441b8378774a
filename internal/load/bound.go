package load

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/weirlimit/weir/algo"
)

// Bound is the bound that admissions are checked against: of each key, at most Units are admitted in any window of
// length Window.
//
// The owner's clock decides, and is not known here. Known is that each admission was decided between the sending of its
// check and the arrival of its answer. So an excess is reported only if it is certain: if admissions of more than Units
// were all sent at or after one moment, and all answered before that moment plus Window, less a thousandth for the
// drift of clocks. Admissions by a fail policy count.
type Bound struct {
	Units  int64         `json:"units"`
	Window time.Duration `json:"window_ns"`
}

// driftParts bounds the drift of two clocks: by this part of a window over its length. Clocks are disciplined to 500
// parts in a million.
const driftParts = 1000

// Verdict says whether the admissions kept to a Bound.
type Verdict struct {
	Bound
	Holds bool `json:"holds"`
	// Most is the largest number of units that one key was certainly admitted in one window. Key is that key; empty:
	// nothing was admitted.
	Most int64  `json:"most"`
	Key  string `json:"key,omitempty"`

	key int32
}

// BoundOf returns the most that a limit admits in its window; nil for a nil limit.
func BoundOf(l *algo.Limit) (*Bound, error) {
	if l == nil {
		return nil, nil
	}
	b := &Bound{Units: l.Limit, Window: l.Window}
	switch l.Algorithm {
	case algo.Concurrency:
		return nil, errors.New("algorithm: concurrency takes leases, not checks")
	case algo.SlidingLog, algo.SlidingWindow:
	default: // on both sides of a boundary, or a full bucket and its refill
		b.Units *= 2
	}
	return b, nil
}

// Learn returns a bound for a policy, from the limit that a node returns for a key: every algorithm admits at most
// twice the limit in a window. It returns nil if no node returns a limit.
func (n Nodes) Learn(ctx context.Context, key string) *Bound {
	n.Cost, n.Connections = 0, 1 // a peek
	askers, closeAll, err := n.Open()
	if err != nil {
		return nil
	}
	defer closeAll()
	within, cancel := context.WithTimeout(ctx, n.Timeout)
	defer cancel()
	a, err := askers[0](within, key)
	if err != nil || a.FailedOpen || a.FailedClosed || a.Limit <= 0 || a.Window <= 0 {
		return nil
	}
	return &Bound{Units: 2 * a.Limit, Window: a.Window}
}

// admission is an admitted check. Times count from the start of the run.
type admission struct {
	key            int32
	sent, answered time.Duration
}

// judge checks the admissions, each of cost units. It reorders them.
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

// most returns the largest number of admissions that were certainly decided within one window. They must be sorted by
// sent.
func (b Bound) most(sent []admission) (most int64) {
	window := b.Window - b.Window/driftParts
	answered := make([]int, len(sent)) // indices in sent, by when the answers came
	for i := range answered {
		answered[i] = i
	}
	slices.SortFunc(answered, func(i, j int) int { return cmp.Compare(sent[i].answered, sent[j].answered) })
	// The window begins when the i-th check was sent. Earlier checks are not counted.
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
