// Package borrow is the borrower's side of loans (algo.Loans): a [Book] admits from the loans that it has, finds out of which keys it
// would be worth while to have one, and says what is to be reported to their owners.
//
// Nothing here waits, sends or reads a clock. What it does not promise: that a loan is had; who has none asks the owner. The owner
// holds each unit for longer than the Book spends it, as long as what Report returns is said to have been sent no later than it was
// asked for and the two clocks' rates differ by no more than 2 per mille.
package borrow

import (
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/heavyhitters"
	"github.com/weirlimit/weir/limit"
)

const (
	// Tick is how often Report is to be called, and besides when Wake is.
	Tick = 50 * time.Millisecond
	// often is how many questions about a key within interval make it worth a loan.
	often    = 16
	interval = 100 * time.Millisecond
	// sampled is the fraction of the questions that are counted, as 1/sampled.
	sampled = 4
	// counters are those of the sketch that finds keys which are asked often.
	counters = 512
	// maxLoans bounds the loans of a Book.
	maxLoans = 1024
	// quiet is how long a loan is not used before it goes home, and forgotten how long after that its key is.
	quiet     = 200 * time.Millisecond
	forgotten = time.Second
	// apart is the shortest time between two reports about a key, but for what is recalled.
	apart = 20 * time.Millisecond
	// unanswered is how long after a report that was not answered it is repeated.
	unanswered = 200 * time.Millisecond
)

// Terms are what an owner said of a key with a loan.
type Terms struct {
	Limit, Remaining   int64 // Remaining is without what is on loan
	Window, ResetAfter time.Duration
	WarnAt             int64 // units in use from which on a decision is near the limit, or another one; 0: none is
	Limits             []limit.LimitStatus
}

// Admit says in a Decision that n units were admitted from a loan which has so many left. It leaves the Decision's other fields as
// they are.
func (t *Terms) Admit(d *limit.Decision, n, left int64) {
	d.Allowed, d.Granted = true, n
	d.Limit, d.Window, d.Remaining, d.ResetAfter = t.Limit, t.Window, t.Remaining+left, t.ResetAfter
	d.NearLimit = t.WarnAt > 0 && d.Limit-d.Remaining >= t.WarnAt
	if len(t.Limits) > 0 {
		d.Limits = slices.Clone(t.Limits)
		for i := range d.Limits {
			if s := &d.Limits[i]; s.Limit != algo.Unlimited {
				s.Remaining += left
			}
		}
	}
}

// Lendable reports whether an owner's Decision is one that a loan could have made: what Book.Missed is to be told of.
func Lendable(d *limit.Decision) bool {
	return d.Allowed && !d.FailedOpen && !d.Shadow && !d.Degraded && d.Limit > 0
}

// Report is what is to be said of a loan to the owner of its key.
type Report[K comparable] struct {
	Key    K
	Number uint64
	Totals algo.Totals
	Known  int64
	Want   int64
}

// Answer is what its owner said to a Report.
type Answer struct {
	Number         uint64
	Granted, Spent int64
	Ended, Unheard bool
	Term, Again    time.Duration
	Terms          Terms
}

// AnswerOf is what an owner said to a report of the loan with a number.
func AnswerOf(number uint64, a *limit.Lent) Answer {
	return Answer{
		Number: number, Granted: a.Granted, Spent: a.Spent, Ended: a.Ended, Unheard: a.Unheard, Term: a.Term, Again: a.Again,
		Terms: Terms{Limit: a.Limit, Remaining: a.Remaining, Window: a.Window, ResetAfter: a.ResetAfter, WarnAt: a.WarnAt, Limits: a.Limits},
	}
}

// Book has the loans of one borrower, by key. Its methods are safe for concurrent use. Instants are nanoseconds of a clock that never
// runs backwards, and goes on while the machine is suspended, see Clock.
type Book[K comparable] struct {
	wake func()
	// loans are those that there are; the map is replaced, never modified, for there are few and they are looked up all the time.
	loans atomic.Pointer[map[K]*loan[K]]

	closed atomic.Bool

	mu       sync.Mutex
	seen     *heavyhitters.Window[K]
	turned   int64 // when the sketch was
	numbers  uint64
	byNumber map[uint64]*loan[K]
}

// loan is one key's.
type loan[K comparable] struct {
	// What is read and changed by Take.
	left     atomic.Int64
	deadline atomic.Int64
	low      atomic.Int64 // of left: when there is less it is time to renew
	stirred  atomic.Bool
	terms    atomic.Pointer[Terms]
	checks   atomic.Int64 // that have taken of it; counted after what they took
	missed   atomic.Int64 // units that the loan did not cover
	after    atomic.Int64 // until when nothing is wanted

	// Guarded by the Book's lock.
	key               K
	number            uint64
	granted, returned int64
	known             int64
	demand            float64 // units per nanosecond
	looked            int64   // when, and what was spent then
	spentThen         int64
	used              int64       // when last
	ends              int64       // from which instant on, at the latest, nothing of what is known to be granted may be spent
	sent              int64       // when the report was that is not answered; 0: none
	last              int64       // when the last one was
	said, told        algo.Totals // what that said, and the last one that was answered
	urgent            bool        // to be reported at once
}

