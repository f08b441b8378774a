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

// This file has the receiving side. The path of one Batch:
//
//	Forward   checks the Hello and joins the stream to its session, the sender's sequence space
//	serve     reads batches one after another; work.read makes operations of each
//	begin     decides whether the batch is new, was answered before (the same reply goes out), or is being carried out
//	carryOut  has the Receiver carry it out; what waits for another node continues in a goroutine of its own
//	finish    keeps the reply and writes it to the stream that asked last
//
// A batch must never be carried out twice: sessions keep replies for rememberFor after a stream has ended, and a
// Forwarder repeats messages only for repeatWithin.

const (
	// rememberFor is how long the replies of a session are kept after its last stream has ended, and the age from which
	// they are dropped when MaxReplies is reached. Otherwise a reply is kept until the sender acknowledges it.
	rememberFor = 10 * time.Second
	// maxSessions bounds the sessions: several for every node of the largest cluster.
	maxSessions = 1024
	// maxUnacknowledged bounds the distance from a sender's acknowledged sequence to that of a batch, and so the
	// batches of one session that are being carried out or remembered. A Forwarder sends no batch beyond it.
	maxUnacknowledged = 10_000
	// maxTimeout bounds how long an operation may wait for another node, whatever its sender says.
	maxTimeout = time.Minute
)

// Receiver carries out operations of peers, as limiter.Limiter.Receive does: rest waits for what cannot be decided at
// once, or is nil.
type Receiver interface {
	Receive(ops []*limiter.Op) (rest func(context.Context))
}

// ServerConfig is what a Server needs. All fields are required unless their comments, or those of transport.Config, say
// otherwise.
type ServerConfig struct {
	transport.Config
	// MaxReplies is about how many bytes the remembered replies of all sessions may take; 0: no bound. At the bound, a
	// new batch of a session with remembered replies ends its stream with RESOURCE_EXHAUSTED, unless the batch
	// acknowledges them.
	MaxReplies int64
	Receiver   Receiver
	// Inspect describes this node, for status pages.
	Inspect func() *peerv1.InspectResponse
	// Activity says what this node has decided lately. Describe describes the state of a key for which this node
	// decides.
	Activity func(*peerv1.ActivityRequest) *peerv1.ActivityResponse
	Describe func(*peerv1.DescribeRequest) (*peerv1.DescribeResponse, error)
	// Panicked, when set, is called with a panic of a batch that waits for other nodes. The batch gets no reply. Nil:
	// the panic is not recovered.
	Panicked func(*panics.Error)
	// Identify says which process this is.
	Identify func() *peerv1.IdentifyResponse
}

// Server implements peerv1.PeerServer. Its methods are safe for concurrent use.
type Server struct {
	peerv1.UnimplementedPeerServer
	cfg ServerConfig
	now func() time.Time // for the age of replies and sessions; a test replaces it

	works sync.Pool // of *work

	replies atomic.Int64 // size of all remembered replies, about
	waiting atomic.Int64 // batches that carryOut has handed to a goroutine and not answered

	mu       sync.Mutex
	sessions map[sessionKey]*session // join deletes those that are over
}

// Drain waits until every batch that waits for another node is answered, or ctx is done. A leaving node calls it before
// it closes the streams, so that senders get the answers to operations that this node has forwarded for them.
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

// session is one sender's sequence space. It outlives its stream: a sender that repeats a batch after its connection
// broke gets the same reply, and the batch is not carried out a second time.
type session struct {
	mu sync.Mutex // never held while a reply is written: a sender that does not read must not delay other streams
	// streams of the session; more than one while the server has not noticed that an old one is broken
	open    int
	left    time.Time // when the last stream ended
	answers map[uint64]*answer
	replies int64         // size of the replies in answers, about
	all     *atomic.Int64 // Server.replies
	floor   uint64        // the sender has acknowledged every batch up to it
}

// answer is the record of a batch: its reply, or the fact that it is being carried out.
type answer struct {
	reply *peerv1.Reply // nil while it is being carried out
	to    *outlet       // of the stream on which the batch came last
	at    time.Time     // of the reply
	size  int64         // of the reply
}

