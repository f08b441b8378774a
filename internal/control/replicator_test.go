package control

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/policy"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// fakeCluster is members that call each other directly.
type fakeCluster struct {
	members []ownership.Node
	all     map[ownership.Node]*Replicator
	applied map[ownership.Node]*atomic.Int64
	mu      sync.Mutex
	cut     map[ownership.Node]bool // reaches nobody, and nobody reaches it
	delay   func() time.Duration    // of a message; nil: none
	calls   atomic.Int64
	log     testkit.Buffer // of all members
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
	cut := f.cut[f.self] || f.cut[m]
	var wait time.Duration
	if f.delay != nil {
		wait = f.delay()
	}
	f.mu.Unlock()
	if cut {
		return nil, errCut
	}
	time.Sleep(wait)
	return f.all[m], nil
}

func (f from) Notify(ctx context.Context, to ownership.Node,
	req *peerv1.NotifyOverridesRequest) (*peerv1.NotifyOverridesResponse, error) {
	r, err := f.to(to)
	if err != nil {
		return nil, err
	}
	return r.Notify(ctx, req)
}

func (f from) Pull(ctx context.Context, to ownership.Node,
	req *peerv1.PullOverridesRequest) (*peerv1.PullOverridesResponse, error) {
	r, err := f.to(to)
	if err != nil {
		return nil, err
	}
	return r.Pull(ctx, req)
}

func newFakeCluster(t *testing.T, size int) *fakeCluster {
	c := &fakeCluster{all: make(map[ownership.Node]*Replicator), applied: make(map[ownership.Node]*atomic.Int64),
		cut: make(map[ownership.Node]bool)}
	for i := range size {
		c.members = append(c.members, ownership.Node{Name: fmt.Sprint("n", i), Boot: uint64(i + 1)})
	}
	for _, m := range c.members {
		c.applied[m] = new(atomic.Int64)
		c.start(m, mustOpen(t, ""))
	}
	return c
}

// start begins a member anew, with a book.
func (c *fakeCluster) start(m ownership.Node, b *Book) {
	c.all[m] = NewReplicator(ReplicatorConfig{
		Self: m, Book: b, Peers: from{c, m}, Apply: func() { c.applied[m].Add(1) }, Now: time.Now,
		Logger:  c.log.Logger(),
		Members: func() []ownership.Node { return c.members },
	})
}

// run has all members live until the returned function is called.
func (c *fakeCluster) run(t *testing.T) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	for _, r := range c.all {
		group.Go(func() { r.Run(ctx) })
	}
	return func() {
		cancel()
		group.Wait()
	}
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

// made makes a change on a member, and returns it with who has it.
func (c *fakeCluster) made(t *testing.T, i int, key, settings string) (Entry, []*weirv1.OverrideMember) {
	t.Helper()
	r := c.all[c.members[i]]
	step := r.commit(Step{Change: &Entry{ID: ID{Policy: "login", Key: key}, Settings: settings, At: epoch}})
	must.NoError(t, step.Err)
	return *step.Change, r.spread(t.Context(), step.Change)
}

// service is what operators call on a member.
func (c *fakeCluster) service(t *testing.T, i int) *Overrides {
	t.Helper()
	policies := must.Value(policy.Parse("p",
		[]byte("policies: [{name: login, algorithm: sliding_log, limit: 5, window: 1m}]")))(t)
	r := c.all[c.members[i]]
	return NewOverrides(OverridesConfig{
		Book: r.cfg.Book, Replicator: r, Policies: func() *policy.Set { return policies }, Record: func(auth.Event) {},
		Now:  time.Now,
		Auth: auth.New(auth.Config{}), Ready: func() (bool, string) { return true, "" },
	})
}

// set asks a member to set an override, as an operator on its host.
func (c *fakeCluster) set(t *testing.T, i int, req *weirv1.SetOverrideRequest) (*weirv1.OverrideChange, error) {
	return c.service(t, i).Set(operator(t), req)
}

// operator is the context of a call of an operator on the member's host.
func operator(t *testing.T) context.Context {
	ctx, denial := auth.New(auth.Config{}).Authorize(t.Context(), "grpc", auth.RoleOverrides,
		auth.Credentials{From: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}})
	expect.True(t, denial == nil, "%v", denial)
	return ctx
}

func settingsOf(key string, limit int) *weirv1.SetOverrideRequest {
	return &weirv1.SetOverrideRequest{Override: &weirv1.Override{Policy: "login", Key: key,
		Settings: fmt.Sprintf(`{"limit":%d}`, limit)}}
}

