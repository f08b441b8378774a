package algo

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// replica is a state, usually a copy of another one, with an Arena and limits of its own.
type replica struct {
	ls Limits
	a  *Arena
	s  State
}

func newReplica(ls Limits, now Instant) replica {
	r := replica{ls, NewArena(nil), make(State, ls.Words())}
	ls.Init(r.s, now)
	return r
}

func (r replica) extend(t testing.TB, now Instant, data []byte) {
	t.Helper()
	rest, err := r.ls.Extend(r.a, r.s, now, append(data[:len(data):len(data)], "rest"...))
	must.True(t, err == nil && string(rest) == "rest", "extend with %x: %q, %v", data, rest, err)
}

// clone returns the same state in an Arena of its own.
func (r replica) clone(t testing.TB, now Instant) replica {
	t.Helper()
	c := newReplica(r.ls, now)
	must.Value(c.ls.Restore(c.a, c.s, now, r.ls.Append(nil, r.a, r.s, now)))(t)
	return c
}

// contents says everything that a state has to say at now. Two logs with equal entries say the same in whatever way
// they are laid out.
func (r replica) contents(now Instant) string {
	var b strings.Builder
	now = r.s.tick(now)
	r.ls.walk(r.a, r.s, now, func(i int, c counter, t []uint64) {
		if c.used(&r.ls[i], r.a, t, now) == 0 {
			fmt.Fprintf(&b, "%d: idle; ", i)
		} else if r.ls[i].Algorithm == SlidingLog {
			fmt.Fprintf(&b, "%d: %d; ", i, logEvents(&r.ls[i], r.a, t))
		} else {
			fmt.Fprintf(&b, "%d: %x; ", i, c.snapshot(nil, &r.ls[i], r.a, t, now))
		}
	})
	return b.String()
}

// logEvents are a log's entries by their instants, those at the same one together.
func logEvents(l *Limit, a *Arena, s []uint64) (events []event) {
	for r := (slidingLog{}).cursor(a, s, l.tickShift()); r.n != 0; r.next() {
		if n := len(events); n > 0 && events[n-1].at == r.instant {
			events[n-1].n += r.n
		} else {
			events = append(events, event{r.instant, r.n})
		}
	}
	return events
}

// ask returns what each limit says to a request of so many units, 0 for a peek, and changes nothing else.
func (r replica) ask(t testing.TB, now Instant, cost int64) []Decision {
	t.Helper()
	each := make([]Decision, len(r.ls))
	must.Value(r.ls.Decide(r.a, r.s, now, Request{Cost: cost}, each))(t)
	return each
}

