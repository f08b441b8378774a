package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/weirlimit/weir/client"
)

const (
	maxBody  = 4 << 20          // bytes of a request
	maxEvent = 1 << 20          // bytes of one event of a stream
	longest  = 10 * time.Minute // of a call: its reservation waits a little longer
)

// proxy relays streaming chat completions within a budget.
type proxy struct {
	upstream  *url.URL
	transport http.RoundTripper
	budget    *client.Limiter
	step      int64 // tokens by which a reservation is extended
	log       *slog.Logger
}

// completion is what the proxy reads of a request. All else is passed on as it came.
type completion struct {
	Model    string          `json:"model"`
	Stream   bool            `json:"stream"`
	Messages json.RawMessage `json:"messages"`
}

// event is what it reads of an event of the answer.
type event struct {
	Choices []struct {
		Delta any `json:"delta"`
	} `json:"choices"`
	Usage *struct {
		Prompt     int64 `json:"prompt_tokens"`
		Completion int64 `json:"completion_tokens"`
	} `json:"usage"`
}

// written is how many bytes of text a delta has, whatever they are part of: content, reasoning, a refusal, or the
// arguments of tools.
func written(delta any) (n int) {
	switch v := delta.(type) {
	case string:
		n = len(v)
	case []any:
		for _, part := range v {
			n += written(part)
		}
	case map[string]any:
		for name, part := range v {
			if name != "role" && name != "type" && name != "id" {
				n += written(part)
			}
		}
	}
	return n
}

// tokens is a rough count: four bytes a token.
func tokens(n int) int64 { return int64((n + 3) / 4) }

func (p *proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost || r.URL.Path != "/v1/chat/completions" {
		fail(w, http.StatusNotFound, "invalid_request_error", "only POST /v1/chat/completions is here")
		return
	}
	secret, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !ok || secret == "" {
		fail(w, http.StatusUnauthorized, "invalid_request_error", "an API key is missing")
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		fail(w, http.StatusRequestEntityTooLarge, "invalid_request_error", "the body cannot be read, or is too large")
		return
	}
	body, ask, err := prepare(body)
	if err != nil {
		fail(w, http.StatusBadRequest, "invalid_request_error", err.Error())
		return
	}
	c := call{proxy: p, input: tokens(len(ask.Messages)), reserved: p.step}
	reservation, d, err := p.budget.ReserveWork(r.Context(), keyOf(secret), client.Work{
		Usage: client.Usage{"input": c.input, "output": p.step}, Class: clip(ask.Model), TTL: longest + time.Minute,
	})
	switch {
	case err != nil:
		p.log.Error("reservation failed", "error", err)
		fail(w, http.StatusServiceUnavailable, "server_error", "the budget cannot be asked")
		return
	case !d.Allowed:
		if d.RetryAfter > 0 {
			w.Header().Set("Retry-After", strconv.FormatInt(int64((d.RetryAfter+time.Second-1)/time.Second), 10))
		}
		fail(w, http.StatusTooManyRequests, "insufficient_quota", "the budget of tokens is used up")
		return
	}
	c.reservation = reservation
	defer c.commit()
	ctx, cancel := context.WithTimeout(r.Context(), longest) // also ends the upstream's work when the stream is cut off
	defer cancel()
	c.relay(ctx, w, r, body)
}

// keyOf is the key that is limited. It is not the secret, since keys are in lists that others may see.
func keyOf(secret string) string {
	sum := sha256.Sum256([]byte(secret))
	return hex.EncodeToString(sum[:16])
}

// prepare reads a request, and has its answer end with what was used.
func prepare(body []byte) ([]byte, completion, error) {
	var ask completion
	if err := json.Unmarshal(body, &ask); err != nil {
		return nil, ask, errors.New("the body is not a chat completion")
	}
	if !ask.Stream {
		return nil, ask, errors.New("stream must be true")
	}
	all := make(map[string]json.RawMessage)
	if err := json.Unmarshal(body, &all); err != nil {
		return nil, ask, err
	}
	all["stream_options"] = json.RawMessage(`{"include_usage":true}`)
	body, err := json.Marshal(all)
	return body, ask, err
}

