package limiter

import (
	"strings"
	"sync"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/refusal"
	"github.com/weirlimit/weir/limit"
)

// refusalKey stands for a state under one version of its limits, as far as this node knows them.
type refusalKey struct {
	table  *table      // of a policy
	inline *inlineRule // of a limit sent along
	policy string
	key    string
}

// question is what a check's refusal is remembered by, once it has been sent.
type question struct {
	charges bool   // elsewhere, unless it is refused
	table   *table // nil: a refusal is not to be remembered
	mark    uint64
	sent    int64 // Mono

	// Of a key that was refused a moment ago: what is closed once this one, or another one before it, has been answered.
	answered chan struct{}
	leads    bool // it is this one's to close
}

// inquiries are the keys that were refused a moment ago and are being asked about again. When a refusal that was remembered
// ends, everybody who wants the key would ask at once, and nearly all be refused: so one asks, and the others look first at
// what it has heard. The zero value is ready for use.
type inquiries struct {
	mu    sync.Mutex
	under map[state]inquiry
}

type inquiry struct {
	answered chan struct{}
	until    int64 // when whoever asks has an answer at the latest, unless that has panicked
}

// join returns what is closed when somebody has been answered about the state, within most, and whether that is who joins.
func (q *inquiries) join(s state, now int64, most time.Duration) (answered chan struct{}, leads bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if of, ok := q.under[s]; ok && now < of.until {
		return of.answered, false
	}
	if q.under == nil {
		q.under = make(map[state]inquiry)
	}
	answered = make(chan struct{})
	q.under[s] = inquiry{answered, now + int64(most)}
	return answered, true
}

// end lets those go on who have joined.
func (q *inquiries) end(s state, answered chan struct{}) {
	q.mu.Lock()
	if q.under[s].answered == answered {
		delete(q.under, s)
	}
	q.mu.Unlock()
	close(answered)
}

func refusalKeyOf(c *limit.Check, t *table, s *subject) refusalKey {
	if s.inline != nil {
		return refusalKey{inline: s.inline, key: c.Key}
	}
	return refusalKey{table: t, policy: c.Policy, key: c.Key}
}

// isPlain says that a refusal of the check says nothing but that there is no room for it, and charges nothing.
func isPlain(c *limit.Check) bool { return c.Cost > 0 && !c.Partial && !c.Always }

// recall answers a check that would be forwarded from memory, and reports whether it did. A request id must be asked
// about: what was admitted under it is admitted again.
func (l *Limiter) recall(t *table, op *Op, now algo.Instant) bool {
	if op.Cost <= 0 || op.Kind != OpCheck && op.Kind != OpReserve && op.Kind != OpExtend {
		return false
	}
	op.asked.charges = true
	if op.Kind != OpCheck || !isPlain(&op.Check) {
		return false
	}
	op.asked.table, op.asked.sent = t, now.Mono
	if op.RequestID != "" {
		op.asked.mark = l.refusals.Mark(op.hash)
		return false
	}
	mark, ended, ok := l.refused(t, &op.Check, &op.subject, now.Mono, &op.Outcome.Decision)
	switch op.asked.mark = mark; {
	case ok:
		op.asked = question{}
	case ended != 0 && now.Mono-ended < int64(limit.MaxRemember):
		op.asked.answered, op.asked.leads = l.inquiries.join(op.state(), now.Mono, 2*l.cfg.Timeout)
	}
	return ok
}

// refused answers a check from memory, and reports whether it did; mark and ended are Find's.
func (l *Limiter) refused(t *table, c *limit.Check, s *subject, now int64, d *limit.Decision) (mark uint64, ended int64, ok bool) {
	r, mark, ok := l.refusals.Find(s.hash, refusalKeyOf(c, t, s), c.Cost, now)
	if !ok {
		return mark, r.Until, false
	}
	*d = r.Decision
	d.Age(time.Duration(now - r.Came))
	d.RememberFor = time.Duration(r.Until - now)
	var e *entry
	if s.inline == nil {
		e = t.by[c.Policy]
	}
	stats := l.statsOf(e, s)
	stats.countBanned(d)
	counts := stats.mine()
	counts.remembered.Add(1)
	if weight := l.sample.weight(counts.count(d)); weight > 0 {
		var tightest *algo.Limit
		if limits := s.limits(c.Key); limits != nil && !d.Banned { // a ban refuses whatever is in use
			tightest = tightestOf(limits, d)
		}
		l.sample.sampled(weight, s.scope(c.Policy), c.Key, d, tightest)
	}
	return mark, 0, true
}

// remember keeps the answer to what was forwarded, if it is a refusal that may be kept.
func (l *Limiter) remember(op *Op) {
	d := &op.Outcome.Decision
	if op.Outcome.Err == nil && op.Kind == OpCheck {
		l.borrowing.missed(op)
	}
	if d.Allowed || d.FailedClosed || op.Always { // whose charge was made, or may have been and its answer lost
		l.refusals.Admitted(op.hash)
		return
	}
	if op.asked.table == nil || op.Outcome.Err != nil || d.RememberFor <= 0 {
		return
	}
	kept := *d
	kept.RequestID = ""
	about := refusalKeyOf(&op.Check, op.asked.table, &op.subject)
	about.key = strings.Clone(about.key) // it may be a part of a larger text
	l.refusals.Remember(op.hash, about, op.asked.mark, refusal.Entry[limit.Decision]{
		Decision: kept, Cost: op.Cost,
		Came: l.clock().Mono, Until: op.asked.sent + int64(limit.Remembered(d.RememberFor)),
	})
}

// rememberFor is how long the answer of this node to a check may be remembered elsewhere.
func rememberFor(d *limit.Decision, c *limit.Check) time.Duration {
	if d.Allowed || !isPlain(c) {
		return 0
	}
	if d.RetryAfter == algo.Never {
		return limit.MaxRemember
	}
	return min(d.RetryAfter, limit.MaxRemember)
}
