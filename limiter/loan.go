package limiter

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/store"
)

// This file is the lender's side of loans: this node lends units of keys that it decides for to borrowers, which are clients (OpenBorrower),
// other nodes and, by quota.go, proxies. borrow.go is the borrower's side. The rules of what is lent are in algo.Loans, the loans themselves in the
// store. The path of a check whose key is on loan:
//
//	decide       refuses the check and sets Outcome.onLoan, because the units on loan would let it pass (decide.go)
//	callBack     begins a round for the key, or finds the one in progress, and asks each borrower for what it has left
//	lend         takes in the borrowers' reports; heard ends the round when all that were asked have answered
//	awaitRecalls waits for the round, recallMost at most, and has the check decided again
//
// A round is one recall of a key: all checks that need its units wait for the same round. A borrower that does not answer in a round is silent:
// later rounds do not wait for it for silentFor, the longest term of a loan.
//
// While a round is in progress, and until the checks that waited for it are decided, lend grants nothing of the key: what comes back is for them.
// No answer that grants units, or a longer term, is sent before the copy has the loan (unconfirmed), where the policy's durability asks for that.

const (
	// recallMost is how long a check waits for units that are recalled.
	recallMost = 50 * time.Millisecond
	// lendMost is how long the answer to a report waits for the copy.
	lendMost = 200 * time.Millisecond
	// silentFor is how long rounds do not wait for a borrower that has not answered one.
	silentFor = algo.LoanTerm
	// How long a borrower should not ask again: lendAgain where there is no room for a loan, returnAgain where other borrowers have units that
	// are recalled when the rest is used up, recallAgain during a recall, and neverAgain where nothing is lent.
	lendAgain   = 250 * time.Millisecond
	returnAgain = 20 * time.Millisecond
	recallAgain = 5 * time.Millisecond
	neverAgain  = 10 * time.Second
	// maxReported bounds how many checks one report of a loan adds to the counts of decisions and to the busiest keys. A borrower admits fewer
	// between two reports, but the number is the borrower's claim alone, and a limit sent along may be huge.
	maxReported = 1 << 20
)

// loans has the ways to ask borrowers, and the rounds. The loans themselves are in the store. The zero value is ready for use.
type loans struct {
	mu        sync.Mutex
	borrowers map[uint64]map[*borrower]struct{} // by the borrower's id
	rounds    map[state]*round
	deciding  map[state]int // checks that wait for a round, or have waited and are not decided yet
	// silent has, by borrower and number of the loan, the Mono instant up to which rounds do not wait for the borrower. OpenBorrower ends it
	// earlier.
	silent map[uint64]map[uint64]int64
	sweep  int64 // the Mono instant from which on giveUp removes the entries of silent that are over

	granted, recalled, unanswered, spent atomic.Uint64
}

// borrower is one way to ask a borrower: a stream of a client, which may have several.
type borrower struct{ recall func(limit.Recall) }

// round is one recall of a key's loans. All checks that need the units wait for the same round.
type round struct {
	asked   map[algo.LoanID]struct{} // loans whose borrowers were asked and have not answered
	unasked []algo.Loan              // loans whose borrowers cannot be asked, unless OpenBorrower comes in time
	late    *time.Timer              // calls giveUp after recallMost
	done    chan struct{}            // closed when the round ends: all borrowers that were asked have answered, or giveUp was called
}

