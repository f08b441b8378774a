package store

import (
	"cmp"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/weirlimit/weir/algo"
)

// This file counts how many keys, bytes and reservations of the store each share and each caller has, and refuses more
// to those that have too many.
//
// Every record is counted to two accounts: that of its share, which Config.ShareOf names by the rule's scope (a policy,
// or a namespace of inline limits), and that of the caller whose call made it. A spec has the accounts of its records.
// So a record's accounts stay the same in copies, moves and merges, and when policies change. The counters are atomic,
// because the specs of several shards have the same account.
//
//	mayEnter    refuses a new key if its share has reached the rule's MaxKeys or MaxBytes, or if fair returns false
//	mayGrow     refuses memory to a state if the store or the share has reached its bound, or if fair returns false
//	mayReserve  refuses a reservation to a caller with more than a fair part
//	fair        returns false if only the reserve, the last eighth of the store, is left, and the claimant has more
//	            than a fair part
//
// The claimant is the record's caller, or its share if the caller is not known. The fair part is that of max-min
// fairness, with one claimant more than there are; see Bertsekas and Gallager, Data Networks, section 6.5.2. The
// reserve is for claimants with less. Known keys are decided whatever their share has, unless their state must grow.

const (
	// reserve: 1/reserve of the store is kept for claimants with less than a fair part.
	reserve = 8
	// maxAccounts bounds the inline shares that have their own accounts, and the callers. The records of all others are
	// counted together.
	maxAccounts = 1000
)

// account counts what belongs to one share, to all inline shares together, or to one caller.
type account struct {
	label  string   // empty: the account counts several shares or callers together
	inline *account // of an inline share: the account of all inline shares together
	refs   int      // specs, reservations, and partitions that remember answers to the caller; guarded by shares.mu

	keys, bytes atomic.Int64
	refused     atomic.Uint64 // calls answered ErrShareFull
	ids         atomic.Int64  // bytes of a caller's remembered answers
	idsLost     atomic.Uint64 // a caller's answers that were dropped too early or not remembered
	reserved    atomic.Int64  // a caller's pending reservations
}

func (a *account) add(keys, bytes int) {
	if keys != 0 {
		a.keys.Add(int64(keys))
	}
	if bytes != 0 {
		a.bytes.Add(int64(bytes))
	}
}

// count adds keys and bytes to the accounts of the spec's records.
func (sp *spec) count(keys, bytes int) {
	if keys|bytes == 0 {
		return
	}
	sp.share.add(keys, bytes)
	if sp.share.inline != nil {
		sp.share.inline.add(keys, bytes)
	}
	sp.caller.add(keys, bytes)
}

// shares has a store's accounts.
type shares struct {
	of func(scope string) (share string, inline bool)
	// maxKeys and maxBytes are the store's own bounds.
	maxKeys, maxBytes int64
	groups            atomic.Int64 // set by SetShares

	mu                         sync.RWMutex
	policies, inlines, callers accounts
	inline                     account // all inline shares together
}

// accounts has the accounts of one kind. It keeps an account as long as something is counted to it. shares.mu guards
// all fields but n.
type accounts struct {
	by   map[string]*account
	n    atomic.Int64 // len(by)
	most int
	rest account // of names that are empty, or beyond most, together
}

// find returns the account of a name, or rest.
func (as *accounts) find(name string) *account {
	if a := as.by[name]; a != nil {
		return a
	}
	return &as.rest
}

// take returns the account of a name for one more reference, and makes the account if there is none. give ends the
// reference.
func (as *accounts) take(name string, inline *account) *account {
	a := as.find(name)
	if a == &as.rest && name != "" && len(as.by) < as.most {
		name = strings.Clone(name) // name may be a part of a larger text
		a = &account{label: name, inline: inline}
		as.by[name] = a
		as.n.Store(int64(len(as.by)))
	}
	a.refs++
	return a
}

func (as *accounts) give(a *account) {
	if a.refs--; a.refs == 0 && a != &as.rest {
		delete(as.by, a.label)
		as.n.Store(int64(len(as.by)))
	}
}

func (s *shares) init(cfg Config) {
	s.of = cfg.ShareOf
	if s.of == nil {
		s.of = func(scope string) (string, bool) { return scope, false }
	}
	s.maxKeys, s.maxBytes = cfg.MaxKeys, cfg.MaxBytes
	for as, most := range map[*accounts]int{&s.policies: math.MaxInt, &s.inlines: maxAccounts,
		&s.callers: maxAccounts} {
		as.by, as.most = make(map[string]*account), most
	}
	s.inlines.rest.inline = &s.inline
}

