package client

import (
	"errors"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
)

var errOddAnswer = errors.New("client: a node answered a stream with what was not asked for")

// request is the checks of one call that go to one node. It ends once: the node's stream ends it, or the caller abandons it and then no longer uses it.
type request struct {
	checks  []limit.Check
	answers []Result // one for each check, once ended without err
	places  []int    // the caller's, of the checks
	trace   string   // the ids of a sampled trace and of a span in it; empty: none
	to      *member
	until   time.Duration // by the clock of nodes: the caller waits no longer
	timer   *time.Timer   // of the caller

	state atomic.Uint32 // one of the constants below
	done  chan struct{} // holds a token once ended
	open  int           // checks without an answer; only one goroutine at a time uses it
	// What became of the request as a whole; set before it ends.
	err    error // the status of a call, or nil
	unsent bool  // with err: nothing was carried out
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
	f.checks, f.answers, f.places, f.to, f.trace = f.checks[:0], f.answers[:0], f.places[:0], nil, ""
	f.state.Store(unended)
}

// fail ends a request that is part of no message, unless its caller has given it up.
func (f *request) fail(err error, unsent bool) {
	f.err, f.unsent = err, unsent
	f.end()
}

func (f *request) end() {
	if f.state.CompareAndSwap(unended, ended) {
		f.done <- struct{}{}
	}
}

// abandon gives up a request, and reports false if it has ended.
func (f *request) abandon() bool { return f.state.CompareAndSwap(unended, abandoned) }

// message is requests that are sent together.
type message struct {
	sequence uint64
	slots    []slot // by place in the message
	open     int    // slots without an answer
	answered bool   // for the first time
}

// slot is where the answer to a check goes.
type slot struct {
	f *request // nil once it is there
	i int32    // of f's checks
}

// add adds the checks of a request.
func (m *message) add(f *request) {
	for i := range f.checks {
		m.slots = append(m.slots, slot{f, int32(i)})
	}
	m.open += len(f.checks)
}

// answeredAt notes that the answer to a check is there. The request is its caller's once it ends.
func (m *message) answeredAt(s *slot) {
	f := s.f
	s.f = nil
	m.open--
	if f.open--; f.open == 0 {
		f.end()
	}
}

// fail ends what a message carries and has no answer. A request of which no check has one ends with the error as a whole.
func (m *message) fail(err error, unsent bool) {
	failed := statusError(err)
	for i := range m.slots {
		s := &m.slots[i]
		if s.f == nil {
			continue
		}
		if s.f.open == len(s.f.checks) {
			s.f.err, s.f.unsent = err, unsent
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
	packTimeouts(in, m, now)
	var last *limit.Target
	var number uint32
	for i, s := range m.slots {
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
		wire.AddCheck(in, i, len(m.slots), number, q)
		wire.AddTrace(in, i, s.f.trace)
	}
	return in
}

// packTimeouts writes how long callers wait for their answers. A node charges a check that it decides after its caller has gone, so no check may have
// more time than its caller. Where all callers have about as long, all checks get the shortest time: the nodes group the checks of a request in
// the same way.
func packTimeouts(in *weirv1.CheckStreamRequest, m *message, now time.Duration) {
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

// answer hands on the answers of a response. An error says that it is none that a node gives.
func (m *message) answer(out *weirv1.CheckStreamResponse) error {
	n, all := len(out.Checks), len(out.Checks) == 0 && !out.More
	if all {
		n = len(m.slots)
	}
	if !wire.DecisionsFit(out, n) {
		return errOddAnswer
	}
	place := func(i int) int {
		if all {
			return i
		}
		return int(out.Checks[i])
	}
	for i := range n {
		s := m.slot(place(i))
		if s == nil {
			return errOddAnswer
		}
		q, a := &s.f.checks[s.i], &s.f.answers[s.i]
		wire.ReadDecision(out, i, &a.Decision)
		a.Policy, a.RequestID = nameOf(&q.Target), q.RequestID
	}
	for _, e := range out.Errors {
		s := m.slot(int(e.Check))
		if s == nil {
			return errOddAnswer
		}
		s.f.answers[s.i] = Result{Err: codeError(codes.Code(e.Error.GetCode()), e.Error.GetField(), e.Error.GetMessage())}
	}
	for _, l := range out.Limits {
		s := m.slot(int(l.Check))
		if s == nil {
			return errOddAnswer
		}
		s.f.answers[s.i].Limits = wire.Limits(l.Limits)
	}
	for i := range n {
		s := m.slot(place(i))
		if s == nil {
			return errOddAnswer // named twice
		}
		m.answeredAt(s)
	}
	if !out.More && m.open > 0 {
		return errOddAnswer
	}
	return nil
}

// slot is where the answer to the check at a place goes; nil: there is one already, or there is no such check.
func (m *message) slot(place int) *slot {
	if place >= len(m.slots) || m.slots[place].f == nil {
		return nil
	}
	return &m.slots[place]
}
