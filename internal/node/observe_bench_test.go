package node

import (
	"context"
	"fmt"
	"slices"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/weirlimit/weir/internal/observe"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
)

// BenchmarkObservation is what top keys, activity, traces and metrics cost a node at full load: batches of 100 checks of 10,000 keys, in
// turns with and without. It prints the CPU time of a check and the median quotient: `go test ./internal/node -run '^$' -bench Observation
// -benchtime 40x`.
func BenchmarkObservation(b *testing.B) {
	set, err := policy.Parse("test.yaml", []byte("policies: [{name: p, algorithm: token_bucket, limit: 1000000, window: 1s}]"))
	if err != nil {
		b.Fatal(err)
	}
	recorder, err := newActivityRecorder()
	if err != nil {
		b.Fatal(err)
	}
	tracer, err := observe.NewTracer(observe.TracingConfig{Endpoint: "http://127.0.0.1:1", CallerRate: 10}) // no caller asks for a trace
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = tracer.Close(context.Background()) }()
	plain, seen := limiter.New(limiter.Config{Policies: set}), limiter.New(limiter.Config{Policies: set, Recorder: recorder, Tracer: tracer})
	defer plain.Close()
	defer seen.Close()
	recorder.follow(seen)
	calls := observe.NewMetrics(observe.MetricsConfig{})

	const keys, batch, turn = 10_000, 100, 200 * time.Millisecond
	checks, results := make([]limit.Check, keys), make([]limit.Result, batch)
	for i := range checks {
		checks[i] = limit.Check{Target: limit.Target{Policy: "p", Key: fmt.Sprintf("user:%012d", i)}, Cost: 1}
	}
	run := func(l *limiter.Limiter, observed bool) float64 {
		n, before := 0, cpuTime()
		for began := time.Now(); time.Since(began) < turn; n += batch {
			if observed {
				for range batch {
					tracer.Streamed("weir.v1.Limiter/CheckStream", "")
				}
			}
			at := n % keys
			if err := l.CheckTo(context.Background(), checks[at:at+batch], nil, results); err != nil {
				b.Fatal(err)
			}
			if observed {
				calls.Streamed(time.Since(began), codes.OK)
			}
		}
		return float64(cpuTime()-before) / float64(n)
	}
	var without, with, quotients []float64
	for b.Loop() {
		p, s := run(plain, false), run(seen, true)
		without, with, quotients = append(without, p), append(with, s), append(quotients, s/p)
	}
	for unit, list := range map[string][]float64{"ns/check": without, "observed-ns/check": with, "observed/plain": quotients} {
		slices.Sort(list)
		b.ReportMetric(list[len(list)/2], unit)
	}
	b.ReportMetric(0, "ns/op")
}

// cpuTime is what this process has used.
func cpuTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
