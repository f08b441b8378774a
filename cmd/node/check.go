package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

func newCheck() *cobra.Command {
	var f struct {
		remote
		targetFlags
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
			inline, err := f.inline(cmd.Flags())
			if err != nil {
				return err
			}
			check := &weirv1.Check{Target: f.message(inline, args[0]), Cost: &f.cost, Partial: f.partial, RequestId: f.requestID}
			return f.ask(cmd.Context(), func(ctx context.Context, c weirv1.LimiterClient) error {
				r, err := c.Check(ctx, &weirv1.CheckRequest{Checks: []*weirv1.Check{check}})
				if err != nil {
					return err
				}
				if len(r.GetResults()) != 1 || r.Results[0].GetDecision() == nil {
					return fmt.Errorf("--addr: what answers at %s does not answer a check with a decision", f.addr)
				}
				d := r.Results[0].GetDecision()
				if err := printDecision(cmd.OutOrStdout(), d, f.output); err != nil {
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
	f.targetFlags.register(fs)
	fs.Int64Var(&f.cost, "cost", 1, "units asked for; 0 peeks")
	fs.BoolVar(&f.partial, "partial", false, "take what is left when there is less than the cost")
	fs.StringVar(&f.requestID, "request-id", "", "charge only once however often the check is repeated under this id")
	f.remote.register(fs)
	return cmd
}

// printDecision prints a decision in words or, with the names of the HTTP interface, as JSON.
func printDecision(w io.Writer, d *weirv1.Decision, output string) error {
	word := "refused"
	if d.Allowed {
		word = "allowed"
	}
	return printAnswer(w, word, d, output)
}

// printAnswer is printDecision with a word for what was decided.
func printAnswer(w io.Writer, word string, d *weirv1.Decision, output string) error {
	if output == "json" {
		out := map[string]any{
			"policy": d.Policy, "allowed": d.Allowed, "granted": d.Granted, "limit": d.Limit, "remaining": d.Remaining,
			"reset_after_ms": milliseconds(d.ResetAfterNs), "delay_ms": milliseconds(d.DelayNs), "shadow": d.Shadow,
			"degraded": d.Degraded, "failed_open": d.FailedOpen, "failed_closed": d.FailedClosed,
		}
		if d.RetryAfterNs != nil {
			out["retry_after_ms"] = milliseconds(*d.RetryAfterNs)
		}
		if d.RequestId != "" {
			out["request_id"] = d.RequestId
		}
		if d.ReservationId != "" {
			out["reservation_id"] = d.ReservationId
		}
		return json.NewEncoder(w).Encode(out)
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
	}{{"shadow", d.Shadow}, {"degraded", d.Degraded}, {"failed_open", d.FailedOpen}, {"failed_closed", d.FailedClosed}} {
		if flag.set {
			fmt.Fprint(w, " ", flag.name)
		}
	}
	_, err := fmt.Fprintln(w)
	return err
}

func milliseconds(ns int64) int64 { return int64(roundUp(ns) / time.Millisecond) }

// roundUp rounds to the next whole millisecond, so that waiting so long is enough.
func roundUp(ns int64) time.Duration {
	return (time.Duration(ns) + time.Millisecond - 1).Truncate(time.Millisecond)
}
