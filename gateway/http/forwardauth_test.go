package httpapi

import (
	"context"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/scripted"
	"github.com/weirlimit/weir/test/testkit"
)

// behindGateway lets requests of httptest, which come from 192.0.2.1, speak for others.
func behindGateway(c *Config) {
	c.ForwardAuth = ForwardAuth{
		Headers:        []string{"X-Api-Key", "Authorization"},
		TrustedProxies: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("10.0.0.0/8")},
	}
}

// TestForwardAuthKeys: what a request is limited by, and what it is charged.
func TestForwardAuthKeys(t *testing.T) {
	long := strings.Repeat("k", limit.MaxKey+1)
	for _, c := range []struct {
		query  string
		header []string
		key    string
		cost   int64
	}{
		{"policy=web&key=alice", nil, "alice", 1},
		{"key=alice&policy=web&cost=20", nil, "alice", 20},
		{"policy=web&key=a%26policy%3Db%20c+d%0D%0A%C3%BC", nil, "a&policy=b c d\r\nü", 1},
		{"policy=web&key_header=x-api-KEY", []string{"X-Api-Key", "k-17"}, "k-17", 1},
		{"policy=web&key_header=Authorization", []string{"Authorization", "Bearer of-the-caller"},
			"Bearer of-the-caller", 1},
		// A longer value than a key may be is limited all the same: by making it longer no caller leaves its limit.
		{"policy=web&key_header=x-api-KEY", []string{"X-Api-Key", long}, limit.KeyOf(long), 1},
		{"policy=web&key=" + long, nil, limit.KeyOf(long), 1},
		{"policy=web&key_ip=true", []string{"X-Forwarded-For", "203.0.113.9"}, "203.0.113.9", 1},
		{"policy=web&key_ip=true", []string{"X-Forwarded-For", "6.6.6.6, 203.0.113.9, 10.1.2.3"}, "203.0.113.9", 1},
		{"policy=web&key_ip=true", []string{"X-Forwarded-For", "6.6.6.6", "X-Forwarded-For", "203.0.113.9"},
			"203.0.113.9", 1},
		{"policy=web&key_ip=true", []string{"X-Forwarded-For", "2001:db8:1:2:3::4"}, "2001:db8:1:2::/64", 1},
		{"policy=web&key_ip=true&ipv6_prefix=48", []string{"X-Forwarded-For", "2001:db8:1:2:3::4"}, "2001:db8:1::/48",
			1},
		{"policy=web&key_ip=true&ipv6_prefix=48", []string{"X-Forwarded-For", "203.0.113.9"}, "203.0.113.9", 1},
	} {
		d := newAPI(t, &scripted.Service{Results: []limit.Result{{Decision: admitted}}}, behindGateway)
		resp := d.do("GET", "/v1/forward-auth?"+c.query, "", c.header...)
		want := limit.Check{Target: limit.Target{Policy: "web", Key: c.key}, Cost: c.cost}
		expect.True(t, resp.StatusCode == http.StatusOK && len(d.service.Calls()) == 1 &&
			d.service.Calls()[0].Checks[0] == want, "%s %v: %d %s, asked %+v", c.query, c.header, resp.StatusCode,
			bodyOf(t, resp), d.service.Calls())
	}
}

// TestForwardAuthMethods: gateways repeat the method of their caller, and some its body.
func TestForwardAuthMethods(t *testing.T) {
	for _, method := range []string{"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PROPFIND"} {
		d := newAPI(t, &scripted.Service{Results: []limit.Result{{Decision: admitted}}}, behindGateway)
		r := httptest.NewRequest(method, "/v1/forward-auth?policy=web&key=alice", strings.NewReader("a form, perhaps"))
		w := httptest.NewRecorder()
		d.handler.ServeHTTP(w, r)
		expect.True(t, w.Code == http.StatusOK && w.Body.Len() == 0 && len(d.service.Calls()) == 1,
			"%s: %d %s", method, w.Code, w.Body)
	}
}

