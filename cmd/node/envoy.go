package main

import (
	"fmt"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"

	"github.com/weirlimit/weir/gateway/envoy"
)

// envoySettings are those of the front end for Envoy.
type envoySettings struct {
	Dir string // empty: it is off
	envoy.Options
	Headers, Metadata, Shadow bool
}

func (s *envoySettings) register(fs *pflag.FlagSet) {
	fs.StringVar(&s.Dir, "envoy-config", "", "directory with files (*.yaml, *.yml) in the format of envoyproxy/ratelimit, read again when they change: serves Envoy's rate limit service on the gRPC port and POST /json; empty: off")
	fs.BoolVar(&s.MergeDomains, "envoy-merge-domains", false, "let several files of --envoy-config describe one domain")
	fs.BoolVar(&s.Headers, "envoy-response-headers", false, "have Envoy add RateLimit-Limit, RateLimit-Remaining and RateLimit-Reset to responses")
	fs.BoolVar(&s.Metadata, "envoy-dynamic-metadata", false, "add dynamic metadata to answers to Envoy: what was asked, and the metadata of limits that were not exceeded")
	fs.BoolVar(&s.Shadow, "envoy-shadow", false, "answer OK to every request of Envoy's, whatever its limits say")
}

// envoyFrontEnd is the node's part of the front end for Envoy. The zero value is that of a node without.
type envoyFrontEnd struct {
	files *envoy.Watcher
	hits  *envoy.Hits
}

// openEnvoy reads the configuration files and follows them.
func (n *node) openEnvoy() (err error) {
	s := &n.cfg.Envoy
	if s.Dir == "" {
		return nil
	}
	n.envoy.hits = envoy.NewHits()
	n.envoy.files, err = envoy.Watch(s.Dir, envoy.WatchConfig{Options: s.Options, OnChange: n.envoyChanged, OnError: n.envoyRejected})
	if err != nil {
		return fmt.Errorf("--envoy-config: %w", err)
	}
	return nil
}

// envoyChanged and envoyRejected are called by the watcher, whose goroutine is there before what they work on.
func (n *node) envoyChanged(c *envoy.Config) {
	if n.isBuilt() {
		domains, limits := c.Domains()
		n.log.Info("envoy configuration changed", "domains", domains, "limits", limits)
	}
}

func (n *node) envoyRejected(err error) {
	if n.isBuilt() {
		n.log.Error("envoy configuration rejected, previous configuration stays in force", "error", err)
	}
}

// envoyService returns the service for a listener, nil where it is off.
func (n *node) envoyService(listener string) *envoy.Service {
	if n.envoy.files == nil {
		return nil
	}
	s := &n.cfg.Envoy
	return envoy.NewService(envoy.ServiceConfig{
		Service: n.security.auth.Service(listener, n.limiter), Config: n.envoy.files.Current, Now: time.Now, Count: n.envoy.hits.Count,
		Headers: s.Headers, Metadata: s.Metadata, Shadow: s.Shadow,
	})
}

// envoyJSON returns what answers POST /json, nil where it is off.
func (n *node) envoyJSON() http.Handler {
	if s := n.envoyService("http"); s != nil {
		return s
	}
	return nil
}

// envoyCollectors are the metrics of the front end for Envoy.
func (n *node) envoyCollectors() []prometheus.Collector {
	if n.envoy.hits == nil {
		return nil
	}
	return []prometheus.Collector{n.envoy.hits}
}
