package runner

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// patience is how long a test waits for what must happen. It is never waited for when all is well.
const patience = testkit.Patience

// noLeaks looks for goroutines of this package.
func noLeaks(t testing.TB) {
	t.Helper()
	testkit.NoLeaks(t, "weir/cluster/runner.")
}

// ended is a context that is over.
func ended() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

const partitions = 130 // more than two words of bits

var (
	self  = ownership.Node{Name: "self", Boot: 1}
	other = ownership.Node{Name: "other", Boot: 2}
)

// puppet is a core that does what a test says, and notes what it is told.
type puppet struct {
	mu        sync.Mutex
	routes    [partitions]ownership.Route
	effects   ownership.Effects
	views     []ownership.View
	mail      []ownership.Envelope
	mailAt    []ownership.Now
	mailTicks []int // how many had been before each
	urgent    []int
	order     []string // of views and messages
	ticks     int
	idle      bool
	left      ownership.Status // of what a node that leaves has besides what it holds
	nows      []ownership.Now
	settled   bool

	gate sync.Mutex // what holds it up
}

func (c *puppet) told(now ownership.Now, note func()) {
	c.gate.Lock()
	defer c.gate.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.nows = append(c.nows, now)
	note()
}

func (c *puppet) SetView(now ownership.Now, v ownership.View) {
	c.told(now, func() { c.views, c.order = append(c.views, v), append(c.order, "view") })
}
func (c *puppet) Tick(now ownership.Now) { c.told(now, func() { c.ticks++ }) }
func (c *puppet) Urgent(now ownership.Now, p int) {
	c.told(now, func() { c.urgent = append(c.urgent, p) })
}
func (c *puppet) Receive(now ownership.Now, e ownership.Envelope) {
	c.told(now, func() {
		c.mail, c.mailAt, c.order = append(c.mail, e), append(c.mailAt, now), append(c.order, "message")
		c.mailTicks = append(c.mailTicks, c.ticks)
	})
}

func (c *puppet) Take() ownership.Effects {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := c.effects
	c.effects = ownership.Effects{}
	return out
}

func (c *puppet) Route(p int) ownership.Route {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.routes[p]
}

func (c *puppet) Idle() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.idle
}

func (c *puppet) Settled() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.settled
}

func (c *puppet) Status(ownership.Now) ownership.Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	st := c.left
	st.Held, st.Copies = 5, len(c.mail)
	return st
}

// do changes the puppet; what it changes shows after the next tick at the latest.
func (c *puppet) do(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f()
}

func (c *puppet) route(p int, r ownership.Route) {
	c.do(func() {
		c.routes[p] = r
		c.effects.Routes = append(c.effects.Routes, p)
	})
}

func (c *puppet) confirm(pr ownership.Progress) {
	c.do(func() { c.effects.Confirmed = append(c.effects.Confirmed, pr) })
}

// sent is a Sender that keeps everything.
type sent struct {
	mu   sync.Mutex
	list []ownership.Envelope
}

func (s *sent) Send(list []ownership.Envelope) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = append(s.list, list...)
}

func (s *sent) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.list)
}

// newPuppet starts a Runner of a puppet.
func newPuppet(t testing.TB, change ...func(*Config)) (*Runner, *puppet) {
	t.Helper()
	noLeaks(t)
	var clock atomic.Int64
	cfg := Config{
		Core: ownership.Config{Self: self, Partitions: partitions}, Sender: &sent{},
		Logger:  slog.New(slog.DiscardHandler),
		Now:     func() algo.Instant { return algo.Instant{} },
		Boot:    func() int64 { return clock.Add(1) },
		Version: func(int) uint64 { return 0 },
	}
	for _, c := range change {
		c(&cfg)
	}
	k, c := newRunner(cfg), &puppet{}
	k.start(c)
	t.Cleanup(k.Close)
	return k, c
}

