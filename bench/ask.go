package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"

	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/go-redis/redis_rate/v10"
	"github.com/redis/go-redis/v9"
	"google.golang.org/grpc"

	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/gateway/gubernator/gubernatorpb"
	"github.com/weirlimit/weir/internal/load"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// The sizes of the workloads, the same for all systems.
const (
	unaryCallers = 256
	batchCallers = 32
	batchSize    = 100
	bigBatch     = 1000
	connections  = 8 // gRPC connections to each server, shared by the callers
	respCallers  = 16
	respBatch    = 100 // commands that are sent together
)

// A pick chooses the key of a check.
type pick func(*rand.Rand) string

// among picks keys at random.
func among(keys []string) pick {
	return func(r *rand.Rand) string { return keys[r.IntN(len(keys))] }
}

// amongMany picks at random among so many keys. They are parts of one string, as the keys of a request are.
func amongMany(keys int) pick {
	var block strings.Builder
	for i := range keys {
		block.WriteString(keyOf(i))
	}
	all, size := block.String(), len(keyOf(0))
	return func(r *rand.Rand) string {
		i := r.IntN(keys) * size
		return all[i : i+size]
	}
}

func only(key string) pick { return func(*rand.Rand) string { return key } }

// byZipf picks the n-th key n^-1.1 times as often as the first. The picks are drawn before, so that a pick costs next
// to nothing.
func byZipf(keys []string) pick {
	zipf := rand.NewZipf(rand.New(rand.NewPCG(1, 1)), 1.1, 1, uint64(len(keys)-1))
	picks := make([]string, 1<<16)
	for i := range picks {
		picks[i] = keys[zipf.Uint64()]
	}
	return func(r *rand.Rand) string { return picks[r.Uint32()>>16] }
}

func newRandom(i int) *rand.Rand { return rand.New(rand.NewPCG(uint64(i), rand.Uint64())) }

// An asking opens the connections of a workload's callers to a system. newCall returns the i-th caller's call; closeAll
// closes the connections.
type asking func(ctx context.Context, s *system) (newCall func(i int) call, closeAll func(), err error)

// dialAll opens connections to every node: conns[i] are those to node i.
func (s *system) dialAll() (conns [][]*grpc.ClientConn, closeAll func(), err error) {
	closeAll = func() {
		for _, node := range conns {
			for _, c := range node {
				_ = c.Close() // the measurement is over
			}
		}
	}
	for _, n := range s.nodes {
		conns = append(conns, nil)
		for range connections {
			c, err := dial(n.grpc)
			if err != nil {
				closeAll()
				return nil, nil, err
			}
			conns[len(conns)-1] = append(conns[len(conns)-1], c)
		}
	}
	return conns, closeAll, nil
}

// A callTo makes a call through a client.
type callTo[C any] func(context.Context, C) (decisions int, err error)

// overGRPC returns an asking for a generated client. Each call goes to a random node.
func overGRPC[C any](newClient func(grpc.ClientConnInterface) C, newCall func(random *rand.Rand) callTo[C]) asking {
	return func(_ context.Context, s *system) (func(int) call, func(), error) {
		conns, closeAll, err := s.dialAll()
		if err != nil {
			return nil, nil, err
		}
		clients := make([][]C, len(conns))
		for i, node := range conns {
			for _, c := range node {
				clients[i] = append(clients[i], newClient(c))
			}
		}
		return func(i int) call {
			random := newRandom(i)
			ask := newCall(random)
			return func(ctx context.Context) (int, error) {
				return ask(ctx, clients[random.IntN(len(clients))][i%connections])
			}
		}, closeAll, nil
	}
}

// checks asks for batches of weir.v1. The floors and Weir get the same bytes.
func checks(policy string, batch int, pick pick) asking {
	return overGRPC(weirv1.NewLimiterClient, func(random *rand.Rand) callTo[weirv1.LimiterClient] {
		req := newCheckRequest(policy, batch)
		return func(ctx context.Context, c weirv1.LimiterClient) (int, error) {
			for _, check := range req.Checks {
				check.Target.Key = pick(random)
			}
			resp, err := c.Check(ctx, req)
			if err != nil {
				return 0, err
			}
			return batch, decided(resp, batch)
		}
	})
}

func newCheckRequest(policy string, batch int) *weirv1.CheckRequest {
	req := &weirv1.CheckRequest{}
	for range batch {
		req.Checks = append(req.Checks, &weirv1.Check{Target: &weirv1.Target{Policy: policy}})
	}
	return req
}

// decided returns an error unless each check was decided by its owner, by a loan or by a remembered refusal.
func decided(resp *weirv1.CheckResponse, checks int) error {
	if len(resp.Results) != checks {
		return fmt.Errorf("%d results for %d checks", len(resp.Results), checks)
	}
	for _, r := range resp.Results {
		switch d := r.GetDecision(); {
		case d == nil:
			return fmt.Errorf("not decided: %s", r.GetError().GetMessage())
		case d.FailedOpen || d.FailedClosed:
			return errByPolicy
		}
	}
	return nil
}

