package client

import (
	"context"
	"errors"
	"time"

	"github.com/weirlimit/weir/limit"
)

// service decides in this process.
type service struct {
	limit.Service
	stop func() // ends it
}

// New returns a Client that asks svc, a Service in this process, and calls stop when it is closed. It has no timeout, no retry
// and no breaker: nothing here can be slow or out of reach. Package client/local makes a Service of policies alone.
func New(svc limit.Service, stop func()) *Client {
	c := newClient(&service{svc, stop}, options{})
	c.preparer, _ = svc.(limit.Preparer)
	return c
}

func (s *service) check(ctx context.Context, qs []question, answers []Result, within time.Duration) error {
	if within > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, within)
		defer cancel()
	}
	results, err := s.Check(ctx, checksOf(qs))
	if err != nil {
		return callError(err)
	}
	undecided := 0
	for i := range results {
		if answers[i] = results[i]; answers[i].Err != nil {
			answers[i] = Result{Err: callError(answers[i].Err)}
			undecided++
		}
	}
	if undecided == len(answers) {
		return answers[0].Err // as a node does
	}
	return nil
}

func (s *service) ready(context.Context) error { return nil }

func (s *service) close() error {
	s.stop()
	return nil
}

// callError turns an error of a Service into the client's.
func callError(err error) error {
	if e, ok := errors.AsType[*limit.Error](err); ok {
		return serviceError(e)
	}
	return err
}

// serviceError is callError for an error of a Service's own; nil for nil.
func serviceError(e *limit.Error) error {
	if e == nil {
		return nil
	}
	out := &Error{Kind: ErrUnavailable, Field: e.Field, Message: e.Message}
	switch e.Kind {
	case limit.Invalid:
		out.Kind = ErrInvalid
	case limit.NotFound:
		out.Kind = ErrNotFound
	case limit.TooLarge:
		out.Kind = ErrTooLarge
	case limit.Denied:
		out.Kind = ErrDenied
	}
	return out
}
