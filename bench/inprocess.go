package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"hash/maphash"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sethvargo/go-limiter/memorystore"
	xrate "golang.org/x/time/rate"

	"github.com/weirlimit/weir/client/local"
	"github.com/weirlimit/weir/policy"
)

// inProcessKeys is how many keys the libraries hold.
const inProcessKeys = 1_000_000

// A library decides in this process. make returns a function that asks for one unit of a key: a token bucket of so many
// units a window, or, for the bare map, a function that always returns true.
type library struct {
	name string
	make func(units int, window time.Duration) (func(key string) bool, error)
}

func libraries() []library {
	return []library{
		{"bare-map", bareMap},
		{"x-time-rate", xTimeRate},
		{"go-limiter", goLimiter},
		{"weir-local", weirLocal},
	}
}

// inProcessCommand is the hidden subcommand of the children that measure libraries.
const inProcessCommand = "measure-in-process"

// inProcessTime bounds a child, which takes a few seconds.
const inProcessTime = 3 * time.Minute

func (b *bench) runInProcess(ctx context.Context, name string) (sample, error) {
	phase := time.Second
	if b.short {
		phase = 200 * time.Millisecond
	}
	args := []string{inProcessCommand, "-library", name, "-phase", phase.String()}
	p, err := b.kids.start("in-process "+name, b.self, args, nil)
	if err != nil {
		return nil, err
	}
	defer b.kids.stop(p)
	ctx, cancel := context.WithTimeout(ctx, inProcessTime)
	defer cancel()
	line, err := p.line(ctx, "result ")
	if err != nil {
		return nil, err
	}
	var got sample
	return got, json.Unmarshal([]byte(line), &got)
}

// measureInProcess is the process of such a child.
func measureInProcess(args []string) error {
	fs := flag.NewFlagSet(inProcessCommand, flag.ContinueOnError)
	name := fs.String("library", "", "one of the libraries")
	phase := fs.Duration("phase", time.Second, "how long each phase is timed")
	if err := fs.Parse(args); err != nil {
		return err
	}
	i := slices.IndexFunc(libraries(), func(l library) bool { return l.name == *name })
	if i < 0 {
		return fmt.Errorf("-library: %q is not known", *name)
	}
	got, err := measureLibrary(libraries()[i], inProcessKeys, *phase)
	if err != nil {
		return err
	}
	out, err := json.Marshal(got)
	if err != nil {
		return err
	}
	fmt.Printf("result %s\n", out)
	return nil
}

// measureLibrary fills a library with keys, and measures its memory and its time.
func measureLibrary(l library, keys int, phase time.Duration) (sample, error) {
	got := sample{}
	allow, err := l.make(limitUnits, limitWindow)
	if err != nil {
		return nil, err
	}
	before := liveHeap()
	for i := range keys {
		allow(keyOf(i)) // a string of its own, as in a server, so that what the library keeps of it counts
	}
	got[bytesPerKey] = float64(liveHeap()-before) / float64(keys)
	var collections []float64
	for range 5 {
		began := time.Now()
		runtime.GC()
		collections = append(collections, float64(time.Since(began))/1e6)
	}
	middle, _ := spreadOf(collections)
	got[gcMillis] = middle.Median

	anyKey, hot := amongMany(keys), only("hot:00000000000000")
	got[nsOne] = nanos(1, phase, allow, anyKey)
	got[nsTwo] = nanos(2, phase, allow, anyKey)
	got[nsHotOne] = nanos(1, phase, allow, hot)
	got[nsHotTwo] = nanos(2, phase, allow, hot)
	runtime.KeepAlive(allow)
	return got, nil
}

// nanos returns the elapsed time divided by the number of decisions that so many goroutines made together.
func nanos(threads int, d time.Duration, allow func(string) bool, pick pick) float64 {
	const between = 256 // decisions between looks at the clock
	var total atomic.Int64
	var askers sync.WaitGroup
	began := time.Now()
	for i := range threads {
		askers.Go(func() {
			random := rand.New(rand.NewPCG(uint64(i), 1))
			n := int64(0)
			for time.Since(began) < d {
				for range between {
					allow(pick(random))
				}
				n += between
			}
			total.Add(n)
		})
	}
	askers.Wait()
	return float64(time.Since(began)) / float64(total.Load())
}

// liveHeap returns the heap in use after full collections.
func liveHeap() int64 {
	runtime.GC()
	runtime.GC() // frees what finalizers and pools released in the first one
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// mapShards is the number of maps of the libraries below, each with a lock.
const mapShards = 256

// counter is the least state of a limit, two words: how much, and since when.
type counter [2]int64

// bareMap looks a key up in a sharded map and changes its value.
func bareMap(int, time.Duration) (func(string) bool, error) {
	type shard struct {
		mu sync.Mutex
		m  map[string]counter
		_  [48]byte // each has its own cache line
	}
	seed, shards := maphash.MakeSeed(), make([]shard, mapShards)
	for i := range shards {
		shards[i].m = make(map[string]counter)
	}
	return func(key string) bool {
		s := &shards[maphash.String(seed, key)%mapShards]
		s.mu.Lock()
		c := s.m[key]
		c[0]++
		s.m[key] = c
		s.mu.Unlock()
		return true
	}, nil
}

// xTimeRate is how programs use golang.org/x/time/rate: a map with a limiter for each key, here a sharded one.
func xTimeRate(units int, window time.Duration) (func(string) bool, error) {
	type shard struct {
		mu sync.Mutex
		m  map[string]*xrate.Limiter
		_  [48]byte
	}
	seed, shards := maphash.MakeSeed(), make([]shard, mapShards)
	for i := range shards {
		shards[i].m = make(map[string]*xrate.Limiter)
	}
	every := xrate.Every(window / time.Duration(units))
	return func(key string) bool {
		s := &shards[maphash.String(seed, key)%mapShards]
		s.mu.Lock()
		l := s.m[key]
		if l == nil {
			l = xrate.NewLimiter(every, units)
			s.m[key] = l
		}
		s.mu.Unlock()
		return l.Allow()
	}, nil
}

func goLimiter(units int, window time.Duration) (func(string) bool, error) {
	s, err := memorystore.New(&memorystore.Config{Tokens: uint64(units), Interval: window})
	if err != nil {
		return nil, err
	}
	ctx := context.Background()
	return func(key string) bool {
		_, _, _, ok, err := s.Take(ctx, key)
		return ok && err == nil
	}, nil
}

// weirLocal is Weir as a library: a node's decisions, through the client's interface.
func weirLocal(units int, window time.Duration) (func(string) bool, error) {
	const file = "policies:\n  - {name: bucket, algorithm: token_bucket, limit: %d, window: %v}\n"
	policies, err := policy.Parse("bench.yaml", []byte(fmt.Sprintf(file, units, window)))
	if err != nil {
		return nil, err
	}
	ctx, l := context.Background(), local.New(policies).Policy("bucket")
	return func(key string) bool {
		d, err := l.Allow(ctx, key)
		return err == nil && d.Allowed
	}, nil
}
