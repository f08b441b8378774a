package main

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weirlimit/weir/policy"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/ring"
)

func TestOwnPoliciesAreValid(t *testing.T) {
	set, err := policy.Parse("own.yaml", []byte(ownPolicies))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{movedPolicy, countedPolicy, probePolicy, "none", "escrow", "sync"} {
		if !slices.ContainsFunc(set.Policies(), func(p *policy.Policy) bool { return p.Name == name }) {
			t.Errorf("no policy %q", name)
		}
	}
}

func TestMovedPartition(t *testing.T) {
	two, three := tableOf(2), tableOf(3)
	p, err := movedPartition(two, three)
	if err != nil {
		t.Fatal(err)
	}
	if a, b := ownerOf(two, p), ownerOf(three, p); a != nodeName(0) || b != nodeName(2) {
		t.Errorf("partition %d moves from %s to %s", p, a, b)
	}
	if _, err := movedPartition(two, two); err == nil {
		t.Error("something moves although nobody joins")
	}
}

func TestKeysIn(t *testing.T) {
	keys := keysIn(17, countedPolicy, 5, 2)
	if n := len(slices.Compact(slices.Sorted(slices.Values(keys)))); n != 5 {
		t.Errorf("%d different keys: %q", n, keys)
	}
	for _, k := range keys {
		if p := partitionOf(countedPolicy, k); p != 17 || len(k) != len(keyOf(0)) {
			t.Errorf("%q is in partition %d", k, p)
		}
	}
}

func TestOwnedBy(t *testing.T) {
	table := tableOf(2)
	keys := []string{keyOf(1), keyOf(2), keyOf(3), keyOf(4), keyOf(5), keyOf(6)}
	a, b := ownedBy(table, nodeName(0), "none", keys), ownedBy(table, nodeName(1), "none", keys)
	if len(a)+len(b) != len(keys) {
		t.Errorf("%q and %q", a, b)
	}
}

func TestProbes(t *testing.T) {
	for p, k := range probes() {
		if partitionOf(probePolicy, k) != p {
			t.Fatalf("%q is not in partition %d", k, p)
		}
	}
	if n := len(probes()); n != ring.Partitions {
		t.Errorf("%d probes", n)
	}
}

func TestTookOver(t *testing.T) {
	const line = `time=2026-11-21T13:32:04.123Z level=INFO msg="took over" count=4 partitions=3,7-9 term=2 other=weir-0` + "\n"
	for p, want := range map[int]bool{2: false, 3: true, 6: false, 7: true, 8: true, 9: true, 10: false} {
		at, ok := tookOver(line, p)
		if ok != want || ok && at.UnixMilli() != time.Date(2026, 11, 21, 13, 32, 4, 123e6, time.UTC).UnixMilli() {
			t.Errorf("partition %d: %v, %v", p, at, ok)
		}
	}
	for _, other := range []string{
		"", strings.Replace(line, "took over", "claimed", 1), strings.Replace(line, "2026-", "x", 1),
		`time=2026-11-21T13:32:04Z msg="took over" partitions="1-2,4 and more"`,
	} {
		if _, ok := tookOver(other, 3); ok {
			t.Errorf("%q says that partition 3 was taken over", other)
		}
	}
}

func TestDelays(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	w := window{from: at(1000), handed: at(1500), to: at(2000)}
	var spans []span
	for ms := 0; ms < 3000; ms += 10 {
		took := 2 * time.Millisecond
		if ms >= 1480 && ms < 1500 {
			took = at(1502).Sub(at(ms)) // parked
		}
		spans = append(spans, span{sent: at(ms), took: took}, span{sent: at(ms), took: 2 * time.Millisecond, still: true})
	}
	got, err := delays(spans, []window{w})
	if err != nil {
		t.Fatal(err)
	}
	for m, want := range map[metric]float64{
		parkedMax: 20, parkedP99: 20, parkedSeen: 3, movingMax: 20, movingP99: 10, stillMovingMax: 0, moveTime: 0.5,
	} {
		if v := got[m]; v < want-0.001 || v > want+0.001 {
			t.Errorf("%s is %v, not %v", m, v, want)
		}
	}
	if _, err := delays(nil, []window{w}); err == nil {
		t.Error("delays of nothing")
	}
}

