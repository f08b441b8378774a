package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestSpread(t *testing.T) {
	for _, c := range []struct {
		values []float64
		want   spread
	}{
		{[]float64{3}, spread{3, 3, 3, 1}}, {[]float64{4, 1}, spread{2.5, 1, 4, 2}},
		{[]float64{9, 1, 2}, spread{2, 1, 9, 3}}, {[]float64{4, 3, 2, 1}, spread{2.5, 1, 4, 4}},
	} {
		if got, ok := spreadOf(c.values); !ok || got != c.want {
			t.Errorf("spread of %v is %+v, not %+v", c.values, got, c.want)
		}
	}
	if _, ok := spreadOf(nil); ok {
		t.Error("a spread of nothing")
	}
}

func TestRatiosAreTakenWithinRounds(t *testing.T) {
	// The machine was three times slower in the second round, for both; the third has only one of them.
	a := &series{samples: map[int]sample{0: {rate: 300}, 1: {rate: 100}, 2: {rate: 1}}}
	b := &series{samples: map[int]sample{0: {rate: 150}, 1: {rate: 50}, 3: {rate: 7}}}
	if got, ok := a.ratioTo(b, rate); !ok || got != (spread{2, 2, 2, 2}) {
		t.Errorf("got %+v, %v", got, ok)
	}
	if _, ok := a.ratioTo(b, p50); ok {
		t.Error("a ratio of figures that were not taken")
	}
	if _, ok := a.ratioTo(&series{samples: map[int]sample{0: {rate: 0}}}, rate); ok {
		t.Error("a ratio to nothing")
	}
}

func TestRoundsTakeTurns(t *testing.T) {
	var ran []string
	m := func(name string, once bool, err error) row {
		return row{system: name, once: once, run: func(context.Context) (sample, error) {
			ran = append(ran, name)
			return sample{rate: float64(len(ran))}, err
		}}
	}
	works := []workload{
		{"a", "", []row{m("x", false, nil), m("y", false, nil)}},
		{"b", "", []row{m("once", true, nil), m("broken", false, errors.New("no"))}},
		{"c", "", []row{m("unwanted", false, nil)}},
	}
	got, err := runRounds(context.Background(), io.Discard, works, 2, regexp.MustCompile("^[ab]/"))
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"x", "y", "once", "broken", "y", "x"}; !reflect.DeepEqual(ran, want) {
		t.Errorf("ran %v, want %v", ran, want)
	}
	if len(got) != 4 || len(got[0].samples) != 2 || got[3].err == nil {
		t.Errorf("series %+v", got)
	}
	if s, ok := got[0].of(rate); !ok || s != (spread{3.5, 1, 6, 2}) {
		t.Errorf("spread %+v, %v", s, ok)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := runRounds(ctx, io.Discard, works, 2, regexp.MustCompile("")); !errors.Is(err, context.Canceled) {
		t.Errorf("a run that was interrupted ended with %v", err)
	}
}

