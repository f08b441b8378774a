package node

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/observe"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
)

// Bounds of a list of keys.
const (
	maxTopKeys     = 256
	defaultTopKeys = 20
)

// activityRecorder keeps what the limiter has decided lately: top keys and the history of policies.
type activityRecorder struct {
	*observe.TopKeys
	history atomic.Pointer[observe.History] // nil until there is a limiter to read from
}

func newActivityRecorder() (*activityRecorder, error) {
	keys, err := observe.NewTopKeys()
	return &activityRecorder{TopKeys: keys}, err
}

// Tick implements limiter.TopKeys.
func (r *activityRecorder) Tick(mono int64) {
	r.TopKeys.Tick(mono)
	if h := r.history.Load(); h != nil {
		h.Tick(mono)
	}
}

// follow begins the history of l's policies.
func (r *activityRecorder) follow(l *limiter.Limiter) { r.history.Store(observe.NewHistory(l.Counts)) }

// activity returns what this node has decided lately, for another node that asks.
func (n *Node) activity(r *peerv1.ActivityRequest) *peerv1.ActivityResponse {
	now := n.clock().Mono
	var wanted func(string) bool
	if r.Policy != "" {
		wanted = func(scope string) bool { return scope == r.Policy }
	}
	policies, age := n.recorder.history.Load().Read(now)
	out := &peerv1.ActivityResponse{Policies: policies, AgeNs: int64(age)}
	orders := r.Orders[:min(len(r.Orders), len(weirv1.KeyOrder_name))]
	rows, counted := n.recorder.Top(now, int(min(r.Keys, maxTopKeys)), wanted, orders...)
	out.Keys, out.CountedNs = rows, int64(counted)
	return out
}

// clusterActivity is what all members have decided lately, summed.
type clusterActivity struct {
	rows                 []*peerv1.KeyActivity // in no order
	counted              time.Duration         // how long the keys of rows were counted
	policies             []*peerv1.PolicyHistory
	age                  time.Duration // of the newest complete step of policies
	members, unreachable []string
}

// askedAtOnce bounds the members that are asked at a time.
const askedAtOnce = 16

// gather asks all members. A member that does not answer in time is in unreachable, and its counts are missing.
func (n *Node) gather(ctx context.Context, ask *peerv1.ActivityRequest) *clusterActivity {
	ctx, cancel := context.WithTimeout(ctx, inspectTimeout)
	defer cancel()
	out := &clusterActivity{members: []string{n.cfg.Name}}
	answers := []*peerv1.ActivityResponse{n.activity(ask)}
	if v := n.view(); v != nil {
		for _, a := range askOthers(ctx, n, v, askedAtOnce, anyMember,
			func(ctx context.Context, c peerv1.PeerClient) (*peerv1.ActivityResponse, error) {
				return c.Activity(ctx, ask)
			}) {
			if a.err != nil {
				out.unreachable = append(out.unreachable, a.member.Name)
				continue
			}
			out.members, answers = append(out.members, a.member.Name), append(answers, a.response)
		}
	}
	slices.Sort(out.members)
	slices.Sort(out.unreachable)
	out.merge(answers)
	return out
}

// merge sums the answers of members; the first is this node's. Members' steps begin at different times, so a step of
// the sum contains up to one step before or after it of each other member.
func (c *clusterActivity) merge(answers []*peerv1.ActivityResponse) {
	lists := make([][]*peerv1.KeyActivity, 0, len(answers))
	by := make(map[string]*peerv1.PolicyHistory)
	c.age = time.Duration(answers[0].AgeNs)
	for _, a := range answers {
		lists = append(lists, a.Keys)
		c.counted = max(c.counted, time.Duration(a.CountedNs))
		for _, p := range a.Policies {
			sum := by[p.Policy]
			if sum == nil {
				sum = &peerv1.PolicyHistory{Policy: p.Policy}
				by[p.Policy] = sum
			}
			for i, use := range p.Steps[:min(len(p.Steps), observe.HistorySteps+1)] {
				if i == len(sum.Steps) {
					sum.Steps = append(sum.Steps, new(weirv1.PolicyUse))
				}
				observe.AddUse(sum.Steps[i], use)
			}
		}
	}
	c.rows = observe.MergeRows(lists...)
	for _, name := range slices.Sorted(maps.Keys(by)) {
		c.policies = append(c.policies, by[name])
	}
}

