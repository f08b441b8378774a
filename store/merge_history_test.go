package store

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
)

// sideHistory is a partition of one key under each of some rules, which several processes may hold at once: each with the charges that its
// content has been told of, and how many units of each are left.
type sideHistory struct {
	t       *testing.T
	rng     *rand.Rand
	rules   []*Rule
	now     time.Duration
	rest    time.Duration // in which nothing is asked, now and then
	claims  uint64
	charges []*sideCharge
	sides   []*side
	kept    bool // copies are kept up to date, processes are lost, and there are strict rules

	// owner may decide strict rules, and heir has had all of its answers: whoever else comes after it starts their keys full. The owner
	// may be lost, and is nil then.
	owner, heir *side
	unsure      bool // of what was charged to buckets under some claim there is no table any more
	unsureNone  bool // whole states of buckets under None have been added: what was repaid to both at once is forgotten
}

// sideCharge is what was charged at once.
type sideCharge struct {
	rule     *Rule
	at       time.Duration
	until    time.Duration // when nothing of it counts any more, as its answer said
	units    int64         // that its callers have not given back
	ticket   uint64        // for which its answer waits
	waits    *side         // while the answer does
	answered bool
}

type side struct {
	store    *Store
	offset   time.Duration // of its clock
	open     bool
	units    map[int]int64 // by charge
	follower *side         // that has been attached
	all      bool          // what is kept under a durability of None is told it, too
	cut      bool          // it has another content by now
	source   *side         // which keeps this copy up to date
	rival    *side         // that has claimed its copy of this side's content
	copy     bool          // what it has is a whole copy
}

func newSideHistory(t *testing.T, rng *rand.Rand, sides int, rules ...*Rule) *sideHistory {
	h := &sideHistory{t: t, rng: rng, rules: rules}
	for i := range sides {
		h.sides = append(h.sides, &side{store: New(Config{Shut: true}), offset: time.Duration(i) * (1000*time.Hour + 700*time.Millisecond), units: make(map[int]int64)})
	}
	return h
}

func (h *sideHistory) at(s *side) algo.Instant {
	return algo.Instant{Mono: int64(h.now + s.offset), Wall: int64(h.now)}
}

func (h *sideHistory) key(s *side, r *Rule) Key { return s.store.key(r.Scope, "k") }

func (h *sideHistory) charge(s *side, r *Rule, reserve bool) {
	h.t.Helper()
	call := cost(1 + h.rng.Int64N(4))
	call.Partial = h.kept
	n := len(h.charges)
	if reserve {
		call.Reservation, call.ReserveFor = reservationOf(uint64(n)+1), minute
	}
	d, err := s.store.Decide(h.key(s, r), r, h.at(s), call, nil)
	if err != nil {
		h.t.Fatal(err)
	}
	if d.Granted == 0 {
		return
	}
	s.units[n] = d.Granted
	c := &sideCharge{rule: r, at: h.now, until: h.now + d.ResetAfter, units: d.Granted, answered: d.Ticket == 0}
	if d.Ticket > 0 {
		c.ticket, c.waits = d.Ticket, s
	}
	h.charges = append(h.charges, c)
}

// answer lets the answers of a side go out that wait for a version up to this.
func (h *sideHistory) answer(s *side, version uint64) {
	for _, c := range h.charges {
		if c.waits == s && c.ticket <= version {
			c.answered, c.waits = true, nil
		}
	}
}

// silence ends the waiting of a side's answers: they are never given.
func (h *sideHistory) silence(s *side) {
	for _, c := range h.charges {
		if c.waits == s {
			c.waits = nil
		}
	}
}

// settle ends one of the reservations that the side knows of, if any of them is pending there.
func (h *sideHistory) settle(s *side) {
	h.t.Helper()
	for n, c := range h.charges {
		if s.units[n] == 0 || h.rng.IntN(4) > 0 || c.rule.Strict && s != h.owner {
			continue
		}
		keep := h.rng.Int64N(s.units[n] + 1)
		_, known, err := settle(s.store, h.key(s, c.rule), c.rule, h.at(s), reservationOf(uint64(n)+1), keep)
		if err != nil {
			h.t.Fatal(err)
		}
		if known {
			s.units[n] = keep
			c.units = min(c.units, keep)
			return
		}
	}
}

// copied gives one side's content to another one, which holds it or is about to.
func (h *sideHistory) copied(from, to *side) {
	h.t.Helper()
	if !to.open {
		h.leave(to)
	}
	to.store.Stage(0)
	from.store.Attach(0, ownership.Target, true)
	for more := true; more; {
		var chunk []byte
		chunk, _, more = from.store.Drain(0, ownership.Target, h.at(from), 1+h.rng.IntN(300))
		if err := to.store.Apply(0, true, h.at(to), chunk); err != nil {
			h.t.Fatal(err)
		}
	}
	from.store.Detach(0, ownership.Target)
}