// OpenBorrower implements limit.Lender.
func (l *Limiter) OpenBorrower(id uint64, recall func(limit.Recall)) (end func()) {
	b, all := &borrower{recall}, &l.loans
	all.mu.Lock()
	defer all.mu.Unlock()
	if all.borrowers == nil {
		all.borrowers = make(map[uint64]map[*borrower]struct{})
	}
	if all.borrowers[id] == nil {
		all.borrowers[id] = make(map[*borrower]struct{})
	}
	all.borrowers[id][b] = struct{}{}
	delete(all.silent, id)
	for _, r := range all.rounds {
		r.unasked = slices.DeleteFunc(r.unasked, func(loan algo.Loan) bool {
			if loan.ID.Borrower == id {
				all.ask(r, b, &loan)
			}
			return loan.ID.Borrower == id
		})
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

// ask asks a borrower for what it has left of a loan, as part of a round.
func (ls *loans) ask(r *round, b *borrower, loan *algo.Loan) {
	if _, asked := r.asked[loan.ID]; !asked {
		r.asked[loan.ID] = struct{}{}
		ls.recalled.Add(1)
	}
	b.recall(limit.Recall{Number: loan.ID.Number, Granted: loan.Granted})
}

// Lend implements limit.Lender. A report of a loan whose key another node holds is forwarded to that node, once, and is granted nothing. The
// borrower may not be able to reach the holder yet, since clients connect to it only when it is ready; without the forwarded report its loan
// would end meanwhile, and its units be charged. Where there is no loan yet, the answer is Unheard, and names the holder.
func (l *Limiter) Lend(ctx context.Context, in []limit.Borrow, out []limit.Lent) (wait func(), err error) {
	t, now := l.table.Load(), l.moment()
	var copies []unconfirmed
	var others []forwarded
	for i := range in {
		var s subject
		if l.identify(t, &in[i].Target, &s) != nil {
			out[i] = limit.Lent{Ended: true, Again: neverAgain}
			continue
		}
		a, copied := l.lend(&s, &in[i], &now)
		if out[i] = a; copied.ticket != 0 {
			copied.answer = &out[i]
			copies = append(copies, copied)
		}
		if a.Unheard && a.Holder != "" && in[i].Totals.Granted > 0 {
			others = append(others, l.forwardReport(&in[i], &out[i]))
		}
	}
	if copies == nil && others == nil {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, lendMost)
	return func() {
		defer cancel()
		var told panics.Group
		if others != nil {
			told.Go(func() { l.tellHolders(ctx, others) })
		}
		for i := range copies {
			l.awaitLent(ctx, &copies[i])
		}
		told.Wait()
	}, nil
}

// forwarded is a client's report that this node sends on to the holder.
type forwarded struct {
	op     *Op
	answer *limit.Lent
}

func (l *Limiter) forwardReport(b *limit.Borrow, answer *limit.Lent) forwarded {
	op := NewOp(OpBorrow, limit.Check{Target: b.Target}, Extra{Loan: &LoanCall{Report: *b, Forwarded: true}})
	return forwarded{op, answer}
}

// tellHolders forwards reports to the holders of their keys, those for one node together, and fills in the answers.
func (l *Limiter) tellHolders(ctx context.Context, reports []forwarded) {
	to := l.asks.Get().(*asks)
	for _, r := range reports {
		if r.op.Outcome.Err = l.plan(l.table.Load(), r.op); r.op.Outcome.Err != nil {
			continue
		}
		route := l.cfg.Ownership.Route(int(r.op.partition))
		if route.Standing == ownership.Owned || route.Node.Name == "" || route.Node == l.cfg.Self {
			r.op.Outcome.NotHolder = &ownership.Route{} // the partition has moved to this node, or is moving
			continue
		}
		to.add(way{ownership.Elsewhere, route.Node}, r.op)
	}
	l.askAll(ctx, to)
	to.reset()
	l.asks.Put(to) // as in forward
	for _, r := range reports {
		if out := &r.op.Outcome; out.Err == nil && out.NotHolder == nil && !out.Unreachable {
			holder := r.answer.Holder
			*r.answer = r.op.Loan.Lent
			r.answer.Holder = holder
		}
	}
}

// unconfirmed is an answer that grants a loan, or a longer term of one, and that must not be sent before the copy has the loan.
type unconfirmed struct {
	partition int
	ticket    uint64 // the copy's progress to wait for; 0: none
	strict    bool
	answer    *limit.Lent
	without   limit.Lent // the answer if the copy does not confirm: nothing is granted
}

// awaitLent waits for the copy to confirm a loan. If it does not, the answer becomes one that grants nothing.
func (l *Limiter) awaitLent(ctx context.Context, u *unconfirmed) {
	if degraded, ok := l.cfg.Ownership.AwaitProgress(ctx, u.partition, u.ticket, u.strict); degraded || !ok {
		*u.answer = u.without
	}
}

// lend takes in a borrower's report of a loan of a key, and lends. copied has a ticket if the answer must wait for the copy.
func (l *Limiter) lend(s *subject, b *limit.Borrow, now *moment) (a limit.Lent, copied unconfirmed) {
	r := s.rule
	if r.Limits == nil {
		return limit.Lent{Ended: true, Again: neverAgain}, copied
	}
	k := store.Key{Hash: s.hash, Partition: l.partition(s.hash), Key: b.Key}
	if route := l.cfg.Ownership.Route(k.Partition); route.Standing != ownership.Owned {
		return limit.Lent{Unheard: true, Holder: route.Node.Name}, copied
	}
	again := lendAgain
	call := store.Borrow{ID: b.ID, Totals: b.Totals, Known: b.Known, Want: b.Want, Caller: b.Caller}
	if !r.lendable || r.Limits.Lendable() != nil {
		call.Want, again = 0, neverAgain
	} else if l.loans.recalling(state{r.Scope, b.Key}) {
		call.Want = 0 // units that come back are for the checks that wait for the round
	}
	call.Boot = r.boot(now)
	lent, err := l.store.Lend(k, &r.Rule, now.Instant, call)
	switch {
	case errors.Is(err, store.ErrShut):
		return limit.Lent{Unheard: true}, copied
	case err != nil:
		return limit.Lent{Granted: b.Totals.Granted, Spent: b.Known, Again: again}, copied
	}
	l.loans.spent.Add(uint64(lent.Charged))
	if !b.Counted {
		l.countSpent(r, b.Key, &lent)
	}
	l.loans.heard(state{r.Scope, b.Key}, b.ID, lent.Ended || lent.Left() == 0)
	if lent.Ticket != 0 {
		copied = unconfirmed{
			partition: k.Partition, ticket: lent.Ticket, strict: r.Strict,
			without: limit.Lent{Granted: b.Totals.Granted, Spent: lent.Spent, Again: again},
		}
	}
	if lent.Term != 0 {
		l.loans.granted.Add(1)
		return r.granted(&lent), copied
	}
	switch {
	case again == neverAgain:
	case call.Want == 0:
		again = recallAgain // the borrower asked for nothing, or a round is in progress
	case lent.OnLoan > 0:
		again = returnAgain
	}
	return limit.Lent{Granted: lent.Granted, Spent: lent.Spent, Ended: lent.Ended, Again: again}, copied
}

// granted is the answer to a borrower that has been granted units: the loan, and what the borrower tells its callers of the key's limits.
func (r *rule) granted(lent *store.Lent) limit.Lent {
	a := limit.Lent{Granted: lent.Granted, Spent: lent.Spent, Ended: lent.Ended, Term: lent.Term}
	tightest := &r.Limits[lent.Decision.Tightest]
	a.Limit, a.Window = lent.Decision.Limit, quotaWindow(tightest)
	a.Remaining, a.ResetAfter = lent.Decision.Remaining, resetAfter(tightest, lent.Decision.ResetAfter)
	a.Limits = statusOf(r.Limits, lent.Each)
	for i := range a.Limits {
		a.Limits[i].RetryAfter = 0 // each limit lets pass what the borrower admits from the loan
	}
	a.WarnAt = warnAt(r.warnAt, &a)
	r.stats.saw(a.Limit, a.Remaining)
	return a
}

// countSpent counts the checks that a report says the borrower has admitted, maxReported at most.
func (l *Limiter) countSpent(r *rule, key string, lent *store.Lent) {
	checks := min(lent.Checked, maxReported)
	r.stats.mine().allowed.Add(uint64(checks))
	r.stats.borrowed.Add(uint64(checks))
	l.sample.spent(&r.Rule, key, checks, &lent.Decision)
}

// warnAt is how many units of a.Limit are in use when a decision from the loan is near any of its limits. A unit that the borrower spends counts
// under all of them.
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

// wait counts the checks of a key that wait for rounds: it adds 1 when a check begins to wait, and -1 when it has been decided.
func (ls *loans) wait(of state, n int) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if ls.deciding == nil {
		ls.deciding = make(map[state]int)
	}
	if ls.deciding[of] += n; ls.deciding[of] == 0 {
		delete(ls.deciding, of)
	}
}

// heard notes that a borrower has reported, and ends the round of the key if all borrowers that were asked have answered. returned says that
// none of the loan's units are held any more, which is the answer to a recall.
func (ls *loans) heard(of state, id algo.LoanID, returned bool) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	delete(ls.silent[id.Borrower], id.Number)
	r := ls.rounds[of]
	if r == nil || !returned {
		return
	}
	delete(r.asked, id)
	if len(r.asked) == 0 {
		ls.end(of, r)
	}
}

