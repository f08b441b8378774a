package grpc

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/rpc/wire"
)

// The estimates of the memory that a request takes while it is carried out, in bytes.
const (
	// perByte is for each byte of the message: the bytes received, their copy in a buffer of a power of two, the
	// decoded message and the copy of its keys.
	perByte = 6
	// perCheck is for each check of a batch: the check, its operation, its result and its answer.
	perCheck = 3 << 9
	// lightRequest is the size up to which a request does not enter the gate. The number of calls bounds such requests.
	lightRequest = 16 << 10
	// The least bytes of a check in a CheckRequest and in a CheckStreamRequest, and of a loan in a BorrowRequest.
	leastCheck, leastStreamCheck, leastLoan = 10, 2, 2
)

// callMemory is what one request holds of a gate.
type callMemory struct {
	gate  *admission.Gate
	size  int // of the message, in bytes
	taken int64
}

// enter waits until the gate has room for a message of size bytes, before it is decoded. least is the least size of a
// check in the message. Enter assumes the worst that the codec can decode from so many bytes. Its error is a gRPC
// status.
func (a *callMemory) enter(ctx context.Context, size, least int) error {
	a.size = size
	need := max(a.need(min(size/least, limit.MaxBatch)), a.need(0)+admission.Parts(size))
	if need <= lightRequest {
		return nil
	}
	taken, err := a.gate.Enter(ctx, need)
	if err != nil {
		return status.FromContextError(err).Err()
	}
	a.taken = taken
	return nil
}

func (a *callMemory) need(checks int) int64 { return int64(a.size)*perByte + int64(checks)*perCheck }

// keep returns the part that the decoded message does not need, now that its number of checks is known.
func (a *callMemory) keep(checks int) {
	if spare := a.taken - a.need(checks); spare > 0 {
		a.gate.Leave(spare)
		a.taken -= spare
	}
}

// leave returns everything.
func (a *callMemory) leave() {
	a.gate.Leave(a.taken)
	a.taken = 0
}

// admitted wraps the handler of a unary method: a request waits for room in the gate before it is decoded, and holds it
// until it is answered. A request that cannot be decoded is answered INVALID_ARGUMENT; gRPC's own answer, INTERNAL,
// would blame the server.
func admitted(handler grpc.MethodHandler, gate *admission.Gate) grpc.MethodHandler {
	return func(srv any, ctx context.Context, dec func(any) error, i grpc.UnaryServerInterceptor) (any, error) {
		a := callMemory{gate: gate}
		defer a.leave()
		return handler(srv, ctx, func(v any) error {
			m := &wire.Lenient{Message: v.(proto.Message),
				Admit: func(size int) error { return a.enter(ctx, size, leastCheck) }}
			if err := dec(m); err != nil {
				return err
			}
			return undecoded(m)
		}, i)
	}
}

// Admitted returns a registrar for unary services of other front ends. Their requests wait for room in the gate and
// hold it as those of Weir's service do.
func Admitted(r grpc.ServiceRegistrar, gate *admission.Gate) grpc.ServiceRegistrar {
	return admission.Wrapped{To: r, Wrap: func(_ string, handler grpc.MethodHandler) grpc.MethodHandler {
		return admitted(handler, gate)
	}}
}
