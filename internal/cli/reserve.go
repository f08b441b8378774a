package cli

import (
	"context"
	"io"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/weirlimit/weir/internal/dial"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

func newReserve() *cobra.Command {
	k := keyed{Flags: dial.Flags{WithID: true}}
	return k.askAbout("reserve", "Reserve units for work whose cost is not known yet", `Charge the most that some work may cost, until commit gives the cost. The answer has a reservation_id; with -o id it is all that
is printed, and nothing where nothing is held.
Exit status: 0 reserved, 1 refused, 2 error.`,
		func(fs *pflag.FlagSet) {
			k.amountFlags.register(fs, "it may cost (default: the policy's estimate, or 1)")
			fs.StringVar(&k.class, "class", "", "class of the work, such as a model, for a policy whose estimate is auto")
			fs.DurationVar(&k.ttl, "ttl", 0, "how long to wait for commit or cancel, 1ms to 1h (default 1m)")
			fs.StringVar(&k.requestID, "request-id", "", "reserve only once however often this is repeated under this id")
		},
		func(ctx context.Context, c weirv1.LimiterClient, t *weirv1.Target, cost *int64, out io.Writer) error {
			d, err := c.Reserve(ctx, &weirv1.ReserveRequest{Target: t, Cost: cost, Usage: k.usage, Class: k.class, TtlNs: int64(k.ttl), RequestId: k.requestID})
			return k.decided(out, d, err)
		})
}
