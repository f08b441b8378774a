// Package console drives the console in a real Chromium. It needs Chromium on the PATH, and is skipped without it.
package console

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/audits"
	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/internal/node"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

const policies = `policies:
  - {name: login, algorithm: sliding_log, limit: 5, window: 1m, overrides: [{key: admin, unlimited: true}]}
  - {name: api, algorithm: sliding_window, limits: [10/1s, 100/1m]}
  - {name: upload, algorithm: token_bucket, limit: 5, window: 1s, capacity: 20}
  - {name: search, algorithm: sliding_counter, limit: 100, window: 1m}
  - {name: report, algorithm: fixed_window, limit: 1000, align: calendar, window: day, time_zone: UTC, persist: true}
  - {name: trial, algorithm: sliding_log, limit: 20, window: 1m, shadow: true}
`

// start starts a node that joins another, if there is one, and waits until it is ready.
func start(t *testing.T, name, accessFile string, join *node.Node) *node.Node {
	t.Helper()
	cfg := node.Config{
		Version: "v0.1.0", Name: name, Bind: "127.0.0.1", HTTPPort: node.PortAny, GRPCPort: node.PortAny,
		GossipPort: node.PortAny, PeerPort: node.PortAny,
		Timeout: 10 * time.Second, Grace: 5 * time.Second, Logger: slog.New(slog.DiscardHandler),
		PolicyFile: testkit.WriteFile(t, "policies.yaml", policies), DataDir: t.TempDir(),
	}
	cfg.Security.AccessFile = accessFile
	if join != nil {
		cfg.Join = []string{join.GossipAddr()}
	}
	n := must.Value(node.Start(t.Context(), cfg))(t)
	t.Cleanup(n.Stop)
	select {
	case <-n.Settled():
	case <-n.Failed():
		t.Fatal(n.Err())
	case <-time.After(testkit.Patience):
		t.Fatalf("%s is not ready", name)
	}
	return n
}

// browser is a tab of a Chromium.
type browser struct {
	t   *testing.T
	ctx context.Context

	mu       sync.Mutex
	troubles []string // what the console of the browser says of errors and of violations of the page's policy
	requests []string
}

// open starts a Chromium that reaches nothing but this host.
func open(t *testing.T) *browser {
	t.Helper()
	path, err := exec.LookPath("chromium")
	if err != nil {
		t.Skip("chromium is not installed: install the package chromium")
	}
	tab, end := chromedp.NewContext(context.Background(), chromedp.WithAllocatorOptions(chromedp.ExecPath(path),
		chromedp.Flag("no-sandbox", true), // which root, in a container, cannot have
		chromedp.Flag("disable-dev-shm-usage", true),
		chromedp.Flag("host-resolver-rules", "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")))
	t.Cleanup(end)
	ctx, late := context.WithTimeout(tab, 4*time.Minute)
	t.Cleanup(late)
	b := &browser{t: t, ctx: ctx}
	must.NoError(t, chromedp.Listen(ctx, b.hear))
	call(b, log.Enable, cdp.Empty{})
	call(b, audits.Enable, cdp.Empty{})
	call(b, network.Enable, network.EnableParams{})
	return b
}

func call[P, R any](b *browser, command cdp.Command[P, R], params P) {
	b.t.Helper()
	_, err := chromedp.Call(b.ctx, command, params)
	must.NoError(b.t, err)
}

func (b *browser) hear(event any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch e := event.(type) {
	case *runtime.EventExceptionThrown:
		b.troubles = append(b.troubles,
			fmt.Sprintf("exception: %s %v", e.ExceptionDetails.Text, e.ExceptionDetails.Exception))
	case *runtime.EventConsoleAPICalled:
		if e.Type == "error" || e.Type == "warning" || e.Type == "assert" {
			b.troubles = append(b.troubles, fmt.Sprint("console: ", e.Type, e.Args))
		}
	case *log.EventEntryAdded:
		if e.Entry.Level == log.EntryLevelError || e.Entry.Level == log.EntryLevelWarning {
			b.troubles = append(b.troubles, "log: "+e.Entry.Text)
		}
	case *audits.EventIssueAdded:
		if e.Issue.Code == audits.InspectorIssueCodeContentSecurityPolicyIssue {
			b.troubles = append(b.troubles, "violation of the content security policy")
		}
	case *network.EventRequestWillBeSent:
		b.requests = append(b.requests, e.Request.URL)
	}
}

