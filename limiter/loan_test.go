package limiter

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

const loanPolicies = `policies:
  - {name: p, algorithm: sliding_log, limit: 100, window: 1h}
  - {name: kept, algorithm: sliding_log, limit: 100, window: 1h, lend: false}
  - {name: shadow, algorithm: sliding_log, limit: 100, window: 1h, shadow: true}
  - {name: small, algorithm: sliding_log, limit: 63, window: 1h}
  - {name: free, limit: -1}
  - {name: tried, algorithm: sliding_log, limit: 100, window: 1h, candidate: {algorithm: sliding_log, limit: 50, window: 1h}}
  - {name: several, limits: [{limit: 100, window: 1h}, {limit: 1000, window: 2h}]}
`

// lend lends one key's units to a borrower.
func lent(t *testing.T, l *Limiter, b limit.Borrow) limit.Lent {
	t.Helper()
	var out [1]limit.Lent
	wait := must.Value(l.Lend(t.Context(), []limit.Borrow{b}, out[:]))(t)
	if wait != nil {
		wait()
	}
	return out[0]
}

// lender is a node alone that lends.
func lender(t *testing.T) *Limiter {
	return started(t, Config{Policies: policies(t, loanPolicies)})
}

// withLender runs f in a bubble of time with a node alone that lends.
func withLender(t *testing.T, f func(t *testing.T, l *Limiter)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { f(t, lender(t)) })
}

// wants asks for the first loan of the key k under the policy p.
func wants(borrower uint64) limit.Borrow {
	return limit.Borrow{Target: onPolicy("p", "k"), ID: algo.LoanID{Borrower: borrower, Number: 1}, Want: 16}
}

// returnsAll has a borrower return all of a loan, some time after it was asked to.
func returnsAll(t *testing.T, l *Limiter, b *limit.Borrow, after time.Duration) (end func()) {
	return l.OpenBorrower(b.ID.Borrower, func(r limit.Recall) {
		go func() {
			time.Sleep(after)
			b.Want, b.Totals = 0, algo.Totals{Granted: r.Granted, Returned: r.Granted}
			lent(t, l, *b)
		}()
	})
}

func check(t *testing.T, l *Limiter, policy string, cost int64) limit.Decision {
	t.Helper()
	got, err := l.Check(t.Context(), []limit.Check{{Target: onPolicy(policy, "k"), Cost: cost}})
	must.True(t, err == nil && got[0].Err == nil, "%v %v", got, err)
	return got[0].Decision
}

func TestRecallBeforeRefusal(t *testing.T) {
	l := lender(t)
	target := onPolicy("p", "k")
	first := limit.Borrow{Target: target, ID: algo.LoanID{Borrower: 1, Number: 5}, Want: 16}
	a := lent(t, l, first)
	must.True(t, a.Granted == 16 && a.Term == algo.LoanTerm && a.Limit == 100 && a.Remaining == 84 &&
		a.Window == time.Hour, "%+v", a)
	asked := make(chan limit.Recall, 10)
	end := l.OpenBorrower(1, func(r limit.Recall) { asked <- r })
	done := make(chan struct{})
	go func() {
		defer close(done)
		r := <-asked
		// What it had sent before it was asked says nothing.
		lent(t, l, first)
		back := first
		back.Want, back.Totals = 0, algo.Totals{Granted: r.Granted, Spent: 3, Returned: r.Granted - 3}
		expect.True(t, r.Number == 5 && r.Granted == 16, "asked for %+v", r)
		lent(t, l, back)
	}()
	d := check(t, l, "p", 97)
	must.True(t, d.Allowed && d.Remaining == 0, "13 of 16 on loan are back: %+v", d)
	<-done
	d = check(t, l, "p", 1)
	must.True(t, !d.Allowed && d.RememberFor != 0 && !d.RetryAfterEstimated, "all is used: %+v", d)
	s := l.Loans()
	expect.True(t, s.Recalled == 1 && s.Unanswered == 0 && s.Spent == 3 && s.Streams == 1 && s.OnLoan == 0 &&
		s.Borrowers == 0, "%+v", s)
	end()
	expect.Equal(t, l.Loans().Streams, 0)
}

