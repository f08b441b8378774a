package store

import (
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// followed is a holder of one partition, and a backup that has all of it.
func followed(t *testing.T) (holder, copied *Store, l *link) {
	t.Helper()
	holder, copied = New(Config{}), New(Config{Shut: true})
	l = newLink(holder, copied, ownership.Backup)
	holder.TakeOver(0, at(0))
	l.sync(t, 0, true)
	return holder, copied, l
}

// left is what a key has left once its holder is lost.
func left(t *testing.T, copied *Store, r *Rule, now time.Duration, l *link) int64 {
	t.Helper()
	take(copied, l.there(now))
	a := must.Value(copied.Decide(copied.key(r.Scope, "k"), r, l.there(now), cost(0), nil))(t)
	return a.Remaining
}

// spend admits one unit after another until an answer would have to wait, and returns how many did not.
func spend(t *testing.T, s *Store, r *Rule, now time.Duration) (n int64) {
	t.Helper()
	for {
		a := must.Value(s.Decide(s.key(r.Scope, "k"), r, at(now), cost(1), nil))(t)
		if !a.Allowed || a.Ticket > 0 {
			return n
		}
		n++
	}
}

// allowed is a holder whose key k, with 100 units a window under escrow, has an allowance.
func allowed(t *testing.T, w time.Duration) (r *Rule, holder, copied *Store, l *link) {
	t.Helper()
	r = rule("p", window(100, w)).under(Escrow)
	holder, copied, l = followed(t)
	spend(t, holder, r, 0)
	l.sync(t, 0, false)
	return r, holder, copied, l
}

// TestAllowance: what may be admitted ahead of the copy is two twentieths of the smallest limit, and the copy charges
// it.
func TestAllowance(t *testing.T) {
	r := rule("p", window(10000, time.Hour), window(100, minute)).under(Escrow)
	holder, copied, l := followed(t)
	spend(t, holder, r, 0)
	l.sync(t, 0, false)
	expect.Equal(t, spend(t, holder, r, 0), 10, "were admitted ahead")
	expect.Equal(t, left(t, copied, r, 0, l), 100-1-10, "are left of 100 after 1 and an allowance of 10")
}

// TestAllowanceOfReset: a key that was reset has none, for the copy has forgotten it.
func TestAllowanceOfReset(t *testing.T) {
	r, holder, copied, l := allowed(t, minute)
	must.NoError(t, holder.Reset(holder.key("p", "k"), "p"))
	l.sync(t, 0, false)
	n := spend(t, holder, r, 0)
	left := left(t, copied, r, 0, l)
	expect.True(t, n+left <= 100, "%d were admitted after a reset, and %d more are by who takes over", n, left)
	accounted(t, holder)
}

// TestAllowanceOfGone: neither has a key whose record was dropped, once the copy has been told.
func TestAllowanceOfGone(t *testing.T) {
	r, holder, copied, l := allowed(t, time.Second/2)
	now := quietAfter + time.Second/2
	must.Equal(t, holder.Sweep(at(now), 1), 1, "the record is not dropped")
	l.sync(t, now, false)
	n := spend(t, holder, r, now)
	left := left(t, copied, r, now, l)
	expect.True(t, n+left <= 100, "%d were admitted ahead, and %d more are by who takes over", n, left)
	accounted(t, holder)
}

// TestVersionsRise: a ticket of an earlier content is not given again for a later one.
func TestVersionsRise(t *testing.T) {
	r := rule("p", window(100, minute)).under(Sync)
	s := New(Config{})
	var last uint64
	for range 3 {
		s.Open(0)
		s.Attach(0, ownership.Backup, true)
		s.Caught(0, ownership.Backup)
		for range 5 {
			a, err := s.Decide(s.key("p", "k"), r, at(0), cost(1), nil)
			must.True(t, err == nil && a.Ticket > last, "ticket %d after %d: %v", a.Ticket, last, err)
			last = a.Ticket
		}
		s.Discard(0)
		v := s.Version(0)
		expect.True(t, v >= last, "version %d after a ticket of %d", v, last)
	}
}

// TestMergeRequestIDs: an id that one side has charged is known after the merge.
func TestMergeRequestIDs(t *testing.T) {
	r := rule("p", log(10, minute))
	s := newSplit(t, 2, r)
	s.fork(0, 1)
	call := Call{RequestID: "id"}
	call.Cost = 3
	for i := range 2 { // both may lose
		call.RequestID += "'"
		p := s.parties[i].store
		must.True(t, must.Value(p.Decide(p.key("p", "k"), r, at(s.now), call, nil))(t).Allowed, "refused")
	}
	s.merge(0, 1)
	p := s.parties[1].store
	call.RequestID = "id"
	for range 2 {
		call.RequestID += "'"
		if a, err := p.Decide(p.key("p", "k"), r, at(s.now), call, nil); err != nil || !a.Allowed || a.Remaining != 7 {
			t.Errorf("id %q: %+v, %v; want it to be known", call.RequestID, a.Decision, err)
		}
	}
}

// TestInheritedAtShut: what a lost holder may have admitted to strict rules stays owed, also to the backup of who has
// handed the partition over, until it is certain that it admits no more.
func TestInheritedAtShut(t *testing.T) {
	strict, plain := rule("strict", window(100, minute)), rule("plain", window(100, minute))
	strict.Durability, strict.Strict, plain.Durability = Escrow, true, Escrow
	holder, claimant, l := followed(t)
	holder.Lease(0, int64(time.Hour))
	spend(t, holder, strict, 0)
	l.sync(t, 0, false)
	take(claimant, l.there(0))
	backup := New(Config{Shut: true})
	m := newLink(claimant, backup, ownership.Backup)
	m.offset = 0
	m.sync(t, l.offset, true)
	spend(t, claimant, plain, l.offset)
	m.sync(t, l.offset, false)
	claimant.Shut(0)
	m.sync(t, l.offset, false)
	backup.TakeOver(0, l.there(0))
	backup.TakeOverStrict(0, l.there(0))
	backup.Open(0)
	grant(backup)
	for r, want := range map[*Rule]int64{strict: 100 - 1 - 10, plain: 100 - 1} {
		d := decide(t, backup, r, "k", l.there(0), cost(0))
		expect.True(t, d.Remaining == want, "%s: %d are left, want %d", r.Scope, d.Remaining, want)
	}
}

// TestAllowanceAfterSplit: what a lost holder may have admitted to strict rules ahead of its backup's copy counts as
// well once the backup, which has charged it, is merged with a process that had claimed the partition by a copy that
// came without an allowance: the receiver of a move that was in flight.
func TestAllowanceAfterSplit(t *testing.T) {
	r := rule("p", window(100, minute)).under(Escrow).strict()
	holder, backup, l := followed(t)
	receiver := New(Config{Shut: true})
	m := newLink(holder, receiver, ownership.Target)
	grant(holder)
	spend(t, holder, r, 0)
	l.sync(t, 0, false)
	m.sync(t, 0, true)
	l.sync(t, 0, false)
	take(receiver, l.there(0))
	ahead := spend(t, holder, r, 0) // and it is lost
	must.True(t, ahead != 0, "nothing was admitted ahead")
	backup.TakeOver(0, l.there(0))
	backup.TakeOverStrict(0, l.there(0))
	stage(t, backup, receiver, l.there(0), 1<<20)
	must.NoError(t, receiver.Merge(0, l.there(0)))
	grant(receiver)
	a := must.Value(receiver.Decide(receiver.key("p", "k"), r, l.there(0), cost(0), nil))(t)
	spent := 1 + ahead
	expect.True(t, a.Remaining <= 100-spent, "%d are left of 100, of which %d were admitted", a.Remaining, spent)
}

// TestAllowanceIsOfTheCapacity: of a bucket that holds less than its limit, allowances are a part of what it holds.
func TestAllowanceIsOfTheCapacity(t *testing.T) {
	limits := algo.Limits{{Algorithm: algo.TokenBucket, Limit: 1000, Window: minute, Capacity: 40}, log(100, minute)}
	n := chunkOf(limits)
	expect.True(t, n == 2, "told in chunks of %d, where the bucket holds 40", n)
}

// TestNoAllowanceOfOthers: neither who gets the partition by a move is told of allowances nor a copy of keys that have
// come under another durability.
func TestNoAllowanceOfOthers(t *testing.T) {
	r, holder, copied, l := allowed(t, minute)
	receiver := New(Config{Shut: true})
	m := newLink(holder, receiver, ownership.Target)
	m.sync(t, 0, true)
	l.sync(t, 0, false)
	expect.Equal(t, left(t, receiver, r, 0, m), 99, "are left of 100 after 1, at the receiver of a move")
	waits := rule("p", window(100, minute)).under(Sync)
	decide(t, holder, waits, "k", at(0), cost(1))
	l.sync(t, 0, false)
	expect.Equal(t, left(t, copied, waits, 0, l), 98, "are left of 100 after 2, of which none was admitted ahead")
}

// TestOwedIsChargedBesideReservations: a cancel takes nothing of what was charged because it may have been admitted,
// and the followers of who has taken over hear of that charge.
func TestOwedIsChargedBesideReservations(t *testing.T) {
	r := rule("p", window(100, minute)).under(Escrow).strict()
	holder, copied, l := followed(t)
	l.offset = 0
	holder.Lease(0, int64(time.Hour))
	decide(t, holder, r, "k", at(0), reserveFor(1, 1, minute))
	l.sync(t, 0, false)
	take(copied, at(5*time.Second))
	copied.Lease(0, int64(time.Hour))
	backup := New(Config{Shut: true})
	m := newLink(copied, backup, ownership.Backup)
	m.offset = 0
	m.sync(t, 5*time.Second, true)
	copied.TakeOverStrict(0, at(10*time.Second))
	m.sync(t, 10*time.Second, false)
	m.same(t, "charged", 10*time.Second)
	n, known, err := settle(copied, copied.key("p", "k"), r, at(20*time.Second), reservationOf(1), 0)
	must.True(t, n == 1 && known && err == nil, "%v %v %v", n, known, err)
	d := decide(t, copied, r, "k", at(20*time.Second), cost(0))
	expect.True(t, d.Remaining == 90 && d.ResetAfter == 40*time.Second, "%+v, want 10 in use for 40s more", d)
}

// TestNothingOwedAfterALoss: who takes every key of strict rules for used up charges nothing besides.
func TestNothingOwedAfterALoss(t *testing.T) {
	r := rule("p", log(100, minute)).under(Escrow).strict()
	holder, copied, l := followed(t)
	l.offset = 0
	holder.Lease(0, int64(time.Hour))
	spend(t, holder, r, 0)
	l.sync(t, 0, false)
	take(copied, at(0))
	grant(copied)
	copied.ColdStrict(0, at(time.Second))
	copied.TakeOverStrict(0, at(30*time.Second))
	d := decide(t, copied, r, "k", at(30*time.Second), cost(0))
	expect.Equal(t, d.Remaining, 0, "are left, and none is known to be")
	d = decide(t, copied, r, "k", at(61*time.Second), cost(0))
	expect.Equal(t, d.Remaining, 100, "are left of 100 when all is over")
}

// TestAllowanceOfMissedMessages: an allowance is given back also if the backup has confirmed late, and the key has used
// up what earlier messages allowed.
func TestAllowanceOfMissedMessages(t *testing.T) {
	for _, move := range []bool{false, true} {
		r := rule("p", window(100, time.Hour)).under(Escrow)
		holder, copied, l := followed(t)
		for range 5 {
			for range 5 {
				decide(t, holder, r, "k", at(0), cost(1))
			}
			l.drain(0)
		}
		staged := false
		for len(l.queue) > 0 {
			l.deliver(t, 0, &staged)
		}
		now := 2 * quietAfter
		if move {
			now = 0
			holder.Shut(0)
		}
		for range 3 {
			l.sync(t, now, false)
			now += quietAfter
		}
		_, part := copied.at(0)
		expect.True(t, len(part.extras.owed) == 0, "move %v: the copy counts %v as spent ahead", move, part.extras.owed)
		_, part = holder.at(0)
		expect.True(t, len(part.role.advances.by) == 0, "move %v: an allowance is left", move)
		accounted(t, holder)
	}
}