// TestForwardAuthAnswers: a decision, and what a gateway's caller did wrong, as statuses and header fields.
func TestForwardAuthAnswers(t *testing.T) {
	closed := limit.Decision{Policy: "login", Limit: 5, FailedClosed: true}
	open := limit.Decision{Policy: "login", Allowed: true, FailedOpen: true}
	never := refused
	never.RetryAfter = algo.Never
	const byKey, byHeader = "?policy=login&key=alice", "?policy=login&key_header=X-Api-Key"
	for _, c := range []struct {
		name, query string
		decision    limit.Decision
		header      []string
		status      int
		want        map[string]string // header fields; empty: not there
		detail      string            // in a problem; empty: no body
	}{
		{"admitted", byKey, admitted, nil, 200,
			map[string]string{"Weir-Result": "admitted", "Weir-Status": "200", "RateLimit": `"login";r=4;t=60`,
				"X-RateLimit-Remaining": "4", "Retry-After": "", "Cache-Control": "no-store"}, ""},
		{"refused", byKey, refused, nil, 429, map[string]string{"Weir-Result": "refused", "Weir-Status": "429",
			"RateLimit": `"login";r=0;t=37`, "X-RateLimit-Remaining": "0", "Retry-After": "37"}, "pass in 37 s"},
		{"refused for good", byKey, never, nil, 429,
			map[string]string{"Weir-Result": "refused", "Weir-Status": "429", "Retry-After": ""}, "can never pass"},
		{"refused, for nginx", byKey + "&deny_status=403", refused, nil, 403,
			map[string]string{"Weir-Result": "refused", "Weir-Status": "429", "RateLimit": `"login";r=0;t=37`,
				"Retry-After": "37"}, ""},
		{"refused, as 401", byKey + "&deny_status=401", refused, nil, 401,
			map[string]string{"Weir-Result": "refused", "Weir-Status": "429", "WWW-Authenticate": ""}, ""},
		{"admitted, for nginx", byKey + "&deny_status=403", admitted, nil, 200,
			map[string]string{"Weir-Result": "admitted"}, ""},
		{"failed closed", byKey, closed, nil, 503, map[string]string{"Weir-Result": "failed_closed",
			"Weir-Status": "503", "Retry-After": "1", "RateLimit": ""}, "cannot be asked"},
		{"failed closed, for nginx", byKey + "&deny_status=403", closed, nil, 403,
			map[string]string{"Weir-Result": "failed_closed", "Weir-Status": "503", "Retry-After": "1"}, ""},
		{"failed open", byKey, open, nil, 200,
			map[string]string{"Weir-Result": "failed_open", "Weir-Status": "200", "RateLimit": ""}, ""},
		{"no key", byHeader, admitted, nil, 400, map[string]string{"Weir-Result": "bad_key", "Weir-Status": "400"},
			"has no X-Api-Key"},
		{"empty key", byHeader, admitted, []string{"X-Api-Key", ""}, 400, map[string]string{"Weir-Result": "bad_key"},
			"has no X-Api-Key"},
		{"two keys", byHeader, admitted, []string{"X-Api-Key", "a", "X-Api-Key", "b"}, 400,
			map[string]string{"Weir-Result": "bad_key"}, "more than one"},
		{"key in Latin 1", byHeader, admitted, []string{"X-Api-Key", "\xfc"}, 400,
			map[string]string{"Weir-Result": "bad_key"}, "not UTF-8"},
		{"no key, for nginx", byHeader + "&deny_status=403", admitted, nil, 403,
			map[string]string{"Weir-Result": "bad_key", "Weir-Status": "400"}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := newAPI(t, &scripted.Service{Results: []limit.Result{{Decision: c.decision}}}, behindGateway)
			resp := d.do("GET", "/v1/forward-auth"+c.query, "", c.header...)
			body := bodyOf(t, resp)
			expect.True(t, resp.StatusCode == c.status && (c.detail != "" || body == "") &&
				strings.Contains(body, c.detail), "%d %s", resp.StatusCode, body)
			expect.True(t, !strings.Contains(body, "alice") && !strings.Contains(body, `login`),
				"names the policy or the key: %s", body)
			for name, want := range c.want {
				expect.Equal(t, strings.Join(headerOf(resp, name), "|"), want, "%s", name)
			}
			asked := len(d.service.Calls()) > 0
			expect.True(t, asked != (c.want["Weir-Result"] == "bad_key"), "asked: %v", asked)
		})
	}
}

