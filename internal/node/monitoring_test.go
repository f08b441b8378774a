package node

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v4"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

const (
	alertsFile    = "../../deploy/monitoring/alerts.yaml"
	alertsTests   = "../../deploy/monitoring/alerts_test.yaml"
	dashboardFile = "../../deploy/monitoring/dashboard.json"
	monitoringDoc = "../../docs/monitoring.md"
)

// alert is a rule of the alert file.
type alert struct {
	Alert, Expr, For string
	Labels           map[string]string
	Annotations      map[string]string
}

func readAlerts(t *testing.T) []alert {
	t.Helper()
	var file struct {
		Groups []struct {
			Name  string
			Rules []alert
		}
	}
	must.NoError(t, yaml.Unmarshal([]byte(readFile(t, alertsFile)), &file))
	var all []alert
	for _, g := range file.Groups {
		all = append(all, g.Rules...)
	}
	must.True(t, len(all) != 0, "no alerts")
	return all
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	data := must.Value(os.ReadFile(path))(t)
	return string(data)
}

func promtool(t *testing.T, args ...string) {
	t.Helper()
	tool, err := exec.LookPath("promtool")
	if err != nil {
		t.Skip("promtool is not installed (Debian: apt-get install prometheus)")
	}
	out, err := exec.Command(tool, args...).CombinedOutput()
	expect.True(t, err == nil, "promtool %s: %v\n%s", strings.Join(args, " "), err, out)
}

// TestAlerts runs the alerts' own tests: when each fires, and when not.
func TestAlerts(t *testing.T) {
	t.Parallel()
	tests := readFile(t, alertsTests)
	for _, a := range readAlerts(t) {
		fires := fmt.Sprintf(`alertname="%s",alertstate="firing"`, a.Alert)
		expect.True(t, strings.Contains(tests, fires) ||
			strings.Contains(tests, "alertname: "+a.Alert+"\n        exp_alerts"), "%s: no test in which it fires",
			a.Alert)
	}
	promtool(t, "check", "rules", alertsFile)
	promtool(t, "test", "rules", alertsTests)
}

// TestAlertsAreExplained: each alert says what has happened and what to do.
func TestAlertsAreExplained(t *testing.T) {
	for _, a := range readAlerts(t) {
		s := a.Labels["severity"]
		expect.True(t, slices.Contains([]string{"info", "warning", "critical"}, s), "%s: severity %q", a.Alert, s)
		for _, name := range []string{"summary", "description", "action"} {
			expect.True(t, a.Annotations[name] != "", "%s: no annotation %s", a.Alert, name)
		}
	}
}

// dashboardQueries returns the queries of all panels by the panels' titles, with a value for each variable.
func dashboardQueries(t *testing.T) map[string][]string {
	t.Helper()
	var board struct {
		Panels []struct {
			Type    string
			Title   string
			Targets []struct{ Expr string }
		}
		Templating struct {
			List []struct{ Name, Definition string }
		}
	}
	must.NoError(t, json.Unmarshal([]byte(readFile(t, dashboardFile)), &board))
	variables := []string{"$__rate_interval", "5m"}
	for _, v := range board.Templating.List {
		variables = append(variables, "$"+v.Name, ".*")
	}
	fill := strings.NewReplacer(variables...)
	queries := make(map[string][]string)
	for _, p := range board.Panels {
		expect.True(t, p.Type == "row" || len(p.Targets) != 0, "panel %q asks for nothing", p.Title)
		for _, target := range p.Targets {
			query := fill.Replace(target.Expr)
			expect.True(t, !strings.Contains(query, "$"),
				"panel %q: a variable that is not defined: %s", p.Title, query)
			queries[p.Title] = append(queries[p.Title], query)
		}
	}
	for _, v := range board.Templating.List {
		if m := regexp.MustCompile(`^label_values\((.*), \w+\)$`).FindStringSubmatch(v.Definition); m != nil {
			queries["variable "+v.Name] = []string{fill.Replace(m[1])}
		}
	}
	must.True(t, len(queries) >= 20, "only %d panels with queries", len(queries))
	return queries
}

