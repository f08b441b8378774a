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

// call is a call whose number is n.
func (e *endings) call(n int) *call { return &call{stream: ended{e, n}} }

type ended struct {
	to *endings
	n  int
}

func (ended) RecvCompress() string { return "" }

func (s ended) WriteStatus(st *status.Status) error {
	s.to.mu.Lock()
	defer s.to.mu.Unlock()
	after := time.Duration(0)
	if !s.to.began.IsZero() {
		after = time.Since(s.to.began)
	}
	s.to.all = append(s.to.all, fmt.Sprintf("%d after %v: %v", s.n, after, st.Code()))
	return nil
}

// count returns how many calls are awaited.
func (a *awaited) count() (n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for k := a.calls.next; k != nil && k != &a.calls; k = k.next {
		n++
	}
	return n
}

// TestAwaited: calls end at their deadlines, not those whose messages have come, whichever of them did; also after there was none.
func TestAwaited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const patience = 10 * time.Second
		e := &endings{began: time.Now()}
		var a awaited
		var calls []*call
		sleep := func(d time.Duration) {
			time.Sleep(d)
			synctest.Wait()
		}
		add := func() {
			calls = append(calls, e.call(len(calls)))
			a.add(calls[len(calls)-1], time.Now(), patience)
		}
		for range 5 { // at 0 s, 1 s …
			add()
			sleep(time.Second)
		}
		for _, came := range []int{0, 2, 4, 2} { // the first, one in the middle, the last; one of them again
			a.remove(calls[came])
		}
		sleep(55 * time.Second)
		expect.True(t, !a.running, "the timer runs, and no call is awaited")
		add() // at 60 s
		add()
		sleep(patience)
		a.remove(calls[1]) // was ended
		add()              // at 70 s
		a.remove(calls[7])
		sleep(time.Minute)
		want := []string{"1 after 11s: DeadlineExceeded", "3 after 13s: DeadlineExceeded", "5 after 1m10s: DeadlineExceeded", "6 after 1m10s: DeadlineExceeded"}
		expect.True(t, slices.Equal(e.all, want), "ended: %v", e.all)
		expect.True(t, !a.running && a.count() == 0, "calls are left")
	})
}

// TestAwaitedAtOnce: calls come and go while others end; each ends once at most.
func TestAwaitedAtOnce(t *testing.T) {
	e := new(endings)
	var a awaited
	first := e.call(-1)
	a.add(first, time.Time{}, time.Hour)
	a.remove(first)
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			for n := range 500 {
				k := e.call(i*500 + n)
				a.add(k, time.Time{}, time.Hour)
				if n%2 == 0 {
					a.remove(k)
				}
			}
		})
	}
	over := make(chan struct{})
	go func() { defer close(over); all.Wait() }()
	for done := false; !done; a.expire(time.Time{}.Add(time.Hour)) {
		select {
		case <-over:
			done = true
		default:
		}
	}
	slices.Sort(e.all)
	if n := len(e.all); n < 8*250 || n != len(slices.Compact(e.all)) || a.count() != 0 {
		t.Errorf("%d of 2000 were ended, %d are left", n, a.count())
	}
}

// TestStopWhileAwaited: a server that stops ends calls whose messages have not come, and leaves no goroutine.
func TestStopWhileAwaited(t *testing.T) {
	testkit.NoLeaks(t, "internal/admission.", "google.golang.org/grpc")
	calls := NewCalls(CallsConfig{FirstMessage: time.Hour})
	server := grpc.NewServer(append(calls.Options(), grpc.WaitForHandlers(true))...)
	calls.Registrar(server).RegisterService(&broken, nil)
	l := must.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	served := make(chan error, 1)
	go func() { served <- server.Serve(NewListener(l, ListenerConfig{})) }()
	conn := must.Value(grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials())))(t)
	defer conn.Close()
	for _, method := range []string{"/broken.Service/Unary", "/broken.Service/Stream"} {
		_, err := conn.NewStream(t.Context(), &broken.Streams[0], method)
		must.NoError(t, err)
	}
	testkit.Eventually(t, "two calls that are awaited", func() bool { return calls.awaited.count() == 2 })
	server.Stop()
	expect.NoError(t, <-served)
	expect.Equal(t, calls.awaited.count()+int(calls.calls.open.Load()+calls.streams.open.Load()), 0, "calls are left")
}
