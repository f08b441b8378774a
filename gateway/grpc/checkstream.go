package grpc

import (
	"cmp"
	"context"
	"errors"
	"io"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/weirlimit/weir/internal/fairshare"
	"github.com/weirlimit/weir/internal/fifo"
	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
)

// This file has CheckStream. The path of one request of checks:
//
//	read       receives it, within the memory that Requests allows
//	take       holds turn, so that a stopping node starts no more requests
//	check      has Begin decide the checks that this node holds, and sends these answers at once
//	remainder  has Finish carry out the others, in groups of similar time-outs, each in a goroutine, and sends their
//	           answers
//
// Requests that report loans go to borrow.go, requests to follow the node to follow.go. All responses pass through
// sendLocked. Other files must not call stream.Send themselves.

const (
	// maxInFlight bounds the requests of one stream that wait for other nodes. Further requests stay unread.
	maxInFlight = 64
	// maxTraced bounds the traced checks of a request.
	maxTraced = 64
	// maxTimeout bounds how long a check may wait for other nodes, whatever its caller says.
	maxTimeout = time.Minute
	// freeTargets is how many targets a stream may define without taking from Kept; targetBytes is what each further
	// one takes, in bytes.
	freeTargets, targetBytes = 8, 512
)

// checkStream is one CheckStream. One goroutine (read) reads requests and decides the checks that this node holds. Each
// group of checks that waits for other nodes has a goroutine of its own, and so has teller.
type checkStream struct {
	handling
	stream   weirv1.Limiter_CheckStreamServer
	targets  wire.Targets      // used by the reader only
	kept     []fairshare.Taken // bytes of targets taken from Kept; used by the reader only
	borrower *borrower         // used by the reader only; nil until the first report of loans
	places   chan struct{}     // has an element for each request that waits for other nodes
	waiting  sync.WaitGroup    // goroutines that wait for other nodes or for copies
	teller   teller
	telling  sync.WaitGroup // the goroutine of teller
	done     chan struct{}  // closed when the reader has ended

	unconfirmed chan struct{} // has an element for each report of loans whose answer waits for copies

	// turn is held by the reader from reading a request until the request is answered or waits in a goroutine.
	turn sync.Mutex
	over bool // guarded by turn: no further request is carried out

	sending sync.Mutex // held while one response is sent
}

// CheckStream implements weirv1.LimiterServer.
func (s *Server) CheckStream(stream weirv1.Limiter_CheckStreamServer) error {
	c := &checkStream{
		handling: s.handling(weirv1.Limiter_CheckStream_FullMethodName), stream: stream, done: make(chan struct{}),
		places: make(chan struct{}, maxInFlight), unconfirmed: make(chan struct{}, maxUnconfirmed),
	}
	c.teller.wake = fifo.NewSignal()
	left, err := c.run(stream.Context(), func() error {
		defer c.finish()
		defer c.waiting.Wait()
		return c.read()
	})
	if !left {
		return err
	}
	c.turn.Lock()
	c.over = true
	c.turn.Unlock()
	c.waiting.Wait()
	return nil
}

// read carries out requests until the caller sends no more. It returns an error when a message is malformed or the
// stream is broken.
func (c *checkStream) read() error {
	for {
		var in *weirv1.CheckStreamRequest // nil until a message arrives
		a, m := &callMemory{gate: c.server.cfg.Requests}, new(wire.Lenient)
		m.Admit = func(size int) error {
			in = weirv1.CheckStreamRequestFromVTPool()
			m.Message = in
			return a.enter(c.stream.Context(), size, leastStreamCheck)
		}
		err := c.stream.RecvMsg(m)
		if errors.Is(err, io.EOF) {
			err = io.EOF
		} else if err == nil {
			err = undecoded(m)
		}
		if err == nil {
			a.keep(max(len(in.KeyLengths), len(in.Borrow.GetLoans())))
			err = c.take(in, a)
		} else {
			a.leave()
		}
		if in != nil && wire.Small(in) {
			clear(in.RequestIds) // the texts may be long
			in.ReturnToVTPool()
		}
		if err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
	}
}

