package simulation

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	policyfile "github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/test/checker"
	"github.com/weirlimit/weir/test/must"
)

// trouble is what happens to nodes in a run of TestCallSeeds.
type trouble uint8

const (
	calmly   trouble = iota // nothing
	planned                 // nodes leave and join
	losing                  // messages of checks are lost, and their answers
	severing                // no checks pass from one node to another, or no answers
	dying                   // one node crashes
	troubles
	// the network falls into two sides, which do not see each other any more; in the place of some that sever
	parting = troubles
)

func (x trouble) String() string {
	return [...]string{"calmly", "planned", "losing", "severing", "dying", "parting"}[x]
}

// troubleOf is what happens in a seed's run.
func troubleOf(seed uint64) trouble {
	x := trouble(seed % uint64(troubles))
	if x == severing && seed/uint64(troubles)%4 < 2 { // with loans and without
		x = parting
	}
	return x
}

// callRun is a run in which callers ask nodes.
type callRun struct {
	*nodes
	trouble   trouble
	rules     []*callRule
	lent      []*callRule // of which units are lent; none in half of the runs
	hosts     int         // at the start
	rulesText string
	until     int64
	callers   sync.WaitGroup

	recording  sync.Mutex
	operations []operation
	history    checker.History
	shares     checker.History // what each node admitted and refused by its part of a limit
	byError    []span          // in which checks were under way that on_error answered
	faults     []span          // in which owners may be out of reach
	wrong      []string
	keys       map[string]map[string]bool // by policy, that the history has
	counts     struct{ admitted, borrowed, refused, byError, obeyed, repeated int }
}

// operation is what the checker hears of, unless it failed without having been at a node that may have charged it.
type operation struct {
	checker.Operation
	asked *asked
}

// span is a stretch of time.
type span struct {
	from, to int64
	text     string
	planned  bool // of a fault: partitions move, and all owners can be reached
}

// callRule is a policy.
type callRule struct {
	name      string
	onError   string
	algorithm algo.Algorithm
	limit     int64
	lent      bool
	checked   checker.Policy
}

func newCallRun(t *testing.T, seed uint64) *callRun {
	rng := rand.New(rand.NewPCG(seed, 2))
	r := &callRun{trouble: troubleOf(seed), keys: make(map[string]map[string]bool)}
	r.nodes = &nodes{
		t: t, seed: seed, began: time.Now(), tables: make(map[string]*ring.Table), cut: make(map[[2]string]bool),
		due: make(map[int64]bool), delay: time.Duration(rng.Int64N(int64(2 * time.Millisecond))),
		jitter: []time.Duration{0, time.Millisecond, 20 * time.Millisecond}[rng.IntN(3)],
		rates:  []int64{0, 1_000_000}[rng.IntN(2)], most: 2 + rng.IntN(3),
	}
	var text strings.Builder
	text.WriteString("policies:\n")
	others := []algo.Algorithm{algo.TokenBucket, algo.FixedWindow, algo.SlidingWindow, algo.SlidingCounter,
		algo.LeakyBucket}
	// Half of those with three nodes or more have voters, and a strict policy then.
	r.hosts = 2 + rng.IntN(3)
	errors := []string{"open", "open", "closed", "closed", "share", "share"}
	if r.hosts >= 3 && rng.IntN(2) == 0 {
		r.voters = []string{"a", "b", "c"}
		errors = append(errors, "closed")
	}
	for i, onError := range errors {
		a := algo.SlidingLog
		if i%2 == 1 {
			a = others[rng.IntN(len(others))]
		}
		d := []checker.Durability{checker.Async, checker.Escrow, checker.Sync}[rng.IntN(3)]
		strict := false
		if i == 6 {
			d, strict = checker.Sync, true
		}
		window := time.Duration(500+rng.Int64N(3000)) * time.Millisecond
		rule := &callRule{name: fmt.Sprintf("p%d", i), onError: onError, algorithm: a, limit: 2 + rng.Int64N(12)}
		r.add(&text, rule, d, strict, window)
		r.rules = append(r.rules, rule)
		r.history.Policies = append(r.history.Policies, rule.checked)
	}
	if seed/uint64(troubles)%2 == 0 {
		r.lend(&text)
	}
	set := must.Value(policyfile.Parse("seed", []byte(text.String())))(t)
	r.set = set
	r.rulesText = text.String()
	r.history.Drift = 1000
	r.shares.Drift = 1000
	r.history.Flush = 100*time.Millisecond + 2*(r.delay+r.jitter)
	r.history.Claim = 5 * time.Second
	if r.trouble == planned || r.trouble == dying || r.trouble == parting {
		r.history.Late = 500 * time.Millisecond
	}
	return r
}

