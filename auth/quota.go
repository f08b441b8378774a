package auth

import (
	"context"

	"github.com/weirlimit/weir/limit"
)

// Quotas returns quotas with authorization at a listener, as Service does: to have a part of a limit takes what a check takes. What was
// lent to a caller that may not have it any more ends by itself.
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
	c, denied := l.service.caller(ctx, RoleCheck)
	if denied != nil {
		return denied
	}
	may := make([]limit.Quota, 0, len(in))
	places := make([]int, 0, len(in))
	for i := range in {
		if err := l.service.target(ctx, c, RoleCheck, &in[i].Target); err != nil {
			out[i] = limit.QuotaLent{Err: err}
			continue
		}
		may, places = append(may, in[i]), append(places, i)
	}
	answers := make([]limit.QuotaLent, len(may))
	if err := l.next.Quota(ctx, may, answers); err != nil {
		return err
	}
	for j, i := range places {
		out[i] = answers[j]
	}
	return nil
}