func TestDrive(t *testing.T) {
	l := loop{callers: 4, warm: time.Millisecond, measure: 50 * time.Millisecond}
	got, err := l.drive(context.Background(), func(i int) call {
		n := 0
		return func(context.Context) (int, error) {
			if n++; n%4 == 0 {
				return 0, errors.New("every fourth")
			}
			time.Sleep(time.Millisecond)
			return 10, nil
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if got[failed] < 0.1 || got[failed] > 0.4 || got[rate] <= 0 || got[rate] > 40_000 || got[p99] < got[p50] {
		t.Errorf("%v", got)
	}
	if _, ok := got[serverCPU]; ok {
		t.Error("CPU of servers that there are none of")
	}
	_, err = l.drive(context.Background(), func(int) call {
		return func(context.Context) (int, error) { return 0, io.ErrUnexpectedEOF }
	})
	if !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a load without a single decision gave %v", err)
	}
}

func TestPaced(t *testing.T) {
	b := &bench{warm: 10 * time.Millisecond, measure: time.Millisecond}
	got, err := b.paced(4, 50).drive(t.Context(), func(int) call {
		return func(context.Context) (int, error) { return 100, nil }
	})
	if err != nil || math.Abs(got[rate]-5000) > 1000 || got[failed] != 0 {
		t.Errorf("%v, %v", got, err)
	}
}

// fakeScale has one row with E 0.5 for this build and 0.25 for the other.
func fakeScale() []*series {
	of := func(system string, cpu, perSecond float64) *series {
		s := &series{work: scaleWork + "client-async", row: row{system: system}, samples: map[int]sample{}}
		for round := range 2 {
			slow := float64(round + 1)
			s.samples[round] = sample{serverCPU: cpu * slow, rate: perSecond / slow}
		}
		return s
	}
	return []*series{
		of("one", 2, 100_000), of("many", 4, 60_000), of("beside-one", 2, 100_000), of("beside-many", 8, 40_000),
	}
}

func testReport() *report {
	all := append(fakeScale(),
		&series{"unary", "One node", row{system: "echo"}, map[int]sample{
			0: {rate: 50_000, serverCPU: 20, p50: 4000}, 1: {rate: 54_000, serverCPU: 19, p50: 4100}}, nil},
		&series{"unary", "One node", row{system: "weir"}, map[int]sample{
			0: {rate: 49_000, serverCPU: 21, p50: 4200}, 1: {rate: 50_000, serverCPU: 22, p50: 4300}}, nil},
		&series{"unary", "One node", row{system: "gubernator"}, nil, errors.New("gubernator cannot be built")},
		&series{"node-memory", "Memory", row{system: "weir"}, map[int]sample{0: {bytesPerKey: 80}}, nil},
		&series{scaleWork + "idle", "", row{system: "many"}, map[int]sample{0: {idleCPU: 3.5}}, nil},
	)
	r := &report{
		Date: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Rounds: 2, Nodes: 5, Measured: "3s",
		Machine: machine{CPU: "Abacus", Cores: 2, Weir: "abc"},
	}
	r.fill(all)
	return r
}

func TestMarkdown(t *testing.T) {
	var b bytes.Buffer
	if err := testReport().writeMarkdown(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"2026-01-02 03:04 UTC · Abacus, 2 cores",
		"| unary/weir | unary/echo | rate | 0.953 (0.926–0.98) |",
		"| scale-client-async/one | scale-client-async/many | server CPU | 0.5 |",
		"| scale-client-async/many | scale-client-async/beside-many | rate | 1.5 |",
		"| scale-client-async/beside-one | scale-client-async/beside-many | server CPU | 0.25 |",
		"A node of 5 without callers (many) takes 3.5 % of a core.",
		"| echo | 52 k (50 k–54 k) | 19.5 (19–20) |",
		"A node of weir grows by 80 resident bytes a key.",
		"- unary/gubernator: gubernator cannot be built",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("the report lacks %q", want)
		}
	}
	columns := 0
	for line := range strings.Lines(b.String()) {
		n := strings.Count(line, "|")
		if n > 0 && columns > 0 && n != columns {
			t.Errorf("%d columns, not %d: %s", n, columns, line)
		}
		columns = n
	}
	if t.Failed() {
		t.Log(b.String())
	}
}

func TestNumber(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 0.0012345: "0.00123", 0.95: "0.95", 1: "1", 12.345: "12.3", 99.94: "99.9", 99.96: "100", 123.4: "123",
		9994: "9994", 9996: "10 k", 52_000: "52 k", 999_400: "999 k", 999_600: "1 M", 1_130_000: "1.13 M",
	} {
		if got := number(v); got != want {
			t.Errorf("number(%v) is %q, not %q", v, got, want)
		}
	}
}

// TestRowsHaveNames: no two rows have one name.
func TestRowsHaveNames(t *testing.T) {
	known := make(map[string]bool)
	b := &bench{keys: make([]string, keySpace), beside: "other"}
	for _, w := range b.workloads() {
		for _, r := range w.rows {
			name := w.name + "/" + r.system
			if known[name] || w.title == "" {
				t.Errorf("%s: twice, or without a title", name)
			}
			known[name] = true
		}
	}
}

func TestFlags(t *testing.T) {
	for _, c := range []struct {
		args   string
		rounds int
		fault  string
	}{
		{"", 5, ""}, {"-short", 1, ""}, {"-short -rounds 7", 7, ""}, {"-rounds 3 -beside /bin/sh", 3, ""},
		{"-rounds 0", 0, "-rounds"}, {"-nodes 1", 0, "-nodes"}, {"-only (", 0, "-only"},
		{"-beside /none", 0, "-beside"}, {"extra", 0, "extra"},
	} {
		s, err := parse(strings.Fields(c.args), io.Discard)
		switch {
		case c.fault == "" && (err != nil || s.rounds != c.rounds):
			t.Errorf("%q: %d rounds, %v", c.args, s.rounds, err)
		case c.fault != "" && (err == nil || !strings.Contains(err.Error(), c.fault)):
			t.Errorf("%q: %v", c.args, err)
		}
	}
}

func TestByZipf(t *testing.T) {
	keys := []string{"a", "b", "c", "d"}
	counts := make(map[string]int)
	p, random := byZipf(keys), newRandom(1)
	for range 100_000 {
		counts[p(random)]++
	}
	byCount := func(a, b string) int { return counts[b] - counts[a] }
	if !slices.IsSortedFunc(keys, byCount) || counts["a"] < counts["d"]*7/2 {
		t.Errorf("%v", counts)
	}
}