// add completes a policy, and adds it to the text of a file.
func (r *callRun) add(text *strings.Builder, rule *callRule, d checker.Durability, strict bool, window time.Duration) {
	name := map[algo.Algorithm]string{
		algo.SlidingLog: "sliding_log", algo.TokenBucket: "token_bucket", algo.FixedWindow: "fixed_window",
		algo.SlidingWindow:  "sliding_window",
		algo.SlidingCounter: "sliding_counter", algo.LeakyBucket: "leaky_bucket",
	}[rule.algorithm]
	p := &rule.checked
	*p = checker.Policy{Name: rule.name, Kind: kinds[rule.algorithm], Limit: rule.limit, Capacity: rule.limit,
		Window: window, Durability: d, Strict: strict}
	switch rule.algorithm {
	case algo.SlidingWindow:
		p.Coarse = window / 10
	case algo.SlidingCounter:
		p.Coarse = window
	}
	fmt.Fprintf(text, "  - {name: %s, algorithm: %s, limit: %d, window: %dms, on_error: %s, durability: %s", rule.name,
		name, rule.limit,
		window.Milliseconds(), rule.onError, [...]string{"none", "async", "escrow", "sync"}[d])
	if strict {
		text.WriteString(", consistency: strict")
	}
	text.WriteString("}\n")
}

func (r *callRun) fail(format string, args ...any) {
	r.recording.Lock()
	defer r.recording.Unlock()
	r.wrong = append(r.wrong, fmt.Sprintf("%v: ", time.Duration(r.now()))+fmt.Sprintf(format, args...))
}

// ask asks a node, and records what came of it.
func (r *callRun) ask(n *node, rule *callRule, key string, cost int64) (d limit.Decision) {
	results, sent, came, asked := n.check(limit.Check{Target: limit.Target{Policy: rule.name, Key: key}, Cost: cost})
	if results == nil || results[0].Err != nil {
		r.fail("%s/%s: error %v", rule.name, key, results)
		return d
	}
	d = results[0].Decision
	if n.ctx.Err() != nil { // and it crashed before it could answer
		d = limit.Decision{FailedClosed: true}
	}
	r.note(n, rule, key, cost, &d, sent, came, asked[0])
	return d
}

func (r *callRun) note(n *node, rule *callRule, key string, cost int64, d *limit.Decision, sent, came int64, a *asked) {
	r.mu.Lock() // what was forwarded may still be on its way
	borrowed := rule.lent && a.at == 0 && d.Allowed && !d.FailedOpen
	r.mu.Unlock()
	if borrowed {
		r.spends(n.self.Boot, rule, cost)
	}
	r.recording.Lock()
	defer r.recording.Unlock()
	op := checker.Operation{Policy: rule.name, Key: key, Cost: cost, Sent: sent, Answered: came, Degraded: d.Degraded}
	if *oneSeed >= 0 {
		r.t.Logf("%v to %v: %s, %s/%s, %d: %+v", time.Duration(sent), time.Duration(came), n.self.Name, rule.name, key,
			cost, *d)
	}
	switch {
	case cost == 0:
		return
	case d.FailedOpen || d.FailedClosed:
		r.notDecided(n, rule, op, d)
		op.Result = checker.Failed
	case d.Allowed:
		r.counts.admitted++
		if borrowed {
			r.counts.borrowed++
		}
		op.Result = checker.Admitted
	default:
		r.counts.refused++
		op.Result = checker.Refused
	}
	r.record(op, a)
}

