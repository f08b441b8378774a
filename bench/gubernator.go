package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"

	"github.com/weirlimit/weir/gateway/gubernator/gubernatorpb"
)

// A gubCluster is one Gubernator daemon or several, each a process.
type gubCluster struct {
	servers   []*process
	addresses []string
	clients   [][]gubernatorpb.V1Client // of each daemon
}

// startGubernator starts daemons with Gubernator's defaults, except for a cache that holds all keys (its default of
// 50,000 would forget counters) and a quiet log.
func (b *bench) startGubernator(ctx context.Context, daemons int) (g *gubCluster, err error) {
	path, err := b.gubernator()
	if err != nil {
		return nil, fmt.Errorf("gubernator is not to be had: %w", err)
	}
	ports, err := freePorts(3 * daemons)
	if err != nil {
		return nil, err
	}
	at := func(i int) string { return fmt.Sprintf("127.0.0.1:%d", ports[i]) }
	g = &gubCluster{}
	defer func() {
		if err != nil {
			b.kids.stop(g.servers...)
		}
	}()
	for i := range daemons {
		g.addresses = append(g.addresses, at(3*i))
	}
	for i, address := range g.addresses {
		env := []string{
			"GUBER_GRPC_ADDRESS=" + address,
			"GUBER_HTTP_ADDRESS=" + at(3*i+1),
			"GUBER_CACHE_SIZE=2000000",
			"GUBER_LOG_LEVEL=error",
			"OTEL_TRACES_EXPORTER=none", // for Gubernator's own command, which traces unless told not to
		}
		var args []string
		if daemons == 1 {
			env = append(env, "GUBER_PEER_DISCOVERY_TYPE=member-list", "GUBER_MEMBERLIST_ADDRESS="+at(3*i+2),
				"GUBER_MEMBERLIST_BIND_ADDRESS="+at(3*i+2), "GUBER_MEMBERLIST_KNOWN_NODES="+at(3*i+2))
		} else {
			env = append(env, "GUBER_PEER_DISCOVERY_TYPE=none")
			args = []string{"-peers", strings.Join(g.addresses, ",")}
		}
		p, err := b.kids.start("gubernator", path, args, env)
		if err != nil {
			return nil, err
		}
		g.servers = append(g.servers, p)
		if err := g.dial(address); err != nil {
			return nil, err
		}
	}
	return g, eventually(ctx, g.servers, func(ctx context.Context) error {
		// Before gRPC tries: it would wait a second or more after a connection that is refused.
		for _, address := range g.addresses {
			var d net.Dialer
			c, err := d.DialContext(ctx, "tcp", address)
			if err != nil {
				return err
			}
			c.Close()
		}
		for _, c := range g.clients {
			h, err := c[0].HealthCheck(ctx, &gubernatorpb.HealthCheckReq{})
			if err != nil {
				return err
			}
			if h.Status != "healthy" || int(h.PeerCount) != daemons {
				return fmt.Errorf("a daemon is %s with %d peers of %d: %s", h.Status, h.PeerCount, daemons, h.Message)
			}
		}
		return nil
	})
}

// dial adds the clients of an address, which may be a node of Weir.
func (g *gubCluster) dial(address string) error {
	conns, err := dial(address, connections)
	if err != nil {
		return err
	}
	var clients []gubernatorpb.V1Client
	for _, c := range conns {
		clients = append(clients, gubernatorpb.NewV1Client(c))
	}
	g.clients = append(g.clients, clients)
	return nil
}

// entry is the cluster as callers see it who know the first daemon only.
func (g *gubCluster) entry() *gubCluster { return &gubCluster{clients: g.clients[:1]} }

func newRateLimitsRequest(batch int) *gubernatorpb.GetRateLimitsReq {
	req := &gubernatorpb.GetRateLimitsReq{}
	for range batch {
		req.Requests = append(req.Requests, &gubernatorpb.RateLimitReq{
			Name: "bucket", Hits: 1, Limit: limitUnits, Duration: limitWindow.Milliseconds(), Algorithm: gubernatorpb.Algorithm_TOKEN_BUCKET,
		})
	}
	return req
}

// caller returns callers that ask batch checks of a random daemon in each call.
func (g *gubCluster) caller(batch int, pick func(*rand.Rand) string) func(i int) caller {
	return func(i int) caller {
		random := rand.New(rand.NewPCG(uint64(i), rand.Uint64()))
		req := newRateLimitsRequest(batch)
		return loop(func(ctx context.Context) (int, error) {
			for _, r := range req.Requests {
				r.UniqueKey = pick(random)
			}
			daemon := g.clients[random.IntN(len(g.clients))]
			resp, err := daemon[i%len(daemon)].GetRateLimits(ctx, req)
			if err != nil {
				return 0, err
			}
			_, err = countUnder(resp, batch)
			return batch, err
		})
	}
}

// countUnder returns how many checks were admitted, and an error unless all were decided.
func countUnder(resp *gubernatorpb.GetRateLimitsResp, checks int) (int, error) {
	if len(resp.Responses) != checks {
		return 0, fmt.Errorf("%d responses for %d checks", len(resp.Responses), checks)
	}
	under := 0
	for _, r := range resp.Responses {
		if r.Error != "" {
			return 0, errors.New(r.Error)
		}
		if r.Status == gubernatorpb.Status_UNDER_LIMIT {
			under++
		}
	}
	return under, nil
}

// foreignKeys returns keys that the first daemon asks another for: it names the owner in their answers.
func (g *gubCluster) foreignKeys(ctx context.Context, keys []string) ([]string, error) {
	const look = 1000
	req := newRateLimitsRequest(look)
	for i, r := range req.Requests {
		r.UniqueKey = keys[i]
		r.Hits = 0
	}
	resp, err := g.clients[0][0].GetRateLimits(ctx, req)
	if err != nil {
		return nil, err
	}
	if _, err := countUnder(resp, look); err != nil {
		return nil, err
	}
	var foreign []string
	for i, r := range resp.Responses {
		if owner := r.Metadata["owner"]; owner != "" && owner != g.addresses[0] {
			foreign = append(foreign, keys[i])
		}
	}
	if len(foreign) < look/4 {
		return nil, fmt.Errorf("gubernator says that only %d keys of %d have another owner", len(foreign), look)
	}
	return foreign, nil
}
