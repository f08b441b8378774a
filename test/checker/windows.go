package checker

import "time"

// aligned holds each window of the wall clock to the limit. What is admitted near its ends, by the error of clocks, may
// be of the next one.
func (c *check) aligned(k *history) {
	sums := make(map[int64]int64)
	first := make(map[int64]int64)
	for _, op := range k.admitted {
		window := (op.Sent - int64(c.Skew)) / int64(k.Window)
		if op.Sent < int64(c.Skew) || op.Answered+int64(c.Skew) >= (window+1)*int64(k.Window) {
			continue
		}
		if _, begun := first[window]; !begun {
			first[window] = op.Sent
		}
		sums[window] += op.net()
		n := sums[window]
		if n <= k.Limit {
			continue
		}
		c.report.Excess[k.Name] = max(c.report.Excess[k.Name], n-k.Limit)
		if budget := c.budget(k, k.Limit, first[window], op.Answered); n > k.Limit+budget {
			c.fail(Beyond, "%s/%s: %d admitted between %v and %v, in one window; the limit allows %d, the faults %d more", k.Name, k.key,
				n, time.Duration(first[window]), time.Duration(op.Answered), k.Limit, budget)
			return
		}
	}
}

// opened holds the windows of a fixed window that opens with its first charge to the limit, where the instants of all
// decisions are known: what was admitted must be divisible into windows, none shorter than Window. Where a fault may
// have made a window forgotten, or have begun one without an operation, or units were given back so that the count was
// zero, the next one may have opened earlier.
func (c *check) opened(k *history) {
	ops := k.charged
	for i := range ops {
		if ops[i].Sent != ops[i].Answered {
			return
		}
	}
	opens := make([]bool, len(ops)+1) // a window may begin with that operation; the last one stands for the end
	last := 0
	var worst int64
	for i := range ops {
		if opens[i] = opens[i] || i == 0; !opens[i] {
			continue
		}
		opens[i+1] = opens[i+1] || ops[i].Result != Admitted // it may not have been charged
		last = i
		var n int64
		early := false
		for j := i; j < len(ops); j++ {
			since := ops[j].Sent - ops[i].Sent
			early = early || c.reopened(k, ops[i].Sent, ops[j].Sent)
			opens[j] = opens[j] || j > i && (early || since >= c.shorter(k.Window))
			early = early || ops[j].Returned > 0
			if ops[j].Result == Admitted {
				n += ops[j].net()
			}
			if worst = n; n > k.Limit+c.budget(k, k.Limit, ops[i].Sent, ops[j].Sent) {
				break
			}
			opens[j+1] = opens[j+1] || j+1 == len(ops)
		}
		if opens[len(ops)] {
			return
		}
	}
	if len(ops) > 0 {
		c.fail(Beyond, "%s/%s: %d admitted in a window that began at %v at the latest; the limit allows %d", k.Name,
			k.key, worst, time.Duration(ops[last].Sent), k.Limit)
	}
}

// reopened reports whether a fault may have ended a window early that was open between two instants, or begun it
// without an operation.
func (c *check) reopened(k *history, from, to int64) bool {
	before := from - c.longer(k.Window) - int64(c.Claim+c.Late)
	charges := k.Durability == Escrow || k.ColdClosed || k.Strict // who takes over charges what may have been admitted
	return charges && c.disturbed(before, to) || c.budget(k, k.Limit, from, to) > 0
}
