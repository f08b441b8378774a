package ownership

import (
	"encoding/json"
	"slices"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// Most tests in this file break when one rule is left out: test/mutants leaves it out.

// TestLateClaim: who answered that it holds nothing may have been entrusted with the partition since.
func TestLateClaim(t *testing.T) {
	l := seeing(t, self, peerX, peerX, peerY)
	l.wait(150 * time.Millisecond)
	q := last[*Query](l, peerX)
	l.get(peerX, &QueryReply{ID: q.ID, Infos: []Info{{Term: term(1)}}})
	l.hold(peerX, term(2))
	l.give(peerX, wholeCopy(term(2), 9, ids(1)))
	l.get(peerY, &QueryReply{ID: q.ID, Infos: []Info{{Term: term(1)}}})
	l.owned(false)
	l.wait(time.Second)
	l.answer(func(n Node) Info { return Info{Term: term(2), Holder: peerX, Held: n == peerX} })
	l.owned(false)
	l.wait(2 * time.Second)
	// it has given it up, and the one who got it is lost
	l.answer(func(n Node) Info { return Info{Term: term(2), Holder: peerX} })
	l.owned(true)
}

// TestYield: nobody claims what another says it is about to claim, who may not have heard of this node's claim. Both
// ask again, the lower name first, for whom the other then waits.
func TestYield(t *testing.T) {
	for _, other := range []Node{peerA, peerX} {
		l := asks(t, other)
		l.answer(func(Node) Info { return Info{Claiming: true} })
		l.owned(false)
		l.wait(time.Duration(retryAfter/2+lookEvery) - 20*time.Millisecond)
		again := len(said[*Query](l, other)) > 0
		expect.True(t, again == (other == peerX), "asked again: %v, where %s claims as well", again, other.Name)
		l.wait(time.Duration(retryAfter))
		l.answer(func(Node) Info { return Info{} })
		l.owned(true)
	}
}

// TestStaleCommit: a hand-over under a term that another holder's is above is not taken.
func TestStaleCommit(t *testing.T) {
	l := seeing(t, self, peerY, peerX, peerY)
	l.get(peerX, &Offer{Term: term(1)})
	must.Equal(t, last[*OfferReply](l, peerX).Verdict, Accepted, "offer")
	l.give(peerX, wholeCopy(term(1), 10, ids(1)))
	l.hold(peerY, term(2))
	l.get(peerX, commits(peerX, term(1), 10, nil))
	expect.Equal(t, last[*CommitAck](l, peerX).Outcome, Superseded, "a stale commit is answered")
	l.owned(false)
}

// gives brings it to where it has sent a Commit to a process.
func (l *alone) gives(to Node) *Commit {
	l.t.Helper()
	l.wait(150 * time.Millisecond)
	l.accepts(to)
	l.acks(to)
	l.wait(50 * time.Millisecond)
	l.acks(to)
	c := last[*Commit](l, to)
	if l.route().Standing != Frozen {
		l.t.Fatalf("a commit was sent, and it is %+v", l.route())
	}
	for s, f := range l.core.parts[0].followers {
		expect.True(l.t, f.node != to || l.data.parts[0].follower[s].all,
			"%s takes the partition over and is not sent everything", to.Name)
	}
	return c
}

// TestFailedMove: one that was not taken goes on under a higher term, so that a late copy of the commit changes
// nothing.
func TestFailedMove(t *testing.T) {
	l := claimed(t, peerX, peerX, peerX)
	before := l.route().Term
	c := l.gives(peerX)
	l.get(peerX, &CommitAck{Term: c.Term, Outcome: Again})
	l.owned(true)
	after := l.route().Term
	expect.True(t, before.Less(after), "held at %v before and %v after a move that failed", before, after)
}

// TestBrokenChunk: what could not be taken in is no copy, and not taken over.
func TestBrokenChunk(t *testing.T) {
	t.Run("copy", func(t *testing.T) {
		l := seeing(t, peerX, Node{}, peerX)
		l.data.parts[0].broken = true
		expect.Equal(t, l.give(peerX, wholeCopy(term(1), 10, ids(1))), Again, "a broken chunk is answered")
		expect.Equal(t, l.info(peerX).Copy, Position{}, "a broken copy is at")
	})
	t.Run("commit", func(t *testing.T) {
		l := seeing(t, self, peerX, peerX)
		l.offers(peerX, term(1))
		l.data.parts[0].broken = true
		l.get(peerX, commits(peerX, term(1), 10, ids(2)))
		expect.Equal(t, last[*CommitAck](l, peerX).Outcome, Again, "a broken commit is answered")
		l.owned(false)
		expect.Equal(t, l.info(peerX).Copy, Position{}, "a copy that lacks a commit's changes is at")
	})
	for _, chunk := range [][]byte{ids(2), nil} { // to be applied, or only merged
		t.Run("merge", func(t *testing.T) {
			l := claimed(t, self, peerX, peerX)
			before := l.route().Term
			l.get(peerX, &Offer{Term: term(1)})
			must.Equal(t, last[*OfferReply](l, peerX).Verdict, Merging, "offer")
			l.give(peerX, wholeCopy(term(1), 10, ids(1)))
			l.data.parts[0].broken, l.data.parts[0].stuck = chunk != nil, chunk == nil
			l.get(peerX, &Commit{Term: term(1), Attachment: 10, Chunk: chunk, Sum: sum(chunk), Known: term(1),
				Merge: true})
			expect.Equal(t, last[*CommitAck](l, peerX).Outcome, Again, "a broken merge is answered")
			if l.route().Term != before {
				t.Errorf("a broken merge ends with %v", l.route())
			}
		})
	}
}

// TestNoRoom: a copy that finds no room is answered so and dropped, and begun again every four seconds, one at a time;
// meanwhile answers are not waited for. As soon as there is room all is as before.
func TestNoRoom(t *testing.T) {
	t.Run("receiver", func(t *testing.T) {
		l := seeing(t, peerX, Node{}, peerX)
		l.give(peerX, wholeCopy(term(1), 10, ids(1)))
		l.data.parts[0].full = true
		expect.Equal(t, l.give(peerX, update(term(1), 10, ids(2))), Full, "a chunk without room is answered")
		expect.Equal(t, l.info(peerX).Copy, Position{}, "a copy that lacks a chunk is at")
	})
	t.Run("holder", func(t *testing.T) {
		l := claimed(t, self, peerX, peerX)
		l.wait(time.Second)
		var began []time.Duration
		start, refused := l.now, 0
		for l.now-start < int64(20*time.Second) {
			for _, m := range l.entries(peerX) {
				began = append(began, time.Duration(l.now-start).Round(100*time.Millisecond))
				refused++
				l.refuse(peerX, m, Full)
			}
			st := l.core.Status(l.time())
			must.True(t, refused <= 0 || st.Degraded == 1 && st.NoRoom == 1, "after %d attempts: %+v", refused, st)
			l.wait(10 * time.Millisecond)
		}
		expect.Equal(t, len(slices.Compact(began)), 5, "a copy was begun after") // the first message was repeated
		l.wait(8 * time.Second)
		l.acks(peerX)
		st := l.core.Status(l.time())
		expect.True(t, st.Degraded == 0 && st.NoRoom == 0 && len(l.core.full) == 0, "when there is room: %+v", st)
	})
}

// TestAttachments: what comes from an earlier attachment changes nothing, and a later one counts, however their numbers
// compare.
func TestAttachments(t *testing.T) {
	l := seeing(t, peerX, Node{}, peerX)
	var holder part
	number := func(attached uint64, s Slot) uint64 {
		holder.attached = attached
		return holder.attach(s)
	}
	backup1, backup2, target3 := number(0, Backup), number(1, Backup), number(2, Target)
	expect.True(t, backup1 >= target3,
		"a backup's copy, at %#x, is not above a move's receiver's, at %#x", backup1, target3)
	has := func(want int) {
		t.Helper()
		expect.Equal(t, len(l.data.parts[0].content), want, "the copy has")
	}
	l.give(peerX, wholeCopy(term(1), backup1, ids(1)))
	has(1)
	l.give(peerX, wholeCopy(term(1), backup2, ids(1, 2)))
	has(2)
	expect.Equal(t, l.give(peerX, update(term(1), backup1, ids(4))), Again,
		"an entry of an earlier attachment is answered")
	has(2)
	l.give(peerX, wholeCopy(term(1), target3, ids(1, 2, 3)))
	has(3)
}

// TestKeep: the giver keeps its copy, and the receiver's first entry changes it.
func TestKeep(t *testing.T) {
	t.Run("receiver", func(t *testing.T) {
		l := seeing(t, self, peerX, peerX)
		l.offers(peerX, term(1))
		l.data.parts[0].unguarded = true // as it was when this node held it before
		l.get(peerX, commits(peerX, term(1), 10, nil))
		a := last[*CommitAck](l, peerX)
		must.True(t, a.Outcome == Done && a.Keep, "commit: %+v", a)
		expect.True(t, !l.data.parts[0].unguarded, "strict rules may be decided without a copy while there is one")
		l.admits(2, 100*time.Millisecond)
		m := l.entry(peerX)
		expect.True(t, !m.Begin && m.Attachment == a.Attachment, "the first entry is %+v; the giver was told %+v", m, a)
	})
	t.Run("giver without an answer", func(t *testing.T) {
		l := claimed(t, peerX, peerX, peerX)
		l.data.admit(0, 1)
		c := l.gives(peerX)
		m := update(c.Known.after(peerX.Boot).after(peerX.Boot), 500, ids(2))
		expect.Equal(t, l.give(peerX, m), Done, "the receiver's first entry is answered")
		got := l.data.parts[0].content
		expect.True(t, got[1] && got[2], "the copy has %v", got)
		i := l.info(peerX)
		expect.True(t, !i.Held && i.Copy == (Position{m.Term, 500}), "it has a copy at %+v", i)
	})
}

// TestLateCommit: a Commit that comes again is answered as it was, also when the partition has been handed on since:
// the giver has not heard that it was taken, and goes on with what it has if it hears that it was not.
func TestLateCommit(t *testing.T) {
	l := newAlone(t)
	takes := func(from Node, held Term) *Commit {
		t.Helper()
		l.see(self, from, from, peerX, peerY)
		l.get(from, &Offer{Term: held})
		l.give(from, wholeCopy(held, 10, ids(1)))
		m := commits(from, held, 10, nil)
		l.get(from, m)
		must.Equal(t, last[*CommitAck](l, from).Outcome, Done)
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
		a := last[*CommitAck](l, from)
		expect.True(t, a.Outcome == Done && a.Keep == keep, "the commit of %s is answered %+v", from.Name, a)
	}
	first := takes(peerX, term(1))
	again(first, peerX, true)
	taken := gives(peerY)
	again(first, peerX, false)
	second := takes(peerY, taken)
	again(first, peerX, false)
	again(second, peerY, true)
	takes(peerX, gives(peerX))
	expect.Equal(t, len(l.core.parts[0].committed), 2, "commits of two processes are remembered")
}

// TestCopyOf: a copy takes in what is of its attachment, from the holder that it is of, and from no other process.
func TestCopyOf(t *testing.T) {
	for _, c := range []struct {
		name string
		from Node
		e    *Entry
		want Outcome
	}{
		{"the next", peerX, update(term(2), 10, ids(2)), Done},
		{"of another attachment", peerX, update(term(2), 11, ids(2)), Again},
		{"another process's", peerY, update(term(2), 10, ids(2)), Again},
		{"an earlier term's", peerY, wholeCopy(term(1), 20, ids(2)), Superseded},
		{"of a process that is not there", peerB, wholeCopy(term(3), 20, ids(2)), 0},
	} {
		l := seeing(t, peerX, Node{}, peerX, peerY)
		l.give(peerX, wholeCopy(term(2), 10, ids(1)))
		if got := l.give(c.from, c.e); got != c.want || l.data.parts[0].content[2] != (c.want == Done) {
			t.Errorf("%s: answered %v, want %v; the copy has %v", c.name, got, c.want, l.data.parts[0].content)
		}
	}
}

// TestBuffered: the room that pieces of a chunk take is given back when the chunk is complete or its sender lost, and a
// chunk for which there is no room is refused.
func TestBuffered(t *testing.T) {
	piece := func(more bool, text string) *Entry {
		return &Entry{Term: term(2), Attachment: 10, Begin: true, Complete: !more, More: more, Chunk: []byte(text)}
	}
	for name, end := range map[string]func(l *alone){
		"whole":       func(l *alone) { l.give(peerX, piece(false, "]")) },
		"sender lost": func(l *alone) { l.see(self, Node{}); l.wait(time.Duration(strangerFor + 2*lookEvery)) },
	} {
		l := seeing(t, self, Node{}, peerX)
		l.get(peerX, &Offer{Term: term(2)})
		l.give(peerX, piece(true, "[12"))
		l.give(peerX, piece(true, ",34"))
		if l.core.buffered() != 6 {
			t.Fatalf("%d bytes are kept", l.core.buffered())
		}
		if end(l); l.core.buffered() != 0 {
			t.Errorf("%s: %d bytes are kept", name, l.core.buffered())
		}
	}
	for most, want := range map[int]Outcome{5: Again, 6: Done} {
		l := newAlone(t)
		l.core.room = most
		l.see(peerX, Node{}, peerX)
		l.give(peerX, piece(true, "[12"))
		l.give(peerX, piece(true, ",34"))
		got := l.give(peerX, piece(false, "]"))
		expect.True(t, got == want && l.core.buffered() <= 0, "room for %d bytes: answered %v", most, got)
		expect.Equal(t, l.give(peerX, wholeCopy(term(2), 11, ids(1))), Done, "the next chunk is answered")
	}
}

// TestAcknowledged: what a follower confirms is what is in flight to it.
func TestAcknowledged(t *testing.T) {
	l := claimed(t, self, peerX, peerX, peerY)
	l.acks(peerX)
	l.admits(1, 100*time.Millisecond)
	l.entry(peerX)
	b := l.sent[peerX]
	l.confirmed = nil
	l.get(peerX, &BlockAck{Log: b.Log, Position: b.Position - 1})
	l.get(peerX, &BlockAck{Log: b.Log, Position: b.Position + 1})
	l.get(peerX, &BlockAck{Log: b.Log + 1, Position: b.Position})
	l.get(peerY, &BlockAck{Log: b.Log, Position: b.Position})
	expect.True(t, len(l.confirmed) == 0, "confirmed without the backup: %+v", l.confirmed)
	l.ack(peerX)
	expect.True(t, len(l.confirmed) == 1 && !l.confirmed[0].Unguarded, "confirmed by the backup: %+v", l.confirmed)
	for id := range 450 {
		l.data.admit(0, id)
	}
	l.wait(100 * time.Millisecond)
	for n := 0; n < 3; n++ {
		m := l.entry(peerX)
		expect.True(t, !m.Begin && !m.Complete, "a backup that is current gets %+v", m)
		l.ack(peerX)
		l.wait(50 * time.Millisecond)
	}
}

// TestAnotherAttachment: no two copies that a process is sent share numbers.
func TestAnotherAttachment(t *testing.T) {
	l := claimed(t, self, peerX, peerX)
	first := l.entry(peerX)
	l.refuse(peerX, first, Again)
	if second := l.entry(peerX); !second.Begin || second.Attachment <= first.Attachment {
		t.Errorf("the first copy begins with %#x, the second with %#x", first.Attachment, second.Attachment)
	}

	l = newAlone(t)
	var before uint64
	for n := range uint64(2) {
		l.see(self, peerX, peerX)
		held := term(10 * (n + 1))
		l.get(peerX, &Offer{Term: held})
		l.give(peerX, wholeCopy(held, 10+n, ids(1)))
		l.get(peerX, commits(peerX, held, 10+n, nil))
		a := last[*CommitAck](l, peerX)
		expect.True(t, a.Keep && a.Attachment > before, "after attachment %d: %+v", before, a)
		before = a.Attachment
		l.see(peerX, peerX, peerX)
		l.acks(peerX)
		c := l.gives(peerX)
		l.get(peerX, &CommitAck{Term: c.Term, Outcome: Done, New: c.Known.after(peerX.Boot)})
	}
}

// TestFrozen: once a commit is on its way nothing but its answer, or the loss of who is to take the partition, ends the
// wait.
func TestFrozen(t *testing.T) {
	for name, do := range map[string]func(l *alone, c *Commit){
		"another one's message": func(l *alone, c *Commit) {
			l.give(peerX, update(c.Known.after(peerX.Boot).after(peerX.Boot), 500, ids(2)))
		},
		"an earlier message": func(l *alone, c *Commit) { l.give(peerY, update(Term{N: 1}, 500, ids(2))) },
		"a whole copy": func(l *alone, c *Commit) {
			l.give(peerY, wholeCopy(c.Known.after(peerY.Boot).after(peerY.Boot), 500, ids(2)))
		},
		"an offer": func(l *alone, c *Commit) {
			l.see(self, peerX, peerX, peerY)
			l.get(peerX, &Offer{Term: term(9)})
			expect.Equal(l.t, last[*OfferReply](l, peerX).Verdict, Refused, "an offer is answered")
		},
		"another backup": func(l *alone, c *Commit) { l.see(peerY, peerA, peerX, peerY, peerA) },
		"a gap in the backup's copy": func(l *alone, c *Commit) {
			for _, m := range l.entries(peerX) {
				l.refuse(peerX, m, Again)
			}
		},
		"an answer to an earlier commit": func(l *alone, c *Commit) { l.get(peerY, &CommitAck{Term: Term{N: 1}, Outcome: Again}) },
		"another one's answer":           func(l *alone, c *Commit) { l.get(peerX, &CommitAck{Term: c.Term, Outcome: Again}) },
	} {
		l := claimed(t, peerY, peerX, peerX, peerY)
		l.acks(peerX)
		l.data.admit(0, 1)
		l.wait(50 * time.Millisecond) // which the backup does not answer
		c := l.gives(peerY)
		do(l, c)
		l.wait(30 * time.Millisecond)
		r := l.route()
		expect.True(t, r.Standing == Frozen && r.Term == c.Term, "%s: %+v", name, r)
		expect.True(t, len(said[*Forget](l, Node{})) == 0, "%s: the backup is told to forget", name)
	}
}

// TestGivenTerm: a commit names the highest term that the giver knows of, and the receiver's is above it, whoever holds
// what.
func TestGivenTerm(t *testing.T) {
	l := claimed(t, peerX, peerX, peerX)
	l.core.parts[0].known = term(900)
	if c := l.gives(peerX); c.Known != term(900) || !term(900).Less(l.core.parts[0].known) {
		t.Errorf("known: %v, and afterwards %v", c.Known, l.core.parts[0].known)
	}
	for _, merge := range []bool{false, true} {
		l := newAlone(t)
		if merge {
			l.claims(self, peerX, peerX)
		} else {
			l.see(self, peerX, peerX)
		}
		l.offers(peerX, term(1))
		l.get(peerX, &Commit{Term: term(1), Attachment: 10, Known: term(900), Merge: merge})
		a := last[*CommitAck](l, peerX)
		expect.True(t, a.Outcome == Done && term(900).Less(a.New) && a.New == l.route().Term, "merge %v: %+v", merge, a)
		if s := l.core.parts[0].strict; s.releaseWhole || s.release != (Release{peerX, term(1)}) {
			t.Errorf("merge %v: what was not whole is taken over as %+v", merge, s)
		}
	}
	l = claimed(t, self, peerX, peerX)
	l.get(peerX, &Offer{Term: term(900)})
	got := l.core.next(0)
	expect.True(t, term(900).Less(got), "after an offer under a higher term the next is %v", got)
}

// TestUnfitCommit: a commit is taken for exactly the copy that it belongs to.
func TestUnfitCommit(t *testing.T) {
	commit := func(attachment uint64) *Commit {
		return commits(peerX, term(2), attachment, ids(2))
	}
	damaged, merging := commit(10), commit(10)
	damaged.Sum++
	merging.Merge = true
	for _, c := range []struct {
		name string
		from Node
		m    *Commit
		prep func(l *alone)
	}{
		{"of another attachment", peerX, commit(11), nil},
		{"damaged", peerX, damaged, nil},
		{"merging", peerX, merging, nil},
		{"of one whose copy is not whole", peerY, commit(20), func(l *alone) {
			m := wholeCopy(term(2), 20, ids(3))
			m.Complete = false
			l.give(peerY, m)
		}},
		{"of one who is not there", peerX, commit(10), func(l *alone) { l.see(self, peerY, peerY) }},
	} {
		l := seeing(t, self, peerX, peerX, peerY)
		l.offers(peerX, term(2))
		if c.prep != nil {
			c.prep(l)
		}
		l.get(c.from, c.m)
		l.owned(false)
		for _, a := range said[*CommitAck](l, Node{}) {
			expect.Equal(t, a.Outcome, Again, "%s: answered", c.name)
		}
		n := l.core.Status(l.time()).Arriving
		expect.True(t, n == 0 || c.from != peerX, "%s: %d are still on their way", c.name, n)
	}
	for _, c := range []struct {
		name            string
		complete, merge bool
		want            Outcome
	}{{"whole", true, true, Done}, {"unfinished", false, true, Again}, {"not to be merged", true, false, Conflict}} {
		l := claimed(t, self, peerX, peerX)
		l.get(peerX, &Offer{Term: term(2)})
		m := wholeCopy(term(2), 10, ids(1))
		m.Complete = c.complete
		l.give(peerX, m)
		k := commit(10)
		k.Merge = c.merge
		l.get(peerX, k)
		a := last[*CommitAck](l, peerX)
		expect.True(t, a.Outcome == c.want && !a.Keep, "merged, %s: %+v", c.name, a)
	}
	l := seeing(t, self, peerY, peerX, peerY) // whose backup is another one
	l.offers(peerX, term(2))
	l.get(peerX, commit(10))
	a := last[*CommitAck](l, peerX)
	expect.True(t, a.Outcome == Done && !a.Keep, "who is not the backup is told %+v", a)
}

// TestArriving: a partition on its way is counted once, and for as long as it comes.
func TestArriving(t *testing.T) {
	l := newAlone(t)
	l.wait(2 * time.Duration(idleAfter))
	l.see(self, peerX, peerX, peerY)
	arriving := func(want int) {
		t.Helper()
		must.Equal(t, l.core.Status(l.time()).Arriving, want, "are on their way")
	}
	l.answer(func(n Node) Info { return Info{Held: n == peerX, Term: term(1), Holder: peerX} })
	l.get(peerX, &Offer{Term: term(1)})
	l.get(peerX, &Offer{Term: term(1)})
	l.wait(500 * time.Millisecond)
	arriving(1)
	l.get(peerY, &Offer{Term: term(2)})
	expect.Equal(t, last[*OfferReply](l, peerY).Verdict, Refused, "another one's offer is answered")
	m := wholeCopy(term(2), 10, ids(1))
	m.Complete = false
	l.give(peerX, m)
	for range 5 {
		l.wait(time.Second)
		l.give(peerX, update(term(2), 10, ids(2)))
	}
	arriving(1)
	expect.True(t, len(said[*Query](l, Node{})) == 0, "a partition that is on its way is asked after")
	l.get(peerX, &Forget{Term: term(2)})
	l.wait(time.Duration(idleAfter) + 200*time.Millisecond)
	arriving(0)

	l.get(peerX, &Offer{Term: term(2)})
	l.give(peerX, wholeCopy(term(2), 11, ids(1)))
	l.get(peerX, &Forget{Term: term(2)})
	expect.True(t, l.data.parts[0].content[1] && l.core.parts[0].copy != (Position{}),
		"a copy that is on its way to become the partition is forgotten")
	arriving(1)
	l.hold(peerY, term(4))
	l.give(peerX, update(term(2), 11, ids(2)))
	arriving(0)

	l.see(self, peerX, peerX, peerY)
	l.hold(peerY, term(5))
	l.get(peerX, &Offer{Term: term(3)})
	r := last[*OfferReply](l, peerX)
	expect.Equal(t, r.Verdict, Refused, "an offer under a lower term than another's is answered")
}

// TestClaimFrom: a partition is claimed by the one who has the newest copy of it, by the last answers of all who live.
func TestClaimFrom(t *testing.T) {
	entrusted := func(l *alone) bool { return len(said[*Entrust](l, peerX)) > 0 }
	for _, c := range []struct {
		name      string
		own, x    Position
		entrusted bool
	}{
		{"a later term", Position{term(1), 100}, Position{term(2), 5}, true},
		{"an earlier term", Position{term(2), 5}, Position{term(1), 100}, false},
		{"of the same term, later", Position{term(1), 5}, Position{term(1), 100}, true},
		{"of the same term, earlier", Position{term(1), 100}, Position{term(1), 5}, false},
	} {
		l := seeing(t, peerY, Node{}, peerX, peerY)
		l.give(peerY, wholeCopy(c.own.Term, c.own.Attachment, ids(1)))
		l.see(self, Node{}, peerX)
		l.wait(150 * time.Millisecond)
		l.answer(func(Node) Info { return Info{Term: c.x.Term, Holder: peerY, Copy: c.x} })
		l.owned(!c.entrusted)
		expect.Equal(t, entrusted(l), c.entrusted, "%s: entrusted %v", c.name, !c.entrusted)
		expect.True(t, c.entrusted || l.info(peerX).Copy == (Position{}), "%s: who holds it tells of a copy", c.name)
	}

	l := asks(t, peerX, peerY) // who has the best copy is lost before all have answered
	q := last[*Query](l, peerX)
	l.get(peerX, &QueryReply{ID: q.ID, Infos: []Info{{Term: term(1), Copy: Position{term(1), 5}}}})
	l.see(self, Node{}, peerY)
	l.get(peerY, &QueryReply{ID: q.ID, Infos: []Info{{}}})
	l.owned(true)

	l = asks(t, peerX, peerY) // who has not answered is lost
	q = last[*Query](l, peerX)
	l.get(peerX, &QueryReply{ID: q.ID, Infos: []Info{{}}})
	l.see(self, Node{}, peerX)
	l.wait(150 * time.Millisecond)
	l.owned(true)

	l = seeing(t, self, Node{}, peerX) // who lives and does not answer is not waited for without end
	l.wait(time.Duration(patience) - 100*time.Millisecond)
	l.owned(false)
	l.wait(400 * time.Millisecond)
	l.owned(true)

	l = asks(t, peerX, peerY) // another is to have it meanwhile
	l.see(peerY, Node{}, peerX, peerY)
	l.answer(func(Node) Info { return Info{} })
	l.owned(false)

	l = asks(t, peerX) // an answer to an earlier question
	q = last[*Query](l, peerX)
	l.get(peerX, &QueryReply{ID: q.ID + 1, Infos: []Info{{}}})
	l.owned(false)

	l = asks(t, peerX, peerY) // of two who hold it the one with the higher term counts
	q = last[*Query](l, peerX)
	l.get(peerX, &QueryReply{ID: q.ID, Infos: []Info{{Held: true, Term: term(9), Holder: peerX}}})
	l.get(peerY, &QueryReply{ID: q.ID, Infos: []Info{{Held: true, Term: term(2), Holder: peerY}}})
	r := l.route()
	expect.True(t, r.Node == peerX && r.Term == term(9), "held by two, it is asked at %+v", r)
	l.see(peerY, Node{}, peerY)
	expect.Equal(t, l.route().Node, peerY, "whose holder is lost, it is asked at")
	l.see(self, Node{}, peerY)
	expect.Equal(t, l.route().Standing, Unclaimed, "whose holder is lost, and that is this node's, it is")
}

// TestUnseenHolder: a node claims nothing that a process holds which a member sees and this node does not see yet. It
// waits for that process once, and not at all for one that it has seen leave, whose name another process has, or that
// the member does not see either.
func TestUnseenHolder(t *testing.T) {
	held := func(Node) Info { return Info{Term: term(1), Holder: peerY} }
	l := asks(t, peerX)
	l.answer(held)
	l.owned(false)
	l.see(self, Node{}, peerX, peerY)
	l.wait(300 * time.Millisecond)
	l.answer(func(n Node) Info { return Info{Held: n == peerY, Term: term(1), Holder: peerY} })
	r := l.route()
	expect.True(t, r.Standing == Elsewhere && r.Node == peerY, "the holder is seen by now, and checks go to %+v", r)

	l = asks(t, peerX)
	l.answer(held)
	l.wait(time.Duration(strangerFor) + 300*time.Millisecond)
	l.answer(held)
	l.owned(true)

	l = seeing(t, peerX, Node{}, peerX, peerY)
	l.see(self, Node{}, peerX)
	l.wait(150 * time.Millisecond)
	l.answer(held)
	l.owned(true)

	l = asks(t, peerX)
	l.answer(func(Node) Info { return Info{Term: term(1), Holder: Node{self.Name, 77}} })
	l.owned(true)

	l = seeing(t, peerX, Node{}, peerX, peerY)
	l.hold(peerY, term(1))
	expect.Equal(t, l.info(peerX).Holder, peerY, "the holder it tells of")
	l.see(peerX, Node{}, peerX)
	expect.Equal(t, l.info(peerX).Holder, Node{}, "the holder it tells of, which is lost")
}

// TestClaimWithout: what is claimed from a copy that is older than the last holder's term starts full where rules say
// so, and nothing is left of a copy that never was whole.
func TestClaimWithout(t *testing.T) {
	for _, c := range []struct {
		name    string
		copy    bool
		heard   Term
		cold    bool
		content int
	}{
		{"a copy", true, term(1), false, 1},
		{"an old copy", true, term(5), true, 1},
		{"part of a copy", false, term(1), true, 0},
		{"part of a copy of what nobody held", false, Term{}, false, 0},
	} {
		l := seeing(t, peerX, Node{}, peerX)
		if c.copy {
			l.give(peerX, wholeCopy(term(1), 10, ids(1)))
		} else {
			l.data.parts[0].content[1] = true
		}
		if c.heard != (Term{}) {
			l.hold(peerX, c.heard)
		}
		l.see(self, Node{})
		l.wait(150 * time.Millisecond)
		l.owned(true)
		if pg := &l.data.parts[0]; pg.cold != c.cold || len(pg.content) != c.content {
			t.Errorf("%s: starts full: %v, and has %v", c.name, pg.cold, pg.content)
		}
	}
}

// TestEntrusted: who is entrusted with a partition claims it above the term that was known to whoever said so, unless
// somebody has held it since or is handing it over.
func TestEntrusted(t *testing.T) {
	ready := func() *alone {
		l := seeing(t, peerX, Node{}, peerX, peerY)
		l.give(peerY, wholeCopy(term(2), 10, ids(1)))
		return l
	}
	l := ready()
	l.get(peerX, &Entrust{Term: term(900)})
	l.owned(true)
	got := l.route().Term
	expect.True(t, term(900).Less(got), "claimed at %v", got)
	l = ready()
	l.get(peerX, &Entrust{Term: term(1)})
	l.owned(false)
	l = ready()
	l.see(self, Node{}, peerX, peerY)
	l.get(peerY, &Offer{Term: term(2)})
	l.get(peerX, &Entrust{Term: term(2)})
	l.owned(false)
}

// TestSupersededHolder: a holder that hears of a higher term goes on above it if that one's process is lost, and leaves
// it to that one if it lives.
func TestSupersededHolder(t *testing.T) {
	for _, by := range []Node{peerB, self, peerY} {
		l := claimed(t, self, peerX, peerX, peerY)
		m, held := l.entry(peerX), l.route().Term
		l.get(peerX, &BlockAck{Log: 1,
			Refusals: []Refusal{{Attachment: m.Attachment, Outcome: Superseded, Known: term(900), Holder: by}}})
		if raised := l.route().Term != held; raised != (by != peerY) {
			t.Errorf("of %s: held at %v before and %v afterwards", by.Name, held, l.route().Term)
		}
		next := l.core.next(0)
		expect.True(t, term(900).Less(next), "of %s: the next term is %v", by.Name, next)
	}
}

// TestLargeChunk: a chunk that takes several entries is confirmed with the last of them, and only that one can make a
// copy whole.
func TestLargeChunk(t *testing.T) {
	l := newAlone(t)
	l.data.parts[0].bulky = true
	l.claims(self, peerX, peerX)
	l.confirmed = nil
	for part := 0; part < 3; {
		for _, e := range l.entries(peerX) {
			must.True(t, e.More == (part < 2) && e.Complete == (part == 2) && e.Begin,
				"entry %d of 3: more %v, begins %v, completes %v", part, e.More, e.Begin, e.Complete)
			part++
		}
		expect.True(t, len(l.confirmed) == 0 && !l.data.parts[0].follower[Backup].caught,
			"confirmed before entry %d: %+v", part, l.confirmed)
		l.ack(peerX)
	}
	expect.True(t, len(l.confirmed) == 1 && l.data.parts[0].follower[Backup].caught,
		"confirmed by a whole copy: %+v", l.confirmed)
}

// TestLastChanges: a partition is given away with all that was admitted, in as many messages as that takes, and only to
// one that has a whole copy.
func TestLastChanges(t *testing.T) {
	l := claimed(t, peerY, peerX, peerX, peerY)
	l.acks(peerX)
	for id := range 450 {
		l.data.admit(0, id)
	}
	sent := map[int]bool{}
	note := func(chunk []byte) {
		var list []int
		if len(chunk) > 0 {
			must.NoError(t, json.Unmarshal(chunk, &list))
		}
		for _, id := range list {
			sent[id] = true
		}
	}
	l.wait(150 * time.Millisecond)
	l.accepts(peerY)
	more := 250
	for range 20 {
		for _, m := range l.entries(peerY) {
			note(m.Chunk)
			if m.Complete { // so few are left that it is frozen as soon as this is acknowledged
				for ; more > 0; more-- {
					l.data.admit(0, 1000+more)
				}
			}
			l.ack(peerY)
			if more > 0 {
				l.owned(true)
			}
		}
		for _, c := range said[*Commit](l, peerY) {
			note(c.Chunk)
			l.get(peerY, &CommitAck{Term: c.Term, Outcome: Done, New: c.Known.after(peerY.Boot)})
		}
		l.acks(peerX)
		l.wait(10 * time.Millisecond)
	}
	l.owned(false)
	expect.Equal(t, len(sent), 700, "of 700 admissions were sent")
}
