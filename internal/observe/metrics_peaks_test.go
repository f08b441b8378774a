package observe

import (
	"testing"
	"time"

	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/test/expect"
)

// TestPeaks: a peak is shown for a step at least and two at most, whoever reads in between.
func TestPeaks(t *testing.T) {
	var p peaks
	began, fullest := time.Now(), int64(0)
	read := func(at time.Duration, want int64) {
		t.Helper()
		got := p.read(began.Add(at*time.Second), func() []limiter.PolicyStats {
			s := []limiter.PolicyStats{{Policy: "login", PeakCount: fullest, PeakUtilization: float64(fullest) / 100}}
			fullest = 0 // as ReadStats does
			return s
		})
		expect.True(t, got[0].PeakCount == want && got[0].PeakUtilization == float64(want)/100,
			"after %d s: %+v, want a peak of %d", at, got[0], want)
	}
	read(0, 0)
	fullest = 90
	read(1, 90)
	fullest = 20
	read(2, 90)
	read(29, 90)
	read(30, 90)
	read(59, 90)
	fullest = 50
	read(61, 50)
	read(119, 50)
	fullest = 70 // some time between two scrapes that are far apart
	read(1000, 70)
	read(1001, 70)
	read(1090, 0)
}
