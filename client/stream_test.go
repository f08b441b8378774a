package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// What is asked while a message is in flight shares the next ones, and an answer is its caller's own.
func TestCallersShareMessages(t *testing.T) {
	n := newNode(nil)
	addr, _ := serve(t, n)
	c := dial(t, addr, WithTimeout(time.Minute))
	must.NoError(t, c.Ready(t.Context()))
	release := n.hold()
	const callers = 500
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			d, err := c.Policy("five").AllowN(t.Context(), fmt.Sprint("key ", i), int64(1+i%5))
			expect.True(t, err == nil && d.Granted == int64(1+i%5) && d.Remaining == int64(4-i%5),
				"%d: %+v, %v", i, d, err)
		})
	}
	l := members(c)[0]
	testkit.Eventually(t, "all to have asked", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.waiting == callers
	})
	release()
	wg.Wait()
	// Each message is as large as all before it that are in flight: some ten for the held ones, one or two for the
	// rest.
	m := n.messages.Load()
	expect.True(t, m <= 30, "%d messages for %d callers", m, callers)
	testkit.Eventually(t, "the counts to be even", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.waiting == 0 && l.inFlight == 0 && l.queued == 0
	})
}

// A question that makes a node refuse a whole message costs the others nothing.
func TestOneRefusedMessage(t *testing.T) {
	n := newNode(nil)
	addr, _ := serve(t, n)
	c := dial(t, addr, WithTimeout(time.Minute))
	must.NoError(t, c.Ready(t.Context()))
	mars := algo.Limit{Algorithm: algo.FixedWindow, Limit: 5, Period: algo.Day, Zone: time.FixedZone("Mars", 0)}
	release := n.hold()
	var wg sync.WaitGroup
	var refused atomic.Int64
	for i := range 100 {
		wg.Go(func() {
			if i%10 == 3 {
				_, err := c.Inline("", mars).Allow(t.Context(), "a")
				var e *Error
				expect.True(t, errors.As(err, &e) && e.Kind == ErrInvalid && e.Field == "limit.time_zone",
					"%d: %v", i, err)
				refused.Add(1)
				return
			}
			d, err := c.Policy("five").Allow(t.Context(), fmt.Sprint("key ", i))
			expect.True(t, err == nil && !d.FailedOpen && d.Remaining == 4, "%d: %+v, %v", i, d, err)
		})
	}
	l := members(c)[0]
	testkit.Eventually(t, "all to have asked", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.waiting+int(refused.Load()) == 100 // some may be refused before the node holds the others
	})
	release()
	wg.Wait()
	expect.Equal(t, refused.Load(), 10, "were refused")
}

// It of several questions ends once when its stream breaks, and is its caller's from then on: for the race detector.
func TestFailedMessageLandsOnce(t *testing.T) {
	f := newRequest()
	f.checks, f.answers, f.open = make([]limit.Check, limit.MaxBatch), make([]Result, limit.MaxBatch), limit.MaxBatch
	m := &message{}
	m.add(f)
	var caller sync.WaitGroup
	caller.Go(func() {
		<-f.done
		expect.True(t, f.err != nil, "ended without an error")
		f.err, f.checks = nil, nil
	})
	m.fail(errOddAnswer, false)
	caller.Wait()
	expect.NoError(t, f.err, "touched after it had ended")
}

// A limit is its caller's again once a call has returned, which the writer of a stream may outlive.
func TestLimitIsTheCallersOwn(t *testing.T) {
	addr, _ := serve(t, newNode(nil))
	c := dial(t, addr, WithTimeout(time.Minute))
	must.NoError(t, c.Ready(t.Context()))
	l := members(c)[0]
	l.mu.Lock()
	l.inFlight = 1000 // nothing is sent
	l.mu.Unlock()
	for n := 1; n <= 2; n++ {
		limit := algo.Limit{Algorithm: algo.TokenBucket, Limit: 5, Window: time.Second}
		checks := []Check{{Limit: &limit, Key: "k"}, {Limit: &limit, Key: "k"}}[:n]
		ctx, cancel := context.WithCancel(t.Context())
		var asked sync.WaitGroup
		asked.Go(func() { _, _ = c.Check(ctx, checks) }) // given up
		var f *request
		testkit.Eventually(t, "the questions to be queued", func() bool {
			l.mu.Lock()
			defer l.mu.Unlock()
			if l.queue.Len() > 0 {
				f = l.queue.Items()[0]
			}
			return f != nil
		})
		for _, q := range f.checks {
			expect.True(t, q.Limit != &limit, "of %d checks, one is sent with the caller's own limit", n)
		}
		cancel()
		asked.Wait()
	}
}

