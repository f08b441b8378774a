package cli

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/weirlimit/weir/gateway/envoy"
	"github.com/weirlimit/weir/internal/node"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

const limits = `---
- namespace: test_namespace
  max_value: 10
  seconds: 60
  conditions:
    - "descriptors[0]['req.method'] == 'GET'"
    - "descriptors[0]['req.path'] != '/json'"
  variables: []
- namespace: test_namespace
  name: json
  max_value: 50000
  seconds: 10
  conditions:
    - "descriptors[0]['req.method'] == 'GET'"
    - descriptors[0]["req.path"] == "/json"
- namespace: test_namespace
  max_value: 3
  seconds: 3600
  conditions: ["req.method == 'POST'", "req.path != '/json'"]
  variables: [user_id]
- namespace: other
  max_value: 0
  seconds: 1
  variables: ["descriptors[0].app"]
`

const converted = `domain: test_namespace
charge: all_or_none
descriptors:
    - key: req.method
      value: GET
      descriptors:
        - key: req.path
          value: /json
          rate_limit:
            name: json
            unit: second
            unit_multiplier: 10
            requests_per_unit: 50000
        - key: req.path
          value: '*'
          share_threshold: true
          rate_limit:
            unit: minute
            requests_per_unit: 10
    - key: req.method
      value: POST
      descriptors:
        - key: req.path
          value: /json
          rate_limit:
            unlimited: true
        - key: req.path
          value: '*'
          share_threshold: true
          descriptors:
            - key: user_id
              rate_limit:
                unit: hour
                requests_per_unit: 3
`

// TestConvertLimitador: what is written is what gateway/envoy takes.
func TestConvertLimitador(t *testing.T) {
	expect.True(t, looksLikeLimitador([]byte(limits)) && !looksLikeLimitador([]byte("policies: []")) &&
		!looksLikeLimitador(nil), "files are not told apart")
	f := must.Value(parseLimitador("limits.yaml", []byte(limits)))(t)
	expect.True(t, f.Limits == 4 && len(f.Namespaces) == 2 && f.Namespaces[1].FileName() == "other.yaml", "%+v", f)
	var files []envoy.File
	for i := range f.Namespaces {
		text := must.Value(f.Namespaces[i].Envoy())(t)
		expect.True(t, i != 0 || string(text) == converted, "converted:\n%s", text)
		files = append(files, envoy.File{Name: f.Namespaces[i].FileName(), Data: text})
	}
	config := must.Value(envoy.Parse(files, envoy.Options{}))(t)
	domains, limits := config.Domains()
	expect.True(t, domains == 2 && limits == 5, "%d limits of %d domains", limits, domains)
}

func TestMistakes(t *testing.T) {
	for in, want := range map[string]string{
		"- {namespace: n, max_value: 1, seconds: 60}":                                                                             "1:3: [0]: has neither conditions nor variables",
		"- {namespace: n, max_value: 1, variables: [a]}":                                                                          "1:3: [0].seconds: is missing: add it, such as seconds: 60",
		"- {max_value: 1, seconds: 1, variables: [a]}":                                                                            "1:3: [0].namespace: is missing",
		"- {namespace: n, max_value: -1, seconds: 60, variables: [a]}":                                                            "[0].max_value: ",
		"- {namespace: n, max_value: 1, seconds: 0, variables: [a]}":                                                              "[0].seconds: ",
		"- {namespace: '', max_value: 1, seconds: 1, variables: [a]}":                                                             "[0].namespace: must have 1 to",
		"- {namespace: n, max_value: 1, seconds: 1, variables: a}":                                                                "[0].variables: must be a list",
		"- {namespace: n, max_value: 1, seconds: 1, variables: [1]}":                                                              "[0].variables[0]: must be text",
		"- {namespace: n, max_value: 1, seconds: 1, variables: ['size(a)']}":                                                      "[0].variables[0]: is not understood",
		"- {namespace: n, max_value: 1, seconds: 1, conditions: [\"a.startsWith('b')\"]}":                                         "[0].conditions[0]: is not understood",
		"- {namespace: n, max_value: 1, seconds: 1, variable: [a]}":                                                               "[0].variable: ",
		"- {namespace: n, max_value: 1, seconds: 1, variables: [a]}\n- {namespace: n, max_value: 9, seconds: 60, variables: [a]}": "2:3: [1]: has the conditions and variables of the limit in line 1",
		"- {namespace: n, max_value: 1, seconds: 1, conditions: [\"a == 'b*'\"]}":                                                 "[0].conditions[0]: cannot be said in Envoy's format",
		"namespace: n": "must be a list of limits, not a map",
		"- 7":          "1:3: [0]: ",
		"- {":          "limits.yaml:",
	} {
		f, err := parseLimitador("limits.yaml", []byte(in))
		expect.ErrorContains(t, err, want, "%s: %v", in, f)
	}
	f, err := parseLimitador("limits.yaml", nil)
	expect.True(t, err == nil && f.Limits == 0, "an empty file: %v, %v", f, err)
}

