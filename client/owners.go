package client

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/ring"
)

// topology is the ring and its members, as a node has told them.
type topology struct {
	hashKey   ring.HashKey
	table     *ring.Table
	addresses []string // by the table's members; empty: not to be reached
}

// owners are the nodes to ask about keys.
type owners struct {
	hashKey ring.HashKey
	table   *ring.Table
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
	o := &owners{hashKey: t.hashKey, table: t.table, members: make([]*member, len(t.addresses))}
	for i, addr := range t.addresses {
		if j := slices.IndexFunc(list, func(m *member) bool { return at(m.endpoint, addr) }); j >= 0 && addr != "" {
			o.members[i] = list[j]
		}
	}
	return o
}

// of returns the node that owns what t names, or nil when it is not known, or not well.
func (o *owners) of(t *limit.Target) *member {
	if o == nil {
		return nil
	}
	return o.members[o.table.Owner(ring.Partition(ring.Hash(o.hashKey, scopeOf(t), t.Key)))].well()
}

// scopeOf is the scope of a target's state.
func scopeOf(t *limit.Target) string {
	if t.Limit != nil {
		return limit.InlineScope(t.Namespace, t.Limit)
	}
	return t.Policy
}

// well returns a member that is well, otherwise nil. A member that is not connected is connected, for the next check.
func (m *member) well() *member {
	if m == nil || m.usable() {
		return m
	}
	m.want()
	return nil
}

// named returns the member of the ring with a name, or nil when it is not known, or not well.
func (o *owners) named(name string) *member {
	if o == nil || name == "" {
		return nil
	}
	i, ok := slices.BinarySearch(o.table.Members(), name)
	if !ok {
		return nil
	}
	return o.members[i].well()
}

// ofMost returns the node that owns more of n targets than any other does, among equals the one that comes first; nil when not one
// of the owners is known and well.
func (o *owners) ofMost(n int, at func(i int) *limit.Target) (most *member) {
	shares := make(map[*member]int)
	for i := range n {
		if m := o.of(at(i)); m != nil {
			shares[m]++
		}
	}
	for i := range n {
		if m := o.of(at(i)); m != nil && shares[m] > shares[most] {
			most = m
		}
	}
	return most
}

// How long until a node is asked for the topology again, after a failure.
const (
	minRelearn = 100 * time.Millisecond
	maxRelearn = 5 * time.Second
	// refusedRelearn is for nodes that will not tell.
	refusedRelearn = time.Minute
)

// learn keeps the topology up to date until ctx ends. What was learned stays until something else is: a node that does not
// own a key, or cannot be reached, costs a detour.
func (ns *nodes) learn(ctx context.Context) {
	for pause := minRelearn; ; pause = min(2*pause, maxRelearn) {
		ended := make(chan error, 1)
		var told atomic.Bool
		m, _, err := ns.pick(ctx)
		if err == nil && m.link.follow(func(t *weirv1.TopologyResponse, err error) {
			if err != nil {
				ended <- err
				return
			}
			ns.learned(t)
			told.Store(true)
		}) {
			select {
			case err = <-ended:
			case <-ctx.Done():
				return
			}
		}
		if told.Load() {
			pause = minRelearn
		}
		wait := pause + rand.N(pause)
		if status.Code(err) == codes.PermissionDenied || status.Code(err) == codes.Unauthenticated {
			ns.connectAll()
			wait = refusedRelearn
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return
		}
	}
}

func (ns *nodes) learned(t *weirv1.TopologyResponse) {
	ns.mu.Lock()
	before := ns.ring
	ns.mu.Unlock()
	now := newTopology(t, before)
	if now == nil {
		ns.connectAll()
	}
	ns.mu.Lock()
	defer ns.mu.Unlock()
	ns.ring = now
	if err := ns.renewLocked(); err != nil && len(ns.list) == 0 {
		ns.err = err
	}
}