// TestRecallBeforeCharge: a charge, and the excess of a commit, say that there was no room only after what is on loan
// has been asked for.
func TestRecallBeforeCharge(t *testing.T) {
	for _, what := range []string{"charge", "commit"} {
		l := lender(t)
		target := onPolicy("p", "k")
		loan := wants(1)
		must.Equal(t, lent(t, l, loan).Granted, 16)
		end := l.OpenBorrower(1, func(r limit.Recall) {
			back := []limit.Borrow{{Target: target, ID: loan.ID,
				Totals: algo.Totals{Granted: r.Granted, Spent: 3, Returned: r.Granted - 3}}}
			go func() { _, _ = l.Lend(context.Background(), back, make([]limit.Lent, 1)) }()
		})
		defer end()
		if what == "charge" {
			check(t, l, "p", 80)
			got, err := l.Check(t.Context(), []limit.Check{{Target: target, Cost: 17, Always: true}})
			expect.True(t, err == nil && got[0].Allowed && got[0].Granted == 17, "%s: %+v, %v", what, got, err)
		} else {
			d := must.Value(l.Reserve(t.Context(), limit.Reserve{Target: target, Amount: units(80)}))(t)
			must.True(t, d.Allowed, "%+v", d)
			got, err := l.Commit(t.Context(),
				limit.Commit{Target: target, ReservationID: d.ReservationID, Amount: units(97)})
			expect.True(t, err == nil && !got.Over && got.Excess == 17, "%s: %+v, %v", what, got, err)
		}
		s := l.Loans()
		expect.True(t, s.Recalled == 1 && s.OnLoan == 0, "%s: %+v", what, s)
	}
}

// TestLentAfterRecall: of what comes back those who wait for it are the first to have some, and the rest is lent again
// as long as that is worth it.
func TestLentAfterRecall(t *testing.T) {
	l := started(t, Config{Policies: policies(t,
		"policies: [{name: p, algorithm: sliding_log, limit: 10000, window: 1h}]")})
	target := onPolicy("p", "k")
	check(t, l, "p", 8000)
	first := limit.Borrow{Target: target, ID: algo.LoanID{Borrower: 1, Number: 5}, Want: 1000}
	must.Equal(t, lent(t, l, first).Granted, 1000)
	returned := make(chan limit.Lent, 1)
	end := l.OpenBorrower(1, func(r limit.Recall) {
		go func() {
			first.Want, first.Totals = 0, algo.Totals{Granted: r.Granted, Returned: r.Granted}
			returned <- lent(t, l, first)
		}()
	})
	defer end()
	must.True(t, check(t, l, "p", 1500).Allowed, "refused")
	a := <-returned
	expect.True(t, a.Ended && a.Again == returnAgain, "who returned a loan is told %+v", a)

	second := limit.Borrow{Target: target, ID: algo.LoanID{Borrower: 2, Number: 1}, Want: 100}
	of := state{scope: "p", key: "k"}
	l.loans.wait(of, 1)
	a = lent(t, l, second)
	expect.True(t, a.Granted == 0 && a.Again == returnAgain, "while somebody is about to decide: %+v", a)
	l.loans.wait(of, -1)
	a = lent(t, l, second)
	expect.True(t, a.Granted == 100 && a.Term != 0, "with 500 free: %+v", a)
	check(t, l, "p", 390)
	third := limit.Borrow{Target: target, ID: algo.LoanID{Borrower: 3, Number: 1}, Want: 100}
	a = lent(t, l, third)
	expect.True(t, a.Granted == 0 && a.Again == returnAgain, "with 10 free and 100 on loan: %+v", a)
	second.Want, second.Totals = 0, algo.Totals{Granted: 100, Spent: 100}
	lent(t, l, second)
	a = lent(t, l, third)
	expect.True(t, a.Granted == 0 && a.Again == lendAgain, "with 10 free and nothing on loan: %+v", a)
}

