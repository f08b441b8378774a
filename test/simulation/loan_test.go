package simulation

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/checker"
)

// lending is what runs with borrowers have besides. It draws from a source of its own.
type lending struct {
	*run
	rng      *rand.Rand
	policies []*policy
	debtors  []*debtor
	granted  int
	spent    int64
}

// debtor borrows units of keys and spends them. Its clock has a rate of its own.
type debtor struct {
	l     *lending
	boot  uint64
	rate  int64 // error, in parts per billion
	loans map[string]*loan
	last  uint64 // number of a loan
}

// loan is what a debtor knows of one.
type loan struct {
	policy   *policy
	key      *store.Key
	number   uint64
	totals   algo.Totals
	known    int64
	deadline int64 // on its clock
}

func (d *debtor) clock() int64 { return d.l.now + d.l.now/1000*d.rate/1_000_000 }

// newLending adds policies that are lent to a seed's run, and debtors.
func newLending(seed uint64, verbose bool) *lending {
	l := &lending{run: newRun(seed, verbose), rng: rand.New(rand.NewPCG(seed, 9))}
	algorithms := []algo.Algorithm{algo.SlidingLog, algo.TokenBucket, algo.FixedWindow, algo.SlidingWindow}
	for i := range 2 {
		strict := l.voters > 0 && l.rng.IntN(2) == 0
		limit := algo.Limit{Algorithm: algorithms[l.rng.IntN(len(algorithms))], Limit: 64 + l.rng.Int64N(64), Window: time.Duration(1000+l.rng.Int64N(5000)) * time.Millisecond}
		p := newPolicy(fmt.Sprint("lent", i), limit, checker.Escrow+checker.Durability(l.rng.IntN(2)), strict, false, 1, l.partitions)
		p.lent = true
		l.policies = append(l.policies, p)
		l.world.policies = append(l.world.policies, p)
		l.history.Policies = append(l.history.Policies, p.Policy)
	}
	for range 3 {
		d := &debtor{l: l, boot: l.rng.Uint64(), rate: []int64{-999_000, 0, 999_000}[l.rng.IntN(3)], loans: make(map[string]*loan)}
		l.debtors = append(l.debtors, d)
		l.after(l.rng.Int64N(second), d.live)
	}
	return l
}

func (d *debtor) live() {
	l := d.l
	if l.until > 0 && l.now >= l.until {
		return
	}
	l.after(l.rng.Int64N(20*millisecond), d.live)
	if l.until == 0 {
		return
	}
	pol := l.policies[l.rng.IntN(len(l.policies))]
	key := &pol.keys[0]
	of := d.loan(pol, key)
	switch what := l.rng.IntN(100); {
	case what < 60:
		d.spend(of, 1+l.rng.Int64N(6))
	case what < 65 && of.totals.Left() > 0 && d.clock() < of.deadline:
		// At the last moment.
		l.after(max(int64(float64(of.deadline-d.clock())/(1+float64(d.rate)/1e9))-2*millisecond, 0), func() { d.spend(of, 5) })
	case what < 97:
		d.report(of, 16+l.rng.Int64N(30))
	case what < 99:
		d.report(of, 0)
	default:
		d.boot, d.loans = l.rng.Uint64(), make(map[string]*loan)
	}
}

func (d *debtor) loan(pol *policy, key *store.Key) *loan {
	if d.loans[key.Key] == nil {
		d.last++
		d.loans[key.Key] = &loan{policy: pol, key: key, number: d.last}
	}
	return d.loans[key.Key]
}

func (d *debtor) spend(loan *loan, n int64) {
	l := d.l
	if n = min(n, loan.totals.Left()); n <= 0 || d.clock() >= loan.deadline || d.loans[loan.key.Key] != loan {
		return
	}
	loan.totals.Spent += n
	l.spent += n
	o := &op{id: uint64(len(l.ops)), policy: loan.policy, key: loan.key, cost: n, sent: l.now, at: l.now, charged: true, over: true, result: checker.Admitted, node: "a borrower"}
	l.ops = append(l.ops, o)
	l.trace("%x spends %d of %s", d.boot, n, loan.key.Key)
}

