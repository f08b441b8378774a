package policy

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	_ "time/tzdata"

	"github.com/google/go-cmp/cmp"
	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/strictyaml"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

var update = flag.Bool("update", false, "rewrite testdata/mistakes.txt with what Parse says now")

func mustParse(t testing.TB, text string) *Set {
	t.Helper()
	s := must.Value(Parse("policies.yaml", []byte(text)))(t)
	return s
}

func mustGet(t testing.TB, s *Set, name string) *Policy {
	t.Helper()
	p, ok := s.Get(name)
	must.True(t, ok, "no policy %q", name)
	return p
}

// parseErrors returns what Parse says without the file's name, which is in every line.
func parseErrors(t *testing.T, text string) []string {
	t.Helper()
	_, err := Parse("f", []byte(text))
	if err == nil {
		return nil
	}
	var list Errors
	must.True(t, errors.As(err, &list), "not Errors but %T: %v", err, err)
	var lines []string
	for _, e := range list {
		lines = append(lines, strings.TrimPrefix(e.Error(), "f:"))
	}
	return lines
}

// TestMistakes compares every message and position with testdata/mistakes.txt, which is meant to be read.
func TestMistakes(t *testing.T) {
	const file, begin, middle = "testdata/mistakes.txt", "=== ", "--- mistakes\n"
	data := must.Value(os.ReadFile(file))(t)
	var fresh strings.Builder
	for i, c := range strings.Split("\n"+string(data), "\n"+begin) {
		if i == 0 {
			continue
		}
		title, rest, _ := strings.Cut(c, "\n")
		text, want, ok := strings.Cut(rest+"\n", middle)
		must.True(t, ok, "%s: no line %q", title, middle)
		t.Run(title, func(t *testing.T) {
			got := strings.Join(parseErrors(t, text), "\n")
			want := strings.TrimSpace(want)
			if !*update && got != want || got == "" {
				t.Errorf("-want +got:\n%s", cmp.Diff(strings.Split(want, "\n"), strings.Split(got, "\n")))
			}
			fmt.Fprintf(&fresh, "%s%s\n%s%s%s\n", begin, title, text, middle, got)
		})
	}
	if *update && !t.Failed() {
		must.NoError(t, os.WriteFile(file, []byte(fresh.String()), 0o644))
	}
}

// TestMistakesOfBytes is for what a text file cannot hold, or should not.
func TestMistakesOfBytes(t *testing.T) {
	long := strings.Repeat("n", 129)
	for _, test := range []struct {
		title, text string
		want        []string // beginnings
	}{
		{"not UTF-8", "policies:\n  - name: é\xff\n",
			[]string{"2:12: is not valid YAML: invalid leading UTF-8 octet"}},
		{"UTF-8 byte order mark", "\ufeffpolicies: 5\n", []string{"1:11: policies: must be a list"}},
		{"UTF-16", "\xff\xfep\x00", []string{"1:1: the file is in UTF-16: save it as UTF-8"}},
		{"UTF-16, the other way round", "\xfe\xff\x00p", []string{"1:1: the file is in UTF-16: save it as UTF-8"}},
		{"too large", strings.Repeat("#", 16<<20+1),
			[]string{"1:1: the file is too large: 16777217 bytes, where 16777216 are allowed"}},
		{"too deep", "policies: " + strings.Repeat("[", 20000),
			[]string{"1:10011: is not valid YAML: exceeded max depth of 10000"}},
		{"a syntax error in a large file", strings.Repeat("#\n", 1<<18) + "a: b: c\n",
			[]string{"262145:5: is not valid YAML: mapping values"}},
		{"a control character", "policies: []\n# a \a bell\n",
			[]string{"2:5: is not valid YAML: control characters are not allowed"}},
		{"a long name", "policies: [{name: " + long + ", limits: [1/1s]}]",
			[]string{"1:19: policies[0].name: must have 1 to 128 characters"}},
		{"a long key", "policies: [{name: a, limits: [1/1s], overrides: [{key: " + strings.Repeat("é", 513) +
			", blocked: true}]}]",
			[]string{"1:56: policies[0].overrides[0].key: must have 1 to 1024 bytes, and has 1026"}},
		{"a long field", long + ": 1", []string{`1:1: "` + long[:40] + `…": unknown field`}},
		{"a long number", "policies: [{name: a, limits: [{limit: 1" + strings.Repeat("0", 99) + ", window: 1s}]}]",
			[]string{"1:39: policies[0].limits[0].limit: must be from 1 to 9007199254740992"}},
		{"Windows line ends", "policies:\r\n  - name: a\r\n    limits: [1/0s]\r\n",
			[]string{"3:14: policies[0].limits[0].window: must be from 1ms to 366d"}},
		{"columns are characters", "policies: [{name: é, shadow: 1}]", []string{
			"1:12: policies[0].limit: is missing", "1:19: policies[0].name: must have 1 to 128 characters",
			"1:30: policies[0].shadow: must be true or false"}},
	} {
		t.Run(test.title, func(t *testing.T) {
			got := parseErrors(t, test.text)
			must.Equal(t, len(got), len(test.want), "got %q, want %q", got, test.want)
			for i := range got {
				expect.True(t, strings.HasPrefix(got[i], test.want[i]), "got %q, want %q", got[i], test.want[i])
			}
		})
	}
}

