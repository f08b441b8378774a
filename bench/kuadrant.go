package main

import (
	"context"
	"fmt"
	"math/rand/v2"

	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"

	"github.com/weirlimit/weir/gateway/envoy/kuadrantpb"
)

// kuadrantEcho answers every call of Kuadrant's with the same response.
type kuadrantEcho struct {
	kuadrantpb.UnimplementedRateLimitServiceServer
	check   *ratelimitv3.RateLimitResponse
	reserve *kuadrantpb.ReserveResponse
	commit  *kuadrantpb.CommitResponse
}

func newKuadrantEcho() *kuadrantEcho {
	return &kuadrantEcho{
		check:   &ratelimitv3.RateLimitResponse{OverallCode: ratelimitv3.RateLimitResponse_OK},
		reserve: &kuadrantpb.ReserveResponse{Code: ratelimitv3.RateLimitResponse_OK, ReservationId: "5ac876c1aa87a3d96c56a8cc00000000"},
		commit:  &kuadrantpb.CommitResponse{ReservationReleased: true},
	}
}

func (e *kuadrantEcho) CheckRateLimit(context.Context, *ratelimitv3.RateLimitRequest) (*ratelimitv3.RateLimitResponse, error) {
	return e.check, nil
}

func (e *kuadrantEcho) Reserve(context.Context, *kuadrantpb.ReserveRequest) (*kuadrantpb.ReserveResponse, error) {
	return e.reserve, nil
}

func (e *kuadrantEcho) Commit(context.Context, *kuadrantpb.CommitRequest) (*kuadrantpb.CommitResponse, error) {
	return e.commit, nil
}

// kuadrantCaller returns callers that ask about one descriptor, by a call of CheckRateLimit, or by Reserve and Commit, which count as one.
func kuadrantCaller(address string, reserve bool, pick func(*rand.Rand) string) (func(i int) caller, error) {
	conns, err := dial(address, connections)
	if err != nil {
		return nil, err
	}
	return func(i int) caller {
		random := rand.New(rand.NewPCG(uint64(i), rand.Uint64()))
		client := kuadrantpb.NewRateLimitServiceClient(conns[i%len(conns)])
		entry := &common.RateLimitDescriptor_Entry{Key: "user"}
		descriptors := []*common.RateLimitDescriptor{{Entries: []*common.RateLimitDescriptor_Entry{entry}}}
		check := &ratelimitv3.RateLimitRequest{Domain: "bench", Descriptors: descriptors}
		return loop(func(ctx context.Context) (int, error) {
			entry.Value = pick(random)
			if !reserve {
				resp, err := client.CheckRateLimit(ctx, check)
				if err == nil && resp.OverallCode != ratelimitv3.RateLimitResponse_OK {
					err = fmt.Errorf("answered %v", resp)
				}
				return 1, err
			}
			held, err := client.Reserve(ctx, &kuadrantpb.ReserveRequest{Domain: "bench", Descriptors: descriptors, Amount: 20})
			if err == nil && held.ReservationId == "" {
				err = fmt.Errorf("answered %v", held)
			}
			if err != nil {
				return 0, err
			}
			settled, err := client.Commit(ctx, &kuadrantpb.CommitRequest{Domain: "bench", Descriptors: descriptors, ReservationId: held.ReservationId, ActualAmount: 15})
			if err == nil && !settled.ReservationReleased {
				err = fmt.Errorf("answered %v", settled)
			}
			return 1, err
		})
	}, nil
}

// kuadrantMeasurements compare calls of Kuadrant's service.
func (b *bench) kuadrantMeasurements() []measurement {
	var all []measurement
	for _, reserve := range []bool{false, true} {
		work := "kuadrant-check"
		if reserve {
			work = "kuadrant-reserve"
		}
		drive := func(ctx context.Context, address string, servers ...*process) (sample, error) {
			callers, err := kuadrantCaller(address, reserve, b.anyKey)
			if err != nil {
				return nil, err
			}
			return b.load(unaryCallers, servers...).drive(ctx, callers)
		}
		all = append(all, measurement{work: work, system: "echo", run: func(ctx context.Context) (sample, error) {
			f, err := b.echo()
			if err != nil {
				return nil, err
			}
			return drive(ctx, f.address, f.servers...)
		}}, measurement{work: work, system: "weir", run: func(ctx context.Context) (sample, error) {
			w, err := b.weirOne()
			if err != nil {
				return nil, err
			}
			return drive(ctx, w.nodes[0].grpc, w.servers...)
		}})
	}
	return all
}
