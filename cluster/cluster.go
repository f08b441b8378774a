package cluster

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/weirlimit/weir/internal/fifo"
)

// Cluster is this process's part in the gossip. All methods are safe for concurrent use.
type Cluster struct {
	cfg  Config
	log  *slog.Logger
	list *memberlist.Memberlist
	self node // as it started; what changes is in roster

	view     atomic.Pointer[View]
	metadata atomic.Pointer[[]byte] // what the list tells about this node
	fatal    chan error

	prober *prober
	bounds *transport // what comes in goes through it

	// The goroutine run owns these.
	roster        *roster
	conflictAsked identity        // uses our name, and is asked whether it is still there
	refusals      map[string]bool // what has been logged about strangers in this minute

	mu    sync.Mutex
	queue []func() // for run to do, in order
	wake  fifo.Signal

	ctx     context.Context // ends with Close
	cancel  context.CancelFunc
	wg      sync.WaitGroup
	keys    sync.Mutex          // held while the keyring is looked at or changed
	keyring *memberlist.Keyring // nil: gossip in plain text

	leave  sync.Mutex // held while the list is told that this node leaves, or is stopped
	closed sync.Once
}

// Bounds on how long this process waits for the gossip to spread what it said last.
const (
	leaveTimeout = 2 * time.Second
	closeTimeout = time.Second
	// The library's queue (v0.7.0, and its issue is open) can drop a broadcast for another one of the same length that
	// is queued at the same time. So what is told is told again: a leave until it has been spread, within leaveTimeout,
	// and anything else a few times, after a repeatAfter that doubles.
	leaveAttempt = 300 * time.Millisecond
	repeatAfter  = 100 * time.Millisecond
	repeats      = 4
)

var errClosed = errors.New("cluster: closed")

// Start opens the gossip port and begins to look for the seeds. It does not wait for them: without seeds the node is
// active when Start returns, with seeds it is joining, and View, Ready and Fatal tell how that goes. Errors name the
// flag that is to blame.
func Start(cfg Config) (*Cluster, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Identify == nil {
		return nil, errors.New("cluster: Identify is not set")
	}
	cfg = cfg.withDefaults()
	ctx, cancel := context.WithCancel(context.Background())
	c, err := start(ctx, cancel, cfg)
	if err != nil {
		cancel()
		return nil, err
	}
	return c, nil
}

func start(ctx context.Context, cancel context.CancelFunc, cfg Config) (*Cluster, error) {
	gossip := newGossipLog(cfg.Logger, func() { cfg.Rejected(OtherKey) })
	var keyring *memberlist.Keyring
	if len(cfg.Keys) > 0 {
		keyring, _ = memberlist.NewKeyring(cfg.Keys, cfg.Keys[0]) // Validate has seen the keys
	}
	t, err := listen(ctx, cfg, keyring, gossip)
	if err != nil {
		return nil, err
	}
	addr, err := advertised(ctx, cfg, t)
	if err != nil {
		t.Shutdown()
		return nil, err
	}
	self := selfNode(&cfg, addr)
	c := &Cluster{
		cfg:      cfg,
		log:      cfg.Logger,
		self:     self,
		fatal:    make(chan error, 1),
		roster:   newRoster(self, cfg.Join),
		refusals: map[string]bool{},
		wake:     fifo.NewSignal(),
		ctx:      ctx,
		cancel:   cancel,
		keyring:  keyring,
		bounds:   t,
	}
	c.prober = newProber(c)
	known := c.prober.known
	t.known.Store(&known)
	c.roster.advance()
	c.view.Store(noView())
	c.tell()
	c.publish()
	conf := c.listConfig(t, gossip)
	if c.list, err = memberlist.Create(conf); err != nil {
		t.Shutdown()
		return nil, fmt.Errorf("cluster: %w", err)
	}
	c.wg.Go(c.run)
	c.wg.Go(func() { c.prober.run(ctx) })
	if len(cfg.Join) > 0 {
		s := &seeker{c: c, silent: map[string]bool{}}
		c.wg.Go(func() { s.run(ctx) })
	}
	return c, nil
}

// selfNode is this process as it starts.
func selfNode(cfg *Config, addr netip.AddrPort) node {
	return node{
		identity: identity{cfg.Name, newBoot()},
		addr:     addr,
		metadata: metadata{
			Protocol: protocol,
			State:    Joining,
			Settings: cfg.SettingsFingerprint,
			Voters:   votersFingerprint(cfg.Voters),
			Policy:   cfg.PolicyHash,
			Envoy:    cfg.EnvoyHash,
			Peer:     uint16(cfg.PeerPort),
			HTTP:     uint16(cfg.HTTPPort),
			GRPC:     uint16(cfg.GRPCPort),
		},
	}
}