// callBack begins a round for a key, or returns the one in progress. It asks the borrowers for what they have left; OpenBorrower asks those that
// cannot be asked now, as after a move or while a client reconnects. It returns nil when there is no borrower to wait for.
func (l *Limiter) callBack(of state, k store.Key, op *Op, now int64) *round {
	lent, err := l.store.Recall(k, of.scope, l.clock())
	r, nodes := l.openRound(of, lent, err, now)
	if len(nodes) > 0 {
		// askNode may run for longer than op's texts are valid.
		target, subject := op.Target, op.subject
		target.Policy, target.Key = strings.Clone(target.Policy), strings.Clone(target.Key)
		for node, loans := range nodes {
			l.settling.start(func() { l.askNode(node, subject, target, loans) })
		}
	}
	return r
}

// openRound begins a round, if there is none, and asks the borrowers that are not nodes. It returns the nodes that the caller must ask, with
// their loans.
func (l *Limiter) openRound(of state, lent []algo.Loan, err error, now int64) (r *round, nodes map[ownership.Node][]algo.Loan) {
	all := &l.loans
	all.mu.Lock()
	defer all.mu.Unlock()
	r = all.rounds[of]
	if r != nil || err != nil {
		return r, nil
	}
	r = &round{asked: make(map[algo.LoanID]struct{}), done: make(chan struct{})}
	for i := range lent {
		loan := &lent[i]
		if until, silent := all.silent[loan.ID.Borrower][loan.ID.Number]; silent {
			if now < until {
				continue
			}
			delete(all.silent[loan.ID.Borrower], loan.ID.Number)
		}
		to := all.borrowers[loan.ID.Borrower]
		if node, ok := l.member(loan.ID.Borrower); ok {
			if nodes == nil {
				nodes = make(map[ownership.Node][]algo.Loan)
			}
			nodes[node] = append(nodes[node], *loan)
			r.asked[loan.ID] = struct{}{}
			all.recalled.Add(1)
		} else if len(to) == 0 && loan.Wants == 0 { // the holder of a Quota is never asked
			r.unasked = append(r.unasked, *loan)
		}
		for b := range to {
			all.ask(r, b, loan)
		}
	}
	if len(r.asked) == 0 && len(r.unasked) == 0 {
		return nil, nil
	}
	if all.rounds == nil {
		all.rounds = make(map[state]*round)
	}
	all.rounds[of] = r
	// The round has a timer of its own, because the callers that wait for it may have less time than recallMost.
	r.late = time.AfterFunc(recallMost, func() { all.giveUp(of, r, now+int64(recallMost)) })
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

// giveUp ends a round whose time is over: the borrowers that have not answered become silent.
func (ls *loans) giveUp(of state, r *round, now int64) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if ls.rounds[of] != r {
		return // it has ended
	}
	if now >= ls.sweep { // once in silentFor, so that each entry is visited twice at most
		for borrower, loans := range ls.silent {
			maps.DeleteFunc(loans, func(_ uint64, until int64) bool { return until <= now })
			if len(loans) == 0 {
				delete(ls.silent, borrower)
			}
		}
		ls.sweep = now + int64(silentFor)
	}
	for id := range r.asked {
		ls.silence(id, now+int64(silentFor))
		ls.unanswered.Add(1)
	}
	for i := range r.unasked {
		ls.silence(r.unasked[i].ID, now+int64(silentFor))
		ls.recalled.Add(1)
		ls.unanswered.Add(1)
	}
	ls.end(of, r)
}

