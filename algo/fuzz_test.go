package algo

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// fuzzLimits picks limits by a byte.
func fuzzLimits(t testing.TB, pick byte) Limits {
	all := []Limits{
		{{Algorithm: FixedWindow, Limit: 10, Window: time.Second, CountDenied: true}},
		{{Algorithm: FixedWindow, Limit: 10, Period: Month, Zone: mustZone(t, "Europe/Berlin")}},
		{{Algorithm: SlidingWindow, Limit: 10, Window: time.Second}},
		{{Algorithm: SlidingWindow, Limit: 1 << 40, Window: time.Minute, Slots: 100, CountDenied: true}},
		{{Algorithm: SlidingCounter, Limit: 10, Window: time.Second}},
		{{Algorithm: SlidingLog, Limit: 10, Window: time.Second, CountDenied: true}},
		{{Algorithm: SlidingLog, Limit: MaxLimit, MaxLog: MaxLimit, Window: MaxWindow}},
		{{Algorithm: TokenBucket, Limit: 7, Window: time.Second}},
		{{Algorithm: LeakyBucket, Limit: 10, Capacity: 99, Window: time.Second}},
		{{Algorithm: Concurrency, Limit: 10, Window: time.Second}},
		{{Algorithm: SlidingLog, Limit: 3, Window: time.Second}, {Algorithm: TokenBucket, Limit: 10,
			Window: time.Minute}, {Algorithm: FixedWindow, Limit: 100, Period: Day}},
		{{Algorithm: SlidingLog, Limit: Unlimited}, {Algorithm: SlidingLog, Limit: 100, Window: 90 * time.Second}},
	}
	return all[int(pick)%len(all)]
}

// FuzzRestore reads anything as a snapshot, and uses the state that comes of it.
func FuzzRestore(f *testing.F) {
	for pick := range byte(12) {
		ls, a := fuzzLimits(f, pick), NewArena(nil)
		s := make(State, ls.Words())
		ls.Init(s, Instant{Wall: 1e18})
		f.Add(pick, ls.Append(nil, a, s, Instant{Wall: 1e18}))
		for i, cost := range []int64{1, 1, 2, 5, 1} {
			_, err := ls.Decide(a, s, Instant{Mono: int64(i) * 1e7, Wall: 1e18},
				Request{Cost: cost, Nonce: uint64(i) * 0x123456789abcd}, nil)
			must.NoError(f, err)
		}
		data := ls.Append(nil, a, s, Instant{Mono: 5e7, Wall: 1e18})
		f.Add(pick, data)
		f.Add(pick, append(data[:len(data):len(data)], 1, 2, 3))
		f.Add(pick, data[:len(data)/2])
	}
	// One lease in the last slot of all, twice.
	lease := []byte{snapshotVersion, byte(Concurrency), 2, 100}
	for range 2 {
		lease = binary.AppendUvarint(lease, MaxLeases-1)
		lease = append(lease, 1, 50, 1)
	}
	f.Add(byte(9), lease)
	// A log of one run of all there can be.
	f.Add(byte(6), binary.AppendUvarint([]byte{snapshotVersion, byte(SlidingLog), 0x80, 0x80, 0x80, 0x80, 0x80, 0x80,
		0x80, 0x10, 0, 0, 1}, uint64(MaxLimit)))

	f.Fuzz(func(t *testing.T, pick byte, data []byte) {
		ls := fuzzLimits(t, pick)
		const budget = 1 << 24
		a := NewArena(&testBudget{budget})
		s := make(State, ls.Words())
		now := Instant{Mono: 1e15, Wall: 1_700_000_000_000_000_000}
		rest, err := ls.Restore(a, s, now, data)
		if err != nil {
			must.Equal(t, liveBlocks(a), 0, "blocks are nobody's")
			must.True(t, ls.Idle(a, s, now), "what could not be restored is not new")
			return
		}
		must.True(t, len(rest) <= len(data) && string(rest) == string(data[len(data)-len(rest):]),
			"the rest is not what follows")
		most := 8192*(len(data)+4) + 3*PageBytes
		must.True(t, a.Bytes() <= most, "%d bytes make %d", len(data), a.Bytes())
		// It can be used: what it says of itself comes true.
		again := ls.Append(nil, a, s, now)
		b, u := NewArena(nil), make(State, ls.Words())
		must.NoError(t, expect.Err(ls.Restore(b, u, now, again)), "its own snapshot")
		for i := range 5 {
			r := Request{Cost: int64(i) + 1}
			d, err := ls.Decide(a, s, now, r, nil)
			e, _ := ls.Decide(b, u, now, r, nil)
			e.Lease = d.Lease // a copy may put it elsewhere
			must.True(t, err != nil || d == e, "%+v, its copy %+v", d, e)
			if err != nil {
				break
			}
			must.True(t, d.RetryAfter >= -1 && d.ResetAfter >= 0 && d.Remaining >= -1 && d.Delay >= 0, "%+v", d)
			if d.RetryAfter > 0 && ls[0].Algorithm != Concurrency {
				now = later(now, d.RetryAfter)
				d, err := ls.Decide(a, s, now, r, nil)
				must.True(t, err != nil || d.Allowed, "does not pass after retry_after: %+v", d)
				must.Value(ls.Decide(b, u, now, r, nil))(t)
			}
			n, m := ls.Refund(a, s, now, int64(i)), ls.Refund(b, u, now, int64(i))
			must.True(t, n == m, "gives back %d, its copy %d", n, m)
		}
		to, v := fuzzLimits(t, pick+1), State(nil)
		v = make(State, to.Words())
		if ls.Convert(a, s, now, to, v) == nil {
			to.Free(a, v)
		} else {
			ls.Free(a, s)
		}
		ls.Free(b, u)
		must.True(t, liveBlocks(a) == 0 && liveBlocks(b) == 0, "blocks are nobody's")
	})
}

