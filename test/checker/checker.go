// Package checker judges what a cluster has answered. It reads a history (who asked what and when, what the answers
// were, which faults the run had) and knows nothing of the code that made it, so that the code's idea of what is right
// and the checker's are two.
//
// A history may come from the simulator, which knows the instant of every decision, or from real processes, where an
// operation was decided at some instant between its being sent and its being answered. An operation counts for a
// stretch of time only when it lies wholly inside, so that the checker never raises a false alarm for want of
// knowledge.
//
// Protocol, beside it, is told what the nodes do while they do it, and holds that to the rules of who may decide.
package checker

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"time"
)

// Kind says what a limit bounds.
type Kind uint8

// The kinds.
const (
	Window Kind = 1 + iota // at most Limit in any window: sliding_log, sliding_window
	Fixed                  // at most Limit in each window, so that two limits can meet at a boundary: fixed_window
	Bucket                 // at most Capacity, and Limit more per window of time that passes: token_bucket
	// at most Limit that have not ended, each a Window after it began or was renewed: concurrency
	Leases
)

// Durability is what a policy pays for its counters' surviving of a crash.
type Durability uint8

// The durabilities.
const (
	None Durability = iota
	Async
	Escrow
	Sync
)

// Policy is one limit and what has been promised for it.
type Policy struct {
	Name       string
	Kind       Kind
	Limit      int64
	Capacity   int64 // of a Bucket
	Window     time.Duration
	Durability Durability
	Strict     bool // at most Limit, whatever happens to the network
	Aligned    bool // of Fixed: by the wall clock, whose windows begin at whole multiples of Window
	Opens      bool // of Fixed: a window begins with the first charge after the one before has ended
	ColdClosed bool // a counter that was lost starts as if used up
	// Coarse is how much longer than Window a unit may be held against a key because the algorithm rounds, by a slot,
	// or because it was lent and is dated when its owner hears that it was spent. Of a Bucket it is how much later it
	// may be charged.
	Coarse time.Duration
	// Lent is for how long borrowers may spend units that were lent to them, without a word; 0: nothing is lent.
	Lent time.Duration
}

// Result is what an Operation came to.
type Result uint8

// The results.
const (
	Admitted Result = 1 + iota
	Refused
	Failed // not decided, or not known to be: it may have been charged
)

// Operation is one question and its answer. Instants are nanoseconds on the one clock of the history.
type Operation struct {
	Policy, Key    string
	Cost           int64
	Sent, Answered int64 // it was decided in between; equal when the instant of the decision is known
	Result         Result
	Degraded       bool   // the answer said so
	Node           string // that decided it; empty when that is not known
	// Content names the counters that it was charged to. After a merge they count at least as much as before; two sides
	// of a split have different ones. Empty: not known.
	Content  string
	Borrowed bool // a borrower admitted it from a loan

	// Returned is how many units of it were given back, as by the commit or cancel of a reservation, and ReturnedAt the
	// instant at which the last were; 0: none. Bounds are of what was not given back.
	Returned, ReturnedAt int64
	// Of Leases, Renewed is the last instant at which the operation's lease is known to have been renewed, Touched that
	// at which it may have been, and Ended that at which it was released; 0: none.
	Renewed, Touched, Ended int64
	// Renewer is the node that renewed the lease at Renewed.
	Renewer string
}

// net is what was admitted for good.
func (o *Operation) net() int64 { return o.Cost - o.Returned }

// Crash is the end of a process and of what it had in memory.
type Crash struct {
	At   int64
	Node string
	// Copied: when it happened, every partition had a current copy elsewhere, and no other fault was going on. Only
	// then do the bounds of a policy's durability hold.
	Copied bool
	// Flushed is, by key, the instant up to which changes are known to have reached the copy. A key that is not in it
	// had everything but the last History.Flush copied.
	Flushed map[string]int64
	// Lost: whatever had changed since Flushed is lost, of all nodes and whatever the durability.
	Lost bool
}

