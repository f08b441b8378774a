package store

import (
	"math"
	"strings"
	"time"

	"github.com/weirlimit/weir/algo"
)

// This file keeps the loans of a partition's keys for the limiter (limiter/loan.go). algo.Loans has the rule: a unit on
// loan is neither in use nor free. The path of a loan:
//
//	Lend         charges what a borrower reports as spent, and lends or renews
//	beforeLoan   has a decision count the units on loan as not free
//	afterLoan    tells the limiter that a refusal depends on units on loan (Answer.OnLoan)
//	Recall       returns a key's loans, and has Lend lend less until enough units are free again
//	expireLoans  charges what ended loans have not returned. beforeLoan, Lend, Recall and the sweep call it first
//
// The loans of one key are in extras.lent, and its record has lentFlag.
//
// What a report or an expiry charges has been spent already. So it is charged without a grant too, and even if there is
// no memory left (forcedOn). Every change of the loans is followed by note, because the loans go to the followers with
// the record.

// loanBytes is how many bytes a loan is counted as, besides the texts of its state.
const loanBytes = 128

// lent has the loans of one state.
type lent struct {
	of   stateID
	hash uint64
	algo.Loans
	counted int // bytes
}

// recount brings the counted bytes up to date with the number of loans.
func (l *lent) recount(b *shardBudget) {
	size := 0
	if n := l.Len(); n > 0 {
		size = n*loanBytes + l.of.size()
	}
	b.count(size - l.counted)
	b.loans.Add(int64(size - l.counted))
	l.counted = size
}

// loansOf returns the loans of a record; nil if it does not have lentFlag.
func (c *content) loansOf(r record) *lent {
	if !r.has(lentFlag) {
		return nil
	}
	return c.extras.lent[stateID{r.spec.rule.Scope, string(r.key)}]
}

// ensureLoans returns the loans of a record, and makes an empty list if there is none. The caller calls keepLent
// afterwards.
func (c *content) ensureLoans(r record) *lent {
	if l := c.loansOf(r); l != nil {
		return l
	}
	side, of := c.ensureExtras(), r.id()
	if side.lent == nil {
		side.lent = make(map[stateID]*lent)
	}
	r.set(lentFlag)
	// A record without lentFlag may have loans if a chunk had the key under a hash that is not its own.
	l := side.lent[of]
	if l == nil {
		of.scope = strings.Clone(of.scope)
		l = &lent{of: of, hash: r.hash()}
		side.lent[of] = l
	}
	return l
}

// keepLent counts the bytes of a record's loans after a change, and drops the list if it is empty.
func (c *content) keepLent(r record, l *lent, b *shardBudget) {
	if l.recount(b); l.Len() == 0 {
		delete(c.extras.lent, l.of)
		r.clear(lentFlag)
	}
}

// dropLent drops the loans of a state, if it has any. It does not clear lentFlag.
func (c *content) dropLent(of stateID, b *shardBudget) {
	if c.extras == nil || c.extras.lent[of] == nil {
		return
	}
	l := c.extras.lent[of]
	b.Give(l.counted)
	b.loans.Add(-int64(l.counted))
	delete(c.extras.lent, of)
}

// expireLoans ends the loans of a record whose terms are over, and returns the record's list of loans; nil if it is
// empty.
func (sh *shard) expireLoans(part *partition, r record, now algo.Instant) *lent {
	l := part.loansOf(r)
	if l == nil {
		return nil
	}
	limits, before := r.spec.rule.Limits, l.Len()
	for {
		mark := part.markOf(r)
		part.lower(r, now)
		var n int64
		var ok bool
		sh.forcedOn(r, func() { n, ok, _ = limits.Expire(sh.arena, r.state, now, &l.Loans) })
		if !ok {
			break
		}
		sh.store.expired.Add(uint64(n))
		sh.note(part, r, mark)
	}
	if l.Len() != before {
		part.keepLent(r, l, &sh.budget)
		sh.note(part, r, part.markOf(r))
		if l.Len() == 0 {
			return nil
		}
	}
	return l
}