// advertised returns the address at which others reach this node.
func advertised(ctx context.Context, cfg Config, t *transport) (netip.AddrPort, error) {
	port := uint16(t.GetAutoBindPort())
	ip, err := netip.ParseAddr(cfg.Advertise)
	switch {
	case err == nil:
	case cfg.Advertise != "":
		ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
		defer cancel()
		ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", cfg.Advertise)
		if err != nil {
			return netip.AddrPort{}, fmt.Errorf("advertise: %w", err)
		}
		ip = ips[0]
		if i := slices.IndexFunc(ips, func(ip netip.Addr) bool { return ip.Unmap().Is4() }); i >= 0 {
			ip = ips[i]
		}
	default:
		own, _, err := t.FinalAdvertiseAddr("", 0)
		if err != nil {
			return netip.AddrPort{}, fmt.Errorf("advertise: cannot tell which address others reach this node at: %w",
				err)
		}
		ip, _ = netip.AddrFromSlice(own)
	}
	ip = ip.Unmap()
	for _, seed := range cfg.Join {
		host, _, err := splitSeed(seed)
		if err != nil {
			return netip.AddrPort{}, fmt.Errorf("join: %w", err)
		}
		if a, err := netip.ParseAddr(host); err == nil {
			if err := checkReachable(ip, seed, a.Unmap()); err != nil {
				return netip.AddrPort{}, err
			}
		}
	}
	return netip.AddrPortFrom(ip, port), nil
}

func newBoot() uint64 {
	var b [8]byte
	rand.Read(b[:])                              // never fails
	return binary.BigEndian.Uint64(b[:]) | 1<<63 // never 0, and of equal length when printed
}

// listConfig tunes the library for a local network of 3 to 100 nodes. A crash is seen when a member's probe has found
// it (up to two intervals with 3 nodes, at once with many), has failed (one interval) and the suspicion has not been
// refuted (3 intervals, at 100 nodes 6; twice that when no other node confirms it). It is then asked on its peer port,
// which takes no time where connections are refused, and probeTimeout where nothing answers. Measured with all nodes in
// one process on two busy cores: 1.3 to 2.7 s at 3 to 30 nodes, 2.3 to 3.3 s at 100.
func (c *Cluster) listConfig(t *transport, gossip *gossipLog) *memberlist.Config {
	conf := memberlist.DefaultLANConfig()
	conf.Name = c.self.identity.String()
	conf.Transport = t
	if c.cfg.wrapTransport != nil {
		conf.Transport = c.cfg.wrapTransport(t)
	}
	conf.BindAddr = c.cfg.Bind
	conf.BindPort = int(c.self.addr.Port())
	conf.AdvertiseAddr = c.self.addr.Addr().String()
	conf.AdvertisePort = int(c.self.addr.Port())
	conf.TCPTimeout = 3 * time.Second
	conf.ProbeInterval = c.cfg.ProbeInterval
	conf.ProbeTimeout = c.cfg.ProbeInterval / 2
	conf.SuspicionMult = 3
	conf.SuspicionMaxTimeoutMult = 2
	conf.GossipInterval = c.cfg.ProbeInterval / 3
	conf.GossipToTheDeadTime = 15 * time.Second
	conf.PushPullInterval = 10 * time.Second
	conf.EnableCompression = false
	conf.Logger = gossip.standard()
	conf.Delegate = delegate{c}
	conf.Events = delegate{c}
	conf.Alive = delegate{c}
	conf.Keyring = c.keyring
	return conf
}

// View returns the present view. It never returns nil and never blocks.
func (c *Cluster) View() *View { return c.view.Load() }

// Ready reports whether this node is active, and says in words why not, or what is wrong although it is.
func (c *Cluster) Ready() (ready bool, detail string) {
	v := c.View()
	return v.Self.State == Active, v.Detail
}

// Fatal returns a channel that gets at most one error: this node cannot be part of its cluster, and the process should
// end with that message. The node takes no other step because of it.
func (c *Cluster) Fatal() <-chan error { return c.fatal }

// SetPolicyHash tells the other members which policies this node has loaded, so that a difference shows.
func (c *Cluster) SetPolicyHash(hash uint32) { c.describe(func(m *metadata) { m.Policy = hash }) }

