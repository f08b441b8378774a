package grpcapi

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"io"
	"strconv"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/internal/recovered"
	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
)

// maxRecalls bounds the recalls that wait to be sent to a borrower: with more it is as one that does not answer.
const maxRecalls = 1024

// maxUnconfirmed bounds the requests of a borrower whose answers wait for copies. What they report has been taken in; the next are read
// when there is room again.
const maxUnconfirmed = 64

// Borrow implements weirv1.LimiterServer.
func (s *Server) Borrow(stream weirv1.Limiter_BorrowServer) (ended error) {
	if s.cfg.Lender == nil {
		return status.Error(codes.Unimplemented, "this node lends nothing")
	}
	b := &borrowStream{server: s, stream: stream, recalls: make(chan limit.Recall, maxRecalls)}
	b.unconfirmed = make(chan unconfirmed, maxUnconfirmed)
	over := make(chan struct{})
	var telling sync.WaitGroup
	telling.Go(func() { recovered.Tell(b.panicked, func() { b.tell(over) }) })
	telling.Go(b.confirm)
	defer func() {
		telling.Wait()
		if crashed := b.crashed.Load(); crashed != nil {
			ended = crashed // however the stream has ended
		}
	}()
	defer close(b.unconfirmed)
	defer close(over)
	var end func()
	defer func() {
		if end != nil {
			end()
		}
	}()
	for {
		a := admission{gate: s.cfg.Requests}
		in, err := b.receive(&a)
		if err != nil {
			a.leave()
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if crashed := b.crashed.Load(); crashed != nil {
			a.leave()
			return crashed
		}
		if end == nil {
			if in.Borrower == 0 {
				a.leave()
				return status.Error(codes.InvalidArgument, "borrower: is missing: a random number that is not 0")
			}
			b.said, b.id = in.Borrower, s.borrowerOf(stream.Context(), in.Borrower)
			end = s.cfg.Lender.OpenBorrower(b.id, b.recall)
		} else if in.Borrower != b.said {
			a.leave()
			return status.Error(codes.InvalidArgument, "borrower: must be the same in all requests of a stream")
		}
		if err := b.lend(in, a); err != nil {
			return err
		}
	}
}

// borrowerOf is under which id the nodes know a caller's process that draws its own: each caller has ids of its own, the same at every node, and
// none has a node's. So no caller reports or borrows in the name of another one, or of a node.
func (s *Server) borrowerOf(ctx context.Context, drawn uint64) uint64 {
	id := binary.BigEndian.AppendUint64(nil, drawn)
	if s.cfg.Caller != nil {
		id = append(id, s.cfg.Caller(ctx)...)
	}
	sum := sha256.Sum256(id)
	return binary.BigEndian.Uint64(sum[:])
}

// unconfirmed is a request whose answers wait until copies know of what is lent.
type unconfirmed struct {
	in       *weirv1.BorrowRequest
	answers  []limit.Lent
	wait     func()
	admitted admission
}

// confirm answers requests that wait for copies, in their order: what reading them takes does not wait for that, which is what others
// may be waiting for who want what is returned.
func (b *borrowStream) confirm() {
	for u := range b.unconfirmed {
		recovered.Tell(b.panicked, func() {
			u.wait()
			_ = b.send(lent(u.in, u.answers)) // who reads learns of a broken stream, too
		})
		u.admitted.leave()
	}
}

// borrowStream is one Borrow.
type borrowStream struct {
	server  *Server
	stream  weirv1.Limiter_BorrowServer
	said    uint64 // the id that the borrower has drawn
	id      uint64 // see borrowerOf
	recalls chan limit.Recall
	// unconfirmed is closed when the stream is over.
	unconfirmed chan unconfirmed
	crashed     atomic.Pointer[recovered.Error] // the first panic beside the handler

	sending sync.Mutex
}

// recall asks for what is left of a loan. One that finds no room is as one that is not answered.
func (b *borrowStream) recall(r limit.Recall) {
	select {
	case b.recalls <- r:
	default:
	}
}

// panicked notes a panic beside the handler: the borrower reports again, which ends the stream.
func (b *borrowStream) panicked(p *recovered.Error) {
	if !b.crashed.CompareAndSwap(nil, p) {
		b.server.endedLate(weirv1.Limiter_Borrow_FullMethodName, p)
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
	m := &wire.Lenient{Message: in, Admit: func(size int) error { return a.enter(b.stream.Context(), size, leastLoan) }}
	if err := b.stream.RecvMsg(m); err != nil {
		return nil, err
	}
	if n := len(in.Loans); n > limit.MaxBatch {
		return nil, statusOf(&limit.Error{Kind: limit.TooLarge, Field: "loans", Message: "are " + strconv.Itoa(n) + ", at most " + strconv.Itoa(limit.MaxBatch) + " fit one request"})
	}
	a.keep(len(in.Loans))
	return in, undecoded(m)
}

// lend takes in a request, and answers it at once if that may be. It gives back what the request was admitted with.
func (b *borrowStream) lend(in *weirv1.BorrowRequest, admitted admission) error {
	later := false
	defer func() {
		if !later {
			admitted.leave()
		}
	}()
	reports := make([]limit.Borrow, len(in.Loans))
	for i, r := range in.Loans {
		var bad *limit.Error
		if reports[i], bad = wire.Borrow(b.id, r); bad != nil {
			bad.Field = "loans[" + strconv.Itoa(i) + "]." + bad.Field
			return statusOf(bad)
		}
	}
	answers := make([]limit.Lent, len(reports))
	wait, err := b.server.cfg.Lender.Lend(b.stream.Context(), reports, answers)
	switch {
	case err != nil:
		return statusOf(err)
	case wait != nil:
		later = true
		b.unconfirmed <- unconfirmed{in, answers, wait, admitted}
		return nil
	}
	return b.send(lent(in, answers))
}

// lent is the answer to a request.
func lent(in *weirv1.BorrowRequest, answers []limit.Lent) *weirv1.BorrowResponse {
	out := &weirv1.BorrowResponse{Sent: in.Sent, Loans: make([]*weirv1.LoanAnswer, len(answers))}
	for i := range answers {
		out.Loans[i] = wire.ProtoLent(in.Loans[i].GetNumber(), &answers[i])
	}
	return out
}
