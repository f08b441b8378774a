package clustertest

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/checker"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

var (
	stops    = flag.Int("stops", 2, "how often TestStop kills all nodes")
	stopsDir = flag.String("stops-dir", "/dev/shm",
		"where its nodes keep their counters; a directory of its own is made there")
)

// stopLimit is more than what is asked for, so that how much of it is in use tells all that has been counted.
const stopLimit = 1_000_000_000

// counted is a key, what its callers were told, and when.
type counted struct {
	durability, key string
	lent            bool // units of it are lent, and count until their loans end

	mu       sync.Mutex
	sent     int64       // units that may have been charged
	admitted []time.Time // of each unit, when its caller had the answer
}

func (c *counted) target() *weirv1.Target {
	return targetOf(fmt.Sprint(c.durability, "-", c.lent), c.key)
}

// stopper is a fleet with disks, and load on it.
type stopper struct {
	*fleet
	dir  string
	keys []*counted
}

func newStopper(t *testing.T) *stopper {
	var file strings.Builder
	file.WriteString("policies:\n")
	s := &stopper{dir: t.TempDir()}
	if info, err := os.Stat(*stopsDir); err == nil && info.IsDir() {
		s.dir = must.Value(os.MkdirTemp(*stopsDir, "weir-stop-"))(t)
		t.Cleanup(func() { _ = os.RemoveAll(s.dir) })
	}
	for _, d := range []string{"none", "async", "escrow", "sync"} {
		for _, lent := range []bool{false, true} {
			fmt.Fprintf(&file, "  - {name: %s-%v, algorithm: fixed_window, limit: %d, window: 24h, durability: %s, lend: %v, persist: true, on_error: closed}\n",
				d, lent, stopLimit, d, lent)
			for i := range 5 {
				s.keys = append(s.keys, &counted{durability: d, key: fmt.Sprint("key-", i), lent: lent})
			}
		}
	}
	s.fleet = newFleet(t, 3, file.String(), nil)
	return s
}

// open starts all nodes, and waits until every key is decided.
func (s *stopper) open() {
	s.t.Helper()
	for _, m := range s.members {
		s.launch(m, "--data-dir", filepath.Join(s.dir, m.name))
	}
	for _, m := range s.members {
		m.awaitReady()
	}
}

// load asks until ctx ends.
func (s *stopper) load(ctx context.Context) {
	var callers sync.WaitGroup
	for i := range 24 {
		callers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(i), uint64(time.Now().UnixNano())))
			for ctx.Err() == nil {
				c := s.keys[rng.IntN(len(s.keys))]
				c.ask(ctx, s.members[rng.IntN(len(s.members))])
			}
		})
	}
	callers.Wait()
}

// startLoad puts load on the nodes until end is called.
func (s *stopper) startLoad() (end func()) {
	ctx, cancel := context.WithCancel(s.t.Context())
	var load sync.WaitGroup
	load.Go(func() { s.load(ctx) })
	return func() {
		cancel()
		load.Wait()
	}
}

// awaitAdmitted waits until so many units more than now are admitted.
func (s *stopper) awaitAdmitted(units int) {
	s.t.Helper()
	before := s.admitted()
	eventually(s.t, waitTimeout, fmt.Sprint(units, " units are admitted"),
		func() bool { return s.admitted() > before+units })
}

// kill ends all nodes by SIGKILL.
func (s *stopper) kill() {
	for _, m := range s.members {
		m.signal(syscall.SIGKILL)
	}
	for _, m := range s.members {
		m.exit(stopTimeout)
	}
}

func (c *counted) ask(ctx context.Context, m *member) {
	c.mu.Lock()
	c.sent++
	c.mu.Unlock()
	out, err := m.limiter.Check(ctx, &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: c.target()}}})
	if err != nil || out.Results[0].GetError() != nil {
		return
	}
	if d := out.Results[0].GetDecision(); d.Allowed && !d.Degraded {
		c.mu.Lock()
		c.admitted = append(c.admitted, time.Now())
		c.mu.Unlock()
	}
}

