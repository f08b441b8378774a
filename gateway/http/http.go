// Package httpapi is Weir's HTTP API: JSON over HTTP for programs, a handful of GETs for operators and their tools.
//
// It turns requests into calls on a [limit.Service] and answers into responses, and does nothing else: it keeps no
// state, starts no goroutine, reads no clock and decides nothing. openapi.yaml specifies requests and answers; the handler
// serves it at /openapi.yaml; its problem documents are explained in PROBLEMS.md.
//
// Input is read strictly. Unknown, duplicate and null fields, data after the JSON value, invalid UTF-8, fractions where
// whole numbers belong and numbers beyond 64 bits are rejected with a 400 that names the field, before the Service is
// asked, so nothing is charged for a malformed request.
//
// What it does not promise: to know who asks (Config.Authorize does), encryption or CORS; that a caller who goes
// away is not charged (its context is cancelled, but the owner may have decided already: send a request_id and repeat);
// response headers in canonical Go form: RateLimit, RateLimit-Policy and X-RateLimit-* leave as they are spelled in
// their specifications, which every HTTP client reads alike but http.Header.Get on the unsent map does not find.
package httpapi

import (
	"bytes"
	"context"
	"html/template"
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

// DefaultMaxBody takes a full batch with the longest keys, escaped the way most encoders do.
const DefaultMaxBody = 4 << 20

// Config is what the API stands on. Every field without a stated default is required.
type Config struct {
	// Service decides.
	Service limit.Service
	// Status describes the cluster for GET /v1/status; its error becomes a 503.
	Status func(context.Context) (*weirv1.StatusResponse, error)
	// Ready says whether this node should get traffic, and why not or what an operator should know. The detail is
	// shown with either answer, to those who have the role auth.RoleRead.
	Ready func() (ready bool, detail string)
	// Policies lists what the node has loaded, for GET /v1/policies.
	Policies func() PolicyListing
	// TopKeys tells which keys are used most, of those that the caller may see, and Describe how one stands. Their errors are of
	// *limit.Error.
	TopKeys  func(context.Context, *weirv1.TopKeysRequest) (*weirv1.TopKeysResponse, error)
	Describe func(context.Context, *limit.Target) (*limit.KeyState, error)
	// Overrides changes limits while the node runs.
	Overrides Overrides
	// Metrics answers GET /metrics.
	Metrics http.Handler
	// Routes are further ones, of other front ends' protocols. openapi.yaml describes those that this project has.
	Routes []Route
	// Console is the path of a page for people, which the index has a link to; empty: there is none.
	Console string
	// Authorize says whether a request that needs a role may be answered, and the context to answer it in. An
	// *auth.Denial becomes a 401 or 403. It is not asked about what is open. Nil: everybody may do everything.
	Authorize func(r *http.Request, role auth.Role) (context.Context, *auth.Denial)
	// HasRole reports whether the sender of a request that is open to everybody has a role. Nil: everybody has every role.
	HasRole func(r *http.Request, role auth.Role) bool
	// Host reports whether the name or address in a request's Host header, without its port, is one of this node's. A request
	// for another is answered 421, whatever it asks. Nil: every name is.
	Host func(name string) bool
	// NoInline rejects inline limits.
	NoInline bool
	// ForwardAuth is for GET /v1/forward-auth.
	ForwardAuth ForwardAuth
	// Logger hears of answers with status 500, and at level debug of other requests without a decision and of responses
	// that could not be written, each with its request id; never of a key. Nil stands for slog.Default.
	Logger *slog.Logger
	// Problem, when set, is told the status of every answer that is a problem document.
	Problem func(status int)
	// MaxBody is the largest request body in bytes; 0 stands for DefaultMaxBody.
	MaxBody int64
	// Requests bounds the bytes that requests take from when they are decoded until they are answered; those that take few are
	// not counted. Nil: any number.
	Requests *admission.Gate
	// Buffers, when set, counts the bytes of bodies that are being read, and of what answers that are being written keep.
	Buffers Buffers
}

// Route is one of another front end's. Its handler answers errors as its protocol has them; who may not use it is answered as
// everywhere. The body of a POST has been read when it is called, up to 256 KiB and a byte.
type Route struct {
	Method, Path string
	Role         auth.Role // that a caller needs
	Handler      http.HandlerFunc
}

// Buffers counts bytes that requests hold while the network is waited for. It is safe for concurrent use.
type Buffers interface {
	Hold(bytes int64)
	Release(bytes int64)
}

// api is the state behind the handler; all of it is safe for concurrent use.
type api struct {
	Config
	scratches sync.Pool // of *scratch
	zones     timezone.Cache
}

// scratch is the memory that a request needs from its first byte to its last and no longer.
type scratch struct {
	in    bytes.Buffer
	out   []byte
	check checkBody
	asks  [1]limit.Check

	held, taken int64 // of Buffers and of Requests
}

// keepScratch is the size in bytes beyond which a buffer is left to the garbage collector.
const keepScratch = 64 << 10

func (a *api) scratch() *scratch { return a.scratches.Get().(*scratch) }

func (a *api) recycle(s *scratch) {
	a.Requests.Leave(s.taken)
	a.keep(s, -s.held)
	s.taken = 0
	if s.in.Cap() > keepScratch || cap(s.out) > keepScratch {
		return
	}
	a.scratches.Put(s)
}

// route is one documented endpoint.
type route struct {
	method, path string
	role         auth.Role // that a caller needs
	handler      http.HandlerFunc
	forwarded    bool // requests are like the one that they are about: of any method, with its header
}

func (a *api) routes() []route {
	list := []route{
		{"POST", "/v1/check", auth.RoleCheck, a.handleCheck, false},
		{"POST", "/v1/checks", auth.RoleCheck, a.handleChecks, false},
		{"POST", "/v1/acquire", auth.RoleCheck, a.acquire(), false},
		{"POST", "/v1/renew", auth.RoleCheck, a.renew(), false},
		{"POST", "/v1/release", auth.RoleCheck, a.release(), false},
		{"POST", "/v1/reserve", auth.RoleCheck, a.reserve(), false},
		{"POST", "/v1/reserves", auth.RoleCheck, a.reserveAll(), false},
		{"POST", "/v1/extend", auth.RoleCheck, a.extend(), false},
		{"POST", "/v1/extends", auth.RoleCheck, a.extendEach(), false},
		{"POST", "/v1/charge", auth.RoleCharge, a.charge(), false},
		{"POST", "/v1/commit", auth.RoleCheck, a.commit(), false},
		{"POST", "/v1/commits", auth.RoleCheck, a.commitEach(), false},
		{"POST", "/v1/cancel", auth.RoleCheck, a.cancel(), false},
		{"POST", "/v1/refund", auth.RoleRefund, a.refund(), false},
		{"POST", "/v1/reset", auth.RoleRefund, a.reset(), false},
		{"GET", forwardAuthPath, auth.RoleCheck, a.handleForwardAuth, true},
		{"GET", "/v1/policies", auth.RoleRead, a.handlePolicies, false},
		{"GET", "/v1/status", auth.RoleRead, a.handleStatus, false},
		{"GET", "/v1/overrides", auth.RoleOverrides, a.overrides(), false},
		{"PUT", "/v1/overrides", auth.RoleOverrides, a.putOverride(), false},
		{"DELETE", "/v1/overrides", auth.RoleOverrides, a.deleteOverride(), false},
		{"GET", "/v1/keys/top", auth.RoleKeys, a.topKeys(), false},
		{"POST", "/v1/keys/describe", auth.RoleKeys, a.describe(), false},
		{"GET", "/healthz", auth.RoleOpen, a.handleHealth, false},
		{"GET", "/readyz", auth.RoleOpen, a.handleReady, false},
		{"GET", "/healthcheck", auth.RoleOpen, a.handleReady, false}, // as envoyproxy/ratelimit has it
		{"GET", "/metrics", auth.RoleRead, a.Metrics.ServeHTTP, false},
		{"GET", "/openapi.yaml", auth.RoleOpen, a.handleOpenAPI, false},
		{"GET", "/", auth.RoleOpen, a.handleIndex, false},
	}
	for _, r := range a.Routes {
		handler := r.Handler
		if r.Method == http.MethodPost {
			handler = a.foreign(handler)
		}
		list = append(list, route{r.Method, r.Path, r.Role, handler, false})
	}
	return list
}

// New returns the handler for a node's HTTP port. It panics when a required field of cfg is missing: that is a mistake
// in the program, not in its input.
func New(cfg Config) http.Handler {
	if cfg.Service == nil || cfg.Status == nil || cfg.Ready == nil || cfg.Policies == nil || cfg.TopKeys == nil || cfg.Describe == nil || cfg.Overrides == nil || cfg.Metrics == nil {
		panic("httpapi: Config needs Service, Status, Ready, Policies, TopKeys, Describe, Overrides and Metrics")
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if cfg.MaxBody == 0 {
		cfg.MaxBody = DefaultMaxBody
	}
	a := &api{Config: cfg}
	a.scratches.New = func() any { return new(scratch) }

	mux := http.NewServeMux()
	allow := make(map[string][]string)
	for _, rt := range a.routes() {
		pattern := rt.path
		if pattern == "/" {
			pattern = "/{$}"
		}
		if rt.forwarded {
			mux.HandleFunc(pattern, a.authorized(rt))
			continue
		}
		mux.HandleFunc(rt.method+" "+pattern, a.authorized(rt))
		allow[pattern] = append(allow[pattern], rt.method)
		if rt.method == http.MethodGet {
			allow[pattern] = append(allow[pattern], http.MethodHead) // the mux hands HEAD to the handler of GET
		}
	}
	for pattern, methods := range allow {
		slices.Sort(methods)
		mux.HandleFunc(pattern, a.methodNotAllowed(strings.Join(methods, ", ")))
	}
	mux.HandleFunc("/", a.notFound)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		echoRequestID(w, r)
		if a.Host != nil && !a.Host(hostName(r.Host)) {
			a.writeProblem(w, r, &problem{status: http.StatusMisdirectedRequest,
				message: "this node does not answer for " + clip(strconv.Quote(hostName(r.Host))) + ": ask for it by an IP address, localhost or a name among its http-hosts"})
			return
		}
		// The mux would answer with a redirect and without a body, which a client that posts JSON has no use for.
		if !isClean(r.URL.EscapedPath()) {
			a.notFound(w, r)
			return
		}
		mux.ServeHTTP(w, r)
	})
}

