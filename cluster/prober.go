package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/weirlimit/weir/internal/fifo"
)

// probeTimeout bounds the wait for a process to say who it is.
const probeTimeout = 2 * time.Second

// Identity is what a process answers on its peer port when it is asked who it is.
type Identity struct {
	Name       string
	Boot       uint64
	State      State
	Settings   uint64 // Config.SettingsFingerprint
	Voters     uint32 // a fingerprint of Config.Voters; 0: none
	GossipPort uint16 // of those ports that others reach it at; 0: none
	HTTPPort   uint16
	GRPCPort   uint16
}

// Identity returns what this process answers.
func (c *Cluster) Identity() Identity {
	return Identity{
		Name: c.self.name, Boot: c.self.boot, State: c.View().Self.State, Settings: c.self.settings,
		Voters:     c.self.voters,
		GossipPort: c.self.addr.Port(), HTTPPort: c.self.http, GRPCPort: c.self.grpc,
	}
}

// prober asks the processes that gossip names who they are, between the gossip and the roster.
type prober struct {
	c    *Cluster
	wake fifo.Signal

	mu     sync.Mutex // held while what follows is posted, too, so that the roster hears of it in this order
	v      *verifier
	listed map[identity]node // those that the library lists, whether they count or not
}

func newProber(c *Cluster) *prober {
	return &prober{c: c, wake: fifo.NewSignal(), v: newVerifier(c.self.claim(), c.cfg.MaxMembers),
		listed: map[identity]node{}}
}

// now reads the clock that back-off and expiry go by.
func (p *prober) now() time.Time { return time.Now() }

// run asks until ctx ends, and waits for those that are being asked.
func (p *prober) run(ctx context.Context) {
	var asked sync.WaitGroup
	defer asked.Wait()
	for {
		p.mu.Lock()
		c, foreign, found, wait := p.v.next(p.now())
		timeout := p.v.timeout(c)
		p.mu.Unlock()
		if found {
			asked.Go(func() {
				p.probe(ctx, c, foreign, timeout)
				p.look()
			})
			continue
		}
		select {
		case <-p.wake:
		case <-time.After(wait):
		case <-ctx.Done():
			return
		}
	}
}

// look wakes run, which looks for a process to ask.
func (p *prober) look() { p.wake.Set() }

// heard takes in what gossip says of a process, and returns why it does not count. It is called with the library's
// locks held.
func (p *prober) heard(n node) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	err := p.v.heard(n.claim(), p.now())
	p.look()
	return err
}

// heardForeign takes in what gossip says of a process that cannot be a member, and why.
func (p *prober) heardForeign(n node, why error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.v.heardForeign(n.claim(), why, p.now())
	p.look()
}

// up takes in that the library lists a process, or that it has changed its metadata.
func (p *prober) up(n node) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.listed[n.identity] = n
	p.v.believe(n.claim())
	if p.v.isMember(n.claim()) {
		p.c.post(func() { p.c.up(n) })
	}
}

// down takes in that the library lists a process no more. One that has said that it leaves is gone; any other is asked
// first.
func (p *prober) down(id identity) {
	p.mu.Lock()
	defer p.mu.Unlock()
	leaves := p.listed[id].state == Leaving
	delete(p.listed, id)
	if !leaves && p.v.doubt(id, p.now()) {
		p.look()
		return
	}
	p.v.down(id)
	p.c.post(func() { p.c.down(id) })
}

// ask has a member asked again at once.
func (p *prober) ask(id identity) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.v.ask(id, p.now())
	p.look()
}

// known reports whether an address is one of this process, a seed or a live member.
func (p *prober) known(ip netip.Addr) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.v.known(ip)
}

// setSeeds tells the addresses of the seeds.
func (p *prober) setSeeds(seeds map[netip.Addr]bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.v.seeds = seeds
}

func (p *prober) pending() (all, fresh int, detail string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.v.pending()
}

// probe asks one process, and sees to what follows.
func (p *prober) probe(ctx context.Context, c claim, foreign bool, timeout time.Duration) {
	asking, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	id, err := p.c.cfg.Identify(asking, c.endpoint().String())
	if ctx.Err() != nil {
		return
	}
	what := silent
	if err == nil {
		what, err = p.compare(c, id, foreign)
	}
	switch a, listed := p.answered(c, what, id, err); {
	case a.joins && !listed:
		p.takeIn(c)
	case a.kept:
		// What the library has heard is told to the process itself, which refutes it.
		p.join(c)
	}
}

// takeIn has the library learn of a process that counts, which it was kept from before.
func (p *prober) takeIn(c claim) {
	p.join(c)
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, listed := p.listed[c.identity]; !listed {
		p.v.down(c.identity) // until it is heard of again: the library will not say that it is gone
	}
}

// join has the library exchange memberships with a process.
func (p *prober) join(c claim) {
	if _, err := p.c.list.Join([]string{c.addr.String()}); err != nil {
		p.c.log.Debug("membership exchange failed", "member", c.name, "error", err)
	}
}

// answered takes in what came of a question, and returns what follows and whether the library lists the process. One
// that counts and is not listed is to be made known to the library, which it was kept from before.
func (p *prober) answered(c claim, what outcome, id Identity, err error) (a answer, listed bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	a = p.v.answered(c, what, err, p.now())
	n, listed := p.listed[c.identity]
	p.c.post(func() {
		for _, gone := range a.gone {
			p.c.down(gone)
		}
		switch {
		case a.joins && listed && n.claim() == c:
			p.c.up(n)
		case a.foreign != nil:
			if err := p.c.roster.refused(id.State, a.foreign, true); err != nil {
				p.c.fail(err)
			}
		case a.failures == 1:
			p.c.unanswered(c, err)
		case a.first:
			p.c.log.Warn("suspected member answered on its peer port", "member", c.name, "addr", c.addr)
		}
		if a.joins {
			p.c.failOnConflict(c.identity)
		}
	})
	return a, listed
}

// compare says whether a process is the one that gossip claims, of this cluster or a foreign one.
func (p *prober) compare(c claim, id Identity, foreign bool) (outcome, error) {
	switch {
	case id.Name != c.name || id.Boot != c.boot:
		return mistaken, fmt.Errorf("there is another process: %.63q", id.Name)
	case id.GossipPort != c.addr.Port() || id.HTTPPort != c.http || id.GRPCPort != c.grpc:
		return mistaken, errors.New("it listens on other ports than gossip says")
	case foreign == (id.Settings == p.c.self.settings && id.Voters == p.c.self.voters):
		return mistaken, errors.New("its settings are not those that gossip says")
	}
	return confirmed, nil
}
