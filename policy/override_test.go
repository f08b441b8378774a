package policy

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

const overriddenFile = `
policies:
  - name: login
    algorithm: sliding_log
    limit: 5
    window: 1m
    overrides:
      - {key: alice, limit: 10}
      - {prefix: vip-, limit: 20}
      - {prefix: vip-gold-, limit: 30}
  - name: api
    algorithm: sliding_log
    limits: [10/1s, 100/1m]
  - name: jobs
    algorithm: concurrency
    limit: 3
    ttl: 30s
  - name: bucket
    algorithm: token_bucket
    limit: 10
    window: 1s
    capacity: 20
  - name: banned
    algorithm: sliding_log
    limit: 5
    window: 1m
    ban: 1h
  - name: open
    limit: -1
`

// spell is what a rule says, briefly.
func spell(r *Rule) string {
	switch {
	case r.Unlimited:
		return "unlimited"
	case r.Blocked:
		return "blocked"
	}
	var parts []string
	for _, l := range r.Limits {
		parts = append(parts, fmt.Sprintf("%v %d/%v", l.Algorithm, l.Limit, l.Window))
	}
	return strings.Join(parts, ", ")
}

// TestWithOverrides: exactly the key counts before the longest prefix, and for the same key or prefix the operators'
// before the file's.
func TestWithOverrides(t *testing.T) {
	file := mustParse(t, overriddenFile)
	list := []Override{
		{Policy: "login", Key: "alice", Settings: `{"limit":500}`},
		{Policy: "login", Prefix: "vip-", Settings: `{"limit":7,"window":"2m"}`},
		{Policy: "login", Key: "vip-gold-x",
			Settings: `{"limits":["1/1s",{"limit":2,"window":"1h","algorithm":"fixed_window"}]}`},
		{Policy: "login", Key: "mallory", Settings: `{"blocked":true}`},
		{Policy: "api", Key: "alice", Settings: `{"unlimited":true}`},
		{Policy: "jobs", Key: "alice", Settings: `{"limit":9}`},
		{Policy: "open", Key: "alice", Settings: `{"limits":["3/1m"]}`},
		{Policy: "gone", Key: "alice", Settings: `{"limit":1}`},
		{Policy: "api", Key: "bob", Settings: `{"limit":1}`},
	}
	set, refused := file.WithOverrides(list, nil)
	for i, err := range refused {
		expect.Equal(t, (err != nil), i >= 7, "%d: %v", i, err)
	}
	for _, c := range []struct {
		policy, key, want string
		api               bool
	}{
		{"login", "alice", "sliding_log 500/1m0s", true},
		{"login", "bob", "sliding_log 5/1m0s", false},
		{"login", "vip-1", "sliding_log 7/2m0s", true},
		{"login", "vip-gold-1", "sliding_log 30/1m0s", false},
		{"login", "vip-gold-x", "sliding_log 1/1s, fixed_window 2/1h0m0s", true},
		{"login", "mallory", "blocked", true},
		{"api", "alice", "unlimited", true},
		{"api", "bob", "sliding_log 10/1s, sliding_log 100/1m0s", false},
		{"jobs", "alice", "concurrency 9/30s", true},
		{"open", "alice", "sliding_log 3/1m0s", true},
		{"open", "bob", "unlimited", false},
	} {
		p, _ := set.Get(c.policy)
		r := p.Rule(c.key)
		if got := spell(r); got != c.want || r.API != c.api {
			t.Errorf("%s %s: %s (API %t), want %s", c.policy, c.key, got, r.API, c.want)
		}
	}
	expect.Equal(t, set.Hash(), file.Hash(), "the hash is not the file's")
	before, _ := file.Get("login")
	expect.True(t, spell(before.Rule("alice")) == "sliding_log 10/1m0s" && len(before.Rules()) == 4,
		"the file's set has changed")
	if login, _ := set.Get("login"); len(login.Rules()) != 1+3+2 {
		t.Errorf("%d rules", len(login.Rules()))
	}
	again, _ := file.WithOverrides(list[:1], set)
	login, _ := again.Get("login")
	expect.True(t, spell(login.Rule("alice")) == "sliding_log 500/1m0s" &&
		spell(login.Rule("vip-1")) == "sliding_log 20/1m0s" && !login.Rule("mallory").Blocked,
		"overrides that are gone are still in force")
	same, _ := file.WithOverrides(nil, again)
	expect.Equal(t, same, file, "without overrides it is another set")
	// Another file, under which the same settings mean something else.
	other := mustParse(t, strings.ReplaceAll(overriddenFile, "window: 1m", "window: 3m"))
	moved, _ := other.WithOverrides(list, set)
	if login, _ := moved.Get("login"); spell(login.Rule("alice")) != "sliding_log 500/3m0s" {
		t.Errorf("%s: taken from the other file", spell(login.Rule("alice")))
	}
	var none *Set
	set, refused = none.WithOverrides(list[:1], nil)
	expect.True(t, refused[0] != nil && len(set.Policies()) == 0, "no policies")
}

