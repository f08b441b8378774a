package algo

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/must"
)

// source feeds a history from a random generator.
type source struct {
	*rand.Rand
	left int
}

// n returns a number from 0 to max.
func (s *source) n(max int64) int64 { return s.Int64N(max + 1) }
func (s *source) more() bool        { s.left--; return s.left >= 0 }

func seeded(seed uint64, steps int) *source {
	return &source{rand.New(rand.NewPCG(seed, 0)), steps}
}

// player plays one history against the package and the oracles at once.
type player struct {
	t       testing.TB
	src     *source
	limits  Limits
	arena   *Arena
	state   State
	oracles []oracle
	now     Instant
	newest  int64 // Mono that the state has seen
	retry   time.Duration
	each    []Decision
	// admitted is what passed, net of nothing: only histories without refunds, denials and changes read it.
	admitted []event
	log      []string
	// replica is a copy of the state that AppendSince and Extend bring up to it now and then; it has seen all until
	// mark.
	replica replica
	mark    uint64
}

func newPlayer(t testing.TB, src *source, now Instant, limits ...Limit) *player {
	t.Helper()
	p := &player{t: t, src: src, limits: limits, arena: NewArena(nil), now: now, newest: now.Mono}
	must.NoError(t, p.limits.Validate(), "%+v", limits)
	p.state = make(State, p.limits.Words())
	p.limits.Init(p.state, now)
	for _, l := range limits {
		p.oracles = append(p.oracles, newOracle(l, now))
	}
	p.replica = newReplica(p.limits, now)
	return p
}

func (p *player) fatalf(format string, args ...any) {
	p.t.Helper()
	from := max(0, len(p.log)-30)
	for _, line := range p.log[from:] {
		p.t.Log(line)
	}
	p.t.Fatalf("%+v at %+v: %s", p.limits, p.now, fmt.Sprintf(format, args...))
}

func (p *player) note(format string, args ...any) {
	p.log = append(p.log, fmt.Sprintf("%d/%d: ", p.now.Mono, p.now.Wall)+fmt.Sprintf(format, args...))
}

// seen is the instant that the state will take now for.
func (p *player) seen() Instant {
	now := p.now
	now.Mono = max(now.Mono, p.newest)
	p.newest = now.Mono
	for _, o := range p.oracles {
		o.see(now)
	}
	return now
}

func (p *player) cap(i int) int64 {
	if c := p.limits[i].Capacity; c != 0 {
		return c
	}
	return p.limits[i].Limit
}

func later(now Instant, d time.Duration) Instant {
	return Instant{now.Mono + int64(d), now.Wall + int64(d)}
}

