package node

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/disk"
	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

func threeMembers(state cluster.State) *cluster.View {
	members := []cluster.Member{{Name: "a", Boot: 1, State: state}, {Name: "b", Boot: 2, State: cluster.Active},
		{Name: "c", Boot: 3, State: cluster.Active}}
	var names []string
	for _, m := range members {
		if m.State == cluster.Active {
			names = append(names, m.Name)
		}
	}
	return &cluster.View{Ring: ring.Build(names), Members: members, Self: &members[0]}
}

// TestOwnershipView: what the core is told of a view.
func TestOwnershipView(t *testing.T) {
	v := threeMembers(cluster.Active)
	got := ownershipView(v, v.Ring.Without("a"), true)
	expect.True(t, got.Settled && !got.Leaving && len(got.Members) == 3,
		"settled %v, leaving %v, %d members", got.Settled, got.Leaving, len(got.Members))
	for p := range ring.Partitions {
		must.Equal(t, got.Members[got.Owners[p]].Name, v.Ring.Members()[v.Ring.Owner(p)], "partition %d: the owner", p)
		backup := got.Members[got.Backups[p]].Name
		must.True(t, backup != "a" && (got.Owners[p] == 0 || got.Owners[p] == got.Backups[p]),
			"partition %d: %s is the owner where a is not", p, backup)
	}
	v = threeMembers(cluster.Leaving)
	got = ownershipView(v, v.Ring, false)
	expect.True(t, got.Leaving && !got.Members[0].Active, "a node that leaves: %v, %v", got.Leaving, got.Members[0])
	v.Ring = v.Ring.Without("b").Without("c")
	if got := ownershipView(v, v.Ring, false); slices.Max(got.Owners) != -1 || slices.Max(got.Backups) != -1 {
		t.Error("nobody is active, and has partitions")
	}
}

// TestSteer: a view is told at once, and that it has settled when it has stood for a moment; that of a node that is not
// active never settles.
func TestSteer(t *testing.T) {
	for _, state := range []cluster.State{cluster.Active, cluster.Joining, cluster.Leaving} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			v := threeMembers(state)
			told := make(chan bool, 4)
			settled := func() (all []bool) {
				for len(told) > 0 {
					all = append(all, <-told)
				}
				return all
			}
			go steer(ctx, func() *cluster.View { return v }, (*cluster.View).Replaced,
				func(v ownership.View) { told <- v.Settled })
			time.Sleep(settleAfter - time.Millisecond) // of the bubble's time
			synctest.Wait()
			if got := settled(); !slices.Equal(got, []bool{false}) {
				t.Errorf("%v: before a view has stood for a moment it is told %v times as settled", state, got)
			}
			time.Sleep(2 * time.Millisecond)
			synctest.Wait()
			got := settled()
			expect.True(t, slices.Equal(got, []bool{state == cluster.Active}), "%v: then %v", state, got)
		})
	}
}

// TestSteerThroughReloads: that members have other policies, one after the other, changes nothing for the ownership
// protocol, neither before the view has settled nor afterwards; that one of them is going, or has begun anew, does.
func TestSteerThroughReloads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		v, next := threeMembers(cluster.Active), make(chan struct{})
		change := func(edit func(members []cluster.Member)) {
			other := *v
			other.Members = slices.Clone(v.Members)
			other.Self = &other.Members[0]
			edit(other.Members)
			old := next
			v, next = &other, make(chan struct{})
			close(old)
			synctest.Wait()
		}
		told := make(chan bool, 8)
		wasTold := func(after string, want ...bool) {
			t.Helper()
			synctest.Wait()
			var got []bool
			for len(told) > 0 {
				got = append(got, <-told)
			}
			expect.True(t, slices.Equal(got, want),
				"after %s: told of views that are settled: %v, want %v", after, got, want)
		}
		go steer(ctx, func() *cluster.View { return v }, func(*cluster.View) <-chan struct{} { return next },
			func(v ownership.View) { told <- v.Settled })
		synctest.Wait()
		for i := range 3 {
			time.Sleep(settleAfter / 4) // of the bubble's time
			change(func(members []cluster.Member) { members[i].PolicyHash++ })
		}
		time.Sleep(settleAfter/4 + time.Millisecond)
		wasTold("the start and three reloads", false, true)
		change(func(members []cluster.Member) { members[0].PolicyHash++ })
		time.Sleep(2 * settleAfter)
		wasTold("another reload")
		change(func(members []cluster.Member) { members[1].State = cluster.Leaving })
		wasTold("a member's leave", false)
		time.Sleep(2 * settleAfter)
		wasTold("some time", true)
		change(func(members []cluster.Member) { members[2].Boot++ })
		wasTold("a member's restart", false)
	})
}

