// Package cli is the weir command: a node, and commands for clusters, each in a file. cmd/weir and cmd/node run it.
//
// The path of a command: run (this file) builds the tree of commands → cobra parses the flags → fillFlags (settings.go)
// adds the environment and the file of --config → the command runs, through connection (connect.go) if it asks a node →
// run turns its error into an exit status.
//
// A flag, its variable in the environment and its field in a YAML file have one name. Text output may change at any
// time; JSON output is part of the API. Text from callers or files, such as a key, is quoted if it could control a
// terminal.
package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	_ "time/tzdata" // policies name time zones, and an image made from scratch has no zone files

	"github.com/spf13/cobra"

	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/internal/observe"
)

// Exit statuses of every command.
const (
	exitOK       = 0
	exitNegative = 1 // a negative result: a check was refused, a file has mistakes
	exitError    = 2 // a bad flag, a port taken, a missing file, a node that cannot be reached
)

// A command returns errNegative for exitNegative, after it has printed everything.
var errNegative = errors.New("negative result")

// Main runs the process's command line, and ends the process.
func Main() {
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

// run runs a command line. The first interrupt or termination signal ends ctx. A second one kills the process, or is
// handled by the command (see stopNode).
func run(args []string, stdout, stderr io.Writer) int {
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	context.AfterFunc(ctx, cancel) // later signals have their usual effect

	root := newRoot()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteContextC(ctx)
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errNegative):
		return exitNegative
	}
	// LogQueue, so that the end of the process does not wait for a reader of stderr.
	last := observe.NewLogQueue(stderr, admission.LogQueue)
	fmt.Fprintln(last, "weir:", flagged(cmd.Flags(), err))
	within, stop := context.WithTimeout(context.Background(), flushTimeout)
	defer stop()
	_ = last.Close(within)
	return exitError
}

func newRoot() *cobra.Command {
	root := group("weir", "A distributed rate limiter that needs no Redis", `Weir is a distributed rate limiter. Nodes form a cluster by gossip, every key has one owner, and the
owner decides in memory, on one clock.

Start with:  weir dev`,
		newDev(), newRun(), newCheck(), newCharge(), newReserve(), newExtend(), newCommit(), newCancel(), newStatus(),
		newTop(), newValidate(),
		newSimulate(), newLoad(), newToken(), newSecrets(), newGossipKeys(), newOverride(),
		&cobra.Command{Use: "version", Short: "Print version, commit, Go release and platform", Args: namedArgs,
			Run: func(cmd *cobra.Command, _ []string) { fmt.Fprintln(cmd.OutOrStdout(), "weir", build()) }})
	root.Version, root.SilenceUsage, root.SilenceErrors = build(), true, true
	root.Args = nil // cobra then says which command a mistyped one may be
	root.SetHelpCommand(newHelp())
	root.InitDefaultCompletionCmd()
	if completion, _, err := root.Find([]string{"completion"}); err == nil {
		completion.RunE = root.RunE // without RunE cobra succeeds whatever follows the command
	}
	return root
}

// newHelp replaces cobra's help command, which takes a mistyped command for a question about weir and succeeds.
func newHelp() *cobra.Command {
	return &cobra.Command{
		Use:   "help [COMMAND]",
		Short: "Explain a command and its flags",
		RunE: func(cmd *cobra.Command, args []string) error {
			about, rest, err := cmd.Root().Find(args)
			if err != nil {
				return err
			}
			if err := cobra.NoArgs(about, rest); err != nil {
				return err
			}
			about.InitDefaultHelpFlag() // so that Help lists it
			return about.Help()
		},
	}
}

// group returns a command that only has subcommands.
func group(use, short, long string, commands ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Long: long, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	cmd.AddCommand(commands...)
	return cmd
}

// namedArgs accepts exactly the arguments that a command's Use names.
func namedArgs(cmd *cobra.Command, args []string) error {
	names := strings.Fields(cmd.Use)[1:]
	switch {
	case len(args) < len(names):
		return fmt.Errorf("%s: is missing", names[len(args)])
	case len(args) > len(names):
		return fmt.Errorf("argument %q: is one too many", args[len(names)])
	}
	return nil
}

// The linker sets release and commit (-X) when a release or an image is built.
var release, commit string

// version returns release, or the module's version if the binary was built from a tagged module, or "devel".
func version() string {
	info, ok := debug.ReadBuildInfo()
	if release != "" || !ok || info.Main.Version == "(devel)" {
		return cmp.Or(release, "devel")
	}
	return cmp.Or(info.Main.Version, "devel")
}

// build returns the version, the commit, the Go release and the platform.
func build() string {
	c := cmp.Or(commit, "unknown")
	if info, ok := debug.ReadBuildInfo(); ok && commit == "" {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				c = s.Value
			}
		}
	}
	return fmt.Sprintf("%s (commit %.12s, %s, %s/%s)", version(), c, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
