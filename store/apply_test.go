package store

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// same fails the test where a copy does not hold what its holder does.
func (l *link) same(t *testing.T, what string, now time.Duration) {
	t.Helper()
	got, want := contents(l.to, l.there(now)), contents(l.from, algo.Instant{Mono: int64(now), Wall: int64(now)})
	expect.True(t, slices.Equal(got, want), "%s: the copy holds %q, and the holder %q", what, got, want)
}

// change calls f with the record of a key in partition 0.
func change(t *testing.T, s *Store, r *Rule, key string, f func(*partition, record)) {
	t.Helper()
	k := s.key(r.Scope, key)
	s.with(0, func(sh *shard, part *partition) {
		slot, ok := sh.find(&part.table, k.Hash, r.Scope, key)
		must.True(t, ok, "no record of %s", key)
		f(part, sh.record(part.ref(slot)))
	})
}

func TestApplyToWhatIsOpen(t *testing.T) {
	s := New(Config{})
	expect.ErrorIs(t, s.Apply(0, false, at(0), sampleChunk(t)), ErrHeld)
	expect.Equal(t, s.Stats().Keys, 0, "keys were taken in")
}

// TestResetBesideLoanIsCopied: a key that is reset keeps its loans on the copy, too, and no more than these.
func TestResetBesideLoanIsCopied(t *testing.T) {
	holder, copied, l := followed(t)
	r := rule("p", log(100, minute))
	decide(t, holder, r, "k", at(0), cost(50))
	borrow(t, holder, r, 0, Borrow{ID: loanID, Want: 16})
	l.sync(t, 0, false)
	must.NoError(t, holder.Reset(holder.key("p", "k"), "p"))
	l.sync(t, 0, false)
	expect.Equal(t, onLoanOf(copied, "p"), 16, "are on loan on the copy, of 16")
	l.same(t, "after a reset", 0)
	accounted(t, holder)
	accounted(t, copied)
}

// TestNothingOwedIsSwept: a copy whose holder has taken its allowance back keeps an idle record no longer than others.
func TestNothingOwedIsSwept(t *testing.T) {
	_, _, copied, l := allowed(t, minute)
	copied.Sweep(l.there(minute), 1)
	expect.Equal(t, copied.Stats().Keys, 1, "keys are left on the copy, on one of which something is owed")
	for now := time.Duration(0); now < 3*quietAfter; now += quietAfter {
		l.sync(t, now, false)
	}
	copied.Sweep(l.there(minute), 1)
	expect.Equal(t, copied.Stats().Keys, 0, "keys are left on the copy, on which nothing is owed")
}

// TestReservedStateIsKept: a record in which nothing is left is not swept while a reservation of it is pending, neither
// at the holder nor on the copy.
func TestReservedStateIsKept(t *testing.T) {
	holder, copied, l := followed(t)
	r := rule("p", window(10, time.Second))
	decide(t, holder, r, "k", at(0), reserveFor(1, 3, minute))
	l.sync(t, 0, false)
	late := 10 * time.Second
	dropped := holder.Sweep(at(late), 1) + copied.Sweep(l.there(late), 1)
	expect.Equal(t, dropped, 0, "records are dropped")
	take(copied, l.there(late))
	for s, now := range map[*Store]algo.Instant{holder: at(late), copied: l.there(late)} {
		out, err := s.Settle(s.key("p", "k"), r, now, Settlement{ID: reservationOf(1), Keep: 4})
		expect.True(t, out.Known && out.Excess == 1 && err == nil, "%+v, %v", out, err)
		expect.Equal(t, s.Sweep(algo.Instant{Mono: now.Mono + int64(minute)}, 1), 1, "records are dropped afterwards")
	}
}

// TestCopiedBanIsBounded: a ban lasts no longer than the rule says, whatever a chunk does.
func TestCopiedBanIsBounded(t *testing.T) {
	holder, copied := New(Config{}), New(Config{Shut: true})
	l := newLink(holder, copied, ownership.Backup)
	r := rule("p", log(1, minute)).banning(time.Hour)
	decide(t, holder, r, "k", at(0), cost(1))
	change(t, holder, r, "k", func(_ *partition, rec record) { rec.ban(int64(100 * time.Hour)) })
	l.sync(t, 0, true)
	change(t, copied, r, "k", func(_ *partition, rec record) {
		left := rec.banLeft(l.there(0))
		expect.True(t, left == time.Hour, "banned for %v, where bans last for an hour", left)
	})
}

