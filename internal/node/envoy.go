package node

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/gateway/envoy"
	httpapi "github.com/weirlimit/weir/gateway/http"
)

// Envoy are those of the front end for Envoy.
type Envoy struct {
	Dir string // empty: it is off
	envoy.Options
	Headers, Metadata, Shadow bool
}

// envoyFrontEnd is the node's part of the front end for Envoy. The zero value is that of a node without.
type envoyFrontEnd struct {
	files    *envoy.Watcher
	hits     *envoy.Hits
	services []*envoy.Service // by listener
}

// openEnvoy reads the configuration files and follows them.
func (n *Node) openEnvoy() (err error) {
	s := &n.cfg.Envoy
	if s.Dir == "" {
		return nil
	}
	n.envoy.hits = envoy.NewHits()
	n.envoy.files, err = envoy.NewWatcher(s.Dir, envoy.WatchConfig{Options: s.Options, OnChange: n.envoyChanged, OnError: n.envoyRejected})
	if err != nil {
		return fmt.Errorf("envoy-config: %w", err)
	}
	return nil
}

// envoyHash is the files' hash as gossip carries it; 0 without files.
func (n *Node) envoyHash() uint32 {
	if n.envoy.files == nil {
		return 0
	}
	hash := n.envoy.files.Current().Hash()
	return binary.BigEndian.Uint32(hash[:])
}

// envoyChanged tells of a changed configuration that is in force.
func (n *Node) envoyChanged(c *envoy.Config) {
	if n.cluster != nil {
		n.cluster.SetEnvoyHash(n.envoyHash())
	}
	domains, limits := c.Domains()
	n.log.Info("envoy configuration changed", "domains", domains, "limits", limits)
}

// envoyRejected reports that a changed configuration cannot be taken.
func (n *Node) envoyRejected(err error) {
	n.log.Error("envoy configuration rejected, previous configuration stays in force", "error", err)
}

// envoyService returns the service for a listener, nil where it is off.
func (n *Node) envoyService(listener string) *envoy.Service {
	if n.envoy.files == nil {
		return nil
	}
	s := &n.cfg.Envoy
	service := envoy.NewService(envoy.ServiceConfig{
		Service: n.security.auth.Service(listener, n.limiter), Own: n.limiter, Config: n.envoy.files.Current, Now: time.Now, Count: n.envoy.hits.Count,
		Headers: s.Headers, Metadata: s.Metadata, Shadow: s.Shadow,
	})
	n.envoy.services = append(n.envoy.services, service)
	return service
}

// routes are those of other front ends' protocols, and of the console.
func (n *Node) routes() []httpapi.Route {
	v1 := n.gubernatorService("http")
	list := append(n.consoleRoutes(), []httpapi.Route{
		{Method: "POST", Path: "/v1/GetRateLimits", Role: auth.RoleCheck, Handler: v1.ServeGetRateLimits},
		{Method: "GET", Path: "/v1/HealthCheck", Role: auth.RoleCheck, Handler: v1.ServeHealthCheck},
		{Method: "GET", Path: "/v1/LiveCheck", Role: auth.RoleOpen, Handler: v1.ServeLiveCheck},
	}...)
	if s := n.envoyService("http"); s != nil {
		list = append(list, httpapi.Route{Method: "POST", Path: "/json", Role: auth.RoleCheck, Handler: s.ServeHTTP})
	}
	return list
}

// envoyCollectors are the metrics of the front end for Envoy.
func (n *Node) envoyCollectors() []prometheus.Collector {
	if n.envoy.hits == nil {
		return nil
	}
	return []prometheus.Collector{n.envoy.hits}
}