// record adds an operation to the history.
func (r *callRun) record(op checker.Operation, a *asked) {
	if r.keys[op.Policy] == nil {
		r.keys[op.Policy] = make(map[string]bool)
	}
	r.keys[op.Policy][op.Key] = true
	r.operations = append(r.operations, operation{op, a})
}

// notDecided notes that on_error has answered.
func (r *callRun) notDecided(n *node, rule *callRule, op checker.Operation, d *limit.Decision) {
	r.counts.byError++
	if n.ctx.Err() != nil {
		return
	}
	what := fmt.Sprintf("%s/%s asked of %s", rule.name, op.Key, n.self.Name)
	r.byError = append(r.byError, span{from: op.Sent, to: op.Answered, text: what})
	if d.FailedOpen != d.Allowed || d.FailedOpen && rule.onError == "closed" ||
		d.FailedClosed && rule.onError == "open" {
		r.wrong = append(r.wrong, fmt.Sprintf("%s: on_error %s answers %+v", what, rule.onError, *d))
	}
	if rule.onError == "share" {
		r.share(n, rule, op, d.Allowed)
	}
}

// share records what a node answered by its part of a limit: a policy of its own to the checker. It was decided when it
// was answered.
func (r *callRun) share(n *node, rule *callRule, op checker.Operation, admitted bool) {
	p := rule.checked
	p.Name = fmt.Sprintf("%s of %s/%d", rule.name, n.self.Name, n.self.Boot)
	p.Limit /= int64(r.most)
	p.Capacity = p.Limit
	if !slices.ContainsFunc(r.shares.Policies, func(q checker.Policy) bool { return q.Name == p.Name }) {
		r.shares.Policies = append(r.shares.Policies, p)
	}
	op.Policy, op.Sent = p.Name, op.Answered
	if op.Result = checker.Refused; admitted {
		op.Result = checker.Admitted
	}
	r.shares.Operations = append(r.shares.Operations, op)
}

// trace says all that callers were answered, and when.
func (r *callRun) trace() uint64 {
	slices.SortFunc(r.operations, func(a, b operation) int { // those of one instant in any order
		return cmp.Or(cmp.Compare(a.Sent, b.Sent), cmp.Compare(a.Answered, b.Answered), cmp.Compare(a.Policy, b.Policy),
			cmp.Compare(a.Key, b.Key),
			cmp.Compare(a.Cost, b.Cost), cmp.Compare(a.Result, b.Result))
	})
	h := fnv.New64a()
	for i := range r.operations {
		fmt.Fprintln(h, r.operations[i].Operation)
	}
	return h.Sum64()
}

// any is a node that takes calls.
func (r *callRun) any(rng *rand.Rand) *node {
	r.mu.Lock()
	defer r.mu.Unlock()
	var open []*node
	for _, n := range r.running {
		if n.state == active {
			open = append(open, n)
		}
	}
	return open[rng.IntN(len(open))]
}

// caller has one ask until the time is over.
func (r *callRun) caller(i int, ask func(rng *rand.Rand)) {
	rng := rand.New(rand.NewPCG(r.seed, 100+uint64(i)))
	r.callers.Go(func() {
		time.Sleep(time.Duration(rng.Int64N(second)))
		for r.now() < r.until {
			ask(rng)
		}
	})
}

