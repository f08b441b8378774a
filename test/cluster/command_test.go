package clustertest

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

const twoPolicies = `
policies:
  - {name: once, algorithm: sliding_log, limit: 1, window: 1h}
  - {name: leases, algorithm: concurrency, limit: 1, ttl: 1m}
`

func TestCommands(t *testing.T) {
	t.Parallel()
	nodes := startCluster(t, 3, "--policies", writeFile(t, "policies.yaml", twoPolicies))
	t.Run("check", func(t *testing.T) { testCheck(t, nodes) })
	t.Run("status", func(t *testing.T) { testStatus(t, nodes) })
}

func testCheck(t *testing.T, nodes []*process) {
	l := must.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	nobody := l.Addr().String()
	l.Close()
	a, b := "--addr="+nodes[0].grpc, "--addr="+nodes[1].grpc
	for _, c := range []struct {
		args string
		code int
		want string // in standard output, or for an error in standard error
	}{
		{"check alice --policy once " + a, 0, "allowed  policy=once granted=1 limit=1 remaining=0"},
		{"check alice --policy once " + b, 1, "refused  policy=once granted=0 limit=1 remaining=0 retry_after="},
		{"check alice --policy once -o json " + b, 1, `"allowed":false`},
		{"check alice --policy once --cost 2 " + b, 1, "retry_after=never"},
		{"check bob --policy once --cost 0 " + b, 0, "granted=0 limit=1 remaining=1"},
		{"check bob --limit 1/1m " + a, 0, "allowed  policy=inline"},
		{"check bob --limit 1/1m --algorithm sliding_log " + b, 1, "refused  policy=inline"},
		{"check bob --limit 2/1m " + b, 0, "remaining=0"}, // the limit has no part in whose state it is
		{"check bob --limit 1/1m --namespace other " + b, 0, "allowed"},

		{"check alice --policy once --addr=" + nobody, 2, "--addr: no node answers gRPC at " + nobody},
		{"check alice --policy once --addr=localhost", 2, "--addr: "},
		{"check alice --policy none " + a, 2, "policy: there is no policy named none"},
		{"check alice --policy leases " + a, 2, "policy: is a concurrency limit"},
		{"check alice --policy once --cost -1 " + a, 2, "cost: is negative"},
		{"check alice --policy once --cost many " + a, 2, "--cost"},
		{"check alice --policy once --sideways " + a, 2, "--sideways"},
		{"check alice " + a, 2, "--policy: "},
		{"check --policy once " + a, 2, "KEY: "},
		{"check alice --limit 5 " + a, 2, "--limit: "},
		{"check alice --limit 0/1m " + a, 2, "limit"},
		{"check alice --limit 5/1m --algorithm guess " + a, 2, "--algorithm: "},
		{"check alice --policy once -o xml " + a, 2, "--output: "},
		{"check alice --policy once --timeout 0s " + a, 2, "--timeout: "},
	} {
		code, stdout, stderr := weir(t, strings.Fields(c.args)...)
		said, other := stdout, stderr
		if c.code == 2 {
			said, other = stderr, stdout
		}
		expect.True(t, code == c.code && strings.Contains(said, c.want) && other == "",
			"weir %s: exit status %d, want %d and %q\nstdout: %s\nstderr: %s", c.args, code, c.code, c.want, stdout, stderr)
	}
}

