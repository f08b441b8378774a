// Package envoy is the front end for Envoy: its rate limit service, envoy.service.ratelimit.v3, with configuration files in the
// format of envoyproxy/ratelimit, what that answers to a POST of JSON, and Kuadrant's service by the same files.
//
// It finds the limit of each descriptor, asks a [limit.Service] and words the answer; it decides nothing, and keeps no state but when the
// reservations of Kuadrant's callers expire. What a caller of the reference relies on is the same here; docs/envoy.md lists what is not.
//
// What it does not promise: to know who asks (the listener's interceptor does), rate limit quotas
// (envoy.service.rate_limit_quota.v3), configuration by xDS, or the reference's names of metrics.
//
// The generated types of Envoy's and Kuadrant's APIs stay in this package: two registrations of one protocol file in a
// program panic, so no package that other programs link may import them.
package envoy
