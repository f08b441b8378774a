package envoy

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/reload"
	"github.com/weirlimit/weir/internal/strictyaml"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

func parse(t testing.TB, text string) *Config {
	t.Helper()
	return must.Value(Parse([]File{{"f.yaml", []byte(text)}}, Options{}))(t)
}

// TestMistakes: each error that the reference reports when it loads a file, and those beyond it, with a position.
func TestMistakes(t *testing.T) {
	words := strings.NewReplacer(`\n`, "\n", "DEEP", strings.Repeat("[", 40)+strings.Repeat("]", 40))
	testkit.Table(t, "testdata/mistakes.txt", func(t *testing.T, text, want string) {
		c, err := Parse([]File{{"f.yaml", []byte(words.Replace(text))}}, Options{Quotable: quotable})
		var found strictyaml.Errors
		wanted := strings.Split(want, " & ")
		must.True(t, errors.As(err, &found) && c == nil && len(found) == len(wanted), "%v, %v", c, err)
		for i, e := range found {
			expect.True(t, strings.HasPrefix(e.Error(), "f.yaml:"+wanted[i]), "got %s\nwant %s", e, wanted[i])
		}
	})
}

// TestDuplicateDomain: the reference's "duplicate domain 'd' in config file", unless files are merged.
func TestDuplicateDomain(t *testing.T) {
	one := File{"a.yaml", []byte(
		"domain: d\ndescriptors: [{key: a, rate_limit: {unit: second, requests_per_unit: 1}}]\n")}
	two := File{"b.yaml", []byte(
		"domain: d\ndescriptors: [{key: b, rate_limit: {unit: second, requests_per_unit: 2}}]\n")}
	_, err := Parse([]File{one, two}, Options{})
	expect.True(t, err != nil &&
		strings.HasPrefix(err.Error(), "b.yaml:1:9: domain: is the domain of a.yaml, line 1, too"), "%v", err)
	c := must.Value(Parse([]File{one, two}, Options{MergeDomains: true}))(t)
	domains, limits := c.Domains()
	expect.True(t, domains == 1 && limits == 2, "%d domains, %d limits", domains, limits)
	// The reference: merged domains keep their composite keys apart.
	_, err = Parse([]File{one, {"c.yaml", one.Data}}, Options{MergeDomains: true})
	expect.True(t, err != nil && strings.HasPrefix(err.Error(),
		"c.yaml:2:21: descriptors[0]: is the second descriptor of the composite key") &&
		strings.Contains(err.Error(), "after that on line 2 of a.yaml: remove one"), "%v", err)
}

const matching = `
domain: d
descriptors:
  - key: plain
    value: v
    rate_limit: {unit: second, requests_per_unit: 1}
  - key: plain
    rate_limit: {unit: MINUTE, requests_per_unit: 2}
  - key: wild
    value: ab*
    rate_limit: {unit: hour, requests_per_unit: 3}
  - key: wild
    value: a*
    rate_limit: {unit: day, requests_per_unit: 4}
  - key: wild
    value: abc
    rate_limit: {unit: week, requests_per_unit: 5}
  - key: wild
    rate_limit: {unit: month, requests_per_unit: 6}
  - key: nest
    descriptors:
      - key: inner
        value: x*
        rate_limit: {unit: year, requests_per_unit: 7}
      - key: inner
        descriptors:
          - key: deepest
            rate_limit: {unit: minute, requests_per_unit: 8, unit_multiplier: 5}
  - key: files
    value: files/*
    share_threshold: true
    rate_limit: {unit: second, requests_per_unit: 9}
  - key: code
    value: 404
    rate_limit: {unit: second, requests_per_unit: 10}
  - key: day
    value: 2026-03-01
    rate_limit: {unit: second, requests_per_unit: 16}
  - key: free
  - key: path
    value: "/v1/*/items/*"
    rate_limit: {unit: second, requests_per_unit: 11}
  - key: path
    value: "*.css"
    share_threshold: yes
    rate_limit: {unit: second, requests_per_unit: 12}
  - key: path
    value: "*mid*"
    rate_limit: {unit: second, requests_per_unit: 13}
  - key: path
    value: "aba*aba"
    rate_limit: {unit: second, requests_per_unit: 14}
  - key: truth
    value: true
    rate_limit: {unit: second, requests_per_unit: 15}
`

