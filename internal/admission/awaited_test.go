package admission

import (
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// endings is when calls were ended, by the number of each.
type endings struct {
	mu    sync.Mutex
	began time.Time
	all   []string
}

type ended struct {
	to *endings
	n  int
}

func (ended) RecvCompress() string { return "" }

func (s ended) WriteStatus(st *status.Status) error {
	s.to.mu.Lock()
	defer s.to.mu.Unlock()
	s.to.all = append(s.to.all, fmt.Sprintf("%d after %v: %v", s.n, time.Since(s.to.began), st.Code()))
	return nil
}

// TestAwaited: calls end at their deadlines, not those whose messages have come, whichever of them did, or that are over.
func TestAwaited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const patience = 10 * time.Second
		e := &endings{began: time.Now()}
		c := NewCalls(CallsConfig{FirstMessage: patience})
		var calls []*call
		add := func() {
			k := &call{calls: c, stream: ended{e, len(calls)}, read: func(any) error { return nil }, room: &c.calls}
			must.NoError(t, k.begin(t.Context()))
			calls = append(calls, k)
		}
		for range 5 { // at 0 s, 1 s …
			add()
			time.Sleep(time.Second)
		}
		for _, came := range []int{0, 2, 2} { // one of them again
			must.NoError(t, calls[came].receive(nil))
		}
		calls[4].done()
		time.Sleep(55 * time.Second)
		add() // at 60 s
		time.Sleep(patience)
		calls[1].done() // was ended
		add()
		calls[6].done()
		time.Sleep(time.Minute)
		synctest.Wait()
		want := []string{"1 after 11s: DeadlineExceeded", "3 after 13s: DeadlineExceeded", "5 after 1m10s: DeadlineExceeded"}
		expect.True(t, slices.Equal(e.all, want), "ended: %v", e.all)
	})
}

// TestStopWhileAwaited: a server that stops ends calls whose messages have not come, and leaves no goroutine.
func TestStopWhileAwaited(t *testing.T) {
	testkit.NoLeaks(t, "internal/admission.", "google.golang.org/grpc")
	calls := NewCalls(CallsConfig{FirstMessage: time.Hour})
	server := grpc.NewServer(append(calls.Options(), grpc.WaitForHandlers(true))...)
	calls.Registrar(server).RegisterService(&broken, nil)
	l := must.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	served := make(chan error, 1)
	go func() { served <- server.Serve(NewListener(l, ListenerConfig{MaxAnonymous: 128})) }()
	conn := must.Value(grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials())))(t)
	defer conn.Close()
	for _, method := range []string{"/broken.Service/Unary", "/broken.Service/Stream"} {
		_, err := conn.NewStream(t.Context(), &broken.Streams[0], method)
		must.NoError(t, err)
	}
	open := func() int64 { return calls.calls.open.Load() + calls.streams.open.Load() }
	testkit.Eventually(t, "two calls that are awaited", func() bool { return open() == 2 })
	server.Stop()
	expect.NoError(t, <-served)
	expect.Equal(t, open(), 0, "calls are left")
}
