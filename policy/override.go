package policy

import (
	"errors"
	"slices"
	"strings"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/strictyaml"
	"github.com/weirlimit/weir/limit"
)

// MaxOverrideSettings bounds the Settings of an Override, in bytes.
const MaxOverrideSettings = 4 << 10

// Override is an override that an operator has set while nodes run. It is in no policy file.
type Override struct {
	Policy string
	// Key or Prefix is set: the override is for one key, or for the keys that begin with Prefix.
	Key, Prefix string
	// Settings are the fields of an override in a policy file other than key and prefix, as a JSON object:
	// {"limit":500}, {"limits":["10/1s","1000/1h"]}, {"unlimited":true} or {"blocked":true}.
	Settings string
}

// overridden is the path before the field in mistakes of Settings.
const overridden = "override"

// Valid returns what is wrong with an override; nil: nothing. It does not know the policy, and does not parse Settings.
func (o *Override) Valid() *limit.Error {
	if !limit.ValidPolicyName(o.Policy) {
		return limit.NewError(limit.Invalid, "policy",
			"is not a policy's name: 1 to 128 characters of A-Z a-z 0-9 . _ -")
	}
	subject, field := o.Key, "key"
	switch {
	case o.Key != "" && o.Prefix != "":
		return limit.NewError(limit.Invalid, "prefix",
			"stands beside key: an override is for one key or for one prefix")
	case o.Prefix != "":
		subject, field = o.Prefix, "prefix"
	}
	if err := limit.ValidKey(subject); err != nil {
		err.Field = field
		return err
	}
	if len(o.Settings) > MaxOverrideSettings {
		return limit.NewError(limit.TooLarge, "settings", "have more than the 4096 bytes that are allowed")
	}
	return nil
}

// Accepts returns what is wrong with an override of one of the set's policies; nil: nothing. The error names the field:
// policy, key or prefix, or a field of Settings, such as settings.limit.
func (s *Set) Accepts(o Override) *limit.Error {
	if err := o.Valid(); err != nil {
		return err
	}
	p, ok := s.Get(o.Policy)
	if !ok {
		return limit.NewError(limit.NotFound, "policy", "there is no policy of this name on this node")
	}
	_, err := p.accept(o)
	return err
}

// accept compiles an override that is Valid.
func (p *Policy) accept(o Override) (Rule, *limit.Error) {
	d := &decoder{Decoder: strictyaml.New(overridden, []byte(o.Settings))}
	rule := Rule{Key: o.Key, Prefix: o.Prefix, API: true, settings: o.Settings}
	root := d.Root()
	if root.Node == nil && d.Count() == 0 {
		return rule, limit.NewError(limit.Invalid, "settings", "are empty: give limit, limits, unlimited or blocked")
	}
	root.Path = overridden
	if f, ok := d.Fields(root, overrideFields[2:]); ok {
		compiled := d.override(f, p.fields, p, true)
		rule.Limits, rule.Unlimited, rule.Blocked = compiled.Limits, compiled.Unlimited, compiled.Blocked
		if p.Ban != 0 && counts(rule.Limits) {
			d.Fail(root.Node, overridden+".limits",
				"count refused checks, and the policy has a ban, which makes refusals last in another way: use one of them")
		}
	}
	var mistakes Errors
	if !errors.As(d.Err(), &mistakes) {
		return rule, nil
	}
	// A mistake in a field helps more than one about the settings as a whole.
	about := slices.IndexFunc(mistakes, func(m *Error) bool { return strings.HasPrefix(m.Field, overridden+".") })
	first := mistakes[max(about, 0)]
	return rule, limit.NewError(limit.Invalid, "settings"+strings.TrimPrefix(first.Field, overridden), first.Message)
}

// counts says whether one of the limits has CountDenied.
func counts(limits algo.Limits) bool {
	return slices.ContainsFunc(limits, func(l algo.Limit) bool { return l.CountDenied })
}

// WithOverrides returns the set with additional overrides. Such an override replaces the file's for the same key or
// prefix. An override that is not accepted is left out, and has its error of Accepts at its index in the returned
// slice. No two overrides of list may be for the same policy and key or prefix.
//
// before is an earlier result of WithOverrides, or nil; unchanged rules are taken from it. The Hash of the result is
// that of s. s does not change.
func (s *Set) WithOverrides(list []Override, before *Set) (*Set, []*limit.Error) {
	refused := make([]*limit.Error, len(list))
	if len(list) == 0 {
		return s, refused
	}
	byPolicy := make(map[string][]int)
	for i := range list {
		byPolicy[list[i].Policy] = append(byPolicy[list[i].Policy], i)
	}
	var own []*Policy
	if s != nil {
		own = s.sorted
	}
	out := &Set{byName: make(map[string]*Policy, len(own)), sorted: make([]*Policy, 0, len(own)), hash: s.Hash()}
	for _, p := range own {
		if indexes := byPolicy[p.Name]; len(indexes) > 0 {
			earlier, _ := before.Get(p.Name)
			p = p.with(list, indexes, earlier, refused)
			delete(byPolicy, p.Name)
		}
		out.byName[p.Name], out.sorted = p, append(out.sorted, p)
	}
	for _, indexes := range byPolicy {
		for _, i := range indexes {
			refused[i] = s.Accepts(list[i])
		}
	}
	return out, refused
}

// with returns the policy with the overrides at some indexes of the list. earlier is an earlier result of with for any
// policy, or nil.
func (p *Policy) with(list []Override, indexes []int, earlier *Policy, refused []*limit.Error) *Policy {
	if earlier != nil && earlier.file != p {
		earlier = nil
	}
	out := *p
	out.file = p
	rules := make([]Rule, 0, len(indexes))
	replaced := make(map[[2]string]bool, len(indexes))
	for _, i := range indexes {
		o := list[i]
		if was := earlier.overrideOf(o.Key, o.Prefix); was != nil && was.API && was.settings == o.Settings {
			rules = append(rules, *was)
		} else if err := o.Valid(); err != nil {
			refused[i] = err
			continue
		} else if rule, err := p.accept(o); err != nil {
			refused[i] = err
			continue
		} else {
			rules = append(rules, rule)
		}
		replaced[[2]string{o.Key, o.Prefix}] = true
	}
	out.overrides = make([]Rule, 0, len(p.overrides)+len(rules))
	for _, r := range p.overrides {
		if !replaced[[2]string{r.Key, r.Prefix}] {
			out.overrides = append(out.overrides, r)
		}
	}
	out.overrides = append(out.overrides, rules...)
	out.index()
	return &out
}

// overrideOf returns the override for exactly this key or prefix, or nil.
func (p *Policy) overrideOf(key, prefix string) *Rule {
	if p == nil {
		return nil
	}
	if prefix != "" {
		return p.prefixes[prefix]
	}
	return p.exact[key]
}
