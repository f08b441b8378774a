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
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
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
	n := must.Value(weir.NewNode(cfg))(t)
	must.NoError(t, n.Start(t.Context()))
	t.Cleanup(func() { _ = n.Stop(context.Background()) })
	return n
}

func await(t *testing.T, nodes ...*weir.Node) {
	t.Helper()
	for _, n := range nodes {
		must.NoError(t, n.Await(testkit.Within(t, time.Minute)))
	}
}

// TestCluster: three embedded members are a cluster that keeps each key's limit over all of them, while one of them
// stops, too, and hands over what it holds.
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
	expect.NoError(t, nodes[2].Stop(t.Context()))
	asking.Wait()
	for key := range keys {
		for _, n := range nodes[:2] {
			ask(n, key)
		}
		got := admitted[key].Load()
		expect.True(t, got == limit, "key %d: %d admitted, the limit is %d", key, got, limit)
	}
	// Whoever asks a member that has stopped is told so by on_error.
	d, err := nodes[2].Client().Policy("api").Allow(t.Context(), "key 0")
	expect.True(t, err == nil && !d.Allowed && d.FailedClosed, "a member that has stopped answers %+v, %v", d, err)
	ended, end := context.WithCancel(t.Context())
	end()
	expect.ErrorContains(t, nodes[1].Stop(ended), "still held", "stopped without time")
	expect.NoError(t, a.Stop(t.Context()))
}

// TestNodesShareNothing: two nodes of one process, of one name, count for themselves, and leave what is the process's
// as it is.
func TestNodesShareNothing(t *testing.T) {
	testkit.NoLeaks(t, "github.com/weirlimit/weir")
	before, memory, logger := gathered(t, prometheus.DefaultGatherer), debug.SetMemoryLimit(-1), slog.Default()
	collector := debug.SetGCPercent(100)
	defer debug.SetGCPercent(collector)

	registries := []*prometheus.Registry{prometheus.NewRegistry(), prometheus.NewRegistry()}
	var books [2]testkit.Buffer
	var nodes []*weir.Node
	for i, r := range registries {
		nodes = append(nodes, start(t,
			weir.Config{Name: "alone", Policies: []byte(tenAnHour), Registerer: r, Logger: books[i].Logger()}))
	}
	await(t, nodes...)
	for _, n := range nodes {
		c := n.Client()
		for i := range 11 {
			d, err := c.Policy("api").Allow(t.Context(), "key")
			expect.True(t, err == nil && d.Allowed == (i < 10), "check %d: %+v, %v", i, d, err)
		}
		expect.NoError(t, c.Close())
		expect.Equal(t, n.Addresses(), weir.Addresses{}, "listens on")
		_, err := n.Service().Check(t.Context(), []limit.Check{{Target: limit.Target{Policy: "api", Key: "key"}}})
		expect.NoError(t, err, "after a client has been closed")
	}
	for i, n := range nodes {
		names := gathered(t, registries[i])
		expect.True(t, slices.Contains(names, "weir_requests_total") && !slices.Contains(names, "go_goroutines"),
			"registered are %v", names)
		expect.NoError(t, n.Stop(t.Context()))
		names = gathered(t, registries[i])
		expect.True(t, len(names) == 0, "after Stop there are %v", names)
		expect.True(t, strings.Contains(books[i].String(), `msg="node ready"`), "logged: %s", &books[i])
	}
	got := gathered(t, prometheus.DefaultGatherer)
	expect.True(t, slices.Equal(got, before), "the default registry had %v and has %v", before, got)
	expect.True(t, debug.SetMemoryLimit(-1) == memory && debug.SetGCPercent(100) == 100 && slog.Default() == logger,
		"a node has changed the garbage collector's limits, or the default logger")
}

// TestPorts: callers in other processes ask a member by its port, and get answers about keys that a member without one
// holds.
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
	c := must.Value(client.Dial(t.Context(), at.GRPC, client.WithTimeout(20*time.Second)))(t)
	for key := range 20 {
		for i := range 12 {
			asked := []*client.Client{c, b.Client()}[i%2]
			d, err := asked.Policy("api").Allow(t.Context(), fmt.Sprint(key))
			must.True(t, err == nil && d.Allowed == (i < 10) && !d.FailedOpen && !d.FailedClosed,
				"key %d, check %d: %+v, %v", key, i, d, err)
		}
	}
	expect.NoError(t, c.Close())
	for _, n := range []*weir.Node{b, a} {
		expect.NoError(t, n.Stop(t.Context()))
	}
}

