package simulate

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// list is a Source of events at hand.
type list []Event

func (l *list) Read(e *Event) error {
	if len(*l) == 0 {
		return io.EOF
	}
	*e, *l = (*l)[0], (*l)[1:]
	return nil
}

func parse(t testing.TB, text string) *policy.Set {
	t.Helper()
	return must.Value(policy.Parse("p.yaml", []byte(text)))(t)
}

const candidates = `policies:
  - {name: fixed, algorithm: fixed_window, limit: 20, window: 10s}
  - {name: calendar, algorithm: fixed_window, limit: 30, align: calendar, window: minute, time_zone: Europe/Berlin}
  - {name: log, algorithm: sliding_log, limit: 20, window: 10s, overrides: [{key: k1, unlimited: true}, {key: k2, blocked: true}, {prefix: k3, limit: 5}]}
  - {name: window, algorithm: sliding_window, limit: 20, window: 10s}
  - {name: counter, algorithm: sliding_counter, limit: 20, window: 10s}
  - {name: bucket, algorithm: token_bucket, limit: 2, window: 1s, capacity: 7}
  - {name: queue, algorithm: leaky_bucket, limit: 2, window: 1s, capacity: 7}
  - {name: both, algorithm: sliding_log, limits: [5/1s, 40/1m]}
  - {name: denied, algorithm: sliding_log, limit: 20, window: 10s, count_denied: true}
  - {name: banned, algorithm: sliding_log, limit: 20, window: 10s, ban: 15s}
  - {name: free, algorithm: sliding_log, limit: -1, window: 1s}
`

// traffic has keys k0 to k9, costs from 0 to beyond the limits, bursts, and times that step back.
func traffic(seed uint64, n int) []Event {
	r := rand.New(rand.NewPCG(seed, 1))
	var events []Event
	at := time.Date(2026, 10, 24, 23, 59, 0, 0, time.UTC).UnixNano() // over a change of clocks
	for range n {
		switch r.IntN(20) {
		case 0:
			at += int64(r.IntN(int(20 * time.Second)))
		case 1:
			at -= int64(r.IntN(int(time.Second)))
		default:
			at += int64(r.IntN(int(200 * time.Millisecond)))
		}
		cost := int64(1)
		switch r.IntN(10) {
		case 0:
			cost = 0
		case 1:
			cost = int64(r.IntN(30))
		}
		events = append(events, Event{at, fmt.Appendf(nil, "k%d", r.IntN(10)), cost})
	}
	return events
}

// A node that is asked the same, on a clock that tells the traffic's time, admits and refuses as much.
func TestNodeDecidesTheSame(t *testing.T) {
	for seed := range uint64(3) {
		set := parse(t, candidates)
		events := traffic(seed, 3000)
		src := list(events)
		res := must.Value(Run(t.Context(), Config{Source: &src, Policies: set.Policies()}))(t)
		var mono, wall atomic.Int64
		l := limiter.New(limiter.Config{Policies: set,
			Clock: func() algo.Instant { return algo.Instant{Mono: mono.Load(), Wall: wall.Load()} }})
		type counts struct{ admitted, refused, units int64 }
		want := map[string]*counts{}
		for _, p := range set.Policies() {
			want[p.Name] = &counts{}
		}
		newest := events[0].At
		for _, e := range events {
			newest = max(newest, e.At)
			mono.Store(newest - events[0].At)
			wall.Store(newest)
			for name, c := range want {
				got, err := l.Check(t.Context(),
					[]limit.Check{{Target: limit.Target{Policy: name, Key: string(e.Key)}, Cost: e.Cost}})
				must.True(t, err == nil && got[0].Err == nil, "%v %v", err, got)
				switch {
				case e.Cost == 0:
				case got[0].Allowed:
					c.admitted++
					c.units += got[0].Granted
				default:
					c.refused++
				}
			}
		}
		l.Close()
		for _, c := range res.Candidates {
			if got := (counts{c.Admitted, c.Refused, c.AdmittedUnits}); got != *want[c.Policy] {
				t.Errorf("seed %d: %s: replayed %+v, a node %+v", seed, c.Policy, got, *want[c.Policy])
			}
		}
	}
}

