// Package limit has the types of the domain: what a caller asks (Target, Check, Acquire, Reserve), the answers
// (Decision, Result, Error), the bounds on both, and the interface Service.
//
// It imports algo only; the service, the front ends, the client and authentication use it. It decides nothing and knows
// no wire format. It does not promise that a Service decides in this process.
package limit
