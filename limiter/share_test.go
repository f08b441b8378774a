package limiter

import (
	"fmt"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestInlineMaxWindow: inline limits that keep their states for longer than the node allows are errors that name the
// field.
func TestInlineMaxWindow(t *testing.T) {
	const day = 24 * time.Hour
	inBubble(t, 2, Config{InlineMaxWindow: day}, func(t *testing.T, c *testCluster) {
		for _, test := range []struct {
			limit algo.Limit
			field string // empty: it is taken
		}{
			{algo.Limit{Algorithm: algo.FixedWindow, Limit: 5, Window: day}, ""},
			{algo.Limit{Algorithm: algo.FixedWindow, Limit: 5, Window: day + time.Millisecond}, "limit.window"},
			{algo.Limit{Algorithm: algo.SlidingLog, Limit: 5, Window: 366 * day}, "limit.window"},
			{algo.Limit{Algorithm: algo.SlidingCounter, Limit: 5, Window: day}, ""},
			{algo.Limit{Algorithm: algo.FixedWindow, Limit: 5, Period: algo.Day}, ""},
			{algo.Limit{Algorithm: algo.FixedWindow, Limit: 5, Period: algo.Week}, "limit.period"},
			{algo.Limit{Algorithm: algo.FixedWindow, Limit: 5, Period: algo.Year}, "limit.period"},
			{algo.Limit{Algorithm: algo.TokenBucket, Limit: 5, Window: day}, ""},
			{algo.Limit{Algorithm: algo.TokenBucket, Limit: 5, Window: time.Hour, Capacity: 120}, ""},
			{algo.Limit{Algorithm: algo.TokenBucket, Limit: 5, Window: time.Hour, Capacity: 121}, "limit.capacity"},
			{algo.Limit{Algorithm: algo.LeakyBucket, Limit: 1, Window: time.Hour, Capacity: 1 << 40}, "limit.capacity"},
			{algo.Limit{Algorithm: algo.FixedWindow, Limit: algo.Unlimited, Window: 366 * day}, ""},
		} {
			for i := range 8 { // at both nodes, for keys of both
				q := limit.Check{Target: limit.Target{Limit: &test.limit, Key: fmt.Sprint(i)}, Cost: 1}
				if test.field != "" {
					c.nodes[i%2].checkError(t, q, limit.Invalid, test.field)
				} else if d := c.nodes[i%2].check(t, q); !d.Allowed || d.FailedOpen {
					t.Errorf("%+v: %+v", test.limit, d)
				}
			}
		}
	})
}

// TestOneCallerFillsItsOwnShare is an attack: one caller sends batches of inline limits with windows as long as any and
// states as large as any, until it gets no room. Everybody else's limits go on, for known keys and for new ones.
func TestOneCallerFillsItsOwnShare(t *testing.T) {
	const text = `policies: [{name: login, algorithm: fixed_window, limit: 3, window: 1h}, {name: full, algorithm: fixed_window, limit: 3, window: 1h, max_keys: 20}]`
	for name, of := range map[string]struct{ attacker, other string }{
		"by namespace, without authentication": {"", ""},
		"by caller":                            {"tenant", "shop"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubbleWithin(t, 3, store.Config{MaxBytes: 8 << 20}, Config{Policies: policies(t, text)},
				func(t *testing.T, c *testCluster) {
					login := func(node int, key string) limit.Decision {
						q := named("login", key, 1)
						q.Caller = of.other
						return c.nodes[node].check(t, q)
					}
					for i := range 100 {
						login(i%3, fmt.Sprint("known", i))
					}
					longest := algo.Limit{Algorithm: algo.SlidingWindow, Limit: 10, Window: 366 * 24 * time.Hour,
						Slots: 100}
					open := 0
					for batch := range 66 {
						checks := make([]limit.Check, limit.MaxBatch)
						for i := range checks {
							checks[i] = limit.Check{Cost: 1, Target: limit.Target{
								Limit: &longest, Namespace: "tenant", Key: fmt.Sprintf("%d/%d", batch, i),
								Caller: of.attacker,
							}}
						}
						results := must.Value(c.nodes[batch%3].Check(t.Context(), checks))(t)
						for _, r := range results {
							if r.FailedOpen {
								open++
							}
						}
					}
					expect.True(t, open >= limit.MaxBatch,
						"only %d checks of the attacker have found no room: this test attacks nothing", open)
					for i := range 300 {
						d := login(i%3, fmt.Sprint("new", i))
						must.True(t, !d.FailedOpen && d.Allowed && d.Remaining == 2, "a new key of another: %+v", d)
					}
					for i := range 100 {
						d := login(i%3, fmt.Sprint("known", i))
						must.True(t, !d.FailedOpen && d.Allowed && d.Remaining == 1, "a known key of another: %+v", d)
					}
					for _, n := range c.nodes {
						_, inline, callers := n.Shares()
						expect.True(t, len(inline) == 1 && inline[0].Name == "tenant" && inline[0].Refused != 0,
							"%+v", inline)
						expect.True(t, len(callers) != 0 && callers[0].Name == of.attacker && callers[0].Refused != 0,
							"%+v", callers)
					}
				})
		})
	}
}

func TestShareOf(t *testing.T) {
	berlin := must.Value(time.LoadLocation("Europe/Berlin"))(t)
	for _, namespace := range []string{"tenant", "/tenant", "a//b", "//", "x/"} {
		for _, l := range []algo.Limit{{Algorithm: algo.FixedWindow, Window: time.Hour},
			{Algorithm: algo.FixedWindow, Period: algo.Day, Zone: berlin}} {
			if share, inline := limit.ShareOf(limit.InlineScope(namespace, &l)); share != namespace || !inline {
				t.Errorf("%q of %q", share, limit.InlineScope(namespace, &l))
			}
		}
	}
	share, inline := limit.ShareOf("login")
	expect.True(t, share == "login" && !inline, "%v %v", share, inline)
}

// TestMaxKeysOfAPolicy: a policy's own bounds, and those of namespaces, concern nobody else, and count from when they
// are changed.
func TestMaxKeysOfAPolicy(t *testing.T) {
	const text = `policies: [{name: small, algorithm: fixed_window, limit: 3, window: 1h, max_keys: %d}, {name: other, algorithm: fixed_window, limit: 3, window: 1h}]`
	inBubble(t, 1, Config{Policies: policies(t, fmt.Sprintf(text, 20)), InlineMaxKeys: 10},
		func(t *testing.T, c *testCluster) {
			open := func(q limit.Check, n int) (open int) {
				for i := range n {
					q.Key = fmt.Sprint(i)
					if c.nodes[0].check(t, q).FailedOpen {
						open++
					}
				}
				return open
			}
			own := &algo.Limit{Algorithm: algo.FixedWindow, Limit: 3, Window: time.Hour}
			inline := func(namespace string) limit.Check {
				return limit.Check{Target: limit.Target{Limit: own, Namespace: namespace}, Cost: 1}
			}
			for what, got := range map[string][2]int{
				"small":   {open(named("small", "", 1), 50), 30},
				"other":   {open(named("other", "", 1), 50), 0},
				"one":     {open(inline("one"), 15), 5},
				"another": {open(inline("another"), 10), 0},
			} {
				expect.True(t, got[0] == got[1], "%s: %d of the keys have no room, want %d", what, got[0], got[1])
			}
			c.setPolicies(fmt.Sprintf(text, 45))
			n := open(named("small", "", 1), 50)
			expect.True(t, n == 5, "with more room %d keys have none", n)
		})
}