// A stream has fewer numbers than there may be policies.
func TestManyTargets(t *testing.T) {
	addr, _ := serve(t, newNode(nil))
	c := dial(t, addr, WithTimeout(time.Minute))
	for round := range 3 {
		var checks []Check
		for i := range limit.MaxBatch {
			limit := algo.Limit{Algorithm: algo.TokenBucket, Limit: int64(1 + (i+round*500)%1500), Window: time.Second}
			checks = append(checks, Check{Limit: &limit, Namespace: "n", Key: fmt.Sprint(round, " ", i)})
		}
		results := must.Value(c.Check(t.Context(), checks))(t)
		for i, r := range results {
			want := checks[i].Limit.Limit - 1
			must.True(t, r.Err == nil && r.Remaining == want, "round %d, %d: %+v, want %d left", round, i, r, want)
		}
	}
}

// What waits for a node that is stuck is bounded, and what nobody waits for any more is forgotten.
func TestStuckNode(t *testing.T) {
	n := newNode(nil)
	addr, _ := serve(t, n)
	c := dial(t, addr, WithTimeout(time.Minute), WithBreaker(0, time.Hour))
	must.NoError(t, c.Ready(t.Context()))
	n.hang()
	l := members(c)[0]
	ctx, cancel := context.WithCancel(t.Context())
	var checks []Check
	for i := range limit.MaxBatch {
		checks = append(checks, Check{Policy: "five", Key: fmt.Sprint(i)})
	}
	var wg sync.WaitGroup
	for range maxWaiting / limit.MaxBatch {
		wg.Go(func() {
			_, err := c.Check(ctx, checks)
			expect.Equal(t, err, context.Canceled)
		})
	}
	testkit.Eventually(t, "the link to be full", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.waiting == maxWaiting
	})
	expect.True(t, failedOpen(t, c), "one question too many was answered")
	cancel()
	wg.Wait()
	n.cancel() // it answers what it was asked
	testkit.Eventually(t, "what nobody waits for to be forgotten", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.waiting == 0 && l.queued == 0 && l.queue.Len() == 0
	})
}

// What a node that stops has not carried out is asked of another one, although it could be charged twice.
func TestNodeStops(t *testing.T) {
	a, b := newNode(nil), newNode(nil)
	addrA, _ := serve(t, a)
	addrB, _ := serve(t, b)
	c := dial(t, addrA+","+addrB, WithTimeout(time.Minute))
	testkit.Eventually(t, "both nodes to be asked", func() bool {
		failedOpen(t, c)
		return a.asked.Load() > 0 && b.asked.Load() > 0
	})
	a.stops.Store(true) // ends its streams, and carries out nothing more
	for range 20 {
		expect.True(t, !failedOpen(t, c), "a question went unanswered")
	}
}

// TestEndOfAStream: a node that ends a stream in good order has not failed, however short the stream was: callers wait
// for the next one.
func TestEndOfAStream(t *testing.T) {
	c := must.Value(Dial(t.Context(), "127.0.0.1:1"))(t)
	defer c.Close()
	list, _, _ := c.nodes.members()
	for err, want := range map[error]int32{io.EOF: connecting, io.ErrUnexpectedEOF: failed} {
		list[0].ended(err, false)
		expect.Equal(t, list[0].state.Load(), want, "%v", err)
	}
	expect.Equal(t, pauseAfter(io.EOF, false, maxPause), minPause, "the pause, which callers wait for")
	expect.Equal(t, pauseAfter(io.ErrUnexpectedEOF, false, minPause), 2*minPause, "the pause after a failure")
}

