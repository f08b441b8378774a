package client

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/internal/fifo"
	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/stream"
	"github.com/weirlimit/weir/rpc/wire"
)

const (
	// maxReports is how many reports of loans wait for one node at most: what further ones would say is said again.
	maxReports = 4
	// minReopen and maxReopen bound how long a connected node is left alone when its stream has ended, unless it is asked.
	minReopen, maxReopen = 100 * time.Millisecond, 5 * time.Second
	// maxWaiting bounds the checks that wait for one node: beyond it they go unanswered at once, which keeps the memory
	// of a program bounded while a node is stuck.
	maxWaiting = 20_000
	// maxUnanswered bounds the messages of checks without the last of their answers. A node reads no further message of a stream of which
	// 64 wait for others. A report of loans must get through: those checks may be waiting for what it returns.
	maxUnanswered = 48
	// maxTries is how many nodes are asked when the first could not carry out a check.
	maxTries = 3
)

var errOddAnswer = errors.New("client: a node answered a stream with what was not asked for")

// request is the checks of one call that go to one node. It ends once: the link ends it, or the caller abandons it and then no longer uses it.
type request struct {
	checks  []limit.Check
	answers []Result // one for each check, once ended without err
	places  []int    // the caller's, of the checks
	trace   string   // the ids of a sampled trace and of a span in it; empty: none
	to      *member
	// connected is false where the node is asked only for the reason why it cannot be asked.
	connected bool
	until     time.Duration // by the link's clock: the caller waits no longer

	state atomic.Uint32 // one of the constants below
	done  chan struct{} // holds a token once ended
	// What became of the request as a whole; set before it ends.
	err    error // the status of a call, or nil
	unsent bool  // with err: nothing was carried out

	// Guarded by the link's lock.
	queued bool
	void   bool // abandoned while queued
	// Only one goroutine at a time may use these: the caller's, then the one that has taken it from the queue, then the stream's reader.
	open  int  // checks without an answer
	alone bool // goes by itself, because a message with others was refused as a whole

	timer *time.Timer // of the caller
}

const (
	unended uint32 = iota
	ended
	abandoned
)

func newRequest() *request {
	f := &request{done: make(chan struct{}, 1), timer: time.NewTimer(time.Hour)}
	f.timer.Stop()
	return f
}

// reset makes a request that has ended without an error as new.
func (f *request) reset() {
	clear(f.checks)
	clear(f.answers)
	f.checks, f.answers, f.places, f.to, f.trace, f.alone = f.checks[:0], f.answers[:0], f.places[:0], nil, "", false
	f.state.Store(unended)
}

// end ends a request, unless its caller has given it up.
func (f *request) end() {
	if f.state.CompareAndSwap(unended, ended) {
		f.done <- struct{}{}
	}
}

// fail ends a request of which some checks have no answer. When none has, the request as a whole has the error.
func (f *request) fail(err error, unsent bool) {
	if f.open == len(f.checks) {
		f.err, f.unsent = err, unsent
	}
	f.end()
}

// message is what one request carries.
type message struct {
	sequence uint64
	slots    []slot // by place in the request
	open     int    // slots without an answer
	answered bool   // for the first time
}

// slot is where the answer to a check goes.
type slot struct {
	f *request // nil once it is there
	i int32    // of f's checks
}