// leave has a side that does not hold the partition lose its copy.
func (h *sideHistory) leave(s *side) {
	if s.source != nil {
		s.source.cut, s.source = true, nil
	}
	if h.heir == s {
		h.heir = nil
	}
	s.copy = false
	clear(s.units)
}

// follow gives a side a follower, and that a whole copy.
func (h *sideHistory) follow(s, other *side) {
	h.t.Helper()
	h.detach(s)
	h.leave(other)
	other.store.Stage(0)
	s.all, s.cut = h.rng.IntN(3) == 0, false
	s.store.Attach(0, ownership.Backup, s.all)
	s.follower, other.source = other, s
	h.tell(s, true, true)
	other.store.Promote(0)
	other.copy = true
	s.store.Caught(0, ownership.Backup)
	if s == h.owner {
		h.name(s)
	}
}

// tell brings a follower up to date, or less than that.
func (h *sideHistory) tell(s *side, staged, whole bool) {
	h.t.Helper()
	other, most := s.follower, 1+h.rng.IntN(300)
	for {
		chunk, version, more := s.store.Drain(0, ownership.Backup, h.at(s), most)
		if err := other.store.Apply(0, staged, h.at(other), chunk); err != nil {
			h.t.Fatal(err)
		}
		s.store.Confirm(0, ownership.Backup, version)
		h.answer(s, version)
		for n, units := range s.units {
			known, ok := other.units[n]
			switch {
			case ok:
				other.units[n] = min(known, units) // what is settled may be so already
			case !more && (s.all || h.charges[n].rule.Durability != None):
				other.units[n] = units
			}
		}
		if !more || !whole && h.rng.IntN(3) == 0 {
			return
		}
	}
}

// detach takes a side's follower away, who keeps the copy.
func (h *sideHistory) detach(s *side) {
	if s.follower == nil {
		return
	}
	s.store.Detach(0, ownership.Backup)
	if !s.cut {
		s.follower.source = nil
	}
	s.follower, s.cut = nil, false
	if s == h.owner {
		h.name(s)
	}
}

// name makes the owner's follower the heir, once it has everything. Without one answers go out as they are, and nobody is.
func (h *sideHistory) name(s *side) {
	h.heir = nil
	if s.follower != nil && s.cut {
		h.detach(s)
		return
	}
	s.store.Lease(0, math.MaxInt64)
	s.store.Unguarded(0, s.follower == nil)
	if s.follower == nil {
		h.answer(s, math.MaxUint64)
		return
	}
	h.tell(s, false, true)
	h.heir = s.follower
}

// grant gives the right to decide strict rules to a side that does not have it from the owner.
func (h *sideHistory) grant(s *side) {
	if h.owner != nil {
		h.owner.store.Lease(0, 0)
		h.silence(h.owner)
	}
	if s == h.heir {
		s.store.TakeOverStrict(0, h.at(s))
	} else {
		s.store.ColdStrict(0, h.at(s))
	}
	h.owner = s
	h.name(s)
}

func (h *sideHistory) claim(s *side) {
	h.claims++
	if s.source != nil {
		s.source.cut, s.source.rival, s.source = true, s, nil
	}
	s.store.TakeOver(0, h.at(s), ownership.Claim{Term: ownership.Term{Epoch: 1, N: h.claims}, Boot: h.claims})
	s.store.Open(0)
	s.open, s.copy = true, false
}

// cold claims a partition of which nothing is there.
func (h *sideHistory) cold(s *side) {
	h.leave(s)
	s.store.Discard(0)
	h.claim(s)
	s.store.Cold(0, h.at(s))
}

// close has a side lose everything.
func (h *sideHistory) close(s *side) {
	s.store.Shut(0)
	s.store.Discard(0)
	h.silence(s)
	if s.follower != nil && !s.cut {
		s.follower.source = nil
	}
	s.follower, s.rival, s.cut, s.open = nil, nil, false, false
	if h.owner == s {
		s.store.Lease(0, 0)
		h.owner = nil
	}
	h.leave(s)
}

// succeed has another side go on as owner where one was that it has everything of.
func (h *sideHistory) succeed(s, other *side, end func()) {
	owner := s == h.owner
	if owner {
		h.answer(s, math.MaxUint64)
	} else if s == h.heir {
		h.heir = nil
	}
	end()
	if owner {
		s.store.Lease(0, 0)
		h.owner = other
	}
	if h.kept && h.owner == other {
		h.name(other)
	}
}

func (h *sideHistory) merge(from, to *side) {
	h.t.Helper()
	if to.follower == from {
		h.detach(to)
	}
	if from.follower == to {
		h.detach(from)
	}
	h.succeed(from, to, func() {
		from.store.Shut(0)
		h.copied(from, to)
		to.store.with(0, func(_ *shard, part *partition) {
			own, other := &part.content, &part.role.staging
			h.unsureNone = h.unsureNone || !covers(own, other, true) && !covers(other, own, true)
		})
		if err := to.store.Merge(0, h.at(to)); err != nil {
			h.t.Fatal(err)
		}
		for n, units := range from.units {
			if known, ok := to.units[n]; !ok || units < known {
				to.units[n] = units
			}
		}
		h.close(from)
		if !h.kept || h.rng.IntN(2) == 0 {
			h.claim(to)
		}
	})
}

