package lend

import (
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// owner decides for one key, as a node does.
type owner struct {
	t  *testing.T
	ls algo.Limits
	a  *algo.Arena
	s  algo.State
	u  algo.Loans
}

func newOwner(t *testing.T, l algo.Limit) *owner {
	o := &owner{t: t, ls: algo.Limits{l}, a: algo.NewArena(nil)}
	o.s = make(algo.State, o.ls.Words())
	o.ls.Init(o.s, algo.Instant{})
	return o
}

func (o *owner) expire(now int64) {
	for {
		if _, ok, err := o.ls.Expire(o.a, o.s, algo.Instant{Mono: now, Wall: now}, &o.u); err != nil {
			o.t.Fatal(err)
		} else if !ok {
			return
		}
	}
}

func (o *owner) check(now, n int64) bool {
	o.expire(now)
	at := algo.Instant{Mono: now, Wall: now}
	d, err := o.ls.Decide(o.a, o.s, at, algo.Request{Cost: n, OnLoan: o.u.OnLoan(), OnLoanFor: o.u.OnLoanFor(at)}, nil)
	must.NoError(o.t, err)
	return d.Allowed
}

func (o *owner) lend(now int64, borrower uint64, r Report[string, int]) Answer[int] {
	o.expire(now)
	at := algo.Instant{Mono: now, Wall: now}
	id := algo.LoanID{Borrower: borrower, Number: r.Number}
	must.True(o.t, r.Totals.Spent+r.Totals.Returned <= r.Totals.Granted && r.Totals.Spent >= 0 &&
		r.Totals.Returned >= 0, "a borrower says %+v", r)
	if before, ok := o.u.Get(id); ok && !before.Ended && r.Totals.Granted > before.Granted {
		o.t.Fatalf("a borrower says %+v, of which %d were granted", r, before.Granted)
	}
	_, _, err := o.ls.Report(o.a, o.s, at, &o.u, id, r.Totals, r.Known, true)
	must.NoError(o.t, err)
	loan := o.ls.Lend(o.a, o.s, at, &o.u, id, r.Want, math.MaxInt64)
	again := 250 * time.Millisecond
	if r.Want == 0 {
		again = 5 * time.Millisecond
	} else if o.u.OnLoan() > 0 {
		again = 20 * time.Millisecond
	}
	return Answer[int]{Number: r.Number,
		Lent: limit.Lent{Granted: loan.Granted, Spent: loan.Spent, Ended: loan.Ended, Term: loan.Term, Again: again}}
}

// newBook returns a Book whose sample is the same in each run.
func newBook(wake func()) *Book[string, int] {
	return NewBook[string, int](wake, rand.New(rand.NewPCG(1, 2)).Uint32)
}

// at is a clock that stands still.
func at(now int64) func() int64 { return func() int64 { return now } }

// miss has keys missed until the book has a loan of each.
func miss(b *Book[string, int], now int64, keys ...string) {
	for b.Loans() < len(keys) {
		for _, key := range keys {
			b.Missed(key, 1, at(now), nil)
		}
	}
}

// due is what a book reports at now.
func due(b *Book[string, int], now int64) []Report[string, int] {
	reports, _ := b.Report(now)
	return reports
}

type delivery struct {
	at     int64
	book   int
	report *Report[string, int]
	answer *Answer[int]
	recall *algo.Loan
	sent   int64
}

// TestBook has borrowers with books of their own and one owner, with messages that are late, lost and overtake each
// other. Judged by the admissions at the borrowers no window admits too much; when the load ends all units are
// returned.
func TestBook(t *testing.T) {
	const limit, w = 2000, 2 * time.Second
	taken, refused, recalls, messages, ticks := 0, 0, 0, 0, 0
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 3))
		o := newOwner(t, algo.Limit{Algorithm: algo.SlidingLog, Limit: limit, Window: w})
		books := make([]*Book[string, int], 4)
		next := make([]int64, len(books))
		rate := make([]float64, len(books))
		for i := range books {
			books[i] = newBook(func() { next[i] = 0 })
			rate[i] = 1 + float64(i-2)/1000
		}
		var way []delivery
		post := func(now int64, d delivery) {
			if rng.IntN(10) > 0 {
				d.at = now + rng.Int64N(int64(10*time.Millisecond))
				way = append(way, d)
			}
		}
		type admission struct{ at, n int64 }
		var admitted []admission
		now := int64(time.Second)
		light := false
		step := func(load bool) {
			now += rng.Int64N(int64(2 * time.Millisecond))
			for i := 0; i < len(way); {
				d := way[i]
				if d.at > now {
					i++
					continue
				}
				way = slices.Delete(way, i, i+1)
				local := int64(float64(now) * rate[d.book])
				switch {
				case d.report != nil:
					a := o.lend(now, uint64(d.book+1), *d.report)
					post(now, delivery{book: d.book, answer: &a, sent: d.sent})
				case d.answer != nil:
					books[d.book].Answered(d.sent, local, []Answer[int]{*d.answer})
				default:
					books[d.book].Recalled(d.recall.ID.Number, d.recall.Granted, local)
				}
			}
			for i, b := range books {
				local := int64(float64(now) * rate[i])
				for range rng.IntN(4) {
					n := 1 + rng.Int64N(3)
					if !load || rng.IntN(i+1) > 1 || light && rng.IntN(10) > 0 {
						continue
					}
					if _, _, ok := b.Take("k", n, func() int64 { return local }); ok {
						admitted = append(admitted, admission{now, n})
						taken++
						continue
					}
					b.Missed("k", n, at(local), nil)
					if o.check(now, n) {
						admitted = append(admitted, admission{now, n})
						continue
					}
					refused++
					if rng.IntN(4) == 0 && o.u.OnLoan() > 0 {
						recalls++
						o.u.Recall()
						for _, l := range o.u.Most() {
							post(now, delivery{book: int(l.ID.Borrower - 1), recall: &l})
						}
					}
				}
				if local >= next[i] {
					reports, after := b.Report(local)
					if after <= 0 {
						after = Tick
					}
					next[i] = local + int64(after)
					ticks++
					for _, r := range reports {
						messages++
						post(now, delivery{book: i, report: &r, sent: local})
					}
				}
			}
			o.expire(now)
			if held := o.u.OnLoan(); held > 0 {
				at := algo.Instant{Mono: now, Wall: now}
				room := o.ls.Room(o.a, o.s, at)
				must.True(t, held <= room, "seed %d: %d are held, where there is room for %d", seed, held, room)
			}
		}
		for i := range 6000 {
			light = i/1500%2 == 0
			step(rng.IntN(3000) > 0)
		}
		for range 1500 {
			step(false)
		}
		expect.Equal(t, o.u.OnLoan(), 0, "seed %d: units held when the load has been over for a while", seed)
		for i, b := range books {
			expect.Equal(t, b.Loans(), 0, "seed %d: loans of book %d when the load has been over for a while", seed, i)
		}
		var sum int64
		first := 0
		for _, e := range admitted {
			for sum += e.n; admitted[first].at <= e.at-int64(w); first++ {
				sum -= admitted[first].n
			}
			must.True(t, sum <= limit, "seed %d: %d were admitted in one window", seed, sum)
		}
	}
	t.Logf("%d taken, %d refused, %d recalls, %d messages in %d ticks", taken, refused, recalls, messages, ticks)
	expect.True(t, taken >= 10000 && refused != 0 && recalls != 0, "too little happened")
}

