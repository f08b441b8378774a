// Package observe tells what a node does: Prometheus metrics, OpenTelemetry spans, the history and the top keys of what it decided, and the
// audit log. Its memory is bounded, and neither a scraper nor a collector that stalls slows a decision. A key is never a label or an
// attribute of a span.
//
// It does not promise that scrapers behind one address and of one kind see every peak, that every span arrives, that a top key is found, or
// that a line of the audit log outlives the machine.
package observe

import (
	"log/slog"
	"net/http"
	"runtime"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/weirlimit/weir/cluster"
	"github.com/weirlimit/weir/cluster/runner"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/store"
)

// MeasuredLimiter is what is read of the service.
type MeasuredLimiter interface {
	ReadStats() []limiter.PolicyStats
	Store() store.Stats
	Shares() (policies, namespaces, callers []store.Share)
	Load() limiter.LoadStats
	Loans() limiter.LoanStats
	Policies() *policy.Set
}

// MetricsConfig says where the figures come from. All fields but LogsDropped and Collectors are required.
type MetricsConfig struct {
	Limiter MeasuredLimiter
	View    func() *cluster.View // nil View: a node without a cluster
	Ready   func() bool
	// Ownership returns what the node holds, and false when that cannot be told any more; Happened what has happened with
	// partitions.
	Ownership func() (runner.Status, bool)
	Happened  func() runner.Stats
	// LogsDropped return how many lines of a log have been dropped, by the log's name.
	LogsDropped map[string]func() uint64
	// Files returns the files that the node follows.
	Files   func() []WatchedFile
	Version string
	Logger  *slog.Logger
	// Collectors are shown too.
	Collectors []prometheus.Collector
}

// WatchedFile is one file, or several that belong together, that a node reads again when they change.
type WatchedFile struct {
	Name     string // policies, envoy_configuration, access, certificates, peer_certificates or gossip_keys
	Valid    bool   // it is in force as it is now
	Timeouts uint64 // reads of it that took too long
}

// Metrics is a node's metrics page. It is safe for concurrent use.
//
// Its own are only the durations of calls and hops: a scrape reads the others where they are kept, so that a decision never looks up a
// label. Limits that callers send along share one label. weir_current_window_count and weir_window_utilization are of the fullest key since
// the scraper's own last scrape, and scrapers behind one address and of one kind are taken for one.
type Metrics struct {
	cfg      MetricsConfig
	registry *prometheus.Registry
	peaks    peaks
	calls    calls
	reloads  *prometheus.CounterVec
}

