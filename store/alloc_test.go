//go:build !race

package store

import (
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// A decision on a key that is known takes no memory, whichever the algorithm, admitted or refused; nor does one that a
// follower has to hear of.
func TestNoAllocations(t *testing.T) {
	for _, followed := range []bool{false, true} {
		for _, a := range byAlgorithm {
			s := New(Config{Partitions: 16})
			r := &Rule{Scope: "p", Limits: algo.Limits{a.limit}}
			k := s.key("p", name(1))
			if followed {
				s.Attach(k.Partition, ownership.Backup, true)
			}
			now := int64(time.Hour)
			call := Call{Request: algo.Request{Cost: 1, Nonce: 1}}
			decide := func() {
				now += int64(time.Millisecond)
				var answer Answer
				must.NoError(t, s.DecideTo(&k, r, algo.Instant{Mono: now, Wall: now}, &call, nil, &answer))
			}
			for range 5000 {
				decide() // until the state has the size it keeps
			}
			n := testing.AllocsPerRun(2000, decide)
			expect.True(t, n <= 0, "%s, followed %v: %v allocations", a.name, followed, n)
		}
	}
}
