package wire

import (
	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// Numbers are those that the sender of a stream has given to targets, keys left out; Targets is the receiver's side. The zero value
// has given none. It is used by one goroutine at a time.
type Numbers struct {
	given map[unkeyed]*Number
}

// Number is what one target has been given.
type Number struct {
	Define *weirv1.StreamTarget // tells the receiver; never changed
	Used   uint64               // is the sender's, to note the message that has named it last
}

// unkeyed is a Target without its key, by value.
type unkeyed struct {
	policy, namespace string
	inline            bool
	limit             algo.Limit
}

// Of returns the number of a target; fresh says that it has just been given, so that the receiver must be told. It returns nil when
// there is no number left: all must then be given anew, after Reset.
func (n *Numbers) Of(t *limit.Target) (number *Number, fresh bool) {
	of := unkeyed{policy: t.Policy, namespace: t.Namespace}
	if t.Limit != nil {
		of.inline, of.limit = true, *t.Limit
	}
	if number = n.given[of]; number != nil {
		return number, false
	}
	if len(n.given) >= MaxTargets {
		return nil, false
	}
	if n.given == nil {
		n.given = make(map[unkeyed]*Number)
	}
	p := ProtoTarget(*t)
	number = &Number{Define: &weirv1.StreamTarget{Number: uint32(len(n.given)), Policy: p.Policy, Limit: p.Limit, Namespace: p.Namespace}}
	n.given[of] = number
	return number, true
}

// Reset takes all numbers back.
func (n *Numbers) Reset() { clear(n.given) }

// SameTarget says whether two targets have the same number, without looking for it: most follow one that has.
func SameTarget(a, b *limit.Target) bool {
	return a.Policy == b.Policy && a.Namespace == b.Namespace && (a.Limit == b.Limit || a.Limit != nil && b.Limit != nil && *a.Limit == *b.Limit)
}
