package control

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/cluster"
	"github.com/weirlimit/weir/cluster/ownership"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
)

func key(b byte) []byte { return slices.Repeat([]byte{b}, 16) }

func id(b byte) string { return cluster.KeyID(key(b)) }

// network is members that gossip with keys. It fails the test when one writes with a key that another cannot read.
type network struct {
	t       *testing.T
	mu      sync.Mutex
	names   []string
	members map[string]*member
	silent  string // a member that does not answer
	private bool
	events  []auth.Event
	denied  int
}

// member is one of them, as a Ring.
type member struct {
	*network
	keys    *GossipKeys
	ring    []string // the used one first
	file    [][]byte
	changed chan struct{}
}

func newNetwork(t *testing.T, names ...string) *network {
	n := &network{t: t, names: names, members: make(map[string]*member), private: true}
	for _, name := range names {
		m := &member{network: n, ring: []string{id(1)}, file: [][]byte{key(1)}, changed: make(chan struct{}, 1)}
		m.keys = NewGossipKeys(GossipKeysConfig{
			Self: ownership.Node{Name: name}, Ring: m, Private: func() bool { return n.private }, Ask: n.ask,
			Logger: slog.New(slog.DiscardHandler),
			File: func() [][]byte {
				n.mu.Lock()
				defer n.mu.Unlock()
				return m.file
			},
			Members: func() (all []ownership.Node) {
				for _, name := range n.names {
					all = append(all, ownership.Node{Name: name})
				}
				return all
			},
			Record: func(e auth.Event) {
				n.mu.Lock()
				defer n.mu.Unlock()
				n.events = append(n.events, e)
			},
			Denied: func(net.Addr, string) { n.denied++ },
		})
		n.members[name] = m
	}
	return n
}

func (n *network) ask(ctx context.Context, to ownership.Node,
	req *weirv1.GossipKeysRequest) (*weirv1.MemberKeys, error) {
	n.mu.Lock()
	silent := n.silent == to.Name
	n.mu.Unlock()
	if silent {
		return nil, errors.New("no answer")
	}
	sent, _ := metadata.FromOutgoingContext(ctx)
	return n.members[to.Name].keys.Apply(metadata.NewIncomingContext(callFrom(ctx, "127.0.0.1"), sent), req)
}

func callFrom(ctx context.Context, ip string) context.Context {
	return peer.NewContext(ctx, &peer.Peer{Addr: &net.TCPAddr{IP: net.ParseIP(ip), Port: 1}})
}

// Keys implements Ring, as the rest does.
func (m *member) Keys() (all []cluster.Key) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, id := range m.ring {
		all = append(all, cluster.Key{ID: id, Used: i == 0})
	}
	return all
}

func (m *member) AddKey(key []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if id := cluster.KeyID(key); !slices.Contains(m.ring, id) {
		m.ring = append(m.ring, id)
	}
	return nil
}

func (m *member) UseKey(id string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	i := slices.Index(m.ring, id)
	if i < 0 {
		return errors.New("not there")
	}
	m.ring = slices.Insert(slices.Delete(m.ring, i, i+1), 0, id)
	m.checkLocked()
	return nil
}

func (m *member) RemoveKey(id string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	i := slices.Index(m.ring, id)
	if i <= 0 {
		return fmt.Errorf("%s is used, or not there", id)
	}
	m.ring = slices.Delete(m.ring, i, i+1)
	m.checkLocked()
	return nil
}

func (m *member) Prove(text string) []byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	return []byte(m.ring[0] + text)
}

func (m *member) Proven(text string, by []byte) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.ContainsFunc(m.ring, func(id string) bool { return string(by) == id+text })
}

// checkLocked holds all to the one rule.
func (n *network) checkLocked() {
	for _, writer := range n.members {
		for name, reader := range n.members {
			expect.True(n.t, slices.Contains(reader.ring, writer.ring[0]),
				"%s cannot read %s: %v", name, writer.ring[0], reader.ring)
		}
	}
}

// rings are the keys of all members, each used one first.
func (n *network) rings() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	var all []string
	for _, name := range n.names {
		all = append(all, strings.Join(n.members[name].ring, " "))
	}
	return strings.Join(all, " | ")
}

