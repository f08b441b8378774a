package algo

import "time"

// How a request is decided:
//
//  1. Each limit is brought to now, and says how much room it has.
//  2. The plan says whether the request passes and what each limit is charged. A request with Always has a plan of its
//     own.
//  3. The memory for the charges is reserved, in all limits or in none. Nothing after that can fail.
//  4. carryOut charges each limit and writes its answer. The answer to the request is that of the tightest limit.
//
// A single bucket, the most frequent case, is decided by bucket.decide, with the same answers.

// Decide answers a request and charges what it admits, to every limit or to none.
//
// A request passes when every limit has room for its cost; with Partial, for one unit of it. When it does not pass,
// RetryAfter is the instant from which it would if nothing else were charged, exact to the nanosecond: the longest that
// any limit asks for. Limits with CountDenied count a refused request, up to their limit, and then RetryAfter says when
// it would pass if nothing else were even sent; a refusal that memory does not suffice to count stands uncounted. Units
// on loan (Request.OnLoan) cannot be charged, and Remaining is without them. When a request does not pass because of
// them, RetryAfter is an estimate: the request may pass earlier, when they are returned, or not even then, when they
// are spent. A negative cost without Always never passes. A cost above what a limit holds never passes as a whole; with
// Partial a part may.
//
// A request with Always is charged to each limit whether or not there is room, as far as MaxDebt, MaxLimit and Bounded
// allow; Granted is the most that one limit was charged. It is allowed when there was room for its cost. With a cost of
// 0, which charges nothing, it is allowed when no more is in use than the limit. A negative cost gives units back as
// Refund does, and is allowed; Granted is then the negative of what was given back. Nothing is counted as denied.
//
// When each is not nil it must have an entry for every limit, and gets what that limit says for itself: Allowed,
// whether it had room; Granted, as in the answer; the rest about the state after the decision. Of these the answer
// repeats the tightest: when refused, the one with the longest RetryAfter (Never above all), otherwise the one with the
// least Remaining (of equals, the one with the longer ResetAfter; of those, the first). Delay is the longest.
//
// The only error is ErrNoMemory, and nothing was charged then.
func (ls Limits) Decide(a *Arena, s State, now Instant, r Request, each []Decision) (d Decision, err error) {
	err = ls.DecideTo(a, s, now, &r, each, &d)
	return d, err
}

// DecideTo is Decide with the answer in *d, whatever that held. It saves the copy of a Decision, which costs as much as
// making one.
func (ls Limits) DecideTo(a *Arena, s State, now Instant, r *Request, each []Decision, d *Decision) error {
	if len(ls) == 1 && each == nil && ls[0].isBucket() && ls[0].Limit != Unlimited && !r.Always {
		bucket{}.decide(&ls[0], s, now, r, d)
		return nil
	}
	now = s.tick(now)
	var p plan
	if r.Always {
		ls.planAlways(a, s, now, r, &p)
	} else {
		p.cost, p.pass = r.needs()
		grant := p.cost
		for i, rest := 0, s[1:]; i < len(ls); i++ {
			l := &ls[i]
			c := l.counter()
			if c == nil {
				continue
			}
			n := c.words(l)
			t := rest[:n:n]
			rest = rest[n:]
			c.advance(l, a, t, now)
			room := r.spare(l.holds() - c.used(l, a, t, now))
			p.fits[i] = room >= p.pass
			grant = min(grant, room)
		}
		p.allowed = grant >= p.pass && p.cost <= MaxLimit
		if p.allowed && r.Cost > 0 {
			p.granted = grant
			for i := range ls {
				p.charges[i] = grant
			}
		}
	}
	if p.granted > 0 && !ls.ensureMemory(a, s, &p.charges) {
		return ErrNoMemory
	}
	ls.carryOut(a, s, now, r, &p, each, d)
	return nil
}

// plan is what a decision will do. It is made before anything is charged, because all limits are charged or none.
type plan struct {
	cost    int64 // to find room for; with Always, negative for a refund
	pass    int64 // the least room that lets the request pass
	allowed bool
	granted int64            // the most that one limit is charged
	fits    [MaxLimits]bool  // the limit has room
	charges [MaxLimits]int64 // units that the limit is charged
}

// planAlways makes the plan of a request with Always.
func (ls Limits) planAlways(a *Arena, s State, now Instant, r *Request, p *plan) {
	p.cost = max(min(r.Cost, MaxLimit), -MaxLimit)
	p.pass, p.allowed = max(p.cost, 1), true
	ls.walk(a, s, now, func(i int, c counter, t []uint64) {
		l := &ls[i]
		used := c.used(l, a, t, now)
		switch {
		case p.cost > 0:
			p.fits[i] = r.spare(l.holds()-used) >= p.cost
			// Units that are in use beyond the largest debt stay, and nothing is added to them.
			p.charges[i] = max(min(p.cost, r.most(l)-used), 0)
			p.granted = max(p.granted, p.charges[i])
		case p.cost == 0:
			p.fits[i] = used <= l.holds()-r.OnLoan
		default:
			p.fits[i] = true
		}
		p.allowed = p.allowed && p.fits[i]
	})
}

