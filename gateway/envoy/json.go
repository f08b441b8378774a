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

// AnswerJSON answers the request that is a POST's body in JSON, as the reference's /json does: 200 within the limits, 429 over one of
// them, each with the response; 400, in plain text, what cannot be read or decided. Beyond the reference, it says why, and answers 413
// bodies that are too large, 403 what the caller may not ask and 503 what cannot be decided now. err says why there is no body.
func (s *Service) AnswerJSON(ctx context.Context, body []byte, err error) (code int, contentType string, answer []byte) {
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

// fail is a failure's answer, with what the service says of it, if it says something.
func fail(code int, why error) (int, string, []byte) {
	text := http.StatusText(code)
	if why != nil {
		text = status.Convert(why).Message()
	}
	return code, "text/plain; charset=utf-8", []byte(text + "\n")
}
