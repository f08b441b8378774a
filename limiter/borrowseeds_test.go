package limiter

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"hash/fnv"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/expect"
)

var (
	borrowSeeds = flag.Uint64("borrowseeds", 40, "how many seeds TestBorrowSeeds runs")
	borrowFirst = flag.Uint64("borrowfirst", 0, "the first of them")
)

// trouble is what happens to the nodes of a borrowRun. In all but the calm one messages about loans are late, lost, repeated and overtake each other.
type trouble int

const (
	calm trouble = iota
	losing
	moving     // the key moves
	suspending // machines are suspended: they do nothing, and their monotonic clocks stand still
	killing    // a node that borrows is killed, and another one takes its place
	crashing   // the holder is killed, and starts again with nothing
	everything // but crashes
	troubles
)

// borrowLimits are with their bounds: each limit by itself.
var borrowLimits = []struct {
	text   string
	bounds []bound
}{
	{"algorithm: sliding_log, limit: 1500, window: 1s", []bound{{1500, 0, time.Second}}},
	{"algorithm: sliding_window, limit: 3000, window: 2s", []bound{{3000, 0, 2 * time.Second}}},
	{"algorithm: token_bucket, limit: 1500, window: 1s, capacity: 500", []bound{{500, 1500, 0}}},
	{"algorithm: fixed_window, limit: 1500, window: 1s", []bound{{3000, 0, time.Second}}}, // across the turn of a window
	{"algorithm: sliding_counter, limit: 1500, window: 1s", []bound{{3000, 0, time.Second}}},
	{"algorithm: sliding_log, limits: [800/500ms, 2400/2s]", []bound{{800, 0, 500 * time.Millisecond}, {2400, 0, 2 * time.Second}}},
	{"limits: [{algorithm: token_bucket, limit: 1500, window: 1s, capacity: 400}, {algorithm: sliding_log, limit: 2500, window: 2s}]", []bound{{400, 1500, 0}, {2500, 0, 2 * time.Second}}},
}

// bound is at most so many units in a window, or in any time t as many and rate units for each second of t.
type bound struct {
	most   int64
	rate   int64
	window time.Duration
}

// borrowRun is nodes that borrow units of one key from each other, all with their goroutines in virtual time. What messages suffer follows from
// the seed, the instant and what they say.
type borrowRun struct {
	t       *testing.T
	seed    uint64
	trouble trouble
	text    string
	bounds  []bound
	began   time.Time
	key     string
	part    int
	over    int64

	carrying sync.WaitGroup // messages

	mu       sync.Mutex
	limiters []*Limiter // that ever were
	borrowed int        // checks that were admitted at once by who does not hold the key
	nodes    []*borrowNode
	boots    uint64
	holder   int
	asked    []answered
	crashes  []int64
}

// answered is a check that was admitted or refused, at some instant between two.
type answered struct {
	sent, came int64
	n          int64 // units that were admitted
	cost       int64
	allowed    bool
}

// borrowNode is a node; it implements Ownership.
type borrowNode struct {
	r    *borrowRun
	i    int
	rate int64 // by which its clock is off, in thousandths

	// Guarded by r.mu.
	l      *Limiter
	self   ownership.Node
	sees   int           // whom it takes for the holder
	slept  int64         // by how much its monotonic clock is behind
	asleep chan struct{} // closed when it is awake again; nil: it is
	since  int64
}

func (r *borrowRun) now() int64 { return int64(time.Since(r.began)) }

// draw is a number below n.
func (r *borrowRun) draw(n int64, of ...any) int64 {
	h := fnv.New64a()
	fmt.Fprint(h, r.seed, r.now(), of)
	return int64(h.Sum64()>>11) % n
}

func (n *borrowNode) scaled() int64 {
	now := n.r.now()
	return int64(n.i+1)*int64(time.Hour) + now + now/1000*n.rate
}

