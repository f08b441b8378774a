package client

import (
	"context"
	"errors"
	"io"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
)

const (
	// maxLanes is how many streams there are to one node at most: a second is opened when the first is busy.
	maxLanes = 2
	// maxWaiting bounds the questions that wait for one node: beyond it they go unanswered at once, which keeps the memory
	// of a program bounded while a node is stuck.
	maxWaiting = 20_000
	// maxNumbers bounds the targets that have a number in a stream; the nodes have the same bound.
	maxNumbers = 1024
	// maxTries is how many nodes are asked when the first could not carry out a question.
	maxTries = 3
)

var errOddAnswer = errors.New("client: a node answered a stream with what was not asked for")

// flight is questions of one caller on their way to a node. It ends once: landed by the link, or abandoned by the caller,
// who then touches it no more.
type flight struct {
	qs      []question
	answers []Result      // one for each question, once landed without err
	until   time.Duration // by the link's clock: the caller waits no longer

	state atomic.Uint32 // one of the constants below
	done  chan struct{} // holds a token once landed
	// What became of the flight as a whole; set before it lands.
	err    error // the status of a call, or nil
	unsent bool  // with err: nothing was carried out

	// Guarded by the link's lock.
	queued bool
	void   bool // abandoned while queued
	// Only for who has it: its caller, then the queue, then the reader of the stream that it was sent on.
	open  int  // questions without an answer
	alone bool // goes by itself, because a message with others was refused as a whole

	timer *time.Timer // of the caller
	one   struct {    // room for a single question
		q [1]question
		a [1]Result
	}
}

const (
	flying uint32 = iota
	landed
	abandoned
)

func newFlight() *flight {
	f := &flight{done: make(chan struct{}, 1), timer: time.NewTimer(time.Hour)}
	f.timer.Stop()
	return f
}

// ownLimit has a question keep no limit of its caller's, who may change it once the call has returned: the writer of a stream
// may outlive that. The limit of a handle, which has its scope worked out, does not change.
func (q *question) ownLimit() {
	if q.Limit != nil && q.scope == "" {
		own := *q.Limit
		q.Limit = &own
	}
}

// land ends a flight, unless its caller has given it up.
func (f *flight) land() {
	if f.state.CompareAndSwap(flying, landed) {
		f.done <- struct{}{}
	}
}

// fail lands a flight of which some questions have no answer. When none has, the flight as a whole has the error.
func (f *flight) fail(err error, unsent bool) {
	if f.open == len(f.qs) {
		f.err, f.unsent = err, unsent
	}
	f.land()
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
	f *flight // nil once it is there
	i int32   // of f's questions
}

// link is how questions reach one node: what callers ask gathers in a queue, from which a few streams, its lanes, take.
//
// What has gathered goes out when nothing is under way, or when it is no less than what is. So a lone caller waits for
// nobody, and neither does a second one; among many callers a few large messages are under way, since a message costs as
// much as some tens of checks; and how long a question waits is bounded by the round trip of those before it.
//
// Its methods are safe for concurrent use.
type link struct {
	api weirv1.LimiterClient
	now func() time.Duration
	ctx context.Context
	end context.CancelFunc

	lanes sync.WaitGroup

	mu      sync.Mutex
	queue   []*flight
	void    int     // flights in queue that were abandoned
	waiting int     // questions in queue, but for those, and in messages without the last of their answers
	ready   int     // questions in queue, but for those that were abandoned
	flying  int     // questions in messages that are under way: sent, and not answered for the first time
	started int     // lanes
	up      int     // lanes with an open stream
	idle    []*lane // that wait for something to send
	closed  bool
}

func newLink(api weirv1.LimiterClient, now func() time.Duration) *link {
	ctx, end := context.WithCancel(context.Background())
	return &link{api: api, now: now, ctx: ctx, end: end}
}

// close ends what is under way and waits for the goroutines.
func (l *link) close() {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.end()
	l.lanes.Wait()
	l.drop(status.FromContextError(context.Canceled).Err())
}

// send queues a flight, or returns false when the link takes no more.
func (l *link) send(f *flight) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed || l.waiting+len(f.qs) > maxWaiting:
		return false
	case f.state.Load() == abandoned: // one that is sent again
		return true
	}
	l.waiting += len(f.qs)
	l.ready += len(f.qs)
	f.queued, f.open = true, len(f.qs)
	l.queue = append(l.queue, f)
	l.stirLocked()
	return true
}

// dueLocked tells whether what has gathered is to be sent.
func (l *link) dueLocked() bool { return l.ready > 0 && l.ready >= min(l.flying, limit.MaxBatch) }