var (
	candidates = prometheus.NewDesc("weir_candidate_total",
		"Checks that a policy's candidate has decided beside it, by what it would have done: allowed, refused.", []string{"policy", "result"}, nil)
	disagreed = prometheus.NewDesc("weir_candidate_disagreements_total",
		"Checks that a policy's candidate would have answered otherwise than the policy.", []string{"policy"}, nil)
	requests = prometheus.NewDesc("weir_requests_total",
		"Checks decided by this node, and answered by on_error, by policy and result (allowed, refused, shadow, failed_open, failed_closed, error).", []string{"policy", "result"}, nil)
	remembered = prometheus.NewDesc("weir_refusals_remembered_total",
		"Those of weir_requests_total that this node refused from memory, in the place of their owner.", []string{"policy"}, nil)
	nearLimit = prometheus.NewDesc("weir_near_limit_total",
		"Those of weir_requests_total after which the warn_at of their policy was in use, of one of its limits.", []string{"policy"}, nil)
	banned = prometheus.NewDesc("weir_banned_total",
		"Those of weir_requests_total that were refused, or would have been but for shadow mode, because the key is banned.", []string{"policy"}, nil)
	bans        = prometheus.NewDesc("weir_bans_total", "Bans of keys that a refusal has begun.", []string{"policy"}, nil)
	windowCount = prometheus.NewDesc("weir_current_window_count",
		"Units in use of the fullest key decided here since this scraper's last scrape.", []string{"policy"}, nil)
	utilization = prometheus.NewDesc("weir_window_utilization",
		"Share of its limit in use of the fullest key decided here since this scraper's last scrape.", []string{"policy"}, nil)
	keys       = prometheus.NewDesc("weir_keys", "Keys with live state on this node.", nil, nil)
	keyCopies  = prometheus.NewDesc("weir_keys_copied", "Those of weir_keys that are copies of other nodes' keys.", nil, nil)
	keysMax    = prometheus.NewDesc("weir_keys_max", "Keys with live state that this node keeps at most; 0: no bound.", nil, nil)
	stateBytes = prometheus.NewDesc("weir_state_bytes", "Bytes held for state.", nil, nil)
	bytesMax   = prometheus.NewDesc("weir_state_bytes_max", "Bytes held for state at most; 0: no bound.", nil, nil)
	full       = prometheus.NewDesc("weir_store_full_total", "Checks answered by on_error because there was no room for their state in the store, or only what is kept for those with less than a fair part.", nil, nil)
	shareKeys  = prometheus.NewDesc("weir_share_keys",
		"Keys with state of a share on this node, by kind of share (policy; inline, a namespace of inline limits; caller) and name. inline_other and caller_other, without a name, are all those that are not listed.", shareLabels, nil)
	shareBytes   = prometheus.NewDesc("weir_share_bytes", "Bytes of the states of a share's keys, as weir_share_keys.", shareLabels, nil)
	shareIDsLost = prometheus.NewDesc("weir_share_request_ids_lost_total",
		"Of weir_request_ids_lost_total, those of a caller, as weir_share_keys.", shareLabels, nil)
	shareFull  = prometheus.NewDesc("weir_share_full_total", "Checks answered by on_error because the share has reached its bound or its fair part, as weir_share_keys.", shareLabels, nil)
	swept      = prometheus.NewDesc("weir_store_swept_total", "Idle states dropped because they were equal to new ones.", nil, nil)
	logDropped = prometheus.NewDesc("weir_log_records_dropped_total", "Lines of a log (log, audit) that were dropped because their reader stalls, or that could not be written.", []string{"log"}, nil)
	reserved   = prometheus.NewDesc("weir_reservations", "Pending reservations and extensions, copies of other nodes' included.", nil, nil)
	unreserved = prometheus.NewDesc("weir_reservations_rejected_total", "Reservations and extensions that were answered by an error, because a key or the node has as many as it may have.", nil, nil)
	borrowed   = prometheus.NewDesc("weir_decisions_borrowed_total", "Allowed decisions that were admitted from loans.", []string{"policy"}, nil)
	idsLost    = prometheus.NewDesc("weir_request_ids_lost_total", "Request ids that were not remembered, or not for as long as they should be, for want of room.", nil, nil)
	inFlight   = prometheus.NewDesc("weir_in_flight", "Checks and other operations that wait here for other nodes or for copies.", nil, nil)
	flightMax  = prometheus.NewDesc("weir_in_flight_max", "Checks and other operations that may wait here at most.", nil, nil)
	shed       = prometheus.NewDesc("weir_shed_total",
		"Checks and other operations not carried out, by reason: in_flight, too many were waiting, and on_error answered; deadline, the caller had gone or had no time left.", []string{"reason"}, nil)
	borrowers  = prometheus.NewDesc("weir_borrowers", "Clients, nodes and proxies that have units of this node's keys on loan.", nil, nil)
	onLoan     = prometheus.NewDesc("weir_units_on_loan", "Units of this node's keys that are on loan.", nil, nil)
	loans      = prometheus.NewDesc("weir_loans_total", "Loans that this node has granted or renewed.", nil, nil)
	loanUnits  = prometheus.NewDesc("weir_loan_units_total", "Units of this node's keys that borrowers have reported as spent.", nil, nil)
	expired    = prometheus.NewDesc("weir_loan_expired_units_total", "Units on loan of this node's keys that were charged because their loans had ended, whether or not borrowers had spent them.", nil, nil)
	recalls    = prometheus.NewDesc("weir_loan_recalls_total", "Loans that this node has recalled before a refusal, by result: asked, and those of them that were unanswered in time.", []string{"result"}, nil)
	policies   = prometheus.NewDesc("weir_policies", "Policies in force.", nil, nil)
	policyInfo = prometheus.NewDesc("weir_policies_info", "Always 1; the hash of the policies in force.", []string{"hash"}, nil)
	fileValid  = prometheus.NewDesc("weir_policies_file_valid", "0 when the present policy file was rejected or cannot be read, and the previous one is in force.", nil, nil)
	envoyValid = prometheus.NewDesc("weir_envoy_configuration_valid",
		"0 when a file of envoy-config, as it is now, has a mistake in it or cannot be read, and the configuration from before is in force.", nil, nil)
	secureFile = prometheus.NewDesc("weir_security_file_valid",
		"0 when a file that access depends on was rejected as it is now, or cannot be read, and what it held before is in force, by file (certificates, peer_certificates, access, gossip_keys).", []string{"file"}, nil)
	timeouts = prometheus.NewDesc("weir_file_read_timeouts_total",
		"Reads of a file that the file system did not answer in time, by file (policies, envoy_configuration, and those of weir_security_file_valid).", []string{"file"}, nil)
	members         = prometheus.NewDesc("weir_members", "Members of the cluster as this node sees it, by state.", []string{"state"}, nil)
	partitions      = prometheus.NewDesc("weir_partitions", "Partitions that keys fall into, over the whole cluster.", nil, nil)
	owned           = prometheus.NewDesc("weir_partitions_owned", "Partitions that the ring gives to this node.", nil, nil)
	held            = prometheus.NewDesc("weir_partitions_held", "Partitions that this node decides for.", nil, nil)
	moving          = prometheus.NewDesc("weir_partitions_moving", "Partitions on their way from this node to another.", nil, nil)
	arriving        = prometheus.NewDesc("weir_partitions_arriving", "Partitions on their way to this node from another.", nil, nil)
	awaited         = prometheus.NewDesc("weir_partitions_awaited", "Partitions that the ring gives to this node and that it does not hold yet.", nil, nil)
	copies          = prometheus.NewDesc("weir_partitions_copied", "Complete copies of the partitions of others on this node.", nil, nil)
	degraded        = prometheus.NewDesc("weir_partitions_degraded", "Held partitions of which no other node has a current copy.", nil, nil)
	noRoom          = prometheus.NewDesc("weir_partitions_degraded_no_room", "Of the degraded partitions: those whose copy finds no room on the node that should have it.", nil, nil)
	granted         = prometheus.NewDesc("weir_partitions_granted", "Held partitions under a live grant of the voters.", nil, nil)
	pending         = prometheus.NewDesc("weir_replica_pending_keys", "Keys whose last changes have not been sent to a copy yet.", nil, nil)
	voting          = prometheus.NewDesc("weir_voter", "1 when this node is a voter that votes.", nil, nil)
	events          = prometheus.NewDesc("weir_ownership_events_total", "What has happened with partitions on this node, by event (claimed, took over, handed over, merged, backup dropped and so on).", []string{"event"}, nil)
	overrun         = prometheus.NewDesc("weir_ownership_messages_dropped_total", "Ownership messages dropped because too many were queued.", nil, nil)
	mismatchedEnvoy = prometheus.NewDesc("weir_envoy_mismatched_members", "Members whose configuration files for Envoy differ from this node's.", nil, nil)
	mismatched      = prometheus.NewDesc("weir_policies_mismatched_members", "Members whose policies differ from this node's.", nil, nil)
	ready           = prometheus.NewDesc("weir_ready", "1 when the node is ready for traffic.", nil, nil)
	build           = prometheus.NewDesc("weir_build_info", "Always 1; the version of the binary.", []string{"version", "goversion"}, nil)
)

