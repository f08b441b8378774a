package model

import "math/bits"

// vote is a voter's receipt of a request.
func (st *step) vote(msg message, v int) {
	w := &st.from.voters[v]
	if w.reading || w.abstain > 0 {
		return
	}
	s := *st.from
	w = &s.voters[v]
	a := action{what: "vote", a: v, msg: msg}
	same := w.rec.term == msg.term && w.rec.node == msg.from
	next := record{msg.term, msg.from, msg.backup}
	renewal := msg.from.boot() == s.nodes[msg.from.node()].boot && s.nodes[msg.from.node()].everGrants>>v&1 == 1
	switch {
	case msg.term.epoch() < w.floor:
		a.variant = ": refused, the epoch is over"
		st.refuse(a, s, msg, newTerm(w.floor, 0))
		return
	case same:
		if msg.seq < w.gen && st.has(orderedGens) {
			return
		}
		w.rec, w.gen, w.left = next, msg.seq, st.voterTicks()
		if !st.has(repeatReplaced) {
			w.prevState, w.prev = prevUnknown, record{}
		}
	case w.rec.term >= msg.term && !st.has(checkRenewals) && renewal:
	case w.rec.term >= msg.term:
		a.variant = ": refused, a record stands against it"
		st.refuse(a, s, msg, w.rec.term)
		return
	case w.left == 0 || w.rec.node == msg.from || msg.release != origin{} &&
		(!st.has(exactRelease) || msg.release == origin{w.rec.term, w.rec.node}):
		w.prevState, w.prev = prevRecord, w.rec
		if w.rec == (record{}) {
			w.prevState = prevNothing
		}
		w.rec, w.gen, w.left = next, msg.seq, st.voterTicks()
	default:
		a.variant = ": refused, a record stands against it"
		st.refuse(a, s, msg, w.rec.term)
		return
	}
	nd := &s.nodes[msg.from.node()]
	counts := st.alive(&s, msg.from) && nd.standing == owned && nd.term == msg.term && msg.seq <= nd.gen &&
		msg.age < st.Lease
	if counts {
		heard := s
		nd := &heard.nodes[msg.from.node()]
		sup := support{age: 1 + msg.age, gen: msg.seq, free: msg.backup == 0, prevState: w.prevState, prev: w.prev}
		old := &nd.support[v]
		if sup.prevState == prevUnknown && old.age > 0 {
			sup.prevState, sup.prev = old.prevState, old.prev
		}
		if old.late || old.age == 0 || old.age > sup.age || old.gen < sup.gen || *old == sup {
			*old = sup
			st.noteGrant(nd, v)
			a.variant = ": granted"
			st.out(a, &heard)
		}
		if st.LateReplies || !st.has(leaseFromSending) {
			late := s
			if o := &late.nodes[msg.from.node()].support[v]; o.age == 0 {
				*o = sup
				o.late = true
				a.variant = ": granted, the reply is late"
				st.out(a, &late)
			}
		}
	}
	a.variant = ": granted, the reply is lost"
	st.out(a, &s)
}

// noteGrant keeps what only holders that break a rule go by.
func (st *step) noteGrant(nd *node, v int) {
	if !st.has(checkRenewals) {
		nd.everGrants |= 1 << v
	}
}

// refuse tells the sender of a request of a higher term.
func (st *step) refuse(a action, s state, msg message, t term) {
	nd := &s.nodes[msg.from.node()]
	if !st.alive(&s, msg.from) || nd.standing != owned || nd.term != msg.term || nd.known >= t {
		return
	}
	nd.known = t
	st.out(a, &s)
}

// replies lets late replies arrive.
func (st *step) replies() {
	for n := range st.Nodes {
		for v := range st.Voters {
			if !st.from.nodes[n].support[v].late {
				continue
			}
			s := *st.from
			sup := &s.nodes[n].support[v]
			sup.late = false
			if !st.has(leaseFromSending) {
				sup.age = 1
			}
			st.noteGrant(&s.nodes[n], v)
			st.out(action{what: "reply", a: n, b: v}, &s)
		}
	}
}

