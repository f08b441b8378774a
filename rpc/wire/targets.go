package wire

import (
	"fmt"
	"slices"

	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// MaxTargets bounds the policies and limits that have a number in one stream.
const MaxTargets = 1024

// Targets are those that have a number in one stream, without a key. The zero Target: not defined.
type Targets []limit.Target

// At returns the target with a number, or false when there is none.
func (t Targets) At(number uint64) (limit.Target, bool) {
	if number >= uint64(len(t)) || t[number].Policy == "" && t[number].Limit == nil {
		return limit.Target{}, false
	}
	return t[number], true
}

// Define gives a number to a target. When that fails the number stands for nothing: it must not for what it stood before.
func (t *Targets) Define(d *weirv1.StreamTarget) *limit.Error {
	if d.Number >= MaxTargets {
		return limit.NewError(limit.Invalid, "number", fmt.Sprintf("is %d, and must be below %d", d.Number, MaxTargets))
	}
	if n := int(d.Number) + 1; n > len(*t) {
		*t = slices.Grow(*t, n-len(*t))[:n]
	}
	to := &(*t)[d.Number]
	*to = limit.Target{}
	// What is kept for the life of a stream must be known to be small.
	got, err := Target(&weirv1.Target{Policy: d.Policy, Limit: d.Limit, Namespace: d.Namespace, Key: "any"})
	if err == nil {
		err = got.Valid()
	}
	if err != nil {
		return err
	}
	got.Key = ""
	*to = got
	return nil
}
