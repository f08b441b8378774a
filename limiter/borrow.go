package limiter

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/fifo"
	"github.com/weirlimit/weir/internal/lend"
	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/limit"
)

// This file is the borrower's side of loans: this node admits checks of keys that other nodes decide for, from units that the holders have
// lent it. loan.go is the lender's side. The path of a loan:
//
//	missed        counts a check that another node has admitted; the book (internal/lend) finds the keys that are asked for often
//	report        sends what the book wants said to the holders (OpBorrow), and answered gives the book their answers
//	borrowed      admits a check from the book, as long as the borrower's term lasts
//	answerRecall  gives up what is left of a loan when its holder asks for it (OpRecall)
//
// A report has totals since the loan began (granted, spent, returned), so a report that is lost or repeated changes nothing. The term that the
// borrower counts ends before the holder's. If this node sends nothing more, the holder charges what is left when its own term is over.
//
// Other files must keep: before.go asks borrowed before anything that takes a message. Only its borrower sends a loan's reports: rpc/peer takes
// the sender of a stream for the borrower.

const (
	// exchangeMost bounds how long report waits for a node's answer. It is above lendMost, because the node may wait for a copy first. The book
	// repeats a report after 200 ms, so three reports of a loan at most are in flight.
	exchangeMost = 500 * time.Millisecond
	// returnMost is how long a node that stops waits for its loans to be returned.
	returnMost = 200 * time.Millisecond
)

// LoanCall has the fields of OpBorrow and OpRecall that other operations do not have.
type LoanCall struct {
	// Report is the borrower's report: the request of OpBorrow, without the Target, which is the operation's; the answer to OpRecall. The node
	// that receives it sets the borrower's id.
	Report limit.Borrow
	// Forwarded marks an OpBorrow that a client has sent to a node that does not hold the key. The holder takes the report in and grants
	// nothing: it lends only to borrowers that it can ask to return the units.
	Forwarded bool
	Recall    limit.Recall // the request of OpRecall
	Known     bool         // the answer to OpRecall: the borrower has such a loan
	Lent      limit.Lent   // the answer to OpBorrow

	copied unconfirmed // the copy that the answer to OpBorrow waits for, if Outcome has a ticket
}

// borrowing is this node as a borrower of units of keys that other nodes decide for. nil: it borrows nothing.
//
// Each report goes to the node that holds the partition when the report is sent. That node knows the loan however often the partition has moved,
// because a key's loans move with its state.
type borrowing struct {
	l     *Limiter
	book  *lend.Book[loanKey, toldNode]
	clock func() int64 // goes on while the machine is suspended
	kick  fifo.Signal  // set when there may be something to report

	cancel  context.CancelFunc
	running sync.WaitGroup
}

// loanKey identifies a key in the book, under the limits as this node knows them.
type loanKey struct {
	inline      *rule // the rule of a limit sent along, in place of policy
	policy, key string
}

func (op *Op) loanKey() loanKey {
	if op.Limit != nil {
		return loanKey{inline: op.rule, key: op.Key}
	}
	return loanKey{policy: op.Policy, key: op.Key}
}

// own returns a copy whose texts are not parts of a larger message, for the book to keep.
func (k loanKey) own() loanKey {
	k.policy, k.key = strings.Clone(k.policy), strings.Clone(k.key)
	return k
}

func (k loanKey) target() limit.Target {
	t := limit.Target{Policy: k.policy, Key: k.key}
	if k.inline != nil {
		t.Limit, t.Namespace, t.Configured = &k.inline.Limits[0], k.inline.namespace, limit.Reserved(k.inline.namespace)
	}
	return t
}

// toldNode is the node that a loan's reports go to for as long as this node's route to the key stays the same: the node of the route, or the
// holder that the node of the route has named in a NotHolder, since that node may learn of a move before this one does.
type toldNode struct {
	route ownership.Route
	node  ownership.Node
}

// report is a report as an operation, and the node that it goes to.
type report struct {
	op *Op
	to toldNode
}

// startBorrowing starts the goroutine that reports loans. It runs until stop.
func startBorrowing(l *Limiter) *borrowing {
	b := &borrowing{l: l, clock: l.cfg.BootClock, kick: fifo.NewSignal()}
	if b.clock == nil {
		b.clock = func() int64 { return l.clock().Mono }
	}
	b.book = lend.NewBook[loanKey, toldNode](b.kick.Set, l.cfg.Random)
	ctx, cancel := context.WithCancel(context.Background())
	b.cancel = cancel
	b.running.Go(func() {
		b.book.Run(ctx, b.kick, b.clock, func(now int64, reports []lend.Report[loanKey, toldNode]) {
			panics.Tell(l.cfg.Panicked, func() { b.report(ctx, now, reports) }) // after a panic the book repeats the reports
		})
	})
	return b
}

