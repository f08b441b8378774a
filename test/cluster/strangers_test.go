package clustertest

import (
	"context"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	grpcstatus "google.golang.org/grpc/status"

	"github.com/weirlimit/weir/auth"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

const (
	strangers       = 5000
	strangersMemory = 64 << 20         // all that they may take
	strangersDelay  = 10 * time.Second // all that they may delay others
)

// headers are the frames that begin HTTP/2 and a call of a method, without a message.
func headers(t *testing.T, method string, calls int) []byte {
	var out strings.Builder
	out.WriteString(http2.ClientPreface)
	framer := http2.NewFramer(&out, nil)
	must.NoError(t, framer.WriteSettings())
	var block strings.Builder
	encoder := hpack.NewEncoder(&block)
	for i := range calls {
		block.Reset()
		for _, f := range [][2]string{
			{":method", "POST"}, {":scheme", "http"}, {":path", method}, {":authority", "weir"},
			{"content-type", "application/grpc"}, {"te", "trailers"},
			{"grpc-timeout", "99999999H"}, {"x", strings.Repeat("x", 1000)},
		} {
			must.NoError(t, encoder.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]}))
		}
		must.NoError(t, framer.WriteHeaders(http2.HeadersFrameParam{StreamID: uint32(2*i + 1),
			BlockFragment: []byte(block.String()), EndHeaders: true}))
	}
	return []byte(out.String())
}

// residentMemory is how much memory of the process is in use, and the most that ever was.
func (p *process) residentMemory() (now, most int64) {
	p.t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		p.t.Skip("how much memory a process uses is known on Linux only: ", err)
	}
	for line := range strings.Lines(string(status)) {
		if f := strings.Fields(line); len(f) == 3 && (f[0] == "VmRSS:" || f[0] == "VmHWM:") {
			kib := must.Value(strconv.ParseInt(f[1], 10, 64))(p.t)
			if f[0] == "VmRSS:" {
				now = kib << 10
			} else {
				most = kib << 10
			}
		}
	}
	return now, most
}

