package httpapi

import (
	"crypto/rand"
	"log/slog"
	"net/http"
	"regexp"
)

// requestIDHeader carries the name by which the log and the caller call a request. It has nothing to do with the
// request_id of a check, which makes repeating it safe.
const requestIDHeader = "X-Request-Id"

// sane are the ids that are taken from a caller: they are repeated in the answer and in the log.
var sane = regexp.MustCompile(`^[A-Za-z0-9_.:/+=-]{1,128}$`)

// RequestID returns a caller's id of a request when it is 1 to 128 letters, digits and -_.:/+=, and otherwise a fresh one.
func RequestID(given string) string {
	if sane.MatchString(given) {
		return given
	}
	return rand.Text()
}

// echoRequestID gives a request that brings an id the same one back.
func echoRequestID(w http.ResponseWriter, r *http.Request) {
	if ids := r.Header[requestIDHeader]; len(ids) == 1 && sane.MatchString(ids[0]) {
		w.Header()[requestIDHeader] = ids
	}
}

// identify gives an answer an id that has none yet: one that somebody may look for in the log.
func identify(w http.ResponseWriter) string {
	id := RequestID(w.Header().Get(requestIDHeader))
	w.Header().Set(requestIDHeader, id)
	return id
}

// logProblem writes down why a request got no decision. What callers get wrong is for who looks into it: at debug, since
// otherwise they could fill the log.
func (x *exchange) logProblem(p *problem) {
	id := identify(x.w)
	level, message := slog.LevelDebug, "http request rejected"
	if p.cause != nil {
		level, message = slog.LevelError, "http request failed"
	}
	if !x.Logger.Enabled(x.r.Context(), level) {
		return
	}
	attrs := []slog.Attr{slog.String("request_id", id), slog.Int("status", p.status), slog.String("endpoint", x.r.Pattern)}
	if p.field != "" {
		attrs = append(attrs, slog.String("field", p.field))
	}
	if p.cause != nil {
		attrs = append(attrs, slog.Any("error", p.cause))
	}
	x.Logger.LogAttrs(x.r.Context(), level, message, attrs...)
}
