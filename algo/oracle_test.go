package algo

import (
	"fmt"
	"math/big"
	"slices"
	"time"
)

// The oracles are the algorithms as one would explain them: they keep every admission, take as long as they like and
// use arithmetic without bounds. They share nothing with the package but the types of its API.

// oracle is one limit of one key. Its instants never run backwards.
type oracle interface {
	// room is the largest cost that would pass at now. It changes nothing, so it may be asked about the future.
	room(now Instant) int64
	// used is the number of units in use, rounded up.
	used(now Instant) int64
	// admit charges n, whether or not there is room.
	admit(now Instant, n int64)
	deny(now Instant, n int64)
	refund(now Instant, n int64) int64
	// see is told every instant that the state under test gets to see.
	see(now Instant)
	// shift moves everything by as much as the clock's origin moved.
	shift(mono int64)
	// become applies a new limit of the same algorithm.
	become(now Instant, l Limit)
}

func newOracle(l Limit, now Instant) oracle {
	switch {
	case l.Limit == Unlimited:
		return &unlimitedOracle{}
	case l.Algorithm == FixedWindow && l.Period == Epoch:
		return &epochOracle{l: l}
	case l.Algorithm == FixedWindow && l.Period != 0:
		return &calendarOracle{l: l}
	case l.Algorithm == FixedWindow:
		return &fixedOracle{l: l}
	case l.Algorithm == SlidingWindow:
		return &slotOracle{l: l}
	case l.Algorithm == SlidingCounter:
		return &counterOracle{l: l}
	case l.Algorithm == SlidingLog:
		return &logOracle{l: l}
	case l.Algorithm == TokenBucket || l.Algorithm == LeakyBucket:
		return &bucketOracle{l: l, full: new(big.Rat).SetInt64(now.Mono)}
	}
	panic("no oracle for " + l.Algorithm.String())
}

type unlimitedOracle struct{}

func (*unlimitedOracle) room(Instant) int64          { return MaxLimit }
func (*unlimitedOracle) used(Instant) int64          { return 0 }
func (*unlimitedOracle) admit(Instant, int64)        {}
func (*unlimitedOracle) deny(Instant, int64)         {}
func (*unlimitedOracle) refund(Instant, int64) int64 { return 0 }
func (*unlimitedOracle) see(Instant)                 {}
func (*unlimitedOracle) shift(int64)                 {}
func (*unlimitedOracle) become(Instant, Limit)       {}

// event is n units at an instant.
type event struct{ at, n int64 }

func sum(events []event) (n int64) {
	for _, e := range events {
		n += e.n
	}
	return n
}

// takeOldest removes up to n units from the front.
func takeOldest(events []event, n int64) ([]event, int64) {
	var taken int64
	for len(events) > 0 && taken < n {
		k := min(n-taken, events[0].n)
		taken += k
		if events[0].n -= k; events[0].n == 0 {
			events = events[1:]
		}
	}
	return slices.Clone(events), taken
}

func floorTo(x, step, phase int64) int64 {
	q, _ := new(big.Int).DivMod(big.NewInt(x-phase), big.NewInt(step), new(big.Int)) // Euclidean
	return q.Int64()*step + phase
}

func ceilTo(x, step, phase int64) int64 {
	f := floorTo(x, step, phase)
	if f < x {
		f += step
	}
	return f
}

type fixedOracle struct {
	l     Limit
	start int64
	count int64
}

func (o *fixedOracle) used(now Instant) int64 {
	_, count := o.at(now)
	return count
}

// at is the window that is open at now, and what is counted in it.
func (o *fixedOracle) at(now Instant) (start, count int64) {
	w := int64(o.l.Window)
	if now.Mono < o.start+w {
		return o.start, o.count
	}
	if !o.l.CarryDebt {
		return o.start, 0
	}
	start = floorTo(now.Mono, w, o.start)
	return start, unpaid(o.count, o.l.Limit, (start-o.start)/w)
}

