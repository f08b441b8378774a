package ownership

import (
	"testing"
	"time"
)

// The tests in this file each break when one rule of grants is left out: test/mutants leaves it out.

func withVoters(t *testing.T) *alone { return newAlone(t, voter1.Name, voter2.Name, voter3.Name) }

// granted brings it to where it holds the partition under a grant, with x as its backup, on record as such.
func granted(t *testing.T) *alone {
	t.Helper()
	l := withVoters(t)
	l.claims(self, peerX, peerX, peerY, voter1, voter2, voter3)
	for range 20 {
		l.acks(peerX)
		l.wait(20 * time.Millisecond)
		l.grants(Record{}, voter1, voter2, voter3)
	}
	if f := &l.core.parts[0].followers[Backup]; l.lease() <= l.now || !f.caught || !f.named {
		t.Fatalf("lease for %v, %+v", time.Duration(l.lease()-l.now), f)
	}
	said[*GrantRequest](l, Node{})
	l.confirmed = nil
	return l
}

func (l *alone) lease() int64 { return l.data.parts[0].lease }

// TestResolve: a copy entitles its keeper to go on only if it is of the process and term on record, with the keeper on record as
// its backup; otherwise strict keys start full.
func TestResolve(t *testing.T) {
	for _, c := range []struct {
		name     string
		copyOf   Node
		copyTerm Term
		records  [2]Record // of two voters
		cold     bool
	}{
		{"the recorded backup", peerX, term(5), [2]Record{{Term: term(5), Node: peerX, Backup: self}, {Term: term(5), Node: peerX, Backup: self}}, false},
		{"somebody else's copy", peerY, term(6), [2]Record{{Term: term(5), Node: peerX, Backup: self}, {Term: term(5), Node: peerX, Backup: self}}, true},
		{"an earlier copy", peerX, term(4), [2]Record{{Term: term(5), Node: peerX, Backup: self}, {Term: term(5), Node: peerX, Backup: self}}, true},
		{"another backup", peerX, term(5), [2]Record{{Term: term(5), Node: peerX, Backup: peerY}, {Term: term(5), Node: peerX, Backup: peerY}}, true},
		{"no backup", peerX, term(5), [2]Record{{Term: term(5), Node: peerX}, {Term: term(5), Node: peerX}}, true},
		{"voters that differ", peerX, term(5), [2]Record{{Term: term(5), Node: peerX, Backup: self}, {Term: term(5), Node: peerX}}, true},
		{"a record that is older", peerX, term(5), [2]Record{{Term: term(5), Node: peerX, Backup: self}, {Term: term(3), Node: peerY}}, false},
		{"no record", peerX, term(5), [2]Record{}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := withVoters(t)
			l.see(peerX, self, peerX, peerY, voter1, voter2, voter3)
			l.get(c.copyOf, wholeCopy(c.copyTerm, 10, ids(1)))
			l.see(self, Node{}, voter1, voter2, voter3)
			l.wait(150 * time.Millisecond)
			l.answer(func(Node) Info { return Info{} })
			l.owned(true)
			l.wait(20 * time.Millisecond)
			for i, v := range []Node{voter1, voter2} {
				l.vote(v, last[*GrantRequest](l, v), c.records[i])
			}
			if l.lease() <= l.now {
				t.Fatal("no lease")
			}
			if pg := &l.data.parts[0]; pg.strictCold != c.cold || pg.strictTaken == c.cold {
				t.Errorf("strict keys start full: %v, what the lost holder may have admitted is charged: %v", pg.strictCold, pg.strictTaken)
			}
		})
	}
}

// TestLapsed: what a backup confirms once the grant is over does not count for strict answers.
func TestLapsed(t *testing.T) {
	for _, lapsed := range []bool{false, true} {
		l := granted(t)
		if lapsed {
			l.wait(3100 * time.Millisecond)
			l.acks(peerX)
			l.confirmed = nil
		}
		l.data.admit(0, 1)
		l.wait(100 * time.Millisecond)
		l.acks(peerX)
		if len(l.confirmed) == 0 {
			t.Fatal("nothing is confirmed")
		}
		for _, c := range l.confirmed {
			if c.Unguarded != lapsed {
				t.Errorf("lapsed %v: confirmed %+v", lapsed, c)
			}
		}
	}
}

// TestNewCopy: while the recorded backup has no current copy, no support counts.
func TestNewCopy(t *testing.T) {
	l := granted(t)
	l.data.admit(0, 1)
	l.wait(100 * time.Millisecond) // the backup does not answer
	l.wait(time.Duration(stall + retryAfter + lookEvery))
	f := &l.core.parts[0].followers[Backup]
	if f.node != peerX || f.caught {
		t.Fatalf("the copy is not made again: %+v", f)
	}
	l.core.evaluate(0)
	if l.lease() > l.now {
		t.Error("strict rules are decided while the voters take for the backup who has no copy")
	}
}

// TestRaised: support for a lower term is none, and what was recorded under it says nothing.
func TestRaised(t *testing.T) {
	l := granted(t)
	l.see(self, Node{}, peerY, voter1, voter2, voter3) // the backup is lost
	l.wait(100 * time.Millisecond)
	q := last[*GrantRequest](l, voter1)
	before := l.route().Term
	l.get(voter1, &GrantReply{ID: q.ID, Epoch: 7, Items: []GrantAnswer{{Term: q.Items[0].Term}}})
	if l.route().Term.Epoch != 7 {
		t.Fatalf("held at %v, before at %v", l.route().Term, before)
	}
	said[*GrantRequest](l, Node{})
	l.wait(70 * time.Millisecond)
	first := [2]*GrantRequest{last[*GrantRequest](l, voter2), last[*GrantRequest](l, voter3)}
	l.vote(voter3, first[1], Record{})
	if l.lease() > l.now {
		t.Fatal("the support for the lower term counts")
	}
	l.wait(70 * time.Millisecond)
	last[*GrantRequest](l, voter2) // asked again, and not answered
	l.vote(voter2, first[0], Record{})
	if l.lease() <= l.now {
		t.Error("no lease from two voters that have recorded this term")
	}
	if !l.data.parts[0].unguarded {
		t.Error("a majority has recorded that there is no backup, and answers wait for one")
	}
}

// TestReleaseUnnamed: strict answers that wait when a partition is handed over are given only if the receiver is the backup on
// record.
func TestReleaseUnnamed(t *testing.T) {
	for _, named := range []bool{true, false} {
		var l *alone
		if named {
			l = granted(t)
		} else {
			l = withVoters(t)
			l.claims(self, peerX, peerX, peerY, voter1, voter2, voter3)
			l.acks(peerX)
		}
		l.view(View{Leaving: true, Settled: true}, peerX, peerX, peerX, peerY, voter1, voter2, voter3)
		c := l.gives(peerX)
		l.confirmed = nil
		l.get(peerX, &CommitAck{Term: c.Term, Outcome: Done, New: c.Known.after(peerX.Boot)})
		l.owned(false)
		if len(l.confirmed) != 1 || l.confirmed[0].Version != versionsDone || l.confirmed[0].Unguarded == named {
			t.Errorf("named %v: %+v", named, l.confirmed)
		}
	}
}