// link is the way to one node: a single stream for everything that the client has with it, open while the node is connected. One
// goroutine opens streams and writes; one more for each stream reads.
//
// Checks gather in a queue. The queue is sent when nothing is in flight, or when it has at least as many checks as are in flight. So a lone caller does
// not wait for others, nor does a second one; many callers have a few large messages in flight, which saves CPU, because a message costs as much as
// some tens of checks; and a check waits for one round trip at most.
//
// Its methods are safe for concurrent use.
type link struct {
	api       weirv1.LimiterClient
	now       func() time.Duration
	connected func() bool // a stream may be opened without being asked for
	listener  listener
	ctx       context.Context
	end       context.CancelFunc
	wake      fifo.Signal // of the writer
	running   sync.WaitGroup

	mu       sync.Mutex
	queue    fifo.Queue[*request]
	void     int // checks in queue that were abandoned
	waiting  int // checks in queue, but for those, and in messages without the last of their answers
	ready    int // checks in queue, but for those that were abandoned
	inFlight int // checks in messages that are in flight: sent, and not answered for the first time
	reports  []*weirv1.BorrowRequest
	topology func(*weirv1.TopologyResponse, error) // nil: not asked for
	hello    bool                                  // a stream is worth opening, though nothing waits
	open     bool
	started  bool
	closed   bool
	sent     map[uint64]*message // on the open stream, without the last of their answers, by sequence
	sequence uint64              // of the last message
	renumber bool                // the node may not know the numbers that it was told

	// Only for the writer: what the stream was asked to tell, and the numbers of its targets.
	greeted, followed bool
	numbers           wire.Numbers
	request           weirv1.CheckStreamRequest
}

// listener gets what a node sends without being asked. One goroutine calls it at a time.
type listener interface {
	// opening is called when a stream is being opened.
	opening()
	// readied is called with whether the node is ready; or, with the error that ended a stream, when that is not known any more.
	readied(ready bool, err error)
	// lent is called with answers about loans, with recalls, or with the reason why the node rejected a report.
	lent(out *weirv1.BorrowResponse, rejected *weirv1.Error)
}

func newLink(api weirv1.LimiterClient, now func() time.Duration, connected func() bool, to listener) *link {
	ctx, end := context.WithCancel(context.Background())
	return &link{api: api, now: now, connected: connected, listener: to, ctx: ctx, end: end, wake: fifo.NewSignal()}
}

// close ends what is in flight and waits for the goroutines.
func (l *link) close() {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.end()
	l.running.Wait()
	err := status.FromContextError(context.Canceled).Err()
	l.drop(err)
	l.unfollowed(err)
}

// greet opens a stream to a node that has been connected, unless there is one.
func (l *link) greet() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.open {
		l.hello = true
		l.stirLocked()
	}
}

// follow has the node's topology given to f whenever it changes, and in the end the error for which there are no more. It returns false when the link
// is closed.
func (l *link) follow(f func(*weirv1.TopologyResponse, error)) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.topology, l.hello = f, true
	l.stirLocked()
	return !l.closed
}

// unfollowed gives follow's f the error for which there are no more topologies.
func (l *link) unfollowed(err error) {
	l.mu.Lock()
	f := l.topology
	l.topology = nil
	l.mu.Unlock()
	if f != nil {
		f(nil, err)
	}
}

// report has a report of loans sent, unless too many wait: what they say is said again.
func (l *link) report(in *weirv1.BorrowRequest) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.reports) < maxReports {
		l.reports = append(l.reports, in)
		l.stirLocked()
	}
}

// send queues a request, or returns false when the link takes no more.
func (l *link) send(f *request) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed || l.waiting+len(f.checks) > maxWaiting:
		return false
	case f.state.Load() == abandoned: // one that is sent again
		return true
	}
	l.waiting += len(f.checks)
	l.ready += len(f.checks)
	f.queued, f.open = true, len(f.checks)
	l.queue.Push(f)
	l.stirLocked()
	return true
}

// dueLocked tells whether the checks that have gathered are to be sent.
func (l *link) dueLocked() bool {
	return l.ready > 0 && l.ready >= min(l.inFlight, limit.MaxBatch) && len(l.sent) < maxUnanswered
}

// stirLocked has the writer send what is to be sent.
func (l *link) stirLocked() {
	if l.closed || !l.hello && len(l.reports) == 0 && !l.dueLocked() {
		return
	}
	if !l.started {
		l.started = true
		l.running.Go(l.run)
	}
	l.wake.Set()
}