func TestRoutes(t *testing.T) {
	k, c := newPuppet(t)
	first := k.Route(7)
	expect.Equal(t, *first, ownership.Route{}, "%+v", first)
	expect.Equal(t, k.Await(ended(), 7, first), first)
	owned := ownership.Route{Standing: ownership.Owned, Term: ownership.Term{N: 1}}
	const waiters = 20
	got := make(chan *ownership.Route, waiters)
	for range waiters {
		go func() { got <- k.Await(testkit.Within(t, patience), 7, first) }()
	}
	c.route(8, owned) // wakes nobody who waits for another one
	c.route(7, owned)
	for range waiters {
		r := <-got
		expect.True(t, *r == owned && r != first, "%+v", r)
	}
	expect.Equal(t, *first, ownership.Route{}, "a published route has changed")
	// One that is out of date is not waited for.
	second := k.Await(ended(), 7, first)
	expect.Equal(t, *second, owned, "%+v", second)
	// That holds also where it has come to the same once more, and for a waiter that nothing ends.
	before := *second
	expect.Equal(t, k.Await(&impatient{Context: context.Background(), t: t}, 7, &before), second)
	// What has not changed is the same one still.
	c.route(7, owned)
	c.route(9, owned)
	testkit.Eventually(t, "the last is there", func() bool { return *k.Route(9) == owned })
	expect.Equal(t, k.Route(7), second, "published anew without a change")
}

// impatient is a context that nobody may wait for.
type impatient struct {
	context.Context
	t *testing.T
}

func (c *impatient) Done() <-chan struct{} {
	c.t.Error("a route that is out of date is waited for")
	return ended().Done()
}

func TestProgress(t *testing.T) {
	var version atomic.Uint64
	k, c := newPuppet(t, func(cfg *Config) { cfg.Version = func(int) uint64 { return version.Load() } })
	type answer struct{ degraded, ok bool }
	await := func(version uint64, strict bool) answer {
		degraded, ok := k.AwaitProgress(ended(), 3, version, strict)
		return answer{degraded, ok}
	}
	yes, degraded, no := answer{false, true}, answer{true, true}, answer{}
	all := uint64(math.MaxUint64)
	for i, step := range []struct {
		version  uint64
		progress ownership.Progress
		// by ticket, for other rules and for strict ones
		want map[uint64][2]answer
	}{
		{0, ownership.Progress{}, map[uint64][2]answer{0: {yes, yes}, 1: {no, no}}},
		{5, ownership.Progress{Version: 3}, map[uint64][2]answer{3: {yes, yes}, 4: {no, no}}},
		{5, ownership.Progress{Version: 2}, map[uint64][2]answer{3: {yes, yes}}}, // never back
		{5, ownership.Progress{Version: all, Unguarded: true},
			map[uint64][2]answer{3: {yes, yes}, 4: {degraded, no}, 5: {degraded, no}, 6: {no, no}}},
		{6, ownership.Progress{Version: all, Unguarded: true, StrictToo: true},
			map[uint64][2]answer{3: {yes, yes}, 6: {degraded, degraded}, 7: {no, no}}},
		// Another copy is there: all is not all that is yet to come.
		{9, ownership.Progress{Version: 8}, map[uint64][2]answer{4: {yes, yes}, 8: {yes, yes}, 9: {no, no}}},
		{9, ownership.Progress{Version: all}, map[uint64][2]answer{9: {yes, yes}, 10: {no, no}}}, // handed over
	} {
		version.Store(step.version)
		step.progress.Partition = 3
		c.confirm(step.progress)
		c.confirm(ownership.Progress{Partition: 4, Version: uint64(i + 1)}) // known only after the other
		testkit.Eventually(t, "it is known", func() bool {
			_, ok := k.AwaitProgress(ended(), 4, uint64(i+1), true)
			return ok
		})
		for ticket, want := range step.want {
			expect.Equal(t, [2]answer{await(ticket, false), await(ticket, true)}, want, "step %d, ticket %d", i, ticket)
		}
	}
}