// wait returns when the node is awake.
func (n *borrowNode) wait() {
	for {
		n.r.mu.Lock()
		asleep := n.asleep
		n.r.mu.Unlock()
		if asleep == nil {
			return
		}
		<-asleep
	}
}

// start starts a process with nothing, in place of the one before.
func (n *borrowNode) start() {
	r := n.r
	r.mu.Lock()
	r.boots++
	self := ownership.Node{Name: fmt.Sprintf("n%d", n.i), Boot: r.boots}
	r.mu.Unlock()
	l := New(Config{
		Store: NewStore(store.Config{}, false), Ownership: n, Peers: process{n, self}, Self: self, HashKey: testKey, Timeout: 300 * time.Millisecond,
		Policies: policies(r.t, "policies: [{name: p, on_error: closed, "+r.text+"}]"),
		Clock: func() algo.Instant {
			r.mu.Lock()
			defer r.mu.Unlock()
			slept := n.slept
			if n.asleep != nil {
				slept += r.now() - n.since
			}
			return algo.Instant{Mono: n.scaled() - slept, Wall: 1_800_000_000e9 + r.now()}
		},
		BootClock: func() int64 {
			n.wait() // whoever reads it goes on when the machine does
			return n.scaled()
		},
		Random: func() uint32 { return uint32(r.draw(1<<32, "sample", n.i)) },
		Member: func(boot uint64) (ownership.Node, bool) {
			r.mu.Lock()
			defer r.mu.Unlock()
			for _, q := range r.nodes {
				if q.self.Boot == boot {
					return q.self, true
				}
			}
			return ownership.Node{}, false
		},
	})
	l.store.Open(r.part)
	r.mu.Lock()
	defer r.mu.Unlock()
	n.l, n.self = l, self
	r.limiters = append(r.limiters, l)
}

// Route implements Ownership.
func (n *borrowNode) Route(p int) *ownership.Route {
	n.r.mu.Lock()
	defer n.r.mu.Unlock()
	switch {
	case p != n.r.part || n.sees == n.i:
		return &ownership.Route{Standing: ownership.Owned}
	default:
		return &ownership.Route{Standing: ownership.Elsewhere, Node: n.r.nodes[n.sees].self}
	}
}

// Await implements Ownership.
func (n *borrowNode) Await(ctx context.Context, p int, old *ownership.Route) *ownership.Route {
	for *n.Route(p) == *old && ctx.Err() == nil {
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
		}
	}
	return n.Route(p)
}

// AwaitProgress implements Ownership.
func (n *borrowNode) AwaitProgress(context.Context, int, uint64, bool) (degraded, ok bool) {
	return true, true
}

// process is one of those that a node is, one after another; it implements Peers.
type process struct {
	*borrowNode
	self ownership.Node
}

// killed reports whether there is another process in its place.
func (n process) killed() bool {
	n.r.mu.Lock()
	defer n.r.mu.Unlock()
	return n.borrowNode.self != n.self
}

