package main

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"

	"github.com/weirlimit/weir/policy"
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
	const line = "name=weir-0 http=127.0.0.1:1 grpc=127.0.0.1:2 gossip=127.0.0.1:3 peer=127.0.0.1:4 resp=127.0.0.1:5"
	got := parseReady(line)
	if want := (node{"weir-0", "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", "127.0.0.1:5"}); got != want {
		t.Errorf("%+v", got)
	}
}

// TestChildren runs a child that does not want to end, and one that ends at once.
func TestChildren(t *testing.T) {
	running, stop := context.WithCancel(t.Context())
	c := children{ctx: running, dir: t.TempDir()}
	const script = "trap '' TERM; echo up 1; while :; do sleep 0.05; done"
	stubborn, err := c.start("stubborn", "/bin/sh", []string{"-c", script}, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if rest, err := stubborn.line(ctx, "up "); err != nil || rest != "1" {
		t.Errorf("%q, %v", rest, err)
	}
	if u, err := stubborn.usage(); err != nil || u.rss <= 0 {
		t.Errorf("%+v, %v", u, err)
	}
	brief, err := c.start("brief", "/bin/sh", []string{"-c", "echo why >&2; exit 3"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	_, err = brief.line(ctx, "up ")
	if err == nil || !strings.Contains(err.Error(), "exit status 3") || !strings.Contains(err.Error(), "why") {
		t.Errorf("a child that ended: %v", err)
	}
	stop()
	c.running.Wait()
	if stubborn.alive() == nil {
		t.Error("a child is left")
	}
	if _, err := stubborn.usage(); err == nil {
		t.Error("the account of a process that is gone")
	}
}

func TestUnsettled(t *testing.T) {
	status := func(change func(*weirv1.Member)) *weirv1.StatusResponse {
		s := &weirv1.StatusResponse{Ready: true}
		for range 2 {
			m := &weirv1.Member{State: "active", Ownership: &weirv1.Ownership{Settled: true}}
			s.Members = append(s.Members, m)
		}
		change(s.Members[1])
		return s
	}
	if err := unsettled(status(func(*weirv1.Member) {}), 2); err != nil {
		t.Error(err)
	}
	if unsettled(status(func(*weirv1.Member) {}), 3) == nil {
		t.Error("a member is missing, and the cluster is at rest")
	}
	for i, change := range []func(*weirv1.Member){
		func(m *weirv1.Member) { m.State = "leaving" }, func(m *weirv1.Member) { m.Ownership = nil },
		func(m *weirv1.Member) { m.Ownership.Settled = false }, func(m *weirv1.Member) { m.Ownership.Degraded = 1 },
	} {
		if unsettled(status(change), 2) == nil {
			t.Errorf("change %d leaves the cluster at rest", i)
		}
	}
}

func TestPoliciesAreValid(t *testing.T) {
	if _, err := policy.Parse("policies.yaml", []byte(weirPolicies)); err != nil {
		t.Fatal(err)
	}
}

func TestOwnedBy(t *testing.T) {
	s := &system{nodes: []node{{name: "weir-0"}, {name: "weir-1"}}}
	keys := []string{keyOf(1), keyOf(2), keyOf(3), keyOf(4), keyOf(5), keyOf(6)}
	for _, n := range s.nodes {
		own, others := s.ownedBy(n, true, "none", keys), s.ownedBy(n, false, "none", keys)
		if len(own)+len(others) != len(keys) {
			t.Errorf("%s: %q and %q", n.name, own, others)
		}
	}
}

// TestFloors talks to the floors as the workloads do.
func TestFloors(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	weirv1.RegisterLimiterServer(s, newEchoServer())
	ratelimitv3.RegisterRateLimitServiceServer(s, newEnvoyEcho())
	go s.Serve(l)
	defer s.Stop()
	web := httptest.NewServer(http.HandlerFunc(echoHTTP))
	defer web.Close()
	b := &bench{warm: 300 * time.Millisecond, measure: 300 * time.Millisecond, keys: []string{"key"}}
	b.echo = func() (*system, error) {
		return &system{nodes: []node{{grpc: l.Addr().String(), http: strings.TrimPrefix(web.URL, "http://")}}}, nil
	}
	for name, ask := range map[string]asking{
		"unary": singles("grpc", "bucket", only("key")), "http": singles("http", "bucket", only("key")),
		"batch": checks("bucket", 7, only("key")), "envoy": envoyCalls(only("key")),
	} {
		if got, err := b.driven("echo", 2, b.echo, ask).run(t.Context()); err != nil || got[failed] != 0 {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}

// TestCommands has replies counted by their lines, and errors seen.
func TestCommands(t *testing.T) {
	serve := func(reply string) string {
		near, far := net.Pipe()
		defer near.Close()
		go func() {
			defer far.Close()
			in := make([]byte, 1000)
			if n, err := far.Read(in); err == nil && string(in[:n]) == "*2\r\n$1\r\na\r\n$2\r\nbc\r\n" {
				_, _ = io.WriteString(far, reply)
			}
		}()
		if err := exchange(near, appendCommand(nil, []string{"a", "bc"}), make([]byte, 100), 2); err != nil {
			return err.Error()
		}
		return ""
	}
	for reply, want := range map[string]string{
		"+1\r\n+2\r\n": "", "-ERR no\r\n": "answered", "+1\r\n-ERR no\r\n": "answered",
		"1\n2\n3\n": "more", "1\n": "EOF",
	} {
		if got := serve(reply); (got == "") != (want == "") || !strings.Contains(got, want) {
			t.Errorf("%q: %q", reply, got)
		}
	}
}
