package peer

import (
	"context"

	"github.com/weirlimit/weir/cluster/ownership"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
)

// Push gives a node overrides.
func (p *Forwarder) Push(ctx context.Context, node ownership.Node, req *peerv1.PushOverridesRequest) (*peerv1.PushOverridesResponse, error) {
	_, conn, err := p.links.To(node)
	if err != nil {
		return nil, err
	}
	return peerv1.NewOverridesClient(conn).Push(ctx, req)
}

// Pull asks a node for its overrides.
func (p *Forwarder) Pull(ctx context.Context, node ownership.Node, req *peerv1.PullOverridesRequest) (*peerv1.PullOverridesResponse, error) {
	_, conn, err := p.links.To(node)
	if err != nil {
		return nil, err
	}
	return peerv1.NewOverridesClient(conn).Pull(ctx, req)
}
