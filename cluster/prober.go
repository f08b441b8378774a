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

// This file asks the processes that gossip names who they are. It lies between the membership library and the roster.
// verifier.go has the state and the words.
//
//  1. The library calls heard, heardForeign, up and down (delegate.go). They tell the verifier, and wake run.
//  2. run asks the verifier for the candidate to ask next, and starts a goroutine for each (probe).
//  3. probe asks the process on its peer port (Config.Identify), and compares the answer with the claim.
//  4. answered tells the verifier the outcome. It posts to the cluster's goroutine which processes count from now on,
//     and which do not any more.
//  5. If a process counts and the library does not list it, takeIn makes the library exchange memberships with it.
//
// Other files must keep: the library calls heard, up and down with its own locks held, so mu is never held while the
// library is called.

// probeTimeout bounds the wait for a process to say who it is.
const probeTimeout = 2 * time.Second

// Identity is what a process answers on its peer port when it is asked who it is.
type Identity struct {
	Name       string
	Boot       uint64
	State      State
	Settings   uint64 // Config.SettingsFingerprint
	Voters     uint32 // a fingerprint of Config.Voters; 0: none
	GossipPort uint16 // the ports at which other nodes reach it; 0: none
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

// prober runs a verifier. Its methods are safe for concurrent use.
type prober struct {
	c    *Cluster
	wake fifo.Signal // wakes run

	mu     sync.Mutex // held also while something is posted, so that the roster hears of changes in their order
	v      *verifier
	listed map[identity]node // the processes that the library lists, whether they count or not
}

func newProber(c *Cluster) *prober {
	return &prober{c: c, wake: fifo.NewSignal(), v: newVerifier(c.self.claim(), c.cfg.MaxMembers),
		listed: map[identity]node{}}
}

// now reads the clock of the verifier.
func (p *prober) now() time.Time { return time.Now() }

// run asks candidates until ctx ends. Then it waits for the questions in flight.
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

// heard takes in what gossip says of a process, and returns why it does not count, or nil.
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

// up takes in that the library lists a process, or that the process has changed its metadata.
func (p *prober) up(n node) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.listed[n.identity] = n
	p.v.believe(n.claim())
	if p.v.isMember(n.claim()) {
		p.c.post(func() { p.c.up(n) })
	}
}

// down takes in that the library does not list a process any more. A process that has said that it leaves is gone. Any
// other one is asked first (doubt).
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

// ask makes run ask a member again at once.
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

// setSeeds sets the addresses of the seeds.
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

// probe asks one process, and does what follows from its answer.
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
		// In the exchange, the process hears that gossip takes it for dead, and refutes it.
		p.join(c)
	}
}

// takeIn makes the library learn of a process that counts from now on. Before, the process was kept from the library
// (NotifyAlive).
func (p *prober) takeIn(c claim) {
	p.join(c)
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, listed := p.listed[c.identity]; !listed {
		p.v.down(c.identity) // because the library does not call down for a process that it does not list
	}
}

// join makes the library exchange memberships with a process.
func (p *prober) join(c claim) {
	if _, err := p.c.list.Join([]string{c.addr.String()}); err != nil {
		p.c.log.Debug("membership exchange failed", "member", c.name, "error", err)
	}
}

// answered takes in the outcome of a question, and posts what the roster must know. It returns what follows, and
// whether the library lists the process.
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

// compare says whether a process is the one of the claim. The settings of a foreign one must differ from this node's.
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
