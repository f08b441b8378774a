package policy

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/weirlimit/weir/limit"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/reload"
	"github.com/weirlimit/weir/internal/strictyaml"
	"go.yaml.in/yaml/v4"
)

// This file compiles a policy file. The path of a policy:
//
//	Parse        makes a decoder; file reads the list of policies
//	policy       reads one policy: limitsOf, candidate, guarantees, budget (budget.go), overrides
//	limitsOf     reads the policy's limits: limit for one, limits and limitAt for a list
//	limit        reads one limit from its parameters, wherever in the file they are, then algo.Limit.Validate
//	overrides    reads the overrides; changed merges an override's parameters with the policy's and calls limit
//
// override.go compiles an operator's override with the same functions. A new parameter belongs in ownParameters or
// sharedParameters, in takers, and in limit; if it has a default, also in limitsMeant, so that Set.Hash does not depend
// on writing it out.

const (
	maxKey = 1024 // bytes of a key or prefix in overrides
)

// The fields of a limit. A policy with several limits has the shared parameters once for all of them, or in an element
// of the list for that limit; each limit has its own parameters.
var (
	ownParameters    = []string{"limit", "window", "ttl", "capacity"}
	sharedParameters = []string{"algorithm", "align", "time_zone", "anchor", "slots", "count_denied", "max_log",
		"carry_debt", "max_debt"}
	limitParameters = slices.Concat(ownParameters, sharedParameters)
	limitFields     = append(slices.Clone(limitParameters), "limits")
	policyFields    = slices.Concat([]string{"name"}, limitParameters,
		[]string{"limits", "overrides", "on_error", "shadow", "warn_at", "ban", "candidate", "consistency",
			"durability", "persist", "cold_start", "lend", "max_keys", "max_memory", "prices", "estimate",
			"initial_estimate", "on_expiry"})
	overrideFields = slices.Concat([]string{"key", "prefix"}, ownParameters, []string{"limits", "unlimited", "blocked"})
)

var (
	algorithmWords = words(algo.FixedWindow, algo.Concurrency)
	periodWords    = words(algo.Minute, algo.Year)
)

func words[T interface {
	~uint8
	fmt.Stringer
}](first, last T) []string {
	var list []string
	for v := first; v <= last; v++ {
		list = append(list, v.String())
	}
	return list
}

// takers are the algorithms that have a parameter. Every algorithm has those that are not listed here.
var takers = map[string][]string{
	"window": algorithmWords[:6], "max_debt": algorithmWords[:6], // all but concurrency
	"ttl":          {"concurrency"},
	"align":        {"fixed_window"},
	"time_zone":    {"fixed_window"},
	"anchor":       {"fixed_window"},
	"carry_debt":   {"fixed_window"},
	"slots":        {"sliding_window"},
	"max_log":      {"sliding_log"},
	"capacity":     {"token_bucket", "leaky_bucket"},
	"count_denied": algorithmWords[:4], // windows and the log
}

// uses says whether an algorithm has a parameter.
func uses(a algo.Algorithm, parameter string) bool {
	list, some := takers[parameter]
	return !some || slices.Contains(list, a.String())
}

// Load reads and parses a regular file. The error is Errors when the file could be read. Otherwise it names the file:
// the file is too large or not regular, or the file system has not answered within reload.Timeout.
func Load(name string) (*Set, error) {
	data, err := reload.ReadFile(name, strictyaml.MaxFile)
	if err != nil {
		return nil, err
	}
	return Parse(name, data)
}

// Parse reads a policy file. file is its name in errors. An empty file and an empty list of policies are valid. The
// error is Errors: every mistake, or one if the file is not YAML. An override that changes a policy's limit is checked
// only when that limit is valid.
func Parse(file string, data []byte) (*Set, error) {
	d := &decoder{Decoder: strictyaml.New(file, data)}
	policies := d.file(d.Root())
	if err := d.Err(); err != nil {
		return nil, err
	}
	return newSet(policies), nil
}

func (d *decoder) file(root strictyaml.Field) []*Policy {
	top, _ := d.Fields(root, []string{"policies"}, "policies")
	var policies []*Policy
	lines := make(map[string]int)
	for f := range d.Maps(top.Field("policies"), "policies", policyFields, "overrides") {
		p := d.policy(f)
		if p.Name != "" {
			name := f.Field("name")
			if line, twice := lines[p.Name]; twice {
				d.Fail(name.Node, name.Path, "is the name of another policy, on line %d: names are unique", line)
			} else {
				lines[p.Name] = name.Node.Line
			}
		}
		policies = append(policies, p)
	}
	return policies
}