// FuzzExtend extends a copy, which holds something or nothing, with anything, and uses the state that comes of it, be
// there an error or not.
func FuzzExtend(f *testing.F) {
	for pick := range byte(12) {
		ls := fuzzLimits(f, pick)
		r, now := newReplica(ls, Instant{Wall: 1e18}), Instant{Wall: 1e18}
		mark := ls.Mark(r.s)
		for _, cost := range []int64{1, 1, 2, 5, 1} {
			now = later(now, 1e7)
			r.ask(f, now, cost)
			data := ls.AppendSince(nil, r.a, r.s, now, mark)
			mark = ls.Mark(r.s)
			f.Add(pick, uint16(cost), data)
			f.Add(pick, uint16(0), data[:len(data)-1])
		}
		f.Add(pick, uint16(3), ls.AppendSince(nil, r.a, r.s, now, mark))
	}
	f.Fuzz(func(t *testing.T, pick byte, held uint16, data []byte) {
		ls := fuzzLimits(t, pick)
		now := Instant{Mono: 1e15, Wall: 1_700_000_000_000_000_000}
		r := newReplica(ls, now)
		r.a = NewArena(&testBudget{1 << 24})
		for i := range held % 8 {
			now = later(now, time.Duration(held)*1e3)
			must.NoError(t, ls.Charge(r.a, r.s, now, 1+int64(i)*int64(held>>8)))
		}
		rest, err := ls.Extend(r.a, r.s, now, data)
		must.True(t, err != nil || string(rest) == string(data[len(data)-len(rest):]), "the rest is not what follows")
		most := 8192*(len(data)+4) + 16*PageBytes
		must.True(t, r.a.Bytes() <= most, "%d bytes make %d", len(data), r.a.Bytes())
		// It is a state like any other: its copy says the same, and goes on to.
		c := r.clone(t, now)
		for i := range int64(5) {
			x, errX := ls.Decide(r.a, r.s, now, Request{Cost: i}, nil)
			y, _ := ls.Decide(c.a, c.s, now, Request{Cost: i}, nil)
			y.Lease = x.Lease // a copy may put it elsewhere
			if errX != nil {
				break
			}
			must.True(t, x == y, "%+v, its copy %+v", x, y)
			now = later(now, 3e8)
		}
		u := make(State, ls.Words())
		ls.Init(u, now)
		if ls.Charge(r.a, u, now, 2) == nil && ls.Join(r.a, r.s, now, u) == nil {
			r.clone(t, now)
		}
		ls.Free(r.a, u)
		ls.Free(r.a, r.s)
		must.Equal(t, liveBlocks(r.a), 0, "blocks are nobody's")
	})
}
