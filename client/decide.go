package client

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/weirlimit/weir/limit"
)

// This file has what a Client does with checks before and after a Service answers them (limiter.go has the whole path):
//
//	decide    answers checks from loans and from memory, and passes the others to ask
//	ask       gives checks their request ids, and remembers refusals
//	grant     asks the Service unless the circuit breaker is open, and then has the fail policy answer the checks that
//	          no node has answered; grantAll is for checks that are decided together, carryOut for other calls
//	attempt   gives a call its time, and a second try
//	fallback  returns the fail policy's answer
//
// Words:
//
//	answered  of a check: its Result is a node's answer or error. The error of an unanswered one is ErrUnavailable
//	again     a call may be tried a second time, because its checks cannot be charged twice
//	place     of a check: its index in the caller's list
//
// Other files must keep: a caller of decide, ask or grant has called begin; a Service that gets a deadline looks at its
// Deadline.

// decide answers valid checks: from loans, from the memory of refusals, by the service, or, if no node answers, by the
// fail policy. The caller must have called begin.
func (c *Client) decide(ctx context.Context, cs []limit.Check, rs []Result) error {
	var one [1]int
	open := one[:0] // places of the checks that go to the service
	now := c.now()
	for i := range cs {
		ck, d := &cs[i], &rs[i].Decision
		// A check with the caller's request id must go to the node that remembers the id.
		if ck.RequestID == "" &&
			(c.lent(&ck.Target, ck.Key, ck.Cost, d) || c.memory.recall(ck, d, now) ||
				len(cs) == 1 && c.awaitLoan(ctx, ck, d)) {
			continue
		}
		open = append(open, i)
	}
	if len(open) == 0 {
		return nil
	}
	return c.ask(ctx, cs, rs, open)
}

// room has the arrays of decideOne, which are pooled.
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

// errOpen is the error of a check that no node was asked about, because the breaker is open.
var errOpen = limit.NewError(ErrUnavailable, "",
	"the circuit breaker is open: nodes left several calls in a row unanswered")

// ask has the service, or else the fail policy, answer the checks at the places in open. Each of them gets errOpen
// first, which marks it as unanswered.
func (c *Client) ask(ctx context.Context, cs []limit.Check, rs []Result, open []int) error {
	var one [1]uint64
	marks := one[:0] // of memory, one for each place in open
	sent, again := c.now(), true
	for _, i := range open {
		rs[i].Err = errOpen
		marks = append(marks, c.memory.mark(&cs[i].Target))
		if cs[i].Cost > 0 && cs[i].RequestID == "" {
			cs[i].RequestID = c.requestID()
		}
		again = again && (cs[i].Cost == 0 || cs[i].RequestID != "")
	}
	err := c.grant(ctx, again, cs, rs, len(open), func(ctx context.Context) error { return c.check(ctx, cs, rs) })
	came := c.now()
	for k, i := range open {
		ck, r := &cs[i], &rs[i]
		if err != nil {
			c.memory.admitted(&ck.Target)
			continue
		}
		c.memory.remember(ck, r, marks[k], sent, came)
		if c.ownID(ck.RequestID) {
			c.loans.missed(keyOf(&ck.Target), ck.Cost, &r.Decision, r.Err == nil)
		}
	}
	return err
}

// grant calls f, which asks the service about checks, unless the breaker is open. n is the number of checks without an
// answer. After f, the fail policy answers the checks that no node has answered.
func (c *Client) grant(ctx context.Context, again bool, cs []limit.Check, rs []Result, n int,
	f func(context.Context) error) error {
	err := error(errOpen)
	if probe, ok := c.breaker.allow(c.now()); ok {
		var o outcome
		if o, err = c.attempt(ctx, again, f); unavailable(err) && len(unansweredOf(rs)) < n {
			o = answered // some of the nodes have answered
		}
		c.breaker.done(c.now(), probe, o)
	}
	if !unavailable(err) {
		return err
	}
	for _, i := range unansweredOf(rs) {
		rs[i] = Result{Decision: c.fallback(&cs[i], err)}
	}
	return nil
}

// unansweredOf returns the places of the results without an answer of a node.
func unansweredOf(rs []Result) (places []int) {
	for i := range rs {
		if unavailable(rs[i].Err) {
			places = append(places, i)
		}
	}
	return places
}