// abandon gives up a request, and reports false if it has ended.
func (l *link) abandon(f *request) bool {
	if !f.state.CompareAndSwap(unended, abandoned) {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !f.queued {
		return true // it is counted for as long as its message is in flight
	}
	l.waiting -= len(f.checks)
	l.ready -= len(f.checks)
	// The queue is only long when the node is stuck, and then all of it is abandoned: one by one, finding each would take
	// time that grows with the square of its length.
	f.void = true
	if l.void++; l.void*2 > l.queue.Len() {
		l.queue.DeleteFunc(func(f *request) bool { return f.void })
		l.void = 0
	}
	return true
}

// drop ends everything in the queue: nothing of it was sent.
func (l *link) drop(err error) {
	l.mu.Lock()
	queue := l.queue
	l.queue, l.void, l.ready, l.reports, l.hello = fifo.Queue[*request]{}, 0, 0, nil, false
	for _, f := range queue.Items() {
		f.queued = false
		if !f.void {
			l.waiting -= len(f.checks)
		}
	}
	l.mu.Unlock()
	for _, f := range queue.Items() {
		f.fail(err, true)
	}
}

// run opens streams until the link is closed: whenever there is something to send, and while the node is connected.
func (l *link) run() {
	pause := minReopen
	retry := time.NewTimer(time.Hour)
	defer retry.Stop()
	for {
		l.mu.Lock()
		needed := l.hello || len(l.reports) > 0 || l.dueLocked()
		l.mu.Unlock()
		if !needed {
			select {
			case <-l.wake:
			case <-retry.C:
				if l.connected() {
					l.greet()
				}
			case <-l.ctx.Done():
			}
		} else if lived := l.talk(); lived {
			pause = minReopen
			retry.Reset(pause)
		} else {
			pause = min(2*pause, maxReopen)
			retry.Reset(pause)
		}
		if l.ctx.Err() != nil {
			return
		}
	}
}

// talk opens a stream and writes to it until it breaks. What is unanswered then ends. It reports whether the node has said anything.
func (l *link) talk() (lived bool) {
	ctx, cancel := context.WithCancel(l.ctx)
	defer cancel()
	l.listener.opening()
	s, err := l.api.CheckStream(ctx)
	if err != nil {
		l.drop(err)
		l.over(err)
		return false
	}
	l.mu.Lock()
	before := l.sequence
	l.open, l.hello = true, false
	l.sent, l.renumber = make(map[uint64]*message), true
	l.mu.Unlock()
	l.greeted, l.followed = false, false

	err = stream.Run(s, cancel, l.wake, l.next, func(out *weirv1.CheckStreamResponse) error {
		lived = true
		return l.received(out)
	})

	l.mu.Lock()
	l.open = false
	sent := l.sent
	l.sent = nil
	for _, m := range sent {
		l.waiting -= len(m.slots)
		if !m.answered {
			l.inFlight -= len(m.slots)
		}
	}
	useless := l.sequence == before
	l.mu.Unlock()
	// A stream that the node ended by itself has carried out no more than it has answered, and one that it rejected nothing.
	ended := errors.Is(err, io.EOF)
	unsent := ended || overloaded(err)
	if ended {
		err = status.Error(codes.Unavailable, "the node takes no more checks")
	} else {
		err = broken(s, err)
	}
	for _, m := range sent {
		m.fail(err, unsent)
	}
	if useless {
		l.drop(err) // not to try for ever
	}
	l.over(err)
	return lived
}

// over tells the listener, and follow's f, that a stream has ended, or could not be opened.
func (l *link) over(err error) {
	l.listener.readied(false, err)
	l.unfollowed(err)
}

// brokenError is the status of a stream whose connection broke, as opposed to one that the node ended with that status.
type brokenError struct{ error }

func (e brokenError) GRPCStatus() *status.Status { return status.Convert(e.error) }

// broken tells the two apart: what a node itself says comes with a trailer.
func broken(s weirv1.Limiter_CheckStreamClient, err error) error {
	if status.Code(err) == codes.Unavailable && len(s.Trailer()) == 0 {
		return brokenError{err}
	}
	return err
}

// fail ends what a message carries and has no answer.
func (m *message) fail(err error, unsent bool) {
	for _, s := range m.slots {
		if s.f != nil && s.f.open < len(s.f.checks) {
			s.f.answers[s.i].Err = statusError(err)
		}
	}
	var last *request
	for _, s := range m.slots {
		if s.f != nil && s.f != last { // the checks of one are side by side; once it has ended it is its caller's
			last = s.f
			s.f.fail(err, unsent)
		}
	}
}

// next returns the next message to send, nil when there is none: the request to be told of readiness and topology, reports of loans, checks.
func (l *link) next() *weirv1.CheckStreamRequest {
	in, m := l.take()
	if m != nil {
		l.pack(m)
		return &l.request
	}
	return in
}

// take returns a request that is not of checks, or a message of the checks that have gathered, or neither.
func (l *link) take() (*weirv1.CheckStreamRequest, *message) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.hello = false
	if topology := l.topology != nil; !l.greeted || topology && !l.followed {
		l.greeted, l.followed = true, topology
		return &weirv1.CheckStreamRequest{Ready: true, Topology: topology}, nil
	}
	if len(l.reports) > 0 {
		in := l.reports[0]
		l.reports = l.reports[1:]
		return &weirv1.CheckStreamRequest{Borrow: in}, nil
	}
	if !l.dueLocked() {
		return nil, nil
	}
	return nil, l.takeLocked()
}

