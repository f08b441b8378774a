package limiter

import (
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/weirlimit/weir/limit"
)

// This file counts the answers by policy, for the metrics page and the console. Counters are atomic and spread over
// stripes, so that a decision counts without a lock and, nearly always, without a cache line that another processor
// writes.

// policyStats counts the answers for one policy: checks, acquires and reservations, peeks left out, and their errors. A
// charge that an atomic check cancels stays counted. A decision is counted once, by the node that makes it, so that the
// sum over the nodes of a cluster is the number of decisions. (One whose answer is lost on its way is counted twice: by
// the owner that made it, and as failed by the node that answered in its place.)
type policyStats struct {
	counts [stripes]stripe

	// The fullest key since the last reading. Nearly every decision reads these and does not write them.
	peakCount       atomic.Int64
	peakUtilization atomic.Int64 // in millionths

	candidate    candidateStats
	borrowed     atomic.Uint64 // those of allowed that were admitted from a loan
	banned, bans atomic.Uint64 // checks that a ban has refused; bans that began
}

// countBanned counts a decision that a ban has refused.
func (s *policyStats) countBanned(d *limit.Decision) {
	if d.Banned && (!d.Allowed || d.Shadow) {
		s.banned.Add(1)
	}
}

// candidateStats counts the decisions of a policy's candidate on checks that the policy has decided on this node.
type candidateStats struct{ allowed, refused, disagreed atomic.Uint64 }

func (s *candidateStats) count(candidate, policy bool) {
	if candidate {
		s.allowed.Add(1)
	} else {
		s.refused.Add(1)
	}
	if candidate != policy {
		s.disagreed.Add(1)
	}
}

// result is what is counted of a decision.
type result uint8

const (
	resultAllowed result = iota
	resultRefused
	resultShadow // admitted by shadow mode alone
	resultFailedOpen
	resultFailedClosed
	resultError      // an error
	resultRemembered // those refused that were answered without asking the owner
	resultNearLimit  // those allowed, refused and shadowed
	results
)

// resultOf is how a decision is counted.
func resultOf(d *limit.Decision) result {
	switch {
	case d.FailedOpen:
		return resultFailedOpen
	case d.FailedClosed:
		return resultFailedClosed
	case d.Shadow:
		return resultShadow
	case d.Allowed:
		return resultAllowed
	}
	return resultRefused
}

// stripe is a part of a policy's counters in one cache line, so that goroutines on different processors do not wait for
// each other's line. A reading adds the stripes up.
type stripe [results]atomic.Uint64

const stripes = 16 // a stripe is chosen by four bits, see mine

// mine returns a stripe that other goroutines are unlikely to use at this moment, chosen by the address of the
// goroutine's stack, which costs nothing to find out. Any stripe would be correct.
func (s *policyStats) mine() *stripe {
	var here byte
	return &s.counts[uint64(uintptr(unsafe.Pointer(&here))>>11)*spread>>60]
}

// count counts a decision, and returns its number among those of this stripe with the same result, from 1 on:
// sampler.weight takes it.
func (s *stripe) count(d *limit.Decision) uint64 {
	return s.add(resultOf(d), d.NearLimit && !d.FailedOpen && !d.FailedClosed)
}

// add is count for a decision of which this is known.
func (s *stripe) add(r result, near bool) uint64 {
	if near {
		s[resultNearLimit].Add(1)
	}
	return s[r].Add(1)
}

// saw notes how full a key's state was after a decision.
func (s *policyStats) saw(lim, remaining int64) {
	if lim <= 0 {
		return
	}
	used := lim - remaining
	raise(&s.peakCount, used)
	// Both are at most 2^53, so the quotient is exact enough. The multiplication is quicker than the division, and
	// nearly always shows that the peak stays.
	if float64(used)*1e6 > float64(s.peakUtilization.Load())*float64(lim) {
		raise(&s.peakUtilization, int64(float64(used)/float64(lim)*1e6))
	}
}

