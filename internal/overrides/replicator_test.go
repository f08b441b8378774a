package overrides

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weirlimit/weir/cluster/ownership"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
)

// fakeCluster is members that call each other directly.
type fakeCluster struct {
	members []ownership.Node
	all     map[ownership.Node]*Replicator
	mu      sync.Mutex
	cut     map[ownership.Node]bool // reaches nobody, and nobody reaches it
	calls   atomic.Int64
}

var errCut = errors.New("cut off")

// from is what one member reaches the others by.
type from struct {
	*fakeCluster
	self ownership.Node
}

func (f from) to(m ownership.Node) (*Replicator, error) {
	f.calls.Add(1)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.cut[f.self] || f.cut[m] {
		return nil, errCut
	}
	return f.all[m], nil
}

func (f from) Push(ctx context.Context, to ownership.Node, req *peerv1.PushOverridesRequest) (*peerv1.PushOverridesResponse, error) {
	r, err := f.to(to)
	if err != nil {
		return nil, err
	}
	return r.Push(ctx, req)
}

func (f from) Pull(ctx context.Context, to ownership.Node, req *peerv1.PullOverridesRequest) (*peerv1.PullOverridesResponse, error) {
	r, err := f.to(to)
	if err != nil {
		return nil, err
	}
	return r.Pull(ctx, req)
}

func newFakeCluster(t *testing.T, size int) *fakeCluster {
	c := &fakeCluster{all: make(map[ownership.Node]*Replicator), cut: make(map[ownership.Node]bool)}
	for i := range size {
		c.members = append(c.members, ownership.Node{Name: fmt.Sprint("n", i), Boot: uint64(i + 1)})
	}
	for _, m := range c.members {
		c.all[m] = NewReplicator(ReplicatorConfig{
			Self: m, Book: mustOpen(t, ""), Peers: from{c, m}, Apply: func() {}, Now: time.Now, Logger: slog.New(slog.DiscardHandler),
			Members: func() ([]ownership.Node, <-chan struct{}) { return c.members, nil },
		})
	}
	return c
}

func (c *fakeCluster) setCut(m ownership.Node, cut bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cut[m] = cut
}

func (c *fakeCluster) book(i int) *Book { return c.all[c.members[i]].cfg.Book }

func (c *fakeCluster) equal() bool {
	for i := range c.members {
		if c.book(i).Digest() != c.book(0).Digest() {
			return false
		}
	}
	return true
}

// TestReplicator: a change is pushed to all; what could not be pushed, and what others changed meanwhile, comes once the members reach
// each other, in pages; and members that are equal leave each other alone.
func TestReplicator(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newFakeCluster(t, 3)
		ctx, cancel := context.WithCancel(t.Context())
		for _, r := range c.all {
			if r.Met() {
				t.Error("met before anybody was asked")
			}
			go r.Run(ctx)
		}
		defer synctest.Wait()
		defer cancel()
		time.Sleep(time.Second)
		for _, r := range c.all {
			if !r.Met() || r.Unequal(false) != 0 {
				t.Error("not met")
			}
		}
		before := c.calls.Load()
		time.Sleep(20 * time.Second)
		if n := c.calls.Load() - before; n != 0 {
			t.Errorf("%d calls of members that are equal", n)
		}

		e := set(t, c.book(0), "n0", "alice", `{"limit":1}`)
		first := c.all[c.members[0]]
		for _, m := range first.spread(ctx, &e) {
			if !m.Has || m.Durable || m.Error != "" {
				t.Errorf("%+v", m)
			}
		}
		if !c.equal() {
			t.Error("the change is not with all")
		}

		last := c.members[2]
		c.setCut(last, true)
		var many []Entry // more than a page has
		for i := range 5000 {
			key := fmt.Sprint("k", i) + strings.Repeat("x", 500)
			many = append(many, Entry{ID: ID{Policy: "login", Key: key}, Version: Version{7, "n9"}, Settings: `{"limit":1}`, At: epoch})
		}
		if n, err := c.book(0).Merge(many); n != len(many) || err != nil {
			t.Fatal(n, err)
		}
		first.changed()
		set(t, c.book(2), "n2", "alice", `{"limit":2}`)
		set(t, c.book(2), "n2", "bob", `{"limit":2}`)
		e = set(t, c.book(0), "n0", "carol", `{"limit":1}`)
		for _, m := range first.spread(ctx, &e) {
			if m.Has != (m.Name != "n2") || (m.Error != "") != (m.Name == "n2") {
				t.Errorf("%+v", m)
			}
		}
		time.Sleep(5 * time.Second)
		if c.book(0).Digest() != c.book(1).Digest() || c.equal() || first.Unequal(false) != 1 {
			t.Error("those that reach each other differ, or all are equal")
		}
		c.setCut(last, false)
		time.Sleep(maxDelay + time.Second)
		if !c.equal() || first.Unequal(false) != 0 {
			t.Errorf("%d, %d and %d entries", len(contentOf(c.book(0))), len(contentOf(c.book(1))), len(contentOf(c.book(2))))
		}
		if got, _ := c.book(1).Get(ID{Policy: "login", Key: "bob"}); got == nil {
			t.Error("what the one that was cut off changed is lost")
		}
	})
}

