package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
)

func testReport() report {
	all := []*series{
		{work: "unary", system: "echo", samples: map[int]sample{0: {rate: 50_000, serverCPU: 20, p50: 4000}, 1: {rate: 54_000, serverCPU: 19, p50: 4100}}},
		{work: "unary", system: "weir", samples: map[int]sample{0: {rate: 49_000, serverCPU: 21, p50: 4200}, 1: {rate: 50_000, serverCPU: 22, p50: 4300}}},
		{work: "unary", system: "gubernator", samples: map[int]sample{}, err: errors.New("gubernator is not to be had: no network")},
		{work: "in-process", system: "weir-local", samples: map[int]sample{0: {nsOne: 400, bytesPerKey: 80, admitted: limitAllowed}}},
		{work: "overload", system: "weir", samples: map[int]sample{0: {rate: 1_234_567, failed: 0.25, idleRSS: 90e6, peakRSS: 181e6}}},
	}
	return report{
		Date: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Machine: machine{CPU: "Abacus", Cores: 2, Weir: "abc"}, Rounds: 2, Measured: "3s",
		Limits:  []verdict{{System: "weir-1 gRPC", Admitted: 100, Exact: true}, {System: "redis", Error: "redis-server is not installed"}},
		Figures: figuresOf(all),
		Targets: judge(all, targets()),
	}
}

func TestMarkdown(t *testing.T) {
	r := testReport()
	var b bytes.Buffer
	if err := r.writeMarkdown(&b); err != nil {
		t.Fatal(err)
	}
	text := b.String()
	for _, want := range []string{
		"2026-01-02 03:04 UTC · Abacus, 2 cores",
		"| weir-1 gRPC | 100 | kept |",
		"| redis | – | not looked at: redis-server is not installed |",
		"| in-process weir-local | 100 | kept |",
		"| one node, unary, 1 check a call, 256 callers | rate | unary/echo | 0.953 (0.926–0.98) | ≥ 0.9 | pass |",
		"| one node, unary, 1 check a call, 256 callers | rate | unary/gubernator | – | ≥ 2 | not measured |",
		"| its own bound | 0.25 | ≤ 0 | **short** |",
		"| echo | 52 k (50 k–54 k) | 19.5 (19–20) |",
		"| weir | 1.23 M |",
		"weir: resident 90 MB idle, 181 MB at most.",
		"| weir-local | 400 | – | – | – | 80 | – |",
		"- unary/gubernator: gubernator is not to be had: no network",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the report lacks %q", want)
		}
	}
	if t.Failed() {
		t.Log(text)
	}
}

// TestTables holds every table to one number of columns.
func TestTables(t *testing.T) {
	r := testReport()
	var b bytes.Buffer
	if err := r.writeMarkdown(&b); err != nil {
		t.Fatal(err)
	}
	columns := 0
	for line := range strings.Lines(b.String()) {
		n := strings.Count(line, "|")
		if columns > 0 && n > 0 && n != columns {
			t.Errorf("%d columns after %d: %s", n, columns, line)
		}
		columns = n
	}
}

func TestJSON(t *testing.T) {
	r := testReport()
	var b bytes.Buffer
	if err := r.writeJSON(&b); err != nil {
		t.Fatal(err)
	}
	var back report
	if err := json.Unmarshal(b.Bytes(), &back); err != nil {
		t.Fatal(err)
	}
	if got := back.Figures[0].Spreads[rate]; got != (spread{52_000, 50_000, 54_000, 2, [2]float64{50_000, 54_000}}) || back.Machine.CPU != "Abacus" || len(back.Targets) != len(targets()) {
		t.Errorf("%+v", back)
	}
}

func TestViolated(t *testing.T) {
	broken := fmt.Errorf("%w: 101", errViolated).Error()
	for _, c := range []struct {
		name string
		r    report
		want bool
	}{
		{"nothing", report{}, false},
		{"kept", report{Limits: []verdict{{System: "weir-1", Admitted: 100, Exact: true}}}, false},
		{"one too many", report{Limits: []verdict{{System: "weir-1", Admitted: 101, Exact: true}}}, true},
		{"one too few", report{Limits: []verdict{{System: "weir-1", Admitted: 99, Exact: true}}}, true},
		{"not looked at", report{Limits: []verdict{{System: "weir-1", Exact: true, Error: "no answer"}}}, false},
		{"a peer's", report{Limits: []verdict{{System: "redis", Admitted: 101}}}, false},
		{"under load", report{Figures: []figures{{Work: "hot-unary", System: "weir-refused", Error: broken}}}, true},
		{"a peer's under load", report{Figures: []figures{{Work: "in-process", System: "go-limiter", Error: broken}}}, false},
	} {
		if got := c.r.violated(); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

func TestNumber(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 0.0012345: "0.00123", 0.95: "0.95", 1: "1", 12.345: "12.3", 99.94: "99.9", 99.96: "100", 123.4: "123", 9994: "9994",
		9996: "10 k", 52_000: "52 k", 999_400: "999 k", 999_600: "1 M", 1_130_000: "1.13 M",
	} {
		if got := number(v); got != want {
			t.Errorf("number(%v) is %q, not %q", v, got, want)
		}
	}
}

func TestTargetsNameMeasurements(t *testing.T) {
	known := make(map[string]bool)
	b := &bench{keys: make([]string, keySpace)}
	for _, m := range b.measurements() {
		if known[m.name()] {
			t.Errorf("two measurements are named %s", m.name())
		}
		known[m.name()] = true
	}
	for _, target := range targets() {
		if !known[target.subject] || target.base != "" && !known[target.base] {
			t.Errorf("%s: %q against %q names no measurement", target.work, target.subject, target.base)
		}
		if target.figure != rate && titleOf(target.figure) == string(target.figure) {
			t.Errorf("%s has no name for people", target.figure)
		}
	}
}
