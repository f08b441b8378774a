package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"time"
)

// A metric is the name of a figure. All figures are numbers in the unit given here.
type metric string

const (
	rate        metric = "rate"         // decisions a second
	serverCPU   metric = "server_cpu"   // CPU seconds of all server processes per million decisions
	clientCPU   metric = "client_cpu"   // the same of the harness
	p50         metric = "p50_us"       // latency of a call, µs
	p99         metric = "p99_us"       // the same
	rss         metric = "rss_bytes"    // resident memory of all server processes after the run
	failed      metric = "failed_share" // calls that failed, 0 to 1
	idleCPU     metric = "idle_percent" // CPU of a node without callers, in percent of a core
	bytesPerKey metric = "bytes_per_key"
)

// A sample has the figures of one run of a row.
type sample map[metric]float64

// A workload is measured for several systems, one directly after the other.
type workload struct {
	name, title string
	rows        []row
}

// A row is one system under a workload.
type row struct {
	system string
	once   bool // expensive and steady: measured in the first round only
	run    func(ctx context.Context) (sample, error)
}

// A series has the samples of a row, by number of the round.
type series struct {
	work, title string
	row
	samples map[int]sample
	err     error // why there is no sample, or one is missing
}

func (s *series) name() string { return s.work + "/" + s.system }

// runRounds measures in turns: each round runs all workloads, so that a disturbance of the machine affects all alike.
// The rows of a workload run directly after one another, and each round begins with another row. A row that fails is
// not run again. The error is that of ctx.
func runRounds(
	ctx context.Context, progress io.Writer, works []workload, rounds int, only *regexp.Regexp,
) ([]*series, error) {
	var groups [][]*series
	for _, w := range works {
		var group []*series
		for _, r := range w.rows {
			s := &series{w.name, w.title, r, make(map[int]sample), nil}
			if only.MatchString(s.name()) {
				group = append(group, s)
			}
		}
		groups = append(groups, group)
	}
	all := slices.Concat(groups...)
	for round := range rounds {
		for _, group := range groups {
			for i := range group {
				s := group[(i+round)%len(group)]
				if s.err != nil || s.once && round > 0 {
					continue
				}
				began := time.Now()
				got, err := s.run(ctx)
				if ctx.Err() != nil {
					return all, ctx.Err()
				}
				if err != nil {
					s.err = err
				} else {
					s.samples[round] = got
				}
				took := time.Since(began).Seconds()
				fmt.Fprintf(progress, "round %d  %-28s %5.1fs  %s\n", round+1, s.name(), took, headline(got, err))
			}
		}
	}
	return all, nil
}

// headline returns a sample in a few words, for the progress.
func headline(s sample, err error) string {
	if err != nil {
		return err.Error()
	}
	for _, f := range []struct {
		m      metric
		format string
	}{{rate, "%.0f/s"}, {bytesPerKey, "%.0f bytes a key"}, {idleCPU, "%.2f %% of a core"}} {
		if v, ok := s[f.m]; ok {
			return fmt.Sprintf(f.format, v)
		}
	}
	return ""
}

// A spread is the median, least and most of a figure over the rounds.
type spread struct {
	Median float64
	Min    float64
	Max    float64
	Rounds int
}

// spreadOf returns the spread of values; false if there are none. The median of an even number of values is the mean of
// the middle two.
func spreadOf(values []float64) (spread, bool) {
	v := slices.Sorted(slices.Values(values))
	n := len(v)
	if n == 0 {
		return spread{}, false
	}
	return spread{Median: (v[(n-1)/2] + v[n/2]) / 2, Min: v[0], Max: v[n-1], Rounds: n}, true
}

// of returns the spread of a figure; false if no sample has it.
func (s *series) of(m metric) (spread, bool) {
	var values []float64
	for got := range maps.Values(s.samples) {
		if v, ok := got[m]; ok {
			values = append(values, v)
		}
	}
	return spreadOf(values)
}

// ratioTo returns the spread of the ratios of two series' figures. Each ratio is taken within one round, so that a
// disturbance of both cancels. It leaves out rounds in which one of them has no figure.
func (s *series) ratioTo(base *series, m metric) (spread, bool) {
	var ratios []float64
	for round, a := range s.samples {
		v, ok := a[m]
		w, ok2 := base.samples[round][m]
		if ok && ok2 && w != 0 {
			ratios = append(ratios, v/w)
		}
	}
	return spreadOf(ratios)
}
