// Package lend answers checks on a node or client in place of the owner of their key. [Book] is the borrower's side of
// loans (algo.Loans): it admits from the loans that it has, finds which keys are worth a loan, and makes the reports to
// the owners. [Refusals] remembers refusals, so that a check that would be refused again is answered without asking the
// owner.
//
// The package sends nothing and reads no clock of its own; only Run and Return wait. If a key has no loan, the caller
// asks the owner. The owner holds each unit for longer than the Book spends it, if the caller sends what Report returns
// at once, passes Answered the instant at which it called Report, and the rates of the two clocks differ by no more
// than 2 per mille. Refusals holds a fixed number of refusals; a check whose refusal it has dropped goes to the owner
// again.
package lend

import (
	"cmp"
	"hash/maphash"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
)

// The life of a loan:
//
//	Missed    counts a check that goes to the owner. A key with often such checks within interval gets a loan, which has
//	          no units yet
//	Report    returns what the caller must send: totals, and how many units the borrower wants
//	Answered  takes in the owner's answer: units and a deadline, or that the owner lends none
//	Take      admits a check: one compare-and-swap on the units that are left, then one reading of the clock
//	Recalled  gives up the units that are left, because the owner needs them
//
// Rules: a unit is left, spent or returned; spent and returned only grow. The deadline counts from when the report was
// sent, not from when its answer came. Take reads the clock after it has taken the units, so that no unit is spent
// after the deadline, however long a goroutine stands still between two steps.

const (
	// Tick is the longest time between two calls of Report while there are loans.
	Tick = 50 * time.Millisecond
	// A key is worth a loan if callers ask for it often times within interval.
	often    = 16
	interval = 100 * time.Millisecond
	// Of the questions (calls of Missed for keys without a loan) one in sampled is counted, or fewer, so that about
	// samples are counted within interval. A key gets a loan only if at least fewest of its questions were counted.
	sampled = 4
	samples = 2048
	fewest  = often / sampled
	// A key with less than one in share of all questions gets no loan.
	share = 256
	// counters bounds the keys whose questions are counted within one interval.
	counters = 2 * samples
	// maxLoans bounds the loans of a Book.
	maxLoans = 1024
	// A loan that was not used for quiet is returned. It is forgotten when it was not used for forgotten.
	quiet     = 200 * time.Millisecond
	forgotten = time.Second
	// apart is the shortest time between two reports about a key, unless the loan was recalled or callers wait.
	apart = 20 * time.Millisecond
	// perTerm is how often a loan with enough left is reported within its term, but no more often than once a Tick. The
	// owner dates spent units by their report, so later reports would charge them later. Loans with the same term are
	// reported together, so that they share messages and copies.
	perTerm = 4
	// burst is the shortest time over which demand is measured.
	burst = time.Millisecond
	// Patience bounds how long a caller waits for units that an owner is about to lend.
	Patience = 10 * time.Millisecond
	// A report without an answer is repeated after unanswered.
	unanswered = 200 * time.Millisecond
	// A report that no node took in is repeated after soon, and after twice as long each time up to Tick. A key without
	// a holder soon has one.
	soon = 5 * time.Millisecond
)