// TestProgressWakes: whoever waits is told, and those who have to wait on do.
func TestProgressWakes(t *testing.T) {
	k, c := newPuppet(t)
	const waiters = 50
	var given atomic.Int64
	var waiting sync.WaitGroup
	for i := range waiters {
		waiting.Go(func() {
			degraded, ok := k.AwaitProgress(testkit.Within(t, patience), 3, uint64(i+1), i%2 == 0)
			expect.True(t, !degraded && ok, "%d: %v, %v", i, degraded, ok)
			given.Add(1)
		})
	}
	c.confirm(ownership.Progress{Partition: 4, Version: 100})
	c.confirm(ownership.Progress{Partition: 3, Version: 20})
	testkit.Eventually(t, "twenty are told", func() bool { return given.Load() == 20 })
	c.confirm(ownership.Progress{Partition: 3, Version: waiters})
	waiting.Wait()
}

// TestUrgent: of many signals for a partition, at least one comes after the last; they are not one each.
func TestUrgent(t *testing.T) {
	k, c := newPuppet(t)
	c.gate.Lock()
	var callers sync.WaitGroup
	for range 4 {
		callers.Go(func() {
			for range 1000 {
				for _, p := range []int{0, 63, 64, partitions - 1} {
					k.Urgent(p)
				}
			}
		})
	}
	callers.Wait()
	c.gate.Unlock()
	all := func() (list []int) {
		c.do(func() { list = slices.Clone(c.urgent) })
		return list
	}
	testkit.Eventually(t, "all are told", func() bool {
		list := slices.Sorted(slices.Values(all()))
		return slices.Equal(slices.Compact(list), []int{0, 63, 64, partitions - 1})
	})
	n := len(all())
	expect.True(t, n <= 8, "told %d times", n) // one was perhaps in flight when the rest came
	k.Urgent(5)
	testkit.Eventually(t, "one more is told", func() bool { return slices.Contains(all(), 5) })
}

// TestMailIsBounded: a core that is busy for long loses messages and keeps its memory.
func TestMailIsBounded(t *testing.T) {
	k, c := newPuppet(t)
	c.gate.Lock()
	const messages = 3 * maxMail >> 20
	chunk := make([]byte, 1<<20)
	for i := range messages {
		k.Receive([]ownership.Envelope{{From: other,
			Message: &ownership.Block{Position: uint64(i), Entries: []ownership.Entry{{Chunk: chunk}}}}})
	}
	lost := int(k.Stats().Lost)
	// Some may have been taken before the core was held up.
	kept := messages - lost
	expect.True(t, kept >= maxMail>>20-1 && kept <= maxMail>>20+mailAtOnce, "%d were kept", kept)
	c.gate.Unlock()
	testkit.Eventually(t, "the rest is received", func() (all bool) {
		c.do(func() { all = len(c.mail) == messages-lost })
		return all
	})
	for i := 1; i < len(c.mail); i++ {
		must.True(t, c.mail[i].Message.(*ownership.Block).Position > c.mail[i-1].Message.(*ownership.Block).Position,
			"out of order")
	}
	// There is room again.
	k.Receive([]ownership.Envelope{{From: other, Message: &ownership.ReadRecords{}}})
	testkit.Eventually(t, "it is received", func() (all bool) {
		c.do(func() { all = len(c.mail) == messages-lost+1 })
		return all
	})
	expect.Equal(t, int(k.Stats().Lost), lost, "are lost")
}

