// Package algo says what a limit means: seven rate-limiting algorithms as plain functions of a state, a request and the
// present instant.
//
// Nothing here reads a clock, locks, blocks, logs or draws a random number. A decision depends on the state, the
// request and the instant that it is given alone, so a test, a simulator and a server get the same answers from the
// same history.
//
// The package does not lock: the caller that owns an Arena does. Instants mean something only within the process whose
// clock they come from; a state leaves its process as ages (see AppendSince).
//
// The files: limits.go has what all algorithms have in common, and the interface (counter) that each algorithm
// implements in a file of its own; decide.go decides a request; arena.go is the memory; hold.go gives back the units of
// reservations; join.go unites the states of two sides of a split; loan.go and quota.go lend units; snapshot.go and
// extend.go write and read states.
package algo

import (
	"errors"
	"fmt"
	"time"
)

// Algorithm is the way a limit counts. The zero value is no algorithm.
type Algorithm uint8

// The algorithms, in the order of the documentation. Their numbers are part of the snapshot format and of the wire.
const (
	FixedWindow    Algorithm = 1
	SlidingWindow  Algorithm = 2
	SlidingCounter Algorithm = 3
	SlidingLog     Algorithm = 4
	TokenBucket    Algorithm = 5
	LeakyBucket    Algorithm = 6
	Concurrency    Algorithm = 7
)

var algorithmNames = [...]string{
	FixedWindow: "fixed_window", SlidingWindow: "sliding_window", SlidingCounter: "sliding_counter",
	SlidingLog:  "sliding_log",
	TokenBucket: "token_bucket", LeakyBucket: "leaky_bucket", Concurrency: "concurrency",
}

// String returns the name used in policies, such as "sliding_log".
func (a Algorithm) String() string {
	if a == 0 || int(a) >= len(algorithmNames) {
		return fmt.Sprintf("algorithm(%d)", uint8(a))
	}
	return algorithmNames[a]
}

// ParseAlgorithm is the inverse of String.
func ParseAlgorithm(name string) (Algorithm, bool) {
	for i, n := range algorithmNames {
		if n == name && i > 0 {
			return Algorithm(i), true
		}
	}
	return 0, false
}

// Period is what a fixed window is aligned to. The zero value means that the window opens with the first admission and
// lasts for Limit.Window.
type Period uint8

// The calendar periods, of which a week begins on Monday, and Epoch: windows of Limit.Window one after the other since
// 1970-01-01 UTC, whatever the calendar says.
const (
	Minute Period = 1
	Hour   Period = 2
	Day    Period = 3
	Week   Period = 4
	Month  Period = 5
	Year   Period = 6
	Epoch  Period = 7
)

var periodNames = [...]string{Minute: "minute", Hour: "hour", Day: "day", Week: "week", Month: "month", Year: "year",
	Epoch: "epoch"}

// String returns the name used in policies, such as "month".
func (p Period) String() string {
	if p == 0 || int(p) >= len(periodNames) {
		return fmt.Sprintf("period(%d)", uint8(p))
	}
	return periodNames[p]
}

// ParsePeriod is the inverse of String, for the calendar's periods: Epoch is none of them.
func ParsePeriod(name string) (Period, bool) {
	for i, n := range periodNames {
		if n == name && i > 0 && Period(i) <= Year {
			return Period(i), true
		}
	}
	return 0, false
}

// Instant is one reading of the deciding process's clock. Everything but calendar windows reads Mono alone.
type Instant struct {
	Mono int64 // nanoseconds on a clock that never steps, whose origin is the same for every state of a process
	Wall int64 // nanoseconds since 1970-01-01 UTC; may step
}

// Bounds of what a Limit may ask for.
const (
	MaxLimit      = int64(1) << 53       // the largest limit, capacity and cost: exact in a JSON number
	MinWindow     = time.Millisecond     // the shortest window and lease
	MaxWindow     = 366 * 24 * time.Hour // the longest window and lease
	DefaultSlots  = 10                   // of a sliding window
	MaxSlots      = 100
	DefaultMaxLog = int64(16) << 20     // the largest sliding_log limit unless MaxLog is raised
	MaxLimits     = 8                   // limits in one policy
	MaxLeases     = chunkLen * branches // leases one concurrency state can hold at a time
	// MaxFill bounds the time an empty bucket takes to fill (capacity × window / limit), so that instants fit 64 bits.
	MaxFill = 100 * 366 * 24 * time.Hour
)

// Unlimited as a Limit's Limit admits everything and keeps no state.
const Unlimited int64 = -1

