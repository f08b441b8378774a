package limiter

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/fifo"
	"github.com/weirlimit/weir/internal/lend"
	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/limit"
)

// This file is the borrower's side of loans: this node admits checks of keys that other nodes hold, from units that the
// holders have lent it. loan.go is the lender's side. The path of a loan:
//
//	missed        counts a check that another node has admitted; the book (internal/lend) finds the keys that are asked
//	              for often
//	report        sends the book's reports to the holders (OpBorrow), and answered gives the book their answers
//	borrowed      admits a check from the book, without a message, as long as the borrower's term lasts
//	answerRecall  returns what is left of a loan when its holder asks for it (OpRecall)
//
// A check that its loan does not cover goes to the holder, as if there were no loan.
//
// A report has totals since the loan began (granted, spent, returned), so that losing or repeating a report does no
// harm. The borrower's term ends before the holder's. If this node sends nothing more, the holder charges what is left
// when its own term ends.
//
// Other files must keep: before.go calls borrowed before it sends anything. Only the borrower of a loan reports on it:
// rpc/peer treats the sender of a stream as the borrower.

const (
	// exchangeMost bounds how long report waits for a node's answer. It is above lendMost, because the node may wait
	// for its backup first. The book repeats a report after 200 ms, so at most three reports of a loan are in flight.
	exchangeMost = 500 * time.Millisecond
	// returnMost is how long a node that stops waits for its loans to be returned.
	returnMost = 200 * time.Millisecond
)

// LoanCall has the fields of OpBorrow, OpRecall and OpQuota that other operations do not have.
type LoanCall struct {
	// Report is the request of OpBorrow and OpQuota, and the answer to OpRecall. Its Target is not used: the operation
	// has one. The node that receives an OpBorrow sets the borrower's id.
	Report limit.Borrow
	Ask    algo.Quota // of OpQuota: what the borrower asks for
	// Forwarded marks an OpBorrow that a client has sent to a node that does not hold the key. The holder charges what
	// the report says and grants nothing: it lends only to borrowers that it can ask to return the units.
	Forwarded bool
	Recall    limit.Recall    // the request of OpRecall
	Known     bool            // the answer to OpRecall: the borrower has such a loan
	Lent      limit.Lent      // the answer to OpBorrow
	Quota     limit.QuotaLent // the answer to OpQuota, without Err

	without limit.Lent // the answer if the backup does not confirm the loan: nothing is granted
}

// borrowing has what this node borrows. nil: it borrows nothing.
//
// Each report is routed as a check is (route.go), to the node that holds the partition then. That node knows the loan
// however often the partition has moved, because a key's loans move with its state.
type borrowing struct {
	l     *Limiter
	book  *lend.Book[loanKey, struct{}]
	clock func() int64 // goes on while the machine is suspended
	kick  fifo.Signal  // set when there may be something to report

	cancel  context.CancelFunc
	running sync.WaitGroup
}

// loanKey identifies a key in the book, under the limits as this node knows them.
type loanKey struct {
	inline *rule // the rule of an inline limit; nil: the scope is a policy
	state
}

func (op *Op) loanKey() loanKey {
	k := loanKey{state: op.state()}
	if op.Limit != nil {
		k.inline = op.rule
	}
	return k
}

// own returns a copy for the book to keep.
func (k loanKey) own() loanKey { return loanKey{k.inline, k.state.own()} }

func (k loanKey) target() limit.Target {
	if k.inline == nil {
		return limit.Target{Policy: k.scope, Key: k.key}
	}
	of := k.inline
	return limit.Target{Limit: &of.Limits[0], Namespace: of.namespace, Configured: limit.Reserved(of.namespace),
		Key: k.key}
}

// startBorrowing starts the goroutine that reports loans. It runs until stop.
func startBorrowing(l *Limiter) *borrowing {
	b := &borrowing{l: l, clock: l.cfg.BootClock, kick: fifo.NewSignal()}
	b.book = lend.NewBook[loanKey, struct{}](b.kick.Set, l.cfg.Random)
	ctx, cancel := context.WithCancel(context.Background())
	b.cancel = cancel
	b.running.Go(func() {
		b.book.Run(ctx, b.kick, b.clock, func(now int64, reports []lend.Report[loanKey, struct{}]) {
			// After a panic the book repeats the reports.
			panics.Tell(l.cfg.Panicked, func() { b.report(ctx, now, reports) })
		})
	})
	return b
}

// stop ends the reports, and waits for those in flight. The holder charges a loan that was not returned when the loan's
// term ends.
func (b *borrowing) stop() {
	if b == nil {
		return
	}
	b.cancel()
	b.running.Wait()
}

// ReturnLoans returns all loans of this node, and has it borrow no more. It takes returnMost at most, and ends with
// ctx.
func (l *Limiter) ReturnLoans(ctx context.Context) {
	b := l.borrowing
	if b == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, returnMost)
	defer cancel()
	b.book.Return(ctx)
}

// borrowed answers a check of a key that another node holds from a loan, and reports whether it did. It looks at
// nothing but the loan: the loan is valid until its term ends, even if the holder is lost.
func (l *Limiter) borrowed(op *Op) bool {
	b := l.borrowing
	if b == nil || b.book.Loans() == 0 || !op.fromLoans() {
		return false
	}
	t, left, ok := b.book.Take(op.loanKey(), op.Cost, b.clock)
	if !ok {
		return false
	}
	d := op.Decision
	*d = limit.Decision{Policy: op.PolicyName()}
	lend.Admit(d, t, op.Cost, left)
	l.refusals.Admitted(op.hash) // drops refusals of the key: their retry_after is too short now
	op.rule.stats.borrowed.Add(1)
	l.count(op, tightestOf(op.rule.Limits, d))
	return true
}