func entriesOf(pairs ...string) *common.RateLimitDescriptor {
	d := new(common.RateLimitDescriptor)
	for i := 0; i < len(pairs); i += 2 {
		d.Entries = append(d.Entries, &common.RateLimitDescriptor_Entry{Key: pairs[i], Value: pairs[i+1]})
	}
	return d
}

// TestMatch: the reference's GetLimit. At each level the key with the value comes first, then wildcards in the order of
// the file, then the key alone; and only a limit that is as deep as the request's descriptor counts.
func TestMatch(t *testing.T) {
	d := parse(t, matching).domain("d")
	for _, test := range []struct {
		entries []string
		want    uint32 // requests_per_unit; 0: no limit
		window  time.Duration
	}{
		{[]string{"plain", "v"}, 1, time.Second},
		{[]string{"plain", "w"}, 2, time.Minute}, // units in any case
		{[]string{"plain", ""}, 2, time.Minute},
		{[]string{"wild", "abc"}, 5, 7 * day}, // the value before any wildcard
		{[]string{"wild", "abd"}, 3, time.Hour},
		{[]string{"wild", "ax"}, 4, day},
		{[]string{"wild", "b"}, 6, 30 * day},
		{[]string{"nest", "1", "inner", "x1"}, 7, 365 * day},
		{[]string{"nest", "1", "inner", "y"}, 0, 0}, // no limit at this depth
		{[]string{"nest", "1"}, 0, 0},
		{[]string{"nest", "1", "inner", "y", "deepest", "z"}, 8, 5 * time.Minute},
		{[]string{"nest", "1", "inner", "x1", "deepest", "z"}, 0, 0}, // the wildcard has nothing below it
		{[]string{"plain", "v", "more", "x"}, 0, 0},                  // deeper than the configuration
		{[]string{"files", "files/a"}, 9, time.Second},
		{[]string{"code", "404"}, 10, time.Second}, // a number is the text that was written
		{[]string{"day", "2026-03-01"}, 16, time.Second},
		{[]string{"free", "x"}, 0, 0},
		{[]string{"none", "x"}, 0, 0},
		// An * stands for any text, anywhere in the value, and the first pattern of the file that matches counts.
		{[]string{"path", "/v1/a/items/b"}, 11, time.Second},
		{[]string{"path", "/v1//items/"}, 11, time.Second},
		{[]string{"path", "/v1/a/items/b.css"}, 11, time.Second},
		{[]string{"path", "/v1/items/"}, 0, 0}, // the texts between two * do not overlap
		{[]string{"path", "a.css"}, 12, time.Second},
		{[]string{"path", ".css"}, 12, time.Second},
		{[]string{"path", "a.css.gz"}, 0, 0},
		{[]string{"path", "amidst"}, 13, time.Second},
		{[]string{"path", "mid"}, 13, time.Second},
		{[]string{"path", "abaaba"}, 14, time.Second},
		{[]string{"path", "ababa"}, 0, 0}, // nor do those at the ends
		{[]string{"truth", "true"}, 15, time.Second},
		{nil, 0, 0},
	} {
		m, err := d.match(entriesOf(test.entries...))
		switch {
		case err != nil:
			t.Errorf("%q: %v", test.entries, err)
		case test.want == 0 && m.rule == nil:
		case m.rule == nil || m.perUnit != test.want || m.limit.Window != test.window || m.limit.Period != algo.Epoch ||
			m.limit.Limit != int64(test.want):
			t.Errorf("%q: %+v", test.entries, m.rule)
		}
	}
}