// alerted are events that have a line before they first happen, so that an alert on their rise sees the first one too.
var alerted = []string{"claimed", "took over", "handed over", "merged", "strict keys start full"}

// NewMetrics returns a node's metrics.
func NewMetrics(cfg MetricsConfig) *Metrics {
	m := &Metrics{
		cfg:      cfg,
		registry: prometheus.NewRegistry(),
		calls:    newCalls(),
		reloads: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "weir_policies_reloads_total", Help: "Changes of the policy file, by result (taken, rejected).",
		}, []string{"result"}),
	}
	for _, result := range []string{"taken", "rejected"} {
		m.reloads.WithLabelValues(result)
	}
	m.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	m.registry.MustRegister(m.own()...)
	return m
}

// own are the collectors of what is the node's and not the process's, but for what differs by scraper.
func (m *Metrics) own() []prometheus.Collector {
	return append([]prometheus.Collector{m.calls.durations, m.calls.errors, m.reloads}, m.cfg.Collectors...)
}

// Register shows what is the node's, and not the process's, in a registry of somebody else's until end is called. Whoever scrapes
// that is one scraper. The error is the registry's, in which nothing is left then.
func (m *Metrics) Register(to prometheus.Registerer) (end func(), err error) {
	var done []prometheus.Collector
	end = func() {
		for _, c := range done {
			to.Unregister(c)
		}
	}
	for _, c := range append(m.own(), page{m, "registerer"}) {
		if err := to.Register(c); err != nil {
			end()
			return nil, err
		}
		done = append(done, c)
	}
	return end, nil
}