// What is found beside the counts is what looking at all admissions again finds.
func TestFindings(t *testing.T) {
	set := parse(t, candidates)
	p, _ := set.Get("log")
	events := traffic(7, 8000)
	src := list(events)
	res := must.Value(Run(t.Context(), Config{Source: &src, Policies: []*policy.Policy{p}}))(t)
	got := res.Candidates[0]

	limits := algo.Limits{{Algorithm: algo.SlidingLog, Limit: 20, Window: 10 * time.Second}}
	few := algo.Limits{{Algorithm: algo.SlidingLog, Limit: 5, Window: 10 * time.Second}}
	arena := algo.NewArena(nil)
	type key struct {
		limits   algo.Limits
		state    algo.State
		admitted []admission
		refused  int64
	}
	keys := map[string]*key{}
	newest, late, touched := events[0].At, int64(0), int64(0)
	var longest time.Duration
	for _, e := range events {
		if e.At < newest {
			late++
		}
		newest = max(newest, e.At)
		k := keys[string(e.Key)]
		if k == nil {
			k = &key{limits: limits}
			if strings.HasPrefix(string(e.Key), "k3") {
				k.limits = few
			}
			k.state = make(algo.State, k.limits.Words())
			keys[string(e.Key)] = k
		}
		if e.Cost == 0 {
			continue
		}
		d := algo.Decision{Allowed: true, Granted: e.Cost}
		switch string(e.Key) {
		case "k1":
		case "k2":
			d = algo.Decision{RetryAfter: algo.Never}
		default:
			d, _ = k.limits.Decide(arena, k.state, algo.Instant{Mono: newest - events[0].At},
				algo.Request{Cost: e.Cost}, nil)
		}
		if d.Allowed {
			k.admitted = append(k.admitted, admission{newest, e.Cost})
		} else if k.refused++; k.refused == 1 {
			touched++
		}
		if d.RetryAfter != algo.Never {
			longest = max(longest, d.RetryAfter)
		}
	}
	var worst int64
	for _, k := range keys {
		for i, a := range k.admitted {
			sum := int64(0)
			for _, b := range k.admitted[:i+1] {
				if b.at > a.at-int64(10*time.Second) {
					sum += b.units
				}
			}
			worst = max(worst, sum)
		}
	}
	expect.True(t, got.Worst.Units == worst && !got.Worst.Incomplete && res.OutOfOrder == late &&
		got.CallersTouched == touched && got.LongestWait == longest && res.Keys == len(keys),
		"%+v, %d late, %d keys; want worst %d, late %d, touched %d, longest %v, %d keys", got, res.OutOfOrder, res.Keys,
		worst, late, touched, longest, len(keys))
	var inBins Bin
	for _, b := range got.Timeline {
		inBins.Admitted += b.Admitted
		inBins.Refused += b.Refused
	}
	expect.True(t, inBins.Admitted == got.Admitted && inBins.Refused == got.Refused &&
		len(got.Timeline) <= mostBins && time.Duration(len(got.Timeline)-1)*res.BinWidth <= res.To.Sub(res.From),
		"timeline has %+v in %d bins of %v, want %d and %d", inBins, len(got.Timeline), res.BinWidth, got.Admitted,
		got.Refused)
	for i, k := range got.MostDenied {
		expect.True(t, k.Refused == keys[k.Key].refused && (i <= 0 || k.Refused <= got.MostDenied[i-1].Refused),
			"%+v: %s was refused %d", got.MostDenied, k.Key, keys[k.Key].refused)
	}
}

// A search over halves finds what trying every limit finds.
func TestSuggest(t *testing.T) {
	set := parse(t, `policies:
  - {name: log, algorithm: sliding_log, limit: 7, window: 3s}
  - {name: bucket, algorithm: token_bucket, limit: 4, window: 1s, capacity: 8}
  - {name: two, algorithm: sliding_log, limits: [1/1s, 2/1m]}
  - {name: blocked, algorithm: sliding_log, limit: 7, window: 3s, overrides: [{key: k2, blocked: true}]}
`)
	events := traffic(3, 300)
	for _, share := range []Share{{false, 0}, {false, 0.3}, {true, 0.02}, {true, 1}} {
		src := list(events)
		res := must.Value(Run(t.Context(), Config{Source: &src, Policies: set.Policies(), Suggest: &share}))(t)
		for _, c := range res.Candidates {
			got := c.Suggestion
			if c.Policy == "two" {
				expect.True(t, got.Limit == 0 && got.Reason != "", "two limits: %+v", got)
				continue
			}
			want := int64(0)
			for l := int64(1); l <= 2000 && want == 0; l++ {
				text := fmt.Sprintf("policies: [{name: log, algorithm: sliding_log, limit: %d, window: 3s}, {name: bucket, algorithm: token_bucket, limit: %d, window: 1s, capacity: %d}, {name: blocked, algorithm: sliding_log, limit: %d, window: 3s, overrides: [{key: k2, blocked: true}]}]", l, l, 2*l, l)
				p, _ := parse(t, text).Get(c.Policy)
				src := list(events)
				one := must.Value(Run(t.Context(), Config{Source: &src, Policies: []*policy.Policy{p}}))(t)
				x := one.Candidates[0]
				if !share.Requests && x.ShareTouched <= share.Most ||
					share.Requests && float64(x.Refused) <= share.Most*float64(x.Admitted+x.Refused) {
					want = l
				}
			}
			expect.True(t, got.Limit == want, "%+v: %s: %+v, trying all says %d", share, c.Policy, got, want)
		}
	}
	// A bucket that is smaller than its limit holds all traffic only under a limit that exceeds it.
	p, _ := parse(t, "policies: [{name: b, algorithm: token_bucket, limit: 8, window: 1h, capacity: 2}]").Get("b")
	burst := list{{1, []byte("a"), 1}, {1, []byte("a"), 1}, {1, []byte("a"), 1}}
	res := must.Value(Run(t.Context(), Config{Source: &burst, Policies: []*policy.Policy{p}, Suggest: &Share{}}))(t)
	expect.Equal(t, res.Candidates[0].Suggestion.Limit, 12, "%+v", res.Candidates[0].Suggestion)
}

