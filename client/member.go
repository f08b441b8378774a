package client

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/internal/fifo"
	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/stream"
)

const (
	// maxReports bounds the reports of loans that wait for one node. The borrower's book (internal/lend) repeats a
	// dropped one.
	maxReports = 4
	// maxWaiting bounds the checks that wait for one node, and so the memory of a program while a node hangs. Further
	// checks fail at once (errFull).
	maxWaiting = 20_000
	// maxUnanswered bounds the messages of checks without their last answer. A node stops reading a stream while 64
	// messages of the stream wait for other nodes. The client stops at 48, so that the node still reads reports of
	// loans, whose units those messages may wait for.
	maxUnanswered = 48
	// minLife is how long a stream must last. If it ended sooner, run pauses before it opens the next one, unless a
	// check waits. gRPC connects again at once when an established connection ends. So without the pause, a client
	// whose connections a node accepts and then closes would connect a thousand times a second.
	minLife = 5 * time.Second
	// The first pause is minPause; each further one is twice as long, up to maxPause. run waits for a random time from
	// half of the pause to all.
	minPause, maxPause = 200 * time.Millisecond, 15 * time.Second
)

// member is one node. A client has one connection to it, which unary calls (message.go, calls.go) and one stream share:
// the stream has checks, loans, readiness and the topology. The stream is opened when the node is first wanted, and
// again whenever it has ended. The connection is closed when the member is given up, because its address is gone
// (renewLocked) or the client is closed. One goroutine opens streams and writes; another one reads each stream:
//
//	run, talk  open streams, with a pause after one that did not last
//	send       queues a request
//	next       makes a message of the checks in the queue
//	received   handles what the node sends; onAnswer handles answers to checks
//	ended      fails the requests that wait for a stream that has ended
//
// A node can reject a client in three ways. If no connection can be made, requests fail as untried, the state becomes
// failed, and run tries again as soon as gRPC does. If the connection is closed before minLife, the same happens, and
// run pauses. If the node rejects the stream as overloaded, messages that were sent fail as untried as well, because
// the node carried out nothing, and run pauses.
//
// Checks gather in a queue. It is sent when fewer than maxUnanswered messages lack their last answer, and the queue has
// as many checks as are in flight, or MaxBatch. So a lone caller does not wait for others, nor does a second one; many
// callers have a few large messages in flight, which saves CPU, because a message costs as much as some tens of checks;
// and a check waits for at most one round trip, below maxUnanswered.
//
// Words:
//
//	request    the checks of one call that go to this node
//	message    what is sent at once: checks of several requests (message.go); a probe is a message without checks
//	sent       messages on the open stream without the last of their answers
//	in flight  of a check: its message is sent and has no answer yet, not even its first (inFlight). out counts more:
//	           also what is queued
//	hung       the node was ready, and left a call unanswered; it gets checks only if pick finds none ready or
//	           connecting
//	untried    of an error: the node carried out nothing, so another may be asked. errFull is not untried, so that the
//	           check fails at once
//	answered, unanswered, unknown  the outcome of a call, for the breaker and for heard (breaker.go)
//
// Other files must keep: every request given to send ends exactly once (message.go), or is dropped by gatherLocked if
// its caller has gone. A caller uses a request again only if it has ended without an error. A request has at most
// MaxBatch checks.
//
// Its methods are safe for concurrent use.
type member struct {
	nodes  *nodes
	addr   string
	conn   *grpc.ClientConn
	ctx    context.Context
	cancel context.CancelFunc
	wanted atomic.Bool
	start  chan struct{} // closed when the node is wanted
	wake   fifo.Signal   // wakes the writer
	hurry  fifo.Signal   // ends run's pause, because a check waits for a stream
	state  atomic.Int32  // what is known of the node: one of the constants below
	out    atomic.Int64  // calls and checks whose callers wait for this node, also those in the queue
	barred atomic.Int64  // until when the node gets no reports of loans, by the clock of loans

	mu       sync.Mutex
	err      error // why the last stream has ended
	queue    fifo.Queue[*request]
	queued   int // checks in queue
	waiting  int // checks in queue, and in messages without the last of their answers
	inFlight int // checks in messages that are in flight: sent, and not answered for the first time
	reports  []*weirv1.BorrowRequest
	probing  bool                // a probe is to be sent
	sent     map[uint64]*message // on the open stream, by sequence, without the last answer; nil: no stream is open
	sequence uint64              // of the last message
	// the node may not know the numbers that packer has defined: the next message begins anew
	renumber bool

	// Only for the writer: whether it has asked for readiness and for the topology on this stream, and what packs
	// messages.
	greeted, follows bool
	packer           packer
}