// TestReplicator: all members are notified of a change; what they could not be told, and what others changed meanwhile,
// comes once the members reach each other; and members that are equal leave each other alone.
func TestReplicator(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newFakeCluster(t, 3)
		for _, r := range c.all {
			expect.True(t, !r.Met(), "met before anybody was asked")
		}
		defer c.run(t)()
		time.Sleep(time.Second)
		for _, r := range c.all {
			expect.True(t, r.Met() && r.Unequal(false) == 0, "not met")
		}
		before := c.calls.Load()
		time.Sleep(20 * time.Second)
		expect.Equal(t, c.calls.Load()-before, 0, "calls of members that are equal")

		_, members := c.made(t, 0, "alice", `{"limit":1}`)
		for _, m := range members {
			expect.True(t, m.Has && !m.Durable && m.Error == "", "%+v", m)
		}
		expect.True(t, c.equal(), "the change is not with all")
		line := `msg="overrides of another member taken" member=n0 overrides=1 newest=1@n0 policy=login settings="{\"limit\":1}" caller=`
		expect.Equal(t, strings.Count(c.log.String(), line), 2, "lines of those that took it")

		last, first := c.members[2], c.all[c.members[0]]
		c.setCut(last, true)
		many := overridesOf("api", 5000)
		got := first.commit(Step{Merge: many})
		must.NoError(t, got.Err)
		c.made(t, 2, "alice", `{"limit":2}`)
		c.made(t, 2, "bob", `{"limit":2}`)
		_, members = c.made(t, 0, "carol", `{"limit":1}`)
		for _, m := range members {
			expect.True(t, m.Has == (m.Name != "n2") && (m.Error != "") == (m.Name == "n2"), "%+v", m)
		}
		time.Sleep(5 * time.Second)
		expect.True(t, c.book(0).Digest() == c.book(1).Digest() && !c.equal() && first.Unequal(false) == 1,
			"those that reach each other differ, or all are equal")
		c.setCut(last, false)
		time.Sleep(maxDelay + time.Second)
		expect.True(t, c.equal() && first.Unequal(false) == 0,
			"%d, %d and %d entries", len(contentOf(c.book(0))), len(contentOf(c.book(1))), len(contentOf(c.book(2))))
		if got, _ := c.book(1).Get(ID{Policy: "login", Key: "bob"}); got == nil {
			t.Error("what the one that was cut off changed is lost")
		}
	})
}

// TestTwoOperatorsAtOnce: of two changes of an override through two nodes at a time one counts. The answer to the other
// does not say that it is in force, and shows what is.
func TestTwoOperatorsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newFakeCluster(t, 3)
		rng := rand.New(rand.NewPCG(1, 2))
		c.delay = func() time.Duration { return time.Duration(rng.IntN(20)) * time.Millisecond }
		defer c.run(t)()
		time.Sleep(time.Second)
		lost := 0
		for round := range 80 {
			key := fmt.Sprint("k", round)
			var answers [2]*weirv1.OverrideChange
			var both sync.WaitGroup
			for i := range answers {
				c.mu.Lock()
				pause := c.delay()
				c.mu.Unlock()
				both.Go(func() {
					time.Sleep(pause)
					var err error
					answers[i], err = c.set(t, i, settingsOf(key, 100+i))
					expect.NoError(t, err)
				})
			}
			both.Wait()
			time.Sleep(2 * maxDelay)
			final, _ := c.book(2).Get(ID{Policy: "login", Key: key})
			must.True(t, c.equal() && final != nil, "the members differ")
			for i, a := range answers {
				has := 0
				for _, m := range a.Members {
					if m.Has {
						has++
					}
				}
				own, counts := fmt.Sprintf(`{"limit":%d}`, 100+i), final.Settings
				// Who changed it later, and knew of this change, does not make a lie of the answer to it.
				concurrent := answers[0].Override.Version == answers[1].Override.Version
				switch {
				case own == counts && (has != len(a.Members) || a.Override.Settings != own):
					t.Errorf("round %d: the change that counts is answered %+v", round, a)
				case own != counts && concurrent:
					if lost++; a.Members[i].Has || !strings.Contains(a.Members[i].Error, final.Version.String()) ||
						a.Override.Settings != counts || has != 0 {
						t.Errorf("round %d: the change that lost is answered %+v", round, a)
					}
				case own != counts && !strings.HasSuffix(a.Override.Version, fmt.Sprint("@n", i)):
					t.Errorf("round %d: %+v and %+v", round, answers[0], answers[1])
				}
			}
		}
		expect.True(t, lost >= 10, "%d changes of 80 were made at once", lost)
	})
}

