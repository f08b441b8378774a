package limiter

import (
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// tape is a Recorder that keeps all it hears.
type tape struct {
	mu      sync.Mutex
	samples []Sample
	ticks   int
}

func (r *tape) Record(s *Sample) {
	r.mu.Lock()
	defer r.mu.Unlock()
	kept := *s
	kept.Scope, kept.Key = strings.Clone(s.Scope), strings.Clone(s.Key)
	r.samples = append(r.samples, kept)
}

func (r *tape) Tick(int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ticks++
}

func (r *tape) take() []Sample {
	r.mu.Lock()
	defer r.mu.Unlock()
	defer func() { r.samples = nil }()
	return r.samples
}

// Whichever node is asked, each decision is recorded once by the cluster, and a peek is not.
func TestRecorderHearsEachDecision(t *testing.T) {
	heard := new(tape)
	inBubble(t, 2, Config{Policies: policies(t, refusing), Recorder: heard}, func(t *testing.T, c *testCluster) {
		inline := &algo.Limit{Algorithm: algo.TokenBucket, Limit: 10, Window: time.Second}
		for owner := range 2 {
			n := c.nodes[0]
			key, short := c.owned("log", owner, 0), c.owned("short", owner, 0)
			for _, tt := range []struct {
				what string
				do   func()
				want Sample
			}{
				{"admitted", func() { n.check(t, named("log", key, 4)) }, Sample{Scope: "log", Key: key, Weight: 1,
					Algorithm: algo.SlidingLog, Window: 10 * time.Second, Limit: 5, Remaining: 1}},
				{"peek", func() { n.check(t, named("log", key, 0)) }, Sample{}},
				{"refused", func() { n.check(t, named("log", key, 2)) }, Sample{Scope: "log", Key: key, Weight: 1,
					Refused: true, Algorithm: algo.SlidingLog, Window: 10 * time.Second, Limit: 5, Remaining: 1}},
				{"shadow", func() { n.check(t, named("shadow", short, 6)) },
					Sample{Scope: "shadow", Key: short, Weight: 1, Refused: true, Algorithm: algo.SlidingLog,
						Window: 10 * time.Second, Limit: 5, Remaining: 5}},
				{"blocked", func() { n.check(t, named("blocked", key, 1)) },
					Sample{Scope: "blocked", Key: key, Weight: 1, Refused: true}},
				{"several limits", func() { n.check(t, named("two", short, 1)) }, Sample{Scope: "two", Key: short,
					Weight: 1, Algorithm: algo.SlidingLog, Window: 10 * time.Second, Limit: 5, Remaining: 4}},
				{"lease", func() { acquire(t, n, short) },
					Sample{Scope: "jobs", Key: short, Weight: 1, Algorithm: algo.Concurrency, Limit: 5, Remaining: 4}},
				{"reset", func() { _ = n.Reset(t.Context(), onPolicy("jobs", short)) }, Sample{}},
				{"inline", func() {
					n.check(t, limit.Check{Target: limit.Target{Limit: inline, Namespace: "api", Key: key}, Cost: 3})
				},
					Sample{Scope: limit.InlineScope("api", inline), Key: key, Weight: 1, Algorithm: algo.TokenBucket,
						Window: time.Second, Limit: 10, Remaining: 7}},
			} {
				tt.do()
				got := heard.take()
				if tt.want.Weight == 0 {
					expect.True(t, len(got) == 0, "%s: %+v", tt.what, got)
					continue
				}
				if tt.want.Algorithm == algo.Concurrency && len(got) == 1 {
					got[0].Window = 0 // that of a lease is nobody's business here
				}
				expect.True(t, len(got) == 1 && got[0] == tt.want,
					"%s, owner %d: %+v, want %+v", tt.what, owner, got, tt.want)
			}
		}
		// Remembered by the node that was asked: the owner never hears of it.
		key := c.owned("log", 1, 0)
		c.nodes[0].check(t, named("log", key, 2))
		heard.take()
		c.wantMessages(0, "remembered", func() { c.nodes[0].check(t, named("log", key, 2)) })
		// It says how full the key is as the owner's answer did: what is refused is seldom as empty as it was when it
		// was last admitted.
		want := Sample{Scope: "log", Key: key, Weight: 1, Refused: true, Algorithm: algo.SlidingLog,
			Window: 10 * time.Second, Limit: 5, Remaining: 1}
		got := heard.take()
		expect.True(t, len(got) == 1 && got[0] == want, "remembered: %+v, want %+v", got, want)
	})
}

func acquire(t *testing.T, n *testNode, key string) {
	t.Helper()
	d := must.Value(n.Acquire(t.Context(), limit.Acquire{Target: onPolicy("jobs", key), Cost: 1}))(t)
	expect.True(t, d.Allowed, "%v", d)
}

// However many decisions there are, few are recorded, and those stand for all; when there are few again, each is
// recorded.
func TestSamplerKeepsToItsBudget(t *testing.T) {
	heard := new(tape)
	var s sampler
	s.start(heard)
	decisions := uint64(0)
	ask := func(n int) (recorded, stands int64, variance float64) {
		for range n {
			decisions++
			if w := s.weight(decisions); w > 0 {
				s.record(&Sample{Weight: w})
			}
		}
		for _, one := range heard.take() {
			recorded, stands = recorded+1, stands+one.Weight
			variance += float64(one.Weight) * float64(one.Weight-1)
		}
		return recorded, stands, variance
	}
	n, stands, _ := ask(samplesAtOnce)
	expect.True(t, n == samplesAtOnce && stands == samplesAtOnce, "of few: %d recorded, for %d", n, stands)
	s.tick(0)
	const many = 1_000_000
	for round := range 5 {
		n, stands, variance := ask(many)
		expect.True(t, round <= 0 || n <= 2*samplesATick, "round %d: %d recorded", round, n)
		if off := math.Abs(float64(stands - many)); off > 6*math.Sqrt(variance) {
			t.Errorf("round %d: %d recorded stand for %d, %.0f off, standard deviation %.0f", round, n, stands, off,
				math.Sqrt(variance))
		}
		s.tick(0)
	}
	for range maxShift {
		s.tick(0)
	}
	n, stands, _ = ask(10)
	expect.True(t, n == 10 && stands == 10, "of few, later: %d recorded, for %d", n, stands)
	var none sampler
	none.start(nil)
	for n := range uint64(many) {
		must.Equal(t, none.weight(n+1), 0, "without a recorder something is recorded")
	}
	none.tick(0)
}

// Requests that come in a fixed order do not all get the same key recorded.
func TestSamplerAndPeriods(t *testing.T) {
	for _, period := range []int{2, 8, 64, 89, 100, 1000} {
		heard := make([]int64, period)
		var s sampler
		s.shift.Store(6)
		const many = 1_000_000
		for n := range many {
			if w := s.weight(uint64(n + 1)); w > 0 {
				heard[n%period] += w
			}
		}
		want := float64(many / period)
		for key, n := range heard {
			expect.True(t, math.Abs(float64(n)-want) <= 6*math.Sqrt(want*64),
				"period %d: %d recorded of key %d, want %.0f", period, n, key, want)
		}
	}
}

// What a borrower has admitted of its loan is recorded when it tells.
func TestRecorderHearsOfLoans(t *testing.T) {
	heard := new(tape)
	l := started(t, Config{Policies: policies(t, loanPolicies), Recorder: heard})
	target := onPolicy("p", "k")
	b := limit.Borrow{Target: target, ID: algo.LoanID{Borrower: 1, Number: 5}, Want: 16}
	lent(t, l, b)
	expect.True(t, len(heard.take()) == 0, "of a loan that nothing was spent of")
	is, holds, err := l.Describe(&target)
	expect.True(t, err == nil && holds && is.OnLoan == 16, "%+v, %t, %v, want 16 on loan", is, holds, err)
	b.Want, b.Totals = 0, algo.Totals{Granted: 16, Spent: 9, Checks: 3}
	lent(t, l, b)
	lent(t, l, b) // a repetition
	got := heard.take()
	expect.True(t, len(got) == 1 && got[0].Scope == "p" && got[0].Key == "k" && got[0].Weight == 3 && !got[0].Refused,
		"%+v, want 3 of p and k", got)
}

// TestReportCountsNoMoreThanABorrowerCanAdmit: a report of a loan under a limit that its caller has chosen does not
// drown the busiest keys and the counts of decisions by a number that nobody has admitted.
func TestReportCountsNoMoreThanABorrowerCanAdmit(t *testing.T) {
	heard := new(tape)
	l := started(t, Config{Policies: policies(t, loanPolicies), Recorder: heard})
	const many = 1 << 52
	target := inlineTarget(algo.Limit{Algorithm: algo.TokenBucket, Limit: many, Window: time.Hour}, "k")
	id := algo.LoanID{Borrower: 1, Number: 5}
	lent(t, l, limit.Borrow{Target: target, ID: id, Totals: algo.Totals{Granted: many, Spent: many, Checks: many}})
	got := heard.take()
	expect.True(t, len(got) == 1 && got[0].Weight == maxReported, "after a report of %d checks: %+v", many, got)
	for _, s := range l.Counts() {
		expect.True(t, s.Policy != inlineName || s.Allowed == maxReported && s.Borrowed == maxReported,
			"after a report of %d checks: %+v", many, s)
	}
	quota := limit.Quota{Target: target, ID: algo.LoanID{Borrower: 2, Number: 1},
		Totals: algo.Totals{Granted: many, Spent: many}}
	var out [1]limit.QuotaLent
	if err := l.Quota(t.Context(), []limit.Quota{quota}, out[:]); err != nil || out[0].Err != nil {
		t.Fatal(err, out[0].Err)
	}
	got = heard.take()
	expect.True(t, len(got) == 1 && got[0].Weight == maxReported, "after a quota's report of %d: %+v", many, got)
}
