package limiter

import (
	"errors"
	"fmt"
	"sync"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/store"
)

// inlineRule is a limit that came along with a request, validated and with its scope worked out.
type inlineRule struct {
	store.Rule
	hash      ring.Scope
	unlimited bool
}

// maxInlineRules bounds how many different inline limits are kept worked out. Beyond it all are forgotten at once: they
// are a cache, and a caller who sends ever new ones only slows itself.
const maxInlineRules = 4096

// inlineRules works out each inline limit once. Its zero value is ready for use under the zero HashKey.
type inlineRules struct {
	mu sync.RWMutex
	by map[inlineKey]*inlineRule

	hashKey ring.HashKey
}

type inlineKey struct {
	namespace string
	zone      string // in place of the Limit's, which is a new pointer whenever one is loaded
	limit     algo.Limit
}

// rule returns the rule of a limit. MaxLog is the operator's to set, in a policy, and not the caller's: it is taken for
// absent here as it is on the wire.
func (r *inlineRules) rule(namespace string, sent *algo.Limit) (*inlineRule, *limit.Error) {
	own := *sent
	own.MaxLog = 0
	k := inlineKey{namespace: namespace, limit: own}
	if k.limit.Zone != nil {
		k.zone = k.limit.Zone.String()
		k.limit.Zone = nil
	}
	r.mu.RLock()
	rule := r.by[k]
	r.mu.RUnlock()
	if rule != nil {
		return rule, nil
	}
	if err := own.Validate(); err != nil {
		var field *algo.FieldError
		if errors.As(err, &field) {
			return nil, limit.NewError(limit.Invalid, "limit."+field.Field, field.Message)
		}
		return nil, limit.NewError(limit.Invalid, "limit", err.Error())
	}
	scope := InlineScope(namespace, &own)
	rule = &inlineRule{
		Rule:      store.Rule{Scope: scope, Limits: algo.Limits{own}},
		hash:      r.hashKey.Scope(scope),
		unlimited: own.Limit == algo.Unlimited,
	}
	r.mu.Lock()
	if r.by == nil || len(r.by) >= maxInlineRules {
		r.by = make(map[inlineKey]*inlineRule)
	}
	r.by[k] = rule
	r.mu.Unlock()
	return rule, nil
}

// InlineScope is the scope that ring.Hash is given for the keys of a limit sent along, where it is the name for those of a
// policy. Limit and capacity have no part in it, so that changing them applies to live state. It holds a slash, which no
// policy's name does, so it never meets one of those.
func InlineScope(namespace string, l *algo.Limit) string {
	if namespace == "" {
		namespace = "default"
	}
	slots := l.Slots
	if l.Algorithm == algo.SlidingWindow && slots == 0 {
		slots = algo.DefaultSlots
	}
	zone := ""
	if l.Zone != nil && l.Zone.String() != "UTC" {
		zone = l.Zone.String()
	}
	// The namespace, the only free text, comes last.
	return fmt.Sprintf("inline/%d/%d/%d/%d/%s//%s", l.Algorithm, l.Window, slots, l.Period, zone, namespace)
}
