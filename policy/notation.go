package policy

import (
	"cmp"
	"fmt"
	"math"
	"regexp"
	"strings"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/strictyaml"
)

const rateHint = "write a limit and a window, such as 10/1s or 1000/1h"

// ParseRate reads a limit and its window in the short notation: "10/1s", "5/1m", "1000/1h", "1/1d12h". Both must be
// within the bounds of package algo. The error does not name a field.
func ParseRate(s string) (limit int64, window time.Duration, err error) {
	left, right, ok := strings.Cut(s, "/")
	if !ok {
		return 0, 0, fmt.Errorf("%s is not a rate: %s", strictyaml.Show(s), rateHint)
	}
	if limit, err = strictyaml.ParseInteger(left, 1, algo.MaxLimit); err != nil {
		return 0, 0, fmt.Errorf("limit %w", err)
	}
	if window, err = ParseDuration(right); err == nil {
		err = checkWindow(window)
	}
	if err != nil {
		return 0, 0, fmt.Errorf("window %w", err)
	}
	return limit, window, nil
}

// ParseDuration reads a duration as time.ParseDuration does, without a sign. It may begin with a number of days of 24
// hours: "250ms", "1h30m", "1d", "1d12h", "0.5d". The error does not name a field.
func ParseDuration(s string) (time.Duration, error) {
	if s == "" || !durationShape.MatchString(s) {
		return 0, fmt.Errorf("%s is not a duration: write a number and a unit (ms, s, m, h or d), such as 90s or 1d12h",
			strictyaml.Show(s))
	}
	number, tail, hasDays := strings.Cut(s, "d")
	if !hasDays {
		number, tail = "0", s
	}
	days, err := time.ParseDuration(number + "h")
	rest, restErr := time.ParseDuration(cmp.Or(tail, "0"))
	// The text has the shape of a duration, so that an error means overflow.
	if err != nil || restErr != nil || days > math.MaxInt64/24 || rest > math.MaxInt64-24*days {
		return 0, fmt.Errorf("%s is too long for a duration", strictyaml.Show(s))
	}
	return 24*days + rest, nil
}

var durationShape = func() *regexp.Regexp {
	const number = `([0-9]+(\.[0-9]*)?|\.[0-9]+)`
	return regexp.MustCompile(`^(` + number + `d)?(` + number + `(ns|us|µs|μs|ms|s|m|h))*$`)
}()

// checkWindow checks a window, or the ttl of a lease, against the bounds of package algo.
func checkWindow(d time.Duration) error {
	if d < algo.MinWindow || d > algo.MaxWindow {
		return fmt.Errorf("must be from %v to %dd", algo.MinWindow, algo.MaxWindow/(24*time.Hour))
	}
	return nil
}
