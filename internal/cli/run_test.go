package cli

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/weirlimit/weir/internal/node"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// TestBadCommandLines: every mistake ends with exit status 2 and one message that names what is to blame, and nothing
// is printed where a result would be.
func TestBadCommandLines(t *testing.T) {
	t.Setenv("WEIR_LOG_LEVEL", "error")
	policies := testkit.WriteFile(t, "policies.yaml",
		"policies:\n  - {name: a, algorithm: sliding_log, limit: 0, window: 1m}\n")
	strict := testkit.WriteFile(t, "strict.yaml", strictPolicy)
	config := testkit.WriteFile(t, "weir.yaml", "timeout: soon\n")
	for _, c := range []struct {
		args string
		want string // at the beginning of the message, or after …
	}{
		{"nonsense", `unknown command "nonsense"`},
		{"chek", "unknown command \"chek\" for \"weir\"\n\nDid you mean this?\n\tcheck"},
		{"override lisst", `unknown command "lisst" for "weir override"`},
		{"check a --policy p -o id", `--output: "id"`},
		{"--sideways", "unknown flag: --sideways"},
		{"run now", `unknown command "now"`},
		{"run --http-port", "flag needs an argument: --http-port"},
		{"run --http-port x", `…"--http-port" flag: "x" is not a port`},
		{"run --peer-port 1.5", `…"--peer-port" flag: "1.5" is not a port`},
		{"run --bind localhost", "--bind: "},
		{"run --name a/b", "--name: "},
		{"run --advertise 127.0.0.1:80", "--advertise: "},
		{"run --join somewhere", "--join: "},
		{"run --join a:1 --gossip-port=", "--join: "},
		{"run --unknown-policy maybe", `--unknown-policy: "maybe" is not one of`},
		{"run --max-keys many", `…"--max-keys" flag: "many" is not`},
		{"run --max-members 10001", `…"--max-members" flag: "10001" is not`},
		{"run --write-timeout 1ms", `…"--write-timeout" flag: `},
		{"run --inline-max-window -1s", `…"--inline-max-window" flag: "-1s" is not a time`},
		{"run --timeout 0s", `…"--timeout" flag: "0s" is not a time`},
		{"run --otlp-endpoint collector:4317", "--otlp-endpoint: is not http://HOST:PORT"},
		{"run --otlp-endpoint http://collector:4317 --trace-sample 2", "--trace-sample: 2 is not a share"},
		{"run --trace-caller-rate -1", "--trace-caller-rate: -1 is not a number of calls"},
		{"run --trace-sample 0.1", "--trace-sample: needs a collector"},
		{"run --log-format xml", `--log-format: "xml" is not one of`},
		{"run --config /none", "--config: "},
		{"run --config " + config, "--config: " + config + ":1:10: timeout: "},
		{"run --gossip-key-file /none", "--gossip-key-file: "},
		{"run --gossip-key-file " + config, "--gossip-key-file: " + config + ":1: "},
		{"run --tls-cert-file /none", "--tls-cert-file: goes with tls-key-file"},
		{"run --tls-client-ca-file /none", "--tls-client-ca-file: callers present certificates over TLS only"},
		{"run --peer-tls-name x", "--peer-tls-name: goes with peer-tls-cert-file"},
		{"run --tls-cert-file /none --tls-key-file /none", "--tls-cert-file, --tls-key-file: open /none"},
		{"check a --policy p --tls-cert-file /none", "--tls-cert-file: goes with tls-key-file: give both"},
		{"check a --policy p --tls-ca-file /none", "--tls-ca-file: open /none"},
		{"run --cluster-secret-file /none", "--cluster-secret-file: "},
		{"run --cluster-secret-file " + config, "--cluster-secret-file: " + config + " holds 13 bytes"},
		{"run --policies /none", "--policies: "},
		{"run --policies " + policies, "--policies: " + policies + ":2:46: policies[0].limit: "},
		{"run --envoy-config /none", "--envoy-config: "},
		{"run --voters a,b", "--voters: 2 voters are given"},
		{"run --voters a --gossip-port= --name b", "--voters: a node without gossip"},
		{"run --policies " + strict, "--policies: " + strict + ":2:92: policies[0].consistency: strict needs voters"},
		{"dev --policies " + policies, "--policies: " + policies + ":2:46: "},
		{"help nope", `unknown command "nope" for "weir"`},
		{"completion nope", `unknown command "nope" for "weir completion"`},
		{"secrets", "DIRECTORY: is missing"},
		{"override set login alice", "SETTINGS: is missing"},
		{"override delete login alice {}", `argument "{}": is one too many`},
		{"gossip-keys use", "ID: is missing"},
		{"dev --nodes 10", `…"--nodes" flag: "10" is not`},
		{"check", "KEY: "},
		{"check a b --policy p", `argument "b": is one too many`},
		{"check a", "--policy: "},
		{"check a --policy p --limit 5/1m", "--limit: "},
		{"check a --policy p --algorithm sliding_log", "--algorithm: "},
		{"check a --limit 5/1m --algorithm guess", `--algorithm: "guess"`},
		{"check a --limit 5", "--limit: "},
		{"check a --policy p --cost 1.5", `…"--cost"`},
		{"check a --policy p --addr localhost", `--addr: "localhost" is not HOST:PORT`},
		{"check a --policy p --addr 127.0.0.1:1 --timeout 5s", "--addr: no node answers gRPC at 127.0.0.1:1"},
		{"check a --policy p -o xml", `--output: "xml"`},
		{"status now", `argument "now": is one too many`},
		{"status --addr 127.0.0.1:1 --timeout 5s", "--addr: no node answers gRPC at 127.0.0.1:1"},
		{"validate", "FILE: "},
		{"validate /none", "FILE: "},
	} {
		var stdout, stderr bytes.Buffer
		code := run(strings.Fields(c.args), &stdout, &stderr)
		message, isMessage := strings.CutPrefix(stderr.String(), "weir: ")
		found := strings.HasPrefix(message, c.want)
		if inside, ok := strings.CutPrefix(c.want, "…"); ok {
			found = strings.Contains(message, inside)
		}
		expect.True(t, code == exitError && isMessage && found,
			"weir %s: exit status %d, want %q\n%s", c.args, code, c.want, &stderr)
		expect.True(t, stdout.Len() == 0, "weir %s: printed\n%s", c.args, &stdout)
	}
}