// hostName is a Host header without its port.
func hostName(host string) string {
	if name, _, err := net.SplitHostPort(host); err == nil {
		return name
	}
	return strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
}

// authorized is the handler of a route for those who may use it.
func (a *api) authorized(rt route) http.HandlerFunc {
	if rt.role == auth.RoleOpen || a.Authorize == nil {
		return rt.handler
	}
	return func(w http.ResponseWriter, r *http.Request) {
		asker := r
		if rt.forwarded {
			asker = gatewayRequest(r)
		}
		ctx, denial := a.Authorize(asker, rt.role)
		if denial != nil {
			if rt.forwarded && !denial.Authenticated {
				there := *denial
				there.Message += " (here the token is in " + gatewayCredentials + ")"
				denial = &there
			}
			a.writeDenial(w, r, denial)
			return
		}
		rt.handler(w, r.WithContext(ctx))
	}
}

// writeDenial answers with the challenges of RFC 6750, 3.
func (a *api) writeDenial(w http.ResponseWriter, r *http.Request, d *auth.Denial) {
	p := &problem{status: http.StatusForbidden, message: d.Message}
	challenge := `Bearer realm="weir", error="insufficient_scope"`
	if !d.Authenticated {
		p.status = http.StatusUnauthorized
		challenge = `Bearer realm="weir"`
		if d.Reason == auth.BadToken || d.Reason == auth.ExpiredToken {
			challenge += `, error="invalid_token"`
		}
	}
	w.Header().Set("WWW-Authenticate", challenge)
	a.writeProblem(w, r, p)
}

