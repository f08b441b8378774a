package node

import (
	"context"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/gateway/envoy"
	"github.com/weirlimit/weir/gateway/envoyquota"
	"github.com/weirlimit/weir/gateway/gubernator"
	httpapi "github.com/weirlimit/weir/gateway/http"
	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/ring"
)

// Envoy has the settings of the front end for Envoy.
type Envoy struct {
	Dir          string `flag:"envoy-config" help:"directory with files (*.yaml, *.yml) in the format of envoyproxy/ratelimit, read again when they change: serves Envoy's rate limit service on the gRPC port and POST /json; empty: off"`
	MergeDomains bool   `flag:"envoy-merge-domains" help:"let several files of --envoy-config describe one domain"`
	Headers      bool   `flag:"envoy-response-headers" help:"have Envoy add RateLimit-Limit, RateLimit-Remaining and RateLimit-Reset to responses"`
	Metadata     bool   `flag:"envoy-dynamic-metadata" help:"add dynamic metadata to answers to Envoy: what was asked, and the metadata of limits that were not exceeded"`
	Shadow       bool   `flag:"envoy-shadow" help:"answer OK to every request of Envoy's, whatever its limits say"`
}

// envoyFrontEnd is the node's part of the front end for Envoy. The zero value: there is no front end for Envoy.
type envoyFrontEnd struct {
	files *envoy.Watcher
	hits  *envoy.Hits
	quota *envoyquota.Metrics
}

// openEnvoy reads the configuration files.
func (n *Node) openEnvoy() (err error) {
	s := &n.cfg.Envoy
	if s.Dir == "" {
		return nil
	}
	n.envoy.hits, n.envoy.quota = envoy.NewHits(), envoyquota.NewMetrics()
	options := envoy.Options{MergeDomains: s.MergeDomains, Quotable: n.quotable}
	n.envoy.files, err = envoy.NewWatcher(s.Dir, options, n.envoyChanged, n.envoyRejected)
	if err != nil {
		return fmt.Errorf("envoy-config: %w", err)
	}
	n.ownFiles = append(n.ownFiles, followedFile{n.envoy.files, "envoy_configuration", "envoy configuration"})
	return nil
}

// envoyHash returns the files' hash for gossip; 0 without files.
func (n *Node) envoyHash() uint32 {
	if n.envoy.files == nil {
		return 0
	}
	hash := n.envoy.files.Current().Hash()
	return binary.BigEndian.Uint32(hash[:])
}

// envoyChanged notes that a changed configuration is in force.
func (n *Node) envoyChanged(c *envoy.Config) {
	if n.cluster != nil {
		n.cluster.SetEnvoyHash(n.envoyHash())
	}
	domains, limits := c.Domains()
	n.log.Info("envoy configuration changed", "domains", domains, "limits", limits, "quotas", c.Quotas())
}

// envoyRejected logs that a changed configuration is invalid.
func (n *Node) envoyRejected(err error) {
	n.log.Error("envoy configuration rejected", "error", err, "hint", "the previous configuration stays in force")
}

// envoyService returns a service for a listener, or nil without files.
func (n *Node) envoyService(listener string) *envoy.Service {
	if n.envoy.files == nil {
		return nil
	}
	s := &n.cfg.Envoy
	return envoy.NewService(envoy.ServiceConfig{
		Service: n.security.auth.Service(listener, n.limiter), Config: n.envoy.files.Current,
		Now: time.Now, Count: n.envoy.hits.Count,
		Headers: s.Headers, Metadata: s.Metadata, Shadow: s.Shadow,
	})
}

// quotable returns why a policy of the file cannot be divided among data planes. It does not look at the overrides that
// operators may set at any time.
func (n *Node) quotable(name string) error {
	p, known := n.filePolicies().Get(name)
	if !known {
		return fmt.Errorf("names the policy %q, which there is not", name)
	}
	if err := p.Divisible(); err != nil {
		return fmt.Errorf("names the policy %q, which cannot be divided: %w", name, err)
	}
	for _, r := range p.Rules() {
		if err := r.Limits.Quotable(); err != nil {
			return fmt.Errorf("names the policy %q, whose %w", name, err)
		}
	}
	return nil
}

// quotaService returns Envoy's rate limit quota service, or nil without files.
func (n *Node) quotaService(requests *admission.Gate) *envoyquota.Service {
	if n.envoy.files == nil {
		return nil
	}
	return envoyquota.New(envoyquota.Config{
		Quotas: n.security.auth.Quotas("grpc", n.limiter), Service: n.security.auth.Service("grpc", n.limiter),
		Config: n.envoy.files.Current,
		Now:    func() int64 { return n.clock().Mono + 1 }, Caller: n.security.nameOf, Kept: n.kept, Requests: requests,
		Logger:  n.log,
		Metrics: n.envoy.quota,
	})
}

// foreignRoutes returns the routes of the front ends for Gubernator and Envoy.
func (n *Node) foreignRoutes() []httpapi.Foreign {
	v1 := n.gubernatorService("http")
	list := []httpapi.Foreign{
		{Method: "POST", Path: "/v1/GetRateLimits", Role: auth.RoleCheck, Answer: v1.AnswerGetRateLimits},
		{Method: "GET", Path: "/v1/HealthCheck", Role: auth.RoleCheck, Answer: v1.AnswerHealthCheck},
		{Method: "GET", Path: "/v1/LiveCheck", Role: auth.RoleOpen, Answer: v1.AnswerLiveCheck},
	}
	if s := n.envoyService("http"); s != nil {
		list = append(list, httpapi.Foreign{Method: "POST", Path: "/json", Role: auth.RoleCheck, Answer: s.AnswerJSON})
	}
	return list
}

// envoyCollectors returns the metrics of the front end for Envoy.
func (n *Node) envoyCollectors() []prometheus.Collector {
	switch {
	case n.envoy.hits == nil:
		return nil
	case n.cfg.GRPCPort == PortOff: // data planes ask for quotas over gRPC only
		return []prometheus.Collector{n.envoy.hits}
	}
	return []prometheus.Collector{n.envoy.hits, n.envoy.quota}
}

// gubernatorService returns a service for a listener.
func (n *Node) gubernatorService(listener string) *gubernator.Server {
	return gubernator.New(gubernator.Config{
		Service: n.security.auth.Service(listener, n.limiter), HashKey: n.hashKey, Owner: n.owners,
		Health: n.gubernatorHealth, Now: time.Now,
	})
}

// owners returns ownerAddress for callers with the role topology, and nil for others: they could use it to find keys of
// one node.
func (n *Node) owners(ctx context.Context) func(hash uint64) string {
	if n.security.auth.Roles(ctx)&auth.RoleTopology == 0 {
		return nil
	}
	return n.ownerAddress
}

// ownerAddress returns the gRPC address of the node that decides for a hash; empty: it is this node, or not known.
func (n *Node) ownerAddress(hash uint64) string {
	v := n.view()
	if v == nil {
		return ""
	}
	r := n.runner.Route(ring.Partition(hash))
	if m := v.Member(r.Node.Name); r.Standing != ownership.Owned && m != nil && m.Boot == r.Node.Boot {
		return m.GRPCAddr
	}
	return ""
}

// gubernatorHealth returns the node's health for Gubernator's callers.
func (n *Node) gubernatorHealth() gubernator.Health {
	out := gubernator.Health{Peers: n.members(), Address: addrOf(n.listeners.grpc)}
	if v := n.view(); v != nil {
		out.Address = v.Self.GRPCAddr
	}
	if !n.readiness.Settled() {
		out.Problem = "the node is not ready"
	}
	return out
}
