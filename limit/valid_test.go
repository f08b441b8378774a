package limit

import (
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/weirlimit/weir/algo"
)

// TestFitKey: every value of UTF-8 becomes a key, short ones as they are, and different values become different keys.
func TestFitKey(t *testing.T) {
	seen := make(map[string]string)
	for _, value := range []string{
		"a", strings.Repeat("a", MaxKey), strings.Repeat("a", MaxKey+1), strings.Repeat("a", 1<<20), strings.Repeat("aé", 1000), strings.Repeat("é", 1000),
		strings.Repeat("\U0001F600", 1000), "x" + strings.Repeat("\U0001F600", 1000), strings.Repeat("a", MaxKey+1) + "b",
	} {
		key := FitKey(value)
		if err := ValidKey(key); err != nil || !utf8.ValidString(key) {
			t.Errorf("%.20q: %v", value, err)
		}
		if (key == value) != (len(value) <= MaxKey) || key != value && (!strings.HasPrefix(key, value[:120]) || len(key) > 256) {
			t.Errorf("%.20q becomes %q", value, key)
		}
		if other, ok := seen[key]; ok {
			t.Errorf("%.20q and %.20q become the same key", value, other)
		}
		seen[key] = value
	}
	for _, bad := range []string{"", "\xff", strings.Repeat("a", 2000) + "\xff"} {
		if ValidKey(FitKey(bad)) == nil {
			t.Errorf("%.20q becomes a key", bad)
		}
	}
}

// TestTightest: what an answer shows that has room for one decision of several.
func TestTightest(t *testing.T) {
	admitted := func(limit, remaining int64) Decision {
		return Decision{Allowed: true, Limit: limit, Remaining: remaining}
	}
	refused := func(after time.Duration) Decision { return Decision{RetryAfter: after, Limit: 1} }
	for name, tt := range map[string]struct {
		all  AllDecision
		want Decision
	}{
		"nothing":  {AllDecision{}, Decision{}},
		"admitted": {AllDecision{Allowed: true, Delay: 3, Decisions: []Decision{admitted(9, 5), admitted(9, 2), admitted(-1, -1)}}, Decision{Allowed: true, Limit: 9, Remaining: 2, Delay: 3}},
		"none has a limit": {
			AllDecision{Allowed: true, Decisions: []Decision{admitted(algo.Unlimited, -1)}}, Decision{Allowed: true, Limit: algo.Unlimited, Remaining: -1},
		},
		"one failed open": {
			AllDecision{Allowed: true, Decisions: []Decision{{Allowed: true, FailedOpen: true, Limit: 0, Remaining: 9}, admitted(9, 2)}},
			Decision{Allowed: true, FailedOpen: true, Limit: 9, Remaining: 2},
		},
		"refused":          {AllDecision{Decisions: []Decision{admitted(9, 1), refused(5), refused(9), {Allowed: true, FailedOpen: true}}}, refused(9)},
		"refused for ever": {AllDecision{Decisions: []Decision{refused(5), refused(algo.Never), refused(9)}}, refused(algo.Never)},
	} {
		got := tt.all.Tightest()
		if got.Allowed != tt.want.Allowed || got.Limit != tt.want.Limit || got.Remaining != tt.want.Remaining || got.RetryAfter != tt.want.RetryAfter ||
			got.Delay != tt.want.Delay || got.FailedOpen != tt.want.FailedOpen {
			t.Errorf("%s: %+v, want %+v", name, got, tt.want)
		}
	}
}