// examplePages are the pages whose commands are run, by the policies that they are run with, and how many there are at
// least.
var examplePages = []struct {
	doc, policies string
	commands      int
}{
	{"docs/examples.md", "docs/examples/algorithms.yaml", 20},
	{"docs/ai-budgets.md", "docs/examples/budgets.yaml", 10},
}

// passing is what depends on when a command of the page runs, and what is drawn at random. Whether there is such a
// time, and never, does not.
var passing = regexp.MustCompile(
	`((?:retry_after|reset_after|delay)=)[0-9][0-9a-z.]*|("(?:retry_after|reset_after)_ms":)[1-9][0-9]*|[0-9a-f]{24}00000000`)

// TestExamples runs the commands of the pages of examples against the clusters that they have one start, and wants what
// they show.
func TestExamples(t *testing.T) {
	t.Chdir("../..")
	for _, page := range examplePages {
		t.Run(page.doc, func(t *testing.T) {
			text := must.Value(os.ReadFile(page.doc))(t)
			command := "\nbin/weir dev --policies " + page.policies + "\n"
			must.True(t, strings.Contains(string(text), command), "the page does not have %q", command)
			said, stop := startDev(t, devConfig{Nodes: 3, HTTP: node.PortAny, GRPC: node.PortAny,
				Logger: slog.New(slog.DiscardHandler), Policies: page.policies})
			ports := regexp.MustCompile(`dev-0  http://(\S+)  grpc (\S+)`).FindStringSubmatch(said)
			must.True(t, ports != nil, "no ports in\n%s", said)
			e := example{httpAddr: ports[1], grpcAddr: ports[2]}
			block := regexp.MustCompile("(?s)```console\n(.*?)```")
			got := block.ReplaceAllStringFunc(string(text), func(console string) string {
				var out strings.Builder
				out.WriteString("```console\n")
				for line := range strings.Lines(console) {
					if command, ok := strings.CutPrefix(line, "$ "); ok {
						e.commands++
						out.WriteString(line)
						out.WriteString(e.run(t, strings.TrimSuffix(command, "\n")))
					}
				}
				return out.String() + "```"
			})
			_, err := stop()
			expect.NoError(t, err)
			expect.True(t, e.commands >= page.commands, "the page has %d commands", e.commands)
			if *updateExamples {
				must.NoError(t, os.WriteFile(page.doc, []byte(got), 0o644))
				return
			}
			timeless := func(s string) string { return passing.ReplaceAllString(s, "${1}${2}…") }
			expect.NoDiff(t, cmp.Diff(timeless(string(text)), timeless(got)),
				"%s does not show what its commands print (-update-examples writes it anew): -page +printed", page.doc)
		})
	}
}

// example is a page whose commands are being run.
type example struct {
	httpAddr, grpcAddr string
	commands           int
	reservation        string // the shell's $ID
}

// setID is a command that keeps the id of a reservation, as a shell would.
const setID, ofID = "ID=$(", " -o id)"

// run runs a command of the page: weir, or curl with a body, which it stands in for. It returns what the command
// prints.
func (e *example) run(t *testing.T, command string) string {
	t.Helper()
	if reserve, ok := strings.CutPrefix(command, setID); ok && strings.HasSuffix(reserve, ofID) {
		answer := e.run(t, strings.TrimSuffix(reserve, ")"))
		e.reservation = strings.TrimSuffix(answer, "\n")
		must.True(t, e.reservation != "", "%s: no reservation in %s", command, answer)
		return ""
	}
	command = strings.ReplaceAll(command, "$ID", e.reservation)
	if args, ok := strings.CutPrefix(command, "bin/weir "); ok {
		var out, errs bytes.Buffer
		list := strings.Fields(args)
		if list[0] != "simulate" {
			list = append(list, "--addr", e.grpcAddr)
		}
		code := run(list, &out, &errs)
		must.True(t, code != exitError, "%s: %s", command, &errs)
		return out.String()
	}
	const curl, node = `curl -s -H 'Content-Type: application/json' -d '`, "' http://127.0.0.1:8080"
	rest, ok := strings.CutPrefix(command, curl)
	body, path, found := strings.Cut(rest, node)
	must.True(t, ok && found, "the test cannot run %q", command)
	resp, err := http.Post(fmt.Sprintf("http://%s%s", e.httpAddr, path), "application/json", strings.NewReader(body))
	must.NoError(t, err)
	defer resp.Body.Close()
	answer := must.Value(io.ReadAll(resp.Body))(t)
	return strings.TrimSuffix(string(answer), "\n") + "\n"
}

// FuzzParse: what is taken can be written.
func FuzzParse(f *testing.F) {
	f.Add(limits)
	f.Fuzz(func(t *testing.T, text string) {
		file, err := parseLimitador("limits.yaml", []byte(text))
		if err != nil {
			return
		}
		for i := range file.Namespaces {
			_, err := file.Namespaces[i].Envoy()
			must.NoError(t, err)
		}
	})
}
