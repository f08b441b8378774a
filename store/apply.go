package store

import (
	"errors"
	"math"
	"slices"
	"time"
	"unsafe"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/varint"
)

// This file is the follower's side of replication: Apply brings a copy up to date with a chunk from the holder.
// chunk.go writes the chunks, and lists the kinds of items. The path of one chunk:
//
//  1. Apply calls some under the shard's lock, again and again until all items are applied.
//  2. some applies up to applyHold items; item calls the function for an item's kind.
//  3. For an itemKey, key calls state, which adds to the state or replaces it, and reservations and loans, which
//     replace what the copy had.
//  4. If there is no memory for an item, Apply has makeRoom drop records that are as good as new, and applies the item
//     again.
//
// The bytes come from the network, so Apply trusts none of them: every number has a bound, and every length is compared
// with what is left of the chunk. After an error the copy is of no use, and must be fetched anew.
//
// This process's disk may follow the copy. So an item that changes records, answers or losses is followed by a note
// function or untell, unless it is for the staging area.

// applyHold is how many items Apply applies while it holds a shard's lock.
const applyHold = 256

// Bounds of the fields of a chunk, besides those of algo.
const (
	maxScope     = 1 << 12
	maxRequestID = 1 << 10
	maxAge       = int64(200 * 366 * 24 * time.Hour)
	maxCaller    = 1 << 8
)

// Apply applies a chunk to the content, or to the staging area. The error is ErrChunk, ErrCopyFull, or ErrHeld if the
// partition is open and the chunk is not staged.
func (s *Store) Apply(p int, staged bool, now algo.Instant, chunk []byte) error {
	if len(chunk) == 0 {
		return nil
	}
	sh, part := s.at(p)
	a := apply{sh: sh, part: part, staged: staged, now: now, r: reader{varint.Of(chunk)}}
	a.rules = a.first[:0]
	if a.r.Byte() != chunkVersion {
		return ErrChunk
	}
	for tried := 0; ; {
		before := a.r
		var err error
		sh.locked(func() { err = a.some(&before) })
		switch {
		case err == nil && len(a.r.Rest) == 0:
			return nil
		case err == nil:
			tried = 0
			continue
		case err != errNoRoom:
			var zone *algo.ZoneError
			if !errors.As(err, &zone) {
				return err
			}
			// Load reads a file, so it is called without the lock. Then the item is applied again.
			if _, err := s.zones.Load(zone.Name); err != nil {
				return ErrChunk
			}
			a.r = before
			continue
		}
		// makeRoom drops other records. Then the item is applied again.
		a.r = before
		tried++
		if !s.makeRoom(now, tried) || tried > 10 {
			s.full.Add(1)
			return ErrCopyFull
		}
	}
}

// kept is a rule of a chunk, and the caller to whose account its records are counted.
type kept struct {
	rule   *Rule
	caller string
}

// apply is the state of one call of Apply.
type apply struct {
	sh     *shard
	part   *partition
	staged bool
	now    algo.Instant
	r      reader
	rules  []kept
	first  [2]kept // room for rules
	to     *content
}

// some applies up to applyHold items. After an error, at is at the beginning of the item that failed.
func (a *apply) some(at *reader) error {
	a.to = &a.part.content
	switch {
	case a.staged:
		a.to = &a.part.ensureRole().staging
	case a.part.open:
		return ErrHeld
	}
	for range applyHold {
		if len(a.r.Rest) == 0 {
			return nil
		}
		*at = a.r
		rules := len(a.rules)
		err := a.item()
		if err == nil && a.r.Failed() {
			err = ErrChunk
		}
		if err != nil {
			a.rules = a.rules[:rules]
			return err
		}
	}
	return nil
}

