package store

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
)

// same fails the test where a copy does not hold what its holder does.
func (l *link) same(t *testing.T, what string, now time.Duration) {
	t.Helper()
	if got, want := contents(l.to, l.there(now)), contents(l.from, algo.Instant{Mono: int64(now), Wall: int64(now)}); !slices.Equal(got, want) {
		t.Errorf("%s: the copy holds %q, and the holder %q", what, got, want)
	}
}

// change calls f with the record of a key in partition 0.
func change(t *testing.T, s *Store, r *Rule, key string, f func(*partition, record)) {
	t.Helper()
	k := s.key(r.Scope, key)
	s.with(0, func(sh *shard, part *partition) {
		slot, ok := sh.find(&part.table, k.Hash, r.Scope, key)
		if !ok {
			t.Fatalf("no record of %s", key)
		}
		f(part, sh.record(part.ref(slot)))
	})
}

func TestApplyToWhatIsOpen(t *testing.T) {
	s := New(Config{})
	if err := s.Apply(0, false, at(0), sampleChunk(t)); !errors.Is(err, ErrHeld) {
		t.Errorf("%v, want %v", err, ErrHeld)
	}
	if n := s.Stats().Keys; n != 0 {
		t.Errorf("%d keys were taken in", n)
	}
}

// TestResetBesideLoanIsCopied: a key that is reset keeps its loans on the copy, too, and no more than these.
func TestResetBesideLoanIsCopied(t *testing.T) {
	holder, copied := New(Config{}), New(Config{Shut: true})
	l := newLink(holder, copied, ownership.Backup)
	l.sync(t, 0, true)
	r := rule("p", log(100, minute))
	decide(t, holder, r, "k", at(0), cost(50))
	borrow(t, holder, r, 0, Borrow{ID: loanID, Want: 16})
	l.sync(t, 0, false)
	if err := holder.Reset(holder.key("p", "k"), "p"); err != nil {
		t.Fatal(err)
	}
	l.sync(t, 0, false)
	if n := heldOf(copied, "p"); n != 16 {
		t.Errorf("%d are held on the copy, of 16", n)
	}
	l.same(t, "after a reset", 0)
	accounted(t, holder)
	accounted(t, copied)
}

// TestNothingOwedOnGone: what a holder may have admitted ahead on a key whose record it has dropped is not charged to a later one.
func TestNothingOwedOnGone(t *testing.T) {
	r := rule("p", window(100, time.Second/2))
	r.Durability = Escrow
	holder, copied, l := escrowed(t)
	spend(t, holder, r, 0)
	l.sync(t, 0, false)
	now := quietAfter / 2
	if holder.Sweep(at(now), 1) != 1 {
		t.Fatal("the record is not dropped")
	}
	l.sync(t, now, false)
	copied.TakeOver(0, l.there(now), claim(1, 2, 8))
	copied.Open(0)
	decide(t, copied, r, "k", l.there(now), cost(1))
	copied.TakeOver(0, l.there(now), claim(1, 3, 8))
	if d := decide(t, copied, r, "k", l.there(now), cost(0)); d.Remaining != 99 {
		t.Errorf("%d are left of 100 after 1", d.Remaining)
	}
}

// TestNothingOwedIsSwept: a copy whose holder has taken its allowance back keeps an idle record no longer than others.
func TestNothingOwedIsSwept(t *testing.T) {
	r := rule("p", window(100, minute))
	r.Durability = Escrow
	holder, copied, l := escrowed(t)
	spend(t, holder, r, 0)
	l.sync(t, 0, false)
	copied.Sweep(l.there(minute), 1)
	if n := copied.Stats().Keys; n != 1 {
		t.Errorf("%d keys are left on the copy, on one of which something is owed", n)
	}
	for now := time.Duration(0); now < 3*quietAfter; now += quietAfter {
		l.sync(t, now, false)
	}
	copied.Sweep(l.there(minute), 1)
	if n := copied.Stats().Keys; n != 0 {
		t.Errorf("%d keys are left on the copy, on which nothing is owed", n)
	}
}