// expireDue calls expireLoans for all states of an open partition.
func (sh *shard) expireDue(part *partition, now algo.Instant) {
	if !part.open || len(part.extras.lent) == 0 {
		return
	}
	for of, l := range ordered(part.extras.lent) {
		if slot, ok := sh.find(&part.table, l.hash, of.scope, of.key); ok {
			sh.expireLoans(part, sh.record(part.ref(slot)), now)
		}
	}
}

// uniteLent adds the loans of the other content, see algo.Loans.Unite.
func (m *merge) uniteLent() {
	for of, l := range m.add.extras.lent {
		slot, ok := m.sh.find(&m.base.table, l.hash, of.scope, of.key)
		if !ok {
			continue
		}
		r := m.sh.record(m.base.ref(slot))
		to := m.base.ensureLoans(r)
		to.Unite(&l.Loans)
		m.base.keepLent(r, to, &m.sh.budget)
	}
}

// Borrow has a borrower's report of a loan, and what it asks for.
type Borrow struct {
	ID     algo.LoanID
	Totals algo.Totals
	// Known is how many spent units earlier answers have confirmed to the borrower.
	Known int64
	// Want is how many units the borrower wants to have; 0: it wants no more of this key.
	Want int64
	// Boot is the present reading of the boot clock, which is compared with the grant of strict rules.
	Boot int64
	// Caller names the borrower's caller, to whose account a new key is counted; empty: not known.
	Caller string
	// Quota, if it has a Term, asks for a Quota in place of Want; see algo.Limits.LendQuota. A loan that was a Quota
	// ends when all of it is reported as spent or returned.
	Quota algo.Quota
}

// Lent is the answer to a Borrow.
type Lent struct {
	algo.Loan
	// Ticket is as in Answer: units that were lent, or lent for longer, must not be used before the backup has
	// confirmed it.
	Ticket uint64
	// Charged is how many units the report has charged. Checked is how many checks it reports that no earlier report
	// did.
	Charged, Checked int64
	// OnLoan is how many units of the key are on loan afterwards.
	OnLoan int64
	// If Term is not 0, Decision is what a peek would get, and Each, if there are several limits, what each limit would
	// say.
	Decision algo.Decision
	Each     []algo.Decision
}

// Lend charges what a borrower reports as spent, lends what it asks for if enough units are free, and renews its loan;
// see algo.Limits.Report and Lend. It charges a report even under a strict rule without a grant, and even if there is
// no memory for more keys. A loan that the store does not know ends at once, and what may be left of it is charged, in
// three cases: there is no memory for the loan, the loans of all keys have their part of the memory, or the key has no
// place for another loan of the caller (algo.Loans.Fits).
//
// Lend lends nothing if the limits are not Lendable or the key is banned. Under Escrow, Sync and strict rules it lends
// nothing while no backup is current, because the backup must know of the loan. A loan under a strict rule ends before
// the grant under which it was made, and is never a Quota.
//
// The error is ErrShut, or ErrFull if there is no memory for a new key.
func (s *Store) Lend(k Key, rule *Rule, now algo.Instant, b Borrow) (a Lent, err error) {
	err = s.ifOpen(k.Partition, func(sh *shard, part *partition) (err error) {
		a, err = sh.lend(part, &k, rule, now, &b)
		return err
	})
	return a, err
}

// lendable returns what the rule allows of a Borrow's Want and Quota, and how long the units may be spent.
func (p *partition) lendable(rule *Rule, b *Borrow) (want int64, quota algo.Quota, left time.Duration) {
	want, quota, left = b.Want, b.Quota, math.MaxInt64
	if rule.Guarded() {
		var may Answer
		if p.guard(rule, b.Boot, &may) != nil || may.Degraded {
			return 0, algo.Quota{}, left
		}
		if rule.Strict {
			// When the grant ends another node may decide without knowing of the loan. A Quota is longer than a grant.
			left, quota = time.Duration(may.Until-b.Boot), algo.Quota{}
		}
	}
	if rule.Limits.Lendable() != nil {
		want = 0
	}
	if rule.Limits.Quotable() != nil {
		quota = algo.Quota{}
	}
	return want, quota, left
}

