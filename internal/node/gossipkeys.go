package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/cluster"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/filewatch"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// keyTimeout bounds how long a member is waited for that is asked about its gossip keys.
const keyTimeout = 2 * time.Second

// openGossipKeys reads the keys and keeps watching their file.
func (s *security) openGossipKeys() (*filewatch.Watcher[[][]byte], error) {
	s.metrics.Watching("gossip_keys")
	file := s.cfg.GossipKeyFile
	w, err := filewatch.Start([]string{file}, filewatch.Config[[][]byte]{
		Parse: func(contents [][]byte) ([][]byte, error) { return cluster.ParseKeys(file, contents[0]) },
		OnChange: func([][]byte) {
			s.metrics.Reloaded("gossip_keys", true)
			s.warnReadable(s.cfg.GossipKeyFile)
			select {
			case s.keysChanged <- struct{}{}:
			default:
			}
		},
		OnError: s.reloadFailed("gossip_keys"),
	})
	if err != nil {
		return nil, fmt.Errorf("gossip-key-file: %w", err)
	}
	return w, nil
}

// fileKeys are the keys in the file, none without one.
func (s *security) fileKeys() [][]byte {
	if s.gossipKeys == nil {
		return nil
	}
	return s.gossipKeys.Current()
}

// ownKeys are the gossip keys of this node, as others are told of them.
func (n *Node) ownKeys() *weirv1.MemberKeys {
	out := &weirv1.MemberKeys{Name: n.cfg.Name}
	inFile := make(map[string]bool)
	for _, k := range n.security.fileKeys() {
		inFile[cluster.KeyID(k)] = true
	}
	for _, k := range n.cluster.Keys() {
		out.Keys = append(out.Keys, &weirv1.GossipKey{Id: k.ID, Used: k.Used, InFile: inFile[k.ID]})
	}
	if out.Keys == nil {
		out.Error = cluster.ErrPlain.Error()
	}
	return out
}

// changeOwnKeys carries out one step on this node.
func (n *Node) changeOwnKeys(req *weirv1.GossipKeysRequest) *weirv1.MemberKeys {
	var err error
	switch req.Action {
	case weirv1.KeyAction_KEY_ACTION_ADD:
		err = n.cluster.AddKey(req.Key)
	case weirv1.KeyAction_KEY_ACTION_USE:
		err = n.cluster.UseKey(req.Id)
	case weirv1.KeyAction_KEY_ACTION_REMOVE:
		err = n.cluster.RemoveKey(req.Id)
	}
	out := n.ownKeys()
	if err != nil {
		out.Error = err.Error()
	} else if req.Action != weirv1.KeyAction_KEY_ACTION_LIST && out.Error == "" {
		id := req.Id
		if id == "" {
			id = cluster.KeyID(req.Key)
		}
		n.log.Info("gossip key changed", "step", strings.ToLower(strings.TrimPrefix(req.Action.String(), "KEY_ACTION_")), "key", id)
	}
	return out
}