// TestAliases: a value may be used again, but a small file may not become a large one by that.
func TestAliases(t *testing.T) {
	s := mustParse(t, `policies:
  - name: a
    limits: &limits [10/1s, 100/1m]
    overrides: &overrides [{key: admin, unlimited: true}]
  - name: b
    limits: *limits
    overrides: *overrides
`)
	for _, p := range s.Policies() {
		expect.True(t, len(p.Limits) == 2 && p.Rule("admin").Unlimited, "%s: %+v", p.Name, p)
	}

	var bomb strings.Builder
	bomb.WriteString("policies:\n  - {name: first, limits: [1/1s], overrides: &o [{key: k, blocked: true}")
	for i := range 1000 {
		fmt.Fprintf(&bomb, ", {key: k%d, blocked: true}", i)
	}
	bomb.WriteString("]}\n")
	for i := range 1000 {
		fmt.Fprintf(&bomb, "  - {name: p%d, limits: [1/1s], overrides: *o}\n", i)
	}
	got := parseErrors(t, bomb.String())
	expect.True(t, len(got) == 1 && strings.Contains(got[0], "aliases repeat too much of the file"), "got %q", got)
}

func TestManyMistakes(t *testing.T) {
	got := parseErrors(t, "policies: ["+strings.Repeat("x,\n", 5000)+"]")
	if len(got) != strictyaml.MaxErrors+1 ||
		got[strictyaml.MaxErrors] != "1001:1: too many mistakes: this one and the rest are not listed" {
		t.Errorf("%d, the last %q", len(got), got[len(got)-1])
	}
}

func TestEmpty(t *testing.T) {
	for _, text := range []string{"", "\n", "# nothing yet\n", "---\n", "---\n...\n", "{}", "policies:", "policies: []",
		"policies: null # later\n", "~"} {
		s, err := Parse("f", []byte(text))
		if err != nil || len(s.Policies()) != 0 {
			t.Errorf("%q: %v %v", text, s, err)
		} else if s.Hash() != (*Set)(nil).Hash() || s.Hash() != new(Set).Hash() {
			t.Errorf("%q: hash %s is not that of the empty set", text, s.Hash())
		}
	}
	var none *Set
	_, ok := none.Get("a")
	expect.True(t, !ok && none.Policies() == nil && len(none.Hash()) == 32, "a nil Set is not an empty one")
	var zero Set
	_, ok = zero.Get("a")
	expect.True(t, !ok && len(zero.Policies()) == 0, "the zero Set is not empty")
}

// documented is an example with a policy of every kind.
const documented = `policies:
  - name: login             # required, unique
    algorithm: sliding_log  # see semantics.md; or limits: [10/1s, 1000/1h]
    limit: 5
    window: 1m
    overrides:
      - {key: admin, unlimited: true}
      - {prefix: "partner:", limit: 50}
    on_error: open          # open | closed; default open, closed under strict
    shadow: false           # decide, count, report, but admit
  - name: payout
    algorithm: sliding_log
    limit: 100
    window: 1m
    consistency: strict     # available (default) | strict (needs voters)
    durability: escrow      # none | async (default) | escrow | sync
  - name: report
    algorithm: fixed_window
    limit: 1000
    align: calendar
    window: day             # minute hour day week month year
    time_zone: Europe/Berlin
`