// Split is a time in which nodes may have taken each other for gone: a cut network, a false suspicion, a pause for
// longer than it takes to be declared dead. It lasts until the sides have merged.
type Split struct {
	From, To int64
	Sides    int // into how many groups the nodes may have fallen
}

// QuorumLoss is a time in which no majority of the voters had been up for long enough to know what was granted before.
// What strict rules have admitted is then taken to be all there is room for.
type QuorumLoss struct{ From, To int64 }

// Hidden is the first grant of partitions that were claimed as new, whose owner lived on where the claimant did not see
// it, by voters no majority of which remembers a grant to another process. Keys under strict rules begin anew.
type Hidden struct {
	At   int64
	Keys map[string]bool
}

// Usage is an observation of how much room a key had left, made when nothing was amiss and all sides had merged.
type Usage struct {
	Policy, Key string
	At          int64
	Remaining   int64
}

// History is a run.
type History struct {
	Policies     []Policy
	Operations   []Operation
	Crashes      []Crash
	Splits       []Split
	QuorumLosses []QuorumLoss
	Hidden       []Hidden
	Usages       []Usage
	Drift        int64         // the largest error of a clock's rate, in parts per million
	Skew         time.Duration // the largest error of a wall clock
	Flush        time.Duration // how far back changes may not have reached a copy that is being kept up to date
	// Claim is how long it may take until what a crashed node held is claimed, which is when an escrow is charged and a
	// cold start begins.
	Claim time.Duration
	// Late is by how much longer than its window a unit may be held against a key because its age was taken down when
	// it arrived at another node and not when it was sent.
	Late time.Duration
}

// Violation is a rule that was broken, and how.
type Violation struct{ Rule, Text string }

func (v Violation) String() string { return v.Rule + ": " + v.Text }

// The rules of Check.
const (
	Beyond      = "admitted beyond the limit"
	Unjustified = "refused without need"
	Forgotten   = "forgotten in a merge"
	Malformed   = "malformed history"
)

// Report is what Check has found.
type Report struct {
	Violations []Violation
	// Excess is, by policy, the most that was admitted of one key beyond its limit, whether or not the faults allow it.
	Excess map[string]int64
}

// Check judges a history. Of each key it reports the worst violation of each rule.
func Check(h *History) *Report {
	c := check{History: h, report: &Report{Excess: make(map[string]int64)}}
	policies := make(map[string]*Policy)
	for i := range h.Policies {
		policies[h.Policies[i].Name] = &h.Policies[i]
		c.report.Excess[h.Policies[i].Name] = 0
	}
	type id struct{ policy, key string }
	keys := make(map[id]*history)
	var order []*history
	find := func(policy, key string) *history {
		k := keys[id{policy, key}]
		if k == nil {
			p := policies[policy]
			if p == nil {
				c.fail(Malformed, "%s/%s: unknown policy", policy, key)
				return nil
			}
			k = &history{Policy: p, key: key}
			keys[id{policy, key}] = k
			order = append(order, k)
		}
		return k
	}
	for _, op := range h.Operations {
		k := find(op.Policy, op.Key)
		if k == nil {
			continue
		}
		if op.Answered < op.Sent || op.Cost <= 0 {
			c.fail(Malformed, "%s/%s: cost %d, sent at %v, answered at %v", op.Policy, op.Key, op.Cost, op.Sent,
				op.Answered)
			continue
		}
		switch op.Result {
		case Admitted:
			k.admitted = append(k.admitted, op)
			k.charged = append(k.charged, op)
		case Refused:
			k.refused = append(k.refused, op)
		default:
			k.charged = append(k.charged, op)
		}
	}
	for _, u := range h.Usages {
		if k := find(u.Policy, u.Key); k != nil {
			k.usages = append(k.usages, u)
		}
	}
	bySent := func(a, b Operation) int { return cmp.Compare(a.Sent, b.Sent) }
	for _, k := range order {
		slices.SortStableFunc(k.admitted, bySent)
		slices.SortStableFunc(k.charged, bySent)
		k.lost = make([]int64, len(h.Crashes))
		for i := range h.Crashes {
			k.lost[i] = c.lost(k, &h.Crashes[i])
		}
		c.admissions(k)
		switch {
		case k.Aligned:
			c.aligned(k)
		case k.Opens && k.Lent == 0:
			c.opened(k)
		}
		c.refusals(k)
		c.merges(k)
	}
	return c.report
}

