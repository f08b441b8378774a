package grpc

import (
	"errors"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/rpc/wire"
)

// statusOf converts an error of the service to a gRPC status. Its message begins with the field's name in weir.v1.
func statusOf(err error) error {
	if e, ok := errors.AsType[*limit.Error](err); ok {
		err = wire.Named(e)
	}
	return wire.Status(err)
}

// inBatch names the element of a batch in the error of check i of n. It leaves an error without a field as it is,
// because such an error applies to all.
func inBatch(err error, i, n int) error {
	if e, ok := errors.AsType[*limit.Error](err); ok && e.Field != "" {
		return e.In(i, n)
	}
	return err
}

// errorOf returns an error of the service as a *limit.Error, of kind Unavailable if it is none; nil for nil.
func errorOf(err error) *limit.Error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*limit.Error](err); ok {
		return e
	}
	return &limit.Error{Kind: limit.Unavailable, Message: err.Error()}
}
