package model

import (
	"math/bits"
	"strings"
)

// requests sends a request to all voters. A newer request of the same content takes the place of an older one:
// whatever the older can bring about the newer can.
func (st *step) requests(n int) {
	nd := &st.from.nodes[n]
	if st.Voters == 0 || nd.standing != owned {
		return
	}
	msg := message{kind: request, from: st.proc(st.from, n), term: nd.term, seq: nd.gen, backup: nd.guard}
	if nd.how == released || nd.how == releasedHole {
		msg.release = nd.origin
	}
	s := *st.from
	count := 0
	for i := range s.messages {
		old := &s.net[i]
		if old.kind != request {
			continue
		}
		count++
		if old.from == msg.from && old.term == msg.term && old.seq == msg.seq {
			*old = msg
			st.out(action{what: "request", a: n, msg: msg}, &s)
			return
		}
	}
	if count < st.Requests {
		s.send(msg)
		st.out(action{what: "request", a: n, msg: msg}, &s)
		return
	}
	for i := range st.from.messages {
		if st.from.net[i].kind != request {
			continue
		}
		s := *st.from
		s.net[i] = msg
		st.out(action{what: "request", a: n, msg: msg, variant: ", another is lost"}, &s)
	}
}

// settle is the moment at which a holder that has become a granted one finds out whether its content is whole.
func (st *step) settle(n int) {
	if nd := &st.from.nodes[n]; st.Voters == 0 || nd.standing != owned || nd.ready || !st.leased(st.from, n) {
		return
	}
	s := *st.from
	nd := &s.nodes[n]
	self := st.proc(&s, n)
	var highest record
	known := true
	for v := range st.Voters {
		sup := &nd.support[v]
		if sup.age == 0 || sup.late {
			continue
		}
		if sup.prevState == prevUnknown {
			known = !st.has(repeatReplaced)
		}
		if sup.prevState == prevRecord && sup.prev.term > highest.term {
			highest = sup.prev
		}
	}
	backup := true
	for v := range st.Voters {
		sup := &nd.support[v]
		if sup.age > 0 && !sup.late && sup.prevState == prevRecord && sup.prev.term == highest.term &&
			sup.prev.backup != self {
			backup = false
		}
	}
	same := nd.origin == origin{highest.term, highest.node}
	variant := ": every key starts full"
	switch {
	case !known, highest == record{}:
	case st.has(coldEpoch) && highest.term.epoch() != nd.term.epoch():
		variant = ", in a new epoch: every key starts full"
	case nd.how == itself && same:
		variant = ": its content is whole, it was the last holder itself"
	case nd.how == released && same:
		variant = ": its content is whole, the last holder released it"
	case nd.how == copied && backup && (same || !st.has(copyIdentity)):
		variant = ": its content is whole, it was the last holder's backup"
		if st.has(chargeEscrow) {
			nd.content += content(nd.escrow) << 4
		}
	}
	if strings.HasSuffix(variant, "full") {
		nd.content |= full
	}
	nd.escrow = 0
	nd.ready, nd.how, nd.origin = true, itself, origin{nd.term, self}
	st.use(&s, nd.term, self)
	st.out(action{what: "settle", a: n, variant: variant}, &s)
}

func (st *step) use(s *state, t term, p proc) {
	i := usedIndex(t)
	if s.used[i] != 0 && s.used[i] != p {
		s.bad = badTerm
	}
	s.used[i] = p
}

// ahead reports whether n may spend one more unit ahead of its copy.
func (st *step) ahead(nd *node, id uint8) bool {
	if nd.guard == 0 {
		return false
	}
	f := &nd.follow[nd.guard.node()]
	return f.to == nd.guard && f.phase >= current &&
		bits.OnesCount8((nd.content.ids()|id)&^f.confirmed.ids()) <= int(f.escrow)
}

func (st *step) decide(n int) {
	nd := &st.from.nodes[n]
	if int(st.from.next) == st.Admissions || !nd.ready || nd.content.isFull() || !st.leased(st.from, n) {
		return
	}
	if nd.standing != owned && (st.has(freeze) || nd.standing != frozen) {
		return
	}
	if st.Loans {
		s := *st.from
		id := uint8(1) << s.next
		s.next++
		s.lent |= id
		s.nodes[n].content |= content(id)
		if !st.has(lendAfterCopy) {
			s.answer(id)
		}
		st.out(action{what: "lend", a: n, b: int(st.from.next)}, &s)
	}
	s := *st.from
	id := uint8(1) << s.next
	s.next++
	nd = &s.nodes[n]
	a := action{what: "decide", a: n, b: int(st.from.next)}
	if st.Escrow && st.ahead(nd, id) {
		s.given |= id
		a.variant = " and answers"
	}
	nd.content |= content(id)
	st.out(a, &s)
}

// confirmed returns the admissions of n that its recorded backup has.
func (st *step) confirmed(s *state, n int) uint8 {
	nd := &s.nodes[n]
	if nd.guard == 0 || nd.follow[nd.guard.node()].to != nd.guard {
		return 0
	}
	return nd.follow[nd.guard.node()].confirmed.ids()
}

