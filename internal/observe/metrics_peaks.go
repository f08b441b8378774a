package observe

import (
	"sync"
	"time"

	"github.com/weirlimit/weir/limiter"
)

// peakTime is how long a peak is shown at least, and twice as long at most.
const peakTime = time.Minute

// peaks keeps the fullest keys of the last minute or two, so that two Prometheus servers, or somebody who looks at the page in between, do
// not take the peaks away from each other. Its methods are safe for concurrent use.
type peaks struct {
	mu            sync.Mutex
	began         time.Time       // of present
	present, last map[string]peak // by policy
}

type peak struct {
	count       int64
	utilization float64
}

func (p peak) or(q peak) peak { return peak{max(p.count, q.count), max(p.utilization, q.utilization)} }

// read reads the counters, with the peaks.
func (p *peaks) read(now time.Time, read func() []limiter.PolicyStats) []limiter.PolicyStats {
	p.mu.Lock()
	defer p.mu.Unlock()
	if now.Sub(p.began) >= peakTime {
		p.began, p.last, p.present = now, p.present, make(map[string]peak)
	}
	stats := read()
	for i := range stats {
		s := &stats[i]
		p.present[s.Policy] = p.present[s.Policy].or(peak{s.PeakCount, s.PeakUtilization})
		all := p.present[s.Policy].or(p.last[s.Policy])
		s.PeakCount, s.PeakUtilization = all.count, all.utilization
	}
	return stats
}
