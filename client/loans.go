package client

import (
	"context"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/fifo"
	"github.com/weirlimit/weir/internal/lend"
	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
)

// This file borrows units of often used keys, so that the client allows checks without a node. internal/lend has the
// rules: its Book keeps the loans. The path of a loan:
//
//	missed     counts a check that a node has allowed; the book begins a loan of a key with many such checks
//	report     sends the book's reports, on the stream of the node that holds the key
//	onAnswer   passes a node's answers and recalls to the book
//	lent       allows a check from a loan; allOf allows several together; awaitLoan waits for units that a node is
//	           about to lend
//	returnAll  returns all loans when the client is closed
//
// Words:
//
//	borrower  this Client, with the id of loans; the lender is the node that holds the key
//	report    what the borrower tells the lender of a loan: totals, and how many units it wants
//	barred    of a node: it lends nothing to this caller, and gets no reports for barredFor
//
// Other files must keep: a stream that ends calls lost, so that the book repeats the reports that were sent on it.

const (
	// barredFor is how long a node that lends nothing to this caller gets no reports.
	barredFor = time.Minute
	// returnTimeout bounds how long Close waits for loans to be returned.
	returnTimeout = 100 * time.Millisecond
)

// loanKey identifies a key whose units can be on loan.
type loanKey struct {
	of, key string      // the policy's name, or the namespace of an inline limit
	limit   *algo.Limit // of an inline limit; two pointers to equal limits make two loanKeys
}

func keyOf(t *limit.Target) loanKey {
	if t.Limit != nil {
		return loanKey{t.Namespace, t.Key, t.Limit}
	}
	return loanKey{of: t.Policy, key: t.Key}
}

func (k *loanKey) target() limit.Target {
	if k.limit != nil {
		return limit.Target{Namespace: k.of, Limit: k.limit, Key: k.key}
	}
	return limit.Target{Policy: k.of, Key: k.key}
}

// loans holds the units that this Client has borrowed. Its methods are safe for concurrent use; those of a nil *loans
// do nothing.
type loans struct {
	book  *lend.Book[loanKey, *member]
	nodes *nodes
	id    uint64
	kick  fifo.Signal // set when there may be something to report
	clock func() int64
}

// newLoans returns loans whose clock reads the monotonic clock and the wall clock by read, at one instant.
func newLoans(ns *nodes, read func() (mono, wall int64)) *loans {
	l := &loans{nodes: ns, id: rand.Uint64() | 1, kick: fifo.NewSignal()}
	clock := lend.NewClock(read())
	l.clock = func() int64 { return clock.Read(read()) }
	l.book = lend.NewBook[loanKey, *member](l.kick.Set, nil)
	return l
}

// systemClocks returns the read function of newLoans.
func systemClocks() func() (mono, wall int64) {
	began := time.Now()
	return func() (int64, int64) {
		now := time.Now()
		return int64(now.Sub(began)), now.UnixNano()
	}
}

// nameOf returns the Policy of a Decision about a target.
func nameOf(t *limit.Target) string {
	if t.Limit != nil {
		return "inline"
	}
	return t.Policy
}

// allOf allows checks together if loans have the units for all of them, and reports whether it did.
func (l *loans) allOf(cs []limit.Check, all *AllDecision) bool {
	if l == nil || l.book.Loans() == 0 {
		return false
	}
	parts := make([]lend.Part[loanKey, *member], len(cs))
	for i := range cs {
		if !l.book.Has(keyOf(&cs[i].Target)) {
			return false
		}
		parts[i] = lend.Part[loanKey, *member]{Key: keyOf(&cs[i].Target), Units: cs[i].Cost}
	}
	if !l.book.TakeAll(parts, l.clock) {
		return false
	}
	all.Allowed, all.Decisions = true, make([]Decision, len(cs))
	for i := range parts {
		all.Decisions[i].Policy = cs[i].Policy
		lend.Admit(&all.Decisions[i], parts[i].Terms, parts[i].Units, parts[i].Left)
	}
	return true
}

// lent allows a check of n units of key from a loan, and reports whether it did. It ignores t's Key.
func (c *Client) lent(t *limit.Target, key string, n int64, d *Decision) bool {
	l := c.loans
	if l == nil || n <= 0 || l.book.Loans() == 0 {
		return false
	}
	k := keyOf(t)
	k.key = key
	terms, left, ok := l.book.Take(k, n, l.clock)
	if !ok {
		return false
	}
	d.Policy = nameOf(t)
	lend.Admit(d, terms, n, left)
	if m := c.memory; m != nil && m.refusals.Used() {
		m.admitted(&limit.Target{Policy: t.Policy, Namespace: t.Namespace, Key: key})
	}
	return true
}

