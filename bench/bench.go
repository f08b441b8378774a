package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// The workloads. All systems get the same.
const (
	keySpace      = 100_000 // keys that networked callers choose from at random
	unaryCallers  = 256
	batchCallers  = 32
	batchSize     = 100
	overloadBatch = 1000
	connections   = 8 // gRPC connections to each server, shared by the callers; a Weir client has its own

	// The limit of the workloads: wide enough that most checks are admitted, so that every system does its full work.
	limitUnits  = 1000
	limitWindow = time.Minute
)

// keyOf is the i-th key, 18 bytes long, as in the figures of the documentation.
func keyOf(i int) string { return fmt.Sprintf("user:%013d", i) }

// A bench has what the measurements share: the settings, the children, and the systems, each started when it is first
// asked for and kept until the end, since an idle one takes nothing from the others worth speaking of.
type bench struct {
	short         bool
	warm, measure time.Duration
	dir           string // for binaries, policies and what servers might write
	self          string // this binary
	weirPath      string
	gubernator    func() (string, error) // path
	kids          *children
	keys          []string

	echo, forward      func() (*floor, error)
	echoHTTP, echoTCP  func() (*floor, error)
	weirOne, weirThree func() (*weirCluster, error)
	weirPair, weirFar  func() (*weirCluster, error) // for ownership: next to one another, and far apart
	echoFar            func() (*floor, error)
	movable            func() (*movable, error)
	gubOne, gubThree   func() (*gubCluster, error)
	redis              func() (*redisServer, error)
}

// newBench prepares the systems. ctx bounds their starts.
func newBench(ctx context.Context, short bool, dir, weirPath, gubernatorPath string) (*bench, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	b := &bench{
		short: short, warm: time.Second, measure: 3 * time.Second,
		dir: dir, self: self, weirPath: weirPath, kids: &children{},
	}
	if short {
		b.warm, b.measure = 200*time.Millisecond, 700*time.Millisecond
	}
	for i := range keySpace {
		b.keys = append(b.keys, keyOf(i))
	}
	b.gubernator = sync.OnceValues(func() (string, error) {
		if gubernatorPath != "" {
			return exec.LookPath(gubernatorPath)
		}
		return build(ctx, ".", filepath.Join(dir, "gubernator"), "./cmd/gubernator")
	})
	b.echo = sync.OnceValues(func() (*floor, error) { return b.startFloor(ctx, "echo") })
	b.echoHTTP = sync.OnceValues(func() (*floor, error) { return b.startFloor(ctx, "http") })
	b.echoTCP = sync.OnceValues(func() (*floor, error) { return b.startFloor(ctx, "tcp") })
	b.forward = sync.OnceValues(func() (*floor, error) { return b.startForward(ctx) })
	b.weirOne = sync.OnceValues(func() (*weirCluster, error) { return b.startWeir(ctx, 1) })
	b.weirThree = sync.OnceValues(func() (*weirCluster, error) { return b.startWeir(ctx, 3) })
	b.weirPair = sync.OnceValues(func() (*weirCluster, error) { return b.startOwn(ctx, 2) })
	b.weirFar = sync.OnceValues(func() (*weirCluster, error) { return b.startFar(ctx) })
	b.echoFar = sync.OnceValues(func() (*floor, error) { return b.startEchoFar(ctx) })
	b.movable = sync.OnceValues(findMovable)
	b.gubOne = sync.OnceValues(func() (*gubCluster, error) { return b.startGubernator(ctx, 1) })
	b.gubThree = sync.OnceValues(func() (*gubCluster, error) { return b.startGubernator(ctx, 3) })
	b.redis = sync.OnceValues(func() (*redisServer, error) { return b.startRedis(ctx) })
	return b, nil
}

// measurements are all there are, those of one workload together.
func (b *bench) measurements() []measurement {
	var all []measurement
	all = append(all, b.unaryMeasurements()...)
	all = append(all, b.streamMeasurements()...)
	all = append(all, b.respMeasurements()...)
	all = append(all, b.envoyMeasurements()...)
	all = append(all, b.kuadrantMeasurements()...)
	all = append(all, b.clientMeasurements()...)
	all = append(all, b.threeMeasurements()...)
	all = append(all, b.httpMeasurements()...)
	all = append(all, b.hotMeasurements()...)
	all = append(all, b.loanMeasurements()...)
	all = append(all, b.ownershipMeasurements()...)
	all = append(all, b.inProcessMeasurements()...)
	all = append(all, b.memoryMeasurements()...)
	// Last, because it leaves the most behind.
	all = append(all, b.strangersMeasurements()...)
	return append(append(all, b.shedMeasurements()...), b.overloadMeasurements()...)
}

func (b *bench) load(callers int, servers ...*process) load {
	return load{callers: callers, warm: b.warm, measure: b.measure, servers: servers}
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

// dial returns so many connections to one gRPC server. They connect when first used and last as long as the harness.
func dial(address string, n int) ([]grpc.ClientConnInterface, error) {
	var conns []grpc.ClientConnInterface
	for range n {
		c, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			return nil, err
		}
		conns = append(conns, c)
	}
	return conns, nil
}

// newHTTPClient returns a client that keeps as many connections as there are callers.
func newHTTPClient() *http.Client {
	return &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: unaryCallers, MaxConnsPerHost: unaryCallers}, Timeout: callLimit}
}
