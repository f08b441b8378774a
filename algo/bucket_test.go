package algo

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// A bucket that is the only limit is decided by a shorter way, which must say what the general one says, and leave
// behind what that leaves.
func TestBucketAlone(t *testing.T) {
	random := rand.New(rand.NewPCG(7, 7))
	pick := func(choices ...int64) int64 { return choices[random.IntN(len(choices))] }
	var allowed, refused, never int
	for range 3000 {
		l := Limit{Algorithm: TokenBucket + Algorithm(random.IntN(2)), Limit: pick(1, 3, 7, 1000, 1_000_003, MaxLimit),
			Window: time.Duration(pick(
				int64(MinWindow), int64(time.Second), int64(time.Second)+1, int64(time.Hour), int64(MaxWindow)))}
		l.Capacity = pick(0, 0, 1, 10, l.Limit, MaxLimit)
		if l.Validate() != nil {
			continue
		}
		ls := Limits{l}
		now := Instant{Mono: random.Int64N(1 << 40)}
		general, alone := make(State, ls.Words()), make(State, ls.Words())
		ls.Init(general, now)
		ls.Init(alone, now)
		if random.IntN(4) == 0 { // more than it holds, as after a merge or a change of limits
			n := pick(1, l.holds(), MaxLimit)
			for _, s := range []State{general, alone} {
				must.NoError(t, ls.Charge(nil, s, now, n))
			}
		}
		for range 40 {
			now.Mono += pick(-5, 0, 0, 1, random.Int64N(int64(l.Window)),
				random.Int64N(int64(l.Window)/min(l.Limit, int64(l.Window))+1))
			r := Request{Cost: pick(-1, 0, 1, 1, 2, l.holds()/2+1, l.holds(), l.holds()+1, MaxLimit, MaxLimit+1),
				Partial: random.IntN(3) == 0}
			var want Decision
			must.NoError(t, ls.DecideTo(nil, general, now, &r, make([]Decision, 1), &want))
			got, err := ls.Decide(nil, alone, now, r, nil)
			must.True(t, err == nil && got == want,
				"%+v at %d: %+v\nDecide: %+v, %v\nin general: %+v", l, now.Mono, r, got, err, want)
			for i := range general {
				must.Equal(t, general[i], alone[i],
					"%+v at %d: %+v leaves %x, in general %x", l, now.Mono, r, alone, general)
			}
			switch {
			case got.Allowed:
				allowed++
			case got.RetryAfter == Never:
				never++
			default:
				refused++
			}
		}
	}
	expect.True(t, allowed >= 1000 && refused >= 1000 && never >= 1000,
		"%d allowed, %d refused, %d never: too one-sided to show anything", allowed, refused, never)
}
