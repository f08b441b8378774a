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
			if f.output == "text" && isFile && term.IsTerminal(int(out.Fd())) && term.IsTerminal(int(os.Stdin.Fd())) {
				return liveTop(cmd.Context(), ask, f.fetch, f.interval, os.Stdin, out)
			}
			top, err := f.fetch(cmd.Context(), ask)
			if err != nil {
				return err
			}
			return printTop(cmd.OutOrStdout(), ask.Order, top, f.output == "json")
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&f.order, "order", "busiest", "what keys are ranked by: busiest, refused or fullest")
	fs.UintVar(&f.keys, "limit", 20, "number of keys, at most 256")
	fs.StringVar(&f.policy, "policy", "", "only keys of this policy")
	fs.DurationVar(&f.interval, "interval", 2*time.Second, "time between two refreshes of a terminal")
	f.register(fs)
	return cmd
}

func (f *topFlags) fetch(ctx context.Context, ask *weirv1.TopKeysRequest) (top *weirv1.TopKeysResponse, err error) {
	err = f.connect(ctx, func(ctx context.Context, conn *grpc.ClientConn) (err error) {
		top, err = weirv1.NewLimiterClient(conn).TopKeys(ctx, ask)
		return err
	})
	return top, err
}

// ANSI control sequences (ECMA-48).
const (
	alternateScreen = "\x1b[?1049h\x1b[?25l" // hides the cursor as well
	usualScreen     = "\x1b[?25h\x1b[?1049l"
	home            = "\x1b[H"
	endOfLine       = "\x1b[K\r\n"
	endOfScreen     = "\x1b[J"
)

// liveTop shows a screen and refreshes it until q is pressed or ctx ends.
func liveTop(ctx context.Context, ask *weirv1.TopKeysRequest, fetch func(context.Context,
	*weirv1.TopKeysRequest) (*weirv1.TopKeysResponse, error), interval time.Duration, in, out *os.File) error {
	before, err := term.MakeRaw(int(in.Fd()))
	if err != nil {
		return fmt.Errorf("terminal: %w", err)
	}
	defer func() {
		fmt.Fprint(out, usualScreen)
		_ = term.Restore(int(in.Fd()), before) // if this fails, nothing else can restore the terminal
	}()
	fmt.Fprint(out, alternateScreen)
	pressed := make(chan byte)
	go func() { // ends with the process: a read from a terminal cannot be interrupted
		var b [1]byte
		for {
			if n, err := in.Read(b[:]); n == 0 || err != nil {
				close(pressed)
				return
			}
			select {
			case pressed <- b[0]:
			case <-ctx.Done():
				return
			}
		}
	}()
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		width, height, err := term.GetSize(int(out.Fd()))
		if err != nil {
			width, height = 80, 24
		}
		top, err := fetch(ctx, ask)
		if _, err := io.WriteString(out, topScreen(ask.Order, top, err, width, height)); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case key, ok := <-pressed:
			switch {
			case !ok, key == 'q', key == 3, key == 4: // in raw mode ^C and ^D are only bytes
				return nil
			case key == 'b':
				ask.Order = weirv1.KeyOrder_KEY_ORDER_BUSIEST
			case key == 'r':
				ask.Order = weirv1.KeyOrder_KEY_ORDER_REFUSED
			case key == 'f':
				ask.Order = weirv1.KeyOrder_KEY_ORDER_FULLEST
			}
		}
	}
}

// topScreen returns the whole screen of this size. err is why there is nothing to show.
func topScreen(order weirv1.KeyOrder, top *weirv1.TopKeysResponse, err error, width, height int) string {
	var b bytes.Buffer
	if err != nil {
		fmt.Fprintf(&b, "weir: %v\n", err)
	} else {
		writeTop(&b, order, top, width)
	}
	lines := strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
	lines = lines[:min(len(lines), max(height-2, 1))]
	lines = append(lines, "", "b busiest  r most refused  f fullest  q quit")
	for i, line := range lines {
		lines[i] = fitted(line, width)
	}
	return home + strings.Join(lines[:min(len(lines), height)], endOfLine) + "\x1b[K" + endOfScreen
}

// fitted returns the beginning of a line that fits into width.
func fitted(line string, width int) string {
	runes := []rune(line)
	return string(runes[:min(len(runes), max(width, 0))])
}

// printTop prints tables of policies and keys, or JSON.
func printTop(w io.Writer, order weirv1.KeyOrder, top *weirv1.TopKeysResponse, asJSON bool) error {
	if asJSON {
		return indented(w, func(top *weirv1.TopKeysResponse) ([]byte, error) { return httpapi.MarshalTopKeys(order, top) }, top)
	}
	var b bytes.Buffer
	writeTop(&b, order, top, 0)
	_, err := b.WriteTo(w)
	return err
}

// writeTop writes tables of policies and keys. width is the terminal's; 0: there is none, and keys are not shortened.
func writeTop(w *bytes.Buffer, order weirv1.KeyOrder, top *weirv1.TopKeysResponse, width int) {
	fmt.Fprintf(w, "%s keys of the last %v, as %s knows from %d of %d members\n", httpapi.KeyOrders()[order],
		time.Duration(top.CountedNs).Truncate(time.Second), top.Node, len(top.Members),
		len(top.Members)+len(top.Unreachable))
	if len(top.Unreachable) > 0 {
		fmt.Fprintf(w, "unreachable, and missing: %s\n", strings.Join(top.Unreachable, ", "))
	}
	fmt.Fprintln(w)
	head := "POLICY\tCHECKS/S\tREFUSED/S\tREFUSED\tFAILED/S\tERRORS/S"
	bans := slices.ContainsFunc(top.Policies, func(p *weirv1.PolicyUse) bool { return p.Banned > 0 })
	if bans {
		head += "\tBANNED/S"
	}
	over := time.Duration(top.PoliciesCountedNs)
	columns(w, head, func(t io.Writer) {
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
	fmt.Fprintln(w)
	over = time.Duration(top.CountedNs)
	columns(w, "KEY\tPOLICY\tCHECKS/S\tREFUSED/S\tREFUSED\tUSED\tFULL", func(t io.Writer) {
		for _, k := range top.Keys {
			key, policy := printable(k.Key), k.Policy
			if width > 0 {
				key = fitted(key, max(width-besideKey, 8))
			}
			if policy == "" {
				policy = "(inline) " + printable(k.Namespace)
			}
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s", key, policy, rate(uint64(k.Decisions), over),
				rate(uint64(k.Refused), over), part(uint64(k.Refused), uint64(k.Decisions)))
			if k.Limit > 0 {
				fmt.Fprintf(t, "\t%d/%d\t%s", k.Used, k.Limit, part(uint64(max(k.Used, 0)), uint64(k.Limit)))
			}
			fmt.Fprintln(t)
		}
	})
	if len(top.Keys) == 0 {
		fmt.Fprintln(w, "no key was decided on")
	}
}

// besideKey is the approximate width of the columns other than the key.
const besideKey = 60

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
