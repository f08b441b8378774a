package clustertest

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// withToken sends requests by a scheme, with a token unless they have one.
type withToken struct {
	http.RoundTripper
	scheme, token string
}

func (w withToken) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	if r.URL.Scheme = w.scheme; r.Header.Get("Authorization") == "" {
		r.Header.Set("Authorization", "Bearer "+w.token)
	}
	return w.RoundTripper.RoundTrip(r)
}

// gatewayLimit is what the policies of gateways under test admit.
const gatewayLimit = 5

// startGuarded starts three nodes that gateways at 127.0.0.1 speak to callers for. It returns the gateways' token.
func startGuarded(t *testing.T) (nodes []*process, token string) {
	t.Helper()
	issue := func() (token, hash string) {
		p := launch(t, "token")
		code := p.exit(stopTimeout)
		_, err := fmt.Sscanf(p.stdout.String(), "token %s\nhash %s", &token, &hash)
		must.True(t, err == nil && code == 0, "weir token: exit status %d, %v", code, err)
		return token, hash
	}
	token, hash := issue()
	operator, operatorHash := issue()
	access := testkit.WriteFile(t, "access.yaml", fmt.Sprintf(
		"callers:\n  - {name: gateway, tokens: [%q], roles: [check], policies: [web]}\n  - {name: operator, tokens: [%q], roles: [check, read], policies: [web]}\n", hash, operatorHash))
	policies := testkit.WriteFile(t, "policies.yaml",
		fmt.Sprintf("policies:\n  - {name: web, algorithm: sliding_log, limit: %d, window: 1h}\n", gatewayLimit))
	for i := range 3 {
		args := []string{"--name", fmt.Sprintf("n%d", i), "--policies", policies, "--access-file", access,
			"--trusted-proxies", "127.0.0.1"}
		if i > 0 {
			args = append(args, "--join", nodes[0].gossip)
		}
		p := startNode(t, args...)
		p.web = &http.Client{Timeout: web.Timeout, Transport: withToken{web.Transport, "http", operator}}
		nodes = append(nodes, p.awaitReady())
	}
	for _, p := range nodes {
		eventually(t, waitTimeout, p.name+" sees all members",
			func() bool { return len(p.status().Members) == len(nodes) })
	}
	return nodes, token
}

// gateway is a program that asks Weir, with an application behind it.
type gateway struct {
	t    *testing.T
	addr string
	app  struct {
		asked  atomic.Int64
		header atomic.Pointer[http.Header]
	}
}

// example is a gateway's in deploy/examples, in a directory that is named like the program.
type example struct {
	program string
	args    []string
	files   []string          // of the example
	more    map[string]string // further files that it needs, by their names
	replace []string          // pairs of texts: what the example says, and what stands for it here
}

