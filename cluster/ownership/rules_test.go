package ownership

import (
	"slices"
	"testing"
	"time"
)

// The tests in this file each break when one rule is left out: test/mutants leaves it out.

// TestLateClaim: who answered that it holds nothing may have been entrusted with the partition since.
func TestLateClaim(t *testing.T) {
	l := newAlone(t)
	l.see(self, peerX, peerX, peerY)
	l.wait(150 * time.Millisecond)
	q := last[*Query](l, peerX)
	l.get(peerX, &QueryReply{ID: q.ID, Infos: []Info{{Term: term(1)}}})
	l.get(peerX, &QueryReply{Infos: []Info{{Held: true, Term: term(2), Holder: peerX}}})
	l.get(peerX, wholeCopy(term(2), 9, ids(1)))
	l.get(peerY, &QueryReply{ID: q.ID, Infos: []Info{{Term: term(1)}}})
	l.owned(false)
	l.wait(time.Second)
	l.answer(func(n Node) Info { return Info{Term: term(2), Holder: peerX, Held: n == peerX} })
	l.owned(false)
	l.wait(2 * time.Second)
	l.answer(func(n Node) Info { return Info{Term: term(2), Holder: peerX} }) // it has given it up, and the one who got it is lost
	l.owned(true)
}

// TestYield: nobody claims what another says it is about to claim, who may not have heard of this node's claim. Both ask again, the
// lower name first, for whom the other then waits.
func TestYield(t *testing.T) {
	for _, other := range []Node{peerA, peerX} {
		l := newAlone(t)
		l.see(self, Node{}, other)
		l.wait(150 * time.Millisecond)
		l.answer(func(Node) Info { return Info{Claiming: true} })
		l.owned(false)
		l.wait(time.Duration(retryAfter/2+lookEvery) - 20*time.Millisecond)
		if again := len(said[*Query](l, other)) > 0; again != (other == peerX) {
			t.Errorf("asked again: %v, where %s claims as well", again, other.Name)
		}
		l.wait(time.Duration(retryAfter))
		l.answer(func(Node) Info { return Info{} })
		l.owned(true)
	}
}

// TestStaleCommit: a hand-over under a term that another holder's is above is not taken.
func TestStaleCommit(t *testing.T) {
	l := newAlone(t)
	l.see(self, peerY, peerX, peerY)
	l.get(peerX, &Offer{Term: term(1)})
	if r := last[*OfferReply](l, peerX); r.Verdict != Accepted {
		t.Fatalf("offer: %v", r.Verdict)
	}
	l.get(peerX, wholeCopy(term(1), 10, ids(1)))
	l.get(peerY, &QueryReply{Infos: []Info{{Held: true, Term: term(2), Holder: peerY}}})
	l.get(peerX, &Commit{Replicate: *update(term(1), 11, nil), Known: term(1), Release: peerX})
	if a := last[*CommitAck](l, peerX); a.Outcome != Superseded {
		t.Errorf("a stale commit is answered %v", a.Outcome)
	}
	l.owned(false)
}

// gives brings it to where it has sent a Commit to a process.
func (l *alone) gives(to Node) *Commit {
	l.t.Helper()
	l.wait(150 * time.Millisecond)
	o := last[*Offer](l, to)
	l.get(to, &OfferReply{Term: o.Term, Verdict: Accepted})
	l.acks(to)
	l.wait(50 * time.Millisecond)
	l.acks(to)
	c := last[*Commit](l, to)
	if l.route().Standing != Frozen {
		l.t.Fatalf("a commit was sent, and it is %+v", l.route())
	}
	return c
}

// TestFailedMove: one that was not taken goes on under a higher term, so that a late copy of the commit changes nothing.
func TestFailedMove(t *testing.T) {
	l := newAlone(t)
	l.claims(peerX, peerX, peerX)
	before := l.route().Term
	c := l.gives(peerX)
	l.get(peerX, &CommitAck{Term: c.Term, Outcome: Again})
	l.owned(true)
	if after := l.route().Term; !before.Less(after) {
		t.Errorf("held at %v before and %v after a move that failed", before, after)
	}
}

