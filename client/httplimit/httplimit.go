// Package httplimit limits the requests that a net/http server takes, and delays those that an http.Client sends, with
// package client.
//
//	limits := httplimit.New(httplimit.Config{
//		Limiter: c.Policy("api"),
//		Key:     httplimit.FirstOf(httplimit.Header("X-Api-Key"), httplimit.ClientIP(nil)),
//	})
//	http.Handle("/", limits.Handler(api))
//
// It does not authenticate callers: Key returns what the request says. Requests that wait (Transport) are not served in
// any order.
package httplimit

import (
	"cmp"
	"encoding/json"
	"errors"
	"net/http"
	"net/netip"
	"strconv"
	"time"

	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/client/middleware"
	"github.com/weirlimit/weir/internal/netaddr"
	"github.com/weirlimit/weir/internal/quotaheader"
)

// KeyFunc returns the key that a request is limited by, in UTF-8. Empty: the request has no such key.
type KeyFunc = func(*http.Request) string

// Config configures a Middleware. A nil Key stands for ClientIP(nil).
type Config = middleware.Config[*http.Request]

// Middleware limits requests. Use New. It is safe for concurrent use.
type Middleware struct {
	// Refused, if set, answers refused requests: with status 429, or 503 for a decision that failed closed. The header
	// fields are set already. Nil: a problem document (RFC 9457). Set it before the Middleware is used.
	Refused func(http.ResponseWriter, *http.Request, client.Decision)
	gate    *middleware.Gate[*http.Request]
}

// New returns a Middleware. It panics if cfg has no Limiter, Choose or Checks, or Checks without All.
func New(cfg Config) *Middleware { return &Middleware{gate: middleware.New(cfg, ClientIP(nil))} }

// Handler returns a handler that passes the requests that are admitted to next. Answers carry the RateLimit header
// fields (draft-ietf-httpapi-ratelimit-headers-10) and X-RateLimit-…, and Weir-Result: admitted, refused, failed_open
// (served without a decision of a node), failed_closed or bad_key. Refusals carry Retry-After if waiting helps. A
// request that a leaky_bucket admits waits for its moment first. One whose context ends before it is admitted is
// answered with status 503. As a method value, Handler is the func(http.Handler) http.Handler that routers take.
func (m *Middleware) Handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { m.serve(w, r, next) })
}

// Counts returns the numbers of requests by result, without those that were not limited. Errors are requests without a
// decision or a key.
func (m *Middleware) Counts() client.Counts { return m.gate.Counts() }

func (m *Middleware) serve(w http.ResponseWriter, r *http.Request, next http.Handler) {
	v, limited := m.gate.Ask(r.Context(), r)
	switch {
	case !limited:
		next.ServeHTTP(w, r)
		return
	case v.Gone: // if the caller is still there, an empty answer with status 200 would say that it was served
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	case v.BadKey != nil:
		w.Header().Set(quotaheader.Result, quotaheader.BadKey)
		writeProblem(w, http.StatusBadRequest, "The request has nothing to limit it by",
			"what names the caller "+v.BadKey.Message)
		return
	}
	d := &v.Decision
	quotaheader.Set(w.Header(), nil, d)
	w.Header().Set(quotaheader.Result, quotaheader.ResultOf(d))
	if d.Allowed {
		next.ServeHTTP(w, r)
		return
	}
	quotaheader.SetRetryAfter(w.Header(), d)
	switch {
	case m.Refused != nil:
		m.Refused(w, r, *d)
	case d.FailedClosed:
		writeProblem(w, http.StatusServiceUnavailable, "The rate limit cannot be asked at the moment", "")
	case d.RetryAfter == client.Never:
		writeProblem(w, http.StatusTooManyRequests, "Too many requests", "this request can never pass its limit")
	default:
		seconds := strconv.FormatInt(quotaheader.RoundUp(d.RetryAfter, time.Second), 10)
		writeProblem(w, http.StatusTooManyRequests, "Too many requests",
			"the limit lets this request pass in "+seconds+" s")
	}
}

// writeProblem writes a problem document (RFC 9457) of type about:blank.
func writeProblem(w http.ResponseWriter, status int, title, detail string) {
	body, err := json.Marshal(struct {
		Title  string `json:"title"`
		Status int    `json:"status"`
		Detail string `json:"detail,omitempty"`
	}{title, status, detail})
	if err != nil {
		body = nil // cannot happen for two strings and a number
	}
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(status)
	_, _ = w.Write(body) // the caller may be gone
}

// ClientIP limits by the caller's address: the address of the connection, or, if that is a trusted proxy, the last
// address in X-Forwarded-For that is no trusted proxy. IPv6 addresses are limited by their /64.
func ClientIP(trusted []netip.Prefix) KeyFunc {
	r := netaddr.Resolver{Trusted: trusted}
	return func(req *http.Request) string { return r.Key(req.RemoteAddr, req.Header) }
}

// Header limits by the value of a header field. A caller may send any value, so use it only for a value that the server
// has verified, such as a key that it knows, or use FirstOf with ClientIP after it.
func Header(name string) KeyFunc {
	return func(r *http.Request) string { return r.Header.Get(name) }
}

// BasicUser limits by the user name of HTTP basic authentication. Another handler must have verified it.
func BasicUser(r *http.Request) string {
	user, _, _ := r.BasicAuth()
	return user
}

// FirstOf limits by the first of the keys that a request has.
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

// Transport delays outgoing requests: each is sent once the Limiter has admitted it. It is safe for concurrent use.
type Transport struct {
	// Limiter admits requests. Required.
	Limiter client.Waiter
	// Key returns what a request is limited by. Nil stands for the host of the request's URL.
	Key KeyFunc
	// Base sends the requests. Nil stands for http.DefaultTransport.
	Base http.RoundTripper
}

// RoundTrip implements http.RoundTripper. If the wait fails (client.ErrNever, client.ErrDeadline, the request's
// context), it returns the error and sends nothing.
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
	return cmp.Or(t.Base, http.DefaultTransport).RoundTrip(r)
}
