package control

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/cluster"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/netaddr"
	"github.com/weirlimit/weir/internal/panics"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// timeout bounds how long a member waits for another one's answer about its keys.
const timeout = 2 * time.Second

// keyPace is the time between two attempts of Follow to bring the keys to what the file says.
const keyPace = 500 * time.Millisecond

// Ring has the keys of this member's gossip. *cluster.Cluster implements it.
type Ring interface {
	Keys() []cluster.Key // nil: gossip in plain text
	AddKey(key []byte) error
	UseKey(id string) error
	RemoveKey(id string) error
	Prove(text string) []byte
	Proven(text string, by []byte) bool
}

// GossipKeysConfig configures GossipKeys. All fields are required but Ring.
type GossipKeysConfig struct {
	Self ownership.Node
	Ring Ring // nil: a node without gossip
	// File returns the keys in this member's file, the first for writing; nil without a file.
	File func() [][]byte
	// Members returns all members, this one included, in order of their names.
	Members func() []ownership.Node
	// Ask has another member carry out one step.
	Ask func(ctx context.Context, member ownership.Node, req *weirv1.GossipKeysRequest) (*weirv1.MemberKeys, error)
	// Private reports whether messages between members are encrypted or stay on one host.
	Private func() bool
	// Record gets changes that were made or denied. Denied gets the address of a member that asked for a change in
	// plain text, or without a gossip key.
	Record func(auth.Event)
	Denied func(from net.Addr, reason string)
	Logger *slog.Logger
}

// GossipKeys changes the keys that encrypt gossip. Its methods are safe for concurrent use.
//
// It changes keys in steps that cut no member off: a key is added on all members, then used, and the old key is removed
// once no member uses it. Operators call for each step; when a member's key file changes, the member takes the steps
// itself (Follow). Keys are kept in memory: a change by a call is lost when the process ends, unless the file has it as
// well.
type GossipKeys struct {
	weirv1.UnimplementedAdminServer
	peerv1.UnimplementedGossipKeysServer
	cfg GossipKeysConfig
	mu  sync.Mutex // one change at a time
}

// NewGossipKeys returns the GossipKeys of a member.
func NewGossipKeys(cfg GossipKeysConfig) *GossipKeys { return &GossipKeys{cfg: cfg} }

// own returns the keys of this member, without the secret parts.
func (k *GossipKeys) own() *weirv1.MemberKeys {
	out := &weirv1.MemberKeys{Name: k.cfg.Self.Name}
	inFile := make(map[string]bool)
	for _, key := range k.cfg.File() {
		inFile[cluster.KeyID(key)] = true
	}
	for _, key := range k.cfg.Ring.Keys() {
		out.Keys = append(out.Keys, &weirv1.GossipKey{Id: key.ID, Used: key.Used, InFile: inFile[key.ID]})
	}
	if out.Keys == nil {
		out.Error = cluster.ErrPlain.Error()
	}
	return out
}

// changeOwn carries out one step on this member.
func (k *GossipKeys) changeOwn(req *weirv1.GossipKeysRequest) *weirv1.MemberKeys {
	var err error
	switch req.Action {
	case weirv1.KeyAction_KEY_ACTION_ADD:
		err = k.cfg.Ring.AddKey(req.Key)
	case weirv1.KeyAction_KEY_ACTION_USE:
		err = k.cfg.Ring.UseKey(req.Id)
	case weirv1.KeyAction_KEY_ACTION_REMOVE:
		err = k.cfg.Ring.RemoveKey(req.Id)
	}
	out := k.own()
	if err != nil {
		out.Error = err.Error()
	} else if req.Action != weirv1.KeyAction_KEY_ACTION_LIST && out.Error == "" {
		k.cfg.Logger.Info("gossip key changed", "step", actionOf(req), "key", idOf(req))
	}
	return out
}

// all has every member carry out one step and return its keys, in order of name. A member that does not answer has an
// Error.
func (k *GossipKeys) all(ctx context.Context, req *weirv1.GossipKeysRequest) []*weirv1.MemberKeys {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	members := k.cfg.Members()
	all := make([]*weirv1.MemberKeys, len(members))
	var asked panics.Group
	for i, m := range members {
		if m == k.cfg.Self {
			all[i] = k.changeOwn(req)
			continue
		}
		asked.Go(func() {
			ctx := metadata.AppendToOutgoingContext(ctx, proofHeader, string(k.cfg.Ring.Prove(textOf(m, req))))
			keys, err := k.cfg.Ask(ctx, m, req)
			if err != nil {
				keys = &weirv1.MemberKeys{Error: status.Convert(err).Message()}
			}
			keys.Name = m.Name
			all[i] = keys
		})
	}
	asked.Wait()
	return all
}

// proofHeader has the proof that a step comes from a node that has a gossip key. A node's certificate alone does not
// allow it to add one.
const proofHeader = "weir-gossip-proof-bin"