// New returns an empty Book. wake is called, from Take and Missed, when Report should be soon; it must return at once.
func New[K comparable](wake func()) *Book[K] {
	seen, err := heavyhitters.NewWindow[K](2, counters)
	if err != nil {
		panic("borrow: " + err.Error()) // the sizes are constants
	}
	b := &Book[K]{wake: wake, seen: seen, byNumber: make(map[uint64]*loan[K])}
	b.loans.Store(new(map[K]*loan[K]))
	return b
}

// Take admits n units, at least 1, from the loan of a key, and returns what is left of it. ok is false, and nothing was admitted,
// when there is none that covers it. now is read once the units are taken, so that whatever happens between two steps of this they
// are not spent after their deadline.
func (b *Book[K]) Take(k K, n int64, now func() int64) (t *Terms, left int64, ok bool) {
	l := (*b.loans.Load())[k]
	if l == nil || b.closed.Load() {
		return nil, 0, false
	}
	for {
		have := l.left.Load()
		if have < n {
			return nil, 0, false
		}
		if l.left.CompareAndSwap(have, have-n) {
			left = have - n
			break
		}
	}
	if now() >= l.deadline.Load() {
		return nil, 0, false // what was taken counts as spent: too little is admitted for once
	}
	l.checks.Add(1)
	if left < l.low.Load() && !l.stirred.Load() && l.stirred.CompareAndSwap(false, true) {
		b.wake()
	}
	return l.terms.Load(), left, true
}

// Missed is told of n units of a key that Take did not cover, and that its owner is asked about. keep returns what to keep of the
// key, when it is kept, such as a copy of what is part of something larger.
func (b *Book[K]) Missed(k K, n, now int64, keep func(K) K) {
	if l := (*b.loans.Load())[k]; l != nil {
		l.missed.Add(n)
		if now >= l.after.Load() && !l.stirred.Load() && l.stirred.CompareAndSwap(false, true) {
			b.wake()
		}
		return
	}
	if rand.Uint32()%sampled != 0 || b.closed.Load() {
		return
	}
	if !b.mu.TryLock() {
		return // as if it had not been of the sample
	}
	defer b.mu.Unlock()
	if now-b.turned >= int64(interval) {
		if now-b.turned >= int64(2*interval) {
			b.seen.Turn()
		}
		b.seen.Turn()
		b.turned = now
	}
	b.seen.Add(k, 1, keep)
	if low, _ := b.seen.Count(k); low*sampled < often || len(b.byNumber) >= maxLoans {
		return
	}
	if (*b.loans.Load())[k] != nil {
		return
	}
	if keep != nil {
		k = keep(k)
	}
	l := &loan[K]{key: k, looked: now, used: now, demand: float64(often*n) / float64(interval)}
	l.terms.Store(new(Terms))
	l.urgent = true
	b.enterLocked(l)
	b.wake()
}

// renewLocked puts another loan in the place of one that is over. Who takes of that at this moment does so in vain.
func (b *Book[K]) renewLocked(old *loan[K]) *loan[K] {
	old.deadline.Store(0)
	l := &loan[K]{key: old.key, demand: old.demand, looked: old.looked, used: old.used}
	l.after.Store(old.after.Load())
	l.missed.Store(old.missed.Load())
	l.terms.Store(old.terms.Load())
	delete(b.byNumber, old.number)
	b.enterLocked(l)
	return l
}

// enterLocked numbers a loan.
func (b *Book[K]) enterLocked(l *loan[K]) {
	b.numbers++
	l.number = b.numbers
	b.byNumber[l.number] = l
	b.replaceLocked(func(m map[K]*loan[K]) { m[l.key] = l })
}

func (b *Book[K]) replaceLocked(change func(map[K]*loan[K])) {
	old := *b.loans.Load()
	m := make(map[K]*loan[K], len(old)+1)
	for k, l := range old {
		m[k] = l
	}
	change(m)
	b.loans.Store(&m)
}

// home takes what is left off a loan, which is to be returned, together with what of so much granted in all is not known here yet: that
// cannot be taken meanwhile.
func (l *loan[K]) home(granted int64) {
	more := max(min(granted, algo.MaxLimit)-l.granted, 0)
	l.granted += more
	l.returned += more + max(l.left.Swap(0), 0)
}

func (l *loan[K]) totals() algo.Totals {
	checks := l.checks.Load() // first: they are no more than what they have spent
	spent := l.granted - l.returned - l.left.Load()
	return algo.Totals{Granted: l.granted, Spent: spent, Returned: l.returned, Checks: min(checks, spent)}
}

