package client

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

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

// A node that hangs costs one question of a caller that asks one after the other. After the cooldown it gets a probe, which nobody waits for,
// and questions again when it answers that.
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
	expect.True(t, n == 1 && failed == 1, "the node that hangs was asked %d times, %d questions went unanswered; want 1 and 1", n, failed)
	expect.Equal(t, last.probed.Load(), 0, "probes before the cooldown had passed")
	m.probe() // as after the cooldown
	testkit.Eventually(t, "the probe to come", func() bool { return last.probed.Load() == 1 })
	n, failed = asked(30)
	expect.True(t, n == 0 && failed == 0, "asked %d times without an answer to the probe, %d questions went unanswered", n, failed)
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
	// A caller that waits for the node asks nothing else, so it is in there at most once. More than these may go unanswered where
	// the machine is so busy that the other nodes take longer than the timeout, or that a question is not read before it ends.
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
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
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
		addr, "localhost:" + port, "dns:///localhost:" + port, "passthrough:///" + addr, "unix:" + socket, "unix://" + socket,
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
	ns.find(nil, errors.New("no such host"))
	expect.Equal(t, len(members(c)), 1, "nodes after a name was lost, want the one before")
	ns.find([]string{addrB, addrB}, nil)
	for range 10 {
		expect.True(t, !failedOpen(t, c), "a question went unanswered")
	}
	n := b.asked.Load()
	expect.True(t, n == 10, "the new node was asked %d questions of 10", n)
	close(release)
	expect.True(t, !<-done, "the question in flight went unanswered")
}
