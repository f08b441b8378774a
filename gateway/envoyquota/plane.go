package envoyquota

import (
	"math"
	"slices"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
)

const (
	// Delivery is how long a response may take until it is in effect at a data plane, and a report that was made then until it is
	// received, together. What is said of bounds assumes it.
	Delivery = 10 * time.Second
	// Life is how long an assignment is in effect at a data plane.
	Life = 15 * time.Second
	// askMost is how long the owner of a key may take to answer, and a response to be taken by gRPC.
	askMost = 2 * time.Second
	// term is how long the owner of a key holds what an assignment needs.
	term = askMost + Delivery + Life + time.Second
	// period is how often Envoy reports.
	period = 5 * time.Second
	// renewAfter is the age at which an assignment is renewed: at every second report.
	renewAfter = period * 3 / 2
	// ahead is for how long the units of an assignment suffice that gets no new ones.
	ahead = period * 11 / 10
	// maxLoans is how many loans of a bucket are known: one that is reported every period has fewer.
	maxLoans = 8
	// idleAfter is how long a bucket may go without a request before it is abandoned.
	idleAfter = 30 * time.Second

	perHour = int64(time.Hour)
	// firstDemand is what a bucket is taken to need of which nothing is known yet, and leastDemand what is added to what one needs: units per hour.
	firstDemand, leastDemand = 10 * 3600, 1800
)

// verdict is what a data plane is told of a bucket.
type verdict uint8

const (
	nothing verdict = iota
	denyAll
	allowAll
	assign  // DENY_ALL first, so that nothing is left of the bucket before, and then a token bucket
	abandon // after a denyAll has taken effect
)

// action is an answer for one bucket. Units and Rate (units per hour) are of assign.
type action struct {
	verdict     verdict
	units, rate int64
	life        time.Duration
}

// usage is what a data plane has reported of a bucket.
type usage struct{ allowed, denied int64 }

// bucket is what is known of a bucket of one data plane. It depends on nothing but what its methods are given: instants are
// nanoseconds of this node's monotonic clock.
type bucket struct {
	target   limit.Target
	share    int64
	borrower uint64

	loans  []*loan // the oldest first; the last one may be what the data plane has
	number uint64
	demand int64 // units per hour
	seen   int64 // of the last report; 0: none yet
	used   int64 // of the last report of a request
	phase  phase
	closed int64 // since when it is not serving

	free, charged bool // the key has no limit, or one that admits everything and is charged
	freed         int64
}

type phase uint8

const (
	serving phase = iota
	closing       // told to deny, until that has taken effect
	gone          // abandoned
)

// loan is what is lent for one assignment.
type loan struct {
	number      uint64
	units, rate int64
	wants       int64
	asked       int64
	sent        int64 // 0: it is not known what the owner answers, or it was too late to be of use
	replaced    int64 // when what replaces it was sent; 0: nothing was
	left        int64 // units that are not known to be spent, if those before were spent first
	used        int64 // units reported since it was sent
	mixed       bool  // what was reported may be of a rate, too
	known       int64
	over        bool // nobody spends of it any more
	told        bool // and the owner knows
}

// task is one thing to be asked of the owner of a bucket's key.
type task struct {
	b    *bucket
	l    *loan
	asks bool // for the loan; otherwise it is reported
}

// last is the loan that the data plane has, or is about to; nil: none.
func (b *bucket) last() *loan {
	for _, l := range slices.Backward(b.loans) {
		if l.sent > 0 && l.replaced == 0 && !l.over {
			return l
		}
	}
	return nil
}

// per is units in an hour of so many in that time.
func per(n int64, in time.Duration) int64 {
	return int64(min(float64(n)*float64(perHour)/float64(max(in, time.Second)), float64(algo.MaxLimit)))
}

// in is units in that time of so many in an hour.
func in(rate int64, t time.Duration) int64 {
	return int64(min(float64(rate)*float64(t)/float64(perHour), float64(algo.MaxLimit)))
}

