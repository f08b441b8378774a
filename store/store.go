// Package store keeps the states that a node decides on: by partition, locked per shard, bounded in keys and bytes, and
// swept of states that equal new ones.
//
// States live in pages without pointers (see algo.Arena), and are found through open-addressed tables of 64-bit words,
// so that neither the garbage collector's work nor the bytes of a key depend on strings and structs.
//
// A partition has a gate, which is opened and shut under the lock that decisions take; followers, whose copies it keeps
// up to date by chunks of what has changed; and a staging area, in which a copy is received that replaces the content
// or is joined with it.
//
// What it does not promise: durability (what a disk gets, package disk writes), any knowledge of the cluster (others
// decide when the gate is open and who follows), or order between callers other than that of the lock.
package store

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/timezone"
)

// Rule is what applies to a key: the scope that gives the state its identity together with the key, and the limits.
// It must not change while in use. Two Rules with the same scope and equal limits are the same rule.
type Rule struct {
	// Scope is the policy's name or stands for an inline limit's namespace, algorithm and shape. The caller makes
	// sure that different things never share one.
	Scope      string
	Limits     algo.Limits
	Durability Durability
	// Strict rules are decided under a lease only, see Store.Lease.
	Strict bool
	// Ban is how long a key is refused after it has been refused; 0: no longer than its limits say. Not beside limits
	// with CountDenied.
	Ban time.Duration
	// Persist says that the disk is told of the keys, too, if there is one (ownership.Disk).
	Persist bool
	// ReleaseExpired says that a reservation gives back its units when its ttl ends without a Settle, as if it were
	// settled with nothing to keep. Otherwise they stay charged. It holds for reservations and extensions that are made
	// under the rule; ReserveOnce is not affected. Not part of the rule's identity.
	ReleaseExpired bool
	// ColdClosed makes a new key start full where what an earlier holder counted is lost, see Store.Cold. Not part of
	// the rule's identity, and not told to followers: keys that have a record have begun.
	ColdClosed bool
	// MaxKeys and MaxBytes bound what all keys of the rule's share (Config.ShareOf) take on this node, copies included;
	// 0: no bound. A new key beyond them is refused with ErrShareFull. Bytes are bounded by the page: a share may
	// exceed them by what is left of pages in use. Not part of the rule's identity, and not told to followers.
	MaxKeys, MaxBytes int64
}

// Guarded says that the rule needs a lease, or that its answers may have to wait for the backup or the disk, or are
// degraded without them.
func (r *Rule) Guarded() bool { return r.Durability >= Escrow || r.Strict || r.Persist }

// Durability says what an answer waits for, so that what it admitted outlives this process.
type Durability uint8

// The durabilities.
const (
	Async  Durability = 0 // nothing: the followers hear of it soon
	None   Durability = 1 // nothing, and followers hear of it only when the partition moves
	Escrow Durability = 2 // nothing, up to an amount that the backup has been told to take for spent
	Sync   Durability = 3 // the backup's confirmation
)

// Key is one key of a scope, hashed once by the caller.
type Key struct {
	Hash      uint64 // of scope and key
	Partition int    // that the hash falls into
	Key       string
}

// Call is what a Decide is to do besides the Request itself.
type Call struct {
	algo.Request
	// RequestID is the caller's, or empty. A charge under an id that is known for the key is not made again.
	RequestID string
	// Boot is the present reading of the boot clock, which strict rules compare with their lease.
	Boot int64
	// Reservation, when it is not zero, is an id under which the charge is remembered for ReserveFor, until Settle ends
	// it. With ReserveOnce the Settle is not going to be repeated, and what came of it is not remembered. With Extend
	// the charge is added to the reservation of that id, if it is admitted, and all of it is remembered for ReserveFor,
	// or where that is 0 for as long as before; a Cost of 0 charges nothing more. The error is ErrNotPending when there
	// is no such reservation. Release is ReleaseExpired for this reservation alone.
	Reservation ReservationID
	ReserveFor  time.Duration
	ReserveOnce bool
	Release     bool
	Extend      bool
	// Spent says, of a Request with Always, that what it charges is spent already: the answer refuses nothing, a ban
	// does not change it, and it begins none.
	Spent bool
	// Whole says that nothing is to be charged of a Partial request that units on loan keep from being granted as a
	// whole, nor of one with Always that finds no room because of them: the Answer has them in OnLoan then.
	Whole bool
	// Caller names the caller, to whose share a new key is counted; empty: not known.
	Caller string
}

