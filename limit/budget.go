package limit

import "time"

// Usage is the tokens of each class, such as "input", "cached" and "output", that work has used or is expected to use.
// A policy's prices convert them to units. At most MaxClasses classes.
type Usage map[string]int64

// Amount is a cost in units, or a Usage, for policies with prices; Cost must be 0 then.
type Amount struct {
	Cost  int64 // units
	Usage Usage // nil: Cost is the cost
}

// Bounds of a Usage and of a Class.
const (
	MaxClasses = 16  // classes of a Usage
	MaxClass   = 128 // bytes of a Class
)

// Charge is a cost that has already happened, and is charged whether or not there is room.
type Charge struct {
	Target
	Amount
	RequestID string // as in Check; without it a charge whose answer was lost cannot be repeated safely
}

// Reserve asks for units for work whose cost is known later. The largest possible cost is charged now.
type Reserve struct {
	Target
	Amount // the most that the work may cost
	// Estimate says that the largest cost is not known: the policy's estimate is reserved, or the Amount if the policy
	// has none. Front ends set it, with a Cost of 1, when a caller leaves the cost out.
	Estimate bool
	// Class is the kind of the work, such as the name of a model: a policy may estimate from commits of the same class.
	// At most MaxClass bytes of UTF-8.
	Class     string
	TTL       time.Duration // at most MaxReservation; 0: DefaultReservation
	RequestID string
	// Release says that the units come back if the TTL passes without a commit, as under on_expiry: release.
	Release bool
}

// Extend adds units or time to a reservation.
type Extend struct {
	Target
	Amount        // additional units; 0: none
	ReservationID string
	TTL           time.Duration // from now until the reservation expires; 0: as before
	RequestID     string        // for the units
}

// Commit ends a reservation.
type Commit struct {
	Target
	Amount        // the cost of the work
	ReservationID string
	Exact         bool // an Amount above what was reserved is an error, and changes nothing
	// Bounded says that an Amount that exceeds the reservation by more than the largest of the key's limits is an
	// error, and changes nothing. Such commits together bring a key at most that far beyond a limit; further units are
	// not charged. Authorization sets it for callers without the right to Charge.
	Bounded bool
	Class   string // as in the Reserve; the cost is an example for its estimate
}

// Settled is the answer to a Commit.
type Settled struct {
	Refunded int64 // units given back: fewer than were unused when some had left their window
	Excess   int64 // units charged beyond the reservation
	Over     bool  // there was no room for all units beyond the reservation
}

// SettledResult is the answer to one Commit of several: a Settled, or an error about this one only.
type SettledResult struct {
	Settled
	Err error // nil or *Error
}

// ValidEach returns what is wrong with a list of n reservations, such as "commits"; nil: nothing.
func ValidEach(list string, n int) *Error { return validList(list, n, "name at least one reservation") }

// Bounds of the time in which a reservation waits for Commit or Cancel.
const (
	DefaultReservation = time.Minute
	MaxReservation     = time.Hour
)
