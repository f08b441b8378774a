package cli

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

func TestSimulate(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		must.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	policies := file("p.yaml", "policies:\n  - {name: log, algorithm: sliding_log, limit: 2, window: 10s}\n  - {name: leases, algorithm: concurrency, limit: 2, ttl: 10s}\n")
	none := file("none.yaml", "policies: [{name: leases, algorithm: concurrency, limit: 2, ttl: 10s}]\n")
	wrong := file("wrong.yaml", "policies: [{name: log, algorithm: sliding_log, limit: 0, window: 10s}]\n")
	log := file("log.csv", "time,key\n1,a\n2,a\n3,a\nx\n10.5,b\n11,a\n")
	html := filepath.Join(dir, "report.html")

	var out, errs strings.Builder
	code := run([]string{"simulate", "--input", log, "--policies", policies, "--html", html, "--suggest", "callers=0%"}, &out, &errs)
	must.True(t, code == exitOK, "exit status %d: %s", code, &errs)
	for _, want := range []string{"5 requests of 2 keys", "malformed lines, left out: 1", "line 5 ", "log", "2 per 10s", "1 (20 %)", "3 (callers 0 %, requests 0 %)"} {
		expect.True(t, strings.Contains(out.String(), want), "the table lacks %q:\n%s", want, &out)
	}
	expect.True(t, strings.Contains(errs.String(), `"leases" is a concurrency limit and left out`),
		"on standard error: %s", &errs)
	page, err := os.ReadFile(html)
	expect.True(t, err == nil && strings.Contains(string(page), "<title>Weir: "), "%v: %.80s", err, page)
	out.Reset()
	if code := run([]string{"simulate", "--generate", "burst", "--rate", "1", "--for", "2m", "--policies", policies, "-o", "json"}, &out, &errs); code != exitOK || !strings.HasPrefix(out.String(), `{"events":90,`) {
		t.Errorf("%d: %.200s %s", code, &out, &errs)
	}

	for want, args := range map[string][]string{
		"--policies: name the file":                   {"--input", log},
		"--input: give either":                        {"--policies", policies},
		"--input: give either a file":                 {"--policies", policies, "--input", log, "--generate", "steady"},
		"--output: ":                                  {"--policies", policies, "--input", log, "-o", "xml"},
		"--policies: " + wrong + ":1:":                {"--policies", wrong, "--input", log},
		"--policies: " + none + " has no policy":      {"--policies", none, "--input", log},
		`--policy: there is no policy "x"`:            {"--policies", policies, "--input", log, "--policy", "x"},
		`policy "leases": is a concurrency limit`:     {"--policies", policies, "--input", log, "--policy", "leases"},
		"--input: open ":                              {"--policies", policies, "--input", filepath.Join(dir, "missing")},
		`--input: ` + log + `: format "x"`:            {"--policies", policies, "--input", log, "--format", "x"},
		"--key-regexp: ":                              {"--policies", policies, "--input", log, "--key-regexp", "("},
		"--suggest: ":                                 {"--policies", policies, "--input", log, "--suggest", "everybody"},
		`--suggest: "2" is not a share`:               {"--policies", policies, "--input", log, "--suggest", "callers=2"},
		`--generate: pattern "x"`:                     {"--policies", policies, "--generate", "x"},
		"--generate: rate":                            {"--policies", policies, "--generate", "steady", "--rate", "0"},
		"--html: ":                                    {"--policies", policies, "--input", log, "--html", filepath.Join(dir, "no", "x")},
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
	code := run(args, &out, &errs)
	must.True(t, code == exitOK, "exit status %d: %s", code, &errs)
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
