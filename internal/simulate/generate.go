package simulate

import (
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"
)

// Pattern is a shape of generated traffic.
type Pattern string

// The patterns. Equal PatternConfigs give equal traffic.
const (
	// Steady sends at equal distances, the keys in turn.
	Steady Pattern = "steady"
	// Burst sends only in the 100 ms before and after each full minute, where a fixed window admits twice its limit.
	// Rate is the mean over a minute.
	Burst Pattern = "burst"
	// Poisson draws the distances from an exponential distribution, and the keys uniformly.
	Poisson Pattern = "poisson"
	// Diurnal is Poisson with a rate that follows a day: the mean at 06:00 and 18:00, a tenth of the peak at 00:00.
	Diurnal Pattern = "diurnal"
	// Greedy is Poisson, and one key sends nine tenths of the events.
	Greedy Pattern = "greedy"
)

// Patterns returns all patterns.
func Patterns() []Pattern { return []Pattern{Steady, Burst, Poisson, Diurnal, Greedy} }

// PatternConfig configures a Generator.
type PatternConfig struct {
	Pattern Pattern
	Rate    float64       // mean number of events a second
	For     time.Duration // length of the traffic
	Keys    int           // number of keys: "caller-1" and so on
	Seed    uint64        // equal seeds give equal traffic
}

// Generator is a Source of generated traffic. It is not safe for concurrent use.
type Generator struct {
	cfg   PatternConfig
	rand  *rand.Rand
	n     int64
	at    float64 // seconds
	names [][]byte
}

// NewGenerator returns a Generator, or an error that names the invalid setting.
func NewGenerator(cfg PatternConfig) (*Generator, error) {
	switch {
	case !slices.Contains(Patterns(), cfg.Pattern):
		return nil, fmt.Errorf("pattern %q is not one of %v", cfg.Pattern, Patterns())
	case !(cfg.Rate > 0 && cfg.Rate <= 1e9):
		return nil, fmt.Errorf("rate must be above 0 and at most 1e9 a second")
	case cfg.For <= 0 || cfg.For > 10*366*24*time.Hour:
		return nil, fmt.Errorf("length must be above 0 and at most ten years")
	case cfg.Keys < 1 || cfg.Keys > 10_000_000:
		return nil, fmt.Errorf("keys must be 1 to 10000000")
	}
	return &Generator{cfg: cfg, rand: rand.New(rand.NewPCG(cfg.Seed, 0x77656972)), names: make([][]byte, cfg.Keys)}, nil
}

// Read returns the next event.
func (g *Generator) Read(e *Event) error {
	key := 0
	switch g.cfg.Pattern {
	case Steady:
		g.at = float64(g.n) / g.cfg.Rate
		key = int(g.n % int64(g.cfg.Keys))
	case Burst:
		// The n-th event of a minute: half of them in the last tenth of a second before the minute, half in the first
		// one after it.
		each := max(g.cfg.Rate*60, 1)
		minute := math.Floor(float64(g.n)/each) + 1
		place := (float64(g.n) - (minute-1)*each) / each
		g.at = minute*60 - 0.1 + 0.2*place
		key = int(g.n % int64(g.cfg.Keys))
	case Poisson, Greedy:
		g.at += g.rand.ExpFloat64() / g.cfg.Rate
		key = g.rand.IntN(g.cfg.Keys)
		if g.cfg.Pattern == Greedy && (g.cfg.Keys == 1 || g.rand.IntN(10) != 0) {
			key = 0
		} else if g.cfg.Pattern == Greedy {
			key = 1 + g.rand.IntN(g.cfg.Keys-1)
		}
	case Diurnal:
		// Thinning (Lewis and Shedler 1979) of a Poisson process with the peak's rate.
		const trough = 0.1
		peak := 2 * g.cfg.Rate / (1 + trough)
		for {
			g.at += g.rand.ExpFloat64() / peak
			share := (1+trough)/2 - (1-trough)/2*math.Cos(2*math.Pi*g.at/86400)
			if g.rand.Float64() < share {
				break
			}
		}
		key = g.rand.IntN(g.cfg.Keys)
	}
	g.n++
	if g.at >= g.cfg.For.Seconds() {
		return io.EOF
	}
	if g.names[key] == nil {
		g.names[key] = []byte("caller-" + strconv.Itoa(key+1))
	}
	e.At, e.Key, e.Cost = int64(g.at*1e9), g.names[key], 1
	return nil
}
