package client

import (
	"errors"
	"fmt"
	"unicode/utf8"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
)

// What a request may carry.
const (
	maxBatch     = limit.MaxBatch
	maxKey       = limit.MaxKey
	maxRequestID = limit.MaxRequestID
	maxNamespace = limit.MaxNamespace
)

// question returns ck in the form in which it is sent, or an *Error.
func (ck *Check) question() (question, error) {
	q := question{
		target:    target{policy: ck.Policy, limit: ck.Limit, namespace: ck.Namespace, key: ck.Key},
		cost:      ck.Cost,
		partial:   ck.Partial,
		requestID: ck.RequestID,
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
	var field *algo.FieldError
	switch err := ck.Limit.Validate(); {
	case errors.As(err, &field):
		return q, &Error{ErrInvalid, "limit." + field.Field, field.Message}
	case err != nil:
		return q, &Error{ErrInvalid, "limit", err.Error()}
	}
	return q, nil
}

// validate refuses what no node would accept, so that it costs nobody a call.
func (q *question) validate() error {
	switch {
	case q.cost < 0:
		return &Error{ErrInvalid, "cost", fmt.Sprintf("must not be negative, not %d; Refund gives back", q.cost)}
	case q.cost > algo.MaxLimit:
		return &Error{ErrInvalid, "cost", fmt.Sprintf("must be at most %d, not %d", algo.MaxLimit, q.cost)}
	case len(q.requestID) > maxRequestID:
		return &Error{ErrTooLarge, "request_id", fmt.Sprintf("must be at most %d bytes long, not %d", maxRequestID, len(q.requestID))}
	case !utf8.ValidString(q.requestID):
		return &Error{ErrInvalid, "request_id", "must be UTF-8"}
	}
	return q.target.validate()
}

func (t *target) validate() error {
	switch {
	case t.limit != nil && t.policy != "":
		return &Error{ErrInvalid, "limit", "must not be given together with policy"}
	case t.limit == nil && t.namespace != "":
		return &Error{ErrInvalid, "namespace", "must not be given without limit"}
	case t.limit == nil && !limit.ValidPolicyName(t.policy):
		return &Error{ErrInvalid, "policy", "must be 1 to 128 characters of A-Z a-z 0-9 . _ -"}
	case len(t.namespace) > maxNamespace:
		return &Error{ErrTooLarge, "namespace", fmt.Sprintf("must be at most %d bytes long, not %d", maxNamespace, len(t.namespace))}
	case !utf8.ValidString(t.namespace):
		return &Error{ErrInvalid, "namespace", "must be UTF-8"}
	case t.key == "":
		return &Error{ErrInvalid, "key", "must not be empty"}
	case len(t.key) > maxKey:
		return &Error{ErrTooLarge, "key", fmt.Sprintf("must be at most %d bytes long, not %d", maxKey, len(t.key))}
	case !utf8.ValidString(t.key):
		return &Error{ErrInvalid, "key", "must be UTF-8"}
	}
	return nil
}
