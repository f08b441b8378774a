package cli

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/weirlimit/weir/internal/load"
	"github.com/weirlimit/weir/internal/node"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// runLoad runs weir load.
func runLoad(args ...string) (code int, out, errs string) {
	var o, e strings.Builder
	code = run(append([]string{"load"}, args...), &o, &e)
	return code, o.String(), e.String()
}

// TestLoad: over each protocol and through any node, the checks of all keys are admitted up to the limit and not
// beyond, and the answers are found to be right.
func TestLoad(t *testing.T) {
	a := startReady(t, testConfig(t, "a"))
	cfg := testConfig(t, "b")
	cfg.Join = []string{a.GossipAddr()}
	b := startReady(t, cfg)
	grpc := a.GRPCAddr() + "," + b.GRPCAddr()
	http := a.HTTPAddr() + "," + b.HTTPAddr()
	const keys, limit, checks = 20, 7, 400
	for _, c := range []struct {
		over, addr, rate string
		distribution     load.Distribution
	}{
		{"grpc", grpc, "0", load.Uniform}, {"grpc", grpc, "0", load.Zipf}, {"grpc", grpc, "0", load.Hot},
		{"stream", grpc, "0", load.Uniform},
		{"http", http, "0", load.Uniform}, {"grpc", grpc, "2000", load.Uniform}, {"http", http, "2000", load.Hot},
	} {
		name := c.over + "-" + c.rate + "-" + string(c.distribution)
		code, out, errs := runLoad("--over", c.over, "--addr", c.addr, "--rate", c.rate, "--limit", "7/1h",
			"--namespace", name, "--distribution", string(c.distribution),
			"--keys", "20", "--count", "400", "--for", "1m", "--timeout", "20s", "--concurrency", "16", "-o", "json")
		var r load.Result
		if err := json.Unmarshal([]byte(out), &r); err != nil || code != exitOK || errs != "" {
			t.Fatalf("%s: exit status %d, %v: %s %s", name, code, err, out, errs)
		}
		expect.True(t, r.Checks == checks && r.Admitted+r.Refused == checks &&
			r.FailedOpen+r.FailedClosed+r.Errors+r.Unsent == 0 && r.Admitted <= keys*limit, "%s: %s", name, out)
		// Each key is asked for more often than it has units, but for the rare ones of Zipf.
		expect.True(t, c.distribution != load.Uniform || r.Admitted == keys*limit,
			"%s: admitted %d, want %d", name, r.Admitted, keys*limit)
		v := r.Verdict
		expect.True(t, v != nil && v.Holds && v.Most == limit && v.Units == limit && r.Latency.P50 > 0 &&
			r.Latency.Max >= r.Latency.P99, "%s: %s", name, out)
	}
}

// TestLoadOverRESP: the Redis protocol takes policies.
func TestLoadOverRESP(t *testing.T) {
	n, shop, _ := startSecured(t, func(cfg *node.Config) { cfg.RESPPort = node.PortAny })
	args := []string{"--over", "resp", "--addr", n.RESPAddr(), "--policy", "login", "--at-most", "5/1m", "--keys", "4",
		"--count", "200", "--concurrency", "8", "--timeout", "20s", "-o", "json"}
	code, out, errs := runLoad(append(args, "--token-file", testkit.WriteFile(t, "token", shop))...)
	var r load.Result
	err := json.Unmarshal([]byte(out), &r)
	expect.True(t, err == nil && code == exitOK && r.Checks == 200 && r.Admitted == 20 && r.Refused == 180 &&
		r.Verdict.Holds && r.Verdict.Most == 5, "%d, %v: %s%s", code, err, out, errs)
	code, _, errs = runLoad(args...)
	expect.True(t, code == exitError && strings.Contains(errs, "200 of 200 checks got no decision; the first: NOAUTH"),
		"without a token: %d %s", code, errs)
}