// TestBrokenChunk: what could not be taken in is no copy, and not taken over.
func TestBrokenChunk(t *testing.T) {
	t.Run("copy", func(t *testing.T) {
		l := newAlone(t)
		l.see(peerX, Node{}, peerX)
		l.data.parts[0].broken = true
		l.get(peerX, wholeCopy(term(1), 10, ids(1)))
		if a := last[*ReplicateAck](l, peerX); a.Outcome != Again {
			t.Errorf("a broken chunk is answered %v", a.Outcome)
		}
		if i := l.info(peerX); i.Copy != (Position{}) {
			t.Errorf("a broken copy is at %v", i.Copy)
		}
	})
	t.Run("commit", func(t *testing.T) {
		l := newAlone(t)
		l.see(self, peerX, peerX)
		l.get(peerX, &Offer{Term: term(1)})
		l.get(peerX, wholeCopy(term(1), 10, ids(1)))
		l.data.parts[0].broken = true
		l.get(peerX, &Commit{Replicate: *update(term(1), 11, ids(2)), Known: term(1), Release: peerX})
		if a := last[*CommitAck](l, peerX); a.Outcome != Again {
			t.Errorf("a broken commit is answered %v", a.Outcome)
		}
		l.owned(false)
	})
	for _, chunk := range [][]byte{ids(2), nil} { // to be applied, or only merged
		t.Run("merge", func(t *testing.T) {
			l := newAlone(t)
			l.claims(self, peerX, peerX)
			before := l.route().Term
			l.get(peerX, &Offer{Term: term(1)})
			if r := last[*OfferReply](l, peerX); r.Verdict != Merging {
				t.Fatalf("offer: %v", r.Verdict)
			}
			l.get(peerX, wholeCopy(term(1), 10, ids(1)))
			l.data.parts[0].broken, l.data.parts[0].stuck = chunk != nil, chunk == nil
			l.get(peerX, &Commit{Replicate: *update(term(1), 11, chunk), Known: term(1), Release: peerX, Merge: true})
			if a := last[*CommitAck](l, peerX); a.Outcome != Again {
				t.Errorf("a broken merge is answered %v", a.Outcome)
			}
			if l.route().Term != before {
				t.Errorf("a broken merge ends with %v", l.route())
			}
		})
	}
}

// TestNoRoom: a copy that finds no room is answered so and dropped, and begun again after a second, and then later and later, one at a
// time; meanwhile answers are not waited for. As soon as there is room all is as before.
func TestNoRoom(t *testing.T) {
	t.Run("receiver", func(t *testing.T) {
		l := newAlone(t)
		l.see(peerX, Node{}, peerX)
		l.get(peerX, wholeCopy(term(1), 10, ids(1)))
		l.data.parts[0].full = true
		l.get(peerX, update(term(1), 11, ids(2)))
		if a := last[*ReplicateAck](l, peerX); a.Outcome != Full {
			t.Errorf("a chunk without room is answered %v", a.Outcome)
		}
		if i := l.info(peerX); i.Copy != (Position{}) {
			t.Errorf("a copy that lacks a chunk is at %v", i.Copy)
		}
	})
	t.Run("holder", func(t *testing.T) {
		l := newAlone(t)
		l.claims(self, peerX, peerX)
		l.wait(time.Second)
		var began []time.Duration
		start, refused := l.now, 0
		for l.now-start < int64(20*time.Second) {
			for _, m := range said[*Replicate](l, peerX) {
				began = append(began, time.Duration(l.now-start).Round(100*time.Millisecond))
				refused++
				l.get(peerX, &ReplicateAck{Term: m.Term, Sequence: m.Sequence, Outcome: Full})
			}
			if st := l.core.Status(l.time()); refused > 0 && (st.Degraded != 1 || st.NoRoom != 1) {
				t.Fatalf("after %d attempts: %+v", refused, st)
			}
			l.wait(10 * time.Millisecond)
		}
		if began = slices.Compact(began); len(began) != 5 { // the first message was repeated
			t.Errorf("a copy was begun after %v", began)
		}
		l.wait(8 * time.Second)
		l.acks(peerX)
		if st := l.core.Status(l.time()); st.Degraded != 0 || st.NoRoom != 0 {
			t.Errorf("when there is room: %+v", st)
		}
	})
}

