package auth

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
)

// This file authorizes operations. Each method of service finds the caller in the context (caller), demands a role, and
// checks the right to the target's policy or namespace (target), before it calls the next Service. target also sets
// Target.Caller. A new operation of limit.Service needs a method here; service embeds no Service, so that it does not
// compile without.

// Service returns svc with authorization at a listener: each operation needs a role, and the right of the caller in its
// context to the policies and namespaces. In a batch, a check that the caller may not make gets an error of its own. A
// context that Authorize has not returned is denied. Refunds and resets go to the audit log. Without an access file and
// an audit log it returns svc.
func (a *Authorizer) Service(listener string, svc limiter.BatchService) limiter.BatchService {
	if a.cfg.Callers == nil && a.cfg.Audit == nil {
		return svc
	}
	return &service{listener: listener, authorizer: a, next: svc}
}

type service struct {
	listener   string
	authorizer *Authorizer
	next       limiter.BatchService
}

// caller returns the caller of a context if it has the role, or the error to answer.
func (s *service) caller(ctx context.Context, role Role) (*Caller, *limit.Error) {
	from, ok := ctx.Value(sessionKey{}).(*session)
	if !ok {
		return nil, &limit.Error{Kind: limit.Denied, Message: "the call is not authenticated"}
	}
	caller, denial := s.authorizer.permit(from, role)
	if denial != nil {
		s.authorizer.denied(s.listener, denial, caller, &from.credentials, limit.Target{})
		return nil, &limit.Error{Kind: limit.Denied, Message: denial.Message}
	}
	return caller, nil
}

// target sets the caller of a target, or returns an error if the caller may not use the target's policy or namespace. A
// target with neither or both is left to the Service, which rejects it.
func (s *service) target(ctx context.Context, c *Caller, role Role, t *limit.Target) *limit.Error {
	var field, what string
	switch {
	case t.Limit != nil && !c.MayUseNamespace(role, t.Namespace):
		field, what = "namespace", fmt.Sprintf("%s may not use inline limits of the namespace %.100q in the role %v",
			c.Name, t.Namespace, role)
	case t.Policy != "" && !c.MayUsePolicy(role, t.Policy):
		field, what = "policy", fmt.Sprintf("%s may not use the policy %.100q in the role %v", c.Name, t.Policy, role)
	default:
		if c != s.authorizer.all { // all callers share that name, so that it distinguishes none
			t.Caller = c.Name
		}
		return nil
	}
	from, _ := ctx.Value(sessionKey{}).(*session)
	about := limit.Target{Policy: t.Policy, Limit: t.Limit, Namespace: t.Namespace}
	s.authorizer.denied(s.listener, forbidden(WrongPolicy, what), c, &from.credentials, about)
	return &limit.Error{Kind: limit.Denied, Field: field, Message: what}
}

// Demand returns an error unless the caller in a context may use a target's policy or namespace in a role. It counts
// and audits a denial, as Service does. It is for calls that are no operation of a limit.Service.
func (a *Authorizer) Demand(ctx context.Context, role Role, t limit.Target) *limit.Error {
	s := &service{authorizer: a}
	if from, ok := ctx.Value(sessionKey{}).(*session); ok {
		s.listener = from.listener
	}
	return s.authorize(ctx, role, &t)
}

// authorize demands a role and the right to use a target.
func (s *service) authorize(ctx context.Context, role Role, t *limit.Target) *limit.Error {
	c, denied := s.caller(ctx, role)
	if denied == nil {
		denied = s.target(ctx, c, role, t)
	}
	return denied
}

// authorized calls f if the caller may use a target in a role.
func authorized[A any](ctx context.Context, s *service, role Role, t *limit.Target,
	f func() (A, error)) (answer A, err error) {
	if err := s.authorize(ctx, role, t); err != nil {
		return answer, err
	}
	return f()
}

// authorizeList demands a role and the right to use each of n targets. list is the list's name in errors; empty: there
// is no list.
func (s *service) authorizeList(ctx context.Context, role Role, list string, n int,
	at func(i int) *limit.Target) error {
	c, denied := s.caller(ctx, role)
	if denied != nil {
		return denied
	}
	for i := range n {
		if denied := s.target(ctx, c, role, at(i)); denied != nil {
			return denied.InList(list, i)
		}
	}
	return nil
}

// deniedChecks returns the errors of the checks that the caller may not make, by index. It sets Bounded on checks with
// Always when the caller may not charge.
func (s *service) deniedChecks(ctx context.Context, c *Caller, checks []limit.Check) (errs limit.Denials) {
	for i := range checks {
		e := s.target(ctx, c, RoleCheck, &checks[i].Target)
		if e == nil && checks[i].Cost < 0 {
			// Giving units back is a refund, which needs a role of its own.
			e = s.authorize(ctx, RoleRefund, &checks[i].Target)
		}
		if checks[i].Always && checks[i].Cost > 0 {
			checks[i].Bounded = !c.may(RoleCharge, &checks[i].Target)
		}
		if e != nil {
			if errs == nil {
				errs = make(limit.Denials)
			}
			errs[i] = e
		}
	}
	return errs
}

