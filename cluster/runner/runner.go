// Package runner runs an ownership core: it gives the core its clocks, messages and views, and carries out the core's
// effects.
//
// One goroutine owns the core. All others read what that goroutine has published, or queue something for it.
package runner

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/prefetch"
)

const (
	// tickEvery is how often the core is told that time passes, and idleEvery how often while it is idle.
	tickEvery = 10 * time.Millisecond
	idleEvery = 100 * time.Millisecond
	// mailAtOnce is how many messages the core receives before everything else has its turn again.
	mailAtOnce = 256
)

// Sender passes messages on to other nodes; see replica.Messenger. Send must not block, nor keep the slice.
type Sender interface {
	Send([]ownership.Envelope)
}

// Disk takes the blocks for the disk of this process; see disk.Disk. Send must not block. Once Err returns an error
// nothing is written any more.
type Disk interface {
	Send(*ownership.Block)
	Err() error
}

// Config is what a Runner needs. All fields but Inbox and Disk are required.
type Config struct {
	Core   ownership.Config
	Sender Sender
	Inbox  *Inbox              // what others leave for the Runner; nil: one of its own
	Disk   Disk                // nil: there is none
	Now    func() algo.Instant // the clock of decisions: the very one that the limiter reads
	Boot   func() int64        // the clock of leases: BootTime, other than in tests
	// Version returns the highest ticket that has been given for an answer of a partition, or more. It never falls. It
	// is called by the goroutine that also calls Core.Data.
	Version func(partition int) uint64
	Logger  *slog.Logger
}

// core is what a Runner needs of an ownership.Core.
type core interface {
	SetView(ownership.Now, ownership.View)
	Tick(ownership.Now)
	Urgent(ownership.Now, int)
	Receive(ownership.Now, ownership.Envelope)
	Take() ownership.Effects
	Route(int) ownership.Route
	Behind() bool
	Idle() bool
	Settled() bool
	Status(ownership.Now) ownership.Status
}

// Runner runs a core. Its methods are safe for concurrent use.
type Runner struct {
	cfg  Config
	stop func()
	ctx  context.Context // ends with Close
	work sync.WaitGroup

	// Left for the goroutine that owns the core, beside what is in the inbox, whose mutex guards this too.
	*Inbox
	view    *ownership.View   // the newest, until the core has it
	leaving bool              // every view is to say so
	asked   []chan<- Status   // who wants to know the core's status
	events  map[string]uint64 // notes so far, by what they say

	// Published by it.
	routes   []atomic.Pointer[route]
	progress []progress
	settled  atomic.Bool
	held     atomic.Int64  // partitions that routes say are Owned or Frozen
	drained  chan struct{} // closed once the core is leaving and holds nothing, or no member is there to take it

	// Its own.
	core   core
	batch  []ownership.Envelope // what it was left last
	outbox []ownership.Envelope
	risen  []chan struct{} // to be closed: see post
	seen   ownership.View  // that the core has
	viewed bool
	closed bool // drained is

	journal journal // of notes, for the log
}

// route is what is known of a partition from one instant to another.
type route struct {
	ownership.Route
	replaced chan struct{} // closed when it is no longer what is known
}

// progress says up to which ticket a partition's answers may be given: by confirmed where there is a copy, else by
// strict, else by the next. The numbers only rise. A waiter leaves a channel, which is closed after the next rise.
type progress struct {
	confirmed atomic.Uint64 // a copy has them
	strict    atomic.Uint64 // degraded: there is no copy, and that is on record
	unguarded atomic.Uint64 // degraded, but for strict rules: there is no copy
	saved     atomic.Uint64 // of tickets with ownership.Saved: a copy, if there is one, and the disk have them
	bare      atomic.Uint64 // of the same: degraded, because the copy or the disk is not there any more
	waiting   atomic.Pointer[chan struct{}]
}

// wait returns a channel that is closed after a rise that the caller has not seen, if it looks at the numbers after
// this.
func (p *progress) wait() <-chan struct{} {
	for {
		if risen := p.waiting.Load(); risen != nil {
			return *risen
		}
		risen := make(chan struct{})
		if p.waiting.CompareAndSwap(nil, &risen) {
			return risen
		}
	}
}