// policy compiles one policy. The result is usable only if no mistake was found.
func (d *decoder) policy(f strictyaml.Fields) *Policy {
	p := &Policy{Line: f.At.Line, fields: strictyaml.Fields{Path: f.Path, List: f.Only(limitFields...)}}
	name := d.Required(f, "name", "login")
	var ok bool
	if p.Name, ok = d.Text(name, 0, strictyaml.MaxFile); ok && !limit.ValidPolicyName(p.Name) {
		d.Fail(name.Node, name.Path, "must have 1 to %d characters of A-Z a-z 0-9 . _ -", limit.MaxPolicyName)
		p.Name = ""
	}
	p.Shadow = d.Boolean(f.Field("shadow"))
	if lend := f.Field("lend"); lend.Given() {
		p.NoLend = !d.Boolean(lend)
	}
	ok = d.limitsOf(f, p)
	d.candidate(f.Field("candidate"), p, ok)
	d.guarantees(f, p)
	d.budget(f, p)
	p.MaxKeys = d.Integer(f.Field("max_keys"), 1, 1<<40)
	p.MaxMemory = d.size(f.Field("max_memory"))
	d.overrides(f, p, ok)
	p.WarnAt = d.share(f.Field("warn_at"))
	d.ban(f.Field("ban"), p)
	limited := !ok || p.Limits != nil || slices.ContainsFunc(p.overrides, func(r Rule) bool { return r.Limits != nil })
	for _, one := range f.Only("warn_at", "ban") {
		if !limited {
			d.Fail(one.Key, one.Path, "has no effect: neither the policy nor an override has a limit: remove it")
		}
	}
	p.index()
	return p
}

// ban reads how long a key is banned. The policy's rules must have been read.
func (d *decoder) ban(f strictyaml.Field, p *Policy) {
	p.Ban = d.duration(f)
	if f.Given() && (counts(p.Limits) || counts(p.Candidate) ||
		slices.ContainsFunc(p.overrides, func(r Rule) bool { return counts(r.Limits) })) {
		d.Fail(f.Key, f.Path, "stands beside count_denied, which makes refusals last in another way: use one of them")
	}
}

// limitsOf sets the policy's own limits, and says whether they are valid.
func (d *decoder) limitsOf(f strictyaml.Fields, p *Policy) bool {
	before := d.Count()
	one := strictyaml.Fields{Path: f.Path, At: f.At, List: f.Only(limitParameters...)}
	switch list := f.Field("limits"); {
	case list.Given():
		for _, own := range f.Only(ownParameters...) {
			d.Fail(own.Key, own.Path, "stands beside limits: write it for each of the limits, or leave limits out")
		}
		if p.Limits = d.limits(list, f, true); p.Limits != nil {
			p.own, p.Concurrency = Rule{Limits: p.Limits}, leases(p.Limits)
		}
	case len(one.List) == 0:
		d.Fail(f.At, strictyaml.Join(f.Path, "limit"),
			"is missing: add algorithm, limit and window, or several limits, such as limits: [10/1s, 1000/1h], or limit: -1 for no limit but those of overrides")
	default:
		l, ok := d.limit(one, 0)
		if p.Concurrency = l.Algorithm == algo.Concurrency; ok {
			p.own = ruleOf(l)
			p.Limits = p.own.Limits
		}
	}
	return d.Count() == before
}

// candidate reads the policy's candidate; right says whether the policy's own limits are valid.
func (d *decoder) candidate(one strictyaml.Field, p *Policy, right bool) {
	f, ok := d.Fields(one, limitFields)
	if !ok {
		return
	}
	var other Policy
	switch ok = d.limitsOf(f, &other); {
	case !ok || !right:
	case p.Concurrency || other.Concurrency:
		d.Fail(one.Key, one.Path, "is not for concurrency: a lease of the one has no meaning for the other")
	case p.Limits == nil:
		d.Fail(one.Key, one.Path,
			"stands beside limit: -1, under which nothing is decided: give the policy a limit, with shadow: true if it is to admit everything")
	case other.Limits == nil:
		d.Fail(one.Key, one.Path, "is unlimited: it would admit everything")
	default:
		p.Candidate = other.Limits
	}
}

// leases says whether limits count leases. Either all limits of a policy do or none.
func leases(limits algo.Limits) bool { return limits[0].Algorithm == algo.Concurrency }

func ruleOf(l algo.Limit) Rule {
	if l.Limit == algo.Unlimited {
		return Rule{Unlimited: true}
	}
	return Rule{Limits: algo.Limits{l}}
}

