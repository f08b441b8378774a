package observe

import (
	"net"
	"net/http"
	"sync"

	"github.com/weirlimit/weir/limiter"
)

// maxScrapers bounds the scrapers that are told apart. A new one beyond that replaces the one whose last scrape is the
// oldest.
const maxScrapers = 16

// peaks gives every scraper the peaks since its own last scrape, so that two Prometheus servers, or a person who looks
// at the page, do not take them from each other. Its methods are safe for concurrent use.
type peaks struct {
	mu       sync.Mutex
	scrapers map[string]*scraper
	scrapes  uint64
}

// scraper is the state of one scraper.
type scraper struct {
	last uint64          // the number of its last scrape
	owed map[string]peak // by policy: peaks that other scrapers have read since
}

type peak struct {
	count       int64
	utilization float64
}

func (p peak) or(q peak) peak { return peak{max(p.count, q.count), max(p.utilization, q.utilization)} }

// read reads the counters for a scraper. A new scraper gets the peaks since the last scrape of any scraper.
func (p *peaks) read(from string, read func() []limiter.PolicyStats) []limiter.PolicyStats {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.scrapes++
	own := p.scrapers[from]
	if own == nil {
		own = p.admit(from)
	}
	own.last = p.scrapes
	stats := read()
	for i := range stats {
		s := &stats[i]
		fresh := peak{s.PeakCount, s.PeakUtilization}
		for _, other := range p.scrapers {
			if other != own && fresh != (peak{}) {
				other.owed[s.Policy] = other.owed[s.Policy].or(fresh)
			}
		}
		all := own.owed[s.Policy].or(fresh)
		s.PeakCount, s.PeakUtilization = all.count, all.utilization
	}
	clear(own.owed)
	return stats
}

// admit adds a new scraper, in place of the oldest one if there are maxScrapers.
func (p *peaks) admit(from string) *scraper {
	if p.scrapers == nil {
		p.scrapers = make(map[string]*scraper)
	}
	if len(p.scrapers) >= maxScrapers {
		oldest := ""
		for name, s := range p.scrapers {
			if oldest == "" || s.last < p.scrapers[oldest].last {
				oldest = name
			}
		}
		delete(p.scrapers, oldest)
	}
	s := &scraper{owed: make(map[string]peak)}
	p.scrapers[from] = s
	return s
}

// maxAgent bounds the bytes of a User-Agent that are kept.
const maxAgent = 64

// scraperOf returns a name for a scraper: its host and its user agent.
func scraperOf(r *http.Request) string {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		host = r.RemoteAddr
	}
	agent := r.UserAgent()
	return host + " " + agent[:min(len(agent), maxAgent)]
}