// TestSpreadToFull: a member that has no room for an override is not said to have it.
func TestSpreadToFull(t *testing.T) {
	c := newFakeCluster(t, 2)
	var many []Entry
	for i := range 2 * MaxOverrides {
		many = append(many, Entry{ID: ID{Policy: "login", Key: fmt.Sprint("k", i)}, Version: Version{7, "n9"}, Settings: `{"limit":1}`, At: epoch})
	}
	if n, err := c.book(1).Merge(many); n != len(many) || err != nil {
		t.Fatal(n, err)
	}
	e := set(t, c.book(0), "n0", "alice", `{"limit":1}`)
	all := c.all[c.members[0]].spread(t.Context(), &e)
	if !all[0].Has || all[1].Has || all[1].Durable || !strings.Contains(all[1].Error, "full") {
		t.Errorf("%+v", all)
	}
}

// hostile answers with what it likes.
type hostile struct {
	pull func(*peerv1.PullOverridesRequest) *peerv1.PullOverridesResponse
}

func (h hostile) Push(context.Context, ownership.Node, *peerv1.PushOverridesRequest) (*peerv1.PushOverridesResponse, error) {
	return &peerv1.PushOverridesResponse{}, nil
}

func (h hostile) Pull(_ context.Context, _ ownership.Node, req *peerv1.PullOverridesRequest) (*peerv1.PullOverridesResponse, error) {
	return h.pull(req), nil
}

// TestHostilePages: whatever another member answers, an exchange ends, and what it took is bounded and valid.
func TestHostilePages(t *testing.T) {
	entry := func(key string) *peerv1.OverrideEntry {
		return &peerv1.OverrideEntry{Policy: "login", Key: key, Counter: 1, Node: "n1", Settings: `{"limit":1}`}
	}
	digest := make([]byte, len(Digest{}))
	for name, pull := range map[string]func(*peerv1.PullOverridesRequest) *peerv1.PullOverridesResponse{
		"nothing": func(*peerv1.PullOverridesRequest) *peerv1.PullOverridesResponse {
			return &peerv1.PullOverridesResponse{}
		},
		"the same page for ever": func(*peerv1.PullOverridesRequest) *peerv1.PullOverridesResponse {
			return &peerv1.PullOverridesResponse{Digest: digest, Entries: []*peerv1.OverrideEntry{entry("k")}, More: true}
		},
		"empty pages for ever": func(*peerv1.PullOverridesRequest) *peerv1.PullOverridesResponse {
			return &peerv1.PullOverridesResponse{Digest: digest, More: true}
		},
		"pages without an end": func(req *peerv1.PullOverridesRequest) *peerv1.PullOverridesResponse {
			return &peerv1.PullOverridesResponse{Digest: digest, Entries: []*peerv1.OverrideEntry{entry(req.GetAfter().GetKey() + "k")}, More: true}
		},
		"no entries in the list": func(*peerv1.PullOverridesRequest) *peerv1.PullOverridesResponse {
			return &peerv1.PullOverridesResponse{Digest: digest, Entries: []*peerv1.OverrideEntry{nil, {}, nil}}
		},
		"a short digest": func(*peerv1.PullOverridesRequest) *peerv1.PullOverridesResponse {
			return &peerv1.PullOverridesResponse{Digest: digest[:5]}
		},
	} {
		c := newFakeCluster(t, 2)
		r := c.all[c.members[0]]
		r.cfg.Peers = hostile{pull}
		r.exchange(t.Context(), c.members[1])
		for _, e := range contentOf(r.cfg.Book) {
			if err := e.valid(); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		if st := r.cfg.Book.Stats(); st.Overrides > maxPages {
			t.Errorf("%s: %+v", name, st)
		}
	}
}

// FuzzPush: no message of another member makes it panic; what it is answered with is the digest of what was taken, and taking it twice
// changes nothing.
func FuzzPush(f *testing.F) {
	f.Add("login", "k", "", uint64(1), "n", `{"limit":1}`, "ops", int64(5))
	f.Add("login", "", "k", uint64(1<<53), "n", ``, "", int64(maxMillis))
	f.Fuzz(func(t *testing.T, policy, key, prefix string, counter uint64, node, settings, by string, at int64) {
		c := newFakeCluster(t, 1)
		r := c.all[c.members[0]]
		req := &peerv1.PushOverridesRequest{Entries: []*peerv1.OverrideEntry{
			{Policy: policy, Key: key, Prefix: prefix, Counter: counter, Node: node, Settings: settings, By: by, AtUnixMs: at}, nil,
		}}
		answer, err := r.Push(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		own := r.cfg.Book.Digest()
		first := contentOf(r.cfg.Book)
		if !slices.Equal(answer.Digest, own[:]) || answer.Durable {
			t.Errorf("%+v", answer)
		}
		if _, err := r.Push(t.Context(), req); err != nil || r.cfg.Book.Digest() != own {
			t.Error("taken twice it is something else")
		}
		if diff := cmp.Diff(first, contentOf(r.cfg.Book)); diff != "" {
			t.Error(diff)
		}
	})
}
