package grpc

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/scripted"
	"github.com/weirlimit/weir/test/testkit"
)

type checkStreamClient = grpc.BidiStreamingClient[weirv1.CheckStreamRequest, weirv1.CheckStreamResponse]

// openStream opens a stream that ends with the test.
func openStream(t *testing.T, c weirv1.LimiterClient) checkStreamClient {
	t.Helper()
	return must.Value(c.CheckStream(t.Context()))(t)
}

// exchange sends a request and returns the next response.
func exchange(t *testing.T, stream checkStreamClient, in *weirv1.CheckStreamRequest) *weirv1.CheckStreamResponse {
	t.Helper()
	must.NoError(t, stream.Send(in))
	return nextOf(t, stream)
}

func nextOf(t *testing.T, stream checkStreamClient) *weirv1.CheckStreamResponse {
	t.Helper()
	return must.Value(stream.Recv())(t)
}

// streamed is a request for n checks of one key each, of the policy p with the number 0.
func streamed(sequence uint64, keys ...string) *weirv1.CheckStreamRequest {
	in := &weirv1.CheckStreamRequest{
		Sequence: sequence, Define: []*weirv1.StreamTarget{{Policy: "p"}}, Keys: []byte(strings.Join(keys, "")),
	}
	for _, k := range keys {
		in.KeyLengths = append(in.KeyLengths, uint32(len(k)))
	}
	return in
}

// unpacked is the decision of a response's check i, of n, written out as the unary call has it.
func unpacked(out *weirv1.CheckStreamResponse, i int, policy, requestID string) *weirv1.Decision {
	flags := weirv1.StreamFlag(wire.At(out.Flags, i, 0))
	has := func(f weirv1.StreamFlag) bool { return flags&f != 0 }
	d := &weirv1.Decision{
		Policy: policy, RequestId: requestID,
		Allowed: has(weirv1.StreamFlag_STREAM_FLAG_ALLOWED), Shadow: has(weirv1.StreamFlag_STREAM_FLAG_SHADOW),
		Degraded:     has(weirv1.StreamFlag_STREAM_FLAG_DEGRADED),
		FailedOpen:   has(weirv1.StreamFlag_STREAM_FLAG_FAILED_OPEN),
		FailedClosed: has(weirv1.StreamFlag_STREAM_FLAG_FAILED_CLOSED),
		NearLimit:    has(weirv1.StreamFlag_STREAM_FLAG_NEAR_LIMIT), Banned: has(weirv1.StreamFlag_STREAM_FLAG_BANNED),
		RetryAfterEstimated: has(weirv1.StreamFlag_STREAM_FLAG_RETRY_AFTER_ESTIMATED),
		Granted:             wire.At(out.Granted, i, 0), Limit: wire.At(out.Limit, i, 0),
		WindowNs:  wire.At(out.WindowNs, i, 0),
		Remaining: wire.At(out.Remaining, i, 0), ResetAfterNs: wire.At(out.ResetAfterNs, i, 0),
		DelayNs:       wire.At(out.DelayNs, i, 0),
		RememberForNs: wire.At(out.RememberForNs, i, 0),
	}
	if !has(weirv1.StreamFlag_STREAM_FLAG_NEVER) {
		d.RetryAfterNs = proto.Int64(wire.At(out.RetryAfterNs, i, 0))
	}
	for _, l := range out.Limits {
		if int(l.Check) == i {
			d.Limits = l.Limits
		}
	}
	return d
}

