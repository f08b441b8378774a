package algo

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestQuotaRate holds the sum of what others are admitted and of what data planes may have spent, at its worst, to a
// bucket's bound, over loans that come and go, and owners that hand the state on.
func TestQuotaRate(t *testing.T) {
	type plane struct {
		loan  Loan
		until int64
		level float64 // of a bucket that begins full
		at    int64
	}
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 3))
		ls := Limits{{Algorithm: TokenBucket, Limit: 5 + r.Int64N(50), Window: time.Second,
			Capacity: 20 + r.Int64N(100)}}
		rate, capacity := float64(ls[0].Limit), float64(ls[0].Capacity)
		a := NewArena(nil)
		s := make(State, ls.Words())
		now := int64(time.Hour)
		instant := func() Instant { return Instant{Mono: now, Wall: now} }
		ls.Init(s, instant())
		var u Loans
		planes := make([]plane, 4)
		best, n, direct := math.Inf(-1), 0.0, 0
		admit := func() { // one more, now
			v := rate*float64(now)/1e9 - n
			best, n = max(best, v), n+1
			over := n - rate*float64(now)/1e9 + best - capacity
			must.True(t, over <= 1e-6, "seed %d: %.3f more than %v + %v/s", seed, over, capacity, rate)
		}
		number := uint64(0)
		for end := now + int64(3*time.Minute); now < end; {
			now += r.Int64N(int64(200 * time.Millisecond))
			for {
				if _, more, err := ls.Expire(a, s, instant(), &u); err != nil {
					t.Fatal(err)
				} else if !more {
					break
				}
			}
			got := u.OnLoan()
			must.True(t, got >= 0, "%v", got)
			switch i := r.IntN(len(planes)); r.IntN(12) {
			case 0:
				number++
				term := time.Duration(r.Int64N(int64(20 * time.Second)))
				l := ls.LendQuota(a, s, instant(), &u, LoanID{uint64(i + 1), number},
					Quota{Demand: r.Int64N(3600 * 40), Term: term, Share: r.Int64N(101)})
				if l.Granted > 0 {
					planes[i] = plane{loan: l, until: now + int64(term), level: float64(l.Granted), at: now}
				}
			case 1: // the state is handed on
				if r.IntN(3) == 0 {
					data := u.Append(nil, instant())
					v, rest, err := ReadLoans(instant(), data)
					must.True(t, err == nil && len(rest) == 0 && v.OnLoan() == u.OnLoan() && v.rate == u.rate &&
						(v.since == u.since || u.rate <= 0), "%v, %+v, want %+v", err, v, u)
					u = v
				}
			case 2, 3, 4, 5: // others
				for range r.IntN(30) {
					d := must.Value(ls.Decide(a, s, instant(),
						Request{Cost: 1, OnLoan: u.OnLoan(), OnLoanFor: u.OnLoanFor(instant())}, nil))(t)
					if d.Allowed {
						direct++
						admit()
					}
				}
			default: // a data plane spends all that it may
				p := &planes[i]
				if now >= p.until {
					continue
				}
				p.level = min(float64(p.loan.Granted), p.level+float64(now-p.at)*float64(p.loan.Rate)/float64(hour))
				for p.at = now; p.level >= 1; p.level-- {
					admit()
				}
			}
		}
		expect.True(t, direct != 0 && n-float64(direct) >= 10,
			"seed %d: %d by others, %v by data planes", seed, direct, n-float64(direct))
	}
}

// TestQuotaShares divides by demand, keeps to the share, and keeps units for who got none.
func TestQuotaShares(t *testing.T) {
	ls := Limits{{Algorithm: SlidingLog, Limit: 1000, Window: time.Minute}}
	a := NewArena(nil)
	s := make(State, ls.Words())
	now := Instant{Mono: 1 << 40, Wall: 1 << 60}
	ls.Init(s, now)
	var u Loans
	lend := func(borrower, number uint64, demand int64) Loan {
		return ls.LendQuota(a, s, now, &u, LoanID{borrower, number},
			Quota{Demand: demand, Ahead: time.Hour, Share: 80, Term: time.Minute})
	}
	if l := lend(1, 1, 600); l.Granted != 600 || u.OnLoan() != 600 {
		t.Fatalf("%+v, %d on loan", l, u.OnLoan())
	}
	again := lend(1, 1, 700)
	must.True(t, again.Granted == 600 && u.OnLoan() == 600, "repeated: %+v", again)
	must.Equal(t, lend(2, 1, 600).Granted, 200, "no more than the share of 800")
	l := lend(3, 1, 1200)
	must.True(t, l.Granted == 0 && l.Kept == 400 && u.OnLoan() == 1000+200, "its part is kept: %+v", l)
	_, _, err := ls.Report(a, s, now, &u, LoanID{1, 1}, Totals{Granted: 600, Spent: 100, Returned: 500}, 0, true)
	must.NoError(t, err)
	ls.Lend(a, s, now, &u, LoanID{1, 1}, 0, math.MaxInt64)
	l = lend(3, 2, 1200)
	must.True(t, l.Granted == 533 && u.OnLoan() == 733, "two thirds of what all want: %+v, %d on loan", l, u.OnLoan())
}
