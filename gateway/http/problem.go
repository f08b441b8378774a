package httpapi

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"strings"

	"github.com/weirlimit/weir/limit"
)

// problemTypes is where a problem's type is explained; the status' own anchor follows.
const problemTypes = "https://github.com/weirlimit/weir/blob/main/gateway/http/PROBLEMS.md#"

// problem is an answer other than a decision. One status has one type.
type problem struct {
	status  int
	field   string // of the request, as it is spelled there; empty when none is to blame
	message string // without the field's name
	cause   error  // what the log is to say of a defect; nil otherwise
}

// problemBody is a problem document (RFC 9457).
type problemBody struct {
	Type   string `json:"type"`
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail"`
	Field  string `json:"field,omitempty"`
}

// problemKinds are the kinds of problems, by status.
var problemKinds = map[int]struct{ anchor, title string }{
	http.StatusBadRequest:            {"invalid", "The request is not valid"},
	http.StatusUnauthorized:          {"unauthenticated", "It is not clear who is asking"},
	http.StatusForbidden:             {"denied", "The caller may not do this"},
	http.StatusNotFound:              {"not-found", "There is no such thing"},
	http.StatusMethodNotAllowed:      {"method-not-allowed", "The method is not allowed here"},
	http.StatusRequestEntityTooLarge: {"too-large", "The request is too large"},
	http.StatusMisdirectedRequest:    {"misdirected", "The request is for another host"},
	http.StatusTooManyRequests:       {"refused", "Too many requests"}, // of forward-auth alone
	http.StatusUnsupportedMediaType:  {"unsupported-media-type", "The body has to be JSON"},
	http.StatusServiceUnavailable:    {"unavailable", "The answer cannot be had at the moment"},
	http.StatusInternalServerError:   {"internal", "The node made a mistake"},
}

// statuses are those of the kinds of a Service's errors.
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

// ofElement says that the field, if there is one, is that of element i of a list. The Service may have said so already.
func (p *problem) ofElement(list string, i int) {
	if p.field != "" && !strings.HasPrefix(p.field, list+"[") {
		p.field = list + "[" + strconv.Itoa(i) + "]." + p.field
	}
}

func invalid(field, message string) *problem {
	return &problem{status: http.StatusBadRequest, field: field, message: message}
}

// problemOf turns an error of the Service into a problem. Errors of other types break the Service's promise unless
// they are the context's; their text stays in the node's log.
func problemOf(err error) *problem {
	var e *limit.Error
	switch {
	case errors.As(err, &e) && statuses[e.Kind] != 0:
		field := strings.TrimSuffix(e.Field, ".") // of an element without a field of its own, the Service says "checks[3]."
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

// unbatched takes the place in a batch off the name of a field, for requests that are not one.
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
