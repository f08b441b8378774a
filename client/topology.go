package client

import (
	"slices"

	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/ring"
)

// topology is the ring and its members, as a node has sent them.
type topology struct {
	hashKey   ring.HashKey
	table     *ring.Table
	addresses []string // by the table's members; empty: not to be reached
}

// owners are the nodes to ask about keys.
type owners struct {
	*topology
	members []*member // by the table's members; nil: not to be reached
}

// newTopology takes in what a node said, or returns nil where that is of no use: there is only one node, or this build
// places keys in another way.
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
		out.table = before.table // to work one out takes a while
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

// owners finds the ring's members among nodes.
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

// of returns the node that owns the most of some targets, or nil when none of their owners is known and well.
func (o *owners) of(targets ...limit.Target) (most *member) {
	shares := make(map[*member]int)
	for i := range targets {
		if m := o.owner(&targets[i]); m != nil {
			if shares[m]++; shares[m] > shares[most] {
				most = m
			}
		}
	}
	return most
}

// owner returns the node that owns what t names, or nil when it is not known, or not well.
func (o *owners) owner(t *limit.Target) *member {
	if o == nil {
		return nil
	}
	return o.members[o.table.Owner(ring.Partition(ring.Hash(o.hashKey, scopeOf(t), t.Key)))].ifReady()
}

// scopeOf is the scope of a target's state.
func scopeOf(t *limit.Target) string {
	if t.Limit != nil {
		return limit.InlineScope(t.Namespace, t.Limit)
	}
	return t.Policy
}

// byName returns the member of the ring with a name, or nil when it is not known, or not ready.
func (o *owners) byName(name string) *member {
	if o == nil {
		return nil
	}
	if i, ok := slices.BinarySearch(o.table.Members(), name); ok {
		return o.members[i].ifReady()
	}
	return nil
}

// follow says whether a member is to send the topology: one does at a time, the first that is connected.
func (ns *nodes) follow(m *member) bool { return ns.source.CompareAndSwap(nil, m) }

// unfollow has one of the others send the topology in m's place. What was learned stays until then: a node that does not own a key, or
// cannot be reached, costs a detour.
func (ns *nodes) unfollow(m *member, others []*member) {
	if ns.source.CompareAndSwap(m, nil) {
		for _, o := range others {
			o.wake.Set()
		}
	}
}

// learned takes in the topology that a node has sent.
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
