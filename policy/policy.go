// Package policy has named limits: it parses policy files, and validates them.
//
// Parse turns a file into a Set (parse.go), and reports every mistake with its position. Policy.Rule finds the limits
// of a key. A Set never changes, and needs no locks: a node that follows a file replaces the Set as a whole.
//
// The package does not promise that the nodes of a cluster have read the same file (compare Set.Hash). It decides
// nothing: package algo says what a limit means.
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

// OnError says how a check is answered when its owner cannot be reached or has no room for its state.
type OnError uint8

// The answers. Open, the zero value, admits the check, and Closed refuses it. With Share the node that was asked admits
// it by a count of its own, up to the limit divided by the number of nodes.
const (
	Open   OnError = 0
	Closed OnError = 1
	Share  OnError = 2
)

// String returns the name used in policies: "open", "closed" or "share".
func (e OnError) String() string { return nameOf("on_error", e, onErrorWords) }

var onErrorWords = []string{Open: "open", Closed: "closed", Share: "share"}

// Durability says what may be forgotten when the node that counts a key is lost without notice. A planned move forgets
// nothing.
type Durability uint8

// The durabilities, from the cheapest to the most expensive, except for Async, the default, which must be 0.
const (
	Async  Durability = 0 // at most the changes of the last 50 ms: the backup has all others
	None   Durability = 1 // everything: there is no backup
	Escrow Durability = 2 // nothing: the backup counts a part of the limit as spent in advance
	Sync   Durability = 3 // nothing: an answer waits until the backup has what it admits
)

// String returns the name used in policies.
func (d Durability) String() string { return nameOf("durability", d, durabilityWords) }

var durabilityWords = []string{Async: "async", None: "none", Escrow: "escrow", Sync: "sync"}

// ColdStart says how a key begins again whose count is lost, with its copies.
type ColdStart uint8

// The values. With ColdOpen, the zero value, such a key begins as a new one; with ColdClosed as if its limits had just
// been used up.
const (
	ColdOpen   ColdStart = 0
	ColdClosed ColdStart = 1
)

// String returns the name used in policies, "open" or "closed".
func (c ColdStart) String() string { return nameOf("cold_start", c, coldStartWords) }

var coldStartWords = []string{ColdOpen: "open", ColdClosed: "closed"}

// nameOf returns the name of a value of an enumeration, or its number when it has none.
func nameOf[E ~uint8](what string, e E, names []string) string {
	if int(e) >= len(names) {
		return fmt.Sprintf("%s(%d)", what, uint8(e))
	}
	return names[e]
}

// WarnAtWhole is the WarnAt of a whole limit.
const WarnAtWhole = 1_000_000

// Policy is a named limit, or several that are decided together. It does not change after it is in a Set.
type Policy struct {
	Name    string
	Limits  algo.Limits // for keys without an override; nil when those are unlimited
	OnError OnError
	Shadow  bool // decide, count and report, but admit
	NoLend  bool // no units are lent to borrowers: the owner makes each decision
	// Ban is how long a key stays refused after a refusal for lack of room; 0: as long as its limits say.
	Ban time.Duration
	// WarnAt is the part of a limit in use, in millionths (WarnAtWhole is all of it), from which decisions are near the
	// limit; 0: none is.
	WarnAt int64
	// Candidate are limits that decide checks of keys without an override in addition to Limits, with states of their
	// own. Their decisions are only counted. Nil: none.
	Candidate algo.Limits
	// Durability and ColdStart apply to the loss of nodes, Strict to the loss of connections between nodes: with Strict
	// the two sides of a split never both admit. A Strict policy has Durability Escrow or Sync, and OnError Closed.
	Durability Durability
	ColdStart  ColdStart
	Strict     bool
	// Persist says that nodes keep the counters on disk, so that they outlive a stop of all nodes.
	Persist bool
	// MaxKeys and MaxMemory bound the keys of the policy on each node, copies included, and the bytes of their states.
	// 0: no bound of the policy's own.
	MaxKeys, MaxMemory int64
	// Prices are the units per token of each class; nil: the policy takes costs in units only.
	Prices Prices
	// Estimate is the number of units to reserve for work without a stated cost; 0: none. With EstimateAuto it applies
	// until enough commits are known to estimate from.
	Estimate     int64
	EstimateAuto bool
	// ReleaseExpired (on_expiry: release) says that a reservation whose TTL passes gives back its units. Otherwise they
	// stay charged.
	ReleaseExpired bool
	// Concurrency says that the limits count leases: the policy takes acquires and no checks. That holds for every key,
	// even one whose Rule is Unlimited or Blocked.
	Concurrency bool
	Line        int // of the policy's first field in its file, counted from 1

	strict  *Error // the position of consistency: strict, for NeedVoters; nil when not Strict
	persist *Error // the position of persist, for NeedDirectory; nil without Persist
	own     Rule
	fields  strictyaml.Fields // of its limits; overrides take missing parameters from here
	file    *Policy           // of a result of WithOverrides: the policy in the file
	// in the order of the file, then those of WithOverrides; exact and prefixes point into it
	overrides []Rule
	exact     map[string]*Rule // by key
	prefixes  map[string]*Rule // by prefix
	lengths   []int            // of the prefixes, the longest first, without repetitions
}

