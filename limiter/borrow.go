package limiter

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/borrow"
	"github.com/weirlimit/weir/internal/recovered"
	"github.com/weirlimit/weir/internal/wake"
	"github.com/weirlimit/weir/limit"
)

const (
	// exchangeMost is how long the answer to reports is waited for: loans may wait for copies for lendMost.
	exchangeMost = 500 * time.Millisecond
	// maxExchanges bounds the exchanges with one node that are in flight. What is not said is said again.
	maxExchanges = 4
	// returnMost is how long a node that stops waits for its loans to be returned.
	returnMost = 200 * time.Millisecond
)

// LoanCall is what an operation of a loan says and hears besides what all operations do.
type LoanCall struct {
	// Report is what a borrower says: of OpBorrow what it asks with, but for the Target, which is the operation's; of OpRecall what comes of
	// it. Whoever carries operations sets who the borrower is.
	Report limit.Borrow
	// Forwarded says of OpBorrow that a client borrows, and has told a node that does not hold the key. Nothing is granted then: a holder
	// lends to whom it can ask to return it.
	Forwarded bool
	Recall    limit.Recall // OpRecall
	Known     bool         // what comes of OpRecall: there is such a loan
	Lent      limit.Lent   // what comes of OpBorrow

	copied unconfirmed // with a ticket in the Outcome
}

// borrowing is a node as a borrower of units of keys that others decide for. nil: it borrows nothing.
//
// Each report goes to who holds the partition when it is sent. It finds its totals there however often the partition has moved, for loans
// are a part of the state of their key.
type borrowing struct {
	l     *Limiter
	book  *borrow.Book[loanKey, toldNode]
	clock func() int64 // goes on while the machine is suspended
	kick  wake.Signal  // set when there may be something to report

	cancel  context.CancelFunc
	running sync.WaitGroup

	mu        sync.Mutex
	exchanges map[ownership.Node]int // that are in flight
}

// loanKey names a key of which units can be on loan, under the limits as this node knows them.
type loanKey struct {
	inline      *inlineRule // of a limit sent along, in place of policy
	policy, key string
}

func loanKeyOf(c *limit.Check, s *subject) loanKey {
	if s.inline != nil {
		return loanKey{inline: s.inline, key: c.Key}
	}
	return loanKey{policy: c.Policy, key: c.Key}
}

// own is a key that is kept: its text may be a part of something larger.
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

// toldNode is a node that has heard of a loan, or is said to hold the key by who has not, and the route by which that one was found. It is
// told while the route is the same: it may know of the holder what this node does not.
type toldNode struct {
	route ownership.Route
	node  ownership.Node
}

// report is one on its way to a node.
type report struct {
	op *Op
	to toldNode
}

// startBorrowing starts what reports loans, until stop.
func startBorrowing(l *Limiter) *borrowing {
	b := &borrowing{l: l, clock: l.cfg.BootClock, kick: wake.New(), exchanges: make(map[ownership.Node]int)}
	if b.clock == nil {
		b.clock = func() int64 { return l.clock().Mono }
	}
	b.book = borrow.New[loanKey, toldNode](b.kick.Set, l.cfg.Random)
	ctx, cancel := context.WithCancel(context.Background())
	b.cancel = cancel
	b.running.Go(func() {
		b.book.Run(ctx, b.kick, b.clock, func(now int64, reports []borrow.Report[loanKey, toldNode]) {
			recovered.Tell(l.cfg.Panicked, func() { b.report(ctx, now, reports) }) // what is not said is said again
		})
	})
	return b
}

// stop ends it, and waits for what is in flight. Loans that are not returned are charged by their owners when their terms are over.
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

// lendable says whether units of a subject's key may be on loan as far as its policy goes. A check in shadow mode is never refused, and a
// candidate is asked each time.
func (s *subject) lendable() bool {
	return s.inline != nil || s.entry != nil && !s.entry.NoLend && !s.entry.Shadow && s.entry.candidate == nil
}

// borrowed answers a check of a key that this node does not decide for from a loan, and reports whether it did. Nothing is looked at but
// the loan: whoever decides for the key may be gone, or be lost, and what has been lent stays so until the term of that is over.
func (l *Limiter) borrowed(c *limit.Check, s *subject, d *limit.Decision) bool {
	b := l.borrowing
	if b == nil || b.book.Loans() == 0 || !fromLoans(c) {
		return false
	}
	limits := lent(c, s)
	if limits == nil {
		return false
	}
	t, left, ok := b.book.Take(loanKeyOf(c, s), c.Cost, b.clock)
	if !ok {
		return false
	}
	l.admitBorrowed(t, left, limits, c, s, d)
	return true
}