// judge compares what the nodes count with what callers were told, and returns for how long before the stop something
// was forgotten.
func (s *stopper) judge(stopped time.Time) map[string]time.Duration {
	s.t.Helper()
	reach := make(map[string]time.Duration)
	for _, c := range s.keys {
		used := int64(-1)
		s.members[0].eventually(startTimeout, c.key+" is decided", func() bool {
			out, err := s.members[0].limiter.Check(s.t.Context(),
				&weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: c.target(), Cost: new(int64)}}})
			if err == nil && out.Results[0].GetDecision() != nil && !out.Results[0].GetDecision().FailedClosed {
				used = stopLimit - out.Results[0].GetDecision().Remaining
			}
			return used >= 0
		})
		told := int64(len(c.admitted))
		expect.True(s.t, used <= c.sent || c.lent, "%s/%s: %d are counted, and %d were asked for", c.durability, c.key,
			used, c.sent)
		if used < told {
			slices.SortFunc(c.admitted, time.Time.Compare)
			reach[c.durability] = max(reach[c.durability], stopped.Sub(c.admitted[used]))
			c.admitted = c.admitted[:used]
		}
	}
	return reach
}

// TestStop kills all nodes at once under load, again and again: what callers were told under escrow and sync is counted
// afterwards, and of the rest all but the last moments.
func TestStop(t *testing.T) {
	plainOnly(t)
	t.Parallel()
	s := newStopper(t)
	s.open()
	s.calm(s.members...)
	worst := make(map[string]time.Duration)
	for range *stops {
		end := s.startLoad()
		time.Sleep(500*time.Millisecond + rand.N(time.Second)) // the instant of the stop is at random
		stopped := time.Now()
		s.kill()
		end()
		s.open()
		for d, of := range s.judge(stopped) {
			worst[d] = max(worst[d], of)
		}
		expect.True(t, worst["escrow"] == 0 && worst["sync"] == 0, "forgotten under escrow: %v, sync: %v",
			worst["escrow"], worst["sync"])
		if t.Failed() {
			return
		}
	}
	var units int
	for _, c := range s.keys {
		units += len(c.admitted)
	}
	t.Logf("%d stops, %d units admitted; forgotten before a stop: none %v, async %v", *stops, units, worst["none"],
		worst["async"])
	if *quiet {
		expect.True(t, max(worst["none"], worst["async"]) <= 100*time.Millisecond, "that is more than is promised")
	}
}

// TestStopInGoodOrder ends all nodes by SIGTERM, all at once and one after the other: nothing is forgotten.
func TestStopInGoodOrder(t *testing.T) {
	needsTime(t)
	plainOnly(t)
	t.Parallel()
	s := newStopper(t)
	for _, together := range []bool{true, false} {
		s.open()
		s.calm(s.members...)
		end := s.startLoad()
		s.awaitAdmitted(1000)
		if together {
			s.leave(s.members...)
		}
		for _, m := range s.members {
			if !together {
				s.leave(m)
			}
		}
		end()
		saved := 0
		for _, m := range s.members {
			saved += strings.Count(m.stderr.String(), "counters saved")
		}
		expect.True(t, saved > 0, "no node says that it has saved its counters")
		s.open()
		for d, of := range s.judge(time.Now()) {
			t.Errorf("together: %v: under %s what was admitted up to %v before is forgotten", together, d, of)
		}
		s.leave(s.members...)
	}
}

// TestLostDisk kills all nodes and starts them with one data directory less, each in turn: what was answered under
// escrow and sync is counted, because the disks of backups have it, too.
func TestLostDisk(t *testing.T) {
	needsTime(t)
	plainOnly(t)
	t.Parallel()
	s := newStopper(t)
	s.open()
	for _, lost := range s.members {
		s.calm(s.members...)
		end := s.startLoad()
		s.awaitAdmitted(1000)
		end()
		for _, m := range s.members {
			m.eventually(waitTimeout, "the disk has everything", func() bool {
				_, page, err := m.fetch("/metrics")
				return err == nil && strings.Contains(string(page), "\nweir_disk_unsaved_partitions 0\n")
			})
		}
		s.kill()
		must.NoError(t, os.RemoveAll(filepath.Join(s.dir, lost.name)))
		// The others first: a node that knows nothing, and is alone, claims all keys as new.
		for _, m := range s.members {
			if m != lost {
				s.launch(m, "--data-dir", filepath.Join(s.dir, m.name))
				m.eventually(startTimeout, "it is up", func() bool {
					_, _, err := m.fetch("/healthz")
					return err == nil
				})
			}
		}
		s.launch(lost, "--data-dir", filepath.Join(s.dir, lost.name))
		for _, m := range s.members {
			m.awaitReady()
		}
		reach := s.judge(time.Now())
		expect.True(t, reach["escrow"] == 0 && reach["sync"] == 0, "without the disk of %s, forgotten: %v", lost.name,
			reach)
	}
}

