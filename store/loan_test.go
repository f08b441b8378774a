package store

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// holderLoan is a loan as the holder knows it.
func holderLoan(s *Store, k Key, scope string, id algo.LoanID) (loan algo.Loan, ok bool) {
	s.with(k.Partition, func(sh *shard, part *partition) {
		if slot, found := sh.find(&part.table, k.Hash, scope, k.Key); found {
			if l := part.loansOf(sh.record(part.ref(slot))); l != nil {
				loan, ok = l.Get(id)
			}
		}
	})
	return loan, ok
}

func borrow(t *testing.T, s *Store, r *Rule, now time.Duration, b Borrow) Lent {
	t.Helper()
	a := must.Value(s.Lend(s.key(r.Scope, "k"), r, at(now), b))(t)
	return a
}

// onLoanOf is what is on loan of the key k.
func onLoanOf(s *Store, scope string) (n int64) {
	k := s.key(scope, "k")
	s.with(0, func(sh *shard, part *partition) {
		if slot, found := sh.find(&part.table, k.Hash, scope, k.Key); found {
			if l := part.loansOf(sh.record(part.ref(slot))); l != nil {
				n = l.OnLoan()
			}
		}
	})
	return n
}

// loansCounted holds what Loans counts to what there is.
func loansCounted(t *testing.T, s *Store) {
	t.Helper()
	var want LoanStats
	borrowers := make(map[uint64]bool)
	for i := range s.shards {
		for j := range s.shards[i].partitions {
			s.shards[i].locked(func() {
				if part := &s.shards[i].partitions[j]; part.open && part.extras != nil {
					for _, l := range part.extras.lent {
						want.OnLoan += l.OnLoan()
						for _, b := range l.Borrowers(nil) {
							borrowers[b] = true
						}
					}
				}
			})
		}
	}
	want.Borrowers = len(borrowers)
	got := s.Loans()
	got.Expired = 0
	must.True(t, got == want, "counted are %+v, there are %+v", got, want)
}

var loanID = algo.LoanID{Borrower: 7}

func TestLend(t *testing.T) {
	s := New(Config{})
	r := rule("p", log(100, 10*time.Second))
	a := borrow(t, s, r, 0, Borrow{ID: loanID, Want: 16})
	must.True(t, a.Granted == 16 && a.Term == time.Second && a.Ticket == 0, "%+v", a)
	d := decide(t, s, r, "k", at(0), cost(80))
	must.True(t, d.Allowed && d.Remaining == 4, "beside 16 on loan: %+v", d)
	got, err := s.Decide(s.key("p", "k"), r, at(0), cost(5), nil)
	must.True(t, err == nil && !got.Allowed && got.OnLoan == 16 && got.OnLoanFor >= time.Second &&
		got.RetryAfter == got.OnLoanFor, "for want of what is on loan: %+v, %v", got, err)
	got, err = s.Decide(s.key("p", "k"), r, at(0), cost(21), nil)
	must.True(t, err == nil && !got.Allowed && got.OnLoan == 16 && got.RetryAfter == 10*time.Second,
		"for longer where units on loan have been spent: %+v, %v", got, err)
	got = must.Value(s.Decide(s.key("p", "k"), r, at(0), cost(101), nil))(t)
	must.True(t, !got.Allowed && got.OnLoan == 0 && got.RetryAfter == algo.Never, "whatever is on loan: %+v", got)
	always := Call{Request: algo.Request{Cost: 0, Always: true}}
	got, err = s.Decide(s.key("p", "k"), r, at(0), always, nil)
	must.True(t, err == nil && got.OnLoan == 0, "asked whether more is in use than the limit: %+v, %v", got, err)
	each, _, _, err := s.Look(s.key("p", "k"), r, at(0), 1)
	must.True(t, err == nil && each[0].Remaining == 4, "%+v, %v", each, err)
	loans, err := s.Recall(s.key("p", "k"), "p", at(0))
	must.True(t, err == nil && len(loans) == 1 && loans[0].ID == loanID && loans[0].Left() == 16, "%+v, %v", loans, err)
	a = borrow(t, s, r, time.Second/2,
		Borrow{ID: loanID, Totals: algo.Totals{Granted: 16, Spent: 10, Returned: 6}, Want: 20})
	must.True(t, a.Charged == 10 && a.Granted == 16 && a.Term == 0, "after a recall: %+v", a)
	// What was spent counts from the report on.
	d = decide(t, s, r, "k", at(time.Second/2), cost(10))
	must.True(t, d.Allowed && d.Remaining == 0, "what was returned: %+v", d)
	d = decide(t, s, r, "k", at(10*time.Second), cost(81))
	must.True(t, !d.Allowed && d.RetryAfter == time.Second/2, "dated before the report: %+v", d)
	must.True(t, decide(t, s, r, "k", at(10*time.Second), cost(80)).Allowed, "refused")
	accounted(t, s)
}