// Answer is a Decision and when it may be given.
type Answer struct {
	algo.Decision
	// Ticket is 0 when the answer may be given at once. Otherwise it is the partition's version that its backup must
	// have confirmed before; with ownership.Saved in it the disk as well.
	Ticket uint64
	// Decided without the current backup that the rule's durability asks for, or the disk that Persist asks for.
	Degraded bool
	Until    int64 // of strict rules: the instant of the boot clock from which the answer may no longer be given
	Pending  bool  // reservations on the key are waiting for their Settle
	Banned   bool  // the key is banned, see Rule.Ban: for that, and perhaps for its limits, the request is refused
	Bans     bool  // the key is banned from now on
	Free     int64 // of a key that is banned: what Remaining would be without the ban
	// OnLoan is how many units are on loan, where a request was refused that passes at some time, see also Whole:
	// whether it is refused, or for how long, depends on how many of them have been spent. What is left of them may be
	// called back, see Recall. It is 0 everywhere else. OnLoanFor is the time until all of those loans have ended.
	OnLoan    int64
	OnLoanFor time.Duration
	// Reservation is the id under which the charge is remembered: of a repeated request, that of the first.
	Reservation ReservationID
}

// Renewal is the answer to Renew.
type Renewal struct {
	Alive    bool          // the lease had not ended
	Left     time.Duration // it now has so long to live
	Ticket   uint64        // as in Answer, like the rest
	Degraded bool
	Until    int64
}

// Errors. None of them charges or changes anything, but where Apply's comment says so.
var (
	// ErrFull means that the store is at its bound of keys or bytes, nothing idle was found to make room, and the call
	// would have needed a new state or a larger one.
	ErrFull = errors.New("store: full")
	// ErrShareFull is an ErrFull, of which the bound of the rule's share is the reason, or that its share or its caller
	// has more than a fair part of a store that is short of memory.
	ErrShareFull = fmt.Errorf("%w: the share's bound is reached, or its fair part", ErrFull)
	// ErrRequestID means that the request id was used before with another cost, or for another kind of charge: one
	// without a reservation, one that makes one, one that adds to a certain one.
	ErrRequestID = errors.New("store: request id used before with another cost or for another operation")
	// ErrReserved means that a reservation is to keep more than it charged.
	ErrReserved = errors.New("store: more than what was reserved")
	// ErrExcess means that a reservation is to keep more than it charged by more than its caller may charge.
	ErrExcess = errors.New("store: more than what was reserved by more than the largest limit")
	// ErrNotPending means that there is no reservation to extend: it has ended or expired.
	ErrNotPending = errors.New("store: no such reservation")
	// ErrReservations means that no more reservations may be pending, ErrShareReservations that their caller has more
	// than a fair portion of the last of them, and ErrKeyReservations that no more may be of the key. All are an
	// ErrFull.
	ErrReservations      = fmt.Errorf("%w: too many reservations", ErrFull)
	ErrShareReservations = fmt.Errorf("%w: %w", ErrReservations, ErrShareFull)
	ErrKeyReservations   = fmt.Errorf("%w of one key", ErrReservations)
	// ErrCopyFull is an ErrFull of Apply.
	ErrCopyFull = fmt.Errorf("%w: %w", ErrFull, ownership.ErrFull)
	// ErrShut means that the partition is not open here.
	ErrShut = errors.New("store: partition is shut")
	// ErrNoGrant means that the rule is strict, and there is no lease, or no current backup without which it may be
	// decided.
	ErrNoGrant = errors.New("store: no lease for a strict rule")
	// ErrHeld means that a chunk was to be applied to a content that is open.
	ErrHeld = errors.New("store: partition is open")
)