func raise(v *atomic.Int64, to int64) {
	for {
		old := v.Load()
		if to <= old || v.CompareAndSwap(old, to) {
			return
		}
	}
}

// statsByPolicy has the counters of every policy that this process has ever had, so that none restarts at zero when a
// policy comes back. Their number is bounded by what operators wrote into policy files.
type statsByPolicy struct {
	inline, unknown *policyStats

	mu sync.Mutex
	by map[string]*policyStats
}

func newStatsByPolicy() *statsByPolicy {
	return &statsByPolicy{inline: new(policyStats), unknown: new(policyStats), by: make(map[string]*policyStats)}
}

func (s *statsByPolicy) of(policy string) *policyStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	st, ok := s.by[policy]
	if !ok {
		st = new(policyStats)
		s.by[policy] = st
	}
	return st
}

// PolicyStats is a reading of one policy's counters on this node.
type PolicyStats struct {
	// "(inline)" for limits sent along, "(unknown)" for policies that do not exist.
	Policy                                                       string
	Allowed, Refused, Shadowed, FailedOpen, FailedClosed, Errors uint64
	// CandidateAllowed and CandidateRefused count the decisions of the policy's candidate, CandidateDisagreed those
	// that differ from the policy's.
	CandidateAllowed, CandidateRefused, CandidateDisagreed uint64
	// Remembered counts those of Refused that this node answered from memory, for their owner.
	Remembered uint64
	// NearLimit counts those of Allowed, Refused and Shadowed after which the policy's warn_at of a limit was in use.
	NearLimit uint64
	// Borrowed counts those of Allowed that were admitted from loans: by this node as a borrower, or by clients that
	// have reported them here.
	Borrowed uint64
	// Banned counts those of Refused and Shadowed that a ban has refused, and Bans the bans that began.
	Banned, Bans uint64
	// PeakCount and PeakUtilization (0 to 1) are of the fullest key that was decided since they were last read. A state
	// that holds more than its limit, because that was lowered, counts as full.
	PeakCount       int64
	PeakUtilization float64
}

// ReadStats returns the counters of every policy and starts the peaks anew: it is for one reader, the metrics page.
func (l *Limiter) ReadStats() []PolicyStats { return l.stats.each((*policyStats).read) }

// Counts is ReadStats without the peaks, for any number of readers.
func (l *Limiter) Counts() []PolicyStats { return l.stats.each((*policyStats).counted) }

func (s *statsByPolicy) each(read func(s *policyStats, policy string) PolicyStats) []PolicyStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]PolicyStats, 0, len(s.by)+2)
	for name, st := range s.by {
		out = append(out, read(st, name))
	}
	return append(out, read(s.inline, inlineName), read(s.unknown, unknownName))
}

// Names in place of a policy's: of limits sent along, and of policies that do not exist.
const (
	inlineName  = "(inline)"
	unknownName = "(unknown)"
)

func (s *policyStats) read(policy string) PolicyStats {
	out := s.counted(policy)
	out.PeakCount = s.peakCount.Swap(0)
	out.PeakUtilization = float64(s.peakUtilization.Swap(0)) / 1e6
	return out
}

func (s *policyStats) counted(policy string) PolicyStats {
	out := PolicyStats{
		Policy: policy, CandidateAllowed: s.candidate.allowed.Load(), CandidateRefused: s.candidate.refused.Load(),
		CandidateDisagreed: s.candidate.disagreed.Load(), Borrowed: s.borrowed.Load(),
		Banned: s.banned.Load(), Bans: s.bans.Load(),
	}
	for _, one := range []struct {
		of result
		to *uint64
	}{
		{resultAllowed, &out.Allowed}, {resultRefused, &out.Refused}, {resultShadow, &out.Shadowed},
		{resultFailedOpen, &out.FailedOpen}, {resultFailedClosed, &out.FailedClosed},
		{resultError, &out.Errors}, {resultRemembered, &out.Remembered}, {resultNearLimit, &out.NearLimit},
	} {
		for i := range s.counts {
			*one.to += s.counts[i][one.of].Load()
		}
	}
	return out
}
