package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/policy"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

func newCheck() *cobra.Command {
	var f struct {
		remote
		policy, limit, algorithm, namespace, requestID string
		cost                                           int64
		partial                                        bool
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
			check := &weirv1.Check{
				Target: &weirv1.Target{Policy: f.policy, Namespace: f.namespace, Key: args[0]},
				Cost:   &f.cost, Partial: f.partial, RequestId: f.requestID,
			}
			switch {
			case f.policy == "" && f.limit == "":
				return fmt.Errorf("--policy: name a policy, or give a --limit such as 5/1m")
			case f.policy != "" && f.limit != "":
				return fmt.Errorf("--limit: goes without --policy")
			case f.limit != "":
				a, ok := algo.ParseAlgorithm(f.algorithm)
				if !ok {
					return fmt.Errorf("--algorithm: %q is not an algorithm, such as sliding_log or token_bucket", f.algorithm)
				}
				n, window, err := policy.ParseRate(f.limit)
				if err != nil {
					return fmt.Errorf("--limit: %w", err)
				}
				check.Target.Limit = &weirv1.Limit{Algorithm: weirv1.Algorithm(a), Limit: n, WindowNs: int64(window)}
			case cmd.Flags().Changed("algorithm"):
				return fmt.Errorf("--algorithm: goes with --limit; a policy has its own")
			}
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
	fs.StringVar(&f.policy, "policy", "", "policy to decide by")
	fs.Int64Var(&f.cost, "cost", 1, "units asked for; 0 peeks")
	fs.BoolVar(&f.partial, "partial", false, "take what is left when there is less than the cost")
	fs.StringVar(&f.requestID, "request-id", "", "charge only once however often the check is repeated under this id")
	fs.StringVar(&f.limit, "limit", "", "limit to decide by in place of a policy, as 5/1m")
	fs.StringVar(&f.algorithm, "algorithm", "sliding_log", "algorithm of --limit")
	fs.StringVar(&f.namespace, "namespace", "", "namespace of --limit")
	f.register(fs)
	return cmd
}

// printDecision prints a decision in words or, with the names of the HTTP interface, as JSON.
func printDecision(w io.Writer, d *weirv1.Decision, output string) error {
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
		return json.NewEncoder(w).Encode(out)
	}
	word := "refused"
	if d.Allowed {
		word = "allowed"
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