// move hands a partition over.
func (h *sideHistory) move(from, to *side) {
	h.t.Helper()
	h.succeed(from, to, func() {
		from.store.Shut(0)
		h.copied(from, to)
		to.store.Promote(0)
		maps.Copy(to.units, from.units)
		h.close(from)
		to.store.Open(0)
		to.open = true
	})
}

// swap hands a partition over to the follower, who keeps the former holder as its own. If that one is told of everything from the start, a
// move back before the next charge has nothing to tell but the version.
func (h *sideHistory) swap(from *side) {
	h.t.Helper()
	to := from.follower
	h.succeed(from, to, func() {
		from.all = true
		from.store.Widen(0, ownership.Backup)
		from.store.Shut(0)
		h.tell(from, false, true)
		from.store.Detach(0, ownership.Backup)
		from.open, from.copy, from.follower, from.source = false, true, nil, to
		to.open, to.copy, to.follower, to.source, to.all, to.cut = true, false, from, nil, h.rng.IntN(2) == 0, false
		to.store.AttachCurrent(0, ownership.Backup, to.all)
		to.store.Caught(0, ownership.Backup)
		to.store.Open(0)
	})
}

// used is how much of a rule's limit is in use on a side, whether it may decide or not.
func (h *sideHistory) used(s *side, r *Rule) int64 {
	h.t.Helper()
	if r.Strict && s != h.owner {
		s.store.Lease(0, math.MaxInt64)
		s.store.Unguarded(0, true)
		defer s.store.Lease(0, 0)
	}
	d, err := s.store.Decide(h.key(s, r), r, h.at(s), cost(0), nil)
	if err != nil {
		h.t.Fatal(err)
	}
	return mostOf(r) - d.Remaining
}

func mostOf(r *Rule) int64 { return max(r.Limits[0].Limit, r.Limits[0].Capacity) }

// counted is how much of the charges that a side knows of one process that had made them all would still count, at least.
func (h *sideHistory) counted(s *side, r *Rule) int64 {
	l := &r.Limits[0]
	var live int64
	owed := new(bucketOracle)
	for n, c := range h.charges {
		units := s.units[n]
		if c.rule != r || units == 0 {
			continue
		}
		switch {
		case repaid(r.Limits):
			owed.charge(l, c.at, units)
		case l.Period == algo.Epoch:
			if c.at/l.Window == h.now/l.Window {
				live += units
			}
		case l.Algorithm == algo.FixedWindow:
			if h.now < c.until {
				live += units
			}
		case c.at > h.now-l.Window:
			live += units
		}
	}
	switch {
	case repaid(r.Limits):
		return owed.left(l, h.now)
	case l.Algorithm == algo.SlidingCounter:
		return h.estimated(s, r)
	}
	return live
}

// estimated is what a sliding counter would estimate: each charge loses its weight in the last Window before its answer said that nothing of it
// counts any more.
func (h *sideHistory) estimated(s *side, r *Rule) int64 {
	w := r.Limits[0].Window
	sum := int64(0) // in units times nanoseconds
	for n, units := range s.units {
		if c := h.charges[n]; c.rule == r {
			sum += units * int64(min(max(c.until-h.now, 0), w))
		}
	}
	return (sum + int64(w) - 1) / int64(w)
}

// judge compares what sides count with what they are to count at least.
func (h *sideHistory) judge() string {
	h.unsure = h.unsure || h.mixed()
	for i, s := range h.sides {
		for _, r := range h.rules {
			// Where no copies are kept a table is missing for no reason but a fault: histories are too short for so many claims.
			if !s.open || repaid(r.Limits) && h.kept && (h.unsure || h.unsureNone && r.Durability == None) {
				continue
			}
			if used, want := h.used(s, r), min(mostOf(r), h.counted(s, r)); used < want {
				return fmt.Sprintf("at %v side %d counts %d of %d of %s", h.now, i, used, want, r.Scope)
			}
		}
	}
	return ""
}

// exceeded looks for a time in which more was admitted to a strict rule than its algorithm may admit.
func (h *sideHistory) exceeded(r *Rule) string {
	l := &r.Limits[0]
	for i, first := range h.charges {
		if first.rule != r || !first.answered {
			continue
		}
		var sum int64
		for _, c := range h.charges[i:] {
			bound := l.Limit
			switch {
			case repaid(r.Limits):
				bound = mostOf(r) + l.Limit*int64(c.at-first.at)/int64(l.Window)
			case l.Period == algo.Epoch:
				if c.at/l.Window != first.at/l.Window {
					continue
				}
			case c.at-first.at >= l.Window:
				continue
			case l.Algorithm == algo.FixedWindow || l.Algorithm == algo.SlidingCounter:
				bound = 2 * l.Limit // of one window at its end, of the next one at its beginning
			}
			if c.rule != r || !c.answered {
				continue
			}
			if sum += c.units; sum > bound {
				return fmt.Sprintf("%s: %d admitted from %v to %v, at most %d may be", r.Scope, sum, first.at, c.at, bound)
			}
		}
	}
	return ""
}

