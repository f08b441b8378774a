package limiter

import (
	"context"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/store"
)

// prepared is a prepared handle: see limit.Prepared. It is immutable.
type prepared struct {
	limiter *Limiter
	table   *table      // nil: any
	entry   *entry      // where different keys have different rules; otherwise nil
	rule    *store.Rule // of all keys, and its quotaWindow
	window  time.Duration
	hash    ring.Scope
	stats   *policyStats
	shadow  bool
	warnAt  int64 // of the policy
	none    bool  // Check never answers
}

// Prepare returns the handle to a target: see limit.Preparer. It is nil for what is no policy and no limit of this node, for
// what takes other nodes to decide, and for calls that may be traced.
func (l *Limiter) Prepare(t *limit.Target, last limit.Prepared) limit.Prepared {
	before, _ := last.(*prepared)
	if p := l.prepareTarget(t, before); p != nil {
		return p
	}
	return nil
}

func (l *Limiter) prepareTarget(t *limit.Target, last *prepared) *prepared {
	if !l.alone || l.cfg.Tracer != nil {
		return nil
	}
	now := l.table.Load()
	if last != nil && last.table == now {
		return last
	}
	s := subject{}
	probe := limit.Target{Policy: t.Policy, Limit: t.Limit, Namespace: t.Namespace, Key: "k"}
	if l.identify(now, &probe, &s) != nil {
		return nil
	}
	var at *prepared
	switch {
	case s.inline != nil && last != nil && last.rule == &s.inline.Rule:
		return last
	case s.inline != nil && !s.inline.unlimited && t.Limit.Algorithm != algo.Concurrency:
		at = &prepared{limiter: l, rule: &s.inline.Rule, hash: s.inline.hash, stats: l.stats.inline}
	case s.entry != nil && !s.entry.Concurrency && s.entry.candidate == nil:
		e := s.entry
		at = &prepared{limiter: l, table: now, entry: e, rule: e.owns, hash: e.hash, stats: e.stats, shadow: e.Shadow, warnAt: e.WarnAt}
		if len(e.Rules()) == 1 {
			at.entry = nil
		}
	default:
		return &prepared{limiter: l, table: now, none: true}
	}
	if at.entry == nil {
		if !brief(at.rule) {
			return &prepared{limiter: l, table: now, none: true}
		}
		at.window = quotaWindow(&at.rule.Limits[0])
	}
	return at
}

// brief says whether what is decided by a rule can be told by a limit.Brief; the rule is nil for keys without a state.
func brief(rule *store.Rule) bool { return rule != nil && len(rule.Limits) == 1 && !rule.Guarded() }

// Check implements limit.Prepared.
func (s *prepared) Check(ctx context.Context, key string, cost int64) (b limit.Brief, ok bool) {
	l := s.limiter
	if s.table != nil && s.table != l.table.Load() || s.none || cost < 0 || cost > algo.MaxLimit || over(ctx) != nil {
		return b, false
	}
	rule, window := s.rule, s.window
	if s.entry != nil {
		if rule = s.entry.rule(s.entry.Rule(key)); !brief(rule) {
			return b, false
		}
		window = quotaWindow(&rule.Limits[0])
	}
	now := l.clock() // before what has to be fetched from memory: reading it waits for that
	k := store.Key{Hash: s.hash.Hash(key), Key: key}
	k.Partition = l.partition(k.Hash)
	request := algo.Request{Cost: cost}
	// A key that the store knows is a valid one.
	if !l.store.DecideKnown(&k, rule, now, &request, &b.Decision) {
		return b, false
	}
	b.Window, b.Shadow, b.NearLimit = window, false, nearLimit(s.warnAt, b.Limit, b.Remaining)
	b.ResetAfter = resetAfter(&rule.Limits[0], b.ResetAfter)
	if !b.Allowed && s.shadow {
		b.Allowed, b.Shadow, b.Granted, b.RetryAfter = true, true, cost, 0
	}
	return b, true
}

// Count implements limit.Prepared. It is apart from Check so that the caller can write the answer down first: the addition
// waits until that is in the cache, from where it is read sooner than out of the processor's queue of writes (measured: 5 ns
// of 115).
func (s *prepared) Count(b limit.Brief, cost int64) {
	s.stats.saw(b.Limit, b.Remaining)
	if cost > 0 {
		s.stats.mine().tally(b.Allowed, b.Shadow, b.NearLimit)
	}
}
