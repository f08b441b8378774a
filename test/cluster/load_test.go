package clustertest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	grpcstatus "google.golang.org/grpc/status"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/checker"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// What all policies under load have in common. A key is asked for several times as often as its limit allows, so that
// whatever is forgotten of it is used at once; and the window is longer than any fault takes to be got over, so that
// what was admitted before still counts after.
const (
	loadLimit  = 10
	loadWindow = 12 * time.Second
)

// loadPolicies are of every durability, and both consistencies, side by side.
func loadPolicies() []checker.Policy {
	return everyDurability(loadLimit, loadWindow,
		checker.Policy{Name: "fixed", Kind: checker.Fixed, Durability: checker.Escrow},
		checker.Policy{Name: "slots", Kind: checker.Window, Durability: checker.Async, Coarse: loadWindow / 10},
		checker.Policy{Name: "strict-escrow", Kind: checker.Window, Durability: checker.Escrow, Strict: true},
		checker.Policy{Name: "strict-sync", Kind: checker.Window, Durability: checker.Sync, Strict: true})
}

// everyDurability is a window of every durability, a bucket, and more, all of one limit.
func everyDurability(limit int64, window time.Duration, more ...checker.Policy) []checker.Policy {
	list := append([]checker.Policy{
		{Name: "none", Kind: checker.Window, Durability: checker.None},
		{Name: "async", Kind: checker.Window, Durability: checker.Async},
		{Name: "escrow", Kind: checker.Window, Durability: checker.Escrow},
		{Name: "sync", Kind: checker.Window, Durability: checker.Sync},
		{Name: "bucket", Kind: checker.Bucket, Durability: checker.Sync},
	}, more...)
	for i := range list {
		list[i].Limit, list[i].Window, list[i].Capacity = limit, window, limit
	}
	return list
}

// policyFile writes loadPolicies as a node reads them.
func policyFile() string { return policiesFile(loadPolicies()) }

// policiesFile writes policies as a node reads them, and two more whose limits nobody reaches. on_error is closed
// throughout: what is admitted uncounted while an owner is away is not what these tests are about.
func policiesFile(list []checker.Policy) string {
	var b strings.Builder
	b.WriteString("policies:\n")
	for _, p := range list {
		algorithm := "sliding_log"
		switch {
		case p.Kind == checker.Bucket:
			algorithm = "token_bucket"
		case p.Kind == checker.Fixed:
			algorithm = "fixed_window"
		case p.Coarse > 0:
			algorithm = "sliding_window"
		}
		consistency := "available"
		if p.Strict {
			consistency = "strict"
		}
		durability := []string{"none", "async", "escrow", "sync"}[p.Durability]
		fmt.Fprintf(&b, "  - {name: %s, algorithm: %s, limit: %d, window: %v, durability: %s, consistency: %s, on_error: closed}\n",
			p.Name, algorithm, p.Limit, p.Window, durability, consistency)
	}
	b.WriteString("  - {name: probe, algorithm: token_bucket, limit: 1_000_000, window: 1s, on_error: closed}\n")
	b.WriteString("  - {name: probe-strict, algorithm: token_bucket, limit: 1_000_000, window: 1s, durability: sync, consistency: strict}\n")
	return b.String()
}

// load asks the nodes of a fleet, at a steady rate, and records what was asked and answered. Half of the questions are
// about keys of which few have been asked yet, which use up their limits within a second or so; the other half about
// all that have been in use within the last window.
type load struct {
	t        *testing.T
	f        *fleet
	policies []checker.Policy
	start    time.Time
	rotation atomic.Pointer[[]*member] // who is asked
	inFlight atomic.Int64              // questions that have not been answered

	usages []checker.Usage
	deaths []death
	calms  []int64 // instants at which the cluster was calm, in order

	quit    chan struct{}
	work    sync.WaitGroup
	mu      sync.Mutex
	records []record
}

// record is an operation and, if it failed, how.
type record struct {
	checker.Operation
	failure string
}

// loadRate is how many questions are asked in a second, and freshRate how many new keys of each policy come up.
func loadRate() (questions int, fresh float64) {
	if raceEnabled {
		return 100, 0.5
	}
	return 400, 2
}

// loadWorkers ask side by side. Some of them wait, while nodes are away, until the nodes they asked give up.
const loadWorkers = 40

// newestKey is the number of the key that has come up last, and keysInUse how many there have been within a window.
func (l *load) newestKey() int {
	_, fresh := loadRate()
	return int(time.Since(l.start).Seconds() * fresh)
}

func keysInUse() int {
	_, fresh := loadRate()
	return int(loadWindow.Seconds() * fresh)
}

func keyNamed(number int) string { return fmt.Sprintf("key-%d", max(0, number)) }

