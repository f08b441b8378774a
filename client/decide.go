package client

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/weirlimit/weir/limit"
)

// decide answers checks that are well formed: from what is on loan, from the memory of refusals, or by the service; by the fail policy
// where no node answers. Checks of a key on loan are decided in their order: behind one that is asked about, all are. The caller must
// have called begin.
func (c *Client) decide(ctx context.Context, cs []limit.Check, rs []Result) error {
	var one [1]int
	open := one[:0] // places of the checks to be asked about
	var asked map[loanKey]struct{}
	now := c.now()
	for i := range cs {
		ck, d, k := &cs[i], &rs[i].Decision, keyOf(&cs[i].Target)
		// A check under its caller's request id is for the node that remembers the id.
		if _, before := asked[k]; !before && ck.RequestID == "" {
			if c.lent(&ck.Target, ck.Key, ck.Cost, d) || c.memory.recall(ck, d, now) || len(cs) == 1 && c.awaitLoan(ctx, ck, d) {
				continue
			}
		}
		open = append(open, i)
		if len(cs) > 1 && c.loans.has(k) {
			if asked == nil {
				asked = make(map[loanKey]struct{})
			}
			asked[k] = struct{}{}
		}
	}
	if len(open) == 0 {
		return nil
	}
	if err := c.ask(ctx, cs, rs, open); err != nil {
		return err
	}
	for _, i := range open {
		if c.ownID(cs[i].RequestID) {
			c.loans.missed(keyOf(&cs[i].Target), cs[i].Cost, &rs[i].Decision, rs[i].Err == nil)
		}
	}
	return nil
}

// room is what a single check and its answer take.
type room struct {
	check  [1]limit.Check
	result [1]Result
}

// decideOne is decide for one check.
func (c *Client) decideOne(ctx context.Context, ck *limit.Check, d *Decision) error {
	r := c.rooms.Get().(*room)
	r.check[0] = *ck
	err := c.decide(ctx, r.check[:], r.result[:])
	if err == nil {
		*d, err = r.result[0].Decision, r.result[0].Err
	}
	*r = room{}
	c.rooms.Put(r)
	return err
}

// ask has the service answer the checks at the open places.
func (c *Client) ask(ctx context.Context, cs []limit.Check, rs []Result, open []int) error {
	var one [1]uint64
	marks := one[:0] // of memory
	sent, again := c.now(), true
	for _, i := range open {
		marks = append(marks, c.memory.mark(&cs[i].Target))
		if cs[i].Cost > 0 && cs[i].RequestID == "" {
			cs[i].RequestID = c.requestID()
		}
		again = again && (cs[i].Cost == 0 || cs[i].RequestID != "") // a second try cannot charge twice
	}
	err := c.grant(ctx, again, cs, rs, open, func(left []int, within time.Duration) error {
		return c.check(ctx, cs, rs, left, within)
	})
	came := c.now()
	for k, i := range open {
		if err != nil {
			c.memory.admitted(&cs[i].Target)
			continue
		}
		c.memory.remember(&cs[i], &rs[i], marks[k], sent, came)
	}
	return err
}

var errOpen = limit.NewError(ErrUnavailable, "", "the circuit breaker is open: nodes left several calls in a row unanswered")

// asking asks the service about the checks at some places, within a time; 0: as long as it takes.
type asking func(places []int, within time.Duration) error

// together decides about several checks as one.
type together func(context.Context) (AllDecision, error)

// grant has f ask the service about the checks at the open places, unless the breaker is open, and the fail policy answers those that no
// node has answered. f is given the places that are left, and the time it has, see attempt.
func (c *Client) grant(ctx context.Context, again bool, cs []limit.Check, rs []Result, open []int, f asking) error {
	left, err := open, error(errOpen)
	if probe, ok := c.breaker.allow(c.now()); ok {
		var o outcome
		o, err = c.attempt(ctx, again, func(within time.Duration) error {
			err := f(left, within)
			if err == nil {
				left, err = silent(rs, left)
			}
			return err
		})
		if unavailable(err) && len(left) < len(open) {
			o = answered // by some of the nodes
		}
		c.breaker.done(c.now(), probe, o)
	}
	if !unavailable(err) {
		return err
	}
	for _, i := range left {
		rs[i] = Result{Decision: c.fallback(&cs[i], err)}
	}
	return nil
}

// silent returns those of some places whose checks no node has answered, and why the first has no answer.
func silent(rs []Result, places []int) (left []int, why error) {
	for _, i := range places {
		if unavailable(rs[i].Err) {
			if left = append(left, i); why == nil {
				why = rs[i].Err
			}
		}
	}
	return left, why
}

// check has the service answer the checks at some places within a time.
func (c *Client) check(ctx context.Context, cs []limit.Check, rs []Result, places []int, within time.Duration) error {
	if within > 0 {
		ctx = patient(ctx, within)
	}
	if len(places) == len(cs) {
		return c.svc.CheckTo(ctx, cs, nil, rs)
	}
	some, results := make([]limit.Check, len(places)), make([]Result, len(places))
	for k, i := range places {
		some[k] = cs[i]
	}
	err := c.svc.CheckTo(ctx, some, nil, results)
	for k, i := range places {
		rs[i] = results[k]
	}
	return err
}

// deadline is a context that says until when a CheckTo may take, without a timer of its own.
type deadline struct {
	context.Context
	at time.Time
}

