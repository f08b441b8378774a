package envoyquota

import (
	"testing"
	"time"
)

const (
	tokenPolicy  = "policies:\n- {name: p, algorithm: token_bucket, limit: 20, window: 1s, capacity: 60}\n"
	windowPolicy = "policies:\n- {name: p, algorithm: sliding_log, limit: 1200, window: 60s}\n"
)

// profiles has one for each peculiarity of Envoy's client.
var profiles = []profile{
	{name: "new", ratio: true},
	{name: "middle"},
	{name: "old", refills: true},
	{name: "slow", ratio: true, slow: Delivery/2 - 50*time.Millisecond},
	{name: "slow old", refills: true, slow: Delivery/2 - 50*time.Millisecond},
	{name: "fast clock", ratio: true, rate: 1.001},
	{name: "slow clock", refills: true, rate: 0.999},
	{name: "drops usage", dropsUsage: true},
}

func TestBounds(t *testing.T) {
	policies := []struct {
		name, text string
		judge      func(w *world)
	}{
		{"token bucket", tokenPolicy, func(w *world) { w.judgeBucket("a", 60, 20) }},
		{"window", windowPolicy, func(w *world) { w.judgeWindow("a", 1200, time.Minute) }},
	}
	for _, p := range policies {
		t.Run(p.name, func(t *testing.T) {
			for i, profile := range profiles {
				t.Run(profile.name, func(t *testing.T) {
					for seed := range uint64(9) {
						w := newWorld(t, seed*100+uint64(i), p.text)
						w.weather(i, int(seed))
						p.judge(w)
					}
				})
			}
		})
	}
}

// weather has a data plane of the i-th profile, others, and callers of other front ends ask for the same key, while streams are cut, and runs it.
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
	if rate := []float64{0, 8, 60}[seed%3]; rate > 0 {
		w.ask("a", rate, 20*time.Second, 230*time.Second)
	}
	w.run(260 * time.Second)
	allowed := 0
	for _, f := range w.planes {
		allowed += f.allowed
	}
	if allowed < 100 {
		w.fatalf("only %d were admitted", allowed)
	}
}

// TestTerm spends an assignment at the last moment that there is, of a data plane that is as far away as may be and was cut off.
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
		w.fatalf("spent %d", spent)
	}
	w.judgeWindow("a", 1200, time.Minute)
	if n := len(w.admitted["a"]); n < 1200+900 {
		w.fatalf("only %d were admitted", n)
	}
}

// TestAttribute returns of loans no more than nobody can have spent of them, whichever of two loans was spent.
func TestAttribute(t *testing.T) {
	b := &bucket{loans: []*loan{{number: 1, units: 10, left: 10, asked: 1, sent: 1, replaced: 2}, {number: 2, units: 10, left: 10, asked: 2, sent: 2}}}
	b.seen, b.used, b.demand = 2, 2, 1
	if excess := b.report(3, usage{allowed: 7}); excess != 0 || b.loans[0].left != 3 || b.loans[1].left != 10 {
		t.Fatalf("%d, %+v %+v", excess, b.loans[0], b.loans[1])
	}
	if excess := b.report(2+int64(Delivery), usage{allowed: 1}); excess != 0 {
		t.Fatal(excess)
	}
	if l := b.loans[0]; !l.over || l.totals().Spent != 8 || l.totals().Returned != 2 {
		t.Fatalf("%+v", l)
	}
	if excess := b.report(3+int64(Delivery), usage{allowed: 13}); excess != 3 {
		t.Fatalf("%d of what nobody lent", excess)
	}
}
