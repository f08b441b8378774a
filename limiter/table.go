package limiter

import (
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/store"
)

// table is a set of policies worked out for deciding. It is immutable and replaced as a whole.
type table struct {
	set        *policy.Set
	by         map[string]*entry
	candidates map[string]*store.Rule // by scope
}

// entry is one policy.
type entry struct {
	*policy.Policy
	rules map[*policy.Rule]*store.Rule
	own   *policy.Rule // of keys without an override, and what rules has for it
	owns  *store.Rule
	hash  ring.Scope
	stats *policyStats
	// candidate is what checks by owns are decided by as well, to be counted only; nil: nothing.
	candidate *store.Rule
}

// rule returns what a policy's rule is to the store; nil for one that needs no state.
func (e *entry) rule(r *policy.Rule) *store.Rule {
	if r == e.own {
		return e.owns
	}
	return e.rules[r]
}

// durabilities are the policies' as the store spells them.
var durabilities = [...]store.Durability{
	policy.Async: store.Async, policy.None: store.None, policy.Escrow: store.Escrow, policy.Sync: store.Sync,
}

func (l *Limiter) compile(set *policy.Set) *table {
	t := &table{set: set, by: make(map[string]*entry), candidates: make(map[string]*store.Rule)}
	for _, p := range set.Policies() {
		e := &entry{
			Policy: p, rules: make(map[*policy.Rule]*store.Rule), hash: l.cfg.HashKey.Scope(p.Name), stats: l.stats.of(p.Name),
		}
		for _, r := range p.Rules() {
			if len(r.Limits) > 0 {
				e.rules[r] = &store.Rule{
					Scope: p.Name, Limits: r.Limits, Durability: durabilities[p.Durability], Strict: p.Strict,
					ColdClosed: p.ColdStart == policy.ColdClosed, MaxKeys: p.MaxKeys, MaxBytes: p.MaxMemory,
					Ban: p.Ban, ReleaseExpired: p.ReleaseExpired,
				}
			}
		}
		e.own = p.Rules()[0]
		e.owns = e.rules[e.own]
		if p.Candidate != nil {
			e.candidate = &store.Rule{
				Scope: limit.CandidateScope(p.Name), Limits: p.Candidate, MaxKeys: p.MaxKeys, MaxBytes: p.MaxMemory,
				Ban: p.Ban,
			}
			if p.Durability == policy.None {
				e.candidate.Durability = store.None
			}
			t.candidates[e.candidate.Scope] = e.candidate
		}
		t.by[p.Name] = e
	}
	shares := len(t.by)
	if !l.cfg.NoInline {
		shares++
	}
	l.store.SetShares(shares)
	return t
}

// entryOf returns the policy that an operation names, or nil where there is none: an inline limit, an unknown policy.
func (t *table) entryOf(op *Op) *entry {
	if op.inline != nil {
		return nil
	}
	return t.by[op.Policy]
}

// ruleOf returns the rule that applies to the state of a scope and key, or nil where no policy's limits do.
func (t *table) ruleOf(scope string, key []byte) *store.Rule {
	e, ok := t.by[scope]
	if !ok {
		return t.candidates[scope]
	}
	return e.rule(e.Rule(string(key)))
}
