// Package httpapi is Weir's HTTP API: JSON over HTTP for programs, and some GETs for operators and their tools.
//
// It converts requests to calls of a [limit.Service] and answers to responses. It keeps no state, starts no goroutine,
// reads no clock and decides nothing. openapi.yaml specifies requests and answers, and is served at /openapi.yaml.
// PROBLEMS.md explains the problem documents.
//
// The path of a request: New's handler checks host and path; authorized asks Config.Authorize; the route's handler
// reads the body (decode, form), calls the Service, and writes a decision, another answer or a problem. operation and
// queried make most of these handlers.
//
// Input is read strictly, before the Service is called. Unknown, duplicate and null fields, data after the JSON value,
// invalid UTF-8, fractions in place of whole numbers and numbers beyond 64 bits are rejected with a 400 that names the
// field. Nothing is charged for such a request.
//
// The package does not promise to know the caller (Config.Authorize does), encryption or CORS. It does not promise that
// a caller who disconnects is not charged: its context is cancelled, but the owner may have decided before; a caller
// that sends a request_id can repeat the request. Its headers RateLimit, RateLimit-Policy and X-RateLimit-* are spelled
// as their specifications do and not in Go's canonical form: clients read them alike, but http.Header.Get on the
// server's map does not find them.
package httpapi

import (
	"bytes"
	"context"
	"fmt"
	"html"
	"log/slog"
	"net"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/internal/timezone"
	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// Config is what the API needs. Every field without a stated default is required.
type Config struct {
	// Service decides, and carries out the other operations.
	Service limit.Service
	// Status describes the cluster for GET /v1/status.
	Status func(context.Context) *weirv1.StatusResponse
	// Ready says whether this node should get traffic. detail says why not, or what else an operator should know. It is
	// shown with either answer, to callers with auth.RoleRead.
	Ready func() (ready bool, detail string)
	// Policies returns the policies that the node has loaded, for GET /v1/policies.
	Policies func() PolicyListing
	// TopKeys returns the most used keys that the caller may see. Describe describes the state of one key. Their errors
	// are *limit.Error.
	TopKeys  func(context.Context, *weirv1.TopKeysRequest) (*weirv1.TopKeysResponse, error)
	Describe func(context.Context, *limit.Target) (*limit.KeyState, error)
	// Overrides lists and changes overrides.
	Overrides Overrides
	// Metrics answers GET /metrics.
	Metrics http.Handler
	// Foreign are the routes of other front ends that openapi.yaml describes, Routes other ones, which it does not
	// describe.
	Foreign []Foreign
	Routes  []Route
	// Console is the path of the console, for a link in the index; empty: no console.
	Console string
	// Authorize returns the context for answering a request that needs a role. An *auth.Denial is answered 401 or 403.
	// It is not called for routes of auth.RoleOpen. Nil: every caller may do everything.
	Authorize func(r *http.Request, role auth.Role) (context.Context, *auth.Denial)
	// HasRole says whether the caller of an open route has a role. Nil: every caller has every role.
	HasRole func(r *http.Request, role auth.Role) bool
	// Begin counts a request over HTTP/2, whose connection may have many, until end is called. A request that is not ok
	// is answered 503 without a body: there is no memory for it. Nil: no request is counted.
	Begin func(r *http.Request) (end func(), ok bool)
	// Host says whether the name or address in a request's Host header, without the port, is one of this node's. Any
	// request with another one is answered 421. Nil: every name is accepted.
	Host func(name string) bool
	// NoInline rejects inline limits.
	NoInline bool
	// ForwardAuth is for GET /v1/forward-auth.
	ForwardAuth ForwardAuth
	// Logger gets errors for answers with status 500 and, at level debug, other problems and responses that could not
	// be written. Entries have the request id and never a key.
	Logger *slog.Logger
	// Problem is called with the status of each answer that is a problem document.
	Problem func(status int)
	// MaxBody bounds a request's body, in bytes.
	MaxBody int64
	// Requests bounds the bytes that requests take from decoding until they are answered. Small requests are not
	// counted. Nil: no bound.
	Requests *admission.Gate
	// Buffers counts the bytes of bodies that are being read, and the bytes that requests keep while their answers are
	// being written.
	Buffers Buffers
}

// Route is an endpoint. The API authorizes its callers, and answers those without Role.
type Route struct {
	Method, Path string
	Role         auth.Role // that callers need
	Handler      http.HandlerFunc
}

// Buffers counts bytes that requests hold while they wait for the network. It is safe for concurrent use.
type Buffers interface {
	Hold(bytes int64)
	Release(bytes int64)
}

// api is what all requests share. It is safe for concurrent use.
type api struct {
	Config
	exchanges sync.Pool  // of *exchange
	scrape    sync.Mutex // held while a page of metrics is made
	zones     timezone.Cache
}

// exchange is one request and its answer. It is reused with its memory.
type exchange struct {
	*api
	w     http.ResponseWriter
	r     *http.Request
	in    bytes.Buffer
	out   []byte
	check checkBody
	asks  [1]limit.Check

	held, taken int64 // bytes counted by Buffers and by Requests
}

// page is an answer that is not written yet.
type page struct {
	http.ResponseWriter
	status int
	body   bytes.Buffer
}

// WriteHeader implements http.ResponseWriter.
func (p *page) WriteHeader(status int) { p.status = status }

// Write implements http.ResponseWriter.
func (p *page) Write(b []byte) (int, error) { return p.body.Write(b) }

// metrics answers with a page that is complete before it is written: what it is made of takes ten times its memory.
func (x *exchange) metrics() {
	p := &page{ResponseWriter: x.w, status: http.StatusOK}
	x.scrape.Lock()
	x.Metrics.ServeHTTP(p, x.r)
	x.scrape.Unlock()
	x.write(p.status, p.body.Bytes())
}

// keepBuffer is the size in bytes up to which a buffer is kept for another exchange.
const keepBuffer = 64 << 10

// handler returns a handler that has f answer.
func (a *api) handler(f func(*exchange)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		x, ok := a.exchanges.Get().(*exchange)
		if !ok {
			x = &exchange{api: a}
		}
		x.w, x.r = w, r
		defer x.end()
		f(x)
	}
}

