package envoyquota

import (
	"slices"
	"testing"
	"time"

	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

const (
	tokenPolicy  = "policies:\n- {name: p, algorithm: token_bucket, limit: 20, window: 1s, capacity: 60}\n"
	windowPolicy = "policies:\n- {name: p, algorithm: sliding_log, limit: 1200, window: 60s}\n"
)

// judged are policies, with what they promise.
var judged = []struct {
	name, text string
	judge      func(w *world)
}{
	{"token bucket", tokenPolicy, func(w *world) { w.judgeBucket("a", 60, 20) }},
	{"window", windowPolicy, func(w *world) { w.judgeWindow("a", 1200, time.Minute) }},
}

// profiles has one for each peculiarity of Envoy's client, with the settings that an operator must make.
var profiles = []profile{
	{name: "new", ratio: true, none: denies, expired: denies},
	{name: "middle", none: denies, expired: denies},
	{name: "old", refills: true, none: denies, expired: reuses},
	{name: "slow", ratio: true, slow: Delivery/2 - 50*time.Millisecond, none: denies, expired: denies},
	{name: "slow old", refills: true, slow: Delivery/2 - 50*time.Millisecond, none: denies},
	{name: "fast clock", ratio: true, rate: 1.001, none: denies, expired: denies, expiredFor: 3 * time.Second},
	{name: "slow clock", refills: true, rate: 0.999, none: denies, expired: denies},
	{name: "drops usage", dropsUsage: true, none: denies, expired: denies},
}

func TestBounds(t *testing.T) {
	for _, p := range judged {
		t.Run(p.name, func(t *testing.T) {
			for i, profile := range profiles {
				t.Run(profile.name, func(t *testing.T) {
					for seed := range uint64(5) {
						w := newWorld(t, seed*100+uint64(i), p.text)
						w.weather(i, int(seed))
						p.judge(w)
					}
				})
			}
		})
	}
}

// weather has a data plane of the i-th profile, others, and callers of other front ends ask for the same key, while
// streams are cut, and runs it.
func (w *world) weather(i, seed int) {
	w.t.Helper()
	w.fails = []float64{0, 0.1}[seed%2]
	first := w.plane(profiles[i])
	first.load("a", 30, 0, 200*time.Second)
	for j, rate := range []float64{3, 0.5, 10}[:seed%4] {
		f := w.plane(profiles[(i+j+seed)%len(profiles)])
		f.load("a", rate, time.Duration(j*7)*time.Second, 200*time.Second)
		for range 3 { // a burst, which follows and is followed by little
			at := time.Duration(w.r.Int64N(int64(190 * time.Second)))
			f.load("a", 100, at, at+time.Duration(w.r.Int64N(int64(8*time.Second))))
		}
	}
	for _, f := range w.planes {
		for range seed % 5 {
			w.after(time.Duration(w.r.Int64N(int64(200*time.Second))), f.cut)
		}
	}
	for range seed % 3 {
		w.after(time.Duration(w.r.Int64N(int64(200*time.Second))), w.restart)
	}
	if rate := []float64{0, 8, 60}[seed%3]; rate > 0 {
		w.ask("a", rate, 20*time.Second, 230*time.Second)
	}
	w.run(260 * time.Second)
	allowed := 0
	for _, f := range w.planes {
		allowed += f.allowed
	}
	if allowed < 100 {
		w.t.Fatalf("only %d were admitted", allowed)
	}
}

// TestSilence has a server that takes nothing for a while, or is not heard, with streams that stay open, for as long
// that assignments end. Under assignments no more than the limit is admitted. What is admitted after their end, or
// without one, goes by the settings.
func TestSilence(t *testing.T) {
	for _, p := range judged {
		for _, of := range []struct {
			profile
			covered bool // nothing else is admitted
		}{
			{profile{name: "denies", none: denies, expired: denies}, true},
			{profile{name: "denies for a while", none: denies, expired: denies, expiredFor: 10 * time.Second}, true},
			{profile{name: "reuses nothing", none: denies, expired: reuses}, true},
			{profile{name: "denies without", none: denies}, true},
			{profile{name: "denies then allows", none: allows, expired: denies, expiredFor: 5 * time.Second}, false},
			{profile{name: "allows first", none: allows, expired: denies}, false},
			{profile{name: "allows", none: denies, expired: allows, expiredFor: 20 * time.Second}, false},
			{profile{name: "unset"}, false},
			{profile{name: "truly reuses", none: denies, expired: trulyReuses}, false},
		} {
			t.Run(p.name+"/"+of.name, func(t *testing.T) {
				uncovered := 0
				for seed := range uint64(2) {
					w := newWorld(t, seed, p.text)
					f, other := w.plane(of.profile), w.plane(profiles[seed%3])
					f.load("a", 8, 0, 57*time.Second)
					f.load("a", 8, 80*time.Second, 300*time.Second) // with some of its last assignment left
					other.load("a", 5, 5*time.Second, 300*time.Second)
					w.ask("a", 5, 10*time.Second, 300*time.Second)
					w.ask("a", 40, 62*time.Second, 220*time.Second) // for whatever comes free
					silence := func(at, d time.Duration, p *plane) {
						w.at(w.start()+int64(at), func() { p.silent = true })
						w.at(w.start()+int64(at+d), func() { p.silent = false })
					}
					silence(60*time.Second, 50*time.Second, f)
					silence(time.Duration(55+seed)*time.Second, 30*time.Second, other)
					w.at(w.start()+int64(160*time.Second), func() { f.hang(time.Duration(20+5*seed) * time.Second) })
					if seed%2 == 1 {
						w.at(w.start()+int64(time.Duration(165+4*seed)*time.Second), w.restart)
					}
					var before int
					w.at(w.start()+int64(230*time.Second), func() { before = f.allowed })
					w.run(320 * time.Second)
					p.judge(w)
					uncovered += len(w.uncovered["a"])
					if f.allowed < before+100 {
						w.t.Fatalf("only %d were admitted once the server was heard again", f.allowed-before)
					}
				}
				expect.Equal(t, (uncovered == 0), of.covered, "%d were admitted without an assignment", uncovered)
			})
		}
	}
}

// TestQuirks: each peculiarity of Envoy's client that assignments have to allow for shows in some profile, but for the
// two of buckets that are replaced, which DENY_ALL before an assignment leaves nothing to be peculiar with.
func TestQuirks(t *testing.T) {
	met := make(map[quirk]int)
	for i, p := range append(slices.Clone(profiles), profile{name: "unset"},
		profile{name: "unset, old", refills: true}) {
		w := newWorld(t, uint64(i), windowPolicy)
		f := w.plane(p)
		f.load("a", 10, 0, 200*time.Second)
		f.load("b", 3, 0, 100*time.Second) // abandoned after that
		f.load("c", 1, 0, 10*time.Second)
		f.load("c", 5, 55*time.Second, 60*time.Second)
		for range 8 {
			w.after(time.Duration(w.r.Int64N(int64(200*time.Second))), f.cut)
		}
		w.at(w.start()+int64(80*time.Second), func() { f.silent = true })
		w.at(w.start()+int64(105*time.Second), func() { f.silent = false })
		w.run(200 * time.Second)
		w.judgeWindow("a", 1200, time.Minute)
		for q, n := range w.met {
			met[q] += n
		}
	}
	for _, q := range []quirk{
		oneTimer, noTimeYet, startsFull, fallsBack, allowsAll, reusesNothing, losesUsage, looksNew, abandonLoses,
		neverForgets, afterTheStream,
	} {
		expect.True(t, met[q] != 0, "it does not show that %s", q)
	}
	for _, q := range []quirk{lookAlike, keepsRatio} {
		expect.Equal(t, met[q], 0, "times: %s", q)
	}
}

// TestReload: what a policy no longer allows to be divided is denied from the next report on, and given back by its
// owner's clock alone. What had been assigned may be spent until then.
func TestReload(t *testing.T) {
	const was = "policies:\n- {name: p, algorithm: sliding_log, limit: 1200, window: 60s}\n"
	for name, is := range map[string]string{
		"leaky bucket":   "policies:\n- {name: p, algorithm: leaky_bucket, limit: 1200, window: 60s}\n",
		"count denied":   "policies:\n- {name: p, algorithm: sliding_log, limit: 1200, window: 60s, count_denied: true}\n",
		"not lent":       "policies:\n- {name: p, algorithm: sliding_log, limit: 1200, window: 60s, lend: false}\n",
		"prices":         "policies:\n- {name: p, algorithm: sliding_log, limit: 1200, window: 60s, prices: {input_tokens: 3}}\n",
		"blocked":        "policies:\n- {name: p, algorithm: sliding_log, limit: 1200, window: 60s, overrides: [{key: a, blocked: true}]}\n",
		"leaky override": "policies:\n- {name: p, algorithm: sliding_log, limit: 1200, window: 60s, overrides: [{key: a, limits: [{algorithm: leaky_bucket, limit: 600, window: 60s}]}]}\n",
		"removed":        "policies:\n- {name: q, algorithm: sliding_log, limit: 1200, window: 60s}\n",
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 1, was)
			f := w.plane(profiles[0])
			f.load("a", 30, 0, 100*time.Second)
			w.ask("a", 10, 0, 40*time.Second)
			w.at(w.start()+int64(41*time.Second), func() {
				set := must.Value(policy.Parse("policies.yaml", []byte(is)))(t)
				w.limiter.SetPolicies(set)
			})
			var allowed, denied int
			w.at(w.start()+int64(41*time.Second+period*2), func() { allowed, denied = f.allowed, f.denied })
			w.run(100 * time.Second)
			if f.allowed > allowed || f.denied < denied+1000 {
				w.t.Fatalf("%d were admitted, and %d denied, after the second report that followed", f.allowed-allowed,
					f.denied-denied)
			}
			w.judgeWindow("a", 1200, time.Minute)
			set := must.Value(policy.Parse("policies.yaml", []byte(was)))(t)
			w.limiter.SetPolicies(set)
			f.load("a", 10, 100*time.Second, 150*time.Second)
			w.run(150 * time.Second)
			if f.allowed < allowed+100 {
				w.t.Fatalf("only %d were admitted under the policy that there was before", f.allowed-allowed)
			}
		})
	}
}

