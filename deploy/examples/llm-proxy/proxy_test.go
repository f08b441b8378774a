package main

import (
	"bufio"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/client/local"
	"github.com/weirlimit/weir/policy"
)

const (
	budget = 1000
	chunk  = 5
)

// start serves a proxy before a fake upstream.
func start(t *testing.T, step int64) (*httptest.Server, *client.Limiter) {
	t.Helper()
	set, err := policy.Parse("p.yaml", []byte(`policies:
  - {name: tokens, algorithm: fixed_window, window: 1h, limit: 1000, prices: {input: 1, output: 1}}
`))
	if err != nil {
		t.Fatal(err)
	}
	c := local.New(set)
	t.Cleanup(func() { c.Close() })
	to, err := url.Parse("http://fake")
	if err != nil {
		t.Fatal(err)
	}
	b := c.Policy("tokens")
	server := httptest.NewServer(&proxy{upstream: to, transport: fakeTransport{chunk: chunk}, budget: b, step: step,
		log: slog.New(slog.DiscardHandler)})
	t.Cleanup(server.Close)
	return server, b
}

// answer is what a caller got.
type answer struct {
	status int
	output int64 // tokens
	cut    bool  // off, for want of budget
	done   bool  // the stream has come to its end
}

func ask(t *testing.T, server *httptest.Server, body string) (a answer) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL+"/v1/chat/completions",
		strings.NewReader(body))
	if err != nil {
		t.Error(err)
		return a
	}
	req.Header.Set("Authorization", "Bearer sk-somebody")
	resp, err := server.Client().Do(req)
	if err != nil {
		t.Error(err)
		return a
	}
	defer resp.Body.Close()
	a.status = resp.StatusCode
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		if data == "[DONE]" {
			a.done = true
			continue
		}
		var e struct {
			event
			Error *struct{ Type string }
		}
		if err := json.Unmarshal([]byte(data), &e); err != nil {
			t.Errorf("%s: %v", data, err)
		}
		a.cut = a.cut || e.Error != nil && e.Error.Type == "insufficient_quota"
		for _, choice := range e.Choices {
			a.output += tokens(written(choice.Delta))
		}
	}
	return a
}

// TestBudgetIsNotOverspent: 100 parallel calls, which want ten times the budget, get no more than it, and what is
// committed exceeds it by one chunk for each call at most.
func TestBudgetIsNotOverspent(t *testing.T) {
	for _, step := range []int64{1, 7, 64} {
		server, b := start(t, step)
		body := `{"model":"m","stream":true,"max_tokens":100,"messages":[{"role":"user","content":"hello"}]}`
		input := tokens(len(`[{"role":"user","content":"hello"}]`))
		var relayed, began, cut, refused atomic.Int64
		var callers sync.WaitGroup
		for range 100 {
			callers.Go(func() {
				a := ask(t, server, body)
				switch {
				case a.status == http.StatusTooManyRequests:
					refused.Add(1)
				case a.status != http.StatusOK || !a.done:
					t.Errorf("%+v", a)
				default:
					began.Add(1)
					relayed.Add(input + a.output)
					if a.cut {
						cut.Add(1)
					} else if a.output != 100 {
						t.Errorf("%d tokens of a whole answer", a.output)
					}
				}
			})
		}
		callers.Wait()
		server.Close() // and with it every commit
		if n := relayed.Load(); n > budget || n == 0 {
			t.Errorf("step %d: %d tokens went through a budget of %d", step, n, budget)
		}
		if cut.Load()+refused.Load() == 0 {
			t.Errorf("step %d: nobody was held to the budget", step)
		}
		// Charge in units of one to see how much is in use beyond the budget: a limit raised by so much would admit one
		// more.
		d, err := b.Charge(t.Context(), key(), 1)
		if err != nil {
			t.Fatal(err)
		}
		most := relayed.Load() + cut.Load()*chunk
		if spent := spent(t, b, d); spent < relayed.Load() || spent > most || spent > budget+began.Load()*chunk {
			t.Errorf("step %d: %d spent; %d relayed to %d calls, of which %d were cut off", step, spent, relayed.Load(),
				began.Load(), cut.Load())
		}
	}
}

// key is that of ask's caller.
func key() string { return keyOf("sk-somebody") }

// spent is what is in use besides the unit that d has charged.
func spent(t *testing.T, b *client.Limiter, d client.Decision) int64 {
	t.Helper()
	if d.Allowed {
		return d.Limit - d.Remaining - 1
	}
	// Beyond the limit the answer does not say by how much: give back until one unit fits.
	back := int64(0)
	for {
		n, err := b.Refund(t.Context(), key(), 1)
		if err != nil || n != 1 {
			t.Fatal(n, err)
		}
		back++
		peek, err := b.Peek(t.Context(), key())
		if err != nil {
			t.Fatal(err)
		}
		if peek.Allowed {
			return peek.Limit - peek.Remaining + back - 1
		}
	}
}

func TestAnswers(t *testing.T) {
	server, b := start(t, 64)
	if a := ask(t, server, `{"model":"m","stream":true,"max_tokens":30,"messages":["hello"]}`); a.status != 200 ||
		a.output != 30 || a.cut || !a.done {
		t.Errorf("%+v", a)
	}
	server.Close()
	if d, err := b.Peek(t.Context(), key()); err != nil || d.Remaining != budget-30-tokens(len(`["hello"]`)) {
		t.Errorf("%+v, %v", d, err)
	}
	server, _ = start(t, 64)
	for body, status := range map[string]int{
		`{"model":"m","messages":[]}`: 400,
		`{`:                           400,
		`{"stream":true,"messages":"` + long(5000) + `"}`:            429, // the input alone is more than the budget
		`{"stream":true,"messages":"` + long(maxBody+1) + `"}`:       413,
		`{"stream":true,"model":"` + long(1000) + `","messages":[]}`: 200,
	} {
		if a := ask(t, server, body); a.status != status {
			t.Errorf("%.40s…: %d, want %d", body, a.status, status)
		}
	}
	resp, err := server.Client().Get(server.URL + "/v1/models")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != 404 {
		t.Errorf("another path: %d", resp.StatusCode)
	}
}

func long(n int) string { return strings.Repeat("x", n) }

// TestAllTextCounts: what an upstream streams besides content takes of the budget, too.
func TestAllTextCounts(t *testing.T) {
	for delta, want := range map[string]int64{
		`{"role":"assistant","content":"12345678"}`: 2, `{"content":null,"reasoning_content":"12345678"}`: 2,
		`{"refusal":"12345678"}`: 2,
		`{"tool_calls":[{"index":0,"id":"call_1","type":"function","function":{"name":"1234","arguments":"12345678"}}]}`: 3, `{}`: 0, `null`: 0,
	} {
		var e event
		if err := json.Unmarshal([]byte(`{"choices":[{"delta":`+delta+`}]}`), &e); err != nil {
			t.Fatal(err)
		}
		if n := tokens(written(e.Choices[0].Delta)); n != want {
			t.Errorf("%s: %d tokens, want %d", delta, n, want)
		}
	}
}
