package clustertest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"

	"google.golang.org/grpc"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// decision is what the HTTP API answers to a check.
type decision struct {
	Allowed      bool   `json:"allowed"`
	Granted      int64  `json:"granted"`
	Limit        int64  `json:"limit"`
	Remaining    int64  `json:"remaining"`
	RetryAfterMS *int64 `json:"retry_after_ms"`
	Policy       string `json:"policy"`
	Degraded     bool   `json:"degraded"`
	FailedOpen   bool   `json:"failed_open"`
	FailedClosed bool   `json:"failed_closed"`
	Banned       bool   `json:"banned"`
}

// status is what the HTTP API says of the cluster, as far as the tests look at it.
type status struct {
	Ready         bool
	ReadyDetail   string `json:"ready_detail"`
	PoliciesError string `json:"policies_error"`
	Members       []struct {
		Name, State      string
		Partitions, Keys int
		Reachable        bool
		Ownership        struct{ Held, Moving, Awaited, Degraded int }
	}
}

// web asks nodes over HTTP. Its timeout is the tests' own deadline: nothing may hang.
var web = &http.Client{
	Timeout:   30 * time.Second,
	Transport: &http.Transport{MaxIdleConnsPerHost: 200, MaxConnsPerHost: 200},
}

// post sends a body to the HTTP API.
func (p *process) post(path, contentType string, body []byte) (int, http.Header, []byte, error) {
	resp, err := p.web.Post("http://"+p.http+path, contentType, bytes.NewReader(body))
	if err != nil {
		return 0, nil, nil, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	return resp.StatusCode, resp.Header, answer, err
}

// get reads a page of the HTTP API.
func (p *process) get(path string) (code int, page string) {
	p.t.Helper()
	code, text, err := p.fetch(path)
	must.NoError(p.t, err)
	return code, string(text)
}

// check sends a check as JSON. An answer that is neither 200 nor 429 is an error.
func (p *process) check(body string) (decision, error) {
	var d decision
	code, _, answer, err := p.post("/v1/check", "application/json", []byte(body))
	if err != nil {
		return d, err
	}
	if code != http.StatusOK && code != http.StatusTooManyRequests {
		return d, fmt.Errorf("%s: status %d: %s", p.name, code, answer)
	}
	if err := json.Unmarshal(answer, &d); err != nil {
		return d, fmt.Errorf("%s: %w: %s", p.name, err, answer)
	}
	if d.Allowed != (code == http.StatusOK) {
		return d, fmt.Errorf("%s: status %d with allowed %t", p.name, code, d.Allowed)
	}
	return d, nil
}

// peek tells how a key of a policy stands.
func (p *process) peek(policy, key string) decision {
	p.t.Helper()
	code, _, answer, err := p.post("/v1/check", "application/json",
		fmt.Appendf(nil, `{"policy":%q,"key":%q,"cost":0}`, policy, key))
	var d decision
	if err == nil {
		err = json.Unmarshal(answer, &d)
	}
	must.True(p.t, err == nil && code == http.StatusOK,
		"peek at %s/%s: status %d, %v: %s", policy, key, code, err, answer)
	return d
}

// overview asks a node, which may be away, for its status.
func (p *process) overview() (st status, err error) {
	code, page, err := p.fetch("/v1/status")
	if err == nil {
		err = json.Unmarshal(page, &st)
	}
	if err != nil || code != http.StatusOK {
		err = fmt.Errorf("%s: /v1/status: %d, %v: %s", p.name, code, err, page)
	}
	return st, err
}

func (p *process) status() status {
	p.t.Helper()
	return must.Value(p.overview())(p.t)
}

// connect opens a gRPC connection to the node's port for callers.
func (p *process) connect() *grpc.ClientConn { return testkit.Dial(p.t, p.grpc) }

// dial is connect for those who only want to ask the limiter.
func (p *process) dial() weirv1.LimiterClient { return weirv1.NewLimiterClient(p.connect()) }
