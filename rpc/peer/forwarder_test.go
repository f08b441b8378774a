package peer

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/fifo"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	"github.com/weirlimit/weir/rpc/transport"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// TestForwardMany: more operations than a message holds are carried out as well.
func TestForwardMany(t *testing.T) {
	noLeaks(t)
	_, addr := servePeer(t, bob, localLimiter(t))
	p := newPeers(t, addr)
	ctx := testkit.Within(t, testkit.Patience)
	var many []*limiter.Op
	for i := range 2*maxBatch + 1 {
		many = append(many, check(fmt.Sprint(i), int64(i%10)))
	}
	p.Forward(ctx, bob, many)
	for i, op := range many {
		must.True(t, !op.Outcome.Unreachable && op.Decision.Granted == int64(i%10), "%d: %+v", i, op.Outcome)
	}
	client := must.Value(p.Client(bob))(t)
	got, err := client.Inspect(ctx, &peerv1.InspectRequest{})
	expect.True(t, err == nil && got.Version == bob.Name, "%v, %v", got, err)
	_, err = p.Client(ownership.Node{Name: "nobody", Boot: 1})
	expect.True(t, err != nil, "a client of nobody")
}

// TestNaturalBatching: what gathers while the connection is busy goes out together.
func TestNaturalBatching(t *testing.T) {
	noLeaks(t)
	const callers = 3000
	start := make(chan struct{})
	var messages, items atomic.Int64
	addr := serveBatches(t, func(s peerv1.Peer_ForwardServer, names *numberedTargets, b *peerv1.Batch) error {
		<-start
		messages.Add(1)
		ops := asked(t, names, b)
		items.Add(int64(len(ops)))
		admit(ops)
		return s.Send(replyOf(b.Sequence, ops...))
	})
	p := newPeers(t, addr)
	ctx := testkit.Within(t, testkit.Patience)
	var done sync.WaitGroup
	for i := range callers {
		done.Go(func() {
			op := check(strings.Repeat("k", 1000), int64(i))
			p.Forward(ctx, bob, []*limiter.Op{op})
			wantAnswer(t, op)
		})
	}
	testkit.Eventually(t, "all have asked", func() bool { return waiting(p) == callers })
	close(start)
	done.Wait()
	// Some 64 KiB fit into the connection before bob reads.
	n := messages.Load()
	expect.True(t, n <= callers/10 && items.Load() == callers, "%d items in %d messages", items.Load(), n)
}

// TestAnswerLostOnTheWay: the connection breaks when bob has carried a batch out and his reply is not there yet. The
// batch is not carried out again, and has no answer.
func TestAnswerLostOnTheWay(t *testing.T) {
	noLeaks(t)
	var carried atomic.Int64
	_, addr := servePeer(t, bob, receiver(func(ops []*limiter.Op) func(context.Context) {
		carried.Add(1)
		return admit(ops)
	}))
	via := testkit.NewProxy(t, addr)
	p := newPeers(t, via.Addr)
	ctx := testkit.Within(t, testkit.Patience)
	wantAnswer(t, forward(p, ctx, 3))
	via.SetDeaf(true)
	done := make(chan *limiter.Op)
	go func() { done <- forward(p, ctx, 7) }()
	testkit.Eventually(t, "the batch is carried out", func() bool { return carried.Load() == 2 })
	via.SetDeaf(false)
	via.Cut()
	testkit.Soon(t, func() { wantUnreachable(t, <-done) })
	wantAnswer(t, forward(p, ctx, 4))
	expect.Equal(t, carried.Load(), 3, "batches carried out")
}

