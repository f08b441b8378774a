package algo

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// The owner of a state may lend some of its units to a borrower, which admits from them without asking. A unit on loan
// is neither in use nor free: it counts in full, does not age and is not repaid. It is on loan until
//
//   - the borrower reports it spent: it is charged when the report arrives;
//   - the borrower returns it: it is free;
//   - the loan ends: it is charged at that instant.
//
// The invariant, at every instant and whatever borrowers do within their loans (lowered limits excepted), is
//
//	units in use + units on loan ≤ limit
//
// So each algorithm that can be lent keeps its guarantee for all admissions together, at the instants at which they
// were made: a unit that was spent at a is, at each x ≥ a, either on loan, or charged at an instant from a to x. A
// charge dated at the grant would be forgotten too early: a loan of the whole limit, made at 0 and spent just before
// the end of a Window, would leave an empty log at the next instant.
//
// Messages may be lost, repeated and reordered. So they carry totals, which only grow, and each side keeps the largest
// that it has received (as in the flow control of QUIC, RFC 9000, section 4).
//
// The order of calls for each report: Expire until it has nothing to do, Report, then Lend. limiter/loan.go and the
// store make them.
const (
	// LoanTerm is the longest term of a loan, as its borrower counts it from sending what asked for it.
	LoanTerm = time.Second
	// LeastLoan is the least number of units that a loan begins with; a limit below four times as many is not lent.
	LeastLoan = 16
	// nearLoan is how many units per borrower must be free before anything is lent again after a recall. With less, a
	// loan would soon be called back.
	nearLoan = 2 * LeastLoan
	// MaxLoans is how many loans a state has at a time.
	MaxLoans = 1024
	// leastTerm is the shortest term. Reports of a shorter loan would take more messages than the loan saves.
	leastTerm = 20 * time.Millisecond
	// loanInterval is how long a borrower may take to report and have its answer: what a bucket has to hold of its own
	// rate.
	loanInterval = 110 * time.Millisecond
	// loanShare is the part of a limit, as a fraction 1/loanShare, that one loan can be; the term is that part of the
	// Window.
	loanShare = 8
	// loanDrift is the part by which two clocks' rates may differ, as a fraction 1/loanDrift, see owned.
	loanDrift = 1000
	// lateChecks is how many checks may be reported later than the units that they spent, see Totals.
	lateChecks = 64
	// loanGrace is how long a loan is remembered after its end, so that a late report is not taken for one about a loan
	// of a lost owner. A borrower reports nothing about a loan that ended more than LoanTerm ago.
	loanGrace = 4 * LoanTerm
)

// LoanID names a loan of a state. A borrower draws Borrower at random when its process begins. Number counts its loans
// of the state: it begins another loan when it is told that the last one has ended.
type LoanID struct{ Borrower, Number uint64 }

// Totals are the units granted under a loan, and those of them that were spent and returned; and the checks that have
// spent them, which count decisions only and may lag behind Spent.
type Totals struct{ Granted, Spent, Returned, Checks int64 }

// Left is what is neither spent nor returned.
func (t Totals) Left() int64 { return max(t.Granted-t.Spent-t.Returned, 0) }

// valid reports whether a borrower can have these totals.
func (t Totals) valid() bool {
	return t.Granted >= 0 && t.Granted <= MaxLimit && t.Spent >= 0 && t.Returned >= 0 &&
		t.Spent <= t.Granted && t.Returned <= t.Granted-t.Spent && t.Checks >= 0 && t.Checks <= t.Spent
}

// unite keeps the most of both.
func (t Totals) unite(v Totals) Totals {
	return Totals{max(t.Granted, v.Granted), max(t.Spent, v.Spent), max(t.Returned, v.Returned),
		max(t.Checks, v.Checks)}
}

