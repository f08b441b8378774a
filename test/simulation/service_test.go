package simulation

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/checker"
)

// policy is a limit and the keys that are asked about.
type policy struct {
	checker.Policy
	rule *store.Rule
	lent bool // what is refused for want of units on loan is not told to the checker, which knows nothing of them
	keys []store.Key
}

// op is one check of a client.
type op struct {
	id       uint64
	policy   *policy
	key      *store.Key
	cost     int64
	request  string // request id; empty: none
	kind     kind
	hold     int64 // of a reservation: for how long; 0: it is none
	of       *op   // whose reservation or lease is ended or renewed
	keep     int64 // of a settle
	all      *all  // the atomic check that it is a part of
	again    *op   // the one that this repeats, under its request id
	fresh    bool  // and, when it was decided, was not found charged, and was charged anew
	sent     int64
	deadline int64
	done     func(*op) // may be nil

	over      bool // the client has its answer, or has given up
	result    checker.Result
	degraded  bool
	remaining int64
	why       string // of a failure

	charged  bool
	at       int64 // true time of the decision
	node     string
	borrowed bool // a borrower admitted it from a loan

	reservation store.ReservationID
	lease       uint64
	returned    int64             // units that were given back, of these or, of a settle, by it
	history     checker.Operation // what of it the checker is told besides
}

// kind is what an op asks for.
type kind uint8

const (
	charge  kind = iota // a check, a reservation, a lease
	settle              // the end of a reservation
	renew               // of a lease
	release             // the end of a lease
)

func (k kind) String() string { return [...]string{"charge", "settle", "renew", "release"}[k] }

const (
	patience   = second            // of a client
	grantMost  = 200 * millisecond // a check under a strict rule waits for a grant
	grantAgain = 5 * millisecond   // and is tried again
)

// ask is an op at one process.
type ask struct {
	op       *op
	at       *process
	back     *ask // whom to tell: the ask at the process that handed it on; nil at the entry
	hops     int
	term     ownership.Term // the last that was followed
	sentAt   int64          // boot clock, when it was handed on last
	number   int            // how often it was handed on
	asked    int            // back's number when it was handed on to here
	told     bool
	passed   bool   // the answer has been sent to back
	parked   int64  // true time since when it waits out a hand-over; 0: it does not
	recalled bool   // what is on loan has been asked for, in vain or not
	round    *round // that it has waited for last; nil: none
	// ungranted is the true time at which it was to be decided here first: it may have to wait for a grant from then
	// on.
	ungranted int64
}

// answer is what comes back.
type answer struct {
	astray   bool // NOT_HOLDER: nothing was done, ask somebody else
	hint     ownership.Node
	term     ownership.Term
	hops     int
	failed   string // on_error
	admitted bool
	left     int64 // what was left of the lease at the decision, by the holder's boot clock; -1: none is needed
	end      int64 // true time of the lease's end, for the checker
	by       checker.Holder
	decision store.Answer
}

// submit sends a check to a process.
func (w *world) submit(p *process, pol *policy, key *store.Key, cost int64, done func(*op)) *op {
	return w.ask(p, &op{policy: pol, key: key, cost: cost, done: done})
}

// resend sends a check again, under its request id.
func (w *world) resend(p *process, o *op, done func(*op)) {
	w.ask(p, &op{policy: o.policy, key: o.key, cost: o.cost, request: o.request, again: o, done: done})
}

func (w *world) ask(p *process, o *op) *op {
	o.id, o.sent, o.deadline = uint64(len(w.ops)), w.now, w.now+patience
	w.ops = append(w.ops, o)
	w.at(o.deadline, func() { o.finish(w, checker.Failed, "no answer") })
	p.do(func() { p.handle(&ask{op: o, at: p}) })
	return o
}

func (o *op) finish(w *world, r checker.Result, why string) {
	if o.over {
		return
	}
	o.over, o.result, o.why = true, r, why
	w.mix(uint64(w.now), o.id, uint64(r), uint64(o.remaining))
	if w.verbose {
		w.trace("%s: %v of %d: %s %s by %s", o.key.Key, o.kind, o.cost,
			[...]string{"", "admitted", "refused", "failed"}[r], why, o.node)
	}
	if o.done != nil {
		o.done(o)
	}
}