// TestManyStrangers: 5,000 connections of somebody who never says who it is take at most 64 MiB of a node, and shut out
// nobody for 10 s: neither who calls from elsewhere, nor who calls from the same address, nor those who ask for the
// node's health.
func TestManyStrangers(t *testing.T) {
	needsQuiet(t)
	if raceEnabled {
		t.Skip("the race detector takes some times the memory")
	}
	var files syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err != nil || files.Cur < strangers+1000 {
		t.Skipf("needs %d open files, has %d (ulimit -n): %v", strangers+1000, files.Cur, err)
	}
	token := auth.NewToken()
	access := testkit.WriteFile(t, "access.yaml",
		fmt.Sprintf("callers:\n  - {name: shop, tokens: [%s], roles: [check], policies: [\"*\"]}\n", auth.Hash(token)))
	policies := testkit.WriteFile(t, "policies.yaml",
		"policies:\n  - {name: login, algorithm: sliding_log, limit: 1000000, window: 1h}\n")
	for _, c := range []struct {
		name, port string
		says       []byte
	}{
		{"connections without a word over gRPC", "grpc", nil},
		{"connections without a word over HTTP", "http", nil},
		{"half a request", "http", []byte("POST /v1/check HTTP/1.1\r\nHost: weir\r\n")},
		{"a body that does not come", "http",
			[]byte("POST /v1/check HTTP/1.1\r\nHost: weir\r\nContent-Length: 1000\r\n\r\n")},
		{"half a preface", "grpc", []byte(http2.ClientPreface[:10])},
		{"no calls", "grpc", headers(t, "", 0)},
		{"calls that are denied", "grpc", headers(t, weirv1.Limiter_CheckStream_FullMethodName, 100)},
		{"health checks without a message", "grpc", headers(t, "/grpc.health.v1.Health/Check", 100)},
		{"half a command", "resp", []byte("*2\r\n$4\r\nECHO\r\n$16000\r\n" + strings.Repeat("x", 15_000))},
		{"tokens that are nobody's", "resp", []byte(strings.Repeat("AUTH x\r\n", 2000))},
		{"answers that nobody reads", "resp", []byte(strings.Repeat("PING "+strings.Repeat("x", 1000)+"\r\n", 100))},
		{"health checks that go on", "grpc", append(headers(t, "/grpc.health.v1.Health/Watch", 1),
			"\x00\x00\x05\x00\x01\x00\x00\x00\x01\x00\x00\x00\x00\x00"...)},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := startNode(t, "--policies", policies, "--access-file", access, "--resp-port=0").awaitReady()
			address := map[string]string{"http": p.http, "grpc": p.grpc, "resp": p.resp}[c.port]
			caller := func(from string) (check, health func(context.Context) error) {
				dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
				dial := func(ctx context.Context, to string) (net.Conn, error) { return dialer.DialContext(ctx, "tcp", to) }
				call := func(f func(ctx context.Context, conn *grpc.ClientConn) error) func(context.Context) error {
					return func(ctx context.Context) error {
						conn, err := grpc.NewClient("passthrough:///"+p.grpc,
							grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(dial))
						if err != nil {
							return err
						}
						defer conn.Close()
						return f(ctx, conn)
					}
				}
				if c.port == "resp" {
					return func(ctx context.Context) error { return respCheck(ctx, dial, p.resp, token) },
						func(ctx context.Context) error {
							return kubeletProbe(ctx, dial, p.http)
						}
				}
				return call(func(ctx context.Context, conn *grpc.ClientConn) error {
					_, err := weirv1.NewLimiterClient(conn).Check(metadata.AppendToOutgoingContext(ctx, "authorization",
						"Bearer "+token),
						&weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: &weirv1.Target{Policy: "login",
							Key: "k"}}}}, grpc.WaitForReady(true))
					return err
				}), func(ctx context.Context) error { return kubeletProbe(ctx, dial, p.http) }
			}
			ask := func(when string) {
				t.Helper()
				// who asks from elsewhere, and who asks as they do
				for _, from := range []string{"127.0.0.2", "127.0.0.1"} {
					check, health := caller(from)
					for what, do := range map[string]func(context.Context) error{"a check": check, "a probe": health} {
						ctx, cancel := context.WithTimeout(t.Context(), strangersDelay)
						expect.NoError(t, do(ctx), "%s, %s from %s", when, what, from)
						cancel()
					}
				}
			}
			ask("before")
			before, _ := p.residentMemory()
			conns := make([]net.Conn, strangers)
			var dialing sync.WaitGroup
			for begin := range 50 {
				dialing.Go(func() {
					for i := begin; i < strangers; i += 50 {
						conn, err := net.Dial("tcp", address)
						if err != nil {
							t.Error(err)
							return
						}
						conns[i] = conn
						_, _ = conn.Write(c.says) // it may have been closed
					}
				})
			}
			dialing.Wait()
			defer func() {
				for _, conn := range conns {
					if conn != nil {
						_ = conn.Close()
					}
				}
			}()
			ask("with strangers")
			if _, most := p.residentMemory(); most-before > strangersMemory {
				t.Errorf("%d MiB before, and up to %d MiB with %d connections", before>>20, most>>20, strangers)
			} else {
				t.Logf("%d MiB before, and up to %d MiB with %d connections", before>>20, most>>20, strangers)
			}
		})
	}
}

// respCheck authenticates a caller of the Redis protocol, and asks once. It comes again when it is turned away, as
// clients do.
func respCheck(ctx context.Context, dial func(context.Context, string) (net.Conn, error), address, token string) error {
	ask := func() error {
		conn, err := dial(ctx, address)
		if err != nil {
			return err
		}
		defer conn.Close()
		deadline, _ := ctx.Deadline()
		if err := conn.SetDeadline(deadline); err != nil {
			return err
		}
		if _, err := io.WriteString(conn, "AUTH "+token+"\r\nWEIR.CHECK login k\r\nQUIT\r\n"); err != nil {
			return err
		}
		out, err := io.ReadAll(conn)
		if err == nil && !(strings.HasPrefix(string(out), "+OK\r\n*") &&
			strings.Contains(string(out), "\r\n$7\r\nallowed\r\n:1\r\n")) {
			err = fmt.Errorf("answered %q", out)
		}
		return err
	}
	for {
		err := ask()
		if err == nil || ctx.Err() != nil {
			return err
		}
	}
}

// kubeletProbe asks for /healthz as the kubelet does: on a connection of its own.
func kubeletProbe(ctx context.Context, dial func(context.Context, string) (net.Conn, error), address string) error {
	transport := &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, to string) (net.Conn, error) { return dial(ctx, to) }}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/healthz", nil)
	if err != nil {
		return err
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("status %d", resp.StatusCode)
	}
	return nil
}

// How the cluster of TestOverload is loaded: each node by so many callers at a time, of whom one in overFlooders makes
// up keys by the batch. The patience of most, one to sixteen times overPatience, ends before so many can have been
// answered.
const (
	overCallers  = 256
	overFlooders = 16
	overBatch    = 500
	overPatience = 20 * time.Millisecond
	spentKeys    = 50
	spentLimit   = 5
)

// overBound is what a node may take of memory at its peak, by its control group, to which it holds itself: its state,
// the calls of its callers, what the collector needs, and the binary.
const overBound = 256 << 20

