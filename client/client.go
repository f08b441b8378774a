package client

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
)

// Client decides checks of any number of policies and keys, by a cluster (Dial) or by a Service in this process (New). It is safe
// for concurrent use, and one is enough for a program. Close it when done.
type Client struct {
	backend  backend
	preparer limit.Preparer // of New, where its Service has prepared handles
	timeout  time.Duration  // of a call; 0: none
	onError  OnError
	retry    bool
	breaker  breaker
	memory   *memory // nil: none
	loans    *loans  // nil: none
	outage   outage
	settling settling
	counter  *Counter // nil: nothing is counted or observed
	observer func(Observed)
	askings  sync.Pool // of *asking
	start    time.Time // what now counts from

	// Request ids are ids followed by a number; ids differs from client to client. lastID is the last number given.
	ids    string
	lastID atomic.Uint64

	// ctx ends with Close. Renewals of leases descend from it.
	ctx    context.Context
	cancel context.CancelFunc

	mu     sync.RWMutex
	closed bool
	ended  atomic.Bool // closed, for who is not counted
	// running counts the calls in flight and the goroutines that renew leases. It is added to with mu held and closed
	// false, or by one who is counted already.
	running sync.WaitGroup
}

func newClient(b backend, o options) *Client {
	ctx, cancel := context.WithCancel(context.Background())
	c := &Client{
		backend:  b,
		timeout:  o.timeout,
		onError:  o.onError,
		retry:    o.retry,
		breaker:  breaker{threshold: o.failures, cooldown: o.cooldown},
		outage:   outage{log: o.log, onError: o.onError},
		start:    time.Now(),
		ids:      rand.Text() + ".",
		ctx:      ctx,
		cancel:   cancel,
		settling: settling{closing: make(chan struct{})},
		askings:  sync.Pool{New: func() any { return new(asking) }},
	}
	if o.memory {
		c.memory = newMemory()
	}
	return c
}

// now is the time since the client was made, by a clock that never runs backwards.
func (c *Client) now() time.Duration { return time.Since(c.start) }

// Policy returns the handle to the policy of that name. It asks nobody: whether the policy exists is for the first call
// to find out, which fails with ErrNotFound if it does not.
func (c *Client) Policy(name string) *Limiter {
	return &Limiter{c: c, target: target{Target: limit.Target{Policy: name}}}
}

// Inline returns the handle to a limit that is sent along with every call, in place of a policy. Its state is shared by
// every call in the cluster with the same namespace, algorithm, window, shape (slots, period, zone) and key; limit and
// capacity have no part in that and may change from call to call. An empty namespace stands for "default". A limit that
// cannot be makes the first call fail with ErrInvalid. Limit.MaxLog is the nodes' to set and is not sent.
func (c *Client) Inline(namespace string, inline algo.Limit) *Limiter {
	return &Limiter{c: c, target: target{limit.Target{Limit: &inline, Namespace: namespace}, limit.InlineScope(namespace, &inline)}}
}

// Check asks for several decisions at once, at most 1000, and returns one Result for each, in order. They are decided one by
// one: a refusal of one does not keep the others from being charged.
//
// Different nodes may decide them in parallel, each node its own in order.
//
// An error means that none was: one is malformed, which the error's Field names as in "checks[3].key" where there are
// several; not one could be decided, for the reason that the first could not; or ctx ended. Otherwise the reason why a
// check could not be decided, such as an unknown policy, is its Result's Err.
func (c *Client) Check(ctx context.Context, checks []Check) ([]Result, error) {
	if len(checks) > limit.MaxBatch {
		return nil, &Error{ErrTooLarge, "checks", fmt.Sprintf("%d are too many; at most %d fit one call", len(checks), limit.MaxBatch)}
	}
	qs := make([]question, len(checks))
	for i, ck := range checks {
		q, err := ck.question()
		if err != nil {
			return nil, in(i, len(checks), err)
		}
		qs[i] = q
	}
	if err := c.begin(ctx); err != nil {
		return nil, err
	}
	defer c.running.Done()
	if len(qs) == 0 {
		return nil, nil
	}
	results, err := c.checkBatch(ctx, qs)
	for i := range qs {
		r := Result{Err: err}
		if err == nil {
			r = results[i]
		}
		c.observe(&qs[i].Target, qs[i].Key, qs[i].cost, &r.Decision, r.Err)
	}
	return results, err
}