// TestSteps: a key is changed by calls to any member; a step that would cut one off is an error, and changes nothing.
func TestSteps(t *testing.T) {
	const add, use, remove = weirv1.KeyAction_KEY_ACTION_ADD, weirv1.KeyAction_KEY_ACTION_USE,
		weirv1.KeyAction_KEY_ACTION_REMOVE
	one, two := id(1), id(2)
	n := newNetwork(t, "a", "b")
	for _, step := range []struct {
		what    string
		private bool
		caller  string
		silent  string
		req     *weirv1.GossipKeysRequest
		code    codes.Code
		says    string
		rings   string
	}{
		{"no action", true, "127.0.0.1", "", &weirv1.GossipKeysRequest{}, codes.InvalidArgument, "action",
			one + " | " + one},
		{"an unknown action", true, "127.0.0.1", "", &weirv1.GossipKeysRequest{Action: 9}, codes.InvalidArgument,
			"action: is missing or unknown", one + " | " + one},
		{"used without an id", true, "127.0.0.1", "", &weirv1.GossipKeysRequest{Action: use}, codes.InvalidArgument,
			"id: is missing", one + " | " + one},
		{"removed without an id", true, "127.0.0.1", "", &weirv1.GossipKeysRequest{Action: remove},
			codes.InvalidArgument, "id: is missing", one + " | " + one},
		{"a short key", true, "127.0.0.1", "", &weirv1.GossipKeysRequest{Action: add, Key: key(2)[:15]},
			codes.InvalidArgument, "not 15", one + " | " + one},
		{"in plain text", true, "192.0.2.1", "", &weirv1.GossipKeysRequest{Action: add, Key: key(2)},
			codes.FailedPrecondition, "plain text", one + " | " + one},
		{"to others in plain text", false, "127.0.0.1", "", &weirv1.GossipKeysRequest{Action: add, Key: key(2)},
			codes.FailedPrecondition, "plain text", one + " | " + one},
		{"with a member away", true, "127.0.0.1", "b", &weirv1.GossipKeysRequest{Action: add, Key: key(2)},
			codes.FailedPrecondition, "b cannot be asked: no answer", one + " | " + one},
		{"used before it is there", true, "127.0.0.1", "", &weirv1.GossipKeysRequest{Action: use, Id: two},
			codes.FailedPrecondition, "a does not have it", one + " | " + one},
		{"added", true, "127.0.0.1", "", &weirv1.GossipKeysRequest{Action: add, Key: key(2)}, codes.OK, "",
			one + " " + two + " | " + one + " " + two},
		{"used with a member away", true, "127.0.0.1", "b", &weirv1.GossipKeysRequest{Action: use, Id: two},
			codes.FailedPrecondition, "b cannot be asked", one + " " + two + " | " + one + " " + two},
		{"removed while it is used", true, "127.0.0.1", "", &weirv1.GossipKeysRequest{Action: remove, Id: one},
			codes.FailedPrecondition, "a uses it", one + " " + two + " | " + one + " " + two},
		{"used", true, "127.0.0.1", "", &weirv1.GossipKeysRequest{Action: use, Id: two}, codes.OK, "",
			two + " " + one + " | " + two + " " + one},
		{"removed", true, "127.0.0.1", "", &weirv1.GossipKeysRequest{Action: remove, Id: one}, codes.OK, "",
			two + " | " + two},
	} {
		n.private, n.silent, n.events = step.private, step.silent, nil
		resp, err := n.members["a"].keys.GossipKeys(callFrom(t.Context(), step.caller), step.req)
		expect.True(t, status.Code(err) == step.code && (err == nil || strings.Contains(err.Error(), step.says)) &&
			(err != nil || len(resp.Members) == 2), "%s: %v, %v", step.what, resp, err)
		expect.Equal(t, n.rings(), step.rings, "%s", step.what)
		expect.True(t, len(n.events) != 0 && (n.events[len(n.events)-1].Err == nil) == (step.code == codes.OK),
			"%s: recorded are %+v", step.what, n.events)
	}
}

// TestFollow: members whose files change at different times, one of them while it cannot be asked, end with the keys of
// the files, and none is cut off on the way.
func TestFollow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t, "a", "b", "c")
		ctx, cancel := context.WithCancel(t.Context())
		var work sync.WaitGroup
		for _, m := range n.members {
			work.Go(func() { m.keys.Follow(ctx, m.changed) })
		}
		change := func(name string, file ...byte) {
			n.mu.Lock()
			defer n.mu.Unlock()
			m := n.members[name]
			m.file = nil
			for _, b := range file {
				m.file = append(m.file, key(b))
			}
			m.changed <- struct{}{}
		}
		want := func(rings ...string) {
			t.Helper()
			time.Sleep(10 * keyPace) // of the bubble
			synctest.Wait()
			expect.Equal(t, n.rings(), strings.Join(rings, " | "), "want %v", rings)
		}
		one, two, both := id(1), id(2), id(1)+" "+id(2)
		change("a", 2)
		want(both, one, one) // and it waits
		change("b", 2, 1)
		want(both, both, one)
		n.mu.Lock()
		n.silent = "b"
		n.mu.Unlock()
		change("c", 2)
		want(both, two+" "+one, both) // b knows of all
		n.mu.Lock()
		n.silent = ""
		n.mu.Unlock()
		want(two, two+" "+one, two) // b's file has the old one, too
		change("b", 2)
		want(two, two, two)
		three := id(3)
		change("a", 3)
		change("b", 2, 3)
		change("c", 3)
		want(three+" "+two, two+" "+three, three+" "+two) // b goes on writing with the old one
		change("b", 3)
		want(three, three, three)
		cancel()
		work.Wait()
	})
}