func TestRefusedStreams(t *testing.T) {
	for what, listen := range map[string]func(*testing.T) (addr string){
		"another protocol there": func(t *testing.T) string {
			return serveBob(t, func(s peerv1.Peer_ForwardServer) error {
				_ = s.Send(welcome(transport.Protocol + 1))
				<-s.Context().Done()
				return nil
			})
		},
		"no peer protocol at all": func(t *testing.T) string { return serve(t, func(grpc.ServiceRegistrar) {}) },
		"nobody listens": func(t *testing.T) string {
			lis := must.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
			_ = lis.Close()
			return lis.Addr().String()
		},
	} {
		t.Run(what, func(t *testing.T) {
			noLeaks(t)
			p := newPeers(t, listen(t))
			testkit.Soon(t, func() {
				for range 5 {
					wantUnreachable(t, forward(p, testkit.Within(t, testkit.Patience), 1))
				}
			})
		})
	}
	t.Run("nobody knows", func(t *testing.T) {
		noLeaks(t)
		p := newPeers(t, "")
		op := check("k", 1)
		p.Forward(testkit.Within(t, testkit.Patience), ownership.Node{Name: "carol"}, []*limiter.Op{op})
		wantUnreachable(t, op)
	})
	t.Run("a stream that nobody waits for", func(t *testing.T) {
		noLeaks(t)
		_, addr := servePeer(t, bob, receiver(admit))
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		wantUnreachable(t, forward(newPeers(t, addr), ctx, 1))
	})
	t.Run("oneself", func(t *testing.T) {
		noLeaks(t)
		op := check("k", 1)
		newPeers(t, "").Forward(testkit.Within(t, testkit.Patience), alice, []*limiter.Op{op})
		h := op.Outcome.NotHolder
		expect.True(t, h != nil && h.Node.Name == "", "%+v", op.Outcome)
	})
}

// waiting is how many operations wait for bob.
func waiting(p *Forwarder) int {
	l, _, err := p.links.To(bob)
	if err != nil {
		return 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.waiting
}

// wantAbandoned: nothing is kept of what nobody waits for, but its place in the queue until the peer reads, or its
// stream has ended.
func wantAbandoned(t *testing.T, l *queue) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	left := 0
	for _, c := range l.calls.Items() {
		expect.True(t, c.ended && c.ops == nil, "%+v", c)
		left += c.n
	}
	expect.True(t, l.waiting == left && len(l.sent) == 0, "%d waiting, %d of them queued, %d sent", l.waiting, left,
		len(l.sent))
}

// TestHungPeer: one that takes connections and says nothing, and one that welcomes and then says nothing.
func TestHungPeer(t *testing.T) {
	hung := map[string]func(*testing.T) (addr string, reached func() bool){
		"says nothing": func(t *testing.T) (string, func() bool) {
			lis := must.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
			var n atomic.Int64
			var work sync.WaitGroup
			work.Go(func() {
				var conns []net.Conn
				for {
					c, err := lis.Accept()
					if err != nil {
						break
					}
					n.Add(1)
					conns = append(conns, c)
				}
				for _, c := range conns {
					_ = c.Close()
				}
			})
			t.Cleanup(func() {
				_ = lis.Close()
				work.Wait()
			})
			return lis.Addr().String(), func() bool { return n.Load() > 0 }
		},
		"welcomes": func(t *testing.T) (string, func() bool) {
			var n atomic.Int64
			return serveBatches(t, func(peerv1.Peer_ForwardServer, *numberedTargets, *peerv1.Batch) error {
				n.Add(1)
				return nil
			}), func() bool { return n.Load() > 0 }
		},
	}
	for what, start := range hung {
		t.Run(what+", deadline", func(t *testing.T) {
			noLeaks(t)
			addr, _ := start(t)
			p := newPeers(t, addr)
			begin := time.Now()
			for range 3 {
				ctx, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
				wantUnreachable(t, forward(p, ctx, 1))
				cancel()
			}
			took := time.Since(begin)
			expect.True(t, took >= 90*time.Millisecond && took <= testkit.Patience/2, "took %v", took)
			l, _, _ := p.links.To(bob)
			wantAbandoned(t, l)
		})
		for _, end := range []string{"Retain", "Close"} {
			t.Run(what+", "+end, func(t *testing.T) {
				noLeaks(t)
				addr, reached := start(t)
				p := newPeers(t, addr)
				done := make(chan *limiter.Op)
				ctx := testkit.Within(t, testkit.Patience)
				for range 5 {
					go func() { done <- forward(p, ctx, 1) }()
				}
				testkit.Eventually(t, "bob is asked by all", func() bool { return reached() && waiting(p) == 5 })
				testkit.Soon(t, func() {
					if end == "Close" {
						p.Close()
					} else {
						p.Retain(func(n ownership.Node) bool { return n != bob })
					}
					for range 5 {
						wantUnreachable(t, <-done)
					}
				})
				p.Close()
				p.Close()
				wantUnreachable(t, forward(p, ctx, 1))
			})
		}
	}
}