// TestTake has many take at once: never more than was granted.
func TestTake(t *testing.T) {
	const granted = 10_000
	b := newBook(func() {})
	for b.Loans() == 0 {
		b.Missed("k", 1000, at(1), nil)
	}
	r := due(b, 1)
	must.True(t, len(r) == 1 && r[0].Want >= granted, "%+v", r)
	b.Answered(1, 2, []Answer[int]{{Number: r[0].Number, Lent: limit.Lent{Granted: granted, Term: time.Second}}})
	var taken atomic.Int64
	var callers sync.WaitGroup
	for range 8 {
		callers.Go(func() {
			for range granted {
				if _, _, ok := b.Take("k", 1, func() int64 { return 5 }); ok {
					taken.Add(1)
				}
			}
		})
	}
	callers.Wait()
	expect.True(t, taken.Load() == granted, "%d taken of %d", taken.Load(), granted)
	_, _, ok := b.Take("other", 1, func() int64 { return 5 })
	expect.True(t, !ok, "taken from a key without a loan")
	expect.Equal(t, testing.AllocsPerRun(100, func() { b.Take("k", 1, func() int64 { return 5 }) }), 0, "allocations")
}

// TestClockIsReadLast: what is taken while the loan ends is not admitted, however late the clock is read.
func TestClockIsReadLast(t *testing.T) {
	for name, take := range map[string]func(b *Book[string, int], now func() int64) bool{
		"Take": func(b *Book[string, int], now func() int64) bool { _, _, ok := b.Take("k", 1, now); return ok },
		"TakeAll": func(b *Book[string, int], now func() int64) bool {
			return b.TakeAll([]Part[string, int]{{Key: "k", Units: 1}}, now)
		},
	} {
		b, number := lent(t, 10)
		l := b.byNumber[number]
		now := func() int64 { // the loan ends while a unit is taken
			if l.left.Load() < 10 {
				return l.deadline.Load()
			}
			return l.deadline.Load() - 1
		}
		expect.True(t, !take(b, now), "%s: admitted at the end of the loan", name)
	}
}

