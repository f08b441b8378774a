package envoyquota

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	quotav3 "github.com/envoyproxy/go-control-plane/envoy/service/rate_limit_quota/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/gateway/envoy"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
)

// world is data planes, other callers of the same keys and one owner of these, in virtual time.
type world struct {
	t       *testing.T
	r       *rand.Rand
	now     atomic.Int64
	events  events
	seq     int
	limiter *limiter.Limiter
	service *Service
	planes  []*plane
	log     []string

	admitted map[string][]int64 // by key, the instants of all true admissions
	direct   int                // of them by other callers
	refused  int                // of these
	fails    float64            // the part of the questions to owners that fail
}

type event struct {
	at  int64
	seq int
	do  func()
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].seq < e[j].seq
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	old := *e
	x := old[len(old)-1]
	*e = old[:len(old)-1]
	return x
}

func (w *world) at(t int64, do func()) {
	w.seq++
	heap.Push(&w.events, event{t, w.seq, do})
}

func (w *world) after(d time.Duration, do func()) { w.at(w.now.Load()+int64(d), do) }

func (w *world) run(until time.Duration) {
	end := w.start() + int64(until)
	for len(w.events) > 0 && w.events[0].at <= end {
		e := heap.Pop(&w.events).(event)
		w.now.Store(e.at)
		e.do()
	}
	w.now.Store(end)
}

func (w *world) start() int64 { return int64(time.Hour) }

func (w *world) note(format string, args ...any) {
	w.log = append(w.log, fmt.Sprintf("%8.3f ", float64(w.now.Load()-w.start())/1e9)+fmt.Sprintf(format, args...))
}

const config = `
domain: edge
quota_buckets:
- bucket: {name: api, tenant: "*"}
  policy: p
  key: "{tenant}"
`

func newWorld(t *testing.T, seed uint64, policies string) *world {
	t.Helper()
	w := &world{t: t, r: rand.New(rand.NewPCG(seed, 7)), admitted: make(map[string][]int64)}
	w.now.Store(w.start())
	set, err := policy.Parse("policies.yaml", []byte(policies))
	if err != nil {
		t.Fatal(err)
	}
	files, err := envoy.Parse([]envoy.File{{Name: "edge.yaml", Data: []byte(config)}}, envoy.Options{})
	if err != nil {
		t.Fatal(err)
	}
	w.limiter = limiter.New(limiter.Config{Policies: set, Clock: func() algo.Instant {
		now := w.now.Load()
		return algo.Instant{Mono: now, Wall: 1_700_000_000_000_000_000 + now}
	}})
	t.Cleanup(w.limiter.Close)
	w.service = w.serve(files)
	return w
}

func (w *world) serve(files *envoy.Config) *Service {
	return New(Config{Quotas: failing{w}, Service: w.limiter, Config: func() *envoy.Config { return files }, Now: w.now.Load})
}

// failing is the way to owners, on which questions and answers are lost.
type failing struct{ w *world }

func (f failing) Quota(ctx context.Context, in []limit.Quota, out []limit.QuotaLent) error {
	before := f.w.r.Float64() < f.w.fails/2
	if before {
		return errors.New("not reached")
	}
	if err := f.w.limiter.Quota(ctx, in, out); err != nil {
		return err
	}
	if f.w.r.Float64() < f.w.fails/2 {
		return errors.New("not answered")
	}
	return nil
}

// profile is what is peculiar to a version or a setting of a data plane.
type profile struct {
	name string
	// refills: each assignment of a token bucket makes a full one. Otherwise one that is equal but for the seconds of its interval is
	// kept, and another one begins full.
	refills bool
	// ratio: with as much of it left as of the bucket before.
	ratio bool
	// rate is that of its clock.
	rate float64
	// allows: it admits what has no assignment, or not any more.
	allows bool
	// dropsUsage: a reconnection fails at first, and what was to be reported is lost.
	dropsUsage bool
	slow       time.Duration // the longest way in one direction
	fixed      time.Duration // the way, if it is always the same
	alone      bool          // it never connects again
}

// plane is a fake of Envoy's client.
type plane struct {
	w *world
	profile
	buckets map[string]*fakeBucket
	session *session // nil: it is cut off
	epoch   int      // of the connection
	silent  bool     // the server takes reports, and is not heard
	started bool
	toThere int64 // when the last report arrives
	toHere  int64
	allowed int
	denied  int
}

// fakeBucket is what it knows of a bucket.
type fakeBucket struct {
	id       *quotav3.BucketId
	key      string
	allowed  uint64
	denied   uint64
	last     int64
	strategy *typev3.RateLimitStrategy // nil: none was assigned, or not any more
	version  int
	tokens   *tokens
}

// tokens is Envoy's AtomicTokenBucketImpl.
type tokens struct {
	most, rate, left float64
	at               float64
}

