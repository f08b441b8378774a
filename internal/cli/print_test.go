package cli

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

func TestPrintDecision(t *testing.T) {
	for _, c := range []struct {
		name       string
		d          *weirv1.Decision
		text, json string
	}{
		{
			"allowed",
			&weirv1.Decision{Policy: "login", Allowed: true, Granted: 1, Limit: 5, Remaining: 4,
				RetryAfterNs: proto.Int64(0), ResetAfterNs: int64(time.Minute)},
			"allowed  policy=login granted=1 limit=5 remaining=4 reset_after=1m0s",
			`{"allowed":true,"granted":1,"limit":5,"remaining":4,"retry_after_ms":0,"reset_after_ms":60000,"delay_ms":0,"policy":"login","shadow":false,"degraded":false,"failed_open":false,"failed_closed":false}`,
		},
		{
			"refused, rounded up",
			&weirv1.Decision{Policy: "login", Limit: 5, RetryAfterNs: proto.Int64(int64(1500*time.Millisecond) + 1),
				ResetAfterNs: 1},
			"refused  policy=login granted=0 limit=5 remaining=0 retry_after=1.501s reset_after=1ms",
			`{"allowed":false,"granted":0,"limit":5,"remaining":0,"retry_after_ms":1501,"reset_after_ms":1,"delay_ms":0,"policy":"login","shadow":false,"degraded":false,"failed_open":false,"failed_closed":false}`,
		},
		{
			"never, with all flags",
			&weirv1.Decision{Policy: "inline", Limit: 5, Remaining: 5, RequestId: "r", Shadow: true, Degraded: true,
				FailedOpen: true, FailedClosed: true, RetryAfterEstimated: true, Banned: true, NearLimit: true},
			"refused  policy=inline granted=0 limit=5 remaining=5 retry_after=never shadow degraded failed_open failed_closed retry_after_estimated banned near_limit",
			`{"allowed":false,"granted":0,"limit":5,"remaining":5,"reset_after_ms":0,"delay_ms":0,"policy":"inline","shadow":true,"degraded":true,"failed_open":true,"failed_closed":true,"retry_after_estimated":true,"banned":true,"near_limit":true,"request_id":"r"}`,
		},
		{
			"delayed and unlimited",
			&weirv1.Decision{Policy: "mail", Allowed: true, Granted: 2, Limit: -1, Remaining: -1,
				RetryAfterNs: proto.Int64(0), DelayNs: int64(250 * time.Millisecond)},
			"allowed  policy=mail granted=2 limit=-1 remaining=-1 delay=250ms",
			`{"allowed":true,"granted":2,"limit":-1,"remaining":-1,"retry_after_ms":0,"reset_after_ms":0,"delay_ms":250,"policy":"mail","shadow":false,"degraded":false,"failed_open":false,"failed_closed":false}`,
		},
	} {
		for output, want := range map[string]string{"text": c.text, "json": c.json} {
			var b bytes.Buffer
			if err := printDecision(&b, c.d, output == "json"); err != nil || b.String() != want+"\n" {
				t.Errorf("%s as %s: %v\ngot  %swant %s", c.name, output, err, &b, want)
			}
		}
	}
}

func TestPrintStatus(t *testing.T) {
	st := &weirv1.StatusResponse{
		Node: "n0", Version: "v1.2.3", Ready: true, ReadyDetail: "policy file rejected: p.yaml:1:1: no",
		Partitions: 4093, Ring: "00ff",
		Members: []*weirv1.Member{
			{Name: "n0", State: "active", Http: "127.0.0.1:8080", Grpc: "127.0.0.1:8081", Partitions: 2000,
				Reachable: true, Version: "v1.2.3",
				PoliciesHash: "0123456789abcdef", Policies: 7, Keys: 12, KeysCopied: 5, StateBytes: 3 << 20,
				UptimeNs: int64(90*time.Second + time.Millisecond),
				Ownership: &weirv1.Ownership{Held: 1, Moving: 2, Awaited: 3, Copies: 4, Degraded: 5, Pending: 6,
					Granted: 7, HighestTerm: "1.2/00ff", Voter: "voting"},
				Loans: &weirv1.Loans{OnLoan: 300, Borrowers: 2, Recalls: 9, Unanswered: 1, Expired: 42}},
			{Name: "n1", State: "leaving", Http: "127.0.0.1:9080", Partitions: 2093},
		},
	}
	want := `n0 sees 2 members (ready, version v1.2.3, ring 00ff)
note: policy file rejected: p.yaml:1:1: no

NAME  STATE    PARTITIONS  SHARE  OWN KEYS     COPIED KEYS  MEMORY   POLICIES      UPTIME  VERSION  HTTP            GRPC
n0    active   2000        48.9%  7            5            3.0 MiB  7 (01234567)  1m30s   v1.2.3   127.0.0.1:8080  127.0.0.1:8081
n1    leaving  2093        51.1%  unreachable                                                       127.0.0.1:9080

NAME  HELD  MOVING  AWAITED  COPIES  WITHOUT COPY  UNSENT KEYS  GRANTED  VOTER   HIGHEST TERM  SETTLED
n0    1     2       3        4       5             6            7        voting  1.2/00ff      no

NAME  ON LOAN  BORROWERS  RECALLS  UNANSWERED  EXPIRED UNITS
n0    300      2          9        1           42
`
	var b bytes.Buffer
	must.NoError(t, printStatus(&b, st, false))
	var lines []string // without the blanks that a table ends its lines with
	for line := range strings.Lines(b.String()) {
		lines = append(lines, strings.TrimRight(line, " \n")+"\n")
	}
	expect.Equal(t, strings.Join(lines, ""), want)

	b.Reset()
	must.NoError(t, printStatus(&b, st, true))
	for _, want := range []string{`"keys": 12,`, `"keys_copied": 5,`, `"uptime_ms": 90001,`, `"pending": 6,`,
		`"on_loan": 300,`, `"borrowers": 2,`, `"recalls": 9,`, `"unanswered": 1,`, `"expired": 42`} {
		expect.True(t, strings.Contains(b.String(), want), "%s is not in\n%s", want, &b)
	}

	b.Reset()
	err := printStatus(&b, &weirv1.StatusResponse{Node: "n0"}, false)
	expect.True(t, err == nil && strings.HasPrefix(b.String(), "n0 sees 0 members (not ready, "), "%v: %s", err, &b)
}

func topExample() *weirv1.TopKeysResponse {
	return &weirv1.TopKeysResponse{
		Node: "n0", Members: []string{"n0", "n1"}, Unreachable: []string{"n2"}, CountedNs: int64(10 * time.Second),
		PoliciesCountedNs: int64(20 * time.Second),
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
	err = printTop(&b, weirv1.KeyOrder_KEY_ORDER_BUSIEST, &weirv1.TopKeysResponse{Node: "n0", Members: []string{"n0"}},
		false)
	expect.True(t, err == nil && strings.Contains(b.String(), "no key was decided on\n"), "%v\n%s", err, &b)
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
		"top --limit 0":               `"0" is not a number, from 1 to 256`,
		"top --limit 257":             `"257" is not a number, from 1 to 256`,
		"top --interval 1ms":          `"1ms" is not a time`,
		"top now":                     `unknown command "now"`,
	} {
		if code, out, errs := command(args); code != exitError || !strings.Contains(errs, want) {
			t.Errorf("%s: %d %s%s, want %q", args, code, out, errs, want)
		}
	}
}
