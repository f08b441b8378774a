package observe

import (
	"fmt"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limiter"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

func newRecorder(t *testing.T) *TopKeys {
	t.Helper()
	r := must.Value(NewTopKeys())(t)
	r.Tick(0)
	return r
}

func sample(scope, key string, weight int64, refused bool, lim, remaining int64) *limiter.Sample {
	return &limiter.Sample{Scope: scope, Key: key, Weight: weight, Refused: refused, Algorithm: algo.SlidingLog,
		Window: time.Minute, Limit: lim, Remaining: remaining}
}

func names(rows []*peerv1.KeyActivity) string {
	var b strings.Builder
	for _, r := range rows {
		fmt.Fprintf(&b, "%s/%s %d %d %.2f;", r.Scope, r.Key, r.Decisions, r.Refused, fullness(r.Used, r.Limit))
	}
	return b.String()
}

func TestOrders(t *testing.T) {
	r := newRecorder(t)
	for range 5 {
		r.Record(sample("p", "busy", 2, false, 100, 60))
	}
	r.Record(sample("p", "refused", 1, false, 4, 0))
	r.Record(sample("p", "refused", 3, true, 4, 0))
	r.Record(sample("q", "full", 1, false, 10, 1))
	r.Record(sample("q", "blocked", 2, true, 0, 0)) // has no state
	r.Tick(int64(4 * time.Second))
	for _, tt := range []struct {
		by     weirv1.KeyOrder
		n      int
		wanted func(string) bool
		want   string
	}{
		{weirv1.KeyOrder_KEY_ORDER_BUSIEST, 10, nil,
			"p/busy 10 0 0.40;p/refused 4 3 1.00;q/blocked 2 2 0.00;q/full 1 0 0.90;"},
		{weirv1.KeyOrder_KEY_ORDER_BUSIEST, 1, nil, "p/busy 10 0 0.40;"},
		{weirv1.KeyOrder_KEY_ORDER_REFUSED, 10, nil, "p/refused 4 3 1.00;q/blocked 2 2 0.00;"},
		{weirv1.KeyOrder_KEY_ORDER_FULLEST, 2, nil, "p/refused 4 3 1.00;q/full 1 0 0.90;"},
		{weirv1.KeyOrder_KEY_ORDER_FULLEST, 10, func(s string) bool { return s == "q" }, "q/full 1 0 0.90;"},
		{weirv1.KeyOrder_KEY_ORDER_BUSIEST, 0, nil, ""},
		{weirv1.KeyOrder_KEY_ORDER_BUSIEST, -1, nil, ""},
	} {
		rows, since := r.Top(int64(4*time.Second), tt.n, tt.wanted, tt.by)
		expect.True(t, names(rows) == tt.want && since == 4*time.Second,
			"%s, %d: %s since %v, want %s", tt.by, tt.n, names(rows), since, tt.want)
	}
	row, _ := r.Top(0, 1, nil, weirv1.KeyOrder_KEY_ORDER_BUSIEST)
	several, _ := r.Top(0, 2, nil, weirv1.KeyOrder_KEY_ORDER_BUSIEST, weirv1.KeyOrder_KEY_ORDER_FULLEST)
	expect.Equal(t, names(several), "p/busy 10 0 0.40;p/refused 4 3 1.00;q/full 1 0 0.90;",
		"by two orders, each key once")
	want := &peerv1.KeyActivity{Scope: "p", Key: "busy", Decisions: 10, Algorithm: weirv1.Algorithm(algo.SlidingLog),
		WindowNs: int64(time.Minute), Limit: 100, Used: 40}
	expect.NoDiff(t, cmp.Diff(want, row[0], protocmp.Transform()))
}

// What is older than the window is forgotten, whether or not there was a tick in between.
func TestForgets(t *testing.T) {
	for _, step := range []time.Duration{100 * time.Millisecond, generation, TopWindow + generation, time.Hour} {
		r := newRecorder(t)
		r.Record(sample("p", "early", 7, true, 10, 5))
		seen := 0
		for now := step; now <= 2*TopWindow+time.Hour; now += step {
			r.Tick(int64(now))
			rows, since := r.Top(int64(now), 1, nil, weirv1.KeyOrder_KEY_ORDER_BUSIEST)
			full, _ := r.Top(int64(now), 1, nil, weirv1.KeyOrder_KEY_ORDER_FULLEST)
			must.Equal(t, len(rows) > 0, (len(full) > 0), "after %v: %d busiest, %d fullest", now, len(rows), len(full))
			if len(rows) > 0 {
				seen++
				must.True(t, now < TopWindow, "after %v it is still there", now)
			} else if now < TopWindow-generation {
				t.Fatalf("after %v it is gone", now)
			}
			must.True(t, since <= TopWindow && (now < TopWindow || since >= TopWindow-generation),
				"after %v: counted since %v", now, since)
			if now > 2*TopWindow {
				break
			}
		}
		expect.True(t, step >= TopWindow || seen != 0, "steps of %v: never seen", step)
	}
}

// However many keys there are, memory is bounded, and a key with much of what goes on is found among them, as is a full
// one.
func TestManyKeys(t *testing.T) {
	r := newRecorder(t)
	const others = 50_000
	r.Record(sample("p", "full", 1, false, 100, 1))
	for i := range others {
		r.Record(sample("p", fmt.Sprint("other-", i), 1, false, 100, 90))
		if i%50 == 0 {
			r.Record(sample("p", "busy", 1, i%100 == 0, 100, 50))
		}
	}
	rows, _ := r.Top(0, 1, nil, weirv1.KeyOrder_KEY_ORDER_BUSIEST)
	b := rows[0]
	expect.True(t, b.Key == "busy" && b.Decisions >= others/50 && b.Decisions-b.DecisionsError <= others/50 &&
		b.Limit == 100, "busiest: %+v", b)
	rows, _ = r.Top(0, 1, nil, weirv1.KeyOrder_KEY_ORDER_REFUSED)
	b = rows[0]
	expect.True(t, b.Key == "busy" && b.Refused == others/100 && b.RefusedError == 0, "refused: %+v", b)
	rows, _ = r.Top(0, 1, nil, weirv1.KeyOrder_KEY_ORDER_FULLEST)
	expect.True(t, rows[0].Key == "full" && rows[0].Used == 99, "fullest: %+v", rows[0])
	expect.True(t, len(r.states) <= maxStates, "%d states", len(r.states))
	rows, _ = r.Top(0, others, nil, weirv1.KeyOrder_KEY_ORDER_BUSIEST)
	expect.True(t, len(rows) <= counters, "%d rows", len(rows))
}

func TestMerge(t *testing.T) {
	want := []*peerv1.KeyActivity{
		{Scope: "p", Key: "k", Decisions: 102, DecisionsError: 1, Refused: 94, RefusedError: 2, Limit: 5, Used: 5},
		{Scope: "p", Key: "x", Decisions: 3, Limit: 2, Used: 1},
	}
	for _, order := range [][3]int{{0, 1, 2}, {2, 1, 0}, {1, 2, 0}} {
		known := [][]*peerv1.KeyActivity{
			// the owner
			{{Scope: "p", Key: "k", Decisions: 10, DecisionsError: 1, Refused: 4, Limit: 5, Used: 5},
				{Scope: "p", Key: "x", Decisions: 3, Limit: 2, Used: 1}},
			// another node
			{{Scope: "p", Key: "k", Decisions: 90, Refused: 90, RefusedError: 2}},
			// the owner until it moved
			{{Scope: "p", Key: "k", Decisions: 2, Limit: 5, Used: 1}},
		}
		got := MergeRows(known[order[0]], known[order[1]], known[order[2]])
		SortRows(got, weirv1.KeyOrder_KEY_ORDER_REFUSED)
		expect.NoDiff(t, cmp.Diff(want, got, protocmp.Transform()))
	}
}

// A Recorder keeps nothing of what it is given.
func TestKeepsCopies(t *testing.T) {
	r := newRecorder(t)
	text := []byte("alice")
	s := sample("p", "", 1, true, 5, 0)
	s.Key = unsafeString(text)
	r.Record(s)
	copy(text, "xxxxx")
	for _, by := range []weirv1.KeyOrder{weirv1.KeyOrder_KEY_ORDER_BUSIEST, weirv1.KeyOrder_KEY_ORDER_REFUSED,
		weirv1.KeyOrder_KEY_ORDER_FULLEST} {
		rows, _ := r.Top(0, 1, nil, by)
		expect.True(t, len(rows) == 1 && rows[0].Key == "alice" && rows[0].Decisions == 1, "%s: %+v", by, rows)
	}
}

func unsafeString(b []byte) string { return unsafe.String(&b[0], len(b)) }
