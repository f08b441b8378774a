package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/ring"
)

const (
	movedKeys   = 25_000
	moveRate    = 1000 // checks a second on them
	stillKeys   = 100  // keys in a partition that stays, asked for beside the others to know what the machine itself does
	countedKeys = 100  // keys in the same partition whose admissions are counted; half of them are used up before it moves
)

// movedPartition is one that belongs to the first node of two and to the third of three, so that it moves when that one
// joins and back when it leaves, whereas the second only passes checks on. Of all that do it is the one in the middle,
// which is neither the first to move nor the last.
func movedPartition(two, three *ring.Table) (int, error) {
	var all []int
	for p := range ring.Partitions {
		if ownerOf(two, p) == nodeName(0) && ownerOf(three, p) == nodeName(2) {
			all = append(all, p)
		}
	}
	if len(all) == 0 {
		return 0, errors.New("no partition moves from the first node to the third")
	}
	return all[len(all)/2], nil
}

// A movable is the partition that is moved and the keys in it.
type movable struct {
	partition            int
	keys, counted, still []string
}

func findMovable() (*movable, error) {
	two, three := tableOf(2), tableOf(3)
	p, err := movedPartition(two, three)
	if err != nil {
		return nil, err
	}
	stays := 0
	for ownerOf(two, stays) != nodeName(0) || ownerOf(three, stays) != nodeName(0) {
		stays++ // a join leaves most partitions where they are
	}
	cores := runtime.NumCPU()
	return &movable{
		p, keysIn(p, movedPolicy, movedKeys, cores), keysIn(p, countedPolicy, countedKeys, cores), keysIn(stays, movedPolicy, stillKeys, cores),
	}, nil
}

// move has a node join and leave again, under a load on one of the partitions that go there and back.
func (b *bench) move(ctx context.Context) (sample, error) {
	m, err := b.movable()
	if err != nil {
		return nil, err
	}
	w, err := b.startOwn(ctx, 2)
	if err != nil {
		return nil, err
	}
	defer func() { b.kids.kill(w.servers...) }()
	l, err := newMoveLoad(ctx, w, m)
	if err != nil {
		return nil, err
	}
	stop := l.start(ctx)
	defer stop()

	cycles := 3
	if b.short {
		cycles = 1
	}
	var windows []window
	for range cycles {
		got, err := b.joinAndLeave(ctx, w, l)
		if err != nil {
			return nil, err
		}
		windows = append(windows, got...)
	}
	stop()
	if err := l.useUp(ctx); err != nil {
		return nil, err
	}
	return l.judge(windows)
}

// joinAndLeave returns what happened in the two moves.
func (b *bench) joinAndLeave(ctx context.Context, w *weirCluster, l *moveLoad) ([]window, error) {
	wait(ctx, b.measure) // the median while nothing moves is taken from here
	var windows []window
	w1 := window{from: time.Now()}
	if err := b.joinOwn(ctx, w, place{name: nodeName(2)}); err != nil {
		return nil, err
	}
	joined := w.servers[2]
	var err error
	if w1.handed, err = handover(ctx, joined, l.partition, w1.from); err != nil {
		return nil, err
	}
	if err := w.calm(ctx); err != nil {
		return nil, err
	}
	w1.to = time.Now()
	wait(ctx, b.measure)

	w2 := window{from: time.Now()}
	if err := joined.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return nil, err
	}
	w.dismiss()
	if w2.handed, err = handover(ctx, w.servers[0], l.partition, w2.from); err != nil {
		return nil, err
	}
	select {
	case <-joined.exited:
	case <-time.After(calmLimit):
		return nil, fmt.Errorf("%s has not left within %v", joined.name, calmLimit)
	}
	b.kids.stop(joined) // it is no longer there, and need not be remembered
	if joined.err != nil {
		return nil, joined.died()
	}
	if err := w.calm(ctx); err != nil {
		return nil, err
	}
	w2.to = time.Now()
	return append(windows, w1, w2), nil
}

// A window is the time of one change of membership.
type window struct {
	from, to time.Time // until all is calm again
	handed   time.Time // the partition's new holder began to decide
}

// logStep is how exactly a log line tells the time, and logDelay how late after the fact it is written at most, where
// nothing keeps the node from its work.
const (
	logStep  = time.Millisecond
	logDelay = 5 * time.Millisecond
)