// countable is the largest count of a limit, which bounds how long debt that is carried over lasts.
func countable(l Limit) int64 {
	if l.CarryDebt {
		longest := l.Window
		if l.Period > Hour && l.Period != Epoch {
			longest = map[Period]time.Duration{Day: 2, Week: 8, Month: 32, Year: 367}[l.Period] * 24 * time.Hour
		}
		most := new(big.Int).Mul(big.NewInt(l.Limit), big.NewInt(int64(MaxFill/longest)))
		if most.Cmp(big.NewInt(MaxLimit)) < 0 {
			return most.Int64()
		}
	}
	return MaxLimit
}

// unpaid is what is left of a count of which so many windows have each taken a limit off.
func unpaid(count, limit, windows int64) int64 {
	paid := new(big.Int).Mul(big.NewInt(limit), big.NewInt(windows))
	if left := paid.Sub(big.NewInt(count), paid); left.Sign() > 0 {
		return left.Int64()
	}
	return 0
}
func (o *fixedOracle) room(now Instant) int64 { return max(0, o.l.Limit-o.used(now)) }
func (o *fixedOracle) admit(now Instant, n int64) {
	if o.start, o.count = o.at(now); o.count == 0 {
		o.start = now.Mono
	}
	o.count += n
}
func (o *fixedOracle) deny(now Instant, n int64) {
	if k := min(n, o.room(now)); k > 0 {
		o.admit(now, k)
	}
}
func (o *fixedOracle) refund(now Instant, n int64) int64 {
	o.start, o.count = o.at(now)
	k := min(n, o.count)
	o.count -= k
	return k
}
func (o *fixedOracle) see(Instant)      {}
func (o *fixedOracle) shift(mono int64) { o.start += mono }
func (o *fixedOracle) become(now Instant, l Limit) {
	o.start, o.count = o.at(now)
	o.l, o.count = l, min(o.count, countable(l))
}

// epochOracle counts in windows that are told by the wall clock alone. One that is open goes on until that has passed
// its end.
type epochOracle struct {
	l          Limit
	start, end int64 // of the window, in seconds; equal before the first
	count      int64
	recent     bool // it has begun a moment ago: its snapshot has it though it is empty
}

func (o *epochOracle) at(now Instant) (start, end, count int64) {
	w := int64(o.l.Window / time.Second)
	wall := floorTo(now.Wall, 1e9, 0) / 1e9
	switch start := floorTo(wall, w, 0); {
	case o.start == o.end:
		return start, start + w, o.count
	case wall < o.end:
		return o.start, o.end, o.count
	case o.l.CarryDebt:
		return start, start + w, unpaid(o.count, o.l.Limit, (start-o.end)/w+1)
	default:
		return start, start + w, 0
	}
}
func (o *epochOracle) used(now Instant) int64 {
	_, _, count := o.at(now)
	return count
}
func (o *epochOracle) room(now Instant) int64 { return max(0, o.l.Limit-o.used(now)) }
func (o *epochOracle) see(now Instant) {
	o.start, o.end, o.count = o.at(now)
	o.recent = now.Wall < o.start*1e9+min(10e9, int64(o.l.Window)/2)
}
func (o *epochOracle) admit(now Instant, n int64)  { o.count += n }
func (o *epochOracle) deny(now Instant, n int64)   { o.count += min(n, o.room(now)) }
func (o *epochOracle) become(now Instant, l Limit) { o.l, o.count = l, min(o.count, countable(l)) }
func (o *epochOracle) refund(now Instant, n int64) int64 {
	k := min(n, o.used(now))
	o.count -= k
	return k
}
func (o *epochOracle) shift(int64) {
	if o.count == 0 && !o.recent {
		o.start, o.end = 0, 0 // the snapshot of an empty window is that of a new state
		return
	}
	w := int64(o.l.Window / time.Second)
	o.start = floorTo(o.start, w, 0)
	o.end = o.start + w
}

