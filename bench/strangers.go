package main

import (
	"context"
	"net"
	"sync"

	"golang.org/x/net/http2"
)

const (
	strangersWork = "strangers"
	// strangersCount connections say nothing, or begin HTTP/2 and make no call.
	strangersCount = 5000

	strangersBytes metric = "strangers_bytes" // by which the most resident memory of the node rose with them
	strangersRate  metric = "rate_to_alone"   // decisions a second with them over those without
	strangersShare        = 0.8               // of the decisions that callers must keep
	strangersMost         = float64(64 << 20) // bytes
)

// strangersMeasurements ask one fresh node without and with connections of strangers.
func (b *bench) strangersMeasurements() []measurement {
	return []measurement{{work: strangersWork, system: "weir", run: func(ctx context.Context) (sample, error) {
		w, err := b.startWeir(ctx, 1)
		if err != nil {
			return nil, err
		}
		defer b.kids.stop(w.servers...)
		callers := checkCaller(w.clients, "bucket", batchSize, b.anyKey)
		alone, err := b.load(batchCallers, w.servers...).drive(ctx, callers)
		if err != nil {
			return nil, err
		}
		before, err := w.servers[0].usage()
		if err != nil {
			return nil, err
		}
		conns, err := strangers(ctx, w.nodes[0].grpc)
		defer func() {
			for _, c := range conns {
				_ = c.Close() // the node may have done so
			}
		}()
		if err != nil {
			return nil, err
		}
		got, err := b.load(batchCallers, w.servers...).drive(ctx, callers)
		if err != nil {
			return nil, err
		}
		after, err := w.servers[0].usage()
		if err != nil {
			return nil, err
		}
		got[idleRSS], got[peakRSS] = float64(before.rss), float64(after.peak)
		got[strangersBytes], got[strangersRate] = float64(after.peak-before.peak), got[rate]/alone[rate]
		return got, nil
	}}}
}

// strangers opens connections, half of which begin HTTP/2.
func strangers(ctx context.Context, address string) (conns []net.Conn, err error) {
	const settings = "\x00\x00\x00\x04\x00\x00\x00\x00\x00" // an empty frame of them
	var mu sync.Mutex
	var dialing sync.WaitGroup
	const dialers = 50
	for begin := range dialers {
		dialing.Go(func() {
			var d net.Dialer
			for i := begin; i < strangersCount; i += dialers {
				c, dialErr := d.DialContext(ctx, "tcp", address)
				mu.Lock()
				if dialErr != nil {
					err = dialErr
				} else {
					conns = append(conns, c)
				}
				mu.Unlock()
				if dialErr != nil {
					return
				}
				if i%2 == 0 {
					_, _ = c.Write([]byte(http2.ClientPreface + settings)) // the node may have closed it
				}
			}
		})
	}
	dialing.Wait()
	return conns, err
}
