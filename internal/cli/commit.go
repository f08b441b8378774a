package cli

import (
	"context"
	"io"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

func newCommit() *cobra.Command {
	var k keyed
	return k.askAbout("commit", "Commit the cost of reserved work", `End a reservation: the cost of the work stays charged, the rest is given back, and an excess over the reservation is charged.
Exit status: 0 committed, 2 error.`,
		func(fs *pflag.FlagSet) {
			k.ofReservation(fs)
			k.amountFlags.register(fs, "the work cost")
			fs.StringVar(&k.class, "class", "", "class of the work, as in reserve")
			fs.BoolVar(&k.exact, "exact", false, "a cost above what was reserved is an error, and changes nothing")
		},
		func(ctx context.Context, c weirv1.LimiterClient, t *weirv1.Target, cost *int64, out io.Writer) error {
			in := &weirv1.CommitRequest{Target: t, ReservationId: k.reservation, Cost: cost, Usage: k.usage, Class: k.class}
			if k.exact {
				in.Overrun = weirv1.Overrun_OVERRUN_ERROR
			}
			got, err := c.Commit(ctx, in)
			if err != nil {
				return err
			}
			return printEnded(out, "committed", got, k.Output == "json")
		})
}