// TestGuarantees: what a policy says of the failure of nodes and of the connections between them.
func TestGuarantees(t *testing.T) {
	for _, test := range []struct {
		fields string
		want   Policy
	}{
		{"limits: [1/1s]", Policy{}},
		{"limits: [1/1s], durability: async, consistency: available, cold_start: open, on_error: open", Policy{}},
		{"limits: [1/1s], durability: none", Policy{Durability: None}},
		{"limits: [1/1s], durability: escrow, cold_start: closed", Policy{Durability: Escrow, ColdStart: ColdClosed}},
		{"limits: [1/1s], on_error: share", Policy{OnError: Share}},
		{"limits: [1/1s], durability: sync, on_error: closed", Policy{Durability: Sync, OnError: Closed}},
		{"limits: [1/1s], durability: escrow, consistency: strict",
			Policy{Durability: Escrow, Strict: true, OnError: Closed}},
		{"limits: [1/1s], durability: sync, consistency: strict, on_error: closed, cold_start: closed, shadow: true",
			Policy{Durability: Sync, Strict: true, OnError: Closed, ColdStart: ColdClosed, Shadow: true}},
		{"limits: [1/1s], max_keys: 5, max_memory: 64MiB", Policy{MaxKeys: 5, MaxMemory: 64 << 20}},
		{"limits: [1/1s], max_memory: 1000000", Policy{MaxMemory: 1_000_000}},
		{"limit: -1, durability: escrow, consistency: strict",
			Policy{Durability: Escrow, Strict: true, OnError: Closed}},
		{"algorithm: concurrency, limit: 1, ttl: 1s", Policy{Concurrency: true}},
		{"algorithm: concurrency, limit: 1, ttl: 1s, durability: none, cold_start: closed",
			Policy{Concurrency: true, Durability: None, ColdStart: ColdClosed}},
		{"algorithm: concurrency, limit: 1, ttl: 1s, durability: sync, consistency: strict",
			Policy{Concurrency: true, Durability: Sync, Strict: true, OnError: Closed}},
	} {
		s := mustParse(t, "policies: [{name: p, "+test.fields+"}]")
		got, want := mustGet(t, s, "p"), test.want
		expect.True(t, got.Durability == want.Durability && got.Strict == want.Strict &&
			got.ColdStart == want.ColdStart && got.MaxKeys == want.MaxKeys && got.MaxMemory == want.MaxMemory &&
			got.OnError == want.OnError && got.Concurrency == want.Concurrency && got.Shadow == want.Shadow,
			"%s:\n got %+v\nwant %+v", test.fields, got, want)
		expect.Equal(t, (len(s.NeedVoters()) > 0), want.Strict, "%s: needs voters", test.fields)
	}
	for word, value := range map[string]fmt.Stringer{
		"none": None, "async": Async, "escrow": Escrow, "sync": Sync, "open": ColdOpen, "closed": ColdClosed,
		// of a program's own making
		"durability(4)": Sync + 1, "cold_start(2)": ColdClosed + 1, "on_error(3)": Share + 1,
	} {
		expect.True(t, value.String() == word, "%s is written %v", word, value)
	}
}

// TestCandidate: the limits that are tried beside a policy's. They are part of what a policy means.
func TestCandidate(t *testing.T) {
	without := mustParse(t, "policies: [{name: p, limits: [5/1m]}]")
	for fields, want := range map[string]algo.Limits{
		"{algorithm: token_bucket, limit: 5, window: 1m, capacity: 9}": {{Algorithm: algo.TokenBucket, Limit: 5,
			Window: time.Minute, Capacity: 9}},
		"{limits: [5/1m, 9/1h], algorithm: fixed_window}": {
			{Algorithm: algo.FixedWindow, Limit: 5, Window: time.Minute},
			{Algorithm: algo.FixedWindow, Limit: 9, Window: time.Hour},
		},
	} {
		s := mustParse(t, "policies: [{name: p, limits: [5/1m], candidate: "+fields+"}]")
		p := mustGet(t, s, "p")
		expect.True(t, slices.Equal(p.Candidate, want) && len(p.Limits) == 1 &&
			p.Limits[0].Algorithm == algo.SlidingLog, "%s: %+v", fields, p)
		expect.True(t, s.Hash() != without.Hash(), "%s: the hash is that of the policy without", fields)
	}
}

