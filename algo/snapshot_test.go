package algo

import (
	"encoding/binary"
	"math/bits"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestSnapshotErrors is what no state could have written.
func TestSnapshotErrors(t *testing.T) {
	uints := func(head []byte, values ...uint64) []byte {
		for _, v := range values {
			head = binary.AppendUvarint(head, v)
		}
		return head
	}
	in := func(a Algorithm) []byte { return []byte{snapshotVersion, byte(a)} }
	limit := func(a Algorithm) Limit { return Limit{Algorithm: a, Limit: 10, Window: time.Minute} }
	for _, tt := range []struct {
		name  string
		limit Limit
		data  []byte
		err   error
	}{
		{"nothing", limit(FixedWindow), nil, ErrSnapshot},
		{"another version", limit(FixedWindow), []byte{2, byte(FixedWindow) | idleFlag}, ErrSnapshot},
		{"no limit", limit(FixedWindow), []byte{snapshotVersion}, ErrSnapshot},
		{"another algorithm", limit(FixedWindow), in(SlidingLog), ErrSnapshot},
		{"cut off", limit(FixedWindow), uints(in(FixedWindow), 5), ErrSnapshot},
		{"a count beyond all limits", limit(FixedWindow), uints(in(FixedWindow), 5, 1<<53+1), ErrSnapshot},
		{"an age beyond all windows", limit(FixedWindow), uints(in(FixedWindow), 1<<62, 1), ErrSnapshot},
		{"a number without end", limit(FixedWindow),
			append(in(FixedWindow), 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 1), ErrSnapshot},
		{"too many slots", limit(SlidingWindow), uints(in(SlidingWindow), 5, 11), ErrSnapshot},
		{"a slot too full", limit(SlidingWindow), uints(in(SlidingWindow), 5, 0, 1<<32), ErrSnapshot},
		{"slots too full", Limit{Algorithm: SlidingWindow, Limit: MaxLimit, Window: time.Minute},
			uints(in(SlidingWindow), 5, 1, 1<<53, 1), ErrSnapshot},
		{"a remainder that is a nanosecond", limit(TokenBucket), uints(in(TokenBucket), 5, 10), ErrSnapshot},
		{"an empty log", limit(SlidingLog), uints(in(SlidingLog), 0, 0, 0), ErrSnapshot},
		{"more entries than units", limit(SlidingLog), uints(in(SlidingLog), 2, 0, 0, 1, 3), ErrSnapshot},
		{"a run of none", limit(SlidingLog), uints(in(SlidingLog), 2, 0, 0, 1, 0, 0, 0), ErrSnapshot},
		{"entries beyond the newest", limit(SlidingLog), uints(in(SlidingLog), 2, 0, 1, 0, 4), ErrSnapshot},
		{"entries that do not reach the newest", limit(SlidingLog), uints(in(SlidingLog), 1, 0, 1, 0), ErrSnapshot},
		{"an entry in the future", limit(SlidingLog), uints(in(SlidingLog), 1, 2*longestTick+1, 0, 0), ErrSnapshot},
		{"no leases", limit(Concurrency), uints(in(Concurrency), 0, 0), ErrSnapshot},
		{"a lease that outlives all", limit(Concurrency), uints(in(Concurrency), 1, 5, 0, 1, 6, 1), ErrSnapshot},
		{"a lease of nothing", limit(Concurrency), uints(in(Concurrency), 1, 5, 0, 1, 5, 0), ErrSnapshot},
		{"fewer leases than said", limit(Concurrency), uints(in(Concurrency), 2, 5, 0, 1, 5, 1), ErrSnapshot},
		{"a moved lease without a home", limit(Concurrency), uints(in(Concurrency), 1, 5, 1), ErrSnapshot},
		{"a home that is no slot", limit(Concurrency), uints(in(Concurrency), 1, 5, 1, MaxLeases, 1, 5, 1),
			ErrSnapshot},
		{"a slot that is none", limit(Concurrency), uints(in(Concurrency), 1, 5, 2*MaxLeases, 1, 5, 1), ErrSnapshot},
		{"a nameless lease that moved", limit(Concurrency), uints(in(Concurrency), 1, 5, 1, 3, 0, 5, 1), ErrSnapshot},
		{"a nameless lease", limit(Concurrency), uints(in(Concurrency), 1, 5, 0, 0, 5, 1), nil},
		{"a moved lease", limit(Concurrency), uints(in(Concurrency), 1, 5, 1, 3, 1, 5, 1), nil},
		{"two leases in a slot", limit(Concurrency), uints(in(Concurrency), 2, 5, 0, 1, 5, 1, 0, 2, 5, 1), ErrSnapshot},
		{"leases beyond all limits", limit(Concurrency), uints(in(Concurrency), 2, 5, 0, 1, 5, 1<<53, 2, 2, 5, 1),
			ErrSnapshot},
		{"a lease", limit(Concurrency), uints(in(Concurrency), 1, 5, 0, 1, 5, 1), nil},
		{"a lease far up", limit(Concurrency), uints(in(Concurrency), 1, 5, 2*(MaxLeases-1), 1, 5, 1), ErrNoMemory},
		{"an entry", limit(SlidingLog), uints(in(SlidingLog), 1, 0, 0, 0), nil},
	} {
		ls := Limits{tt.limit}
		a, s := NewArena(&testBudget{2 * PageBytes}), make(State, ls.Words())
		now := Instant{Mono: 1e9}
		_, err := ls.Restore(a, s, now, tt.data)
		expect.Equal(t, err, tt.err, "%s", tt.name)
		if idle := ls.Idle(a, s, now); idle != (tt.err != nil) || idle && liveBlocks(a) != 0 {
			t.Errorf("%s: idle %v with %d blocks", tt.name, idle, liveBlocks(a))
		}
	}
	// No memory for what is in order.
	ls := Limits{limit(SlidingLog)}
	a, s := NewArena(&testBudget{}), make(State, ls.Words())
	_, err := ls.Restore(a, s, Instant{}, uints(in(SlidingLog), 1, 0, 0, 0))
	expect.Equal(t, err, ErrNoMemory)
}

// TestSnapshotLate: what was on the way for a while expires late by that while.
func TestSnapshotLate(t *testing.T) {
	ls := Limits{{Algorithm: SlidingLog, Limit: 1, Window: time.Second}}
	a, s := NewArena(nil), make(State, ls.Words())
	ls.Init(s, Instant{})
	must.Value(ls.Decide(a, s, Instant{}, Request{Cost: 1}, nil))(t)
	data := ls.Append(nil, a, s, Instant{Mono: 1e8})
	must.Value(ls.Restore(a, s, Instant{Mono: 4e8}, data))(t)
	d, err := ls.Decide(a, s, Instant{Mono: 4e8}, Request{Cost: 1}, nil)
	expect.True(t, err == nil && d.RetryAfter == 900*time.Millisecond, "%+v, %v", d, err)
}

// TestTick: the window, and a tick more, are fewer than 1<<31 ticks, and no shorter tick would do.
func TestTick(t *testing.T) {
	for _, w := range []time.Duration{MinWindow, time.Second, 1<<31 - 2, 1<<31 - 1, 1 << 31, 1<<32 - 2, 1<<32 - 1,
		1 << 32, time.Minute, time.Hour, MaxWindow} {
		l := Limit{Algorithm: SlidingLog, Limit: 1, Window: w}
		k := l.tickShift()
		fits := func(k int) bool { return uint64(w)+1<<k <= 1<<(tickBits+k) }
		expect.True(t, fits(k) && (k <= 0 || !fits(k-1)) && 1<<k <= longestTick, "%v: a tick of %d ns", w, 1<<k)
	}
	l := (Limit{Window: time.Minute})
	expect.Equal(t, l.tickShift(), 5, "a minute has ticks of %d ns, want 32", 1<<l.tickShift())
	l = (Limit{Window: MaxWindow})
	expect.Equal(t, 1<<l.tickShift(), longestTick, "the longest tick has %d bits", bits.Len(1<<l.tickShift()))
}

// TestBucketClamp: what a bucket is made to owe at a change of algorithm stays within 64-bit instants.
func TestBucketClamp(t *testing.T) {
	from := Limits{{Algorithm: FixedWindow, Limit: MaxLimit, Window: time.Hour}}
	to := Limits{{Algorithm: TokenBucket, Limit: 1, Window: MaxWindow}}
	a, s, u := NewArena(nil), make(State, from.Words()), make(State, to.Words())
	now := Instant{Mono: int64(MaxFill)}
	from.Init(s, now)
	must.Value(from.Decide(a, s, now, Request{Cost: MaxLimit}, nil))(t)
	must.NoError(t, from.Convert(a, s, now, to, u))
	d, err := to.Decide(a, u, now, Request{Cost: 1}, nil)
	expect.True(t, err == nil && !d.Allowed && d.ResetAfter == MaxFill, "%+v, %v", d, err)
}
