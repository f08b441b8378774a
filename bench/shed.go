package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

const shedWork = "shed"

// shedPatience is how long a caller of an overloaded cluster waits: some ten times what a call takes without overload.
const shedPatience = 100 * time.Millisecond

// shedMeasurements offer three nodes what they can carry and many times that, from callers who give up and ask again.
func (b *bench) shedMeasurements() []measurement {
	var all []measurement
	for _, times := range []int{1, 2, 5, 10} {
		all = append(all, measurement{work: shedWork, system: fmt.Sprintf("weir-%dx", times), run: func(ctx context.Context) (sample, error) {
			w, err := b.weirThree()
			if err != nil {
				return nil, err
			}
			return b.load(times*batchCallers, w.servers...).drive(ctx, b.impatient(w))
		}})
	}
	return all
}

// impatient returns callers who give up after shedPatience. The time of a call counts when it was decided in full.
func (b *bench) impatient(w *weirCluster) func(i int) caller {
	return func(i int) caller {
		random := rand.New(rand.NewPCG(uint64(i), rand.Uint64()))
		req := newCheckRequest("bucket", batchSize)
		return func(ctx context.Context, r *recorder) {
			for !r.over() && ctx.Err() == nil {
				for _, c := range req.Checks {
					c.Target.Key = b.anyKey(random)
				}
				clients := w.clients[random.IntN(len(w.clients))]
				began := time.Now()
				if err := askWithin(ctx, clients[i%len(clients)], req); err != nil {
					r.lost(err)
				} else {
					r.done(began, batchSize, nil)
				}
			}
		}
	}
}

func askWithin(ctx context.Context, c weirv1.LimiterClient, req *weirv1.CheckRequest) error {
	ctx, cancel := context.WithTimeout(ctx, shedPatience)
	defer cancel()
	resp, err := c.Check(ctx, req)
	if err != nil {
		return err
	}
	_, err = countAllowed(resp, batchSize)
	return err
}