// TestStuckPeer: bob does not even read. What waits for him is bounded, and nothing of it is kept once its callers gave
// up.
func TestStuckPeer(t *testing.T) {
	noLeaks(t)
	addr := serveBob(t, func(s peerv1.Peer_ForwardServer) error {
		_ = s.Send(welcome(transport.Protocol))
		<-s.Context().Done()
		return nil
	})
	p := newPeers(t, addr)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ask := func(n int) []*limiter.Op {
		ops := make([]*limiter.Op, n)
		for i := range ops {
			ops[i] = check("k", 1)
		}
		p.Forward(ctx, bob, ops)
		return ops
	}
	var callers sync.WaitGroup
	for range maxWaiting / maxBatch {
		callers.Go(func() { wantUnreachable(t, ask(maxBatch)[0]) })
	}
	l, _, err := p.links.To(bob)
	must.NoError(t, err)
	testkit.Eventually(t, "the bound is reached", func() bool { return waiting(p) == maxWaiting })
	testkit.Soon(t, func() { wantUnreachable(t, ask(1)[0]) })
	cancel()
	callers.Wait()
	wantAbandoned(t, l)
}

func TestGarbageReplies(t *testing.T) {
	right := func(b *peerv1.Batch) *peerv1.ForwardReply { return replyOf(b.Sequence, admitted(check("k", 5))) }
	type replies = []func(*peerv1.Batch) *peerv1.ForwardReply
	for what, test := range map[string]struct {
		replies  replies
		answered bool
	}{
		"too few items": {replies{func(b *peerv1.Batch) *peerv1.ForwardReply { return replyOf(b.Sequence) }}, false},
		"lists of odd items": {replies{func(b *peerv1.Batch) *peerv1.ForwardReply {
			r := right(b)
			r.GetReply().Checks.Limit = []int64{1, 2}
			return r
		}}, false},
		"too many items": {replies{func(b *peerv1.Batch) *peerv1.ForwardReply { return replyOf(b.Sequence, check("k", 1), check("k", 1)) }}, false},
		"another kind": {replies{func(b *peerv1.Batch) *peerv1.ForwardReply {
			r := right(b)
			r.GetReply().Others = []*peerv1.ItemReply{{Operation: peerv1.Operation_OPERATION_RESET}}
			return r
		}}, false},
		"unknown numbers": {replies{func(*peerv1.Batch) *peerv1.ForwardReply { return replyOf(0, check("k", 1)) },
			func(*peerv1.Batch) *peerv1.ForwardReply { return replyOf(1<<63, check("k", 1)) }, right}, true},
		"twice": {replies{right, right, right}, true},
		"another welcome": {replies{func(*peerv1.Batch) *peerv1.ForwardReply { return welcome(transport.Protocol) },
			func(*peerv1.Batch) *peerv1.ForwardReply { return &peerv1.ForwardReply{} }, right}, true},
	} {
		t.Run(what, func(t *testing.T) {
			noLeaks(t)
			addr := serveBatches(t, func(s peerv1.Peer_ForwardServer, names *numberedTargets, b *peerv1.Batch) error {
				if ops := asked(t, names, b); ops[0].Cost != 5 {
					admit(ops)
					return s.Send(replyOf(b.Sequence, ops...))
				}
				for _, r := range test.replies {
					_ = s.Send(r(b))
				}
				return nil
			})
			var observed, items, lost atomic.Int64
			p := newPeers(t, addr, func(c *ForwarderConfig) {
				c.Observe = func(took time.Duration, n int, answered bool) {
					items.Add(int64(n))
					if observed.Add(1); !answered {
						lost.Add(1)
					}
				}
			})
			ctx := testkit.Within(t, testkit.Patience)
			testkit.Soon(t, func() {
				wantAnswer(t, forward(p, ctx, 1))
				if op := forward(p, ctx, 5); test.answered {
					wantAnswer(t, op)
				} else {
					wantUnreachable(t, op)
				}
				wantAnswer(t, forward(p, ctx, 2))
			})
			l, _, _ := p.links.To(bob)
			l.mu.Lock()
			defer l.mu.Unlock()
			expect.True(t, l.waiting == 0 && len(l.sent) == 0 && l.sequence == 3 && observed.Load() == 3 &&
				items.Load() == 3, "%d waiting, %d sent of %d, %d observed with %d items", l.waiting,
				len(l.sent), l.sequence, observed.Load(), items.Load())
			count := strings.HasSuffix(what, "items")
			expect.Equal(t, (lost.Load() == 1), count, "%d observed as not answered", lost.Load())
		})
	}
}