func (x *exchange) end() {
	x.Requests.Leave(x.taken)
	x.keep(-x.held)
	x.taken, x.w, x.r = 0, nil, nil
	if x.in.Cap() <= keepBuffer && cap(x.out) <= keepBuffer {
		x.exchanges.Put(x)
	}
}

// routes returns all routes. Those of forward-auth accept any method, because a gateway uses the method of the request
// that it asks about.
func (a *api) routes() []Route {
	list := slices.Concat(a.leases(), a.reservations(), a.adjustments(), []Route{
		{"POST", "/v1/check", auth.RoleCheck, a.handler((*exchange).checkOne)},
		{"POST", "/v1/checks", auth.RoleCheck, a.handler((*exchange).checkAll)},
		{"GET", forwardAuthPath, auth.RoleCheck, a.handler((*exchange).forwardAuth)},
		{"GET", "/v1/policies", auth.RoleRead, a.handler((*exchange).policies)},
		{"GET", "/v1/status", auth.RoleRead, a.handler((*exchange).status)},
		{"GET", "/v1/overrides", auth.RoleOverrides, queried(a, listOf, a.Overrides.List,
			func(_ *weirv1.ListOverridesRequest, list *weirv1.ListOverridesResponse) any {
				return overridesBodyOf(list)
			})},
		{"PUT", "/v1/overrides", auth.RoleOverrides,
			operation(a, func(_ *form, b *overrideBody) *weirv1.SetOverrideRequest {
				return &weirv1.SetOverrideRequest{Override: &weirv1.Override{Policy: b.Policy, Key: b.Key,
					Prefix:   b.Prefix,
					Settings: string(b.Settings)}}
			}, a.Overrides.Set, inJSON(changeBodyOf))},
		{"DELETE", "/v1/overrides", auth.RoleOverrides,
			queried(a, func(raw string) (*weirv1.DeleteOverrideRequest, *problem) {
				query, p := queryOf(raw, "policy", "key", "prefix")
				return &weirv1.DeleteOverrideRequest{Policy: query["policy"], Key: query["key"],
					Prefix: query["prefix"]}, p
			}, a.Overrides.Delete, func(_ *weirv1.DeleteOverrideRequest, change *weirv1.OverrideChange) any { return changeBodyOf(change) })},
		{"GET", "/v1/keys/top", auth.RoleKeys,
			queried(a, topKeysOf, a.TopKeys, func(ask *weirv1.TopKeysRequest, top *weirv1.TopKeysResponse) any {
				return topKeysBodyOf(ask.Order, top)
			})},
		{"POST", "/v1/keys/describe", auth.RoleKeys, operation(a, (*form).target,
			func(ctx context.Context, t limit.Target) (*limit.KeyState, error) {
				return a.Describe(ctx, &t)
			}, inJSON(keyStateOf))},
		{"GET", "/healthz", auth.RoleOpen, a.handler((*exchange).health)},
		{"GET", "/readyz", auth.RoleOpen, a.handler((*exchange).ready)},
		{"GET", "/healthcheck", auth.RoleOpen, a.handler((*exchange).ready)}, // as envoyproxy/ratelimit has it
		{"GET", "/metrics", auth.RoleRead, a.handler((*exchange).metrics)},
		{"GET", "/openapi.yaml", auth.RoleOpen, a.handleOpenAPI},
		{"GET", "/", auth.RoleOpen, a.handler((*exchange).index)},
	})
	for _, f := range a.Foreign {
		list = append(list, Route{f.Method, f.Path, f.Role, a.foreign(f)})
	}
	return append(list, a.Routes...)
}

