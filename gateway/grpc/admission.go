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

// What requests take while they are carried out, in bytes, about.
const (
	// perByte is for each byte of a message: it is put together from what was received, in a power of two, decoded, and its
	// keys are copied.
	perByte = 6
	// perCheck is a check of a batch with its operation, its result and its answer.
	perCheck = 3 << 9
	// lightRequest is what a request may take that is not counted: calls are bounded by their number.
	lightRequest = 16 << 10
	// The fewest bytes that a check of a CheckRequest takes, of a CheckStreamRequest, and a loan of a BorrowRequest.
	leastCheck, leastStreamCheck, leastLoan = 10, 2, 2
)

// callMemory is what one request takes of a gate.
type callMemory struct {
	gate  *admission.Gate
	size  int // of the message
	taken int64
}

// enter waits for room for a message, before it is decoded, in which a check takes so many bytes or more. The message may be anything that
// the codec decodes.
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

// keep gives back what the message does not take, now that it is decoded and known to have so many checks.
func (a *callMemory) keep(checks int) {
	if spare := a.taken - a.need(checks); spare > 0 {
		a.gate.Leave(spare)
		a.taken -= spare
	}
}

// leave gives everything back.
func (a *callMemory) leave() {
	a.gate.Leave(a.taken)
	a.taken = 0
}

// admitted is the handler of a unary method whose requests wait for room before they are decoded, and keep it until they are answered. A
// request that cannot be decoded is answered INVALID_ARGUMENT, where gRPC's own answer (INTERNAL) would blame the server.
func admitted(handler grpc.MethodHandler, gate *admission.Gate) grpc.MethodHandler {
	return func(srv any, ctx context.Context, dec func(any) error, i grpc.UnaryServerInterceptor) (any, error) {
		a := callMemory{gate: gate}
		defer a.leave()
		return handler(srv, ctx, func(v any) error {
			m := &wire.Lenient{Message: v.(proto.Message), Admit: func(size int) error { return a.enter(ctx, size, leastCheck) }}
			if err := dec(m); err != nil {
				return err
			}
			return undecoded(m)
		}, i)
	}
}

// Admitted returns a registrar for unary services of other front ends than Weir's own: their requests wait for room in the gate before
// they are decoded, and keep it until they are answered, as those of Weir's service do.
func Admitted(r grpc.ServiceRegistrar, gate *admission.Gate) grpc.ServiceRegistrar {
	return registrar{r, gate}
}

type registrar struct {
	to   grpc.ServiceRegistrar
	gate *admission.Gate
}

// RegisterService implements ServiceRegistrar.
func (r registrar) RegisterService(desc *grpc.ServiceDesc, impl any) {
	bounded := *desc
	bounded.Methods = nil
	for _, m := range desc.Methods {
		m.Handler = admitted(m.Handler, r.gate)
		bounded.Methods = append(bounded.Methods, m)
	}
	r.to.RegisterService(&bounded, impl)
}