// verdict says whether the answer with a ticket may be given, and whether it is degraded then.
func (p *progress) verdict(version uint64, strict bool) (degraded, ok bool) {
	ticket := version &^ ownership.Saved
	switch {
	case ticket != version:
		saved := ticket <= p.saved.Load() // read first: bare is raised before what is left of the two confirms more
		degraded = ticket <= p.bare.Load()
		return degraded, saved || degraded
	case version <= p.confirmed.Load():
		return false, true
	case version <= p.strict.Load() || !strict && version <= p.unguarded.Load():
		return true, true
	}
	return false, false
}

// New starts a Runner. Before its first view it claims nothing.
func New(cfg Config) *Runner {
	k := newRunner(cfg)
	k.start(ownership.New(cfg.Core, k.now()))
	return k
}

func newRunner(cfg Config) *Runner {
	n := cfg.Core.Partitions
	k := &Runner{
		cfg: cfg, Inbox: cfg.Inbox, events: make(map[string]uint64),
		routes: make([]atomic.Pointer[route], n), progress: make([]progress, n), drained: make(chan struct{}),
	}
	if k.Inbox == nil {
		k.Inbox = NewInbox(n)
	}
	k.ctx, k.stop = context.WithCancel(context.Background())
	return k
}

func (k *Runner) start(c core) {
	k.begin(c)
	k.work.Go(k.run)
}

// begin gives the Runner its core and publishes what that knows.
func (k *Runner) begin(c core) {
	k.core = c
	for p := range k.routes {
		k.routes[p].Store(&route{Route: c.Route(p), replaced: make(chan struct{})})
	}
}

// Close stops the Runner: who waits in it returns, and what it has published stays as it is.
func (k *Runner) Close() {
	k.stop()
	k.work.Wait()
}

// SetView tells the core who is there. Of several views in a moment it may see the last one only.
func (k *Runner) SetView(v ownership.View) {
	k.mu.Lock()
	k.view = &v
	k.mu.Unlock()
	k.wake.Set()
}

// Route says where a partition's checks are decided. The caller must not change it. It takes no lock.
func (k *Runner) Route(p int) *ownership.Route { return &k.routes[p].Load().Route }

// Ahead has the processor fetch a partition's route, which is going to be asked for.
func (k *Runner) Ahead(p int) { prefetch.Line(unsafe.Pointer(k.routes[p].Load())) }

// Await waits until the partition has another route than old, which came from Route or Await, and returns it. When ctx
// ends first, or the Runner is closed, it returns old.
func (k *Runner) Await(ctx context.Context, p int, old *ownership.Route) *ownership.Route {
	r := k.routes[p].Load()
	if &r.Route != old {
		return &r.Route
	}
	select {
	case <-r.replaced:
	case <-ctx.Done():
	case <-k.ctx.Done():
	}
	return k.Route(p)
}

// AwaitProgress waits until an answer of a partition, with version as its ticket, may be given, and says whether it is
// degraded, for want of a copy. An answer of a strict rule waits until a copy has it, or it is on record that there is
// none. ok is false when it may not be given: ctx ended first, or the Runner was closed.
func (k *Runner) AwaitProgress(ctx context.Context, p int, version uint64, strict bool) (degraded, ok bool) {
	pr := &k.progress[p]
	if degraded, ok = pr.verdict(version, strict); ok {
		return degraded, ok
	}
	for {
		risen := pr.wait()
		if degraded, ok = pr.verdict(version, strict); ok {
			return degraded, ok
		}
		select {
		case <-risen:
		case <-ctx.Done():
			return false, false
		case <-k.ctx.Done():
			return false, false
		}
	}
}

// Settled says whether this node holds what it should and nothing else, under a view that has stood for a moment.
func (k *Runner) Settled() bool { return k.settled.Load() }

// ErrNobody says that there is no other active member that partitions could be given to.
var ErrNobody = errors.New("runner: there is no other node to give partitions to")

// Drain gives all partitions to other nodes, and waits until this node holds none. It returns early with an error when
// there is no other node (ErrNobody), ctx ends, or the Runner is closed. It cannot be taken back: the node goes on
// giving away.
func (k *Runner) Drain(ctx context.Context) error {
	k.mu.Lock()
	k.leaving = true
	k.mu.Unlock()
	k.wake.Set()
	select {
	case <-k.drained:
	case <-ctx.Done():
	case <-k.ctx.Done():
	}
	held := k.held.Load()
	switch {
	case held == 0 && k.isDrained():
		return nil
	case k.isDrained():
		return fmt.Errorf("%w: %d are still held", ErrNobody, held)
	case ctx.Err() != nil:
		return fmt.Errorf("runner: %d partitions are still held: %w", held, context.Cause(ctx))
	}
	return errors.New("runner: closed")
}