func (sh *shard) lend(part *partition, k *Key, rule *Rule, now algo.Instant, b *Borrow) (a Lent, err error) {
	want, quota, left := part.lendable(rule, b)
	asks, reports := want > 0 || quota.Term > 0, b.Totals != (algo.Totals{})
	a.ID = b.ID
	slot, found := sh.find(&part.table, k.Hash, rule.Scope, k.Key)
	if !found {
		if !asks && !reports {
			return a, nil
		}
		if slot, err = sh.enter(part, k, rule, now, b.Caller); err != nil {
			return a, sh.store.refusedRoom(err, rule, b.Caller)
		}
	}
	r, err := sh.adopted(part, slot, rule, now)
	if err != nil {
		want, quota = 0, algo.Quota{} // there is no memory to convert the state, so it keeps its old rule
	}
	if r.banLeft(now) > 0 {
		want, quota.Demand = 0, 0 // a Quota that the store does not know is renewed, because its borrower has it
	}
	sh.expireLoans(part, r, now)
	l := part.ensureLoans(r)
	before, known := l.Get(b.ID)
	last := false // the loan ends with this report, because there is no memory or place to keep it
	if !known && (asks || reports) && (!l.Fits(b.Caller) || !sh.budget.mayLend()) {
		want, quota, last = 0, algo.Quota{}, reports
	}
	sh.report(part, r, l, now, b, last, &a)
	mark := part.markOf(r)
	if limits := r.spec.rule.Limits; quota.Term > 0 {
		a.Loan = limits.LendQuota(sh.arena, r.state, now, &l.Loans, b.ID, quota)
		a.Term = quota.Term
	} else if !last {
		a.Loan = limits.Lend(sh.arena, r.state, now, &l.Loans, b.ID, want, left)
	}
	a.Checked, a.OnLoan = a.Checks-before.Checks, l.OnLoan()
	l.Borrowed(b.ID, b.Caller)
	after, known := l.Get(b.ID)
	after.Caller = before.Caller // followers are not told of the caller
	part.keepLent(r, l, &sh.budget)
	if after != before {
		sh.note(part, r, mark)
	}
	if !found && !known && a.Charged == 0 {
		sh.drop(&part.table, slot)
	} else if a.Term > 0 {
		sh.tellBorrower(r, l, now, &a)
	}
	if a.Term > 0 && rule.Durability >= Escrow {
		a.Ticket = sh.wait(part, k.Partition, rule)
	}
	return a, nil
}

// tellBorrower adds to the answer what a peek at the key would get.
func (sh *shard) tellBorrower(r record, l *lent, now algo.Instant, a *Lent) {
	limits := r.spec.rule.Limits
	if len(limits) > 1 {
		a.Each = make([]algo.Decision, len(limits))
	}
	// A peek takes no memory.
	a.Decision, _ = limits.Decide(sh.arena, r.state, now, l.beside(algo.Request{}, now), a.Each)
}

// report charges what a borrower reports of a loan. If last is set, the loan ends.
func (sh *shard) report(part *partition, r record, l *lent, now algo.Instant, b *Borrow, last bool, a *Lent) {
	limits, mark := r.spec.rule.Limits, part.markOf(r)
	part.lower(r, now)
	sh.forcedOn(r, func() {
		a.Loan, a.Charged, _ = limits.Report(sh.arena, r.state, now, &l.Loans, b.ID, b.Totals, b.Known, !last)
	})
	if a.Charged > 0 {
		sh.note(part, r, mark)
	}
}

// Recall returns the loans of a key that have units, those with the most units first. Until a quarter of each limit is
// free again, Lend gives the borrowers equal parts of what comes back (algo.Loans.Recall). The borrowers return their
// units by reports (Lend).
func (s *Store) Recall(k Key, scope string, now algo.Instant) (loans []algo.Loan, err error) {
	err = s.ifOpen(k.Partition, func(sh *shard, part *partition) error {
		if slot, found := sh.find(&part.table, k.Hash, scope, k.Key); found {
			if l := sh.expireLoans(part, sh.record(part.ref(slot)), now); l != nil {
				l.Recall()
				loans = l.Most()
			}
		}
		return nil
	})
	return loans, err
}