func (a *apply) item() error {
	r, side := &a.r, a.to.ensureExtras()
	switch r.Byte() {
	case itemVersion:
		if !a.staged {
			a.part.keepFloor()
		}
		side.version = r.Uint(math.MaxInt64)
	case itemCold:
		return a.cold()
	case itemReset:
		hash, of := r.Fixed64(), r.identity().clone()
		if r.Failed() {
			return ErrChunk
		}
		if !a.staged {
			a.part.noteReset(reset{of, hash}, &a.sh.budget)
		}
		if slot, ok := a.sh.find(&a.to.table, hash, of.scope, of.key); ok {
			a.sh.dropWhole(a.to, slot)
		}
		side.answers.forget(of)
	case itemRequestID:
		return a.requestID()
	case itemRule:
		return a.rule()
	case itemKey:
		return a.key()
	case itemGone:
		return a.gone()
	default:
		return ErrChunk
	}
	return nil
}

func (a *apply) requestID() error {
	r, side, b := &a.r, a.to.extras, &a.sh.budget
	k := answerKey{of: r.identity()}
	k.id, k.kind = string(r.bytes(maxRequestID)), answerKind(r.Byte())
	m := answered{cost: r.int(algo.MaxLimit), granted: r.int(algo.MaxLimit), delay: time.Duration(r.int(maxAge))}
	m.excess, m.over, m.strict, m.persist, m.lease = r.int(algo.MaxLimit), r.bool(), r.bool(), r.bool(), r.Fixed64()
	m.reservation = r.reservationID()
	m.until = a.now.Mono + r.int(int64(10*time.Minute))
	caller := string(r.bytes(maxCaller))
	if r.Failed() || k.kind == 0 || k.kind >= answerKinds {
		return ErrChunk
	}
	k.of = k.of.clone()
	before := side.answers.end
	side.answers.put(k, m, caller, a.now.Mono, a.sh.store.answerBounds(), b)
	if !a.staged {
		a.part.noteAnswer(m.persist, before)
	}
	return nil
}

// gone drops the records of a hash that the chunk does not name.
func (a *apply) gone() error {
	hash := a.r.Fixed64()
	left := make([]stateID, a.r.Uint(uint64(len(a.r.Rest)/2)))
	for i := range left {
		left[i] = a.r.identity()
	}
	if a.r.Failed() {
		return ErrChunk
	}
	var room [4]uint32
	for {
		slots := a.sh.ofHash(&a.to.table, hash, room[:0])
		i := slices.IndexFunc(slots, func(slot uint32) bool {
			return !slices.ContainsFunc(left, a.sh.record(a.to.ref(slot)).is)
		})
		if i < 0 {
			return nil
		}
		if !a.staged && a.part.saved {
			a.sh.noteGone(a.part, a.sh.record(a.to.ref(slots[i])), ownership.Disk)
		}
		a.sh.dropWhole(a.to, slots[i]) // may move the others
	}
}

func (a *apply) cold() error {
	r := &a.r
	var cold [2]coldness
	for i := range cold {
		if cold[i].is = r.bool(); cold[i].is {
			cold[i].at.Mono = a.now.Mono - r.int(maxAge)
			cold[i].at.Wall = r.Varint()
		}
	}
	if r.Failed() {
		return ErrChunk
	}
	a.to.extras.cold = cold[0]
	if cold[1].is && !cold[1].same(a.to.extras.coldStrict) {
		// The holder sends the records that it has. It may have dropped others as idle, and then they are new keys there.
		a.sh.coldStrict(a.to, cold[1], func(record) {})
	}
	if !a.staged {
		a.part.noteCold()
	}
	return nil
}

func (a *apply) rule() error {
	r := &a.r
	scope := r.bytes(maxScope)
	caller := r.bytes(maxCaller)
	limits := r.bytes(math.MaxInt32)
	durability, strict, persist := Durability(r.Byte()), r.bool(), r.bool()
	ban := r.int(int64(algo.MaxWindow))
	if r.Failed() || durability > Sync {
		return ErrChunk
	}
	// If the shard has an equal rule, use it: it need not be parsed, and takes no memory.
	numbers := a.sh.specOf[specKey{string(scope), string(caller)}]
	for _, n := range numbers[:min(variants, len(numbers))] {
		sp := &a.sh.specs[n]
		if sp.rule.Durability != durability || sp.rule.Strict != strict || sp.rule.Persist != persist ||
			int64(sp.rule.Ban) != ban {
			continue
		}
		if a.sh.buffer = algo.AppendLimits(a.sh.buffer[:0], sp.rule.Limits); string(a.sh.buffer) == string(limits) {
			a.rules = append(a.rules, kept{sp.rule, sp.caller.label})
			return nil
		}
	}
	ls, rest, err := algo.ParseLimits(limits, a.sh.store.zones.Known)
	var unknown *algo.ZoneError
	if errors.As(err, &unknown) {
		return err
	}
	if err != nil || len(rest) > 0 {
		return ErrChunk
	}
	rule := &Rule{Scope: string(scope), Durability: durability, Strict: strict, Persist: persist,
		Ban: time.Duration(ban), Limits: ls}
	a.rules = append(a.rules, kept{rule, string(caller)})
	return nil
}

