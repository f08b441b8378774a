package envoyquota

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"time"

	quotav3 "github.com/envoyproxy/go-control-plane/envoy/service/rate_limit_quota/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/weirlimit/weir/gateway/envoy"
	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/internal/fairshare"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/rpc/wire"
)

// Config is what a Service needs. All fields but Requests are required.
type Config struct {
	// Quotas lends units. Service charges requests that data planes have admitted without an assignment.
	Quotas  limit.Quotas
	Service limit.Service
	// Config returns the current configuration.
	Config func() *envoy.Config
	// Now returns this node's monotonic clock in nanoseconds, never 0.
	Now func() int64
	// Kept is a budget in bytes for the buckets of all streams, shared among callers by name.
	Kept *fairshare.Places
	// Caller returns the name of the authenticated caller; empty: there is none.
	Caller func(context.Context) string
	// Requests bounds the bytes that messages take while they are carried out. Nil: no bound.
	Requests *admission.Gate
	Logger   *slog.Logger
	Metrics  *Metrics
}

// Service implements quotav3.RateLimitQuotaServiceServer. It is safe for concurrent use.
type Service struct {
	quotav3.UnimplementedRateLimitQuotaServiceServer
	cfg   Config
	count *Metrics
	warn  rate.Sometimes
}

// New returns a Service.
func New(cfg Config) *Service {
	return &Service{cfg: cfg, count: cfg.Metrics, warn: rate.Sometimes{Interval: time.Minute}}
}

// Register registers the Service.
func (s *Service) Register(r grpc.ServiceRegistrar) {
	quotav3.RegisterRateLimitQuotaServiceServer(r, s)
}

// StreamRateLimitQuotas implements the service's only method.
func (s *Service) StreamRateLimitQuotas(stream quotav3.RateLimitQuotaService_StreamRateLimitQuotasServer) error {
	ctx := stream.Context()
	plane := s.open(s.cfg.Caller(ctx))
	defer plane.close()
	s.count.streams.Inc()
	defer s.count.streams.Dec()
	for {
		more, err := s.one(stream, plane)
		if err != nil || !more {
			return err
		}
	}
}

// one receives a message and answers it. more says that the stream goes on.
func (s *Service) one(stream grpc.ServerStream, plane *session) (more bool, err error) {
	in := new(quotav3.RateLimitQuotaUsageReports)
	var taken int64
	defer func() { s.cfg.Requests.Leave(taken) }()
	m := &wire.Lenient{Message: in, Admit: func(size int) (err error) {
		taken, err = s.cfg.Requests.Enter(stream.Context(), int64(size)*perByte+admission.Parts(size))
		return err
	}}
	switch err := stream.RecvMsg(m); {
	case errors.Is(err, io.EOF):
		return false, nil
	case err != nil:
		return false, err
	case m.Err != nil:
		return false, statusOf(m.Err)
	}
	out, err := plane.handle(stream.Context(), in)
	if err != nil || out == nil {
		return true, statusOf(err)
	}
	before := s.cfg.Now()
	if err := stream.SendMsg(out); err != nil {
		return false, err
	}
	if s.cfg.Now()-before > int64(askMost) {
		return false, status.Error(codes.Unavailable, "the data plane does not read what it is told")
	}
	return true, nil
}

// perByte is what each byte of a message takes in memory while the message is decoded and carried out. The parts are
// counted besides.
const perByte = 8

func statusOf(err error) error {
	switch _, is := status.FromError(err); {
	case err == nil || is:
		return err
	}
	if err := wire.Status(err); status.Code(err) != codes.Unknown { // a Service's, or the context's
		return err
	}
	return status.Error(codes.InvalidArgument, "malformed message: "+err.Error())
}

// open begins a session.
func (s *Service) open(caller string) *session {
	return &session{service: s, caller: caller, buckets: make(map[string]*entry)}
}

// charge charges units that were admitted without an assignment.
func (s *Service) charge(ctx context.Context, checks []limit.Check) {
	results, err := s.cfg.Service.Check(ctx, checks)
	for i := range checks {
		failure := err
		if err == nil {
			failure = results[i].Err
		}
		if failure != nil {
			s.failed(&checks[i].Target, failure)
		} else {
			s.count.unassigned.Add(float64(checks[i].Cost))
		}
	}
}

// failed counts an error of the owner, and logs at most one a minute.
func (s *Service) failed(t *limit.Target, err error) {
	s.count.errors.Inc()
	s.warn.Do(func() { s.cfg.Logger.Warn("quota assignment failed", "policy", t.Policy, "error", err) })
}

// append adds the answer for a bucket to a response.
func (s *Service) append(out *quotav3.RateLimitQuotaResponse, id *quotav3.BucketId, a action) {
	assignment := func(strategy *typev3.RateLimitStrategy) {
		out.BucketAction = append(out.BucketAction, &quotav3.RateLimitQuotaResponse_BucketAction{
			BucketId: id,
			BucketAction: &quotav3.RateLimitQuotaResponse_BucketAction_QuotaAssignmentAction_{
				QuotaAssignmentAction: &quotav3.RateLimitQuotaResponse_BucketAction_QuotaAssignmentAction{
					AssignmentTimeToLive: durationpb.New(Life), RateLimitStrategy: strategy,
				},
			},
		})
	}
	switch a.verdict {
	case nothing:
		return
	case denyAll:
		assignment(blanket(typev3.RateLimitStrategy_DENY_ALL))
	case allowAll:
		assignment(blanket(typev3.RateLimitStrategy_ALLOW_ALL))
	case assign:
		// After a DENY_ALL every version of Envoy begins a new bucket full. Without it, some keep the ratio of tokens
		// that remain, or keep the old bucket where the new one looks like it.
		assignment(blanket(typev3.RateLimitStrategy_DENY_ALL))
		assignment(tokenBucket(a.units, a.rate))
	case abandon:
		out.BucketAction = append(out.BucketAction, &quotav3.RateLimitQuotaResponse_BucketAction{
			BucketId: id,
			BucketAction: &quotav3.RateLimitQuotaResponse_BucketAction_AbandonAction_{
				AbandonAction: new(quotav3.RateLimitQuotaResponse_BucketAction_AbandonAction),
			},
		})
	}
	s.count.actions[a.verdict].Inc()
}

func blanket(r typev3.RateLimitStrategy_BlanketRule) *typev3.RateLimitStrategy {
	return &typev3.RateLimitStrategy{Strategy: &typev3.RateLimitStrategy_BlanketRule_{BlanketRule: r}}
}

// tokenBucket returns a strategy that begins with units and is filled with at most rate units an hour. Envoy reads
// intervals in whole seconds. The rate is lowered by 2 per mille, for data planes whose clocks are fast.
func tokenBucket(units, rate int64) *typev3.RateLimitStrategy {
	fills, seconds := int64(1), int64(365*24*3600) // one token a year stands for none
	rate -= (rate + 499) / 500
	for _, in := range []int64{1, 10, 60, 600, 3600} {
		n := min(rate*in/3600, 1<<31)
		if n >= 1 {
			fills, seconds = n, in
		}
		if n >= 100 {
			break
		}
	}
	return &typev3.RateLimitStrategy{Strategy: &typev3.RateLimitStrategy_TokenBucket{TokenBucket: &typev3.TokenBucket{
		MaxTokens: uint32(units), TokensPerFill: wrapperspb.UInt32(uint32(fills)),
		FillInterval: durationpb.New(time.Duration(seconds) * time.Second),
	}}}
}
