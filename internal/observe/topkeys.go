package observe

import (
	"cmp"
	"iter"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limiter"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// TopWindow is how long a decision is remembered, and up to generation less.
const (
	TopWindow   = generations * generation
	generations = 6
	generation  = 10 * time.Second
)

// counters is the size of each sketch: a key is found that has 0.7 % of a generation's decisions (or refusals).
const counters = 512

// Of maxStates keys it is known how full they are. When there are more, keepFullest stay. A busy key is back with its next decision.
const maxStates, keepFullest = 1024, 640

// fullness is how full a key is: 0 to 1, and more where a limit was lowered.
func fullness(used, limit int64) float64 {
	if limit <= 0 {
		return 0
	}
	return float64(used) / float64(limit)
}

type id struct{ scope, key string }

func (k id) clone() id { return id{strings.Clone(k.scope), strings.Clone(k.key)} }

// state is what a key's last sample said of its state.
type state struct {
	algorithm   algo.Algorithm
	window      time.Duration
	limit, used int64
	turn        int // when it was seen
}

// TopKeys records decisions. It is safe for concurrent use.
//
// It is fed with a sample of a limiter's decisions and forgets them after about a minute. Its counts are estimates, for
// two reasons: heavy hitters are counted within bounds (see window), which a row tells, and where a node decides more
// than 10,000 checks a second each decision that is recorded stands for several, which adds an error of about √(n·w) to a count
// of n where it stands for w.
//
// It does not promise that a key with less than 1 % of a node's decisions is found at all where there are thousands
// of them; that a key that is full and is hardly asked about is seen by a busy node; or anything about what clients refuse
// from memory. Admissions from loans count when borrowers report them.
type TopKeys struct {
	mu      sync.Mutex
	all     window
	refused window
	states  map[id]*state
	started bool
	first   int64 // when the first generation began, Mono
	began   int64 // when the present one did
	turns   int   // how many there have been
}

var _ limiter.Recorder = (*TopKeys)(nil)

// NewTopKeys returns an empty TopKeys.
func NewTopKeys() (*TopKeys, error) {
	r := &TopKeys{states: make(map[id]*state)}
	var err error
	if r.all, err = newWindow(); err != nil {
		return nil, err
	}
	r.refused, err = newWindow()
	return r, err
}

// Record implements limiter.Recorder.
func (r *TopKeys) Record(s *limiter.Sample) {
	k := id{s.Scope, s.Key}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all.add(k, s.Weight)
	if s.Refused {
		r.refused.add(k, s.Weight)
	}
	st := r.states[k]
	if st == nil {
		if s.Limit <= 0 {
			return
		}
		if len(r.states) >= maxStates {
			r.dropStates()
		}
		st = new(state)
		r.states[k.clone()] = st
	}
	st.turn = r.turns
	if s.Limit > 0 {
		st.algorithm, st.window, st.limit, st.used = s.Algorithm, s.Window, s.Limit, s.Limit-s.Remaining
	}
}

// dropStates makes room for others.
func (r *TopKeys) dropStates() {
	full := func(k id) float64 { return fullness(r.states[k].used, r.states[k].limit) }
	all := slices.SortedFunc(maps.Keys(r.states), func(a, b id) int { return cmp.Compare(full(b), full(a)) })
	for _, k := range all[keepFullest:] {
		delete(r.states, k)
	}
}

// Tick implements limiter.Recorder: it forgets what is too old.
func (r *TopKeys) Tick(mono int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.started {
		r.started, r.first, r.began = true, mono, mono
	}
	if mono-r.began >= int64(2*TopWindow) {
		r.began = mono - int64(TopWindow) // the clock has stood still for us: forget what was before in a few turns
	}
	for ; mono-r.began >= int64(generation); r.began += int64(generation) {
		r.turns++
		r.all.turn()
		r.refused.turn()
		maps.DeleteFunc(r.states, func(_ id, st *state) bool { return r.turns-st.turn >= generations })
	}
}

// Top returns the n first keys by each of the orders, in no order and each key once, of those whose scope is wanted (nil: all), and for how
// long their decisions have been counted. now is the time as Tick is told it.
func (r *TopKeys) Top(now int64, n int, wanted func(scope string) bool, orders ...weirv1.KeyOrder) (rows []*peerv1.KeyActivity, since time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	seen := make(map[id]bool)
	for _, by := range orders {
		list := r.rows(by, wanted)
		SortRows(list, by)
		for _, row := range list[:min(max(n, 0), len(list))] {
			if k := (id{row.Scope, row.Key}); !seen[k] {
				seen[k], rows = true, append(rows, row)
			}
		}
	}
	if r.started {
		since = time.Duration(now - max(r.first, r.began-int64(TopWindow-generation)))
	}
	return rows, since
}

// rows are what is known of the keys that are kept for an order.
func (r *TopKeys) rows(by weirv1.KeyOrder, wanted func(scope string) bool) (rows []*peerv1.KeyActivity) {
	var keys iter.Seq[id]
	switch by {
	case weirv1.KeyOrder_KEY_ORDER_FULLEST:
		keys = maps.Keys(r.states)
	case weirv1.KeyOrder_KEY_ORDER_REFUSED:
		keys = r.refused.keys()
	default:
		keys = r.all.keys()
	}
	for k := range keys {
		if wanted == nil || wanted(k.scope) {
			rows = append(rows, r.row(k))
		}
	}
	return rows
}

// row is what is known of a key. Its counts are estimates of the numbers since the window's beginning; the true ones are at most the error
// away, but for the error of sampling. Its limit is the one that left least room when the key was last seen, 0 when that is not known.
func (r *TopKeys) row(k id) *peerv1.KeyActivity {
	row := &peerv1.KeyActivity{Scope: k.scope, Key: k.key}
	row.Decisions, row.DecisionsError = estimate(&r.all, k)
	row.Refused, row.RefusedError = estimate(&r.refused, k)
	row.Decisions = max(row.Decisions, row.Refused)
	if st := r.states[k]; st != nil {
		row.Algorithm, row.WindowNs, row.Limit, row.Used = weirv1.Algorithm(st.algorithm), int64(st.window), st.limit, st.used
	}
	return row
}

func estimate(w *window, k id) (n, within int64) {
	low, high := w.count(k)
	if low == 0 {
		return 0, high // it is not kept, and may never have been there
	}
	return high, high - low
}

// SortRows puts rows in order, the first first. Keys that are equal in what they are ranked by are ranked by the rest.
func SortRows(rows []*peerv1.KeyActivity, by weirv1.KeyOrder) {
	slices.SortFunc(rows, func(a, b *peerv1.KeyActivity) int {
		busier, refused := cmp.Compare(b.Decisions, a.Decisions), cmp.Compare(b.Refused, a.Refused)
		fuller := cmp.Compare(fullness(b.Used, b.Limit), fullness(a.Used, a.Limit))
		named := cmp.Or(cmp.Compare(a.Scope, b.Scope), cmp.Compare(a.Key, b.Key))
		switch by {
		case weirv1.KeyOrder_KEY_ORDER_REFUSED:
			return cmp.Or(refused, busier, fuller, named)
		case weirv1.KeyOrder_KEY_ORDER_FULLEST:
			return cmp.Or(fuller, busier, refused, named)
		}
		return cmp.Or(busier, refused, fuller, named)
	})
}

// MergeRows adds up what several nodes know of their keys. Of a key that several have seen, the limit is of the one that has counted
// most decisions with a limit. The rows are the result's from then on.
func MergeRows(lists ...[]*peerv1.KeyActivity) []*peerv1.KeyActivity {
	at := make(map[id]int)
	seen := make(map[id]int64)
	var out []*peerv1.KeyActivity
	for _, list := range lists {
		for _, row := range list {
			k := id{row.Scope, row.Key}
			i, ok := at[k]
			if !ok {
				at[k] = len(out)
				out = append(out, row)
				if row.Limit > 0 {
					seen[k] = row.Decisions
				}
				continue
			}
			r := out[i]
			r.Decisions, r.DecisionsError = r.Decisions+row.Decisions, r.DecisionsError+row.DecisionsError
			r.Refused, r.RefusedError = r.Refused+row.Refused, r.RefusedError+row.RefusedError
			if row.Limit > 0 && (r.Limit == 0 || row.Decisions > seen[k]) {
				seen[k] = row.Decisions
				r.Algorithm, r.WindowNs, r.Limit, r.Used = row.Algorithm, row.WindowNs, row.Limit, row.Used
			}
		}
	}
	return out
}