// record reads the beginning of an itemKey: rule, hash and key.
func (a *apply) record() (rule kept, k Key, err error) {
	r := &a.r
	index := r.Uint(math.MaxInt32)
	k.Hash = r.Fixed64()
	key := r.bytes(maxKey)
	k.Key = unsafe.String(unsafe.SliceData(key), len(key)) // valid as long as the chunk; a record copies it
	if r.Failed() || index >= uint64(len(a.rules)) {
		return kept{}, k, ErrChunk
	}
	rule = a.rules[index]
	if headWords+rule.rule.Limits.Words()+banWords(rule.rule.Ban)+keyWords(len(k.Key)) > algo.MaxBlock {
		return kept{}, k, ErrChunk
	}
	return rule, k, nil
}

func (a *apply) key() error {
	rule, k, err := a.record()
	if err != nil {
		return err
	}
	r := &a.r
	o := owing{hash: k.Hash, units: r.int(algo.MaxLimit)}
	state := r.bytes(math.MaxInt32)
	reserved := make([]copiedReservation, r.Uint(uint64(len(r.Rest)/len(ReservationID{}))))
	for i := range reserved {
		reserved[i] = r.reservation(a.now)
	}
	var holds []byte
	if len(reserved) > 0 {
		holds = r.bytes(math.MaxInt32)
	}
	loans := r.bytes(math.MaxInt32)
	banned := r.int(maxAge)
	if banned > 0 && rule.rule.Ban == 0 || r.Failed() {
		return ErrChunk
	}
	rec, err := a.state(rule, k, state)
	if err != nil {
		return err
	}
	if err := a.reservations(rec, reserved, holds); err != nil {
		return err
	}
	if err := a.loans(rec, loans); err != nil {
		return err
	}
	if rec.lift(); banned > 0 {
		rec.ban(rec.state.Latest(a.now).Mono + min(banned, int64(rule.rule.Ban)))
	}
	if o.units > 0 || rec.has(owedFlag) {
		a.sh.owe(a.to, stateID{rule.rule.Scope, k.Key}, o)
	}
	if !a.staged {
		a.sh.note(a.part, rec, 0)
	}
	return nil
}

// copiedReservation is a reservation of a chunk, and its caller.
type copiedReservation struct {
	reservation
	caller string
}

// reservations replaces the reservations of a record by a list, in the order of their charges. Reservations that are
// not in the list have ended at the holder, although their ttl may not have ended here, because the copy counts it from
// the arrival of the chunk. Beyond the bound of reservations the newest ones are dropped, and their units stay charged.
func (a *apply) reservations(r record, list []copiedReservation, data []byte) error {
	all, b := &a.to.extras.reservations, &a.sh.budget
	holds, rest, err := r.spec.rule.Limits.ReadHolds(a.sh.arena, r.state, a.now, len(list), data)
	if err != nil || len(rest) > 0 {
		return ErrChunk
	}
	if len(list) == 0 && all.count == 0 {
		return nil
	}
	of := r.id()
	all.forget(of, b)
	for room := int64(a.sh.store.cfg.MaxReservations) - b.reservations.Load(); int64(len(list)) > max(room, 0); {
		list, holds = list[:len(list)-1], holds.Remove(len(list)-1)
	}
	for i, e := range list {
		all.put(of, r.hash(), e.reservation, e.caller, holds[i], b)
	}
	return nil
}

