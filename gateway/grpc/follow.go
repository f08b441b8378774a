package grpc

import (
	"bytes"
	"slices"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"

	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/rpc/wire"
)

// followed is what a stream's caller has asked to be told of the node. It is only for the reader, as are its methods.
type followed struct{ ready, topology bool }

// follow has the caller told of the node until the stream is over: once for each of the two, however often it is asked for.
func (c *checkStream) follow(in *weirv1.CheckStreamRequest) {
	if in.Ready && !c.followed.ready {
		c.followed.ready = true
		c.telling.Go(func() { panics.Tell(c.panicked, c.tellReady) })
	}
	if in.Topology && !c.followed.topology {
		c.followed.topology = true
		c.telling.Go(func() { panics.Tell(c.panicked, c.tellTopology) })
	}
}

// tellReady tells whether the node is ready, at once and whenever that changes.
func (c *checkStream) tellReady() {
	for last, told := false, false; ; {
		now, changed := true, (<-chan struct{})(nil)
		if c.server.cfg.Ready != nil {
			now, changed = c.server.cfg.Ready()
		}
		if !told || now != last {
			out := weirv1.CheckStreamResponseFromVTPool()
			out.Ready = &weirv1.Readiness{Ready: now}
			if c.send(out) != nil {
				return // the reader learns of a broken stream, too
			}
			last, told = now, true
		}
		select {
		case <-changed:
		case <-c.done:
			return
		}
	}
}

// tellTopology tells who owns which keys, at once and whenever that changes, as long as the caller may know it.
func (c *checkStream) tellTopology() {
	for last := (*weirv1.TopologyResponse)(nil); ; {
		now, changed, denied := c.server.cfg.Topology(c.stream.Context())
		out := weirv1.CheckStreamResponseFromVTPool()
		switch {
		case denied != nil:
			out.Error = callerError(denied, wire.StreamField)
			out.Error.Field = topologyField
			_ = c.send(out)
			return
		case last != nil && sameTopology(now, last):
			out.ReturnToVTPool()
		default:
			last = now
			if out.Topology = now; c.send(out) != nil {
				return
			}
		}
		select {
		case <-changed:
		case <-c.done:
			return
		}
	}
}

// topologyField is the field of the error of a caller that is not to know the topology.
const topologyField = "topology"

// sameTopology tells whether two differ in their version at most.
func sameTopology(a, b *weirv1.TopologyResponse) bool {
	return bytes.Equal(a.HashKey, b.HashKey) && a.RingSettings == b.RingSettings && a.Ring == b.Ring &&
		slices.EqualFunc(a.Members, b.Members, func(a, b *weirv1.TopologyMember) bool {
			return a.Name == b.Name && a.Boot == b.Boot && a.Grpc == b.Grpc
		})
}
