package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// fakeTransport is an upstream in this process: it answers max_tokens tokens (64 when that is missing), chunk at a
// time.
type fakeTransport struct {
	chunk int64         // tokens of one event
	pause time.Duration // between events
}

// RoundTrip implements http.RoundTripper.
func (f fakeTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	ask := struct {
		MaxTokens int64           `json:"max_tokens"`
		Messages  json.RawMessage `json:"messages"`
	}{MaxTokens: 64}
	if err := json.NewDecoder(r.Body).Decode(&ask); err != nil {
		return nil, err
	}
	body, out := io.Pipe()
	go func() {
		left := ask.MaxTokens
		for left > 0 && r.Context().Err() == nil {
			n := min(left, f.chunk)
			left -= n
			// Four bytes a token, as the proxy counts.
			if _, err := fmt.Fprintf(out, "data: {\"choices\":[{\"delta\":{\"content\":%q}}]}\n\n",
				strings.Repeat("word", int(n))); err != nil {
				return
			}
			select {
			case <-time.After(f.pause):
			case <-r.Context().Done():
			}
		}
		fmt.Fprintf(out, "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":%d,\"completion_tokens\":%d}}\n\ndata: [DONE]\n\n",
			tokens(len(ask.Messages)), ask.MaxTokens-left)
		_ = out.CloseWithError(r.Context().Err())
	}()
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"text/event-stream"}},
		Body: body, Request: r}, nil
}
