package grpc

import (
	"errors"

	"github.com/weirlimit/weir/algo"
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

// statusAbout is statusOf for an error about limits as asSent takes them.
func statusAbout(err error, limitOf func(element int) *algo.Limit) error {
	if e, ok := errors.AsType[*limit.Error](err); ok {
		err = asSent(e, limitOf)
	}
	return statusOf(err)
}

// asSent returns an error of the service with the field that the caller sent: the length of a calendar's window is its period, in
// weir.v1 a field of its own. limitOf returns the limit sent along with an element of the batch, or with the only one, 0; nil: none.
func asSent(e *limit.Error, limitOf func(element int) *algo.Limit) *limit.Error {
	list, i, field := e.Element()
	if field != "limit.window" {
		return e
	}
	if l := limitOf(i); l == nil || l.Period == 0 || l.Period == algo.Epoch {
		return e
	}
	return limit.NewError(e.Kind, "limit.period", e.Message).InList(list, i)
}

// errorAbout returns the error of one element of a list, about a limit that was sent along with it, if one was.
func errorAbout(err error, sent *algo.Limit) *weirv1.Error {
	e, _ := errors.AsType[*limit.Error](err) // as limit.Result and limit.SettledResult promise
	return callerError(asSent(e, func(int) *algo.Limit { return sent }), wire.Field)
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
