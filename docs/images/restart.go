package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/internal/node"
	"github.com/weirlimit/weir/policy"
)

// What the rolling restart is under: of one key, and at how many checks a second.
const (
	restartLimit   = 200 // in a second
	restartOffered = 400
	restartWorkers = 32
	restartLength  = 40 * time.Second
	restartFirst   = 6 * time.Second // until the first node stops
	restartPause   = 4 * time.Second // between a node that is ready and the next that stops
)

// answer is a check as its sender saw it, in seconds since the beginning.
type answer struct {
	sent, came float64
	admitted   bool
	failed     bool // an error, or answered by on_error
}

// outage is a node's time between its stop and its readiness.
type outage struct {
	name     string
	from, to float64
}

// restart restarts three nodes one after the other while one key is asked about at twice its limit, and draws how many checks were
// certainly admitted within a second: sent and answered within it.
func restart(ctx context.Context) ([]byte, error) {
	set, err := policy.Parse("restart.yaml", fmt.Appendf(nil, "policies: [{name: api, algorithm: sliding_log, limit: %d, window: 1s}]", restartLimit))
	if err != nil {
		return nil, err
	}
	var nodes []*node.Node
	defer func() {
		for _, n := range nodes {
			n.Stop()
		}
	}()
	var addresses []string
	configs := make([]node.Config, 3)
	for i := range configs {
		configs[i] = node.Config{
			Version: "picture", Name: fmt.Sprint("weir-", i), Bind: "127.0.0.1", GRPCPort: node.PortAny, GossipPort: node.PortAny, PeerPort: node.PortAny, Policies: set,
			Timeout: time.Second, Grace: 10 * time.Second, Logger: slog.New(slog.DiscardHandler),
		}
		if i > 0 {
			configs[i].Join = []string{nodes[0].GossipAddr()}
		}
		n, err := startNode(ctx, configs[i])
		if err != nil {
			return nil, err
		}
		nodes = append(nodes, n)
		addresses = append(addresses, n.GRPCAddr())
		// It comes back where it was.
		configs[i].GRPCPort, configs[i].GossipPort = portOf(n.GRPCAddr()), portOf(n.GossipAddr())
	}
	configs[0].Join = []string{nodes[1].GossipAddr()}

	c, err := client.Dial(ctx, strings.Join(addresses, ","), client.WithoutMemory())
	if err != nil {
		return nil, err
	}
	defer c.Close()
	began := time.Now()
	since := func() float64 { return time.Since(began).Seconds() }
	answers := make([][]answer, restartWorkers)
	loading, stop := context.WithTimeout(ctx, restartLength)
	defer stop()
	var workers sync.WaitGroup
	for w := range answers {
		workers.Go(func() {
			api := c.Policy("api")
			every := time.Second * restartWorkers / restartOffered
			time.Sleep(every * time.Duration(w) / restartWorkers) // one after the other
			tick := time.NewTicker(every)
			defer tick.Stop()
			for {
				select {
				case <-tick.C:
				case <-loading.Done():
					return
				}
				a := answer{sent: since()}
				d, err := api.Allow(ctx, "one key")
				a.came, a.admitted, a.failed = since(), err == nil && d.Allowed, err != nil || d.FailedOpen || d.FailedClosed
				answers[w] = append(answers[w], a)
			}
		})
	}
	outages, err := restartAll(loading, nodes, configs, since)
	workers.Wait()
	if err != nil {
		return nil, err
	}
	return drawRestart(slices.Concat(answers...), outages), nil
}

// restartAll restarts the nodes one after the other.
func restartAll(ctx context.Context, nodes []*node.Node, configs []node.Config, since func() float64) (outages []outage, err error) {
	wait := restartFirst
	for i := range nodes {
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil, errors.New("the restarts take too long")
		}
		o := outage{name: configs[i].Name, from: since()}
		nodes[i].Stop()
		if nodes[i], err = startNode(ctx, configs[i]); err != nil {
			return nil, err
		}
		o.to = since()
		outages = append(outages, o)
		wait = restartPause
	}
	return outages, nil
}

