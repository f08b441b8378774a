package limit

import (
	"slices"
	"time"

	"github.com/weirlimit/weir/algo"
)

// MaxRemember is how long a refusal is remembered at most. So long, less what is left of its retry_after, a check may
// be refused although somebody else's refund, reset or raised limit would let it pass.
const MaxRemember = time.Second

// drift is the share of an interval by which two clocks may disagree about it: each is taken to run wrong by a
// thousandth at most, the one fast and the other slow.
const drift = 500

// Remembered is how long a refusal with such a RememberFor is good for, counted from the moment its question was sent.
func Remembered(rememberFor time.Duration) time.Duration {
	return Shortened(min(rememberFor, MaxRemember))
}

// Shortened is a duration of another node's that has surely not passed there when this much has passed here.
func Shortened(d time.Duration) time.Duration { return d - d/drift - 1 }

// Aged is what is left of a duration of another node's, age after its answer came: at least that, as clocks may differ, and
// at most two thousandths of age more than by this clock.
func Aged(d, age time.Duration) time.Duration {
	if d == algo.Never {
		return d
	}
	return max(d-age+(age+drift-1)/drift, 0)
}

// Age makes a refusal one that came so long ago. Its list of limits is copied, since others may be reading it.
func (d *Decision) Age(age time.Duration) {
	d.RetryAfter, d.ResetAfter = Aged(d.RetryAfter, age), Aged(d.ResetAfter, age)
	d.Limits = slices.Clone(d.Limits)
	for i := range d.Limits {
		s := &d.Limits[i]
		s.RetryAfter, s.ResetAfter = Aged(s.RetryAfter, age), Aged(s.ResetAfter, age)
	}
}
