package envoy

import (
	"context"
	"errors"
	"math"
	"slices"
	"strconv"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/gateway/envoy/kuadrantpb"
	"github.com/weirlimit/weir/internal/quotaheader"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/rpc/wire"
)

// This file has ShouldRateLimit. matches finds the rule of each descriptor and removes replaced ones. ask has the
// limits decided: askTogether those that are charged all or none, askEach the others. conclude makes a status of each
// decision, and response makes the answer. kuadrant.go uses matches, counts and overall as well.

// Results for ServiceConfig.Count.
const (
	WithinLimit = "within_limit"
	OverLimit   = "over_limit"
	ShadowMode  = "shadow_mode" // over the limit, but admitted by shadow_mode
)

// ServiceConfig is what a Service needs. All fields but Headers, Metadata and Shadow are required.
type ServiceConfig struct {
	// Service decides.
	Service limit.Service
	// Config returns the current configuration.
	Config func() *Config
	// Now returns the wall clock's time, for the time until windows that are aligned to the epoch end.
	Now func() time.Time
	// Count is called with the hits of a descriptor, the name of its limit and the result. The name has values of the
	// request only where the configuration asks for them.
	Count func(name, result string, hits uint64)
	// Headers adds RateLimit-Limit, -Remaining and -Reset to responses (the reference's
	// LIMIT_RESPONSE_HEADERS_ENABLED).
	Headers bool
	// Metadata adds dynamic metadata to responses (RESPONSE_DYNAMIC_METADATA).
	Metadata bool
	// Shadow makes the overall code OK, whatever the statuses are (SHADOW_MODE).
	Shadow bool
}

// Service implements envoy.service.ratelimit.v3.RateLimitService. It is safe for concurrent use.
type Service struct {
	ratelimitv3.UnimplementedRateLimitServiceServer
	cfg ServiceConfig
}

// NewService returns a Service.
func NewService(cfg ServiceConfig) *Service {
	return &Service{cfg: cfg}
}

// Register registers the service and Kuadrant's.
func (s *Service) Register(r grpc.ServiceRegistrar) {
	ratelimitv3.RegisterRateLimitServiceServer(r, s)
	kuadrantpb.RegisterRateLimitServiceServer(r, &kuadrant{Service: s})
}

var (
	errDomain      = status.Error(codes.InvalidArgument, "rate limit domain must not be empty")
	errDescriptors = status.Error(codes.InvalidArgument, "rate limit descriptor list must not be empty")
	errUnit        = errors.New("limit.unit: is missing or unknown")
	errTooMany     = status.Error(codes.ResourceExhausted,
		"descriptors: more than "+strconv.Itoa(limit.MaxBatch)+" in one request")
)

// asked is one descriptor of a request with its limit and its answer.
type asked struct {
	match
	place  int          // index in the request
	target limit.Target // zero when the limit has no state
	hits   int64        // negative: to be given back
	status *ratelimitv3.RateLimitResponse_DescriptorStatus
	over   bool // over the limit, and not in shadow mode
	near   bool // the decision is NearLimit
	banned bool // the decision is Banned
}

// flags says whether any decision is NearLimit, and whether any is Banned.
func flags(all []asked) (near, banned bool) {
	for i := range all {
		near, banned = near || all[i].near, banned || all[i].banned
	}
	return near, banned
}

// counts says whether a descriptor has a limit with a state.
func (a *asked) counts() bool { return a.rule != nil && !a.unlimited }

// zero says whether the limit is 0 and admits nothing.
func (a *asked) zero() bool { return a.limit != nil && a.perUnit == 0 }

// ShouldRateLimit implements the service's only method. Errors are gRPC statuses. A request over its limit is not an
// error.
func (s *Service) ShouldRateLimit(ctx context.Context,
	in *ratelimitv3.RateLimitRequest) (*ratelimitv3.RateLimitResponse, error) {
	switch {
	case in.GetDomain() == "":
		return nil, errDomain
	case len(in.GetDescriptors()) == 0:
		return nil, errDescriptors
	}
	all, err := s.matches(in)
	if err == nil {
		err = s.ask(ctx, all)
	}
	if err != nil {
		return nil, err
	}
	return s.response(in, all), nil
}

// matches returns the descriptors of a request with their limits.
func (s *Service) matches(in *ratelimitv3.RateLimitRequest) ([]asked, error) {
	if len(in.Descriptors) > limit.MaxBatch {
		return nil, errTooMany
	}
	all := make([]asked, len(in.Descriptors))
	d := s.cfg.Config().domain(in.Domain)
	if d == nil {
		return all, nil
	}
	for i, descriptor := range in.Descriptors {
		a, err := &all[i], error(nil)
		if a.match, err = d.match(descriptor); err != nil {
			return nil, status.Errorf(codes.InvalidArgument, "descriptors[%d].%v", i, err)
		}
		a.place, a.hits = i, hits(in, descriptor)
		if a.rule == nil {
			continue
		}
		if a.target = (limit.Target{Policy: a.policy, Key: a.key}); a.limit != nil {
			a.target = limit.Target{Limit: a.limit, Namespace: d.namespace, Configured: true, Key: a.key}
		}
	}
	replace(all)
	return all, nil
}

