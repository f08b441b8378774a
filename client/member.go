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
	// maxUnanswered bounds the messages of checks without their last response. A node stops reading a stream while 64
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

// member is one node, with one connection and, on it, one stream. The stream has checks, loans, readiness and the
// topology; unary calls (calls.go) use the connection beside it. The path of a check:
//
//	send      puts its request into the queue
//	take      makes a message of the queue, when that is due (dueLocked); next packs it for the wire
//	received  gets the node's responses; onAnswer passes those to checks to their requests
//	ended     fails what waits when the stream ends
//
// run opens streams one after the other, from want until the member is given up, because its address is gone
// (renewLocked) or the client is closed. run and the writer of the stream are one goroutine; each stream has another
// one that reads.
//
// Words:
//
//	request   the checks of one call that go to this node (message.go)
//	message   requests that are sent together. The node answers it by one response or several; all but the last one
//	          have More. An Error for the whole message is always the last. A message without checks is a probe
//	untried   of an error: the node carried out nothing. CheckTo (remote.go) then sends the checks again, usually to
//	          another node, and maxTries times in all. Other errors go to attempt (decide.go), which repeats a call once
//	          if it cannot charge twice. errFull is not untried, so that the check fails at once
//
// How a stream ends decides what becomes of its requests and of the member:
//
//	                            messages sent  queue    state       the next stream is opened
//	the node stops (EOF)        untried        untried  connecting  after minPause; at once if this one lasted minLife
//	it is overloaded            untried        untried  failed      after a pause that doubles each time
//	it breaks within minLife    not untried    untried  failed      after a pause that doubles each time
//	it breaks later             not untried    untried  connecting  at once
//	it could not be opened      none           untried  failed      when gRPC tries again, or after lookUpPause
//
// A check that send puts into the queue ends the pause. send does that only while the connection stands; otherwise it
// fails the check.
//
// The counters (ended sets all but outstanding to 0):
//
//	             counts            from                   until                               used by
//	outstanding  calls and checks  before they are sent   the caller has its answer, or goes  best (nodes.go)
//	waiting      checks            send                   the last response to their message  maxWaiting
//	queued       checks            send                   take                                dueLocked
//	inFlight     checks            take                   the first response                  dueLocked
//	len(sent)    messages          next                   the last response                   maxUnanswered
//
// The queue is sent when queued is at least min(inFlight, MaxBatch) and fewer than maxUnanswered messages are sent. So
// a lone caller does not wait. Many callers have few large messages in flight. That saves CPU, because a message costs
// as much as some tens of checks. Below maxUnanswered, a check stays in the queue at most until the messages before it
// have their first responses. A node sends these at once, because they wait for no other node.
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
	state  atomic.Int32  // one of the constants below
	barred atomic.Int64  // until when the node gets no reports of loans, by the clock of loans

	outstanding atomic.Int64 // calls and checks whose callers wait

	mu       sync.Mutex
	err      error // why the last stream has ended; before the first one, errNoStream
	queue    fifo.Queue[*request]
	waiting  int                 // checks that have not had their last response
	queued   int                 // checks in queue
	inFlight int                 // checks in messages that have not had their first response
	sent     map[uint64]*message // by sequence; nil: no stream is open
	sequence uint64              // of the last message
	reports  []*weirv1.BorrowRequest
	probing  bool // a probe is to be sent
	// renumber says that the node may not know the numbers that packer has defined: the next message begins anew.
	renumber bool

	// Only the writer uses these: whether it has asked for readiness and for the topology on this stream, and what
	// packs messages.
	greeted, follows bool
	packer           packer
}

// The states of a node. run sets connecting before it opens a stream. While the stream is open, the state follows what
// the node says and does. When the stream ends, ended sets connecting or failed.
const (
	// connecting: the node is not wanted yet; or its stream is being opened; or the stream is open, and the node has
	// not said whether it is ready; or its last stream has ended in good order or after minLife.
	connecting int32 = iota
	// ready: the node says that it is ready (received), or has answered while it was hung (onAnswer, heard).
	ready
	// hung: it was ready, and has left a call unanswered since (heard). pick returns it only if no node is ready or
	// connecting.
	hung
	// unready: it says that it is not ready, but answers as well as it can (received).
	unready
	// failed: its last stream could not be opened or failed before minLife (ended), and run waits. It is the last
	// constant (best).
	failed
)