// Begin implements limiter.BatchService.
func (s *service) Begin(ctx context.Context, b *limiter.Batch) (open []int, err *limit.Error) {
	c, denied := s.caller(ctx, RoleCheck)
	if denied != nil {
		return nil, denied
	}
	b.Denied = s.deniedChecks(ctx, c, b.Checks)
	open, err = s.next.Begin(ctx, b)
	if err == nil {
		for i := range b.Checks {
			if b.Checks[i].Cost < 0 && b.Denied[i] == nil && !slices.Contains(open, i) {
				s.refunded(ctx, &b.Checks[i], &b.Results[i])
			}
		}
	}
	return open, err
}

// Finish implements limiter.BatchService.
func (s *service) Finish(ctx context.Context, b *limiter.Batch, open []int) {
	s.next.Finish(ctx, b, open)
	for _, i := range open {
		if b.Checks[i].Cost < 0 {
			s.refunded(ctx, &b.Checks[i], &b.Results[i])
		}
	}
}

// refunded sends the refund by a check with a negative cost to the audit log.
func (s *service) refunded(ctx context.Context, c *limit.Check, r *limit.Result) {
	e := EventOf(ctx, ActionRefund)
	e.Target, e.Units, e.Err = c.Target, -c.Cost, r.Err
	if r.Err == nil {
		e.Result = -r.Granted
	}
	s.authorizer.audit(e)
}

// CheckTo implements limiter.BatchService. Checks in denied keep their errors.
func (s *service) CheckTo(ctx context.Context, checks []limit.Check, denied limit.Denials,
	results []limit.Result) error {
	c, denial := s.caller(ctx, RoleCheck)
	if denial != nil {
		return denial
	}
	own := s.deniedChecks(ctx, c, checks)
	if own == nil {
		own = denied
	} else {
		maps.Copy(own, denied)
	}
	if err := s.next.CheckTo(ctx, checks, own, results); err != nil {
		return err
	}
	for i := range checks {
		if checks[i].Cost < 0 && own[i] == nil {
			s.refunded(ctx, &checks[i], &results[i])
		}
	}
	return nil
}

// Check implements limit.Service.
func (s *service) Check(ctx context.Context, checks []limit.Check) ([]limit.Result, error) {
	results := make([]limit.Result, len(checks))
	if err := s.CheckTo(ctx, checks, nil, results); err != nil {
		return nil, err
	}
	return results, nil
}

// CheckAll implements limit.Service. Checks with Always are charges, which need RoleCharge.
func (s *service) CheckAll(ctx context.Context, checks []limit.Check) (limit.AllDecision, error) {
	role, list := RoleCheck, "checks"
	if slices.ContainsFunc(checks, func(c limit.Check) bool { return c.Always }) {
		role = RoleCharge
	}
	if len(checks) == 1 {
		list = ""
	}
	if err := s.authorizeList(ctx, role, list, len(checks),
		func(i int) *limit.Target { return &checks[i].Target }); err != nil {
		return limit.AllDecision{}, err
	}
	return s.next.CheckAll(ctx, checks)
}

// Acquire implements limit.Service.
func (s *service) Acquire(ctx context.Context, a limit.Acquire) (limit.Decision, error) {
	return authorized(ctx, s, RoleCheck, &a.Target, func() (limit.Decision, error) { return s.next.Acquire(ctx, a) })
}

// Renew implements limit.Service.
func (s *service) Renew(ctx context.Context, t limit.Target, leaseID string, ttl time.Duration) (time.Duration, error) {
	return authorized(ctx, s, RoleCheck, &t,
		func() (time.Duration, error) { return s.next.Renew(ctx, t, leaseID, ttl) })
}

// Release implements limit.Service.
func (s *service) Release(ctx context.Context, t limit.Target, leaseID string) (bool, error) {
	return authorized(ctx, s, RoleCheck, &t, func() (bool, error) { return s.next.Release(ctx, t, leaseID) })
}

// Reserve implements limit.Service.
func (s *service) Reserve(ctx context.Context, r limit.Reserve) (limit.Decision, error) {
	return authorized(ctx, s, RoleCheck, &r.Target, func() (limit.Decision, error) { return s.next.Reserve(ctx, r) })
}

// ReserveAll implements limit.Service.
func (s *service) ReserveAll(ctx context.Context, rs []limit.Reserve) (limit.AllDecision, error) {
	if err := s.authorizeList(ctx, RoleCheck, "reserves", len(rs),
		func(i int) *limit.Target { return &rs[i].Target }); err != nil {
		return limit.AllDecision{}, err
	}
	return s.next.ReserveAll(ctx, rs)
}

// Extend implements limit.Service.
func (s *service) Extend(ctx context.Context, e limit.Extend) (limit.Decision, error) {
	return authorized(ctx, s, RoleCheck, &e.Target, func() (limit.Decision, error) { return s.next.Extend(ctx, e) })
}

