package admission

import (
	"errors"
	"math"
	"runtime/debug"
	"testing"

	"github.com/KimMachineGun/automemlimit/memlimit"

	"github.com/weirlimit/weir/test/expect"
)

func TestUsable(t *testing.T) {
	const gib = 1 << 30
	none := func() (uint64, error) { return 0, memlimit.ErrNoLimit }
	fails := func() (uint64, error) { return 0, errors.New("no such file") }
	for _, test := range []struct {
		what           string
		group, machine memlimit.Provider
		limit          int64
		want           int64 // 0: an error
	}{
		{"a group in a larger machine", memlimit.Limit(gib), memlimit.Limit(4 * gib), math.MaxInt64, gib},
		{"a group that may use more than there is", memlimit.Limit(8 * gib), memlimit.Limit(4 * gib), math.MaxInt64, 4 * gib},
		{"a group of version 1 without a limit", memlimit.Limit(math.MaxInt64), memlimit.Limit(4 * gib), math.MaxInt64, 4 * gib},
		{"a machine without groups", none, memlimit.Limit(4 * gib), math.MaxInt64, 4 * gib},
		{"GOMEMLIMIT below the rest", memlimit.Limit(2 * gib), memlimit.Limit(4 * gib), 900 << 20, 1000 << 20},
		{"GOMEMLIMIT above the rest", memlimit.Limit(gib), memlimit.Limit(4 * gib), 8 * gib, gib},
		{"GOMEMLIMIT where nothing can be told", fails, fails, 90 << 20, 100 << 20},
		{"a group where the machine cannot be told", memlimit.Limit(gib), fails, math.MaxInt64, gib},
		{"nothing", none, fails, math.MaxInt64, 0},
	} {
		got, err := usable(test.group, test.machine, test.limit)
		expect.True(t, (err != nil) == (test.want == 0) && got <= test.want && got >= test.want-100,
			"%s: %d, %v, want %d", test.what, got, err, test.want)
	}
}

func TestSetLimit(t *testing.T) {
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(-1))
	t.Setenv("GOMEMLIMIT", "3GiB") // the runtime read it when the process started
	debug.SetMemoryLimit(3 << 30)
	got := SetMemoryLimit(1 << 30)
	expect.True(t, got == 3<<30 && debug.SetMemoryLimit(-1) == got, "with GOMEMLIMIT the limit is %d", got)
	t.Setenv("GOMEMLIMIT", "off")
	debug.SetMemoryLimit(math.MaxInt64)
	expect.Equal(t, SetMemoryLimit(1<<30), math.MaxInt64, "with GOMEMLIMIT off the limit")
	t.Setenv("GOMEMLIMIT", "")
	got = SetMemoryLimit(1000 << 20)
	expect.True(t, got == 900<<20 && debug.SetMemoryLimit(-1) == got, "the limit is %d, want %d", got, 900<<20)
}
