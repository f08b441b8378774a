package cli

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/weirlimit/weir/internal/dial"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

func newStatus() *cobra.Command {
	var f dial.Flags
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the cluster: members, who owns how much, policies, versions",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.Ask(cmd.Context(), func(ctx context.Context, c weirv1.LimiterClient) error {
				st, err := c.Status(ctx, &weirv1.StatusRequest{})
				if err != nil {
					return err
				}
				return printStatus(cmd.OutOrStdout(), st, f.Output == "json")
			})
		},
	}
	f.Register(cmd.Flags())
	return cmd
}