// quiet fails if the browser has complained, but for what is expected.
func (b *browser) quiet(expected ...string) {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, trouble := range b.troubles {
		expect.True(b.t, slices.ContainsFunc(expected, func(e string) bool { return strings.Contains(trouble, e) }),
			"the browser says: %s", trouble)
	}
}

func (b *browser) do(actions ...chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	must.NoError(b.t, chromedp.Do(b.ctx, actions...))
}

// text returns the text of the first element of a selector.
func (b *browser) text(selector string) string {
	b.t.Helper()
	quoted := must.Value(json.Marshal(selector))(b.t)
	s := evaluate[string](b, "(document.querySelector("+string(quoted)+") || {textContent: '(none)'}).textContent")
	return strings.Join(strings.Fields(s), " ")
}

func evaluate[T any](b *browser, script string) T {
	b.t.Helper()
	v, err := chromedp.Run(b.ctx, chromedp.Evaluate[T](script))
	must.NoError(b.t, err, "%s", script)
	return v
}

// holds evaluates a condition in the page.
func (b *browser) holds(condition string) bool {
	b.t.Helper()
	return evaluate[bool](b, condition)
}

func (b *browser) eventually(what string, ok func() bool) {
	b.t.Helper()
	for until := time.Now().Add(30 * time.Second); !ok(); {
		must.True(b.t, !time.Now().After(until), "never happened: %s\n%s", what, b.text("body"))
		time.Sleep(50 * time.Millisecond)
	}
}

func (b *browser) contains(selector, want string) {
	b.t.Helper()
	b.eventually(fmt.Sprintf("%q in %s", want, selector),
		func() bool { return strings.Contains(b.text(selector), want) })
}

// try fills the form in and presses a button.
func (b *browser) try(policy, key, button string) {
	b.t.Helper()
	b.do(chromedp.SetValue("#try-policy", policy), chromedp.SetValue("#try-key", key), chromedp.Click(button))
}