// bucketOracle is what one bucket owes, in units times nanoseconds of its window.
type bucketOracle struct {
	owes int64
	at   time.Duration
}

func (b *bucketOracle) charge(l *algo.Limit, now time.Duration, units int64) {
	b.owes = max(0, b.owes-l.Limit*int64(now-b.at)) + units*int64(l.Window)
	b.at = now
}

func (b *bucketOracle) left(l *algo.Limit, now time.Duration) int64 {
	owes := max(0, b.owes-l.Limit*int64(now-b.at))
	return (owes + int64(l.Window) - 1) / int64(l.Window)
}

// mixed says that there have been so many claims, or so much was charged under them, that for some of them there is no table of what was
// any more. Two sides with a common past then count it twice, and buckets that were refilled on both are both taken as they are.
func (h *sideHistory) mixed() bool {
	return slices.ContainsFunc(h.sides, func(s *side) (is bool) {
		s.store.with(0, func(_ *shard, part *partition) {
			if part.extras == nil {
				return
			}
			lineage := part.extras.lineage
			is = len(lineage) == maxLineage
			for i := range lineage {
				is = is || lineage[i].mixed || i > 0 && lineage[i].delta == nil
			}
		})
		return is
	})
}

// step lets something happen, and says what.
func (h *sideHistory) step() string {
	h.now += time.Duration(h.rng.Int64N(int64(200 * time.Millisecond)))
	if h.rng.IntN(40) == 0 {
		h.now += h.rest
		for _, s := range h.sides {
			s.store.Sweep(h.at(s), 1)
		}
	}
	i, j := h.rng.IntN(len(h.sides)), h.rng.IntN(len(h.sides))
	s, other := h.sides[i], h.sides[j]
	r := h.rules[h.rng.IntN(len(h.rules))]
	ops := 40
	if h.kept {
		ops = 76
	}
	op := h.rng.IntN(ops)
	if op >= 40 {
		return h.stepKept(op-40, s, other, r)
	}
	switch {
	case !s.open:
		return ""
	case op < 24:
		if r.Strict && s != h.owner {
			return ""
		}
		h.charge(s, r, op >= 16)
		return fmt.Sprintf("%d is charged to %s, op %d", i, r.Scope, op)
	case op < 32:
		h.settle(s)
		return fmt.Sprintf("%d settles", i)
	case op == 32:
		s.store.Sweep(h.at(s), 1)
		return fmt.Sprintf("%d sweeps", i)
	case i == j:
		return ""
	case other.open && op < 35:
		h.merge(s, other)
		return fmt.Sprintf("%d is merged with %d", i, j)
	case other.open:
		return ""
	case op < 36:
		h.copied(s, other)
		other.store.Promote(0)
		maps.Copy(other.units, s.units)
		h.claim(other)
		return fmt.Sprintf("%d is claimed by %d from a copy", i, j)
	case op < 38:
		h.move(s, other)
		return fmt.Sprintf("%d moves to %d", i, j)
	default:
		h.cold(other)
		return fmt.Sprintf("%d is claimed by %d without a copy", i, j)
	}
}