func TestLoansStay(t *testing.T) {
	s := New(Config{})
	r := rule("p", log(100, 10*time.Second))
	borrow(t, s, r, 0, Borrow{ID: loanID, Want: 16})
	s.Sweep(at(time.Second/2), 1)
	expect.Equal(t, onLoanOf(s, "p"), 16, "are on loan after a sweep")
	decide(t, s, r, "k", at(0), cost(50))
	must.NoError(t, s.Reset(s.key("p", "k"), "p"))
	if d := decide(t, s, r, "k", at(time.Second/2), cost(0)); onLoanOf(s, "p") != 16 || d.Remaining != 84 {
		t.Errorf("%d are on loan after a reset, %+v", onLoanOf(s, "p"), d)
	}
	// Under a lower limit, and another algorithm.
	for _, l := range []algo.Limit{log(64, 10*time.Second),
		{Algorithm: algo.TokenBucket, Limit: 64, Window: 10 * time.Second},
		{Algorithm: algo.LeakyBucket, Limit: 64, Window: time.Second}} {
		if d := decide(t, s, rule("p", l), "k", at(time.Second/2), cost(0)); onLoanOf(s, "p") != 16 ||
			d.Remaining != 48 {
			t.Errorf("under %v %d are on loan, %+v", l, onLoanOf(s, "p"), d)
		}
	}
	a := borrow(t, s, rule("p", algo.Limit{Algorithm: algo.LeakyBucket, Limit: 64, Window: time.Second}), time.Second/2,
		Borrow{ID: loanID, Totals: algo.Totals{Granted: 16, Spent: 3}, Want: 30})
	expect.True(t, a.Term == 0 && a.Charged == 3, "lent from a queue: %+v", a)
	for range 3 {
		s.Sweep(at(20*time.Second), 1)
	}
	expect.Equal(t, s.Stats().Keys, 0, "keys are left when all is over")
	accounted(t, s)
}

// A loan travels with its state, and a reservation of the state can still be undone after what was reported.
func TestLoanMoves(t *testing.T) {
	from, to := New(Config{}), New(Config{Shut: true})
	r := rule("p", algo.Limit{Algorithm: algo.TokenBucket, Limit: 100, Window: 10 * time.Second})
	l := newLink(from, to, ownership.Target)
	l.sync(t, 0, true)
	borrow(t, from, r, 0, Borrow{ID: loanID, Want: 16})
	c := cost(30)
	c.Reservation, c.ReserveFor = reservationOf(1), minute
	decide(t, from, r, "k", at(0), c)
	borrow(t, from, r, 0, Borrow{ID: loanID, Totals: algo.Totals{Granted: 16, Spent: 6}, Want: 16})
	from.Shut(0)
	l.sync(t, 0, false)
	to.Open(0)
	k := to.key("p", "k")
	_, known, err := settle(to, k, r, l.there(0), reservationOf(1), 0)
	must.True(t, err == nil && known, "%v %v", known, err)
	a, err := to.Decide(k, r, l.there(0), cost(0), nil)
	must.True(t, err == nil && a.Remaining == 100-6-16, "%+v, %v", a, err)
	lent, err := to.Lend(k, r, l.there(time.Second/2),
		Borrow{ID: loanID, Totals: algo.Totals{Granted: 22, Spent: 9, Returned: 13}})
	if err != nil || lent.Charged != 3 || !lent.Ended || onLoanOf(to, "p") != 0 {
		t.Fatalf("%+v, %v; %d on loan", lent, err, onLoanOf(to, "p"))
	}
	accounted(t, from)
	accounted(t, to)
}