// report takes in what was reported, and returns what has to be charged besides: requests that the data plane has admitted without an
// assignment.
func (b *bucket) report(now int64, u usage) (excess int64) {
	elapsed, n := time.Duration(now-b.seen), min(u.allowed+u.denied, algo.MaxLimit)
	if b.seen == 0 || b.phase == gone {
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

// attribute says of what loans the units were that were reported spent, and returns those that were of none.
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
			// The oldest first: whichever they were of, the sum of what is left is right, and what is left of an old one is returned
			// only once nothing more can be spent of it.
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

// settle ends the loans that nobody spends of any more, now that a report has come. All that was spent of a loan which is not in effect since
// Delivery has been reported.
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
					l.left = 0 // how much was spent of it is not known
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

// totals are what is reported of a loan.
func (l *loan) totals() algo.Totals {
	t := algo.Totals{Granted: l.units, Spent: l.units - l.left}
	if l.over {
		t.Returned = l.left
	}
	return t
}

// quota is what is said of a loan at now.
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

// tells are the loans to report.
func (b *bucket) tells(now int64) (tasks []task) {
	for _, l := range b.loans {
		if l.units > 0 && (l.sent > 0 || l.over) {
			tasks = append(tasks, task{b: b, l: l})
		}
	}
	return tasks
}

// ask says what the data plane is told at once, or returns the loan to ask for; nil: none is needed.
func (b *bucket) ask(now int64) (told action, asked *loan) {
	active := b.used == b.seen
	switch {
	case b.phase != serving && active:
		b.phase = serving
	case b.phase == gone:
		return action{}, nil
	case b.phase == closing:
		if now < b.closed+int64(Delivery) {
			return action{}, nil
		}
		b.phase, b.closed = gone, now
		return action{verdict: abandon}, nil
	case b.used == 0: // it is known to the data plane from an earlier stream
		b.phase, b.closed = gone, now
		return action{verdict: abandon}, nil
	case now >= b.used+int64(idleAfter):
		b.phase, b.closed = closing, now
		b.replace(now)
		return action{verdict: denyAll, life: 2 * Life}, nil
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
		return action{}, nil // until the first of them end
	}
	b.number++
	l := &loan{number: b.number, wants: wants, asked: now}
	b.loans = append(b.loans, l)
	return action{}, l
}

// replace notes that what the data plane has was replaced at now.
func (b *bucket) replace(now int64) {
	for _, l := range b.loans {
		if l.sent > 0 && l.replaced == 0 {
			l.replaced = now
		}
	}
}

// answered takes in what the owner has answered to a task at now, and says what the data plane is told of it at once.
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
		l.over, l.told = true, true // what may have been lent ends by itself
	}
	b.free, b.charged = a.Err == nil && a.Free, a.Err == nil && a.Charged
	switch {
	case a.Err != nil && unavailable(a.Err):
		return action{} // what it has ends by itself
	case b.free:
		b.replace(now)
		b.freed = now
		return action{verdict: allowAll, life: Life}
	case a.Err != nil || a.Granted == 0:
		if had := b.last(); had != nil && a.Err == nil && now < had.sent+int64(Life-period) && (had.rate > 0 || had.units > had.used) {
			return action{} // it may go on with that
		}
		b.replace(now)
		return action{verdict: denyAll, life: Life}
	}
	l.units, l.rate, l.left = min(a.Granted, algo.MaxLimit), a.Rate, min(a.Granted, algo.MaxLimit)
	if now > l.asked+int64(askMost) {
		l.over = true // too late for it to be held until nobody spends of it any more
		return action{}
	}
	b.replace(now)
	l.sent = now
	return action{verdict: assign, units: min(l.units, math.MaxUint32), rate: l.rate, life: Life}
}

// done reports whether nothing has to be known of the bucket any more.
func (b *bucket) done() bool { return b.phase == gone && len(b.loans) == 0 }
