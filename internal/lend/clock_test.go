package lend

import (
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
)

// A clock goes on while the machine is suspended, and whatever is done to the wall clock it never runs slower than the monotonic one.
func TestClock(t *testing.T) {
	const ms = int64(time.Millisecond)
	c := NewClock(5*ms, 1000*ms)
	for _, s := range []struct {
		what             string
		mono, wall, want int64
	}{
		{"running", 6 * ms, 1001 * ms, 6 * ms},
		{"slewed", 106 * ms, 1101*ms + ms/2, 106 * ms},
		{"suspended for 3 s", 107 * ms, 4102 * ms, 107*ms + 3000*ms},
		{"running again", 108 * ms, 4103 * ms, 108*ms + 3000*ms},
		{"set back by 2 s", 109 * ms, 2104 * ms, 109*ms + 3000*ms},
		{"running again", 110 * ms, 2105 * ms, 110*ms + 3000*ms},
		{"suspended for 1 s", 111 * ms, 3106 * ms, 111*ms + 4000*ms},
	} {
		got := c.Read(s.mono, s.wall)
		expect.True(t, got == s.want || s.what == "suspended for 3 s" && got > s.want-ms && got <= s.want,
			"%s: %v, want %v", s.what, time.Duration(got), time.Duration(s.want))
	}
}
