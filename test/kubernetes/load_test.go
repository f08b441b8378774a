package kubernetestest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/test/must"
)

// A key of a policy whose name begins with "few" is asked for about twice as often as its limit lets through, and each
// of them for a while: what is admitted beyond the limit is forgotten, and what is refused below it was counted twice.
// Nobody reaches the limits of the other policies.
const (
	few     = 20
	fewAge  = 20 * time.Second // for how long a key of few is asked for
	hot     = "hot"            // of one key, that clients borrow
	window  = time.Hour
	workers = 64
)

var (
	modes = []string{
		"durability: none", "durability: async", "durability: escrow", "durability: sync",
		"durability: escrow, consistency: strict", "durability: sync, consistency: strict",
	}
	modeNames = []string{"none", "async", "escrow", "sync", "strict-escrow", "strict-sync"}
)

// policies writes the policy file.
func policies() string {
	var b strings.Builder
	b.WriteString("policies:\n")
	for i, mode := range modes {
		fmt.Fprintf(&b, "  - {name: room-%s, algorithm: sliding_window, limit: 100000, window: 1m, %s, on_error: closed}\n", modeNames[i], mode)
		fmt.Fprintf(&b, "  - {name: few-%s, algorithm: sliding_log, limit: %d, window: %v, %s, on_error: closed}\n",
			modeNames[i], few, window, mode)
	}
	fmt.Fprintf(&b, "  - {name: %s, algorithm: token_bucket, limit: 1000000, window: 1s, on_error: closed}\n", hot)
	return b.String()
}

// answer is how a check ended.
type answer string

const (
	admitted answer = "admitted"
	refused  answer = "refused"
	// closed: the policy's on_error, or the client, which no node answered.
	closed answer = "failed_closed"
)

// record is one check.
type record struct {
	client, policy, key string
	at, wait            time.Duration // since the load began
	answer              answer        // or what went wrong
	step                int
}

// step is a part of the test, until the next one begins.
type step struct {
	name  string
	begun time.Duration
}

// asker is a way to ask: the answer, or an error.
type asker struct {
	name  string
	share int // of 10 checks
	ask   func(ctx context.Context, policy, key string) (answer, error)
}

// load asks, all the while.
type load struct {
	t      *testing.T
	start  time.Time
	askers []asker
	quit   chan struct{}
	work   sync.WaitGroup

	mu      sync.Mutex
	records []record
	steps   []step
}

func (l *load) now() time.Duration { return time.Since(l.start) }

// startLoad begins to ask: by the Go client, without and with loans, which finds the nodes by the headless Service's
// name; and over HTTP by the Service, with connections that stay.
func startLoad(t *testing.T, c *cluster) *load {
	t.Helper()
	l := &load{t: t, start: time.Now(), quit: make(chan struct{})}
	target := fmt.Sprintf("dns://%s/%s.%s.svc.cluster.local:8081", c.resolver(), headless, c.namespace)
	for _, o := range []struct {
		name    string
		share   int
		options []client.Option
	}{
		{"client", 6, []client.Option{client.WithoutLoans(), client.WithoutMemory()}},
		{"client with loans", 2, nil},
	} {
		conn, err := client.Dial(t.Context(), target, append(o.options, client.WithOnError(client.FailClosed))...)
		must.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		must.NoError(t, conn.Ready(ctx),
			"no pod answers at %s: this must run where pods are reached, such as on a node", target)
		l.askers = append(l.askers,
			asker{o.name, o.share, func(ctx context.Context, policy, key string) (answer, error) {
				d, err := conn.Policy(policy).Allow(ctx, key)
				return outcome(d.Allowed, d.FailedClosed), err
			}})
	}
	url := "http://" + c.service("8080")
	// until this host has heard of it, its address may be somebody else's
	c.await("the Service leads to a pod", func() bool {
		h := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Second}
		resp, err := h.Get(url + "/readyz")
		if err == nil {
			_ = resp.Body.Close()
		}
		return err == nil && resp.StatusCode == http.StatusOK
	})
	l.askers = append(l.askers, asker{"http", 2, overHTTP(url + "/v1/check")})
	l.begin("start")
	l.work.Go(func() { l.borrow(&l.askers[1]) })
	turns := make(chan struct{})
	l.work.Go(func() { l.pace(turns) })
	for range workers {
		l.work.Go(func() {
			for range turns {
				l.one()
			}
		})
	}
	return l
}

