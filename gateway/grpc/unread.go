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

// This file ends streams whose callers do not read. Two rules do so: a Send that takes longer than WriteTimeout
// (patiently), and more than MaxUnread bytes of answers that wait in all CheckStreams (unread).

// errUnread ends a stream whose caller does not read.
var errUnread = status.Error(codes.Aborted, "the answers are not read")

// handling runs the handler of a stream in a goroutine of its own, so that the stream can end before the handler
// returns: when its caller does not read, or a goroutine of it panics. The connection and its other streams stay open.
type handling struct {
	server *Server
	method string
	ends   chan error // receives the error that the stream ends with
}

func (s *Server) handling(method string) handling { return handling{s, method, make(chan error, 1)} }

// end ends the stream with an error, unless it is ending already.
func (h *handling) end(why error) {
	select {
	case h.ends <- why:
	default:
	}
}

// panicked reports a panic and ends the stream.
func (h *handling) panicked(p *panics.Error) {
	h.server.cfg.Panicked(h.method, p)
	h.end(admission.ErrPanicked)
}

// patiently calls send, and ends the stream when send takes longer than WriteTimeout. send fails then.
func (h *handling) patiently(send func() error) error {
	if d := h.server.cfg.WriteTimeout; d > 0 {
		defer time.AfterFunc(d, func() { h.end(errUnread) }).Stop()
	}
	return send()
}

// run calls handle and returns the error that the stream ends with. left says that the stream's context ended first:
// the caller is gone, or the node stops. handle may still be running then, blocked in sending or receiving: gRPC
// unblocks it only after run's caller has returned.
func (h *handling) run(ctx context.Context, handle func() error) (left bool, err error) {
	h.server.readers.Go(func() { panics.Tell(h.panicked, func() { h.end(handle()) }) })
	select {
	case err := <-h.ends:
		return false, err
	case <-ctx.Done():
		return true, status.FromContextError(ctx.Err()).Err()
	}
}

// EndUnread is an interceptor for streams of all services. It ends a stream whose caller does not read an answer within
// WriteTimeout, and one whose context has ended, even while its handler waits for the caller's next message.
// CheckStream does both itself, and passes through, as every stream does with WriteTimeout 0. Close waits for the
// handlers.
func (s *Server) EndUnread(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo,
	handle grpc.StreamHandler) error {
	if s.cfg.WriteTimeout == 0 || info.FullMethod == weirv1.Limiter_CheckStream_FullMethodName {
		return handle(srv, stream)
	}
	h := s.handling(info.FullMethod)
	_, err := h.run(stream.Context(), func() error { return handle(srv, patientStream{stream, &h}) })
	return err
}

// patientStream is a stream whose SendMsg ends the stream after WriteTimeout.
type patientStream struct {
	grpc.ServerStream
	handling *handling
}

// SendMsg implements ServerStream.
func (s patientStream) SendMsg(m any) error {
	return s.handling.patiently(func() error { return s.ServerStream.SendMsg(m) })
}

const (
	// answerSize is about what the answer to a check takes in a response, in bytes: nine numbers in lists.
	answerSize = 128
	// responseSize is about what else a waiting response takes: a goroutine, a context and its timer.
	responseSize = 8 << 10
)

// unread counts the bytes of answers that wait for callers to read, of all CheckStreams, about. It is safe for
// concurrent use.
type unread struct {
	mu  sync.Mutex
	all int64
	of  map[*checkStream]int64 // streams for which bytes wait
}

// add adds bytes that wait for the caller of c, or removes them (bytes below 0). When more than most bytes wait in all
// (most 0: no bound), it ends the stream with the most, so that callers that read keep their streams. The bytes of that
// stream stay counted until its Send has failed.
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

// hold counts a response with so many answers as waiting for the caller; letGo ends that.
func (c *checkStream) hold(checks int) (bytes int64) {
	bytes = responseSize + int64(checks)*answerSize
	c.server.unread.add(c, bytes, c.server.cfg.MaxUnread)
	return bytes
}

func (c *checkStream) letGo(bytes int64) { c.server.unread.add(c, -bytes, 0) }
