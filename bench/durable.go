package main

import (
	"context"
	"fmt"
	"strings"
	"time"
)

const (
	fewKeys = 1000
	// pace makes 32 callers of 100 checks ask for 20,000 checks a second, which leaves the cores some rest.
	pace = batchCallers * batchSize * time.Second / 20_000
)

// durableMeasurements are one load under each durability, one after the other in each round. Of two nodes the one that
// owns all of the keys is asked; its partner has nothing to do but to hold the copies. Its CPU is told apart, since in a
// larger cluster it is somebody else's.
func (b *bench) durableMeasurements() []measurement {
	var all []measurement
	for _, w := range []struct {
		work           string
		callers, batch int
		keys           int           // at most; few are asked for again and again, of many each only now and then
		every          time.Duration // a caller's next call, however long the last one took; 0: at once
	}{
		{ownBatchWork, batchCallers, batchSize, keySpace, 0},
		{ownFewWork, batchCallers, batchSize, fewKeys, 0},
		{ownUnaryWork, unaryCallers, 1, keySpace, 0},
		{ownPacedWork, batchCallers, batchSize, keySpace, pace},
		{ownPacedFewWork, batchCallers, batchSize, fewKeys, pace},
	} {
		for _, system := range []string{withoutCopies, withAsync, withEscrow, withSync} {
			all = append(all, measurement{work: w.work, system: system, run: func(ctx context.Context) (sample, error) {
				pair, err := b.weirPair()
				if err != nil {
					return nil, err
				}
				_, policy, _ := strings.Cut(system, "-")
				keys := ownedBy(tableOf(2), pair.nodes[0].name, policy, b.keys)
				keys = keys[:min(len(keys), w.keys)]
				l := b.load(w.callers, pair.servers[0])
				l.partner = pair.servers[1]
				if w.every > 0 {
					l.measure = max(l.measure, 3*time.Second) // CPU is counted in steps, and there is little of it
				}
				got, err := l.drive(ctx, paced(w.every, checkCaller(pair.clients[:1], policy, w.batch, among(keys))))
				if err != nil {
					return nil, err
				}
				// What was measured must not have been a node without a partner.
				if err := pair.calm(ctx); err != nil {
					return nil, fmt.Errorf("after the load: %w", err)
				}
				return got, nil
			}})
		}
	}
	return all
}

// paced makes callers that take turns of a fixed length: what a decision costs depends on how many there are in the 25 ms
// between two messages to a copy, so costs can be compared at one rate only. A caller that is late goes on from there.
func paced(every time.Duration, newCaller func(i int) caller) func(i int) caller {
	if every == 0 {
		return newCaller
	}
	return func(i int) caller {
		c := newCaller(i)
		return func(ctx context.Context, r *recorder) {
			next := time.Now().Add(time.Duration(i) * every / batchCallers)
			r.pause = func() {
				wait(ctx, time.Until(next))
				next = next.Add(every)
				if now := time.Now(); next.Before(now) {
					next = now
				}
			}
			c(ctx, r)
		}
	}
}

// lonely is the median latency in µs of one caller that asks one check at a time.
func (b *bench) lonely(ctx context.Context, newCaller func(int) caller) (float64, error) {
	got, err := b.load(1).drive(ctx, newCaller)
	if err != nil {
		return 0, err
	}
	if got[failed] > 0 {
		return 0, fmt.Errorf("%.2g of a single caller's calls failed", got[failed])
	}
	return got[p50], nil
}

// lonelyPair is the latency of a single caller without copies and with sync.
func (b *bench) lonelyPair(ctx context.Context, pair *weirCluster) (none, sync float64, err error) {
	for _, l := range []struct {
		policy string
		into   *float64
	}{{"none", &none}, {"sync", &sync}} {
		keys := ownedBy(tableOf(2), pair.nodes[0].name, l.policy, b.keys)
		if *l.into, err = b.lonely(ctx, checkCaller(pair.clients[:1], l.policy, 1, among(keys))); err != nil {
			return 0, 0, fmt.Errorf("%s: %w", l.policy, err)
		}
	}
	return none, sync, pair.calm(ctx)
}

// syncLatency is what sync adds on loopback, against what a forwarded call takes longer than one that is not.
func (b *bench) syncLatency(ctx context.Context) (sample, error) {
	pair, err := b.weirPair()
	if err != nil {
		return nil, err
	}
	direct, err := b.echo()
	if err != nil {
		return nil, err
	}
	forwarded, err := b.forward()
	if err != nil {
		return nil, err
	}
	none, sync, err := b.lonelyPair(ctx, pair)
	if err != nil {
		return nil, err
	}
	near, err := b.lonely(ctx, checkCaller(direct.clients, "bucket", 1, b.anyKey))
	if err != nil {
		return nil, err
	}
	far, err := b.lonely(ctx, checkCaller(forwarded.clients, "bucket", 1, b.anyKey))
	if err != nil {
		return nil, err
	}
	return added(none, sync, far-near), nil
}

// added is what sync adds, in round trips.
func added(none, sync, trip float64) sample {
	s := sample{noneP50: none, syncP50: sync, tripP50: trip}
	if trip > 0 {
		s[extraTrips] = (sync - none) / trip
	}
	return s
}

// syncFarLatency is the same with the nodes so far apart that little but the round trips counts: on loopback the time goes
// into waking goroutines, of which a decision has more than an echo, whatever the number of round trips.
func (b *bench) syncFarLatency(ctx context.Context) (sample, error) {
	pair, err := b.weirFar()
	if err != nil {
		return nil, err
	}
	direct, err := b.echo()
	if err != nil {
		return nil, err
	}
	far, err := b.echoFar()
	if err != nil {
		return nil, err
	}
	none, sync, err := b.lonelyPair(ctx, pair)
	if err != nil {
		return nil, err
	}
	near, err := b.lonely(ctx, checkCaller(direct.clients, "bucket", 1, b.anyKey))
	if err != nil {
		return nil, err
	}
	across, err := b.lonely(ctx, checkCaller(far.clients, "bucket", 1, b.anyKey))
	if err != nil {
		return nil, err
	}
	return added(none, sync, across-near), nil
}