// TestChangeBeforeBooksAreCompared: a node that has just started changes nothing before it knows what the others have,
// and then it changes that.
func TestChangeBeforeBooksAreCompared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newFakeCluster(t, 3)
		for range 8 {
			c.made(t, 1, "k", `{"limit":1}`)
		}
		c.start(c.members[0], mustOpen(t, ""))
		_, err := c.set(t, 0, settingsOf("k", 7))
		expect.True(t, kindOf(err) == limit.Unavailable && len(contentOf(c.book(0))) == 0,
			"a change by a node that has met nobody: %v, %+v", err, contentOf(c.book(0)))
		// A comparison that failed is none.
		c.setCut(c.members[2], true)
		stop := c.run(t)
		time.Sleep(5 * time.Second)
		if r := c.all[c.members[0]]; r.Met() || r.Unequal(true) != 1 {
			t.Errorf("met all, but %d, of whom one cannot be reached", r.Unequal(true))
		}
		_, err = c.set(t, 0, settingsOf("k", 7))
		expect.True(t, kindOf(err) == limit.Unavailable, "a change by a node that has not met one: %v", err)
		stop()
		c.setCut(c.members[2], false)
		c.start(c.members[0], mustOpen(t, ""))
		defer c.run(t)()
		got, err := c.set(t, 0, settingsOf("k", 7))
		must.True(t, err == nil && got.Override.Version == "9@n0" && got.Before != nil, "%+v %v", got, err)
		for _, m := range got.Members {
			expect.True(t, m.Has, "%+v", m)
		}
		away := c.service(t, 0)
		away.cfg.Ready = func() (bool, string) { return false, "no member yet" }
		_, err = away.Set(operator(t), settingsOf("k", 8))
		expect.True(t, kindOf(err) == limit.Unavailable && strings.Contains(err.Error(), "no member yet"),
			"a change by a node that is no member: %v", err)
	})
}

func kindOf(err error) limit.Kind {
	if e, ok := errors.AsType[*limit.Error](err); ok {
		return e.Kind
	}
	return 0
}

// TestInForceWhenAnswered: a member answers that it has a change once that is in force, also when another one has
// notified it of the same.
func TestInForceWhenAnswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newFakeCluster(t, 2)
		release := make(chan struct{})
		second := c.all[c.members[1]]
		second.cfg.Apply = func() { <-release }
		c.all[c.members[0]].commit(Step{Merge: overridesOf("login", 3)})
		var answered atomic.Int64
		var group sync.WaitGroup
		for range 3 {
			group.Go(func() {
				_, _, err := c.all[c.members[0]].notify(t.Context(), c.members[1])
				expect.NoError(t, err)
				answered.Add(1)
			})
		}
		synctest.Wait()
		expect.Equal(t, answered.Load(), 0, "answers before the change is in force")
		got, _ := second.Pull(t.Context(), &peerv1.PullOverridesRequest{})
		expect.True(t, !strings.Contains(string(got.Book), "login"), "a book is shown that is not in force")
		close(release)
		group.Wait()
	})
}

// TestChangesAreCoalesced: however fast operators change an override, the file is written and policies are compiled ten
// times a second at most, on all members, and each change is answered.
func TestChangesAreCoalesced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newFakeCluster(t, 2)
		defer c.run(t)()
		time.Sleep(time.Second)
		const second = 10
		until := time.Now().Add(second * time.Second)
		var group sync.WaitGroup
		var changes atomic.Int64
		for i := range 8 {
			group.Go(func() {
				for time.Now().Before(until) {
					_, err := c.set(t, i%2, settingsOf("k", 1+i))
					expect.NoError(t, err)
					changes.Add(1)
				}
			})
		}
		group.Wait()
		for m, applied := range c.applied {
			n := applied.Load()
			expect.True(t, n <= second*int64(time.Second/commitPace)+5 && n >= second,
				"%s: %d changes were put into force in %d steps within %d s", m.Name, changes.Load(), n, second)
		}
		expect.True(t, changes.Load() >= 100, "%d changes", changes.Load())
	})
}

// TestSpreadToFull: a member that has no room for an override is not said to have it.
func TestSpreadToFull(t *testing.T) {
	c := newFakeCluster(t, 2)
	_, err := merge(c.book(1), overridesOf("api", 2*MaxOverrides))
	must.NoError(t, err)
	c.start(c.members[1], c.book(1))
	_, all := c.made(t, 0, "alice", `{"limit":1}`)
	expect.True(t, all[0].Has && !all[1].Has && !all[1].Durable && strings.Contains(all[1].Error, "full"), "%+v", all)
}

