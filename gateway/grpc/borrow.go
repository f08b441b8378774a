package grpcapi

import (
	"errors"
	"io"
	"strconv"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
)

// maxRecalls bounds the recalls that wait to be sent to a borrower: with more it is as one that does not answer.
const maxRecalls = 1024

// Borrow implements weirv1.LimiterServer.
func (s *Server) Borrow(stream weirv1.Limiter_BorrowServer) error {
	if s.cfg.Lender == nil {
		return status.Error(codes.Unimplemented, "this node lends nothing")
	}
	b := &borrowStream{server: s, stream: stream, recalls: make(chan limit.Recall, maxRecalls)}
	over := make(chan struct{})
	var telling sync.WaitGroup
	telling.Go(func() { b.tell(over) })
	defer telling.Wait()
	defer close(over)
	var end func()
	defer func() {
		if end != nil {
			end()
		}
	}()
	a := admission{gate: s.cfg.Requests}
	defer a.leave()
	for {
		a.leave() // what the request before took
		in, err := b.receive(&a)
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if end == nil {
			if in.Borrower == 0 {
				return status.Error(codes.InvalidArgument, "borrower: is missing: a random number that is not 0")
			}
			b.id = in.Borrower
			end = s.cfg.Lender.OpenBorrower(b.id, b.recall)
		} else if in.Borrower != b.id {
			return status.Error(codes.InvalidArgument, "borrower: must be the same in all requests of a stream")
		}
		out, err := b.lend(in)
		if err == nil {
			err = b.send(out)
		}
		if err != nil {
			return err
		}
	}
}

// borrowStream is one Borrow.
type borrowStream struct {
	server  *Server
	stream  weirv1.Limiter_BorrowServer
	id      uint64
	recalls chan limit.Recall

	sending sync.Mutex
}

// recall asks for what is left of a loan. One that finds no room is as one that is not answered.
func (b *borrowStream) recall(r limit.Recall) {
	select {
	case b.recalls <- r:
	default:
	}
}

// tell sends recalls until the stream is over, those that are there together.
func (b *borrowStream) tell(over <-chan struct{}) {
	for {
		out := &weirv1.BorrowResponse{}
		select {
		case r := <-b.recalls:
			out.Recalls = append(out.Recalls, protoRecall(r))
		case <-over:
			return
		}
		for more := true; more && len(out.Recalls) < maxRecalls; {
			select {
			case r := <-b.recalls:
				out.Recalls = append(out.Recalls, protoRecall(r))
			default:
				more = false
			}
		}
		if b.send(out) != nil {
			return // who reads learns of a broken stream, too
		}
	}
}

func protoRecall(r limit.Recall) *weirv1.LoanRecall {
	return &weirv1.LoanRecall{Number: r.Number, Granted: r.Granted}
}

func (b *borrowStream) send(out *weirv1.BorrowResponse) error {
	b.sending.Lock()
	defer b.sending.Unlock()
	return b.stream.Send(out)
}

// receive reads a request, once there is room for it.
func (b *borrowStream) receive(a *admission) (*weirv1.BorrowRequest, error) {
	in := new(weirv1.BorrowRequest)
	m := &wire.Lenient{
		Message: in, Check: boundLoans,
		Admit: func(size int) error { return a.enter(b.stream.Context(), size, leastLoan) },
	}
	if err := b.stream.RecvMsg(m); err != nil {
		return nil, err
	}
	a.keep(len(in.Loans))
	return in, undecoded(m)
}

// boundLoans bounds the number of loans of a request before it is decoded.
func boundLoans(data []byte) error {
	if loans := elements(data, 3); loans > limit.MaxBatch {
		return &limit.Error{Kind: limit.TooLarge, Field: "loans", Message: "are " + strconv.Itoa(loans) + ", at most " + strconv.Itoa(limit.MaxBatch) + " fit one request"}
	}
	return nil
}

// lend takes in a request.
func (b *borrowStream) lend(in *weirv1.BorrowRequest) (*weirv1.BorrowResponse, error) {
	reports := make([]limit.Borrow, len(in.Loans))
	for i, r := range in.Loans {
		t, bad := wire.Target(r.GetTarget())
		if bad != nil {
			bad.Field = "loans[" + strconv.Itoa(i) + "]." + bad.Field
			return nil, statusOf(bad)
		}
		reports[i] = limit.Borrow{
			Target: t, ID: algo.LoanID{Borrower: b.id, Number: r.GetNumber()},
			Totals: algo.Totals{Granted: r.GetGranted(), Spent: r.GetSpent(), Returned: r.GetReturned()},
			Known:  r.GetKnown(), Want: max(r.GetWant(), 0),
		}
	}
	answers := make([]limit.Lent, len(reports))
	if err := b.server.cfg.Lender.Lend(b.stream.Context(), reports, answers); err != nil {
		return nil, statusOf(err)
	}
	out := &weirv1.BorrowResponse{Sent: in.Sent, Loans: make([]*weirv1.LoanAnswer, len(answers))}
	for i := range answers {
		a := &answers[i]
		out.Loans[i] = &weirv1.LoanAnswer{
			Number: reports[i].ID.Number, Granted: a.Granted, Spent: a.Spent, Ended: a.Ended, TermNs: int64(a.Term), AgainNs: int64(a.Again),
			Limit: a.Limit, WindowNs: int64(a.Window), Remaining: a.Remaining, ResetAfterNs: int64(a.ResetAfter), Unheard: a.Unheard,
			WarnAt: a.WarnAt,
		}
	}
	return out, nil
}
