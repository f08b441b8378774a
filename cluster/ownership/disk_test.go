package ownership

import (
	"slices"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
)

// diskOf is a core with a disk, which has a copy at a term if that is not 0.
func diskOf(t *testing.T, n uint64, members ...string) *alone {
	cfg := Config{Partitions: 1, Restore: RestoreConfig{Disk: true, Members: members, Wait: 10 * time.Second}}
	if n > 0 {
		cfg.Restore.Copies = []Restored{{Position: Position{Term: term(n), Attachment: 1}, Origin: term(1)}}
	}
	l := newAloneWith(t, cfg)
	if n > 0 {
		l.data.parts[0].content = map[int]bool{1: true, 2: true}
	}
	return l
}

// brings is the first entry of a restored copy of another process.
func brings(n, origin uint64, chunk []byte, complete bool) *Entry {
	return &Entry{Term: term(n), Attachment: 1, Origin: term(origin), Begin: true, Complete: complete, Join: true,
		Chunk: chunk}
}

// TestRestoredClaim: a copy from the disk is claimed once the members that the disk knows have been seen, or after a
// while.
func TestRestoredClaim(t *testing.T) {
	for _, seen := range []bool{true, false} {
		l := diskOf(t, 5, self.Name, peerB.Name)
		l.see(self, Node{})
		l.wait(9 * time.Second)
		l.owned(false)
		if seen {
			l.see(self, Node{}, peerB)
			l.wait(150 * time.Millisecond)
			l.answer(func(Node) Info { return Info{} })
		} else {
			l.wait(2 * time.Second)
		}
		l.owned(true)
		e := l.entry(DiskNode())
		expect.True(t, term(5).Less(e.Term) && e.Begin && e.Complete && string(e.Chunk) == string(ids(1, 2)), "%+v", e)
		expect.Equal(t, e.Origin == term(1), seen, "origin %v; all are seen: %v", e.Origin, seen)
	}
}

// TestNewcomersWait: while a process waits for members whose disks may have newer copies, nobody else claims what was
// not held since.
func TestNewcomersWait(t *testing.T) {
	claiming := func(l *alone) bool {
		l.get(peerA, &Query{ID: 1, Partitions: []int{0}})
		return last[*QueryReply](l, peerA).Infos[0].Claiming
	}
	for _, n := range []uint64{0, 5} {
		l := diskOf(t, n, self.Name, peerB.Name)
		l.see(peerA, Node{}, peerA)
		expect.True(t, claiming(l), "others may claim before the disk of b is there")
		l.wait(10 * time.Second)
		expect.True(t, !claiming(l), "others may not claim after the wait")
	}
	l := diskOf(t, 5, self.Name, peerB.Name)
	l.see(peerA, Node{}, peerA, peerX)
	l.get(peerX, &QueryReply{Infos: []Info{{Held: true, Term: term(6), Holder: peerX}}})
	expect.True(t, !claiming(l), "others may not claim what x has held")
}

// TestJoin: a copy of another origin is joined with what the holder has, under a term above both.
func TestJoin(t *testing.T) {
	l := diskOf(t, 0)
	l.claims(self, Node{}, peerB)
	l.data.admit(0, 7)
	l.acks(DiskNode())
	expect.Equal(t, l.give(peerB, brings(77, 3, nil, false)), Done, "the first entry")
	expect.Equal(t, l.give(peerB, &Entry{Term: term(77), Attachment: 1, Join: true, Complete: true, Chunk: ids(1, 2)}),
		Done, "the rest")
	l.owned(true)
	expect.True(t, len(l.data.parts[0].content) == 3, "joined: %v", l.data.parts[0].content)
	expect.True(t, term(77).Less(l.route().Term), "the term is %v", l.route().Term)
	l.wait(20 * time.Millisecond)
	e := l.entry(DiskNode())
	expect.True(t, e.Term == l.route().Term && string(e.Chunk) == string(ids(1, 2, 7)), "the disk gets %+v", e)
	saved := func() Position {
		l.get(peerB, &Query{ID: 1, Partitions: []int{0}})
		return last[*QueryReply](l, peerB).Infos[0].Copy
	}
	expect.Equal(t, saved(), Position{}, "others may delete what this disk does not have")
	l.ack(DiskNode())
	l.wait(100 * time.Millisecond)
	l.acks(DiskNode())
	expect.Equal(t, saved(), Position{Term: l.route().Term}, "after the disk has it")
}