// Close has all loans go home: there are none left once that has been reported and answered.
func (b *Book[K]) Close() {
	b.closed.Store(true)
	b.wake()
}

// Report returns what is to be reported at now, to be sent at once.
func (b *Book[K]) Report(now int64) (reports []Report[K]) {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := b.closed.Load()
	var gone []*loan[K]
	for _, l := range *b.loans.Load() {
		l.stirred.Store(false)
		if l.granted > 0 && now >= l.ends+int64(algo.LoanTerm) {
			l = b.renewLocked(l) // whoever had lent that has charged it by now
		}
		l.measure(now)
		idle := all || now-l.used >= int64(quiet)
		deadline := l.deadline.Load()
		if idle || now >= deadline {
			l.home(0)
		}
		t := l.totals()
		if l.granted == 0 && (all || now-l.used >= int64(forgotten)) {
			gone = append(gone, l)
			continue
		}
		var want int64
		if !idle && now >= l.after.Load() {
			want = max(int64(1.5*l.demand*float64(interval)), algo.LeastLoan)
		}
		l.low.Store(want / 3)
		short := want > 0 && (t.Left() <= want/3 || deadline-now < int64(2*Tick))
		pause := int64(apart)
		if l.sent != 0 && !all {
			pause = int64(unanswered)
		}
		if !(short || t.Spent != l.told.Spent || t.Returned != l.told.Returned || t.Checks != l.told.Checks) || now-l.last < pause && !l.urgent {
			continue
		}
		l.urgent, l.sent, l.last, l.said = false, now, now, t
		reports = append(reports, Report[K]{Key: l.key, Number: l.number, Totals: t, Known: l.known, Want: want})
	}
	if gone != nil {
		b.replaceLocked(func(m map[K]*loan[K]) {
			for _, l := range gone {
				delete(m, l.key)
				delete(b.byNumber, l.number)
			}
		})
	}
	return reports
}

// measure brings the demand up to date, which falls by half in an interval at most.
func (l *loan[K]) measure(now int64) {
	spent, missed := l.totals().Spent, l.missed.Load()
	units := spent - l.spentThen + missed
	if units > 0 {
		l.used = now
	}
	if took := now - l.looked; took >= int64(Tick)/2 {
		l.demand = max(float64(units)/float64(took), l.demand*(1-min(float64(took)/float64(2*interval), 1)))
		l.looked, l.spentThen = now, spent
		l.missed.Add(-missed)
	}
}

// Answered takes in the answers to what was sent at that instant.
func (b *Book[K]) Answered(sent, now int64, answers []Answer) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := range answers {
		a := &answers[i]
		l := b.byNumber[a.Number]
		if l == nil {
			continue
		}
		if l.sent == sent {
			l.sent, l.told = 0, l.said
		}
		switch {
		case a.Unheard:
			l.told = algo.Totals{Spent: -1}
			l.after.Store(now + int64(interval))
			continue
		case a.Ended:
			b.renewLocked(l).after.Store(now + int64(a.Again))
			continue
		}
		l.known = max(l.known, min(a.Spent, l.granted-l.returned))
		if a.Term <= 0 {
			before := l.returned
			l.ends = max(l.ends, now)
			l.home(a.Granted)
			l.urgent = l.urgent || l.returned > before
			l.after.Store(now + int64(max(a.Again, Tick)))
			continue
		}
		terms := a.Terms
		l.terms.Store(&terms)
		l.grant(a.Granted, sent+int64(a.Term), now)
	}
}

// grant notes what was granted in all, which may be spent until then.
func (l *loan[K]) grant(granted, until, now int64) {
	l.deadline.Store(max(l.deadline.Load(), until)) // before there is more to spend
	l.ends = max(l.ends, until, now)
	if more := min(granted, algo.MaxLimit) - l.granted; more > 0 {
		l.granted += more
		l.left.Add(more)
	}
}

// Recalled gives up what is left of a loan, of which its owner says how much it has granted in all, and returns how the loan stands then;
// false where there is none. It is to be reported at once: wake is called.
func (b *Book[K]) Recalled(number uint64, granted, now int64) (r Report[K], ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	l := b.byNumber[number]
	if l == nil {
		return r, false
	}
	l.ends = max(l.ends, now)
	l.home(granted)
	l.urgent, l.sent = true, 0
	l.after.Store(now + int64(interval))
	b.wake()
	return Report[K]{Key: l.key, Number: number, Totals: l.totals(), Known: l.known}, true
}

// Has reports whether there is a loan of a key, or about to be one.
func (b *Book[K]) Has(k K) bool { return (*b.loans.Load())[k] != nil }

// Loans is the number of keys with a loan, or that are about to have one.
func (b *Book[K]) Loans() int { return len(*b.loans.Load()) }