// loans replaces the loans of a record.
func (a *apply) loans(r record, data []byte) error {
	if len(data) == 0 {
		if r.has(lentFlag) {
			a.to.dropLent(r.id(), &a.sh.budget)
			r.clear(lentFlag)
		}
		return nil
	}
	loans, rest, err := algo.ReadLoans(a.now, data)
	if err != nil || len(rest) > 0 {
		return ErrChunk
	}
	l := a.to.ensureLoans(r)
	l.Loans = loans
	a.to.keepLent(r, l, &a.sh.budget)
	return nil
}

// state makes the record if there is none, converts it to the chunk's rule, and applies the state's changes.
func (a *apply) state(of kept, k Key, data []byte) (record, error) {
	rule, t := of.rule, &a.to.table
	slot, found := a.sh.find(t, k.Hash, rule.Scope, k.Key)
	var err error
	if !found {
		slot, err = a.sh.insert(t, k, rule, a.now, of.caller, false)
	} else {
		// Keep a rule that is equal: otherwise this process's next decision would change it back.
		if old := a.sh.record(t.ref(slot)).spec.rule; old != rule && !same(old, rule) {
			_, err = a.sh.adopt(a.to, slot, rule, a.now) // the reservations lose their holds, which come with the state
			if err == nil && !a.staged {
				a.sh.untell(a.part, a.sh.record(t.ref(slot)), old)
			}
		}
	}
	if err != nil {
		return record{}, err
	}
	rec := a.sh.record(t.ref(slot))
	var rest []byte
	a.sh.counted(rec, func() { rest, err = rule.Limits.Extend(a.sh.arena, rec.state, a.now, data) })
	switch {
	case err == algo.ErrNoMemory:
		return record{}, a.noRoom(slot, found)
	case err != nil || len(rest) > 0:
		return record{}, ErrChunk
	}
	return rec, nil
}

// noRoom drops a record that this item has made, so that the item can be applied again. If the record is older, a part
// of the item may have changed it, so the copy is of no use.
func (a *apply) noRoom(slot uint32, found bool) error {
	if found {
		return ErrCopyFull
	}
	a.sh.drop(&a.to.table, slot)
	return errNoRoom
}

// owe sets what the holder may have granted beyond the copy's state (escrow.go).
func (sh *shard) owe(c *content, of stateID, o owing) {
	slot, ok := sh.find(&c.table, o.hash, of.scope, of.key)
	if !ok {
		return
	}
	r := sh.record(c.ref(slot))
	if o.units == 0 {
		r.clear(owedFlag)
		delete(c.extras.owed, of)
		return
	}
	r.set(owedFlag)
	if c.extras.owed == nil {
		c.extras.owed = make(map[stateID]owing)
	}
	c.extras.owed[r.id()] = o
}

// reader reads the fields of items. After a failure it returns zeros, and Failed reports true.
type reader struct{ varint.Reader[[]byte] }

// identity reads the scope and key of a state. They are parts of the chunk, so a caller that keeps them must clone
// them.
func (r *reader) identity() stateID {
	scope, key := r.bytes(maxScope), r.bytes(maxKey)
	return stateID{unsafe.String(unsafe.SliceData(scope), len(scope)), unsafe.String(unsafe.SliceData(key), len(key))}
}

func (r *reader) reservationID() (id ReservationID) {
	copy(id[:], r.Take(uint64(len(id))))
	return id
}

func (r *reader) reservation(now algo.Instant) (c copiedReservation) {
	c.id, c.units, c.until = r.reservationID(), r.int(algo.MaxLimit), now.Mono+r.int(maxAge)
	c.once, c.release, c.caller = r.bool(), r.bool(), string(r.bytes(maxCaller))
	if c.id == (ReservationID{}) {
		r.Fail()
	}
	return c
}

func (r *reader) bool() bool {
	b := r.Byte()
	if b > 1 {
		r.Fail()
	}
	return b == 1
}

func (r *reader) int(most int64) int64 { return int64(r.Uint(uint64(most))) }

// bytes reads a length and as many bytes, most at most.
func (r *reader) bytes(most int) []byte { return slices.Clip(r.Text(uint64(most))) }
