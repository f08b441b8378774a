package peer

import (
	"context"
	"errors"
	"io"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/limiter"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	"github.com/weirlimit/weir/rpc/transport"
	"github.com/weirlimit/weir/rpc/wire"
)

const (
	// rememberFor is how long the reply to a batch is kept for a sender that may ask again: as long as it may retry.
	rememberFor = 10 * time.Second
	// maxSessions bounds the sequence spaces remembered at a time: some for every node of the largest cluster.
	maxSessions = 1024
	// maxUnacknowledged is how far the sequence of a batch may be above the acknowledged one, which bounds the batches of one sender that are
	// being answered or remembered. A sender keeps to it.
	maxUnacknowledged = 10_000
	// maxTimeout bounds how long an operation is handed on for, whatever its sender says.
	maxTimeout = time.Minute
)

// Receiver carries out operations that peers send: see limiter.Limiter.Receive.
type Receiver interface {
	Receive(ops []*limiter.Op) (rest func(context.Context))
}

// ServerConfig is what a Server needs. All fields are required, but for those that transport.Config says.
type ServerConfig struct {
	transport.Config
	// MaxReplies is about how many bytes of replies are remembered, of all senders. At it batches are taken only from senders of whom
	// none is, until they have acknowledged some. 0: any number.
	MaxReplies int64
	Receiver   Receiver
	// Inspect tells about this node.
	Inspect func() *peerv1.InspectResponse
	// Activity tells what this node has decided lately, and Describe how a key stands that it decides for.
	Activity func(*peerv1.ActivityRequest) *peerv1.ActivityResponse
	Describe func(*peerv1.DescribeRequest) (*peerv1.DescribeResponse, error)
	// Panicked is called with a panic in handing a batch on. The batch stays without an answer. Nil: such a panic is not recovered.
	Panicked func(*panics.Error)
	// Identify tells who this node is.
	Identify func() *peerv1.IdentifyResponse
}

// Server answers other nodes.
type Server struct {
	peerv1.UnimplementedPeerServer
	cfg ServerConfig
	now func() time.Time // tells when replies may be forgotten

	works sync.Pool // of *work

	replies atomic.Int64 // bytes of those remembered, about
	waiting atomic.Int64 // batches of which something is waited for beside their streams

	mu       sync.Mutex
	sessions map[sessionKey]*session // what is over goes when a stream is opened
}

// Drain waits until every batch that has been taken in is answered, or ctx is done. A node that leaves calls it before it cuts
// the streams: what it has handed on for others would otherwise be carried out, and nobody be told.
func (s *Server) Drain(ctx context.Context) {
	for s.waiting.Load() > 0 && ctx.Err() == nil {
		time.Sleep(time.Millisecond)
	}
}

// NewServer returns a Server to be registered with a gRPC server.
func NewServer(cfg ServerConfig) *Server {
	return &Server{
		cfg: cfg, now: time.Now, sessions: make(map[sessionKey]*session),
		works: sync.Pool{New: func() any { return new(work) }},
	}
}

type sessionKey struct {
	boot, stream uint64
}

// session is one sender's sequence space. It outlives the stream it is served on, so that a batch that is sent again
// after a broken connection gets the reply that was made, and is not carried out a second time.
type session struct {
	mu      sync.Mutex // never held while something is written: a sender that does not read must hold up nobody else
	open    int        // streams being served; more than one while an old one has yet to notice its end
	left    time.Time  // when the last stream ended
	answers map[uint64]*answer
	replies int64         // bytes of those in answers, about
	all     *atomic.Int64 // of all sessions
	floor   uint64        // every batch up to it has been acknowledged
}

// answer is what is known of a batch: that it is being carried out, or its reply.
type answer struct {
	reply *peerv1.Reply // nil while it is being carried out
	to    *outlet       // of the stream that asked last
	at    time.Time     // of the reply
	size  int64         // of the reply
}

// outlet is the writing side of a stream.
type outlet struct {
	mu     sync.Mutex
	stream peerv1.Peer_ForwardServer // nil once the stream is no longer served
}

// send writes a reply. An error needs no handling: the reading side of the stream sees it too, and the sender asks
// again.
func (o *outlet) send(r *peerv1.Reply) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.stream != nil {
		_ = o.stream.Send(&peerv1.ForwardReply{Body: &peerv1.ForwardReply_Reply{Reply: r}})
	}
}

func (o *outlet) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.stream = nil
}