// hits returns the hits of a descriptor or, if it has none of its own, of the request, where 0 stands for 1.
func hits(in *ratelimitv3.RateLimitRequest, d *common.RateLimitDescriptor) int64 {
	n := uint64(max(in.GetHitsAddend(), 1))
	if own := d.GetHitsAddend(); own != nil {
		n = own.GetValue()
	}
	n = min(n, uint64(algo.MaxLimit))
	if d.GetIsNegativeHits() {
		return -int64(n)
	}
	return int64(n)
}

// replace removes limits that other limits of the request replace.
func replace(all []asked) {
	var names map[string]bool
	for i := range all {
		if all[i].rule == nil {
			continue
		}
		for _, name := range all[i].replaces {
			if names == nil {
				names = make(map[string]bool)
			}
			names[name] = true
		}
	}
	for i := range all {
		if r := all[i].rule; r != nil && names[r.name] && !r.unlimited {
			all[i].match = match{}
		}
	}
}

// ask has the limits of a request decided, and sets their statuses.
func (s *Service) ask(ctx context.Context, all []asked) error {
	var each, together []*asked // decided one by one; all or none of which are charged
	for i := range all {
		switch a := &all[i]; {
		case a.rule == nil:
			a.status = &ratelimitv3.RateLimitResponse_DescriptorStatus{Code: ratelimitv3.RateLimitResponse_OK}
		case a.unlimited:
			a.status = &ratelimitv3.RateLimitResponse_DescriptorStatus{Code: ratelimitv3.RateLimitResponse_OK,
				LimitRemaining: math.MaxUint32}
			s.cfg.Count(a.metric, WithinLimit, uint64(max(a.hits, 0)))
		// A limit in shadow_mode or quota_mode that is used up would keep the others from being charged for a request
		// that it does not refuse.
		case a.charge == chargeAllOrNone && a.hits > 0 && !a.shadow && !a.quota:
			together = append(together, a)
		case a.charge != chargeAlways && a.hits > 0 && a.zero():
			s.refuse(a)
		default:
			each = append(each, a)
		}
	}
	if err := s.askTogether(ctx, together); err != nil {
		return err
	}
	return s.askEach(ctx, each, checksOf(each), s.conclude)
}

// checksOf returns the checks of descriptors.
func checksOf(list []*asked) []limit.Check {
	checks := make([]limit.Check, len(list))
	for i, a := range list {
		// A descriptor with 0 or negative hits is not limited by room: with Always, 0 is refused only while more is in
		// use than the limit.
		checks[i] = limit.Check{Target: a.target, Cost: a.hits, Always: a.charge == chargeAlways || a.hits <= 0}
	}
	return checks
}

// askEach has limits decided one by one, and calls decided with each decision.
func (s *Service) askEach(ctx context.Context, list []*asked, checks []limit.Check,
	decided func(*asked, *limit.Decision)) error {
	if len(list) == 0 {
		return nil
	}
	results, err := s.cfg.Service.Check(ctx, checks)
	if err != nil {
		return statusOf(err, list)
	}
	for i := range results {
		if err := results[i].Err; err != nil {
			return statusOf(err, list[i:i+1])
		}
		decided(list[i], &results[i].Decision)
	}
	return nil
}

// statusOf converts an error of checks to a gRPC status that names the request's descriptor.
func statusOf(err error, list []*asked) error {
	if e, ok := errors.AsType[*limit.Error](err); ok {
		if of, i, field := e.Element(); (of != "" || len(list) == 1 && field != "") && i < len(list) {
			err = limit.NewError(e.Kind, field, e.Message).InList("descriptors", list[i].place)
		}
	}
	return wire.Status(err)
}

// askTogether has limits decided that are all charged or none. When one of them is 0, nothing is charged, and the
// others are peeked at.
func (s *Service) askTogether(ctx context.Context, list []*asked) error {
	if len(list) == 0 {
		return nil
	}
	checks := checksOf(list)
	if slices.ContainsFunc(list, (*asked).zero) {
		var look []*asked
		for _, a := range list {
			if a.zero() {
				s.refuse(a)
			} else {
				look = append(look, a)
			}
		}
		checks = checksOf(look)
		for i := range checks {
			checks[i].Cost = 0
		}
		return s.askEach(ctx, look, checks, s.conclude)
	}
	d, err := s.cfg.Service.CheckAll(ctx, checks)
	if err != nil {
		return statusOf(err, list)
	}
	for i := range d.Decisions {
		s.conclude(list[i], &d.Decisions[i])
	}
	return nil
}

// refuse sets the status of a limit of 0 without asking its owner.
func (s *Service) refuse(a *asked) { s.conclude(a, &limit.Decision{Limit: 1}) }

