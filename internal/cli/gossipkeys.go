package cli

import (
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/weirlimit/weir/internal/reload"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

func newGossipKeys() *cobra.Command {
	return group("gossip-keys", "Show and change the keys that encrypt the gossip, on all members", `Show and change the keys that encrypt the gossip, on all members, while they run. A key is changed in three steps. A step
that would cut a member off is rejected:

  openssl rand -base64 32 > new.key
  weir gossip-keys add new.key    all members can read it
  weir gossip-keys use ID         all members write with it (list shows the id)
  weir gossip-keys remove OLD-ID  nobody can read the old one any more

Keys changed like this are forgotten when a process ends: put the new key into the nodes' --gossip-key-file as well. Changing
that file on all nodes does the three steps by itself.
Exit status: 0 done, 1 a member did not follow, 2 error; unless it is a timeout, nothing has changed.`,
		newKeyStep("list", "Show which members have which keys", weirv1.KeyAction_KEY_ACTION_LIST),
		newKeyStep("add FILE", "Give all members a key, in base64 in a file, or - for standard input",
			weirv1.KeyAction_KEY_ACTION_ADD),
		newKeyStep("use ID", "Have all members encrypt with a key that all have", weirv1.KeyAction_KEY_ACTION_USE),
		newKeyStep("remove ID", "Have all members forget a key that none uses", weirv1.KeyAction_KEY_ACTION_REMOVE))
}

// newKeyStep returns the command of one step of a change of keys.
func newKeyStep(use, short string, action weirv1.KeyAction) (cmd *cobra.Command) {
	var f connection
	req := &weirv1.GossipKeysRequest{Action: action}
	cmd = f.command(use, short, func(ctx context.Context, conn *grpc.ClientConn, _ []string, out io.Writer) error {
		resp, err := weirv1.NewAdminClient(conn).GossipKeys(ctx, req)
		if err == nil {
			err = printGossipKeys(out, resp, f.output == "json")
		}
		if err == nil && slices.ContainsFunc(resp.Members, func(m *weirv1.MemberKeys) bool { return m.Error != "" }) {
			return errNegative // a member did not follow
		}
		return err
	})
	cmd.PreRunE = func(cmd *cobra.Command, args []string) (err error) { // before --timeout begins: a key may be typed
		switch action {
		case weirv1.KeyAction_KEY_ACTION_LIST:
		case weirv1.KeyAction_KEY_ACTION_ADD:
			if req.Key, err = readKey(args[0], cmd.InOrStdin()); err == nil && !f.private() {
				err = fmt.Errorf("addr: the key would be sent to %s in plain text: give --tls-ca-file", f.addr)
			}
		default:
			req.Id = args[0]
		}
		return err
	}
	return cmd
}

// readKey reads one key. It is not an argument, because other users of the host can read the command line.
func readKey(name string, stdin io.Reader) ([]byte, error) {
	var text []byte
	var err error
	if name == "-" {
		text, err = io.ReadAll(io.LimitReader(stdin, 1024))
	} else {
		text, err = reload.ReadFile(name, 1024)
	}
	if err != nil {
		return nil, fmt.Errorf("FILE: %w", err)
	}
	key, err := base64.StdEncoding.DecodeString(strings.TrimSpace(string(text)))
	if err != nil {
		return nil, fmt.Errorf("FILE: %s is not one key in base64; make one with: openssl rand -base64 32", name)
	}
	return key, nil
}

// printGossipKeys prints the members' gossip keys.
func printGossipKeys(w io.Writer, resp *weirv1.GossipKeysResponse, asJSON bool) error {
	if asJSON {
		marshal := protojson.MarshalOptions{UseProtoNames: true, EmitUnpopulated: true}.Marshal
		return indented(w, marshal, proto.Message(resp))
	}
	return table(w, "MEMBER\tKEY\tUSED\tIN FILE\tERROR", func(t io.Writer) {
		for _, m := range resp.Members {
			if len(m.Keys) == 0 {
				fmt.Fprintf(t, "%s\t\t\t\t%s\n", m.Name, m.Error)
			}
			for _, k := range m.Keys {
				fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", m.Name, k.Id, yes(k.Used, "-"), yes(k.InFile, "-"), m.Error)
			}
		}
	})
}
