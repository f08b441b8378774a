package httpapi

import (
	"cmp"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"time"
	"unicode/utf8"

	"golang.org/x/net/http/httpguts"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/netaddr"
	"github.com/weirlimit/weir/internal/quotaheader"
	"github.com/weirlimit/weir/limit"
)

// ForwardAuth says where GET /v1/forward-auth may take keys from. The zero value: from the query only.
type ForwardAuth struct {
	// Headers are the header fields whose values may be keys, as ParseKeyHeaders returns them.
	Headers []string
	// TrustedProxies are the addresses of gateways, and of proxies in front of them, whose X-Forwarded-For is trusted.
	TrustedProxies []netip.Prefix
}

const forwardAuthPath = "/v1/forward-auth"

// Weir's own header fields of forward-auth.
const (
	// gatewayCredentials has the gateway's token, because Authorization has its caller's.
	gatewayCredentials = "Weir-Authorization"
	// realStatusHeader has the status that the answer would have without deny_status.
	realStatusHeader = "Weir-Status"
)

// ParseKeyHeaders validates names of header fields for ForwardAuth.Headers and returns them in canonical form.
func ParseKeyHeaders(names []string) ([]string, error) {
	var list []string
	for _, name := range names {
		canonical := http.CanonicalHeaderKey(name)
		switch {
		case !httpguts.ValidHeaderFieldName(name):
			return nil, fmt.Errorf("%q is not the name of a header field", name)
		case canonical == "Host":
			return nil, fmt.Errorf("%q names the node that the gateway asks: let the gateway send X-Forwarded-Host",
				name)
		case canonical == gatewayCredentials:
			return nil, fmt.Errorf("%q is the gateway's own token", name)
		}
		list = append(list, canonical)
	}
	return list, nil
}

// forwardQuery is the query of a forward-auth request. Exactly one of key, keyHeader and byAddress is set.
type forwardQuery struct {
	policy, key string
	keyHeader   string // canonical
	byAddress   bool
	ipv6Bits    int // bits of an IPv6 address in the key; 0: netaddr.DefaultIPv6Bits
	cost        int64
	denyStatus  int // status of all refusals; 0: as statusOf says
}

var denyStatuses = map[string]int{"401": http.StatusUnauthorized, "403": http.StatusForbidden}

// parseForwardQuery reads the query of a forward-auth request.
func parseForwardQuery(raw string) (q forwardQuery, p *problem) {
	query, p := queryOf(raw, "policy", "key", "key_header", "key_ip", "ipv6_prefix", "cost", "deny_status")
	if p != nil {
		return q, p
	}
	q = forwardQuery{policy: query["policy"], key: limit.KeyOf(query["key"]),
		keyHeader: http.CanonicalHeaderKey(query["key_header"]), byAddress: query["key_ip"] == "true"}
	if query["key_ip"] != "" && !q.byAddress {
		return q, invalid("key_ip", "must be true, or left out")
	}
	ways := 0
	for _, given := range []bool{q.key != "", q.keyHeader != "", q.byAddress} {
		if given {
			ways++
		}
	}
	bits, badBits := whole(query, "ipv6_prefix", 128, 0)
	cost, badCost := whole(query, "cost", algo.MaxLimit, 1)
	q.ipv6Bits, q.cost = int(bits), cost
	q.denyStatus = denyStatuses[query["deny_status"]]
	switch {
	case query["deny_status"] != "" && q.denyStatus == 0:
		return q, invalid("deny_status", "must be 401 or 403, or left out for the status that says why")
	case badBits != nil || badCost != nil:
		return q, cmp.Or(badBits, badCost)
	case q.policy == "":
		return q, invalid("policy", "must be given: the name of a policy")
	case ways != 1:
		return q, invalid("key", "give exactly one of key=KEY, key_header=NAME and key_ip=true")
	case q.ipv6Bits != 0 && !q.byAddress:
		return q, invalid("ipv6_prefix", "goes with key_ip")
	}
	return q, nil
}

