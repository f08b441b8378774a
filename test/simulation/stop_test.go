package simulation

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/checker"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestStopSeeds stops all nodes at random instants of their lives, by kill -9 and otherwise, and starts them again:
// policies with Persist go on counting from their disks. Nodes crash alone, leave and come back before; hosts are
// rebooted, disks lose what was not synced, all they had, or come late.
func TestStopSeeds(t *testing.T) {
	from, count := *firstOf, uint64(*allSeeds)/3
	if *oneSeed >= 0 {
		from, count = uint64(*oneSeed), 1
	}
	seeds := make(chan uint64)
	var work sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		work.Go(func() {
			for seed := range seeds {
				r := playStops(seed, *oneSeed >= 0 && testing.Verbose())
				if r.verbose {
					fmt.Println(strings.Join(r.lines, "\n"))
				}
				if vs := r.violations(); len(vs) > 0 {
					t.Errorf("seed %d: %d violations, such as %v%s\n%s", seed, len(vs), vs[0], replay(t, seed),
						strings.Join(r.lines, "\n"))
				}
			}
		})
	}
	for seed := from; seed < from+count && !t.Failed(); seed++ {
		seeds <- seed
	}
	close(seeds)
	work.Wait()
}

// stopper is a run of TestStopSeeds.
type stopper struct {
	*run
	singles bool // nodes crash alone, too
	reboots bool
	loses   bool // disks
	down    bool // all are, and none starts yet
}

func playStops(seed uint64, verbose bool) *run {
	rng := rand.New(rand.NewPCG(seed, 2))
	s := calm(seed)
	s.disks = true
	s.hosts, s.partitions = 1+rng.IntN(4), 2+rng.IntN(6)
	s.jitter, s.internal = rng.Int64N(5*millisecond), 200_000
	s.detect, s.discover = [2]int64{second, 3 * second}, [2]int64{50 * millisecond, 500 * millisecond}
	s.settle = 700 * millisecond
	s.spread, s.rates = 100*int64(time.Hour), 1_000_000
	if rng.IntN(3) == 0 {
		s.chunk = 1 << (7 + rng.IntN(5))
	}
	r := &stopper{run: &run{weather: stormy, climate: temperate()}, singles: rng.IntN(2) == 0,
		reboots: rng.IntN(3) == 0, loses: rng.IntN(3) == 0}
	s.policies = persistent(rng, s.partitions, !r.singles)
	r.world = newWorld(s)
	r.verbose = verbose
	// two writes of the disk, and the codec
	r.history.Flush = 40*time.Millisecond + time.Duration(s.tick) + 45*time.Millisecond
	r.history.Late = 500 * time.Millisecond
	if r.reboots {
		// the time in between counts as nothing: three times 36 s for a host that comes late
		r.history.Late += 2 * time.Minute
	}
	r.live()
	return r.run
}

// persistent draws policies with Persist, of each durability.
func persistent(rng *rand.Rand, partitions int, none bool) (all []*policy) {
	algorithms := []algo.Algorithm{algo.SlidingLog, algo.TokenBucket, algo.FixedWindow, algo.SlidingWindow,
		algo.SlidingCounter, algo.LeakyBucket, algo.Concurrency}
	for d := checker.Async; d <= checker.Sync; d++ {
		for _, a := range []algo.Algorithm{algo.SlidingLog, algorithms[rng.IntN(len(algorithms))]} {
			if a == algo.Concurrency && d == checker.Escrow {
				a = algo.SlidingLog
			}
			limit := algo.Limit{Algorithm: a, Limit: 10 + rng.Int64N(100),
				Window: time.Duration(10+rng.IntN(50)) * time.Second}
			p := newPolicy(fmt.Sprintf("p%d", len(all)), limit, d, false, false, 1+rng.IntN(2), partitions)
			if p.rule.Persist = true; none && d == checker.Async && rng.IntN(2) == 0 {
				p.rule.Durability = store.None // the disk is told of it all the same
			}
			all = append(all, p)
		}
	}
	return all
}