// TestPieces: a chunk may come in several messages.
func TestPieces(t *testing.T) {
	l := newAlone(t)
	l.see(peerX, Node{}, peerX)
	chunk := ids(1, 2, 3)
	for i, piece := range [][]byte{chunk[:3], chunk[3:5], chunk[5:]} {
		l.get(peerX, &Replicate{
			Term: term(1), Sequence: 10 + uint64(i), Begin: i == 0, Complete: i == 2, Part: i, Parts: 3, Chunk: piece, Sum: sum(piece),
		})
		if a := last[*ReplicateAck](l, peerX); a.Outcome != Done {
			t.Fatalf("piece %d is answered %v", i, a.Outcome)
		}
	}
	if got := l.data.parts[0].content; len(got) != 3 {
		t.Errorf("the copy has %v", got)
	}
}

// TestAttachments: what comes late from an earlier attachment changes nothing, and what comes from a later one counts, however its
// numbers compare.
func TestAttachments(t *testing.T) {
	l := newAlone(t)
	l.see(peerX, Node{}, peerX)
	var holder part
	number := func(attached uint64, s Slot) uint64 {
		holder.attached = attached
		return holder.sequence(s) + 1
	}
	backup1, backup2, target3 := number(1, Backup), number(2, Backup), number(3, Target)
	if backup1 < target3 {
		t.Errorf("a backup's copy, at %#x, is not above a move's receiver's, at %#x", backup1, target3)
	}
	has := func(want int) {
		t.Helper()
		if got := l.data.parts[0].content; len(got) != want {
			t.Errorf("the copy has %v, want %d", got, want)
		}
	}
	l.get(peerX, wholeCopy(term(1), backup1, ids(1)))
	has(1)
	l.get(peerX, wholeCopy(term(1), backup2, ids(1, 2)))
	has(2)
	l.get(peerX, wholeCopy(term(1), backup1, ids(1)))
	has(2)
	l.get(peerX, wholeCopy(term(1), target3, ids(1, 2, 3)))
	has(3)
}

// TestKeep: the giver keeps its copy, and the receiver's first message follows what the giver has.
func TestKeep(t *testing.T) {
	t.Run("receiver", func(t *testing.T) {
		l := newAlone(t)
		l.see(self, peerX, peerX)
		l.get(peerX, &Offer{Term: term(1)})
		l.get(peerX, wholeCopy(term(1), 10, ids(1)))
		l.data.parts[0].unguarded = true // as it was when this node held it before
		l.get(peerX, &Commit{Replicate: *update(term(1), 11, nil), Known: term(1), Release: peerX})
		a := last[*CommitAck](l, peerX)
		if a.Outcome != Done || !a.Keep {
			t.Fatalf("commit: %+v", a)
		}
		if l.data.parts[0].unguarded {
			t.Error("strict rules may be decided without a copy while there is one")
		}
		l.data.admit(0, 2)
		l.wait(100 * time.Millisecond)
		if m := last[*Replicate](l, peerX); m.Begin || m.Sequence != a.Sequence+1 {
			t.Errorf("the first message is %d, begin %v; the giver was told %d", m.Sequence, m.Begin, a.Sequence)
		}
	})
	t.Run("giver without an answer", func(t *testing.T) {
		l := newAlone(t)
		l.claims(peerX, peerX, peerX)
		l.data.admit(0, 1)
		c := l.gives(peerX)
		m := update(c.Known.after(peerX.Boot).after(peerX.Boot), 500, ids(2))
		l.get(peerX, m)
		if a := last[*ReplicateAck](l, peerX); a.Outcome != Done {
			t.Errorf("the receiver's first message is answered %v", a.Outcome)
		}
		if got := l.data.parts[0].content; !got[1] || !got[2] {
			t.Errorf("the copy has %v", got)
		}
		if i := l.info(peerX); i.Held || i.Copy != (Position{m.Term, 500}) {
			t.Errorf("it has a copy at %+v", i)
		}
	})
}

