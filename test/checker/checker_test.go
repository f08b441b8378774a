package checker

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
)

const second = int64(time.Second)

// log3 admits 3 in 10 s.
var log3 = Policy{Name: "p", Kind: Window, Limit: 3, Window: 10 * time.Second, Durability: Async}

func with(p Policy, change func(*Policy)) Policy {
	change(&p)
	return p
}

// at makes operations that were decided at given seconds.
func at(result Result, seconds ...float64) []Operation {
	var ops []Operation
	for _, s := range seconds {
		t := int64(s * float64(second))
		ops = append(ops, Operation{Policy: "p", Key: "k", Cost: 1, Sent: t, Answered: t, Result: result, Node: "a"})
	}
	return ops
}

func degraded(second float64) Operation {
	op := at(Admitted, second)[0]
	op.Degraded = true
	return op
}

func between(result Result, sent, answered float64) Operation {
	op := at(result, sent)[0]
	op.Answered = int64(answered * float64(second))
	return op
}

// borrowed makes operations that a borrower admitted at given seconds.
func borrowed(seconds ...float64) []Operation {
	ops := at(Admitted, seconds...)
	for i := range ops {
		ops[i].Node, ops[i].Borrowed = "", true
	}
	return ops
}

func moment(s float64) int64 { return int64(s * float64(second)) }

func rules(vs []Violation) string {
	var rules []string
	for _, v := range vs {
		rules = append(rules, v.Rule)
	}
	return strings.Join(rules, "; ")
}