// startLoad begins to ask the given members.
func startLoad(f *fleet, members ...*member) *load {
	l := &load{t: f.t, f: f, policies: loadPolicies(), start: time.Now(), quit: make(chan struct{})}
	l.ask(members...)
	for range loadWorkers {
		l.work.Go(l.worker)
	}
	f.t.Cleanup(l.end)
	return l
}

// ask sets whom the next questions are put to.
func (l *load) ask(members ...*member) { l.rotation.Store(&members) }

// without is ask of all that are asked now but some.
func (l *load) without(gone ...*member) {
	l.ask(slices.DeleteFunc(slices.Clone(*l.rotation.Load()),
		func(m *member) bool { return slices.Contains(gone, m) })...)
}

// with is ask of all that are asked now and some more.
func (l *load) with(more ...*member) { l.ask(slices.Concat(*l.rotation.Load(), more)...) }

// now is the instant on the history's clock.
func (l *load) now() int64 { return int64(time.Since(l.start)) }

func (l *load) end() {
	select {
	case <-l.quit:
	default:
		close(l.quit)
	}
	l.work.Wait()
}

func (l *load) worker() {
	rate, _ := loadRate()
	pace := time.NewTicker(time.Second * loadWorkers / time.Duration(rate))
	defer pace.Stop()
	for {
		select {
		case <-l.quit:
			return
		case <-pace.C:
		}
		l.inFlight.Add(1) // before the look at whom to ask, so that a pause waits for this question
		members := *l.rotation.Load()
		if len(members) == 0 {
			l.inFlight.Add(-1)
			continue
		}
		policy := l.policies[rand.IntN(len(l.policies))].Name
		back := rand.IntN(4)
		if rand.IntN(2) == 0 {
			back = rand.IntN(keysInUse())
		}
		l.put(members[rand.IntN(len(members))], policy, keyNamed(l.newestKey()-back), 10*time.Second)
		l.inFlight.Add(-1)
	}
}

// put asks one question and records it.
func (l *load) put(m *member, policy, key string, patience time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	r := record{Operation: checker.Operation{Policy: policy, Key: key, Cost: 1, Result: checker.Failed}}
	var d decision
	r.Sent = l.now()
	var err error
	if rand.IntN(2) == 0 {
		d, err = m.checkHTTP(ctx, policy, key)
	} else {
		d, err = m.checkGRPC(ctx, policy, key)
	}
	r.Answered = l.now()
	switch {
	case err != nil:
		r.failure = err.Error()
	case d.FailedClosed:
		r.failure = "failed_closed"
	case d.FailedOpen:
		r.failure = "failed_open, though on_error is closed"
	case d.Allowed:
		r.Result, r.Degraded = checker.Admitted, d.Degraded
	default:
		r.Result, r.Degraded = checker.Refused, d.Degraded
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.records = append(l.records, r)
}

// checkHTTP and checkGRPC ask a member that may be away. Their errors are short: they are counted.
func (m *member) checkHTTP(ctx context.Context, policy, key string) (d decision, err error) {
	body := fmt.Sprintf(`{"policy":%q,"key":%q}`, policy, key)
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+m.ip+":"+fleetHTTP+"/v1/check",
		strings.NewReader(body))
	if err != nil {
		return d, err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := m.client.Do(request)
	if err != nil {
		return d, fmt.Errorf("http: no answer")
	}
	defer response.Body.Close()
	var answer bytes.Buffer
	if _, err := io.Copy(&answer, response.Body); err != nil {
		return d, fmt.Errorf("http: answer cut off")
	}
	if err := json.Unmarshal(answer.Bytes(), &d); err != nil || d.Policy == "" {
		return d, fmt.Errorf("http: status %d: %.80s", response.StatusCode, &answer)
	}
	return d, nil
}

func (m *member) checkGRPC(ctx context.Context, policy, key string) (d decision, err error) {
	response, err := m.limiter.Check(ctx,
		&weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: &weirv1.Target{Policy: policy, Key: key}}}})
	if err != nil {
		return d, fmt.Errorf("grpc: %v: %.90s", grpcstatus.Code(err), grpcstatus.Convert(err).Message())
	}
	result := response.Results[0]
	if result.GetError() != nil {
		return d, fmt.Errorf("grpc: %v", result.GetError())
	}
	a := result.GetDecision()
	return decision{Allowed: a.Allowed, Remaining: a.Remaining, Degraded: a.Degraded, FailedOpen: a.FailedOpen,
		FailedClosed: a.FailedClosed}, nil
}

// clock is an instant as the nodes' logs write it.
func (l *load) clock(instant int64) string {
	return l.start.Add(time.Duration(instant)).UTC().Format("15:04:05.000")
}

// failures tells how many of the questions sent between two instants failed: of available policies and of strict ones.
func (l *load) failures(from, to int64) (available, strict, all int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.records {
		if r.Sent < from || r.Sent > to {
			continue
		}
		all++
		switch {
		case r.failure == "":
		case strings.HasPrefix(r.Policy, "strict"):
			strict++
		default:
			available++
		}
	}
	return available, strict, all
}