// TestForget: only the holder under whose term a copy is, or a later one of its, makes it forgotten.
func TestForget(t *testing.T) {
	l := newAlone(t)
	l.see(peerX, Node{}, peerX, peerY)
	l.get(peerX, wholeCopy(term(2), 10, ids(1)))
	l.get(peerX, &Forget{Term: term(1)})
	l.get(peerY, &Forget{Term: term(3)})
	if l.info(peerX).Copy == (Position{}) {
		t.Error("a late Forget is obeyed")
	}
	l.get(peerX, &Forget{Term: term(2)})
	if l.info(peerX).Copy != (Position{}) {
		t.Error("Forget is not obeyed")
	}
}

// TestOldBackups are told to forget their copies.
func TestOldBackups(t *testing.T) {
	t.Run("another one", func(t *testing.T) {
		l := newAlone(t)
		l.claims(self, peerX, peerX, peerY)
		l.acks(peerX)
		l.see(self, peerY, peerX, peerY)
		l.wait(500 * time.Millisecond)
		last[*Forget](l, peerX)
	})
	t.Run("handed over", func(t *testing.T) {
		l := newAlone(t)
		l.claims(peerY, peerX, peerX, peerY)
		l.acks(peerX)
		c := l.gives(peerY)
		l.get(peerY, &CommitAck{Term: c.Term, Outcome: Done, New: c.Known.after(peerY.Boot)})
		l.owned(false)
		last[*Forget](l, peerX)
	})
}

// TestIdleOffer: a process that has been told that its partition is welcome, and does not send it, does not hold up anybody.
func TestIdleOffer(t *testing.T) {
	l := newAlone(t)
	l.see(self, peerX, peerX, peerY)
	l.get(peerX, &Offer{Term: term(1)})
	l.wait(time.Duration(idleAfter+lookEvery) + 50*time.Millisecond)
	l.get(peerY, &Offer{Term: term(2)})
	if r := last[*OfferReply](l, peerY); r.Verdict != Accepted {
		t.Errorf("an offer is answered %v while another sends nothing", r.Verdict)
	}
}

// TestIdleOfferBesideCopy: when the offer of a process that sends nothing ends, the copy that another sends meanwhile goes on, and its
// messages do not make the offer last.
func TestIdleOfferBesideCopy(t *testing.T) {
	l := newAlone(t)
	l.see(self, peerX, peerX, peerY)
	l.get(peerY, &Offer{Term: term(1)})
	if r := last[*OfferReply](l, peerY); r.Verdict != Accepted {
		t.Fatalf("an offer is answered %v", r.Verdict)
	}
	l.get(peerX, wholeCopy(term(2), 10, ids(1)))
	l.wait(time.Duration(idleAfter) - time.Second)
	l.get(peerX, update(term(2), 11, nil))
	l.wait(time.Second + time.Duration(lookEvery) + 50*time.Millisecond)
	l.get(peerX, update(term(2), 12, nil))
	if a := last[*ReplicateAck](l, peerX); a.Outcome != Done {
		t.Errorf("a message after the other's offer has ended is answered %v", a.Outcome)
	}
	l.get(peerX, &Offer{Term: term(2)})
	if r := last[*OfferReply](l, peerX); r.Verdict != Accepted {
		t.Errorf("an offer is answered %v while another sends nothing", r.Verdict)
	}
	l.get(peerX, &Commit{Replicate: *update(term(2), 13, nil), Known: term(2), Release: peerX})
	if a := last[*CommitAck](l, peerX); a.Outcome != Done {
		t.Errorf("its commit is answered %v", a.Outcome)
	}
}