func TestStateKeys(t *testing.T) {
	d := parse(t, matching).domain("d")
	key := func(pairs ...string) string {
		m, err := d.match(entriesOf(pairs...))
		must.True(t, err == nil && m.rule != nil, "%q: %+v, %v", pairs, m, err)
		return m.key
	}
	expect.Equal(t, key("nest", "1", "inner", "x1"), "nest=1,inner=x1")
	// The reference: what shares a threshold has one counter, for the pattern.
	a, b := key("files", "files/a"), key("files", "files/b")
	expect.True(t, a == b && a == "files=files/*", "%s, %s", a, b)
	expect.Equal(t, key("files", "files/*"), "files=files/*", "a caller that sends the pattern")
	a, b = key("path", "a.css"), key("path", "b.css")
	expect.True(t, a == b && a == "path=*.css", "%s, %s", a, b)
	// Two descriptors never have one key, whatever is in them; and nothing raw that ends a line.
	seen := make(map[string][]string)
	odd := []string{"", "a", "=", ",", "%", "*", "(", ")", "a=b", "a,b=c", "%3D", "\n", "\r", "\x00", "\x7f", "ü", "a*"}
	add := func(pairs ...string) {
		k := stateKey(entriesOf(pairs...).Entries, nil)
		expect.True(t, !strings.ContainsAny(k, "\n\r\x00\x7f"), "%q: %q", pairs, k)
		have, twice := seen[k]
		expect.True(t, !twice, "%q and %q have the key %q", have, pairs, k)
		seen[k] = pairs
	}
	add()
	for _, a := range odd {
		for _, b := range odd {
			add(a, b)
			for _, c := range odd[:6] {
				add(a, b, c, b)
			}
		}
	}
}

// TestMetricNames: detailed_metric has all values of the request in the name, value_to_metric that of its own level.
func TestMetricNames(t *testing.T) {
	d := parse(t, `
domain: d
descriptors:
  - {key: a, detailed_metric: true, rate_limit: {unit: second, requests_per_unit: 1}}
  - key: b
    value_to_metric: true
    descriptors: [{key: c, rate_limit: {unit: second, requests_per_unit: 1}}, {key: e, value: f, rate_limit: {unit: second, requests_per_unit: 1}}]
  - {key: g, value: "x/*", share_threshold: true, detailed_metric: true, rate_limit: {unit: second, requests_per_unit: 1}}
  - {key: h, value: "x/*", rate_limit: {unit: second, requests_per_unit: 1}}
  - {key: i, value: "x/*", descriptors: [{key: j, value_to_metric: true, rate_limit: {unit: second, requests_per_unit: 1}}]}
  - {key: k, value: "x/*", share_threshold: true, descriptors: [{key: l, value_to_metric: true, rate_limit: {unit: second, requests_per_unit: 1}}]}
`).domain("d")
	for _, test := range []struct {
		entries []string
		want    string
	}{
		{[]string{"a", "1"}, "d.a_1"},
		{[]string{"a", ""}, "d.a_"},
		{[]string{"b", "1", "c", "2"}, "d.b_1.c"},
		{[]string{"b", "1", "e", "f"}, "d.b_1.e_f"},
		{[]string{"g", "x/y"}, "d.g_x/*"},
		{[]string{"h", "x/y"}, "d.h_x/*"},
		{[]string{"i", "x/y", "j", "1"}, "d.i_x/*.j_1"},
		{[]string{"k", "x/y", "l", "1"}, "d.k_x/*.l_1"},
	} {
		if m, err := d.match(entriesOf(test.entries...)); err != nil || m.metric != test.want {
			t.Errorf("%q: %q, %v, want %q", test.entries, m.metric, err, test.want)
		}
	}
}

func TestLooks(t *testing.T) {
	for text, want := range map[string]bool{
		"domain: d\n": true, "descriptors: []\n": true, "policies: []\n": false, "": false, "a: b\n": false, "[": false,
		"- domain\n": false,
	} {
		expect.Equal(t, Looks([]byte(text)), want, "%q", text)
	}
}