// The states of a node, and what sets them. failed is the last one (best).
const (
	connecting int32 = iota // it is not wanted, or its stream is being opened (run), or has ended in good order (ended)
	ready                   // it says that it is ready (received), or has answered while it was hung (onAnswer, heard)
	hung                    // it was ready, and has left a call unanswered since (heard)
	unready                 // it says that it is not ready, but answers as well as it can (received)
	failed                  // its last stream could not be opened, or failed before minLife, and run pauses (ended)
)

func newMember(ns *nodes, addr string, conn *grpc.ClientConn) *member {
	m := &member{nodes: ns, addr: addr, conn: conn, start: make(chan struct{}), wake: fifo.NewSignal(),
		hurry: fifo.NewSignal(), err: errNoStream}
	m.ctx, m.cancel = context.WithCancel(ns.ctx)
	return m
}

// want has run open streams, from now on.
func (m *member) want() {
	if !m.wanted.Load() && m.wanted.CompareAndSwap(false, true) {
		close(m.start)
	}
}

// ifReady returns m if it is ready, otherwise nil. If the node is not connected, ifReady has it connected for later
// checks.
func (m *member) ifReady() *member {
	if m == nil || m.state.Load() == ready {
		return m
	}
	m.want()
	return nil
}

// run opens streams until the member is given up. While gRPC cannot connect, run tries again when gRPC does, and after
// lookUpPause. Otherwise it pauses after a stream that did not last, but not while a check waits for a stream (hurry).
func (m *member) run() {
	defer m.conn.Close()
	select {
	case <-m.start:
	case <-m.ctx.Done():
		return
	}
	for pause := time.Duration(0); m.ctx.Err() == nil; {
		m.become(connecting)
		began := m.nodes.now()
		err := m.talk()
		lasted := m.nodes.now()-began >= minLife
		m.ended(err, lasted)
		if m.conn.GetState() == connectivity.TransientFailure {
			m.nodes.unreached.Set()
			ctx, cancel := context.WithTimeout(m.ctx, lookUpPause)
			m.conn.WaitForStateChange(ctx, connectivity.TransientFailure)
			cancel()
			continue
		}
		pause = pauseAfter(err, lasted, pause)
		select {
		case <-time.After(pause/2 + rand.N(pause/2+1)):
		case <-m.hurry:
		case <-m.ctx.Done():
		}
	}
}

// pauseAfter returns the pause after a stream that has ended with err, and after the pause last. A node that ends
// streams in good order (EOF) is about to accept the next one, and callers wait for it: that pause does not grow.
func pauseAfter(err error, lasted bool, last time.Duration) time.Duration {
	switch {
	case lasted:
		return 0
	case errors.Is(err, io.EOF):
		return minPause
	}
	return min(max(2*last, minPause), maxPause)
}

// become notes the state of the node, and wakes the callers that wait for a node.
func (m *member) become(state int32) {
	m.state.Store(state)
	m.nodes.change(func() {})
}

// talk opens a stream and runs it until it breaks, and returns why.
func (m *member) talk() error {
	ctx, cancel := context.WithCancel(m.ctx)
	defer cancel()
	s, err := weirv1.NewLimiterClient(m.conn).CheckStream(ctx)
	if err != nil {
		return err
	}
	m.mu.Lock()
	m.sent, m.renumber = make(map[uint64]*message), true
	m.mu.Unlock()
	m.greeted, m.follows = false, false
	return stream.Run(s, cancel, m.wake, m.next, m.received)
}