// handover waits until a node has logged that it took a partition over, and returns when that was.
func handover(ctx context.Context, p *process, partition int, after time.Time) (at time.Time, err error) {
	err = within(ctx, calmLimit, 20*time.Millisecond, func(context.Context) error {
		if err := p.alive(); err != nil {
			return err
		}
		for line := range strings.Lines(p.stderr.String()) {
			if t, ok := tookOver(line, partition); ok && !t.Before(after.Truncate(logStep)) {
				at = t
				return nil
			}
		}
		return fmt.Errorf("%s has not logged that it took partition %d over", p.name, partition)
	})
	return at, err
}

var tookOverLine = regexp.MustCompile(`^time=(\S+) .*msg="took over" .*partitions=(\S+)`)

// tookOver reads the line of a node's log that says that it took over partitions, such as partitions=3,7-9.
func tookOver(line string, partition int) (time.Time, bool) {
	f := tookOverLine.FindStringSubmatch(line)
	if f == nil {
		return time.Time{}, false
	}
	at, err := time.Parse(time.RFC3339Nano, f[1])
	if err != nil {
		return time.Time{}, false
	}
	for _, r := range strings.Split(strings.Trim(f[2], `"`), ",") {
		low, high, ranged := strings.Cut(r, "-")
		if !ranged {
			high = low
		}
		from, err := strconv.Atoi(low)
		to, err2 := strconv.Atoi(high)
		if err == nil && err2 == nil && from <= partition && partition <= to {
			return at, true
		}
	}
	return time.Time{}, false
}

// A moveLoad asks for the keys of one partition at a fixed rate, whether or not earlier checks have been answered, so
// that a pause meets as many checks as it would in a service. Half of them go through the node that decides for it at
// first, half through one that never does.
type moveLoad struct {
	*movable
	nodes [][]weirv1.LimiterClient

	undecided atomic.Int64
	admitted  []atomic.Int64 // by counted key
	unsure    atomic.Int64   // checks of counted keys whose answer was lost

	mu    sync.Mutex
	spans []span
	first error
}

// A span is one check.
type span struct {
	sent  time.Time
	took  time.Duration
	still bool // of a partition that does not move
}

// newMoveLoad makes all keys known, and uses half of the counted ones up.
func newMoveLoad(ctx context.Context, w *weirCluster, m *movable) (*moveLoad, error) {
	l := &moveLoad{movable: m, nodes: slices.Clone(w.clients[:2]), admitted: make([]atomic.Int64, len(m.counted))}
	for keys := range slices.Chunk(m.keys, overloadBatch) {
		req := newCheckRequest(movedPolicy, len(keys))
		for i, k := range keys {
			req.Checks[i].Target.Key = k
		}
		resp, err := l.nodes[0][0].Check(ctx, req)
		if err == nil {
			_, err = countAllowed(resp, len(keys))
		}
		if err != nil {
			return nil, err
		}
	}
	for i := range len(m.counted) / 2 {
		if err := l.exhaust(ctx, i, 0); err != nil {
			return nil, err
		}
	}
	return l, w.calm(ctx)
}

// exhaust asks through a node for more of a counted key than there can be.
func (l *moveLoad) exhaust(ctx context.Context, i, node int) error {
	req := newCheckRequest(countedPolicy, countedAllowed+1)
	for _, c := range req.Checks {
		c.Target.Key = l.counted[i]
	}
	resp, err := l.nodes[node][0].Check(ctx, req)
	if err != nil {
		return err
	}
	n, err := countAllowed(resp, len(req.Checks))
	l.admitted[i].Add(int64(n))
	return err
}

// useUp asks for all that the counted keys have left, through both nodes, once the moves are over.
func (l *moveLoad) useUp(ctx context.Context) error {
	for i := range l.counted {
		for node := range l.nodes {
			if err := l.exhaust(ctx, i, node); err != nil {
				return err
			}
		}
	}
	return nil
}

// start lets the load begin. The function it returns ends it and waits for the last answers; it may be called again.
func (l *moveLoad) start(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var work sync.WaitGroup
	work.Go(func() {
		began := time.Now()
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for sent := 0; ; {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			// What the harness itself was too late for is made up for, but not all of it if that is much.
			due := int(time.Since(began).Seconds() * moveRate)
			sent = max(sent, due-moveRate/20)
			for ; sent < due; sent++ {
				i := sent
				// The answer is waited for even when the load has ended: it may count.
				work.Go(func() { l.ask(context.WithoutCancel(ctx), i) })
			}
		}
	})
	return func() { cancel(); work.Wait() }
}

