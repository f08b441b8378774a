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

// TopWindow is how long a decision is counted, or up to generation less.
const (
	TopWindow   = generations * generation
	generations = 6
	generation  = 10 * time.Second
)

// counters is the size of each sketch: it finds a key that has 0.7 % of a generation's decisions (or refusals).
const counters = 512

// The states of maxStates keys are kept. When there are more, the keepFullest fullest stay; the next decision on a busy
// key brings it back.
const maxStates, keepFullest = 1024, 640

// fullness returns the used share of a limit: 0 to 1, or more if the limit was lowered.
func fullness(used, limit int64) float64 {
	if limit <= 0 {
		return 0
	}
	return float64(used) / float64(limit)
}

type id struct{ scope, key string }

func (k id) clone() id { return id{strings.Clone(k.scope), strings.Clone(k.key)} }

// state is the state of a key in its last sample.
type state struct {
	algorithm   algo.Algorithm
	window      time.Duration
	limit, used int64
	turn        int // TopKeys.turns at the last sample
}

// TopKeys counts decisions by key. It is safe for concurrent use.
//
// It gets a sample of a limiter's decisions, and forgets them after about a minute. Its counts are estimates, for two
// reasons. Heavy hitters are counted within bounds (see window), which a row has. And if a node decides more than
// 10,000 checks a second, each recorded decision stands for w decisions, which adds an error of about √(n·w) to a count
// of n.
//
// It may miss a key with less than 1 % of a node's decisions if there are thousands of keys, and a full key that is
// hardly asked about on a busy node. It does not count refusals by clients from memory. Admissions from loans are
// counted when borrowers report them.
type TopKeys struct {
	mu      sync.Mutex
	all     window
	refused window
	states  map[id]*state
	started bool
	first   int64 // when the first generation began, by Tick's clock
	began   int64 // when the present generation began
	turns   int   // how many generations have ended
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

// dropStates drops all states but the keepFullest fullest.
func (r *TopKeys) dropStates() {
	full := func(k id) float64 { return fullness(r.states[k].used, r.states[k].limit) }
	all := slices.SortedFunc(maps.Keys(r.states), func(a, b id) int { return cmp.Compare(full(b), full(a)) })
	for _, k := range all[keepFullest:] {
		delete(r.states, k)
	}
}

// Tick implements limiter.Recorder. It forgets old decisions.
func (r *TopKeys) Tick(mono int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.started {
		r.started, r.first, r.began = true, mono, mono
	}
	if mono-r.began >= int64(2*TopWindow) {
		r.began = mono - int64(TopWindow) // the process stood still: a few turns forget all before
	}
	for ; mono-r.began >= int64(generation); r.began += int64(generation) {
		r.turns++
		r.all.turn()
		r.refused.turn()
		maps.DeleteFunc(r.states, func(_ id, st *state) bool { return r.turns-st.turn >= generations })
	}
}

// Top returns the first n keys by each of the orders, each key once, in no order, for how long their decisions have
// been counted. It leaves out keys for whose scope wanted returns false (nil: none). now is an instant of Tick's clock.
func (r *TopKeys) Top(now int64, n int, wanted func(scope string) bool,
	orders ...weirv1.KeyOrder) (rows []*peerv1.KeyActivity, since time.Duration) {
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

// rows returns the rows of the keys that are candidates for an order.
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

// row returns the row of a key. Its counts are estimates for the time of the window, and the true ones differ by at
// most the error, apart from the error of sampling. Its limit is the one with the least room in the key's last sample;
// 0: not known.
func (r *TopKeys) row(k id) *peerv1.KeyActivity {
	row := &peerv1.KeyActivity{Scope: k.scope, Key: k.key}
	row.Decisions, row.DecisionsError = estimate(&r.all, k)
	row.Refused, row.RefusedError = estimate(&r.refused, k)
	row.Decisions = max(row.Decisions, row.Refused)
	if st := r.states[k]; st != nil {
		row.Algorithm, row.WindowNs, row.Limit, row.Used = weirv1.Algorithm(st.algorithm), int64(st.window), st.limit,
			st.used
	}
	return row
}

func estimate(w *window, k id) (n, within int64) {
	low, high := w.count(k)
	if low == 0 {
		return 0, high // the window does not have the key, which may never have been counted
	}
	return high, high - low
}

// SortRows sorts rows by an order. The other orders decide between equal rows.
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

// MergeRows sums the rows of several nodes. If several nodes have seen a key, its limit is that of the node with the
// most decisions of it. The rows belong to the result then.
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
