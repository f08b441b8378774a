package limiter

import (
	"strings"
	"sync"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
)

// MaxRemember is how long a refusal is remembered at most. So long, less what is left of its retry_after, a check may
// be refused although somebody else's refund, reset or raised limit would let it pass.
const MaxRemember = time.Second

// drift is the share of an interval by which two clocks may disagree about it: each is taken to run wrong by a
// thousandth at most, the one fast and the other slow.
const drift = 500

// Refusals remembers refusals, so that who asks again while nothing can have changed is answered where it asks. A state
// that refuses n units now, and will until retry_after, refuses them until then whatever else is admitted. More units it
// refuses for longer, and fewer perhaps not: a refusal answers the cost it was given for and no other. It must not depend on
// more than the units in use: K must stand for one state under one set of limits, and the caller leaves out partial checks,
// peeks, count_denied, leases, and states on which a reservation is pending.
//
// It holds a fixed number of refusals and lets go of the one that ends first when it needs room. Instants are those of
// one monotonic clock, in nanoseconds. A hash is of a state, so that Forget finds all K of one; of two states with one hash,
// each is answered by its own K only, and forgotten with the other. Its methods are safe for concurrent use; the zero value is ready, and takes memory only once there is something to remember.
type Refusals[K comparable, D any] struct {
	shards [refusalShards]refusalShard[K, D]
}

const (
	refusalShards = 64 // locks, so that callers do not wait for one another
	refusalSets   = 32 // of each shard
	refusalWays   = 4  // places where the refusal of one hash may be
)

type refusalShard[K comparable, D any] struct {
	mu    sync.Mutex
	mark  uint64              // rises when something is forgotten
	slots []refusalSlot[K, D] // nil until the first is remembered
}

type refusalSlot[K comparable, D any] struct {
	hash uint64
	key  K
	Refusal[D]
}

// Refusal is what is remembered: an answer to a cost, from the instant Came at which it arrived until the instant Until.
type Refusal[D any] struct {
	Decision    D
	Cost        int64
	Came, Until int64
}

func (r *Refusals[K, D]) shard(hash uint64) *refusalShard[K, D] { return &r.shards[hash%refusalShards] }

// set is where the refusals of a hash may be.
func (s *refusalShard[K, D]) set(hash uint64) []refusalSlot[K, D] {
	if s.slots == nil {
		return nil
	}
	i := int(hash/refusalShards%refusalSets) * refusalWays
	return s.slots[i : i+refusalWays]
}

// Find returns the refusal that answers a cost, if one is remembered. Otherwise mark is to be handed to Remember with
// the answer to the question that is about to be sent, and found.Until is that of a refusal that would have answered, had it
// not ended; 0 when there is none.
func (r *Refusals[K, D]) Find(hash uint64, k K, cost, now int64) (found Refusal[D], mark uint64, ok bool) {
	s := r.shard(hash)
	s.mu.Lock()
	defer s.mu.Unlock()
	set := s.set(hash)
	for i := range set {
		if e := &set[i]; e.hash == hash && e.Cost == cost && e.key == k {
			if now < e.Until {
				return e.Refusal, s.mark, true
			}
			found.Until = e.Until
		}
	}
	return found, s.mark, false
}

// Mark is the mark that Find returns, for a question that must be asked anyway.
func (r *Refusals[K, D]) Mark(hash uint64) uint64 {
	s := r.shard(hash)
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mark
}

// Remember keeps a refusal. The mark says when its question was sent: if anything was forgotten since, the answer may
// be older than what made it void, and is not kept.
func (r *Refusals[K, D]) Remember(hash uint64, k K, mark uint64, refusal Refusal[D]) {
	if refusal.Until <= refusal.Came {
		return
	}
	s := r.shard(hash)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mark != mark {
		return
	}
	if s.slots == nil {
		s.slots = make([]refusalSlot[K, D], refusalSets*refusalWays)
	}
	set := s.set(hash)
	at := 0
	for i := range set {
		if set[i].hash == hash && set[i].Cost == refusal.Cost && set[i].key == k {
			at = i
			break
		}
		if set[i].Until < set[at].Until {
			at = i
		}
	}
	set[at] = refusalSlot[K, D]{hash, k, refusal}
}

// Forget forgets every refusal of a hash, and those that are under way.
func (r *Refusals[K, D]) Forget(hash uint64) {
	s := r.shard(hash)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mark++
	s.forget(hash)
}

// Admitted forgets every refusal of a hash, since a charge has been answered that was or may have been admitted: who was
// refused more has to wait for longer.
func (r *Refusals[K, D]) Admitted(hash uint64) {
	s := r.shard(hash)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forget(hash)
}

func (s *refusalShard[K, D]) forget(hash uint64) {
	set := s.set(hash)
	for i := range set {
		if set[i].hash == hash {
			set[i] = refusalSlot[K, D]{}
		}
	}
}

// Remembered is how long a refusal with such a RememberFor is good for, counted from the moment its question was sent.
func Remembered(rememberFor time.Duration) time.Duration {
	return Shortened(min(rememberFor, MaxRemember))
}

// Shortened is a duration of another node's that has surely not passed there when this much has passed here.
func Shortened(d time.Duration) time.Duration { return d - d/drift - 1 }

// Aged is what is left of a duration of another node's, age after its answer came: at least that, as clocks may differ, and
// at most two thousandths of age more than by this clock.
func Aged(d, age time.Duration) time.Duration {
	if d == algo.Never {
		return d
	}
	return max(d-age+(age+drift-1)/drift, 0)
}