// allBorrowed answers an atomic check from loans, if these cover all of it, and reports whether it did. Otherwise nothing is taken of them: what
// is reported as spent cannot be put back.
func (l *Limiter) allBorrowed(all *together) bool {
	b := l.borrowing
	if b == nil || b.book.Loans() == 0 {
		return false
	}
	parts := make([]borrow.Part[loanKey, toldNode], len(all.ops))
	limits := make([]algo.Limits, len(all.ops))
	for i := range all.ops {
		op, p := &all.ops[i], &parts[i]
		p.Key, p.Units = loanKeyOf(&op.Check, &op.subject), op.Cost
		limits[i] = lent(&op.Check, &op.subject)
		if limits[i] == nil || !fromLoans(&op.Check) || !b.book.Has(p.Key) {
			return false
		}
	}
	if !b.book.TakeAll(parts, b.clock) {
		return false
	}
	for i := range all.ops {
		op, p := &all.ops[i], &parts[i]
		l.admitBorrowed(p.Terms, p.Left, limits[i], &op.Check, &op.subject, &op.Outcome.Decision)
	}
	return true
}

// lent is the limits under which a key may be answered from a loan; nil: it may not.
func lent(c *limit.Check, s *subject) algo.Limits {
	if !s.lendable() {
		return nil
	}
	return s.limits(c.Key)
}

// limits are those that a key has a state under; nil where it has none: it is unlimited, or blocked, or the policy is not known.
func (s *subject) limits(key string) algo.Limits {
	switch {
	case s.inline != nil && !s.inline.unlimited:
		return s.inline.Limits
	case s.inline == nil && s.entry != nil:
		if rule := s.entry.rule(s.entry.Rule(key)); rule != nil {
			return rule.Limits
		}
	}
	return nil
}

// admitBorrowed answers and counts a check that was admitted from a loan, of which so much is left.
func (l *Limiter) admitBorrowed(t *borrow.Terms, left int64, limits algo.Limits, c *limit.Check, s *subject, d *limit.Decision) {
	*d = limit.Decision{}
	if d.Policy = "inline"; s.inline == nil {
		d.Policy = s.entry.Name
	}
	t.Admit(d, c.Cost, left)
	l.refusals.Admitted(s.hash) // who was refused more has to wait for longer
	stats := l.statsOf(s.entry, s)
	stats.borrowed.Add(1)
	if weight := l.sample.weight(stats.mine().count(d)); weight > 0 {
		l.sample.sampled(weight, s.scope(c.Policy), c.Key, d, tightestOf(limits, d))
	}
}

// fromLoans says whether a check may be answered from a loan that covers it: all that it asks for is granted, so that one with Partial is, too.
// The answer to one with a request id is kept by who decides for the key.
func fromLoans(c *limit.Check) bool { return c.Cost > 0 && !c.Always && c.RequestID == "" }

// tightestOf is the limit that a Decision speaks of.
func tightestOf(limits algo.Limits, d *limit.Decision) *algo.Limit {
	for i := range d.Limits {
		if s := &d.Limits[i]; i < len(limits) && s.Limit == d.Limit && s.Window == d.Window && s.Remaining == d.Remaining {
			return &limits[i]
		}
	}
	return &limits[0]
}

// missed is told of a check, or a part of an atomic one, that another node has admitted.
func (b *borrowing) missed(op *Op) {
	d := &op.Outcome.Decision
	if b == nil || !fromLoans(&op.Check) || !op.lendable() || !borrow.Lendable(d) {
		return
	}
	b.book.Missed(loanKeyOf(&op.Check, &op.subject), op.Cost, b.clock, loanKey.own)
}