func (p *player) check(r Request) Decision {
	p.t.Helper()
	now := p.seen()
	need := max(r.Cost, 1)
	pass := need
	if r.Partial && r.Cost > 0 {
		pass = 1
	}
	grant := need
	var rooms []int64
	for _, o := range p.oracles {
		rooms = append(rooms, o.room(now))
		grant = min(grant, o.room(now))
	}
	allowed := grant >= pass
	if !allowed || r.Cost == 0 {
		grant = 0
	}
	// What the oracles say.
	want := make([]Decision, len(p.limits))
	answer := Decision{Tightest: -1}
	var delay time.Duration
	for i, o := range p.oracles {
		want[i] = Decision{Allowed: rooms[i] >= pass, Granted: grant, Limit: p.cap(i), Tightest: i}
		if b, ok := o.(*bucketOracle); ok && b.l.Algorithm == LeakyBucket && grant > 0 {
			want[i].Delay = b.delay(now)
			delay = max(delay, want[i].Delay)
		}
		if grant > 0 {
			o.admit(now, grant)
		} else if !allowed && r.Cost > 0 && p.limits[i].CountDenied {
			o.deny(now, r.Cost)
		}
		want[i].Remaining = o.room(now)
		if p.limits[i].Limit == Unlimited {
			want[i].Limit, want[i].Remaining = Unlimited, Unlimited
		}
	}
	if grant > 0 {
		p.admitted = append(p.admitted, event{now.Mono, grant})
	}
	got, err := p.limits.Decide(p.arena, p.state, p.now, r, p.each)
	if err != nil {
		p.fatalf("%+v: %v", r, err)
	}
	p.note("%+v = %+v", r, got)

	each := p.each
	if each == nil && len(p.limits) == 1 {
		each = []Decision{got}
	}
	for i, d := range each {
		o := p.oracles[i]
		// The durations are judged by what they promise.
		if !allowed {
			p.judgeRetry(o, now, d, pass, p.cap(i))
		} else if d.RetryAfter != 0 {
			p.fatalf("limit %d: retry_after %v though allowed", i, d.RetryAfter)
		}
		p.judgeReset(o, now, d)
		want[i].RetryAfter, want[i].ResetAfter = d.RetryAfter, d.ResetAfter
		if d != want[i] {
			p.fatalf("limit %d: %+v:\n got %+v\nwant %+v", i, r, d, want[i])
		}
		// The tightest, by its definition.
		if answer.Tightest < 0 || func() bool {
			if !allowed {
				return answer.RetryAfter != Never && (d.RetryAfter == Never || d.RetryAfter > answer.RetryAfter)
			}
			left := func(d Decision) int64 {
				if d.Limit == Unlimited {
					return MaxLimit + 1
				}
				return d.Remaining
			}
			return left(d) < left(answer) || left(d) == left(answer) && d.ResetAfter > answer.ResetAfter
		}() {
			answer = d
		}
	}
	if each != nil {
		answer.Allowed, answer.Delay = allowed, delay
		if got != answer {
			p.fatalf("%+v:\n got %+v\nwant %+v", r, got, answer)
		}
	} else if got.Allowed != allowed || got.Granted != grant || got.Delay != delay {
		p.fatalf("%+v: got %+v, want allowed %v, granted %d, delay %v", r, got, allowed, grant, delay)
	}
	p.retry = got.RetryAfter
	return got
}

func (p *player) judgeRetry(o oracle, now Instant, d Decision, pass, holds int64) {
	p.t.Helper()
	switch {
	case holds == Unlimited || o.room(now) >= pass:
		if d.RetryAfter != 0 {
			p.fatalf("retry_after %v though there is room", d.RetryAfter)
		}
	case pass > holds:
		if d.RetryAfter != Never {
			p.fatalf("retry_after %v of what can never pass", d.RetryAfter)
		}
	case d.RetryAfter <= 0:
		p.fatalf("retry_after %v of a refusal", d.RetryAfter)
	case o.room(later(now, d.RetryAfter)) < pass:
		p.fatalf("does not pass after retry_after %v", d.RetryAfter)
	case o.room(later(now, d.RetryAfter-1)) >= pass:
		p.fatalf("passes before retry_after %v", d.RetryAfter)
	}
}

func (p *player) judgeReset(o oracle, now Instant, d Decision) {
	p.t.Helper()
	if d.ResetAfter < 0 || o.used(later(now, d.ResetAfter)) != 0 {
		p.fatalf("in use after reset_after %v", d.ResetAfter)
	}
	if d.ResetAfter > 0 && o.used(later(now, d.ResetAfter-1)) == 0 {
		p.fatalf("new before reset_after %v", d.ResetAfter)
	}
}

func (p *player) refund(n int64) {
	p.t.Helper()
	now := p.seen()
	var want int64
	for _, o := range p.oracles {
		want = max(want, o.refund(now, n))
	}
	p.note("refund %d", n)
	if got := p.limits.Refund(p.arena, p.state, p.now, n); got != want {
		p.fatalf("refund of %d gave back %d, want %d", n, got, want)
	}
}

func (p *player) idle() {
	p.t.Helper()
	now := p.seen()
	want := true
	for i, o := range p.oracles {
		used := o.used(now)
		want = want && used == 0
		if got := p.limits.Used(p.arena, p.state, p.now, i); got != used {
			p.fatalf("limit %d: %d used, want %d", i, got, used)
		}
	}
	for i, l := range p.limits { // Used has brought the windows to the present
		if l.Period != 0 && p.now.Wall < int64(p.state[p.limits.place(i)])*1e9+int64(min(wallMargin, l.longest()/2)) {
			want = false
		}
	}
	if got := p.limits.Idle(p.arena, p.state, p.now); got != want {
		p.fatalf("idle %v, want %v", got, want)
	}
	if want {
		p.wantBlocks(0)
	}
}

