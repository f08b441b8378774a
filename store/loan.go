package store

import (
	"math"
	"strings"
	"time"

	"github.com/weirlimit/weir/algo"
)

// The loans of one key are in extras.lent, and its record has lentFlag. algo.Loans has the rule: a unit on loan is
// neither in use nor free. Lend takes a borrower's report and lends anew; Recall stops lending until
// there is room again. expireLoans charges what ended loans did not return: beforeLoan, Lend, Recall and the sweep call
// it first.
//
// What a report or an expiry charges has been spent already: it is charged whatever memory there is (forced), also
// without a lease. Every change of the loans is followed by note, because the loans go to followers with the record.

// loanBytes is what a loan is taken to cost when bytes are counted, besides the texts of its state.
const loanBytes = 128

// lent are the loans of one state.
type lent struct {
	of   stateID
	hash uint64
	algo.Loans
	counted int // bytes
}

// recount counts the bytes of the loans that there are now.
func (l *lent) recount(b *shardBudget) {
	size := 0
	if n := l.Len(); n > 0 {
		size = n*loanBytes + l.of.size()
	}
	b.count(size - l.counted)
	b.loans.Add(int64(size - l.counted))
	l.counted = size
}

// loansOf returns the loans of a record that is marked for them.
func (c *content) loansOf(r record) *lent {
	if !r.has(lentFlag) {
		return nil
	}
	return c.extras.lent[stateID{r.spec.rule.Scope, string(r.key)}]
}

// ensureLoans returns the loans of a record, made if need be. They are to be kept afterwards, see keepLent.
func (c *content) ensureLoans(r record) *lent {
	if l := c.loansOf(r); l != nil {
		return l
	}
	side := c.ensureExtras()
	if side.lent == nil {
		side.lent = make(map[stateID]*lent)
	}
	of := r.id()
	of.scope = strings.Clone(of.scope)
	l := &lent{of: of, hash: r.hash()}
	side.lent[of] = l
	r.set(lentFlag)
	return l
}

// keepLent brings the bytes of a record's loans up to date, and drops them when there are none.
func (c *content) keepLent(r record, l *lent, b *shardBudget) {
	if l.recount(b); l.Len() == 0 {
		delete(c.extras.lent, l.of)
		r.clear(lentFlag)
	}
}

// dropLent forgets the loans of a state, if it has any.
func (c *content) dropLent(of stateID, b *shardBudget) {
	if c.extras == nil || c.extras.lent[of] == nil {
		return
	}
	l := c.extras.lent[of]
	b.Give(l.counted)
	b.loans.Add(-int64(l.counted))
	delete(c.extras.lent, of)
}