// calendarOracle knows a window by what the clock shows during it.
type calendarOracle struct {
	l      Limit
	newest int64 // wall
	label  string
	count  int64
	recent bool // as of epochOracle
}

func (o *calendarOracle) show(wall int64) string {
	zone := o.l.Zone
	if zone == nil {
		zone = time.UTC
	}
	t := time.Unix(0, wall).In(zone)
	switch o.l.Period {
	case Minute:
		return t.Format("2006-01-02 15:04 -0700")
	case Hour:
		return t.Format("2006-01-02 15 -0700")
	case Day:
		return t.Format("2006-01-02")
	case Week:
		y, w := t.ISOWeek()
		return fmt.Sprint(y, "W", w)
	case Month:
		return t.Format("2006-01")
	}
	return t.Format("2006")
}
func (o *calendarOracle) used(now Instant) int64 {
	last := max(now.Wall, o.newest)
	switch {
	case o.show(last) == o.label:
		return o.count
	case !o.l.CarryDebt || o.label == "":
		return 0
	}
	// No window is as short as the steps.
	label, count := o.label, o.count
	for wall := o.newest; count > 0 && label != o.show(last); wall += int64(12 * time.Hour) {
		if now := o.show(min(wall, last)); now != label {
			label, count = now, max(0, count-o.l.Limit)
		}
	}
	return count
}
func (o *calendarOracle) room(now Instant) int64 { return max(0, o.l.Limit-o.used(now)) }
func (o *calendarOracle) see(now Instant) {
	if o.label == "" {
		o.newest = now.Wall
	}
	o.count = o.used(now)
	o.newest = max(now.Wall, o.newest)
	o.label = o.show(o.newest)
	o.recent = o.show(now.Wall-10e9) != o.label
}
func (o *calendarOracle) admit(now Instant, n int64) { o.count += n }
func (o *calendarOracle) deny(now Instant, n int64)  { o.count += min(n, o.room(now)) }
func (o *calendarOracle) refund(now Instant, n int64) int64 {
	k := min(n, o.used(now))
	o.count -= k
	return k
}
func (o *calendarOracle) shift(int64) {
	if o.count == 0 && !o.recent {
		o.label = "" // the snapshot of an empty window is that of a new state
	}
}
func (o *calendarOracle) become(now Instant, l Limit) {
	o.count = o.used(now)
	o.see(now)
	o.l, o.count = l, min(o.count, countable(l))
}

// slotOracle's events are at the end of the slot they fell in.
type slotOracle struct {
	l      Limit
	phase  int64
	events []event
}

func (o *slotOracle) width() int64 {
	n := int64(o.l.Slots)
	if n == 0 {
		n = DefaultSlots
	}
	w := int64(o.l.Window) / n
	if w*n < int64(o.l.Window) {
		w++
	}
	return w
}
func (o *slotOracle) live(now Instant) []event {
	return slices.DeleteFunc(slices.Clone(o.events), func(e event) bool { return now.Mono >= e.at+int64(o.l.Window) })
}
func (o *slotOracle) used(now Instant) int64 { return sum(o.live(now)) }
func (o *slotOracle) room(now Instant) int64 { return max(0, o.l.Limit-o.used(now)) }
func (o *slotOracle) admit(now Instant, n int64) {
	if o.events = o.live(now); len(o.events) == 0 {
		o.phase = 0
	}
	o.events = append(o.events, event{floorTo(now.Mono, o.width(), o.phase) + o.width(), n})
}
func (o *slotOracle) deny(now Instant, n int64) {
	before := o.used(now)
	n = min(n, o.l.Limit)
	o.admit(now, n)
	o.refund(now, before+n-max(before, min(o.l.Limit, before+n)))
}
func (o *slotOracle) refund(now Instant, n int64) (taken int64) {
	o.events, taken = takeOldest(o.live(now), n)
	return taken
}
func (o *slotOracle) see(Instant) {}
func (o *slotOracle) shift(mono int64) {
	o.phase += mono
	for i := range o.events {
		o.events[i].at += mono
	}
}
func (o *slotOracle) become(now Instant, l Limit) {
	n, same := o.used(now), o.l.Window == l.Window && slidingWindow{}.slots(&o.l) == slidingWindow{}.slots(&l)
	if o.l = l; same {
		return
	}
	if o.events, o.phase = nil, 0; n > 0 {
		o.admit(now, min(n, MaxLimit))
	}
}

