package main

import (
	"context"
	"fmt"
	"time"

	"github.com/weirlimit/weir/client"
)

// What a decision costs on a cluster and on one node: E is the CPU of a decision on one node divided by its CPU on many
// nodes, summed over them. Both have their callers on this machine. Many are three unless -nodes says otherwise. E
// would be 1 if three nodes carried three times as much as one.

const (
	scaleKeys = 10_000 // all asked for equally often
	scaleWork = "scale-"
	idleWork  = scaleWork + "idle"
)

// A scaled row is one kind of callers with one durability.
type scaled struct {
	callers, durability string
	title               string
	goal                float64 // of E; 0: no goal
}

func scaledRows() []scaled {
	const (
		goClient = "Go client, 256 goroutines"
		batches  = "batches of 100, 32 callers, any node"
		unary    = "unary, 256 callers, any node"
	)
	return []scaled{
		{"client", "none", goClient, 0.75}, {"client", "async", goClient, 0.5}, {"client", "escrow", goClient, 0},
		{"batch", "none", batches, 0.5}, {"batch", "async", batches, 0.35}, {"batch", "escrow", batches, 0},
		{"unary", "none", unary, 0.42}, {"unary", "async", unary, 0}, {"unary", "escrow", unary, 0},
	}
}

// idleGoal is the CPU of a node without callers, in percent of a core.
const idleGoal = 1

func (r scaled) work() string { return scaleWork + r.callers + "-" + r.durability }

func (r scaled) ask(keys []string) (callers int, ask asking) {
	switch r.callers {
	case "client":
		return unaryCallers, goClient(r.durability, among(keys), client.WithoutLoans())
	case "batch":
		return batchCallers, checks(r.durability, batchSize, among(keys))
	default:
		return unaryCallers, singles("grpc", r.durability, among(keys))
	}
}

// scale measures one node and many nodes of this build, and of the other build if there is one, all with default flags.
func (b *bench) scale() []workload {
	var all []workload
	for _, r := range scaledRows() {
		callers, ask := r.ask(b.keys[:min(len(b.keys), scaleKeys)])
		w := workload{r.work(), "Scale: " + r.title + ", `" + r.durability + "`", []row{
			b.driven("one", callers, b.plainOne, ask), b.driven("many", callers, b.plainMany, ask),
		}}
		if b.beside != "" {
			w.rows = append(w.rows,
				b.driven("beside-one", callers, b.besideOne, ask),
				b.driven("beside-many", callers, b.besideMany, ask))
		}
		all = append(all, w)
	}
	idle := workload{idleWork, "Scale: many nodes without callers", []row{b.idle("many", b.idleMany)}}
	if b.beside != "" {
		idle.rows = append(idle.rows, b.idle("beside-many", b.besideIdleMany))
	}
	return append(all, idle)
}

// idle returns the row of the CPU of nodes without callers.
func (b *bench) idle(name string, start starter) row {
	return row{system: name, run: func(ctx context.Context) (sample, error) {
		s, err := start()
		if err != nil {
			return nil, err
		}
		wait(ctx, 2*b.warm) // until work of the start and of the last round is done
		l := loop{servers: s.servers}
		from, err := l.read(nil)
		if err != nil {
			return nil, err
		}
		wait(ctx, max(3*b.measure, 2*time.Second)) // CPU is counted in steps of 10 ms
		to, err := l.read(nil)
		if err != nil {
			return nil, err
		}
		share := (to.server - from.server).Seconds() / to.at.Sub(from.at).Seconds()
		return sample{idleCPU: 100 * share / float64(len(s.servers))}, nil
	}}
}

// An efficiency is the result of one scaled row for one build: CPU of a decision in µs, and E.
type efficiency struct {
	One  *spread `json:"one_us,omitempty"`
	Many *spread `json:"many_us,omitempty"`
	E    *spread `json:"e,omitempty"`
}

// A scaling is the result of one scaled row.
type scaling struct {
	Callers    string     `json:"callers"`
	Durability string     `json:"durability"`
	Goal       float64    `json:"goal,omitempty"`
	This       efficiency `json:"this"`
	Beside     efficiency `json:"beside"`
	// RateToBeside is the decisions a second of many nodes, divided by those of the other build.
	RateToBeside *spread `json:"rate_to_beside,omitempty"`
}

// scalings returns the rows that have results.
func scalings(all map[string]*series) []scaling {
	var out []scaling
	for _, r := range scaledRows() {
		name := r.work() + "/"
		build := func(prefix string) efficiency {
			one, many := name+prefix+"one", name+prefix+"many"
			e := ratioOf(all, one, many, serverCPU)
			return efficiency{figureOf(all, one, serverCPU), figureOf(all, many, serverCPU), e}
		}
		s := scaling{r.title, r.durability, r.goal, build(""), build("beside-"), nil}
		s.RateToBeside = ratioOf(all, name+"many", name+"beside-many", rate)
		if s.This.One != nil || s.This.Many != nil {
			out = append(out, s)
		}
	}
	return out
}

// writeScale writes E.
func (r *report) writeScale(m *markdown) {
	nodes := fmt.Sprint(r.Nodes, " nodes")
	if len(r.Scale) > 0 {
		m.printf("\n## %d nodes beside one\n\nCPU of all nodes for a decision, µs, %d keys. E is that of one node "+
			"by that of %[1]d, taken within each round; beside it the same of the other build.\n\n", r.Nodes, scaleKeys)
		m.row("callers", "durability", "one node", nodes, "E", "goal",
			"beside: one node", nodes, "E", "rate of "+nodes+", by beside's")
		m.row("---", "---", "---:", "---:", "---:", "---:", "---:", "---:", "---:", "---:")
		for _, s := range r.Scale {
			goal := "–"
			if s.Goal > 0 {
				goal = "≥ " + number(s.Goal)
			}
			m.row(s.Callers, "`"+s.Durability+"`", cell(s.This.One), cell(s.This.Many), cell(s.This.E), goal,
				cell(s.Beside.One), cell(s.Beside.Many), cell(s.Beside.E), cell(s.RateToBeside))
		}
	}
	idle := func(system string) *spread {
		for _, f := range r.Figures {
			if s, ok := f.Spreads[idleCPU]; ok && f.System == system {
				return &s
			}
		}
		return nil
	}
	if this := idle("many"); this != nil {
		m.printf("\nA node of %d without callers takes %s %% of a core (goal: at most %d); ", r.Nodes, this, idleGoal)
		m.printf("of the other build %s %%.\n", cell(idle("beside-many")))
	}
}

// cell returns a spread for a table.
func cell(s *spread) string {
	if s == nil {
		return "–"
	}
	return fmt.Sprint(s)
}
