package cli

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	httpapi "github.com/weirlimit/weir/gateway/http"
	"github.com/weirlimit/weir/internal/dial"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// topFlags are those of weir top.
type topFlags struct {
	dial.Flags
	order, policy string
	keys          uint
	interval      time.Duration
}

func newTop() *cobra.Command {
	var f topFlags
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show the busiest, the most often refused, or the fullest keys of the cluster",
		Long: `Show the busiest, the most often refused, or the fullest keys of the cluster in the last minute, and what
each policy decided.

On a terminal the screen is refreshed: b, r and f choose the order, q ends it. Elsewhere, and with -o json, it is
printed once. With an access file it takes a token with the role keys.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			order := slices.Index(httpapi.KeyOrders(), f.order)
			if order < 1 {
				return fmt.Errorf("order: %q is not one of %s", f.order, strings.Join(httpapi.KeyOrders()[1:], ", "))
			}
			if f.keys < 1 || f.keys > 256 {
				return fmt.Errorf("limit: %d is not a number from 1 to 256", f.keys)
			}
			if f.interval < 100*time.Millisecond {
				return fmt.Errorf("interval: %v is shorter than the shortest, 100ms", f.interval)
			}
			ask := &weirv1.TopKeysRequest{Order: weirv1.KeyOrder(order), Limit: uint32(f.keys), Policy: f.policy}
			out, isFile := cmd.OutOrStdout().(*os.File)
			if f.Output == "text" && isFile && term.IsTerminal(int(out.Fd())) && term.IsTerminal(int(os.Stdin.Fd())) {
				return liveTop(cmd.Context(), ask, f.fetch, f.interval, os.Stdin, out)
			}
			top, err := f.fetch(cmd.Context(), ask)
			if err != nil {
				return err
			}
			return printTop(cmd.OutOrStdout(), ask.Order, top, f.Output == "json")
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&f.order, "order", "busiest", "what keys are ranked by: busiest, refused or fullest")
	fs.UintVar(&f.keys, "limit", 20, "number of keys, at most 256")
	fs.StringVar(&f.policy, "policy", "", "only keys of this policy")
	fs.DurationVar(&f.interval, "interval", 2*time.Second, "time between two refreshes of a terminal")
	f.Register(fs)
	return cmd
}

func (f *topFlags) fetch(ctx context.Context, ask *weirv1.TopKeysRequest) (top *weirv1.TopKeysResponse, err error) {
	err = f.Ask(ctx, func(ctx context.Context, c weirv1.LimiterClient) (err error) {
		top, err = c.TopKeys(ctx, ask)
		return err
	})
	return top, err
}
