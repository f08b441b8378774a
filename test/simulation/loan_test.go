package simulation

import (
	"fmt"
	"math/rand/v2"
	"slices"
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
	pause    int64 // between what a debtor does and the next, at most

	spent int64
	full  bool // strict keys have started full
}

// lender is what a process keeps of those that borrow from it. It stands for what limiter keeps.
type lender struct {
	known  map[uint64]bool // who has said anything to it, and so can be asked, by boot
	rounds map[string]*round
	silent map[algo.LoanID]int64 // until which true time
	told   map[told]algo.Loan
}

// round is one asking for what is on loan of a key.
type round struct {
	asked   map[algo.LoanID]bool // and have not answered
	unasked map[algo.LoanID]bool // of borrowers that were silent or unknown when it began
	waiting []*ask
}

// told names what was last heard of a loan under one term of its key's partition.
type told struct {
	key  string
	id   algo.LoanID
	term ownership.Term
}

const (
	recallMost = 50 * millisecond // what is asked for is waited for
	silentFor  = int64(algo.LoanTerm)
)

// debtor borrows units of keys and spends them. Its clock has a rate of its own.
type debtor struct {
	l    *lending
	boot uint64
	rate int64 // error, in parts per billion
	near *host // that is always on the same side of a cut; nil: the debtor reaches both sides
	lazy bool  // it reports only when its loan is used up or nearly over
	// hoards is a policy of which the debtor spends all that it was lent at the last moment, beside who has lent it;
	// nil: it does not.
	hoards *policy
	loans  map[string]*loan
	last   uint64 // number of a loan
}

// sends reports whether what the debtor sends now arrives at a host.
func (d *debtor) sends(to *host) bool { return d.near == nil || !d.l.link(d.near, to).cut }

// hears reports whether what a host sends now arrives at the debtor.
func (d *debtor) hears(from *host) bool { return d.near == nil || !d.l.link(from, d.near).cut }

// loan is what a debtor knows of one.
type loan struct {
	policy   *policy
	key      *store.Key
	number   uint64
	totals   algo.Totals
	known    int64
	deadline int64 // on its clock
	term     int64 // the last that it was given
}

func (d *debtor) clock() int64 { return d.l.now + d.l.now/1000*d.rate/1_000_000 }

// lend adds policies that are lent to a run, and debtors, who do something within every pause.
func (r *run) lend(pause int64) {
	l := &lending{run: r, rng: rand.New(rand.NewPCG(r.seed, 9)), pause: pause}
	r.lending = l
	algorithms := []algo.Algorithm{algo.SlidingLog, algo.TokenBucket, algo.FixedWindow, algo.SlidingWindow}
	for i := range 2 {
		strict := l.voters > 0 && l.rng.IntN(2) == 0
		limit := algo.Limit{Algorithm: algorithms[l.rng.IntN(len(algorithms))], Limit: 64 + l.rng.Int64N(64),
			Window: time.Duration(1000+l.rng.Int64N(5000)) * time.Millisecond}
		hoarded := strict && l.rng.IntN(2) == 0 && slices.Contains([]weather{cutting, oneWay, stormy}, r.weather)
		if hoarded {
			// Cuts last until the grants of one side have ended, and the other one has begun and has room again. Less
			// is asked for than there is, so that units are on loan when a cut begins.
			r.climate.cut, r.climate.lasts = [2]int64{11 * second, 18 * second}, 40*second
			l.pause, r.climate.between = 10*pause, max(r.climate.between, 20*millisecond)
			limit.Algorithm, limit.Limit, limit.Window = algo.SlidingLog, 4*limit.Limit, limit.Window/3+4*time.Second
		}
		p := newPolicy(fmt.Sprint("lent", i), limit, checker.Escrow+checker.Durability(l.rng.IntN(2)), strict, false, 1,
			l.partitions)
		p.lent, p.Lent = true, algo.LoanTerm+algo.LoanTerm/1000 // of a clock that is slow
		l.policies = append(l.policies, p)
		l.world.policies = append(l.world.policies, p)
		l.history.Policies = append(l.history.Policies, p.Policy)
		for n := 0; hoarded && n < 4; n++ {
			l.debtors = append(l.debtors,
				&debtor{l: l, boot: l.rng.Uint64(), rate: -999_000, hoards: p, loans: make(map[string]*loan)})
		}
	}
	for range 3 {
		d := &debtor{l: l, boot: l.rng.Uint64(), rate: []int64{-999_000, 0, 999_000}[l.rng.IntN(3)],
			loans: make(map[string]*loan)}
		if l.rng.IntN(4) > 0 {
			d.near = l.hosts[l.rng.IntN(len(l.hosts))]
		}
		d.lazy = l.rng.IntN(2) == 0
		l.debtors = append(l.debtors, d)
	}
	for _, d := range l.debtors {
		l.after(l.rng.Int64N(second), d.live)
	}
}