// TestWatch: a mistake in any file, or a file too many, leaves everything in force; files come and go.
func TestWatch(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		must.NoError(t, os.WriteFile(filepath.Join(dir, ".new"), []byte(text), 0o600))
		must.NoError(t, os.Rename(filepath.Join(dir, ".new"), filepath.Join(dir, name)))
	}
	write("a.yaml", "domain: a\n")
	write("notes.txt", "no YAML: [")
	must.NoError(t, os.Mkdir(filepath.Join(dir, "sub.yaml"), 0o700))
	changes, errs := make(chan *Config, 10), make(chan error, 10)
	w := must.Value(NewWatcher(dir, Options{}, func(c *Config) { changes <- c },
		func(err error) { errs <- err }))(t)
	w.Watch()
	defer w.Close()
	n, _ := w.Current().Domains()
	must.Equal(t, n, 1, "domains")
	write("b.yml", "domain: b\n")
	n, _ = (<-changes).Domains()
	expect.Equal(t, n, 2, "domains")
	write("c.yaml", "domain: b\n")
	err := <-errs
	expect.True(t, strings.Contains(err.Error(),
		filepath.Join(dir, "c.yaml")+":1:9: domain: is the domain of "+filepath.Join(dir, "b.yml")), "%v", err)
	n, _ = w.Current().Domains()
	expect.True(t, n == 2 && w.Err() != nil, "%d domains, %v", n, w.Err())
	must.NoError(t, errors.Join(os.Remove(filepath.Join(dir, "c.yaml")), os.Remove(filepath.Join(dir, "b.yml"))))
	for n := 0; n != 1; n, _ = w.Current().Domains() {
		<-changes
	}
	_, err = NewWatcher(filepath.Join(dir, "none"), Options{}, nil, nil)
	expect.True(t, err != nil, "a directory that does not exist")
}

// TestReadDirRejectsPipes: a pipe in the place of a file is no reason to do without its limits; a link to a directory
// is left out.
func TestReadDirRejectsPipes(t *testing.T) {
	dir := t.TempDir()
	must.NoError(t, os.Symlink(t.TempDir(), filepath.Join(dir, "link.yaml")))
	files, err := ReadDir(dir)
	expect.True(t, err == nil && len(files) == 0, "%v, %v", files, err)
	must.NoError(t, syscall.Mkfifo(filepath.Join(dir, "a.yaml"), 0o600))
	files, err = ReadDir(dir)
	expect.ErrorIs(t, err, reload.ErrNotRegular, "%v", files)
}

// FuzzParse reads anything as a file: it is a configuration or Errors with positions in the file, and what it matches
// is found again.
func FuzzParse(f *testing.F) {
	f.Add([]byte(matching), "wild", "abc")
	f.Add([]byte("domain: d\ncharge: all_or_none\ndescriptors: [{key: a, metadata: {x: [1, {y: null}]}, rate_limit: {unlimited: true, replaces: [{name: b}]}}]\n"), "a", "")
	f.Add([]byte("domain: &a d\ndescriptors: &b [{key: *a, descriptors: *b}]\n"), "d", "\n")
	f.Fuzz(func(t *testing.T, data []byte, key, value string) {
		if len(data) > 1<<12 {
			return
		}
		Looks(data)
		c, err := Parse([]File{{"f", data}}, Options{MergeDomains: true})
		if err != nil {
			haveLines(t, err)
			return
		}
		for _, d := range c.domains {
			m, err := d.match(entriesOf(key, value, key, value))
			must.True(t, err == nil && (m.rule == nil || m.key != "" && (m.limit == nil || m.limit.Validate() == nil)),
				"%+v, %v", m, err)
		}
	})
}

// haveLines fails unless an error is of mistakes with positions.
func haveLines(t *testing.T, err error) {
	t.Helper()
	var found strictyaml.Errors
	must.True(t, errors.As(err, &found) && len(found) != 0, "%v", err)
	for _, e := range found {
		must.True(t, e.Line >= 1 && e.Column >= 1 && e.Message != "" && !strings.Contains(e.Message, "\n"), "%+v", e)
	}
}

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

// FuzzQuotaBuckets reads anything as quota_buckets: they are mistakes with positions, or buckets within bounds, and
// each id that fits one is found.
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
				_, found := c.Quota("d", id)
				must.True(t, found, "%v is not found", id)
			}
		}
	})
}
