package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/weirlimit/weir/client"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/ring"
)

// weirPolicies are the policies of the workloads and of the checks of what is right. The latter's windows are so long
// that nothing comes back while the harness looks.
const weirPolicies = `policies:
  - {name: bucket, algorithm: token_bucket, limit: 1000, window: 1m}
  - {name: log, algorithm: sliding_log, limit: 1000, window: 1m}
  - {name: exact-bucket, algorithm: token_bucket, limit: 100, window: 24h}
  - {name: exact-log, algorithm: sliding_log, limit: 100, window: 24h}
  - {name: uncopied, algorithm: token_bucket, limit: 1000, window: 1m, durability: none}
  - {name: wide, algorithm: token_bucket, limit: 1000000000, window: 1s}
  - {name: filled, algorithm: fixed_window, limit: 1000000, window: 24h}
  - {name: busy-none, algorithm: token_bucket, limit: 1000000000, window: 1m, durability: none}
  - {name: busy-async, algorithm: token_bucket, limit: 1000000000, window: 1m, durability: async}
  - {name: busy-escrow, algorithm: token_bucket, limit: 1000000000, window: 1m, durability: escrow}
  - {name: busy-sync, algorithm: token_bucket, limit: 1000000000, window: 1m, durability: sync}
`

// A weirCluster is one Weir node or several that have joined, each a process.
type weirCluster struct {
	nodes   []weirNode
	servers []*process
	clients [][]weirv1.LimiterClient // of each node
}

type weirNode struct{ name, http, grpc, gossip, resp string }

// startWeir starts a cluster and waits until all nodes see all.
func (b *bench) startWeir(ctx context.Context, nodes int) (w *weirCluster, err error) {
	policies := filepath.Join(b.dir, "policies.yaml")
	if err := os.WriteFile(policies, []byte(weirPolicies), 0o644); err != nil {
		return nil, err
	}
	forEnvoy := filepath.Join(b.dir, "envoy")
	if err := os.MkdirAll(forEnvoy, 0o755); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(forEnvoy, "bench.yaml"), []byte(envoyFile), 0o644); err != nil {
		return nil, err
	}
	w = &weirCluster{}
	defer func() {
		if err != nil {
			b.kids.stop(w.servers...)
		}
	}()
	for i := range nodes {
		args := []string{"--log-level", "warn", "--grace", "1s", "--envoy-config", forEnvoy}
		if i > 0 {
			args = append(args, "--join", w.nodes[0].gossip)
		}
		p, n, err := b.startNode(ctx, nodeName(i), policies, args...)
		if p != nil {
			w.servers = append(w.servers, p)
		}
		if err != nil {
			return nil, err
		}
		w.nodes = append(w.nodes, n)
		clients, err := limiterClients(n.grpc)
		if err != nil {
			return nil, err
		}
		w.clients = append(w.clients, clients)
	}
	return w, eventually(ctx, w.servers, func(ctx context.Context) error {
		rings := make(map[string]bool)
		for _, c := range w.clients {
			s, err := c[0].Status(ctx, &weirv1.StatusRequest{})
			if err != nil {
				return err
			}
			if !s.Ready || len(s.Members) != nodes {
				return fmt.Errorf("%s sees %d members: %s", s.Node, len(s.Members), s.ReadyDetail)
			}
			rings[s.Ring] = true
		}
		if len(rings) > 1 {
			return errors.New("the nodes see different rings")
		}
		return nil
	})
}

// startNode starts one node and waits until it is up. The process is not nil when it has been started, whatever came of it.
// What args do not say about ports is left to the node.
func (b *bench) startNode(ctx context.Context, name, policies string, args ...string) (*process, weirNode, error) {
	args = append([]string{"run", "--name", name, "--policies", policies, "--http-port", "0", "--grpc-port", "0",
		"--gossip-port", "0", "--peer-port", "0", "--resp-port", "0"}, args...)
	p, err := b.kids.start("weir", b.weirPath, args, nil)
	if err != nil {
		return nil, weirNode{}, err
	}
	p.stderr.keep(nodeLog)
	starting, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	line, err := p.line(starting, "weir ready ")
	if err != nil {
		return p, weirNode{}, err
	}
	n := parseReady(line)
	if n.name == "" || n.grpc == "" || n.http == "" {
		return p, n, fmt.Errorf("weir: the line %q does not tell the ports", line)
	}
	return p, n, nil
}