// Whoever looks sees what happens: a check that is tried, a key that is reset, a node that leaves and joins.
func TestConsole(t *testing.T) {
	b := open(t)
	first := start(t, "weir-0", "", nil)
	second := start(t, "weir-1", "", first)
	third := start(t, "weir-2", "", first)
	b.do(chromedp.Navigate("http://" + first.HTTPAddr() + "/"))
	b.do(chromedp.Click(`a[href="/console"]`))
	b.contains("#link", "Live")
	b.contains("#cluster-summary", "3 members")
	b.contains("#version", "weir-0 · v0.1.0")
	b.contains("#members .facts", "on disk, synced")

	b.try("login", "alice", "#try-check")
	b.contains("#decision", "Allowed")
	b.contains("#decision", "4 units of 5 left for alice")
	b.contains("#state", "1 of 5 in use, sliding log")
	b.contains("#state .returns", "1 unit in")
	for range 5 {
		b.do(chromedp.Click("#try-check"))
	}
	b.contains("#decision", "Refused")
	b.contains("#decision", "the same passes in")
	b.contains("#state", "5 of 5 in use")
	b.eventually("five admissions that leave the window",
		func() bool { return b.holds("document.querySelectorAll('#state .returns li').length === 5") })
	b.contains("#keys tbody tr th", "alice")
	b.contains("#keys tbody tr .used-cell", "5 of 5")
	b.eventually("refusals are counted", func() bool { return strings.HasSuffix(b.text("#part-refused"), "%") })

	// A key with markup in it is text, wherever it is shown.
	markup := `<img src=x onerror="document.title='owned'"><script>document.title='owned'</script>`
	b.try("login", markup, "#try-check")
	b.contains("#decision", "left for <img src=x")
	b.contains("#keys tbody", "<img src=x")
	b.do(chromedp.Click(`#orders input[value=fullest] + span`))
	b.contains("#keys tbody", "<img src=x")
	b.do(chromedp.Click("#try-reset"))
	b.contains("#reset-key", "<img src=x")
	b.do(chromedp.Click("#reset-dialog button[value=keep]"))
	expect.True(t, !b.holds("document.title !== 'Weir console' || document.querySelectorAll('main img, main script, dialog img').length > 0"),
		"the markup of a key is in the page")

	// Kept, then reset.
	b.try("login", "alice", "#try-look")
	b.contains("#state", "5 of 5 in use")
	b.do(chromedp.Click("#try-reset"), chromedp.Click("#reset-confirm"))
	b.contains("#decision", "alice is as new under login")
	b.contains("#state", "0 of 5 in use")
	b.do(chromedp.Click("#try-check"))
	b.contains("#decision", "4 units of 5 left for alice")

	// By the keyboard alone.
	evaluate[string](b, "document.getElementById('try-key').value = ''")
	b.do(chromedp.SendKeys("#try-key", "bob\r"))
	b.contains("#decision", "left for bob")

	third.Stop()
	b.contains("#cluster-summary", "2 members")
	b.eventually("two rows of members",
		func() bool { return b.holds("document.querySelectorAll('#members > li').length === 2") })
	start(t, "weir-3", "", second)
	b.contains("#cluster-summary", "3 members")
	b.contains("#members", "weir-3")
	b.eventually("three arcs that are all of the ring", func() bool {
		return b.holds("document.querySelectorAll('#ring g circle').length === 3") &&
			b.text("#ring text.big") == "100 %"
	})

	// The node that serves the page goes: it says so, and frees what it held.
	first.Stop()
	b.contains("#link", "Disconnected")
	// of a refusal, and of the node that goes
	b.quiet("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "429 (Too Many Requests)")
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, url := range b.requests {
		expect.True(t, strings.HasPrefix(url, "http://127.0.0.1:") || strings.HasPrefix(url, "chrome") ||
			strings.HasPrefix(url, "data:") || url == "about:blank", "the page asked for %s", url)
	}
}

// Where there is an access file the page asks for a token, and shows what that may see.
func TestConsoleAsksForAToken(t *testing.T) {
	b := open(t)
	reader, all := auth.NewToken(), auth.NewToken()
	file := testkit.WriteFile(t, "access.yaml", fmt.Sprintf(`callers:
  - {name: reader, tokens: [%s], roles: [read]}
  - {name: all, tokens: [%s], roles: [read, keys, check, refund], policies: ["*"]}
`, auth.Hash(reader), auth.Hash(all)))
	n := start(t, "weir-0", file, nil)
	b.do(chromedp.Navigate("http://" + n.HTTPAddr() + "/console"))
	b.do(chromedp.WaitVisible("#token-dialog"))
	b.contains("#link", "No access")
	b.do(chromedp.SendKeys("#token", "wrong\r"))
	b.contains("#token-why", "unknown token")
	b.do(chromedp.SendKeys("#token", reader+"\r"))
	b.contains("#link", "Live")
	b.contains("#keys-none", "takes a token with the role keys")
	expect.True(t,
		b.holds("document.getElementById('try-check').disabled && document.getElementById('try-reset').hidden"),
		"a reader may try checks or reset")
	b.do(chromedp.Click("#token-button"), chromedp.SendKeys("#token", all+"\r"))
	b.eventually("the form to be open",
		func() bool { return !b.holds("document.getElementById('try-check').disabled") })
	b.try("login", "alice", "#try-check")
	b.contains("#decision", "4 units of 5 left for alice")
	b.contains("#keys tbody tr th", "alice")
	expect.True(t, b.holds("sessionStorage.length === 1 && localStorage.length === 0 && document.cookie === ''"),
		"the token is kept elsewhere than in the tab")
	b.do(chromedp.Click("#token-button"), chromedp.Click("#token-forget"))
	b.do(chromedp.WaitVisible("#token-dialog"))
	expect.True(t, b.holds("sessionStorage.length === 0"), "the token is not forgotten")
	b.quiet("401 (Unauthorized)")
}
