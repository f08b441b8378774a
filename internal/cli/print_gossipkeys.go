package cli

import (
	"fmt"
	"io"
	"text/tabwriter"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"

	"google.golang.org/protobuf/encoding/protojson"
)

// printGossipKeys prints the members' gossip keys.
func printGossipKeys(w io.Writer, resp *weirv1.GossipKeysResponse, asJSON bool) error {
	if asJSON {
		text, err := protojson.MarshalOptions{Multiline: true, UseProtoNames: true, EmitUnpopulated: true}.Marshal(resp)
		if err == nil {
			_, err = fmt.Fprintln(w, string(text))
		}
		return err
	}
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "MEMBER\tKEY\tUSED\tIN FILE\tERROR")
	mark := map[bool]string{true: "yes", false: "-"}
	for _, m := range resp.Members {
		if len(m.Keys) == 0 {
			fmt.Fprintf(t, "%s\t\t\t\t%s\n", m.Name, m.Error)
		}
		for _, k := range m.Keys {
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", m.Name, k.Id, mark[k.Used], mark[k.InFile], m.Error)
		}
	}
	return t.Flush()
}