// TestOverload offers three small nodes many times what they carry, and new keys faster than there can be room for,
// until enough has happened. Every answer is a decision or the end of the caller's own patience; limits hold; memory
// stays bounded; no node takes another for dead. When the load stops, all is as it was before.
func TestOverload(t *testing.T) {
	needsQuiet(t)
	f := newFleet(t, 3, fmt.Sprintf(`policies:
  - {name: spent, algorithm: fixed_window, limit: %d, window: 24h, on_error: closed}
  - {name: flood, algorithm: token_bucket, limit: 10, window: 1m, on_error: closed}
`, spentLimit), nil)
	callers, enough, bound, maxKeys := overCallers, int64(300_000), int64(overBound), int64(20_000)
	if raceEnabled { // which takes up to ten times the memory, and the time
		callers, enough, bound, maxKeys = callers/4, enough/10, bound*10, maxKeys/20
	}
	f.args = append(f.args, "--max-keys="+strconv.FormatInt(maxKeys, 10), "--max-memory=32MiB", "--max-in-flight=5000")
	for _, m := range f.members {
		m.wrapper = newCgroup(t, bound).inside()
	}
	f.start(f.members...)
	f.calm(f.members...)
	for key := range spentKeys {
		for i := range 2 * spentLimit {
			d := must.Value(f.members[i%3].checkGRPC(t.Context(), "spent", spentKey(key)))(t)
			must.True(t, !d.FailedClosed && d.Allowed == (i < spentLimit), "check %d of a new key: %+v", i, d)
		}
	}
	before := make([]footprint, len(f.members))
	for i, m := range f.members {
		before[i] = m.footprint()
	}

	o := &overload{t: t, counts: make(map[string]int)}
	ctx, stop := context.WithCancel(t.Context())
	defer o.callers.Wait()
	defer stop()
	began := time.Now()
	defer func() {
		if t.Failed() {
			t.Logf("%d new keys; answers: %v", o.made.Load(), o.all())
		}
	}()
	for _, m := range f.members {
		for i := range callers {
			if i%overFlooders == 0 {
				o.callers.Go(func() { o.flood(ctx, m) })
			} else {
				o.callers.Go(func() { o.ask(ctx, m, time.Duration(1+i%overFlooders)*overPatience) })
			}
		}
	}
	eventually(t, 25*time.Second, "enough new keys found no room, and enough callers gave up", func() bool {
		if o.made.Load() < enough || o.count("given up") < 1000 || o.count("spent: refused") < 200 {
			return false
		}
		full := int64(0)
		for _, m := range f.members {
			full += m.footprint().full
		}
		return full >= 1000
	})
	stop()
	o.callers.Wait()
	ended := time.Now()
	t.Logf("%d new keys in %v; answers: %v", o.made.Load(), ended.Sub(began).Round(time.Millisecond), o.all())
	for i, m := range f.members {
		after := m.footprint()
		t.Logf("%s: %d MiB at most; of the checks %d found no room, %d too many waiting, %d no time left; heap %d MiB, %d goroutines, before %d MiB, %d",
			m.name, after.peak>>20, after.full, after.shedFull, after.shedLate, after.heap>>20, after.goroutines,
			before[i].heap>>20, before[i].goroutines)
		expect.True(t, after.peak <= bound, "%s took %d MiB, more than %d MiB", m.name, after.peak>>20, bound>>20)
		expect.True(t, after.keys <= maxKeys, "%s keeps %d keys", m.name, after.keys)
		expect.True(t, !strings.Contains(m.stderr.String(), `msg="member lost"`), "%s took another for gone", m.name)
	}

	// Whoever asks now is answered in a moment, by whichever node; and as soon as the keys made up are as good as new,
	// which takes 6 s, there is room for others again.
	for _, test := range []struct {
		what, policy string
		key          func(i int) string
	}{
		{"checks to be decided in a moment again", "spent", func(i int) string { return spentKey(i % spentKeys) }},
		{"new keys to find room again", "flood", func(i int) string { return "after-" + strconv.Itoa(i) }},
	} {
		const inARow = 100
		eventually(t, waitTimeout, test.what, func() bool {
			for i := range inARow {
				ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
				d, err := f.members[i%3].checkGRPC(ctx, test.policy, test.key(i))
				cancel()
				if err != nil || d.FailedClosed {
					return false
				}
			}
			return true
		})
		t.Logf("%v after the load: %s", time.Since(ended).Round(time.Millisecond), test.what)
	}
	f.calm(f.members...)
	for key := range spentKeys {
		d := f.members[key%3].peek("spent", spentKey(key))
		expect.True(t, d.Remaining == 0, "%s has %d left again", spentKey(key), d.Remaining)
	}
	const spare, spareHeap = 30, 24 << 20
	for i, m := range f.members {
		var now footprint
		defer func() { t.Logf("%s: heap %d MiB, %d goroutines in the end", m.name, now.heap>>20, now.goroutines) }()
		eventually(t, waitTimeout, m.name+" to be as it was before", func() bool {
			o.batch(t.Context(), m, time.Minute, 0) // so that there is something to collect
			now = m.footprint()
			return now.goroutines <= before[i].goroutines+spare && now.heap <= before[i].heap+spareHeap &&
				now.waiting == 0
		})
	}
}

