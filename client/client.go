package client

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"hash/maphash"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limiter"
)

// Client answers questions about any number of policies and keys, from a cluster (Dial) or by itself (Local). It is safe
// for concurrent use, and one is enough for a program. Close it when done.
type Client struct {
	backend backend
	here    *limiter.Limiter // of Local: what the backend asks
	timeout time.Duration    // of a call; 0: none
	onError OnError
	retry   bool
	breaker breaker
	memory  *memory   // nil: none
	start   time.Time // what now counts from

	// Request ids are ids followed by a number; ids differs from client to client. lastID is the last number given.
	ids    string
	lastID atomic.Uint64

	// ctx ends with Close. Renewals of leases descend from it.
	ctx    context.Context
	cancel context.CancelFunc

	mu     sync.RWMutex
	closed bool
	ended  atomic.Bool // closed, for who is not counted
	// running counts the calls in progress and the goroutines that renew leases. It is added to with mu held and closed
	// false, or by one who is counted already.
	running sync.WaitGroup
}

func newClient(b backend, o options) *Client {
	ctx, cancel := context.WithCancel(context.Background())
	c := &Client{
		backend: b,
		timeout: o.timeout,
		onError: o.onError,
		retry:   o.retry,
		breaker: breaker{threshold: o.failures, cooldown: o.cooldown},
		start:   time.Now(),
		ids:     rand.Text() + ".",
		ctx:     ctx,
		cancel:  cancel,
	}
	if o.memory {
		c.memory = &memory{seed: maphash.MakeSeed()}
	}
	return c
}

// now is the time since the client was made, by a clock that never runs backwards.
func (c *Client) now() time.Duration { return time.Since(c.start) }

// Policy returns the handle to the policy of that name. It asks nobody: whether the policy exists is for the first call
// to find out, which fails with ErrNotFound if it does not.
func (c *Client) Policy(name string) *Limiter {
	return &Limiter{c: c, target: target{policy: name}}
}

// Inline returns the handle to a limit that is sent along with every call, in place of a policy. Its state is shared by
// every call in the cluster with the same namespace, algorithm, window, shape (slots, period, zone) and key; limit and
// capacity have no part in that and may change from call to call. An empty namespace stands for "default". A limit that
// cannot be makes the first call fail with ErrInvalid. Limit.MaxLog is the nodes' to set and is not sent.
func (c *Client) Inline(namespace string, limit algo.Limit) *Limiter {
	return &Limiter{c: c, target: target{limit: &limit, namespace: namespace}}
}

