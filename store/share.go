package store

import (
	"cmp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/weirlimit/weir/algo"
)

// Every record is counted to a share, which Config.ShareOf names by its rule's scope (a policy, or a namespace of inline
// limits), and to the caller whose call made it. The counters belong to the specs under which records are kept, so they follow
// records wherever these go: into copies, through moves and merges, and under changed policies. They are changed under the lock
// of the shard that has the record.
//
// A new key is refused where its share has reached the bounds of its rule. Where the store as a whole is short of memory, and so
// the last part of it (reserve) is all that is left, a new key is refused to who has more than a fair part: its caller, or where
// that is not known its share. The reserve is for the others. The fair part is that of max-min fairness, with one more
// claimant than there are; see Bertsekas and Gallager, Data Networks, section 6.5.2. Known keys are decided whatever their share
// has, unless their state would have to grow.

const (
	// reserve is the part of the store, as a fraction 1/reserve, that is kept for those who have less than a fair part.
	reserve = 8
	// maxAccounts bounds the inline shares that are told apart, and the callers: records of more of them are counted together.
	maxAccounts = 1000
)

// account counts what belongs to one share, to all inline shares together, or to one caller.
type account struct {
	label  string   // empty: all of those that are not told apart
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

	mu       sync.RWMutex
	policies map[string]*account
	inlines  map[string]*account
	callers  map[string]*account
	inline   account // all inline shares together
	rest     account // inline shares that are not told apart
	nobody   account // callers that are not known, or not told apart

	active, namespaces, known atomic.Int64 // shares that are not inline, inline ones and callers with records
}

func (s *shares) init(cfg Config) {
	s.of = cfg.ShareOf
	if s.of == nil {
		s.of = func(scope string) (string, bool) { return scope, false }
	}
	s.maxKeys, s.maxBytes = cfg.MaxKeys, cfg.MaxBytes
	s.policies, s.inlines, s.callers = make(map[string]*account), make(map[string]*account), make(map[string]*account)
	s.rest.inline = &s.inline
}

// take returns the accounts of a scope and a caller, for one more spec.
func (s *shares) take(scope, caller string) (share, of *account) {
	name, inline := s.of(scope)
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case !inline:
		share = enter(s.policies, name, nil, &s.active)
	case len(s.inlines) < maxAccounts || s.inlines[name] != nil:
		share = enter(s.inlines, name, &s.inline, &s.namespaces)
	default:
		share = &s.rest
	}
	share.refs++
	return share, s.enterCaller(caller)
}

// takeCaller returns the account of a caller, for one more partition that remembers answers to it.
func (s *shares) takeCaller(caller string) *account {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.enterCaller(caller)
}

func (s *shares) enterCaller(caller string) *account {
	of := &s.nobody
	if caller != "" && (len(s.callers) < maxAccounts || s.callers[caller] != nil) {
		of = enter(s.callers, caller, nil, &s.known)
	}
	of.refs++
	return of
}

// enter returns the account of a name, made if need be.
func enter(m map[string]*account, name string, inline *account, n *atomic.Int64) *account {
	a := m[name]
	if a == nil {
		name = strings.Clone(name) // which may be a part of something larger
		a = &account{label: name, inline: inline}
		m[name] = a
		n.Store(int64(len(m)))
	}
	return a
}

// give takes back what take returned.
func (s *shares) give(share, caller *account) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leaveCaller(caller)
	if share.refs--; share.refs == 0 {
		if share.inline == nil {
			leave(s.policies, share, &s.active)
		} else {
			leave(s.inlines, share, &s.namespaces)
		}
	}
}

// giveCaller takes back what takeCaller returned.
func (s *shares) giveCaller(caller *account) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leaveCaller(caller)
}

func (s *shares) leaveCaller(caller *account) {
	if caller.refs--; caller.refs == 0 {
		leave(s.callers, caller, &s.known)
	}
}

func leave(m map[string]*account, a *account, n *atomic.Int64) {
	if m[a.label] == a { // and not one of those that are always there
		delete(m, a.label)
		n.Store(int64(len(m)))
	}
}

// refused counts a call that has found no room in its share.
func (s *shares) refused(scope, caller string) {
	name, inline := s.of(scope)
	s.mu.RLock()
	defer s.mu.RUnlock()
	share := s.policies[name]
	if inline {
		if share = s.inlines[name]; share == nil {
			share = &s.rest
		}
	}
	if share != nil {
		share.refused.Add(1)
	}
	of := s.callers[caller]
	if of == nil {
		of = &s.nobody
	}
	of.refused.Add(1)
}