// wantBlocks fails unless so many blocks of the arena are in use.
func (p *player) wantBlocks(want int) {
	p.t.Helper()
	if got := liveBlocks(p.arena); got != want {
		p.fatalf("%d blocks in use, want %d", got, want)
	}
}

func liveBlocks(a *Arena) (n int) {
	for i := range a.pages {
		n += int(a.pages[i].live)
	}
	return n
}

// move takes the state to another process, whose clock has another origin, and frees it here.
func (p *player) move(origin int64) {
	p.t.Helper()
	now := p.seen()
	prefix := []byte("prefix")
	data := p.limits.Append(prefix, p.arena, p.state, p.now)
	if string(data[:len(prefix)]) != string(prefix) {
		p.fatalf("Append changed what was there")
	}
	data = append(data[len(prefix):], "rest"...)
	p.limits.Free(p.arena, p.state)
	p.wantBlocks(0)

	shift := origin - now.Mono
	p.note("move by %d, %d bytes", shift, len(data)-4)
	p.now.Mono, p.newest = origin, origin
	p.arena = NewArena(nil)
	for i := range p.state {
		p.state[i] = 0xdeadbeef
	}
	rest, err := p.limits.Restore(p.arena, p.state, p.now, data)
	if err != nil || string(rest) != "rest" {
		p.fatalf("restore: %q, %v", rest, err)
	}
	p.replica = newReplica(p.limits, p.now) // p.mark stays, and must be found useless
	for _, o := range p.oracles {
		o.shift(shift)
	}
	p.seen()
	again := p.limits.Append(nil, p.arena, p.state, p.now)
	logs := slices.ContainsFunc(p.limits, func(l Limit) bool { return l.Algorithm == SlidingLog })
	if !logs && !slices.Equal(again, data[:len(data)-4]) { // a log may merge entries on the way
		p.fatalf("snapshot of the restored state differs:\n%x\n%x", again, data)
	}
	for i := range p.admitted {
		p.admitted[i].at += shift
	}
}

// convert replaces limit i. What changes the algorithm counts as admitted now.
func (p *player) convert(i int, l Limit) {
	p.t.Helper()
	to := slices.Clone(p.limits)
	to[i] = l
	if to.Validate() != nil {
		return
	}
	now := p.seen()
	t := make(State, to.Words())
	for i := range t {
		t[i] = 0xdeadbeef
	}
	p.note("convert to %+v", to)
	if err := p.limits.Convert(p.arena, p.state, p.now, to, t); err != nil {
		p.fatalf("convert: %v", err)
	}
	old := p.limits[i]
	if old.Algorithm == l.Algorithm && old.Period == l.Period && old.Limit != Unlimited && l.Limit != Unlimited {
		p.oracles[i].become(now, l)
	} else {
		n := min(p.oracles[i].used(now), MaxLimit)
		p.oracles[i] = newOracle(l, now)
		p.oracles[i].see(now)
		if n > 0 {
			p.oracles[i].admit(now, n)
		}
	}
	p.limits, p.state = to, t
	p.replica = newReplica(to, now)
}

// replicate brings the replica up to the state, at no delay, after which the two are the same.
func (p *player) replicate() {
	p.t.Helper()
	now := p.seen()
	data := p.limits.AppendSince(nil, p.arena, p.state, p.now, p.mark)
	p.mark = p.limits.Mark(p.state)
	p.note("replicate %x", data)
	p.replica.extend(p.t, now, data)
	if got, want := p.replica.contents(now), (replica{p.limits, p.arena, p.state}).contents(now); got != want {
		p.fatalf("replica:\n got %s\nwant %s", got, want)
	}
}

// charge adds units whether or not there is room, as far as everything can count them.
func (p *player) charge(n int64) {
	p.t.Helper()
	now := p.seen()
	for i, o := range p.oracles {
		most := MaxLimit
		if l := &p.limits[i]; l.Algorithm == SlidingWindow && (slidingWindow{}).narrow(l) {
			most = math.MaxUint32
		}
		most = min(most, countable(p.limits[i]))
		if b, ok := o.(*bucketOracle); ok && !b.holds(now, n) ||
			p.limits[i].Limit != Unlimited && o.used(now)+n > most {
			n = 0
		}
	}
	p.note("charge %d", n)
	if err := p.limits.Charge(p.arena, p.state, p.now, n); err != nil {
		p.fatalf("charge: %v", err)
	}
	for i, o := range p.oracles {
		if n > 0 {
			o.admit(now, n)
		}
		if got, want := p.limits.Used(p.arena, p.state, p.now, i), o.used(now); got != want {
			p.fatalf("limit %d: %d used after a charge of %d, want %d", i, got, n, want)
		}
	}
}

