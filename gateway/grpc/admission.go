package grpcapi

import (
	"context"

	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/weirlimit/weir/internal/memory"
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

// admission is what one request takes of a gate.
type admission struct {
	gate  *memory.Gate
	size  int // of the message
	taken int64
}

// enter waits for room for a message, before it is decoded, in which a check takes so many bytes or more.
func (a *admission) enter(ctx context.Context, size, least int) error {
	a.size = size
	return a.take(ctx, a.need(min(size/least, limit.MaxBatch)))
}

// take waits for room for so many bytes.
func (a *admission) take(ctx context.Context, need int64) error {
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

func (a *admission) need(checks int) int64 { return int64(a.size)*perByte + int64(checks)*perCheck }

// keep gives back what the message does not take, now that it is decoded and known to have so many checks.
func (a *admission) keep(checks int) {
	if spare := a.taken - a.need(checks); spare > 0 {
		a.gate.Leave(spare)
		a.taken -= spare
	}
}

// leave gives everything back.
func (a *admission) leave() {
	a.gate.Leave(a.taken)
	a.taken = 0
}

// decode reads a message with what gRPC reads messages with.
func (a *admission) decode(ctx context.Context, read func(any) error, into proto.Message) error {
	m := &wire.Lenient{Message: into, Check: boundElements(into), Admit: func(size int) error { return a.enter(ctx, size, leastCheck) }}
	if err := read(m); err != nil {
		return err
	}
	return undecoded(m)
}
