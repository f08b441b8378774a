package grpc

import (
	"errors"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/internal/fifo"
	"github.com/weirlimit/weir/internal/panics"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// errUnread ends a stream whose caller does not read.
var errUnread = status.Error(codes.Aborted, "the answers are not read")

// stall is how long a stream waits for its caller to read. A connection that is alive may have streams that nobody reads.
type stall struct {
	limit time.Duration // 0: for any time
	over  fifo.Signal   // set when it is
}

func newStall(limit time.Duration) stall { return stall{limit, fifo.NewSignal()} }

// end says that it is over.
func (s *stall) end() { s.over.Set() }

// with sends, for as long as it lasts. What waits then fails when the stream's handler has returned.
func (s *stall) with(send func() error) error {
	if s.limit > 0 {
		defer time.AfterFunc(s.limit, s.end).Stop()
	}
	return send()
}

// EndUnread is an interceptor of streams: those whose callers do not read what they are sent within WriteTimeout are ended,
// whatever service they are of, and so is every one whose context has ended, though its handler waits for its caller's next message.
// The Server's own CheckStream sees to that itself. Close waits for the handlers.
func (s *Server) EndUnread(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	if s.cfg.WriteTimeout == 0 || info.FullMethod == weirv1.Limiter_CheckStream_FullMethodName {
		return handle(srv, stream)
	}
	wait := newStall(s.cfg.WriteTimeout)
	ended, gone := make(chan error), make(chan struct{})
	defer close(gone)
	// The handler is stuck in sending, or in receiving, from which only the end of this function frees it.
	s.readers.Go(func() {
		err := panics.Call(func() error { return handle(srv, patientStream{stream, &wait}) })
		select {
		case ended <- err:
		case <-gone:
			s.endedLate(info.FullMethod, err)
		}
	})
	select {
	case err := <-ended:
		return err
	case <-wait.over:
		return errUnread
	case <-stream.Context().Done(): // the caller is gone, or the node stops
		return status.FromContextError(stream.Context().Err()).Err()
	}
}

// endedLate takes the error of a stream that has been ended with another one: a panic is not to pass unnoticed.
func (s *Server) endedLate(method string, err error) {
	if p, ok := errors.AsType[*panics.Error](err); ok && s.cfg.Panicked != nil {
		s.cfg.Panicked(method, p)
	}
}

// patientStream is a stream that does not wait for ever.
type patientStream struct {
	grpc.ServerStream
	stall *stall
}

// SendMsg implements ServerStream.
func (s patientStream) SendMsg(m any) error {
	return s.stall.with(func() error { return s.ServerStream.SendMsg(m) })
}

const (
	// answerSize is about what the answer to a check takes in a response: a list of nine numbers.
	answerSize = 128
	// responseSize is about what a response takes besides that while it waits: a goroutine, a context with its timer.
	responseSize = 8 << 10
)

// unread is what waits to be read of all CheckStreams, in bytes, about. It is safe for concurrent use.
type unread struct {
	mu  sync.Mutex
	all int64
	of  map[*checkStream]int64 // those that are open and have not been told to end
}

func (u *unread) open(c *checkStream) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.of == nil {
		u.of = make(map[*checkStream]int64)
	}
	u.of[c] = 0
}

func (u *unread) close(c *checkStream) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.drop(c)
}

func (u *unread) drop(c *checkStream) {
	u.all -= u.of[c]
	delete(u.of, c)
}

// hold notes that a response with answers to so many checks waits for its caller to read. Where all that waits is more than
// most, if that is not 0, the stream of which the most waits is ended: so that those who read need not suffer from those who do
// not.
func (u *unread) hold(c *checkStream, checks int, most int64) (bytes int64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if _, ok := u.of[c]; !ok {
		return 0 // it ends, and what waits with it
	}
	bytes = responseSize + int64(checks)*answerSize
	u.of[c] += bytes
	if u.all += bytes; most > 0 && u.all > most {
		fullest := c
		for other, n := range u.of {
			if n > u.of[fullest] {
				fullest = other
			}
		}
		u.drop(fullest)
		fullest.stall.end()
	}
	return bytes
}

// letGo notes that it waits no more.
func (u *unread) letGo(c *checkStream, bytes int64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if _, ok := u.of[c]; ok {
		u.of[c] -= bytes
		u.all -= bytes
	}
}

func (c *checkStream) hold(checks int) (bytes int64) {
	return c.server.unread.hold(c, checks, c.server.cfg.MaxUnread)
}

func (c *checkStream) letGo(bytes int64) { c.server.unread.letGo(c, bytes) }
