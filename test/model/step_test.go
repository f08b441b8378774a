package model

import (
	"fmt"
	"slices"
)

// What may be broken.
const (
	badTerm   = 1
	badAnswer = 2
	badRoom   = 3 // more messages than a state has room for: the bounds are wrong
)

func (m *model) initial() state {
	var s state
	s.clock = 1
	t := newTerm(1, 1)
	a := &s.nodes[0]
	*a = node{standing: owned, term: t, known: t, ready: true, origin: origin{t, newProc(0, 0)}, how: itself}
	rec := record{term: t, node: newProc(0, 0)}
	if m.Guarded {
		b := &s.nodes[1]
		a.gen, a.guard, rec.backup = 1, newProc(1, 0), newProc(1, 0)
		a.follow[1] = follower{to: newProc(1, 0), phase: current, seq: 1}
		*b = node{known: t, origin: origin{t, newProc(0, 0)}, how: copied, stream: origin{t, newProc(0, 0)}, seq: 1}
		if m.Escrow {
			a.follow[1].escrow, b.escrow = 1, 1
		}
	}
	for v := range m.Voters {
		s.voters[v] = voter{floor: 1, rec: rec, gen: a.gen, left: m.voterTicks(), prevState: prevNothing}
		a.support[v] = support{age: 1, gen: a.gen, free: !m.Guarded, prevState: prevNothing}
	}
	s.used[usedIndex(t)] = newProc(0, 0)
	return s
}

func usedIndex(t term) int { return (int(t.epoch())-1)*maxTerms + int(t&15) }

func (m *model) proc(s *state, n int) proc { return newProc(n, s.nodes[n].boot) }

// alive reports whether p still runs.
func (m *model) alive(s *state, p proc) bool { return p != 0 && s.nodes[p.node()].boot == p.boot() }

// leased reports whether n has a live grant of its term.
func (m *model) leased(s *state, n int) bool {
	if m.Voters == 0 {
		return true
	}
	count := 0
	for v := range m.Voters {
		if sup := &s.nodes[n].support[v]; sup.age > 0 && !sup.late {
			count++
		}
	}
	return count >= m.majority()
}

// unguarded reports whether n may answer without a copy.
func (m *model) unguarded(s *state, n int) bool {
	nd := &s.nodes[n]
	if m.Voters == 0 || nd.guard != 0 {
		return false
	}
	if !m.has(guardRecorded) {
		return true
	}
	count := 0
	for v := range m.Voters {
		if sup := &nd.support[v]; sup.age > 0 && !sup.late && sup.free && sup.gen == nd.gen {
			count++
		}
	}
	return count >= m.majority()
}

// check returns what promise s breaks, if any.
func (m *model) check(s *state) string {
	switch s.bad {
	case badTerm:
		return "one term was granted to two processes"
	case badAnswer:
		return "an answer was used past its lease"
	case badRoom:
		return "a state has no room for another message: bounds are to be lowered, or maxMessages raised"
	}
	holder := -1
	for n := range m.Nodes {
		nd := &s.nodes[n]
		if nd.standing != owned || !m.leased(s, n) {
			continue
		}
		if holder >= 0 {
			return fmt.Sprintf("%v and %v both hold a valid grant", m.proc(s, holder), m.proc(s, n))
		}
		holder = n
		if nd.ready && nd.content.lacks(s.given) {
			return fmt.Sprintf("%v decides at term %v without an admission that was acknowledged", m.proc(s, n),
				nd.term)
		}
	}
	return ""
}

// dead reports whether nothing can come of msg any more.
func (m *model) dead(s *state, msg *message) bool {
	if msg.to != 0 && !m.alive(s, msg.to) {
		return true
	}
	if msg.to == 0 {
		return false
	}
	nd := &s.nodes[msg.to.node()]
	switch msg.kind {
	case replicate:
		return nd.known > msg.term || nd.stream == (origin{msg.term, msg.from}) && nd.seq >= msg.seq
	case commit:
		return nd.known > max(msg.term, msg.known)
	case ack:
		f := &nd.follow[msg.from.node()]
		return nd.standing == none || nd.term != msg.term || f.to != msg.from || f.seq != msg.seq ||
			f.phase == detached || f.phase == current || f.phase == beginning
	case commitAck:
		return nd.standing != frozen || nd.term != msg.term
	}
	return false
}

func (s *state) send(msg message) {
	if slices.Contains(s.net[:s.messages], msg) {
		return
	}
	if int(s.messages) == maxMessages {
		s.bad = badRoom
		return
	}
	s.net[s.messages] = msg
	s.messages++
}

// action names a step, for traces.
type action struct {
	what    string
	a, b    int // nodes, voters or admissions
	msg     message
	term    term
	variant string
}

// step collects the successors of one state.
type step struct {
	*model
	from *state
	next state // what emit is called with: so that what the steps work on stays on the stack
	emit func(action, *state)
}

func (st *step) out(a action, s *state) {
	st.next = *s
	st.canonical(&st.next)
	if st.next != *st.from {
		st.emit(a, &st.next)
	}
}

// successors calls emit for every state that one step leads to.
func (m *model) successors(s *state, emit func(action, *state)) {
	st := &step{model: m, from: s, emit: emit}
	st.tick()
	for n := range m.Nodes {
		st.requests(n)
		st.settle(n)
		st.decide(n)
		st.give(n)
		st.end(n)
		st.claim(n)
		st.crash(n)
		for to := range m.Nodes {
			if to != n {
				st.copies(n, to)
				st.guard(n, to)
				st.move(n, to)
			}
		}
		st.unguard(n)
	}
	for v := range m.Voters {
		st.voterRestart(v)
		st.voterRead(v)
	}
	for i := range s.messages {
		st.receive(s.net[i])
	}
	if m.Voters > 0 {
		st.replies()
	}
	if m.Forwarding {
		st.forward()
	}
	if m.Loans {
		st.spend()
	}
}

func (st *step) tick() {
	s := *st.from
	for i := range s.messages {
		if m := &s.net[i]; m.kind == request && m.age < st.Lease {
			m.age++
		}
	}
	for n := range s.nodes {
		for v := range s.nodes[n].support {
			sup := &s.nodes[n].support[v]
			if sup.age == 0 {
				continue
			}
			if sup.late && !st.has(leaseFromSending) {
				continue
			}
			if sup.age++; sup.age > st.Lease {
				*sup = support{}
			}
		}
	}
	for v := range s.voters {
		w := &s.voters[v]
		w.left -= min(w.left, 1)
		w.abstain -= min(w.abstain, 1)
	}
	q := &s.question
	if q.stage == 1 || q.stage == 2 {
		q.asked = min(q.asked+1, st.Lease)
	}
	q.real -= min(q.real, 1)
	q.bound -= min(q.bound, 1)
	st.out(action{what: "tick"}, &s)
}

func (st *step) receive(msg message) {
	switch msg.kind {
	case request:
		for v := range st.Voters {
			st.vote(msg, v)
		}
	case replicate:
		st.follow(msg)
	case ack:
		s := *st.from
		f := &s.nodes[msg.to.node()].follow[msg.from.node()]
		if f.phase == begun {
			f.phase = beginning // the copy before, if any, still counts
		} else {
			f.phase, f.confirmed, f.escrow = current, f.sent, msg.escrow
		}
		st.out(action{what: "ack", a: msg.to.node(), msg: msg}, &s)
	case commit:
		st.takeOver(msg)
	case commitAck:
		st.released(msg)
	}
}
