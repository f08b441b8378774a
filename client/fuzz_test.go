package client

import (
	"testing"
	"time"

	"github.com/weirlimit/weir/internal/fifo"
	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// FuzzAnswers: whatever a node answers to a message on a stream, each question in it has its answer, an error, or is asked again, once;
// and what is no answer ends the stream.
func FuzzAnswers(f *testing.F) {
	for _, m := range []*weirv1.CheckStreamResponse{
		{Sequence: 1, Flags: []uint32{1}, Granted: []int64{1}}, {Sequence: 1, More: true, Checks: []uint32{1}}, {Sequence: 1, More: true}, {Sequence: 1, Checks: []uint32{0, 1, 2}},
		{Sequence: 1, Checks: []uint32{0, 0}}, {Sequence: 2}, {Sequence: 1, Flags: []uint32{1, 2}}, {Sequence: 1, Error: &weirv1.Error{Code: 3, Field: "define[3].limit"}},
		{Sequence: 1, Errors: []*weirv1.StreamError{{Check: 2, Error: &weirv1.Error{Code: 99}}}}, {Sequence: 1, Errors: []*weirv1.StreamError{{Check: 1 << 31}}},
		{Sequence: 1, Limits: []*weirv1.StreamLimits{{Check: 2, Limits: []*weirv1.LimitStatus{{}, {Limit: -1}}}}},
	} {
		data := must.Value(m.MarshalVT())(f)
		f.Add(data, data)
	}
	f.Fuzz(func(t *testing.T, first, second []byte) {
		l := talking()
		m := &message{sequence: 1}
		var sets []*request
		for range 3 {
			fl := newRequest()
			fl.checks, fl.answers, fl.open = []limit.Check{{Target: limit.Target{Policy: "p"}}}, make([]Result, 1), 1
			sets = append(sets, fl)
			m.add(fl)
		}
		l.sent[1] = m
		l.waiting, l.inFlight = len(m.checks), len(m.checks)
		for _, data := range [][]byte{first, second} {
			out := new(weirv1.CheckStreamResponse)
			if out.UnmarshalVT(data) != nil {
				break
			}
			if l.received(out) != nil {
				break
			}
		}
		expect.True(t, l.inFlight >= 0 && l.waiting >= 0, "%d in flight, %d waiting", l.inFlight, l.waiting)
		if _, left := l.sent[1]; left {
			m.fail(errOddAnswer, false) // as the end of the stream does
		}
		for i, fl := range sets {
			select {
			case <-fl.done:
			default:
				t.Errorf("question %d stays without an answer", i)
			}
		}
	})
}

// talking returns a member as it is while its stream is open.
func talking() *member {
	ns := &nodes{changed: make(chan struct{}), now: func() time.Duration { return 0 }}
	return &member{nodes: ns, wake: fifo.NewSignal(), greeted: true, follows: true, sent: make(map[uint64]*message)}
}
