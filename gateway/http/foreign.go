package httpapi

import (
	"bytes"
	"io"
	"net/http"
	"strings"
)

const (
	// maxForeignBody is the longest body of a request of another front end, in bytes.
	maxForeignBody = 256 << 10
	// perForeignByte is what a byte of such a body may take when it is decoded: an empty element of a list has three.
	perForeignByte = 64
)

// foreign is the handler of another front end's route: its body has been read, within maxForeignBody, and there is room to carry out
// what it may be decoded into, until the answer begins. What is longer is handed on as it is, for the handler to reject.
func (a *api) foreign(handler http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if p := fromPage(r.Header); p != nil {
			a.writeProblem(w, r, p)
			return
		}
		s := a.scratch()
		defer a.recycle(s)
		s.in.Reset()
		_, err := s.in.ReadFrom(&countedBody{a, s, io.LimitReader(r.Body, maxForeignBody+1)})
		if err == nil && s.in.Len() <= maxForeignBody {
			err = a.admitBytes(r.Context(), s, int64(s.in.Len())*(perByte+perForeignByte))
		}
		body := io.Reader(bytes.NewReader(s.in.Bytes()))
		if err != nil {
			body = failed{err}
		}
		asked := *r
		asked.Body = io.NopCloser(body)
		handler(&answering{ResponseWriter: w, api: a, s: s}, &asked)
	}
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

// failed is a body that cannot be read.
type failed struct{ err error }

// Read implements io.Reader.
func (f failed) Read([]byte) (int, error) { return 0, f.err }

// answering is a response whose request makes way for others when it begins. What is written counts as waiting for the network.
type answering struct {
	http.ResponseWriter
	api   *api
	s     *scratch
	begun bool
}

// Unwrap is for http.ResponseController.
func (a *answering) Unwrap() http.ResponseWriter { return a.ResponseWriter }

// WriteHeader implements http.ResponseWriter.
func (a *answering) WriteHeader(status int) {
	a.begin()
	a.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (a *answering) Write(p []byte) (int, error) {
	a.begin()
	a.api.keep(a.s, int64(len(p)))
	return a.ResponseWriter.Write(p)
}

func (a *answering) begin() {
	if !a.begun {
		a.begun = true
		a.api.answering(a.s, int64(a.s.in.Len()))
	}
}
