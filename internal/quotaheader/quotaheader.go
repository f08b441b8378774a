// Package quotaheader writes the HTTP header fields of a decision that tell a caller how much of its quota is left:
// those of draft-ietf-httpapi-ratelimit-headers-10, the older X-RateLimit fields, and Retry-After. It does not choose
// the status of an answer.
package quotaheader

import (
	"net/http"
	"strconv"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
)

// RetryAfter returns how long to wait: 0 if the request was admitted; ok is false if it can never pass.
func RetryAfter(d *limit.Decision) (wait time.Duration, ok bool) {
	if d.Allowed {
		return 0, true
	}
	return d.RetryAfter, d.RetryAfter != algo.Never
}

// SetRetryAfter sets Retry-After for a refusal, in whole seconds rounded up: 1 if the decision failed closed, no field
// if the request can never pass.
func SetRetryAfter(h http.Header, d *limit.Decision) {
	if d.FailedClosed {
		h.Set("Retry-After", "1")
	} else if wait, ok := RetryAfter(d); ok && !d.Allowed {
		h.Set("Retry-After", strconv.FormatInt(RoundUp(wait, time.Second), 10))
	}
}

// RoundUp returns how many units cover d, so that a caller that waits for them does not come too early.
func RoundUp(d, unit time.Duration) int64 {
	if d <= 0 {
		return 0
	}
	return int64((d-1)/unit) + 1
}

// Result is the header field that says in one word what an answer means; the others are its values.
const (
	Result       = "Weir-Result"
	Admitted     = "admitted"
	Refused      = "refused"
	FailedOpen   = "failed_open"
	FailedClosed = "failed_closed"
	BadKey       = "bad_key" // the request has no valid key
)

// ResultOf returns the value of Result for a decision.
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

// NearLimit and Banned are header fields of decisions that are so, with the value "true".
const (
	NearLimit = "Weir-Near-Limit"
	Banned    = "Weir-Banned"
)

var yes = []string{"true"}

// maxField is the largest integer of a structured field (RFC 9651, section 3.3.1), which is less than the largest
// limit.
const maxField = 999_999_999_999_999

// Set sets the header fields that say how much is left: those of draft-ietf-httpapi-ratelimit-headers-10, the three
// older ones, and NearLimit and Banned. It sets none if there is no quota (unlimited) or it is not known (the decision
// failed open or closed).
//
// Windows are rounded up to whole seconds, because the draft has only these: a caller that paces itself by them is
// slower than it need be, never faster. For a bucket, the window is the time in which it fills, so that q per w is the
// lasting rate. The draft's t, "until additional quota is made available", is Retry-After for a limit that refuses,
// which it should not exceed. If no limit refuses, t is the time until the quota is whole again.
//
// A policy with several limits has a list member for each: the first under the policy's name, the others under name/2,
// name/3 and so on. These are distinct, as they must be, and never the name of another policy, because names have no
// slash. A ban refuses whatever a limit has left, so that under it all members have r and t of the decision.
//
// Set writes the values into buf, and returns it for the next call; buf may be nil.
func Set(h http.Header, buf []byte, d *limit.Decision) []byte {
	if d.FailedOpen || d.FailedClosed {
		return buf
	}
	tightest := limit.LimitStatus{Limit: d.Limit, Window: d.Window, Remaining: d.Remaining,
		RetryAfter: d.RetryAfter, ResetAfter: d.ResetAfter}
	limits := d.Limits
	if len(limits) == 0 {
		limits = []limit.LimitStatus{tightest}
	}

	// All values are written into one buffer and cut out of one string, to allocate once.
	var room [128]byte
	b, rest := buf[:0], room[:0]
	for i := range limits {
		l := &limits[i]
		if l.Limit == algo.Unlimited {
			continue
		}
		b = appendInt(appendMember(b, d.Policy, i), ";q=", fieldInt(l.Limit))
		if l.Window > 0 {
			b = appendInt(b, ";w=", RoundUp(l.Window, time.Second))
		}
		if d.Banned {
			l = &tightest
		}
		rest = appendInt(appendMember(rest, d.Policy, i), ";r=", fieldInt(l.Remaining))
		if t := resetSeconds(d, l); t > 0 {
			rest = appendInt(rest, ";t=", t)
		}
	}
	if len(b) == 0 {
		return b
	}
	policies := len(b)
	b = append(b, rest...)
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

// resetSeconds returns the t of one limit; 0: no t, because the limit let the request pass and another refused it.
func resetSeconds(d *limit.Decision, l *limit.LimitStatus) int64 {
	if d.Allowed || l.RetryAfter == algo.Never {
		return RoundUp(l.ResetAfter, time.Second)
	}
	return RoundUp(l.RetryAfter, time.Second)
}

// appendMember begins the list member of the policy's i-th limit. The name becomes a string of a structured field:
// other characters than printable ASCII are left out, quotes and backslashes are escaped.
func appendMember(b []byte, name string, i int) []byte {
	if len(b) > 0 {
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

// fieldInt returns n within the range of a structured field's integer.
func fieldInt(n int64) int64 { return min(max(n, 0), maxField) }

func appendInt(b []byte, name string, n int64) []byte {
	return strconv.AppendInt(append(b, name...), n, 10)
}