// TestTerm spends an assignment at the last moment that there is, of a data plane that is as far away as may be and was
// cut off.
func TestTerm(t *testing.T) {
	w := newWorld(t, 1, windowPolicy)
	f := w.plane(profile{name: "last moment", alone: true})
	f.fixed = Delivery/2 - 100*time.Millisecond
	w.at(w.start(), func() { f.request("a") })
	cut, last := 2*f.fixed+time.Millisecond, 2*f.fixed+Life-time.Millisecond
	w.at(w.start()+int64(cut), f.cut)
	spent := 0
	w.at(w.start()+int64(last), func() {
		for f.request("a") {
			spent++
		}
	})
	w.ask("a", 200, 0, 100*time.Second)
	w.run(100 * time.Second)
	if spent < 10 {
		w.t.Fatalf("spent %d", spent)
	}
	w.judgeWindow("a", 1200, time.Minute)
	if n := len(w.admitted["a"]); n < 1200+900 {
		w.t.Fatalf("only %d were admitted", n)
	}
}

// TestAttribute returns of loans no more than nobody can have spent of them, whichever of two loans was spent.
func TestAttribute(t *testing.T) {
	b := &bucket{loans: []*loan{{number: 1, units: 10, left: 10, asked: 1, sent: 1, replaced: 2},
		{number: 2, units: 10, left: 10, asked: 2, sent: 2}}}
	b.seen, b.used, b.demand = 2, 2, 1
	if excess := b.report(3, usage{allowed: 7}); excess != 0 || b.loans[0].left != 3 || b.loans[1].left != 10 {
		t.Fatalf("%d, %+v %+v", excess, b.loans[0], b.loans[1])
	}
	must.Equal(t, b.report(2+int64(Delivery), usage{allowed: 1}), 0)
	if l := b.loans[0]; !l.over || l.totals().Spent != 8 || l.totals().Returned != 2 {
		t.Fatalf("a loan that was replaced, as it stands after Delivery: %+v", l)
	}
	must.Equal(t, b.report(3+int64(Delivery), usage{allowed: 13}), 3, "of what nobody lent")
}

