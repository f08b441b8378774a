package store

import (
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
)

// sharing returns two keys of one hash.
func sharing(s *Store) (a, b Key) {
	a = s.key("p", "a")
	b = a
	b.Key = "b"
	return a, b
}

// What belongs to one key is not found under another one of the same hash.
func TestAHashIsNoIdentity(t *testing.T) {
	s := New(Config{})
	r := rule("p", log(5, minute))
	a, b := sharing(s)
	charge := func(k Key, call Call) Answer {
		t.Helper()
		got, err := s.Decide(k, r, at(0), call, nil)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	charge(b, cost(5))
	reserved := cost(3)
	reserved.Reservation, reserved.ReserveFor, reserved.RequestID = reservationOf(1), minute, "r"
	if !charge(a, reserved).Allowed {
		t.Fatal("not reserved")
	}
	if _, known, err := s.Settle(b, r, at(0), reservationOf(1), 0); known || err != nil {
		t.Errorf("cancelled under another key: %v, %v", known, err)
	}
	repeated := cost(3)
	repeated.RequestID = "r"
	if got := charge(b, repeated); got.Allowed || got.Pending {
		t.Errorf("another key's request id admits: %+v", got)
	}
	if n, err := s.Refund(a, r, at(0), 1, "back"); n != 1 || err != nil {
		t.Fatalf("refund: %d, %v", n, err)
	}
	if n, err := s.Refund(a, r, at(0), 1, "back"); n != 1 || err != nil {
		t.Errorf("refund, repeated: %d, %v", n, err)
	}
	if _, err := s.Refund(a, r, at(0), 2, "back"); err != ErrRequestID {
		t.Errorf("refund of another number under the same id: %v", err)
	}
	if got := charge(a, cost(0)); got.Remaining != 3 {
		t.Errorf("%d remain of 5, of which 3 are used and 1 was refunded", got.Remaining)
	}
	if n, err := s.Refund(b, r, at(0), 1, "back"); n != 1 || err != nil {
		t.Errorf("refund of another key under the same id: %d, %v", n, err)
	}
	if err := s.Reset(b, "p"); err != nil {
		t.Fatal(err)
	}
	if got := charge(a, cost(0)); got.Remaining != 3 || !got.Pending {
		t.Errorf("after another key's reset: %+v", got)
	}
	if got := charge(a, repeated); !got.Allowed || got.Reservation != reservationOf(1) {
		t.Errorf("after another key's reset, repeated: %+v", got)
	}
}

// The same on a copy: what was reset or dropped is gone there, and what shares its hash is not.
func TestAHashIsNoIdentityOnCopies(t *testing.T) {
	s, c := New(Config{}), New(Config{Shut: true})
	r := rule("p", log(5, minute))
	r.Durability = Escrow
	s.Attach(0, Backup, true)
	a, b := sharing(s)
	pass := func(now time.Duration) {
		t.Helper()
		for more := true; more; {
			var chunk []byte
			chunk, _, more = s.Drain(0, Backup, at(now), 64)
			if err := c.Apply(0, false, at(now), chunk); err != nil {
				t.Fatal(err)
			}
		}
	}
	call := func(n int64, id string) Call {
		return Call{Request: algo.Request{Cost: n}, RequestID: id, Reservation: reservationOf(uint64(n)), ReserveFor: minute}
	}
	decide := func(k Key, call Call) {
		t.Helper()
		if got, err := s.Decide(k, r, at(0), call, nil); err != nil || !got.Allowed {
			t.Fatalf("%+v, %v", got, err)
		}
	}
	decide(a, call(3, "r"))
	decide(b, call(4, "r"))
	pass(0)
	if err := s.Reset(a, "p"); err != nil {
		t.Fatal(err)
	}
	pass(0)
	decide(a, cost(1))
	pass(0)
	// Charged and given back, and dropped before that is told.
	if _, err := s.Refund(a, r, at(0), 1, ""); err != nil {
		t.Fatal(err)
	}
	s.Sweep(at(0), 10)
	pass(0)
	c.TakeOver(0, at(0), Claim{1, 1, 1})
	c.Open(0)
	look := func(k Key, remaining int64, pending bool) {
		t.Helper()
		if got, err := c.Decide(k, r, at(0), cost(0), nil); err != nil || got.Remaining != remaining || got.Pending != pending {
			t.Errorf("%s: %+v, %v; want %d left", k.Key, got, err, remaining)
		}
	}
	look(a, 5, false)
	look(b, 1, true)
	if _, known, _ := c.Settle(a, r, at(0), reservationOf(4), 0); known {
		t.Error("cancelled under another key")
	}
	if n, known, err := c.Settle(b, r, at(0), reservationOf(4), 1); n != 3 || !known || err != nil {
		t.Errorf("commit: %d, %v, %v", n, known, err)
	}
}

func TestRequestIDsLost(t *testing.T) {
	r := rule("p", log(1000, minute))
	use := func(s *Store, n int, now time.Duration) {
		for i := range n {
			call := cost(1)
			call.RequestID = string(rune('a' + i))
			decide(t, s, r, "k", at(now), call)
		}
	}
	s := New(Config{MaxRequestIDs: 3})
	use(s, 5, 0)
	if got := s.Stats().RequestIDsLost; got != 2 {
		t.Errorf("%d lost, want 2", got)
	}
	s.Sweep(at(minute), 10)
	if got := s.Stats().RequestIDsLost; got != 2 {
		t.Errorf("%d lost after the others' time, want 2", got)
	}
	// An eighth of 64 KiB has room for some 30; the store has room for more.
	s = New(Config{MaxBytes: 64 << 10})
	use(s, 100, 0)
	part := &s.shards[0].parts[0]
	if got := len(part.annex.memos.order); got < 25 || got > 31 || s.Stats().RequestIDsLost != uint64(100-got) {
		t.Errorf("%d remembered, %d lost", got, s.Stats().RequestIDsLost)
	}
}
