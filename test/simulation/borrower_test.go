package simulation

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/fifo"
	"github.com/weirlimit/weir/internal/lend"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/checker"
)

// maxHaste is how many checks of a key that is lent somebody makes one after another, with mostHaste between two at
// most.
const (
	maxHaste  = 200
	mostHaste = 5 * time.Millisecond
)

// lend adds policies that are lent to a run, and to their text. Of each one key is, with the policy's name. What a run
// draws otherwise stays what it is.
func (r *callRun) lend(text *strings.Builder) {
	rng := rand.New(rand.NewPCG(r.seed, 4))
	r.lends = true
	r.jitter = min(r.jitter, 10*time.Millisecond) // who is asked for what is left can answer within recallMost
	algorithms := []algo.Algorithm{algo.SlidingLog, algo.SlidingLog, algo.TokenBucket, algo.FixedWindow,
		algo.SlidingWindow}
	for i := range 2 {
		a := algorithms[rng.IntN(len(algorithms))]
		window := time.Duration(1000+rng.Int64N(3000)) * time.Millisecond
		rule := &callRule{
			name: fmt.Sprintf("lent%d", i), onError: []string{"open", "closed", "share"}[rng.IntN(3)], algorithm: a,
			limit: 80 + rng.Int64N(200), lent: true,
		}
		d, strict := []checker.Durability{checker.Async, checker.Escrow, checker.Sync}[rng.IntN(3)], false
		if r.voters != nil && i == 1 {
			rule.onError, d, strict = "closed", checker.Sync, true
		}
		r.add(text, rule, d, strict, window)
		p := &rule.checked
		p.Lent = algo.LoanTerm + algo.LoanTerm/500
		// What was spent counts from when its owner hears of it, or from the end of the loan.
		p.Coarse += window/8 + window/8/100 + 2*(r.delay+r.jitter)
		r.lent = append(r.lent, rule)
		r.history.Policies = append(r.history.Policies, *p)
	}
}

// borrower is a client that borrows, as package client does: a book, and a way to each node. When it crashes another
// takes its place.
type borrower struct {
	r       *callRun
	name    string
	near    string // the node whose ways to others are cut with the borrower's; or its own name
	id      uint64
	rate    int64                              // by which its clock is off, in parts per billion
	book    *lend.Book[string, ownership.Node] // by policy
	kick    fifo.Signal
	ctx     context.Context // ends with it
	end     context.CancelFunc
	running sync.WaitGroup

	mu    sync.Mutex
	links map[*node]func() // to end them
}

func (r *callRun) newBorrower(name string) *borrower {
	b := &borrower{r: r, name: name, kick: fifo.NewSignal(), links: make(map[*node]func())}
	b.id = uint64(r.draw(1<<60, name, "id")) | 1<<60
	b.near = []string{name, "a", "b", "c"}[r.draw(4, name, "near")]
	if r.rates > 0 {
		b.rate = r.draw(2*r.rates+1, name, "rate") - r.rates
	}
	b.book = lend.NewBook[string, ownership.Node](b.kick.Set,
		func() uint32 { return uint32(r.draw(1<<32, name, "sample")) })
	b.ctx, b.end = context.WithCancel(context.Background())
	b.running.Go(func() { b.book.Run(b.ctx, b.kick, b.clock, b.report) })
	return b
}

// crash ends a borrower, and all it knows.
func (b *borrower) crash() {
	b.end()
	b.running.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, end := range b.links {
		end()
	}
	clear(b.links)
}

func (b *borrower) clock() int64 {
	t := b.r.now()
	return int64(3*time.Hour) + t + t/second*b.rate + t%second*b.rate/second
}

// ask asks about a key, be it the borrower itself or a node.
func (b *borrower) ask(rng *rand.Rand, rule *callRule, cost int64) {
	at := b.r.now()
	take := func() bool {
		_, _, ok := b.book.Take(rule.name, cost, b.clock)
		if ok && b.ctx.Err() == nil {
			at = b.r.now()
			b.r.spends(b.id, rule, cost)
			b.r.borrowed(b.name, rule, cost, at)
		}
		return ok
	}
	if take() {
		return
	}
	if coming := b.book.Pending(rule.name, cost, b.clock()); coming != nil {
		select {
		case <-coming:
		case <-time.After(lend.Patience):
		}
		if take() {
			return
		}
	}
	if d := b.r.ask(b.r.any(rng), rule, rule.name, cost); lend.Lendable(&d) && b.ctx.Err() == nil {
		b.book.Missed(rule.name, cost, b.clock, nil)
	}
}

