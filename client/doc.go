// Package client asks a Weir cluster whether something may go ahead, or decides by itself in the same terms.
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
// Dial and Local both give a *Client, so that a program's tests, or the program itself while it is a single process,
// can decide without a cluster. A function that needs one limit is best written against the methods it uses:
//
//	type allower interface {
//		Allow(ctx context.Context, key string) (client.Decision, error)
//	}
//
// # Names
//
// Names are those of golang.org/x/time/rate where it has one. The differences: a Limiter is one limit for any number of
// keys, so that every method takes a key; Allow takes a context and answers with a Decision, because somebody else may
// have to be asked; Wait returns the Decision too; a cost is an int64, and a cost of 0 peeks. Reserve takes units now, for
// work whose cost is known only afterwards, and its Reservation is settled by Commit or Cancel; a charge that was made
// without one is given back by Refund.
//
// # How questions travel
//
// The Client learns from the nodes who owns which keys, and asks the owners directly; where it cannot, any node. What
// callers ask at the same time shares messages on one or two streams to each node: a question goes out at once when nothing
// is in flight to its node, or when as much has gathered as is in flight. There is no timer, a lone caller waits for nobody,
// and among hundreds a question costs some microseconds. Acquire, Reserve and what gives back are calls of their own, to the
// owner as well; All is one to the node that owns the most of its keys.
//
// At most 20,000 questions wait for one node; while one is stuck, further ones are answered by the fail policy at once. What
// a node did not begin, because it stops or its connection broke before, is asked of another one, whatever it is.
//
// The span that a caller's context carries is what the nodes' spans hang below, if its trace is sampled and the nodes trace. The
// Client makes none of its own.
//
// # Refusals
//
// A refusal is remembered for its RetryAfter, a second at most, and the same question answered at once meanwhile: a
// caller that hammers costs the cluster nothing. WithoutMemory tells the conditions, and turns it off.
//
// # When no node answers
//
// "Over the limit" is a Decision, never an error, and so is a cluster that cannot be reached: Allow, AllowN, Peek,
// Check, Acquire and Wait then go by the fail policy (WithOnError; FailOpen unless told otherwise), with a nil error and
// the Decision's FailedOpen or FailedClosed set. Such an answer comes within the client's timeout (WithTimeout, 1 s) and
// within nine tenths of what the context leaves, so that its caller still has time to act on it.
//
// A question that one node leaves unanswered, because its connection broke or half of that time has passed, is asked once
// more, usually of another node, where that charges nothing twice: peeks, renewals, releases, resets, and charges with a
// RequestID, by which the cluster knows the second from a new one (nodes bound how many they keep; past that a question
// may be charged twice, which admits less, not more). WithRetry gives every charge one.
//
// A node that leaves a question unanswered, because it hangs or its connection broke, is not asked any more as long as
// another can be: by default for a second (the cooldown of WithBreaker), after which the client asks it, beside the
// questions, whether it answers again, once per second, and gives it its share again when it does. So a hung node costs
// those questions that were with it when the first of them timed out. They are few: of nodes that are well the one with
// the fewest questions in flight is asked, so that one that hangs holds up about as many as each of the others has at a
// time, and a program that asks one question after the other loses a single one. Each is asked again elsewhere within the
// timeout, as told above, or answered by the fail policy at its end. A caller in a hurry finds out a hung node for the
// others if it waited for a tenth of the client's timeout. When every node hangs, questions go to all in turn as before,
// for the circuit breaker to judge. A node that answers whether it is there and yet leaves questions unanswered costs as
// much anew after each such second.
//
// When a call of several questions is answered by some nodes and not by others, the fail policy is for the rest.
//
// After several failures in a row, of whichever nodes, a circuit breaker opens (WithBreaker; 5 failures, 1 s): questions
// are answered by the fail policy at once, except for one at a time that finds out whether a node answers again. A
// question that ran out of its own context's time, rather than of the client's, does not count, or a caller in a hurry
// could open the breaker for all.
//
// Refund, Reset, a Lease's Release and a Reservation's Commit and Cancel have no answer to fall back on; they return ErrUnavailable.
package client
