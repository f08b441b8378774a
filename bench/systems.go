package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/weirlimit/weir/gateway/gubernator/gubernatorpb"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/ring"
)

// A system is one server or a cluster. Each node is a process.
type system struct {
	servers []*process
	nodes   []node
}

// A node has its name and the addresses for callers; empty: it does not serve that protocol.
type node struct{ name, http, grpc, gossip, resp string }

// A starter returns a running system. A system is started when it is first asked for, and runs until the harness ends:
// an idle one takes little CPU from the others.
type starter func() (*system, error)

// A bench has what all measurements share.
type bench struct {
	short         bool
	warm, measure time.Duration
	dir           string // of binaries, policies and files that servers write
	self          string // this binary
	kids          *children
	keys          []string
	beside        string // another build of Weir; empty: there is none

	echo, forward, echoHTTP               starter
	weirOne, weirTwo, weirThree           starter
	plainOne, plainMany, idleMany         starter // with default flags, as are the next
	besideOne, besideMany, besideIdleMany starter
	gubOne, gubThree, redis               starter
	freshOne, freshGubOne                 starter // without keys
}

// keySpace is the number of keys; the callers of all systems choose from them at random.
const keySpace = 100_000

// keyOf returns the i-th key, 18 bytes long.
func keyOf(i int) string { return fmt.Sprintf("user:%013d", i) }

// newBench prepares the systems. ctx bounds them.
func newBench(ctx context.Context, s settings, dir, weir string) (*bench, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	b := &bench{short: s.short, warm: time.Second, measure: 3 * time.Second, dir: dir, self: self, beside: s.beside}
	b.kids = &children{ctx: ctx, dir: dir}
	if s.short {
		b.warm, b.measure = 200*time.Millisecond, 700*time.Millisecond
	}
	for i := range keySpace {
		b.keys = append(b.keys, keyOf(i))
	}
	if err := b.writeFiles(); err != nil {
		return nil, err
	}
	once := func(start func(context.Context) (*system, error)) starter {
		return sync.OnceValues(func() (*system, error) { return start(ctx) })
	}
	ofWeir := func(path string, nodes int, args ...string) starter {
		return once(func(ctx context.Context) (*system, error) { return b.startWeir(ctx, path, nodes, args...) })
	}
	floor := func(args ...string) starter {
		return once(func(ctx context.Context) (*system, error) { return b.startFloor(ctx, args...) })
	}
	b.echo, b.echoHTTP, b.forward = floor("-kind", "echo"), floor("-kind", "http"), once(b.startForward)
	b.weirOne = ofWeir(weir, 1, "--resp-port", "0", "--envoy-config", b.envoyFiles())
	b.weirTwo, b.weirThree = ofWeir(weir, 2), ofWeir(weir, 3)
	b.plainOne, b.plainMany, b.idleMany = ofWeir(weir, 1), ofWeir(weir, s.nodes), ofWeir(weir, s.nodes)
	b.besideOne, b.besideMany, b.besideIdleMany = ofWeir(s.beside, 1), ofWeir(s.beside, s.nodes),
		ofWeir(s.beside, s.nodes)
	gubernator := sync.OnceValues(func() (string, error) {
		return build(ctx, ".", filepath.Join(dir, "gubernator"), "./cmd/gubernator")
	})
	ofGubernator := func(daemons int) starter {
		return once(func(ctx context.Context) (*system, error) {
			path, err := gubernator()
			if err != nil {
				return nil, fmt.Errorf("gubernator cannot be built: %w", err)
			}
			return b.startGubernator(ctx, path, daemons)
		})
	}
	b.gubOne, b.gubThree, b.redis = ofGubernator(1), ofGubernator(3), once(b.startRedis)
	b.freshOne, b.freshGubOne = ofWeir(weir, 1), ofGubernator(1)
	return b, nil
}

// build compiles a package into a binary.
func build(ctx context.Context, dir, out, pkg string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", "build", "-o", out, pkg)
	cmd.Dir = dir
	if text, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build %s: %w: %s", pkg, err, strings.TrimSpace(string(text)))
	}
	return out, nil
}

// The limit of the workloads. It admits most checks, so that every system does its full work.
const (
	limitUnits  = 1000
	limitWindow = time.Minute
)