// stepKept is step for what happens to copies that are kept up to date, to processes that are lost, and to grants.
func (h *sideHistory) stepKept(op int, s, other *side, r *Rule) string {
	i, j := slices.Index(h.sides, s), slices.Index(h.sides, other)
	alone := !slices.ContainsFunc(h.sides, func(o *side) bool { return o.open && o != s })
	followed := s.follower != nil && !s.cut
	switch {
	case op < 2 && s.copy && s.source == nil:
		h.claim(s)
		return fmt.Sprintf("%d claims what is left of a copy", i)
	case !s.open:
		return ""
	case op < 8 && h.owner != nil && r.Strict:
		h.charge(h.owner, r, op < 2)
		return fmt.Sprintf("the owner %d is charged to %s", slices.Index(h.sides, h.owner), r.Scope)
	case op < 16 && followed:
		h.tell(s, false, op < 12)
		return fmt.Sprintf("%d tells its follower", i)
	case op < 19 && !other.open:
		h.follow(s, other)
		return fmt.Sprintf("%d is followed by %d", i, j)
	case op < 22 && followed:
		to := s.follower
		h.claim(to)
		if op == 20 {
			h.close(s)
		}
		return fmt.Sprintf("%d is claimed by its follower %d, op %d", i, slices.Index(h.sides, to), op)
	case op == 22:
		h.detach(s)
		return fmt.Sprintf("%d is followed by nobody", i)
	case op == 23 && followed:
		h.swap(s)
		return fmt.Sprintf("%d is swapped with its follower", i)
	case op == 24 && !alone:
		h.close(s)
		return fmt.Sprintf("%d is lost", i)
	case op >= 26 && op < 30 && s.rival != nil && s.rival.open && s.rival != s:
		rival := s.rival
		s.rival = nil
		if op < 28 {
			s, rival = rival, s
		}
		h.merge(s, rival)
		return fmt.Sprintf("%d is merged with %d after a claim", slices.Index(h.sides, s), slices.Index(h.sides, rival))
	case op >= 30 && op < 32 && followed:
		to := s.follower
		h.swap(s)
		h.swap(to)
		to = h.claimAndMerge(s)
		return fmt.Sprintf("%d is swapped with its follower and back, which claims; they are merged into %d", i, slices.Index(h.sides, to))
	case op >= 34 && followed && !other.open && other != s.follower:
		to := h.claimTwice(s, other)
		return fmt.Sprintf("%d is claimed by %d from a copy and by its follower, and the two are merged into %d", i, j, slices.Index(h.sides, to))
	case op >= 32 && followed:
		to := h.claimAndMerge(s)
		return fmt.Sprintf("%d is claimed by its follower, and merged into %d", i, slices.Index(h.sides, to))
	case op >= 30:
		return ""
	case op >= 25 && s != h.owner && (op == 25 || h.owner == nil):
		h.grant(s)
		return fmt.Sprintf("%d is granted, op %d", i, op)
	}
	return ""
}

// claimAndMerge has a side's follower claim its copy, which lacks something, and merges the two soon after. It returns the one who has it then.
func (h *sideHistory) claimAndMerge(s *side) *side {
	h.t.Helper()
	to := s.follower
	if h.rng.IntN(2) == 0 {
		// There are allowances of many keys, which the copy is charged at the claim, and little besides that it lacks.
		h.chargeEach(s)
		h.tell(s, false, true)
		h.chargeAny(s)
	} else {
		for range 1 + h.rng.IntN(2) {
			h.chargeAny(s)
		}
	}
	h.claim(to)
	return h.mergeSoon(s, to)
}

// claimTwice has a side's follower claim its copy, and another process an older one that lacks no keys, and merges these two soon after.
func (h *sideHistory) claimTwice(s, other *side) *side {
	h.t.Helper()
	to := s.follower
	h.chargeEach(s)
	h.copied(s, other)
	other.store.Promote(0)
	maps.Copy(other.units, s.units)
	h.chargeAny(s)
	h.tell(s, false, true)
	h.claim(to)
	h.claim(other)
	return h.mergeSoon(other, to)
}

// mergeSoon merges two sides after a while, one way or the other, and returns the one who has it all then.
func (h *sideHistory) mergeSoon(s, to *side) *side {
	h.t.Helper()
	busy := h.rng.IntN(4) // 2: both, 3: none
	for range h.rng.IntN(8) {
		h.now += time.Duration(h.rng.Int64N(int64(time.Second)))
		if n := h.rng.IntN(2); n == busy || busy == 2 {
			h.chargeAny([]*side{s, to}[n])
		}
	}
	if h.rng.IntN(2) == 0 {
		s, to = to, s
	}
	h.merge(s, to)
	h.settle(to)
	h.settle(to)
	return to
}

// chargeAny charges a side to one of the rules, if it may decide that.
func (h *sideHistory) chargeAny(s *side) {
	h.t.Helper()
	if r := h.rules[h.rng.IntN(len(h.rules))]; !r.Strict || s == h.owner {
		h.charge(s, r, h.rng.IntN(3) == 0)
	}
}

// chargeEach charges a side to most of the rules.
func (h *sideHistory) chargeEach(s *side) {
	h.t.Helper()
	for _, r := range h.rules {
		if h.rng.IntN(8) > 0 && (!r.Strict || s == h.owner) {
			h.charge(s, r, h.rng.IntN(2) == 0)
		}
	}
}

// TestMergeForgetsNothing has several processes hold a partition at once, with a common past or none, each of which charges,
// reserves and settles, and merges them: what is then counted is never less than what one process had counted that saw it all.
func TestMergeForgetsNothing(t *testing.T) {
	for name, limit := range map[string]algo.Limit{
		"sliding_log":     log(60, 5*time.Second),
		"sliding_window":  {Algorithm: algo.SlidingWindow, Limit: 60, Window: 5 * time.Second},
		"sliding_counter": {Algorithm: algo.SlidingCounter, Limit: 60, Window: 5 * time.Second},
		// Of a window that has ended nothing counts: it is longer than a run.
		"fixed_window": window(400, minute),
		// What was charged to a bucket is told apart for as long as it takes to fill, which is longer than a run, too.
		"token_bucket": {Algorithm: algo.TokenBucket, Limit: 20, Capacity: 400, Window: time.Second},
		"leaky_bucket": {Algorithm: algo.LeakyBucket, Limit: 20, Capacity: 400, Window: time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range seeds(1000) {
				h := newSideHistory(t, rand.New(rand.NewPCG(seed, 21)), 4, rule("p", limit))
				if limit.Window == 5*time.Second {
					h.rest = time.Duration(h.rng.Int64N(int64(limit.Window)))
				} else if repaid(h.rules[0].Limits) {
					h.rest = 300 * time.Millisecond // in which a bucket that was used little is full again
				}
				h.claim(h.sides[0])
				h.run(seed, 150)
			}
		})
	}
}