// TestMailOvertakes: what others wait for does not stand behind the content of partitions, which goes on all the same.
func TestMailOvertakes(t *testing.T) {
	var box mailbox
	for i := range 5 {
		box.add(&ownership.Envelope{Message: &ownership.Block{}})
		box.add(&ownership.Envelope{Message: &ownership.Commit{Attachment: uint64(2 * i),
			Chunk: make([]byte, 200<<10)}})
		box.add(&ownership.Envelope{Message: &ownership.Commit{Attachment: uint64(2*i + 1)}})
	}
	var got string
	for next := uint64(0); !box.empty(); got += "|" {
		for _, e := range box.take(nil, 4) {
			if c, ok := e.Message.(*ownership.Commit); !ok {
				got += "B"
			} else if c.Attachment == next {
				got += "c"
				next++
			} else {
				t.Errorf("%d in place of %d", c.Attachment, next)
			}
		}
	}
	want := "ccccB|ccccB|ccB|B|B|"
	expect.Equal(t, got, want)
	expect.True(t, box.light.weight == 0 && box.bulk.weight == 0, "%+v", box)
}

// TestTicksGoOn: time passes for the core however much mail there is.
func TestTicksGoOn(t *testing.T) {
	k, c := newPuppet(t)
	ctx, cancel := context.WithCancel(context.Background())
	var flood sync.WaitGroup
	defer flood.Wait()
	defer cancel()
	flood.Go(func() {
		for ctx.Err() == nil {
			k.Receive([]ownership.Envelope{{From: other, Message: &ownership.ReadRecords{}}})
		}
	})
	var urgent int
	for i := range 5 {
		k.Urgent(i)
		testkit.Eventually(t, "a tick and what is urgent", func() (ok bool) {
			c.do(func() {
				ok = c.ticks > i && len(c.urgent) > i
				urgent = len(c.urgent)
			})
			return ok
		})
	}
	expect.Equal(t, urgent, 5, "urgent")
}

// TestClocks: no call to the core is given an earlier reading of the clocks than the one before, and no message one
// from before it arrived.
func TestClocks(t *testing.T) {
	var clock atomic.Int64
	k, c := newPuppet(t, func(cfg *Config) { cfg.Boot = func() int64 { return clock.Add(1) } })
	const messages = 200
	for i := range messages {
		k.Receive([]ownership.Envelope{{From: other, Message: &ownership.ReadRecords{ID: uint64(clock.Load())}}})
		k.Urgent(i % partitions)
		k.SetView(ownership.View{})
	}
	testkit.Eventually(t, "all has arrived", func() (ok bool) {
		c.do(func() { ok = len(c.mail) == messages && len(c.views) > 0 && len(c.urgent) > 0 })
		return ok
	})
	c.do(func() {
		for i := 1; i < len(c.nows); i++ {
			must.True(t, c.nows[i].Boot >= c.nows[i-1].Boot, "%v after %v", c.nows[i], c.nows[i-1])
		}
		for i, e := range c.mail {
			arrived := int64(e.Message.(*ownership.ReadRecords).ID)
			must.True(t, c.mailAt[i].Boot > arrived, "received at %d what arrived after %d", c.mailAt[i].Boot, arrived)
		}
	})
}

func TestBootTime(t *testing.T) {
	start := time.Now()
	before := BootTime()
	expect.True(t, before > 0, "%v", before)
	testkit.Eventually(t, "it goes on", func() bool { return BootTime()-before >= int64(5*time.Millisecond) })
	took := time.Since(start)
	expect.True(t, took >= 4*time.Millisecond && took <= patience/2, "5 ms took %v", took)
}