func TestLendOnlyWhatIsCopied(t *testing.T) {
	for _, d := range []Durability{Escrow, Sync} {
		s, copy := New(Config{}), New(Config{Shut: true})
		r := rule("p", log(100, 10*time.Second)).under(d)
		a := borrow(t, s, r, 0, Borrow{ID: loanID, Want: 16})
		expect.True(t, a.Term == 0 && a.Granted == 0, "lent without a backup: %+v", a)
		l := newLink(s, copy, ownership.Backup)
		l.sync(t, 0, true)
		a = borrow(t, s, r, 0, Borrow{ID: loanID, Want: 16})
		expect.True(t, a.Granted == 16 && a.Ticket != 0, "lent before the copy knows: %+v", a)
		l.sync(t, 0, false)
		// What renews a loan must be known, too; what reports it alone need not be waited for.
		a = borrow(t, s, r, time.Second/10, Borrow{ID: loanID, Totals: algo.Totals{Granted: 16}, Want: 16})
		expect.True(t, a.Granted == 16 && a.Ticket != 0, "renewed before the copy knows: %+v", a)
		r.Strict = true
		s2 := New(Config{})
		expect.Equal(t, borrow(t, s2, r, 0, Borrow{ID: loanID, Want: 16, Boot: 5}).Term, 0, "lent without a lease")
		accounted(t, s)
	}
}

// Both sides of a split know a loan, and each is told of a part of what was spent.
func TestLoansMerge(t *testing.T) {
	rules := []*Rule{rule("p", log(100, 10*time.Second)), rule("q", log(100, 10*time.Second))}
	p := newSplit(t, 2, rules...)
	a, b := p.parties[0].store, p.parties[1].store
	r := rules[0]
	borrow(t, a, r, 0, Borrow{ID: loanID, Want: 16})
	p.fork(0, 1)
	borrow(t, a, r, 0, Borrow{ID: loanID, Totals: algo.Totals{Granted: 16, Spent: 4}, Want: 16})
	borrow(t, b, r, 0, Borrow{ID: loanID, Totals: algo.Totals{Granted: 16, Spent: 6, Returned: 2}, Want: 16})
	borrow(t, b, rules[1], 0, Borrow{ID: loanID, Want: 16}) // of a key that one side alone knows
	p.merge(1, 0)
	granted, _ := holderLoan(a, a.key("p", "k"), "p", loanID)
	expect.True(t, granted.Spent == 4 && granted.Returned == 0 && !granted.Ended, "%+v", granted)
	d := decide(t, a, r, "k", at(0), cost(0))
	onLoan := onLoanOf(a, "p")
	expect.True(t, d.Remaining == 100-6-onLoan && onLoan == granted.Left(), "%d on loan, %+v", onLoan, d)
	expect.Equal(t, onLoanOf(a, "q"), 16, "are on loan of the key that one side alone knew")
	a.Sweep(at(time.Hour), 1)
	accounted(t, a)
	accounted(t, b)
}

// One side is told what was spent, and the state of the other side counts after the split.
func TestLoansMergeForgetsNothing(t *testing.T) {
	r := rule("p", log(100, 10*time.Second))
	p := newSplit(t, 2, r)
	a, b := p.parties[0].store, p.parties[1].store
	borrow(t, a, r, 0, Borrow{ID: loanID, Want: 16})
	p.fork(0, 1)
	decide(t, a, r, "k", at(0), cost(50))
	report := Borrow{ID: loanID, Totals: algo.Totals{Granted: 16, Spent: 8}}
	borrow(t, b, r, 0, report)
	p.merge(1, 0)
	borrow(t, a, r, 0, report)
	d := decide(t, a, r, "k", at(0), cost(0))
	expect.Equal(t, d.Remaining, 100-50-8-onLoanOf(a, "p"), "what was spent counts beside the check of the other side")
}

// debtor borrows in TestLoanCrash. Its clock is the holder's.
type debtor struct {
	id     algo.LoanID
	totals algo.Totals
	known  int64
	until  time.Duration
}

func (d *debtor) hear(sent time.Duration, a Lent) {
	if a.ID != d.id {
		return
	}
	if a.Ended {
		*d = debtor{id: algo.LoanID{Borrower: d.id.Borrower, Number: d.id.Number + 1}}
		return
	}
	d.totals.Granted = max(d.totals.Granted, a.Granted)
	d.known = max(d.known, min(a.Spent, d.totals.Spent))
	if a.Term == 0 {
		d.totals.Returned += d.totals.Left()
	} else {
		d.until = max(d.until, sent+a.Term)
	}
}

