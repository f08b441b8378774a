package guard

import (
	"context"
	"fmt"
	"maps"
	"time"

	"github.com/weirlimit/weir/access"
	"github.com/weirlimit/weir/limiter"
)

// Service returns svc for those whom the Guard has let in at a door: each call is held to the roles, policies and
// namespaces of its caller, and a check of a batch that is not for the caller is answered by an error of its own. A
// context that did not come through the Guard is nobody's, and denied. Without an access file it is svc itself.
func (g *Guard) Service(door string, svc limiter.BatchService) limiter.BatchService {
	if g.cfg.List == nil {
		return svc
	}
	return &service{door: door, guard: g, next: svc}
}

type service struct {
	door  string
	guard *Guard
	next  limiter.BatchService
}

// caller returns who asks, or why nobody is known to.
func (s *service) caller(ctx context.Context, role access.Role) (*access.Caller, *limiter.Error) {
	from, ok := ctx.Value(sessionKey{}).(*session)
	denial := &access.Denial{Reason: access.NoCredentials, Message: "it is not known who asks"}
	var caller *access.Caller
	if ok {
		if caller, denial = s.guard.current(from); denial == nil {
			denial = s.guard.mayTake(caller, s.guard.list(), role, &from.evidence)
		}
	}
	if denial == nil {
		return caller, nil
	}
	if ok {
		s.guard.refused(s.door, denial, caller, from.evidence.from)
	}
	return nil, &limiter.Error{Kind: limiter.Denied, Message: denial.Message}
}

// target says whether a caller may use what a call is about. What names neither a policy nor a limit, or both, is for the
// Service to refuse.
func (s *service) target(ctx context.Context, c *access.Caller, t *limiter.Target) *limiter.Error {
	var field, what string
	switch {
	case t.Limit != nil && !c.MayUseNamespace(t.Namespace):
		field, what = "namespace", fmt.Sprintf("%s may not send limits along in the namespace %.100q", c.Name, t.Namespace)
	case t.Policy != "" && !c.MayUsePolicy(t.Policy):
		field, what = "policy", fmt.Sprintf("%s may not use the policy %.100q", c.Name, t.Policy)
	default:
		return nil
	}
	from, _ := ctx.Value(sessionKey{}).(*session)
	s.guard.refused(s.door, &access.Denial{Known: true, Reason: access.WrongPolicy, Message: what}, nil, from.evidence.from)
	return &limiter.Error{Kind: limiter.Denied, Field: field, Message: what}
}

// may says whether the one who asks may do so.
func (s *service) may(ctx context.Context, role access.Role, t *limiter.Target) error {
	c, denied := s.caller(ctx, role)
	if denied == nil {
		denied = s.target(ctx, c, t)
	}
	if denied != nil {
		return denied
	}
	return nil
}

// refusals are those of a batch's checks that are not for the caller.
func (s *service) refusals(ctx context.Context, c *access.Caller, checks []limiter.Check) (refused limiter.Refused) {
	for i := range checks {
		if e := s.target(ctx, c, &checks[i].Target); e != nil {
			if refused == nil {
				refused = make(limiter.Refused)
			}
			refused[i] = e
		}
	}
	return refused
}

// Begin implements limiter.BatchService.
func (s *service) Begin(ctx context.Context, b *limiter.Batch) (open []int, err *limiter.Error) {
	c, denied := s.caller(ctx, access.Check)
	if denied != nil {
		return nil, denied
	}
	b.Refused = s.refusals(ctx, c, b.Checks)
	return s.next.Begin(ctx, b)
}

// Finish implements limiter.BatchService.
func (s *service) Finish(ctx context.Context, b *limiter.Batch, open []int) {
	s.next.Finish(ctx, b, open)
}

// CheckTo implements limiter.BatchService. What others refuse already stays refused.
func (s *service) CheckTo(ctx context.Context, checks []limiter.Check, refused limiter.Refused, results []limiter.Result) error {
	c, denied := s.caller(ctx, access.Check)
	if denied != nil {
		return denied
	}
	own := s.refusals(ctx, c, checks)
	if own == nil {
		own = refused
	} else {
		maps.Copy(own, refused)
	}
	return s.next.CheckTo(ctx, checks, own, results)
}

// Check implements limiter.Service.
func (s *service) Check(ctx context.Context, checks []limiter.Check) ([]limiter.Result, error) {
	results := make([]limiter.Result, len(checks))
	if err := s.CheckTo(ctx, checks, nil, results); err != nil {
		return nil, err
	}
	return results, nil
}

// CheckAll implements limiter.Service.
func (s *service) CheckAll(ctx context.Context, checks []limiter.Check) (limiter.AllDecision, error) {
	c, denied := s.caller(ctx, access.Check)
	for i := range checks {
		if denied != nil {
			break
		}
		if denied = s.target(ctx, c, &checks[i].Target); denied != nil {
			denied = denied.In(i, len(checks))
		}
	}
	if denied != nil {
		return limiter.AllDecision{}, denied
	}
	return s.next.CheckAll(ctx, checks)
}

// Acquire implements limiter.Service.
func (s *service) Acquire(ctx context.Context, a limiter.Acquire) (limiter.Decision, error) {
	if err := s.may(ctx, access.Check, &a.Target); err != nil {
		return limiter.Decision{}, err
	}
	return s.next.Acquire(ctx, a)
}

// Renew implements limiter.Service.
func (s *service) Renew(ctx context.Context, t limiter.Target, leaseID string, ttl time.Duration) (time.Duration, error) {
	if err := s.may(ctx, access.Check, &t); err != nil {
		return 0, err
	}
	return s.next.Renew(ctx, t, leaseID, ttl)
}

// Release implements limiter.Service.
func (s *service) Release(ctx context.Context, t limiter.Target, leaseID string) (bool, error) {
	if err := s.may(ctx, access.Check, &t); err != nil {
		return false, err
	}
	return s.next.Release(ctx, t, leaseID)
}

// Reserve implements limiter.Service.
func (s *service) Reserve(ctx context.Context, r limiter.Reserve) (limiter.Decision, error) {
	if err := s.may(ctx, access.Check, &r.Target); err != nil {
		return limiter.Decision{}, err
	}
	return s.next.Reserve(ctx, r)
}

// Commit implements limiter.Service. It gives back no more than the caller's own reservation has charged.
func (s *service) Commit(ctx context.Context, t limiter.Target, reservationID string, cost int64) (int64, error) {
	if err := s.may(ctx, access.Check, &t); err != nil {
		return 0, err
	}
	return s.next.Commit(ctx, t, reservationID, cost)
}

// Cancel implements limiter.Service.
func (s *service) Cancel(ctx context.Context, t limiter.Target, reservationID string) (int64, error) {
	if err := s.may(ctx, access.Check, &t); err != nil {
		return 0, err
	}
	return s.next.Cancel(ctx, t, reservationID)
}

// Refund implements limiter.Service.
func (s *service) Refund(ctx context.Context, t limiter.Target, units int64) (int64, error) {
	if err := s.may(ctx, access.Refund, &t); err != nil {
		return 0, err
	}
	return s.next.Refund(ctx, t, units)
}

// Reset implements limiter.Service.
func (s *service) Reset(ctx context.Context, t limiter.Target) error {
	if err := s.may(ctx, access.Refund, &t); err != nil {
		return err
	}
	return s.next.Reset(ctx, t)
}