// TestSilentBorrower: a borrower that does not answer is waited for once, and then no more for a while.
func TestSilentBorrower(t *testing.T) {
	l := lender(t)
	inline := &algo.Limit{Algorithm: algo.TokenBucket, Limit: 100, Window: time.Hour}
	target := limit.Target{Limit: inline, Key: "k"}
	b := limit.Borrow{Target: target, ID: algo.LoanID{Borrower: 1, Number: 5}, Want: 16}
	must.Equal(t, lent(t, l, b).Granted, 16)
	ask := func(cost int64) limit.Decision {
		got, err := l.Check(t.Context(), []limit.Check{{Target: target, Cost: cost}})
		must.True(t, err == nil && got[0].Err == nil, "%v %v", got, err)
		return got[0].Decision
	}
	d := ask(101)
	expect.True(t, !d.Allowed && d.RetryAfter == algo.Never && !d.RetryAfterEstimated, "more than the limit: %+v", d)
	if d := ask(90); d.Allowed || d.RememberFor != 0 || d.RetryAfter <= 0 || !d.RetryAfterEstimated {
		t.Errorf("there is nobody to ask: %+v", d)
	}
	s := l.Loans() // before or after the round is over
	expect.True(t, s.Recalled == 1 && s.Unanswered <= 1, "%+v", s)
	defer l.OpenBorrower(1, func(limit.Recall) {})()
	for range 50 {
		d := ask(90)
		expect.True(t, !d.Allowed && d.RememberFor == 0 && d.RetryAfterEstimated, "%+v", d)
	}
	// Fifty that each waited take longer than a silent borrower is left alone.
	s = l.Loans()
	expect.True(t, s.Recalled != 0 && s.Recalled <= 3 && s.Unanswered == s.Recalled, "%+v", s)
	// It was alive all the time.
	b.Totals, b.Want = algo.Totals{Granted: 16, Spent: 0, Returned: 16}, 0
	a := lent(t, l, b)
	expect.True(t, a.Ended, "%+v", a)
	d = ask(90)
	expect.True(t, d.Allowed && !d.RetryAfterEstimated, "%+v", d)
	d = ask(90)
	expect.True(t, !d.Allowed && !d.RetryAfterEstimated, "nothing is on loan: %+v", d)
}

// TestReportWithoutRoom: where there is no room for the key of a loan, nothing of what is reported is confirmed, so
// that it is reported again.
func TestReportWithoutRoom(t *testing.T) {
	l := started(t, Config{Policies: policies(t, loanPolicies), Store: NewStore(store.Config{MaxKeys: 1}, true)})
	check(t, l, "kept", 1)
	target := onPolicy("p", "k")
	a := lent(t, l, limit.Borrow{Target: target, ID: loanID, Totals: algo.Totals{Granted: 16, Spent: 9}, Known: 4,
		Want: 16})
	expect.True(t, a.Granted == 16 && a.Spent == 4 && !a.Ended && a.Term == 0 && a.Again > 0, "%+v", a)
}

// TestGivingBackRecalls: what a borrower has spent and not reported is there to be refunded, and a reset leaves nothing
// of it.
func TestGivingBackRecalls(t *testing.T) {
	l := lender(t)
	target := onPolicy("p", "k")
	give := map[string]func() error{
		"refund": func() error {
			n, err := l.Refund(t.Context(), target, 4, "")
			expect.Equal(t, n, 4, "were given back")
			return err
		},
		"reset": func() error { return l.Reset(t.Context(), target) },
		"check": func() error {
			got, err := l.Check(t.Context(), []limit.Check{{Target: target, Cost: -4, Always: true}})
			if err == nil && got[0].Granted != -4 {
				t.Errorf("%+v", got[0])
			}
			return err
		},
	}
	number := uint64(0)
	for name, do := range give {
		number++
		b := limit.Borrow{Target: target, ID: algo.LoanID{Borrower: 1, Number: number}, Want: 16}
		a := lent(t, l, b)
		must.True(t, a.Granted != 0, "%s: %+v", name, a)
		asked := make(chan limit.Recall, 1)
		end := l.OpenBorrower(1, func(r limit.Recall) { asked <- r })
		done := make(chan struct{})
		go func() {
			defer close(done)
			<-asked
			b.Want, b.Totals = 0, algo.Totals{Granted: a.Granted, Spent: 4, Returned: a.Granted - 4}
			lent(t, l, b)
		}()
		must.NoError(t, do())
		<-done
		end()
		expect.Equal(t, check(t, l, "p", 0).Remaining, 100, "after a %s", name)
	}
}

