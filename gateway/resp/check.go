package resp

import (
	"cmp"
	"errors"
	"strconv"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/quotaheader"
	"github.com/weirlimit/weir/limit"
)

// namespace is the namespace of CL.THROTTLE's inline limits.
const namespace = "redis"

// throttle is the limit in the arguments of CL.THROTTLE.
type throttle struct{ burst, count, period int64 }

// bucket is such a limit as a token bucket, to which GCRA is equal: the theoretical arrival time that redis-cell stores
// is the instant at which the bucket is full.
type bucket struct {
	limit algo.Limit
	fill  time.Duration // time in which an empty bucket fills: redis-cell's delay variation tolerance
}

// pending says how a queued check is answered: as CL.THROTTLE with its bucket, or as WEIR.CHECK and WEIR.PEEK with
// throttle nil.
type pending struct {
	throttle *bucket
	peek     bool
}

// queue adds a check to those that flush decides.
func (c *conn) queue(s *scratch, check *limit.Check, p pending) {
	s.checks = append(s.checks, *check)
	s.pending = append(s.pending, p)
}

// failed answers a command with an error, after the queued checks have been answered.
func (c *conn) failed(s *scratch, code, text string) {
	c.flush(s)
	c.fail(s, code, text)
}

// cellError answers a CL.THROTTLE with an error in the form of redis-cell's own.
func (c *conn) cellError(s *scratch, text string) { c.failed(s, "Cell", cellPrefix+text) }

const cellPrefix = "error: Store error: "

// throttled carries out CL.THROTTLE key max_burst count period [quantity].
func (c *conn) throttled(s *scratch, args []string) {
	if len(args) != 5 && len(args) != 6 {
		c.cellError(s, "Usage: cl.throttle <key> <max_burst> <count per period> <period> [<quantity>]")
		return
	}
	b, said := s.last.bucket, [3]string(args[2:5])
	if said != s.last.limit {
		b = nil
	}
	var t throttle
	if b == nil && !c.integers(s, args[2:5], &t.burst, &t.count, &t.period) {
		return
	}
	quantity := int64(1)
	if !c.integers(s, args[5:], &quantity) {
		return
	}
	if b == nil {
		var wrong string
		if b, wrong = newBucket(t); wrong != "" {
			c.cellError(s, wrong)
			return
		}
		s.last.limit, s.last.bucket = said, b
	}
	if quantity < 0 {
		c.cellError(s, "quantity: must be 0 or more; it is "+strconv.FormatInt(quantity, 10))
		return
	}
	c.queue(s, &limit.Check{Target: limit.Target{Limit: &b.limit, Namespace: namespace, Key: limit.KeyOf(args[1])},
		Cost: quantity}, pending{b, quantity == 0})
}

// integers parses arguments of CL.THROTTLE. It returns false when it has answered with an error.
func (c *conn) integers(s *scratch, args []string, into ...*int64) bool {
	for i, a := range args {
		n, err := strconv.ParseInt(a, 10, 64)
		if err != nil {
			c.cellError(s, "Couldn't parse as integer: "+shortened(a, 64))
			return false
		}
		*into[i] = n
	}
	return true
}

// newBucket converts a limit, or says what is wrong with it.
func newBucket(t throttle) (_ *bucket, wrong string) {
	const maxPeriod = int64(algo.MaxWindow / time.Second)
	switch {
	case t.count == 0 || t.period == 0:
		return nil, "Zero rates are not supported"
	case t.burst < 0 || t.burst >= algo.MaxLimit:
		return nil, "max_burst: must be between 0 and " + strconv.FormatInt(algo.MaxLimit-1, 10)
	case t.count < 0 || t.count > algo.MaxLimit:
		return nil, "count per period: must be between 1 and " + strconv.FormatInt(algo.MaxLimit, 10)
	case t.period < 0 || t.period > maxPeriod:
		return nil, "period: must be between 1 and " + strconv.FormatInt(maxPeriod, 10) + " seconds"
	}
	l := algo.Limit{Algorithm: algo.TokenBucket, Limit: t.count, Capacity: t.burst + 1,
		Window: time.Duration(t.period) * time.Second}
	if l.Validate() != nil { // the other fields are valid by now
		return nil, "max_burst: takes too long to come back at this rate"
	}
	return &bucket{limit: l, fill: algo.Limits{l}.Horizon()}, ""
}

// check carries out WEIR.CHECK policy key [cost].
func (c *conn) check(s *scratch, args []string) {
	if len(args) > 4 {
		c.wrongArity(s, "weir.check")
		return
	}
	cost := int64(1)
	if len(args) == 4 {
		var err error
		if cost, err = strconv.ParseInt(args[3], 10, 64); err != nil {
			c.failed(s, "ERR", "cost: is not an integer or out of range")
			return
		}
	}
	c.queue(s, &limit.Check{Target: limit.Target{Policy: args[1], Key: limit.KeyOf(args[2])}, Cost: cost},
		pending{peek: cost == 0})
}

