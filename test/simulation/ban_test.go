package simulation

import (
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/test/checker"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestBans: a key that is banned stays so while its partition moves from node to node, and when a node is lost whose
// copy knew of it. No check is admitted meanwhile, and after the ban its key has room again.
func TestBans(t *testing.T) {
	for seed := range uint64(3) {
		s := calm(seed)
		s.hosts, s.partitions, s.rates = 4, 8, 200_000
		limit := algo.Limit{Algorithm: algo.SlidingLog, Limit: 5, Window: time.Second}
		bucket := algo.Limit{Algorithm: algo.TokenBucket, Limit: 5, Window: time.Second}
		s.policies = []*policy{
			newPolicy("async", limit, checker.Async, false, false, 12, s.partitions),
			newPolicy("sync", bucket, checker.Sync, false, false, 12, s.partitions),
			newPolicy("escrow", limit, checker.Escrow, false, false, 12, s.partitions),
		}
		for _, p := range s.policies {
			p.rule.Ban = 5 * time.Second
		}
		w := newWorld(s)
		for _, h := range w.hosts[:3] {
			w.start(h)
		}
		settled := func() {
			t.Helper()
			must.True(t, w.until(30*second, w.quiet), "not settled")
		}
		settled()
		until := int64(never)
		var ask func()
		ask = func() {
			all := w.running()
			pol := w.policies[w.rng.IntN(len(w.policies))]
			if at := all[w.rng.IntN(len(all))]; at.state == active {
				w.submit(at, pol, &pol.keys[w.rng.IntN(len(pol.keys))], 1+w.rng.Int64N(2), nil)
			}
			if w.now < until {
				w.after(5*millisecond+w.rng.Int64N(10*millisecond), ask)
			}
		}
		ask()
		for _, h := range w.hosts[:3] { // one after the other
			w.run(w.now + 2*second)
			h.proc.leave()
			must.True(t, w.until(20*second, func() bool { return h.proc == nil }), "it does not end")
			w.start(h)
			settled()
		}
		w.start(w.hosts[3])
		settled()
		w.run(w.now + 3*second)
		w.hosts[1].proc.crash()
		w.run(w.now + 6*second)
		w.start(w.hosts[1])
		settled()
		until = 0
		w.run(w.now + 6*second)

		for _, v := range w.violations() {
			t.Errorf("seed %d: %v", seed, v)
		}
		began := make(map[string]string) // by key, the node that banned it last
		bans, elsewhere, admitted := 0, 0, 0
		for _, o := range w.history.Operations {
			switch {
			case o.Bans > 0:
				bans++
				began[o.Key] = o.Node
			case o.Banned && began[o.Key] != "" && began[o.Key] != o.Node:
				elsewhere++
			case o.Result == checker.Admitted:
				admitted++
			}
		}
		expect.True(t, bans >= 50 && elsewhere >= 50 && admitted >= 500,
			"seed %d: %d bans, %d checks refused by them at another node, %d admitted: nothing is tested", seed, bans,
			elsewhere, admitted)
	}
}
