package algo_test

import (
	"fmt"
	"time"

	"github.com/weirlimit/weir/algo"
)

// Two limits decided together: 3 a second, 5 a minute.
func Example() {
	limits := algo.Limits{
		{Algorithm: algo.SlidingLog, Limit: 3, Window: time.Second},
		{Algorithm: algo.SlidingLog, Limit: 5, Window: time.Minute},
	}
	if err := limits.Validate(); err != nil {
		fmt.Println(err)
		return
	}
	arena := algo.NewArena(nil)
	state := make(algo.State, limits.Words())
	now := algo.Instant{Mono: 0} // whoever calls reads the clock
	limits.Init(state, now)
	for range 7 {
		d, err := limits.Decide(arena, state, now, algo.Request{Cost: 1}, nil)
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println(time.Duration(now.Mono), d.Allowed, d.Remaining, "of", d.Limit, d.RetryAfter)
		now.Mono += int64(200 * time.Millisecond)
		now.Mono += int64(d.RetryAfter)
	}
	// Output:
	// 0s true 2 of 3 0s
	// 200ms true 1 of 3 0s
	// 400ms true 0 of 3 0s
	// 600ms false 0 of 3 400ms
	// 1.2s true 1 of 5 0s
	// 1.4s true 0 of 5 0s
	// 1.6s false 0 of 5 58.4s
}
