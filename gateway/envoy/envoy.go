// Package envoy is the front end for Envoy: its rate limit service (envoy.service.ratelimit.v3) with configuration
// files in the format of envoyproxy/ratelimit (the reference), the reference's POST /json, and Kuadrant's service on
// the same files. Package envoyquota uses the same configuration.
//
// The path of a request: Service.matches finds the limit of each descriptor (domain.match), Service.ask has a
// [limit.Service] decide, conclude makes a status of each decision, and response makes the answer. The package decides
// nothing. Its only state is the time at which reservations of Kuadrant's callers expire. It behaves as the reference
// does wherever docs/envoy.md names no difference.
//
// It does not promise to know the caller (the listener's interceptor does), configuration by xDS, or the reference's
// names of metrics.
//
// The generated types of Envoy's and Kuadrant's APIs stay in this package and envoyquota. Two registrations of one
// protocol file in a program panic, so packages that other programs link must not import them.
package envoy
