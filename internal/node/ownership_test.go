package node

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weirlimit/weir/cluster"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

func threeMembers(state cluster.State) *cluster.View {
	members := []cluster.Member{{Name: "a", Boot: 1, State: state}, {Name: "b", Boot: 2, State: cluster.Active}, {Name: "c", Boot: 3, State: cluster.Active}}
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

// TestSteer: a view is told at once, and that it has settled when it has stood for a moment; that of a node that is not active
// never settles.
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
			go steer(ctx, func() *cluster.View { return v }, (*cluster.View).Replaced, func(v ownership.View) { told <- v.Settled })
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

// TestSteerThroughReloads: that members have other policies, one after the other, changes nothing for the ownership protocol, neither before
// the view has settled nor afterwards; that one of them is going, or has begun anew, does.
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
		go steer(ctx, func() *cluster.View { return v }, func(*cluster.View) <-chan struct{} { return next }, func(v ownership.View) { told <- v.Settled })
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

// TestReadyOnceVoting: a voter of strict policies is not ready while it abstains, unless there is no majority of the voters; others are.
func TestReadyOnceVoting(t *testing.T) {
	t.Parallel()
	awaitTurn(t)
	strict := func(name string, voters ...string) Config {
		cfg := testConfig(t, name)
		cfg.PolicyFile = testkit.WriteFile(t, "strict.yaml", "policies: [{name: p, limits: [9/1m], durability: sync, consistency: strict}]")
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

// TestProcess: a process is not the one that has come back under its name.
func TestProcess(t *testing.T) {
	v := threeMembers(cluster.Active)
	for _, c := range []struct {
		p     ownership.Node
		there bool
	}{{ownership.Node{Name: "b", Boot: 2}, true}, {ownership.Node{Name: "b", Boot: 1}, false}, {ownership.Node{Name: "d", Boot: 2}, false}} {
		m := process(v, c.p)
		expect.True(t, (m != nil) == c.there && (!c.there || m.Name == c.p.Name), "%v: %+v", c.p, m)
	}
}