// Admit fills in a Decision that admits n units from a loan, under the terms of the owner's last answer. left is what
// the loan has left after that. Admit leaves the Decision's other fields as they are.
func Admit(d *limit.Decision, t *limit.Lent, n, left int64) {
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

// Lendable reports whether a loan could have made this Decision of an owner. The caller must call Book.Missed for each
// check with such a Decision.
func Lendable(d *limit.Decision) bool {
	return d.Allowed && !d.FailedOpen && !d.Shadow && !d.Degraded && d.Limit > 0
}

// Report is a report of a loan to the owner of its key. Totals, Known and Want are those of algo.Loans.
type Report[K, N comparable] struct {
	Key K
	// Node is the node to send the report to: the one that answered the last report, or, if a node did not take the
	// last report in, the holder that it named. The zero value: the node that the caller believes to be the holder.
	Node   N
	Number uint64
	Totals algo.Totals
	Known  int64
	Want   int64
}

// Answer is the answer to the Report with the same Number. For a report that could not be sent, or that the node did
// not take in, the caller makes an Answer that is Unheard.
type Answer[N comparable] struct {
	Number uint64
	limit.Lent
	// From is the node that answered. To is the node that decides for the key, according to an Unheard answer. The zero
	// value: not known.
	From, To N
}

// Book has the loans of one borrower, by key K; it reports them to nodes N. Its methods are safe for concurrent use.
// Instants are nanoseconds of a clock that never runs backwards and goes on while the machine is suspended (see Clock).
type Book[K, N comparable] struct {
	wake   func()
	random func() uint32
	// loans has all loans. The map is replaced and never modified, so that Take needs no lock.
	loans atomic.Pointer[map[K]*loan[K, N]]

	closed atomic.Bool
	late   atomic.Int64
	every  atomic.Uint32 // one question in every is counted; a power of two

	mu       sync.Mutex
	seed     maphash.Seed
	seen     [2]questions // of this interval and of the last one
	turned   int64        // the instant at which this interval began
	numbers  uint64       // the number of the newest loan
	byNumber map[uint64]*loan[K, N]
}

// questions are the counted questions of an interval: their number, and their number by hash of the key. Each counts as
// every questions.
type questions struct {
	all int64
	of  map[uint64]int64
}

// loan is one key's loan. It has no units until an owner has answered a report.
type loan[K, N comparable] struct {
	// The words that Take changes have a cache line of their own, so that the words that it only reads stay in every
	// processor's cache.
	left  atomic.Int64
	extra atomic.Int64 // units spent beyond one for each check; counted before they are taken
	_     [48]byte

	deadline atomic.Int64 // Take spends nothing from this instant on
	low      atomic.Int64 // with fewer units left than this the loan should be renewed
	stirred  atomic.Bool  // Report should look at the loan soon
	terms    atomic.Pointer[limit.Lent]
	missed   atomic.Int64 // units that the loan did not cover
	after    atomic.Int64 // no report asks for units before this instant

	// Guarded by the Book's lock.
	checks            int64 // checks that have spent units, as last reported
	key               K
	number            uint64
	granted, returned int64
	known             int64         // units spent that owners have confirmed
	asked             int64         // units asked for that no answer to the last report has granted or denied
	demand            float64       // units per nanosecond
	looked            int64         // the instant of the last measure
	spentThen         int64         // units spent by then
	used              int64         // the instant of the last use
	ends              int64         // no unit that may have been granted is spent from this instant on
	sent              int64         // the instant of the report without an answer; 0: there is none
	last              int64         // the instant of the last report
	said, told        algo.Totals   // the totals of the last report, and of the last report with an answer
	urgent            bool          // the next report is due at once
	level             int64         // units left after the last answer
	term              time.Duration // the term that the last answer gave
	needs             int64         // units that callers wait for and that no report has asked for
	awaited           bool          // the last report asked for units that callers wait for
	coming            chan struct{} // closed with the next answer; nil: no caller waits
	scarce            int64         // until this instant Pending does not wait
	node              N             // see Report
	astray            int           // how many reports in a row no node has taken in
	again             int64         // no report is made before this instant
}

// NewBook returns an empty Book. Take and Missed call wake when the caller should call Report soon; wake must return at
// once. random draws the sample of questions that are counted; nil: rand.Uint32. The Book calls both concurrently.
func NewBook[K, N comparable](wake func(), random func() uint32) *Book[K, N] {
	if random == nil {
		random = rand.Uint32
	}
	b := &Book[K, N]{wake: wake, random: random, seed: maphash.MakeSeed(), byNumber: make(map[uint64]*loan[K, N])}
	for i := range b.seen {
		b.seen[i].of = make(map[uint64]int64)
	}
	b.loans.Store(new(map[K]*loan[K, N]))
	b.every.Store(sampled)
	return b
}

// Take admits n units, at least 1, from the loan of a key, and returns how many units are left. If there is no loan, or
// it has fewer units left, or its deadline is over, ok is false and nothing was admitted. Take reads now after it has
// taken the units, so that none is spent after the deadline.
func (b *Book[K, N]) Take(k K, n int64, now func() int64) (t *limit.Lent, left int64, ok bool) {
	l := (*b.loans.Load())[k]
	if l == nil || b.closed.Load() {
		return nil, 0, false
	}
	if left, ok = l.take(n); !ok {
		return nil, 0, false
	}
	if now() >= l.deadline.Load() {
		l.extra.Add(1) // no check was admitted
		b.late.Add(n)
		return nil, 0, false // the units count as spent, which admits less
	}
	return b.admit(l, left), left, true
}

// take takes n units from a loan, and returns how many are left.
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

// untake puts back units that take took. No report may have counted them meanwhile.
func (l *loan[K, N]) untake(n int64) {
	l.left.Add(n)
	if n > 1 {
		l.extra.Add(1 - n)
	}
}

// admit returns the terms of a check that was admitted from a loan. left is what the loan has left after that.
func (b *Book[K, N]) admit(l *loan[K, N], left int64) *limit.Lent {
	if left < l.low.Load() {
		b.stir(l)
	}
	return l.terms.Load()
}

// stir makes the caller call Report soon.
func (b *Book[K, N]) stir(l *loan[K, N]) {
	if !l.stirred.Load() && l.stirred.CompareAndSwap(false, true) {
		b.wake()
	}
}

// Missed counts a check of n units for which the owner is asked, because Take did not admit it. It reads the clock only
// for keys with a loan and for questions in the sample. If the Book stores the key, it stores keep(k), such as a copy
// of a string that is part of a larger message. Nil: k itself.
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
		return // the question counts as one outside the sample
	}
	defer b.mu.Unlock()
	now := clock()
	b.turnLocked(now)
	if of, all := b.countLocked(k, int64(every)); of < max(often, fewest*int64(every), all/share) ||
		len(b.byNumber) >= maxLoans {
		return
	}
	if (*b.loans.Load())[k] != nil {
		return
	}
	if keep != nil {
		k = keep(k)
	}
	l := &loan[K, N]{key: k, looked: now, used: now, demand: float64(often*n) / float64(interval)}
	l.terms.Store(new(limit.Lent))
	l.urgent = true
	b.enterLocked(l)
	b.wake()
}

