package cli

import (
	_ "embed"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/internal/node"
)

func newDev() *cobra.Command {
	var f struct {
		devConfig
		logLevel string
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
			}{{"http-port", f.HTTP}, {"grpc-port", f.GRPC}} {
				if p.port == node.PortOff {
					return fmt.Errorf("%s: must not be empty here: 0 stands for any free port", p.flag)
				}
			}
			if f.Nodes < 1 || f.Nodes > maxDevNodes {
				return fmt.Errorf("nodes: %d is not a number of nodes from 1 to %d", f.Nodes, maxDevNodes)
			}
			var err error
			if f.Logger, err = newLogger(cmd.ErrOrStderr(), "text", f.logLevel); err != nil {
				return err
			}
			// The ports of the documentation where they are free, and those that are asked for or none.
			f.AnyPort = !cmd.Flags().Changed("http-port") && !cmd.Flags().Changed("grpc-port")
			f.Version, f.Command = version(), command(os.Args[0])
			admission.LimitProcess(f.Logger)
			outliveLog()
			return runDev(cmd.Context(), cmd.OutOrStdout(), f.devConfig)
		},
	}
	cmd.Flags().IntVar(&f.Nodes, "nodes", 3, "number of nodes")
	cmd.Flags().Var(settingVar(&f.HTTP, parsePort, "port", "8080"), "http-port", "port of the first node for HTTP; the others take any free one")
	cmd.Flags().Var(settingVar(&f.GRPC, parsePort, "port", "8081"), "grpc-port", "port of the first node for gRPC; the others take any free one")
	cmd.Flags().StringVar(&f.Policies, "policies", "", "policy file (default: sample policies of every algorithm)")
	cmd.Flags().StringVar(&f.logLevel, "log-level", "warn", "least important messages logged: debug, info, warn or error")
	return cmd
}

// command is how the program is run again that was run as name. "go run" builds it somewhere, under its package's name, and calls it by
// the whole path.
func command(name string) string {
	base := strings.TrimSuffix(filepath.Base(name), ".exe")
	if filepath.IsAbs(name) && (base == "node" || base == "weir" && strings.Contains(name, "go-build")) {
		return "go run ./cmd/" + base
	}
	return name
}
