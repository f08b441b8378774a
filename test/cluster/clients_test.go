package clustertest

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// A process of clients is this test's binary, with many Go clients that ask checks at a steady rate. Each client calls
// from a loopback address of its own, so that the nodes' bounds by address see what they see of a fleet of hosts.

// clientsCommand is the argument that makes this binary a process of clients.
const clientsCommand = "clients"

var (
	clientsFlag = flag.Int("clients", 0,
		"run TestClients with so many Go clients, beside -clients-memory, -clients-rate and -clients-for; 0: skip it unless -quiet is given, and then 2000")
	clientsMem  = flag.Int64("clients-memory", 512, "the nodes' memory in TestClients, in MiB")
	clientsRate = flag.Float64("clients-rate", 2, "checks a second of each client in TestClients")
	clientsFor  = flag.Duration("clients-for", 10*time.Second,
		"how long the clients of TestClients ask once all are connected")
)

// clientsPlan says what a process of clients does.
type clientsPlan struct {
	Nodes  []string
	First  int // the number of the first client, which has an address of its own
	Number int
	Rate   float64 // checks a second of each
	For    time.Duration
	Keys   int // that all clients of all processes share
}

// clientsReport is what came of it.
type clientsReport struct {
	Connected int
	Checks    int64
	Allowed   map[string]int64 // by key
	Errors    map[string]int64
	Failed    int64 // answered by a fail policy: that of the client, or on_error of the policy
	Own       int64 // of Failed, by that of the client
	Slowest   time.Duration
}

func newClientsReport() *clientsReport {
	return &clientsReport{Allowed: make(map[string]int64), Errors: make(map[string]int64)}
}

func (r *clientsReport) add(other *clientsReport) {
	r.Connected += other.Connected
	r.Checks += other.Checks
	r.Failed += other.Failed
	r.Own += other.Own
	r.Slowest = max(r.Slowest, other.Slowest)
	for _, m := range []struct{ to, from map[string]int64 }{{r.Allowed, other.Allowed}, {r.Errors, other.Errors}} {
		for k, n := range m.from {
			m.to[k] += n
		}
	}
}

// runClients is a process of clients. It writes "connected" when each has been answered once, waits for a line, asks,
// and writes its report when it has done or its standard input ends.
func runClients(text string) error {
	var plan clientsPlan
	if err := json.Unmarshal([]byte(text), &plan); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	report := newClientsReport()
	var mu sync.Mutex
	var dialing, asking sync.WaitGroup
	begin := make(chan struct{})
	places := make(chan struct{}, 50)
	for i := range plan.Number {
		dialing.Add(1)
		asking.Go(func() {
			own := newClientsReport()
			places <- struct{}{}
			ask, closing, err := dialClient(ctx, &plan, plan.First+i)
			if err == nil {
				defer closing()
				err = ask(ctx, own)
			}
			<-places
			dialing.Done()
			if err == nil {
				own.Connected++
				<-begin
				err = own.askFor(ctx, &plan, i, ask)
			}
			if err != nil {
				own.Errors["not connected: "+err.Error()]++
			}
			mu.Lock()
			defer mu.Unlock()
			report.add(own)
		})
	}
	dialing.Wait()
	fmt.Println("connected")
	line := make([]byte, 1)
	_, _ = os.Stdin.Read(line) // the end is as good as a line
	close(begin)
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	asking.Wait()
	return json.NewEncoder(os.Stdout).Encode(report)
}

// askFor asks at the plan's rate for as long as it says; the clients' checks are spread over the time between two of
// one.
func (r *clientsReport) askFor(ctx context.Context, plan *clientsPlan, i int,
	ask func(context.Context, *clientsReport) error) error {
	pause := time.Duration(float64(time.Second) / plan.Rate)
	select {
	case <-time.After(pause * time.Duration(i) / time.Duration(plan.Number)):
	case <-ctx.Done():
		return nil
	}
	tick := time.NewTicker(pause)
	defer tick.Stop()
	for end := time.Now().Add(plan.For); time.Now().Before(end); {
		if err := ask(ctx, r); err != nil {
			r.Errors[err.Error()]++
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
	return nil
}

// dialClient connects a client from its address. ask asks one check.
func dialClient(ctx context.Context, plan *clientsPlan,
	number int) (ask func(context.Context, *clientsReport) error, closing func(), err error) {
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, byte(192+number/62500), byte(number/250%250),
		byte(1+number%250))}}
	dial := grpc.WithContextDialer(
		func(ctx context.Context, to string) (net.Conn, error) { return dialer.DialContext(ctx, "tcp", to) })
	n := number
	key := func() string { n++; return fmt.Sprintf("key-%d", n%plan.Keys) }
	c, err := client.Dial(ctx, strings.Join(plan.Nodes, ","), client.WithOnError(client.FailClosed),
		client.WithTimeout(5*time.Second),
		client.WithLogger(slog.New(slog.DiscardHandler)), client.WithDialOptions(dial))
	if err != nil {
		return nil, nil, err
	}
	ready, cancel := context.WithTimeout(ctx, testkit.Patience)
	defer cancel()
	if err := c.Ready(ready); err != nil {
		_ = c.Close()
		return nil, nil, err
	}
	limiter := c.Policy("shared")
	return func(ctx context.Context, r *clientsReport) error {
		began, k := time.Now(), key()
		d, err := limiter.Allow(ctx, k)
		if err != nil {
			return err
		}
		if r.answered(k, time.Since(began), d.Allowed, d.FailedClosed); d.FailedClosed {
			r.Own = int64(c.Stats().Unanswered)
		}
		return nil
	}, func() { _ = c.Close() }, nil
}

