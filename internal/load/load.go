// Package load sends checks to a running cluster, measures the time of the answers, and checks whether more was
// admitted than a limit allows.
//
// Other callers may use the same keys: an excess that the package reports is real, but admissions of other callers may
// hide one.
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

// maxRate is the largest Config.Rate.
const maxRate = 1_000_000

// Answer is the decision about one check.
type Answer struct {
	Allowed                  bool
	FailedOpen, FailedClosed bool // a fail policy decided, because no owner answered
	// Limit and Window are those of the limit that decided; 0 if the protocol does not return them.
	Limit  int64
	Window time.Duration
}

// Asker sends one check of a key and waits for its decision. It is safe for concurrent use. An error means that there
// is no decision.
type Asker func(ctx context.Context, key string) (Answer, error)

// Config configures a Run. Its tags are those of weir load's flags (see node.Setting), which check the ranges.
type Config struct {
	// Askers send the checks; the workers are divided among them. At least one is required.
	Askers []Asker
	// Keys are the keys that are asked for.
	Keys Keys
	// Rate is the number of checks a second, sent at equal distances however long the answers take (open loop). 0
	// stands for a closed loop: each worker sends its next check when the last is answered.
	Rate float64 `flag:"rate" default:"0" help:"checks a second; 0: as many as the workers get answered"`
	// Concurrency is the number of workers, and so the most checks in flight.
	Concurrency int `flag:"concurrency" default:"64" range:"1..10000" help:"workers, and so checks in flight at most"`
	// Duration and Count bound the checks that are sent; the run ends with the first that is reached.
	Duration time.Duration `flag:"for" default:"10s" range:"1ns..1h" help:"how long to send"`
	Count    int64         `flag:"count" default:"10000000" range:"1..50000000" help:"checks to send at most"`
	// Timeout bounds a check, and how long an open loop goes on after Duration to send checks that are late.
	Timeout time.Duration `flag:"timeout" default:"2s" range:"1ns..1h" help:"longest time to wait for an answer"`
	// Bound is what the admissions are checked against; nil: nothing. Cost is the units of each check.
	Bound *Bound
	Cost  int64 `flag:"cost" default:"1" range:"1.." help:"units of each check"`
}

// validate returns an error that names the invalid setting.
func (c *Config) validate() error {
	if !(c.Rate >= 0 && c.Rate <= maxRate) {
		return fmt.Errorf("rate: must be above 0 and at most %d a second, or 0 for a closed loop", maxRate)
	}
	return c.Keys.validate()
}

// Result is the result of a run.
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
	// of an open loop: checks that were due and not sent in time, because too few workers were free
	Unsent int64 `json:"unsent"`
	// Latency is that of the checks with a decision: from when the check was due (open loop) or sent (closed loop).
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
	planned int64        // checks that the run is to send at most
	next    atomic.Int64 // number of the next check

	mu     sync.Mutex // guards the following
	result Result
	times  *hdrhistogram.Histogram
}

// Run sends checks as cfg says, and waits for the answers. If ctx ends, Run ends without an error. Latencies of an open
// loop count from when a check was due, not from when a worker was free to send it: a cluster that stalls for a second
// delays all checks of that second, and hides none of them (Gil Tene calls the mistake coordinated omission).
func Run(ctx context.Context, cfg Config) (Result, error) {
	if err := cfg.validate(); err != nil {
		return Result{}, err
	}
	r := &run{Config: cfg, start: now(), planned: cfg.Count, times: hdrhistogram.New(1, int64(2*time.Hour), 3)}
	if cfg.Rate > 0 {
		r.planned = min(cfg.Count, int64(math.Ceil(cfg.Rate*cfg.Duration.Seconds())))
	}
	var workers sync.WaitGroup
	admissions := make([][]admission, cfg.Concurrency)
	for i := range admissions {
		workers.Go(func() { admissions[i] = r.work(ctx, cfg.Askers[i%len(cfg.Askers)]) })
	}
	workers.Wait()
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

// now reads the clock of a run, before and after each check.
func now() time.Time { return time.Now() }

func (r *run) elapsed() time.Duration { return now().Sub(r.start) }

// work sends checks until there are none left. It returns the admissions if there is a Bound.
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
		answer, err := asker(within, r.Keys.name(key))
		cancel()
		answered := r.elapsed()
		if err != nil && ctx.Err() != nil {
			return admitted // the run has ended
		}
		r.tally(answer, err, answered-due)
		if err == nil && answer.Allowed && r.Bound != nil {
			admitted = append(admitted, admission{key: key, sent: sent, answered: answered})
		}
	}
}

// await waits until the n-th check may be sent. ok is false if the run is over.
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
	// A time beyond the histogram's range counts as the longest in it.
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

func latencies(h *hdrhistogram.Histogram) Latency {
	at := func(quantile float64) time.Duration { return time.Duration(h.ValueAtQuantile(quantile)) }
	return Latency{
		Min: time.Duration(h.Min()), Mean: time.Duration(h.Mean()), Max: time.Duration(h.Max()),
		P50: at(50), P90: at(90), P99: at(99), P999: at(99.9),
	}
}
