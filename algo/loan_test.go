package algo

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// lending is an owner, its borrowers and the way between them, on which messages are late, lost, repeated and overtake
// each other. Time is the owner's; borrowers' clocks run up to 2 per mille slower or faster.
type lending struct {
	t     *testing.T
	ls    Limits
	a     *Arena
	s     State
	u     Loans
	now   int64
	r     *rand.Rand
	who   []*borrowing
	way   []message
	log   []string
	spent []event // what was really admitted, and when

	windows map[int64]bool // of limit 0, that were ever open

	loaned, refusals, recalls, ends int
}

type borrowing struct {
	boot     uint64
	number   uint64
	totals   Totals
	known    int64
	deadline float64 // on its clock
	rate     float64
	silent   bool
}

func (b *borrowing) clock(now int64) float64 { return float64(now) * b.rate }

// message is what a borrower says, or what it is told.
type message struct {
	at    int64
	from  int64
	to    *borrowing // nil: to the owner
	id    LoanID
	t     Totals
	known int64
	want  int64
	sent  float64
	loan  Loan
}

func (l *lending) fatalf(format string, args ...any) {
	l.t.Helper()
	for _, line := range l.log[max(0, len(l.log)-60):] {
		l.t.Log(line)
	}
	l.t.Fatalf("at %v: %s", time.Duration(l.now), fmt.Sprintf(format, args...))
}

func (l *lending) note(format string, args ...any) {
	l.log = append(l.log, fmt.Sprintf("%v ", time.Duration(l.now))+fmt.Sprintf(format, args...))
}

func (l *lending) instant() Instant { return Instant{Mono: l.now, Wall: l.now} }

func (l *lending) expire() {
	for {
		n, ok, err := l.ls.Expire(l.a, l.s, l.instant(), &l.u)
		if err != nil {
			l.fatalf("%v", err)
		}
		if !ok {
			return
		}
		l.ends++
		l.note("a loan ends with %d on loan", n)
	}
}

func (l *lending) used() []int64 {
	used := make([]int64, len(l.ls))
	l.ls.walk(l.a, l.s, l.s.Latest(l.instant()), func(i int, c counter, t []uint64) {
		used[i] = c.used(&l.ls[i], l.a, t, l.s.Latest(l.instant()))
		if i > 0 {
			return
		}
		switch c.(type) {
		case fixedWindow:
			if t[1] > 0 {
				l.windows[int64(t[0])] = true
			}
		case slidingCounter:
			if t[2] > 0 {
				l.windows[int64(t[0])] = true
			}
		case calendarWindow:
			l.windows[int64(t[0])*1e9] = true
		}
	})
	return used
}

// judge checks what must hold at every instant.
func (l *lending) judge() {
	var onLoan int64
	for _, k := range l.u.list {
		if !k.Ended {
			onLoan += k.Left()
		}
		if k.Spent+k.Returned > k.Granted {
			l.fatalf("a loan has more spent and returned than granted: %+v", k)
		}
	}
	if onLoan != l.u.OnLoan() {
		l.fatalf("%d are on loan, and %d are said to be", onLoan, l.u.OnLoan())
	}
	for i, used := range l.used() {
		if l.ls[i].Limit != Unlimited && used+onLoan > l.ls[i].holds() {
			l.fatalf("%d in use and %d on loan are more than the limit of %v", used, onLoan, l.ls[i])
		}
	}
	for _, b := range l.who {
		if b.clock(l.now) < b.deadline && b.totals.Left() > 0 {
			if k, ok := l.u.Get(LoanID{b.boot, b.number}); !ok || k.Ended || k.Left() < b.totals.Left() {
				l.fatalf("a borrower may spend %+v, of which the owner knows %+v", b.totals, k)
			}
		}
	}
}

func (l *lending) send(m message) {
	m.from = l.now
	for range 1 + l.r.IntN(5)/4 {
		if l.r.IntN(6) > 0 {
			m.at = l.now + l.r.Int64N(int64(40*time.Millisecond))
			if l.r.IntN(20) == 0 {
				m.at += int64(2 * time.Second)
			}
			l.way = append(l.way, m)
		}
	}
}

func (l *lending) hear(id LoanID, t Totals, known int64) {
	l.expire()
	_, n, err := l.ls.Report(l.a, l.s, l.instant(), &l.u, id, t, known, true)
	if err != nil {
		l.fatalf("%v", err)
	}
	l.note("the owner hears of %v: %+v, charges %d", id, t, n)
}

