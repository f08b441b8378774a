package store

import (
	"cmp"
	"container/list"
	"iter"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/fifo"
)

// A partition keeps its answers by request id, so that a repeated request is not charged again: charges, refunds and
// settlements, by state, id and kind. Each answer is in three places: the map by; the partition's order, in which it is
// sent to the followers; and its caller's queue, of which the oldest is dropped first (put).
//
// When a follower is told: note queues a changed record, and noteAnswer an answer; Drain sends both to the followers
// some milliseconds later. When the caller gets the answer: at once, or under Escrow and Sync when the answer's Ticket
// is confirmed (see decide.go).
//
// Bounds: a partition has at most MaxRequestIDs answers. All partitions' answers take an eighth of MaxBytes, divided
// among callers as in share.go (fits). An answer is kept for the longest window of its rule, at least 1 minute and at
// most 5. An answer that does not fit is given to the caller and not kept.
//
// An answer that was forgotten or replaced (forget) leaves the map at once, and keeps its place and its bytes until
// dropOldest removes it.

// stateID identifies a state: a key in its scope. Two of them may have the same hash.
type stateID struct{ scope, key string }

// ordered iterates over a map by its keys, so that the chunks for followers, and simulations, repeat exactly.
func ordered[V any](m map[stateID]V) iter.Seq2[stateID, V] {
	return func(yield func(stateID, V) bool) {
		for _, of := range slices.SortedFunc(maps.Keys(m), stateID.compare) {
			if !yield(of, m[of]) {
				return
			}
		}
	}
}

func (id stateID) compare(other stateID) int {
	return cmp.Or(strings.Compare(id.scope, other.scope), strings.Compare(id.key, other.key))
}

// clone is a copy whose texts are its own.
func (id stateID) clone() stateID { return stateID{strings.Clone(id.scope), strings.Clone(id.key)} }

// size is the number of bytes that the texts take.
func (id stateID) size() int { return len(id.scope) + len(id.key) }

// answerBytes is the number of bytes that a remembered answer counts for, with its places in a map and two lists,
// besides the texts of its key.
const answerBytes = 256

// answerShare is the number of parts of MaxBytes of which remembered answers may take one.
const answerShare = 8

// answerKind says what was answered.
type answerKind uint8

const (
	answerCharge  answerKind = 1
	answerRefund  answerKind = 2
	answerSettled answerKind = 3 // of a reservation, under its own id
	answerKinds              = 4 // one above the last kind
)

// answerKey is the id of a request about a state.
type answerKey struct {
	of   stateID
	id   string
	kind answerKind
}

func (k *answerKey) bytes() int { return answerBytes + k.of.size() + len(k.id) }

// answered is what was answered to a request.
type answered struct {
	cost        int64 // units asked for; of a reservation, units to keep
	granted     int64 // units charged, or given back
	excess      int64 // of a reservation: charged beyond what it was of
	over        bool  // charged though there was no room
	strict      bool  // under a strict rule
	persist     bool  // under a rule with Persist
	delay       time.Duration
	lease       uint64
	reservation ReservationID
	until       int64 // Mono instant from which on it is forgotten
}

// remembered is an answer in the order. It is void if answers.by has another one, or none, under its key.
type remembered struct {
	answered
	key   answerKey
	turn  uint64
	of    *asker
	place *list.Element // in answers.order
}

// gaveBack reports whether what was answered charged nothing, and may have given units back.
func (e *remembered) gaveBack() bool { return e.key.kind != answerCharge && e.excess == 0 }

// asker is a caller with answers in a partition. Callers beyond maxAccounts share one.
type asker struct {
	account  *account
	queue    fifo.Queue[*remembered]
	n, bytes int
}

// answers has the newest answers of a partition. When it is full, it drops the oldest answer of the caller with the
// most: "longest queue drop" of Suter, Lakshman, Stiliadis and Choudhury, "Design considerations for supporting TCP
// with per-flow queueing", IEEE INFOCOM 1998. So it drops no caller's answer for one of a caller with more. The zero
// value is empty and ready for use.
type answers struct {
	end      uint64 // the turn of the next answer; followers keep the turn up to which they were told
	by       map[answerKey]*remembered
	askers   map[string]*asker // by the label of their account
	order    list.List         // of *remembered, by turn
	n, bytes int
}

// keepFor says how long an answer is remembered: min(max(window, 1 min), 5 min).
func keepFor(limits algo.Limits) time.Duration {
	longest := time.Minute
	for i := range limits {
		longest = max(longest, limits[i].Window)
	}
	return min(longest, 5*time.Minute)
}

func (m *answers) get(k answerKey, now int64) (answered, bool) {
	if e := m.by[k]; e != nil && now < e.until {
		return e.answered, true
	}
	return answered{}, false
}

