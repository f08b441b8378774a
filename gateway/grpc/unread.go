package grpc

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/internal/panics"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// errUnread ends a stream whose caller does not read.
var errUnread = status.Error(codes.Aborted, "the answers are not read")

// handling is the handling of a stream. The stream ends at once, and its handler returns later, where its caller does not read or something
// panics: a connection that is alive may have streams that nobody reads.
type handling struct {
	server *Server
	method string
	ends   chan error // holds the error that the stream ends with
}

func (s *Server) handling(method string) handling { return handling{s, method, make(chan error, 1)} }

// end ends the stream, unless it is ending.
func (h *handling) end(why error) {
	select {
	case h.ends <- why:
	default:
	}
}

// panicked tells of a panic, and ends the stream.
func (h *handling) panicked(p *panics.Error) {
	h.server.cfg.Panicked(h.method, p)
	h.end(admission.ErrPanicked)
}

// patiently sends, for as long as a stream waits for its caller to read. What waits then fails when the stream has ended.
func (h *handling) patiently(send func() error) error {
	if d := h.server.cfg.WriteTimeout; d > 0 {
		defer time.AfterFunc(d, func() { h.end(errUnread) }).Stop()
	}
	return send()
}

// run returns what the stream ends with. left says that its context has ended before: the caller is gone, or the node stops. The handler may
// be stuck in sending or in receiving until the stream has ended: gRPC has no other way to interrupt it.
func (h *handling) run(ctx context.Context, handle func() error) (left bool, err error) {
	h.server.readers.Go(func() { panics.Tell(h.panicked, func() { h.end(handle()) }) })
	select {
	case err := <-h.ends:
		return false, err
	case <-ctx.Done():
		return true, status.FromContextError(ctx.Err()).Err()
	}
}

// EndUnread is an interceptor of streams: those whose callers do not read what they are sent within WriteTimeout are ended,
// whatever service they are of, and so is every one whose context has ended, though its handler waits for its caller's next message.
// The Server's own CheckStream sees to that itself. Close waits for the handlers.
func (s *Server) EndUnread(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	if s.cfg.WriteTimeout == 0 || info.FullMethod == weirv1.Limiter_CheckStream_FullMethodName {
		return handle(srv, stream)
	}
	h := s.handling(info.FullMethod)
	_, err := h.run(stream.Context(), func() error { return handle(srv, patientStream{stream, &h}) })
	return err
}

// patientStream is a stream that does not wait for ever.
type patientStream struct {
	grpc.ServerStream
	handling *handling
}

// SendMsg implements ServerStream.
func (s patientStream) SendMsg(m any) error {
	return s.handling.patiently(func() error { return s.ServerStream.SendMsg(m) })
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
	of  map[*checkStream]int64 // those of which something waits
}

// add counts bytes that wait, or with a negative number wait no more. Where more than most wait in all, if that is not 0, the stream of which
// the most waits is ended, so that those who read need not suffer from those who do not. What waits of it is counted until it has failed.
func (u *unread) add(c *checkStream, bytes, most int64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.all += bytes
	if u.of[c] += bytes; u.of[c] == 0 {
		delete(u.of, c)
	}
	if bytes <= 0 || most == 0 || u.all <= most {
		return
	}
	fullest := c
	for other, n := range u.of {
		if n > u.of[fullest] {
			fullest = other
		}
	}
	fullest.end(errUnread)
}

// hold notes that a response with answers to so many checks waits for its caller to read, and letGo that it waits no more.
func (c *checkStream) hold(checks int) (bytes int64) {
	bytes = responseSize + int64(checks)*answerSize
	c.server.unread.add(c, bytes, c.server.cfg.MaxUnread)
	return bytes
}

func (c *checkStream) letGo(bytes int64) { c.server.unread.add(c, -bytes, 0) }