// TestWarnAt: a share of the limit in millionths, which is part of what a policy means.
func TestWarnAt(t *testing.T) {
	without := mustParse(t, "policies: [{name: p, limits: [5/1m]}]")
	for text, want := range map[string]int64{"0.8": 800_000, "1": WarnAtWhole, "1.0": WarnAtWhole, "0.07": 70_000,
		"0.000001": 1, "0.3333333": 333_333, "5e-1": 500_000} {
		s := mustParse(t, "policies: [{name: p, limits: [5/1m], warn_at: "+text+"}]")
		expect.Equal(t, mustGet(t, s, "p").WarnAt, want, "%s", text)
		expect.True(t, s.Hash() != without.Hash(), "%s: the hash is that of the policy without", text)
	}
	mustParse(t, "policies: [{name: p, limit: -1, algorithm: sliding_log, window: 1m, warn_at: 0.5, overrides: [{key: k, limit: 5}]}]")
}

// TestBan: how long a ban lasts is part of what a policy means.
func TestBan(t *testing.T) {
	hashes := make(map[string]string)
	for text, want := range map[string]time.Duration{"1h": time.Hour, "60m": time.Hour, "1d12h": 36 * time.Hour,
		"1ms": time.Millisecond} {
		s := mustParse(t, "policies: [{name: p, limits: [5/1m], count_denied: false, algorithm: sliding_log, ban: "+text+"}]")
		expect.Equal(t, mustGet(t, s, "p").Ban, want, "%s", text)
		hashes[s.Hash()] = text
	}
	hashes[mustParse(t, "policies: [{name: p, limits: [5/1m]}]").Hash()] = "none"
	expect.Equal(t, len(hashes), 4, "%v", hashes)
	mustParse(t, "policies: [{name: p, limit: -1, algorithm: sliding_log, window: 1m, ban: 1h, overrides: [{key: k, limit: 5}]}]")
}

// TestNeedVoters: the strict policies, where they say so.
func TestNeedVoters(t *testing.T) {
	s := mustParse(t, `policies:
  - {name: z, limits: [1/1s], durability: sync, consistency: strict}
  - {name: b, limits: [1/1s], durability: sync, consistency: available}
  - name: a
    limits: [1/1s]
    consistency: &level strict
    durability: escrow
  - {name: c, limits: [1/1s], durability: sync, consistency: *level}
`)
	const want = `policies.yaml:2:62: policies[0].consistency: strict needs voters: give all nodes the same voters, or use available
policies.yaml:6:18: policies[2].consistency: strict needs voters: give all nodes the same voters, or use available
policies.yaml:6:18: policies[3].consistency: strict needs voters: give all nodes the same voters, or use available`
	for range 2 {
		got := s.NeedVoters()
		expect.True(t, got.Error() == want, "got\n%v\nwant\n%s", got, want)
	}
	expect.True(t, (*Set)(nil).NeedVoters() == nil, "no policies")
}

// TestNeedDirectory: the persistent policies, where they say so.
func TestNeedDirectory(t *testing.T) {
	s := mustParse(t, "policies:\n  - {name: b, limits: [1/1s], persist: false}\n  - {name: a, limits: [1/1s], persist: true}\n")
	expect.True(t, !mustGet(t, s, "b").Persist && mustGet(t, s, "a").Persist, "persist is not what the file says")
	const want = "policies.yaml:3:40: policies[1].persist: true needs a data directory, in which this node keeps counters: give data-dir, or leave persist out"
	expect.Equal(t, s.NeedDirectory().Error(), want)
	without := mustParse(t, "policies: [{name: b, limits: [1/1s]}, {name: a, limits: [1/1s]}]")
	expect.True(t, without.Hash() != s.Hash(), "persist is no part of the hash")
}

