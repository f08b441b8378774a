package simulation

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/cluster/runner"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	policyfile "github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/rpc/replica"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/expect"
)

// nodes is a cluster of whole nodes but for membership and connections: limiter.Limiter, runner.Runner and store.Store
// with all of their goroutines, in a synctest bubble and so in virtual time. Every delay is drawn from the instant and
// the way, and no two messages arrive at one instant: what happens follows from the seed, as far as the goroutines of a
// node do not wake together.
type nodes struct {
	t     *testing.T
	seed  uint64
	began time.Time

	delay, jitter time.Duration
	rates         int64 // the largest error of a clock's rate, in parts per billion
	voters        []string
	set           *policyfile.Set
	most          int  // of nodes, as on_error: share is told
	lends         bool // nodes borrow from each other

	mu      sync.Mutex
	running []*node
	boots   uint64
	tables  map[string]*ring.Table
	loss    float64            // of forwarded checks, and of their answers
	cut     map[[2]string]bool // from whom to whom no checks pass, nor reports of loans
	apart   map[string]bool    // on one side of a cut: nothing passes between it and the other one
	due     map[int64]bool     // instants at which messages arrive
}

// node is one process.
type node struct {
	c            *nodes
	self         ownership.Node
	offset, rate int64
	store        *store.Store
	inbox        *runner.Inbox
	runner       *runner.Runner
	limiter      *limiter.Limiter
	ctx          context.Context // ends with the process
	end          context.CancelFunc

	// Guarded by c.mu.
	state  state
	sees   map[*node]state     // others
	looked int                 // how often the view has changed
	asked  map[string][]*asked // what is under way here, by key
}

// gone is the state of a process that the others do not see any more.
const gone = leaving + 1

// callTimeout is how long a call takes at most.
const callTimeout = 300 * time.Millisecond

// asked is a check under way.
type asked struct {
	at int64 // the last instant at which it may have been charged: it was at a node that may decide it; 0: it never was
}

func (c *nodes) now() int64 { return int64(time.Since(c.began)) }

// draw is a number below n that follows from the seed, this instant and whatever else is given.
func (c *nodes) draw(n int64, of ...string) int64 {
	if n <= 0 {
		return 0
	}
	return int64(hash(fmt.Sprint(c.seed, c.now(), of)) >> 1 % uint64(n))
}

// mono is the node's clock of decisions, and that of leases.
func (n *node) mono() int64 {
	t := n.c.now()
	return n.offset + t + t/second*n.rate + t%second*n.rate/second
}

func (n *node) clock() algo.Instant {
	mono := n.mono()
	return algo.Instant{Mono: mono, Wall: mono}
}

// start starts a process that sees all others, and is seen by them a moment later.
func (c *nodes) start(name string, s state) *node {
	n := &node{c: c, self: ownership.Node{Name: name}, sees: make(map[*node]state), asked: make(map[string][]*asked),
		state: s}
	n.ctx, n.end = context.WithCancel(context.Background())
	c.mu.Lock()
	c.boots++
	n.self.Boot = c.boots
	if c.rates > 0 {
		n.rate = c.draw(2*c.rates+1, name) - c.rates
	}
	n.offset = int64(n.self.Boot)*int64(7*time.Hour) + c.draw(second, name)
	c.mu.Unlock()
	n.inbox = runner.NewInbox(ring.Partitions)
	n.store = limiter.NewStore(store.Config{Urgent: n.inbox.Urgent, Copies: true}, false)
	n.runner = runner.New(runner.Config{
		Core:   ownership.Config{Self: n.self, Partitions: ring.Partitions, Data: n.store, Voters: c.voters},
		Sender: n, Inbox: n.inbox, Now: n.clock, Boot: n.mono, Version: n.store.Version,
		Logger: slog.New(slog.DiscardHandler),
	})
	cfg := limiter.Config{
		Store: n.store, Ownership: n.runner, Peers: n, Clock: n.clock, BootClock: n.mono, Policies: c.set,
		Timeout: callTimeout,
		Members: func() int { return c.most },
	}
	if c.lends {
		cfg.Self, cfg.Member = n.self, n.member
		cfg.Random = func() uint32 { return uint32(c.draw(1<<32, name, "sample")) }
	}
	c.sleep(0) // or the goroutines of both would go on at the same instants
	n.limiter = limiter.New(cfg)
	c.mu.Lock()
	for _, q := range c.running {
		n.sees[q] = q.state
	}
	c.running = append(c.running, n)
	c.mu.Unlock()
	n.look()
	c.tell(n, s, 0)
	return n
}