// clip is a name of a bounded length.
func clip(s string) string { return strings.ToValidUTF8(s[:min(len(s), 128)], "") }

// call is one call in flight.
type call struct {
	*proxy
	reservation *client.Reservation
	input       int64 // tokens of the request
	output      int64 // of the answer, so far
	reserved    int64 // of output
}

// commit says what the call has used.
func (c *call) commit() {
	got, err := c.reservation.CommitUsage(client.Usage{"input": c.input, "output": c.output})
	if err != nil {
		c.log.Error("commit failed", "error", err) // all that was reserved stays charged
	} else if got.Excess > 0 {
		c.log.Info("call exceeded its reservation", "units", got.Excess)
	}
}

// relay passes the request on, and the answer back, event by event.
func (c *call) relay(ctx context.Context, w http.ResponseWriter, r *http.Request, body []byte) {
	to := *c.upstream
	to.Path = strings.TrimSuffix(to.Path, "/") + r.URL.Path
	out, err := http.NewRequestWithContext(ctx, http.MethodPost, to.String(), bytes.NewReader(body))
	if err != nil {
		fail(w, http.StatusBadGateway, "server_error", "the upstream cannot be asked")
		return
	}
	out.Header.Set("Authorization", r.Header.Get("Authorization"))
	out.Header.Set("Content-Type", "application/json")
	resp, err := c.transport.RoundTrip(out)
	if err != nil {
		c.input = 0 // nothing was used
		fail(w, http.StatusBadGateway, "server_error", "the upstream cannot be reached")
		return
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		c.input = 0
		w.Header().Set("Content-Type", resp.Header.Get("Content-Type"))
		w.WriteHeader(resp.StatusCode)
		_, _ = io.Copy(w, io.LimitReader(resp.Body, maxEvent)) // the caller may have gone
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.WriteHeader(http.StatusOK)
	flush := http.NewResponseController(w)
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, maxEvent)
	for lines.Scan() {
		line := lines.Bytes()
		if data, ok := bytes.CutPrefix(line, []byte("data: ")); ok && !c.within(ctx, data) {
			fmt.Fprint(w, "data: {\"error\":{\"type\":\"insufficient_quota\",\"message\":\"the budget of tokens is used up\"}}\n\ndata: [DONE]\n\n")
			_ = flush.Flush()
			return
		}
		if _, err := fmt.Fprintf(w, "%s\n", line); err != nil {
			return // the caller has gone, and ctx ends the upstream's work
		}
		if len(line) == 0 {
			_ = flush.Flush() // an event is whole
		}
	}
	if err := lines.Err(); err != nil && ctx.Err() == nil {
		c.log.Error("upstream's answer broke off", "error", err)
	}
}

// within counts an event, and reports whether it is within what is reserved or can be reserved besides. What the
// upstream says of its use counts in place of the proxy's own count.
func (c *call) within(ctx context.Context, data []byte) bool {
	var e event
	if json.Unmarshal(data, &e) != nil {
		return true // such as [DONE]
	}
	for _, choice := range e.Choices {
		c.output += tokens(written(choice.Delta))
	}
	if e.Usage != nil {
		c.input, c.output = e.Usage.Prompt, e.Usage.Completion
		return true // it is over: commit charges it
	}
	for _, more := range []int64{c.step, c.output - c.reserved} {
		if c.output <= c.reserved {
			return true
		}
		more = max(more, c.output-c.reserved)
		d, err := c.reservation.ExtendUsage(ctx, client.Usage{"output": more}, 0)
		if err != nil {
			c.log.Error("extension failed", "error", err)
			return false
		}
		if d.Allowed {
			c.reserved += more
		}
	}
	return c.output <= c.reserved
}

// fail answers an error as the API words them.
func fail(w http.ResponseWriter, status int, kind, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	// the caller may have gone
	_ = json.NewEncoder(w).Encode(map[string]any{"error": map[string]string{"type": kind, "message": message}})
}