func (r *stopper) live() {
	w := r.world
	w.say("seed %d: %d nodes, %d partitions, nodes crash alone: %v, reboots: %v, disks are lost: %v",
		w.seed, len(w.hosts), w.partitions, r.singles, r.reboots, r.loses)
	for _, p := range w.policies {
		w.trace("%s: %v %d in %v, durability %d", p.Name, p.rule.Limits[0].Algorithm, p.Limit, p.Window, p.Durability)
	}
	for _, h := range w.hosts {
		w.after(w.rng.Int64N(second), func() { w.start(h) })
	}
	w.run(second)
	r.converge("at the start")
	r.until = never
	w.after(0, r.traffic)
	for range 1 + w.rng.IntN(3) {
		r.trouble()
		r.stopAll()
		if !w.chance(0.3) {
			r.converge("after a stop")
			w.run(w.now + w.rng.Int64N(10*second))
		}
	}
	r.converge("at the end")
	w.run(w.now + 3*second)
	r.until = w.now
	w.run(w.now + 2*second)
	w.record()
	for _, p := range w.running() {
		_ = p.disk.disk.Close() // its memory is that of a hundred seeds otherwise
	}
}

// trouble lets something happen, the consequences of which may go on.
func (r *stopper) trouble() {
	w := r.world
	w.run(w.now + w.rng.Int64N(5*second))
	p := r.any()
	switch w.rng.IntN(3) {
	case 0:
		if r.singles && len(w.running()) > 1 {
			p.crash()
			w.say("%s crashes alone", p.self.Name)
			w.after(w.rng.Int64N(4*second), func() { r.back(p.host) })
		}
	case 1:
		if len(w.running()) > 1 {
			w.say("%s is to leave", p.self.Name)
			p.leave()
			w.after(w.rng.Int64N(10*second), func() { r.back(p.host) })
		}
	}
	w.run(w.now + w.rng.Int64N(4*second))
}

// back starts a host, unless all are down.
func (r *stopper) back(h *host) {
	if !r.down {
		r.open(h)
	}
}

// stopAll stops all processes within a moment, and starts them again: some of them without what was on their disks, or
// too late to be waited for.
func (r *stopper) stopAll() {
	w := r.world
	for _, h := range w.hosts {
		h.kept = nil
	}
	spread := []int64{1, 20 * millisecond, 500 * millisecond}[w.rng.IntN(3)]
	for _, p := range w.running() {
		w.after(w.rng.Int64N(spread), func() {
			if !p.ended {
				p.stop()
			}
		})
	}
	r.down = true
	w.run(w.now + spread)
	w.say("all have stopped")
	down, last := w.rng.Int64N(20*second), 3*second
	missing := r.miss()
	for _, h := range w.hosts {
		if r.reboots && w.chance(0.5) {
			h.drive.boot++
		}
		after := w.rng.Int64N(3 * second)
		if missing[h] {
			after += 3 * second
			if h.drive.fs != nil {
				after += restoreWait
			}
			last = 6*second + restoreWait
		}
		w.after(down+after, func() {
			r.down = false
			r.open(h)
		})
	}
	w.run(w.now + down + last)
}

// miss draws the hosts whose disks are lost, or come after the others have claimed. What was on their disks only may be
// forgotten: for each key, what was changed after the last instant that another disk has. (A late disk brings it back,
// but as much may be admitted meanwhile.) The other hosts start first: one with an empty disk that is alone claims all
// partitions, as new.
func (r *stopper) miss() map[*host]bool {
	w := r.world
	missing := make(map[*host]bool)
	for _, h := range w.hosts {
		if !r.loses || len(missing) == len(w.hosts)-1 || !w.chance(0.5) {
			continue
		}
		missing[h] = true
		late := w.chance(0.4)
		if !late {
			h.drive.fs = nil
		}
		w.say("the disk of %s is missing; late: %v", h.name, late)
	}
	if len(missing) == 0 {
		return nil
	}
	w.lose(func(pol *policy, k *store.Key) int64 {
		since := int64(-1)
		for _, h := range w.hosts {
			if h.kept != nil && !missing[h] && (h.kept[k.Partition].held || pol.rule.Durability != store.None) {
				since = max(since, h.kept[k.Partition].saved)
			}
		}
		w.trace("%s: others have it up to %v", k.Key, time.Duration(since))
		return since
	})
	return missing
}