// kind returns the accounts of inline shares, and the account of all of them together; or those of policies.
func (s *shares) kind(inline bool) (*accounts, *account) {
	if inline {
		return &s.inlines, &s.inline
	}
	return &s.policies, nil
}

// take returns the accounts of a scope and of a caller, for one more spec. give ends these references.
func (s *shares) take(scope, caller string) (share, of *account) {
	name, inline := s.of(scope)
	s.mu.Lock()
	defer s.mu.Unlock()
	as, all := s.kind(inline)
	return as.take(name, all), s.callers.take(caller, nil)
}

// give ends the references that take has returned.
func (s *shares) give(share, caller *account) {
	s.mu.Lock()
	defer s.mu.Unlock()
	as, _ := s.kind(share.inline != nil)
	as.give(share)
	s.callers.give(caller)
}

// takeCaller returns the account of a caller, for one more reservation, or for one more partition that remembers
// answers to the caller. giveCaller ends the reference.
func (s *shares) takeCaller(caller string) *account {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.callers.take(caller, nil)
}

// giveCaller ends a reference that takeCaller has returned.
func (s *shares) giveCaller(caller *account) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.callers.give(caller)
}

// refused counts a call that was refused because of its share or caller.
func (s *shares) refused(scope, caller string) {
	name, inline := s.of(scope)
	s.mu.RLock()
	defer s.mu.RUnlock()
	as, _ := s.kind(inline)
	as.find(name).refused.Add(1)
	s.callers.find(caller).refused.Add(1)
}

// greedy reports whether a claimant of a resource may take no more of it: only the last part (1/reserve) of most is
// left, and mine, which the claimant has, is more than a fair part. used is what all claimants have.
func greedy(mine, used, most, claimants int64) bool {
	return most > 0 && used > most-most/reserve && mine > most/claimants
}

// fair reports whether the spec's caller, or its share if the caller is not known, may take more memory. All inline
// shares have one fair part together, because callers can invent inline shares. Each of them has a portion of that
// part. The portions are enforced earlier than the part, so that they leave some of it for other inline shares.
func (s *shares) fair(sp *spec, keys, bytes int64) bool {
	over := func(a *account, ahead, claimants int64) bool {
		return greedy(a.keys.Load(), keys+s.maxKeys/reserve*ahead, s.maxKeys, claimants) ||
			greedy(a.bytes.Load(), bytes+s.maxBytes/reserve*ahead, s.maxBytes, claimants)
	}
	if sp.caller.label != "" {
		return !over(sp.caller, 0, s.callers.n.Load()+1)
	}
	active := s.policies.n.Load()
	if s.inline.keys.Load() > 0 {
		active++
	}
	claimants := min(s.groups.Load(), active+1)
	switch {
	case claimants < 2:
		return true // there is no other claimant
	case sp.share.inline == nil:
		return !over(sp.share, 0, claimants)
	}
	return !over(&s.inline, 0, claimants) && !over(sp.share, 1, claimants*(s.inlines.n.Load()+1))
}

// short reports whether only the store's reserve is left.
func (s *shares) short(keys, bytes int64) bool {
	return s.maxKeys > 0 && keys >= s.maxKeys-s.maxKeys/reserve ||
		s.maxBytes > 0 && bytes >= s.maxBytes-s.maxBytes/reserve
}

// mayReserve returns an error if a caller may not make one more reservation: ErrShareReservations if the caller has too
// many of them, errShare if it has too many bytes. reservations, of most, and bytes are what the whole store has.
func (s *shares) mayReserve(caller string, reservations, most, bytes int64) error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	of, claimants := s.callers.by[caller], s.callers.n.Load()+1
	switch {
	case of == nil:
		return nil
	case greedy(of.reserved.Load(), reservations+1, most, claimants):
		return ErrShareReservations
	case greedy(of.bytes.Load(), bytes, s.maxBytes, claimants):
		return errShare
	}
	return nil
}

// takeReservation counts one more reservation of a caller, which takes the given bytes, and returns the caller's
// account.
func (b *shardBudget) takeReservation(caller string, bytes int) *account {
	of := b.sh.store.shares.takeCaller(caller)
	of.reserved.Add(1)
	of.add(0, bytes)
	b.reservations.Add(1)
	b.count(bytes)
	return of
}

// giveReservation undoes takeReservation.
func (b *shardBudget) giveReservation(of *account, bytes int) {
	of.reserved.Add(-1)
	of.add(0, -bytes)
	b.reservations.Add(-1)
	b.Give(bytes)
	b.sh.store.shares.giveCaller(of)
}

