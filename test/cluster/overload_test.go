package clustertest

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// How the cluster of TestOverload is loaded: each node by so many callers at a time, of whom one in overFlooders makes up keys by
// the batch. The patience of most, one to sixteen times overPatience, ends before so many can have been answered.
const (
	overCallers  = 256
	overFlooders = 16
	overBatch    = 500
	overPatience = 20 * time.Millisecond
	spentKeys    = 50
	spentLimit   = 5
)

// overBound is what a node may take of memory at its peak, by its control group, to which it holds itself: its state, the calls of
// its callers, what the collector needs, and the binary.
const overBound = 256 << 20

// TestOverload offers three small nodes many times what they carry, and new keys faster than there can be room for, until
// enough has happened. Every answer is a decision or the end of the caller's own patience; limits hold; memory stays bounded; no
// node takes another for dead. When the load stops, all is as it was before.
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
			m.name, after.peak>>20, after.full, after.shedFull, after.shedLate, after.heap>>20, after.goroutines, before[i].heap>>20, before[i].goroutines)
		expect.True(t, after.peak <= bound, "%s took %d MiB, more than %d MiB", m.name, after.peak>>20, bound>>20)
		expect.True(t, after.keys <= maxKeys, "%s keeps %d keys", m.name, after.keys)
		expect.True(t, !strings.Contains(m.stderr.String(), `msg="member lost"`), "%s took another for gone", m.name)
	}

	// Whoever asks now is answered in a moment, by whichever node; and as soon as the keys made up are as good as new, which takes
	// 6 s, there is room for others again.
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
		d := f.members[key%3].peekAt("spent", spentKey(key))
		expect.True(t, d.Remaining == 0, "%s has %d left again", spentKey(key), d.Remaining)
	}
	const spare, spareHeap = 30, 24 << 20
	for i, m := range f.members {
		var now footprint
		defer func() { t.Logf("%s: heap %d MiB, %d goroutines in the end", m.name, now.heap>>20, now.goroutines) }()
		eventually(t, waitTimeout, m.name+" to be as it was before", func() bool {
			o.batch(t.Context(), m, time.Minute, 0) // so that there is something to collect
			now = m.footprint()
			return now.goroutines <= before[i].goroutines+spare && now.heap <= before[i].heap+spareHeap && now.waiting == 0
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
		ask.Checks[i] = &weirv1.Check{Target: &weirv1.Target{Policy: "flood", Key: strconv.FormatUint(rand.Uint64(), 36)}, Cost: &cost}
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
