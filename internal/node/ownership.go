package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/cluster/runner"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/ring"
)

// settleAfter is how long a view of the membership must stand before partitions are claimed or moved by it, so that
// changes that come together are seen together. (A crash takes two seconds to be seen anyway.)
const settleAfter = 150 * time.Millisecond

// clocks returns the clock of decisions, which is also the clock of stored states, and the clock of leases. The latter
// goes on while the host is suspended, because other nodes take over meanwhile.
func clocks() (decisions func() algo.Instant, leases func() int64) {
	return limiter.ProcessClock(), runner.BootTime
}

// steer updates the runner's view from the membership until ctx ends. It ignores changes that the ownership protocol
// does not see, such as of the members' policy hashes: each would delay claims and moves by settleAfter.
func steer(ctx context.Context, current func() *cluster.View, replaced func(*cluster.View) <-chan struct{},
	set func(ownership.View)) {
	for v := current(); ; {
		backups := v.Ring.Without(v.Self.Name)
		set(ownershipView(v, backups, false))
		stood := time.After(settleAfter)
		for told := v; sameToOwnership(told, v); {
			select {
			case <-replaced(v):
				v = current()
			case <-stood:
				set(ownershipView(v, backups, v.Self.State == cluster.Active))
			case <-ctx.Done():
				return
			}
		}
	}
}

// sameToOwnership reports whether ownershipView returns the same for both views.
func sameToOwnership(a, b *cluster.View) bool {
	return a.Self.State == b.Self.State && slices.EqualFunc(a.Members, b.Members, func(a, b cluster.Member) bool {
		return nodeOf(&a) == nodeOf(&b) && a.State == b.State
	})
}

// ownershipView returns a view in the form of the ownership protocol.
func ownershipView(v *cluster.View, backups *ring.Table, settled bool) ownership.View {
	out := ownership.View{
		Members: make([]ownership.Member, len(v.Members)),
		Owners:  make([]int32, ring.Partitions),
		Backups: make([]int32, ring.Partitions),
		Settled: settled,
		Leaving: v.Self.State == cluster.Leaving,
	}
	at := make(map[string]int32, len(v.Members))
	for i := range v.Members {
		m := &v.Members[i]
		out.Members[i] = ownership.Member{Node: nodeOf(m), Active: m.State == cluster.Active}
		at[m.Name] = int32(i)
	}
	fill(out.Owners, v.Ring, at)
	fill(out.Backups, backups, at)
	return out
}

// fill writes the owners of a table as indices into a view's members.
func fill(owners []int32, t *ring.Table, at map[string]int32) {
	members := make([]int32, len(t.Members()))
	for i, name := range t.Members() {
		members[i] = at[name]
	}
	for p := range owners {
		owners[p] = -1
		if i := t.Owner(p); i >= 0 {
			owners[p] = members[i]
		}
	}
}

// aloneView returns the view of a node without gossip.
func aloneView(self ownership.Node) ownership.View {
	return ownership.View{
		Members: []ownership.Member{{Node: self, Active: true}},
		Owners:  make([]int32, ring.Partitions),
		Settled: true,
	}
}

// handOver hands everything over to the other members. It is no error if there are none.
func (n *Node) handOver(ctx context.Context) error {
	err := n.runner.Drain(ctx)
	n.awaitSaved(ctx)
	if err != nil {
		n.log.Info("hand-over incomplete", "reason", err)
		if errors.Is(err, runner.ErrNobody) {
			return nil
		}
		return fmt.Errorf("hand-over incomplete: %w", err)
	}
	return nil
}