// stop ends the reports, and waits for those in flight. Owners charge the loans that were not returned when their terms are over.
func (b *borrowing) stop() {
	if b == nil {
		return
	}
	b.cancel()
	b.running.Wait()
}

// ReturnLoans returns what this node has on loan, as far as that takes no longer than returnMost and ctx allows, and borrows no more.
func (l *Limiter) ReturnLoans(ctx context.Context) {
	b := l.borrowing
	if b == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, returnMost)
	defer cancel()
	b.book.Return(ctx)
}

// borrowed answers a check of a key that this node does not decide for from a loan, and reports whether it did. It looks at nothing but the
// loan: the loan is valid until its term is over, even if the node that decides for the key is lost.
func (l *Limiter) borrowed(op *Op) bool {
	b := l.borrowing
	if b == nil || b.book.Loans() == 0 || !op.fromLoans() {
		return false
	}
	t, left, ok := b.book.Take(op.loanKey(), op.Cost, b.clock)
	if !ok {
		return false
	}
	l.admitBorrowed(t, left, op)
	return true
}

// allBorrowed answers an atomic check from loans, if these cover all of it, and reports whether it did. Otherwise it takes nothing from them:
// units that were reported as spent cannot be put back.
func (l *Limiter) allBorrowed(all *together) bool {
	b := l.borrowing
	if b == nil || b.book.Loans() == 0 {
		return false
	}
	parts := make([]lend.Part[loanKey, toldNode], len(all.ops))
	for i, op := range all.ops {
		p := &parts[i]
		p.Key, p.Units = op.loanKey(), op.Cost
		if !op.fromLoans() || !b.book.Has(p.Key) {
			return false
		}
	}
	if !b.book.TakeAll(parts, b.clock) {
		return false
	}
	for i, op := range all.ops {
		l.admitBorrowed(parts[i].Terms, parts[i].Left, op)
	}
	return true
}

// admitBorrowed answers and counts a check that was admitted from a loan, of which left units remain.
func (l *Limiter) admitBorrowed(t *limit.Lent, left int64, op *Op) {
	d := op.Decision
	*d = limit.Decision{Policy: op.PolicyName()}
	lend.Admit(d, t, op.Cost, left)
	l.refusals.Admitted(op.hash) // forgets refusals of the key: their retry_after has become too short
	op.rule.stats.borrowed.Add(1)
	l.count(op, tightestOf(op.rule.Limits, d))
}

// fromLoans says whether a loan that covers a check may answer it. It may with Partial, because the loan grants the whole cost. It may not with
// a request id, whose answer the owner keeps.
func (op *Op) fromLoans() bool {
	return op.Cost > 0 && !op.Always && op.RequestID == "" && op.rule.lendable && op.rule.Limits != nil
}

// tightestOf is the limit that a Decision speaks of.
func tightestOf(limits algo.Limits, d *limit.Decision) *algo.Limit {
	for i := range d.Limits {
		if s := &d.Limits[i]; i < len(limits) && s.Limit == d.Limit && s.Window == d.Window && s.Remaining == d.Remaining {
			return &limits[i]
		}
	}
	return &limits[0]
}

// missed counts a check, or a part of an atomic one, that another node has admitted: a loan would have saved the message.
func (b *borrowing) missed(op *Op) {
	if b != nil && op.fromLoans() && lend.Lendable(op.Decision) {
		b.book.Missed(op.loanKey(), op.Cost, b.clock, loanKey.own)
	}
}

// report sends the book's reports, made at the instant sent, to the nodes that decide for their keys, one exchange for each node. The book
// repeats a report that cannot be sent.
func (b *borrowing) report(ctx context.Context, sent int64, reports []lend.Report[loanKey, toldNode]) {
	if len(reports) == 0 {
		return
	}
	var here []report
	by := make(map[ownership.Node][]report)
	now := b.l.moment()
	for i := range reports {
		r := b.reportOf(&reports[i])
		switch node := r.to.node; {
		case r.op.Outcome.Err != nil:
		case r.to.route.Standing == ownership.Owned:
			// The partition has moved to this node, and its loans with it, so that this node now lends to itself: it asks for no more.
			r.op.Loan.Report.Want = 0
			b.l.decide(r.op, &now)
		case node.Name == "" || node == b.l.cfg.Self:
			r.op.Outcome.NotHolder = &ownership.Route{} // no node decides at the moment
		default:
			by[node] = append(by[node], r)
			continue
		}
		here = append(here, r)
	}
	b.answered(sent, here)
	for node, reports := range by {
		b.running.Go(func() { b.send(ctx, sent, node, reports) })
	}
}

