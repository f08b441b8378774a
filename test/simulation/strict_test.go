package simulation

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/checker"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// strictWorld is five nodes, three of them voters, and a strict key whose owner and copy are not voters.
func strictWorld(t *testing.T, later int64) (l *lending, pol *policy, owner, backup *host) {
	t.Helper()
	s := calm(1)
	s.hosts, s.voters, s.partitions, s.detect = 5, 3, 40, [2]int64{second, second}
	limit := algo.Limit{Algorithm: algo.SlidingLog, Limit: 128, Window: 10 * time.Second}
	pol = newPolicy("strict", limit, checker.Sync, true, false, 0, s.partitions)
	pol.lent, pol.Lent = true, algo.LoanTerm+algo.LoanTerm/1000
	s.policies = []*policy{pol}
	l = &lending{run: &run{world: newWorld(s), weather: cutting}, rng: rand.New(rand.NewPCG(1, 9)),
		policies: s.policies}
	l.world.lending = l
	for _, h := range l.hosts {
		if h.index < l.voters {
			l.start(h)
		} else {
			l.after(6*second+later, func() { l.start(h) })
		}
	}
	l.world.run(7 * second)
	must.True(t, l.world.until(30*second, l.quiet), "not settled at the start")
	for part := range l.partitions {
		p := l.target(part)
		if b := p.view.Backups[part]; p.host.index >= 3 && b >= 0 && l.host(p.view.Members[b].Name).index >= 3 {
			pol.addKey("strict/0", part)
			return l, pol, p.host, l.host(p.view.Members[b].Name)
		}
	}
	t.Fatal("every partition has its owner or its copy at a voter")
	return nil, nil, nil, nil
}

// TestStrictLoans: what is on loan of a strict key is spent before another node may decide for it, whether the key's
// owner and copy are cut off from the voters and go on lending, or are both killed; and Quotas, which last longer than
// a grant, are not lent at all.
func TestStrictLoans(t *testing.T) {
	t.Parallel()
	faults := map[string]func(l *lending, owner, backup *host){
		"cut": func(l *lending, owner, backup *host) {
			l.split(2)
			for _, a := range []*host{owner, backup} {
				for _, b := range l.hosts {
					if b != owner && b != backup {
						l.cut(a, b, true)
						l.cut(b, a, true)
					}
				}
			}
		},
		"killed": func(_ *lending, owner, backup *host) {
			owner.proc.crash()
			backup.proc.crash()
		},
	}
	for name, fault := range faults {
		for _, quota := range []bool{false, true} {
			for after := int64(0); after < second; after += second / 5 { // the voters are asked once a second
				t.Run(fmt.Sprintf("%s,quota=%t,after=%v", name, quota, time.Duration(after)), func(t *testing.T) {
					strictLoans(t, quota, after, fault)
				})
			}
		}
	}
}

// strictLoans has units of a strict key lent, a fault, and its key asked about on the other side.
func strictLoans(t *testing.T, quota bool, after int64, fault func(l *lending, owner, backup *host)) {
	l, pol, owner, backup := strictWorld(t, after)
	if quota {
		l.quota(owner, pol)
	} else {
		for range 4 {
			d := &debtor{l: l, boot: l.rng.Uint64(), rate: -999_000, near: owner, loans: make(map[string]*loan)}
			l.after(0, func() { d.hoard(owner, pol) })
		}
	}
	l.run.run(l.now + second)
	fault(l, owner, backup)
	asker := l.hosts[0].proc
	for at := int64(0); at < 30*second; at += millisecond {
		l.after(at, func() { l.submit(asker, pol, &pol.keys[0], 1, nil) })
	}
	l.run.run(l.now + 31*second)
	expect.True(t, l.full, "the key has not started full")
	expect.True(t, quota != (l.spent > 0), "%d spent", l.spent)
	for _, v := range l.violations() {
		t.Error(v)
	}
}

// hoard borrows as much as it can get, and is not heard any more when the owner's lease is nearly over: it spends all
// it has at the last moment.
func (d *debtor) hoard(owner *host, pol *policy) {
	of, part := d.loan(pol, &pol.keys[0]), pol.keys[0].Partition
	if p := owner.proc; p != nil && p.data.parts[part].lease-owner.clock().Boot > 100*millisecond {
		d.report(of, algo.LeastLoan)
		d.l.after(10*millisecond, func() { d.hoard(owner, pol) })
		return
	}
	d.l.after(max(of.deadline-d.clock()-5*millisecond, 0), func() { d.spend(of, of.totals.Left()) })
}

// quota has a data plane ask the owner of a key for a Quota, and spend it when it is nearly over.
func (l *lending) quota(owner *host, pol *policy) {
	key, now := &pol.keys[0], owner.clock()
	a, err := owner.proc.data.Lend(*key, pol.rule, now.Instant, store.Borrow{
		ID: algo.LoanID{Borrower: 1, Number: 1}, Boot: now.Boot,
		Quota: algo.Quota{Demand: 1e6, Ahead: time.Hour, Term: 28 * time.Second},
	})
	if err != nil || a.Left() == 0 {
		return
	}
	of := &loan{policy: pol, key: key, number: 1, totals: a.Totals, deadline: l.now + 15*second}
	d := &debtor{l: l, boot: 1, loans: map[string]*loan{key.Key: of}}
	l.after(14*second, func() { d.spend(of, of.totals.Left()) })
}
