package grpc

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"strconv"

	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
)

const (
	// maxRecalls bounds the recalls that wait to be sent to a borrower. Further recalls are dropped, as if the borrower
	// did not answer.
	maxRecalls = 1024
	// maxUnconfirmed bounds the reports of a stream whose answers wait for copies. At the bound the reader waits, and
	// further requests of the stream, checks too, stay unread.
	maxUnconfirmed = 64
)

// borrower is the caller of a stream on which loans were reported.
type borrower struct {
	said uint64 // the id that the caller has sent
	id   uint64 // what borrowerOf makes of it
	end  func() // returned by Lender.OpenBorrower
}

// borrowerOf returns the id under which the nodes know a borrower: a hash of the id that its process has drawn and of
// the caller's name. It is the same at every node. No caller can borrow or report under the id of another caller's
// process or of a node.
func (s *Server) borrowerOf(ctx context.Context, drawn uint64) uint64 {
	sum := sha256.Sum256(append(binary.BigEndian.AppendUint64(nil, drawn), s.cfg.Caller(ctx)...))
	return binary.BigEndian.Uint64(sum[:])
}

// borrow processes a report of loans and answers it. later says that the answer waits for copies, in a goroutine that
// leaves a. The reader does not wait for that, since further reports may return units that other borrowers wait for.
func (c *checkStream) borrow(in *weirv1.BorrowRequest, sequence uint64, a *callMemory) (later bool, err error) {
	answers, wait, bad := c.report(in)
	if bad != nil {
		e := wire.ProtoError(wire.Named(bad))
		e.Field = borrowField + e.Field
		return false, c.send(&weirv1.CheckStreamResponse{Sequence: sequence, Error: e})
	}
	if wait == nil {
		return false, c.sendLent(in, sequence, answers)
	}
	c.unconfirmed <- struct{}{}
	c.waiting.Go(func() {
		panics.Tell(c.panicked, func() {
			wait()
			_ = c.sendLent(in, sequence, answers) // a failed stream is noticed by the reader
		})
		a.leave()
		<-c.unconfirmed
	})
	return true, nil
}

// borrowField precedes the field of an error in a report.
const borrowField = "borrow."

// report passes a report to the Lender. wait, if not nil, must return before the answers are sent. bad names a field of
// the report.
func (c *checkStream) report(in *weirv1.BorrowRequest) (answers []limit.Lent, wait func(), bad *limit.Error) {
	switch n := len(in.Loans); {
	case n > limit.MaxBatch:
		return nil, nil, limit.NewError(limit.TooLarge, "loans",
			"are "+strconv.Itoa(n)+", at most "+strconv.Itoa(limit.MaxBatch)+" fit one request")
	case in.Borrower == 0:
		return nil, nil, invalid("borrower", "is missing: a random number that is not 0")
	case c.borrower != nil && in.Borrower != c.borrower.said:
		return nil, nil, invalid("borrower", "must be the same in all requests of a stream")
	}
	if c.borrower == nil {
		b := &borrower{said: in.Borrower, id: c.server.borrowerOf(c.stream.Context(), in.Borrower)}
		b.end = c.server.cfg.Lender.OpenBorrower(b.id, c.recall)
		c.borrower = b
	}
	reports := make([]limit.Borrow, len(in.Loans))
	for i, r := range in.Loans {
		if reports[i], bad = wire.Borrow(c.borrower.id, r); bad != nil {
			bad.Field = "loans[" + strconv.Itoa(i) + "]." + bad.Field
			return nil, nil, bad
		}
	}
	answers = make([]limit.Lent, len(reports))
	wait, err := c.server.cfg.Lender.Lend(c.stream.Context(), reports, answers)
	return answers, wait, errorOf(err)
}

// recall sends a recall to the caller, or drops it when maxRecalls wait.
func (c *checkStream) recall(r limit.Recall) {
	c.want(func(t *teller) {
		if len(t.recalls) < maxRecalls {
			t.recalls = append(t.recalls, &weirv1.LoanRecall{Number: r.Number, Granted: r.Granted})
		}
	})
}

// sendLent sends the answer to a report.
func (c *checkStream) sendLent(in *weirv1.BorrowRequest, sequence uint64, answers []limit.Lent) error {
	lent := &weirv1.BorrowResponse{Sent: in.Sent, Loans: make([]*weirv1.LoanAnswer, len(answers))}
	for i := range answers {
		lent.Loans[i] = wire.ProtoLent(in.Loans[i].GetNumber(), &answers[i])
	}
	out := weirv1.CheckStreamResponseFromVTPool()
	out.Sequence, out.Borrow = sequence, lent
	defer c.letGo(c.hold(len(answers)))
	return c.send(out)
}
