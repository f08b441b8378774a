package main

import (
	"math/bits"
	"time"
)

// A histogram counts durations in buckets whose width is 1/32 of the power of two they lie in, so that a quantile is
// right to about 3 %. The zero value is empty.
type histogram struct {
	counts [buckets]uint32
	n      uint64
}

const (
	subBits = 5
	// buckets cover up to 2^37 ns, about two minutes, which no call of the harness lasts.
	buckets = (37 - subBits) * (1 << subBits)
)

func bucketOf(d time.Duration) int {
	v := uint64(max(d, 0))
	if v < 2<<subBits {
		return int(v)
	}
	shift := bits.Len64(v) - subBits - 1
	return min(shift<<subBits+int(v>>shift), buckets-1)
}

// middleOf is the middle of a bucket.
func middleOf(bucket int) time.Duration {
	if bucket < 2<<subBits {
		return time.Duration(bucket)
	}
	shift := bucket>>subBits - 1
	low := uint64(bucket-shift<<subBits) << shift
	return time.Duration(low + 1<<shift/2)
}

func (h *histogram) add(d time.Duration) {
	h.counts[bucketOf(d)]++
	h.n++
}

func (h *histogram) merge(o *histogram) {
	for i, n := range o.counts {
		h.counts[i] += n
	}
	h.n += o.n
}

// quantile is the duration that the share q of all is not above; 0 when the histogram is empty.
func (h *histogram) quantile(q float64) time.Duration {
	if h.n == 0 {
		return 0
	}
	left := uint64(q * float64(h.n-1))
	for i, n := range h.counts {
		if left < uint64(n) {
			return middleOf(i)
		}
		left -= uint64(n)
	}
	return middleOf(buckets - 1)
}