// TestBringRest: to a holder that has the same origin, a restored copy brings what no backup has, before the process
// takes a copy.
func TestBringRest(t *testing.T) {
	for _, refused := range []bool{true, false} {
		l := diskOf(t, 5)
		l.data.parts[0].content[-3] = true
		l.see(peerB, Node{}, peerB)
		l.get(peerB, &QueryReply{Infos: []Info{{Held: true, Term: term(6), Holder: peerB}}})
		copied := wholeCopy(term(6), backupBit|2, ids(4))
		copied.Origin = term(1)
		if refused {
			l.wait(200 * time.Millisecond)
			l.refuse(peerB, l.entry(peerB), Superseded)
		} else {
			expect.Equal(t, l.give(peerB, copied), Conflict, "a copy comes before")
		}
		l.wait(20 * time.Millisecond)
		e := l.entry(peerB)
		expect.True(t, e.Join && e.Begin && e.Complete && e.Origin == (Term{}) && string(e.Chunk) == string(ids(-3)),
			"%+v", e)
		expect.Equal(t, l.core.Status(l.time()).Restored, 1, "before it is taken in")
		l.refuse(peerB, e, Conflict)
		l.wait(2 * time.Second)
		e = l.entry(peerB)
		expect.True(t, e.Complete && string(e.Chunk) == string(ids(-3)), "again: %+v", e)
		l.ack(peerB)
		expect.Equal(t, l.core.Status(l.time()).Restored, 0, "after it is taken in")
		expect.Equal(t, l.give(peerB, copied), Done, "a copy comes afterwards")
	}
}

// TestOlderCopy: a copy of the holder's own history is an older state of it, and is not joined; nor is any while the
// holder cannot.
func TestOlderCopy(t *testing.T) {
	l := diskOf(t, 0)
	expect.Equal(t, l.give(peerB, brings(5, 1, ids(1), true)), Outcome(0), "from a process that is not there")
	l.see(peerB, Node{}, peerB)
	l.given[peerB] = 0
	expect.Equal(t, l.give(peerB, brings(5, 1, ids(1), true)), Conflict,
		"to a process that does not hold the partition")
	l = diskOf(t, 5)
	l.claims(self, Node{}, peerB)
	l.acks(DiskNode())
	expect.Equal(t, l.give(peerB, brings(5, 1, ids(9), true)), Superseded, "an older state")
	expect.True(t, !l.data.parts[0].content[9], "joined")
	l.data.parts[0].stuck = true
	expect.Equal(t, l.give(peerB, brings(5, 3, ids(9), true)), Conflict, "there is no room")
}