// TestReplicaLate keeps a copy on another clock, with delays that vary: it is as strict as the original or stricter at
// every later instant, and not for longer than the longest delay makes it. A log's ticks may make a difference of one.
func TestReplicaLate(t *testing.T) {
	all := shapes(t)
	r := rand.New(rand.NewPCG(3, 4))
	rounds, extensions := 250, 0
	if testing.Short() || underRace {
		rounds = 80
	}
	for round := range rounds {
		var ls Limits
		for range 1 + r.IntN(3) {
			ls = append(ls, all[r.IntN(len(all))])
		}
		window := max(int64(ls[0].Window), int64(time.Second))
		src := seeded(uint64(round), 0)
		original := newReplica(ls, Instant{})
		now := origins[round%len(origins)]
		ls.Init(original.s, now)
		offset := src.n(1<<50) - 1<<49
		there := func(at Instant) Instant { return Instant{at.Mono + offset, at.Wall} }
		copied := newReplica(ls, there(now))
		var mark uint64
		arrived, longest := now.Mono, int64(0)
		for range 25 {
			for range src.n(6) {
				now = later(now, time.Duration(src.n(window/4)))
				cost := 1 + src.n(5)
				switch src.n(9) {
				case 0:
					ls.Refund(original.a, original.s, now, cost)
				case 1:
					must.NoError(t, ls.Charge(original.a, original.s, now, cost))
				default:
					original.ask(t, now, cost)
				}
			}
			sent := now
			data := ls.AppendSince(nil, original.a, original.s, sent, mark)
			mark = ls.Mark(original.s)
			if data[0] == extensionVersion {
				extensions++
			}
			// Messages keep their order.
			arrived = max(arrived, sent.Mono+src.n([]int64{0, 1000, window / 50, window / 3}[src.n(3)]))
			at := later(sent, time.Duration(arrived-sent.Mono))
			longest = max(longest, arrived-sent.Mono)
			copied.extend(t, there(at), data)
			var tick time.Duration
			for _, l := range ls {
				if l.Algorithm == SlidingLog && l.Limit != Unlimited {
					tick = max(tick, 1<<l.tickShift())
				}
			}
			a, d, b, c := original.clone(t, sent), original.clone(t, sent), copied.clone(t, there(at)),
				copied.clone(t, there(at))
			for range 8 {
				late := later(at, time.Duration(longest)+tick)
				early := later(at, tick)
				x, y, z := a.ask(t, at, 0), b.ask(t, there(at), 0), c.ask(t, there(late), 0)
				w := d.ask(t, early, 0)
				for i := range ls {
					if x[i].Remaining != Unlimited &&
						(y[i].Remaining > w[i].Remaining || y[i].RetryAfter < w[i].RetryAfter) {
						t.Fatalf("round %d: %+v at %+v:\noriginal %+v\n    copy %+v", round, ls[i], at, w[i], y[i])
					}
					if ls[i].Period == 0 && z[i].Remaining < x[i].Remaining {
						t.Fatalf("round %d: %+v at %+v, and at the copy %v later:\noriginal %+v\n    copy %+v", round,
							ls[i], at,
							time.Duration(late.Mono-at.Mono), x[i], z[i])
					}
				}
				at = later(at, time.Duration(src.n(window/5)))
			}
			now = later(now, time.Duration(src.n(max(arrived-now.Mono, 1))))
		}
	}
	expect.True(t, extensions >= 5*rounds, "only %d extensions in %d rounds", extensions, rounds)
}

