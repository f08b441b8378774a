package clustertest

import (
	"context"
	"encoding/json"
	"fmt"
	"hash/maphash"
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	quotav3 "github.com/envoyproxy/go-control-plane/envoy/service/rate_limit_quota/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/gateway/envoyquota"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/checker"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// Envoys that decide by themselves under assignments of real nodes. What is judged is what these fakes have admitted,
// by when they did. What is peculiar to Envoy's client, and delays, package envoyquota's tests have in virtual time.

const (
	quotaLimit  = 200
	quotaWindow = 20 * time.Second
	quotaReport = 5 * time.Second
	// quotaKeyEvery is how often a new key comes up, and quotaKeys how many are asked about.
	quotaKeyEvery = 4 * time.Second
	quotaKeys     = 6
)

// quotaPolicies are of a window and of every durability, and of a bucket, whose rate is lent. Strict policies are not
// divided.
func quotaPolicies() []checker.Policy {
	list := everyDurability(quotaLimit, quotaWindow)
	for i := range list {
		list[i].Lent = envoyquota.Life + envoyquota.Delivery
	}
	return list
}

// quotaDir is a directory with a file that divides these policies' keys among data planes.
func quotaDir(t *testing.T, policies []checker.Policy) string {
	var b strings.Builder
	b.WriteString("domain: edge\nquota_buckets:\n")
	for _, p := range policies {
		fmt.Fprintf(&b, "- bucket: {policy: %s, key: \"*\"}\n  policy: %[1]s\n  key: \"{key}\"\n  share: 90\n", p.Name)
	}
	return filepath.Dir(writeFile(t, "edge.yaml", b.String()))
}

// dataPlane is a fake of Envoy's client, with DENY_ALL without an assignment and after one. One goroutine does all of
// it.
type dataPlane struct {
	l     *load
	seed  maphash.Seed // of the slots of time in which it is asked about a key
	nodes []*member    // which it connects to in turn
	next  int
	// a bucket that replaces another one has as much of it left, as in Envoy's newer versions; otherwise it is full
	ratio bool
	// requests in a second, of which a key gets its part in every second slot of time or so, to have units left in the
	// others
	rate int

	buckets  map[quotaKey]*planeBucket
	send     func(*quotav3.RateLimitQuotaUsageReports) error // nil: there is no stream
	received chan *quotav3.RateLimitQuotaResponse
	broken   chan struct{} // closed when the stream is

	connected, admitted, denied atomic.Int64
	operations                  []checker.Operation // once it has ended
}

type quotaKey struct{ policy, key string }

// planeBucket is a bucket of requests.
type planeBucket struct {
	id              *quotav3.BucketId
	allowed, denied uint64
	reported        int64
	strategy        *typev3.RateLimitStrategy
	until           int64 // of the assignment
	tokens, most    float64
	perSecond       float64
	filled          int64
}

// startDataPlane starts one that connects to nodes in turn, each time that its stream has ended. It ends with the load.
func startDataPlane(l *load, ratio bool, rate int, nodes ...*member) *dataPlane {
	p := &dataPlane{
		l: l, seed: maphash.MakeSeed(), nodes: nodes, ratio: ratio, rate: rate,
		buckets: make(map[quotaKey]*planeBucket), received: make(chan *quotav3.RateLimitQuotaResponse),
	}
	l.work.Go(p.run)
	return p
}

func (p *dataPlane) run() {
	ctx, cancel := context.WithCancel(context.Background())
	var streams sync.WaitGroup
	defer streams.Wait()
	defer cancel()
	p.connect(ctx, &streams)
	const pause = 5 * time.Millisecond
	requests, reports := time.NewTicker(pause), time.NewTicker(quotaReport)
	defer requests.Stop()
	defer reports.Stop()
	for {
		select {
		case <-p.l.quit:
			return
		case <-requests.C:
			for range max(1, int(float64(p.rate)*pause.Seconds())) {
				p.request()
			}
		case <-reports.C:
			select {
			case <-p.broken:
				p.connect(ctx, &streams)
			default:
			}
			p.report(nil)
		case out := <-p.received:
			p.take(out)
		}
	}
}

// connect opens a stream to the next node. Where that fails, what was to be reported is lost at the next report, as
// Envoy's is.
func (p *dataPlane) connect(ctx context.Context, streams *sync.WaitGroup) {
	node := p.nodes[p.next%len(p.nodes)]
	p.next++
	broken := make(chan struct{})
	p.broken, p.send = broken, nil
	stream, err := quotav3.NewRateLimitQuotaServiceClient(node.conn).StreamRateLimitQuotas(ctx)
	if err != nil {
		close(broken)
		return
	}
	p.connected.Add(1)
	p.send = stream.Send
	for _, b := range p.buckets {
		b.reported = 0 // all look new
	}
	streams.Go(func() {
		defer close(broken)
		for {
			out, err := stream.Recv()
			if err != nil {
				return
			}
			select {
			case p.received <- out:
			case <-ctx.Done():
				return
			}
		}
	})
}

// drawQuotaKey returns a key of any policy, most often the newest one.
func (l *load) drawQuotaKey() quotaKey {
	back := 0
	if rand.IntN(2) == 0 {
		back = rand.IntN(quotaKeys)
	}
	return quotaKey{l.policies[rand.IntN(len(l.policies))].Name, keyNamed(l.newestQuotaKey() - back)}
}

func (l *load) newestQuotaKey() int { return int(time.Since(l.start) / quotaKeyEvery) }

// callQuotas is a caller of the nodes about the same keys.
func (l *load) callQuotas() {
	pace := time.NewTicker(50 * time.Millisecond)
	defer pace.Stop()
	for {
		select {
		case <-l.quit:
			return
		case <-pace.C:
			k := l.drawQuotaKey()
			l.put(l.f.members[rand.IntN(len(l.f.members))], k.policy, k.key, 2*time.Second)
		}
	}
}

// grab has a caller take all that is free of the keys in use. What a data plane has of them it goes on to admit.
func (l *load) grab(m *member) {
	l.t.Helper()
	in := &weirv1.CheckRequest{}
	for _, p := range l.policies {
		for back := range min(quotaKeys, l.newestQuotaKey()+1) {
			in.Checks = append(in.Checks, &weirv1.Check{
				Target: &weirv1.Target{Policy: p.Name, Key: keyNamed(l.newestQuotaKey() - back)},
				Cost:   proto.Int64(quotaLimit), Partial: true,
			})
		}
	}
	sent := l.now()
	out := must.Value(m.limiter.Check(l.t.Context(), in))(l.t)
	answered := l.now()
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, r := range out.Results {
		op := checker.Operation{Policy: in.Checks[i].Target.Policy, Key: in.Checks[i].Target.Key, Sent: sent,
			Answered: answered, Result: checker.Admitted}
		if op.Cost = r.GetDecision().GetGranted(); op.Cost > 0 && r.GetDecision().GetAllowed() {
			l.records = append(l.records, record{Operation: op})
		}
	}
}

// request is one that comes to the data plane.
func (p *dataPlane) request() {
	l := p.l
	k := l.drawQuotaKey()
	if slot := time.Since(l.start) / quotaReport; maphash.Comparable(p.seed, [2]any{k, slot})%2 == 0 {
		return
	}
	b := p.buckets[k]
	fresh := b == nil
	if fresh {
		b = &planeBucket{id: &quotav3.BucketId{Bucket: map[string]string{"policy": k.policy, "key": k.key}}}
		p.buckets[k] = b
	}
	now := l.now()
	op := checker.Operation{Policy: k.policy, Key: k.key, Cost: 1, Sent: now, Answered: now, Result: checker.Admitted,
		Borrowed: true}
	if b.admits(now) {
		b.allowed++
		p.admitted.Add(1)
		p.operations = append(p.operations, op)
	} else {
		b.denied++
		p.denied.Add(1)
	}
	if fresh {
		p.report(b)
	}
}

// admits decides a request.
func (b *planeBucket) admits(now int64) bool {
	if b.strategy.GetTokenBucket() == nil || now >= b.until {
		return false
	}
	b.fill(now)
	if b.tokens < 1 {
		return false
	}
	b.tokens--
	return true
}

func (b *planeBucket) fill(now int64) {
	b.tokens = min(b.most, b.tokens+time.Duration(now-b.filled).Seconds()*b.perSecond)
	b.filled = now
}

// report reports a bucket; nil: all.
func (p *dataPlane) report(only *planeBucket) {
	m := &quotav3.RateLimitQuotaUsageReports{Domain: "edge"}
	now := p.l.now()
	for _, b := range p.buckets {
		if only != nil && b != only {
			continue
		}
		var elapsed int64
		if b.reported > 0 {
			elapsed = (now - b.reported) / int64(time.Second)
		}
		m.BucketQuotaUsages = append(m.BucketQuotaUsages, &quotav3.RateLimitQuotaUsageReports_BucketQuotaUsage{
			BucketId: b.id, NumRequestsAllowed: b.allowed, NumRequestsDenied: b.denied,
			TimeElapsed: &durationpb.Duration{Seconds: elapsed},
		})
		b.allowed, b.denied, b.reported = 0, 0, now
	}
	if p.send != nil && len(m.BucketQuotaUsages) > 0 {
		_ = p.send(m) // what is lost is lost: the reader notices
	}
}

// take takes in what it is told.
func (p *dataPlane) take(out *quotav3.RateLimitQuotaResponse) {
	now := p.l.now()
	for _, a := range out.GetBucketAction() {
		id := a.GetBucketId().GetBucket()
		k := quotaKey{id["policy"], id["key"]}
		b := p.buckets[k]
		if b == nil {
			continue
		}
		if a.GetAbandonAction() != nil {
			delete(p.buckets, k)
			continue
		}
		q := a.GetQuotaAssignmentAction()
		if t := q.GetRateLimitStrategy().GetTokenBucket(); t != nil {
			part := 1.
			if b.fill(now); p.ratio && b.strategy.GetTokenBucket() != nil {
				part = b.tokens / b.most
			}
			b.most = float64(t.GetMaxTokens())
			b.tokens, b.filled = math.Floor(b.most*part), now
			b.perSecond = float64(t.GetTokensPerFill().GetValue()) / float64(t.GetFillInterval().GetSeconds())
		}
		b.strategy = q.GetRateLimitStrategy()
		b.until = now + q.GetAssignmentTimeToLive().GetSeconds()*int64(time.Second)
	}
}

// TestQuota divides limits among three data planes, of which each has its stream to another node, beside callers of
// these nodes. A node is killed, which decides for a third of the keys and serves one of the streams, and another one
// restarted in good order. Callers take at once what whoever decides then takes for free.
func TestQuota(t *testing.T) {
	plainOnly(t)
	t.Parallel()
	policies := quotaPolicies()
	f := newFleet(t, 3, policiesFile(policies), nil)
	f.args = append(f.args, "--envoy-config", quotaDir(t, policies))
	n := f.members
	f.start(n...)
	f.calm(n...)
	l := &load{t: t, f: f, policies: policies, start: time.Now(), quit: make(chan struct{})}
	t.Cleanup(l.end)
	planes := []*dataPlane{
		startDataPlane(l, true, 600, n[0], n[1], n[2]), startDataPlane(l, false, 600, n[1], n[2], n[0]),
		startDataPlane(l, true, 600, n[2], n[0], n[1]),
	}
	for range 4 {
		l.work.Go(l.callQuotas)
	}
	var suffered faults
	// goesOn waits until every data plane has admitted that much more, and has been denied some.
	goesOn := func(more int64) {
		t.Helper()
		for i, p := range planes {
			admitted, denied := p.admitted.Load()+more, p.denied.Load()+more
			eventually(t, 3*waitTimeout, fmt.Sprintf("data plane %d admits and denies", i),
				func() bool { return p.admitted.Load() >= admitted && p.denied.Load() >= denied })
		}
	}
	goesOn(300)

	victim, rest := n[2], n[:2]
	served := planes[2].connected.Load()
	alive := l.gone(victim)
	at := l.kill(victim)
	t.Log(l.clock(at), victim.name, "is killed")
	suffered.crashes = append(suffered.crashes, checker.Crash{At: at, Node: victim.name, Copied: true})
	l.tellDecided(rest[0])
	l.grab(rest[0])
	t.Logf("calm after %v", f.calm(rest...).Round(time.Millisecond))
	goesOn(300)
	expect.True(t, planes[2].connected.Load() != served,
		"the data plane whose stream was to the node that was killed has no other one")
	f.start(victim)
	t.Logf("%s is back: calm after %v", victim.name, f.calm(n...).Round(time.Millisecond))
	l.grab(victim)
	alive()
	goesOn(50)

	left := f.leave(n[0])
	l.grab(victim)
	f.start(n[0])
	t.Logf("%s left within %v, and is back: calm after %v", n[0].name, left.Round(time.Millisecond),
		f.calm(n...).Round(time.Millisecond))
	l.grab(victim)
	goesOn(300)
	l.end()

	l.calms = append(l.calms, l.now())
	h := l.history(suffered)
	for _, p := range planes {
		h.Operations = append(h.Operations, p.operations...)
	}
	// Others are refused what data planes hold and do not use.
	h.Operations = slices.DeleteFunc(h.Operations,
		func(op checker.Operation) bool { return op.Result == checker.Refused })
	report := checker.Check(h)
	for _, p := range policies {
		var borrowed, asked int
		for _, op := range h.Operations {
			switch {
			case op.Policy != p.Name || op.Result != checker.Admitted:
			case op.Borrowed:
				borrowed++
			default:
				asked++
			}
		}
		t.Logf("%-11s data planes admitted %5d, nodes %4d; of one key at most %d beyond the limit of %d", p.Name,
			borrowed, asked, report.Excess[p.Name], p.Limit)
		expect.True(t, borrowed >= 2*quotaLimit && asked != 0, "%s: too little was admitted to tell anything", p.Name)
	}
	tellViolations(t, report.Violations)
}

// TestRetryAfterIsEstimated: a data plane has a part of a limit, and cannot be asked for it. Whoever is refused for
// want of that is told so in every format that has a place for it, by the node that decides and by others; not so who
// is refused a key of which nothing is on loan.
func TestRetryAfterIsEstimated(t *testing.T) {
	t.Parallel()
	nodes := startCluster(t, 2, "--policies",
		writeFile(t, "policies.yaml", "policies: [{name: p, algorithm: sliding_log, limit: 100, window: 1h}]"),
		"--envoy-config", quotaDir(t, []checker.Policy{{Name: "p"}}))
	stream, err := quotav3.NewRateLimitQuotaServiceClient(nodes[0].connect()).StreamRateLimitQuotas(t.Context())
	must.NoError(t, err)
	must.NoError(t, stream.Send(&quotav3.RateLimitQuotaUsageReports{Domain: "edge",
		BucketQuotaUsages: []*quotav3.RateLimitQuotaUsageReports_BucketQuotaUsage{
			{BucketId: &quotav3.BucketId{Bucket: map[string]string{"policy": "p", "key": "lent"}},
				NumRequestsDenied: 50},
		}}))
	out, err := stream.Recv()
	must.True(t, err == nil && len(out.GetBucketAction()) != 0, "%v %v", out, err)
	type answer struct {
		allowed, estimated bool
		after              time.Duration
	}
	type check struct {
		name string
		ask  func(key string) (answer, error)
	}
	var checks []check
	add := func(name string, ask func(key string) (answer, error)) { checks = append(checks, check{name, ask}) }
	for _, p := range nodes {
		c := must.Value(client.Dial(t.Context(), p.grpc, client.WithoutLoans(), client.WithoutMemory(),
			client.WithTimeout(startTimeout)))(t)
		t.Cleanup(func() { _ = c.Close() })
		of := func(d client.Decision) answer { return answer{d.Allowed, d.RetryAfterEstimated, d.RetryAfter} }
		add(p.name+", HTTP", func(key string) (answer, error) {
			var d struct {
				Allowed   bool  `json:"allowed"`
				Estimated bool  `json:"retry_after_estimated"`
				AfterMS   int64 `json:"retry_after_ms"`
			}
			_, _, text, err := p.post("/v1/check", "application/json", fmt.Appendf(nil, `{"policy":"p","key":%q}`, key))
			if err == nil {
				err = json.Unmarshal(text, &d)
			}
			return answer{d.Allowed, d.Estimated, time.Duration(d.AfterMS) * time.Millisecond}, err
		})
		unary := p.dial()
		add(p.name+", gRPC", func(key string) (answer, error) {
			out, err := unary.Check(t.Context(),
				&weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: &weirv1.Target{Policy: "p", Key: key}}}})
			if err != nil {
				return answer{}, err
			}
			d := out.Results[0].GetDecision()
			return answer{d.GetAllowed(), d.GetRetryAfterEstimated(), time.Duration(d.GetRetryAfterNs())}, nil
		})
		add(p.name+", Go client", func(key string) (answer, error) { // by CheckStream
			d, err := c.Policy("p").Allow(t.Context(), key)
			return of(d), err
		})
		add(p.name+", Go client, batch", func(key string) (answer, error) {
			got, err := c.Check(t.Context(), []client.Check{{Policy: "p", Key: key}, {Policy: "p", Key: "other"}})
			if err != nil {
				return answer{}, err
			}
			return of(got[0].Decision), got[0].Err
		})
		add(p.name+", Go client, all or none", func(key string) (answer, error) {
			got, err := c.All(t.Context(), []client.Check{{Policy: "p", Key: key}, {Policy: "p", Key: "other"}})
			if err != nil {
				return answer{}, err
			}
			return of(got.Decisions[0]), nil
		})
		add(p.name+", Go client, reserve", func(key string) (answer, error) {
			_, d, err := c.Policy("p").Reserve(t.Context(), key)
			return of(d), err
		})
		add(p.name+", weir check", func(key string) (answer, error) {
			code, out, errs := weir(t, "check", key, "--policy", "p", "--addr", p.grpc, "--timeout", "20s", "-o",
				"json")
			var d struct {
				Estimated bool  `json:"retry_after_estimated"`
				AfterMS   int64 `json:"retry_after_ms"`
			}
			if err := json.Unmarshal([]byte(out), &d); err != nil {
				return answer{}, fmt.Errorf("%w: %s%s", err, out, errs)
			}
			return answer{code == 0, d.Estimated, time.Duration(d.AfterMS) * time.Millisecond}, nil
		})
	}
	for _, key := range []string{"lent", "used"} {
		d := must.Value(nodes[0].check(fmt.Sprintf(`{"policy":"p","key":%q,"cost":100,"partial":true}`, key)))(t)
		must.True(t, d.Allowed && d.Granted == 100 == (key == "used"), "%s: %+v", key, d)
		for _, c := range checks {
			got, err := c.ask(key)
			switch {
			case err != nil:
				t.Errorf("%s: %s: %v", key, c.name, err)
			case key == "lent" && (got.allowed || !got.estimated || got.after <= 0 || got.after > 30*time.Second):
				t.Errorf("%s: %+v, want an estimate of at most the time until the loan has ended", c.name, got)
			case key == "used" && (got.allowed || got.estimated || got.after < 30*time.Minute):
				t.Errorf("%s: %+v, want the time until the first units come back", c.name, got)
			}
		}
	}
}
