package cluster

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"
)

const (
	resolveTimeout = 2 * time.Second
	seekFanout     = 8 // addresses tried at a time; one that answers is enough, the next round takes others
)

// seeker brings the node together with its seeds: at the start, and for ever after, because the library never heals a
// split.
type seeker struct {
	c      *Cluster
	silent map[string]bool // seeds whose failure has been logged; the goroutine run owns it
}

// run tries the seeds until ctx ends.
func (s *seeker) run(ctx context.Context) {
	for {
		s.round(ctx)
		s.c.post(s.c.roster.seedsTried)
		pause := s.c.cfg.RejoinInterval
		if s.c.View().Self.State == Joining {
			pause /= 10
		}
		select {
		case <-time.After(pause/2 + rand.N(pause)):
		case <-ctx.Done():
			return
		}
	}
}

// round tries the addresses of all seeds that are not those of live members.
func (s *seeker) round(ctx context.Context) {
	members := map[netip.AddrPort]bool{s.c.self.addr: true}
	for _, m := range s.c.View().Members {
		members[netip.MustParseAddrPort(m.GossipAddr)] = true
	}
	seedOf := map[netip.AddrPort]string{}
	hosts := map[netip.Addr]bool{}
	for i, addrs := range s.resolve(ctx) {
		for _, a := range addrs {
			hosts[a.Addr()] = true
			if seed := s.c.cfg.Join[i]; !members[a] && s.reachable(seed, a) {
				seedOf[a] = seed
			}
		}
	}
	s.c.prober.setSeeds(hosts)
	if len(hosts) > 0 {
		s.c.post(func() { s.c.roster.found = true })
	}
	var tries sync.WaitGroup
	tried := 0
	for a, seed := range seedOf { // in random order
		if tried++; tried <= seekFanout {
			tries.Go(func() { s.try(ctx, seed, a) })
		}
	}
	tries.Wait()
}

// try makes the library exchange memberships with the process at a seed's address.
func (s *seeker) try(ctx context.Context, seed string, a netip.AddrPort) {
	_, err := s.c.list.Join([]string{a.String()})
	switch {
	case ctx.Err() != nil:
	case err == nil:
		s.answers(seed)
	case strings.Contains(err.Error(), "crypt"):
		err = fmt.Errorf("seed %s at %s uses another gossip key, or one of the two uses none; give all nodes the same gossip-key-file", seed, a)
		s.fails(seed, err)
		s.c.post(func() { s.c.refused(a.String(), err) })
	default:
		// The library's errors are lists over several lines.
		s.fails(seed, errors.New(strings.Join(strings.Fields(err.Error()), " ")))
	}
}

// resolve returns the addresses of each seed. A name without addresses is logged: in Kubernetes that of a headless
// service may come later.
func (s *seeker) resolve(ctx context.Context) [][]netip.AddrPort {
	ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	addrs := make([][]netip.AddrPort, len(s.c.cfg.Join))
	var wg sync.WaitGroup
	for i, seed := range s.c.cfg.Join {
		wg.Go(func() {
			var err error
			if addrs[i], err = lookUp(ctx, seed); err != nil {
				s.fails(seed, err)
			}
		})
	}
	wg.Wait()
	return addrs
}

func lookUp(ctx context.Context, seed string) ([]netip.AddrPort, error) {
	host, port, err := splitSeed(seed)
	if err != nil {
		return nil, err
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		return []netip.AddrPort{netip.AddrPortFrom(ip.Unmap(), port)}, nil
	}
	ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil, fmt.Errorf("does not resolve: %w", err)
	}
	addrs := make([]netip.AddrPort, len(ips))
	for i, ip := range ips {
		addrs[i] = netip.AddrPortFrom(ip.Unmap(), port)
	}
	return addrs, nil
}

// reachable says whether it makes sense to tell a seed about this node.
func (s *seeker) reachable(seed string, a netip.AddrPort) bool {
	err := checkReachable(s.c.self.addr.Addr(), seed, a.Addr())
	if err == nil {
		return true
	}
	s.fails(seed, err)
	s.c.post(func() { s.c.roster.refused(err) })
	return false
}

// checkReachable rejects a seed on another machine while others are told a loopback address of this one: they would
// look for us on their own machine.
func checkReachable(self netip.Addr, seed string, addr netip.Addr) error {
	if !self.IsLoopback() || addr.IsLoopback() {
		return nil
	}
	return fmt.Errorf("join: seed %s is on another machine, which cannot reach this node at %s; set bind or advertise",
		seed, self)
}

// fails logs that a seed fails, until it has answered.
func (s *seeker) fails(seed string, err error) {
	s.c.post(func() {
		if !s.silent[seed] {
			s.silent[seed] = true
			s.c.log.Warn("seed unreachable", "seed", seed, "error", err)
		}
	})
}

func (s *seeker) answers(seed string) {
	s.c.post(func() {
		if s.silent[seed] {
			delete(s.silent, seed)
			s.c.log.Info("seed reached", "seed", seed)
		}
	})
}