// Ready waits until a node answers that lets this caller check, and returns nil. It fails with ErrUnavailable and the reason for the
// last failure when ctx ends first, and at once with ErrUnauthenticated or ErrDenied, or if what answers is not a node of Weir. No other
// call needs it; it serves a program that would rather not start than run on a fail policy because of a mistyped address.
func (c *Client) Ready(ctx context.Context) error {
	if err := c.begin(ctx); err != nil {
		return err
	}
	defer c.running.Done()
	err := c.backend.ready(ctx)
	if err != nil && c.ctx.Err() != nil {
		return ErrClosed
	}
	return err
}

// Close ends the calls in flight, which return ErrClosed, stops the renewal of leases, waits for all of them and frees
// the connections. Before that it waits, for a second at most, until the reservations are settled that no node has answered for. Leases that were not released stay taken until their time to live has passed. Closing again returns
// ErrClosed.
func (c *Client) Close() error {
	c.mu.Lock()
	closed := c.closed
	c.closed = true
	c.ended.Store(true)
	c.mu.Unlock()
	if closed {
		return ErrClosed
	}
	c.settling.drain(c.now)
	c.cancel()
	err := c.backend.close()
	c.running.Wait()
	return err
}

// begin counts one call in, unless the client is closed or ctx has ended. The caller counts it out.
func (c *Client) begin(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	c.mu.RLock()
	defer c.mu.RUnlock()
	if c.closed {
		return ErrClosed
	}
	c.running.Add(1)
	return nil
}

// All asks for one decision of several checks, at most 1000: all are charged, or none is admitted, whichever nodes
// their keys belong to. Repeats of a policy and key are summed. Checks with Partial, Peek or a RequestID, and limits of
// concurrency or with count_denied, are errors. Two such calls may both be refused for the last unit.
//
// An error means that nothing was admitted; its Field names the check. A call that got no answer is not repeated: the fail
// policy answers it, and what it charged, if it did, stays.
func (c *Client) All(ctx context.Context, checks []Check) (AllDecision, error) {
	switch {
	case len(checks) == 0:
		return AllDecision{}, &Error{ErrInvalid, "checks", "must not be empty"}
	case len(checks) > limit.MaxBatch:
		return AllDecision{}, &Error{ErrTooLarge, "checks", fmt.Sprintf("%d are too many; at most %d fit one call", len(checks), limit.MaxBatch)}
	}
	qs := make([]question, len(checks))
	for i, ck := range checks {
		q, err := ck.question()
		switch {
		case err != nil:
		case ck.Partial:
			err = &Error{ErrInvalid, "partial", "must not be set in an atomic check"}
		case ck.Peek:
			err = &Error{ErrInvalid, "cost", "must not be 0 in an atomic check: it cannot peek"}
		case ck.RequestID != "":
			err = &Error{ErrInvalid, "request_id", "must not be given in an atomic check"}
		}
		if err != nil {
			return AllDecision{}, in(i, len(checks), err)
		}
		qs[i] = q
	}
	if err := c.begin(ctx); err != nil {
		return AllDecision{}, err
	}
	defer c.running.Done()
	var all AllDecision
	if c.allBorrowed(qs, &all) {
		c.observeAll(qs, all.Decisions, nil)
		return all, nil
	}
	all, err := c.grantAll(ctx, qs, func(ctx context.Context) (AllDecision, error) { return c.backend.CheckAll(ctx, checksOf(qs)) })
	c.allAdmitted(qs, &all)
	return all, err
}

// asking is the questions of one call, with their answers.
type asking struct {
	qs      []question
	marks   []uint64 // for memory.remember
	answers []Result // what nodes have answered
	results []Result // what the caller is told: an answer, a remembered refusal, or the fail policy's

	one struct {
		q [1]question
		m [1]uint64
		a [1]Result
		r [1]Result
	}
}