// isClean says whether the mux takes a path as it is: rooted, without empty segments and without dots.
func isClean(p string) bool {
	clean := path.Clean(p)
	return strings.HasPrefix(p, "/") && (p == clean || clean != "/" && p == clean+"/")
}

func (a *api) methodNotAllowed(allow string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Allow", allow)
		a.writeProblem(w, r, &problem{status: http.StatusMethodNotAllowed,
			message: r.URL.Path + " takes " + allow + ", not " + clip(r.Method)})
	}
}

func (a *api) notFound(w http.ResponseWriter, r *http.Request) {
	a.writeProblem(w, r, &problem{status: http.StatusNotFound,
		message: "there is nothing at " + clip(r.URL.Path) + "; /openapi.yaml lists what there is"})
}

// indexPage is the index for people. Nothing in it comes from a request.
var indexPage = template.Must(template.New("index").Parse(`<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark"><title>Weir</title></head>
<body>
<h1>Weir, a distributed rate limiter</h1>
{{if .Console}}<p><a href="{{.Console}}">The console</a> shows the cluster, and tries checks.</p>
{{end}}<p><a href="/openapi.yaml">openapi.yaml</a> describes these endpoints:</p>
<ul>
{{range .Routes}}<li><code>{{.}}</code></li>
{{end}}</ul>
</body>
</html>
`))

func (a *api) handleIndex(w http.ResponseWriter, r *http.Request) {
	page := struct {
		Console string
		Routes  []string
	}{Console: a.Console}
	for _, rt := range a.routes() {
		page.Routes = append(page.Routes, rt.method+" "+rt.path)
	}
	h := w.Header()
	if !strings.Contains(r.Header.Get("Accept"), "text/html") {
		h.Set("Content-Type", "text/plain; charset=utf-8")
		a.write(w, r, http.StatusOK, []byte("Weir, a distributed rate limiter. /openapi.yaml describes these endpoints:\n\n"+strings.Join(page.Routes, "\n")+"\n"))
		return
	}
	var b bytes.Buffer
	if err := indexPage.Execute(&b, &page); err != nil {
		a.unwritten(w, r, err)
		return
	}
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Security-Policy", "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Vary", "Accept")
	a.write(w, r, http.StatusOK, b.Bytes())
}

// NewServer returns a server for the handler with bounds on what a slow or hostile peer can hold on to. Its own
// complaints, such as a handler's panic, go to log. The caller listens and shuts down.
func NewServer(handler http.Handler, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler: handler,
		// Clients connect ahead of need and keep what they did not use: it must not end under a request that is just being sent,
		// which they could not repeat.
		ReadHeaderTimeout: 30 * time.Second,
		ReadTimeout:       30 * time.Second, // a full body over a slow link
		WriteTimeout:      60 * time.Second, // from the end of the header: reading, deciding and a slow reader
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    32 << 10,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
}
