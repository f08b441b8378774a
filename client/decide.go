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
		ck, k := &cs[i], keyOf(&cs[i].Target)
		if _, before := asked[k]; !before && (c.lent(ck, &rs[i].Decision) || c.memory.recall(ck, &rs[i].Decision, now)) {
			continue
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

// lent answers a check from a loan, and reports whether it did. A check under its caller's request id is answered by the node that
// remembers the id.
func (c *Client) lent(ck *limit.Check, d *Decision) bool {
	if ck.RequestID != "" || !c.loans.take(&ck.Target, ck.Key, ck.Cost, d) {
		return false
	}
	c.memory.admitted(&ck.Target)
	return true
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
	why, err := c.askOnce(ctx, again, cs, rs, open)
	came := c.now()
	for k, i := range open {
		if err != nil {
			c.memory.admitted(&cs[i].Target)
			continue
		}
		failed := why
		if failed == nil && unavailable(rs[i].Err) {
			failed = rs[i].Err
		}
		if failed != nil {
			rs[i] = Result{Decision: c.fallback(&cs[i], failed)}
		}
		c.memory.remember(&cs[i], &rs[i], marks[k], sent, came)
	}
	return err
}

// askOnce is the part of ask within the timeout and the breaker. why is set when the fail policy is to answer all checks.
func (c *Client) askOnce(ctx context.Context, again bool, cs []limit.Check, rs []Result, open []int) (why, err error) {
	probe, ok := c.breaker.allow()
	if !ok {
		return errOpen, nil
	}
	left := open
	o, err := c.attempt(ctx, again, func(within time.Duration) error {
		err := c.check(ctx, cs, rs, left, within)
		if unavailable(err) {
			for _, i := range left {
				rs[i] = Result{Err: err}
			}
			return err
		}
		var silent []int
		for _, i := range left {
			if err == nil && unavailable(rs[i].Err) {
				silent = append(silent, i)
			}
		}
		if left = silent; err == nil && len(left) > 0 {
			err = rs[left[0]].Err
		}
		return err
	})
	if unavailable(err) && len(left) < len(open) {
		// Some nodes have answered: the fail policy answers the rest alone, and the breaker counts no failure.
		o, err = answered, nil
	}
	c.breaker.done(probe, o)
	if unavailable(err) {
		return err, nil
	}
	return nil, err
}

var errOpen = limit.NewError(ErrUnavailable, "", "the circuit breaker is open: nodes left several calls in a row unanswered")

// check has the service answer the checks at the open places, within a time; 0: as long as it takes.
func (c *Client) check(ctx context.Context, cs []limit.Check, rs []Result, open []int, within time.Duration) error {
	if c.remote != nil {
		c.remote.check(ctx, cs, rs, open, within)
		return nil
	}
	if len(open) < len(cs) {
		some := make([]limit.Check, len(open))
		for k, i := range open {
			some[k] = cs[i]
		}
		cs = some
	}
	if within > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, within)
		defer cancel()
	}
	got, err := c.svc.Check(ctx, cs)
	for k := range got {
		rs[open[k]] = got[k]
	}
	return err
}

// call is attempt for what goes by a context.
func (c *Client) call(ctx context.Context, again bool, f func(context.Context) error) (outcome, error) {
	return c.attempt(ctx, again, func(within time.Duration) error {
		if within == 0 {
			return f(ctx)
		}
		ctx, cancel := context.WithTimeout(ctx, within)
		defer cancel()
		return f(ctx)
	})
}

// carryOut counts a call in and runs it, where no fail policy can answer in the cluster's place.
func (c *Client) carryOut(ctx context.Context, again bool, f func(context.Context) error) error {
	if err := c.begin(ctx); err != nil {
		return err
	}
	defer c.running.Done()
	_, err := c.call(ctx, again, f)
	return err
}

// grant is grantAll for one check.
func (c *Client) grant(ctx context.Context, ck *limit.Check, f func(context.Context) (Decision, error)) (Decision, error) {
	all, err := c.grantAll(ctx, []limit.Check{*ck}, c.retry, func(ctx context.Context) (AllDecision, error) {
		d, err := f(ctx)
		return AllDecision{Allowed: d.Allowed, Decisions: []Decision{d}}, err
	})
	if err != nil {
		return Decision{}, err
	}
	return all.Decisions[0], nil
}

// grantAll has f decide about checks together, or the fail policy in its place. again says that a second try cannot charge twice. The
// caller must have called begin.
func (c *Client) grantAll(ctx context.Context, cs []limit.Check, again bool, f func(context.Context) (AllDecision, error)) (all AllDecision, err error) {
	err = errOpen
	if probe, ok := c.breaker.allow(); ok {
		var o outcome
		o, err = c.call(ctx, again, func(ctx context.Context) (err error) {
			all, err = f(ctx)
			return err
		})
		c.breaker.done(probe, o)
	}
	failed := unavailable(err)
	if err != nil {
		all = AllDecision{Allowed: failed && c.onError == FailOpen, Decisions: make([]Decision, len(cs))}
	}
	for i := range cs {
		if failed {
			all.Decisions[i] = c.fallback(&cs[i], err)
		}
		if err != nil || all.Allowed {
			c.memory.admitted(&cs[i].Target)
		}
	}
	if failed {
		err = nil
	}
	for i := range cs {
		c.observe(&cs[i], &all.Decisions[i], err)
	}
	if err != nil {
		return AllDecision{}, err
	}
	return all, nil
}

// attempt runs f within the client's timeout and nine tenths of what ctx leaves. If again is set it leaves half of that to
// a second run, for when no node answers the first. Without a timeout f is given 0.
func (c *Client) attempt(ctx context.Context, again bool, f func(within time.Duration) error) (outcome, error) {
	if c.timeout == 0 {
		return c.judge(ctx, f(0))
	}
	budget, hurried := c.timeout, false
	if deadline, ok := ctx.Deadline(); ok {
		// The tenth is for the caller to act on the answer.
		if left := time.Until(deadline) / 10 * 9; left < budget {
			budget, hurried = max(left, 1), true // the end of ctx tells that there is no time
		}
	}
	start := c.now()
	first := budget
	if again {
		first = max(budget/2, 1)
	}
	err := f(first)
	left := budget - (c.now() - start)
	if again && errors.Is(err, ErrUnavailable) && left > 0 && ctx.Err() == nil && c.ctx.Err() == nil {
		err = f(left)
		left = budget - (c.now() - start)
	}
	o, err := c.judge(ctx, err)
	switch {
	case o == answered:
		c.outage.answered(c.now())
	case o == unanswered && hurried && left <= 0:
		o = unknown
	}
	return o, err
}

// judge returns what err, of a call under ctx, tells about the cluster, and the error to return for it.
func (c *Client) judge(ctx context.Context, err error) (outcome, error) {
	err = c.verdict(ctx, err)
	switch {
	case err == nil:
		return answered, nil
	case errors.Is(err, ErrClosed), ctx.Err() != nil:
		return unknown, err
	case errors.Is(err, ErrUnavailable):
		return unanswered, err
	default:
		return answered, err
	}
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