// SetEnvoyHash tells the other members which configuration files for Envoy this node has loaded; 0: none.
func (c *Cluster) SetEnvoyHash(hash uint32) { c.describe(func(m *metadata) { m.Envoy = hash }) }

// describe changes what this node tells about itself.
func (c *Cluster) describe(change func(*metadata)) {
	c.post(func() {
		if c.roster.self.State != Leaving {
			change(&c.roster.self.metadata)
		}
	})
}

// Leave takes this node out of the ring: here at once, and elsewhere when the others have heard of it, which Leave
// waits for, for 2 s at most. The node remains a member, to finish what it is doing, until Close.
func (c *Cluster) Leave(ctx context.Context) error {
	left := make(chan struct{})
	c.post(func() {
		c.roster.self.State = Leaving
		c.tell()
		c.publish()
		close(left)
	})
	select {
	case <-left:
	case <-c.ctx.Done():
		return errClosed
	}
	// The goroutine run tells nothing more about a leaving node, so no other goroutine calls UpdateNode.
	c.leave.Lock()
	defer c.leave.Unlock()
	var err error
	for range leaveTimeout / leaveAttempt {
		if c.ctx.Err() != nil {
			return errClosed
		}
		if err = c.list.UpdateNode(leaveAttempt); err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("cluster: leaving: %w", ctx.Err())
		}
	}
	return fmt.Errorf("cluster: leaving: %w", err)
}

// Close says goodbye to the others and stops all activity, within about 3 s. The last view stays.
func (c *Cluster) Close() error {
	return c.stop(func() error { return c.list.Leave(closeTimeout) })
}

// stop ends everything after having said goodbye.
func (c *Cluster) stop(goodbye func() error) (err error) {
	c.closed.Do(func() {
		c.mu.Lock()
		c.cancel()
		c.mu.Unlock()
		c.wg.Wait()
		c.leave.Lock()
		defer c.leave.Unlock()
		if gone := goodbye(); gone != nil {
			c.log.Debug("leave not acknowledged", "error", gone)
		}
		if err = c.list.Shutdown(); err != nil {
			err = fmt.Errorf("cluster: %w", err)
		}
	})
	return err
}

// post has the owner of the state do something. It never blocks.
func (c *Cluster) post(do func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ctx.Err() != nil {
		return
	}
	c.queue = append(c.queue, do)
	c.wake.Set()
}

func (c *Cluster) take() []func() {
	c.mu.Lock()
	defer c.mu.Unlock()
	queue := c.queue
	c.queue = nil
	return queue
}

// timers are what the goroutine run waits for besides events.
type timers struct {
	silence     *time.Timer // ends the wait for seeds, once there is a process that could answer
	waiting     bool        // silence runs
	settle      *time.Timer // since a member last came or went
	conflict    *time.Timer // since another process has our name
	conflicting identity    // that process
	minute      *time.Ticker
	repeat      *time.Timer // until our metadata are spread once more
	repeated    int
}

func newTimers(cfg *Config) *timers {
	t := &timers{
		silence: time.NewTimer(cfg.SeedTimeout), settle: time.NewTimer(cfg.Settle),
		conflict: time.NewTimer(cfg.ConflictTimeout),
		minute:   time.NewTicker(time.Minute), repeat: time.NewTimer(repeatAfter),
	}
	t.silence.Stop()
	t.conflict.Stop()
	return t
}

// run owns the state until Close: it takes in what has happened, and publishes and tells what follows.
func (c *Cluster) run() {
	t := newTimers(&c.cfg)
	for c.await(t) {
		c.advance(t)
	}
}

// await takes in the next event or the end of a timer. It reports false after Close.
func (c *Cluster) await(t *timers) bool {
	select {
	case <-c.wake:
		before := c.view.Load()
		for _, do := range c.take() {
			do()
		}
		if c.publish() && !slices.EqualFunc(before.Members, c.view.Load().Members, sameProcess) {
			c.roster.quiet = false
			t.settle.Reset(c.cfg.Settle)
		}
	case <-t.settle.C:
		c.roster.quiet = true
	case <-t.silence.C:
		c.roster.silence = true
	case <-t.conflict.C:
		if other, taken := c.roster.conflict(); taken {
			// It has answered once. That it is still there only gossip says.
			c.conflictAsked = other.identity
			c.prober.ask(other.identity)
			t.conflict.Reset(c.cfg.ConflictTimeout)
		}
	case <-t.repeat.C:
		if t.repeated < repeats && c.roster.self.State != Leaving {
			c.list.UpdateNode(1) // its argument bounds a wait for the spreading, which is not needed here
			t.repeated++
			t.repeat.Reset(repeatAfter << t.repeated)
		}
	case <-t.minute.C:
		clear(c.refusals)
	case <-c.ctx.Done():
		return false
	}
	return true
}

