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
)

// AnswerJSON answers the request that is a POST's body in JSON, as the reference's /json does: 200 within the limits, 429 over one of
// them, each with the response; 400, in plain text, what cannot be read or decided. Beyond the reference, it answers 413 bodies that
// are too large, 403 what the caller may not ask and 503 what cannot be decided now. err says why there is no body.
func (s *Service) AnswerJSON(ctx context.Context, body []byte, err error) (code int, contentType string, answer []byte) {
	in := new(ratelimitv3.RateLimitRequest)
	if _, tooLarge := errors.AsType[*http.MaxBytesError](err); tooLarge {
		return fail(http.StatusRequestEntityTooLarge)
	}
	if err != nil || !utf8.Valid(body) || protojson.Unmarshal(body, in) != nil {
		return fail(http.StatusBadRequest)
	}
	out, err := s.ShouldRateLimit(ctx, in)
	switch status.Code(err) {
	case codes.OK:
	case codes.PermissionDenied:
		return fail(http.StatusForbidden)
	case codes.Unavailable, codes.DeadlineExceeded:
		return fail(http.StatusServiceUnavailable)
	default:
		return fail(http.StatusBadRequest)
	}
	if answer, err = protojson.Marshal(out); err != nil {
		return fail(http.StatusInternalServerError)
	}
	if code = http.StatusOK; out.OverallCode == ratelimitv3.RateLimitResponse_OVER_LIMIT {
		code = http.StatusTooManyRequests
	}
	return code, "application/json", answer
}

func fail(status int) (code int, contentType string, answer []byte) {
	return status, "text/plain; charset=utf-8", []byte(http.StatusText(status) + "\n")
}
