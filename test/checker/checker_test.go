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

// run is a history of operations, faults, observations and settings.
func run(parts ...any) (h History) {
	for _, part := range parts {
		switch part := part.(type) {
		case Operation:
			h.Operations = append(h.Operations, part)
		case []Operation:
			h.Operations = append(h.Operations, part...)
		case []Crash:
			h.Crashes = part
		case []Split:
			h.Splits = part
		case []QuorumLoss:
			h.QuorumLosses = part
		case []Hidden:
			h.Hidden = part
		case []Usage:
			h.Usages = part
		case func(*History):
			part(&h)
		default:
			panic(part)
		}
	}
	return h
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

	forgot := func(from, to float64) []QuorumLoss { return []QuorumLoss{{moment(from), moment(to)}} }
	type set = func(*History)
	drift := func(n int64) set { return func(h *History) { h.Drift = n } }
	skew := func(d time.Duration) set { return func(h *History) { h.Skew = d } }
	flush := func(d time.Duration) set { return func(h *History) { h.Flush = d } }
	claim := func(d time.Duration) set { return func(h *History) { h.Claim = d } }
	late := func(d time.Duration) set { return func(h *History) { h.Late = d } }

	tests := []struct {
		name   string
		policy func(*Policy)
		h      History
		want   string
	}{
		// Admissions without faults.
		{"at the limit", none, run(at(Admitted, 1, 2, 3, 11.001, 12.001, 13.001)), ""},
		{"one too many", none, run(at(Admitted, 1, 2, 3, 10.9)), Beyond},
		{"out of order", none, run(at(Admitted, 10.9, 3, 2, 1)), Beyond},
		{"half-open window", none, run(at(Admitted, 1, 2, 3, 11)), ""},
		{"clocks that differ", none, run(drift(1000), at(Admitted, 1, 2, 3, 10.981)), ""},
		{"more than clocks differ", none, run(drift(1000), at(Admitted, 1, 2, 3, 10.979)), Beyond},
		{"cost", none, run(at(Admitted, 1, 2), cost(at(Admitted, 3)[0], 2)), Beyond},
		{"two keys", none, run(at(Admitted, 1, 2, 3),
			Operation{Policy: "p", Key: "l", Cost: 3, Sent: 4, Answered: 4, Result: Admitted}), ""},
		{"failed are not admitted", none, run(at(Admitted, 1, 2, 3), at(Failed, 4)), ""},
		{"partly outside any window", none, run(at(Admitted, 1, 2, 3), between(Admitted, 4, 11.5)), ""},
		{"wholly inside a window", none, run(at(Admitted, 1, 2, 3), between(Admitted, 4, 10.5)), Beyond},
		{"answers cross", none, run(at(Admitted, 4, 5), between(Admitted, 3.9, 15), between(Admitted, 4.1, 4.2),
			between(Admitted, 4.2, 4.3)), Beyond},
		{"fixed window's boundary", fixed, run(at(Admitted, 9, 9, 9, 11, 11, 11)), ""},
		{"more than a boundary explains", fixed, run(at(Admitted, 9, 9, 9, 11, 11, 11, 12)), Beyond},
		{"bucket", bucket, run(at(Admitted, 1, 1, 1, 4.4, 7.8, 11.2)), ""},
		{"bucket that refills too fast", bucket, run(at(Admitted, 1, 1, 1, 2, 3, 4)), Beyond},

		// Crashes.
		{"none, a crash", durable(None), run(crash(4, true), at(Admitted, 1, 2, 3, 5, 6, 7)), ""},
		{"none, beyond a crash", durable(None), run(crash(4, true), at(Admitted, 1, 2, 3, 5, 6, 7, 8)), Beyond},
		{"none, after a crash", durable(None), run(crash(0.5, true), at(Admitted, 1, 2, 3, 5)), Beyond},
		{"lent, spent after a crash", lent, run(crash(0.5, false), borrowed(1, 1.4), at(Admitted, 2, 3, 5)), ""},
		{"lent, more than was spent after a crash", lent,
			run(crash(0.5, false), borrowed(1, 1.4), at(Admitted, 2, 3, 5, 6)), Beyond},
		{"lent, spent when its term was over", lent, run(crash(0.5, false), borrowed(1.6, 1.7), at(Admitted, 2, 3)),
			Beyond},
		{"lent, a crash with copies", lent, run(crash(0.5, true), borrowed(1, 1.4), at(Admitted, 2, 3)), Beyond},
		{"lent, decided by a node after a crash", lent, run(crash(0.5, false), at(Admitted, 1, 1.4, 2, 3)), Beyond},
		{"async, unflushed", none, run(flushed(4, 2.5), at(Admitted, 1, 2, 3, 5)), ""},
		{"async, flushed", none, run(flushed(4, 3.5), at(Admitted, 1, 2, 3, 5)), Beyond},
		{"async, another node's", none, run([]Crash{{At: moment(4), Node: "b", Copied: true,
			Flushed: map[string]int64{"k": 0}}}, at(Admitted, 1, 2, 3, 5)), Beyond},
		{"async, within the interval", none,
			run(flush(50*time.Millisecond), crash(3.04, true), at(Admitted, 1, 2, 3, 5)), ""},
		{"async, before the interval", none,
			run(flush(50*time.Millisecond), crash(3.06, true), at(Admitted, 1, 2, 3, 5)), Beyond},
		{"async, no copy", none, run(crash(4, false), at(Admitted, 1, 2, 3, 5, 6, 7)), ""},
		{"escrow", durable(Escrow), run(flushed(4, 0), at(Admitted, 1, 2, 3, 5)), Beyond},
		{"sync", durable(Sync), run(flushed(4, 0), at(Admitted, 1, 2, 3, 5)), Beyond},
		{"sync, the copy out of reach", durable(Sync),
			run(claim(2*time.Second), flushed(4, 0), split(5, 6, 2), at(Admitted, 1, 2, 3, 7), left(8, 2)), ""},
		{"sync, the copy out of reach later", durable(Sync),
			run(claim(2*time.Second), flushed(4, 0), split(7, 8, 2), sides(2), left(9, 2)), Forgotten},
		{"sync, degraded", durable(Sync), run(flushed(4, 2.5), at(Admitted, 1, 2, 5), degraded(3)), ""},
		{"sync, degraded and flushed", durable(Sync), run(flushed(4, 3.5), at(Admitted, 1, 2, 5), degraded(3)), Beyond},
		{"sync, no copy", durable(Sync), run(crash(4, false), at(Admitted, 1, 2, 3, 5)), ""},
		{"sync, no copy once", durable(Sync), run(crash(4, false), at(Admitted, 1, 2, 3, 5, 6, 7, 8)), Beyond},
		{"strict, no copy", strict, run(crash(4, false), at(Admitted, 1, 2, 3, 5)), Beyond},
		{"strict, no copy and no voters", strict, run(crash(4, false), forgot(4, 9), at(Admitted, 1, 2, 3, 5)), ""},
		{"strict, a copy and no voters", strict, run(crash(4, true), forgot(4, 9), at(Admitted, 1, 2, 3, 5)), Beyond},
		{"strict, a copy out of reach and no voters", strict,
			run(claim(2*time.Second), crash(4, true), split(5, 6, 2), forgot(4, 9), at(Admitted, 1, 2, 3, 5)), ""},
		{"strict, a copy out of reach later", strict,
			run(claim(2*time.Second), crash(4, true), split(7, 8, 2), forgot(4, 9), at(Admitted, 1, 2, 3, 5)), Beyond},
		{"strict, a copy out of reach and voters", strict,
			run(claim(2*time.Second), crash(4, true), split(5, 6, 2), at(Admitted, 1, 2, 3, 5)), Beyond},

		// Splits.
		{"two sides", none, run(split(0, 20, 2), at(Admitted, 1, 1, 2, 2, 3, 3)), ""},
		{"more than two sides", none, run(split(0, 20, 2), at(Admitted, 1, 1, 2, 2, 3, 3, 4)), Beyond},
		{"three sides", none, run(split(0, 20, 3), at(Admitted, 1, 1, 2, 2, 3, 3, 4)), ""},
		{"two sides, no copy", durable(None), run(split(0, 20, 2), at(Admitted, 1, 1, 2, 2, 3, 3, 4, 4, 5)), ""},
		{"more than two sides, no copy", durable(None),
			run(split(0, 20, 2), at(Admitted, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5)), Beyond},
		{"after a split", none, run(split(0, 1.5, 2), at(Admitted, 2, 2, 3, 3)), Beyond},
		{"strict in a split", strict, run(split(0, 20, 2), at(Admitted, 1, 1, 2, 2)), Beyond},
		{"strict is strict about the limit only", strict, run(split(0, 20, 2), at(Admitted, 1, 1, 2)), ""},
		{"strict, an owner out of sight", strict, run(hidden(4, "k"), at(Admitted, 1, 2, 3, 5, 6, 7)), ""},
		{"strict, more than twice the limit by that", strict,
			run(hidden(4, "k"), at(Admitted, 1, 2, 3, 5, 6, 7, 8)), Beyond},
		{"strict, voters that forgot", strict, run(forgot(4, 9), at(Admitted, 1, 2, 3, 5)), Beyond},
		{"strict, another key's owner out of sight", strict, run(hidden(4, "other"), at(Admitted, 1, 2, 3, 5)), Beyond},
		{"strict, an owner out of sight after it", strict, run(hidden(6, "k"), at(Admitted, 1, 2, 3, 5)), Beyond},

		// Refusals.
		{"refused at the limit", none, run(at(Admitted, 1, 2, 3), at(Refused, 4, 10.9)), ""},
		{"refused below it", none, run(at(Admitted, 1, 2), at(Refused, 4)), Unjustified},
		{"refused too late", none, run(at(Admitted, 1, 2, 3), at(Refused, 11.2)), Unjustified},
		{"late ages", none, run(late(time.Second), at(Admitted, 1, 2, 3), at(Refused, 11.2)), ""},
		{"coarse slots", func(p *Policy) { p.Coarse = time.Second }, run(at(Admitted, 1, 2, 3), at(Refused, 11.2)), ""},
		{"may have been charged", none, run(at(Admitted, 1, 2), at(Failed, 3), at(Refused, 4)), ""},
		{"can never pass", none, run(cost(at(Refused, 1)[0], 4)), ""},
		{"cost too high for the room", none, run(at(Admitted, 1, 2), cost(at(Refused, 3)[0], 2)), ""},
		{"refused by an escrow", durable(Escrow), run(crash(4, true), at(Admitted, 1), at(Refused, 5)), ""},
		{"refused by more than an escrow", durable(Escrow), run(crash(4, true), at(Refused, 5)), Unjustified},
		{"an escrow charged late", durable(Escrow),
			run(claim(4*time.Second), crash(4, true), at(Admitted, 14), at(Refused, 15)), ""},
		{"an escrow long ago", durable(Escrow), run(crash(4, true), at(Admitted, 14), at(Refused, 15)), Unjustified},
		{"cold start", func(p *Policy) { p.ColdClosed = true }, run(crash(4, false), at(Refused, 5)), ""},
		{"no reason to start cold", none, run(crash(4, false), at(Refused, 5)), Unjustified},
		{"voters forgot", strict, run(forgot(0, 2), at(Refused, 5)), ""},
		{"voters forgot long ago", strict, run(forgot(0, 2), at(Refused, 13)), Unjustified},
		{"voters matter to strict rules only", none, run(forgot(0, 2), at(Refused, 5)), Unjustified},
		{"bucket empty", bucket, run(at(Admitted, 1, 1, 1), at(Refused, 3)), ""},
		{"bucket refilled", bucket, run(at(Admitted, 1, 1, 1), at(Refused, 9)), Unjustified},

		// Units that were given back.
		{"given back", none, run(returned(1, 2, at(Admitted, 1, 2, 3, 4)...)), ""},
		{"more than was given back", none, run(returned(1, 2, at(Admitted, 1, 2, 3, 4, 5)...)), Beyond},
		{"refused for what was given back", none,
			run(returned(1, 4, append(at(Admitted, 1, 2, 3), at(Refused, 5)...)...)), Unjustified},
		{"refused before it was", none, run(returned(1, 6, append(at(Admitted, 1, 2, 3), at(Refused, 5)...)...)), ""},
		{"what a crash may have undone", durable(Sync),
			run(crash(4.5, true), returned(1, 4, append(at(Admitted, 1, 2, 3), at(Refused, 5)...)...)), ""},
		{"bucket that refills while it is asked", bucket, run(at(Admitted, 1, 1, 1), between(Refused, 3, 9)), ""},
		{"bucket refilled before it is asked", bucket, run(at(Admitted, 1, 1, 1), between(Refused, 8, 9)), Unjustified},
		{"a bucket that was given back to", bucket,
			run(returned(1, 2, append(at(Admitted, 1, 1, 1), at(Refused, 3)...)...)), Unjustified},
		{"given back before a merge", none, run(split(0, 5, 2), returned(1, 2, at(Admitted, 1, 1)...), left(6, 2)), ""},

		// Leases.
		{"leases at the limit", leases, run(at(Admitted, 1, 2, 3, 11, 12, 13)), ""},
		{"one lease too many", leases, run(at(Admitted, 1, 2, 3, 10.9)), Beyond},
		{"a lease that was released", leases, run(lease(0, 0, 5, at(Admitted, 1, 2, 3, 5.1)...)), ""},
		{"a lease that is released later", leases, run(lease(0, 0, 6, at(Admitted, 1, 2, 3, 5.1)...)), Beyond},
		{"a lease that was renewed", leases, run(lease(9, 9, 0, at(Admitted, 1, 2, 3, 11.5)...)), Beyond},
		{"a lease that may have been", leases, run(lease(0, 9, 0, at(Admitted, 1, 2, 3, 11.5)...)), ""},
		{"refused for a lease that may have been", leases,
			run(lease(0, 9, 0, append(at(Admitted, 1), append(at(Admitted, 9, 9), at(Refused, 18)...)...)...)), ""},
		{"refused for one that was released", leases,
			run(lease(0, 0, 4, append(at(Admitted, 1, 2, 3), at(Refused, 5)...)...)), Unjustified},
		{"leases merged by maximum", leases, run(split(0, 5, 2), at(Admitted, 1, 1), left(6, 2)), Forgotten},
		{"an async crash forgets a renewal", leases,
			run(flushed(9.5, 8), lease(9, 9, 0, at(Admitted, 1, 2, 3, 11.5)...)), ""},
		{"a renewal that another node made", leases,
			run(flushed(9.5, 8), renewedBy("a", lease(9, 9, 0, at(Admitted, 1, 2, 3, 11.5)...)...)), ""},
		{"a renewal that the lost node did not make", leases,
			run(flushed(9.5, 8), renewedBy("c", lease(9, 9, 0, at(Admitted, 1, 2, 3, 11.5)...)...)), Beyond},
		{"a sync one does not", func(p *Policy) { p.Kind, p.Durability = Leases, Sync },
			run(flushed(9.5, 8), lease(9, 9, 0, at(Admitted, 1, 2, 3, 11.5)...)), Beyond},

		// Merges.
		{"merged", none, run(split(0, 5, 2), sides(1, 2), left(6, 1)), ""},
		{"merged, the smaller side won", none, run(split(0, 5, 2), sides(1, 2), left(6, 2)), Forgotten},
		{"merged, strict", strict, run(split(0, 5, 2), sides(1, 2), left(6, 1)), Forgotten},
		{"merged long before", none, run(split(0, 5, 2), at(Admitted, 16, 17), left(18, 2)), Forgotten},
		{"merged, and what was admitted before is gone", none, run(split(3, 5, 2), at(Admitted, 1, 1), left(6, 2)),
			Forgotten},
		{"merged, and what was admitted afterwards is gone", none,
			run(split(3, 5, 2), sides(1), at(Admitted, 6), left(7, 2)), Forgotten},
		{"merged and expired", none, run(split(0, 5, 2), at(Admitted, 1, 1), left(11, 3)), ""},
		{"forgotten by a crash", none, run(crash(4, false), at(Admitted, 1, 1), left(6, 3)), ""},
		{"leases of both sides, forgotten by a crash", leases,
			run(split(0, 4, 2), at(Admitted, 1, 1, 1, 2, 2), crash(5, false), left(6, 3)), ""},
		{"leases after a crash, forgotten too", leases,
			run(split(0, 4, 2), at(Admitted, 1, 1, 1, 2, 2), crash(5, false), at(Admitted, 5.2), left(6, 3)),
			Forgotten},
		{"leases of both sides, forgotten", leases,
			run(split(0, 4, 2), at(Admitted, 1, 1, 1, 2, 2), left(6, 3)), Forgotten},
		{"merged bucket", bucket, run(split(0, 5, 2), sides(1, 2), left(1.5, 1)), ""},
		{"merged bucket, the smaller side won", bucket, run(split(0, 5, 2), sides(1, 2), left(1.5, 2)), Forgotten},

		{"a window of the wall clock", aligned, run(at(Admitted, 8, 9, 9.5, 10.5, 11, 12)), ""},
		{"too many in a window of the wall clock", aligned, run(at(Admitted, 11, 12, 18, 19)), Beyond},
		{"near the end of one", aligned, run(skew(2*time.Second), at(Admitted, 13, 14, 15, 19)), ""},
		{"of both sides", aligned, run(split(10, 12, 2), at(Admitted, 11, 12, 18, 19)), ""},
		{"windows that open", opens, run(at(Admitted, 8, 9, 9.5, 18.5, 19, 20)), ""},
		{"windows that open too soon", opens, run(at(Admitted, 8, 9, 9.5, 17, 19, 20)), Beyond},
		{"a window that may have been longer", opens, run(at(Admitted, 1, 12, 13, 24, 25, 26)), ""},
		{"a window without its beginning", opens, run(at(Failed, 1), at(Admitted, 10, 10.5, 12, 13, 20)), ""},
		{"a window that may have begun later", opens, run(at(Failed, 1), at(Admitted, 2, 3, 4, 12, 13, 14)), ""},
		{"a window with its beginning", opens, run(at(Admitted, 10, 10.5, 12, 13)), Beyond},
		{"a window forgotten in a crash", opens, run(crash(5, false), at(Admitted, 1, 2, 3, 6, 7, 8)), ""},
		{"a window kept in a crash", func(p *Policy) { opens(p); p.Durability = Sync },
			run(crash(5, true), at(Admitted, 1, 2, 3, 6)), Beyond},
		{"a window emptied", opens, run(returned(1, 2, at(Admitted, 1)...), at(Admitted, 9, 9.5, 10, 19.5)), ""},

		// What cannot be judged.
		{"unknown policy", none, run(Operation{Policy: "q", Key: "k", Cost: 1, Result: Admitted}), Malformed},
		{"answered before it was sent", none, run(between(Admitted, 2, 1)), Malformed},
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
			h.Operations = append(h.Operations, Operation{Policy: "p", Key: "k", Cost: 1 + random(2),
				Sent: sent * second, Answered: (sent + random(5)) * second, Result: Admitted})
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

// TestProtocol shows the rules that no mutant of test/mutants breaks.
func TestProtocol(t *testing.T) {
	a, b, again := Holder{"a", 1}, Holder{"b", 2}, Holder{"a", 3}
	one, two := Term{N: 1}, Term{N: 2}
	for _, test := range []struct {
		name string
		do   func(m *Protocol)
		want string
	}{
		{"two deciders", func(m *Protocol) { m.Sole = true; m.Hold(1, 0, a, one); m.Hold(2, 0, b, two) }, OneDecider},
		{"two deciders in a split", func(m *Protocol) { m.Hold(1, 0, a, one); m.Hold(2, 0, b, two) }, ""},
		{"four hops", func(m *Protocol) { m.Hold(1, 0, a, one); m.Decide(2, 0, a, true, 4) }, TooManyHop},
		{"two tables", func(m *Protocol) { m.Table(1, "a", "a b", "a b a"); m.Table(2, "b", "a b", "a b b") },
			TwoTables},
		{"nobody's", func(m *Protocol) { m.Placed(1, 0, a) }, Misplaced},
		{"another boot's", func(m *Protocol) { m.Placed(1, 0, a, again) }, Misplaced},
		{"two's", func(m *Protocol) { m.Placed(1, 0, a, a, b) }, Misplaced},
	} {
		var m Protocol
		test.do(&m)
		expect.Equal(t, rules(m.Violations), test.want, "%s: %v", test.name, m.Violations)
	}
}
