package simulation

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"
)

// climate is how often a run's faults happen and how long they last.
type climate struct {
	harsh bool
	kinds []weather // that a storm is made of

	lasts     int64    // how much longer than 5 s faults and traffic go on, at most
	between   int64    // two checks, at most
	pause     [2]int64 // between two faults
	absent    [2]int64 // how long a node that has left stays away
	down      [2]int64 // and one that crashed
	voterDown [2]int64 // and a voter
	cut       [2]int64 // how long a cut lasts
	stop      [2]int64 // how long a node stands still, for a short time
	halt      [2]int64 // or for a long one
	doubt     [2]int64 // how long one is taken to be gone
	spread    float64  // by which share of the others
	suspend   float64  // the share of pauses in which the clock of decisions stands still as well
	together  float64  // how often all voters restart at once
	each      float64  // or each of them
	lag       int64    // by how much a host hears later than others of who is there, at most
}

func (c climate) String() string {
	if !c.harsh {
		return ""
	}
	return fmt.Sprintf(", harsh %+v", plainClimate(c))
}

type plainClimate climate

// parts says whether a storm has what makes nodes take each other to be gone that are not.
func (c climate) parts() bool {
	return slices.ContainsFunc(c.kinds, func(x weather) bool { return x >= cutting && x <= doubting })
}

// temperate is what half of the seeds have.
func temperate() climate {
	return climate{
		kinds: []weather{moving, crashing, cutting, oneWay, pausing, doubting, voting},
		lasts: 8 * second, between: 10 * millisecond,
		pause: [2]int64{second / 2, 7 * second / 2}, absent: [2]int64{second, 6 * second},
		down: [2]int64{50 * millisecond, 5050 * millisecond}, voterDown: [2]int64{50 * millisecond, 2050 * millisecond},
		cut: [2]int64{200 * millisecond, 7200 * millisecond}, stop: [2]int64{100 * millisecond, second},
		halt:  [2]int64{second, 7 * second},
		doubt: [2]int64{300 * millisecond, 4300 * millisecond}, spread: 0.6, suspend: 0.3, together: 0.3, each: 0.3,
	}
}

// drawClimate draws how often and for how long: anything between too short to matter and longer than any lease, the
// ends more often than what is between.
func drawClimate(rng *rand.Rand, x weather) climate {
	c := climate{harsh: true}
	for _, k := range temperate().kinds {
		if rng.IntN(2) == 0 {
			c.kinds = append(c.kinds, k)
		}
	}
	if len(c.kinds) == 0 {
		c.kinds = temperate().kinds
	}
	c.lasts = drawn(rng, second, 20*second)
	c.between = drawn(rng, 2*millisecond, 50*millisecond)
	c.pause = drawnRange(rng, 10*millisecond, 5*second)
	c.absent = drawnRange(rng, millisecond, 6*second)
	c.down = drawnRange(rng, millisecond, 8*second)
	c.voterDown = drawnRange(rng, millisecond, 6*second)
	c.cut = drawnRange(rng, 20*millisecond, 10*second)
	c.stop = drawnRange(rng, 5*millisecond, second)
	c.halt = drawnRange(rng, second, 12*second)
	c.doubt = drawnRange(rng, 50*millisecond, 8*second)
	c.spread = share(rng)
	c.suspend = share(rng)
	c.together, c.each = share(rng), share(rng)
	if x > crashing && rng.IntN(3) == 0 {
		c.lag = drawn(rng, 10*millisecond, 3*second)
	}
	return c
}

// drawNetwork draws what messages and views suffer all the time.
func drawNetwork(rng *rand.Rand, s *settings) {
	s.tick = drawn(rng, millisecond, 50*millisecond)
	s.flush = time.Duration(drawn(rng, 5*millisecond, 200*millisecond))
	s.delay = drawn(rng, 20_000, 80*millisecond)
	s.jitter = drawn(rng, 20_000, 100*millisecond)
	s.internal = drawn(rng, 1000, 5*millisecond)
	s.detect = drawnRange(rng, 200*millisecond, 6*second)
	s.discover = drawnRange(rng, 10*millisecond, 2*second)
	s.settle = drawn(rng, 50*millisecond, 3*second)
	s.late = drawn(rng, 50*millisecond, 3*second)
	if rng.IntN(3) > 0 {
		s.tail = share(rng) / 5
	}
	if rng.IntN(3) > 0 {
		s.loss = share(rng) / 2
	}
	if rng.IntN(3) > 0 {
		s.repeat = share(rng) / 2
	}
}

// drawn is anything between two durations, each order of magnitude as often as any other; one time in six it is an end.
func drawn(rng *rand.Rand, low, high int64) int64 {
	switch rng.IntN(12) {
	case 0:
		return low
	case 1:
		return high
	}
	return low + int64(math.Pow(float64(high-low), rng.Float64()))
}

func drawnRange(rng *rand.Rand, low, high int64) [2]int64 {
	a, b := drawn(rng, low, high), drawn(rng, low, high)
	return [2]int64{min(a, b), max(a, b)}
}

// share is anything from nothing to all.
func share(rng *rand.Rand) float64 {
	switch rng.IntN(8) {
	case 0:
		return 0.01
	case 1:
		return 1
	}
	return rng.Float64()
}