// TestKnownIsWhatAnswersConfirm: units are known to be spent when an answer has said so, not when they have been spent
// or reported.
func TestKnownIsWhatAnswersConfirm(t *testing.T) {
	b, number := lent(t, 10)
	for range 7 {
		b.Take("k", 1, at(5))
	}
	now := int64(time.Second) / perTerm
	r := due(b, now)
	must.True(t, len(r) == 1 && r[0].Totals.Spent == 7 && r[0].Known == 0, "%+v", r)
	b.Answered(now, now, []Answer[int]{{Number: number, Lent: limit.Lent{Granted: 10, Spent: 4, Term: time.Second}}})
	b.Take("k", 1, at(5))
	now *= 2
	r = due(b, now)
	expect.True(t, len(r) == 1 && r[0].Totals.Spent == 8 && r[0].Known == 4, "%+v", r)
}

// TestPending: who waits for units is told when the owner has answered the report that asks for them.
func TestPending(t *testing.T) {
	b, number := lent(t, 10)
	b.Take("k", 10, at(5))
	now := int64(time.Second) / perTerm
	r := due(b, now)
	coming := b.Pending("k", 3, now+1)
	must.True(t, coming != nil && len(r) == 1 && r[0].Want >= 3, "%v, %+v", coming, r)
	b.Answered(now, now, []Answer[int]{{Number: number, Lent: limit.Lent{Granted: 20, Spent: 10, Term: time.Second}}})
	<-coming
	_, _, ok := b.Take("k", 3, at(now))
	expect.True(t, ok, "the units are not there")
	expect.True(t, b.Pending("none", 1, now) == nil, "somebody waits for a key without a loan")
}

// What is taken after the deadline is not admitted, and not spent twice.
func TestDeadline(t *testing.T) {
	b := newBook(func() {})
	miss(b, 1, "k")
	number := due(b, 1)[0].Number
	b.Answered(1, 100, []Answer[int]{{Number: number, Lent: limit.Lent{Granted: 10, Term: 500}}})
	for _, c := range []struct {
		now  int64
		want bool
	}{{500, true}, {501, false}, {502, false}, {400, true}} {
		_, _, ok := b.Take("k", 1, func() int64 { return c.now })
		expect.Equal(t, ok, c.want, "at %d", c.now)
	}
	r := due(b, int64(apart)+1)
	expect.True(t, len(r) == 1 && r[0].Totals == (algo.Totals{Granted: 10, Spent: 4, Returned: 6, Checks: 2}), "%+v", r)
	expect.Equal(t, b.Late(), 2, "units were taken after the deadline")
}

// TestSample: however much is asked, no more than some of it is counted; and a key is found that is asked often, but
// not one that is not.
func TestSample(t *testing.T) {
	const intervals = 4
	for _, rate := range []int64{1000, 100_000, 2_000_000} {
		r := rand.New(rand.NewPCG(uint64(rate), 1))
		b := newBook(func() {})
		now, counted := int64(time.Hour), 0
		clock := func() int64 { counted++; return now }
		ask := func(often bool) {
			for end := now + int64(intervals*interval); now < end; now += int64(time.Second) / rate {
				k := strconv.FormatUint(r.Uint64(), 36)
				if often && r.IntN(3) == 0 {
					k = "k"
				}
				b.Missed(k, 1, clock, nil)
			}
		}
		ask(false)
		counted = 0
		ask(false)
		some := min(rate*intervals/10/sampled, intervals*samples)
		expect.True(t, int64(counted) <= some*5/4 && int64(counted) >= some*3/8,
			"%d a second: %d are counted, not about %d", rate, counted, some)
		expect.True(t, b.Loans() <= 0,
			"%d a second: a key that is asked once is taken for one that is asked often", rate)
		if ask(true); b.Loans() != 1 || !b.Has("k") {
			t.Errorf("%d a second: a key with a third of it is not found: %d are", rate, b.Loans())
		}
	}
}