func (l *lending) deliver(m message) {
	if m.to == nil {
		l.hear(m.id, m.t, m.known)
		m.loan = l.ls.Lend(l.a, l.s, l.instant(), &l.u, m.id, m.want, math.MaxInt64)
		l.note("the owner answers %+v", m.loan)
		if m.loan.Term > 0 && m.loan.Left() > 0 {
			l.loaned++
		}
		for _, b := range l.who {
			if b.boot == m.id.Borrower {
				m.to = b
				l.send(m)
			}
		}
		return
	}
	b := m.to
	if m.id != (LoanID{b.boot, b.number}) {
		return
	}
	if m.loan.Ended {
		b.number, b.totals, b.known, b.deadline = b.number+1, Totals{}, 0, 0
		return
	}
	b.totals.Granted = max(b.totals.Granted, m.loan.Granted)
	b.known = max(b.known, min(m.loan.Spent, b.totals.Spent))
	if m.loan.Term > 0 {
		b.deadline = max(b.deadline, m.sent+float64(m.loan.Term))
	} else {
		b.totals.Returned += b.totals.Left()
	}
}

func (l *lending) ask(b *borrowing, want int64) {
	if b.clock(l.now) >= b.deadline {
		b.totals.Returned += b.totals.Left()
	}
	if b.totals != (Totals{}) && b.clock(l.now) >= b.deadline+float64(LoanTerm) {
		b.number, b.totals, b.known, b.deadline = b.number+1, Totals{}, 0, 0
	}
	m := message{id: LoanID{b.boot, b.number}, t: b.totals, known: b.known, want: want, sent: b.clock(l.now)}
	if l.r.IntN(3) == 0 {
		l.deliver(m) // which took no time: nothing but the owner's margin makes its term the longer one
		return
	}
	l.send(m)
}

func (l *lending) check(n int64) {
	l.expire()
	decide := func() bool {
		now := l.instant()
		d, err := l.ls.Decide(l.a, l.s, now, Request{Cost: n, OnLoan: l.u.OnLoan(), OnLoanFor: l.u.OnLoanFor(now)}, nil)
		if err != nil {
			l.fatalf("%v", err)
		}
		if !d.Allowed && d.RetryAfter == 0 {
			l.fatalf("a refusal says that the same passes now: %+v", d)
		}
		return d.Allowed
	}
	fits := func() bool {
		for i, used := range l.used() {
			if l.ls[i].Limit != Unlimited && used+n > l.ls[i].holds() {
				return false
			}
		}
		return true
	}
	allowed := decide()
	if !allowed && l.u.OnLoan() > 0 && fits() {
		l.recalls++
		l.u.Recall()
		for _, b := range l.who {
			if !b.silent {
				// What recalls says what was granted: the message that granted it may be on its way.
				if k, ok := l.u.Get(LoanID{b.boot, b.number}); ok && !k.Ended {
					b.totals.Granted = max(b.totals.Granted, k.Granted)
				}
				b.totals.Returned += b.totals.Left()
				l.hear(LoanID{b.boot, b.number}, b.totals, b.known)
			}
		}
		allowed = decide()
	}
	l.note("check of %d: %v", n, allowed)
	if allowed {
		l.spent = append(l.spent, event{l.now, n})
		return
	}
	l.refusals++
	if !fits() {
		return
	}
	for _, b := range l.who {
		if k, ok := l.u.Get(LoanID{b.boot, b.number}); ok && !b.silent && !k.Ended && k.Left() > 0 {
			l.fatalf("%d were refused, in use are %v, and %d on loan to one who answers", n, l.used(), k.Left())
		}
	}
	if l.u.OnLoan() == 0 {
		l.fatalf("%d were refused though nothing is on loan and %v are in use", n, l.used())
	}
}

// move makes the state and the loans what another process makes of them.
func (l *lending) move() {
	l.expire()
	data := l.ls.Append(nil, l.a, l.s, l.instant())
	loans := l.u.Append(nil, l.instant())
	l.ls.Free(l.a, l.s)
	l.now += l.r.Int64N(int64(10 * time.Millisecond))
	if rest, err := l.ls.Restore(l.a, l.s, l.instant(), data); err != nil || len(rest) > 0 {
		l.fatalf("Restore: %v, %d bytes left", err, len(rest))
	}
	near := l.u.near
	u, rest, err := ReadLoans(l.instant(), append(loans, 7))
	if err != nil || !bytes.Equal(rest, []byte{7}) {
		l.fatalf("ReadLoans: %v, %d bytes left", err, len(rest))
	}
	l.u = u
	l.u.near = near
	l.note("moved")
}

