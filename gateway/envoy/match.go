package envoy

import (
	"strings"

	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
)

// match is the limit that one descriptor of a request falls under.
type match struct {
	*rule
	key    string // of the state
	metric string // its name in metrics
}

// domain returns a domain by its name, nil when there is none.
func (c *Config) domain(name string) *domain { return c.domains[name] }

// match returns the limit for a descriptor, and a nil rule when it falls under none: the limit of the configuration's descriptor
// that is as deep as the request's. At each level the key with the value comes first, then wildcards in the order of the file, then
// the key alone. A limit that the request brings along is taken in place of one that is configured. The error is about that.
func (d *domain) match(in *common.RateLimitDescriptor) (m match, err error) {
	entries := in.GetEntries()
	if over := in.GetLimit(); over != nil {
		if m.rule, err = d.override(over); err != nil {
			return match{}, err
		}
		m.key, m.metric = stateKey(entries, nil), d.name+".override"
		return m, nil
	}
	at := &d.node
	var found [8]*node // by level
	path := found[:0]
	byValue := false
	var patterns []string // by level, of wildcards that share a threshold; nil: none
	for i, e := range entries {
		composite := e.GetKey() + "_" + e.GetValue()
		next := at.children[composite]
		if next == nil {
			for i := range at.wildcards {
				if at.wildcards[i].matches(composite) {
					next = at.wildcards[i].node
					break
				}
			}
		}
		if next == nil {
			next = at.children[e.GetKey()]
		}
		if next == nil {
			return match{}, nil
		}
		path = append(path, next)
		byValue = byValue || next.byValue
		if next.pattern != "" {
			if patterns == nil {
				patterns = make([]string, len(entries))
			}
			patterns[i] = next.pattern
		}
		if i == len(entries)-1 {
			m.rule = next.limit
			break
		}
		if len(next.children) == 0 {
			return match{}, nil
		}
		at = next
	}
	if m.rule == nil {
		return match{}, nil
	}
	m.key, m.metric = stateKey(entries, patterns), m.fullKey
	if m.detailed || byValue {
		m.metric = d.detail(entries, path, m.detailed, patterns)
	}
	return m, nil
}

// detail is the name in metrics of a limit that has values of the request in it: with detailed_metric all, otherwise those of
// descriptors with value_to_metric, beside those that the configuration names. The value of a shared threshold is its pattern.
func (d *domain) detail(entries []*common.RateLimitDescriptor_Entry, path []*node, all bool, patterns []string) string {
	var b strings.Builder
	b.WriteString(d.name)
	for i, e := range entries {
		value := path[i].value
		if all || path[i].byValue {
			value = e.GetValue()
		}
		if patterns != nil && patterns[i] != "" {
			value = patterns[i]
		}
		b.WriteByte('.')
		b.WriteString(e.GetKey())
		if value != "" || all && patterns == nil { // as the reference has it
			b.WriteByte('_')
			b.WriteString(value)
		}
	}
	return b.String()
}

// override is the rule of a limit that a request brings along. It has no name, and is never in shadow mode.
func (d *domain) override(in *common.RateLimitDescriptor_RateLimitOverride) (*rule, error) {
	u, known := units[in.GetUnit().String()]
	if !known {
		return nil, errUnit
	}
	return &rule{
		fullKey: d.name + ".override", perUnit: in.GetRequestsPerUnit(), charge: d.charge, unit: u.number,
		limit: &algo.Limit{Algorithm: algo.FixedWindow, Period: algo.Epoch, Window: u.length, Limit: max(int64(in.GetRequestsPerUnit()), 1)},
	}, nil
}

// stateKey is what a descriptor's state is kept under: its entries as key=value, with commas between them. What could be taken for
// one of these characters, or is not to be read raw, is written as % and two hexadecimal digits, so that two descriptors never
// have one key; an * stands for itself only in a pattern. Descriptors of more than limit.MaxKey bytes have the key that limit.KeyOf
// makes of them.
func stateKey(entries []*common.RateLimitDescriptor_Entry, patterns []string) string {
	if len(entries) == 0 {
		return "()"
	}
	var b strings.Builder
	size := 0
	for _, e := range entries {
		size += len(e.GetKey()) + len(e.GetValue()) + len(",=")
	}
	b.Grow(min(size, limit.MaxKey))
	for i, e := range entries {
		if i > 0 {
			b.WriteByte(',')
		}
		escape(&b, e.GetKey())
		b.WriteByte('=')
		if patterns != nil && patterns[i] != "" {
			for j, part := range strings.Split(patterns[i], "*") {
				if j > 0 {
					b.WriteByte('*')
				}
				escape(&b, part)
			}
			continue
		}
		escape(&b, e.GetValue())
	}
	return limit.KeyOf(b.String())
}

func escape(b *strings.Builder, s string) {
	const hex = "0123456789ABCDEF"
	from := 0
	for i := range len(s) {
		if c := s[i]; c < ' ' || c == 0x7f || c == '%' || c == '=' || c == ',' || c == '*' || c == '(' {
			b.WriteString(s[from:i])
			b.Write([]byte{'%', hex[c>>4], hex[c&15]})
			from = i + 1
		}
	}
	b.WriteString(s[from:])
}
