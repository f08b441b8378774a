package limit

import (
	"strconv"
	"time"
)

// Usage is what work has used, or is expected to: tokens of each class, such as "input", "cached" and "output", which the prices of a
// policy turn into units. At most MaxClasses.
type Usage map[string]int64

// Amount is a cost. A Usage is for policies with prices, and stands in place of Cost, which is 0 then.
type Amount struct {
	Cost  int64 // units
	Usage Usage // nil: Cost says it
}

// Bounds on what says of what kind work is.
const (
	MaxClasses = 16  // of a Usage
	MaxClass   = 128 // bytes
)

// Charge is a cost that has already happened, and is to count whether or not there is room for it.
type Charge struct {
	Target
	Amount
	RequestID string // as of a Check: without one, a charge whose answer was lost cannot be repeated safely
}

// Reserve asks for units for work whose cost is only known afterwards: the most that it may cost is charged now.
type Reserve struct {
	Target
	Amount // the most that the work may cost
	// Estimate says that this is not known: what the policy's estimate says is reserved, and the Amount where it has none. Front ends
	// set it, beside a Cost of 1, for callers who leave the cost out.
	Estimate bool
	// Class is of what kind the work is, such as the name of a model, for policies that estimate from what has been committed in the
	// same class. At most MaxClass bytes of UTF-8.
	Class     string
	TTL       time.Duration // at most MaxReservation; 0 stands for DefaultReservation
	RequestID string
}

// Extend adds to a reservation.
type Extend struct {
	Target
	Amount        // units more; 0: none
	ReservationID string
	TTL           time.Duration // how long it waits for Commit or Cancel from now on; 0: as long as before
	RequestID     string        // of the units
}

// Commit ends a reservation.
type Commit struct {
	Target
	Amount        // what the work has cost
	ReservationID string
	Exact         bool // an Amount above what was reserved is an error, and changes nothing
	// Bounded says that an Amount above what was reserved by more than the largest of the key's limits is an error, and changes nothing.
	// No commits of this kind bring the key further than that beyond a limit: what is more is not charged. Authorization sets it for
	// callers who may not Charge.
	Bounded bool
	Class   string // as in the Reserve: what the cost is an example of
}

// Settled is the answer to a Commit.
type Settled struct {
	Refunded int64 // units given back: fewer than were not used when some had left their window
	Excess   int64 // units charged beyond what was reserved
	Over     bool  // there was no room for all that exceeds what was reserved
}

// SettledResult is the answer to one Commit of several: a Settled, or an Error that concerns this one alone.
type SettledResult struct {
	Settled
	Err error // nil or *Error
}

// ValidEach says what is wrong with a list of n elements of which each has an answer of its own.
func ValidEach(list string, n int) *Error {
	switch {
	case n == 0:
		return NewError(Invalid, list, "is empty: name at least one reservation")
	case n > MaxBatch:
		return NewError(TooLarge, list, "has more than the "+strconv.Itoa(MaxBatch)+" elements that are taken at once")
	}
	return nil
}

// How long a reservation waits for its Commit or Cancel.
const (
	DefaultReservation = time.Minute
	MaxReservation     = time.Hour
)