// ended fails the requests that wait for a stream that has ended or could not be opened. It sets the state first:
// another attempt of such a request must not pick this member as a ready one.
func (m *member) ended(err error, lasted bool) {
	// If the node ended the stream in good order (EOF), such as at its max-connection-age, it carried out only what it
	// answered. If it rejected the stream (overloaded), it carried out nothing.
	untried := overloaded(err)
	if errors.Is(err, io.EOF) {
		untried, lasted, err = true, true, status.Error(codes.Unavailable, "the node takes no more checks")
	}
	m.mu.Lock()
	sent, queue := m.sent, m.queue
	m.sent, m.queue, m.reports, m.err = nil, fifo.Queue[*request]{}, nil, err
	m.queued, m.waiting, m.inFlight, m.probing = 0, 0, 0, false
	m.mu.Unlock()
	if lasted {
		m.become(connecting) // run opens the next stream at once, or after minPause
	} else {
		m.become(failed)
	}
	for _, x := range sent {
		x.fail(err, untried)
	}
	for _, f := range queue.Items() {
		f.fail(err, true)
	}
	m.nodes.loans.lost(m)
	others, _, _ := m.nodes.members()
	m.nodes.unfollow(m, others)
}

// report queues a report of loans, or drops it if maxReports wait already: the book repeats it. It returns false if no
// stream is open.
func (m *member) report(in *weirv1.BorrowRequest) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.sent == nil {
		return false
	}
	if len(m.reports) < maxReports {
		m.reports = append(m.reports, in)
		m.wake.Set()
	}
	return true
}

// send queues a request. It fails the request if there is no connection or too many checks wait. If the connection
// stands without a stream, it has run open one at once.
func (m *member) send(f *request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.sent == nil && m.conn.GetState() != connectivity.Ready:
		f.fail(m.err, true)
	case m.waiting+len(f.checks) > maxWaiting:
		f.fail(errFull, false)
	default:
		m.waiting += len(f.checks)
		m.queued += len(f.checks)
		f.open = len(f.checks)
		m.queue.Push(f)
		if m.wakeIfDueLocked(); m.sent == nil {
			m.hurry.Set()
		}
	}
}

var (
	errFull     = status.Error(codes.Unavailable, "too many checks wait for this node")
	errNoStream = status.Error(codes.Unavailable, "the node is not connected")
)

// dueLocked reports whether the checks in the queue are to be sent.
func (m *member) dueLocked() bool {
	return m.queued > 0 && m.queued >= min(m.inFlight, limit.MaxBatch) && len(m.sent) < maxUnanswered
}

func (m *member) wakeIfDueLocked() {
	if m.dueLocked() {
		m.wake.Set()
	}
}

// next returns what to write next: the request for readiness and topology, a report of loans, a probe, or checks; nil
// if there is nothing.
func (m *member) next() *weirv1.CheckStreamRequest {
	if follow := !m.follows && m.nodes.follow(m); follow || !m.greeted {
		m.greeted, m.follows = true, follow
		return &weirv1.CheckStreamRequest{Ready: true, Topology: follow}
	}
	report, x := m.take()
	switch {
	case report != nil:
		return &weirv1.CheckStreamRequest{Borrow: report}
	case x != nil:
		out := m.packer.pack(x, m.nodes.now())
		m.mu.Lock()
		m.sent[x.sequence] = x // after pack, which reads the requests: a faulty node may answer what it has not got yet
		m.mu.Unlock()
		return out
	}
	return nil
}

