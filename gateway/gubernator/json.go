package gubernator

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	pb "github.com/weirlimit/weir/gateway/gubernator/gubernatorpb"
	"github.com/weirlimit/weir/rpc/wire"
)

// As Gubernator's gateway: unknown fields are ignored; the answer has proto names and all fields.
var (
	read  = protojson.UnmarshalOptions{DiscardUnknown: true}
	write = protojson.MarshalOptions{UseProtoNames: true, EmitUnpopulated: true}
)

// AnswerGetRateLimits answers POST /v1/GetRateLimits. Like Gubernator's gateway it answers 200 whatever the statuses
// are, and an error as a JSON object of code, message and details. err is the error of reading the body.
func (s *Server) AnswerGetRateLimits(ctx context.Context, body []byte,
	err error) (status int, contentType string, answer []byte) {
	in := new(pb.GetRateLimitsReq)
	_, tooLarge := errors.AsType[*http.MaxBytesError](err)
	switch {
	case tooLarge:
		err = errBody
	case err != nil:
		err = malformed("the body cannot be read")
	case len(bytes.TrimSpace(body)) == 0: // as in Gubernator's gateway, no requests
	case !utf8.Valid(body):
		err = malformed("the body is not valid UTF-8")
	default:
		if bad := read.Unmarshal(body, in); bad != nil {
			err = malformed("the body is not a GetRateLimitsReq in JSON: " + wire.Reason(bad))
		}
	}
	var out proto.Message
	if err == nil {
		out, err = s.GetRateLimits(ctx, in)
	}
	return answered(out, err)
}

func malformed(message string) error { return status.Error(codes.InvalidArgument, message) }

var errBody = errors.New("the body is larger than 256 KiB")

// AnswerHealthCheck answers GET /v1/HealthCheck.
func (s *Server) AnswerHealthCheck(ctx context.Context, _ []byte,
	_ error) (status int, contentType string, answer []byte) {
	out, err := s.HealthCheck(ctx, nil)
	return answered(out, err)
}

// AnswerLiveCheck answers GET /v1/LiveCheck.
func (s *Server) AnswerLiveCheck(ctx context.Context, _ []byte,
	_ error) (status int, contentType string, answer []byte) {
	out, err := s.LiveCheck(ctx, nil)
	return answered(out, err)
}

// answered encodes an answer or an error.
func answered(out proto.Message, err error) (httpStatus int, contentType string, text []byte) {
	httpStatus = http.StatusOK
	if err == nil {
		if text, err = write.Marshal(out); err != nil {
			err = status.Error(codes.Internal, "the answer cannot be written")
		}
	}
	if err != nil {
		httpStatus, text = failure(err)
	}
	return httpStatus, "application/json", text
}

// statuses maps the codes of errors to statuses; 499 is nginx's for a caller that has closed the connection.
var statuses = map[codes.Code]int{
	codes.InvalidArgument: http.StatusBadRequest, codes.OutOfRange: http.StatusBadRequest,
	codes.PermissionDenied: http.StatusForbidden, codes.Unavailable: http.StatusServiceUnavailable,
	codes.DeadlineExceeded: http.StatusGatewayTimeout, codes.Canceled: 499,
}

// failure encodes an error as Gubernator's gateway (grpc-gateway) does.
func failure(err error) (httpStatus int, text []byte) {
	st := status.Convert(err)
	code := st.Code()
	httpStatus = cmp.Or(statuses[code], http.StatusInternalServerError)
	if errors.Is(err, errBody) {
		httpStatus, code = http.StatusRequestEntityTooLarge, codes.ResourceExhausted
	}
	text, _ = json.Marshal(struct { // cannot fail
		Code    codes.Code `json:"code"`
		Message string     `json:"message"`
		Details []string   `json:"details"`
	}{code, st.Message(), []string{}})
	return httpStatus, text
}