// admitted is an operation that was admitted.
func admitted(op *limiter.Op) *limiter.Op {
	admit([]*limiter.Op{op})
	return op
}

// callOf is a call of some checks.
func callOf(wait time.Duration, ops int) *call {
	var list []*limiter.Op
	for range ops {
		list = append(list, check("k", 1))
	}
	f := &call{done: make(chan struct{}, 1)}
	f.begin(list, time.Now().Add(wait))
	return f
}

// TestRepeat: calls without an answer are sent again, the oldest first, if the peer has ended the stream in order,
// unless they are abandoned. If the stream broke, they end.
func TestRepeat(t *testing.T) {
	l := newQueue(&ForwarderConfig{Config: transport.Config{Logger: slog.New(slog.DiscardHandler)}}, bob,
		fifo.NewSignal())
	ask := func() (*call, *message) {
		f := callOf(time.Hour, 1)
		must.True(t, l.add(f), "not taken")
		return f, l.take()
	}
	fresh, _ := ask()
	gone, _ := ask()
	later, _ := ask()
	waits := callOf(time.Hour, 1)
	must.True(t, l.add(waits), "not taken")
	expect.True(t, l.abandon(gone) && !l.abandon(gone), "abandoned how often?")
	l.Broken(io.EOF)
	l.abandon(later)
	m := l.take()
	expect.True(t, slices.Equal(m.calls, []*call{fresh, waits}) && len(l.sent) == 1 && l.waiting == 2,
		"again %v, %d waiting", m.calls, l.waiting)
	l.Broken(io.ErrUnexpectedEOF)
	<-fresh.done
	<-waits.done
	expect.True(t, l.waiting == 0 && !fresh.answered && l.take() == nil, "%d waiting", l.waiting)
}

// TestEndlessStreams: a peer that ends each stream in order is asked a few times only.
func TestEndlessStreams(t *testing.T) {
	noLeaks(t)
	var asked atomic.Int64
	addr := serveBatches(t, func(peerv1.Peer_ForwardServer, *numberedTargets, *peerv1.Batch) error {
		asked.Add(1)
		return errOver
	})
	wantUnreachable(t, forward(newPeers(t, addr), testkit.Within(t, testkit.Patience), 1))
	expect.Equal(t, asked.Load(), maxRepeats+1, "messages")
}