// The stream says what the unary call says, whatever is asked: two nodes with the same policies, at the same instant of
// a clock that stands still, get the same checks in both ways.
func TestCheckStreamIsCheck(t *testing.T) {
	set := must.Value(policy.Parse("test.yaml", []byte(`policies:
  - {name: log, algorithm: sliding_log, limit: 10, window: 1m}
  - {name: queue, algorithm: leaky_bucket, limit: 10, capacity: 5, window: 1s}
  - {name: two, limits: [4/1s, 6/1m]}
  - {name: shy, algorithm: fixed_window, limit: 3, window: 1m, shadow: true}
  - {name: free, algorithm: fixed_window, limit: 3, window: 1m, overrides: [{key: a, unlimited: true}, {key: b, blocked: true}]}
  - {name: lease, algorithm: concurrency, limit: 10, ttl: 1m}`)))(t)
	var observed, failures atomic.Int64
	node := func() weirv1.LimiterClient {
		l := limiter.New(limiter.Config{Policies: set,
			Clock: func() algo.Instant { return algo.Instant{Mono: 1e9, Wall: 1e18} }})
		t.Cleanup(l.Close)
		return client(t, ServerConfig{Service: l, Observe: func(_ time.Duration, failed codes.Code) {
			if observed.Add(1); failed != codes.OK {
				failures.Add(1)
			}
		}})
	}
	noLeaks(t)
	unary, stream := node(), openStream(t, node())

	inline := &weirv1.Limit{Algorithm: weirv1.Algorithm_ALGORITHM_TOKEN_BUCKET, Limit: 5, Capacity: 7, WindowNs: 1e9}
	targets := []*weirv1.StreamTarget{
		{Number: 3, Policy: "log"}, {Number: 1023, Policy: "queue"}, {Number: 0, Policy: "two"},
		{Number: 9, Policy: "shy"},
		{Number: 5, Policy: "free"}, {Number: 6, Policy: "lease"}, {Number: 7, Policy: "missing"},
		{Number: 8, Limit: inline, Namespace: "n"},
		{Number: 10, Limit: &weirv1.Limit{Algorithm: weirv1.Algorithm_ALGORITHM_FIXED_WINDOW, Limit: -1,
			WindowNs: 1e9}},
	}
	random := rand.New(rand.NewPCG(1, 2))
	for round := range 60 {
		in := &weirv1.CheckStreamRequest{Sequence: uint64(round)}
		if round == 0 {
			in.Define = targets
		}
		var req weirv1.CheckRequest
		same := random.IntN(2) == 0 // lists of one element
		n := 1 + random.IntN(8)
		var to *weirv1.StreamTarget
		var cost int64
		for i := range n {
			if i == 0 || !same {
				to, cost = targets[random.IntN(len(targets))], random.Int64N(4)
				in.Targets, in.Costs = append(in.Targets, to.Number), append(in.Costs, cost)
				in.Partial, in.RequestIds = append(in.Partial, random.IntN(4) == 0),
					append(in.RequestIds, []string{"", "id"}[random.IntN(2)])
			}
			key := string(rune('a' + random.IntN(3)))
			in.Keys, in.KeyLengths = append(in.Keys, key...), append(in.KeyLengths, uint32(len(key)))
			last := len(in.Partial) - 1
			req.Checks = append(req.Checks, &weirv1.Check{
				Target: &weirv1.Target{Policy: to.Policy, Limit: to.Limit, Namespace: to.Namespace, Key: key},
				Cost:   &cost, Partial: in.Partial[last], RequestId: in.RequestIds[last],
			})
			req.Checks[i].Cost = proto.Int64(cost)
		}
		want := make([]*weirv1.Result, n)
		for i, ck := range req.Checks { // one by one, so that one that fails leaves the others
			resp, err := unary.Check(t.Context(), &weirv1.CheckRequest{Checks: []*weirv1.Check{ck}})
			if err == nil {
				want[i] = resp.Results[0]
			}
		}
		out := exchange(t, stream, in)
		must.True(t, out.Sequence == in.Sequence && out.Error == nil && !out.More && len(out.Checks) == 0, "%v", out)
		for i, w := range want {
			failed := slices.ContainsFunc(out.Errors, func(e *weirv1.StreamError) bool { return int(e.Check) == i })
			must.True(t, failed == (w == nil), "round %d, check %d of %v: failed is %v, unary says %v", round, i,
				req.Checks[i], failed, w)
			if failed {
				continue
			}
			name := req.Checks[i].Target.Policy
			if name == "" {
				name = "inline"
			}
			got := unpacked(out, i, name, req.Checks[i].RequestId)
			must.True(t, proto.Equal(got, w.GetDecision()),
				"round %d, check %d of %v:\nstream %v\nunary  %v", round, i, req.Checks[i], got, w.GetDecision())
		}
	}
	for range 2 { // when the second is answered the first has been observed
		out := exchange(t, stream, &weirv1.CheckStreamRequest{})
		expect.True(t, out.Error != nil, "no checks are no error")
	}
	expect.True(t, observed.Load() >= 61 && failures.Load() >= 1 && failures.Load() <= 2,
		"%d requests observed, %d of them failed", observed.Load(), failures.Load())
}