func (r *clientsReport) answered(key string, took time.Duration, allowed, failed bool) {
	r.Checks++
	r.Slowest = max(r.Slowest, took)
	if failed {
		r.Failed++
	}
	if allowed {
		r.Allowed[key]++
	}
}

// startClients starts a process of clients, which is killed when the test ends.
func startClients(t *testing.T, plan clientsPlan) *process {
	t.Helper()
	p := launchWith(t, nil, must.Value(os.Executable())(t), clientsCommand, string(must.Value(json.Marshal(plan))(t)))
	// Clients run on other machines than nodes.
	must.NoError(t, syscall.Setpriority(syscall.PRIO_PROCESS, p.cmd.Process.Pid, 10))
	return p
}

// reportOf waits for what came of a process's checks.
func reportOf(t *testing.T, p *process, within time.Duration) *clientsReport {
	t.Helper()
	out := newClientsReport()
	eventually(t, within, "a process of clients to report", func() bool {
		_, text, _ := strings.Cut(p.stdout.String(), "connected\n")
		return strings.HasSuffix(text, "\n") && json.NewDecoder(bytes.NewReader([]byte(text))).Decode(out) == nil
	})
	return out
}

// TestClients: nodes with default flags in control groups take the fleet that operating.md names for their memory: no
// client gets an error for want of a place, no node is killed for its size or rejects anything, and no key is admitted
// beyond its limit.
func TestClients(t *testing.T) {
	number := *clientsFlag
	if number == 0 {
		needsQuiet(t)
		number = 2000
	}
	const keys, limit, each = 100, 200, 1000
	f := newFleet(t, 3, fmt.Sprintf(
		"policies:\n  - {name: shared, algorithm: fixed_window, limit: %d, window: 24h, on_error: closed}\n", limit),
		nil)
	raiseFiles(t, 3*uint64(each)+1000)
	groups := make([]*cgroup, len(f.members))
	var nodes []string
	for i, m := range f.members {
		groups[i] = newCgroup(t, *clientsMem<<20)
		m.wrapper = groups[i].inside()
		nodes = append(nodes, m.grpcAddr())
	}
	f.start(f.members...)
	f.calm(f.members...)
	before := f.members[0].footprint()
	var processes []*process
	began := time.Now()
	for first := 0; first < number; first += each {
		processes = append(processes, startClients(t, clientsPlan{
			Nodes: nodes, First: first, Number: min(each, number-first), Rate: *clientsRate,
			For: *clientsFor, Keys: keys,
		}))
	}
	for _, p := range processes {
		eventually(t, 4*waitTimeout, "all clients to be connected",
			func() bool { return strings.HasPrefix(p.stdout.String(), "connected\n") })
	}
	t.Logf("%d clients connected in %v", number, time.Since(began).Round(time.Millisecond))
	logNodes := func(when string) {
		for i, m := range f.members {
			now, page := m.footprint(), m.metrics()
			t.Logf("%s: %s: %d MiB of %d at its peak, heap %d MiB (before %d), stacks %d MiB, %d goroutines (before %d); %v connections of %v, %v streams, %d MiB counted of %d", when, m.name,
				groups[i].peak()>>20, *clientsMem, now.heap>>20, before.heap>>20,
				int64(page.value("go_memstats_stack_inuse_bytes"))>>20, now.goroutines, before.goroutines,
				page.value("weir_connections", "listener", "grpc"),
				page.value("weir_connections_max", "listener", "grpc"),
				page.value("weir_calls", "kind", "stream"), int64(page.value("weir_callers_bytes"))>>20,
				int64(page.value("weir_callers_bytes_max"))>>20)
		}
	}
	logNodes("connected")
	for _, p := range processes {
		_ = must.Value(p.stdin.Write([]byte("\n")))(t)
	}
	total := newClientsReport()
	for _, p := range processes {
		total.add(reportOf(t, p, *clientsFor+4*waitTimeout))
	}
	logNodes("asked")
	t.Logf("%d checks in %v by %d clients, %d answered by a fail policy, %d of them by the client's, slowest %v; errors %v",
		total.Checks, *clientsFor, total.Connected, total.Failed, total.Own, total.Slowest, total.Errors)
	expect.True(t, total.Connected == number && len(total.Errors) == 0 && total.Failed == 0,
		"%d of %d clients connected; %d checks were answered by a fail policy, %d of them by the client's; errors %v",
		total.Connected, number, total.Failed, total.Own, total.Errors)
	for _, key := range slices.Sorted(maps.Keys(total.Allowed)) {
		n := total.Allowed[key]
		expect.True(t, n <= limit, "%s: %d admitted, the limit is %d", key, n, limit)
	}
	for i, g := range groups {
		n := g.kills()
		expect.True(t, n <= 0, "%s was killed for its size", f.members[i].name)
	}
}

// raiseFiles raises the bound on open files of this process and those that it starts, or skips the test.
func raiseFiles(t *testing.T, least uint64) {
	var files unix.Rlimit
	must.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &files))
	if files.Cur < least {
		t.Skipf("needs %d open files, has %d (ulimit -n)", least, files.Cur)
	}
}
