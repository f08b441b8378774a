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

// Every record is counted to a share, which Config.ShareOf names by its rule's scope (a policy, or a namespace of
// inline limits), and to the caller whose call made it. The counters belong to the specs under which records are kept,
// so they follow records wherever these go: into copies, through moves and merges, and under changed policies. They are
// changed under the lock of the shard that has the record.
//
// A new key is refused where its share has reached the bounds of its rule. Where the store as a whole is short of
// memory, and so the last part of it (reserve) is all that is left, a new key is refused if its claimant has more than
// a fair part: its caller, or where that is not known its share. The reserve is for the others. The fair part is that
// of max-min fairness, with one more claimant than there are; see Bertsekas and Gallager, Data Networks, section 6.5.2.
// Known keys are decided whatever their share has, unless their state would have to grow.

const (
	// reserve is the part of the store, as a fraction 1/reserve, that is kept for those that have less than a fair
	// part.
	reserve = 8
	// maxAccounts bounds the inline shares that are counted one by one, and the callers: records of more of them are
	// counted together.
	maxAccounts = 1000
)

// account counts what belongs to one share, to all inline shares together, or to one caller.
type account struct {
	label  string   // empty: all of those that are counted together
	inline *account // of an inline share: what all of them have together
	refs   int      // specs, reservations, and partitions that remember answers to the caller; guarded by shares.mu

	keys, bytes atomic.Int64
	refused     atomic.Uint64 // calls answered ErrShareFull
	ids         atomic.Int64  // bytes of the answers remembered for a caller
	idsLost     atomic.Uint64 // of them, those that were forgotten before their time
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

// count counts keys and bytes to those whom the spec's records belong to.
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

// shares are a store's accounts: those that have records.
type shares struct {
	of func(scope string) (share string, inline bool)
	// maxKeys and maxBytes are the store's own bounds.
	maxKeys, maxBytes int64
	groups            atomic.Int64 // as SetShares was told

	mu                         sync.RWMutex
	policies, inlines, callers accounts
	inline                     account // all inline shares together
}

// accounts are those of one kind. An account is there while something is counted to it. Guarded by shares.mu, but for
// n.
type accounts struct {
	by   map[string]*account
	n    atomic.Int64 // of by
	most int
	rest account // those that are not known, or are more than most: they are counted together
}

// find returns the account of a name.
func (as *accounts) find(name string) *account {
	if a := as.by[name]; a != nil {
		return a
	}
	return &as.rest
}

// take returns the account of a name, made if need be, for one more that counts to it; give takes it back.
func (as *accounts) take(name string, inline *account) *account {
	a := as.find(name)
	if a == &as.rest && name != "" && len(as.by) < as.most {
		name = strings.Clone(name) // which may be a part of something larger
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

// kind returns the accounts of shares that are inline, or of those that are not.
func (s *shares) kind(inline bool) (*accounts, *account) {
	if inline {
		return &s.inlines, &s.inline
	}
	return &s.policies, nil
}

// take returns the accounts of a scope and a caller, for one more spec.
func (s *shares) take(scope, caller string) (share, of *account) {
	name, inline := s.of(scope)
	s.mu.Lock()
	defer s.mu.Unlock()
	as, all := s.kind(inline)
	return as.take(name, all), s.callers.take(caller, nil)
}

// give takes back what take returned.
func (s *shares) give(share, caller *account) {
	s.mu.Lock()
	defer s.mu.Unlock()
	as, _ := s.kind(share.inline != nil)
	as.give(share)
	s.callers.give(caller)
}

// takeCaller returns the account of a caller, for one more reservation, or one more partition that remembers answers to
// it.
func (s *shares) takeCaller(caller string) *account {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.callers.take(caller, nil)
}

// giveCaller takes back what takeCaller returned.
func (s *shares) giveCaller(caller *account) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.callers.give(caller)
}

// refused counts a call that has found no room in its share.
func (s *shares) refused(scope, caller string) {
	name, inline := s.of(scope)
	s.mu.RLock()
	defer s.mu.RUnlock()
	as, _ := s.kind(inline)
	as.find(name).refused.Add(1)
	s.callers.find(caller).refused.Add(1)
}

// greedy reports whether one of several claimants of a resource, of which so many of most are used, may take no more of
// it: only the last part of it is left, and the claimant has mine, more than a fair part.
func greedy(mine, used, most, claimants int64) bool {
	return most > 0 && used > most-most/reserve && mine > most/claimants
}

// fair reports whether a caller, or where it is not known a share, may take more memory. Inline shares have one fair
// part together, because callers can make them up; each has a portion of that, which counts earlier, so that there is
// something left of it.
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
		return true // there is no other claimant, and can be none
	case sp.share.inline == nil:
		return !over(sp.share, 0, claimants)
	}
	return !over(&s.inline, 0, claimants) && !over(sp.share, 1, claimants*(s.inlines.n.Load()+1))
}

