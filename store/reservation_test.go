package store

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestSettledOnce: what came of a reservation that nobody is going to settle again is not remembered.
func TestSettledOnce(t *testing.T) {
	s := New(Config{})
	r := rule("p", log(10, minute))
	for _, once := range []bool{false, true} {
		key := fmt.Sprint(once)
		decide(t, s, r, key, at(0),
			Call{Request: algo.Request{Cost: 1}, Reservation: reservationOf(1), ReserveFor: minute, ReserveOnce: once})
		for _, want := range []bool{true, !once} {
			_, known, err := settle(s, s.key("p", key), r, at(0), reservationOf(1), 1)
			expect.True(t, err == nil && known == want, "once %v: known %v, %v, want %v", once, known, err, want)
		}
	}
}

// TestCancelOfCarriedDebt: a cancel gives nothing back of a window that has ended, neither the debt that is carried nor
// the refusals that are counted in the next one.
func TestCancelOfCarriedDebt(t *testing.T) {
	r := rule("p", algo.Limit{Algorithm: algo.FixedWindow, Limit: 10, Window: minute, CarryDebt: true,
		CountDenied: true})
	for _, requestID := range []string{"", "a"} {
		s := New(Config{})
		decide(t, s, r, "k", at(0),
			Call{Request: algo.Request{Cost: 15, Always: true}, Reservation: reservationOf(1), ReserveFor: 10 * minute})
		d := decide(t, s, r, "k", at(70*time.Second), withID(8, requestID))
		must.True(t, !d.Allowed && d.Remaining == 0, "%+v", d)
		n, known, err := settle(s, s.key("p", "k"), r, at(80*time.Second), reservationOf(1), 0)
		expect.True(t, n == 0 && known && err == nil,
			"request id %q: %d were given back of a window that has ended (%v, %v)", requestID, n, known, err)
		if d := decide(t, s, r, "k", at(80*time.Second), cost(0)); d.Remaining != 0 {
			t.Errorf("request id %q: %d are left of 10 beside 5 of debt and 5 of a refusal", requestID, d.Remaining)
		}
	}
}

// TestChargeOnce: a charge that found no room even for debt is not made by repeating it when there is some.
func TestChargeOnce(t *testing.T) {
	s := New(Config{})
	r := rule("p", algo.Limit{Algorithm: algo.FixedWindow, Limit: 2, Window: minute, MaxDebt: 1})
	k := s.key("p", "k")
	charge := func(now time.Duration, n int64, id string) Answer {
		t.Helper()
		a, err := s.Decide(k, r, at(now), Call{Request: algo.Request{Cost: n, Always: true}, RequestID: id}, nil)
		must.NoError(t, err)
		return a
	}
	a := charge(0, 5, "a")
	expect.True(t, a.Granted == 3 && !a.Allowed, "%+v", a)
	for _, now := range []time.Duration{0, 59 * time.Second} {
		a := charge(now, 1, "b")
		expect.True(t, a.Granted == 0 && !a.Allowed, "%+v", a)
	}
	n, err := s.Refund(k, r, at(59*time.Second), 3, "", "")
	must.True(t, n == 3 && err == nil, "%v %v", n, err)
	a = charge(59*time.Second, 1, "b")
	expect.True(t, a.Granted == 0 && a.Remaining == 2, "repeated when there is room: %+v", a)
}

// TestRequestIDOfAnotherOperation: a request id is of one operation. One that was used for a check, a reservation or an
// extension is not taken for another of equal cost, which would be answered as granted and charge nothing; also not by
// a copy.
func TestRequestIDOfAnotherOperation(t *testing.T) {
	r := rule("p", log(100, minute))
	check := func(*testing.T, *Store, Key) Call { return Call{} }
	reserve := func(n uint64) func(*testing.T, *Store, Key) Call {
		return func(*testing.T, *Store, Key) Call {
			return Call{Reservation: reservationOf(n), ReserveFor: minute}
		}
	}
	extend := func(n uint64) func(*testing.T, *Store, Key) Call {
		return func(t *testing.T, s *Store, k Key) Call {
			t.Helper()
			pending := reserveFor(n, 1, minute)
			c := Call{Reservation: pending.Reservation, Extend: true}
			if _, err := s.Decide(k, r, at(0), c, nil); err == nil {
				return c // it is pending already
			}
			must.True(t, must.Value(s.Decide(k, r, at(0), pending, nil))(t).Allowed, "refused")
			return c
		}
	}
	type makeCall = func(*testing.T, *Store, Key) Call
	for _, test := range []struct {
		name       string
		first, now makeCall
		same       bool
	}{
		{"check, check", check, check, true},
		{"check, reserve", check, reserve(1), false},
		{"check, extend", check, extend(1), false},
		{"reserve, check", reserve(1), check, false},
		{"reserve, reserve", reserve(1), reserve(2), true},
		{"reserve, its extend", reserve(1), extend(1), false},
		{"reserve, extend", reserve(1), extend(2), false},
		{"extend, check", extend(1), check, false},
		{"extend, reserve", extend(1), reserve(2), false},
		{"extend, extend of it", extend(1), extend(1), true},
		{"extend, extend of another", extend(1), extend(2), false},
	} {
		for _, moved := range []bool{false, true} {
			t.Run(fmt.Sprint(test.name, ", moved ", moved), func(t *testing.T) {
				s := New(Config{Partitions: 1})
				k := s.key("p", "k")
				first := test.first(t, s, k)
				first.Cost, first.RequestID = 5, "id"
				one, err := s.Decide(k, r, at(0), first, nil)
				must.True(t, err == nil && one.Granted == 5, "%+v, %v", one, err)
				if moved {
					to := New(Config{Partitions: 1})
					l := newLink(s, to, ownership.Target)
					l.offset = 0
					l.sync(t, 0, true)
					s.Shut(0)
					to.Open(0)
					s = to
				}
				again := test.now(t, s, k)
				again.Cost, again.RequestID = 5, "id"
				before := must.Value(s.Decide(k, r, at(0), cost(0), nil))(t)
				got, err := s.Decide(k, r, at(0), again, nil)
				switch {
				case !test.same && !errors.Is(err, ErrRequestID):
					t.Errorf("%+v, %v; want ErrRequestID", got, err)
				case test.same && (err != nil || !got.Allowed || got.Granted != 5 ||
					got.Reservation.Whole() != one.Reservation.Whole()):
					t.Errorf("repeated: %+v, %v; want what the first was answered: %+v", got, err, one)
				}
				after, err := s.Decide(k, r, at(0), cost(0), nil)
				expect.True(t, err == nil && after.Remaining == before.Remaining,
					"%d remain, %d before; %v", after.Remaining, before.Remaining, err)
			})
		}
	}
}

