package cli

import (
	"context"
	"io"

	"github.com/spf13/cobra"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

func newCancel() *cobra.Command {
	var k keyed
	return k.askAbout("cancel", "Cancel a reservation", `End a reservation and give back all that it charged.
Exit status: 0 cancelled, 2 error.`,
		k.ofReservation,
		func(ctx context.Context, c weirv1.LimiterClient, t *weirv1.Target, _ *int64, out io.Writer) error {
			got, err := c.Cancel(ctx, &weirv1.CancelRequest{Target: t, ReservationId: k.reservation})
			if err != nil {
				return err
			}
			return printEnded(out, "cancelled", &weirv1.CommitResponse{Refunded: got.GetRefunded()}, k.Output == "json")
		})
}
