package auth

import (
	"context"

	"github.com/weirlimit/weir/limit"
)

// Quotas returns quotas with authorization at a listener, as Service does. A quota needs RoleCheck for its target. What
// was lent to a caller that has lost the right ends by itself.
func (a *Authorizer) Quotas(listener string, quotas limit.Quotas) limit.Quotas {
	if a.cfg.Callers == nil && a.cfg.Audit == nil {
		return quotas
	}
	return &quotaLending{next: quotas, service: service{listener: listener, authorizer: a}}
}

type quotaLending struct {
	next    limit.Quotas
	service service
}

// Quota implements limit.Quotas.
func (l *quotaLending) Quota(ctx context.Context, in []limit.Quota, out []limit.QuotaLent) error {
	target := func(q *limit.Quota) *limit.Target { return &q.Target }
	failed := func(err *limit.Error) limit.QuotaLent { return limit.QuotaLent{Err: err} }
	next := func(ctx context.Context, in []limit.Quota, out []limit.QuotaLent) (func(), error) {
		return nil, l.next.Quota(ctx, in, out)
	}
	_, err := permitted(ctx, &l.service, in, out, target, failed, next)
	return err
}