// TestLoanCrash has borrowers and a holder whose copy takes over: judged by when borrowers really spent, nothing is
// admitted beyond the limit, under a durability that says so.
func TestLoanCrash(t *testing.T) {
	const limit, w = 200, 2 * time.Second
	for _, d := range []Durability{Escrow, Sync} {
		lent, survived := 0, 0
		for seed := range seeds(300) {
			rng := rand.New(rand.NewPCG(seed, uint64(d)))
			urgent := false
			holder := New(Config{Urgent: func(int) { urgent = true }})
			copy := New(Config{Shut: true})
			l := newLink(holder, copy, ownership.Backup)
			l.most = 1 << (4 + rng.IntN(8))
			r := rule("p", log(limit, w)).under(d)
			now, offset := time.Duration(0), time.Duration(0)
			l.sync(t, now, true)
			staged, confirmed := false, uint64(0)
			var admitted admissions
			type wait struct {
				ticket uint64
				done   func()
			}
			var waits []wait
			after := func(ticket uint64, done func()) {
				if ticket <= confirmed {
					done()
					return
				}
				waits = append(waits, wait{ticket, done})
			}
			var debtors []*debtor
			for i := range uint64(3) {
				debtors = append(debtors, &debtor{id: algo.LoanID{Borrower: i + 1}})
			}
			owner := holder
			instant := func() algo.Instant { return at(now + offset) }
			act := func() {
				b := debtors[rng.IntN(len(debtors))]
				switch rng.IntN(6) {
				case 0:
					c := Call{Request: algo.Request{Cost: 1 + rng.Int64N(20), Partial: true}}
					a := must.Value(owner.Decide(owner.key("p", "k"), r, instant(), c, nil))(t)
					at := now
					after(a.Ticket, func() { admitted.add(at, a.Granted) })
				case 1, 2:
					if now >= b.until {
						b.totals.Returned += b.totals.Left()
					}
					sent := now
					a := must.Value(owner.Lend(owner.key("p", "k"), r, instant(),
						Borrow{ID: b.id, Totals: b.totals, Known: b.known, Want: rng.Int64N(40)}))(t)
					if a.Term > 0 {
						lent++
					}
					after(a.Ticket, func() { b.hear(sent, a) })
				default:
					if n := min(b.totals.Left(), 1+rng.Int64N(5)); n > 0 && now < b.until {
						b.totals.Spent += n
						admitted.add(now, n)
					}
				}
			}
			for range 100 + rng.IntN(300) {
				now += time.Duration(rng.Int64N(int64(20 * time.Millisecond)))
				switch n := rng.IntN(12); {
				case n < 3 || urgent && n < 6:
					urgent = false
					l.drain(now)
				case n < 6:
					if len(l.queue) > 0 {
						confirmed = max(confirmed, l.queue[0].version)
						l.deliver(t, now, &staged)
						ready := waits
						waits = nil
						for _, w := range ready {
							after(w.ticket, w.done)
						}
					}
				default:
					act()
				}
			}
			waits = nil // their answers are lost with the holder
			onLoan := onLoanOf(copy, "p")
			if onLoan > 0 {
				survived++
			}
			confirmed = 1 << 62
			owner, offset = copy, l.offset
			r = rule("p", log(limit, w)).under(Async)
			copy.TakeOver(0, instant())
			if left := onLoanOf(copy, "p"); left != onLoan {
				t.Fatalf("durability %d, seed %d: %d of %d are on loan after the takeover", d, seed, left, onLoan)
			}
			copy.Open(0)
			for range 300 {
				now += time.Duration(rng.Int64N(int64(20 * time.Millisecond)))
				act()
			}
			slices.SortStableFunc(admitted, func(e, f struct {
				at    time.Duration
				units int64
			}) int {
				return int(e.at - f.at)
			})
			most := admitted.most(w)
			must.True(t, most <= limit, "durability %d, seed %d: %d were admitted in a window", d, seed, most)
			accounted(t, copy)
		}
		expect.True(t, lent != 0 && survived != 0,
			"%v", fmt.Sprint("nothing was lent, or to nobody when the holder was lost: ", lent, survived))
	}
}

