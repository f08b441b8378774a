package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"

	httpapi "github.com/weirlimit/weir/gateway/http"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
)

// amountFlags are the flags for the cost of work.
type amountFlags struct {
	cost  int64
	usage map[string]int64
}

func (f *amountFlags) register(fs *pflag.FlagSet, what string) {
	fs.Int64Var(&f.cost, "cost", 0, "units that "+what)
	fs.StringToInt64Var(&f.usage, "usage", nil,
		"tokens by class in place of --cost, for a policy with prices: input=120,output=30")
}

// given returns the cost; nil: the flag is not set.
func (f *amountFlags) given(fs *pflag.FlagSet) (*int64, error) {
	switch {
	case fs.Changed("cost") && fs.Changed("usage"):
		return nil, errors.New("usage: goes without --cost")
	case fs.Changed("cost"):
		return &f.cost, nil
	}
	return nil, nil
}

// keyed has the flags of commands about one key.
type keyed struct {
	connection
	targetFlags
	amountFlags
	requestID, reservation, class string
	ttl                           time.Duration
	exact, partial                bool
}

// askAbout returns a command that calls f for one key. how adds flags. cost is the result of given.
func (k *keyed) askAbout(use, short, long string, how func(*pflag.FlagSet),
	f func(ctx context.Context, c weirv1.LimiterClient, t *weirv1.Target, cost *int64,
		out io.Writer) error) (cmd *cobra.Command) {
	cmd = k.command(use+" KEY", short,
		func(ctx context.Context, conn *grpc.ClientConn, args []string, out io.Writer) error {
			inline, err := k.inline(cmd.Flags())
			if err != nil {
				return err
			}
			cost, err := k.given(cmd.Flags())
			if err != nil {
				return err
			}
			return f(ctx, weirv1.NewLimiterClient(conn), k.message(inline, args[0]), cost, out)
		})
	cmd.Long = long
	registerSettings(cmd.Flags(), &k.targetFlags)
	how(cmd.Flags())
	return cmd
}

// decided prints a decision. For a refusal it returns errNegative.
func (k *keyed) decided(w io.Writer, d *weirv1.Decision, err error) error {
	switch {
	case err != nil:
	case k.output != "id":
		err = printDecision(w, d, k.output == "json")
	case d.GetReservationId() != "":
		_, err = fmt.Fprintln(w, d.ReservationId)
	}
	if err == nil && !d.GetAllowed() {
		return errNegative
	}
	return err
}

// ofReservation adds the flag for the id of a reservation.
func (k *keyed) ofReservation(fs *pflag.FlagSet) {
	fs.StringVar(&k.reservation, "reservation", "", "the reservation_id that reserve gave")
}

// printDecision prints a decision in words or in the JSON of POST /v1/check.
func printDecision(w io.Writer, d *weirv1.Decision, asJSON bool) error {
	word := "refused"
	if d.Allowed {
		word = "allowed"
	}
	return printAnswer(w, word, d, asJSON)
}

// printAnswer is printDecision with another word for the result.
func printAnswer(w io.Writer, word string, d *weirv1.Decision, asJSON bool) error {
	if asJSON {
		told := wire.Decision(d)
		_, err := fmt.Fprintf(w, "%s\n", httpapi.MarshalDecision(&told))
		return err
	}
	fmt.Fprintf(w, "%s  policy=%s granted=%d limit=%d remaining=%d", word, d.Policy, d.Granted, d.Limit, d.Remaining)
	switch {
	case d.RetryAfterNs == nil:
		fmt.Fprint(w, " retry_after=never")
	case *d.RetryAfterNs > 0:
		fmt.Fprintf(w, " retry_after=%v", roundUp(*d.RetryAfterNs))
	}
	if d.ResetAfterNs > 0 {
		fmt.Fprintf(w, " reset_after=%v", roundUp(d.ResetAfterNs))
	}
	if d.DelayNs > 0 {
		fmt.Fprintf(w, " delay=%v", roundUp(d.DelayNs))
	}
	if d.ReservationId != "" {
		fmt.Fprintf(w, " reservation_id=%s", d.ReservationId)
	}
	for _, flag := range []struct {
		name string
		set  bool
	}{{"shadow", d.Shadow}, {"degraded", d.Degraded}, {"failed_open", d.FailedOpen}, {"failed_closed", d.FailedClosed},
		{"retry_after_estimated", d.RetryAfterEstimated}, {"banned", d.Banned}, {"near_limit", d.NearLimit}} {
		if flag.set {
			fmt.Fprint(w, " ", flag.name)
		}
	}
	_, err := fmt.Fprintln(w)
	return err
}

// roundUp rounds up to a whole millisecond, so that a caller that waits for it does not come too early.
func roundUp(ns int64) time.Duration {
	return (time.Duration(ns) + time.Millisecond - 1).Truncate(time.Millisecond)
}

// printEnded prints the end of a reservation: how is "committed" or "cancelled".
func printEnded(w io.Writer, how string, got *weirv1.CommitResponse, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(w).Encode(map[string]any{"refunded": got.Refunded, "excess": got.Excess,
			"over_limit": got.OverLimit})
	}
	fmt.Fprintf(w, "%s  refunded=%d excess=%d", how, got.Refunded, got.Excess)
	if got.OverLimit {
		fmt.Fprint(w, " over_limit")
	}
	_, err := fmt.Fprintln(w)
	return err
}

