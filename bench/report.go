package main

import (
	"fmt"
	"io"
	"math"
	"strings"
	"time"
)

// A report has the results of a run.
type report struct {
	Date     time.Time
	Machine  machine
	Short    bool
	Rounds   int
	Nodes    int    // of the rows many
	Measured string // length of each measurement, without the warm-up
	All      []*series
	Ratios   []ratio
}

// A ratio is a figure of one row divided by that of another.
type ratio struct {
	Figure  metric
	Subject string // names of rows
	Base    string
	Ratio   spread
}

// fill makes the report from the measurements.
func (r *report) fill(all []*series) {
	r.All = all
	byName := make(map[string]*series)
	firstOf := make(map[string]string) // work → name of the first row that was measured
	for _, s := range all {
		byName[s.name()] = s
		if firstOf[s.work] == "" && len(s.samples) > 0 {
			firstOf[s.work] = s.name()
		}
	}
	add := func(subject, base string, metrics ...metric) {
		a, b := byName[subject], byName[base]
		if a == nil || b == nil {
			return
		}
		for _, m := range metrics {
			if got, ok := a.ratioTo(b, m); ok {
				r.Ratios = append(r.Ratios, ratio{m, subject, base, got})
			}
		}
	}
	for _, s := range all {
		base, work := firstOf[s.work], s.work+"/"
		switch scale := strings.HasPrefix(s.work, scaleWork); {
		case scale && s.system == "one":
			add(s.name(), work+"many", serverCPU) // E
		case scale && s.system == "beside-one":
			add(s.name(), work+"beside-many", serverCPU)
		case scale && s.system == "many":
			add(s.name(), work+"beside-many", rate)
		case !scale && base != s.name():
			add(s.name(), base, rate, serverCPU, p50, bytesPerKey)
		}
	}
}

// writeMarkdown prints the report for people.
func (r *report) writeMarkdown(w io.Writer) error {
	m := &markdown{w: w}
	kind := "full"
	if r.Short {
		kind = "short: for a first look, not for quoting"
	}
	date := r.Date.UTC().Format("2006-01-02 15:04 UTC")
	m.printf("# Weir beside its floors and its peers\n\n%s · %s, %d cores, %d MB · Linux %s · %s · ",
		date, r.Machine.CPU, r.Machine.Cores, r.Machine.MemoryMB, r.Machine.Kernel, r.Machine.Go)
	m.printf("weir %s · %d rounds of %s (%s)\n\n", r.Machine.Weir, r.Rounds, r.Measured, kind)
	m.printf("Beside it: redis-server %s, and what bench/go.mod has.\n\n", r.Machine.Redis)
	m.printf("Callers and servers share the machine. Figures are medians over the rounds, with (least–most).\n")
	r.writeRatios(m)
	r.writeNetworked(m)
	r.writeSingle(m)
	r.writeMissing(m)
	return m.err
}

func (r *report) writeRatios(m *markdown) {
	if len(r.Ratios) == 0 {
		return
	}
	m.printf("\n## Ratios\n\nEach is taken within a round.\n\n")
	m.row("row", "against", "figure", "ratio")
	m.row("---", "---", "---", "---:")
	for _, o := range r.Ratios {
		m.row(o.Subject, o.Base, titleOf(o.Figure), o.Ratio.String())
	}
}

func (r *report) writeNetworked(m *markdown) {
	work := ""
	for _, s := range r.All {
		if _, ok := s.of(rate); !ok {
			continue
		}
		if s.work != work {
			work = s.work
			m.printf("\n## %s\n\n", s.title)
			m.row("system", "decisions/s", "server CPU s/M", "caller CPU s/M", "p50 µs", "p99 µs",
				"RSS MB", "failed calls")
			m.row("---", "---:", "---:", "---:", "---:", "---:", "---:", "---:")
		}
		m.row(s.system, s.cell(rate, 1), s.cell(serverCPU, 1), s.cell(clientCPU, 1), s.cell(p50, 1), s.cell(p99, 1),
			s.cell(rss, 1e-6), s.cell(failed, 1))
	}
}

// writeSingle writes the figures that are the only one of their row.
func (r *report) writeSingle(m *markdown) {
	for _, s := range r.All {
		if got, ok := s.of(bytesPerKey); ok {
			m.printf("\nA node of %s grows by %s resident bytes a key.\n", s.system, got)
		}
		if got, ok := s.of(idleCPU); ok {
			m.printf("\nA node of %d without callers (%s) takes %s %% of a core.\n", r.Nodes, s.system, got)
		}
	}
}

// writeMissing lists the rows that could not be measured, with the reasons.
func (r *report) writeMissing(m *markdown) {
	began := false
	for _, s := range r.All {
		if s.err == nil {
			continue
		}
		if !began {
			began = true
			m.printf("\n## Not measured\n\n")
		}
		m.printf("- %s: %v\n", s.name(), s.err)
	}
}

// cell returns a figure for a table, multiplied.
func (s *series) cell(m metric, by float64) string {
	got, ok := s.of(m)
	if !ok {
		return "–"
	}
	return spread{Median: got.Median * by, Min: got.Min * by, Max: got.Max * by, Rounds: got.Rounds}.String()
}

// String returns the median, with least and most if there is more than one round.
func (s spread) String() string {
	if s.Rounds < 2 || number(s.Min) == number(s.Max) {
		return number(s.Median)
	}
	return number(s.Median) + " (" + number(s.Min) + "–" + number(s.Max) + ")"
}

// number returns three significant digits, more than any figure here is exact to.
func number(v float64) string {
	switch a := math.Abs(v); {
	case v == 0:
		return "0"
	case a >= 999_500:
		return fmt.Sprintf("%.3g M", v/1e6)
	case a >= 9_995:
		return fmt.Sprintf("%.3g k", v/1e3)
	case a >= 99.95:
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.3g", v)
}

// titleOf returns a metric's name for the report.
func titleOf(m metric) string {
	return map[metric]string{rate: "rate", serverCPU: "server CPU", p50: "p50", bytesPerKey: "bytes a key"}[m]
}

// markdown writes the report, and keeps the first error.
type markdown struct {
	w   io.Writer
	err error
}

func (m *markdown) printf(format string, args ...any) {
	if m.err == nil {
		_, m.err = fmt.Fprintf(m.w, format, args...)
	}
}

func (m *markdown) row(cells ...string) {
	for i := range cells {
		cells[i] = strings.ReplaceAll(cells[i], "|", `\|`)
	}
	m.printf("| %s |\n", strings.Join(cells, " | "))
}