// TestMeaning: what a policy's fields compile to.
func TestMeaning(t *testing.T) {
	log := func(limit int64, window time.Duration) algo.Limit {
		return algo.Limit{Algorithm: algo.SlidingLog, Limit: limit, Window: window}
	}
	for _, test := range []struct {
		fields string
		want   algo.Limits
	}{
		{"limits: [10/1s, '1_000/1h', \"5/1d12h\"]",
			algo.Limits{log(10, time.Second), log(1000, time.Hour), log(5, 36*time.Hour)}},
		{"algorithm: sliding_window, slots: 6, limits: [10/1s, {limit: 7, window: 1m, slots: 60}]", algo.Limits{
			{Algorithm: algo.SlidingWindow, Limit: 10, Window: time.Second, Slots: 6},
			{Algorithm: algo.SlidingWindow, Limit: 7, Window: time.Minute, Slots: 60}}},
		{"count_denied: true, limits: [1/1s, {algorithm: token_bucket, limit: 2, window: 1m, capacity: 9}]",
			algo.Limits{
				{Algorithm: algo.SlidingLog, Limit: 1, Window: time.Second, CountDenied: true},
				{Algorithm: algo.TokenBucket, Limit: 2, Window: time.Minute, Capacity: 9}}},
		{"algorithm: fixed_window, align: calendar, time_zone: UTC, limits: [5/hour, 50/month]", algo.Limits{
			{Algorithm: algo.FixedWindow, Limit: 5, Period: algo.Hour},
			{Algorithm: algo.FixedWindow, Limit: 50, Period: algo.Month}}},
		{"algorithm: fixed_window, align: first_hit, limit: 5, window: 1h",
			algo.Limits{{Algorithm: algo.FixedWindow, Limit: 5, Window: time.Hour}}},
		{"algorithm: leaky_bucket, limit: 4, window: 1s, capacity: 10",
			algo.Limits{{Algorithm: algo.LeakyBucket, Limit: 4, Window: time.Second, Capacity: 10}}},
		{"algorithm: concurrency, limit: 4, ttl: 30s",
			algo.Limits{{Algorithm: algo.Concurrency, Limit: 4, Window: 30 * time.Second}}},
		{"algorithm: sliding_log, limit: 20_000_000, window: 1m, max_log: 20_000_000",
			algo.Limits{{Algorithm: algo.SlidingLog, Limit: 20_000_000, Window: time.Minute, MaxLog: 20_000_000}}},
		{"algorithm: sliding_counter, limit: 9007199254740992, window: 366d",
			algo.Limits{{Algorithm: algo.SlidingCounter, Limit: 1 << 53, Window: algo.MaxWindow}}},
		{"limit: -1", nil},
		{"limit: -1, algorithm: token_bucket, window: 1m", nil},
		{"limit: -1, algorithm: sliding_log, count_denied: false", nil},
	} {
		p := mustGet(t, mustParse(t, "policies: [{name: p, "+test.fields+"}]"), "p")
		expect.True(t, slices.Equal(p.Limits, test.want) && p.Rule("k").Unlimited == (test.want == nil) &&
			slices.Equal(p.Rule("k").Limits, test.want), "%s:\n got %+v\nwant %+v", test.fields, p.Limits, test.want)
	}
}