func outcome(allowed, failedClosed bool) answer {
	switch {
	case allowed:
		return admitted
	case failedClosed:
		return closed
	}
	return refused
}

// overHTTP asks at a URL.
func overHTTP(url string) func(ctx context.Context, policy, key string) (answer, error) {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxIdleConnsPerHost = workers
	h := &http.Client{Transport: transport, Timeout: 2 * time.Second}
	return func(ctx context.Context, policy, key string) (answer, error) {
		body, err := json.Marshal(map[string]string{"policy": policy, "key": key})
		if err != nil {
			return "", err
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
		if err != nil {
			return "", err
		}
		req.Header.Set("Content-Type", "application/json")
		resp, err := h.Do(req)
		if err != nil {
			return "", err
		}
		defer resp.Body.Close()
		var d struct {
			Allowed      bool `json:"allowed"`
			FailedClosed bool `json:"failed_closed"`
		}
		if err := json.NewDecoder(resp.Body).Decode(&d); err != nil {
			return "", fmt.Errorf("%s: %w", resp.Status, err)
		}
		switch {
		case resp.StatusCode == http.StatusOK, resp.StatusCode == http.StatusTooManyRequests, d.FailedClosed:
			return outcome(d.Allowed, d.FailedClosed), nil
		}
		return "", fmt.Errorf("answered %s", resp.Status)
	}
}

// pace lets checks begin at the rate, until the load stops.
func (l *load) pace(turns chan<- struct{}) {
	defer close(turns)
	every := time.Second / time.Duration(*rate)
	for next := l.now(); ; next += every {
		t := time.NewTimer(next - l.now())
		select {
		case <-t.C:
		case <-l.quit:
			t.Stop()
			return
		}
		select {
		case turns <- struct{}{}:
		case <-l.quit:
			return
		}
	}
}

// one asks once.
func (l *load) one() {
	turn := rand.IntN(10)
	var a *asker
	for i := range l.askers {
		if a = &l.askers[i]; turn < a.share {
			break
		}
		turn -= a.share
	}
	mode := modeNames[rand.IntN(len(modeNames))]
	policy, key := "room-"+mode, fmt.Sprint("key-", rand.IntN(300))
	if rand.IntN(10) < 2 { // some keys at a time, each for a while
		perSecond := float64(*rate) * 2 / 10 / float64(len(modes)) / (2 * few)
		newest := int(l.now().Seconds() * perSecond)
		policy, key = "few-"+mode, fmt.Sprint("key-", max(0, newest-rand.IntN(int(fewAge.Seconds()*perSecond)+1)))
	}
	l.check(a, policy, key)
}

// borrow has a client ask about one key so often that it borrows.
func (l *load) borrow(a *asker) {
	tick := time.NewTicker(4 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			l.check(a, hot, "key")
		case <-l.quit:
			return
		}
	}
}

