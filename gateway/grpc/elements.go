package grpcapi

import (
	"strconv"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
)

// An element of a repeated field can take 2 bytes of a message and a hundred when it is decoded. So the elements of a caller's
// message are counted before it is decoded. The error is a *limit.Error.

// boundElements returns what checks the number of elements of a message of a caller; nil for those without repeated fields.
func boundElements(m proto.Message) func([]byte) error {
	switch m.(type) {
	case *weirv1.CheckRequest:
		return boundChecks
	case *weirv1.CheckStreamRequest:
		return boundStreamed
	}
	return nil
}

// smallMessage is the size up to which a message cannot have too many elements.
const smallMessage = 2 * limit.MaxBatch

func boundChecks(data []byte) error {
	if len(data) <= smallMessage {
		return nil
	}
	if checks := elements(data, 1); checks > limit.MaxBatch {
		return limit.ValidBatch(checks)
	}
	return nil
}

// elements counts the elements of a repeated field of messages, in a message that is not decoded yet.
func elements(data []byte, of protowire.Number) (all int) {
	_ = wire.Elements(data, 0, func(field protowire.Number, n int) error { // which returns what the function does
		if field == of {
			all += n
		}
		return nil
	})
	return all
}

// streamedFields are the repeated fields of a CheckStreamRequest by number, and streamedPacked those that are packed.
var streamedFields = [...]string{
	3: "define", 5: "key_lengths", 6: "targets", 7: "costs", 8: "partial", 9: "request_ids", 10: "timeouts_ms", 11: "trace_contexts",
}

const (
	streamedPacked = 1<<5 | 1<<6 | 1<<7 | 1<<8 | 1<<10
	// maxStreamed bounds each of them. It is above what is valid, because a request that is only somewhat too large is answered by
	// its sequence, and a stream with one beyond this bound ends.
	maxStreamed = 4 * max(limit.MaxBatch, wire.MaxTargets)
)

func boundStreamed(data []byte) error {
	if len(data) <= smallMessage {
		return nil
	}
	var counts [len(streamedFields)]int
	return wire.Elements(data, streamedPacked, func(field protowire.Number, n int) error {
		if int(field) >= len(streamedFields) || streamedFields[field] == "" {
			return nil
		}
		if counts[field] += n; counts[field] > maxStreamed {
			return &limit.Error{Kind: limit.TooLarge, Field: streamedFields[field], Message: "has more than " + strconv.Itoa(maxStreamed) + " elements"}
		}
		return nil
	})
}