func spentKey(i int) string { return "spent-" + strconv.Itoa(i) }

// overload is the callers of a cluster that cannot keep up, and what they were answered.
type overload struct {
	t       *testing.T
	callers sync.WaitGroup
	made    atomic.Int64 // keys

	mu     sync.Mutex
	counts map[string]int
}

func (o *overload) count(what string) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.counts[what]
}

// all is a copy of the counts.
func (o *overload) all() map[string]int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return maps.Clone(o.counts)
}

func (o *overload) add(what string, n int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.counts[what] += n
}

// ask asks for what is used up until ctx is done.
func (o *overload) ask(ctx context.Context, m *member, patience time.Duration) {
	for ctx.Err() == nil {
		ctx, cancel := context.WithTimeout(ctx, patience)
		answer, err := m.limiter.Check(ctx, &weirv1.CheckRequest{Checks: []*weirv1.Check{
			{Target: &weirv1.Target{Policy: "spent", Key: spentKey(rand.IntN(spentKeys))}},
		}})
		cancel()
		if o.answered(err) {
			o.decided("spent", answer.Results)
		}
	}
}

// flood asks for ever new keys until ctx is done.
func (o *overload) flood(ctx context.Context, m *member) {
	for ctx.Err() == nil {
		o.batch(ctx, m, 4*overPatience, 1)
	}
}

func (o *overload) batch(ctx context.Context, m *member, patience time.Duration, cost int64) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	ask := &weirv1.CheckRequest{Checks: make([]*weirv1.Check, overBatch)}
	for i := range ask.Checks {
		ask.Checks[i] = &weirv1.Check{Target: &weirv1.Target{Policy: "flood",
			Key: strconv.FormatUint(rand.Uint64(), 36)}, Cost: &cost}
	}
	o.made.Add(overBatch)
	answer, err := m.limiter.Check(ctx, ask)
	if o.answered(err) {
		o.decided("flood", answer.Results)
	}
}

// answered tells whether a call was, and fails the test when it got an error that is not its own end.
func (o *overload) answered(err error) bool {
	switch grpcstatus.Code(err) {
	case codes.OK:
		return true
	case codes.DeadlineExceeded, codes.Canceled:
		o.add("given up", 1)
	default:
		o.t.Errorf("%v", err)
	}
	return false
}

func (o *overload) decided(policy string, results []*weirv1.Result) {
	failed, refused, allowed := 0, 0, 0
	for _, r := range results {
		switch d := r.GetDecision(); {
		case d == nil:
			o.t.Errorf("%v", r.GetError())
		case d.FailedClosed:
			failed++
		case d.Allowed:
			allowed++
		default:
			refused++
		}
	}
	expect.True(o.t, policy != "spent" || allowed <= 0, "a key that was used up is admitted")
	o.add(policy+": no room", failed)
	o.add(policy+": refused", refused)
	o.add(policy+": allowed", allowed)
}

// footprint is what a node takes, and what it says that it has turned away.
type footprint struct {
	peak, heap, keys, goroutines, waiting, full, shedFull, shedLate int64
}

func (m *member) footprint() footprint {
	m.t.Helper()
	status := string(must.Value(os.ReadFile("/proc/" + strconv.Itoa(m.cmd.Process.Pid) + "/status"))(m.t))
	var f footprint
	_, peak, _ := strings.Cut(status, "VmHWM:")
	_, err := fmt.Sscanf(peak, "%d kB", &f.peak)
	must.NoError(m.t, err)
	f.peak <<= 10
	page := m.metrics()
	f.heap = int64(page.value("go_memstats_heap_alloc_bytes"))
	f.goroutines = int64(page.value("go_goroutines"))
	f.keys = int64(page.value("weir_keys"))
	f.waiting = int64(page.value("weir_in_flight"))
	f.full = int64(page.value("weir_store_full_total"))
	f.shedFull = int64(page.value("weir_shed_total", "reason", "in_flight"))
	f.shedLate = int64(page.value("weir_shed_total", "reason", "deadline"))
	return f
}