// refusalKey stands for a state under one version of its limits, as far as this node knows them.
type refusalKey struct {
	table  *table      // of a policy
	inline *inlineRule // of a limit sent along
	policy string
	key    string
}

// question is what a check's refusal is remembered by, once it has been sent.
type question struct {
	charges bool   // elsewhere, unless it is refused
	table   *table // nil: a refusal is not to be remembered
	mark    uint64
	sent    int64 // Mono

	// Of a key that was refused a moment ago: what is closed once this one, or another one before it, has been answered.
	answered chan struct{}
	leads    bool // it is this one's to close
}

// inquiries are the keys that were refused a moment ago and are being asked about again. When a refusal that was remembered
// ends, everybody who wants the key would ask at once, and nearly all be refused: so one asks, and the others look first at
// what it has heard. The zero value is ready for use.
type inquiries struct {
	mu    sync.Mutex
	under map[state]chan struct{}
}

// join returns what is closed when somebody has been answered about the state, and whether that is who joins.
func (q *inquiries) join(s state) (answered chan struct{}, leads bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if answered, ok := q.under[s]; ok {
		return answered, false
	}
	if q.under == nil {
		q.under = make(map[state]chan struct{})
	}
	answered = make(chan struct{})
	q.under[s] = answered
	return answered, true
}

// end lets those go on who have joined.
func (q *inquiries) end(s state, answered chan struct{}) {
	q.mu.Lock()
	delete(q.under, s)
	q.mu.Unlock()
	close(answered)
}

func refusalKeyOf(c *limit.Check, t *table, s *subject) refusalKey {
	if s.inline != nil {
		return refusalKey{inline: s.inline, key: c.Key}
	}
	return refusalKey{table: t, policy: c.Policy, key: c.Key}
}

// isPlain says that a refusal of the check says nothing but that there is no room for it.
func isPlain(c *limit.Check) bool { return c.Cost > 0 && !c.Partial }

// recall answers a check that would be forwarded from memory, and reports whether it did. A request id must be asked
// about: what was admitted under it is admitted again.
func (l *Limiter) recall(t *table, op *Op, now algo.Instant) bool {
	if op.Cost == 0 || op.Kind != OpCheck && op.Kind != OpReserve {
		return false
	}
	op.asked.charges = true
	if op.Kind != OpCheck || !isPlain(&op.Check) {
		return false
	}
	op.asked.table, op.asked.sent = t, now.Mono
	if op.RequestID != "" {
		op.asked.mark = l.refusals.Mark(op.hash)
		return false
	}
	mark, ended, ok := l.refused(t, &op.Check, &op.subject, now.Mono, &op.Outcome.Decision)
	switch op.asked.mark = mark; {
	case ok:
		op.asked = question{}
	case ended != 0 && now.Mono-ended < int64(MaxRemember):
		op.asked.answered, op.asked.leads = l.inquiries.join(op.state())
	}
	return ok
}

// refused answers a check from memory, and reports whether it did; mark and ended are Find's.
func (l *Limiter) refused(t *table, c *limit.Check, s *subject, now int64, d *limit.Decision) (mark uint64, ended int64, ok bool) {
	r, mark, ok := l.refusals.Find(s.hash, refusalKeyOf(c, t, s), c.Cost, now)
	if !ok {
		return mark, r.Until, false
	}
	*d = r.Decision
	ageDecision(d, time.Duration(now-r.Came))
	d.RememberFor = time.Duration(r.Until - now)
	var e *entry
	if s.inline == nil {
		e = t.by[c.Policy]
	}
	counts := l.statsOf(e, s).mine()
	counts.count(d)
	counts.remembered.Add(1)
	return mark, 0, true
}

// ageDecision makes a refusal one that came so long ago. Its list of limits is copied, since others may be reading it.
func ageDecision(d *limit.Decision, age time.Duration) {
	d.RetryAfter, d.ResetAfter = Aged(d.RetryAfter, age), Aged(d.ResetAfter, age)
	if len(d.Limits) == 0 {
		return
	}
	limits := make([]limit.LimitStatus, len(d.Limits))
	for i, s := range d.Limits {
		s.RetryAfter, s.ResetAfter = Aged(s.RetryAfter, age), Aged(s.ResetAfter, age)
		limits[i] = s
	}
	d.Limits = limits
}

// remember keeps the answer to what was forwarded, if it is a refusal that may be kept.
func (l *Limiter) remember(op *Op) {
	d := &op.Outcome.Decision
	if d.Allowed || d.FailedClosed { // whose charge may have been made, and its answer lost
		l.refusals.Admitted(op.hash)
		return
	}
	if op.asked.table == nil || op.Outcome.Err != nil || d.RememberFor <= 0 {
		return
	}
	kept := *d
	kept.RequestID = ""
	about := refusalKeyOf(&op.Check, op.asked.table, &op.subject)
	about.key = strings.Clone(about.key) // it may be a part of a larger text
	l.refusals.Remember(op.hash, about, op.asked.mark, Refusal[limit.Decision]{
		Decision: kept, Cost: op.Cost,
		Came: l.clock().Mono, Until: op.asked.sent + int64(Remembered(d.RememberFor)),
	})
}

// rememberFor is how long the answer of this node to a check may be remembered elsewhere.
func rememberFor(d *limit.Decision, c *limit.Check) time.Duration {
	if d.Allowed || !isPlain(c) {
		return 0
	}
	if d.RetryAfter == algo.Never {
		return MaxRemember
	}
	return min(d.RetryAfter, MaxRemember)
}