// Loan is a loan as the owner knows it.
type Loan struct {
	ID LoanID
	Totals
	// Until is the Mono instant at which the loan ends; when it has ended, that at which it is forgotten.
	Until int64
	// Ended says that all units that were not returned have been charged, spent or not.
	Ended bool
	// Caller is the name of the borrower's caller, see Loans.Borrowed; empty if it is not known. Append does not write
	// it.
	Caller string
	// Of a Quota: Rate is the part of a token bucket's rate that is lent, in units per hour. Wants is what the borrower
	// asked for, in units, or of a token bucket in units per hour; it is never 0. Kept are units that are kept for the
	// borrower until it asks again: they count as on loan.
	Rate, Wants, Kept int64
	// Term is for how long the borrower may spend, from the instant on its clock at which it sent what Lend answers; 0
	// when nothing was granted and it should return what it has. Only in what Lend returns.
	Term time.Duration
}

// Loans are the loans of one state. The zero value has none. One goroutine may use them at a time.
type Loans struct {
	list   []Loan
	onLoan int64
	// near is the number of borrowers among which free units are shared after a recall; nothing is lent until each
	// would get nearLoan. 0: no recall, or there has been room since.
	near int64
	// Of Quotas: the rate that is lent, the instant up to which its units have been charged, and units to charge in
	// addition.
	rate, since, due int64
}

// Len is the number of loans that are known, those that have ended among them.
func (u *Loans) Len() int { return len(u.list) }

// OnLoan is the number of units that are on loan.
func (u *Loans) OnLoan() int64 { return u.onLoan }

// OnLoanFor is the time until nothing is on loan any more, if no loan is renewed.
func (u *Loans) OnLoanFor(now Instant) time.Duration {
	var last int64 = math.MinInt64
	for i := range u.list {
		if l := &u.list[i]; !l.Ended && l.Left() > 0 {
			last = max(last, l.Until)
		}
	}
	if last < now.Mono {
		return 0
	}
	return time.Duration(last - now.Mono)
}

// Get returns a loan.
func (u *Loans) Get(id LoanID) (Loan, bool) {
	if i := u.find(id); i >= 0 {
		return u.list[i], true
	}
	return Loan{}, false
}

// Borrowed notes the name of the caller that has a loan.
func (u *Loans) Borrowed(id LoanID, caller string) {
	if i := u.find(id); i >= 0 {
		u.list[i].Caller = caller
	}
}

// Fits reports whether there is a place for another loan of a caller. Once half of the places are taken, a caller with
// a name gets no more places than are free, so that no caller takes all of them. An empty name stands for several
// callers.
func (u *Loans) Fits(caller string) bool {
	free := MaxLoans - len(u.list)
	if caller == "" || free > MaxLoans/2 {
		return free > 0
	}
	for i := range u.list {
		if u.list[i].Caller == caller {
			free--
		}
	}
	return free > 0
}

// Most returns the loans of which something is left, those with the most first.
func (u *Loans) Most() []Loan {
	list := slices.DeleteFunc(slices.Clone(u.list), func(l Loan) bool { return l.Ended || l.Left() == 0 })
	slices.SortFunc(list, func(l, m Loan) int {
		return cmp.Or(cmp.Compare(m.Left(), l.Left()), cmp.Compare(l.ID.Borrower, m.ID.Borrower),
			cmp.Compare(l.ID.Number, m.ID.Number))
	})
	return list
}

// Borrowers appends the borrower of each loan of which anything is left: of several ones, several times.
func (u *Loans) Borrowers(dst []uint64) []uint64 {
	for i := range u.list {
		if l := &u.list[i]; !l.Ended && (l.Left() > 0 || l.Rate > 0 || l.Kept > 0) {
			dst = append(dst, l.ID.Borrower)
		}
	}
	return dst
}

// All returns the loans that are known, those that have ended among them.
func (u *Loans) All() []Loan { return slices.Clone(u.list) }

