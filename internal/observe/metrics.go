// Package observe shows what a node does: Prometheus metrics, OpenTelemetry spans, the history and the top keys of its
// decisions, and the audit log. Its memory is bounded, and a scraper or collector that stalls does not slow decisions.
// A key is never a label or an attribute of a span.
//
// A scraper that comes less than twice a minute may miss peaks, spans and top keys may be missing, and a line of the
// audit log may be lost with the machine.
package observe

import (
	"log/slog"
	"net/http"
	"runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/weirlimit/weir/cluster"
	"github.com/weirlimit/weir/cluster/runner"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/store"
)

// MetricsConfig has the sources of the metrics. All fields but LogsDropped and Collectors are required.
type MetricsConfig struct {
	Limiter *limiter.Limiter
	View    func() *cluster.View // returns nil for a node without gossip
	Ready   func() bool
	// Ownership returns what the node holds; it returns false once the runner is closed. Happened returns the events of
	// partitions so far.
	Ownership func() (runner.Status, bool)
	Happened  func() runner.Stats
	// LogsDropped has, by name of a log, a function that returns how many lines it has dropped.
	LogsDropped map[string]func() uint64
	// Files returns the files that the node follows.
	Files   func() []WatchedFile
	Version string
	Logger  *slog.Logger
	// Collectors are shown on the page as well.
	Collectors []prometheus.Collector
}

// WatchedFile is one file, or several that belong together, that the node reads again when they change.
type WatchedFile struct {
	Name     string // policies, envoy_configuration, access, certificates, peer_certificates or gossip_keys
	Valid    bool   // the present content is in force
	Timeouts uint64 // reads of it that took too long
}

// Metrics is a node's metrics page. It is safe for concurrent use.
//
// It counts only the durations and errors of calls, and reloads. A scrape reads all other numbers where they are kept,
// so that no decision looks up a label. All inline limits share one label. weir_current_window_count and
// weir_window_utilization are the peaks of the last 30 s to a minute, and since the last scrape at least.
type Metrics struct {
	cfg     MetricsConfig
	node    *prometheus.Registry // the page without the metrics of the process
	peaks   peaks
	calls   calls
	reloads *prometheus.CounterVec
}

// alerted are the events that are shown as 0 before they first happen, so that an alert on a rise sees the first one.
var alerted = []string{"claimed", "took over", "handed over", "merged", "strict keys start full"}

// NewMetrics returns the metrics of a node.
func NewMetrics(cfg MetricsConfig) *Metrics {
	m := &Metrics{cfg: cfg, node: prometheus.NewRegistry()}
	m.calls = newCalls(m.node)
	m.reloads = counted(m.node, "weir_policies_reloads_total",
		"Changes of the policy file, by result (taken, rejected).", "result")
	for _, result := range []string{"taken", "rejected"} {
		m.reloads.WithLabelValues(result)
	}
	m.node.MustRegister(cfg.Collectors...)
	m.node.MustRegister(Reading(m.read))
	return m
}

// Register registers the metrics of the node, without those of the process, in another registry until end is called.
// The error is the registry's.
func (m *Metrics) Register(to prometheus.Registerer) (end func(), err error) {
	return func() { to.Unregister(m.node) }, to.Register(m.node)
}

// Handler serves the page.
func (m *Metrics) Handler() http.Handler {
	process := prometheus.NewRegistry()
	process.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	opts := promhttp.HandlerOpts{ErrorLog: slog.NewLogLogger(m.cfg.Logger.Handler(), slog.LevelError)}
	return promhttp.HandlerFor(prometheus.Gatherers{process, m.node}, opts)
}

// Reloaded counts a change of the policy file; taken: it is in force.
func (m *Metrics) Reloaded(taken bool) { m.reloads.WithLabelValues(resultOf(taken)).Inc() }

func resultOf(taken bool) string {
	if taken {
		return "taken"
	}
	return "rejected"
}

// Reading is a collector that calls the function at each scrape.
type Reading func(to Lines)

// Describe implements prometheus.Collector. The metrics are not known before a scrape.
func (Reading) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (r Reading) Collect(ch chan<- prometheus.Metric) { r(Lines(ch)) }

// Lines gets the metrics of a scrape.
type Lines chan<- prometheus.Metric

