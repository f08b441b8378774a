package observe

import (
	"testing"
	"time"

	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/test/expect"
)

// TestPeaks: who reads once a minute sees each peak, whoever reads in between, and none is shown for more than two minutes.
func TestPeaks(t *testing.T) {
	var p peaks
	fullest, now := int64(0), time.Unix(0, 0)
	read := func(after time.Duration, want int64) {
		t.Helper()
		now = now.Add(after)
		got := p.read(now, func() []limiter.PolicyStats {
			s := []limiter.PolicyStats{{Policy: "login", PeakCount: fullest, PeakUtilization: float64(fullest) / 100}}
			fullest = 0 // as ReadStats does
			return s
		})
		expect.True(t, got[0].PeakCount == want && got[0].PeakUtilization == float64(want)/100,
			"%s: %+v, want a peak of %d", now, got[0], want)
	}
	read(0, 0)
	fullest = 90
	read(peakTime-1, 90) // at the end of a minute
	fullest = 20
	read(1, 90)
	read(peakTime-1, 90) // by another one, a minute later
	read(1, 20)
	read(peakTime, 0)
	fullest = 50
	read(time.Hour, 50) // of all the time since somebody read last
}