// Forward implements Peers.
func (n process) Forward(ctx context.Context, to ownership.Node, ops []*Op) {
	r, from := n.r, n.self
	if n.killed() {
		for _, op := range ops {
			op.Outcome = Outcome{Unreachable: true}
		}
		return
	}
	of, kind, loan := []any{from, to, ops[0].Kind}, ops[0].Kind, ops[0].Extra != nil && ops[0].Loan != nil
	for _, op := range ops {
		if of = append(of, op.Cost); op.Extra != nil && op.Loan != nil {
			of = append(of, op.Loan.Report.ID.Number, op.Loan.Report.Totals)
		}
	}
	draw := func(most int64, what string) int64 { return r.draw(most, append(of, what)...) }
	late := func(what string) time.Duration {
		if r.trouble != calm && loan {
			switch draw(20, what+" how late") {
			case 0, 1, 2:
				return time.Duration(draw(int64(60*time.Millisecond), what))
			case 3:
				return time.Duration(draw(int64(600*time.Millisecond), what))
			}
		}
		return time.Duration(draw(int64(3*time.Millisecond), what))
	}
	// arrive has the receiver carry out operations, once, and returns these with their outcomes; nil if nobody hears of them.
	arrive := func(there []*Op, what string) []*Op {
		time.Sleep(late(what + " there"))
		var q *borrowNode
		var l *Limiter // a process that is killed meanwhile takes in what nobody hears of
		r.mu.Lock()
		for _, node := range r.nodes {
			if node.self == to {
				q, l = node, node.l
			}
		}
		r.mu.Unlock()
		if q == nil {
			for _, op := range there {
				op.Outcome.Unreachable = true
			}
			return there
		}
		q.wait()
		if rest := l.Receive(there); rest != nil {
			within, cancel := context.WithTimeout(r.t.Context(), 300*time.Millisecond)
			rest(within)
			cancel()
		}
		q.wait()
		time.Sleep(late(what + " back"))
		return there
	}
	faulty := r.trouble != calm && (loan || draw(20, "check") == 0)
	if faulty && kind == OpBorrow && draw(8, "again") == 0 {
		again := time.Duration(draw(int64(300*time.Millisecond), "later"))
		copied := sent(from, ops)
		r.carrying.Go(func() {
			time.Sleep(again)
			arrive(copied, "again")
		})
	}
	back := make(chan []*Op, 1)
	if !faulty || draw(10, "lost") != 0 {
		lost, copied := faulty && draw(10, "answer lost") == 0, sent(from, ops)
		r.carrying.Go(func() {
			if there := arrive(copied, ""); !lost {
				back <- there
			}
		})
	}
	select {
	case there := <-back:
		bringBack(ops, there)
	case <-ctx.Done():
		for _, op := range ops {
			op.Outcome = Outcome{Unreachable: true}
		}
	}
	n.wait()
}

// sleep suspends the machine.
func (n *borrowNode) sleep(d time.Duration) {
	n.r.mu.Lock()
	defer n.r.mu.Unlock()
	if n.asleep != nil {
		return
	}
	n.asleep, n.since = make(chan struct{}), n.r.now()
	n.r.carrying.Go(func() {
		time.Sleep(d)
		n.r.mu.Lock()
		defer n.r.mu.Unlock()
		n.slept += n.r.now() - n.since
		close(n.asleep)
		n.asleep = nil
	})
}

// call asks a node all the time.
func (n *borrowNode) call(caller int) {
	r := n.r
	waiting := 0 // callers, when the machine goes on
	for k := 0; r.now() < r.over; k++ {
		// At times more is asked for than there is, and at times less.
		gap := int64(16_000_000)
		if r.hot(r.now() / int64(250*time.Millisecond)) {
			gap /= 8
		}
		if waiting--; waiting < 0 {
			time.Sleep(time.Duration(50_000 + r.draw(gap, n.i, caller, k)))
		}
		if before := r.now(); waiting < 0 {
			if n.wait(); r.now() > before {
				waiting = 30
			}
		}
		r.mu.Lock()
		l, self := n.l, n.self
		r.mu.Unlock()
		c := named("p", r.key, 1+r.draw(2, n.i, caller, "cost"))
		if c.Partial = r.draw(20, n.i, caller, "partial") == 0; c.Partial {
			c.Cost = 1 + r.draw(20, n.i, caller, "most")
		}
		sent := r.now()
		got, err := l.Check(r.t.Context(), []limit.Check{c})
		n.wait() // whoever is suspended has not heard the answer
		r.mu.Lock()
		switch d := &got[0].Decision; {
		case err != nil || got[0].Err != nil:
			r.t.Errorf("%v, %+v", err, got)
		case d.FailedClosed || n.self != self: // or it was killed, and its answer is nobody's
		default:
			r.asked = append(r.asked, answered{sent, r.now(), d.Granted, c.Cost, d.Allowed})
			if d.Allowed && r.now() == sent && n.sees != n.i {
				r.borrowed++
			}
		}
		r.mu.Unlock()
	}
}