// crowd asks about keys that others ask about as well: alone, several at a time, or the same one from several sides.
func (r *callRun) crowd(rng *rand.Rand) {
	rule := r.rules[rng.IntN(len(r.rules))]
	key := fmt.Sprintf("crowd-%d", rng.IntN(2))
	cost := int64(1)
	if rng.IntN(5) == 0 {
		cost += rng.Int64N(3)
	}
	n := r.any(rng)
	switch rng.IntN(8) {
	case 0:
		var side sync.WaitGroup
		for range 3 {
			wait := time.Duration(rng.Int64N(int64(3 * time.Millisecond)))
			side.Go(func() {
				time.Sleep(wait)
				r.ask(n, rule, key, cost)
			})
		}
		side.Wait()
	case 1:
		var checks []limit.Check
		for _, rule := range r.rules {
			checks = append(checks, limit.Check{Target: limit.Target{Policy: rule.name, Key: key}, Cost: cost})
		}
		results, sent, came, asked := n.check(checks...)
		for i := range results {
			d := results[i].Decision
			if results[i].Err != nil {
				r.fail("%s/%s: error %v", r.rules[i].name, key, results[i].Err)
			} else if n.ctx.Err() != nil {
				d = limit.Decision{FailedClosed: true}
			}
			r.note(n, r.rules[i], key, cost, &d, sent, came, asked[i])
		}
	default:
		r.ask(n, rule, key, cost)
	}
	time.Sleep(time.Duration(rng.Int64N(int64(40 * time.Millisecond))))
}

// repeater asks under request ids, and repeats each at any node until it is answered, and then often once more: it is
// charged once.
func (r *callRun) repeater(i int) func(rng *rand.Rand) {
	next := 0
	return func(rng *rand.Rand) {
		next++
		rule := r.rules[rng.IntN(len(r.rules))]
		id := repeated{rule: rule, check: limit.Check{
			Target: limit.Target{Policy: rule.name, Key: fmt.Sprintf("again-%d", rng.IntN(2))}, Cost: 1 + rng.Int64N(2),
			RequestID: fmt.Sprint(i, "-", next),
		}}
		for range 6 {
			if r.repeat(r.any(rng), &id) {
				break
			}
			time.Sleep(time.Duration(rng.Int64N(second / 4)))
		}
		if !id.admitted || r.trouble == dying || r.trouble == parting {
			r.recording.Lock()
			for _, o := range id.failed {
				r.record(o.Operation, o.asked)
			}
			r.recording.Unlock()
		}
		if number := uint64(next); id.admitted && rng.IntN(2) == 0 {
			r.callers.Go(func() {
				time.Sleep(time.Duration(r.draw(2*second, id.check.RequestID)))
				r.repeat(r.any(rand.New(rand.NewPCG(r.seed, number))), &id)
			})
		}
		time.Sleep(time.Duration(rng.Int64N(int64(100 * time.Millisecond))))
	}
}

// repeated is a check that is repeated under its request id.
type repeated struct {
	rule     *callRule
	check    limit.Check
	first    int64 // when it was asked first
	asked    bool
	admitted bool
	failed   []operation // before it was decided
}