// Config bounds a Store. The zero value of a bound means none, except where a default is named.
type Config struct {
	Partitions int   // number of partitions; 0 stands for 1
	MaxKeys    int64 // states kept at most; 0: no bound
	MaxBytes   int64 // bytes of memory for states, tables and remembered request ids; 0: no bound
	// MaxRequestIDs bounds the remembered request ids per partition; 0 stands for DefaultRequestIDs, negative: none.
	// Beyond an eighth of MaxBytes for all of them, a partition keeps what fits its even share of that.
	MaxRequestIDs int
	// MaxReservations bounds the pending reservations of all keys together, and MaxKeyReservations those of one key;
	// what extends a reservation is one more. 0 stands for DefaultReservations and DefaultKeyReservations, negative:
	// none.
	MaxReservations    int
	MaxKeyReservations int
	Shut               bool // partitions begin shut
	// Copies says that copies of others' partitions come here: the last sixteenth of keys and bytes is theirs, so that
	// new keys, and states that grow, find no room before copies do.
	Copies bool
	// ShareOf names the share that a scope's keys are counted to, and whether callers can invent such names (inline):
	// shares of that kind have one fair part of the store together. It must always say the same of a scope. Nil: each
	// scope is a share of its own, and none is inline.
	ShareOf func(scope string) (share string, inline bool)
	// Urgent, when not nil, is called when Drain for the backup of a partition is wanted at once. It is called under
	// locks and must neither block nor call the Store.
	Urgent func(partition int)
	// Changed, when not nil, is called when a partition comes to be among those that Store.Changed names, under the
	// same rules as Urgent.
	Changed func()
}

// DefaultRequestIDs is the number of request ids that a partition remembers unless Config says otherwise.
const DefaultRequestIDs = 10_000

// DefaultReservations is the number of reservations that may be pending in a Store unless its Config says otherwise,
// and DefaultKeyReservations that of one key.
const (
	DefaultReservations    = 200_000
	DefaultKeyReservations = 2_000
)

const (
	maxShards = 256 // a power of two, as every number of shards is: a division costs as much as a look-up
	// reclaimScan is how many records a call that finds the store full looks at for idle ones before it gives up. The
	// next such call goes on where this one stopped, and the sweep goes on besides.
	reclaimScan = 1024
	// reclaimPause is how long after such a search in vain the next call does without one, so that a flood of new keys
	// does not take the processor away from the keys that are there: a search takes about 0.1 ms.
	reclaimPause = time.Millisecond
	// copyReserve is the part of the store, as a fraction 1/copyReserve, that is kept for copies, see Config.Copies.
	copyReserve = 16
	// sweepHold is how many records a sweep looks at while it holds one shard's lock.
	sweepHold = 256
)

var _ ownership.Data = (*Store)(nil)

// Store holds states. Its methods are safe for concurrent use.
//
// To the ownership core it is what the node holds of the partitions: what its methods demand and do for that is said at
// ownership.Data.
type Store struct {
	cfg    Config
	shards []shard
	shift  int // log₂ of the number of shards
	budget budget
	zones  timezone.Cache // of limits in chunks
	keys   atomic.Int64
	shares shares
	full   atomic.Uint64 // calls answered ErrFull
	// expired are units on loan that were charged because their loans had ended.
	expired atomic.Uint64
	// Calls answered ErrShareFull.
	shareFull atomic.Uint64
	barren    atomic.Int64  // the Mono instant until which it is not worth looking for idle states again
	swept     atomic.Uint64 // idle states dropped
	// A bit for each partition: something has come to be pending, see Changed.
	changed []atomic.Uint64

	reclaimMu sync.Mutex
	hand      hand // guarded by reclaimMu
}

// hand is a place in the order in which records are looked at when room is made.
type hand struct {
	shard, part int
	slot        uint32
}

// New returns an empty Store.
func New(cfg Config) *Store {
	cfg.Partitions = cmp.Or(cfg.Partitions, 1)
	cfg.MaxRequestIDs = cmp.Or(cfg.MaxRequestIDs, DefaultRequestIDs)
	cfg.MaxReservations = cmp.Or(cfg.MaxReservations, DefaultReservations)
	cfg.MaxKeyReservations = cmp.Or(cfg.MaxKeyReservations, DefaultKeyReservations)
	shift := bits.Len(uint(min(maxShards, cfg.Partitions))) - 1
	n := 1 << shift
	s := &Store{cfg: cfg, shards: make([]shard, n), shift: shift}
	s.budget.max = cfg.MaxBytes
	s.shares.init(cfg)
	s.changed = make([]atomic.Uint64, (cfg.Partitions+63)/64)
	for i := range s.shards {
		sh := &s.shards[i]
		sh.store = s
		sh.budget.budget, sh.budget.sh = &s.budget, sh
		sh.arena = algo.NewArena(&sh.budget)
		// Partition p lives in shard p mod n, at index p div n.
		sh.partitions = make([]partition, (cfg.Partitions-i+n-1)/n)
		sh.specOf = make(map[specKey][]uint32)
		for j := range sh.partitions {
			sh.partitions[j].open = !cfg.Shut
		}
	}
	return s
}

