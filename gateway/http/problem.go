package httpapi

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"strings"

	"github.com/weirlimit/weir/limit"
)

// problemTypes is the URL of the documentation of problems. An anchor for the status follows.
const problemTypes = "https://github.com/weirlimit/weir/blob/main/gateway/http/PROBLEMS.md#"

// problem is an answer other than a decision. Each status has one problem type.
type problem struct {
	status  int
	field   string // name of the request's field, as in the request; empty: none
	message string // without the field's name
	cause   error  // for the log, of an internal error; nil otherwise
}

// problemBody is a problem document (RFC 9457).
type problemBody struct {
	Type   string `json:"type"`
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail"`
	Field  string `json:"field,omitempty"`
}

// problemKinds has the anchor and title of each status.
var problemKinds = map[int]struct{ anchor, title string }{
	http.StatusBadRequest:            {"invalid", "The request is not valid"},
	http.StatusUnauthorized:          {"unauthenticated", "It is not clear who is asking"},
	http.StatusForbidden:             {"denied", "The caller may not do this"},
	http.StatusNotFound:              {"not-found", "There is no such thing"},
	http.StatusMethodNotAllowed:      {"method-not-allowed", "The method is not allowed here"},
	http.StatusRequestEntityTooLarge: {"too-large", "The request is too large"},
	http.StatusMisdirectedRequest:    {"misdirected", "The request is for another host"},
	http.StatusTooManyRequests:       {"refused", "Too many requests"}, // by forward-auth only
	http.StatusUnsupportedMediaType:  {"unsupported-media-type", "The body has to be JSON"},
	http.StatusServiceUnavailable:    {"unavailable", "The answer cannot be had at the moment"},
	http.StatusInternalServerError:   {"internal", "The node made a mistake"},
}

// statuses maps the kinds of a Service's errors to statuses.
var statuses = map[limit.Kind]int{
	limit.Invalid: http.StatusBadRequest, limit.NotFound: http.StatusNotFound,
	limit.TooLarge: http.StatusRequestEntityTooLarge, limit.Unavailable: http.StatusServiceUnavailable,
	limit.Denied: http.StatusForbidden, limit.Unauthenticated: http.StatusUnauthorized,
}

func (p *problem) body() problemBody {
	b := problemBody{Status: p.status, Detail: p.message, Field: p.field}
	if p.field != "" {
		b.Detail = p.field + ": " + p.message
	}
	kind, ok := problemKinds[p.status]
	if !ok {
		kind = problemKinds[http.StatusInternalServerError]
	}
	b.Title = kind.title
	b.Type = problemTypes + kind.anchor
	return b
}

// ofElement adds the list and index to the field of an error about element i, unless the Service has done so.
func (p *problem) ofElement(list string, i int) {
	if p.field != "" && !strings.HasPrefix(p.field, list+"[") {
		p.field = list + "[" + strconv.Itoa(i) + "]." + p.field
	}
}

func invalid(field, message string) *problem {
	return &problem{status: http.StatusBadRequest, field: field, message: message}
}

// problemOf converts an error of the Service. An error that is neither a *limit.Error nor the context's is a defect:
// its text goes to the log only.
func problemOf(err error) *problem {
	var e *limit.Error
	switch {
	case errors.As(err, &e) && statuses[e.Kind] != 0:
		field := strings.TrimSuffix(e.Field, ".") // the Service names an element without a field "checks[3]."
		if before, calendar := strings.CutSuffix(field, "limit.period"); calendar {
			field = before + "limit.window"
		}
		return &problem{status: statuses[e.Kind], field: field, message: e.Message}
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return &problem{status: http.StatusServiceUnavailable, message: "the request ended before there was an answer"}
	default:
		return internal(err)
	}
}

func internal(err error) *problem {
	return &problem{status: http.StatusInternalServerError, message: "the node's log says more", cause: err}
}

// unbatched removes the index from an error's field, for requests that have one check.
func unbatched(err error) error {
	var e *limit.Error
	if !errors.As(err, &e) {
		return err
	}
	_, _, field := e.Element()
	return limit.NewError(e.Kind, field, e.Message)
}

func (x *exchange) problem(p *problem) {
	x.w.Header().Set("X-Content-Type-Options", "nosniff")
	x.Problem(p.status)
	x.logProblem(p)
	b := p.body()
	x.json(p.status, "application/problem+json", &b)
}
