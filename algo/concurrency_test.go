package algo

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// leaseOracle keeps leases by their ids.
type leaseOracle struct {
	limit  Limit
	leases map[uint64]event // at is the expiry
	latest int64
}

func (o *leaseOracle) see(now int64) {
	maps.DeleteFunc(o.leases, func(_ uint64, e event) bool { return now >= e.at })
	if len(o.leases) == 0 {
		o.latest = now
	}
}

func (o *leaseOracle) used() (n int64) {
	for _, e := range o.leases {
		n += e.n
	}
	return n
}

func (o *leaseOracle) earliest() int64 {
	first := int64(1<<63 - 1)
	for _, e := range o.leases {
		first = min(first, e.at)
	}
	return first
}

func (o *leaseOracle) set(id uint64, expiry, n int64) {
	o.leases[id] = event{expiry, n}
	o.latest = max(o.latest, expiry)
}

// pick returns one of the ids, the same one for the same source.
func (o *leaseOracle) pick(src *source) (uint64, bool) {
	if len(o.leases) == 0 {
		return 0, false
	}
	ids := slices.Sorted(maps.Keys(o.leases))
	return ids[src.n(int64(len(ids)-1))], true
}

func playLeases(t testing.TB, src *source, l Limit, crowd int64) {
	t.Helper()
	ls, a := Limits{l}, NewArena(nil)
	must.NoError(t, ls.Validate())
	s, now := make(State, ls.Words()), Instant{Mono: src.n(1 << 40)}
	ls.Init(s, now)
	o := &leaseOracle{limit: l, leases: map[uint64]event{}}
	var former []uint64
	for src.more() {
		if src.n(4) == 0 {
			now.Mono += src.n(int64(l.Window) / 4)
		}
		o.see(now.Mono)
		switch id, ok := o.pick(src); src.n(12) {
		default:
			r := Request{Cost: 1, Nonce: uint64(src.n(1<<62)) << 1, TTL: time.Duration(src.n(2 * int64(l.Window)))}
			if src.n(2) == 0 {
				r.Cost = src.n(min(l.Limit+1, 10))
			}
			r.Partial = src.n(3) == 0
			for range 1 + src.n(crowd) {
				o.acquire(t, ls, a, s, now, r)
			}
		case 0, 1:
			if !ok {
				continue
			}
			former = append(former, id)
			delete(o.leases, id)
			must.True(t, ls.Release(a, s, now, id), "lease %x could not be released", id)
		case 2:
			if !ok {
				continue
			}
			ttl := time.Duration(src.n(2 * int64(l.Window)))
			want := min(ttl, l.Window)
			if ttl == 0 {
				want = l.Window
			}
			o.set(id, now.Mono+int64(want), o.leases[id].n)
			got, ok := ls.Renew(a, s, now, id, ttl)
			must.True(t, ok && got == want, "lease %x renewed for %v, %v; want %v", id, got, ok, want)
		case 3: // ids of nothing
			bad := uint64(src.n(1<<62)) ^ id
			if src.n(2) == 0 {
				bad = uint64(src.n(70)) // a slot without nonce
			} else if n := len(former); n > 0 && src.n(1) == 0 {
				bad = former[src.n(int64(n-1))]
			} else if ok && src.n(1) == 0 {
				bad = id ^ 1<<src.n(63)
			}
			if _, known := o.leases[bad]; known {
				continue
			}
			must.True(t, !ls.Release(a, s, now, bad), "%x is no lease, and was released", bad)
			_, ok := ls.Renew(a, s, now, bad, 0)
			must.True(t, !ok, "%x is no lease, and was renewed", bad)
		case 4:
			if src.n(5) != 0 {
				continue
			}
			data := ls.Append(nil, a, s, now)
			ls.Free(a, s)
			must.Equal(t, liveBlocks(a), 0, "blocks are nobody's")
			shift := src.n(1<<50) - now.Mono
			now.Mono += shift
			rest, err := ls.Restore(a, s, now, data)
			must.True(t, err == nil && len(rest) == 0, "%v", err)
			for id, e := range o.leases {
				o.leases[id] = event{e.at + shift, e.n}
			}
			o.latest += shift
		case 5:
			l.Limit = 1 + src.n(2*o.limit.Limit)
			o.limit = l
			u := make(State, ls.Words())
			must.NoError(t, ls.Convert(a, s, now, Limits{l}, u))
			ls, s = Limits{l}, u
			o.limit = l
		}
		o.judge(t, ls, a, s, now)
	}
	ls.Free(a, s)
	must.Equal(t, liveBlocks(a), 0, "blocks are nobody's")
}