// give answers: the caller may act on it.
func (st *step) give(n int) {
	nd := &st.from.nodes[n]
	if nd.standing == none || !nd.ready || !st.leased(st.from, n) {
		return
	}
	may := st.confirmed(st.from, n)
	if st.unguarded(st.from, n) {
		may = nd.content.ids()
	}
	for id := range st.Admissions {
		if bit := uint8(1) << id; may&nd.content.ids()&^(st.from.given|st.from.borrowed)&bit != 0 {
			s := *st.from
			s.answer(bit)
			what := "give"
			if s.lent&bit != 0 {
				what = "hand"
			}
			st.out(action{what: what, a: n, b: id}, &s)
		}
	}
}

// spend is a borrower's admission of what it has on loan, which needs nobody.
func (st *step) spend() {
	for id := range st.Admissions {
		if bit := uint8(1) << id; st.from.borrowed&bit != 0 {
			s := *st.from
			s.borrowed &^= bit
			s.given |= bit
			st.out(action{what: "spend", b: id}, &s)
		}
	}
}

// end is the end of a loan of which nothing has been heard: it counts as spent, and so nothing changes.
func (st *step) end(n int) {
	if st.has(endCharges) {
		return
	}
	for id := range st.Admissions {
		if bit := uint8(1) << id; st.from.lent&st.from.nodes[n].content.ids()&bit != 0 {
			s := *st.from
			s.nodes[n].content &^= content(bit)
			st.out(action{what: "end", a: n, b: id}, &s)
		}
	}
}

// claim takes the partition unplanned. Where there are voters nothing else stands in the way: the verdict that the
// holder is gone may be wrong. Without them what is promised is less: verdicts are right, and the best copy claims.
func (st *step) claim(n int) {
	nd := &st.from.nodes[n]
	if int(st.from.claims) == st.Claims {
		return
	}
	if nd.standing == owned && nd.known <= nd.term {
		return
	}
	highest := nd.known
	if st.Voters == 0 {
		if nd.standing == owned || nd.standing == frozen && st.alive(st.from, nd.target) || nd.how == nothing {
			return
		}
		for other := range st.Nodes {
			o := &st.from.nodes[other]
			if other == n {
				continue
			}
			if o.standing != none || st.newer(o, nd) {
				return
			}
			highest = max(highest, o.known)
		}
	}
	if st.Voters == 0 {
		st.claimAbove(n, highest)
		return
	}
	// The queries before a claim are answered by all or by nobody.
	for other := range st.Nodes {
		highest = max(highest, st.from.nodes[other].known)
	}
	st.claimAbove(n, highest)
	if nd.known < highest && nd.known > 0 {
		st.claimAbove(n, nd.known)
	}
}

func (st *step) claimAbove(n int, t term) {
	s := *st.from
	s.claims++
	nd := &s.nodes[n]
	if st.has(risingTerms) {
		t++
	}
	self := st.proc(&s, n)
	variant := ""
	if nd.standing == frozen {
		variant = ", believing that the receiver of its commit is gone"
	}
	if nd.standing == owned && !nd.ready && !st.has(holeKnown) {
		nd.how, nd.origin = itself, origin{nd.term, self}
	}
	st.begin(nd, t)
	if st.Voters == 0 {
		if nd.how == copied && st.has(chargeEscrow) {
			nd.content += content(nd.escrow) << 4
		}
		nd.escrow, nd.ready, nd.how, nd.origin = 0, true, itself, origin{t, self}
		st.use(&s, t, self)
		if st.has(promiseOnQuery) {
			for other := range st.Nodes {
				s.nodes[other].known = max(s.nodes[other].known, t)
			}
		}
	}
	st.out(action{what: "claim", a: n, term: t, variant: variant}, &s)
}

// newer reports whether a has a better copy than b.
func (st *step) newer(a, b *node) bool {
	if a.how == nothing || a.origin.term != b.origin.term {
		return a.how != nothing && a.origin.term > b.origin.term
	}
	if st.has(commonVersion) {
		// One holder's content only grows.
		return a.content&^b.content != 0 || a.content == b.content && a.escrow > b.escrow
	}
	return a.seq > b.seq
}

// begin makes nd the holder at t, with the content it has.
func (st *step) begin(nd *node, t term) {
	*nd = node{
		boot: nd.boot, standing: owned, term: t, known: max(t, nd.known),
		content: nd.content, origin: nd.origin, how: nd.how, escrow: nd.escrow,
		support: nd.support,
	}
	if st.has(countPerTerm) {
		nd.support = [maxVoters]support{}
	}
}

// crash ends a process; its name comes back as another one that knows nothing.
func (st *step) crash(n int) {
	if int(st.from.crashes) == st.Crashes {
		return
	}
	if st.Voters == 0 && !st.restored(n) {
		return
	}
	s := *st.from
	s.crashes++
	s.nodes[n] = node{boot: s.nodes[n].boot + 1}
	st.out(action{what: "crash", a: n}, &s)
}

// restored reports whether n may crash where there are no voters: one crash at a time is covered, with the copy
// restored in between.
func (st *step) restored(n int) bool {
	nd := &st.from.nodes[n]
	return nd.standing != owned || st.from.crashes == 0 || nd.guard != 0 && nd.follow[nd.guard.node()].phase >= current
}
