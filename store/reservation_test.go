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

func TestExtend(t *testing.T) {
	s := New(Config{MaxKeyReservations: 3})
	r := rule("p", log(10, time.Hour))
	k := s.key("p", "k")
	id := reservationOf(1)
	call := func(cost int64, ttl time.Duration) Call {
		return Call{Request: algo.Request{Cost: cost}, Reservation: id, ReserveFor: ttl, Extend: true}
	}
	extend := func(now time.Duration, c Call) (Answer, error) { return s.Decide(k, r, at(now), c, nil) }
	expect.ErrorIs(t, expect.Err(extend(0, call(1, 0))), ErrNotPending, "of none")
	a, err := s.Decide(k, r, at(0), Call{Request: algo.Request{Cost: 4}, Reservation: id, ReserveFor: 10 * time.Second},
		nil)
	must.True(t, err == nil && a.Allowed, "%+v, %v", a, err)
	a, err = extend(time.Second, call(7, time.Minute))
	expect.True(t, err == nil && !a.Allowed && a.Granted == 0 && a.RetryAfter > 0, "beyond the limit: %+v, %v", a, err)
	a = must.Value(extend(time.Second, call(3, 0)))(t)
	expect.True(t, a.Allowed && a.Granted == 3 && a.Remaining == 3 && a.Reservation == id, "%+v", a)
	_, held := s.at(k.Partition)
	_, parts := held.extras.reservations.charges(stateID{"p", "k"}, k.Hash, id, int64(10*time.Second))
	expect.True(t, len(parts) == 0, "a refused extension, and one without a time, prolonged it")
	// Time alone, and with units.
	a = must.Value(extend(9*time.Second, call(0, time.Minute)))(t)
	expect.True(t, a.Allowed && a.Granted == 0 && a.Remaining == 3 && a.Reservation == id, "%+v", a)
	a, err = extend(60*time.Second, call(1, time.Minute))
	expect.True(t, err == nil && a.Allowed && a.Remaining == 2, "%+v, %v", a, err)
	_, err = extend(60*time.Second, call(1, time.Minute))
	expect.True(t, errors.Is(err, ErrKeyReservations) && errors.Is(err, ErrFull), "beyond the bound of a key: %v", err)
	part := id.numbered(1)
	out := must.Value(s.Settle(k, r, at(100*time.Second), Settlement{ID: part, Keep: 0}))(t)
	expect.True(t, !out.Known, "settled by the id of a part: %+v", out)
	out, err = s.Settle(k, r, at(119*time.Second), Settlement{ID: id, Keep: 5})
	expect.True(t, err == nil && out.Known && out.Returned == 3 && out.Excess == 0, "%+v, %v", out, err)
	expect.Equal(t, decide(t, s, r, "k", at(119*time.Second), cost(0)).Remaining, 5, "remain of 10 with 5 kept")
	expect.Equal(t, s.budget.reservations.Load(), 0, "reservations are left")
	accounted(t, s)
}

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

// TestExtensionIsCopied: the copy keeps a reservation for as long as it was prolonged.
func TestExtensionIsCopied(t *testing.T) {
	holder, copied, l := followed(t)
	r, id := rule("p", log(10, minute)), reservationOf(1)
	decide(t, holder, r, "k", at(0),
		Call{Request: algo.Request{Cost: 2}, Reservation: id, ReserveFor: 10 * time.Second})
	l.sync(t, 0, false)
	decide(t, holder, r, "k", at(time.Second), Call{Reservation: id, ReserveFor: 30 * time.Second, Extend: true})
	if holder.Pending(0, ownership.Backup) > 0 {
		l.sync(t, time.Second, false)
	}
	take(copied, l.there(time.Second))
	out, err := copied.Settle(copied.key("p", "k"), r, l.there(20*time.Second), Settlement{ID: id})
	expect.True(t, err == nil && out.Known && out.Returned == 2, "%+v, %v", out, err)
}