func newCheck() *cobra.Command {
	var k keyed
	cmd := k.askAbout("check", "Ask for one decision", `Ask a node for one decision about a key: by a policy, or by an inline limit.
Exit status: 0 admitted, 1 refused, 2 error.`,
		func(fs *pflag.FlagSet) {
			fs.Int64Var(&k.cost, "cost", 1, "units asked for; 0 peeks")
			fs.BoolVar(&k.partial, "partial", false, "take what is left when there is less than the cost")
			fs.StringVar(&k.requestID, "request-id", "",
				"charge only once however often the check is repeated under this id")
		},
		func(ctx context.Context, c weirv1.LimiterClient, t *weirv1.Target, cost *int64, out io.Writer) error {
			check := &weirv1.Check{Target: t, Cost: cost, Partial: k.partial, RequestId: k.requestID}
			r, err := c.Check(ctx, &weirv1.CheckRequest{Checks: []*weirv1.Check{check}})
			if err == nil && (len(r.GetResults()) != 1 || r.Results[0].GetDecision() == nil) {
				return fmt.Errorf("addr: what answers at %s does not answer a check with a decision", k.addr)
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

func newCharge() *cobra.Command {
	var k keyed
	return k.askAbout("charge", "Charge a cost that has already happened", `Charge a cost that has already happened, whether or not there is room for it. Needs the role charge.
Exit status: 0 charged, whether or not it was within the limit, 2 error.`,
		func(fs *pflag.FlagSet) {
			k.amountFlags.register(fs, "the work cost (default 1)")
			fs.StringVar(&k.requestID, "request-id", "",
				"charge only once however often the charge is repeated under this id")
		},
		func(ctx context.Context, c weirv1.LimiterClient, t *weirv1.Target, cost *int64, out io.Writer) error {
			d, err := c.Charge(ctx, &weirv1.ChargeRequest{Target: t, Cost: cost, Usage: k.usage,
				RequestId: k.requestID})
			if err != nil {
				return err
			}
			word := "charged"
			if !d.GetAllowed() {
				word = "over the limit"
			}
			return printAnswer(out, word, d, k.output == "json")
		})
}

func newReserve() *cobra.Command {
	k := keyed{connection: connection{withID: true}}
	return k.askAbout("reserve", "Reserve units for work whose cost is not known yet", `Charge the most that some work may cost, until commit gives the cost. The answer has a reservation_id; with -o id it is all that
is printed, and nothing where nothing is held.
Exit status: 0 reserved, 1 refused, 2 error.`,
		func(fs *pflag.FlagSet) {
			k.amountFlags.register(fs, "it may cost (default: the policy's estimate, or 1)")
			fs.StringVar(&k.class, "class", "",
				"class of the work, such as a model, for a policy whose estimate is auto")
			fs.DurationVar(&k.ttl, "ttl", 0, "how long to wait for commit or cancel, 1ms to 1h (default 1m)")
			fs.StringVar(&k.requestID, "request-id", "",
				"reserve only once however often this is repeated under this id")
		},
		func(ctx context.Context, c weirv1.LimiterClient, t *weirv1.Target, cost *int64, out io.Writer) error {
			d, err := c.Reserve(ctx, &weirv1.ReserveRequest{Target: t, Cost: cost, Usage: k.usage, Class: k.class,
				TtlNs: int64(k.ttl), RequestId: k.requestID})
			return k.decided(out, d, err)
		})
}

func newExtend() *cobra.Command {
	var k keyed
	return k.askAbout("extend", "Add units or time to a reservation", `Add units to a reservation if there is room for them, extend its time, or both. A refused extend changes nothing.
Exit status: 0 extended, 1 refused, 2 error.`,
		func(fs *pflag.FlagSet) {
			k.ofReservation(fs)
			k.amountFlags.register(fs, "are added")
			fs.DurationVar(&k.ttl, "ttl", 0,
				"how long to wait for commit or cancel from now on, 1ms to 1h (default: as long as before)")
			fs.StringVar(&k.requestID, "request-id", "",
				"add the units only once however often this is repeated under this id")
		},
		func(ctx context.Context, c weirv1.LimiterClient, t *weirv1.Target, cost *int64, out io.Writer) error {
			d, err := c.Extend(ctx, &weirv1.ExtendRequest{Target: t, ReservationId: k.reservation, Cost: cost,
				Usage: k.usage, TtlNs: int64(k.ttl), RequestId: k.requestID})
			return k.decided(out, d, err)
		})
}

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
			in := &weirv1.CommitRequest{Target: t, ReservationId: k.reservation, Cost: cost, Usage: k.usage,
				Class: k.class}
			if k.exact {
				in.Overrun = weirv1.Overrun_OVERRUN_ERROR
			}
			got, err := c.Commit(ctx, in)
			if err != nil {
				return err
			}
			return printEnded(out, "committed", got, k.output == "json")
		})
}

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
			return printEnded(out, "cancelled", &weirv1.CommitResponse{Refunded: got.GetRefunded()}, k.output == "json")
		})
}