// hot says whether more is asked in a quarter of a second.
func (r *borrowRun) hot(slice int64) bool {
	r.mu.Lock()
	for _, n := range r.nodes {
		if n.asleep != nil {
			r.mu.Unlock()
			return true
		}
	}
	r.mu.Unlock()
	h := fnv.New64a()
	fmt.Fprint(h, r.seed, "hot", slice)
	return h.Sum64()>>20%4 == 0
}

// suffer has the nodes suffer what the run is about.
func (r *borrowRun) suffer() {
	for k := 0; ; k++ {
		time.Sleep(time.Duration(100_000_000 + r.draw(500_000_000, "pause")))
		if r.now() >= r.over {
			return
		}
		what := r.trouble
		if what == everything {
			what = []trouble{moving, suspending, killing}[r.draw(3, "what")]
		}
		r.mu.Lock()
		holder := r.holder
		r.mu.Unlock()
		other := (holder + 1 + int(r.draw(2, "who"))) % len(r.nodes)
		switch what {
		case moving:
			r.move(holder, other)
		case suspending:
			r.nodes[(holder+int(r.draw(3, "who sleeps")))%len(r.nodes)].sleep(time.Duration(1_000_000 + r.draw(2_500_000_000, "how long")))
		case killing:
			r.nodes[other].start()
		case crashing:
			r.mu.Lock()
			r.crashes = append(r.crashes, r.now())
			r.mu.Unlock()
			r.nodes[holder].start()
		}
	}
}

// move moves the key as planned. The two nodes know of it at once, the third one later.
func (r *borrowRun) move(from, to int) {
	a, b := r.nodes[from], r.nodes[to]
	r.mu.Lock()
	idle := a.asleep == nil && b.asleep == nil
	r.mu.Unlock()
	if !idle {
		return
	}
	move(r.t, a.l, b.l, r.part)
	r.mu.Lock()
	r.holder = to
	a.sees, b.sees = to, to
	r.mu.Unlock()
	a.l.store.Detach(r.part, ownership.Target)
	a.l.store.Discard(r.part)
	third := r.nodes[3-from-to]
	r.carrying.Go(func() {
		time.Sleep(time.Duration(r.draw(int64(80*time.Millisecond), "who has not heard")))
		r.mu.Lock()
		defer r.mu.Unlock()
		third.sees = r.holder
	})
}

// judge compares what was admitted, at the instants at which it was, with the bounds. A check that another node decided was at some instant between
// when it was sent and answered; counted is what was so for certain.
func (r *borrowRun) judge() error {
	admitted := slices.DeleteFunc(slices.Clone(r.asked), func(a answered) bool { return !a.allowed })
	slices.SortFunc(admitted, func(a, b answered) int { return int(a.came - b.came) })
	for _, b := range r.bounds {
		reach := int64(4 * time.Second)
		if b.window > 0 {
			reach = int64(b.window) / 1000 * 998 // clocks are off by so much
		}
		for i := range admitted {
			from := admitted[i].sent
			var sum int64
			for _, a := range admitted[max(0, i-200):] {
				if a.came-from >= reach {
					break
				}
				if a.sent < from {
					continue
				}
				sum += a.n
				most := b.most
				if b.rate > 0 {
					most += 1 + b.rate*(a.came-from)/998/1_000_000
				}
				for _, at := range r.crashes {
					// What was counted is lost; and what was on loan is spent for a term more, of which the holder learns later.
					if a.came >= at && from <= at+int64(algo.LoanTerm) {
						most += b.most
					}
				}
				if sum > most {
					return fmt.Errorf("%d were admitted from %v to %v, at most %d may be", sum, time.Duration(from), time.Duration(a.came), most)
				}
			}
		}
	}
	return nil
}