// TestAccepts: what does not suit is an error that names the field.
func TestAccepts(t *testing.T) {
	file := mustParse(t, overriddenFile)
	long := strings.Repeat("k", limit.MaxKey+1)
	for _, c := range []struct {
		policy, key, prefix, settings string
		kind                          limit.Kind
		field                         string
	}{
		{"login", "a", "", `{"limit":5}`, 0, ""},
		{"login", "a\nb", "", `{"limit":5}`, 0, ""},
		{"bucket", "a", "", `{"limit":50,"capacity":50}`, 0, ""},
		{"login", "a", "", `{"limit":-1}`, 0, ""},
		{"", "a", "", `{"limit":5}`, limit.Invalid, "policy"},
		{"lo gin", "a", "", `{"limit":5}`, limit.Invalid, "policy"},
		{"gone", "a", "", `{"limit":5}`, limit.NotFound, "policy"},
		{"login", "", "", `{"limit":5}`, limit.Invalid, "key"},
		{"login", "a", "b", `{"limit":5}`, limit.Invalid, "prefix"},
		{"login", "\xff", "", `{"limit":5}`, limit.Invalid, "key"},
		{"login", "", "\xff", `{"limit":5}`, limit.Invalid, "prefix"},
		{"login", long, "", `{"limit":5}`, limit.TooLarge, "key"},
		{"login", "", long, `{"limit":5}`, limit.TooLarge, "prefix"},
		{"login", "a", "", `{"limits":["` + strings.Repeat(" ", MaxOverrideSettings) + `"]}`, limit.TooLarge,
			"settings"},
		{"login", "a", "", "", limit.Invalid, "settings"},
		{"login", "a", "", "{}", limit.Invalid, "settings"},
		{"login", "a", "", "[]", limit.Invalid, "settings"},
		{"login", "a", "", `{"limit":`, limit.Invalid, "settings"},
		{"login", "a", "", `{"limit":0}`, limit.Invalid, "settings.limit"},
		{"login", "a", "", `{"limit":"5"}`, limit.Invalid, "settings.limit"},
		{"login", "a", "", `{"limit":5.5}`, limit.Invalid, "settings.limit"},
		{"login", "a", "", `{"limit":1e3}`, limit.Invalid, "settings.limit"},
		{"login", "a", "", `{"limit":99999999999999999999}`, limit.Invalid, "settings.limit"},
		{"login", "a", "", `{"limit":5,"limit":6}`, limit.Invalid, "settings.limit"},
		{"login", "a", "", `{"window":"soon"}`, limit.Invalid, "settings.window"},
		{"login", "a", "", `{"ttl":"1m"}`, limit.Invalid, "settings.ttl"},
		{"login", "a", "", `{"capacity":5}`, limit.Invalid, "settings.capacity"},
		{"login", "a", "", `{"algorithm":"sliding_log"}`, limit.Invalid, "settings.algorithm"},
		{"login", "a", "", `{"key":"b","limit":1}`, limit.Invalid, "settings.key"},
		{"login", "a", "", `{"unlimited":false}`, limit.Invalid, "settings.unlimited"},
		{"login", "a", "", `{"unlimited":true,"blocked":true}`, limit.Invalid, "settings"},
		{"login", "a", "", `{"limits":[]}`, limit.Invalid, "settings.limits"},
		{"login", "a", "", `{"limits":["1/1s","x"]}`, limit.Invalid, "settings.limits[1]"},
		{"login", "a", "", `{"limits":["1/1s"],"limit":2}`, limit.Invalid, "settings"},
		{"api", "a", "", `{"limit":5}`, limit.Invalid, "settings.limit"},
		{"jobs", "a", "", `{"limits":["10/1s"]}`, limit.Invalid, "settings.limits[0].window"},
		{"jobs", "a", "", `{"limits":[{"limit":5,"window":"1s","algorithm":"sliding_log"}]}`, limit.Invalid,
			"settings.limits"},
		{"jobs", "a", "", `{"window":"1s"}`, limit.Invalid, "settings.window"},
		{"bucket", "a", "", `{"limit":50}`, limit.Invalid, "settings.limit"},
		{"banned", "a", "", `{"limits":[{"limit":5,"window":"1s","count_denied":true}]}`, limit.Invalid,
			"settings.limits"},
		{"open", "a", "", `{"limit":5}`, limit.Invalid, "settings.limit"},
	} {
		o := Override{c.policy, c.key, c.prefix, c.settings}
		err := file.Accepts(o)
		if c.kind == 0 {
			expect.Equal(t, err, nil, "%+v", o)
			continue
		}
		expect.True(t, err != nil && err.Kind == c.kind && err.Field == c.field,
			"%.200q: %v (kind %v), want kind %v in %s", o, err, err, c.kind, c.field)
	}
}

