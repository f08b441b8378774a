package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/ring"
)

const (
	// A call asks for few partitions and does not wait long, since it is answered when the last of them is, and all of
	// them are then taken for decided no sooner.
	probeGroup = 16
	probeLimit = 250 * time.Millisecond
	probePause = 25 * time.Millisecond
	// decidedLimit is where the harness gives up.
	decidedLimit = 30 * time.Second
)

// probes are one key of the probing policy for each partition.
func probes() []string {
	keys := make([]string, ring.Partitions)
	for i, left := 0, len(keys); left > 0; i++ {
		k := keyOf(i)
		if p := partitionOf(probePolicy, k); keys[p] == "" {
			keys[p] = k
			left--
		}
	}
	return keys
}

// crash kills one of three nodes and asks a survivor for every partition until all are decided.
func (b *bench) crash(ctx context.Context) (sample, error) {
	w, err := b.startOwn(ctx, 3)
	if err != nil {
		return nil, err
	}
	defer func() { b.kids.kill(w.servers...) }()
	keys := probes()
	asked := w.clients[0]
	for group := range slices.Chunk(keys, overloadBatch) { // so that there are states, connections, and copies
		err := within(ctx, startLimit, probePause, func(ctx context.Context) error {
			left, err := undecidedOf(ctx, asked[0], group)
			if err == nil && len(left) > 0 {
				err = fmt.Errorf("%d partitions of %d are not decided before the crash", len(left), len(group))
			}
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	if err := w.calm(ctx); err != nil {
		return nil, err
	}

	victim, table := w.nodes[2].name, tableOf(3)
	dead := w.servers[2]
	w.dismiss()
	killed := time.Now()
	b.kids.kill(dead)
	var mu sync.Mutex
	var all, lost []time.Duration // when partitions were decided: all, and those of the dead node
	ctx, cancel := context.WithTimeout(ctx, decidedLimit)
	defer cancel()
	var work sync.WaitGroup
	for group := range slices.Chunk(keys, probeGroup) {
		client := asked[len(group[0])%len(asked)]
		work.Go(func() {
			for left := group; len(left) > 0 && ctx.Err() == nil; wait(ctx, probePause) {
				still, _ := undecidedOf(ctx, client, left) // whatever went wrong, they are not decided
				at := time.Since(killed)
				mu.Lock()
				for _, k := range left {
					if slices.Contains(still, k) {
						continue
					}
					all = append(all, at)
					if ownerOf(table, partitionOf(probePolicy, k)) == victim {
						lost = append(lost, at)
					}
				}
				mu.Unlock()
				left = still
			}
		})
	}
	work.Wait()
	if len(all) < len(keys) {
		return nil, fmt.Errorf("%d partitions of %d are not decided %v after a crash", len(keys)-len(all), len(keys), decidedLimit)
	}
	slices.Sort(lost)
	return sample{
		decidedIn: slices.Max(all).Seconds(), halfIn: lost[len(lost)/2].Seconds(), share: float64(len(lost)),
	}, nil
}

// undecidedOf asks for keys and returns those that nobody decided.
func undecidedOf(ctx context.Context, client weirv1.LimiterClient, keys []string) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, probeLimit)
	defer cancel()
	req := newCheckRequest(probePolicy, len(keys))
	for i, k := range keys {
		req.Checks[i].Target.Key = k
	}
	resp, err := client.Check(ctx, req)
	if err != nil {
		return keys, err
	}
	if len(resp.Results) != len(keys) {
		return keys, errors.New("not as many results as checks")
	}
	var left []string
	for i, r := range resp.Results {
		if d := r.GetDecision(); d == nil || d.FailedOpen || d.FailedClosed {
			left = append(left, keys[i])
		}
	}
	return left, nil
}
