package main

import (
	"context"
	"fmt"
	"math/rand/v2"

	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/protobuf/types/known/durationpb"
)

// envoyFile configures the limit that the callers of Envoy's rate limit service ask about.
const envoyFile = `domain: bench
descriptors:
  - key: user
    rate_limit: {unit: hour, requests_per_unit: 4000000000}
`

// envoyEcho answers every request of Envoy's with the same response.
type envoyEcho struct {
	ratelimitv3.UnimplementedRateLimitServiceServer
	response *ratelimitv3.RateLimitResponse
}

func newEnvoyEcho() *envoyEcho {
	return &envoyEcho{response: &ratelimitv3.RateLimitResponse{
		OverallCode: ratelimitv3.RateLimitResponse_OK,
		Statuses: []*ratelimitv3.RateLimitResponse_DescriptorStatus{{
			Code: ratelimitv3.RateLimitResponse_OK, LimitRemaining: 3_999_999_999, DurationUntilReset: &durationpb.Duration{Seconds: 1800},
			CurrentLimit: &ratelimitv3.RateLimitResponse_RateLimit{RequestsPerUnit: 4_000_000_000, Unit: ratelimitv3.RateLimitResponse_RateLimit_HOUR},
		}},
	}}
}

func (e *envoyEcho) ShouldRateLimit(context.Context, *ratelimitv3.RateLimitRequest) (*ratelimitv3.RateLimitResponse, error) {
	return e.response, nil
}

// envoyCaller returns callers that ask about one descriptor in each call.
func envoyCaller(address string, pick func(*rand.Rand) string) (func(i int) caller, error) {
	conns, err := dial(address, connections)
	if err != nil {
		return nil, err
	}
	return func(i int) caller {
		random := rand.New(rand.NewPCG(uint64(i), rand.Uint64()))
		client := ratelimitv3.NewRateLimitServiceClient(conns[i%len(conns)])
		entry := &common.RateLimitDescriptor_Entry{Key: "user"}
		req := &ratelimitv3.RateLimitRequest{Domain: "bench", Descriptors: []*common.RateLimitDescriptor{{Entries: []*common.RateLimitDescriptor_Entry{entry}}}}
		return loop(func(ctx context.Context) (int, error) {
			entry.Value = pick(random)
			resp, err := client.ShouldRateLimit(ctx, req)
			switch {
			case err != nil:
				return 0, err
			case resp.OverallCode != ratelimitv3.RateLimitResponse_OK || len(resp.Statuses) != 1 || resp.Statuses[0].CurrentLimit == nil:
				return 0, fmt.Errorf("answered %v", resp)
			}
			return 1, nil
		})
	}, nil
}

// envoyMeasurements compare calls of Envoy's rate limit service.
func (b *bench) envoyMeasurements() []measurement {
	drive := func(ctx context.Context, address string, servers ...*process) (sample, error) {
		callers, err := envoyCaller(address, b.anyKey)
		if err != nil {
			return nil, err
		}
		return b.load(unaryCallers, servers...).drive(ctx, callers)
	}
	return []measurement{
		{work: "envoy", system: "echo", run: func(ctx context.Context) (sample, error) {
			f, err := b.echo()
			if err != nil {
				return nil, err
			}
			return drive(ctx, f.address, f.servers...)
		}},
		{work: "envoy", system: "weir", run: func(ctx context.Context) (sample, error) {
			w, err := b.weirOne()
			if err != nil {
				return nil, err
			}
			return drive(ctx, w.nodes[0].grpc, w.servers...)
		}},
	}
}
