package client

import (
	"context"
	"iter"
	"time"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// Override replaces a policy's limits for one key, or for the keys that begin with Prefix. The override for exactly the
// key takes precedence over those for prefixes, and of those the longest prefix.
type Override struct {
	Policy string
	// Key or Prefix says which keys the override is for. One of them is empty.
	Key, Prefix string
	// Settings are the fields of an override in a policy file other than key and prefix, as a JSON object of at most
	// 4096 bytes: {"limit":500}, {"limits":["10/1s","1000/1h"]}, {"unlimited":true}, {"blocked":true}.
	Settings string

	// Only answers have the fields below. Of two changes of an override, the one with the higher Version,
	// NUMBER@MEMBER, counts.
	Version   string
	ChangedBy string    // the caller's name in the access file
	ChangedAt time.Time // by the clock of the node that made the change
	Inactive  string    // why the answering node does not apply it, such as that it has no such policy
}

// OverrideChange is the result of a change of an override.
type OverrideChange struct {
	// Override is the override now; after a deletion it has no Settings. It differs from the caller's if another change
	// was made at the same time and counts.
	Override Override
	Before   *Override // the override before the change; nil: there was none
	// Members are all members of the cluster, by name. A member that does not have the change gets it when it can be
	// reached.
	Members []OverrideMember
}

// OverrideMember is the state of a change on a member.
type OverrideMember struct {
	Name    string
	Has     bool   // the member applies it
	Durable bool   // the file in the member's data directory has it
	Error   string // why the member has not taken it, may not have it, or has not made it durable; otherwise empty
}

// SetOverride gives a key, or the keys with a prefix, other limits than their policy has, on all nodes of the cluster.
// It replaces an earlier override. It waits for the node that it asks, which waits for the others for a second at most;
// only ctx bounds it. It is not repeated: after ErrUnavailable the change may have been made. The token or certificate
// needs the role overrides for the policy. A Client that decides in this process has no overrides, and returns
// ErrInvalid.
func (c *Client) SetOverride(ctx context.Context, o Override) (OverrideChange, error) {
	return changeOf(overrides(ctx, c, func(api weirv1.OverridesClient) (*weirv1.OverrideChange, error) {
		set := &weirv1.Override{Policy: o.Policy, Key: o.Key, Prefix: o.Prefix, Settings: o.Settings}
		return api.SetOverride(ctx, &weirv1.SetOverrideRequest{Override: set})
	}))
}

// DeleteOverride removes what SetOverride has set for the Key or Prefix of a policy, so that the policy file applies
// again. It returns ErrNotFound if there is no such override. Otherwise it is as SetOverride.
func (c *Client) DeleteOverride(ctx context.Context, o Override) (OverrideChange, error) {
	return changeOf(overrides(ctx, c, func(api weirv1.OverridesClient) (*weirv1.OverrideChange, error) {
		return api.DeleteOverride(ctx, &weirv1.DeleteOverrideRequest{Policy: o.Policy, Key: o.Key, Prefix: o.Prefix})
	}))
}

// Overrides lists the overrides that SetOverride has set, of one policy or, if policy is empty, of all policies for
// which the caller has the role overrides, in order of policies. A listing that fails ends with the error.
func (c *Client) Overrides(ctx context.Context, policy string) iter.Seq2[Override, error] {
	return func(yield func(Override, error) bool) {
		req := &weirv1.ListOverridesRequest{Policy: policy, PageSize: 1000}
		for more := true; more; more = req.PageToken != "" {
			page, err := overrides(ctx, c, func(api weirv1.OverridesClient) (*weirv1.ListOverridesResponse, error) {
				return api.ListOverrides(ctx, req)
			})
			if err != nil {
				yield(Override{}, err)
				return
			}
			for _, o := range page.Overrides {
				if !yield(overrideOf(o), nil) {
					return
				}
			}
			req.PageToken = page.NextPageToken
		}
	}
}

// overrides makes a call about overrides to any node.
func overrides[M any](ctx context.Context, c *Client, call func(weirv1.OverridesClient) (M, error)) (M, error) {
	var none M
	if c.nodes == nil {
		return none, invalid("", "a client that decides in this process has no overrides but those of its policies")
	}
	if err := c.begin(ctx); err != nil {
		return none, err
	}
	defer c.running.Done()
	out, err := call(weirv1.NewOverridesClient(preferring{c.nodes, nil}))
	return out, c.verdict(ctx, statusError(err))
}

func changeOf(change *weirv1.OverrideChange, err error) (out OverrideChange, _ error) {
	if err != nil {
		return out, err
	}
	out.Override = overrideOf(change.GetOverride())
	if change.Before != nil {
		out.Before = new(overrideOf(change.Before))
	}
	for _, m := range change.Members {
		out.Members = append(out.Members, OverrideMember{m.GetName(), m.GetHas(), m.GetDurable(), m.GetError()})
	}
	return out, nil
}

func overrideOf(o *weirv1.Override) Override {
	return Override{
		Policy: o.GetPolicy(), Key: o.GetKey(), Prefix: o.GetPrefix(), Settings: o.GetSettings(),
		Version:   o.GetVersion(),
		ChangedBy: o.GetChangedBy(), ChangedAt: time.UnixMilli(o.GetChangedAtUnixMs()).UTC(), Inactive: o.GetInactive(),
	}
}
