package cluster

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/hashicorp/memberlist"

	"github.com/weirlimit/weir/ring"
)

// delegate is what the library calls, with its locks held. Its methods decide nothing that needs the state and wait for
// nothing: they copy what they are given and leave the rest to the goroutine that owns the state.
type delegate struct{ c *Cluster }

// NodeMeta returns what is told about this node.
func (d delegate) NodeMeta(int) []byte { return *d.c.metadata.Load() }

// NotifyAlive keeps out processes that cannot be members of this cluster, and those that have not answered on their
// peer port: after an error the library forgets what it has heard.
func (d delegate) NotifyAlive(peer *memberlist.Node) error {
	n, err := d.admit(peer)
	if err != nil {
		who := n.name
		if who == "" {
			who = peer.Address()
		}
		d.c.post(func() { d.c.refused(who, err) })
		if n.addr.IsValid() && d.c.View().Self.State == Joining {
			d.c.prober.heard(n, err)
		}
		return err
	}
	if n.identity == d.c.self.identity {
		return nil
	}
	err = d.c.prober.heard(n, nil)
	if errors.Is(err, errTooMany) {
		d.c.post(func() { d.c.tooMany(n, err) })
	}
	return err
}

// admit reads what a node says about itself. With an error it returns as much as can be read.
func (d delegate) admit(peer *memberlist.Node) (node, error) {
	id, err := parseIdentity(peer.Name)
	if err != nil {
		return node{}, err
	}
	n := node{identity: id}
	if n.metadata, err = decodeMetadata(peer.Meta); err != nil {
		return n, fmt.Errorf("node %s at %s: %w", id.name, peer.Address(), err)
	}
	ip, ok := netip.AddrFromSlice(peer.Addr)
	if !ok || !ip.IsValid() {
		return n, fmt.Errorf("node %s has no address", id.name)
	}
	n.addr = netip.AddrPortFrom(ip.Unmap(), peer.Port)
	if n.Protocol != protocol {
		return n, fmt.Errorf("node %s at %s speaks version %d of the cluster's protocol, this node %d; run the same version of weir everywhere",
			id.name, n.addr, n.Protocol, protocol)
	}
	if here := d.c.cfg.SettingsFingerprint; n.Settings != here {
		return n, fmt.Errorf("node %s at %s has %s (fingerprint %016x, here %016x); give all nodes the same cluster-secret-file and run the same version of weir everywhere",
			id.name, n.addr, ring.Difference(here, n.Settings), n.Settings, here)
	}
	if here := d.c.self.Voters; n.Voters != here {
		return n, fmt.Errorf("node %s at %s has another list of voters (fingerprint %08x, here %08x); give all nodes the same voters, and stop them all to change it",
			id.name, n.addr, n.Voters, here)
	}
	return n, nil
}

// NotifyJoin says that a node is alive.
func (d delegate) NotifyJoin(peer *memberlist.Node) { d.NotifyUpdate(peer) }

// NotifyUpdate says that a node has changed its metadata.
func (d delegate) NotifyUpdate(peer *memberlist.Node) {
	if n, err := d.admit(peer); err == nil { // NotifyAlive has reported the others
		d.c.prober.up(n)
	}
}

// NotifyLeave says that a node has left or is taken for dead.
func (d delegate) NotifyLeave(peer *memberlist.Node) {
	if id, err := parseIdentity(peer.Name); err == nil {
		d.c.prober.down(id)
	}
}

// The gossip carries nothing but memberships.

// NotifyMsg does nothing.
func (d delegate) NotifyMsg([]byte) {}

// GetBroadcasts returns nothing.
func (d delegate) GetBroadcasts(int, int) [][]byte { return nil }

// LocalState returns nothing.
func (d delegate) LocalState(bool) []byte { return nil }

// MergeRemoteState does nothing.
func (d delegate) MergeRemoteState([]byte, bool) {}