func newMember(ns *nodes, addr string, conn *grpc.ClientConn) *member {
	m := &member{nodes: ns, addr: addr, conn: conn, start: make(chan struct{}), wake: fifo.NewSignal(),
		hurry: fifo.NewSignal(), err: errNoStream}
	m.ctx, m.cancel = context.WithCancel(ns.ctx)
	return m
}

// want makes run open streams, once and for good.
func (m *member) want() {
	if !m.wanted.Load() && m.wanted.CompareAndSwap(false, true) {
		close(m.start)
	}
}

// ifReady returns m if it is ready, otherwise nil. A member that is not wanted yet is wanted from now on, for later
// checks.
func (m *member) ifReady() *member {
	if m == nil || m.state.Load() == ready {
		return m
	}
	m.want()
	return nil
}

// run opens streams until the member is given up. After each stream it waits. If gRPC cannot connect, it waits until
// gRPC tries again, or for lookUpPause, whichever is shorter. Otherwise it waits for a random part of pauseAfter, or
// until a check waits for a stream (hurry).
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

// pauseAfter returns the pause after a stream that has ended with err. last is the pause before that stream. The pause
// after EOF does not grow, because a node that ends streams in good order is about to accept the next one, and callers
// wait for it.
func pauseAfter(err error, lasted bool, last time.Duration) time.Duration {
	switch {
	case lasted:
		return 0
	case errors.Is(err, io.EOF):
		return minPause
	}
	return min(max(2*last, minPause), maxPause)
}

// become sets the state of the node, and wakes the callers that wait for a node.
func (m *member) become(state int32) {
	m.state.Store(state)
	m.nodes.change(func() {})
}

// talk opens a stream and runs it until it ends, and returns why it has ended.
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