func TestMessagesAndNotes(t *testing.T) {
	var log testkit.Buffer
	out := &sent{}
	k, c := newPuppet(t, func(cfg *Config) {
		cfg.Sender = out
		cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
	})
	claimed, moved := ownership.Term{N: 1}, ownership.Term{Epoch: 1, N: 9}
	c.do(func() {
		c.effects.Messages = []ownership.Envelope{{From: self, To: other, Message: &ownership.ReadRecords{ID: 1}},
			{From: self, To: other, Message: &ownership.ReadRecords{ID: 2}}}
		for p := range partitions {
			c.effects.Notes = append(c.effects.Notes,
				ownership.Note{What: "claimed", Partition: p, Term: claimed, Detail: "new"})
		}
		c.effects.Notes = append(c.effects.Notes,
			ownership.Note{What: "handed over", Partition: 7, Term: moved, Other: other})
	})
	testkit.Eventually(t, "the notes are taken in", func() bool { return k.Stats().Events["handed over"] == 1 })
	expect.True(t, !strings.Contains(log.String(), "ownership changed"),
		"notes are logged before others can have come that say the same")
	k.Close() // which writes what is held
	expect.Equal(t, out.count(), 2, "are sent")
	for _, want := range []string{
		fmt.Sprintf(`msg="ownership changed" event=claimed count=130 partition=0 term=%v detail=new`, claimed),
		fmt.Sprintf(`msg="ownership changed" event="handed over" count=1 partition=7 term=%v other=other`, moved),
	} {
		expect.Equal(t, strings.Count(log.String(), want), 1, "not once: %s\n%s", want, log.String())
	}
	s := k.Stats()
	expect.True(t, s.Events["claimed"] == partitions && s.Events["handed over"] == 1 && len(s.Events) == 2, "%+v", s)
}

func TestStatus(t *testing.T) {
	k, c := newPuppet(t)
	st, ok := k.Status()
	expect.True(t, ok && st.Held == 5 && !st.Settled && !k.Settled(), "%+v", st)
	c.do(func() { c.settled = true })
	testkit.Eventually(t, "it is settled", k.Settled)
	st, ok = k.Status()
	expect.True(t, ok && st.Settled, "%+v", st)
}

func view(members ...ownership.Member) ownership.View { return ownership.View{Members: members} }

func active(n ownership.Node) ownership.Member { return ownership.Member{Node: n, Active: true} }

func TestViews(t *testing.T) {
	k, c := newPuppet(t)
	last := func() (v ownership.View) {
		c.do(func() {
			if len(c.views) > 0 {
				v = c.views[len(c.views)-1]
			}
		})
		return v
	}
	c.gate.Lock()
	for range 100 {
		k.SetView(view(active(self)))
	}
	k.SetView(view(active(self), active(other)))
	c.gate.Unlock()
	testkit.Eventually(t, "the last view is seen", func() bool { return len(last().Members) == 2 })
	if n := len(c.views); n > 3 || last().Leaving {
		t.Errorf("%d views, %+v", n, last())
	}
}