type check struct {
	*History
	report *Report
}

// history is all there is of one key.
type history struct {
	*Policy
	key      string
	admitted []Operation
	charged  []Operation // admitted, or not known not to be
	refused  []Operation
	usages   []Usage
	lost     []int64 // by crash
}

func (c *check) fail(rule, format string, args ...any) {
	c.report.Violations = append(c.report.Violations, Violation{rule, fmt.Sprintf(format, args...)})
}

// whole, as what a crash has lost, is everything.
const whole = -1

// lost is how many of the key's admissions a crash may have made forgotten. An answer that says it is degraded was
// given without waiting, whatever the durability. What was lent in the last moments may be spent after the crash.
func (c *check) lost(k *history, f *Crash) int64 {
	switch {
	case k.Strict:
		for _, o := range c.QuorumLosses {
			if (!f.Copied || c.copyOutOfReach(f)) && o.From <= f.At && f.At <= o.To {
				// the holder and the voters that knew of it are lost, and its copy is lost or cut off from them
				return whole
			}
		}
		return 0
	case k.Durability == None || !f.Copied || c.copyOutOfReach(f):
		return whole
	}
	since, ok := f.Flushed[k.key]
	if !ok {
		since = f.At - int64(c.Flush)
	}
	var n int64
	for _, op := range k.admitted {
		here := f.Lost || op.Node == "" || op.Node == f.Node || op.Borrowed ||
			op.Renewed > since && op.Renewer == f.Node
		if here && max(op.Answered, op.Renewed) > since && op.Sent <= f.At+int64(k.Lent) &&
			(k.Durability == Async || op.Degraded || f.Lost) {
			n += op.Cost
		}
	}
	return n
}

// copyOutOfReach says whether the node with the copy may have been cut off when a lost node's partitions were claimed.
func (c *check) copyOutOfReach(f *Crash) bool {
	return slices.ContainsFunc(c.Splits, func(s Split) bool { return s.From <= f.At+int64(c.Claim) && s.To >= f.At })
}

// budget is how many admissions beyond bound the faults between two instants account for. bound is what one decider
// who knows everything would admit in that time.
func (c *check) budget(k *history, bound, from, to int64) int64 {
	n := c.forgotten(k, bound, from, to)
	if k.Strict { // for the network alone there is no excuse
		for _, h := range c.Hidden {
			if h.Keys[k.key] && h.At >= from && h.At <= to {
				n += bound
			}
		}
	} else {
		for _, s := range c.Splits {
			if s.From <= to && s.To >= from {
				n += int64(s.Sides-1) * bound
				if k.Durability == None {
					n += bound // a node that no longer sees the holder has one that does claim its empty copy
				}
			}
		}
	}
	return n
}

// forgotten is the part of the budget that is lost for good. A loan that a crash made forgotten may be spent after it.
func (c *check) forgotten(k *history, bound, from, to int64) int64 {
	var n int64
	for i, f := range c.Crashes {
		if f.At > to || f.At+int64(k.Lent) < from {
			continue
		}
		most := bound
		if f.At < from {
			most = min(bound, k.borrowed(from, f.At+int64(k.Lent)))
		}
		if k.lost[i] != whole {
			most = min(most, k.lost[i])
		}
		n += most
	}
	return n
}

// borrowed is how many units borrowers may have admitted between two instants.
func (k *history) borrowed(from, to int64) int64 {
	var n int64
	for _, op := range k.admitted {
		if op.Sent >= from && op.Sent <= to && (op.Borrowed || op.Node == "") {
			n += op.Cost
		}
	}
	return n
}