// takeLocked makes a message of the checks that have gathered.
func (l *link) takeLocked() *message {
	m := &message{}
	for l.queue.Len() > 0 {
		f := l.queue.First()
		if len(m.slots)+len(f.checks) > limit.MaxBatch || f.alone && len(m.slots) > 0 {
			break
		}
		l.queue.Drop(1)
		f.queued = false
		if f.void {
			l.void--
			continue
		}
		for i := range f.checks {
			m.slots = append(m.slots, slot{f, int32(i)})
		}
		if f.alone {
			l.renumber = true // not to depend on what others defined
			break
		}
	}
	l.ready -= len(m.slots)
	l.inFlight += len(m.slots)
	if l.renumber {
		l.renumber = false
		l.numbers.Reset()
	}
	l.sequence++
	m.sequence, m.open = l.sequence, len(m.slots)
	l.sent[m.sequence] = m
	return m
}

// pack writes the checks of a message into the request.
func (l *link) pack(m *message) {
	in := &l.request
	in.Define = nil // which are the numbers', and must not be emptied
	in.ResetVT()
	in.Sequence = m.sequence
	l.packTimeouts(m)
	var last *limit.Target
	var number uint32
	for i, s := range m.slots {
		q := &s.f.checks[s.i]
		if last == nil || !wire.SameTarget(&q.Target, last) {
			n, fresh := l.numbers.Of(&q.Target)
			if n == nil {
				// The numbers are used up. Those of this request alone are fewer than there are.
				l.numbers.Reset()
				l.pack(m)
				return
			}
			if number = n.Define.Number; fresh {
				in.Define = append(in.Define, n.Define)
			}
		}
		last = &q.Target
		wire.AddCheck(in, i, len(m.slots), number, q)
		wire.AddTrace(in, i, s.f.trace)
	}
}

// packTimeouts writes how long callers wait for their answers. A node charges a check that it decides after its caller has gone, so no check may have
// more time than its caller. Where all callers have about as long, all checks get the shortest time: the nodes group the checks of a request in
// the same way.
func (l *link) packTimeouts(m *message) {
	now, in := l.now(), &l.request
	left := func(f *request) uint32 { return uint32(min(max(f.until-now, 0)/time.Millisecond+1, 1<<31)) }
	shortest, longest := left(m.slots[0].f), uint32(0)
	for _, s := range m.slots {
		ms := left(s.f)
		shortest, longest = min(shortest, ms), max(longest, ms)
	}
	if longest-shortest <= shortest/8 {
		in.TimeoutMs = shortest
		return
	}
	in.TimeoutMs = longest // for nodes that know no other
	for _, s := range m.slots {
		in.TimeoutsMs = append(in.TimeoutsMs, left(s.f))
	}
}

// received takes in a response. An error says that it is none that a node gives.
func (l *link) received(out *weirv1.CheckStreamResponse) error {
	field := out.Error.GetField()
	switch {
	case out.Ready != nil:
		l.listener.readied(out.Ready.Ready, nil)
	case out.Topology != nil:
		l.mu.Lock()
		f := l.topology
		l.mu.Unlock()
		if f != nil {
			f(out.Topology, nil)
		}
	case out.Borrow != nil || strings.HasPrefix(field, "borrow."):
		l.listener.lent(out.Borrow, out.Error)
	case field == "topology":
		l.unfollowed(status.Error(codes.Code(out.Error.Code), out.Error.Message))
	default:
		return l.answered(out)
	}
	return nil
}

