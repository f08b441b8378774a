package wire

import (
	"errors"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/timezone"
	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// Cost returns the cost of a message; a missing cost is 1, not a peek.
func Cost(c *int64) int64 {
	if c == nil {
		return 1
	}
	return *c
}

// Target converts a target. The error names the field.
func Target(t *weirv1.Target) (limit.Target, *limit.Error) {
	out := limit.Target{Policy: t.GetPolicy(), Namespace: t.GetNamespace(), Key: t.GetKey()}
	if l := t.GetLimit(); l != nil {
		inline, err := inlineLimit(l)
		if err != nil {
			return out, err
		}
		out.Limit = inline
	}
	return out, nil
}

func inlineLimit(l *weirv1.Limit) (*algo.Limit, *limit.Error) {
	if l.Algorithm <= 0 || int(l.Algorithm) > int(algo.Concurrency) {
		return nil, limit.NewError(limit.Invalid, "limit.algorithm", "is missing or unknown")
	}
	if l.Period < 0 || int(l.Period) > int(algo.Epoch) {
		return nil, limit.NewError(limit.Invalid, "limit.period", "is unknown")
	}
	if l.Anchor < 0 || l.Anchor > 31 {
		return nil, limit.NewError(limit.Invalid, "limit.anchor", "must be a day of the month, 1 to 31")
	}
	out := &algo.Limit{
		Algorithm: algo.Algorithm(l.Algorithm), Limit: l.Limit, Capacity: l.Capacity, Window: time.Duration(l.WindowNs),
		Slots: l.Slots, Period: algo.Period(l.Period), CountDenied: l.CountDenied,
		CarryDebt: l.CarryDebt, MaxDebt: l.MaxDebt, Anchor: int8(l.Anchor),
	}
	if l.TimeZone != "" {
		zone, err := Zone(l.TimeZone)
		if err != nil {
			return nil, err
		}
		out.Zone = zone
	}
	return out, nil
}

// Zone returns the time zone of an inline limit.
func Zone(name string) (*time.Location, *limit.Error) {
	zone, err := timeZones.Load(name)
	if err != nil {
		return nil, limit.NewError(limit.Invalid, "limit.time_zone", err.Error())
	}
	return zone, nil
}

// timeZones has the time zones that inline limits have named.
var timeZones timezone.Cache

// ProtoTarget is the inverse of Target.
func ProtoTarget(t limit.Target) *weirv1.Target {
	out := &weirv1.Target{Policy: t.Policy, Namespace: t.Namespace, Key: t.Key}
	if l := t.Limit; l != nil {
		out.Limit = &weirv1.Limit{
			Algorithm: weirv1.Algorithm(l.Algorithm), Limit: l.Limit, Capacity: l.Capacity, WindowNs: int64(l.Window),
			Slots: l.Slots, Period: weirv1.Period(l.Period), CountDenied: l.CountDenied,
			CarryDebt: l.CarryDebt, MaxDebt: l.MaxDebt, Anchor: int32(l.Anchor),
		}
		if l.Zone != nil {
			out.Limit.TimeZone = l.Zone.String()
		}
	}
	return out
}

// retryAfter returns the message's value for d: nil for Never, otherwise wait, which it sets.
func retryAfter(d time.Duration, wait *int64) *int64 {
	if d == algo.Never {
		return nil
	}
	*wait = int64(d)
	return wait
}

func fromRetryAfter(ns *int64) time.Duration {
	if ns == nil {
		return algo.Never
	}
	return time.Duration(*ns)
}

// ProtoDecision converts a decision.
func ProtoDecision(d *limit.Decision) *weirv1.Decision {
	out := new(weirv1.Decision)
	SetDecision(out, d, new(int64))
	return out
}

// SetDecision fills in an empty message. It keeps no reference to d. wait is memory for RetryAfterNs, and belongs to
// the message.
func SetDecision(out *weirv1.Decision, d *limit.Decision, wait *int64) {
	out.RetryAfterNs = retryAfter(d.RetryAfter, wait)
	out.Policy, out.Allowed, out.Granted, out.Limit, out.Remaining = d.Policy, d.Allowed, d.Granted, d.Limit,
		d.Remaining
	out.ResetAfterNs, out.DelayNs, out.WindowNs = int64(d.ResetAfter), int64(d.Delay), int64(d.Window)
	out.LeaseId, out.ReservationId, out.RequestId = d.LeaseID, d.ReservationID, d.RequestID
	out.Shadow, out.Degraded, out.FailedOpen, out.FailedClosed = d.Shadow, d.Degraded, d.FailedOpen, d.FailedClosed
	out.NearLimit, out.Banned, out.RetryAfterEstimated = d.NearLimit, d.Banned, d.RetryAfterEstimated
	out.RememberForNs = int64(d.RememberFor)
	out.Limits = ProtoLimits(d.Limits)
}

// ProtoLimits converts the limits of a policy that has several; without limits it returns nil.
func ProtoLimits(limits []limit.LimitStatus) []*weirv1.LimitStatus {
	if len(limits) == 0 {
		return nil
	}
	room := make([]struct {
		status weirv1.LimitStatus
		wait   int64
	}, len(limits))
	out := make([]*weirv1.LimitStatus, len(limits))
	for i := range limits {
		s, to := &limits[i], &room[i]
		out[i] = &to.status
		out[i].Limit, out[i].WindowNs = s.Limit, int64(s.Window)
		out[i].Remaining, out[i].ResetAfterNs = s.Remaining, int64(s.ResetAfter)
		out[i].RetryAfterNs = retryAfter(s.RetryAfter, &to.wait)
	}
	return out
}

// Decision is the inverse of ProtoDecision.
func Decision(d *weirv1.Decision) limit.Decision {
	out := limit.Decision{
		Policy: d.Policy, Allowed: d.Allowed, Granted: d.Granted, Limit: d.Limit, Remaining: d.Remaining,
		RetryAfter: fromRetryAfter(d.RetryAfterNs), ResetAfter: time.Duration(d.ResetAfterNs),
		Delay: time.Duration(d.DelayNs), LeaseID: d.LeaseId, ReservationID: d.ReservationId, RequestID: d.RequestId,
		Window: time.Duration(d.WindowNs), Shadow: d.Shadow, Degraded: d.Degraded, FailedOpen: d.FailedOpen,
		FailedClosed: d.FailedClosed, NearLimit: d.NearLimit, Banned: d.Banned,
		RetryAfterEstimated: d.RetryAfterEstimated, RememberFor: time.Duration(d.RememberForNs),
	}
	out.Limits = Limits(d.Limits)
	return out
}

// Limits is the inverse of ProtoLimits.
func Limits(list []*weirv1.LimitStatus) (out []limit.LimitStatus) {
	for _, s := range list {
		out = append(out, limit.LimitStatus{
			Limit: s.GetLimit(), Window: time.Duration(s.GetWindowNs()), Remaining: s.GetRemaining(),
			RetryAfter: fromRetryAfter(s.RetryAfterNs), ResetAfter: time.Duration(s.GetResetAfterNs()),
		})
	}
	return out
}

// kindCodes maps kinds of errors to gRPC codes.
var kindCodes = [...]codes.Code{
	limit.Invalid: codes.InvalidArgument, limit.NotFound: codes.NotFound, limit.TooLarge: codes.ResourceExhausted,
	limit.Unavailable: codes.Unavailable, limit.Denied: codes.PermissionDenied,
	limit.Unauthenticated: codes.Unauthenticated,
}

// Code returns the gRPC code of a kind of error.
func Code(k limit.Kind) codes.Code {
	if k == 0 || int(k) >= len(kindCodes) {
		return codes.Internal
	}
	return kindCodes[k]
}

// Kind is the inverse of Code; 0 for a code that no kind has.
func Kind(c codes.Code) limit.Kind { return limit.Kind(slices.Index(kindCodes[1:], c) + 1) }

// Status converts an error of a limit.Service to a gRPC status. The message of a *limit.Error begins with the field.
// Nil stays nil.
func Status(err error) error {
	if e, ok := errors.AsType[*limit.Error](err); ok {
		return status.Error(Code(e.Kind), e.Error())
	}
	return status.FromContextError(err).Err()
}

// ProtoError converts an error for another node.
func ProtoError(e *limit.Error) *weirv1.Error {
	return &weirv1.Error{Code: int32(Code(e.Kind)), Field: e.Field, Message: e.Message}
}