func TestHelpAndVersion(t *testing.T) {
	for args, want := range map[string]string{
		"": "weir dev", "--help": "weir dev", "help run": "--http-port", "--version": "weir version ",
		"version": " (commit ", "run --help": "WEIR_HTTP_PORT",
	} {
		var stdout, stderr bytes.Buffer
		code := run(strings.Fields(args), &stdout, &stderr)
		expect.True(t, code == exitOK && strings.Contains(stdout.String(), want) && stderr.Len() == 0,
			"weir %s: exit status %d, want %q\n%s%s", args, code, want, &stdout, &stderr)
	}
}

const strictPolicy = "policies:\n  - {name: a, algorithm: sliding_log, limit: 1, window: 1m, durability: sync, consistency: strict}\n"

func TestValidate(t *testing.T) {
	strict := testkit.WriteFile(t, "strict.yaml", strictPolicy)
	const warns = ":2:92: policies[0].consistency: strict needs voters: give all nodes the same voters, or use available\n"
	good := testkit.WriteFile(t, "good.yaml",
		"policies:\n  - {name: a, algorithm: sliding_log, limit: 1, window: 1m}\n")
	edge := testkit.WriteFile(t, "edge.yaml", `domain: edge
descriptors:
  - key: user
    rate_limit: {unit: year, requests_per_unit: 10}
  - key: login
    rate_limit: {policy: login}
`)
	again := testkit.WriteFile(t, "again.yaml", "domain: edge\ndescriptors: [{key: user}]\n")
	foreign := testkit.WriteFile(t, "limitador.yaml",
		"- {namespace: shop/eu, max_value: 10, seconds: 60, conditions: [\"method == 'GET'\"], variables: [user]}\n")
	twice := testkit.WriteFile(t, "twice.yaml",
		"- {namespace: n, max_value: 10, seconds: 60, variables: [a_b, c]}\n- {namespace: n, max_value: 10, seconds: 60, variables: [a, b_c]}\n- {namespace: n, max_value: 10, seconds: 60, variables: [x, y]}\n- {namespace: n, max_value: 10, seconds: 60, variables: [x], conditions: [\"x == 'size'\", \"z != 7\"]}\n")
	into := t.TempDir()
	bad := testkit.WriteFile(t, "bad.yaml", "policies:\n  - {name: a, algorithm: sliding_log, limit: 0, window: 1m}\n")
	for _, c := range []struct {
		args []string
		code int
		want string // in standard output
		warn string // standard error, but for errors
	}{
		{[]string{good}, exitOK, good + ": ok, 1 policy\n", ""},
		{[]string{bad, good}, exitNegative, bad + ":2:46: policies[0].limit: ", ""},
		{[]string{bad, "/none", good}, exitError, bad + ":2:46: policies[0].limit: ", ""},
		{[]string{"-o", "json", good}, exitOK, `{"mistakes":[],"ok":true,"warnings":[]}` + "\n", ""},
		{[]string{"-o", "json", bad}, exitNegative, `"line":2,"column":46,"field":"policies[0].limit"`, ""},
		{[]string{"-o", "json", good, "/none"}, exitError, `{"mistakes":[],"ok":false,"warnings":[]}` + "\n", ""},
		{[]string{strict}, exitOK, strict + ": ok, 1 policy\n", "warning: " + strict + warns},
		{[]string{"-o", "json", strict}, exitOK, `"ok":true,"warnings":[{"file":"` + strict +
			`","line":2,"column":92,"field":"policies[0].consistency","message":"strict needs voters`,
			"warning: " + strict + warns},
		{[]string{bad, strict}, exitNegative, bad + ":2:46: ", "warning: " + strict + warns},
		{[]string{edge}, exitOK, edge + ": ok, 2 limits of 1 domain for Envoy\n", ""},
		{[]string{filepath.Dir(edge), good}, exitOK, edge + ": ok, 2 limits of 1 domain for Envoy\n", ""},
		{[]string{edge, good, again}, exitNegative, again + ":1:9: domain: is the domain of " + edge, ""},
		{[]string{"--envoy-merge-domains", edge, again}, exitNegative,
			again + ":2:21: descriptors[0]: is the second descriptor of the composite key", ""},
		{[]string{foreign}, exitOK, foreign + ": ok, 1 limit of 1 namespace of Limitador\n", ""},
		{[]string{twice}, exitNegative, twice + ":4:90: [3].conditions[1]: is not understood", ""},
		{[]string{"--convert", into, foreign}, exitOK, foreign + ": ok", ""},
		{[]string{filepath.Join(into, "shop_eu.yaml")}, exitOK, "ok, 1 limit of 1 domain for Envoy\n", ""},
		{[]string{"--convert", into, foreign}, exitError, "", ""}, // it is there already
		{[]string{"-o", "json", again}, exitOK, `{"mistakes":[],"ok":true,"warnings":[]}` + "\n", ""},
	} {
		var stdout, stderr bytes.Buffer
		code := run(append([]string{"validate"}, c.args...), &stdout, &stderr)
		expect.True(t, code == c.code && strings.Contains(stdout.String(), c.want) &&
			(code == exitError) == strings.HasPrefix(stderr.String(), "weir: ") &&
			(code == exitError || stderr.String() == c.warn),
			"weir validate %v: exit status %d, want %d and %q\n%s%s", c.args, code, c.code, c.want, &stdout, &stderr)
	}
}