// finish releases what the stream holds besides its requests.
func (c *checkStream) finish() {
	close(c.done)
	if b := c.borrower; b != nil {
		b.end()
	}
	c.telling.Wait()
	c.release()
}

// take carries out one request, or starts the part of it that waits. It returns io.EOF when the stream is over. a is
// left when the request is answered.
func (c *checkStream) take(in *weirv1.CheckStreamRequest, a *callMemory) (err error) {
	c.turn.Lock()
	defer c.turn.Unlock()
	later := false
	defer func() {
		if !later {
			a.leave()
		}
	}()
	switch {
	case c.over:
		return io.EOF
	case in.Borrow == nil && !in.Ready && !in.Topology:
		later, err = c.check(in, a)
		return err
	case len(in.KeyLengths) > 0 || in.Borrow != nil && (in.Ready || in.Topology):
		bad := invalid("borrow", "and ready and topology do not go with checks, nor borrow with the others")
		return c.send(&weirv1.CheckStreamResponse{Sequence: in.Sequence, Error: wire.ProtoError(wire.StreamNamed(bad))})
	case in.Borrow != nil:
		later, err = c.borrow(in.Borrow, in.Sequence, a)
		return err
	default:
		c.follow(in)
		return nil
	}
}

// check carries out a request of checks. later says that goroutines carry out the rest of it; the last of them leaves
// a.
func (c *checkStream) check(in *weirv1.CheckStreamRequest, a *callMemory) (later bool, err error) {
	seen := c.server.observe()
	b := c.server.batches.Get().(*limiter.Batch)
	var open []int
	var traces traces
	bad := c.unpack(in, b)
	if bad == nil {
		traces = c.trace(in, b)
		open, bad = c.server.svc.Begin(c.stream.Context(), b)
	}
	switch {
	case bad != nil:
		traces.end(wire.Code(bad.Kind))
		c.server.put(b, a)
		defer seen(wire.Code(bad.Kind))
		return false, c.send(&weirv1.CheckStreamResponse{Sequence: in.Sequence,
			Error: wire.ProtoError(wire.StreamNamed(bad))})
	case len(open) == 0:
		defer seen(codes.OK)
		traces.answered(b, nil)
		out := packed(in.Sequence, b, nil, false)
		defer c.letGo(c.hold(len(b.Checks)))
		c.server.put(b, a)
		return false, c.send(out)
	}
	decided := make([]int, 0, len(b.Checks)-len(open))
	for i := range b.Checks {
		if _, waits := slices.BinarySearch(open, i); !waits {
			decided = append(decided, i)
		}
	}
	traces.answered(b, decided)
	first := packed(in.Sequence, b, decided, true)
	groups := byPatience(in, open)
	rest := &remainder{stream: c, batch: b, admission: a, sequence: in.Sequence, told: make(chan struct{}),
		left: len(groups), seen: seen, traces: traces}
	rest.packing.Store(int32(len(groups)))
	// Finish begins before the first response is sent, so that a caller that does not read does not keep the batch from
	// others.
	for _, g := range groups {
		c.waiting.Go(func() { panics.Tell(c.panicked, func() { rest.finish(g) }) })
	}
	held := c.hold(len(decided))
	err = c.send(first)
	c.letGo(held)
	close(rest.told)
	// blocks at maxInFlight; an earlier request ends within maxTimeout, or with a caller that does not read
	c.places <- struct{}{}
	return true, err
}

// remainder is the part of a request that is left when its first response is made. Its groups share the batch.
type remainder struct {
	stream    *checkStream
	batch     *limiter.Batch
	admission *callMemory
	sequence  uint64
	told      chan struct{} // closed when the first response has been sent
	packing   atomic.Int32  // groups whose answers are not packed yet
	broken    atomic.Bool   // a group has panicked: the batch must not be reused
	left      int           // groups without an answer; guarded by the stream's sending
	seen      func(codes.Code)
	traces    traces
}

