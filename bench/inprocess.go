package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"hash/maphash"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weirlimit/weir/client/local"

	"github.com/sethvargo/go-limiter/memorystore"
	xrate "golang.org/x/time/rate"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/store"
)

// inProcessKeys is how many keys the libraries hold.
const inProcessKeys = 1_000_000

// A library is something that decides in this process. make returns a function that asks for one unit of a key: a token
// bucket of so many units a window, or, for the bare maps, something that always says yes.
type library struct {
	name string
	bare bool // decides nothing: the floor
	make func(units int, window time.Duration) (func(key string) bool, error)
}

func libraries() []library {
	return []library{
		{"bare-string", true, bareStringMap},
		{"bare-hashed", true, bareHashedMap},
		{"x-time-rate", false, xTimeRate},
		{"go-limiter", false, goLimiter},
		{"weir-local", false, weirLocal},
		{"weir-store", false, weirStore},
	}
}

// inProcessMeasurements run each library in a child, so that each has a heap of its own.
func (b *bench) inProcessMeasurements() []measurement {
	var all []measurement
	for _, l := range libraries() {
		all = append(all, measurement{work: "in-process", system: l.name, run: func(ctx context.Context) (sample, error) {
			got, err := b.runInProcess(ctx, l.name)
			if err != nil {
				return nil, err
			}
			// Nothing comes back while it is looked at: Weir has to admit exactly the limit.
			n, ok := got[admitted]
			if ok && (n > limitAllowed || n < limitAllowed && strings.HasPrefix(l.name, "weir")) {
				return got, fmt.Errorf("%w: %.0f admitted of a limit of %d", errViolated, n, limitAllowed)
			}
			return got, nil
		}})
	}
	return append(all,
		measurement{work: "full-log", system: "weir", run: func(ctx context.Context) (sample, error) { return b.runInProcess(ctx, "log") }},
		measurement{work: "full-log", system: "redis-script", once: true, run: func(ctx context.Context) (sample, error) {
			r, err := b.redis()
			if err != nil {
				return nil, err
			}
			bytes, err := r.bytesOfLog(ctx, 100_000)
			return sample{logBytes: bytes}, err
		}},
	)
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
	p, err := b.kids.start("in-process "+name, b.self, []string{inProcessCommand, "-library", name, "-phase", phase.String()}, nil)
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

// measureInProcess is such a child.
func measureInProcess(args []string) error {
	fs := flag.NewFlagSet(inProcessCommand, flag.ContinueOnError)
	name := fs.String("library", "", "one of the libraries, or log")
	phase := fs.Duration("phase", time.Second, "how long each phase is timed")
	if err := fs.Parse(args); err != nil {
		return err
	}
	var got sample
	var err error
	if *name == "log" {
		got, err = measureLog(*phase)
	} else {
		i := slices.IndexFunc(libraries(), func(l library) bool { return l.name == *name })
		if i < 0 {
			return fmt.Errorf("-library: %q is not known", *name)
		}
		got, err = measureLibrary(libraries()[i], inProcessKeys, *phase)
	}
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

// measureLibrary checks that a library keeps its limit, fills it with keys, weighs it and times it.
func measureLibrary(l library, keys int, phase time.Duration) (sample, error) {
	got := sample{}
	if !l.bare {
		allow, err := l.make(limitAllowed, 24*time.Hour)
		if err != nil {
			return nil, err
		}
		got[admitted] = float64(admittedBy(allow))
	}
	allow, err := l.make(limitUnits, limitWindow)
	if err != nil {
		return nil, err
	}
	before := liveHeap()
	for i := range keys {
		allow(keyOf(i)) // a string of its own, as a server's keys are: what the library keeps of it counts
	}
	got[bytesPerKey] = float64(liveHeap()-before) / float64(keys)
	var collections []float64
	for range 5 {
		began := time.Now()
		runtime.GC()
		collections = append(collections, float64(time.Since(began))/1e6)
	}
	got[gcMillis] = spreadOf(collections).Median

	// The callers' keys lie in one block, elsewhere than the library's, as those of requests do.
	var block strings.Builder
	for i := range keys {
		block.WriteString(keyOf(i))
	}
	all, size := block.String(), len(keyOf(0))
	anyKey := func(r *rand.Rand) string {
		i := r.IntN(keys) * size
		return all[i : i+size]
	}
	hot := func(*rand.Rand) string { return "hot:00000000000000" }
	got[nsOne] = nanos(1, phase, allow, anyKey)
	got[nsTwo] = nanos(2, phase, allow, anyKey)
	got[nsHotOne] = nanos(1, phase, allow, hot)
	got[nsHotTwo] = nanos(2, phase, allow, hot)
	runtime.KeepAlive(allow)
	return got, nil
}

// admittedBy asks limitAttempts times for one key, from two goroutines.
func admittedBy(allow func(string) bool) int64 {
	var n atomic.Int64
	var askers sync.WaitGroup
	for range 2 {
		askers.Go(func() {
			for range limitAttempts / 2 {
				if allow("one") {
					n.Add(1)
				}
			}
		})
	}
	askers.Wait()
	return n.Load()
}

// nanos is the elapsed time by the number of decisions that so many goroutines made together.
func nanos(threads int, d time.Duration, allow func(string) bool, pick func(*rand.Rand) string) float64 {
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

// liveHeap is the heap in use after full collections.
func liveHeap() int64 {
	runtime.GC()
	runtime.GC() // what the first one's finalizers and pools let go
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// mapShards is how many maps the maps below are made of, each with a lock.
const mapShards = 256

// counter is the least that a limit has to keep, two words: how much, and since when.
type counter [2]int64

// bareStringMap looks a key up in a sharded map and changes what it finds.
func bareStringMap(int, time.Duration) (func(string) bool, error) {
	type shard struct {
		mu sync.Mutex
		m  map[string]counter
		_  [48]byte // to a cache line each
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

// bareHashedMap is the same with keys' hashes in the keys' place, so that the map holds no pointers.
func bareHashedMap(int, time.Duration) (func(string) bool, error) {
	type shard struct {
		mu sync.Mutex
		m  map[uint64]counter
		_  [48]byte
	}
	seed, shards := maphash.MakeSeed(), make([]shard, mapShards)
	for i := range shards {
		shards[i].m = make(map[uint64]counter)
	}
	return func(key string) bool {
		h := maphash.String(seed, key)
		s := &shards[h%mapShards]
		s.mu.Lock()
		c := s.m[h]
		c[0]++
		s.m[h] = c
		s.mu.Unlock()
		return true
	}, nil
}

// xTimeRate is what programs make of golang.org/x/time/rate: a limiter for each key in a map, here a sharded one.
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

// weirLocal is Weir as a library: the same decisions as a node's, through the client's interface.
func weirLocal(units int, window time.Duration) (func(string) bool, error) {
	text := fmt.Sprintf("policies:\n  - {name: bucket, algorithm: token_bucket, limit: %d, window: %v}\n", units, window)
	policies, err := policy.Parse("bench.yaml", []byte(text))
	if err != nil {
		return nil, err
	}
	ctx, l := context.Background(), local.New(policies).Policy("bucket")
	return func(key string) bool {
		d, err := l.Allow(ctx, key)
		return err == nil && d.Allowed
	}, nil
}

// weirStore is the layer below: routing, policies and errors apart.
func weirStore(units int, window time.Duration) (func(string) bool, error) {
	s := store.New(store.Config{Partitions: ring.Partitions})
	rule := &store.Rule{Scope: "bucket", Limits: algo.Limits{{Algorithm: algo.TokenBucket, Limit: int64(units), Window: window}}}
	began, scope := time.Now(), ring.HashKey{}.Scope(rule.Scope)
	return func(key string) bool {
		h := scope.Hash(key)
		k := store.Key{Hash: h, Partition: ring.Partition(h), Key: key}
		d, err := s.Decide(k, rule, algo.Instant{Mono: int64(time.Since(began))}, store.Call{Request: algo.Request{Cost: 1}}, nil)
		return err == nil && d.Allowed
	}, nil
}

// measureLog weighs and times full sliding logs of ten to a million entries. Time is virtual: a log of a million is full
// within a second of real time. Admissions come at random intervals, since equal ones would be kept more cheaply.
func measureLog(phase time.Duration) (sample, error) {
	got := sample{}
	slowest := 0.0
	for entries := 10; entries <= 1_000_000; entries *= 10 {
		const window = time.Hour
		rule := &store.Rule{Scope: "log", Limits: algo.Limits{{Algorithm: algo.SlidingLog, Limit: int64(entries), Window: window}}}
		h := ring.Hash(ring.HashKey{}, rule.Scope, keyOf(0))
		key := store.Key{Hash: h, Partition: ring.Partition(h), Key: keyOf(0)}
		s := store.New(store.Config{Partitions: ring.Partitions})
		before := liveHeap() // an empty store is not an admission
		random := rand.New(rand.NewPCG(1, uint64(entries)))
		// Somewhat more than fits is asked for, so that the log is full, and a seventh or more refused.
		now, gap := int64(0), float64(window)/float64(entries)/1.2
		live := int64(0)
		decide := func() error {
			now += int64(random.ExpFloat64() * gap)
			d, err := s.Decide(key, rule, algo.Instant{Mono: now}, store.Call{Request: algo.Request{Cost: 1}}, nil)
			live = d.Limit - d.Remaining
			return err
		}
		// Twice as many as fit, so that the log has turned over.
		for range 3 * entries {
			if err := decide(); err != nil {
				return nil, err
			}
		}
		if entries == 1_000_000 {
			got[logBytes] = float64(liveHeap()-before) / float64(live)
			if live < int64(entries)*9/10 {
				return nil, errors.New("the log of a million did not fill")
			}
		}
		began, n := time.Now(), 0
		for time.Since(began) < phase/2 {
			for range 64 {
				if err := decide(); err != nil {
					return nil, err
				}
				n++
			}
		}
		ns := float64(time.Since(began)) / float64(n)
		got[logNanos(entries)] = ns
		slowest = max(slowest, ns)
		runtime.KeepAlive(s)
	}
	got[logSpread] = slowest / got[logNanos(10)]
	return got, nil
}
