package node

import (
	"context"
	"fmt"
	"time"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/cluster"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/cluster/runner"
	httpapi "github.com/weirlimit/weir/gateway/http"
	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/ring"
)

// inspectTimeout bounds how long a status page waits for the other members.
const inspectTimeout = 500 * time.Millisecond

// inspect returns the part of the status that only this node knows.
func (n *Node) inspect() *peerv1.InspectResponse {
	stats := n.limiter.Store()
	set := n.limiter.Policies()
	r := &peerv1.InspectResponse{
		Version: n.cfg.Version, PoliciesHash: set.Hash(),
		Policies: uint32(len(set.Policies())), Keys: uint64(stats.Keys), KeysCopied: uint64(stats.Copies),
		StateBytes: uint64(stats.Bytes),
		UptimeNs:   int64(time.Since(n.started)), Loans: protoLoans(n.limiter.Loans()),
	}
	if v := n.view(); v != nil {
		r.Ring = v.Ring.Fingerprint()
	}
	if st, ok := n.runner.Status(); ok {
		r.Ownership = protoOwnership(st)
		r.Ownership.Disk = n.protoDisk(st)
	}
	return r
}

func protoLoans(st limiter.LoanStats) *weirv1.Loans {
	return &weirv1.Loans{
		OnLoan: uint64(st.OnLoan), Borrowers: uint32(st.Borrowers), Recalls: st.Recalled, Unanswered: st.Unanswered,
		Expired: st.Expired,
	}
}

func (n *Node) protoDisk(st runner.Status) *weirv1.Disk {
	if n.disk == nil {
		return nil
	}
	d := n.disk.Stats()
	to := &weirv1.Disk{Bytes: d.Bytes, SyncedMs: uint32(d.Synced.Milliseconds()), Unsaved: uint32(st.Unsaved),
		Restored: uint32(st.Restored)}
	if d.Err != nil {
		to.Error = d.Err.Error()
	}
	return to
}

func protoOwnership(st runner.Status) *weirv1.Ownership {
	o := &weirv1.Ownership{
		Held: uint32(st.Held), Moving: uint32(st.Moving), Awaited: uint32(st.Awaited), Copies: uint32(st.Copies),
		Degraded: uint32(st.Degraded), Pending: uint64(st.Pending), Granted: uint32(st.Granted),
		HighestTerm: st.Highest.String(), Voter: "none", Settled: st.Settled,
	}
	switch {
	case st.Voting:
		o.Voter = "voting"
	case st.Voter:
		o.Voter = "abstaining"
	}
	return o
}

// answer is a member's answer.
type answer[T any] struct {
	member   *cluster.Member
	response T
	err      error // the member did not answer
}

// askOthers asks all other members for which wanted returns true, atOnce of them at a time (-1: all).
func askOthers[T any](ctx context.Context, n *Node, v *cluster.View, atOnce int, wanted func(*cluster.Member) bool,
	ask func(context.Context, peerv1.PeerClient) (T, error)) []answer[T] {
	var out []answer[T]
	for i := range v.Members {
		if m := &v.Members[i]; m != v.Self && wanted(m) {
			out = append(out, answer[T]{member: m})
		}
	}
	var asked panics.Group
	asked.SetLimit(atOnce)
	for i := range out {
		asked.Go(func() {
			a := &out[i]
			var client peerv1.PeerClient
			if client, a.err = n.peers.Client(nodeOf(a.member)); a.err == nil {
				a.response, a.err = ask(ctx, client)
			}
		})
	}
	asked.Wait()
	return out
}

// nodeOf returns the Node of the ownership protocol for a member.
func nodeOf(m *cluster.Member) ownership.Node { return ownership.Node{Name: m.Name, Boot: m.Boot} }

func anyMember(*cluster.Member) bool { return true }

// inspectOthers asks all other members for which wanted returns true for their status. A response is nil if the member
// did not answer.
func (n *Node) inspectOthers(ctx context.Context, v *cluster.View,
	wanted func(*cluster.Member) bool) []answer[*peerv1.InspectResponse] {
	return askOthers(ctx, n, v, -1, wanted,
		func(ctx context.Context, c peerv1.PeerClient) (*peerv1.InspectResponse, error) {
			return c.Inspect(ctx, &peerv1.InspectRequest{})
		})
}