type counterOracle struct {
	l      Limit
	phase  int64
	events []event
}

// windows returns what is in the previous and the present window, and the time since the present one's start.
func (o *counterOracle) windows(now Instant) (prev, cur []event, elapsed int64) {
	w := int64(o.l.Window)
	start := floorTo(now.Mono, w, o.phase)
	for _, e := range o.events {
		switch {
		case e.at >= start:
			cur = append(cur, e)
		case e.at >= start-w:
			prev = append(prev, e)
		}
	}
	return prev, cur, now.Mono - start
}
func (o *counterOracle) used(now Instant) int64 {
	prev, cur, elapsed := o.windows(now)
	w := int64(o.l.Window)
	weighted := new(big.Rat).SetFrac(
		new(big.Int).Mul(big.NewInt(sum(prev)), big.NewInt(w-elapsed)), big.NewInt(w))
	return ceilRat(weighted) + sum(cur)
}
func (o *counterOracle) room(now Instant) int64 { return max(0, o.l.Limit-o.used(now)) }
func (o *counterOracle) admit(now Instant, n int64) {
	if prev, cur, _ := o.windows(now); len(prev)+len(cur) == 0 {
		o.phase, o.events = 0, nil
	}
	o.events = append(o.events, event{now.Mono, n})
}
func (o *counterOracle) deny(now Instant, n int64) {
	_, cur, _ := o.windows(now)
	if k := min(n, o.l.Limit-sum(cur)); k > 0 {
		o.admit(now, k)
	}
}
func (o *counterOracle) refund(now Instant, n int64) (taken int64) {
	prev, cur, _ := o.windows(now)
	o.events, taken = takeOldest(append(prev, cur...), n)
	return taken
}
func (o *counterOracle) see(Instant) {}
func (o *counterOracle) shift(mono int64) {
	o.phase += mono
	for i := range o.events {
		o.events[i].at += mono
	}
}
func (o *counterOracle) become(now Instant, l Limit) {
	if l.Window != o.l.Window {
		n := min(o.used(now), MaxLimit)
		*o = counterOracle{}
		if n > 0 {
			o.events = []event{{now.Mono, n}}
		}
	}
	o.l = l
}

type logOracle struct {
	l      Limit
	phase  int64
	events []event
}

func (o *logOracle) tick() int64 {
	tick := int64(1)
	for int64(o.l.Window) >= tick<<31 {
		tick *= 2
	}
	return tick
}
func (o *logOracle) live(now Instant) []event {
	return slices.DeleteFunc(slices.Clone(o.events), func(e event) bool { return now.Mono >= e.at+int64(o.l.Window) })
}
func (o *logOracle) used(now Instant) int64 { return sum(o.live(now)) }
func (o *logOracle) room(now Instant) int64 { return max(0, o.l.Limit-o.used(now)) }
func (o *logOracle) admit(now Instant, n int64) {
	o.events = o.live(now)
	newest := now.Mono
	if len(o.events) == 0 {
		o.phase = 0
	} else {
		newest = max(newest, o.events[len(o.events)-1].at)
	}
	o.events = append(o.events, event{ceilTo(newest, o.tick(), o.phase), n})
}
func (o *logOracle) deny(now Instant, n int64) {
	before := o.used(now)
	n = min(n, o.l.Limit)
	o.admit(now, n)
	o.refund(now, before+n-max(before, min(o.l.Limit, before+n)))
}
func (o *logOracle) refund(now Instant, n int64) (taken int64) {
	o.events, taken = takeOldest(o.live(now), n)
	return taken
}
func (o *logOracle) see(Instant) {}
func (o *logOracle) shift(mono int64) {
	o.phase += mono
	for i := range o.events {
		o.events[i].at += mono
	}
}
func (o *logOracle) become(now Instant, l Limit) {
	o.events = o.live(now)
	old := o.tick()
	o.l = l
	if o.tick() == old {
		return
	}
	o.events = o.live(now)
	o.phase = 0
	for i := range o.events {
		o.events[i].at = ceilTo(o.events[i].at, o.tick(), 0)
	}
}

