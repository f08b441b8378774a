package ownership

import (
	"slices"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
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

// TestResolve: a copy entitles its keeper to go on only if it is of the process and term on record, with the keeper on
// record as its backup; otherwise strict keys start full.
func TestResolve(t *testing.T) {
	for _, c := range []struct {
		name     string
		copyOf   Node
		copyTerm Term
		records  [2]Record // of two voters
		cold     bool
	}{
		{"the recorded backup", peerX, term(5),
			[2]Record{{Term: term(5), Node: peerX, Backup: self}, {Term: term(5), Node: peerX, Backup: self}}, false},
		{"somebody else's copy", peerY, term(6),
			[2]Record{{Term: term(5), Node: peerX, Backup: self}, {Term: term(5), Node: peerX, Backup: self}}, true},
		{"an earlier copy", peerX, term(4),
			[2]Record{{Term: term(5), Node: peerX, Backup: self}, {Term: term(5), Node: peerX, Backup: self}}, true},
		{"another backup", peerX, term(5),
			[2]Record{{Term: term(5), Node: peerX, Backup: peerY}, {Term: term(5), Node: peerX, Backup: peerY}}, true},
		{"no backup", peerX, term(5), [2]Record{{Term: term(5), Node: peerX}, {Term: term(5), Node: peerX}}, true},
		{"voters that differ", peerX, term(5),
			[2]Record{{Term: term(5), Node: peerX, Backup: self}, {Term: term(5), Node: peerX}}, true},
		{"a record that is older", peerX, term(5),
			[2]Record{{Term: term(5), Node: peerX, Backup: self}, {Term: term(3), Node: peerY}}, false},
		{"no record", peerX, term(5), [2]Record{}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := withVoters(t)
			l.see(peerX, self, peerX, peerY, voter1, voter2, voter3)
			l.give(c.copyOf, wholeCopy(c.copyTerm, 10, ids(1)))
			l.see(self, Node{}, voter1, voter2, voter3)
			l.wait(150 * time.Millisecond)
			l.answer(func(Node) Info { return Info{} })
			l.owned(true)
			l.wait(20 * time.Millisecond)
			for i, v := range []Node{voter1, voter2} {
				l.vote(v, last[*GrantRequest](l, v), c.records[i])
			}
			must.True(t, l.lease() > l.now, "no lease")
			if pg := &l.data.parts[0]; pg.strictCold != c.cold || pg.strictTaken == c.cold {
				t.Errorf("strict keys start full: %v, what the lost holder may have admitted is charged: %v",
					pg.strictCold, pg.strictTaken)
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
		l.admits(1, 100*time.Millisecond)
		l.acks(peerX)
		must.True(t, len(l.confirmed) != 0, "nothing is confirmed")
		for _, c := range l.confirmed {
			expect.True(t, c.Unguarded == lapsed, "lapsed %v: confirmed %+v", lapsed, c)
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
	must.True(t, f.node == peerX && !f.caught, "the copy is not made again: %+v", f)
	l.core.evaluate(0)
	expect.True(t, l.lease() <= l.now, "strict rules are decided while the voters take for the backup who has no copy")
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
	must.True(t, l.lease() <= l.now, "the support for the lower term counts")
	l.wait(70 * time.Millisecond)
	last[*GrantRequest](l, voter2) // asked again, and not answered
	l.vote(voter2, first[0], Record{})
	expect.True(t, l.lease() > l.now, "no lease from two voters that have recorded this term")
	expect.True(t, l.data.parts[0].unguarded,
		"a majority has recorded that there is no backup, and answers wait for one")
}

// TestReleaseUnnamed: strict answers that wait when a partition is handed over are given only if the receiver is the
// backup on record.
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
		expect.True(t, len(l.confirmed) == 1 && l.confirmed[0].Version == versionsDone &&
			l.confirmed[0].Unguarded != named, "named %v: %+v", named, l.confirmed)
	}
}

// loses has it see its backup, x, no more, and nobody else in its place.
func (l *alone) loses() { l.see(self, Node{}, peerY, voter1, voter2, voter3) }

// finds has it see x as its backup.
func (l *alone) finds() { l.see(self, peerX, peerX, peerY, voter1, voter2, voter3) }

// TestWhole: what the first grant finds out about a partition's content, by how that came here and whose records the
// voters have replaced.
func TestWhole(t *testing.T) {
	const epoch = 3
	at := func(n uint64) Term { return Term{Epoch: epoch, N: n} }
	x5 := Record{Term: at(5), Node: peerX, Backup: self}
	for _, c := range []struct {
		name     string
		s        strictness
		replaced []Record
		cold     string
		taken    bool
	}{
		{"new", strictness{}, nil, "", false},
		{"nobody knows", strictness{earlier: true}, nil, "the voters have no record of who held it", false},
		{"another epoch", strictness{earlier: true, release: Release{peerX, term(5)}, releaseWhole: true},
			[]Record{{Term: term(5), Node: peerX}}, "the voters have begun a new epoch since", false},
		{"handed over", strictness{earlier: true, release: Release{peerX, at(5)}, releaseWhole: true}, []Record{x5}, "",
			false},
		{"handed over incomplete", strictness{earlier: true, release: Release{peerX, at(5)}}, []Record{x5},
			"it was handed over incomplete", false},
		{"claimed from the copy", strictness{earlier: true, copy: Position{at(5), 1}, from: peerX}, []Record{x5}, "",
			true},
		{"claimed without one", strictness{earlier: true}, []Record{x5},
			"another process held it and its copy is not here", false},
		{"two backups of an earlier term", strictness{earlier: true, copy: Position{at(5), 1}, from: peerX},
			[]Record{{Term: at(4), Node: peerY}, {Term: at(4), Node: peerY, Backup: peerX}, x5}, "", true},
		{"known before", strictness{earlier: true, wholeUnder: at(6)}, []Record{x5}, "", false},
		{"known before, in another epoch", strictness{earlier: true, wholeUnder: Term{Epoch: epoch - 1, N: at(6).N}},
			nil, "the voters have no record of who held it", false},
		{"known before, and another held it", strictness{earlier: true, wholeUnder: at(4)}, []Record{x5},
			"another process held it since", false},
		{"known before, and merged", strictness{earlier: true, wholeUnder: at(4), release: Release{peerX, at(5)},
			releaseWhole: true}, []Record{x5}, "", false},
		{"known before, and merged incomplete", strictness{earlier: true, wholeUnder: at(4),
			release: Release{peerX, at(5)}}, []Record{x5}, "another process held it since", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := newAlone(t, "v1", "v2", "v3", "v4", "v5")
			pt := &l.core.parts[0]
			pt.held, pt.term = true, at(7)
			pt.followers[Backup].named = true
			var support [maxVoters]int64
			for i, r := range c.replaced {
				c.s.replaced[i], support[i] = r, l.now+1
			}
			*pt.strict = c.s
			l.core.resolve(0, support)
			cold := ""
			for _, n := range l.core.out.Notes {
				cold = n.Detail
			}
			if pg := &l.data.parts[0]; cold != c.cold || pg.strictCold != (c.cold != "") || pg.strictTaken != c.taken {
				t.Errorf("%q, strict keys start full: %v, what the lost holder may have admitted is charged: %v", cold,
					pg.strictCold, pg.strictTaken)
			}
			expect.Equal(t, pt.followers[Backup].relabel, c.cold != "" || c.taken,
				"the backup is told of what has changed")
			s := pt.strict
			expect.True(t, s.whole && s.earlier && s.wholeUnder == pt.term, "afterwards: %+v", s)
		})
	}
}

// TestRaisedAgain: what is known of the content holds under any number of higher terms, the lease and the backup's name
// under none.
func TestRaisedAgain(t *testing.T) {
	l := granted(t)
	f := &l.core.parts[0].followers[Backup]
	f.clean = true // of a chunk in flight
	l.core.raise(0)
	if l.lease() > l.now || f.named || f.clean {
		t.Errorf("under a higher term: a lease for %v, %+v", time.Duration(l.lease()-l.now), f)
	}
	l.core.raise(0)
	for range 20 {
		l.acks(peerX)
		l.wait(20 * time.Millisecond)
		l.grants(Record{}, voter1, voter2)
	}
	if l.lease() <= l.now || l.data.parts[0].strictCold {
		t.Errorf("a lease for %v, strict keys start full: %v", time.Duration(l.lease()-l.now),
			l.data.parts[0].strictCold)
	}
}

// TestLateGrants: a grant counts for the term that it was asked for, from the voter that was asked.
func TestLateGrants(t *testing.T) {
	ask := func() (l *alone, first, second *GrantRequest) {
		l = withVoters(t)
		l.claims(self, Node{}, peerY, voter1, voter2, voter3)
		l.wait(50 * time.Millisecond)
		return l, last[*GrantRequest](l, voter1), last[*GrantRequest](l, voter2)
	}
	l, first, second := ask()
	l.core.raise(0)
	l.vote(voter1, first, Record{})
	l.vote(voter2, second, Record{})
	expect.True(t, l.lease() <= l.now, "support for an earlier term counts")
	l, first, second = ask()
	l.vote(voter1, first, Record{})
	l.vote(peerY, second, Record{})
	expect.True(t, l.lease() <= l.now, "the answer of one who was not asked counts")
	l.vote(voter2, second, Record{})
	expect.True(t, l.lease() > l.now, "no lease from two voters")
}

// TestUnheardBackup: while a voter has not answered who is to be recorded as the backup, it may have recorded that, and
// what it answered before says nothing.
func TestUnheardBackup(t *testing.T) {
	for _, late := range []bool{false, true} {
		l := withVoters(t)
		l.claims(self, peerX, peerX, peerY, voter1, voter2, voter3)
		if !late {
			l.acks(peerX)
		}
		l.wait(50 * time.Millisecond)
		first := [3]*GrantRequest{last[*GrantRequest](l, voter1), last[*GrantRequest](l, voter2),
			last[*GrantRequest](l, voter3)}
		n := first[0].Items[0].Backup
		must.Equal(t, n, Node{}, "%s is named before it has everything", n.Name)
		l.vote(voter1, first[0], Record{})
		l.vote(voter2, first[1], Record{})
		must.True(t, l.lease() > l.now, "no lease")
		if late {
			l.wait(time.Second)
			first = [3]*GrantRequest{last[*GrantRequest](l, voter1), last[*GrantRequest](l, voter2),
				last[*GrantRequest](l, voter3)}
		} else {
			l.vote(voter3, first[2], Record{})
		}
		for range 3 {
			l.acks(peerX)
			l.wait(20 * time.Millisecond)
		}
		l.wait(100 * time.Millisecond)
		q := last[*GrantRequest](l, voter3)
		must.Equal(t, q.Items[0].Backup, peerX, "asked: %+v", q.Items[0])
		if late {
			l.vote(voter1, first[0], Record{})
			l.vote(voter2, first[1], Record{})
			l.vote(voter3, first[2], Record{})
		}
		l.loses()
		expect.True(t, l.lease() <= l.now,
			"late %v: strict rules are decided while two voters may have recorded a backup that is lost", late)
		expect.True(t, !l.data.parts[0].unguarded,
			"late %v: answers do not wait while two voters may have recorded a backup", late)
	}
}

// TestRefusedGrant: a higher term is taken where what stands against this holder is gone for good, and only then.
func TestRefusedGrant(t *testing.T) {
	for _, c := range []struct {
		name   string
		by     Node
		wait   time.Duration
		raised bool
	}{
		{"gone", peerB, 0, true},
		{"gone, and not run out", peerB, time.Second, false},
		{"alive", peerY, 0, false},
	} {
		l := withVoters(t)
		l.claims(self, Node{}, peerY, voter1, voter2, voter3)
		l.wait(50 * time.Millisecond)
		q, held, recorded := last[*GrantRequest](l, voter1), l.route().Term, term(900)
		l.get(voter1, &GrantReply{ID: q.ID,
			Items: []GrantAnswer{{Term: held, Recorded: Record{Term: recorded, Node: c.by}, Wait: c.wait}}})
		if raised := l.route().Term != held; raised != c.raised {
			t.Errorf("%s: held at %v before and %v after the refusal", c.name, held, l.route().Term)
		}
		next := l.core.next(0)
		expect.True(t, recorded.Less(next), "%s: the next term is %v", c.name, next)
	}
}

// TestRefusedWhileFrozen: a partition that is being handed over stays frozen, whatever voters answer.
func TestRefusedWhileFrozen(t *testing.T) {
	l := withVoters(t)
	l.claims(self, peerX, peerX, peerY, voter1, voter2, voter3)
	l.acks(peerX)
	l.wait(100 * time.Millisecond)
	q := last[*GrantRequest](l, voter1)
	l.view(View{Leaving: true, Settled: true}, peerX, peerX, peerX, peerY, voter1, voter2, voter3)
	expect.True(t, !l.gives(peerX).Granted, "a content that was never under a grant is handed over as whole")
	l.get(voter1, &GrantReply{ID: q.ID, Epoch: 9, Items: []GrantAnswer{{Term: q.Items[0].Term}}})
	if l.route().Standing != Frozen {
		t.Errorf("a partition that may have been taken over is %+v", l.route())
	}
}

// TestAnotherBackup: before the backup is replaced nothing is decided under strict rules until it has confirmed
// everything; if it is not replaced after all, all goes on at once.
func TestAnotherBackup(t *testing.T) {
	l := granted(t)
	replaced := func() { l.see(self, peerY, peerX, peerY, voter1, voter2, voter3) }
	confirmed := func(version uint64) bool {
		return slices.ContainsFunc(l.confirmed, func(p Progress) bool { return !p.Unguarded && p.Version >= version })
	}
	ack := func() {
		l.entry(peerX)
		l.ack(peerX)
	}
	l.wait(time.Second) // the voters are asked, and have not answered
	l.admits(1, 50*time.Millisecond)
	l.entry(peerX)
	l.data.admit(0, 2)
	replaced()
	expect.True(t, l.lease() <= l.now, "strict rules are decided while the backup is being replaced")
	must.True(t, len(said[*GrantRequest](l, voter1)) != 0, "the voters were not asked")
	l.grants(Record{}, voter2, voter3)
	expect.True(t, l.lease() <= l.now, "a grant has strict rules decided while the backup is being replaced")
	l.finds()
	expect.True(t, l.lease() > l.now, "strict rules are not decided when the backup stays")
	replaced()
	l.ack(peerX)
	must.True(t, len(said[*Forget](l, peerX)) == 0, "the backup was told to forget before it had everything")
	expect.True(t, !confirmed(2), "what the backup does not have is confirmed")
	ack()
	expect.True(t, confirmed(2), "what the backup has is not confirmed: %+v", l.confirmed)
	last[*Forget](l, peerX)

	l = granted(t)
	l.data.admit(0, 1) // nothing is in flight
	replaced()
	l.finds()
	expect.True(t, l.lease() > l.now, "strict rules are not decided when the backup stays")
	replaced()
	ack()
	expect.True(t, confirmed(1), "what the backup has is not confirmed: %+v", l.confirmed)
}

// TestLostBackup: a lease ends with the copy that the voters have recorded, and answers wait for a copy again once
// there is one.
func TestLostBackup(t *testing.T) {
	l := granted(t)
	unguarded := func() bool { return l.data.parts[0].unguarded }
	lost := func() {
		t.Helper()
		l.loses()
		expect.True(t, l.lease() <= l.now, "strict rules are decided after the backup on record was lost")
		l.wait(100 * time.Millisecond)
		l.grants(Record{}, voter1)
		expect.True(t, !unguarded(), "answers do not wait when one voter has recorded that there is no backup")
		l.grants(Record{}, voter2, voter3)
		if l.lease() <= l.now || !unguarded() {
			t.Errorf("a lease for %v, and answers wait: %v, when the voters have recorded that there is no backup",
				time.Duration(l.lease()-l.now), !unguarded())
		}
	}
	lost()
	for id := range 450 { // several chunks
		l.data.admit(0, id)
	}
	l.finds()
	l.wait(250 * time.Millisecond)
	l.entry(peerX)
	l.ack(peerX)
	f := &l.core.parts[0].followers[Backup]
	expect.True(t, f.node == peerX && !f.named && !f.caught, "a backup that has the first chunk: %+v", f)
	l.acks(peerX)
	expect.True(t, !unguarded(), "answers do not wait for a backup that has everything")
	for range 10 {
		l.wait(20 * time.Millisecond)
		l.acks(peerX)
		l.grants(Record{}, voter1, voter2, voter3)
	}
	lost()
}

// leaveTo has the node leave and hand its partition to another, which has a copy of all but what the freeze brings.
func (l *alone) leaveTo(n Node) {
	l.view(View{Leaving: true, Settled: true}, n, peerX, peerX, peerY, voter1, voter2, voter3)
	l.wait(20 * time.Millisecond)
	l.accepts(n)
	l.acks(n)
	l.wait(10 * time.Millisecond)
}

// TestMoveConfirmsFirst: a partition is not given away before its backup has confirmed what was decided under strict
// rules.
func TestMoveConfirmsFirst(t *testing.T) {
	l := granted(t)
	l.admits(1, 50*time.Millisecond)
	l.entry(peerX)
	l.leaveTo(peerY)
	if r := l.route(); r.Standing != Frozen || len(said[*Commit](l, peerY)) > 0 {
		t.Fatalf("%+v, and given away before the backup has confirmed what was decided", r)
	}
	l.ack(peerX)
	last[*Commit](l, peerY)
}

// TestLateConfirmation: what the backup confirms while strict rules are closed counts for them until the lease's end,
// and then no more: it may be that another process has had the grant since.
func TestLateConfirmation(t *testing.T) {
	for _, late := range []bool{false, true} {
		l := granted(t)
		l.admits(1, 50*time.Millisecond)
		l.entry(peerX)
		lease := l.lease()
		l.leaveTo(peerY)
		if r := l.route(); r.Standing != Frozen || l.lease() > l.now || lease <= l.now {
			t.Fatalf("%+v, with a lease for %v", r, time.Duration(lease-l.now))
		}
		if late {
			l.now = lease
		}
		l.confirmed = nil
		l.ack(peerX)
		expect.True(t, len(l.confirmed) == 1 && l.confirmed[0].Unguarded == late,
			"after the lease's end: %v; confirmed: %+v", late, l.confirmed)
	}
}