// conclude sets the status of a descriptor from a decision.
func (s *Service) conclude(a *asked, d *limit.Decision) {
	over, remaining := !d.Allowed, saturate(d.Remaining)
	if a.zero() {
		// The state of a limit of 0 counts under a limit of 1, because 0 is no valid limit. Any unit in use or asked
		// for is over the limit.
		over = a.hits > 0 || a.hits == 0 && d.Remaining < 1
		if d.FailedOpen {
			over = a.hits > 0
		}
		remaining = 0
	}
	if a.hits < 0 {
		over = false
	}
	st := &ratelimitv3.RateLimitResponse_DescriptorStatus{Code: ratelimitv3.RateLimitResponse_OK,
		LimitRemaining: remaining}
	a.status, a.over, a.near, a.banned = st, over, d.NearLimit, d.Banned
	if d.Limit == algo.Unlimited {
		st.LimitRemaining = math.MaxUint32
	} else {
		st.CurrentLimit = currentLimit(a, d)
		st.DurationUntilReset = &durationpb.Duration{Seconds: s.untilReset(a, d)}
	}
	result := WithinLimit
	if over {
		st.LimitRemaining = 0
		result = OverLimit
		if a.shadow {
			result, a.over = ShadowMode, false
		} else {
			st.Code = ratelimitv3.RateLimitResponse_OVER_LIMIT
		}
	}
	s.cfg.Count(a.metric, result, uint64(max(a.hits, 0)))
}

// currentLimit returns a status's description of its limit.
func currentLimit(a *asked, d *limit.Decision) *ratelimitv3.RateLimitResponse_RateLimit {
	out := &ratelimitv3.RateLimitResponse_RateLimit{Name: a.name, RequestsPerUnit: a.perUnit, Unit: a.unit}
	if a.multiple != 0 {
		out.UnitMultiplier = wrapperspb.UInt32(a.multiple)
	}
	if a.limit == nil { // of a policy
		out.RequestsPerUnit = saturate(d.Limit)
		for _, u := range units {
			if u.length == d.Window {
				out.Unit = u.number
			}
		}
	}
	return out
}

// untilReset returns, as the reference does, the seconds until the window ends, rounded up and never 0. For a limit
// that is not aligned to the epoch it is the time until nothing is in use, which may be 0.
func (s *Service) untilReset(a *asked, d *limit.Decision) int64 {
	if a.limit != nil && a.limit.Period == algo.Epoch {
		length := int64(a.limit.Window / time.Second)
		now := s.cfg.Now().Unix()
		return length - now%length
	}
	return int64((max(d.ResetAfter, 0) + time.Second - 1) / time.Second)
}

// saturate limits n to what a uint32 can hold. Unlimited becomes the largest.
func saturate(n int64) uint32 {
	if n == algo.Unlimited {
		return math.MaxUint32
	}
	return uint32(max(min(n, math.MaxUint32), 0))
}

// response makes the answer to a request.
func (s *Service) response(in *ratelimitv3.RateLimitRequest, all []asked) *ratelimitv3.RateLimitResponse {
	out := &ratelimitv3.RateLimitResponse{Statuses: make([]*ratelimitv3.RateLimitResponse_DescriptorStatus, len(all))}
	var tightest *ratelimitv3.RateLimitResponse_DescriptorStatus
	least := uint32(math.MaxUint32)
	for i := range all {
		a := &all[i]
		st := a.status
		out.Statuses[i] = st
		if st.CurrentLimit != nil && st.LimitRemaining < least {
			tightest, least = st, st.LimitRemaining
		}
		if a.over && !a.quota {
			tightest, least = st, 0
		}
	}
	out.OverallCode = s.overall(all)
	if s.cfg.Headers && tightest != nil {
		out.ResponseHeadersToAdd = []*core.HeaderValue{
			{Key: "RateLimit-Limit", Value: strconv.FormatUint(uint64(tightest.CurrentLimit.RequestsPerUnit), 10)},
			{Key: "RateLimit-Remaining", Value: strconv.FormatUint(uint64(tightest.LimitRemaining), 10)},
			{Key: "RateLimit-Reset", Value: strconv.FormatInt(tightest.DurationUntilReset.GetSeconds(), 10)},
		}
		flag := func(set bool, name string) {
			if set {
				out.ResponseHeadersToAdd = append(out.ResponseHeadersToAdd, &core.HeaderValue{Key: name, Value: "true"})
			}
		}
		near, banned := flags(all)
		flag(near, quotaheader.NearLimit)
		flag(banned, quotaheader.Banned)
	}
	if s.cfg.Metadata {
		out.DynamicMetadata = metadataOf(in, all)
	}
	return out
}

// overall returns the code of a request as a whole. Only descriptors that count can be over.
func (s *Service) overall(all []asked) ratelimitv3.RateLimitResponse_Code {
	over, quotas, quotasOver := false, 0, 0
	for i := range all {
		a := &all[i]
		if !a.counts() {
			continue
		}
		over = over || a.over && !a.quota
		if a.quota {
			quotas++
			if a.over {
				quotasOver++
			}
		}
	}
	// Quotas are alternatives: they refuse only when all of them are used up.
	if (over || quotas > 0 && quotas == quotasOver) && !s.cfg.Shadow {
		return ratelimitv3.RateLimitResponse_OVER_LIMIT
	}
	return ratelimitv3.RateLimitResponse_OK
}
