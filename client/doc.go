// Package client asks a Weir cluster whether work may go ahead under its limits.
//
//	c, err := client.Dial(ctx, "weir:8081")
//	...
//	defer c.Close()
//	d, err := c.Policy("login").Allow(ctx, "alice")
//	if err != nil {
//		return err // a mistake in the request, or ctx ended
//	}
//	if !d.Allowed {
//		return tooManyRequests(d.RetryAfter)
//	}
//
// New returns a *Client that asks a limit.Service. Package client/local makes one that decides in this process, without
// a cluster, for tests and for programs that are a single process. A function that needs one limit should take an
// interface of the methods that it uses:
//
//	type allower interface {
//		Allow(ctx context.Context, key string) (client.Decision, error)
//	}
//
// # Names
//
// Names are those of golang.org/x/time/rate where it has one. The differences: a Limiter is one limit for any number of
// keys, so every method takes a key. Allow takes a context and returns a Decision, because the check may go to a node.
// Wait returns the Decision too. A cost is an int64, and a cost of 0 peeks. Reserve takes units now, for work whose
// cost is known only afterwards; Commit or Cancel ends its Reservation. Refund gives back units that were charged
// without a Reservation.
//
// # How checks travel
//
// The Client learns from the nodes which node owns which keys, and asks the owners directly; if it cannot, it asks any
// node. Checks of concurrent callers share messages on one stream to each node. A check is sent at once if nothing is
// in flight to its node, or when as many checks have gathered as are in flight. No timer delays a check and a lone
// caller waits for no other. Among hundreds of callers a check costs some microseconds. Acquire, Reserve and calls that
// give back are unary calls, to the owner as well. All is one call to the node that owns its first key.
//
// At most 20,000 checks wait for one node. While it does not answer, the fail policy answers further ones at once.
// Checks that a node did not begin, because it is stopping or its connection broke before, are sent to another node.
//
// If the trace of a caller's context is sampled and the nodes trace, the nodes' spans are children of the span in that
// context. The Client makes no spans of its own.
//
// # Loans
//
// The Client borrows units of keys that it asks about often, and admits checks from them without asking a node. No
// window admits more because of loans. WithoutLoans turns them off.
//
// # Refusals
//
// The Client remembers a refusal for its RetryAfter, a second at most, and refuses the same check at once meanwhile, so
// that a caller that keeps asking costs the cluster nothing. WithoutMemory has the conditions, and turns this off.
//
// # When no node answers
//
// A check over the limit gets a Decision, never an error. If no node answers, the fail policy (WithOnError; FailOpen by
// default) answers Allow, AllowN, Peek, Check, All, Acquire, Reserve, ReserveAll, Extend and Wait: the error is nil and
// the Decision has FailedOpen or FailedClosed set. Such an answer comes within the client's timeout (WithTimeout, 1 s)
// and within nine tenths of the time that the context has left, so that the caller still has time to act on it.
//
// If a node leaves a call unanswered, because its connection broke or half of that time has passed, the Client sends
// the call once more, usually to another node, provided that it cannot charge twice. These are peeks, renewals,
// releases, resets, and charges with a RequestID, by which the cluster recognizes the repetition. (Nodes bound how many
// ids they keep. A repetition beyond that may be charged twice, which admits less, not more.) WithRetry gives every
// charge a RequestID.
//
// The Client avoids a node that has left a call unanswered while it can ask another one: by default for a second (the
// cooldown of WithBreaker). Then it sends the node a probe. When the node answers the probe, or a call, it gets its
// share of calls again. So a node that hangs costs the calls that were in flight to it when the first of them timed
// out. They are few, because the Client asks the healthy node with the fewest calls in flight; a program that asks one
// check after the other loses a single one. Each of these calls is sent to another node within the timeout, as above,
// or answered by the fail policy at its end. A caller with a short deadline makes the Client avoid a node only if it
// waited for a tenth of the client's timeout. If every node hangs, calls go to all in turn, and the circuit breaker
// decides. A node that answers probes and leaves calls unanswered costs as much again after each such second.
//
// If some nodes answer their checks of a call and others do not, the fail policy answers the rest.
//
// After several failures in a row, of any nodes, a circuit breaker opens (WithBreaker; 5 failures, 1 s). Then the fail
// policy answers at once, except for one call at a time that finds out whether a node answers again. A call that ran
// out of its own context's time, rather than the client's, does not count, so that a caller with a short deadline
// cannot open the breaker for the others.
//
// No fail policy answers Charge, Refund, Reset and a Lease's Release: they return ErrUnavailable. A Reservation's
// Commit and Cancel return nil, and the Client goes on with them in the background.
package client