// Recall notes that a request needs units that are on loan. Until a quarter of each limit is free, all known borrowers,
// also those whose loans have ended, get equal parts of what comes back. When that is too little nothing is lent, and
// no loan is renewed.
func (u *Loans) Recall() {
	borrowers := make(map[uint64]struct{}, len(u.list))
	for i := range u.list {
		borrowers[u.list[i].ID.Borrower] = struct{}{}
	}
	u.near = max(int64(len(borrowers)), 1)
}

func (u *Loans) find(id LoanID) int {
	return slices.IndexFunc(u.list, func(l Loan) bool { return l.ID == id })
}

// count brings onLoan up to date.
func (u *Loans) count() {
	u.onLoan = u.due
	if u.rate > 0 {
		u.onLoan++ // what has come of it since is less than a unit
	}
	for i := range u.list {
		if l := &u.list[i]; !l.Ended {
			u.onLoan = min(u.onLoan+l.Left()+l.Kept, MaxLimit)
		}
	}
}

// end ends a loan. The caller has charged what was left of it, or its borrower has returned that.
func (u *Loans) end(l *Loan, at int64) {
	l.Spent, l.Ended, l.Until = l.Granted-l.Returned, true, at+int64(loanGrace)
	u.rerate(at)
}

// Lendable reports as a *FieldError why nothing of these limits is ever lent; nil when something may be.
//
// Not lent are leaky_bucket, for queues of their own at borrowers would break both the bound and the order, and
// concurrency, whose permits count until leases have ended; limits that count refusals, which borrowers do not see;
// limits below LeastLoan·4 units; windows so short that reports would cost more than they save; and buckets that do not
// hold what their rate comes to between two reports.
func (ls Limits) Lendable() error {
	counted := false
	for i := range ls {
		l := &ls[i]
		if l.Limit == Unlimited {
			continue
		}
		counted = true
		var err error
		switch {
		case l.Algorithm == LeakyBucket || l.Algorithm == Concurrency:
			err = invalid("algorithm", "%v cannot be lent", l.Algorithm)
		case l.CountDenied:
			err = invalid("count_denied", "cannot be together with loans")
		case l.holds() < 4*LeastLoan:
			err = invalid("limit", "is too small to be lent")
		case !l.aligned() && l.Window/loanShare < leastTerm:
			err = invalid("window", "is too short to be lent")
		case l.isBucket() && mul(l.holds(), int64(l.Window)).less(mul(l.Limit, int64(loanInterval))):
			err = invalid("capacity", "is too small for its rate to be lent")
		}
		if err != nil {
			return inLimits(err, i, len(ls))
		}
	}
	if !counted {
		return invalid("limit", "is unlimited: there is nothing to lend")
	}
	return nil
}

// owned is how long the owner keeps a loan of a term: clocks whose rates are both off by 1/loanDrift, in the worst
// directions, leave the borrower's term within it.
func owned(term time.Duration) int64 { return int64(term) + 3*int64(term)/loanDrift }

// within is the longest term that is over on a borrower's clock before so much time has passed on the owner's.
func within(left time.Duration) time.Duration { return left - left/loanDrift*4 }

// Expire ends the first loan whose Until has passed, and returns how many of its units were left. They are charged at
// the instant Until. Before that, Expire charges the units of the rate of Quotas. ok is false when there was nothing to
// do; call Expire until then. Expire also forgets loans that ended more than loanGrace ago.
//
// The only error is ErrNoMemory, and nothing has happened then.
func (ls Limits) Expire(a *Arena, s State, now Instant, u *Loans) (n int64, ok bool, err error) {
	due := -1
	for i := range u.list {
		if l := &u.list[i]; l.Until <= now.Mono && !l.Ended && (due < 0 || l.Until < u.list[due].Until) {
			due = i
		}
	}
	to := now.Mono
	if due >= 0 {
		to = u.list[due].Until
	}
	if n, err := ls.accrue(a, s, now, to, u); n > 0 || err != nil {
		return n, err == nil, err
	}
	if due < 0 {
		u.list = slices.DeleteFunc(u.list, func(l Loan) bool { return l.Ended && l.Until <= now.Mono })
		return 0, false, nil
	}
	l := &u.list[due]
	n = l.Left()
	at := Instant{Mono: l.Until, Wall: now.Wall - (now.Mono - l.Until)}
	if n, err = ls.chargeLent(a, s, at, n); err != nil {
		return 0, false, err
	}
	u.end(l, l.Until)
	return n, true, nil
}