// startNode starts a node, and waits until it is ready.
func startNode(ctx context.Context, cfg node.Config) (*node.Node, error) {
	n, err := node.Start(ctx, cfg)
	if err != nil {
		return nil, err
	}
	select {
	case <-n.Settled():
		return n, nil
	case <-n.Failed():
		err = n.Err()
	case <-ctx.Done():
		err = ctx.Err()
	}
	n.Stop()
	return nil, err
}

func portOf(address string) node.Port {
	n, err := strconv.Atoi(address[strings.LastIndexByte(address, ':')+1:])
	if err != nil {
		return node.PortAny
	}
	return node.Port(n)
}

func drawRestart(answers []answer, outages []outage) []byte {
	slices.SortFunc(answers, func(a, b answer) int { return cmp.Compare(a.came, b.came) })
	const step, steps = 0.1, int(restartLength / (100 * time.Millisecond))
	var at, certain, offered []float64
	worst, failed, slowest, admitted := 0, 0, 0.0, 0
	for _, a := range answers {
		if a.failed {
			failed++
		}
		if a.admitted {
			admitted++
		}
		slowest = max(slowest, a.came-a.sent)
	}
	// Of each second that ends with an answer.
	most := func(end float64) (n int) {
		i, _ := slices.BinarySearchFunc(answers, end, func(a answer, t float64) int {
			if a.came <= t {
				return -1
			}
			return 1
		})
		for i--; i >= 0 && answers[i].came >= end-1; i-- {
			if answers[i].admitted && answers[i].sent >= end-1 {
				n++
			}
		}
		return n
	}
	for _, a := range answers {
		worst = max(worst, most(a.came))
	}
	for i := range steps {
		end := float64(i) * step
		all := 0
		for _, a := range answers {
			if a.sent >= end-step && a.sent < end {
				all++
			}
		}
		at, certain, offered = append(at, end), append(certain, float64(most(end))), append(offered, float64(all)/step)
	}
	smooth := make([]float64, len(offered)) // over a second
	for i := range offered {
		from := max(0, i-9)
		for _, v := range offered[from : i+1] {
			smooth[i] += v / float64(i+1-from)
		}
	}
	d := newDrawing(880, 330, "A rolling restart under load",
		fmt.Sprintf("Three nodes restart one after the other while one key is asked about at twice its limit: at most %d checks are admitted in any second, at a limit of %d, and %d of %d fail.", worst, restartLimit, failed, len(answers)))
	d.text(24, 30, "title", "Three nodes restart, one after the other, under load: one key, limit %d a second", restartLimit)
	p := &plot{drawing: d, x: 64, y: 70, w: 792, h: 200, from: 0, to: restartLength.Seconds(), most: restartOffered * 1.15}
	for _, o := range outages {
		p.rect(p.px(o.from), p.y, p.px(o.to)-p.px(o.from), p.h, "band")
		p.text((p.px(o.from)+p.px(o.to))/2, p.y-8, "soft middle", "%s restarts", o.name)
	}
	for _, v := range []float64{0, restartLimit, restartOffered} {
		p.rule(p.x, p.py(v), p.x+p.w, p.py(v), "grid")
		p.text(p.x-8, p.py(v)+4, "soft end", "%.0f", v)
	}
	p.outline("offered", at, smooth)
	p.filled("area", at, certain)
	p.outline("line", at, certain)
	p.rule(p.x, p.py(restartLimit), p.x+p.w, p.py(restartLimit), "limit")
	p.text(p.px(1.2), p.py(restartOffered)-10, "soft", "offered in a second")
	p.text(p.px(1.2), p.py(restartLimit)-7, "soft", "limit")
	p.text(p.px(1.2), p.py(restartLimit/2), "", "admitted in the last second")
	for s := 0.0; s <= p.to; s += 5 {
		p.text(p.px(s), p.y+p.h+16, "soft middle", "%.0f s", s)
	}
	class := "good"
	if worst > restartLimit || failed > 0 {
		class = "bad"
	}
	d.text(24, 314, class, "%d checks, %d admitted: at most %d in any second; %d failed; slowest answer %.0f ms", len(answers), admitted, worst, failed, slowest*1000)
	return d.done()
}