func testStatus(t *testing.T, nodes []*process) {
	const partitions = 4093
	for _, p := range nodes {
		code, text, stderr := weir(t, "status", "--addr", p.grpc)
		expect.True(t, code == 0 && strings.HasPrefix(text, p.name+" sees 3 members (ready, "),
			"weir status: exit status %d\n%s%s", code, text, stderr)
		// The same as over HTTP, but for what may have changed since. On a busy machine a member may not answer in the half second that a
		// node waits for it.
		var here, there map[string]any
		eventually(t, waitTimeout, "all members to answer "+p.name, func() bool {
			here, there = nil, nil
			code, text, stderr = weir(t, "status", "--addr", p.grpc, "-o", "json")
			resp, err := http.Get("http://" + p.http + "/v1/status")
			must.NoError(t, err)
			err = json.NewDecoder(resp.Body).Decode(&there)
			resp.Body.Close()
			must.NoError(t, errors.Join(err, json.Unmarshal([]byte(text), &here)))
			return allReachable(here) && allReachable(there)
		})
		expect.NoDiff(t, cmp.Diff(steady(there), steady(here)), "weir status -o json and /v1/status (-http +command)")
		var st struct {
			Node       string
			Ready      bool
			Partitions int
			Ring       string
			Members    []struct {
				Name, State, HTTP string
				Partitions        int
				Reachable         bool
			}
		}
		err := json.Unmarshal([]byte(text), &st)
		must.True(t, code == 0 && err == nil, "weir status -o json: exit status %d, %v\n%s%s", code, err, text, stderr)
		expect.True(t, st.Node == p.name && st.Ready && st.Partitions == partitions && len(st.Members) == len(nodes),
			"status of %s: %s", p.name, text)
		sum := 0
		for i, m := range st.Members {
			sum += m.Partitions
			expect.True(t, m.Name == fmt.Sprintf("n%d", i) && m.State == "active" && m.Reachable &&
				m.HTTP == nodes[i].http, "%s shows as member %d: %+v", p.name, i, m)
			expect.True(t, m.Partitions >= partitions*25/100 && m.Partitions <= partitions*42/100,
				"%s shows %d partitions of %s, which is not a fair share", p.name, m.Partitions, m.Name)
		}
		expect.True(t, sum == partitions, "%s shows owners of %d partitions", p.name, sum)
	}
}

func allReachable(status map[string]any) bool {
	return !slices.ContainsFunc(status["members"].([]any), func(m any) bool { return m.(map[string]any)["reachable"] != true })
}

// steady is a status with 0 for every number of a member that changes from one look to the next.
func steady(status map[string]any) map[string]any {
	for _, m := range status["members"].([]any) {
		m := m.(map[string]any)
		for _, of := range []map[string]any{m, m["ownership"].(map[string]any)} {
			for name, value := range of {
				if _, ok := value.(float64); ok && name != "partitions" {
					of[name] = 0
				}
			}
		}
	}
	return status
}

func TestValidate(t *testing.T) {
	good := writeFile(t, "good.yaml", exactPolicies)
	bad := writeFile(t, "bad.yaml", "policies:\n  - name: a\n    algorithm: sliding_log\n    limit: 0\n    window: 1m\n    colour: red\n")
	empty := writeFile(t, "empty.yaml", "")
	for _, c := range []struct {
		args []string
		code int
		want []string // in what it says
	}{
		{[]string{good}, 0, []string{good + ": ok, 4 policies"}},
		{[]string{empty}, 0, []string{empty + ": ok, 0 policies"}},
		{[]string{bad}, 1, []string{bad + ":4:12: policies[0].limit: ", bad + ":6:5: policies[0].colour: "}},
		{[]string{bad, good}, 1, []string{bad + ":4:12: ", good + ": ok"}},
		{[]string{"-o", "json", bad}, 1, []string{`"ok":false`, `"line":4,"column":12`}},
		{[]string{"-o", "json", good}, 0, []string{`{"mistakes":[],"ok":true,"warnings":[]}`}},
		{[]string{good + ".none", bad}, 2, []string{"FILE: ", "good.yaml.none", bad + ":4:12: "}},
		{[]string{}, 2, []string{"FILE: "}},
	} {
		code, stdout, stderr := weir(t, append([]string{"validate"}, c.args...)...)
		expect.True(t, code == c.code && (code == 2) == (stderr != ""),
			"weir validate %v: exit status %d, want %d\nstdout: %s\nstderr: %s", c.args, code, c.code, stdout, stderr)
		for _, want := range c.want {
			expect.True(t, strings.Contains(stdout+stderr, want),
				"weir validate %v does not say %q:\n%s%s", c.args, want, stdout, stderr)
		}
	}
}
