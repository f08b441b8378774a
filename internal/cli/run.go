package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/internal/node"
	"github.com/weirlimit/weir/internal/observe"
	"github.com/weirlimit/weir/limiter"
)

// runFlags are the settings of one node: those of node.Config, and the flags that become fields of Config.
type runFlags struct {
	Node          node.Config
	UnknownPolicy string `flag:"unknown-policy" default:"error" help:"answer to a check of a policy that does not exist: error, allow or deny"`
	LogFormat     string `flag:"log-format" default:"text" help:"format of the log on standard error: text or json"`
	LogLevel      string `flag:"log-level" default:"info" help:"least important messages logged: debug, info, warn or error"`
	Config        string `flag:"config" help:"YAML file with settings, under the names of the flags"`
}

func newRun() *cobra.Command {
	var f runFlags
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Run one node",
		Long: `Run one node. Without flags: a node alone, on loopback, without policies; inline limits work.

Every flag can be given in the environment (WEIR_HTTP_PORT=8080) or in the file of --config (http-port: 8080).
A flag has precedence over the environment, the environment over the file. Port 0 picks a free one, an empty port turns
the service off. Signals: SIGTERM and SIGINT hand everything over and stop, a second one ends
the process at once, SIGHUP reads the policy file, certificates and keys again.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := fillFlags(cmd.Flags(), os.LookupEnv); err != nil {
				return err
			}
			return f.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr(),
				unknownVariables(cmd.Flags(), os.Environ()))
		},
	}
	registerSettings(cmd.Flags(), &f)
	return cmd
}

// flushTimeout bounds how long a stopped node waits for the readers of its log and its standard output.
const flushTimeout = time.Second

// run runs a node until ctx ends or the node fails. unknown has variables of the environment that look like settings
// and are none.
func (f *runFlags) run(ctx context.Context, stdout, stderr io.Writer, unknown []string) error {
	out, log := observe.NewLogQueue(stdout, admission.LogQueue), observe.NewLogQueue(stderr, admission.LogQueue)
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), flushTimeout)
		defer cancel()
		_, _ = out.Close(ctx), log.Close(ctx) // lines that were not read by then are lost
	}()
	cfg, err := f.nodeConfig(log)
	if err != nil {
		return err
	}
	cfg.LogDropped = log.Dropped
	cfg.Stderr = stderr // the audit log has a queue of its own
	if len(unknown) > 0 {
		cfg.Logger.Warn("environment has unknown settings", "variables", unknown)
	}
	admission.LimitProcess(cfg.Logger)
	outliveLog()
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP) // before the node starts: without it, the signal would end the process
	defer signal.Stop(hup)
	n, err := node.Start(ctx, cfg)
	if err != nil {
		return err
	}
	ready := n.Settled()
	for {
		select {
		case <-ready:
			fmt.Fprintln(out, n.ReadyLine())
			ready = nil
		case <-hup:
			n.Reload()
		case <-n.Failed():
			return errors.Join(n.Err(), stopNode(n, cfg.Grace, cfg.Logger))
		case <-ctx.Done():
			return stopNode(n, cfg.Grace, cfg.Logger)
		}
	}
}

// stopNode stops a node. If a signal comes meanwhile, it returns an error at once.
func stopNode(n *node.Node, grace time.Duration, log *slog.Logger) error {
	again := make(chan os.Signal, 1)
	signal.Notify(again, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(again)
	log.Info("node stopping", "grace", grace, "hint", "another SIGTERM or SIGINT ends the process at once")
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		n.Stop()
	}()
	select {
	case <-stopped:
		return nil
	case s := <-again:
		// The process ends now, and the goroutine with it.
		log.Warn("stop aborted by another signal", "signal", s.String())
		return fmt.Errorf("%v while stopping: ended at once, without handing over what was left", s)
	}
}

// outliveLog keeps the process running if the reader of its log or its standard output is gone. Otherwise SIGPIPE would
// end it at the next line, without a hand-over.
func outliveLog() { signal.Ignore(syscall.SIGPIPE) }

// nodeConfig returns the node's configuration, which the node validates.
func (f *runFlags) nodeConfig(log io.Writer) (node.Config, error) {
	cfg := f.Node
	cfg.Version = version()
	var err error
	if cfg.Name == "" {
		if cfg.Name, err = os.Hostname(); err != nil {
			return cfg, fmt.Errorf("name: the host has no name (%w): set it", err)
		}
	}
	if cfg.Voters, err = node.ParseVoters(cfg.Voters, cfg.Name); err != nil {
		return cfg, fmt.Errorf("voters: %w", err)
	}
	var known bool
	if cfg.UnknownPolicy, known = unknownPolicies[f.UnknownPolicy]; !known {
		return cfg, fmt.Errorf("unknown-policy: %q is not one of error, allow and deny", f.UnknownPolicy)
	}
	cfg.Logger, err = newLogger(log, f.LogFormat, f.LogLevel)
	return cfg, err
}

var unknownPolicies = map[string]limiter.Unknown{"error": limiter.UnknownError, "allow": limiter.UnknownAllow,
	"deny": limiter.UnknownDeny}

// newLogger returns a logger with a format, text or json, and a lowest level.
func newLogger(w io.Writer, format, level string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, fmt.Errorf("log-level: %q is not one of debug, info, warn and error", level)
	}
	opts := &slog.HandlerOptions{Level: l}
	switch format {
	case "text":
		return slog.New(slog.NewTextHandler(w, opts)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, opts)), nil
	}
	return nil, fmt.Errorf("log-format: %q is not one of text and json", format)
}