// carryOut does what the plan says, and writes the answer. The memory for the charges has been reserved.
func (ls Limits) carryOut(a *Arena, s State, now Instant, r *Request, p *plan, each []Decision, answer *Decision) {
	*answer = Decision{}
	rest := s[1:]
	logged, alike := int64(-1), true // what each log was charged, and whether all were charged the same
	var back int64                   // the most that one limit gave back
	for i := range ls {
		l := &ls[i]
		d := Decision{Allowed: true, Granted: p.granted, Limit: Unlimited, Remaining: Unlimited, Tightest: i}
		if c := l.counter(); c != nil {
			n := c.words(l)
			t := rest[:n:n]
			rest = rest[n:]
			if p.allowed && r.Cost > 0 && l.Algorithm == LeakyBucket {
				d.Delay = c.resetAfter(l, a, t, now) // what is ahead in the queue, without this request
			}
			changed := p.charges[i]
			switch {
			case changed > 0 && l.Algorithm == Concurrency && !r.Always:
				d.Lease = concurrency{}.acquire(l, a, t, now, changed, *r)
			case changed > 0:
				c.charge(l, a, t, now, changed)
			case p.cost < 0:
				back = max(back, c.refund(l, a, t, now, -p.cost))
			case l.CountDenied && !p.allowed && !r.Always && r.Cost != 0:
				changed = l.deny(c, a, t, now, p.cost)
			}
			if l.Algorithm == SlidingLog {
				alike, logged = alike && (logged < 0 || logged == changed), changed
			}
			d.Allowed, d.Limit = p.fits[i], l.holds()
			room := l.holds() - c.used(l, a, t, now)
			d.Remaining, d.ResetAfter = r.spare(room), max(c.resetAfter(l, a, t, now), r.OnLoanFor)
			if !p.allowed {
				d.RetryAfter = r.wait(c, l, a, t, now, room, p.pass)
			}
		} else if p.granted > 0 && l.Algorithm == Concurrency {
			d.Lease = leaseID(r.Nonce, 0)
		}
		if each != nil {
			each[i] = d
		}
		delay := max(answer.Delay, d.Delay)
		if i == 0 || tighter(&d, answer, p.allowed) {
			*answer = d
		}
		answer.Delay = delay
	}
	answer.Allowed = p.allowed
	if p.cost < 0 {
		answer.Granted = -back
		for i := range each {
			each[i].Granted = -back
		}
	} else if len(rest) > 0 && alike { // the position: there is a log
		rest[0] += step(logged)
	} else if len(rest) > 0 {
		rest[0] += generation
	}
}

// needs returns the cost to find room for, above MaxLimit if it never passes, and the least that lets the request pass.
func (r *Request) needs() (cost, pass int64) {
	cost = r.Cost
	switch {
	case cost == 0:
		cost = 1
	case cost < 0 || cost > MaxLimit:
		cost = MaxLimit + 1
	}
	if r.Partial && r.Cost > 0 {
		return cost, 1
	}
	return cost, cost
}

// spare is the part of a room that is not on loan. A room below 0 is none.
func (r *Request) spare(room int64) int64 { return max(room-r.OnLoan, 0) }

// wait is the time until a limit, which has so much room, has room for n beside what is on loan, or Never. The owner
// does not know when units on loan will be spent or returned. So when they stand in the way, the time is at most that
// until their loans have ended, and at least the wait without them.
func (r *Request) wait(c counter, l *Limit, a *Arena, s []uint64, now Instant, room, n int64) time.Duration {
	if n > l.holds() {
		return Never
	}
	without := time.Duration(0)
	if room < n {
		without = c.wait(l, a, s, now, n)
	}
	switch {
	case r.OnLoan <= 0:
		return without
	case n > l.holds()-r.OnLoan:
		return max(without, r.OnLoanFor)
	}
	return max(without, min(l.wait(c, a, s, now, n+r.OnLoan), r.OnLoanFor))
}

// tighter reports whether d says more than e about why a request was refused, or how near it came.
func tighter(d, e *Decision, allowed bool) bool {
	if !allowed {
		return uint64(d.RetryAfter) > uint64(e.RetryAfter) // Never is -1, the largest
	}
	if d.Remaining != e.Remaining {
		return uint64(d.Remaining) < uint64(e.Remaining) // as is Unlimited
	}
	return d.ResetAfter > e.ResetAfter
}

// ensureMemory takes the memory for charging each limit so many units. When it fails, nothing is left of it that could
// be told from outside.
func (ls Limits) ensureMemory(a *Arena, s State, charges *[MaxLimits]int64) bool {
	for i, rest := 0, s[1:]; i < len(ls); i++ {
		c := ls[i].counter()
		if c == nil {
			continue
		}
		k := c.words(&ls[i])
		if charges[i] > 0 && !c.ensureMemory(&ls[i], a, rest[:k:k], charges[i]) {
			// What other limits reserved stays with them for the next request, unless they hold nothing else.
			ls.trim(a, s)
			return false
		}
		rest = rest[k:]
	}
	return true
}

// most is the number of units that a request with Always can bring in use.
func (r *Request) most(l *Limit) int64 {
	if r.Bounded {
		return min(l.most(), l.holds()+r.MaxDebt-r.OnLoan)
	}
	return l.most()
}

// most is the number of units that can be in use.
func (l *Limit) most() int64 {
	most := l.countable()
	switch {
	case l.MaxDebt != 0:
		most = min(most, l.holds()+l.MaxDebt)
	case l.Algorithm == SlidingLog:
		most = min(most, 2*l.Limit)
	}
	return most
}