// short reports whether the store has no room but its reserve.
func (s *shares) short(keys, bytes int64) bool {
	return s.maxKeys > 0 && keys >= s.maxKeys-s.maxKeys/reserve ||
		s.maxBytes > 0 && bytes >= s.maxBytes-s.maxBytes/reserve
}

// mayReserve says whether a caller may make one more reservation beside so many, of most, in a store of which so many
// bytes are used. The error is ErrShareReservations or errShare.
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

// takeReservation counts one more reservation of a caller, which takes so many bytes, and returns the caller's account.
func (b *shardBudget) takeReservation(caller string, bytes int) *account {
	of := b.sh.store.shares.takeCaller(caller)
	of.reserved.Add(1)
	of.add(0, bytes)
	b.reservations.Add(1)
	b.count(bytes)
	return of
}

// giveReservation takes back what takeReservation counted.
func (b *shardBudget) giveReservation(of *account, bytes int) {
	of.reserved.Add(-1)
	of.add(0, -bytes)
	b.reservations.Add(-1)
	b.Give(bytes)
	b.sh.store.shares.giveCaller(of)
}

// bounds are the bounds of the store's keys and bytes, 0 for none: for own keys and their growth without the room for
// copies.
func (s *Store) bounds(own bool) (keys, bytes int64) {
	keys, bytes = s.cfg.MaxKeys, s.cfg.MaxBytes
	if own && s.cfg.Copies {
		keys, bytes = keys-keys/copyReserve, bytes-bytes/copyReserve
	}
	return keys, bytes
}

// mayEnter says whether a new record may be made under a rule.
func (sh *shard) mayEnter(sp *spec, rule *Rule) bool {
	if rule.MaxKeys > 0 && sp.share.keys.Load() >= rule.MaxKeys ||
		rule.MaxBytes > 0 && sp.share.bytes.Load() >= rule.MaxBytes {
		return false
	}
	return sh.store.shares.fair(sp, sh.store.keys.Load(), sh.store.budget.used.Load())
}

// mayGrow says whether memory may be taken for a state of the spec of a number.
func (sh *shard) mayGrow(number uint32, bytes int) bool {
	used := sh.budget.used.Load()
	if _, most := sh.store.bounds(true); most > 0 && used+int64(bytes) > most {
		return false
	}
	return sh.shareGrows(number)
}

// shareGrows says whether the share of a spec has room.
func (sh *shard) shareGrows(number uint32) bool {
	sp := &sh.specs[number]
	if sp.rule.MaxBytes > 0 && sp.share.bytes.Load() >= sp.rule.MaxBytes {
		return false
	}
	return sh.store.shares.fair(sp, 0, sh.budget.used.Load())
}

// setTaker says that what the arena is asked for is for a state under the spec of that number, until endTaker: the
// bounds of its share hold for it.
func (sh *shard) setTaker(number uint32) (used int) {
	sh.budget.taker = number + 1
	return sh.arena.InUse()
}

// endTaker counts what the state has taken or given back since setTaker, which returned used.
func (sh *shard) endTaker(number uint32, used int) {
	sh.budget.taker = 0
	if d := sh.arena.InUse() - used; d != 0 {
		sh.specs[number].count(0, d)
	}
}

// noRoom is the reason why a state under the spec of that number could not grow.
func (sh *shard) noRoom(number uint32) error {
	if sh.shareGrows(number) {
		return errNoRoom
	}
	return errShare
}

// counted changes a record's state by f and counts what it takes or gives back.
func (sh *shard) counted(r record, f func()) {
	used := sh.arena.InUse()
	f()
	r.spec.count(0, sh.arena.InUse()-used)
}

// idle reports whether a record's state is as good as new.
func (sh *shard) idle(r record, now algo.Instant) (is bool) {
	sh.counted(r, func() { is = r.spec.rule.Limits.Idle(sh.arena, r.state, now) })
	return is
}

// dispensable reports whether a record is as good as none.
func (sh *shard) dispensable(r record, now algo.Instant) bool {
	return !r.has(owedFlag|lentFlag) && r.banLeft(now) <= 0 && sh.idle(r, now)
}

// SetShares says how many shares there can be at a time, of which those that are inline count as one: a store is not
// kept for others where there can be one alone. 0: shares have no fair part, but callers do.
func (s *Store) SetShares(n int) { s.shares.groups.Store(int64(n)) }

// Share is what a share, or a caller, has in a Store.
type Share struct {
	Name        string // empty: the rest of them, which are counted together, or a caller that is not known
	Keys, Bytes int64  // Bytes of the states, and of a caller's reservations, without tables and unused parts of pages
	Refused     uint64 // calls answered ErrShareFull, since there have been keys without a break
	// IDBytes is what a caller's remembered request ids take, RequestIDsLost those that were not remembered, or not for
	// as long as they should be, for want of room, counted like Refused.
	IDBytes        int64
	RequestIDsLost uint64
}

// Shares returns what the policies' shares, the inline ones and the callers have that have anything at all, each in
// order of bytes, the largest first.
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