// lent returns a book with a loan that has granted so much, and its number.
func lent(t *testing.T, granted int64) (b *Book[string, int], number uint64) {
	t.Helper()
	b = newBook(func() {})
	miss(b, 1, "k")
	number = due(b, 1)[0].Number
	b.Answered(1, 2, []Answer[int]{{Number: number, Lent: limit.Lent{Granted: granted, Term: time.Second}}})
	return b, number
}

// TestRecalled: what is asked back cannot be taken any more, nor what the answer that is on its way has granted, at any
// moment.
func TestRecalled(t *testing.T) {
	for range 200 {
		b, number := lent(t, 10)
		var taken atomic.Int64
		taking, stop := make(chan struct{}), make(chan struct{})
		var callers sync.WaitGroup
		callers.Go(func() {
			close(taking)
			for {
				select {
				case <-stop:
					return
				default:
				}
				if _, _, ok := b.Take("k", 1, func() int64 { return 5 }); ok {
					taken.Add(1)
				}
			}
		})
		<-taking
		r, ok := b.Recalled(number, 1_000_000, 5)
		close(stop)
		callers.Wait()
		n := taken.Load()
		must.True(t, ok && n <= 10 && r.Totals == (algo.Totals{Granted: 1_000_000, Spent: n, Returned: 1_000_000 - n,
			Checks: r.Totals.Checks}) && r.Totals.Checks <= n, "%d were taken; %+v", n, r)
	}
	b, _ := lent(t, 10)
	r, ok := b.Recalled(99, 5, 5)
	expect.True(t, !ok, "of another loan: %+v", r)
	_, left, ok := b.Take("k", 4, func() int64 { return 5 })
	expect.True(t, ok && left == 6, "%d left, %t", left, ok)
	if r := due(b, int64(time.Second)/perTerm); len(r) != 1 ||
		r[0].Totals != (algo.Totals{Granted: 10, Spent: 4, Checks: 1}) {
		t.Errorf("%+v", r)
	}
}

// TestUnheard: what nobody has taken in is said again, at once to who is said to hold the key and soon where that is
// not known; who has heard it is told from then on, until that one does not answer.
func TestUnheard(t *testing.T) {
	wakes := 0
	b := newBook(func() { wakes++ })
	miss(b, 1, "k")
	now := int64(1)
	report := func(want int) Report[string, int] {
		t.Helper()
		r := due(b, now)
		must.True(t, len(r) == 1 && r[0].Node == want && r[0].Want != 0,
			"at %v: %+v, not to %d", time.Duration(now), r, want)
		return r[0]
	}
	quiet := func(want time.Duration) {
		t.Helper()
		if r, next := b.Report(now); len(r) != 0 || next != want {
			t.Fatalf("at %v: %+v, and again after %v, not %v", time.Duration(now), r, next, want)
		}
		now += int64(want)
	}
	unheard := func(r Report[string, int], from, holder int) {
		t.Helper()
		before := wakes
		b.Answered(now, now, []Answer[int]{{Number: r.Number, Lent: limit.Lent{Unheard: true}, From: from, To: holder}})
		must.True(t, wakes != before, "nobody is woken")
	}
	unheard(report(0), 1, 2)
	unheard(report(2), 2, 1) // at once; one of them is wrong
	quiet(2 * soon)
	unheard(report(1), 1, 0)
	quiet(4 * soon)
	unheard(report(0), 1, 1)
	quiet(8 * soon)
	b.Answered(now, now, []Answer[int]{{Number: report(0).Number, Lent: limit.Lent{Granted: 100, Term: time.Second},
		From: 3}})
	for range 80 {
		b.Take("k", 1, func() int64 { return now })
	}
	now += int64(Tick)
	unheard(report(3), 3, 0)
	quiet(soon)
	b.Answered(now, now, []Answer[int]{{Number: report(0).Number, Lent: limit.Lent{Granted: 150, Term: time.Second},
		From: 4}})
	for range 60 {
		b.Take("k", 1, func() int64 { return now })
	}
	now += int64(Tick)
	r := report(4)
	b.Lost(5, now)
	quiet(Tick)
	b.Lost(4, now)
	quiet(soon)
	again := report(0)
	expect.True(t, again.Totals == r.Totals && again.Number == r.Number, "%+v, and then %+v", r, again)
	now += int64(unanswered)
	if r := due(b, now); len(r) != 1 || r[0].Node != 0 {
		t.Errorf("%+v", r)
	}
}
