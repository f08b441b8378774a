package algo

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// joinLimits are limits whose states are joined: each algorithm, alone and beside others.
func joinLimits() []Limits {
	const w = 10 * time.Second
	single := []Limit{
		{Algorithm: SlidingLog, Limit: 40, Window: w},
		{Algorithm: SlidingLog, Limit: 40, Window: w, CountDenied: true},
		{Algorithm: SlidingWindow, Limit: 40, Window: w},
		{Algorithm: SlidingWindow, Limit: 40, Window: w, Slots: 7},
		{Algorithm: SlidingWindow, Limit: 1 << 40, Window: w, Slots: 1},
		{Algorithm: SlidingCounter, Limit: 40, Window: w},
		{Algorithm: FixedWindow, Limit: 40, Window: w},
		{Algorithm: FixedWindow, Limit: 10, Window: w, CarryDebt: true},
		{Algorithm: FixedWindow, Limit: 40, Period: Minute},
		{Algorithm: FixedWindow, Limit: 40, Window: w, Period: Epoch},
		{Algorithm: FixedWindow, Limit: 10, Window: w, Period: Epoch, CarryDebt: true},
		{Algorithm: TokenBucket, Limit: 37, Capacity: 50, Window: w},
		{Algorithm: LeakyBucket, Limit: 41, Window: w},
	}
	var all []Limits
	for _, l := range single {
		all = append(all, Limits{l})
	}
	return append(all, Limits(single[:4]), Limits{single[5], single[0], single[8], single[11]},
		Limits{single[7], single[10], single[2]})
}

// sides returns states in one Arena that began as copies of one state and then went ways of their own. With apart their
// slots, windows and ticks begin at different instants.
func sides(t *testing.T, rng *rand.Rand, ls Limits, n int, apart bool) (a *Arena, states []State, now Instant) {
	const w = int64(10 * time.Second)
	a = NewArena(nil)
	start := Instant{Mono: 1e15 + rng.Int64N(w), Wall: 1.7e18 + rng.Int64N(6*w)}
	common := make(State, ls.Words())
	ls.Init(common, start)
	act := func(s State, until int64, now Instant) {
		for now.Mono < until {
			if now = later(now, time.Duration(rng.Int64N(w/8))); now.Mono >= until {
				return
			}
			var err error
			switch k := rng.IntN(12); {
			case k < 8:
				_, err = ls.Decide(a, s, now, Request{Cost: 1 + rng.Int64N(6)}, nil)
			case k < 10:
				err = ls.Charge(a, s, now, 1+rng.Int64N(9))
			default:
				ls.Refund(a, s, now, 1+rng.Int64N(9))
			}
			must.NoError(t, err)
		}
	}
	parted := later(start, time.Duration(rng.Int64N(2*w)))
	act(common, parted.Mono, start)
	now = later(parted, time.Duration(rng.Int64N(2*w)))
	for range n {
		s := make(State, ls.Words())
		var shift time.Duration
		if apart {
			shift = time.Duration(rng.Int64N(w))
		}
		there := Instant{Mono: parted.Mono + int64(shift), Wall: parted.Wall}
		if rng.IntN(4) == 0 {
			ls.Init(s, there) // a side that has no copy
		} else if _, err := ls.Restore(a, s, there, ls.Append(nil, a, common, parted)); err != nil {
			t.Fatal(err)
		}
		act(s, now.Mono+int64(shift), there)
		back := make(State, ls.Words())
		_, err := ls.Restore(a, back, now, ls.Append(nil, a, s, Instant{Mono: now.Mono + int64(shift), Wall: now.Wall}))
		must.NoError(t, err)
		ls.Free(a, s)
		states = append(states, back)
	}
	ls.Free(a, common)
	return a, states, now
}

// joined is the join of states, from the first to the last, as a state of its own.
func joined(t *testing.T, ls Limits, a *Arena, now Instant, states ...State) State {
	t.Helper()
	u := make(State, ls.Words())
	ls.Init(u, now)
	for _, s := range states {
		must.NoError(t, ls.Join(a, u, now, s))
	}
	return u
}