// Never is the RetryAfter of a request that can never pass.
const Never time.Duration = -1

// Limit is one limit: what a policy's algorithm, parameters and window compile to. It is comparable, and two equal
// Limits mean the same. Its zero value is not valid.
type Limit struct {
	Algorithm Algorithm
	// Period aligns a fixed window to the calendar in Zone; Window is then zero. Epoch aligns one of Window, in whole
	// seconds, to 1970. Zero: the first admission opens it.
	Period Period
	// Anchor is the day of the month, 1 to 31, on which windows of the period Month begin; in a month that is shorter
	// they begin on its last day. 0 stands for 1. Of no other period.
	Anchor int8
	// CountDenied makes a refused request count as well (fixed_window, sliding_window, sliding_counter, sliding_log).
	CountDenied bool
	// CarryDebt makes a fixed window (not of a calendar's minute or hour) begin with what its predecessor was charged
	// beyond Limit. Without it the end of a window forgets that.
	CarryDebt bool
	// Slots is the number of slots of a sliding_window; 0 stands for DefaultSlots.
	Slots int32
	// Limit is the number of units a window admits, a bucket regains per Window, or leases may hold at once:
	// 1 to MaxLimit, or Unlimited.
	Limit int64
	// Capacity is what a token bucket holds when full, or a leaky bucket's queue; 0 stands for Limit.
	Capacity int64
	// Window is the length of the window, MinWindow to MaxWindow; of a concurrency limit, the longest life of a lease.
	Window time.Duration
	// MaxLog allows a sliding_log Limit above DefaultMaxLog; 0 stands for DefaultMaxLog. It has no part in a decision.
	MaxLog int64
	// MaxDebt is how far charges that ask for no room (Request.Always) can bring the units in use beyond Limit
	// (Capacity of a bucket); the rest is not charged. 0: no bound, except for sliding_log, where it stands for Limit,
	// because each entry of a log takes memory.
	MaxDebt int64
	// Zone is the time zone of calendar periods; nil stands for UTC.
	Zone *time.Location
}

// FieldError is a Limit that cannot be, and the field that makes it so, under its name in policies.
type FieldError struct {
	Field   string // such as "window"
	Message string // what is wrong and what would be right, without the field's name
}

func (e *FieldError) Error() string { return e.Field + ": " + e.Message }

// ErrNoMemory is returned when a state cannot take what a request would add because the Arena's budget is used up.
// Nothing was charged.
var ErrNoMemory = errors.New("algo: no memory for the state to grow")

// Request is what one check asks of a state.
type Request struct {
	// Cost is the number of units asked for, 0 to MaxLimit; 0 peeks: it answers whether a cost of 1 would pass. With
	// Always it may be negative.
	Cost int64
	// Partial grants min(Cost, what is left) in place of all or nothing.
	Partial bool
	// Always charges Cost whether or not there is room for it; see Limits.Decide. Not for concurrency, nor with
	// Partial.
	Always bool
	// Bounded, with Always, charges each limit only as far as its units in use, and those on loan, come to MaxDebt
	// units beyond it. It is as if the limit had this MaxDebt, where its own is not less.
	Bounded bool
	MaxDebt int64 // of Bounded
	// Nonce makes the lease id of a concurrency limit hard to guess; the caller draws it at random.
	Nonce uint64
	// TTL is the life of the lease, at most the limit's Window; 0 stands for the limit's Window.
	TTL time.Duration
	// OnLoan is the number of units on loan (see Loans): they are neither in use nor free.
	OnLoan int64
	// OnLoanFor is the time until none of them is on loan any more.
	OnLoanFor time.Duration
}

// Decision is the answer to a Request. Durations count from the instant of the decision. RetryAfter of concurrency is
// the time until the first lease expires.
type Decision struct {
	Allowed bool
	// Units admitted: Cost, fewer with Partial, 0 when refused or peeking; with Always, charged.
	Granted    int64
	Limit      int64         // of the limit that decided (capacity for buckets); Unlimited
	Remaining  int64         // units that would pass now, after this decision; Unlimited when Limit is
	RetryAfter time.Duration // 0 when allowed; until the same request passes if nothing else is admitted; Never
	ResetAfter time.Duration // until the state equals a new one (concurrency: at most)
	Delay      time.Duration // leaky_bucket: until the admitted request may go
	Lease      uint64        // concurrency: the lease; never 0 when one was given
	Tightest   int           // index of the limit that Limit, Remaining, RetryAfter and ResetAfter speak of
}
