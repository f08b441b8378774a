package limiter

import (
	"testing"

	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/expect"
)

// TestRulesOfPolicies: what a policy says of its keys' states is in the rules of its limits, and of its candidate's.
func TestRulesOfPolicies(t *testing.T) {
	const candidate = "candidate: {algorithm: sliding_log, limit: 5, window: 1h}"
	l := started(t, Config{Policies: policies(t, `policies:
  - {name: closed, algorithm: sliding_log, limit: 10, window: 1h, cold_start: closed}
  - {name: open, algorithm: sliding_log, limit: 10, window: 1h, cold_start: open}
  - {name: kept, algorithm: sliding_log, limit: 10, window: 1h, `+candidate+`}
  - {name: none, algorithm: sliding_log, limit: 10, window: 1h, durability: none, `+candidate+`}`)})
	by := l.table.Load().by
	expect.True(t, by["closed"].owns.ColdClosed && !by["open"].owns.ColdClosed,
		"whether states begin full after a loss is not what the policy says")
	if by["kept"].owns.candidate.Durability == store.None || by["none"].owns.candidate.Durability != store.None {
		t.Error("whether a candidate's states are copied is not what the policy says")
	}
}