// headerOf returns the values of a header field, however its name is spelled.
func headerOf(resp *http.Response, name string) (values []string) {
	for k, v := range resp.Header {
		if strings.EqualFold(k, name) {
			values = append(values, v...)
		}
	}
	return values
}

// TestForwardAuthBadQueries: what the operator of a gateway got wrong is a problem whatever deny_status says, and is
// never charged.
func TestForwardAuthBadQueries(t *testing.T) {
	testkit.Table(t, "testdata/bad_queries.txt", func(t *testing.T, query, want string) {
		d := newAPI(t, &scripted.Service{Results: []limit.Result{{Decision: admitted}}}, behindGateway)
		resp := d.do("GET", "/v1/forward-auth?"+query, "", "Cookie", "a=b")
		field, phrase, _ := strings.Cut(strings.Replace(want, "CONTROL", "\uFFFD\r\n", 1), " ")
		wantProblem(t, resp, 400, strings.TrimPrefix(field, "-"), phrase)
		expect.True(t, len(d.service.Calls()) == 0 && headerOf(resp, "Weir-Result") == nil, "asked %v, %v",
			d.service.Calls(), resp.Header)
	})
}

// TestForwardAuthNamesNobody: where the gateway sends no address of its caller, its own is not counted in place of
// that.
func TestForwardAuthNamesNobody(t *testing.T) {
	d := newAPI(t, &scripted.Service{Results: []limit.Result{{Decision: admitted}}}, behindGateway)
	for _, hops := range []string{"unknown", "203.0.113.9, unknown", "203.0.113.9, _hidden", ""} {
		wantProblem(t, d.do("GET", "/v1/forward-auth?policy=web&key_ip=true", "", "X-Forwarded-For", hops), 400,
			"key_ip", "X-Forwarded-For")
	}
	expect.True(t, len(d.service.Calls()) <= 0, "asked %v", d.service.Calls())
}

// TestForwardAuthStrangers: nobody who is no trusted proxy chooses the address that it is limited by.
func TestForwardAuthStrangers(t *testing.T) {
	d := newAPI(t, &scripted.Service{Results: []limit.Result{{Decision: admitted}}}, nil)
	wantProblem(t, d.do("GET", "/v1/forward-auth?policy=web&key_ip=true", "", "X-Forwarded-For", "203.0.113.9"), 400,
		"key_ip", "trusted-proxies")
	wantProblem(t, d.do("GET", "/v1/forward-auth?policy=web&key_header=X-Api-Key", "", "X-Api-Key", "a"), 400,
		"key_header", "forward-auth-headers")
	expect.True(t, len(d.service.Calls()) <= 0, "asked %v", d.service.Calls())
}