// TestLoadFindsExcess: what is more than was said ends with status 1, in words too.
func TestLoadFindsExcess(t *testing.T) {
	n := startReady(t, testConfig(t, "a"))
	grpc := n.GRPCAddr()
	code, out, errs := runLoad("--addr", grpc, "--policy", "login", "--at-most", "4/1h", "--keys", "1", "--count", "20",
		"--key-prefix", "x-", "--timeout", "20s")
	expect.True(t, code == exitNegative && strings.Contains(out,
		`FAILED: "x-1" was admitted 5 units within 1h0m0s, more than 4`) && errs == "", "%d: %s%s", code, out, errs)
	code, out, errs = runLoad("--addr", grpc, "--policy", "login", "--at-most", "5/1m", "--keys", "1", "--count", "20",
		"--key-prefix", "y-", "--timeout", "20s")
	expect.True(t, code == exitOK && strings.Contains(out,
		"checked: no key was admitted more than 5 units in any 1m0s; the most was 5") && errs == "",
		"%d: %s%s", code, out, errs)
	code, out, errs = runLoad("--addr", grpc, "--policy", "login", "--count", "20", "--timeout", "20s")
	expect.True(t, code == exitOK && strings.Contains(out,
		// learned from the node
		"checked: no key was admitted more than 10 units in any 1m0s") && errs == "", "%d: %s%s", code, out, errs)
}

// TestLoadWithTokens: a cluster with an access file, with the right token, another one and none.
func TestLoadWithTokens(t *testing.T) {
	n, shop, all := startSecured(t, nil)
	for over, addr := range map[string]string{"grpc": n.GRPCAddr(), "stream": n.GRPCAddr(), "http": n.HTTPAddr()} {
		args := []string{"--over", over, "--addr", addr, "--limit", "1/1h", "--count", "5", "--keys", "5", "--timeout",
			"20s", "--namespace", over}
		code, out, errs := runLoad(append(args, "--token-file", testkit.WriteFile(t, "token", all))...)
		expect.True(t, code == exitOK, "%s: %d %s %s", over, code, out, errs)
		for _, more := range [][]string{nil, {"--token-file", testkit.WriteFile(t, "token", shop)}} {
			code, out, errs := runLoad(append(args, more...)...)
			expect.True(t, code == exitError && strings.Contains(errs, "5 of 5 checks got no decision"),
				"%s %v: %d %s %s", over, more, code, out, errs)
		}
	}
}

// TestLoadBound: what a limit that is sent along lets through in any window of its length, by its algorithm.
func TestLoadBound(t *testing.T) {
	for algorithm, want := range map[string]int64{
		"sliding_log": 5, "sliding_window": 5, "fixed_window": 10, "sliding_counter": 10, "token_bucket": 10,
		"leaky_bucket": 10,
	} {
		f := loadFlags{}
		fs := pflag.NewFlagSet("load", pflag.ContinueOnError)
		registerSettings(fs, &f.targetFlags)
		must.NoError(t, fs.Parse([]string{"--limit", "5/1m", "--algorithm", algorithm}))
		inline := must.Value(f.inline(newLoad().Flags()))(t)
		if b, err := f.bound(inline); err != nil || *b != (load.Bound{Units: want, Window: time.Minute}) {
			t.Errorf("%s: %+v, %v", algorithm, b, err)
		}
		f.atMost = "7/1h"
		b, err := f.bound(inline)
		expect.True(t, err == nil && *b == (load.Bound{Units: 7, Window: time.Hour}), "%s: %+v, %v", algorithm, b, err)
	}
}