// decide answers valid questions: from memory if all of them were refused a moment ago, otherwise by nodes, or by the fail policy. The caller must
// have called begin.
func (c *Client) decide(ctx context.Context, qs []question) ([]Result, error) {
	n := len(qs)
	a := &asking{qs: qs, marks: make([]uint64, n), answers: make([]Result, n), results: make([]Result, n)}
	err := c.answer(ctx, a)
	if err != nil {
		return nil, err
	}
	return a.results, nil
}

// decideOne is decide for a single question.
func (c *Client) decideOne(ctx context.Context, q question) (Decision, error) {
	a := c.askings.Get().(*asking)
	a.one.q[0] = q
	a.qs, a.marks, a.answers, a.results = a.one.q[:], a.one.m[:], a.one.a[:], a.one.r[:]
	err := c.answer(ctx, a)
	r := a.results[0]
	*a = asking{}
	c.askings.Put(a)
	if err != nil {
		return Decision{}, err
	}
	return r.Decision, r.Err
}

// answer fills in the results of an asking.
func (c *Client) answer(ctx context.Context, a *asking) error {
	sent := c.now()
	if c.memory.recall(a, sent) {
		return nil
	}
	c.memory.mark(a)
	again := true // a second try cannot charge twice
	for i := range a.qs {
		q := &a.qs[i]
		if q.cost > 0 && q.requestID == "" {
			q.requestID = c.requestID()
		}
		again = again && (q.cost == 0 || q.requestID != "")
	}
	failed, err := c.askChecks(ctx, again, a)
	if err != nil {
		for i := range a.qs {
			c.memory.admitted(&a.qs[i].target)
		}
		return err
	}
	came := c.now()
	for i := range a.results {
		why := failed
		if why == nil && errors.Is(a.answers[i].Err, ErrUnavailable) {
			why = a.answers[i].Err
		}
		if why != nil {
			a.results[i] = Result{Decision: c.fallback(&a.qs[i], why)}
			if a.qs[i].cost > 0 {
				c.memory.admitted(&a.qs[i].target)
			}
			continue
		}
		a.results[i] = a.answers[i]
		c.memory.remember(&a.qs[i], &a.answers[i], a.marks[i], sent, came)
	}
	return nil
}

// askChecks has nodes answer questions. failed is the reason why the fail policy must answer all of them; err is the caller's error.
func (c *Client) askChecks(ctx context.Context, again bool, a *asking) (failed, err error) {
	probe, ok := c.breaker.allow()
	if !ok {
		return errOpen, nil
	}
	first := true
	o, err := c.attempt(ctx, again, func(within time.Duration) error {
		if first || len(a.qs) == 1 {
			first = false
			return a.unanswered(c.backend.check(ctx, a.qs, a.answers, within))
		}
		return c.askRest(ctx, a, within)
	})
	if o != answered && errors.Is(err, ErrUnavailable) && a.some() {
		// Some nodes have answered: the fail policy answers the rest alone, and the breaker counts no failure.
		o, err = answered, nil
	}
	c.breaker.done(probe, o)
	if errors.Is(err, ErrUnavailable) {
		return err, nil
	}
	return nil, err
}

var errOpen = &Error{ErrUnavailable, "", "the circuit breaker is open: nodes left several calls in a row unanswered"}

// askRest asks those questions again that had no answer.
func (c *Client) askRest(ctx context.Context, a *asking, within time.Duration) error {
	var rest asking
	var places []int
	for i := range a.qs {
		if errors.Is(a.answers[i].Err, ErrUnavailable) {
			rest.qs, places = append(rest.qs, a.qs[i]), append(places, i)
		}
	}
	rest.answers = make([]Result, len(rest.qs))
	err := rest.unanswered(c.backend.check(ctx, rest.qs, rest.answers, within))
	for j, i := range places {
		a.answers[i] = rest.answers[j]
	}
	return err
}

// unanswered takes in the error of a backend's check. When questions have no answer it returns the reason of one of them.
func (a *asking) unanswered(err error) error {
	if errors.Is(err, ErrUnavailable) {
		for i := range a.answers {
			a.answers[i] = Result{Err: err}
		}
	}
	for i := 0; err == nil && i < len(a.answers); i++ {
		if errors.Is(a.answers[i].Err, ErrUnavailable) {
			err = a.answers[i].Err
		}
	}
	return err
}

