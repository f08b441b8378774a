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

	httpapi "github.com/weirlimit/weir/gateway/http"
	"github.com/weirlimit/weir/internal/dial"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
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
	dial.Flags
	dial.Target
	amountFlags
	requestID, reservation, class string
	ttl                           time.Duration
	exact, partial                bool
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
	switch {
	case err != nil:
	case k.Output != "id":
		err = printDecision(w, d, k.Output == "json")
	case d.GetReservationId() != "":
		_, err = fmt.Fprintln(w, d.ReservationId)
	}
	if err == nil && !d.GetAllowed() {
		return errNegative
	}
	return err
}

// ofReservation registers the flag that names one.
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

// printAnswer is Decision with a word for what was decided.
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
	}{{"shadow", d.Shadow}, {"degraded", d.Degraded}, {"failed_open", d.FailedOpen}, {"failed_closed", d.FailedClosed}, {"retry_after_estimated", d.RetryAfterEstimated}, {"banned", d.Banned}, {"near_limit", d.NearLimit}} {
		if flag.set {
			fmt.Fprint(w, " ", flag.name)
		}
	}
	_, err := fmt.Fprintln(w)
	return err
}

// roundUp rounds to the next whole millisecond, so that waiting so long is enough.
func roundUp(ns int64) time.Duration {
	return (time.Duration(ns) + time.Millisecond - 1).Truncate(time.Millisecond)
}

// printEnded prints the end of a reservation: how is "committed" or "cancelled".
func printEnded(w io.Writer, how string, got *weirv1.CommitResponse, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(w).Encode(map[string]any{"refunded": got.Refunded, "excess": got.Excess, "over_limit": got.OverLimit})
	}
	fmt.Fprintf(w, "%s  refunded=%d excess=%d", how, got.Refunded, got.Excess)
	if got.OverLimit {
		fmt.Fprint(w, " over_limit")
	}
	_, err := fmt.Fprintln(w)
	return err
}