// What borrowers say was lent to them, and nobody knows of, is believed up to twice the limit.
func TestLoanReportsAreBounded(t *testing.T) {
	const all, window = 100, 10 * time.Second
	for _, l := range []algo.Limit{
		log(all, window),
		{Algorithm: algo.TokenBucket, Limit: all, Window: window},
		{Algorithm: algo.FixedWindow, Limit: all, Window: window},
		{Algorithm: algo.SlidingCounter, Limit: all, Window: window},
		{Algorithm: algo.SlidingWindow, Limit: all, Window: window},
	} {
		t.Run(l.Algorithm.String(), func(t *testing.T) {
			s := New(Config{})
			r := rule("p", l)
			borrow(t, s, r, 0, Borrow{ID: loanID, Want: 16})
			var charged int64
			claim := func(id algo.LoanID, totals algo.Totals) {
				t.Helper()
				charged += borrow(t, s, r, 0, Borrow{ID: id, Totals: totals}).Charged
				onLoan := onLoanOf(s, "p")
				must.True(t, charged+onLoan <= 2*all, "%d charged and %d on loan after %+v", charged, onLoan, totals)
			}
			claim(loanID, algo.Totals{Granted: 40, Spent: 20}) // by an owner that was lost
			onLoan := onLoanOf(s, "p")
			must.True(t, charged == 20 && onLoan == 20, "%d charged and %d on loan", charged, onLoan)
			claim(loanID, algo.Totals{Granted: algo.MaxLimit, Spent: 30})
			claim(loanID, algo.Totals{Granted: algo.MaxLimit, Spent: algo.MaxLimit - 1})
			for i := range uint64(5) {
				claim(algo.LoanID{Borrower: 8, Number: i},
					algo.Totals{Granted: algo.MaxLimit, Spent: algo.MaxLimit / 2})
				claim(algo.LoanID{Borrower: 9, Number: i}, algo.Totals{Granted: algo.MaxLimit})
			}
			d := decide(t, s, r, "k", at(2*time.Second+2*window), cost(all))
			expect.True(t, d.Allowed, "two windows after the loans have ended: %+v", d)
			accounted(t, s)
		})
	}
}

// TestPartialBesideLoans: what is on loan stands in the way of a request that is refused, or makes it wait for longer,
// also where it is less than that asks for, unless the request never passes.
func TestPartialBesideLoans(t *testing.T) {
	s := New(Config{})
	r := rule("p", log(100, minute))
	borrow(t, s, r, 0, Borrow{ID: loanID, Want: 16})
	decide(t, s, r, "k", at(0), cost(84))
	for _, test := range []struct {
		partial bool
		cost    int64
		onLoan  int64
	}{{true, 50, 16}, {false, 50, 16}, {true, 101, 16}, {false, 101, 0}} {
		call := Call{Request: algo.Request{Cost: test.cost, Partial: test.partial}}
		a, err := s.Decide(s.key("p", "k"), r, at(0), call, nil)
		expect.True(t, err == nil && a.Granted == 0 && a.OnLoan == test.onLoan,
			"%d, partial %v: %+v, %v, want %d on loan", test.cost, test.partial, a, err, test.onLoan)
	}
}

// TestChargeBesideLoans: what is to be charged regardless of room waits for units on loan where these, returned, are
// room for it, and for none where there is room without them, or too little with them; nor a second time.
func TestChargeBesideLoans(t *testing.T) {
	s := New(Config{})
	r := rule("p", log(100, minute))
	borrow(t, s, r, 0, Borrow{ID: loanID, Want: 16})
	for _, test := range []struct {
		cost            int64
		whole           bool
		onLoan, granted int64
		allowed         bool
	}{{84, true, 0, 84, true}, {10, true, 16, 0, false}, {17, true, 0, 17, false}} {
		call := Call{Request: algo.Request{Cost: test.cost, Always: true}, Whole: test.whole}
		a, err := s.Decide(s.key("p", "k"), r, at(0), call, nil)
		expect.True(t, err == nil && a.Granted == test.granted && a.OnLoan == test.onLoan && a.Allowed == test.allowed,
			"%+v: %+v, %v", test, a, err)
	}
	other := s.key("p", "other")
	must.Value(s.Lend(other, r, at(0), Borrow{ID: loanID, Want: 16}))(t)
	must.True(t, must.Value(s.Decide(other, r, at(0), reserveFor(1, 80, minute), nil))(t).Allowed, "refused")
	got, err := s.Settle(other, r, at(0), Settlement{ID: reservationOf(1), Keep: 90, Whole: true})
	expect.True(t, err == nil && got.Known && got.OnLoan == 16 && got.Excess == 0, "a commit: %+v, %v", got, err)
	got = must.Value(s.Settle(other, r, at(0), Settlement{ID: reservationOf(1), Keep: 90}))(t)
	expect.True(t, got.OnLoan == 0 && got.Excess == 10 && got.Over, "a commit after a recall in vain: %+v", got)
}

