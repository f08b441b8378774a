package node

import (
	"net"

	"github.com/weirlimit/weir/internal/control"
	"github.com/weirlimit/weir/internal/netaddr"
)

// fileKeys are the keys in the file, none without one.
func (s *security) fileKeys() [][]byte {
	if s.gossipKeys == nil {
		return nil
	}
	return s.gossipKeys.Current()
}

// openKeys makes what changes the gossip keys of all members.
func (n *Node) openKeys() error {
	cfg := control.GossipKeysConfig{
		Self: n.self(), File: n.security.fileKeys, Ask: n.peers.GossipKeys, Private: n.peersArePrivate, Record: n.security.audit.Record, Logger: n.log,
		Members: n.memberNodes,
		Denied: func(from net.Addr, reason string) {
			n.security.denials.note("peer", reason, from, "a change of the gossip keys")
		},
	}
	if n.cluster != nil { // or the interface would not be nil
		cfg.Ring = n.cluster
	}
	n.keys = control.NewGossipKeys(cfg)
	return nil
}

// peersArePrivate reports whether nobody can read what nodes say to each other.
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