// report sends reports of that instant to who decides for their keys, those for one node together. What cannot be sent is said again.
func (b *borrowing) report(ctx context.Context, sent int64, reports []borrow.Report[loanKey, toldNode]) {
	if len(reports) == 0 {
		return
	}
	l := b.l
	t, now := l.table.Load(), l.moment()
	var here []report
	by := make(map[ownership.Node][]report)
	for i := range reports {
		r := &reports[i]
		op := &Op{Kind: OpBorrow, Check: limit.Check{Target: r.Key.target()}, Hops: 1, Loan: &LoanCall{Report: limit.Borrow{
			ID: algo.LoanID{Borrower: l.cfg.Self.Boot, Number: r.Number}, Totals: r.Totals, Known: r.Known, Want: r.Want, Counted: true,
		}}}
		if op.Outcome.Err = l.prepare(op); op.Outcome.Err != nil {
			here = append(here, report{op: op})
			continue
		}
		to := toldNode{route: *l.cfg.Ownership.Route(op.partition)}
		if to.node = to.route.Node; to.route == r.Node.route {
			to.node = r.Node.node
		}
		switch {
		case to.route.Standing == ownership.Owned:
			// It has come here, and with it what this node has lent to itself then.
			op.Loan.Report.Want = 0
			l.decide(t, op, &now)
			here = append(here, report{op, to})
		case to.node.Name == "" || to.node == l.cfg.Self:
			op.Outcome.NotHolder = &ownership.Route{} // nobody decides at the moment
			here = append(here, report{op, to})
		default:
			by[to.node] = append(by[to.node], report{op, to})
		}
	}
	b.answered(sent, here)
	for node, reports := range by {
		b.mu.Lock()
		under := b.exchanges[node]
		if under < maxExchanges {
			b.exchanges[node]++
		}
		b.mu.Unlock()
		if under >= maxExchanges {
			for _, r := range reports {
				r.op.Outcome.NotHolder = &ownership.Route{}
			}
			b.answered(sent, reports)
			continue
		}
		ops := make([]*Op, len(reports))
		for i := range reports {
			ops[i] = reports[i].op
		}
		b.running.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, exchangeMost)
			defer cancel()
			recovered.Tell(l.cfg.Panicked, func() {
				defer b.exchanged(node)
				l.cfg.Peers.Forward(ctx, node, ops)
			})
			recovered.Tell(l.cfg.Panicked, func() { b.answered(sent, reports) })
		})
	}
}

// exchanged notes that an exchange with a node is over.
func (b *borrowing) exchanged(node ownership.Node) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.exchanges[node]--; b.exchanges[node] == 0 {
		delete(b.exchanges, node)
	}
}

// answered takes in what has come of reports that were sent at that instant.
func (b *borrowing) answered(sent int64, reports []report) {
	answers := make([]borrow.Answer[toldNode], 0, len(reports))
	for _, r := range reports {
		var lent limit.Lent
		var holder toldNode
		switch out := &r.op.Outcome; {
		case out.Unreachable:
			lent.Unheard = true
		case out.NotHolder != nil:
			lent.Unheard = true
			if h := out.NotHolder; h.Node.Name != "" && !h.Term.Less(r.to.route.Term) {
				holder = toldNode{r.to.route, h.Node}
			}
		case out.Err != nil:
			lent.Ended, lent.Again = true, neverAgain // limits sent along are turned off, or the like
		default:
			lent = r.op.Loan.Lent
		}
		a := borrow.AnswerOf(r.op.Loan.Report.ID.Number, r.to, &lent)
		a.Holder = holder
		answers = append(answers, a)
	}
	if len(answers) > 0 {
		b.book.Answered(sent, b.clock(), answers)
	}
}

// answerRecall gives up what is left of a loan of this node's, and says how that stands then.
func (l *Limiter) answerRecall(op *Op) {
	b := l.borrowing
	if b == nil || op.Loan == nil {
		return
	}
	r, ok := b.book.Recalled(op.Loan.Recall.Number, op.Loan.Recall.Granted, b.clock())
	op.Loan.Known = ok
	op.Loan.Report = limit.Borrow{ID: algo.LoanID{Borrower: l.cfg.Self.Boot, Number: op.Loan.Recall.Number}, Totals: r.Totals, Known: r.Known}
}

// carryLoan takes in what a node reports of a loan, and lends.
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
		op.Outcome.NotHolder = l.cfg.Ownership.Route(op.partition) // its borrower asks again
		return
	}
	op.Loan.Lent, op.Loan.copied, op.Outcome.ticket = a, copied, copied.ticket
	op.Loan.copied.answer = &op.Loan.Lent
}

// askNode asks a node for what it has left of loans of a key, and takes in what it says.
func (l *Limiter) askNode(node ownership.Node, of *Op, loans []algo.Loan) {
	ops := make([]*Op, len(loans))
	for i := range loans {
		ops[i] = &Op{Kind: OpRecall, Hops: 1, Loan: &LoanCall{Recall: limit.Recall{Number: loans[i].ID.Number, Granted: loans[i].Granted}}}
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
		report.Target, report.ID, report.Want, report.Counted = of.Target, loans[i].ID, 0, true
		l.lend(&of.subject, &report, &now)
	}
}
