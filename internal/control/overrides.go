package control

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	"google.golang.org/grpc"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/policy"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
)

// Bounds of a page of a list.
const (
	defaultPage = 100
	maxPage     = 1000
)

// OverridesConfig configures Overrides. All fields are required.
type OverridesConfig struct {
	Book       *Book
	Replicator *Replicator
	// Policies returns the policies of the policy file, which overrides must fit.
	Policies func() *policy.Set
	// Auth says of which policies a caller may change and see overrides.
	Auth *auth.Authorizer
	// Ready reports whether the node has become a member and is not stopping, or why not.
	Ready func() (ok bool, why string)
	// Record gets each change that was made or failed.
	Record func(auth.Event)
	Now    func() time.Time
}

// Overrides is the service for operators. Its errors are *limit.Error. Its methods are safe for concurrent use.
type Overrides struct{ cfg OverridesConfig }

// NewOverrides returns the service.
func NewOverrides(cfg OverridesConfig) *Overrides { return &Overrides{cfg: cfg} }

// subject checks what an override is for, and whether the caller may change it.
func (s *Overrides) subject(ctx context.Context, id ID) error {
	o := policy.Override{Policy: id.Policy, Key: id.Key, Prefix: id.Prefix}
	if err := o.Valid(); err != nil {
		return err
	}
	return s.demand(ctx, id.Policy)
}

// demand checks whether the caller may change overrides of a policy.
func (s *Overrides) demand(ctx context.Context, policy string) error {
	if denied := s.cfg.Auth.Demand(ctx, auth.RoleOverrides, limit.Target{Policy: policy}); denied != nil {
		return denied
	}
	return nil
}

// List returns a page of overrides.
func (s *Overrides) List(ctx context.Context, req *weirv1.ListOverridesRequest) (*weirv1.ListOverridesResponse, error) {
	one := ID{req.Policy, req.Key, req.Prefix}
	switch {
	case req.Key != "" || req.Prefix != "":
		if err := s.subject(ctx, one); err != nil {
			return nil, err
		}
	case req.Policy != "":
		if !limit.ValidPolicyName(req.Policy) {
			return nil, limit.NewError(limit.Invalid, "policy",
				"is not a policy's name: 1 to 128 characters of A-Z a-z 0-9 . _ -")
		}
		if err := s.demand(ctx, req.Policy); err != nil {
			return nil, err
		}
	}
	if req.PageSize > maxPage {
		return nil, limit.NewError(limit.Invalid, "page_size", "is above 1000")
	}
	after, err := parseToken(req.PageToken)
	if err != nil {
		return nil, err
	}
	out, policies := new(weirv1.ListOverridesResponse), s.cfg.Policies()
	if one.Key != "" || one.Prefix != "" {
		if e, ok := s.cfg.Book.Get(one); ok {
			out.Overrides = append(out.Overrides, protoOverride(e, policies))
		}
		return out, nil
	}
	mayUse := s.cfg.Auth.MayUse(ctx, auth.RoleOverrides)
	if one.Policy != "" && after.Policy < one.Policy {
		after = one // one is below all keys of the policy
	}
	last := ID{}
	for e := range s.cfg.Book.After(after) {
		if one.Policy != "" && e.Policy != one.Policy {
			break
		}
		if !mayUse(e.Policy, "") {
			continue
		}
		if len(out.Overrides) == int(cmp.Or(req.PageSize, defaultPage)) {
			out.NextPageToken = token(last)
			break
		}
		out.Overrides, last = append(out.Overrides, protoOverride(e, policies)), e.ID
	}
	return out, nil
}

// Set gives a key, or the keys with a prefix, other limits.
func (s *Overrides) Set(ctx context.Context, req *weirv1.SetOverrideRequest) (*weirv1.OverrideChange, error) {
	in := req.GetOverride()
	id := ID{in.GetPolicy(), in.GetKey(), in.GetPrefix()}
	if err := s.subject(ctx, id); err != nil {
		return nil, err
	}
	for _, answer := range []struct {
		field string
		given bool
	}{
		{"version", in.Version != ""}, {"changed_by", in.ChangedBy != ""},
		{"changed_at_unix_ms", in.ChangedAtUnixMs != 0}, {"inactive", in.Inactive != ""},
	} {
		if answer.given {
			return nil, limit.NewError(limit.Invalid, answer.field, "is part of answers: leave it out")
		}
	}
	settings, err := compact(in.Settings)
	if err != nil {
		return nil, err
	}
	o := policy.Override{Policy: id.Policy, Key: id.Key, Prefix: id.Prefix, Settings: settings}
	if err := s.cfg.Policies().Accepts(o); err != nil {
		return nil, err
	}
	return s.change(ctx, Entry{ID: id, Settings: settings})
}

// compact checks settings strictly, and returns them without spaces between their parts.
func compact(settings string) (string, *limit.Error) {
	if len(settings) > policy.MaxOverrideSettings {
		return "", limit.NewError(limit.TooLarge, "settings", "have more than the 4096 bytes that are allowed")
	}
	value := jsontext.Value(settings)
	if value.Kind() != '{' {
		return "", limit.NewError(limit.Invalid, "settings", `are not a JSON object, such as {"limit":500}`)
	}
	if err := value.Format(jsontext.AllowDuplicateNames(false), jsontext.AllowInvalidUTF8(false)); err != nil {
		field, message := "settings", "are not valid JSON: "+err.Error()
		if syntactic, ok := errors.AsType[*jsontext.SyntacticError](err); ok &&
			errors.Is(err, jsontext.ErrDuplicateName) {
			field, message = "settings."+syntactic.JSONPointer.LastToken(), "is given twice"
		}
		return "", limit.NewError(limit.Invalid, field, message)
	}
	return string(value), nil
}

