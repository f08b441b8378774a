package client

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/borrow"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// lendingNode lends as much of every key as it is told to, and keeps what borrowers report.
type lendingNode struct {
	weirv1.LimiterServer
	granted int64
	recalls chan *weirv1.LoanRecall

	mu      sync.Mutex
	reports []*weirv1.LoanReport
}

// Check is only for Client.Ready: checks come by a stream.
func (n *lendingNode) Check(context.Context, *weirv1.CheckRequest) (*weirv1.CheckResponse, error) {
	return nil, status.Error(codes.InvalidArgument, "checks: is empty")
}

func (n *lendingNode) Borrow(stream weirv1.Limiter_BorrowServer) error {
	requests := make(chan *weirv1.BorrowRequest)
	go func() {
		defer close(requests)
		for {
			in, err := stream.Recv()
			if err != nil {
				return
			}
			select {
			case requests <- in:
			case <-stream.Context().Done():
				return
			}
		}
	}()
	for {
		out := &weirv1.BorrowResponse{}
		select {
		case in, ok := <-requests:
			if !ok {
				return nil
			}
			n.mu.Lock()
			n.reports = append(n.reports, in.Loans...)
			n.mu.Unlock()
			out.Sent = in.Sent
			for _, r := range in.Loans {
				out.Loans = append(out.Loans, &weirv1.LoanAnswer{
					Number: r.Number, Granted: max(r.Granted, n.granted), Spent: r.Spent, TermNs: int64(algo.LoanTerm), Limit: 1 << 30,
				})
			}
		case r := <-n.recalls:
			out.Recalls = append(out.Recalls, r)
		}
		if err := stream.Send(out); err != nil {
			return err
		}
	}
}

// reported returns whether a report is as f says.
func (n *lendingNode) reported(f func(*weirv1.LoanReport) bool) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.ContainsFunc(n.reports, f)
}

// lent dials a node that lends, and returns how to ask for its key, and the number of the loan, of which the client has spent some.
func lent(t *testing.T, n *lendingNode) (ask func(), number uint64) {
	t.Helper()
	fake := newNode(nil)
	n.LimiterServer = fake.LimiterServer
	n.recalls = make(chan *weirv1.LoanRecall)
	fake.LimiterServer = n
	addr, _ := serve(t, fake)
	c := dial(t, addr, WithTimeout(time.Minute))
	if err := c.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	l := c.Inline("n", algo.Limit{Algorithm: algo.TokenBucket, Limit: 1 << 30, Window: time.Hour})
	ask = func() {
		if d, err := l.Allow(t.Context(), "k"); err != nil || !d.Allowed || d.FailedOpen {
			t.Fatal(d, err)
		}
	}
	wait(t, "a loan of which some is spent", func() bool {
		ask()
		return n.reported(func(r *weirv1.LoanReport) bool { number = r.Number; return r.Spent > 0 })
	})
	return ask, number
}

// TestRecall: a client whose loan is recalled returns what it has left at once, although its key is asked about all the time, and what
// the recall says was granted besides.
func TestRecall(t *testing.T) {
	const granted, besides = 1 << 20, 1000
	n := &lendingNode{granted: granted}
	ask, number := lent(t, n)
	n.recalls <- &weirv1.LoanRecall{Number: number, Granted: granted + besides}
	wait(t, "all of it to be returned", func() bool {
		ask()
		return n.reported(func(r *weirv1.LoanReport) bool {
			return r.Number == number && r.Returned > 0 && r.Returned+r.Spent == granted+besides
		})
	})
}

// TestKnown: a report says what the answers have confirmed, so that who holds the key next knows what was counted.
func TestKnown(t *testing.T) {
	n := &lendingNode{granted: 1 << 20}
	ask, number := lent(t, n)
	wait(t, "a report of what is known", func() bool {
		ask()
		return n.reported(func(r *weirv1.LoanReport) bool { return r.Number == number && r.Known > 0 && r.Known <= r.Spent })
	})
}

// TestLoanOverASuspension: nothing is spent of a loan whose term passed while the machine was suspended: Go's monotonic clock does not
// tell, the wall clock does.
func TestLoanOverASuspension(t *testing.T) {
	mono, wall := int64(time.Hour), int64(time.Hour)
	l := newLoans(nil, func() (int64, int64) { return mono, wall })
	key := loanKey{policy: "p", key: "k"}
	lendable := Decision{Allowed: true, Limit: 1000}
	for l.book.Loans() == 0 {
		l.missed(key, 1, &lendable)
	}
	reports, _ := l.book.Report(l.clock())
	l.book.Answered(l.clock(), l.clock(), []borrow.Answer[*member]{{Number: reports[0].Number, Granted: 100, Term: algo.LoanTerm}})
	if _, _, ok := l.book.Take(key, 1, l.clock); !ok {
		t.Fatal("nothing is lent")
	}
	wall += int64(2 * algo.LoanTerm)
	if _, _, ok := l.book.Take(key, 1, l.clock); ok {
		t.Error("a unit was spent after its term, which passed while the machine was suspended")
	}
}