// silence has rounds not wait for the borrower of a loan up to an instant. The caller holds mu.
func (ls *loans) silence(id algo.LoanID, until int64) {
	if ls.silent == nil {
		ls.silent = make(map[uint64]map[uint64]int64)
	}
	if ls.silent[id.Borrower] == nil {
		ls.silent[id.Borrower] = make(map[uint64]int64)
	}
	ls.silent[id.Borrower][id.Number] = until
}

// end ends a round. The caller holds mu.
func (ls *loans) end(of state, r *round) {
	delete(ls.rounds, of)
	r.late.Stop()
	close(r.done)
}

// awaitRecalls decides operations once more whose Outcome is onLoan: checks that were refused for want of units on loan, and operations that give
// units back. It does so when the borrowers have returned what they have left, or after recallMost: the operations are final then.
func (l *Limiter) awaitRecalls(ctx context.Context, ops []*Op) {
	type waiting struct {
		op    *Op
		of    state
		round *round
	}
	var rest []waiting // the operations that are not decided yet
	defer func() {     // after a panic, so that their keys can be lent again
		for _, w := range rest {
			if w.round != nil {
				l.loans.giveUp(w.of, w.round, l.clock().Mono)
			}
			l.loans.wait(w.of, -1)
		}
	}()
	var late *time.Timer
	for over := false; ; {
		for _, op := range ops {
			if op.Outcome.onLoan {
				of := op.state()
				l.loans.wait(of, 1)
				rest = append(rest, waiting{op: op, of: of})
				rest[len(rest)-1].round = l.callBack(of, op.storeKey(), op, l.clock().Mono)
			}
		}
		if len(rest) == 0 {
			return
		}
		if late == nil {
			late = time.NewTimer(recallMost)
			defer late.Stop()
		}
		select {
		case <-late.C:
			over = true
		default:
		}
		for _, w := range rest {
			if w.round == nil || over {
				continue
			}
			select { // others may wait for the round for longer: it ends by its own time
			case <-w.round.done:
			case <-late.C:
				over = true
			case <-ctx.Done():
				over = true
			}
		}
		now := l.moment()
		for len(rest) > 0 {
			w := rest[0]
			// Not final while there is time: another node may have lent the units again, and then they are recalled once more.
			w.op.recalled = over || w.round == nil
			l.decideLater(w.op, &now)
			w.op.recalled = false
			rest = rest[1:]
			l.loans.wait(w.of, -1)
		}
	}
}

// LoanStats are the loans of the keys that a node decides for, and its counts of them since it started.
type LoanStats struct {
	store.LoanStats
	Streams  int    // clients that can be asked to return their loans
	Granted  uint64 // loans granted or renewed
	Spent    uint64 // units that borrowers have reported as spent
	Recalled uint64 // loans whose borrowers were asked to return what is left, or could not be asked in time
	// Unanswered counts those of Recalled whose borrowers did not answer in time, or could not be asked.
	Unanswered uint64
}

// Loans returns the present reading.
func (l *Limiter) Loans() LoanStats {
	all, kept := &l.loans, l.store.Loans()
	all.mu.Lock()
	defer all.mu.Unlock()
	return LoanStats{LoanStats: kept, Streams: len(all.borrowers), Granted: all.granted.Load(), Spent: all.spent.Load(), Recalled: all.recalled.Load(), Unanswered: all.unanswered.Load()}
}
