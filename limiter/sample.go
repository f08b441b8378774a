package limiter

import (
	"sync/atomic"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/store"
)

// Recorder is told of a sample of the decisions that a Limiter makes, and of refusals that it remembers for their owner. Both
// methods are called by many goroutines at a time.
type Recorder interface {
	// Record notes a decision. Its texts may be parts of larger ones: it keeps none of them.
	Record(s *Sample)
	// Tick is called about ten times a second, with the time that decisions are made at.
	Tick(mono int64)
}

// Sample is a decision on a check, an acquire or a reservation that was no peek, or what a borrower has admitted of a loan.
type Sample struct {
	Scope, Key string // Scope is a policy's name, or what limit.InlineScope returns
	Weight     int64  // how many decisions it stands for
	Refused    bool   // or would have been, but for the shadow mode of its policy
	// Of the limit that leaves least room; Limit is 0 where the key has no state: it is unlimited or blocked.
	Algorithm        algo.Algorithm
	Window           time.Duration
	Limit, Remaining int64
}

// samplesATick bounds the samples between two ticks, about: 10,000 a second take one percent of a processor at most.
const samplesATick = 1000

// sampler chooses decisions: all of them as long as there are few, and one of 2^shift where there are many.
type sampler struct {
	to    Recorder
	shift atomic.Uint32 // off without a Recorder
	taken atomic.Int64  // since the last tick, or since shift was last raised
}

const off = 64

func (s *sampler) start(to Recorder) {
	if s.to = to; to == nil {
		s.shift.Store(off)
	}
}

// weight returns how many decisions the one at hand stands for if it is to be recorded, and 0 if it is not. n is the number that the
// decision has among those of its kind, from 1 on: consecutive multiples of the golden ratio are spread evenly whatever period the
// callers' requests have (Weyl's equidistribution theorem), and cost nanoseconds less than a random number.
func (s *sampler) weight(n uint64) int64 {
	shift := s.shift.Load()
	if n*spread>>(64-shift) != 0 {
		return 0
	}
	return 1 << shift
}

// spread is 2^64 by the golden ratio.
const spread = 0x9e3779b97f4a7c15

const maxShift = 16

// record hands a decision to the recorder, and chooses fewer from now on if there are too many.
func (s *sampler) record(of *Sample) {
	if s.taken.Add(1) > samplesATick {
		if shift := s.shift.Load(); shift < maxShift && s.shift.CompareAndSwap(shift, shift+1) {
			s.taken.Store(0)
		}
	}
	s.to.Record(of)
}

// tick chooses more decisions again where there were few.
func (s *sampler) tick(mono int64) {
	if s.to == nil {
		return
	}
	if taken, shift := s.taken.Swap(0), s.shift.Load(); taken < samplesATick/4 && shift > 0 {
		s.shift.CompareAndSwap(shift, shift-1)
	}
	s.to.Tick(mono)
}

// sampled records a decision that weight has chosen. tightest is nil where no state is involved.
func (s *sampler) sampled(weight int64, scope, key string, d *limit.Decision, tightest *algo.Limit) {
	of := Sample{Scope: scope, Key: key, Weight: weight, Refused: !d.Allowed || d.Shadow}
	if tightest != nil {
		of.Algorithm, of.Window, of.Limit, of.Remaining = tightest.Algorithm, d.Window, d.Limit, d.Remaining
	}
	s.record(&of)
}

// spent records so many checks that a borrower has admitted of its loan.
func (s *sampler) spent(rule *store.Rule, key string, checks int64, now *algo.Decision) {
	if s.to == nil || checks <= 0 {
		return
	}
	l := &rule.Limits[now.Tightest]
	s.record(&Sample{Scope: rule.Scope, Key: key, Weight: checks, Algorithm: l.Algorithm, Window: quotaWindow(l), Limit: now.Limit, Remaining: now.Remaining})
}
