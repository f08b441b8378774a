package envoyquota

import (
	"context"
	"errors"
	"log/slog"
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
	"github.com/weirlimit/weir/internal/fairshare"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// world is data planes, other callers of the same keys and one owner of these, in virtual time.
type world struct {
	t       *testing.T
	r       *rand.Rand
	now     atomic.Int64
	events  testkit.Timeline
	limiter *limiter.Limiter
	files   *envoy.Config
	// service is that of the node at which data planes arrive next.
	service *Service
	planes  []*plane

	admitted  map[string][]int64 // by key, the instants of all true admissions
	uncovered map[string][]int64 // of them those by data planes without an assignment, or whose assignment has ended
	direct    int                // admitted by other callers
	refused   int                // of these
	fails     float64            // the part of the questions to owners that fail
	met       map[quirk]int      // how often each quirk of Envoy's client has shown
}

// quirk is something that Envoy's client does, and that assignments have to allow for.
type quirk string

const (
	oneTimer       quirk = "one timer reports all buckets"
	noTimeYet      quirk = "the first report of a bucket says that no time has passed"
	lookAlike      quirk = "buckets that differ in the seconds of their interval only are the same"
	startsFull     quirk = "a bucket that replaces another one is full"
	keepsRatio     quirk = "a bucket that replaces another one is as full as that was"
	fallsBack      quirk = "what an assignment leaves when it ends is what there is without one"
	allowsAll      quirk = "what is not configured admits everything"
	reusesNothing  quirk = "reuse_last_assignment does nothing"
	losesUsage     quirk = "usage is dropped when connecting again fails"
	looksNew       quirk = "after connecting again all buckets look new"
	abandonLoses   quirk = "what was not reported of a bucket is lost when it is abandoned"
	neverForgets   quirk = "a bucket without requests is reported for ever"
	afterTheStream quirk = "a response arrives although the stream has ended"
)

func (w *world) at(t int64, do func()) { w.events.At(t, do) }

func (w *world) after(d time.Duration, do func()) { w.at(w.now.Load()+int64(d), do) }

func (w *world) run(until time.Duration) {
	w.events.Run(w.start()+int64(until), w.now.Store)
}

func (w *world) start() int64 { return int64(time.Hour) }

const config = `
domain: edge
quota_buckets:
- bucket: {name: api, tenant: "*"}
  policy: p
  key: "{tenant}"
`

func newWorld(t *testing.T, seed uint64, policies string) *world {
	t.Helper()
	w := &world{
		t: t, r: rand.New(rand.NewPCG(seed, 7)),
		admitted: make(map[string][]int64), uncovered: make(map[string][]int64), met: make(map[quirk]int),
	}
	w.now.Store(w.start())
	set := must.Value(policy.Parse("policies.yaml", []byte(policies)))(t)
	w.files = must.Value(envoy.Parse([]envoy.File{{Name: "edge.yaml", Data: []byte(config)}}, envoy.Options{}))(t)
	w.limiter = limiter.New(limiter.Config{Policies: set, Clock: func() algo.Instant {
		now := w.now.Load()
		return algo.Instant{Mono: now, Wall: 1_700_000_000_000_000_000 + now}
	}})
	t.Cleanup(w.limiter.Close)
	w.service = w.serve()
	return w
}

func (w *world) serve() *Service { return w.serving(failing{w}, fairshare.New(0)) }

func (w *world) serving(quotas limit.Quotas, kept *fairshare.Places) *Service {
	return New(Config{
		Quotas: quotas, Service: w.limiter, Config: func() *envoy.Config { return w.files }, Now: w.now.Load,
		Kept:   kept,
		Caller: func(context.Context) string { return "" }, Logger: slog.New(slog.DiscardHandler),
		Metrics: NewMetrics(),
	})
}

// restart ends all streams, and has data planes connect to a node that knows nothing of them.
func (w *world) restart() {
	for _, p := range w.planes {
		p.cut()
	}
	w.service = w.serve()
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
	// refills: each assignment of a token bucket makes a full one. Otherwise one that is equal but for the seconds of
	// its interval is kept, and another one begins full.
	refills bool
	// ratio: with as much of it left as of the bucket before.
	ratio bool
	// rate is that of its clock.
	rate float64
	// none is its no_assignment_behavior, and expired its expired_assignment_behavior, which holds for expiredFor.
	none, expired behavior
	expiredFor    time.Duration
	// dropsUsage: a reconnection fails at first, and what was to be reported is lost.
	dropsUsage bool
	slow       time.Duration // the longest way in one direction
	fixed      time.Duration // the way, if it is always the same
	alone      bool          // it never connects again
}

// behavior is what a data plane does with a bucket that has no assignment, or whose assignment has ended.
type behavior uint8

const (
	unset behavior = iota // without an assignment: admit everything; when it has ended: as without one
	denies
	allows
	reuses      // nothing, as in Envoy
	trulyReuses // it goes on with the assignment that has ended, as the API has it
)

// plane is a fake of Envoy's client.
type plane struct {
	w *world
	profile
	buckets map[string]*fakeBucket
	session *session // nil: it is cut off
	epoch   int      // of the connection
	silent  bool     // the server takes reports, and is not heard
	hung    []func() // not nil: the server takes nothing for now, and this afterwards
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
	covered  bool                      // it has not ended
	quiet    bool                      // there was no request since the last report
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
	if p.expiredFor == 0 {
		p.expiredFor = 24 * time.Hour
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
	b.quiet = false
	switch s := b.strategy.GetStrategy().(type) {
	case nil:
		if ok = p.none == allows || p.none == unset; ok && p.none == unset {
			p.w.met[allowsAll]++
		}
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
		if !b.covered {
			p.w.uncovered[b.key] = append(p.w.uncovered[b.key], p.w.now.Load())
		}
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
				if b.allowed > 0 {
					p.w.met[losesUsage]++
				}
				b.allowed, b.denied = 0, 0
			}
			return
		}
		p.connect()
		p.w.met[looksNew] += len(p.buckets)
	}
	var all []*fakeBucket
	for _, b := range p.buckets {
		all = append(all, b)
	}
	slices.SortFunc(all, func(a, b *fakeBucket) int { return int(a.key[0]) - int(b.key[0]) })
	if len(all) > 1 {
		p.w.met[oneTimer]++
	}
	if len(all) > 0 {
		p.send(all)
	}
}

