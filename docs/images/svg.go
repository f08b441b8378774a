package main

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"strings"
)

// drawing is an SVG that follows the reader's dark or light colours.
type drawing struct {
	bytes.Buffer
	width, height int
}

const style = `
text { font: 13px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #1b2329 }
.title { font-weight: 600; font-size: 15px } .soft { fill: #586672; font-size: 12px } .end { text-anchor: end } .middle { text-anchor: middle }
.paper { fill: #fff } .frame { fill: none; stroke: #d5dde3 } .grid { stroke: #e6ebef }
.limit { stroke: #c4372c; stroke-width: 1.5; stroke-dasharray: 6 4; fill: none } .over { fill: #c4372c; fill-opacity: .28 } .bad { fill: #c4372c; font-weight: 600 } .good { fill: #1a7f4b; font-weight: 600 }
.line { fill: none; stroke: #0b6e99; stroke-width: 2; stroke-linejoin: round } .area { fill: #0b6e99; fill-opacity: .16 } .offered { fill: none; stroke: #8a97a3; stroke-width: 1.2 }
.band { fill: #9a6700; fill-opacity: .15 }
@media (prefers-color-scheme: dark) {
  text { fill: #e4ebf0 } .soft { fill: #97a6b2 } .paper { fill: #0d1117 } .frame { stroke: #2b3741 } .grid { stroke: #1d262e }
  .limit { stroke: #ff7b6f } .over { fill: #ff7b6f } .bad { fill: #ff7b6f } .good { fill: #4cc38a } .line { stroke: #4fb3dd } .area { fill: #4fb3dd } .offered { stroke: #6d7a85 } .band { fill: #e3b341 }
}
`

func newDrawing(width, height int, title, description string) *drawing {
	d := &drawing{width: width, height: height}
	fmt.Fprintf(d, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" role="img" aria-labelledby="t d">`+"\n",
		width, height)
	fmt.Fprintf(d, "<title id=\"t\">%s</title><desc id=\"d\">%s</desc>\n<style>%s</style>\n", escaped(title),
		escaped(description), style)
	fmt.Fprintf(d, `<rect class="paper" width="%d" height="%d" rx="8"/>`+"\n", width, height)
	return d
}

func (d *drawing) done() []byte {
	d.WriteString("</svg>\n")
	return d.Bytes()
}

func escaped(s string) string {
	var b bytes.Buffer
	_ = xml.EscapeText(&b, []byte(s)) // a buffer takes everything
	return b.String()
}

func (d *drawing) text(x, y float64, class, format string, args ...any) {
	fmt.Fprintf(d, `<text x="%.1f" y="%.1f" class="%s">%s</text>`+"\n", x, y, class,
		escaped(fmt.Sprintf(format, args...)))
}

func (d *drawing) rule(x1, y1, x2, y2 float64, class string) {
	fmt.Fprintf(d, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" class="%s"/>`+"\n", x1, y1, x2, y2, class)
}

// plot is an area with axes.
type plot struct {
	*drawing
	x, y, w, h     float64 // where it is
	from, to, most float64 // what it shows: from..to, 0..most
}

func (p *plot) px(v float64) float64 { return p.x + (v-p.from)/(p.to-p.from)*p.w }
func (p *plot) py(v float64) float64 { return p.y + p.h - min(v/p.most, 1.04)*p.h }

// steps returns the outline of values, each from its place on.
func (p *plot) steps(at, values []float64) string {
	var b strings.Builder
	for i, v := range values {
		if i == 0 {
			fmt.Fprintf(&b, "M%.1f %.1f", p.px(at[i]), p.py(v))
			continue
		}
		if v != values[i-1] {
			fmt.Fprintf(&b, "H%.1fV%.1f", p.px(at[i]), p.py(v))
		}
	}
	fmt.Fprintf(&b, "H%.1f", p.px(p.to))
	return b.String()
}

func (p *plot) outline(class string, at, values []float64) {
	fmt.Fprintf(p, `<path class="%s" d="%s"/>`+"\n", class, p.steps(at, values))
}

func (p *plot) filled(class string, at, values []float64) { p.between(class, at, values, 0) }

// between fills what is between values and a level below them.
func (p *plot) between(class string, at, values []float64, level float64) {
	fmt.Fprintf(p, `<path class="%s" d="%sV%.1fH%.1fZ"/>`+"\n", class, p.steps(at, values), p.py(level), p.px(at[0]))
}