func (k *Runner) isDrained() bool {
	select {
	case <-k.drained:
		return true
	default:
		return false
	}
}

// Status is what a Runner can tell of its core.
type Status struct {
	ownership.Status
	Settled bool // see Runner.Settled
}

// Status returns the core's status, or false when the Runner is closed.
func (k *Runner) Status() (Status, bool) {
	answer := make(chan Status, 1)
	k.mu.Lock()
	k.asked = append(k.asked, answer)
	k.mu.Unlock()
	k.wake.Set()
	select {
	case st := <-answer:
		return st, true
	case <-k.ctx.Done():
		return Status{}, false
	}
}

// Stats are counts since the Runner was made.
type Stats struct {
	Events map[string]uint64 // partitions that were claimed, handed over and so on, by the words of ownership.Note.What
	Lost   uint64            // messages that arrived and were not looked at, because there were too many
}

// Stats returns the counts.
func (k *Runner) Stats() Stats {
	k.mu.Lock()
	defer k.mu.Unlock()
	return Stats{Events: maps.Clone(k.events), Lost: k.lost}
}

// now reads the clocks. What has arrived shares a reading made after it was taken from the mailbox: so no message is
// received at an instant before its arrival, and ages that it carries are not anchored too early.
func (k *Runner) now() ownership.Now { return ownership.Now{Instant: k.cfg.Now(), Boot: k.cfg.Boot()} }

// run owns the core.
func (k *Runner) run() {
	tick := time.NewTimer(tickEvery)
	defer tick.Stop()
	defer func() { k.journal.write(k.cfg.Logger, 0, true) }()
	slow := false // the timer runs for idleEvery
	for k.ctx.Err() == nil {
		ticked := k.step(tick.C)
		if idle := k.core.Idle() && k.idle.Load(); ticked || slow && !idle {
			if slow = idle; slow {
				tick.Reset(idleEvery)
			} else {
				tick.Reset(tickEvery)
			}
		}
	}
}

// step waits until there is something to do, and does it, or a part of it. What has arrived comes before a tick: that
// may be late, and it is then that others are judged by what they have not answered. step reports whether it has
// ticked.
func (k *Runner) step(tick <-chan time.Time) (due bool) {
	due = k.core.Behind()
	if !due {
		select {
		case <-k.wake:
		case <-tick:
			due = true
		case <-k.ctx.Done():
		}
	}
	k.turn()
	if due {
		k.idle.Store(true) // before the tick looks for changes: one that comes later ends it
		k.tick()
	}
	return due
}

// tick tells the core that time passes.
func (k *Runner) tick() {
	if !k.journal.empty() {
		k.journal.write(k.cfg.Logger, k.cfg.Now().Mono, false)
	}
	if d := k.cfg.Disk; d != nil && d.Err() != nil {
		k.cfg.Disk = nil
		k.core.Receive(k.now(), ownership.Envelope{From: ownership.DiskNode(),
			Message: &ownership.BlockAck{Lost: true}})
	}
	k.core.Tick(k.now())
	k.carryOut()
	k.post()
	k.settled.Store(k.core.Settled())
}

// turn gives the core what was left for it.
func (k *Runner) turn() {
	k.mu.Lock()
	view, leaving, asked := k.view, k.leaving, k.asked
	k.view, k.asked = nil, nil
	k.batch = k.mail.take(k.batch[:0], mailAtOnce)
	more := !k.mail.empty()
	k.mu.Unlock()
	if more {
		k.wake.Set()
	}

	if view == nil && leaving && k.viewed && !k.seen.Leaving {
		view = &k.seen
	}
	if view != nil {
		k.seen, k.viewed = *view, true
		k.seen.Leaving = k.seen.Leaving || leaving
		k.core.SetView(k.now(), k.seen)
		k.carryOut()
		k.post()
		k.settled.Store(k.core.Settled())
	}
	now := k.now()
	k.hurry(now)
	for _, e := range k.batch {
		k.core.Receive(now, e)
	}
	clear(k.batch) // the array lives on, the messages need not
	k.carryOut()
	k.post()
	if leaving && !k.closed && (k.held.Load() == 0 && k.unneeded() || !k.others()) {
		k.closed = true
		close(k.drained)
	}
	for _, answer := range asked {
		answer <- Status{Status: k.core.Status(k.now()), Settled: k.core.Settled()}
	}
}

