package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"time"
)

// A report is everything that a run found out, as written in JSON.
type report struct {
	Date     time.Time    `json:"date"`
	Machine  machine      `json:"machine"`
	Short    bool         `json:"short"`
	Rounds   int          `json:"rounds"`
	Measured string       `json:"measured"` // how long each networked measurement counts, warming up apart
	Sizes    *answerSizes `json:"answer_sizes,omitempty"`
	Limits   []verdict    `json:"limits"`
	Figures  []figures    `json:"figures"`
	Targets  []outcome    `json:"targets"`
}

// answerSizes are in bytes, of an answer to a batch.
type answerSizes struct {
	Weir  int `json:"weir"`
	Floor int `json:"floor"`
}

// figures are those of one measurement.
type figures struct {
	Work    string            `json:"work"`
	System  string            `json:"system"`
	Spreads map[metric]spread `json:"spreads,omitempty"`
	Error   string            `json:"error,omitempty"`
}

func figuresOf(all []*series) []figures {
	var out []figures
	for _, s := range all {
		f := figures{Work: s.work, System: s.system, Spreads: make(map[metric]spread)}
		if s.err != nil {
			f.Error = s.err.Error()
		}
		for _, got := range s.samples {
			for m := range got {
				f.Spreads[m], _ = s.of(m)
			}
		}
		out = append(out, f)
	}
	return out
}

// violated reports whether a limit of Weir's was not kept, which is a fault and not a figure.
func (r *report) violated() bool {
	for _, v := range r.Limits {
		if strings.HasPrefix(v.System, "weir") && v.Error == "" && !v.kept() {
			return true
		}
	}
	for _, f := range r.Figures {
		if strings.HasPrefix(f.System, "weir") && strings.Contains(f.Error, errViolated.Error()) {
			return true
		}
	}
	return false
}

func (r *report) writeJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// writeMarkdown prints the report for people.
func (r *report) writeMarkdown(w io.Writer) error {
	m := &markdown{w: w}
	kind := "full"
	if r.Short {
		kind = "short: for a first look, not for quoting"
	}
	m.printf("# Weir beside its floors and its peers\n\n")
	m.printf("%s · %s, %d cores, %d MB · Linux %s · %s · weir %s · %d rounds of %s (%s)\n\n",
		r.Date.UTC().Format("2006-01-02 15:04 UTC"), r.Machine.CPU, r.Machine.Cores, r.Machine.MemoryMB, r.Machine.Kernel,
		r.Machine.Go, r.Machine.Weir, r.Rounds, r.Measured, kind)
	var versions []string
	for _, name := range slices.Sorted(maps.Keys(r.Machine.Versions)) {
		versions = append(versions, name+" "+r.Machine.Versions[name])
	}
	m.printf("Beside it: %s.\n\n", strings.Join(versions, ", "))
	m.printf("Callers and servers share the machine. Figures are medians over the rounds, with (least–most), and where there are %d or more, or turns, the ends of their middle half.\n", manyRounds)
	r.writeLimits(m)
	r.writeTargets(m)
	r.writeNetworked(m)
	r.writeOwnership(m)
	r.writeInProcess(m)
	r.writeLoans(m)
	r.writeMissing(m)
	return m.err
}

func (r *report) writeLimits(m *markdown) {
	if len(r.Limits) == 0 {
		return
	}
	m.printf("\n## Is the limit kept?\n\n%d checks of one new key from %d goroutines, limit %d.\n\n", limitAttempts, limitAskers, limitAllowed)
	m.row("system", "admitted", "")
	m.row("---", "---:", "---")
	for _, v := range r.Limits {
		switch {
		case v.Error != "":
			m.row(v.System, "–", "not looked at: "+v.Error)
		case v.kept():
			m.row(v.System, fmt.Sprint(v.Admitted), "kept")
		default:
			m.row(v.System, fmt.Sprint(v.Admitted), "**NOT KEPT**")
		}
	}
	for _, f := range r.Figures {
		if s, ok := f.Spreads[admitted]; ok {
			m.row("in-process "+f.System, number(s.Median), "kept")
		}
	}
	if r.Sizes != nil {
		m.printf("\nAn answer to %d checks is %d bytes long, the floor's %d.\n", batchSize, r.Sizes.Weir, r.Sizes.Floor)
	}
}

func (r *report) writeTargets(m *markdown) {
	m.printf("\n## To reach\n\nRatios are taken within each round; of what runs in shorter turns, within each turn.\n\n")
	m.row("work", "figure", "against", "ratio", "to reach", "")
	m.row("---", "---", "---", "---:", "---", "---")
	for _, o := range r.Targets {
		against, sign, got := o.Base, "≤", "–"
		if against == "" {
			against = "its own bound"
		}
		if o.AtLeast {
			sign = "≥"
		}
		if o.Ratio != nil {
			got = o.Ratio.String()
		}
		result := o.Result
		if result == "short" {
			result = "**short**"
		}
		m.row(o.Work, titleOf(o.Figure), against, got, sign+" "+number(o.Bound), result)
	}
}

