package grpc

import (
	"errors"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/rpc/wire"
)

// statusOf turns an error of the service into a gRPC status, whose message begins with the field's name in weir.v1.
func statusOf(err error) error {
	if e, ok := errors.AsType[*limit.Error](err); ok {
		err = wire.Named(e)
	}
	return wire.Status(err)
}

// inBatch returns the error of check i, of n, for an answer to all of them. One that is about no field may be of any of them.
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
