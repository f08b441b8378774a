package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"time"

	httpapi "github.com/weirlimit/weir/gateway/http"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
)

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
