// Package runner runs an ownership core: it gives the core its clocks, messages and views, and carries out the core's
// effects.
//
// One goroutine owns the core (Runner.run). All others read what that goroutine has published, or queue something for
// it. The path of what they queue:
//
//  1. Receive, Urgent and Changed of the Inbox, and SetView, Drain and Status of the Runner, queue it and wake the
//     goroutine.
//  2. step waits to be woken or for the next tick. turn gives the core what is queued: a view, then what is urgent,
//     then messages. tick lets time pass.
//  3. carryOut takes the core's effects. It publishes routes and progress, and hands blocks to the disk.
//  4. post wakes the goroutines that wait for progress, and sends the messages to other nodes.
//  5. A caller reads a route (Route), or waits for a change of it (Await). It waits until its answer may be given
//     (AwaitProgress).
//
// Words:
//
//	ticket    the version that the store gives to an answer that must wait; a later change of the partition has a
//	          higher version
//	degraded  of an answer: it is given although a copy that it should wait for is missing
//	strict    of an answer: it is of a strict rule
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
	// tickEvery is the time between two ticks of the core; idleEvery is the same while the core is idle.
	tickEvery = 10 * time.Millisecond
	idleEvery = 100 * time.Millisecond
	// mailAtOnce is how many messages the core receives in one turn.
	mailAtOnce = 256
)

// Sender sends messages to other nodes; see replica.Messenger. Send must not block, nor keep the slice.
type Sender interface {
	Send([]ownership.Envelope)
}

// Disk takes the blocks for the disk of this process; see disk.Disk. Send must not block. When Err returns an error,
// the disk has failed and writes nothing any more.
type Disk interface {
	Send(*ownership.Block)
	Err() error
}

// Config is what a Runner needs. All fields but Inbox and Disk are required.
type Config struct {
	Core   ownership.Config
	Sender Sender
	Inbox  *Inbox              // nil: the Runner makes one
	Disk   Disk                // nil: there is none
	Now    func() algo.Instant // the clock of decisions, which the limiter reads too
	Boot   func() int64        // the clock of leases: BootTime, except in tests
	// Version returns the highest ticket of a partition's answers so far, or a higher number. It never falls. The
	// goroutine that calls Core.Data calls it.
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

	// Queued for the goroutine that owns the core. The mutex of the Inbox guards these fields.
	*Inbox
	view    *ownership.View   // the newest, until the core has it
	leaving bool              // every view is to have Leaving
	asked   []chan<- Status   // callers of Status
	events  map[string]uint64 // the number of notes so far, by Note.What

	// Published by that goroutine.
	routes   []atomic.Pointer[route]
	progress []progress
	settled  atomic.Bool
	held     atomic.Int64  // partitions whose routes are Owned or Frozen
	drained  chan struct{} // closed when this node leaves and holds nothing any more, or no other node can take it

	// Only for that goroutine.
	core   core
	batch  []ownership.Envelope // the messages of this turn
	outbox []ownership.Envelope // the messages that post sends
	risen  []chan struct{}      // the channels that post closes
	seen   ownership.View       // the view that the core has
	viewed bool                 // the core has a view
	closed bool                 // drained is closed

	journal journal // of notes, for the log
}

// route is a published Route.
type route struct {
	ownership.Route
	replaced chan struct{} // closed when another Route is published
}

// progress says up to which ticket a partition's answers may be given. The numbers only rise. A waiter leaves a
// channel, which is closed after the next rise.
type progress struct {
	// These are for answers that wait for the backup.
	confirmed atomic.Uint64 // the backup has them
	strict    atomic.Uint64 // degraded: there is no backup, and a majority of voters has recorded that
	unguarded atomic.Uint64 // degraded, only if not strict: there is no backup, or its confirmation does not count
	// These are for answers that wait for the backup and the disk (ownership.Saved).
	saved   atomic.Uint64 // the disk has them, and so has the backup, if there is one
	bare    atomic.Uint64 // degraded: the backup or the disk is detached
	waiting atomic.Pointer[chan struct{}]
}

// wait returns a channel that is closed after the next rise. The caller must look at the numbers after this call: it
// sees a rise there, or the channel is closed.
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

