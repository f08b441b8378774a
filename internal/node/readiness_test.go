package node

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/testkit"
)

// node is one whose conditions a test sets.
type node struct {
	joined, first, second atomic.Bool
	held                  atomic.Int64
	became                atomic.Int32
	log                   testkit.Buffer
	*readiness
}

func newNode() *node {
	n := &node{}
	n.readiness = newReadiness(readinessConfig{
		Joined: func() (bool, string) {
			if n.joined.Load() {
				return true, ""
			}
			return false, "not a member"
		},
		Conditions: []condition{
			{"the first", func(context.Context) bool { return n.first.Load() }},
			{"the second", func(context.Context) bool { return n.second.Load() }},
		},
		Held: func() int { return int(n.held.Load()) }, Now: time.Now, Became: func() { n.became.Add(1) }, Logger: n.log.Logger(),
	})
	return n
}

func (n *node) want(t *testing.T, ready bool, why string) {
	t.Helper()
	time.Sleep(time.Second) // of the bubble
	synctest.Wait()
	if got, said := n.Ready(); got != ready || said != why || n.Settled() != ready {
		t.Errorf("ready %t, %q, settled %t, want %t, %q", got, said, n.Settled(), ready, why)
	}
}

// TestReadinessSettle: a node says what it waits for, one thing after the other, becomes ready once, and is not when it stops.
func TestReadinessSettle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode()
		go n.Settle(t.Context())
		n.want(t, false, "not a member")
		n.joined.Store(true)
		n.want(t, false, "the first")
		n.first.Store(true)
		n.want(t, false, "the second")
		n.second.Store(true)
		n.want(t, true, "")
		<-n.Became()
		n.first.Store(false) // what held is not looked at again
		n.want(t, true, "")
		n.Stop()
		n.want(t, false, "stopping")
		expect.True(t, n.became.Load() == 1, "became ready %d times", n.became.Load())
	})
}

// TestStopBefore: a node that stops before it was ready never is, though all conditions hold.
func TestStopBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode()
		go n.Settle(t.Context())
		n.want(t, false, "not a member")
		n.Stop()
		for _, c := range []*atomic.Bool{&n.joined, &n.first, &n.second} {
			c.Store(true)
		}
		n.want(t, false, "stopping")
		select {
		case <-n.Became():
			t.Error("became ready")
		default:
		}
		expect.Equal(t, n.became.Load(), 0, "was said to be ready")
	})
}

// TestPatience: a member does not wait for ever for what does not come, but does as long as partitions come.
func TestPatience(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode()
		go n.Settle(t.Context())
		time.Sleep(time.Minute)
		n.joined.Store(true)
		for range 5 {
			time.Sleep(patience - 2*time.Second)
			n.held.Add(1)
			n.want(t, false, "the first")
		}
		time.Sleep(patience - 2*time.Second)
		n.held.Add(-2) // some have gone to another that came, which is no progress, nor is it when some come back
		n.want(t, false, "the first")
		n.held.Add(2)
		n.want(t, true, "")
	})
}