// overrides compiles the policy's overrides; right says whether the policy's own limits are valid.
func (d *decoder) overrides(policy strictyaml.Fields, p *Policy, right bool) {
	lines := make(map[[2]string]int)
	for f := range d.Maps(policy.Field("overrides"), "overrides, such as {key: admin, unlimited: true}",
		overrideFields) {
		subject, known := d.subject(f)
		rule := d.override(f, policy, p, right)
		if !known {
			continue
		}
		if subject.Name == "key" {
			rule.Key = subject.Node.Value
		} else {
			rule.Prefix = subject.Node.Value
		}
		if line, twice := lines[[2]string{rule.Key, rule.Prefix}]; twice {
			d.Fail(subject.Node, subject.Path, "has an override already, on line %d: remove one", line)
			continue
		}
		lines[[2]string{rule.Key, rule.Prefix}] = subject.Node.Line
		p.overrides = append(p.overrides, rule)
	}
}

// subject returns the field with the key or prefix of an override.
func (d *decoder) subject(f strictyaml.Fields) (subject strictyaml.Field, ok bool) {
	either := f.Only("key", "prefix")
	if len(either) != 1 {
		d.Fail(f.At, f.Path, "must have either key or prefix, to say what the override is for")
		return subject, false
	}
	_, ok = d.Text(either[0], 1, maxKey)
	return either[0], ok
}

// override compiles the limits of an override.
func (d *decoder) override(f strictyaml.Fields, policy strictyaml.Fields, p *Policy, right bool) (rule Rule) {
	own, words := f.Only(ownParameters...), f.Only("limits", "unlimited", "blocked")
	if min(len(own), 1)+len(words) != 1 {
		d.Fail(f.At, f.Path, "must have one of limit, limits, unlimited: true and blocked: true")
		return rule
	}
	if len(own) > 0 {
		return d.changed(f, own, policy, p, right)
	}
	word := words[0]
	if word.Name == "limits" {
		rule.Limits = d.limits(word, policy, false)
		if rule.Limits != nil && right && leases(rule.Limits) != p.Concurrency {
			d.Fail(word.Node, word.Path, "must count as the policy does: concurrency and other limits do not mix")
		}
		return rule
	}
	if !d.Boolean(word) {
		d.Fail(word.Node, word.Path, "can only be true: remove it")
	}
	rule.Unlimited, rule.Blocked = word.Name == "unlimited", word.Name == "blocked"
	return rule
}

// changed compiles an override that changes parameters of the policy's only limit.
func (d *decoder) changed(f strictyaml.Fields, own []strictyaml.Field, policy strictyaml.Fields, p *Policy,
	right bool) Rule {
	if policy.Field("limits").Given() {
		d.Fail(own[0].Key, own[0].Path, "cannot change a policy of several limits: write limits here too")
		return Rule{}
	}
	if !right {
		return Rule{} // the policy has a mistake that must be corrected first
	}
	merged := strictyaml.Fields{Path: f.Path, At: f.At, List: own}
	number := merged.Field("limit")
	if number.Given() && !policy.Field("algorithm").Given() && !isUnlimited(number.Node) {
		d.Fail(number.Node, number.Path,
			"needs the algorithm of the policy, which is unlimited and has none: add it there, or write limits: [10/1m] here")
		return Rule{}
	}
	for _, one := range policy.Only(limitParameters...) {
		if !merged.Field(one.Name).Given() {
			merged.List = append(merged.List, one)
		}
	}
	l, ok := d.limit(merged, 0)
	if !ok {
		return Rule{}
	}
	// A bucket admits up to its capacity at once. A higher limit alone would not change that.
	if number.Given() && !f.Field("capacity").Given() && l.Capacity != 0 &&
		l.Limit > max(l.Capacity, p.Limits[0].Limit) {
		d.Fail(number.Node, number.Path, "is above the policy's capacity, %d, which it keeps: write capacity here too",
			l.Capacity)
		return Rule{}
	}
	return ruleOf(l)
}

