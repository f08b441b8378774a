// Package gubernator is the front end for Gubernator's callers: the service V1 of github.com/gubernator-io/gubernator
// v2.13.0, over gRPC and as JSON over HTTP.
//
// It converts each request to a check of an inline limit (call.ruleOf, call.take), has a limiter.BatchService decide
// (call.decide), and converts the decisions (rule.answer). It keeps no state and decides nothing. Gubernator's token
// bucket is a fixed window that the first hit opens, and its leaky bucket is a token bucket; docs/gubernator.md lists
// the differences. The state belongs to the name (the namespace "gubernator/NAME"), the unique_key and the algorithm,
// whatever limit and duration a request has.
//
// It does not promise Gubernator's protocol between peers, its events, or that a request's created_at has an effect:
// decisions read the owner's clock.
package gubernator

import (
	"cmp"
	"context"
	"errors"
	"math"
	"math/bits"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/algo"
	pb "github.com/weirlimit/weir/gateway/gubernator/gubernatorpb"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/ring"
)

// Service decides; see limiter.BatchService.
type Service interface {
	Begin(ctx context.Context, b *limiter.Batch) (open []int, err *limit.Error)
	Finish(ctx context.Context, b *limiter.Batch, open []int)
	Reset(ctx context.Context, t limit.Target) error
}

// Health is what HealthCheck reports.
type Health struct {
	Problem string // why the node is unhealthy; empty: it is healthy
	Peers   int    // number of members, with this node
	Address string // at which callers reach this node
}

// Config is what a Server needs. All fields are required.
type Config struct {
	Service Service
	// HashKey is the cluster's key for hashing keys.
	HashKey ring.HashKey
	// Owner returns a function for the caller in ctx: the address at which callers reach the owner of a hash, empty for
	// this node or an unknown owner. It returns nil for a caller without the right to know.
	Owner func(ctx context.Context) func(hash uint64) string
	// Health returns the health of the node.
	Health func() Health
	// Now returns the wall clock's time, for reset_time and the length of calendar intervals.
	Now func() time.Time
}

// Server implements pb.V1Server. It is safe for concurrent use.
type Server struct {
	pb.UnimplementedV1Server
	cfg     Config
	batches sync.Pool // of *limiter.Batch
}

// New returns a Server.
func New(cfg Config) *Server {
	return &Server{cfg: cfg, batches: sync.Pool{New: func() any { return new(limiter.Batch) }}}
}

// Register registers the service.
func (s *Server) Register(r grpc.ServiceRegistrar) { pb.RegisterV1Server(r, s) }

var errTooMany = status.Error(codes.OutOfRange,
	"Requests.RateLimits list too large; max size is '"+strconv.Itoa(limit.MaxBatch)+"'")

// call is one GetRateLimits that is being answered.
type call struct {
	s     *Server
	ctx   context.Context
	out   []*pb.RateLimitResp
	batch *limiter.Batch // the checks that wait for a decision
	of    []item         // the requests of these checks
	now   time.Time
	owns  func(hash uint64) string
	down  error // the error of a reset that found the owner unavailable

	lastKey ruleKey
	last    *rule // of lastKey; nil: none yet
}

// item is one request that waits for a decision.
type item struct {
	request *pb.RateLimitReq
	rule    *rule
	place   int // index in the answer
}

// GetRateLimits implements the service. Its errors are gRPC statuses. An error of one request is in that request's
// answer.
func (s *Server) GetRateLimits(ctx context.Context, in *pb.GetRateLimitsReq) (*pb.GetRateLimitsResp, error) {
	n := len(in.GetRequests())
	if n > limit.MaxBatch {
		return nil, errTooMany
	}
	answers := make([]pb.RateLimitResp, n)
	c := call{s: s, ctx: ctx, now: s.cfg.Now(), out: make([]*pb.RateLimitResp, n),
		batch: s.batches.Get().(*limiter.Batch), of: make([]item, 0, n)}
	c.owns = s.cfg.Owner(ctx)
	for i := range answers {
		c.out[i] = &answers[i]
	}
	err := c.all(in.GetRequests())
	c.batch.Reset()
	s.batches.Put(c.batch) // not after a panic, when other goroutines may still use it
	if err != nil {
		return nil, err
	}
	return &pb.GetRateLimitsResp{Responses: c.out}, nil
}

