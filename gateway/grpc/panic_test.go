package grpc

import (
	"context"
	"io"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/scripted"
)

// givenStream is a stream whose requests the test gives, and that ends with them.
type givenStream struct {
	grpc.ServerStream
	ctx      context.Context
	requests chan proto.Message
	sent     func(m any) // nil: nothing is done with what is sent
}

// checkWith has a server carry the stream out as one of checks.
func (s *givenStream) checkWith(server *Server) error {
	return server.CheckStream(&grpc.GenericServerStream[weirv1.CheckStreamRequest,
		weirv1.CheckStreamResponse]{ServerStream: s})
}

func (s *givenStream) Context() context.Context { return s.ctx }

func (s *givenStream) RecvMsg(m any) error {
	in, ok := <-s.requests
	if !ok {
		return io.EOF
	}
	to := m.(*wire.Lenient)
	if err := to.Admit(proto.Size(in)); err != nil {
		return err
	}
	proto.Merge(to.Message, in)
	return nil
}

func (s *givenStream) SendMsg(m any) error {
	if s.sent != nil {
		s.sent(m)
	}
	return nil
}

// late is a service, and a lender, with mistakes: in beginning checks of "bad", and late: in finishing checks of "far",
// in waiting for copies.
type late struct {
	scripted.Service
	begun chan struct{} // gets one when such is waited for
	may   chan struct{}
}

func (l *late) wait() {
	l.begun <- struct{}{}
	<-l.may
	panic("late")
}

func (*late) Begin(_ context.Context, b *limiter.Batch) (open []int, err *limit.Error) {
	if b.Checks[0].Key == "bad" {
		panic("late")
	}
	b.Results = make([]limit.Result, len(b.Checks))
	return []int{0}, nil
}

func (l *late) Finish(_ context.Context, b *limiter.Batch, _ []int) {
	if b.Checks[0].Key == "far" {
		l.wait()
	}
}

func (l *late) Lend(_ context.Context, in []limit.Borrow, _ []limit.Lent) (func(), error) {
	if len(in) == 0 {
		return nil, nil
	}
	return l.wait, nil
}

func (*late) OpenBorrower(_ uint64, recall func(limit.Recall)) func() {
	recall(limit.Recall{})
	return func() {}
}

// TestPanics: a panic in a stream's handler, in what the stream does beside that, or when that has returned, ends the
// stream alone, and is told once.
func TestPanics(t *testing.T) {
	unread := func(s *Server, stream *givenStream) error {
		return s.EndUnread(s.svc, stream, &grpc.StreamServerInfo{FullMethod: "method"},
			func(srv any, _ grpc.ServerStream) error {
				srv.(*late).wait()
				return nil
			})
	}
	checkStream := func(s *Server, stream *givenStream) error { return stream.checkWith(s) }
	bad, far, good := streamed(1, "bad"), streamed(1, "far"), streamed(1, "good")
	loan := &weirv1.CheckStreamRequest{Borrow: &weirv1.BorrowRequest{Borrower: 1,
		Loans: []*weirv1.LoanReport{report(16)}}}
	for _, c := range []struct {
		name   string
		handle func(*Server, *givenStream) error
		run    func(l *late, s *givenStream, leave func())
		want   int // panics
	}{
		{"checks that begin", checkStream, func(_ *late, s *givenStream, _ func()) { s.requests <- bad }, 1},
		{"a handler whose caller has gone", unread, func(l *late, _ *givenStream, leave func()) {
			<-l.begun
			leave()
			close(l.may)
		}, 1},
		{"checks whose caller has gone", checkStream, func(l *late, s *givenStream, leave func()) {
			s.requests <- far
			<-l.begun
			leave()
			close(l.may)
		}, 1},
		{"checks, twice at a time", checkStream, func(l *late, s *givenStream, _ func()) {
			s.requests <- far
			<-l.begun
			s.requests <- far
			<-l.begun
			close(l.may)
		}, 2},
		{"the answer to checks", checkStream, func(_ *late, s *givenStream, _ func()) {
			done := make(chan struct{})
			s.sent = func(m any) {
				if !m.(*weirv1.CheckStreamResponse).More {
					defer close(done)
					panic("late")
				}
			}
			s.requests <- good
			<-done
		}, 1},
		{"a loan whose borrower says no more", checkStream, func(l *late, s *givenStream, _ func()) {
			s.requests <- loan
			<-l.begun
			close(l.may)
		}, 1},
		{"a recall", checkStream, func(_ *late, s *givenStream, _ func()) {
			done := make(chan struct{})
			s.sent = func(m any) {
				if len(m.(*weirv1.CheckStreamResponse).Borrow.GetRecalls()) > 0 {
					defer close(done)
					panic("late")
				}
			}
			s.requests <- &weirv1.CheckStreamRequest{Borrow: &weirv1.BorrowRequest{Borrower: 1}}
			<-done
		}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			noLeaks(t)
			told := make(chan any, 10)
			l := &late{begun: make(chan struct{}), may: make(chan struct{})}
			s := NewServer(ServerConfig{
				Service: l, Lender: l, WriteTimeout: time.Hour, Caller: func(context.Context) string { return "" },
				Panicked: func(_ string, p *panics.Error) { told <- p.Value },
			})
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			stream := &givenStream{ctx: ctx, requests: make(chan proto.Message)}
			var handling sync.WaitGroup
			var err error
			handling.Go(func() { err = c.handle(s, stream) })
			c.run(l, stream, leave)
			close(stream.requests)
			handling.Wait()
			s.Close()
			close(told)
			n := 0
			for p := range told {
				n++
				expect.True(t, p == "late", "a panic of %v", p)
			}
			expect.Equal(t, n, c.want, "panics are told")
			expect.True(t, ctx.Err() != nil || status.Code(err) == codes.Internal, "the stream ends with %v", err)
		})
	}
}