// Stats is a reading of a Store's size.
type Stats struct {
	Keys     int64
	Bytes    int64  // as counted against MaxBytes
	MaxKeys  int64  // 0: no bound
	MaxBytes int64  // 0: no bound
	Full     uint64 // calls refused for want of room in the store, ever
	// ShareFull is the calls refused because a share has reached its own bound, ever; Full those refused because the
	// store has no room, or none but its reserve.
	ShareFull uint64
	Swept     uint64 // idle states dropped, ever
	Copies    int64  // of Keys: those in partitions that are shut, and in staging areas
	Pending   int64  // changes that followers have not been told yet
	// RequestIDsLost are the request ids that were not remembered, or not for as long as they should be, for want of
	// room.
	RequestIDsLost uint64
	Reservations   int64 // pending, copies included
	// ReservationsRejected are the reservations and extensions that were not made for a bound on their number, ever.
	ReservationsRejected uint64
}

// Stats returns the Store's present size.
func (s *Store) Stats() Stats {
	st := Stats{
		Keys: s.keys.Load(), Bytes: s.budget.used.Load(), MaxKeys: s.cfg.MaxKeys, MaxBytes: s.cfg.MaxBytes,
		Full: s.full.Load(), ShareFull: s.shareFull.Load(), Swept: s.swept.Load(),
		RequestIDsLost: s.budget.memosLost.Load(),
		Reservations:   s.budget.reservations.Load(), ReservationsRejected: s.budget.reservationsRejected.Load(),
	}
	s.eachPartition(func(part *partition) {
		if !part.open {
			st.Copies += int64(part.count)
		}
		if part.role != nil {
			st.Copies += int64(part.role.staging.count)
		}
		for slot := range part.pending {
			st.Pending += int64(part.pending[slot].Load())
		}
	})
	return st
}

// Refused is the sum of Full and ShareFull, without the look at all partitions that Stats takes.
func (s *Store) Refused() uint64 { return s.full.Load() + s.shareFull.Load() }

// eachPartition calls f for every partition, under the lock of its shard.
func (s *Store) eachPartition(f func(*partition)) {
	for i := range s.shards {
		sh := &s.shards[i]
		sh.locked(func() {
			for j := range sh.partitions {
				f(&sh.partitions[j])
			}
		})
	}
}

func (s *Store) at(p int) (*shard, *partition) {
	sh := &s.shards[p&(len(s.shards)-1)]
	return sh, &sh.partitions[p>>s.shift]
}

// Decide decides one call on the key's state, making the state where there is none and it is needed. each is nil or has
// room for one Decision per limit. A refusal or a peek leaves no new state behind.
func (s *Store) Decide(k Key, rule *Rule, now algo.Instant, call Call, each []algo.Decision) (a Answer, err error) {
	err = s.DecideTo(&k, rule, now, &call, each, &a)
	return a, err
}

// DecideTo is Decide with the answer in *a, which is to be zero before and is of no use when there is an error; see
// algo.Limits.DecideTo. Nothing is kept of what is pointed to.
func (s *Store) DecideTo(k *Key, rule *Rule, now algo.Instant, call *Call, each []algo.Decision,
	a *Answer) (err error) {
	sh, part := s.at(k.Partition)
	sh.mu.Lock()
	defer func() {
		if sh.unlock(); err == errNoRoom || err == errShare {
			err = s.decideFull(k, rule, now, call, each, a, err)
		}
	}()
	of := part.concernsOf(rule) | call.ownConcerns()
	if part.open && of&^concernBan == 0 && sh.plain(part, k, rule, now, &call.Request, each, &a.Decision) {
		return nil
	}
	return sh.decide(part, k, rule, now, call, each, a)
}

