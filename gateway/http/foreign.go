package httpapi

import (
	"cmp"
	"context"
	"net/http"
	"strings"

	"github.com/weirlimit/weir/auth"
)

const (
	// maxForeignBody is the longest body of a request of another front end, in bytes.
	maxForeignBody = 256 << 10
	// perForeignByte is what a byte of such a body may take when it is decoded: an empty element of a list has three.
	perForeignByte = 64
)

// Foreign is a route of another front end's protocol, whose errors it answers as that has them; who may not use it is answered as
// everywhere.
type Foreign struct {
	Method, Path string
	Role         auth.Role // that a caller needs
	// Answer answers a body, which is empty but for a POST. err says why there is none: an *http.MaxBytesError where it is longer than
	// 256 KiB.
	Answer func(ctx context.Context, body []byte, err error) (status int, contentType string, answer []byte)
}

// foreign is the handler of another front end's route. There is room to carry out what the body may be decoded into, until the answer begins.
func (a *api) foreign(f Foreign) http.HandlerFunc {
	return a.handler(func(x *exchange) {
		x.in.Reset()
		var err error
		if f.Method == http.MethodPost {
			if p := cmp.Or(encoding(x.r.Header), fromPage(x.r.Header)); p != nil {
				x.problem(p)
				return
			}
			err = &http.MaxBytesError{Limit: maxForeignBody}
			if x.r.ContentLength <= maxForeignBody { // of a larger one nothing has to be waited for
				_, err = x.in.ReadFrom(&countedBody{x, http.MaxBytesReader(x.w, x.r.Body, maxForeignBody)})
			}
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

// fromPage says what is wrong with a request that a browser sends for a page. Other front ends' callers may leave the Content-Type out. A
// page may not: a browser sends application/json to another site only if that allows it, and anything else without asking.
func fromPage(h http.Header) *problem {
	for name := range h {
		if name == "Origin" || strings.HasPrefix(name, "Sec-Fetch-") {
			return mediaType(h)
		}
	}
	return nil
}
