package cli

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

func newCheck() *cobra.Command {
	var k keyed
	cmd := k.askAbout("check", "Ask for one decision", `Ask a node for one decision about a key: by a policy, or by an inline limit.
Exit status: 0 admitted, 1 refused, 2 error.`,
		func(fs *pflag.FlagSet) {
			fs.Int64Var(&k.cost, "cost", 1, "units asked for; 0 peeks")
			fs.BoolVar(&k.partial, "partial", false, "take what is left when there is less than the cost")
			fs.StringVar(&k.requestID, "request-id", "", "charge only once however often the check is repeated under this id")
		},
		func(ctx context.Context, c weirv1.LimiterClient, t *weirv1.Target, cost *int64, out io.Writer) error {
			check := &weirv1.Check{Target: t, Cost: cost, Partial: k.partial, RequestId: k.requestID}
			r, err := c.Check(ctx, &weirv1.CheckRequest{Checks: []*weirv1.Check{check}})
			if err == nil && (len(r.GetResults()) != 1 || r.Results[0].GetDecision() == nil) {
				return fmt.Errorf("addr: what answers at %s does not answer a check with a decision", k.Addr)
			}
			if err != nil {
				return err
			}
			return k.decided(out, r.Results[0].GetDecision(), nil)
		})
	cmd.Example = `  weir check alice --policy login
  weir check alice --limit 5/1m --algorithm sliding_log`
	return cmd
}
