package grpc

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// Streams end whose callers read nothing, whatever they are of, and those whose callers read do not.
func TestStreamsThatNobodyReadsEnd(t *testing.T) {
	noLeaks(t)
	var mu sync.Mutex
	version := uint64(0)
	always := make(chan struct{})
	close(always)
	s := NewServer(ServerConfig{
		// A message to a caller who reads is sent within that, however busy the machine is.
		WriteTimeout: 300 * time.Millisecond,
		Topology: func(context.Context) (*weirv1.TopologyResponse, <-chan struct{}, *limit.Error) {
			mu.Lock()
			defer mu.Unlock()
			version++
			return &weirv1.TopologyResponse{Ring: version,
				Members: []*weirv1.TopologyMember{{Name: fmt.Sprintf("%1000d", version)}}}, always, nil
		},
	})
	t.Cleanup(s.Close)
	served := make(chan error, 1)
	watching := health.NewServer()
	addr := serve(t, func(r grpc.ServiceRegistrar) {
		s.Register(r)
		healthv1.RegisterHealthServer(r, watching)
	}, grpc.ChainStreamInterceptor(func(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo,
		handle grpc.StreamHandler) error {
		err := handle(srv, stream)
		if info.FullMethod == weirv1.Limiter_CheckStream_FullMethodName {
			served <- err
		}
		return err
	}, s.EndUnread))
	conn := testkit.Dial(t, addr)
	watch, err := healthv1.NewHealthClient(conn).Watch(t.Context(), &healthv1.HealthCheckRequest{})
	must.NoError(t, err)
	if _, err := watch.Recv(); err != nil {
		t.Fatal(err)
	}
	news := openStream(t, weirv1.NewLimiterClient(conn))
	must.NoError(t, news.Send(&weirv1.CheckStreamRequest{Topology: true}))
	wantStatus(t, <-served, codes.Aborted, "the answers are not read")
	for err == nil {
		_, err = news.Recv() // what was on its way, and the end
	}
	wantStatus(t, err, codes.Aborted, "the answers are not read")
	// A stream on which nothing is sent is no stream that nobody reads.
	watching.SetServingStatus("", healthv1.HealthCheckResponse_NOT_SERVING)
	got, err := watch.Recv()
	expect.True(t, err == nil && got.Status == healthv1.HealthCheckResponse_NOT_SERVING, "%v, %v", got, err)
}

// A stream ends at once whose caller does not read, when it holds more than its share of what may wait; others go on.
func TestCheckStreamsShareWhatIsUnread(t *testing.T) {
	noLeaks(t)
	d := &distant{answer: make(chan struct{})}
	const requests = 3
	s := NewServer(ServerConfig{Service: d, MaxUnread: requests*(responseSize+limit.MaxBatch*answerSize) - 1})
	t.Cleanup(s.Close)
	reads := make(chan struct{}) // of the stream that comes first
	var later atomic.Bool
	served := make(chan error, 1)
	addr := serve(t, s.Register, grpc.StreamInterceptor(func(srv any, stream grpc.ServerStream,
		_ *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
		if later.Swap(true) {
			return handle(srv, stream)
		}
		err := handle(srv, stuck{stream, reads})
		close(reads)
		served <- err
		return err
	}))
	c := weirv1.NewLimiterClient(testkit.Dial(t, addr))
	stream := openStream(t, c)
	in := streamed(1)
	for i := range limit.MaxBatch {
		key := fmt.Sprintf("far %d", i)
		in.Keys, in.KeyLengths = append(in.Keys, key...), append(in.KeyLengths, uint32(len(key)))
	}
	for range requests {
		must.NoError(t, stream.Send(in))
		reads <- struct{}{}
		out := nextOf(t, stream)
		must.True(t, out.More, "%v", out)
	}
	other := openStream(t, c)
	close(d.answer)
	wantStatus(t, <-served, codes.Aborted, "the answers are not read")
	out := exchange(t, other, streamed(1, "near"))
	expect.True(t, out.Error == nil && len(out.Flags) == 1, "%v", out)
	testkit.Eventually(t, "nothing to be counted any more", func() bool {
		s.unread.mu.Lock()
		defer s.unread.mu.Unlock()
		return s.unread.all == 0
	})
}

// Of all streams the one of which the most waits is ended, whoever comes last.
func TestShareOfWhatIsUnread(t *testing.T) {
	s := NewServer(ServerConfig{})
	u := &s.unread
	a, b := &checkStream{handling: s.handling("")}, &checkStream{handling: s.handling("")}
	const most = 1000
	ends := func(c *checkStream) int { return len(c.ends) }
	u.add(a, 900, most)
	u.add(b, 100, most)
	must.True(t, ends(a)+ends(b) == 0, "a stream was ended within the bound")
	u.add(b, 1, most)
	u.add(b, 1, most)
	expect.True(t, ends(a) == 1 && ends(b) == 0, "the fullest stream is not ended, or another one is")
	u.add(a, -900, most)
	u.add(b, -102, most)
	expect.True(t, u.all == 0 && len(u.of) == 0, "%d bytes are left", u.all)
	if u.add(b, 2, 1); ends(b) == 0 {
		t.Error("a stream by itself is not ended for what is more than all may have")
	}
}

// contextStream is a stream with another context.
type contextStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s contextStream) Context() context.Context { return s.ctx }