// Forward implements peerv1.PeerServer.
func (s *Server) Forward(stream peerv1.Peer_ForwardServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	hello := first.GetHello()
	welcome, err := s.cfg.Accept(hello)
	if err != nil {
		return err
	}
	sess, err := s.join(sessionKey{hello.FromBoot, hello.Stream})
	if err != nil {
		return err
	}
	defer s.leave(sess)
	if err := stream.Send(&peerv1.ForwardReply{Body: &peerv1.ForwardReply_Welcome{Welcome: welcome}}); err != nil {
		return err
	}
	out := &outlet{stream: stream}
	defer out.close()
	var handed sync.WaitGroup
	defer handed.Wait()
	err = s.serve(stream, hello.FromBoot, sess, out, &handed)
	if err != nil {
		s.cfg.Logger.Warn("peer stream ended", "carries", "operations", "peer", hello.FromName, "error", err)
	}
	return err
}

// serve carries out batches of a process until the stream ends. An error is the sender's fault.
func (s *Server) serve(stream peerv1.Peer_ForwardServer, from uint64, sess *session, out *outlet, handed *sync.WaitGroup) error {
	var in peerv1.ForwardRequest
	var names numberedTargets
	for {
		err := stream.RecvMsg(&in)
		switch {
		case errors.Is(err, io.EOF) || stream.Context().Err() != nil:
			return nil // the sender is gone, or goes on with another stream
		case err != nil:
			return err // a malformed message
		}
		batch := in.GetBatch()
		if batch == nil {
			return status.Error(codes.InvalidArgument, "a Batch was expected")
		}
		w := s.works.Get().(*work)
		if err := w.read(batch, from, &names); err != nil {
			return err
		}
		fresh, known, err := sess.begin(batch, out, s.cfg.MaxReplies, s.now())
		if reusable(batch) {
			batch.ReturnToVTPool()
		}
		switch {
		case err != nil:
			return err
		case fresh:
			s.carryOut(stream.Context(), sess, w, handed)
		default:
			s.done(w)
			if known != nil {
				out.send(known)
			}
		}
	}
}

// reusable says whether the room of a batch that has been read is worth keeping for another one.
func reusable(b *peerv1.Batch) bool {
	in := b.Checks
	return in != nil && len(in.Define) == 0 && wire.Small(in) && len(in.RequestIds) == 0 && len(b.Callers) <= 1 && len(b.Items) == 0
}

// work is a batch that is being carried out.
type work struct {
	sequence uint64
	ops      []received
	good     []*limiter.Op // those that can be carried out
	longest  time.Duration // that somebody waits for one of them
}

// done keeps the room of a batch for the next one, of any stream, with nothing in it that would be kept alive.
func (s *Server) done(w *work) {
	clear(w.ops)
	clear(w.good)
	w.ops, w.good, w.longest = w.ops[:0], w.good[:0], 0
	s.works.Put(w)
}

// read takes in a batch of a process, and what it defines. An error says that it is none.
func (w *work) read(b *peerv1.Batch, from uint64, names *numberedTargets) error {
	w.sequence = b.Sequence
	var err error
	if w.ops, err = names.unpack(b, w.ops); err != nil {
		return err
	}
	for i := range w.ops {
		op := w.ops[i].link()
		if op.Extra != nil && op.Loan != nil && !op.Loan.Forwarded {
			op.Loan.Report.ID.Borrower = from // no node borrows in another's name
		}
		if op.Outcome.Err == nil {
			w.good = append(w.good, op)
		}
		w.longest = max(w.longest, op.Left)
	}
	return nil
}

// join finds or makes the session that a stream belongs to.
func (s *Server) join(k sessionKey) (*session, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	maps.DeleteFunc(s.sessions, func(_ sessionKey, sess *session) bool { return sess.over(now) })
	sess, ok := s.sessions[k]
	if !ok {
		if len(s.sessions) >= maxSessions {
			return nil, status.Errorf(codes.ResourceExhausted, "stream: %d peers are being served already", maxSessions)
		}
		sess = &session{answers: make(map[uint64]*answer), all: &s.replies}
		s.sessions[k] = sess
	}
	sess.mu.Lock()
	sess.open++
	sess.mu.Unlock()
	return sess, nil
}

// over tells whether a session can be forgotten. Its replies are not counted from then on.
func (s *session) over(now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open > 0 || now.Sub(s.left) <= rememberFor {
		return false
	}
	s.forgetLocked(func(*answer) bool { return true })
	return true
}

// forgetLocked forgets some batches.
func (s *session) forgetLocked(which func(*answer) bool) {
	for seq, a := range s.answers {
		if which(a) {
			s.dropLocked(seq)
		}
	}
}