// Report takes in a borrower's totals of a loan. It returns the loan and how many units it charges for them at now. The
// caller must have ended the loans whose Until has passed (Expire).
//
// known is the number of spent units that owners have confirmed to the borrower. If the loan is not known here, because
// its owner was lost before a copy had it, Report charges t.Spent - known, beyond the limit if need be, and what the
// borrower has left is on loan for LoanTerm. Without keep, for want of memory or of a place, it ends such a loan: it
// charges what the borrower has left as well, and keeps nothing of it.
//
// Totals that no borrower can have count as none. A borrower may report more than is known to be lent, after the loss
// of an owner; Report believes it only until units in use and on loan are twice a limit. Otherwise a caller that may
// borrow could make a key owe any number of units.
//
// The only error is ErrNoMemory, and nothing has happened then.
func (ls Limits) Report(a *Arena, s State, now Instant, u *Loans, id LoanID, t Totals, known int64,
	keep bool) (l Loan, n int64, err error) {
	if !t.valid() {
		return Loan{ID: id}, 0, nil
	}
	i, had := u.find(id), Loan{ID: id, Totals: Totals{Spent: max(min(known, t.Spent), 0)}}
	if i >= 0 {
		had = u.list[i]
	}
	l = had
	l.Totals = had.unite(t)
	left, covered := l.Left(), int64(0) // covered: units that are on loan already
	if had.Ended {
		left = 0
	} else if i >= 0 {
		covered = had.Left()
	}
	n = max(t.Spent-had.Spent, 0)
	if beyond := n + left - covered; beyond > 0 {
		// Units that were spent are believed before units that are left.
		believed := min(beyond, ls.believable(a, s, now, u))
		n = min(n, covered+believed)
		left = min(left, covered+believed-n)
	}
	// Each check has spent at least one unit; lateChecks of the units charged before may have had their checks reported
	// later.
	l.Checks = max(had.Checks, min(t.Checks, had.Checks+n+min(had.Spent-had.Checks, lateChecks)))
	ends := i < 0 && (!keep || len(u.list) >= MaxLoans)
	if ends {
		n += left
	}
	if n, err = ls.chargeLent(a, s, now, n); err != nil {
		return had, 0, err
	}
	switch {
	case had.Ended:
		l.Returned = had.Returned
		l.Granted = max(had.Granted, l.Spent+l.Returned)
	case l.Left() > left:
		l.Granted = l.Spent + l.Returned + left
	}
	switch {
	case ends:
		u.end(&l, now.Mono)
	case i < 0 && t != (Totals{}):
		l.Until = now.Mono + owned(LoanTerm)
		u.list = append(u.list, l)
	case i >= 0:
		if !l.Ended && l.Granted > had.Granted {
			// An owner that was lost granted these units before a copy knew of them.
			l.Until = max(l.Until, now.Mono+owned(LoanTerm))
		}
		u.list[i] = l
	}
	u.count()
	return l, n, nil
}

// chargeLent charges units that were on loan, and returns how many. It charges none if the limit has become one of
// concurrency, because no caller would release a lease for a check that a borrower has admitted.
func (ls Limits) chargeLent(a *Arena, s State, at Instant, n int64) (int64, error) {
	if ls[0].Algorithm == Concurrency {
		return 0, nil
	}
	return n, ls.Charge(a, s, at, n)
}

