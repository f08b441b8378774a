package algo

import "time"

// decideAlways is DecideTo for a request with Always.
func (ls Limits) decideAlways(a *Arena, s State, now Instant, r *Request, each []Decision, answer *Decision) error {
	now = s.tick(now)
	cost := max(min(r.Cost, MaxLimit), -MaxLimit)
	var fits [MaxLimits]bool
	var charges [MaxLimits]int64
	var delays [MaxLimits]time.Duration
	allowed, reserved, alike := true, true, true
	var most int64      // of charges
	logged := int64(-1) // what logs are charged
	ls.walk(a, s, now, func(i int, c counter, t []uint64) {
		l := &ls[i]
		used := c.used(l, a, t, now)
		switch {
		case cost > 0:
			fits[i] = r.spare(c.room(l, a, t, now)) >= cost
		case cost == 0:
			fits[i] = used <= l.holds()-r.Held
		default:
			fits[i] = true
		}
		allowed = allowed && fits[i]
		if l.Algorithm == LeakyBucket && cost > 0 {
			delays[i] = c.reset(l, a, t, now)
		}
		if cost <= 0 {
			return
		}
		// Units in use before, beyond what debt may reach, stay: nothing is added to them.
		charges[i] = max(min(cost, r.most(l)-used), 0)
		most = max(most, charges[i])
		if l.Algorithm == SlidingLog {
			alike = alike && (logged < 0 || logged == charges[i])
			logged = charges[i]
		}
		reserved = reserved && (charges[i] == 0 || c.reserve(l, a, t, charges[i]))
	})
	if !reserved {
		ls.trim(a, s)
		return ErrNoMemory
	}

	*answer = Decision{}
	rest := s[1:]
	for i := range ls {
		l := &ls[i]
		d := Decision{Allowed: true, Limit: Unlimited, Remaining: Unlimited, Tightest: i}
		if c := l.counter(); c != nil {
			n := c.words(l)
			t := rest[:n:n]
			rest = rest[n:]
			switch {
			case charges[i] > 0:
				c.charge(l, a, t, now, charges[i])
			case cost < 0:
				most = max(most, c.refund(l, a, t, now, -cost))
			}
			d.Allowed, d.Limit = fits[i], l.holds()
			d.Remaining, d.ResetAfter = r.spare(c.room(l, a, t, now)), max(c.reset(l, a, t, now), r.HeldFor)
			switch pass := max(cost, 1); {
			case allowed:
				d.Delay = delays[i]
			case pass > d.Limit:
				d.RetryAfter = Never
			default:
				d.RetryAfter = r.wait(c, l, a, t, now, pass)
			}
		}
		if each != nil {
			each[i] = d
		}
		delay := max(answer.Delay, d.Delay)
		if i == 0 || tighter(&d, answer, allowed) {
			*answer = d
		}
		answer.Delay = delay
	}
	if len(rest) > 0 && logged > 0 { // the position: there is a log
		if alike {
			rest[0] += step(logged)
		} else {
			rest[0] += generation
		}
	}
	if answer.Allowed = allowed; cost < 0 {
		most = -most
	}
	answer.Granted = most
	for i := range each {
		each[i].Granted = most
	}
	return nil
}

// most is the number of units that a request with Always can bring in use.
func (r *Request) most(l *Limit) int64 {
	if r.Bounded {
		return min(l.most(), l.holds()+r.MaxDebt-r.Held)
	}
	return l.most()
}

// most is the number of units that can be in use.
func (l *Limit) most() int64 {
	most := l.countable()
	switch {
	case l.MaxDebt != 0:
		most = min(most, l.holds()+l.MaxDebt)
	case l.Algorithm == SlidingLog:
		most = min(most, 2*l.Limit)
	}
	return most
}
