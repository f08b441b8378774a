package cli

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/spf13/cobra"
	"golang.org/x/term"
	"google.golang.org/grpc"

	httpapi "github.com/weirlimit/weir/gateway/http"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// topFlags are the flags of weir top.
type topFlags struct {
	connection
	Order    string        `flag:"order" default:"busiest" help:"what keys are ranked by: busiest, refused or fullest"`
	Keys     int           `flag:"limit" default:"20" range:"1..256" help:"number of keys"`
	Policy   string        `flag:"policy" help:"only keys of this policy"`
	Interval time.Duration `flag:"interval" default:"2s" range:"100ms.." help:"time between two refreshes of a terminal"`
}

func newTop() *cobra.Command {
	var f topFlags
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show the busiest, the most often refused, or the fullest keys of the cluster",
		Long: `Show the busiest, the most often refused, or the fullest keys of the cluster in the last minute, and what
each policy decided.

On a terminal the screen is refreshed until Ctrl-C. Elsewhere, and with -o json, it is printed once. With an access
file it takes a token with the role keys.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			order := slices.Index(httpapi.KeyOrders(), f.Order)
			if order < 1 {
				return fmt.Errorf("order: %q is not one of %s", f.Order, strings.Join(httpapi.KeyOrders()[1:], ", "))
			}
			ask := &weirv1.TopKeysRequest{Order: weirv1.KeyOrder(order), Limit: uint32(f.Keys), Policy: f.Policy}
			out, isFile := cmd.OutOrStdout().(*os.File)
			if f.output == "text" && isFile && term.IsTerminal(int(out.Fd())) {
				return f.refresh(cmd.Context(), ask, out)
			}
			top, err := f.fetch(cmd.Context(), ask)
			if err != nil {
				return err
			}
			return printTop(cmd.OutOrStdout(), ask.Order, top, f.output == "json")
		},
	}
	registerSettings(cmd.Flags(), &f)
	f.register(cmd.Flags())
	return cmd
}

func (f *topFlags) fetch(ctx context.Context, ask *weirv1.TopKeysRequest) (top *weirv1.TopKeysResponse, err error) {
	err = f.connect(ctx, func(ctx context.Context, conn *grpc.ClientConn) (err error) {
		top, err = weirv1.NewLimiterClient(conn).TopKeys(ctx, ask)
		return err
	})
	return top, err
}

// refresh prints the tables on a terminal, again after each interval, until ctx ends.
func (f *topFlags) refresh(ctx context.Context, ask *weirv1.TopKeysRequest, out io.Writer) error {
	const clearScreen = "\x1b[H\x1b[2J" // ECMA-48
	tick := time.NewTicker(f.Interval)
	defer tick.Stop()
	for {
		top, err := f.fetch(ctx, ask)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		fmt.Fprint(out, clearScreen)
		if err := printTop(out, ask.Order, top, false); err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// printTop prints tables of policies and keys, or JSON.
func printTop(w io.Writer, order weirv1.KeyOrder, top *weirv1.TopKeysResponse, asJSON bool) error {
	if asJSON {
		return indented(w, func(top *weirv1.TopKeysResponse) ([]byte, error) { return httpapi.MarshalTopKeys(order, top) }, top)
	}
	b := new(bytes.Buffer)
	fmt.Fprintf(b, "%s keys of the last %v, as %s knows from %d of %d members\n", httpapi.KeyOrders()[order],
		time.Duration(top.CountedNs).Truncate(time.Second), top.Node, len(top.Members),
		len(top.Members)+len(top.Unreachable))
	if len(top.Unreachable) > 0 {
		fmt.Fprintf(b, "unreachable, and missing: %s\n", strings.Join(top.Unreachable, ", "))
	}
	fmt.Fprintln(b)
	head := "POLICY\tCHECKS/S\tREFUSED/S\tREFUSED\tFAILED/S\tERRORS/S"
	bans := slices.ContainsFunc(top.Policies, func(p *weirv1.PolicyUse) bool { return p.Banned > 0 })
	if bans {
		head += "\tBANNED/S"
	}
	over := time.Duration(top.PoliciesCountedNs)
	columns(b, head, func(t io.Writer) {
		for _, p := range top.Policies {
			checks := p.Allowed + p.Refused + p.Shadowed + p.FailedOpen + p.FailedClosed
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s", p.Policy, rate(checks, over), rate(p.Refused, over),
				part(p.Refused, checks),
				rate(p.FailedOpen+p.FailedClosed, over), rate(p.Errors, over))
			if bans {
				fmt.Fprint(t, "\t", rate(p.Banned, over))
			}
			fmt.Fprintln(t)
		}
	})
	fmt.Fprintln(b)
	over = time.Duration(top.CountedNs)
	columns(b, "KEY\tPOLICY\tCHECKS/S\tREFUSED/S\tREFUSED\tUSED\tFULL", func(t io.Writer) {
		for _, k := range top.Keys {
			policy := k.Policy
			if policy == "" {
				policy = "(inline) " + printable(k.Namespace)
			}
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s", printable(k.Key), policy, rate(uint64(k.Decisions), over),
				rate(uint64(k.Refused), over), part(uint64(k.Refused), uint64(k.Decisions)))
			if k.Limit > 0 {
				fmt.Fprintf(t, "\t%d/%d\t%s", k.Used, k.Limit, part(uint64(max(k.Used, 0)), uint64(k.Limit)))
			}
			fmt.Fprintln(t)
		}
	})
	if len(top.Keys) == 0 {
		fmt.Fprintln(b, "no key was decided on")
	}
	_, err := b.WriteTo(w)
	return err
}

// printable returns a caller's text for a terminal: quoted if it has characters that could control the terminal, or are
// not visible.
func printable(text string) string {
	if strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) || r == '"' }) {
		return strconv.Quote(text)
	}
	return text
}

func rate(n uint64, over time.Duration) string {
	if over <= 0 {
		return "-"
	}
	perSecond := float64(n) / over.Seconds()
	switch {
	case n == 0:
		return "0"
	case perSecond < 9.95:
		return strconv.FormatFloat(perSecond, 'f', 2, 64)
	}
	return strconv.FormatFloat(perSecond, 'f', 0, 64)
}

func part(n, of uint64) string {
	if of == 0 {
		return "-"
	}
	return strconv.FormatFloat(100*float64(n)/float64(of), 'f', 0, 64) + "%"
}