// advance does what follows from the state, and starts the timers that it asks for.
func (c *Cluster) advance(t *timers) {
	if !t.waiting && c.roster.expectant() {
		t.waiting = true
		t.silence.Reset(c.cfg.SeedTimeout)
	}
	c.roster.unverified, c.roster.fresh, c.roster.why = c.prober.pending()
	c.roster.advance()
	other, taken := c.roster.conflict()
	switch {
	case !taken:
		t.conflicting = identity{}
		t.conflict.Stop()
	case other.identity != t.conflicting:
		t.conflicting = other.identity
		t.conflict.Reset(c.cfg.ConflictTimeout)
	}
	if c.tell() {
		c.list.UpdateNode(1)
		t.repeated = 0
		t.repeat.Reset(repeatAfter)
	}
	c.publish()
}

func sameProcess(a, b Member) bool { return a.Name == b.Name && a.Boot == b.Boot }

// tell puts the metadata where the library takes it from, and reports whether they are new.
func (c *Cluster) tell() bool {
	b := c.roster.self.encode()
	if old := c.metadata.Load(); old != nil && bytes.Equal(*old, b) {
		return false
	}
	c.metadata.Store(&b)
	return true
}

// publish replaces the view when it has changed, and reports whether it has.
func (c *Cluster) publish() bool {
	old := c.view.Load()
	v := c.roster.view(old)
	if slices.Equal(old.Members, v.Members) && *old.Self == *v.Self && old.Alone == v.Alone && old.Detail == v.Detail {
		return false
	}
	c.view.Store(v)
	close(old.replaced)
	if old.Self.State != v.Self.State || old.Alone != v.Alone && v.Self.State == Active {
		c.log.Info("node state changed", "name", v.Self.Name, "state", v.Self.State.String(), "members", len(v.Members),
			"detail", v.Detail)
	}
	return true
}

// up takes in that a node is alive or has changed.
func (c *Cluster) up(n node) {
	if n.identity == c.self.identity {
		return
	}
	if old, known := c.roster.others[n.identity]; !known || old.State != n.State {
		c.log.Info("member state changed", "member", n.name, "state", n.State.String(), "addr", n.addr)
	}
	c.roster.up(n)
}

// down takes in that a node is gone.
func (c *Cluster) down(id identity) {
	n, known := c.roster.others[id]
	switch {
	case !known:
	case n.State == Leaving:
		c.log.Info("member left", "member", n.name, "addr", n.addr)
	default:
		c.log.Warn("member lost", "member", n.name, "addr", n.addr)
	}
	c.roster.down(id)
}

// refused takes in that the process at an address is not of our cluster.
func (c *Cluster) refused(who string, err error) {
	c.cfg.Rejected(OtherCluster)
	c.logStranger(slog.LevelError, "node rejected", who, err)
	c.roster.refused(err)
}

// tooMany takes in that gossip tells of a process for which there is no room.
func (c *Cluster) tooMany(n node, err error) {
	c.cfg.Rejected(TooMany)
	c.logStranger(slog.LevelWarn, "process rejected", n.name, err)
}

// unanswered takes in that a process that gossip tells of did not answer when it was asked for the first time.
func (c *Cluster) unanswered(who claim, err error) {
	c.cfg.Rejected(Unverified)
	c.logStranger(slog.LevelWarn, "process unreachable",
		who.name, fmt.Errorf("%s: %w", who.endpoint(), err))
}

// failOnConflict ends this node when another process has its name, and was there just now.
func (c *Cluster) failOnConflict(id identity) {
	if other, taken := c.roster.conflict(); taken && id == c.conflictAsked && other.identity == id {
		c.fail(inUse(other))
	}
}

// strangerLines bounds the log lines of a minute about processes that gossip names: a host that can write gossip can
// invent any number.
const strangerLines = 20

// logStranger logs a message about a process, once a minute.
func (c *Cluster) logStranger(level slog.Level, message, who string, err error) {
	about := message + who
	if c.refusals[about] || len(c.refusals) >= strangerLines {
		return
	}
	c.refusals[about] = true
	c.log.Log(c.ctx, level, message, "who", who, "error", err)
}

// fail reports a fatal error, the first one only.
func (c *Cluster) fail(err error) {
	select {
	case c.fatal <- err:
		c.log.Error("node failed", "error", err)
	default:
	}
}