// bounds returns the bounds of the store's keys and bytes; 0: no bound. With own, they are those of keys that this node
// holds: the store's bounds without what is reserved for copies.
func (s *Store) bounds(own bool) (keys, bytes int64) {
	keys, bytes = s.cfg.MaxKeys, s.cfg.MaxBytes
	if own && s.cfg.Copies {
		keys, bytes = keys-keys/copyReserve, bytes-bytes/copyReserve
	}
	return keys, bytes
}

// mayEnter reports whether a new record may be made under a rule.
func (sh *shard) mayEnter(sp *spec, rule *Rule) bool {
	if rule.MaxKeys > 0 && sp.share.keys.Load() >= rule.MaxKeys ||
		rule.MaxBytes > 0 && sp.share.bytes.Load() >= rule.MaxBytes {
		return false
	}
	return sh.store.shares.fair(sp, sh.store.keys.Load(), sh.store.budget.used.Load())
}

// mayGrow reports whether a state of a spec may take memory.
func (sh *shard) mayGrow(number uint32, bytes int) bool {
	used := sh.budget.used.Load()
	if _, most := sh.store.bounds(true); most > 0 && used+int64(bytes) > most {
		return false
	}
	return sh.shareGrows(number)
}

// shareGrows reports whether the share of a spec may take memory.
func (sh *shard) shareGrows(number uint32) bool {
	sp := &sh.specs[number]
	if sp.rule.MaxBytes > 0 && sp.share.bytes.Load() >= sp.rule.MaxBytes {
		return false
	}
	return sh.store.shares.fair(sp, 0, sh.budget.used.Load())
}

// setTaker has the memory that the arena takes until endTaker count as that of a state of the spec, so that the bounds
// of the spec's share apply to it.
func (sh *shard) setTaker(number uint32) (used int) {
	sh.budget.taker = number + 1
	return sh.arena.InUse()
}

// endTaker counts what the state has taken or given back since setTaker returned used.
func (sh *shard) endTaker(number uint32, used int) {
	sh.budget.taker = 0
	if d := sh.arena.InUse() - used; d != 0 {
		sh.specs[number].count(0, d)
	}
}

// noRoom returns the error of a state of the spec that could not grow.
func (sh *shard) noRoom(number uint32) error {
	if sh.shareGrows(number) {
		return errNoRoom
	}
	return errShare
}

// counted calls f, which changes a record's state, and counts what the state takes or gives back.
func (sh *shard) counted(r record, f func()) {
	used := sh.arena.InUse()
	f()
	r.spec.count(0, sh.arena.InUse()-used)
}

// idle reports whether a record's state equals a new one.
func (sh *shard) idle(r record, now algo.Instant) (is bool) {
	sh.counted(r, func() { is = r.spec.rule.Limits.Idle(sh.arena, r.state, now) })
	return is
}

// dispensable reports whether a record of a content can be dropped without changing a decision.
func (sh *shard) dispensable(c *content, r record, now algo.Instant) bool {
	return !r.has(owedFlag|lentFlag) && c.reserved(r) == nil && r.banLeft(now) <= 0 && sh.idle(r, now)
}

// SetShares sets how many shares there can be at a time, with all inline shares as one. If it is 1, shares have no
// bound by a fair part, because there is no other claimant. 0: the same, and callers alone have a fair part.
func (s *Store) SetShares(n int) { s.shares.groups.Store(int64(n)) }

// Share has the counts of a share or of a caller.
type Share struct {
	Name        string // empty: those without their own account, and callers that are not known, together
	Keys, Bytes int64  // Bytes of the states, and of a caller's reservations, without tables and unused parts of pages
	Refused     uint64 // calls answered ErrShareFull, since there have been keys without a break
	// IDBytes is how many bytes a caller's remembered request ids take. RequestIDsLost counts, like Refused, those that
	// were not remembered, or were dropped too early, because a bound was reached.
	IDBytes        int64
	RequestIDsLost uint64
}

// Shares returns the counts of the policies' shares, of the inline shares and of the callers, those with the most bytes
// first.
func (s *Store) Shares() (policies, inline, callers []Share) {
	a := &s.shares
	a.mu.RLock()
	defer a.mu.RUnlock()
	read := func(as *accounts) (list []Share) {
		one := func(a *account) {
			list = append(list, Share{a.label, a.keys.Load(), a.bytes.Load(), a.refused.Load(), a.ids.Load(),
				a.idsLost.Load()})
		}
		for _, a := range as.by {
			one(a)
		}
		if rest := &as.rest; as != &a.policies && (rest.refs > 0 || rest.refused.Load() > 0) {
			one(rest)
		}
		slices.SortFunc(list, func(a, b Share) int {
			return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Name, b.Name))
		})
		return list
	}
	return read(&a.policies), read(&a.inlines), read(&a.callers)
}
