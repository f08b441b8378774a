package observe

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/cluster/runner"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestPage compares what a scrape shows with what was done before it.
func TestPage(t *testing.T) {
	set, err := policy.Parse("p.yaml", []byte(`policies: [{name: login, algorithm: sliding_log, limit: 4, window: 1m}]`))
	must.NoError(t, err)
	now := limiter.ProcessClock()() // at which it stays: no loan ends
	l := limiter.New(limiter.Config{Policies: set, Store: limiter.NewStore(store.Config{MaxKeys: 10}, true), MaxInFlight: 50, Clock: func() algo.Instant { return now }})
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
		Target: limit.Target{Limit: &algo.Limit{Algorithm: algo.TokenBucket, Limit: 100, Window: time.Hour}, Key: "lent"},
		ID:     algo.LoanID{Borrower: 1, Number: 1}, Want: 16,
	}}
	_, err = l.Lend(t.Context(), lent, make([]limit.Lent, 1))
	must.NoError(t, err)
	late, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = l.Check(late, make([]limit.Check, 3))
	expect.True(t, err != nil, "decided for nobody")
	ask(limit.Target{Limit: &algo.Limit{Algorithm: algo.FixedWindow, Limit: 1, Window: time.Minute}, Key: "a"}, 1)

	hops := NewHops()
	m := NewMetrics(MetricsConfig{
		Limiter: l, View: func() *cluster.View { return nil }, Ready: func() bool { return true }, Collectors: []prometheus.Collector{hops},
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
	const peaks = `
# HELP weir_current_window_count Units in use of the fullest key decided here since this scraper's last scrape.
# TYPE weir_current_window_count gauge
weir_current_window_count{policy="(inline)"} %i
weir_current_window_count{policy="(unknown)"} 0
weir_current_window_count{policy="login"} %l
`
	show := func(inline, login string) string {
		return strings.NewReplacer("%i", inline, "%l", login).Replace(peaks)
	}
	const rest = `
# HELP weir_call_errors_total Calls answered by an error in place of a decision, by protocol (http, grpc, stream, resp) and code: the status of HTTP, the code of gRPC, the first word of an error of the Redis protocol.
# TYPE weir_call_errors_total counter
weir_call_errors_total{code="400",protocol="http"} 0
weir_call_errors_total{code="413",protocol="http"} 1
weir_call_errors_total{code="InvalidArgument",protocol="grpc"} 0
# HELP weir_decisions_borrowed_total Allowed decisions that were admitted from loans.
# TYPE weir_decisions_borrowed_total counter
weir_decisions_borrowed_total{policy="(inline)"} 0
weir_decisions_borrowed_total{policy="(unknown)"} 0
weir_decisions_borrowed_total{policy="login"} 0
# HELP weir_forwarded_total Checks and other operations sent to the node that decides, by whether they were answered. One that is sent again counts again.
# TYPE weir_forwarded_total counter
weir_forwarded_total{answered="false"} 0
weir_forwarded_total{answered="true"} 3
# HELP weir_ownership_messages_dropped_total Ownership messages dropped because too many were queued.
# TYPE weir_ownership_messages_dropped_total counter
weir_ownership_messages_dropped_total 5
# HELP weir_file_read_timeouts_total Reads of a file that the file system did not answer in time, by file (policies, envoy_configuration, and those of weir_security_file_valid).
# TYPE weir_file_read_timeouts_total counter
weir_file_read_timeouts_total{file="access"} 0
weir_file_read_timeouts_total{file="certificates"} 4
weir_file_read_timeouts_total{file="policies"} 0
# HELP weir_policies_file_valid 0 when the present policy file was rejected or cannot be read, and the previous one is in force.
# TYPE weir_policies_file_valid gauge
weir_policies_file_valid 0
# HELP weir_security_file_valid 0 when a file that access depends on was rejected as it is now, or cannot be read, and what it held before is in force, by file (certificates, peer_certificates, access, gossip_keys).
# TYPE weir_security_file_valid gauge
weir_security_file_valid{file="access"} 1
weir_security_file_valid{file="certificates"} 0
# HELP weir_ownership_events_total What has happened with partitions on this node, by event (claimed, took over, handed over, merged, backup dropped and so on).
# TYPE weir_ownership_events_total counter
weir_ownership_events_total{event="claimed"} 7
weir_ownership_events_total{event="handed over"} 0
weir_ownership_events_total{event="merged"} 0
weir_ownership_events_total{event="strict keys start full"} 0
weir_ownership_events_total{event="took over"} 0
# HELP weir_partitions_held Partitions that this node decides for.
# TYPE weir_partitions_held gauge
weir_partitions_held 3
# HELP weir_replica_pending_keys Keys whose last changes have not been sent to a copy yet.
# TYPE weir_replica_pending_keys gauge
weir_replica_pending_keys 2
# HELP weir_in_flight Checks and other operations that wait here for other nodes or for copies.
# TYPE weir_in_flight gauge
weir_in_flight 0
# HELP weir_in_flight_max Checks and other operations that may wait here at most.
# TYPE weir_in_flight_max gauge
weir_in_flight_max 50
# HELP weir_borrowers Clients, nodes and proxies that have units of this node's keys on loan.
# TYPE weir_borrowers gauge
weir_borrowers 1
# HELP weir_loan_expired_units_total Units on loan of this node's keys that were charged because their loans had ended, whether or not borrowers had spent them.
# TYPE weir_loan_expired_units_total counter
weir_loan_expired_units_total 0
# HELP weir_loan_recalls_total Loans that this node has recalled before a refusal, by result: asked, and those of them that were unanswered in time.
# TYPE weir_loan_recalls_total counter
weir_loan_recalls_total{result="asked"} 0
weir_loan_recalls_total{result="unanswered"} 0
# HELP weir_loan_units_total Units of this node's keys that borrowers have reported as spent.
# TYPE weir_loan_units_total counter
weir_loan_units_total 0
# HELP weir_loans_total Loans that this node has granted or renewed.
# TYPE weir_loans_total counter
weir_loans_total 1
# HELP weir_units_on_loan Units of this node's keys that are on loan.
# TYPE weir_units_on_loan gauge
weir_units_on_loan 16
# HELP weir_shed_total Checks and other operations not carried out, by reason: in_flight, too many were waiting, and on_error answered; deadline, the caller had gone or had no time left.
# TYPE weir_shed_total counter
weir_shed_total{reason="deadline"} 3
weir_shed_total{reason="in_flight"} 0
# HELP weir_keys Keys with live state on this node.
# TYPE weir_keys gauge
weir_keys 3
# HELP weir_keys_max Keys with live state that this node keeps at most; 0: no bound.
# TYPE weir_keys_max gauge
weir_keys_max 10
# HELP weir_policies_reloads_total Changes of the policy file, by result (taken, rejected).
# TYPE weir_policies_reloads_total counter
weir_policies_reloads_total{result="rejected"} 1
weir_policies_reloads_total{result="taken"} 0
# HELP weir_refusals_remembered_total Those of weir_requests_total that this node refused from memory, in the place of their owner.
# TYPE weir_refusals_remembered_total counter
weir_refusals_remembered_total{policy="(inline)"} 0
weir_refusals_remembered_total{policy="(unknown)"} 0
weir_refusals_remembered_total{policy="login"} 0
`
	names := []string{"weir_call_errors_total", "weir_forwarded_total", "weir_ownership_messages_dropped_total", "weir_policies_file_valid", "weir_security_file_valid", "weir_file_read_timeouts_total",
		"weir_current_window_count", "weir_keys", "weir_refusals_remembered_total", "weir_keys_max", "weir_policies_reloads_total",
		"weir_ownership_events_total", "weir_partitions_held", "weir_replica_pending_keys", "weir_in_flight", "weir_in_flight_max", "weir_shed_total",
		"weir_borrowers", "weir_units_on_loan", "weir_loans_total", "weir_loan_units_total", "weir_loan_expired_units_total", "weir_loan_recalls_total"}
	expect.NoError(t, testutil.GatherAndCompare(m.pageFor("a test"), strings.NewReader(show("16", "3")+rest), names...))
	// The peaks start anew with each scrape; the counters go on.
	expect.NoError(t, testutil.GatherAndCompare(m.pageFor("a test"), strings.NewReader(show("0", "0")+rest), names...))
	got := must.Value(m.pageFor("a test").Gather())(t)
	for _, f := range got {
		if f.GetName() != "weir_requests_total" {
			continue
		}
		for _, s := range f.Metric {
			labels := s.Label[0].GetValue() + " " + s.Label[1].GetValue()
			want := map[string]float64{"login allowed": 1, "login refused": 1, "(inline) allowed": 1}[labels]
			expect.True(t, s.Counter.GetValue() == want, "%s: %v, want %v", labels, s.Counter.GetValue(), want)
		}
	}
	problems := must.Value(testutil.GatherAndLint(m.pageFor("a test")))(t)
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
		Happened:  func() runner.Stats { return runner.Stats{} }, Files: func() []WatchedFile { return nil }, Version: "v", Logger: slog.New(slog.DiscardHandler),
	})
	const want = `
# HELP weir_envoy_mismatched_members Members whose configuration files for Envoy differ from this node's.
# TYPE weir_envoy_mismatched_members gauge
weir_envoy_mismatched_members 0
# HELP weir_members Members of the cluster as this node sees it, by state.
# TYPE weir_members gauge
weir_members{state="active"} 1
weir_members{state="joining"} 0
weir_members{state="leaving"} 0
# HELP weir_partitions_owned Partitions that the ring gives to this node.
# TYPE weir_partitions_owned gauge
weir_partitions_owned 4093
# HELP weir_policies_mismatched_members Members whose policies differ from this node's.
# TYPE weir_policies_mismatched_members gauge
weir_policies_mismatched_members 0
# HELP weir_ready 1 when the node is ready for traffic.
# TYPE weir_ready gauge
weir_ready 0
`
	expect.NoError(t, testutil.GatherAndCompare(m.pageFor("a test"), strings.NewReader(want),
		"weir_envoy_mismatched_members", "weir_members", "weir_partitions_owned", "weir_policies_mismatched_members",
		"weir_ready"))
}

// TestShares: policies, the largest namespaces and callers have lines, and the rest of each one together.
func TestShares(t *testing.T) {
	set := must.Value(policy.Parse("p.yaml", []byte(`policies: [{name: login, algorithm: fixed_window, limit: 4, window: 1m, max_keys: 2}]`)))(t)
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
	NewMetrics(MetricsConfig{Limiter: l, Logger: slog.New(slog.DiscardHandler)}).collectShares(func(kind, name string, s store.Share) {
		got[kind+" "+name] = s
	})
	login := got["policy login"]
	expect.True(t, login.Keys == 2 && login.Refused != 0 && login.Bytes != 0, "%+v", login)
	rest := int64(maxListed * (maxListed + 1) / 2)
	expect.True(t, len(got) == 1+2*(maxListed+1) && got["inline n00"].Keys == 2*maxListed &&
		got["caller n19"].Keys == maxListed+1 && got["inline_other "].Keys == rest &&
		got["caller_other "].Keys == rest+2, "%d lines: %+v", len(got), got)
}
