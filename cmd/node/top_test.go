package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/testkit"
)

func topExample() *weirv1.TopKeysResponse {
	return &weirv1.TopKeysResponse{
		Node: "n0", Members: []string{"n0", "n1"}, Unreachable: []string{"n2"}, CountedNs: int64(10 * time.Second), PoliciesCountedNs: int64(20 * time.Second),
		Keys: []*weirv1.KeyUse{
			{Policy: "login", Key: "alice", Decisions: 125, Refused: 25, Limit: 5, Used: 5},
			{Namespace: "api", Key: "\x1b]0;owned\a", Decisions: 1},
		},
		Policies: []*weirv1.PolicyUse{{Policy: "login", Allowed: 100, Refused: 25, FailedOpen: 1, Errors: 2}},
	}
}

func TestPrintTop(t *testing.T) {
	var b bytes.Buffer
	if err := printTop(&b, weirv1.KeyOrder_KEY_ORDER_REFUSED, topExample(), 0); err != nil {
		t.Fatal(err)
	}
	want := `refused keys of the last 10s, as n0 knows from 2 of 3 members
unreachable, and missing: n2

POLICY  CHECKS/S  REFUSED/S  REFUSED  FAILED/S  ERRORS/S
login       6.30       1.25      20%      0.05      0.10

KEY                 POLICY        CHECKS/S  REFUSED/S  REFUSED  USED  FULL
alice               login               12       2.50      20%   5/5  100%
"\x1b]0;owned\a"  (inline) api      0.10          0       0%
`
	// The quoted key is as wide as the column makes it.
	want = strings.Replace(want, "KEY                 POLICY", "KEY               POLICY", 1)
	want = strings.Replace(want, "alice               login", "alice             login", 1)
	if b.String() != want {
		t.Errorf("got\n%swant\n%s", &b, want)
	}
	b.Reset()
	if err := printTop(&b, weirv1.KeyOrder_KEY_ORDER_BUSIEST, &weirv1.TopKeysResponse{Node: "n0", Members: []string{"n0"}}, 0); err != nil || !strings.Contains(b.String(), "no key was decided on\n") {
		t.Errorf("%v\n%s", err, &b)
	}
}

// A screen is never larger than the terminal, whatever the keys are, and no key controls it.
func TestTopScreen(t *testing.T) {
	top := topExample()
	for i := range 100 {
		top.Keys = append(top.Keys, &weirv1.KeyUse{Policy: strings.Repeat("p", 128), Key: fmt.Sprint(strings.Repeat("ключ-", 200), i), Decisions: 1})
	}
	for _, size := range [][2]int{{80, 24}, {20, 5}, {300, 200}, {1, 1}} {
		for _, err := range []error{nil, errors.New("--addr: no node answers")} {
			screen := topScreen(weirv1.KeyOrder_KEY_ORDER_BUSIEST, top, err, size[0], size[1])
			lines := strings.Split(strings.TrimSuffix(strings.TrimPrefix(screen, home), "\x1b[K"+endOfScreen), endOfLine)
			if len(lines) > size[1] {
				t.Errorf("%v: %d lines", size, len(lines))
			}
			for _, line := range lines {
				if len([]rune(line)) > size[0] || strings.ContainsAny(line, "\x1b\a\r\n") {
					t.Errorf("%v: %q", size, line)
				}
			}
		}
	}
}

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
	if err := json.Unmarshal([]byte(out), &top); err != nil || code != exitOK {
		t.Fatal(code, err, out, errs)
	}
	if len(top.Keys) != 1 || top.Keys[0].Key != "alice" || top.Keys[0].Policy != "login" || top.Keys[0].Decisions != 7 || top.Keys[0].Refused != 2 || top.Order != "refused" {
		t.Errorf("%s", out)
	}
	// It is not a terminal: printed once.
	if code, out, errs := command("top" + addr + tokens["all"]); code != exitOK || strings.Count(out, "alice") != 1 || strings.Contains(out, "\x1b") {
		t.Errorf("%d %s%s", code, out, errs)
	}
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
