package runner

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/store"
)

// pair is two nodes, of which the first holds all partitions and the second their copies. Their shells have no goroutine:
// the benchmark does what it would do.
type pair struct {
	now    int64
	stores [2]*store.Store
	nodes  [2]*Runner
}

// wire takes what one node of a pair sends straight to the other.
type wire struct {
	p  *pair
	to int
}

func (w wire) Send(list []ownership.Envelope) {
	w.p.nodes[w.to].Receive(list)
}

func newPair(partitions int) *pair {
	p := &pair{now: int64(time.Hour)}
	names := [2]ownership.Node{self, other}
	v := ownership.View{Settled: true, Owners: make([]int32, partitions), Backups: make([]int32, partitions)}
	for q := range v.Backups {
		v.Backups[q] = 1
	}
	for i, n := range names {
		v.Members = append(v.Members, ownership.Member{Node: n, Active: true})
		p.stores[i] = store.New(store.Config{Partitions: partitions})
		for q := range partitions {
			p.stores[i].Shut(q) // until the core opens it
		}
		p.nodes[i] = newRunner(Config{
			Core: ownership.Config{Self: n, Partitions: partitions, Data: p.stores[i]}, Sender: wire{p, 1 - i},
			Logger: slog.New(slog.DiscardHandler), Now: func() algo.Instant { return p.instant() },
			Boot: func() int64 { return p.now }, Version: p.stores[i].Version,
		})
		p.nodes[i].begin(ownership.New(p.nodes[i].cfg.Core, p.nodes[i].now()))
	}
	for _, k := range p.nodes {
		k.SetView(v)
	}
	return p
}

func (p *pair) instant() algo.Instant { return algo.Instant{Mono: p.now, Wall: p.now} }

// pass lets 10 ms pass, and everything that is sent arrive.
func (p *pair) pass() {
	p.now += int64(tickEvery)
	for _, k := range p.nodes {
		k.tick()
	}
	for more := true; more; {
		more = false
		for _, k := range p.nodes {
			if len(k.wake) > 0 {
				<-k.wake
				k.turn()
				more = true
			}
		}
	}
}

// BenchmarkCopies is one decision for one of 50,000 keys all over the partitions, 20,000 a second, with all that becomes of
// it: on the node that decides and on the one that keeps the copy, but for the way between them.
func BenchmarkCopies(b *testing.B) {
	const partitions, keys, perTick = 2046, 50_000, 200
	for _, d := range []struct {
		name       string
		durability store.Durability
	}{{"none", store.None}, {"async", store.Async}, {"escrow", store.Escrow}} {
		b.Run(d.name, func(b *testing.B) {
			p := newPair(partitions)
			rule := &store.Rule{Scope: "p", Durability: d.durability, Limits: algo.Limits{
				{Algorithm: algo.TokenBucket, Limit: 1_000_000, Window: time.Minute},
			}}
			if err := rule.Limits.Validate(); err != nil {
				b.Fatal(err)
			}
			for range 200 {
				p.pass()
			}
			if st := p.nodes[0].core.Status(p.nodes[0].now()); st.Held != partitions || st.Degraded > 0 {
				b.Fatalf("%+v", st)
			}
			all := make([]store.Key, keys)
			for i := range all {
				hash := uint64(i) * 0x9e3779b97f4a7c15
				all[i] = store.Key{Hash: hash, Partition: int(hash % partitions), Key: fmt.Sprintf("user:%013d", i)}
			}
			call := store.Call{Request: algo.Request{Cost: 1}}
			decided := 0
			decide := func(k store.Key) {
				if _, err := p.stores[0].Decide(k, rule, p.instant(), call, nil); err != nil {
					b.Fatal(err)
				}
				if decided++; decided%perTick == 0 {
					p.pass()
				}
			}
			for _, k := range all {
				decide(k)
			}
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				i++
				decide(all[uint64(i)*0x9e3779b97f4a7c15>>32%keys])
			}
		})
	}
}
