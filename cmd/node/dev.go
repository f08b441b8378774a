package main

import (
	"context"
	_ "embed"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/weirlimit/weir/internal/memory"
	"github.com/weirlimit/weir/internal/node"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
)

// devPolicies is what a development cluster limits by unless it is given a file.
//
//go:embed dev-policies.yaml
var devPolicies []byte

// maxDevNodes is the most nodes that make sense on one machine.
const maxDevNodes = 9

func newDev() *cobra.Command {
	var f struct {
		devConfig
		httpPort, grpcPort parsed[node.Port]
		logLevel           string
	}
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
			for _, p := range []struct {
				flag string
				port node.Port
			}{{"--http-port", f.httpPort.value}, {"--grpc-port", f.grpcPort.value}} {
				if p.port == node.PortOff {
					return fmt.Errorf("%s: must not be empty here: 0 stands for any free port", p.flag)
				}
			}
			if f.nodes < 1 || f.nodes > maxDevNodes {
				return fmt.Errorf("--nodes: %d is not a number of nodes from 1 to %d", f.nodes, maxDevNodes)
			}
			var err error
			if f.log, err = newLogger(cmd.ErrOrStderr(), "text", f.logLevel); err != nil {
				return err
			}
			f.http, f.grpc = f.httpPort.value, f.grpcPort.value
			// The ports of the documentation where they are free, and those that are asked for or none.
			f.anyPort = !cmd.Flags().Changed("http-port") && !cmd.Flags().Changed("grpc-port")
			return runDev(cmd.Context(), cmd.OutOrStdout(), f.devConfig)
		},
	}
	cmd.Flags().IntVar(&f.nodes, "nodes", 3, "number of nodes")
	cmd.Flags().Var(f.httpPort.by(parsePort, "port", "8080"), "http-port", "port of the first node for HTTP; the others take any free one")
	cmd.Flags().Var(f.grpcPort.by(parsePort, "port", "8081"), "grpc-port", "port of the first node for gRPC; the others take any free one")
	cmd.Flags().StringVar(&f.policies, "policies", "", "policy file (default: sample policies of every algorithm)")
	cmd.Flags().StringVar(&f.logLevel, "log-level", "warn", "least important messages logged: debug, info, warn or error")
	return cmd
}

// devConfig is what a development cluster is started with.
type devConfig struct {
	nodes      int
	http, grpc node.Port // of the first node
	anyPort    bool      // take any free one in place of one that is taken
	policies   string
	log        *slog.Logger
}

func runDev(ctx context.Context, stdout io.Writer, dev devConfig) error {
	samples, err := policy.Parse("dev-policies.yaml", devPolicies)
	if err != nil {
		return err
	}
	limitMemory(dev.log)
	outliveLog()
	share := memory.Divide(memory.Own().Usable / int64(dev.nodes))
	var names, voters []string
	for i := range dev.nodes {
		names = append(names, fmt.Sprintf("dev-%d", i))
		if isVoterCount(len(names)) {
			voters = names[:len(names):len(names)] // as many as there can be, so that strict policies can be tried
		}
	}
	var nodes []*node.Node
	watching, enough := context.WithCancel(ctx)
	var watchers sync.WaitGroup
	defer func() {
		enough()
		watchers.Wait()
		for i := len(nodes) - 1; i >= 0; i-- {
			nodes[i].Stop()
		}
	}()
	failed := make(chan error, dev.nodes)
	for i, name := range names {
		cfg := node.Config{
			Version: version(), Name: name, Bind: "127.0.0.1", Voters: voters, Policies: samples, PolicyFile: dev.policies,
			Timeout: limiter.DefaultTimeout, Grace: 5 * time.Second, MaxKeys: 10_000_000, Memory: share,
			InlineMaxWindow: limiter.DefaultInlineMaxWindow,
			Logger:          dev.log.With("node", name),
		}
		if i == 0 {
			cfg.HTTPPort, cfg.GRPCPort, cfg.AnyPortIfTaken = dev.http, dev.grpc, dev.anyPort
		} else {
			cfg.Join = []string{nodes[0].GossipAddr()}
		}
		n, err := node.Start(ctx, cfg)
		if err != nil {
			return err
		}
		nodes = append(nodes, n)
		watchers.Go(func() {
			select {
			case err := <-n.Failed():
				failed <- err
			case <-watching.Done():
			}
		})
	}
	for _, n := range nodes {
		select {
		case <-n.Settled():
		case err := <-failed:
			return err
		case <-ctx.Done():
			return nil
		}
	}
	printDev(stdout, nodes)
	select {
	case <-ctx.Done():
		fmt.Fprintln(stdout, "\nstopping")
		return nil
	case err := <-failed:
		return err
	}
}

// printDev says what is running and what to try first.
func printDev(w io.Writer, nodes []*node.Node) {
	fmt.Fprintf(w, "A cluster of %d is up. Any node answers for any key:\n\n", len(nodes))
	for _, n := range nodes {
		fmt.Fprintf(w, "  %s  http://%s  grpc %s\n", n.Name(), n.HTTPAddr(), n.GRPCAddr())
	}
	var names []string
	// The sample policy, or the first that can be checked, which a concurrency limit cannot, or a limit sent along.
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
	fmt.Fprintf(w, "  curl -i -H 'Content-Type: application/json' -d '{%s,\"key\":\"alice\"}' http://%s/v1/check\n\n", body, http)
	fmt.Fprintf(w, "and through another node, or to see the cluster:\n\n")
	fmt.Fprintf(w, "  go run ./cmd/node check alice %s --addr %s\n", flags, rpc)
	fmt.Fprintf(w, "  go run ./cmd/node status --addr %s\n", rpc)
	fmt.Fprintf(w, "\nThe HTTP interface is described at http://%s/openapi.yaml. Ctrl-C stops the cluster.\n", http)
}