func TestOverridesKeepTheRest(t *testing.T) {
	s := mustParse(t, `policies:
  - name: bucket
    algorithm: token_bucket
    limit: 10
    window: 1s
    capacity: 20
    on_error: closed
    shadow: true
    overrides:
      - {key: limit, limit: 5}
      - {key: window, window: 1m}
      - {key: capacity, capacity: 40}
      - {key: all, limit: 1, window: 1h, capacity: 1}
      - {key: several, limits: [1/1s, 2/1m]}
      - {key: off, limit: -1}
      - {key: bad, blocked: true}
  - name: leases
    algorithm: concurrency
    limit: 3
    ttl: 1m
    overrides:
      - {key: longer, ttl: 1h}
      - {key: free, unlimited: true}
  - name: daily
    algorithm: fixed_window
    align: calendar
    time_zone: Asia/Tokyo
    limit: 3
    window: day
    overrides:
      - {key: monthly, window: month}
      - {key: mixed, limits: [1/hour, 5/week]}
  - name: free
    limit: -1
    overrides:
      - {prefix: "x", limits: [7/1s]}
`)
	bucket, leases, daily, free := mustGet(t, s, "bucket"), mustGet(t, s, "leases"), mustGet(t, s, "daily"),
		mustGet(t, s, "free")
	token := func(limit int64, window time.Duration, capacity int64) algo.Limit {
		return algo.Limit{Algorithm: algo.TokenBucket, Limit: limit, Window: window, Capacity: capacity}
	}
	day := daily.Limits[0]
	calendar := func(limit int64, p algo.Period) algo.Limit {
		l := day
		l.Limit, l.Period = limit, p
		return l
	}
	for _, test := range []struct {
		policy *Policy
		key    string
		want   algo.Limits
	}{
		{bucket, "limit", algo.Limits{token(5, time.Second, 20)}},
		{bucket, "window", algo.Limits{token(10, time.Minute, 20)}},
		{bucket, "capacity", algo.Limits{token(10, time.Second, 40)}},
		{bucket, "all", algo.Limits{token(1, time.Hour, 1)}},
		// The capacity is the one limit's: it does not carry over into a list.
		{bucket, "several", algo.Limits{token(1, time.Second, 0), token(2, time.Minute, 0)}},
		{leases, "longer", algo.Limits{{Algorithm: algo.Concurrency, Limit: 3, Window: time.Hour}}},
		{daily, "monthly", algo.Limits{calendar(3, algo.Month)}},
		{daily, "mixed", algo.Limits{calendar(1, algo.Hour), calendar(5, algo.Week)}},
		{free, "xyz", algo.Limits{{Algorithm: algo.SlidingLog, Limit: 7, Window: time.Second}}},
	} {
		if r := test.policy.Rule(test.key); !slices.Equal(r.Limits, test.want) || r.Unlimited || r.Blocked {
			t.Errorf("%s %s:\n got %+v\nwant %+v", test.policy.Name, test.key, r, test.want)
		}
	}
	r := bucket.Rule("off")
	expect.True(t, r.Unlimited && r.Limits == nil, "off: %+v", r)
	r = bucket.Rule("bad")
	expect.True(t, r.Blocked && !r.Unlimited && r.Limits == nil, "bad: %+v", r)
	expect.True(t, bucket.OnError == Closed && bucket.Shadow && !bucket.Concurrency && leases.Concurrency,
		"bucket: %+v, leases: %+v", bucket, leases)
	expect.True(t, free.Rule("other").Unlimited && free.Limits == nil, "free: %+v", free)
	got := bucket.Rules()
	expect.True(t, len(got) == 8 && got[0] == bucket.Rule("nobody") && got[1] == bucket.Rule("limit") &&
		got[7].Key == "bad", "Rules: %+v", got)
}

// TestOverridesAndCapacity: an override may raise the limit above a capacity that it keeps only where the policy's own
// is above it already, or when the override writes the capacity too; one that is unlimited keeps none.
func TestOverridesAndCapacity(t *testing.T) {
	for _, algorithm := range []string{"token_bucket", "leaky_bucket"} {
		for _, test := range []struct{ policy, override, want string }{
			{"limit: 3, window: 1m, capacity: 9", "limit: 9", ""},
			{"limit: 3, window: 1m, capacity: 9", "limit: 20, capacity: 9", ""},
			{"limit: 3, window: 1m, capacity: 9", "limit: 20, capacity: 20", ""},
			{"limit: 3, window: 1m, capacity: 9", "limits: [20/1m]", ""},
			{"limit: 3, window: 1m, capacity: 9", "limit: -1", ""},
			{"limit: 3, window: 1m", "limit: 20", ""},
			{"limit: 30, window: 1m, capacity: 9", "limit: 20", ""},
			{"limit: 3, window: 1m, capacity: 9", "limit: 20",
				"limit: is above the policy's capacity, 9, which it keeps: write capacity here too"},
			{"limit: 3, window: 1m, capacity: 9", "limit: 10, window: 1h",
				"limit: is above the policy's capacity, 9, which it keeps: write capacity here too"},
			{"limit: 30, window: 1m, capacity: 9", "limit: 31",
				"limit: is above the policy's capacity, 9, which it keeps: write capacity here too"},
			{"limit: -1", "capacity: 9", "capacity: is for a limit, and this one is unlimited: remove it"},
			{"limit: 3, window: 1m", "limit: -1, capacity: 9",
				"capacity: is for a limit, and this one is unlimited: remove it"},
		} {
			got := parseErrors(t, "policies: [{name: p, algorithm: "+algorithm+", "+test.policy+", overrides: [{key: a, "+test.override+"}]}]")
			switch {
			case test.want == "" && got == nil:
			case test.want != "" && len(got) == 1 && strings.HasSuffix(got[0], ": policies[0].overrides[0]."+test.want):
			default:
				t.Errorf("%s: %s: {%s}: got %q, want %q", algorithm, test.policy, test.override, got, test.want)
			}
		}
	}
}