func TestWhatIsNotLent(t *testing.T) {
	l := lender(t)
	for _, policy := range []string{"kept", "shadow", "small", "free", "tried", "unknown", ""} {
		a := lent(t, l, limit.Borrow{Target: onPolicy(policy, "k"), ID: loanID, Want: 16})
		expect.True(t, a.Granted == 0 && a.Term == 0 && a.Again >= time.Second, "of %q: %+v", policy, a)
	}
}

// TestQuotaIsNotRecalled: nobody waits for units of a Quota.
func TestQuotaIsNotRecalled(t *testing.T) {
	withLender(t, func(t *testing.T, l *Limiter) {
		out := make([]limit.QuotaLent, 1)
		q := limit.Quota{Target: onPolicy("p", "k"), ID: loanID,
			Ask: algo.Quota{Demand: 3600, Ahead: 10 * time.Second, Term: 28 * time.Second}}
		if err := l.Quota(t.Context(), []limit.Quota{q}, out); err != nil || out[0].Err != nil || out[0].Granted == 0 {
			t.Fatal(out[0], err)
		}
		begun := time.Now()
		d := check(t, l, "p", 100)
		expect.True(t, !d.Allowed && time.Since(begun) == 0, "after %v: %+v", time.Since(begun), d)
	})
}

// TestBorrowerComesToARecall: a check waits for a borrower that there is no way to ask when units are called back,
// once: the borrower may be about to open one. It is asked then, also when it was not waited for any longer.
func TestBorrowerComesToARecall(t *testing.T) {
	for _, late := range []bool{false, true} {
		withLender(t, func(t *testing.T, l *Limiter) {
			b := wants(1)
			lent(t, l, b)
			open := func() {
				returnsAll(t, l, &b, 5*time.Millisecond)
			}
			if late {
				for i, most := range []time.Duration{recallMost, 0} {
					begun := time.Now()
					expect.True(t, !check(t, l, "p", 100).Allowed, "units on loan are admitted")
					if waited := time.Since(begun); waited != most {
						t.Errorf("check %d waits for %v for who does not come, want %v", i, waited, most)
					}
				}
				open()
			} else {
				go func() {
					time.Sleep(10 * time.Millisecond)
					open()
				}()
			}
			expect.True(t, check(t, l, "p", 100).Allowed, "late %v: refused before all on loan was asked for", late)
			want := "1 asked, 0 silent"
			if late { // the first round has waited for it in vain
				want = "2 asked, 1 silent"
			}
			s := l.Loans()
			expect.Equal(t, fmt.Sprintf("%d asked, %d silent", s.Recalled, s.Unanswered), want, "late %v: %+v", late, s)
			expect.Equal(t, s.OnLoan, 0, "units on loan, late %v", late)
		})
	}
}

// TestReportDuringARecall: a borrower that reports and keeps what it has is waited for still.
func TestReportDuringARecall(t *testing.T) {
	withLender(t, func(t *testing.T, l *Limiter) {
		b := limit.Borrow{Target: onPolicy("p", "k"), ID: algo.LoanID{Borrower: 1, Number: 5}, Want: 16}
		lent(t, l, b)
		defer l.OpenBorrower(1, func(r limit.Recall) {
			go func() {
				time.Sleep(10 * time.Millisecond)
				lent(t, l, b)
				time.Sleep(10 * time.Millisecond)
				back := b
				back.Want, back.Totals = 0, algo.Totals{Granted: r.Granted, Returned: r.Granted}
				lent(t, l, back)
			}()
		})()
		expect.True(t, check(t, l, "p", 97).Allowed, "refused")
		s := l.Loans()
		expect.True(t, s.Recalled == 1 && s.Unanswered == 0, "asked, and unanswered: %+v", s)
	})
}