// report says how a loan stands to who decides for its key, or one of them.
func (d *debtor) report(loan *loan, want int64) {
	l, sent := d.l, d.clock()
	if sent >= loan.deadline {
		loan.totals.Returned += loan.totals.Left()
	}
	if loan.totals != (algo.Totals{}) && sent >= loan.deadline+int64(algo.LoanTerm) {
		delete(d.loans, loan.key.Key)
		loan = d.loan(loan.policy, loan.key)
	}
	var to []*process
	for _, p := range l.running() {
		if p.core.Route(loan.key.Partition).Standing == ownership.Owned {
			to = append(to, p)
		}
	}
	if len(to) == 0 || l.rng.IntN(10) == 0 {
		return
	}
	p := to[l.rng.IntN(len(to))]
	b := store.Borrow{ID: algo.LoanID{Borrower: d.boot, Number: loan.number}, Totals: loan.totals, Known: loan.known, Want: want}
	back := func(a store.Lent) {
		if l.rng.IntN(10) > 0 {
			l.after(l.rng.Int64N(20*millisecond), func() { d.answered(loan, sent, a) })
		}
	}
	for range 1 + l.rng.IntN(10)/9 {
		l.after(l.rng.Int64N(20*millisecond), func() { p.do(func() { p.lend(loan, b, back) }) })
	}
}

// lend does what a process does with a report.
func (p *process) lend(loan *loan, b store.Borrow, back func(store.Lent)) {
	part := loan.key.Partition
	if p.core.Route(part).Standing != ownership.Owned {
		return
	}
	now := p.host.clock()
	b.Boot = now.Boot
	a, err := p.data.Lend(*loan.key, loan.policy.rule, now.Instant, b)
	if err != nil {
		return
	}
	p.w.mix(uint64(p.w.now), uint64(a.Granted), uint64(a.Spent), a.Ticket)
	p.w.trace("%s lends %+v for %+v", p.self.Name, a, b)
	if a.Ticket <= p.copied[part] {
		back(a)
	} else {
		p.waiting[part] = append(p.waiting[part], waiter{ticket: a.Ticket, lent: func() { back(a) }})
	}
	p.urge(now)
}

func (d *debtor) answered(loan *loan, sent int64, a store.Lent) {
	if d.loans[loan.key.Key] != loan || a.ID.Borrower != d.boot {
		return
	}
	if a.Ended {
		delete(d.loans, loan.key.Key)
		return
	}
	loan.totals.Granted = max(loan.totals.Granted, a.Granted)
	loan.known = max(loan.known, min(a.Spent, loan.totals.Spent))
	if a.Term == 0 {
		loan.totals.Returned += loan.totals.Left()
		return
	}
	d.l.granted++
	loan.deadline = max(loan.deadline, sent+int64(a.Term))
}

// TestLoanSeeds plays seeds with borrowers of keys under escrow and sync, some of them strict. Judged by when borrowers spent, as the
// checker does, nothing is admitted beyond what the faults of a run allow without loans.
func TestLoanSeeds(t *testing.T) {
	from, count := *firstOf, uint64(*allSeeds)/3
	if raceEnabled {
		count /= 10
	}
	if *oneSeed >= 0 {
		from, count = uint64(*oneSeed), 1
	}
	verbose := *oneSeed >= 0 && testing.Verbose()
	granted, spent, failed := 0, int64(0), 0
	for seed := from; seed < from+count && failed < *most; seed++ {
		play := func(verbose bool) *lending {
			l := newLending(seed, verbose)
			l.life()
			return l
		}
		l := play(verbose)
		if verbose {
			for _, line := range l.lines {
				fmt.Println(line)
			}
		}
		if again := play(false); again.hash != l.hash {
			t.Errorf("seed %d: two runs of it differ: %x and %x", seed, l.hash, again.hash)
		}
		granted, spent = granted+l.granted, spent+l.spent
		if vs := l.violations(); len(vs) > 0 {
			failed++
			text := ""
			for _, v := range vs[:min(len(vs), 8)] {
				text += "\n\t" + v.String()
			}
			t.Errorf("seed %d (%v): %d violations:%s\n\tgo test ./test/simulation -run TestLoanSeeds -seed %d -v", seed, l.weather, len(vs), text, seed)
		}
		// What is left when all is over.
		for _, p := range l.running() {
			p.sweepNow()
			for _, pol := range l.policies {
				if key := &pol.keys[0]; slices.Contains(l.running(), p) && p.core.Route(key.Partition).Standing == ownership.Owned {
					if n := p.data.OnLoan(*key, pol.Name); n != 0 {
						t.Errorf("seed %d: %d of %s are on loan long after the load", seed, n, key.Key)
					}
				}
			}
		}
	}
	t.Logf("%d loans granted or renewed, %d units spent", granted, spent)
	if granted == 0 || spent == 0 {
		t.Error("nothing was lent")
	}
}

func (p *process) sweepNow() { p.data.Sweep(p.host.clock().Instant, 1) }
