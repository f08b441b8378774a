package envoy

import (
	"context"
	"errors"
	"slices"
	"time"

	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/gateway/envoy/kuadrantpb"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/rpc/wire"
)

// kuadrant implements Limitador's service for gateways that ask before a request, or reserve what it may cost, and report what it has
// cost when the response has passed.
type kuadrant struct {
	kuadrantpb.UnimplementedRateLimitServiceServer
	*Service
}

const (
	codeOK      = ratelimitv3.RateLimitResponse_OK
	codeUnknown = ratelimitv3.RateLimitResponse_UNKNOWN // of a request without a domain
)

// CheckRateLimit says whether one more hit would be within all limits of a request, and counts nothing. As in the original the
// request's hits have no part in it, and there are no statuses.
func (k *kuadrant) CheckRateLimit(ctx context.Context, in *ratelimitv3.RateLimitRequest) (*ratelimitv3.RateLimitResponse, error) {
	if in.GetDomain() == "" {
		return &ratelimitv3.RateLimitResponse{OverallCode: codeUnknown}, nil
	}
	all, namespace, err := k.counted(in.GetDomain(), in.GetDescriptors())
	if err != nil {
		return nil, err
	}
	var checks []limit.Check
	var places []int
	for i := range all {
		switch a := &all[i]; {
		case !a.counts():
		case a.zero():
			a.over = !a.shadow
		default:
			checks, places = append(checks, limit.Check{Target: a.target(namespace)}), append(places, i)
		}
	}
	if err := k.look(ctx, all, checks, places, 0); err != nil {
		return nil, err
	}
	return &ratelimitv3.RateLimitResponse{OverallCode: k.overall(all)}, nil
}

// Report adds a request's hits to all its limits, or to none where one of their owners cannot be asked, whether or not there is room for
// them, and answers OK. As in the original the hits are the request's, and 0 stands for 1.
func (k *kuadrant) Report(ctx context.Context, in *ratelimitv3.RateLimitRequest) (*ratelimitv3.RateLimitResponse, error) {
	if in.GetDomain() == "" {
		return &ratelimitv3.RateLimitResponse{OverallCode: codeUnknown}, nil
	}
	all, namespace, err := k.counted(in.GetDomain(), in.GetDescriptors())
	if err != nil {
		return nil, err
	}
	hits := min(int64(max(in.GetHitsAddend(), 1)), algo.MaxLimit)
	var targets []limit.Target
	for i := range all {
		if a := &all[i]; a.counts() {
			targets = append(targets, a.target(namespace))
		}
	}
	if err := k.charge(ctx, targets, hits); err != nil {
		return nil, err
	}
	k.tally(all, hits)
	return &ratelimitv3.RateLimitResponse{OverallCode: codeOK}, nil
}

// Reserve holds an amount under all limits of a request, or under none where there is no room for it under one. What is not committed
// within the TTL is held no more.
//
// Limits in shadow_mode or quota_mode hold nothing. Neither refuses a request alone: the first are not looked at, of the latter one must
// have room. An amount of 0 holds nothing, and passes as long as no more is in use than the limits.
func (k *kuadrant) Reserve(ctx context.Context, in *kuadrantpb.ReserveRequest) (*kuadrantpb.ReserveResponse, error) {
	if in.GetDomain() == "" {
		return &kuadrantpb.ReserveResponse{Code: codeUnknown}, nil
	}
	all, namespace, err := k.counted(in.GetDomain(), in.GetDescriptors())
	if err != nil {
		return nil, err
	}
	amount := clamp(in.GetAmount())
	ttl := reservationTTL(in)
	var checks []limit.Check
	var reserves []limit.Reserve
	var looked, reserved []int
	for i := range all {
		switch a := &all[i]; {
		case !a.counts() || a.shadow:
		case a.zero() && amount > 0:
			a.over = true
		case a.quota || amount == 0:
			checks, looked = append(checks, limit.Check{Target: a.target(namespace), Always: true}), append(looked, i)
		default:
			reserves = append(reserves, limit.Reserve{Target: a.target(namespace), Amount: limit.Amount{Cost: amount}, TTL: ttl + expiryMargin})
			reserved = append(reserved, i)
		}
	}
	if err := k.look(ctx, all, checks, looked, amount); err != nil {
		return nil, err
	}
	id := ""
	if len(reserves) > 0 && k.overall(all) == codeOK {
		targets := targetsOf(reserves)
		bytes, ok := k.expiry.room(k.cfg.Caller(ctx), targets)
		if !ok {
			return nil, errPending
		}
		d, err := k.cfg.Service.ReserveAll(ctx, reserves)
		k.expiry.add(d.ReservationID, targets, ttl, bytes)
		if err != nil {
			return nil, wire.Status(err)
		}
		for j := range d.Decisions {
			all[reserved[j]].over = !d.Decisions[j].Allowed
		}
		id = d.ReservationID
	}
	for i := range all {
		if all[i].over {
			k.cfg.Count(all[i].metric, OverLimit, uint64(amount))
		}
	}
	return &kuadrantpb.ReserveResponse{Code: k.overall(all), ReservationId: id}, nil
}