// bucketOracle's full is the instant at which nothing is owed, as a fraction.
type bucketOracle struct {
	l    Limit
	full *big.Rat
}

func (o *bucketOracle) capacity() int64 {
	if o.l.Capacity != 0 {
		return o.l.Capacity
	}
	return o.l.Limit
}
func (o *bucketOracle) deficit(now Instant) *big.Rat {
	d := new(big.Rat).Sub(o.full, new(big.Rat).SetInt64(now.Mono))
	if d.Sign() < 0 {
		return new(big.Rat)
	}
	return d.Mul(d, new(big.Rat).SetFrac64(o.l.Limit, int64(o.l.Window)))
}
func (o *bucketOracle) setDeficit(now Instant, d *big.Rat) {
	d = new(big.Rat).Mul(d, new(big.Rat).SetFrac64(int64(o.l.Window), o.l.Limit))
	o.full = d.Add(d, new(big.Rat).SetInt64(now.Mono))
}
func ceilRat(r *big.Rat) int64 {
	q, m := new(big.Int).DivMod(r.Num(), r.Denom(), new(big.Int))
	if m.Sign() > 0 {
		q.Add(q, big.NewInt(1))
	}
	if !q.IsInt64() {
		panic("oracle: too large")
	}
	return q.Int64()
}
func (o *bucketOracle) used(now Instant) int64 { return ceilRat(o.deficit(now)) }
func (o *bucketOracle) room(now Instant) int64 { return max(0, o.capacity()-o.used(now)) }
func (o *bucketOracle) admit(now Instant, n int64) {
	o.setDeficit(now, new(big.Rat).Add(o.deficit(now), new(big.Rat).SetInt64(n)))
}
func (o *bucketOracle) deny(Instant, int64) { panic("buckets do not count refusals") }
func (o *bucketOracle) refund(now Instant, n int64) int64 {
	n = min(n, o.used(now))
	d := new(big.Rat).Sub(o.deficit(now), new(big.Rat).SetInt64(n))
	if d.Sign() < 0 {
		d = new(big.Rat)
	}
	o.setDeficit(now, d)
	return n
}
func (o *bucketOracle) see(Instant)      {}
func (o *bucketOracle) shift(mono int64) { o.full.Add(o.full, new(big.Rat).SetInt64(mono)) }
func (o *bucketOracle) become(now Instant, l Limit) {
	if l.Limit != o.l.Limit || l.Window != o.l.Window {
		n := o.used(now)
		o.l = l
		o.setDeficit(now, new(big.Rat).SetInt64(n))
	}
	o.l = l
}

// holds reports whether a bucket can owe n more.
func (o *bucketOracle) holds(now Instant, n int64) bool {
	d := new(big.Rat).Add(o.deficit(now), new(big.Rat).SetInt64(n))
	return d.Mul(d, new(big.Rat).SetFrac64(int64(o.l.Window),
		o.l.Limit)).Cmp(new(big.Rat).SetInt64(int64(MaxFill))) <= 0
}

// delay of a leaky queue: until what is ahead is gone.
func (o *bucketOracle) delay(now Instant) time.Duration {
	d := new(big.Rat).Sub(o.full, new(big.Rat).SetInt64(now.Mono))
	if d.Sign() < 0 {
		return 0
	}
	return time.Duration(ceilRat(d))
}
