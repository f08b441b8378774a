// Package client asks a Weir cluster whether something may go ahead.
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
// New gives a *Client that asks a limit.Service; that of package client/local decides in this process, without a cluster, for tests
// and for programs that are a single process. A function that needs one limit is best written against the methods it uses:
//
//	type allower interface {
//		Allow(ctx context.Context, key string) (client.Decision, error)
//	}
//
// # Names
//
// Names are those of golang.org/x/time/rate where it has one. The differences: a Limiter is one limit for any number of keys, so
// every method takes a key; Allow takes a context and answers with a Decision, because the check may go to a node; Wait returns the
// Decision too; a cost is an int64, and a cost of 0 peeks. Reserve takes units now, for work whose cost is known only afterwards,
// and its Reservation is ended by Commit or Cancel; Refund gives back a charge that was made without one.
//
// # How checks travel
//
// The Client learns from the nodes who owns which keys, and asks the owners directly; where it cannot, any node. Checks of
// concurrent callers share messages on one stream to each node: a check is sent at once when nothing is in flight to its node,
// or when as much has gathered as is in flight. There is no timer, a lone caller waits for no other, and among hundreds of callers a
// check costs some microseconds. Acquire, Reserve and calls that give back are unary calls, to the owner as well; All is one call to
// the node that owns most of its keys.
//
// At most 20,000 checks wait for one node; while it does not answer, the fail policy answers further ones at once. Checks that a node did
// not begin, because it stops or its connection broke before, are sent to another one.
//
// If the trace of a caller's context is sampled and the nodes trace, their spans hang below the span in that context. The Client
// makes no spans of its own.
//
// # Loans
//
// The Client borrows units of keys that it asks about often, and admits from them without asking. No window admits more for it.
// WithoutLoans turns it off.
//
// # Refusals
//
// A refusal is remembered for its RetryAfter, a second at most, and the same check is refused at once meanwhile: a caller that keeps
// asking costs the cluster nothing. WithoutMemory has the conditions, and turns it off.
//
// # When no node answers
//
// "Over the limit" is a Decision, never an error. When the cluster cannot be reached, Allow, AllowN, Peek, Check, Acquire and Wait
// follow the fail policy (WithOnError; FailOpen by default), with a nil error and the Decision's FailedOpen or FailedClosed set. Such an
// answer comes within the client's timeout (WithTimeout, 1 s) and within nine tenths of what the context leaves, so that its caller
// still has time to act on it.
//
// A call that one node leaves unanswered, because its connection broke or half of that time has passed, is sent once more, usually to
// another node, if that charges nothing twice: peeks, renewals, releases, resets, and charges with a RequestID, by which the
// cluster recognizes the repetition (nodes bound how many they keep; beyond that a repetition may be charged twice, which admits
// less, not more). WithRetry gives every charge one.
//
// A node that leaves a call unanswered is avoided as long as another can be asked: by default for a second (the cooldown of
// WithBreaker). After that the client sends it a probe, and gives it its share again when it answers that, or a call. So a node that hangs
// costs the calls in flight to it when the first of them timed out. They are few, because of the healthy nodes the one with the
// fewest calls in flight is asked; a program that asks one check after the other loses a single one. Each is sent elsewhere
// within the timeout, as above, or answered by the fail policy at its end. A caller with a short deadline marks a node as hanging for the
// others if it waited for a tenth of the client's timeout. When every node hangs, calls go to all in turn, and the circuit breaker
// judges. A node that answers probes and yet leaves calls unanswered costs as much again after each such second.
//
// When a call with several checks is answered by some nodes and not by others, the fail policy answers the rest.
//
// After several failures in a row, of whichever nodes, a circuit breaker opens (WithBreaker; 5 failures, 1 s): the fail policy answers
// at once, except for one call at a time that finds out whether a node answers again. A call that ran out of its own context's
// time, rather than of the client's, does not count: otherwise a caller with a short deadline could open the breaker for all.
//
// Refund, Reset, a Lease's Release and a Reservation's Commit and Cancel have no such answer; they return ErrUnavailable.
package client