// lately sums the steps of about the last minute, and returns how long they took.
func (c *clusterActivity) lately(p *peerv1.PolicyHistory) (sum *weirv1.PolicyUse, took time.Duration) {
	sum = &weirv1.PolicyUse{Policy: p.Policy}
	steps := p.Steps[:min(len(p.Steps), int(time.Minute/observe.HistoryStep))]
	for _, s := range steps {
		observe.AddUse(sum, s)
	}
	return sum, c.age + time.Duration(len(steps)-1)*observe.HistoryStep
}

// TopKeys returns the keys of the cluster that are used most, of those that the caller in ctx may see. Its error is a
// *limit.Error.
func (n *Node) TopKeys(ctx context.Context, r *weirv1.TopKeysRequest) (*weirv1.TopKeysResponse, error) {
	if _, known := weirv1.KeyOrder_name[int32(r.Order)]; !known {
		return nil, limit.NewError(limit.Invalid, "order", "is not one of busiest, refused and fullest")
	}
	if r.Limit > maxTopKeys {
		return nil, limit.NewError(limit.Invalid, "limit", "is above 256")
	}
	if r.Policy != "" && !limit.ValidPolicyName(r.Policy) {
		return nil, limit.NewError(limit.Invalid, "policy",
			"is not a policy's name: 1 to 128 characters of A-Z a-z 0-9 . _ -")
	}
	most := int(r.Limit)
	if most == 0 {
		most = defaultTopKeys
	}
	if denied := n.security.auth.Demand(ctx, auth.RoleKeys, limit.Target{Policy: r.Policy}); denied != nil {
		return nil, denied
	}
	// All rows are needed even if fewer are asked for: the caller may not see all of the first ones.
	all := n.gather(ctx, &peerv1.ActivityRequest{Orders: []weirv1.KeyOrder{r.Order}, Keys: maxTopKeys,
		Policy: r.Policy})
	observe.SortRows(all.rows, r.Order)
	return n.topKeys(all, all.rows, most, r.Policy, n.security.auth.MayUse(ctx, auth.RoleKeys)), nil
}

// topKeys returns the first rows, and the policies, that a caller may see: of one policy, or of all if policy is empty.
func (n *Node) topKeys(all *clusterActivity, rows []*peerv1.KeyActivity, most int, policy string,
	mayUse func(policy, namespace string) bool) *weirv1.TopKeysResponse {
	out := &weirv1.TopKeysResponse{Node: n.cfg.Name, Members: all.members, Unreachable: all.unreachable,
		CountedNs: int64(all.counted)}
	for i := range rows {
		if len(out.Keys) == most {
			break
		}
		if use := keyUse(rows[i]); mayUse(use.Policy, use.Namespace) {
			out.Keys = append(out.Keys, use)
		}
	}
	for _, p := range all.policies {
		sum, took := all.lately(p)
		if observe.Decisions(sum)+sum.Errors == 0 || policy != "" && p.Policy != policy ||
			!maySeePolicy(mayUse, p.Policy) {
			continue
		}
		out.Policies = append(out.Policies, sum)
		out.PoliciesCountedNs = max(out.PoliciesCountedNs, int64(took))
	}
	slices.SortStableFunc(out.Policies, func(a, b *weirv1.PolicyUse) int {
		return cmp.Compare(observe.Decisions(b), observe.Decisions(a))
	})
	return out
}

// maySeePolicy reports whether a caller may see what a policy did. The names that stand for inline limits and for
// unknown policies are no secret.
func maySeePolicy(mayUse func(policy, namespace string) bool, name string) bool {
	return !limit.ValidPolicyName(name) || mayUse(name, "")
}