// fair reports whether a caller, or where it is not known a share, may take more memory: always, unless the store is short of it
// and they have more than a fair part. Inline shares have one part together, because callers can make them up; each has a part of
// that, which counts earlier, so that there is something left of it.
func (s *shares) fair(sp *spec, keys, bytes int64) bool {
	over := func(a *account, reserves, parts int64) bool {
		return s.maxKeys > 0 && keys > s.maxKeys-s.maxKeys/reserve*reserves && a.keys.Load() > s.maxKeys/parts ||
			s.maxBytes > 0 && bytes > s.maxBytes-s.maxBytes/reserve*reserves && a.bytes.Load() > s.maxBytes/parts
	}
	if sp.caller.label != "" {
		return !over(sp.caller, 1, s.known.Load()+1)
	}
	active := s.active.Load()
	if s.inline.keys.Load() > 0 {
		active++
	}
	parts := min(s.groups.Load(), active+1)
	switch {
	case parts < 2:
		return true // nobody else is there, nor can come
	case sp.share.inline == nil:
		return !over(sp.share, 1, parts)
	}
	return !over(&s.inline, 1, parts) && !over(sp.share, 2, parts*(s.namespaces.Load()+1))
}

// short reports whether the store has no room but its reserve.
func (s *shares) short(keys, bytes int64) bool {
	return s.maxKeys > 0 && keys >= s.maxKeys-s.maxKeys/reserve || s.maxBytes > 0 && bytes >= s.maxBytes-s.maxBytes/reserve
}

// greedy reports whether a caller has more than a fair part of most reservations, of which the last are for the others.
func (s *shares) greedy(caller string, most int) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	of := s.callers[caller]
	return of != nil && of.reserved.Load() > int64(most/(len(s.callers)+1))
}

// takeReservation counts one more reservation of a caller, and returns the caller's account.
func (b *shardBudget) takeReservation(caller string) *account {
	of := b.sh.store.shares.takeCaller(caller)
	of.reserved.Add(1)
	b.reservations.Add(1)
	return of
}

// giveReservation takes back what takeReservation counted.
func (b *shardBudget) giveReservation(of *account) {
	of.reserved.Add(-1)
	b.reservations.Add(-1)
	b.sh.store.shares.giveCaller(of)
}

// bounds are the bounds of the store's keys and bytes, 0 for none: for own keys and their growth without the room for copies.
func (s *Store) bounds(own bool) (keys, bytes int64) {
	keys, bytes = s.cfg.MaxKeys, s.cfg.MaxBytes
	if own && s.cfg.Copies {
		keys, bytes = keys-keys/copyReserve, bytes-bytes/copyReserve
	}
	return keys, bytes
}

// mayEnter says whether a new record may be made under a rule.
func (sh *shard) mayEnter(sp *spec, rule *Rule) bool {
	if rule.MaxKeys > 0 && sp.share.keys.Load() >= rule.MaxKeys || rule.MaxBytes > 0 && sp.share.bytes.Load() >= rule.MaxBytes {
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

// begins begins a change of a state under the spec of that number, which ends counts. What the state takes meanwhile is bounded by
// the bounds of its share.
func (sh *shard) begins(number uint32) (used int) {
	sh.budget.taker = number + 1
	return sh.arena.InUse()
}

// ends counts what a state has taken or given back since begins.
func (sh *shard) ends(number uint32, used int) {
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

// SetShares says how many shares there can be at a time, of which those that are inline count as one: a store is not kept for
// others where there can be one alone. 0: shares have no fair part, but callers do.
func (s *Store) SetShares(n int) { s.shares.groups.Store(int64(n)) }

// Share is what a share, or a caller, has in a Store.
type Share struct {
	Name        string // empty: the rest of them, which are not told apart, or a caller that is not known
	Keys, Bytes int64  // Bytes of the states, without tables and what is unused of pages
	Refused     uint64 // calls answered ErrShareFull, since there have been keys without a break
	// IDBytes is what a caller's remembered request ids take, RequestIDsLost those that were not remembered, or not for as long as
	// they should be, for want of room, counted like Refused.
	IDBytes        int64
	RequestIDsLost uint64
}

// Shares returns what the policies' shares, the inline ones and the callers have that have anything at all, each in order of
// bytes, the largest first.
func (s *Store) Shares() (policies, inline, callers []Share) {
	a := &s.shares
	a.mu.RLock()
	defer a.mu.RUnlock()
	read := func(m map[string]*account, rest *account) []Share {
		list := make([]Share, 0, len(m)+1)
		one := func(a *account) {
			list = append(list, Share{a.label, a.keys.Load(), a.bytes.Load(), a.refused.Load(), a.ids.Load(), a.idsLost.Load()})
		}
		for _, a := range m {
			one(a)
		}
		if rest != nil && (rest.refs > 0 || rest.refused.Load() > 0) {
			one(rest)
		}
		slices.SortFunc(list, func(a, b Share) int {
			return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Name, b.Name))
		})
		return list
	}
	return read(a.policies, nil), read(a.inlines, &a.rest), read(a.callers, &a.nobody)
}
