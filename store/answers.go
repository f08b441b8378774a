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

// A partition remembers what it answered to a request id, so that a repetition is not charged again: charges, refunds
// and settlements, by state, id and kind. An answer is in three places: the map by, the order of the partition, in
// which followers are told, and the queue of its caller, the oldest of which makes way.
//
// Bounds, per partition: MaxRequestIDs answers. Of the whole store: an eighth of MaxBytes, divided as in share.go (fits). An answer is remembered for the longest window, at least 1 minute and at most 5. An answer that finds no room
// is given and not remembered.

// stateID is what a state is: a key in its scope. A hash finds one, and is never taken for it.
type stateID struct{ scope, key string }

// ordered goes through a map in the order of its keys. Where followers are told what it finds, the order decides what a
// chunk has, and a simulation that repeats itself needs the same one.
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

// answerBytes is what a remembered answer is taken to cost when bytes are counted, its share of a map and a queue,
// besides the texts of its key.
const answerBytes = 256

// answerShare is the part of MaxBytes that remembered answers may take beyond each partition's even share of it.
const answerShare = 8

// answerKind says what was answered.
type answerKind uint8

const (
	answerCharge  answerKind = 1
	answerRefund  answerKind = 2
	answerSettled answerKind = 3 // of a reservation, under its own id
	answerKinds              = 4
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
	cost, granted int64 // asked for, of a reservation to be kept; granted or given back
	excess        int64 // of a reservation: charged beyond what it was of
	over          bool  // charged though there was no room
	strict        bool  // under a strict rule
	persist       bool  // under a rule with Persist
	delay         time.Duration
	lease         uint64
	reservation   ReservationID
	until         int64 // Mono instant from which on it is forgotten
}

// remembered is an answer that may be remembered: it is void when answers.by has another one, or none, under its key.
type remembered struct {
	answered
	key   answerKey
	turn  uint64
	of    *asker
	place *list.Element // in answers.order
}

// gaveBack reports whether what was answered charged nothing, and may have given units back.
func (e *remembered) gaveBack() bool { return e.key.kind != answerCharge && e.excess == 0 }

// asker is a caller with answers remembered in a partition. Callers beyond maxAccounts are one.
type asker struct {
	account  *account
	queue    fifo.Queue[*remembered]
	n, bytes int
}

// answers remembers answers by request id, the newest up to a bound. Where there is no room for one more, the oldest of
// the caller with the most is forgotten: "longest queue drop" of Suter, Lakshman, Stiliadis and Choudhury, "Design
// considerations for supporting TCP with per-flow queueing", IEEE INFOCOM 1998. So no caller's answer is forgotten for
// one of a caller with more. The zero value is empty and ready for use.
type answers struct {
	end      uint64 // turns that there have ever been: followers count them
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

// pending reports whether any may have that turn or a later one.
func (m *answers) pending(turn uint64) bool { return m.end > turn }

// answerBounds are the bounds of what one partition remembers.
type answerBounds struct {
	most  int   // answers; negative: none at all
	even  int   // bytes that a partition may always take where no callers are known; 0: no bound
	share int64 // bytes of all partitions
}

func (s *Store) answerBounds() answerBounds {
	share := s.cfg.MaxBytes / answerShare
	return answerBounds{most: s.cfg.MaxRequestIDs, share: share, even: int(share) / s.cfg.Partitions}
}

// put remembers an answer to a caller, forgetting others for the bounds and for want of memory. Where there is no room
// what was answered stands and is not remembered.
func (m *answers) put(k answerKey, e answered, caller string, now int64, most answerBounds, b *shardBudget) {
	if most.most < 0 {
		return
	}
	of, size := m.enter(caller, b), k.bytes()
	of.n++ // the new one competes with the others
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

// count counts bytes that are taken already, or given back.
func (m *answers) count(of *asker, bytes int, b *shardBudget) {
	m.bytes += bytes
	of.bytes += bytes
	b.answers.Add(int64(bytes))
	of.account.ids.Add(int64(bytes))
}

// enter returns what a caller has, made if need be.
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

// leave forgets a caller without answers.
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
		// Of several by their names, so that it is the same one each time.
		if other.n > most.n || other.n == most.n && most != of && label < most.account.label {
			most = other
		}
	}
	return most
}