// weirPolicies are the policies of all workloads. Policies named after a durability have limits that a few busy keys do
// not reach.
const weirPolicies = `policies:
  - {name: bucket, algorithm: token_bucket, limit: 1000, window: 1m}
  - {name: uncopied, algorithm: token_bucket, limit: 1000, window: 1m, durability: none}
  - {name: narrow, algorithm: sliding_log, limit: 100, window: 24h}
  - {name: wide, algorithm: token_bucket, limit: 1000000000, window: 1s}
  - {name: none, algorithm: token_bucket, limit: 1000000, window: 1m, durability: none}
  - {name: async, algorithm: token_bucket, limit: 1000000, window: 1m, durability: async}
  - {name: escrow, algorithm: token_bucket, limit: 1000000, window: 1m, durability: escrow}
  - {name: sync, algorithm: token_bucket, limit: 1000000, window: 1m, durability: sync}
  - {name: busy-async, algorithm: token_bucket, limit: 1000000000, window: 1m, durability: async}
`

// envoyFile has the limit that callers of Envoy's rate limit service ask for.
const envoyFile = `domain: bench
descriptors:
  - key: user
    rate_limit: {unit: hour, requests_per_unit: 4000000000}
`

func (b *bench) policies() string   { return filepath.Join(b.dir, "policies.yaml") }
func (b *bench) envoyFiles() string { return filepath.Join(b.dir, "envoy") }

func (b *bench) writeFiles() error {
	if err := os.WriteFile(b.policies(), []byte(weirPolicies), 0o644); err != nil {
		return err
	}
	if err := os.MkdirAll(b.envoyFiles(), 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(b.envoyFiles(), "bench.yaml"), []byte(envoyFile), 0o644)
}

