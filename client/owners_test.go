package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

var testKey, _ = ring.ParseHashKey([]byte("key of the tests"))

// tell has nodes say that some of them are the ring's members, under the names "node 0" and so on.
func tell(all []*node, addrs []string, members ...int) *ring.Table {
	t := &weirv1.TopologyResponse{HashKey: testKey.Bytes(), RingSettings: ring.SettingsFingerprint(testKey)}
	var names []string
	for _, i := range members {
		name := fmt.Sprintf("node %d", i)
		names = append(names, name)
		t.Members = append(t.Members, &weirv1.TopologyMember{Name: name, Grpc: addrs[i]})
	}
	table := ring.Build(names)
	t.Ring = table.Fingerprint()
	for _, n := range all {
		n.ring.set(t)
	}
	return table
}

// ringOf returns nodes that form a ring, and a Client of the first that knows it.
func ringOf(t *testing.T, n int, opts ...Option) (all []*node, addrs []string, table *ring.Table, c *Client) {
	all, addrs = several(t, n)
	var members []int
	for i := range n {
		members = append(members, i)
	}
	table = tell(all, addrs, members...)
	c = dial(t, addrs[0], append([]Option{WithTimeout(time.Minute)}, opts...)...)
	reaches(t, c, addrs...)
	return all, addrs, table, c
}

// reaches waits until c knows the owners at these addresses, and no others.
func reaches(t *testing.T, c *Client, addrs ...string) {
	t.Helper()
	testkit.Eventually(t, "the owners to be known and connected", func() bool {
		o := c.nodes.owners.Load()
		if o == nil {
			return len(addrs) == 0
		}
		var known []string
		for _, m := range o.members {
			if m.ifReady() != nil {
				known = append(known, m.addr)
			}
		}
		slices.Sort(known)
		return slices.Equal(known, slices.Sorted(slices.Values(addrs)))
	})
}

// owner is the number of the node that owns a key.
func owner(table *ring.Table, scope, key string) int {
	name := table.Members()[table.Owner(ring.Partition(ring.Hash(testKey, scope, key)))]
	return int(name[len(name)-1] - '0')
}

// Questions go to the owners of their keys, although only one node was named; those of one call, side by side.
func TestOwnersAreAsked(t *testing.T) {
	all, _, table, c := ringOf(t, 3)
	inline := algo.Limit{Algorithm: algo.TokenBucket, Limit: 5, Window: time.Hour}
	var want, before [3]int64
	for i, n := range all {
		before[i] = n.asked.Load()
	}
	var checks []Check
	for i := range 90 {
		key := fmt.Sprint("key ", i)
		_, err := c.Policy("five").Allow(t.Context(), key)
		expect.NoError(t, err)
		want[owner(table, "five", key)]++
		_, err = c.Inline("n", inline).Allow(t.Context(), key)
		expect.NoError(t, err)
		want[owner(table, limit.InlineScope("n", &inline), key)]++
		checks = append(checks, Check{Policy: "five", Key: key}, Check{Limit: &inline, Namespace: "n", Key: key})
	}
	results := must.Value(c.Check(t.Context(), checks))(t)
	for i, r := range results {
		expect.True(t, r.Err == nil && r.Remaining == 3, "%d: %+v", i, r)
	}
	for i, n := range all {
		got := n.asked.Load() - before[i]
		expect.True(t, got == 2*want[i] && want[i] != 0, "node %d was asked %d times, want %d", i, got, 2*want[i])
	}
}

// The ring may change.
func TestOwnersChange(t *testing.T) {
	all, addrs, _, c := ringOf(t, 3)
	table := tell(all, addrs, 0, 2)
	reaches(t, c, addrs[0], addrs[2])
	before := all[1].asked.Load()
	for i := range 30 {
		expect.True(t, !failedOpen(t, c), "a question went unanswered")
		key := fmt.Sprint("key ", i)
		n := all[owner(table, "five", key)].asked.Load()
		_, err := c.Policy("five").Allow(t.Context(), key)
		expect.True(t, err == nil && all[owner(table, "five", key)].asked.Load() == n+1,
			"%s did not go to its owner: %v", key, err)
	}
	expect.Equal(t, all[1].asked.Load()-before, 0, "how often the node that left was asked")
	// Without a ring any node is asked.
	for _, n := range all {
		n.ring.set(&weirv1.TopologyResponse{})
	}
	reaches(t, c)
	expect.True(t, !failedOpen(t, c), "a question went unanswered")
}

