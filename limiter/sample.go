package limiter

import (
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/store"
)

// This file gives a sample of the decisions to a Recorder, which finds the busiest keys (internal/observe). With few
// decisions every one is recorded; with many, one in 2^shift, with the weight 2^shift, so that weights still add up to
// the number of decisions. record doubles the spacing when a tick has had more than samplesATick records, and tick
// halves it when one has had less than a quarter of that.

// Recorder gets a sample of a Limiter's decisions, and of the refusals that it repeats from memory. Many goroutines
// call both methods concurrently.
type Recorder interface {
	// Record notes a decision. It must not keep the texts, which may be parts of larger ones.
	Record(s *Sample)
	// Tick is called about ten times a second, with the clock of the decisions.
	Tick(mono int64)
}

// Sample is a decision on a check, an acquire or a reservation, peeks left out, or the checks that a borrower has
// admitted from a loan.
type Sample struct {
	Scope, Key string // Scope is a policy's name, or what limit.InlineScope returns
	Weight     int64  // how many decisions it stands for
	Refused    bool   // refused, or admitted by the policy's shadow mode alone
	// Of the limit that leaves least room. Limit is 0 where the key has no state: it is unlimited or blocked.
	Algorithm        algo.Algorithm
	Window           time.Duration
	Limit, Remaining int64
}

// samplesATick bounds the samples between two ticks, in the long run: 500 a second take less than one percent of a
// processor. (A sample takes several microseconds, since it meets the lock and the sketches of the Recorder, which are
// no longer in the processor's cache.) samplesAtOnce bounds those of a burst, so that a node with few decisions records
// each.
const (
	samplesATick  = 50
	samplesAtOnce = 1000
)

// sampler chooses one of 2^shift decisions.
type sampler struct {
	to    Recorder
	shift atomic.Uint32 // off without a Recorder
	taken atomic.Int64  // records since the last tick, or since shift was last raised
	spare atomic.Int64  // records beyond samplesATick that may be made before the next tick, or raised
}

const raised = -1 // of spare: shift was raised since the last tick

const off = 64

func (s *sampler) start(to Recorder) {
	s.spare.Store(samplesAtOnce - samplesATick)
	if s.to = to; to == nil {
		s.shift.Store(off)
	}
}

// weight returns how many decisions a decision stands for if it is chosen, and 0 if it is not. n is its number among
// the decisions of its kind, from 1 on: consecutive multiples of the golden ratio are spread evenly whatever period the
// callers' requests have (Weyl's equidistribution theorem), and cost nanoseconds less than a random number.
func (s *sampler) weight(n uint64) int64 {
	shift := s.shift.Load()
	if n*spread>>(64-shift) != 0 {
		return 0
	}
	return 1 << shift
}

// spread is 2^64 divided by the golden ratio.
const spread = 0x9e3779b97f4a7c15

const maxShift = 16

// record gives a decision to the recorder, and raises shift if the tick has had too many.
func (s *sampler) record(of *Sample) {
	if s.taken.Add(1) > samplesATick+s.spare.Load() {
		if shift := s.shift.Load(); shift < maxShift && s.shift.CompareAndSwap(shift, shift+1) {
			s.spare.Store(raised)
			s.taken.Store(0)
		}
	}
	s.to.Record(of)
}

// tick lowers shift if the last tick had few records.
func (s *sampler) tick(mono int64) {
	if s.to == nil {
		return
	}
	taken, spare, shift := s.taken.Swap(0), s.spare.Load(), s.shift.Load()
	if spare == raised {
		spare = taken - samplesATick // the tick had its samples
	} else if taken < samplesATick/4 && shift > 0 {
		s.shift.CompareAndSwap(shift, shift-1)
	}
	s.spare.Store(min(max(spare+samplesATick-taken, 0), samplesAtOnce-samplesATick))
	s.to.Tick(mono)
}

// sampled records a decision that weight has chosen. tightest is nil where the key has no state.
func (s *sampler) sampled(weight int64, scope, key string, d *limit.Decision, tightest *algo.Limit) {
	of := Sample{Scope: scope, Key: key, Weight: weight, Refused: !d.Allowed || d.Shadow}
	if tightest != nil {
		of.Algorithm, of.Window, of.Limit, of.Remaining = tightest.Algorithm, d.Window, d.Limit, d.Remaining
	}
	s.record(&of)
}

// spent records checks that a borrower has admitted from its loan, as one sample. A report of fewer checks than a
// sample stands for is chosen in proportion to them.
func (s *sampler) spent(rule *store.Rule, key string, checks int64, now *algo.Decision) {
	if s.to == nil || checks <= 0 {
		return
	}
	if weight := int64(1) << s.shift.Load(); checks < weight {
		if rand.Int64N(weight) >= checks {
			return
		}
		checks = weight
	}
	l := &rule.Limits[now.Tightest]
	s.record(&Sample{Scope: rule.Scope, Key: key, Weight: checks, Algorithm: l.Algorithm, Window: quotaWindow(l),
		Limit: now.Limit, Remaining: now.Remaining})
}