// TestMark is what a mark survives, and how much is written then.
func TestMark(t *testing.T) {
	log := Limit{Algorithm: SlidingLog, Limit: 1000, Window: time.Minute}
	denied := log
	denied.CountDenied = true
	other := Limit{Algorithm: SlidingLog, Limit: 2000, Window: time.Hour}
	bucket := Limit{Algorithm: TokenBucket, Limit: 1000, Window: time.Minute}
	now := Instant{Mono: 1e12}
	for _, tt := range []struct {
		name string
		ls   Limits
		do   func(r *replica)
		form byte // of what is written then; 0 for an extension with no unit
	}{
		{"nothing", Limits{log}, func(*replica) {}, 0},
		{"a peek", Limits{log}, func(r *replica) { r.ask(t, now, 0) }, 0},
		{"a refusal", Limits{log}, func(r *replica) { r.ask(t, now, 1001) }, 0},
		{"an admission", Limits{log, bucket, other}, func(r *replica) { r.ask(t, now, 3) }, extensionVersion},
		{"a charge", Limits{log, other}, func(r *replica) { must.NoError(t, r.ls.Charge(r.a, r.s, now, 3)) },
			extensionVersion},
		{"a refund", Limits{log}, func(r *replica) { r.ls.Refund(r.a, r.s, now, 3) }, 0},
		{"expiry", Limits{log}, func(r *replica) { now = later(now, 50*time.Second) }, 0},
		{"a refusal that counts", Limits{denied, bucket}, func(r *replica) { r.ask(t, now, 950) }, extensionVersion},
		{"a refusal that counts twice", Limits{denied, other}, func(r *replica) { r.ask(t, now, 950) },
			snapshotVersion},
		{"all of it since", Limits{log}, func(r *replica) {
			r.ls.Refund(r.a, r.s, now, 1000)
			r.ask(t, now, 7)
		}, extensionVersion},
		{"filling", Limits{log}, func(r *replica) { must.NoError(t, r.ls.Fill(r.a, r.s, now)) }, snapshotVersion},
		{"more than a position holds", Limits{log},
			func(r *replica) { must.NoError(t, r.ls.Charge(r.a, r.s, now, 1<<40)) }, snapshotVersion},
		{"much, several times", Limits{log}, func(r *replica) {
			for range 5 {
				must.NoError(t, r.ls.Charge(r.a, r.s, now, 1<<32-1))
			}
		}, snapshotVersion},
		{"as much as a position is long", Limits{log}, func(r *replica) {
			for range 1024 {
				must.NoError(t, r.ls.Charge(r.a, r.s, now, MaxLimit))
			}
		}, snapshotVersion},
		{"a merge", Limits{log}, func(r *replica) {
			u := make(State, r.ls.Words())
			r.ls.Init(u, now)
			must.NoError(t, r.ls.Charge(r.a, u, now, 1))
			must.NoError(t, r.ls.Join(r.a, r.s, now, u))
		}, snapshotVersion},
		{"a beginning", Limits{log}, func(r *replica) {
			r.ls.Free(r.a, r.s)
			r.ls.Init(r.s, now)
		}, snapshotVersion},
		{"another state of the key", Limits{log}, func(r *replica) {
			*r = newReplica(r.ls, Instant{Mono: now.Mono - 7})
			r.ask(t, now, 1)
		}, snapshotVersion},
		{"a move", Limits{log}, func(r *replica) { *r = r.clone(t, now) }, snapshotVersion},
		{"a change", Limits{log}, func(r *replica) {
			u := make(State, r.ls.Words())
			must.NoError(t, r.ls.Convert(r.a, r.s, now, r.ls, u))
			r.s = u
		}, snapshotVersion},
		{"being a copy", Limits{log}, func(r *replica) {
			r.extend(t, now, r.ls.AppendSince(nil, r.a, r.s, now, r.ls.Mark(r.s)))
		}, snapshotVersion},
		{"no log", Limits{bucket}, func(*replica) {}, snapshotVersion},
		{"an unlimited log", Limits{{Algorithm: SlidingLog, Limit: Unlimited}, bucket}, func(*replica) {},
			snapshotVersion},
	} {
		r := newReplica(tt.ls, now)
		for range 100 {
			now = later(now, 100*ms)
			r.ask(t, now, 1)
		}
		c := r.clone(t, now)
		mark := tt.ls.Mark(r.s)
		expect.Equal(t, tt.ls.logs() > 0, mark != 0, "%s: mark %d", tt.name, mark)
		tt.do(&r)
		data := tt.ls.AppendSince(nil, r.a, r.s, now, mark)
		switch {
		case tt.form == 0 && (data[0] != extensionVersion || len(data) > 5):
			t.Errorf("%s: %x, want nothing", tt.name, data)
		case tt.form == extensionVersion && (data[0] != tt.form || len(data) > 35):
			t.Errorf("%s: %x, want an extension with a few units", tt.name, data)
		case tt.form == snapshotVersion && data[0] != tt.form:
			t.Errorf("%s: %x, want a snapshot", tt.name, data)
		}
		c.extend(t, now, data)
		got, want := c.contents(now), r.contents(now)
		expect.True(t, got == want, "%s:\n got %s\nwant %s", tt.name, got, want)
		data = tt.ls.AppendSince(nil, r.a, r.s, now, 0)
		expect.Equal(t, data[0], snapshotVersion, "%s: mark 0 is taken for one", tt.name)
	}
}

// TestMarkNeverRepeats: neither a carry out of the lower bits nor many generations lead to 0.
func TestMarkNeverRepeats(t *testing.T) {
	ls := Limits{{Algorithm: SlidingLog, Limit: 10, Window: time.Minute}}
	r := newReplica(ls, Instant{})
	for _, p := range []uint64{0, 1<<64 - 1, 1<<63 - 1, 1 << 63} {
		*ls.position(r.s) = p
		before := ls.Mark(r.s)
		r.ask(t, Instant{}, 1)
		after := ls.Mark(r.s)
		expect.True(t, before != 0 && after != 0 && before != after, "marks %x and %x at %x", before, after, p)
	}
}