func TestDrain(t *testing.T) {
	owned := ownership.Route{Standing: ownership.Owned}
	drain := func(k *Runner, ctx context.Context) <-chan error {
		got := make(chan error, 1)
		go func() { got <- k.Drain(ctx) }()
		return got
	}
	leaving := func(c *puppet) (yes bool) {
		c.do(func() { yes = len(c.views) > 0 && c.views[len(c.views)-1].Leaving })
		return yes
	}
	// hold has the Runner hold two partitions.
	hold := func(t *testing.T, k *Runner, c *puppet) {
		c.route(1, owned)
		c.route(2, ownership.Route{Standing: ownership.Frozen})
		testkit.Eventually(t, "two are held", func() bool { return k.held.Load() == 2 })
	}
	wait := func(t *testing.T, got <-chan error) error {
		t.Helper()
		select {
		case err := <-got:
			return err
		case <-time.After(patience):
			t.Fatal("still waiting")
			return nil
		}
	}
	t.Run("all is given away", func(t *testing.T) {
		k, c := newPuppet(t)
		k.SetView(view(active(self), active(other)))
		hold(t, k, c)
		got := drain(k, testkit.Within(t, patience))
		testkit.Eventually(t, "the core knows", func() bool { return leaving(c) })
		c.route(1, ownership.Route{Standing: ownership.Elsewhere, Node: other})
		k.SetView(view(active(self), active(other), active(ownership.Node{Name: "third", Boot: 3})))
		testkit.Eventually(t, "the core knows of the third", func() (yes bool) {
			c.do(func() { yes = len(c.views[len(c.views)-1].Members) == 3 })
			return yes
		})
		if !leaving(c) || len(got) > 0 {
			t.Errorf("leaving: %v, returned: %d", leaving(c), len(got))
		}
		// Neither what is on its way here nor the only copy of something is left behind.
		for _, left := range []ownership.Status{{Stranded: 1}, {Arriving: 1}} {
			var ticks int
			c.do(func() { c.left, ticks = left, c.ticks })
			c.route(2, ownership.Route{Standing: ownership.Elsewhere, Node: other})
			testkit.Eventually(t, "the runner has looked", func() (yes bool) {
				k.Receive([]ownership.Envelope{{From: other, Message: &ownership.ReadRecords{}}})
				c.do(func() { yes = c.ticks > ticks+2 })
				return yes && k.held.Load() == 0
			})
			expect.True(t, len(got) == 0, "returned although there is %+v left", left)
		}
		c.do(func() { c.left = ownership.Status{} })
		k.Receive([]ownership.Envelope{{From: other, Message: &ownership.ReadRecords{}}})
		expect.NoError(t, wait(t, got))
	})
	t.Run("nothing is held", func(t *testing.T) {
		k, _ := newPuppet(t)
		k.SetView(view(active(self), active(other)))
		expect.NoError(t, wait(t, drain(k, testkit.Within(t, patience))))
	})
	t.Run("nobody is there", func(t *testing.T) {
		k, c := newPuppet(t)
		k.SetView(view(active(self), active(other)))
		hold(t, k, c)
		got := drain(k, testkit.Within(t, patience))
		testkit.Eventually(t, "the core knows", func() bool { return leaving(c) })
		k.SetView(view(active(self), ownership.Member{Node: other})) // it leaves, too
		err := wait(t, got)
		expect.True(t, errors.Is(err, ErrNobody) && strings.Contains(err.Error(), "2 are still held"), "%v", err)
	})
	t.Run("time is up", func(t *testing.T) {
		k, c := newPuppet(t)
		k.SetView(view(active(self), active(other)))
		hold(t, k, c)
		ctx, cancel := context.WithCancel(context.Background())
		got := drain(k, ctx)
		testkit.Eventually(t, "the core knows", func() bool { return leaving(c) })
		cancel()
		err := wait(t, got)
		expect.True(t, errors.Is(err, context.Canceled) && strings.Contains(err.Error(), "2 partitions"), "%v", err)
	})
	t.Run("closed", func(t *testing.T) {
		k, c := newPuppet(t)
		k.SetView(view(active(self), active(other)))
		hold(t, k, c)
		got := drain(k, testkit.Within(t, patience))
		testkit.Eventually(t, "the core knows", func() bool { return leaving(c) })
		k.Close()
		err := wait(t, got)
		expect.True(t, err != nil && !errors.Is(err, ErrNobody), "%v", err)
	})
}

// TestCloseReleases: everybody who waits returns, and everything may still be called.
func TestCloseReleases(t *testing.T) {
	k, _ := newPuppet(t)
	var waiting sync.WaitGroup
	var began sync.WaitGroup
	for i := range 10 {
		began.Add(1)
		waiting.Go(func() {
			began.Done()
			if i%2 == 0 {
				old := k.Route(i)
				expect.Equal(t, k.Await(testkit.Within(t, time.Hour), i, old), old)
			} else if _, ok := k.AwaitProgress(testkit.Within(t, time.Hour), i, 1, false); ok {
				t.Error("given")
			}
		})
	}
	began.Wait()
	k.Close()
	waiting.Wait()
	k.Close()
	k.SetView(ownership.View{})
	k.Receive([]ownership.Envelope{{Message: &ownership.ReadRecords{}}})
	k.Urgent(1)
	_, ok := k.Status()
	expect.True(t, !ok, "status of a closed Runner")
	_ = k.Stats()
}

// outlet is a Sender that calls a function.
type outlet func([]ownership.Envelope)

func (f outlet) Send(list []ownership.Envelope) { f(list) }