// take returns the next report of loans, or else the next message: a probe, which has no checks, or the checks in the
// queue. Both are nil if there is neither.
func (m *member) take() (report *weirv1.BorrowRequest, x *message) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.reports) > 0 {
		report = m.reports[0]
		m.reports = m.reports[1:]
		return report, nil
	}
	x = &message{}
	if m.probing {
		m.probing = false
	} else if m.gatherLocked(x); x.open == 0 {
		return nil, nil
	}
	if m.renumber {
		m.renumber = false
		m.packer.numbers.Reset()
	}
	m.inFlight += len(x.checks)
	m.sequence++
	x.sequence = m.sequence
	return nil, x
}

// gatherLocked adds to a message the checks in the queue, if they are to be sent. It drops those whose callers have
// gone.
func (m *member) gatherLocked(x *message) {
	if !m.dueLocked() {
		return
	}
	for m.queue.Len() > 0 && len(x.checks)+len(m.queue.First().checks) <= limit.MaxBatch {
		f := m.queue.Pop()
		m.queued -= len(f.checks)
		if f.gone.Load() {
			m.waiting -= len(f.checks)
		} else {
			x.add(f)
		}
	}
}

// received handles a response. It returns an error if the response is invalid.
func (m *member) received(out *weirv1.CheckStreamResponse) error {
	field := out.Error.GetField()
	switch {
	case out.Ready != nil && out.Ready.Ready:
		m.become(ready)
	case out.Ready != nil:
		m.become(unready)
	case out.Topology != nil:
		m.nodes.learned(out.Topology)
	case field == "topology": // this caller may not have the topology
		m.nodes.connectAll()
	case strings.HasPrefix(field, "borrow."):
		m.nodes.loans.rejected(m, out.Error)
	case out.Borrow != nil:
		m.nodes.loans.onAnswer(m, out.Borrow)
	default:
		return m.onAnswer(out)
	}
	return nil
}

// onAnswer handles a response to checks or to a probe.
func (m *member) onAnswer(out *weirv1.CheckStreamResponse) error {
	m.mu.Lock()
	x := m.sent[out.Sequence]
	if x == nil {
		m.mu.Unlock()
		return errOddAnswer
	}
	if !x.begun {
		x.begun = true
		m.inFlight -= len(x.checks)
	}
	if !out.More {
		delete(m.sent, out.Sequence)
		m.waiting -= len(x.checks)
	}
	m.wakeIfDueLocked()
	if out.Error != nil {
		m.renumber = true // the node may not have read the numbers of the message
	}
	m.mu.Unlock()
	if len(x.checks) == 0 { // a probe
		m.state.CompareAndSwap(hung, ready)
		return nil
	}
	if e := out.Error; e != nil {
		// The node carried out nothing of the message. Its checks are sent again, in other messages.
		x.fail(status.Error(codes.Code(e.GetCode()), strings.TrimPrefix(e.GetField()+": "+e.GetMessage(), ": ")), true)
		return nil
	}
	err := x.answer(out)
	if err != nil && !out.More {
		x.fail(err, false) // x has left m.sent, so ended cannot fail it
	}
	return err
}

// heard notes the outcome of a call to the node, and how long it took. A node that has left a call unanswered counts as
// hung until it answers a call or the probe, says whether it is ready, or its stream ends. The probe is sent once,
// after the cooldown.
func (m *member) heard(ctx context.Context, err error, o outcome, took time.Duration) {
	if err != nil && (status.Code(err) == codes.DeadlineExceeded || ctx.Err() != nil) {
		// The caller's own deadline may have been short, so the call counts as unanswered only if it took a tenth of
		// the client's timeout. A healthy node answers before any deadline that it is sent, even if the owner that it
		// asks does not.
		o = unknown
		if took >= m.nodes.timeout/10 {
			o = unanswered
		}
	}
	switch {
	case o == answered && m.state.Load() == hung:
		m.state.CompareAndSwap(hung, ready)
	case o == unanswered && m.state.CompareAndSwap(ready, hung):
		time.AfterFunc(m.nodes.cooldown, m.probe)
	}
}

// probe sends a hung node an empty message. A healthy node answers an empty message at once.
func (m *member) probe() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.sent != nil && m.state.Load() == hung {
		m.probing = true
		m.wake.Set()
	}
}