func (o *leaseOracle) acquire(t testing.TB, ls Limits, a *Arena, s State, now Instant, r Request) {
	t.Helper()
	want := Decision{Limit: o.limit.Limit}
	room := max(0, o.limit.Limit-o.used())
	switch {
	case r.Cost == 0:
		want.Allowed = room > 0
	case room >= r.Cost:
		want.Allowed, want.Granted = true, r.Cost
	case r.Partial && room > 0:
		want.Allowed, want.Granted = true, room
	}
	if !want.Allowed {
		if want.RetryAfter = time.Duration(o.earliest() - now.Mono); r.Cost > o.limit.Limit && !r.Partial {
			want.RetryAfter = Never
		}
	}
	got := must.Value(ls.Decide(a, s, now, r, nil))(t)
	if want.Lease = got.Lease; want.Granted > 0 {
		if _, used := o.leases[got.Lease]; used || got.Lease == 0 || got.Lease>>slotBits != max(r.Nonce&nonceMask, 1) {
			t.Fatalf("lease id %x of nonce %x", got.Lease, r.Nonce)
		}
		ttl := r.TTL
		if ttl == 0 || ttl > o.limit.Window {
			ttl = o.limit.Window
		}
		o.set(got.Lease, now.Mono+int64(ttl), want.Granted)
	} else if got.Lease != 0 {
		t.Fatalf("lease %x for nothing", got.Lease)
	}
	want.Remaining = max(0, o.limit.Limit-o.used())
	want.ResetAfter = time.Duration(o.latest - now.Mono)
	must.True(t, got == want, "%+v:\n got %+v\nwant %+v", r, got, want)
}

func (o *leaseOracle) judge(t testing.TB, ls Limits, a *Arena, s State, now Instant) {
	t.Helper()
	must.Equal(t, ls.Used(a, s, now, 0), o.used(), "in use")
	if got := ls.Idle(a, s, now); got != (len(o.leases) == 0) {
		t.Fatalf("idle %v with %d leases", got, len(o.leases))
	} else if got && liveBlocks(a) != 0 {
		t.Fatal("an idle state owns blocks")
	}
}

func TestLeasesAgainstOracle(t *testing.T) {
	for seed := range uint64(60) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			src := seeded(seed, 400)
			playLeases(t, src, Limit{Algorithm: Concurrency, Limit: 1 + src.n(40),
				Window: time.Duration(src.n(1000)+1) * time.Millisecond}, 3)
		})
	}
	for seed := range uint64(3) { // large tables
		playLeases(t, seeded(seed, 25), Limit{Algorithm: Concurrency, Limit: MaxLimit, Window: time.Hour}, 150)
	}
}

// TestMostLeases: a state with as many leases as it can hold refuses another one until one is released.
func TestMostLeases(t *testing.T) {
	ls, a := Limits{{Algorithm: Concurrency, Limit: MaxLimit, Window: time.Hour}}, NewArena(&testBudget{1 << 26})
	s := make(State, ls.Words())
	ls.Init(s, Instant{})
	acquire := func() (Decision, error) { return ls.Decide(a, s, Instant{}, Request{Cost: 1, Nonce: 1}, nil) }
	var last uint64
	for range MaxLeases {
		d, err := acquire()
		must.NoError(t, err)
		last = d.Lease
	}
	used := a.Bytes()
	for range 2 {
		must.ErrorIs(t, expect.Err(acquire()), ErrNoMemory)
		must.ErrorIs(t, ls.Charge(a, s, Instant{}, 1), ErrNoMemory)
	}
	expect.Equal(t, a.Bytes(), used, "bytes after a refusal")
	must.True(t, ls.Release(a, s, Instant{}, last), "not released")
	expect.True(t, must.Value(acquire())(t).Allowed, "refused after a release")
	expect.Equal(t, ls.Used(a, s, Instant{}, 0), MaxLeases, "in use")
	ls.Free(a, s)
	expect.Equal(t, liveBlocks(a), 0, "blocks are nobody's")
}
