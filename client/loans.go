package client

import (
	"context"
	"math/rand/v2"
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

const (
	// barredFor is how long a node that lends nothing is left alone.
	barredFor = time.Minute
	// overloadedFor is the same for a node that has no room for the stream.
	overloadedFor = 5 * time.Second
	// returnTimeout bounds how long Close waits for loans to be returned.
	returnTimeout = 100 * time.Millisecond
)

// loanKey names a key of which units can be on loan.
type loanKey struct {
	policy, key string
	inline      *target // of the handle to a limit sent along, in place of policy
}

// loans are the units that this Client has borrowed. Its methods are safe for concurrent use; those of nil do nothing.
type loans struct {
	book  *lend.Book[loanKey, *member]
	nodes *nodes
	id    uint64
	kick  fifo.Signal // set when there may be something to report
	clock func() int64
}

// newLoans returns loans that are timed by what read returns: the monotonic clock and the wall clock, at one instant.
func newLoans(ns *nodes, read func() (mono, wall int64)) *loans {
	l := &loans{nodes: ns, id: rand.Uint64() | 1, kick: fifo.NewSignal()}
	clock := lend.NewClock(read())
	l.clock = func() int64 { return clock.Read(read()) }
	l.book = lend.NewBook[loanKey, *member](l.kick.Set, nil)
	return l
}

// systemClocks returns what newLoans reads.
func systemClocks() func() (mono, wall int64) {
	began := time.Now()
	return func() (int64, int64) {
		now := time.Now()
		return int64(now.Sub(began)), now.UnixNano()
	}
}

func (l *Limiter) loanKey(key string) loanKey {
	if l.target.Limit != nil {
		return loanKey{key: key, inline: &l.target}
	}
	return loanKey{policy: l.target.Policy, key: key}
}

// borrowed answers a question from a loan, and reports whether it did. A key with a loan is a valid one.
func (l *Limiter) borrowed(ctx context.Context, key string, n int64, d *Decision) bool {
	b := l.c.loans
	if b == nil || n <= 0 || b.book.Loans() == 0 || l.c.ended.Load() || ctx.Err() != nil {
		return false
	}
	t, left, ok := b.book.Take(l.loanKey(key), n, b.clock)
	if !ok {
		return false
	}
	d.Policy = l.target.Policy
	if l.target.Limit != nil {
		d.Policy = "inline"
	}
	t.Admit(d, n, left)
	l.c.memory.borrowed(&l.target, key)
	return true
}

// awaitLoan answers a question from what is about to be lent, and reports whether it did. Many who wait take one message, and where the
// owner has to wait for a copy, one wait.
func (l *Limiter) awaitLoan(ctx context.Context, key string, n int64, d *Decision) bool {
	b := l.c.loans
	if b == nil || n <= 0 || b.book.Loans() == 0 {
		return false
	}
	var patience *time.Timer
	for {
		coming := b.book.Pending(l.loanKey(key), n, b.clock())
		if coming == nil {
			return false
		}
		if patience == nil {
			patience = time.NewTimer(lend.Patience)
			defer patience.Stop()
		}
		over := false
		select {
		case <-coming:
		case <-patience.C:
			over = true
		case <-ctx.Done():
			return false
		}
		if l.borrowed(ctx, key, n, d) {
			return true
		}
		if over {
			return false
		}
	}
}

// admitted is told of what a node has admitted.
func (l *Limiter) admitted(key string, n int64, d *Decision) {
	if n > 0 {
		l.c.loans.missed(l.loanKey(key), n, d)
	}
}

// missed is told of what a node has admitted that might have been of a loan.
func (l *loans) missed(key loanKey, n int64, d *Decision) {
	if l != nil && lend.Lendable(d) {
		l.book.Missed(key, n, l.clock, ownKey)
	}
}

// ownKey is a key that is kept: its text may be a part of something larger.
func ownKey(k loanKey) loanKey {
	k.key = strings.Clone(k.key)
	return k
}

// run reports what is to be reported until ctx ends.
func (l *loans) run(ctx context.Context) { l.book.Run(ctx, l.kick, l.clock, l.report) }

// report sends reports of that instant to those who hold their keys. What cannot be sent is said again.
func (l *loans) report(sent int64, reports []lend.Report[loanKey, *member]) {
	if len(reports) == 0 {
		return
	}
	by := make(map[*member]*weirv1.BorrowRequest)
	var nobody []lend.Answer[*member]
	for i := range reports {
		r := &reports[i]
		t := target{Target: limit.Target{Policy: r.Key.policy, Key: r.Key.key}}
		if in := r.Key.inline; in != nil {
			t = *in
			t.Key = r.Key.key
		}
		m := r.Node
		if m == nil || l.barred(m) {
			m = l.owner(&t)
		}
		if m == nil && r.Totals.Granted > 0 {
			m = l.forwarder()
		}
		if m == nil {
			nobody = append(nobody, lend.Answer[*member]{Number: r.Number, Unheard: true})
			continue
		}
		if by[m] == nil {
			by[m] = &weirv1.BorrowRequest{Borrower: l.id, Sent: sent}
		}
		by[m].Loans = append(by[m].Loans, wire.ProtoBorrow(&limit.Borrow{
			Target: t.Target, ID: algo.LoanID{Borrower: l.id, Number: r.Number}, Totals: r.Totals, Known: r.Known, Want: r.Want,
		}))
	}
	if nobody != nil {
		l.book.Answered(sent, sent, nobody)
	}
	for m, in := range by {
		for len(in.Loans) > limit.MaxBatch {
			m.link.report(&weirv1.BorrowRequest{Borrower: in.Borrower, Sent: in.Sent, Loans: in.Loans[:limit.MaxBatch]})
			in = &weirv1.BorrowRequest{Borrower: in.Borrower, Sent: in.Sent, Loans: in.Loans[limit.MaxBatch:]}
		}
		m.link.report(in)
	}
}

// barred tells whether a node is left alone about loans for now.
func (l *loans) barred(m *member) bool { return l.clock() < m.barred.Load() }

// owner is the node to borrow from, as long as no other one is known to hold the key: its owner, or the only node that there is.
func (l *loans) owner(t *target) *member {
	var m *member
	if owners := l.nodes.owners.Load(); owners != nil {
		m = owners.of(t)
	} else if l.nodes.mu.Lock(); true {
		if len(l.nodes.list) == 1 {
			m = l.nodes.list[0]
		}
		l.nodes.mu.Unlock()
	}
	if m == nil || m.state.Load() != ready || l.barred(m) {
		return nil
	}
	return m
}

// forwarder is a node to tell what its holder should know when there is no way to that: it passes reports on.
func (l *loans) forwarder() *member {
	l.nodes.mu.Lock()
	defer l.nodes.mu.Unlock()
	for _, m := range l.nodes.list {
		if m.usable() && !l.barred(m) {
			return m
		}
	}
	return nil
}

// returnAll returns all loans, as far as that takes no longer than returnTimeout.
func (l *loans) returnAll() {
	if l == nil || l.book.Loans() == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), returnTimeout)
	defer cancel()
	l.book.Return(ctx)
}

