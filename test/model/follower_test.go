package model

// follows reports whether to takes copies from a holder.
func (st *step) follows(to *node, t term) bool { return to.standing == none && to.known <= t }

// copies brings a follower up to date.
func (st *step) copies(n, to int) {
	nd := &st.from.nodes[n]
	if nd.standing != owned && (st.has(freeze) || nd.standing != frozen) {
		return
	}
	f, other := &nd.follow[to], st.proc(st.from, to)
	attach := f.phase == detached || f.to != other
	st.changes(n, to, attach)
	if !attach && f.phase == current && !st.AtomicCopies {
		st.changes(n, to, true) // the follower has asked for a whole copy again
	}
}

func (st *step) changes(n, to int, attach bool) {
	nd := &st.from.nodes[n]
	f := &nd.follow[to]
	self, other := st.proc(st.from, n), st.proc(st.from, to)
	if attach && int(st.from.attaches) == st.Attaches {
		return
	}
	msg := message{kind: replicate, from: self, to: other, term: nd.term, seq: f.seq + 1, content: nd.content}
	if st.Escrow {
		msg.escrow = 1
	}
	switch {
	case attach:
		msg.step, msg.keys = begun, 1
		if f.to != other {
			msg.seq = 1
		}
	case f.phase == beginning:
		msg.step, msg.keys = complete, 2|changed(f.sent, nd.content)
	case f.phase == current && nd.content != f.confirmed:
		msg.step, msg.keys = sending, changed(f.sent, nd.content)
	default:
		return
	}
	if st.AtomicCopies {
		if attach {
			msg.step, msg.keys = complete, 3
		}
		st.copyAtOnce(n, to, msg, attach)
		return
	}
	s := *st.from
	if attach {
		s.attaches++
	}
	s.nodes[n].follow[to] = follower{to: other, phase: msg.step, seq: msg.seq, sent: nd.content, confirmed: f.confirmed,
		escrow: f.escrow}
	if attach && (f.phase == detached || f.to != other) {
		s.nodes[n].follow[to].confirmed, s.nodes[n].follow[to].escrow = 0, 0
	}
	s.send(msg)
	st.out(action{what: "replicate", a: n, b: to, msg: msg}, &s)
}

// copyAtOnce delivers msg in the step that sends it; the confirmation may be lost.
func (st *step) copyAtOnce(n, to int, msg message, attach bool) {
	if !st.accepts(&st.from.nodes[to], &msg, attach) {
		return
	}
	for _, lost := range []bool{false, true} {
		s := *st.from
		a := action{what: "copy", a: n, b: to, msg: msg}
		if attach {
			s.attaches++
		}
		peer, f := &s.nodes[to], &s.nodes[n].follow[to]
		peer.known = msg.term
		peer.content, peer.origin, peer.how, peer.escrow = st.carried(&s, msg.content), origin{msg.term, msg.from},
			copied, msg.escrow
		peer.stream, peer.staging = peer.origin, false
		if lost {
			a.variant = ", the confirmation is lost"
			if attach {
				*f = follower{}
			}
		} else {
			*f = follower{to: msg.to, phase: current, sent: msg.content, confirmed: msg.content, escrow: msg.escrow}
		}
		st.out(a, &s)
	}
}

// accepts reports whether a follower takes a message of its holder.
func (st *step) accepts(to *node, msg *message, begin bool) bool {
	if !st.follows(to, msg.term) {
		return false
	}
	same := to.stream == origin{msg.term, msg.from}
	if begin {
		return !same || st.AtomicCopies || msg.seq > to.seq
	}
	if !st.has(copyIdentity) {
		same = to.stream.term == msg.term
	}
	return same && (st.AtomicCopies || msg.seq == to.seq+1)
}

// changed returns the keys that differ.
func changed(a, b content) (keys uint8) {
	for k := range uint8(2) {
		if (a.ids()^b.ids())&keyIDs(k) != 0 {
			keys |= 1 << k
		}
	}
	return keys
}

// apply adds to base the keys of msg.
func apply(base content, msg *message) content {
	ids := base.ids()
	for k := range uint8(2) {
		if msg.keys>>k&1 == 1 {
			ids = ids&^keyIDs(k) | msg.content.ids()&keyIDs(k)
		}
	}
	return content(ids | msg.content.marks())
}

// guard records a backup with the voters: from here on answers wait for it.
func (st *step) guard(n, to int) {
	nd := &st.from.nodes[n]
	f := &nd.follow[to]
	if int(st.from.gens) == st.Gens || nd.standing != owned || nd.guard != 0 || f.phase != current {
		return
	}
	if !nd.ready && st.has(guardAfterGrant) {
		return
	}
	if f.confirmed.ids() != nd.content.ids() || st.has(marksTravel) && f.confirmed != nd.content {
		return
	}
	s := *st.from
	s.gens++
	nd = &s.nodes[n]
	nd.guard = f.to
	nd.gen++
	st.out(action{what: "guard", a: n, b: to}, &s)
}

