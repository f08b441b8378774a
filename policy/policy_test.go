package policy

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestRuleAgainstBruteForce compares the look-up of overrides with one that tries them all.
func TestRuleAgainstBruteForce(t *testing.T) {
	const seed = 1
	rng := rand.New(rand.NewPCG(seed, 0))
	// Few letters and short words, so that prefixes of prefixes and equal keys are common; a letter of two bytes, so
	// that words are cut inside of it.
	word := func(longest int) string {
		var b strings.Builder
		for range 1 + rng.IntN(longest) {
			b.WriteString([]string{"a", "b", "é", "ë"}[rng.IntN(4)])
		}
		return b.String()
	}
	for range 300 {
		var text strings.Builder
		text.WriteString("policies: [{name: p, limits: [1/1s], overrides: [")
		exact, prefixes := map[string]bool{}, map[string]bool{}
		for range rng.IntN(30) {
			if w := word(4); rng.IntN(2) == 0 && !exact[w] {
				exact[w] = true
				fmt.Fprintf(&text, "{key: %q, blocked: true}, ", w)
			} else if !prefixes[w] {
				prefixes[w] = true
				fmt.Fprintf(&text, "{prefix: %q, unlimited: true}, ", w)
			}
		}
		text.WriteString("]}]")
		p := mustGet(t, mustParse(t, text.String()), "p")
		for range 300 {
			key := word(7)
			if rng.IntN(4) == 0 {
				key = key[:rng.IntN(len(key)+1)]
			}
			var wantKey, wantPrefix string
			if exact[key] {
				wantKey = key
			} else {
				for prefix := range prefixes {
					if strings.HasPrefix(key, prefix) && len(prefix) > len(wantPrefix) {
						wantPrefix = prefix
					}
				}
			}
			r := p.Rule(key)
			must.True(t, r.Key == wantKey && r.Prefix == wantPrefix,
				"seed %d: %s\nkey %q: got %+v, want key %q prefix %q", seed, text.String(), key, r, wantKey, wantPrefix)
			must.Equal(t, p.Rule(key), r, "the rule for %q is not stable", key)
		}
	}
}

func TestPolicies(t *testing.T) {
	s := mustParse(t, "policies: [{name: b, limits: [1/1s]}, {name: a, limits: [1/1s]}, {name: c, limits: [1/1s]}]")
	list := s.Policies()
	must.True(t, len(list) == 3 && list[0].Name == "a" && list[1].Name == "b" && list[2].Name == "c", "%v", list)
	list[0] = nil
	expect.True(t, s.Policies()[0] != nil, "the caller's slice is the set's")
	_, ok := s.Get("d")
	expect.True(t, !ok, "there is no d")
}

