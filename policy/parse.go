package policy

import (
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

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
//	limit        reads one limit from its parameters, wherever in the file they are: shape and numbers, then
//	             algo.Limit.Validate
//	overrides    reads the overrides; changed merges an override's parameters with the policy's and calls limit
//
// override.go compiles an operator's override with the same functions. A new parameter belongs in ownParameters or
// sharedParameters, in uses, and in shape or numbers; if it has a default, also in limitsMeant, so that Set.Hash does
// not depend on writing it out.

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

// uses says whether an algorithm has a parameter. Every algorithm has those that are not listed here.
func uses(a algo.Algorithm, parameter string) bool {
	switch parameter {
	case "window":
		return a != algo.Concurrency
	case "ttl":
		return a == algo.Concurrency
	case "align", "time_zone", "anchor", "carry_debt":
		return a == algo.FixedWindow
	case "max_debt":
		return a != algo.Concurrency
	case "slots":
		return a == algo.SlidingWindow
	case "max_log":
		return a == algo.SlidingLog
	case "capacity":
		return a == algo.TokenBucket || a == algo.LeakyBucket
	case "count_denied":
		return a == algo.FixedWindow || a == algo.SlidingWindow || a == algo.SlidingCounter || a == algo.SlidingLog
	}
	return true
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
	d.OtherName = otherName
	policies := d.file(d.Root())
	if err := d.Err(); err != nil {
		return nil, err
	}
	return newSet(policies), nil
}

func (d *decoder) file(root *yaml.Node) []*Policy {
	if root == nil {
		return nil
	}
	top, _ := d.Fields(root, "", []string{"policies"}, "policies")
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
	p := &Policy{Line: f.At.Line, fields: strictyaml.Fields{Path: f.Path, List: f.Only(limitFields)}}
	p.Name = d.name(d.Required(f, "name", "login"))
	p.Shadow = d.Flag(f, "shadow")
	may, given := d.Boolean(f.Field("lend"))
	p.NoLend = given && !may
	ok := d.limitsOf(f, p)
	d.candidate(f.Field("candidate"), p, ok)
	d.guarantees(f, p)
	d.budget(f, p)
	p.MaxKeys, _ = d.Integer(f.Field("max_keys"), 1, 1<<40)
	p.MaxMemory, _ = d.size(f.Field("max_memory"))
	d.overrides(f, p, ok)
	limited := !ok || p.Limits != nil || slices.ContainsFunc(p.overrides, func(r Rule) bool { return r.Limits != nil })
	if share, given := f.Get("warn_at"); given {
		p.WarnAt, _ = d.share(share)
		d.needsLimit(share, limited)
	}
	if ban, given := f.Get("ban"); given {
		d.ban(ban, p)
		d.needsLimit(ban, limited)
	}
	p.index()
	return p
}

// needsLimit rejects a field when neither the policy nor an override has a limit.
func (d *decoder) needsLimit(f strictyaml.Field, limited bool) {
	if !limited {
		d.Fail(f.Key, f.Path, "has no effect: neither the policy nor an override has a limit: remove it")
	}
}

// ban reads how long a key is banned. The policy's rules must have been read.
func (d *decoder) ban(f strictyaml.Field, p *Policy) {
	p.Ban, _ = d.duration(f)
	if counts(p.Limits) || counts(p.Candidate) ||
		slices.ContainsFunc(p.overrides, func(r Rule) bool { return counts(r.Limits) }) {
		d.Fail(f.Key, f.Path, "stands beside count_denied, which makes refusals last in another way: use one of them")
	}
}

func (d *decoder) name(f strictyaml.Field) string {
	name, ok := d.Text(f)
	if !ok {
		return ""
	}
	bad := strings.IndexFunc(name, func(r rune) bool { return !limit.InPolicyName(r) })
	switch {
	case name == "":
		d.Fail(f.Node, f.Path, "is empty: give the policy a name")
	case bad >= 0:
		r, _ := utf8.DecodeRuneInString(name[bad:])
		d.Fail(f.Node, f.Path, "contains %q: a name is made of letters A to Z and a to z, digits and . _ -", r)
	case len(name) > limit.MaxPolicyName:
		d.Fail(f.Node, f.Path, "has %d characters: at most %d are allowed", len(name), limit.MaxPolicyName)
	default:
		return name
	}
	return ""
}

// limitsOf sets the policy's own limits, and says whether they are valid.
func (d *decoder) limitsOf(f strictyaml.Fields, p *Policy) bool {
	if list, several := f.Get("limits"); several {
		beside := f.Only(ownParameters)
		for _, own := range beside {
			d.Fail(own.Key, own.Path, "stands beside limits: write it for each of the limits, or leave limits out")
		}
		limits, ok := d.limits(list, f, true)
		if ok {
			p.Limits, p.own, p.Concurrency = limits, Rule{Limits: limits}, leases(limits)
		}
		return ok && len(beside) == 0
	}
	one := strictyaml.Fields{Path: f.Path, At: f.At, List: f.Only(limitParameters)}
	if len(one.List) == 0 {
		d.Fail(f.At, strictyaml.Join(f.Path, "limit"),
			"is missing: add algorithm, limit and window, or several limits, such as limits: [10/1s, 1000/1h], or limit: -1 for no limit but those of overrides")
		return false
	}
	l, ok := d.limit(one)
	p.Concurrency = l.Algorithm == algo.Concurrency
	if ok {
		p.own = ruleOf(l)
		p.Limits = p.own.Limits
	}
	return ok
}

// candidate reads the policy's candidate; right says whether the policy's own limits are valid.
func (d *decoder) candidate(one strictyaml.Field, p *Policy, right bool) {
	if one.Node == nil {
		return
	}
	f, ok := d.Fields(one.Node, one.Path, slices.Concat(limitParameters, []string{"limits"}))
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
func (d *decoder) subject(f strictyaml.Fields) (strictyaml.Field, bool) {
	key, hasKey := f.Get("key")
	prefix, hasPrefix := f.Get("prefix")
	subject := key
	switch {
	case hasKey && hasPrefix:
		d.Fail(prefix.Key, prefix.Path, "stands beside key: an override is for one key or for one prefix")
		return subject, false
	case hasPrefix:
		subject = prefix
	case !hasKey:
		d.Fail(f.At, strictyaml.Join(f.Path, "key"), "is missing: add key: or prefix: to say what the override is for")
		return subject, false
	}
	text, ok := d.Text(subject)
	switch {
	case !ok:
	case text == "" && hasPrefix:
		d.Fail(subject.Node, subject.Path, "is empty: what is for every key belongs into the policy itself")
	case text == "":
		d.Fail(subject.Node, subject.Path, "is empty: a key has 1 to %d bytes", maxKey)
	case len(text) > maxKey:
		d.Fail(subject.Node, subject.Path, "has %d bytes: at most %d are allowed", len(text), maxKey)
	default:
		return subject, true
	}
	return subject, false
}

// override compiles the limits of an override.
func (d *decoder) override(f strictyaml.Fields, policy strictyaml.Fields, p *Policy, right bool) Rule {
	own := f.Only(ownParameters)
	limits, several := f.Get("limits")
	var said []strictyaml.Field // one field of each kind that the override has
	if len(own) > 0 {
		said = append(said, own[0])
	}
	said = append(said, f.Only([]string{"limits", "unlimited", "blocked"})...)
	if len(said) == 0 {
		d.Fail(f.At, f.Path, "changes nothing: add limit, limits, unlimited: true or blocked: true")
		return Rule{}
	}
	for _, more := range said[1:] {
		d.Fail(more.Key, more.Path, "stands beside %s: an override has one of limit, limits, unlimited and blocked",
			said[0].Name)
	}
	var rule Rule
	for _, word := range f.Only([]string{"unlimited", "blocked"}) {
		if v, ok := d.Boolean(word); ok && !v {
			d.Fail(word.Node, word.Path, "can only be true: remove it")
		}
		rule.Unlimited = rule.Unlimited || word.Name == "unlimited"
		rule.Blocked = rule.Blocked || word.Name == "blocked"
	}
	if several {
		list, ok := d.limits(limits, policy, false)
		if ok && right && leases(list) != p.Concurrency {
			d.Fail(limits.Node, limits.Path, "must count as the policy does: concurrency and other limits do not mix")
		}
		rule.Limits = list
	}
	if len(own) > 0 {
		rule = d.changed(f, own, policy, p, right)
	}
	return rule
}

// changed compiles an override that changes parameters of the policy's only limit.
func (d *decoder) changed(f strictyaml.Fields, own []strictyaml.Field, policy strictyaml.Fields, p *Policy,
	right bool) Rule {
	if policy.Has("limits") {
		d.Fail(own[0].Key, own[0].Path, "cannot change a policy of several limits: write limits here too")
		return Rule{}
	}
	if !right {
		return Rule{} // the policy has a mistake that must be corrected first
	}
	merged := strictyaml.Fields{Path: f.Path, At: f.At, List: own}
	if number, given := merged.Get("limit"); given && !policy.Has("algorithm") && !isUnlimited(number.Node) {
		d.Fail(number.Node, strictyaml.Join(policy.Path, "algorithm"),
			"is missing: the policy itself is unlimited, but this limit needs one: add it there, or write limits: [10/1m] in the override")
		return Rule{}
	}
	for _, one := range policy.Only(limitParameters) {
		if !merged.Has(one.Name) {
			merged.List = append(merged.List, one)
		}
	}
	l, ok := d.limit(merged)
	if !ok {
		return Rule{}
	}
	// A bucket admits up to its capacity at once. A higher limit alone would not change that.
	raised, given := strictyaml.Fields{List: own}.Get("limit")
	if given && !(strictyaml.Fields{List: own}).Has("capacity") && l.Capacity != 0 &&
		l.Limit > max(l.Capacity, p.Limits[0].Limit) {
		d.Fail(raised.Node, raised.Path, "is above the policy's capacity, %d, which it keeps: write capacity here too",
			l.Capacity)
		return Rule{}
	}
	return ruleOf(l)
}

// limits compiles a list of limits. Each may be in the short notation. A limit takes the shared parameters that it does
// not have itself from the policy. With check, a shared parameter that no limit takes is a mistake.
func (d *decoder) limits(list strictyaml.Field, policy strictyaml.Fields, check bool) (algo.Limits, bool) {
	nodes, ok := d.Items(list, "limits, such as [10/1s, 1000/1h]")
	if !ok {
		return nil, false
	}
	if len(nodes) == 0 {
		d.Fail(list.Node, list.Path, "is empty: write at least one limit, such as 10/1s")
		return nil, false
	}
	if len(nodes) > algo.MaxLimits {
		d.Fail(nodes[algo.MaxLimits], list.Path, "has %d limits: at most %d are allowed", len(nodes), algo.MaxLimits)
		ok = false
	}
	shared := policy.Only(sharedParameters)
	used := make(map[string]bool)
	var limits algo.Limits
	for i, n := range nodes {
		path := strictyaml.Element(list.Path, i)
		if !d.Visit(n, path) {
			return nil, false
		}
		l, good := d.limitAt(strictyaml.Value(n), path, shared, used)
		ok = ok && good
		limits = append(limits, l)
	}
	if !ok {
		return nil, false
	}
	if check {
		for _, s := range shared {
			if !used[s.Name] {
				d.Fail(s.Key, s.Path, "has no effect: none of the limits takes it from here")
			}
		}
	}
	if err := limits.Validate(); err != nil {
		// Each limit is valid, so that the error is about one that does not fit the others.
		wrong := err.(*algo.FieldError)
		for i, n := range nodes {
			if field, ok := strings.CutPrefix(wrong.Field, strictyaml.Element("limits", i)+"."); ok {
				d.Fail(strictyaml.Value(n), strictyaml.Join(strictyaml.Element(list.Path, i), field), "%s",
					wrong.Message)
			}
		}
		return nil, false
	}
	return limits, true
}

// limitAt compiles one element of a list of limits. It notes in used which of the shared parameters the element has
// taken.
func (d *decoder) limitAt(n *yaml.Node, path string, shared []strictyaml.Field,
	used map[string]bool) (algo.Limit, bool) {
	var f strictyaml.Fields
	var ok bool
	if n.Kind == yaml.ScalarNode {
		if f, ok = d.rate(n, path); !ok {
			return algo.Limit{}, false
		}
	} else if f, ok = d.Fields(n, path, limitParameters); !ok {
		return algo.Limit{}, false
	}
	algorithm, given := f.Get("algorithm")
	if !given {
		algorithm, given = strictyaml.Fields{List: shared}.Get("algorithm")
	}
	if !given {
		// Without an algorithm a list has the exact one.
		algorithm = strictyaml.Field{Name: "algorithm", Path: path, Key: n, Node: &yaml.Node{
			Kind: yaml.ScalarNode, Tag: "!!str", Value: algo.SlidingLog.String(), Line: n.Line, Column: n.Column,
		}}
		f.List = append(f.List, algorithm)
	}
	var a algo.Algorithm
	if algorithm.Node != nil {
		a, _ = algo.ParseAlgorithm(algorithm.Node.Value)
	}
	for _, s := range shared {
		if !f.Has(s.Name) && (a == 0 || uses(a, s.Name)) {
			used[s.Name] = true
			f.List = append(f.List, s)
		}
	}
	l, ok := d.limit(f)
	if ok && l.Limit == algo.Unlimited {
		d.Fail(n, path, "is unlimited, which has no effect in a list: remove it, or write limit: -1 in place of the list")
		return l, false
	}
	return l, ok
}

// rate converts the short notation to the fields that it stands for, with the positions of its parts.
func (d *decoder) rate(n *yaml.Node, path string) (strictyaml.Fields, bool) {
	limit, window, cut := strings.Cut(n.Value, "/")
	if n.Tag != "!!str" || !cut {
		d.Fail(n, path, "must be a rate or a map of fields, not %s: %s", strictyaml.Kind(n), rateHint)
		return strictyaml.Fields{}, false
	}
	part := func(name, tag, text string, column int) strictyaml.Field {
		at := &yaml.Node{Kind: yaml.ScalarNode, Tag: tag, Value: text, Line: n.Line, Column: column}
		return strictyaml.Field{Name: name, Path: strictyaml.Join(path, name), Key: at, Node: at}
	}
	column, second := n.Column, n.Column
	switch n.Style {
	case 0:
		second += utf8.RuneCountInString(limit) + 1
	case yaml.SingleQuotedStyle, yaml.DoubleQuotedStyle:
		column, second = column+1, second+utf8.RuneCountInString(limit)+2
	}
	return strictyaml.Fields{Path: path, At: n, List: []strictyaml.Field{
		part("limit", "!!int", limit, column), part("window", "!!str", window, second),
	}}, true
}

// limit compiles one limit from its parameters. It sets the algorithm if that is known, even when another parameter is
// invalid.
func (d *decoder) limit(f strictyaml.Fields) (l algo.Limit, ok bool) {
	ok = true
	number, given := f.Get("limit")
	if given {
		l.Limit, ok = d.units(number)
	} else {
		d.Missing(f, "limit", "100")
		ok = false
	}
	// An unlimited limit has no state. Its other parameters must be valid, none is required, and those about counting
	// are mistakes.
	off := l.Limit == algo.Unlimited
	if a, given := f.Get("algorithm"); given {
		name, good := d.Choice(a, algorithmWords...)
		l.Algorithm, _ = algo.ParseAlgorithm(name)
		ok = ok && good
	} else if !off {
		d.Missing(f, "algorithm", "sliding_log")
		ok = false
	}
	for _, one := range f.List {
		if l.Algorithm != 0 && !uses(l.Algorithm, one.Name) {
			d.misplaced(one, l.Algorithm)
			ok = false
		}
	}
	shaped := d.shape(f, &l, off)
	counted := d.numbers(f, &l)
	if off && !d.unlimited(f, &l) {
		ok = false
	}
	if !ok || !shaped || !counted || off {
		return l, ok && shaped && counted
	}
	// The conditions on several parameters are package algo's.
	wrong, bad := l.Validate().(*algo.FieldError)
	if bad {
		at, path := f.At, strictyaml.Join(f.Path, wrong.Field)
		// A field that the limit has taken from another place in the file may be valid there.
		if one, given := f.Get(wrong.Field); given && one.Node != nil && strings.HasPrefix(one.Path, f.Path) {
			at, path = one.Node, one.Path
		}
		d.Fail(at, path, "%s", wrong.Message)
	}
	return l, !bad
}

// unlimited rejects parameters that package algo does not allow in an unlimited limit. An unlimited override does not
// take them from its policy.
func (d *decoder) unlimited(f strictyaml.Fields, l *algo.Limit) bool {
	ok := true
	for _, one := range f.Only([]string{"capacity", "slots", "count_denied", "max_log", "carry_debt", "max_debt"}) {
		switch {
		case one.Node == nil: // it has no value, which is a mistake already
		case one.Name == "count_denied" && !l.CountDenied, one.Name == "carry_debt" && !l.CarryDebt: // the default
		case !strings.HasPrefix(one.Path, f.Path): // taken from the policy
		case l.Algorithm != 0 && !uses(l.Algorithm, one.Name): // rejected for that already
		default:
			d.Fail(one.Key, one.Path, "is for a limit, and this one is unlimited: remove it")
			ok = false
		}
	}
	return ok
}

// units reads a number of units, or -1 for unlimited.
func (d *decoder) units(f strictyaml.Field) (int64, bool) {
	if isUnlimited(f.Node) {
		return algo.Unlimited, true
	}
	if n := f.Node; n != nil && n.Kind == yaml.ScalarNode && n.Tag == "!!str" && n.Value == "unlimited" {
		d.Fail(n, f.Path, "must be a whole number: write -1 for unlimited")
		return 0, false
	}
	return d.Integer(f, 1, algo.MaxLimit)
}

func isUnlimited(n *yaml.Node) bool {
	return n != nil && n.Kind == yaml.ScalarNode && n.Tag == "!!int" && n.Value == "-1"
}

func (d *decoder) misplaced(f strictyaml.Field, a algo.Algorithm) {
	switch f.Name {
	case "window":
		d.Fail(f.Key, f.Path, "is no parameter of concurrency: write ttl, the longest life of a lease")
	case "ttl":
		d.Fail(f.Key, f.Path, "is a parameter of concurrency, not of %v: write window", a)
	default:
		var with []string
		for _, name := range algorithmWords {
			if other, _ := algo.ParseAlgorithm(name); uses(other, f.Name) {
				with = append(with, name)
			}
		}
		d.Fail(f.Key, f.Path, "is a parameter of %s, not of %v: remove it", strings.Join(with, ", "), a)
	}
}

// shape reads the time over which a limit counts: a window, a calendar period or the ttl of leases.
func (d *decoder) shape(f strictyaml.Fields, l *algo.Limit, off bool) bool {
	ok, calendar := true, false
	if align, given := f.Get("align"); given {
		word, good := d.Choice(align, "first_hit", "calendar")
		calendar, ok = word == "calendar", good
	}
	window, hasWindow := f.Get("window")
	ttl, hasTTL := f.Get("ttl")
	good := true
	switch {
	case hasWindow && calendar:
		var word string
		word, good = d.Choice(window, periodWords...)
		l.Period, _ = algo.ParsePeriod(word)
	case hasWindow:
		l.Window, good = d.duration(window)
	case hasTTL:
		l.Window, good = d.duration(ttl)
	case off:
	case l.Algorithm == algo.Concurrency:
		d.Missing(f, "ttl", "30s")
		good = false
	case calendar:
		d.Missing(f, "window", "day")
		good = false
	default:
		d.Missing(f, "window", "1m")
		good = false
	}
	ok = ok && good
	if anchor, given := f.Get("anchor"); given {
		var day int64
		day, good = d.Integer(anchor, 1, 31)
		ok = ok && good
		if l.Anchor = int8(day); good && ok && l.Period != algo.Month &&
			(l.Algorithm == algo.FixedWindow || l.Algorithm == 0) {
			d.Fail(anchor.Key, anchor.Path,
				"is the day on which a calendar month begins: add align: calendar and window: month, or remove it")
			ok = false
		}
	}
	if zone, given := f.Get("time_zone"); given {
		l.Zone, good = d.zone(zone)
		ok = ok && good
		if !calendar && (l.Algorithm == algo.FixedWindow || l.Algorithm == 0) {
			d.Fail(zone.Key, zone.Path, "has no effect without align: calendar: add that, or remove the time zone")
			ok = false
		}
	}
	return ok
}

// numbers reads the parameters that are numbers and booleans.
func (d *decoder) numbers(f strictyaml.Fields, l *algo.Limit) bool {
	ok := true
	integer := func(name string, most int64) int64 {
		one, given := f.Get(name)
		v, good := d.Integer(one, 1, most)
		ok = ok && (good || !given)
		return v
	}
	flag := func(name string) bool {
		one, given := f.Get(name)
		v, good := d.Boolean(one)
		ok = ok && (good || !given)
		return v
	}
	l.Capacity, l.Slots = integer("capacity", algo.MaxLimit), int32(integer("slots", algo.MaxSlots))
	l.MaxLog, l.MaxDebt = integer("max_log", algo.MaxLimit), integer("max_debt", algo.MaxLimit)
	l.CarryDebt, l.CountDenied = flag("carry_debt"), flag("count_denied")
	return ok
}

// guarantees reads the behaviour when nodes or connections between them fail. limitsOf must have set p.Concurrency.
func (d *decoder) guarantees(f strictyaml.Fields, p *Policy) {
	consistency, durability, onError := f.Field("consistency"), f.Field("durability"), f.Field("on_error")
	level, _ := d.Choice(consistency, "available", "strict")
	copies, _ := d.Choice(durability, "none", "async", "escrow", "sync")
	answer, _ := d.Choice(onError, "open", "closed", "share")
	start, _ := d.Choice(f.Field("cold_start"), "open", "closed")
	p.Strict = level == "strict"
	for _, v := range []Durability{None, Escrow, Sync} {
		if copies == v.String() {
			p.Durability = v
		}
	}
	if answer == "closed" || p.Strict {
		p.OnError = Closed
	}
	if answer == "share" && !p.Strict {
		p.OnError = Share
		if p.Concurrency {
			d.Fail(onError.Node, onError.Path,
				"share is not for concurrency: a lease that nobody but the asked node knows cannot be renewed or released")
		}
	}
	if start == "closed" {
		p.ColdStart = ColdClosed
	}
	d.persist(f, p)
	if p.Concurrency && p.Durability == Escrow {
		d.Fail(durability.Node, durability.Path,
			"escrow is not for concurrency: leases used up ahead could never be released: use sync")
	}
	if !p.Strict {
		return
	}
	p.strict = &Error{File: d.File, Line: consistency.Node.Line, Column: consistency.Node.Column,
		Field:   consistency.Path,
		Message: "strict needs voters: give all nodes the same voters, or use available"}
	if answer == "open" || answer == "share" {
		d.Fail(onError.Node, onError.Path, "%s would admit what strict must not: use closed, the default under strict",
			answer)
	}
	enough := "escrow or sync"
	if p.Concurrency {
		enough = "sync"
	}
	switch {
	case !f.Has("durability"):
		d.Fail(consistency.Node, consistency.Path,
			"strict needs a durability of %s, and the default is async: add it, such as durability: sync", enough)
	case copies == "none", copies == "async":
		d.Fail(durability.Node, durability.Path, "%s is too little for consistency: strict: use %s", copies, enough)
	}
}

// persist reads whether nodes keep the policy's counters on disk. guarantees must have set p.Strict.
func (d *decoder) persist(f strictyaml.Fields, p *Policy) {
	one, given := f.Get("persist")
	if !given {
		return
	}
	if p.Persist, _ = d.Boolean(one); !p.Persist {
		return
	}
	p.persist = &Error{File: d.File, Line: one.Node.Line, Column: one.Node.Column, Field: one.Path,
		Message: "true needs a data directory, in which this node keeps counters: give data-dir, or leave persist out"}
	if p.Strict {
		d.Fail(one.Node, one.Path,
			"true is not for consistency: strict: which disk has the last counts is not known there; leave one of the two out")
	}
}