// TestReadyOnceVoting: a voter of strict policies is not ready while it abstains, unless there is no majority of the
// voters; others are.
func TestReadyOnceVoting(t *testing.T) {
	t.Parallel()
	awaitTurn(t)
	strict := func(name string, voters ...string) Config {
		cfg := testConfig(t, name)
		cfg.PolicyFile = testkit.WriteFile(t, "strict.yaml",
			"policies: [{name: p, limits: [9/1m], durability: sync, consistency: strict}]")
		cfg.Voters = voters
		return cfg
	}
	n, one := mustStart(t, strict("a", "a")), mustStart(t, strict("a", "a", "b", "c"))
	join := func(cfg Config) *Node {
		cfg.Join = []string{n.view().Self.GossipAddr}
		return mustStart(t, cfg)
	}
	other, foreign := join(strict("b", "a")), join(strict("c", "c"))
	awaitSettled(t, n, other)
	st, ok := n.runner.Status()
	expect.True(t, ok && st.Voting, "ready, and voting: %v, %v", st.Voting, ok)
	if st, ok := one.runner.Status(); !ok || st.Voting || !one.votes() {
		t.Errorf("one of three has nothing to wait for: voting %v, %v", st.Voting, ok)
	}
	expect.True(t, other.votes(), "one that is no voter has nothing to wait for")
	select {
	case <-foreign.Failed():
	case <-time.After(testkit.Patience):
		t.Error("a node with other voters is a member")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	expect.ErrorContains(t, other.StopWithin(ctx), "hand-over incomplete", "stopped at once")
	expect.Equal(t, other.members(), 1, "nodes share the partitions once one of two has left")
}

// TestStatusOfLoans: whichever node is asked, what its owner has lent of a key is in the status, under the owner alone.
func TestStatusOfLoans(t *testing.T) {
	t.Parallel()
	const lendable = "policies:\n  - {name: login, algorithm: sliding_log, limit: 1000, window: 1h}\n"
	nodes := startCluster(t, "a b",
		func(_ int, cfg *Config) { cfg.PolicyFile = testkit.WriteFile(t, "policies.yaml", lendable) })
	b1 := limit.Borrow{Target: limit.Target{Policy: "login", Key: "alice"}, ID: algo.LoanID{Borrower: 7}, Want: 16}
	// lend makes another loan, as those before may have ended, and returns its owner.
	lend := func() (owner *Node) {
		b1.ID.Number++
		for _, n := range nodes {
			out := make([]limit.Lent, 1)
			wait := must.Value(n.limiter.Lend(t.Context(), []limit.Borrow{b1}, out))(t)
			if wait != nil {
				wait()
			}
			if !out[0].Unheard {
				owner = n
			}
		}
		return owner
	}
	// shown has both nodes show the loans of a key's owner.
	shown := func(want func(*weirv1.Loans) bool) bool {
		owner := lend()
		if owner == nil {
			return false
		}
		for _, n := range nodes {
			for _, m := range n.Status(t.Context()).Members {
				l := m.Loans
				if l == nil || m.Name == owner.cfg.Name && !want(l) { // nil: it did not answer in time
					return false
				}
				expect.True(t, m.Name == owner.cfg.Name || l.OnLoan+uint64(l.Borrowers)+l.Recalls+l.Expired == 0,
					"%s has lent nothing: %v", m.Name, l)
			}
		}
		return true
	}
	testkit.Eventually(t, "a loan to be seen", func() bool {
		return shown(func(l *weirv1.Loans) bool { return l.GetOnLoan() >= 16 && l.GetBorrowers() == 1 })
	})
	owner := lend()
	defer owner.limiter.OpenBorrower(7, func(limit.Recall) {})()
	testkit.Eventually(t, "an unanswered recall to be seen", func() bool {
		lend()
		q := []limit.Check{{Target: b1.Target, Cost: 1000}}
		r, err := owner.limiter.Check(t.Context(), q)
		must.True(t, err == nil && r[0].Err == nil && !r[0].Allowed, "%v %v", r, err)
		return shown(func(l *weirv1.Loans) bool { return l.GetRecalls() > 0 && l.GetUnanswered() > 0 })
	})
	testkit.Eventually(t, "expired units to be seen", func() bool {
		return shown(func(l *weirv1.Loans) bool { return l.GetExpired() >= 16 })
	})
}

const persistentPolicy = "policies:\n  - {name: login, algorithm: sliding_log, limit: %d, window: 1h, durability: sync, persist: %v}\n"

func persistentConfig(t *testing.T, name string) Config {
	cfg := testConfig(t, name)
	cfg.PolicyFile = testkit.WriteFile(t, "policies.yaml", fmt.Sprintf(persistentPolicy, 5, true))
	cfg.GossipPort, cfg.PeerPort, cfg.DataDir = PortOff, PortOff, t.TempDir()
	return cfg
}

// TestCountersOnDisk: a node that has stopped goes on counting, and says in its log, status and metrics how it does so.
func TestCountersOnDisk(t *testing.T) {
	cfg := persistentConfig(t, "a")
	var log testkit.Buffer
	cfg.Logger = log.Logger()
	n := mustSettle(t, cfg)
	for range 3 {
		expect.True(t, check(t, n, "k").Allowed, "refused")
	}
	_, status := send(t, n, "GET", "/v1/status", "", "")
	expect.True(t, strings.Contains(status, `"disk":{"bytes":`), "%s", status)
	_, metrics := send(t, n, "GET", "/metrics", "", "")
	expect.True(t, strings.Contains(metrics, "weir_disk_failed 0") && strings.Contains(metrics, "weir_disk_bytes"),
		"no metrics of the disk")
	n.Stop()
	expect.True(t, strings.Contains(log.String(), "counters saved"), "%s", log.String())
	n = mustSettle(t, cfg)
	expect.Equal(t, check(t, n, "k").Remaining, int64(1))

	// Without persist the disk forgets the key, and with it again begins with what is counted then.
	reload := func(limit int, persist bool) {
		must.NoError(t, os.WriteFile(cfg.PolicyFile, fmt.Appendf(nil, persistentPolicy, limit, persist), 0o600))
		testkit.Eventually(t, "the file is read",
			func() bool { return n.Policies().Policies()[0].Limits[0].Limit == int64(limit) })
	}
	reload(6, false)
	expect.Equal(t, check(t, n, "k").Remaining, int64(1))
	reload(7, true)
	expect.Equal(t, check(t, n, "k").Remaining, int64(1))
	n.Stop()
	n = mustSettle(t, cfg)
	expect.Equal(t, check(t, n, "k").Remaining, int64(0))
	reload(8, false)
	expect.Equal(t, check(t, n, "k").Remaining, int64(0))
	n.Stop()
	must.NoError(t, os.WriteFile(cfg.PolicyFile, fmt.Appendf(nil,
		"%s  - {name: other, limits: [1/1h], persist: true}\n", fmt.Sprintf(persistentPolicy, 8, false)), 0o600))
	n = mustSettle(t, cfg)
	expect.Equal(t, check(t, n, "k").Remaining, int64(7), "what the disk was told to forget")
}

// TestPersistRefused: what keeps a persistent policy, or a node with one, from starting.
func TestPersistRefused(t *testing.T) {
	cfg := persistentConfig(t, "a")
	without := cfg
	without.DataDir = ""
	_, err := Start(t.Context(), without)
	expect.ErrorContains(t, err, cfg.PolicyFile+":2:92: policies[0].persist: true needs a data directory")
	without.KeepNothing = true
	n := mustSettle(t, without)
	expect.True(t, check(t, n, "k").Allowed, "refused")
	n.Stop()

	mustSettle(t, cfg).Stop()
	of := func(change func(*Config), want string) {
		t.Helper()
		other := cfg
		change(&other)
		_, err := Start(t.Context(), other)
		expect.ErrorContains(t, err, "data-dir: ")
		expect.ErrorContains(t, err, want)
	}
	of(func(c *Config) { c.Name = "b" }, "is of the node a, and this is b")
	of(func(c *Config) { c.GossipPort, c.PeerPort = PortAny, PortAny }, "of another cluster, or of another secret")
	of(func(c *Config) { c.MaxKeys = -1; c.MaxMemory = 1 << 16; overfill(t, cfg) }, "more memory than max-memory")
	of(func(*Config) { keepBeyond(t, cfg) }, "none is 4093")
	manifests := must.Value(filepath.Glob(filepath.Join(cfg.DataDir, disk.Folder, "MANIFEST-*")))(t)
	must.True(t, len(manifests) > 0, "no manifest")
	for _, name := range manifests {
		must.NoError(t, os.WriteFile(name, []byte("not a manifest of an engine"), 0o600))
	}
	of(func(*Config) {}, disk.Folder+": the counters are damaged; remove this folder")
}

// keepBeyond has a node's disk keep a partition that no cluster has.
func keepBeyond(t *testing.T, cfg Config) {
	d := must.Value(disk.Open(disk.Config{Dir: cfg.DataDir, Cluster: "none", Name: cfg.Name,
		Now: func() int64 { return 0 }, Logger: cfg.Logger}))(t)
	must.NoError(t, d.Restore(func(disk.Copy) error { return nil }))
	beyond := ownership.Entry{Partition: ring.Partitions, Term: ownership.Term{N: 1}, Begin: true, Complete: true,
		Chunk: []byte{1}}
	d.Write([]*ownership.Block{{Log: 1, Position: 1, Entries: []ownership.Entry{beyond}}})
	must.NoError(t, d.Close())
}

// TestFirstPersist: the first persistent policy takes a restart, since the disk is opened at the start.
func TestFirstPersist(t *testing.T) {
	cfg := persistentConfig(t, "a")
	must.NoError(t, os.WriteFile(cfg.PolicyFile, fmt.Appendf(nil, persistentPolicy, 5, false), 0o600))
	n := mustSettle(t, cfg)
	must.NoError(t, os.WriteFile(cfg.PolicyFile, fmt.Appendf(nil, persistentPolicy, 6, true), 0o600))
	testkit.Eventually(t, "the file is rejected", func() bool { return n.policyError() != "" })
	expect.True(t, strings.Contains(n.policyError(), ":2:92: policies[0].persist: true is new, and takes a restart"),
		"%s", n.policyError())
}

// overfill has a node keep more than fits into very little memory.
func overfill(t *testing.T, cfg Config) {
	n := mustSettle(t, cfg)
	defer n.Stop()
	for i := range 2000 {
		check(t, n, strings.Repeat("k", 200)+fmt.Sprint(i))
	}
}

// TestToAwait: a node waits at its next start for members that it has lost, and for those that left while it left.
func TestToAwait(t *testing.T) {
	states := make(map[string]cluster.State)
	sees := func(want string, members ...cluster.Member) {
		t.Helper()
		v := &cluster.View{Members: members, Self: &members[0]}
		expect.Equal(t, strings.Join(toAwait(states, v), " "), want)
	}
	a, b, c, d := cluster.Member{Name: "a"}, cluster.Member{Name: "b"}, cluster.Member{Name: "c"},
		cluster.Member{Name: "d"}
	a.State, b.State, c.State, d.State = cluster.Active, cluster.Active, cluster.Leaving, cluster.Active
	sees("a b c d", a, b, c, d)
	sees("a b d", a, b, d)
	sees("a b d", a, b)
	b.State = cluster.Leaving
	sees("a b d", a, b)
	a.State = cluster.Leaving
	sees("a b d", a)
}