// What does not fit together is answered by an error that names the field; nothing is charged, and the stream goes on.
func TestCheckStreamMalformed(t *testing.T) {
	_, c := serveLimiter(t, localLimiter(t))
	stream := openStream(t, c)
	words := strings.NewReplacer("MANY", strings.TrimSuffix(strings.Repeat("1,", 1001), ","), "P129",
		strings.Repeat("p", 129), "N257", strings.Repeat("n", 257),
		"LIMIT", "algorithm:ALGORITHM_SLIDING_LOG limit:1 window_ns:1000000000")
	testkit.Table(t, "testdata/malformed.txt", func(t *testing.T, text, want string) {
		in := new(weirv1.CheckStreamRequest)
		must.NoError(t, prototext.Unmarshal([]byte(words.Replace(text)), in))
		out := exchange(t, stream, in)
		e := out.Error
		expect.Equal(t, fmt.Sprint(codes.Code(e.GetCode()), " ", e.GetField()), want)
		expect.True(t, out.Sequence == in.Sequence && e.GetMessage() != "", "%v", out)
	})
	// A number whose definition failed stands for nothing.
	in := streamed(1, "a")
	in.Define = nil
	out := exchange(t, stream, in)
	expect.True(t, out.Error.GetField() == "targets", "after a definition that failed: %v", out)
	// One check that is not acceptable concerns no other.
	in = streamed(100, "a", "", "b", "k\xff")
	in.Costs = []int64{1, 1, -1, 1}
	out = exchange(t, stream, in)
	var fields []string
	for _, e := range out.Errors {
		fields = append(fields, fmt.Sprint(e.Check, e.Error.Field))
	}
	expect.True(t, out.Error == nil && slices.Equal(fields, []string{"1keys", "2costs", "3keys"}) &&
		unpacked(out, 0, "", "").Remaining == 9, "%v", out)
	// Nothing else was charged.
	in = streamed(101, "a", "b", "c")
	in.Costs = []int64{0}
	out = exchange(t, stream, in)
	if a, b, c := unpacked(out, 0, "", ""), unpacked(out, 1, "", ""), unpacked(out, 2, "", ""); a.Remaining != 9 ||
		b.Remaining != 10 || c.Remaining != 10 {
		t.Errorf("%v", out)
	}
}

func TestCheckStreamNotProtobuf(t *testing.T) {
	conn, _ := serveLimiter(t, localLimiter(t))
	desc := &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}
	stream := must.Value(conn.NewStream(t.Context(), desc, weirv1.Limiter_CheckStream_FullMethodName,
		grpc.ForceCodec(testkit.RawCodec{})))(t)
	must.NoError(t, stream.SendMsg(&[]byte{0xff}))
	wantStatus(t, stream.RecvMsg(new([]byte)), codes.InvalidArgument, "malformed message")
}

// distant is a service that decides keys which begin with "near" at once, and all others when it is told to.
type distant struct {
	scripted.Service
	answer chan struct{} // a token lets one Finish go on
	traces chan []string // of what is begun, if anybody wants to know
	refuse *limit.Error
	mu     sync.Mutex
	begun  int
	ended  atomic.Int64 // Finish
}

func (d *distant) Begin(_ context.Context, b *limiter.Batch) (open []int, err *limit.Error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.begun++
	if d.traces != nil {
		d.traces <- slices.Clone(b.Traces)
	}
	if d.refuse != nil {
		return nil, d.refuse
	}
	b.Results = make([]limit.Result, len(b.Checks))
	for i, ck := range b.Checks {
		if strings.HasPrefix(ck.Key, "near") {
			b.Results[i].Decision = limit.Decision{Allowed: true, Granted: ck.Cost}
		} else {
			open = append(open, i)
		}
	}
	return open, nil
}

func (d *distant) Finish(_ context.Context, b *limiter.Batch, open []int) {
	<-d.answer
	for _, i := range open {
		b.Results[i].Decision = limit.Decision{Allowed: true, Granted: b.Checks[i].Cost}
	}
	d.ended.Add(1)
}

func (d *distant) hasBegun(n int) func() bool {
	return func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		return d.begun == n
	}
}

// hurried is a service that answers nothing before it has to, and notes when that was.
type hurried struct {
	scripted.Service
	mu    sync.Mutex
	until map[string]time.Duration // by key
}

func (h *hurried) Begin(_ context.Context, b *limiter.Batch) (open []int, err *limit.Error) {
	b.Results = make([]limit.Result, len(b.Checks))
	for i := range b.Checks {
		open = append(open, i)
	}
	return open, nil
}

