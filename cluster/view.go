package cluster

import (
	"cmp"
	"net"
	"slices"
	"strconv"

	"github.com/weirlimit/weir/ring"
)

// Member is one node as the others see it.
type Member struct {
	Name       string
	Boot       uint64 // of its process start
	State      State
	Host       string // IP address
	GossipAddr string // host:port, like the following
	PeerAddr   string // nodes among themselves; empty when there is none, like the following
	HTTPAddr   string
	GRPCAddr   string
	PolicyHash uint32 // of the policies it has loaded; see SetPolicyHash
	EnvoyHash  uint32 // of its files for Envoy; see SetEnvoyHash
}

// View is the membership as one node knows it at one instant, and the ring of it. It is immutable.
type View struct {
	// Ring is the table of the active members' names.
	Ring *ring.Table
	// Members lists all live members, by name, with one process for each name. The caller must not change it.
	Members []Member
	// Self is this process. It points into Members, unless another process is the one that counts for its name.
	Self *Member
	// Version rises with every view that this process publishes.
	Version uint64
	// Alone says that there are seeds but no other member: this node may be cut off from the cluster it belongs to.
	Alone bool
	// Detail says in words why the node is not ready, or what is wrong while it is; empty when all is well.
	Detail string

	active   []int // the ring's members as indices into Members
	replaced chan struct{}
}

// noView is the view before the first one.
func noView() *View { return &View{Self: new(Member), replaced: make(chan struct{})} }

// newView makes a view of members, one for each name, in any order; it sorts them in place. It takes over table when
// that is the right one. Self is among the members when it is the process that counts for its name.
func newView(table *ring.Table, self Member, members []Member) *View {
	slices.SortFunc(members, func(a, b Member) int { return cmp.Compare(a.Name, b.Name) })
	v := &View{Members: members, replaced: make(chan struct{})}
	var names []string
	for i := range members {
		m := &members[i]
		if m.Name == self.Name && m.Boot == self.Boot {
			v.Self = m
		}
		if m.State == Active {
			names = append(names, m.Name)
			v.active = append(v.active, i)
		}
	}
	if v.Self == nil {
		v.Self = &self
	}
	if table == nil || !slices.Equal(table.Members(), names) {
		table = ring.Build(names)
	}
	v.Ring = table
	return v
}

// Owner returns the member that should own a partition, or nil when no member is active. It is this process if and only
// if it is v.Self. It takes constant time and does not allocate.
func (v *View) Owner(partition int) *Member {
	i := v.Ring.Owner(partition)
	if i < 0 {
		return nil
	}
	return &v.Members[v.active[i]]
}

// Member returns the live member of a name, or nil.
func (v *View) Member(name string) *Member {
	i, found := slices.BinarySearchFunc(v.Members, name,
		func(m Member, name string) int { return cmp.Compare(m.Name, name) })
	if !found {
		return nil
	}
	return &v.Members[i]
}

// Replaced returns a channel that is closed when the cluster has published a newer view.
func (v *View) Replaced() <-chan struct{} { return v.replaced }

// member returns n as the outside sees it.
func (n node) member() Member {
	host := n.addr.Addr().String()
	at := func(port uint16) string {
		if port == 0 {
			return ""
		}
		return net.JoinHostPort(host, strconv.Itoa(int(port)))
	}
	return Member{
		Name:       n.name,
		Boot:       n.boot,
		State:      n.State,
		Host:       host,
		GossipAddr: n.addr.String(),
		PeerAddr:   at(n.Peer),
		HTTPAddr:   at(n.HTTP),
		GRPCAddr:   at(n.GRPC),
		PolicyHash: n.Policy,
		EnvoyHash:  n.Envoy,
	}
}