// DecideKnown is DecideTo for what nearly all calls are: about a key that is kept under the very rule, and of whose
// change no follower has to be told. It reports false, and nothing has happened, for all others. *d is written whatever
// it held.
func (s *Store) DecideKnown(k *Key, rule *Rule, now algo.Instant, r *algo.Request, d *algo.Decision) bool {
	sh, part := s.at(k.Partition)
	sh.mu.Lock()
	defer sh.unlock()
	return part.open && part.concernsOf(rule)&^concernBan == 0 && sh.plain(part, k, rule, now, r, nil, d)
}

// decideFull is DecideTo for a call that has found no room, for the reason err: in the store (errNoRoom) or in its
// share (errShare).
func (s *Store) decideFull(k *Key, rule *Rule, now algo.Instant, call *Call, each []algo.Decision, a *Answer,
	err error) error {
	sh, part := s.at(k.Partition)
	// Another shard may hold the idle states that can make way, so no lock is held while looking for them. One of them
	// may not be enough for a page to become free: each time twice as many are looked for.
	for enough := 1; ; enough *= 2 {
		if now.Mono < s.barren.Load() {
			return s.refusedRoom(err, rule, call.Caller)
		}
		if !s.makeRoom(now, enough) || enough > reclaimScan {
			s.barren.Store(now.Mono + int64(reclaimPause))
			continue
		}
		*a = Answer{}
		sh.locked(func() { err = sh.decide(part, k, rule, now, call, each, a) })
		if err != errNoRoom && err != errShare {
			return err
		}
	}
}

// refusedRoom counts a call that found no room, and returns the error that says so; it returns other errors as they
// are.
func (s *Store) refusedRoom(err error, rule *Rule, caller string) error {
	switch {
	case err == errShare && !s.shares.short(s.keys.Load(), s.budget.used.Load()):
		s.shareFull.Add(1)
	case err == errShare, err == errNoRoom:
		s.full.Add(1)
	default:
		return err
	}
	if err == errNoRoom {
		return ErrFull
	}
	s.shares.refused(rule.Scope, caller)
	return ErrShareFull
}

// Reconcile gives every state the rule that now applies to it, so that a changed policy takes effect at the moment of
// the change and not at the key's next check. apply returns the rule for a scope and key, or nil to leave the state as
// it is. It is called under a shard's lock, which is let go every few hundred records; key is only valid during the
// call. A state may be passed over when its partition's table changes its size in between: it then waits for its next
// check.
func (s *Store) Reconcile(now func() algo.Instant, apply func(scope string, key []byte) *Rule) {
	h := hand{}
	for shards := 0; shards < len(s.shards); {
		at := now()
		_, passed := s.walk(&h, sweepHold, at, func(sh *shard, part *partition, slot uint32) bool {
			if !part.open {
				return false // a copy is under its holder's rules
			}
			r := sh.record(part.ref(slot))
			if rule := apply(r.spec.rule.Scope, r.key); rule != nil {
				// For want of memory the state keeps its old rule until its next check.
				_, _ = sh.adopted(part, slot, rule, at)
			}
			return false
		})
		if passed {
			shards++
		}
	}
}

// Sweep drops records that are as good as new, in one part of a pass over all partitions that goes on where the last
// call stopped: that many calls in a row look at every record, however many there are and come and go meanwhile. steps
// must be positive; with 1 it looks at all of them. It holds no lock for longer than a few hundred records take. It
// returns how many were dropped.
func (s *Store) Sweep(now algo.Instant, steps int) int {
	// One more in all, because a pass begins in the middle of a partition.
	return s.sweep(now, math.MaxInt, s.cfg.Partitions/steps+1, math.MaxInt)
}

// DropIdle drops the records of a partition that are as good as new. A restored partition needs it once it is whole:
// the disk is not told which records are swept, and may have more of them than there is room for. It advances the
// states that stay to now.
func (s *Store) DropIdle(p int, now algo.Instant) {
	sh, part := s.at(p)
	sh.locked(func() {
		for slot := uint32(0); slot < uint32(len(part.index)); {
			if part.index[slot] == 0 || !sh.dispensable(&part.content, sh.record(part.ref(slot)), now) {
				slot++
				continue
			}
			sh.drop(&part.table, slot) // another record may take its place
		}
		part.shrink(&sh.budget)
	})
}