// outlet is the writing side of a stream.
type outlet struct {
	mu     sync.Mutex
	stream peerv1.Peer_ForwardServer // nil once the stream is no longer served
}

// send writes a reply, or drops it when the stream is over. It ignores errors: serve sees the broken stream as well,
// and the sender repeats the batch.
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

// serve carries out batches of the process with the boot number from until the stream ends. It returns an error when
// the sender broke a rule.
func (s *Server) serve(stream peerv1.Peer_ForwardServer, from uint64, sess *session, out *outlet,
	handed *sync.WaitGroup) error {
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

// reusable says whether a batch that has been read may go back to the pool: its lists are small and common ones.
func reusable(b *peerv1.Batch) bool {
	in := b.Checks
	return in != nil && len(in.Define) == 0 && wire.Small(in) && len(in.RequestIds) == 0 && len(b.Callers) <= 1 &&
		len(b.Items) == 0
}

// work is a batch that is being carried out.
type work struct {
	sequence uint64
	ops      []received
	good     []*limiter.Op // operations without an Err
	longest  time.Duration // the longest time that a caller waits for one of them
}

// done empties a work and returns it to the pool.
func (s *Server) done(w *work) {
	clear(w.ops)
	clear(w.good)
	w.ops, w.good, w.longest = w.ops[:0], w.good[:0], 0
	s.works.Put(w)
}

// read unpacks a batch of the process with the boot number from. It returns an error when the batch is malformed.
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

// join finds or makes the session of a stream, and deletes sessions that are over.
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

// over says whether the session can be deleted. If so, it has dropped its replies.
func (s *session) over(now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open > 0 || now.Sub(s.left) <= rememberFor {
		return false
	}
	s.forgetLocked(func(*answer) bool { return true })
	return true
}

// forgetLocked drops the batches for which which returns true.
func (s *session) forgetLocked(which func(*answer) bool) {
	for seq, a := range s.answers {
		if which(a) {
			s.dropLocked(seq)
		}
	}
}

// dropLocked drops a batch, if there is one with that sequence.
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

// begin says whether a batch is to be carried out (fresh). If the batch was answered before, known is its reply. If it
// is being carried out, both are zero: finish writes the reply to out.
func (s *session) begin(b *peerv1.Batch, out *outlet, most int64,
	now time.Time) (fresh bool, known *peerv1.Reply, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch floor := max(s.floor, b.Acknowledged); {
	case b.Sequence <= floor:
		return false, nil, status.Errorf(codes.InvalidArgument, "sequence: %d is not above the acknowledged %d",
			b.Sequence, floor)
	case b.Sequence-floor > maxUnacknowledged:
		return false, nil, status.Errorf(codes.ResourceExhausted, "sequence: %d batches are unacknowledged",
			b.Sequence-floor)
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
			return false, nil, status.Errorf(codes.ResourceExhausted, "sequence: unacknowledged replies take %d bytes",
				s.all.Load())
		}
	}
	s.answers[b.Sequence] = &answer{to: out}
	return true, nil, nil
}

// replySize is about the most memory that a reply takes with its entry in answers. An element of a list takes up to
// eight bytes in memory for one on the wire.
func replySize(r *peerv1.Reply) int64 { return 256 + 8*int64(r.SizeVT()) }

// acknowledgeLocked drops the batches up to a sequence: the sender has their replies, or no longer needs them.
func (s *session) acknowledgeLocked(up uint64) {
	for seq := s.floor + 1; seq <= min(up, s.floor+maxUnacknowledged); seq++ { // there is none above
		s.dropLocked(seq)
	}
	s.floor = max(s.floor, up)
}

// finish keeps a reply and writes it, unless the sender has acknowledged the batch, that is, given it up.
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

// carryOut carries out a batch and replies. It waits for other nodes in a goroutine of its own, so that the stream's
// next batches are not delayed.
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
		// The work ends even if the stream breaks: the sender may ask for the reply on its next stream.
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
