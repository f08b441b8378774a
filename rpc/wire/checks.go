package wire

import (
	"fmt"
	"strconv"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// This file has the form of checks and decisions in CheckStreamRequest and CheckStreamResponse, for clients' streams
// and nodes' streams: one list for each field. A list has one element for each check, or one element that holds for all
// checks, or none, in which case the field's default holds for all.

// At returns element i of a list, or otherwise when the list is empty. The list must fit (Fits) a number of checks
// above i.
func At[T any](list []T, i int, otherwise T) T {
	switch len(list) {
	case 0:
		return otherwise
	case 1:
		return list[0]
	}
	return list[i]
}

// Fits says whether a list has a valid length for n checks.
func Fits[T any](list []T, n int) bool { return len(list) <= 1 || len(list) == n }

// Add adds the value v of check i of n to a list. The calls for one list start at i 0 with an empty list, and leave out
// no i. The list gets as few elements as its values allow.
func Add[T comparable](list *[]T, i, n int, v, otherwise T) {
	l := *list
	if len(l) == 0 && v == otherwise || len(l) == 1 && i > 0 && l[0] == v {
		return // as in most lists
	}
	*list = add(l, i, n, v, otherwise)
}

func add[T comparable](list []T, i, n int, v, otherwise T) []T {
	if i > 0 && len(list) <= 1 {
		same := At(list, 0, otherwise)
		if cap(list) < n {
			list = make([]T, 0, n)
		}
		for list = list[:0]; len(list) < i; {
			list = append(list, same)
		}
	}
	return append(list, v)
}

// AddCheck adds check i of n to a request. number is the number of its target.
func AddCheck(in *weirv1.CheckStreamRequest, i, n int, number uint32, c *limit.Check) {
	in.Keys = append(in.Keys, c.Key...)
	in.KeyLengths = append(in.KeyLengths, uint32(len(c.Key)))
	Add(&in.Targets, i, n, number, 0)
	Add(&in.Costs, i, n, c.Cost, 1)
	Add(&in.Partial, i, n, c.Partial, false)
	Add(&in.RequestIds, i, n, c.RequestID, "")
}

// AddTrace adds the trace context of check i to a request. An empty one takes no room unless an earlier check has one.
func AddTrace(in *weirv1.CheckStreamRequest, i int, trace string) {
	if trace != "" || len(in.TraceContexts) > 0 {
		in.TraceContexts = append(append(in.TraceContexts, make([][]byte, i-len(in.TraceContexts))...), []byte(trace))
	}
}

// ReadChecks reads check i of a request into to(i), for each check. target returns the target with a number. The error
// names the field.
func ReadChecks(in *weirv1.CheckStreamRequest,
	target func(number uint64) (limit.Target, bool), to func(i int) *limit.Check) *limit.Error {
	n := len(in.KeyLengths)
	for _, list := range [...]struct {
		field string
		fits  bool
	}{
		{"targets", Fits(in.Targets, n)}, {"costs", Fits(in.Costs, n)}, {"partial", Fits(in.Partial, n)},
		{"request_ids", Fits(in.RequestIds, n)}, {"timeouts_ms", Fits(in.TimeoutsMs, n)},
		{"trace_contexts", Fits(in.TraceContexts, n)},
	} {
		if !list.fits {
			return limit.NewError(limit.Invalid, list.field,
				fmt.Sprintf("must have one element for each of the %d checks, one for all, or none", n))
		}
	}
	keys := string(in.Keys) // one copy for all checks, because the request's bytes are reused
	for i, length := range in.KeyLengths {
		if uint64(length) > uint64(len(keys)) {
			return limit.NewError(limit.Invalid, "key_lengths",
				fmt.Sprintf("says that check %d has a key of %d bytes, where keys has %d left", i, length, len(keys)))
		}
		number := At(in.Targets, i, 0)
		of, ok := target(uint64(number))
		if !ok {
			return limit.NewError(limit.Invalid, "targets",
				fmt.Sprintf("names number %d, which this stream has not defined", number))
		}
		c := to(i)
		c.Target, c.Cost = of, At(in.Costs, i, 1)
		c.Partial, c.RequestID = At(in.Partial, i, false), At(in.RequestIds, i, "")
		c.Key, keys = keys[:length], keys[length:]
	}
	if keys != "" {
		return limit.NewError(limit.Invalid, "keys", "has "+strconv.Itoa(len(keys))+" bytes more than key_lengths says")
	}
	return nil
}

// Small says whether the lists of a request are small enough to be kept for the next request of any stream. Larger
// lists are left to the garbage collector, so that a few large requests do not hold memory.
func Small(in *weirv1.CheckStreamRequest) bool {
	const most, keys = 2 * limit.MaxBatch, 64 << 10 // twice the elements of the largest batch, because append rounds up
	return cap(in.Define) <= most && cap(in.Keys) <= keys && cap(in.KeyLengths) <= most && cap(in.Targets) <= most &&
		cap(in.Costs) <= most && cap(in.Partial) <= most && cap(in.RequestIds) <= most &&
		cap(in.TimeoutsMs) <= most && len(in.TraceContexts) == 0
}

// number is a field of a decision that holds a number, and its list.
type number struct {
	field *int64
	list  *[]int64
}

// numbers returns all such fields. wait stands for RetryAfter, because Never has a flag of its own.
func numbers(d *limit.Decision, wait *int64, out *weirv1.CheckStreamResponse) [8]number {
	return [...]number{
		{&d.Granted, &out.Granted}, {&d.Limit, &out.Limit}, {(*int64)(&d.Window), &out.WindowNs},
		{&d.Remaining, &out.Remaining}, {wait, &out.RetryAfterNs}, {(*int64)(&d.ResetAfter), &out.ResetAfterNs},
		{(*int64)(&d.Delay), &out.DelayNs}, {(*int64)(&d.RememberFor), &out.RememberForNs},
	}
}

// truths returns the boolean fields of a decision, in the order of flags.
func truths(d *limit.Decision) [8]*bool {
	return [...]*bool{&d.Allowed, &d.Shadow, &d.Degraded, &d.FailedOpen, &d.FailedClosed, &d.NearLimit, &d.Banned,
		&d.RetryAfterEstimated}
}

var flags = [8]weirv1.StreamFlag{
	weirv1.StreamFlag_STREAM_FLAG_ALLOWED, weirv1.StreamFlag_STREAM_FLAG_SHADOW, weirv1.StreamFlag_STREAM_FLAG_DEGRADED,
	weirv1.StreamFlag_STREAM_FLAG_FAILED_OPEN, weirv1.StreamFlag_STREAM_FLAG_FAILED_CLOSED,
	weirv1.StreamFlag_STREAM_FLAG_NEAR_LIMIT,
	weirv1.StreamFlag_STREAM_FLAG_BANNED, weirv1.StreamFlag_STREAM_FLAG_RETRY_AFTER_ESTIMATED,
}

// NewDecisions returns an empty response whose lists have room for one element each. Most lists need no more.
func NewDecisions() *weirv1.CheckStreamResponse {
	room := new(struct {
		out   weirv1.CheckStreamResponse
		ones  [8]int64
		flags [1]uint32
	})
	room.out.Flags = room.flags[:0]
	var d limit.Decision
	var wait int64
	for i, of := range numbers(&d, &wait, &room.out) {
		*of.list = room.ones[i : i : i+1]
	}
	return &room.out
}

// AddDecision adds the decision on a check as element i of n to a response. check is the check's number in out.Limits.
// It leaves out the policy's name and the request id, which the reader knows, and keeps no reference to d.
func AddDecision(out *weirv1.CheckStreamResponse, i, n int, check uint32, d *limit.Decision) {
	var sum weirv1.StreamFlag
	for at, set := range truths(d) {
		if *set {
			sum |= flags[at]
		}
	}
	wait := int64(d.RetryAfter)
	if d.RetryAfter == algo.Never {
		wait, sum = 0, sum|weirv1.StreamFlag_STREAM_FLAG_NEVER
	}
	Add(&out.Flags, i, n, uint32(sum), 0)
	for _, of := range numbers(d, &wait, out) {
		Add(of.list, i, n, *of.field, 0)
	}
	if len(d.Limits) > 0 {
		out.Limits = append(out.Limits, &weirv1.StreamLimits{Check: check, Limits: ProtoLimits(d.Limits)})
	}
}

// DecisionsFit says whether the lists of a response have valid lengths for n decisions.
func DecisionsFit(out *weirv1.CheckStreamResponse, n int) bool {
	var d limit.Decision
	var wait int64
	fit := Fits(out.Flags, n)
	for _, of := range numbers(&d, &wait, out) {
		fit = fit && Fits(*of.list, n)
	}
	return fit
}

// ReadDecision reads element i of a response into d, without its Limits. The response must pass DecisionsFit.
func ReadDecision(out *weirv1.CheckStreamResponse, i int, d *limit.Decision) {
	sum := weirv1.StreamFlag(At(out.Flags, i, 0))
	for at, set := range truths(d) {
		*set = sum&flags[at] != 0
	}
	var wait int64
	for _, of := range numbers(d, &wait, out) {
		*of.field = At(*of.list, i, 0)
	}
	if d.RetryAfter = time.Duration(wait); sum&weirv1.StreamFlag_STREAM_FLAG_NEVER != 0 {
		d.RetryAfter = algo.Never
	}
}
