package algo

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"time"
)

// Limits as bytes begin with a byte for the version of the format, 1, and one for their number. Then comes for each its
// algorithm, its period and flags (1: it counts refusals, 2: it carries debt), a byte each; its slots, capacity, window, max_log
// and max_debt as unsigned varints and its limit as a signed one, zigzag-coded; and its time zone's name, one byte of length and the
// bytes. Equal limits are equal bytes.
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
		dst = appendInt(dst, l.Limit)
		name := ""
		if l.Zone != nil {
			name = l.Zone.String()
		}
		name = name[:min(len(name), longestZone)] // what is longer is no zone, and ParseLimits will say so
		dst = append(append(dst, byte(len(name))), name...)
	}
	return dst
}

// ParseLimits reads the limits that data begins with and returns what follows them. The bytes need not be trusted: what
// it returns is valid.
//
// The error is ErrLimits, or a *FieldError for limits that cannot be or name a time zone that is not known here. Zones
// are looked up each time, which takes long: who gets the same bytes often had better remember what they mean.
func ParseLimits(data []byte) (ls Limits, rest []byte, err error) {
	r := &reader{data: data}
	if r.byte() != limitsVersion {
		return nil, nil, ErrLimits
	}
	n := int(r.byte())
	if n > MaxLimits {
		return nil, nil, ErrLimits
	}
	for i := range n {
		l := Limit{Algorithm: Algorithm(r.byte()), Period: Period(r.byte())}
		flags := r.byte()
		l.CountDenied, l.CarryDebt = flags&limitDenied != 0, flags&limitCarry != 0
		l.Slots = int32(r.uint(math.MaxInt32))
		l.Capacity = r.uint(math.MaxInt64)
		l.Window = time.Duration(r.uint(math.MaxInt64))
		l.MaxLog = r.uint(math.MaxInt64)
		l.MaxDebt = r.uint(math.MaxInt64)
		l.Limit = r.int(math.MaxInt64)
		name := r.string(longestZone)
		if r.err != nil || flags >= limitUnknown {
			return nil, nil, ErrLimits
		}
		if name != "" {
			if l.Zone, err = parseZone(name); err != nil {
				return nil, nil, inLimits(err, i, n)
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

// parseZone finds a time zone by its name in the IANA database: not what the machine takes for its own, nor any file.
func parseZone(name string) (*time.Location, error) {
	odd := func(r rune) bool {
		return !('A' <= r && r <= 'Z' || 'a' <= r && r <= 'z' || '0' <= r && r <= '9' || strings.ContainsRune("_+-/", r))
	}
	if name != time.Local.String() && strings.IndexFunc(name, odd) < 0 && !strings.HasPrefix(name, "/") {
		if zone, err := time.LoadLocation(name); err == nil {
			return zone, nil
		}
	}
	return nil, &FieldError{Field: "time_zone", Message: fmt.Sprintf("%q is not known here", name)}
}