var errByPolicy = errors.New("decided by on_error: the owner did not answer")

// singles asks for one check at a time, as weir load does: over grpc, http or stream (the Go client).
func singles(over, policy string, pick pick) asking {
	return func(_ context.Context, s *system) (func(int) call, func(), error) {
		var addrs []string
		for _, n := range s.nodes {
			addrs = append(addrs, map[string]string{"grpc": n.grpc, "stream": n.grpc, "http": n.http}[over])
		}
		askers, closeAll, err := load.Nodes{
			Over: over, Addrs: addrs, Connections: connections, Concurrency: unaryCallers, Timeout: callLimit,
			Target: &weirv1.Target{Policy: policy}, Cost: 1,
		}.Open()
		if err != nil {
			return nil, nil, err
		}
		return func(i int) call {
			random := newRandom(i)
			return func(ctx context.Context) (int, error) {
				return one(askers[random.IntN(len(askers))](ctx, pick(random)))
			}
		}, closeAll, nil
	}
}

// one counts one decision. A decision by on_error is an error.
func one(a load.Answer, err error) (int, error) {
	if err == nil && (a.FailedOpen || a.FailedClosed) {
		err = errByPolicy
	}
	return 1, err
}

// goClient asks for one check at a time through the Go client, by default with its memory of refusals and loans, which
// package load turns off.
func goClient(policy string, pick pick, opts ...client.Option) asking {
	return func(ctx context.Context, s *system) (func(int) call, func(), error) {
		var addrs []string
		for _, n := range s.nodes {
			addrs = append(addrs, n.grpc)
		}
		all := append([]client.Option{client.WithTimeout(callLimit)}, opts...)
		c, err := client.Dial(ctx, strings.Join(addrs, ","), all...)
		if err != nil {
			return nil, nil, err
		}
		closeAll := func() { _ = c.Close() } // the measurement is over
		if err := c.Ready(ctx); err != nil {
			closeAll()
			return nil, nil, err
		}
		return func(i int) call {
			limiter, random := c.Policy(policy), newRandom(i)
			return func(ctx context.Context) (int, error) {
				d, err := limiter.Allow(ctx, pick(random))
				return one(load.Answer{FailedOpen: d.FailedOpen, FailedClosed: d.FailedClosed}, err)
			}
		}, closeAll, nil
	}
}

// gubernatorCalls asks Gubernator's V1 service, of Gubernator or of Weir.
func gubernatorCalls(batch int, pick pick) asking {
	return overGRPC(gubernatorpb.NewV1Client, func(random *rand.Rand) callTo[gubernatorpb.V1Client] {
		req := newRateLimitsRequest(batch)
		return func(ctx context.Context, c gubernatorpb.V1Client) (int, error) {
			for _, r := range req.Requests {
				r.UniqueKey = pick(random)
			}
			resp, err := c.GetRateLimits(ctx, req)
			switch {
			case err != nil:
				return 0, err
			case len(resp.Responses) != batch:
				return 0, fmt.Errorf("%d responses for %d checks", len(resp.Responses), batch)
			}
			for _, r := range resp.Responses {
				if r.Error != "" {
					return 0, errors.New(r.Error)
				}
			}
			return batch, nil
		}
	})
}

func newRateLimitsRequest(batch int) *gubernatorpb.GetRateLimitsReq {
	req := &gubernatorpb.GetRateLimitsReq{}
	for range batch {
		req.Requests = append(req.Requests, &gubernatorpb.RateLimitReq{
			Name: "bucket", Hits: 1, Limit: limitUnits, Duration: limitWindow.Milliseconds(),
			Algorithm: gubernatorpb.Algorithm_TOKEN_BUCKET,
		})
	}
	return req
}

// envoyCalls asks Envoy's rate limit service about one descriptor in each call.
func envoyCalls(pick pick) asking {
	type service = ratelimitv3.RateLimitServiceClient
	return overGRPC(ratelimitv3.NewRateLimitServiceClient, func(random *rand.Rand) callTo[service] {
		entry := &common.RateLimitDescriptor_Entry{Key: "user"}
		descriptor := &common.RateLimitDescriptor{Entries: []*common.RateLimitDescriptor_Entry{entry}}
		req := &ratelimitv3.RateLimitRequest{Domain: "bench", Descriptors: []*common.RateLimitDescriptor{descriptor}}
		return func(ctx context.Context, c service) (int, error) {
			entry.Value = pick(random)
			resp, err := c.ShouldRateLimit(ctx, req)
			if err == nil && (resp.OverallCode != ratelimitv3.RateLimitResponse_OK || len(resp.Statuses) != 1) {
				err = fmt.Errorf("answered %v", resp)
			}
			return 1, err
		}
	})
}