// all answers the requests of a call.
func (c *call) all(requests []*pb.RateLimitReq) error {
	for i, r := range requests {
		if err := c.take(i, r); err != nil {
			return err
		}
	}
	return c.decide()
}

// take answers a request with a mistake, and adds the check of any other to the batch.
func (c *call) take(i int, r *pb.RateLimitReq) error {
	out := c.out[i]
	rule, wrong := c.ruleOf(r)
	if wrong != "" {
		out.Error = wrong
		return nil
	}
	target := limit.Target{Limit: &rule.limit, Namespace: rule.namespace, Key: limit.KeyOf(r.GetUniqueKey())}
	if has(r, pb.Behavior_RESET_REMAINING) {
		if done, err := c.reset(out, r, rule, target); done || err != nil {
			return err
		}
	}
	check := limit.Check{Target: target}
	if !rule.zero && !rule.momentary { // where nothing is counted, whether the caller may ask is still asked
		check.Cost = max(min(r.GetHits(), algo.MaxLimit), -algo.MaxLimit)
	}
	check.Always = check.Cost < 0
	check.Partial = check.Cost > 0 && has(r, pb.Behavior_DRAIN_OVER_LIMIT)
	c.batch.Checks = append(c.batch.Checks, check)
	c.of = append(c.of, item{r, rule, i})
	return nil
}

// reset carries out RESET_REMAINING after the requests before it. done says that the request is answered: after a reset
// of a token bucket its hits do not count.
func (c *call) reset(out *pb.RateLimitResp, r *pb.RateLimitReq, rule *rule, target limit.Target) (done bool, _ error) {
	if err := c.decide(); err != nil {
		return false, err
	}
	err := c.down
	if err == nil {
		err = c.s.cfg.Service.Reset(c.ctx, target)
	}
	if err != nil {
		var e *limit.Error
		if !errors.As(err, &e) {
			return false, status.FromContextError(err).Err()
		}
		if e.Kind == limit.Unavailable {
			c.down = e // a call waits for an unavailable owner once
		}
		out.Error = wording(e)
		return true, nil
	}
	if r.GetAlgorithm() == pb.Algorithm_LEAKY_BUCKET {
		return false, nil
	}
	out.Limit, out.Remaining = r.GetLimit(), r.GetLimit()
	c.owner(out, rule, target.Key)
	return true, nil
}

// decide has the batch decided, and answers its requests.
func (c *call) decide() error {
	if len(c.of) == 0 {
		return nil
	}
	open, denied := c.s.cfg.Service.Begin(c.ctx, c.batch)
	if denied != nil {
		return statusOf(denied)
	}
	if len(open) > 0 {
		c.s.cfg.Service.Finish(c.ctx, c.batch, open)
	}
	c.now = c.s.cfg.Now()
	for j := range c.of {
		o, result := &c.of[j], &c.batch.Results[j]
		out := c.out[o.place]
		var e *limit.Error
		switch {
		case errors.As(result.Err, &e):
			out.Error = wording(e)
		case result.FailedOpen || result.FailedClosed:
			// Gubernator's callers expect an error when no node could decide, and choose themselves what to do.
			out.Error = "the node that decides for '" + o.request.GetName() + "_" + o.request.GetUniqueKey() +
				"' cannot be asked"
		default:
			o.rule.answer(o.request, out, &c.batch.Checks[j], &result.Decision, c.now)
			c.owner(out, o.rule, c.batch.Checks[j].Key)
		}
	}
	c.batch.Reset()
	c.of = c.of[:0]
	return nil
}

// owner adds the owner's address to an answer, unless that is this node or the caller has no right to know.
func (c *call) owner(out *pb.RateLimitResp, r *rule, key string) {
	if c.owns == nil {
		return
	}
	if address := c.owns(r.hash.Hash(key)); address != "" {
		out.Metadata = map[string]string{"owner": address}
	}
}

