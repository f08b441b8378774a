package weir_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"reflect"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/weirlimit/weir"
	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/testkit"
)

// tenAnHour refuses when the owner cannot be asked, so that nothing is admitted but by it.
const tenAnHour = "policies: [{name: api, algorithm: sliding_log, limit: 10, window: 1h, on_error: closed}]"

// member is a member that listens for other members alone.
func member(name string, join ...string) weir.Config {
	return weir.Config{
		Name: name, GossipPort: weir.AnyPort, PeerPort: weir.AnyPort, Join: join, Policies: []byte(tenAnHour),
		Timeout: 20 * time.Second, Grace: time.Minute, Logger: slog.New(slog.DiscardHandler),
	}
}

func start(t *testing.T, cfg weir.Config) *weir.Node {
	t.Helper()
	n, err := weir.NewNode(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = n.Stop(context.Background()) })
	return n
}

func await(t *testing.T, nodes ...*weir.Node) {
	t.Helper()
	for _, n := range nodes {
		if err := n.Await(testkit.Within(t, time.Minute)); err != nil {
			t.Fatal(err)
		}
	}
}

// TestCluster: three embedded members are a cluster that keeps each key's limit over all of them, while one of them stops, too, and
// hands over what it holds.
func TestCluster(t *testing.T) {
	testkit.NoLeaks(t, "github.com/weirlimit/weir")
	a := start(t, member("a"))
	nodes := []*weir.Node{a, start(t, member("b", a.Addresses().Gossip)), start(t, member("c", a.Addresses().Gossip))}
	await(t, nodes...)

	const keys, limit = 60, 10
	var admitted [keys]atomic.Int64
	ask := func(n *weir.Node, key int) {
		d, err := n.Client().Policy("api").Allow(t.Context(), fmt.Sprint("key ", key))
		switch {
		case err != nil:
			t.Error(err)
		case d.Allowed:
			admitted[key].Add(1)
		}
	}
	for key := range keys { // each by a member, whoever holds it
		for i := range limit / 2 {
			ask(nodes[(key+i)%len(nodes)], key)
		}
	}
	for key := range keys {
		if got := admitted[key].Load(); got != limit/2 {
			t.Errorf("key %d: %d of %d admitted", key, got, limit/2)
		}
	}
	var asking sync.WaitGroup
	for _, n := range nodes[:2] {
		asking.Go(func() {
			for range 2 {
				for key := range keys {
					ask(n, key)
					ask(n, key)
				}
			}
		})
	}
	if err := nodes[2].Stop(t.Context()); err != nil {
		t.Error(err)
	}
	asking.Wait()
	for key := range keys {
		for _, n := range nodes[:2] {
			ask(n, key)
		}
		if got := admitted[key].Load(); got != limit {
			t.Errorf("key %d: %d admitted, the limit is %d", key, got, limit)
		}
	}
	// Whoever asks a member that has stopped is told so by on_error.
	if d, err := nodes[2].Client().Policy("api").Allow(t.Context(), "key 0"); err != nil || d.Allowed || !d.FailedClosed {
		t.Errorf("a member that has stopped answers %+v, %v", d, err)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	if err := nodes[1].Stop(ended); err == nil || !strings.Contains(err.Error(), "still held") {
		t.Errorf("stopped without time: %v", err)
	}
	if err := a.Stop(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestNodesShareNothing: two nodes of one process, of one name, count for themselves, and leave what is the process's as it is.
func TestNodesShareNothing(t *testing.T) {
	testkit.NoLeaks(t, "github.com/weirlimit/weir")
	before, memory, logger := gathered(t, prometheus.DefaultGatherer), debug.SetMemoryLimit(-1), slog.Default()
	collector := debug.SetGCPercent(100)
	defer debug.SetGCPercent(collector)

	registries := []*prometheus.Registry{prometheus.NewRegistry(), prometheus.NewRegistry()}
	var books [2]testkit.Buffer
	var nodes []*weir.Node
	for i, r := range registries {
		nodes = append(nodes, start(t, weir.Config{Name: "alone", Policies: []byte(tenAnHour), Registerer: r, Logger: books[i].Logger()}))
	}
	await(t, nodes...)
	for _, n := range nodes {
		c := n.Client()
		for i := range 11 {
			if d, err := c.Policy("api").Allow(t.Context(), "key"); err != nil || d.Allowed != (i < 10) {
				t.Errorf("check %d: %+v, %v", i, d, err)
			}
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		if got := n.Addresses(); got != (weir.Addresses{}) {
			t.Errorf("listens on %+v", got)
		}
		if _, err := n.Service().Check(t.Context(), []limit.Check{{Target: limit.Target{Policy: "api", Key: "key"}}}); err != nil {
			t.Errorf("after a client has been closed: %v", err)
		}
	}
	for i, n := range nodes {
		if names := gathered(t, registries[i]); !slices.Contains(names, "weir_requests_total") || slices.Contains(names, "go_goroutines") {
			t.Errorf("registered are %v", names)
		}
		if err := n.Stop(t.Context()); err != nil {
			t.Error(err)
		}
		if names := gathered(t, registries[i]); len(names) > 0 {
			t.Errorf("after Stop there are %v", names)
		}
		if !strings.Contains(books[i].String(), `msg="node ready"`) {
			t.Errorf("logged: %s", &books[i])
		}
	}
	if got := gathered(t, prometheus.DefaultGatherer); !slices.Equal(got, before) {
		t.Errorf("the default registry had %v and has %v", before, got)
	}
	if debug.SetMemoryLimit(-1) != memory || debug.SetGCPercent(100) != 100 || slog.Default() != logger {
		t.Error("a node has changed the garbage collector's limits, or the default logger")
	}
}

// TestPorts: callers in other processes ask a member by its port, and get answers about keys that a member without one holds.
func TestPorts(t *testing.T) {
	testkit.NoLeaks(t, "github.com/weirlimit/weir")
	cfg := member("a")
	cfg.HTTPPort, cfg.GRPCPort, cfg.RESPPort = weir.AnyPort, weir.AnyPort, weir.AnyPort
	a := start(t, cfg)
	at := a.Addresses()
	b := start(t, member("b", at.Gossip))
	await(t, a, b)
	if slices.Contains([]string{at.Gossip, at.Peer, at.HTTP, at.GRPC, at.RESP}, "") || b.Addresses().GRPC != "" {
		t.Errorf("listen on %+v and %+v", at, b.Addresses())
	}
	c, err := client.Dial(t.Context(), at.GRPC, client.WithTimeout(20*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	for key := range 20 {
		for i := range 12 {
			asked := []*client.Client{c, b.Client()}[i%2]
			if d, err := asked.Policy("api").Allow(t.Context(), fmt.Sprint(key)); err != nil || d.Allowed != (i < 10) || d.FailedOpen || d.FailedClosed {
				t.Fatalf("key %d, check %d: %+v, %v", key, i, d, err)
			}
		}
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	for _, n := range []*weir.Node{b, a} {
		if err := n.Stop(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

// TestLife: a Node is started once, and what cannot be done is an error.
func TestLife(t *testing.T) {
	testkit.NoLeaks(t, "github.com/weirlimit/weir")
	n, err := weir.NewNode(weir.Config{Name: "alone", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	if ready, why := n.Ready(); ready || why == "" || n.Service() != nil || n.Client() != nil || n.Failed() != nil || n.Err() != nil || n.Addresses() != (weir.Addresses{}) {
		t.Errorf("before Start: %t, %q", ready, why)
	}
	if err := n.Await(t.Context()); err == nil {
		t.Error("a node is awaited that has not been started")
	}
	ended, end := context.WithCancel(t.Context())
	end()
	if err := n.Start(ended); !errors.Is(err, context.Canceled) {
		t.Errorf("started: %v", err)
	}
	if err := n.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := n.Start(t.Context()); err == nil {
		t.Error("started twice")
	}
	await(t, n)
	for range 2 {
		if err := n.Stop(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if ready, why := n.Ready(); ready || why != "stopping" || n.Err() != nil {
		t.Errorf("after Stop: %t, %q, %v", ready, why, n.Err())
	}
	if err := n.Start(t.Context()); err == nil {
		t.Error("started after Stop")
	}

	never, err := weir.NewNode(weir.Config{Name: "never"})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(never.Stop(t.Context()), never.Stop(t.Context())); err != nil {
		t.Error(err)
	}
	if err := never.Start(t.Context()); err == nil {
		t.Error("started after Stop")
	}
}

// TestStartErrors: what only Start can find out names the field, and leaves nothing behind.
func TestStartErrors(t *testing.T) {
	testkit.NoLeaks(t, "github.com/weirlimit/weir")
	busy := start(t, member("busy"))
	registry := prometheus.NewRegistry()
	registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "weir_keys", Help: "Keys with live state on this node."}, func() float64 { return 0 }))
	registered := len(gathered(t, registry))
	for _, c := range []struct {
		want  string
		spoil func(*weir.Config)
	}{
		{"PolicyFile: ", func(c *weir.Config) { c.Policies, c.PolicyFile = nil, "/none" }},
		{"PolicyFile: ", func(c *weir.Config) {
			c.Policies, c.PolicyFile = nil, testkit.WriteFile(t, "policies.yaml", "policies: [{name: http-port}]")
		}},
		{"PeerPort: ", func(c *weir.Config) { c.PeerPort = portOf(t, busy.Addresses().Peer) }},
		{"GossipPort: ", func(c *weir.Config) { c.GossipPort = portOf(t, busy.Addresses().Gossip) }},
		{"Bind: ", func(c *weir.Config) { c.Bind, c.Security.Insecure = "192.0.2.1", true }},
		{"TLSCertFile, TLSKeyFile: ", func(c *weir.Config) { c.Security.TLSCertFile, c.Security.TLSKeyFile = "/none", "/none" }},
		{"DataDir: ", func(c *weir.Config) { c.DataDir = testkit.WriteFile(t, "file", "") }},
		{"AccessFile: open /none/http-port: ", func(c *weir.Config) { c.Security.AccessFile = "/none/http-port" }},
		{"GossipKeyFile: ", func(c *weir.Config) { c.Security.GossipKeyFile = "/none" }},
		{"ClusterSecretFile: ", func(c *weir.Config) { c.Security.ClusterSecretFile = "/none" }},
		{"AuditLog: ", func(c *weir.Config) { c.Security.AuditLog = "/none/audit" }},
		{"Registerer: ", func(c *weir.Config) { c.Registerer = registry }},
	} {
		cfg := member("node")
		c.spoil(&cfg)
		n, err := weir.NewNode(cfg)
		if err != nil {
			t.Fatal(err)
		}
		if err := n.Start(t.Context()); err == nil || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%v, want %s", err, c.want)
			_ = n.Stop(t.Context())
			continue
		}
		if n.Service() != nil {
			t.Errorf("%s: there is a service", c.want)
		}
	}
	if left := len(gathered(t, registry)); left != registered {
		t.Errorf("%d metrics are registered, %d were", left, registered)
	}
	cfg := member("node", busy.Addresses().Gossip)
	cfg.Voters = []string{"node"}
	foreign := start(t, cfg)
	if err := foreign.Await(testkit.Within(t, 30*time.Second)); err == nil || err != foreign.Err() || !strings.Contains(err.Error(), "another list of voters") {
		t.Errorf("awaited with other voters: %v", err)
	}
	if err := foreign.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	if err := busy.Stop(t.Context()); err != nil {
		t.Error(err)
	}
}

func gathered(t *testing.T, g prometheus.Gatherer) []string {
	t.Helper()
	list, err := g.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range list {
		names = append(names, f.GetName())
	}
	return names
}

func portOf(t *testing.T, addr string) (port int) {
	t.Helper()
	if _, err := fmt.Sscanf(addr, "127.0.0.1:%d", &port); err != nil {
		t.Fatal(err)
	}
	return port
}

// TestValidate: a mistake in any field is an error that begins with its name, and the zero value is right but for the name.
func TestValidate(t *testing.T) {
	cases := map[string][]func(*weir.Config){
		"Name":              {func(c *weir.Config) { c.Name = "" }, func(c *weir.Config) { c.Name = "a b" }},
		"Bind":              {func(c *weir.Config) { c.Bind = "localhost" }, func(c *weir.Config) { c.Bind = "0.0.0.0"; c.HTTPPort = 80 }},
		"Advertise":         {func(c *weir.Config) { c.Advertise = "host:80" }, func(c *weir.Config) { c.Advertise = "0.0.0.0" }},
		"GossipPort":        {func(c *weir.Config) { c.GossipPort = -2 }, func(c *weir.Config) { c.GossipPort = 65536 }},
		"PeerPort":          {func(c *weir.Config) { c.PeerPort = -2 }, func(c *weir.Config) { c.GossipPort = weir.AnyPort }},
		"HTTPPort":          {func(c *weir.Config) { c.HTTPPort = math.MinInt }},
		"GRPCPort":          {func(c *weir.Config) { c.GRPCPort = math.MaxInt }},
		"RESPPort":          {func(c *weir.Config) { c.RESPPort = 65536 }},
		"Join":              {func(c *weir.Config) { c.Join = []string{"host:1"} }, func(c *weir.Config) { cluster(c); c.Join = []string{"host"} }},
		"Voters":            {func(c *weir.Config) { c.Voters = []string{"a", "b"} }, func(c *weir.Config) { cluster(c); c.Voters = []string{"a", "a", "b"} }, func(c *weir.Config) { c.Voters = []string{"a", "b", "c"} }},
		"MaxMembers":        {func(c *weir.Config) { c.MaxMembers = -1 }, func(c *weir.Config) { c.MaxMembers = 10_001 }},
		"Policies":          {func(c *weir.Config) { c.Policies = []byte("policies: [{name: a}]") }, func(c *weir.Config) { c.Policies, c.PolicyFile = []byte(tenAnHour), "f" }, func(c *weir.Config) { c.Policies = []byte(strict) }},
		"InlineMaxWindow":   {func(c *weir.Config) { c.InlineMaxWindow = -time.Second }},
		"Timeout":           {func(c *weir.Config) { c.Timeout = -1 }, func(c *weir.Config) { c.Timeout = time.Hour }},
		"Grace":             {func(c *weir.Config) { c.Grace = -1 }},
		"Memory":            {func(c *weir.Config) { c.Memory = -1 }, func(c *weir.Config) { c.Memory = 1 << 20 }},
		"MaxKeys":           {func(c *weir.Config) { c.MaxKeys = -2 }},
		"HTTPHosts":         {func(c *weir.Config) { c.HTTPHosts = []string{"host:80"} }},
		"TLSCertFile":       {func(c *weir.Config) { c.Security.TLSCertFile = "f" }},
		"TLSKeyFile":        {func(c *weir.Config) { c.Security.TLSKeyFile = "f" }},
		"TLSClientCAFile":   {func(c *weir.Config) { c.Security.TLSClientCAFile = "f" }},
		"PeerTLSCertFile":   {func(c *weir.Config) { c.Security.PeerTLSCertFile = "f" }},
		"PeerTLSKeyFile":    {func(c *weir.Config) { c.Security.PeerTLSKeyFile = "f" }},
		"PeerTLSCAFile":     {func(c *weir.Config) { c.Security.PeerTLSCAFile = "f" }},
		"PeerTLSName":       {func(c *weir.Config) { c.Security.PeerTLSName = "n" }},
		"AuditLog":          {func(c *weir.Config) { c.Security.AuditLog = "stderr" }},
		"AccessFile":        nil, // those without a mistake that can be told without looking
		"GossipKeyFile":     nil,
		"ClusterSecretFile": nil,
		"Insecure":          nil, "PolicyFile": nil, "DataDir": nil, "NoInline": nil, "NoConsole": nil, "Logger": nil, "Registerer": nil,
		"Security": nil, // its fields are listed
	}
	for field, spoils := range cases {
		for i, spoil := range spoils {
			cfg := weir.Config{Name: "node"}
			if err := cfg.Validate(); err != nil {
				t.Fatal(err)
			}
			spoil(&cfg)
			err := cfg.Validate()
			if err == nil || !strings.HasPrefix(err.Error(), field+":") {
				t.Errorf("%s, %d: %v", field, i, err)
			}
			if n, err := weir.NewNode(cfg); err == nil || n != nil {
				t.Errorf("%s, %d: a node is made: %v", field, i, err)
			}
		}
	}
	for _, of := range []reflect.Type{reflect.TypeFor[weir.Config](), reflect.TypeFor[weir.Security]()} {
		for _, f := range reflect.VisibleFields(of) {
			if _, ok := cases[f.Name]; !ok {
				t.Errorf("nothing is said of %s", f.Name)
			}
		}
	}
	cfg := weir.Config{Name: "node", Memory: 64 << 20}
	if err := cfg.Validate(); err != nil {
		t.Errorf("the least memory: %v", err)
	}
	// What is quoted is not taken for a setting.
	cfg = weir.Config{Name: "http-port tls-key-file"}
	if err := cfg.Validate(); err == nil || !strings.HasPrefix(err.Error(), `Name: "http-port tls-key-file" `) {
		t.Error(err)
	}
	cfg = weir.Config{Name: "node", Security: weir.Security{TLSClientCAFile: "f"}}
	if err := cfg.Validate(); err == nil || !strings.Contains(err.Error(), "give TLSCertFile and TLSKeyFile") {
		t.Error(err)
	}
}

const strict = "policies: [{name: a, algorithm: sliding_log, limit: 1, window: 1m, durability: sync, consistency: strict}]"

// cluster gives a configuration the ports of a member.
func cluster(c *weir.Config) { c.GossipPort, c.PeerPort = weir.AnyPort, weir.AnyPort }
