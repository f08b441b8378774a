package admission

import (
	"errors"
	"fmt"
	"math"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/KimMachineGun/automemlimit/memlimit"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
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
		{"a group that may use more than there is", memlimit.Limit(8 * gib), memlimit.Limit(4 * gib), math.MaxInt64,
			4 * gib},
		{"a group of version 1 without a limit", memlimit.Limit(math.MaxInt64), memlimit.Limit(4 * gib), math.MaxInt64,
			4 * gib},
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

func TestParse(t *testing.T) {
	for text, want := range map[string]int64{
		"auto": 0, "0": -1, "16MiB": 16 << 20, "16777216": 16 << 20, "512MiB": 512 << 20, "1.5GiB": 3 << 29, "2GB": 2e9,
		"2 gb": 2e9,
	} {
		got, err := ParseMemory(text)
		expect.True(t, got == want && err == nil, "%q: %d, %v; want %d", text, got, err, want)
	}
	whole := must.Value(ParseMemory("100%"))(t)
	if half, err := ParseMemory("50%"); err != nil || half <= 0 || half > whole/2 || half < whole/2-100 {
		t.Errorf("50%% is %d, %v; 100%% is %d", half, err, whole)
	}
	for _, text := range []string{
		"", "%", "0%", "101%", "-1%", "1.5%", "70 %", "-1", "-1GiB", "many", "1MiBs", "15.9MiB", "1", "9EiB",
		"99999999999999999999",
	} {
		got, err := ParseMemory(text)
		expect.True(t, err != nil && strings.Contains(err.Error(), text), "%q: %d, %v", text, got, err)
	}
}

// TestDivide: whatever there is, all parts fit into the runtime's limit together with what the collector needs, and
// none is too small to work with.
func TestDivide(t *testing.T) {
	for _, test := range []struct {
		usable int64
		state  int64 // MiB, as documented
	}{
		{64 * mib, 12}, {128 * mib, 24}, {256 * mib, 55}, {512 * mib, 117}, {1024 * mib, 242}, {2048 * mib, 490},
		{4096 * mib, 1071}, {16384 * mib, 9697}, {65536 * mib, 45875},
	} {
		b := Divide(test.usable)
		t.Run(fmt.Sprintf("%dMiB", test.usable/mib), func(t *testing.T) {
			expect.Equal(t, b.State/mib, test.state, "MiB of state")
		})
	}
	for usable := int64(64 * mib); usable <= 64<<30; usable += usable / 64 {
		b := Divide(usable)
		if got, limit := b.Sum(), b.Limit; got > limit || b.Limit > usable/100*LimitPercent {
			t.Fatalf("%d: the sum is %d, the limit %d of %d", usable, got, limit, usable/100*LimitPercent)
		}
		must.True(t, b.State <= usable/100*70 && b.State >= (b.Limit-base)/100*24, "%d: %d for state", usable, b.State)
		must.True(t, b.MaxMessage >= mib && b.MaxMessage <= b.Buffers/2 && b.Unread >= mib, "%d: %+v", usable, b)
		must.True(t, b.MaxInFlight >= 1000 && b.Clients() >= 12 && b.StreamsEach >= 12 && b.MaxCalls >= 6,
			"%d: %+v", usable, b)
		must.True(t, maxConnCalls*b.MaxAnonymous*4 <= b.MaxCalls*3, "%d: strangers may take %d of %d calls", usable,
			maxConnCalls*b.MaxAnonymous, b.MaxCalls)
		must.True(t, b.StreamWindow >= math.MaxUint16 && b.PeerWindow >= math.MaxUint16,
			"%d: windows of %d and %d", usable, b.StreamWindow, b.PeerWindow) // smaller ones gRPC ignores
	}
	b := Divide(16 * mib)
	expect.True(t, b.State > 0 && b.Clients() >= 1 && b.MaxInFlight >= 1,
		"%+v", b) // too little: it starts all the same
}