// startGateway starts a gateway by its example, with the addresses of nodes and application replaced by those that are
// there. In texts and arguments WORK stands for the directory of its files, ADDR and PORT for where the gateway
// listens, GATEWAY_TOKEN for token.
func startGateway(t *testing.T, nodes []*process, token string, e example) *gateway {
	t.Helper()
	path, err := exec.LookPath(e.program)
	if err != nil {
		t.Skipf("%s is not installed (Debian: apt-get install %s)", e.program, e.program)
	}
	g := &gateway{t: t, addr: freeAddr(t)}
	app := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		g.app.asked.Add(1)
		g.app.header.Store(&r.Header)
		body, _ := io.ReadAll(r.Body) // the test sees what is missing
		fmt.Fprintf(w, "%s %s %s", r.Method, r.URL.Path, body)
	}))
	t.Cleanup(app.Close)
	work := t.TempDir()
	_, port, _ := strings.Cut(g.addr, ":")
	here := strings.NewReplacer("WORK", work, "ADDR", g.addr, "PORT", port, "GATEWAY_TOKEN", token)
	replace := append([]string{"10.0.0.21:9000", strings.TrimPrefix(app.URL, "http://")}, e.replace...)
	for i, p := range nodes {
		replace = append(replace, fmt.Sprintf("10.0.0.1%d:8080", i+1), p.http)
	}
	texts := maps.Clone(e.more)
	if texts == nil {
		texts = make(map[string]string)
	}
	for _, name := range e.files {
		texts[name] = string(must.Value(os.ReadFile(filepath.Join("../../deploy/examples", e.program, name)))(t))
	}
	for i := 0; i < len(replace); i += 2 {
		found := false
		for name, text := range texts {
			found = found || strings.Contains(text, replace[i])
			texts[name] = strings.ReplaceAll(text, replace[i], replace[i+1])
		}
		must.True(t, found, "the example does not say %q", replace[i])
	}
	for name, text := range texts {
		must.NoError(t, os.WriteFile(filepath.Join(work, name), []byte(here.Replace(text)), 0o600))
	}
	var args []string
	for _, arg := range e.args {
		args = append(args, here.Replace(arg))
	}
	var log testkit.Buffer
	cmd := exec.Command(path, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = work, &log, &log
	cmd.Env = append(environment(), "WEIR_TOKEN="+token, "HOME="+work, "XDG_DATA_HOME="+work, "XDG_CONFIG_HOME="+work)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	must.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // with its workers
		_ = cmd.Wait()                                      // killed
		if t.Failed() {
			t.Logf("%s wrote:\n%s", e.program, &log)
		}
	})
	eventually(t, startTimeout, e.program+" to listen", func() bool {
		c, err := net.Dial("tcp", g.addr)
		if err != nil {
			return false
		}
		return c.Close() == nil
	})
	return g
}

// ask sends a request from a loopback address.
func (g *gateway) ask(from, method, path, body string, header ...string) (*http.Response, string) {
	g.t.Helper()
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	client := http.Client{Timeout: web.Timeout, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			return dialer.DialContext(ctx, network, addr)
		},
	}}
	r := must.Value(http.NewRequest(method, "http://"+g.addr+path, strings.NewReader(body)))(g.t)
	r.Host = "app.example.com"
	for i := 0; i < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	resp := must.Value(client.Do(r))(g.t)
	defer resp.Body.Close()
	return resp, string(must.Value(io.ReadAll(resp.Body))(g.t))
}

// conforms sees that a gateway passes on what the limit admits, whole, and answers the rest by 429; that callers are
// told apart by their addresses, whatever they say about themselves; and that nobody but Weir sees the gateway's token.
func (g *gateway) conforms() {
	g.t.Helper()
	for i, from := range []string{"127.0.0.2", "127.0.0.3"} {
		for n := 1; n <= gatewayLimit; n++ {
			// A caller has an Authorization of its own, and tries to be somebody else.
			resp, body := g.ask(from, "POST", "/orders", "a body", "Authorization", "Bearer of-the-caller",
				"Weir-Authorization", "Bearer of-the-caller",
				"X-Forwarded-For", fmt.Sprintf("203.0.113.%d", n), "RateLimit", `"web";r=1000000`)
			must.True(g.t, resp.StatusCode == http.StatusOK && body == "POST /orders a body",
				"request %d of %s: %d %q", n, from, resp.StatusCode, body)
			got, want := resp.Header.Values("RateLimit"), fmt.Sprintf(`"web";r=%d;`, gatewayLimit-n)
			expect.True(g.t, len(got) == 1 && strings.HasPrefix(got[0], want),
				"request %d of %s: RateLimit %q, want %s", n, from, got, want)
			h := *g.app.header.Load()
			expect.True(g.t, h.Get("Authorization") == "Bearer of-the-caller" &&
				!strings.Contains(fmt.Sprint(h["Weir-Authorization"]), "weir_"), "the application was sent %v", h)
		}
		for range 2 {
			resp, body := g.ask(from, "GET", "/orders", "", "X-Forwarded-For", "198.51.100.7")
			expect.True(g.t, resp.StatusCode == http.StatusTooManyRequests && resp.Header.Get("Retry-After") != "" &&
				strings.HasPrefix(resp.Header.Get("RateLimit"), `"web";r=0;`),
				"%s over the limit: %d %v %s", from, resp.StatusCode, resp.Header, body)
			expect.True(g.t, !strings.Contains(body, "web") && !strings.Contains(body, from),
				"names the policy or the key: %s", body)
		}
		got, want := g.app.asked.Load(), int64((i+1)*gatewayLimit)
		expect.True(g.t, got == want, "the application was asked %d times, want %d", got, want)
	}
}

