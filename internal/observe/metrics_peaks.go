package observe

import (
	"sync"
	"time"

	"github.com/weirlimit/weir/limiter"
)

// peakStep is how long a peak is shown at least, and half of how long at most.
const peakStep = 30 * time.Second

// peaks keeps the peaks of the present step and of the one before it, so that every scraper sees a peak that comes once
// in a step, whoever else reads the page. Its methods are safe for concurrent use.
type peaks struct {
	mu          sync.Mutex
	began       time.Time // when the present step began
	now, before map[string]peak
}

type peak struct {
	count       int64
	utilization float64
}

func (p peak) or(q peak) peak { return peak{max(p.count, q.count), max(p.utilization, q.utilization)} }

// read reads the counters at an instant, with the peaks that are kept. read returns the peaks since it was called last.
func (p *peaks) read(at time.Time, read func() []limiter.PolicyStats) []limiter.PolicyStats {
	p.mu.Lock()
	defer p.mu.Unlock()
	if past := at.Sub(p.began); past >= peakStep {
		if p.before = p.now; past >= 2*peakStep {
			p.before = nil
		}
		p.began, p.now = at, make(map[string]peak)
	}
	stats := read()
	for i := range stats {
		s := &stats[i]
		if fresh := p.now[s.Policy].or(peak{s.PeakCount, s.PeakUtilization}); fresh != (peak{}) {
			p.now[s.Policy] = fresh
		}
		all := p.now[s.Policy].or(p.before[s.Policy])
		s.PeakCount, s.PeakUtilization = all.count, all.utilization
	}
	return stats
}