// TestIdlePieces: pieces of a chunk that is not sent to its end take no room for good, and the copy before it stays.
func TestIdlePieces(t *testing.T) {
	l := newAlone(t)
	l.see(peerX, self, peerX)
	l.get(peerX, wholeCopy(term(1), 10, ids(1)))
	piece := update(term(1), 11, ids(2))
	piece.Parts = 2
	l.get(peerX, piece)
	if a := last[*ReplicateAck](l, peerX); a.Outcome != Done || l.core.buffered == 0 {
		t.Fatalf("a piece is answered %v, and takes %d bytes", a.Outcome, l.core.buffered)
	}
	l.wait(time.Duration(idleAfter+lookEvery) + 50*time.Millisecond)
	if l.core.buffered != 0 {
		t.Errorf("its pieces still take %d bytes", l.core.buffered)
	}
	if i := l.info(peerX); i.Copy.Term != term(1) {
		t.Errorf("the copy is at %v", i.Copy)
	}
	l.get(peerX, update(term(1), 12, ids(3)))
	if a := last[*ReplicateAck](l, peerX); a.Outcome != Again {
		t.Errorf("what follows lost pieces is answered %v", a.Outcome)
	}
}

// TestLateCommit: a Commit that comes again is answered as it was, also when the partition has been handed on since: the giver has
// not heard that it was taken, and goes on with what it has if it hears that it was not.
func TestLateCommit(t *testing.T) {
	l := newAlone(t)
	takes := func(from Node, held Term) *Commit {
		t.Helper()
		l.see(self, from, from, peerX, peerY)
		l.get(from, &Offer{Term: held})
		l.get(from, wholeCopy(held, 10, ids(1)))
		m := &Commit{Replicate: *update(held, 11, nil), Known: held, Release: from}
		l.get(from, m)
		if a := last[*CommitAck](l, from); a.Outcome != Done {
			t.Fatalf("%+v", a)
		}
		return m
	}
	gives := func(to Node) Term {
		t.Helper()
		l.see(to, to, peerX, peerY)
		l.acks(Node{})
		c := l.gives(to)
		taken := c.Known.after(to.Boot)
		l.get(to, &CommitAck{Term: c.Term, Outcome: Done, New: taken})
		l.owned(false)
		return taken
	}
	again := func(m *Commit, from Node, keep bool) {
		t.Helper()
		l.get(from, m)
		if a := last[*CommitAck](l, from); a.Outcome != Done || a.Keep != keep {
			t.Errorf("the commit of %s is answered %+v", from.Name, a)
		}
	}
	first := takes(peerX, term(1))
	again(first, peerX, true)
	taken := gives(peerY)
	again(first, peerX, false)
	second := takes(peerY, taken)
	again(first, peerX, false)
	again(second, peerY, true)
}

// TestNewsOnce: of a partition that has got several terms the others are told once. A reader refuses more than there are partitions.
func TestNewsOnce(t *testing.T) {
	l := newAlone(t)
	l.claims(self, peerX, peerX)
	l.wait(time.Second)
	said[*QueryReply](l, Node{})
	for range 3 {
		l.core.raise(0)
	}
	l.wait(time.Second)
	for _, news := range said[*QueryReply](l, peerX) {
		if len(news.Infos) != 1 || news.Infos[0].Term != l.route().Term {
			t.Errorf("told: %+v", news.Infos)
		}
	}
}
