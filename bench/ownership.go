package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/ring"
)

// What keeping counters costs and does: moves of partitions, crashes, and copies. All workloads of this part have names
// that begin with own-, so that -only '^own-' runs it alone. It has no peers to compare with, for none of them does this:
// it is held against the project's own numbers, and the levels of durability against one another.
const (
	moveWork        = "own-move"
	crashWork       = "own-crash"
	ownBatchWork    = "own-batch"
	ownFewWork      = "own-few"
	ownUnaryWork    = "own-unary"
	ownPacedWork    = "own-paced"
	ownPacedFewWork = "own-paced-few"
	syncWork        = "own-sync"
	syncFarWork     = "own-sync-far"

	withoutCopies = "weir-none"
	withAsync     = "weir-async"
	withEscrow    = "weir-escrow"
	withSync      = "weir-sync"

	movedPolicy   = "async"
	countedPolicy = "counted"
	probePolicy   = "probe"

	countedAllowed = 100
)

// ownPolicies has one policy for each durability, all alike otherwise, with a limit that even few keys stay far from; one that
// counts exactly, whose window is so long that nothing comes back while the harness looks; and one that never refuses, to
// find out whether anybody decides.
const ownPolicies = `policies:
  - {name: none, algorithm: token_bucket, limit: 1000000, window: 1m, durability: none}
  - {name: async, algorithm: token_bucket, limit: 1000000, window: 1m, durability: async}
  - {name: escrow, algorithm: token_bucket, limit: 1000000, window: 1m, durability: escrow}
  - {name: sync, algorithm: token_bucket, limit: 1000000, window: 1m, durability: sync}
  - {name: counted, algorithm: sliding_log, limit: 100, window: 24h}
  - {name: probe, algorithm: token_bucket, limit: 1000000, window: 1s}
`

const (
	parkedP99  metric = "parked_p99_ms" // extra delay of the checks in flight at a hand-over, ms
	parkedMax  metric = "parked_max_ms" // the largest of them
	parkedSeen metric = "parked_checks" // how many there were
	movingP99  metric = "moving_p99_ms" // extra delay of all checks from the change of membership until all is calm
	movingMax  metric = "moving_max_ms" // the largest of them
	// The same of checks for a partition that stays where it is: what the machine does, and not the move.
	stillParkedP99 metric = "still_parked_p99_ms"
	stillParkedMax metric = "still_parked_max_ms"
	stillMovingP99 metric = "still_moving_p99_ms"
	stillMovingMax metric = "still_moving_max_ms"
	moveTime       metric = "move_s"         // from the change of membership until the partition's hand-over
	beyond         metric = "beyond_limits"  // units that were admitted beyond limits
	heldBack       metric = "held_back"      // units that were refused although they were left
	undecided      metric = "undecided"      // checks that nobody decided: failed_open, failed_closed, errors
	decidedIn      metric = "decided_s"      // from SIGKILL until all partitions are decided again
	halfIn         metric = "half_decided_s" // the same until half of the dead node's are
	share          metric = "share"          // partitions that the dead node held
	partnerCPU     metric = "partner_cpu"    // CPU seconds a million decisions of the node that holds the copies only
	noneP50        metric = "none_p50_us"    // latency of a single caller, without copies
	syncP50        metric = "sync_p50_us"    // the same with sync
	tripP50        metric = "round_trip_us"  // what one round trip between processes takes
	extraTrips     metric = "extra_trips"    // (sync − none) / round trip
)

// ownershipMeasurements are those of this part.
func (b *bench) ownershipMeasurements() []measurement {
	return append(b.durableMeasurements(),
		measurement{work: syncWork, system: "weir", run: b.syncLatency},
		measurement{work: syncFarWork, system: "weir", run: b.syncFarLatency},
		measurement{work: moveWork, system: "weir", run: b.move},
		measurement{work: crashWork, system: "weir", run: b.crash},
	)
}