// some tells whether a question was answered.
func (a *asking) some() bool {
	return slices.ContainsFunc(a.answers, func(a Result) bool { return !errors.Is(a.Err, ErrUnavailable) })
}

// ask runs a call that the fail policy can answer in the cluster's place. If it has to, failed is the reason. again says that
// asking a second time charges nothing twice.
func (c *Client) ask(ctx context.Context, again bool, f func(context.Context) error) (failed, err error) {
	probe, ok := c.breaker.allow()
	if !ok {
		return errOpen, nil
	}
	o, err := c.call(ctx, again, f)
	c.breaker.done(probe, o)
	if errors.Is(err, ErrUnavailable) {
		return err, nil
	}
	return nil, err
}

// call is attempt for what goes by a context, and may fail with an error of a Service.
func (c *Client) call(ctx context.Context, again bool, f func(context.Context) error) (outcome, error) {
	return c.attempt(ctx, again, func(within time.Duration) error {
		if within == 0 {
			return callError(f(ctx))
		}
		ctx, cancel := context.WithTimeout(ctx, within)
		defer cancel()
		return callError(f(ctx))
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

// grant has f decide about q, or the fail policy in its place. The caller is counted in.
func (c *Client) grant(ctx context.Context, q *question, f func(context.Context) (Decision, error)) (d Decision, err error) {
	failed, err := c.ask(ctx, c.retry, func(ctx context.Context) (err error) {
		d, err = f(ctx)
		return err
	})
	if err != nil || failed != nil || d.Allowed {
		c.memory.admitted(&q.target)
	}
	switch {
	case err != nil:
		d = Decision{}
	case failed != nil:
		d = c.fallback(q, failed)
	}
	c.observe(&q.Target, q.Key, q.cost, &d, err)
	return d, err
}

// grantAll is grant for questions that are decided together.
func (c *Client) grantAll(ctx context.Context, qs []question, f func(context.Context) (AllDecision, error)) (all AllDecision, err error) {
	failed, err := c.ask(ctx, false, func(ctx context.Context) (err error) {
		all, err = f(ctx)
		return err
	})
	switch {
	case err != nil:
		all = AllDecision{}
	case failed != nil:
		all = AllDecision{Allowed: c.onError == FailOpen}
	}
	for i := range qs {
		if err != nil || failed != nil || all.Allowed {
			c.memory.admitted(&qs[i].target)
		}
		if failed != nil {
			all.Decisions = append(all.Decisions, c.fallback(&qs[i], failed))
		}
	}
	c.observeAll(qs, all.Decisions, err)
	return all, err
}

// attempt runs f within the client's timeout and nine tenths of what ctx leaves. If again is set it leaves half of that to
// a second run, for when nobody answers the first. Without a timeout f is given 0.
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

// failedRetry is the RetryAfter of a question refused because nobody could be asked. It promises nothing, and is what
// the HTTP API says in such a case.
const failedRetry = time.Second

// fallback is the fail policy's answer to q, which no node answered for a reason.
func (c *Client) fallback(q *question, why error) Decision {
	c.outage.failed(c.now(), why)
	if c.onError == FailClosed {
		return Decision{Policy: q.Policy, RetryAfter: failedRetry, FailedClosed: true}
	}
	return Decision{Policy: q.Policy, Allowed: true, Granted: q.cost, FailedOpen: true}
}

// requestID returns an id that nobody else uses, or an empty one if charges are not to be asked for twice.
func (c *Client) requestID() string {
	if !c.retry {
		return ""
	}
	return c.ids + strconv.FormatUint(c.lastID.Add(1), 36)
}

// in returns err, of element i of a batch of n checks, with the field named so. Like the nodes, it does not speak of a
// batch where there is one check.
func in(i, n int, err error) error {
	var e *Error
	if n > 1 && errors.As(err, &e) {
		return &Error{e.Kind, fmt.Sprintf("checks[%d].%s", i, e.Field), e.Message}
	}
	return err
}