// Check asks several questions at once, at most 1000, and returns one Result for each, in order. They are decided one by
// one: a refusal of one does not keep the others from being charged.
//
// An error means that none was: one is malformed, which the error's Field names as in "checks[3].key" where there are
// several; not one could be decided, for the reason that the first could not; or ctx ended. Otherwise the reason why a
// check could not be decided, such as an unknown policy, is its Result's Err.
func (c *Client) Check(ctx context.Context, checks []Check) ([]Result, error) {
	if len(checks) > maxBatch {
		return nil, &Error{ErrTooLarge, "checks", fmt.Sprintf("%d are too many; at most %d fit one call", len(checks), maxBatch)}
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
	return c.decide(ctx, qs)
}

// Ready waits until a node answers, and returns nil. It fails with ErrUnavailable and the reason for the last failure
// when ctx ends first, and at once if what answers is not a node of Weir. No other call needs it; it serves a program that would rather not start than run on a fail policy
// because of a mistyped address.
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

// Close ends the calls in progress, which return ErrClosed, stops the renewal of leases, waits for all of them and frees
// the connections. Leases that were not released stay taken until their time to live has passed. Closing again returns
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

// All asks several questions at once, at most 1000, that are one: all are charged, or none is admitted, whichever nodes
// their keys belong to. Repeats of a policy and key are summed. Questions with Partial, Peek or a RequestID, and limits of
// concurrency or with count_denied, are errors. Two such calls may both be refused for the last unit.
//
// An error means that nothing was admitted; its Field names the check. A call that got no answer is not repeated: the fail
// policy answers it, and what it charged, if it did, stays.
func (c *Client) All(ctx context.Context, checks []Check) (AllDecision, error) {
	switch {
	case len(checks) == 0:
		return AllDecision{}, &Error{ErrInvalid, "checks", "must not be empty"}
	case len(checks) > maxBatch:
		return AllDecision{}, &Error{ErrTooLarge, "checks", fmt.Sprintf("%d are too many; at most %d fit one call", len(checks), maxBatch)}
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
	failed, err := c.ask(ctx, false, func(ctx context.Context) (err error) {
		all, err = c.backend.checkAll(ctx, qs)
		return err
	})
	switch {
	case err != nil:
		return AllDecision{}, err
	case failed:
		all = AllDecision{Allowed: c.onError == FailOpen, Decisions: make([]Decision, len(qs))}
		for i := range qs {
			all.Decisions[i] = c.fallback(qs[i])
		}
	}
	return all, nil
}

// decide answers questions that are well formed, from memory if all of them were refused a moment ago. The fail policy is
// applied. The caller is counted in.
func (c *Client) decide(ctx context.Context, qs []question) ([]Result, error) {
	sent := c.now()
	if results := c.memory.recall(qs, sent); results != nil {
		return results, nil
	}
	marks := c.memory.marks(qs)
	for i := range qs {
		if qs[i].cost > 0 && qs[i].requestID == "" {
			qs[i].requestID = c.requestID()
		}
	}
	again := true
	for i := range qs {
		again = again && (qs[i].cost == 0 || qs[i].requestID != "")
	}
	var answers []answer
	failed, err := c.ask(ctx, again, func(ctx context.Context) (err error) {
		answers, err = c.backend.check(ctx, qs)
		return err
	})
	if err != nil {
		return nil, err
	}
	came := c.now()
	results := make([]Result, len(qs))
	for i := range results {
		if failed || errors.Is(answers[i].Err, ErrUnavailable) {
			results[i] = Result{Decision: c.fallback(qs[i])}
			continue
		}
		results[i] = answers[i].Result
		if marks != nil {
			c.memory.remember(&qs[i], &answers[i], marks[i], sent, came)
		}
	}
	return results, nil
}

// decideOne is decide for a single question.
func (c *Client) decideOne(ctx context.Context, q question) (Decision, error) {
	results, err := c.decide(ctx, []question{q})
	if err != nil {
		return Decision{}, err
	}
	return results[0].Decision, results[0].Err
}

// ask runs a call that the fail policy can answer in the cluster's place, and reports whether it has to. again says that
// asking a second time charges nothing twice.
func (c *Client) ask(ctx context.Context, again bool, f func(context.Context) error) (failed bool, err error) {
	probe, ok := c.breaker.allow()
	if !ok {
		return true, nil
	}
	o, err := c.call(ctx, again, f)
	c.breaker.done(probe, o)
	if errors.Is(err, ErrUnavailable) {
		return true, nil
	}
	return false, err
}

// call runs f within the client's timeout and nine tenths of what ctx leaves. If again is set it leaves half of that to
// a second run, for when nobody answers the first.
func (c *Client) call(ctx context.Context, again bool, f func(context.Context) error) (outcome, error) {
	if c.timeout == 0 {
		return c.judge(ctx, f(ctx))
	}
	budget, hurried := c.timeout, false
	if deadline, ok := ctx.Deadline(); ok {
		// The tenth is for the caller to act on the answer.
		if left := time.Until(deadline) / 10 * 9; left < budget {
			budget, hurried = left, true
		}
	}
	whole, cancel := context.WithTimeout(ctx, budget)
	defer cancel()

	first := whole
	if again {
		var cancel context.CancelFunc
		first, cancel = context.WithTimeout(whole, budget/2)
		defer cancel()
	}
	err := f(first)
	if again && errors.Is(err, ErrUnavailable) && whole.Err() == nil && c.ctx.Err() == nil {
		err = f(whole)
	}
	o, err := c.judge(ctx, err)
	if o == unanswered && hurried && whole.Err() != nil {
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
// the HTTP door says in such a case.
const failedRetry = time.Second

// fallback is the fail policy's answer to q.
func (c *Client) fallback(q question) Decision {
	if c.onError == FailClosed {
		return Decision{Policy: q.policy, RetryAfter: failedRetry, FailedClosed: true}
	}
	return Decision{Policy: q.policy, Allowed: true, Granted: q.cost, FailedOpen: true}
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
