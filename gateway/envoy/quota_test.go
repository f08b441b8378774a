package envoy

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

func TestQuotaBuckets(t *testing.T) {
	c, err := Parse([]File{{"edge.yaml", []byte(`
domain: edge
quota_buckets:
- {bucket: {name: api, tenant: gold}, policy: gold, key: all, share: 80}
- {bucket: {name: api, tenant: "*"}, policy: tenant, key: "{tenant}"}
- bucket: {a: "*", b: "*", c: 1}
  policy: both
  key: "{{x}} {b}/{a}"
`)}}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if n := c.Quotas(); n != 3 {
		t.Fatal(n)
	}
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
		if got != test.want {
			t.Errorf("%s %v: %q, want %q", test.domain, test.id, got, test.want)
		}
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
		`{bucket: {a: true}, policy: p, key: k}`:                                         "4:16: quota_buckets[0].bucket.a: must be text",
		`{bucket: {a: b}, policy: p, key: k, weight: 3}`:                                 `weight`,
		"{bucket: {a: \"*\"}, policy: p, key: k}\n- {bucket: {a: b}, policy: p, key: k}": "5:4: quota_buckets[1].bucket: has no bucket left: that of line 4",
	} {
		_, err := Parse([]File{{"edge.yaml", []byte("\ndomain: edge\nquota_buckets:\n- " + text + "\n")}}, options)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s:\n got %v\nwant %s", text, err, want)
		}
	}
}
