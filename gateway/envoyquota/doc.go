// Package envoyquota implements Envoy's rate limit quota service (envoy.service.rate_limit_quota.v3): it divides the
// limits of policies among data planes, which decide by themselves and report every five seconds.
//
// A stream belongs to one data plane. For each of its buckets the owner of the key lends a part of the limit
// (algo.Quota). The data plane gets that part as an assignment: a token bucket with an end. The owner holds the loan
// until nothing more can be spent of the assignment, even if the data plane, the stream or this node is lost. See
// DESIGN.md.
//
// It does not promise bounds where a message takes longer than Delivery or a data plane admits requests without an
// assignment, nor that a data plane gets a part of a limit that other callers have used up.
//
// The path of a report: Service.one receives the message; session.handle finds the buckets, bucket.report attributes
// what was spent to loans, bucket.ask decides whether a new loan is needed, session.ask has the owners answer, and
// task.answered decides what the data plane is told. plane.go must stay free of clocks and calls, so that its tests can
// give it any instant.
package envoyquota
