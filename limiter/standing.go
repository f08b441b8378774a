package limiter

import (
	"context"
	"time"
	"unicode/utf8"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/store"
)

// Standing is what a policy's name, or a limit sent along, stands for under one set of policies, worked out for who asks one
// question at a time and needs little of the answer: see CheckAt. It is immutable.
type Standing struct {
	table  *table      // nil: any
	entry  *entry      // of a policy, or
	inline *inlineRule // of a limit sent along
	hash   *ring.Scope
	stats  *policyStats
}

// Brief is what CheckAt answers: what there is to say of a policy with a single limit that was asked for units, and no more.
type Brief struct {
	algo.Decision // but for Lease and Tightest
	Window        time.Duration
	Shadow        bool
}

// Standing returns what a target stands for, whatever its key. It is nil where CheckAt is not for it: what is no policy and
// no limit of this node, what takes other nodes to decide, and calls that may be traced. last is the one that it stood for
// before, or nil; it is returned again while it holds.
func (l *Limiter) Standing(t *Target, last *Standing) *Standing {
	if !l.alone || l.cfg.Tracer != nil {
		return nil
	}
	now := l.table.Load()
	if last.holds(now) {
		return last
	}
	s := subject{}
	probe := Target{Policy: t.Policy, Limit: t.Limit, Namespace: t.Namespace, Key: "k"}
	if l.identify(now, &probe, &s) != nil {
		return nil
	}
	at := &Standing{entry: s.entry, inline: s.inline}
	switch {
	case s.inline != nil && !s.inline.unlimited && t.Limit.Algorithm != algo.Concurrency:
		at.hash, at.stats = s.inline.hash, l.stats.inline
	case s.entry != nil && !s.entry.Concurrency && !s.entry.Strict && s.entry.Durability <= policy.None:
		at.table, at.hash, at.stats = now, s.entry.hash, s.entry.stats
	default:
		return nil
	}
	return at
}

// holds tells whether s is still what its target stands for under t.
func (s *Standing) holds(t *table) bool { return s != nil && (s.table == nil || s.table == t) }

// CheckAt asks for cost units of a key, as CheckTo does, and answers in *b, whatever that held. It reports false, and has done
// nothing, where there is more to it: s is nil or no longer what its target stands for, the call is not acceptable or comes too
// late, or the store has to be asked in another way. CheckTo says which, and answers.
func (l *Limiter) CheckAt(ctx context.Context, s *Standing, key string, cost int64, b *Brief) bool {
	if !s.holds(l.table.Load()) || cost < 0 || cost > algo.MaxLimit || over(ctx) != nil {
		return false
	}
	var rule *store.Rule
	shadowed := false
	if e := s.entry; e != nil {
		rule, shadowed = e.rule(e.Rule(key)), e.Shadow
	} else {
		rule = &s.inline.Rule
	}
	if rule == nil || len(rule.Limits) != 1 {
		return false
	}
	now := l.clock() // before what has to be fetched from memory: reading it waits for that
	k := store.Key{Hash: s.hash.Hash(key), Key: key}
	k.Partition = ring.Partition(k.Hash)
	request := algo.Request{Cost: cost}
	// A key that the store knows has been validated.
	if !l.store.DecideKnown(&k, rule, now, &request, &b.Decision) && !l.decideNew(&k, rule, now, &request, &b.Decision) {
		return false
	}
	limit := &rule.Limits[0]
	b.Window, b.Shadow = quotaWindow(limit), false
	b.ResetAfter = resetAfter(limit, b.ResetAfter)
	s.stats.saw(b.Limit, b.Remaining)
	if !b.Allowed && shadowed {
		b.Allowed, b.Shadow, b.Granted, b.RetryAfter = true, true, cost, 0
	}
	if cost > 0 {
		s.stats.mine().tally(b.Allowed, b.Shadow)
	}
	return true
}

// decideNew is the rest of CheckAt for a key that the store does not know, or knows under another rule.
func (l *Limiter) decideNew(k *store.Key, rule *store.Rule, now algo.Instant, request *algo.Request, d *algo.Decision) bool {
	if k.Key == "" || len(k.Key) > MaxKey || !utf8.ValidString(k.Key) {
		return false
	}
	call := store.Call{Request: *request}
	var got store.Answer
	if l.store.DecideTo(k, rule, now, &call, nil, &got) != nil {
		return false
	}
	*d = got.Decision
	return true
}
