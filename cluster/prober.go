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
//  1. The library calls heard, up and down (delegate.go). They tell the verifier, and wake run.
//  2. run asks the verifier for the candidate to ask next, and starts a goroutine for each (probe).
//  3. probe asks the process on its peer port (Config.Identify), and compares the answer with the claim.
//  4. answered tells the verifier the outcome. It posts to the cluster's goroutine which processes count from now on,
//     and which do not any more.
//  5. If a process counts and the library does not list it, join makes the library exchange memberships with it. Until
//     the library lists it, it is in doubt like a member that gossip takes for dead.
//
// Other files must keep: the library calls heard, up and down with its own locks held, so mu is never held while the
// library is called.

// probeTimeout bounds the wait for a process to say who it is.
const probeTimeout = time.Second

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
		Name: c.self.name, Boot: c.self.boot, State: c.View().Self.State, Settings: c.self.Settings,
		Voters:     c.self.Voters,
		GossipPort: c.self.addr.Port(), HTTPPort: c.self.HTTP, GRPCPort: c.self.GRPC,
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
		p.mu.Unlock()
		if found {
			asked.Go(func() {
				p.probe(ctx, c, foreign)
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

// heard takes in what gossip says of a process, and returns why it does not count, or nil. foreign says why it cannot
// be a member; nil: it can.
func (p *prober) heard(n node, foreign error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	err := p.v.heard(n.claim(), foreign, p.now())
	p.look()
	return err
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
	leaves := p.listed[id].State == Leaving
	delete(p.listed, id)
	if !leaves && p.v.doubt(id, p.now()) {
		p.c.post(func() { p.c.log.Warn("member suspected", "member", id.name) })
		p.look()
		return
	}
	p.v.remove(id)
	p.c.post(func() { p.c.down(id) })
}

// ask makes run ask a member again at once.
func (p *prober) ask(id identity) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.v.doubt(id, p.now())
	p.look()
}

// known reports whether an address is one of this process, a seed or a member.
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
func (p *prober) probe(ctx context.Context, c claim, foreign bool) {
	asking, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	id, err := p.c.cfg.Identify(asking, c.endpoint().String())
	if ctx.Err() != nil {
		return
	}
	if err == nil {
		err = p.compare(c, id, foreign)
	}
	if p.answered(c, id, err) {
		p.join(c)
	}
}

// join makes the library exchange memberships with a process.
func (p *prober) join(c claim) {
	if _, err := p.c.list.Join([]string{c.addr.String()}); err != nil {
		p.c.log.Debug("membership exchange failed", "member", c.name, "error", err)
	}
}

// answered takes in the outcome of a question, and posts what the roster must know. It reports whether the library must
// exchange memberships with the process: it counts, and the library does not list it. In the exchange the library
// learns of it, or the process hears that gossip takes it for dead, and refutes that.
func (p *prober) answered(c claim, id Identity, err error) (exchange bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	a := p.v.answered(c, err, p.now())
	n, listed := p.listed[c.identity]
	if a.joins && !listed {
		p.v.doubt(c.identity, p.now().Add(doubtAgain)) // it was kept from the library (NotifyAlive)
	}
	p.c.post(func() {
		for _, gone := range a.gone {
			p.c.down(gone)
		}
		switch {
		case a.joins && listed && n.claim() == c:
			p.c.up(n)
		case a.foreign != nil:
			if p.c.roster.refused(a.foreign) && id.State.established() {
				p.c.fail(a.foreign)
			}
		case a.failures == 1:
			p.c.unanswered(c, err)
		case a.kept:
			p.c.failOnConflict(c.identity)
		}
	})
	return a.kept || a.joins && !listed
}

// compare says why a process is not the one of the claim. The settings of a foreign one must differ from this node's.
func (p *prober) compare(c claim, id Identity, foreign bool) error {
	switch {
	case id.Name != c.name || id.Boot != c.boot:
		return fmt.Errorf("there is another process: %.63q", id.Name)
	case id.GossipPort != c.addr.Port() || id.HTTPPort != c.HTTP || id.GRPCPort != c.GRPC:
		return errors.New("it listens on other ports than gossip says")
	case foreign == (id.Settings == p.c.self.Settings && id.Voters == p.c.self.Voters):
		return errors.New("its settings are not those that gossip says")
	}
	return nil
}
