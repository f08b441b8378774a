package ownership

import (
	"slices"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// The sender's end of a log.

// caughtUp brings it to where it holds all partitions, and a peer has whole copies.
func caughtUp(t *testing.T, partitions int) *alone {
	t.Helper()
	l := newAloneWith(t, Config{Partitions: partitions})
	all := slices.Repeat([]int32{1}, partitions)
	l.core.SetView(l.time(), View{Settled: true, Members: []Member{{self, true}, {peerX, true}},
		Owners: make([]int32, partitions), Backups: all})
	l.take()
	infos := make([]Info, partitions)
	for p := range infos {
		infos[p].Partition = p
	}
	l.get(peerX, &QueryReply{ID: last[*Query](l, peerX).ID, Infos: infos})
	for range 20 {
		l.wait(10 * time.Millisecond)
		l.acks(peerX)
	}
	st := l.core.Status(l.time())
	must.True(t, st.Held == partitions && st.Degraded <= 0, "%+v", st)
	l.confirmed = nil
	return l
}

// TestWindow: so much is in flight, and no more until it is answered; but for what is urgent, nothing is added to a
// full log.
func TestWindow(t *testing.T) {
	const partitions = 8
	l := caughtUp(t, partitions)
	flying := func() (bytes int, of []int) {
		for _, e := range l.entries(peerX) {
			bytes += len(e.Chunk) + entryBytes
			if !e.More {
				of = append(of, e.Partition)
			}
		}
		return bytes, of
	}
	for p := range partitions {
		l.data.parts[p].bulky = true // three entries
		l.data.admit(p, 1)
	}
	l.wait(50 * time.Millisecond)
	bytes, of := flying()
	must.True(t, bytes != 0 && bytes <= window && len(of) <= 1, "%d bytes are in flight, of %v", bytes, of)
	drained := func(p int) bool { return l.data.Pending(p, Backup) == 0 }
	expect.True(t, drained(0) && !drained(partitions-1), "a full log takes more, or an empty one nothing")
	l.core.Urgent(l.time(), partitions-1)
	l.take()
	expect.True(t, drained(partitions-1), "what is urgent waits for room in the log")
	for range 3 * partitions {
		l.ack(peerX)
		l.wait(10 * time.Millisecond)
		next, done := flying()
		expect.True(t, next <= window, "%d bytes are sent", next)
		of = append(of, done...)
	}
	if slices.Sort(of); len(slices.Compact(slices.Clone(of))) != partitions || len(of) != partitions {
		t.Errorf("the changes of %v were sent", of)
	}
}

// TestUnansweredLog: a backup that does not answer is dropped where changes wait for it, in flight or not, and not
// where nothing does.
func TestUnansweredLog(t *testing.T) {
	l := caughtUp(t, 3)
	l.admits(1, 50*time.Millisecond)
	for p := range 2 {
		l.data.admit(p, 2)
	}
	l.wait(time.Duration(stall+lookEvery) + 50*time.Millisecond)
	for p, want := range []bool{true, true, false} {
		expect.Equal(t, l.core.parts[p].followers[Backup].node == (Node{}), want, "partition %d: dropped", p)
	}
}

// TestLostLog: a receiver that has forgotten the log gets all copies anew, in another log.
func TestLostLog(t *testing.T) {
	l := caughtUp(t, 2)
	old := l.core.logs[0]
	l.get(peerX, &BlockAck{Log: old.number, Lost: true})
	blocks := said[*Block](l, peerX)
	must.True(t, len(blocks) == 1 && blocks[0].Log > old.number && blocks[0].Position == 1 &&
		len(blocks[0].Entries) == 2, "sent %+v", blocks)
	for _, e := range blocks[0].Entries {
		expect.True(t, e.Begin, "the other log begins with %+v", e)
	}
	// One that has overtaken the first block of a log has not.
	l.get(peerX, &BlockAck{Log: blocks[0].Log, Lost: true})
	if more := said[*Block](l, peerX); len(more) > 0 {
		t.Errorf("sent %+v", more[0])
	}
}

// The receiver's end.

// TestBlockOrder: blocks are taken in in order, each once, whole and undamaged; an answer says how far.
func TestBlockOrder(t *testing.T) {
	l := seeing(t, peerX, Node{}, peerX)
	block := func(position uint64, e *Entry) *Block {
		b := &Block{Log: 3, Position: position, Entries: []Entry{*e}}
		b.Sum = b.sum()
		return b
	}
	first, second := block(1, wholeCopy(term(1), 10, ids(1))), block(2, update(term(1), 10, ids(2)))
	third, fourth := block(3, update(term(1), 10, ids(3))), block(4, update(term(1), 10, ids(4)))
	damaged := *second
	damaged.Sum++
	far := block(2+maxEarly, update(term(1), 10, ids(9)))
	earlier, later := *second, *second
	earlier.Log, later.Log = 2, 4
	for i, c := range []struct {
		b        *Block
		position uint64 // answered
		content  int
	}{
		{first, 1, 1}, {&damaged, 1, 1}, {far, 1, 1}, {third, 1, 1}, {third, 1, 1}, {second, 3, 3}, {second, 3, 3},
		{fourth, 4, 4}, {first, 4, 4},
	} {
		l.get(peerX, c.b)
		if a := last[*BlockAck](l, peerX); a.Log != 3 || a.Position != c.position || a.Lost ||
			len(l.data.parts[0].content) != c.content {
			t.Errorf("block %d: answered %+v; the copy has %v", i, a, l.data.parts[0].content)
		}
	}
	l.get(peerX, &earlier)
	expect.True(t, len(said[*BlockAck](l, peerX)) <= 0, "a block of an earlier log is answered")
	l.get(peerX, &later)
	expect.True(t, last[*BlockAck](l, peerX).Lost, "a log without its first block is taken in")
	l.get(peerX, block(5, update(term(1), 10, nil)))
	expect.True(t, last[*BlockAck](l, peerX).Position == 5, "a block of a later log ends this one")
}

// TestRefusals: a refusal is told with each answer until the sender says that it knows it, and others' entries are
// taken in meanwhile.
func TestRefusals(t *testing.T) {
	l := seeing(t, peerX, Node{}, peerX)
	position := uint64(0)
	send := func(heard uint64, entries ...*Entry) *BlockAck {
		position++
		b := &Block{Log: 1, Position: position, Heard: heard}
		for _, e := range entries {
			b.Entries = append(b.Entries, *e)
		}
		b.Sum = b.sum()
		l.get(peerX, b)
		return last[*BlockAck](l, peerX)
	}
	send(0, wholeCopy(term(1), 10, ids(1)))
	unknown := Refusal{Position: 2, Attachment: 9, Outcome: Again}
	a := send(1, update(term(1), 9, ids(2)), update(term(1), 10, ids(3)))
	expect.True(t, slices.Equal(a.Refusals, []Refusal{unknown}), "answered %+v", a)
	expect.True(t, l.data.parts[0].content[3], "what follows a refused entry is not taken in")
	a = send(1, update(term(1), 10, nil))
	expect.True(t, slices.Equal(a.Refusals, []Refusal{unknown}) && a.Position == 3, "before the sender knows: %+v", a)
	expect.True(t, len(send(2, update(term(1), 10, nil)).Refusals) == 0, "when the sender knows")
}