// limits compiles a list of limits. Each may be in the short notation. A limit takes the shared parameters that it does
// not have itself from the policy. With check, a shared parameter that no limit takes is a mistake. It returns nil when
// a limit is invalid.
func (d *decoder) limits(list strictyaml.Field, policy strictyaml.Fields, check bool) algo.Limits {
	before := d.Count()
	shared, used := policy.Only(sharedParameters...), make(map[string]bool)
	var limits algo.Limits
	for one := range d.Elements(list, "limits, such as [10/1s, 1000/1h]") {
		limits = append(limits, d.limitAt(one, shared, used))
	}
	if d.Count() > before {
		return nil
	}
	for _, s := range shared {
		if check && !used[s.Name] {
			d.Fail(s.Key, s.Path, "has no effect: none of the limits takes it from here")
		}
	}
	// Each limit is valid, so that the error is about their number, or about one that does not fit the others.
	if wrong, bad := limits.Validate().(*algo.FieldError); bad {
		d.Fail(list.Node, strings.TrimSuffix(list.Path, "limits")+wrong.Field, "%s", wrong.Message)
		return nil
	}
	return limits
}

// limitAt compiles one element of a list of limits. It notes in used which of the shared parameters the element has
// taken.
func (d *decoder) limitAt(one strictyaml.Field, shared []strictyaml.Field, used map[string]bool) (l algo.Limit) {
	f, ok := strictyaml.Fields{}, false
	if one.Node.Kind == yaml.ScalarNode {
		f, ok = d.rate(one)
	} else {
		f, ok = d.Fields(one, limitParameters)
	}
	if !ok {
		return l
	}
	named := f.Field("algorithm")
	if !named.Given() {
		named = strictyaml.Fields{List: shared}.Field("algorithm")
	}
	a := algo.SlidingLog // the exact one, without an algorithm
	if named.Node != nil {
		a, _ = algo.ParseAlgorithm(named.Node.Value)
	}
	for _, s := range shared {
		if !f.Field(s.Name).Given() && (a == 0 || uses(a, s.Name)) {
			used[s.Name] = true
			f.List = append(f.List, s)
		}
	}
	if l, ok = d.limit(f, a); ok && l.Limit == algo.Unlimited {
		d.Fail(one.Node, one.Path,
			"is unlimited, which has no effect in a list: remove it, or write limit: -1 in place of the list")
	}
	return l
}

// rate converts the short notation to the fields that it stands for.
func (d *decoder) rate(one strictyaml.Field) (strictyaml.Fields, bool) {
	n := one.Node
	limit, window, cut := strings.Cut(n.Value, "/")
	if n.Tag != "!!str" || !cut {
		d.Fail(n, one.Path, "must be a rate or a map of fields, not %s: %s", strictyaml.Kind(n), rateHint)
		return strictyaml.Fields{}, false
	}
	part := func(name, tag, text string) strictyaml.Field {
		at := &yaml.Node{Kind: yaml.ScalarNode, Tag: tag, Value: text, Line: n.Line, Column: n.Column}
		return strictyaml.Field{Name: name, Path: strictyaml.Join(one.Path, name), Key: at, Node: at}
	}
	return strictyaml.Fields{Path: one.Path, At: n, List: []strictyaml.Field{
		part("limit", "!!int", limit), part("window", "!!str", window),
	}}, true
}

// limit compiles one limit from its parameters. Its algorithm is otherwise if it names none; 0: it must. It sets the
// algorithm if that is known, even when another parameter is invalid.
func (d *decoder) limit(f strictyaml.Fields, otherwise algo.Algorithm) (l algo.Limit, ok bool) {
	before := d.Count()
	l.Algorithm = otherwise
	number := d.Required(f, "limit", "100")
	// An unlimited limit has no state. Its other parameters must be valid, and none is required.
	off := isUnlimited(number.Node)
	needed := func(name, example string) strictyaml.Field {
		if off {
			return f.Field(name)
		}
		return d.Required(f, name, example)
	}
	if off {
		l.Limit = algo.Unlimited
	} else {
		l.Limit = d.Integer(number, 1, algo.MaxLimit)
	}
	if otherwise == 0 || f.Field("algorithm").Given() {
		l.Algorithm, _ = algo.ParseAlgorithm(d.Choice(needed("algorithm", "sliding_log"), algorithmWords...))
	}
	for _, one := range f.List {
		if l.Algorithm != 0 && !uses(l.Algorithm, one.Name) {
			d.Fail(one.Key, one.Path, "is a parameter of %s, not of %v: remove it",
				strings.Join(takers[one.Name], ", "), l.Algorithm)
		}
	}
	switch calendar := d.Choice(f.Field("align"), "first_hit", "calendar") == "calendar"; {
	case l.Algorithm == algo.Concurrency, f.Field("ttl").Given():
		l.Window = d.duration(needed("ttl", "30s"))
	case calendar:
		l.Period, _ = algo.ParsePeriod(d.Choice(needed("window", "day"), periodWords...))
	default:
		l.Window = d.duration(needed("window", "1m"))
	}
	l.Anchor, l.Zone = int8(d.Integer(f.Field("anchor"), 1, 31)), d.zone(f.Field("time_zone"))
	l.Capacity = d.Integer(f.Field("capacity"), 1, algo.MaxLimit)
	l.Slots = int32(d.Integer(f.Field("slots"), 1, algo.MaxSlots))
	l.MaxLog = d.Integer(f.Field("max_log"), 1, algo.MaxLimit)
	l.MaxDebt = d.Integer(f.Field("max_debt"), 1, algo.MaxLimit)
	l.CarryDebt, l.CountDenied = d.Boolean(f.Field("carry_debt")), d.Boolean(f.Field("count_denied"))
	if off {
		d.unlimited(f)
	}
	if off || d.Count() > before {
		return l, d.Count() == before
	}
	// The conditions on several parameters are package algo's.
	wrong, bad := l.Validate().(*algo.FieldError)
	if bad {
		at, path := f.At, strictyaml.Join(f.Path, wrong.Field)
		// A field that the limit has taken from another place in the file may be valid there.
		if one := f.Field(wrong.Field); one.Given() && strings.HasPrefix(one.Path, f.Path) {
			at, path = one.Node, one.Path
		}
		d.Fail(at, path, "%s", wrong.Message)
	}
	return l, !bad
}

