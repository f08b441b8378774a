package store

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/test/must"
)

// TestAhead: what is fetched beside decisions changes none of them, for keys that are known and others, while tables
// grow.
func TestAhead(t *testing.T) {
	s := New(Config{Partitions: 3})
	r := rule("p", log(3, time.Minute))
	s.Attach(1, ownership.Backup, false)
	var beside sync.WaitGroup
	for range 2 {
		beside.Go(func() {
			for i := range 2000 {
				for step := range AheadSteps {
					k := s.key("p", fmt.Sprint(i%300))
					s.Ahead(step, k.Hash, k.Partition, r)
				}
			}
		})
	}
	for i := range 1000 {
		k := s.key("p", fmt.Sprint(i%250))
		got, err := s.Decide(k, r, algo.Instant{Mono: 1}, cost(1), nil)
		must.True(t, err == nil && got.Allowed == (i < 750), "%d: %+v, %v", i, got, err)
	}
	beside.Wait()
}
