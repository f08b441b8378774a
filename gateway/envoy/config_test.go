package envoy

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/reload"
	"github.com/weirlimit/weir/internal/strictyaml"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

func parse(t testing.TB, text string) *Config {
	t.Helper()
	c := must.Value(Parse([]File{{"f.yaml", []byte(text)}}, Options{}))(t)
	return c
}

// TestMistakes: each error that the reference reports when it loads a file, and those beyond it, with a position.
func TestMistakes(t *testing.T) {
	for _, test := range []struct {
		name, text string
		want       []string // each the beginning of one mistake, without the file's name
	}{
		// The reference: "config file cannot have empty domain".
		{"empty domain", "domain: ''\ndescriptors: []\n", []string{"1:9: domain: is empty"}},
		{"no domain", "descriptors: []\n", []string{"1:1: domain: is missing"}},
		{"empty file", "", []string{"1:1: domain: is missing"}},
		{"only a comment", "# nothing\n", []string{"1:1: domain: is missing"}},
		// The reference: "descriptor has empty key".
		{"empty key", "domain: d\ndescriptors:\n  - key: ''\n  - value: v\n", []string{"3:10: descriptors[0].key: is empty", "4:5: descriptors[1].key: is missing"}},
		// The reference: "duplicate descriptor composite key 'd.a_b'", whichever way it comes about.
		{"duplicate composite key", "domain: d\ndescriptors:\n  - {key: a, value: b}\n  - {key: a_b}\n",
			[]string{`4:11: descriptors[1]: is the second descriptor of the composite key "d.a_b", after that on line 3`}},
		{"duplicate nested key", "domain: d\ndescriptors:\n  - key: a\n    descriptors:\n      - key: b\n      - key: b\n",
			[]string{`6:14: descriptors[0].descriptors[1]: is the second descriptor of the composite key "d.a.b"`}},
		// The reference: "should not specify rate limit unit when unlimited".
		{"unlimited with a unit", "domain: d\ndescriptors:\n  - {key: a, rate_limit: {unlimited: true, unit: second}}\n",
			[]string{"3:44: descriptors[0].rate_limit.unit: stands beside unlimited"}},
		// The reference: "invalid rate limit unit 'fortnight'".
		{"bad unit", "domain: d\ndescriptors:\n  - {key: a, rate_limit: {unit: fortnight, requests_per_unit: 1}}\n",
			[]string{`3:33: descriptors[0].rate_limit.unit: must be one of second, minute, hour, day, week, month and year, not "fortnight"`}},
		{"unit unknown", "domain: d\ndescriptors:\n  - {key: a, rate_limit: {unit: unknown, requests_per_unit: 1}}\n",
			[]string{"3:33: descriptors[0].rate_limit.unit: must be one of"}},
		{"no unit", "domain: d\ndescriptors:\n  - {key: a, rate_limit: {requests_per_unit: 1}}\n", []string{"3:26: descriptors[0].rate_limit.unit: is missing"}},
		// The reference: "invalid unit multiplier of 0".
		{"zero multiplier", "domain: d\ndescriptors:\n  - {key: a, rate_limit: {unit: second, unit_multiplier: 0}}\n",
			[]string{"3:58: descriptors[0].rate_limit.unit_multiplier: must not be zero"}},
		{"multiplier too large", "domain: d\ndescriptors:\n  - {key: a, rate_limit: {unit: year, unit_multiplier: 2}}\n",
			[]string{"3:56: descriptors[0].rate_limit.unit_multiplier: makes a window longer than the longest"}},
		// The reference: "should not have an empty replaces entry", "replaces should not contain name of same descriptor".
		{"replaces", "domain: d\ndescriptors:\n  - key: a\n    rate_limit:\n      unit: second\n      name: me\n      replaces: [{name: ''}, {name: me}, {}]\n",
			[]string{"7:25: descriptors[0].rate_limit.replaces[0].name: is empty", "7:37: descriptors[0].rate_limit.replaces[1].name: is the name of this very limit",
				"7:42: descriptors[0].rate_limit.replaces[2].name: is missing"}},
		// The reference: "config error, yaml file contains list of type other than map".
		{"list of texts", "domain: d\ndescriptors:\n  - a\n", []string{"3:5: descriptors[0]: must be a map of fields"}},
		{"list of lists", "domain: d\ndescriptors: [[]]\n", []string{"2:15: descriptors[0]: must be a map of fields"}},
		{"no list", "domain: d\ndescriptors: {key: a}\n", []string{"2:14: descriptors: must be a list"}},
		// The reference: "config error, unknown key 'ratelimit'".
		{"misspelt key", "domain: d\ndescriptors:\n  - {key: a, ratelimit: {unit: second}}\n", []string{"3:14: descriptors[0].ratelimit: unknown field: did you mean rate_limit?"}},
		{"misspelt key of a limit", "domain: d\ndescriptors:\n  - {key: a, rate_limit: {unit: second, request_per_unit: 3}}\n",
			[]string{"3:41: descriptors[0].rate_limit.request_per_unit: unknown field: did you mean requests_per_unit?"}},
		// The reference: "config error, key is not of type string".
		{"a key that is no text", "domain: d\n0: a\n", []string{"2:1: 0: unknown field"}},
		{"a list for a key", "domain: d\n[a]: b\n", []string{"2:1: a field's name must be text"}},
		// The reference: "error loading config file: ...".
		{"no YAML", "domain: [\n", []string{"1:9: is not valid YAML"}},
		{"a number below 0", "domain: d\ndescriptors:\n  - {key: a, rate_limit: {unit: second, requests_per_unit: -1}}\n",
			[]string{"3:60: descriptors[0].rate_limit.requests_per_unit: must not be negative"}},
		{"a number above 32 bits", "domain: d\ndescriptors:\n  - {key: a, rate_limit: {unit: second, requests_per_unit: 4294967296}}\n",
			[]string{"3:60: descriptors[0].rate_limit.requests_per_unit: is too large"}},
		{"text for a flag", "domain: d\ndescriptors:\n  - {key: a, shadow_mode: 'yes'}\n", []string{"3:27: descriptors[0].shadow_mode: must be true or false"}},
		// The reference: "share_threshold can only be used with wildcard values (containing '*')".
		{"share_threshold without a wildcard", "domain: d\ndescriptors:\n  - {key: a, value: b, share_threshold: true}\n",
			[]string{"3:24: descriptors[0].share_threshold: is for values with an *"}},
		{"metadata that is no map", "domain: d\ndescriptors:\n  - {key: a, metadata: [1]}\n", []string{"3:24: descriptors[0].metadata: must be a map"}},
		// What the reference does not have.
		{"algorithm", "domain: d\ndescriptors:\n  - {key: a, rate_limit: {unit: second, requests_per_unit: 1, algorithm: leaky_bucket}}\n",
			[]string{"3:74: descriptors[0].rate_limit.algorithm: must be one of"}},
		{"carry_debt of a log", "domain: d\ndescriptors:\n  - {key: a, rate_limit: {unit: second, requests_per_unit: 1, algorithm: sliding_log, carry_debt: true}}\n",
			[]string{"3:87: descriptors[0].rate_limit.carry_debt: is for fixed_window only"}},
		{"policy beside a unit", "domain: d\ndescriptors:\n  - {key: a, rate_limit: {unit: second, policy: p}}\n", []string{"3:27: descriptors[0].rate_limit.unit: stands beside policy"}},
		{"a policy's bad name", "domain: d\ndescriptors:\n  - {key: a, rate_limit: {policy: 'a b'}}\n", []string{"3:35: descriptors[0].rate_limit.policy: is not a policy's name"}},
		{"charge", "domain: d\ncharge: sometimes\n", []string{"2:9: charge: must be one of always, independent, all_or_none"}},
		{"a list in itself", "domain: d\ndescriptors: &l\n  - {key: a, descriptors: *l}\n  - {key: b, descriptors: *l}\n",
			[]string{"3:14: descriptors[0].descriptors: is an alias of a list that it is in itself", "4:14: descriptors[1].descriptors: is an alias of a list"}},
		{"two documents", "domain: d\n---\ndomain: e\n", []string{"2:1: a second YAML document"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c, err := Parse([]File{{"f.yaml", []byte(test.text)}}, Options{})
			var found strictyaml.Errors
			must.True(t, errors.As(err, &found) && c == nil && len(found) == len(test.want),
				"%v, %v, want %q", c, err, test.want)
			for i, e := range found {
				if got := e.Error(); !strings.HasPrefix(got, "f.yaml:"+test.want[i]) {
					t.Errorf("got %s\nwant f.yaml:%s", got, test.want[i])
				}
			}
		})
	}
}

