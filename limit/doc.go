// Package limit holds the words of the domain: what a caller asks (Target, Check, Acquire, Reserve), what it is told
// (Decision, Result, Error), the bounds on both, and the Service that answers.
//
// It is a leaf: the service, the protocols of callers, the client and authentication all stand on it. It decides nothing,
// knows no wire format, and does not promise that a Service is reached in this process.
package limit