// handle does what a process does with a check.
func (p *process) handle(a *ask) {
	if a.told || a.op.over {
		return
	}
	r := p.core.Route(a.op.key.Partition)
	if a.back != nil {
		r = *r.Handed()
	}
	switch r.Standing {
	case ownership.Owned:
		p.decide(a)
	case ownership.Frozen:
		if a.parked == 0 {
			a.parked = p.w.now
			p.later(50*millisecond, func() {
				if a.parked != 0 {
					p.tell(a, answer{failed: "parked for too long"})
				}
			})
		}
		p.park(a)
	case ownership.Unclaimed:
		p.park(a)
	case ownership.Elsewhere:
		a.parked = 0
		switch {
		case a.back == nil:
			p.forward(a, r.Node, r.Term)
		case a.hops < 2 && r.Term != (ownership.Term{}):
			p.forward(a, r.Node, r.Term)
		default:
			p.tell(a, answer{astray: true, hint: r.Node, term: r.Term, hops: a.hops})
		}
	}
}

func (p *process) park(a *ask) {
	part := a.op.key.Partition
	p.parked[part] = append(p.parked[part], a)
}

// unpark looks at what waits for a partition's Route to change.
func (p *process) unpark(part int) {
	all := p.parked[part]
	p.parked[part] = nil
	for _, a := range all {
		p.handle(a)
	}
}

func (p *process) forward(a *ask, to ownership.Node, term ownership.Term) {
	w := p.w
	a.term = term
	a.sentAt = p.clock().Boot
	a.number++
	number := a.number
	h := w.host(to.Name)
	hops := a.hops + 1
	w.transmit(p.host, h, "check", true, func() {
		q := h.proc
		if q == nil {
			return
		}
		q.do(func() {
			b := &ask{op: a.op, at: q, back: a, hops: hops, asked: number}
			q.foreign = append(q.foreign, b)
			if q.self != to {
				q.tell(b, answer{astray: true, hops: hops})
				return
			}
			q.handle(b)
		})
	})
}

// tell gives an answer back to where the check came from.
func (p *process) tell(a *ask, ans answer) {
	if a.told {
		return
	}
	a.told = true
	w := p.w
	d := int64(0)
	if w.internal > 0 {
		d = w.rng.Int64N(w.internal)
	}
	if a.back == nil {
		p.later(d, func() { p.give(a, ans) })
		return
	}
	p.later(d, func() { p.pass(a, ans) })
}

// pass sends an answer to where the check came from.
func (p *process) pass(a *ask, ans answer) {
	a.passed = true
	to := a.back.at
	p.w.transmit(p.host, to.host, "answer", true, func() {
		to.do(func() { to.answered(a.back, a.asked, ans) })
	})
}

// handling says whether checks that others have handed on are still to be answered: a process that leaves answers them
// first.
func (p *process) handling() bool {
	p.foreign = slices.DeleteFunc(p.foreign, func(a *ask) bool { return a.passed || a.op.over })
	return len(p.foreign) > 0
}

// answered takes in what the one has said whom a check was handed on to.
func (p *process) answered(a *ask, number int, ans answer) {
	if a.told || a.op.over {
		return
	}
	switch {
	case number != a.number:
	case a.back != nil:
		a.told = true
		p.pass(a, ans)
	case !ans.astray:
		if ans.left >= 0 && ans.failed == "" && ans.admitted {
			if p.clock().Boot >= a.sentAt+ans.left-ans.left/500 {
				return // too late: another may hold the partition by now
			}
		}
		p.give(a, ans)
	case ans.hint != (ownership.Node{}) && ans.hint != p.self && ans.hops < checker.MaxHops && a.term.Less(ans.term):
		a.hops = ans.hops
		p.forward(a, ans.hint, ans.term)
	default:
		p.later(10*millisecond+p.w.rng.Int64N(10*millisecond), func() {
			a.hops, a.term = 0, ownership.Term{}
			p.handle(a)
		})
	}
}

// give lets the client have the answer.
func (p *process) give(a *ask, ans answer) {
	a.told = true
	o := a.op
	if o.over {
		return
	}
	if ans.failed != "" {
		o.finish(p.w, checker.Failed, ans.failed)
		return
	}
	o.degraded, o.remaining = ans.decision.Degraded, ans.decision.Remaining
	if !ans.admitted {
		o.finish(p.w, checker.Refused, "")
		return
	}
	if ans.left >= 0 {
		if ans.by == p.holder() && p.clock().Boot >= ans.decision.Until {
			return // decided here, but not said in time
		}
		p.w.proto.Use(p.w.now, o.key.Partition, ans.by, ans.end)
	}
	o.finish(p.w, checker.Admitted, "")
}

// waiter is an answer that waits for the copy to have what it says.
type waiter struct {
	a      *ask
	ans    answer
	ticket uint64
	lent   func() // of a loan, in place of a: gives the answer
}

