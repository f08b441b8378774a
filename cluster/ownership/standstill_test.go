package ownership

import (
	"slices"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
)

// standsStill lets time pass in which the node does not run: then there is one tick, before anything that has arrived
// is received.
func (l *alone) standsStill(d time.Duration) {
	l.now += int64(d)
	l.core.Tick(l.time())
	l.take()
}

// TestStandstill: a node that has not run does not judge others by what it has not received.
func TestStandstill(t *testing.T) {
	t.Run("backup", func(t *testing.T) {
		for _, viewFirst := range []bool{false, true} {
			l := claimed(t, self, peerX, peerX)
			l.acks(peerX)
			l.admits(1, 100*time.Millisecond)
			if viewFirst {
				l.now += int64(20 * time.Second)
				l.see(self, peerX, peerX)
			}
			l.standsStill(20 * time.Second)
			expect.True(t, len(said[*Forget](l, peerX)) == 0 &&
				!slices.ContainsFunc(l.confirmed, func(p Progress) bool { return p.Version == versionsDone }),
				"view first %v: a backup whose answer may have come meanwhile is dropped", viewFirst)
			l.confirmed = nil
			l.acks(peerX)
			expect.True(t, len(l.confirmed) != 0 && !l.confirmed[0].Unguarded,
				"view first %v: after its answer: %+v", viewFirst, l.confirmed)
		}
	})
	t.Run("slow ticks", func(t *testing.T) {
		l := claimed(t, self, peerX, peerX)
		l.acks(peerX)
		l.admits(1, 100*time.Millisecond)
		dropped := func() bool { return !l.core.parts[0].followers[Backup].caught }
		for range int(stall/awakeMost) - 3 {
			l.standsStill(time.Second)
		}
		expect.True(t, !dropped(), "a backup is dropped before this node has run for long enough")
		for range 3 {
			l.standsStill(time.Second)
		}
		expect.True(t, dropped(), "a node that runs now and then waits for a backup without end")
	})
	t.Run("claim", func(t *testing.T) {
		l := asks(t, peerX, peerY)
		l.standsStill(20 * time.Second)
		l.owned(false)
		l.answer(func(n Node) Info { return Info{Held: n == peerX, Term: term(1), Holder: peerX} })
		l.owned(false)
		r := l.route()
		expect.True(t, r.Standing == Elsewhere && r.Node == peerX, "the route is %+v", r)
	})
	t.Run("offer", func(t *testing.T) {
		l := seeing(t, self, peerX, peerX, peerY)
		l.get(peerX, &Offer{Term: term(1)})
		l.standsStill(20 * time.Second)
		l.get(peerY, &Offer{Term: term(2)})
		if r := last[*OfferReply](l, peerY); r.Verdict != Refused {
			t.Errorf("an offer is answered %v, while what another sends may have come meanwhile", r.Verdict)
		}
	})
	t.Run("stranger", func(t *testing.T) {
		l := newAlone(t)
		l.hold(peerX, term(1))
		l.see(self, Node{}, peerY)
		l.standsStill(20 * time.Second)
		l.wait(150 * time.Millisecond)
		expect.True(t, len(said[*Query](l, peerY)) == 0,
			"asked for what a process holds whose coming this node may have missed")
	})
	t.Run("departed", func(t *testing.T) {
		l := seeing(t, peerX, Node{}, peerX, peerY)
		l.see(peerY, Node{}, peerY)
		l.now += int64(20 * time.Second)
		l.see(peerY, Node{}, peerY)
		l.hold(peerX, term(1))
		l.see(self, Node{}, peerY)
		l.wait(150 * time.Millisecond)
		expect.True(t, len(said[*Query](l, peerY)) != 0, "a lost process is taken for one that is about to come")
	})
	t.Run("epoch", func(t *testing.T) {
		l := newAlone(t, voter2.Name, self.Name, voter3.Name)
		l.see(peerX, Node{}, peerX, voter2, voter3)
		l.standsStill(20 * time.Second)
		q := last[*ReadRecords](l, voter3)
		l.get(voter3, &Records{ID: q.ID})
		l.get(voter2, &Records{ID: q.ID, Read: true, Fresh: true, Epoch: 1})
		got := l.epoch(peerX, 1)
		expect.True(t, got == 1, "epoch %d is begun, though another voter had begun epoch 1 and was asked", got)

		l = newAlone(t, voter2.Name, self.Name, voter3.Name)
		l.see(peerX, Node{}, peerX, voter2, voter3)
		for range 30 {
			l.standsStill(time.Second)
			for _, q := range said[*ReadRecords](l, voter3) {
				l.get(voter3, &Records{ID: q.ID})
			}
		}
		expect.True(t, l.epoch(peerX, 1) != 0, "no epoch is begun while the voter before is silent")
	})
	t.Run("lease", func(t *testing.T) {
		l := granted(t)
		l.admits(1, 100*time.Millisecond)
		l.standsStill(20 * time.Second)
		l.acks(peerX)
		expect.True(t, len(l.confirmed) != 0 && l.confirmed[0].Unguarded,
			"what is confirmed when the lease is over counts for strict answers: %+v", l.confirmed)
	})
	t.Run("leaving", func(t *testing.T) {
		l := seeing(t, peerX, self, peerX, peerY)
		l.give(peerX, wholeCopy(term(1), 10, ids(1)))
		l.view(View{Leaving: true, Settled: true}, peerX, peerY, peerX, peerY)
		l.standsStill(20 * time.Second)
		stranded := func() bool { return l.core.Status(l.time()).Stranded > 0 }
		expect.True(t, stranded(), "a leaving node trusts its view, though it did not run")
		l.wait(time.Duration(lossSeen))
		expect.True(t, !stranded(), "a copy whose holder lives is stranded")
		l.view(View{Leaving: true, Settled: true}, peerY, peerY, peerY)
		expect.True(t, stranded(), "a copy whose holder is lost is not stranded")
		l.hold(peerY, term(2))
		expect.True(t, !stranded(), "a copy is stranded that another has claimed meanwhile")
	})
	t.Run("unresolved", func(t *testing.T) {
		l := withVoters(t)
		l.claims(self, peerX, peerX, voter1, voter2, voter3)
		l.see(peerX, peerX, peerX, voter1, voter2, voter3)
		l.standsStill(20 * time.Second)
		expect.True(t, len(said[*Offer](l, peerX)) == 0,
			"a partition is given away before it is known whether it is whole, though the voters may have answered")

		l = withVoters(t)
		l.claims(self, peerX, peerX, voter1, voter2, voter3)
		l.see(peerX, peerX, peerX, voter1, voter2, voter3)
		for end := l.now + 2*leaseFor + leaseFor/3; l.now < end; {
			l.standsStill(150 * time.Millisecond)
		}
		expect.True(t, len(said[*Offer](l, peerX)) != 0,
			"a node with slow ticks keeps for longer than two leases what no voter answers about, and another may hold it")
	})
}

// TestStrangerReports: a process that is not in view yet is waited for anew when it reports again what it holds.
func TestStrangerReports(t *testing.T) {
	l := newAlone(t)
	l.hold(peerX, term(1))
	l.wait(time.Duration(strangerFor) - 100*time.Millisecond)
	l.hold(peerX, term(1))
	l.see(self, Node{}, peerY)
	l.wait(time.Duration(strangerFor) - 300*time.Millisecond)
	expect.True(t, len(said[*Query](l, peerY)) == 0, "asked for what a process holds that has just reported it")
	l.wait(time.Second)
	last[*Query](l, peerY)
}