// strictHosts are, in most cuts of a run that lends units of a strict key, the hosts of its owner and its copy, where
// the others have a majority of the voters: none of these knows what was lent.
func (l *lending) strictHosts() (cut []*host) {
	if l == nil || l.rng.IntN(4) == 0 {
		return nil
	}
	at := slices.IndexFunc(l.policies, func(p *policy) bool { return p.Strict })
	if at < 0 {
		return nil
	}
	part := l.policies[at].keys[0].Partition
	others := l.voters
	for _, p := range l.running() {
		if p.owns(part) || p.data.parts[part].there {
			cut = append(cut, p.host)
			if p.host.index < l.voters {
				others--
			}
		}
	}
	if len(cut) == len(l.hosts) || others <= l.voters/2 {
		return nil
	}
	return cut
}

func (d *debtor) live() {
	l := d.l
	if l.until > 0 && l.now >= l.until {
		return
	}
	l.after(l.rng.Int64N(l.pause), d.live)
	if l.until == 0 {
		return
	}
	if d.hoards != nil {
		if of := d.loan(d.hoards, &d.hoards.keys[0]); of.totals.Left() == 0 {
			d.report(of, 2*algo.LeastLoan)
		}
		return
	}
	pol := l.policies[l.rng.IntN(len(l.policies))]
	key := &pol.keys[0]
	of := d.loan(pol, key)
	l.look(pol, key)
	switch what := l.rng.IntN(100); {
	case what < 60:
		n := 1 + l.rng.Int64N(6)
		if !d.spend(of, n) || l.rng.IntN(4) == 0 {
			if all := l.running(); len(all) > 0 {
				l.submit(all[l.rng.IntN(len(all))], pol, key, n, nil)
			}
		}
	case what < 65 && of.totals.Left() > 0 && d.clock() < of.deadline:
		l.after(d.untilLast(of), func() { d.spend(of, 5) })
	case what < 97:
		if !d.lazy || of.totals.Left() == 0 || of.deadline-d.clock() < of.term/3 {
			d.report(of, 16+l.rng.Int64N(30))
		}
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

// untilLast is the time until the last moment at which a loan may be spent.
func (d *debtor) untilLast(of *loan) int64 {
	return max(int64(float64(of.deadline-d.clock())/(1+float64(d.rate)/1e9))-50_000, 0)
}

// spend admits up to n units from a loan, and says whether it admitted any.
func (d *debtor) spend(loan *loan, n int64) bool {
	l := d.l
	if n = min(n, loan.totals.Left()); n <= 0 || d.clock() >= loan.deadline || d.loans[loan.key.Key] != loan {
		return false
	}
	l.look(loan.policy, loan.key)
	loan.totals.Spent += n
	l.spent += n
	o := &op{id: uint64(len(l.ops)), policy: loan.policy, key: loan.key, cost: n, sent: l.now, at: l.now, charged: true,
		over: true, result: checker.Admitted, borrowed: true}
	l.ops = append(l.ops, o)
	l.trace("%x spends %d of %s", d.boot, n, loan.key.Key)
	return true
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
	if reached := slices.DeleteFunc(slices.Clone(to),
		func(p *process) bool { return !d.sends(p.host) || !d.hears(p.host) }); len(reached) > 0 {
		to = reached
	}
	if len(to) > 0 {
		d.tell(to[l.rng.IntN(len(to))], loan, want)
	}
}

// tell sends how a loan stands to a process, unless that is lost.
func (d *debtor) tell(p *process, loan *loan, want int64) {
	l, sent := d.l, d.clock()
	if l.rng.IntN(10) == 0 {
		return
	}
	b := store.Borrow{ID: algo.LoanID{Borrower: d.boot, Number: loan.number}, Totals: loan.totals, Known: loan.known,
		Want: want}
	back := func(a store.Lent) {
		if l.rng.IntN(10) > 0 {
			l.after(l.rng.Int64N(20*millisecond), func() {
				if d.hears(p.host) {
					d.answered(loan, sent, a)
					if d.hoards != nil {
						d.near = p.host
					}
				}
			})
		}
	}
	for range 1 + l.rng.IntN(10)/9 {
		l.after(l.rng.Int64N(20*millisecond), func() {
			if d.sends(p.host) {
				p.do(func() { p.lend(loan, b, back) })
			}
		})
	}
}

// recalled gives up what is left of a loan and says so to who asked for it.
func (d *debtor) recalled(p *process, key string, id algo.LoanID, granted int64) {
	loan := d.loans[key]
	if loan == nil || id != (algo.LoanID{Borrower: d.boot, Number: loan.number}) {
		return
	}
	loan.totals.Granted = max(loan.totals.Granted, granted)
	loan.totals.Returned += loan.totals.Left()
	d.l.trace("%x gives up what is left of %s: %+v", d.boot, key, loan.totals)
	d.tell(p, loan, 0)
}

// lend does what a process does with a report.
func (p *process) lend(loan *loan, b store.Borrow, back func(store.Lent)) {
	part := loan.key.Partition
	r := p.core.Route(part)
	if r.Standing != ownership.Owned {
		return
	}
	w, now := p.w, p.clock()
	b.Boot = now.Boot
	if p.lender.rounds[loan.key.Key] != nil {
		b.Want = 0 // what comes back is for those who wait for it
	}
	a, err := p.data.Lend(*loan.key, loan.policy.rule, now.Instant, b)
	if err != nil {
		return
	}
	w.mix(uint64(w.now), uint64(a.Granted), uint64(a.Spent), a.Ticket)
	w.trace("%s lends %+v for %+v", p.self.Name, a, b)
	w.lending.look(loan.policy, loan.key)
	w.lending.rises(p, told{loan.key.Key, b.ID, r.Term}, a.Loan)
	if p.lender.known == nil {
		p.lender.known = make(map[uint64]bool)
	}
	p.lender.known[b.ID.Borrower] = true
	delete(p.lender.silent, b.ID)
	if a.Ended || a.Left() == 0 {
		p.heard(loan.key.Key, b.ID)
	}
	if a.Ticket <= p.copied[part] {
		back(a)
	} else {
		p.waiting[part] = append(p.waiting[part], waiter{ticket: a.Ticket, lent: func() { back(a) }})
	}
	p.urge(now)
}

// startsFull has callers come when a strict key that has started full has room again, as their refusals say.
func (l *lending) startsFull(p *process, part int) {
	l.full = true
	for _, pol := range l.policies {
		if key := &pol.keys[0]; pol.Strict && key.Partition == part {
			for late := range int64(5) { // clocks differ
				p.later(int64(pol.Window)+late*10*millisecond, func() {
					for range pol.Limit / 4 {
						l.submit(p, pol, key, 4, nil)
					}
				})
			}
		}
	}
}

// callBack has a check wait until those who borrow its key have returned what they have left, or have not for too long.
func (p *process) callBack(a *ask) {
	w, key, l := p.w, a.op.key, &p.lender
	loans, err := p.data.Recall(*key, a.op.policy.Name, p.clock().Instant)
	if r := l.rounds[key.Key]; r != nil {
		a.round, r.waiting = r, append(r.waiting, a)
		return
	}
	r := &round{asked: make(map[algo.LoanID]bool), unasked: make(map[algo.LoanID]bool), waiting: []*ask{a}}
	a.round = r
	for _, loan := range loans {
		if !l.known[loan.ID.Borrower] || l.silent[loan.ID] > w.now {
			r.unasked[loan.ID] = true
			continue
		}
		r.asked[loan.ID] = true
		for _, d := range w.lending.debtors {
			if d.boot == loan.ID.Borrower && w.lending.rng.IntN(10) > 0 {
				w.after(w.lending.rng.Int64N(20*millisecond), func() {
					if d.hears(p.host) {
						d.recalled(p, key.Key, loan.ID, loan.Granted)
					}
				})
			}
		}
	}
	if err != nil || len(r.asked) == 0 {
		p.goOn(r, true)
		return
	}
	if l.rounds == nil {
		l.rounds, l.silent = make(map[string]*round), make(map[algo.LoanID]int64)
	}
	l.rounds[key.Key] = r
	p.later(recallMost, func() {
		if l.rounds[key.Key] != r {
			return
		}
		delete(l.rounds, key.Key)
		for id := range r.asked {
			l.silent[id] = w.now + silentFor
		}
		p.goOn(r, true)
	})
}

// heard notes that nothing is held of a loan any more.
func (p *process) heard(key string, id algo.LoanID) {
	r := p.lender.rounds[key]
	if r == nil {
		return
	}
	if delete(r.asked, id); len(r.asked) == 0 {
		delete(p.lender.rounds, key)
		p.goOn(r, false)
	}
}

// goOn decides what has waited. What has come back may have been lent again: that is asked for once more, unless it was
// in vain.
func (p *process) goOn(r *round, vain bool) {
	for _, a := range r.waiting {
		a.recalled = vain
		p.handle(a)
	}
}

// exact says whether loans are held to more than the checker does: nothing that was lent is forgotten or known twice,
// because nothing but planned moves has happened, and crashes with the copies made; nor is a key used up whoever
// borrows from it.
func (l *lending) exact() bool {
	return l.weather <= crashing && !l.full &&
		!slices.ContainsFunc(l.history.Crashes, func(f checker.Crash) bool { return !f.Copied })
}

func (l *lending) broken(rule, format string, args ...any) {
	l.proto.Violations = append(l.proto.Violations,
		checker.Violation{Rule: rule, Text: fmt.Sprintf("%v: ", time.Duration(l.now)) + fmt.Sprintf(format, args...)})
}

// The rules of loans.
const (
	heldBeyond  = "units in use and held beyond the limit"
	spentLate   = "units on loan that their owner does not hold"
	fellBack    = "totals of a loan that fell"
	hasty       = "refused before all on loan was asked for"
	neverHome   = "on loan after the load"
	beyondGrant = "more spent and returned than granted"
)

// escrowed is how much may have been charged for what owners that crashed may have admitted beyond their copies:
// whoever takes over does that whatever room there is, and whatever is on loan.
func (l *lending) escrowed(pol *policy) int64 {
	if pol.Durability != checker.Escrow {
		return 0
	}
	return int64(len(l.history.Crashes)) * 2 * max(1, pol.Limit/20)
}

// look holds every process that decides for a key to what it holds of it: no more than there is room for, and at least
// what debtors may spend.
func (l *lending) look(pol *policy, key *store.Key) {
	if !l.exact() {
		return
	}
	for _, p := range l.running() {
		if p.paused || !p.owns(key.Partition) {
			continue
		}
		now := p.clock().Instant
		room, loans := p.data.Lending(*key, pol.Name, now)
		var held int64
		for i := range loans {
			if !loans[i].Ended {
				held += loans[i].Left()
			}
		}
		if held > room+l.escrowed(pol) {
			l.broken(heldBeyond, "%s holds %d of %s, where there is room for %d", p.self.Name, held, key.Key, room)
		}
		for _, d := range l.debtors {
			of := d.loans[key.Key]
			if of == nil || of.totals.Left() == 0 || d.clock() >= of.deadline {
				continue
			}
			i := slices.IndexFunc(loans,
				func(k algo.Loan) bool { return k.ID == (algo.LoanID{Borrower: d.boot, Number: of.number}) })
			if i < 0 || loans[i].Ended || loans[i].Until <= now.Mono || loans[i].Left() < of.totals.Left() {
				l.broken(spentLate, "%x may spend %+v of %s, of which %s knows %+v at %d", d.boot, of.totals, key.Key,
					p.self.Name, loans, now.Mono)
			}
		}
	}
}

// rises holds what a process knows of a loan to only ever growing, until it is no longer known.
func (l *lending) rises(p *process, name told, loan algo.Loan) {
	t, before := loan.Totals, p.lender.told[name]
	known := before.Until
	if !before.Ended {
		known += 4 * int64(algo.LoanTerm) // it ends then, without a word to here, and is known for so long after that
	}
	if known <= p.clock().Instant.Mono {
		before = algo.Loan{}
	}
	if t == (algo.Totals{}) {
		return // it is not known
	}
	if t.Granted < before.Granted || t.Spent < before.Spent || t.Returned < before.Returned {
		l.broken(fellBack, "%s knows %+v of a loan of %s, and knew %+v", p.self.Name, t, name.key, before.Totals)
	}
	if t.Spent+t.Returned > t.Granted {
		l.broken(beyondGrant, "%s knows %+v of a loan of %s", p.self.Name, t, name.key)
	}
	if p.lender.told == nil {
		p.lender.told = make(map[told]algo.Loan)
	}
	p.lender.told[name] = loan
}

// decided holds a decision beside loans to these having been asked for: what is refused finds no room, or a borrower
// that is silent or was when the check asked for what is on loan, or one that was not asked.
func (l *lending) decided(p *process, a *ask, dec *store.Answer) {
	o := a.op
	l.look(o.policy, o.key)
	if dec.Allowed || o.cost == 0 || a.recalled {
		return
	}
	room, loans := p.data.Lending(*o.key, o.policy.Name, p.clock().Instant)
	if len(loans) == 0 || room < o.cost {
		return // of the one the checker knows, and the other is what limits are for
	}
	held := slices.DeleteFunc(loans, func(k algo.Loan) bool { return k.Ended || k.Left() == 0 })
	if !slices.ContainsFunc(held, func(k algo.Loan) bool {
		return p.lender.silent[k.ID] > l.now || !p.lender.known[k.ID.Borrower] ||
			a.round != nil && a.round.unasked[k.ID]
	}) {
		l.broken(hasty, "%s: %d refused by %s, where there is room for %d and %+v", o.key.Key, o.cost, p.self.Name,
			room, held)
	}
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
	loan.deadline, loan.term = max(loan.deadline, sent+int64(a.Term)), int64(a.Term)
	if d.hoards != nil {
		d.l.after(d.untilLast(loan), func() { d.spend(loan, loan.totals.Left()) })
	}
}

// returned holds all who decide to holding nothing: the load is over, and so are all loans.
func (l *lending) returned() {
	for _, p := range l.running() {
		p.data.Sweep(p.clock().Instant, 1)
		for _, pol := range l.policies {
			if key := &pol.keys[0]; p.owns(key.Partition) {
				if n := p.data.OnLoan(*key, pol.Name); n != 0 {
					l.broken(neverHome, "%d of %s at %s", n, key.Key, p.self.Name)
				}
			}
		}
	}
}