// nodeLog is how much of a node's log is kept: enough to find every hand-over in it.
const nodeLog = 1 << 20

// parseReady reads the name=value pairs that a node prints when it is up.
func parseReady(line string) weirNode {
	values := make(map[string]string)
	for _, f := range strings.Fields(line) {
		k, v, _ := strings.Cut(f, "=")
		values[k] = v
	}
	return weirNode{name: values["name"], http: values["http"], grpc: values["grpc"], gossip: values["gossip"], resp: values["resp"]}
}

// addresses are the gRPC addresses, as client.Dial wants them.
func (w *weirCluster) addresses() string {
	var all []string
	for _, n := range w.nodes {
		all = append(all, n.grpc)
	}
	return strings.Join(all, ",")
}

// allowCaller returns callers of the Go client that ask one check at a time. Every refusal or admission is added to
// admitted when that is not nil.
func allowCaller(c *client.Client, policy string, admitted *atomic.Int64, pick func(*rand.Rand) string) func(i int) caller {
	return func(i int) caller {
		limiter := c.Policy(policy)
		random := rand.New(rand.NewPCG(uint64(i), rand.Uint64()))
		return loop(func(ctx context.Context) (int, error) {
			d, err := limiter.Allow(ctx, pick(random))
			if err != nil {
				return 0, err
			}
			if d.FailedOpen || d.FailedClosed {
				return 0, errors.New("decided by the fail policy: no node answered")
			}
			if d.Allowed && admitted != nil {
				admitted.Add(1)
			}
			return 1, nil
		})
	}
}

// driveClient measures callers of one Go client.
func (b *bench) driveClient(ctx context.Context, w *weirCluster, policy string, admitted *atomic.Int64, pick func(*rand.Rand) string, opts ...client.Option) (sample, error) {
	c, err := client.Dial(ctx, w.addresses(), opts...)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	if err := c.Ready(ctx); err != nil {
		return nil, err
	}
	return b.load(unaryCallers, w.servers...).drive(ctx, allowCaller(c, policy, admitted, pick))
}

// clientMeasurements compare the libraries that a program would use, 256 goroutines each asking one check at a time.
func (b *bench) clientMeasurements() []measurement {
	const work = "client"
	weir := func(policy string) func(context.Context) (sample, error) {
		return func(ctx context.Context) (sample, error) {
			w, err := b.weirOne()
			if err != nil {
				return nil, err
			}
			return b.driveClient(ctx, w, policy, nil, b.anyKey, client.WithoutLoans())
		}
	}
	return []measurement{
		{work: work, system: "weir", run: weir("bucket")},
		{work: work, system: "weir-log", run: weir("log")},
		{work: work, system: "redis-script", run: func(ctx context.Context) (sample, error) {
			r, err := b.redis()
			if err != nil {
				return nil, err
			}
			return b.load(unaryCallers, r.server).drive(ctx, r.scriptCaller(b.anyKey))
		}},
		{work: work, system: "redis_rate", run: func(ctx context.Context) (sample, error) {
			r, err := b.redis()
			if err != nil {
				return nil, err
			}
			return b.load(unaryCallers, r.server).drive(ctx, r.rateCaller(b.anyKey))
		}},
	}
}