// slidingWindow is the script that users of Redis write: a sorted set of admissions for each key, by the server's
// clock. A member is the instant and a number that the caller chooses, so that two admissions in one microsecond are
// two members.
const slidingWindow = `
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local limit, window = tonumber(ARGV[1]), tonumber(ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[1], 0, now - window)
if redis.call('ZCARD', KEYS[1]) >= limit then
  return 0
end
redis.call('ZADD', KEYS[1], now, t[1] .. ':' .. t[2] .. ':' .. ARGV[3])
redis.call('PEXPIRE', KEYS[1], window / 1000)
return 1
`

// redisPool is the number of connections of go-redis. With its default, ten for each CPU, callers wait on a small
// machine; with more than redisPool the rate does not rise.
const redisPool = 64

// goRedis asks Redis with go-redis.
func goRedis(newCall func(c *redis.Client, script *redis.Script, random *rand.Rand) call) asking {
	return func(_ context.Context, s *system) (func(int) call, func(), error) {
		redis.SetLogger(quiet{log.New(io.Discard, "", 0)}) // it logs connections that end with a measurement
		c := redis.NewClient(&redis.Options{Addr: s.nodes[0].resp, PoolSize: redisPool})
		script := redis.NewScript(slidingWindow)
		return func(i int) call { return newCall(c, script, newRandom(i)) }, func() { c.Close() }, nil
	}
}

type quiet struct{ *log.Logger }

func (q quiet) Printf(_ context.Context, format string, v ...any) { q.Logger.Printf(format, v...) }

// scripts runs the sliding window's script, batch times in one message.
func scripts(batch int, pick pick) asking {
	return goRedis(func(c *redis.Client, script *redis.Script, random *rand.Rand) call {
		return func(ctx context.Context) (int, error) {
			pipe := c.Pipeline()
			for range batch {
				id := strconv.FormatUint(uint64(random.Uint32()), 36)
				script.EvalSha(ctx, pipe, []string{pick(random)}, limitUnits, limitWindow.Microseconds(), id)
			}
			_, err := pipe.Exec(ctx)
			return batch, err
		}
	})
}

// redisRate asks redis_rate.
func redisRate(pick pick) asking {
	return goRedis(func(c *redis.Client, _ *redis.Script, random *rand.Rand) call {
		limiter := redis_rate.NewLimiter(c)
		limit := redis_rate.Limit{Rate: limitUnits, Burst: limitUnits, Period: limitWindow}
		return func(ctx context.Context) (int, error) {
			_, err := limiter.Allow(ctx, pick(random), limit)
			return 1, err
		}
	})
}

// A command returns the words of a command of the Redis protocol for a key. Its reply has this many lines.
type command struct {
	words func(key string, n int) []string
	lines int
}

// commands sends respBatch commands at a time on one connection for each caller. It counts replies and does not parse
// them, so that the caller, which shares the machine, takes little CPU.
func commands(c command, pick pick) asking {
	return func(ctx context.Context, s *system) (func(int) call, func(), error) {
		var conns []net.Conn
		closeAll := func() {
			for _, conn := range conns {
				_ = conn.Close() // the measurement is over
			}
		}
		for range respCallers {
			conn, err := new(net.Dialer).DialContext(ctx, "tcp", s.nodes[0].resp)
			if err != nil {
				closeAll()
				return nil, nil, err
			}
			conns = append(conns, conn)
		}
		return func(i int) call {
			random, in, n := newRandom(i), make([]byte, 64<<10), 0
			var out []byte
			return func(ctx context.Context) (int, error) {
				deadline, _ := ctx.Deadline()
				if err := conns[i].SetDeadline(deadline); err != nil {
					return 0, err
				}
				out = out[:0]
				for range respBatch {
					n++
					out = appendCommand(out, c.words(pick(random), i<<32+n))
				}
				return respBatch, exchange(conns[i], out, in, respBatch*c.lines)
			}
		}, closeAll, nil
	}
}

// appendCommand appends a command in the Redis protocol.
func appendCommand(b []byte, words []string) []byte {
	b = append(strconv.AppendInt(append(b, '*'), int64(len(words)), 10), '\r', '\n')
	for _, w := range words {
		b = append(strconv.AppendInt(append(b, '$'), int64(len(w)), 10), '\r', '\n')
		b = append(append(b, w...), '\r', '\n')
	}
	return b
}

// exchange writes commands, and reads replies of this many lines in all.
func exchange(conn net.Conn, out, in []byte, lines int) error {
	if _, err := conn.Write(out); err != nil {
		return err
	}
	for lines > 0 {
		got, err := conn.Read(in)
		if err != nil {
			return err
		}
		if in[0] == '-' || bytes.Contains(in[:got], []byte("\n-")) {
			return fmt.Errorf("answered %.100q", in[:got])
		}
		if lines -= bytes.Count(in[:got], []byte{'\n'}); lines < 0 {
			return errors.New("more was answered than asked")
		}
	}
	return nil
}