// believable is how many units beyond those known to be lent Report believes.
func (ls Limits) believable(a *Arena, s State, now Instant, u *Loans) int64 {
	now = s.tick(now)
	most := MaxLimit
	ls.walk(a, s, now, func(i int, c counter, t []uint64) {
		most = min(most, 2*ls[i].holds()-c.used(&ls[i], a, t, now)-u.onLoan)
	})
	return max(most, 0)
}

// Lend lends units to a borrower so that it has up to want of them, renews the term of the loan, and returns the loan.
// It makes the loan if there is none. With a want of 0 it lends and renews nothing, and ends a loan of which nothing is
// left. The caller must have called Expire and Report before, and must not call Lend for limits that are not Lendable.
//
// A borrower has at most its even part of half of the room, and at most an eighth of the smallest limit, or LeastLoan
// if that is more. At a time at most half of the free units are lent. The borrower stops spending before left has
// passed on the owner's clock.
func (ls Limits) Lend(a *Arena, s State, now Instant, u *Loans, id LoanID, want int64, left time.Duration) Loan {
	i := u.find(id)
	if i < 0 && (want <= 0 || len(u.list) >= MaxLoans) {
		return Loan{ID: id}
	}
	if i >= 0 && u.list[i].Ended {
		return u.list[i]
	}
	now = s.tick(now)
	room, least := MaxLimit, MaxLimit
	term := min(LoanTerm, within(left))
	ls.walk(a, s, now, func(k int, c counter, t []uint64) {
		l := &ls[k]
		room, least = min(room, l.room(c, a, t, now)), min(least, l.holds())
		term = min(term, l.loanTerm(t, now))
	})
	free := room - u.onLoan
	if free >= least/4 {
		u.near = 0
	}
	have, borrowers := u.shared(i)
	want = min(want, room/(2*max(borrowers, u.near)), max(least/loanShare, LeastLoan))
	if want < LeastLoan && have == 0 || free < u.near*nearLoan || term < leastTerm {
		want = 0
	}
	// Other borrowers may have more than their parts, because room has shrunk since. A borrower that has used up its
	// own part gets half of what is free at most.
	grant := max(min(want-have, free/2), 0)
	if have == 0 && grant < LeastLoan {
		grant = 0
	}
	switch {
	case i < 0 && grant == 0:
		return Loan{ID: id}
	case i < 0:
		u.list = append(u.list, Loan{ID: id})
		i = len(u.list) - 1
	}
	l := &u.list[i]
	if l.Granted > MaxLimit-grant {
		grant, want = 0, 0 // the borrower begins another one
	}
	l.Granted += grant
	u.count()
	if want == 0 {
		if have == 0 {
			u.end(l, now.Mono)
		}
		return *l
	}
	l.Until = max(l.Until, now.Mono+owned(term))
	answer := *l
	answer.Term = term
	return answer
}

// shared returns what is left of loan i, and how many borrowers have units if its borrower has.
func (u *Loans) shared(i int) (have, borrowers int64) {
	borrowers = 1
	for j := range u.list {
		switch l := &u.list[j]; {
		case j == i:
			have = l.Left()
		case !l.Ended && l.Left() > 0:
			borrowers++
		}
	}
	return have, borrowers
}

// loanTerm is the longest term of a loan of the limit. The loan of a fixed window ends with the window: a unit that was
// spent in one window and reported in the next would be charged to the next.
func (l *Limit) loanTerm(t []uint64, now Instant) time.Duration {
	term := LoanTerm
	if !l.aligned() {
		term = min(term, l.Window/loanShare)
	}
	switch c := l.counter().(type) {
	case fixedWindow:
		if t[1] != 0 {
			return min(term, within(c.left(l, t, now)))
		}
	case calendarWindow:
		return min(term, within(c.later(l, t, now, 0)))
	}
	return term
}

