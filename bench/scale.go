package main

import (
	"context"
	"time"

	"github.com/weirlimit/weir/client"
)

// What a decision costs on a cluster and on one node: E is the CPU of a decision on one node divided by its CPU on many
// nodes, summed over them (the report's ratio of one to many). Both have their callers on this machine. Many are three
// unless -nodes says otherwise. E would be 1 if three nodes carried three times as much as one.

const (
	scaleKeys = 10_000 // all asked for equally often
	scaleWork = "scale-"
)

// scale measures one node and many nodes of this build, and of the other build if there is one, all with default flags.
func (b *bench) scale() []workload {
	keys := among(b.keys[:min(len(b.keys), scaleKeys)])
	var all []workload
	for _, w := range []struct {
		name, title string
		callers     int
		ask         func(durability string) asking
	}{
		{"client", "Go client, 256 goroutines", unaryCallers,
			func(durability string) asking { return goClient(durability, keys, client.WithoutLoans()) }},
		{"batch", "batches of 100, 32 callers, any node", batchCallers,
			func(durability string) asking { return checks(durability, batchSize, keys) }},
		{"unary", "unary, 256 callers, any node", unaryCallers,
			func(durability string) asking { return singles("grpc", durability, keys) }},
	} {
		for _, d := range []string{"none", "async", "escrow"} {
			work := workload{scaleWork + w.name + "-" + d, "Scale: " + w.title + ", `" + d + "`", []row{
				b.driven("one", w.callers, b.plainOne, w.ask(d)), b.driven("many", w.callers, b.plainMany, w.ask(d)),
			}}
			if b.beside != "" {
				work.rows = append(work.rows,
					b.driven("beside-one", w.callers, b.besideOne, w.ask(d)),
					b.driven("beside-many", w.callers, b.besideMany, w.ask(d)))
			}
			all = append(all, work)
		}
	}
	idle := workload{scaleWork + "idle", "Scale: many nodes without callers", []row{b.idle("many", b.idleMany)}}
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