func (l Lines) of(kind prometheus.ValueType, name, help string, labels []string) func(v float64, values ...string) {
	d := prometheus.NewDesc(name, help, labels, nil)
	return func(v float64, values ...string) { l <- prometheus.MustNewConstMetric(d, kind, v, values...) }
}

// Gauge sends a gauge without labels.
func (l Lines) Gauge(name, help string, v float64) { l.Gauges(name, help)(v) }

// Gauges returns a function that sends a gauge of this name, with the values of its labels.
func (l Lines) Gauges(name, help string, labels ...string) func(v float64, values ...string) {
	return l.of(prometheus.GaugeValue, name, help, labels)
}

// Counter sends a counter without labels.
func (l Lines) Counter(name, help string, v uint64) { l.Counters(name, help)(v) }

// Counters returns a function that sends a counter of this name, with the values of its labels.
func (l Lines) Counters(name, help string, labels ...string) func(v uint64, values ...string) {
	send := l.of(prometheus.CounterValue, name, help, labels)
	return func(v uint64, values ...string) { send(float64(v), values...) }
}

// read sends all metrics of the page but those of calls and reloads.
func (m *Metrics) read(to Lines) {
	m.readDecisions(to)
	m.readStore(to)
	dropped := to.Counters("weir_log_records_dropped_total", "Lines that were not written, by log (log, audit).", "log")
	for name, n := range m.cfg.LogsDropped {
		dropped(n(), name)
	}
	load := m.cfg.Limiter.Load()
	to.Gauge("weir_in_flight", "Operations that wait here for other nodes or for copies.", float64(load.InFlight))
	to.Gauge("weir_in_flight_max", "Operations that may wait here at most.", float64(load.MaxInFlight))
	shed := to.Counters("weir_shed_total", "Operations not carried out, by reason (in_flight, deadline).", "reason")
	shed(load.Full, "in_flight")
	shed(load.Late, "deadline")
	lent := m.cfg.Limiter.Loans()
	to.Gauge("weir_borrowers", "Clients, nodes and proxies with units of this node's keys.", float64(lent.Borrowers))
	to.Gauge("weir_units_on_loan", "Units of this node's keys that are on loan.", float64(lent.OnLoan))
	to.Counter("weir_loans_total", "Loans that this node has granted or renewed.", lent.Granted)
	to.Counter("weir_loan_units_total", "Units of this node's keys that borrowers have reported as spent.", lent.Spent)
	to.Counter("weir_loan_expired_units_total", "Units charged when their loans ended, spent or not.", lent.Expired)
	recalls := to.Counters("weir_loan_recalls_total", "Loans recalled, by result (asked, unanswered).", "result")
	recalls(lent.Recalled, "asked")
	recalls(lent.Unanswered, "unanswered")
	m.readFiles(to)
	to.Gauges("weir_build_info", "Always 1; the version of the binary.", "version", "goversion")(1, m.cfg.Version,
		runtime.Version())
	to.Gauge("weir_ready", "1 when the node is ready for traffic.", Truth(m.cfg.Ready()))
	m.readMembers(to, m.cfg.View())
	m.readOwnership(to)
}