// TestHash: equal for what means the same, different for what does not.
func TestHash(t *testing.T) {
	classes := [][]string{
		{
			"policies: [{name: a, limits: [1/1s]}, {name: b, limits: [2/1m]}]",
			"# comment\npolicies:\n- {limits: [2/60s], name: b}\n- {limits: ['1/1000ms'], name: 'a', shadow: false, on_error: open}\n",
			"policies: [{name: a, algorithm: sliding_log, limit: 1, window: 1s, max_log: 5}, {name: b, algorithm: sliding_log, limit: 2, window: 1m, overrides: []}]",
		},
		{
			"policies: [{name: a, limits: [1/1s], overrides: [{key: x, blocked: true}, {key: z, limits: [3/1s]}, {prefix: x, unlimited: true}]}]",
			"policies: [{name: a, limits: [1/1s], overrides: [{prefix: x, unlimited: true}, {key: z, limits: [3/1s]}, {key: x, blocked: true}]}]",
		},
		{
			"policies: [{name: a, algorithm: token_bucket, limit: 5, window: 1s}]",
			"policies: [{name: a, algorithm: token_bucket, limit: 5, window: 1s, capacity: 5}]",
		},
		{
			"policies: [{name: a, algorithm: sliding_window, limit: 5, window: 1s}]",
			"policies: [{name: a, algorithm: sliding_window, limit: 5, window: 1s, slots: 10}]",
		},
		{
			"policies: [{name: a, algorithm: fixed_window, align: calendar, limit: 5, window: day}]",
			"policies: [{name: a, algorithm: fixed_window, align: calendar, limit: 5, window: day, time_zone: UTC}]",
		},
		{"policies: [{name: a, limits: [1/1s], overrides: [{key: x, unlimited: true}, {prefix: x, blocked: true}]}]"},
		{"policies: [{name: a, limits: [1/1s], overrides: [{key: z, limits: [4/1s]}]}]"},
		{"policies: [{name: a, limits: [1/1s, 2/1m]}]"},
		{"policies: [{name: a, limits: [2/1m, 1/1s]}]"},
		{"policies: [{name: b, limits: [1/1s]}]"},
		{"policies: [{name: b, limits: [1/1s], shadow: true}]"},
		{"policies: [{name: b, limits: [1/1s], on_error: closed}]"},
		{"policies: [{name: b, limits: [1/1s], count_denied: true}]"},
		{"policies: [{name: b, limits: [1/1s], durability: none}]"},
		{"policies: [{name: b, limits: [1/1s], durability: sync}]",
			"policies: [{name: b, limits: [1/1s], durability: sync, cold_start: open, consistency: available}]"},
		{"policies: [{name: b, limits: [1/1s], durability: sync, on_error: closed}]"},
		{"policies: [{name: b, limits: [1/1s], durability: sync, consistency: strict}]",
			"policies: [{name: b, limits: [1/1s], durability: sync, consistency: strict, on_error: closed}]"},
		{"policies: [{name: b, limits: [1/1s], cold_start: closed}]"},
		{"policies: [{name: b, limit: -1}]"},
		{"policies: [{name: b, limit: -1, algorithm: concurrency}]"},
		{"policies: [{name: a, algorithm: token_bucket, limit: 5, window: 1s, capacity: 6}]"},
		{"policies: [{name: a, algorithm: leaky_bucket, limit: 5, window: 1s, capacity: 5}]"},
		{"policies: [{name: a, algorithm: sliding_window, limit: 5, window: 1s, slots: 11}]"},
		{"policies: [{name: a, algorithm: fixed_window, align: calendar, limit: 5, window: week}]"},
		{"policies: [{name: a, algorithm: fixed_window, align: calendar, limit: 5, window: day, time_zone: Asia/Tokyo}]"},
		{""},
	}
	by := map[string]string{}
	for _, class := range classes {
		hash := mustParse(t, class[0]).Hash()
		if other, taken := by[hash]; taken {
			t.Errorf("equal:\n%s\n%s", other, class[0])
		}
		by[hash] = class[0]
		for _, text := range class[1:] {
			if mustParse(t, text).Hash() != hash {
				t.Errorf("different:\n%s\n%s", class[0], text)
			}
		}
	}
	// Other processes, and later builds that mean the same, get the same.
	got, want := mustParse(t, documented).Hash(), "01052db73944dc6625ffab471db6a670"
	expect.Equal(t, got, want)
}

func BenchmarkRule(b *testing.B) {
	build := func(overrides int) *Policy {
		var text strings.Builder
		text.WriteString("policies: [{name: p, limits: [1/1s], overrides: [")
		for i := range overrides / 2 {
			fmt.Fprintf(&text, "{key: user-%d, blocked: true}, {prefix: partner-%d, blocked: true}, ", i, i)
		}
		text.WriteString("]}]")
		return mustGet(b, mustParse(b, text.String()), "p")
	}
	for _, overrides := range []int{0, 10, 1000, 100_000} {
		p := build(overrides)
		for _, c := range []struct{ name, key string }{
			{"exact", "user-3"}, {"prefix", "partner-3/and-more"}, {"none", "somebody-else"},
		} {
			b.Run(fmt.Sprintf("overrides=%d/%s", overrides, c.name), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					p.Rule(c.key)
				}
			})
		}
	}
}

func TestRuleDoesNotAllocate(t *testing.T) {
	p := mustGet(t, mustParse(t, documented), "login")
	for _, key := range []string{"admin", "partner:7", "alice"} {
		n := testing.AllocsPerRun(100, func() { p.Rule(key) })
		expect.True(t, n == 0, "%s: %v allocations", key, n)
	}
}

func TestPolicyNames(t *testing.T) {
	for name, want := range map[string]bool{
		"a": true, "Login.v2_x-1": true, strings.Repeat("n", 128): true,
		"": false, strings.Repeat("n", 129): false, "a b": false, "é": false, "a/b": false, "a\n": false, "\xff": false,
	} {
		expect.Equal(t, limit.ValidPolicyName(name), want, "%q", name)
		_, err := Parse("f", fmt.Appendf(nil, "policies: [{name: %q, limits: [1/1s]}]", name))
		expect.Equal(t, (err == nil), want, "%q in a file: %v", name, err)
	}
}
