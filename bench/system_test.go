package main

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/weirlimit/weir/gateway/envoy/kuadrantpb"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

func TestStatCPU(t *testing.T) {
	// The name may hold anything, parentheses and spaces included.
	const stat = "4242 (a) b (c) S 1 4242 4242 0 -1 4194560 1 2 3 4 150 25 9 9 20 0 9 0 1 2 3"
	if got, err := statCPU([]byte(stat)); err != nil || got != 1750*time.Millisecond {
		t.Errorf("%v, %v", got, err)
	}
	for _, bad := range []string{"", "1 (x) S 1", "no parenthesis", "1 (x) S 1 1 1 0 -1 1 1 2 3 4 x y"} {
		if got, err := statCPU([]byte(bad)); err == nil {
			t.Errorf("%q is %v", bad, got)
		}
	}
	own, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		t.Skip(err)
	}
	if got, err := statCPU(own); err != nil || got > time.Hour {
		t.Errorf("this process has used %v, %v", got, err)
	}
}

func TestStatusBytes(t *testing.T) {
	const status = "Name:\tx\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\nThreads:\t1\n"
	if got, err := statusBytes([]byte(status), "VmRSS"); err != nil || got != 1<<20 {
		t.Errorf("%v, %v", got, err)
	}
	for _, name := range []string{"VmSwap", "Name"} {
		if got, err := statusBytes([]byte(status), name); err == nil {
			t.Errorf("%s is %v", name, got)
		}
	}
}

func TestCPUModel(t *testing.T) {
	if got := cpuModel([]byte("processor\t: 0\nmodel name\t: Abacus: II\nmodel name\t: other\n")); got != "Abacus: II" {
		t.Errorf("%q", got)
	}
	if got := cpuModel(nil); got == "" {
		t.Error("no model at all")
	}
}

func TestReadyLine(t *testing.T) {
	got := parseReady("name=weir-0 http=127.0.0.1:1 grpc=127.0.0.1:2 gossip=127.0.0.1:3 peer=127.0.0.1:4 resp=127.0.0.1:5")
	if want := (weirNode{"weir-0", "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", "127.0.0.1:5"}); got != want {
		t.Errorf("%+v", got)
	}
}

func TestSumOf(t *testing.T) {
	const text = "# HELP hops x\nhops_count{a=\"1 2\"} 3\nhops_count{a=\"2\"} 4.5\nhops_count_other 9\nhops_count 1\n"
	if got := sumOf(text, "hops_count"); got != 8.5 {
		t.Errorf("%v", got)
	}
}

func TestTail(t *testing.T) {
	w := &tail{most: 4}
	for _, s := range []string{"ab", "cdef", "g"} {
		if n, err := io.WriteString(w, s); err != nil || n != len(s) {
			t.Fatal(n, err)
		}
	}
	if w.String() != "defg" {
		t.Errorf("%q", w)
	}
}

func TestFlags(t *testing.T) {
	for _, c := range []struct {
		args   string
		rounds int
		fault  string
	}{
		{"", 5, ""}, {"-short", 1, ""}, {"-short -rounds 7", 7, ""}, {"-rounds 3", 3, ""},
		{"-rounds 0", 0, "-rounds"}, {"-only (", 0, "-only"}, {"extra", 0, "extra"},
	} {
		s, err := parse(strings.Fields(c.args), io.Discard)
		switch {
		case c.fault == "" && (err != nil || s.rounds != c.rounds):
			t.Errorf("%q: %d rounds, %v", c.args, s.rounds, err)
		case c.fault != "" && (err == nil || !strings.Contains(err.Error(), c.fault)):
			t.Errorf("%q: %v", c.args, err)
		}
	}
}

