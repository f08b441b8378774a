package clustertest

import (
	"context"
	"flag"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/test/checker"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

var survive = flag.Bool("survive", false, "run the tests of what counters survive, on a machine that does nothing else")

// survival is for the tests of what counters survive. All of them put a load on a cluster, let something happen to it,
// and have the checker judge what was answered.
func survival(t *testing.T) {
	t.Helper()
	if !*survive {
		t.Skip("starts many nodes under load, and needs a machine to itself: -survive")
	}
	t.Parallel()
	binary(t) // so that building it is not taken for time that nodes take
}

// plainOnly is for those that take too long under the race detector, whose part TestScale, TestCrash and TestBelongings
// do.
func plainOnly(t *testing.T) {
	t.Helper()
	if raceEnabled {
		t.Skip("not under the race detector: whole clusters take minutes there")
	}
}

// begin starts members, waits until all policies are decided everywhere, and begins to ask. The voters of a cluster
// that has just been started grant nothing for the time that a lease lasts.
func (f *fleet) begin(members ...*member) *load {
	f.t.Helper()
	began := time.Now()
	f.start(members...)
	f.calm(members...)
	calm := time.Since(began)
	f.decided(members[0], "probe-strict")
	f.t.Logf("%d nodes: calm after %v, strict policies decided after %v", len(members), calm.Round(time.Millisecond),
		time.Since(began).Round(time.Millisecond))
	return startLoad(f, members...)
}

// TestScale: 3 nodes, 5, 2, in good order: nothing is forgotten, and no request fails.
func TestScale(t *testing.T) {
	survival(t)
	f := newFleet(t, 5, policyFile(), nil)
	n := f.members
	l := f.begin(n[:3]...)
	l.bite()
	f.start(n[3:]...)
	l.with(n[3:]...)
	t.Logf("5 nodes: calm after %v", f.calm(n...).Round(time.Millisecond))
	l.bite()
	// Two at once, then a voter: those that are left must still have a majority.
	for _, gone := range [][]*member{n[3:], n[2:3]} {
		took := l.leave(gone...)
		t.Logf("%d nodes left within %v", len(gone), took.Round(time.Millisecond))
	}
	t.Logf("2 nodes: calm after %v", f.calm(n[:2]...).Round(time.Millisecond))
	l.bite()
	l.noneFailed(0)
	l.judge(faults{})
}

// noneFailed checks that no request has failed since an instant: all nodes have come and left in good order.
func (l *load) noneFailed(from int64) {
	l.t.Helper()
	available, strict := l.tellFailures("while nodes came and left", from, l.now())
	expect.True(l.t, len(l.suspicions()) != 0 || available+strict <= 0,
		"requests failed although nodes came and left in good order")
}

// leave is what a load balancer and a process manager do: no new requests once the node has been told to end.
func (l *load) leave(members ...*member) time.Duration {
	l.t.Helper()
	l.without(members...)
	return l.f.leave(members...)
}

// TestRollingRestart restarts five nodes in good order, one as soon as the one before is ready.
func TestRollingRestart(t *testing.T) {
	plainOnly(t)
	survival(t)
	f := newFleet(t, 5, policyFile(), nil)
	l := f.begin(f.members...)
	l.bite()
	from := l.now()
	for _, m := range f.members {
		left := l.leave(m)
		began := time.Now()
		f.start(m)
		l.with(m)
		t.Logf("%s: left within %v, ready again after %v", m.name, left.Round(time.Millisecond),
			time.Since(began).Round(time.Millisecond))
	}
	t.Logf("calm after %v", f.calm(f.members...).Round(time.Millisecond))
	l.noneFailed(from)
	l.bite()
	l.judge(faults{})
}

// TestCrash kills a node that owns a third of all keys, lets it come back, and kills another: what is forgotten is what
// the durability says, side by side for all of them.
func TestCrash(t *testing.T) {
	survival(t)
	f := newFleet(t, 3, policyFile(), nil)
	n := f.members
	l := f.begin(n...)
	var suffered faults
	for _, victim := range []*member{n[1], n[2]} {
		l.bite()
		rest := slices.DeleteFunc(slices.Clone(n), func(m *member) bool { return m == victim })
		l.without(victim)
		alive := l.gone(victim)
		at := l.kill(victim)
		suffered.crashes = append(suffered.crashes, checker.Crash{At: at, Node: victim.name, Copied: true})
		l.tellDecided(rest[0])
		t.Logf("calm after %v", f.calm(rest...).Round(time.Millisecond))
		l.tellFailures("from the crash on", at, l.now())
		l.bite()
		f.start(victim)
		alive()
		l.with(victim)
		t.Logf("%s is back: calm after %v", victim.name, f.calm(n...).Round(time.Millisecond))
	}
	l.bite()
	l.judge(suffered)
}

// kill kills a member and returns when it was dead.
func (l *load) kill(m *member) int64 {
	l.t.Helper()
	m.kill()
	return l.now()
}

// tellDecided logs how long it takes from now until all partitions are decided again, and fails when that is too long.
func (l *load) tellDecided(asked *member) {
	l.t.Helper()
	took := make(map[string]time.Duration)
	var work sync.WaitGroup
	var mu sync.Mutex
	for _, policy := range []string{"probe", "probe-strict"} {
		work.Go(func() {
			d := l.f.decided(asked, policy)
			mu.Lock()
			defer mu.Unlock()
			took[policy] = d
		})
	}
	work.Wait()
	for policy, d := range took {
		l.t.Logf("%s: all partitions are decided again after %v, asked through %s", policy, d.Round(time.Millisecond),
			asked.name)
		// Four seconds are promised, on a machine that does nothing else.
		expect.True(l.t, d <= 30*time.Second, "%s: that is too long", policy)
	}
}

// decided asks a member about a key of every partition until each has been decided, and returns how long that took.
func (f *fleet) decided(m *member, policy string) time.Duration {
	f.t.Helper()
	began := time.Now()
	// for all batches together: who refuses at once is not to be asked all the time
	pause := time.NewTicker(time.Millisecond)
	defer pause.Stop()
	var left atomic.Int64
	var work sync.WaitGroup
	for batch := range slices.Chunk(keyOfEach(policy), 64) {
		work.Go(func() {
			for time.Since(began) < time.Minute {
				if batch = m.undecided(policy, batch); len(batch) == 0 {
					return
				}
				<-pause.C
			}
			left.Add(int64(len(batch)))
		})
	}
	work.Wait()
	n := left.Load()
	expect.True(f.t, n <= 0, "%s: %d partitions have not been decided for %v, asked through %s", policy, n,
		time.Since(began).Round(time.Second), m.name)
	return time.Since(began)
}

// undecided asks a member about keys and returns those that nobody has decided.
func (m *member) undecided(policy string, keys []string) (left []string) {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	request := &weirv1.CheckRequest{}
	for _, key := range keys {
		request.Checks = append(request.Checks, &weirv1.Check{Target: &weirv1.Target{Policy: policy, Key: key}})
	}
	response, err := m.limiter.Check(ctx, request)
	if err != nil {
		return keys
	}
	for i, r := range response.Results {
		if d := r.GetDecision(); d == nil || d.FailedClosed || d.FailedOpen {
			left = append(left, keys[i])
		}
	}
	return left
}

// keyOfEach returns keys of a policy, one in each partition.
func keyOfEach(policy string) []string {
	keys := make([]string, ring.Partitions)
	for i, found := 0, 0; found < len(keys); i++ {
		key := "probe-" + strconv.Itoa(i)
		if p := ring.Partition(ring.Hash(ring.HashKey{}, policy, key)); keys[p] == "" {
			keys[p] = key
			found++
		}
	}
	return keys
}

// TestRestartInPlace kills a node and starts it anew at once, before the others can have missed it: what it held is
// where its copy is, and the process that comes back under its name and address has nothing.
func TestRestartInPlace(t *testing.T) {
	plainOnly(t)
	survival(t)
	f := newFleet(t, 3, policyFile(), nil)
	l := f.begin(f.members...)
	var suffered faults
	for _, m := range f.members[:2] {
		l.bite()
		l.without(m)
		alive := l.gone(m)
		at := l.kill(m)
		suffered.crashes = append(suffered.crashes, checker.Crash{At: at, Node: m.name, Copied: true})
		f.launch(m)
		took := time.Duration(l.now() - at)
		must.True(t, took <= 2*time.Second, "this machine takes %v to start a process", took)
		l.tellDecided(f.members[2])
		m.awaitReady()
		alive()
		t.Logf("%s is ready again after %v", m.name, time.Duration(l.now()-at).Round(time.Millisecond))
		l.with(m)
		t.Logf("calm after %v", f.calm(f.members...).Round(time.Millisecond))
		l.tellFailures("from the crash on", at, l.now())
	}
	l.bite()
	l.judge(suffered)
}

// TestPause stops a process for longer than its leases last and longer than it takes to be declared dead, with
// questions in progress. When it goes on it believes for a moment that it still owns what others have taken over since.
func TestPause(t *testing.T) {
	plainOnly(t)
	survival(t)
	f := newFleet(t, 3, policyFile(), nil)
	n := f.members
	l := f.begin(n...)
	l.bite()
	paused, rest := n[1], []*member{n[0], n[2]}
	l.without(paused)
	var direct sync.WaitGroup
	askPaused := func() {
		for i := range 150 {
			policy := l.policies[i%len(l.policies)].Name
			direct.Go(func() { l.put(paused, policy, keyNamed(l.newestKey()-i%5), 60*time.Second) })
		}
	}
	askPaused()
	until := l.unreachable(n...) // when it goes on it may take the others for gone
	paused.signal(syscall.SIGSTOP)
	from := l.now()
	askPaused() // which it finds when it goes on
	l.tellDecided(rest[0])
	f.calm(rest...)
	l.bite()
	t.Logf("%s goes on after %v", paused.name, time.Duration(l.now()-from).Round(time.Millisecond))
	paused.signal(syscall.SIGCONT)
	direct.Wait()
	t.Logf("calm after %v", f.calm(n...).Round(time.Millisecond))
	until(l.now())
	l.observe(n[0])
	to := l.now()
	l.with(paused)
	l.tellFailures("from the pause on", from, to)
	l.bite()
	l.judge(faults{splits: []checker.Split{{From: from, To: to, Sides: 2}}})
}

// TestCutBothWays parts two of five nodes from the others, among them one of the three voters. Available policies are
// decided on both sides, strict ones on the side of the majority only; afterwards the sides merge.
func TestCutBothWays(t *testing.T) {
	plainOnly(t)
	survival(t)
	testCut(t, 2, func(network *network, majority, minority []int) {
		network.cut(minority, majority)
		network.cut(majority, minority)
	})
}

// TestCutOneWay: the two hear nothing any more, but are heard.
func TestCutOneWay(t *testing.T) {
	plainOnly(t)
	survival(t)
	// They spread it that the others are dead, who deny it: each may be alone in the others' eyes for a moment.
	testCut(t, 5, func(network *network, majority, minority []int) { network.cut(minority, majority) })
}

func testCut(t *testing.T, sides int, cut func(network *network, majority, minority []int)) {
	network := newNetwork(t, 5)
	f := newFleet(t, 5, policyFile(), network)
	n := f.members
	var majority, minority []*member
	var inside, outside []int
	for i, m := range n {
		if i == 2 || i == 4 {
			minority, outside = append(minority, m), append(outside, i)
		} else {
			majority, inside = append(majority, m), append(inside, i)
		}
	}
	l := f.begin(n...)
	l.bite()
	until := l.unreachable(n...)
	from := l.now()
	cut(network, inside, outside)
	l.tellDecided(majority[0])
	took := f.decided(minority[0], "probe")
	t.Logf("probe: all partitions are decided again after %v more, asked through %s", took.Round(time.Millisecond),
		minority[0].name)
	for _, m := range minority {
		if keys := keyOfEach("probe-strict"); len(m.undecided("probe-strict", keys[:1000])) != 1000 {
			t.Errorf("%s decides strict policies though it has no majority", m.name)
		}
	}
	l.bite()
	l.tellFailures("from the cut on", from, l.now())
	healed := l.now()
	network.heal()
	t.Logf("healed after %v: calm after %v", time.Duration(healed-from).Round(time.Millisecond),
		f.calm(n...).Round(time.Millisecond))
	until(l.now())
	l.observe(n[0])
	to := l.now()
	l.tellFailures("while healing", healed, to)
	l.bite()
	l.judge(faults{splits: []checker.Split{{From: from, To: to, Sides: sides}}})
}

var (
	soak = flag.Duration("soak", 0,
		"have faults happen at random to real processes for so long, on a machine that does nothing else")
	soakSeed = flag.Uint64("soak-seed", 0, "which faults; 0: others each time")
)

// TestSoak keeps five nodes under load for as long as it is told, with one fault after the other, drawn at random:
// nodes that leave and come back, one or two at a time, are killed, or stand still, and, where this is root, cut
// networks. In between the cluster becomes calm. The checker judges all of it at the end: strict, sync, escrow and
// async side by side.
func TestSoak(t *testing.T) {
	if *soak == 0 {
		t.Skip("takes as long as it is told to, on a machine that does nothing else: -soak 1h")
	}
	binary(t)
	seed := *soakSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("the same faults again: go test ./test/cluster -run '^TestSoak$' -soak %v -soak-seed %d -timeout 0 -v",
		*soak, seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	var cut *network
	if syscall.Geteuid() == 0 {
		cut = newNetwork(t, 5)
	}
	f := newFleet(t, 5, policyFile(), cut)
	l := f.begin(f.members...)
	var suffered faults
	between := func(low, high time.Duration) time.Duration { return low + time.Duration(rng.Int64N(int64(high-low))) }
	draw := func(n int) []*member {
		all := slices.Clone(f.members)
		rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		return all[:n]
	}
	// apart says that nodes may have taken each other for gone since an instant: what they counted has been merged by
	// now.
	apart := func(from int64, sides int) {
		l.observe(f.members[0])
		suffered.splits = append(suffered.splits, checker.Split{From: from, To: l.now(), Sides: sides})
	}
	kinds := map[string]func(){
		"leave": func() {
			gone := draw(1 + rng.IntN(2))
			from := l.now()
			took := l.leave(gone...)
			t.Logf("%d left within %v", len(gone), took.Round(time.Millisecond))
			f.start(gone...)
			l.with(gone...)
			if voters := slices.DeleteFunc(gone,
				func(m *member) bool { return !slices.Contains(f.members[:3], m) }); len(voters) > 1 {
				// No majority is left that knows what was granted: a new epoch begins, and strict keys start full.
				f.decided(f.members[0], "probe-strict")
				suffered.quorumLosses = append(suffered.quorumLosses, checker.QuorumLoss{From: from, To: l.now()})
			}
		},
		"kill": func() {
			// Until the voters have recorded the copies, some 1.5 s, a crash has strict keys start full.
			time.Sleep(1500 * time.Millisecond)
			victim := draw(1)[0]
			l.without(victim)
			alive := l.gone(victim)
			at := l.kill(victim)
			suffered.crashes = append(suffered.crashes, checker.Crash{At: at, Node: victim.name, Copied: true})
			time.Sleep(between(0, 4*time.Second)) // it comes back in place, before the others know or after
			f.start(victim)
			alive()
			l.with(victim)
		},
		"pause": func() {
			victim := draw(1)[0]
			until := l.unreachable(f.members...)
			from := l.now()
			l.without(victim)
			victim.signal(syscall.SIGSTOP)
			time.Sleep(between(100*time.Millisecond, 8*time.Second))
			victim.signal(syscall.SIGCONT)
			l.with(victim)
			f.calm(f.members...)
			until(l.now())
			apart(from, 2)
		},
	}
	names := []string{"leave", "leave", "kill", "kill", "pause"}
	if cut != nil {
		part := func(both bool, sides int) func() {
			return func() {
				minority := []int{rng.IntN(5)}
				if other := rng.IntN(5); other != minority[0] {
					minority = append(minority, other)
				}
				var majority []int
				for i := range 5 {
					if !slices.Contains(minority, i) {
						majority = append(majority, i)
					}
				}
				until := l.unreachable(f.members...)
				from := l.now()
				cut.cut(minority, majority)
				if both {
					cut.cut(majority, minority)
				}
				time.Sleep(between(200*time.Millisecond, 10*time.Second))
				cut.heal()
				f.calm(f.members...)
				until(l.now())
				apart(from, sides)
			}
		}
		kinds["cut"], kinds["cut one way"] = part(true, 2), part(false, 5)
		names = append(names, "cut", "cut one way")
	}
	happened := make(map[string]int)
	for end := time.Now().Add(*soak); time.Now().Before(end) && !t.Failed(); {
		name := names[rng.IntN(len(names))]
		from := l.now()
		kinds[name]()
		took := f.calm(f.members...)
		l.calms = append(l.calms, l.now())
		happened[name]++
		l.tellFailures(name, from, l.now())
		t.Logf("%s %s: calm after %v", l.clock(from), name, took.Round(time.Millisecond))
		l.bite()
	}
	t.Logf("what happened: %v", happened)
	l.judge(suffered)
}