// ExtendEach implements limit.Service.
func (s *service) ExtendEach(ctx context.Context, es []limit.Extend) ([]limit.Result, error) {
	if err := s.authorizeList(ctx, RoleCheck, "extends", len(es),
		func(i int) *limit.Target { return &es[i].Target }); err != nil {
		return nil, err
	}
	return s.next.ExtendEach(ctx, es)
}

// Charge implements limit.Service.
func (s *service) Charge(ctx context.Context, c limit.Charge) (limit.Decision, error) {
	return authorized(ctx, s, RoleCharge, &c.Target, func() (limit.Decision, error) { return s.next.Charge(ctx, c) })
}

// Commit implements limit.Service. It needs RoleCheck only: it gives back no more than the reservation has charged, and
// charges beyond that at most the largest limit (Bounded), unless the caller may charge.
func (s *service) Commit(ctx context.Context, c limit.Commit) (limit.Settled, error) {
	return authorized(ctx, s, RoleCheck, &c.Target, func() (limit.Settled, error) {
		c.Bounded = !s.authorizer.MayUse(ctx, RoleCharge)(c.Policy, c.Namespace)
		return s.next.Commit(ctx, c)
	})
}

// CommitEach implements limit.Service, with the bounds of Commit.
func (s *service) CommitEach(ctx context.Context, cs []limit.Commit) ([]limit.SettledResult, error) {
	if err := s.authorizeList(ctx, RoleCheck, "commits", len(cs),
		func(i int) *limit.Target { return &cs[i].Target }); err != nil {
		return nil, err
	}
	may := s.authorizer.MayUse(ctx, RoleCharge)
	for i := range cs {
		cs[i].Bounded = !may(cs[i].Policy, cs[i].Namespace)
	}
	return s.next.CommitEach(ctx, cs)
}

// Cancel implements limit.Service.
func (s *service) Cancel(ctx context.Context, t limit.Target, reservationID string) (int64, error) {
	return authorized(ctx, s, RoleCheck, &t, func() (int64, error) { return s.next.Cancel(ctx, t, reservationID) })
}

// Refund implements limit.Service.
func (s *service) Refund(ctx context.Context, t limit.Target, units int64, requestID string) (int64, error) {
	if err := s.authorize(ctx, RoleRefund, &t); err != nil {
		return 0, err
	}
	n, err := s.next.Refund(ctx, t, units, requestID)
	e := EventOf(ctx, ActionRefund)
	e.Target, e.Units, e.Result, e.Err = t, units, n, err
	s.authorizer.audit(e)
	return n, err
}

// Reset implements limit.Service.
func (s *service) Reset(ctx context.Context, t limit.Target) error {
	if err := s.authorize(ctx, RoleRefund, &t); err != nil {
		return err
	}
	err := s.next.Reset(ctx, t)
	e := EventOf(ctx, ActionReset)
	e.Target, e.Err = t, err
	s.authorizer.audit(e)
	return err
}

// Lender returns lender with authorization at a listener, as Service does. Borrowing needs RoleCheck. A loan that the
// caller may not have, or not any longer, is answered Ended; units that it has spent of the loan are charged only when
// the loan ends.
func (a *Authorizer) Lender(listener string, lender limit.Lender) limit.Lender {
	if a.cfg.Callers == nil && a.cfg.Audit == nil {
		return lender
	}
	return &lending{Lender: lender, service: service{listener: listener, authorizer: a}}
}

type lending struct {
	limit.Lender
	service service
}

// Lend implements limit.Lender.
func (l *lending) Lend(ctx context.Context, in []limit.Borrow, out []limit.Lent) (wait func(), err error) {
	target := func(b *limit.Borrow) *limit.Target { return &b.Target }
	over := func(*limit.Error) limit.Lent { return limit.Lent{Ended: true, Again: time.Minute} }
	return permitted(ctx, &l.service, in, out, target, over, l.Lender.Lend)
}

// permitted calls next with the elements whose targets the caller may use, and copies its answers to out. deny makes
// the answers of the other elements from their errors. wait is that of a limit.Lender.
func permitted[In, Out any](ctx context.Context, s *service, in []In, out []Out, target func(*In) *limit.Target,
	deny func(*limit.Error) Out, next func(context.Context, []In, []Out) (func(), error)) (wait func(), err error) {
	c, denied := s.caller(ctx, RoleCheck)
	if denied != nil {
		return nil, denied
	}
	may, places := make([]In, 0, len(in)), make([]int, 0, len(in))
	for i := range in {
		if err := s.target(ctx, c, RoleCheck, target(&in[i])); err != nil {
			out[i] = deny(err)
			continue
		}
		may, places = append(may, in[i]), append(places, i)
	}
	answers := make([]Out, len(may))
	waiting, err := next(ctx, may, answers)
	if err != nil {
		return nil, err
	}
	give := func() {
		for j, i := range places {
			out[i] = answers[j]
		}
	}
	if waiting == nil {
		give()
		return nil, nil
	}
	return func() {
		waiting()
		give()
	}, nil
}
