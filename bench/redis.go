package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"os/exec"
	"strconv"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/redis/go-redis/v9"
)

// slidingWindow is the script that users write: a sorted set of admissions for each key, by the server's clock. A member
// is the instant and a number of the caller's, so that two admissions in one microsecond are two.
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

// A redisServer is one Redis and a client of it.
type redisServer struct {
	server  *process
	address string
	client  *redis.Client
	script  *redis.Script
	rate    *redis_rate.Limiter
}

// redisPool is the number of connections of the client. go-redis' default, ten for each CPU, keeps callers waiting on
// a small machine; with more than this the rate did not rise any further.
const redisPool = 64

func (b *bench) startRedis(ctx context.Context) (r *redisServer, err error) {
	path, err := exec.LookPath("redis-server")
	if err != nil {
		return nil, errors.New("redis-server is not installed (Debian: apt-get install redis-server)")
	}
	ports, err := freePorts(1)
	if err != nil {
		return nil, err
	}
	port := strconv.Itoa(ports[0])
	address := "127.0.0.1:" + port
	p, err := b.kids.start("redis-server", path, []string{
		"--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", b.dir,
	}, nil)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			b.kids.stop(p)
		}
	}()
	redis.SetLogger(quiet{log.New(io.Discard, "", 0)}) // it complains of connections that end with a measurement
	r = &redisServer{
		server:  p,
		address: address,
		client:  redis.NewClient(&redis.Options{Addr: address, PoolSize: redisPool}),
		script:  redis.NewScript(slidingWindow),
	}
	r.rate = redis_rate.NewLimiter(r.client)
	if err := eventually(ctx, []*process{p}, func(ctx context.Context) error { return r.client.Ping(ctx).Err() }); err != nil {
		return nil, err
	}
	return r, r.script.Load(ctx, r.client).Err()
}

type quiet struct{ *log.Logger }

func (q quiet) Printf(_ context.Context, format string, v ...any) { q.Logger.Printf(format, v...) }

func scriptArgs(limit int, window time.Duration) []any {
	return []any{limit, window.Microseconds(), strconv.FormatUint(uint64(rand.Uint32()), 36)}
}

// allow asks the script once.
func (r *redisServer) allow(ctx context.Context, key string, limit int, window time.Duration) (bool, error) {
	n, err := r.script.Run(ctx, r.client, []string{key}, scriptArgs(limit, window)...).Int()
	return n == 1, err
}

func (r *redisServer) scriptCaller(pick func(*rand.Rand) string) func(i int) caller {
	return func(i int) caller {
		random := rand.New(rand.NewPCG(uint64(i), rand.Uint64()))
		return loop(func(ctx context.Context) (int, error) {
			_, err := r.allow(ctx, pick(random), limitUnits, limitWindow)
			return 1, err
		})
	}
}

// pipelineCaller returns callers that send so many scripts at once.
func (r *redisServer) pipelineCaller(batch int, pick func(*rand.Rand) string) func(i int) caller {
	return func(i int) caller {
		random := rand.New(rand.NewPCG(uint64(i), rand.Uint64()))
		return loop(func(ctx context.Context) (int, error) {
			pipe := r.client.Pipeline()
			for range batch {
				r.script.EvalSha(ctx, pipe, []string{pick(random)}, scriptArgs(limitUnits, limitWindow)...)
			}
			_, err := pipe.Exec(ctx)
			return batch, err
		})
	}
}

func (r *redisServer) rateCaller(pick func(*rand.Rand) string) func(i int) caller {
	return func(i int) caller {
		random := rand.New(rand.NewPCG(uint64(i), rand.Uint64()))
		limit := redis_rate.Limit{Rate: limitUnits, Burst: limitUnits, Period: limitWindow}
		return loop(func(ctx context.Context) (int, error) {
			_, err := r.rate.Allow(ctx, pick(random), limit)
			return 1, err
		})
	}
}

// bytesOfLog is what Redis says that an admission costs in a sorted set of so many.
func (r *redisServer) bytesOfLog(ctx context.Context, entries int) (float64, error) {
	key := "log:" + strconv.FormatUint(rand.Uint64(), 36)
	const batch = 1000
	for done := 0; done < entries; done += batch {
		pipe := r.client.Pipeline()
		for range batch {
			r.script.EvalSha(ctx, pipe, []string{key}, scriptArgs(entries, time.Hour)...)
		}
		if _, err := pipe.Exec(ctx); err != nil {
			return 0, err
		}
	}
	defer r.client.Del(ctx, key)
	bytes, err := r.client.MemoryUsage(ctx, key, 0).Result() // 0: look at every member
	if err != nil {
		return 0, err
	}
	members, err := r.client.ZCard(ctx, key).Result()
	if err != nil {
		return 0, err
	}
	if members < int64(entries) {
		return 0, fmt.Errorf("the sorted set has %d members of %d", members, entries)
	}
	return float64(bytes) / float64(members), nil
}