// TestTimeLeft: a message says how long its items' callers still wait when it is sent, and what nobody waits for is not
// sent.
func TestTimeLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newQueue(&ForwarderConfig{Config: transport.Config{Logger: slog.New(slog.DiscardHandler)}}, bob,
			fifo.NewSignal())
		queue := func(wait time.Duration, items int) *call {
			f := callOf(wait, items)
			must.True(t, l.add(f), "not taken")
			return f
		}
		short, long := queue(time.Second, 3), queue(3*time.Second, 2)
		time.Sleep(time.Second) // in the bubble
		m := l.take()
		ops := asked(t, new(numberedTargets), &m.batch)
		expect.True(t, len(ops) == 2 && ops[1].Left == 2*time.Second && l.waiting == 2, "%+v, %d waiting", m, l.waiting)
		<-short.done
		expect.True(t, !l.abandon(short), "abandoned when it had landed") // as its caller does a moment later
		l.answered(replyOf(1, check("k", 1), check("k", 1)).GetReply())
		<-long.done
		expect.True(t, !short.answered && long.answered && l.waiting == 0, "%+v, %+v, %d waiting", short, long,
			l.waiting)
		queue(time.Second, 1)
		time.Sleep(2 * time.Second)
		m = l.take()
		expect.True(t, m == nil && l.waiting == 0, "a message of nothing: %+v, %d waiting", m, l.waiting)
	})
}

// TestAbandonedAmongOthers: a caller who has given up is not touched by the answer to a message that others wait for.
func TestAbandonedAmongOthers(t *testing.T) {
	l := newQueue(&ForwarderConfig{Config: transport.Config{Logger: slog.New(slog.DiscardHandler)}}, bob,
		fifo.NewSignal())
	gone, stays := callOf(time.Hour, 2), callOf(time.Hour, 1)
	its := gone.ops
	must.True(t, l.add(gone) && l.add(stays), "not taken")
	m := l.take()
	must.True(t, m.items == 3 && l.abandon(gone), "%+v", m)
	r := replyOf(1, admitted(check("k", 7)), admitted(check("k", 8)), admitted(check("k", 9))).GetReply()
	l.answered(r)
	<-stays.done
	expect.True(t, stays.answered && stays.ops[0].Decision.Allowed && !its[0].Decision.Allowed &&
		!its[1].Decision.Allowed, "%+v, %+v", stays.ops[0].Outcome, its[0].Outcome)
	expect.True(t, l.waiting == 0 && len(gone.done) == 0, "%d waiting, landed %d times after all", l.waiting,
		len(gone.done))
}

// BenchmarkForward is what a hop costs, with as many callers as there are in a busy node.
func BenchmarkForward(b *testing.B) {
	set, err := policy.Parse("t", []byte(`policies: [{name: p, algorithm: token_bucket, limit: 100, window: 1s}]`))
	must.NoError(b, err)
	l := limiter.New(limiter.Config{Policies: set})
	b.Cleanup(l.Close)
	for _, callers := range []int{2, 16, 256} {
		b.Run(fmt.Sprint(callers), func(b *testing.B) {
			var messages atomic.Int64
			_, addr := servePeer(b, bob, receiver(func(ops []*limiter.Op) func(context.Context) {
				messages.Add(1)
				return l.Receive(ops)
			}))
			p := newPeers(b, addr)
			b.ReportAllocs()
			b.SetParallelism(max(1, callers/runtime.GOMAXPROCS(0)))
			b.RunParallel(func(pb *testing.PB) {
				ctx := testkit.Within(b, time.Hour)
				for pb.Next() {
					op := check("some-user-4711", 1)
					p.Forward(ctx, bob, []*limiter.Op{op})
					expect.True(b, !op.Outcome.Unreachable, "unreachable")
				}
			})
			b.ReportMetric(float64(b.N)/float64(max(1, messages.Load())), "items/message")
		})
	}
}