func (l *lending) step() {
	l.now += l.r.Int64N(int64(15 * time.Millisecond))
	for i := 0; i < len(l.way); {
		if l.way[i].at > l.now {
			i++
			continue
		}
		m := l.way[i]
		l.way = slices.Delete(l.way, i, i+1)
		if l.now-m.from < int64(loanGrace-LoanTerm) { // what is later than that is charged once more
			l.deliver(m)
		}
	}
	b := l.who[l.r.IntN(len(l.who))]
	least := l.ls[0].holds()
	switch what := l.r.IntN(100); {
	case what < 25:
		l.check(1 + l.r.Int64N(max(least/10, 1)))
	case what < 28:
		l.check(1 + l.r.Int64N(least))
	case what < 70:
		if n := min(b.totals.Left(), 1+l.r.Int64N(20)); n > 0 && b.clock(l.now) < b.deadline {
			b.totals.Spent += n
			l.spent = append(l.spent, event{l.now, n})
			l.note("%d spends %d", b.boot, n)
		}
	case what < 94:
		l.ask(b, l.r.Int64N(least/4))
	case what < 95:
		l.ask(b, 0)
	case what < 96 && l.r.IntN(2) > 0:
		l.note("%d is lost", b.boot)
		*b = borrowing{boot: l.r.Uint64(), rate: b.rate}
	case what < 97:
		b.silent = !b.silent
	case what < 98:
		l.move()
	case what < 99:
		l.now += l.r.Int64N(int64(3 * time.Second))
	default:
		// The last instant at which it may spend.
		if b.totals.Left() > 0 && b.clock(l.now) < b.deadline {
			l.now = int64(b.deadline/b.rate) - 2
			l.expire()
		}
	}
	l.judge()
}

// admitted judges all admissions by when they were really made.
func (l *lending) admitted(k *Limit) {
	slices.SortStableFunc(l.spent, func(e, f event) int { return int(e.at - f.at) })
	within := func(from, to int64) (n int64) {
		for _, e := range l.spent {
			if e.at >= from && e.at < to {
				n += e.n
			}
		}
		return n
	}
	w := int64(k.Window)
	switch k.Algorithm {
	case SlidingLog, SlidingWindow:
		var n int64
		first := 0
		for _, e := range l.spent {
			for n += e.n; l.spent[first].at <= e.at-w; first++ {
				n -= l.spent[first].n
			}
			if n > k.Limit {
				l.now = e.at
				l.fatalf("%d were admitted in one window of %v", n, *k)
			}
		}
	case TokenBucket:
		var owed, at int64 // units × window
		for _, e := range l.spent {
			owed = max(owed-(e.at-at)*k.Limit, 0) + e.n*w
			if at = e.at; owed > k.holds()*w {
				l.now = e.at
				l.fatalf("%v owes %d units", *k, owed/w)
			}
		}
	default:
		for start := range l.windows {
			if n := within(start, start+w); n > k.Limit {
				l.fatalf("%d were admitted in the window of %v from %v on", n, *k, time.Duration(start))
			}
		}
	}
}

