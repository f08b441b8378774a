package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"regexp"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"google.golang.org/protobuf/proto"

	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/gateway/gubernator/gubernatorpb"
)

// How the harness looks whether a limit is kept: so many checks of one new key at once, of which so many may pass. The
// windows last a day, so that nothing comes back meanwhile.
const (
	limitAllowed  = 100
	limitAttempts = 400
	limitAskers   = 16
)

// A proof is one way to ask a system for a limit.
type proof struct {
	system string
	exact  bool // fewer than the limit are a fault too
	// ask makes one call on the key and returns how many of the checks in it were admitted.
	ask   func(ctx context.Context, i int, key string) (admitted int, err error)
	batch int // checks in a call
}

// A verdict is what came of one.
type verdict struct {
	System   string `json:"system"`
	Admitted int64  `json:"admitted"`
	Exact    bool   `json:"exact"`
	Error    string `json:"error,omitempty"` // why it could not be looked at
}

func (v verdict) kept() bool {
	return v.Error == "" && v.Admitted <= limitAllowed && (!v.Exact || v.Admitted == limitAllowed)
}

// prove runs all proofs that only matches, under names such as "limit/weir-1 gRPC".
func (b *bench) prove(ctx context.Context, only *regexp.Regexp) []verdict {
	var verdicts []verdict
	for _, group := range []struct {
		system string
		proofs func(context.Context) ([]proof, error)
	}{
		{"weir-1", b.weirProofs(b.weirOne)}, {"weir-3", b.weirProofs(b.weirThree)},
		{"gubernator-1", gubernatorProofs(b.gubOne)}, {"gubernator-3", gubernatorProofs(b.gubThree)},
		{"redis", b.redisProofs},
	} {
		if !only.MatchString("limit/" + group.system) {
			continue
		}
		proofs, err := group.proofs(ctx)
		if err != nil {
			verdicts = append(verdicts, verdict{System: group.system, Error: err.Error()})
			continue
		}
		for _, p := range proofs {
			v := verdict{System: group.system + " " + p.system, Exact: p.exact}
			n, err := p.run(ctx)
			if v.Admitted = n; err != nil {
				v.Error = err.Error()
			}
			verdicts = append(verdicts, v)
		}
	}
	return verdicts
}

// run makes limitAttempts checks from limitAskers goroutines and returns how many were admitted.
func (p *proof) run(ctx context.Context) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*callLimit)
	defer cancel()
	key := "limit:" + strconv.FormatUint(rand.Uint64(), 36)
	var admitted, next atomic.Int64
	var askers sync.WaitGroup
	failures := make(chan error, limitAskers)
	for range limitAskers {
		askers.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i*p.batch >= limitAttempts {
					return
				}
				n, err := p.ask(ctx, i, key)
				if err != nil {
					failures <- err
					return
				}
				admitted.Add(int64(n))
			}
		})
	}
	askers.Wait()
	select {
	case err := <-failures:
		return admitted.Load(), err
	default:
		return admitted.Load(), nil
	}
}

// weirProofs ask a cluster by every protocol, each check at another node.
func (b *bench) weirProofs(cluster func() (*weirCluster, error)) func(context.Context) ([]proof, error) {
	return func(ctx context.Context) ([]proof, error) {
		w, err := cluster()
		if err != nil {
			return nil, err
		}
		c, err := client.Dial(ctx, w.addresses(), client.WithoutLoans())
		if err != nil {
			return nil, err
		}
		context.AfterFunc(ctx, func() { c.Close() })
		if err := c.Ready(ctx); err != nil {
			return nil, err
		}
		web := newHTTPClient()
		check := func(policy string, batch int) func(context.Context, int, string) (int, error) {
			return func(ctx context.Context, i int, key string) (int, error) {
				req := newCheckRequest(policy, batch)
				for _, c := range req.Checks {
					c.Target.Key = key
				}
				resp, err := w.clients[i%len(w.clients)][0].Check(ctx, req)
				if err != nil {
					return 0, err
				}
				return countAllowed(resp, batch)
			}
		}
		return []proof{
			{"gRPC, token_bucket", true, check("exact-bucket", 1), 1},
			{"gRPC, sliding_log", true, check("exact-log", 1), 1},
			{"gRPC in batches", true, check("exact-log", 25), 25},
			{"Go client", true, func(ctx context.Context, _ int, key string) (int, error) {
				d, err := c.Policy("exact-log").Allow(ctx, key)
				if err == nil && (d.FailedOpen || d.FailedClosed) {
					err = fmt.Errorf("no node answered")
				}
				return one(d.Allowed), err
			}, 1},
			{"HTTP", true, func(ctx context.Context, i int, key string) (int, error) {
				ok, err := checkHTTP(ctx, web, w.nodes[i%len(w.nodes)].http, "exact-log", key)
				return one(ok), err
			}, 1},
		}, nil
	}
}

// answerSizes are the bytes of Weir's answer to a batch, and of the floor's: a floor that carried more would flatter Weir.
func (b *bench) answerSizes(ctx context.Context) (weir, floor int, err error) {
	w, err := b.weirOne()
	if err != nil {
		return 0, 0, err
	}
	req := newCheckRequest("bucket", batchSize)
	for i, c := range req.Checks {
		c.Target.Key = "size:" + strconv.Itoa(i)
	}
	resp, err := w.clients[0][0].Check(ctx, req)
	if err != nil {
		return 0, 0, err
	}
	return proto.Size(resp), proto.Size(echoResponse(batchSize)), nil
}

func gubernatorProofs(cluster func() (*gubCluster, error)) func(context.Context) ([]proof, error) {
	return func(context.Context) ([]proof, error) {
		g, err := cluster()
		if err != nil {
			return nil, err
		}
		return []proof{{"gRPC, token bucket", false, func(ctx context.Context, i int, key string) (int, error) {
			resp, err := g.clients[i%len(g.clients)][0].GetRateLimits(ctx, &gubernatorpb.GetRateLimitsReq{Requests: []*gubernatorpb.RateLimitReq{
				{Name: "exact", UniqueKey: key, Hits: 1, Limit: limitAllowed, Duration: (24 * time.Hour).Milliseconds()},
			}})
			if err != nil {
				return 0, err
			}
			return countUnder(resp, 1)
		}, 1}}, nil
	}
}

func (b *bench) redisProofs(context.Context) ([]proof, error) {
	r, err := b.redis()
	if err != nil {
		return nil, err
	}
	return []proof{
		{"sorted-set script", false, func(ctx context.Context, _ int, key string) (int, error) {
			ok, err := r.allow(ctx, key, limitAllowed, 24*time.Hour)
			return one(ok), err
		}, 1},
		{"redis_rate", false, func(ctx context.Context, _ int, key string) (int, error) {
			res, err := r.rate.Allow(ctx, key, redis_rate.Limit{Rate: limitAllowed, Burst: limitAllowed, Period: 24 * time.Hour})
			if err != nil {
				return 0, err
			}
			return res.Allowed, nil
		}, 1},
	}, nil
}

func one(ok bool) int {
	if ok {
		return 1
	}
	return 0
}