// always charges whether or not there is room, and gives back where the cost is negative.
func (p *player) always(cost int64) {
	p.t.Helper()
	now := p.seen()
	for i, o := range p.oracles {
		// What a limit cannot count at all is not asked for.
		l := &p.limits[i]
		most := countable(*l)
		if l.Algorithm == SlidingWindow && (slidingWindow{}).narrow(l) {
			most = math.MaxUint32
		}
		if b, ok := o.(*bucketOracle); cost > 0 &&
			(ok && !b.holds(now, cost) || l.Limit != Unlimited && o.used(now)+cost > most) {
			cost = 0
		}
	}
	charges := make([]int64, len(p.limits))
	allowed, most := true, int64(0)
	var fits []bool
	var delay time.Duration
	for i, o := range p.oracles {
		l, used := &p.limits[i], o.used(now)
		if l.Limit == Unlimited {
			fits = append(fits, true)
			continue
		}
		debt := l.MaxDebt
		switch {
		case debt == 0 && l.Algorithm == SlidingLog:
			debt = l.Limit
		case debt == 0:
			debt = MaxLimit
		}
		fits = append(fits, cost < 0 || cost == 0 && used <= p.cap(i) || cost > 0 && used+cost <= p.cap(i))
		if b, ok := o.(*bucketOracle); ok && cost > 0 {
			fits[i] = b.room(now) >= cost
		}
		allowed = allowed && fits[i]
		if b, ok := o.(*bucketOracle); ok && l.Algorithm == LeakyBucket && cost > 0 {
			delay = max(delay, b.delay(now))
		}
		if cost > 0 {
			charges[i] = max(0, min(cost, p.cap(i)+debt-used))
		}
	}
	for i, o := range p.oracles {
		switch {
		case charges[i] > 0:
			o.admit(now, charges[i])
		case cost < 0:
			charges[i] = o.refund(now, -cost)
		}
		most = max(most, charges[i])
	}
	p.note("always %d, charged %v", cost, charges)
	each := make([]Decision, len(p.limits))
	got, err := p.limits.Decide(p.arena, p.state, p.now, Request{Cost: cost, Always: true}, each)
	if err != nil {
		p.fatalf("always %d: %v", cost, err)
	}
	if cost < 0 {
		most = -most
	}
	if !allowed {
		delay = 0
	}
	if got.Allowed != allowed || got.Granted != most || got.Delay != delay {
		p.fatalf("always %d: got %+v, want allowed %v, granted %d, delay %v", cost, got, allowed, most, delay)
	}
	for i, d := range each {
		o := p.oracles[i]
		if allowed && d.RetryAfter != 0 {
			p.fatalf("limit %d: retry_after %v though allowed", i, d.RetryAfter)
		} else if !allowed {
			p.judgeRetry(o, now, d, max(cost, 1), p.cap(i))
		}
		p.judgeReset(o, now, d)
		remaining := Unlimited
		if p.limits[i].Limit != Unlimited {
			remaining = o.room(now)
			if used := p.limits.Used(p.arena, p.state, p.now, i); used != o.used(now) {
				p.fatalf("limit %d: %d used after %d, want %d", i, used, cost, o.used(now))
			}
		}
		if d.Allowed != fits[i] || d.Remaining != remaining || d.Granted != most {
			p.fatalf("limit %d: always %d: %+v, want allowed %v, remaining %d", i, cost, d, fits[i], remaining)
		}
	}
	p.retry = got.RetryAfter
}