// textOf returns the text that is proven: the step, and the process that is to carry it out.
func textOf(m ownership.Node, req *weirv1.GossipKeysRequest) string {
	return fmt.Sprintf("%q %d %d %q %x", m.Name, m.Boot, req.Action, req.Id, req.Key)
}

// proven reports whether a call has the proof of its step.
func (k *GossipKeys) proven(ctx context.Context, req *weirv1.GossipKeysRequest) bool {
	header := metadata.ValueFromIncomingContext(ctx, proofHeader)
	return len(header) == 1 && k.cfg.Ring.Proven(textOf(k.cfg.Self, req), []byte(header[0]))
}

// objection returns which member stands against a step with a key, or does not answer; empty: none. A key may be used
// once every member has it, and removed once no member uses it.
func objection(all []*weirv1.MemberKeys, step weirv1.KeyAction, id string) string {
	has := func(k *weirv1.GossipKey) bool { return k.Id == id }
	uses := func(k *weirv1.GossipKey) bool { return k.Id == id && k.Used }
	for _, m := range all {
		switch {
		case m.Error != "":
			return m.Name + " cannot be asked: " + m.Error
		case step == weirv1.KeyAction_KEY_ACTION_USE && !slices.ContainsFunc(m.Keys, has):
			return m.Name + " does not have it"
		case step == weirv1.KeyAction_KEY_ACTION_REMOVE && slices.ContainsFunc(m.Keys, uses):
			return m.Name + " uses it"
		}
	}
	return ""
}

// actionOf names a step.
func actionOf(req *weirv1.GossipKeysRequest) string {
	return strings.ToLower(strings.TrimPrefix(req.Action.String(), "KEY_ACTION_"))
}

// idOf returns the id of the step's key.
func idOf(req *weirv1.GossipKeysRequest) string {
	if req.Id == "" {
		return cluster.KeyID(req.Key)
	}
	return req.Id
}

var errNoGossip = status.Error(codes.FailedPrecondition, "this node has no gossip")

// GossipKeys implements weirv1.AdminServer.
func (k *GossipKeys) GossipKeys(ctx context.Context,
	req *weirv1.GossipKeysRequest) (*weirv1.GossipKeysResponse, error) {
	resp, err := k.gossipKeys(ctx, req)
	if req.Action != weirv1.KeyAction_KEY_ACTION_LIST {
		e := auth.EventOf(ctx, auth.ActionGossipKey)
		e.Listener, e.What, e.Err = "grpc", actionOf(req)+" "+idOf(req), err
		for _, m := range resp.GetMembers() {
			if m.Error != "" && e.Err == nil {
				e.Err = fmt.Errorf("%s: %s", m.Name, m.Error)
			}
		}
		k.cfg.Record(e)
	}
	return resp, err
}

func (k *GossipKeys) gossipKeys(ctx context.Context,
	req *weirv1.GossipKeysRequest) (*weirv1.GossipKeysResponse, error) {
	if k.cfg.Ring == nil {
		return nil, errNoGossip
	}
	if k.cfg.Ring.Keys() == nil {
		return nil, status.Error(codes.FailedPrecondition, cluster.ErrPlain.Error())
	}
	list := &weirv1.GossipKeysRequest{Action: weirv1.KeyAction_KEY_ACTION_LIST}
	k.mu.Lock()
	defer k.mu.Unlock()
	refuse := func(format string, args ...any) (*weirv1.GossipKeysResponse, error) {
		return nil, status.Errorf(codes.FailedPrecondition, format, args...)
	}
	switch req.Action {
	case weirv1.KeyAction_KEY_ACTION_LIST:
		req = list
	case weirv1.KeyAction_KEY_ACTION_ADD:
		switch {
		case len(req.Key) != 16 && len(req.Key) != 24 && len(req.Key) != 32:
			return nil, status.Errorf(codes.InvalidArgument, "key: it must have 16, 24 or 32 bytes, not %d",
				len(req.Key))
		case !isPrivate(ctx):
			return refuse("key: came in plain text from another host: take another one, and use TLS")
		case !k.cfg.Private():
			return refuse("nodes talk in plain text: give them peer-tls-cert-file, or the key in their gossip-key-file")
		}
		if who := objection(k.all(ctx, list), req.Action, ""); who != "" {
			return refuse("%s", who)
		}
	case weirv1.KeyAction_KEY_ACTION_USE, weirv1.KeyAction_KEY_ACTION_REMOVE:
		if req.Id == "" {
			return nil, status.Error(codes.InvalidArgument, "id: is missing: a list of the keys shows it")
		}
		if who := objection(k.all(ctx, list), req.Action, req.Id); who != "" {
			return refuse("id: key %.40q: no %s while %s: it would be cut off", req.Id, actionOf(req), who)
		}
	default:
		return nil, status.Error(codes.InvalidArgument, "action: is missing or unknown")
	}
	return &weirv1.GossipKeysResponse{Members: k.all(ctx, req)}, nil
}