// TestJoinLattice: joins are idempotent, commutative and associative.
func TestJoinLattice(t *testing.T) {
	for i, ls := range joinLimits() {
		for seed := range uint64(90) {
			apart := seed%3 == 0
			a, s, now := sides(t, rand.New(rand.NewPCG(seed, uint64(i))), ls, 3, apart)
			contents := func(s State) string { return replica{ls, a, s}.contents(now) }
			same := func(law string, x, y State) {
				got, want := contents(x), contents(y)
				must.True(t, got == want, "%d, seed %d: not %s:\n got %s\nwant %s", i, seed, law, got, want)
			}
			x, y, z := s[0], s[1], s[2]
			same("idempotent", joined(t, ls, a, now, x, x), joined(t, ls, a, now, x))
			xy := joined(t, ls, a, now, x, y)
			same("idempotent", joined(t, ls, a, now, xy, y, x), xy)
			same("commutative", xy, joined(t, ls, a, now, y, x))
			if apart && slices.ContainsFunc(ls,
				func(l Limit) bool { return l.Algorithm == SlidingLog || l.Algorithm == SlidingWindow }) {
				continue // each join may round once more
			}
			same("associative", joined(t, ls, a, now, xy, z), joined(t, ls, a, now, x, joined(t, ls, a, now, y, z)))
		}
	}
}

// TestJoinBounds: at every later instant a join holds no less than either side, and of what is told from the rest by
// its instant no more than the larger of them.
func TestJoinBounds(t *testing.T) {
	for i, ls := range joinLimits() {
		for seed := range uint64(30) {
			rng := rand.New(rand.NewPCG(seed, uint64(i)))
			apart := seed%2 == 1
			a, s, now := sides(t, rng, ls, 2, apart)
			u := joined(t, ls, a, now, s...)
			for at := now; at.Mono < now.Mono+3*int64(time.Minute); at = later(at,
				time.Duration(1+rng.Int64N(int64(2*time.Second)))) {
				for k := range ls {
					used := func(s State, at Instant) int64 { return usedLater(t, ls, a, s, now, at, k) }
					x, y, got := used(s[0], at), used(s[1], at), used(u, at)
					most := max(x, y)
					switch l := &ls[k]; {
					case l.Algorithm == FixedWindow && at.Mono > now.Mono || l.Algorithm == SlidingCounter:
						most = got // held to TestJoinWindows
					case apart && l.Algorithm == SlidingLog:
						early := later(at, -time.Duration(1<<l.tickShift()))
						if early.Mono >= now.Mono {
							most = max(used(s[0], early), used(s[1], early))
						} else {
							most = got
						}
					case apart && l.Algorithm == SlidingWindow:
						early := later(at, -time.Duration(slidingWindow{}.width(l)))
						if early.Mono >= now.Mono {
							most = max(used(s[0], early), used(s[1], early))
						} else {
							most = got
						}
					}
					must.True(t, got >= max(x, y) && got <= most,
						"%d, seed %d: limit %d: %v after the join of %d and %d it holds %d, want at most %d", i, seed,
						k, time.Duration(at.Mono-now.Mono), x, y, got, most)
				}
			}
		}
	}
}

// usedLater is what will be in use of a state at a later instant; the state stays as it is now.
func usedLater(t *testing.T, ls Limits, a *Arena, s State, now, at Instant, k int) int64 {
	t.Helper()
	u := make(State, len(s))
	must.Value(ls.Restore(a, u, now, ls.Append(nil, a, s, now)))(t)
	defer ls.Free(a, u)
	return ls.Used(a, u, at, k)
}

// TestJoinWindows: of windows the later start, and the larger count.
func TestJoinWindows(t *testing.T) {
	for _, l := range []Limit{{Algorithm: FixedWindow, Limit: 9, Window: time.Second},
		{Algorithm: SlidingCounter, Limit: 9, Window: time.Second}} {
		ls := Limits{l}
		a := NewArena(nil)
		charged := func(at, units int64) State {
			s := make(State, ls.Words())
			there := Instant{Mono: 5e9}
			ls.Init(s, there)
			must.NoError(t, ls.Charge(a, s, there, units))
			u := make(State, ls.Words())
			must.Value(ls.Restore(a, u, Instant{Mono: at}, ls.Append(nil, a, s, there)))(t)
			return u
		}
		early, late := charged(7e9, 5), charged(7.6e9, 2)
		u := joined(t, ls, a, Instant{Mono: 7.7e9}, early, late)
		end := Instant{Mono: 8.6e9 - 1}
		if l.Algorithm == FixedWindow {
			got := ls.Used(a, u, end, 0)
			expect.True(t, got == 5, "at the end of the later window %d, want the larger count of 5", got)
			end.Mono++
		} else {
			end.Mono = 9.6e9
		}
		got := ls.Used(a, u, end, 0)
		expect.True(t, got == 0, "%v: %d in use when the later windows have ended", l.Algorithm, got)
	}
}

