package cli

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	httpapi "github.com/weirlimit/weir/gateway/http"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

func newOverride() *cobra.Command {
	return group("override", "Give keys other limits than their policy has, on all members, while they run", `Give keys, or all keys with a prefix, other limits than their policy has, on all members of the cluster, while they run.

  weir override set login alice '{"limit":500}'
  weir override set --prefix api partner- '{"limits":["10/1s","1000/1h"]}'
  weir override set login mallory '{"blocked":true}'
  weir override list
  weir override delete login alice

SETTINGS are the fields of an override in a policy file, as a JSON object. With an access file it takes a token with the role overrides.
Exit status: 0 done, 1 done, but not all members have it yet, 2 error; unless it is a timeout, nothing has changed.`,
		newOverrideChange("set POLICY KEY SETTINGS", "Give a key other limits",
			func(ctx context.Context, c weirv1.OverridesClient, key, prefix string,
				args []string) (*weirv1.OverrideChange, error) {
				return c.SetOverride(ctx, &weirv1.SetOverrideRequest{Override: &weirv1.Override{Policy: args[0],
					Key: key, Prefix: prefix, Settings: args[2]}})
			}),
		newOverrideChange("delete POLICY KEY", "Give a key the limits of the policy file again",
			func(ctx context.Context, c weirv1.OverridesClient, key, prefix string,
				args []string) (*weirv1.OverrideChange, error) {
				return c.DeleteOverride(ctx, &weirv1.DeleteOverrideRequest{Policy: args[0], Key: key, Prefix: prefix})
			}),
		newOverrideList())
}

// changeOverride has a node change the override of a key or a prefix.
type changeOverride func(ctx context.Context, c weirv1.OverridesClient, key, prefix string,
	args []string) (*weirv1.OverrideChange, error)

func newOverrideChange(use, short string, ask changeOverride) *cobra.Command {
	var f connection
	var isPrefix bool
	cmd := f.command(use, short, func(ctx context.Context, conn *grpc.ClientConn, args []string, out io.Writer) error {
		key, prefix := args[1], ""
		if isPrefix {
			key, prefix = "", args[1]
		}
		resp, err := ask(ctx, weirv1.NewOverridesClient(conn), key, prefix, args)
		if err == nil {
			err = printOverrideChange(out, resp, f.output == "json")
		}
		if err == nil && slices.ContainsFunc(resp.Members, func(m *weirv1.OverrideMember) bool { return !m.Has }) {
			return errNegative
		}
		return err
	})
	cmd.Flags().BoolVar(&isPrefix, "prefix", false, "for all keys that begin with KEY")
	return cmd
}

func newOverrideList() *cobra.Command {
	var f connection
	var policy string
	cmd := f.command("list", "Show the overrides that were set while nodes run",
		func(ctx context.Context, conn *grpc.ClientConn, _ []string, out io.Writer) error {
			all, page := new(weirv1.ListOverridesResponse), &weirv1.ListOverridesRequest{Policy: policy, PageSize: 1000}
			for {
				resp, err := weirv1.NewOverridesClient(conn).ListOverrides(ctx, page)
				if err != nil {
					return err
				}
				all.Overrides = append(all.Overrides, resp.Overrides...)
				if page.PageToken = resp.NextPageToken; page.PageToken == "" {
					return printOverrides(out, all, f.output == "json")
				}
			}
		})
	cmd.Flags().StringVar(&policy, "policy", "", "only overrides of this policy")
	return cmd
}

// printOverrides prints overrides: as a table, or the JSON of GET /v1/overrides.
func printOverrides(w io.Writer, list *weirv1.ListOverridesResponse, asJSON bool) error {
	if asJSON {
		return indented(w, httpapi.MarshalOverrides, list)
	}
	return table(w, "POLICY\tFOR\tSETTINGS\tCHANGED\tBY\tINACTIVE", func(t io.Writer) {
		for _, o := range list.Overrides {
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\n", o.Policy, subject(o), o.Settings,
				time.UnixMilli(o.ChangedAtUnixMs).UTC().Format(time.RFC3339), o.ChangedBy, o.Inactive)
		}
	})
}

// subject returns what an override is for. Keys are quoted, because they may hold any text.
func subject(o *weirv1.Override) string {
	if o.Prefix != "" {
		return "prefix " + strconv.Quote(o.Prefix)
	}
	return "key " + strconv.Quote(o.Key)
}

// printOverrideChange prints the result of a change: as text, or the JSON of PUT /v1/overrides.
func printOverrideChange(w io.Writer, change *weirv1.OverrideChange, asJSON bool) error {
	if asJSON {
		return indented(w, httpapi.MarshalOverrideChange, change)
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
