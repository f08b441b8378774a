package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/stats"

	"github.com/weirlimit/weir/client"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/ring"
)

// What loans save, and what they cost where there is nothing to lend. All workloads of this part have names that begin with lend-.
const (
	lendHotWork     = "lend-hot"
	lendBusyWork    = "lend-busy"
	lendLocalWork   = "lend-local"
	lendForwardWork = "lend-forward"
	lendFillWork    = "lend-fill"
	lendUniformWork = "lend-uniform"

	withLoans    = "loans"
	withoutLoans = "asked"

	filledUnits    = 1_000_000
	fillBorrowers  = 10
	fillGoroutines = 8 // of each
	uniformKeys    = 1_000_000

	// The time that counts of a turn, and how many there are in a round: differences of a hundredth are looked for where the speed of a machine
	// changes by more from one second to the next.
	uniformTurn  = 250 * time.Millisecond
	uniformTurns = 20
)

const (
	messagesSent metric = "messages"      // by all clients to nodes, of whatever service
	leftOver     metric = "left_over"     // units that the borrowers were refused though they were there, and others got afterwards
	allocations  metric = "allocations"   // of a decision
	nsLoan       metric = "ns_a_decision" // by one goroutine, of one hot key
)

// loanMeasurements compare the Go client with itself, with and without loans, and with what decides in process.
func (b *bench) loanMeasurements() []measurement {
	var all []measurement
	add := func(work, system string, run func(ctx context.Context) (sample, error)) {
		all = append(all, measurement{work: work, system: system, run: run})
	}
	patient := *b
	patient.warm = max(b.warm, time.Second) // until it is known which keys are busy
	through := func(policy string, pick func(*rand.Rand) string, opts ...client.Option) func(ctx context.Context) (sample, error) {
		return func(ctx context.Context) (sample, error) {
			w, err := b.weirThree()
			if err != nil {
				return nil, err
			}
			return patient.driveClient(ctx, w, policy, nil, pick, opts...)
		}
	}
	both := func(work, suffix, policy string, pick func(*rand.Rand) string) {
		add(work, withLoans+suffix, through(policy, pick))
		add(work, withoutLoans+suffix, through(policy, pick, client.WithoutLoans()))
	}
	one := func(*rand.Rand) string { return "one" }
	both(lendHotWork, "", "wide", one)
	for _, durability := range []string{"none", "async", "escrow", "sync"} {
		both(lendBusyWork, "-"+durability, "busy-"+durability, busyKey(b.keys[:fewKeys]))
	}
	add(lendLocalWork, "weir-local", func(ctx context.Context) (sample, error) {
		allow, err := weirLocal(1_000_000_000, time.Second)
		if err != nil {
			return nil, err
		}
		return b.alone(func() bool { return allow("one") })
	})
	add(lendLocalWork, withLoans, b.aloneFromLoan)
	for _, owner := range []bool{true, false} {
		system := map[bool]string{true: "weir-owner", false: "weir-others"}[owner]
		add(lendForwardWork, system, func(ctx context.Context) (sample, error) {
			w, err := b.weirThree()
			if err != nil {
				return nil, err
			}
			table := tableOf(len(w.nodes))
			name := table.Members()[table.Owner(ring.Partition(ring.Hash(ring.HashKey{}, "wide", "one")))]
			var asked [][]weirv1.LimiterClient
			for i, n := range w.nodes {
				if (n.name == name) == owner {
					asked = append(asked, w.clients[i])
				}
			}
			// One node either way.
			return b.load(unaryCallers, w.servers...).drive(ctx, checkCaller(asked[:1], "wide", 1, one))
		})
	}
	add(lendFillWork, withLoans, func(ctx context.Context) (sample, error) { return b.fill(ctx) })
	add(lendFillWork, withoutLoans, func(ctx context.Context) (sample, error) { return b.fill(ctx, client.WithoutLoans()) })
	var many []string
	var making sync.Once
	uniform := func(r *rand.Rand) string {
		making.Do(func() {
			for i := range uniformKeys {
				many = append(many, keyOf(i))
			}
		})
		return many[r.IntN(len(many))]
	}
	for _, c := range []struct {
		system string
		opts   []client.Option
	}{{withLoans, nil}, {withoutLoans, []client.Option{client.WithoutLoans()}}} {
		all = append(all, measurement{work: lendUniformWork, system: c.system, turns: uniformTurns, run: b.inTurns("uncopied", uniform, c.opts...)})
	}
	return all
}

