package observe

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/prometheus/common/expfmt"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/cluster/runner"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestPage compares what a scrape shows with what was done before it.
func TestPage(t *testing.T) {
	set := must.Value(policy.Parse("p.yaml",
		[]byte(`policies: [{name: login, algorithm: sliding_log, limit: 4, window: 1m}]`)))(t)
	now := limiter.ProcessClock()() // at which it stays: no loan ends
	l := limiter.New(limiter.Config{Policies: set, Store: limiter.NewStore(store.Config{MaxKeys: 10}, true),
		MaxInFlight: 50, Clock: func() algo.Instant { return now }})
	defer l.Close()
	ask := func(target limit.Target, cost int64) {
		t.Helper()
		_, err := l.Check(t.Context(), []limit.Check{{Target: target, Cost: cost}})
		must.NoError(t, err)
	}
	ask(limit.Target{Policy: "login", Key: "a"}, 3)
	ask(limit.Target{Policy: "login", Key: "a"}, 2) // refused
	ask(limit.Target{Policy: "login", Key: "b"}, 0) // a peek counts nowhere
	lent := []limit.Borrow{{
		Target: limit.Target{Limit: &algo.Limit{Algorithm: algo.TokenBucket, Limit: 100, Window: time.Hour},
			Key: "lent"},
		ID: algo.LoanID{Borrower: 1, Number: 1}, Want: 16,
	}}
	_, err := l.Lend(t.Context(), lent, make([]limit.Lent, 1))
	must.NoError(t, err)
	late, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = l.Check(late, make([]limit.Check, 3))
	expect.True(t, err != nil, "decided for nobody")
	ask(limit.Target{Limit: &algo.Limit{Algorithm: algo.FixedWindow, Limit: 1, Window: time.Minute}, Key: "a"}, 1)

	hops := NewHops()
	m := NewMetrics(MetricsConfig{
		Limiter: l, View: func() *cluster.View { return nil }, Ready: func() bool { return true },
		Collectors: []prometheus.Collector{hops},
		Ownership: func() (runner.Status, bool) {
			return runner.Status{Status: ownership.Status{Held: 3, Pending: 2}}, true
		},
		Happened: func() runner.Stats { return runner.Stats{Events: map[string]uint64{"claimed": 7}, Lost: 5} },
		Files: func() []WatchedFile {
			return []WatchedFile{{Name: "policies"}, {"access", true, 0}, {"certificates", false, 4}}
		}, Version: "v", Logger: slog.New(slog.DiscardHandler),
	})
	hops.Forwarded(time.Millisecond, 3, true)
	m.Problem(413)
	m.Reloaded(false)
	page := `weir_call_errors_total{code="400",protocol="http"} 0
weir_call_errors_total{code="413",protocol="http"} 1
weir_call_errors_total{code="InvalidArgument",protocol="grpc"} 0
weir_decisions_borrowed_total{policy="(inline)"} 0
weir_decisions_borrowed_total{policy="(unknown)"} 0
weir_decisions_borrowed_total{policy="login"} 0
weir_forwarded_total{answered="false"} 0
weir_forwarded_total{answered="true"} 3
weir_ownership_messages_dropped_total 5
weir_file_read_timeouts_total{file="access"} 0
weir_file_read_timeouts_total{file="certificates"} 4
weir_file_read_timeouts_total{file="policies"} 0
weir_policies_file_valid 0
weir_security_file_valid{file="access"} 1
weir_security_file_valid{file="certificates"} 0
weir_ownership_events_total{event="claimed"} 7
weir_ownership_events_total{event="handed over"} 0
weir_ownership_events_total{event="merged"} 0
weir_ownership_events_total{event="strict keys start full"} 0
weir_ownership_events_total{event="took over"} 0
weir_partitions_held 3
weir_replica_pending_keys 2
weir_in_flight 0
weir_in_flight_max 50
weir_borrowers 1
weir_loan_expired_units_total 0
weir_loan_recalls_total{result="asked"} 0
weir_loan_recalls_total{result="unanswered"} 0
weir_loan_units_total 0
weir_loans_total 1
weir_units_on_loan 16
weir_shed_total{reason="deadline"} 3
weir_shed_total{reason="in_flight"} 0
weir_keys 3
weir_keys_max 10
weir_policies_reloads_total{result="rejected"} 1
weir_policies_reloads_total{result="taken"} 0
weir_refusals_remembered_total{policy="(inline)"} 0
weir_refusals_remembered_total{policy="(unknown)"} 0
weir_refusals_remembered_total{policy="login"} 0
`
	asked := map[string]int{"(inline) allowed": 1, "login allowed": 1, "login refused": 1}
	for _, name := range []string{"(inline)", "(unknown)", "login"} {
		for _, result := range []string{"allowed", "error", "failed_closed", "failed_open", "refused", "shadow"} {
			page += fmt.Sprintf("weir_requests_total{policy=%q,result=%q} %d\n", name, result, asked[name+" "+result])
		}
	}
	for range 2 { // another scrape sees the same peaks
		wantLines(t, m.node, page+`weir_current_window_count{policy="(inline)"} 16
weir_current_window_count{policy="(unknown)"} 0
weir_current_window_count{policy="login"} 3
`)
	}
	problems := must.Value(testutil.GatherAndLint(m.node))(t)
	for _, p := range problems {
		// The one name that dashboards were promised, against the linter's taste.
		expect.Equal(t, p.Metric, "weir_current_window_count", "%s", p.Text)
	}
}