// hurry tells the core what is urgent.
func (k *Runner) hurry(now ownership.Now) {
	for i := range k.urgent {
		if k.urgent[i].Load() == 0 {
			continue
		}
		for word := k.urgent[i].Swap(0); word != 0; word &= word - 1 {
			k.core.Urgent(now, i*64+bits.TrailingZeros64(word))
		}
	}
}

// unneeded reports whether a node that holds nothing may end: nothing is on its way to it, and it has no copy of a
// partition whose holder is lost.
func (k *Runner) unneeded() bool {
	st := k.core.Status(k.now())
	return st.Arriving == 0 && st.Stranded == 0
}

// others reports whether another node could take partitions.
func (k *Runner) others() bool {
	return slices.ContainsFunc(k.seen.Members,
		func(m ownership.Member) bool { return m.Active && m.Node != k.cfg.Core.Self })
}

// carryOut does what the core wants done, but for its messages and for waking who waits, which gather until post.
func (k *Runner) carryOut() {
	out := k.core.Take()
	for _, p := range out.Routes {
		k.publish(p, k.core.Route(p))
	}
	for _, pr := range out.Confirmed {
		k.confirm(pr)
	}
	for i := range out.Messages {
		e := out.Messages[i]
		if b, ok := e.Message.(*ownership.Block); ok && e.To == ownership.DiskNode() && k.cfg.Disk != nil {
			k.cfg.Disk.Send(b)
		} else {
			k.outbox = append(k.outbox, e)
		}
	}
	if len(out.Notes) > 0 {
		k.record(out.Notes)
	}
}

// post wakes the waiters of confirmed partitions, and sends the messages that have gathered. It does so once for many
// confirmations, so a caller that waits for several partitions in turn finds all of them confirmed.
func (k *Runner) post() {
	for _, c := range k.risen {
		close(c)
	}
	clear(k.risen)
	k.risen = k.risen[:0]
	if len(k.outbox) == 0 {
		return
	}
	k.cfg.Sender.Send(k.outbox)
	clear(k.outbox)
	k.outbox = k.outbox[:0]
}

func (k *Runner) publish(p int, now ownership.Route) {
	old := k.routes[p].Load()
	if old.Route == now {
		return
	}
	if holds(now) && !holds(old.Route) {
		k.held.Add(1)
	} else if !holds(now) && holds(old.Route) {
		k.held.Add(-1)
	}
	k.routes[p].Store(&route{Route: now, replaced: make(chan struct{})})
	close(old.replaced)
}

func holds(r ownership.Route) bool {
	return r.Standing == ownership.Owned || r.Standing == ownership.Frozen
}

// confirm notes that answers may be given. All of them means: all that wait now. Answers that will wait for another
// copy have higher versions.
func (k *Runner) confirm(c ownership.Progress) {
	if c.Version == math.MaxUint64 {
		c.Version = k.cfg.Version(c.Partition)
	}
	pr := &k.progress[c.Partition]
	number := &pr.unguarded
	switch {
	case c.Saved && c.Unguarded:
		number = &pr.bare
	case c.Saved:
		number = &pr.saved
	case !c.Unguarded:
		number = &pr.confirmed
	case c.StrictToo:
		number = &pr.strict
	}
	if number.Load() >= c.Version {
		return
	}
	number.Store(c.Version) // by this goroutine only
	if risen := pr.waiting.Swap(nil); risen != nil {
		k.risen = append(k.risen, *risen)
	}
}

// record counts notes, and logs them, or has the journal keep them for a moment.
func (k *Runner) record(notes []ownership.Note) {
	now := k.cfg.Now().Mono
	k.mu.Lock()
	for _, n := range notes {
		k.events[n.What]++
	}
	k.mu.Unlock()
	for _, n := range notes {
		k.journal.add(n, now)
	}
	k.journal.write(k.cfg.Logger, now, false)
}