// Commit adds an amount to all limits of a request, whether or not there is room for it, in place of what its reservation holds. Where
// nothing is held any more it is a Report.
func (k *kuadrant) Commit(ctx context.Context, in *kuadrantpb.CommitRequest) (*kuadrantpb.CommitResponse, error) {
	out := new(kuadrantpb.CommitResponse)
	if in.GetDomain() == "" {
		return out, nil
	}
	all, namespace, err := k.counted(in.GetDomain(), in.GetDescriptors())
	if err != nil {
		return nil, err
	}
	amount := clamp(in.GetActualAmount())
	var rest []limit.Target
	for _, r := range repeats(all, namespace) {
		released, err := k.commit(ctx, r.target, in.GetReservationId(), clamp(uint64(r.times)*uint64(amount)))
		if err != nil {
			return nil, err
		}
		if out.ReservationReleased = out.ReservationReleased || released; !released {
			rest = append(rest, slices.Repeat([]limit.Target{r.target}, r.times)...)
		}
	}
	if amount > 0 {
		if err := k.charge(ctx, rest, amount); err != nil {
			return nil, err // what is reserved and not committed is cancelled when its TTL is over
		}
	}
	k.expiry.remove(in.GetReservationId())
	k.tally(all, amount)
	return out, nil
}

// repeated is a target that so many descriptors of a request fall under: its reservation holds as many amounts.
type repeated struct {
	target limit.Target
	times  int
}

// repeats lists the targets of a request.
func repeats(all []asked, namespace string) []repeated {
	var list []repeated
	for i := range all {
		if !all[i].counts() {
			continue
		}
		t := all[i].target(namespace)
		at := slices.IndexFunc(list, func(r repeated) bool { return same(&r.target, &t) })
		if at < 0 {
			at, list = len(list), append(list, repeated{target: t})
		}
		list[at].times++
	}
	return list
}

// same reports whether two targets of a request are one. A limit that a request brings along is another each time.
func same(a, b *limit.Target) bool {
	return a.Key == b.Key && a.Policy == b.Policy && (a.Limit == b.Limit || a.Limit != nil && b.Limit != nil && *a.Limit == *b.Limit)
}

// commit ends what a reservation holds of one target. It reports false where nothing is held.
func (k *kuadrant) commit(ctx context.Context, t limit.Target, id string, cost int64) (bool, error) {
	if id == "" {
		return false, nil
	}
	_, err := k.cfg.Service.Commit(ctx, limit.Commit{Target: t, Amount: limit.Amount{Cost: cost}, ReservationID: id})
	if e, is := errors.AsType[*limit.Error](err); is && e.Field == "reservation_id" {
		return false, nil // it has ended, or there was none
	}
	if err != nil {
		return false, wire.Status(err)
	}
	return true, nil
}

// charge charges all targets, or none.
func (k *kuadrant) charge(ctx context.Context, targets []limit.Target, cost int64) error {
	if len(targets) == 0 {
		return nil
	}
	checks := make([]limit.Check, len(targets))
	for i, t := range targets {
		checks[i] = limit.Check{Target: t, Cost: cost, Always: true}
	}
	if _, err := k.cfg.Service.CheckAll(ctx, checks); err != nil {
		return wire.Status(err)
	}
	return nil
}

// look finds out which limits have no room for an amount.
func (k *kuadrant) look(ctx context.Context, all []asked, checks []limit.Check, places []int, amount int64) error {
	if len(checks) == 0 {
		return nil
	}
	results, err := k.cfg.Service.Check(ctx, checks)
	if err != nil {
		return wire.Status(err)
	}
	for j := range results {
		d := &results[j]
		if d.Err != nil {
			return wire.Status(d.Err)
		}
		a := &all[places[j]]
		a.over = !d.Allowed || a.zero() && d.Remaining < 1 && !d.FailedOpen || d.Limit != algo.Unlimited && d.Remaining < amount && !d.FailedOpen
		a.over = a.over && !a.shadow
	}
	return nil
}

// tally counts hits that were charged.
func (k *kuadrant) tally(all []asked, hits int64) {
	for i := range all {
		if a := &all[i]; a.rule != nil {
			k.cfg.Count(a.metric, WithinLimit, uint64(hits))
		}
	}
}

// counted finds the limits of descriptors, of which there may be none.
func (k *kuadrant) counted(domain string, descriptors []*common.RateLimitDescriptor) ([]asked, string, error) {
	if len(descriptors) > limit.MaxBatch {
		return nil, "", errTooMany
	}
	return k.matches(&ratelimitv3.RateLimitRequest{Domain: domain, Descriptors: descriptors})
}

// counts reports whether a descriptor falls under a limit that has a state.
func (a *asked) counts() bool { return a.rule != nil && !a.unlimited }

func targetsOf(reserves []limit.Reserve) []limit.Target {
	targets := make([]limit.Target, len(reserves))
	for i := range reserves {
		targets[i] = reserves[i].Target
	}
	return targets
}

func clamp(amount uint64) int64 { return int64(min(amount, uint64(algo.MaxLimit))) }

// reservationTTL is for how long a request has an amount held. As in the original, one that is missing or makes no sense is a minute.
func reservationTTL(in *kuadrantpb.ReserveRequest) time.Duration {
	const most = limit.MaxReservation - expiryMargin
	if in.GetTtl() == nil || !in.GetTtl().IsValid() || in.GetTtl().AsDuration() < 0 {
		return limit.DefaultReservation
	}
	return min(in.GetTtl().AsDuration(), most)
}