func (h *hurried) Finish(ctx context.Context, b *limiter.Batch, open []int) {
	deadline, _ := ctx.Deadline()
	h.mu.Lock()
	for _, i := range open {
		h.until[b.Checks[i].Key] = time.Until(deadline)
		b.Results[i].Decision = limit.Decision{Granted: int64(len(open))}
	}
	h.mu.Unlock()
	<-ctx.Done()
}

// Of callers who share a request each is waited for as long as it waits, and answered then.
func TestCheckStreamTimeouts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &hurried{until: make(map[string]time.Duration)}
		s := NewServer(ServerConfig{Service: h})
		answers := make(chan *weirv1.CheckStreamResponse, 10)
		stream := &givenStream{ctx: t.Context(), requests: make(chan proto.Message), sent: func(m any) {
			answers <- proto.Clone(m.(proto.Message)).(*weirv1.CheckStreamResponse)
		}}
		var done sync.WaitGroup
		done.Go(func() { expect.NoError(t, stream.checkWith(s)) })
		ms := time.Millisecond
		for _, test := range []struct {
			timeout  uint32
			timeouts []uint32
			want     []time.Duration
			groups   int
		}{
			{0, nil, []time.Duration{maxTimeout, maxTimeout, maxTimeout, maxTimeout}, 1},
			{50, nil, []time.Duration{50 * ms, 50 * ms, 50 * ms, 50 * ms}, 1},
			{50, []uint32{20}, []time.Duration{20 * ms, 20 * ms, 20 * ms, 20 * ms}, 1},
			{5000, []uint32{1000, 20, 0, 1125}, []time.Duration{1000 * ms, 20 * ms, 5000 * ms, 1000 * ms}, 3},
			{0, []uint32{1126, 1 << 31, 0, 1000}, []time.Duration{1126 * ms, maxTimeout, maxTimeout, 1000 * ms}, 3},
		} {
			in := streamed(1, "a", "b", "c", "d")
			in.TimeoutMs, in.TimeoutsMs = test.timeout, test.timeouts
			began := time.Now()
			stream.requests <- in
			out := <-answers
			expect.True(t, out.More && len(out.Checks) == 0, "%v: at first %v", test, out)
			groups := 0
			for more := true; more; groups++ {
				out := <-answers
				more = out.More
				for i, check := range out.Checks {
					took := time.Since(began)
					expect.True(t, took == test.want[check] && wire.At(out.Granted, i, 0) == int64(len(out.Checks)),
						"%v: check %d is answered after %v: %v", test, check, took, out)
				}
			}
			expect.True(t, groups == test.groups, "%v: %d groups", test, groups)
			for i, key := range []string{"a", "b", "c", "d"} {
				expect.Equal(t, h.until[key], test.want[i], "%v: %s is waited for for", test, key)
			}
		}
		close(stream.requests)
		done.Wait()
		s.Close()
	})
}

// Each check belongs to its own caller's trace, of which a part ends here with the check's answer.
func TestCheckStreamTraces(t *testing.T) {
	noLeaks(t)
	type part struct {
		parent string
		code   codes.Code
	}
	id := func(name string) string { return strings.Repeat(name, limiter.TraceContext) }
	var mu sync.Mutex
	var begun int
	var ended []part
	d := &distant{answer: make(chan struct{}), traces: make(chan []string, 1)}
	stream := openStream(t, client(t, ServerConfig{Service: d, Trace: func(parent string) (string, func(codes.Code)) {
		mu.Lock()
		defer mu.Unlock()
		if begun++; parent == "" {
			return "", nil
		}
		return parent + "'", func(code codes.Code) {
			mu.Lock()
			defer mu.Unlock()
			ended = append(ended, part{parent, code})
		}
	}}))
	in := streamed(1, "far 1", "near 1", "far 2", "near 2")
	in.TraceContexts = [][]byte{[]byte(id("a")), []byte(id("b")), []byte("too short to be one"), []byte(id("c"))}
	exchange(t, stream, in)
	got := <-d.traces
	expect.True(t, slices.Equal(got, []string{id("a") + "'", id("b") + "'", "", id("c") + "'"}), "traces %q", got)
	mu.Lock()
	expect.True(t, slices.Equal(ended, []part{{id("b"), codes.OK}, {id("c"), codes.OK}}) && begun == 4,
		"%v has ended before the rest is there, of %d", ended, begun)
	mu.Unlock()
	d.answer <- struct{}{}
	nextOf(t, stream)
	mu.Lock()
	expect.True(t, slices.Equal(ended[2:], []part{{id("a"), codes.OK}}), "%v has ended", ended)
	ended = nil
	mu.Unlock()
	// What is refused, by itself or as a whole, has a code; and not all of a large request is traced.
	d.refuse = &limit.Error{Kind: limit.Denied, Message: "no"}
	in = streamed(2, slices.Repeat([]string{"near"}, 1000)...)
	in.TraceContexts = [][]byte{[]byte(id("d"))}
	exchange(t, stream, in)
	<-d.traces
	mu.Lock()
	defer mu.Unlock()
	expect.True(t, slices.Equal(ended, slices.Repeat([]part{{id("d"), codes.PermissionDenied}}, maxTraced)),
		"%v has ended", ended)
}

