package client

import (
	"context"
	"errors"
	"time"

	"github.com/weirlimit/weir/limit"
)

// service decides in this process.
type service struct {
	svc  limit.Service
	stop func() // ends svc
}

// New returns a Client that asks svc, a Service in this process, and calls stop when it is closed. It has no timeout, no retry
// and no breaker: nothing here can be slow or out of reach. Package client/local makes a Service of policies alone.
func New(svc limit.Service, stop func()) *Client {
	c := newClient(&service{svc: svc, stop: stop}, options{})
	c.preparer, _ = svc.(limit.Preparer)
	return c
}

func serviceChecks(qs []question) []limit.Check {
	checks := make([]limit.Check, len(qs))
	for i := range qs {
		checks[i] = qs[i].check()
	}
	return checks
}

func (s *service) checkAll(ctx context.Context, qs []question) (AllDecision, error) {
	all, err := s.svc.CheckAll(ctx, serviceChecks(qs))
	return all, callError(err)
}

func (s *service) check(ctx context.Context, qs []question, answers []Result, within time.Duration) error {
	if within > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, within)
		defer cancel()
	}
	results, err := s.svc.Check(ctx, serviceChecks(qs))
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

func (s *service) acquire(ctx context.Context, q question, ttl time.Duration) (Decision, error) {
	d, err := s.svc.Acquire(ctx, limit.Acquire{Target: q.Target, Cost: q.cost, TTL: ttl, RequestID: q.requestID})
	return d, callError(err)
}

func (s *service) renew(ctx context.Context, t target, id string, ttl time.Duration) (time.Duration, error) {
	left, err := s.svc.Renew(ctx, t.Target, id, ttl)
	return left, callError(err)
}

func (s *service) release(ctx context.Context, t target, id string) error {
	_, err := s.svc.Release(ctx, t.Target, id)
	return callError(err)
}

func (q *question) amount(use Usage) limit.Amount {
	if use != nil {
		return limit.Amount{Usage: limit.Usage(use)}
	}
	return limit.Amount{Cost: q.cost}
}

func (q *question) reserve(r *reserving) limit.Reserve {
	return limit.Reserve{
		Target: q.Target, Amount: q.amount(r.usage), Estimate: r.estimate, Class: r.class, TTL: r.ttl, RequestID: q.requestID,
	}
}

func (s *service) reserve(ctx context.Context, q question, r *reserving) (Decision, error) {
	d, err := s.svc.Reserve(ctx, q.reserve(r))
	return d, callError(err)
}

func (s *service) reserveAll(ctx context.Context, qs []question, rs []reserving) (AllDecision, error) {
	asks := make([]limit.Reserve, len(qs))
	for i := range qs {
		asks[i] = qs[i].reserve(&rs[i])
	}
	all, err := s.svc.ReserveAll(ctx, asks)
	return all, callError(err)
}

func (s *service) extend(ctx context.Context, q question, id string, use Usage, ttl time.Duration) (Decision, error) {
	d, err := s.svc.Extend(ctx, limit.Extend{Target: q.Target, Amount: q.amount(use), ReservationID: id, TTL: ttl, RequestID: q.requestID})
	return d, callError(err)
}

func (s *service) settle(ctx context.Context, t target, id string, how *settling) (Settled, error) {
	q := question{target: t, cost: how.cost}
	got, err := s.svc.Commit(ctx, limit.Commit{
		Target: t.Target, Amount: q.amount(how.usage), ReservationID: id, Exact: how.exact, Class: how.class,
	})
	return Settled(got), callError(err)
}

func (s *service) charge(ctx context.Context, q question, use Usage) (Decision, error) {
	d, err := s.svc.Charge(ctx, limit.Charge{Target: q.Target, Amount: q.amount(use), RequestID: q.requestID})
	return d, callError(err)
}

func (s *service) refund(ctx context.Context, t target, units int64, requestID string) (int64, error) {
	n, err := s.svc.Refund(ctx, t.Target, units, requestID)
	return n, callError(err)
}

func (s *service) reset(ctx context.Context, t target) error {
	return callError(s.svc.Reset(ctx, t.Target))
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
	}
	return out
}
