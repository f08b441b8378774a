package limit

import (
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/test/expect"
)

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
		"nothing": {AllDecision{}, Decision{}},
		"admitted": {AllDecision{Allowed: true, Delay: 3, Decisions: []Decision{admitted(9, 5), admitted(9, 2),
			admitted(-1, -1)}}, Decision{Allowed: true, Limit: 9, Remaining: 2, Delay: 3}},
		"none has a limit": {
			AllDecision{Allowed: true, Decisions: []Decision{admitted(algo.Unlimited, -1)}},
			Decision{Allowed: true, Limit: algo.Unlimited, Remaining: -1},
		},
		"one failed open": {
			AllDecision{Allowed: true,
				Decisions: []Decision{{Allowed: true, FailedOpen: true, Limit: 0, Remaining: 9}, admitted(9, 2)}},
			Decision{Allowed: true, FailedOpen: true, Limit: 9, Remaining: 2},
		},
		"refused": {AllDecision{Decisions: []Decision{admitted(9, 1), refused(5), refused(9),
			{Allowed: true, FailedOpen: true}}}, refused(9)},
		"refused for ever": {AllDecision{Decisions: []Decision{refused(5), refused(algo.Never), refused(9)}}, refused(algo.Never)},
	} {
		got := tt.all.Tightest()
		expect.True(t, got.Allowed == tt.want.Allowed && got.Limit == tt.want.Limit &&
			got.Remaining == tt.want.Remaining && got.RetryAfter == tt.want.RetryAfter &&
			got.Delay == tt.want.Delay && got.FailedOpen == tt.want.FailedOpen,
			"%s: %+v, want %+v", name, got, tt.want)
	}
}
