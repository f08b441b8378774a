package cli

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

func TestTopCommand(t *testing.T) {
	n, shop, all := startSecured(t, nil)
	tokens := map[string]string{"shop": testkit.WriteFile(t, "shop", shop), "all": testkit.WriteFile(t, "all", all)}
	addr := " --addr " + n.GRPCAddr() + " --token-file "
	command := func(args string) (code int, stdout, stderr string) {
		var out, errs bytes.Buffer
		code = run(strings.Fields(args), &out, &errs)
		return code, out.String(), errs.String()
	}
	for range 7 {
		command("check alice --policy login" + addr + tokens["shop"])
	}
	code, out, errs := command("top -o json --order refused" + addr + tokens["all"])
	var top struct {
		Order string
		Keys  []struct {
			Policy, Key        string
			Decisions, Refused int64
		}
	}
	err := json.Unmarshal([]byte(out), &top)
	must.True(t, err == nil && code == exitOK, "%v %v %v %v", code, err, out, errs)
	expect.True(t, len(top.Keys) == 1 && top.Keys[0].Key == "alice" && top.Keys[0].Policy == "login" &&
		top.Keys[0].Decisions == 7 && top.Keys[0].Refused == 2 && top.Order == "refused", "%s", out)
	// It is not a terminal: printed once.
	code, out, errs = command("top" + addr + tokens["all"])
	expect.True(t, code == exitOK && strings.Count(out, "alice") == 1 && !strings.Contains(out, "\x1b"),
		"%d %s%s", code, out, errs)
	for args, want := range map[string]string{
		"top" + addr + tokens["shop"]: "shop does not have the role keys",
		"top --order newest":          `--order: "newest"`,
		"top --limit 0":               "--limit: 0",
		"top --limit 257":             "--limit: 257",
		"top --interval 1ms":          "--interval: 1ms",
		"top now":                     `unknown command "now"`,
	} {
		if code, out, errs := command(args); code != exitError || !strings.Contains(errs, want) {
			t.Errorf("%s: %d %s%s, want %q", args, code, out, errs, want)
		}
	}
}
