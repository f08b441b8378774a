package limiter

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/store"
)

// This file is the lender's side of loans: this node lends units of keys that it holds. Its borrowers are clients
// (OpenBorrower), other nodes (OpBorrow) and, by quota.go, proxies. borrow.go is the borrower's side. algo.Loans
// decides what may be lent, and the store has the loans. The path of a check whose key is on loan:
//
//	decide        refuses the check and sets Outcome.onLoan, because the units on loan would let it pass (decide.go)
//	callBack      begins a round for the key, or finds the round in progress, and asks each borrower to return what it
//	              has left
//	lend          charges what the borrowers report; heard ends the round when all borrowers that were asked have
//	              answered
//	awaitRecalls  waits for the round, recallMost at most, and has the check decided again
//
// Words:
//
//	round   one recall of a key's loans. All checks that need the units wait for the same round
//	report  what a borrower says of its loan (limit.Borrow): totals of the units granted, spent and returned
//	silent  of a borrower: it has not answered in a round. Later rounds do not wait for it for silentFor, the longest
//	        term of a loan
//
// Other files must keep:
//
//   - lend lends nothing of a key while a round is in progress, and until the checks that waited for the round are
//     decided: the returned units are for these checks.
//   - No answer that lends units, or for a longer term, is sent before the backup or the disk has confirmed the loan,
//     if the policy's durability asks for that. If neither confirms it in time, the answer is LoanCall.without.

const (
	// recallMost bounds how long a check waits for units that are recalled, and how long a round takes.
	recallMost = 50 * time.Millisecond
	// lendMost is how long the answer to a report waits for the backup.
	lendMost = 200 * time.Millisecond
	// silentFor is how long rounds do not wait for a borrower that has not answered one.
	silentFor = algo.LoanTerm
	// The three times after which a borrower may ask again. lendAgain: too few units are free for a loan. returnAgain:
	// so too, but other borrowers have units, which are recalled when the rest is used up; or a round is in progress;
	// or the borrower asked for nothing. neverAgain: nothing is lent under the rule.
	lendAgain   = 250 * time.Millisecond
	returnAgain = 20 * time.Millisecond
	neverAgain  = 10 * time.Second
	// maxReported bounds how many checks one report of a loan adds to the counts of decisions and to the busiest keys.
	// A borrower admits fewer between two reports. But no node can verify the borrower's number, and an inline limit
	// may be huge.
	maxReported = 1 << 20
)

// loans has the streams to borrowers, and the rounds. The store has the loans.
type loans struct {
	mu        sync.Mutex
	borrowers map[uint64]map[*borrower]struct{} // by the borrower's id
	rounds    map[state]*round
	deciding  map[state]int // checks that wait for a round, or have waited and are not decided yet
	// silent has the ids of the borrowers for which rounds do not wait, each with the round that it has not answered
	// last. They leave it silentFor after that round; heard and OpenBorrower remove them earlier.
	silent map[uint64]*round

	granted, recalled, unanswered, spent atomic.Uint64
}

// borrower is one stream to a client that borrows. A client may have several.
type borrower struct{ recall func(limit.Recall) }

// round is one recall of a key's loans.
type round struct {
	// asked has the units granted, of each loan whose borrower was asked and has not answered. OpenBorrower asks a
	// client that had no stream.
	asked map[algo.LoanID]int64
	late  *time.Timer // calls giveUp after recallMost
	// done is closed when the round ends: all borrowers that were asked have answered, or giveUp was called.
	done chan struct{}
}

// start makes the maps.
func (ls *loans) start() {
	ls.borrowers, ls.rounds = make(map[uint64]map[*borrower]struct{}), make(map[state]*round)
	ls.deciding, ls.silent = make(map[state]int), make(map[uint64]*round)
}

// OpenBorrower implements limit.Lender.
func (l *Limiter) OpenBorrower(id uint64, recall func(limit.Recall)) (end func()) {
	b, all := &borrower{recall}, &l.loans
	all.mu.Lock()
	defer all.mu.Unlock()
	if all.borrowers[id] == nil {
		all.borrowers[id] = make(map[*borrower]struct{})
	}
	all.borrowers[id][b] = struct{}{}
	delete(all.silent, id)
	for _, r := range all.rounds {
		for loan, granted := range r.asked {
			if loan.Borrower == id {
				recall(limit.Recall{Number: loan.Number, Granted: granted})
			}
		}
	}
	return func() {
		all.mu.Lock()
		defer all.mu.Unlock()
		delete(all.borrowers[id], b)
		if len(all.borrowers[id]) == 0 {
			delete(all.borrowers, id)
		}
	}
}