// TestJoinCalendar: of the same window the larger count, and an earlier one is forgotten.
func TestJoinCalendar(t *testing.T) {
	const day = int64(24 * time.Hour)
	for _, tt := range []struct {
		s, t  int64 // wall clock at which each was charged: s for 3, t for 4
		limit int64
		carry bool
		want  int64
	}{{day, day + 5, 10, false, 4}, {day, 2 * day, 10, false, 4}, {2 * day, day, 10, false, 3},
		{day, day + 5, 2, true, 4}, {day, 2 * day, 1, true, 4}, {2 * day, day, 1, true, 3}, {2 * day, day, 3, true, 3},
		{3 * day, day, 2, true, 3}, {day, 4 * day, 2, true, 4}} {
		ls := Limits{{Algorithm: FixedWindow, Limit: tt.limit, Period: Day, CarryDebt: tt.carry}}
		r := newReplica(ls, Instant{Wall: tt.s})
		u := make(State, ls.Words())
		ls.Init(u, Instant{})
		for _, c := range []struct {
			s    State
			wall int64
			n    int64
		}{{r.s, tt.s, 3}, {u, tt.t, 4}} {
			must.NoError(t, ls.Charge(r.a, c.s, Instant{Wall: c.wall}, c.n))
		}
		// The wall clock was set back to the first day: windows that were opened stay.
		must.NoError(t, ls.Join(r.a, r.s, Instant{Wall: day}, u))
		got := ls.Used(r.a, r.s, Instant{Wall: day}, 0)
		expect.True(t, got == tt.want, "%+v: %d used", tt, got)
	}
}

// TestJoinSeveral: each limit by itself, and memory for all or for none.
func TestJoinSeveral(t *testing.T) {
	ls := Limits{
		{Algorithm: SlidingLog, Limit: 9000, Window: time.Minute},
		{Algorithm: TokenBucket, Limit: Unlimited},
		{Algorithm: TokenBucket, Limit: 9000, Window: time.Hour},
		{Algorithm: SlidingLog, Limit: 8000, Window: time.Hour},
	}
	budget := &testBudget{1 << 20}
	a, s, u := NewArena(budget), make(State, ls.Words()), make(State, ls.Words())
	ls.Init(s, Instant{})
	ls.Init(u, Instant{})
	for i := range 3000 {
		for _, v := range []State{s, u} {
			must.Value(ls.Decide(a, v, Instant{Mono: int64(i) * 1e4}, Request{Cost: 1}, nil))(t)
		}
	}
	now := Instant{Mono: 30e6}
	before, mark := (replica{ls, a, s}).contents(now), ls.Mark(s)
	blocks := liveBlocks(a)
	failures := 0
	for ; ; failures++ {
		budget.left = failures * PageBytes
		a.Trim()
		if err := ls.Join(a, s, now, u); err == nil {
			break
		} else if err != ErrNoMemory || failures > 100 {
			t.Fatal(err)
		}
		if got := (replica{ls, a, s}).contents(now); got != before || ls.Mark(s) != mark || liveBlocks(a) != blocks {
			t.Fatalf("a merge without memory: %d blocks, were %d\n got %s\nwant %s", liveBlocks(a), blocks, got, before)
		}
	}
	expect.True(t, failures != 0, "memory sufficed at once")
	for i, want := range []int64{3000, 0, 3000, 3000} {
		got := ls.Used(a, s, now, i)
		expect.True(t, got == want, "limit %d: %d used, want %d", i, got, want)
	}
	ls.Free(a, s)
	ls.Free(a, u)
	expect.Equal(t, liveBlocks(a), 0, "blocks are nobody's")
}