func TestLoadErrors(t *testing.T) {
	for want, args := range map[string][]string{
		"--policy: name a policy":               nil,
		"--limit: goes without --policy":        {"--policy", "login", "--limit", "5/1m"},
		"--algorithm: goes with --limit":        {"--policy", "login", "--algorithm", "token_bucket"},
		"--algorithm: concurrency takes leases": {"--limit", "5/1m", "--algorithm", "concurrency"},
		"--limit: ":                             {"--limit", "5"},
		"--at-most: ":                           {"--limit", "5/1m", "--at-most", "x"},
		"--output: ":                            {"--limit", "5/1m", "-o", "xml"},
		"--over: ":                              {"--limit", "5/1m", "--over", "smoke"},
		"--over: resp":                          {"--limit", "5/1m", "--over", "resp"},
		"--addr: ":                              {"--limit", "5/1m", "--addr", "here"},
		`invalid argument "0" for "--connections" flag: "0" is not a `: {"--limit", "5/1m", "--connections", "0"},
		`invalid argument "2h" for "--for" flag: "2h" is not a `:       {"--limit", "5/1m", "--for", "2h"},
		`invalid argument "0" for "--count" flag: "0" is not a `:       {"--limit", "5/1m", "--count", "0"},
		"--rate: ": {"--limit", "5/1m", "--rate", "-1"},
		`invalid argument "100000" for "--concurrency" flag: "100000" is not a `: {"--limit", "5/1m", "--concurrency", "100000"},
		`invalid argument "0" for "--keys" flag: "0" is not a `:                  {"--limit", "5/1m", "--keys", "0"},
		"--distribution: ": {"--limit", "5/1m", "--distribution", "even"},
		"--skew: ":         {"--limit", "5/1m", "--distribution", "zipf", "--skew", "1"},
		`invalid argument "0" for "--cost" flag: "0" is not a `:      {"--limit", "5/1m", "--cost", "0"},
		`invalid argument "0s" for "--timeout" flag: "0s" is not a `: {"--limit", "5/1m", "--timeout", "0s"},
		"--tls-ca-file: ": {"--limit", "5/1m", "--tls-ca-file", "missing"},
		"--token-file: ":  {"--limit", "5/1m", "--token-file", "missing"},
		"3 of 3 checks got no decision; the first": {"--limit", "5/1m", "--addr", "127.0.0.1:1",
			"--count", "3"},
		"3 of 3 checks got no decision; the first: no node answered": {"--limit", "5/1m", "--addr", "127.0.0.1:1",
			"--count", "3", "--over", "stream"},
	} {
		if code, _, errs := runLoad(args...); code != exitError || !strings.HasPrefix(errs, "weir: "+want) {
			t.Errorf("%v: %d %s, want %s", args, code, errs, want)
		}
	}
}

