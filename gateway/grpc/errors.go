package grpcapi

import (
	"errors"

	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/wire"
)

// callerError is protoError for callers, who know the fields by their names in weir.v1.
func callerError(e *limit.Error, field func(string) string) *weirv1.Error {
	return &weirv1.Error{Code: int32(wire.Code(e.Kind)), Field: field(e.Field), Message: e.Message}
}

// statusOf turns an error of the service into a gRPC status, whose message begins with the field's name in weir.v1.
func statusOf(err error) error {
	var e *limit.Error
	if errors.As(err, &e) {
		return status.Error(wire.Code(e.Kind), limit.NewError(e.Kind, wire.Field(e.Field), e.Message).Error())
	}
	return status.FromContextError(err).Err()
}
