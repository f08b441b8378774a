package envoy

import (
	"context"
	"errors"
	"net/http"
	"unicode/utf8"

	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/weirlimit/weir/rpc/wire"
)

// AnswerJSON answers a POST whose body is a RateLimitRequest in JSON, as the reference's /json does: 200 within the
// limits and 429 over one of them, each with the response; 400 with plain text for a request that is malformed or
// cannot be decided. Other than the reference it says why, and answers 413 for a body that is too large, 403 for a
// denied caller and 503 when no decision can be had now. err is the error of reading the body.
func (s *Service) AnswerJSON(ctx context.Context, body []byte,
	err error) (code int, contentType string, answer []byte) {
	in := new(ratelimitv3.RateLimitRequest)
	if _, tooLarge := errors.AsType[*http.MaxBytesError](err); tooLarge {
		return fail(http.StatusRequestEntityTooLarge, nil)
	}
	if err != nil || !utf8.Valid(body) {
		return fail(http.StatusBadRequest, errors.New("the body cannot be read as UTF-8"))
	}
	if bad := protojson.Unmarshal(body, in); bad != nil {
		return fail(http.StatusBadRequest, errors.New("the body is not a RateLimitRequest in JSON: "+wire.Reason(bad)))
	}
	out, err := s.ShouldRateLimit(ctx, in)
	switch status.Code(err) {
	case codes.OK:
	case codes.PermissionDenied:
		return fail(http.StatusForbidden, err)
	case codes.Unavailable, codes.DeadlineExceeded:
		return fail(http.StatusServiceUnavailable, err)
	default:
		return fail(http.StatusBadRequest, err)
	}
	if answer, err = protojson.Marshal(out); err != nil {
		return fail(http.StatusInternalServerError, nil)
	}
	if code = http.StatusOK; out.OverallCode == ratelimitv3.RateLimitResponse_OVER_LIMIT {
		code = http.StatusTooManyRequests
	}
	return code, "application/json", answer
}

// fail makes the answer for a failure; why nil: the text is the status code's.
func fail(code int, why error) (int, string, []byte) {
	text := http.StatusText(code)
	if why != nil {
		text = status.Convert(why).Message()
	}
	return code, "text/plain; charset=utf-8", []byte(text + "\n")
}