// isPrivate reports whether a call was encrypted or came from this host.
func isPrivate(ctx context.Context) bool {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return false
	}
	if _, encrypted := p.AuthInfo.(credentials.TLSInfo); encrypted {
		return true
	}
	return netaddr.LoopbackAddr(p.Addr)
}

// Apply implements peerv1.GossipKeysServer: another member asks for a step.
func (k *GossipKeys) Apply(ctx context.Context, req *weirv1.GossipKeysRequest) (*weirv1.MemberKeys, error) {
	if k.cfg.Ring == nil {
		return nil, errNoGossip
	}
	e := auth.Event{Action: auth.ActionGossipKey, Listener: "peer", What: actionOf(req) + " " + idOf(req)}
	if from, ok := peer.FromContext(ctx); ok {
		e.From = from.Addr
	}
	switch {
	case req.Action == weirv1.KeyAction_KEY_ACTION_LIST:
	case !isPrivate(ctx):
		e.Reason = "keys_in_plain_text"
	case !k.proven(ctx, req):
		e.Reason = "no_gossip_key"
	}
	if e.Reason != "" {
		e.Action = auth.ActionDenied
		k.cfg.Record(e)
		if from, ok := peer.FromContext(ctx); ok {
			k.cfg.Denied(from.Addr, e.Reason)
		}
		return nil, status.Error(codes.PermissionDenied, "gossip keys are changed over TLS, by nodes that have one")
	}
	keys := k.changeOwn(req)
	if req.Action != weirv1.KeyAction_KEY_ACTION_LIST {
		if keys.Error != "" {
			e.Err = errors.New(keys.Error)
		}
		k.cfg.Record(e)
	}
	return keys, nil
}

// Follow brings this member's keys to what its file says, whenever changed gets a value, until ctx ends. Members' files
// change at different times, so it takes steps that cut no member off: it adds new keys at once; it uses the first key
// of the file once every member has it; it removes keys that are no longer in the file once no member uses them. A key
// that was removed and that an operator adds again is not the file's, and stays.
func (k *GossipKeys) Follow(ctx context.Context, changed <-chan struct{}) {
	ours := make(map[string]bool) // keys of the file, and keys that it had and that are to be removed
	note := func(file [][]byte) {
		for _, key := range file {
			ours[cluster.KeyID(key)] = true
		}
	}
	for _, key := range k.cfg.Ring.Keys() { // the file's, as the member has started with them
		ours[key.ID] = true
	}
	waiting := ""
	var again <-chan time.Time // nil: the keys match the file
	for {
		select {
		case <-changed:
		case <-again:
		case <-ctx.Done():
			return
		}
		file := k.cfg.File()
		note(file)
		what := k.step(ctx, file, ours)
		if what != waiting && what != "" {
			k.cfg.Logger.Info("gossip key change waits", "for", what)
		}
		again = time.After(keyPace)
		if waiting = what; what == "" {
			clear(ours)
			note(file)
			k.cfg.Logger.Info("gossip keys match the file", "keys", len(k.cfg.Ring.Keys()))
			again = nil
		}
	}
}

// step does what can be done, and returns what it waits for, or "" if the keys match the file.
func (k *GossipKeys) step(ctx context.Context, file [][]byte, ours map[string]bool) string {
	record := func(step string) {
		k.cfg.Record(auth.Event{Action: auth.ActionGossipKey, Listener: "file", What: step})
	}
	inFile := make(map[string]bool)
	had := k.cfg.Ring.Keys()
	for _, key := range file {
		id := cluster.KeyID(key)
		inFile[id] = true
		if err := k.cfg.Ring.AddKey(key); err != nil {
			return err.Error()
		}
		if !slices.ContainsFunc(had, func(old cluster.Key) bool { return old.ID == id }) {
			record("add " + id)
		}
	}
	first := cluster.KeyID(file[0])
	all := k.all(ctx, &weirv1.GossipKeysRequest{Action: weirv1.KeyAction_KEY_ACTION_LIST})
	take := func(action weirv1.KeyAction, id string) (waits string) {
		req := &weirv1.GossipKeysRequest{Action: action, Id: id}
		what := actionOf(req) + " " + id
		if who := objection(all, action, id); who != "" {
			return what + ": " + who
		}
		if wrong := k.changeOwn(req).Error; wrong != "" {
			return wrong
		}
		record(what)
		return ""
	}
	for _, key := range k.cfg.Ring.Keys() {
		if key.ID == first && !key.Used {
			// What the others use is asked again.
			return cmp.Or(take(weirv1.KeyAction_KEY_ACTION_USE, first), "the others to use key "+first)
		}
	}
	for _, key := range k.cfg.Ring.Keys() {
		if inFile[key.ID] || !ours[key.ID] {
			continue
		}
		if waits := take(weirv1.KeyAction_KEY_ACTION_REMOVE, key.ID); waits != "" {
			return waits
		}
	}
	return ""
}
