// Command bench runs Weir, the alternatives that users have, and the floors of the transports in turns on one machine.
// It prints rates, server CPU per million decisions, resident memory and latencies, as medians over several rounds, and
// their ratios. See docs/performance.md for what each row means.
//
//	cd bench && go run . [-short] [-rounds 5] [-only regexp] [-weir PATH] [-beside PATH] [-nodes 3] >report.md
//
// It runs on Linux, because it reads the servers' CPU and memory from /proc. Every server listens on loopback, is
// bounded in time and count, and is ended by its own pid, even if the harness is interrupted. The exit status is 0 if
// everything was measured, or left out with a reason, and 2 if the harness failed.
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
	"syscall"
	"time"
)

func main() {
	var err error
	if args := os.Args[1:]; len(args) > 0 && args[0] == serveCommand { // a child, which is this same binary
		err = serveFloor(args[1:])
	} else {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
		err = run(ctx, args, os.Stdout, os.Stderr)
		stop()
	}
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(2)
	}
}

// settings are the flags of the command line.
type settings struct {
	short          bool
	rounds, nodes  int
	only           *regexp.Regexp
	weirAt, beside string
}

// The longest time of a run.
const (
	shortRun = 15 * time.Minute
	fullRun  = 2 * time.Hour
)

func parse(args []string, stderr io.Writer) (settings, error) {
	var s settings
	fs := flag.NewFlagSet("bench", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.BoolVar(&s.short, "short", false, "brief measurements, 1 round unless -rounds says otherwise: a first look")
	fs.IntVar(&s.rounds, "rounds", 5, "how often everything is measured")
	fs.IntVar(&s.nodes, "nodes", 3, "how many nodes a cluster of the rows scale- has, 3, 5 or 9 say")
	only := fs.String("only", "", "measure only rows that this `regexp` matches, such as '^unary/weir$' or '^scale-'")
	fs.StringVar(&s.weirAt, "weir", "", "a Weir `binary` to run in place of building this checkout's")
	fs.StringVar(&s.beside, "beside", "", "another Weir `binary`, measured in turns with this one in the rows scale-")
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
	if s.nodes < 2 || s.nodes > 20 {
		return s, fmt.Errorf("-nodes: %d is not between 2 and 20", s.nodes)
	}
	var err error
	if s.only, err = regexp.Compile(*only); err != nil {
		return s, fmt.Errorf("-only: %w", err)
	}
	if s.beside != "" {
		if s.beside, err = exec.LookPath(s.beside); err != nil {
			return s, fmt.Errorf("-beside: %w", err)
		}
	}
	return s, nil
}

// run runs the whole command.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	s, err := parse(args, stderr)
	if err != nil {
		return err
	}
	most := fullRun
	if s.short {
		most = shortRun
	}
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	dir, err := os.MkdirTemp("", "weir-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	debug.SetGCPercent(roomyGC)
	weir, err := findWeir(ctx, s.weirAt, dir, stderr)
	if err != nil {
		return err
	}
	b, err := newBench(ctx, s, dir, weir)
	if err != nil {
		return err
	}
	defer func() {
		cancel()
		b.kids.running.Wait()
	}()
	all, err := runRounds(ctx, stderr, b.workloads(), s.rounds, s.only)
	if err != nil {
		return fmt.Errorf("ended early: %w", err)
	}
	r := report{Date: time.Now(), Machine: describeMachine(ctx, s.weirAt), Short: s.short, Rounds: s.rounds,
		Nodes: s.nodes}
	r.Measured = b.measure.String()
	r.fill(all)
	return r.writeMarkdown(stdout)
}

// findWeir returns the Weir binary to measure.
func findWeir(ctx context.Context, path, dir string, stderr io.Writer) (string, error) {
	if path == "" {
		fmt.Fprintln(stderr, "building weir")
		return build(ctx, "..", filepath.Join(dir, "weir"), "./cmd/node")
	}
	found, err := exec.LookPath(path)
	if err != nil {
		return "", fmt.Errorf("-weir: %w", err)
	}
	return found, nil
}