// repeat asks under an id once more, and reports whether there was a decision. Where messages are lost and nodes leave
// the id is charged once, however often it is repeated. A crash may have made a charge forgotten of which nobody had
// been told, and under async one of the last moments.
func (r *callRun) repeat(n *node, id *repeated) bool {
	results, sent, came, asked := n.check(id.check)
	key := id.check.Key
	if results == nil || results[0].Err != nil {
		r.fail("%s/%s: request id %s: error %v", id.rule.name, key, id.check.RequestID, results)
		return true
	}
	d := results[0].Decision
	if n.ctx.Err() != nil {
		d = limit.Decision{FailedClosed: true}
	}
	r.recording.Lock()
	defer r.recording.Unlock()
	if !id.asked {
		id.asked, id.first = true, sent
	}
	if *oneSeed >= 0 {
		r.t.Logf("%v to %v: %s, %s/%s, request id %s: %+v", time.Duration(sent), time.Duration(came), n.self.Name,
			id.rule.name, key, id.check.RequestID, d)
	}
	op := checker.Operation{Policy: id.rule.name, Key: key, Cost: id.check.Cost, Sent: sent, Answered: came,
		Result: checker.Failed, Degraded: d.Degraded}
	forgets := r.trouble == parting || r.trouble == dying && id.rule.checked.Durability < checker.Escrow
	switch {
	case d.FailedOpen || d.FailedClosed:
		r.notDecided(n, id.rule, op, &d)
		if !id.admitted {
			id.failed = append(id.failed, operation{op, asked[0]})
		} else if forgets {
			r.record(op, asked[0])
		}
		return false
	case d.Allowed && !id.admitted:
		id.admitted = true
		op.Result, op.Sent = checker.Admitted, id.first
		r.record(op, asked[0])
	case d.Allowed:
		r.counts.repeated++
		if forgets {
			r.record(op, asked[0])
		}
	case id.admitted:
		if !forgets {
			r.wrong = append(r.wrong, fmt.Sprintf("%v: %s/%s: request id %s was admitted, and is refused",
				time.Duration(came), id.rule.name, key, id.check.RequestID))
		}
	default:
		op.Result = checker.Refused
		r.record(op, asked[0])
	}
	return true
}

// obedients is how many of these callers there are.
const obedients = 6

// obedient is who has keys alone, and comes back when it is told to.
func (r *callRun) obedient(i int) func(rng *rand.Rand) {
	due := make(map[int64]int64) // by cost, when it is to pass
	key := fmt.Sprintf("own-%d", i)
	var rule *callRule
	var n *node // always the same: another one's memory may be older than what was admitted last
	return func(rng *rand.Rand) {
		if rule == nil || rng.IntN(40) == 0 || r.named(n.self.Name) != n || n.ctx.Err() != nil {
			rule, n = r.rules[rng.IntN(len(r.rules))], r.any(rng)
			clear(due)
		}
		cost := 1 + rng.Int64N(min(3, rule.limit))
		if len(due) > 0 && rng.IntN(2) == 0 {
			for {
				if at, ok := due[cost]; ok {
					time.Sleep(time.Duration(at - r.now()))
					break
				}
				cost = cost%3 + 1
			}
		}
		asked := r.now()
		d := r.ask(n, rule, key, cost)
		at, told := due[cost]
		switch {
		case d.FailedOpen || d.FailedClosed:
			clear(due) // it may be charged, later even
		case d.Allowed:
			if told && at <= asked {
				r.recording.Lock()
				r.counts.obeyed++
				r.recording.Unlock()
			}
			clear(due)
		default:
			if told && at <= asked && !r.troubled(asked-int64(rule.checked.Window)-2*second) {
				r.fail("%s/%s: %d refused for another %v although it was to pass %v ago", rule.name, key, cost,
					d.RetryAfter, time.Duration(asked-at))
			}
			if d.RetryAfter < 0 || d.RetryAfter > 10*rule.checked.Window {
				r.fail("%s/%s: %d of %d refused for %v", rule.name, key, cost, rule.limit, d.RetryAfter)
				break
			}
			wait := int64(d.RetryAfter)
			if r.rates > 0 {
				wait += (wait + second) / 400 // a clock that is slow, and a memory of it on one that is fast
			}
			due[cost] = r.now() + wait
		}
		if len(due) == 0 && rng.IntN(2) == 0 {
			time.Sleep(time.Duration(rng.Int64N(int64(rule.checked.Window) / 4)))
		}
	}
}

// troubled says whether anything has gone wrong, or moved, since an instant.
func (r *callRun) troubled(since int64) bool {
	r.recording.Lock()
	defer r.recording.Unlock()
	return slices.ContainsFunc(r.faults, func(f span) bool { return f.to > since })
}