// OnLoan returns how many units of a key are on loan.
func (s *Store) OnLoan(k Key, scope string) (units int64) {
	s.with(k.Partition, func(sh *shard, part *partition) {
		if part.extras == nil || len(part.extras.lent) == 0 {
			return
		}
		if l := part.extras.lent[stateID{scope, k.Key}]; l != nil {
			units = l.OnLoan()
		}
	})
	return units
}

// LoanStats has the loans of all keys in open partitions.
type LoanStats struct {
	OnLoan    int64  // units that borrowers may admit by themselves
	Borrowers int    // borrowers with some of these units, or with a part of a bucket's rate
	Expired   uint64 // units that were charged because their loans had ended, ever
}

// Loans returns the present LoanStats. It reads every loan.
func (s *Store) Loans() LoanStats {
	st, borrowers := LoanStats{Expired: s.expired.Load()}, make(map[uint64]bool)
	var of []uint64
	s.eachPartition(func(part *partition) {
		if !part.open || part.extras == nil {
			return
		}
		for _, l := range part.extras.lent {
			st.OnLoan += l.OnLoan()
			of = l.Borrowers(of[:0])
			for _, b := range of {
				borrowers[b] = true
			}
		}
	})
	st.Borrowers = len(borrowers)
	return st
}

// beside adds to a request how many units of the state are on loan, and for how long.
func (l *lent) beside(r algo.Request, now algo.Instant) algo.Request {
	r.OnLoan, r.OnLoanFor = l.OnLoan(), l.OnLoanFor(now)
	return r
}

// beforeLoan adds the units on loan to the request. It answers a call with Whole that must not be charged before these
// units are recalled, see Call.Whole.
func (sh *shard) beforeLoan(p *plan, call *Call, answer *Answer) (answered bool) {
	l := sh.expireLoans(p.part, p.r, p.now)
	if l == nil {
		return false
	}
	p.request = l.beside(p.request, p.now)
	onLoan := p.request.OnLoan
	if !call.Whole || onLoan == 0 || !call.wantsBack(p.rule.Limits.Room(sh.arena, p.r.state, p.now), onLoan) {
		return false
	}
	answer.OnLoan, answer.OnLoanFor = onLoan, p.request.OnLoanFor
	return true
}

// wantsBack reports whether a call would be granted more, or would find more units for what it charges, if the units on
// loan were returned. room is what would be left if nothing were on loan. A call that is refused even then need not
// wait for the units on loan.
func (c *Call) wantsBack(room, onLoan int64) bool {
	least := c.Cost
	if c.Partial {
		least = 1
	}
	return (c.Partial || c.Always) && c.Cost > 0 && room >= least && c.Cost > room-onLoan
}

// afterLoan adds to a refusal how many units are on loan, and for how long at most, if the refusal or its RetryAfter
// depends on them: how many of them have been spent, only the borrowers know. Such a refusal begins no ban, because
// borrowers could admit during the ban.
func (p *plan) afterLoan(call *Call, answer *Answer) {
	d := &answer.Decision
	if d.Allowed || call.Always || d.RetryAfter == algo.Never || p.rule.Limits.CountsDenied() {
		return
	}
	answer.OnLoan, answer.OnLoanFor = p.request.OnLoan, p.request.OnLoanFor
}

// Lending returns how many units of a key would be free if nothing were on loan, and the key's loans, including those
// that have ended. It changes nothing, so it does not end loans whose terms are over.
func (s *Store) Lending(k Key, scope string, now algo.Instant) (room int64, loans []algo.Loan) {
	s.with(k.Partition, func(sh *shard, part *partition) {
		if slot, found := sh.find(&part.table, k.Hash, scope, k.Key); found {
			r := sh.record(part.ref(slot))
			if l := part.loansOf(r); l != nil {
				room, loans = r.spec.rule.Limits.Room(sh.arena, r.state, now), l.All()
			}
		}
	})
	return room, loans
}
