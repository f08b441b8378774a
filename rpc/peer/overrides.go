package peer

import (
	"context"

	"github.com/weirlimit/weir/cluster/ownership"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
)

// Notify tells a node that the overrides of the member in req have changed.
func (p *Forwarder) Notify(ctx context.Context, node ownership.Node,
	req *peerv1.NotifyOverridesRequest) (*peerv1.NotifyOverridesResponse, error) {
	_, conn, err := p.links.To(node)
	if err != nil {
		return nil, err
	}
	return peerv1.NewOverridesClient(conn).Notify(ctx, req)
}

// Pull asks a node for its overrides. The answer has none when they have the digest in req.
func (p *Forwarder) Pull(ctx context.Context, node ownership.Node,
	req *peerv1.PullOverridesRequest) (*peerv1.PullOverridesResponse, error) {
	_, conn, err := p.links.To(node)
	if err != nil {
		return nil, err
	}
	return peerv1.NewOverridesClient(conn).Pull(ctx, req)
}