// TestCopiedRuleOfAnotherBan: rules that differ in their ban alone are not taken for each other.
func TestCopiedRuleOfAnotherBan(t *testing.T) {
	holder, _, l := followed(t)
	for _, ban := range []time.Duration{time.Minute, time.Hour} {
		r := rule("p", log(1, minute)).banning(ban)
		for range 2 {
			decide(t, holder, r, ban.String(), at(0), cost(1))
		}
		l.sync(t, 0, false)
		l.same(t, ban.String(), 0)
	}
}

// TestCopyWithoutRoomForChanges: a copy that has no memory for what is new in a record that it has is of no use, and
// says so.
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
			expect.Equal(t, copied.Stats().Keys, 1, "keys are left on the copy")
			return
		case err != nil:
			t.Fatal(err)
		}
		holder.Confirm(0, ownership.Backup, version)
	}
	t.Error("all was copied")
}

// TestVersionOfEachChange: what changes a partition, or who follows it, raises its version above all that it had there.
func TestVersionOfEachChange(t *testing.T) {
	s, other := New(Config{}), New(Config{})
	r := rule("p", log(5, minute))
	decide(t, other, r, "k", at(0), cost(1))
	stage := func() { stage(t, other, s, at(0), 1<<20) }
	own := func() uint64 { return s.shards[0].partitions[0].extras.version }
	decide(t, s, r, "k", at(0), cost(1))
	before := uint64(0)
	for i, step := range []struct {
		name string
		do   func()
	}{
		{"Attach", func() { s.Attach(0, ownership.Backup, false) }},
		{"Widen", func() { s.Widen(0, ownership.Backup) }},
		{"Reset", func() { s.Reset(s.key("p", "k"), "p") }},
		{"Cold", func() { s.Cold(0, at(0)) }},
		{"Detach", func() { s.Detach(0, ownership.Backup) }},
		{"AttachCurrent", func() { s.AttachCurrent(0, ownership.Backup, true) }},
		{"Detach again", func() { s.Detach(0, ownership.Backup) }},
		{"TakeOver", func() { s.TakeOver(0, at(0)) }},
		{"Open", func() { s.Shut(0); s.Open(0) }},
		{"Merge", func() { stage(); must.NoError(t, s.Merge(0, at(0))) }},
		{"Attach to what was promoted", func() { stage(); s.Promote(0); s.Attach(0, ownership.Backup, true) }},
		{"Open of what was promoted", func() { s.Shut(0); stage(); s.Promote(0); s.Open(0) }},
		{"TakeOver of what was promoted", func() { s.Shut(0); stage(); s.Promote(0); s.TakeOver(0, at(0)) }},
		{"Merge after that", func() { stage(); must.NoError(t, s.Merge(0, at(0))) }},
	} {
		if step.do(); i > 0 && own() <= before {
			t.Errorf("%s: version %d, after %d", step.name, own(), before)
		}
		before = own()
	}
}

// TestTwoHashesOfOneKey: a key that comes under two hashes, of which a member that keeps to the protocol knows one, has
// the reservations and loans of one of its records.
func TestTwoHashesOfOneKey(t *testing.T) {
	bucket := algo.Limit{Algorithm: algo.TokenBucket, Limit: 200, Window: minute}
	one, two := rule("p", bucket), rule("p", log(300, minute), bucket)
	for _, merge := range []bool{false, true} {
		s := New(Config{Shut: true})
		k := s.key("p", "k")
		for i, r := range []*Rule{one, two, one} {
			k.Hash++
			from := New(Config{})
			from.Attach(0, ownership.Backup, true)
			must.Value(from.Decide(k, r, at(0), reserveFor(uint64(i+1), 2, minute), nil))(t)
			lent := must.Value(from.Lend(k, r, at(0), Borrow{ID: algo.LoanID{Borrower: 1}, Want: 20}))(t)
			must.True(t, lent.OnLoan > 0, "nothing is lent")
			chunk, _, _ := from.Drain(0, ownership.Backup, at(0), 1<<20)
			must.NoError(t, s.Apply(0, merge, at(0), chunk))
			if merge {
				must.NoError(t, s.Merge(0, at(0)))
			}
		}
		s.Attach(0, ownership.Target, true)
		s.Drain(0, ownership.Target, at(0), 1<<20)
		s.Open(0)
		for range 3 {
			for i, r := range []*Rule{one, two, one} {
				decide(t, s, r, "k", at(1), cost(1))
				must.Value(s.Decide(k, r, at(1), cost(1), nil))(t)
				must.NoError(t, expect.Err(s.Settle(k, r, at(1), Settlement{ID: reservationOf(uint64(i + 1))})))
			}
			k.Hash--
		}
		s.Sweep(at(time.Hour), 1)
		expect.Equal(t, s.Stats().Reservations, 0, "reservations are left")
		accounted(t, s)
	}
}