// outlives sees that a gateway asks the other nodes when one is gone, and answers as it is told to when all are.
func (g *gateway) outlives(nodes []*process, status int) {
	g.t.Helper()
	nodes[0].terminate()
	for n := 1; n <= gatewayLimit+1; n++ {
		resp, body := g.ask("127.0.0.4", "GET", "/", "")
		if want := map[bool]int{true: 200, false: 429}[n <= gatewayLimit]; resp.StatusCode != want {
			g.t.Errorf("without a node, request %d: %d %s, want %d", n, resp.StatusCode, body, want)
		}
	}
	nodes[1].terminate()
	nodes[2].terminate()
	resp, body := g.ask("127.0.0.4", "GET", "/", "")
	expect.True(g.t, resp.StatusCode == status, "without any node: %d %s, want %d", resp.StatusCode, body, status)
}

// TestGateways runs the examples of deploy/examples: real gateways before a cluster of three.
func TestGateways(t *testing.T) {
	needsTime(t)
	t.Parallel()
	for _, c := range []struct {
		example
		// the status of an answer when no node is there, and when Weir does not know the gateway
		withoutNodes, withoutToken int
	}{
		{example{
			program: "caddy", files: []string{"Caddyfile"},
			args:    []string{"run", "--config", "WORK/Caddyfile", "--adapter", "caddyfile"},
			replace: []string{":80 {", ":PORT {\n	bind 127.0.0.1"},
		}, http.StatusBadGateway, http.StatusUnauthorized},
		{example{
			program: "nginx", files: []string{"weir.conf"},
			more: map[string]string{
				"nginx.conf": `daemon off; error_log stderr; pid WORK/pid; worker_processes 1; events {}
http {
    access_log off;
    client_body_temp_path WORK/body; proxy_temp_path WORK/proxy; fastcgi_temp_path WORK/fastcgi; uwsgi_temp_path WORK/uwsgi; scgi_temp_path WORK/scgi;
    include weir.conf;
}
`,
				"weir_token.conf": "proxy_set_header Weir-Authorization \"Bearer GATEWAY_TOKEN\";\n",
			},
			args:    []string{"-p", "WORK", "-c", "WORK/nginx.conf", "-e", "stderr"},
			replace: []string{"listen 80;", "listen ADDR;"},
		}, http.StatusOK, http.StatusInternalServerError},
		{example{
			program: "haproxy", files: []string{"haproxy.cfg", "weir.lua"},
			args:    []string{"-db", "-f", "WORK/haproxy.cfg"},
			replace: []string{"bind :80", "bind ADDR", "127.0.0.1:8079", freeAddr(t)},
		}, http.StatusServiceUnavailable, http.StatusInternalServerError},
	} {
		t.Run(c.program, func(t *testing.T) {
			nodes, token := startGuarded(t)
			resp, body := startGateway(t, nodes, "nobodys", c.example).ask("127.0.0.2", "GET", "/", "")
			expect.True(t, resp.StatusCode == c.withoutToken,
				"with a token that is nobody's: %d %s, want %d", resp.StatusCode, body, c.withoutToken)
			g := startGateway(t, nodes, token, c.example)
			g.conforms()
			g.outlives(nodes, c.withoutNodes)
		})
	}
}