// Lend implements limit.Lender. If another node holds the key, Lend forwards the report to that node, which grants
// nothing. The borrower may not be able to reach the holder yet, because clients connect to it only when it is ready.
// Without the forwarded report the loan would end meanwhile, and its units would be charged. If there is no loan yet,
// the answer is Unheard, and names the holder.
func (l *Limiter) Lend(ctx context.Context, in []limit.Borrow, out []limit.Lent) (wait func(), err error) {
	t, now := l.table.Load(), l.moment()
	var waits []*Op
	var places []int
	for i := range in {
		op := NewOp(OpBorrow, limit.Check{Target: in[i].Target}, Extra{Loan: &LoanCall{Report: in[i]}})
		if l.plan(t, op) != nil {
			out[i] = limit.Lent{Ended: true, Again: neverAgain}
			continue
		}
		op.owed = true
		r := l.cfg.Ownership.Route(int(op.partition))
		if r.Standing == ownership.Owned {
			l.decide(op, &now)
		}
		switch {
		case r.Standing != ownership.Owned:
			out[i] = limit.Lent{Unheard: true, Holder: r.Node.Name}
			op.Loan.Forwarded = true
			if in[i].Totals.Granted == 0 || r.Node.Name == "" || r.Node == l.cfg.Self {
				continue
			}
		case op.Outcome.NotHolder != nil:
			out[i] = limit.Lent{Unheard: true}
			continue
		case op.Outcome.ticket == 0:
			out[i] = op.Loan.Lent
			continue
		default:
			out[i] = op.Loan.without
		}
		waits, places = append(waits, op), append(places, i)
	}
	if waits == nil {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, lendMost)
	return func() {
		defer cancel()
		l.wait(ctx, l.takeIn(slices.Clone(waits)))
		for i, op := range waits {
			if to := &out[places[i]]; op.Outcome.Err == nil {
				op.Loan.Lent.Holder = to.Holder
				*to = op.Loan.Lent
			}
		}
	}, nil
}

// lend carries out an OpBorrow: it charges what the borrower reports, and lends what it asks for. It lends nothing for
// a forwarded report, and nothing to this node itself, which may have a loan of a key whose partition has moved to it.
func (l *Limiter) lend(op *Op, now *moment) {
	b, r, key := &op.Loan.Report, op.rule, op.state()
	a := &op.Loan.Lent
	if *a = (limit.Lent{Ended: true, Again: neverAgain}); r.Limits == nil {
		return
	}
	call := store.Borrow{ID: b.ID, Totals: b.Totals, Known: b.Known, Want: b.Want, Caller: op.Caller, Boot: r.boot(now)}
	again := lendAgain
	switch {
	case !r.lendable || r.Limits.Lendable() != nil:
		call.Want, again = 0, neverAgain
	case op.Loan.Forwarded || l.borrowing != nil && b.ID.Borrower == l.cfg.Self.Boot || l.loans.recalling(key):
		call.Want = 0 // during a round the returned units are for the checks that wait
	}
	lent, err := l.store.Lend(op.storeKey(), &r.Rule, now.Instant, call)
	*a = limit.Lent{Granted: b.Totals.Granted, Spent: b.Known, Again: again}
	if errors.Is(err, store.ErrShut) {
		l.setError(op, err)
	}
	if err != nil {
		return
	}
	l.loans.spent.Add(uint64(lent.Charged))
	if !b.Counted {
		l.countSpent(r, op.Key, &lent)
	}
	l.loans.heard(key, b.ID, lent.Ended || lent.Left() == 0)
	a.Spent = lent.Spent
	op.Loan.without, op.Outcome.ticket = *a, lent.Ticket
	if lent.Term != 0 {
		l.loans.granted.Add(1)
		*a = r.granted(&lent)
		return
	}
	switch {
	case again == neverAgain:
	case call.Want == 0 || lent.OnLoan > 0:
		a.Again = returnAgain
	}
	a.Granted, a.Ended = lent.Granted, lent.Ended
}