// admitted is the number of units that callers were told of.
func (s *stopper) admitted() (n int) {
	for _, c := range s.keys {
		c.mu.Lock()
		n += len(c.admitted)
		c.mu.Unlock()
	}
	return n
}

// TestFullDisk: a node whose disk is full goes on, says so, and answers as degraded.
func TestFullDisk(t *testing.T) {
	needsTime(t)
	plainOnly(t)
	t.Parallel()
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=8m"); err != nil {
		t.Skipf("a small file system takes root: %v", err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	policies := testkit.WriteFile(t, "policies.yaml",
		"policies: [{name: p, algorithm: fixed_window, limit: 5, window: 24h, persist: true}]")
	p := startNode(t, "--policies", policies, "--data-dir", dir, "--gossip-port=", "--peer-port=").awaitReady()
	c := weirv1.NewLimiterClient(p.connect())
	n := 0
	said := func(what string) bool { return strings.Contains(p.stderr.String(), what) }
	for full := false; !full; n++ { // just after its start a node answers as degraded, too
		must.True(t, n < 100_000, "the disk of 8 MiB is not full after %d keys, or nothing in the log", n)
		full = decide(t, c, "p", strings.Repeat("k", 900)+fmt.Sprint(n), "").Degraded &&
			said("counters not written any more")
	}
	t.Logf("full after %d keys", n)
	expect.True(t, said("no space left"), "nothing of the cause in the log")
	_, page, err := p.fetch("/v1/status")
	expect.True(t, err == nil && strings.Contains(string(page), "no space left"), "the status: %s, %v", page, err)
	expect.True(t, decide(t, c, "p", "another", "").Allowed, "refused")
	p.terminate()
}

// asked is a check or a reservation with a request id, of a key of its own, whose limit is 10.
type asked struct {
	target      *weirv1.Target
	id          string
	reserve     bool
	answered    bool // in time: admitted
	reservation string
}

// ask asks through a member.
func (q *asked) ask(ctx context.Context, m *member) (d *weirv1.Decision, err error) {
	if q.reserve {
		return m.limiter.Reserve(ctx,
			&weirv1.ReserveRequest{Target: q.target, RequestId: q.id, TtlNs: int64(time.Hour)})
	}
	out, err := m.limiter.Check(ctx, &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: q.target, RequestId: q.id}}})
	if err != nil {
		return nil, err
	}
	if e := out.Results[0].GetError(); e != nil {
		return nil, fmt.Errorf("%v", e)
	}
	return out.Results[0].GetDecision(), nil
}

// killInBurst asks all through a member, and kills another one half-way.
func killInBurst(t *testing.T, all []*asked, through, victim *member) {
	var burst sync.WaitGroup
	answered, work := make(chan struct{}, len(all)), make(chan *asked)
	for range 100 {
		burst.Go(func() {
			for q := range work {
				if d, err := q.ask(t.Context(), through); err == nil && d.Allowed && !d.FailedClosed && !d.Degraded {
					q.answered, q.reservation = true, d.ReservationId
				}
				answered <- struct{}{}
			}
		})
	}
	burst.Go(func() {
		defer close(work)
		for _, q := range all {
			work <- q
		}
	})
	for range len(all) / 2 {
		<-answered
	}
	victim.kill()
	burst.Wait()
}