// tellFailures logs what went wrong between two instants, by kind.
func (l *load) tellFailures(what string, from, to int64) (available, strict int) {
	l.t.Helper()
	available, strict, all := l.failures(from, to)
	type kind struct {
		failure     string
		first, last int64
		n           int
	}
	kinds := make(map[string]*kind)
	l.mu.Lock()
	for _, r := range l.records {
		if r.failure != "" && r.Sent >= from && r.Sent <= to {
			failure := r.failure
			if strings.HasPrefix(r.Policy, "strict") {
				failure += " (strict)"
			}
			k := kinds[failure]
			if k == nil {
				k = &kind{failure: failure, first: r.Sent}
				kinds[failure] = k
			}
			k.first, k.last, k.n = min(k.first, r.Sent), max(k.last, r.Answered), k.n+1
		}
	}
	l.mu.Unlock()
	l.t.Logf("%s: of %d requests %d of available and %d of strict policies failed", what, all, available, strict)
	for _, failure := range slices.Sorted(maps.Keys(kinds)) {
		k := kinds[failure]
		l.t.Logf("  %d times, from %s to %s: %s", k.n, l.clock(k.first), l.clock(k.last), failure)
	}
	return available, strict
}

// bite waits until every policy has refused so many more of the questions sent from now on: keys that are at their
// limit are what faults can be seen by. Buckets refuse seldom, and the less on both sides of a split.
func (l *load) bite() {
	l.t.Helper()
	const enough = 25
	from := l.now()
	eventually(l.t, 3*waitTimeout, "every policy refuses", func() bool {
		refused := make(map[string]int)
		l.mu.Lock()
		defer l.mu.Unlock()
		for i := len(l.records) - 1; i >= 0 && l.records[i].Answered > from; i-- {
			if l.records[i].Result == checker.Refused {
				refused[l.records[i].Policy]++
			}
		}
		for _, p := range l.policies {
			if p.Kind != checker.Bucket && refused[p.Name] < enough {
				return false
			}
		}
		return true
	})
}

// observe records what is left of the keys in use, once all sides have merged and nothing is amiss. Nothing is asked
// meanwhile, so that what has been admitted before is known.
func (l *load) observe(m *member) {
	l.t.Helper()
	asked := *l.rotation.Load()
	l.ask()
	eventually(l.t, waitTimeout, "no question is in flight", func() bool { return l.inFlight.Load() == 0 })
	newest := l.newestKey()
	for _, p := range l.policies {
		for back := range keysInUse() {
			key := keyNamed(newest - back)
			d := m.peek(p.Name, key)
			l.usages = append(l.usages, checker.Usage{Policy: p.Name, Key: key, At: l.now(), Remaining: d.Remaining})
		}
	}
	l.ask(asked...)
}

// faults is what a run has suffered.
type faults struct {
	crashes      []checker.Crash
	splits       []checker.Split
	quorumLosses []checker.QuorumLoss
}

// goneLine is a line of the log.
var goneLine = regexp.MustCompile(`(?m)^time=(\S+).*msg="member lost" member=(\S+)`)

// suspicions are the times in which nodes took others for gone that were not, as happens when a machine is too busy to
// let a process run for a second or two. Each is a split like any other until the cluster was calm again, or the load
// ended: what available policies admit in it depends on how it went.
func (l *load) suspicions() (list []checker.Split) {
	l.t.Helper()
	for _, p := range l.f.started {
		for _, line := range goneLine.FindAllStringSubmatch(p.stderr.String(), -1) {
			when := must.Value(time.Parse(time.RFC3339Nano, line[1]))(l.t)
			seen, rightly := int64(when.Sub(l.start)), false
			for _, death := range l.deaths {
				rightly = rightly || death.name == line[2] && seen >= death.from && seen <= death.to
			}
			if rightly {
				continue
			}
			until := int64(math.MaxInt64)
			if i, _ := slices.BinarySearch(l.calms, seen); i < len(l.calms) {
				until = l.calms[i]
			}
			if i := slices.IndexFunc(list, func(s checker.Split) bool { return s.To == until }); i >= 0 {
				list[i].From = min(list[i].From, seen) // several nodes did
			} else {
				list = append(list, checker.Split{From: seen, To: until, Sides: len(l.f.members)})
			}
			l.t.Logf("at %s %s took %s for gone, which it was not: this machine is too busy", l.clock(seen), p.name,
				line[2])
		}
	}
	return list
}

// death is a time in which a node may rightly be taken for gone, for it was killed, stopped or cut off.
type death struct {
	name     string
	from, to int64
}

