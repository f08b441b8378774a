package grpc

import (
	"bytes"
	"slices"
	"sync"

	"github.com/weirlimit/weir/internal/fifo"
	"github.com/weirlimit/weir/internal/panics"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
)

// teller has what a stream's caller is told besides answers: the node's readiness and the topology, if the caller
// follows them, and recalls of loans. One goroutine (tell) sends all of it.
type teller struct {
	wake fifo.Signal // set when a field below changes

	mu              sync.Mutex
	began           bool // tell runs
	ready, topology bool // the caller has asked to follow these; tell has not seen that yet
	recalls         []*weirv1.LoanRecall
}

// want changes the fields of teller and wakes tell. The first call starts tell.
func (c *checkStream) want(change func(*teller)) {
	t := &c.teller
	t.mu.Lock()
	defer t.mu.Unlock()
	change(t)
	if !t.began {
		t.began = true
		c.telling.Go(func() { panics.Tell(c.panicked, c.tell) })
	}
	t.wake.Set()
}

// take returns the changes since the last call.
func (t *teller) take() (ready, topology bool, recalls []*weirv1.LoanRecall) {
	t.mu.Lock()
	defer t.mu.Unlock()
	ready, topology, recalls = t.ready, t.topology, t.recalls
	t.ready, t.topology, t.recalls = false, false, nil
	return ready, topology, recalls
}

// follow has tell send the readiness or the topology until the stream ends. Asking again changes nothing.
func (c *checkStream) follow(in *weirv1.CheckStreamRequest) {
	c.want(func(t *teller) { t.ready, t.topology = t.ready || in.Ready, t.topology || in.Topology })
}

// tell sends until the stream has ended or a send fails; the reader notices a failed stream itself.
func (c *checkStream) tell() {
	news := make(chan struct{}) // closed: makes the first report of what is followed due
	close(news)
	var ready, topology <-chan struct{} // closed when there is something new; nil: not followed
	var isReady *weirv1.Readiness       // as sent last; nil: not yet
	var is *weirv1.TopologyResponse
	for err := error(nil); err == nil; {
		select {
		case <-c.teller.wake:
			followReady, followTopology, recalls := c.teller.take()
			if followReady && isReady == nil {
				ready = news
			}
			if followTopology && topology == nil {
				topology = news
			}
			if len(recalls) > 0 {
				out := weirv1.CheckStreamResponseFromVTPool()
				out.Borrow = &weirv1.BorrowResponse{Recalls: recalls}
				err = c.send(out)
			}
		case <-ready:
			isReady, ready, err = c.tellReady(isReady)
		case <-topology:
			is, topology, err = c.tellTopology(is)
		case <-c.done:
			return
		}
	}
}

// tellReady sends whether the node is ready, if that differs from last. changed is closed when it may differ again.
func (c *checkStream) tellReady(last *weirv1.Readiness) (now *weirv1.Readiness, changed <-chan struct{}, err error) {
	now = &weirv1.Readiness{Ready: true}
	if c.server.cfg.Ready != nil {
		now.Ready, changed = c.server.cfg.Ready()
	}
	if last == nil || now.Ready != last.Ready {
		out := weirv1.CheckStreamResponseFromVTPool()
		out.Ready = now
		err = c.send(out)
	}
	return now, changed, err
}

// tellTopology sends the topology, if it differs from last. A caller without the right to it gets an error, and is not
// told again.
func (c *checkStream) tellTopology(
	last *weirv1.TopologyResponse) (now *weirv1.TopologyResponse, changed <-chan struct{}, err error) {
	now, changed, denied := c.server.cfg.Topology(c.stream.Context())
	if denied == nil && last != nil && sameTopology(now, last) {
		return last, changed, nil
	}
	out := weirv1.CheckStreamResponseFromVTPool()
	if denied != nil {
		out.Error = wire.ProtoError(wire.StreamNamed(denied))
		out.Error.Field = topologyField
		return nil, nil, c.send(out)
	}
	out.Topology = now
	return now, changed, c.send(out)
}

// topologyField is the field of the error for a caller without the right to the topology.
const topologyField = "topology"

// sameTopology says whether two topologies differ in nothing but their version.
func sameTopology(a, b *weirv1.TopologyResponse) bool {
	return bytes.Equal(a.HashKey, b.HashKey) && a.RingSettings == b.RingSettings && a.Ring == b.Ring &&
		slices.EqualFunc(a.Members, b.Members, func(a, b *weirv1.TopologyMember) bool {
			return a.Name == b.Name && a.Boot == b.Boot && a.Grpc == b.Grpc
		})
}