// TestForwardAuthCredentials: the gateway is who Weir-Authorization says, and Authorization is its caller's.
func TestForwardAuthCredentials(t *testing.T) {
	var asked []http.Header
	d := newAPI(t, &scripted.Service{Results: []limit.Result{{Decision: admitted}}}, func(c *Config) {
		behindGateway(c)
		c.Authorize = func(r *http.Request, role auth.Role) (context.Context, *auth.Denial) {
			asked = append(asked, r.Header)
			expect.True(t, role == auth.RoleCheck && r.RemoteAddr != "" && r.URL.Path == "/v1/forward-auth",
				"%v for %v %v", role, r.RemoteAddr, r.URL)
			if len(r.Header["Authorization"]) == 0 {
				return nil, &auth.Denial{Reason: auth.NoCredentials, Message: "authenticate"}
			}
			return r.Context(), nil
		}
	})
	resp := d.do("GET", "/v1/forward-auth?policy=web&key_header=Authorization", "", "Authorization",
		"Bearer of-the-caller", "Weir-Authorization", "Bearer of-the-gateway")
	expect.True(t, resp.StatusCode == http.StatusOK && len(asked) == 1 &&
		slices.Equal(asked[0]["Authorization"], []string{"Bearer of-the-gateway"}) && len(asked[0]) == 1,
		"%d, asked with %v", resp.StatusCode, asked)
	expect.Equal(t, d.service.Calls()[0].Checks[0].Key, "Bearer of-the-caller", "limited by")
	resp = d.do("GET", "/v1/forward-auth?policy=web&key_header=Authorization", "", "Authorization",
		"Bearer of-the-gateway")
	body := bodyOf(t, resp)
	expect.True(t, resp.StatusCode == http.StatusUnauthorized && strings.Contains(body, "Weir-Authorization") &&
		len(d.service.Calls()) == 1, "%d %s", resp.StatusCode, body)
}

// TestForwardAuthErrors: a question that gets no decision is a problem, which deny_status does not hide.
func TestForwardAuthErrors(t *testing.T) {
	for _, c := range []struct {
		kind   limit.Kind
		status int
	}{{limit.NotFound, 404}, {limit.Unavailable, 503}, {limit.Denied, 403}} {
		d := newAPI(t, &scripted.Service{Results: []limit.Result{{Err: limit.NewError(c.kind, "policy",
			"is a problem").InList("checks", 0)}}}, nil)
		resp := d.do("GET", "/v1/forward-auth?policy=web&key=a&deny_status=403", "")
		wantProblem(t, resp, c.status, "policy", "is a problem")
		expect.True(t, headerOf(resp, "Weir-Status") == nil, "%v", resp.Header)
	}
}

func TestParseKeyHeaders(t *testing.T) {
	got, err := ParseKeyHeaders([]string{"x-api-key", "Authorization"})
	expect.True(t, err == nil && slices.Equal(got, []string{"X-Api-Key", "Authorization"}), "%v, %v", got, err)
	for _, name := range []string{"", "X Api Key", "X-Api-Key:", "host", "weir-authorization", "X\r\nY"} {
		got, err := ParseKeyHeaders([]string{name})
		expect.True(t, err != nil, "%q: %v", name, got)
	}
}

// FuzzForwardQuery reads any query: what is taken is within its bounds and says the same when it is written again.
func FuzzForwardQuery(f *testing.F) {
	for _, query := range []string{
		"policy=web&key=alice", "policy=web&key=a%26b+c&cost=20&deny_status=403", "policy=web&key_header=X-Api-Key",
		"policy=web&key_ip=true&ipv6_prefix=56",
		"policy=web&key=a&key=b", "policy=web;key=a", "policy=web&key=%zz", "policy=web&key=%ff", "&&=&policy",
		"policy=web&key=a&cost=0",
	} {
		f.Add(query)
	}
	f.Fuzz(func(t *testing.T, query string) {
		q, p := parseForwardQuery(query)
		if p != nil {
			expect.True(t, p.status == 400 && p.message != "" && utf8.ValidString(p.field),
				"%+v", p)
			return
		}
		expect.True(t, q.policy != "" && len(q.key) <= limit.MaxKey && utf8.ValidString(q.key) && q.cost >= 1 &&
			q.cost <= algo.MaxLimit && q.ipv6Bits <= 128, "%+v", q)
		given := must.Value(url.ParseQuery(query))(t)
		again, p := parseForwardQuery(given.Encode())
		expect.True(t, p == nil && again == q, "%+v, written again %+v, %+v", q, again, p)
	})
}