// inTurns measures callers of one Go client that stays connected from turn to turn. A turn is so short that what slows the machine slows the
// one before it, or the one after, as well.
func (b *bench) inTurns(policy string, pick func(*rand.Rand) string, opts ...client.Option) func(ctx context.Context) (sample, error) {
	var c *client.Client
	return func(ctx context.Context) (sample, error) {
		w, err := b.weirThree()
		if err != nil {
			return nil, err
		}
		l := load{callers: unaryCallers, warm: uniformTurn / 5, measure: uniformTurn, servers: w.servers}
		if c == nil {
			dialed, err := client.Dial(ctx, w.addresses(), opts...) // for as long as the harness runs
			if err != nil {
				return nil, err
			}
			if err := dialed.Ready(ctx); err != nil {
				dialed.Close()
				return nil, err
			}
			c, l.warm = dialed, time.Second
		}
		return l.drive(ctx, allowCaller(c, policy, nil, pick))
	}
}

// busyKey picks keys as Zipf says: the n-th as often as the first, divided by n.
func busyKey(keys []string) func(*rand.Rand) string {
	weights := make([]float64, len(keys)) // up to and with each
	sum := 0.0
	for i := range keys {
		sum += 1 / float64(i+1)
		weights[i] = sum
	}
	// A table in place of a search, so that picking costs next to nothing.
	picks := make([]string, 1<<16)
	for i, at := 0, 0; i < len(picks); i++ {
		for at < len(keys)-1 && weights[at] < sum*(float64(i)+0.5)/float64(len(picks)) {
			at++
		}
		picks[i] = keys[at]
	}
	return func(r *rand.Rand) string { return picks[r.Uint32()>>16] }
}

