package httplimit_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/client/httplimit"
	"github.com/weirlimit/weir/client/local"
)

// Two requests a minute for each API key, and for each address that sends none. With a cluster, the client is one of
// client.Dial and the limit a policy: c.Policy("api").
func Example() {
	c := local.New(nil)
	defer c.Close()
	perMinute := c.Inline("api", algo.Limit{Algorithm: algo.SlidingLog, Limit: 2, Window: time.Minute})

	hello := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "hello") })
	limits := httplimit.New(httplimit.Config{
		Limiter: perMinute,
		Key:     httplimit.FirstOf(httplimit.Header("X-Api-Key"), httplimit.ClientIP(nil)),
	})
	server := httptest.NewServer(limits.Handler(hello))
	defer server.Close()

	for range 3 {
		res, err := http.Get(server.URL)
		if err != nil {
			fmt.Println(err)
			return
		}
		res.Body.Close()
		fmt.Printf("%d, remaining %s, retry after %q\n", res.StatusCode, res.Header.Get("X-RateLimit-Remaining"),
			res.Header.Get("Retry-After"))
	}
	// Output:
	// 200, remaining 1, retry after ""
	// 200, remaining 0, retry after ""
	// 429, remaining 0, retry after "60"
}

// A policy for each kind of request, the user's and the team's limit together, and no limit for health checks. With
// routers that take a func(http.Handler) http.Handler, it is limits.Handler.
func ExampleNew() {
	c := local.New(nil)
	defer c.Close()
	reads := c.Inline("reads", algo.Limit{Algorithm: algo.SlidingLog, Limit: 2, Window: time.Minute})
	writes := c.Inline("writes", algo.Limit{Algorithm: algo.SlidingLog, Limit: 1, Window: time.Minute})
	limits := httplimit.New(httplimit.Config{
		Choose: func(r *http.Request) client.Decider {
			if r.Method == http.MethodPost {
				return writes
			}
			return reads
		},
		Skip: func(r *http.Request) bool { return r.URL.Path == "/healthz" },
		Key:  httplimit.FirstOf(httplimit.Header("X-Api-Key"), httplimit.ClientIP(nil)),
	})
	handler := limits.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	for _, r := range []*http.Request{
		httptest.NewRequest("POST", "/", nil), httptest.NewRequest("POST", "/", nil),
		httptest.NewRequest("GET", "/", nil),
		httptest.NewRequest("GET", "/healthz", nil),
	} {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		fmt.Printf("%s %s: %d %q\n", r.Method, r.URL, w.Code, w.Header().Get("Weir-Result"))
	}
	fmt.Printf("%+v\n", limits.Counts())
	// Output:
	// POST /: 200 "admitted"
	// POST /: 429 "refused"
	// GET /: 200 "admitted"
	// GET /healthz: 200 ""
	// {Admitted:2 Refused:1 FailedOpen:0 FailedClosed:0 Errors:0}
}
