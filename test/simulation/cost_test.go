package simulation

import (
	"fmt"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/test/checker"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// volume counts the messages of the ownership protocol, and their bytes.
type volume struct{ messages, bytes int }

func (t volume) since(from volume, by int) (messages, bytes float64) {
	return float64(t.messages-from.messages) / float64(by), float64(t.bytes-from.bytes) / float64(by)
}

// TestCosts: what the ownership protocol sends in small and in large clusters: of a node in an idle second, and for a
// decision under async at 1000 checks a second and node. A check that is forwarded, and gossip, come in addition.
func TestCosts(t *testing.T) {
	t.Parallel()
	if raceEnabled {
		t.Skip("counts the same without the race detector")
	}
	for _, c := range []struct {
		nodes, voters int
		idle, decided float64 // messages at most
	}{{3, 0, 0, 0.2}, {50, 3, 10, 1}, {100, 0, 0, 1}} {
		t.Run(fmt.Sprintf("%d nodes, %d voters", c.nodes, c.voters), func(t *testing.T) {
			s := calm(1)
			s.hosts, s.voters, s.partitions = c.nodes, c.voters, 512
			limit := algo.Limit{Algorithm: algo.TokenBucket, Limit: 1e6, Capacity: 1e6, Window: time.Second}
			s.policies = []*policy{newPolicy("p", limit, checker.Async, false, false, 10_000, s.partitions)}
			w := newWorld(s)
			for _, h := range w.hosts {
				w.start(h)
			}
			w.run(10 * second)
			must.True(t, w.quiet(), "not settled")
			const rest, load = 10, 2 // seconds
			from := w.sent
			w.run(w.now + rest*second)
			messages, bytes := w.sent.since(from, rest*c.nodes)
			t.Logf("a node sends %.1f messages and %.0f bytes in an idle second", messages, bytes)
			expect.True(t, messages <= c.idle, "a node sends %.1f messages in an idle second, more than %.1f", messages,
				c.idle)

			decided, until := 0, w.now+load*second
			var ask func()
			ask = func() {
				for _, p := range w.running() {
					pol := w.policies[0]
					w.submit(p, pol, &pol.keys[w.rng.IntN(len(pol.keys))], 1, func(*op) { decided++ })
				}
				if w.now < until {
					w.after(millisecond, ask)
				}
			}
			from = w.sent
			ask()
			w.run(until + second)
			messages, bytes = w.sent.since(from, decided)
			t.Logf("%d decisions take %.2f messages and %.0f bytes each", decided, messages, bytes)
			expect.True(t, messages <= c.decided, "a decision takes %.2f messages, more than %.1f", messages, c.decided)
		})
	}
}