// Delete removes an override.
func (s *Overrides) Delete(ctx context.Context, req *weirv1.DeleteOverrideRequest) (*weirv1.OverrideChange, error) {
	id := ID{req.Policy, req.Key, req.Prefix}
	if err := s.subject(ctx, id); err != nil {
		return nil, err
	}
	return s.change(ctx, Entry{ID: id})
}

// change makes a valid change, and passes it to the other members and the audit log.
func (s *Overrides) change(ctx context.Context, e Entry) (*weirv1.OverrideChange, error) {
	e.By, e.At = auth.CallerName(ctx), s.cfg.Now()
	step, err := s.made(ctx, e)
	event := auth.EventOf(ctx, auth.ActionOverride)
	event.Target, event.What, event.Err = limit.Target{Policy: e.Policy, Key: e.Key}, what(&e, step.Before), err
	s.cfg.Record(event)
	if err != nil {
		return nil, err
	}
	out := &weirv1.OverrideChange{Members: s.cfg.Replicator.spread(ctx, step.Change)}
	now := s.cfg.Replicator.force.Load().entries[e.ID]
	if now == nil || !now.newer(step.Change) {
		now = step.Change
	} // otherwise another change, made at the same time, is in force
	out.Override = protoOverride(now, s.cfg.Policies())
	if step.Before != nil {
		out.Before = protoOverride(step.Before, nil)
	}
	return out, nil
}

// made makes a change once this member's book has been compared with those of all others. Before that the book may lack
// their entries, so the change could get too low a version, and lose.
func (s *Overrides) made(ctx context.Context, e Entry) (Step, error) {
	unavailable := func(why string) error {
		return limit.NewError(limit.Unavailable, "", "the override was not changed, because this node "+why)
	}
	if ok, why := s.cfg.Ready(); !ok {
		return Step{}, unavailable("is not ready: " + why)
	}
	if !s.cfg.Replicator.awaitMet(ctx) {
		return Step{}, unavailable("has not compared its overrides with all members yet: ask another node, or again")
	}
	step := s.cfg.Replicator.commit(Step{Change: &e}).Step
	switch {
	case errors.Is(step.Err, ErrFull):
		return step, limit.NewError(limit.TooLarge, "", step.Err.Error())
	case step.Err != nil:
		return step, unavailable("could not write it: " + step.Err.Error())
	case step.Change.Version == (Version{}):
		return step, limit.NewError(limit.NotFound, field(e.ID), "there is no override for it")
	}
	return step, nil
}

// field returns the name of the field that identifies an override.
func field(id ID) string {
	if id.Prefix != "" {
		return "prefix"
	}
	return "key"
}

// what describes a change for the audit log.
func what(now, before *Entry) string {
	text := "delete"
	if !now.Deleted() {
		text = "set " + now.Settings
	}
	if before != nil {
		text += ", was " + before.Settings
	}
	if now.Prefix != "" {
		text += ", for the prefix " + now.Prefix
	}
	return text
}

// protoOverride returns an entry for callers. policies say whether it is in force; nil: that is left out.
func protoOverride(e *Entry, policies *policy.Set) *weirv1.Override {
	out := &weirv1.Override{
		Policy: e.Policy, Key: e.Key, Prefix: e.Prefix, Settings: e.Settings, Version: e.Version.String(),
		ChangedBy: e.By, ChangedAtUnixMs: e.At.UnixMilli(),
	}
	if policies != nil && !e.Deleted() {
		if err := policies.Accepts(e.Override()); err != nil {
			out.Inactive = err.Error()
		}
	}
	return out
}

// token returns the token of the next page: the last ID of this one.
func token(id ID) string {
	text, _ := json.Marshal(id) // cannot fail: the texts are valid UTF-8
	return base64.RawURLEncoding.EncodeToString(text)
}

func parseToken(text string) (id ID, _ *limit.Error) {
	if text == "" {
		return id, nil
	}
	raw, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil || json.Unmarshal(raw, &id) != nil {
		return id, limit.NewError(limit.Invalid, "page_token", "is not one that a list has returned")
	}
	return id, nil
}

// Register registers the service for callers over gRPC.
func (s *Overrides) Register(r grpc.ServiceRegistrar) {
	weirv1.RegisterOverridesServer(r, server{service: s})
}

type server struct {
	weirv1.UnimplementedOverridesServer
	service *Overrides
}

// ListOverrides implements weirv1.OverridesServer.
func (s server) ListOverrides(ctx context.Context,
	req *weirv1.ListOverridesRequest) (*weirv1.ListOverridesResponse, error) {
	out, err := s.service.List(ctx, req)
	return out, wire.Status(err)
}

// SetOverride implements weirv1.OverridesServer.
func (s server) SetOverride(ctx context.Context, req *weirv1.SetOverrideRequest) (*weirv1.OverrideChange, error) {
	out, err := s.service.Set(ctx, req)
	if e, ok := errors.AsType[*limit.Error](err); ok && e.Field != "" {
		err = limit.NewError(e.Kind, "override."+e.Field, e.Message)
	}
	return out, wire.Status(err)
}

// DeleteOverride implements weirv1.OverridesServer.
func (s server) DeleteOverride(ctx context.Context, req *weirv1.DeleteOverrideRequest) (*weirv1.OverrideChange, error) {
	out, err := s.service.Delete(ctx, req)
	return out, wire.Status(err)
}