// member is the process of a boot, as far as this one sees it.
func (n *node) member(boot uint64) (ownership.Node, bool) {
	n.c.mu.Lock()
	defer n.c.mu.Unlock()
	for q := range n.sees {
		if q.self.Boot == boot {
			return q.self, true
		}
	}
	return ownership.Node{}, false
}

// tell has all others see a process in a state, and itself at once.
func (c *nodes) tell(n *node, s state, after time.Duration) {
	c.mu.Lock()
	n.state = s
	others := slices.Clone(c.running)
	c.mu.Unlock()
	for _, q := range others {
		if q == n {
			continue
		}
		go func() {
			c.sleep(after + 20*time.Millisecond +
				time.Duration(c.draw(int64(200*time.Millisecond), q.self.Name, n.self.Name)))
			c.mu.Lock()
			if s == gone {
				delete(q.sees, n)
			} else if !slices.Contains(c.running, n) {
				c.mu.Unlock()
				return // a late word of a process that is gone
			} else {
				q.sees[n] = s
			}
			c.mu.Unlock()
			q.look()
		}()
	}
	if s != gone {
		n.look()
	}
}

// part cuts the network between some processes and the rest, which lose sight of each other 1.5 to 2.5 s later; nil:
// all see each other again after a moment.
func (c *nodes) part(side []string) {
	c.mu.Lock()
	c.apart = make(map[string]bool)
	for _, name := range side {
		c.apart[name] = true
	}
	all := slices.Clone(c.running)
	c.mu.Unlock()
	for _, n := range all {
		for _, q := range all {
			if n == q {
				continue
			}
			go func() {
				after := 20 * time.Millisecond
				if side != nil {
					after = 1500 * time.Millisecond
				}
				c.sleep(after + time.Duration(c.draw(int64(max(after, 200*time.Millisecond))*2/3, n.self.Name,
					q.self.Name)))
				c.mu.Lock()
				_, seen := n.sees[q]
				apart := c.apart[n.self.Name] != c.apart[q.self.Name]
				if apart {
					delete(n.sees, q)
				} else {
					n.sees[q] = q.state
				}
				c.mu.Unlock()
				if seen == apart {
					n.look()
				}
			}()
		}
	}
}

