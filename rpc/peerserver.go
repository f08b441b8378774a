package rpc

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/limiter"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
)

const (
	// rememberFor is how long the reply to a batch is kept for a sender that may ask again: as long as it may retry.
	rememberFor = 10 * time.Second
	// maxSessions bounds the sequence spaces remembered at a time: some for every node of the largest cluster.
	maxSessions = 1024
	// maxUnacknowledged bounds the batches of one sender that are being answered or remembered.
	maxUnacknowledged = 10_000
)

// Receiver carries out operations that peers send: see limiter.Limiter.Receive.
type Receiver interface {
	Receive(ops []*limiter.Op) (rest func(context.Context))
}

// PeerServerConfig is what a PeerServer needs. All fields are required.
type PeerServerConfig struct {
	Self         Node
	RingSettings uint64
	Receiver     Receiver
	// Inspect tells about this node.
	Inspect func() *peerv1.InspectResponse
	Logger  *slog.Logger
}

// PeerServer answers other nodes.
type PeerServer struct {
	peerv1.UnimplementedPeerServer
	cfg PeerServerConfig

	mu       sync.Mutex
	sessions map[sessionKey]*session
}

// NewPeerServer returns a PeerServer to be registered with a gRPC server.
func NewPeerServer(cfg PeerServerConfig) *PeerServer {
	return &PeerServer{cfg: cfg, sessions: make(map[sessionKey]*session)}
}

type sessionKey struct {
	boot, stream uint64
}

// session is one sender's sequence space. It outlives the stream it is served on, so that a batch that is sent again
// after a broken connection gets the reply that was made, and is not decided a second time.
type session struct {
	mu       sync.Mutex
	stream   peerv1.Peer_ForwardServer // nil while no stream is open
	open     int                       // streams being served; more than one while an old one has yet to notice its end
	left     time.Time                 // when the last stream ended
	answered map[uint64]*answer
	floor    uint64 // every batch up to it has been acknowledged
}

// answer is what is known of a batch: that it is being carried out, or its reply.
type answer struct {
	reply *peerv1.Reply // nil while it is being carried out
	at    time.Time     // of the reply
}

// Forward implements peerv1.PeerServer.
func (s *PeerServer) Forward(stream peerv1.Peer_ForwardServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	hello := first.GetHello()
	if err := s.accept(hello); err != nil {
		s.cfg.Logger.Warn("refused a peer's stream", "peer", hello.GetFromName(), "error", err)
		return err
	}
	sess, err := s.join(sessionKey{hello.FromBoot, hello.Stream}, stream)
	if err != nil {
		return err
	}
	defer sess.leave(stream)
	if err := stream.Send(&peerv1.ForwardReply{Body: &peerv1.ForwardReply_Welcome{Welcome: &peerv1.Welcome{Protocol: Protocol}}}); err != nil {
		return err
	}
	var handed sync.WaitGroup
	defer handed.Wait()
	for {
		in, err := stream.Recv()
		if err != nil {
			return nil // the sender is gone, or goes on with another stream
		}
		batch := in.GetBatch()
		if batch == nil {
			return status.Error(codes.InvalidArgument, "a Batch was expected")
		}
		if len(batch.Items) > maxBatch {
			return status.Errorf(codes.ResourceExhausted, "items: a batch holds at most %d, not %d", maxBatch, len(batch.Items))
		}
		fresh, err := sess.begin(batch)
		if err != nil {
			return err
		}
		if fresh {
			s.carryOut(stream.Context(), sess, batch, &handed)
		}
	}
}

// accept checks that the sender means this process and shares its idea of the ring.
func (s *PeerServer) accept(h *peerv1.Hello) error {
	switch {
	case h == nil:
		return status.Error(codes.InvalidArgument, "hello: the first message must be a Hello")
	case h.Protocol != Protocol:
		return status.Errorf(codes.FailedPrecondition, "protocol: this node speaks %d, not %d", Protocol, h.Protocol)
	case h.ToName != s.cfg.Self.Name || h.ToBoot != s.cfg.Self.Boot:
		return status.Errorf(codes.FailedPrecondition, "to: this is %s/%x, not %s/%x", s.cfg.Self.Name, s.cfg.Self.Boot, h.ToName, h.ToBoot)
	case h.RingSettings != s.cfg.RingSettings:
		return status.Error(codes.FailedPrecondition, "ring_settings: the nodes differ in ring settings or hash seed, and would not agree on who owns a key")
	}
	return nil
}