// lost is told that the stream to a node has ended: what was reported on it is reported again. A node that had no room for the stream is
// left alone for a while.
func (l *loans) lost(m *member, overloaded bool) {
	if l == nil {
		return
	}
	now := l.clock()
	if overloaded {
		m.barred.Store(now + int64(overloadedFor))
	}
	l.book.Lost(m, now)
}

// rejected is told that a node has not taken in a report. One that lends nothing to this caller is left alone for a while.
func (l *loans) rejected(m *member, e *weirv1.Error) {
	if l == nil {
		return
	}
	now := l.clock()
	switch codes.Code(e.GetCode()) {
	case codes.Unimplemented, codes.PermissionDenied, codes.Unauthenticated:
		m.barred.Store(now + int64(barredFor))
	}
	l.book.Lost(m, now)
}

// answered takes in what a node says about loans.
func (l *loans) answered(m *member, out *weirv1.BorrowResponse) {
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
		answers[i] = lend.AnswerOf(a.GetNumber(), m, &lent)
		if holder := l.nodes.owners.Load().named(lent.Holder); lent.Unheard {
			answers[i].Holder = holder
		} else if lent.Holder != "" {
			answers[i].From = holder // which has taken it in; nil: the owner is told next
		}
	}
	l.book.Answered(out.GetSent(), now, answers)
}