// look makes a view of what a process sees, which settles if nothing changes.
func (n *node) look() {
	c := n.c
	view := func(settled bool) ownership.View {
		v := ownership.View{Settled: settled && n.state == active, Leaving: n.state == leaving}
		v.Members = append(v.Members, ownership.Member{Node: n.self, Active: n.state == active})
		for q, s := range n.sees {
			v.Members = append(v.Members, ownership.Member{Node: q.self, Active: s == active})
		}
		slices.SortFunc(v.Members, func(a, b ownership.Member) int {
			return cmp.Or(strings.Compare(a.Name, b.Name), cmp.Compare(a.Boot, b.Boot))
		})
		var names []string
		at := make(map[string]int32)
		for i, m := range v.Members {
			if m.Active {
				names = append(names, m.Name)
				at[m.Name] = int32(i)
			}
		}
		v.Owners, v.Backups = c.owners(names, at),
			c.owners(slices.DeleteFunc(slices.Clone(names), func(s string) bool { return s == n.self.Name }), at)
		return v
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	n.looked++
	looked := n.looked
	n.runner.SetView(view(false))
	go func() {
		c.sleep(150 * time.Millisecond)
		c.mu.Lock()
		defer c.mu.Unlock()
		if n.looked == looked && n.ctx.Err() == nil {
			n.runner.SetView(view(true))
		}
	}()
}

// owners is a table by indices into a view's members.
func (c *nodes) owners(names []string, at map[string]int32) []int32 {
	of := strings.Join(names, " ")
	t := c.tables[of]
	if t == nil {
		t = ring.Build(names)
		c.tables[of] = t
	}
	owners := make([]int32, ring.Partitions)
	for p := range owners {
		owners[p] = -1
		if i := t.Owner(p); i >= 0 {
			owners[p] = at[t.Members()[i]]
		}
	}
	return owners
}

// close ends a process and all it knows.
func (n *node) close() {
	c := n.c
	c.mu.Lock()
	c.running = slices.DeleteFunc(c.running, func(q *node) bool { return q == n })
	c.mu.Unlock()
	n.end()
	n.runner.Close()
	n.limiter.Close()
}

// leave has a process give away all it holds, and end.
func (n *node) leave() error {
	ctx, cancel := context.WithTimeout(n.ctx, 20*time.Second)
	defer cancel()
	n.limiter.ReturnLoans(ctx)
	n.c.tell(n, leaving, 0)
	err := n.runner.Drain(ctx)
	time.Sleep(2 * callTimeout) // for what is under way
	n.c.tell(n, gone, 0)
	n.close()
	return err
}

// named is the process of a name that runs, and is seen under it.
func (c *nodes) named(name string) *node {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, n := range c.running {
		if n.self.Name == name {
			return n
		}
	}
	return nil
}

// travel waits for as long as a message takes. No two arrive at one instant: which of the goroutines goes first that
// wake at one instant nobody can say.
func (c *nodes) travel(of ...string) {
	c.sleep(c.delay + time.Duration(c.draw(int64(c.jitter)+1, of...)))
}

// sleep waits for at least so long, until an instant that is nobody else's.
func (c *nodes) sleep(d time.Duration) {
	c.mu.Lock()
	now := c.now()
	until := now + int64(d) + 1 + c.draw(1000)
	for c.due[until] {
		until++
	}
	c.due[until] = true
	c.mu.Unlock()
	time.Sleep(time.Duration(until - now))
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.due, until)
}

// lost says whether a message of a check or a loan is.
func (c *nodes) lost(from, to string, of ...string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cut[[2]string{from, to}] || c.apart[from] != c.apart[to] ||
		float64(c.draw(1<<30, append(of, from, to)...)) < c.loss*(1<<30)
}

// Send implements runner.Sender: messages for one process are one frame, which arrives as long as that process runs.
func (n *node) Send(list []ownership.Envelope) {
	c := n.c
	by := make(map[ownership.Node][][]byte)
	for _, e := range list {
		by[e.To] = append(by[e.To], replica.Append(nil, e.Message))
	}
	for to, msgs := range by {
		go func() {
			c.travel(n.self.Name, to.Name, "frame")
			q := c.named(to.Name)
			c.mu.Lock()
			cut := c.apart[n.self.Name] != c.apart[to.Name]
			c.mu.Unlock()
			if q == nil || q.self != to || cut {
				return
			}
			envelopes := make([]ownership.Envelope, len(msgs))
			for i, data := range msgs {
				m, err := replica.Read(data, ring.Partitions)
				expect.NoError(c.t, err, "seed %d: a message that its reader refuses", c.seed)
				envelopes[i] = ownership.Envelope{From: n.self, To: to, Message: m}
			}
			q.inbox.Receive(envelopes)
		}()
	}
}

