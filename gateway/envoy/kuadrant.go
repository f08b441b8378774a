package envoy

import (
	"context"
	"errors"
	"slices"
	"time"

	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/gateway/envoy/kuadrantpb"
	"github.com/weirlimit/weir/limit"
)

// This file has Kuadrant's service on the limits of service.go. It charges with Always (charge) and reserves (hold),
// where ShouldRateLimit checks.

// kuadrant implements Kuadrant's service, which is Limitador's: a gateway checks or reserves before a request, and
// reports or commits the cost when the response has passed.
type kuadrant struct {
	kuadrantpb.UnimplementedRateLimitServiceServer
	*Service
}

const (
	codeOK      = ratelimitv3.RateLimitResponse_OK
	codeUnknown = ratelimitv3.RateLimitResponse_UNKNOWN // for a request without a domain
)

// CheckRateLimit says whether one more hit would be within all limits of a request, and charges nothing. As in
// Limitador, it ignores the request's hits and returns no statuses.
func (k *kuadrant) CheckRateLimit(ctx context.Context,
	in *ratelimitv3.RateLimitRequest) (*ratelimitv3.RateLimitResponse, error) {
	if in.GetDomain() == "" {
		return &ratelimitv3.RateLimitResponse{OverallCode: codeUnknown}, nil
	}
	all, err := k.matches(in)
	if err != nil {
		return nil, err
	}
	var looked []*asked
	for i := range all {
		if a := &all[i]; a.counts() && a.zero() {
			a.over = !a.shadow
		} else if a.counts() {
			looked = append(looked, a)
		}
	}
	if err := k.look(ctx, looked, false, 0); err != nil {
		return nil, err
	}
	return &ratelimitv3.RateLimitResponse{OverallCode: k.overall(all)}, nil
}

// Report charges the request's hits to all its limits, whether or not there is room, and answers OK. If an owner cannot
// be asked, it charges none. As in Limitador, it ignores the hits of descriptors, and 0 hits are 1.
func (k *kuadrant) Report(ctx context.Context,
	in *ratelimitv3.RateLimitRequest) (*ratelimitv3.RateLimitResponse, error) {
	if in.GetDomain() == "" {
		return &ratelimitv3.RateLimitResponse{OverallCode: codeUnknown}, nil
	}
	all, err := k.matches(in)
	if err != nil {
		return nil, err
	}
	hits := int64(max(in.GetHitsAddend(), 1))
	if err := k.charge(ctx, counted(all), hits); err != nil {
		return nil, err
	}
	k.tally(all, hits)
	return &ratelimitv3.RateLimitResponse{OverallCode: codeOK}, nil
}

// Reserve reserves an amount under all limits of a request, or under none when one of them has no room. What is not
// committed within the TTL is given back.
//
// Nothing is reserved under limits in shadow_mode or quota_mode. Limits in shadow_mode are ignored. Limits in
// quota_mode refuse only when none of them has room. An amount of 0 reserves nothing, and is refused while more is in
// use than a limit.
func (k *kuadrant) Reserve(ctx context.Context, in *kuadrantpb.ReserveRequest) (*kuadrantpb.ReserveResponse, error) {
	if in.GetDomain() == "" {
		return &kuadrantpb.ReserveResponse{Code: codeUnknown}, nil
	}
	all, err := k.matches(&ratelimitv3.RateLimitRequest{Domain: in.GetDomain(), Descriptors: in.GetDescriptors()})
	if err != nil {
		return nil, err
	}
	amount := clamp(in.GetAmount())
	var looked, reserved []*asked
	for i := range all {
		switch a := &all[i]; {
		case !a.counts() || a.shadow:
		case a.zero() && amount > 0:
			a.over = true
		case a.quota || amount == 0:
			looked = append(looked, a)
		default:
			reserved = append(reserved, a)
		}
	}
	if err := k.look(ctx, looked, true, amount); err != nil {
		return nil, err
	}
	id := ""
	if len(reserved) > 0 && k.overall(all) == codeOK {
		if id, err = k.hold(ctx, reserved, amount, reservationTTL(in)); err != nil {
			return nil, err
		}
	}
	for i := range all {
		if all[i].over {
			k.cfg.Count(all[i].metric, OverLimit, uint64(amount))
		}
	}
	return &kuadrantpb.ReserveResponse{Code: k.overall(all), ReservationId: id}, nil
}

// hold reserves an amount under all limits or none.
func (k *kuadrant) hold(ctx context.Context, list []*asked, amount int64, ttl time.Duration) (id string, err error) {
	reserves := make([]limit.Reserve, len(list))
	for i, a := range list {
		reserves[i] = limit.Reserve{Target: a.target, Amount: limit.Amount{Cost: amount}, TTL: ttl, Release: true}
	}
	d, err := k.cfg.Service.ReserveAll(ctx, reserves)
	if err != nil {
		return "", statusOf(err, list)
	}
	for i := range d.Decisions {
		list[i].over = !d.Decisions[i].Allowed
	}
	return d.ReservationID, nil
}