// startWeir starts a cluster of one build, and waits until all nodes hold the partitions that the ring gives them, with
// copies.
func (b *bench) startWeir(ctx context.Context, path string, nodes int, args ...string) (*system, error) {
	s := new(system)
	var clients []weirv1.LimiterClient
	for i := range nodes {
		all := append([]string{"run", "--name", "weir-" + strconv.Itoa(i), "--policies", b.policies(),
			"--http-port", "0", "--grpc-port", "0", "--gossip-port", "0", "--peer-port", "0",
			"--log-level", "warn", "--grace", "1s"}, args...)
		if i > 0 {
			all = append(all, "--join", s.nodes[0].gossip)
		}
		p, err := b.kids.start("weir", path, all, nil)
		if err != nil {
			return nil, err
		}
		s.servers = append(s.servers, p)
		line, err := p.line(ctx, "weir ready ")
		if err != nil {
			return nil, err
		}
		n := parseReady(line)
		s.nodes = append(s.nodes, n)
		conn, err := dial(n.grpc)
		if err != nil {
			return nil, err
		}
		defer conn.Close()
		clients = append(clients, weirv1.NewLimiterClient(conn))
	}
	return s, eventually(ctx, s.servers, func(ctx context.Context) error {
		for _, c := range clients {
			status, err := c.Status(ctx, &weirv1.StatusRequest{})
			if err == nil {
				err = unsettled(status, nodes)
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// parseReady parses the name=value pairs of the line that a node prints when it is ready.
func parseReady(line string) node {
	values := make(map[string]string)
	for _, f := range strings.Fields(line) {
		k, v, _ := strings.Cut(f, "=")
		values[k] = v
	}
	return node{values["name"], values["http"], values["grpc"], values["gossip"], values["resp"]}
}

// unsettled returns why a node does not yet see a settled cluster of this size; nil: it does.
func unsettled(s *weirv1.StatusResponse, size int) error {
	if !s.Ready || len(s.Members) != size {
		return fmt.Errorf("%s sees %d members: %s", s.Node, len(s.Members), s.ReadyDetail)
	}
	for _, m := range s.Members {
		o := m.GetOwnership() // nil: it cannot be reached
		if m.State != "active" || !o.GetSettled() || o.GetDegraded() > 0 && size > 1 {
			return fmt.Errorf("%s sees %s as %s: %v", s.Node, m.Name, m.State, o)
		}
	}
	return nil
}

// ownedBy returns the keys that a node owns under a policy (own), or does not own. The cluster has no secret.
func (s *system) ownedBy(n node, own bool, policy string, keys []string) []string {
	var names, found []string
	for _, n := range s.nodes {
		names = append(names, n.name)
	}
	table := ring.Build(names)
	for _, k := range keys {
		owner := table.Owner(ring.Partition(ring.Hash(ring.HashKey{}, policy, k)))
		if (table.Members()[owner] == n.name) == own {
			found = append(found, k)
		}
	}
	return found
}

// startFloor starts one of the servers of serveFloor as a child of this binary.
func (b *bench) startFloor(ctx context.Context, args ...string) (*system, error) {
	p, err := b.kids.start("floor", b.self, append([]string{serveCommand}, args...), nil)
	if err != nil {
		return nil, err
	}
	address, err := p.line(ctx, "serving ")
	if err != nil {
		return nil, err
	}
	return &system{[]*process{p}, []node{{grpc: address, http: address}}}, nil
}

// startForward starts an echo, and a server before it that forwards every call.
func (b *bench) startForward(ctx context.Context) (*system, error) {
	behind, err := b.startFloor(ctx, "-kind", "echo")
	if err != nil {
		return nil, err
	}
	s, err := b.startFloor(ctx, "-kind", "forward", "-to", behind.nodes[0].grpc)
	if err != nil {
		return nil, err
	}
	s.servers = append(s.servers, behind.servers...)
	return s, nil
}

// startGubernator starts daemons with Gubernator's defaults, except for a cache that holds all keys (with its default
// of 50,000 it would lose counters) and the log level.
func (b *bench) startGubernator(ctx context.Context, path string, daemons int) (*system, error) {
	ports, err := freePorts(2 * daemons)
	if err != nil {
		return nil, err
	}
	at := func(i int) string { return fmt.Sprintf("127.0.0.1:%d", ports[i]) }
	s := new(system)
	var addresses []string
	for i := range daemons {
		addresses = append(addresses, at(2*i))
	}
	for i, address := range addresses {
		env := []string{
			"GUBER_GRPC_ADDRESS=" + address, "GUBER_HTTP_ADDRESS=" + at(2*i+1), "GUBER_PEER_DISCOVERY_TYPE=none",
			"GUBER_CACHE_SIZE=2000000", "GUBER_LOG_LEVEL=error",
			"OTEL_TRACES_EXPORTER=none", // Gubernator's own command traces unless told not to
		}
		p, err := b.kids.start("gubernator", path, []string{"-peers", strings.Join(addresses, ",")}, env)
		if err != nil {
			return nil, err
		}
		s.servers, s.nodes = append(s.servers, p), append(s.nodes, node{grpc: address})
	}
	return s, eventually(ctx, s.servers, func(ctx context.Context) error { return s.gubernatorIsHealthy(ctx) })
}

func (s *system) gubernatorIsHealthy(ctx context.Context) error {
	for _, n := range s.nodes {
		conn, err := dial(n.grpc)
		if err != nil {
			return err
		}
		h, err := gubernatorpb.NewV1Client(conn).HealthCheck(ctx, &gubernatorpb.HealthCheckReq{})
		conn.Close()
		if err != nil {
			return err
		}
		if h.Status != "healthy" || int(h.PeerCount) != len(s.nodes) {
			return fmt.Errorf("a daemon is %s with %d peers of %d: %s", h.Status, h.PeerCount, len(s.nodes), h.Message)
		}
	}
	return nil
}

func (b *bench) startRedis(ctx context.Context) (*system, error) {
	path, err := exec.LookPath("redis-server")
	if err != nil {
		return nil, errors.New("redis-server is not installed (Debian: apt-get install redis-server)")
	}
	ports, err := freePorts(1)
	if err != nil {
		return nil, err
	}
	port := strconv.Itoa(ports[0])
	address := net.JoinHostPort("127.0.0.1", port)
	p, err := b.kids.start("redis-server", path,
		[]string{"--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", b.dir}, nil)
	if err != nil {
		return nil, err
	}
	c := redis.NewClient(&redis.Options{Addr: address})
	defer c.Close()
	err = eventually(ctx, []*process{p}, func(ctx context.Context) error {
		return redis.NewScript(slidingWindow).Load(ctx, c).Err()
	})
	if err != nil {
		return nil, err
	}
	return &system{[]*process{p}, []node{{resp: address}}}, nil
}

// dial returns a connection to a gRPC server. gRPC connects when it is first used.
func dial(address string) (*grpc.ClientConn, error) {
	return grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
}