// ownershipTargets are the numbers that the project means to reach. Of the steady cost the verdict is by the rate, which
// is what was promised; callers and the partner share the cores with the node asked, so the CPU of that node alone, at a
// rate that is the same for all, stands beside it, as the cost with all else left out.
func ownershipTargets() []target {
	const (
		least = true
		most  = false
		tenth = 1 / 0.9 // of the throughput of a node that has nothing but its CPU to run out of
	)
	t := []target{
		{"planned move of 25,000 keys under load: parked, p99, ms", moveWork + "/weir", "", parkedP99, 50, most},
		{"planned move: units admitted beyond limits", moveWork + "/weir", "", beyond, 0, most},
		{"planned move: checks that nobody decided", moveWork + "/weir", "", undecided, 0, most},
		{"SIGKILL of one of three: all partitions decided again, s", crashWork + "/weir", "", decidedIn, 4, most},
	}
	for _, w := range []struct {
		work, words string
		figure      metric
		bound       float64
		least       bool
	}{
		{ownBatchWork, "100 checks a call, 50,000 keys: the verdict", rate, 0.9, least},
		{ownFewWork, "100 checks a call, 1000 keys: the verdict", rate, 0.9, least},
		{ownUnaryWork, "1 check a call, 50,000 keys: the verdict", rate, 0.9, least},
		{ownPacedWork, "20,000 checks/s, 50,000 keys: the node asked alone", serverCPU, tenth, most},
		{ownPacedFewWork, "20,000 checks/s, 1000 keys: the node asked alone", serverCPU, tenth, most},
	} {
		for _, system := range []string{withAsync, withEscrow} {
			_, level, _ := strings.Cut(system, "-")
			t = append(t, target{level + " over none, " + w.words, w.work + "/" + system, w.work + "/" + withoutCopies, w.figure, w.bound, w.least})
		}
	}
	return append(t,
		// A little above 1, since what a node does with a message is time, too.
		target{"sync over none, nodes 10 ms apart: extra round trips", syncFarWork + "/weir", "", extraTrips, 1.2, most},
		target{"sync over none, loopback: by the extra time of a forwarded call", syncWork + "/weir", "", extraTrips, 1, most},
	)
}

// A place is where a node runs: its name and what its command line has besides what all have.
type place struct {
	name string
	args []string
}

// nodeName is the i-th node's.
func nodeName(i int) string { return "weir-" + strconv.Itoa(i) }

// startOwn starts a cluster for this part and waits until it is calm. Its nodes have all the time they need to leave, and
// log what they take over.
func (b *bench) startOwn(ctx context.Context, nodes int, args ...[]string) (w *weirCluster, err error) {
	w = &weirCluster{}
	defer func() {
		if err != nil {
			b.kids.kill(w.servers...)
		}
	}()
	for i := range nodes {
		at := place{name: nodeName(i)}
		if i < len(args) {
			at.args = args[i]
		}
		if err := b.joinOwn(ctx, w, at); err != nil {
			return w, err
		}
	}
	return w, w.calm(ctx)
}

// joinOwn adds a node to a cluster. It does not wait for the cluster to be calm.
func (b *bench) joinOwn(ctx context.Context, w *weirCluster, at place) error {
	policies := filepath.Join(b.dir, "own-policies.yaml")
	if err := os.WriteFile(policies, []byte(ownPolicies), 0o644); err != nil {
		return err
	}
	args := append([]string{"--log-level", "info", "--grace", "30s"}, at.args...)
	if len(w.nodes) > 0 && len(at.args) == 0 {
		args = append(args, "--join", w.nodes[0].gossip)
	}
	p, n, err := b.startNode(ctx, at.name, policies, args...)
	if p != nil {
		w.servers = append(w.servers, p)
	}
	if err != nil {
		return err
	}
	clients, err := limiterClients(n.grpc)
	if err != nil {
		return err
	}
	w.nodes, w.clients = append(w.nodes, n), append(w.clients, clients)
	return nil
}

// dismiss takes the last node out of a cluster's lists, once its process has been told to end.
func (w *weirCluster) dismiss() {
	last := len(w.servers) - 1
	w.nodes, w.servers, w.clients = w.nodes[:last], w.servers[:last], w.clients[:last]
}

// calm waits until the nodes are a cluster to themselves, each holds what the ring gives it, nothing is on its way, and
// all copies are where they belong.
func (w *weirCluster) calm(ctx context.Context) error {
	const quiet = 3 // looks in a row that must find it so, since a move may be about to begin
	found := 0
	return within(ctx, calmLimit, 50*time.Millisecond, func(ctx context.Context) error {
		found++
		for i, c := range w.clients {
			if err := w.servers[i].alive(); err != nil {
				return err
			}
			s, err := c[0].Status(ctx, &weirv1.StatusRequest{})
			if err == nil {
				err = trouble(s, len(w.nodes))
			}
			if err != nil {
				found = 0
				return err
			}
		}
		if found < quiet {
			return errors.New("calm for a moment only")
		}
		return nil
	})
}

// calmLimit bounds how long a cluster may take to become calm.
const calmLimit = time.Minute

// trouble says why a node does not yet find its cluster of so many members calm.
func trouble(s *weirv1.StatusResponse, size int) error {
	if !s.Ready || len(s.Members) != size {
		return fmt.Errorf("%s sees %d members: %s", s.Node, len(s.Members), s.ReadyDetail)
	}
	for _, m := range s.Members {
		o := m.GetOwnership()
		switch {
		case m.State != "active" || !m.Reachable || o == nil:
			return fmt.Errorf("%s sees %s as %s, reachable %t", s.Node, m.Name, m.State, m.Reachable)
		case o.Held != m.Partitions || o.Moving+o.Awaited > 0:
			return fmt.Errorf("%s is to have %d partitions and holds %d, %d on their way from it, %d to it", m.Name, m.Partitions, o.Held, o.Moving, o.Awaited)
		case o.Degraded > 0 && size > 1:
			return fmt.Errorf("%d partitions of %s have no copy", o.Degraded, m.Name)
		}
	}
	return nil
}