func (b *tokens) fill(now float64) {
	b.left = min(b.most, b.left+(now-b.at)*b.rate)
	b.at = now
}

func (p *plane) clock() float64 { return float64(p.w.now.Load()) / 1e9 * p.rate }

func (w *world) plane(p profile) *plane {
	if p.rate == 0 {
		p.rate = 1
	}
	f := &plane{w: w, profile: p, buckets: make(map[string]*fakeBucket)}
	w.planes = append(w.planes, f)
	return f
}

func bucketID(tenant string) *quotav3.BucketId {
	return &quotav3.BucketId{Bucket: map[string]string{"name": "api", "tenant": tenant}}
}

// request is one request that comes to the data plane.
func (p *plane) request(tenant string) (ok bool) {
	b := p.buckets[tenant]
	if b == nil {
		b = &fakeBucket{id: bucketID(tenant), key: tenant, last: p.w.now.Load()}
		p.buckets[tenant] = b
		if !p.started {
			p.started = true
			p.connect()
			p.w.after(time.Duration(float64(period)/p.rate), p.timer)
		}
		ok = p.decide(b)
		p.send([]*fakeBucket{b})
		return ok
	}
	return p.decide(b)
}

func (p *plane) decide(b *fakeBucket) (ok bool) {
	switch s := b.strategy.GetStrategy().(type) {
	case nil:
		ok = p.allows
	case *typev3.RateLimitStrategy_BlanketRule_:
		ok = s.BlanketRule == typev3.RateLimitStrategy_ALLOW_ALL
	case *typev3.RateLimitStrategy_TokenBucket:
		if b.tokens.fill(p.clock()); b.tokens.left >= 1 {
			b.tokens.left--
			ok = true
		}
	}
	if ok {
		b.allowed++
		p.allowed++
		p.w.admitted[b.key] = append(p.w.admitted[b.key], p.w.now.Load())
	} else {
		b.denied++
		p.denied++
	}
	return ok
}

func (p *plane) connect() {
	p.epoch++
	p.session = p.w.service.open("")
}

// cut ends the stream. What is on its way is lost from some point on; the server's session is over now.
func (p *plane) cut() {
	if p.session == nil {
		return
	}
	p.w.note("%s cut", p.name)
	p.session.close()
	p.session = nil
	p.epoch++
}

// timer is the one timer for all buckets.
func (p *plane) timer() {
	p.w.after(time.Duration(float64(period)/p.rate), p.timer)
	if p.session == nil {
		if p.alone {
			return
		}
		if p.dropsUsage && p.w.r.IntN(2) == 0 {
			for _, b := range p.buckets {
				b.allowed, b.denied = 0, 0
			}
			return
		}
		p.connect()
	}
	var all []*fakeBucket
	for _, b := range p.buckets {
		all = append(all, b)
	}
	slices.SortFunc(all, func(a, b *fakeBucket) int { return int(a.key[0]) - int(b.key[0]) })
	if len(all) > 0 {
		p.send(all)
	}
}

// delay is how long a message is under way. Messages do not overtake each other.
func (p *plane) delay(last *int64) int64 {
	d := time.Duration(p.w.r.Int64N(int64(20 * time.Millisecond)))
	if p.slow > 0 && p.w.r.IntN(3) == 0 {
		d = time.Duration(p.w.r.Int64N(int64(p.slow)))
	}
	if p.fixed > 0 {
		d = p.fixed
	}
	*last = max(*last, p.w.now.Load()+int64(d))
	return *last
}

func (p *plane) send(all []*fakeBucket) {
	m := &quotav3.RateLimitQuotaUsageReports{Domain: "edge"}
	now := p.w.now.Load()
	for _, b := range all {
		m.BucketQuotaUsages = append(m.BucketQuotaUsages, &quotav3.RateLimitQuotaUsageReports_BucketQuotaUsage{
			BucketId: b.id, NumRequestsAllowed: b.allowed, NumRequestsDenied: b.denied,
			TimeElapsed: &durationpb.Duration{Seconds: (now - b.last) / int64(time.Second)},
		})
		b.allowed, b.denied, b.last = 0, 0, now
	}
	if p.session == nil {
		return // lost
	}
	s, epoch := p.session, p.epoch
	p.w.at(p.delay(&p.toThere), func() {
		if p.epoch != epoch {
			return
		}
		out, err := s.handle(context.Background(), m)
		if err != nil {
			p.w.t.Fatal(err)
		}
		if out == nil || p.silent {
			return
		}
		out = proto.Clone(out).(*quotav3.RateLimitQuotaResponse)
		// Once it is sent it may arrive although the stream ends meanwhile.
		lost := p.w.r.IntN(2) == 0
		p.w.at(p.delay(&p.toHere), func() {
			if p.epoch == epoch || !lost {
				p.receive(out)
			}
		})
	})
}