// unlimited rejects parameters about counting in an unlimited limit. An unlimited override does not take them from its
// policy.
func (d *decoder) unlimited(f strictyaml.Fields) {
	for _, one := range f.Only("capacity", "slots", "count_denied", "max_log", "carry_debt", "max_debt") {
		if one.Node != nil && one.Node.Value != "false" && strings.HasPrefix(one.Path, f.Path) {
			d.Fail(one.Key, one.Path, "is for a limit, and this one is unlimited: remove it")
		}
	}
}

func isUnlimited(n *yaml.Node) bool {
	return n != nil && n.Kind == yaml.ScalarNode && n.Tag == "!!int" && n.Value == "-1"
}

// enum reads a value of an enumeration, whose names are in the order of its values.
func enum[E ~uint8](d *decoder, f strictyaml.Field, names []string) E {
	return E(max(slices.Index(names, d.Choice(f, names...)), 0))
}

// guarantees reads the behaviour when nodes or connections between them fail. limitsOf must have set p.Concurrency.
func (d *decoder) guarantees(f strictyaml.Fields, p *Policy) {
	before := d.Count()
	consistency, durability, onError := f.Field("consistency"), f.Field("durability"), f.Field("on_error")
	persist := f.Field("persist")
	p.Strict = d.Choice(consistency, "available", "strict") == "strict"
	p.Durability = enum[Durability](d, durability, durabilityWords)
	p.OnError = enum[OnError](d, onError, onErrorWords)
	p.ColdStart = enum[ColdStart](d, f.Field("cold_start"), coldStartWords)
	p.Persist = d.Boolean(persist)
	if d.Count() > before {
		return
	}
	if p.OnError == Share && p.Concurrency {
		d.Fail(onError.Node, onError.Path,
			"share is not for concurrency: a lease that nobody but the asked node knows cannot be renewed or released")
	}
	if p.Concurrency && p.Durability == Escrow {
		d.Fail(durability.Node, durability.Path,
			"escrow is not for concurrency: leases used up ahead could never be released: use sync")
	}
	if p.Persist {
		p.persist = d.need(persist,
			"true needs a data directory, in which this node keeps counters: give data-dir, or leave persist out")
	}
	if !p.Strict {
		return
	}
	p.strict = d.need(consistency, "strict needs voters: give all nodes the same voters, or use available")
	if p.Persist {
		d.Fail(persist.Node, persist.Path,
			"true is not for consistency: strict: which disk has the last counts is not known there; leave one of the two out")
	}
	if onError.Given() && p.OnError != Closed {
		d.Fail(onError.Node, onError.Path, "%v would admit what strict must not: use closed, the default under strict",
			p.OnError)
	}
	p.OnError = Closed
	if p.Durability == Async || p.Durability == None {
		enough := "escrow or sync"
		if p.Concurrency {
			enough = "sync"
		}
		d.Fail(cmp.Or(durability.Node, consistency.Node), strictyaml.Join(f.Path, "durability"),
			"%v is too little for consistency: strict: use %s", p.Durability, enough)
	}
}

// need returns the mistake that a field is on a node without what it needs.
func (d *decoder) need(f strictyaml.Field, message string) *Error {
	return &Error{File: d.File, Line: f.Node.Line, Column: f.Node.Column, Field: f.Path, Message: message}
}
