package client

import (
	"errors"
	"math/bits"
	"sync/atomic"
	"time"

	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
)

// This file takes requests to their answers, on the stream of one node. member.go queues requests, and has the words.
//
//	add     puts the checks of a request into a message; one message has checks of many callers
//	pack    writes the message for the wire
//	answer  passes the answers of a response to the requests; fail ends the requests without answers
//	end     wakes the caller of a request whose checks all have answers
//
// Other files must keep: a check is answered once (pending.f is nil from then on), because the request may belong to
// another call after that; only one goroutine at a time reads or changes a message.

// errOddAnswer is the error of a stream on which a node sent an answer that no check asked for.
var errOddAnswer = errors.New("client: a node answered a stream with what was not asked for")

// request is the checks of one call that go to one node. It ends once: by its answers, or by the end of the stream. A
// caller that has gone before the end must not use the request again.
type request struct {
	checks  []limit.Check
	answers []Result // one for each check; complete once the request has ended without err
	places  []int    // the places of the checks in the caller's list
	trace   string   // the ids of a sampled trace and of a span in it; empty: none
	to      *member
	until   time.Duration // when the caller stops waiting, by the clock of nodes
	timer   *time.Timer   // of the caller

	gone atomic.Bool   // the caller no longer waits
	done chan struct{} // holds a token once the request has ended
	open int           // checks without an answer; only one goroutine at a time uses it
	// The outcome of the request as a whole; set before it ends.
	err     error // the status of a call, or nil
	untried bool  // with err: the node carried out nothing
}

func newRequest() *request {
	f := &request{done: make(chan struct{}, 1), timer: time.NewTimer(time.Hour)}
	f.timer.Stop()
	return f
}

// reset clears a request that has ended without an error, for another call.
func (f *request) reset() {
	clear(f.checks)
	clear(f.answers)
	f.checks, f.answers, f.places, f.to, f.trace = f.checks[:0], f.answers[:0], f.places[:0], nil, ""
}

// fail ends a request that is in no message.
func (f *request) fail(err error, untried bool) {
	f.err, f.untried = err, untried
	f.end()
}

func (f *request) end() { f.done <- struct{}{} }

// message is the requests that are sent together.
type message struct {
	sequence uint64
	checks   []pending // in the order of the wire
	open     int       // checks without an answer
	begun    bool      // the first answer has come
}

// pending is a check of a message that waits for its answer.
type pending struct {
	f *request // nil once the answer has come
	i int32    // place in f.checks
}

// add adds the checks of a request.
func (m *message) add(f *request) {
	for i := range f.checks {
		m.checks = append(m.checks, pending{f, int32(i)})
	}
	m.open += len(f.checks)
}

// answeredAt notes that a check has its answer. When all checks of a request have answers, the request belongs to its
// caller again.
func (m *message) answeredAt(s *pending) {
	f := s.f
	s.f = nil
	m.open--
	if f.open--; f.open == 0 {
		f.end()
	}
}

// fail gives err to the checks of a message that have no answer. A request without any answer ends with err as a whole.
func (m *message) fail(err error, untried bool) {
	failed := statusError(err)
	for i := range m.checks {
		s := &m.checks[i]
		if s.f == nil {
			continue
		}
		if s.f.open == len(s.f.checks) {
			s.f.err, s.f.untried = err, untried
		}
		s.f.answers[s.i].Err = failed
		m.answeredAt(s)
	}
}

// packer writes the messages of one stream for the wire.
type packer struct {
	numbers wire.Numbers
	in      weirv1.CheckStreamRequest
}

// pack returns a message for the wire at the instant now. It is valid until the next call of pack.
func (p *packer) pack(m *message, now time.Duration) *weirv1.CheckStreamRequest {
	in := &p.in
	in.Define = nil // numbers owns the definitions, so ResetVT must not empty them
	in.ResetVT()
	in.Sequence = m.sequence
	var last *limit.Target
	var number uint32
	for i, s := range m.checks {
		q := &s.f.checks[s.i]
		if last == nil || !wire.SameTarget(&q.Target, last) {
			define, fresh := p.numbers.Of(&q.Target)
			if define == nil {
				// The numbers are used up. After Reset there are more than one message needs.
				p.numbers.Reset()
				return p.pack(m, now)
			}
			if number = define.Number; fresh {
				in.Define = append(in.Define, define)
			}
		}
		last = &q.Target
		wire.AddCheck(in, i, len(m.checks), number, q)
		wire.AddTrace(in, i, s.f.trace)
		wire.Add(&in.TimeoutsMs, i, len(m.checks), timeoutMs(s.f.until-now, len(m.checks)), 0)
	}
	return in
}

// timeoutMs returns the timeout that the node is told for one of n checks. A node that decides a check after its caller
// has gone charges it for nothing. So no check gets more time than its caller has, rounded up to a millisecond. With
// several checks, up to an eighth of the time is cut off, so that most have the same timeout, which the wire has once.
func timeoutMs(left time.Duration, n int) uint32 {
	ms := uint32(min(max(left, 0)/time.Millisecond+1, 1<<31))
	if n == 1 {
		return ms
	}
	return ms - ms%(1<<max(bits.Len32(ms/8)-1, 0))
}

// answer passes the answers of a response to the requests. It returns an error if no node would give such a response;
// the checks that it did not reach stay without an answer.
func (m *message) answer(out *weirv1.CheckStreamResponse) error {
	n := len(out.Checks)
	at := func(i int) *pending { return m.at(out.Checks[i]) }
	if n == 0 && !out.More { // the response answers all checks, in order
		n = len(m.checks)
		at = func(i int) *pending { return m.at(uint32(i)) }
	}
	if !wire.DecisionsFit(out, n) {
		return errOddAnswer
	}
	for i := range n {
		s := at(i)
		if s == nil {
			return errOddAnswer
		}
		q, a := &s.f.checks[s.i], &s.f.answers[s.i]
		wire.ReadDecision(out, i, &a.Decision)
		a.Policy, a.RequestID = nameOf(&q.Target), q.RequestID
	}
	for _, e := range out.Errors {
		s := m.at(e.Check)
		if s == nil || e.Error == nil {
			return errOddAnswer
		}
		s.f.answers[s.i] = Result{Err: errorOf(e.Error)}
	}
	for _, l := range out.Limits {
		s := m.at(l.Check)
		if s == nil {
			return errOddAnswer
		}
		s.f.answers[s.i].Limits = wire.Limits(l.Limits)
	}
	for i := range n {
		s := at(i)
		if s == nil { // a check is named twice
			return errOddAnswer
		}
		m.answeredAt(s)
	}
	if !out.More && m.open > 0 {
		return errOddAnswer
	}
	return nil
}

// at returns the check at a place of the message, if it has no answer yet, otherwise nil.
func (m *message) at(place uint32) *pending {
	if uint64(place) < uint64(len(m.checks)) && m.checks[place].f != nil {
		return &m.checks[place]
	}
	return nil
}
