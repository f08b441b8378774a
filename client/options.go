package client

import (
	"crypto/tls"
	"log/slog"
	"time"

	"google.golang.org/grpc"
)

// OnError is a fail policy: the answer when no node can be reached.
type OnError uint8

// The fail policies. The zero value is FailOpen.
const (
	FailOpen   OnError = iota // admit
	FailClosed                // refuse
)

// String returns open or closed.
func (p OnError) String() string {
	if p == FailClosed {
		return "closed"
	}
	return "open"
}

// Defaults of the options.
const (
	DefaultTimeout         = time.Second
	DefaultBreakerFailures = 5
	DefaultBreakerCooldown = time.Second
)

// Option is a setting of Dial.
type Option func(*options)

type options struct {
	timeout  time.Duration // 0: none
	onError  OnError
	failures int
	cooldown time.Duration
	retry    bool
	memory   bool // refusals are remembered
	loans    bool
	tls      *tls.Config
	token    string // empty: none
	dial     []grpc.DialOption
	log      *slog.Logger
	observer func(Observed)
}

// WithTimeout bounds every call to the cluster, a retry included. Default DefaultTimeout; it must be positive. A context
// that ends sooner bounds the call to nine tenths of what it leaves.
func WithTimeout(d time.Duration) Option { return func(o *options) { o.timeout = d } }

// WithOnError sets the fail policy for when no node can be reached. Default FailOpen. When a node answers but cannot reach a key's
// owner, the policy's own on_error answers instead.
func WithOnError(p OnError) Option { return func(o *options) { o.onError = p } }

// WithBreaker sets after how many failures in a row the circuit breaker opens, and for how long it then answers by the fail policy
// before it lets a call through to try. Default DefaultBreakerFailures and DefaultBreakerCooldown. With 0 failures there is no
// breaker. The cooldown is also the time for which a single node that left a call unanswered is avoided while others can be asked;
// there, 0 stands for DefaultBreakerCooldown.
func WithBreaker(failures int, cooldown time.Duration) Option {
	return func(o *options) { o.failures, o.cooldown = failures, cooldown }
}

// WithRetry makes every call repeatable: charges carry a request id of the client's own, so that one whose connection broke, or whose
// node hangs, can be sent to another node and is charged once. Off by default, because the cluster then remembers an id, some 128
// bytes for at least a minute, for every charge. Without it the fail policy answers such a charge.
func WithRetry() Option { return func(o *options) { o.retry = true } }

// WithoutMemory turns off the memory of refusals. By default a refusal is remembered, for its RetryAfter but a second at most, until
// this Client sees units of the key admitted: the same check with the same cost is then refused at once, with what is left of
// RetryAfter and ResetAfter. Since admissions elsewhere only postpone the moment at which a check passes, such a refusal is wrong
// only after another program's Refund, Reset, Cancel or a raised limit, and for less than that second; those of this Client take
// effect at once. Not remembered: refusals with Partial, of leases, reservations and atomic checks, of limits with count_denied, in
// shadow mode, and while a reservation of the key is pending; at most some thousands of keys.
func WithoutMemory() Option { return func(o *options) { o.memory = false } }

// WithoutLoans turns off loans. By default this Client borrows units of keys that it asks about often (16 times in 100 ms and more,
// under a policy whose limits are all 64 or more), admits from them without asking a node, and reports what it has spent within some
// 250 ms. That is exactly as if the owner had admitted each unit: units on loan are not free for other callers, and the owner recalls
// them before it refuses a check for want of them. Others' Remaining excludes them. A program that is killed leaves its loans, of at most an
// eighth of a limit each, unusable for a second and then charged. A policy with lend: false is never borrowed from.
func WithoutLoans() Option { return func(o *options) { o.loans = false } }

// WithTLS encrypts the connections. Default: plain text. The configuration must not be modified afterwards.
func WithTLS(config *tls.Config) Option { return func(o *options) { o.tls = config } }

// WithDialOptions passes options on to gRPC, after the client's own: credentials per call, interceptors, a dialer. The client's own
// dialer connects directly, without a proxy.
func WithDialOptions(opts ...grpc.DialOption) Option {
	return func(o *options) { o.dial = append(o.dial, opts...) }
}

// dialOptions returns the defaults of Dial with opts applied, or an error that names the option to blame.
func dialOptions(opts []Option) (options, error) {
	o := options{
		timeout:  DefaultTimeout,
		failures: DefaultBreakerFailures,
		cooldown: DefaultBreakerCooldown,
		memory:   true,
		loans:    true,
		log:      slog.Default(),
	}
	for _, opt := range opts {
		opt(&o)
	}
	switch {
	case o.log == nil:
		return o, invalid("WithLogger", "must not be nil: slog.DiscardHandler discards")
	case o.timeout <= 0:
		return o, invalid("WithTimeout", "must be positive, not %v", o.timeout)
	case o.onError > FailClosed:
		return o, invalid("WithOnError", "must be FailOpen or FailClosed, not %d", o.onError)
	case o.failures < 0:
		return o, invalid("WithBreaker", "failures must not be negative, not %d", o.failures)
	case o.failures > 0 && o.cooldown <= 0:
		return o, invalid("WithBreaker", "cooldown must be positive, not %v", o.cooldown)
	}
	return o, nil
}
