package envoyquota

import (
	"math"
	"slices"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
)

// This file has the state of one bucket of a data plane, as a function of reports, answers and instants. bucket.last is
// the assignment in effect; a loan outlives its assignment until what was spent of it is known (settle) and the owner
// has been told (answered).

const (
	// Delivery bounds the time from sending a response to its effect at the data plane, plus that from a report to its
	// receipt. The bounds of this package hold where messages are no slower.
	Delivery = 10 * time.Second
	// Life is how long an assignment is in effect at a data plane.
	Life = 15 * time.Second
	// askMost bounds an owner's time to answer, and gRPC's time to take a response.
	askMost = 2 * time.Second
	// term is how long an owner holds a loan: the time in which its answer may be used, Delivery, Life and 1 s for
	// clocks.
	term = askMost + Delivery + Life + time.Second
	// period is the interval of Envoy's reports.
	period = 5 * time.Second
	// renewAfter is the age at which an assignment is renewed: every second report has passed it.
	renewAfter = period * 3 / 2
	// ahead is the time for which the units of an assignment should suffice.
	ahead = period * 11 / 10
	// maxLoans bounds the loans of a bucket. A bucket that is reported once a period has fewer, because a loan ends
	// within term.
	maxLoans = 8
	// idleAfter is the time without a request after which a bucket gets no more assignments. It is abandoned when those
	// that it had have ended.
	idleAfter = 30 * time.Second

	perHour = int64(time.Hour)
	// firstDemand is the least demand assumed for a new bucket; leastDemand is added to every demand. Both in units per
	// hour.
	firstDemand, leastDemand = 10 * 3600, 1800
)

// verdict is what a data plane is told about a bucket.
type verdict uint8

const (
	nothing verdict = iota
	denyAll
	allowAll
	assign  // a DENY_ALL, and then a token bucket (see Service.append)
	abandon // for a bucket that is idle, or that an earlier stream has left
)

// action is the answer for one bucket. assign has units and rate, in units per hour.
type action struct {
	verdict     verdict
	units, rate int64
}

// usage is the numbers of requests that a data plane has reported for a bucket.
type usage struct{ allowed, denied int64 }

// bucket is the state of one bucket of a data plane. Instants are nanoseconds of this node's monotonic clock.
type bucket struct {
	target   limit.Target
	share    int64
	borrower uint64

	loans  []*loan // the oldest first
	number uint64
	demand int64 // units per hour
	seen   int64 // instant of the last report; 0: none yet
	used   int64 // instant of the last report with a request; 0: none yet
	gone   bool  // abandoned

	free, charged bool  // the key has no limit now; charged: its requests are admitted and charged
	freed         int64 // instant of the last allowAll
}

// loan is the loan for one assignment.
type loan struct {
	number      uint64
	units, rate int64
	wants       int64
	asked       int64
	// instant at which its assignment was sent; 0: not, because the owner has not answered or was too late
	sent     int64
	replaced int64 // instant at which its assignment was replaced or denied; 0: not
	left     int64 // units not known to be spent, if reports are attributed to the oldest loans first
	used     int64 // units reported while it was the last one
	mixed    bool  // reports may be of units that a rate has added, too
	known    int64
	over     bool // nothing more can be spent of it
	told     bool // the owner knows that it is over
}

// task is one question to the owner of a bucket's key.
type task struct {
	b    *bucket
	l    *loan
	asks bool // asks for the loan; false: reports it
}

// last returns the loan whose assignment the data plane has or is about to get; nil: none.
func (b *bucket) last() *loan {
	for _, l := range slices.Backward(b.loans) {
		if l.sent > 0 && l.replaced == 0 && !l.over {
			return l
		}
	}
	return nil
}

// per converts n units within a time to units per hour.
func per(n int64, in time.Duration) int64 {
	return int64(min(float64(n)*float64(perHour)/float64(max(in, time.Second)), float64(algo.MaxLimit)))
}

// in converts a rate in units per hour to the units within t.
func in(rate int64, t time.Duration) int64 {
	return int64(min(float64(rate)*float64(t)/float64(perHour), float64(algo.MaxLimit)))
}

// report processes a report. excess is what remains to be charged: requests that the data plane has admitted without an
// assignment.
func (b *bucket) report(now int64, u usage) (excess int64) {
	elapsed, n := time.Duration(now-b.seen), min(u.allowed+u.denied, algo.MaxLimit)
	if b.seen == 0 || b.gone {
		elapsed = period
		b.demand = max(per(n, period), firstDemand)
	} else {
		b.demand = max(per(n, elapsed), b.demand/10*6)
	}
	if n > 0 {
		b.used = now
	}
	b.seen = now
	excess = b.attribute(u.allowed, elapsed)
	if l := b.last(); l != nil {
		l.used += u.allowed
	}
	b.settle(now)
	switch {
	case b.charged:
		return u.allowed
	case b.free:
		return 0
	}
	return excess
}

// attribute subtracts reported units from the loans, and returns the units that no loan covers.
func (b *bucket) attribute(units int64, elapsed time.Duration) (excess int64) {
	var room, rate int64
	for _, l := range b.loans {
		if l.sent > 0 && !l.over {
			room, rate = min(room+l.units, algo.MaxLimit), max(rate, l.rate)
		}
	}
	excess = units
	for _, l := range b.loans {
		switch {
		case l.sent == 0 || l.over:
		case rate > 0:
			l.mixed = true
		default:
			// The oldest loan comes first. Whichever loan the units were of, the sum of what is left is right, and what
			// is left of a loan is returned only when nothing more can be spent of it.
			n := min(excess, l.left)
			l.left -= n
			excess -= n
		}
	}
	if rate > 0 {
		excess = max(units-room-in(rate, elapsed+Delivery), 0)
	}
	return excess
}

