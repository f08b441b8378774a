package peer

import (
	"context"
	"errors"
	"io"
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
//	Forward   checks the Hello, and ends the stream when its connection is too old
//	serve     reads batches one after another; work.read makes operations of each
//	carryOut  has the Receiver carry it out; what waits for another node continues in a goroutine of its own
//	send      writes the reply
//
// A batch must never be carried out twice. A Forwarder repeats a batch only after Forward has returned nil. Forward
// returns nil only when every batch that it has begun has its reply on the stream.

const (
	// maxStreams bounds the streams that are served at a time: several for every node of the largest cluster.
	maxStreams = 1024
	// maxTimeout bounds how long an operation may wait for another node, whatever its sender says.
	maxTimeout = time.Minute
)

var errPanicked = status.Error(codes.Internal, "a batch could not be carried out because of a mistake in this node")

// Receiver carries out operations of peers, as limiter.Limiter.Receive does: rest waits for what cannot be decided at
// once, or is nil.
type Receiver interface {
	Receive(ops []*limiter.Op) (rest func(context.Context))
}

// ServerConfig is what a Server needs. All fields are required unless their comments, or those of transport.Config, say
// otherwise.
type ServerConfig struct {
	transport.Config
	Receiver Receiver
	// Inspect describes this node, for status pages.
	Inspect func() *peerv1.InspectResponse
	// Activity says what this node has decided lately. Describe describes the state of a key for which this node
	// decides.
	Activity func(*peerv1.ActivityRequest) *peerv1.ActivityResponse
	Describe func(*peerv1.DescribeRequest) (*peerv1.DescribeResponse, error)
	// Panicked, when set, is called with a panic of a batch. The batch gets no reply. Nil: the panic is not recovered.
	Panicked func(*panics.Error)
	// Identify says which process this is.
	Identify func() *peerv1.IdentifyResponse
}

// Server implements peerv1.PeerServer. Its methods are safe for concurrent use.
type Server struct {
	peerv1.UnimplementedPeerServer
	cfg ServerConfig

	works   sync.Pool    // of *work
	streams atomic.Int64 // being served
	waiting atomic.Int64 // batches that carryOut has handed to a goroutine and not answered
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
	return &Server{cfg: cfg, works: sync.Pool{New: func() any { return new(work) }}}
}

// incoming is one stream of a sender.
type incoming struct {
	peerv1.Peer_ForwardServer
	from uint64 // the boot number of the sender

	reading sync.Mutex // held while a batch is begun
	over    bool       // no batch is begun any more

	writing    sync.Mutex     // held while a reply is written
	unanswered int            // batches that were begun and have no reply on the stream; guarded by writing
	handed     sync.WaitGroup // batches that wait for other nodes
}

// send writes a reply. It ignores errors: serve sees the broken stream as well.
func (in *incoming) send(r *peerv1.Reply) {
	in.writing.Lock()
	defer in.writing.Unlock()
	if in.Send(&peerv1.ForwardReply{Body: &peerv1.ForwardReply_Reply{Reply: r}}) == nil {
		in.unanswered--
	}
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
	if s.streams.Add(1) > maxStreams {
		s.streams.Add(-1)
		return status.Errorf(codes.ResourceExhausted, "%d streams are being served already", maxStreams)
	}
	defer s.streams.Add(-1)
	if err := stream.Send(&peerv1.ForwardReply{Body: &peerv1.ForwardReply_Welcome{Welcome: welcome}}); err != nil {
		return err
	}
	in := &incoming{Peer_ForwardServer: stream, from: hello.FromBoot}
	served := make(chan error, 1)
	go func() {
		err := errPanicked
		panics.Tell(s.cfg.Panicked, func() { err = s.serve(in) })
		served <- err
	}()
	select {
	case err = <-served:
	case <-stream.Context().Done(): // the connection is too old, or broken; serve may wait for its next batch
		in.reading.Lock()
		in.over = true
		in.reading.Unlock()
	}
	in.handed.Wait()
	if err != nil {
		s.cfg.Logger.Warn("peer stream ended", "carries", "operations", "peer", hello.FromName, "error", err)
	} else if in.unanswered > 0 {
		err = errPanicked // or the stream is broken, and nobody hears of it
	}
	return err
}

// serve carries out batches until the stream ends. It returns an error when the sender broke a rule.
func (s *Server) serve(in *incoming) error {
	var next peerv1.ForwardRequest
	var names numberedTargets
	for {
		err := in.RecvMsg(&next)
		switch {
		case errors.Is(err, io.EOF) || in.Context().Err() != nil:
			return nil // the sender is gone, or goes on with another stream
		case err != nil:
			return err // a malformed message
		}
		batch := next.GetBatch()
		if batch == nil {
			return status.Error(codes.InvalidArgument, "a Batch was expected")
		}
		w := s.works.Get().(*work)
		if err := w.read(batch, in.from, &names); err != nil {
			return err
		}
		if reusable(batch) {
			batch.ReturnToVTPool()
		}
		s.carryOut(in, w)
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
		if op.Kind == limiter.OpBorrow && !op.Loan.Forwarded {
			op.Loan.Report.ID.Borrower = from // no node borrows in another's name
		}
		if op.Outcome.Err == nil {
			w.good = append(w.good, op)
		}
		w.longest = max(w.longest, op.Left)
	}
	return nil
}

// carryOut carries out a batch and replies. It waits for other nodes in a goroutine of its own, so that the stream's
// next batches are not delayed.
func (s *Server) carryOut(in *incoming, w *work) {
	in.reading.Lock()
	defer in.reading.Unlock()
	if in.over {
		return // the sender repeats the batch
	}
	in.writing.Lock() // waits for the sender to read, so that few replies wait for one that does not
	in.unanswered++
	in.writing.Unlock()
	rest := s.cfg.Receiver.Receive(w.good)
	if rest == nil {
		in.send(reply(w.sequence, w.ops))
		s.done(w)
		return
	}
	s.waiting.Add(1)
	in.handed.Go(func() {
		defer s.waiting.Add(-1)
		// The work goes on when the stream's connection is too old: Forward waits for the reply.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(in.Context()), w.longest)
		defer cancel()
		panics.Tell(s.cfg.Panicked, func() {
			rest(ctx)
			in.send(reply(w.sequence, w.ops))
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
