package main

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
)

const examplesDoc = "docs/examples.md"

// passing is what depends on when a command of the page runs. Whether there is such a time, and never, does not.
var passing = regexp.MustCompile(`((?:retry_after|reset_after|delay)=)[0-9][0-9a-z.]*|("(?:retry_after|reset_after)_ms":)[1-9][0-9]*`)

// TestExamples runs the commands of the page of examples against the cluster that it has one start, and wants what it shows.
func TestExamples(t *testing.T) {
	t.Chdir("../..")
	text, err := os.ReadFile(examplesDoc)
	if err != nil {
		t.Fatal(err)
	}
	if command := "\nbin/weir dev --policies docs/examples/algorithms.yaml\n"; !strings.Contains(string(text), command) {
		t.Fatalf("the page does not have %q", command)
	}
	said, stop := startDev(t, devConfig{nodes: 3, log: slog.New(slog.DiscardHandler), policies: "docs/examples/algorithms.yaml"})
	ports := regexp.MustCompile(`dev-0  http://(\S+)  grpc (\S+)`).FindStringSubmatch(said)
	if ports == nil {
		t.Fatalf("no ports in\n%s", said)
	}
	commands := 0
	block := regexp.MustCompile("(?s)```console\n(.*?)```")
	got := block.ReplaceAllStringFunc(string(text), func(console string) string {
		var out strings.Builder
		out.WriteString("```console\n")
		for line := range strings.Lines(console) {
			if command, ok := strings.CutPrefix(line, "$ "); ok {
				commands++
				out.WriteString(line)
				out.WriteString(runExample(t, strings.TrimSuffix(command, "\n"), ports[1], ports[2]))
			}
		}
		return out.String() + "```"
	})
	if _, err := stop(); err != nil {
		t.Error(err)
	}
	if commands < 30 {
		t.Errorf("the page has %d commands", commands)
	}
	if *updateExamples {
		if err := os.WriteFile(examplesDoc, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	timeless := func(s string) string { return passing.ReplaceAllString(s, "${1}${2}…") }
	if diff := cmp.Diff(timeless(string(text)), timeless(got)); diff != "" {
		t.Errorf("%s does not show what its commands print (-update-examples writes it anew): -page +printed\n%s", examplesDoc, diff)
	}
}

// runExample runs a command of the page: weir, or curl with a body, which it stands in for. It returns what the command prints.
func runExample(t *testing.T, command, httpAddr, grpcAddr string) string {
	t.Helper()
	if args, ok := strings.CutPrefix(command, "bin/weir "); ok {
		var out, errs bytes.Buffer
		list := strings.Fields(args)
		if list[0] == "check" {
			list = append(list, "--addr", grpcAddr)
		}
		if code := run(list, &out, &errs); code == exitError {
			t.Fatalf("%s: %s", command, &errs)
		}
		return out.String()
	}
	const curl, node = `curl -s -H 'Content-Type: application/json' -d '`, "' http://127.0.0.1:8080"
	rest, ok := strings.CutPrefix(command, curl)
	body, path, found := strings.Cut(rest, node)
	if !ok || !found {
		t.Fatalf("the test cannot run %q", command)
	}
	resp, err := http.Post(fmt.Sprintf("http://%s%s", httpAddr, path), "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSuffix(string(answer), "\n") + "\n"
}