// lose notes that of each key what has changed since an instant may be forgotten, by whichever node it was decided.
func (w *world) lose(since func(*policy, *store.Key) int64) {
	f := checker.Crash{At: w.now, Copied: true, Lost: true, Flushed: make(map[string]int64)}
	for _, pol := range w.policies {
		for i := range pol.keys {
			f.Flushed[pol.keys[i].Key] = since(pol, &pol.keys[i])
		}
	}
	w.history.Crashes = append(w.history.Crashes, f)
}

// stop is a crash of a process whose disk stays.
func (p *process) stop() {
	w := p.w
	held := make([]bool, w.partitions)
	for part := range held {
		held[part] = p.owns(part)
	}
	p.crash()
	f := &w.history.Crashes[len(w.history.Crashes)-1]
	f.Copied = true
	for _, pol := range w.policies {
		for i := range pol.keys {
			k := &pol.keys[i]
			f.Flushed[k.Key] = p.data.parts[k.Partition].saved
		}
	}
	p.host.kept = make([]kept, w.partitions)
	for part := range p.host.kept {
		p.host.kept[part] = kept{p.data.parts[part].saved, held[part]}
	}
}

// kept is what a disk has of a partition.
type kept struct {
	saved int64 // what was changed up to this instant
	held  bool  // it is the holder's: a backup gets nothing of durability none
}

// TestOwnerKilledBefore kills the owner of a key of durability none alone, whose backup knows nothing of the key and
// claims its partition, and perhaps all others soon after. Once the owner's disk is there, what was counted before is
// counted again, and what was reset stays reset where the backup knew of it.
func TestOwnerKilledBefore(t *testing.T) {
	for _, all := range []bool{false, true} {
		s := calm(1)
		s.disks = true
		w := newWorld(s)
		limit := algo.Limit{Algorithm: algo.SlidingLog, Limit: 10, Window: time.Hour}
		pol := newPolicy("p", limit, checker.Async, false, false, 1, 1)
		pol.rule.Persist = true
		none := *pol.rule
		none.Scope, none.Durability = "none", store.None
		left := func(rule *store.Rule, cost int64) int64 {
			p := w.target(0)
			a, err := p.data.Decide(pol.keys[0], rule, p.clock().Instant, store.Call{Request: algo.Request{Cost: cost}},
				nil)
			must.NoError(t, err)
			w.run(w.now + second)
			return a.Remaining
		}
		start := func() {
			for _, h := range w.hosts {
				if h.proc == nil {
					w.start(h)
				}
			}
			must.True(t, w.until(w.now+30*second, w.quiet), "not settled")
		}
		start()
		left(pol.rule, 4)
		left(&none, 7)
		first := w.target(0)
		first.crash()
		must.True(t, w.until(w.now+10*second, func() bool { return w.target(0).owns(0) }), "nobody claims")
		must.NoError(t, w.target(0).data.Reset(pol.keys[0], pol.rule.Scope))
		w.run(w.now + second)
		if all {
			for _, p := range w.running() {
				p.crash()
			}
		}
		start()
		w.run(w.now + 3*second)
		expect.Equal(t, left(&none, 0), int64(3), "all were killed: %v", all)
		expect.Equal(t, left(pol.rule, 0), int64(10), "after a reset; all were killed: %v", all)
		expect.Equal(t, len(w.violations()), 0, "violations")
	}
}