// from returns the answers whose turn is not before that one, in order.
func (m *answers) from(turn uint64) iter.Seq[*remembered] {
	return func(yield func(*remembered) bool) {
		e := m.order.Back()
		for e != nil && e.Prev() != nil && e.Prev().Value.(*remembered).turn >= turn {
			e = e.Prev()
		}
		for ; e != nil; e = e.Next() {
			if a := e.Value.(*remembered); a.turn >= turn && !yield(a) {
				return
			}
		}
	}
}

// pending reports whether there may be an answer of that turn or a later one.
func (m *answers) pending(turn uint64) bool { return m.end > turn }

// answerBounds are the bounds of one partition's answers.
type answerBounds struct {
	most  int   // answers; negative: none at all
	even  int   // bytes that a partition may take beyond share, if no callers are known
	share int64 // bytes of all partitions; 0: no bound
}

func (s *Store) answerBounds() answerBounds {
	share := s.cfg.MaxBytes / answerShare
	return answerBounds{most: s.cfg.MaxRequestIDs, share: share, even: int(share) / s.cfg.Partitions}
}

// put remembers an answer to a caller, and drops others until the bounds and the memory suffice. If they do not, it
// does not remember the answer.
func (m *answers) put(k answerKey, e answered, caller string, now int64, most answerBounds, b *shardBudget) {
	if most.most < 0 {
		return
	}
	of, size := m.enter(caller, b), k.bytes()
	of.n++ // counted before others are dropped: dropOldest must not remove of, nor reset m, when it drops the last one
	m.n++
	for m.n > most.most {
		if !m.dropOldest(m.greediest(of), now, b) {
			m.lose(of, b)
			return
		}
	}
	for !m.fits(of, size, most, b) {
		if !m.dropOldest(of, now, b) {
			m.lose(of, b)
			return
		}
	}
	for !b.Take(size) {
		if !m.dropOldest(m.greediest(of), now, b) {
			m.lose(of, b)
			return
		}
	}
	if m.by == nil {
		m.by = make(map[answerKey]*remembered)
	}
	in := &remembered{answered: e, key: k, turn: m.end, of: of}
	in.place = m.order.PushBack(in)
	of.queue.Push(in)
	m.end++
	m.by[k] = in
	m.count(of, size, b)
}

// lose gives back the place of an answer that is not remembered.
func (m *answers) lose(of *asker, b *shardBudget) {
	of.n--
	m.n--
	b.lost(of)
	m.leave(of, b)
}

func (b *shardBudget) lost(of *asker) {
	b.memosLost.Add(1)
	of.account.idsLost.Add(1)
}

// count adds to all counts of bytes. The budget is the caller's matter.
func (m *answers) count(of *asker, bytes int, b *shardBudget) {
	m.bytes += bytes
	of.bytes += bytes
	b.answers.Add(int64(bytes))
	of.account.ids.Add(int64(bytes))
}

// enter returns the asker of a caller; it makes one if there is none.
func (m *answers) enter(caller string, b *shardBudget) *asker {
	if of := m.askers[caller]; of != nil {
		return of
	}
	shares := &b.sh.store.shares
	account := shares.takeCaller(caller)
	if of := m.askers[account.label]; of != nil { // of those beyond maxAccounts
		shares.giveCaller(account)
		return of
	}
	if m.askers == nil {
		m.askers = make(map[string]*asker)
	}
	of := &asker{account: account}
	m.askers[account.label] = of
	return of
}

// leave removes an asker without answers.
func (m *answers) leave(of *asker, b *shardBudget) {
	if of.n == 0 {
		delete(m.askers, of.account.label)
		b.sh.store.shares.giveCaller(of.account)
	}
}

// greediest returns the caller with the most answers: the one given, unless others have more.
func (m *answers) greediest(of *asker) *asker {
	most := of
	for label, other := range m.askers {
		// Among equals the given one, then the first by name, so that simulations repeat.
		if other.n > most.n || other.n == most.n && most != of && label < most.account.label {
			most = other
		}
	}
	return most
}

// fits reports whether a caller may take size more bytes. The bounds are of the whole store, and a partition can drop
// only its own answers.
func (m *answers) fits(of *asker, size int, most answerBounds, b *shardBudget) bool {
	if most.share == 0 {
		return true
	}
	used, callers := b.answers.Load()+int64(size), b.sh.store.shares.callers.n.Load()
	if used > most.share {
		return callers == 0 && m.bytes+size <= most.even
	}
	return !greedy(of.account.ids.Load()+int64(size), used, most.share, callers+1)
}

// dropOldest drops a caller's oldest answer, and reports whether there was one.
func (m *answers) dropOldest(of *asker, now int64, b *shardBudget) bool {
	if of.queue.Len() == 0 {
		return false
	}
	e := of.queue.Pop()
	m.order.Remove(e.place)
	if m.by[e.key] == e {
		delete(m.by, e.key)
		if now < e.until {
			b.lost(of)
		}
	}
	size := e.key.bytes()
	m.count(of, -size, b)
	b.Give(size)
	of.n--
	m.n--
	m.leave(of, b)
	if m.n == 0 {
		*m = answers{end: m.end}
	}
	return true
}

