package node

import (
	"context"
	"time"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/gateway/gubernator"
	"github.com/weirlimit/weir/ring"
)

// gubernatorService returns the service for a listener.
func (n *Node) gubernatorService(listener string) *gubernator.Server {
	return gubernator.New(gubernator.Config{
		Service: n.security.auth.Service(listener, n.limiter), HashKey: n.hashKey, Owner: n.owners, Health: n.gubernatorHealth, Now: time.Now,
	})
}

// owners returns ownerAddress for callers with the role topology. Others could find keys that one node decides for by asking.
func (n *Node) owners(ctx context.Context) func(hash uint64) string {
	if n.security.auth.Roles(ctx)&auth.RoleTopology == 0 {
		return nil
	}
	return n.ownerAddress
}

// ownerAddress is where callers reach the node that decides for a hash; empty where that is this node or not known.
func (n *Node) ownerAddress(hash uint64) string {
	v := n.view()
	if v == nil {
		return ""
	}
	r := n.runner.Route(ring.Partition(hash))
	if m := v.Member(r.Node.Name); r.Standing != ownership.Owned && m != nil && m.Boot == r.Node.Boot {
		return m.GRPCAddr
	}
	return ""
}

// gubernatorHealth is the node's health as Gubernator's callers are told it.
func (n *Node) gubernatorHealth() gubernator.Health {
	out := gubernator.Health{Peers: n.members(), Address: addrOf(n.listeners.grpc)}
	if v := n.view(); v != nil {
		out.Address = v.Self.GRPCAddr
	}
	if !n.readiness.Settled() {
		out.Problem = "the node is not ready"
	}
	return out
}