// TestBoundedCommit: a bounded commit charges no more beyond its reservation than the largest limit, and changes
// nothing when it would.
func TestBoundedCommit(t *testing.T) {
	bucket := algo.Limit{Algorithm: algo.TokenBucket, Limit: 10, Window: time.Second, Capacity: 20}
	for _, test := range []struct {
		name   string
		limits algo.Limits
		most   int64
	}{
		{"capacity", algo.Limits{bucket}, 20},
		{"the largest of several", algo.Limits{bucket, log(100, time.Hour)}, 100},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := New(Config{Partitions: 1})
			r := rule("p", test.limits...)
			k := s.key("p", "k")
			id := reservationOf(1)
			a, err := s.Decide(k, r, at(0), Call{Request: algo.Request{Cost: 5}, Reservation: id, ReserveFor: minute},
				nil)
			must.True(t, err == nil && a.Allowed, "%+v, %v", a, err)
			for _, keep := range []int64{5 + test.most + 1, algo.MaxLimit} {
				out, err := s.Settle(k, r, at(0), Settlement{ID: id, Keep: keep, Bounded: true})
				expect.True(t, errors.Is(err, ErrExcess) && out.Excess == 0, "keeping %d: %+v, %v", keep, out, err)
			}
			a, err = s.Decide(k, r, at(0), cost(0), nil)
			expect.True(t, err == nil && a.Remaining == 15 && a.Pending, "after the errors: %+v, %v", a, err)
			out, err := s.Settle(k, r, at(0), Settlement{ID: id, Keep: 5 + test.most, Bounded: true})
			expect.True(t, err == nil && out.Known && out.Excess != 0, "within the bound: %+v, %v", out, err)
		})
	}
}

// TestBoundedCommitsTogether: bounded commits, however many reservations they end, bring a key no further beyond its
// limit than the limit once more.
func TestBoundedCommitsTogether(t *testing.T) {
	s := New(Config{Partitions: 1})
	r := rule("p", algo.Limit{Algorithm: algo.TokenBucket, Limit: 20, Window: 20 * time.Second})
	k := s.key("p", "k")
	for i := range uint64(20) {
		must.True(t, must.Value(s.Decide(k, r, at(0), reserveFor(i+1, 1, minute), nil))(t).Allowed, "refused")
	}
	var excess int64
	for i := range uint64(20) {
		out := must.Value(s.Settle(k, r, at(0), Settlement{ID: reservationOf(i + 1), Keep: 21, Bounded: true}))(t)
		must.True(t, out.Known, "%+v", out)
		excess += out.Excess
	}
	expect.Equal(t, excess, 20, "units beyond the limit of 20")
	a, err := s.Decide(k, r, at(0), cost(1), nil)
	expect.True(t, err == nil && a.RetryAfter == 21*time.Second, "%+v, %v", a, err)
}

func TestAnswersAreKept(t *testing.T) {
	for window, want := range map[time.Duration]time.Duration{
		time.Second: minute, 2 * minute: 2 * minute, time.Hour: 5 * minute,
	} {
		s := New(Config{})
		r := rule("p", log(100, time.Second), log(100, window))
		call := withID(9, "a")
		decide(t, s, r, "k", at(0), call)
		for i, now := range []time.Duration{want - 1, want} {
			charges := int64(i) * 9
			before := decide(t, s, r, "k", at(now), cost(0)).Remaining
			if after := decide(t, s, r, "k", at(now), call).Remaining; before-after != charges {
				t.Errorf("window %v, repeated %v later: %d are charged, want %d", window, now, before-after, charges)
			}
		}
	}
}

// A charge whatever there is room for, of which nothing fits below the debt that may be, leaves no reservation, and its
// request id says so.
func TestReservationOfNothing(t *testing.T) {
	s, r := New(Config{}), rule("p", algo.Limit{Algorithm: algo.TokenBucket, Limit: 10, MaxDebt: 1, Window: time.Hour})
	forced := func(n uint64, id string) Call {
		request := algo.Request{Cost: 11, Always: true}
		return Call{Request: request, RequestID: id, Reservation: reservationOf(n), ReserveFor: time.Minute}
	}
	d := decide(t, s, r, "k", at(0), forced(1, "a"))
	must.True(t, d.Granted == 11, "granted %d, want all that may be owed", d.Granted)
	for range 2 {
		if d := decide(t, s, r, "k", at(0), forced(2, "b")); d.Granted != 0 || d.Allowed {
			t.Errorf("granted %d, allowed %v, beyond the debt that may be", d.Granted, d.Allowed)
		}
	}
	expect.Equal(t, s.Stats().Reservations, 1, "reservations, want the first one's alone")
}
