package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/weirlimit/weir/internal/load"
)

// printLoad prints what came of a run of checks over a protocol.
func printLoad(w io.Writer, run *load.Config, over string, r *load.Result, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(w).Encode(r)
	}
	loop := "closed loop"
	if run.Rate > 0 {
		loop = fmt.Sprintf("open loop at %s a second", humanize.Commaf(run.Rate))
	}
	fmt.Fprintf(w, "%s checks in %v over %s, %s, %d workers: %s decisions a second\n", humanize.Comma(r.Checks), r.Elapsed.Round(time.Millisecond), over, loop,
		run.Concurrency, humanize.CommafWithDigits(r.Rate, 1))
	fmt.Fprintf(w, "admitted %s (failed open %s)  refused %s (failed closed %s)  errors %s", humanize.Comma(r.Admitted), humanize.Comma(r.FailedOpen),
		humanize.Comma(r.Refused), humanize.Comma(r.FailedClosed), humanize.Comma(r.Errors))
	if run.Rate > 0 {
		fmt.Fprintf(w, "  unsent %s", humanize.Comma(r.Unsent))
	}
	l := r.Latency
	fmt.Fprintf(w, "\nlatency min %v  p50 %v  p90 %v  p99 %v  p99.9 %v  max %v  mean %v\n", short(l.Min), short(l.P50), short(l.P90), short(l.P99), short(l.P999), short(l.Max), short(l.Mean))
	if r.Unsent > 0 {
		fmt.Fprintf(w, "%s checks were due and never sent, and are not among the latencies: the cluster or this host cannot keep up, or give more workers\n", humanize.Comma(r.Unsent))
	}
	var err error
	switch v := r.Verdict; {
	case v == nil:
		_, err = fmt.Fprintln(w, "not checked: nothing says what the policy lets through")
	case v.Holds:
		_, err = fmt.Fprintf(w, "checked: no key was admitted more than %d units in any %v; the most was %d\n", v.Units, v.Window, v.Most)
	default:
		_, err = fmt.Fprintf(w, "FAILED: %q was admitted %d units within %v, more than %d\n", v.Key, v.Most, v.Window, v.Units)
	}
	return err
}

// short is a duration with three digits, about.
func short(d time.Duration) time.Duration {
	unit := time.Nanosecond
	for unit*1000 <= d {
		unit *= 10
	}
	return d.Round(unit)
}
