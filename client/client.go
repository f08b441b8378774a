package client

import (
	"context"
	"crypto/rand"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
)

// Client decides checks of any number of policies and keys, by a cluster (Dial) or by a Service in this process (New).
// It is safe for concurrent use; a program needs only one. Close it when done.
type Client struct {
	svc      limit.Preparer // decides the checks
	nodes    *nodes         // svc of a Client that Dial made; nil: New made it
	stop     func()         // ends svc
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
	rooms    sync.Pool            // of *room
	now      func() time.Duration // see stopwatch

	// A request id is ids followed by a number. Each Client has other ids. lastID is the last number given.
	ids    string
	lastID atomic.Uint64

	// ctx ends with Close. The renewals of leases use contexts made from it.
	ctx    context.Context
	cancel context.CancelFunc

	mu     sync.RWMutex
	closed atomic.Bool // changed with mu held
	// running counts the calls in flight and the goroutines of leases and settlements. Add to it with mu held and
	// closed false, or from a call that it counts already.
	running sync.WaitGroup
}

// New returns a Client that asks svc, a Service in this process, and calls stop when it is closed. It has no timeout,
// no retry and no breaker, because svc cannot be slow or unreachable. Package client/local makes a Client of policies.
func New(svc limit.Preparer, stop func()) *Client { return newClient(svc, stop, options{}) }

// newClient returns a Client of svc. If o has a timeout, svc must end each call at the Deadline of its context: the
// Client sets no timer for it.
func newClient(svc limit.Preparer, stop func(), o options) *Client {
	ctx, cancel := context.WithCancel(context.Background())
	c := &Client{
		svc:      svc,
		stop:     stop,
		timeout:  o.timeout,
		onError:  o.onError,
		retry:    o.retry,
		breaker:  breaker{threshold: int64(o.failures), cooldown: o.cooldown},
		outage:   outage{log: o.log, onError: o.onError},
		now:      stopwatch(),
		ids:      rand.Text() + ".",
		ctx:      ctx,
		cancel:   cancel,
		settling: settling{closing: make(chan struct{})},
		rooms:    sync.Pool{New: func() any { return new(room) }},
	}
	if o.memory {
		c.memory = newMemory()
	}
	return c
}

// stopwatch returns a clock that counts from this call and never runs backwards.
func stopwatch() func() time.Duration {
	start := time.Now()
	return func() time.Duration { return time.Since(start) }
}

// Policy returns a handle to the policy of that name. It asks no node: if the policy does not exist, the first call
// fails with ErrNotFound.
func (c *Client) Policy(name string) *Limiter {
	return &Limiter{c: c, target: limit.Target{Policy: name}}
}

// Inline returns a handle to a limit that is sent along with every call, in place of a policy. All calls in the cluster
// with the same namespace, algorithm, window, shape (slots, period, zone) and key share one state; limit and capacity
// are not part of that and may change from call to call. An empty namespace stands for "default". If the limit is
// invalid, the first call fails with ErrInvalid. Limit.MaxLog is not sent: the nodes set it.
func (c *Client) Inline(namespace string, inline algo.Limit) *Limiter {
	return &Limiter{c: c, target: limit.Target{Limit: &inline, Namespace: namespace}}
}

// Check asks for several decisions at once, at most 1000, and returns one Result for each, in order. They are decided
// one by one: a refusal of one does not keep the others from being charged. Different nodes may decide in parallel,
// each node its own checks in order.
//
// An error means that no check was decided: a check is malformed (the error's Field names it, as in "checks[3].key" if
// there are several), ctx has ended, or no check could be decided, for the reason of the first one. Otherwise the
// reason why a check could not be decided, such as an unknown policy, is the Err of its Result.
func (c *Client) Check(ctx context.Context, checks []Check) ([]Result, error) {
	cs, err := checksOf(checks, nil)
	if err != nil {
		return nil, err
	}
	if err := c.begin(ctx); err != nil {
		return nil, err
	}
	defer c.running.Done()
	if len(cs) == 0 {
		return nil, nil
	}
	results := make([]Result, len(cs))
	err = c.decide(ctx, cs, results)
	if err == nil && !slices.ContainsFunc(results, func(r Result) bool { return r.Err == nil }) {
		err = results[0].Err
	}
	for i := range cs {
		r := &Result{Err: err}
		if err == nil {
			r = &results[i]
		}
		c.observe(&cs[i], &r.Decision, r.Err)
	}
	if err != nil {
		return nil, err
	}
	return results, nil
}

// Ready waits until a node answers that lets this caller check, and returns nil. If ctx ends first, it fails with
// ErrUnavailable and the reason of the last failure. It fails at once with ErrUnauthenticated or ErrDenied, or if the
// server is not a node of Weir. No other call needs Ready. It is for a program that should not start and run on the
// fail policy because of a mistyped address.
func (c *Client) Ready(ctx context.Context) error {
	if err := c.begin(ctx); err != nil {
		return err
	}
	defer c.running.Done()
	if c.nodes == nil {
		return nil
	}
	return c.verdict(c.ctx, c.nodes.ready(ctx))
}

// Close ends the calls in flight, which return ErrClosed, stops the renewal of leases, waits for all of them, and
// closes the connections. Before that it waits, for a second at most, for the reservations that are being settled in
// the background. Leases that were not released stay taken until their time to live has passed. A second Close returns
// ErrClosed.
func (c *Client) Close() error {
	c.mu.Lock()
	closed := c.closed.Swap(true)
	c.mu.Unlock()
	if closed {
		return ErrClosed
	}
	c.settling.drain(c.now)
	c.cancel()
	c.stop()
	c.running.Wait()
	return nil
}

// begin counts a call in, unless the client is closed or ctx has ended. The caller must call running.Done.
func (c *Client) begin(ctx context.Context) error {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if c.closed.Load() {
		return ErrClosed
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	c.running.Add(1)
	return nil
}

// All asks for one decision of several checks, at most 1000: all are charged, or none is admitted, whichever nodes own
// their keys. Checks of the same policy and key are summed. Checks with Partial, Peek or a RequestID, and limits of
// concurrency or with count_denied, are errors. Two concurrent calls of All may both be refused for the last unit.
//
// An error means that nothing was admitted; its Field names the check. All is not repeated when no node answers: the
// fail policy answers it, and what a node may have charged stays charged.
func (c *Client) All(ctx context.Context, checks []Check) (AllDecision, error) {
	if len(checks) == 0 {
		return AllDecision{}, invalid("checks", "must not be empty")
	}
	cs, err := checksOf(checks, (*Check).atomic)
	if err != nil {
		return AllDecision{}, err
	}
	if err := c.begin(ctx); err != nil {
		return AllDecision{}, err
	}
	defer c.running.Done()
	var all AllDecision
	if c.loans.allOf(cs, &all) {
		for i := range cs {
			c.memory.admitted(&cs[i].Target)
			c.observe(&cs[i], &all.Decisions[i], nil)
		}
		return all, nil
	}
	all, err = c.grantAll(ctx, cs, false,
		func(ctx context.Context) (AllDecision, error) { return c.svc.CheckAll(ctx, cs) })
	for i := range all.Decisions {
		c.loans.missed(keyOf(&cs[i].Target), cs[i].Cost, &all.Decisions[i], all.Allowed)
	}
	return all, err
}