// TestDashboardParses has promtool parse every query of the dashboard.
func TestDashboardParses(t *testing.T) {
	type rule struct {
		Record string `yaml:"record"`
		Expr   string `yaml:"expr"`
	}
	var rules []rule
	for _, queries := range dashboardQueries(t) {
		for _, q := range queries {
			rules = append(rules, rule{fmt.Sprintf("query:%d", len(rules)), q})
		}
	}
	group := map[string]any{"name": "dashboard", "rules": rules}
	data := must.Value(yaml.Marshal(map[string]any{"groups": []any{group}}))(t)
	path := filepath.Join(t.TempDir(), "rules.yaml")
	must.NoError(t, os.WriteFile(path, data, 0o600))
	promtool(t, "check", "rules", path)
}

// exposed is what a page of metrics shows: names of series, names of labels (label=), and pairs (label="value").
type exposed map[string]bool

// scrape reads the metrics page of a node.
func scrape(t *testing.T, n *Node) exposed {
	t.Helper()
	_, text := get(t, n, "/metrics")
	page := exposed{}
	for _, line := range regexp.MustCompile(`(?m)^(\w+)(?:\{(.*)\})? `).FindAllStringSubmatch(text, -1) {
		page[line[1]] = true
		for _, m := range matcher.FindAllStringSubmatch(line[2], -1) {
			page[m[1]+"="], page[m[0]] = true, true
		}
	}
	return page
}

// elsewhere is what a node shows only with some settings, or what Prometheus adds itself.
var elsewhere = []string{
	"up", "job=", "instance=", "namespace=", "use=", "reason=", "file=", `result="taken"`, `result="rejected"`,
	`result="over_limit"`, "weir_certificate_expiry_timestamp_seconds", "weir_access_denied_total",
	"weir_security_reloads_total", "weir_security_file_valid", "weir_envoy_configuration_valid", "weir_candidate_total",
	"weir_candidate_disagreements_total", "weir_near_limit_total", "weir_banned_total", "weir_bans_total",
	"weir_envoy_hits_total",
}

var (
	metric   = regexp.MustCompile(`\b(weir_\w+|go_\w+|process_\w+)`)
	matcher  = regexp.MustCompile(`(\w+)(=~|!~|!=|=)("(?:[^"\\]|\\.)*")`)
	grouping = regexp.MustCompile(`\b(?:by|on|ignoring|without)\s*\(([^)]*)\)`)
	word     = regexp.MustCompile(`\w+`)
)

// mistakes says what a query asks for that is not there.
func (page exposed) mistakes(query string) (wrong []string) {
	wanted := metric.FindAllString(query, -1)
	for _, m := range grouping.FindAllStringSubmatch(query, -1) {
		for _, label := range word.FindAllString(m[1], -1) {
			wanted = append(wanted, label+"=")
		}
	}
	for _, m := range matcher.FindAllStringSubmatch(query, -1) {
		if wanted = append(wanted, m[1]+"="); m[2] == "=" {
			wanted = append(wanted, m[0])
		}
	}
	for _, name := range wanted {
		if !page[name] {
			wrong = append(wrong, name)
		}
	}
	return wrong
}

// TestMonitoringAsksForWhatThereIs: every metric and label in an alert or on the dashboard is one that a node shows,
// and the documentation has all of them and no other.
func TestMonitoringAsksForWhatThereIs(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t, "a")
	cfg.Envoy.Dir = envoyDir(t, "domain: edge\n")
	cfg.PolicyFile = testkit.WriteFile(t, "policies.yaml",
		fmt.Sprintf(onePolicy, 5)+"  - {name: kept, limits: [1/1m], persist: true}\n")
	cfg.DataDir = t.TempDir()
	n := mustSettle(t, cfg)
	check(t, n, "alice")
	page := scrape(t, n)
	shown := maps.Clone(page)
	for _, name := range elsewhere {
		page[name] = true
	}
	for _, a := range readAlerts(t) {
		for _, wrong := range page.mistakes(a.Expr) {
			t.Errorf("alert %s: %s", a.Alert, wrong)
		}
	}
	for title, queries := range dashboardQueries(t) {
		for _, q := range queries {
			for _, wrong := range page.mistakes(q) {
				t.Errorf("panel %q: %s", title, wrong)
			}
		}
	}
	doc := readFile(t, monitoringDoc)
	base := regexp.MustCompile(`_(bucket|sum|count)$`)
	for name := range shown {
		if b := base.ReplaceAllString(name, ""); page[b+"_bucket"] {
			name = b
		}
		expect.True(t, !strings.HasPrefix(name, "weir_") || strings.Contains(doc, "`"+name),
			"%s is not in docs/monitoring.md", name)
	}
	for _, name := range regexp.MustCompile(`\bweir_[a-z_]+\b`).FindAllString(doc, -1) {
		expect.True(t, page[name] || page[name+"_bucket"],
			"docs/monitoring.md has %s, which there is not", name)
	}
}