// TestLife: a Node is started once, and what cannot be done is an error.
func TestLife(t *testing.T) {
	testkit.NoLeaks(t, "github.com/weirlimit/weir")
	n, err := weir.NewNode(weir.Config{Name: "alone", Logger: slog.New(slog.DiscardHandler)})
	must.NoError(t, err)
	ready, why := n.Ready()
	expect.True(t, !ready && why != "" && n.Service() == nil && n.Client() == nil && n.Failed() == nil &&
		n.Err() == nil && n.Addresses() == (weir.Addresses{}), "before Start: %t, %q", ready, why)
	err = n.Await(t.Context())
	expect.True(t, err != nil, "a node is awaited that has not been started")
	ended, end := context.WithCancel(t.Context())
	end()
	expect.ErrorIs(t, n.Start(ended), context.Canceled, "started")
	must.NoError(t, n.Start(t.Context()))
	err = n.Start(t.Context())
	expect.True(t, err != nil, "started twice")
	await(t, n)
	for range 2 {
		expect.NoError(t, n.Stop(t.Context()))
	}
	if ready, why := n.Ready(); ready || why != "stopping" || n.Err() != nil {
		t.Errorf("after Stop: %t, %q, %v", ready, why, n.Err())
	}
	err = n.Start(t.Context())
	expect.True(t, err != nil, "started after Stop")

	never := must.Value(weir.NewNode(weir.Config{Name: "never"}))(t)
	expect.NoError(t, errors.Join(never.Stop(t.Context()), never.Stop(t.Context())))
	err = never.Start(t.Context())
	expect.True(t, err != nil, "started after Stop")
}

// TestStartErrors: what only Start can find out names the field, and leaves nothing behind.
func TestStartErrors(t *testing.T) {
	testkit.NoLeaks(t, "github.com/weirlimit/weir")
	busy := start(t, member("busy"))
	registry := prometheus.NewRegistry()
	registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "weir_call_errors_total"},
		func() float64 { return 0 }))
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
		{"TLSCertFile, TLSKeyFile: ",
			func(c *weir.Config) { c.Security.TLSCertFile, c.Security.TLSKeyFile = "/none", "/none" }},
		{"DataDir: ", func(c *weir.Config) { c.DataDir = testkit.WriteFile(t, "file", "") }},
		{"AccessFile: open /none/http-port: ", func(c *weir.Config) { c.Security.AccessFile = "/none/http-port" }},
		{"GossipKeyFile: ", func(c *weir.Config) { c.Security.GossipKeyFile = "/none" }},
		{"ClusterSecretFile: ", func(c *weir.Config) { c.Security.ClusterSecretFile = "/none" }},
		{"AuditLog: ", func(c *weir.Config) { c.Security.AuditLog = "/none/audit" }},
		{"Registerer: ", func(c *weir.Config) { c.Registerer = registry }},
	} {
		cfg := member("node")
		c.spoil(&cfg)
		n := must.Value(weir.NewNode(cfg))(t)
		if err := n.Start(t.Context()); err == nil || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%v, want %s", err, c.want)
			_ = n.Stop(t.Context())
			continue
		}
		expect.True(t, n.Service() == nil, "%s: there is a service", c.want)
	}
	left := len(gathered(t, registry))
	expect.True(t, left == registered, "%d metrics are registered, %d were", left, registered)
	cfg := member("node", busy.Addresses().Gossip)
	cfg.Voters = []string{"node"}
	foreign := start(t, cfg)
	err := foreign.Await(testkit.Within(t, 30*time.Second))
	expect.True(t, err != nil && err == foreign.Err() && strings.Contains(err.Error(), "another list of voters"),
		"awaited with other voters: %v", err)
	expect.NoError(t, foreign.Stop(t.Context()))
	expect.NoError(t, busy.Stop(t.Context()))
}

func gathered(t *testing.T, g prometheus.Gatherer) []string {
	t.Helper()
	list := must.Value(g.Gather())(t)
	var names []string
	for _, f := range list {
		names = append(names, f.GetName())
	}
	return names
}

