// Package weir embeds a member of a Weir cluster in a program. The program asks its member without a network: the
// member decides for the keys that it holds, and forwards checks of other keys to their holders.
//
// A Node works as a node that the command weir run starts, can be a member of the same cluster, and gives the same
// guarantees. It takes its own part of the process's memory. It reads no flag and no environment, handles no signal,
// ends no process, and sets no property of the process, such as the garbage collector's limits or a default logger.
// Several Nodes in one process share nothing.
//
// A program crashes no more rarely with a Node in it. What a crash loses depends on each policy's durability.
package weir

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/internal/node"
	"github.com/weirlimit/weir/limit"
)

// Node is a member of a cluster, or a node without a cluster. Its methods are safe for concurrent use.
type Node struct {
	cfg node.Config

	mu      sync.Mutex // held while the node starts
	stopped bool
	node    atomic.Pointer[node.Node] // nil before it has started
}

// NewNode returns a Node that has not been started. It opens nothing. The error is that of cfg.Validate.
func NewNode(cfg Config) (*Node, error) {
	c, err := cfg.node()
	if err != nil {
		return nil, err
	}
	return &Node{cfg: c}, nil
}

// Start opens files and ports, and joins the cluster. It returns when all ports are served; Await waits until the node
// is ready. If ctx ends later, the node goes on. The error begins with the field of Config that is wrong, if there is
// one, and nothing is left open. A Node can be started once.
func (n *Node) Start(ctx context.Context) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case n.stopped:
		return errors.New("weir: the node has been stopped")
	case n.node.Load() != nil:
		return errors.New("weir: the node has been started")
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	started, err := node.Start(ctx, n.cfg)
	if err != nil {
		return fieldError(err)
	}
	n.node.Store(started)
	return nil
}

// errNotStarted is the error of methods that need a started node.
var errNotStarted = errors.New("weir: the node has not been started")

// Await waits until the node is ready: a member that sees the same ring as all others, and holds its partitions. It
// returns an error if ctx ends before, or the node cannot go on. Checks are answered before that too, by members that
// are ready.
func (n *Node) Await(ctx context.Context) error {
	r := n.node.Load()
	if r == nil {
		return errNotStarted
	}
	select {
	case <-r.Settled():
		return nil
	case <-r.Failed():
		return r.Err()
	case <-ctx.Done():
		_, why := r.Ready()
		return fmt.Errorf("weir: not ready: %s: %w", why, context.Cause(ctx))
	}
}

// Ready reports whether the node is ready now. why says why not, or what an operator of a ready node should know.
func (n *Node) Ready() (ready bool, why string) {
	r := n.node.Load()
	if r == nil {
		return false, errNotStarted.Error()
	}
	return r.Ready()
}

// Failed returns a channel that is closed when the node cannot go on. Err says why; the program should call Stop. It is
// nil before Start.
func (n *Node) Failed() <-chan struct{} {
	if r := n.node.Load(); r != nil {
		return r.Failed()
	}
	return nil
}

// Err returns why the node cannot go on, such as another member with its name; nil while it can.
func (n *Node) Err() error {
	if r := n.node.Load(); r != nil {
		return r.Err()
	}
	return nil
}

// Stop leaves the cluster, hands over what the node holds, finishes calls in flight on the ports, and ends everything:
// until ctx is done, and within Config.Grace. Leaving the gossip takes about a second more. Stop returns when
// everything has ended. The error says what was not handed over; copies replace it as after a crash. Stop may be called
// again, and on a Node that was never started.
//
// The program's own callers should stop before. During Stop checks are forwarded; after it, the policy's on_error
// answers them.
func (n *Node) Stop(ctx context.Context) error {
	n.mu.Lock()
	n.stopped = true
	n.mu.Unlock()
	r := n.node.Load()
	if r == nil {
		return nil
	}
	return r.StopWithin(ctx)
}

// Service returns the whole interface of the node, with its errors. It is nil before Start. No access file applies to
// calls through it.
func (n *Node) Service() limit.Service {
	if r := n.node.Load(); r != nil {
		return r.Service()
	}
	return nil
}

// Client returns the Service as a client of package client, with handles to policies, leases and reservations. Close
// ends the Client and not the Node. It is nil before Start.
func (n *Node) Client() *client.Client {
	if r := n.node.Load(); r != nil {
		return client.New(r.Service(), func() {})
	}
	return nil
}

// Addresses are the addresses that a node listens on, HOST:PORT with the real ports; empty: the port is off.
type Addresses struct {
	Gossip, Peer, HTTP, GRPC, RESP string
}

// Addresses returns the addresses that the node listens on. Other members join it by Gossip.
func (n *Node) Addresses() Addresses {
	r := n.node.Load()
	if r == nil {
		return Addresses{}
	}
	return Addresses{Gossip: r.GossipAddr(), Peer: r.PeerAddr(), HTTP: r.HTTPAddr(), GRPC: r.GRPCAddr(),
		RESP: r.RESPAddr()}
}
