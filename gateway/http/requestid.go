package httpapi

import (
	"crypto/rand"
	"log/slog"
	"net/http"
	"regexp"
)

// requestIDHeader has the id under which log and caller know a request. It is not the request_id of a check, by which a
// check can be repeated safely.
const requestIDHeader = "X-Request-Id"

// sane are the ids that are accepted from callers, since they are repeated in answers and logs.
var sane = regexp.MustCompile(`^[A-Za-z0-9_.:/+=-]{1,128}$`)

// RequestID returns a caller's id if it has 1 to 128 letters, digits and -_.:/+=, and otherwise a new one.
func RequestID(given string) string {
	if sane.MatchString(given) {
		return given
	}
	return rand.Text()
}

// echoRequestID sets the caller's id of a request in its answer.
func echoRequestID(w http.ResponseWriter, r *http.Request) {
	if ids := r.Header[requestIDHeader]; len(ids) == 1 && sane.MatchString(ids[0]) {
		w.Header()[requestIDHeader] = ids
	}
}

// identify returns the id of an answer, and gives it one if it has none, for a search in the log.
func identify(w http.ResponseWriter) string {
	id := RequestID(w.Header().Get(requestIDHeader))
	w.Header().Set(requestIDHeader, id)
	return id
}

// logProblem logs why a request got no decision. Callers' errors are logged at debug, because callers could fill the
// log otherwise.
func (x *exchange) logProblem(p *problem) {
	id := identify(x.w)
	level, message := slog.LevelDebug, "http request rejected"
	if p.cause != nil {
		level, message = slog.LevelError, "http request failed"
	}
	if !x.Logger.Enabled(x.r.Context(), level) {
		return
	}
	attrs := []slog.Attr{slog.String("request_id", id), slog.Int("status", p.status),
		slog.String("endpoint", x.r.Pattern)}
	if p.field != "" {
		attrs = append(attrs, slog.String("field", p.field))
	}
	if p.cause != nil {
		attrs = append(attrs, slog.Any("error", p.cause))
	}
	x.Logger.LogAttrs(x.r.Context(), level, message, attrs...)
}