// run has so many things happen, and judges what is counted after each of them and what was admitted in the end.
func (h *sideHistory) run(seed uint64, steps int) {
	h.t.Helper()
	var told []string
	fail := func(what string) {
		h.t.Helper()
		if what != "" {
			h.t.Fatalf("seed %d: %s\n%s", seed, what, strings.Join(told, "\n"))
		}
	}
	for range steps {
		if what := h.step(); what != "" {
			told = append(told, fmt.Sprintf("%v: %s", h.now, what))
		}
		fail(h.judge())
	}
	for _, r := range h.rules {
		if r.Strict {
			fail(h.exceeded(r))
		}
	}
	for _, s := range h.sides {
		accounted(h.t, s.store)
	}
}

// TestMergeForgetsNothingOfCopies is TestMergeForgetsNothing of keys of every algorithm and durability together, through several of their
// windows: with copies that are behind their holders and claim, allowances of escrow that are charged then, processes that are lost, and
// grants for strict rules, of which never more may be admitted than one process would have.
func TestMergeForgetsNothingOfCopies(t *testing.T) {
	for seed := range seeds(5500) {
		newHistoryOfCopies(t, seed).run(seed, 200)
	}
}

// newHistoryOfCopies draws the rules and what each side has counted before.
func newHistoryOfCopies(t *testing.T, seed uint64) *sideHistory {
	const w = 2 * time.Second
	rng := rand.New(rand.NewPCG(seed, 23))
	var rules []*Rule
	count, durabilities, only := 4, []Durability{Async, None, Escrow, Escrow, Sync}, ""
	switch rng.IntN(5) {
	case 0:
		count, durabilities = 8, durabilities[1:4]
	case 1:
		only = "fixed_window"
	case 2:
		// Keys of None have versions of their own, and hide a copy that is taken for newer than its holder. It takes the allowances of many
		// keys for a copy to seem so.
		count, durabilities = 8, []Durability{Async, Escrow, Escrow, Escrow}
	}
	for i := range count {
		n := 10 + rng.Int64N(30)
		limits := map[string]algo.Limit{
			"sliding_log":     log(n, w),
			"sliding_window":  {Algorithm: algo.SlidingWindow, Limit: n, Window: w},
			"sliding_counter": {Algorithm: algo.SlidingCounter, Limit: n, Window: w},
			"fixed_window":    window(n, w),
			"epoch":           {Algorithm: algo.FixedWindow, Limit: n, Window: w, Period: algo.Epoch},
			// A bucket fills for longer than a run, for as long as what was charged to it is told apart.
			"token_bucket": {Algorithm: algo.TokenBucket, Limit: 1, Capacity: 10 * n, Window: time.Second},
			"leaky_bucket": {Algorithm: algo.LeakyBucket, Limit: 1, Capacity: 10 * n, Window: time.Second},
		}
		names := slices.Sorted(maps.Keys(limits))
		name := names[rng.IntN(len(names))]
		if only != "" {
			name = only
		}
		r := rule("", limits[name])
		r.Durability, r.Strict, r.ColdClosed = durabilities[rng.IntN(len(durabilities))], rng.IntN(3) == 0 && count == 4, rng.IntN(4) == 0
		if r.Strict {
			r.Durability = max(r.Durability, Escrow)
		}
		r.Scope = fmt.Sprintf("%s %d, durability %d, strict %t", name, i, r.Durability, r.Strict)
		rules = append(rules, r)
	}
	h := newSideHistory(t, rng, 4, rules...)
	h.kept, h.rest = true, time.Duration(rng.Int64N(int64(2*w)))
	for _, s := range h.sides {
		// Each has held the partition before, and so counted further than others, or less far.
		for range rng.IntN(60) {
			s.store.Attach(0, ownership.Target, true)
			s.store.Detach(0, ownership.Target)
		}
		s.store.Discard(0)
	}
	h.claim(h.sides[0])
	h.owner = h.sides[0]
	h.name(h.owner)
	return h
}