// TestLoanBecomesConcurrency: what was on loan when a policy became one of leases is none of them, whether it is
// reported, ends, or is of a Quota's rate.
func TestLoanBecomesConcurrency(t *testing.T) {
	s := New(Config{})
	before, leases := rule("p", log(100, minute)),
		rule("p", algo.Limit{Algorithm: algo.Concurrency, Limit: 20, Window: minute})
	borrow(t, s, before, 0, Borrow{ID: loanID, Want: 16})
	borrow(t, s, before, 0, Borrow{ID: algo.LoanID{Borrower: 2, Number: 1}, Want: 16})
	a := borrow(t, s, leases, 0, Borrow{ID: loanID, Totals: algo.Totals{Granted: 16, Spent: 5, Returned: 11}})
	expect.Equal(t, a.Charged, 0, "%+v", a)
	expect.Equal(t, onLoanOf(s, "p"), 16, "are on loan")
	d := decide(t, s, leases, "k", at(2*time.Second), cost(0))
	expect.Equal(t, d.Remaining, 20, "leases are free of 20, of which nobody has one")
	bucket := rule("q", algo.Limit{Algorithm: algo.TokenBucket, Limit: 3600, Window: time.Hour})
	quota := Borrow{ID: loanID, Quota: algo.Quota{Demand: 3600, Term: 28 * time.Second}}
	a = borrow(t, s, bucket, 0, quota)
	must.True(t, a.Rate != 0 && a.Granted != 0, "%+v", a)
	leases = rule("q", leases.Limits[0])
	decide(t, s, leases, "k", at(10*time.Second), cost(0))
	expect.Equal(t, decide(t, s, leases, "k", at(minute), cost(0)).Remaining, 20, "leases are free of 20 after a Quota")
	accounted(t, s)
}

// TestLoanPlaces: no caller takes all places for a key's loans. A report for which there is none ends its loan: what is
// left of that is charged.
func TestLoanPlaces(t *testing.T) {
	s := New(Config{})
	r := rule("p", log(1_000_000, 10*time.Second))
	number := uint64(0)
	taken := func(caller string, want int64, totals algo.Totals) (n int) {
		t.Helper()
		for {
			number++
			id := algo.LoanID{Borrower: number, Number: 1}
			a := borrow(t, s, r, 0, Borrow{ID: id, Totals: totals, Want: want, Caller: caller})
			if _, ok := holderLoan(s, s.key("p", "k"), "p", id); !ok {
				left := totals.Left()
				must.True(t, (totals == (algo.Totals{}) || a.Charged == totals.Spent+left && a.Ended) && a.Term == 0,
					"without a place: %+v", a)
				return n
			}
			n++
		}
	}
	n := taken("greedy", 0, algo.Totals{Granted: 3, Spent: 1, Returned: 1})
	expect.True(t, n == algo.MaxLoans/2, "one caller has %d places", n)
	n = taken("greedy", 16, algo.Totals{})
	expect.True(t, n == 0, "and %d more", n)
	expect.Equal(t, taken("modest", 16, algo.Totals{}), algo.MaxLoans/4, "another has")
	expect.Equal(t, taken("", 16, algo.Totals{}), algo.MaxLoans/4, "those without a name have")
	taken("", 0, algo.Totals{Granted: 3, Spent: 1})
	accounted(t, s)
}