// finish has a group carried out and sends its answers.
func (r *remainder) finish(g group) {
	c := r.stream
	// The operations go on when the caller leaves or the node stops.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.stream.Context()), g.timeout)
	defer cancel()
	var out *weirv1.CheckStreamResponse
	panics.Tell(func(p *panics.Error) {
		c.panicked(p)
		r.broken.Store(true)
	}, func() {
		c.server.svc.Finish(ctx, r.batch, g.checks)
		r.traces.answered(r.batch, g.checks)
		out = packed(r.sequence, r.batch, g.checks, true)
	})
	if r.packing.Add(-1) == 0 {
		if r.broken.Load() {
			r.admission.leave()
		} else {
			// before sending: the batch is much larger than the answers, which may wait for the caller
			c.server.put(r.batch, r.admission)
		}
	}
	defer c.letGo(c.hold(len(g.checks)))
	<-r.told
	c.sending.Lock()
	defer c.sending.Unlock()
	if r.left--; r.left == 0 {
		defer func() {
			r.seen(codes.OK)
			<-c.places
		}()
	}
	if out != nil {
		out.More = r.left > 0
		_ = c.sendLocked(out) // the reader notices a failed stream
	}
}

// group is checks of a request with similar time-outs.
type group struct {
	checks  []int
	timeout time.Duration
}

// byPatience divides the open checks of a request by time-out. A group has its shortest time-out, so that no check is
// carried out after its caller has given up. The others of the group lose at most a ninth of their time. There are at
// most some 80 groups, whatever is asked.
func byPatience(in *weirv1.CheckStreamRequest, open []int) []group {
	timeout := func(i int) time.Duration {
		ms := cmp.Or(wire.At(in.TimeoutsMs, i, 0), in.TimeoutMs)
		if ms == 0 {
			return maxTimeout
		}
		return min(time.Duration(ms)*time.Millisecond, maxTimeout)
	}
	if len(in.TimeoutsMs) <= 1 {
		return []group{{slices.Clone(open), timeout(0)}}
	}
	sorted := slices.SortedFunc(slices.Values(open), func(a, b int) int { return cmp.Compare(timeout(a), timeout(b)) })
	var groups []group
	for _, i := range sorted {
		t := timeout(i)
		if n := len(groups); n == 0 || t > groups[n-1].timeout/8*9 {
			groups = append(groups, group{timeout: t})
		}
		g := &groups[len(groups)-1]
		g.checks = append(g.checks, i)
	}
	for _, g := range groups {
		slices.Sort(g.checks) // checks of one batch are decided in order
	}
	return groups
}

// traces are the traced checks of a request; nil: none.
type traces []traced

type traced struct {
	check int
	end   func(codes.Code)
}

// trace begins the spans of a batch's checks.
func (c *checkStream) trace(in *weirv1.CheckStreamRequest, b *limiter.Batch) (t traces) {
	if c.server.cfg.Trace == nil {
		return nil
	}
	for i := range b.Checks {
		from := wire.At(in.TraceContexts, i, nil)
		if len(from) != limiter.TraceContext {
			from = nil // absent or malformed
		}
		below, end := c.server.cfg.Trace(string(from))
		if end == nil {
			continue
		}
		if t == nil {
			b.Traces = make([]string, len(b.Checks))
		}
		b.Traces[i] = below
		if t = append(t, traced{i, end}); len(t) == maxTraced {
			break
		}
	}
	return t
}

// answered ends the spans of some checks, which have their results; checks nil: of all.
func (t traces) answered(b *limiter.Batch, checks []int) {
	for _, one := range t {
		if checks == nil || slices.Contains(checks, one.check) {
			failed := codes.OK
			if e, ok := errors.AsType[*limit.Error](b.Results[one.check].Err); ok {
				failed = wire.Code(e.Kind)
			}
			one.end(failed)
		}
	}
}

