package ownership

import (
	"slices"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestReading and the others here each break when one rule of voters is left out: test/mutants leaves it out.

// readingVoter is a voter that has abstained and asks the others what they have recorded.
func readingVoter(t *testing.T) *alone {
	t.Helper()
	l := newAlone(t, self.Name, voter2.Name, voter3.Name)
	l.see(peerX, Node{}, peerX, peerY, voter2, voter3)
	l.wait(3100 * time.Millisecond)
	return l
}

// read tells it what the others have recorded, which ends the reading.
func (l *alone) read(second, third []Record) {
	l.t.Helper()
	for n, records := range map[Node][]Record{voter2: second, voter3: third} {
		l.get(n, &Records{ID: last[*ReadRecords](l, n).ID, Read: true, Epoch: 0, Records: records})
	}
	must.True(l.t, l.core.voter.ready(), "the voter does not vote")
}

// ask asks it for a vote.
func (l *alone) ask(n Node, id uint64, i GrantItem) GrantAnswer {
	l.t.Helper()
	l.get(n, &GrantRequest{ID: id, Items: []GrantItem{i}})
	return last[*GrantReply](l, n).Items[0]
}

// TestLateRequest: one that is older than what the others have recorded does not bring a withdrawn backup back.
func TestLateRequest(t *testing.T) {
	l := readingVoter(t)
	l.read([]Record{{Term: term(5), Node: peerX, ID: 9}}, []Record{{Term: term(5), Node: peerX, Backup: peerY, ID: 8}})
	a := l.ask(peerX, 7, GrantItem{Term: term(5), Backup: peerY})
	expect.True(t, !a.Granted && a.Recorded.Backup == (Node{}) && a.Recorded.ID == 9,
		"a late request is answered %+v", a)
	expect.True(t, l.ask(peerX, 10, GrantItem{Term: term(5), Backup: peerY}).Granted, "a new request is answered")
	l.get(peerX, &GrantRequest{ID: 10, Items: []GrantItem{{Term: term(5), Backup: peerY}}})
	if again := said[*GrantReply](l, peerX); len(again) > 0 {
		t.Errorf("a request that came twice is answered again: %+v", again[0])
	}
}

// TestReplaced: a voter tells with every grant whose record this one's has replaced, and who reads it is told as well.
func TestReplaced(t *testing.T) {
	l := readingVoter(t)
	l.read(nil, nil)
	old := Record{Term: term(5), Node: peerX, Backup: peerY, ID: 1}
	a := l.ask(peerX, 1, GrantItem{Term: old.Term, Backup: old.Backup})
	must.True(t, a.Granted && a.Recorded == (Record{}), "%+v", a)
	for id := uint64(1); id < 4; id++ {
		a := l.ask(peerY, id, GrantItem{Term: term(5 + id), Release: Release{peerX, term(5)}})
		expect.True(t, a.Granted && a.Recorded == old,
			"request %d is answered %+v, want %+v to have been replaced", id, a, old)
	}
	l.get(voter2, &ReadRecords{ID: 1})
	r := last[*Records](l, voter2)
	expect.True(t, slices.Contains(r.Records, old) && len(r.Records) == 2, "who reads is told %+v", r.Records)
}

// TestReading: of what two others have recorded the highest term stands, and of its process what it wrote last; the
// highest of another process is what it has replaced, as its process wrote it last.
func TestReading(t *testing.T) {
	x5, x5later := Record{Term: term(5), Node: peerX, Backup: peerY, ID: 1}, Record{Term: term(5), Node: peerX, ID: 2}
	y6, y6later := Record{Term: term(6), Node: peerY, Backup: peerX, ID: 3}, Record{Term: term(6), Node: peerY, ID: 4}
	a4 := Record{Term: term(4), Node: peerA, ID: 9}
	for _, c := range []struct {
		name           string
		second, third  []Record
		record, before Record
	}{
		{"the higher term", []Record{x5}, []Record{y6}, y6, x5},
		{"the higher term first", []Record{y6}, []Record{x5}, y6, x5},
		{"the later request", []Record{x5}, []Record{x5later}, x5later, Record{}},
		{"the later request first", []Record{x5later}, []Record{x5}, x5later, Record{}},
		{"replaced, and the later request", []Record{y6, x5}, []Record{y6later, x5later}, y6later, x5later},
		{"replaced, and the later request first", []Record{y6later, x5later}, []Record{y6, x5}, y6later, x5later},
		{"replaced, and the higher term", []Record{y6, a4}, []Record{x5}, y6, x5},
		{"the same process before", []Record{x5}, []Record{{Term: term(6), Node: peerX, ID: 3}, a4},
			Record{Term: term(6), Node: peerX, ID: 3}, a4},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := readingVoter(t)
			l.read(c.second, c.third)
			l.get(voter2, &ReadRecords{ID: 1})
			want := []Record{c.record}
			if c.before != (Record{}) {
				want = append(want, c.before)
			}
			r := last[*Records](l, voter2)
			expect.True(t, slices.Equal(r.Records, want), "recorded: %+v, want %+v", r.Records, want)
			a := l.ask(peerB, 1, GrantItem{Term: term(8)})
			expect.True(t, !a.Granted && a.Recorded == c.record && a.Wait >= 3*time.Second,
				"another process is answered %+v", a)
		})
	}
}

// epoch is the one that the voter tells of with its answers.
func (l *alone) epoch(n Node, id uint64) uint64 {
	l.t.Helper()
	l.get(n, &GrantRequest{ID: id})
	return last[*GrantReply](l, n).Epoch
}

