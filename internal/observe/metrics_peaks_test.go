package observe

import (
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/test/expect"
)

// TestPeaksOfSeveralScrapers: each scraper sees each peak once, whoever reads in between.
func TestPeaksOfSeveralScrapers(t *testing.T) {
	var p peaks
	fullest := int64(0)
	read := func(from string, want int64) {
		t.Helper()
		got := p.read(from, func() []limiter.PolicyStats {
			s := []limiter.PolicyStats{{Policy: "login", PeakCount: fullest, PeakUtilization: float64(fullest) / 100}}
			fullest = 0 // as ReadStats does
			return s
		})
		expect.True(t, got[0].PeakCount == want && got[0].PeakUtilization == float64(want)/100,
			"%s: %+v, want a peak of %d", from, got[0], want)
	}
	read("a", 0)
	read("b", 0)
	fullest = 90
	read("a", 90)
	fullest = 20
	read("a", 20)
	read("a", 0)
	read("b", 90) // of all that a has read since
	read("b", 0)
	fullest = 50
	read("c", 50) // a newcomer is owed nothing from before
	read("a", 50)
	read("b", 50)
}

func TestScrapersAreBounded(t *testing.T) {
	var p peaks
	scrape := func(from string) {
		p.read(from, func() []limiter.PolicyStats { return []limiter.PolicyStats{{Policy: "login", PeakCount: 1}} })
	}
	scrape("regular")
	for i := range 10 * maxScrapers {
		scrape(fmt.Sprint("passer-by ", i))
		if i%8 == 0 {
			scrape("regular")
		}
	}
	expect.True(t, len(p.scrapers) == maxScrapers && p.scrapers["regular"] != nil,
		"%d scrapers, the regular one among them: %t", len(p.scrapers), p.scrapers["regular"] != nil)
}

func TestScraperOf(t *testing.T) {
	r := httptest.NewRequest("GET", "/metrics", nil)
	r.RemoteAddr = "[2001:db8::1]:1234"
	r.Header.Set("User-Agent", "Prometheus/3.0"+strings.Repeat("x", 1000))
	one := scraperOf(r)
	r.RemoteAddr = "[2001:db8::1]:999"
	expect.True(t, scraperOf(r) == one && len(one) <= 80 && strings.HasPrefix(one, "2001:db8::1 Prometheus/3.0"),
		"%q, then %q", one, scraperOf(r))
	r.Header.Set("User-Agent", "curl")
	expect.True(t, scraperOf(r) != one, "two programs of one host are not told apart")
}
