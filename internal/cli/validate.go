package cli

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/weirlimit/weir/gateway/envoy"
	"github.com/weirlimit/weir/internal/dial"
)

func newValidate() *cobra.Command {
	var output, convert string
	var merge bool
	cmd := &cobra.Command{
		Use:   "validate FILE...",
		Short: "Check policy files, files for Envoy and Limitador's: every mistake with file, line and column",
		Long: `Check policy files without a node: every mistake with file, line and column. A file with a domain or
descriptors is read in the format of envoyproxy/ratelimit, and a directory is that of --envoy-config. A list of limits with
namespaces is Limitador's: --convert DIR writes it in the format of envoyproxy/ratelimit. What depends on the
node that reads the file is a warning on standard error: strict policies need one with --voters.
Exit status: 0 no mistakes, 1 mistakes, 2 a file cannot be read.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("FILE: give at least one file")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, files []string) error {
			if err := dial.CheckOutput(output); err != nil {
				return err
			}
			ok, err := validateFiles(cmd.OutOrStdout(), cmd.ErrOrStderr(), files, validateOptions{
				Envoy: envoy.Options{MergeDomains: merge}, Convert: convert, JSON: output == "json",
			})
			if err == nil && !ok {
				err = errNegative
			}
			return err
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "text", "how to print the result: text or json")
	cmd.Flags().StringVar(&convert, "convert", "", "`DIR` to write Limitador's limits to as files for --envoy-config, one for each namespace; files that are there are not overwritten")
	cmd.Flags().BoolVar(&merge, "envoy-merge-domains", false, "let several files for Envoy describe one domain")
	return cmd
}
