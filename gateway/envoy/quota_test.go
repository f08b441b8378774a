package envoy

import (
	"errors"
	"fmt"
	"strings"
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

func TestQuotaMistakes(t *testing.T) {
	options := Options{Quotable: func(policy string) error {
		if policy == "leaky" {
			return errors.New("names a policy that cannot be divided")
		}
		return nil
	}}
	for text, want := range map[string]string{
		`{policy: p, key: k}`:                                                            "4:3: quota_buckets[0].bucket: is missing",
		`{bucket: {a: b}, key: k}`:                                                       "4:3: quota_buckets[0].policy: is missing",
		`{bucket: {a: b}, policy: p}`:                                                    "4:3: quota_buckets[0].key: is missing",
		`{bucket: {a: b}, policy: p q, key: k}`:                                          "4:28: quota_buckets[0].policy: is not a policy's name",
		`{bucket: {a: b}, policy: leaky, key: k}`:                                        "4:28: quota_buckets[0].policy: names a policy that cannot be divided",
		`{bucket: {a: b}, policy: p, key: ""}`:                                           "4:36: quota_buckets[0].key: is empty",
		`{bucket: {a: b}, policy: p, key: "{c}"}`:                                        `4:36: quota_buckets[0].key: names the entry "c"`,
		`{bucket: {a: b}, policy: p, key: "{a"}`:                                         "4:36: quota_buckets[0].key: has a brace",
		`{bucket: {a: b}, policy: p, key: "a}"}`:                                         "4:36: quota_buckets[0].key: has a brace",
		`{bucket: {a: b}, policy: p, key: k, share: 0}`:                                  "4:46: quota_buckets[0].share:",
		`{bucket: {a: b}, policy: p, key: k, share: 101}`:                                "4:46: quota_buckets[0].share:",
		`{bucket: {}, policy: p, key: k}`:                                                "4:12: quota_buckets[0].bucket: must be a map",
		`{bucket: [a], policy: p, key: k}`:                                               "4:12: quota_buckets[0].bucket: must be a map",
		`{bucket: {a: b, a: c}, policy: p, key: k}`:                                      "given twice",
		`{bucket: {a: 2026-01-02}, policy: p, key: k}`:                                   "4:16: quota_buckets[0].bucket.a: must be text",
		`{bucket: {a: b}, policy: p, key: k, weight: 3}`:                                 `weight`,
		"{bucket: {a: \"*\"}, policy: p, key: k}\n- {bucket: {a: b}, policy: p, key: k}": "5:4: quota_buckets[1].bucket: has no bucket left: that of line 4",
	} {
		_, err := Parse([]File{{"edge.yaml", []byte("\ndomain: edge\nquota_buckets:\n- " + text + "\n")}}, options)
		expect.True(t, err != nil && strings.Contains(err.Error(), want), "%s:\n got %v\nwant %s", text, err, want)
	}
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