// TestSweptStateIsLost: a reservation of a state that was dropped, because nothing was left in it, gives nothing back of a later one; nor does it on
// the copy.
func TestSweptStateIsLost(t *testing.T) {
	for _, copied := range []bool{false, true} {
		holder, copy := New(Config{}), New(Config{Shut: true})
		l := newLink(holder, copy, ownership.Backup)
		l.offset = 0
		l.sync(t, 0, true)
		r := rule("p", window(10, minute))
		decide(t, holder, r, "k", at(0), Call{Request: algo.Request{Cost: 3}, Reservation: reservationOf(1), ReserveFor: minute})
		l.sync(t, 0, false)
		if n, err := holder.Refund(holder.key("p", "k"), r, at(0), 3, "", ""); n != 3 || err != nil {
			t.Fatal(n, err)
		}
		s := holder
		if holder.Sweep(at(0), 1) != 1 {
			t.Fatal("the record is not dropped")
		}
		if copied {
			l.sync(t, 0, false)
			s = copy
			if n := s.Stats().Keys; n != 0 {
				t.Fatalf("the copy keeps %d keys", n)
			}
			s.TakeOver(0, at(0), claim(1, 2, 8))
			s.Open(0)
		}
		decide(t, s, r, "k", at(0), cost(4))
		if n, known, err := settle(s, s.key("p", "k"), r, at(0), reservationOf(1), 0); n != 0 || !known || err != nil {
			t.Errorf("copied %v: %d of another charge were given back (%v, %v)", copied, n, known, err)
		}
		if d := decide(t, s, r, "k", at(0), cost(0)); d.Remaining != 6 {
			t.Errorf("copied %v: %d are left of 10 after 4", copied, d.Remaining)
		}
	}
}

// TestHistoryIsCopied: a copy has its holder's claims, with their ages, and drops with it what is forgotten of them.
func TestHistoryIsCopied(t *testing.T) {
	holder, copied := New(Config{}), New(Config{Shut: true})
	l := newLink(holder, copied, ownership.Backup)
	r := rule("p", log(10, 3*time.Hour))
	holder.TakeOver(0, at(0), claim(1, 1, 7))
	decide(t, holder, r, "a", at(0), cost(1))
	holder.TakeOver(0, at(time.Hour), claim(1, 2, 7))
	decide(t, holder, r, "a", at(time.Hour), cost(1))
	holder.TakeOver(0, at(2*time.Hour), claim(1, 3, 7))
	decide(t, holder, r, "b", at(2*time.Hour), cost(1))
	l.sync(t, 2*time.Hour, true)
	history := func(now time.Duration, claims int) {
		t.Helper()
		l.same(t, "history", now)
		ages := make([][]time.Duration, 2)
		for i, s := range []*Store{holder, copied} {
			for _, e := range s.shards[0].parts[0].extras.lineage {
				ages[i] = append(ages[i], now-time.Duration(e.at))
				if i == 1 {
					ages[i][len(ages[i])-1] += l.offset
				}
			}
		}
		if !slices.Equal(ages[0], ages[1]) || len(ages[0]) != claims {
			t.Errorf("the holder's claims are of %v, the copy's of %v, want %d", ages[0], ages[1], claims)
		}
	}
	history(2*time.Hour, 3)
	now := 4*time.Hour + time.Second
	holder.Sweep(at(now), 1)
	l.sync(t, now, false)
	copied.Sweep(l.there(now), 1)
	history(now, 2)
	if h, c := holder.Stats().Keys, copied.Stats().Keys; h != c {
		t.Errorf("the copy has %d records, its holder %d", c, h)
	}
	accounted(t, copied)
}

// TestCopiedBanIsBounded: a ban lasts no longer than the rule says, whatever a chunk does.
func TestCopiedBanIsBounded(t *testing.T) {
	holder, copied := New(Config{}), New(Config{Shut: true})
	l := newLink(holder, copied, ownership.Backup)
	r := rule("p", log(1, minute))
	r.Ban = time.Hour
	decide(t, holder, r, "k", at(0), cost(1))
	change(t, holder, r, "k", func(_ *partition, rec record) { rec.ban(int64(100 * time.Hour)) })
	l.sync(t, 0, true)
	change(t, copied, r, "k", func(_ *partition, rec record) {
		if left := rec.banLeft(l.there(0)); left != time.Hour {
			t.Errorf("banned for %v, where bans last for an hour", left)
		}
	})
}

