package node

import (
	"net"

	"github.com/weirlimit/weir/internal/control"
	"github.com/weirlimit/weir/internal/netaddr"
)

// fileKeys returns the keys in the gossip key file, or nil without a file.
func (s *security) fileKeys() [][]byte {
	if s.gossipKeys == nil {
		return nil
	}
	return s.gossipKeys.Current()
}

// openKeys makes the part that changes the gossip keys of all members.
func (n *Node) openKeys() error {
	cfg := control.GossipKeysConfig{
		Self: n.self(), File: n.security.fileKeys, Ask: n.peers.GossipKeys, Private: n.peersArePrivate,
		Record: n.security.audit.Record, Logger: n.log,
		Members: n.memberNodes,
		Denied: func(from net.Addr, reason string) {
			n.security.denials.note("peer", reason, from, "a change of the gossip keys")
		},
	}
	if n.cluster != nil { // a nil *cluster.Cluster would make an interface that is not nil
		cfg.Ring = n.cluster
	}
	n.keys = control.NewGossipKeys(cfg)
	return nil
}

// peersArePrivate reports whether all streams between nodes are encrypted or stay on this host. The node must have
// gossip.
func (n *Node) peersArePrivate() bool {
	if n.security.peers != nil {
		return true
	}
	for _, m := range n.view().Members {
		if !netaddr.LoopbackHostPort(m.PeerAddr) {
			return false
		}
	}
	return true
}
