package cli

import (
	"context"
	"io"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

func newCharge() *cobra.Command {
	var k keyed
	return k.askAbout("charge", "Charge a cost that has already happened", `Charge a cost that has already happened, whether or not there is room for it. Needs the role charge.
Exit status: 0 charged, whether or not it was within the limit, 2 error.`,
		func(fs *pflag.FlagSet) {
			k.amountFlags.register(fs, "the work cost (default 1)")
			fs.StringVar(&k.requestID, "request-id", "", "charge only once however often the charge is repeated under this id")
		},
		func(ctx context.Context, c weirv1.LimiterClient, t *weirv1.Target, cost *int64, out io.Writer) error {
			d, err := c.Charge(ctx, &weirv1.ChargeRequest{Target: t, Cost: cost, Usage: k.usage, RequestId: k.requestID})
			if err != nil {
				return err
			}
			word := "charged"
			if !d.GetAllowed() {
				word = "over the limit"
			}
			return printAnswer(out, word, d, k.Output == "json")
		})
}