func TestRunErrors(t *testing.T) {
	set := parse(t, "policies: [{name: c, algorithm: concurrency, limit: 1, ttl: 1s}, {name: l, algorithm: sliding_log, limit: 1, window: 1s}]")
	c, _ := set.Get("c")
	l, _ := set.Get("l")
	_, err := Run(t.Context(), Config{Source: &list{}})
	expect.True(t, err != nil && strings.Contains(err.Error(), "policies"), "%v", err)
	_, err = Run(t.Context(), Config{Source: &list{}, Policies: []*policy.Policy{c}})
	expect.True(t, err != nil && strings.Contains(err.Error(), `"c"`), "%v", err)
	three := list{{1, []byte("a"), 1}, {2, []byte("a"), 1}, {3, []byte("a"), 1}}
	_, err = Run(t.Context(), Config{Source: &three, Policies: []*policy.Policy{l}, Suggest: &Share{}, MaxEvents: 2})
	expect.True(t, err != nil && strings.Contains(err.Error(), "more than 2"), "%v", err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = Run(ctx, Config{Source: &three, Policies: []*policy.Policy{l}})
	expect.True(t, err == context.Canceled, "%v", err)
	res, err := Run(t.Context(), Config{Source: &list{}, Policies: []*policy.Policy{l}, Suggest: &Share{}})
	expect.True(t, err == nil && res.Events == 0 && res.From.IsZero() && res.Candidates[0].Suggestion.Reason != "",
		"no traffic: %+v, %v", res, err)
}

func TestGenerators(t *testing.T) {
	for _, p := range Patterns() {
		cfg := PatternConfig{Pattern: p, Rate: 5, For: 48 * time.Hour, Keys: 3, Seed: 4}
		all := func() (events []Event) {
			g := must.Value(NewGenerator(cfg))(t)
			var e Event
			for g.Read(&e) == nil {
				events = append(events, e)
			}
			return events
		}
		events, again := all(), all()
		want := cfg.Rate * cfg.For.Seconds()
		n := float64(len(events))
		expect.True(t, n >= 0.98*want && n <= 1.02*want && len(again) == len(events) && again[99].At == events[99].At,
			"%s: %d events, again %d, want about %.0f", p, len(events), len(again), want)
		last := int64(0)
		byKey := map[string]int{}
		for _, e := range events {
			must.True(t, e.At >= last && e.At < int64(cfg.For), "%s: an event at %d after %d", p, e.At, last)
			last = e.At
			byKey[string(e.Key)]++
			off := e.At % int64(time.Minute)
			must.True(t, p != Burst || off <= int64(101*time.Millisecond) || off >= int64(59899*time.Millisecond),
				"burst: an event %v into a minute", time.Duration(off))
		}
		first := float64(byKey["caller-1"]) / float64(len(events))
		expect.True(t, len(byKey) == 3 && p == Greedy == (first > 0.8), "%s: keys %v", p, byKey)
	}
	for field, cfg := range map[string]PatternConfig{
		"pattern": {Pattern: "x", Rate: 1, For: 1, Keys: 1}, "rate": {Pattern: Steady, For: 1, Keys: 1},
		"length": {Pattern: Steady, Rate: 1, Keys: 1}, "keys": {Pattern: Steady, Rate: 1, For: 1},
	} {
		_, err := NewGenerator(cfg)
		expect.True(t, err != nil && strings.HasPrefix(err.Error(), field), "%s: %v", field, err)
	}
}

func report(t *testing.T) *Report {
	t.Helper()
	src := list{{1e9, []byte("</script><img src=x onerror=alert(1)>"), 1},
		{2e9, []byte("</script><img src=x onerror=alert(1)>"), 1}, {2e9, []byte("b"), 9}}
	set := parse(t, "policies: [{name: one, algorithm: sliding_log, limit: 1, window: 1m}]")
	res := must.Value(Run(t.Context(), Config{Source: &src, Policies: set.Policies(), Suggest: &Share{}}))(t)
	return &Report{Result: res, Input: "<b>in</b>", Malformed: 1, BadLines: []BadLine{{3, "is bad", `"<i>"`}}}
}

func TestTable(t *testing.T) {
	var out strings.Builder
	must.NoError(t, report(t).WriteTable(&out))
	const want = `<b>in</b>: 3 requests of 2 keys, 1970-01-01T00:00:01Z to 1970-01-01T00:00:02Z
malformed lines, left out: 1
  line 3 is bad: "<i>"

POLICY  ALGORITHM    LIMIT     ADMITTED  REFUSED     MOST IN A WINDOW  CALLERS TOUCHED  LONGEST WAIT  STATES  SMALLEST LIMIT
one     sliding_log  1 per 1m  1         2 (66.7 %)  1 in 1m0s         2 (100 %)        59s           16 KiB  9 (callers 0 %, requests 0 %)
`
	expect.Equal(t, out.String(), want)
}

func TestJSONReport(t *testing.T) {
	var out bytes.Buffer
	must.NoError(t, report(t).WriteJSON(&out))
	var got struct {
		Events     int64
		Candidates []struct {
			Policy            string
			Admitted, Refused int64
			Impossible        int64
			Worst             struct{ Units int64 }
			Suggestion        struct{ Limit int64 }
		}
	}
	must.NoError(t, json.Unmarshal(out.Bytes(), &got), "in %s", out.Bytes())
	c := got.Candidates[0]
	expect.True(t, got.Events == 3 && c.Policy == "one" && c.Admitted == 1 && c.Refused == 2 && c.Impossible == 1 &&
		c.Worst.Units == 1 && c.Suggestion.Limit == 9, "%+v", got)
}

// Keys are text wherever they stand, and the page loads nothing.
func TestHTMLReport(t *testing.T) {
	var out strings.Builder
	must.NoError(t, report(t).WriteHTML(&out))
	page := out.String()
	for _, bad := range []string{"<img", "<b>in", "<i>"} {
		expect.True(t, !strings.Contains(page, bad), "the page has %q", bad)
	}
	expect.Equal(t, strings.Count(page, "</script>"), 2, "scripts that the page ends")
	expect.Equal(t, regexp.MustCompile(`(?i)(src|href)\s*=\s*["']?(https?:)?//|url\(|@import`).FindString(page), "",
		"the page loads")
	for _, want := range []string{"default-src 'none'", "66.7 %", "line 3 is bad", `id="one"`} {
		expect.True(t, strings.Contains(page, want), "the page lacks %q", want)
	}
}

// TestPicture: docs/images/burst.svg says what the policies of docs/examples/candidates.yaml admit in a minute, of a
// request a second and, around each second full minute, 500 within four seconds.
func TestPicture(t *testing.T) {
	var at []time.Duration
	for second := range time.Duration(6 * 60) {
		at = append(at, second*time.Second)
	}
	for _, minute := range []time.Duration{1, 3, 5} {
		for i := range time.Duration(500) {
			at = append(at, minute*time.Minute-2*time.Second+i*8*time.Millisecond)
		}
	}
	slices.Sort(at)
	var traffic list
	for _, d := range at {
		traffic = append(traffic, Event{At: int64(d), Key: []byte("caller"), Cost: 1})
	}
	set := must.Value(policy.Load("../../docs/examples/candidates.yaml"))(t)
	result := must.Value(Run(t.Context(), Config{Source: &traffic, Policies: set.Policies()}))(t)
	picture := string(must.Value(os.ReadFile("../../docs/images/burst.svg"))(t))
	for i := range result.Candidates {
		c := &result.Candidates[i]
		says := fmt.Sprintf("at most %d in a minute", c.Worst.Units)
		expect.True(t, strings.Contains(picture, says), "%s: the picture does not say %q", c.Policy, says)
	}
}
