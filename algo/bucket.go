package algo

import "time"

// bucket is the token bucket and, read the other way, the leaky bucket as a queue: tokens missing are requests waiting.
// It is the Generic Cell Rate Algorithm (ATM Forum, Traffic Management Specification 4.0, section 4.4.3; ITU-T I.371,
// annex A): the only thing kept is the instant at which the bucket will be full again, or the queue empty.
//
// That instant is exact: the rate is the fraction limit/Window, and the instant a whole number of nanoseconds plus a
// remainder in limit-ths of a nanosecond. No rounding error builds up.
//
// A bucket owes units: those missing from a full bucket, or waiting in the queue. Owed amounts are computed as units ×
// Window in 128 bits, which is the same number as nanoseconds × limit. A bucket may owe more than its capacity, after a
// charge that asked for no room, but never more than takes MaxFill to repay, so that the instant fits 64 bits
// (saturate).
//
// Words: the instant's nanoseconds, the remainder (below the limit).
type bucket struct{ inline }

func (bucket) words(*Limit) int { return 2 }

func (bucket) init(_ *Limit, s []uint64, now Instant) { s[0], s[1] = uint64(now.Mono), 0 }

// advance has nothing to do: owed computes from the instant what has come back by now.
func (bucket) advance(*Limit, *Arena, []uint64, Instant) { /* see owed */ }

// owed is how far the bucket is from full, in units × Window.
func (bucket) owed(l *Limit, s []uint64, now Instant) u128 {
	if int64(s[0]) < now.Mono {
		return u128{}
	}
	return mul(int64(s[0])-now.Mono, l.Limit).add(u128{lo: s[1]})
}

func (bucket) setOwed(l *Limit, s []uint64, now Instant, owed u128) {
	ns, rest := owed.div(l.Limit)
	s[0], s[1] = uint64(now.Mono+ns), uint64(rest)
}

// decide is Limits.decide for a bucket that is the only limit, with the same answers. It computes what is owed once,
// where Limits.decide computes it at every step. Most keys have a single bucket, and this halves the time of their
// decision.
func (c bucket) decide(l *Limit, state State, now Instant, r *Request, d *Decision) {
	now = state.tick(now)
	s := state[1:3]
	cost, pass := r.needs()
	capacity, window := l.holds(), int64(l.Window)
	full, owed := mul(capacity, window), c.owed(l, s, now)
	var room int64
	// An empty bucket, which a busy key over its limit has, needs no division.
	if r.OnLoan > 0 {
		full = mul(max(capacity-r.OnLoan, 0), window)
	}
	if left := full.sub(owed); !full.less(owed) && !left.less(u128{lo: uint64(window)}) {
		room, _ = left.div(window)
	}
	grant := min(cost, room)
	*d = Decision{}
	d.Allowed, d.Limit = grant >= pass && cost <= MaxLimit, capacity
	switch {
	case d.Allowed && r.Cost > 0:
		if l.Algorithm == LeakyBucket {
			d.Delay = c.resetAfter(l, nil, s, now)
		}
		// The bucket then owes no more than its capacity, so that it needs no saturate.
		c.setOwed(l, s, now, owed.add(mul(grant, window)))
		d.Granted = grant
		room -= grant
	case d.Allowed:
	case pass > capacity:
		d.RetryAfter = Never
	default:
		switch {
		case room >= pass:
		case r.OnLoan > 0:
			d.RetryAfter = r.wait(c, l, nil, s, now, l.room(c, nil, s, now), pass)
		default:
			d.RetryAfter = c.wait(l, nil, s, now, pass)
		}
	}
	d.Remaining, d.ResetAfter = room, max(c.resetAfter(l, nil, s, now), r.OnLoanFor)
}

// used does not exceed MaxLimit, the most that a state counts.
func (c bucket) used(l *Limit, _ *Arena, s []uint64, now Instant) int64 {
	return c.owed(l, s, now).add(u128{lo: uint64(l.Window) - 1}).quotient(int64(l.Window))
}

// wait is the time until owed ≤ spare.
func (bucket) wait(l *Limit, _ *Arena, s []uint64, now Instant, n int64) time.Duration {
	spare, rest := mul(l.holds()-n, int64(l.Window)), u128{lo: s[1]}
	at := int64(s[0]) + 1 // the bucket is full
	if !spare.less(rest) {
		before, _ := spare.sub(rest).div(l.Limit)
		at = int64(s[0]) - before
	}
	return time.Duration(at - now.Mono)
}

// resetAfter is also the delay of a request that joins the leaky queue now.
func (bucket) resetAfter(_ *Limit, _ *Arena, s []uint64, now Instant) time.Duration {
	left := int64(s[0]) - now.Mono
	if left >= 0 && s[1] > 0 {
		left++
	}
	return time.Duration(max(left, 0))
}

// charge may bring the bucket to owe more than its capacity, as when convert carries over a state that owed more.
func (c bucket) charge(l *Limit, _ *Arena, s []uint64, now Instant, n int64) {
	c.setOwed(l, s, now, saturate(l, c.owed(l, s, now).add(mul(n, int64(l.Window)))))
}

// saturate cuts an owed amount down to what takes MaxFill to repay.
func saturate(l *Limit, owed u128) u128 {
	if most := mul(l.Limit, int64(MaxFill)); most.less(owed) {
		return most
	}
	return owed
}

func (c bucket) refund(l *Limit, a *Arena, s []uint64, now Instant, n int64) int64 {
	n = min(n, c.used(l, a, s, now))
	owed, back := c.owed(l, s, now), mul(n, int64(l.Window))
	if owed.less(back) {
		back = owed
	}
	c.setOwed(l, s, now, owed.sub(back))
	return n
}

func (c bucket) convert(l *Limit, a *Arena, s []uint64, now Instant, to *Limit, t []uint64) {
	if l.Limit == to.Limit && l.Window == to.Window {
		copy(t, s)
	} else if n := c.used(l, a, s, now); n > 0 {
		c.charge(to, a, t, now, n)
	}
}

func (bucket) snapshot(dst []byte, _ *Limit, _ *Arena, s []uint64, now Instant) []byte {
	dst = appendUint(dst, int64(s[0])-now.Mono)
	return appendUint(dst, int64(s[1]))
}

func (bucket) restore(l *Limit, _ *Arena, s []uint64, now Instant, r *reader) error {
	s[0] = uint64(now.Mono + r.uint(int64(MaxFill)))
	s[1] = uint64(r.uint(l.Limit - 1))
	return r.err
}

// join keeps the state that owes more.
func (c bucket) join(l *Limit, _ *Arena, s, t []uint64, now Instant, u []uint64) bool {
	if c.owed(l, s, now).less(c.owed(l, t, now)) {
		s = t
	}
	copy(u, s)
	return true
}

// horizon is the time an empty bucket takes to fill.
func (bucket) horizon(l *Limit) time.Duration {
	ns, rest := mul(l.holds(), int64(l.Window)).div(l.Limit)
	if rest > 0 {
		ns++
	}
	return time.Duration(ns)
}