// Handler serves the page.
func (m *Metrics) Handler() http.Handler {
	opts := promhttp.HandlerOpts{ErrorLog: slog.NewLogLogger(m.cfg.Logger.Handler(), slog.LevelError)}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		promhttp.HandlerFor(m.pageFor(scraperOf(r)), opts).ServeHTTP(w, r)
	})
}

// pageFor is the page as one scraper sees it.
func (m *Metrics) pageFor(scraper string) prometheus.Gatherer {
	own := prometheus.NewRegistry()
	own.MustRegister(page{m, scraper})
	return prometheus.Gatherers{m.registry, own}
}

// Reloaded notes that the policy file changed, and whether it was taken.
func (m *Metrics) Reloaded(taken bool) {
	if taken {
		m.reloads.WithLabelValues("taken").Inc()
	} else {
		m.reloads.WithLabelValues("rejected").Inc()
	}
}

// page is what is read for one scrape.
type page struct {
	*Metrics
	scraper string
}

// Describe implements prometheus.Collector. A registry forgets and compares collectors by what they describe.
func (page) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		requests, candidates, disagreed, remembered, borrowed, nearLimit, banned, bans, windowCount, utilization, keys, keyCopies, keysMax,
		stateBytes, bytesMax, full, shareKeys, shareBytes, shareFull, shareIDsLost, swept, reserved, unreserved, idsLost, logDropped, inFlight,
		flightMax, shed, policies, policyInfo, fileValid, envoyValid, secureFile, timeouts, members, partitions, owned, held, moving, arriving,
		awaited, copies, degraded, noRoom, granted, borrowers, onLoan, loans, loanUnits, expired, recalls, pending, voting, events, overrun,
		mismatched, mismatchedEnvoy, ready, build,
	} {
		ch <- d
	}
}

// figures are the lines of a page.
type figures chan<- prometheus.Metric

func (f figures) gauge(d *prometheus.Desc, v float64, labels ...string) {
	f <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
}

func (f figures) counter(d *prometheus.Desc, v uint64, labels ...string) {
	f <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
}

// Collect implements prometheus.Collector.
func (m page) Collect(ch chan<- prometheus.Metric) {
	f := figures(ch)
	m.collectDecisions(f)
	m.collectStore(f)
	for name, dropped := range m.cfg.LogsDropped {
		f.counter(logDropped, dropped(), name)
	}
	load := m.cfg.Limiter.Load()
	f.gauge(inFlight, float64(load.InFlight))
	f.gauge(flightMax, float64(load.MaxInFlight))
	f.counter(shed, load.Full, "in_flight")
	f.counter(shed, load.Late, "deadline")
	lent := m.cfg.Limiter.Loans()
	f.gauge(borrowers, float64(lent.Borrowers))
	f.gauge(onLoan, float64(lent.OnLoan))
	f.counter(loans, lent.Granted)
	f.counter(loanUnits, lent.Spent)
	f.counter(expired, lent.Expired)
	f.counter(recalls, lent.Recalled, "asked")
	f.counter(recalls, lent.Unanswered, "unanswered")
	m.collectFiles(f)
	f.gauge(build, 1, m.cfg.Version, runtime.Version())
	f.gauge(ready, truth(m.cfg.Ready()))
	m.collectMembers(m.cfg.View(), f.gauge)
	m.collectOwnership(f)
}

// collectDecisions sends what was decided by each policy.
func (m page) collectDecisions(f figures) {
	for _, s := range m.peaks.read(m.scraper, m.cfg.Limiter.ReadStats) {
		if s.CandidateAllowed+s.CandidateRefused > 0 {
			f.counter(candidates, s.CandidateAllowed, s.Policy, "allowed")
			f.counter(candidates, s.CandidateRefused, s.Policy, "refused")
			f.counter(disagreed, s.CandidateDisagreed, s.Policy)
		}
		f.counter(requests, s.Allowed, s.Policy, "allowed")
		f.counter(requests, s.Refused, s.Policy, "refused")
		f.counter(requests, s.Shadowed, s.Policy, "shadow")
		f.counter(requests, s.FailedOpen, s.Policy, "failed_open")
		f.counter(requests, s.FailedClosed, s.Policy, "failed_closed")
		f.counter(requests, s.Errors, s.Policy, "error")
		f.counter(remembered, s.Remembered, s.Policy)
		f.counter(nearLimit, s.NearLimit, s.Policy)
		f.counter(borrowed, s.Borrowed, s.Policy)
		f.counter(banned, s.Banned, s.Policy)
		f.counter(bans, s.Bans, s.Policy)
		f.gauge(windowCount, float64(s.PeakCount), s.Policy)
		f.gauge(utilization, s.PeakUtilization, s.Policy)
	}
}