// Status describes the cluster as this node sees it.
func (n *Node) Status(ctx context.Context) *weirv1.StatusResponse {
	ctx, cancel := context.WithTimeout(ctx, inspectTimeout)
	defer cancel()
	st := &weirv1.StatusResponse{
		Node: n.cfg.Name, Version: n.cfg.Version, Partitions: ring.Partitions, PoliciesError: n.policyError(),
	}
	st.Ready, st.ReadyDetail = n.Ready()
	v := n.view()
	if v == nil {
		self := cluster.Member{Name: n.cfg.Name, State: cluster.Active, HTTPAddr: addrOf(n.listeners.http),
			GRPCAddr: addrOf(n.listeners.grpc)}
		st.Members = []*weirv1.Member{member(self, n.inspect(), ring.Partitions)}
		return st
	}
	st.Ring = fmt.Sprintf("%016x", v.Ring.Fingerprint())
	owned := make(map[string]uint32)
	for p := range ring.Partitions {
		if m := v.Owner(p); m != nil {
			owned[m.Name]++
		}
	}
	others := make(map[string]*peerv1.InspectResponse)
	for _, a := range n.inspectOthers(ctx, v, anyMember) {
		others[a.member.Name] = a.response
	}
	for i := range v.Members {
		m := v.Members[i]
		said := others[m.Name]
		if m.Name == v.Self.Name && m.Boot == v.Self.Boot {
			said = n.inspect()
		}
		st.Members = append(st.Members, member(m, said, owned[m.Name]))
	}
	return st
}

func member(m cluster.Member, said *peerv1.InspectResponse, partitions uint32) *weirv1.Member {
	return &weirv1.Member{
		Name: m.Name, Boot: fmt.Sprintf("%016x", m.Boot), State: m.State.String(), Http: m.HTTPAddr, Grpc: m.GRPCAddr,
		Gossip: m.GossipAddr, Peer: m.PeerAddr, Partitions: partitions, Reachable: said != nil,
		Version:      said.GetVersion(),
		PoliciesHash: said.GetPoliciesHash(), Policies: said.GetPolicies(), Keys: said.GetKeys(),
		KeysCopied: said.GetKeysCopied(),
		StateBytes: said.GetStateBytes(), UptimeNs: said.GetUptimeNs(), Ownership: said.GetOwnership(),
		Loans: said.GetLoans(),
	}
}

// topology returns the ring and its members, to callers with the role topology. A node without gossip owns all keys; it
// sends no address, because its caller has one that works.
func (n *Node) topology(ctx context.Context) (*weirv1.TopologyResponse, <-chan struct{}, *limit.Error) {
	if denied := n.security.auth.Demand(ctx, auth.RoleTopology, limit.Target{}); denied != nil {
		return nil, nil, denied
	}
	t := &weirv1.TopologyResponse{
		Version: 1, HashKey: n.hashKey.Bytes(), RingSettings: n.settings, Partitions: ring.Partitions,
		VirtualNodes: ring.VirtualNodes, Load: ring.Load,
	}
	v := n.view()
	if v == nil {
		t.Ring = ring.Build([]string{n.cfg.Name}).Fingerprint()
		t.Members = []*weirv1.TopologyMember{{Name: n.cfg.Name}}
		return t, nil, nil
	}
	t.Version, t.Ring = v.Version, v.Ring.Fingerprint()
	for _, name := range v.Ring.Members() {
		m := v.Member(name)
		t.Members = append(t.Members, &weirv1.TopologyMember{Name: m.Name, Boot: m.Boot, Grpc: m.GRPCAddr})
	}
	return t, v.Replaced(), nil
}

// listPolicies describes the policies in force.
func (n *Node) listPolicies() httpapi.PolicyListing {
	set := n.limiter.Policies()
	out := httpapi.PolicyListing{Hash: set.Hash(), ReloadError: n.policyError()}
	for _, p := range set.Policies() {
		out.Policies = append(out.Policies, httpapi.Policy{
			Name: p.Name, Limits: p.Limits, Overrides: len(p.Rules()) - 1, Shadow: p.Shadow,
			OnError: p.OnError.String(),
		})
	}
	return out
}