// within calls f again and again until it returns nil, for so long at most.
func within(ctx context.Context, limit, pause time.Duration, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		err := f(ctx)
		if err == nil {
			return nil
		}
		wait(ctx, pause)
		if ctx.Err() != nil {
			return fmt.Errorf("not within %v: %w", limit, err)
		}
	}
}

// ownerOf is the name of the member that the ring of so many nodes gives a partition to.
func ownerOf(t *ring.Table, partition int) string { return t.Members()[t.Owner(partition)] }

// tableOf is the ring of the first so many nodes.
func tableOf(nodes int) *ring.Table {
	var names []string
	for i := range nodes {
		names = append(names, nodeName(i))
	}
	return ring.Build(names)
}

// partitionOf is where a key of a policy is, in a cluster without a secret.
func partitionOf(policy, key string) int {
	return ring.Partition(ring.Hash(ring.HashKey{}, policy, key))
}

// keysIn returns n keys of a policy that are all in one partition. It has to try 4093 for each of them, so it uses all
// cores; 25,000 keys take some seconds.
func keysIn(partition int, policy string, n, workers int) []string {
	found := make([][]string, workers)
	var work sync.WaitGroup
	for w := range workers {
		work.Go(func() {
			key := []byte("user:0000000000000")
			var digits [20]byte
			want := n / workers
			if w < n%workers {
				want++
			}
			for i := int64(w); len(found[w]) < want; i += int64(workers) {
				d := strconv.AppendInt(digits[:0], i, 10)
				copy(key[len(key)-len(d):], d)
				if partitionOf(policy, string(key)) == partition {
					found[w] = append(found[w], string(key))
				}
			}
		})
	}
	work.Wait()
	var all []string
	for _, f := range found {
		all = append(all, f...)
	}
	return all
}

// ownedBy are those of the keys that a member owns under a policy.
func ownedBy(t *ring.Table, member, policy string, keys []string) []string {
	var own []string
	for _, k := range keys {
		if ownerOf(t, partitionOf(policy, k)) == member {
			own = append(own, k)
		}
	}
	return own
}

// writeOwnership prints the figures that the usual tables have no columns for.
func (r *report) writeOwnership(m *markdown) {
	byWork := make(map[string]*figures)
	for i := range r.Figures {
		if f := &r.Figures[i]; len(f.Spreads) > 0 {
			byWork[f.Work] = f
		}
	}
	if f := byWork[moveWork]; f != nil {
		m.printf("\n## Planned moves: a partition with %d keys, %d checks/s on them\n\n"+
			"A node joins and leaves again; checks are asked through the two that stay. Delays are beyond the median of the same "+
			"checks while nothing moves. A parked check is one that was in flight when the new holder took over.\n\n", movedKeys, moveRate)
		m.row("checks of", "p99 ms, at the hand-over", "max ms", "p99 ms, while anything moves", "max ms")
		m.row("---", "---:", "---:", "---:", "---:")
		m.row("the partition that moves", f.cell(parkedP99, 1), f.cell(parkedMax, 1), f.cell(movingP99, 1), f.cell(movingMax, 1))
		m.row("one that stays", f.cell(stillParkedP99, 1), f.cell(stillParkedMax, 1), f.cell(stillMovingP99, 1), f.cell(stillMovingMax, 1))
		m.printf("\n%s checks were in flight at a hand-over, which came %s s after a node began to join or leave. Beyond limits %s, "+
			"held back %s, not decided %s.\n", f.cell(parkedSeen, 1), f.cell(moveTime, 1), f.cell(beyond, 1), f.cell(heldBack, 1), f.cell(undecided, 1))
	}
	if f := byWork[crashWork]; f != nil {
		m.printf("\n## SIGKILL of one of three nodes\n\nOne key of every partition is asked through a survivor until it is decided.\n\n")
		m.row("all decided after s", "half of the dead node's after s", "partitions it held")
		m.row("---:", "---:", "---:")
		m.row(f.cell(decidedIn, 1), f.cell(halfIn, 1), f.cell(share, 1))
	}
	began := false
	for _, w := range []struct{ work, apart, trip string }{
		{syncWork, "loopback", "a forwarded call less a call"},
		{syncFarWork, fmt.Sprintf("%v", 2*oneWay), "a call across the distance less a call"},
	} {
		f := byWork[w.work]
		if f == nil {
			continue
		}
		if !began {
			began = true
			m.printf("\n## What sync adds for a single caller\n\np50, µs; the owner is asked itself.\n\n")
			m.row("nodes apart", "none", "sync", "one round trip", "measured as", "extra, in round trips")
			m.row("---", "---:", "---:", "---:", "---", "---:")
		}
		m.row(w.apart, f.cell(noneP50, 1), f.cell(syncP50, 1), f.cell(tripP50, 1), w.trip, f.cell(extraTrips, 1))
	}
}
