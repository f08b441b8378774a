package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// A metric names one figure of a measurement. All are plain numbers in the unit stated here.
type metric string

const (
	rate      metric = "rate"       // decisions a second
	serverCPU metric = "server_cpu" // CPU seconds of all server processes per million decisions
	clientCPU metric = "client_cpu" // the same of the harness
	perCPU    metric = "per_cpu"    // decisions per CPU second of servers and harness together
	p50       metric = "p50_us"     // latency of a call, µs
	p99       metric = "p99_us"
	p999      metric = "p999_us"
	rss       metric = "rss_bytes"    // resident memory of all server processes after the run
	failed    metric = "failed_share" // calls that failed, 0 to 1

	idleRSS   metric = "idle_rss_bytes" // overload: resident before
	peakRSS   metric = "peak_rss_bytes" // overload: the highest while it ran
	overBound metric = "peak_to_bound"  // overload: peak over (2 × idle + what is in flight)

	nsOne       metric = "ns_1_thread"  // in-process: elapsed time by decisions, 1 M keys
	nsTwo       metric = "ns_2_threads" // the same by two goroutines together
	nsHotOne    metric = "ns_hot_1_thread"
	nsHotTwo    metric = "ns_hot_2_threads"
	bytesPerKey metric = "bytes_per_key"
	gcMillis    metric = "gc_ms"    // one collection with all keys live
	admitted    metric = "admitted" // of limitAttempts at a limit of limitAllowed

	logBytes  metric = "bytes_per_admission"    // of a full log of a million
	logSpread metric = "slowest_to_ten_entries" // decision time at any log length over the one at 10 entries
)

// logNanos is the decision time of a log of so many entries.
func logNanos(entries int) metric { return metric(fmt.Sprintf("ns_at_%d", entries)) }

// A sample is what one run of a measurement found.
type sample map[metric]float64

// A measurement is one system under one workload.
type measurement struct {
	work   string // the workload; measurements of one are compared with one another and run next to one another
	system string
	once   bool // costly and steady: in the first round only
	turns  int  // in each round, in turns with the others of the workload, which have as many; 0: one
	run    func(ctx context.Context) (sample, error)
}

func (m *measurement) name() string { return m.work + "/" + m.system }

// A series is a measurement's samples, one for each round, or turn, that succeeded, by its number.
type series struct {
	work, system string
	samples      map[int]sample
	err          error // why there is none, or one is missing
}

// errViolated marks a measurement whose result was wrong, as opposed to slow or unavailable.
var errViolated = errors.New("a limit was not kept")

// runRounds runs all measurements in turns: every round goes through all of them, so that whatever else the machine
// does falls on all alike. Measurements of one workload run right after one another, each round, and each turn of it, beginning with another.
// One that cannot run is not tried again. The error is that of ctx.
func runRounds(ctx context.Context, progress io.Writer, all []measurement, rounds int, only *regexp.Regexp) ([]*series, error) {
	var works []string
	byWork := make(map[string][]*measurement)
	results := make(map[string]*series)
	var order []*series
	for i := range all {
		m := &all[i]
		if !only.MatchString(m.name()) {
			continue
		}
		if byWork[m.work] == nil {
			works = append(works, m.work)
		}
		byWork[m.work] = append(byWork[m.work], m)
		s := &series{work: m.work, system: m.system, samples: make(map[int]sample)}
		results[m.name()] = s
		order = append(order, s)
	}
	for round := range rounds {
		for _, work := range works {
			group := byWork[work]
			turns := max(group[0].turns, 1)
			for i := range turns * len(group) {
				turn := i / len(group)
				m := group[(i+round+turn)%len(group)]
				s := results[m.name()]
				if s.err != nil || m.once && round > 0 {
					continue
				}
				if err := ctx.Err(); err != nil {
					return order, err
				}
				began := time.Now()
				got, err := m.run(ctx)
				if ctx.Err() != nil {
					return order, ctx.Err()
				}
				if err != nil {
					s.err = err
					fmt.Fprintf(progress, "round %d  %-28s %v\n", round+1, m.name(), err)
					continue
				}
				s.samples[round*turns+turn] = got
				if turn < turns-1 {
					continue
				}
				fmt.Fprintf(progress, "round %d  %-28s %5.1fs  %s\n", round+1, m.name(), time.Since(began).Seconds(), headline(got))
			}
		}
	}
	return order, nil
}

