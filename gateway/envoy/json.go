package envoy

import (
	"bytes"
	"io"
	"net/http"
	"unicode/utf8"

	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
)

// maxJSON is the largest body that ServeHTTP reads, in bytes: an empty descriptor is three of them, and takes fifty times as much when
// it is decoded.
const maxJSON = 256 << 10

// ServeHTTP answers the request that is a POST's body in JSON, as the reference's /json does: 200 within the limits, 429 over one of
// them, each with the response; 400, in plain text, what cannot be read or decided. Beyond the reference, it answers 413 bodies above
// 256 KiB, 403 what the caller may not ask and 503 what cannot be decided now.
func (s *Service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.ContentLength > maxJSON { // not a byte of it has to be waited for
		fail(w, http.StatusRequestEntityTooLarge)
		return
	}
	body, err := io.ReadAll(io.LimitReader(r.Body, maxJSON+1))
	in := new(ratelimitv3.RateLimitRequest)
	switch {
	case err != nil:
		fail(w, http.StatusBadRequest)
		return
	case len(body) > maxJSON:
		fail(w, http.StatusRequestEntityTooLarge)
		return
	case !utf8.Valid(body) || protojson.Unmarshal(body, in) != nil:
		fail(w, http.StatusBadRequest)
		return
	}
	out, err := s.ShouldRateLimit(r.Context(), in)
	if err != nil {
		code := http.StatusBadRequest
		switch status.Code(err) {
		case codes.PermissionDenied:
			code = http.StatusForbidden
		case codes.Unavailable, codes.DeadlineExceeded:
			code = http.StatusServiceUnavailable
		}
		fail(w, code)
		return
	}
	text, err := protojson.Marshal(out)
	if err != nil {
		fail(w, http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	if out.OverallCode == ratelimitv3.RateLimitResponse_OVER_LIMIT {
		w.WriteHeader(http.StatusTooManyRequests)
	}
	_, _ = bytes.NewReader(text).WriteTo(w) // whoever is gone gets nothing
}

func fail(w http.ResponseWriter, code int) { http.Error(w, http.StatusText(code), code) }
