package observe

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/test/expect"
)

func TestHistory(t *testing.T) {
	stats := map[string]*limiter.PolicyStats{"a": {Policy: "a"}, "b": {Policy: "b"}, "idle": {Policy: "idle", Allowed: 0}}
	h := NewHistory(func() (list []limiter.PolicyStats) {
		for _, s := range stats {
			list = append(list, *s)
		}
		return list
	})
	if got, _ := h.Read(0); got != nil {
		t.Errorf("before the first tick: %+v", got)
	}
	at := func(d time.Duration, want []PolicyHistory, age time.Duration) {
		t.Helper()
		h.Tick(int64(d))
		got, since := h.Read(int64(d))
		diff := cmp.Diff(want, got)
		expect.True(t, diff == "" && since == age, "at %v, %v old: %s", d, since, diff)
	}
	at(0, nil, 0)
	stats["a"].Allowed = 3
	at(time.Second, []PolicyHistory{{"a", []StepCounts{{Allowed: 3}}}}, time.Second)
	stats["a"].Refused, stats["b"].FailedOpen = 1, 2
	at(HistoryStep, []PolicyHistory{{"a", []StepCounts{{}, {Allowed: 3, Refused: 1}}}, {"b", []StepCounts{{}, {FailedOpen: 2}}}}, 0)
	stats["a"].Allowed += 5
	// Two steps have passed, and nobody has ended the first of them.
	at(3*HistoryStep+time.Second, []PolicyHistory{{"a", []StepCounts{{}, {Allowed: 5}, {}, {Allowed: 3, Refused: 1}}}, {"b", []StepCounts{{}, {}, {}, {FailedOpen: 2}}}}, time.Second)
	for i := range HistorySteps {
		h.Tick(int64(4+i) * int64(HistoryStep))
	}
	if got, _ := h.Read(int64(4+HistorySteps) * int64(HistoryStep)); got != nil {
		t.Errorf("after all steps: %+v", got)
	}
	stats["b"].Errors++
	h.Tick(int64(time.Hour) * 1000) // which takes no more steps than are kept
	got, age := h.Read(int64(time.Hour) * 1000)
	expect.True(t, len(h.steps) == HistorySteps && len(got) == 1 && got[0].Steps[1] == (StepCounts{Errors: 1}) &&
		age < HistoryStep, "after a long time: %d steps, %+v, %v old", len(h.steps), got, age)
}
