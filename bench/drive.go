package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// A loop has callers that each make one call after the other.
type loop struct {
	callers int
	every   time.Duration // from one call of a caller to its next; 0: until the answer
	warm    time.Duration // not measured: connections, pools and the first collections settle
	measure time.Duration
	servers []*process // whose CPU and memory are measured
}

// callLimit bounds every call, far above the time of any call that is answered at all.
const callLimit = 10 * time.Second

// A call asks once, and returns the number of decisions in the answer. One goroutine at a time may use it.
type call func(ctx context.Context) (decisions int, err error)

// A recorder counts the calls of one caller, whose goroutine alone calls done.
type recorder struct {
	phases                     *phases
	decisions, calls, failures atomic.Int64
	_                          [64]byte // the next caller's counters are on another cache line
	times                      *hdrhistogram.Histogram
	first                      error // the first failure
}

// phases says which phase a run is in. All its callers share it.
type phases struct{ counting, over atomic.Bool }

func newTimes() *hdrhistogram.Histogram { return hdrhistogram.New(1, int64(2*callLimit), 2) }

func (r *recorder) done(began time.Time, decisions int, err error) {
	if r.phases.counting.Load() {
		_ = r.times.RecordValue(min(max(int64(time.Since(began)), 1), r.times.HighestTrackableValue()))
	}
	r.calls.Add(1)
	if err != nil {
		r.failures.Add(1)
		if r.first == nil {
			r.first = err
		}
		return
	}
	r.decisions.Add(int64(decisions))
}

// run makes one call after the other, until the run is over. A call that is late counts from when it was due.
func (r *recorder) run(ctx context.Context, c call, due time.Time, every time.Duration) {
	for !r.phases.over.Load() && ctx.Err() == nil {
		if every > 0 {
			wait(ctx, time.Until(due))
		} else {
			due = time.Now()
		}
		n, err := c(ctx)
		r.done(due, n, err)
		due = due.Add(every)
	}
}

// drive runs the load, and measures it. newCall returns the i-th caller's call.
func (l loop) drive(ctx context.Context, newCall func(i int) call) (sample, error) {
	ctx, cancel := context.WithTimeout(ctx, l.warm+l.measure+callLimit)
	defer cancel()
	var run phases
	recorders := make([]recorder, l.callers)
	var callers sync.WaitGroup
	for i := range recorders {
		recorders[i].phases, recorders[i].times = &run, newTimes()
		c := newCall(i)
		due := time.Now().Add(l.every * time.Duration(i) / time.Duration(l.callers))
		callers.Go(func() { recorders[i].run(ctx, c, due, l.every) })
	}
	wait(ctx, l.warm)
	from, err := l.read(recorders)
	run.counting.Store(true)
	wait(ctx, l.measure)
	run.counting.Store(false)
	to, err2 := l.read(recorders)
	run.over.Store(true)
	callers.Wait()
	if err := errors.Join(err, err2); err != nil {
		return nil, err
	}
	times := newTimes()
	var first error
	for i := range recorders {
		times.Merge(recorders[i].times)
		if first == nil {
			first = recorders[i].first
		}
	}
	if to.decisions == from.decisions {
		return nil, fmt.Errorf("nothing was decided: %w", errors.Join(first, ctx.Err()))
	}
	got := l.between(from, to)
	got[p50], got[p99] = float64(times.ValueAtQuantile(50))/1e3, float64(times.ValueAtQuantile(99))/1e3
	return got, nil
}

// counts are the numbers that are read at the beginning and the end of the measured time.
type counts struct {
	at                         time.Time
	decisions, calls, failures int64
	server, client             time.Duration // CPU time
	rss                        int64
}

func (l loop) read(recorders []recorder) (counts, error) {
	var c counts
	for _, p := range l.servers {
		u, err := p.usage()
		if err != nil {
			return c, err
		}
		c.server += u.cpu
		c.rss += u.rss
	}
	c.client, c.at = ownCPU(), time.Now()
	for i := range recorders {
		r := &recorders[i]
		c.decisions += r.decisions.Load()
		c.calls += r.calls.Load()
		c.failures += r.failures.Load()
	}
	return c, nil
}

// between returns the figures of the time between two readings.
func (l loop) between(from, to counts) sample {
	decisions := float64(to.decisions - from.decisions)
	got := sample{
		rate:      decisions / to.at.Sub(from.at).Seconds(),
		clientCPU: (to.client - from.client).Seconds() / decisions * 1e6,
		failed:    float64(to.failures-from.failures) / float64(to.calls-from.calls),
	}
	if len(l.servers) > 0 {
		got[serverCPU], got[rss] = (to.server-from.server).Seconds()/decisions*1e6, float64(to.rss)
	}
	return got
}

// ownCPU returns the CPU time of the harness itself, without its children.
func ownCPU() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0 // cannot fail for the process itself
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func wait(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