// A request's groups stay few whatever its callers say.
func TestCheckStreamGroupsAreBounded(t *testing.T) {
	in := &weirv1.CheckStreamRequest{}
	var open []int
	for i := range limit.MaxBatch {
		in.TimeoutsMs, open = append(in.TimeoutsMs, uint32(1+i*int(maxTimeout/time.Millisecond)/limit.MaxBatch)),
			append(open, i)
	}
	groups := byPatience(in, open)
	n := 0
	for _, g := range groups {
		n += len(g.checks)
		for _, i := range g.checks {
			own := time.Duration(in.TimeoutsMs[i]) * time.Millisecond
			expect.True(t, g.timeout <= own && g.timeout*9/8 >= own, "one who waits for %v has %v", own, g.timeout)
		}
	}
	expect.True(t, len(groups) <= 80 && n == limit.MaxBatch, "%d groups of %d checks", len(groups), n)
}

// What has to be asked of other nodes holds up neither what is in the same request nor what comes after.
func TestCheckStreamHoldsNothingUp(t *testing.T) {
	d := &distant{answer: make(chan struct{})}
	_, c := serveLimiter(t, d)
	stream := openStream(t, c)
	mixed := streamed(1, "far 1", "near", "far 2", "near")
	mixed.Costs = []int64{1, 2, 3, 4}
	out := exchange(t, stream, mixed)
	expect.True(t, out.Sequence == 1 && out.More && slices.Equal(out.Checks, []uint32{1, 3}) &&
		slices.Equal(out.Granted, []int64{2, 4}), "%v", out)
	out = exchange(t, stream, streamed(2, "far"))
	expect.True(t, out.Sequence == 2 && out.More && len(out.Checks) == 0 && len(out.Flags) == 0, "%v", out)
	d.answer <- struct{}{}
	d.answer <- struct{}{}
	for range 2 {
		out := nextOf(t, stream)
		want, granted := []uint32{0}, []int64{1}
		if out.Sequence == 1 {
			want, granted = []uint32{0, 2}, []int64{1, 3}
		}
		expect.True(t, !out.More && slices.Equal(out.Checks, want) && slices.Equal(out.Granted, granted), "%v", out)
	}
	out = exchange(t, stream, streamed(3, "near"))
	expect.True(t, out.Sequence == 3 && !out.More && len(out.Checks) == 0, "%v", out)
}

// Requests that wait for other nodes are bounded; others wait unread.
func TestCheckStreamBound(t *testing.T) {
	d := &distant{answer: make(chan struct{})}
	_, c := serveLimiter(t, d)
	stream := openStream(t, c)
	for i := range maxInFlight + 2 {
		must.NoError(t, stream.Send(streamed(uint64(i), "far")))
	}
	// The one after the last that may wait is begun, and then holds the stream up.
	for range maxInFlight + 1 {
		out := nextOf(t, stream)
		expect.True(t, out.More, "%v", out)
	}
	expect.True(t, d.hasBegun(maxInFlight+1)(), "%d requests begun, want %d", d.begun, maxInFlight+1)
	d.answer <- struct{}{}
	testkit.Eventually(t, "the next request to be begun", d.hasBegun(maxInFlight+2))
	close(d.answer)
	for range maxInFlight + 3 {
		nextOf(t, stream)
	}
}

