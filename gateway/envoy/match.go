package envoy

import (
	"strings"

	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
)

// match is the limit for one descriptor of a request.
type match struct {
	*rule
	key    string // of the limit's state
	metric string // the limit's name in metrics
}

// domain returns the domain with a name, or nil.
func (c *Config) domain(name string) *domain { return c.domains[name] }

// match returns the limit for a descriptor of a request, and a nil rule when there is none. The limit is that of the
// configured descriptor at the same depth. At each level the key with the value is tried first, then wildcards in the
// order of the files, then the key alone. A limit in the request replaces the configured one; an error is about that
// limit.
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
	var found [8]*node // the nodes that the entries lead to, by level
	path := found[:0]
	byValue := false
	var patterns []string // the patterns of wildcards with share_threshold, by level; nil: none
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

// detail returns the name in metrics of a limit whose name has values of the request: all of them with detailed_metric
// (all), otherwise those of descriptors with value_to_metric. A pattern stands for the values that share a threshold.
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
		if value != "" || all && patterns == nil { // as in the reference
			b.WriteByte('_')
			b.WriteString(value)
		}
	}
	return b.String()
}

// override returns the rule of a limit in a request. It has no name and no shadow mode.
func (d *domain) override(in *common.RateLimitDescriptor_RateLimitOverride) (*rule, error) {
	u, known := units[in.GetUnit().String()]
	if !known {
		return nil, errUnit
	}
	return &rule{
		fullKey: d.name + ".override", perUnit: in.GetRequestsPerUnit(), charge: d.charge, unit: u.number,
		limit: &algo.Limit{Algorithm: algo.FixedWindow, Period: algo.Epoch, Window: u.length,
			Limit: max(int64(in.GetRequestsPerUnit()), 1)},
	}, nil
}

// stateKey returns the key of a descriptor's state: its entries as key=value, joined by commas. Separators, control
// characters and other special characters are escaped as % and two hexadecimal digits, so that different descriptors
// have different keys; an unescaped * is from a pattern. limit.KeyOf shortens a result of more than limit.MaxKey bytes.
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
