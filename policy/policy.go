// Package policy holds named limits: what a policy file says, checked, compiled and kept up to date while the file is
// edited.
//
// Parse turns a file into a Set and reports every mistake with its position. A Set never changes, so it is safe for
// concurrent use without locks; Watch replaces it as a whole when the file changes, and a file with a mistake in it
// changes nothing.
//
// What it does not promise: that the nodes of a cluster have read the same file (compare Set.Hash), that a change
// reaches two policies of different files at the same moment, or that an edit is seen faster than the poll interval on
// a file system that reports no events. It decides nothing: what a limit means is package algo's.
package policy

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/strictyaml"
)

// OnError says what a check is answered with when its owner cannot be reached or has no room for its state.
type OnError uint8

// The answers. Under Open, the zero value, the check is admitted; under Closed it is refused. Under Share the node that was asked
// admits it by a count of its own, up to its part of the limit: that divided by the number of nodes.
const (
	Open   OnError = 0
	Closed OnError = 1
	Share  OnError = 2
)

// String returns the name used in policies: "open", "closed" or "share".
func (e OnError) String() string {
	return nameOf("on_error", e, []string{Open: "open", Closed: "closed", Share: "share"})
}

// Durability says what may be forgotten when the node that counts a key is lost without notice. Planned moves forget
// nothing, whatever it is.
type Durability uint8

// The durabilities, from the cheapest to the dearest but for Async, which is the default and therefore zero.
const (
	Async  Durability = 0 // a second node has every change within 50 ms
	None   Durability = 1 // no second node has it: everything is forgotten
	Escrow Durability = 2 // nothing: a second node is told ahead of a part of the limit that may be used up
	Sync   Durability = 3 // nothing: an answer is given once a second node has what it admits
)

// String returns the name used in policies.
func (d Durability) String() string {
	return nameOf("durability", d, []string{Async: "async", None: "none", Escrow: "escrow", Sync: "sync"})
}

// ColdStart says how the keys begin that were counted before and of whose count no copy is left.
type ColdStart uint8

// The beginnings. Under ColdOpen, the zero value, the keys begin as new ones do; under ColdClosed as if their limits
// had just been used up.
const (
	ColdOpen   ColdStart = 0
	ColdClosed ColdStart = 1
)

// String returns the name used in policies, "open" or "closed".
func (c ColdStart) String() string {
	return nameOf("cold_start", c, []string{ColdOpen: "open", ColdClosed: "closed"})
}

// nameOf returns the name of a value of an enumeration, or its number where it has none.
func nameOf[E ~uint8](what string, e E, names []string) string {
	if int(e) >= len(names) {
		return fmt.Sprintf("%s(%d)", what, uint8(e))
	}
	return names[e]
}

// WarnAtWhole is a WarnAt of all of the limit.
const WarnAtWhole = 1_000_000

// Policy is a named limit, or several that are decided together. It does not change once it is in a Set.
type Policy struct {
	Name    string
	Limits  algo.Limits // the policy's own, for keys without an override; nil when that is unlimited
	OnError OnError
	Shadow  bool // decide, count and report, but admit
	NoLend  bool // no units are lent to who asks often: each decision is the owner's
	// Ban is how long a key is refused once it has been refused for want of room; 0: no longer than its limits say.
	Ban time.Duration
	// WarnAt is the share of a limit that is in use, in millionths (WarnAtWhole is all of it), from which on decisions say that they
	// are near the limit; 0: none does.
	WarnAt int64
	// Candidate are other limits that checks of keys without an override are decided by beside Limits, each under a state of its own:
	// what they say is only counted. Nil: none.
	Candidate algo.Limits
	// Durability and ColdStart are about the loss of nodes, Strict about that of connections between them: it says that
	// no two sides of a split may both admit. A Strict policy's Durability is Escrow or Sync and its OnError is Closed.
	Durability Durability
	ColdStart  ColdStart
	Strict     bool
	// Persist says that the counters are kept on the disks of the nodes, so that they outlive a stop of all nodes.
	Persist bool
	// MaxKeys and MaxMemory bound what the keys of the policy take on each node, copies included: keys, and bytes for their
	// states. 0: no bound of their own.
	MaxKeys, MaxMemory int64
	// Prices are the units that a token of each class costs; nil when callers say costs in units only.
	Prices Prices
	// Estimate is how many units are reserved for work of which the caller does not say what it may cost; 0: nothing is said about
	// it. With EstimateAuto it is so until enough is known of what work has cost.
	Estimate     int64
	EstimateAuto bool
	// ReleaseExpired (on_expiry: release) says that a reservation whose ttl ends without a commit or cancel gives back its units, as a
	// cancel does. Otherwise they stay charged.
	ReleaseExpired bool
	// Concurrency says that the limits count leases, so that the policy is asked by acquire and not by check. It holds
	// for every key, also for those whose Rule is Unlimited or Blocked.
	Concurrency bool
	Line        int // of the policy's first field in its file, counted from 1

	strict    *Error // where a Strict policy says so, as NeedVoters reports it
	persist   *Error // where a Persist policy says so, as NeedDirectory reports it
	own       Rule
	fields    strictyaml.Fields // of its limits, from which overrides take what they do not say
	file      *Policy           // of WithOverrides: the policy as its file has it
	overrides []Rule            // in the order of the file, then those set by operators; exact and prefixes point into it
	exact     map[string]*Rule  // by key
	prefixes  map[string]*Rule  // by prefix
	lengths   []int             // of prefixes, each once, the longest first
}

