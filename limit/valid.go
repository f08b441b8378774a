package limit

import (
	"errors"
	"strconv"
	"unicode/utf8"

	"github.com/weirlimit/weir/algo"
)

// ValidKey returns what is wrong with a key; nil: nothing.
func ValidKey(key string) *Error {
	switch {
	case key == "":
		return NewError(Invalid, "key", "is empty or missing: name what is limited, such as a user or an address")
	case !utf8.ValidString(key):
		return NewError(Invalid, "key", "is not valid UTF-8")
	case len(key) > MaxKey:
		return NewError(TooLarge, "key",
			"has "+strconv.Itoa(len(key))+" bytes, at most "+strconv.Itoa(MaxKey)+" are taken")
	}
	return nil
}

// Valid returns what is wrong with a target; nil: nothing. It does not know the policies, and does not look at Limit.
func (t *Target) Valid() *Error {
	if err := ValidKey(t.Key); err != nil {
		return err
	}
	switch {
	case t.Policy == "" && t.Limit == nil:
		return NewError(Invalid, "policy", "is missing: name a policy or send a limit")
	case t.Policy != "" && t.Limit != nil:
		return NewError(Invalid, "limit", "is given beside a policy: send one of them")
	case t.Limit == nil && t.Namespace != "":
		return NewError(Invalid, "namespace", "goes with an inline limit only")
	case t.Limit == nil && !ValidPolicyName(t.Policy):
		return NewError(Invalid, "policy", "is not a policy's name: 1 to 128 characters of A-Z a-z 0-9 . _ -")
	case len(t.Namespace) > MaxNamespace:
		return NewError(TooLarge, "namespace",
			"has "+strconv.Itoa(len(t.Namespace))+" bytes, at most "+strconv.Itoa(MaxNamespace)+" are taken")
	case !utf8.ValidString(t.Namespace):
		return NewError(Invalid, "namespace", "is not valid UTF-8")
	}
	return nil
}

// ValidCost returns what is wrong with the cost or the request id of a check; nil: nothing.
func (c *Check) ValidCost() *Error {
	switch {
	case c.Always && c.Partial:
		return NewError(Invalid, "partial", "cannot be set where all is charged always")
	case c.Always && c.Cost < -algo.MaxLimit:
		return NewError(Invalid, "cost", "is below the least, -9007199254740992 (-2^53)")
	case c.Cost < 0 && !c.Always:
		return NewError(Invalid, "cost", "is negative: to give units back, send a refund")
	case c.Cost > algo.MaxLimit:
		return NewError(Invalid, "cost", "is above the largest cost, 9007199254740992 (2^53)")
	case len(c.RequestID) > MaxRequestID:
		return NewError(TooLarge, "request_id",
			"has "+strconv.Itoa(len(c.RequestID))+" bytes, at most "+strconv.Itoa(MaxRequestID)+" are taken")
	case !utf8.ValidString(c.RequestID):
		return NewError(Invalid, "request_id", "is not valid UTF-8")
	}
	return nil
}

// WindowField returns the name of the field with an inline limit's window: "limit.ttl" for concurrency, "limit.period"
// for a calendar period, and "limit.window" otherwise.
func WindowField(l *algo.Limit) string {
	switch {
	case l.Algorithm == algo.Concurrency:
		return "limit.ttl"
	case l.Period != 0 && l.Period != algo.Epoch:
		return "limit.period"
	}
	return "limit.window"
}

// ValidLimit returns what is wrong with an inline limit; nil: nothing. Fields are named as in "limit.capacity", the
// window by WindowField.
func ValidLimit(l *algo.Limit) *Error {
	err := l.Validate()
	if field, ok := errors.AsType[*algo.FieldError](err); ok {
		name := "limit." + field.Field
		if field.Field == "window" {
			name = WindowField(l)
		}
		return NewError(Invalid, name, field.Message)
	}
	if err != nil {
		return NewError(Invalid, "limit", err.Error())
	}
	return nil
}