// What this build would work out in another way is not used.
func TestOwnersOfAnotherRing(t *testing.T) {
	for name, change := range map[string]func(*weirv1.TopologyResponse){
		"settings":    func(t *weirv1.TopologyResponse) { t.RingSettings++ },
		"table":       func(t *weirv1.TopologyResponse) { t.Ring++ },
		"one node":    func(t *weirv1.TopologyResponse) { t.Members = t.Members[:1] },
		"nobody":      func(t *weirv1.TopologyResponse) { t.Members = nil },
		"named twice": func(t *weirv1.TopologyResponse) { t.Members[1].Name = t.Members[0].Name },
	} {
		t.Run(name, func(t *testing.T) {
			top := &weirv1.TopologyResponse{
				HashKey: testKey.Bytes(), RingSettings: ring.SettingsFingerprint(testKey),
				Ring:    ring.Build([]string{"a", "b"}).Fingerprint(),
				Members: []*weirv1.TopologyMember{{Name: "a", Grpc: "h:1"}, {Name: "b"}},
			}
			got := newTopology(top, nil)
			must.True(t, got != nil && slices.Equal(got.addresses, []string{"h:1", ""}), "unchanged: %+v", got)
			change(top)
			expect.Equal(t, newTopology(top, nil), nil)
		})
	}
}

// An owner that cannot be reached, or does not answer, costs a detour.
func TestOwnerIsLost(t *testing.T) {
	all, addrs, table, c := ringOf(t, 3, WithRetry(), WithBreaker(0, time.Hour), WithTimeout(2*time.Second))
	key := "key 0"
	for i := 0; owner(table, "five", key) != 2; i++ {
		key = fmt.Sprint("key ", i)
	}
	resume := all[2].hang()
	for range 5 {
		d, err := c.Policy("five").Allow(t.Context(), key)
		expect.True(t, err == nil && !d.FailedOpen, "%+v, %v", d, err)
	}
	expect.Equal(t, all[2].probed.Load(), 0, "probes before the cooldown had passed")
	resume()
	memberAt(members(c), addrs[2]).probe() // as after the cooldown
	before := all[2].asked.Load()
	testkit.Eventually(t, "the owner to be asked again", func() bool {
		_, err := c.Policy("five").Peek(t.Context(), key)
		expect.NoError(t, err)
		return all[2].asked.Load() > before
	})
}

// A node that will not tell of the ring is asked all the same.
func TestRingIsSecret(t *testing.T) {
	n := newNode(nil)
	n.secret = true
	addr, _ := serve(t, n)
	c := dial(t, strings.Join([]string{addr}, ","), WithTimeout(time.Minute))
	for range 3 {
		expect.True(t, !failedOpen(t, c), "a question went unanswered")
	}
}

// TestOneStreamToANode: a client has one stream to each node that it has asked for a key, and to the node that tells it
// the ring, and not even a connection to the others.
func TestOneStreamToANode(t *testing.T) {
	all, addrs := several(t, 3)
	table := tell(all, addrs, 0, 1, 2)
	c := dial(t, addrs[0], WithTimeout(time.Minute))
	ns := c.nodes
	testkit.Eventually(t, "the ring to be known", func() bool { return ns.owners.Load() != nil })
	key := "key 0"
	for i := 0; owner(table, "five", key) != 1; i++ {
		key = fmt.Sprint("key ", i)
	}
	testkit.Eventually(t, "the owner to be asked", func() bool {
		_, err := c.Policy("five").Peek(t.Context(), key)
		expect.NoError(t, err)
		return all[1].asked.Load() > 0
	})
	for range 100 {
		var asking sync.WaitGroup
		for range 10 {
			asking.Go(func() { _, _ = c.Policy("five").Peek(t.Context(), key) })
		}
		asking.Wait()
	}
	var streams []int
	for _, n := range all {
		n.streams.mu.Lock()
		streams = append(streams, len(n.streams.all))
		n.streams.mu.Unlock()
	}
	expect.True(t, slices.Equal(streams, []int{1, 1, 0}), "%d streams are open", streams)
	for _, m := range members(c) {
		state := m.conn.GetState()
		expect.True(t, m.addr != addrs[2] || state == connectivity.Idle, "the node that was not asked is %v", state)
	}
	got := c.Stats()
	expect.True(t, got.Nodes == 3 && got.Ready == 2, "%+v", got)
}

// members returns c's nodes.
func members(c *Client) []*member {
	list, _, _ := c.nodes.members()
	return list
}

// three returns three nodes and a client of them that has asked each.
func three(t *testing.T, opts ...Option) ([]*node, *Client) {
	all, addrs := several(t, 3)
	c := dial(t, strings.Join(addrs, ","), opts...)
	askAll(t, c, all...)
	return all, c
}

// failedOpen asks a question that cannot be asked twice, and reports whether nobody answered it.
func failedOpen(t *testing.T, c *Client) bool {
	t.Helper()
	d, err := c.Policy("five").Allow(t.Context(), "a")
	expect.NoError(t, err)
	return d.FailedOpen
}