// FuzzAccepts: no settings make it panic, and what is accepted is a rule that package algo takes.
func FuzzAccepts(f *testing.F) {
	f.Add("login", `{"limit":5}`)
	f.Add("api", `{"limits":["1/1s",{"limit":2,"window":"1h","algorithm":"fixed_window"}]}`)
	f.Add("jobs", `{"ttl":"1m"}`)
	f.Add("open", `{"blocked":true}`)
	f.Add("login", `{"limits":[{"limit":5,"window":"day","align":"calendar","algorithm":"fixed_window","time_zone":"Europe/Berlin"}]}`)
	f.Add("bucket", "limit: &a 5\ncapacity: *a")
	f.Fuzz(func(t *testing.T, policy, settings string) {
		file := mustParse(t, overriddenFile)
		o := Override{Policy: policy, Key: "k", Settings: settings}
		if err := file.Accepts(o); err != nil {
			expect.True(t, err.Field != "" && err.Message != "", "%+v", err)
			return
		}
		set, refused := file.WithOverrides([]Override{o}, nil)
		p, ok := set.Get(policy)
		must.True(t, refused[0] == nil && ok, "accepted, and then not: %v", refused[0])
		r := p.Rule("k")
		must.True(t, r.API && (r.Limits == nil) != (!r.Unlimited && !r.Blocked), "%+v", r)
		if r.Limits != nil {
			expect.NoError(t, algo.Limits(r.Limits).Validate())
			expect.Equal(t, (r.Limits[0].Algorithm == algo.Concurrency), p.Concurrency,
				"concurrency and other limits are mixed")
		}
		again, _ := file.WithOverrides([]Override{o}, set)
		p, _ = again.Get(policy)
		expect.NoDiff(t, cmp.Diff(spell(r), spell(p.Rule("k"))))
	})
}
