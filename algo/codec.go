package algo

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// Limits as bytes:
//
//	version, number of limits                                         a byte each
//	for each limit:
//	algorithm, period, flags (limitDenied, limitCarry)                a byte each
//	slots, capacity, window in ns, max_log, max_debt, anchor          unsigned varints
//	limit                                                             signed varint, zigzag-coded
//	name of the time zone                                             a byte of length, and the bytes
//
// Equal limits are equal bytes.
const limitsVersion = 1

// Flags of a limit.
const (
	limitDenied = 1 << iota
	limitCarry
	limitUnknown // and all above
)

// longestZone is more than the longest name of a time zone.
const longestZone = 64

// ErrLimits is returned for bytes that are no limits.
var ErrLimits = errors.New("algo: malformed limits")

// AppendLimits appends limits, which must be valid, to dst and returns it.
func AppendLimits(dst []byte, ls Limits) []byte {
	dst = append(dst, limitsVersion, byte(len(ls)))
	for i := range ls {
		l := &ls[i]
		flags := byte(0)
		if l.CountDenied {
			flags |= limitDenied
		}
		if l.CarryDebt {
			flags |= limitCarry
		}
		dst = append(dst, byte(l.Algorithm), byte(l.Period), flags)
		dst = appendUint(dst, int64(l.Slots))
		dst = appendUint(dst, l.Capacity)
		dst = appendUint(dst, int64(l.Window))
		dst = appendUint(dst, l.MaxLog)
		dst = appendUint(dst, l.MaxDebt)
		dst = appendUint(dst, int64(l.Anchor))
		dst = appendInt(dst, l.Limit)
		name := ""
		if l.Zone != nil {
			name = l.Zone.String()
		}
		name = name[:min(len(name), longestZone)] // a longer name is no zone, and ParseLimits rejects it
		dst = append(append(dst, byte(len(name))), name...)
	}
	return dst
}

// ZoneError is a time zone that the caller of ParseLimits does not know.
type ZoneError struct{ Name string }

func (e *ZoneError) Error() string { return fmt.Sprintf("algo: the time zone %q is not known", e.Name) }

// ParseLimits reads the limits that data begins with and returns the rest of data. The bytes need not be trusted:
// limits that it returns are valid. zone returns the time zone of a name, or nil for one that it does not know. It is
// the caller's, because finding a zone reads a file, which the caller may have to do before it takes a lock.
//
// The error is ErrLimits, a *FieldError for limits that are not valid, or a *ZoneError.
func ParseLimits(data []byte, zone func(name string) *time.Location) (ls Limits, rest []byte, err error) {
	r := &reader{data: data}
	if r.byte() != limitsVersion {
		return nil, nil, ErrLimits
	}
	n := int(r.byte())
	if n > MaxLimits {
		return nil, nil, ErrLimits
	}
	for range n {
		l := Limit{Algorithm: Algorithm(r.byte()), Period: Period(r.byte())}
		flags := r.byte()
		l.CountDenied, l.CarryDebt = flags&limitDenied != 0, flags&limitCarry != 0
		l.Slots = int32(r.uint(math.MaxInt32))
		l.Capacity = r.uint(math.MaxInt64)
		l.Window = time.Duration(r.uint(math.MaxInt64))
		l.MaxLog = r.uint(math.MaxInt64)
		l.MaxDebt = r.uint(math.MaxInt64)
		l.Anchor = int8(r.uint(maxAnchor))
		l.Limit = r.int(math.MaxInt64)
		name := r.string(longestZone)
		if r.err != nil || flags >= limitUnknown {
			return nil, nil, ErrLimits
		}
		if name != "" {
			if l.Zone = zone(name); l.Zone == nil {
				return nil, nil, &ZoneError{name}
			}
		}
		ls = append(ls, l)
	}
	if r.err != nil {
		return nil, nil, ErrLimits
	}
	if err := ls.Validate(); err != nil {
		return nil, nil, err
	}
	return ls, r.data, nil
}