// forgotten answers what the voter has asked the others, the third first: no majority of them has read.
func (l *alone) forgotten(second, third *Records) {
	l.t.Helper()
	second.ID, third.ID = last[*ReadRecords](l, voter2).ID, last[*ReadRecords](l, voter3).ID
	l.get(voter3, third)
	l.get(voter2, second)
}

// TestNewEpoch: an epoch that a voter begins is above all that anybody has told of, and the others take it over.
func TestNewEpoch(t *testing.T) {
	const high = 1 << 40 // above the time of day
	for _, c := range []struct {
		name          string
		heard         uint64
		second, third *Records
		least         uint64
	}{
		{"nobody knows", 0, &Records{}, &Records{Epoch: high}, high + 1},
		{"a holder has heard of a later one than a voter has begun", high + 1, &Records{},
			&Records{Read: true, Fresh: true, Epoch: high}, high + 2},
		{"a voter has begun it", 0, &Records{}, &Records{Read: true, Fresh: true, Epoch: high}, high},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := readingVoter(t)
			l.get(peerY, &GrantRequest{ID: 1, Items: []GrantItem{{Term: Term{Epoch: c.heard, N: 1}}}})
			l.forgotten(c.second, c.third)
			expect.Equal(t, l.epoch(peerX, 1), c.least, "the epoch")
		})
	}
}

// TestFresh: an epoch is fresh for the voters that were there when it began, and not for those that came later.
func TestFresh(t *testing.T) {
	l := readingVoter(t)
	l.forgotten(&Records{}, &Records{})
	later := Node{voter2.Name, 99}
	l.see(peerX, Node{}, peerX, peerY, voter2, voter3, later)
	for i, c := range []struct {
		to    Node
		fresh bool
	}{{voter2, true}, {voter3, true}, {later, false}, {voter2, true}} {
		l.get(c.to, &ReadRecords{ID: uint64(i)})
		if r := last[*Records](l, c.to); !r.Read || r.Fresh != c.fresh {
			t.Errorf("question %d, of %v, is answered %+v, want fresh %v", i, c.to, r, c.fresh)
		}
	}
}

// TestEpochsHeardOf: a voter that has not read tells which epoch it has heard of, which may be the highest there was.
func TestEpochsHeardOf(t *testing.T) {
	l := newAlone(t, self.Name, voter2.Name, voter3.Name)
	l.see(peerX, Node{}, peerX, voter2, voter3)
	l.get(peerX, &GrantRequest{ID: 1, Items: []GrantItem{{Term: Term{Epoch: 9, N: 1}}}})
	l.get(voter2, &ReadRecords{ID: 1})
	r := last[*Records](l, voter2)
	expect.True(t, !r.Read && r.Epoch == 9, "who reads is told %+v", r)
}

// TestReadingOfNamesake: what another process of this voter's name has recorded is not a second voter's.
func TestReadingOfNamesake(t *testing.T) {
	namesake := Node{self.Name, 99}
	l := newAlone(t, self.Name, voter2.Name, voter3.Name)
	l.see(peerX, Node{}, peerX, voter2, voter3, namesake)
	l.wait(3100 * time.Millisecond)
	id := last[*ReadRecords](l, voter2).ID
	l.get(namesake, &Records{ID: id, Read: true})
	l.get(voter2, &Records{ID: id, Read: true})
	expect.True(t, !l.core.voter.ready(), "a voter of three has read the records of one other")
}

// TestLateRecords: answers of voters that take longer than the time from one question to the next are taken, but none
// after a later one, and none that is older than a second.
func TestLateRecords(t *testing.T) {
	reads := func(answer func(l *alone, asked []*ReadRecords)) bool {
		l := newAlone(t, self.Name, voter2.Name, voter3.Name)
		l.see(peerX, Node{}, peerX, voter2, voter3)
		l.wait(3100 * time.Millisecond)
		var asked []*ReadRecords
		for range 200 {
			l.wait(10 * time.Millisecond)
			said[*ReadRecords](l, voter3)
			asked = append(asked, said[*ReadRecords](l, voter2)...)
			answer(l, asked)
		}
		return l.core.voter.ready()
	}
	from := func(l *alone, id uint64, r Records) {
		r.ID = id
		l.get(voter2, &r)
		l.get(voter3, &r)
	}
	if !reads(func(l *alone, asked []*ReadRecords) {
		if len(asked) > 7 {
			from(l, asked[len(asked)-8].ID, Records{Read: true})
		}
	}) {
		t.Error("a voter does not read what is answered 1.4 s later")
	}
	if reads(func(l *alone, asked []*ReadRecords) {
		from(l, 0, Records{Read: true})
		from(l, 99, Records{Read: true})
	}) {
		t.Error("a voter reads what nobody is asked for")
	}

	l := newAlone(t, voter2.Name, voter3.Name, self.Name)
	l.see(peerX, Node{}, peerX, voter2, voter3)
	l.wait(3500 * time.Millisecond)
	asked := said[*ReadRecords](l, voter2)
	before, now := asked[len(asked)-2].ID, asked[len(asked)-1].ID
	l.get(voter2, &Records{ID: now, Read: true})
	l.get(voter3, &Records{ID: now})
	l.get(voter3, &Records{ID: before, Read: true})
	expect.True(t, !l.core.voter.ready(), "an answer undoes a later one")
}
