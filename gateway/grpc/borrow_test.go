package grpc

import (
	"context"
	"fmt"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// borrower opens a stream to a node that lends from the policy p: 100 an hour.
func borrowing(t *testing.T) (loanStream, *limiter.Limiter) {
	t.Helper()
	noLeaks(t)
	set, err := policy.Parse("p.yaml", []byte("policies: [{name: p, algorithm: sliding_log, limit: 100, window: 1h}]"))
	must.NoError(t, err)
	l := limiter.New(limiter.Config{Policies: set})
	t.Cleanup(l.Close)
	return openLoans(t, connect(t, ServerConfig{Service: l, Lender: l})), l
}

// loanStream is a CheckStream for loans alone.
type loanStream struct {
	weirv1.Limiter_CheckStreamClient
}

func openLoans(t *testing.T, conn grpc.ClientConnInterface) loanStream {
	t.Helper()
	stream := must.Value(weirv1.NewLimiterClient(conn).CheckStream(t.Context()))(t)
	return loanStream{stream}
}

func (s loanStream) Send(in *weirv1.BorrowRequest) error {
	return s.Limiter_CheckStreamClient.Send(&weirv1.CheckStreamRequest{Sequence: 7, Borrow: in})
}

// Recv returns the next response about loans, or the error of a report as a status.
func (s loanStream) Recv() (*weirv1.BorrowResponse, error) {
	out, err := s.Limiter_CheckStreamClient.Recv()
	switch {
	case err != nil:
		return nil, err
	case out.Error != nil:
		return nil, status.Error(codes.Code(out.Error.Code), out.Error.Field+": "+out.Error.Message)
	case len(out.Borrow.Loans) > 0 && out.Sequence != 7:
		return nil, fmt.Errorf("sequence %d", out.Sequence)
	}
	return out.Borrow, nil
}

func report(want int64) *weirv1.LoanReport {
	return &weirv1.LoanReport{Number: 3, Target: &weirv1.Target{Policy: "p", Key: "k"}, Want: want}
}

func TestBorrow(t *testing.T) {
	stream, l := borrowing(t)
	ask := func(in *weirv1.BorrowRequest) *weirv1.BorrowResponse {
		t.Helper()
		must.NoError(t, stream.Send(in))
		return must.Value(stream.Recv())(t)
	}
	out := ask(&weirv1.BorrowRequest{Borrower: 9, Sent: -7, Loans: []*weirv1.LoanReport{report(16)}})
	a := out.Loans[0]
	must.True(t, out.Sent == -7 && a.Number == 3 && a.Granted == 16 && a.TermNs == int64(time.Second) &&
		a.Limit == 100 && a.Remaining == 84 && a.WindowNs == int64(time.Hour), "%v", out)
	// What is wanted by others is asked for.
	decided := make(chan limit.Decision, 1)
	go func() {
		got, err := l.Check(context.Background(),
			[]limit.Check{{Target: limit.Target{Policy: "p", Key: "k"}, Cost: 95}})
		expect.NoError(t, err)
		decided <- got[0].Decision
	}()
	out, err := stream.Recv()
	must.True(t, err == nil && len(out.Recalls) == 1 && out.Recalls[0].Number == 3 && out.Recalls[0].Granted == 16,
		"%v, %v", out, err)
	back := report(0)
	back.Granted, back.Spent, back.Returned = 16, 5, 11
	out = ask(&weirv1.BorrowRequest{Borrower: 9, Loans: []*weirv1.LoanReport{back}})
	must.True(t, out.Loans[0].Ended, "%v", out)
	d := <-decided
	expect.True(t, d.Allowed, "%+v", d)
	must.NoError(t, stream.CloseSend())
	_, err = stream.Recv()
	expect.True(t, err != nil && l.Loans().Streams == 0, "%v; %+v", err, l.Loans())
}

// TestNegativeWant: who wants fewer than no units wants none, which renews no loan.
func TestNegativeWant(t *testing.T) {
	stream, _ := borrowing(t)
	for _, c := range []struct {
		want    int64
		renewed bool
	}{{16, true}, {-1, false}, {-1 << 63, false}} {
		in := report(c.want)
		if !c.renewed {
			in.Granted = 16
		}
		must.NoError(t, stream.Send(&weirv1.BorrowRequest{Borrower: 9, Loans: []*weirv1.LoanReport{in}}))
		out := must.Value(stream.Recv())(t)
		a := out.Loans[0]
		expect.True(t, a.Granted == 16 && (a.TermNs > 0) == c.renewed, "%d wanted: %v", c.want, a)
	}
}

func TestBadBorrower(t *testing.T) {
	many := &weirv1.BorrowRequest{Borrower: 1}
	for range limit.MaxBatch + 1 {
		many.Loans = append(many.Loans, &weirv1.LoanReport{})
	}
	for name, c := range map[string]struct {
		in   []*weirv1.BorrowRequest
		code codes.Code
	}{
		"nobody":  {[]*weirv1.BorrowRequest{{Loans: []*weirv1.LoanReport{report(16)}}}, codes.InvalidArgument},
		"another": {[]*weirv1.BorrowRequest{{Borrower: 1}, {Borrower: 2}}, codes.InvalidArgument},
		"no target": {[]*weirv1.BorrowRequest{{Borrower: 1, Loans: []*weirv1.LoanReport{{},
			{Target: &weirv1.Target{Limit: &weirv1.Limit{Algorithm: 99}}}}}}, codes.InvalidArgument},
		"too many": {[]*weirv1.BorrowRequest{many}, codes.ResourceExhausted},
	} {
		t.Run(name, func(t *testing.T) {
			stream, l := borrowing(t)
			for _, in := range c.in {
				_ = stream.Send(in)
			}
			var err error
			for err == nil {
				_, err = stream.Recv()
			}
			expect.Equal(t, status.Code(err), c.code, "%v", err)
			s := l.Loans()
			expect.Equal(t, s.Granted, 0, "%+v", s)
		})
	}
}

// idsOf is a Lender that notes who borrows.
type idsOf struct {
	lenderFunc
	opened chan uint64
}

func (l idsOf) OpenBorrower(id uint64, _ func(limit.Recall)) func() {
	l.opened <- id
	return func() {}
}

// TestBorrowersAreTheirCallersOwn is an attack: a caller borrows under the id of another caller, or of a node. Whatever
// it says, the Lender knows it by an id that no other caller has, at every node, and no node.
func TestBorrowersAreTheirCallersOwn(t *testing.T) {
	const drawn = 0x1234567890abcdef
	seen := make(map[uint64]string)
	for _, caller := range []string{"shop", "thief", "shop", ""} {
		lender := idsOf{opened: make(chan uint64, 1)}
		lender.lenderFunc = func(in []limit.Borrow, _ []limit.Lent) {
			if len(in) > 0 {
				lender.opened <- in[0].ID.Borrower
			}
		}
		stream := openLoans(t, connect(t,
			ServerConfig{Service: &distant{}, Lender: lender, Caller: func(context.Context) string { return caller }}))
		must.NoError(t, stream.Send(&weirv1.BorrowRequest{Borrower: drawn, Loans: []*weirv1.LoanReport{report(16)}}))
		opened, reported := <-lender.opened, <-lender.opened
		expect.True(t, opened == reported && opened != drawn, "%q opens %x and reports as %x", caller, opened, reported)
		other, ok := seen[opened]
		expect.True(t, !ok || other == caller, "%q borrows as %q", caller, other)
		seen[opened] = caller
	}
	expect.Equal(t, len(seen), 3, "ids of 3 callers")
}

// slowLender lends nothing, and has some answers wait.
type slowLender struct {
	took   chan limit.Borrow
	answer chan struct{}
}

func (l *slowLender) Lend(ctx context.Context, in []limit.Borrow, out []limit.Lent) (func(), error) {
	for i := range in {
		out[i] = limit.Lent{Spent: in[i].Totals.Spent}
		l.took <- in[i]
	}
	if in[0].Want == 0 {
		return nil, nil
	}
	return func() {
		select {
		case <-l.answer:
		case <-ctx.Done():
		}
	}, nil
}

func (*slowLender) OpenBorrower(uint64, func(limit.Recall)) func() { return func() {} }

// TestReturnsDoNotWait: what is returned is taken in, and answered, while answers before it wait for copies.
func TestReturnsDoNotWait(t *testing.T) {
	noLeaks(t)
	lender := &slowLender{took: make(chan limit.Borrow, 100), answer: make(chan struct{})}
	stream := openLoans(t, connect(t,
		ServerConfig{Service: &distant{}, Requests: admission.NewGate(1 << 20), Lender: lender}))
	send := func(sent, want int64) {
		t.Helper()
		r := report(want)
		r.Granted, r.Spent = 100, sent
		must.NoError(t, stream.Send(&weirv1.BorrowRequest{Borrower: 1, Sent: sent, Loans: []*weirv1.LoanReport{r}}))
		b := <-lender.took
		must.Equal(t, b.Totals.Spent, sent, "%+v", b)
	}
	receive := func() (sent int64) {
		t.Helper()
		out, err := stream.Recv()
		must.True(t, err == nil && out.Loans[0].Spent == out.Sent && out.Loans[0].Number == 3, "%v, %v", out, err)
		return out.Sent
	}
	send(1, 16)
	send(2, 16)
	send(3, 0)
	must.Equal(t, receive(), 3, "the answer that does not wait")
	close(lender.answer)
	expect.Equal(t, receive()+receive(), 1+2, "the answers to the others, in any order")
}
