// Package lend is what a node or client answers in place of the owner of a key: [Book], the borrower's side of loans (algo.Loans), admits
// from the loans that it has, finds which keys are worth a loan, and says what is to be reported to their owners; [Refusals] remembers
// refusals, so that a check that would be refused again is answered without asking.
//
// Nothing here sends or reads a clock of its own, and nothing but Run and Return waits. It does not promise that a loan is had: without one
// the owner is asked. The owner holds each unit for longer than the Book spends it, as long as what Report returns is said to have been
// sent no later than it was asked for and the two clocks' rates differ by no more than 2 per mille. Refusals holds a fixed number of
// refusals, and a check of one that it has dropped goes to the owner again.
package lend

import (
	"cmp"
	"maps"
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
	// Tick is how often all loans are looked at.
	Tick = 50 * time.Millisecond
	// often is how many questions about a key within interval make it worth a loan.
	often    = 16
	interval = 100 * time.Millisecond
	// sampled is the fraction of the questions that are counted, as 1/sampled, or less, so that samples of them are counted within interval: of
	// so many questions a key that is asked often enough to matter is in more of them. fewest is in how many it is at least.
	sampled = 4
	samples = 2048
	fewest  = often / sampled
	// counters are those of the sketch that finds keys which are asked often.
	counters = 512
	// maxLoans bounds the loans of a Book.
	maxLoans = 1024
	// quiet is how long a loan is not used before it is returned, and forgotten how long after that its key is.
	quiet     = 200 * time.Millisecond
	forgotten = time.Second
	// apart is the shortest time between two reports about a key, but for what is recalled or waited for.
	apart = 20 * time.Millisecond
	// perTerm is how often in its term a loan is reported that has enough left, unless that is more often than every Tick: as late is what was
	// spent dated. Loans of one term are reported together, so that they share messages, and copies.
	perTerm = 4
	// burst is the shortest time in which a demand shows.
	burst = time.Millisecond
	// Patience is how long somebody may wait for what an owner is about to lend.
	Patience = 10 * time.Millisecond
	// unanswered is how long after a report that was not answered it is repeated.
	unanswered = 200 * time.Millisecond
	// soon is how long after a report that nobody took in it is repeated, twice as long each time up to Tick: a key that has no holder is
	// about to have one.
	soon = 5 * time.Millisecond
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
type Report[K, N comparable] struct {
	Key K
	// Node is whom to tell, by what has become of former reports: who heard the last one, or was named as the holder of the key by who did
	// not. The zero value is nobody: then it is whoever the borrower takes for the holder.
	Node   N
	Number uint64
	Totals algo.Totals
	Known  int64
	Want   int64
}

// Answer is what its owner said to a Report. One that could not be sent, or was not taken in, is Unheard.
type Answer[N comparable] struct {
	Number         uint64
	Granted, Spent int64
	Ended, Unheard bool
	Term, Again    time.Duration
	Terms          Terms
	// From is who answers, and Holder who decides for the key according to an Unheard. The zero value: not known.
	From, Holder N
}

// AnswerOf is what a node said to a report of the loan with a number.
func AnswerOf[N comparable](number uint64, from N, a *limit.Lent) Answer[N] {
	return Answer[N]{
		Number: number, From: from, Granted: a.Granted, Spent: a.Spent, Ended: a.Ended, Unheard: a.Unheard, Term: a.Term, Again: a.Again,
		Terms: Terms{Limit: a.Limit, Remaining: a.Remaining, Window: a.Window, ResetAfter: a.ResetAfter, WarnAt: a.WarnAt, Limits: a.Limits},
	}
}

// Book has the loans of one borrower, by key K, which it reports to nodes N. Its methods are safe for concurrent use. Instants are
// nanoseconds of a clock that never runs backwards, and goes on while the machine is suspended, see Clock.
type Book[K, N comparable] struct {
	wake   func()
	random func() uint32
	// loans are those that there are; the map is replaced, never modified, for there are few and they are looked up all the time.
	loans atomic.Pointer[map[K]*loan[K, N]]

	closed atomic.Bool
	late   atomic.Int64
	every  atomic.Uint32 // one of so many questions is counted; a power of two

	mu       sync.Mutex
	seen     *heavyhitters.Window[K] // of questions, as those that are counted stand for others
	turned   int64                   // when it was
	counted  int64                   // since then
	numbers  uint64
	byNumber map[uint64]*loan[K, N]
}

// loan is one key's.
type loan[K, N comparable] struct {
	// What Take changes, and apart from that, on other cache lines, what it reads: nothing else is passed on from CPU to CPU with each check.
	left  atomic.Int64
	extra atomic.Int64 // units that were spent beyond one for each check; counted before they are taken
	_     [48]byte

	deadline atomic.Int64
	low      atomic.Int64 // of left: when there is less it is time to renew
	stirred  atomic.Bool
	terms    atomic.Pointer[Terms]
	missed   atomic.Int64 // units that the loan did not cover
	after    atomic.Int64 // until when nothing is wanted

	// Guarded by the Book's lock.
	checks            int64 // that have spent some, as last told
	key               K
	number            uint64
	granted, returned int64
	known             int64
	asked             int64   // units that reports have asked for, and no answer to the last one has brought or denied
	demand            float64 // units per nanosecond
	looked            int64   // when, and what was spent then
	spentThen         int64
	used              int64         // when last
	ends              int64         // from which instant on, at the latest, nothing of what is known to be granted may be spent
	sent              int64         // when the report was that is not answered; 0: none
	last              int64         // when the last one was
	said, told        algo.Totals   // what that said, and the last one that was answered
	urgent            bool          // to be reported at once
	level             int64         // what was left after the last answer
	term              time.Duration // that this gave
	needs             int64         // units that callers wait for, and no report has asked for
	awaited           bool          // the last report asks for such
	coming            chan struct{} // closed with the next answer; nil: nobody waits for it
	scarce            int64         // until when it is no use waiting for more
	node              N             // see Report
	astray            int           // how many reports in a row nobody has taken in
	again             int64         // not to be reported before
}

// NewBook returns an empty Book. wake is called, from Take and Missed, when Report should be soon; it must return at once. random is what draws the
// sample of the questions that are counted; nil: rand.Uint32. Both are called by whoever calls the Book, at the same time.
func NewBook[K, N comparable](wake func(), random func() uint32) *Book[K, N] {
	if random == nil {
		random = rand.Uint32
	}
	seen, err := heavyhitters.NewWindow[K](2, counters)
	if err != nil {
		panic("borrow: " + err.Error()) // the sizes are constants
	}
	b := &Book[K, N]{wake: wake, random: random, seen: seen, byNumber: make(map[uint64]*loan[K, N])}
	b.loans.Store(new(map[K]*loan[K, N]))
	b.every.Store(sampled)
	return b
}

// Take admits n units, at least 1, from the loan of a key, and returns what is left of it. ok is false, and nothing was admitted,
// when there is none that covers it. now is read once the units are taken, so that whatever happens between two steps of this they
// are not spent after their deadline.
func (b *Book[K, N]) Take(k K, n int64, now func() int64) (t *Terms, left int64, ok bool) {
	l := (*b.loans.Load())[k]
	if l == nil || b.closed.Load() {
		return nil, 0, false
	}
	if left, ok = l.take(n); !ok {
		return nil, 0, false
	}
	if now() >= l.deadline.Load() {
		l.extra.Add(1) // it was no check
		b.late.Add(n)
		return nil, 0, false // what was taken counts as spent: too little is admitted for once
	}
	return b.admit(l, left), left, true
}

// take takes n units of what is left of a loan, and returns what is left then.
func (l *loan[K, N]) take(n int64) (left int64, ok bool) {
	if n > 1 {
		l.extra.Add(n - 1)
	}
	for {
		have := l.left.Load()
		if have < n {
			if n > 1 {
				l.extra.Add(1 - n)
			}
			return 0, false
		}
		if l.left.CompareAndSwap(have, have-n) {
			return have - n, true
		}
	}
}

// untake puts back what take took, which no report may have told of.
func (l *loan[K, N]) untake(n int64) {
	l.left.Add(n)
	if n > 1 {
		l.extra.Add(1 - n)
	}
}

// admit says on which terms a check was admitted from a loan, of which so much is left.
func (b *Book[K, N]) admit(l *loan[K, N], left int64) *Terms {
	if left < l.low.Load() {
		b.stir(l)
	}
	return l.terms.Load()
}

// stir has a loan looked at soon.
func (b *Book[K, N]) stir(l *loan[K, N]) {
	if !l.stirred.Load() && l.stirred.CompareAndSwap(false, true) {
		b.wake()
	}
}

// Missed is told of n units of a key that Take did not cover, and that its owner is asked about. The clock is read only for a key with a loan,
// and of the sample. keep returns what to keep of the key, when it is kept, such as a copy of what is part of something larger.
func (b *Book[K, N]) Missed(k K, n int64, clock func() int64, keep func(K) K) {
	if l := (*b.loans.Load())[k]; l != nil {
		l.missed.Add(n)
		if clock() >= l.after.Load() {
			b.stir(l)
		}
		return
	}
	every := b.every.Load()
	if b.random()&(every-1) != 0 || b.closed.Load() {
		return
	}
	if !b.mu.TryLock() {
		return // as if it had not been of the sample
	}
	defer b.mu.Unlock()
	now := clock()
	b.turnLocked(now)
	b.counted++
	b.seen.Add(k, int64(every), keep)
	if low, _ := b.seen.Count(k); low < max(often, fewest*int64(every)) || len(b.byNumber) >= maxLoans {
		return
	}
	if (*b.loans.Load())[k] != nil {
		return
	}
	if keep != nil {
		k = keep(k)
	}
	l := &loan[K, N]{key: k, looked: now, used: now, demand: float64(often*n) / float64(interval)}
	l.terms.Store(new(Terms))
	l.urgent = true
	b.enterLocked(l)
	b.wake()
}

// turnLocked has the sketch forget what is longer ago than two intervals, and counts as many of the questions as their rate allows.
func (b *Book[K, N]) turnLocked(now int64) {
	passed := now - b.turned
	if passed < int64(interval) {
		return
	}
	if passed >= int64(2*interval) {
		b.seen.Turn()
	}
	b.seen.Turn()
	questions := float64(b.counted) * float64(b.every.Load()) * float64(interval) / float64(passed)
	every := uint32(sampled)
	for every < 1<<16 && questions > samples*float64(every) {
		every *= 2
	}
	b.every.Store(every)
	b.turned, b.counted = now, 0
}

// Pending returns what is closed when the owner of a key has answered what may bring the n units that Take did not cover, for a caller who
// rather waits for that than asks. It is nil where the owner is to be asked: nothing is about to be lent, or that takes too long.
func (b *Book[K, N]) Pending(k K, n, now int64) <-chan struct{} {
	l := (*b.loans.Load())[k]
	if l == nil || now < l.after.Load()-int64(Patience)/2 || b.closed.Load() {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.byNumber[l.number] != l || l.astray > 0 || now < l.scarce || now-l.used >= int64(quiet) || l.sent != 0 && now-l.sent >= int64(Patience) {
		return nil
	}
	if l.coming == nil {
		l.coming = make(chan struct{})
	}
	l.needs = min(l.needs+n, algo.MaxLimit)
	if l.sent == 0 && !l.urgent {
		l.urgent = true
		b.wake()
	}
	return l.coming
}

// answeredLocked has those go on who wait for an answer.
func (l *loan[K, N]) answeredLocked() {
	if l.coming != nil {
		close(l.coming)
		l.coming = nil
	}
}

// renewLocked puts another loan in the place of one that is over. Who takes of that at this moment does so in vain.
func (b *Book[K, N]) renewLocked(old *loan[K, N]) *loan[K, N] {
	old.deadline.Store(0)
	old.answeredLocked()
	l := &loan[K, N]{key: old.key, node: old.node, demand: old.demand, looked: old.looked, used: old.used}
	l.after.Store(old.after.Load())
	l.missed.Store(old.missed.Load())
	l.terms.Store(old.terms.Load())
	delete(b.byNumber, old.number)
	b.enterLocked(l)
	return l
}

// enterLocked numbers a loan.
func (b *Book[K, N]) enterLocked(l *loan[K, N]) {
	b.numbers++
	l.number = b.numbers
	b.byNumber[l.number] = l
	b.replaceLocked(func(m map[K]*loan[K, N]) { m[l.key] = l })
}

func (b *Book[K, N]) replaceLocked(change func(map[K]*loan[K, N])) {
	old := *b.loans.Load()
	m := make(map[K]*loan[K, N], len(old)+1)
	for k, l := range old {
		m[k] = l
	}
	change(m)
	b.loans.Store(&m)
}

// giveBack takes what is left off a loan, which is to be returned, together with what of so much granted in all is not known here yet: that
// cannot be taken meanwhile.
func (l *loan[K, N]) giveBack(granted int64) {
	more := max(min(granted, algo.MaxLimit)-l.granted, 0)
	l.granted += more
	l.returned += more + max(l.left.Swap(0), 0)
}

func (l *loan[K, N]) totals() algo.Totals {
	spent := l.granted - l.returned - l.left.Load()
	// What checks have spent beyond one unit is read after that, so that it is known of all of them; and of some that will not have any.
	l.checks = max(l.checks, spent-l.extra.Load())
	return algo.Totals{Granted: l.granted, Spent: spent, Returned: l.returned, Checks: l.checks}
}

// Close has all loans returned: there are none left once that has been reported and answered.
func (b *Book[K, N]) Close() {
	b.closed.Store(true)
	b.wake()
}

// Report returns what is to be reported at now, to be sent at once, and when it is to be called again even if wake is not called: next
// from now on; 0 when there are no loans.
func (b *Book[K, N]) Report(now int64) (reports []Report[K, N], next time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := b.closed.Load()
	next = Tick
	var gone []*loan[K, N]
	for _, l := range b.inOrder() {
		l.stirred.Store(false)
		if l.granted > 0 && now >= l.ends+int64(algo.LoanTerm) {
			l = b.renewLocked(l) // whoever had lent that has charged it by now
		}
		l.measure(now)
		idle := all || now-l.used >= int64(quiet)
		deadline := l.deadline.Load()
		if idle || now >= deadline {
			l.giveBack(0)
		}
		t := l.totals()
		if l.granted == 0 && (all || now-l.used >= int64(forgotten)) {
			gone = append(gone, l)
			continue
		}
		period := max(int64(Tick), int64(l.term)/perTerm)
		var want int64
		if after := l.after.Load(); now < after && l.needs > 0 {
			next = min(next, time.Duration(after-now)) // callers wait for that
		} else if !idle && now >= after {
			// Enough for what is asked until the next report but one.
			want = max(int64(l.demand*max(1.5*float64(interval), 2.5*float64(period))), algo.LeastLoan, min(2*l.needs, algo.MaxLimit))
		}
		low := min(want, l.level) / 3
		l.low.Store(low)
		short := want > 0 && (l.needs > 0 || t.Left() <= low || deadline-now < int64(2*Tick))
		if now < l.again {
			next = min(next, time.Duration(l.again-now))
			continue
		}
		if !short && t.Spent == l.told.Spent && t.Returned == l.told.Returned && t.Checks == l.told.Checks {
			continue
		}
		due := now-l.last >= int64(apart)
		switch {
		case l.urgent:
			due = true
		case l.sent != 0 && !all:
			due = now-l.last >= int64(unanswered)
		case !short && !idle:
			due = due && now/period != l.last/period
		}
		if !due {
			continue
		}
		if l.sent != 0 {
			l.node = *new(N) // who does not answer
		}
		l.urgent, l.sent, l.last, l.said, l.awaited, l.needs = false, now, now, t, l.needs > 0, 0
		l.asked = min(l.asked+want, algo.MaxLimit)
		reports = append(reports, Report[K, N]{Key: l.key, Node: l.node, Number: l.number, Totals: t, Known: l.known, Want: want})
	}
	if gone != nil {
		b.replaceLocked(func(m map[K]*loan[K, N]) {
			for _, l := range gone {
				delete(m, l.key)
				delete(b.byNumber, l.number)
			}
		})
	}
	if b.Loans() == 0 {
		next = 0
	}
	return reports, next
}

// inOrder returns the loans in the order of their numbers, so that what is done about them does not depend on that of a map.
func (b *Book[K, N]) inOrder() []*loan[K, N] {
	return slices.SortedFunc(maps.Values(b.byNumber), func(l, m *loan[K, N]) int { return cmp.Compare(l.number, m.number) })
}

// measure brings the demand up to date, which falls by half in an interval at most.
func (l *loan[K, N]) measure(now int64) {
	spent, missed := l.totals().Spent, l.missed.Load()
	units := spent - l.spentThen + missed
	if units > 0 {
		l.used = now
	}
	// What was used up at once is less than was wanted: so demands grow by many times within a few reports.
	if took := now - l.looked; took >= int64(Tick)/2 || took >= int64(burst) && l.left.Load() <= l.low.Load() {
		l.demand = max(float64(units)/float64(took), l.demand*(1-min(float64(took)/float64(2*interval), 1)))
		l.looked, l.spentThen = now, spent
		l.missed.Add(-missed)
	}
}

// Answered takes in the answers to what was sent at that instant.
func (b *Book[K, N]) Answered(sent, now int64, answers []Answer[N]) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := range answers {
		a := &answers[i]
		l := b.byNumber[a.Number]
		if l == nil {
			continue
		}
		latest := l.sent == sent
		if a.Unheard {
			if latest {
				b.unheardLocked(l, now, a)
			}
			continue
		}
		l.node, l.astray = a.From, 0
		l.answeredLocked()
		if latest {
			l.sent, l.told = 0, l.said
		}
		if a.Ended {
			b.renewLocked(l).after.Store(now + int64(a.Again))
			continue
		}
		l.known = max(l.known, min(a.Spent, l.granted-l.returned))
		if a.Term <= 0 {
			before := l.returned
			l.ends = max(l.ends, now)
			l.giveBack(a.Granted)
			l.urgent = l.urgent || l.returned > before
			l.after.Store(now + int64(max(a.Again, soon)))
			continue
		}
		terms := a.Terms
		l.terms.Store(&terms)
		if latest && l.awaited && a.Granted <= l.granted {
			l.scarce = now + int64(soon)
		}
		l.grant(a.Granted, sent+int64(a.Term), now)
		if latest {
			l.asked = 0
		}
		l.level, l.term = l.left.Load(), a.Term
	}
}

// unheardLocked has a loan reported again, of which nobody has taken in the last report: at once to who is said to be the holder, and soon
// where that is not known, or not true either. What the borrower has goes on being spent meanwhile: it is held wherever the key has gone.
func (b *Book[K, N]) unheardLocked(l *loan[K, N], now int64, a *Answer[N]) {
	l.sent, l.told, l.urgent = 0, algo.Totals{Spent: -1}, true
	l.node = *new(N)
	l.answeredLocked()
	var pause time.Duration
	if l.astray++; a.Holder != l.node && a.Holder != a.From {
		l.node = a.Holder
	}
	if l.node == *new(N) || l.astray > 1 {
		pause = min(soon<<min(l.astray-1, 8), Tick)
	}
	l.again = now + int64(pause)
	l.after.Store(max(l.after.Load(), l.again))
	b.wake()
}

// Lost has loans reported again whose reports a node will not answer any more, because the way there is broken. Whether it took them in is
// not known, and makes no difference.
func (b *Book[K, N]) Lost(node N, now int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, l := range b.inOrder() {
		if l.sent != 0 && l.node == node {
			b.unheardLocked(l, now, &Answer[N]{})
		}
	}
}

// grant notes what was granted in all, which may be spent until then. The borrower takes no more than it has asked for and returns the rest:
// an owner lends no more than that, unless another process has reported to it in the borrower's name.
func (l *loan[K, N]) grant(granted, until, now int64) {
	l.deadline.Store(max(l.deadline.Load(), until)) // before there is more to spend
	l.ends = max(l.ends, until, now)
	if more := min(granted, algo.MaxLimit) - l.granted; more > 0 {
		taken := min(more, l.asked)
		l.asked -= taken
		l.granted += more
		l.returned += more - taken
		l.left.Add(taken)
	}
}

// Recalled gives up what is left of a loan, of which its owner says how much it has granted in all, and returns how the loan stands then;
// false where there is none. It is to be reported at once: wake is called.
func (b *Book[K, N]) Recalled(number uint64, granted, now int64) (r Report[K, N], ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	l := b.byNumber[number]
	if l == nil {
		return r, false
	}
	l.ends = max(l.ends, now)
	l.giveBack(granted)
	l.urgent, l.sent, l.again = true, 0, 0
	l.answeredLocked()
	l.after.Store(now + int64(interval))
	b.wake()
	return Report[K, N]{Key: l.key, Number: number, Totals: l.totals(), Known: l.known}, true
}

// Has reports whether there is a loan of a key, or about to be one.
func (b *Book[K, N]) Has(k K) bool { return (*b.loans.Load())[k] != nil }

// Late is how many units were taken, ever, by who then found that their loans had ended, as one that gets no CPU for that long does. They
// count as spent, and nothing was admitted for them.
func (b *Book[K, N]) Late() int64 { return b.late.Load() }

// Loans is the number of keys with a loan, or that are about to have one.
func (b *Book[K, N]) Loans() int { return len(*b.loans.Load()) }
