package limit

import (
	"slices"
	"time"

	"github.com/weirlimit/weir/algo"
)

// MaxRemember bounds how long a refusal is remembered. For that time, less what is left of its retry_after, a check may
// be refused although another caller's refund or reset, or a raised limit, would have it admitted.
const MaxRemember = time.Second

// drift is the part of an interval (1/500) by which two clocks may differ: each clock may be wrong by a thousandth, one
// fast and the other slow.
const drift = 500

// Remembered returns how long a refusal with that RememberFor may be used, from the instant at which its question was
// sent.
func Remembered(rememberFor time.Duration) time.Duration {
	return Shortened(min(rememberFor, MaxRemember))
}

// Shortened returns a time shorter than d: when it has passed here, d has not yet passed at another node, whatever the
// drift.
func Shortened(d time.Duration) time.Duration { return d - d/drift - 1 }

// Aged returns what is left of a duration d from another node, age after its answer came. Because of drift it may be
// too long, by at most two thousandths of age, and never too short. algo.Never stays.
func Aged(d, age time.Duration) time.Duration {
	if d == algo.Never {
		return d
	}
	return max(d-age+(age+drift-1)/drift, 0)
}

// Age changes a refusal to one that is age old. It copies Limits, which others may be reading.
func (d *Decision) Age(age time.Duration) {
	d.RetryAfter, d.ResetAfter = Aged(d.RetryAfter, age), Aged(d.ResetAfter, age)
	d.Limits = slices.Clone(d.Limits)
	for i := range d.Limits {
		s := &d.Limits[i]
		s.RetryAfter, s.ResetAfter = Aged(s.RetryAfter, age), Aged(s.ResetAfter, age)
	}
}