// TestUse holds data planes to using most of a limit that they want more of.
func TestUse(t *testing.T) {
	for _, c := range []struct {
		name, policy string
		rates        []float64
		other        float64
		most         float64 // in the time
	}{
		{"token bucket, one", tokenPolicy, []float64{40}, 0, 20 * 300},
		{"token bucket, three", tokenPolicy, []float64{30, 10, 3}, 0, 20 * 300},
		{"token bucket, enough", tokenPolicy, []float64{5, 5, 2}, 0, 12 * 300},
		{"token bucket, and others", tokenPolicy, []float64{30}, 30, 20 * 300},
		{"window, one", windowPolicy, []float64{40}, 0, 20 * 300},
		{"window, three", windowPolicy, []float64{30, 10, 3}, 0, 20 * 300},
		{"window, enough", windowPolicy, []float64{5, 5, 2}, 0, 12 * 300},
		{"window, and others", windowPolicy, []float64{30}, 30, 20 * 300},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, 1, c.policy)
			for _, rate := range c.rates {
				w.plane(profiles[0]).load("a", rate, 0, 300*time.Second)
			}
			if c.other > 0 {
				w.ask("a", c.other, 0, 300*time.Second)
			}
			w.run(300 * time.Second)
			for i, f := range w.planes {
				t.Logf("%v/s: %d allowed, %d denied", c.rates[i], f.allowed, f.denied)
			}
			used := float64(len(w.admitted["a"])) / c.most
			t.Logf("others %d, in all %.2f", w.direct, used)
			if used < 0.8 {
				w.t.Fatalf("no more than %.2f of what they could have", used)
			}
		})
	}
}
