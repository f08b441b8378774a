package main

import (
	"context"
	"io"
	"slices"
	"time"

	"github.com/weirlimit/weir/internal/simulate"
	"github.com/weirlimit/weir/policy"
)

// burst draws how many requests each of four policies that say "200 a minute" has admitted in the last minute, when
// callers come in bursts at the full minute.
func burst() ([]byte, error) {
	set, err := policy.Load("docs/examples/candidates.yaml")
	if err != nil {
		return nil, err
	}
	requests := list(traffic())
	result, err := simulate.Run(context.Background(), simulate.Config{Source: &requests, Policies: set.Policies()})
	if err != nil {
		return nil, err
	}
	const limit, most = 200, 440
	d := newDrawing(880, 420, "Bursts at the full minute, at a limit of 200 a minute",
		"Requests admitted in the last minute by a fixed window, which reaches 400, and by a sliding log, a sliding window and a token bucket, which stay at or below 200.")
	d.text(24, 30, "title", "Admitted in the last minute, at a limit of 200 a minute, under three bursts of 500")
	names := map[string]string{"fixed": "fixed window", "exact": "sliding log", "slots": "sliding window",
		"bucket": "token bucket"}
	for i, order := range []string{"fixed", "exact", "slots", "bucket"} {
		for j := range result.Candidates {
			c := &result.Candidates[j]
			if c.Policy != order {
				continue
			}
			p := &plot{drawing: d, x: float64(64 + i%2*416), y: float64(76 + i/2*176), w: 376, h: 110, from: 0,
				to: result.To.Sub(result.From).Seconds(), most: most}
			drawWindow(p, c, result.BinWidth, limit, names[order])
		}
	}
	d.text(24, 410, "soft", "The largest number in any minute is exact, as weir simulate finds it; the curves are in steps of %v.", result.BinWidth)
	return d.done(), nil
}

// traffic is a request a second for six minutes and, around each second full minute, 500 more within four seconds.
func traffic() (at []int64) {
	for second := range 6 * 60 {
		at = append(at, int64(second)*int64(time.Second))
	}
	for _, minute := range []time.Duration{1, 3, 5} {
		for i := range time.Duration(500) {
			at = append(at, int64(minute*time.Minute-2*time.Second+i*8*time.Millisecond))
		}
	}
	slices.Sort(at)
	return at
}

// list is a simulate.Source of requests of one caller.
type list []int64

// Read implements simulate.Source.
func (l *list) Read(e *simulate.Event) error {
	if len(*l) == 0 {
		return io.EOF
	}
	*e = simulate.Event{At: (*l)[0], Key: []byte("caller"), Cost: 1}
	*l = (*l)[1:]
	return nil
}

func drawWindow(p *plot, c *simulate.Candidate, bin time.Duration, limit float64, name string) {
	window := int(time.Minute / bin)
	var at, admitted []float64
	sum := 0.0
	for i := range c.Timeline {
		sum += float64(c.Timeline[i].Admitted)
		if i >= window {
			sum -= float64(c.Timeline[i-window].Admitted)
		}
		at, admitted = append(at, float64(i)*bin.Seconds()), append(admitted, sum)
	}
	class := "good"
	if c.Worst.Units > int64(limit) {
		class = "bad"
	}
	p.text(p.x, p.y-10, "title", "%s", name)
	p.text(p.x+p.w, p.y-10, class+" end", "at most %d in a minute", c.Worst.Units)
	for _, v := range []float64{0, limit, 2 * limit} {
		p.rule(p.x, p.py(v), p.x+p.w, p.py(v), "grid")
		p.text(p.x-8, p.py(v)+4, "soft end", "%.0f", v)
	}
	p.filled("area", at, admitted)
	if c.Worst.Units > int64(limit) {
		over := make([]float64, len(admitted))
		for i, v := range admitted {
			over[i] = max(v, limit)
		}
		p.between("over", at, over, limit)
	}
	p.outline("line", at, admitted)
	p.rule(p.x, p.py(limit), p.x+p.w, p.py(limit), "limit")
	for m := 0.0; m <= p.to; m += 60 {
		p.text(p.px(m), p.y+p.h+16, "soft middle", "%.0f min", m/60)
	}
}