// TestCopiedRuleOfAnotherBan: rules that differ in their ban alone are not taken for each other.
func TestCopiedRuleOfAnotherBan(t *testing.T) {
	holder, copied := New(Config{}), New(Config{Shut: true})
	l := newLink(holder, copied, ownership.Backup)
	l.sync(t, 0, true)
	for _, ban := range []time.Duration{time.Minute, time.Hour} {
		r := rule("p", log(1, minute))
		r.Ban = ban
		for range 2 {
			decide(t, holder, r, ban.String(), at(0), cost(1))
		}
		l.sync(t, 0, false)
		l.same(t, ban.String(), 0)
	}
}

// TestChunkOfAnUnknownTable: a record that names a claim beyond those of its chunk is an error.
func TestChunkOfAnUnknownTable(t *testing.T) {
	s := New(Config{})
	r := rule("p", log(10, minute))
	s.TakeOver(0, at(0), claim(1, 1, 7))
	decide(t, s, r, "k", at(0), cost(1))
	change(t, s, r, "k", func(part *partition, rec record) { rec.setSince(len(part.extras.lineage)) })
	s.Attach(0, ownership.Backup, true)
	chunk, _, _ := s.Drain(0, ownership.Backup, at(0), 1<<20)
	if err := New(Config{Shut: true}).Apply(0, false, at(0), chunk); !errors.Is(err, ErrChunk) {
		t.Errorf("%v, want %v", err, ErrChunk)
	}
}

// TestReservationsBeyondTheCopysBound: where a copy had no room for a reservation of a key, later ones of it give back their own units.
func TestReservationsBeyondTheCopysBound(t *testing.T) {
	holder, copied := New(Config{}), New(Config{Shut: true, MaxReservations: 2})
	l := newLink(holder, copied, ownership.Backup)
	l.offset = 0
	l.sync(t, 0, true)
	r := rule("p", log(100, minute))
	reserve := func(s *Store, key string, id uint64, now time.Duration, n int64) {
		t.Helper()
		a, err := s.Decide(s.key("p", key), r, at(now), Call{Request: algo.Request{Cost: n}, Reservation: reservationOf(id), ReserveFor: minute}, nil)
		if err != nil || !a.Allowed {
			t.Fatal(a, err)
		}
	}
	for i, key := range []string{"other", "k", "k"} {
		reserve(holder, key, uint64(i+1), time.Duration(i)*time.Second, int64(10*(i+1)))
		l.sync(t, time.Duration(i)*time.Second, false)
	}
	copied.TakeOver(0, at(3*time.Second), claim(1, 2, 8))
	copied.Open(0)
	if n, known, err := settle(copied, copied.key("p", "other"), r, at(3*time.Second), reservationOf(1), 0); n != 10 || !known || err != nil {
		t.Fatal(n, known, err)
	}
	reserve(copied, "k", 4, 4*time.Second, 5)
	if n, known, err := settle(copied, copied.key("p", "k"), r, at(5*time.Second), reservationOf(4), 0); n != 5 || !known || err != nil {
		t.Errorf("%d were given back of 5 (%v, %v)", n, known, err)
	}
	// The units of the one that is not known are in use for as long as they would be without it.
	if d := decide(t, copied, r, "k", at(62*time.Second-1), cost(0)); d.Remaining != 70 {
		t.Errorf("%d are left of 100 beside 30", d.Remaining)
	}
}

// TestCopyWithoutRoomForChanges: a copy that has no memory for what is new in a record that it has is of no use, and says so.
func TestCopyWithoutRoomForChanges(t *testing.T) {
	holder, copied := New(Config{}), New(Config{Shut: true, MaxBytes: 64 << 10})
	l := newLink(holder, copied, ownership.Backup)
	l.sync(t, 0, true)
	r := rule("p", log(1<<20, time.Hour))
	for i := range time.Duration(100) {
		for j := range 200 * time.Millisecond / time.Millisecond {
			decide(t, holder, r, "k", at(i*time.Second+j*5*time.Millisecond), cost(1))
		}
		chunk, version, _ := holder.Drain(0, ownership.Backup, at((i+1)*time.Second), 1<<20)
		switch err := copied.Apply(0, false, l.there((i+1)*time.Second), chunk); {
		case errors.Is(err, ErrCopyFull):
			if n := copied.Stats().Keys; n != 1 {
				t.Errorf("%d keys are left on the copy", n)
			}
			return
		case err != nil:
			t.Fatal(err)
		}
		holder.Confirm(0, ownership.Backup, version)
	}
	t.Error("all was copied")
}
