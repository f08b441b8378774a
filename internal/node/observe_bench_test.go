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
	"github.com/weirlimit/weir/test/must"
)

// BenchmarkObservation is what top keys, activity, traces and metrics cost a node at full load: batches of 100 checks of 10,000 keys, in
// turns with and without, and without once more as a control. It prints the CPU time of a check and the median quotients:
// `go test ./internal/node -run '^$' -bench Observation -benchtime 40x`.
func BenchmarkObservation(b *testing.B) {
	set, err := policy.Parse("test.yaml", []byte("policies: [{name: p, algorithm: token_bucket, limit: 1000000, window: 1s}]"))
	must.NoError(b, err)
	recorder := must.Value(newActivityRecorder())(b)
	tracer, err := observe.NewTracer(observe.TracingConfig{Endpoint: "http://127.0.0.1:1", CallerRate: 10}) // no caller asks for a trace
	must.NoError(b, err)
	defer func() { _ = tracer.Close(context.Background()) }()
	names := []string{"plain", "observed", "control"}
	limiters := make([]*limiter.Limiter, len(names))
	for i, name := range names {
		cfg := limiter.Config{Policies: set}
		if name == "observed" {
			cfg.Recorder, cfg.Tracer = recorder, tracer
		}
		limiters[i] = limiter.New(cfg)
		defer limiters[i].Close()
	}
	recorder.follow(limiters[1])
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
			err := l.CheckTo(context.Background(), checks[at:at+batch], nil, results)
			must.NoError(b, err)
			if observed {
				calls.Streamed(time.Since(began), codes.OK)
			}
		}
		return float64(cpuTime()-before) / float64(n)
	}
	lists := make(map[string][]float64)
	for turns := 0; b.Loop(); turns++ {
		var took [3]float64
		for i := range names { // another one first each time
			i = (i + turns) % len(names)
			took[i] = run(limiters[i], names[i] == "observed")
		}
		for i, name := range names {
			lists[name+"-ns/check"] = append(lists[name+"-ns/check"], took[i])
			lists[name+"/plain"] = append(lists[name+"/plain"], took[i]/took[0])
		}
	}
	delete(lists, "plain/plain")
	for unit, list := range lists {
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