// dropLocked forgets a batch, if it is known.
func (s *session) dropLocked(seq uint64) {
	if a := s.answers[seq]; a != nil {
		s.replies -= a.size
		s.all.Add(-a.size)
		delete(s.answers, seq)
	}
}

func (s *Server) leave(sess *session) {
	sess.mu.Lock()
	defer sess.mu.Unlock()
	sess.open--
	sess.left = s.now()
}

// begin reports whether a batch is to be carried out. One that was before is answered as it was then: with known, or,
// when it is still being carried out, by the one who does that.
func (s *session) begin(b *peerv1.Batch, out *outlet, most int64, now time.Time) (fresh bool, known *peerv1.Reply, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch floor := max(s.floor, b.Acknowledged); {
	case b.Sequence <= floor:
		return false, nil, status.Errorf(codes.InvalidArgument, "sequence: %d is not above the acknowledged %d", b.Sequence, floor)
	case b.Sequence-floor > maxUnacknowledged:
		return false, nil, status.Errorf(codes.ResourceExhausted, "sequence: %d batches are unacknowledged", b.Sequence-floor)
	}
	s.acknowledgeLocked(b.Acknowledged)
	if a, ok := s.answers[b.Sequence]; ok {
		a.to = out
		return false, a.reply, nil
	}
	full := func() bool { return most > 0 && s.replies > 0 && s.all.Load() >= most }
	if full() {
		s.forgetLocked(func(a *answer) bool { return a.reply != nil && now.Sub(a.at) > rememberFor })
		if full() {
			return false, nil, status.Errorf(codes.ResourceExhausted, "sequence: unacknowledged replies take %d bytes", s.all.Load())
		}
	}
	s.answers[b.Sequence] = &answer{to: out}
	return true, nil, nil
}

// replySize is the most that a reply takes, about, with the map's part: a number of one byte takes eight in a list.
func replySize(r *peerv1.Reply) int64 { return 256 + 8*int64(r.SizeVT()) }

// acknowledgeLocked forgets the batches up to a sequence: the sender has their replies, or wants them no more.
func (s *session) acknowledgeLocked(up uint64) {
	for seq := s.floor + 1; seq <= min(up, s.floor+maxUnacknowledged); seq++ { // none is known beyond
		s.dropLocked(seq)
	}
	s.floor = max(s.floor, up)
}

// finish sends a reply and remembers it, unless the sender has given the batch up.
func (s *session) finish(r *peerv1.Reply, now time.Time) {
	s.mu.Lock()
	a, ok := s.answers[r.Sequence]
	if !ok {
		s.mu.Unlock()
		return
	}
	a.reply, a.at, a.size = r, now, replySize(r)
	s.replies += a.size
	s.all.Add(a.size)
	to := a.to
	s.mu.Unlock()
	to.send(r)
}

// carryOut decides a batch and replies. Only what must be asked of yet another node is waited for beside the stream, so
// that it does not hold up what comes after.
func (s *Server) carryOut(ctx context.Context, sess *session, w *work, handed *sync.WaitGroup) {
	rest := s.cfg.Receiver.Receive(w.good)
	if rest == nil {
		sess.finish(reply(w.sequence, w.ops), s.now())
		s.done(w)
		return
	}
	s.waiting.Add(1)
	handed.Go(func() {
		defer s.waiting.Add(-1)
		// The sender's connection may break meanwhile; what was begun is finished, for it may ask again.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), w.longest)
		defer cancel()
		panics.Tell(s.cfg.Panicked, func() {
			rest(ctx)
			sess.finish(reply(w.sequence, w.ops), s.now())
			s.done(w)
		})
	})
}

// Activity implements peerv1.PeerServer.
func (s *Server) Activity(_ context.Context, r *peerv1.ActivityRequest) (*peerv1.ActivityResponse, error) {
	return s.cfg.Activity(r), nil
}

// Describe implements peerv1.PeerServer.
func (s *Server) Describe(_ context.Context, r *peerv1.DescribeRequest) (*peerv1.DescribeResponse, error) {
	return s.cfg.Describe(r)
}

// Inspect implements peerv1.PeerServer.
func (s *Server) Inspect(context.Context, *peerv1.InspectRequest) (*peerv1.InspectResponse, error) {
	return s.cfg.Inspect(), nil
}

// Identify implements peerv1.PeerServer.
func (s *Server) Identify(context.Context, *peerv1.IdentifyRequest) (*peerv1.IdentifyResponse, error) {
	return s.cfg.Identify(), nil
}