// spends holds what a borrower has just spent to being on loan to it as far as who decides for the key knows, unless
// that may have been lost in a crash, or another side decides.
func (r *callRun) spends(borrower uint64, rule *callRule, cost int64) {
	if r.forgot() {
		return
	}
	k := lentKey(rule.name)
	for _, n := range r.processes() {
		if !n.decides(k) {
			continue
		}
		now := n.clock()
		_, loans := n.store.Lending(k, rule.name, now)
		if !slices.ContainsFunc(loans, func(l algo.Loan) bool {
			return l.ID.Borrower == borrower && !l.Ended && l.Until > now.Mono && l.Left() >= cost
		}) {
			r.fail("%s: %x spends %d of %s, of which %s knows %+v at %d", spentLate, borrower, cost, rule.name,
				n.self.Name, loans, now.Mono)
		}
	}
}

// forgot says whether there has been a crash or a cut, after which who decides may not know of a loan.
func (r *callRun) forgot() bool {
	r.recording.Lock()
	defer r.recording.Unlock()
	return len(r.history.Crashes)+len(r.history.Splits) > 0
}

// processes are those that run.
func (c *nodes) processes() []*node {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.running)
}

// borrowed records what a borrower has admitted.
func (r *callRun) borrowed(by string, rule *callRule, cost, at int64) {
	r.recording.Lock()
	defer r.recording.Unlock()
	if *oneSeed >= 0 {
		r.t.Logf("%v: %s admits %d of %s", time.Duration(at), by, cost, rule.name)
	}
	r.counts.admitted++
	r.counts.borrowed++
	r.operations = append(r.operations, operation{Operation: checker.Operation{
		Policy: rule.name, Key: rule.name, Cost: cost, Sent: at, Answered: at, Result: checker.Admitted, Borrowed: true,
	}})
}

// report sends reports to who decides for their keys, but at times to anybody: those for one node together.
func (b *borrower) report(sent int64, reports []lend.Report[string, ownership.Node]) {
	by := make(map[ownership.Node][]limit.Borrow)
	var nobody []lend.Answer[ownership.Node]
	for i := range reports {
		rep := &reports[i]
		to := rep.Node
		if to == (ownership.Node{}) {
			to = b.r.holder(rep.Key)
		}
		if b.r.draw(20, b.name, rep.Key, "astray") == 0 {
			to = b.r.any(rand.New(rand.NewPCG(b.id, uint64(sent)))).self
		}
		if to == (ownership.Node{}) {
			nobody = append(nobody, lend.Answer[ownership.Node]{Number: rep.Number, Lent: limit.Lent{Unheard: true}})
			continue
		}
		by[to] = append(by[to], limit.Borrow{
			Target: limit.Target{Policy: rep.Key, Key: rep.Key}, ID: algo.LoanID{Borrower: b.id, Number: rep.Number},
			Totals: rep.Totals, Known: rep.Known, Want: rep.Want,
		})
	}
	if nobody != nil {
		b.book.Answered(sent, sent, nobody)
	}
	for _, to := range slices.SortedFunc(maps.Keys(by),
		func(m, n ownership.Node) int { return strings.Compare(m.Name, n.Name) }) {
		go b.carry(to, sent, by[to])
	}
}

// holder is the process that decides for the key of a policy; the zero value: none does.
func (r *callRun) holder(policy string) ownership.Node {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, n := range r.running {
		if n.decides(lentKey(policy)) {
			return n.self
		}
	}
	return ownership.Node{}
}

// lentKey is the key of a policy of which units are lent.
func lentKey(policy string) store.Key {
	hash := ring.Hash(ring.HashKey{}, policy, policy)
	return store.Key{Hash: hash, Partition: ring.Partition(hash), Key: policy}
}

func (n *node) decides(k store.Key) bool {
	return n.runner.Route(k.Partition).Standing == ownership.Owned
}

// carry takes reports to a process, and its answers back.
func (b *borrower) carry(to ownership.Node, sent int64, in []limit.Borrow) {
	r := b.r
	r.travel(b.name, to.Name, "report")
	if r.lost(b.near, to.Name, "report", b.name) {
		return
	}
	q := r.named(to.Name)
	if q == nil || q.self != to {
		r.travel(to.Name, b.name, "closed")
		b.book.Lost(to, b.clock())
		return
	}
	b.link(q)
	out := make([]limit.Lent, len(in))
	wait, err := q.limiter.Lend(q.ctx, in, out)
	if err != nil {
		r.fail("%s lends to %s: %v", to.Name, b.name, err)
		return
	}
	if wait != nil {
		wait()
	}
	lost := q.ctx.Err() != nil || r.lost(to.Name, b.near, "loans", b.name)
	r.travel(to.Name, b.name, "loans")
	if lost || b.ctx.Err() != nil {
		return
	}
	answers := make([]lend.Answer[ownership.Node], len(in))
	for i := range in {
		answers[i] = lend.Answer[ownership.Node]{Number: in[i].ID.Number, Lent: out[i], From: to}
		var holder ownership.Node
		if h := r.named(out[i].Holder); h != nil {
			holder = h.self
		}
		if out[i].Unheard {
			answers[i].To = holder
		} else if out[i].Holder != "" {
			answers[i].From = holder
		}
	}
	b.book.Answered(sent, b.clock(), answers)
}