// threeMeasurements compare three joined nodes, asked at random.
func (b *bench) threeMeasurements() []measurement {
	weir := func(callers, batch int) func(context.Context) (sample, error) {
		return func(ctx context.Context) (sample, error) {
			w, err := b.weirThree()
			if err != nil {
				return nil, err
			}
			return b.load(callers, w.servers...).drive(ctx, checkCaller(w.clients, "bucket", batch, b.anyKey))
		}
	}
	gubernator := func(callers, batch int) func(context.Context) (sample, error) {
		return func(ctx context.Context) (sample, error) {
			g, err := b.gubThree()
			if err != nil {
				return nil, err
			}
			return b.load(callers, g.servers...).drive(ctx, g.caller(batch, b.anyKey))
		}
	}
	forward := func(callers, batch int) func(context.Context) (sample, error) {
		return func(ctx context.Context) (sample, error) {
			f, err := b.forward()
			if err != nil {
				return nil, err
			}
			return b.load(callers, f.servers...).drive(ctx, checkCaller(f.clients, "bucket", batch, b.anyKey))
		}
	}
	return []measurement{
		{work: "three-unary", system: "forward-echo", run: forward(unaryCallers, 1)},
		{work: "three-unary", system: "weir", run: weir(unaryCallers, 1)},
		{work: "three-unary", system: "gubernator", run: gubernator(unaryCallers, 1)},
		{work: "three-batch", system: "forward-echo", run: forward(batchCallers, batchSize)},
		{work: "three-batch", system: "weir", run: weir(batchCallers, batchSize)},
		{work: "three-batch", system: "gubernator", run: gubernator(batchCallers, batchSize)},
		{work: "three-client", system: "weir", run: func(ctx context.Context) (sample, error) {
			w, err := b.weirThree()
			if err != nil {
				return nil, err
			}
			return b.driveClient(ctx, w, "bucket", nil, b.anyKey, client.WithoutLoans())
		}},
		{work: "three-client", system: "weir-uncopied", run: func(ctx context.Context) (sample, error) {
			w, err := b.weirThree()
			if err != nil {
				return nil, err
			}
			return b.driveClient(ctx, w, "uncopied", nil, b.anyKey, client.WithoutLoans())
		}},
		{work: "single", system: "forward-echo", run: forward(1, 1)},
		{work: "single", system: "weir", run: b.singleWeir},
		{work: "single", system: "gubernator", run: func(ctx context.Context) (sample, error) {
			g, err := b.gubThree()
			if err != nil {
				return nil, err
			}
			keys, err := g.foreignKeys(ctx, b.keys)
			if err != nil {
				return nil, err
			}
			return b.load(1, g.servers...).drive(ctx, g.entry().caller(1, among(keys)))
		}},
	}
}

func among(keys []string) func(*rand.Rand) string {
	return func(r *rand.Rand) string { return keys[r.IntN(len(keys))] }
}

// singleWeir is one caller that asks the first node for keys of the others only. It makes sure that they were forwarded.
func (b *bench) singleWeir(ctx context.Context) (sample, error) {
	w, err := b.weirThree()
	if err != nil {
		return nil, err
	}
	var names []string
	for _, n := range w.nodes {
		names = append(names, n.name)
	}
	table := ring.Build(names)
	var keys []string
	for _, k := range b.keys[:1000] {
		owner := table.Owner(ring.Partition(ring.Hash(ring.HashKey{}, "bucket", k))) // the nodes have no secret
		if table.Members()[owner] != w.nodes[0].name {
			keys = append(keys, k)
		}
	}
	before, err := hops(ctx, w.nodes[0].http)
	if err != nil {
		return nil, err
	}
	got, err := b.load(1, w.servers...).drive(ctx, checkCaller(w.clients[:1], "bucket", 1, among(keys)))
	if err != nil {
		return nil, err
	}
	after, err := hops(ctx, w.nodes[0].http)
	if err != nil {
		return nil, err
	}
	if most := got[rate] * b.measure.Seconds(); after-before < most*0.9 {
		return nil, fmt.Errorf("only %.0f of %.0f or more checks were forwarded", after-before, most)
	}
	return got, nil
}

// hops reads how many messages a node has sent to others.
func hops(ctx context.Context, address string) (float64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/metrics", nil)
	if err != nil {
		return 0, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err
	}
	return sumOf(string(text), "weir_hop_duration_seconds_count"), nil
}