// A node that hangs costs one question of a caller that asks one after the other. After the cooldown it gets a probe,
// which nobody waits for, and questions again when it answers that.
func TestHungNode(t *testing.T) {
	all, c := three(t, WithTimeout(500*time.Millisecond), WithBreaker(5, time.Hour))
	last, m := all[2], members(c)[2]
	asked := func(n int) (times int64, failed int) {
		before := last.asked.Load()
		for range n {
			if failedOpen(t, c) {
				failed++
			}
		}
		return last.asked.Load() - before, failed
	}

	resume := last.hang()
	n, failed := asked(60)
	expect.True(t, n == 1 && failed == 1,
		"the node that hangs was asked %d times, %d questions went unanswered; want 1 and 1", n, failed)
	expect.Equal(t, last.probed.Load(), 0, "probes before the cooldown had passed")
	m.probe() // as after the cooldown
	testkit.Eventually(t, "the probe to come", func() bool { return last.probed.Load() == 1 })
	n, failed = asked(30)
	expect.True(t, n == 0 && failed == 0, "asked %d times without an answer to the probe, %d questions went unanswered",
		n, failed)
	resume()
	testkit.Eventually(t, "the node to be asked again", func() bool {
		n, failed := asked(1)
		expect.Equal(t, failed, 0, "questions without an answer")
		return n > 0
	})
}

// Those who ask at the same time lose no more to a node that hangs than were with it at the first timeout.
func TestHungNodeManyCallers(t *testing.T) {
	all, c := three(t, WithTimeout(500*time.Millisecond), WithBreaker(0, time.Hour))
	last := all[2]
	last.hang()
	before := last.asked.Load()
	const callers = 12
	done := make(chan int)
	for range callers {
		go func() {
			failed := 0
			for range 100 {
				if failedOpen(t, c) {
					failed++
				}
			}
			done <- failed
		}()
	}
	failed := 0
	for range callers {
		failed += <-done
	}
	// A caller that waits for the node asks nothing else, so it is in there at most once. More than these may go
	// unanswered where the machine is so busy that the other nodes take longer than the timeout, or that a question is
	// not read before it ends.
	n := int(last.asked.Load() - before)
	expect.True(t, n >= 1 && n <= callers && failed >= n,
		"the node that hangs was asked %d times, %d questions went unanswered; want 1 to %d, and as many or more", n,
		failed, callers)
}

// When all nodes hang they are asked in turn until the breaker opens, and the fail policy answers.
func TestAllHung(t *testing.T) {
	all, c := three(t, WithTimeout(100*time.Millisecond), WithBreaker(6, time.Hour))
	var before int64
	for _, n := range all {
		n.hang()
		before += n.asked.Load()
	}
	for range 20 {
		expect.True(t, failedOpen(t, c), "a question was answered")
	}
	for _, n := range all {
		before -= n.asked.Load()
	}
	expect.Equal(t, before, -6, "%d questions were asked, want 6", -before)
}

// A node that says that it cannot is not one that hangs, and neither is one whose caller had no time.
func TestNotHung(t *testing.T) {
	addr, _ := serve(t, newNode(func(ctx context.Context, req *weirv1.CheckRequest) error {
		if req.Checks[0].Target.Key == "slow" {
			<-ctx.Done()
		}
		return status.Error(codes.Unavailable, "the owner cannot be reached")
	}))
	c := dial(t, addr, WithTimeout(time.Minute))
	expect.True(t, failedOpen(t, c), "a question was answered")
	ctx := testkit.Within(t, 500*time.Millisecond)
	d, err := c.Policy("five").Allow(ctx, "slow")
	expect.True(t, err == nil && d.FailedOpen, "%+v, %v", d, err)
	expect.True(t, members(c)[0].state.Load() == ready, "the node is taken for one that hangs")
}

// A name may be given in any of gRPC's ways.
func TestNames(t *testing.T) {
	n := newNode(nil)
	addr, _ := serve(t, n)
	_, port, _ := net.SplitHostPort(addr)
	socket := filepath.Join(t.TempDir(), "s")
	l := must.Value(net.Listen("unix", socket))(t)
	n.serve(t, l)
	for _, address := range []string{
		addr, "localhost:" + port, "dns:///localhost:" + port, "passthrough:///" + addr, "unix:" + socket,
		"unix://" + socket,
	} {
		t.Run(address, func(t *testing.T) {
			c := dial(t, address, WithTimeout(time.Minute))
			err := c.Ready(t.Context())
			expect.True(t, err == nil && !failedOpen(t, c), "Ready: %v", err)
		})
	}
}

// When a name stands for other nodes than before, the new ones are asked, and what is in flight at the old ones is
// answered.
func TestNamesChange(t *testing.T) {
	arrived, release := make(chan struct{}), make(chan struct{})
	a := newNode(func(context.Context, *weirv1.CheckRequest) error {
		close(arrived)
		<-release
		return nil
	})
	b := newNode(nil)
	addrA, _ := serve(t, a)
	addrB, _ := serve(t, b)
	c := dial(t, addrA, WithTimeout(time.Minute))
	done := make(chan bool)
	go func() { done <- failedOpen(t, c) }()
	<-arrived

	ns := c.nodes
	ns.setGiven(nil, errors.New("no such host"))
	expect.Equal(t, len(members(c)), 1, "nodes after a name was lost, want the one before")
	ns.setGiven([]string{addrB, addrB}, nil)
	for range 10 {
		expect.True(t, !failedOpen(t, c), "a question went unanswered")
	}
	expect.Equal(t, b.asked.Load(), 10, "questions to the new node")
	close(release)
	expect.True(t, !<-done, "the question in flight went unanswered")
}