// returner fills a key, gives units back, and wants them to be there, all at one node: what that remembers of the key
// is void then, and so is an answer that is on its way to it.
func (r *callRun) returner(rng *rand.Rand) {
	n, rule := r.any(rng), r.rules[0]
	target := limit.Target{Policy: rule.name, Key: fmt.Sprintf("back-%d", rng.IntN(1000))}
	ask := func(cost int64) *limit.Decision {
		results, _, _, _ := n.check(limit.Check{Target: target, Cost: cost})
		if results == nil || results[0].Err != nil || n.ctx.Err() != nil || results[0].FailedOpen ||
			results[0].FailedClosed {
			return nil
		}
		return &results[0].Decision
	}
	begun := r.now()
	for {
		d := ask(1)
		if d == nil {
			return
		}
		if !d.Allowed {
			break
		}
	}
	const back = 2
	var beside *limit.Decision
	var side sync.WaitGroup
	side.Go(func() { beside = ask(back) })
	time.Sleep(time.Duration(rng.Int64N(2 * int64(r.delay+r.jitter))))
	units, err := n.limiter.Refund(n.ctx, target, back, "")
	side.Wait()
	if err != nil || units != back || beside == nil || beside.Allowed || r.now()-begun > int64(rule.checked.Window)/2 {
		return
	}
	cost := 1 + rng.Int64N(back)
	if d := ask(cost); d != nil && !d.Allowed && !r.troubled(begun-int64(rule.checked.Window)) {
		r.fail("%s/%s: %d refused for another %v by %s although %d came back through it", rule.name, target.Key, cost,
			d.RetryAfter, n.self.Name, back)
	}
	time.Sleep(time.Duration(rng.Int64N(second / 4)))
}

// fault has something go wrong until it is mended.
func (r *callRun) fault(rng *rand.Rand) {
	begin := func(planned bool) int {
		r.recording.Lock()
		defer r.recording.Unlock()
		r.faults = append(r.faults, span{from: r.now(), to: never, planned: planned})
		return len(r.faults) - 1
	}
	end := func(i int) {
		time.Sleep(2 * callTimeout) // what was lost is noticed now
		r.recording.Lock()
		defer r.recording.Unlock()
		r.faults[i].to = r.now()
	}
	names := []string{"a", "b", "c", "d"}
	if r.lends {
		names = append(names, "x", "y")
	}
	switch r.trouble {
	case planned:
		f := begin(true)
		n := r.any(rng)
		if err := n.leave(); err != nil {
			r.fail("%s leaves: %v", n.self.Name, err)
		}
		time.Sleep(time.Duration(rng.Int64N(second)))
		r.join(n.self.Name)
		end(f)
	case losing:
		f := begin(false)
		r.mu.Lock()
		r.loss = 0.05 + rng.Float64()/2
		r.mu.Unlock()
		time.Sleep(time.Duration(rng.Int64N(2 * second)))
		r.mu.Lock()
		r.loss = 0
		r.mu.Unlock()
		end(f)
	case severing:
		f := begin(false)
		way := [2]string{names[rng.IntN(len(names))], names[rng.IntN(len(names))]}
		if r.lends {
			if h := r.holder(r.lent[rng.IntN(len(r.lent))].name).Name; h != "" {
				way[rng.IntN(2)] = h
			}
		}
		r.mu.Lock()
		r.cut[way] = true
		r.mu.Unlock()
		time.Sleep(time.Duration(rng.Int64N(2 * second)))
		r.mu.Lock()
		clear(r.cut)
		r.mu.Unlock()
		end(f)
	case parting:
		f := begin(false)
		var side []string
		for _, n := range r.processes() {
			side = append(side, n.self.Name)
		}
		rng.Shuffle(len(side), func(i, j int) { side[i], side[j] = side[j], side[i] })
		r.recording.Lock()
		split := len(r.history.Splits)
		r.history.Splits = append(r.history.Splits, checker.Split{From: r.now(), To: never, Sides: 2})
		r.recording.Unlock()
		r.part(side[:1+rng.IntN(len(side)-1)])
		time.Sleep(3*time.Second + time.Duration(rng.Int64N(2*second)))
		r.part(nil)
		time.Sleep(time.Second) // for all to see each other
		if !r.nodes.until(20*time.Second, r.quiet) {
			r.fail("not settled after the cut")
		}
		r.recording.Lock()
		r.history.Splits[split].To = r.now()
		r.recording.Unlock()
		end(f)
	case dying:
		if len(r.history.Crashes) > 0 {
			break
		}
		if !r.nodes.until(20*time.Second, r.quiet) {
			r.fail("not settled before the crash")
		}
		f := begin(false)
		n := r.any(rng)
		r.recording.Lock()
		r.history.Crashes = append(r.history.Crashes, checker.Crash{At: r.now(), Node: n.self.Name, Copied: true})
		r.recording.Unlock()
		n.close()
		r.tell(n, gone, 1500*time.Millisecond+time.Duration(rng.Int64N(second)))
		time.Sleep(3 * time.Second)
		if !r.nodes.until(20*time.Second, r.quiet) {
			r.fail("not settled after the crash")
		}
		end(f)
		f = begin(true)
		r.join(n.self.Name)
		end(f)
	}
	time.Sleep(time.Duration(rng.Int64N(2 * second)))
}