// Rule is what applies to one key of a policy.
type Rule struct {
	Limits    algo.Limits // nil when Unlimited or Blocked
	Unlimited bool        // every check passes and no state is kept
	Blocked   bool        // no check ever passes
	// Key or Prefix is what an override is for: one exact key, or the keys that begin with Prefix. Both are empty in
	// the policy's own rule, which is for all the other keys.
	Key    string
	Prefix string
	// API says that the override was set by an operator while the node runs, see Override, and is in no file.
	API      bool
	settings string // of such an Override
}

// Rule returns what applies to key: the override for exactly this key, otherwise the one with the longest prefix,
// otherwise the policy's own. It does not allocate, and the Rule stays the same for the life of the Policy.
func (p *Policy) Rule(key string) *Rule {
	if len(p.overrides) == 0 {
		return &p.own
	}
	if r, ok := p.exact[key]; ok {
		return r
	}
	for _, n := range p.lengths { // a few, as prefixes are made by one scheme
		if n <= len(key) {
			if r, ok := p.prefixes[key[:n]]; ok {
				return r
			}
		}
	}
	return &p.own
}

// Divisible reports why no part of the policy's limits is assigned to data planes, which count requests, whatever these limits are; nil when it may
// be, as far as each Rule's Limits are Quotable.
func (p *Policy) Divisible() error {
	switch {
	case p.NoLend:
		return errors.New("nothing of it is lent (lend: false)")
	case p.Prices != nil:
		return errors.New("it has prices: data planes count requests")
	case p.Strict:
		return errors.New("it is strict: what data planes have would outlive the grant that its owner decides under (consistency: available)")
	}
	return nil
}

// Rules lists the policy's own rule, then its overrides in the order of the file, then those of WithOverrides.
func (p *Policy) Rules() []*Rule {
	rules := make([]*Rule, 0, 1+len(p.overrides))
	rules = append(rules, &p.own)
	for i := range p.overrides {
		rules = append(rules, &p.overrides[i])
	}
	return rules
}

// index prepares the look-up of overrides, whose keys and prefixes are known to be different from each other.
func (p *Policy) index() {
	p.exact, p.prefixes, p.lengths = make(map[string]*Rule), make(map[string]*Rule), nil
	for i := range p.overrides {
		if r := &p.overrides[i]; r.Prefix != "" {
			p.prefixes[r.Prefix] = r
			p.lengths = append(p.lengths, len(r.Prefix))
		} else {
			p.exact[r.Key] = r
		}
	}
	slices.SortFunc(p.lengths, func(a, b int) int { return b - a })
	p.lengths = slices.Compact(p.lengths)
}

// Set is the policies of one file, and with WithOverrides the overrides set beside it. It is immutable. A nil *Set and the zero Set hold no policies.
type Set struct {
	byName map[string]*Policy
	sorted []*Policy
	hash   string
}