// stirLocked has a lane send what is due.
func (l *link) stirLocked() {
	switch {
	case !l.dueLocked():
	case len(l.idle) > 0:
		l.idle[0].wake()
		l.idle = slices.Delete(l.idle, 0, 1)
	case l.started < maxLanes:
		l.started++
		ln := &lane{l: l, kick: make(chan struct{}, 1)}
		l.lanes.Go(ln.run)
	}
}

// abandon gives up a flight, and reports false if it has landed.
func (l *link) abandon(f *flight) bool {
	if !f.state.CompareAndSwap(flying, abandoned) {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !f.queued {
		return true // it is counted for as long as its message is under way
	}
	l.waiting -= len(f.qs)
	l.ready -= len(f.qs)
	// The queue is only long when the node is stuck, and then all of it is abandoned: one by one, finding each would take
	// time that grows with the square of its length.
	f.void = true
	if l.void++; l.void*2 > len(l.queue) {
		l.queue = slices.DeleteFunc(l.queue, func(f *flight) bool { return f.void })
		l.void = 0
	}
	return true
}

// drop lands everything in the queue: nothing of it was sent.
func (l *link) drop(err error) {
	l.mu.Lock()
	queue := l.queue
	l.queue, l.void, l.ready = nil, 0, 0
	for _, f := range queue {
		f.queued = false
		if !f.void {
			l.waiting -= len(f.qs)
		}
	}
	l.mu.Unlock()
	for _, f := range queue {
		f.fail(err, true)
	}
}

// lane is one stream at a time to the link's node. One goroutine opens streams and writes; one more for each stream reads.
type lane struct {
	l    *link
	kick chan struct{} // holds a token when the writer is to look again

	// Guarded by the link's lock.
	sent     map[uint64]*message // on this stream, without the last of their answers, by sequence
	sequence uint64              // of the last message
	broken   bool                // the stream
	renumber bool                // the node may not know the numbers that it was told

	// Only for the writer: the numbers of this stream.
	numbers map[subject]uint32
	request weirv1.CheckStreamRequest
}

func (ln *lane) wake() {
	select {
	case ln.kick <- struct{}{}:
	default:
	}
}

// run opens streams, whenever there is something to send, until the link is closed.
func (ln *lane) run() {
	for ln.await() {
		ln.talk()
	}
}

// await waits until there is something to send, and returns false when the link is closed.
func (ln *lane) await() bool {
	l := ln.l
	for {
		l.mu.Lock()
		if l.closed {
			l.mu.Unlock()
			return false
		}
		if l.dueLocked() {
			l.mu.Unlock()
			return true
		}
		l.idle = append(l.idle, ln)
		l.mu.Unlock()
		if !ln.rest() {
			return false
		}
	}
}

// rest waits for a kick, and returns false when the link is closed. The lane is idle no more then.
func (ln *lane) rest() bool {
	l := ln.l
	select {
	case <-ln.kick:
	case <-l.ctx.Done():
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if i := slices.Index(l.idle, ln); i >= 0 {
		l.idle = slices.Delete(l.idle, i, i+1)
	}
	return l.ctx.Err() == nil
}

// talk opens a stream and writes to it until it breaks. What is unanswered then lands.
func (ln *lane) talk() {
	l := ln.l
	ctx, cancel := context.WithCancel(l.ctx)
	defer cancel()
	stream, err := l.api.CheckStream(ctx)
	l.mu.Lock()
	if err != nil {
		alone := l.up == 0 // otherwise the other lane sends what there is
		l.mu.Unlock()
		if alone {
			l.drop(err)
		}
		return
	}
	l.up++
	before := ln.sequence
	ln.sent, ln.broken, ln.renumber = make(map[uint64]*message), false, true
	l.mu.Unlock()

	var reading sync.WaitGroup
	reading.Go(func() {
		err = ln.read(stream)
		l.mu.Lock()
		ln.broken = true
		l.mu.Unlock()
		ln.wake()
	})
	ln.write(stream)
	cancel()
	reading.Wait()

	l.mu.Lock()
	l.up--
	sent := ln.sent
	ln.sent = nil
	for _, m := range sent {
		l.waiting -= len(m.slots)
		if !m.answered {
			l.flying -= len(m.slots)
		}
	}
	useless := ln.sequence == before && l.up == 0
	l.mu.Unlock()
	// A stream that the node ended by itself has carried out no more than it has answered.
	unsent := errors.Is(err, io.EOF)
	if unsent {
		err = status.Error(codes.Unavailable, "the node takes no more questions")
	} else {
		err = broken(stream, err)
	}
	for _, m := range sent {
		m.fail(err, unsent)
	}
	if useless {
		l.drop(err) // not to try for ever
	}
}

// brokenError is the status of a stream whose connection broke, as opposed to one that the node ended with that status.
type brokenError struct{ error }

func (e brokenError) GRPCStatus() *status.Status { return status.Convert(e.error) }

// broken tells the two apart: what a node itself says comes with a trailer.
func broken(stream weirv1.Limiter_CheckStreamClient, err error) error {
	if status.Code(err) == codes.Unavailable && len(stream.Trailer()) == 0 {
		return brokenError{err}
	}
	return err
}

// fail lands what a message carries and has no answer.
func (m *message) fail(err error, unsent bool) {
	for _, s := range m.slots {
		if s.f != nil && s.f.open < len(s.f.qs) {
			s.f.answers[s.i].Err = statusError(err)
		}
	}
	var last *flight
	for _, s := range m.slots {
		if s.f != nil && s.f != last { // the questions of one are side by side; once it has landed it is its caller's
			last = s.f
			s.f.fail(err, unsent)
		}
	}
}

// write sends what gathers until the stream is broken.
func (ln *lane) write(stream weirv1.Limiter_CheckStreamClient) {
	for {
		// Callers that are about to ask do so first, and share a message. A lone caller loses nothing.
		runtime.Gosched()
		switch m, over := ln.take(); {
		case over:
			return
		case m == nil:
			if !ln.rest() {
				return
			}
		default:
			ln.pack(m)
			if stream.Send(&ln.request) != nil {
				return // the reader learns why
			}
		}
	}
}

// take makes a message of what has gathered. It is nil when there is nothing to send at the moment.
func (ln *lane) take() (m *message, over bool) {
	l := ln.l
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case ln.broken:
		return nil, true
	case !l.dueLocked():
		l.idle = append(l.idle, ln)
		return nil, false
	}
	m = &message{}
	taken := 0
	for _, f := range l.queue {
		if len(m.slots)+len(f.qs) > limit.MaxBatch || f.alone && len(m.slots) > 0 {
			break
		}
		taken++
		f.queued = false
		if f.void {
			l.void--
			continue
		}
		for i := range f.qs {
			m.slots = append(m.slots, slot{f, int32(i)})
		}
		if f.alone {
			ln.renumber = true // not to depend on what others defined
			break
		}
	}
	l.queue = slices.Delete(l.queue, 0, taken)
	l.ready -= len(m.slots)
	l.flying += len(m.slots)
	if ln.renumber {
		ln.renumber = false
		ln.numbers = make(map[subject]uint32)
	}
	ln.sequence++
	m.sequence, m.open = ln.sequence, len(m.slots)
	ln.sent[m.sequence] = m
	return m, false
}

// pack writes the questions of a message into the request.
func (ln *lane) pack(m *message) {
	in := &ln.request
	in.ResetVT()
	in.Sequence = m.sequence
	ln.packTimeouts(m)
	var last *target
	var number uint32
	for i, s := range m.slots {
		q := &s.f.qs[s.i]
		if last == nil || q.Policy != last.Policy || q.Limit != last.Limit || q.Namespace != last.Namespace {
			var ok bool
			if number, ok = ln.number(&q.target); !ok {
				// The numbers are used up. Those of this request alone are fewer than there are.
				clear(ln.numbers)
				ln.pack(m)
				return
			}
		}
		last = &q.target
		in.Targets = append(in.Targets, number)
		in.Keys = append(in.Keys, q.Key...)
		in.KeyLengths = append(in.KeyLengths, uint32(len(q.Key)))
		// Most messages have nothing to say here.
		in.Costs = appendUnlike(in.Costs, i, q.cost, 1)
		in.Partial = appendUnlike(in.Partial, i, q.partial, false)
		in.RequestIds = appendUnlike(in.RequestIds, i, q.requestID, "")
		if q.trace != "" || len(in.TraceContexts) > 0 {
			in.TraceContexts = append(append(in.TraceContexts, make([][]byte, i-len(in.TraceContexts))...), []byte(q.trace))
		}
	}
	in.Targets = wire.Shorten(in.Targets, 0)
}

// packTimeouts writes for how long the answers are waited for. What is carried out for a caller who has gone is charged all the
// same, so nobody's check is to be waited for longer than by its own caller. Where all wait for about as long, the shortest
// time is everybody's: the nodes part a request in the same way.
func (ln *lane) packTimeouts(m *message) {
	now, in := ln.l.now(), &ln.request
	left := func(f *flight) uint32 { return uint32(min(max(f.until-now, 0)/time.Millisecond+1, 1<<31)) }
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

// appendUnlike appends the value of check i to a list that stays empty as long as all are as usual.
func appendUnlike[T comparable](list []T, i int, v, usual T) []T {
	if len(list) == 0 && v == usual {
		return list
	}
	for len(list) < i {
		list = append(list, usual)
	}
	return append(list, v)
}

// number is the number of a target in this stream. One that has none yet is defined in the request, as long as there are
// numbers.
func (ln *lane) number(t *target) (n uint32, ok bool) {
	k := t.subject()
	k.key = ""
	if n, ok = ln.numbers[k]; ok {
		return n, true
	}
	if len(ln.numbers) >= maxNumbers {
		return 0, false
	}
	n = uint32(len(ln.numbers))
	ln.numbers[k] = n
	p := wire.ProtoTarget(t.Target)
	ln.request.Define = append(ln.request.Define, &weirv1.StreamTarget{Number: n, Policy: p.Policy, Limit: p.Limit, Namespace: p.Namespace})
	return n, true
}

// read lands flights from the node's responses until the stream breaks, and returns why it did.
func (ln *lane) read(stream weirv1.Limiter_CheckStreamClient) error {
	out := weirv1.CheckStreamResponseFromVTPool()
	defer out.ReturnToVTPool()
	for {
		if err := stream.RecvMsg(out); err != nil {
			return err
		}
		if err := ln.answered(out); err != nil {
			return err
		}
	}
}

// answered takes in a response. An error says that it is none that a node gives.
func (ln *lane) answered(out *weirv1.CheckStreamResponse) error {
	l := ln.l
	l.mu.Lock()
	m := ln.sent[out.Sequence]
	if m == nil {
		l.mu.Unlock()
		return errOddAnswer
	}
	if !m.answered {
		m.answered = true
		l.flying -= len(m.slots)
		l.stirLocked()
	}
	if !out.More {
		delete(ln.sent, out.Sequence)
		l.waiting -= len(m.slots)
	}
	if out.Error != nil {
		ln.renumber = true // what it defined may not have been taken in
	}
	l.mu.Unlock()
	if out.Error != nil {
		l.refused(m, out.Error)
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

// refused sends flights again whose message was refused as a whole, each by itself: the fault is another's, most likely.
// Nothing was charged. The one that is to blame gets the error in the end.
func (l *link) refused(m *message, e *weirv1.Error) {
	_, field, _ := strings.Cut(e.GetField(), "].") // "define[3].limit.time_zone"
	message := e.GetMessage()
	if field != "" {
		message = field + ": " + message
	}
	err := status.Error(codes.Code(e.GetCode()), message)
	var last *flight
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
	if !(wire.Fits(out.Flags, n) && wire.Fits(out.Granted, n) && wire.Fits(out.Limit, n) && wire.Fits(out.WindowNs, n) &&
		wire.Fits(out.Remaining, n) && wire.Fits(out.RetryAfterNs, n) && wire.Fits(out.ResetAfterNs, n) &&
		wire.Fits(out.DelayNs, n) && wire.Fits(out.RememberForNs, n)) {
		return errOddAnswer
	}
	for i := range n {
		s, ok := m.slot(out, all, i)
		if !ok {
			return errOddAnswer
		}
		readAnswer(out, i, &s.f.qs[s.i], &s.f.answers[s.i])
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
			f.land()
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
func readAnswer(out *weirv1.CheckStreamResponse, i int, q *question, a *Result) {
	flags := weirv1.StreamFlag(wire.At(out.Flags, i, 0))
	d := &a.Decision
	d.Policy, d.RequestID = q.Policy, q.requestID
	if q.Limit != nil {
		d.Policy = "inline"
	}
	d.Allowed = flags&weirv1.StreamFlag_STREAM_FLAG_ALLOWED != 0
	d.Shadow = flags&weirv1.StreamFlag_STREAM_FLAG_SHADOW != 0
	d.Degraded = flags&weirv1.StreamFlag_STREAM_FLAG_DEGRADED != 0
	d.FailedOpen = flags&weirv1.StreamFlag_STREAM_FLAG_FAILED_OPEN != 0
	d.FailedClosed = flags&weirv1.StreamFlag_STREAM_FLAG_FAILED_CLOSED != 0
	d.Granted = wire.At(out.Granted, i, 0)
	d.Limit = wire.At(out.Limit, i, 0)
	d.Window = time.Duration(wire.At(out.WindowNs, i, 0))
	d.Remaining = wire.At(out.Remaining, i, 0)
	d.RetryAfter = time.Duration(wire.At(out.RetryAfterNs, i, 0))
	if flags&weirv1.StreamFlag_STREAM_FLAG_NEVER != 0 {
		d.RetryAfter = Never
	}
	d.ResetAfter = time.Duration(wire.At(out.ResetAfterNs, i, 0))
	d.Delay = time.Duration(wire.At(out.DelayNs, i, 0))
	a.RememberFor = time.Duration(wire.At(out.RememberForNs, i, 0))
}
