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
	for i, q := range qs {
		checks[i] = limit.Check{Target: q.service(), Cost: q.cost, Partial: q.partial, RequestID: q.requestID}
	}
	return checks
}

func (s *service) checkAll(ctx context.Context, qs []question) (AllDecision, error) {
	all, err := s.svc.CheckAll(ctx, serviceChecks(qs))
	if err != nil {
		return AllDecision{}, serviceError(err)
	}
	out := AllDecision{Allowed: all.Allowed, Delay: all.Delay, Decisions: make([]Decision, len(all.Decisions))}
	for i := range all.Decisions {
		out.Decisions[i] = serviceDecision(&all.Decisions[i])
	}
	return out, nil
}

func (s *service) check(ctx context.Context, qs []question, answers []answer, within time.Duration) error {
	if within > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, within)
		defer cancel()
	}
	results, err := s.svc.Check(ctx, serviceChecks(qs))
	if err != nil {
		return serviceError(err)
	}
	undecided := 0
	for i := range results {
		if results[i].Err != nil {
			answers[i] = answer{Result: Result{Err: serviceError(results[i].Err)}}
			undecided++
			continue
		}
		answers[i] = answer{Result{Decision: serviceDecision(&results[i].Decision)}, results[i].RememberFor}
	}
	if undecided == len(answers) {
		return answers[0].Err // as a node does
	}
	return nil
}

func (s *service) acquire(ctx context.Context, q question, ttl time.Duration) (held, error) {
	d, err := s.svc.Acquire(ctx, limit.Acquire{Target: q.service(), Cost: q.cost, TTL: ttl, RequestID: q.requestID})
	if err != nil {
		return held{}, serviceError(err)
	}
	return held{Decision: serviceDecision(&d), id: d.LeaseID}, nil
}

func (s *service) renew(ctx context.Context, t target, id string, ttl time.Duration) (time.Duration, error) {
	left, err := s.svc.Renew(ctx, t.service(), id, ttl)
	return left, serviceError(err)
}

func (s *service) release(ctx context.Context, t target, id string) error {
	_, err := s.svc.Release(ctx, t.service(), id)
	return serviceError(err)
}

func (q *question) amount(use Usage) limit.Amount {
	if use != nil {
		return limit.Amount{Usage: limit.Usage(use)}
	}
	return limit.Amount{Cost: q.cost}
}

func (q *question) reserve(r *reserving) limit.Reserve {
	return limit.Reserve{
		Target: q.service(), Amount: q.amount(r.usage), Estimate: r.estimate, Class: r.class, TTL: r.ttl, RequestID: q.requestID,
	}
}

func (s *service) reserve(ctx context.Context, q question, r *reserving) (held, error) {
	d, err := s.svc.Reserve(ctx, q.reserve(r))
	if err != nil {
		return held{}, serviceError(err)
	}
	return held{Decision: serviceDecision(&d), id: d.ReservationID}, nil
}

func (s *service) reserveAll(ctx context.Context, qs []question, rs []reserving) (AllDecision, []string, error) {
	asks := make([]limit.Reserve, len(qs))
	for i := range qs {
		asks[i] = qs[i].reserve(&rs[i])
	}
	all, err := s.svc.ReserveAll(ctx, asks)
	if err != nil {
		return AllDecision{}, nil, serviceError(err)
	}
	out, ids := AllDecision{Allowed: all.Allowed, Delay: all.Delay}, make([]string, len(all.Decisions))
	for i := range all.Decisions {
		out.Decisions = append(out.Decisions, serviceDecision(&all.Decisions[i]))
		ids[i] = all.Decisions[i].ReservationID
	}
	return out, ids, nil
}

func (s *service) extend(ctx context.Context, q question, id string, use Usage, ttl time.Duration) (Decision, error) {
	d, err := s.svc.Extend(ctx, limit.Extend{Target: q.service(), Amount: q.amount(use), ReservationID: id, TTL: ttl, RequestID: q.requestID})
	return serviceDecision(&d), serviceError(err)
}

func (s *service) settle(ctx context.Context, t target, id string, how *settling) (Settled, error) {
	q := question{target: t, cost: how.cost}
	got, err := s.svc.Commit(ctx, limit.Commit{
		Target: t.service(), Amount: q.amount(how.usage), ReservationID: id, Exact: how.exact, Class: how.class,
	})
	return Settled(got), serviceError(err)
}

func (s *service) charge(ctx context.Context, q question, use Usage) (Decision, error) {
	d, err := s.svc.Charge(ctx, limit.Charge{Target: q.service(), Amount: q.amount(use), RequestID: q.requestID})
	return serviceDecision(&d), serviceError(err)
}

func (s *service) refund(ctx context.Context, t target, units int64, requestID string) (int64, error) {
	n, err := s.svc.Refund(ctx, t.service(), units, requestID)
	return n, serviceError(err)
}

func (s *service) reset(ctx context.Context, t target) error {
	return serviceError(s.svc.Reset(ctx, t.service()))
}

func (s *service) ready(context.Context) error { return nil }

func (s *service) close() error {
	s.stop()
	return nil
}

func (t *target) service() limit.Target {
	return limit.Target{Policy: t.policy, Limit: t.limit, Namespace: t.namespace, Key: t.key}
}

func serviceDecision(d *limit.Decision) (out Decision) {
	fillDecision(&out, d)
	return out
}

// fillDecision writes d to *out, which is zero before, field by field: see limiter.conclusion.
func fillDecision(out *Decision, d *limit.Decision) {
	out.Policy = d.Policy
	out.Allowed = d.Allowed
	out.Granted = d.Granted
	out.Limit = d.Limit
	out.Window = d.Window
	out.Remaining = d.Remaining
	out.RetryAfter = d.RetryAfter
	out.ResetAfter = d.ResetAfter
	out.Delay = d.Delay
	out.Shadow = d.Shadow
	out.Degraded = d.Degraded
	out.FailedOpen = d.FailedOpen
	out.FailedClosed = d.FailedClosed
	for _, s := range d.Limits {
		out.Limits = append(out.Limits, LimitStatus(s))
	}
}

// serviceError turns a Service's error into the client's.
func serviceError(err error) error {
	var e *limit.Error
	if !errors.As(err, &e) {
		return err
	}
	out := &Error{Field: e.Field, Message: e.Message}
	switch e.Kind {
	case limit.Invalid:
		out.Kind = ErrInvalid
	case limit.NotFound:
		out.Kind = ErrNotFound
	case limit.TooLarge:
		out.Kind = ErrTooLarge
	default:
		out.Kind = ErrUnavailable
	}
	return out
}