// newSet takes policies whose names are different from each other.
func newSet(policies []*Policy) *Set {
	s := &Set{byName: make(map[string]*Policy, len(policies)), sorted: policies}
	for _, p := range policies {
		s.byName[p.Name] = p
	}
	slices.SortFunc(s.sorted, func(a, b *Policy) int { return cmp.Compare(a.Name, b.Name) })
	s.hash = hashOf(s.sorted)
	return s
}

// Get returns the policy with the given name.
func (s *Set) Get(name string) (*Policy, bool) {
	if s == nil {
		return nil, false
	}
	p, ok := s.byName[name]
	return p, ok
}

// Policies lists the policies by name. The slice is the caller's.
func (s *Set) Policies() []*Policy {
	if s == nil {
		return nil
	}
	return append([]*Policy(nil), s.sorted...)
}

// NeedVoters lists what is wrong with the set on a node that has no voters: every Strict policy, in the order of the
// file, with the position of the field that makes it so.
func (s *Set) NeedVoters() Errors { return s.needs(func(p *Policy) *Error { return p.strict }) }

// NeedDirectory lists what is wrong with the set on a node that has no data directory: every Persist policy, in the order of the file.
func (s *Set) NeedDirectory() Errors { return s.needs(func(p *Policy) *Error { return p.persist }) }

func (s *Set) needs(of func(*Policy) *Error) Errors {
	m := new(strictyaml.Mistakes)
	for _, p := range s.Policies() {
		if e := of(p); e != nil {
			m.File = e.File
			m.Add(e.Line, e.Column, e.Field, e.Message)
		}
	}
	return m.Sorted()
}

// Hash returns 32 hexadecimal digits that stand for what the policies mean, so that nodes can tell whether they decide
// by the same ones. It is the same in every process and for any order of policies and of overrides; comments, spacing,
// defaults written out and bounds of memory (max_log, max_keys, max_memory), which have no part in a decision, do not change it. The order of several limits in
// one policy is part of it, since decisions list them in that order.
func (s *Set) Hash() string {
	if s == nil || s.hash == "" {
		return hashOf(nil)
	}
	return s.hash
}

// meaning is what Hash digests of a policy: what Policy has in exported fields, but for bounds of memory and lines, and its rules.
type meaning struct {
	Policy
	Ban       int64
	Candidate []byte
	Rules     []ruleMeaning
}

type ruleMeaning struct {
	Key, Prefix        string
	Unlimited, Blocked bool
	Limits             []byte
}

// hashOf digests policies that are sorted by name. Fields that are zero are left out, so that a new one changes no hash of a policy without it.
func hashOf(sorted []*Policy) string {
	h := sha256.New()
	for _, p := range sorted {
		m := meaning{Policy: *p, Ban: int64(p.Ban), Candidate: limitsMeant(p.Candidate)}
		m.Policy.Limits, m.MaxKeys, m.MaxMemory, m.Line = nil, 0, 0, 0
		for _, r := range p.Rules() {
			m.Rules = append(m.Rules, ruleMeaning{r.Key, r.Prefix, r.Unlimited, r.Blocked, limitsMeant(r.Limits)})
		}
		slices.SortFunc(m.Rules, func(a, b ruleMeaning) int {
			return cmp.Or(cmp.Compare(a.Prefix, b.Prefix), cmp.Compare(a.Key, b.Key))
		})
		if err := json.MarshalWrite(h, &m, json.OmitZeroStructFields(true), json.Deterministic(true)); err != nil {
			panic(err) // no field is of a type that JSON lacks
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// limitsMeant are limits as bytes, with their defaults written out.
func limitsMeant(limits algo.Limits) []byte {
	if limits == nil {
		return nil
	}
	limits = slices.Clone(limits)
	for i := range limits {
		l := &limits[i]
		if l.Capacity == 0 && uses(l.Algorithm, "capacity") {
			l.Capacity = l.Limit
		}
		if l.Slots == 0 && uses(l.Algorithm, "slots") {
			l.Slots = algo.DefaultSlots
		}
		l.Anchor, l.MaxLog = max(l.Anchor, 1), 0
	}
	return algo.AppendLimits(nil, limits)
}