func TestMoveLoadJudges(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	windows := []window{{from: start, handed: start.Add(time.Second), to: start.Add(2 * time.Second)}}
	spans := []span{{sent: start.Add(-time.Minute), took: time.Millisecond}, {sent: start.Add(time.Second), took: time.Millisecond}}
	for _, c := range []struct {
		admitted  int64
		undecided int64
		over      bool
		held      float64
	}{{countedAllowed, 0, false, 0}, {countedAllowed + 1, 0, true, 0}, {countedAllowed - 3, 0, false, 3}, {countedAllowed - 3, 2, false, 1}} {
		l := newTestLoad(c.admitted, spans)
		l.undecided.Store(c.undecided)
		l.unsure.Store(c.undecided)
		got, err := l.judge(windows)
		if errors.Is(err, errViolated) != c.over {
			t.Errorf("%d admitted: %v", c.admitted, err)
		}
		if err == nil && (got[heldBack] != c.held || got[undecided] != float64(c.undecided)) {
			t.Errorf("%d admitted: %v", c.admitted, got)
		}
	}
}

func TestAdded(t *testing.T) {
	if got := added(100, 400, 200)[extraTrips]; got != 1.5 {
		t.Errorf("%v round trips", got)
	}
	if got, ok := added(100, 400, 0)[extraTrips]; ok {
		t.Errorf("%v round trips of no time", got)
	}
}

func TestTrouble(t *testing.T) {
	status := func(change func(*weirv1.Member)) *weirv1.StatusResponse {
		s := &weirv1.StatusResponse{Ready: true}
		for range 2 {
			s.Members = append(s.Members, &weirv1.Member{State: "active", Reachable: true, Partitions: 7, Ownership: &weirv1.Ownership{Held: 7}})
		}
		change(s.Members[1])
		return s
	}
	if err := trouble(status(func(*weirv1.Member) {}), 2); err != nil {
		t.Error(err)
	}
	if trouble(status(func(*weirv1.Member) {}), 3) == nil {
		t.Error("a member is missing, and it is no trouble")
	}
	for i, change := range []func(*weirv1.Member){
		func(m *weirv1.Member) { m.State = "leaving" }, func(m *weirv1.Member) { m.Reachable = false },
		func(m *weirv1.Member) { m.Ownership = nil }, func(m *weirv1.Member) { m.Ownership.Held = 6 },
		func(m *weirv1.Member) { m.Ownership.Moving = 1 }, func(m *weirv1.Member) { m.Ownership.Awaited = 1 },
		func(m *weirv1.Member) { m.Ownership.Degraded = 1 },
	} {
		if trouble(status(change), 2) == nil {
			t.Errorf("change %d is no trouble", i)
		}
	}
}

// TestRelays sends something there and back over a distance.
func TestRelays(t *testing.T) {
	const delay = 20 * time.Millisecond
	there, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer there.Close()
	go func() {
		c, err := there.Accept()
		if err == nil {
			_, _ = io.Copy(c, c)
			c.Close()
		}
	}()
	udp, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	go func() {
		b := make([]byte, 100)
		for {
			n, from, err := udp.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = udp.WriteTo(b[:n], from)
		}
	}()
	ports, err := freePorts(1)
	if err != nil {
		t.Fatal(err)
	}
	here := net.JoinHostPort(far(0), strconv.Itoa(ports[0]))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	if err := relayTCP(ctx, here, there.Addr().String(), delay); err != nil {
		t.Skip(err) // not every system has more than one loopback address
	}
	if err := relayUDP(ctx, here, udp.LocalAddr().String()); err != nil {
		t.Fatal(err)
	}
	for network, least := range map[string]time.Duration{"tcp": 2 * delay, "udp": 0} {
		c, err := net.Dial(network, here)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if _, err := io.WriteString(c, "hello"); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 5)
		if _, err := io.ReadFull(c, b); err != nil || string(b) != "hello" || time.Since(began) < least {
			t.Errorf("%s: %q after %v, %v", network, b, time.Since(began), err)
		}
	}
}

func TestPaced(t *testing.T) {
	const every = 20 * time.Millisecond
	began := time.Now()
	calls := 0
	newCaller := paced(every, func(int) caller {
		return loop(func(context.Context) (int, error) { calls++; return 1, nil })
	})
	ctx, cancel := context.WithTimeout(t.Context(), 10*every)
	defer cancel()
	newCaller(0)(ctx, &recorder{run: &shared{}})
	// The first is due at once, and one may be cut short by the end.
	if most := int(time.Since(began)/every) + 2; calls == 0 || calls > most {
		t.Errorf("%d calls, not up to %d", calls, most)
	}
}

func newTestLoad(admitted int64, spans []span) *moveLoad {
	l := &moveLoad{movable: &movable{counted: []string{"a"}}, spans: spans}
	l.admitted = make([]atomic.Int64, 1)
	l.admitted[0].Store(admitted)
	return l
}
