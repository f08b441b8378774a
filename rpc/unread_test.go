package rpc

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/weirlimit/weir/limiter"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// Streams end whose callers read nothing, whatever they are of, and those whose callers read do not.
func TestStreamsThatNobodyReadsEnd(t *testing.T) {
	noLeaks(t)
	var mu sync.Mutex
	version := uint64(0)
	always := make(chan struct{})
	close(always)
	s := NewServer(ServerConfig{
		WriteTimeout: 20 * time.Millisecond,
		Topology: func() (*weirv1.TopologyResponse, <-chan struct{}) {
			mu.Lock()
			defer mu.Unlock()
			version++
			return &weirv1.TopologyResponse{Ring: version, Members: []*weirv1.TopologyMember{{Name: fmt.Sprintf("%1000d", version)}}}, always
		},
	})
	t.Cleanup(s.Close)
	served := make(chan error, 1)
	watching := health.NewServer()
	addr := serve(t, func(r grpc.ServiceRegistrar) {
		s.Register(r)
		healthv1.RegisterHealthServer(r, watching)
	}, grpc.ChainStreamInterceptor(func(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
		err := handle(srv, stream)
		if info.FullMethod == weirv1.Limiter_Topology_FullMethodName {
			served <- err
		}
		return err
	}, s.EndUnread))
	conn := dial(t, addr)
	watch, err := healthv1.NewHealthClient(conn).Watch(t.Context(), &healthv1.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := watch.Recv(); err != nil {
		t.Fatal(err)
	}
	news, err := weirv1.NewLimiterClient(conn).Topology(t.Context(), &weirv1.TopologyRequest{})
	if err != nil {
		t.Fatal(err)
	}
	wantStatus(t, <-served, codes.Aborted, "the answers are not read")
	for err == nil {
		_, err = news.Recv() // what was on its way, and the end
	}
	wantStatus(t, err, codes.Aborted, "the answers are not read")
	// A stream on which nothing is sent is no stream that nobody reads.
	watching.SetServingStatus("", healthv1.HealthCheckResponse_NOT_SERVING)
	if got, err := watch.Recv(); err != nil || got.Status != healthv1.HealthCheckResponse_NOT_SERVING {
		t.Errorf("%v, %v", got, err)
	}
}

// A stream ends at once whose caller does not read, when it holds more than its share of what may wait; others go on.
func TestCheckStreamsShareWhatIsUnread(t *testing.T) {
	noLeaks(t)
	d := &distant{answer: make(chan struct{})}
	const requests = 3
	s := NewServer(ServerConfig{Service: d, MaxUnread: requests*limiter.MaxBatch*answerSize - 1})
	t.Cleanup(s.Close)
	reads := make(chan struct{}) // of the stream that comes first
	var later atomic.Bool
	served := make(chan error, 1)
	addr := serve(t, s.Register, grpc.StreamInterceptor(func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
		if later.Swap(true) {
			return handle(srv, stream)
		}
		err := handle(srv, stuck{stream, reads})
		close(reads)
		served <- err
		return err
	}))
	c := weirv1.NewLimiterClient(dial(t, addr))
	stream := openStream(t, c)
	in := streamed(1)
	for i := range limiter.MaxBatch {
		key := fmt.Sprintf("far %d", i)
		in.Keys, in.KeyLengths = append(in.Keys, key...), append(in.KeyLengths, uint32(len(key)))
	}
	for range requests {
		if err := stream.Send(in); err != nil {
			t.Fatal(err)
		}
		reads <- struct{}{}
		if out := nextOf(t, stream); !out.More {
			t.Fatalf("%v", out)
		}
	}
	other := openStream(t, c)
	close(d.answer)
	wantStatus(t, <-served, codes.Aborted, "the answers are not read")
	if out := exchange(t, other, streamed(1, "near")); out.Error != nil || len(out.Flags) != 1 {
		t.Errorf("%v", out)
	}
	eventually(t, "nothing to be counted any more", func() bool { return s.unread.Load() == 0 })
}

// Whoever holds no more than its share is not ended for others.
func TestShareOfWhatIsUnread(t *testing.T) {
	s := &Server{cfg: ServerConfig{MaxUnread: 1000 * answerSize}}
	s.streams.Store(2)
	a, b := &checkStream{server: s, stall: newStall(0)}, &checkStream{server: s, stall: newStall(0)}
	for i, step := range []struct {
		of     *checkStream
		checks int
		ends   bool
	}{{a, 900, false}, {b, 500, false}, {a, 1, true}, {b, 1, true}} {
		bytes := step.of.hold(step.checks)
		select {
		case <-step.of.stall.over:
			if !step.ends {
				t.Errorf("step %d ends it", i)
			}
		default:
			if step.ends {
				t.Errorf("step %d does not end it", i)
			}
		}
		defer step.of.letGo(bytes)
	}
}