// fromLoans reports whether a loan that covers a check may answer it. It may if the check has Partial, because the loan
// grants the whole cost. It may not if the check has a request id, whose answer the holder keeps.
func (op *Op) fromLoans() bool {
	return op.Cost > 0 && !op.Always && op.RequestID == "" && op.rule.lendable && op.rule.Limits != nil
}

// tightestOf returns the limit whose numbers a Decision has, or the first one.
func tightestOf(limits algo.Limits, d *limit.Decision) *algo.Limit {
	for i := range d.Limits {
		if s := &d.Limits[i]; i < len(limits) && s.Limit == d.Limit && s.Window == d.Window &&
			s.Remaining == d.Remaining {
			return &limits[i]
		}
	}
	return &limits[0]
}

// missed counts a check that another node has admitted: a loan would have saved the message.
func (b *borrowing) missed(op *Op, end *moment) {
	if b != nil && op.fromLoans() && lend.Lendable(op.Decision) {
		b.book.Missed(op.loanKey(), op.Cost, end.bootTime, loanKey.own)
	}
}

// report sends the book's reports, made at the instant sent, to the holders of their keys, and all for one node
// together. The book repeats a report that cannot be sent.
func (b *borrowing) report(ctx context.Context, sent int64, reports []lend.Report[loanKey, struct{}]) {
	to := asks{most: len(reports)}
	for i := range reports {
		r := &reports[i]
		op := NewOp(OpBorrow, limit.Check{Target: r.Key.target()}, Extra{Loan: &LoanCall{Report: limit.Borrow{
			ID: algo.LoanID{Borrower: b.l.cfg.Self.Boot, Number: r.Number}, Totals: r.Totals, Known: r.Known,
			Want: r.Want, Counted: true,
		}}})
		op.owed = true
		if op.Outcome.Err = b.l.plan(b.l.table.Load(), op); op.Outcome.Err != nil {
			b.answered(sent, []*Op{op})
			continue
		}
		route := b.l.cfg.Ownership.Route(int(op.partition))
		to.add(way{route.Standing, route.Node}, op)
	}
	for _, g := range to.groups {
		b.running.Go(func() {
			panics.Tell(b.l.cfg.Panicked, func() { // after a panic the book repeats the reports
				ctx, cancel := context.WithTimeout(ctx, exchangeMost)
				defer cancel()
				b.l.wait(ctx, b.l.takeIn(slices.Clone(g.ops)))
				b.answered(sent, g.ops)
			})
		})
	}
}

// answered gives the book the answers to reports that were sent at the instant sent.
func (b *borrowing) answered(sent int64, ops []*Op) {
	answers := make([]lend.Answer[struct{}], len(ops))
	for i, op := range ops {
		a := &answers[i]
		a.Lent = op.Loan.Lent
		if err := op.Outcome.Err; err != nil {
			// An error other than Unavailable: the holder rejects the target, such as if inline limits are turned off.
			a.Lent = limit.Lent{Unheard: err.Kind == limit.Unavailable, Ended: err.Kind != limit.Unavailable,
				Again: neverAgain}
		}
		a.Number = op.Loan.Report.ID.Number
	}
	b.book.Answered(sent, b.clock(), answers)
}

// answerRecall returns what is left of a loan that this node has borrowed, by answering with the loan's totals.
func (l *Limiter) answerRecall(op *Op) {
	b := l.borrowing
	if b == nil || op.Extra == nil || op.Loan == nil {
		return
	}
	asked := op.Loan.Recall
	r, ok := b.book.Recalled(asked.Number, asked.Granted, b.clock())
	op.Loan.Known = ok
	op.Loan.Report = limit.Borrow{ID: algo.LoanID{Borrower: l.cfg.Self.Boot, Number: asked.Number}, Totals: r.Totals,
		Known: r.Known}
}

// askNode recalls the loans of a key that a node has (OpRecall), and takes in the reports with which it answers.
func (l *Limiter) askNode(node ownership.Node, of subject, target limit.Target, loans []algo.Loan) {
	ops := make([]*Op, len(loans))
	for i := range loans {
		ops[i] = NewOp(OpRecall, limit.Check{},
			Extra{Loan: &LoanCall{Recall: limit.Recall{Number: loans[i].ID.Number, Granted: loans[i].Granted}}})
		ops[i].Hops = 1
	}
	ctx, cancel := context.WithTimeout(context.Background(), recallMost)
	defer cancel()
	if node == l.cfg.Self {
		for _, op := range ops {
			l.answerRecall(op)
		}
	} else {
		l.cfg.Peers.Forward(ctx, node, ops)
	}
	now := l.moment()
	for i, op := range ops {
		if out := &op.Outcome; out.Unreachable || out.Err != nil || out.NotHolder != nil || !op.Loan.Known {
			continue
		}
		report := NewOp(OpBorrow, limit.Check{Target: target}, Extra{Loan: &LoanCall{Report: op.Loan.Report}})
		report.subject, report.partition = of, int32(l.partition(of.hash))
		r := &report.Loan.Report
		r.ID, r.Want, r.Counted = loans[i].ID, 0, true
		l.lend(report, &now)
	}
}