// TestDuplicateDomain: the reference's "duplicate domain 'd' in config file", unless files are merged.
func TestDuplicateDomain(t *testing.T) {
	one := File{"a.yaml", []byte("domain: d\ndescriptors: [{key: a, rate_limit: {unit: second, requests_per_unit: 1}}]\n")}
	two := File{"b.yaml", []byte("domain: d\ndescriptors: [{key: b, rate_limit: {unit: second, requests_per_unit: 2}}]\n")}
	if _, err := Parse([]File{one, two}, Options{}); err == nil || !strings.HasPrefix(err.Error(), "b.yaml:1:9: domain: is the domain of a.yaml, line 1, too") {
		t.Errorf("%v", err)
	}
	c, err := Parse([]File{one, two}, Options{MergeDomains: true})
	must.NoError(t, err)
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

// TestMatch: the reference's GetLimit. At each level the key with the value comes first, then wildcards in the order of the file,
// then the key alone; and only a limit that is as deep as the request's descriptor counts.
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
		case m.rule == nil || m.perUnit != test.want || m.limit.Window != test.window || m.limit.Period != algo.Epoch || m.limit.Limit != int64(test.want):
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
	if a, b := key("files", "files/a"), key("files", "files/b"); a != b || a != "files=files/*" {
		t.Errorf("%s, %s", a, b)
	}
	if a, b := key("path", "a.css"), key("path", "b.css"); a != b || a != "path=*.css" {
		t.Errorf("%s, %s", a, b)
	}
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

// TestOverride: the reference takes the limit that a request brings along in place of any, for a domain that it knows.
func TestOverride(t *testing.T) {
	d := parse(t, matching).domain("d")
	in := entriesOf("plain", "v")
	in.Limit = &common.RateLimitDescriptor_RateLimitOverride{RequestsPerUnit: 42, Unit: typev3.RateLimitUnit_HOUR}
	m, err := d.match(in)
	expect.True(t, err == nil && m.perUnit == 42 && m.limit.Window == time.Hour && m.key == "plain=v",
		"%+v, %v", m, err)
	for _, unit := range []typev3.RateLimitUnit{typev3.RateLimitUnit_UNKNOWN, 99, -1} {
		in.Limit.Unit = unit
		_, err := d.match(in)
		expect.True(t, err != nil, "unit %v taken", unit)
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
`).domain("d")
	for _, test := range []struct {
		entries []string
		want    string
	}{
		{[]string{"a", "1"}, "d.a_1"},
		{[]string{"b", "1", "c", "2"}, "d.b_1.c"},
		{[]string{"b", "1", "e", "f"}, "d.b_1.e_f"},
		{[]string{"g", "x/y"}, "d.g_x/*"},
		{[]string{"h", "x/y"}, "d.h_x/*"},
	} {
		if m, err := d.match(entriesOf(test.entries...)); err != nil || m.metric != test.want {
			t.Errorf("%q: %q, %v, want %q", test.entries, m.metric, err, test.want)
		}
	}
}

func TestLooks(t *testing.T) {
	for text, want := range map[string]bool{
		"domain: d\n": true, "descriptors: []\n": true, "policies: []\n": false, "": false, "a: b\n": false, "[": false, "- domain\n": false,
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
	w, err := NewWatcher(dir, WatchConfig{OnChange: func(c *Config) { changes <- c }, OnError: func(err error) { errs <- err }})
	must.NoError(t, err)
	w.Watch()
	defer w.Close()
	n, _ := w.Current().Domains()
	must.Equal(t, n, 1, "domains")
	write("b.yml", "domain: b\n")
	n, _ = (<-changes).Domains()
	expect.Equal(t, n, 2, "domains")
	write("c.yaml", "domain: b\n")
	err = <-errs
	expect.True(t, strings.Contains(err.Error(),
		filepath.Join(dir, "c.yaml")+":1:9: domain: is the domain of "+filepath.Join(dir, "b.yml")), "%v", err)
	if n, _ := w.Current().Domains(); n != 2 || w.Err() == nil {
		t.Errorf("%d domains, %v", n, w.Err())
	}
	must.NoError(t, errors.Join(os.Remove(filepath.Join(dir, "c.yaml")), os.Remove(filepath.Join(dir, "b.yml"))))
	for n := 0; n != 1; n, _ = w.Current().Domains() {
		<-changes
	}
	_, err = NewWatcher(filepath.Join(dir, "none"), WatchConfig{})
	expect.True(t, err != nil, "a directory that does not exist")
}

// TestReadDirRejectsPipes: a pipe in the place of a file is no reason to do without its limits; a link to a directory is left out.
func TestReadDirRejectsPipes(t *testing.T) {
	dir := t.TempDir()
	must.NoError(t, os.Symlink(t.TempDir(), filepath.Join(dir, "link.yaml")))
	files, err := ReadDir(dir)
	expect.True(t, err == nil && len(files) == 0, "%v, %v", files, err)
	must.NoError(t, syscall.Mkfifo(filepath.Join(dir, "a.yaml"), 0o600))
	files, err = ReadDir(dir)
	expect.ErrorIs(t, err, reload.ErrNotRegular, "%v", files)
}

// FuzzParse reads anything as a file: it is a configuration or Errors with positions in the file, and what it matches is found again.
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