// peek carries out WEIR.PEEK policy key.
func (c *conn) peek(s *scratch, args []string) {
	c.queue(s, &limit.Check{Target: limit.Target{Policy: args[1], Key: limit.KeyOf(args[2])}}, pending{peek: true})
}

// answer appends the answer to a check.
func (c *conn) answer(s *scratch, p *pending, r *limit.Result) {
	e, failed := errors.AsType[*limit.Error](r.Err)
	switch {
	case r.Err != nil && !failed:
		c.fail(s, "TRYAGAIN", "the check could not be decided in time")
	case failed && e.Kind == limit.Denied:
		c.fail(s, "NOPERM", e.Error())
	case failed && e.Kind == limit.Unavailable:
		c.fail(s, "TRYAGAIN", e.Error())
	case failed && p.throttle != nil:
		c.fail(s, "Cell", cellPrefix+cellField(e).Error())
	case failed:
		c.fail(s, "ERR", e.Error())
	case r.FailedClosed:
		c.fail(s, "TRYAGAIN", "the node that decides for this key cannot be asked, and the policy's on_error refuses")
	case p.throttle != nil:
		s.out = appendThrottle(s.out, p, &r.Decision)
	default:
		s.out = appendDecision(s.out, c.proto, &r.Decision)
	}
}

// cellField returns an error with CL.THROTTLE's name of its field.
func cellField(e *limit.Error) *limit.Error {
	names := map[string]string{"limit.window": "period", "limit.limit": "count per period",
		"limit.capacity": "max_burst", "cost": "quantity"}
	return limit.NewError(e.Kind, cmp.Or(names[e.Field], e.Field), e.Message)
}

// appendThrottle appends the answer of CL.THROTTLE: whether the request is refused, the limit, what remains, the
// seconds until the request would be admitted (-1: it was, or never would be), and the seconds until the bucket is
// full.
func appendThrottle(b []byte, p *pending, d *limit.Decision) []byte {
	limited, retryAfter := !d.Allowed, d.RetryAfter
	if p.peek && !d.FailedOpen {
		// A quantity of 0 is admitted even where nothing remains. It is refused only while the debt is larger than the
		// bucket, which is possible after the limit was lowered.
		retryAfter = d.ResetAfter - p.throttle.fill
		limited = retryAfter > 0
	}
	b = appendBool(append(b, "*5\r\n"...), resp2, limited)
	b = appendInt(b, p.throttle.limit.Capacity)
	b = appendInt(b, d.Remaining)
	if limited && retryAfter != algo.Never {
		b = appendInt(b, cellSeconds(retryAfter))
	} else {
		b = append(b, ":-1\r\n"...)
	}
	return appendInt(b, cellSeconds(d.ResetAfter))
}

// cellSeconds rounds to whole seconds as redis-cell does: up, except for a fraction below a millisecond.
func cellSeconds(d time.Duration) int64 {
	return int64((d.Truncate(time.Millisecond) + time.Second - 1) / time.Second)
}

// appendDecision appends the answer of WEIR.CHECK and WEIR.PEEK.
func appendDecision(b []byte, proto int, d *limit.Decision) []byte {
	b = appendMap(b, proto, 11)
	b = appendBool(append(b, "$7\r\nallowed\r\n"...), proto, d.Allowed)
	b = appendInt(append(b, "$5\r\nlimit\r\n"...), d.Limit)
	b = appendInt(append(b, "$9\r\nremaining\r\n"...), d.Remaining)
	b = append(b, "$14\r\nretry_after_ms\r\n"...)
	switch {
	case d.Allowed:
		b = appendInt(b, 0)
	case d.RetryAfter == algo.Never:
		b = appendInt(b, -1)
	default:
		b = appendInt(b, quotaheader.RoundUp(d.RetryAfter, time.Millisecond))
	}
	b = appendInt(append(b, "$14\r\nreset_after_ms\r\n"...), quotaheader.RoundUp(d.ResetAfter, time.Millisecond))
	b = appendInt(append(b, "$8\r\ndelay_ms\r\n"...), quotaheader.RoundUp(d.Delay, time.Millisecond))
	b = appendBool(append(b, "$6\r\nshadow\r\n"...), proto, d.Shadow)
	b = appendBool(append(b, "$8\r\ndegraded\r\n"...), proto, d.Degraded)
	b = appendBool(append(b, "$11\r\nfailed_open\r\n"...), proto, d.FailedOpen)
	b = appendBool(append(b, "$10\r\nnear_limit\r\n"...), proto, d.NearLimit)
	return appendBool(append(b, "$6\r\nbanned\r\n"...), proto, d.Banned)
}