// verdict says whether the answer with a ticket may be given (ok), and whether it is degraded then.
func (p *progress) verdict(version uint64, strict bool) (degraded, ok bool) {
	ticket := version &^ ownership.Saved
	switch {
	case ticket != version:
		// saved must be read first. When one of the two is detached, bare is raised before the other one raises saved.
		saved := ticket <= p.saved.Load()
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

// begin gives the Runner its core, and publishes the core's routes.
func (k *Runner) begin(c core) {
	k.core = c
	for p := range k.routes {
		k.routes[p].Store(&route{Route: c.Route(p), replaced: make(chan struct{})})
	}
}

// Close stops the Runner. All callers that wait return, and what the Runner has published stays as it is.
func (k *Runner) Close() {
	k.stop()
	k.work.Wait()
}

// SetView gives the core a new view. If SetView is called again before the core has the view, the core gets the last
// one only.
func (k *Runner) SetView(v ownership.View) {
	k.mu.Lock()
	k.view = &v
	k.mu.Unlock()
	k.wake.Set()
}

// Route says where a partition's checks are decided. The caller must not change it. It takes no lock.
func (k *Runner) Route(p int) *ownership.Route { return &k.routes[p].Load().Route }

// Ahead makes the processor fetch a partition's route, for a call of Route that follows soon.
func (k *Runner) Ahead(p int) { prefetch.Line(unsafe.Pointer(k.routes[p].Load())) }

// Await waits until the partition has another route than old, and returns that route. old must come from Route or
// Await. If ctx ends first, or the Runner is closed, Await returns old.
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

// AwaitProgress waits until the answer with the ticket version may be given, and says whether the answer is degraded. A
// strict answer waits until the backup has confirmed it, or a majority of voters has recorded that there is no backup.
// ok is false if the answer may not be given, because ctx has ended first, or the Runner was closed.
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

// Settled reports whether this node holds exactly the partitions that a settled view gives it (Core.Settled).
func (k *Runner) Settled() bool { return k.settled.Load() }

// ErrNobody says that there is no other active member to give partitions to.
var ErrNobody = errors.New("runner: there is no other node to give partitions to")

// Drain makes this node give all partitions to other nodes, and waits until the node holds none and has no copy that is
// still needed. It returns early with an error if there is no other node (ErrNobody), ctx ends, or the Runner is
// closed. After any error the node still goes on giving its partitions away.
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

// Status is a summary of what the core holds and does.
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

// now reads the clocks. All messages of a turn share one reading, which is made after they were taken from the mailbox.
// So no message is received at an instant before its arrival, and the ages in it do not begin too early.
func (k *Runner) now() ownership.Now { return ownership.Now{Instant: k.cfg.Now(), Boot: k.cfg.Boot()} }

// run is the goroutine that owns the core.
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

// step waits until there is something to do, and does it, or a part of it. A turn comes before a tick: the tick may be
// late, and it decides about other nodes by the answers that have not come. step reports whether it has ticked.
func (k *Runner) step(tick <-chan time.Time) (due bool) {
	select {
	case <-k.wake:
	case <-tick:
		due = true
	case <-k.ctx.Done():
	}
	k.turn()
	if due {
		k.idle.Store(true) // before the tick looks for changes: a later change sets it to false (Changed)
		k.tick()
	}
	return due
}

// tick lets time pass in the core. It also writes the journal, and tells the core if the disk has failed.
func (k *Runner) tick() {
	k.journal.write(k.cfg.Logger, k.cfg.Now().Mono, false)
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

// turn gives the core what is queued for it, at most mailAtOnce messages.
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
	clear(k.batch) // only the array is used again
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

// hurry passes the partitions that are urgent to the core (Inbox.Urgent).
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

// unneeded reports whether a node that holds nothing may end: it has accepted no offer that is still open, and has no
// copy of a partition whose holder is lost.
func (k *Runner) unneeded() bool {
	st := k.core.Status(k.now())
	return st.Arriving == 0 && st.Stranded == 0
}

// others reports whether another member is active, so that it may take partitions.
func (k *Runner) others() bool {
	return slices.ContainsFunc(k.seen.Members,
		func(m ownership.Member) bool { return m.Active && m.Node != k.cfg.Core.Self })
}

// carryOut carries out the core's effects. Messages to other nodes, and the channels of waiters, gather until post.
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

// post wakes the waiters of confirmed partitions, and sends the messages that have gathered. It runs after carryOut, so
// a caller that waits for several partitions in turn finds all of them confirmed.
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

// publish publishes a partition's route, if it is another one.
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

// confirm raises the number that a Progress is about. MaxUint64 stands for all answers that wait now. Answers that will
// wait for another backup have higher tickets.
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

// record counts notes, and adds them to the journal, which writes them to the log.
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
}
