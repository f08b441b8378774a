package wire

import (
	"fmt"
	"slices"

	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// MaxTargets bounds the targets that have a number in one stream.
const MaxTargets = 1024

// Targets are the targets that have a number in one stream, without keys, by number. The zero Target: the number is not
// defined.
type Targets []limit.Target

// At returns the target with a number, and false when the number is not defined.
func (t Targets) At(number uint64) (limit.Target, bool) {
	if number >= uint64(len(t)) || t[number].Policy == "" && t[number].Limit == nil {
		return limit.Target{}, false
	}
	return t[number], true
}

// Define gives a number to a target, in place of the target that had it. After an error the number is not defined.
func (t *Targets) Define(d *weirv1.StreamTarget) *limit.Error {
	if d.Number >= MaxTargets {
		return limit.NewError(limit.Invalid, "number", fmt.Sprintf("is %d, and must be below %d", d.Number, MaxTargets))
	}
	if n := int(d.Number) + 1; n > len(*t) {
		*t = slices.Grow(*t, n-len(*t))[:n]
	}
	to := &(*t)[d.Number]
	*to = limit.Target{}
	// Valid bounds the length of names, so that what a stream keeps is small.
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