// delay is how long a message is in flight. Messages do not overtake each other.
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
		elapsed := (now - b.last) / int64(time.Second)
		if elapsed == 0 {
			p.w.met[noTimeYet]++
		}
		if b.quiet {
			p.w.met[neverForgets]++
		}
		m.BucketQuotaUsages = append(m.BucketQuotaUsages, &quotav3.RateLimitQuotaUsageReports_BucketQuotaUsage{
			BucketId: b.id, NumRequestsAllowed: b.allowed, NumRequestsDenied: b.denied,
			TimeElapsed: &durationpb.Duration{Seconds: elapsed},
		})
		b.allowed, b.denied, b.last, b.quiet = 0, 0, now, true
	}
	if p.session == nil {
		return // lost
	}
	s, epoch := p.session, p.epoch
	p.w.at(p.delay(&p.toThere), func() {
		handle := func() {
			if p.epoch == epoch {
				p.handled(s, m)
			}
		}
		if p.hung != nil {
			p.hung = append(p.hung, handle)
			return
		}
		handle()
	})
}

// handled has the server take in a report, and its response come back.
func (p *plane) handled(s *session, m *quotav3.RateLimitQuotaUsageReports) {
	epoch := p.epoch
	out := must.Value(s.handle(context.Background(), m))(p.w.t)
	if out == nil || p.silent {
		return
	}
	out = proto.Clone(out).(*quotav3.RateLimitQuotaResponse)
	// Once it is sent it may arrive although the stream ends meanwhile.
	lost := p.w.r.IntN(2) == 0
	p.w.at(p.delay(&p.toHere), func() {
		if p.epoch != epoch && !lost {
			p.w.met[afterTheStream]++
		}
		if p.epoch == epoch || !lost {
			p.receive(out)
		}
	})
}

// hang has the server take nothing for a time, in which the stream stays open, and then all of it.
func (p *plane) hang(d time.Duration) {
	p.hung = []func(){}
	p.w.after(d, func() {
		all := p.hung
		p.hung = nil
		for _, handle := range all {
			handle()
		}
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
			if b.allowed+b.denied > 0 {
				p.w.met[abandonLoses]++
			}
			delete(p.buckets, key)
			continue
		}
		q := a.GetQuotaAssignmentAction()
		s := q.GetRateLimitStrategy()
		p.readable(q)
		if tb := s.GetTokenBucket(); tb != nil {
			p.fill(b, tb)
		} else if s.GetStrategy() == nil || s.GetRequestsPerTimeUnit() != nil {
			continue // not implemented
		} else {
			b.tokens = nil
		}
		b.strategy, b.covered = s, true
		b.version++
		version := b.version
		life := time.Duration(q.GetAssignmentTimeToLive().GetSeconds()) * time.Second // not set: at once
		p.w.after(time.Duration(float64(life)/p.rate), func() {
			if b.version == version {
				p.expire(b)
			}
		})
	}
}