func TestCheck(t *testing.T) {
	strict := func(p *Policy) { p.Strict, p.Durability = true, Sync }
	durable := func(d Durability) func(*Policy) { return func(p *Policy) { p.Durability = d } }
	bucket := func(p *Policy) { p.Kind, p.Capacity = Bucket, 3 } // 0.3 per second
	fixed := func(p *Policy) { p.Kind = Fixed }
	aligned := func(p *Policy) { p.Kind, p.Aligned = Fixed, true }
	opens := func(p *Policy) { p.Kind, p.Opens = Fixed, true }
	none := func(*Policy) {}
	lent := func(p *Policy) { p.Durability, p.Lent = Escrow, time.Second }
	crash := func(at float64, copied bool) []Crash { return []Crash{{At: moment(at), Node: "a", Copied: copied}} }
	flushed := func(at, last float64) []Crash {
		return []Crash{{At: moment(at), Node: "a", Copied: true, Flushed: map[string]int64{"k": moment(last)}}}
	}
	hidden := func(at float64, key string) []Hidden {
		return []Hidden{{At: moment(at), Keys: map[string]bool{key: true}}}
	}
	split := func(from, to float64, sides int) []Split { return []Split{{moment(from), moment(to), sides}} }
	left := func(at float64, n int64) []Usage {
		return []Usage{{Policy: "p", Key: "k", At: moment(at), Remaining: n}}
	}
	cost := func(op Operation, n int64) []Operation { op.Cost = n; return []Operation{op} }

	returned := func(units int64, when float64, ops ...Operation) []Operation {
		ops[0].Returned, ops[0].ReturnedAt = units, moment(when)
		return ops
	}
	// sides are operations of one second, so many charged to the counters of each side.
	sides := func(units ...int) (ops []Operation) {
		for side, n := range units {
			for range n {
				op := at(Admitted, 1)[0]
				op.Content = string(rune('a' + side))
				ops = append(ops, op)
			}
		}
		return ops
	}
	leases := func(p *Policy) { p.Kind = Leases }
	lease := func(renewed, touched, ended float64, ops ...Operation) []Operation {
		ops[0].Renewed, ops[0].Touched, ops[0].Ended = moment(renewed), moment(touched), moment(ended)
		return ops
	}
	// renewedBy are operations of the node b, the lease of the first of which a node has renewed.
	renewedBy := func(node string, ops ...Operation) []Operation {
		for i := range ops {
			ops[i].Node = "b"
		}
		ops[0].Renewer = node
		return ops
	}

	// banned adds a refusal at 4 s that begins a ban of so many seconds, and one at another time, if that is not 0, that is the ban's.
	banned := func(again, ban float64, ops ...Operation) []Operation {
		first := at(Refused, 4)[0]
		first.Banned, first.Bans = true, time.Duration(moment(ban))
		if ops = append(ops, first); again != 0 {
			other := at(Refused, again)[0]
			other.Banned = true
			ops = append(ops, other)
		}
		return ops
	}

	tests := []struct {
		name   string
		policy func(*Policy)
		h      History
		want   string
	}{
		// Admissions without faults.
		{"at the limit", none, History{Operations: at(Admitted, 1, 2, 3, 11.001, 12.001, 13.001)}, ""},
		{"one too many", none, History{Operations: at(Admitted, 1, 2, 3, 10.9)}, Beyond},
		{"out of order", none, History{Operations: at(Admitted, 10.9, 3, 2, 1)}, Beyond},
		{"half-open window", none, History{Operations: at(Admitted, 1, 2, 3, 11)}, ""},
		{"clocks that differ", none, History{Drift: 1000, Operations: at(Admitted, 1, 2, 3, 10.981)}, ""},
		{"more than clocks differ", none, History{Drift: 1000, Operations: at(Admitted, 1, 2, 3, 10.979)}, Beyond},
		{"cost", none, History{Operations: append(at(Admitted, 1, 2), cost(at(Admitted, 3)[0], 2)...)}, Beyond},
		{"two keys", none, History{Operations: append(at(Admitted, 1, 2, 3), Operation{Policy: "p", Key: "l", Cost: 3, Sent: 4, Answered: 4, Result: Admitted})}, ""},
		{"failed are not admitted", none, History{Operations: append(at(Admitted, 1, 2, 3), at(Failed, 4)...)}, ""},
		{"partly outside any window", none, History{Operations: append(at(Admitted, 1, 2, 3), between(Admitted, 4, 11.5))}, ""},
		{"wholly inside a window", none, History{Operations: append(at(Admitted, 1, 2, 3), between(Admitted, 4, 10.5))}, Beyond},
		{"answers cross", none, History{Operations: append(at(Admitted, 4, 5), between(Admitted, 3.9, 15), between(Admitted, 4.1, 4.2), between(Admitted, 4.2, 4.3))}, Beyond},
		{"fixed window's boundary", fixed, History{Operations: at(Admitted, 9, 9, 9, 11, 11, 11)}, ""},
		{"more than a boundary explains", fixed, History{Operations: at(Admitted, 9, 9, 9, 11, 11, 11, 12)}, Beyond},
		{"bucket", bucket, History{Operations: at(Admitted, 1, 1, 1, 4.4, 7.8, 11.2)}, ""},
		{"bucket that refills too fast", bucket, History{Operations: at(Admitted, 1, 1, 1, 2, 3, 4)}, Beyond},

		// Crashes.
		{"none, a crash", durable(None), History{Crashes: crash(4, true), Operations: at(Admitted, 1, 2, 3, 5, 6, 7)}, ""},
		{"none, beyond a crash", durable(None), History{Crashes: crash(4, true), Operations: at(Admitted, 1, 2, 3, 5, 6, 7, 8)}, Beyond},
		{"none, after a crash", durable(None), History{Crashes: crash(0.5, true), Operations: at(Admitted, 1, 2, 3, 5)}, Beyond},
		{"lent, spent after a crash", lent, History{Crashes: crash(0.5, false), Operations: slices.Concat(borrowed(1, 1.4), at(Admitted, 2, 3, 5))}, ""},
		{"lent, more than was spent after a crash", lent, History{Crashes: crash(0.5, false), Operations: slices.Concat(borrowed(1, 1.4), at(Admitted, 2, 3, 5, 6))}, Beyond},
		{"lent, spent when its term was over", lent, History{Crashes: crash(0.5, false), Operations: slices.Concat(borrowed(1.6, 1.7), at(Admitted, 2, 3))}, Beyond},
		{"lent, a crash with copies", lent, History{Crashes: crash(0.5, true), Operations: slices.Concat(borrowed(1, 1.4), at(Admitted, 2, 3))}, Beyond},
		{"lent, decided by a node after a crash", lent, History{Crashes: crash(0.5, false), Operations: at(Admitted, 1, 1.4, 2, 3)}, Beyond},
		{"async, unflushed", none, History{Crashes: flushed(4, 2.5), Operations: at(Admitted, 1, 2, 3, 5)}, ""},
		{"async, flushed", none, History{Crashes: flushed(4, 3.5), Operations: at(Admitted, 1, 2, 3, 5)}, Beyond},
		{"async, another node's", none, History{Crashes: []Crash{{At: moment(4), Node: "b", Copied: true, Flushed: map[string]int64{"k": 0}}}, Operations: at(Admitted, 1, 2, 3, 5)}, Beyond},
		{"async, within the interval", none, History{Flush: 50 * time.Millisecond, Crashes: crash(3.04, true), Operations: at(Admitted, 1, 2, 3, 5)}, ""},
		{"async, before the interval", none, History{Flush: 50 * time.Millisecond, Crashes: crash(3.06, true), Operations: at(Admitted, 1, 2, 3, 5)}, Beyond},
		{"async, no copy", none, History{Crashes: crash(4, false), Operations: at(Admitted, 1, 2, 3, 5, 6, 7)}, ""},
		{"escrow", durable(Escrow), History{Crashes: flushed(4, 0), Operations: at(Admitted, 1, 2, 3, 5)}, Beyond},
		{"sync", durable(Sync), History{Crashes: flushed(4, 0), Operations: at(Admitted, 1, 2, 3, 5)}, Beyond},
		{"sync, the copy out of reach", durable(Sync), History{Claim: 2 * time.Second, Crashes: flushed(4, 0), Splits: split(5, 6, 2), Operations: at(Admitted, 1, 2, 3, 7), Usages: left(8, 2)}, ""},
		{"sync, the copy out of reach later", durable(Sync), History{Claim: 2 * time.Second, Crashes: flushed(4, 0), Splits: split(7, 8, 2), Operations: sides(2), Usages: left(9, 2)}, Forgotten},
		{"sync, degraded", durable(Sync), History{Crashes: flushed(4, 2.5), Operations: append(at(Admitted, 1, 2, 5), degraded(3))}, ""},
		{"sync, degraded and flushed", durable(Sync), History{Crashes: flushed(4, 3.5), Operations: append(at(Admitted, 1, 2, 5), degraded(3))}, Beyond},
		{"sync, no copy", durable(Sync), History{Crashes: crash(4, false), Operations: at(Admitted, 1, 2, 3, 5)}, ""},
		{"sync, no copy once", durable(Sync), History{Crashes: crash(4, false), Operations: at(Admitted, 1, 2, 3, 5, 6, 7, 8)}, Beyond},
		{"strict, no copy", strict, History{Crashes: crash(4, false), Operations: at(Admitted, 1, 2, 3, 5)}, Beyond},
		{"strict, no copy and no voters", strict, History{Crashes: crash(4, false), QuorumLosses: []QuorumLoss{{moment(4), moment(9)}}, Operations: at(Admitted, 1, 2, 3, 5)}, ""},
		{"strict, a copy and no voters", strict, History{Crashes: crash(4, true), QuorumLosses: []QuorumLoss{{moment(4), moment(9)}}, Operations: at(Admitted, 1, 2, 3, 5)}, Beyond},
		{"strict, a copy out of reach and no voters", strict, History{Claim: 2 * time.Second, Crashes: crash(4, true), Splits: split(5, 6, 2), QuorumLosses: []QuorumLoss{{moment(4), moment(9)}}, Operations: at(Admitted, 1, 2, 3, 5)}, ""},
		{"strict, a copy out of reach later", strict, History{Claim: 2 * time.Second, Crashes: crash(4, true), Splits: split(7, 8, 2), QuorumLosses: []QuorumLoss{{moment(4), moment(9)}}, Operations: at(Admitted, 1, 2, 3, 5)}, Beyond},
		{"strict, a copy out of reach and voters", strict, History{Claim: 2 * time.Second, Crashes: crash(4, true), Splits: split(5, 6, 2), Operations: at(Admitted, 1, 2, 3, 5)}, Beyond},

		// Splits.
		{"two sides", none, History{Splits: split(0, 20, 2), Operations: at(Admitted, 1, 1, 2, 2, 3, 3)}, ""},
		{"more than two sides", none, History{Splits: split(0, 20, 2), Operations: at(Admitted, 1, 1, 2, 2, 3, 3, 4)}, Beyond},
		{"three sides", none, History{Splits: split(0, 20, 3), Operations: at(Admitted, 1, 1, 2, 2, 3, 3, 4)}, ""},
		{"two sides, no copy", durable(None), History{Splits: split(0, 20, 2), Operations: at(Admitted, 1, 1, 2, 2, 3, 3, 4, 4, 5)}, ""},
		{"more than two sides, no copy", durable(None), History{Splits: split(0, 20, 2), Operations: at(Admitted, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5)}, Beyond},
		{"after a split", none, History{Splits: split(0, 1.5, 2), Operations: at(Admitted, 2, 2, 3, 3)}, Beyond},
		{"strict in a split", strict, History{Splits: split(0, 20, 2), Operations: at(Admitted, 1, 1, 2, 2)}, Beyond},
		{"strict is strict about the limit only", strict, History{Splits: split(0, 20, 2), Operations: at(Admitted, 1, 1, 2)}, ""},
		{"strict, an owner out of sight", strict, History{Hidden: hidden(4, "k"), Operations: at(Admitted, 1, 2, 3, 5)}, Beyond},
		{"strict, an owner out of sight of voters that forgot", strict, History{Hidden: hidden(4, "k"), QuorumLosses: []QuorumLoss{{moment(4), moment(9)}}, Operations: at(Admitted, 1, 2, 3, 5, 6, 7)}, ""},
		{"strict, more than twice the limit by that", strict, History{Hidden: hidden(4, "k"), QuorumLosses: []QuorumLoss{{moment(4), moment(9)}}, Operations: at(Admitted, 1, 2, 3, 5, 6, 7, 8)}, Beyond},
		{"strict, another key's owner out of sight", strict, History{Hidden: hidden(4, "other"), QuorumLosses: []QuorumLoss{{moment(4), moment(9)}}, Operations: at(Admitted, 1, 2, 3, 5)}, Beyond},
		{"strict, an owner out of sight after it", strict, History{Hidden: hidden(6, "k"), QuorumLosses: []QuorumLoss{{moment(4), moment(9)}}, Operations: at(Admitted, 1, 2, 3, 5)}, Beyond},

		// Refusals.
		{"refused at the limit", none, History{Operations: append(at(Admitted, 1, 2, 3), at(Refused, 4, 10.9)...)}, ""},
		{"refused below it", none, History{Operations: append(at(Admitted, 1, 2), at(Refused, 4)...)}, Unjustified},
		{"refused too late", none, History{Operations: append(at(Admitted, 1, 2, 3), at(Refused, 11.2)...)}, Unjustified},
		{"late ages", none, History{Late: time.Second, Operations: append(at(Admitted, 1, 2, 3), at(Refused, 11.2)...)}, ""},
		{"coarse slots", func(p *Policy) { p.Coarse = time.Second }, History{Operations: append(at(Admitted, 1, 2, 3), at(Refused, 11.2)...)}, ""},
		{"may have been charged", none, History{Operations: append(append(at(Admitted, 1, 2), at(Failed, 3)...), at(Refused, 4)...)}, ""},
		{"can never pass", none, History{Operations: cost(at(Refused, 1)[0], 4)}, ""},
		{"cost too high for the room", none, History{Operations: append(at(Admitted, 1, 2), cost(at(Refused, 3)[0], 2)...)}, ""},
		{"refused by an escrow", durable(Escrow), History{Crashes: crash(4, true), Operations: append(at(Admitted, 1), at(Refused, 5)...)}, ""},
		{"refused by more than an escrow", durable(Escrow), History{Crashes: crash(4, true), Operations: at(Refused, 5)}, Unjustified},
		{"an escrow charged late", durable(Escrow), History{Claim: 4 * time.Second, Crashes: crash(4, true), Operations: append(at(Admitted, 14), at(Refused, 15)...)}, ""},
		{"an escrow long ago", durable(Escrow), History{Crashes: crash(4, true), Operations: append(at(Admitted, 14), at(Refused, 15)...)}, Unjustified},
		{"cold start", func(p *Policy) { p.ColdClosed = true }, History{Crashes: crash(4, false), Operations: at(Refused, 5)}, ""},
		{"no reason to start cold", none, History{Crashes: crash(4, false), Operations: at(Refused, 5)}, Unjustified},
		{"voters forgot", strict, History{QuorumLosses: []QuorumLoss{{0, moment(2)}}, Operations: at(Refused, 5)}, ""},
		{"voters forgot long ago", strict, History{QuorumLosses: []QuorumLoss{{0, moment(2)}}, Operations: at(Refused, 13)}, Unjustified},
		{"voters matter to strict rules only", none, History{QuorumLosses: []QuorumLoss{{0, moment(2)}}, Operations: at(Refused, 5)}, Unjustified},
		{"bucket empty", bucket, History{Operations: append(at(Admitted, 1, 1, 1), at(Refused, 3)...)}, ""},
		{"bucket refilled", bucket, History{Operations: append(at(Admitted, 1, 1, 1), at(Refused, 9)...)}, Unjustified},

		// Units that were given back.
		{"given back", none, History{Operations: returned(1, 2, at(Admitted, 1, 2, 3, 4)...)}, ""},
		{"more than was given back", none, History{Operations: returned(1, 2, at(Admitted, 1, 2, 3, 4, 5)...)}, Beyond},
		{"refused for what was given back", none, History{Operations: returned(1, 4, append(at(Admitted, 1, 2, 3), at(Refused, 5)...)...)}, Unjustified},
		{"refused before it was", none, History{Operations: returned(1, 6, append(at(Admitted, 1, 2, 3), at(Refused, 5)...)...)}, ""},
		{"what a crash may have undone", durable(Sync), History{Crashes: crash(4.5, true), Operations: returned(1, 4, append(at(Admitted, 1, 2, 3), at(Refused, 5)...)...)}, ""},
		{"bucket that refills while it is asked", bucket, History{Operations: append(at(Admitted, 1, 1, 1), between(Refused, 3, 9))}, ""},
		{"bucket refilled before it is asked", bucket, History{Operations: append(at(Admitted, 1, 1, 1), between(Refused, 8, 9))}, Unjustified},
		{"a bucket that was given back to", bucket, History{Operations: returned(1, 2, append(at(Admitted, 1, 1, 1), at(Refused, 3)...)...)}, Unjustified},
		{"given back before a merge", none, History{Splits: split(0, 5, 2), Operations: returned(1, 2, at(Admitted, 1, 1)...), Usages: left(6, 2)}, ""},

		// Leases.
		{"leases at the limit", leases, History{Operations: at(Admitted, 1, 2, 3, 11, 12, 13)}, ""},
		{"one lease too many", leases, History{Operations: at(Admitted, 1, 2, 3, 10.9)}, Beyond},
		{"a lease that was released", leases, History{Operations: lease(0, 0, 5, at(Admitted, 1, 2, 3, 5.1)...)}, ""},
		{"a lease that is released later", leases, History{Operations: lease(0, 0, 6, at(Admitted, 1, 2, 3, 5.1)...)}, Beyond},
		{"a lease that was renewed", leases, History{Operations: lease(9, 9, 0, at(Admitted, 1, 2, 3, 11.5)...)}, Beyond},
		{"a lease that may have been", leases, History{Operations: lease(0, 9, 0, at(Admitted, 1, 2, 3, 11.5)...)}, ""},
		{"refused for a lease that may have been", leases, History{Operations: lease(0, 9, 0, append(at(Admitted, 1), append(at(Admitted, 9, 9), at(Refused, 18)...)...)...)}, ""},
		{"refused for one that was released", leases, History{Operations: lease(0, 0, 4, append(at(Admitted, 1, 2, 3), at(Refused, 5)...)...)}, Unjustified},
		{"leases merged by maximum", leases, History{Splits: split(0, 5, 2), Operations: at(Admitted, 1, 1), Usages: left(6, 2)}, Forgotten},
		{"an async crash forgets a renewal", leases, History{Crashes: flushed(9.5, 8), Operations: lease(9, 9, 0, at(Admitted, 1, 2, 3, 11.5)...)}, ""},
		{"a renewal that another node made", leases, History{Crashes: flushed(9.5, 8), Operations: renewedBy("a", lease(9, 9, 0, at(Admitted, 1, 2, 3, 11.5)...)...)}, ""},
		{"a renewal that the lost node did not make", leases, History{Crashes: flushed(9.5, 8), Operations: renewedBy("c", lease(9, 9, 0, at(Admitted, 1, 2, 3, 11.5)...)...)}, Beyond},
		{"a sync one does not", func(p *Policy) { p.Kind, p.Durability = Leases, Sync }, History{Crashes: flushed(9.5, 8), Operations: lease(9, 9, 0, at(Admitted, 1, 2, 3, 11.5)...)}, Beyond},

		// Merges.
		{"merged", none, History{Splits: split(0, 5, 2), Operations: sides(1, 2), Usages: left(6, 1)}, ""},
		{"merged, the smaller side won", none, History{Splits: split(0, 5, 2), Operations: sides(1, 2), Usages: left(6, 2)}, Forgotten},
		{"merged, strict", strict, History{Splits: split(0, 5, 2), Operations: sides(1, 2), Usages: left(6, 1)}, Forgotten},
		{"merged long before", none, History{Splits: split(0, 5, 2), Operations: at(Admitted, 16, 17), Usages: left(18, 2)}, Forgotten},
		{"merged, and what was admitted before is gone", none, History{Splits: split(3, 5, 2), Operations: at(Admitted, 1, 1), Usages: left(6, 2)}, Forgotten},
		{"merged, and what was admitted afterwards is gone", none, History{Splits: split(3, 5, 2), Operations: append(sides(1), at(Admitted, 6)...), Usages: left(7, 2)}, Forgotten},
		{"merged and expired", none, History{Splits: split(0, 5, 2), Operations: at(Admitted, 1, 1), Usages: left(11, 3)}, ""},
		{"forgotten by a crash", none, History{Crashes: crash(4, false), Operations: at(Admitted, 1, 1), Usages: left(6, 3)}, ""},
		{"merged bucket", bucket, History{Splits: split(0, 5, 2), Operations: sides(1, 2), Usages: left(1.5, 1)}, ""},
		{"merged bucket, the smaller side won", bucket, History{Splits: split(0, 5, 2), Operations: sides(1, 2), Usages: left(1.5, 2)}, Forgotten},

		// Bans.
		{"banned", none, History{Operations: banned(0, 20, at(Admitted, 1, 2, 3, 24.001)...)}, ""},
		{"admitted during a ban", none, History{Operations: banned(0, 20, at(Admitted, 1, 2, 3, 23.9)...)}, Banned},
		{"admitted at the instant of a ban", none, History{Operations: banned(0, 20, at(Admitted, 1, 2, 4)...)}, ""},
		{"during a ban, by clocks that differ", none, History{Drift: 1000, Operations: banned(0, 20, at(Admitted, 1, 2, 3, 23.97)...)}, ""},
		{"banned without need", none, History{Operations: banned(0, 20, at(Admitted, 1)...)}, Unjustified},
		{"refused by a ban", none, History{Operations: banned(15, 20, at(Admitted, 1, 2, 3)...)}, ""},
		{"a ban forgotten in a crash", none, History{Crashes: crash(5, true), Operations: banned(0, 20, at(Admitted, 1, 2, 3, 20)...)}, ""},
		{"a ban kept in a crash", durable(Sync), History{Crashes: crash(5, true), Operations: banned(0, 20, at(Admitted, 1, 2, 3, 20)...)}, Banned},
		{"a ban of another side", none, History{Splits: split(0, 6, 2), Operations: banned(0, 20, at(Admitted, 1, 2, 3, 20)...)}, ""},
		{"a ban under a strict rule", strict, History{Splits: split(0, 6, 2), Operations: banned(0, 20, at(Admitted, 1, 2, 3, 20)...)}, Banned},

		{"a window of the wall clock", aligned, History{Operations: at(Admitted, 8, 9, 9.5, 10.5, 11, 12)}, ""},
		{"too many in a window of the wall clock", aligned, History{Operations: at(Admitted, 11, 12, 18, 19)}, Beyond},
		{"near the end of one", aligned, History{Skew: 2 * time.Second, Operations: at(Admitted, 13, 14, 15, 19)}, ""},
		{"of both sides", aligned, History{Splits: split(10, 12, 2), Operations: at(Admitted, 11, 12, 18, 19)}, ""},
		{"windows that open", opens, History{Operations: at(Admitted, 8, 9, 9.5, 18.5, 19, 20)}, ""},
		{"windows that open too soon", opens, History{Operations: at(Admitted, 8, 9, 9.5, 17, 19, 20)}, Beyond},
		{"a window that may have been longer", opens, History{Operations: at(Admitted, 1, 12, 13, 24, 25, 26)}, ""},
		{"a window without its beginning", opens, History{Operations: append(at(Failed, 1), at(Admitted, 10, 10.5, 12, 13, 20)...)}, ""},
		{"a window that may have begun later", opens, History{Operations: append(at(Failed, 1), at(Admitted, 2, 3, 4, 12, 13, 14)...)}, ""},
		{"a window with its beginning", opens, History{Operations: at(Admitted, 10, 10.5, 12, 13)}, Beyond},
		{"a window forgotten in a crash", opens, History{Crashes: crash(5, false), Operations: at(Admitted, 1, 2, 3, 6, 7, 8)}, ""},
		{"a window kept in a crash", func(p *Policy) { opens(p); p.Durability = Sync }, History{Crashes: crash(5, true), Operations: at(Admitted, 1, 2, 3, 6)}, Beyond},
		{"a window emptied", opens, History{Operations: append(returned(1, 2, at(Admitted, 1)...), at(Admitted, 9, 9.5, 10, 19.5)...)}, ""},

		// What cannot be judged.
		{"unknown policy", none, History{Operations: []Operation{{Policy: "q", Key: "k", Cost: 1, Result: Admitted}}}, Malformed},
		{"answered before it was sent", none, History{Operations: []Operation{between(Admitted, 2, 1)}}, Malformed},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			test.h.Policies = []Policy{with(log3, test.policy)}
			r := Check(&test.h)
			expect.Equal(t, rules(r.Violations), test.want, "%v", r.Violations)
		})
	}
}

