package envoy

import (
	"errors"
	"fmt"
	"testing"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

func TestQuotaBuckets(t *testing.T) {
	c := must.Value(Parse([]File{{"edge.yaml", []byte(`
domain: edge
quota_buckets:
- {bucket: {name: api, tenant: gold}, policy: gold, key: all, share: 80}
- {bucket: {name: api, tenant: "*"}, policy: tenant, key: "{tenant}"}
- bucket: {a: "*", b: "*", c: 1}
  policy: both
  key: "{{x}} {b}/{a}"
`)}}, Options{}))(t)
	must.Equal(t, c.Quotas(), 3)
	for _, test := range []struct {
		domain string
		id     map[string]string
		want   string
	}{
		{"edge", map[string]string{"name": "api", "tenant": "gold"}, "gold all 80"},
		{"edge", map[string]string{"name": "api", "tenant": "x"}, "tenant x 100"},
		{"edge", map[string]string{"name": "api", "tenant": "*"}, "tenant * 100"},
		{"edge", map[string]string{"name": "web", "tenant": "x"}, ""},
		{"edge", map[string]string{"name": "api"}, ""},
		{"edge", map[string]string{"name": "api", "tenant": "x", "more": ""}, ""},
		{"edge", map[string]string{"name": "api", "more": "x"}, ""},
		{"edge", nil, ""},
		{"core", map[string]string{"name": "api", "tenant": "x"}, ""},
		{"edge", map[string]string{"a": "1", "b": "{a}", "c": "1"}, "both {x} {a}/1 100"},
	} {
		got := ""
		if q, ok := c.Quota(test.domain, test.id); ok {
			got = fmt.Sprint(q.Policy, " ", q.Key, " ", q.Share)
		}
		expect.Equal(t, got, test.want, "%s %v", test.domain, test.id)
	}
}

// quotable denies the policy leaky.
func quotable(policy string) error {
	if policy == "leaky" {
		return errors.New("names a policy that cannot be divided")
	}
	return nil
}

// FuzzQuotaBuckets reads anything as quota_buckets: they are mistakes with positions, or buckets within bounds, each of which is found by an id of
// its own, the first that fits.
func FuzzQuotaBuckets(f *testing.F) {
	f.Add([]byte("[{bucket: {name: api, tenant: \"*\"}, policy: p, key: \"{tenant}\"}]"), "x")
	f.Add([]byte("[{bucket: {a: \"*\", b: c}, policy: p, key: \"{{{a}}}{b}\", share: 7}, {bucket: {a: \"*\", b: \"*\"}, policy: q, key: k}]"), "{a}")
	f.Add([]byte("[{bucket: &x {a: b}, policy: p, key: k}, {bucket: *x, policy: p, key: k}]"), "")
	f.Add([]byte("[{bucket: {a: {b: c}}, policy: 1, key: [], share: 1e9}]"), "*")
	f.Fuzz(func(t *testing.T, list []byte, value string) {
		if len(list) > 1<<12 {
			return
		}
		c, err := Parse([]File{{"f", append([]byte("domain: d\nquota_buckets: "), list...)}}, Options{})
		if err != nil {
			haveLines(t, err)
			return
		}
		for _, d := range c.domains {
			for i := range d.quotas {
				b := &d.quotas[i]
				id, bytes := make(map[string]string), 0
				for k, v := range b.entries {
					bytes += len(k) + len(v)
					if id[k] = v; v == wildcard {
						id[k] = value
					}
				}
				must.True(t, len(id) != 0 && len(id) <= MaxQuotaEntries && bytes <= MaxQuotaText &&
					limit.ValidPolicyName(b.policy) && len(b.key)%2 == 1 && b.share >= 1 && b.share <= 100, "%+v", b)
				first := b
				for j := range d.quotas[:i] {
					fits := len(d.quotas[j].entries) == len(id)
					for k, v := range d.quotas[j].entries {
						has, there := id[k]
						fits = fits && there && (v == wildcard || v == has)
					}
					if fits {
						first = &d.quotas[j]
						break
					}
				}
				var key string
				for j, part := range first.key {
					if j%2 == 1 {
						part = id[part]
					}
					key += part
				}
				if got, ok := c.Quota("d", id); !ok || got != (QuotaTarget{first.policy, key, first.share}) {
					t.Fatalf("%v: %+v, %v, want %+v", id, got, ok, first)
				}
			}
		}
	})
}