// readable fails if an assignment says what Envoy does not read as it is meant: parts of a second, or requests for a
// unit of time.
func (p *plane) readable(q *quotav3.RateLimitQuotaResponse_BucketAction_QuotaAssignmentAction) {
	p.w.t.Helper()
	life, s := q.GetAssignmentTimeToLive(), q.GetRateLimitStrategy()
	every := s.GetTokenBucket().GetFillInterval()
	if life.GetSeconds() < 1 || life.GetNanos() != 0 || s.GetStrategy() == nil || s.GetRequestsPerTimeUnit() != nil ||
		s.GetTokenBucket() != nil &&
			(every.GetSeconds() < 1 || every.GetNanos() != 0 || s.GetTokenBucket().GetTokensPerFill().GetValue() < 1) {
		p.w.t.Fatalf("Envoy does not read this: %v", q)
	}
}

// expire is onActionExpirationTimer.
func (p *plane) expire(b *fakeBucket) {
	b.covered = false
	end := func() {
		p.w.met[fallsBack]++
		b.strategy, b.tokens = nil, nil
	}
	switch p.expired {
	case reuses:
		p.w.met[reusesNothing]++
		end()
		return
	case unset:
		end()
		return
	case denies:
		b.strategy, b.tokens = blanket(typev3.RateLimitStrategy_DENY_ALL), nil
	case allows:
		b.strategy, b.tokens = blanket(typev3.RateLimitStrategy_ALLOW_ALL), nil
	case trulyReuses:
	}
	version := b.version
	p.w.after(p.expiredFor, func() {
		if b.version == version {
			end()
		}
	})
}

func (p *plane) fill(b *fakeBucket, tb *typev3.TokenBucket) {
	if old := b.strategy.GetTokenBucket(); old != nil && !p.refills && old.MaxTokens == tb.MaxTokens &&
		old.TokensPerFill.GetValue() == tb.TokensPerFill.GetValue() &&
		old.FillInterval.GetNanos() == tb.FillInterval.GetNanos() {
		p.w.met[lookAlike]++
		return // only the nanoseconds are compared
	}
	rate := float64(tb.TokensPerFill.GetValue()) / float64(tb.FillInterval.GetSeconds()) // infinite below a second
	n := &tokens{most: float64(tb.MaxTokens), rate: max(rate, 1./(365*24*3600)), left: float64(tb.MaxTokens),
		at: p.clock()}
	switch {
	case b.tokens != nil && p.ratio && !p.refills:
		p.w.met[keepsRatio]++
		b.tokens.fill(p.clock())
		n.left = math.Floor(n.most * b.tokens.left / b.tokens.most)
	case b.version > 0:
		p.w.met[startsFull]++
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
		got, err := w.limiter.Check(context.Background(),
			[]limit.Check{{Target: limit.Target{Policy: "p", Key: tenant}, Cost: 1}})
		must.True(w.t, err == nil && got[0].Err == nil, "%v %v", err, got)
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

// covered are the instants of the admissions under assignments that had not ended, and by other callers. extra tells of
// an instant how many others there were within the term of an assignment before it: they are charged when they are
// reported, as those of an assignment if there is one, which may then be dated too early.
func (w *world) covered(key string) (all []int64, extra func(t int64) int) {
	not := slices.Sorted(slices.Values(w.uncovered[key]))
	i := 0
	for _, t := range slices.Sorted(slices.Values(w.admitted[key])) {
		if i < len(not) && not[i] == t {
			i++
			continue
		}
		all = append(all, t)
	}
	return all, func(t int64) int {
		from, _ := slices.BinarySearch(not, t-int64(term))
		to, _ := slices.BinarySearch(not, t+1)
		return to - from
	}
}

// judgeBucket fails if there is an interval with more than capacity + rate·t admissions that were covered.
func (w *world) judgeBucket(key string, capacity, rate float64) {
	w.t.Helper()
	all, extra := w.covered(key)
	most, at := math.Inf(-1), 0
	for i, t := range all {
		now := float64(t) / 1e9
		// n(i) - rate·t(i) + max over the first of an interval of rate·t - (n-1)
		if v := rate*now - float64(i) - float64(extra(t)); v > most {
			most, at = v, i
		}
		if over := float64(i+1) - rate*now + most - capacity; over > 1e-6 {
			w.t.Fatalf("%d admissions in %v, %.2f more than %v + %v/s", i-at+1, time.Duration(t-all[at]), over, capacity,
				rate)
		}
	}
}

// judgeWindow fails if there are more than most admissions that were covered in a window of that length.
func (w *world) judgeWindow(key string, most int, window time.Duration) {
	w.t.Helper()
	all, extra := w.covered(key)
	first := 0
	for i, t := range all {
		for all[first] <= t-int64(window) {
			first++
		}
		if n := i - first + 1; n > most+extra(t-int64(window)) {
			w.t.Fatalf("%d admissions in %v, at most %d may be", n, window, most)
		}
	}
}
