// Command bench runs Weir, what its users would otherwise pick, and the floors of the transports in turns on one machine,
// and prints how they compare: rates, server CPU per million decisions, resident memory and latencies, as medians over
// several rounds, with the ratios that the project means to reach. See README.md for what each row means.
//
//	cd bench && go run . [-short] [-rounds 5] [-only regexp] [-json FILE] [-md FILE] [-gubernator PATH] [-weir PATH]
//
// It runs on Linux, whose /proc it reads the servers' accounts from. Everything listens on loopback, is bounded in time
// and count, and is ended by its own pid, also when the harness is interrupted. The exit status is 0 when everything was
// measured or left out with a reason, whether or not the targets are reached, 1 when Weir did not keep a limit, and 2
// when the harness could not do its work.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"syscall"
	"time"
)

func main() {
	// The children of the harness are this same binary.
	if len(os.Args) > 1 {
		child := map[string]func([]string) error{serveCommand: serveFloor, inProcessCommand: measureInProcess}[os.Args[1]]
		if child != nil {
			if err := child(os.Args[2:]); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(2)
			}
			return
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	violated, err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(2)
	case violated:
		fmt.Fprintln(os.Stderr, "bench: Weir did not keep a limit")
		os.Exit(1)
	}
}

// settings are what the command line says.
type settings struct {
	short                                bool
	rounds                               int
	only                                 *regexp.Regexp
	jsonFile, mdFile, gubernator, weirAt string
}

// The most time that a run may take; a short one takes some two and a half minutes, a full one of five rounds some thirty.
const (
	shortRun = 10 * time.Minute
	fullRun  = time.Hour
)

func parse(args []string, stderr io.Writer) (settings, error) {
	var s settings
	fs := flag.NewFlagSet("bench", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.BoolVar(&s.short, "short", false, "a first look in some two and a half minutes: brief measurements, 1 round unless -rounds says otherwise")
	fs.IntVar(&s.rounds, "rounds", 5, "how often everything is measured")
	only := fs.String("only", "", "measure only what this `regexp` matches, such as '^unary/' or 'weir'; limits are named limit/weir-1 and so on")
	fs.StringVar(&s.jsonFile, "json", "", "`file` to write the figures to")
	fs.StringVar(&s.mdFile, "md", "", "`file` to write the report to, besides standard output")
	fs.StringVar(&s.gubernator, "gubernator", "", "a Gubernator `binary` to run in place of building one; unless it takes -peers, one node only")
	fs.StringVar(&s.weirAt, "weir", "", "a Weir `binary` to run in place of building this checkout's")
	if err := fs.Parse(args); err != nil {
		return s, err
	}
	if fs.NArg() > 0 {
		return s, fmt.Errorf("%q is not a flag; see -help", fs.Arg(0))
	}
	given := false
	fs.Visit(func(f *flag.Flag) { given = given || f.Name == "rounds" })
	if s.short && !given {
		s.rounds = 1
	}
	if s.rounds < 1 || s.rounds > 100 {
		return s, fmt.Errorf("-rounds: %d is not between 1 and 100", s.rounds)
	}
	var err error
	if s.only, err = regexp.Compile(*only); err != nil {
		return s, fmt.Errorf("-only: %w", err)
	}
	return s, nil
}

// run is the whole command. violated tells that Weir did not keep a limit.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) (violated bool, err error) {
	s, err := parse(args, stderr)
	if err != nil {
		return false, err
	}
	most := fullRun
	if s.short {
		most = shortRun
	}
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	dir, err := os.MkdirTemp("", "weir-bench-")
	if err != nil {
		return false, err
	}
	defer os.RemoveAll(dir)
	debug.SetGCPercent(roomyGC)

	weirPath := s.weirAt
	if weirPath == "" {
		fmt.Fprintln(stderr, "building weir")
		if weirPath, err = build(ctx, "..", filepath.Join(dir, "weir"), "./cmd/node"); err != nil {
			return false, err
		}
	} else if weirPath, err = exec.LookPath(weirPath); err != nil {
		return false, fmt.Errorf("-weir: %w", err)
	}
	b, err := newBench(ctx, s.short, dir, weirPath, s.gubernator)
	if err != nil {
		return false, err
	}
	defer b.kids.stopAll()

	r := report{
		Date: time.Now(), Machine: describeMachine(ctx, s.weirAt),
		Short: s.short, Rounds: s.rounds, Measured: b.measure.String(),
	}
	fmt.Fprintln(stderr, "looking whether limits are kept")
	r.Limits = b.prove(ctx, s.only)
	if s.only.MatchString("limit/weir-1") {
		weir, floor, err := b.answerSizes(ctx)
		if err != nil {
			return false, err
		}
		r.Sizes = &answerSizes{Weir: weir, Floor: floor}
	}
	all, err := runRounds(ctx, stderr, b.measurements(), s.rounds, s.only)
	if err != nil {
		return false, fmt.Errorf("ended early: %w", err)
	}
	r.Figures = figuresOf(all)
	r.Targets = judge(all, slices.DeleteFunc(targets(), func(t target) bool {
		return !s.only.MatchString(t.subject) || t.base != "" && !s.only.MatchString(t.base)
	}))

	if err := r.writeMarkdown(stdout); err != nil {
		return false, err
	}
	for _, out := range []struct {
		file  string
		write func(io.Writer) error
	}{{s.jsonFile, r.writeJSON}, {s.mdFile, r.writeMarkdown}} {
		if out.file == "" {
			continue
		}
		if err := writeFile(out.file, out.write); err != nil {
			return false, err
		}
	}
	return r.violated(), nil
}

func writeFile(name string, write func(io.Writer) error) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	if err := write(f); err != nil {
		f.Close()
		return err
	}
	return f.Close()
}