// What was begun is finished although the caller does not read what it is sent: others may wait for what is asked
// there.
func TestCheckStreamFinishesForACallerWhoDoesNotRead(t *testing.T) {
	d := &distant{answer: make(chan struct{})}
	close(d.answer)
	reads := make(chan struct{})
	_, c := serveLimiter(t, d, through(func(s grpc.ServerStream) grpc.ServerStream { return stuck{s, reads} }, nil))
	t.Cleanup(sync.OnceFunc(func() { close(reads) }))
	stream := openStream(t, c)
	must.NoError(t, stream.Send(streamed(1, "near", "far")))
	testkit.Eventually(t, "the request to be finished", func() bool { return d.ended.Load() == 1 })
	reads <- struct{}{}
	out := nextOf(t, stream)
	expect.True(t, out.More && slices.Equal(out.Checks, []uint32{0}), "%v", out)
	reads <- struct{}{}
	out = nextOf(t, stream)
	expect.True(t, !out.More && slices.Equal(out.Checks, []uint32{1}), "%v", out)
}

// A stream whose caller has sent everything, and does not read, ends like one that goes on.
func TestCheckStreamEndsWhenNobodyReadsTheRest(t *testing.T) {
	noLeaks(t)
	d := &distant{answer: make(chan struct{})}
	served, end := make(chan error, 1), make(chan struct{})
	reads := make(chan struct{})
	half := func(s grpc.ServerStream) grpc.ServerStream { return halfClosed{stuck{s, reads}, end} }
	c := client(t, ServerConfig{Service: d, WriteTimeout: 20 * time.Millisecond}, through(half, served))
	freed := sync.OnceFunc(func() { close(reads) })
	t.Cleanup(freed)
	stream := openStream(t, c)
	must.NoError(t, stream.Send(streamed(1, "far")))
	reads <- struct{}{}
	must.NoError(t, stream.CloseSend())
	<-end
	close(d.answer)
	testkit.Eventually(t, "the stream to end", func() bool { return len(served) > 0 })
	wantStatus(t, <-served, codes.Aborted, "the answers are not read")
	freed()
}

// halfClosed is a stream that says when its caller has sent everything.
type halfClosed struct {
	grpc.ServerStream
	end chan<- struct{}
}

func (s halfClosed) RecvMsg(m any) error {
	err := s.ServerStream.RecvMsg(m)
	if err == io.EOF {
		close(s.end)
	}
	return err
}

// A stream holds on to little while nothing comes, whatever came before: not to the room that a large request took.
func TestCheckStreamKeepsNoLargeRequest(t *testing.T) {
	const many = 100_000
	full := streamed(1, slices.Repeat([]string{"a key of a usual length"}, limit.MaxBatch)...)
	full.Costs, full.RequestIds = make([]int64, limit.MaxBatch), make([]string, limit.MaxBatch)
	for name, test := range map[string]struct {
		in   *weirv1.CheckStreamRequest
		cut  bool // it says that it is long, and ends early
		kept bool
	}{
		"full batch":  {in: full, kept: true},
		"keys":        {in: &weirv1.CheckStreamRequest{Keys: make([]byte, 1<<20), KeyLengths: []uint32{1 << 20}}},
		"definitions": {in: &weirv1.CheckStreamRequest{Define: slices.Repeat([]*weirv1.StreamTarget{{}}, many)}},
		"lengths":     {in: &weirv1.CheckStreamRequest{KeyLengths: make([]uint32, many)}},
		"targets":     {in: &weirv1.CheckStreamRequest{Targets: make([]uint32, many)}},
		"costs":       {in: &weirv1.CheckStreamRequest{Costs: make([]int64, many)}},
		"costs, cut":  {in: &weirv1.CheckStreamRequest{Costs: make([]int64, many)}, cut: true},
		"partial":     {in: &weirv1.CheckStreamRequest{Partial: make([]bool, many)}},
		"request ids": {in: &weirv1.CheckStreamRequest{RequestIds: make([]string, many)}},
	} {
		t.Run(name, func(t *testing.T) {
			data := must.Value(test.in.MarshalVT())(t)
			if test.cut {
				data[len(data)-1] = 0x80
			}
			got := new(weirv1.CheckStreamRequest)
			err := got.UnmarshalVT(data)
			must.Equal(t, (err != nil), test.cut, "%v", err)
			expect.Equal(t, wire.Small(got), test.kept, "kept")
		})
	}
}

// stuck is a stream on which each message waits for its caller to read it.
type stuck struct {
	grpc.ServerStream
	reads <-chan struct{}
}