// New returns the handler for a node's HTTP port.
func New(cfg Config) http.Handler {
	a := &api{Config: cfg}

	mux := http.NewServeMux()
	allow := make(map[string][]string)
	for _, rt := range a.routes() {
		pattern := rt.Path
		if pattern == "/" {
			pattern = "/{$}"
		}
		if rt.Path == forwardAuthPath {
			mux.HandleFunc(pattern, a.authorized(rt))
			continue
		}
		mux.HandleFunc(rt.Method+" "+pattern, a.authorized(rt))
		allow[pattern] = append(allow[pattern], rt.Method)
		if rt.Method == http.MethodGet {
			allow[pattern] = append(allow[pattern], http.MethodHead) // ServeMux passes HEAD to the handler of GET
		}
	}
	for pattern, methods := range allow {
		slices.Sort(methods)
		mux.HandleFunc(pattern, a.methodNotAllowed(strings.Join(methods, ", ")))
	}
	notFound := a.handler((*exchange).notFound)
	mux.HandleFunc("/", notFound)
	return a.counted(func(w http.ResponseWriter, r *http.Request) {
		if a.Host != nil && !a.Host(hostName(r.Host)) {
			a.handler(func(x *exchange) {
				x.problem(&problem{status: http.StatusMisdirectedRequest, message: "this node does not answer for " +
					clip(strconv.Quote(hostName(r.Host))) +
					": ask for it by an IP address, localhost or a name among its http-hosts"})
			})(w, r)
			return
		}
		// ServeMux would answer a redirect without a body, which is of no use to a client that posts JSON.
		if !isClean(r.URL.EscapedPath()) {
			notFound(w, r)
			return
		}
		mux.ServeHTTP(w, r)
	})
}

// counted returns a handler of requests that Begin counts until their answers have been taken.
func (a *api) counted(next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		echoRequestID(w, r)
		if r.ProtoMajor < 2 || a.Begin == nil {
			next(w, r)
			return
		}
		end, ok := a.Begin(askerOf(r))
		defer end()
		if ok {
			next(w, r)
		} else {
			a.Problem(http.StatusServiceUnavailable)
			w.WriteHeader(http.StatusServiceUnavailable) // alone: a body would wait in memory for the caller to read
		}
		// Otherwise net/http would wait for the caller to read a short answer when the request is counted no more.
		_ = http.NewResponseController(w).Flush()
	}
}

// hostName returns a Host header without its port.
func hostName(host string) string {
	if name, _, err := net.SplitHostPort(host); err == nil {
		return name
	}
	return strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
}