// admissions holds every stretch of time between two admissions to what may be admitted in it.
func (c *check) admissions(k *history) {
	if k.Kind == Leases {
		c.leases(k)
		return
	}
	span := c.shorter(k.Window) // the instants of a window on a clock that is slow while the one before it was fast
	if k.Aligned {
		span = int64(k.Window - 2*c.Skew) // no more than two windows' on any clocks
	}
	var inside []Operation
	var worst int64
	var text string
	for i, first := range k.admitted {
		inside = inside[:0]
		for _, op := range k.admitted[i:] {
			if k.Kind != Bucket && op.Sent-first.Sent >= span {
				break
			}
			inside = append(inside, op)
		}
		slices.SortStableFunc(inside, func(a, b Operation) int { return cmp.Compare(a.Answered, b.Answered) })
		var n int64
		for _, last := range inside {
			t := last.Answered - first.Sent
			if k.Kind != Bucket && t >= span {
				break
			}
			n += last.net()
			bound := c.bound(k, t)
			if n <= bound {
				continue
			}
			c.report.Excess[k.Name] = max(c.report.Excess[k.Name], n-bound)
			budget := c.budget(k, bound, first.Sent, last.Answered)
			if over := n - bound - budget; over > worst {
				worst = over
				text = fmt.Sprintf("%s/%s: %d admitted between %v and %v; the limit allows %d, the faults %d more",
					k.Name, k.key,
					n, time.Duration(first.Sent), time.Duration(last.Answered), bound, budget)
			}
		}
	}
	if worst > 0 {
		c.fail(Beyond, "%s", text)
	}
}

// leases holds every instant at which a lease begins to how many there may be.
func (c *check) leases(k *history) {
	var worst int64
	var text string
	for _, begun := range k.admitted {
		at, from, n := begun.Answered, begun.Sent, int64(0)
		for i := range k.admitted {
			if op := &k.admitted[i]; op.Answered <= at && at < c.lives(k, op) {
				n += op.Cost
				from = min(from, op.Sent)
			}
		}
		if n <= k.Limit {
			continue
		}
		c.report.Excess[k.Name] = max(c.report.Excess[k.Name], n-k.Limit)
		budget := c.budget(k, k.Limit, from, at)
		if over := n - k.Limit - budget; over > worst {
			worst = over
			text = fmt.Sprintf("%s/%s: %d leases at %v; the limit allows %d, the faults since %v %d more", k.Name,
				k.key,
				n, time.Duration(at), k.Limit, time.Duration(from), budget)
		}
	}
	if worst > 0 {
		c.fail(Beyond, "%s", text)
	}
}

// lives is the instant up to which a lease surely has not ended.
func (c *check) lives(k *history, op *Operation) int64 {
	end := max(op.Sent, op.Renewed) + c.shorter(k.Window)
	if op.Ended != 0 {
		end = min(end, op.Ended)
	}
	return end
}

// disturbed says whether there was a crash or a split between two instants: what was given back may then count again.
func (c *check) disturbed(from, to int64) bool {
	for _, f := range c.Crashes {
		if f.At >= from && f.At <= to {
			return true
		}
	}
	return c.split(from, to)
}

// holds is how many units of an operation may have counted when another one was refused.
func (c *check) holds(k *history, op, refused *Operation) int64 {
	if op.Sent > refused.Answered {
		return 0
	}
	undone := !c.disturbed(op.Sent, refused.Answered)
	if k.Kind != Leases {
		if undone && op.ReturnedAt != 0 && op.ReturnedAt < refused.Sent {
			return op.net()
		}
		return op.Cost
	}
	end := max(op.Answered, op.Touched) + c.longer(k.Window) + int64(c.Late)
	if undone && op.Ended != 0 {
		end = op.Ended
	}
	if end < refused.Sent {
		return 0
	}
	return op.Cost
}

// bound is what may be admitted within t when nothing is forgotten.
func (c *check) bound(k *history, t int64) int64 {
	switch k.Kind {
	case Fixed:
		return 2 * k.Limit
	case Bucket:
		return k.Capacity + part(k.Limit, c.longer(time.Duration(t)), int64(k.Window)) + 1
	default:
		return k.Limit
	}
}

