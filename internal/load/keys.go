package load

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
)

// Distribution says how often each key is asked for.
type Distribution string

// The distributions of keys.
const (
	// Uniform: all keys equally often.
	Uniform Distribution = "uniform"
	// Zipf: the k-th key in proportion to k^-Skew.
	Zipf Distribution = "zipf"
	// Hot: the first key in nine of ten checks, the others equally often.
	Hot Distribution = "hot"
)

// Keys are the keys that are asked for: Prefix followed by 1 to Count.
type Keys struct {
	Distribution Distribution
	Prefix       string  `flag:"key-prefix" default:"load-" help:"prefix of all keys"`
	Count        int     `flag:"keys" default:"1000" range:"1..10000000" help:"number of different keys"`
	Skew         float64 `flag:"skew" default:"1.1" help:"exponent of zipf, above 1"` // for Zipf only
	Seed         uint64  // equal seeds give the same keys in the same order
}

func (k *Keys) validate() error {
	switch all := []Distribution{Uniform, Zipf, Hot}; {
	case !slices.Contains(all, k.Distribution):
		return fmt.Errorf("distribution: %q is not one of %v", k.Distribution, all)
	case k.Distribution == Zipf && !(k.Skew > 1 && k.Skew <= 10):
		return fmt.Errorf("skew: must be above 1 and at most 10")
	}
	return nil
}

func (k *Keys) name(key int32) string { return k.Prefix + strconv.Itoa(int(key)+1) }

// picker draws keys for one goroutine. The key of a check depends only on the check's number, not on the worker.
type picker struct {
	keys   *Keys
	source rand.PCG
	rand   *rand.Rand
	zipf   *rand.Zipf
}

func (k *Keys) picker() *picker {
	p := &picker{keys: k}
	p.rand = rand.New(&p.source)
	if k.Distribution == Zipf {
		p.zipf = rand.NewZipf(p.rand, k.Skew, 1, uint64(k.Count-1))
	}
	return p
}

// pick returns the key of the n-th check: 0 to Count-1.
func (p *picker) pick(n uint64) int32 {
	p.source.Seed(p.keys.Seed, n)
	switch count := int32(p.keys.Count); {
	case p.zipf != nil:
		return int32(p.zipf.Uint64())
	case p.keys.Distribution == Hot && (count == 1 || p.rand.IntN(10) != 0):
		return 0
	case p.keys.Distribution == Hot:
		return 1 + p.rand.Int32N(count-1)
	default:
		return p.rand.Int32N(count)
	}
}