// gone says that some nodes may rightly be taken for gone from now on, and for a while after alive is called.
func (l *load) gone(members ...*member) (alive func()) {
	until := l.unreachable(members...)
	return func() { until(l.now() + int64(10*time.Second)) }
}

// unreachable says that some nodes may rightly be taken for gone from now on until the instant that until is given.
// What others take for gone after that is a split of its own.
func (l *load) unreachable(members ...*member) (until func(to int64)) {
	first := len(l.deaths)
	for _, m := range members {
		l.deaths = append(l.deaths, death{m.name, l.now(), math.MaxInt64})
	}
	return func(to int64) {
		for i := range members {
			l.deaths[first+i].to = to
		}
	}
}

// history is what there is to be judged.
func (l *load) history(suffered faults) *checker.History {
	suffered.splits = append(suffered.splits, l.suspicions()...)
	h := &checker.History{
		Policies: l.policies, Crashes: suffered.crashes, Splits: suffered.splits, QuorumLosses: suffered.quorumLosses,
		Usages: l.usages,
		// The clocks of one machine are one clock. A busy machine is late, to flush as well as to hand over.
		Flush: 250 * time.Millisecond, Late: 3 * time.Second,
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.records {
		h.Operations = append(h.Operations, r.Operation)
	}
	return h
}

// results counts operations by their results.
type results struct{ admitted, refused, failed int }

// resultsOf counts those of each policy.
func resultsOf(operations []checker.Operation) map[string]results {
	counts := make(map[string]results)
	for _, op := range operations {
		c := counts[op.Policy]
		switch op.Result {
		case checker.Admitted:
			c.admitted++
		case checker.Refused:
			c.refused++
		default:
			c.failed++
		}
		counts[op.Policy] = c
	}
	return counts
}

// judge ends the load and has the checker look at it.
func (l *load) judge(suffered faults) {
	l.t.Helper()
	l.end()
	l.calms = append(l.calms, l.now())
	h := l.history(suffered)
	counts := resultsOf(h.Operations)
	report := checker.Check(h)
	for _, p := range l.policies {
		c := counts[p.Name]
		l.t.Logf("%-13s admitted %5d, refused %5d, failed %4d; of one key at most %d beyond the limit of %d", p.Name,
			c.admitted, c.refused, c.failed, report.Excess[p.Name], loadLimit)
		expect.True(l.t, c.admitted >= 50 && c.refused >= 50, "%s: too little was asked to tell anything", p.Name)
	}
	tellViolations(l.t, report.Violations)
}

// tellViolations fails for violations. Where a promise is broken for one key it mostly is for many: a few of each kind
// tell as much as all.
func tellViolations(t *testing.T, violations []checker.Violation) {
	t.Helper()
	const enough = 4
	seen := make(map[string]int)
	for _, v := range violations {
		policy, _, _ := strings.Cut(v.Text, "/")
		kind := v.Rule + ": " + policy
		seen[kind]++
		expect.True(t, seen[kind] > enough, "%v", v)
	}
	for kind, n := range seen {
		expect.True(t, n <= enough, "%s: %d keys in all", kind, n)
	}
}

// debianPython is Debian's own, which sees Debian's packages; another one may come first in PATH.
const debianPython = "/usr/bin/python3"

// TestCallersInPython runs the Python programs of docs/callers.md against a node with the policy of that page: two
// checks of a key are admitted, and the third is refused and told to wait for less than a minute.
func TestCallersInPython(t *testing.T) {
	t.Parallel()
	if out, err := exec.Command(debianPython, "-c", "import redis").CombinedOutput(); err != nil {
		t.Skipf("needs Debian's python3 and python3-redis: %v %s", err, out)
	}
	page := must.Value(os.ReadFile("../../docs/callers.md"))(t)
	programs := regexp.MustCompile("(?s)```python\n(.*?)```").FindAllStringSubmatch(string(page), -1)
	must.True(t, len(programs) == 2, "docs/callers.md has %d Python programs, want 2", len(programs))
	policies := testkit.WriteFile(t, "policies.yaml",
		"policies:\n  - {name: login, algorithm: sliding_log, limit: 2, window: 1m}\n")
	n := startNode(t, "--policies="+policies, "--resp-port=0").awaitReady()
	ports := strings.NewReplacer("localhost:8080", n.http, "port=6380",
		"port="+n.resp[strings.LastIndex(n.resp, ":")+1:])
	for _, program := range programs {
		for _, want := range []string{`^\(True, 0\.0\)\n$`, `^\(True, 0\.0\)\n$`,
			`^\(False, [1-5]?[0-9]\.[0-9]+\)\n$`} {
			out, err := exec.Command(debianPython, "-c", ports.Replace(program[1])).CombinedOutput()
			expect.True(t, err == nil && regexp.MustCompile(want).Match(out),
				"%v: %s, want %s, of\n%s", err, out, want, program[1])
		}
	}
}
