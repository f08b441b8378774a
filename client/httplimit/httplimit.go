// Package httplimit limits what a net/http server takes, and shapes what an http.Client sends, with package client.
//
//	limited := httplimit.Handler(api, httplimit.Config{
//		Limiter: c.Policy("api"),
//		Key:     httplimit.FirstOf(httplimit.Header("X-Api-Key"), httplimit.ClientIP(nil)),
//	})
//
// It does not promise fairness between requests that wait (Transport), nor to authenticate a caller: the Key identifies it.
package httplimit

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"net/netip"
	"strconv"
	"time"

	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/internal/clientip"
	"github.com/weirlimit/weir/internal/quotaheader"
)

// KeyFunc returns what a request is limited by, 1 to 1024 bytes of UTF-8. Empty means that the request has nothing of the kind.
type KeyFunc func(*http.Request) string

// Config says how requests are limited.
type Config struct {
	// Limiter decides. Required.
	Limiter client.Decider
	// Key returns what a request is limited by; nil stands for ClientIP(nil). A request whose key is empty is answered with
	// status 400, so that nobody passes by leaving something out: FirstOf names what to limit by then.
	Key KeyFunc
	// Cost returns the units that a request takes, at least 1; nil stands for 1.
	Cost func(*http.Request) int64
	// OnError says what happens when there is no decision: the policy is unknown, the key is not acceptable, the Client is closed.
	// The zero value, client.FailOpen, serves the request; client.FailClosed answers 503. That no node can be reached is a
	// decision, by the fail policy of the cluster and the Client.
	OnError client.OnError
	// Refused answers in place of the problem document (RFC 9457) with status 429, or 503 for a decision that failed closed. The
	// header fields are set already. Nil: the problem document.
	Refused func(http.ResponseWriter, *http.Request, client.Decision)
	// Logger gets errors; nil stands for slog.Default().
	Logger *slog.Logger
}

// Handler returns a handler that serves next what the Limiter admits. Admitted and refused answers carry the RateLimit header
// fields (draft-ietf-httpapi-ratelimit-headers-10) and X-RateLimit-…; refused ones Retry-After where waiting helps. A request
// that a leaky_bucket admits waits for its moment first. It panics when cfg has no Limiter.
func Handler(next http.Handler, cfg Config) http.Handler {
	if cfg.Limiter == nil {
		panic("httplimit: Config.Limiter is nil")
	}
	if cfg.Key == nil {
		cfg.Key = ClientIP(nil)
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	return &handler{cfg, next}
}

type handler struct {
	Config
	next http.Handler
}

func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	key := h.Key(r)
	if key == "" {
		writeProblem(w, http.StatusBadRequest, "The request has nothing to limit it by", "send what names the caller, such as its key or token")
		return
	}
	cost := int64(1)
	if h.Cost != nil {
		cost = max(h.Cost(r), 1)
	}
	d, err := h.Limiter.AllowN(r.Context(), key, cost)
	if err != nil {
		if r.Context().Err() != nil {
			return // nobody waits for an answer
		}
		h.Logger.ErrorContext(r.Context(), "rate limit decision failed", "error", err)
		if h.OnError == client.FailClosed {
			w.Header().Set("Retry-After", "1")
			writeProblem(w, http.StatusServiceUnavailable, "The rate limit cannot be asked at the moment", "")
			return
		}
		h.next.ServeHTTP(w, r)
		return
	}
	quotaheader.Set(w.Header(), nil, &d)
	if d.Allowed {
		if d.Delay > 0 && !sleep(r.Context(), d.Delay) {
			return
		}
		h.next.ServeHTTP(w, r)
		return
	}
	quotaheader.SetRetryAfter(w.Header(), &d)
	switch {
	case h.Refused != nil:
		h.Refused(w, r, d)
	case d.FailedClosed:
		writeProblem(w, http.StatusServiceUnavailable, "The rate limit cannot be asked at the moment", "")
	case d.RetryAfter == client.Never:
		writeProblem(w, http.StatusTooManyRequests, "Too many requests", "this request can never pass its limit")
	default:
		writeProblem(w, http.StatusTooManyRequests, "Too many requests", "the limit lets this request pass in "+strconv.FormatInt(quotaheader.RoundUp(d.RetryAfter, time.Second), 10)+" s")
	}
}

// writeProblem writes a problem document (RFC 9457) of the type about:blank.
func writeProblem(w http.ResponseWriter, status int, title, detail string) {
	body, err := json.Marshal(struct {
		Title  string `json:"title"`
		Status int    `json:"status"`
		Detail string `json:"detail,omitempty"`
	}{title, status, detail})
	if err != nil {
		body = nil // two strings and a number always marshal
	}
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(status)
	_, _ = w.Write(body) // the caller may be gone
}

// sleep waits, and reports false when ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// ClientIP limits by the caller's address: that of the connection, or, where that is one of the trusted proxies, the last
// address in X-Forwarded-For that is not. IPv6 callers are limited by their /64.
func ClientIP(trusted []netip.Prefix) KeyFunc {
	r := clientip.Resolver{Trusted: trusted}
	return func(req *http.Request) string { return r.Key(req.RemoteAddr, req.Header) }
}

// Header limits by the value of a header field. Use it for what the server has verified, such as a key that it knows, or
// FirstOf with ClientIP behind it; a caller may send any value.
func Header(name string) KeyFunc {
	return func(r *http.Request) string { return r.Header.Get(name) }
}

// BasicUser limits by the user name of HTTP basic authentication, which another handler has to have verified.
func BasicUser(r *http.Request) string {
	user, _, _ := r.BasicAuth()
	return user
}

// FirstOf limits by the first key that a request has.
func FirstOf(keys ...KeyFunc) KeyFunc {
	return func(r *http.Request) string {
		for _, k := range keys {
			if key := k(r); key != "" {
				return key
			}
		}
		return ""
	}
}

// Transport shapes outgoing requests: each waits until the Limiter admits it, and goes out then. It is safe for concurrent use.
type Transport struct {
	// Limiter admits. Required.
	Limiter client.Waiter
	// Key returns what a request is limited by; nil stands for the host that it goes to.
	Key KeyFunc
	// Base sends the requests; nil stands for http.DefaultTransport.
	Base http.RoundTripper
}

// RoundTrip implements http.RoundTripper. When the wait fails (client.ErrNever, client.ErrDeadline, the request's context) its
// error is returned and nothing is sent.
func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	key := r.URL.Host
	if t.Key != nil {
		key = t.Key(r)
	}
	if _, err := t.Limiter.WaitN(r.Context(), key, 1); err != nil {
		if r.Body != nil {
			err = errors.Join(err, r.Body.Close()) // a RoundTripper always closes it
		}
		return nil, err
	}
	base := t.Base
	if base == nil {
		base = http.DefaultTransport
	}
	return base.RoundTrip(r)
}