// sumOf adds up all series of one name in Prometheus' text format.
func sumOf(text, name string) float64 {
	sum := 0.0
	for line := range strings.Lines(text) {
		rest, ok := strings.CutPrefix(line, name)
		if !ok || rest == "" || rest[0] != '{' && rest[0] != ' ' {
			continue
		}
		if v, err := strconv.ParseFloat(strings.TrimSpace(rest[strings.LastIndexByte(rest, ' ')+1:]), 64); err == nil {
			sum += v
		}
	}
	return sum
}

// hotMeasurements have all callers ask three nodes for one key. Refused, its limit is far exceeded, and whoever is asked
// may remember that; admitted, its limit is never reached, so that its owner has to be asked every time.
func (b *bench) hotMeasurements() []measurement {
	run := func(policy string, through func(ctx context.Context, w *weirCluster, policy, key string, admitted *atomic.Int64) (sample, error)) func(context.Context) (sample, error) {
		return func(ctx context.Context) (sample, error) {
			w, err := b.weirThree()
			if err != nil {
				return nil, err
			}
			var admitted atomic.Int64
			key := "hot:" + strconv.FormatUint(rand.Uint64(), 36)
			got, err := through(ctx, w, policy, key, &admitted)
			if err != nil {
				return nil, err
			}
			if n := admitted.Load(); policy == "exact-log" && n != limitAllowed {
				return nil, fmt.Errorf("%w: %d admitted under load, of a limit of %d", errViolated, n, limitAllowed)
			}
			return got, nil
		}
	}
	byClient := func(ctx context.Context, w *weirCluster, policy, key string, admitted *atomic.Int64) (sample, error) {
		return b.driveClient(ctx, w, policy, admitted, func(*rand.Rand) string { return key }, client.WithoutLoans())
	}
	unary := func(ctx context.Context, w *weirCluster, policy, key string, admitted *atomic.Int64) (sample, error) {
		return b.load(unaryCallers, w.servers...).drive(ctx, func(i int) caller {
			random := rand.New(rand.NewPCG(uint64(i), rand.Uint64()))
			req := newCheckRequest(policy, 1)
			req.Checks[0].Target.Key = key
			return loop(func(ctx context.Context) (int, error) {
				node := w.clients[random.IntN(len(w.clients))]
				resp, err := node[i%len(node)].Check(ctx, req)
				if err != nil {
					return 0, err
				}
				n, err := countAllowed(resp, 1)
				admitted.Add(int64(n))
				return 1, err
			})
		})
	}
	return []measurement{
		{work: "hot-client", system: "weir-admitted", run: run("wide", byClient)},
		{work: "hot-client", system: "weir-refused", run: run("exact-log", byClient)},
		{work: "hot-unary", system: "weir-admitted", run: run("wide", unary)},
		{work: "hot-unary", system: "weir-refused", run: run("exact-log", unary)},
	}
}

// overloadMeasurements press batches of 1000 through three nodes, started for it so that their memory is known.
func (b *bench) overloadMeasurements() []measurement {
	const work = "overload"
	keys := b.keys[:10*overloadBatch]
	return []measurement{
		{work: work, system: "weir", run: func(ctx context.Context) (sample, error) {
			w, err := b.startWeir(ctx, 3)
			if err != nil {
				return nil, err
			}
			defer b.kids.stop(w.servers...)
			req := newCheckRequest("bucket", overloadBatch)
			for _, c := range req.Checks {
				c.Target.Key = keys[0]
			}
			inFlight := proto.Size(req) + proto.Size(echoResponse(overloadBatch))
			warm := func(ctx context.Context, keys []string) error {
				for i, k := range keys {
					req.Checks[i].Target.Key = k
				}
				_, err := w.clients[0][0].Check(ctx, req)
				return err
			}
			return b.overload(ctx, w.servers, keys, inFlight, warm, checkCaller(w.clients, "bucket", overloadBatch, among(keys)))
		}},
		{work: work, system: "gubernator", run: func(ctx context.Context) (sample, error) {
			g, err := b.startGubernator(ctx, 3)
			if err != nil {
				return nil, err
			}
			defer b.kids.stop(g.servers...)
			req := newRateLimitsRequest(overloadBatch)
			for _, r := range req.Requests {
				r.UniqueKey = keys[0]
			}
			// Its answer is about as long as its question.
			inFlight := 2 * proto.Size(req)
			warm := func(ctx context.Context, keys []string) error {
				for i, k := range keys {
					req.Requests[i].UniqueKey = k
				}
				_, err := g.clients[0][0].GetRateLimits(ctx, req)
				return err
			}
			return b.overload(ctx, g.servers, keys, inFlight, warm, g.caller(overloadBatch, among(keys)))
		}},
	}
}

