// Package limiter is the service itself: it finds the node that decides for a key, decides if that is this node,
// otherwise forwards, and answers by the policy's on_error if that node cannot be reached.
//
// It knows neither wires nor sockets: front ends call the Service interface, Config.Peers reaches other nodes, and
// Config.Ownership names the node that decides for a partition. plan.go describes the path of one check.
//
// What it does not promise: that counters outlive their owner (the Ownership moves and copies them, through Data), or
// that several keys of one batch are decided at one instant (each owner decides its part on its own clock).
package limiter

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/fairshare"
	"github.com/weirlimit/weir/internal/fifo"
	"github.com/weirlimit/weir/internal/lend"
	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/store"
)

// Ownership tells which node decides for a partition now. Its methods are safe for concurrent use.
type Ownership interface {
	// Route says where a partition's checks are decided. The route is not to be changed.
	Route(partition int) *ownership.Route
	// Await waits until the partition has another route than old, or ctx is done, and returns the present one.
	Await(ctx context.Context, partition int, old *ownership.Route) *ownership.Route
	// AwaitProgress waits until an answer with this store.Answer.Ticket may be given. ok is false when it may not be,
	// for ctx was done before; degraded says that it is given although no copy has what it admits, which is not done to
	// strict ones unless it is on record that there is no copy.
	AwaitProgress(ctx context.Context, partition int, ticket uint64, strict bool) (degraded, ok bool)
}

// Peers carries operations to other nodes. Forward fills in the Outcome of each operation, and returns once all are
// filled in or ctx is done; those that could not be answered get an Unreachable outcome. It must not retry an operation
// that may have been carried out, except so that the receiver can tell that it is the same one. Once it has returned it
// touches neither ops nor what is in it: they are used again.
type Peers interface {
	Forward(ctx context.Context, to ownership.Node, ops []*Op)
}

// Unknown says how a check of a policy that does not exist is answered.
type Unknown uint8

// The ways to answer it. Only the owner of the key answers: an entry node may simply have an older policy file.
const (
	UnknownError Unknown = 0 // with an error of kind NotFound
	UnknownAllow Unknown = 1 // admitted, without a limit
	UnknownDeny  Unknown = 2 // refused, never to pass
)

// DefaultTimeout bounds how long a check may take when neither the caller nor Config says otherwise.
const DefaultTimeout = time.Second

// MaxHops bounds the nodes that an operation passes: the one that was asked, one that it is forwarded to, and one that
// this hands it on to.
const MaxHops = 3

// Config is what a Limiter needs. The zero value is a node alone, without policies and without bounds.
type Config struct {
	Store     *store.Store // from NewStore; nil: one without bounds
	Ownership Ownership    // nil: this node decides for everything, from the start
	Peers     Peers        // only used for holders other than this node
	// Self is this process, under whose name it borrows units of keys that others hold; without a Boot, or without
	// Peers, it borrows none. Member returns the member that a boot is of, which can be asked for what it has borrowed.
	// Nil: none.
	Self          ownership.Node
	Member        func(boot uint64) (node ownership.Node, ok bool)
	Policies      *policy.Set // nil: none
	UnknownPolicy Unknown     // zero: UnknownError
	NoInline      bool        // refuse limits sent along with a request
	Disk          bool        // Store's partitions are followed by a disk, for policies with Persist
	// InlineMaxWindow is the longest window of a limit sent along, and the longest time that a bucket may take to come
	// back; 0: no bound. InlineMaxKeys and InlineMaxMemory bound the keys of each namespace, and the bytes of their
	// states; 0: no bound.
	InlineMaxWindow                time.Duration
	InlineMaxKeys, InlineMaxMemory int64
	Timeout                        time.Duration // longest time for a call; 0 stands for DefaultTimeout
	HashKey                        ring.HashKey  // places keys; the same on every node
	// MaxInFlight bounds the operations of all callers and peers that wait here, for other nodes or for copies; 0
	// stands for DefaultMaxInFlight. Beyond it they are answered by on_error at once. Of named callers none has all of
	// them: see internal/fairshare.
	MaxInFlight int
	Logger      *slog.Logger // nil: none
	// Clock is read once for each batch and owner. Nil stands for ProcessClock().
	Clock func() algo.Instant
	// BootClock is the clock of leases and loans, which goes on while the machine is suspended. Nil stands for the Mono
	// of Clock.
	BootClock func() int64
	// Random draws the sample of checks by which keys are found that are worth a loan. It is called by several
	// goroutines at a time. Nil: rand.Uint32.
	Random func() uint32
	// Tracer, when not nil, makes spans of what is done for callers whose calls are traced.
	Tracer Tracer
	// Recorder, when not nil, is told of a sample of the decisions.
	Recorder Recorder
	// Panicked is called with each panic, which was recovered, of what is done behind answers: atomic checks settled,
	// loans reported and called back. Nil: such a panic is not recovered.
	Panicked func(*panics.Error)
	// Members returns how many nodes the cluster has, for on_error: share, under which each admits its part of a limit.
	// Nil: one.
	Members func() int
}

