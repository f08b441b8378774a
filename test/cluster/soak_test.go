package clustertest

import (
	"flag"
	"math/rand/v2"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/checker"
)

var (
	soak     = flag.Duration("soak", 0, "have faults happen at random to real processes for so long, on a machine that does nothing else")
	soakSeed = flag.Uint64("soak-seed", 0, "which faults; 0: others each time")
)

// TestSoak keeps five nodes under load for as long as it is told, with one fault after the other, drawn at random: nodes that leave
// and come back, one or two at a time, are killed, or stand still, and, where this is root, cut networks. In between the cluster
// becomes calm. The checker judges all of it at the end: strict, sync, escrow and async side by side.
func TestSoak(t *testing.T) {
	if *soak == 0 {
		t.Skip("takes as long as it is told to, on a machine that does nothing else: -soak 1h")
	}
	binary(t)
	seed := *soakSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("the same faults again: go test ./test/cluster -run '^TestSoak$' -soak %v -soak-seed %d -timeout 0 -v", *soak, seed)
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
	// apart says that nodes may have taken each other for gone since an instant: what they counted has been merged by now.
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
			if voters := slices.DeleteFunc(gone, func(m *member) bool { return !slices.Contains(f.members[:3], m) }); len(voters) > 1 {
				// No majority is left that knows what was granted: a new epoch begins, and strict keys start full.
				f.decided(f.members[0], "probe-strict")
				suffered.quorumLosses = append(suffered.quorumLosses, checker.QuorumLoss{From: from, To: l.now()})
			}
		},
		"kill": func() {
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