// countLocked counts n questions of a key. It returns how many questions of this interval and the last one concern the
// key, and how many there are. Keys with equal hashes are counted together; at worst a key gets a loan that is not
// used.
func (b *Book[K, N]) countLocked(k K, n int64) (of, all int64) {
	hash := maphash.Comparable(b.seed, k)
	now, before := &b.seen[0], &b.seen[1]
	now.all += n
	if n += now.of[hash]; len(now.of) < counters || now.of[hash] > 0 {
		now.of[hash] = n
	}
	return n + before.of[hash], now.all + before.all
}

// turnLocked forgets questions older than two intervals, and sets every by the rate of questions.
func (b *Book[K, N]) turnLocked(now int64) {
	passed := now - b.turned
	if passed < int64(interval) {
		return
	}
	rate := float64(b.seen[0].all) * float64(interval) / float64(passed)
	if passed >= int64(2*interval) {
		b.seen[0].all = 0
		clear(b.seen[0].of)
	}
	b.seen[0], b.seen[1] = b.seen[1], b.seen[0]
	b.seen[0].all = 0
	clear(b.seen[0].of)
	every := uint32(sampled)
	for every < 1<<16 && rate > samples*float64(every) {
		every *= 2
	}
	b.every.Store(every)
	b.turned = now
}