// collectStore sends what the store holds, in all and by share.
func (m *Metrics) collectStore(f figures) {
	st := m.cfg.Limiter.Store()
	f.gauge(keys, float64(st.Keys))
	f.gauge(keyCopies, float64(st.Copies))
	f.gauge(keysMax, float64(st.MaxKeys))
	f.gauge(stateBytes, float64(st.Bytes))
	f.gauge(bytesMax, float64(st.MaxBytes))
	f.counter(full, st.Full)
	f.counter(swept, st.Swept)
	f.gauge(reserved, float64(st.Reservations))
	f.counter(unreserved, st.ReservationsRejected)
	f.counter(idsLost, st.RequestIDsLost)
	m.collectShares(func(kind, name string, s store.Share) {
		f.gauge(shareKeys, float64(s.Keys), kind, name)
		f.gauge(shareBytes, float64(s.Bytes), kind, name)
		f.counter(shareFull, s.Refused, kind, name)
		if kind == "caller" || kind == "caller_other" {
			f.counter(shareIDsLost, s.RequestIDsLost, kind, name)
		}
	})
}

// collectFiles sends which policies are in force, and whether files that are read again are valid.
func (m *Metrics) collectFiles(f figures) {
	set := m.cfg.Limiter.Policies()
	f.gauge(policies, float64(len(set.Policies())))
	f.gauge(policyInfo, 1, set.Hash())
	policiesValid := true // without a file, too
	for _, file := range m.cfg.Files() {
		f.counter(timeouts, file.Timeouts, file.Name)
		switch file.Name {
		case "policies":
			policiesValid = file.Valid
		case "envoy_configuration":
			f.gauge(envoyValid, truth(file.Valid))
		default:
			f.gauge(secureFile, truth(file.Valid), file.Name)
		}
	}
	f.gauge(fileValid, truth(policiesValid))
}

// collectOwnership sends what becomes of partitions on this node.
func (m *Metrics) collectOwnership(f figures) {
	happened := m.cfg.Happened()
	for _, event := range alerted {
		if happened.Events[event] == 0 {
			f.counter(events, 0, event)
		}
	}
	for event, n := range happened.Events {
		f.counter(events, n, event)
	}
	f.counter(overrun, happened.Lost)
	f.gauge(partitions, ring.Partitions)
	if o, ok := m.cfg.Ownership(); ok {
		f.gauge(held, float64(o.Held))
		f.gauge(moving, float64(o.Moving))
		f.gauge(arriving, float64(o.Arriving))
		f.gauge(awaited, float64(o.Awaited))
		f.gauge(copies, float64(o.Copies))
		f.gauge(degraded, float64(o.Degraded))
		f.gauge(noRoom, float64(o.NoRoom))
		f.gauge(granted, float64(o.Granted))
		f.gauge(pending, float64(o.Pending))
		f.gauge(voting, truth(o.Voting))
	}
}

// shareLabels name a share.
var shareLabels = []string{"share", "name"}

// maxListed is how many namespaces, and how many callers, have lines of their own: callers can make up namespaces.
const maxListed = 20

// collectShares calls do for what each policy has in the store, and the largest namespaces and callers, and once for the rest of each.
func (m *Metrics) collectShares(do func(kind, name string, s store.Share)) {
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

func (m *Metrics) collectMembers(v *cluster.View, gauge func(*prometheus.Desc, float64, ...string)) {
	if v == nil {
		return
	}
	states := map[cluster.State]int{cluster.Joining: 0, cluster.Active: 0, cluster.Leaving: 0}
	other, otherEnvoy := 0, 0
	for i := range v.Members {
		states[v.Members[i].State]++
		if v.Members[i].PolicyHash != v.Self.PolicyHash {
			other++
		}
		if v.Members[i].EnvoyHash != v.Self.EnvoyHash {
			otherEnvoy++
		}
	}
	for s, n := range states {
		gauge(members, float64(n), s.String())
	}
	gauge(mismatched, float64(other))
	gauge(mismatchedEnvoy, float64(otherEnvoy))
	n := 0
	for p := range ring.Partitions {
		if v.Owner(p) == v.Self {
			n++
		}
	}
	gauge(owned, float64(n))
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
