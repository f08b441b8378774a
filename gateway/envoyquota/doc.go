// Package envoyquota implements Envoy's rate limit quota service (envoy.service.rate_limit_quota.v3): it divides the limits of policies
// among data planes, which decide by themselves and report every five seconds.
//
// A stream is one data plane. For each of its buckets the owner of the key lends a part of the limit (algo.Quota), which the data plane gets as an
// assignment of a token bucket with an end. A loan is held until nobody can spend of it any more, whatever happens to the
// data plane, the stream or this node. See DESIGN.md.
//
// What it does not promise: bounds where a message takes longer than Delivery, or where a data plane admits requests without an assignment;
// that a data plane gets a part of a limit that others have used up.
package envoyquota
