package limiter

import (
	"sync"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/store"
)

// DefaultInlineMaxWindow is the longest window of inline limits on a node that is not told another one. It has room for
// a year, because callers of other limiters send daily, monthly and yearly quotas. What their keys take is bounded by
// the callers' shares of memory.
const DefaultInlineMaxWindow = algo.MaxWindow

// maxInlineRules bounds how many different inline limits are kept worked out. Beyond it all are forgotten at once: they
// are a cache, and a caller that sends ever new ones slows only its own checks.
const maxInlineRules = 4096

// inlineRules works out each inline limit once. Its zero value is ready for use under the zero HashKey.
type inlineRules struct {
	mu sync.RWMutex
	by map[inlineKey]*rule

	hashKey ring.HashKey
	stats   *policyStats
	longest time.Duration // of windows; 0: no bound
	// Of all keys of a namespace; 0: no bound.
	maxKeys, maxBytes int64
}

type inlineKey struct {
	namespace string
	zone      string // in place of the Limit's, which is a new pointer whenever one is loaded
	limit     algo.Limit
}

// rule returns the rule of a limit. MaxLog is the operator's to set, in a policy, and not the caller's: it is taken for
// absent here as it is on the wire.
func (r *inlineRules) rule(namespace string, sent *algo.Limit) (*rule, *limit.Error) {
	own := *sent
	own.MaxLog = 0
	k := inlineKey{namespace: namespace, limit: own}
	if k.limit.Zone != nil {
		k.zone = k.limit.Zone.String()
		k.limit.Zone = nil
	}
	r.mu.RLock()
	known := r.by[k]
	r.mu.RUnlock()
	if known != nil {
		return known, nil
	}
	if err := limit.ValidLimit(&own); err != nil {
		return nil, err
	}
	scope := limit.InlineScope(namespace, &own)
	fresh := &rule{
		Rule:      store.Rule{Scope: scope, Limits: algo.Limits{own}, MaxKeys: r.maxKeys, MaxBytes: r.maxBytes},
		namespace: namespace, hash: r.hashKey.Scope(scope), stats: r.stats,
		concurrency: own.Algorithm == algo.Concurrency, lendable: true,
	}
	// What the operator has configured is bounded like a policy: not by what is for callers' limits.
	if limit.Reserved(namespace) {
		fresh.MaxKeys, fresh.MaxBytes = 0, 0
	} else if err := r.tooLong(&own); err != nil {
		return nil, err
	}
	if own.Limit == algo.Unlimited {
		fresh.Limits, fresh.units = nil, algo.Unlimited
	}
	r.mu.Lock()
	if r.by == nil || len(r.by) >= maxInlineRules {
		r.by = make(map[inlineKey]*rule)
	}
	r.by[k] = fresh
	r.mu.Unlock()
	return fresh, nil
}

// tooLong says that a limit keeps its state for longer than an inline limit may.
func (r *inlineRules) tooLong(l *algo.Limit) *limit.Error {
	window := l.Window
	if l.Period != 0 && l.Period != algo.Epoch {
		window = periods[l.Period]
	}
	switch {
	case r.longest <= 0 || l.Limit == algo.Unlimited:
		return nil
	case window > r.longest:
		return invalid(limit.WindowField(l),
			"is longer than the longest that this node takes of an inline limit, "+r.longest.String()+" (inline-max-window)")
	case l.Capacity > l.Limit && (algo.Limits{*l}).Horizon() > r.longest:
		return invalid("limit.capacity",
			"takes longer to come back than the longest window that this node takes of an inline limit, "+r.longest.String()+" (inline-max-window)")
	}
	return nil
}

// periods are the lengths of the calendar's periods, but for changes of the clock.
var periods = [...]time.Duration{
	algo.Minute: time.Minute, algo.Hour: time.Hour, algo.Day: 24 * time.Hour, algo.Week: 7 * 24 * time.Hour,
	algo.Month: 31 * 24 * time.Hour, algo.Year: 366 * 24 * time.Hour,
}