// refusals looks for those that what may have been charged does not account for.
func (c *check) refusals(k *history) {
	var worst int64
	var text string
	horizon := c.longer(k.Window) + int64(k.Coarse) + int64(c.Late)
	for _, op := range k.refused {
		if op.Cost > k.most() {
			continue
		}
		reach := horizon
		if k.Kind == Fixed || k.Kind == Bucket {
			// What two sides have merged lasts longer: a window until the later of the two ends, with what the earlier
			// one counted; a bucket until both sides' debts are paid.
			reach *= 3
		}
		slack, sure := c.slack(k, op.Sent-reach, op.Answered)
		if !sure {
			continue
		}
		var used int64
		if k.Kind == Bucket {
			// It was refused at some instant since it was sent, and the bucket may have been refilled from then on.
			used, _ = c.deficit(k.charged, k, op.Answered, func(e *Operation) int64 { return c.holds(k, e, &op) },
				c.Late+k.Coarse+time.Duration(op.Answered-op.Sent))
		} else {
			for i := range k.charged {
				if e := &k.charged[i]; k.Kind == Leases || e.Answered > op.Sent-horizon {
					used += c.holds(k, e, &op)
				}
			}
		}
		if room := k.most() - used - op.Cost - slack; room >= 0 && room+1 > worst {
			worst = room + 1
			text = fmt.Sprintf("%s/%s: %d refused at %v by %q, where at most %d of %d could have been in use",
				k.Name, k.key, op.Cost, time.Duration(op.Answered), op.Node, used, k.most())
		}
	}
	if worst > 0 {
		c.fail(Unjustified, "%s", text)
	}
}

func (p *Policy) most() int64 {
	if p.Kind == Bucket {
		return p.Capacity
	}
	return p.Limit
}

// slack is how much may have been held back between two instants on account of faults; sure is false where there is no
// telling.
func (c *check) slack(k *history, from, to int64) (slack int64, sure bool) {
	if c.split(from, to) {
		return 0, false // a window of one side may hold the units of the other for longer
	}
	for _, o := range c.QuorumLosses {
		if k.Strict && o.From <= to && o.To >= from-int64(c.Claim) {
			return 0, false
		}
	}
	for _, f := range c.Crashes {
		if f.At > to || f.At < from-int64(c.Claim) {
			continue
		}
		if !f.Copied && (k.Strict || k.ColdClosed) || f.Lost {
			return 0, false // of Lost, a copy that comes late is joined, as after a split
		}
		if k.Durability == Escrow {
			slack += 2 * max(1, k.most()/20)
		}
	}
	return slack, true
}

// merges holds what was left of a key to what was admitted. Sides of a split that have merged count as much as each of
// them did, at least; strict rules, which one side alone decides, and leases, which have identity, as much as all of
// them did.
func (c *check) merges(k *history) {
	if k.Kind == Fixed {
		return // what counts depends on when the window began
	}
	for _, u := range k.usages {
		used, from := c.inUse(k, k.admitted, u.At)
		if !k.Strict && k.Kind != Leases && c.split(from, u.At) {
			used = 0
			for _, ops := range c.contents(k, from, u.At) {
				n, _ := c.inUse(k, ops, u.At)
				used = max(used, n)
			}
		}
		lost := c.forgotten(k, k.most(), from, u.At)
		var over int64 // what a crash lost beyond the limit, which the sides of a split had admitted
		for i, f := range c.Crashes {
			if k.lost[i] == whole && from <= f.At && f.At <= u.At {
				before := slices.DeleteFunc(slices.Clone(k.admitted), func(op Operation) bool { return op.Sent > f.At })
				n, _ := c.inUse(k, before, u.At)
				over = max(over, n-k.most())
			}
		}
		lost += over
		if room := max(0, k.most()-max(0, used-lost)); u.Remaining > room {
			c.fail(Forgotten, "%s/%s: %d left at %v, where %d of %d were in use and at most %d forgotten", k.Name,
				k.key,
				u.Remaining, time.Duration(u.At), used, k.most(), lost)
		}
	}
}

