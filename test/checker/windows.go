package checker

import "time"

// aligned holds each window of the wall clock to the limit. What is admitted near its ends, by the error of clocks, may be of the next one.
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
