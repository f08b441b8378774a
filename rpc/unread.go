package rpc

import (
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// errUnread ends a stream whose caller does not read.
var errUnread = status.Error(codes.Aborted, "the answers are not read")

// stall is how long a stream waits for its caller to read. A connection that is alive may have streams that nobody reads.
type stall struct {
	limit time.Duration // 0: for any time
	over  chan struct{} // holds a token when it is
}

func newStall(limit time.Duration) stall { return stall{limit, make(chan struct{}, 1)} }

// end says that it is over.
func (s *stall) end() {
	select {
	case s.over <- struct{}{}:
	default:
	}
}

// with sends, for as long as it lasts. What waits then fails when the stream's handler has returned.
func (s *stall) with(send func() error) error {
	if s.limit > 0 {
		defer time.AfterFunc(s.limit, s.end).Stop()
	}
	return send()
}

// EndUnread is an interceptor of streams: those whose callers do not read what they are sent within WriteTimeout are ended,
// whatever service they are of. The Server's own CheckStream sees to that itself. Close waits for the handlers.
func (s *Server) EndUnread(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	if s.cfg.WriteTimeout == 0 || info.FullMethod == weirv1.Limiter_CheckStream_FullMethodName {
		return handle(srv, stream)
	}
	wait := newStall(s.cfg.WriteTimeout)
	ended := make(chan error, 1)
	// The handler is stuck in sending, from which only the end of this function frees it.
	s.readers.Go(func() { ended <- handle(srv, patientStream{stream, &wait}) })
	select {
	case err := <-ended:
		return err
	case <-wait.over:
		return errUnread
	}
}

// patientStream is a stream that does not wait for ever.
type patientStream struct {
	grpc.ServerStream
	stall *stall
}

// SendMsg implements grpc.ServerStream.
func (s patientStream) SendMsg(m any) error {
	return s.stall.with(func() error { return s.ServerStream.SendMsg(m) })
}

// answerSize is about what the answer to a check takes in a response: a list of nine numbers.
const answerSize = 128

// hold notes that answers wait for the caller to read. Where all streams' together are too many, one that holds more than its
// share of what there may be is ended: so that those who read need not suffer from those who do not.
func (c *checkStream) hold(checks int) (bytes int64) {
	bytes = int64(checks) * answerSize
	s := c.server
	own, all := c.unread.Add(bytes), s.unread.Add(bytes)
	if most := s.cfg.MaxUnread; most > 0 && all > most && own > most/s.streams.Load() {
		c.stall.end()
	}
	return bytes
}

// letGo notes that they wait no more.
func (c *checkStream) letGo(bytes int64) {
	c.unread.Add(-bytes)
	c.server.unread.Add(-bytes)
}