// inUse is how many units of what was admitted are in use at an instant, at least, and since when the key has been in
// use.
func (c *check) inUse(k *history, admitted []Operation, at int64) (used, from int64) {
	switch k.Kind {
	case Bucket:
		return c.deficit(admitted, k, at, nil, 0)
	case Leases:
		from = at
		for i := range admitted {
			if op := &admitted[i]; op.Answered < at && at < c.lives(k, op) {
				used += op.Cost
				from = min(from, op.Sent)
			}
		}
	default:
		from = at - c.shorter(k.Window)
		for _, op := range admitted {
			if op.Sent > from && op.Answered < at {
				used += op.net()
			}
		}
	}
	return used, from
}

// contents divides what was admitted by the counters that it was charged to, where sides were apart between two
// instants. What was admitted before was known to one side at least, and what was admitted afterwards was charged to
// the counters that all sides merged into.
func (c *check) contents(k *history, from, to int64) map[string][]Operation {
	first, last := to, from
	for _, s := range c.Splits {
		if s.From <= to && s.To >= from {
			first, last = min(first, s.From), max(last, s.To)
		}
	}
	by := map[string][]Operation{"before": nil}
	var after []Operation
	for _, op := range k.admitted {
		switch {
		case op.Sent > last:
			after = append(after, op)
			continue
		case op.Answered < first:
			by["before"] = append(by["before"], op)
		}
		if op.Content != "" {
			by[op.Content] = append(by[op.Content], op)
		}
	}
	for content := range by {
		by[content] = append(by[content], after...)
	}
	return by
}

// split says whether sides were apart at some time between two instants.
func (c *check) split(from, to int64) bool {
	return slices.ContainsFunc(c.Splits, func(s Split) bool { return s.From <= to && s.To >= from })
}

// deficit is how far below its capacity a bucket is at an instant that was charged ops: at most, with all charged late
// and refilled slowly and late by some time once, each for as many units as holds says, or at least, where holds is
// nil. Part of a unit is one that is not there. since is when it was full last.
func (c *check) deficit(ops []Operation, k *history, at int64, holds func(*Operation) int64,
	late time.Duration) (units, since int64) {
	most := holds != nil
	perNano := float64(k.Limit) / float64(k.Window)
	if most {
		perNano *= 1 - c.drift()
	} else {
		perNano *= 1 + c.drift()
	}
	var level, last float64
	for i := range ops {
		op := &ops[i]
		if op.Sent > at || !most && op.Answered >= at {
			continue
		}
		cost := op.net()
		if most {
			cost = holds(op)
		}
		when := float64(op.Sent)
		if most {
			when = float64(min(op.Answered, at))
		}
		level -= max(0, when-last) * perNano
		if level <= 0 {
			level, since = 0, op.Sent
		}
		level += float64(cost)
		if !most {
			level = min(level, float64(k.Capacity)) // two sides may have spent more than there was
		}
		last = max(last, when)
	}
	level = max(0, level-(float64(at)-last)*perNano)
	const rounding = 1e-6
	if most {
		return int64(math.Ceil(min(float64(k.Capacity), level+float64(late)*perNano) + rounding)), since
	}
	return int64(math.Ceil(level - rounding)), since
}

func (c *check) drift() float64 { return 2 * float64(c.Drift) / 1e6 }

func (c *check) shorter(d time.Duration) int64 { return int64(d) - part(int64(d), 2*c.Drift, 1e6) }
func (c *check) longer(d time.Duration) int64  { return int64(d) + part(int64(d), 2*c.Drift, 1e6) + 1 }

// part is n·num/den, rounded down, for arguments that are not negative.
func part(n, num, den int64) int64 {
	hi, lo := bits.Mul64(uint64(n), uint64(num))
	if hi >= uint64(den) {
		return 1<<63 - 1
	}
	q, _ := bits.Div64(hi, lo, uint64(den))
	return int64(min(q, 1<<63-1))
}