// TestExtendErrors is what AppendSince could not have written; what is left of the copy can be used.
func TestExtendErrors(t *testing.T) {
	ls := Limits{
		{Algorithm: SlidingLog, Limit: 10, Window: time.Minute},
		{Algorithm: FixedWindow, Limit: 10, Window: time.Minute},
	}
	log, fixed := byte(SlidingLog), byte(FixedWindow)
	for _, tt := range []struct {
		name string
		data []byte
		err  error
	}{
		{"nothing", nil, ErrSnapshot},
		{"another version", []byte{3}, ErrSnapshot},
		{"no limits", []byte{extensionVersion}, ErrSnapshot},
		{"another algorithm", []byte{extensionVersion, fixed, 0, 1}, ErrSnapshot},
		{"one limit", []byte{extensionVersion, log | idleFlag}, ErrSnapshot},
		{"more new units than units", []byte{extensionVersion, log, 1, 2, 0, 0, 0, fixed | idleFlag}, ErrSnapshot},
		{"fewer entries than new units", []byte{extensionVersion, log, 2, 2, 0, 0, 0}, ErrSnapshot},
		{"entries beyond the newest", []byte{extensionVersion, log, 2, 2, 0, 1, 0, 4}, ErrSnapshot},
		{"another limit cut off", []byte{extensionVersion, log, 2, 0, fixed, 3}, ErrSnapshot},
		{"idle", []byte{extensionVersion, log | idleFlag, fixed | idleFlag}, nil},
		{"no news", []byte{extensionVersion, log, 2, 0, fixed, 0, 2}, nil},
	} {
		r := newReplica(ls, Instant{})
		r.ask(t, Instant{}, 4)
		_, err := ls.Extend(r.a, r.s, Instant{}, tt.data)
		expect.Equal(t, err, tt.err, "%s", tt.name)
		r.ask(t, Instant{}, 2)
		r.clone(t, Instant{})
		expect.True(t, ls.Idle(r.a, r.s, Instant{Mono: int64(time.Hour)}) && liveBlocks(r.a) == 0,
			"%s: in use for ever", tt.name)
	}
	// Half a snapshot of something else than a log leaves nothing of it.
	for _, tt := range []struct {
		limit Limit
		data  []byte
	}{
		{Limit{Algorithm: Concurrency, Limit: 10, Window: time.Minute}, []byte{2, 5, 0, 1, 5, 1, 0, 2, 5, 1}},
		{Limit{Algorithm: SlidingWindow, Limit: 10, Window: time.Minute}, []byte{5, 2, 9}},
	} {
		r := newReplica(Limits{tt.limit}, Instant{})
		r.ask(t, Instant{}, 4)
		data := append([]byte{extensionVersion, byte(tt.limit.Algorithm)}, tt.data...)
		_, err := r.ls.Extend(r.a, r.s, Instant{}, data)
		expect.Equal(t, err, ErrSnapshot, "%+v", tt.limit)
		d := r.ask(t, Instant{}, 9)[0]
		expect.True(t, d.Allowed && d.Remaining == 1, "%+v: %+v", tt.limit, d)
	}
	// No memory for what is in order.
	for _, whole := range []bool{false, true} {
		o := newReplica(ls, Instant{})
		o.ask(t, Instant{}, 4)
		mark := ls.Mark(o.s)
		o.ask(t, Instant{Mono: 1e9}, 4)
		if whole {
			mark = 0
		}
		a, s := NewArena(&testBudget{}), make(State, ls.Words())
		ls.Init(s, Instant{})
		_, err := ls.Extend(a, s, Instant{Mono: 1e9}, ls.AppendSince(nil, o.a, o.s, Instant{Mono: 1e9}, mark))
		expect.True(t, err == ErrNoMemory && liveBlocks(a) == 0,
			"%v with %d blocks, want %v", err, liveBlocks(a), ErrNoMemory)
	}
}
