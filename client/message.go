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

// From a request to its answers, on the stream of one node:
//
//	add     puts the checks of a request into a message; a message has those of many callers
//	pack    writes the message as it is sent
//	answer  hands on the answers of a response to the requests; fail ends those that get none
//	end     wakes the caller of a request whose checks all have answers

var errOddAnswer = errors.New("client: a node answered a stream with what was not asked for")

// request is the checks of one call that go to one node. The node's stream ends it once. A caller that is gone before does not use it again.
type request struct {
	checks  []limit.Check
	answers []Result // one for each check, once ended without err
	places  []int    // the caller's, of the checks
	trace   string   // the ids of a sampled trace and of a span in it; empty: none
	to      *member
	until   time.Duration // by the clock of nodes: the caller waits no longer
	timer   *time.Timer   // of the caller

	gone atomic.Bool   // its caller no longer waits
	done chan struct{} // holds a token once ended
	open int           // checks without an answer; only one goroutine at a time uses it
	// What became of the request as a whole; set before it ends.
	err     error // the status of a call, or nil
	untried bool  // with err: the node carried out nothing
}

func newRequest() *request {
	f := &request{done: make(chan struct{}, 1), timer: time.NewTimer(time.Hour)}
	f.timer.Stop()
	return f
}

// reset makes a request that has ended without an error as new.
func (f *request) reset() {
	clear(f.checks)
	clear(f.answers)
	f.checks, f.answers, f.places, f.to, f.trace = f.checks[:0], f.answers[:0], f.places[:0], nil, ""
}

// fail ends a request that is part of no message, unless its caller has given it up.
func (f *request) fail(err error, untried bool) {
	f.err, f.untried = err, untried
	f.end()
}

func (f *request) end() { f.done <- struct{}{} }

// message is requests that are sent together.
type message struct {
	sequence uint64
	checks   []pending // by place in the message
	open     int       // checks without an answer
	begun    bool      // the first answer is there
}

// pending is a check of a message, and where its answer goes.
type pending struct {
	f *request // nil once it is there
	i int32    // of f's checks
}

// add adds the checks of a request.
func (m *message) add(f *request) {
	for i := range f.checks {
		m.checks = append(m.checks, pending{f, int32(i)})
	}
	m.open += len(f.checks)
}

// answeredAt notes that the answer to a check is there. The request is its caller's once it ends.
func (m *message) answeredAt(s *pending) {
	f := s.f
	s.f = nil
	m.open--
	if f.open--; f.open == 0 {
		f.end()
	}
}

// fail ends what a message carries and has no answer. A request of which no check has one ends with the error as a whole.
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

// packer writes the checks of messages of one stream.
type packer struct {
	numbers wire.Numbers
	in      weirv1.CheckStreamRequest
}

// pack returns a message as it is sent at an instant; it is good until the next one is packed.
func (p *packer) pack(m *message, now time.Duration) *weirv1.CheckStreamRequest {
	in := &p.in
	in.Define = nil // which are the numbers', and must not be emptied
	in.ResetVT()
	in.Sequence = m.sequence
	var last *limit.Target
	var number uint32
	for i, s := range m.checks {
		q := &s.f.checks[s.i]
		if last == nil || !wire.SameTarget(&q.Target, last) {
			n, fresh := p.numbers.Of(&q.Target)
			if n == nil {
				// The numbers are used up. Those of this message alone are fewer than there are.
				p.numbers.Reset()
				return p.pack(m, now)
			}
			if number = n.Define.Number; fresh {
				in.Define = append(in.Define, n.Define)
			}
		}
		last = &q.Target
		wire.AddCheck(in, i, len(m.checks), number, q)
		wire.AddTrace(in, i, s.f.trace)
		wire.Add(&in.TimeoutsMs, i, len(m.checks), timeoutMs(s.f.until-now, len(m.checks)), 0)
	}
	return in
}

// timeoutMs is for how long a node is told that the answer to one of n checks is waited for. It charges a check that it decides after its
// caller has gone, so no check may have more time than its caller. Of several an eighth at most is left out, so that most have the same.
func timeoutMs(left time.Duration, n int) uint32 {
	ms := uint32(min(max(left, 0)/time.Millisecond+1, 1<<31))
	if n == 1 {
		return ms
	}
	return ms - ms%(1<<max(bits.Len32(ms/8)-1, 0))
}

// answer hands on the answers of a response. An error says that it is none that a node gives: what was not handed on has no answer then.
func (m *message) answer(out *weirv1.CheckStreamResponse) error {
	n := len(out.Checks)
	at := func(i int) *pending { return m.at(out.Checks[i]) }
	if n == 0 && !out.More { // the answers are those to all checks, in order
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