// seen is what a page of the console is told.
type seen struct {
	Roles  []string
	Status struct {
		Node    string
		Members []struct{ Name string }
	}
	Policies struct{ Policies []struct{ Name string } }
	History  struct{ Policies map[string][][6]uint64 }
	Top      map[string]struct {
		Keys []struct{ Policy, Key string }
	}
}

// stream reads events until they end; each call of the function returned is the next one, and false at the end.
func stream(t *testing.T, n *Node, token string) func() (seen, bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	r, err := http.NewRequestWithContext(ctx, "GET", "http://"+addrOf(n.listeners.http)+"/console/events", nil)
	must.NoError(t, err)
	r.Header.Set("Weir-Console", "page")
	if token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	resp := must.Value(http.DefaultClient.Do(r))(t)
	t.Cleanup(func() { resp.Body.Close() })
	if resp.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(resp.Body)
		t.Fatalf("%d %s", resp.StatusCode, body)
	}
	lines := bufio.NewReader(resp.Body)
	return func() (s seen, ok bool) {
		for {
			line, err := lines.ReadString('\n')
			if err != nil {
				return s, false
			}
			if data, ok := strings.CutPrefix(line, "data: "); ok {
				must.NoError(t, json.Unmarshal([]byte(data), &s), "%v", line)
				return s, true
			}
		}
	}
}

// TestConsoleStream: what a caller sees is what its roles let it see at that moment, and the stream ends with its
// rights.
func TestConsoleStream(t *testing.T) {
	t.Parallel()
	reader, all := auth.NewToken(), auth.NewToken()
	access := func(roles string) []byte {
		return fmt.Appendf(nil, `callers:
  - {name: reader, tokens: [%s], roles: [%s]}
  - {name: all, tokens: [%s], roles: [read, check, keys], policies: [login]}
`, auth.Hash(reader), roles, auth.Hash(all))
	}
	cfg := testConfig(t, "node")
	cfg.Security.AccessFile = testkit.WriteFile(t, "access.yaml", string(access("read")))
	n := mustSettle(t, cfg)
	resp, text := send(t, n, "POST", "/v1/check", all, `{"policy":"login","key":"alice"}`)
	must.Equal(t, resp.StatusCode, http.StatusOK, "%v", text)
	next := stream(t, n, all)
	s, ok := next()
	expect.True(t, ok && len(s.Top) == 3 && len(s.Top["busiest"].Keys) == 1 &&
		s.Top["busiest"].Keys[0].Key == "alice" && strings.Join(s.Roles, ",") == "check,read,keys" &&
		s.Status.Node == "node" && len(s.Status.Members) == 1 && len(s.Policies.Policies) == 1 &&
		s.History.Policies["login"][0][0] == 1, "%t %+v", ok, s)
	reads := stream(t, n, reader)
	s, ok = reads()
	expect.True(t, ok && s.Top == nil && strings.Join(s.Roles, ",") == "read", "who may only read sees %t %+v", ok, s)
	must.NoError(t, os.WriteFile(cfg.Security.AccessFile, access("topology"), 0o600))
	n.Reload()
	for until := time.Now().Add(20 * time.Second); ; {
		if _, ok := reads(); !ok {
			break
		}
		must.True(t, !time.Now().After(until), "the stream outlives the role")
	}
	_, ok = next()
	expect.True(t, ok, "the other stream has ended, too")
	stopped := make(chan struct{})
	go func() { defer close(stopped); n.Stop() }()
	for ok := true; ok; {
		_, ok = next()
	}
	<-stopped
}

func TestNoConsole(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t, "node")
	cfg.NoConsole = true
	n := mustStart(t, cfg)
	for _, path := range []string{"/console", "/console/app.js", "/console/events"} {
		status, body := get(t, n, path)
		expect.True(t, status == http.StatusNotFound, "%s: %d %s", path, status, body)
	}
	_, index := get(t, n, "/")
	expect.True(t, !strings.Contains(index, "console"), "the index names it:\n%s", index)
}
