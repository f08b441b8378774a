package envoy

import (
	"context"

	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
)

// kuadrant is what kuadrantService registers: Limitador's service for gateways that ask before a request, and report what it has cost
// when the response has passed. Both take and answer messages of Envoy's service.
type kuadrant interface {
	CheckRateLimit(context.Context, *ratelimitv3.RateLimitRequest) (*ratelimitv3.RateLimitResponse, error)
	Report(context.Context, *ratelimitv3.RateLimitRequest) (*ratelimitv3.RateLimitResponse, error)
}

// kuadrantName is the service's name, of kuadrantrls.proto in Kuadrant's limitador. Its messages are all Envoy's, so that there is no
// code to generate.
const kuadrantName = "kuadrant.service.ratelimit.v1.RateLimitService"

var kuadrantService = grpc.ServiceDesc{
	ServiceName: kuadrantName,
	HandlerType: (*kuadrant)(nil),
	Methods: []grpc.MethodDesc{
		{MethodName: "CheckRateLimit", Handler: kuadrantMethod("CheckRateLimit", kuadrant.CheckRateLimit)},
		{MethodName: "Report", Handler: kuadrantMethod("Report", kuadrant.Report)},
	},
}

// kuadrantMethod is the handler of a method, as protoc-gen-go-grpc writes it.
func kuadrantMethod(name string, do func(kuadrant, context.Context, *ratelimitv3.RateLimitRequest) (*ratelimitv3.RateLimitResponse, error)) grpc.MethodHandler {
	info := grpc.UnaryServerInfo{FullMethod: "/" + kuadrantName + "/" + name}
	return func(srv any, ctx context.Context, decode func(any) error, intercept grpc.UnaryServerInterceptor) (any, error) {
		in := new(ratelimitv3.RateLimitRequest)
		if err := decode(in); err != nil {
			return nil, err
		}
		handle := func(ctx context.Context, in any) (any, error) {
			return do(srv.(kuadrant), ctx, in.(*ratelimitv3.RateLimitRequest))
		}
		if intercept == nil {
			return handle(ctx, in)
		}
		of := info
		of.Server = srv
		return intercept(ctx, in, &of, handle)
	}
}

// unknown says whether a request is one that Limitador answers UNKNOWN.
func unknown(in *ratelimitv3.RateLimitRequest) (*ratelimitv3.RateLimitResponse, bool) {
	return &ratelimitv3.RateLimitResponse{OverallCode: ratelimitv3.RateLimitResponse_UNKNOWN}, in.GetDomain() == ""
}

// CheckRateLimit says whether one more hit would be within all limits of a request, and counts nothing. As in the original the
// request's hits have no part in it, and there are no statuses.
func (s *Service) CheckRateLimit(ctx context.Context, in *ratelimitv3.RateLimitRequest) (*ratelimitv3.RateLimitResponse, error) {
	if out, is := unknown(in); is {
		return out, nil
	}
	all, namespace, err := s.counted(in)
	if err != nil {
		return nil, err
	}
	checks, places := make([]limit.Check, 0, len(all)), make([]int, 0, len(all))
	for i := range all {
		switch a := &all[i]; {
		case a.rule == nil || a.unlimited:
		case a.zero():
			a.over = !a.shadow
		default:
			checks, places = append(checks, limit.Check{Target: a.target(namespace)}), append(places, i)
		}
	}
	if len(checks) > 0 {
		results, err := s.cfg.Service.Check(ctx, checks)
		if err != nil {
			return nil, statusOf(err)
		}
		for j := range results {
			if err := results[j].Err; err != nil {
				return nil, statusOf(err)
			}
			a := &all[places[j]]
			a.over = !results[j].Allowed && !a.shadow
		}
	}
	return &ratelimitv3.RateLimitResponse{OverallCode: s.overall(all)}, nil
}

// Report adds a request's hits to all its limits, whether or not there is room for them, and answers OK. As in the original the
// hits are the request's, and 0 stands for 1.
func (s *Service) Report(ctx context.Context, in *ratelimitv3.RateLimitRequest) (*ratelimitv3.RateLimitResponse, error) {
	if out, is := unknown(in); is {
		return out, nil
	}
	all, namespace, err := s.counted(in)
	if err != nil {
		return nil, err
	}
	hits := min(int64(max(in.GetHitsAddend(), 1)), algo.MaxLimit)
	for i := range all {
		a := &all[i]
		if a.rule == nil {
			continue
		}
		if !a.unlimited {
			if _, err := s.cfg.Service.Charge(ctx, limit.Charge{Target: a.target(namespace), Amount: limit.Amount{Cost: hits}}); err != nil {
				return nil, statusOf(err)
			}
		}
		s.cfg.Count(a.metric, WithinLimit, uint64(hits))
	}
	return &ratelimitv3.RateLimitResponse{OverallCode: ratelimitv3.RateLimitResponse_OK}, nil
}

// counted finds the limits of a request that may have no descriptors.
func (s *Service) counted(in *ratelimitv3.RateLimitRequest) ([]asked, string, error) {
	if len(in.GetDescriptors()) > limit.MaxBatch {
		return nil, "", errTooMany
	}
	return s.matches(in)
}
