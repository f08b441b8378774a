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

// gaps watches, millisecond by millisecond, for how long nobody may decide for a partition: under strict rules, and
// under others.
type gaps struct {
	*world
	strict, plain []int64 // by partition: since when nobody may; 0: somebody does
	longest       [2]int64
	where         [2]string
	until         int64

	ready         map[*process]bool
	asked, waited [2]int64
	waiting       [2]string
	failed        [2][]string
}

// traffic asks, every millisecond or so, about a key of each policy.
func (g *gaps) traffic() {
	for kind, pol := range g.policies {
		key := &pol.keys[g.rng.IntN(len(pol.keys))]
		all := g.running()
		at := all[g.rng.IntN(len(all))]
		g.ready[at] = g.ready[at] || at.core.Settled() && len(at.view.Members) == len(all)
		if at.state != active || !g.ready[at] {
			continue // nobody asks a node before it is ready, or when it is to leave
		}
		g.asked[kind]++
		g.submit(at, pol, key, 1, func(o *op) {
			if o.result != checker.Admitted {
				g.failed[kind] = append(g.failed[kind], fmt.Sprintf("%.3f s: %s of partition %d, at %s: %s, by %q",
					float64(o.sent)/1e9, o.key.Key, o.key.Partition, at.self.Name, o.why, o.node))
			}
			if d := g.now - o.sent; d > g.waited[kind] {
				g.waited[kind], g.waiting[kind] = d,
					fmt.Sprintf("partition %d at %s from %.3f s", o.key.Partition, at.self.Name, float64(o.sent)/1e9)
			}
		})
	}
	if g.now < g.until {
		g.after(500_000, g.traffic)
	}
}

func (g *gaps) watch() {
	for part := range g.partitions {
		plain, strict := false, false
		for _, p := range g.running() {
			if p.paused || !p.owns(part) {
				continue
			}
			plain = true
			d := &p.data.parts[part]
			strict = strict || d.lease > p.clock().Boot && (d.caught || d.unguarded)
		}
		g.note(0, g.strict, part, strict)
		g.note(1, g.plain, part, plain)
	}
	if g.now < g.until {
		g.after(millisecond, g.watch)
	}
}

func (g *gaps) note(kind int, since []int64, part int, decides bool) {
	switch {
	case !decides && since[part] == 0:
		since[part] = g.now
	case decides && since[part] != 0:
		if d := g.now - since[part]; d > g.longest[kind] {
			g.longest[kind], g.where[kind] = d,
				fmt.Sprintf("partition %d from %.3f to %.3f s", part, float64(since[part])/1e9, float64(g.now)/1e9)
		}
		since[part] = 0
	}
}

// newGaps starts some of the hosts of a cluster with three voters, and begins to ask and to watch when it has settled.
func newGaps(t *testing.T, seed uint64, hosts, started, partitions int) *gaps {
	t.Helper()
	s := calm(seed)
	s.hosts, s.voters, s.partitions = hosts, 3, partitions
	s.discover = [2]int64{20 * millisecond, 1500 * millisecond} // who is there is heard of by gossip, sooner or later
	limit := algo.Limit{Algorithm: algo.TokenBucket, Limit: 1e6, Capacity: 1e6, Window: time.Second}
	s.policies = []*policy{
		newPolicy("strict", limit, checker.Sync, true, false, partitions, partitions),
		newPolicy("plain", limit, checker.Sync, false, false, partitions, partitions),
	}
	w := newWorld(s)
	for _, h := range w.hosts[:started] {
		w.start(h)
	}
	must.True(t, w.until(30*second, w.quiet), "not settled at the start")
	w.run(w.now + 4*second)
	g := &gaps{world: w, ready: make(map[*process]bool), strict: make([]int64, partitions),
		plain: make([]int64, partitions), until: never}
	w.after(0, g.watch)
	w.after(0, g.traffic)
	return g
}