// TestReference parses the first YAML block of docs/policies.md, and holds its meaning to what is said beside it.
func TestReference(t *testing.T) {
	text := must.Value(os.ReadFile("../docs/policies.md"))(t)
	_, rest, begun := strings.Cut(string(text), "```yaml\n")
	block, _, ended := strings.Cut(rest, "```\n")
	must.True(t, begun && ended, "docs/policies.md has no YAML block")
	s := mustParse(t, block)
	for _, test := range []struct {
		policy, key string
		want        Rule // without key and prefix
	}{
		{"login", "alice", Rule{Limits: algo.Limits{{Algorithm: algo.SlidingLog, Limit: 5, Window: time.Minute,
			CountDenied: true}}}},
		{"login", "partner:7", Rule{Limits: algo.Limits{{Algorithm: algo.SlidingLog, Limit: 50, Window: time.Minute,
			CountDenied: true}}}},
		{"login", "partner:acme:7", Rule{Unlimited: true}},
		{"login", "partner:acme:bot", Rule{Blocked: true}},
		{"api", "alice", Rule{Limits: algo.Limits{
			{Algorithm: algo.SlidingLog, Limit: 10, Window: time.Second},
			{Algorithm: algo.SlidingLog, Limit: 1000, Window: time.Hour}}}},
		{"api", "1001", Rule{Limits: algo.Limits{{Algorithm: algo.SlidingLog, Limit: 100, Window: time.Second}}}},
		{"burst", "alice", Rule{Limits: algo.Limits{{Algorithm: algo.TokenBucket, Limit: 3, Window: time.Minute,
			Capacity: 9}}}},
		{"mixed", "alice", Rule{Limits: algo.Limits{
			{Algorithm: algo.SlidingWindow, Limit: 100, Window: time.Second, Slots: 20},
			{Algorithm: algo.SlidingWindow, Limit: 5000, Window: time.Hour, Slots: 60},
			{Algorithm: algo.TokenBucket, Limit: 50_000, Window: 24 * time.Hour, Capacity: 1000}}}},
		{"export", "alice", Rule{Limits: algo.Limits{{Algorithm: algo.Concurrency, Limit: 4,
			Window: 30 * time.Second}}}},
		{"tenants", "alice", Rule{Unlimited: true}},
		{"tenants", "acme:bot", Rule{Limits: algo.Limits{{Algorithm: algo.SlidingLog, Limit: 100,
			Window: time.Minute}}}},
	} {
		got := *mustGet(t, s, test.policy).Rule(test.key)
		expect.True(t, slices.Equal(got.Limits, test.want.Limits) && got.Unlimited == test.want.Unlimited &&
			got.Blocked == test.want.Blocked, "%s %s: got %+v, want %+v", test.policy, test.key, got, test.want)
	}
	var periods []string
	for _, l := range mustGet(t, s, "report").Limits {
		periods = append(periods, fmt.Sprint(l.Algorithm, l.Limit, l.Period, l.Zone))
	}
	want := []string{"fixed_window 1 day Europe/Berlin", "fixed_window 3 month Europe/Berlin"}
	expect.True(t, slices.Equal(periods, want), "report: %q, want %q", periods, want)
	if len(s.Policies()) != 7 {
		t.Errorf("%d policies", len(s.Policies()))
	}
	p := mustGet(t, s, "login")
	expect.True(t, p.OnError == Closed && !p.Shadow, "login: %+v", p)
	p = mustGet(t, s, "burst")
	expect.True(t, p.OnError == Open && p.Shadow, "burst: %+v", p)
	next := func() {
		t.Helper()
		_, rest, begun = strings.Cut(rest, "```yaml\n")
		block, rest, ended = strings.Cut(rest, "```\n")
		must.True(t, begun && ended, "docs/policies.md has too few YAML blocks")
	}
	next()
	p = mustGet(t, mustParse(t, block), "login")
	expect.True(t, len(p.Candidate) == 1 && p.Candidate[0].Limit == 80, "login with a candidate: %+v", p)
	next()
	expect.Equal(t, mustGet(t, mustParse(t, block), "login").Ban, time.Hour, "login with a ban")
	next() // about guarantees
	p = mustGet(t, mustParse(t, block), "payout")
	expect.True(t, p.Strict && p.Durability == Escrow && p.ColdStart == ColdClosed && p.OnError == Closed,
		"payout: %+v", p)
	// Every field has a row.
	for _, name := range slices.Concat(policyFields, overrideFields) {
		expect.True(t, strings.Contains(string(text), "| `"+name+"` |"), "docs/policies.md has no row for %s", name)
	}
}

