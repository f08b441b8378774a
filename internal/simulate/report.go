package simulate

import (
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"io"
	"os"
	"strconv"
	"text/tabwriter"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/dustin/go-humanize/english"
)

// uPlot (https://github.com/leeoniya/uPlot) 1.6.32, MIT: see uplot.LICENSE. Each report contains it, and loads nothing.
var (
	//go:embed uplot.min.js
	uplotJS string
	//go:embed uplot.min.css
	uplotCSS string
	//go:embed report.html
	reportHTML string
)

// Report is a Result and information about its input.
type Report struct {
	*Result
	Input     string    `json:"input"`
	Malformed int64     `json:"malformed_lines"`
	BadLines  []BadLine `json:"first_malformed,omitempty"`
}

// Counts returns how much was replayed: "2,700 requests of 1 key".
func (r *Report) Counts() string {
	return humanize.Comma(r.Events) + " " + english.PluralWord(int(r.Events), "request", "") + " of " +
		humanize.Comma(int64(r.Keys)) + " " + english.PluralWord(r.Keys, "key", "")
}

// WriteTable writes the report as a table for people.
func (r *Report) WriteTable(w io.Writer) error {
	fmt.Fprintf(w, "%s: %s", r.Input, r.Counts())
	if r.Events > 0 {
		fmt.Fprintf(w, ", %s to %s", r.From.Format(time.RFC3339), r.To.Format(time.RFC3339))
	}
	fmt.Fprintln(w)
	if r.OutOfOrder > 0 {
		fmt.Fprintf(w, "logged out of order, counted at the newest time before them: %s\n",
			humanize.Comma(r.OutOfOrder))
	}
	if r.Malformed > 0 {
		fmt.Fprintf(w, "malformed lines, left out: %s\n", humanize.Comma(r.Malformed))
		for _, b := range r.BadLines {
			fmt.Fprintf(w, "  line %d %s: %s\n", b.Number, b.Message, b.Text)
		}
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	suggests := len(r.Candidates) > 0 && r.Candidates[0].Suggestion != nil
	fmt.Fprint(t, "POLICY\tALGORITHM\tLIMIT\tADMITTED\tREFUSED\tMOST IN A WINDOW\tCALLERS TOUCHED\tLONGEST WAIT\tSTATES")
	if suggests {
		fmt.Fprint(t, "\tSMALLEST LIMIT")
	}
	fmt.Fprintln(t)
	for i := range r.Candidates {
		c := &r.Candidates[i]
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s (%s)\t%s\t%d (%s)\t%s\t%s", c.Policy, c.Algorithm, c.Limits,
			humanize.Comma(c.Admitted), humanize.Comma(c.Refused), r.RefusedShare(c), c.Worst.text(),
			c.CallersTouched, percent(c.ShareTouched), wait(c.LongestWait), humanize.IBytes(uint64(c.StateBytes)))
		if suggests {
			fmt.Fprintf(t, "\t%s", c.Suggestion)
		}
		fmt.Fprintln(t)
	}
	return t.Flush()
}

// RefusedShare returns the share of requests that a candidate refused, as text.
func (r *Report) RefusedShare(c *Candidate) string {
	if c.Admitted+c.Refused == 0 {
		return "0 %"
	}
	return percent(float64(c.Refused) / float64(c.Admitted+c.Refused))
}

func (w *Worst) text() string {
	if w.Window == 0 {
		return "-"
	}
	s := fmt.Sprintf("%d in %s", w.Units, w.Window)
	if w.Incomplete {
		s = "at least " + s
	}
	return s
}

// String returns the suggested limit, or why there is none.
func (s *Suggestion) String() string {
	if s.Limit == 0 {
		return "none: " + s.Reason
	}
	return fmt.Sprintf("%d (callers %s, requests %s)", s.Limit, percent(s.Callers), percent(s.Requests))
}

func percent(share float64) string { return strconv.FormatFloat(100*share, 'g', 3, 64) + " %" }

func wait(d time.Duration) string {
	if d > time.Second {
		return d.Round(10 * time.Millisecond).String()
	}
	return d.Round(time.Microsecond).String()
}

// WriteJSON writes the report as one JSON object.
func (r *Report) WriteJSON(w io.Writer) error {
	return json.NewEncoder(w).Encode(r)
}

// WriteHTML writes the report as one HTML page with charts. The page loads nothing.
func (r *Report) WriteHTML(w io.Writer) error {
	t, err := template.New("report").Funcs(template.FuncMap{
		"comma": humanize.Comma, "bytes": func(n int64) string { return humanize.IBytes(uint64(n)) },
		"percent": percent, "wait": wait, "worst": func(w Worst) string { return w.text() },
		"css":  func() template.CSS { return template.CSS(uplotCSS) },
		"js":   func() template.JS { return template.JS(uplotJS) },
		"when": func(t time.Time) string { return t.Format("2006-01-02 15:04:05.000 MST") },
	}).Parse(reportHTML)
	if err != nil {
		return err
	}
	return t.Execute(w, r)
}

// Write writes the report. If html is not empty, it writes a page with charts to that file (-: to stdout only).
// Otherwise, or after the file, it writes a table or JSON to stdout.
func (r *Report) Write(stdout io.Writer, html string, asJSON bool) error {
	switch html {
	case "":
	case "-":
		return r.WriteHTML(stdout)
	default:
		file, err := os.Create(html)
		if err != nil {
			return fmt.Errorf("html: %w", err)
		}
		if err := errors.Join(r.WriteHTML(file), file.Close()); err != nil {
			return fmt.Errorf("html: %w", err)
		}
	}
	if asJSON {
		return r.WriteJSON(stdout)
	}
	return r.WriteTable(stdout)
}