// allKeys has every member carry out one step and tell its keys, in order of their names. A member that cannot be asked has
// an Error.
func (n *Node) allKeys(ctx context.Context, req *weirv1.GossipKeysRequest) []*weirv1.MemberKeys {
	ctx, cancel := context.WithTimeout(ctx, keyTimeout)
	defer cancel()
	v := n.view()
	all := make([]*weirv1.MemberKeys, len(v.Members))
	var asked sync.WaitGroup
	for i := range v.Members {
		m := &v.Members[i]
		if m.Name == v.Self.Name && m.Boot == v.Self.Boot {
			all[i] = n.changeOwnKeys(req)
			continue
		}
		asked.Go(func() {
			keys, err := n.peers.GossipKeys(ctx, ownership.Node{Name: m.Name, Boot: m.Boot}, req)
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

// missing says which member lacks a key, or cannot be asked; nobody when it is empty.
func missing(all []*weirv1.MemberKeys, id string) string {
	for _, m := range all {
		switch {
		case m.Error != "":
			return m.Name + " cannot be asked: " + m.Error
		case !slices.ContainsFunc(m.Keys, func(k *weirv1.GossipKey) bool { return k.Id == id }):
			return m.Name + " does not have it"
		}
	}
	return ""
}

// using says which member uses a key, or cannot be asked; nobody when it is empty.
func using(all []*weirv1.MemberKeys, id string) string {
	for _, m := range all {
		switch {
		case m.Error != "":
			return m.Name + " cannot be asked: " + m.Error
		case slices.ContainsFunc(m.Keys, func(k *weirv1.GossipKey) bool { return k.Id == id && k.Used }):
			return m.Name + " uses it"
		}
	}
	return ""
}

// admin answers operators.
type admin struct {
	weirv1.UnimplementedAdminServer
	n  *Node
	mu sync.Mutex // one change at a time
}

// GossipKeys implements weirv1.AdminServer.
func (a *admin) GossipKeys(ctx context.Context, req *weirv1.GossipKeysRequest) (*weirv1.GossipKeysResponse, error) {
	resp, err := a.gossipKeys(ctx, req)
	if req.Action != weirv1.KeyAction_KEY_ACTION_LIST {
		e := auth.EventOf(ctx, "grpc", auth.ActionGossipKey)
		e.What, e.Err = stepOf(req), err
		for _, m := range resp.GetMembers() {
			if m.Error != "" && e.Err == nil {
				e.Err = fmt.Errorf("%s: %s", m.Name, m.Error)
			}
		}
		a.n.security.record(e)
	}
	return resp, err
}

// stepOf names a step, and the key that it is about.
func stepOf(req *weirv1.GossipKeysRequest) string {
	id := req.Id
	if id == "" {
		id = cluster.KeyID(req.Key)
	}
	return strings.ToLower(strings.TrimPrefix(req.Action.String(), "KEY_ACTION_")) + " " + id
}

func (a *admin) gossipKeys(ctx context.Context, req *weirv1.GossipKeysRequest) (*weirv1.GossipKeysResponse, error) {
	n := a.n
	if n.cluster == nil {
		return nil, status.Error(codes.FailedPrecondition, "this node has no gossip")
	}
	if n.cluster.Keys() == nil {
		return nil, status.Error(codes.FailedPrecondition, cluster.ErrPlain.Error())
	}
	list := &weirv1.GossipKeysRequest{Action: weirv1.KeyAction_KEY_ACTION_LIST}
	a.mu.Lock()
	defer a.mu.Unlock()
	refuse := func(format string, args ...any) (*weirv1.GossipKeysResponse, error) {
		return nil, status.Errorf(codes.FailedPrecondition, format, args...)
	}
	switch req.Action {
	case weirv1.KeyAction_KEY_ACTION_LIST:
		req = list
	case weirv1.KeyAction_KEY_ACTION_ADD:
		switch {
		case len(req.Key) != 16 && len(req.Key) != 24 && len(req.Key) != 32:
			return nil, status.Errorf(codes.InvalidArgument, "key: has %d bytes; it must have 16, 24 or 32", len(req.Key))
		case !isPrivate(ctx):
			return refuse("key: came in plain text from another host, and may be known by now: take another one, and use TLS")
		case !n.peersArePrivate():
			return refuse("nodes talk to each other in plain text, where the key could be read: start them with peer-tls-cert-file, or put the key into their gossip-key-file")
		}
		for _, m := range n.allKeys(ctx, list) {
			if m.Error != "" {
				return refuse("%s cannot be asked: %s", m.Name, m.Error)
			}
		}
	case weirv1.KeyAction_KEY_ACTION_USE:
		if who := missing(n.allKeys(ctx, list), req.Id); who != "" {
			return refuse("id: key %.40q is not used, %s: it would be cut off", req.Id, who)
		}
	case weirv1.KeyAction_KEY_ACTION_REMOVE:
		if who := using(n.allKeys(ctx, list), req.Id); who != "" {
			return refuse("id: key %.40q is not removed, %s: it would be cut off", req.Id, who)
		}
	default:
		return nil, status.Error(codes.InvalidArgument, "action: is missing")
	}
	return &weirv1.GossipKeysResponse{Members: n.allKeys(ctx, req)}, nil
}

// isPrivate reports whether nobody on the way could read what came with a call.
func isPrivate(ctx context.Context) bool {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return false
	}
	if _, encrypted := p.AuthInfo.(credentials.TLSInfo); encrypted {
		return true
	}
	host, _, err := net.SplitHostPort(p.Addr.String())
	return err == nil && isLoopback(host)
}

// peersArePrivate reports whether nobody can read what nodes say to each other.
func (n *Node) peersArePrivate() bool {
	if n.security.peers != nil {
		return true
	}
	for _, m := range n.view().Members {
		if ap, err := netip.ParseAddrPort(m.PeerAddr); err != nil || !ap.Addr().Unmap().IsLoopback() {
			return false
		}
	}
	return true
}

// peerKeys answers other nodes.
type peerKeys struct {
	peerv1.UnimplementedGossipKeysServer
	n *Node
}

// Apply implements peerv1.GossipKeysServer.
func (p peerKeys) Apply(ctx context.Context, req *weirv1.GossipKeysRequest) (*weirv1.MemberKeys, error) {
	if p.n.cluster == nil {
		return nil, status.Error(codes.FailedPrecondition, "this node has no gossip")
	}
	e := auth.Event{Action: auth.ActionGossipKey, Listener: "peer", What: stepOf(req)}
	if from, ok := peer.FromContext(ctx); ok {
		e.From = from.Addr
	}
	if req.Action != weirv1.KeyAction_KEY_ACTION_LIST && !isPrivate(ctx) {
		e.Action, e.Reason = auth.ActionDenied, "keys_in_plain_text"
		p.n.security.record(e)
		if from, ok := peer.FromContext(ctx); ok {
			p.n.security.denials.note("peer", "keys_in_plain_text", from.Addr, "a change of the gossip keys")
		}
		return nil, status.Error(codes.PermissionDenied, "gossip keys are changed by nodes that prove who they are, over TLS")
	}
	keys := p.n.changeOwnKeys(req)
	if req.Action != weirv1.KeyAction_KEY_ACTION_LIST {
		if keys.Error != "" {
			e.Err = errors.New(keys.Error)
		}
		p.n.security.record(e)
	}
	return keys, nil
}

// followKeyFile brings this node's gossip keys to what its file says whenever that changes, in steps that cut nobody off
// although the nodes' files change at different times: new keys are added at once; the first of the file is used once every
// member has it; keys that were in the file and are no more are removed once no member uses them. A key that has been removed
// and is added again by an operator is the operator's: the file says nothing of it.
func (n *Node) followKeyFile() {
	ours := make(map[string]bool) // keys in the file, and those that were and are to be removed
	note := func(file [][]byte) {
		for _, k := range file {
			ours[cluster.KeyID(k)] = true
		}
	}
	note(n.security.fileKeys())
	waiting := ""
	for {
		select {
		case <-n.security.keysChanged:
		case <-n.ctx.Done():
			return
		}
		for {
			file := n.security.fileKeys()
			note(file)
			what := n.stepToKeyFile(file, ours)
			if what != waiting && what != "" {
				n.log.Info("gossip key change waits", "for", what)
			}
			if waiting = what; what == "" {
				clear(ours)
				note(file)
				n.log.Info("gossip keys match the file", "keys", len(n.cluster.Keys()))
				break
			}
			select {
			case <-time.After(keyPace):
			case <-n.ctx.Done():
				return
			}
		}
	}
}

// keyPace is how often members are asked while keys are on their way.
const keyPace = 500 * time.Millisecond

// stepToKeyFile does what can be done, and says what it waits for; nothing when all is done.
func (n *Node) stepToKeyFile(file [][]byte, ours map[string]bool) string {
	record := func(step string) {
		n.security.record(auth.Event{Action: auth.ActionGossipKey, Listener: "file", What: step})
	}
	inFile := make(map[string]bool)
	had := n.cluster.Keys()
	for _, k := range file {
		id := cluster.KeyID(k)
		inFile[id] = true
		if err := n.cluster.AddKey(k); err != nil {
			return err.Error()
		}
		if !slices.ContainsFunc(had, func(old cluster.Key) bool { return old.ID == id }) {
			record("add " + id)
		}
	}
	first := cluster.KeyID(file[0])
	all := n.allKeys(n.ctx, &weirv1.GossipKeysRequest{Action: weirv1.KeyAction_KEY_ACTION_LIST})
	for _, k := range n.cluster.Keys() {
		if k.ID == first && !k.Used {
			if who := missing(all, first); who != "" {
				return "using key " + first + ": " + who
			}
			if err := n.cluster.UseKey(first); err != nil {
				return err.Error()
			}
			n.log.Info("gossip key changed", "step", "use", "key", first)
			record("use " + first)
			return "the others to use key " + first // which is looked at anew
		}
	}
	for _, k := range n.cluster.Keys() {
		if inFile[k.ID] || !ours[k.ID] {
			continue
		}
		if who := using(all, k.ID); who != "" {
			return "removing key " + k.ID + ": " + who
		}
		if err := n.cluster.RemoveKey(k.ID); err != nil {
			return err.Error()
		}
		n.log.Info("gossip key changed", "step", "remove", "key", k.ID)
		record("remove " + k.ID)
	}
	return ""
}