func TestSimulate(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		must.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	policies := file("p.yaml",
		"policies:\n  - {name: log, algorithm: sliding_log, limit: 2, window: 10s}\n  - {name: leases, algorithm: concurrency, limit: 2, ttl: 10s}\n")
	none := file("none.yaml", "policies: [{name: leases, algorithm: concurrency, limit: 2, ttl: 10s}]\n")
	wrong := file("wrong.yaml", "policies: [{name: log, algorithm: sliding_log, limit: 0, window: 10s}]\n")
	log := file("log.csv", "time,key\n1,a\n2,a\n3,a\nx\n10.5,b\n11,a\n")
	html := filepath.Join(dir, "report.html")

	var out, errs strings.Builder
	must.Equal(t, run([]string{"simulate", "--input", log, "--policies", policies, "--html", html, "--suggest",
		"callers=0%"}, &out, &errs), exitOK, "exit status: %s", &errs)
	for _, want := range []string{"5 requests of 2 keys", "malformed lines, left out: 1", "line 5 ", "log", "2 per 10s",
		"1 (20 %)", "3 (callers 0 %, requests 0 %)"} {
		expect.True(t, strings.Contains(out.String(), want), "the table lacks %q:\n%s", want, &out)
	}
	expect.True(t, strings.Contains(errs.String(), `"leases" is a concurrency limit and left out`),
		"on standard error: %s", &errs)
	page, err := os.ReadFile(html)
	expect.True(t, err == nil && strings.Contains(string(page), "<title>Weir: "), "%v: %.80s", err, page)
	out.Reset()
	if code := run([]string{"simulate", "--generate", "burst", "--rate", "1", "--for", "2m", "--policies", policies,
		"-o", "json"}, &out, &errs); code != exitOK || !strings.HasPrefix(out.String(), `{"events":90,`) {
		t.Errorf("%d: %.200s %s", code, &out, &errs)
	}

	for want, args := range map[string][]string{
		"--policies: name the file":               {"--input", log},
		"--input: give either":                    {"--policies", policies},
		"--input: give either a file":             {"--policies", policies, "--input", log, "--generate", "steady"},
		"--output: ":                              {"--policies", policies, "--input", log, "-o", "xml"},
		"--policies: " + wrong + ":1:":            {"--policies", wrong, "--input", log},
		"--policies: " + none + " has no policy":  {"--policies", none, "--input", log},
		`--policy: there is no policy "x"`:        {"--policies", policies, "--input", log, "--policy", "x"},
		`policy "leases": is a concurrency limit`: {"--policies", policies, "--input", log, "--policy", "leases"},
		"--input: open ": {"--policies", policies, "--input",
			filepath.Join(dir, "missing")},
		`--input: ` + log + `: format "x"`: {"--policies", policies, "--input", log, "--format", "x"},
		"--key-regexp: ":                   {"--policies", policies, "--input", log, "--key-regexp", "("},
		"--suggest: ": {"--policies", policies, "--input", log, "--suggest",
			"everybody"},
		`--suggest: "2" is not a share`: {"--policies", policies, "--input", log, "--suggest",
			"callers=2"},
		`--generate: pattern "x"`: {"--policies", policies, "--generate", "x"},
		"--generate: rate":        {"--policies", policies, "--generate", "steady", "--rate", "0"},
		"--html: ": {"--policies", policies, "--input", log, "--html",
			filepath.Join(dir, "no", "x")},
		"--input: " + none + ".gz: not in the gzip f": {"--policies", policies, "--input", file("none.yaml.gz", "x")},
	} {
		var out, errs strings.Builder
		code := run(append([]string{"simulate"}, args...), &out, &errs)
		expect.True(t, code == exitError && strings.Contains(errs.String(), want),
			"%v: exit status %d, %q; want %q", args, code, &errs, want)
	}
}

var updateExamples = flag.Bool("update-examples", false, "write what the examples of docs/ say")

// The report and the table in the documentation are what its command makes.
func TestSimulateExample(t *testing.T) {
	const doc, example = "../../docs/simulate.md", "../../docs/examples/simulate.html"
	html := filepath.Join(t.TempDir(), "simulate.html")
	var out, errs strings.Builder
	args := []string{"simulate", "--generate", "burst", "--rate", "10", "--keys", "1", "--for", "5m",
		"--policies", "../../docs/examples/candidates.yaml", "--html", html}
	must.Equal(t, run(args, &out, &errs), exitOK, "exit status: %s", &errs)
	page := must.Value(os.ReadFile(html))(t)
	if *updateExamples {
		must.NoError(t, os.WriteFile(example, page, 0o644))
	}
	if was, err := os.ReadFile(example); err != nil || !bytes.Equal(was, page) {
		t.Errorf("%s is not what the command of %s makes (%v): run this test with -update-examples", example, doc, err)
	}
	text, err := os.ReadFile(doc)
	expect.True(t, err == nil && strings.Contains(string(text), "```\n"+out.String()+"```"),
		"%s does not show the table of its command (%v):\n%s", doc, err, &out)
	command := "weir simulate --generate burst --rate 10 --keys 1 --for 5m --policies docs/examples/candidates.yaml"
	expect.True(t, strings.Contains(string(text), command), "%s does not give the command %q", doc, command)
}