func (r *report) writeNetworked(m *markdown) {
	work := ""
	for _, f := range r.Figures {
		if _, ok := f.Spreads[rate]; !ok {
			continue
		}
		if f.Work != work {
			work = f.Work
			m.printf("\n## %s\n\n", titleOfWork(work))
			m.row("system", "decisions/s", "server CPU s/M", "caller CPU s/M", "p50 µs", "p99 µs", "p99.9 µs", "RSS MB", "failed calls")
			m.row("---", "---:", "---:", "---:", "---:", "---:", "---:", "---:", "---:")
		}
		m.row(f.System, f.cell(rate, 1), f.cell(serverCPU, 1), f.cell(clientCPU, 1), f.cell(p50, 1), f.cell(p99, 1), f.cell(p999, 1),
			f.cell(rss, 1e-6), f.cell(failed, 1))
		if s, ok := f.Spreads[partnerCPU]; ok {
			m.note("%s: server CPU and RSS are those of the node asked; its partner took %s CPU s/M.", f.System, s)
		}
		if s, ok := f.Spreads[peakRSS]; ok {
			idle := f.Spreads[idleRSS]
			m.note("%s: resident %s MB idle, %s MB at most.", f.System, idle.scaled(1e-6), s.scaled(1e-6))
		}
	}
	m.flush()
}

func (r *report) writeInProcess(m *markdown) {
	began := false
	for _, f := range r.Figures {
		if _, ok := f.Spreads[nsOne]; !ok {
			continue
		}
		if !began {
			began = true
			m.printf("\n## In process, %d string keys\n\nElapsed ns a decision, all threads together.\n\n", inProcessKeys)
			m.row("library", "1 thread", "2 threads", "hot key, 1", "hot key, 2", "bytes a key", "GC cycle ms")
			m.row("---", "---:", "---:", "---:", "---:", "---:", "---:")
		}
		m.row(f.System, f.cell(nsOne, 1), f.cell(nsTwo, 1), f.cell(nsHotOne, 1), f.cell(nsHotTwo, 1), f.cell(bytesPerKey, 1), f.cell(gcMillis, 1))
	}
	for _, f := range r.Figures {
		if s, ok := f.Spreads[logBytes]; ok {
			m.printf("\nFull log, %s: %s bytes an admission.", f.System, s)
			for n := 10; n <= 1_000_000; n *= 10 {
				if ns, ok := f.Spreads[logNanos(n)]; ok {
					m.printf(" %d entries: %s ns.", n, ns)
				}
			}
			m.printf("\n")
		}
		if s, ok := f.Spreads[bytesPerKey]; ok && f.Work == "node-memory" {
			m.printf("\nA node of %s grows by %s resident bytes a key.\n", f.System, number(s.Median))
		}
	}
}

// writeMissing says what could not be measured, and why.
func (r *report) writeMissing(m *markdown) {
	began := false
	for _, f := range r.Figures {
		if f.Error == "" {
			continue
		}
		if !began {
			began = true
			m.printf("\n## Not measured\n\n")
		}
		m.printf("- %s/%s: %s\n", f.Work, f.System, f.Error)
	}
}

func (f *figures) cell(m metric, scale float64) string {
	s, ok := f.Spreads[m]
	if !ok {
		return "–"
	}
	return s.scaled(scale).String()
}

func (s spread) scaled(by float64) spread {
	return spread{Median: s.Median * by, Min: s.Min * by, Max: s.Max * by, Rounds: s.Rounds, Middle: [2]float64{s.Middle[0] * by, s.Middle[1] * by}}
}

// manyRounds is from how many on the ends say little, and those of the middle half are told besides.
const manyRounds = 10

// String is the median, with the ends where there is more than one round.
func (s spread) String() string {
	switch {
	case s.Rounds < 2 || number(s.Min) == number(s.Max):
		return number(s.Median)
	case s.Rounds < manyRounds:
		return number(s.Median) + " (" + number(s.Min) + "–" + number(s.Max) + ")"
	}
	return fmt.Sprintf("%s (%s–%s; half of %d: %s–%s)", number(s.Median), number(s.Min), number(s.Max), s.Rounds, number(s.Middle[0]), number(s.Middle[1]))
}

// number prints three significant digits, which is more than any figure here is good for.
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