// TestIDsOverAKill kills a node in a burst of request ids with long keys, under escrow and sync. Every id is then
// repeated: it is charged once, and each reservation whose id was answered is there.
func TestIDsOverAKill(t *testing.T) {
	plainOnly(t)
	t.Parallel()
	policies := []checker.Policy{
		{Name: "escrow", Durability: checker.Escrow, Limit: 10, Window: time.Hour},
		{Name: "sync", Durability: checker.Sync, Limit: 10, Window: time.Hour},
	}
	f := newFleet(t, 3, policiesFile(policies), nil)
	f.start(f.members...)
	f.calm(f.members...)
	f.decided(f.members[0], "probe-strict") // before the voters answer, answers say that they are degraded
	victim, rest := f.members[1], f.members[:1]
	var all []*asked
	for i := range 1500 {
		key := fmt.Sprint(strings.Repeat("k", 900), i)
		all = append(all, &asked{target: targetOf(policies[i%2].Name, key), id: fmt.Sprint("id-", i),
			reserve: i%5 == 0})
	}
	killInBurst(t, all, rest[0], victim)
	f.decided(rest[0], "probe")
	var lost, twice, uncharged, unknown, told int
	for _, q := range all {
		before := rest[0].peek(q.target.GetPolicy(), q.target.Key).Remaining
		d, err := q.ask(t.Context(), rest[0])
		if err != nil || !d.Allowed {
			if q.answered {
				lost++
			}
			continue
		}
		if q.answered {
			told++
		}
		switch left := rest[0].peek(q.target.GetPolicy(), q.target.Key).Remaining; {
		case left == 10:
			uncharged++
		case left < before && q.answered:
			twice++
		}
		if q.answered && q.reserve {
			_, err := rest[0].limiter.Commit(t.Context(),
				&weirv1.CommitRequest{Target: q.target, ReservationId: q.reservation, Cost: proto.Int64(1)})
			if grpcstatus.Code(err) == codes.NotFound {
				unknown++
			}
		}
	}
	t.Logf("%d of %d were answered as admitted before", told, len(all))
	expect.True(t, lost+twice+uncharged+unknown <= 0 && told >= len(all)/2,
		"%d were refused when they were repeated, %d charged twice, %d not charged, %d reservations unknown", lost,
		twice, uncharged, unknown)
}

// TestStrictLoansApart cuts the owners and copies of some keys off from the voters, and kills both later, while
// borrowers on both sides spend what they have on loan: of strict policies nothing is admitted beyond the limit.
func TestStrictLoansApart(t *testing.T) {
	plainOnly(t)
	survival(t)
	cut := newNetwork(t, 7)
	policies := []checker.Policy{
		{Name: "strict-sync", Durability: checker.Sync}, {Name: "strict-escrow", Durability: checker.Escrow},
		{Name: "strict-bucket", Kind: checker.Bucket, Durability: checker.Sync},
	}
	for i := range policies {
		p := &policies[i]
		p.Strict, p.Limit, p.Capacity, p.Window, p.Lent = true, lentLimit, lentLimit, 12*time.Second, time.Second
	}
	f := newFleet(t, 5, policiesFile(policies), cut)
	n := f.members
	l := lend(f, policies)
	plan := borrowerPlan{Clients: 2, Rate: 1000, Every: int64(time.Second), Keys: 8, Newest: 40}
	l.borrow(cut.inside(5), plan, policies)
	l.borrow(cut.inside(6), plan, policies)
	l.goesOn(2000)

	few, many := []int{3, 4, 5}, []int{0, 1, 2, 6}
	alive := l.gone(n...)
	t.Log(l.clock(l.now()), "n4 and n5 are cut off")
	cut.cut(few, many)
	cut.cut(many, few)
	f.decided(n[0], "probe-strict")
	l.goesOn(1000)
	cut.heal()
	t.Logf("%s healed: calm after %v", l.clock(l.now()), f.calm(n...).Round(time.Millisecond))
	l.goesOn(1000)

	for _, m := range n[3:] {
		l.kill(m)
	}
	t.Log(l.clock(l.now()), "n4 and n5 are killed")
	f.decided(n[0], "probe-strict")
	l.goesOn(1000)
	alive()
	for _, b := range l.borrowers {
		b.end()
	}
	l.judge()
}