// Limiter is a node's service. Its methods are safe for concurrent use. Close ends its two lasting goroutines: one
// sweeps idle states and brings live ones under changed policies, the other reports what this node has on loan.
type Limiter struct {
	cfg   Config
	store *store.Store
	clock func() algo.Instant
	log   *slog.Logger
	table atomic.Pointer[table]
	alone bool // no other node is known
	// Ahead has the processor fetch a route that is going to be asked for; nil: there is no need.
	routes interface{ Ahead(partition int) }
	stats  *statsByPolicy
	sample sampler
	load   load
	inline inlineRules
	shares *store.Store // of on_error: share

	// Of *Batch, for CheckTo, by size: the least power of two that is not below their checks, the last for 1024.
	batches [11]sync.Pool

	refusals  lend.Refusals[refusalKey, limit.Decision] // of checks that other nodes decide
	settling  background
	estimates estimator // of policies that learn how much to reserve
	loans     loans
	borrowing *borrowing // nil: this node borrows nothing

	changed fifo.Signal // the policies
	quit    chan struct{}
	done    chan struct{}
	closing sync.Once
}

var _ BatchService = (*Limiter)(nil)

// New returns a running Limiter.
func New(cfg Config) *Limiter {
	if cfg.Timeout <= 0 {
		cfg.Timeout = DefaultTimeout
	}
	if cfg.MaxInFlight <= 0 {
		cfg.MaxInFlight = DefaultMaxInFlight
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Clock == nil {
		cfg.Clock = ProcessClock()
	}
	if cfg.BootClock == nil {
		cfg.BootClock = func() int64 { return cfg.Clock().Mono }
	}
	if cfg.Store == nil {
		cfg.Store = NewStore(store.Config{}, cfg.Ownership == nil)
	}
	l := &Limiter{
		cfg:     cfg,
		store:   cfg.Store,
		shares:  newShares(),
		clock:   cfg.Clock,
		log:     cfg.Logger,
		stats:   newStatsByPolicy(),
		changed: fifo.NewSignal(),
		quit:    make(chan struct{}),
		done:    make(chan struct{}),
	}
	l.settling.panicked = cfg.Panicked
	l.settling.running.SetLimit(maxBackground)
	l.loans.start()
	l.inline.hashKey, l.inline.stats = cfg.HashKey, l.stats.inline
	l.inline.longest, l.inline.maxKeys, l.inline.maxBytes = cfg.InlineMaxWindow, cfg.InlineMaxKeys, cfg.InlineMaxMemory
	l.load.places = fairshare.New(cfg.MaxInFlight)
	l.sample.start(cfg.Recorder)
	for i := range l.batches {
		l.batches[i].New = func() any { return new(Batch) }
	}
	if cfg.Ownership == nil {
		l.cfg.Ownership, l.alone = &alone{Standing: ownership.Owned}, true
	}
	l.routes, _ = cfg.Ownership.(interface{ Ahead(partition int) })
	l.table.Store(l.compile(cfg.Policies))
	if cfg.Peers != nil && cfg.Self.Boot != 0 {
		l.borrowing = startBorrowing(l)
	}
	go l.tend()
	return l
}

// Close stops the Limiter's goroutines and waits for them, and for the settling of atomic checks that were answered.
// Calls in flight are not interrupted.
func (l *Limiter) Close() {
	l.closing.Do(func() { close(l.quit) })
	<-l.done
	l.borrowing.stop()
	l.settling.close()
}

// SetPolicies puts a new set of policies into force for every check that starts afterwards. Live states are brought
// under it in the background, within about a second for some millions of them, and each at its next check at the
// latest.
func (l *Limiter) SetPolicies(set *policy.Set) {
	l.table.Store(l.compile(set))
	l.estimates.Keep(func(name string) bool {
		p, ok := set.Get(name)
		return ok && p.EstimateAuto
	})
	l.changed.Set()
}

// Policies returns the set in force.
func (l *Limiter) Policies() *policy.Set { return l.table.Load().set }

// Store returns the size of this node's store.
func (l *Limiter) Store() store.Stats { return l.store.Stats() }

// Shares returns what the policies, the namespaces of inline limits and the callers have in this node's store, each in
// order of bytes, the largest first; see store.Store.Shares.
func (l *Limiter) Shares() (policies, namespaces, callers []store.Share) { return l.store.Shares() }

const (
	sweepEvery = 100 * time.Millisecond
	// sweepParts is how many sweeps one pass over a store of any size is spread over: a state is dropped within 25 s of
	// becoming idle, and a late tick or some still leave it within 30.
	sweepParts = 250
	// sweepsAMinute bounds how often a full store is logged.
	sweepsAMinute = int(time.Minute / sweepEvery)
)

// tend sweeps, and reconciles after a change of policies, until Close.
func (l *Limiter) tend() {
	defer close(l.done)
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	var full, shares uint64 // calls refused for want of room, as last logged
	quiet := sweepsAMinute  // sweeps since then
	for {
		select {
		case <-l.quit:
			return
		case <-l.changed:
			l.store.Reconcile(l.clock, l.table.Load().stateOf)
		case <-tick.C:
			now := l.clock()
			l.store.Sweep(now, sweepParts)
			l.shares.Sweep(now, sweepParts)
			l.sample.tick(now.Mono)
			if quiet++; quiet >= sweepsAMinute && l.store.Refused() > full+shares {
				st := l.store.Stats()
				l.log.Warn("store full", "hint", "checks of new keys are answered by on_error", "calls", st.Full-full,
					"calls_over_share", st.ShareFull-shares, "keys", st.Keys, "max_keys", st.MaxKeys, "bytes", st.Bytes,
					"max_bytes", st.MaxBytes)
				full, shares, quiet = st.Full, st.ShareFull, 0
			}
		}
	}
}

// alone is the ownership of a node without others: the route of all partitions.
type alone ownership.Route

func (a *alone) Route(int) *ownership.Route { return (*ownership.Route)(a) }

func (a *alone) Await(context.Context, int, *ownership.Route) *ownership.Route { return a.Route(0) }

func (*alone) AwaitProgress(context.Context, int, uint64, bool) (degraded, ok bool) {
	return true, true
}

// alonePartitions is the number of partitions of a Limiter that has no others to share them with. They are only what
// locks and tables go by then, and fewer and larger tables are less to wait for in memory and less for the garbage
// collector to look at.
const alonePartitions = 512

// NewStore returns a store for a Limiter, with the bounds of cfg and with Partitions, Shut and ShareOf as a Limiter
// needs them. A Limiter that is to be alone, without Ownership, has fewer partitions, within the bounds that all of
// them have together elsewhere.
func NewStore(cfg store.Config, alone bool) *store.Store {
	cfg.Partitions, cfg.Shut, cfg.ShareOf = ring.Partitions, !alone, limit.ShareOf
	if !alone {
		return store.New(cfg)
	}
	cfg.Partitions = alonePartitions
	const more = ring.Partitions / alonePartitions
	if cfg.MaxRequestIDs == 0 {
		cfg.MaxRequestIDs = store.DefaultRequestIDs
	}
	cfg.MaxRequestIDs *= more
	return store.New(cfg)
}

func (l *Limiter) partition(hash uint64) int {
	if l.alone {
		return int(hash % alonePartitions)
	}
	return ring.Partition(hash)
}

// wallEvery is how long the distance of the wall clock from the monotonic one is taken not to have changed.
const wallEvery = 10 * time.Millisecond

// ProcessClock returns a clock that counts monotonic nanoseconds from now on. Its wall time notices within 10 ms that
// the system's has been set: to read both each time would take twice as long, and only windows of the calendar look at
// it.
func ProcessClock() func() algo.Instant {
	start := time.Now()
	var ahead, until atomic.Int64 // of the wall clock, good until that Mono
	ahead.Store(start.UnixNano())
	until.Store(int64(wallEvery))
	return func() algo.Instant {
		mono := int64(time.Since(start))
		if mono >= until.Load() {
			t := time.Now()
			mono = int64(t.Sub(start))
			ahead.Store(t.UnixNano() - mono)
			until.Store(mono + int64(wallEvery))
		}
		return algo.Instant{Mono: mono, Wall: mono + ahead.Load()}
	}
}

// Check implements Service.
func (l *Limiter) Check(ctx context.Context, checks []limit.Check) ([]limit.Result, error) {
	if err := limit.ValidBatch(len(checks)); err != nil {
		return nil, err
	}
	results := make([]limit.Result, len(checks))
	if err := l.CheckTo(ctx, checks, nil, results); err != nil {
		return nil, err
	}
	return results, nil
}

// Acquire implements Service.
func (l *Limiter) Acquire(ctx context.Context, a limit.Acquire) (limit.Decision, error) {
	check := limit.Check{Target: a.Target, Cost: a.Cost, RequestID: a.RequestID}
	return l.decided(ctx, NewOp(OpAcquire, check, Extra{TTL: a.TTL}), nil)
}

// Renew implements Service.
func (l *Limiter) Renew(ctx context.Context, t limit.Target, leaseID string, ttl time.Duration) (time.Duration, error) {
	op := NewOp(OpRenew, limit.Check{Target: t}, Extra{LeaseID: leaseID, TTL: ttl})
	err := l.single(ctx, op, nil)
	return op.Reply.ExpiresIn, err
}

// Release implements Service.
func (l *Limiter) Release(ctx context.Context, t limit.Target, leaseID string) (bool, error) {
	op := NewOp(OpRelease, limit.Check{Target: t}, Extra{LeaseID: leaseID})
	err := l.single(ctx, op, nil)
	return op.Reply.Released, err
}

// Refund implements Service.
func (l *Limiter) Refund(ctx context.Context, t limit.Target, units int64, requestID string) (int64, error) {
	op := NewOp(OpRefund, limit.Check{Target: t, Cost: units, RequestID: requestID}, Extra{})
	err := l.single(ctx, op, nil)
	return op.Reply.Refunded, err
}

// Reset implements Service.
func (l *Limiter) Reset(ctx context.Context, t limit.Target) error {
	return l.single(ctx, NewOp(OpReset, limit.Check{Target: t}, Extra{}), nil)
}

// decided is single for an operation that has a decision.
func (l *Limiter) decided(ctx context.Context, op *Op, bad *limit.Error) (limit.Decision, error) {
	err := l.single(ctx, op, bad)
	return *op.Decision, err
}

// single carries out one operation from a front end, unless bad says what is wrong with it.
func (l *Limiter) single(ctx context.Context, op *Op, bad *limit.Error) error {
	if bad == nil {
		bad = l.plan(l.table.Load(), op)
	}
	if bad != nil {
		return bad
	}
	if err := l.expired(ctx, 1); err != nil {
		return err
	}
	l.run(ctx, op)
	return op.err()
}