// fits says whether a caller may have so many bytes more. There are bounds of what all partitions have together, and each can only forget
// what it has itself.
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

// dropOldest forgets a caller's oldest answer, and reports whether there was one.
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

// expire forgets the answers at the front of the order whose time is over.
func (m *answers) expire(now int64, b *shardBudget) {
	for e := m.order.Front(); e != nil && e.Value.(*remembered).until <= now; e = m.order.Front() {
		m.dropOldest(e.Value.(*remembered).of, now, b) // of its caller's it is the oldest, too
	}
}

// forget drops every answer about one state and reports whether there was any.
func (m *answers) forget(of stateID) bool {
	before := len(m.by)
	for k := range m.by {
		if k.of == of {
			delete(m.by, k)
		}
	}
	return len(m.by) < before
}

// free forgets everything.
func (m *answers) free(b *shardBudget) {
	b.Give(m.bytes)
	for _, of := range m.askers {
		m.count(of, -of.bytes, b)
		b.sh.store.shares.giveCaller(of.account)
	}
	*m = answers{end: m.end}
}

// forgetUnshared forgets the charges under strict rules that another does not know.
func (m *answers) forgetUnshared(other *answers) {
	for k, e := range m.by {
		if e.strict && !e.gaveBack() && other.by[k] == nil {
			delete(m.by, k)
		}
	}
}

// unite adds what another has and this one does not.
func (m *answers) unite(other *answers, now int64, most answerBounds, b *shardBudget) {
	for e := range other.from(0) {
		if m.by[e.key] == nil && other.by[e.key] == e {
			m.put(e.key, e.answered, e.of.account.label, now, most, b)
		}
	}
}

// beforeID answers a repeated request id: with the admission that was made, beside the state as it is now.
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
	answer.Allowed, answer.Granted, answer.Delay, answer.Lease, answer.Reservation = !m.over, m.granted, m.delay, m.lease, m.reservation
	if answer.Allowed {
		answer.RetryAfter, answer.Banned = 0, false
	}
	if p.rule.Durability >= Escrow {
		// The first answer may still be waiting for the backup.
		answer.Ticket = sh.wait(p.part, p.k.Partition, p.rule)
	}
	return true, nil
}

// afterID keeps the answer of a charge under its request id. A charge with Always of which nothing was granted, because
// as much is owed as may be, is kept too: repeated when there is room again it would be another charge.
func (sh *shard) afterID(p *plan, call *Call, answer *Answer) {
	d := &answer.Decision
	if d.Granted == 0 && !(call.Always && call.Cost > 0) {
		return
	}
	m := answered{cost: call.Cost, granted: d.Granted, over: !d.Allowed, delay: d.Delay, lease: d.Lease, reservation: call.Reservation}
	sh.rememberAnswer(p.part, p.id(), answerCharge, call.RequestID, call.Caller, p.rule, p.now, m)
}

// rememberAnswer keeps what was answered to a request.
func (sh *shard) rememberAnswer(part *partition, of stateID, kind answerKind, id, caller string, rule *Rule, now algo.Instant, m answered) {
	m.strict, m.persist, m.until = rule.Strict, rule.Persist, now.Mono+int64(keepFor(rule.Limits))
	k := answerKey{stateID{of.scope, strings.Clone(of.key)}, strings.Clone(id), kind}
	answers := &part.ensureExtras().answers
	before := answers.end
	answers.put(k, m, caller, now.Mono, sh.store.answerBounds(), &sh.budget)
	part.noteAnswer(m.persist, before)
}

// noteAnswer makes the newest answer pending, whose turn is next if it is remembered.
func (p *partition) noteAnswer(persist bool, next uint64) {
	if p.followed || p.saved {
		p.extras.bump()
		p.skipAnswer(persist, next)
		p.recount()
	}
}

// sameUse reports whether a charge under one reservation id may be a repetition of a charge under another: both are of
// none, both make a reservation, whose id is drawn anew each time, or both add to the same one, which each extension
// numbers anew.
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