// check asks and records the answer.
func (l *load) check(a *asker, policy, key string) {
	r := record{client: a.name, policy: policy, key: key, at: l.now()}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	got, err := a.ask(ctx, policy, key)
	r.wait = l.now() - r.at
	if r.answer = got; err != nil {
		r.answer = answer(err.Error())
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.records = append(l.records, r)
}

// begin ends a step and begins another one.
func (l *load) begin(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.steps = append(l.steps, step{name, l.now()})
}

// wait goes on asking for so long.
func (l *load) wait(d time.Duration) {
	select {
	case <-time.After(d):
	case <-l.t.Context().Done():
	}
}

// stop ends the load.
func (l *load) stop() {
	close(l.quit)
	l.work.Wait()
	slices.SortFunc(l.records, func(a, b record) int { return int(a.at - b.at) })
	for i := range l.records {
		r := &l.records[i]
		for r.step+1 < len(l.steps) && l.steps[r.step+1].begun <= r.at {
			r.step++
		}
	}
}

// judge prints what came of each step, and fails the test for what must not be.
func (l *load) judge() {
	l.t.Helper()
	for i, s := range l.steps {
		var waits []time.Duration
		bad := make(map[string]int)
		var slow []*record
		for j := range l.records {
			r := &l.records[j]
			if r.step != i {
				continue
			}
			waits = append(waits, r.wait)
			needless := r.answer == refused && !strings.HasPrefix(r.policy, "few-")
			if needless || r.answer != admitted && r.answer != refused {
				bad[fmt.Sprintf("%s, %s: %s", r.client, r.policy, r.answer)]++
			}
			if r.wait > 50*time.Millisecond {
				slow = append(slow, r)
			}
		}
		if len(waits) == 0 {
			continue
		}
		slices.Sort(waits)
		at := func(q float64) time.Duration {
			return waits[min(len(waits)-1, int(q*float64(len(waits))))].Round(10 * time.Microsecond)
		}
		slices.SortFunc(slow, func(a, b *record) int { return int(b.wait - a.wait) })
		l.t.Logf("%-16s %6d checks; waits p50 %v, p99 %v, p99.9 %v, longest %v; %d above 50 ms",
			s.name, len(waits), at(0.5), at(0.99), at(0.999), at(1), len(slow))
		for _, r := range slow[:min(5, len(slow))] {
			l.t.Logf("    waited %v at %v: %s, %s %s: %s", r.wait, r.at, r.client, r.policy, r.key, r.answer)
		}
		for what, n := range bad {
			l.t.Errorf("%s: %d times: %s", s.name, n, what)
		}
		if *longest > 0 && s.name != "start" && s.name != "nothing" && at(1) > *longest {
			l.t.Errorf("%s: a check waited %v", s.name, at(1))
		}
	}
	l.judgeFew()
}

// judgeFew holds the keys of small limits to them: never more admitted, and nothing refused before as many were.
func (l *load) judgeFew() {
	type counted struct{ admitted, open, unknown int }
	type event struct {
		at    time.Duration
		begin bool
		r     *record
	}
	var events []event
	for i := range l.records {
		if r := &l.records[i]; strings.HasPrefix(r.policy, "few-") {
			events = append(events, event{r.at, true, r}, event{r.at + r.wait, false, r})
		}
	}
	slices.SortFunc(events, func(a, b event) int { return int(a.at - b.at) })
	keys := make(map[string]*counted)
	beyond, needless, full := 0, 0, 0
	for _, e := range events {
		name := e.r.policy + " " + e.r.key
		k := keys[name]
		if k == nil {
			k = &counted{}
			keys[name] = k
		}
		if e.begin {
			k.open++
			continue
		}
		k.open--
		switch e.r.answer {
		case admitted:
			if k.admitted++; k.admitted > few {
				beyond++
				l.t.Errorf("%s: %d admitted of %d, at %.3f s", name, k.admitted, few, e.at.Seconds())
			}
		case refused:
			if k.admitted+k.open+k.unknown < few {
				needless++
				l.t.Errorf("%s: refused at %.3f s after %d of %d", name, e.at.Seconds(), k.admitted, few)
			}
		default:
			k.unknown++ // it may have been charged
		}
	}
	for _, k := range keys {
		if k.admitted == few {
			full++
		}
	}
	l.t.Logf("%d keys of small limits, %d used up: %d admitted beyond the limit, %d refused below it", len(keys), full,
		beyond, needless)
}
