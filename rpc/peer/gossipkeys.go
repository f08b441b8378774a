package peer

import (
	"context"

	"github.com/weirlimit/weir/cluster/ownership"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// GossipKeys has a node carry out one step of a change of gossip keys, and returns the keys that the node has
// afterwards.
func (p *Forwarder) GossipKeys(ctx context.Context, node ownership.Node,
	req *weirv1.GossipKeysRequest) (*weirv1.MemberKeys, error) {
	_, conn, err := p.links.To(node)
	if err != nil {
		return nil, err
	}
	return peerv1.NewGossipKeysClient(conn).Apply(ctx, req)
}
