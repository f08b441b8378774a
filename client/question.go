package client

import (
	"github.com/weirlimit/weir/limit"
)

// question returns ck in the form in which it is sent, or an *Error.
func (ck *Check) question() (question, error) {
	q := question{
		target: target{Target: limit.Target{Policy: ck.Policy, Limit: ck.Limit, Namespace: ck.Namespace, Key: ck.Key}},
		cost:   ck.Cost, partial: ck.Partial, requestID: ck.RequestID,
	}
	switch {
	case !ck.Peek && q.cost == 0:
		q.cost = 1
	case ck.Peek && q.cost != 0:
		return q, &Error{ErrInvalid, "cost", "must be 0 when peeking"}
	}
	if err := q.validate(); err != nil || ck.Limit == nil {
		return q, err
	}
	// Of several checks none is to be charged when a node would not accept one.
	return q, serviceError(limit.ValidLimit(ck.Limit))
}

// validate refuses what no node would accept, so that it costs nobody a call.
func (q *question) validate() error {
	c := q.check()
	if err := c.ValidCost(); err != nil {
		return serviceError(err)
	}
	return serviceError(c.Valid())
}

// check is the question as a Service is asked it.
func (q *question) check() limit.Check {
	return limit.Check{Target: q.Target, Cost: q.cost, Partial: q.partial, RequestID: q.requestID}
}

func checksOf(qs []question) []limit.Check {
	checks := make([]limit.Check, len(qs))
	for i := range qs {
		checks[i] = qs[i].check()
	}
	return checks
}