// TestFlagsAreDocumented: an operator finds every flag of a node in the pages about running one.
func TestFlagsAreDocumented(t *testing.T) {
	var text []byte
	for _, page := range []string{"operating.md", "security.md"} {
		data := must.Value(os.ReadFile(filepath.Join("../../docs", page)))(t)
		text = append(text, data...)
	}
	newRun().Flags().VisitAll(func(f *pflag.Flag) {
		if strings.HasSuffix(f.Usage, "(not supported by this build yet)") {
			return
		}
		expect.True(t, regexp.MustCompile("--"+f.Name+`[^-\w]`).Match(text),
			"neither docs/operating.md nor docs/security.md names --%s", f.Name)
	})
}

// TestFlagsOfLimits: flags that are not given leave the bounds to the node, and 0 is what the flag says it is.
func TestFlagsOfLimits(t *testing.T) {
	said := func(args ...string) node.Config {
		var f runFlags
		fs := pflag.NewFlagSet("run", pflag.ContinueOnError)
		registerSettings(fs, &f)
		must.NoError(t, fs.Parse(args))
		return must.Value(f.nodeConfig(io.Discard))(t)
	}
	want := node.Limits{MaxConnectionAge: time.Hour, IdleTimeout: 10 * time.Minute, MaxHeaderSize: 32 << 10,
		FirstMessageTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second}
	expect.Equal(t, said().Limits, want, "flags say")
	none := said("--max-connections=0", "--max-connection-age=0", "--idle-timeout=0", "--max-keys=0", "--max-memory=0",
		"--max-request-ids=0",
		"--max-reservations=0", "--max-key-reservations=0", "--inline-max-window=0", "--inline-max-keys=0",
		"--http-port=0", "--grpc-port=")
	l := none.Limits
	expect.True(t, l.MaxConnections == -1 && l.MaxConnectionAge == -1 && l.IdleTimeout == -1 && none.MaxKeys == -1 &&
		none.MaxMemory == -1 && none.MaxRequestIDs == -1 && none.MaxReservations == -1 &&
		none.MaxKeyReservations == -1 && none.InlineMaxWindow == -1 && none.InlineMaxKeys == 0 &&
		none.HTTPPort == node.PortAny && none.GRPCPort == node.PortOff, "flags of 0 say %+v", none)
}
