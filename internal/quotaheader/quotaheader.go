// Package quotaheader writes a decision as the header fields of HTTP that tell a caller how much of its quota is left:
// draft-ietf-httpapi-ratelimit-headers-10, the X-RateLimit fields that came before it, and Retry-After.
//
// It does not choose the status of an answer.
package quotaheader

import (
	"net/http"
	"strconv"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
)

// RetryAfter is 0 when the request was admitted; ok is false when it can never pass.
func RetryAfter(d *limit.Decision) (wait time.Duration, ok bool) {
	if d.Allowed {
		return 0, true
	}
	return d.RetryAfter, d.RetryAfter != algo.Never
}

// SetRetryAfter sets Retry-After, in whole seconds rounded up, for a decision that is answered by a refusal: 1 where the owner
// could not be asked, nothing for a request that can never pass.
func SetRetryAfter(h http.Header, d *limit.Decision) {
	if d.FailedClosed {
		h.Set("Retry-After", "1")
	} else if wait, ok := RetryAfter(d); ok && !d.Allowed {
		h.Set("Retry-After", strconv.FormatInt(RoundUp(wait, time.Second), 10))
	}
}

// RoundUp counts the units that cover d, so that who waits for so many does not come too early.
func RoundUp(d, unit time.Duration) int64 {
	if d <= 0 {
		return 0
	}
	return int64((d-1)/unit) + 1
}

// The header field that says in one word what an answer means, and its values.
const (
	Result       = "Weir-Result"
	Admitted     = "admitted"
	Refused      = "refused"
	FailedOpen   = "failed_open"
	FailedClosed = "failed_closed"
	BadKey       = "bad_key" // what the caller sent is no key
)

// ResultOf is the value of Result for a decision.
func ResultOf(d *limit.Decision) string {
	switch {
	case d.FailedClosed:
		return FailedClosed
	case d.FailedOpen:
		return FailedOpen
	case d.Allowed:
		return Admitted
	}
	return Refused
}

// The header fields of decisions that are NearLimit and Banned, with the value "true".
const (
	NearLimit = "Weir-Near-Limit"
	Banned    = "Weir-Banned"
)

var yes = []string{"true"}

// maxField is the largest integer that a structured field can hold (RFC 9651, section 3.3.1), which is less than the
// largest limit.
const maxField = 999_999_999_999_999

// Set sets the header fields that tell how much is left: those of draft-ietf-httpapi-ratelimit-headers-10 and the
// three that came before it, and NearLimit and Banned. Where there is no quota (unlimited) or it is not known (the owner was not asked), there
// are none.
//
// Windows below a second or between seconds are rounded up, since the draft has none: a caller who paces itself by them
// is slower than it need be, never faster. Of a bucket the Service states the capacity and the time it takes to fill, so
// that q per w is its lasting rate. The draft's t, "until additional quota is made available", is for a limit that
// refuses the moment the same request passes, so that it agrees with Retry-After, which it should not exceed; when
// nothing refuses it is the moment the quota is whole again.
//
// A policy with several limits has a list member for each, the first under the policy's name, the others under
// name/2, name/3 and so on: distinct, as they have to be, and never the name of another policy, which has no slash.
//
// buf is room for the values, which Set returns for the next call; nil will do.
func Set(h http.Header, buf []byte, d *limit.Decision) []byte {
	if d.FailedOpen || d.FailedClosed {
		return buf
	}
	tightest := limit.LimitStatus{Limit: d.Limit, Window: d.Window, Remaining: d.Remaining,
		RetryAfter: d.RetryAfter, ResetAfter: d.ResetAfter}
	single := [1]limit.LimitStatus{tightest}
	limits := d.Limits
	if len(limits) == 0 {
		limits = single[:]
	}

	// All values are written into one buffer and cut out of one string.
	b := buf[:0]
	for i := range limits {
		if l := &limits[i]; l.Limit != algo.Unlimited {
			b = appendMember(b, 0, d.Policy, i)
			b = appendInt(b, ";q=", fieldInt(l.Limit))
			if l.Window > 0 {
				b = appendInt(b, ";w=", RoundUp(l.Window, time.Second))
			}
		}
	}
	if len(b) == 0 {
		return b
	}
	policies := len(b)
	for i := range limits {
		if l := &limits[i]; l.Limit != algo.Unlimited {
			b = appendMember(b, policies, d.Policy, i)
			b = appendInt(b, ";r=", fieldInt(l.Remaining))
			if t := resetSeconds(d, l); t > 0 {
				b = appendInt(b, ";t=", t)
			}
		}
	}
	remains := len(b)
	b = strconv.AppendInt(b, tightest.Limit, 10)
	lim := len(b)
	b = strconv.AppendInt(b, tightest.Remaining, 10)
	remaining := len(b)
	b = strconv.AppendInt(b, resetSeconds(d, &tightest), 10)

	if d.NearLimit {
		h[NearLimit] = yes
	}
	if d.Banned {
		h[Banned] = yes
	}

	all := string(b)
	values := []string{all[:policies], all[policies:remains], all[remains:lim], all[lim:remaining], all[remaining:]}
	h["RateLimit-Policy"] = values[0:1:1]
	h["RateLimit"] = values[1:2:2]
	h["X-RateLimit-Limit"] = values[2:3:3]
	h["X-RateLimit-Remaining"] = values[3:4:4]
	h["X-RateLimit-Reset"] = values[4:5:5]
	return b
}

// resetSeconds is the t of one limit, 0 for none: a limit that let the request pass while another refused it has no
// moment to wait for.
func resetSeconds(d *limit.Decision, l *limit.LimitStatus) int64 {
	if d.Allowed || l.RetryAfter == algo.Never {
		return RoundUp(l.ResetAfter, time.Second)
	}
	return RoundUp(l.RetryAfter, time.Second)
}

// appendMember begins the list member of the policy's i-th limit, in a list that starts at from. The name is a string
// of a structured field, whatever it holds: printable ASCII, with quotes and backslashes escaped.
func appendMember(b []byte, from int, name string, i int) []byte {
	if len(b) > from {
		b = append(b, ", "...)
	}
	b = append(b, '"')
	for _, c := range []byte(name) {
		switch {
		case c == '"', c == '\\':
			b = append(b, '\\', c)
		case c >= ' ' && c <= '~':
			b = append(b, c)
		}
	}
	if i > 0 {
		b = appendInt(b, "/", int64(i+1))
	}
	return append(b, '"')
}

// fieldInt fits n into the range of a structured field's integer.
func fieldInt(n int64) int64 { return min(max(n, 0), maxField) }

func appendInt(b []byte, name string, n int64) []byte {
	return strconv.AppendInt(append(b, name...), n, 10)
}