// TestBring: a process brings a restored copy to the holder, takes nothing else before, and its disk keeps the copy
// until the holder's disk has the partition.
func TestBring(t *testing.T) {
	for _, older := range []bool{true, false} {
		l := diskOf(t, 5)
		l.see(self, Node{}, peerB)
		held := Info{Held: true, Term: term(6), Holder: peerB}
		l.get(peerB, &QueryReply{Infos: []Info{held}})
		l.get(peerB, &Offer{Term: term(6)})
		expect.Equal(t, last[*OfferReply](l, peerB).Verdict, Refused, "a move comes before")
		expect.Equal(t, l.give(peerB, wholeCopy(term(6), 2, ids(3))), Conflict, "a copy comes before")
		l.wait(200 * time.Millisecond)
		first := l.entry(peerB)
		expect.True(t, first.Join && first.Begin && !first.Complete && len(first.Chunk) == 0 && first.Term == term(5) &&
			first.Origin == term(1), "%+v", first)
		if older {
			l.refuse(peerB, first, Superseded)
		} else {
			l.ack(peerB)
			rest := l.entry(peerB)
			expect.True(t, rest.Join && rest.Complete && string(rest.Chunk) == string(ids(1, 2)), "%+v", rest)
			l.ack(peerB)
		}
		expect.True(t, len(l.data.parts[0].content) == 0 && l.core.Status(l.time()).Kept == 1, "%v",
			l.data.parts[0].content)
		for _, safe := range []Term{{}, term(5), term(6)} {
			held.Copy.Term = safe
			l.get(peerB, &QueryReply{Infos: []Info{held}})
			deleted := slices.ContainsFunc(l.entries(DiskNode()),
				func(e *Entry) bool { return e.Begin && e.Complete && e.Term == (Term{}) })
			expect.Equal(t, deleted, safe == term(6), "the holder's disk has the partition at %v", safe)
		}
		expect.Equal(t, l.give(peerB, wholeCopy(term(6), 2, ids(3))), Done, "a copy comes afterwards")
	}
}

// TestSavedHandOver: a partition is committed to its next holder once the disk has confirmed what was decided, and is
// deleted from the disk when that one's disk has it.
func TestSavedHandOver(t *testing.T) {
	l := diskOf(t, 0)
	l.claims(peerB, peerB, peerB)
	l.acks(Node{})
	l.wait(100 * time.Millisecond)
	l.data.admit(0, 1)
	l.get(peerB, &OfferReply{Term: last[*Offer](l, peerB).Term, Verdict: Accepted})
	l.acks(peerB)
	l.wait(50 * time.Millisecond)
	expect.Equal(t, len(said[*Commit](l, peerB)), 0, "committed before the disk has the last change")
	l.acks(Node{})
	l.wait(50 * time.Millisecond)
	c := last[*Commit](l, peerB)
	l.confirmed = nil
	l.get(peerB, &CommitAck{Term: c.Term, Outcome: Done, New: term(9)})
	expect.True(t, slices.Contains(l.confirmed, Progress{Version: versionsDone, Saved: true}), "%+v", l.confirmed)
	expect.Equal(t, len(l.entries(DiskNode())), 0, "deleted from the disk")
	expect.Equal(t, l.core.Status(l.time()).Kept, 1)
}

// TestDiskLost: when the disk fails, what waits for it is answered as degraded, and the core goes on.
func TestDiskLost(t *testing.T) {
	l := diskOf(t, 0)
	l.claims(self, Node{}, peerB)
	l.entry(DiskNode())
	l.confirmed = nil
	l.get(DiskNode(), &BlockAck{Lost: true})
	expect.True(t, slices.Contains(l.confirmed, Progress{Version: versionsDone, Saved: true, Unguarded: true}), "%+v",
		l.confirmed)
	l.admits(1, time.Second)
	expect.Equal(t, len(l.entries(DiskNode())), 0, "still sent to the disk")
	l.owned(true)
}

// TestDiskBeginsAnew: a disk that refuses an entry gets a new whole copy.
func TestDiskBeginsAnew(t *testing.T) {
	l := diskOf(t, 0)
	l.claims(self, Node{}, peerB)
	l.acks(DiskNode())
	l.admits(1, 50*time.Millisecond)
	l.refuse(DiskNode(), l.entry(DiskNode()), Again)
	e := l.entry(DiskNode())
	expect.True(t, e.Begin && e.Complete && string(e.Chunk) == string(ids(1)) && l.data.parts[0].follower[Disk].caught,
		"%+v", e)
}