// end ends all spans with one code.
func (t traces) end(code codes.Code) {
	for _, one := range t {
		one.end(code)
	}
}

// observe starts the clock of a request. end reports its time with the code of its answer.
func (s *Server) observe() (end func(failed codes.Code)) {
	if s.cfg.Observe == nil {
		return func(codes.Code) {}
	}
	began := time.Now()
	return func(failed codes.Code) { s.cfg.Observe(time.Since(began), failed) }
}

// put returns a batch, emptied, to its pool, and leaves a.
func (s *Server) put(b *limiter.Batch, a *callMemory) {
	b.Reset()
	s.batches.Put(b)
	a.leave()
}

// send writes a response and returns it to its pool.
func (c *checkStream) send(out *weirv1.CheckStreamResponse) error {
	c.sending.Lock()
	defer c.sending.Unlock()
	return c.sendLocked(out)
}

func (c *checkStream) sendLocked(out *weirv1.CheckStreamResponse) error {
	defer out.ReturnToVTPool()
	return c.patiently(func() error { return c.stream.Send(out) })
}

// packed makes the response with the results of some checks of a batch; checks nil: of all.
func packed(sequence uint64, b *limiter.Batch, checks []int, more bool) *weirv1.CheckStreamResponse {
	out := weirv1.CheckStreamResponseFromVTPool()
	out.Sequence, out.More = sequence, more
	if checks == nil {
		for i := range b.Results {
			pack(out, i, len(b.Results), i, b)
		}
	}
	for i, check := range checks {
		out.Checks = append(out.Checks, uint32(check))
		pack(out, i, len(checks), check, b)
	}
	return out
}

// pack adds the result of a check of a batch to a response, as element i of n.
func pack(out *weirv1.CheckStreamResponse, i, n, check int, b *limiter.Batch) {
	r := &b.Results[check]
	d := &r.Decision
	if e, ok := errors.AsType[*limit.Error](r.Err); ok {
		out.Errors = append(out.Errors,
			&weirv1.StreamError{Check: uint32(check), Error: wire.ProtoError(wire.StreamNamed(e))})
		d = new(limit.Decision)
	}
	wire.AddDecision(out, i, n, uint32(check), d)
}

// keep takes the bytes for targets up to a number from Kept, until the stream ends.
func (c *checkStream) keep(number int) *limit.Error {
	more := number + 1 - max(len(c.targets), freeTargets)
	if kept := c.server.cfg.Kept; kept != nil && more > 0 && number < wire.MaxTargets {
		bytes, ok := kept.TakeAll(c.server.cfg.Caller(c.stream.Context()), more*targetBytes)
		if !ok {
			return limit.NewError(limit.TooLarge, "number",
				"is one more than this node keeps of this caller's streams: define fewer, or in fewer streams")
		}
		c.kept = append(c.kept, bytes)
	}
	return nil
}

// release returns the bytes that keep has taken.
func (c *checkStream) release() {
	for _, bytes := range c.kept {
		c.server.cfg.Kept.Give(bytes)
	}
}

// unpack reads a request's definitions, and its checks into a batch. The error names the field.
func (c *checkStream) unpack(in *weirv1.CheckStreamRequest, b *limiter.Batch) *limit.Error {
	for i, d := range in.Define {
		err := c.keep(int(d.Number))
		if err == nil {
			err = c.targets.Define(d)
		}
		if err != nil {
			err.Field = "define[" + strconv.Itoa(i) + "]." + err.Field
			return err
		}
	}
	n := len(in.KeyLengths)
	if err := limit.ValidBatch(n); err != nil {
		return err
	}
	b.Checks = slices.Grow(b.Checks[:0], n)[:n]
	return wire.ReadChecks(in, c.targets.At, func(i int) *limit.Check { return &b.Checks[i] })
}

func invalid(field, message string) *limit.Error {
	return limit.NewError(limit.Invalid, field, message)
}