// makeRoom drops some idle records, gives back the pages that shards keep spare, and reports whether there were any of
// either.
func (s *Store) makeRoom(now algo.Instant, enough int) bool {
	made := s.sweep(now, reclaimScan, math.MaxInt, enough) > 0
	for i := range s.shards {
		sh := &s.shards[i]
		sh.locked(func() { made = sh.arena.Trim() || made })
	}
	return made
}

// sweep looks at records until it has seen so many, has come through so many partitions, or has dropped enough; at each
// once at most. The last two bounds are exceeded by what it takes to look at some hundred records.
func (s *Store) sweep(now algo.Instant, records, partitions, enough int) int {
	s.reclaimMu.Lock()
	defer s.reclaimMu.Unlock()
	dropped := 0
	// One shard more than there are, because the first is entered in its middle.
	for shards := 0; records > 0 && partitions > 0 && dropped < enough && shards <= len(s.shards); {
		from := s.hand
		visited, passed := s.walk(&s.hand, min(records, sweepHold), now,
			func(sh *shard, part *partition, slot uint32) bool {
				r := sh.record(part.ref(slot))
				if part.open && r.has(lentFlag) {
					sh.expireLoans(part, r, now)
				}
				if !sh.dispensable(&part.content, r, now) {
					return false
				}
				if part.role != nil && len(part.role.advances.by) > 0 {
					sh.endAdvance(part, r.hash(), r.id())
				}
				sh.drop(&part.table, slot)
				dropped++
				return true
			})
		records -= visited
		if passed {
			partitions -= len(s.shards[from.shard].partitions) - from.part
			shards++
		} else {
			partitions -= s.hand.part - from.part
		}
	}
	s.swept.Add(uint64(dropped))
	return dropped
}

// walk calls visit for up to n records of one shard from h on, under the shard's lock. It returns how many it visited,
// and whether that was the last of the shard: h then stands at the beginning of the next one. visit returns true when
// it dropped the record it was given. What becomes due in a partition by the passing of time is done as it is entered.
func (s *Store) walk(h *hand, n int, now algo.Instant,
	visit func(*shard, *partition, uint32) bool) (visited int, passed bool) {
	sh := &s.shards[h.shard]
	sh.mu.Lock()
	defer sh.unlock()
	for ; h.part < len(sh.partitions); h.part, h.slot = h.part+1, 0 {
		part := &sh.partitions[h.part]
		if h.slot == 0 {
			sh.expireAll(part, now)
		}
		for h.slot < uint32(len(part.index)) {
			if part.index[h.slot] == 0 {
				h.slot++
				continue
			}
			if visited == n {
				return visited, false
			}
			visited++
			if !visit(sh, part, h.slot) {
				// A dropped record's place may have been taken by the next one: it is looked at again.
				h.slot++
			}
		}
		part.shrink(&sh.budget)
	}
	h.part, h.slot = 0, 0
	h.shard = (h.shard + 1) % len(s.shards)
	return visited, true
}

// budget counts the bytes of all shards against one bound.
type budget struct {
	max       int64 // 0: none
	used      atomic.Int64
	answers   atomic.Int64  // bytes of remembered answers
	loans     atomic.Int64  // bytes of loans
	memosLost atomic.Uint64 // that were forgotten before their time
	// Pending reservations of all partitions, copies included; and those that were not made for a bound, ever.
	reservations         atomic.Int64
	reservationsRejected atomic.Uint64
}

// Take implements algo.Budget.
func (b *budget) Take(bytes int) bool {
	if used := b.used.Add(int64(bytes)); b.max > 0 && used > b.max {
		b.used.Add(-int64(bytes))
		return false
	}
	return true
}

// has reports whether there is room for so many bytes.
func (b *budget) has(bytes int) bool { return b.max == 0 || b.used.Load()+int64(bytes) <= b.max }

// loansPart is the part of the bytes, as a fraction 1/loansPart, that all loans may take: they are in no share, so that
// whoever borrows most takes room from other borrowers, and not from keys.
const loansPart = 8

// mayLend reports whether there is room for another loan.
func (b *budget) mayLend() bool {
	return b.has(loanBytes) && (b.max == 0 || b.loans.Load() < b.max/loansPart)
}

// Give implements algo.Budget.
func (b *budget) Give(bytes int) { b.used.Add(-int64(bytes)) }