func TestExcess(t *testing.T) {
	h := History{
		Policies:   []Policy{log3},
		Splits:     []Split{{0, moment(20), 2}},
		Operations: at(Admitted, 1, 1, 2, 2, 3),
	}
	r := Check(&h)
	expect.True(t, len(r.Violations) == 0 && r.Excess["p"] == 2,
		"%v, excess %v, want 2 and nothing wrong with it", r.Violations, r.Excess)
}

// TestSlowIsRight compares the sweep with a count over every pair of instants, for histories without faults.
func TestSlowIsRight(t *testing.T) {
	next := uint64(1)
	random := func(n int64) int64 {
		next = next*6364136223846793005 + 1442695040888963407
		return int64(next>>33) % n
	}
	var caught int
	for range 300 {
		h := History{Policies: []Policy{log3}}
		for range 5 {
			sent := random(40)
			h.Operations = append(h.Operations, Operation{Policy: "p", Key: "k", Cost: 1 + random(2), Sent: sent * second, Answered: (sent + random(5)) * second, Result: Admitted})
		}
		want := false
		for from := range int64(40) {
			var n int64
			for _, op := range h.Operations {
				if op.Sent >= from*second && op.Answered < (from+10)*second {
					n += op.Cost
				}
			}
			want = want || n > 3
		}
		got := slices.ContainsFunc(Check(&h).Violations, func(v Violation) bool { return v.Rule == Beyond })
		expect.Equal(t, got, want, "%v: violation", h.Operations)
		if want {
			caught++
		}
	}
	expect.True(t, caught != 0 && caught != 300, "%d of 300 histories violate the limit: they show nothing", caught)
}