// Rule is the limits of a key.
type Rule struct {
	Limits    algo.Limits // nil when Unlimited or Blocked
	Unlimited bool        // every check is admitted, without a state
	Blocked   bool        // every check is refused
	// Key or Prefix is set in an override: one key, or the keys that begin with Prefix. Both are empty in the policy's
	// own rule, which is for all other keys.
	Key    string
	Prefix string
	// API says that the override is not in the file: an operator has set it, see Override.
	API      bool
	settings string // Settings of that Override
}

// Rule returns the rule for a key: the override for exactly this key, else the override with the longest prefix, else
// the policy's own. It does not allocate. The result is valid, and does not change, as long as the Policy.
func (p *Policy) Rule(key string) *Rule {
	if len(p.overrides) == 0 {
		return &p.own
	}
	if r, ok := p.exact[key]; ok {
		return r
	}
	for _, n := range p.lengths { // few, since prefixes usually have a few lengths
		if n <= len(key) {
			if r, ok := p.prefixes[key[:n]]; ok {
				return r
			}
		}
	}
	return &p.own
}

// Divisible returns why limits of the policy cannot be divided among data planes, which count requests; nil: they can,
// if each Rule's Limits are Quotable.
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

// Rules returns the policy's own rule, its overrides in the order of the file, and those of WithOverrides.
func (p *Policy) Rules() []*Rule {
	rules := make([]*Rule, 0, 1+len(p.overrides))
	rules = append(rules, &p.own)
	for i := range p.overrides {
		rules = append(rules, &p.overrides[i])
	}
	return rules
}

// index prepares Rule's maps. The keys and prefixes of the overrides must be different.
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

// Set is the policies of one file, with the overrides of WithOverrides, if any. It never changes. A nil *Set and the
// zero Set have no policies.
type Set struct {
	byName map[string]*Policy
	sorted []*Policy
	hash   string
}

// newSet makes a Set of policies, whose names must be different.
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

// Policies returns the policies sorted by name. The slice belongs to the caller.
func (s *Set) Policies() []*Policy {
	if s == nil {
		return nil
	}
	return append([]*Policy(nil), s.sorted...)
}

// NeedVoters returns an error for each Strict policy, with the position of the field: a node without voters must not
// load them.
func (s *Set) NeedVoters() Errors { return s.needs(func(p *Policy) *Error { return p.strict }) }

// NeedDirectory returns an error for each Persist policy: a node without a data directory must not load them.
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

// Hash returns 32 hexadecimal digits that represent the meaning of the policies, so that nodes can compare theirs. It
// is the same in every process and for any order of policies and overrides. It does not depend on comments, spacing,
// defaults that are written out, and bounds of memory (max_log, max_keys, max_memory), which have no effect on
// decisions. It depends on the order of a policy's limits, because decisions list them in that order.
func (s *Set) Hash() string {
	if s == nil || s.hash == "" {
		return hashOf(nil)
	}
	return s.hash
}

// meaning is what Hash covers of a policy: the exported fields of Policy, without bounds of memory and lines, and the
// rules.
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

// hashOf computes Hash for policies that are sorted by name. It leaves out fields that are zero, so that a new field of
// Policy changes no hash of policies without it.
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
			panic(err) // all fields have types that JSON can express
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// limitsMeant returns limits as bytes, with their defaults filled in.
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