// Pending is for a caller that would rather wait for a loan than ask the owner. It returns a channel that is closed
// when the owner has answered a report that may bring the n units that Take did not have. It returns nil if the caller
// should ask the owner: no units are about to be lent, or they take too long.
func (b *Book[K, N]) Pending(k K, n, now int64) <-chan struct{} {
	l := (*b.loans.Load())[k]
	if l == nil || now < l.after.Load()-int64(Patience)/2 || b.closed.Load() {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.byNumber[l.number] != l || l.astray > 0 || now < l.scarce || now-l.used >= int64(quiet) ||
		l.sent != 0 && now-l.sent >= int64(Patience) {
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

// answeredLocked wakes the callers that wait for an answer.
func (l *loan[K, N]) answeredLocked() {
	if l.coming != nil {
		close(l.coming)
		l.coming = nil
	}
}

// renewLocked replaces a loan that is over by a new one for the same key. A Take of the old loan at this moment finds
// that its deadline is over.
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

// enterLocked gives a loan its number and adds it to the Book.
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

// giveBack returns the units that are left of a loan, and those of granted, the owner's total, that this Book has not
// taken in yet.
func (l *loan[K, N]) giveBack(granted int64) {
	more := max(min(granted, algo.MaxLimit)-l.granted, 0)
	l.granted += more
	l.returned += more + max(l.left.Swap(0), 0)
}

func (l *loan[K, N]) totals() algo.Totals {
	spent := l.granted - l.returned - l.left.Load()
	// extra is read after left, so that it has the extra units of every check that is part of spent; it may also have
	// those of a Take that fails.
	l.checks = max(l.checks, spent-l.extra.Load())
	return algo.Totals{Granted: l.granted, Spent: spent, Returned: l.returned, Checks: l.checks}
}

// Close has all loans returned. Loans is 0 when the owners have answered the reports.
func (b *Book[K, N]) Close() {
	b.closed.Store(true)
	b.wake()
}

// Report returns the reports to send at once, at the instant now. The caller must call it again after next, or earlier
// if wake is called. next is 0 if there are no loans.
func (b *Book[K, N]) Report(now int64) (reports []Report[K, N], next time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := b.closed.Load()
	next = Tick
	var gone []*loan[K, N]
	for _, l := range b.inOrder() {
		l.stirred.Store(false)
		if l.granted > 0 && now >= l.ends+int64(algo.LoanTerm) {
			l = b.renewLocked(l) // the lender has charged its units by now
		}
		l.measure(now)
		idle := all || now-l.used >= int64(quiet)
		if idle || now >= l.deadline.Load() {
			l.giveBack(0)
		}
		if l.granted == 0 && (all || now-l.used >= int64(forgotten)) {
			gone = append(gone, l)
			continue
		}
		r, due, wait := l.report(now, idle, all)
		if due {
			reports = append(reports, r)
		}
		next = min(next, wait)
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

// report returns the report of a loan, whether it is due at now, and when to call report again at the latest. idle: the
// loan was given back, because it was not used; all: the Book is closed.
func (l *loan[K, N]) report(now int64, idle, all bool) (r Report[K, N], due bool, next time.Duration) {
	next = Tick
	t := l.totals()
	period := max(int64(Tick), int64(l.term)/perTerm)
	var want int64
	if after := l.after.Load(); now < after && l.needs > 0 {
		next = min(next, time.Duration(after-now)) // callers wait for units
	} else if !idle && now >= after {
		// want is enough for the demand until the next report but one.
		want = max(int64(l.demand*max(1.5*float64(interval), 2.5*float64(period))), algo.LeastLoan,
			min(2*l.needs, algo.MaxLimit))
	}
	low := min(want, l.level) / 3
	l.low.Store(low)
	short := want > 0 && (l.needs > 0 || t.Left() <= low || l.deadline.Load()-now < int64(2*Tick))
	if now < l.again {
		return r, false, min(next, time.Duration(l.again-now))
	}
	if !short && t.Spent == l.told.Spent && t.Returned == l.told.Returned && t.Checks == l.told.Checks {
		return r, false, next
	}
	due = now-l.last >= int64(apart)
	switch {
	case l.urgent:
		due = true
	case l.sent != 0 && !all:
		due = now-l.last >= int64(unanswered)
	case !short && !idle:
		due = due && now/period != l.last/period
	}
	if !due {
		return r, false, next
	}
	if l.sent != 0 {
		l.node = *new(N) // the last node has not answered
	}
	l.urgent, l.sent, l.last, l.said, l.awaited, l.needs = false, now, now, t, l.needs > 0, 0
	l.asked = min(l.asked+want, algo.MaxLimit)
	return Report[K, N]{Key: l.key, Node: l.node, Number: l.number, Totals: t, Known: l.known, Want: want}, true, next
}

// inOrder returns the loans in the order of their numbers, so that no result depends on the order of a map.
func (b *Book[K, N]) inOrder() []*loan[K, N] {
	return slices.SortedFunc(maps.Values(b.byNumber),
		func(l, m *loan[K, N]) int { return cmp.Compare(l.number, m.number) })
}

// measure updates the demand. Within an interval the demand falls by at most half.
func (l *loan[K, N]) measure(now int64) {
	spent, missed := l.totals().Spent, l.missed.Load()
	units := spent - l.spentThen + missed
	if units > 0 {
		l.used = now
	}
	// A loan that was used up shows less than the whole demand. It is measured again after burst, so that the demand
	// can grow by many times within a few reports.
	if took := now - l.looked; took >= int64(Tick)/2 || took >= int64(burst) && l.left.Load() <= l.low.Load() {
		l.demand = max(float64(units)/float64(took), l.demand*(1-min(float64(took)/float64(2*interval), 1)))
		l.looked, l.spentThen = now, spent
		l.missed.Add(-missed)
	}
}

// Answered takes in the answers to the reports that Report returned for the instant sent.
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
		terms := a.Lent
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

// unheardLocked has a loan reported again whose last report no node took in: at once if the answer names a holder,
// otherwise after a pause. It also pauses if the report before was not taken in either. The borrower goes on spending
// the loan, because the owner holds the units wherever the key has moved.
func (b *Book[K, N]) unheardLocked(l *loan[K, N], now int64, a *Answer[N]) {
	l.sent, l.told, l.urgent = 0, algo.Totals{Spent: -1}, true
	l.node = *new(N)
	l.answeredLocked()
	var pause time.Duration
	if l.astray++; a.To != l.node && a.To != a.From {
		l.node = a.To
	}
	if l.node == *new(N) || l.astray > 1 {
		pause = min(soon<<min(l.astray-1, 8), Tick)
	}
	l.again = now + int64(pause)
	l.after.Store(max(l.after.Load(), l.again))
	b.wake()
}

// Lost has the loans reported again whose reports a node will not answer, because the connection to it is broken. The
// node may have taken the reports in; a repetition changes nothing, because reports have totals.
func (b *Book[K, N]) Lost(node N, now int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, l := range b.inOrder() {
		if l.sent != 0 && l.node == node {
			b.unheardLocked(l, now, &Answer[N]{})
		}
	}
}

// grant adds units of granted, the owner's total, which may be spent until the instant until. The borrower takes no
// more units than it has asked for and returns the rest. An owner lends no more than that, unless another process has
// reported to it in the borrower's name.
func (l *loan[K, N]) grant(granted, until, now int64) {
	l.deadline.Store(max(l.deadline.Load(), until)) // before left grows, so that Take finds the new deadline
	l.ends = max(l.ends, until, now)
	if more := min(granted, algo.MaxLimit) - l.granted; more > 0 {
		taken := min(more, l.asked)
		l.asked -= taken
		l.granted += more
		l.returned += more - taken
		l.left.Add(taken)
	}
}

// Recalled gives up the units that are left of a loan, and returns a report of it. ok is false if there is no such
// loan. granted is the owner's total. Recalled calls wake, because the loan must be reported at once.
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

// Has reports whether the key has a loan, or is about to get one.
func (b *Book[K, N]) Has(k K) bool { return (*b.loans.Load())[k] != nil }

// Late returns how many units Take took from loans whose deadline was over when it read the clock, because its
// goroutine stood still. These units count as spent, and admitted nothing.
func (b *Book[K, N]) Late() int64 { return b.late.Load() }

// Loans returns how many keys have a loan, or are about to get one.
func (b *Book[K, N]) Loans() int { return len(*b.loans.Load()) }