func (p *process) decide(a *ask) {
	w, o := p.w, a.op
	now := p.clock()
	a.parked = 0
	if a.ungranted == 0 {
		a.ungranted = w.now
	}
	if o.kind != charge {
		p.settle(a)
		return
	}
	call := store.Call{Request: algo.Request{Cost: o.cost}, RequestID: o.request, Boot: now.Boot}
	if o.hold > 0 {
		call.Reservation, call.ReserveFor, call.ReserveOnce = o.reservation, time.Duration(o.hold), o.all != nil
	}
	if o.cost > 0 && o.policy.rule.Limits[0].Algorithm == algo.Concurrency {
		call.TTL, call.Nonce = o.policy.Window, o.id+1
	}
	var before store.Answer
	if o.again != nil {
		before, _ = p.data.Decide(*o.key, o.policy.rule, now.Instant, store.Call{Boot: now.Boot}, nil)
	}
	dec, err := p.data.Decide(*o.key, o.policy.rule, now.Instant, call, nil)
	if err != nil {
		p.undecided(a, err)
		return
	}
	if dec.OnLoan > 0 && !a.recalled {
		p.callBack(a)
		return
	}
	if o.policy.lent {
		w.lending.decided(p, a, &dec)
	}
	o.fresh = dec.Allowed && dec.Remaining < before.Remaining
	if dec.Allowed && o.cost > 0 {
		o.charged, o.lease = true, dec.Lease
	}
	p.decided(a, dec, o.policy.Strict)
}

// undecided is what a check comes to that the store has not decided.
func (p *process) undecided(a *ask, err error) {
	w := p.w
	if !errors.Is(err, store.ErrNoGrant) {
		w.say("VIOLATION: %s: %v", p.self.Name, err)
		w.proto.Violations = append(w.proto.Violations,
			checker.Violation{Rule: checker.NoToken, Text: p.self.Name + ": " + err.Error()})
	}
	if errors.Is(err, store.ErrNoGrant) && w.now-a.ungranted < grantMost {
		p.later(grantAgain, func() { p.handle(a) })
		return
	}
	p.tell(a, answer{failed: err.Error()})
}

// decided answers what the store has decided, once a copy has it.
func (p *process) decided(a *ask, dec store.Answer, leased bool) {
	w, o, now := p.w, a.op, p.clock()
	w.proto.Decide(w.now, o.key.Partition, p.holder(), p.held[o.key.Partition] != (ownership.Term{}), a.hops)
	o.node, o.at = p.self.Name, w.now
	o.history.Content = fmt.Sprintf("%s/%d/%d", p.self.Name, p.self.Boot, p.data.parts[o.key.Partition].number)
	ans := answer{admitted: dec.Allowed, left: -1, decision: dec, by: p.holder()}
	if leased {
		ans.left, ans.end = dec.Until-now.Boot, p.host.truth(dec.Until)
	}
	w.mix(uint64(w.now), o.id, uint64(dec.Remaining), dec.Ticket)
	// A copy may have had it for long: a node remembers up to where its copies have confirmed.
	if part := o.key.Partition; dec.Ticket <= p.copied[part] || p.disk.has(part, dec.Ticket) {
		p.tell(a, ans)
	} else {
		p.waiting[part] = append(p.waiting[part], waiter{a: a, ans: ans, ticket: dec.Ticket})
	}
	p.urge(now)
}

// urge has changes sent at once that answers wait for.
func (p *process) urge(now ownership.Now) {
	if len(p.data.urgent) > 0 {
		for _, part := range p.data.urgent {
			p.core.Urgent(now, part)
		}
		p.data.urgent = p.data.urgent[:0]
		p.flush()
	}
}

// settle ends or renews what an op charged before. An answer that is allowed says that it was there.
func (p *process) settle(a *ask) {
	o, of, now := a.op, a.op.of, p.clock()
	rule := o.policy.rule
	var dec store.Answer
	var err error
	switch o.kind {
	case settle:
		var done store.Settled
		done, err = p.data.Settle(*o.key, rule, now.Instant,
			store.Settlement{ID: of.reservation, Keep: o.keep, Exact: true, Boot: now.Boot})
		o.returned, dec.Allowed = done.Returned, done.Known
		back := of.cost - o.keep
		if rule.Limits[0].Period != 0 {
			// none after the window's end by this node's wall clock; by that of a node it moves to it may go on
			back = done.Returned
		}
		if dec.Allowed && back > of.returned {
			of.returned = back
			of.history.Returned, of.history.ReturnedAt = of.returned, p.w.now
		}
	case release:
		dec.Allowed, err = p.data.Release(*o.key, rule, now.Instant, of.lease)
		if dec.Allowed && of.history.Ended == 0 {
			of.history.Ended = p.w.now
		}
	case renew:
		var n store.Renewal
		n, err = p.data.Renew(*o.key, rule, now.Instant, of.lease, of.policy.Window, now.Boot)
		dec.Allowed, dec.Ticket, dec.Degraded, dec.Until = n.Alive, n.Ticket, n.Degraded, n.Until
		if n.Alive {
			of.history.Touched = p.w.now
		}
	}
	if err != nil {
		p.undecided(a, err)
		return
	}
	p.decided(a, dec, o.kind == renew && o.policy.Strict)
}