// readDecisions sends the decisions of each policy.
func (m *Metrics) readDecisions(to Lines) {
	requests := to.Counters("weir_requests_total", "Checks decided here or by on_error.", "policy", "result")
	candidates := to.Counters("weir_candidate_total", "Checks that a candidate has decided.", "policy", "result")
	disagreed := to.Counters("weir_candidate_disagreements_total", "Checks that it answers otherwise.", "policy")
	remembered := to.Counters("weir_refusals_remembered_total", "Refusals from memory in place of an owner.", "policy")
	nearLimit := to.Counters("weir_near_limit_total", "Checks after which warn_at was in use.", "policy")
	borrowed := to.Counters("weir_decisions_borrowed_total", "Checks admitted from loans.", "policy")
	banned := to.Counters("weir_banned_total", "Checks that bans refused, or would have.", "policy")
	bans := to.Counters("weir_bans_total", "Bans of keys that a refusal has begun.", "policy")
	count := to.Gauges("weir_current_window_count", "Units in use of the fullest key decided here lately.", "policy")
	utilization := to.Gauges("weir_window_utilization", "Share of its limit that such a key uses.", "policy")
	for _, s := range m.peaks.read(time.Now(), m.cfg.Limiter.ReadStats) {
		if s.CandidateAllowed+s.CandidateRefused > 0 {
			candidates(s.CandidateAllowed, s.Policy, "allowed")
			candidates(s.CandidateRefused, s.Policy, "refused")
			disagreed(s.CandidateDisagreed, s.Policy)
		}
		requests(s.Allowed, s.Policy, "allowed")
		requests(s.Refused, s.Policy, "refused")
		requests(s.Shadowed, s.Policy, "shadow")
		requests(s.FailedOpen, s.Policy, "failed_open")
		requests(s.FailedClosed, s.Policy, "failed_closed")
		requests(s.Errors, s.Policy, "error")
		remembered(s.Remembered, s.Policy)
		nearLimit(s.NearLimit, s.Policy)
		borrowed(s.Borrowed, s.Policy)
		banned(s.Banned, s.Policy)
		bans(s.Bans, s.Policy)
		count(float64(s.PeakCount), s.Policy)
		utilization(s.PeakUtilization, s.Policy)
	}
}

// readStore sends the numbers of the store, in total and by share.
func (m *Metrics) readStore(to Lines) {
	st := m.cfg.Limiter.Store()
	to.Gauge("weir_keys", "Keys with live state on this node.", float64(st.Keys))
	to.Gauge("weir_keys_copied", "Those of weir_keys that are copies of other nodes' keys.", float64(st.Copies))
	to.Gauge("weir_keys_max", "Keys with live state that this node keeps at most; 0: no bound.", float64(st.MaxKeys))
	to.Gauge("weir_state_bytes", "Bytes held for state.", float64(st.Bytes))
	to.Gauge("weir_state_bytes_max", "Bytes held for state at most; 0: no bound.", float64(st.MaxBytes))
	to.Counter("weir_store_full_total", "Checks answered by on_error for want of room in the store.", st.Full)
	to.Counter("weir_store_swept_total", "Idle states dropped because they were equal to new ones.", st.Swept)
	to.Gauge("weir_reservations", "Pending reservations and extensions, copies too.", float64(st.Reservations))
	to.Counter("weir_reservations_rejected_total", "Reservations for which there was no room.", st.ReservationsRejected)
	to.Counter("weir_request_ids_lost_total", "Request ids not remembered for want of room.", st.RequestIDsLost)
	keys := to.Gauges("weir_share_keys", "Keys of a policy, inline namespace or caller.", "share", "name")
	bytes := to.Gauges("weir_share_bytes", "Bytes of the states of a share's keys.", "share", "name")
	full := to.Counters("weir_share_full_total", "Checks that on_error answered for want of room.", "share", "name")
	idsLost := to.Counters("weir_share_request_ids_lost_total", "Request ids lost, of a caller.", "share", "name")
	m.eachShare(func(kind, name string, s store.Share) {
		keys(float64(s.Keys), kind, name)
		bytes(float64(s.Bytes), kind, name)
		full(s.Refused, kind, name)
		if kind == "caller" || kind == "caller_other" {
			idsLost(s.RequestIDsLost, kind, name)
		}
	})
}

// readFiles sends which policies are in force, and whether the followed files are valid.
func (m *Metrics) readFiles(to Lines) {
	set := m.cfg.Limiter.Policies()
	to.Gauge("weir_policies", "Policies in force.", float64(len(set.Policies())))
	to.Gauges("weir_policies_info", "Always 1; the hash of the policies in force.", "hash")(1, set.Hash())
	timeouts := to.Counters("weir_file_read_timeouts_total", "Reads that the file system did not answer.", "file")
	secure := to.Gauges("weir_security_file_valid", "0 while such a file is not in force as it is.", "file")
	policiesValid := true // also without a policy file
	for _, file := range m.cfg.Files() {
		timeouts(file.Timeouts, file.Name)
		switch file.Name {
		case "policies":
			policiesValid = file.Valid
		case "envoy_configuration":
			to.Gauge("weir_envoy_configuration_valid", "0 while they are not in force as they are.", Truth(file.Valid))
		default:
			secure(Truth(file.Valid), file.Name)
		}
	}
	to.Gauge("weir_policies_file_valid", "0 while the policy file is not in force as it is.", Truth(policiesValid))
}