// TestMembers shows the cluster's side of the page, of a cluster of one.
func TestMembers(t *testing.T) {
	l := limiter.New(limiter.Config{})
	defer l.Close()
	c := must.Value(cluster.Start(cluster.Config{
		Name: "a", Logger: slog.New(slog.DiscardHandler),
		Identify: func(context.Context, string) (cluster.Identity, error) {
			return cluster.Identity{}, errors.New("nobody is asked")
		},
	}))(t)
	defer c.Close()
	m := NewMetrics(MetricsConfig{
		Limiter: l, View: c.View, Ready: func() bool { return false },
		Ownership: func() (runner.Status, bool) { return runner.Status{}, false },
		Happened:  func() runner.Stats { return runner.Stats{} }, Files: func() []WatchedFile { return nil },
		Version: "v", Logger: slog.New(slog.DiscardHandler),
	})
	wantLines(t, m.node, `weir_envoy_mismatched_members 0
weir_members{state="active"} 1
weir_members{state="joining"} 0
weir_members{state="leaving"} 0
weir_partitions_owned 4093
weir_policies_mismatched_members 0
weir_ready 0
`)
}

// wantLines wants a collector to show these lines, and no others of their metrics.
func wantLines(t *testing.T, c prometheus.Collector, want string) {
	t.Helper()
	metric := func(line string) string { return line[:strings.IndexAny(line, "{ ")] }
	metrics := make(map[string]bool)
	for line := range strings.Lines(want) {
		metrics[metric(line)] = true
	}
	got := slices.DeleteFunc(slices.Sorted(strings.Lines(shown(t, c))),
		func(line string) bool { return !metrics[metric(line)] })
	expect.NoDiff(t, cmp.Diff(slices.Sorted(strings.Lines(want)), got), "-want +shown")
}

// shown is what a collector shows, without comments.
func shown(t *testing.T, c prometheus.Collector) string {
	t.Helper()
	registry := prometheus.NewRegistry()
	registry.MustRegister(c)
	var text strings.Builder
	for _, f := range must.Value(registry.Gather())(t) {
		var lines bytes.Buffer
		must.Value(expfmt.MetricFamilyToText(&lines, f))(t)
		for line := range strings.Lines(lines.String()) {
			if !strings.HasPrefix(line, "#") {
				text.WriteString(line)
			}
		}
	}
	return text.String()
}

// TestShares: policies, the largest namespaces and callers have lines, and the rest of each one together.
func TestShares(t *testing.T) {
	set := must.Value(policy.Parse("p.yaml",
		[]byte(`policies: [{name: login, algorithm: fixed_window, limit: 4, window: 1m, max_keys: 2}]`)))(t)
	l := limiter.New(limiter.Config{Policies: set})
	defer l.Close()
	own := &algo.Limit{Algorithm: algo.FixedWindow, Limit: 1, Window: time.Minute}
	for i := range 2 * maxListed {
		name := fmt.Sprintf("n%02d", i)
		for k := range 2*maxListed - i {
			_, err := l.Check(t.Context(), []limit.Check{
				{Target: limit.Target{Limit: own, Namespace: name, Key: fmt.Sprint(k), Caller: name}, Cost: 1},
				{Target: limit.Target{Policy: "login", Key: fmt.Sprint(k)}, Cost: 1},
			})
			must.NoError(t, err)
		}
	}
	got := make(map[string]store.Share)
	NewMetrics(MetricsConfig{Limiter: l, Logger: slog.New(slog.DiscardHandler)}).eachShare(func(kind, name string,
		s store.Share) {
		got[kind+" "+name] = s
	})
	login := got["policy login"]
	expect.True(t, login.Keys == 2 && login.Refused != 0 && login.Bytes != 0, "%+v", login)
	rest := int64(maxListed * (maxListed + 1) / 2)
	expect.True(t, len(got) == 1+2*(maxListed+1) && got["inline n00"].Keys == 2*maxListed &&
		got["caller n19"].Keys == maxListed+1 && got["inline_other "].Keys == rest &&
		got["caller_other "].Keys == rest+2, "%d lines: %+v", len(got), got)
}