// overload makes all keys known, one call after the other, so that their memory does not count as the overload's, and
// then lets the callers loose. inFlight is the size of one call's messages.
func (b *bench) overload(ctx context.Context, servers []*process, keys []string, inFlight int, warm func(context.Context, []string) error, callers func(int) caller) (sample, error) {
	for i := 0; i < len(keys); i += overloadBatch {
		if err := warm(ctx, keys[i:i+overloadBatch]); err != nil {
			return nil, err
		}
	}
	idle := 0.0
	for _, p := range servers {
		u, err := p.usage()
		if err != nil {
			return nil, err
		}
		idle += float64(u.rss)
	}
	l := b.load(batchCallers, servers...)
	l.measure = max(l.measure, 2*time.Second) // calls are long, and memory takes a while to rise
	got, err := l.drive(ctx, callers)
	if err != nil {
		return nil, err
	}
	peak := 0.0
	for _, p := range servers {
		u, err := p.usage()
		if err != nil {
			return nil, err
		}
		peak += float64(u.peak)
	}
	got[idleRSS], got[peakRSS] = idle, peak
	// A call's messages lie at the node that was asked and again at those that decide.
	got[overBound] = peak / (2*idle + 2*batchCallers*float64(inFlight))
	return got, nil
}

// memoryMeasurements are what a million keys make processes grow by, everything included.
func (b *bench) memoryMeasurements() []measurement {
	const work = "node-memory"
	keys := 1_000_000
	if b.short {
		keys = 200_000
	}
	return []measurement{
		{work: work, system: "weir", once: true, run: func(ctx context.Context) (sample, error) {
			w, err := b.startWeir(ctx, 1)
			if err != nil {
				return nil, err
			}
			defer b.kids.stop(w.servers...)
			req := newCheckRequest("bucket", overloadBatch)
			return growth(w.servers[0], keys, func(from int) error {
				for i, c := range req.Checks {
					c.Target.Key = keyOf(from + i)
				}
				resp, err := w.clients[0][0].Check(ctx, req)
				if err != nil {
					return err
				}
				_, err = countAllowed(resp, overloadBatch)
				return err
			})
		}},
		{work: work, system: "gubernator", once: true, run: func(ctx context.Context) (sample, error) {
			g, err := b.startGubernator(ctx, 1)
			if err != nil {
				return nil, err
			}
			defer b.kids.stop(g.servers...)
			req := newRateLimitsRequest(overloadBatch)
			return growth(g.servers[0], keys, func(from int) error {
				for i, r := range req.Requests {
					r.UniqueKey = keyOf(from + i)
				}
				_, err := g.clients[0][0].GetRateLimits(ctx, req)
				return err
			})
		}},
	}
}

// growth fills a server with keys, a batch at a time, and returns the resident bytes that each has cost.
func growth(p *process, keys int, batch func(from int) error) (sample, error) {
	if err := batch(0); err != nil { // connections and pools are not keys
		return nil, err
	}
	before, err := p.usage()
	if err != nil {
		return nil, err
	}
	for from := overloadBatch; from <= keys; from += overloadBatch {
		if err := batch(from); err != nil {
			return nil, err
		}
	}
	after, err := p.usage()
	if err != nil {
		return nil, err
	}
	return sample{bytesPerKey: float64(after.rss-before.rss) / float64(keys), rss: float64(after.rss)}, nil
}
