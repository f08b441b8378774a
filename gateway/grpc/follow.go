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

// teller is what a stream's caller is told besides answers: of the node, as far as it follows that, and the loans whose units it is to return.
// One goroutine tells all of it.
type teller struct {
	wake fifo.Signal // set when a field below has changed

	mu              sync.Mutex
	began           bool
	ready, topology bool // to be followed from now on
	recalls         []*weirv1.LoanRecall
}

// want changes what is to be told. The goroutine begins with the first call.
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

// take returns what is new since it was called last.
func (t *teller) take() (ready, topology bool, recalls []*weirv1.LoanRecall) {
	t.mu.Lock()
	defer t.mu.Unlock()
	ready, topology, recalls = t.ready, t.topology, t.recalls
	t.ready, t.topology, t.recalls = false, false, nil
	return ready, topology, recalls
}

// follow has the caller told of the node until the stream is over: once for each of the two, however often it is asked for.
func (c *checkStream) follow(in *weirv1.CheckStreamRequest) {
	c.want(func(t *teller) { t.ready, t.topology = t.ready || in.Ready, t.topology || in.Topology })
}

// tell tells until the stream is over, or broken, which the reader learns, too.
func (c *checkStream) tell() {
	news := make(chan struct{}) // of what is followed from now on
	close(news)
	var ready, topology <-chan struct{} // closed when there are news; nil: it is not followed
	var isReady *weirv1.Readiness       // as told; nil: not yet
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

// tellReady tells whether the node is ready, if that is not what was told last.
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

// tellTopology tells who owns which keys, if that is not what was told last and the caller may know it.
func (c *checkStream) tellTopology(last *weirv1.TopologyResponse) (now *weirv1.TopologyResponse, changed <-chan struct{}, err error) {
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

// topologyField is the field of the error of a caller that is not to know the topology.
const topologyField = "topology"

// sameTopology tells whether two differ in their version at most.
func sameTopology(a, b *weirv1.TopologyResponse) bool {
	return bytes.Equal(a.HashKey, b.HashKey) && a.RingSettings == b.RingSettings && a.Ring == b.Ring &&
		slices.EqualFunc(a.Members, b.Members, func(a, b *weirv1.TopologyMember) bool {
			return a.Name == b.Name && a.Boot == b.Boot && a.Grpc == b.Grpc
		})
}