// link says to a process how to ask for what is left, unless it knows.
func (b *borrower) link(q *node) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.links[q] != nil || b.ctx.Err() != nil {
		return
	}
	b.links[q] = q.limiter.OpenBorrower(b.id, func(of limit.Recall) {
		go func() {
			lost := b.r.lost(q.self.Name, b.near, "recall", b.name)
			b.r.travel(q.self.Name, b.name, "recall")
			if !lost && b.ctx.Err() == nil {
				b.book.Recalled(of.Number, of.Granted, b.clock())
			}
		}()
	})
}

// borrow has a client borrow until the time is over, and crash at times unless all is to be well.
func (r *callRun) borrow(i int) {
	name := string(rune('x' + i))
	rng := rand.New(rand.NewPCG(r.seed, 200+uint64(i)))
	r.callers.Go(func() {
		for r.now() < r.until {
			b := r.newBorrower(name)
			until := r.until
			if r.trouble != calmly {
				until = min(until, r.now()+second+rng.Int64N(6*second))
			}
			for r.now() < until {
				b.hurry(rng, until)
			}
			if r.now() >= r.until {
				ctx, cancel := context.WithTimeout(b.ctx, time.Second)
				b.book.Return(ctx)
				cancel()
			}
			b.crash()
		}
	})
}

// hurry asks much about one key, and then nothing for some time.
func (b *borrower) hurry(rng *rand.Rand, until int64) {
	rule := b.r.lent[rng.IntN(len(b.r.lent))]
	for n := rng.IntN(maxHaste); n > 0 && b.r.now() < until; n-- {
		cost := int64(1)
		if rng.IntN(8) == 0 {
			cost += rng.Int64N(4)
		}
		b.ask(rng, rule, cost)
		time.Sleep(time.Duration(rng.Int64N(int64(mostHaste))))
	}
	time.Sleep(time.Duration(rng.Int64N(int64(300 * time.Millisecond))))
}

// haste is one who asks a node much about keys that are lent.
func (r *callRun) haste(rng *rand.Rand) {
	rule, n := r.lent[rng.IntN(len(r.lent))], r.any(rng)
	for k := rng.IntN(maxHaste); k > 0 && n.ctx.Err() == nil && r.named(n.self.Name) == n && r.now() < r.until; k-- {
		cost := int64(1)
		if rng.IntN(8) == 0 {
			cost += rng.Int64N(4)
		}
		r.ask(n, rule, rule.name, cost)
		time.Sleep(time.Duration(rng.Int64N(int64(mostHaste))))
	}
	time.Sleep(time.Duration(rng.Int64N(int64(300 * time.Millisecond))))
}

// watch holds who decides for keys that are lent to having lent no more than there is room for, as long as no crash or
// merge has made it charge what it does not know of.
func (r *callRun) watch() {
	r.callers.Go(func() {
		for r.now() < r.until {
			if r.forgot() {
				return
			}
			for _, n := range r.processes() {
				for _, rule := range r.lent {
					if room, held := n.lending(rule); held > room {
						r.fail("%s: %s: %d of %s are on loan, where there is room for %d", heldBeyond, n.self.Name,
							held, rule.name, room)
					}
				}
			}
			time.Sleep(7 * time.Millisecond)
		}
	})
}

// lending is what a process that decides for the key of a policy has not in use, and what of that is on loan.
func (n *node) lending(rule *callRule) (room, held int64) {
	k := lentKey(rule.name)
	if !n.decides(k) {
		return 0, 0
	}
	room, loans := n.store.Lending(k, rule.name, n.clock())
	for i := range loans {
		if !loans[i].Ended {
			held += loans[i].Left()
		}
	}
	return room, held
}

// returned holds all who decide to holding nothing: the load is over, and so are all loans.
func (r *callRun) returned() {
	for _, n := range r.running {
		n.store.Sweep(n.clock(), 1)
		for _, rule := range r.lent {
			k := lentKey(rule.name)
			if held := n.store.OnLoan(k, rule.name); held != 0 && n.decides(k) {
				r.fail("%s: %d of %s at %s", neverHome, held, rule.name, n.self.Name)
			}
		}
	}
}