func (s stuck) SendMsg(m any) error {
	<-s.reads
	return s.ServerStream.SendMsg(m)
}

// When the node stops, what was begun is answered, and the stream ends without an error: nothing else was carried out.
func TestCheckStreamEndsWithNode(t *testing.T) {
	stop, stopped := context.WithCancel(context.Background())
	t.Cleanup(stopped)
	d := &distant{answer: make(chan struct{})}
	_, c := serveLimiter(t, d,
		through(func(s grpc.ServerStream) grpc.ServerStream { return contextStream{s, stop} }, nil))
	stream := openStream(t, c)
	exchange(t, stream, streamed(1, "far"))
	stopped()
	d.answer <- struct{}{}
	out := nextOf(t, stream)
	expect.True(t, out.Sequence == 1 && !out.More, "%v", out)
	out, err := stream.Recv()
	expect.ErrorIs(t, err, io.EOF, "%v", out)
}

// Topology is told at once, and again when it has changed, but for its version.
func TestTopology(t *testing.T) {
	noLeaks(t)
	views := []*weirv1.TopologyResponse{
		{Version: 1, HashKey: []byte("key"), Ring: 1, Members: []*weirv1.TopologyMember{{Name: "a", Grpc: "h:1"}}},
		{Version: 2, HashKey: []byte("key"), Ring: 1, Members: []*weirv1.TopologyMember{{Name: "a", Grpc: "h:1"}}},
		{Version: 3, HashKey: []byte("key"), Ring: 1, Members: []*weirv1.TopologyMember{{Name: "a", Grpc: "h:2"}}},
	}
	var mu sync.Mutex
	at, next := 0, make(chan struct{})
	stream := openStream(t, client(t,
		ServerConfig{Topology: func(context.Context) (*weirv1.TopologyResponse, <-chan struct{}, *limit.Error) {
			mu.Lock()
			defer mu.Unlock()
			if at < 0 {
				return nil, nil, &limit.Error{Kind: limit.Denied, Message: "not for you"}
			}
			return views[at], next, nil
		}}))
	out := exchange(t, stream, &weirv1.CheckStreamRequest{Topology: true})
	must.True(t, proto.Equal(out.Topology, views[0]), "%v", out)
	change := func(to int) {
		mu.Lock()
		defer mu.Unlock()
		old := next
		at, next = to, make(chan struct{})
		close(old)
	}
	change(1)
	change(2)
	out = nextOf(t, stream)
	expect.True(t, proto.Equal(out.Topology, views[2]), "%v", out)
	// A caller that has lost the role is told no more, and its stream goes on.
	change(-1)
	out = nextOf(t, stream)
	expect.True(t, codes.Code(out.Error.GetCode()) == codes.PermissionDenied && out.Error.Field == "topology",
		"%v", out)
	must.NoError(t, stream.CloseSend())
	_, err := stream.Recv()
	expect.Equal(t, err, io.EOF, "the stream ends with")
}

// TestReady: a caller that asks for it is told whether the node is ready, and again when that changes.
func TestReady(t *testing.T) {
	noLeaks(t)
	var mu sync.Mutex
	ready, changed := false, make(chan struct{})
	stream := openStream(t, client(t, ServerConfig{Ready: func() (bool, <-chan struct{}) {
		mu.Lock()
		defer mu.Unlock()
		return ready, changed
	}}))
	out := exchange(t, stream, &weirv1.CheckStreamRequest{Ready: true})
	must.True(t, out.Ready != nil && !out.Ready.Ready, "%v", out)
	mu.Lock()
	ready = true
	close(changed)
	changed = nil
	mu.Unlock()
	out = nextOf(t, stream)
	must.True(t, out.Ready.GetReady(), "%v", out)
	// What has two meanings has none.
	for _, in := range []*weirv1.CheckStreamRequest{
		{Sequence: 3, Ready: true, Borrow: &weirv1.BorrowRequest{Borrower: 1}},
		{Sequence: 3, Topology: true, KeyLengths: []uint32{0}},
		{Sequence: 3, Borrow: &weirv1.BorrowRequest{Borrower: 1}, KeyLengths: []uint32{0}},
	} {
		out := exchange(t, stream, in)
		expect.True(t, out.Sequence == 3 && codes.Code(out.Error.GetCode()) == codes.InvalidArgument, "%v: %v", in, out)
	}
}
