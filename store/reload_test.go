package store

import (
	"fmt"
	"testing"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
)

// backUp makes a party the backup of another.
func (s *split) backUp(from, to int) *link {
	s.t.Helper()
	l := newLink(s.parties[from].store, s.parties[to].store, ownership.Backup)
	l.offset = 0
	l.attach(false)
	staged := true
	for staged {
		l.drain(s.now)
		l.deliver(s.t, s.now, &staged)
	}
	return l
}

// TestReloadTellsDeltas: what was charged under a claim while a key was under a durability of None is told to a follower once it is not, as what was
// charged under that claim: when the follower claims the partition for want of its holder, a merge with a side from before counts it.
func TestReloadTellsDeltas(t *testing.T) {
	for _, l := range []algo.Limit{
		log(100, minute), {Algorithm: algo.SlidingCounter, Limit: 100, Window: minute},
		{Algorithm: algo.FixedWindow, Limit: 100, Window: minute}, {Algorithm: algo.TokenBucket, Limit: 100, Window: 1000 * minute},
	} {
		for _, c := range []struct {
			into int
			past bool // some of it both sides have
		}{{0, false}, {0, true}, {2, false}, {2, true}} {
			t.Run(fmt.Sprintf("%v %+v", l.Algorithm, c), func(t *testing.T) {
				none, kept := rule("p", l), rule("p", l)
				none.Durability = None
				s := newSplit(t, 3, kept)
				s.claim(0)
				if c.past {
					s.admit(0, none, "0")
				}
				s.replicate(0, 1)
				s.claim(1)
				for range 20 {
					s.admit(1, none, "0")
				}
				follower := s.backUp(1, 2)
				s.parties[1].store.Reconcile(func() algo.Instant { return at(s.now) }, func(string, []byte) *Rule { return kept })
				follower.sync(t, s.now, false)
				s.parties[2].knows = s.parties[1].knows
				s.claim(2)
				s.merge(2-c.into, c.into)
				s.check(c.into, true)
				for _, p := range s.parties {
					accounted(t, p.store)
				}
			})
		}
	}
}