// TestSilentBorrowerIsHeard: a borrower that has not answered is asked again as soon as it has reported.
func TestSilentBorrowerIsHeard(t *testing.T) {
	withLender(t, func(t *testing.T, l *Limiter) {
		b := limit.Borrow{Target: onPolicy("p", "k"), ID: algo.LoanID{Borrower: 1, Number: 5}, Want: 16}
		lent(t, l, b)
		answers := false
		defer l.OpenBorrower(1, func(r limit.Recall) {
			if answers {
				go func() {
					b.Want, b.Totals = 0, algo.Totals{Granted: r.Granted, Spent: b.Totals.Spent,
						Returned: r.Granted - b.Totals.Spent}
					lent(t, l, b)
				}()
			}
		})()
		d := check(t, l, "p", 90)
		expect.True(t, !d.Allowed && d.RetryAfterEstimated, "%+v", d)
		answers = true
		if d := check(t, l, "p", 90); d.Allowed || l.Loans().Recalled != 1 {
			t.Errorf("a silent borrower: %+v, %+v", d, l.Loans())
		}
		b.Totals = algo.Totals{Granted: 16, Spent: 1}
		lent(t, l, b)
		if d := check(t, l, "p", 90); !d.Allowed || l.Loans().Recalled != 2 {
			t.Errorf("one that has been heard since: %+v, %+v", d, l.Loans())
		}
	})
}

// beSilent has no round wait for a borrower for some time.
func beSilent(l *Limiter, borrower uint64, d time.Duration) {
	l.loans.silent[borrower] = nil
	time.AfterFunc(d, func() {
		l.loans.mu.Lock()
		defer l.loans.mu.Unlock()
		delete(l.loans.silent, borrower)
	})
}

// TestAskedNext: what is still on loan after a round, of a borrower that can be asked by then, is asked for before
// anything is refused, and is not once the time for that is over.
func TestAskedNext(t *testing.T) {
	for _, late := range []bool{false, true} {
		withLender(t, func(t *testing.T, l *Limiter) {
			for borrower := range uint64(2) {
				b := wants(borrower)
				lent(t, l, b)
				defer l.OpenBorrower(borrower, func(r limit.Recall) {
					if late {
						return
					}
					go func() {
						time.Sleep(20 * time.Millisecond)
						b.Want, b.Totals = 0, algo.Totals{Granted: r.Granted, Returned: r.Granted}
						lent(t, l, b)
					}()
				})()
			}
			beSilent(l, 1, 10*time.Millisecond)
			expect.True(t, check(t, l, "p", 100).Allowed != late, "late %v", late)
			synctest.Wait() // until the round is over, as the check's time is
			want := "2 asked, 0 silent"
			if late {
				want = "1 asked, 1 silent"
			}
			s := l.Loans()
			expect.Equal(t, fmt.Sprintf("%d asked, %d silent", s.Recalled, s.Unanswered), want, "late %v: %+v", late, s)
		})
	}
}

// TestHastyCallerDuringARecall: who has less time than a recall takes does not end it for others, nor is the borrower
// taken for silent.
func TestHastyCallerDuringARecall(t *testing.T) {
	for _, alone := range []bool{false, true} {
		withLender(t, func(t *testing.T, l *Limiter) {
			b := wants(1)
			lent(t, l, b)
			returnsAll(t, l, &b, 20*time.Millisecond)
			hasty := func() {
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
				defer cancel()
				got, err := l.Check(ctx, []limit.Check{{Target: b.Target, Cost: 100}})
				expect.True(t, err == nil && got[0].Err == nil && !got[0].Decision.Allowed, "%+v, %v", got, err)
			}
			if alone {
				hasty()
			} else {
				go hasty()
				synctest.Wait()
			}
			expect.True(t, check(t, l, "p", 100).Allowed, "alone %v: refused before all on loan was asked for", alone)
			s := l.Loans()
			expect.True(t, s.Recalled == 1 && s.Unanswered == 0 && s.OnLoan == 0, "alone %v: %+v", alone, s)
		})
	}
	withLender(t, func(t *testing.T, l *Limiter) { // it ends by itself when nobody waits for it
		b := wants(1)
		lent(t, l, b)
		l.OpenBorrower(1, func(limit.Recall) {})
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		defer cancel()
		must.Value(l.Check(ctx, []limit.Check{{Target: b.Target, Cost: 100}}))(t)
		of := state{"p", "k"}
		expect.True(t, l.loans.recalling(of), "a recall ends with the caller who began it")
		time.Sleep(recallMost)
		if l.loans.recalling(of) || l.Loans().Unanswered != 1 {
			t.Errorf("a recall that nobody waits for goes on: %+v", l.Loans())
		}
	})
}
