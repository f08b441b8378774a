package cli

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/dustin/go-humanize/english"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	httpapi "github.com/weirlimit/weir/gateway/http"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

func newStatus() *cobra.Command {
	var f connection
	return f.command("status", "Show the cluster: members, who owns how much, policies, versions",
		func(ctx context.Context, conn *grpc.ClientConn, _ []string, out io.Writer) error {
			st, err := weirv1.NewLimiterClient(conn).Status(ctx, &weirv1.StatusRequest{})
			if err != nil {
				return err
			}
			return printStatus(out, st, f.output == "json")
		})
}

// indented prints a message as indented JSON.
func indented[M any](w io.Writer, marshal func(M) ([]byte, error), message M) error {
	text, err := marshal(message)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	if err := json.Indent(&b, text, "", "  "); err != nil {
		return err
	}
	_, err = fmt.Fprintln(w, b.String())
	return err
}

// columns appends a table to b: head, and lines of cells with tabs between them.
func columns(b *bytes.Buffer, head string, lines func(t io.Writer)) {
	t := tabwriter.NewWriter(b, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, head)
	lines(t)
	_ = t.Flush() // a buffer takes all writes
}

// table prints one table.
func table(w io.Writer, head string, lines func(t io.Writer)) error {
	var b bytes.Buffer
	columns(&b, head, lines)
	_, err := b.WriteTo(w)
	return err
}

// printStatus prints the state of a cluster: as tables, or the JSON of GET /v1/status.
func printStatus(w io.Writer, st *weirv1.StatusResponse, asJSON bool) error {
	if asJSON {
		return indented(w, httpapi.MarshalStatus, st)
	}
	ready := "ready"
	if !st.Ready {
		ready = "not ready"
	}
	b := new(bytes.Buffer)
	fmt.Fprintf(b, "%s sees %s (%s, version %s, ring %s)\n", st.Node, english.Plural(len(st.Members), "member", ""),
		ready, st.Version, st.Ring)
	if st.ReadyDetail != "" {
		fmt.Fprintf(b, "note: %s\n", st.ReadyDetail)
	}
	fmt.Fprintln(b)
	head := "NAME\tSTATE\tPARTITIONS\tSHARE\tOWN KEYS\tCOPIED KEYS\tMEMORY\tPOLICIES\tUPTIME\tVERSION\tHTTP\tGRPC"
	columns(b, head, func(t io.Writer) {
		for _, m := range st.Members {
			fmt.Fprintf(t, "%s\t%s\t%d\t%.1f%%\t", m.Name, m.State, m.Partitions,
				100*float64(m.Partitions)/float64(max(st.Partitions, 1)))
			if m.Reachable {
				fmt.Fprintf(t, "%d\t%d\t%s\t%d (%.8s)\t%v\t%s", m.Keys-min(m.KeysCopied, m.Keys), m.KeysCopied,
					humanize.IBytes(m.StateBytes), m.Policies, m.PoliciesHash,
					time.Duration(m.UptimeNs).Truncate(time.Second), m.Version)
			} else {
				fmt.Fprint(t, "unreachable\t\t\t\t\t")
			}
			fmt.Fprintf(t, "\t%s\t%s\n", m.Http, m.Grpc)
		}
	})
	fmt.Fprintln(b)
	head = "NAME\tHELD\tMOVING\tAWAITED\tCOPIES\tWITHOUT COPY\tUNSENT KEYS\tGRANTED\tVOTER\tHIGHEST TERM\tSETTLED"
	columns(b, head, func(t io.Writer) { // what each member holds, and what is in progress
		for _, m := range st.Members {
			if o := m.Ownership; o != nil {
				fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%s\t%s\t%s\n", m.Name, o.Held, o.Moving, o.Awaited,
					o.Copies,
					o.Degraded, o.Pending, o.Granted, o.Voter, o.HighestTerm, yes(o.Settled, "no"))
			}
		}
	})
	printDisks(b, st)
	fmt.Fprintln(b)
	columns(b, "NAME\tON LOAN\tBORROWERS\tRECALLS\tUNANSWERED\tEXPIRED UNITS", func(t io.Writer) {
		for _, m := range st.Members {
			if l := m.Loans; l != nil {
				fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%d\t%d\n", m.Name, l.OnLoan, l.Borrowers, l.Recalls, l.Unanswered,
					l.Expired)
			}
		}
	})
	_, err := b.WriteTo(w)
	return err
}

// printDisks prints the state of the members' disks, if any member has one.
func printDisks(b *bytes.Buffer, st *weirv1.StatusResponse) {
	kept := func(m *weirv1.Member) bool { return m.Ownership.GetDisk() != nil }
	if !slices.ContainsFunc(st.Members, kept) {
		return
	}
	fmt.Fprintln(b)
	columns(b, "NAME\tON DISK\tLAST SYNC\tUNSAVED\tRESTORED\tERROR", func(t io.Writer) {
		for _, m := range st.Members {
			if d := m.Ownership.GetDisk(); d != nil {
				fmt.Fprintf(t, "%s\t%s\t%v ago\t%d\t%d\t%s\n", m.Name, humanize.IBytes(d.Bytes),
					time.Duration(d.SyncedMs)*time.Millisecond,
					d.Unsaved, d.Restored, cmp.Or(d.Error, "-"))
			}
		}
	})
}

// yes returns "yes" or no.
func yes(so bool, no string) string {
	if so {
		return "yes"
	}
	return no
}
