package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/weirlimit/weir/internal/remote"
	"github.com/weirlimit/weir/internal/render"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

func newCheck() *cobra.Command {
	var f struct {
		remote.Flags
		remote.Target
		requestID string
		cost      int64
		partial   bool
	}
	cmd := &cobra.Command{
		Use:   "check KEY",
		Short: "Ask for one decision",
		Long: `Ask a node for one decision about a key: by a policy, or by a limit given along.
Exit status: 0 admitted, 1 refused, 2 error.`,
		Example: `  weir check alice --policy login
  weir check alice --limit 5/1m --algorithm sliding_log`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fmt.Errorf("KEY: give one key to check, not %d", len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			inline, err := f.Inline(cmd.Flags())
			if err != nil {
				return err
			}
			check := &weirv1.Check{Target: f.Message(inline, args[0]), Cost: &f.cost, Partial: f.partial, RequestId: f.requestID}
			return f.Ask(cmd.Context(), func(ctx context.Context, c weirv1.LimiterClient) error {
				r, err := c.Check(ctx, &weirv1.CheckRequest{Checks: []*weirv1.Check{check}})
				if err != nil {
					return err
				}
				if len(r.GetResults()) != 1 || r.Results[0].GetDecision() == nil {
					return fmt.Errorf("addr: what answers at %s does not answer a check with a decision", f.Addr)
				}
				d := r.Results[0].GetDecision()
				if err := render.Decision(cmd.OutOrStdout(), d, f.Output == "json"); err != nil {
					return err
				}
				if !d.GetAllowed() {
					return errNegative
				}
				return nil
			})
		},
	}
	fs := cmd.Flags()
	f.Target.Register(fs)
	fs.Int64Var(&f.cost, "cost", 1, "units asked for; 0 peeks")
	fs.BoolVar(&f.partial, "partial", false, "take what is left when there is less than the cost")
	fs.StringVar(&f.requestID, "request-id", "", "charge only once however often the check is repeated under this id")
	f.Flags.Register(fs)
	return cmd
}