// ended fails the requests of a stream that has ended or could not be opened (the first table above). It sets the state
// first, so that another try of such a request does not pick this member as a ready one.
func (m *member) ended(err error, lasted bool) {
	state, untried := failed, overloaded(err)
	if lasted {
		state = connecting
	}
	if errors.Is(err, io.EOF) {
		// The node ended the stream in good order, such as at its max-connection-age. It carried out only what it
		// answered.
		state, untried, err = connecting, true, status.Error(codes.Unavailable, "the node takes no more checks")
	}
	m.mu.Lock()
	sent, queue := m.sent, m.queue
	m.sent, m.queue, m.reports, m.err = nil, fifo.Queue[*request]{}, nil, err
	m.queued, m.waiting, m.inFlight, m.probing = 0, 0, 0, false
	select {
	case <-m.hurry: // for a request that fails now
	default:
	}
	m.mu.Unlock()
	m.become(state)
	for _, msg := range sent {
		msg.fail(err, untried)
	}
	for _, r := range queue.Items() {
		r.fail(err, true)
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

// send queues a request. It fails the request if there is no connection or too many checks wait. If there is a
// connection and no stream, it has run open a stream at once.
func (m *member) send(r *request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.sent == nil && m.conn.GetState() != connectivity.Ready:
		r.fail(m.err, true)
	case m.waiting+len(r.checks) > maxWaiting:
		r.fail(errFull, false)
	default:
		m.waiting += len(r.checks)
		m.queued += len(r.checks)
		r.open = len(r.checks)
		m.queue.Push(r)
		m.wakeIfDueLocked()
		if m.sent == nil {
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
	follow := !m.follows && m.nodes.follow(m)
	if follow || !m.greeted {
		m.greeted, m.follows = true, follow
		return &weirv1.CheckStreamRequest{Ready: true, Topology: follow}
	}
	report, msg := m.take()
	switch {
	case report != nil:
		return &weirv1.CheckStreamRequest{Borrow: report}
	case msg != nil:
		req := m.packer.pack(msg, m.nodes.now())
		// msg is in sent only after pack. Otherwise a faulty node that answers a message which it has not got yet would
		// end a request that pack still reads.
		m.mu.Lock()
		m.sent[msg.sequence] = msg
		m.mu.Unlock()
		return req
	}
	return nil
}

// take returns the next report of loans, or else the next message: a probe, or the checks in the queue. Both are nil if
// there is neither.
func (m *member) take() (report *weirv1.BorrowRequest, msg *message) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.reports) > 0 {
		report = m.reports[0]
		m.reports = m.reports[1:]
		return report, nil
	}
	msg = &message{}
	if !m.probing {
		m.gatherLocked(msg)
		if msg.open == 0 {
			return nil, nil
		}
	}
	m.probing = false
	if m.renumber {
		m.renumber = false
		m.packer.numbers.Reset()
	}
	m.inFlight += len(msg.checks)
	m.sequence++
	msg.sequence = m.sequence
	return nil, msg
}

// gatherLocked moves checks from the queue to a message, if they are to be sent. It drops those whose callers have
// gone.
func (m *member) gatherLocked(msg *message) {
	if !m.dueLocked() {
		return
	}
	for m.queue.Len() > 0 && len(msg.checks)+len(m.queue.First().checks) <= limit.MaxBatch {
		r := m.queue.Pop()
		m.queued -= len(r.checks)
		if r.gone.Load() {
			m.waiting -= len(r.checks)
		} else {
			msg.add(r)
		}
	}
}

// received handles a response. It returns an error if the response is invalid.
func (m *member) received(resp *weirv1.CheckStreamResponse) error {
	field := resp.Error.GetField()
	switch {
	case resp.Ready != nil && resp.Ready.Ready:
		m.become(ready)
	case resp.Ready != nil:
		m.become(unready)
	case resp.Topology != nil:
		m.nodes.learned(resp.Topology)
	case field == "topology": // this caller may not have the topology
		m.nodes.connectAll()
	case strings.HasPrefix(field, "borrow."):
		m.nodes.loans.rejected(m, resp.Error)
	case resp.Borrow != nil:
		m.nodes.loans.onAnswer(m, resp.Borrow)
	default:
		return m.onAnswer(resp)
	}
	return nil
}

// onAnswer handles a response to checks or to a probe.
func (m *member) onAnswer(resp *weirv1.CheckStreamResponse) error {
	m.mu.Lock()
	msg := m.sent[resp.Sequence]
	if msg == nil {
		m.mu.Unlock()
		return errOddAnswer
	}
	if !msg.begun {
		msg.begun = true
		m.inFlight -= len(msg.checks)
	}
	if !resp.More || resp.Error != nil {
		delete(m.sent, resp.Sequence)
		m.waiting -= len(msg.checks)
	}
	m.wakeIfDueLocked()
	if resp.Error != nil {
		m.renumber = true // the node may not have read the numbers of the message
	}
	m.mu.Unlock()
	if len(msg.checks) == 0 { // a probe. A node answers it by an error, because it has no checks
		m.state.CompareAndSwap(hung, ready)
		return nil
	}
	if e := resp.Error; e != nil {
		// The node carried out nothing of the message. Its checks are sent again, in other messages.
		text := strings.TrimPrefix(e.GetField()+": "+e.GetMessage(), ": ")
		msg.fail(status.Error(codes.Code(e.GetCode()), text), true)
		return nil
	}
	err := msg.answer(resp)
	if err != nil && !resp.More {
		msg.fail(err, false) // msg has left m.sent, so ended cannot fail it
	}
	return err
}

// heard notes the outcome of a call to the node, and how long it took. A node that has left a call unanswered is hung
// until it answers a call or the probe, says whether it is ready, or its stream ends. The probe is sent once, after the
// cooldown.
func (m *member) heard(ctx context.Context, err error, o outcome, took time.Duration) {
	if err != nil && (status.Code(err) == codes.DeadlineExceeded || ctx.Err() != nil) {
		// The deadline has passed, or the caller has cancelled the call. Both may have come soon after the call began,
		// so the call counts as unanswered only if it took a tenth of the client's timeout. The node is not excused by
		// an owner that does not answer it: a healthy node answers before any deadline that it is sent.
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

// probe sends a hung node a message without checks. A healthy node answers it at once.
func (m *member) probe() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.sent != nil && m.state.Load() == hung {
		m.probing = true
		m.wake.Set()
	}
}