// expireLoans ends the loans of a record that are due, and returns those that it has: nil where there are none.
func (sh *shard) expireLoans(part *partition, r record, now algo.Instant) *lent {
	l := part.loansOf(r)
	if l == nil {
		return nil
	}
	limits, before := r.spec.rule.Limits, l.Len()
	for {
		mark := part.markOf(r)
		part.lower(limits, r.state, l.of, now)
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

// expireDue does the same for all states of a partition.
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

// uniteLent adds the loans of another content, see algo.Loans.Unite.
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

// Borrow is what a borrower says of a loan, and what it asks for.
type Borrow struct {
	ID     algo.LoanID
	Totals algo.Totals
	// Known is how many units spent the answers to former ones have confirmed.
	Known int64
	// Want is how many units it would like to have; 0: it wants no more of this key.
	Want int64
	// Boot is the present reading of the boot clock, which strict rules compare with their lease.
	Boot int64
	// Caller names the borrower's caller, to whose share a new key is counted; empty: not known.
	Caller string
	// Quota, with a Term, asks for a Quota in place of Want; see algo.Limits.LendQuota. A loan that was one ends when
	// all of it is reported spent or returned.
	Quota algo.Quota
}

// Lent is the answer to a Borrow.
type Lent struct {
	algo.Loan
	// Ticket is as in Answer: what was lent, or lent for longer, must not be used before the backup has confirmed it.
	Ticket uint64
	// Charged is how many units the report has charged, and Checked how many checks it tells of that no report before
	// it did.
	Charged, Checked int64
	// OnLoan is how many units of the key borrowers have then.
	OnLoan int64
	// Decision is, where Term is not 0, what a peek would say; Each, where there are several limits, what each of them
	// would.
	Decision algo.Decision
	Each     []algo.Decision
}

// Lend charges what a borrower reports as spent, lends what it asks for as far as there is room, and renews its loan;
// see algo.Limits.Report and Lend. A report is charged in any case: also under a strict rule without a lease, and
// without memory for more keys. An unknown loan ends at once, and what may be left of it is charged, if there is no
// memory for it, if all loans have their part of it, or if its caller has more than a fair part of the key's
// algo.MaxLoans.
//
// Nothing is lent where the limits are not Lendable, where the key is banned, and, under Escrow, Sync and strict rules,
// while no backup is current: the copy must know what was lent. A strict rule's loan does not outlive the lease that it
// is made under, and has no Quota.
//
// The error is ErrShut, or ErrFull where a key that was not known finds no room.
func (s *Store) Lend(k Key, rule *Rule, now algo.Instant, b Borrow) (a Lent, err error) {
	err = s.ifOpen(k.Partition, func(sh *shard, part *partition) (err error) {
		a, err = sh.lend(part, &k, rule, now, &b)
		return err
	})
	return a, err
}

// lendable returns how much of what a borrower asks for the rule lets it have, and how long it may be spent.
func (p *partition) lendable(rule *Rule, b *Borrow) (want int64, quota algo.Quota, left time.Duration) {
	want, quota, left = b.Want, b.Quota, math.MaxInt64
	if rule.Guarded() {
		var may Answer
		if p.guard(rule, b.Boot, &may) != nil || may.Degraded {
			return 0, algo.Quota{}, left
		}
		if rule.Strict {
			// After the lease another node may decide that knows of no loan. Quotas are for longer than a lease.
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
		want, quota = 0, algo.Quota{} // for want of memory the state keeps its old rule
	}
	if r.banLeft(now) > 0 {
		want, quota.Demand = 0, 0 // a Quota that is not known here is prolonged all the same: its borrower has it
	}
	sh.expireLoans(part, r, now)
	l := part.ensureLoans(r)
	before, known := l.Get(b.ID)
	last := false // there is no memory or place to keep what is reported
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
	after.Caller = before.Caller // which the copies do not have
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

// tellBorrower tells a borrower how the key stands.
func (sh *shard) tellBorrower(r record, l *lent, now algo.Instant, a *Lent) {
	limits := r.spec.rule.Limits
	if len(limits) > 1 {
		a.Each = make([]algo.Decision, len(limits))
	}
	// A peek takes no memory.
	a.Decision, _ = limits.Decide(sh.arena, r.state, now, l.beside(algo.Request{}, now), a.Each)
}

// report takes in what a borrower reports of a loan. last says that the loan ends with it.
func (sh *shard) report(part *partition, r record, l *lent, now algo.Instant, b *Borrow, last bool, a *Lent) {
	limits, mark := r.spec.rule.Limits, part.markOf(r)
	part.lower(limits, r.state, l.of, now)
	sh.forcedOn(r, func() {
		a.Loan, a.Charged, _ = limits.Report(sh.arena, r.state, now, &l.Loans, b.ID, b.Totals, b.Known, !last)
	})
	if a.Charged > 0 {
		sh.note(part, r, mark)
	}
}

// Recall returns the loans of a key of which units are on loan, those with the most first, and sees to it that no more
// are lent before there is room again: a request needs them. What their borrowers return is told by Lend.
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

// OnLoan is how many units of a key are on loan.
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

// LoanStats are the loans of all keys that a Store decides for.
type LoanStats struct {
	OnLoan    int64  // units that borrowers may admit by themselves
	Borrowers int    // that have some of them, or a part of a bucket's rate
	Expired   uint64 // units that were charged because their loans had ended, ever
}

// Loans returns the present reading. It looks at every loan.
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

// beside makes a request one that knows of the units of its state that are on loan.
func (l *lent) beside(r algo.Request, now algo.Instant) algo.Request {
	r.OnLoan, r.OnLoanFor = l.OnLoan(), l.OnLoanFor(now)
	return r
}

// beforeLoan has the request know of the units on loan. It answers a call that is not to be charged before these are
// recalled, see Call.Whole.
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

// wantsBack reports whether units on loan, returned, would let a call grant more, or find room for what it charges. A
// call that is refused without them does not need to ask before.
func (c *Call) wantsBack(room, onLoan int64) bool {
	least := c.Cost
	if c.Partial {
		least = 1
	}
	return (c.Partial || c.Always) && c.Cost > 0 && room >= least && c.Cost > room-onLoan
}

// afterLoan tells a refusal how many units on loan it depends on, and for how long at most: they stand between the
// request and its being admitted, or the time that it has to wait depends on how many of them have been spent, which
// only their borrowers know. Such a refusal begins no ban, because borrowers could still admit during it.
func (p *plan) afterLoan(call *Call, answer *Answer) {
	d := &answer.Decision
	if d.Allowed || call.Always || d.RetryAfter == algo.Never || p.rule.Limits.CountsDenied() {
		return
	}
	answer.OnLoan, answer.OnLoanFor = p.request.OnLoan, p.request.OnLoanFor
}

// Lending is how much of a key could be in use if nothing were on loan, which is its room, and its loans, those that
// have ended among them. It changes nothing: loans that are due are told as they were.
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