// granted returns the answer to a borrower that has a loan: the loan, and the limit's numbers, which the borrower's
// decisions are made of.
func (r *rule) granted(lent *store.Lent) limit.Lent {
	a := limit.Lent{Granted: lent.Granted, Spent: lent.Spent, Ended: lent.Ended, Term: lent.Term}
	tightest := &r.Limits[lent.Decision.Tightest]
	a.Limit, a.Window = lent.Decision.Limit, quotaWindow(tightest)
	a.Remaining, a.ResetAfter = lent.Decision.Remaining, resetAfter(tightest, lent.Decision.ResetAfter)
	a.Limits = statusOf(r.Limits, lent.Each)
	for i := range a.Limits {
		a.Limits[i].RetryAfter = 0 // no limit refuses what the borrower admits from the loan
	}
	a.WarnAt = warnAt(r.warnAt, &a)
	r.stats.saw(a.Limit, a.Remaining)
	return a
}

// countSpent counts the checks that a report says the borrower has admitted, maxReported at most.
func (l *Limiter) countSpent(r *rule, key string, lent *store.Lent) {
	checks := min(lent.Checked, maxReported)
	r.stats.mine()[resultAllowed].Add(uint64(checks))
	r.stats.borrowed.Add(uint64(checks))
	l.sample.spent(&r.Rule, key, checks, &lent.Decision)
}

// warnAt returns the number of units of a.Limit in use from which on a decision from the loan is near one of the
// limits. A unit that the borrower spends counts under all limits.
func warnAt(millionths int64, a *limit.Lent) int64 {
	if millionths == 0 || a.Limit <= 0 {
		return 0
	}
	at := warnUnits(millionths, a.Limit)
	for i := range a.Limits {
		if s := &a.Limits[i]; s.Limit > 0 {
			at = min(at, a.Limit-a.Remaining+warnUnits(millionths, s.Limit)-(s.Limit-s.Remaining))
		}
	}
	return max(at, 1)
}

// recalling reports whether a round of a key is in progress, or checks that waited for one are not decided yet.
func (ls *loans) recalling(of state) bool {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	return ls.rounds[of] != nil || ls.deciding[of] > 0
}

// wait counts the checks of a key that wait for rounds: it adds 1 when a check begins to wait, and -1 when it has been
// decided.
func (ls *loans) wait(of state, n int) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if ls.deciding[of] += n; ls.deciding[of] == 0 {
		delete(ls.deciding, of)
	}
}

// heard notes that a borrower has reported. It ends the round of the key if that was the last answer which the round
// waited for. returned says that nothing is left of the loan, which is the answer to a recall.
func (ls *loans) heard(of state, id algo.LoanID, returned bool) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	delete(ls.silent, id.Borrower)
	r := ls.rounds[of]
	if r == nil || !returned {
		return
	}
	delete(r.asked, id)
	if len(r.asked) == 0 {
		ls.end(of, r)
	}
}

// callBack begins a round for an operation's key, or returns the round in progress. It asks the borrowers to return
// what they have left. A client that has no stream now, such as after a move of the partition, is asked by OpenBorrower
// when it connects. callBack returns nil if there is no borrower to wait for.
func (l *Limiter) callBack(op *Op, of state) *round {
	now := l.clock()
	lent, err := l.store.Recall(op.storeKey(), of.scope, now)
	r, nodes := l.openRound(of, lent, err)
	for node, loans := range nodes {
		target, subject := op.Target, op.subject
		if target.Key = of.key; target.Policy != "" { // the goroutine may run for longer than op's texts are valid
			target.Policy = of.scope
		}
		l.settling.start(func() { l.askNode(node, subject, target, loans) })
	}
	return r
}

// openRound begins a round, if there is none, and asks the clients. It returns the nodes that the caller must ask, with
// their loans.
func (l *Limiter) openRound(of state, lent []algo.Loan, err error) (r *round, nodes map[ownership.Node][]algo.Loan) {
	all := &l.loans
	all.mu.Lock()
	defer all.mu.Unlock()
	r = all.rounds[of]
	if r != nil || err != nil {
		return r, nil
	}
	r, nodes = &round{asked: make(map[algo.LoanID]int64), done: make(chan struct{})},
		make(map[ownership.Node][]algo.Loan)
	for i := range lent {
		loan := &lent[i]
		if _, silent := all.silent[loan.ID.Borrower]; silent || loan.Wants != 0 {
			continue // the holder of a Quota is never asked
		}
		r.asked[loan.ID] = loan.Granted
		if node, ok := l.member(loan.ID.Borrower); ok {
			nodes[node] = append(nodes[node], *loan)
		}
		for b := range all.borrowers[loan.ID.Borrower] {
			b.recall(limit.Recall{Number: loan.ID.Number, Granted: loan.Granted})
		}
	}
	if len(r.asked) == 0 {
		return nil, nil
	}
	all.recalled.Add(uint64(len(r.asked)))
	all.rounds[of] = r
	// The round has its own timer, because the checks that wait for it may have less time than recallMost.
	r.late = time.AfterFunc(recallMost, func() { all.giveUp(of, r) })
	return r, nodes
}

