// Package load sends checks to a running cluster, measures how long the answers take, and checks whether more was admitted
// than a limit allows.
//
// It does not see what other callers use of the same keys: an excess that it reports is real, but theirs may hide one.
package load

import (
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// The largest rate, number of checks and duration of a Config.
const (
	MaxRate     = 1_000_000
	MaxCount    = 50_000_000
	maxDuration = time.Hour
)

// Answer is what a decision says about one check.
type Answer struct {
	Allowed                  bool
	FailedOpen, FailedClosed bool // by a fail policy, as the owner could not be asked
	// Limit and Window are of the limit that decided, where the protocol tells them; 0 otherwise.
	Limit  int64
	Window time.Duration
}

// Asker sends one check of a key and waits for its decision. It is safe for concurrent use. An error means that there was no
// decision.
type Asker interface {
	Ask(ctx context.Context, key string) (Answer, error)
}

// Config says what to send. Its tags are those of weir load's flags, described with node.Setting, which keep to the ranges.
type Config struct {
	// Askers send the checks, each those of its share of the workers. At least one is required.
	Askers []Asker
	// Keys says which keys are asked for.
	Keys Keys
	// Rate is the number of checks a second, sent at even distances whatever the answers take (open loop). 0 stands for a closed
	// loop: each worker sends its next check when the last is answered.
	Rate float64 `flag:"rate" default:"0" help:"checks a second; 0: as many as the workers get answered"`
	// Concurrency is the number of workers, and so of checks in flight at most.
	Concurrency int `flag:"concurrency" default:"64" range:"1..10000" help:"workers, and so checks in flight at most"`
	// Duration and Count bound the checks that are sent. Whichever is reached first ends it.
	Duration time.Duration `flag:"for" default:"10s" range:"1ns..1h" help:"how long to send"`
	Count    int64         `flag:"count" default:"10000000" range:"1..50000000" help:"checks to send at most"`
	// Timeout is how long a check may take, and how long a backlog of an open loop is worked off after Duration.
	Timeout time.Duration `flag:"timeout" default:"2s" range:"1ns..1h" help:"longest time to wait for an answer"`
	// Bound is what the answers are held to; nil: nothing. Cost is the units of each check.
	Bound *Bound
	Cost  int64 `flag:"cost" default:"1" range:"1.." help:"units of each check"`
	// Progress, when set, is called about twice a second.
	Progress func(Progress)
}

// Progress tells how far a run is.
type Progress struct {
	Elapsed, Of time.Duration
	Sent        int64
	P99         time.Duration // up to now
}

// validate names the setting that cannot be.
func (c *Config) validate() error {
	if !(c.Rate >= 0 && c.Rate <= MaxRate) {
		return fmt.Errorf("rate: must be above 0 and at most %d a second, or 0 for a closed loop", MaxRate)
	}
	return c.Keys.validate()
}

// Result is what a run found.
type Result struct {
	Checks       int64         `json:"checks"` // sent and answered, or failed
	Elapsed      time.Duration `json:"elapsed_ns"`
	Rate         float64       `json:"rate"` // checks a second that got a decision
	Admitted     int64         `json:"admitted"`
	Refused      int64         `json:"refused"`
	FailedOpen   int64         `json:"failed_open"`   // of Admitted, by a fail policy
	FailedClosed int64         `json:"failed_closed"` // of Refused, by a fail policy
	Errors       int64         `json:"errors"`        // no decision
	FirstError   string        `json:"first_error,omitempty"`
	Unsent       int64         `json:"unsent"` // of an open loop: due, and not sent in time, as too few workers were free
	// Latency is of the checks that got a decision: from the moment a check was due, in an open loop, or was sent.
	Latency Latency  `json:"latency"`
	Verdict *Verdict `json:"verdict,omitempty"` // nil without a Bound
}

// Latency is a distribution of durations, to three significant digits.
type Latency struct {
	Min  time.Duration `json:"min_ns"`
	Mean time.Duration `json:"mean_ns"`
	P50  time.Duration `json:"p50_ns"`
	P90  time.Duration `json:"p90_ns"`
	P99  time.Duration `json:"p99_ns"`
	P999 time.Duration `json:"p999_ns"`
	Max  time.Duration `json:"max_ns"`
}

// run is the state of a Run.
type run struct {
	Config
	start   time.Time
	planned int64        // checks that an open loop is to send
	next    atomic.Int64 // number of the next check

	mu     sync.Mutex // guards the following
	result Result
	times  *hdrhistogram.Histogram
}

// Run sends what cfg says and waits for the answers. When ctx ends, so does the run, without an error. Latencies of an open loop
// count from the moment a check was due, not from that when a worker was free to send it: a cluster that stalls for a second
// delays all checks of that second, and hides none of them (Gil Tene calls the mistake coordinated omission).
func Run(ctx context.Context, cfg Config) (Result, error) {
	if err := cfg.validate(); err != nil {
		return Result{}, err
	}
	r := &run{Config: cfg, start: now(), planned: cfg.Count, times: hdrhistogram.New(1, int64(2*maxDuration), 3)}
	if cfg.Rate > 0 {
		r.planned = min(cfg.Count, int64(math.Ceil(cfg.Rate*cfg.Duration.Seconds())))
	}
	finished := make(chan struct{})
	var reporter, workers sync.WaitGroup
	if cfg.Progress != nil {
		reporter.Go(func() { r.report(finished) })
	}
	admissions := make([][]admission, cfg.Concurrency)
	for i := range admissions {
		workers.Go(func() { admissions[i] = r.work(ctx, cfg.Askers[i%len(cfg.Askers)]) })
	}
	workers.Wait()
	close(finished)
	reporter.Wait()

	out := r.result
	out.Elapsed = r.elapsed()
	if seconds := out.Elapsed.Seconds(); seconds > 0 {
		out.Rate = float64(out.Checks-out.Errors) / seconds
	}
	if cfg.Rate > 0 && ctx.Err() == nil {
		out.Unsent = r.planned - out.Checks
	}
	out.Latency = latencies(r.times)
	if cfg.Bound != nil {
		v := cfg.Bound.judge(admissions, cfg.Cost)
		if v.Most > 0 {
			v.Key = cfg.Keys.name(v.key)
		}
		out.Verdict = &v
	}
	return out, nil
}

// now is the clock of a run. It is read at both ends of each check.
func now() time.Time { return time.Now() }

func (r *run) elapsed() time.Duration { return now().Sub(r.start) }

// work sends checks until there are none left, and returns what was admitted if there is a Bound.
func (r *run) work(ctx context.Context, asker Asker) (admitted []admission) {
	keys := r.Keys.picker()
	for {
		n := r.next.Add(1) - 1
		if n >= r.planned || ctx.Err() != nil {
			return admitted
		}
		due, ok := r.await(ctx, n)
		if !ok {
			return admitted
		}
		key := keys.pick(uint64(n))
		sent := r.elapsed()
		if r.Rate == 0 {
			due = sent
		}
		within, cancel := context.WithTimeout(ctx, r.Timeout)
		answer, err := asker.Ask(within, r.Keys.name(key))
		cancel()
		answered := r.elapsed()
		if err != nil && ctx.Err() != nil {
			return admitted // it was the end of the run
		}
		r.tally(answer, err, answered-due)
		if err == nil && answer.Allowed && r.Bound != nil {
			admitted = append(admitted, admission{key: key, sent: sent, answered: answered})
		}
	}
}

// await waits until the n-th check may be sent. It is false when the run is over.
func (r *run) await(ctx context.Context, n int64) (due time.Duration, ok bool) {
	at := r.elapsed()
	if r.Rate == 0 {
		return at, at < r.Duration
	}
	due = time.Duration(float64(n) / r.Rate * float64(time.Second))
	if at >= r.Duration+r.Timeout {
		return due, false
	}
	if due <= at {
		return due, true
	}
	select {
	case <-time.After(due - at):
		return due, true
	case <-ctx.Done():
		return due, false
	}
}

func (r *run) tally(a Answer, err error, took time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.result.Checks++
	if err != nil {
		if r.result.Errors++; r.result.Errors == 1 {
			r.result.FirstError = err.Error()
		}
		return
	}
	// What took longer than the histogram holds counts as the longest that it holds.
	_ = r.times.RecordValue(min(max(int64(took), 1), r.times.HighestTrackableValue()))
	if a.Allowed {
		r.result.Admitted++
	} else {
		r.result.Refused++
	}
	if a.FailedOpen {
		r.result.FailedOpen++
	}
	if a.FailedClosed {
		r.result.FailedClosed++
	}
}

// report calls Progress until the run is finished.
func (r *run) report(finished <-chan struct{}) {
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-finished:
			return
		case <-tick.C:
			r.mu.Lock()
			p := Progress{Elapsed: r.elapsed(), Of: r.Duration, Sent: r.result.Checks, P99: time.Duration(r.times.ValueAtQuantile(99))}
			r.mu.Unlock()
			r.Progress(p)
		}
	}
}

func latencies(h *hdrhistogram.Histogram) Latency {
	at := func(quantile float64) time.Duration { return time.Duration(h.ValueAtQuantile(quantile)) }
	return Latency{
		Min: time.Duration(h.Min()), Mean: time.Duration(h.Mean()), Max: time.Duration(h.Max()),
		P50: at(50), P90: at(90), P99: at(99), P999: at(99.9),
	}
}
