package httpapi

import (
	"cmp"
	"context"
	"net/http"
	"strings"

	"github.com/weirlimit/weir/auth"
)

const (
	// maxForeignBody bounds the body of a request to another front end, in bytes.
	maxForeignBody = 256 << 10
	// perForeignByte is what a byte of such a body takes when it is decoded: an empty element of a list has three
	// bytes.
	perForeignByte = 64
)

// Foreign is a route of another front end. The front end answers its own errors; the API answers callers without Role.
type Foreign struct {
	Method, Path string
	Role         auth.Role // that callers need
	// Answer answers a request. body is empty for any method but POST. err is the error of reading the body: an
	// *http.MaxBytesError when it is longer than 256 KiB.
	Answer func(ctx context.Context, body []byte, err error) (status int, contentType string, answer []byte)
}

// foreign returns the handler of another front end's route. It waits for the memory that the body may be decoded into.
func (a *api) foreign(f Foreign) http.HandlerFunc {
	return a.handler(func(x *exchange) {
		x.in.Reset()
		var err error
		if f.Method == http.MethodPost {
			if p := cmp.Or(encoding(x.r.Header), fromPage(x.r.Header)); p != nil {
				x.problem(p)
				return
			}
			err = x.read(maxForeignBody)
		}
		if err == nil {
			err = x.admit(int64(x.in.Len()) * (perByte + perForeignByte))
		}
		status, contentType, answer := f.Answer(x.r.Context(), x.in.Bytes(), err)
		x.answering(int64(x.in.Len() + len(answer)))
		x.w.Header().Set("Content-Type", contentType)
		x.w.Header().Set("X-Content-Type-Options", "nosniff")
		x.write(status, answer)
	})
}

// fromPage rejects a POST that a browser sends for a web page without the media type application/json. Callers that are
// no pages may leave Content-Type out. A browser sends application/json to another site only with that site's consent,
// but other types without.
func fromPage(h http.Header) *problem {
	for name := range h {
		if name == "Origin" || strings.HasPrefix(name, "Sec-Fetch-") {
			return mediaType(h)
		}
	}
	return nil
}