// keyOf returns the key for a request. callers says that the gateway's caller causes the problem, and not the gateway's
// configuration.
func (a *api) keyOf(r *http.Request, q *forwardQuery) (key string, p *problem, callers bool) {
	switch {
	case q.byAddress:
		return a.addressOf(r, q)
	case q.keyHeader == "":
		return q.key, nil, false
	case !slices.Contains(a.ForwardAuth.Headers, q.keyHeader):
		return "", invalid("key_header",
			clip(strconv.Quote(q.keyHeader))+" is not among the forward-auth-headers of this node"), false
	}
	values := r.Header[q.keyHeader]
	switch {
	case len(values) == 0 || len(values) == 1 && values[0] == "":
		return "", invalid("key_header", "the request has no "+q.keyHeader), true
	case len(values) > 1:
		return "", invalid("key_header", "the request has more than one "+q.keyHeader), true
	case !utf8.ValidString(values[0]):
		return "", invalid("key_header", q.keyHeader+" is not UTF-8"), true
	}
	return limit.KeyOf(values[0]), nil, false
}

// addressOf is keyOf for key_ip. The gateway must be a trusted proxy: all its callers would share the gateway's own
// address otherwise.
func (a *api) addressOf(r *http.Request, q *forwardQuery) (key string, p *problem, callers bool) {
	clients := netaddr.Resolver{Trusted: a.ForwardAuth.TrustedProxies, IPv6Bits: q.ipv6Bits}
	if !clients.Trusts(r.RemoteAddr) {
		return "", invalid("key_ip", "the gateway that asks is not among the trusted-proxies of this node"), false
	}
	key, named := clients.Caller(r.RemoteAddr, r.Header)
	if !named {
		return "", invalid("key_ip",
			"the gateway has to send the address of its caller as the last one in X-Forwarded-For"), false
	}
	return key, nil, false
}

// forwardAuth answers a gateway that asks about a request before it passes the request on. It ignores method and body,
// which are those of the request or the gateway's own.
func (x *exchange) forwardAuth() {
	h := x.w.Header()
	h["Cache-Control"] = []string{"no-store"} // a GET that charges must not be cached
	q, p := parseForwardQuery(x.r.URL.RawQuery)
	if p != nil {
		x.problem(p)
		return
	}
	key, p, callers := x.keyOf(x.r, &q)
	if p != nil {
		if callers {
			setResult(h, quotaheader.BadKey, p.status)
			if q.denyStatus != 0 {
				x.w.WriteHeader(q.denyStatus)
				return
			}
		}
		x.problem(p)
		return
	}
	if d := x.decide(limit.Check{Target: limit.Target{Policy: q.policy, Key: key}, Cost: q.cost}); d != nil {
		x.forwarded(d, q.denyStatus)
	}
}

// forwarded writes a decision for a gateway: an admission without a body, a refusal as a problem document, which most
// gateways pass on to their caller. Gateways that require deny_status pass nothing on, so that such an answer has no
// body.
func (x *exchange) forwarded(d *limit.Decision, denyStatus int) {
	h := x.w.Header()
	x.out = quotaheader.Set(h, x.out, d)
	quotaheader.SetRetryAfter(h, d)
	status := statusOf(d, false)
	setResult(h, quotaheader.ResultOf(d), status)
	switch {
	case status == http.StatusOK:
		x.w.WriteHeader(status)
	case denyStatus != 0:
		x.w.WriteHeader(denyStatus)
	default:
		h["X-Content-Type-Options"] = []string{"nosniff"}
		identify(x.w)
		b := (&problem{status: status, message: refusalDetail(d)}).body()
		x.json(status, "application/problem+json", &b)
	}
}

func setResult(h http.Header, result string, status int) {
	h[quotaheader.Result] = []string{result}
	h[realStatusHeader] = []string{strconv.Itoa(status)}
}

// refusalDetail returns the text of a refusal for the gateway's caller. It names neither policy nor key.
func refusalDetail(d *limit.Decision) string {
	wait, ok := quotaheader.RetryAfter(d)
	switch {
	case d.FailedClosed:
		return "the rate limit cannot be asked at the moment"
	case !ok:
		return "this request can never pass its limit"
	}
	return "the limit lets this request pass in " + strconv.FormatInt(quotaheader.RoundUp(wait, time.Second), 10) + " s"
}

// askerOf returns the request with the credentials of who asks. For forward-auth it has the gateway's only, because the
// rest of the header comes from the gateway's caller.
func askerOf(r *http.Request) *http.Request {
	if r.URL.Path != forwardAuthPath {
		return r
	}
	g := r.WithContext(r.Context()) // a copy
	g.Header = make(http.Header)
	if tokens := r.Header[gatewayCredentials]; len(tokens) > 0 {
		g.Header["Authorization"] = tokens
	}
	return g
}
