package algo

import "time"

// A Quota is a loan to a borrower that reports rarely and returns nothing when it is asked to, such as a proxy. The
// loan has a fixed size and a fixed end. The owner sets the end late enough for the borrower to have stopped by then.
//
// The units of a Quota are on loan, as those of any loan. A Quota of a token bucket also has a part of the rate: while
// the loan lasts the bucket fills more slowly by that part, whether or not the borrower uses it. The borrower never has
// more than its units left, and gets new ones at its rate. So in any interval of length t it admits at most units +
// rate·t. The owner charges the units that are left when the loan ends; it charges what the rate comes to as it comes.
// So all admissions together keep the bucket's bound, capacity + rate·t.
//
// A new loan replaces the earlier loans of the same Borrower. The owner does not know when the borrower begins to use
// the new one. So the units of these loans add up, and the highest of their rates counts.

const (
	// MaxQuotaTerm is the longest term of a Quota.
	MaxQuotaTerm = 2 * time.Minute
	// quotaRenewal is how often a Quota is expected to be replaced by another: each has units of its own.
	quotaRenewal = 10 * time.Second
	// quotaKept is how long units are kept for a borrower that there were none for, so that it has them when it asks
	// again.
	quotaKept = 12 * time.Second
	// leastQuota is how many units a Quota has if there is room.
	leastQuota = 4
	hour       = int64(time.Hour)
	// longestAccrual bounds the time for which a rate is charged at once: a unit of the lowest rate, and the longest
	// term.
	longestAccrual = 2 * hour
)

// Quota is what a borrower of a Quota asks for.
type Quota struct {
	Demand int64         // units per hour that the borrower could use, at most MaxLimit
	Ahead  time.Duration // how long the units should last; not used for a token bucket, which lends its rate
	Share  int64         // percentage of the limit that all Quotas of the state may have together; 0 stands for 100
	Term   time.Duration // from the instant at which the owner makes the loan until it ends, at most MaxQuotaTerm
	// Had is the rate of a loan that is reported and that its owner may not know any more; Term is then what is left of
	// the term.
	Had int64
}

// party is a borrower's Quotas together.
type party struct {
	newest uint64 // the number of the newest loan
	wants  int64  // of the newest loan
	rate   int64  // the highest rate of a loan
	cost   int64  // the highest Loan.cost
}

// parties are the borrowers that have Quotas.
func (u *Loans) parties() map[uint64]party {
	all := make(map[uint64]party)
	for i := range u.list {
		l := &u.list[i]
		if l.Ended || l.Wants == 0 {
			continue
		}
		p := all[l.ID.Borrower]
		if l.ID.Number >= p.newest {
			p.newest, p.wants = l.ID.Number, l.Wants
		}
		p.rate, p.cost = max(p.rate, l.Rate), max(p.cost, l.cost())
		all[l.ID.Borrower] = p
	}
	return all
}

// cost is the part of a token bucket's rate that a loan takes, in units per hour: its rate, and its units if another
// loan follows every quotaRenewal.
func (l *Loan) cost() int64 {
	if l.Rate == 0 {
		return 0
	}
	return min(l.Rate+l.Left()*(hour/int64(quotaRenewal)), MaxLimit)
}

// rerate computes the rate that is lent from the instant at on. Since the last charge the former rate has made less
// than a unit, which is carried over.
func (u *Loans) rerate(at int64) {
	before := u.rate
	u.rate = 0
	for i := range u.list {
		if u.list[i].Rate > 0 && !u.list[i].Ended {
			for _, p := range u.parties() {
				u.rate = min(u.rate+p.rate, MaxLimit)
			}
			break
		}
	}
	var pending int64
	if before > 0 {
		pending = min(max(at-u.since, 0), hour/before+1)
	}
	switch {
	case before == 0:
		u.since = at
	case u.rate == before:
	case u.rate == 0 && pending > 0:
		u.due++
	case u.rate > 0:
		carried, rest := mul(pending, before).div(u.rate)
		if rest > 0 {
			carried++
		}
		u.since = at - carried
	}
	u.count()
}

// accrue charges the units that the lent rate has made by the instant to. The charge is dated at the previous one, so
// that the token bucket is as if it had filled at the rest of its rate all the time.
func (ls Limits) accrue(a *Arena, s State, now Instant, to int64, u *Loans) (n int64, err error) {
	n = u.due
	var step int64
	if u.rate > 0 && to > u.since {
		came, _ := mul(to-u.since, u.rate).div(hour)
		came = min(came, MaxLimit)
		step, _ = mul(came, hour).div(u.rate)
		n += came
	}
	if n == 0 {
		return 0, nil
	}
	if n, err = ls.chargeLent(a, s, Instant{Mono: u.since, Wall: now.Wall - (now.Mono - u.since)}, n); err != nil {
		return 0, err
	}
	u.since, u.due = u.since+step, 0
	u.count()
	return n, nil
}

// Quotable reports as a *FieldError why nothing of these limits can be lent by Quotas; nil when it can.
func (ls Limits) Quotable() error {
	for i := range ls {
		var err error
		switch l := &ls[i]; {
		case l.Limit == Unlimited:
		case l.Algorithm == LeakyBucket || l.Algorithm == Concurrency:
			err = invalid("algorithm", "%v cannot be divided among data planes", l.Algorithm)
		case l.CountDenied:
			err = invalid("count_denied", "cannot be divided among data planes, which do not report each refusal")
		}
		if err != nil {
			return inLimits(err, i, len(ls))
		}
	}
	return nil
}

