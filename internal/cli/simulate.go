package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"time"

	"github.com/spf13/cobra"

	"github.com/weirlimit/weir/internal/simulate"
	"github.com/weirlimit/weir/policy"
)

// simulateFlags are the flags of weir simulate.
type simulateFlags struct {
	input, policies, html, output string
	only                          []string
	format, key, keyRegexp        string
	generate, suggest             string
	rate                          float64
	length                        time.Duration
	keys                          int
	seed                          uint64
}

func newSimulate() *cobra.Command {
	var f simulateFlags
	cmd := &cobra.Command{
		Use:   "simulate",
		Short: "Replay traffic against policies, to choose a limit by looking",
		Long: `Replay an access log, a CSV file, JSON lines or generated traffic against policies, side by side and in
virtual time, with the algorithms of a node: what each would have admitted and refused, the largest number in any window, the
callers touched, the longest wait. Shadow policies are replayed as if they were in force.
Exit status: 0 done, 2 error.`,
		Example: `  weir simulate --input access.log.gz --policies candidates.yaml --html report.html
  weir simulate --generate burst --rate 20 --for 10m --policies candidates.yaml
  zcat log.gz | weir simulate --input - --policies candidates.yaml --suggest callers=1%`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.run(cmd.Context(), cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&f.input, "input", "",
		"`FILE` to replay, - for standard input: an access log, CSV of time,key,cost or JSON lines; .gz and .zst are decompressed")
	fs.StringVar(&f.policies, "policies", "", "policy `FILE` with the candidates")
	fs.StringSliceVar(&f.only, "policy", nil, "replay only the policies of these `NAMES`")
	fs.StringVar(&f.html, "html", "", "write a report with charts to this `FILE`, - for standard output")
	fs.StringVarP(&f.output, "output", "o", "text", "how to print the result: text or json")
	fs.StringVar(&f.format, "format", "auto", "of the input: auto, combined, csv or json")
	fs.StringVar(&f.key, "key", "ip",
		"field of an access log that is the key: ip, user, method, path, status, referer or agent")
	fs.StringVar(&f.keyRegexp, "key-regexp", "",
		"regular expression (RE2) that finds the key in a line of any format: its first group, or the whole match")
	fs.StringVar(&f.generate, "generate", "",
		"generate traffic in place of --input: steady, burst, poisson, diurnal or greedy")
	fs.Float64Var(&f.rate, "rate", 100, "of generated traffic: requests a second, on the mean")
	fs.DurationVar(&f.length, "for", 10*time.Minute, "of generated traffic: its length")
	fs.IntVar(&f.keys, "keys", 10, "of generated traffic: the number of callers")
	fs.Uint64Var(&f.seed, "seed", 1, "of generated traffic: the same seed gives the same traffic")
	fs.StringVar(&f.suggest, "suggest", "",
		"also find the smallest limit of each policy that touches at most this share, as in callers=1% or requests=0.1%")
	return cmd
}

func (f *simulateFlags) run(ctx context.Context, stdin io.Reader, stdout, stderr io.Writer) error {
	switch {
	case f.policies == "":
		return errors.New("policies: name the file with the candidates")
	case (f.input == "") == (f.generate == ""):
		return errors.New("input: give either a file to replay, or --generate a pattern")
	}
	if err := checkOutput(f.output); err != nil {
		return err
	}
	set, err := policy.Load(f.policies)
	if err != nil {
		return fmt.Errorf("policies: %w", err)
	}
	candidates, err := simulate.Candidates(f.policies, set, f.only, stderr)
	if err != nil {
		return err
	}
	cfg := simulate.Config{Policies: candidates}
	if cfg.Suggest, err = simulate.ParseShare(f.suggest); err != nil {
		return err
	}
	report := simulate.Report{}
	var log *simulate.Log
	if f.generate != "" {
		g, err := simulate.NewGenerator(simulate.PatternConfig{
			Pattern: simulate.Pattern(f.generate), Rate: f.rate, For: f.length, Keys: f.keys, Seed: f.seed,
		})
		if err != nil {
			return fmt.Errorf("generate: %w", err)
		}
		cfg.Source, report.Input = g, f.generate
	} else {
		in, closeInput, err := f.open(stdin)
		if err != nil {
			return err
		}
		defer closeInput()
		log = in
		defer log.Close()
		cfg.Source, report.Input = log, f.input
	}
	report.Result, err = simulate.Run(ctx, cfg)
	if err != nil {
		return fmt.Errorf("input: %s: %w", report.Input, err)
	}
	if log != nil {
		report.Malformed, report.BadLines = log.Malformed()
	}
	return report.Write(stdout, f.html, f.output == "json")
}

// open opens the input. Its errors name the flag.
func (f *simulateFlags) open(stdin io.Reader) (*simulate.Log, func() error, error) {
	cfg := simulate.LogConfig{Format: simulate.Format(f.format), Field: f.key, Name: f.input}
	if f.keyRegexp != "" {
		re, err := regexp.Compile(f.keyRegexp)
		if err != nil {
			return nil, nil, fmt.Errorf("key-regexp: %w", err)
		}
		cfg.Pattern = re
	}
	in, closeInput := stdin, func() error { return nil }
	if f.input != "-" {
		file, err := os.Open(f.input)
		if err != nil {
			return nil, nil, fmt.Errorf("input: %w", err)
		}
		in, closeInput = file, file.Close
	}
	log, err := simulate.NewLog(in, cfg)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("input: %s: %w", f.input, err), closeInput())
	}
	return log, closeInput, nil
}