// authorized returns the handler of a route for authorized callers.
func (a *api) authorized(rt Route) http.HandlerFunc {
	if rt.Role == auth.RoleOpen || a.Authorize == nil {
		return rt.Handler
	}
	return func(w http.ResponseWriter, r *http.Request) {
		ctx, denial := a.Authorize(askerOf(r), rt.Role)
		if denial != nil {
			if rt.Path == forwardAuthPath && !denial.Authenticated {
				there := *denial
				there.Message += " (here the token is in " + gatewayCredentials + ")"
				denial = &there
			}
			a.handler(func(x *exchange) { x.denied(denial) })(w, r)
			return
		}
		rt.Handler(w, r.WithContext(ctx))
	}
}

// denied answers with a challenge as in RFC 6750, section 3.
func (x *exchange) denied(d *auth.Denial) {
	p := &problem{status: http.StatusForbidden, message: d.Message}
	challenge := `Bearer realm="weir", error="insufficient_scope"`
	if !d.Authenticated {
		p.status = http.StatusUnauthorized
		challenge = `Bearer realm="weir"`
		if d.Reason == auth.BadToken || d.Reason == auth.ExpiredToken {
			challenge += `, error="invalid_token"`
		}
	}
	x.w.Header().Set("WWW-Authenticate", challenge)
	x.problem(p)
}

// isClean says whether ServeMux takes a path without a redirect: rooted, without empty segments and without dots.
func isClean(p string) bool {
	clean := path.Clean(p)
	return strings.HasPrefix(p, "/") && (p == clean || clean != "/" && p == clean+"/")
}

func (a *api) methodNotAllowed(allow string) http.HandlerFunc {
	return a.handler(func(x *exchange) {
		x.w.Header().Set("Allow", allow)
		x.problem(&problem{status: http.StatusMethodNotAllowed,
			message: x.r.URL.Path + " takes " + allow + ", not " + clip(x.r.Method)})
	})
}

func (x *exchange) notFound() {
	x.problem(&problem{status: http.StatusNotFound,
		message: "there is nothing at " + clip(x.r.URL.Path) + "; /openapi.yaml lists what there is"})
}

// indexPage is the index for browsers, around a link to the console and the list of routes.
const indexPage = `<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark"><title>Weir</title></head>
<body><h1>Weir, a distributed rate limiter</h1>
%s<p><a href="/openapi.yaml">openapi.yaml</a> describes these endpoints:</p>
<pre>%s</pre></body>
</html>
`

// index lists the routes. Nothing in the list comes from a request.
func (x *exchange) index() {
	var routes strings.Builder
	for _, rt := range x.routes() {
		routes.WriteString(rt.Method + " " + rt.Path + "\n")
	}
	h := x.w.Header()
	h.Set("Vary", "Accept")
	h.Set("X-Content-Type-Options", "nosniff")
	if !strings.Contains(x.r.Header.Get("Accept"), "text/html") {
		h.Set("Content-Type", "text/plain; charset=utf-8")
		const title = "Weir, a distributed rate limiter. /openapi.yaml describes these endpoints:\n\n"
		x.write(http.StatusOK, []byte(title+routes.String()))
		return
	}
	console := ""
	if x.Console != "" {
		console = `<p><a href="` + x.Console + `">The console</a> shows the cluster, and tries checks.</p>` + "\n"
	}
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Security-Policy", "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
	x.write(http.StatusOK, fmt.Appendf(nil, indexPage, console, html.EscapeString(routes.String())))
}

// NewServer returns a server for the handler, with bounds on what a slow or hostile client can hold. log gets the
// server's own messages, such as a handler's panic. The caller listens and shuts down.
func NewServer(handler http.Handler, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler: handler,
		// Clients open connections in advance and keep unused ones. A short timeout could end such a connection while a
		// request is being sent, which the client could not repeat.
		ReadHeaderTimeout: 30 * time.Second,
		ReadTimeout:       30 * time.Second, // for a full body over a slow link
		// from the end of the header: for reading the body, deciding, and a caller that reads slowly
		WriteTimeout:   60 * time.Second,
		IdleTimeout:    2 * time.Minute,
		MaxHeaderBytes: 32 << 10,
		ErrorLog:       slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
}