// Unlimited reports whether no limit counts.
func (ls Limits) Unlimited() bool {
	for i := range ls {
		if ls[i].Limit != Unlimited {
			return false
		}
	}
	return true
}

// rated reports whether Quotas have a part of the rate.
func (ls Limits) rated() bool { return len(ls) == 1 && ls[0].Algorithm == TokenBucket }

// hourly is the rate of a limit in units per hour.
func (l *Limit) hourly() int64 {
	return mul(l.Limit, hour).quotient(int64(l.Window))
}

// ratio is n·x/y of numbers of which x is at most y.
func ratio(n, x, y int64) int64 {
	q, _ := mul(n, x).div(y)
	return q
}

// LendQuota lends what a borrower asks for, as far as there is room, and returns the loan. The room is divided by
// demand among the borrowers that ask. When there is no room the loan is of nothing, and units are kept for the
// borrower until it asks again. A repeated ID changes nothing; if the loan is known only from a report of its borrower,
// its end is put off by Term. The caller must have called Expire before, and must not call LendQuota for limits that
// are not Quotable.
func (ls Limits) LendQuota(a *Arena, s State, now Instant, u *Loans, id LoanID, q Quota) Loan {
	now = s.tick(now)
	term := int64(max(min(q.Term, MaxQuotaTerm), 0))
	share := q.Share
	if share <= 0 || share > 100 {
		share = 100
	}
	if i := u.find(id); i >= 0 {
		if l := &u.list[i]; !l.Ended && l.Wants == 0 { // known only from a report
			l.Until = max(l.Until, now.Mono+term)
			l.Wants = max(min(q.Demand, MaxLimit), 1)
			if ls.rated() {
				l.Rate = max(min(q.Had, ls[0].hourly()), 0)
			}
			u.rerate(now.Mono)
		}
		return u.list[i]
	}
	demand := min(q.Demand, MaxLimit)
	if demand <= 0 || len(u.list) >= MaxLoans {
		return Loan{ID: id}
	}
	room, holds := MaxLimit, MaxLimit
	ls.walk(a, s, now, func(k int, c counter, t []uint64) {
		room, holds = min(room, ls[k].room(c, a, t, now)), min(holds, ls[k].holds())
	})
	u.unkeep(id.Borrower, now.Mono)
	lend := ratio(holds, share, 100)
	l := Loan{ID: id, Until: now.Mono + term, Wants: demand}
	if !ls.rated() {
		l.Wants = max(ratio(demand, int64(min(max(q.Ahead, 0), time.Hour)), hour), leastQuota)
	}
	others := u.others(id.Borrower)
	var want int64
	if ls.rated() {
		budget := ratio(ls[0].hourly(), share, 100)
		part := max(min(others.fair(budget, l.Wants), budget-others.cost), 0)
		const seconds = hour / int64(time.Second)
		// The units that its rate makes in a second; but renewals take half of its part at most, and of the capacity
		// each borrower can have two loans at a time.
		want = max(min(max(demand/seconds, leastQuota), part/(2*hour/int64(quotaRenewal)),
			lend/(2*(others.borrowers+1))), 1)
		l.Rate = max(min(demand, part-want*(hour/int64(quotaRenewal))), 0)
	} else {
		want = min(l.Wants, others.fair(min(lend, room), l.Wants))
	}
	if l.Granted = max(min(want, lend-others.lent, room-u.onLoan), 0); l.Granted == 0 {
		l.Rate, l.Kept = 0, want
		l.Until = min(l.Until, now.Mono+int64(quotaKept))
	}
	u.list = append(u.list, l)
	u.rerate(now.Mono)
	return l
}

// others are the sums over all borrowers of Quotas but one; lent is over all of them.
type others struct{ wants, cost, borrowers, lent int64 }

func (u *Loans) others(borrower uint64) (o others) {
	for b, p := range u.parties() {
		if b != borrower {
			o.wants, o.cost, o.borrowers = min(o.wants+p.wants, MaxLimit), min(o.cost+p.cost, MaxLimit), o.borrowers+1
		}
	}
	for i := range u.list {
		if l := &u.list[i]; l.Wants > 0 && !l.Ended {
			o.lent += l.Left()
		}
	}
	return o
}

// fair is the part of a budget that a borrower has beside the others: in proportion to demand, and equal parts of the
// rest if the budget exceeds all demand.
func (o *others) fair(budget, wants int64) int64 {
	all := min(wants+o.wants, MaxLimit)
	if all <= budget {
		return wants + (budget-all)/(o.borrowers+1)
	}
	return max(ratio(budget, wants, all), 1)
}

// unkeep ends the loans of a borrower that only kept units for it.
func (u *Loans) unkeep(borrower uint64, at int64) {
	for i := range u.list {
		if l := &u.list[i]; l.ID.Borrower == borrower && l.Kept > 0 && !l.Ended {
			l.Kept = 0
			u.end(l, at)
		}
	}
}