// confirmed gives the answers that need not wait any longer.
func (p *process) confirmed(c ownership.Progress) {
	if c.Saved {
		p.disk.confirmed(c)
	} else if !c.Unguarded && c.Version != math.MaxUint64 { // which says nothing of answers to come
		p.copied[c.Partition] = max(p.copied[c.Partition], c.Version)
	}
	kept := p.waiting[c.Partition][:0]
	for _, x := range p.waiting[c.Partition] {
		switch {
		case c.Saved != (x.ticket&ownership.Saved != 0):
			kept = append(kept, x)
		case c.Saved && x.ticket&^ownership.Saved > c.Version:
			kept = append(kept, x)
		case c.Saved:
			x.ans.decision.Degraded = x.ans.decision.Degraded || c.Unguarded
			p.tell(x.a, x.ans)
		case x.lent != nil && c.Unguarded: // no copy knows of it
		case x.lent != nil && x.ticket <= c.Version:
			x.lent()
		case x.lent != nil:
			kept = append(kept, x)
		case c.Unguarded && x.ticket > 0 && (c.StrictToo || !x.a.op.policy.Strict):
			x.ans.decision.Degraded = true
			p.tell(x.a, x.ans)
		case c.Unguarded:
			kept = append(kept, x) // until the voters have recorded that there is no copy
		case x.ticket <= c.Version:
			p.tell(x.a, x.ans)
		default:
			kept = append(kept, x)
		}
	}
	clear(p.waiting[c.Partition][len(kept):])
	p.waiting[c.Partition] = kept
}

// repeated finds the charges that repetitions were answered with: of each request id the last one before. The first one
// may have been lost, or never made.
func (w *world) repeated() (charges map[*op]bool, repetitions map[*op]bool) {
	made := make(map[*op][]*op)
	for _, o := range w.ops {
		switch {
		case o.charged && o.again == nil && o.request != "":
			made[o] = append(made[o], o)
		case o.charged && o.fresh:
			made[o.again] = append(made[o.again], o)
		}
	}
	charges, repetitions = make(map[*op]bool), make(map[*op]bool)
	for _, o := range w.ops {
		if o.again == nil || o.result != checker.Admitted || o.fresh {
			continue
		}
		var of *op
		for _, c := range made[o.again] {
			if c.at <= o.at && (of == nil || c.at > of.at) {
				of = c
			}
		}
		if of != nil {
			charges[of], repetitions[o] = true, true
		}
	}
	return charges, repetitions
}

// record makes the history of all ops. One that was charged and whose repetition was answered with that charge was
// admitted when it was charged. A repetition that was charged anew, because the first charge was lost, was admitted
// itself.
func (w *world) record() {
	w.history.Operations = w.history.Operations[:0]
	known, repetitions := w.repeated()
	for _, o := range w.ops {
		if o.cost == 0 || o.kind != charge {
			continue
		}
		op := o.history
		op.Policy, op.Key, op.Cost, op.Sent, op.Answered, op.Degraded, op.Node, op.Borrowed = o.policy.Name, o.key.Key,
			o.cost, o.at, o.at, o.degraded, o.node, o.borrowed
		switch {
		case o.all != nil && !o.all.admitted:
			if op.Result = checker.Failed; o.over && o.result == checker.Refused {
				op.Result = checker.Refused
			} else if !o.charged {
				continue
			}
		case repetitions[o]:
			op.Result = checker.Failed // the charge is the first one's
		case o.over && o.result == checker.Admitted || known[o]:
			op.Result = checker.Admitted
		case o.charged:
			op.Result = checker.Failed
		case o.over && o.result == checker.Refused:
			op.Result = checker.Refused
		default:
			continue
		}
		if op.Result == checker.Refused && o.policy.lent {
			continue
		}
		w.history.Operations = append(w.history.Operations, op)
	}
}