// TestChildren runs a child that does not want to end, and one that ends at once.
func TestChildren(t *testing.T) {
	var c children
	stubborn, err := c.start("stubborn", "/bin/sh", []string{"-c", "trap '' TERM; echo up 1; while :; do sleep 0.05; done"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if rest, err := stubborn.line(ctx, "up "); err != nil || rest != "1" {
		t.Errorf("%q, %v", rest, err)
	}
	if u, err := stubborn.usage(); err != nil || u.rss <= 0 || u.peak < u.rss {
		t.Errorf("%+v, %v", u, err)
	}
	brief, err := c.start("brief", "/bin/sh", []string{"-c", "echo why >&2; exit 3"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := brief.line(ctx, "up "); err == nil || !strings.Contains(err.Error(), "exit status 3") || !strings.Contains(err.Error(), "why") {
		t.Errorf("a child that ended: %v", err)
	}
	c.stopAll()
	if stubborn.alive() == nil || len(c.running) != 0 {
		t.Error("a child is left")
	}
	if _, err := stubborn.usage(); err == nil {
		t.Error("the account of a process that is gone")
	}
}

func TestProof(t *testing.T) {
	for _, batch := range []int{1, 25} {
		var asked atomic.Int64
		p := proof{batch: batch, ask: func(_ context.Context, _ int, key string) (int, error) {
			n := asked.Add(int64(batch))
			return int(max(0, min(int64(batch), limitAllowed-n+int64(batch)))), nil
		}}
		if n, err := p.run(context.Background()); err != nil || n != limitAllowed || asked.Load() != limitAttempts {
			t.Errorf("batches of %d: %d admitted of %d, %v", batch, n, asked.Load(), err)
		}
	}
	p := proof{batch: 1, ask: func(context.Context, int, string) (int, error) { return 0, io.ErrClosedPipe }}
	if _, err := p.run(context.Background()); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("%v", err)
	}
}

// TestLibraries measures every library for a moment: the bare maps never refuse, the others keep the limit.
func TestLibraries(t *testing.T) {
	for _, l := range libraries() {
		got, err := measureLibrary(l, 2000, time.Millisecond)
		if err != nil {
			t.Errorf("%s: %v", l.name, err)
			continue
		}
		if n, ok := got[admitted]; ok == l.bare || ok && n != limitAllowed {
			t.Errorf("%s admitted %v of %d", l.name, n, limitAllowed)
		}
		for _, m := range []metric{nsOne, nsTwo, nsHotOne, nsHotTwo} {
			if got[m] <= 0 {
				t.Errorf("%s: %s is %v", l.name, m, got[m])
			}
		}
	}
}

// TestFloors talks to the floors as the workloads do.
func TestFloors(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s, e := grpc.NewServer(), newEchoServer()
	weirv1.RegisterLimiterServer(s, e)
	s.RegisterService(echoService(), e)
	kuadrantpb.RegisterRateLimitServiceServer(s, newKuadrantEcho())
	go s.Serve(l)
	defer s.Stop()
	clients, err := limiterClients(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	conns, err := dial(l.Addr().String(), 1)
	if err != nil {
		t.Fatal(err)
	}
	bare, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go serveTCP(bare)
	defer bare.Close()
	web := httptest.NewServer(http.HandlerFunc(echoHTTP))
	defer web.Close()
	key := func(*rand.Rand) string { return "key" }
	kuadrant := func(reserve bool) func(int) caller {
		callers, err := kuadrantCaller(l.Addr().String(), reserve, key)
		if err != nil {
			t.Fatal(err)
		}
		return callers
	}
	for name, callers := range map[string]func(int) caller{
		"unary":            checkCaller([][]weirv1.LimiterClient{clients}, "bucket", 1, key),
		"batch":            checkCaller([][]weirv1.LimiterClient{clients}, "bucket", 7, key),
		"stream":           func(int) caller { return pipelineCaller(openEchoPipe(conns[0]), []string{"key"}) },
		"tcp":              func(int) caller { return pipelineCaller(openTCPPipe(bare.Addr().String()), []string{"key"}) },
		"http":             httpCaller(newHTTPClient(), strings.TrimPrefix(web.URL, "http://"), "bucket", key),
		"forward-auth":     gatewayCaller(newHTTPClient(), strings.TrimPrefix(web.URL, "http://"), key),
		"kuadrant-check":   kuadrant(false),
		"kuadrant-reserve": kuadrant(true),
	} {
		got, err := load{callers: 2, warm: 10 * time.Millisecond, measure: 500 * time.Millisecond}.drive(t.Context(), callers)
		if err != nil || got[failed] != 0 {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}