// expire drops the answers at the front of the order that are over. It stops at the first that is not; get ignores
// those behind it.
func (m *answers) expire(now int64, b *shardBudget) {
	for e := m.order.Front(); e != nil && e.Value.(*remembered).until <= now; e = m.order.Front() {
		m.dropOldest(e.Value.(*remembered).of, now, b) // it is the oldest of its caller, too
	}
}

// forget makes void every answer about one state, and reports whether there was any. It looks at all answers of the
// partition.
func (m *answers) forget(of stateID) bool {
	before := len(m.by)
	maps.DeleteFunc(m.by, func(k answerKey, _ *remembered) bool { return k.of == of })
	return len(m.by) < before
}

// free drops all answers.
func (m *answers) free(b *shardBudget) {
	b.Give(m.bytes)
	for _, of := range m.askers {
		m.count(of, -of.bytes, b)
		b.sh.store.shares.giveCaller(of.account)
	}
	*m = answers{end: m.end}
}

// forgetUnshared makes void the charges under strict rules that other lacks.
func (m *answers) forgetUnshared(other *answers) {
	maps.DeleteFunc(m.by, func(k answerKey, e *remembered) bool { return e.strict && !e.gaveBack() && other.by[k] == nil })
}

// unite adds the answers of other that m lacks.
func (m *answers) unite(other *answers, now int64, most answerBounds, b *shardBudget) {
	for e := range other.from(0) {
		if m.by[e.key] == nil && other.by[e.key] == e {
			m.put(e.key, e.answered, e.of.account.label, now, most, b)
		}
	}
}

// beforeID answers a repeated request id with what was admitted the first time, beside the state as it is now.
func (sh *shard) beforeID(p *plan, call *Call, answer *Answer) (answered bool, err error) {
	if call.Cost <= 0 || p.part.extras == nil {
		return false, nil
	}
	m, ok := p.part.extras.answers.get(answerKey{p.id(), call.RequestID, answerCharge}, p.now.Mono)
	if !ok {
		return false, nil
	}
	if m.cost != call.Cost || !sameUse(m.reservation, call.Reservation) {
		return false, ErrRequestID
	}
	peek := Call{Request: algo.Request{TTL: call.TTL, Always: call.Always}, Boot: call.Boot}
	if err := sh.decide(p.part, &p.k, p.rule, p.now, &peek, p.each, answer); err != nil {
		return false, err
	}
	answer.Allowed, answer.Granted, answer.Delay, answer.Lease, answer.Reservation = !m.over, m.granted, m.delay,
		m.lease, m.reservation
	if answer.Allowed {
		answer.RetryAfter, answer.Banned = 0, false
	}
	if p.rule.Durability >= Escrow {
		// The first answer may still be waiting for the backup.
		answer.Ticket = sh.wait(p.part, p.k.Partition, p.rule)
	}
	return true, nil
}

// afterID keeps the answer of a charge under its request id. It keeps an Always charge that granted nothing too,
// because a repetition could charge once units have come back.
func (sh *shard) afterID(p *plan, call *Call, answer *Answer) {
	d := &answer.Decision
	if d.Granted == 0 && !(call.Always && call.Cost > 0) {
		return
	}
	m := answered{cost: call.Cost, granted: d.Granted, over: !d.Allowed, delay: d.Delay, lease: d.Lease,
		reservation: call.Reservation}
	sh.rememberAnswer(p.part, p.id(), answerCharge, call.RequestID, call.Caller, p.rule, p.now, m)
}

// rememberAnswer keeps what was answered to a request.
func (sh *shard) rememberAnswer(part *partition, of stateID, kind answerKind, id, caller string, rule *Rule,
	now algo.Instant, m answered) {
	m.strict, m.persist, m.until = rule.Strict, rule.Persist, now.Mono+int64(keepFor(rule.Limits))
	k := answerKey{stateID{of.scope, strings.Clone(of.key)}, strings.Clone(id), kind}
	answers := &part.ensureExtras().answers
	before := answers.end
	answers.put(k, m, caller, now.Mono, sh.store.answerBounds(), &sh.budget)
	part.noteAnswer(m.persist, before)
}

// noteAnswer queues an answer for the followers and the disk. next is the turn that it got, if it was kept.
func (p *partition) noteAnswer(persist bool, next uint64) {
	if p.followed || p.saved {
		p.extras.bump()
		p.skipAnswer(persist, next)
		p.recount()
	}
}

// sameUse reports whether two charges of one request id may be one request: neither has a reservation; both make one,
// whose id is drawn at random each time; or both add to the same one, and have other numbers of extensions.
func sameUse(first, now ReservationID) bool {
	none := ReservationID{}
	switch {
	case first == none || now == none:
		return first == now
	case first.extension() == 0 || now.extension() == 0:
		return first.extension() == now.extension()
	}
	return first.Whole() == now.Whole()
}