// TestSavedBackup: the disk follows a backup's copy, under the position of that, begins anew with each of the holder's
// terms, and forgets the copy when it is not needed any more. Nothing waits for it.
func TestSavedBackup(t *testing.T) {
	const backup = backupBit | 2
	l := diskOf(t, 0)
	l.see(peerB, self, peerB)
	expect.Equal(t, l.give(peerB, wholeCopy(term(6), 3, ids(1))), Done, "the copy of a move")
	expect.Equal(t, len(l.entries(DiskNode())), 0, "entries for the disk of a move's copy")
	copied := wholeCopy(term(6), backup, ids(1))
	copied.Origin = term(4)
	expect.Equal(t, l.give(peerB, copied), Done, "the backup's copy")
	saved := func(term Term, begin bool, chunk []byte) {
		t.Helper()
		l.wait(50 * time.Millisecond)
		e := l.entry(DiskNode())
		expect.True(t, e.Term == term && e.Attachment == 2 && e.Begin == begin && e.Complete == begin &&
			string(e.Chunk) == string(chunk), "%+v", e)
		expect.True(t, !begin || e.Origin == copied.Origin, "%+v", e)
		expect.Equal(t, l.core.Status(l.time()).Unsaved, 1, "before the disk confirms")
		l.ack(DiskNode())
		expect.Equal(t, l.core.Status(l.time()).Unsaved, 0, "unsaved")
	}
	saved(term(6), true, ids(1))
	expect.Equal(t, l.give(peerB, update(term(6), backup, ids(2))), Done, "a change")
	saved(term(6), false, ids(2))
	expect.Equal(t, l.give(peerB, update(term(7), backup, ids(3))), Done, "a change under a higher term")
	saved(term(7), true, ids(1, 2, 3))
	expect.Equal(t, l.give(peerB, update(term(7), backup, ids(4))), Done, "a change")
	l.wait(50 * time.Millisecond)
	l.refuse(DiskNode(), l.entry(DiskNode()), Again)
	saved(term(7), true, ids(1, 2, 3, 4))
	expect.True(t, len(l.confirmed) == 0 && l.core.Status(l.time()).Kept == 0, "%+v", l.confirmed)

	// The copy is claimed: the disk begins anew, and is the holder's.
	l.see(self, Node{})
	l.wait(150 * time.Millisecond)
	l.owned(true)
	e := l.entry(DiskNode())
	expect.True(t, e.Begin && e.Term == l.route().Term && e.Attachment&holderBit != 0, "%+v", e)

	l = diskOf(t, 0)
	l.see(peerB, self, peerB)
	expect.Equal(t, l.give(peerB, copied), Done, "the backup's copy")
	l.acks(DiskNode())
	l.get(peerB, &Forget{Term: term(6)})
	l.wait(50 * time.Millisecond)
	e = l.entry(DiskNode())
	expect.True(t, e.Begin && e.Complete && e.Term == (Term{}), "not deleted: %+v", e)
}

// TestPositionsOfDisks: of copies under one term, a backup's in memory is the best, then the holder's disk, then the
// later backup's disk.
func TestPositionsOfDisks(t *testing.T) {
	pt := &part{held: true}
	holders := pt.attach(Disk)
	first, second := pt.attach(Backup), pt.attach(Backup)
	disk := func(of uint64) Position {
		return Position{term(1), (&part{copy: Position{term(1), of}}).attach(Disk)}
	}
	rising := []Position{disk(first), disk(second), {term(1), holders}, {term(1), first}, {term(2), 0}}
	for i := range len(rising) - 1 {
		expect.True(t, rising[i].before(rising[i+1]), "%+v is not below %+v", rising[i], rising[i+1])
	}
}

// TestKnownOrigin: a process takes a backup's copy in place of a restored one of the same origin, all of which the
// holder has.
func TestKnownOrigin(t *testing.T) {
	for _, origin := range []Term{term(1), term(3)} {
		l := diskOf(t, 5)
		l.see(peerB, self, peerB)
		e := wholeCopy(term(6), backupBit|2, ids(3))
		e.Origin = origin
		want := Conflict
		if origin == term(1) {
			want = Done
		}
		expect.Equal(t, l.give(peerB, e), want, "origin %v", origin)
		expect.Equal(t, l.core.Status(l.time()).Restored, map[Outcome]int{Done: 0, Conflict: 1}[want],
			"restored copies")
	}
}
