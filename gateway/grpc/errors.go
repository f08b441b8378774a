package grpc

import (
	"errors"

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
	if e, ok := errors.AsType[*limit.Error](err); ok {
		err = limit.NewError(e.Kind, wire.Field(e.Field), e.Message)
	}
	return wire.Status(err)
}

// inBatch returns the error of check i, of n, for an answer to all of them. One that is about no field may be anybody's.
func inBatch(err error, i, n int) error {
	if e, ok := errors.AsType[*limit.Error](err); ok && e.Field != "" {
		return e.In(i, n)
	}
	return err
}

// errorOf returns an error of the service as what it is; nil for nil.
func errorOf(err error) *limit.Error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*limit.Error](err); ok {
		return e
	}
	return &limit.Error{Kind: limit.Unavailable, Message: err.Error()}
}