// TestMergeAfterManyClaims splits and merges a partition more often than its lineage has room for, each time after all that was
// charged before has expired: a split soon after such a merge is merged like any other.
func TestMergeAfterManyClaims(t *testing.T) {
	for name, limit := range map[string]algo.Limit{
		"sliding_log":  log(40, 2*time.Second),
		"fixed_window": window(40, 2*time.Second),
		"token_bucket": {Algorithm: algo.TokenBucket, Limit: 20, Capacity: 40, Window: time.Second},
		"leaky_bucket": {Algorithm: algo.LeakyBucket, Limit: 20, Capacity: 40, Window: time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range seeds(50) {
				h := newSideHistory(t, rand.New(rand.NewPCG(seed, 22)), 2, rule("p", limit))
				holder, other := h.sides[0], h.sides[1]
				h.claim(holder)
				// split ends with what both sides admitted counted by the one that holds the partition then.
				split := func(charges int) {
					h.copied(holder, other)
					other.store.Promote(0)
					maps.Copy(other.units, holder.units)
					h.claim(other)
					for range charges {
						h.now += time.Duration(h.rng.Int64N(int64(100 * time.Millisecond)))
						h.charge(h.sides[h.rng.IntN(2)], h.rules[0], false)
					}
					if h.rng.IntN(2) == 0 {
						holder, other = other, holder
					}
					h.merge(other, holder)
					if used, want := h.used(holder, h.rules[0]), min(mostOf(h.rules[0]), h.counted(holder, h.rules[0])); used < want || used > want && limit.Algorithm == algo.SlidingLog {
						t.Fatalf("seed %d: after %d claims %d are in use, want %d", seed, h.claims, used, want)
					}
				}
				for range maxLineage {
					split(4)
					h.now += 5 * time.Second // nothing of it is left, and the claims are remembered
				}
				split(4)
				split(14)
				accounted(t, holder.store)
			}
		})
	}
}

// TestMergeOfDelta: what a claimant has charged to a sliding counter counts after a merge as its answers said, to the unit, where the other
// side has the same windows, and for up to a Window longer where it has others; then nothing counts any more.
func TestMergeOfDelta(t *testing.T) {
	const w = 2 * time.Second
	r := rule("p", algo.Limit{Algorithm: algo.SlidingCounter, Limit: 1000, Window: w})
	for name, own := range map[string]bool{"the same windows": false, "windows of its own": true} {
		t.Run(name, func(t *testing.T) {
			for seed := range seeds(300) {
				h := newSideHistory(t, rand.New(rand.NewPCG(seed, 25)), 2, r)
				a, b := h.sides[0], h.sides[1]
				h.cold(a)
				h.now = time.Duration(h.rng.Int64N(int64(w)))
				h.charge(a, r, false)
				h.copied(a, b)
				b.store.Promote(0)
				maps.Copy(b.units, a.units)
				h.claim(b)
				if own {
					h.cold(a) // windows of a fresh state begin by its clock
				}
				late := time.Duration(0)
				if own {
					late = w
				}
				from, to := a, b
				if h.rng.IntN(2) == 0 {
					from, to = b, a
				}
				for range 1 + h.rng.IntN(8) {
					h.now += time.Duration(h.rng.Int64N(int64(w / 3)))
					h.charge(from, r, false)
					h.charge(to, r, false)
				}
				h.merge(from, to)
				for h.now += time.Duration(h.rng.Int64N(int64(w / 4))); h.now < h.charges[len(h.charges)-1].until+late; h.now += time.Duration(h.rng.Int64N(int64(w / 4))) {
					used, least := h.used(to, r), h.estimated(to, r)
					h.now -= late
					most := h.estimated(to, r)
					h.now += late
					if used < least || used > most {
						t.Fatalf("seed %d: at %v it counts %d, not %d to %d", seed, h.now, used, least, most)
					}
				}
				if used := h.used(to, r); used != 0 {
					t.Fatalf("seed %d: at %v it counts %d", seed, h.now, used)
				}
			}
		})
	}
}