// headline is a sample in a few words, for the progress.
func headline(s sample) string {
	for _, f := range []struct {
		m      metric
		format string
	}{{rate, "%.0f/s"}, {nsOne, "%.0f ns"}, {logBytes, "%.2f bytes an admission"}, {bytesPerKey, "%.0f bytes a key"},
		{parkedP99, "%.1f ms parked"}, {decidedIn, "%.2f s"}, {extraTrips, "%.2f round trips"}} {
		if v, ok := s[f.m]; ok {
			return fmt.Sprintf(f.format, v)
		}
	}
	return ""
}

// A spread is the middle and the ends of one figure over the rounds, or turns.
type spread struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
	Rounds int     `json:"rounds"` // or turns
	// Middle are the ends of the middle half of the values.
	Middle [2]float64 `json:"middle"`
}

// spreadOf is the spread of values, of which there must be one at least. The median of an even number is the mean of
// the middle two.
func spreadOf(values []float64) spread {
	v := slices.Sorted(slices.Values(values))
	n := len(v)
	return spread{Median: (v[(n-1)/2] + v[n/2]) / 2, Min: v[0], Max: v[n-1], Rounds: n, Middle: [2]float64{v[n/4], v[n-1-n/4]}}
}

// of returns the spread of one figure, and whether there is any.
func (s *series) of(m metric) (spread, bool) {
	var values []float64
	for _, round := range slices.Sorted(maps.Keys(s.samples)) {
		if v, ok := s.samples[round][m]; ok {
			values = append(values, v)
		}
	}
	if len(values) == 0 {
		return spread{}, false
	}
	return spreadOf(values), true
}

// ratioTo returns the spread of the ratios of two series' figures, each taken within one round, or turn: what disturbed both
// cancels. Rounds in which one of them has none are left out.
func (s *series) ratioTo(base *series, mine, theirs metric) (spread, bool) {
	var ratios []float64
	for round, a := range s.samples {
		v, ok := a[mine]
		w, ok2 := base.samples[round][theirs]
		if ok && ok2 && w != 0 {
			ratios = append(ratios, v/w)
		}
	}
	if len(ratios) == 0 {
		return spread{}, false
	}
	return spreadOf(ratios), true
}

// A load is a closed loop of callers, each making its next call when the last has been answered.
type load struct {
	callers int
	warm    time.Duration // before anything counts: connections, pools, the first collections
	measure time.Duration
	servers []*process // whose CPU and memory are accounted
	partner *process   // whose CPU is told apart, if there is one
}

// callLimit bounds every single call of a load, far above what any takes that does not hang.
const callLimit = 10 * time.Second

// A call asks once and returns the number of decisions it got. It is used by one goroutine at a time.
type call func(ctx context.Context) (decisions int, err error)

// A caller is one goroutine of a load: it goes on until the recorder says that it is over.
type caller func(ctx context.Context, r *recorder)

// recorder takes down what one caller does.
type recorder struct {
	run   *shared
	pause func() // before each call of a loop; nil where there is no pause

	decisions, calls, failures atomic.Int64
	_                          [64]byte // the next caller's counters are on another cache line
	latency                    histogram
	first                      error // the first failure
}

// shared is what all callers of a load see.
type shared struct {
	counting, over atomic.Bool
}

func (r *recorder) over() bool { return r.run.over.Load() }