// TestErrorEndsAMessage: a message that a node rejects as a whole is over, even if the node says that more comes.
func TestErrorEndsAMessage(t *testing.T) {
	l := talking()
	f := newRequest()
	f.checks, f.answers = []limit.Check{{Target: limit.Target{Policy: "p", Key: "k"}}}, make([]Result, 1)
	l.send(f)
	sequence := l.next().GetSequence()
	out := &weirv1.CheckStreamResponse{Sequence: sequence, More: true, Error: &weirv1.Error{Code: 3}}
	must.NoError(t, l.onAnswer(out))
	<-f.done
	expect.True(t, f.untried && len(l.sent) == 0 && l.waiting == 0, "%v, %d messages, %d checks wait", f.untried,
		len(l.sent), l.waiting)
}

// TestHurryEndsWithTheStream: a check that came while a stream was being opened, and failed with it, does not end the
// pause after it.
func TestHurryEndsWithTheStream(t *testing.T) {
	l := talking()
	l.hurry.Set()
	l.ended(io.ErrUnexpectedEOF, false)
	expect.Equal(t, len(l.hurry), 0, "the pause is ended for no check")
}

// Nobody's question is waited for longer than its caller waits, whoever else's are in the same message.
func TestTimeoutsAreTheCallersOwn(t *testing.T) {
	const ms = time.Millisecond
	for _, test := range []struct {
		left []time.Duration
		want []uint32
	}{
		{[]time.Duration{1000 * ms}, []uint32{1001}},
		{[]time.Duration{6*ms - 1, 5 * ms}, []uint32{6}},
		{[]time.Duration{999 * ms, 1000 * ms, 960 * ms}, []uint32{960}},
		{[]time.Duration{1000 * ms, 20 * ms, 25 * ms}, []uint32{960, 20, 26}},
		{[]time.Duration{-ms, 1000 * ms, 1 << 62}, []uint32{1, 960, 1 << 31}},
	} {
		var p packer
		m := &message{}
		for _, left := range test.left {
			f := &request{checks: []limit.Check{{Target: limit.Target{Policy: "five", Key: "k"}}},
				until: time.Hour + left}
			m.checks = append(m.checks, pending{f, 0})
		}
		for range 2 { // what is left of the message before is gone
			got := p.pack(m, time.Hour)
			expect.True(t, got.TimeoutMs == 0 && slices.Equal(got.TimeoutsMs, test.want), "%v: %d, %d", test.left,
				got.TimeoutMs, got.TimeoutsMs)
		}
	}
}

// TestReportsPassChecks: so many messages of checks wait for answers that the node would read no further; a report of
// loans is sent all the same, and the next message once one is answered.
func TestReportsPassChecks(t *testing.T) {
	l := talking()
	l.greeted, l.follows = true, true
	ask := func() (sequence uint64) {
		f := newRequest()
		f.checks, f.answers = []limit.Check{{Target: limit.Target{Policy: "p", Key: "k"}}}, make([]Result, 1)
		l.send(f)
		must.NoError(t, f.err, "the node takes no more")
		return l.next().GetSequence()
	}
	var messages []uint64
	for m := ask(); m != 0 && len(messages) < 100; m = ask() {
		messages = append(messages, m)
		must.NoError(t, l.onAnswer(&weirv1.CheckStreamResponse{Sequence: m, More: true}))
	}
	must.Equal(t, len(messages), maxUnanswered, "messages wait for answers")
	must.True(t, l.report(&weirv1.BorrowRequest{Borrower: 1}), "the report is not sent")
	must.True(t, l.next().GetBorrow() != nil, "the report is not sent next")
	select {
	case <-l.wake:
	default:
	}
	must.NoError(t, l.onAnswer(&weirv1.CheckStreamResponse{Sequence: messages[7], Checks: []uint32{0}}))
	select {
	case <-l.wake:
	default:
		t.Error("the writer is not told that there is room for another message")
	}
	expect.True(t, l.next().GetSequence() != 0, "no message is sent after one is answered")

	early := ask() // not sent: too many wait
	must.NoError(t, l.onAnswer(&weirv1.CheckStreamResponse{Sequence: messages[8], Checks: []uint32{0}}))
	_, m := l.take()
	must.True(t, early == 0 && m != nil, "%d, %v", early, m)
	expect.Equal(t, l.onAnswer(&weirv1.CheckStreamResponse{Sequence: m.sequence}), errOddAnswer, "before it is packed")
}