// TestPlannedMoves: while a cluster of many partitions is restarted node by node, grows and shrinks, and no message is
// lost, no check fails, and none waits for more than 50 ms, under strict rules as under others.
func TestPlannedMoves(t *testing.T) {
	t.Parallel()
	partitions := 600
	if raceEnabled {
		partitions = 60
	}
	g := newGaps(t, 1, 4, 3, partitions)
	w := g.world
	ready := func(what string) {
		t.Helper()
		begun := w.now
		must.True(t, w.until(30*second, w.quiet), "not settled %s", what)
		t.Logf("%8.3f settled %s after %v", float64(w.now)/1e9, what, time.Duration(w.now-begun))
	}
	said := [2]int64{}
	look := func(what string) {
		t.Helper()
		for kind, name := range []string{"under strict rules", "under others"} {
			t.Logf("%s: nobody decides %s for up to %v: %s", what, name, time.Duration(g.longest[kind]), g.where[kind])
			t.Logf("%s: of %d checks %s %d failed, and one waited for %v: %s", what, g.asked[kind], name,
				len(g.failed[kind]), time.Duration(g.waited[kind]), g.waiting[kind])
			for _, why := range g.failed[kind][:min(len(g.failed[kind]), 10)] {
				t.Error(why)
			}
			said[kind] = max(said[kind], g.longest[kind], g.waited[kind])
			g.longest[kind], g.asked[kind], g.waited[kind], g.failed[kind] = 0, 0, 0, nil
		}
	}
	for _, h := range w.hosts[:3] {
		h.proc.leave()
		must.True(t, w.until(20*second, func() bool { return h.proc == nil }), "it does not end")
		look(h.name + " left")
		w.run(w.now + second)
		w.start(h)
		ready(h.name + " is back")
		w.until(10*second, func() bool { return h.proc.core.Status(h.clock()).Voting })
		w.run(w.now + second)
		look(h.name + " is back")
	}
	w.start(w.hosts[3])
	ready("with one more")
	w.run(w.now + second)
	look("one more")
	w.hosts[3].proc.leave()
	w.until(20*second, func() bool { return w.hosts[3].proc == nil })
	ready("with one less")
	look("one less")
	g.until = 0
	if said[0] > 50*millisecond || said[1] > 50*millisecond {
		t.Errorf("nobody decides, or a check waits, for up to %v under strict rules, %v under others",
			time.Duration(said[0]), time.Duration(said[1]))
	}
}

// TestTwoLeave: while two of five members leave, the second some time after the first, no check fails, and none waits
// for more than 50 ms, under strict rules as under others. Members hear of each leave at different times, so their
// rings differ for a while, and a ring may name the member that leaves second for what the first one still holds.
func TestTwoLeave(t *testing.T) {
	for _, later := range []int64{0, 800, 2500} {
		for seed := range uint64(3) {
			t.Run(fmt.Sprintf("%dms-%d", later, seed), func(t *testing.T) {
				t.Parallel()
				twoLeave(t, seed+1, later*millisecond)
			})
		}
	}
}

func twoLeave(t *testing.T, seed uint64, later int64) {
	g := newGaps(t, seed, 5, 5, 200)
	w := g.world
	w.run(w.now + second)
	w.hosts[4].proc.leave()
	w.run(w.now + later)
	w.hosts[3].proc.leave()
	must.True(t, w.until(30*second, func() bool { return w.hosts[3].proc == nil && w.hosts[4].proc == nil }),
		"they do not end")
	must.True(t, w.until(30*second, w.quiet), "not settled")
	w.run(w.now + 2*second)
	g.until = 0
	for kind, name := range []string{"strict", "plain"} {
		t.Logf("%s: nobody decides for up to %v: %s", name, time.Duration(g.longest[kind]), g.where[kind])
		t.Logf("%s: of %d checks %d failed, and one waited for %v: %s", name, g.asked[kind], len(g.failed[kind]),
			time.Duration(g.waited[kind]), g.waiting[kind])
		for _, why := range g.failed[kind][:min(len(g.failed[kind]), 10)] {
			t.Error(why)
		}
		expect.True(t, max(g.longest[kind], g.waited[kind]) <= 50*millisecond,
			"%s: nobody decides for %v, or a check waits for %v", name, time.Duration(g.longest[kind]),
			time.Duration(g.waited[kind]))
	}
}