// done takes down one call. Only one goroutine of a caller calls it.
func (r *recorder) done(began time.Time, decisions int, err error) {
	if r.run.counting.Load() {
		r.latency.add(time.Since(began))
	}
	if err != nil {
		r.lost(err)
		return
	}
	r.calls.Add(1)
	r.decisions.Add(int64(decisions))
}

// lost takes down a call that came to nothing, without its time. Only one goroutine of a caller calls it.
func (r *recorder) lost(err error) {
	if r.first == nil {
		r.first = err
	}
	r.calls.Add(1)
	r.failures.Add(1)
}

// loop is the usual caller.
func loop(c call) caller {
	return func(ctx context.Context, r *recorder) {
		for !r.over() && ctx.Err() == nil {
			if r.pause != nil {
				r.pause()
			}
			began := time.Now()
			n, err := c(ctx)
			r.done(began, n, err)
		}
	}
}

// drive runs the load, caller i being what newCaller returns for it.
func (l load) drive(ctx context.Context, newCaller func(i int) caller) (sample, error) {
	ctx, cancel := context.WithTimeout(ctx, l.warm+l.measure+callLimit)
	defer cancel()
	var run shared
	recorders := make([]recorder, l.callers)
	var callers sync.WaitGroup
	for i := range recorders {
		recorders[i].run = &run
		c := newCaller(i)
		callers.Go(func() { c(ctx, &recorders[i]) })
	}
	wait(ctx, l.warm)
	from, err := l.reading(recorders)
	run.counting.Store(true)
	wait(ctx, l.measure)
	run.counting.Store(false)
	to, err2 := l.reading(recorders)
	run.over.Store(true)
	callers.Wait()
	if err := errors.Join(err, err2); err != nil {
		return nil, err
	}

	var latency histogram
	var first error
	for i := range recorders {
		latency.merge(&recorders[i].latency)
		if first == nil {
			first = recorders[i].first
		}
	}
	calls, decisions := to.calls-from.calls, to.decisions-from.decisions
	if decisions == 0 {
		if first == nil {
			first = errors.New("no call was answered in time")
		}
		return nil, fmt.Errorf("nothing was decided: %w", first)
	}
	out := sample{
		rate:      float64(decisions) / to.at.Sub(from.at).Seconds(),
		clientCPU: (to.client - from.client).Seconds() / float64(decisions) * 1e6,
		perCPU:    float64(decisions) / (to.client - from.client + to.server - from.server).Seconds(),
		p50:       float64(latency.quantile(0.5)) / 1e3,
		p99:       float64(latency.quantile(0.99)) / 1e3,
		p999:      float64(latency.quantile(0.999)) / 1e3,
		failed:    float64(to.failures-from.failures) / float64(calls),
	}
	if len(l.servers) > 0 {
		out[serverCPU] = (to.server - from.server).Seconds() / float64(decisions) * 1e6
		out[rss] = float64(to.rss)
	}
	if l.partner != nil {
		out[partnerCPU] = (to.partner - from.partner).Seconds() / float64(decisions) * 1e6
	}
	return out, nil
}

// counts is everything that is read at the two ends of the time that is measured.
type counts struct {
	at                         time.Time
	decisions, calls, failures int64
	server, partner, client    time.Duration // CPU time
	rss                        int64
}

func (l load) reading(recorders []recorder) (counts, error) {
	var c counts
	if l.partner != nil {
		u, err := l.partner.usage()
		if err != nil {
			return c, err
		}
		c.partner = u.cpu
	}
	for _, p := range l.servers {
		u, err := p.usage()
		if err != nil {
			return c, err
		}
		c.server += u.cpu
		c.rss += u.rss
	}
	c.client = ownCPU()
	c.at = time.Now()
	for i := range recorders {
		r := &recorders[i]
		c.decisions += r.decisions.Load()
		c.calls += r.calls.Load()
		c.failures += r.failures.Load()
	}
	return c, nil
}

// ownCPU is the CPU time of the harness itself, without its children.
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