// TestMessagesComeLast: whoever is answered because of a message finds what it says published already.
func TestMessagesComeLast(t *testing.T) {
	var k *Runner
	term := ownership.Term{N: 7 << 16}
	seen := make(chan string, 1)
	sender := outlet(func([]ownership.Envelope) {
		_, confirmed := k.AwaitProgress(ended(), 3, 9, false)
		select {
		case seen <- fmt.Sprintf("%v %v", k.Route(3).Term == term, confirmed):
		default:
		}
	})
	k, c := newPuppet(t, func(cfg *Config) { cfg.Sender = sender })
	c.do(func() {
		c.routes[3] = ownership.Route{Standing: ownership.Owned, Term: term}
		c.effects = ownership.Effects{
			Routes: []int{3}, Confirmed: []ownership.Progress{{Partition: 3, Version: 9}},
			Messages: []ownership.Envelope{{From: self, To: other, Message: &ownership.Forget{}}},
		}
	})
	expect.Equal(t, <-seen, "true true", "when a message goes out, route and confirmation are published")
}

// TestMailComesBeforeTicks: what has arrived is received before the tick that judges others by what they have not
// answered.
func TestMailComesBeforeTicks(t *testing.T) {
	k := newRunner(Config{
		Core: ownership.Config{Self: self, Partitions: partitions}, Sender: &sent{},
		Logger: slog.New(slog.DiscardHandler),
		Now:    func() algo.Instant { return algo.Instant{} }, Boot: func() int64 { return 0 },
	})
	c := &puppet{}
	k.begin(c)
	k.mail.add(&ownership.Envelope{From: other, To: self, Message: &ownership.Forget{}})
	tick := make(chan time.Time, 1)
	tick <- time.Time{}
	k.step(tick)
	expect.True(t, slices.Equal(c.mailTicks, []int{0}) && c.ticks == 1,
		"a message was received after %v ticks of %d", c.mailTicks, c.ticks)
}

// TestIdle: an idle core ticks ten times a second, and as often as any other from the first change on.
func TestIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newRunner(Config{
			Core: ownership.Config{Self: self, Partitions: partitions}, Sender: &sent{},
			Logger: slog.New(slog.DiscardHandler),
			Now:    func() algo.Instant { return algo.Instant{} }, Boot: func() int64 { return 0 },
		})
		c := &puppet{}
		k.start(c)
		defer k.Close()
		during := func(d time.Duration, more func()) (ticks int) {
			c.do(func() { ticks = c.ticks })
			more()
			time.Sleep(d)
			synctest.Wait()
			c.do(func() { ticks = c.ticks - ticks })
			return ticks
		}
		n := during(time.Second, func() {})
		expect.True(t, n == 100, "a busy core ticks %d times a second", n)
		during(idleEvery, func() { c.do(func() { c.idle = true }) })
		n = during(time.Second, func() {})
		expect.True(t, n == 10, "an idle core ticks %d times a second", n)
		n = during(tickEvery, k.Changed)
		expect.True(t, n == 1, "a change is followed by %d ticks within %v", n, tickEvery)
		n = during(time.Second, func() { c.do(func() { c.idle = false }); k.Changed() })
		expect.True(t, n == 100, "a core that is busy again ticks %d times a second", n)
	})
}

// TestViewsComeFirst: a message of a process that has just come into view is received under that view.
func TestViewsComeFirst(t *testing.T) {
	k, c := newPuppet(t)
	k.mu.Lock()
	k.mail.add(&ownership.Envelope{From: other, To: self, Message: &ownership.Forget{}})
	k.view = &ownership.View{}
	k.mu.Unlock()
	k.wake.Set()
	order := func() (got []string) {
		c.do(func() { got = slices.Clone(c.order) })
		return got
	}
	testkit.Eventually(t, "all is received", func() bool { return len(order()) == 2 })
	got := order()
	expect.True(t, slices.Equal(got, []string{"view", "message"}), "received in the order %v", got)
}