// alone is the time of a decision by one goroutine, and what it allocates.
func (b *bench) alone(allow func() bool) (sample, error) {
	const between = 256 // decisions between looks at the clock
	for began := time.Now(); time.Since(began) < b.warm+200*time.Millisecond; {
		for range between {
			if !allow() {
				return nil, errors.New("a key far below its limit was refused")
			}
		}
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	n, began := 0, time.Now()
	for time.Since(began) < b.measure {
		for range between {
			allow()
		}
		n += between
	}
	took := time.Since(began)
	runtime.ReadMemStats(&after)
	return sample{nsLoan: float64(took) / float64(n), allocations: float64(after.Mallocs-before.Mallocs) / float64(n)}, nil
}

// aloneFromLoan is alone of a client that has its key on loan.
func (b *bench) aloneFromLoan(ctx context.Context) (sample, error) {
	w, err := b.weirThree()
	if err != nil {
		return nil, err
	}
	c, err := client.Dial(ctx, w.addresses())
	if err != nil {
		return nil, err
	}
	defer c.Close()
	if err := c.Ready(ctx); err != nil {
		return nil, err
	}
	l := c.Policy("wide")
	return b.alone(func() bool {
		d, err := l.Allow(ctx, "one")
		return err == nil && d.Allowed && !d.FailedOpen
	})
}

// sentMessages counts what clients send.
type sentMessages struct{ n atomic.Int64 }

// HandleRPC implements stats.Handler.
func (s *sentMessages) HandleRPC(_ context.Context, what stats.RPCStats) {
	if _, ok := what.(*stats.OutPayload); ok {
		s.n.Add(1)
	}
}

// TagRPC implements stats.Handler.
func (s *sentMessages) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// TagConn implements stats.Handler.
func (s *sentMessages) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleConn implements stats.Handler.
func (s *sentMessages) HandleConn(context.Context, stats.ConnStats) {}

// fill has borrowers use up one key, all at once, each until it is refused.
func (b *bench) fill(ctx context.Context, opts ...client.Option) (sample, error) {
	w, err := b.weirThree()
	if err != nil {
		return nil, err
	}
	var sent sentMessages
	var clients []*client.Client
	for range fillBorrowers + 1 { // the last one asks for what is left
		all := append([]client.Option{client.WithDialOptions(grpc.WithStatsHandler(&sent)), client.WithTimeout(callLimit)}, opts...)
		if len(clients) == fillBorrowers {
			all = []client.Option{client.WithoutLoans(), client.WithoutMemory(), client.WithTimeout(callLimit)}
		}
		c, err := client.Dial(ctx, w.addresses(), all...)
		if err != nil {
			return nil, err
		}
		defer c.Close()
		if err := c.Ready(ctx); err != nil {
			return nil, err
		}
		clients = append(clients, c)
	}
	key := "filled:" + strconv.FormatUint(rand.Uint64(), 36)
	until := func(c *client.Client) (n int64, err error) {
		for l := c.Policy("filled"); ; n++ {
			d, err := l.Allow(ctx, key)
			switch {
			case err != nil:
				return n, err
			case d.FailedOpen || d.FailedClosed:
				return n, errors.New("decided by the fail policy: no node answered")
			case !d.Allowed:
				return n, nil
			}
		}
	}
	sent.n.Store(0)
	var admitted atomic.Int64
	var failed atomic.Pointer[error]
	var filling sync.WaitGroup
	began, server := time.Now(), w.cpu()
	for _, c := range clients[:fillBorrowers] {
		for range fillGoroutines {
			filling.Go(func() {
				n, err := until(c)
				if admitted.Add(n); err != nil {
					failed.Store(&err)
				}
			})
		}
	}
	filling.Wait()
	if err := failed.Load(); err != nil {
		return nil, *err
	}
	took, messages, cpu := time.Since(began), sent.n.Load(), w.cpu()-server
	// What was refused in haste, because a borrower was slow to answer, is there when all loans have ended.
	wait(ctx, 2*time.Second)
	left, err := until(clients[fillBorrowers])
	if err != nil {
		return nil, err
	}
	if n := admitted.Load() + left; n > filledUnits {
		return nil, fmt.Errorf("%w: %d admitted of a limit of %d", errViolated, n, filledUnits)
	}
	units := float64(admitted.Load())
	return sample{
		rate: units / took.Seconds(), serverCPU: cpu.Seconds() / units * 1e6,
		messagesSent: float64(messages), leftOver: filledUnits - units,
	}, nil
}

// cpu is what the nodes have used so far.
func (w *weirCluster) cpu() (sum time.Duration) {
	for _, p := range w.servers {
		if u, err := p.usage(); err == nil {
			sum += u.cpu
		}
	}
	return sum
}

// loanTargets are what loans are to reach.
func loanTargets() []target {
	const (
		least = true
		most  = false
	)
	return []target{
		{"one hot key under its limit, Go client, 3 nodes: with loans", lendHotWork + "/" + withLoans, lendHotWork + "/" + withoutLoans, rate, 10, least},
		{"one hot key under its limit, Go client, 3 nodes: server CPU s/M", lendHotWork + "/" + withLoans, "", serverCPU, 0.1, most},
		{"1000 busy keys (Zipf), Go client, async: with loans", lendBusyWork + "/" + withLoans + "-async", lendBusyWork + "/" + withoutLoans + "-async", rate, 4, least},
		{"1000 busy keys (Zipf), Go client, loans: escrow against none", lendBusyWork + "/" + withLoans + "-escrow", lendBusyWork + "/" + withLoans + "-none", rate, 0.9, least},
		{"a decision from a loan, one goroutine", lendLocalWork + "/" + withLoans, lendLocalWork + "/weir-local", nsLoan, 1.5, most},
		{"a decision from a loan: allocations", lendLocalWork + "/" + withLoans, "", allocations, 0.01, most},
		{"one hot key, unary, at a node that does not own it", lendForwardWork + "/weir-others", lendForwardWork + "/weir-owner", rate, 0.9, least},
		{"a limit of 10⁶ filled by 10 borrowers: messages to nodes", lendFillWork + "/" + withLoans, "", messagesSent, 500, most},
		{"a limit of 10⁶ filled by 10 borrowers: units not admitted", lendFillWork + "/" + withLoans, "", leftOver, 0, most},
		{"uniform traffic over 1 M keys, Go client: with loans", lendUniformWork + "/" + withLoans, lendUniformWork + "/" + withoutLoans, rate, 0.97, least},
		{"uniform traffic over 1 M keys, Go client: with loans", lendUniformWork + "/" + withLoans, lendUniformWork + "/" + withoutLoans, perCPU, 0.97, least},
	}
}

// writeLoans says what the tables of rates do not.
func (r *report) writeLoans(m *markdown) {
	for _, f := range r.Figures {
		if s, ok := f.Spreads[nsLoan]; ok {
			m.printf("\nOne goroutine, one hot key, %s: %s ns and %s allocations a decision.\n", f.System, s, f.Spreads[allocations])
		}
		if s, ok := f.Spreads[messagesSent]; ok {
			m.printf("\nA limit of 10⁶ filled by %d borrowers, %s: %s messages to nodes, %s units not admitted.\n", fillBorrowers, f.System, s, f.Spreads[leftOver])
		}
	}
}
