package wire

import (
	"fmt"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestNumbers: both sides of a stream understand each other, what is the same target has one number, and there are so many.
func TestNumbers(t *testing.T) {
	inline := func(units int64) *algo.Limit {
		return &algo.Limit{Algorithm: algo.SlidingLog, Limit: units, Window: time.Minute}
	}
	list := []limit.Target{
		{Policy: "p", Key: "a"}, {Policy: "p", Key: "b"}, {Policy: "q", Key: "a"}, {Limit: inline(1), Key: "a"}, {Limit: inline(1), Key: "b"},
		{Limit: inline(2), Key: "a"}, {Limit: inline(2), Namespace: "n", Key: "a"},
	}
	var given Numbers
	var known Targets
	for _, units := range []string{"first", "after a reset"} {
		same := 0
		for i := range list {
			n, fresh := given.Of(&list[i])
			if fresh {
				must.Equal(t, known.Define(n.Define), nil)
			} else {
				same++
			}
			got, ok := known.At(uint64(n.Define.Number))
			got.Key = list[i].Key
			expect.True(t, ok && SameTarget(&got, &list[i]), "%s: %+v became %+v", units, list[i], got)
		}
		expect.True(t, same == 2, "%s: %d have the number of another", units, same)
		given.Reset()
	}
	for i := range MaxTargets {
		n, fresh := given.Of(&limit.Target{Policy: fmt.Sprint("p", i)})
		must.True(t, n != nil && fresh && n.Define.Number == uint32(i), "%d: %+v", i, n)
	}
	n, _ := given.Of(&limit.Target{Policy: "one more"})
	expect.Equal(t, n, nil)
	n, fresh := given.Of(&limit.Target{Policy: "p7", Key: "k"})
	expect.True(t, n != nil && !fresh && n.Define.Number == 7, "%+v", n)
}