// answered takes in a response to checks.
func (l *link) answered(out *weirv1.CheckStreamResponse) error {
	l.mu.Lock()
	m := l.sent[out.Sequence]
	if m == nil {
		l.mu.Unlock()
		return errOddAnswer
	}
	if !m.answered {
		m.answered = true
		l.inFlight -= len(m.slots)
	}
	if !out.More {
		delete(l.sent, out.Sequence)
		l.waiting -= len(m.slots)
	}
	l.stirLocked()
	if out.Error != nil {
		l.renumber = true // what it defined may not have been taken in
	}
	l.mu.Unlock()
	if out.Error != nil {
		l.rejected(m, out.Error)
		return nil
	}
	err := m.answer(out)
	if err == nil && !out.More && m.open > 0 {
		err = errOddAnswer
	}
	if err != nil && !out.More {
		m.fail(err, false) // the stream's end does not find it any more
	}
	return err
}

// rejected sends the requests of a message that was rejected as a whole again, each by itself, so that only the one at fault
// gets the error. Nothing was charged.
func (l *link) rejected(m *message, e *weirv1.Error) {
	_, field, _ := strings.Cut(e.GetField(), "].") // "define[3].limit.time_zone"
	message := e.GetMessage()
	if field != "" {
		message = field + ": " + message
	}
	err := status.Error(codes.Code(e.GetCode()), message)
	var last *request
	for i := range m.slots {
		f := m.slots[i].f
		if f == nil || f == last {
			continue
		}
		last = f
		if f.alone {
			f.fail(err, false)
			continue
		}
		f.alone = true
		if !l.send(f) {
			f.fail(err, false)
		}
	}
}

// answer hands on the answers of a response.
func (m *message) answer(out *weirv1.CheckStreamResponse) error {
	n, all := len(out.Checks), len(out.Checks) == 0 && !out.More
	if all {
		n = len(m.slots)
	}
	if !wire.DecisionsFit(out, n) {
		return errOddAnswer
	}
	for i := range n {
		s, ok := m.slot(out, all, i)
		if !ok {
			return errOddAnswer
		}
		readAnswer(out, i, &s.f.checks[s.i], &s.f.answers[s.i])
	}
	for _, e := range out.Errors {
		if int(e.Check) >= len(m.slots) || m.slots[e.Check].f == nil {
			return errOddAnswer
		}
		s := m.slots[e.Check]
		s.f.answers[s.i] = Result{Err: codeError(codes.Code(e.Error.GetCode()), e.Error.GetField(), e.Error.GetMessage())}
	}
	for _, l := range out.Limits {
		if int(l.Check) >= len(m.slots) || m.slots[l.Check].f == nil {
			return errOddAnswer
		}
		s := m.slots[l.Check]
		s.f.answers[s.i].Limits = wire.Limits(l.Limits)
	}
	for i := range n {
		s, ok := m.slot(out, all, i)
		if !ok {
			return errOddAnswer // named twice
		}
		f := s.f
		s.f = nil
		m.open--
		if f.open--; f.open == 0 {
			f.end()
		}
	}
	return nil
}

// slot is where element i of a response's lists goes, unless there is an answer already.
func (m *message) slot(out *weirv1.CheckStreamResponse, all bool, i int) (*slot, bool) {
	if !all {
		i = int(out.Checks[i])
	}
	if i >= len(m.slots) || m.slots[i].f == nil {
		return nil, false
	}
	return &m.slots[i], true
}

// readAnswer reads element i of a response's lists, the answer to q.
func readAnswer(out *weirv1.CheckStreamResponse, i int, q *limit.Check, a *Result) {
	wire.ReadDecision(out, i, &a.Decision)
	a.Policy, a.RequestID = nameOf(&q.Target), q.RequestID
}
