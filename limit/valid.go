package limit

import (
	"errors"
	"strconv"
	"unicode/utf8"

	"github.com/weirlimit/weir/algo"
)

// ValidKey says what is wrong with a key, if anything.
func ValidKey(key string) *Error {
	switch {
	case key == "":
		return NewError(Invalid, "key", "is empty or missing: name what is limited, such as a user or an address")
	case !utf8.ValidString(key):
		return NewError(Invalid, "key", "is not valid UTF-8")
	case len(key) > MaxKey:
		return NewError(TooLarge, "key", "has "+strconv.Itoa(len(key))+" bytes, at most "+strconv.Itoa(MaxKey)+" are taken")
	}
	return nil
}

// Valid says what is wrong with a target, as far as that can be told without knowing the policies and without looking at Limit.
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
		return NewError(TooLarge, "namespace", "has "+strconv.Itoa(len(t.Namespace))+" bytes, at most "+strconv.Itoa(MaxNamespace)+" are taken")
	case !utf8.ValidString(t.Namespace):
		return NewError(Invalid, "namespace", "is not valid UTF-8")
	}
	return nil
}

// ValidCost says what is wrong with the cost and the request id of a check.
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
		return NewError(TooLarge, "request_id", "has "+strconv.Itoa(len(c.RequestID))+" bytes, at most "+strconv.Itoa(MaxRequestID)+" are taken")
	case !utf8.ValidString(c.RequestID):
		return NewError(Invalid, "request_id", "is not valid UTF-8")
	}
	return nil
}

// WindowField names the field that says how long a limit sent along looks back: "limit.ttl" of a concurrency limit, "limit.period" of
// a calendar's, and "limit.window" of all others.
func WindowField(l *algo.Limit) string {
	switch {
	case l.Algorithm == algo.Concurrency:
		return "limit.ttl"
	case l.Period != 0 && l.Period != algo.Epoch:
		return "limit.period"
	}
	return "limit.window"
}

// ValidLimit says what is wrong with a limit sent along, naming the field as "limit.capacity", the window as WindowField does.
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
