package cli

import (
	"context"
	"io"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

func newExtend() *cobra.Command {
	var k keyed
	return k.askAbout("extend", "Add units or time to a reservation", `Add units to a reservation if there is room for them, extend its time, or both. A refused extend changes nothing.
Exit status: 0 extended, 1 refused, 2 error.`,
		func(fs *pflag.FlagSet) {
			k.ofReservation(fs)
			k.amountFlags.register(fs, "are added")
			fs.DurationVar(&k.ttl, "ttl", 0, "how long to wait for commit or cancel from now on, 1ms to 1h (default: as long as before)")
			fs.StringVar(&k.requestID, "request-id", "", "add the units only once however often this is repeated under this id")
		},
		func(ctx context.Context, c weirv1.LimiterClient, t *weirv1.Target, cost *int64, out io.Writer) error {
			d, err := c.Extend(ctx, &weirv1.ExtendRequest{Target: t, ReservationId: k.reservation, Cost: cost, Usage: k.usage, TtlNs: int64(k.ttl), RequestId: k.requestID})
			return k.decided(out, d, err)
		})
}
