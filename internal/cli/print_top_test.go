package cli

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
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
	must.NoError(t, printTop(&b, weirv1.KeyOrder_KEY_ORDER_REFUSED, topExample(), false))
	want := `refused keys of the last 10s, as n0 knows from 2 of 3 members
unreachable, and missing: n2

POLICY  CHECKS/S  REFUSED/S  REFUSED  FAILED/S  ERRORS/S
login   6.30      1.25       20%      0.05      0.10

KEY               POLICY        CHECKS/S  REFUSED/S  REFUSED  USED  FULL
alice             login         12        2.50       20%      5/5   100%
"\x1b]0;owned\a"  (inline) api  0.10      0          0%
`
	expect.True(t, b.String() == want, "got\n%swant\n%s", &b, want)
	b.Reset()
	top := topExample()
	top.Policies[0].Banned = 20
	err := printTop(&b, weirv1.KeyOrder_KEY_ORDER_REFUSED, top, false)
	expect.True(t, err == nil && strings.Contains(b.String(), "ERRORS/S  BANNED/S\n"), "with bans: %v\n%s", err, &b)
	b.Reset()
	err = printTop(&b, weirv1.KeyOrder_KEY_ORDER_BUSIEST, &weirv1.TopKeysResponse{Node: "n0", Members: []string{"n0"}}, false)
	expect.True(t, err == nil && strings.Contains(b.String(), "no key was decided on\n"), "%v\n%s", err, &b)
}

// A screen is never larger than the terminal, whatever the keys are, and no key controls it.
func TestTopScreen(t *testing.T) {
	top := topExample()
	for i := range 100 {
		top.Keys = append(top.Keys, &weirv1.KeyUse{Policy: strings.Repeat("p", 128), Key: fmt.Sprint(strings.Repeat("ключ-", 200), i), Decisions: 1})
	}
	for _, size := range [][2]int{{80, 24}, {20, 5}, {300, 200}, {1, 1}} {
		for _, err := range []error{nil, errors.New("addr: no node answers")} {
			screen := topScreen(weirv1.KeyOrder_KEY_ORDER_BUSIEST, top, err, size[0], size[1])
			lines := strings.Split(strings.TrimSuffix(strings.TrimPrefix(screen, home), "\x1b[K"+endOfScreen), endOfLine)
			expect.True(t, len(lines) <= size[1], "%v: %d lines", size, len(lines))
			for _, line := range lines {
				expect.True(t, len([]rune(line)) <= size[0] && !strings.ContainsAny(line, "\x1b\a\r\n"),
					"%v: %q", size, line)
			}
		}
	}
}