// pass lets some time go by, often such that something is about to happen.
func (p *player) pass() {
	w := int64(time.Hour)
	l := p.limits[p.src.n(int64(len(p.limits)-1))]
	if l.Window != 0 {
		w = int64(l.Window)
	}
	d := int64(0)
	switch p.src.n(11) {
	case 0, 1:
	case 2:
		d = p.src.n(100)
	case 3:
		d = p.src.n(w / 100)
	case 4:
		d = p.src.n(w / 10)
	case 5:
		d = p.src.n(w)
	case 6:
		d = p.src.n(3 * w)
	case 7:
		d = max(int64(p.retry), 0)
	case 8:
		d = max(int64(p.retry)-1, 0)
	case 9:
		d = max(w-p.now.Mono%w-1, 0) + p.src.n(2)
	case 10:
		d = -p.src.n(w)
	case 11:
		d = w/max(l.Limit, 1) + p.src.n(2)
	}
	p.now = later(p.now, time.Duration(d))
}

func (p *player) cost() int64 {
	limit := max(1, p.limits[p.src.n(int64(len(p.limits)-1))].Limit)
	switch p.src.n(9) {
	case 0:
		return 0
	case 1:
		return 2
	case 2:
		return 3
	case 3:
		return 1 + p.src.n(limit-1)
	case 4:
		return 1 + p.src.n(limit/10)
	case 5:
		return min(MaxLimit, limit+p.src.n(2)-1)
	}
	return 1
}

// play runs the history that the source describes.
func (p *player) play(plain bool) {
	p.t.Helper()
	for p.src.more() {
		if len(p.log) > 1000 {
			p.log = slices.Clone(p.log[900:])
		}
		p.pass()
		p.each = nil
		if p.src.n(1) == 0 || len(p.limits) > 1 && p.src.n(3) != 0 {
			p.each = make([]Decision, len(p.limits))
		}
		what := p.src.n(15)
		if plain && what > 2 {
			what = 3
		}
		switch what {
		case 0:
			p.idle()
		case 1:
			p.check(Request{Cost: p.cost(), Partial: true})
		case 2:
			if !plain && p.src.n(3) == 0 || plain && p.src.n(9) == 0 {
				p.move(p.src.n(1 << 50))
			}
		case 4:
			p.refund(p.cost())
		case 5:
			if p.src.n(1) == 0 {
				p.change()
			}
		case 6: // the same again, at the same instant
			r := Request{Cost: p.cost()}
			for range 1 + p.src.n(5) {
				p.check(r)
			}
		case 7:
			p.charge(p.cost())
		case 8:
			p.replicate()
		case 9:
			cost := p.cost()
			if p.src.n(3) == 0 {
				cost = -cost
			}
			for range 1 + p.src.n(3) {
				p.always(cost)
			}
		default:
			p.check(Request{Cost: p.cost()})
		}
	}
	p.limits.Free(p.arena, p.state)
	p.wantBlocks(0)
}

// change replaces one of the limits.
func (p *player) change() {
	i := int(p.src.n(int64(len(p.limits) - 1)))
	l := p.limits[i]
	if l.Limit == Unlimited {
		return
	}
	switch p.src.n(3) {
	case 0:
		l.Limit = 1 + p.src.n(min(2*l.Limit, MaxLimit-1))
		if l.Algorithm == SlidingWindow && l.Limit < 1<<32 && p.limits[i].Limit >= 1<<32 {
			return // counts are cut down there: see TestSlidingWindowNarrows
		}
	case 1:
		if l.Window != 0 && l.Period == 0 {
			l.Window = max(MinWindow,
				min(MaxWindow, l.Window/time.Duration(1+p.src.n(20))*time.Duration(1+p.src.n(20))))
		}
	case 2:
		if l.Algorithm == SlidingWindow {
			l.Slots = 1 + int32(p.src.n(MaxSlots-1))
		}
		if l.Algorithm == TokenBucket || l.Algorithm == LeakyBucket {
			l.Capacity = 1 + p.src.n(2*p.cap(i))
		}
	case 3:
		if l.Window == 0 || l.Limit > 1<<20 || p.oracles[i].used(p.now) > 1<<20 { // a bucket could not count that
			return
		}
		l = Limit{Algorithm: Algorithm(1 + p.src.n(5)), Limit: l.Limit, Window: l.Window}
	}
	// Limits are matched by algorithm and window first: keep to changes in which each stays in its place.
	for j, m := range p.limits {
		if j != i && m.Algorithm == l.Algorithm && m.Window == l.Window {
			return
		}
	}
	p.convert(i, l)
}