// titleOf is a metric's name for people.
func titleOf(m metric) string {
	switch m {
	case rate:
		return "rate"
	case serverCPU:
		return "server CPU"
	case perCPU:
		return "decisions per CPU s"
	case p50:
		return "p50"
	case nsOne, nsTwo, nsHotOne, nsHotTwo:
		return "time"
	case bytesPerKey:
		return "bytes a key"
	case gcMillis:
		return "GC cycle"
	case failed:
		return "share"
	case logBytes:
		return "bytes"
	case logSpread:
		return "time"
	case strangersBytes:
		return "bytes"
	case strangersRate:
		return "decisions, by those without"
	case overBound:
		return "memory"
	case parkedP99, decidedIn:
		return "time"
	case beyond:
		return "units"
	case undecided:
		return "checks"
	case extraTrips:
		return "p50"
	case nsLoan:
		return "time"
	case messagesSent:
		return "messages sent"
	case allocations:
		return "allocations a decision"
	case leftOver:
		return "units"
	}
	return string(m)
}

// titleOfWork is a workload's name for people.
func titleOfWork(work string) string {
	switch work {
	case "unary":
		return "One node, unary gRPC, 1 check a call, 256 callers"
	case "batch":
		return "One node, 100 checks a call, 32 callers"
	case "stream":
		return "One connection, 256 messages of one check in flight"
	case "resp":
		return "Redis protocol, 16 connections, 100 commands at a time"
	case "envoy":
		return "Envoy's rate limit service, one node, 1 descriptor a call, 256 callers"
	case "kuadrant-check":
		return "Kuadrant's CheckRateLimit, one node, 1 descriptor a call, 256 callers"
	case "kuadrant-reserve":
		return "Kuadrant's Reserve and Commit, one node, 1 descriptor, both calls counted as one decision, 256 callers"
	case "client":
		return "Client libraries, 256 goroutines, one check at a time, one server"
	case "three-unary":
		return "Three nodes, random entry, unary gRPC, 1 check a call, 256 callers"
	case "three-batch":
		return "Three nodes, random entry, 100 checks a call, 32 callers"
	case "three-client":
		return "Three nodes, Go client, 256 goroutines"
	case "single":
		return "One caller, every check forwarded"
	case "http":
		return "HTTP, 256 connections"
	case "forward-auth":
		return "HTTP for gateways (forward-auth), 256 connections"
	case "hot-client":
		return "One hot key, three nodes, Go client, 256 goroutines"
	case "hot-unary":
		return "One hot key, three nodes, unary gRPC, 256 callers"
	case lendHotWork:
		return "Loans: one hot key under its limit, three nodes, Go client, 256 goroutines"
	case lendBusyWork:
		return "Loans: 1000 busy keys (Zipf), three nodes, Go client, 256 goroutines"
	case lendForwardWork:
		return "Loans: one hot key, unary gRPC, 1 check a call, 256 callers, one node asked"
	case lendFillWork:
		return "Loans: a limit of 10⁶ filled by 10 clients at once"
	case lendUniformWork:
		return "Loans: 1 M keys, all alike, three nodes, Go client, 256 goroutines"
	case ownBatchWork:
		return "Durability: one node of two, 100 checks a call, 32 callers, about 50,000 keys"
	case ownFewWork:
		return "Durability: one node of two, 100 checks a call, 32 callers, 1000 keys"
	case ownUnaryWork:
		return "Durability: one node of two, unary gRPC, 1 check a call, 256 callers, about 50,000 keys"
	case ownPacedWork:
		return "Durability: one node of two, 20,000 checks/s in calls of 100, about 50,000 keys"
	case ownPacedFewWork:
		return "Durability: one node of two, 20,000 checks/s in calls of 100, 1000 keys"
	case shedWork:
		return "Up to ten times the callers: three nodes, 100 checks a call, 1 to 10 × 32 callers who give up after 100 ms"
	case strangersWork:
		return "Strangers: one node, 32 callers × 100 checks a call, and 5,000 connections without a call"
	case "overload":
		return "Overload: three nodes, 32 callers × 1000 checks a call"
	}
	return work
}

// markdown writes, and keeps the first error and the notes that belong below a table.
type markdown struct {
	w     io.Writer
	err   error
	notes []string
}

func (m *markdown) printf(format string, args ...any) {
	m.flush()
	m.write(fmt.Sprintf(format, args...))
}

func (m *markdown) write(s string) {
	if m.err == nil {
		_, m.err = io.WriteString(m.w, s)
	}
}

func (m *markdown) row(cells ...string) {
	for i := range cells {
		cells[i] = strings.ReplaceAll(cells[i], "|", `\|`)
	}
	m.write("| " + strings.Join(cells, " | ") + " |\n")
}

func (m *markdown) note(format string, args ...any) {
	m.notes = append(m.notes, fmt.Sprintf(format, args...))
}

func (m *markdown) flush() {
	notes := m.notes
	m.notes = nil
	for _, n := range notes {
		m.write("\n" + n + "\n")
	}
}