// member returns the node with a boot number, which is a node's id as a borrower.
func (l *Limiter) member(boot uint64) (ownership.Node, bool) {
	switch {
	case l.borrowing != nil && boot == l.cfg.Self.Boot:
		return l.cfg.Self, true
	case l.cfg.Member == nil || l.cfg.Peers == nil:
		return ownership.Node{}, false
	}
	return l.cfg.Member(boot)
}

// giveUp ends a round after recallMost. The borrowers that have not answered become silent.
func (ls *loans) giveUp(of state, r *round) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if ls.rounds[of] != r {
		return // it has ended
	}
	ls.unanswered.Add(uint64(len(r.asked)))
	for id := range r.asked {
		ls.silent[id.Borrower] = r
	}
	time.AfterFunc(silentFor, func() {
		ls.mu.Lock()
		defer ls.mu.Unlock()
		for id := range r.asked {
			if ls.silent[id.Borrower] == r {
				delete(ls.silent, id.Borrower)
			}
		}
	})
	ls.end(of, r)
}

// end ends a round. The caller holds mu.
func (ls *loans) end(of state, r *round) {
	delete(ls.rounds, of)
	r.late.Stop()
	close(r.done)
}

// awaitRecalls decides the operations again whose Outcome is onLoan: refused checks that units on loan would let pass,
// and operations that give units back. It does so when the round has ended, or after recallMost. After recallMost, or
// if there is no borrower to wait for, it sets op.recalled, which makes the decision final. Otherwise the operation may
// be onLoan again, because units may have been lent again since, and another round begins.
func (l *Limiter) awaitRecalls(ctx context.Context, ops []*Op) {
	var late *time.Timer
	var kept []state // keys of which nothing is lent until all are decided
	defer func() {
		for _, of := range kept {
			l.loans.wait(of, -1)
		}
	}()
	for over := false; ; {
		var rest []*Op
		var rounds []*round
		for _, op := range ops {
			if op.Outcome.onLoan {
				of := op.state().own()
				l.loans.wait(of, 1)
				kept, rest = append(kept, of), append(rest, op)
				rounds = append(rounds, l.callBack(op, of))
			}
		}
		if rest == nil {
			return
		}
		if late == nil {
			late = time.NewTimer(recallMost)
			defer late.Stop()
		}
		for _, r := range rounds {
			if r != nil && !over {
				select { // the round goes on: other checks may wait for it longer
				case <-r.done:
				case <-late.C:
					over = true
				case <-ctx.Done():
					over = true
				}
			}
		}
		select {
		case <-late.C:
			over = true
		default:
		}
		now := l.moment()
		for i, op := range rest {
			op.recalled = over || rounds[i] == nil
			l.decideLater(op, &now)
			op.recalled = false
		}
	}
}

// LoanStats has the loans of the keys that a node holds, and the node's counts of them since it started.
type LoanStats struct {
	store.LoanStats
	Streams  int    // clients with a stream, which can be asked to return their loans
	Granted  uint64 // loans granted or renewed
	Spent    uint64 // units that borrowers have reported as spent
	Recalled uint64 // loans whose borrowers were asked to return what is left, or could not be asked
	// Unanswered counts the loans in Recalled whose borrowers did not answer in time, or could not be asked.
	Unanswered uint64
}

// Loans returns the present LoanStats.
func (l *Limiter) Loans() LoanStats {
	all, kept := &l.loans, l.store.Loans()
	all.mu.Lock()
	defer all.mu.Unlock()
	return LoanStats{
		LoanStats: kept, Streams: len(all.borrowers), Granted: all.granted.Load(), Spent: all.spent.Load(),
		Recalled: all.recalled.Load(), Unanswered: all.unanswered.Load(),
	}
}