// TestStrangerNotifies: who has a node's certificate and is no member is not asked for a book, and changes nothing.
func TestStrangerNotifies(t *testing.T) {
	c := newFakeCluster(t, 2)
	r := c.all[c.members[0]]
	for _, req := range []*peerv1.NotifyOverridesRequest{nil, {}, {Name: "n1", Boot: 77}, {Name: "n0", Boot: 1},
		{Name: "stranger", Boot: 2}} {
		if _, err := r.Notify(t.Context(), req); status.Code(err) != codes.FailedPrecondition || c.calls.Load() != 0 {
			t.Errorf("%v: %v, after %d calls", req, err, c.calls.Load())
		}
	}
}

// hostile answers with what it likes.
type hostile struct{ answer *peerv1.PullOverridesResponse }

func (h hostile) Notify(context.Context, ownership.Node,
	*peerv1.NotifyOverridesRequest) (*peerv1.NotifyOverridesResponse, error) {
	return &peerv1.NotifyOverridesResponse{Digest: h.answer.Digest}, nil
}

func (h hostile) Pull(context.Context, ownership.Node,
	*peerv1.PullOverridesRequest) (*peerv1.PullOverridesResponse, error) {
	return h.answer, nil
}

// TestHostileBooks: whatever another member answers, nothing of it is taken that is not the book of a member, and books
// that differ are not equal.
func TestHostileBooks(t *testing.T) {
	digest := make([]byte, len(Digest{}))
	digest[0] = 1
	const entry = `{"policy":"p","key":"k","settings":{"limit":1},"counter":1,"node":"n","at":"2026-01-01T00:00:00Z"}`
	for name, answer := range map[string]*peerv1.PullOverridesResponse{
		"nothing":        {},
		"a short digest": {Digest: digest[:5]},
		"no book":        {Digest: digest},
		"a bad entry": {Digest: digest,
			Book: []byte(`{"format":1,"overrides":[` + strings.Replace(entry, `"n"`, `""`, 1) + `]}`)},
		"another digest": {Digest: digest, Book: []byte(`{"format":1,"overrides":[` + entry + `]}`)},
	} {
		c := newFakeCluster(t, 2)
		r := c.all[c.members[0]]
		r.cfg.Peers = hostile{answer}
		r.compare(t.Context(), c.members[1])
		want := 0
		if name == "another digest" {
			want = 1
		}
		if n := len(contentOf(r.cfg.Book)); n != want || r.Unequal(false) != 1 || r.Met() != (want == 1) {
			t.Errorf("%s: %d entries, met %t, %d unequal", name, n, r.Met(), r.Unequal(false))
		}
	}
}

// TestBookOfManyParts: a book of tiny entries is rejected before it takes much more memory than it is long.
func TestBookOfManyParts(t *testing.T) {
	for what, entry := range map[string]string{"empty": "{}", "null": "null"} {
		text := []byte(`{"format":1,"overrides":[` + strings.Repeat(entry+",", (7<<20)/(len(entry)+1)) + entry + `]}`)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := parse("book", text)
		runtime.ReadMemStats(&after)
		expect.ErrorContains(t, err, "more than 40000 overrides")
		took := after.TotalAlloc - before.TotalAlloc
		expect.True(t, took < 64<<20, "%s: %d MiB for a book of 7", what, took>>20)
	}
}

// TestDeletionIsInForce: a deletion is said to be in force where there is no override, also where deletions were
// forgotten.
func TestDeletionIsInForce(t *testing.T) {
	deletion := Entry{ID: ID{Policy: "p", Key: "k"}, Version: Version{5, "n"}, At: epoch}
	later := deletion
	later.Counter, later.Settings = 6, `{"limit":1}`
	earlier := later
	earlier.Counter = 4
	for _, tt := range []struct {
		there *Entry
		has   bool
		text  string
	}{{nil, true, ""}, {&deletion, true, ""}, {&later, false, "6@n"}, {&earlier, false, ""}} {
		var out weirv1.OverrideMember
		stand(&out, &deletion, tt.there)
		expect.True(t, out.Has == tt.has && strings.Contains(out.Error, tt.text) &&
			(out.Error == "") == (tt.text == ""), "beside %+v: %+v", tt.there, &out)
	}
}