// patient returns a context whose Deadline is a time from now.
func patient(ctx context.Context, within time.Duration) context.Context {
	return deadline{ctx, time.Now().Add(within)}
}

// Deadline implements context.Context.
func (d deadline) Deadline() (time.Time, bool) { return d.at, true }

// grantAll has f decide about checks together, or the fail policy in its place. again says that a second try cannot charge twice. The
// caller must have called begin.
func (c *Client) grantAll(ctx context.Context, cs []limit.Check, again bool, f together) (all AllDecision, err error) {
	rs := make([]Result, len(cs))
	all.Allowed = c.onError == FailOpen
	err = c.grant(ctx, again, cs, rs, places(len(cs)), func(_ []int, within time.Duration) error {
		ctx, cancel := limited(ctx, within)
		defer cancel()
		got, err := f(ctx)
		if err == nil {
			all = got
		}
		return err
	})
	if err == nil && all.Decisions == nil {
		for i := range rs {
			all.Decisions = append(all.Decisions, rs[i].Decision)
		}
	}
	for i := range cs {
		if err != nil || all.Allowed {
			c.memory.admitted(&cs[i].Target)
		}
		if err != nil {
			c.observe(&cs[i], &Decision{}, err)
		} else {
			c.observe(&cs[i], &all.Decisions[i], nil)
		}
	}
	if err != nil {
		return AllDecision{}, err
	}
	return all, nil
}

// grantOne is grantAll for one check.
func (c *Client) grantOne(ctx context.Context, ck *limit.Check, f func(context.Context) (Decision, error)) (Decision, error) {
	all, err := c.grantAll(ctx, []limit.Check{*ck}, c.retry, func(ctx context.Context) (AllDecision, error) {
		d, err := f(ctx)
		return AllDecision{Allowed: d.Allowed, Decisions: []Decision{d}}, err
	})
	if err != nil {
		return Decision{}, err
	}
	return all.Decisions[0], nil
}

// places are those of n checks.
func places(n int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = i
	}
	return out
}

// limited is a context that ends after a time; 0: with ctx.
func limited(ctx context.Context, within time.Duration) (context.Context, context.CancelFunc) {
	if within == 0 {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, within)
}

// call is attempt for what goes by a context.
func (c *Client) call(ctx context.Context, again bool, f func(context.Context) error) error {
	_, err := c.attempt(ctx, again, func(within time.Duration) error {
		ctx, cancel := limited(ctx, within)
		defer cancel()
		return f(ctx)
	})
	return err
}

// carryOut counts a call in and runs it, where no fail policy can answer in the cluster's place.
func (c *Client) carryOut(ctx context.Context, again bool, f func(context.Context) error) error {
	if err := c.begin(ctx); err != nil {
		return err
	}
	defer c.running.Done()
	return c.call(ctx, again, f)
}

// attempt runs f within the client's timeout and nine tenths of what ctx leaves. If again is set it leaves half of that to
// a second run, for when no node answers the first. Without a timeout f is given 0.
func (c *Client) attempt(ctx context.Context, again bool, f func(within time.Duration) error) (outcome, error) {
	budget, hurried := c.timeout, false
	if deadline, ok := ctx.Deadline(); ok && budget > 0 {
		// The tenth is for the caller to act on the answer.
		if left := time.Until(deadline) / 10 * 9; left < budget {
			budget, hurried = max(left, 1), true // the end of ctx tells that there is no time
		}
	}
	start := c.now()
	first := budget
	if again && budget > 0 {
		first = max(budget/2, 1)
	}
	err := f(first)
	left := budget - (c.now() - start)
	if again && unavailable(err) && left > 0 && ctx.Err() == nil && c.ctx.Err() == nil {
		err = f(left)
		left = budget - (c.now() - start)
	}
	err = c.verdict(ctx, err)
	switch {
	case errors.Is(err, ErrClosed), err != nil && ctx.Err() != nil:
		return unknown, err
	case unavailable(err) && hurried && left <= 0:
		return unknown, err
	case unavailable(err):
		return unanswered, err
	}
	c.outage.answered(c.now())
	return answered, err
}

// verdict returns the error to return for err: when the client is closed or ctx has ended, that is the reason.
func (c *Client) verdict(ctx context.Context, err error) error {
	switch {
	case err == nil:
		return nil
	case c.ctx.Err() != nil:
		return ErrClosed
	case ctx.Err() != nil:
		return ctx.Err()
	default:
		return err
	}
}

// failedRetry is the RetryAfter of a check that is refused because no node could be asked. It promises nothing, and is what
// the HTTP API says in such a case.
const failedRetry = time.Second

// fallback is the fail policy's answer to a check, which no node answered for a reason.
func (c *Client) fallback(ck *limit.Check, why error) Decision {
	c.outage.failed(c.now(), why)
	if c.onError == FailClosed {
		return Decision{Policy: ck.Policy, RetryAfter: failedRetry, FailedClosed: true}
	}
	return Decision{Policy: ck.Policy, Allowed: true, Granted: ck.Cost, FailedOpen: true}
}

// requestID returns an id that no other caller uses, or an empty one without WithRetry.
func (c *Client) requestID() string {
	if !c.retry {
		return ""
	}
	return c.ids + strconv.FormatUint(c.lastID.Add(1), 36)
}

// ownID tells whether a request id is the client's own, or there is none.
func (c *Client) ownID(id string) bool { return id == "" || strings.HasPrefix(id, c.ids) }
