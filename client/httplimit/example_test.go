package httplimit_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/weirlimit/weir/algo"
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
	server := httptest.NewServer(httplimit.Handler(hello, httplimit.Config{
		Limiter: perMinute,
		Key:     httplimit.FirstOf(httplimit.Header("X-Api-Key"), httplimit.ClientIP(nil)),
	}))
	defer server.Close()

	for range 3 {
		res, err := http.Get(server.URL)
		if err != nil {
			fmt.Println(err)
			return
		}
		res.Body.Close()
		fmt.Printf("%d, remaining %s, retry after %q\n", res.StatusCode, res.Header.Get("X-RateLimit-Remaining"), res.Header.Get("Retry-After"))
	}
	// Output:
	// 200, remaining 1, retry after ""
	// 200, remaining 0, retry after ""
	// 429, remaining 0, retry after "60"
}
