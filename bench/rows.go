package main

import (
	"context"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"google.golang.org/grpc"

	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/gateway/gubernator/gubernatorpb"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// workloads returns all workloads.
func (b *bench) workloads() []workload {
	return slices.Concat(b.oneNode(), b.protocols(), b.clients(), b.threeNodes(), b.scale(), b.loans(),
		b.durabilities(), []workload{b.memory(), b.overload()})
}

// closed returns callers that ask again when they are answered.
func (b *bench) closed(callers int) loop {
	return loop{callers: callers, warm: b.warm, measure: b.measure}
}

// paced returns callers that make so many calls a second together. The cost of copies depends on the number of
// decisions between two flushes, so CPU can be compared only at one rate.
func (b *bench) paced(callers int, perSecond float64) loop {
	l := b.closed(callers)
	l.every = time.Duration(float64(callers) / perSecond * float64(time.Second))
	l.measure = max(l.measure, 2*time.Second) // CPU is counted in steps of 10 ms, and there is little of it
	return l
}

// driven returns the row of a closed loop of callers on a system.
func (b *bench) driven(name string, callers int, start starter, ask asking) row {
	whole := func(s *system) *system { return s }
	return drivenIn(name, b.closed(callers), start, whole, func(*system) asking { return ask })
}

// drivenIn returns the row of a part of a system. CPU and memory are those of the part's servers.
func drivenIn(name string, callers loop, start starter, part func(*system) *system, ask func(*system) asking) row {
	return row{system: name, run: func(ctx context.Context) (sample, error) {
		s, err := start()
		if err != nil {
			return nil, err
		}
		asked := part(s)
		newCall, closeAll, err := ask(s)(ctx, asked)
		if err != nil {
			return nil, err
		}
		defer closeAll()
		callers.servers = asked.servers
		return callers.drive(ctx, newCall)
	}}
}

// first returns the first node of a system.
func first(s *system) *system { return &system{s.servers[:1], s.nodes[:1]} }

// oneNode compares calls of one check and calls of many.
func (b *bench) oneNode() []workload {
	anyKey := among(b.keys)
	return []workload{
		{"unary", "One node, unary gRPC, 1 check a call, 256 callers", []row{
			b.driven("echo", unaryCallers, b.echo, singles("grpc", "bucket", anyKey)),
			b.driven("weir", unaryCallers, b.weirOne, singles("grpc", "bucket", anyKey)),
			b.driven("gubernator", unaryCallers, b.gubOne, gubernatorCalls(1, anyKey)),
		}},
		{"batch", "One node, 100 checks a call, 32 callers", []row{
			b.driven("echo", batchCallers, b.echo, checks("bucket", batchSize, anyKey)),
			b.driven("weir", batchCallers, b.weirOne, checks("bucket", batchSize, anyKey)),
			b.driven("gubernator", batchCallers, b.gubOne, gubernatorCalls(batchSize, anyKey)),
			b.driven("redis-script", batchCallers, b.redis, scripts(batchSize, anyKey)),
		}},
	}
}

// protocols compares the other protocols of a node with their floors and peers.
func (b *bench) protocols() []workload {
	anyKey := among(b.keys)
	limit, window := strconv.Itoa(limitUnits), strconv.FormatInt(limitWindow.Microseconds(), 10)
	burst, seconds := strconv.Itoa(limitUnits-1), strconv.Itoa(int(limitWindow.Seconds()))
	sha := redis.NewScript(slidingWindow).Hash()
	ping := command{func(string, int) []string { return []string{"PING"} }, 1}
	eval := command{func(key string, n int) []string {
		return []string{"EVALSHA", sha, "1", key, limit, window, strconv.Itoa(n)}
	}, 1}
	throttle := command{func(key string, _ int) []string {
		return []string{"CL.THROTTLE", key, burst, limit, seconds}
	}, 6}
	return []workload{
		{"http", "HTTP, 256 connections", []row{
			b.driven("echo", unaryCallers, b.echoHTTP, singles("http", "bucket", anyKey)),
			b.driven("weir", unaryCallers, b.weirOne, singles("http", "bucket", anyKey)),
		}},
		{"resp", "Redis protocol, 16 connections, 100 commands at a time", []row{
			b.driven("redis-ping", respCallers, b.redis, commands(ping, anyKey)),
			b.driven("redis-script", respCallers, b.redis, commands(eval, anyKey)),
			b.driven("weir-throttle", respCallers, b.weirOne, commands(throttle, anyKey)),
		}},
		{"envoy", "Envoy's rate limit service, one node, 1 descriptor a call, 256 callers", []row{
			b.driven("echo", unaryCallers, b.echo, envoyCalls(anyKey)),
			b.driven("weir", unaryCallers, b.weirOne, envoyCalls(anyKey)),
		}},
	}
}

// clients compares the libraries that a program would use.
func (b *bench) clients() []workload {
	anyKey := among(b.keys)
	return []workload{{"client", "Client libraries, 256 goroutines, one check at a time, one server", []row{
		b.driven("weir", unaryCallers, b.weirOne, singles("stream", "bucket", anyKey)),
		b.driven("redis-script", unaryCallers, b.redis, scripts(1, anyKey)),
		b.driven("redis_rate", unaryCallers, b.redis, redisRate(anyKey)),
	}}}
}

// threeNodes compares clusters of three nodes, with callers that ask any node.
func (b *bench) threeNodes() []workload {
	anyKey := among(b.keys)
	var all []workload
	for _, w := range []struct {
		name, title    string
		callers, batch int
	}{
		{"three-unary", "Three nodes, any node, unary gRPC, 1 check a call, 256 callers", unaryCallers, 1},
		{"three-batch", "Three nodes, any node, 100 checks a call, 32 callers", batchCallers, batchSize},
	} {
		all = append(all, workload{w.name, w.title, []row{
			b.driven("forward-echo", w.callers, b.forward, checks("bucket", w.batch, anyKey)),
			b.driven("weir", w.callers, b.weirThree, checks("bucket", w.batch, anyKey)),
			b.driven("gubernator", w.callers, b.gubThree, gubernatorCalls(w.batch, anyKey)),
		}})
	}
	hotKey := only("hot:" + strconv.FormatUint(rand.Uint64(), 36))
	hot := workload{"hot-client", "One hot key, three nodes, Go client, 256 goroutines", []row{
		// the owner is asked each time
		b.driven("weir-admitted", unaryCallers, b.weirThree, goClient("wide", hotKey, client.WithoutLoans())),
		b.driven("weir-refused", unaryCallers, b.weirThree, goClient("narrow", hotKey, client.WithoutLoans())),
	}}
	notOwned := func(s *system) asking {
		return checks("bucket", 1, among(s.ownedBy(s.nodes[0], false, "bucket", b.keys[:bigBatch])))
	}
	notGubernators := func(s *system) asking {
		return func(ctx context.Context, asked *system) (func(int) call, func(), error) {
			keys, err := s.gubernatorForwards(ctx, b.keys[:bigBatch])
			if err != nil {
				return nil, nil, err
			}
			return gubernatorCalls(1, among(keys))(ctx, asked)
		}
	}
	single := workload{"single", "One caller, every check forwarded", []row{
		b.driven("forward-echo", 1, b.forward, checks("bucket", 1, anyKey)),
		drivenIn("weir", b.closed(1), b.weirThree, first, notOwned),
		drivenIn("gubernator", b.closed(1), b.gubThree, first, notGubernators),
	}}
	return append(all, workload{"three-client", "Three nodes, Go client, 256 goroutines", []row{
		b.driven("weir", unaryCallers, b.weirThree, singles("stream", "bucket", anyKey)),
		b.driven("weir-uncopied", unaryCallers, b.weirThree, singles("stream", "uncopied", anyKey)),
	}}, single, hot)
}

// gubernatorForwards returns the keys whose owner is another daemon than the first.
func (s *system) gubernatorForwards(ctx context.Context, keys []string) ([]string, error) {
	conn, err := dial(s.nodes[0].grpc)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	req := newRateLimitsRequest(len(keys))
	for i, r := range req.Requests {
		r.UniqueKey, r.Hits = keys[i], 0
	}
	resp, err := gubernatorpb.NewV1Client(conn).GetRateLimits(ctx, req)
	if err != nil {
		return nil, err
	}
	var found []string
	for i, r := range resp.Responses {
		if owner := r.Metadata["owner"]; owner != "" && owner != s.nodes[0].grpc {
			found = append(found, keys[i])
		}
	}
	return found, nil
}

// fewKeys keys are asked for often; each of keySpace or manyKeys keys is asked for only now and then.
const (
	fewKeys  = 1000
	manyKeys = 1_000_000
)

// loans compares the Go client with itself, with and without loans.
func (b *bench) loans() []workload {
	patient := *b
	patient.warm = max(b.warm, time.Second) // until the client knows the busy keys
	pair := func(name, title, policy string, p pick) workload {
		return workload{name, "Loans: " + title + ", three nodes, Go client, 256 goroutines", []row{
			patient.driven("asked", unaryCallers, b.weirThree, goClient(policy, p, client.WithoutLoans())),
			patient.driven("loans", unaryCallers, b.weirThree, goClient(policy, p)),
		}}
	}
	many := sync.OnceValue(func() pick { return amongMany(manyKeys) })
	all := []workload{
		pair("lend-hot", "one hot key under its limit", "wide", only("one")),
		pair("lend-uniform", "a million keys, all alike", "uncopied",
			func(r *rand.Rand) string { return many()(r) }),
		pair("lend-busy-async", "1000 busy keys (Zipf), `async`", "busy-async", byZipf(b.keys[:fewKeys])),
	}
	node := func(name string, own bool) row {
		part := func(s *system) *system {
			for i, n := range s.nodes {
				if (len(s.ownedBy(n, true, "wide", []string{"one"})) > 0) == own {
					return &system{s.servers, s.nodes[i : i+1]}
				}
			}
			return first(s) // not reached: there are an owner and others
		}
		ask := func(*system) asking { return singles("grpc", "wide", only("one")) }
		return drivenIn(name, b.closed(unaryCallers), b.weirThree, part, ask)
	}
	return append(all, workload{"lend-forward", "Loans: one hot key, unary gRPC, 256 callers, one node asked", []row{
		node("weir-owner", true), node("weir-others", false),
	}})
}

// durabilities compares the levels of durability. Of two nodes, the node that owns all of the keys is asked and
// measured.
func (b *bench) durabilities() []workload {
	var all []workload
	for _, w := range []struct {
		name, title          string
		callers, batch, keys int
		perSecond            float64 // calls a second, whether or not earlier ones were answered; 0: a closed loop
	}{
		{"own-batch", "100 checks a call, 32 callers, 50,000 keys", batchCallers, batchSize, keySpace, 0},
		{"own-few", "100 checks a call, 32 callers, 1000 keys", batchCallers, batchSize, fewKeys, 0},
		{"own-unary", "unary gRPC, 1 check a call, 256 callers, 50,000 keys", unaryCallers, 1, keySpace, 0},
		{"own-paced", "20,000 checks/s in calls of 100, 50,000 keys", batchCallers, batchSize, keySpace, 200},
	} {
		work := workload{name: w.name, title: "Durability: one node of two, " + w.title}
		for _, d := range []string{"none", "async", "escrow", "sync"} {
			ask := func(s *system) asking {
				own := s.ownedBy(s.nodes[0], true, d, b.keys)
				return checks(d, w.batch, among(own[:min(len(own), w.keys)]))
			}
			callers := b.closed(w.callers)
			if w.perSecond > 0 {
				callers = b.paced(w.callers, w.perSecond)
			}
			work.rows = append(work.rows, drivenIn("weir-"+d, callers, b.weirTwo, first, ask))
		}
		all = append(all, work)
	}
	return all
}

// memory measures by how much a million keys make a process grow, in all.
func (b *bench) memory() workload {
	growth := func(name string, start starter, fill func(ctx context.Context, c *grpc.ClientConn, from int) error) row {
		return row{system: name, once: true, run: func(ctx context.Context) (sample, error) {
			s, err := start()
			if err != nil {
				return nil, err
			}
			conn, err := dial(s.nodes[0].grpc)
			if err != nil {
				return nil, err
			}
			defer conn.Close()
			return b.growth(s.servers[0], func(from int) error { return fill(ctx, conn, from) })
		}}
	}
	return workload{"node-memory", "Memory of a node", []row{
		growth("weir", b.freshOne, func(ctx context.Context, c *grpc.ClientConn, from int) error {
			req := newCheckRequest("bucket", bigBatch)
			for i, check := range req.Checks {
				check.Target.Key = keyOf(from + i)
			}
			resp, err := weirv1.NewLimiterClient(c).Check(ctx, req)
			if err != nil {
				return err
			}
			return decided(resp, bigBatch)
		}),
		growth("gubernator", b.freshGubOne, func(ctx context.Context, c *grpc.ClientConn, from int) error {
			req := newRateLimitsRequest(bigBatch)
			for i, r := range req.Requests {
				r.UniqueKey = keyOf(from + i)
			}
			_, err := gubernatorpb.NewV1Client(c).GetRateLimits(ctx, req)
			return err
		}),
	}}
}

// growth fills a server with keys, a batch at a time, and returns the resident bytes of each.
func (b *bench) growth(p *process, batch func(from int) error) (sample, error) {
	keys := 1_000_000
	if b.short {
		keys = 200_000
	}
	var before usage
	for from := 0; from <= keys; from += bigBatch {
		if err := batch(from); err != nil {
			return nil, err
		}
		if from > 0 {
			continue
		}
		var err error
		if before, err = p.usage(); err != nil { // after the first batch, so that connections and pools do not count
			return nil, err
		}
	}
	after, err := p.usage()
	if err != nil {
		return nil, err
	}
	return sample{bytesPerKey: float64(after.rss-before.rss) / float64(keys)}, nil
}

// overload sends batches of 1000 checks to three nodes.
func (b *bench) overload() workload {
	keys := among(b.keys[:10*bigBatch])
	return workload{"overload", "Overload: three nodes, 32 callers × 1000 checks a call", []row{
		b.driven("weir", batchCallers, b.weirThree, checks("bucket", bigBatch, keys)),
		b.driven("gubernator", batchCallers, b.gubThree, gubernatorCalls(bigBatch, keys)),
	}}
}