// settle marks the loans of which nothing more can be spent, and drops those that have ended at the owner or need not
// be reported. Delivery after an assignment went out of effect, all that was spent of it has been reported.
func (b *bucket) settle(now int64) {
	kept := b.loans[:0]
	for _, l := range b.loans {
		if l.sent > 0 && !l.over {
			end := l.sent + int64(Life)
			if l.replaced > 0 {
				end = min(end, l.replaced)
			}
			if now >= end+int64(Delivery) || l.left == 0 && l.rate == 0 && !l.mixed {
				l.over = true
				if l.rate > 0 || l.mixed {
					l.left = 0 // what was spent of its units cannot be told from what came by the rate
				}
			}
		}
		if !l.told && now < l.asked+int64(term) {
			kept = append(kept, l)
		}
	}
	clear(b.loans[len(kept):])
	b.loans = kept
}

// totals returns what is reported of the loan.
func (l *loan) totals() algo.Totals {
	t := algo.Totals{Granted: l.units, Spent: l.units - l.left}
	if l.over {
		t.Returned = l.left
	}
	return t
}

// quota returns the question to the owner about a loan at now.
func (b *bucket) quota(l *loan, now int64, asks bool) limit.Quota {
	q := limit.Quota{Target: b.target, ID: algo.LoanID{Borrower: b.borrower, Number: l.number}, Known: l.known}
	left := time.Duration(l.asked + int64(term) - now)
	if !asks {
		q.Totals = l.totals()
		if l.over {
			return q
		}
	}
	q.Ask = algo.Quota{Demand: l.wants, Ahead: ahead, Share: b.share, Term: max(left, 1), Had: l.rate}
	return q
}

// tells returns a task for each loan that is to be reported.
func (b *bucket) tells() (tasks []task) {
	for _, l := range b.loans {
		if l.units > 0 && (l.sent > 0 || l.over) {
			tasks = append(tasks, task{b: b, l: l})
		}
	}
	return tasks
}

// ask returns what the data plane is told at once (told), or the loan to ask for (asked); nil: none is needed.
func (b *bucket) ask(now int64) (told action, asked *loan) {
	b.gone = b.gone && b.used != b.seen
	switch idle := time.Duration(now - b.used); {
	case b.gone:
		return action{}, nil
	case b.used == 0, idle >= idleAfter+term: // without a request: the bucket is one of an earlier stream
		b.gone = true
		return action{verdict: abandon}, nil
	case idle >= idleAfter:
		return action{}, nil
	}
	wants := min(b.demand/4*5+leastDemand, algo.MaxLimit)
	if b.free && now < b.freed+int64(renewAfter) {
		return action{}, nil
	}
	if l := b.last(); l != nil && now < l.sent+int64(renewAfter) {
		enough := l.units-l.used >= in(b.demand, period)
		if l.rate > 0 {
			enough = wants <= l.wants/10*13 && wants >= l.wants/2
		}
		if enough {
			return action{}, nil
		}
	}
	if len(b.loans) >= maxLoans {
		return action{}, nil // a later report asks, when the first of them has ended
	}
	b.number++
	l := &loan{number: b.number, wants: wants, asked: now}
	b.loans = append(b.loans, l)
	return action{}, l
}

// replace marks the assignments as replaced at now.
func (b *bucket) replace(now int64) {
	for _, l := range b.loans {
		if l.sent > 0 && l.replaced == 0 {
			l.replaced = now
		}
	}
}

// answered processes the owner's answer to a task, and returns what the data plane is told at once.
func (t task) answered(now int64, a *limit.QuotaLent) action {
	b, l := t.b, t.l
	if !t.asks {
		if a.Err == nil {
			l.known = max(l.known, min(a.Spent, l.units))
			l.told = l.over
		}
		return action{}
	}
	if a.Err != nil || a.Granted == 0 {
		l.over, l.told = true, true // if the owner has lent units, that loan ends by itself
	}
	b.free, b.charged = a.Err == nil && a.Free, a.Err == nil && a.Charged
	switch {
	case a.Err != nil && unavailable(a.Err):
		return action{} // the assignment in effect ends by itself
	case b.free:
		b.replace(now)
		b.freed = now
		return action{verdict: allowAll}
	case a.Err != nil || a.Granted == 0:
		if had := b.last(); had != nil && a.Err == nil && now < had.sent+int64(Life-period) &&
			(had.rate > 0 || had.units > had.used) {
			return action{} // the assignment in effect still has units
		}
		b.replace(now)
		return action{verdict: denyAll}
	}
	l.units, l.rate, l.left = min(a.Granted, algo.MaxLimit), a.Rate, min(a.Granted, algo.MaxLimit)
	if now > l.asked+int64(askMost) {
		l.over = true // the loan may end at the owner before the assignment would at the data plane
		return action{}
	}
	b.replace(now)
	l.sent = now
	return action{verdict: assign, units: min(l.units, math.MaxUint32), rate: l.rate}
}

// done says whether the bucket can be forgotten.
func (b *bucket) done() bool { return b.gone && len(b.loans) == 0 }
