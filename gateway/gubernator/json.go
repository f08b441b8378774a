package gubernator

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	pb "github.com/weirlimit/weir/gateway/gubernator/gubernatorpb"
)

// maxBody is the largest body that is read, in bytes: an empty request is three of them, and takes fifty times as much when it is
// decoded.
const maxBody = 256 << 10

// Gubernator's gateway takes fields that it does not know, writes names as the protocol has them, and all of them.
var (
	read  = protojson.UnmarshalOptions{DiscardUnknown: true}
	write = protojson.MarshalOptions{UseProtoNames: true, EmitUnpopulated: true}
)

// ServeGetRateLimits answers POST /v1/GetRateLimits. Like Gubernator's gateway it answers 200 whatever the statuses say, and an error as
// a JSON object of code, message and details.
func (s *Server) ServeGetRateLimits(w http.ResponseWriter, r *http.Request) {
	in := new(pb.GetRateLimitsReq)
	var body []byte
	var err error
	if r.ContentLength <= maxBody { // of a larger one nothing has to be waited for
		body, err = io.ReadAll(io.LimitReader(r.Body, maxBody+1))
	}
	switch {
	case err != nil:
		err = status.Error(codes.InvalidArgument, "the body cannot be read")
	case len(body) > maxBody || r.ContentLength > maxBody:
		err = errBody
	case len(bytes.TrimSpace(body)) == 0: // asks for nothing, as there
	case !utf8.Valid(body):
		err = status.Error(codes.InvalidArgument, "the body is not valid UTF-8")
	default:
		if bad := read.Unmarshal(body, in); bad != nil {
			err = status.Error(codes.InvalidArgument, "the body is not a GetRateLimitsReq in JSON: "+reason(bad))
		}
	}
	var out proto.Message
	if err == nil {
		out, err = s.GetRateLimits(r.Context(), in)
	}
	respond(w, out, err)
}

// reason is what the parser says, and where, cut to what helps: it may repeat what the caller sent. Its prefix ends in one blank or another.
func reason(err error) string {
	const most = 200
	text := strings.TrimSpace(strings.TrimPrefix(err.Error(), "proto:"))
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "…"
	}
	return text
}

var errBody = errors.New("the body is larger than 256 KiB")

// ServeHealthCheck answers GET /v1/HealthCheck.
func (s *Server) ServeHealthCheck(w http.ResponseWriter, r *http.Request) {
	out, err := s.HealthCheck(r.Context(), nil)
	respond(w, out, err)
}

// ServeLiveCheck answers GET /v1/LiveCheck.
func (s *Server) ServeLiveCheck(w http.ResponseWriter, r *http.Request) {
	out, err := s.LiveCheck(r.Context(), nil)
	respond(w, out, err)
}

// respond writes an answer or an error.
func respond(w http.ResponseWriter, out proto.Message, err error) {
	httpStatus := http.StatusOK
	var text []byte
	if err == nil {
		if text, err = write.Marshal(out); err != nil {
			err = status.Error(codes.Internal, "the answer cannot be written")
		}
	}
	if err != nil {
		httpStatus, text = failure(err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(httpStatus)
	_, _ = w.Write(text) // whoever is gone gets nothing
}

// failure is an error as Gubernator's gateway (google.golang.org/grpc-gateway) writes it.
func failure(err error) (httpStatus int, text []byte) {
	st := status.Convert(err)
	httpStatus = http.StatusInternalServerError
	switch st.Code() {
	case codes.InvalidArgument, codes.OutOfRange:
		httpStatus = http.StatusBadRequest
	case codes.PermissionDenied:
		httpStatus = http.StatusForbidden
	case codes.Unavailable:
		httpStatus = http.StatusServiceUnavailable
	case codes.DeadlineExceeded:
		httpStatus = http.StatusGatewayTimeout
	case codes.Canceled:
		httpStatus = 499 // that the caller has closed the connection, and does not hear it
	}
	code := st.Code()
	if errors.Is(err, errBody) {
		httpStatus, code = http.StatusRequestEntityTooLarge, codes.ResourceExhausted
	}
	text, _ = json.Marshal(struct { // strings and numbers
		Code    codes.Code `json:"code"`
		Message string     `json:"message"`
		Details []string   `json:"details"`
	}{code, st.Message(), []string{}})
	return httpStatus, text
}