func portOf(t *testing.T, addr string) (port int) {
	t.Helper()
	_, err := fmt.Sscanf(addr, "127.0.0.1:%d", &port)
	must.NoError(t, err)
	return port
}

// TestValidate: a mistake in any field is an error that begins with its name, and the zero value is right but for the
// name.
func TestValidate(t *testing.T) {
	cases := map[string][]func(*weir.Config){
		"Name": {func(c *weir.Config) { c.Name = "" }, func(c *weir.Config) { c.Name = "a b" }},
		"Bind": {func(c *weir.Config) { c.Bind = "localhost" },
			func(c *weir.Config) { c.Bind = "0.0.0.0"; c.HTTPPort = 80 }},
		"Advertise": {func(c *weir.Config) { c.Advertise = "host:80" },
			func(c *weir.Config) { c.Advertise = "0.0.0.0" }},
		"GossipPort": {func(c *weir.Config) { c.GossipPort = -2 },
			func(c *weir.Config) { c.GossipPort = 65536 }},
		"PeerPort": {func(c *weir.Config) { c.PeerPort = -2 },
			func(c *weir.Config) { c.GossipPort = weir.AnyPort }},
		"HTTPPort": {func(c *weir.Config) { c.HTTPPort = math.MinInt }},
		"GRPCPort": {func(c *weir.Config) { c.GRPCPort = math.MaxInt }},
		"RESPPort": {func(c *weir.Config) { c.RESPPort = 65536 }},
		"Join": {func(c *weir.Config) { c.Join = []string{"host:1"} },
			func(c *weir.Config) { cluster(c); c.Join = []string{"host"} }},
		"Voters": {func(c *weir.Config) { c.Voters = []string{"a", "b"} },
			func(c *weir.Config) { cluster(c); c.Voters = []string{"a", "a", "b"} },
			func(c *weir.Config) { c.Voters = []string{"a", "b", "c"} }},
		"MaxMembers": {func(c *weir.Config) { c.MaxMembers = -1 },
			func(c *weir.Config) { c.MaxMembers = 10_001 }},
		"Policies": {func(c *weir.Config) { c.Policies = []byte("policies: [{name: a}]") },
			func(c *weir.Config) { c.Policies, c.PolicyFile = []byte(tenAnHour), "f" },
			func(c *weir.Config) { c.Policies = []byte(strict) }},
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
		"Insecure":          nil, "PolicyFile": nil, "DataDir": nil, "NoInline": nil, "NoConsole": nil, "Logger": nil,
		"Registerer": nil,
		"Security":   nil, // its fields are listed
	}
	for field, spoils := range cases {
		for i, spoil := range spoils {
			cfg := weir.Config{Name: "node"}
			must.NoError(t, cfg.Validate())
			spoil(&cfg)
			err := cfg.Validate()
			expect.True(t, err != nil && strings.HasPrefix(err.Error(), field+":"), "%s, %d: %v", field, i, err)
			n, err := weir.NewNode(cfg)
			expect.True(t, err != nil && n == nil, "%s, %d: a node is made: %v", field, i, err)
		}
	}
	for _, of := range []reflect.Type{reflect.TypeFor[weir.Config](), reflect.TypeFor[weir.Security]()} {
		for _, f := range reflect.VisibleFields(of) {
			_, ok := cases[f.Name]
			expect.True(t, ok, "nothing is said of %s", f.Name)
		}
	}
	cfg := weir.Config{Name: "node", Memory: 64 << 20}
	expect.NoError(t, cfg.Validate(), "the least memory")
	// Settings are fields at the beginning of a line alone.
	cfg = weir.Config{Name: "http-port tls-key-file"}
	err := cfg.Validate()
	expect.True(t, err != nil && strings.HasPrefix(err.Error(), `Name: "http-port tls-key-file" `), "%v", err)
}

const strict = "policies: [{name: a, algorithm: sliding_log, limit: 1, window: 1m, durability: sync, consistency: strict}]"

// cluster gives a configuration the ports of a member.
func cluster(c *weir.Config) { c.GossipPort, c.PeerPort = weir.AnyPort, weir.AnyPort }