// receive is onQuotaResponseImpl.
func (p *plane) receive(out *quotav3.RateLimitQuotaResponse) {
	for _, a := range out.BucketAction {
		key := a.GetBucketId().GetBucket()["tenant"]
		b := p.buckets[key]
		if b == nil {
			continue
		}
		if a.GetAbandonAction() != nil {
			p.w.note("%s abandons %s", p.name, key)
			delete(p.buckets, key)
			continue
		}
		q := a.GetQuotaAssignmentAction()
		s := q.GetRateLimitStrategy()
		if tb := s.GetTokenBucket(); tb != nil {
			p.fill(b, tb)
		} else if s.GetStrategy() == nil || s.GetRequestsPerTimeUnit() != nil {
			continue // not implemented
		} else {
			b.tokens = nil
		}
		b.strategy = s
		b.version++
		version := b.version
		p.w.note("%s has %v", p.name, s)
		life := time.Duration(q.GetAssignmentTimeToLive().GetSeconds()) * time.Second // not set: at once
		p.w.after(time.Duration(float64(life)/p.rate), func() {
			if b.version == version {
				b.strategy, b.tokens = nil, nil
			}
		})
	}
}

func (p *plane) fill(b *fakeBucket, tb *typev3.TokenBucket) {
	if old := b.strategy.GetTokenBucket(); old != nil && !p.refills && old.MaxTokens == tb.MaxTokens &&
		old.TokensPerFill.GetValue() == tb.TokensPerFill.GetValue() && old.FillInterval.GetNanos() == tb.FillInterval.GetNanos() {
		return // only the nanoseconds are compared
	}
	rate := float64(tb.TokensPerFill.GetValue()) / float64(tb.FillInterval.GetSeconds()) // infinite below a second
	n := &tokens{most: float64(tb.MaxTokens), rate: max(rate, 1./(365*24*3600)), left: float64(tb.MaxTokens), at: p.clock()}
	if b.tokens != nil && p.ratio && !p.refills {
		b.tokens.fill(p.clock())
		n.left = math.Floor(n.most * b.tokens.left / b.tokens.most)
	}
	b.tokens = n
}

// load sends requests to a data plane, so many a second on average, between two instants.
func (p *plane) load(tenant string, perSecond float64, from, to time.Duration) {
	var next func()
	next = func() {
		if p.w.now.Load() >= p.w.start()+int64(to) {
			return
		}
		p.request(tenant)
		p.w.after(time.Duration(p.w.r.ExpFloat64()/perSecond*1e9), next)
	}
	p.w.at(p.w.start()+int64(from), next)
}

// ask sends checks of the key past all data planes, as any other front end does.
func (w *world) ask(tenant string, perSecond float64, from, to time.Duration) {
	var next func()
	next = func() {
		if w.now.Load() >= w.start()+int64(to) {
			return
		}
		got, err := w.limiter.Check(context.Background(), []limit.Check{{Target: limit.Target{Policy: "p", Key: tenant}, Cost: 1}})
		if err != nil || got[0].Err != nil {
			w.t.Fatal(err, got)
		}
		if got[0].Allowed {
			w.admitted[tenant] = append(w.admitted[tenant], w.now.Load())
			w.direct++
		} else {
			w.refused++
		}
		w.after(time.Duration(w.r.ExpFloat64()/perSecond*1e9), next)
	}
	w.at(w.start()+int64(from), next)
}

// judgeBucket fails if there is an interval with more than capacity + rate·t admissions.
func (w *world) judgeBucket(key string, capacity, rate float64) {
	w.t.Helper()
	all := slices.Sorted(slices.Values(w.admitted[key]))
	most, at := math.Inf(-1), 0
	for i, t := range all {
		now := float64(t) / 1e9
		// n(i) - rate·t(i) + max over the first of an interval of rate·t - (n-1)
		if v := rate*now - float64(i); v > most {
			most, at = v, i
		}
		if over := float64(i+1) - rate*now + most - capacity; over > 1e-6 {
			w.fatalf("%d admissions in %v, %.2f more than %v + %v/s", i-at+1, time.Duration(t-all[at]), over, capacity, rate)
		}
	}
}

// judgeWindow fails if there are more than most admissions in a window of that length.
func (w *world) judgeWindow(key string, most int, window time.Duration) {
	w.t.Helper()
	all := slices.Sorted(slices.Values(w.admitted[key]))
	first := 0
	for i, t := range all {
		for all[first] <= t-int64(window) {
			first++
		}
		if n := i - first + 1; n > most {
			w.fatalf("%d admissions in %v, at most %d may be", n, window, most)
		}
	}
}

func (w *world) fatalf(format string, args ...any) {
	w.t.Helper()
	for _, line := range w.log[max(0, len(w.log)-40):] {
		w.t.Log(line)
	}
	w.t.Fatalf(format, args...)
}