// TestDeltaIsToldWithItsState: chunks take different times to a copy, where a sliding counter's delta has its state's windows all the same.
func TestDeltaIsToldWithItsState(t *testing.T) {
	r := rule("p", algo.Limit{Algorithm: algo.SlidingCounter, Limit: 1000, Window: minute}, log(1000, minute))
	h := newSideHistory(t, rand.New(rand.NewPCG(0, 26)), 3, r)
	a, b, c := h.sides[0], h.sides[1], h.sides[2]
	h.claim(a)
	h.charge(a, r, false)
	h.copied(a, b)
	b.store.Promote(0)
	h.claim(b)
	b.store.Attach(0, ownership.Backup, true)
	c.store.Stage(0)
	tell := func() {
		t.Helper()
		for more := true; more; {
			var chunk []byte
			chunk, _, more = b.store.Drain(0, ownership.Backup, h.at(b), 1)
			h.now += time.Duration(h.rng.Int64N(int64(time.Second)))
			if err := c.store.Apply(0, true, h.at(c), chunk); err != nil {
				t.Fatal(err)
			}
		}
		c.store.with(0, func(sh *shard, part *partition) {
			staged, k := &part.role.staging, h.key(c, r)
			slot, ok := sh.find(&staged.table, k.Hash, r.Scope, k.Key)
			at, told := sh.find(staged.newestDelta(), k.Hash, r.Scope, k.Key)
			if !ok || !told {
				t.Fatal("the copy lacks the state or the delta")
			}
			if state, delta := sh.record(staged.ref(slot)).state, sh.record(staged.newestDelta().ref(at)).state; state[1] != delta[1] {
				t.Errorf("windows begin at %d in the state and at %d in the delta", state[1], delta[1])
			}
		})
	}
	for i := range 2 {
		h.now += 20 * time.Second
		h.charge(b, r, true)
		if i == 1 {
			// The state has nothing left of a reservation that the delta still holds, and does not change when that is settled.
			h.now += 30 * time.Second
			h.charge(b, r, false)
			var before int64
			b.store.with(0, func(sh *shard, part *partition) {
				sh.eachRecord(&part.table, func(r record) { before = int64(r.state[2]) })
			})
			if n, err := b.store.Refund(h.key(b, r), r, h.at(b), before, "", ""); err != nil || n != before {
				t.Fatal(n, err)
			}
			tell()
			if n, known, err := settle(b.store, h.key(b, r), r, h.at(b), reservationOf(uint64(len(h.charges)-1)), 0); err != nil || !known || n != 0 {
				t.Fatal(n, known, err)
			}
		}
		tell()
	}
}

// TestDeltaIsToldWithoutItsState: a state goes between two chunks, and the delta that was to be told with it is told.
func TestDeltaIsToldWithoutItsState(t *testing.T) {
	r := rule("p", algo.Limit{Algorithm: algo.SlidingCounter, Limit: 1000, Window: minute}, algo.Limit{Algorithm: algo.TokenBucket, Limit: 1000, Window: minute})
	h := newSideHistory(t, rand.New(rand.NewPCG(0, 28)), 2, r)
	b, c := h.sides[0], h.sides[1]
	keys := []Key{b.store.key(r.Scope, "k"), b.store.key(r.Scope, "l")}
	charge := func() {
		for _, k := range keys {
			if d, err := b.store.Decide(k, r, h.at(b), cost(1), nil); err != nil || !d.Allowed {
				t.Fatal(d, err)
			}
		}
	}
	h.claim(b)
	charge()
	h.claim(b)
	b.store.Attach(0, ownership.Backup, true)
	c.store.Stage(0)
	drain := func(most int) {
		for more := true; more; most = math.MaxInt {
			var chunk []byte
			chunk, _, more = b.store.Drain(0, ownership.Backup, h.at(b), most)
			if err := c.store.Apply(0, true, h.at(c), chunk); err != nil {
				t.Fatal(err)
			}
			if most == 1 { // one of the two has been told
				for _, k := range keys {
					if n, err := b.store.Refund(k, r, h.at(b), 2, "", ""); err != nil || n != 2 {
						t.Fatal(n, err)
					}
				}
				b.store.Sweep(h.at(b), 1)
			}
		}
	}
	drain(math.MaxInt)
	charge()
	drain(1)
	c.store.with(0, func(sh *shard, part *partition) {
		for _, k := range keys {
			if _, ok := sh.find(part.role.staging.newestDelta(), k.Hash, r.Scope, k.Key); !ok {
				t.Errorf("the copy lacks the delta of %s", k.Key)
			}
		}
	})
}

// TestDeltaUnderOtherLimitsIsTold: after a merge of sides that had different limits for a key, a delta of it may be under limits that its state
// is not under. It is told to copies all the same: who claims one, and is merged with a process that lacks what the delta holds, forgets nothing.
func TestDeltaUnderOtherLimitsIsTold(t *testing.T) {
	counter, other := rule("p", algo.Limit{Algorithm: algo.SlidingCounter, Limit: 1000, Window: minute}), rule("p", log(1000, minute))
	for name, rules := range map[string][2]*Rule{"of a counter": {other, counter}, "of a log": {counter, other}} {
		t.Run(name, func(t *testing.T) {
			h := newSideHistory(t, rand.New(rand.NewPCG(0, 29)), 4)
			a, b, c, d := h.sides[0], h.sides[1], h.sides[2], h.sides[3]
			copied := func(from, to *side) {
				h.copied(from, to)
				to.store.Promote(0)
				h.claim(to)
			}
			h.claim(a)
			h.charge(a, rules[0], false)
			copied(a, b)
			h.charge(b, rules[1], false)
			h.move(a, d)
			copied(d, c)
			h.claim(d)
			h.charge(d, rules[0], false)
			h.merge(b, c)
			copied(c, a)
			h.merge(a, d)
			want := int64(0)
			for _, c := range h.charges {
				want += c.units
			}
			if used := h.used(d, rules[0]); used != want {
				t.Errorf("%d units are counted of %d", used, want)
			}
		})
	}
}
