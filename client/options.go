package client

import (
	"cmp"
	"crypto/tls"
	"log/slog"
	"time"

	"google.golang.org/grpc"
)

// OnError is a fail policy: what to answer when no node answers.
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

// WithTimeout bounds every call to the cluster, a retry included. Default DefaultTimeout; it must be positive. If the
// context ends sooner, the call may take nine tenths of the time that the context has left.
func WithTimeout(d time.Duration) Option { return func(o *options) { o.timeout = d } }

// WithOnError sets the fail policy, which answers when no node does. Default FailOpen. If a node answers but cannot
// reach a key's owner, the policy's own on_error answers instead.
func WithOnError(p OnError) Option { return func(o *options) { o.onError = p } }

// WithBreaker sets after how many failures in a row the circuit breaker opens, and for how long the fail policy then
// answers before a call goes to a node again. Default DefaultBreakerFailures and DefaultBreakerCooldown. With 0
// failures there is no breaker. The cooldown is also how long the Client avoids a single node that left a call
// unanswered while it can ask others; for that, a cooldown of 0 stands for DefaultBreakerCooldown.
func WithBreaker(failures int, cooldown time.Duration) Option {
	return func(o *options) { o.failures, o.cooldown = failures, cooldown }
}

// WithRetry makes every call repeatable: charges carry a request id that the Client makes, so that a charge whose node
// hangs or whose connection broke can be sent to another node and is made once. Off by default, because the cluster
// remembers an id for every charge, some 128 bytes for at least a minute. Without WithRetry the fail policy answers
// such a charge.
func WithRetry() Option { return func(o *options) { o.retry = true } }

// WithoutMemory turns off the memory of refusals. By default the Client remembers a refusal for its RetryAfter, a
// second at most, or until it sees units of the key admitted. Meanwhile it refuses the same check with the same cost at
// once, with what is left of RetryAfter and ResetAfter. Admissions elsewhere only postpone the moment at which a check
// passes. So such a refusal is wrong only after another program's Refund, Reset or Cancel or a raised limit, for less
// than that second; those of this Client take effect at once. Not remembered are refusals with Partial, of leases,
// reservations and atomic checks, of limits with count_denied, in shadow mode, and while a reservation of the key is
// pending. The memory holds some thousands of keys.
func WithoutMemory() Option { return func(o *options) { o.memory = false } }

// WithoutLoans turns off loans. By default this Client borrows units of keys that it asks about often (16 times in 100
// ms or more, under a policy whose limits are all 64 or more), admits from them without asking a node, and reports what
// it has spent within some 250 ms. As many checks are admitted as if the owner had admitted each unit: units on loan
// are not free for other callers, and the owner recalls them before it refuses a check for want of them. The Remaining
// of other callers does not contain them. If a program is killed, its loans, of at most an eighth of a limit each,
// cannot be used for a second and are then charged. The Client never borrows from a policy with lend: false.
func WithoutLoans() Option { return func(o *options) { o.loans = false } }

// WithTLS encrypts the connections. Nil stands for an empty configuration: the authorities of this host. Default: plain
// text. The configuration must not be modified afterwards.
func WithTLS(config *tls.Config) Option {
	return func(o *options) { o.tls = cmp.Or(config, new(tls.Config)) }
}

// WithDialOptions passes options to gRPC after the client's own: credentials per call, interceptors, a dialer. Without
// one, the client connects directly, without a proxy.
func WithDialOptions(opts ...grpc.DialOption) Option {
	return func(o *options) { o.dial = append(o.dial, opts...) }
}

// dialOptions returns the defaults of Dial with opts applied, or an error that names the invalid option.
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