// Commit replaces what a reservation holds by the actual amount, which it charges to all limits of the request whether
// or not there is room. For limits without a reservation it is a Report.
func (k *kuadrant) Commit(ctx context.Context, in *kuadrantpb.CommitRequest) (*kuadrantpb.CommitResponse, error) {
	out := new(kuadrantpb.CommitResponse)
	if in.GetDomain() == "" {
		return out, nil
	}
	all, err := k.matches(&ratelimitv3.RateLimitRequest{Domain: in.GetDomain(), Descriptors: in.GetDescriptors()})
	if err != nil {
		return nil, err
	}
	amount := clamp(in.GetActualAmount())
	rest := counted(all)
	if in.GetReservationId() != "" {
		held := len(rest)
		if rest, err = k.settle(ctx, rest, in.GetReservationId(), amount); err != nil {
			return nil, err
		}
		out.ReservationReleased = len(rest) < held
	}
	if amount > 0 {
		if err := k.charge(ctx, rest, amount); err != nil {
			return nil, err // the part of the reservation that is not committed comes back after its TTL
		}
	}
	k.tally(all, amount)
	return out, nil
}

// settle commits a reservation: the amount as often as a limit is in the list. rest has the limits under which nothing
// is reserved.
func (k *kuadrant) settle(ctx context.Context, list []*asked, id string, amount int64) (rest []*asked, err error) {
	for len(list) > 0 {
		a := list[0]
		others := slices.DeleteFunc(slices.Clone(list), func(o *asked) bool { return same(&o.target, &a.target) })
		times := len(list) - len(others)
		cost := limit.Amount{Cost: clamp(uint64(times) * uint64(amount))}
		_, err := k.cfg.Service.Commit(ctx, limit.Commit{Target: a.target, Amount: cost, ReservationID: id})
		// An error of this field says that the reservation has ended or never was.
		if e, is := errors.AsType[*limit.Error](err); is && e.Field == "reservation_id" {
			rest = append(rest, slices.Repeat(list[:1], times)...)
		} else if err != nil {
			return nil, statusOf(err, list[:1])
		}
		list = others
	}
	return rest, nil
}

// same says whether two targets of a request are the same. Limits that requests bring are compared by value.
func same(a, b *limit.Target) bool {
	return a.Key == b.Key && a.Policy == b.Policy &&
		(a.Limit == b.Limit || a.Limit != nil && b.Limit != nil && *a.Limit == *b.Limit)
}

// charge charges a cost to all limits, or to none.
func (k *kuadrant) charge(ctx context.Context, list []*asked, cost int64) error {
	if len(list) == 0 {
		return nil
	}
	checks := make([]limit.Check, len(list))
	for i, a := range list {
		checks[i] = limit.Check{Target: a.target, Cost: cost, Always: true}
	}
	if _, err := k.cfg.Service.CheckAll(ctx, checks); err != nil {
		return statusOf(err, list)
	}
	return nil
}

// look sets over for the limits that have no room for an amount or, with always, have more in use than they allow.
func (k *kuadrant) look(ctx context.Context, list []*asked, always bool, amount int64) error {
	checks := make([]limit.Check, len(list))
	for i, a := range list {
		checks[i] = limit.Check{Target: a.target, Always: always}
	}
	return k.askEach(ctx, list, checks, func(a *asked, d *limit.Decision) {
		lacking := a.zero() && d.Remaining < 1 || d.Limit != algo.Unlimited && d.Remaining < amount
		a.over = (!d.Allowed || lacking && !d.FailedOpen) && !a.shadow
	})
}

// tally counts hits that were charged, for metrics.
func (k *kuadrant) tally(all []asked, hits int64) {
	for i := range all {
		if a := &all[i]; a.rule != nil {
			k.cfg.Count(a.metric, WithinLimit, uint64(hits))
		}
	}
}

// counted returns the descriptors of a request whose limits have a state.
func counted(all []asked) (list []*asked) {
	for i := range all {
		if a := &all[i]; a.counts() {
			list = append(list, a)
		}
	}
	return list
}

func clamp(amount uint64) int64 { return int64(min(amount, uint64(algo.MaxLimit))) }

// reservationTTL returns how long a request reserves. As in Limitador, a missing or invalid TTL is one minute.
func reservationTTL(in *kuadrantpb.ReserveRequest) time.Duration {
	if in.GetTtl() == nil || !in.GetTtl().IsValid() || in.GetTtl().AsDuration() < 0 {
		return limit.DefaultReservation
	}
	return min(max(in.GetTtl().AsDuration(), 1), limit.MaxReservation)
}