// ask makes the i-th check; of eight one is for a key that is counted and two for keys that stay where they are.
func (l *moveLoad) ask(ctx context.Context, i int) {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	node := l.nodes[i%len(l.nodes)]
	client := node[i/len(l.nodes)%len(node)]
	counted := -1
	req := newCheckRequest(movedPolicy, 1)
	still := false
	switch i / len(l.nodes) % 8 {
	case 7:
		counted = rand.IntN(len(l.counted))
		req.Checks[0].Target = &weirv1.Target{Policy: countedPolicy, Key: l.counted[counted]}
	case 3, 6:
		still = true
		req.Checks[0].Target.Key = l.still[rand.IntN(len(l.still))]
	default:
		req.Checks[0].Target.Key = l.keys[rand.IntN(len(l.keys))]
	}
	sent := time.Now()
	resp, err := client.Check(ctx, req)
	took := time.Since(sent)
	n := 0
	if err == nil {
		n, err = countAllowed(resp, 1)
	}
	if err != nil {
		l.undecided.Add(1)
	}
	switch {
	case counted < 0:
	case err != nil:
		l.unsure.Add(1)
	default:
		l.admitted[counted].Add(int64(n))
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil && l.first == nil {
		l.first = err
	}
	if counted < 0 { // refusals that are remembered say nothing about the owner
		l.spans = append(l.spans, span{sent, took, still})
	}
}

// judge makes figures of what the load has seen.
func (l *moveLoad) judge(windows []window) (sample, error) {
	over, left := int64(0), int64(0)
	for i := range l.admitted {
		n := l.admitted[i].Load()
		over += max(0, n-countedAllowed)
		left += max(0, countedAllowed-n)
	}
	if over > 0 {
		return nil, fmt.Errorf("%w: %d units beyond the limits of %d keys while their partition moved", errViolated, over, len(l.counted))
	}
	if n := l.undecided.Load(); n > 0 {
		left = max(0, left-l.unsure.Load())
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	got, err := delays(l.spans, windows)
	if err != nil {
		return nil, err
	}
	got[beyond], got[heldBack], got[undecided] = float64(over), float64(left), float64(l.undecided.Load())
	return got, nil
}

// delays are those beyond the median of the checks outside of all windows: of the checks that were in flight at a
// hand-over, and of all within the windows; both also of the checks for what stays where it is.
func delays(spans []span, windows []window) (sample, error) {
	var usual, parked, moving, stillParked, stillMoving []time.Duration
	for _, s := range spans {
		end := s.sent.Add(s.took)
		overlaps := func(from, to time.Time) bool { return !end.Before(from) && s.sent.Before(to) }
		in := false
		for _, w := range windows {
			inParked, inMoving := &parked, &moving
			if s.still {
				inParked, inMoving = &stillParked, &stillMoving
			}
			if overlaps(w.from, w.to) {
				in = true
				*inMoving = append(*inMoving, s.took)
			}
			if overlaps(w.handed.Add(-logDelay), w.handed.Add(logStep)) {
				*inParked = append(*inParked, s.took)
			}
		}
		if !in {
			usual = append(usual, s.took)
		}
	}
	if len(usual) == 0 || len(parked) == 0 {
		return nil, fmt.Errorf("%d checks while nothing moved, %d at hand-overs: too few", len(usual), len(parked))
	}
	slices.Sort(usual)
	median := usual[len(usual)/2]
	out := sample{parkedSeen: float64(len(parked))}
	for _, d := range []struct {
		all       []time.Duration
		p99, most metric
	}{{parked, parkedP99, parkedMax}, {moving, movingP99, movingMax}, {stillParked, stillParkedP99, stillParkedMax}, {stillMoving, stillMovingP99, stillMovingMax}} {
		if len(d.all) == 0 {
			continue
		}
		slices.Sort(d.all)
		// The least duration that at least 99 of a hundred are not above: of few, the longest.
		at := (99*len(d.all)+99)/100 - 1
		out[d.p99] = max(0, d.all[at]-median).Seconds() * 1e3
		out[d.most] = max(0, d.all[len(d.all)-1]-median).Seconds() * 1e3
	}
	for _, w := range windows {
		out[moveTime] = max(out[moveTime], w.handed.Sub(w.from).Seconds())
	}
	return out, nil
}