// needless finds a refusal although there was room for certain: of all that may have counted, and what is dated late by a term at most.
func (r *borrowRun) needless() error {
	b := r.bounds[0]
	slices.SortFunc(r.asked, func(a, b answered) int { return int(a.came - b.came) })
	for i, refused := range r.asked {
		if refused.allowed && refused.n == refused.cost || refused.cost > 2 {
			continue
		}
		var used int64
		for _, a := range r.asked[max(0, i-200):] {
			if a.sent < refused.came && a.came > refused.sent {
				used += a.n
			}
		}
		for _, a := range r.asked[:i] {
			if a.came <= refused.sent && a.came > refused.sent-int64(b.window)-int64(b.window/8) {
				used += a.n
			}
		}
		if used+refused.cost <= b.most {
			return fmt.Errorf("%d were refused at %v with %d of %d in use", refused.cost, time.Duration(refused.came), used, b.most)
		}
	}
	return nil
}

// play runs a seed, and returns what says all of what happened.
func playBorrowing(t *testing.T, seed uint64) (summary string, borrowed int) {
	synctest.Test(t, func(t *testing.T) {
		of := borrowLimits[seed/uint64(troubles)%uint64(len(borrowLimits))]
		if trouble(seed%uint64(troubles)) == calm && seed/uint64(troubles)%2 == 0 {
			of = borrowLimits[0] // of which refusals are judged
		}
		r := &borrowRun{t: t, seed: seed, trouble: trouble(seed % uint64(troubles)), text: of.text, bounds: of.bounds, began: time.Now(), key: "k", over: int64(4 * time.Second)}
		r.part = ring.Partition(ring.Hash(testKey, "p", r.key))
		for i := range 3 {
			n := &borrowNode{r: r, i: i}
			if r.trouble != calm {
				n.rate = int64(i) - 1
			}
			r.nodes = append(r.nodes, n)
		}
		for _, n := range r.nodes {
			n.start()
		}
		var calling sync.WaitGroup
		for _, n := range r.nodes {
			for caller := range 2 {
				calling.Go(func() { n.call(caller) })
			}
		}
		calling.Go(r.suffer)
		calling.Wait()
		time.Sleep(2 * time.Second) // for what is late
		for _, l := range r.limiters {
			l.Close()
		}
		r.carrying.Wait()
		err := r.judge()
		if err == nil && r.trouble == calm && of.text == borrowLimits[0].text {
			err = r.needless()
		}
		expect.True(t, err == nil,
			"seed %d, %d, %s: %v\n\tgo test ./limiter -run '^TestBorrowSeeds$' -borrowfirst %d -borrowseeds 1 -v", seed, r.trouble, r.text, err, seed)
		slices.SortFunc(r.asked, func(a, b answered) int { // those of one instant in any order
			return cmp.Or(cmp.Compare(a.sent, b.sent), cmp.Compare(a.came, b.came), cmp.Compare(a.n, b.n), cmp.Compare(a.cost, b.cost))
		})
		h := fnv.New64a()
		fmt.Fprint(h, r.asked)
		var units int64
		for _, a := range r.asked {
			units += a.n
		}
		borrowed = r.borrowed
		summary = fmt.Sprintf("%d checks, %d units, %x", len(r.asked), units, h.Sum64())
	})
	return summary, borrowed
}

// TestBorrowSeeds has nodes borrow from each other in every trouble: no window has more than the limit by when checks were admitted, whatever becomes
// of messages, holders and borrowers; and when all is well nothing is refused that there is room for.
func TestBorrowSeeds(t *testing.T) {
	all := 0
	for seed := *borrowFirst; seed < *borrowFirst+*borrowSeeds && !t.Failed(); seed++ {
		got, borrowed := playBorrowing(t, seed)
		all += borrowed
		if testing.Verbose() {
			t.Logf("seed %d: %s, %d from loans", seed, got, borrowed)
		}
	}
	if uint64(all) < 100**borrowSeeds && !t.Failed() {
		t.Errorf("%d checks were admitted from loans in %d seeds", all, *borrowSeeds)
	}
}