// TestRefundBesideReservation: what is refunded of a bucket is not taken for what a reservation charged.
func TestRefundBesideReservation(t *testing.T) {
	s := New(Config{})
	r := rule("p", algo.Limit{Algorithm: algo.TokenBucket, Limit: 10, Window: time.Hour})
	decide(t, s, r, "k", at(0), cost(5))
	decide(t, s, r, "k", at(0), reserveFor(1, 3, minute))
	n, err := s.Refund(s.key("p", "k"), r, at(0), 4, "", "")
	must.True(t, n == 4 && err == nil, "%v %v", n, err)
	n, known, err := settle(s, s.key("p", "k"), r, at(0), reservationOf(1), 0)
	expect.True(t, n == 3 && known && err == nil, "%d were given back of 3 (%v, %v)", n, known, err)
	expect.Equal(t, decide(t, s, r, "k", at(0), cost(0)).Remaining, 9, "are left of 10 after 1")
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

func TestSettleBeyondReserved(t *testing.T) {
	for _, tt := range []struct {
		name         string
		limit        algo.Limit
		other        int64 // charged besides
		want         Settled
		remain, more int64 // remaining, and what the limit must be raised by for one more
	}{
		{"within the limit", log(10, minute), 0, Settled{Known: true, Excess: 5}, 2, 0},
		{"beyond", log(10, minute), 5, Settled{Known: true, Excess: 5, Over: true}, 0, 3},
		{"bounded", algo.Limit{Algorithm: algo.SlidingLog, Limit: 10, Window: minute, MaxDebt: 1}, 5,
			Settled{Known: true, Excess: 3, Over: true}, 0, 1},
	} {
		s := New(Config{})
		r := rule("p", tt.limit)
		k := s.key("p", "k")
		must.True(t, must.Value(s.Decide(k, r, at(0), reserveFor(1, 3, minute), nil))(t).Allowed, "refused")
		if tt.other > 0 {
			decide(t, s, r, "k", at(0), cost(tt.other))
		}
		how := Settlement{ID: reservationOf(1), Keep: 8, Exact: true}
		expect.ErrorIs(t, expect.Err(s.Settle(k, r, at(1), how)), ErrReserved, "%s: exactly", tt.name)
		for range 2 { // repeated it charges nothing
			how.Exact = false
			out, err := s.Settle(k, r, at(1), how)
			expect.True(t, err == nil && out == tt.want, "%s: %+v, %v, want %+v", tt.name, out, err, tt.want)
		}
		d := decide(t, s, r, "k", at(1), cost(0))
		expect.True(t, d.Remaining == tt.remain, "%s: %d remain, want %d", tt.name, d.Remaining, tt.remain)
		raised := r.Limits[0]
		raised.Limit += tt.more
		d = decide(t, s, rule("p", raised), "k", at(1), cost(1))
		expect.Equal(t, d.Allowed, tt.remain > 0, "%s: %+v at the brink", tt.name, d)
		raised.Limit++
		d = decide(t, s, rule("p", raised), "k", at(1), cost(1))
		expect.True(t, d.Allowed, "%s: more is owed than was charged: %+v", tt.name, d)
		accounted(t, s)
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

// TestReservationsExpire: each at its own end, in whatever order they were made.
func TestReservationsExpire(t *testing.T) {
	s := New(Config{})
	r := rule("p", log(10, time.Hour))
	for i, d := range []time.Duration{50, 10, 20, 30} {
		decide(t, s, r, "k", at(0), reserveFor(uint64(i+1), 1, d*time.Second))
	}
	for i, d := range []time.Duration{10, 20, 30, 50} {
		s.Sweep(at(d*time.Second), 1)
		expect.Equal(t, s.budget.reservations.Load(), int64(3-i), "reservations are pending at %ds", d)
	}
	decide(t, s, r, "k", at(0), reserveFor(9, 1, time.Second))
	_, known, err := settle(s, s.key("p", "k"), r, at(time.Second), reservationOf(9), 0)
	expect.True(t, !known && err == nil, "pending at its end: %v, %v", known, err)
}

// TestAtomicBeyondTheKeysBound: the reservations of atomic checks, which end with the check, are not bounded by the
// key.
func TestAtomicBeyondTheKeysBound(t *testing.T) {
	s := New(Config{MaxKeyReservations: 1})
	r := rule("p", log(10, time.Hour))
	for i := range uint64(3) {
		once := Call{Request: algo.Request{Cost: 1}, Reservation: reservationOf(i + 1), ReserveFor: minute,
			ReserveOnce: true}
		expect.True(t, must.Value(s.Decide(s.key("p", "k"), r, at(0), once, nil))(t).Allowed, "%d", i)
	}
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

// TestAnswersOfOneID: what was answered last under an id counts, and of two contents that are merged the base's.
func TestAnswersOfOneID(t *testing.T) {
	s := New(Config{})
	b, bounds := &s.shards[0].budget, s.answerBounds()
	k := answerKey{stateID{"p", "k"}, "a", answerCharge}
	var base, other, fresh answers
	put := func(m *answers, granted, until int64) {
		m.put(k, answered{granted: granted, until: until}, "", 0, bounds, b)
	}
	want := func(m *answers, what string, granted int64) {
		t.Helper()
		e, ok := m.get(k, 0)
		expect.True(t, ok && e.granted == granted, "%s: %+v, %v, want %d granted", what, e, ok, granted)
	}
	put(&base, 1, 9)
	put(&other, 2, 1)
	put(&other, 3, 9)
	base.unite(&other, 0, bounds, b)
	want(&base, "merged", 1)
	fresh.unite(&other, 0, bounds, b)
	want(&fresh, "merged into nothing", 3)
	other.expire(5, b)
	want(&other, "after the end of the first", 3)
}

// TestAnswersAfterAllHaveEnded: a follower is told of an answer with which nothing has changed, and of the first one
// after all others have been forgotten.
func TestAnswersAfterAllHaveEnded(t *testing.T) {
	holder, _, l := followed(t)
	r := rule("p", algo.Limit{Algorithm: algo.FixedWindow, Limit: 1, Window: minute, MaxDebt: 1})
	for i, now := range []time.Duration{0, 0, 10 * minute} {
		holder.Sweep(at(now), 1)
		// The second is refused beyond all debt.
		charge := Call{Request: algo.Request{Cost: 2, Always: true}, RequestID: string(rune('a' + i))}
		must.Equal(t, (decide(t, holder, r, "k", at(now), charge).Granted == 0), i == 1)
		expect.True(t, holder.Pending(0, ownership.Backup) != 0, "nothing is pending after answer %d", i)
		l.sync(t, now, false)
		l.same(t, charge.RequestID, now)
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