// join starts a process that takes part once it sees the others, and waits until it holds what it should.
func (r *callRun) join(name string) {
	n := r.start(name, joining)
	time.Sleep(500 * time.Millisecond)
	r.tell(n, active, 0)
	time.Sleep(500 * time.Millisecond) // for all to see it
	if !r.nodes.until(20*time.Second, r.quiet) {
		r.fail("not settled after %s has joined", name)
	}
}

// life is the whole run.
func (r *callRun) life() {
	rng := rand.New(rand.NewPCG(r.seed, 3))
	for i := range r.hosts {
		r.start(string(rune('a'+i)), active)
		time.Sleep(time.Duration(rng.Int64N(100_000)))
	}
	defer func() {
		for _, n := range slices.Clone(r.running) {
			n.close()
		}
		time.Sleep(5 * time.Second) // messages arrive, and words of who is there; when this returns, time stops
	}()
	if !r.nodes.until(20*time.Second, r.quiet) {
		r.fail("not settled at the start")
		return
	}
	if r.trouble == planned || r.trouble == dying || r.trouble == parting {
		time.Sleep(time.Second) // the claims of the start are over for the checker
	}
	r.until = r.now() + 8*second
	for i := range 3 {
		r.caller(i, r.crowd)
	}
	for i := range obedients {
		r.caller(3+i, r.obedient(i))
	}
	r.caller(3+obedients, r.returner)
	r.caller(4+obedients, r.fault)
	for i := range 2 {
		r.caller(20+obedients+i, r.repeater(i))
	}
	if r.lends {
		for i := range 2 {
			r.caller(10+obedients+i, r.haste)
			r.borrow(i)
		}
		r.watch()
	}
	r.callers.Wait()
	if !r.nodes.until(20*time.Second, r.quiet) {
		r.fail("not settled in the end")
	}
	// Now that nothing goes wrong nothing is answered by on_error, nor is anything that was.
	r.until = r.now() + second
	for i := range 3 {
		r.caller(5+obedients+i, r.crowd)
	}
	r.callers.Wait()
	if r.lends {
		time.Sleep(algo.LoanTerm + algo.LoanTerm/100)
		r.returned()
	}
	for _, rule := range slices.Concat(r.rules, r.lent) {
		for _, key := range slices.Sorted(maps.Keys(r.keys[rule.name])) {
			n := r.any(rng)
			results, sent, came, _ := n.check(limit.Check{Target: limit.Target{Policy: rule.name, Key: key}})
			if results[0].Err != nil || results[0].FailedOpen || results[0].FailedClosed {
				r.fail("%s/%s: no answer: %+v", rule.name, key, results[0])
				continue
			}
			if left := results[0].Remaining; left < rule.limit && (!rule.lent || r.trouble == calmly) {
				// One more than there is would be refused.
				r.history.Operations = append(r.history.Operations, checker.Operation{
					Policy: rule.name, Key: key, Cost: left + 1, Sent: sent, Answered: came, Result: checker.Refused,
				})
			}
			r.history.Usages = append(r.history.Usages,
				checker.Usage{Policy: rule.name, Key: key, At: came, Remaining: results[0].Remaining})
		}
	}
}