// awaitLoan waits, for lend.Patience at most, for units that a node is about to lend, and allows a check from them. It
// reports whether it did. All callers that wait share one report to the node.
func (c *Client) awaitLoan(ctx context.Context, ck *limit.Check, d *Decision) bool {
	b := c.loans
	if b == nil || ck.Cost <= 0 || b.book.Loans() == 0 {
		return false
	}
	var patience *time.Timer
	for over := false; !over; {
		coming := b.book.Pending(keyOf(&ck.Target), ck.Cost, b.clock())
		if coming == nil {
			return false
		}
		if patience == nil {
			patience = time.NewTimer(lend.Patience)
			defer patience.Stop()
		}
		select {
		case <-coming:
		case <-patience.C:
			over = true
		case <-ctx.Done():
			return false
		}
		if c.lent(&ck.Target, ck.Key, ck.Cost, d) {
			return true
		}
	}
	return false
}

// missed tells the book that a node was asked about n units of a key. answered means that d is a decision.
func (l *loans) missed(k loanKey, n int64, d *Decision, answered bool) {
	if l != nil && n > 0 && answered && lend.Lendable(d) {
		l.book.Missed(k, n, l.clock, ownKey)
	}
}

// ownKey returns a copy of k for the book. The string of k may be a part of a larger one, which the book would keep in
// memory.
func ownKey(k loanKey) loanKey {
	k.key = strings.Clone(k.key)
	return k
}

// run sends the book's reports until ctx ends.
func (l *loans) run(ctx context.Context) { l.book.Run(ctx, l.kick, l.clock, l.report) }

// report sends the book's reports, made at the instant sent, to the nodes that hold their keys. It tells the book which
// reports were not sent, and the book repeats them.
func (l *loans) report(sent int64, reports []lend.Report[loanKey, *member]) {
	by := make(map[*member][]*weirv1.LoanReport)
	for i := range reports {
		r := &reports[i]
		t := r.Key.target()
		m := r.Node
		if !l.reportable(m) {
			m = l.holder(&t, r.Totals.Granted > 0)
		}
		by[m] = append(by[m], wire.ProtoBorrow(&limit.Borrow{
			Target: t, ID: algo.LoanID{Borrower: l.id, Number: r.Number}, Totals: r.Totals, Known: r.Known,
			Want: r.Want,
		}))
	}
	var unsent []lend.Answer[*member]
	for m, all := range by {
		for some := range slices.Chunk(all, limit.MaxBatch) {
			if m != nil && m.report(&weirv1.BorrowRequest{Borrower: l.id, Sent: sent, Loans: some}) {
				continue
			}
			for _, r := range some {
				unsent = append(unsent, lend.Answer[*member]{Number: r.Number, Lent: limit.Lent{Unheard: true}})
			}
		}
	}
	l.book.Answered(sent, sent, unsent)
}

// reportable reports whether a node can be sent reports now.
func (l *loans) reportable(m *member) bool {
	return m != nil && m.state.Load() == ready && l.clock() >= m.barred.Load()
}

// holder returns the node to report a key's loan to, if the book's node cannot be sent reports: the key's owner, or the
// only node if the ring is not known. If a loan has units already, it may be any node, because a node passes the report
// on. Nil: there is none.
func (l *loans) holder(t *limit.Target, granted bool) *member {
	list, _, _ := l.nodes.members()
	owners := l.nodes.owners.Load()
	if m := owners.owner(t); l.reportable(m) {
		return m
	}
	for _, m := range list {
		if l.reportable(m) && (granted || owners == nil && len(list) == 1) {
			return m
		}
	}
	return nil
}

// returnAll returns all loans to their owners. It gives up after returnTimeout.
func (l *loans) returnAll() {
	if l == nil || l.book.Loans() == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), returnTimeout)
	defer cancel()
	l.book.Return(ctx)
}

// lost notes that the stream to a node has ended. The book repeats the reports that were sent on it.
func (l *loans) lost(m *member) {
	if l != nil {
		l.book.Lost(m, l.clock())
	}
}

// rejected notes that a node did not take in a report, and bars the node if it lends nothing to this caller.
func (l *loans) rejected(m *member, e *weirv1.Error) {
	if l == nil {
		return
	}
	switch codes.Code(e.GetCode()) {
	case codes.Unimplemented, codes.PermissionDenied, codes.Unauthenticated:
		m.barred.Store(l.clock() + int64(barredFor))
	}
	l.lost(m)
}

// onAnswer takes in a node's answers to reports, and its recalls.
func (l *loans) onAnswer(m *member, out *weirv1.BorrowResponse) {
	if l == nil {
		return
	}
	now := l.clock()
	for _, r := range out.GetRecalls() {
		l.book.Recalled(r.GetNumber(), r.GetGranted(), now)
	}
	if len(out.GetLoans()) == 0 || out.GetSent() > now {
		return
	}
	answers := make([]lend.Answer[*member], len(out.GetLoans()))
	for i, a := range out.GetLoans() {
		lent := wire.Lent(a)
		answers[i] = lend.Answer[*member]{Number: a.GetNumber(), Lent: lent, From: m}
		if holder := l.nodes.owners.Load().byName(lent.Holder); lent.Unheard {
			answers[i].To = holder
		} else if lent.Holder != "" {
			answers[i].From = holder // the holder took the report in; nil: the next report goes to the owner
		}
	}
	l.book.Answered(out.GetSent(), now, answers)
}