// unguard gives a backup up: from here on answers wait until the voters have recorded that.
func (st *step) unguard(n int) {
	nd := &st.from.nodes[n]
	if int(st.from.gens) == st.Gens || nd.standing != owned || nd.guard == 0 {
		return
	}
	if st.Voters == 0 && st.alive(st.from, nd.guard) {
		return
	}
	s := *st.from
	s.gens++
	nd = &s.nodes[n]
	f := &nd.follow[nd.guard.node()]
	*f = follower{to: f.to, seq: f.seq}
	if !st.has(risingSequence) {
		*f = follower{}
	}
	nd.guard = 0
	nd.gen++
	st.out(action{what: "unguard", a: n}, &s)
}

// move freezes the partition and commits it to a follower.
func (st *step) move(n, to int) {
	nd := &st.from.nodes[n]
	f := &nd.follow[to]
	if int(st.from.moves) == st.Moves || nd.standing != owned || f.phase != current {
		return
	}
	s := *st.from
	s.moves++
	nd = &s.nodes[n]
	nd.standing, nd.target = frozen, f.to
	msg := message{
		kind: commit, from: st.proc(&s, n), to: f.to, term: nd.term, seq: f.seq + 1, content: f.confirmed,
		known: nd.known, whole: nd.ready || !st.has(wholeRelease),
	}
	if st.has(finalDrain) {
		msg.content = nd.content
	}
	if st.has(commitTerm) {
		nd.known++
	}
	s.send(msg)
	st.out(action{what: "commit", a: n, b: to, msg: msg}, &s)
}

// follow is a follower's receipt of an entry.
func (st *step) follow(msg message) {
	if !st.accepts(&st.from.nodes[msg.to.node()], &msg, msg.step == begun) {
		return
	}
	reply := message{kind: ack, from: msg.to, to: msg.from, term: msg.term, seq: msg.seq, escrow: msg.escrow}
	if !st.has(ackAfterApply) {
		s := *st.from
		s.send(reply)
		st.out(action{what: "ackEarly", a: msg.to.node(), msg: msg}, &s)
	}
	s := *st.from
	msg.content = st.carried(&s, msg.content)
	nd := &s.nodes[msg.to.node()]
	nd.known, nd.seq = msg.term, msg.seq
	nd.stream = origin{msg.term, msg.from}
	whole := msg.step == complete
	switch {
	case msg.step == begun:
		nd.staging, nd.staged = true, apply(0, &msg)
	case nd.staging:
		nd.staged = apply(nd.staged, &msg)
	default:
		nd.content, nd.escrow = apply(nd.content, &msg), msg.escrow
	}
	if nd.staging && (whole || !st.has(stageCopies)) {
		nd.content, nd.escrow = nd.staged, msg.escrow
		nd.origin, nd.how = nd.stream, copied
		if whole {
			nd.staging, nd.staged = false, 0
		}
	}
	s.send(reply)
	st.out(action{what: "apply", a: msg.to.node(), msg: msg}, &s)
}

// takeOver is the receipt of a Commit.
func (st *step) takeOver(msg message) {
	s := *st.from
	nd := &s.nodes[msg.to.node()]
	from := origin{msg.term, msg.from}
	if nd.standing != none || nd.known > max(msg.term, msg.known) || nd.stream != from || nd.origin != from ||
		nd.staging ||
		!st.AtomicCopies && nd.seq+1 != msg.seq {
		return
	}
	t := max(msg.known, nd.known, msg.term)
	if st.has(risingTerms) {
		t++
	}
	nd.content, nd.origin, nd.how, nd.escrow = st.carried(&s, msg.content), from, releasedHole, 0
	if msg.whole {
		nd.how = released
	}
	st.begin(nd, t)
	// The sender has the same content: it is a follower that is current already.
	nd.follow[msg.from.node()] = follower{to: msg.from, phase: current, sent: msg.content, confirmed: msg.content}
	if st.Voters == 0 {
		nd.ready, nd.how, nd.origin = true, itself, origin{t, msg.to}
		st.use(&s, t, msg.to)
	}
	reply := message{kind: commitAck, from: msg.to, to: msg.from, term: msg.term, known: t}
	s.send(reply)
	st.out(action{what: "takeOver", a: msg.to.node(), msg: msg, term: t}, &s)
}

// released is the receipt of a Commit's answer.
func (st *step) released(msg message) {
	s := *st.from
	nd := &s.nodes[msg.to.node()]
	if (!st.has(backupConfirms) || nd.guard == msg.from) && nd.ready && st.leased(&s, msg.to.node()) {
		s.answer(nd.content.ids())
	}
	kept := origin{msg.known, msg.from}
	if nd.known <= msg.known {
		*nd = node{boot: nd.boot, known: msg.known, content: nd.content, origin: kept, how: copied, stream: kept}
	} else {
		*nd = node{boot: nd.boot, known: nd.known}
	}
	st.out(action{what: "released", a: msg.to.node(), msg: msg}, &s)
}