func keyUse(row *peerv1.KeyActivity) *weirv1.KeyUse {
	use := &weirv1.KeyUse{
		Key: row.Key, Decisions: row.Decisions, DecisionsError: row.DecisionsError, Refused: row.Refused,
		RefusedError: row.RefusedError,
		Algorithm:    row.Algorithm, WindowNs: row.WindowNs, Limit: row.Limit, Used: row.Used,
	}
	share, inline := limit.ShareOf(row.Scope)
	if inline {
		use.Namespace = share
	} else {
		use.Policy = share
	}
	return use
}

// describe returns the state of a key that this node decides for, for another node that asks.
func (n *Node) describe(r *peerv1.DescribeRequest) (*peerv1.DescribeResponse, error) {
	t, bad := wire.Target(r.GetTarget())
	if bad != nil {
		return nil, wire.Status(bad)
	}
	is, holds, err := n.limiter.Describe(&t)
	if err != nil {
		return nil, wire.Status(err)
	}
	out := &peerv1.DescribeResponse{Holds: holds, OnLoan: is.OnLoan, BannedNs: int64(is.Banned)}
	for i := range is.Limits {
		l := &is.Limits[i]
		state := &peerv1.LimitState{Algorithm: weirv1.Algorithm(l.Algorithm), Limit: l.Limit, WindowNs: int64(l.Window),
			Remaining: l.Remaining}
		for _, back := range l.Returns {
			state.Returns = append(state.Returns, &peerv1.Return{Units: back.Units, AfterNs: int64(back.After)})
		}
		out.Limits = append(out.Limits, state)
	}
	return out, nil
}

// Describe returns the state of a key, which node decides for it, and when the units in use come back. The caller in
// ctx needs the role keys for the target. The error is a *limit.Error.
func (n *Node) Describe(ctx context.Context, t *limit.Target) (*limit.KeyState, error) {
	if denied := n.security.auth.Demand(ctx, auth.RoleKeys, *t); denied != nil {
		return nil, denied
	}
	ctx, cancel := context.WithTimeout(ctx, inspectTimeout)
	defer cancel()
	for {
		route, bad := n.limiter.RouteOf(t)
		if bad != nil {
			return nil, bad
		}
		is, holds, err := n.askDescribe(ctx, route, t)
		switch {
		case err != nil:
			return nil, err
		case holds:
			if is.Node = route.Node.Name; route.Standing == ownership.Owned {
				is.Node = n.cfg.Name
			}
			return &is, nil
		case !pause(ctx):
			return nil, limit.NewError(limit.Unavailable, "", "no node decides for the key at this moment: ask again")
		}
	}
}

// askDescribe asks the node that route names. holds is false if that node does not decide for the key.
func (n *Node) askDescribe(ctx context.Context, route *ownership.Route,
	t *limit.Target) (is limit.KeyState, holds bool, err error) {
	if route.Standing == ownership.Owned {
		return n.limiter.Describe(t)
	}
	peer, err := n.peers.Client(route.Node)
	if err != nil {
		return is, false, nil // the node has just gone, or is about to join
	}
	answer, err := peer.Describe(ctx, &peerv1.DescribeRequest{Target: wire.ProtoTarget(*t)})
	if err != nil {
		s := status.Convert(err)
		return is, false, &limit.Error{Kind: wire.Kind(s.Code()), Message: route.Node.Name + ": " + s.Message()}
	}
	for _, l := range answer.Limits {
		state := limit.LimitState{Algorithm: algo.Algorithm(l.Algorithm), Limit: l.Limit,
			Window: time.Duration(l.WindowNs), Remaining: l.Remaining}
		for _, back := range l.Returns {
			state.Returns = append(state.Returns,
				algo.Return{Units: back.GetUnits(), After: time.Duration(back.GetAfterNs())})
		}
		is.Limits = append(is.Limits, state)
	}
	is.OnLoan, is.Banned = answer.OnLoan, time.Duration(answer.BannedNs)
	return is, answer.Holds, nil
}