// readOwnership sends the events and states of partitions on this node.
func (m *Metrics) readOwnership(to Lines) {
	happened := m.cfg.Happened()
	events := to.Counters("weir_ownership_events_total", "What has happened with partitions, by event.", "event")
	for _, event := range alerted {
		if happened.Events[event] == 0 {
			events(0, event)
		}
	}
	for event, n := range happened.Events {
		events(n, event)
	}
	to.Counter("weir_ownership_messages_dropped_total", "Messages that found their queue full.", happened.Lost)
	to.Gauge("weir_partitions", "Partitions that keys fall into, over the whole cluster.", ring.Partitions)
	if o, ok := m.cfg.Ownership(); ok {
		to.Gauge("weir_partitions_held", "Partitions that this node decides for.", float64(o.Held))
		to.Gauge("weir_partitions_moving", "Partitions on their way from this node to another.", float64(o.Moving))
		to.Gauge("weir_partitions_arriving", "Partitions on their way to this node from another.", float64(o.Arriving))
		to.Gauge("weir_partitions_awaited", "Partitions that this node should hold and does not.", float64(o.Awaited))
		to.Gauge("weir_partitions_copied", "Complete copies here of others' partitions.", float64(o.Copies))
		to.Gauge("weir_partitions_degraded", "Held partitions without a current copy elsewhere.", float64(o.Degraded))
		to.Gauge("weir_partitions_degraded_no_room", "Degraded ones whose copy finds no room.", float64(o.NoRoom))
		to.Gauge("weir_partitions_granted", "Held partitions under a live grant of the voters.", float64(o.Granted))
		to.Gauge("weir_replica_pending_keys", "Keys whose last changes no copy has been sent.", float64(o.Pending))
		to.Gauge("weir_voter", "1 when this node is a voter that votes.", Truth(o.Voting))
	}
}

// maxListed bounds the namespaces, and the callers, with lines of their own, because callers can make up namespaces.
const maxListed = 20

// eachShare calls do for each policy's share of the store, for the largest namespaces and callers, and once for the
// rest of each.
func (m *Metrics) eachShare(do func(kind, name string, s store.Share)) {
	policies, namespaces, callers := m.cfg.Limiter.Shares()
	for _, s := range policies {
		do("policy", s.Name, s)
	}
	for _, one := range []struct {
		kind string
		list []store.Share
	}{{"inline", namespaces}, {"caller", callers}} {
		var rest store.Share
		listed := 0
		for _, s := range one.list {
			if s.Name != "" && listed < maxListed {
				listed++
				do(one.kind, s.Name, s)
				continue
			}
			rest.Keys, rest.Bytes, rest.Refused = rest.Keys+s.Keys, rest.Bytes+s.Bytes, rest.Refused+s.Refused
			rest.RequestIDsLost += s.RequestIDsLost
		}
		if listed < len(one.list) {
			do(one.kind+"_other", "", rest)
		}
	}
}

// readMembers sends the numbers of the cluster.
func (m *Metrics) readMembers(to Lines, v *cluster.View) {
	if v == nil {
		return
	}
	states := map[cluster.State]int{cluster.Joining: 0, cluster.Active: 0, cluster.Leaving: 0}
	other, otherEnvoy, owned := 0, 0, 0
	for i := range v.Members {
		states[v.Members[i].State]++
		if v.Members[i].PolicyHash != v.Self.PolicyHash {
			other++
		}
		if v.Members[i].EnvoyHash != v.Self.EnvoyHash {
			otherEnvoy++
		}
	}
	for p := range ring.Partitions {
		if v.Owner(p) == v.Self {
			owned++
		}
	}
	members := to.Gauges("weir_members", "Members of the cluster as this node sees it, by state.", "state")
	for s, n := range states {
		members(float64(n), s.String())
	}
	to.Gauge("weir_policies_mismatched_members", "Members with other policies.", float64(other))
	to.Gauge("weir_envoy_mismatched_members", "Members with other files for Envoy.", float64(otherEnvoy))
	to.Gauge("weir_partitions_owned", "Partitions that the ring gives to this node.", float64(owned))
}

// Truth returns 1 for true and 0 for false.
func Truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