func TestLoad(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "p.yaml")
	// Callers put what they were told before it, such as --policies.
	_, err := Load(file)
	expect.True(t, errors.Is(err, os.ErrNotExist) && err.Error() == "open "+file+": no such file or directory",
		"missing: %v", err)
	expect.ErrorContains(t, expect.Err(Load(dir)), dir, "a directory")
	must.NoError(t, os.WriteFile(file, []byte(documented), 0o600))
	s, err := Load(file)
	expect.True(t, err == nil && len(s.Policies()) == 3, "%v %v", s, err)
	must.NoError(t, os.WriteFile(file, []byte("x"), 0o600))
	var list Errors
	_, err = Load(file)
	expect.True(t, errors.As(err, &list) && list[0].File == file, "bad: %v", err)
	must.NoError(t, os.Truncate(file, strictyaml.MaxFile+5))
	expect.ErrorContains(t, expect.Err(Load(file)), "too large", "large")
}

// FuzzParse: whatever is read, nothing panics, positions are in the file, and what is accepted means something.
func FuzzParse(f *testing.F) {
	f.Add([]byte(documented))
	data := must.Value(os.ReadFile("testdata/mistakes.txt"))(f)
	for _, c := range strings.Split(string(data), "\n=== ") {
		_, rest, _ := strings.Cut(c, "\n")
		text, _, _ := strings.Cut(rest, "--- mistakes\n")
		f.Add([]byte(text))
	}
	for _, text := range []string{"", "\ufeff", "\xff", "a\u2028b: [", "policies: &a [*a]", "- ? - ? [",
		"policies:\r\n- {name: \"\\xff\", limits: [1/1s]}",
		"policies: [{limit: -1, overrides: [{limit}]}]"} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := Parse("f", data)
		if err != nil {
			var list Errors
			must.True(t, errors.As(err, &list) && len(list) != 0, "%T: %v", err, err)
			lines, _ := strictyaml.Position(data, len(data))
			for _, e := range list {
				expect.True(t, e.Line >= 1 && e.Line <= lines && e.Column >= 1 && e.Column <= len(data)+1 &&
					e.Message != "", "%v: not in a file of %d lines and %d bytes", e, lines, len(data))
			}
			return
		}
		for _, p := range s.Policies() {
			for _, r := range p.Rules() {
				ways := len(r.Limits) > 0
				expect.True(t, ways != (r.Unlimited || r.Blocked) && (!r.Unlimited || !r.Blocked), "%s: %+v", p.Name, r)
				if len(r.Limits) == 0 {
					continue
				}
				expect.NoError(t, r.Limits.Validate(), "%s", p.Name)
				expect.True(t, (r.Limits[0].Algorithm == algo.Concurrency) == p.Concurrency,
					"%s: concurrency is %t, but there is %+v", p.Name, p.Concurrency, r)
				expect.True(t, r.Key == "" || p.Rule(r.Key) == r, "%s: the rule for %q is another one", p.Name, r.Key)
			}
		}
	})
}
