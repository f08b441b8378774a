package cli

import (
	"cmp"
	"context"
	_ "embed"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/internal/node"
	"github.com/weirlimit/weir/policy"
)

func newDev() *cobra.Command {
	var f devConfig
	cmd := &cobra.Command{
		Use:   "dev",
		Short: "Run a whole cluster on this machine, with sample policies",
		Long: `Run a whole cluster on this machine, in one process and on loopback only, to try Weir out and to develop against.
It ends with Ctrl-C and leaves nothing behind.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := fillFlags(cmd.Flags(), os.LookupEnv); err != nil {
				return err
			}
			var err error
			if f.Logger, err = newLogger(cmd.ErrOrStderr(), "text", f.LogLevel); err != nil {
				return err
			}
			// If the user has given neither port, a default port that is taken is replaced by any free one.
			f.AnyPort = !cmd.Flags().Changed("http-port") && !cmd.Flags().Changed("grpc-port")
			f.Version, f.Command = version(), command(os.Args[0])
			admission.LimitProcess(f.Logger)
			outliveLog()
			return runDev(cmd.Context(), cmd.OutOrStdout(), f)
		},
	}
	registerSettings(cmd.Flags(), &f)
	return cmd
}

// command returns how a user starts the program again that was started as name. "go run" builds a binary in a temporary
// directory, under the package's name, and starts it by its whole path.
func command(name string) string {
	base := strings.TrimSuffix(filepath.Base(name), ".exe")
	if filepath.IsAbs(name) && (base == "node" || base == "weir" && strings.Contains(name, "go-build")) {
		return "go run ./cmd/" + base
	}
	return name
}

// samples are the policies of a development cluster without a policy file.
//
//go:embed policies.yaml
var samples []byte

// devConfig configures a development cluster.
type devConfig struct {
	Nodes    int       `flag:"nodes" default:"3" range:"1..9" help:"number of nodes"`
	HTTP     node.Port `flag:"http-port" default:"8080" help:"port of the first node for HTTP; the others take any free one"`
	GRPC     node.Port `flag:"grpc-port" default:"8081" help:"port of the first node for gRPC; the others take any free one"`
	Policies string    `flag:"policies" help:"policy file (default: sample policies of every algorithm)"`
	LogLevel string    `flag:"log-level" default:"warn" help:"least important messages logged: debug, info, warn or error"`

	AnyPort bool   // take any free port in place of one that is taken
	Version string // the program's version
	Command string // starts the program, in the examples
	Logger  *slog.Logger
}

// runDev runs a development cluster until ctx ends, and prints examples once it is ready. The cluster keeps nothing,
// and other hosts cannot reach it.
func runDev(ctx context.Context, stdout io.Writer, cfg devConfig) error {
	set, err := policy.Parse("policies.yaml", samples)
	if err != nil {
		return err
	}
	names, voters := devNames(cfg.Nodes)
	base := node.Config{
		Version: cfg.Version, Bind: "127.0.0.1", Voters: voters, Policies: set, PolicyFile: cfg.Policies,
		HTTPPort: node.PortAny, GRPCPort: node.PortAny, GossipPort: node.PortAny, PeerPort: node.PortAny,
		KeepNothing: true, Grace: 5 * time.Second,
		Memory: admission.Divide(admission.OwnBudget().Usable / int64(cfg.Nodes)),
	}
	var nodes []*node.Node
	running, fail := context.WithCancelCause(ctx)
	var watchers sync.WaitGroup
	defer func() {
		fail(nil)
		watchers.Wait()
		for _, n := range slices.Backward(nodes) {
			n.Stop()
		}
	}()
	for i, name := range names {
		own := base
		own.Name, own.Logger = name, cfg.Logger.With("node", name)
		if i == 0 {
			own.HTTPPort, own.GRPCPort, own.AnyPortIfTaken = cmp.Or(cfg.HTTP, node.PortAny),
				cmp.Or(cfg.GRPC, node.PortAny), cfg.AnyPort
		} else {
			own.Join = []string{nodes[0].GossipAddr()}
		}
		n, err := node.Start(ctx, own)
		if err != nil {
			return err
		}
		nodes = append(nodes, n)
		watchers.Go(func() {
			select {
			case <-n.Failed():
				fail(n.Err())
			case <-running.Done():
			}
		})
	}
	for _, n := range nodes {
		select {
		case <-n.Settled():
		case <-running.Done():
		}
	}
	if running.Err() == nil {
		printExamples(stdout, nodes, cfg.Command)
	}
	<-running.Done()
	if ctx.Err() == nil {
		return context.Cause(running)
	}
	fmt.Fprintln(stdout, "\nstopping")
	return nil
}

// devNames returns the names of n nodes, and the most of them that can be voters, so that strict policies work.
func devNames(n int) (names, voters []string) {
	for i := range n {
		names = append(names, fmt.Sprintf("dev-%d", i))
		if node.IsVoterCount(len(names)) {
			voters = names[:len(names):len(names)]
		}
	}
	return names, voters
}

// printExamples prints what is running and what to try first.
func printExamples(w io.Writer, nodes []*node.Node, command string) {
	fmt.Fprintf(w, "A cluster of %d is up. Any node answers for any key:\n\n", len(nodes))
	for _, n := range nodes {
		fmt.Fprintf(w, "  %s  http://%s  grpc %s\n", n.Name(), n.HTTPAddr(), n.GRPCAddr())
	}
	var names []string
	// The examples use the sample policy, or the first policy that can be checked (a concurrency limit cannot), or an
	// inline limit.
	try := ""
	for _, p := range nodes[0].Policies().Policies() {
		names = append(names, p.Name)
		if !p.Concurrency && (try == "" || p.Name == "login") {
			try = p.Name
		}
	}
	body, flags := fmt.Sprintf(`"policy":%q`, try), "--policy "+try
	if try == "" {
		body, flags = `"limit":{"algorithm":"sliding_log","limit":5,"window":"1m"}`, "--limit 5/1m"
	}
	if len(names) > 0 {
		fmt.Fprintf(w, "\nPolicies: %s\n", strings.Join(names, ", "))
	}
	http, rpc := nodes[0].HTTPAddr(), nodes[len(nodes)-1].GRPCAddr()
	fmt.Fprintf(w, "\nConsole: http://%s/console\n", http)
	fmt.Fprintf(w, "\nTry (repeat it until the limit says no):\n\n")
	fmt.Fprintf(w, "  curl -i -H 'Content-Type: application/json' -d '{%s,\"key\":\"alice\"}' http://%s/v1/check\n\n",
		body, http)
	fmt.Fprintf(w, "and through another node, or to see the cluster:\n\n")
	fmt.Fprintf(w, "  %s check alice %s --addr %s\n", command, flags, rpc)
	fmt.Fprintf(w, "  %s status --addr %s\n", command, rpc)
	fmt.Fprintf(w, "\nThe HTTP interface is described at http://%s/openapi.yaml. Ctrl-C stops the cluster.\n", http)
}
