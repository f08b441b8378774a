package cluster

import (
	"fmt"
	"net/netip"
	"strings"
)

// node is one live process of the cluster.
type node struct {
	identity
	addr netip.AddrPort // of its gossip
	metadata
}

// roster is the bookkeeping of who is there and of what this node may do: a plain state without goroutine, clock or
// network. The others in it have answered for themselves (see verifier). What it says depends on what has happened to
// each node, not on how that was interleaved.
type roster struct {
	self    node
	others  map[identity]node
	seeds   []string // to find others by
	heard   bool     // another member has been seen
	found   bool     // a seed's name has resolved, so that there is an address to ask
	tried   bool     // all seeds have been tried once
	quiet   bool     // no member has come or gone for Config.Settle
	silence bool     // the seeds have had their time to answer, and the membership its time to settle

	unverified int    // processes that gossip names and that have not answered
	fresh      int    // of them, those that have not been asked to the end even once
	why        string // one of them does not count

	// refusal is why this node cannot join those that it would have joined; renewed when that has been found since the
	// seeds were last tried.
	refusal, renewed error
}

func newRoster(self node, seeds []string) *roster {
	return &roster{self: self, seeds: seeds, others: map[identity]node{}}
}

// up notes that a process is alive or has changed its metadata.
func (r *roster) up(n node) {
	if n.identity == r.self.identity {
		return
	}
	r.others[n.identity] = n
	r.heard = true
}

// down notes that a process has left or is taken for dead.
func (r *roster) down(id identity) { delete(r.others, id) }

// refused notes that a node of the cluster we want to join, or something at a seed's address, does not want us, is not
// wanted, or cannot reach us. It reports whether that matters: this node is joining, and no member is there.
func (r *roster) refused(err error) bool {
	if r.self.State != Joining || len(r.others) > 0 {
		return false
	}
	r.refusal, r.renewed = err, err
	return true
}

// seedsTried notes that all seeds have been tried.
func (r *roster) seedsTried() {
	r.tried = true
	r.refusal, r.renewed = r.renewed, nil
}

// advance makes this node active when it may be. It does not go on alone while there are others who reject it or cannot
// reach it, or of whom gossip tells although they do not answer: it would admit everything a second time.
func (r *roster) advance() {
	if r.self.State != Joining {
		return
	}
	settled := r.silence || r.quiet && r.fresh == 0
	joined := len(r.seeds) == 0 || r.heard && r.tried && settled ||
		!r.heard && r.silence && r.refusal == nil && r.unverified == 0
	if _, taken := r.conflict(); joined && !taken {
		r.self.State = Active
	}
}

// expectant reports whether silence would mean something: there is a process that could answer.
func (r *roster) expectant() bool { return r.found || r.heard }

// conflict returns the process that counts for our name, when it is not this one.
func (r *roster) conflict() (node, bool) {
	n := r.counting()[r.self.name]
	return n, n.identity != r.self.identity
}

// counting returns, for each name, the process that counts. Several processes of one name have different addresses: the
// verifier removes a member when another process has answered at its place.
func (r *roster) counting() map[string]node {
	count := map[string]node{r.self.name: r.self}
	for _, n := range r.others {
		if other, taken := count[n.name]; !taken || precedes(n, other) {
			count[n.name] = n
		}
	}
	return count
}

// precedes says which of two processes of one name counts.
func precedes(a, b node) bool {
	if a.State.established() != b.State.established() {
		return a.State.established()
	}
	return a.boot > b.boot
}

// view makes the View of the present state. It takes over prev's ring when the active members are the same.
func (r *roster) view(prev *View) *View {
	count := r.counting()
	members := make([]Member, 0, len(count))
	for _, n := range count {
		members = append(members, n.member())
	}
	v := newView(prev.Ring, r.self.member(), members)
	v.Version = prev.Version + 1
	v.Alone = len(r.seeds) > 0 && len(r.others) == 0
	v.Detail = r.detail(v.Alone)
	return v
}

func (r *roster) detail(alone bool) string {
	other, taken := r.conflict()
	switch {
	case taken:
		return fmt.Sprintf("%s: %v", r.self.State, inUse(other))
	case r.self.State == Leaving:
		return "leaving"
	case r.self.State == Joining && r.refusal != nil && !r.heard:
		return fmt.Sprintf("joining: %v", r.refusal)
	case r.self.State == Joining && !r.heard && r.unverified > 0 && r.why != "":
		return fmt.Sprintf("joining: gossip tells of %d others, and none has answered on its peer port yet: %s",
			r.unverified, r.why)
	case r.self.State == Joining && !r.heard && r.tried && !r.found:
		return "joining: no seed has answered yet: none of their names stands for an address: " + r.seedNames()
	case r.self.State == Joining && !r.heard:
		return "joining: no seed has answered yet: " + r.seedNames()
	case r.self.State == Joining:
		return "joining: waiting for the membership to settle"
	case alone:
		return "alone: no other member is there and no seed answers; still trying: " + r.seedNames()
	}
	return ""
}

// seedNames lists the first seeds.
func (r *roster) seedNames() string {
	const most = 5
	if len(r.seeds) > most {
		return strings.Join(r.seeds[:most], ", ") + " and others"
	}
	return strings.Join(r.seeds, ", ")
}

// inUse is the error of a process whose name another one has.
func inUse(by node) error {
	return fmt.Errorf("name %s is in use by %s; give this node another one", by.name, by.addr)
}
