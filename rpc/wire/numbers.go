package wire

import (
	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// Numbers are the numbers that the sender of a stream has given to targets without their keys; Targets is the
// receiver's side. The zero value has given none. It is not safe for concurrent use.
type Numbers struct {
	given map[unkeyed]*weirv1.StreamTarget
}

// unkeyed is a Target without its key, by value.
type unkeyed struct {
	policy, namespace string
	inline            bool
	limit             algo.Limit
}

// Of returns the number of a target, as its definition for the receiver, which must not be changed. fresh says that the
// number is new, so that the message must define it. Of returns nil when all MaxTargets numbers are given; the caller
// may then call Reset and define the targets of the message again.
func (n *Numbers) Of(t *limit.Target) (define *weirv1.StreamTarget, fresh bool) {
	of := unkeyed{policy: t.Policy, namespace: t.Namespace}
	if t.Limit != nil {
		of.inline, of.limit = true, *t.Limit
	}
	if define = n.given[of]; define != nil {
		return define, false
	}
	if len(n.given) >= MaxTargets {
		return nil, false
	}
	if n.given == nil {
		n.given = make(map[unkeyed]*weirv1.StreamTarget)
	}
	p := ProtoTarget(*t)
	define = &weirv1.StreamTarget{Number: uint32(len(n.given)), Policy: p.Policy, Limit: p.Limit,
		Namespace: p.Namespace}
	n.given[of] = define
	return define, true
}

// Reset forgets all numbers.
func (n *Numbers) Reset() { clear(n.given) }

// SameTarget says whether two targets have the same number, without the look-up of Of: most checks have the target of
// the check before.
func SameTarget(a, b *limit.Target) bool {
	return a.Policy == b.Policy && a.Namespace == b.Namespace &&
		(a.Limit == b.Limit || a.Limit != nil && b.Limit != nil && *a.Limit == *b.Limit)
}