// join finds or makes the session and makes stream the one that replies go to.
func (s *PeerServer) join(k sessionKey, stream peerv1.Peer_ForwardServer) (*session, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	for k, sess := range s.sessions {
		if sess.over(now) {
			delete(s.sessions, k)
		}
	}
	sess, ok := s.sessions[k]
	if !ok {
		if len(s.sessions) >= maxSessions {
			return nil, status.Errorf(codes.ResourceExhausted, "stream: %d peers are being served already", maxSessions)
		}
		sess = &session{answered: make(map[uint64]*answer)}
		s.sessions[k] = sess
	}
	sess.mu.Lock()
	sess.stream = stream
	sess.open++
	sess.mu.Unlock()
	return sess, nil
}

func (s *session) over(now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open == 0 && now.Sub(s.left) > rememberFor
}

func (s *session) leave(stream peerv1.Peer_ForwardServer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open--
	s.left = time.Now()
	if s.stream == stream {
		s.stream = nil
	}
}

// begin reports whether a batch is to be carried out. One that was before is answered as it was then, now or when it is.
func (s *session) begin(b *peerv1.Batch) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b.Acknowledged > s.floor {
		s.floor = b.Acknowledged
		for seq := range s.answered {
			if seq <= s.floor {
				delete(s.answered, seq)
			}
		}
	}
	if b.Sequence <= s.floor {
		return false, status.Errorf(codes.InvalidArgument, "sequence: %d is not above the acknowledged %d", b.Sequence, s.floor)
	}
	if a, ok := s.answered[b.Sequence]; ok {
		if a.reply != nil {
			s.sendLocked(a.reply)
		}
		return false, nil
	}
	if len(s.answered) >= maxUnacknowledged {
		s.forgetLocked(time.Now())
		if len(s.answered) >= maxUnacknowledged {
			return false, status.Errorf(codes.ResourceExhausted, "sequence: %d batches are unacknowledged", len(s.answered))
		}
	}
	s.answered[b.Sequence] = &answer{}
	return true, nil
}

// forgetLocked drops replies that no sender may ask for any more.
func (s *session) forgetLocked(now time.Time) {
	for seq, a := range s.answered {
		if a.reply != nil && now.Sub(a.at) > rememberFor {
			delete(s.answered, seq)
		}
	}
}

func (s *session) finish(r *peerv1.Reply) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if a, ok := s.answered[r.Sequence]; ok {
		a.reply, a.at = r, time.Now()
	}
	s.sendLocked(r)
}

// sendLocked writes to the present stream. An error needs no handling: the reading side of the stream sees it too, and
// the sender asks again.
func (s *session) sendLocked(r *peerv1.Reply) {
	if s.stream != nil {
		_ = s.stream.Send(&peerv1.ForwardReply{Body: &peerv1.ForwardReply_Reply{Reply: r}})
	}
}

// carryOut decides a batch and replies. Only what must be asked of yet another node is waited for beside the stream, so
// that it does not hold up what comes after.
func (s *PeerServer) carryOut(ctx context.Context, sess *session, b *peerv1.Batch, handed *sync.WaitGroup) {
	arrived := time.Now()
	ops := make([]*limiter.Op, len(b.Items))
	good := make([]*limiter.Op, 0, len(b.Items))
	var longest time.Duration
	for i, item := range b.Items {
		ops[i] = operation(item)
		if ops[i].Outcome.Err == nil {
			good = append(good, ops[i])
		}
		longest = max(longest, min(time.Duration(item.TimeoutNs&(1<<62-1)), time.Minute))
	}
	rest := s.cfg.Receiver.Receive(good)
	if rest == nil {
		sess.finish(reply(b, ops))
		return
	}
	handed.Go(func() {
		// The sender's connection may break meanwhile; what was begun is finished, for it may ask again.
		ctx, cancel := context.WithDeadline(context.WithoutCancel(ctx), arrived.Add(longest))
		defer cancel()
		rest(ctx)
		sess.finish(reply(b, ops))
	})
}

func reply(b *peerv1.Batch, ops []*limiter.Op) *peerv1.Reply {
	r := &peerv1.Reply{Sequence: b.Sequence, Items: make([]*peerv1.ItemReply, len(ops))}
	for i, op := range ops {
		r.Items[i] = protoOutcome(op)
	}
	return r
}

// Inspect implements peerv1.PeerServer.
func (s *PeerServer) Inspect(context.Context, *peerv1.InspectRequest) (*peerv1.InspectResponse, error) {
	return s.cfg.Inspect(), nil
}
