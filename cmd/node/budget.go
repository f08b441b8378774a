package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/weirlimit/weir/internal/remote"
	"github.com/weirlimit/weir/internal/render"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// amountFlags say what work costs.
type amountFlags struct {
	cost  int64
	usage map[string]int64
}

func (f *amountFlags) register(fs *pflag.FlagSet, what string) {
	fs.Int64Var(&f.cost, "cost", 0, "units that "+what)
	fs.StringToInt64Var(&f.usage, "usage", nil, "tokens by class in place of --cost, for a policy with prices: input=120,output=30")
}

// given returns the cost as messages have it: nil when it is not given.
func (f *amountFlags) given(fs *pflag.FlagSet) (*int64, error) {
	switch {
	case fs.Changed("cost") && fs.Changed("usage"):
		return nil, errors.New("usage: goes without --cost")
	case fs.Changed("cost"):
		return &f.cost, nil
	}
	return nil, nil
}

// keyed is what commands about one key have in common.
type keyed struct {
	remote.Flags
	remote.Target
	amountFlags
	requestID, reservation, class string
	ttl                           time.Duration
	exact                         bool
}

// askAbout makes a command that asks f of one key, of which how adds flags. cost is that of amountFlags, nil when it is not given.
func (k *keyed) askAbout(use, short, long string, how func(*pflag.FlagSet),
	f func(ctx context.Context, c weirv1.LimiterClient, t *weirv1.Target, cost *int64, out io.Writer) error) *cobra.Command {
	cmd := &cobra.Command{
		Use:   use + " KEY",
		Short: short,
		Long:  long,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fmt.Errorf("KEY: give one key, not %d", len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			inline, err := k.Inline(cmd.Flags())
			if err != nil {
				return err
			}
			cost, err := k.given(cmd.Flags())
			if err != nil {
				return err
			}
			return k.Ask(cmd.Context(), func(ctx context.Context, c weirv1.LimiterClient) error {
				return f(ctx, c, k.Message(inline, args[0]), cost, cmd.OutOrStdout())
			})
		},
	}
	k.Target.Register(cmd.Flags())
	how(cmd.Flags())
	k.Flags.Register(cmd.Flags())
	return cmd
}

// decided prints a decision, of which a refusal is a negative result.
func (k *keyed) decided(w io.Writer, d *weirv1.Decision, err error) error {
	if err == nil {
		err = render.Decision(w, d, k.Output == "json")
	}
	if err == nil && !d.GetAllowed() {
		return errNegative
	}
	return err
}

func newCharge() *cobra.Command {
	var k keyed
	return k.askAbout("charge", "Charge a cost that has already happened", `Charge a cost that has already happened, whether or not there is room for it. Needs the role charge.
Exit status: 0 charged, whether or not it was within the limit, 2 error.`,
		func(fs *pflag.FlagSet) {
			k.amountFlags.register(fs, "it did cost (default 1)")
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
			return render.Answer(out, word, d, k.Output == "json")
		})
}

func newReserve() *cobra.Command {
	var k keyed
	return k.askAbout("reserve", "Reserve units for work whose cost is not known yet", `Charge the most that some work may cost, until commit says what it did cost. The answer has a reservation_id.
Exit status: 0 reserved, 1 refused, 2 error.`,
		func(fs *pflag.FlagSet) {
			k.amountFlags.register(fs, "it may cost (default: the policy's estimate, or 1)")
			fs.StringVar(&k.class, "class", "", "of what kind the work is, such as a model, for a policy whose estimate is auto")
			fs.DurationVar(&k.ttl, "ttl", 0, "how long to wait for commit or cancel, 1ms to 1h (default 1m)")
			fs.StringVar(&k.requestID, "request-id", "", "reserve only once however often this is repeated under this id")
		},
		func(ctx context.Context, c weirv1.LimiterClient, t *weirv1.Target, cost *int64, out io.Writer) error {
			d, err := c.Reserve(ctx, &weirv1.ReserveRequest{Target: t, Cost: cost, Usage: k.usage, Class: k.class, TtlNs: int64(k.ttl), RequestId: k.requestID})
			return k.decided(out, d, err)
		})
}

// ofReservation registers the flag that names one.
func (k *keyed) ofReservation(fs *pflag.FlagSet) {
	fs.StringVar(&k.reservation, "reservation", "", "the reservation_id that reserve gave")
}

func newExtend() *cobra.Command {
	var k keyed
	return k.askAbout("extend", "Add units or time to a reservation", `Add units to a reservation where there is room for them, let it wait longer, or both. Refused it changes nothing.
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

func newCommit() *cobra.Command {
	var k keyed
	return k.askAbout("commit", "Say what reserved work did cost", `End a reservation: what the work did cost stays charged, the rest is given back, and what exceeds the reservation is charged.
Exit status: 0 committed, 2 error.`,
		func(fs *pflag.FlagSet) {
			k.ofReservation(fs)
			k.amountFlags.register(fs, "it did cost")
			fs.StringVar(&k.class, "class", "", "of what kind the work was, as in reserve")
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
			return render.Settled(out, got, k.Output == "json")
		})
}

func newCancel() *cobra.Command {
	var k keyed
	return k.askAbout("cancel", "Give a reservation back", `End a reservation and give back all that it charged.
Exit status: 0 cancelled, 2 error.`,
		k.ofReservation,
		func(ctx context.Context, c weirv1.LimiterClient, t *weirv1.Target, _ *int64, out io.Writer) error {
			got, err := c.Cancel(ctx, &weirv1.CancelRequest{Target: t, ReservationId: k.reservation})
			if err != nil {
				return err
			}
			return render.Settled(out, &weirv1.CommitResponse{Refunded: got.GetRefunded()}, k.Output == "json")
		})
}
