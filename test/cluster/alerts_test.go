package clustertest

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// prometheus is a running Prometheus server.
type prometheus struct {
	t    *testing.T
	addr string
}

// startPrometheus starts a Prometheus that scrapes nodes and has the alerts of deploy/monitoring, a second for each of
// their minutes and 24 s for their hour, so that what takes minutes to fire does so in a moment.
func startPrometheus(t *testing.T, nodes ...*process) *prometheus {
	t.Helper()
	server, err := exec.LookPath("prometheus")
	if err != nil {
		t.Skip("prometheus is not installed (Debian: apt-get install prometheus)")
	}
	rules := must.Value(os.ReadFile("../../deploy/monitoring/alerts.yaml"))(t)
	rules = regexp.MustCompile(`(?m)^( +for: )\d+m$`).ReplaceAll(rules, []byte("${1}1s"))
	rules = regexp.MustCompile(`\[5m\]`).ReplaceAll(rules, []byte("[2s]"))
	rules = regexp.MustCompile(`\[1h\]`).ReplaceAll(rules, []byte("[24s]"))
	targets := ""
	for _, n := range nodes {
		targets += fmt.Sprintf("%q,", n.http)
	}
	config := fmt.Sprintf(`
global: {scrape_interval: 200ms, scrape_timeout: 200ms, evaluation_interval: 200ms}
rule_files: [%s]
scrape_configs:
  - job_name: weir
    static_configs: [{targets: [%s]}]
`, testkit.WriteFile(t, "alerts.yaml", string(rules)), targets)
	p := &prometheus{t: t, addr: freeAddr(t)}
	launchWith(t, nil, server, "--config.file="+testkit.WriteFile(t, "prometheus.yml", config),
		"--web.listen-address="+p.addr, "--storage.tsdb.path="+filepath.Join(t.TempDir(), "data"), "--log.level=warn")
	eventually(t, startTimeout, "prometheus to scrape all nodes", func() bool {
		return p.query("count(up == 1)") == fmt.Sprint(len(nodes))
	})
	return p
}

// freeAddr is a loopback address that nobody listens on at the moment.
func freeAddr(t *testing.T) string {
	t.Helper()
	l := must.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer l.Close()
	return l.Addr().String()
}

// ask reads the answer of Prometheus' API, unless it is not there yet.
func (p *prometheus) ask(path string, answer any) bool {
	p.t.Helper()
	resp, err := web.Get("http://" + p.addr + "/api/v1/" + path)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return false
	}
	must.NoError(p.t, json.NewDecoder(resp.Body).Decode(answer), "prometheus: %s", path)
	return true
}

// query returns the value of a query with one result, or nothing.
func (p *prometheus) query(expr string) string {
	p.t.Helper()
	var answer struct {
		Data struct {
			Result []struct{ Value [2]any }
		}
	}
	if !p.ask("query?query="+url.QueryEscape(expr), &answer) || len(answer.Data.Result) != 1 {
		return ""
	}
	return answer.Data.Result[0].Value[1].(string)
}

// firing reports whether an alert fires with the given label.
func (p *prometheus) firing(name, label, value string) bool {
	p.t.Helper()
	var answer struct {
		Data struct {
			Alerts []struct {
				State  string
				Labels map[string]string
			}
		}
	}
	if !p.ask("alerts", &answer) {
		return false
	}
	for _, a := range answer.Data.Alerts {
		if a.State == "firing" && a.Labels["alertname"] == name && a.Labels[label] == value {
			return true
		}
	}
	return false
}

// TestAlertsFire has a real Prometheus watch real nodes: alerts fire while there is a reason, and end with it.
func TestAlertsFire(t *testing.T) {
	needsTime(t)
	t.Parallel()
	nodes := startCluster(t, 2, "--policies", testkit.WriteFile(t, "policies.yaml", `
policies:
  - {name: login, algorithm: sliding_log, limit: 10, window: 1h}
  - {name: quiet, algorithm: sliding_log, limit: 1000000, window: 1h}
`))
	p := startPrometheus(t, nodes...)
	expect.True(t, !p.firing("HighWindowUtilization", "policy", "login") &&
		!p.firing("WeirRejectedSurge", "policy", "login"), "alerts fire for no reason")

	// One key far beyond its limit, another far below, through both nodes.
	ctx, stop := context.WithCancel(t.Context())
	var callers sync.WaitGroup
	defer callers.Wait()
	defer stop()
	for _, n := range nodes {
		callers.Go(func() {
			tick := time.NewTicker(20 * time.Millisecond)
			defer tick.Stop()
			for ctx.Err() == nil {
				for _, policy := range []string{"login", "quiet"} {
					if _, err := n.check(fmt.Sprintf(`{"policy":%q,"key":"alice"}`, policy)); err != nil {
						t.Error(err)
						return
					}
				}
				select {
				case <-tick.C:
				case <-ctx.Done():
				}
			}
		})
	}
	for _, alert := range []string{"HighWindowUtilization", "WeirRejectedSurge"} {
		eventually(t, waitTimeout, alert+" fires", func() bool { return p.firing(alert, "policy", "login") })
		expect.True(t, !p.firing(alert, "policy", "quiet"), "%s fires for a policy far from its limit", alert)
	}
	stop()
	callers.Wait()
	for _, alert := range []string{"HighWindowUtilization", "WeirRejectedSurge"} {
		eventually(t, waitTimeout, alert+" ends", func() bool { return !p.firing(alert, "policy", "login") })
	}

	lost := nodes[1].http
	nodes[1].signal(syscall.SIGKILL)
	nodes[1].exit(stopTimeout)
	eventually(t, waitTimeout, "WeirNodeDown fires", func() bool { return p.firing("WeirNodeDown", "instance", lost) })
	expect.True(t, !p.firing("WeirNodeDown", "instance", nodes[0].http), "WeirNodeDown fires for the node that is up")
}