// Unite adds the loans of v: both sides of a split may have gone on with those that they share. Of a loan that both
// know and neither has ended, the smaller numbers of units spent and returned count, because the state of the side that
// was told of more may have lost the join: the borrower's next report has them charged. Of granted units the larger
// number counts, and of two ends the later. A loan that only one side has ended goes on.
func (u *Loans) Unite(v *Loans) {
	for _, l := range v.list {
		i := u.find(l.ID)
		if i < 0 {
			u.list = append(u.list, l)
			continue
		}
		k := &u.list[i]
		granted, checks := max(k.Granted, l.Granted), max(k.Checks, l.Checks)
		switch {
		case k.Ended == l.Ended:
			spent, returned := min(k.Spent, l.Spent), min(k.Returned, l.Returned)
			k.Totals = k.unite(l.Totals)
			if !k.Ended {
				k.Spent, k.Returned = spent, returned
			}
			k.Until = max(k.Until, l.Until)
			k.Rate, k.Wants, k.Kept = max(k.Rate, l.Rate), max(k.Wants, l.Wants), max(k.Kept, l.Kept)
		case k.Ended:
			*k = l
		}
		k.Granted, k.Checks = max(k.Granted, granted), max(k.Checks, checks)
	}
	u.near, u.due = max(u.near, v.near), max(u.due, v.due)
	since := max(u.since, v.since)
	if u.rate > 0 {
		since = min(since, u.since)
	}
	if v.rate > 0 {
		since = min(since, v.since)
	}
	u.rate = 0
	u.rerate(since)
}

// Append appends the loans to dst, with what is left of their terms in place of instants. A reader has another clock:
// there they end late by the time that the bytes were on the way.
func (u *Loans) Append(dst []byte, now Instant) []byte {
	var since int64
	if u.rate > 0 {
		since = min(max(now.Mono-u.since, 0), longestAccrual)
	}
	dst = appendUint(appendUint(appendUint(dst, int64(len(u.list))), since), u.due)
	for i := range u.list {
		l := &u.list[i]
		var ended int64
		if l.Ended {
			ended = 1
		}
		dst = appendWord(appendWord(dst, l.ID.Borrower), l.ID.Number)
		for _, n := range [...]int64{l.Granted, l.Spent, l.Returned, l.Checks, max(l.Until-now.Mono, 0), ended, l.Rate,
			l.Wants, l.Kept} {
			dst = appendUint(dst, n)
		}
	}
	return dst
}

// ReadLoans reads what Loans.Append wrote and returns what follows it. The bytes need not be trusted. The error is
// ErrSnapshot.
func ReadLoans(now Instant, data []byte) (u Loans, rest []byte, err error) {
	r := &reader{data: data}
	n := int(r.uint(int64(len(data)) / 25))
	since := now.Mono - r.uint(longestAccrual)
	u.due = r.uint(MaxLimit)
	for range n {
		l := Loan{ID: LoanID{r.word(), r.word()}}
		l.Totals = Totals{r.uint(MaxLimit), r.uint(MaxLimit), r.uint(MaxLimit), r.uint(MaxLimit)}
		l.Until = now.Mono + r.uint(int64(MaxQuotaTerm))
		l.Ended = r.uint(1) == 1
		l.Rate, l.Wants, l.Kept = r.uint(MaxLimit), r.uint(MaxLimit), r.uint(MaxLimit)
		if r.err != nil {
			return Loans{}, nil, r.err
		}
		u.list = append(u.list, l)
	}
	if r.err != nil {
		return Loans{}, nil, r.err
	}
	u.rerate(since)
	return u, r.data, nil
}

// Room is the largest cost that would pass if nothing were on loan; Unlimited when no limit counts.
func (ls Limits) Room(a *Arena, s State, now Instant) int64 {
	now = s.tick(now)
	room := Unlimited
	ls.walk(a, s, now, func(i int, c counter, t []uint64) {
		if n := ls[i].room(c, a, t, now); room == Unlimited || n < room {
			room = n
		}
	})
	return room
}