func (st *step) voterRestart(v int) {
	if int(st.from.restarts) == st.Restarts {
		return
	}
	s := *st.from
	s.restarts++
	s.voters[v] = voter{reading: true}
	w := &s.voters[v]
	if !st.has(readRecords) {
		w.reading, w.floor, w.prevState = false, 1, prevNothing
	}
	if st.has(abstain) {
		w.abstain = st.Lease
	}
	st.out(action{what: "voterRestart", a: v}, &s)
}

// voterRead is a voter's reading of the others, one after another.
func (st *step) voterRead(v int) {
	w := &st.from.voters[v]
	if !w.reading || st.has(abstainFirst) && w.abstain > 0 {
		return
	}
	for u := range st.Voters {
		if u == v {
			continue
		}
		s := *st.from
		w, from := &s.voters[v], &s.voters[u]
		a := action{what: "read", a: v, b: u}
		if from.reading {
			w.sawReading |= 1 << u
			w.read &^= 1 << u
			a.variant = ", which knows nothing itself"
			st.out(a, &s)
			continue
		}
		w.sawReading &^= 1 << u
		w.read |= 1 << u
		w.floor = max(w.floor, from.floor)
		newer := from.rec.term > w.rec.term
		if from.rec.term == w.rec.term && from.rec.term != 0 {
			if st.has(readGens) {
				newer = from.gen > w.gen
			} else if from.rec.backup != w.rec.backup {
				w.rec.backup = 0 // which of the two is newer is not known
			}
		}
		if newer {
			w.rec, w.gen = from.rec, from.gen
			w.prevState, w.prev = prevUnknown, record{}
			if !st.has(readGens) {
				w.gen = 0
			}
		}
		if bits.OnesCount8(w.read) >= st.majority() {
			st.endReading(w)
			a.variant = " and votes again"
		}
		st.out(a, &s)
	}
	if st.Voters-1-bits.OnesCount8(w.sawReading) < st.majority() && int(st.from.clock) < maxEpochs {
		s := *st.from
		w := &s.voters[v]
		epoch := max(w.floor, w.rec.term.epoch()) + 1
		if st.has(clockEpochs) {
			epoch = max(epoch, s.clock+1)
		}
		s.clock = max(s.clock, epoch)
		*w = voter{reading: true, abstain: w.abstain, floor: epoch, prevState: prevNothing}
		st.endReading(w)
		st.out(action{what: "epoch", a: v, b: int(epoch)}, &s)
	}
}

func (st *step) endReading(w *voter) {
	w.reading, w.read, w.sawReading = false, 0, 0
	if w.rec == (record{}) && w.prevState == prevUnknown {
		w.prevState = prevNothing
	}
}

// forward takes one check through a forwarder.
func (st *step) forward() {
	s := *st.from
	q := &s.question
	switch q.stage {
	case 0:
		q.stage = 1
		st.out(action{what: "ask"}, &s)
	case 1:
		for n := range st.Nodes {
			nd := &s.nodes[n]
			if nd.standing != owned || !nd.ready || !st.leased(&s, n) {
				continue
			}
			s := s
			q := &s.question
			q.stage, q.left = 2, st.leaseLeft(&s, n)
			q.real = q.left
			st.out(action{what: "answer", a: n}, &s)
		}
	case 2:
		q.stage, q.bound = 3, q.left
		if st.has(boundFromQuestion) {
			q.bound -= min(q.bound, q.asked)
		}
		q.left, q.asked = 0, 0
		st.out(action{what: "answered"}, &s)
	case 3:
		if q.bound == 0 {
			return
		}
		if q.real == 0 {
			s.bad = badAnswer
		}
		s.question = question{stage: 4}
		st.out(action{what: "useAnswer"}, &s)
	}
}

// leaseLeft is for how many ticks n's grant is valid.
func (st *step) leaseLeft(s *state, n int) uint8 {
	for left := st.Lease; left > 0; left-- {
		count := 0
		for v := range st.Voters {
			if sup := &s.nodes[n].support[v]; sup.age > 0 && !sup.late && st.Lease-sup.age+1 >= left {
				count++
			}
		}
		if count >= st.majority() {
			return left
		}
	}
	return 0
}