// reportOf makes an operation of a report, and finds the node that it goes to.
func (b *borrowing) reportOf(r *lend.Report[loanKey, toldNode]) report {
	l := b.l
	op := NewOp(OpBorrow, limit.Check{Target: r.Key.target()}, Extra{Loan: &LoanCall{Report: limit.Borrow{
		ID: algo.LoanID{Borrower: l.cfg.Self.Boot, Number: r.Number}, Totals: r.Totals, Known: r.Known, Want: r.Want, Counted: true,
	}}})
	op.Hops = 1
	if op.Outcome.Err = l.plan(l.table.Load(), op); op.Outcome.Err != nil {
		return report{op: op}
	}
	to := toldNode{route: *l.cfg.Ownership.Route(int(op.partition))}
	if to.node = to.route.Node; to.route == r.Node.route {
		to.node = r.Node.node
	}
	return report{op, to}
}

// send sends a node its reports, and takes in the answers.
func (b *borrowing) send(ctx context.Context, sent int64, node ownership.Node, reports []report) {
	ctx, cancel := context.WithTimeout(ctx, exchangeMost)
	defer cancel()
	ops := make([]*Op, len(reports))
	for i := range reports {
		ops[i] = reports[i].op
	}
	panics.Tell(b.l.cfg.Panicked, func() { b.l.cfg.Peers.Forward(ctx, node, ops) })
	panics.Tell(b.l.cfg.Panicked, func() { b.answered(sent, reports) })
}

// answered gives the book the answers to reports that were sent at the instant sent.
func (b *borrowing) answered(sent int64, reports []report) {
	answers := make([]lend.Answer[toldNode], 0, len(reports))
	for _, r := range reports {
		a := lend.Answer[toldNode]{Number: r.op.Loan.Report.ID.Number, From: r.to}
		switch out := &r.op.Outcome; {
		case out.Unreachable:
			a.Unheard = true
		case out.NotHolder != nil:
			a.Unheard = true
			if h := out.NotHolder; h.Node.Name != "" && !h.Term.Less(r.to.route.Term) {
				a.To = toldNode{r.to.route, h.Node}
			}
		case out.Err != nil:
			a.Ended, a.Again = true, neverAgain // the holder rejects the target: limits sent along are turned off, for example
		default:
			a.Lent = r.op.Loan.Lent
		}
		answers = append(answers, a)
	}
	if len(answers) > 0 {
		b.book.Answered(sent, b.clock(), answers)
	}
}

// answerRecall gives up what is left of a loan of this node, and answers with the loan's totals.
func (l *Limiter) answerRecall(op *Op) {
	b := l.borrowing
	if b == nil || op.Extra == nil || op.Loan == nil {
		return
	}
	asked := op.Loan.Recall
	r, ok := b.book.Recalled(asked.Number, asked.Granted, b.clock())
	op.Loan.Known = ok
	op.Loan.Report = limit.Borrow{ID: algo.LoanID{Borrower: l.cfg.Self.Boot, Number: asked.Number}, Totals: r.Totals, Known: r.Known}
}

// carryLoan carries out an OpBorrow: it takes in a node's report of a loan, and lends.
func (l *Limiter) carryLoan(op *Op, now *moment) {
	if op.Loan == nil {
		op.Outcome.Err = limit.NewError(limit.Invalid, "", "a report of a loan without the loan")
		return
	}
	op.Loan.Report.Target = op.Target
	if op.Loan.Forwarded {
		op.Loan.Report.Want = 0
	}
	a, copied := l.lend(&op.subject, &op.Loan.Report, now)
	if a.Unheard {
		op.Outcome.NotHolder = l.cfg.Ownership.Route(int(op.partition)) // the borrower asks the holder next
		return
	}
	op.Loan.Lent, op.Loan.copied, op.Outcome.ticket = a, copied, copied.ticket
	op.Loan.copied.answer = &op.Loan.Lent
}

// askNode recalls the loans of a key that a node has (OpRecall), and takes in the reports with which it answers.
func (l *Limiter) askNode(node ownership.Node, of subject, target limit.Target, loans []algo.Loan) {
	ops := make([]*Op, len(loans))
	for i := range loans {
		ops[i] = NewOp(OpRecall, limit.Check{}, Extra{Loan: &LoanCall{Recall: limit.Recall{Number: loans[i].ID.Number, Granted: loans[i].Granted}}})
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
		report := op.Loan.Report
		report.Target, report.ID, report.Want, report.Counted = target, loans[i].ID, 0, true
		l.lend(&of, &report, &now)
	}
}
