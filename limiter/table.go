package limiter

import (
	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/store"
)

// This file works a set of policies out for deciding: a table of entries, one for each policy, and of rules, one for
// each of its overrides. A table is immutable and replaced as a whole. Limits sent along have rules, too (inline.go),
// so that nothing else tells them apart.

// table is a set of policies worked out for deciding.
type table struct {
	set        *policy.Set
	by         map[string]*entry      // by name
	candidates map[string]*store.Rule // by scope
	unknown    *rule                  // of policies that are not in the set
}

// entry is one policy.
type entry struct {
	*policy.Policy
	rules map[*policy.Rule]*rule
	own   *policy.Rule // of keys without an override, and what rules has for it
	owns  *rule
	hash  ring.Scope
}

// rule is all that a check is decided by. Nothing in it changes, but for what stats points to.
type rule struct {
	// Rule is what the store decides by. Its Limits are nil where no state is needed: all of the rule's checks are
	// answered by units.
	store.Rule
	units     int64 // algo.Unlimited, or 0 for a blocked key
	missing   bool  // of a policy that this node does not know
	entry     *entry
	namespace string // of a limit sent along
	hash      ring.Scope
	stats     *policyStats
	// candidate is what checks are decided by as well, to be counted only; nil: nothing.
	candidate   *store.Rule
	warnAt      int64 // see policy.Policy
	shadow      bool
	concurrency bool
	lendable    bool // units of its keys may be on loan as far as the policy goes
	closed      bool // on_error: closed
	share       bool // on_error: share
}

// rule returns the rule of a policy's key.
func (e *entry) rule(key string) *rule {
	r := e.Rule(key)
	if r == e.own {
		return e.owns
	}
	return e.rules[r]
}

// rule returns the rule of a policy's key.
func (t *table) rule(policy, key string) *rule {
	if e := t.by[policy]; e != nil {
		return e.rule(key)
	}
	return t.unknown
}

// durabilities are the policies' as the store spells them.
var durabilities = [...]store.Durability{
	policy.Async: store.Async, policy.None: store.None, policy.Escrow: store.Escrow, policy.Sync: store.Sync,
}

func (l *Limiter) compile(set *policy.Set) *table {
	t := &table{set: set, by: make(map[string]*entry), candidates: make(map[string]*store.Rule)}
	t.unknown = &rule{missing: true, stats: l.stats.unknown, closed: l.cfg.UnknownPolicy == UnknownDeny}
	if l.cfg.UnknownPolicy == UnknownAllow {
		t.unknown.units = algo.Unlimited
	}
	for _, p := range set.Policies() {
		t.by[p.Name] = l.compilePolicy(t, p)
	}
	shares := len(t.by)
	if !l.cfg.NoInline {
		shares++
	}
	l.store.SetShares(shares)
	return t
}

func (l *Limiter) compilePolicy(t *table, p *policy.Policy) *entry {
	e := &entry{Policy: p, rules: make(map[*policy.Rule]*rule), hash: l.cfg.HashKey.Scope(p.Name)}
	stats := l.stats.of(p.Name)
	for _, of := range p.Rules() {
		r := &rule{
			Rule: store.Rule{
				Scope: p.Name, Limits: of.Limits, Durability: durabilities[p.Durability], Strict: p.Strict,
				Persist:    p.Persist && l.cfg.Disk,
				ColdClosed: p.ColdStart == policy.ColdClosed, MaxKeys: p.MaxKeys, MaxBytes: p.MaxMemory, Ban: p.Ban,
				ReleaseExpired: p.ReleaseExpired,
			},
			entry: e, hash: e.hash, stats: stats, warnAt: p.WarnAt, shadow: p.Shadow, concurrency: p.Concurrency,
			// A check in shadow mode is never refused, and a candidate is asked each time.
			lendable: !p.NoLend && !p.Shadow && p.Candidate == nil, closed: p.OnError == policy.Closed,
			share: p.OnError == policy.Share,
		}
		if of.Unlimited {
			r.Limits, r.units = nil, algo.Unlimited
		} else if of.Blocked {
			r.Limits = nil
		}
		e.rules[of] = r
	}
	e.own = p.Rules()[0]
	e.owns = e.rules[e.own]
	if p.Candidate == nil {
		return e
	}
	candidate := &store.Rule{Scope: limit.CandidateScope(p.Name), Limits: p.Candidate, MaxKeys: p.MaxKeys,
		MaxBytes: p.MaxMemory, Ban: p.Ban}
	if p.Durability == policy.None {
		candidate.Durability = store.None
	}
	e.owns.candidate = candidate
	t.candidates[candidate.Scope] = candidate
	return e
}

// stateOf returns the rule that applies to the state of a scope and key, or nil where no policy's limits do.
func (t *table) stateOf(scope string, key []byte) *store.Rule {
	e, ok := t.by[scope]
	if !ok {
		return t.candidates[scope]
	}
	if r := e.rule(string(key)); r.Limits != nil {
		return &r.Rule
	}
	return nil
}

// boot is the boot clock's time for a rule that is strict, and 0 for others, which are decided without it: it is a
// system call.
func (r *rule) boot(now *moment) int64 {
	if !r.Strict {
		return 0
	}
	return now.bootTime()
}
