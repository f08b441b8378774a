package admission

import (
	"fmt"
	"math"
	"testing"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestDivide: whatever there is, all parts fit into the runtime's limit together with what the collector needs, and none is too
// small to work with.
func TestDivide(t *testing.T) {
	for _, test := range []struct {
		usable int64
		state  int64 // MiB, as documented
	}{
		{64 * mib, 12}, {128 * mib, 22}, {256 * mib, 51}, {512 * mib, 108}, {1024 * mib, 224}, {2048 * mib, 454},
		{4096 * mib, 1007}, {16384 * mib, 9633}, {65536 * mib, 45875},
	} {
		b := Divide(test.usable)
		t.Run(fmt.Sprintf("%dMiB", test.usable/mib), func(t *testing.T) {
			got := b.State / mib
			expect.True(t, got == test.state, "state is %d MiB, want %d MiB", got, test.state)
		})
	}
	for usable := int64(64 * mib); usable <= 64<<30; usable += usable / 64 {
		b := Divide(usable)
		if got, limit := b.Sum(), b.Limit; got > limit || b.Limit > usable/100*LimitPercent {
			t.Fatalf("%d: the sum is %d, the limit %d of %d", usable, got, limit, usable/100*LimitPercent)
		}
		must.True(t, b.State <= usable/100*70 && b.State >= (b.Limit-base)/100*24, "%d: %d for state", usable, b.State)
		must.True(t, b.MaxMessage >= mib && b.MaxMessage <= b.Buffers/2 && b.Unread >= mib && b.Replies >= mib/2,
			"%d: %+v", usable, b)
		must.True(t, b.MaxInFlight >= 1000 && b.Clients() >= 12 && b.StreamsEach >= 12 && b.MaxCalls >= 6,
			"%d: %+v", usable, b)
		must.True(t, b.StreamWindow >= math.MaxUint16 && b.PeerWindow >= math.MaxUint16,
			"%d: windows of %d and %d", usable, b.StreamWindow, b.PeerWindow) // smaller ones gRPC ignores
	}
	b := Divide(16 * mib)
	expect.True(t, b.State > 0 && b.Clients() >= 1 && b.MaxInFlight >= 1,
		"%+v", b) // too little: it starts all the same
}

// TestRefit: what is chosen by hand for other parts is taken from State.
func TestRefit(t *testing.T) {
	b := Divide(512 * mib)
	before := b.State
	b.Unread += 10 * mib
	b.Refit()
	expect.True(t, b.State == before-10*mib && b.Sum() <= b.Limit,
		"state is %d after %d, the sum %d of %d", b.State, before, b.Sum(), b.Limit)
	b.Unread += 1024 * mib
	b.Refit()
	expect.True(t, b.State == LeastState && b.Sum() > b.Limit, "state is %d", b.State)
}