// TestLoanBecomesStrict: when a policy becomes strict, loans that were lent before end in time, and none is prolonged
// beyond the lease.
func TestLoanBecomesStrict(t *testing.T) {
	s := New(Config{})
	before := rule("p", algo.Limit{Algorithm: algo.TokenBucket, Limit: 3600, Window: time.Hour})
	strict := rule("p", before.Limits[0]).strict()
	quota := Borrow{ID: algo.LoanID{Borrower: 2, Number: 1}, Quota: algo.Quota{Demand: 3600, Term: 28 * time.Second}}
	lent, assigned := borrow(t, s, before, 0, Borrow{ID: loanID, Want: 16}), borrow(t, s, before, 0, quota)
	must.True(t, lent.Term > 0 && assigned.Term > 0, "%+v, %+v", lent, assigned)
	const now, lease = 500 * time.Millisecond, 800 * time.Millisecond
	for _, until := range []time.Duration{0, lease} { // without a lease; with one, and no copy
		s.Lease(0, int64(until))
		totals := algo.Totals{Granted: lent.Granted}
		a := borrow(t, s, strict, now, Borrow{ID: loanID, Totals: totals, Want: 16, Boot: int64(now)})
		expect.True(t, a.Term <= max(until-now, 0) && a.Until == lent.Until,
			"a lease until %v: a loan until %v becomes %+v", until, lent.Until, a)
		quota.Totals, quota.Boot = algo.Totals{Granted: assigned.Granted}, int64(now)
		a = borrow(t, s, strict, now, quota)
		expect.True(t, a.Until <= assigned.Until && a.Rate <= assigned.Rate,
			"a lease until %v: a quota %+v becomes %+v", until, assigned, a)
	}
	s.Sweep(at(30*time.Second), 1)
	expect.Equal(t, onLoanOf(s, "p"), 0, "are on loan after all terms")
}

// TestLendToAnUnknownKey: its record stays if something was lent or charged, and otherwise not.
func TestLendToAnUnknownKey(t *testing.T) {
	s := New(Config{})
	strict := rule("strict", log(100, minute)).strict()
	expect.Equal(t, borrow(t, s, strict, 0, Borrow{ID: loanID, Want: 16}).Granted, 0, "lent without a lease")
	expect.Equal(t, s.Stats().Keys, 0, "keys are left where nothing was lent")
	s.Cold(0, at(0))
	closed := rule("closed", log(100, minute))
	closed.ColdClosed = true
	expect.Equal(t, borrow(t, s, closed, 0, Borrow{ID: loanID, Want: 16}).Granted, 0, "lent what is taken for used up")
	expect.Equal(t, s.Stats().Keys, 0, "keys are left where nothing could be lent")
	r := rule("p", log(100, minute))
	expect.Equal(t, borrow(t, s, r, 0, Borrow{ID: loanID, Totals: algo.Totals{Granted: 5, Spent: 5}}).Charged, 5)
	expect.Equal(t, decide(t, s, r, "k", at(0), cost(0)).Remaining, 95, "are left of 100 after 5 that were reported")
}

// TestRecallEndsRenewal: a loan of what a request needs is not renewed.
func TestRecallEndsRenewal(t *testing.T) {
	for _, recall := range []bool{false, true} {
		s := New(Config{})
		r := rule("p", log(100, minute))
		borrow(t, s, r, 0, Borrow{ID: loanID, Want: 16})
		decide(t, s, r, "k", at(0), cost(64))
		if recall {
			loans, err := s.Recall(s.key("p", "k"), "p", at(0))
			must.True(t, err == nil && len(loans) == 1, "%v %v", loans, err)
		}
		a := borrow(t, s, r, 0, Borrow{ID: loanID, Totals: algo.Totals{Granted: 16}, Want: 16})
		expect.True(t, (a.Term == 0) == recall, "renewed for %v; called back: %v", a.Term, recall)
	}
}

// TestLoansLeaveRoomForKeys: a caller that borrows under as many loans as it gets leaves room for the keys of others.
func TestLoansLeaveRoomForKeys(t *testing.T) {
	s := New(Config{MaxBytes: 2 << 20, Partitions: 8})
	r := rule("p", window(1<<40, minute))
	granted := 0
	for key := range 64 {
		for n := range algo.MaxLoans {
			b := Borrow{ID: algo.LoanID{Borrower: 7, Number: uint64(n + 1)}, Want: algo.LeastLoan, Caller: "greedy"}
			a := must.Value(s.Lend(s.key("p", fmt.Sprint("greedy", key)), r, at(time.Second), b))(t)
			if a.Term > 0 {
				granted++
			}
		}
	}
	most := 2 << 20 / loansPart / loanBytes
	expect.True(t, granted <= most+1 && granted >= most/2, "%d loans, of %d", granted, most)
	for key := range 1000 {
		call := Call{Request: algo.Request{Cost: 1}, Caller: "modest"}
		_, err := s.Decide(s.key("p", fmt.Sprint("modest", key)), r, at(time.Second), call, nil)
		must.NoError(t, err, "key %d of another caller", key)
	}
	s.Sweep(at(time.Hour), 1)
	loansCounted(t, s)
	expect.Equal(t, s.budget.loans.Load(), 0, "bytes of loans are counted when all are over")
}