// answer converts a decision to an answer.
func (r *rule) answer(in *pb.RateLimitReq, out *pb.RateLimitResp, asked *limit.Check, d *limit.Decision,
	now time.Time) {
	switch {
	case r.zero:
		r.nothing(in, out, now)
		return
	case r.momentary:
		r.moment(in, out, now)
		return
	}
	out.Limit = in.GetLimit()
	// What the request's limit has beyond algo.MaxLimit remains whatever is used.
	out.Remaining = d.Remaining + r.beyond
	if asked.Cost > 0 && d.Granted < asked.Cost {
		out.Status = pb.Status_OVER_LIMIT
	}
	switch {
	case in.GetAlgorithm() == pb.Algorithm_LEAKY_BUCKET:
		out.ResetTime = r.leaked(out.Limit-out.Remaining, now)
	case r.limit.Period != 0:
		_, out.ResetTime = around(r.limit.Period, now)
	case d.ResetAfter > 0:
		out.ResetTime = millis(now.Add(d.ResetAfter))
	default: // the window opens now
		out.ResetTime = millis(now.Add(r.limit.Window))
	}
}

// leaked returns when so many units will have come back, in milliseconds since 1970. Like Gubernator it counts from the
// limit: where the bucket holds more than the limit, units is negative and the time is past.
func (r *rule) leaked(units int64, now time.Time) int64 {
	sign := int64(1)
	if units < 0 {
		sign, units = -1, -units
	}
	hi, lo := bits.Mul64(uint64(units), uint64(r.limit.Window/time.Millisecond))
	perUnit := uint64(r.limit.Limit)
	lo, carry := bits.Add64(lo, perUnit-1, 0)
	hi += carry
	if hi >= perUnit {
		return math.MaxInt64
	}
	ms, _ := bits.Div64(hi, lo, perUnit)
	return now.UnixMilli() + sign*int64(min(ms, uint64(algo.MaxFill/time.Millisecond)))
}

// nothing answers a request with a limit of 0, which admits no hits.
func (r *rule) nothing(in *pb.RateLimitReq, out *pb.RateLimitResp, now time.Time) {
	out.Limit, out.ResetTime = in.GetLimit(), millis(now.Add(r.limit.Window))
	if r.limit.Period != 0 {
		_, out.ResetTime = around(r.limit.Period, now)
	}
	if in.GetHits() > 0 {
		out.Status = pb.Status_OVER_LIMIT
	}
}

// moment answers a request whose window has no length: every request finds it full.
func (r *rule) moment(in *pb.RateLimitReq, out *pb.RateLimitResp, now time.Time) {
	most := in.GetLimit()
	if in.GetAlgorithm() == pb.Algorithm_LEAKY_BUCKET && in.GetBurst() > 0 {
		most = in.GetBurst()
	}
	out.Limit, out.Remaining, out.ResetTime = in.GetLimit(), most, now.UnixMilli()
	switch hits := in.GetHits(); {
	case hits > most:
		out.Status = pb.Status_OVER_LIMIT
		if in.GetAlgorithm() == pb.Algorithm_LEAKY_BUCKET {
			out.Remaining = 0
		}
	case hits > 0:
		out.Remaining = most - hits
	}
}

// millis returns milliseconds since 1970, rounded up, so that a caller that waits until then is not early.
func millis(t time.Time) int64 { return t.Add(time.Millisecond - 1).UnixMilli() }

func has(r *pb.RateLimitReq, flag pb.Behavior) bool { return r.GetBehavior()&flag != 0 }

// wording returns an error with Gubernator's name of its field.
func wording(e *limit.Error) string {
	if e.Field == "" {
		return e.Message
	}
	names := map[string]string{
		"key": "unique_key", "namespace": "name", "limit.window": "duration", "limit.period": "duration",
		"limit.limit": "limit", "limit.capacity": "burst", "cost": "hits",
	}
	return "field '" + cmp.Or(names[e.Field], e.Field) + "' " + e.Message
}

// statusOf converts an error of a whole call.
func statusOf(e *limit.Error) error {
	code := codes.Internal
	if e.Kind == limit.Denied {
		code = codes.PermissionDenied
	}
	return status.Error(code, e.Error())
}

// HealthCheck implements the service. An unhealthy node answers an error with code UNAVAILABLE.
func (s *Server) HealthCheck(context.Context, *pb.HealthCheckReq) (*pb.HealthCheckResp, error) {
	h := s.cfg.Health()
	if h.Problem != "" {
		return nil, status.Error(codes.Unavailable, h.Problem)
	}
	return &pb.HealthCheckResp{Status: "healthy", PeerCount: int32(h.Peers), AdvertiseAddress: h.Address}, nil
}

// LiveCheck implements the service.
func (s *Server) LiveCheck(context.Context, *pb.LiveCheckReq) (*pb.LiveCheckResp, error) {
	return &pb.LiveCheckResp{}, nil
}
