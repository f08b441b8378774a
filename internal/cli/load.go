package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"runtime/debug"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/load"
	"github.com/weirlimit/weir/policy"
)

// loadGC is GOGC while load is generated, as in bench.
const loadGC = 400

// loadFlags are the flags of weir load.
type loadFlags struct {
	targetFlags
	Connections          int `flag:"connections" default:"1" range:"1..10000" help:"connections to each address, over grpc"`
	Run                  load.Config
	tls                  identity
	addrs                []string
	over, atMost, output string
	distribution         string
}

func newLoad() *cobra.Command {
	var f loadFlags
	cmd := &cobra.Command{
		Use:   "load",
		Short: "Send checks to a cluster, measure the answers and check them",
		Long: `Send checks to a running cluster for a while: at a rate (open loop: latencies count from the moment each check
was due), or, without --rate, each worker's next one when the last is answered (closed loop). The admissions are
checked against the limit: of a key, at most so many units in any window. An excess counts only if the times at which checks were
sent and answered prove it. The checks are charged: use keys or a namespace of their own (--key-prefix, --namespace).
Exit status: 0 done, 1 more was admitted than the limit allows, 2 error, also when a check got no decision.`,
		Example: `  weir load --limit 100/1m --keys 50 --rate 1000 --for 30s
  weir load --policy login --at-most 5/1m --over http --concurrency 64
  weir load --limit 1000000/1m --over stream --concurrency 256 --distribution zipf -o json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.do(cmd.Context(), cmd.Flags(), cmd.OutOrStdout())
		},
	}
	fs := cmd.Flags()
	registerSettings(fs, &f.targetFlags)
	registerSettings(fs, &f)
	fs.StringVar(&f.over, "over", "grpc",
		"protocol: grpc (a call for each check), stream (the Go client, which merges checks and knows the owners), http or resp (the Redis protocol, with --policy)")
	fs.StringSliceVar(&f.addrs, "addr", nil,
		"addresses of nodes, HOST:PORT of the port for --over, used in turn, separated by commas (default 127.0.0.1 with port 8081, over http 8080, over resp 6380)")
	fs.StringVar(&f.distribution, "distribution", string(load.Uniform),
		"distribution of the keys: uniform, zipf, or hot (one key in nine of ten checks)")
	fs.Uint64Var(&f.Run.Keys.Seed, "seed", 1, "the same seed asks for the same keys in the same order")
	fs.StringVar(&f.atMost, "at-most", "",
		"bound to check the answers against: units of a key in any window, such as 5/1m (default: what --limit and --algorithm admit; with --policy, twice the limit that the node tells over grpc and stream)")
	registerSettings(fs, &f.tls)
	fs.StringVarP(&f.output, "output", "o", "text", "how to print the result: text or json")
	return cmd
}

func (f *loadFlags) do(ctx context.Context, fs *pflag.FlagSet, stdout io.Writer) error {
	if err := checkOutput(f.output); err != nil {
		return err
	}
	inline, err := f.inline(fs)
	if err != nil {
		return err
	}
	cfg := f.Run
	cfg.Keys.Distribution = load.Distribution(f.distribution)
	if cfg.Bound, err = f.bound(inline); err != nil {
		return err
	}
	config, err := f.tls.config()
	if err != nil {
		return err
	}
	nodes := load.Nodes{
		Over: f.over, Addrs: f.addrs, Connections: f.Connections, Concurrency: cfg.Concurrency, Timeout: cfg.Timeout,
		TLS: config, Token: f.tls.token, Target: f.message(inline, ""), Inline: inline, Cost: cfg.Cost,
	}
	askers, closeAll, err := nodes.Open()
	if err != nil {
		return err
	}
	defer closeAll()
	cfg.Askers = askers
	if cfg.Bound == nil {
		cfg.Bound = nodes.Learn(ctx, cfg.Keys.Prefix+"1")
	}
	// The generator holds so little memory that it would collect many times a second, and take CPU from the nodes that
	// it measures: a third more CPU time a check if both are on one machine.
	defer debug.SetGCPercent(debug.SetGCPercent(loadGC))
	result, err := load.Run(ctx, cfg)
	if err != nil {
		return err
	}
	if err := printLoad(stdout, &f.Run, f.over, &result, f.output == "json"); err != nil {
		return err
	}
	switch {
	case result.Verdict != nil && !result.Verdict.Holds:
		return errNegative
	case result.Errors > 0:
		return fmt.Errorf("%d of %d checks got no decision; the first: %s", result.Errors, result.Checks,
			result.FirstError)
	}
	return nil
}

// bound returns --at-most, or else the most that --limit admits in its window.
func (f *loadFlags) bound(inline *algo.Limit) (*load.Bound, error) {
	if f.atMost == "" {
		return load.BoundOf(inline)
	}
	n, window, err := policy.ParseRate(f.atMost)
	if err != nil {
		return nil, fmt.Errorf("at-most: %w", err)
	}
	return &load.Bound{Units: n, Window: window}, nil
}

// printLoad prints the result of a run.
func printLoad(w io.Writer, run *load.Config, over string, r *load.Result, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(w).Encode(r)
	}
	loop := "closed loop"
	if run.Rate > 0 {
		loop = fmt.Sprintf("open loop at %s a second", humanize.Commaf(run.Rate))
	}
	fmt.Fprintf(w, "%s checks in %v over %s, %s, %d workers: %s decisions a second\n", humanize.Comma(r.Checks),
		r.Elapsed.Round(time.Millisecond), over, loop,
		run.Concurrency, humanize.CommafWithDigits(r.Rate, 1))
	fmt.Fprintf(w, "admitted %s (failed open %s)  refused %s (failed closed %s)  errors %s", humanize.Comma(r.Admitted),
		humanize.Comma(r.FailedOpen),
		humanize.Comma(r.Refused), humanize.Comma(r.FailedClosed), humanize.Comma(r.Errors))
	if run.Rate > 0 {
		fmt.Fprintf(w, "  unsent %s", humanize.Comma(r.Unsent))
	}
	l := r.Latency
	fmt.Fprintf(w, "\nlatency min %v  p50 %v  p90 %v  p99 %v  p99.9 %v  max %v  mean %v\n", short(l.Min), short(l.P50),
		short(l.P90), short(l.P99), short(l.P999), short(l.Max), short(l.Mean))
	if r.Unsent > 0 {
		fmt.Fprintf(w, "%s checks were due and never sent, and are not among the latencies: the cluster or this host cannot keep up, or give more workers\n", humanize.Comma(r.Unsent))
	}
	var err error
	switch v := r.Verdict; {
	case v == nil:
		_, err = fmt.Fprintln(w, "not checked: nothing says what the policy lets through")
	case v.Holds:
		_, err = fmt.Fprintf(w, "checked: no key was admitted more than %d units in any %v; the most was %d\n", v.Units,
			v.Window, v.Most)
	default:
		_, err = fmt.Fprintf(w, "FAILED: %q was admitted %d units within %v, more than %d\n", v.Key, v.Most, v.Window,
			v.Units)
	}
	return err
}

// short rounds a duration to about three digits.
func short(d time.Duration) time.Duration {
	unit := time.Nanosecond
	for unit*1000 <= d {
		unit *= 10
	}
	return d.Round(unit)
}
