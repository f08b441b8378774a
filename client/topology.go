package client

import (
	"slices"

	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/ring"
)

// This file finds the owner of a key by the ring.
//
//	follow       makes one member ask its node for the topology (member.go)
//	learned      takes the topology in, and renews the list of members with it (nodes.go)
//	newTopology  builds the same ring as the nodes, and compares fingerprints
//	owner        hashes a key, and returns the member at the address of its owner
//
// Other files must keep: topology and owners are never modified, so that owner takes no lock.

// topology is the ring and its members, as a node has sent them.
type topology struct {
	hashKey   ring.HashKey
	table     *ring.Table
	addresses []string // in the order of the table's members; empty: the member cannot be reached
}

// owners is a topology with the member for each of the ring's members.
type owners struct {
	*topology
	members []*member // in the order of the table's members; nil: the member cannot be reached
}

// newTopology returns the topology that a node has sent, or nil if the client cannot use it: there is only one node, or
// this build places keys differently.
func newTopology(t *weirv1.TopologyResponse, before *topology) *topology {
	hashKey, err := ring.ParseHashKey(t.GetHashKey())
	if err != nil || len(t.GetMembers()) < 2 || t.GetRingSettings() != ring.SettingsFingerprint(hashKey) {
		return nil
	}
	names := make([]string, len(t.GetMembers()))
	address := make(map[string]string)
	for i, m := range t.GetMembers() {
		names[i] = m.GetName()
		address[m.GetName()] = m.GetGrpc()
	}
	slices.Sort(names)
	out := &topology{hashKey: hashKey}
	if before != nil && slices.Equal(before.table.Members(), names) {
		out.table = before.table // because Build takes long
	} else {
		out.table = ring.Build(names)
	}
	if out.table.Fingerprint() != t.GetRing() {
		return nil
	}
	for _, name := range out.table.Members() {
		out.addresses = append(out.addresses, address[name])
	}
	return out
}

// owners returns the owners of keys among the members in list.
func (t *topology) owners(list []*member) *owners {
	if t == nil {
		return nil
	}
	o := &owners{topology: t}
	for _, addr := range t.addresses {
		o.members = append(o.members, memberAt(list, addr))
	}
	return o
}

// owner returns the node that owns the target's key, or nil if it is not known or not ready.
func (o *owners) owner(t *limit.Target) *member {
	if o == nil {
		return nil
	}
	return o.members[o.table.Owner(ring.Partition(ring.Hash(o.hashKey, scopeOf(t), t.Key)))].ifReady()
}

// scopeOf returns the scope of a target's state.
func scopeOf(t *limit.Target) string {
	if t.Limit != nil {
		return limit.InlineScope(t.Namespace, t.Limit)
	}
	return t.Policy
}

// byName returns the ring's member of a name, or nil if it is not known or not ready.
func (o *owners) byName(name string) *member {
	if o == nil {
		return nil
	}
	if i, ok := slices.BinarySearch(o.table.Members(), name); ok {
		return o.members[i].ifReady()
	}
	return nil
}

// follow reports whether m is to be the member whose node sends the topology. It is the first member that is connected
// while there is no such member (source).
func (ns *nodes) follow(m *member) bool { return ns.source.CompareAndSwap(nil, m) }

// unfollow makes another member follow if m did. Until the other node has sent its topology, the client keeps the last
// one: a check that goes to a former owner is forwarded.
func (ns *nodes) unfollow(m *member, others []*member) {
	if ns.source.CompareAndSwap(m, nil) {
		for _, o := range others {
			o.wake.Set()
		}
	}
}

// learned takes in the topology that a node has sent. If the client cannot use it, any node gets checks, so all are
// connected.
func (ns *nodes) learned(t *weirv1.TopologyResponse) {
	ns.mu.Lock()
	before := ns.ring
	ns.mu.Unlock()
	now := newTopology(t, before)
	if now == nil {
		ns.connectAll()
	}
	ns.change(func() {
		ns.ring = now
		ns.renewLocked()
	})
}