// TestCalls: what callers ask is counted and timed, what operators read is not.
func TestCalls(t *testing.T) {
	m := NewMetrics(MetricsConfig{Logger: slog.New(slog.DiscardHandler)})
	calls := 0
	h := m.HTTP(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { calls++ }))
	for _, method := range []string{"POST", "GET", "POST", "HEAD"} {
		h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(method, "/v1/check", nil))
	}
	h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", "/v1/forward-auth?policy=login", nil))
	for method, err := range map[string]error{
		"/weir.v1.Limiter/Check":               nil,
		"/weir.v1.Limiter/Acquire":             status.Error(codes.NotFound, "policy"),
		"/weir.v1.Limiter/Status":              status.Error(codes.Unavailable, "for operators"),
		"/grpc.health.v1.Health/Check":         status.Error(codes.NotFound, "not of the limiter"),
		"/weir.v1.LimiterOfSomebodyElse/Check": nil,
	} {
		m.GRPC(method, time.Millisecond, err)
	}
	expect.Equal(t, calls, 5, "calls went through")
	m.Streamed(time.Millisecond, codes.OK)
	m.Streamed(time.Millisecond, codes.InvalidArgument)
	m.RESP(time.Millisecond)
	m.RESPFailed("NOAUTH")
	expect.Equal(t, shown(t, m.calls.errors), `weir_call_errors_total{code="400",protocol="http"} 0
weir_call_errors_total{code="InvalidArgument",protocol="grpc"} 0
weir_call_errors_total{code="InvalidArgument",protocol="stream"} 1
weir_call_errors_total{code="NOAUTH",protocol="resp"} 1
weir_call_errors_total{code="NotFound",protocol="grpc"} 1
`)
	for _, count := range []string{`"http"} 3`, `"grpc"} 2`, `"stream"} 2`, `"resp"} 1`} {
		line := "weir_call_duration_seconds_count{protocol=" + count
		expect.True(t, strings.Contains(shown(t, m.calls.durations), line), "no line %s", line)
	}
}

func TestHistory(t *testing.T) {
	stats := map[string]*limiter.PolicyStats{"a": {Policy: "a"}, "b": {Policy: "b"},
		"idle": {Policy: "idle", Allowed: 0}}
	h := NewHistory(func() (list []limiter.PolicyStats) {
		for _, s := range stats {
			list = append(list, *s)
		}
		return list
	})
	got, _ := h.Read(0)
	expect.True(t, got == nil, "before the first tick: %+v", got)
	at := func(d time.Duration, want []*peerv1.PolicyHistory, age time.Duration) {
		t.Helper()
		h.Tick(int64(d))
		got, since := h.Read(int64(d))
		diff := cmp.Diff(want, got, protocmp.Transform())
		expect.True(t, diff == "" && since == age, "at %v, %v old: %s", d, since, diff)
	}
	at(0, nil, 0)
	stats["a"].Allowed = 3
	history := func(policy string, steps ...*weirv1.PolicyUse) *peerv1.PolicyHistory {
		return &peerv1.PolicyHistory{Policy: policy, Steps: steps}
	}
	idle := new(weirv1.PolicyUse)
	first, failed := &weirv1.PolicyUse{Allowed: 3, Refused: 1}, &weirv1.PolicyUse{FailedOpen: 2}
	at(time.Second, []*peerv1.PolicyHistory{history("a", &weirv1.PolicyUse{Allowed: 3})}, time.Second)
	stats["a"].Refused, stats["b"].FailedOpen = 1, 2
	at(HistoryStep, []*peerv1.PolicyHistory{history("a", idle, first), history("b", idle, failed)}, 0)
	stats["a"].Allowed += 5
	// Two steps have passed, and nobody has ended the first of them.
	at(3*HistoryStep+time.Second, []*peerv1.PolicyHistory{
		history("a", idle, &weirv1.PolicyUse{Allowed: 5}, idle, first), history("b", idle, idle, idle, failed),
	}, time.Second)
	for i := range HistorySteps {
		h.Tick(int64(4+i) * int64(HistoryStep))
	}
	got, _ = h.Read(int64(4+HistorySteps) * int64(HistoryStep))
	expect.True(t, got == nil, "after all steps: %+v", got)
	stats["b"].Errors++
	h.Tick(int64(time.Hour) * 1000) // which takes no more steps than are kept
	got, age := h.Read(int64(time.Hour) * 1000)
	expect.True(t, len(h.steps) == HistorySteps && len(got) == 1 && got[0].Steps[1].Errors == 1 &&
		age < HistoryStep, "after a long time: %d steps, %+v, %v old", len(h.steps), got, age)
}