// judge is everything that is wrong.
func (r *callRun) judge() []string {
	all := r.wrong
	for _, o := range r.operations {
		if o.Result == checker.Failed {
			if o.asked.at == 0 {
				continue
			}
			o.Answered = max(o.Answered, o.asked.at)
		}
		if o.Result == checker.Refused && r.trouble != calmly &&
			slices.ContainsFunc(r.lent, func(p *callRule) bool { return p.name == o.Policy }) {
			continue // what borrowers have not spent whose loans have ended is charged
		}
		r.history.Operations = append(r.history.Operations, o.Operation)
	}
	for _, e := range r.byError {
		if !slices.ContainsFunc(r.faults, func(f span) bool { return !f.planned && f.from <= e.to && e.from <= f.to }) {
			all = append(all, fmt.Sprintf("%v: %s: answered by on_error although nothing was wrong",
				time.Duration(e.to), e.text))
		}
	}
	for _, v := range checker.Check(&r.history).Violations {
		all = append(all, v.String())
	}
	for _, v := range checker.Check(&r.shares).Violations {
		all = append(all, "by its part: "+v.String())
	}
	return all
}

// playCalls runs a seed.
func playCalls(t *testing.T, seed uint64) *callRun {
	var r *callRun
	synctest.Test(t, func(t *testing.T) {
		r = newCallRun(t, seed)
		r.life()
	})
	return r
}

// TestCallSeeds runs whole nodes, and judges what callers are answered: by owners, from memory of refusals, from loans,
// and by on_error. Nearly all seeds do the same each time they are run, see the package's comment. Refusals of keys
// that are lent are judged where all is well: what a borrower has not returned when its loan ends is charged.
func TestCallSeeds(t *testing.T) {
	n := *callSeeds
	if raceEnabled {
		n = max(n/10, 1)
	}
	first := *firstOf
	if *oneSeed >= 0 {
		first, n = uint64(*oneSeed), 1
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	failed, played, repeated := 0, 0, 0
	for seed := first; n > 0; seed++ {
		if *only != "" && *oneSeed < 0 && !slices.Contains(strings.Split(*only, ","), troubleOf(seed).String()) {
			continue
		}
		n--
		r := playCalls(t, seed)
		if *twice {
			played++
			if again := playCalls(t, seed); again.trace() == r.trace() {
				repeated++
			} else {
				t.Logf("seed %d, %v: differs when it is run again: %x, %x", seed, r.trouble, r.trace(), again.trace())
			}
		}
		wrong := r.judge()
		if *oneSeed >= 0 {
			t.Log(r.rulesText)
		}
		if testing.Verbose() {
			t.Logf("seed %d, %v: %+v %x", seed, r.trouble, r.counts, r.trace())
		}
		if len(wrong) > 0 {
			t.Errorf("seed %d, %v: %d wrong:\n\t%s%s", seed, r.trouble, len(wrong), strings.Join(wrong, "\n\t"),
				replay(t, seed))
			if failed++; failed >= *most {
				break
			}
		}
	}
	if *twice {
		t.Logf("%d of %d seeds repeat themselves", repeated, played)
	}
}
