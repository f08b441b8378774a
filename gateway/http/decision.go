package httpapi

import (
	"net/http"
	"strconv"
	"time"

	"github.com/go-json-experiment/json/jsontext"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/quotaheader"
	"github.com/weirlimit/weir/limit"
)

// MarshalDecision returns a decision in the JSON of POST /v1/check.
func MarshalDecision(d *limit.Decision) []byte { return appendDecision(nil, d) }

// appendDecision appends d as JSON. It does not use the JSON library, for speed; a test compares the two.
func appendDecision(b []byte, d *limit.Decision) []byte {
	b = appendBool(b, `{"allowed":`, d.Allowed)
	b = appendInt(b, `,"granted":`, d.Granted)
	b = appendInt(b, `,"limit":`, d.Limit)
	b = appendInt(b, `,"remaining":`, d.Remaining)
	if wait, ok := quotaheader.RetryAfter(d); ok {
		b = appendInt(b, `,"retry_after_ms":`, quotaheader.RoundUp(wait, time.Millisecond))
	}
	b = appendInt(b, `,"reset_after_ms":`, quotaheader.RoundUp(d.ResetAfter, time.Millisecond))
	b = appendInt(b, `,"delay_ms":`, quotaheader.RoundUp(d.Delay, time.Millisecond))
	b = appendString(b, `,"policy":`, d.Policy)
	b = appendBool(b, `,"shadow":`, d.Shadow)
	b = appendBool(b, `,"degraded":`, d.Degraded)
	b = appendBool(b, `,"failed_open":`, d.FailedOpen)
	b = appendBool(b, `,"failed_closed":`, d.FailedClosed)
	if d.RetryAfterEstimated {
		b = append(b, `,"retry_after_estimated":true`...)
	}
	if d.Banned {
		b = append(b, `,"banned":true`...)
	}
	if d.NearLimit {
		b = append(b, `,"near_limit":true`...)
	}
	if d.RequestID != "" {
		b = appendString(b, `,"request_id":`, d.RequestID)
	}
	if d.LeaseID != "" {
		b = appendString(b, `,"lease_id":`, d.LeaseID)
	}
	if d.ReservationID != "" {
		b = appendString(b, `,"reservation_id":`, d.ReservationID)
	}
	for i := range d.Limits {
		if i == 0 {
			b = append(b, `,"limits":[`...)
		} else {
			b = append(b, ',')
		}
		b = appendLimitStatus(b, &d.Limits[i])
		if i == len(d.Limits)-1 {
			b = append(b, ']')
		}
	}
	return append(b, '}')
}

func appendLimitStatus(b []byte, l *limit.LimitStatus) []byte {
	b = appendInt(b, `{"limit":`, l.Limit)
	if l.Window > 0 {
		b = appendInt(b, `,"window_ms":`, quotaheader.RoundUp(l.Window, time.Millisecond))
	}
	b = appendInt(b, `,"remaining":`, l.Remaining)
	if l.RetryAfter != algo.Never {
		b = appendInt(b, `,"retry_after_ms":`, quotaheader.RoundUp(l.RetryAfter, time.Millisecond))
	}
	b = appendInt(b, `,"reset_after_ms":`, quotaheader.RoundUp(l.ResetAfter, time.Millisecond))
	return append(b, '}')
}

func appendInt(b []byte, name string, n int64) []byte {
	return strconv.AppendInt(append(b, name...), n, 10)
}

func appendBool(b []byte, name string, v bool) []byte {
	return strconv.AppendBool(append(b, name...), v)
}

func appendString(b []byte, name, s string) []byte {
	// The error says that AppendQuote has replaced invalid UTF-8, which is all that an answer can do about it.
	b, _ = jsontext.AppendQuote(append(b, name...), s)
	return b
}

// statusOf returns the HTTP status of a decision. A peek is 200, even when it is refused, because it has got its
// answer.
func statusOf(d *limit.Decision, peek bool) int {
	switch {
	case d.FailedClosed:
		return http.StatusServiceUnavailable
	case d.Allowed, peek:
		return http.StatusOK
	}
	return http.StatusTooManyRequests
}
