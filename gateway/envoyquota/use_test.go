package envoyquota

import (
	"testing"
	"time"
)

// TestUse holds data planes to using most of a limit that they want more of.
func TestUse(t *testing.T) {
	for _, c := range []struct {
		name, policy string
		rates        []float64
		other        float64
		most         float64 // in the time
	}{
		{"token bucket, one", tokenPolicy, []float64{40}, 0, 20 * 300},
		{"token bucket, three", tokenPolicy, []float64{30, 10, 3}, 0, 20 * 300},
		{"token bucket, enough", tokenPolicy, []float64{5, 5, 2}, 0, 12 * 300},
		{"token bucket, and others", tokenPolicy, []float64{30}, 30, 20 * 300},
		{"window, one", windowPolicy, []float64{40}, 0, 20 * 300},
		{"window, three", windowPolicy, []float64{30, 10, 3}, 0, 20 * 300},
		{"window, enough", windowPolicy, []float64{5, 5, 2}, 0, 12 * 300},
		{"window, and others", windowPolicy, []float64{30}, 30, 20 * 300},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, 1, c.policy)
			for _, rate := range c.rates {
				w.plane(profiles[0]).load("a", rate, 0, 300*time.Second)
			}
			if c.other > 0 {
				w.ask("a", c.other, 0, 300*time.Second)
			}
			w.run(300 * time.Second)
			for i, f := range w.planes {
				t.Logf("%v/s: %d allowed, %d denied", c.rates[i], f.allowed, f.denied)
			}
			used := float64(len(w.admitted["a"])) / c.most
			t.Logf("others %d, in all %.2f", w.direct, used)
			if used < 0.8 {
				w.fatalf("no more than %.2f of what they could have", used)
			}
		})
	}
}