// TestLoans plays random histories of checks and loans, and wants the guarantee of each algorithm to hold for when
// units were really spent, whatever happens to messages and borrowers, and no refusal while somebody who answers has
// units.
func TestLoans(t *testing.T) {
	shapes := []Limits{
		{{Algorithm: SlidingLog, Limit: 100, Window: time.Second}},
		{{Algorithm: SlidingLog, Limit: 1000, Window: 10 * time.Second}},
		{{Algorithm: SlidingWindow, Limit: 400, Window: 2 * time.Second}},
		{{Algorithm: SlidingWindow, Limit: 5000, Window: 7 * time.Second, Slots: 3}},
		{{Algorithm: SlidingCounter, Limit: 300, Window: 2 * time.Second}},
		{{Algorithm: FixedWindow, Limit: 300, Window: time.Second}},
		{{Algorithm: FixedWindow, Limit: 2000, Window: 4 * time.Second, CarryDebt: true}},
		{{Algorithm: FixedWindow, Limit: 1000, Window: 3 * time.Second, Period: Epoch}},
		{{Algorithm: TokenBucket, Limit: 400, Window: time.Second}},
		{{Algorithm: TokenBucket, Limit: 100, Window: time.Second, Capacity: 700}},
		{
			{Algorithm: SlidingLog, Limit: 300, Window: time.Second},
			{Algorithm: TokenBucket, Limit: 100, Window: time.Second, Capacity: 700},
			{Algorithm: FixedWindow, Limit: Unlimited},
		},
	}
	steps := 4000
	if underRace || testing.Short() {
		steps = 2000
	}
	for _, ls := range shapes {
		t.Run(fmt.Sprintf("%v_%d", ls[0].Algorithm, ls[0].Limit), func(t *testing.T) {
			must.NoError(t, ls.Lendable())
			var loaned, refusals, recalls, ends int
			for seed := range uint64(6) {
				l := &lending{t: t, ls: ls, a: NewArena(nil), s: make(State, ls.Words()), now: 1e9,
					r: rand.New(rand.NewPCG(seed, 5)), windows: map[int64]bool{}}
				ls.Init(l.s, l.instant())
				for i := range 4 {
					l.who = append(l.who, &borrowing{boot: l.r.Uint64(), rate: 1 + float64(i-2)/1000})
				}
				for range steps {
					l.step()
				}
				for i := range ls {
					if ls[i].Limit != Unlimited {
						l.admitted(&ls[i])
					}
					expect.True(t, ls[i].Algorithm != FixedWindow || i != 0 || len(l.windows) >= 3,
						"only %d windows were seen", len(l.windows))
				}
				l.now += int64(owned(LoanTerm))
				l.expire()
				expect.Equal(t, l.u.OnLoan(), 0, "are on loan when all loans are over")
				l.now += int64(loanGrace)
				if l.expire(); l.u.Len() != 0 {
					t.Errorf("%d loans are known when all are long over", l.u.Len())
				}
				loaned, refusals, recalls, ends = loaned+l.loaned, refusals+l.refusals, recalls+l.recalls, ends+l.ends
			}
			expect.True(t, loaned >= 100 && refusals >= 20 && recalls >= 20 && ends >= 20,
				"too little happened: %d loans, %d refusals, %d recalls, %d ends", loaned, refusals, recalls, ends)
		})
	}
}

// TestLoanEnds: units are on loan until the last of their loans ends. A report of more than is known to be granted puts
// the end of its loan off: an owner that was lost may have renewed it. Of the ends that two sides know the later
// counts.
func TestLoanEnds(t *testing.T) {
	ls := Limits{{Algorithm: SlidingLog, Limit: 1000, Window: time.Minute}}
	a, s := NewArena(nil), make(State, ls.Words())
	ls.Init(s, Instant{})
	var u, other Loans
	const first, second = 1, 2
	for _, line := range []struct {
		at      time.Duration
		side    *Loans
		id      uint64
		granted int64
		ends    time.Duration // of that loan
		until   time.Duration // the last end on that side
	}{
		{0, &u, first, 10, 0, 0},
		{400 * time.Millisecond, &u, second, 10, 400 * time.Millisecond, 400 * time.Millisecond},
		{500 * time.Millisecond, &u, first, 10, 0, 400 * time.Millisecond},
		{600 * time.Millisecond, &u, first, 12, 600 * time.Millisecond, 600 * time.Millisecond},
		{700 * time.Millisecond, &other, second, 10, 700 * time.Millisecond, 700 * time.Millisecond},
		{500 * time.Millisecond, &other, first, 10, 500 * time.Millisecond, 700 * time.Millisecond},
	} {
		now := Instant{Mono: int64(line.at)}
		_, _, err := ls.Report(a, s, now, line.side, LoanID{line.id, 1}, Totals{Granted: line.granted}, 0, true)
		must.NoError(t, err)
		loan, _ := line.side.Get(LoanID{line.id, 1})
		ends := loan.Until - owned(LoanTerm)
		expect.Equal(t, ends, int64(line.ends), "%+v: it ends a term after %v", line, time.Duration(ends))
		expect.Equal(t, line.side.OnLoanFor(now)+line.at-time.Duration(owned(LoanTerm)), line.until,
			"%+v: units are on loan until a term after", line)
	}
	u.Unite(&other)
	for id, want := range map[uint64]time.Duration{first: 600 * time.Millisecond, second: 700 * time.Millisecond} {
		if loan, _ := u.Get(LoanID{id, 1}); loan.Until-owned(LoanTerm) != int64(want) {
			t.Errorf("loan %d of both sides ends a term after %v, want %v", id,
				time.Duration(loan.Until-owned(LoanTerm)), want)
		}
	}
}