// TestJoinLeases has several states part from each other and meet again, and knows every lease by its id.
func TestJoinLeases(t *testing.T) {
	for seed := range uint64(18) {
		r := rand.New(rand.NewPCG(seed, 9))
		l := Limit{Algorithm: Concurrency, Limit: MaxLimit, Window: time.Minute}
		ls, a := Limits{l}, NewArena(nil)
		now := Instant{}
		type side struct {
			s    State
			live map[uint64]event
			anon []event
		}
		newSide := func() *side {
			d := &side{s: make(State, ls.Words()), live: map[uint64]event{}}
			ls.Init(d.s, now)
			return d
		}
		act := func(d *side, crowd int) {
			for range crowd {
				now.Mono += r.Int64N(int64(time.Second) / 20)
				for id, e := range d.live {
					if e.at <= now.Mono {
						delete(d.live, id)
					}
				}
				switch k := r.IntN(20); {
				case k < 10:
					n, ttl := 1+r.Int64N(3), 1+r.Int64N(int64(l.Window))
					got := must.Value(ls.Decide(a, d.s, now,
						Request{Cost: n, Nonce: r.Uint64(), TTL: time.Duration(ttl)}, nil))(t)
					d.live[got.Lease] = event{now.Mono + ttl, n}
				case k == 10:
					must.NoError(t, ls.Charge(a, d.s, now, 2))
					d.anon = append(d.anon, event{now.Mono + int64(l.Window), 2})
				default:
					for id, e := range d.live { // any
						if k < 15 {
							ttl := 1 + r.Int64N(int64(l.Window))
							_, ok := ls.Renew(a, d.s, now, id, time.Duration(ttl))
							must.True(t, ok, "seed %d: %x cannot be renewed", seed, id)
							d.live[id] = event{now.Mono + ttl, e.n}
						} else {
							must.True(t, ls.Release(a, d.s, now, id) && !ls.Release(a, d.s, now, id),
								"seed %d: %x cannot be released, or twice", seed, id)
							delete(d.live, id)
						}
						break
					}
				}
			}
		}
		// Of units that have no identity, how many there are, and when the last of them expire.
		total := func(d *side) (all event) {
			for _, e := range d.anon {
				if e.at > now.Mono {
					all.n, all.at = all.n+e.n, max(all.at, e.at)
				}
			}
			return all
		}
		judge := func(d *side) {
			t.Helper()
			var want int64
			for _, e := range d.live {
				if e.at > now.Mono {
					want += e.n
				}
			}
			want += total(d).n
			got := ls.Used(a, d.s, now, 0)
			must.True(t, got == want, "seed %d: %d used, want %d", seed, got, want)
		}
		x := newSide()
		crowd := []int{5, 40, 400}[seed%3]
		act(x, crowd)
		for range 6 {
			// The other side begins as a copy, or as nothing.
			y := newSide()
			if r.IntN(3) > 0 {
				must.Value(ls.Restore(a, y.s, now, ls.Append(nil, a, x.s, now)))(t)
				for id, e := range x.live {
					y.live[id] = e
				}
				y.anon = append(y.anon, x.anon...)
			}
			act(x, crowd)
			act(y, crowd)
			judge(x)
			judge(y)
			must.NoError(t, ls.Join(a, x.s, now, y.s))
			for id, e := range y.live {
				x.live[id] = event{max(e.at, x.live[id].at), e.n}
			}
			p, q := total(x), total(y)
			x.anon = []event{{max(p.at, q.at), max(p.n, q.n)}}
			judge(x)
			judge(y)
			ls.Free(a, y.s)
			if r.IntN(2) == 0 { // a move knows the moved leases, too
				data := ls.Append(nil, a, x.s, now)
				ls.Free(a, x.s)
				must.Equal(t, liveBlocks(a), 0, "blocks are nobody's")
				must.Value(ls.Restore(a, x.s, now, data))(t)
				judge(x)
			}
			act(x, crowd)
			judge(x)
		}
		for id, e := range x.live {
			must.True(t, e.at <= now.Mono || ls.Release(a, x.s, now, id), "seed %d: %x is lost", seed, id)
		}
		x.live = nil
		judge(x)
		must.True(t, ls.Idle(a, x.s, later(now, l.Window)) && liveBlocks(a) == 0,
			"seed %d: %d blocks are nobody's", seed, liveBlocks(a))
	}
}

// TestJoinLeasesNoMemory: without memory for all of them the leases are as they were.
func TestJoinLeasesNoMemory(t *testing.T) {
	ls := Limits{{Algorithm: Concurrency, Limit: 10_000, Window: time.Minute}}
	budget := &testBudget{1 << 24}
	a := NewArena(budget)
	s, u := make(State, ls.Words()), make(State, ls.Words())
	var ids []uint64
	for i, v := range []State{s, u} {
		ls.Init(v, Instant{})
		for j := range 300 {
			d, err := ls.Decide(a, v, Instant{}, Request{Cost: 1, Nonce: uint64(2*j+i+1) * 0x9e3779b97f4a7}, nil)
			must.NoError(t, err)
			ids = append(ids, d.Lease)
		}
	}
	before, blocks, failures := (replica{ls, a, s}).contents(Instant{}), liveBlocks(a), 0
	for ; ; failures++ {
		a.Trim()
		budget.left = failures * PageBytes
		err := ls.Join(a, s, Instant{}, u)
		if err == nil {
			break
		}
		got := (replica{ls, a, s}).contents(Instant{})
		must.True(t, err == ErrNoMemory && got == before && liveBlocks(a) == blocks,
			"%v: %d blocks, were %d", err, liveBlocks(a), blocks)
	}
	expect.True(t, failures >= 3, "only %d failures", failures)
	for _, id := range ids {
		must.True(t, ls.Release(a, s, Instant{}, id), "%x is lost", id)
	}
	ls.Free(a, u)
	n := liveBlocks(a)
	expect.True(t, n == 0 && ls.Used(a, s, Instant{}, 0) == 0, "%d blocks are nobody's", n)
}