// Forward implements limiter.Peers. What is lost is not noticed before ctx ends; a process that is gone refuses the
// connection.
func (n *node) Forward(ctx context.Context, to ownership.Node, ops []*limiter.Op) {
	left := time.Duration(0)
	if at, ok := ctx.Deadline(); ok {
		left = time.Until(at)
	}
	there := make([]*limiter.Op, len(ops))
	for i, op := range ops {
		there[i] = limiter.NewOp(op.Kind, *op.Check, limiter.Extra{})
		there[i].Hops, there[i].Left = op.Hops, left
		if op.Extra == nil {
			continue
		}
		*there[i].Extra = limiter.Extra{LeaseID: op.LeaseID, TTL: op.TTL, Exact: op.Exact, Reservation: op.Reservation,
			Atomic: op.Atomic}
		if op.Loan != nil {
			there[i].Loan = &limiter.LoanCall{Report: op.Loan.Report, Recall: op.Loan.Recall,
				Forwarded: op.Loan.Forwarded}
			if !op.Loan.Forwarded {
				there[i].Loan.Report.ID.Borrower = n.self.Boot
			}
		}
	}
	var checks []*asked
	n.c.mu.Lock()
	for _, op := range ops {
		if op.Extra == nil || op.Loan == nil {
			checks = append(checks, n.asked[op.Key]...)
		}
	}
	n.c.mu.Unlock()
	answered := make(chan bool, 1)
	go n.carry(to, there, checks, answered)
	select {
	case ok := <-answered:
		for i, op := range ops {
			op.Outcome = limiter.Outcome{Unreachable: true}
			if out := &there[i].Outcome; ok {
				op.Outcome = limiter.Outcome{Err: out.Err, NotHolder: out.NotHolder, Lease: out.Lease,
					Unreachable: out.Unreachable}
				*op.Decision = *there[i].Decision
				if op.Extra == nil {
					continue
				}
				op.Reply = there[i].Reply
				if op.Loan != nil {
					op.Loan.Known, op.Loan.Lent = there[i].Loan.Known, there[i].Loan.Lent
					if op.Kind == limiter.OpRecall {
						op.Loan.Report = there[i].Loan.Report
					}
				}
			}
		}
	case <-ctx.Done():
		for _, op := range ops {
			op.Outcome = limiter.Outcome{Unreachable: true}
		}
	}
}

// carry takes operations, and with them checks, to a process and their outcomes back.
func (n *node) carry(to ownership.Node, ops []*limiter.Op, checks []*asked, answered chan<- bool) {
	c := n.c
	there := func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, a := range checks {
			a.at = c.now()
		}
	}
	c.travel(n.self.Name, to.Name, "ask", ops[0].Key)
	if c.lost(n.self.Name, to.Name, "ask", ops[0].Key) {
		return
	}
	q := c.named(to.Name)
	if q == nil {
		answered <- false
		return
	}
	if q.self != to {
		for _, op := range ops {
			op.Outcome.NotHolder = &ownership.Route{}
		}
	} else {
		there()
		if rest := q.limiter.Receive(ops); rest != nil {
			rest(q.ctx)
			there()
		}
		if q.ctx.Err() != nil {
			return // it crashed before it could answer
		}
	}
	lose := c.lost(to.Name, n.self.Name, "answer", ops[0].Key)
	c.travel(to.Name, n.self.Name, "answer", ops[0].Key)
	if !lose {
		answered <- true
	}
}

// check asks a process. In the end each of asked says whether its check may have been charged, whatever was answered.
func (n *node) check(checks ...limit.Check) (results []limit.Result, sent, came int64, all []*asked) {
	c := n.c
	here := func() {
		for i, a := range all {
			p := ring.Partition(ring.Hash(ring.HashKey{}, checks[i].Policy, checks[i].Key))
			if n.runner.Route(p).Standing != ownership.Elsewhere {
				a.at = c.now()
			}
		}
	}
	c.mu.Lock()
	for i := range checks {
		a := &asked{}
		all = append(all, a)
		n.asked[checks[i].Key] = append(n.asked[checks[i].Key], a)
	}
	here()
	c.mu.Unlock()
	sent = c.now()
	results, err := n.limiter.Check(context.Background(), checks)
	came = c.now()
	expect.NoError(c.t, err, "seed %d", c.seed)
	c.mu.Lock()
	defer c.mu.Unlock()
	here()
	for i, a := range all {
		key := checks[i].Key
		n.asked[key] = slices.DeleteFunc(n.asked[key], func(b *asked) bool { return a == b })
	}
	return results, sent, came, all
}

// until waits until a condition holds.
func (c *nodes) until(most time.Duration, cond func() bool) bool {
	for end := c.now() + int64(most); c.now() < end; {
		if cond() {
			return true
		}
		time.Sleep(20 * time.Millisecond)
	}
	return cond()
}

// quiet says that every partition is held once, where it should be, and has a copy elsewhere.
func (c *nodes) quiet() bool {
	running := c.processes()
	held := 0
	for _, n := range running {
		if !n.runner.Settled() {
			return false
		}
		st, ok := n.runner.Status()
		if !ok || st.Degraded > 0 && len(running) > 1 || st.Moving+st.Arriving+st.Awaited > 0 ||
			len(c.voters) > 0 && st.Granted < st.Held {
			return false
		}
		held += st.Held
	}
	return held == ring.Partitions
}