// check has the service answer the checks without an answer. It returns the error of the call, or else the first error
// of a check that no node has answered, so that attempt tries again.
func (c *Client) check(ctx context.Context, cs []limit.Check, rs []Result) error {
	places := unansweredOf(rs)
	some, results := cs, rs
	if len(places) < len(cs) {
		some, results = make([]limit.Check, len(places)), make([]Result, len(places))
		for k, i := range places {
			some[k] = cs[i]
		}
	}
	err := c.svc.CheckTo(ctx, some, nil, results)
	first := err
	for k, i := range places {
		rs[i] = results[k]
		if err != nil {
			rs[i] = Result{Err: err}
		}
		if first == nil && unavailable(rs[i].Err) {
			first = rs[i].Err
		}
	}
	return first
}

// grantAll has f decide checks together, or else the fail policy.
func (c *Client) grantAll(ctx context.Context, cs []limit.Check, again bool,
	f func(context.Context) (AllDecision, error)) (all AllDecision, err error) {
	if err := c.begin(ctx); err != nil {
		return AllDecision{}, err
	}
	defer c.running.Done()
	rs := make([]Result, len(cs))
	for i := range rs {
		rs[i].Err = errOpen
	}
	all.Allowed = c.onError == FailOpen
	err = c.grant(ctx, again, cs, rs, len(cs), func(ctx context.Context) error {
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
func (c *Client) grantOne(ctx context.Context, ck *limit.Check,
	f func(context.Context) (Decision, error)) (Decision, error) {
	all, err := c.grantAll(ctx, []limit.Check{*ck}, c.retry, func(ctx context.Context) (AllDecision, error) {
		d, err := f(ctx)
		return AllDecision{Allowed: d.Allowed, Decisions: []Decision{d}}, err
	})
	if err != nil {
		return Decision{}, err
	}
	return all.Decisions[0], nil
}

// carryOut runs a call that no fail policy answers, between begin and Done.
func (c *Client) carryOut(ctx context.Context, again bool, f func(context.Context) error) error {
	if err := c.begin(ctx); err != nil {
		return err
	}
	defer c.running.Done()
	_, err := c.attempt(ctx, again, f)
	return err
}

// deadline is a context with another Deadline and no timer. A function that gets it must look at its Deadline.
type deadline struct {
	context.Context
	at time.Time
}

// Deadline implements context.Context.
func (d deadline) Deadline() (time.Time, bool) { return d.at, true }

// attempt runs f within the client's timeout and nine tenths of the time that ctx has left. The context that f gets has
// that Deadline. If again is set, the first run gets half of the time, and f runs a second time if no node answered the
// first.
func (c *Client) attempt(ctx context.Context, again bool, f func(context.Context) error) (outcome, error) {
	if c.timeout == 0 {
		return answered, c.verdict(ctx, f(ctx))
	}
	now, budget, hurried := time.Now(), c.timeout, false
	if at, ok := ctx.Deadline(); ok {
		// In the last tenth, the caller can act on the answer.
		if left := at.Sub(now) / 10 * 9; left < budget {
			budget, hurried = max(left, 0), true
		}
	}
	end := now.Add(budget)
	first := end
	if again {
		first = now.Add(budget / 2)
	}
	err := f(deadline{ctx, first})
	if again && unavailable(err) && time.Until(end) > 0 && ctx.Err() == nil && c.ctx.Err() == nil {
		err = f(deadline{ctx, end})
	}
	err = c.verdict(ctx, err)
	switch {
	case errors.Is(err, ErrClosed), err != nil && ctx.Err() != nil:
		return unknown, err
	case unavailable(err) && hurried && time.Until(end) <= 0:
		return unknown, err
	case unavailable(err):
		return unanswered, err
	}
	c.outage.answered(c.now())
	return answered, err
}

// verdict returns ErrClosed if the client is closed, ctx's error if ctx has ended, and err otherwise. It returns nil if
// err is nil.
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

// failedRetry is the RetryAfter of a check that the fail policy refuses. It is a guess; the HTTP API gives the same.
const failedRetry = time.Second

// fallback returns the fail policy's answer to a check. why is the error of the call that no node answered.
func (c *Client) fallback(ck *limit.Check, why error) Decision {
	c.outage.failed(c.now(), why)
	if c.onError == FailClosed {
		return Decision{Policy: ck.Policy, RetryAfter: failedRetry, FailedClosed: true}
	}
	return Decision{Policy: ck.Policy, Allowed: true, Granted: ck.Cost, FailedOpen: true}
}

// requestID returns an id that no other caller uses, or, without WithRetry, an empty one.
func (c *Client) requestID() string {
	if !c.retry {
		return ""
	}
	return c.ids + strconv.FormatUint(c.lastID.Add(1), 36)
}

// ownID reports whether a request id is empty or made by this client.
func (c *Client) ownID(id string) bool { return id == "" || strings.HasPrefix(id, c.ids) }
