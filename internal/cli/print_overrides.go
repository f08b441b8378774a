package cli

import (
	"fmt"
	"io"
	"strconv"
	"text/tabwriter"
	"time"

	httpapi "github.com/weirlimit/weir/gateway/http"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// printOverrides prints overrides: as a table, or the JSON of GET /v1/overrides.
func printOverrides(w io.Writer, list *weirv1.ListOverridesResponse, asJSON bool) error {
	if asJSON {
		text, err := httpapi.MarshalOverrides(list)
		return indented(w, text, err)
	}
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "POLICY\tFOR\tSETTINGS\tCHANGED\tBY\tINACTIVE")
	for _, o := range list.Overrides {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\n", o.Policy, subject(o), o.Settings, time.UnixMilli(o.ChangedAtUnixMs).UTC().Format(time.RFC3339), o.ChangedBy, o.Inactive)
	}
	return t.Flush()
}

// subject is what an override is for. Keys are quoted: they may hold anything.
func subject(o *weirv1.Override) string {
	if o.Prefix != "" {
		return "prefix " + strconv.Quote(o.Prefix)
	}
	return "key " + strconv.Quote(o.Key)
}

// printOverrideChange prints what a change has come to: as text, or the JSON of PUT /v1/overrides.
func printOverrideChange(w io.Writer, change *weirv1.OverrideChange, asJSON bool) error {
	if asJSON {
		text, err := httpapi.MarshalOverrideChange(change)
		return indented(w, text, err)
	}
	o, now, was := change.Override, "deleted", ""
	if o.Settings != "" {
		now = o.Settings
	}
	if change.Before != nil {
		was = ", was " + change.Before.Settings
	}
	fmt.Fprintf(w, "%s %s: %s%s\n", o.Policy, subject(o), now, was)
	if o.Inactive != "" {
		fmt.Fprintf(w, "not in force: %s\n", o.Inactive)
	}
	has, durable := 0, 0
	for _, m := range change.Members {
		if m.Has {
			has++
		}
		if m.Durable {
			durable++
		}
	}
	fmt.Fprintf(w, "%d of %d members have it, %d on disk\n", has, len(change.Members), durable)
	for _, m := range change.Members {
		if m.Error != "" {
			fmt.Fprintf(w, "%s: %s\n", m.Name, m.Error)
		}
	}
	return nil
}