func TestProtocol(t *testing.T) {
	a, b := Holder{"a", 1}, Holder{"b", 2}
	again := Holder{"a", 3}
	one, two := Term{N: 1}, Term{N: 2}
	tests := []struct {
		name string
		do   func(m *Protocol)
		want string
	}{
		{"a move", func(m *Protocol) {
			m.Sole = true
			m.Hold(1, 0, a, one)
			m.Grant(1, 0, a, 10)
			m.Decide(2, 0, a, true, 3)
			m.Yield(0, a)
			m.Hold(3, 0, b, two)
			m.Grant(3, 0, b, 10)
			m.Decide(4, 0, b, true, 0)
			m.Use(9, 0, b, 10)
			m.Placed(9, 0, b, b)
		}, ""},
		{"a lease runs out", func(m *Protocol) {
			m.Hold(1, 0, a, one)
			m.Grant(1, 0, a, 10)
			m.Hold(2, 0, b, two)
			m.Grant(10, 0, b, 20)
		}, ""},
		{"a process ends", func(m *Protocol) {
			m.Sole = true
			m.Hold(1, 0, a, one)
			m.Grant(1, 0, a, 10)
			m.Gone(a)
			m.Hold(2, 0, again, two)
			m.Grant(2, 0, again, 10)
		}, ""},
		{"two grants", func(m *Protocol) {
			m.Hold(1, 0, a, one)
			m.Grant(1, 0, a, 10)
			m.Hold(2, 0, b, two)
			m.Grant(9, 0, b, 20)
		}, OneGrant},
		{"two grants, of two partitions", func(m *Protocol) {
			m.Hold(1, 0, a, one)
			m.Grant(1, 0, a, 10)
			m.Hold(2, 1, b, two)
			m.Grant(9, 1, b, 20)
		}, ""},
		{"two deciders", func(m *Protocol) {
			m.Sole = true
			m.Hold(1, 0, a, one)
			m.Hold(2, 0, b, two)
		}, OneDecider},
		{"two deciders in a split", func(m *Protocol) {
			m.Hold(1, 0, a, one)
			m.Hold(2, 0, b, two)
		}, ""},
		{"without a token", func(m *Protocol) { m.Decide(1, 0, a, true, 0) }, NoToken},
		{"frozen", func(m *Protocol) { m.Hold(1, 0, a, one); m.Decide(2, 0, a, false, 0) }, NoToken},
		{"after a move", func(m *Protocol) { m.Hold(1, 0, a, one); m.Yield(0, a); m.Decide(2, 0, a, true, 0) }, NoToken},
		{"a term taken up again", func(m *Protocol) { m.Hold(1, 0, a, one); m.Yield(0, a); m.Hold(2, 0, a, one) }, TermReused},
		{"a term of two in a split", func(m *Protocol) { m.Hold(1, 0, a, one); m.Hold(2, 0, b, one) }, ""},
		{"a term of two", func(m *Protocol) { m.Sole = true; m.Hold(1, 0, a, one); m.Gone(a); m.Hold(2, 0, again, one) }, TermReused},
		{"a term granted to two", func(m *Protocol) {
			m.Hold(1, 0, a, one)
			m.Grant(1, 0, a, 5)
			m.Hold(6, 0, b, one)
			m.Grant(6, 0, b, 10)
		}, TermReused},
		{"four hops", func(m *Protocol) { m.Hold(1, 0, a, one); m.Decide(2, 0, a, true, 4) }, TooManyHop},
		{"an answer at its lease's end", func(m *Protocol) { m.Use(10, 0, a, 10) }, PastLease},
		{"tables", func(m *Protocol) {
			m.Table(1, "a", "a b", "a b a")
			m.Table(2, "b", "a b", "a b a")
			m.Table(3, "b", "b", "b b b")
		}, ""},
		{"two tables", func(m *Protocol) { m.Table(1, "a", "a b", "a b a"); m.Table(2, "b", "a b", "a b b") }, TwoTables},
		{"nobody's", func(m *Protocol) { m.Placed(1, 0, a) }, Misplaced},
		{"another's", func(m *Protocol) { m.Placed(1, 0, a, b) }, Misplaced},
		{"another boot's", func(m *Protocol) { m.Placed(1, 0, a, again) }, Misplaced},
		{"two's", func(m *Protocol) { m.Placed(1, 0, a, a, b) }, Misplaced},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var m Protocol
			test.do(&m)
			expect.Equal(t, rules(m.Violations), test.want, "%v", m.Violations)
		})
	}
}
