package algo

import (
	"fmt"
	"math/bits"
	"strings"
	"time"
)

// This file has what all algorithms have in common: Limits and State, the interface counter that each algorithm
// implements, validation, the life of a state (Init, Free, Convert), and 128-bit arithmetic. decide.go decides.

// Limits are the limits of one policy. They are decided together: a request is charged to all of them or to none. The
// methods that take a State need Limits that Validate accepts and a State that Init or Convert made for them.
// No method changes its Limits.
type Limits []Limit

// State is what Limits remember about one key: exactly Words() words, usually a view into a record of the caller's.
// Word 0 is the newest Mono instant that the state has seen; a later call with an earlier instant counts as at that
// one. Then come the words of each limit that counts (place), and last, where there is a sliding_log, the position
// (Mark). Data of varying size is in blocks of the Arena, which must be the same one in every call.
type State []uint64

// counter is one algorithm. Its values have no fields: everything is in the limit, the limit's words of the state and
// the blocks of the Arena that those words name. Before every method except init, free and restore, advance must have
// brought the words to the same now.
type counter interface {
	// words is the size of the fixed part of the state.
	words(l *Limit) int
	// init makes s fresh, whatever it held. A fresh s owns no blocks.
	init(l *Limit, s []uint64, now Instant)
	// free gives back every block.
	free(l *Limit, a *Arena, s []uint64)
	// advance removes what is no longer in use at now. An s in which nothing is in use afterwards is fresh.
	advance(l *Limit, a *Arena, s []uint64, now Instant)
	// used is the number of units in use, rounded up.
	used(l *Limit, a *Arena, s []uint64, now Instant) int64
	// wait is the time until there is room for n if nothing is charged meanwhile; n is at most l.holds(), and there is
	// no room for it now.
	wait(l *Limit, a *Arena, s []uint64, now Instant, n int64) time.Duration
	// resetAfter is the time until advance would leave s fresh.
	resetAfter(l *Limit, a *Arena, s []uint64, now Instant) time.Duration
	// ensureMemory takes the memory that charging n, which is at least 1, will need, so that charge cannot fail.
	ensureMemory(l *Limit, a *Arena, s []uint64, n int64) bool
	// charge adds n units at now without asking whether there is room.
	charge(l *Limit, a *Arena, s []uint64, now Instant, n int64)
	// refund removes up to n units and returns how many it removed.
	refund(l *Limit, a *Arena, s []uint64, now Instant, n int64) int64
	// convert makes t, the words of limit to whose counter is of the same kind, out of s and its blocks.
	convert(l *Limit, a *Arena, s []uint64, now Instant, to *Limit, t []uint64)
	// snapshot appends s as ages. It is not asked of an s that is idle.
	snapshot(dst []byte, l *Limit, a *Arena, s []uint64, now Instant) []byte
	// restore reads into a fresh s what snapshot wrote. When it fails, s may be left with blocks.
	restore(l *Limit, a *Arena, s []uint64, now Instant, r *reader) error
	// join makes u, which is fresh, the join of s and t (see Limits.Join) and leaves these as they are. It is not
	// called with a t that is idle. It returns false when memory does not suffice, and u may then have blocks.
	join(l *Limit, a *Arena, s, t []uint64, now Instant, u []uint64) bool
	// horizon is the longest time for which something charged can matter.
	horizon(l *Limit) time.Duration
}

// room is the largest cost that would pass.
func (l *Limit) room(c counter, a *Arena, s []uint64, now Instant) int64 {
	return max(l.holds()-c.used(l, a, s, now), 0)
}

// wait is the time until room is at least n if nothing is charged meanwhile; n is at most l.holds().
func (l *Limit) wait(c counter, a *Arena, s []uint64, now Instant, n int64) time.Duration {
	if l.room(c, a, s, now) >= n {
		return 0
	}
	return c.wait(l, a, s, now, n)
}

// deny counts a refused request of n units, as far as memory allows, and returns how many it charged. A sliding_log and
// a sliding_window count it as if it had been admitted and let go of the oldest units beyond the limit, so that a
// caller who never pauses never gets through. What a lowered limit has left beyond it stays. A sliding_counter counts
// up to the limit in the present window, whatever is left of the previous one.
func (l *Limit) deny(c counter, a *Arena, s []uint64, now Instant, n int64) int64 {
	used := c.used(l, a, s, now)
	switch c.(type) {
	case slidingLog, slidingWindow:
		n = min(n, l.Limit)
		if !c.ensureMemory(l, a, s, n) {
			return 0
		}
		c.charge(l, a, s, now, n)
		c.refund(l, a, s, now, used+n-max(used, min(used+n, l.Limit)))
		return n
	case slidingCounter:
		used = int64(s[2])
	}
	if n = min(n, max(l.Limit-used, 0)); n > 0 {
		c.charge(l, a, s, now, n)
	}
	return n
}

// inline is the part of a counter that has nothing in the Arena.
type inline struct{}

func (inline) init(_ *Limit, s []uint64, _ Instant)              { clear(s) }
func (inline) free(*Limit, *Arena, []uint64)                     { /* no blocks */ }
func (inline) ensureMemory(*Limit, *Arena, []uint64, int64) bool { return true }

// counter returns nil for an unlimited limit, which counts nothing.
func (l *Limit) counter() counter {
	if l.Limit == Unlimited {
		return nil
	}
	switch l.Algorithm {
	case FixedWindow:
		if l.Period != 0 {
			return calendarWindow{}
		}
		return fixedWindow{}
	case SlidingWindow:
		return slidingWindow{}
	case SlidingCounter:
		return slidingCounter{}
	case SlidingLog:
		return slidingLog{}
	case TokenBucket, LeakyBucket:
		return bucket{}
	case Concurrency:
		return concurrency{}
	}
	panic("algo: " + l.Algorithm.String() + " has not been validated")
}

// aligned reports whether the calendar says how long the window is.
func (l *Limit) aligned() bool { return l.Period != 0 && l.Period != Epoch }

func (l *Limit) isBucket() bool { return l.Algorithm == TokenBucket || l.Algorithm == LeakyBucket }

// holds is the largest cost that can ever pass.
func (l *Limit) holds() int64 {
	if l.Capacity != 0 {
		return l.Capacity
	}
	return l.Limit
}

// Largest returns the largest cost that all of the limits can ever let pass: MaxLimit where there is no bound.
func (ls Limits) Largest() int64 {
	most := MaxLimit
	for i := range ls {
		if ls[i].Limit != Unlimited {
			most = min(most, ls[i].holds())
		}
	}
	return most
}

// Highest returns the largest of the limits, of a bucket its capacity: MaxLimit where there is no bound.
func (ls Limits) Highest() int64 {
	var most int64
	for i := range ls {
		if ls[i].Limit != Unlimited {
			most = max(most, ls[i].holds())
		}
	}
	if most == 0 {
		return MaxLimit
	}
	return most
}

// CountsDenied reports whether a refused request changes a state.
func (ls Limits) CountsDenied() bool {
	for i := range ls { // a Limit is large to copy
		if ls[i].CountDenied {
			return true
		}
	}
	return false
}

// Validate reports what makes the limit impossible as a *FieldError, or returns nil.
func (l Limit) Validate() error {
	switch {
	case l.Algorithm < FixedWindow || l.Algorithm > Concurrency:
		return invalid("algorithm", "is missing or unknown (%v)", l.Algorithm)
	case l.Limit != Unlimited && (l.Limit < 1 || l.Limit > MaxLimit):
		return invalid("limit", "must be between 1 and %d, or %d for unlimited; it is %d", MaxLimit, Unlimited, l.Limit)
	}
	if err := l.validWindow(); err != nil {
		return err
	}
	if err := l.validParameters(); err != nil || l.Limit == Unlimited {
		return err
	}
	longest := l.MaxLog
	if longest == 0 {
		longest = DefaultMaxLog
	}
	switch {
	case l.Algorithm == SlidingLog && l.Limit > longest:
		return invalid("limit", "of a %v must be at most %d unless max_log is raised; it is %d", SlidingLog, longest,
			l.Limit)
	case l.isBucket() && mul(l.Limit, int64(MaxFill)).less(mul(l.holds(), int64(l.Window))):
		return invalid("capacity", "takes more than %d days to fill at this rate", MaxFill/(24*time.Hour))
	}
	return nil
}

func invalid(field, format string, args ...any) error {
	return &FieldError{Field: field, Message: fmt.Sprintf(format, args...)}
}

// validWindow validates what says how long the window is.
func (l *Limit) validWindow() error {
	switch {
	case l.Period > Epoch:
		return invalid("window", "is an unknown calendar period (%v)", l.Period)
	case l.Period != 0 && l.Algorithm != FixedWindow:
		return invalid("align", "is for %v only, not for %v", FixedWindow, l.Algorithm)
	case l.Period == Epoch && l.Zone != nil:
		return invalid("time_zone", "is for windows aligned to the calendar only")
	case l.Period == Epoch && l.Window%time.Second != 0:
		return invalid("window", "aligned to the epoch must be whole seconds; it is %v", days(l.Window))
	case l.aligned() && l.Window != 0:
		return invalid("window", "must be either a calendar period or a duration, not both")
	case l.Zone != nil && l.Period == 0:
		return invalid("time_zone", "is for windows aligned to the calendar only")
	case l.Anchor != 0 && l.Period != Month:
		return invalid("anchor", "is for windows of a calendar month only")
	case l.Anchor < 0 || l.Anchor > maxAnchor:
		return invalid("anchor", "must be a day of the month, 1 to %d; it is %d", maxAnchor, l.Anchor)
	case !l.aligned() && (l.Window != 0 || l.Limit != Unlimited) && (l.Window < MinWindow || l.Window > MaxWindow):
		return invalid("window", "must be between %v and %v; it is %v", days(MinWindow), days(MaxWindow),
			days(l.Window))
	}
	return nil
}

// validParameters validates what only some algorithms have. Nothing of it is for an unlimited limit. (A window may be
// there all the same: callers send it whatever their limit is.)
func (l *Limit) validParameters() error {
	flag := func(set bool) int64 {
		if set {
			return 1
		}
		return 0
	}
	window := l.Algorithm == FixedWindow && l.Period != Minute && l.Period != Hour
	for _, p := range [...]struct {
		field       string
		value, most int64
		fits        bool // the algorithm has the parameter
		otherwise   string
	}{
		{"slots", int64(l.Slots), MaxSlots, l.Algorithm == SlidingWindow, "is for sliding_window only, not for %v"},
		{"capacity", l.Capacity, MaxLimit, l.isBucket(), "is for token_bucket and leaky_bucket only, not for %v"},
		{"count_denied", flag(l.CountDenied), 1, l.Algorithm <= SlidingLog, "is not for %v"},
		{"carry_debt", flag(l.CarryDebt), 1, window,
			"is for fixed_window only, and not for minutes and hours of the calendar, " +
				"which clock changes make longer and shorter: give a window of 1m or 1h"},
		{"max_debt", l.MaxDebt, MaxLimit, l.Algorithm != Concurrency, "is not for %v"},
		{"max_log", l.MaxLog, MaxLimit, l.Algorithm == SlidingLog, "is for sliding_log only, not for %v"},
	} {
		switch {
		case p.value == 0:
		case !p.fits:
			return &FieldError{Field: p.field, Message: strings.ReplaceAll(p.otherwise, "%v", l.Algorithm.String())}
		case p.value < 0 || p.value > p.most:
			return invalid(p.field, "must be between 1 and %d; it is %d", p.most, p.value)
		case l.Limit == Unlimited:
			return invalid(p.field, "is for a limit, and this one is unlimited")
		}
	}
	return nil
}

// days words a duration as policies write it: 366d, and no zeros at the end.
func days(d time.Duration) string {
	const day = 24 * time.Hour
	whole, rest := "", d
	if d >= day {
		whole, rest = fmt.Sprintf("%dd", d/day), d%day
		if rest == 0 {
			return whole
		}
	}
	text := rest.String()
	for _, zero := range []string{"m0s", "h0m"} {
		if strings.HasSuffix(text, zero) {
			text = text[:len(text)-2]
		}
	}
	return whole + text
}

// Validate reports the first limit that cannot be, or what makes them impossible together, as a *FieldError. When there
// are several limits, its field is like "limits[1].window".
func (ls Limits) Validate() error {
	if len(ls) < 1 || len(ls) > MaxLimits {
		return invalid("limits", "must be between 1 and %d; there are %d", MaxLimits, len(ls))
	}
	for i, l := range ls {
		err := l.Validate()
		if err == nil && l.Algorithm == Concurrency && len(ls) > 1 {
			err = invalid("algorithm", "%v cannot be combined with other limits", Concurrency)
		}
		if err == nil {
			continue
		}
		return inLimits(err, i, len(ls))
	}
	return nil
}

// inLimits makes a *FieldError about limit i name it where there are several.
func inLimits(err error, i, n int) error {
	if f, ok := err.(*FieldError); ok && n > 1 {
		f.Field = fmt.Sprintf("limits[%d].%s", i, f.Field)
	}
	return err
}

// Words is the length of a State. It is at most 825 (eight sliding windows of 100 slots), so that a State and the
// record around it fit a block.
func (ls Limits) Words() int {
	n := ls.place(len(ls))
	if ls.logs() > 0 {
		n++
	}
	return n
}

// place is the index in a State of the first word of limit i.
func (ls Limits) place(i int) int {
	n := 1
	for j := range ls[:i] {
		n += ls[j].words()
	}
	return n
}

func (l *Limit) words() int {
	if c := l.counter(); c != nil {
		return c.words(l)
	}
	return 0
}

// Init makes s, whatever it holds, a state that has seen nothing. It owns no blocks.
func (ls Limits) Init(s State, now Instant) {
	s[0] = uint64(now.Mono)
	ls.each(s, func(i int, c counter, t []uint64) { c.init(&ls[i], t, now) })
	if p := ls.position(s); p != nil {
		*p = newPosition(*p, now)
	}
}

// trim frees the blocks of limits that count nothing, as the limits are after a failed ensureMemory.
func (ls Limits) trim(a *Arena, s State) {
	now := Instant{Mono: int64(s[0])}
	ls.each(s, func(i int, c counter, t []uint64) {
		if c.used(&ls[i], a, t, now) == 0 {
			c.free(&ls[i], a, t)
		}
	})
}

// tick takes note of now and returns it, or the newest instant noted when that is later.
func (s State) tick(now Instant) Instant {
	now = s.Latest(now)
	s[0] = uint64(now.Mono)
	return now
}

// Latest returns now, or the newest instant that the state has been told when that is later.
func (s State) Latest(now Instant) Instant {
	now.Mono = max(now.Mono, int64(s[0]))
	return now
}

// walk brings every limit of s that counts to now and calls do with it and its words.
func (ls Limits) walk(a *Arena, s State, now Instant, do func(i int, c counter, t []uint64)) {
	ls.each(s, func(i int, c counter, t []uint64) {
		c.advance(&ls[i], a, t, now)
		do(i, c, t)
	})
}

// each calls do with every limit of s that counts and its words.
func (ls Limits) each(s State, do func(i int, c counter, t []uint64)) {
	for i, rest := 0, s[1:]; i < len(ls); i++ {
		if c := ls[i].counter(); c != nil {
			n := c.words(&ls[i])
			do(i, c, rest[:n:n])
			rest = rest[n:]
		}
	}
}

// Refund gives units back: the oldest that are in use, the newest of a leaky queue. It returns how many were given
// back, the most of any limit; a limit never gives back more than is in use. A concurrency limit gives back nothing:
// see Release.
func (ls Limits) Refund(a *Arena, s State, now Instant, units int64) int64 {
	now = s.tick(now)
	var most int64
	ls.walk(a, s, now, func(i int, c counter, t []uint64) {
		most = max(most, c.refund(&ls[i], a, t, now, max(units, 0)))
	})
	return most
}

// Renew lets a lease of a concurrency limit live for ttl from now on (0 and what exceeds the limit's Window: the
// Window), and returns that time; false when there is no such lease any more. An unlimited limit keeps no leases, and
// renews any.
func (ls Limits) Renew(a *Arena, s State, now Instant, lease uint64, ttl time.Duration) (time.Duration, bool) {
	if ls[0].Algorithm != Concurrency {
		return 0, false
	}
	ttl = ls[0].ttl(ttl)
	if ls[0].Limit == Unlimited {
		return ttl, true
	}
	now = s.tick(now)
	concurrency{}.advance(&ls[0], a, s[1:], now)
	return ttl, concurrency{}.renew(a, s[1:], now, lease, ttl)
}

// Release ends a lease of a concurrency limit; false when there is no such lease any more. An unlimited limit keeps no
// leases, and releases any.
func (ls Limits) Release(a *Arena, s State, now Instant, lease uint64) bool {
	if ls[0].Algorithm != Concurrency {
		return false
	}
	if ls[0].Limit == Unlimited {
		return true
	}
	now = s.tick(now)
	concurrency{}.advance(&ls[0], a, s[1:], now)
	return concurrency{}.release(a, s[1:], lease)
}

// Idle reports whether s answers as a new state would, so that it may be dropped. An idle state owns no blocks.
//
// A new state opens a calendar window by the wall clock alone. So one in which nothing is in use is not idle before
// wallMargin has passed since its start: a node whose clock is behind by less than that learns from it that the window
// before has ended.
func (ls Limits) Idle(a *Arena, s State, now Instant) bool {
	now = s.tick(now)
	idle := true
	ls.walk(a, s, now, func(i int, c counter, t []uint64) {
		idle = idle && ls[i].idle(c, a, t, now)
	})
	return idle
}

// wallMargin is by how much the wall clocks of two nodes may differ at most where they count in a calendar window: by
// half of the window if that is less.
const wallMargin = 10 * time.Second

// idle reports whether a new limit would answer as t does.
func (l *Limit) idle(c counter, a *Arena, t []uint64, now Instant) bool {
	if c.used(l, a, t, now) != 0 {
		return false
	}
	return l.Period == 0 || floorDiv(now.Wall-int64(min(wallMargin, l.longest()/2)), 1e9) >= int64(t[0])
}

// Free gives back every block that s owns. Only Init and Convert may use s afterwards.
func (ls Limits) Free(a *Arena, s State) {
	ls.each(s, func(i int, c counter, t []uint64) { c.free(&ls[i], a, t) })
}

// Convert makes t, uninitialised and to.Words() long, the state of the limits that replace ls, and s unusable. Its
// blocks move over or are freed: it owns none then.
//
// Each new limit takes over from one old limit: from the one with the same algorithm and window or period, first at its
// own place, then anywhere; or else from the one at its own place, unless another limit takes over from that; or else
// it begins fresh. If the algorithm stays, a window keeps its counts, a log its entries, a bucket its debt (in whole
// units, rounded up, when the rate changes), a lease its life. If it changes, or the length or slots of a
// sliding_window or sliding_counter do, units in use count as if admitted now; leases become nothing else, and nothing
// else becomes leases. The new limit may be exceeded; then nothing passes until enough units have expired.
//
// When it returns ErrNoMemory, s is as before and t owns nothing.
func (ls Limits) Convert(a *Arena, s State, now Instant, to Limits, t State) error {
	now = s.tick(now)
	to.Init(t, now)
	if p, q := ls.position(s), to.position(t); p != nil && q != nil {
		*q = *p + generation
	}
	from := ls.heirs(to)
	words := func(ls Limits, s State, i int) []uint64 {
		at, n := ls.place(i), ls[i].words()
		return s[at : at+n : at+n]
	}
	// The steps that may fail come first.
	var carried [MaxLimits]int64
	var moved [MaxLimits]bool
	for j := range to {
		i := from[j]
		if i < 0 || ls[i].counter() == nil || to[j].counter() == nil {
			continue
		}
		old, c := ls[i].counter(), to[j].counter()
		u := words(ls, s, i)
		old.advance(&ls[i], a, u, now)
		if moved[j] = sameKind(&ls[i], &to[j]); moved[j] || ls[i].Algorithm == Concurrency ||
			to[j].Algorithm == Concurrency {
			continue
		}
		carried[j] = min(old.used(&ls[i], a, u, now), MaxLimit)
		if carried[j] > 0 && !c.ensureMemory(&to[j], a, words(to, t, j), carried[j]) {
			to.Free(a, t)
			return ErrNoMemory
		}
	}
	for j := range to {
		l, v := &to[j], words(to, t, j)
		switch {
		case moved[j]:
			u := words(ls, s, from[j])
			l.counter().convert(&ls[from[j]], a, u, now, l, v)
			clear(u) // its blocks have moved
			l.counter().advance(l, a, v, now)
		case carried[j] > 0:
			l.counter().advance(l, a, v, now)
			l.counter().charge(l, a, v, now, carried[j])
		}
	}
	ls.Free(a, s)
	return nil
}

// sameKind reports whether two limits that both count do it in the same way, so that what one has counted means the
// same to the other.
func sameKind(l, m *Limit) bool {
	return l.Algorithm == m.Algorithm && l.Period == m.Period && l.anchor() == m.anchor() &&
		l.zone().String() == m.zone().String()
}

// heirs says for each limit of to which one of ls it takes over from, -1 for none: the one at its place if that is of
// its kind and window, else the first such that is left, else the one at its place if that is left.
func (ls Limits) heirs(to Limits) (from [MaxLimits]int) {
	for j := range from {
		from[j] = -1
	}
	var taken [MaxLimits]bool
	alike := func(i, j int) bool { return sameKind(&ls[i], &to[j]) && ls[i].Window == to[j].Window }
	for _, fits := range []func(i, j int) bool{
		func(i, j int) bool { return i == j && alike(i, j) },
		alike,
		func(i, j int) bool { return i == j },
	} {
		for j := range to {
			for i := range ls {
				if from[j] < 0 && !taken[i] && fits(i, j) {
					from[j], taken[i] = i, true
				}
			}
		}
	}
	return from
}

// u128 is an unsigned 128-bit integer: the product of a limit and a window does not fit 64 bits.
type u128 struct{ hi, lo uint64 }

// mul multiplies two numbers that are not negative.
func mul(x, y int64) u128 {
	hi, lo := bits.Mul64(uint64(x), uint64(y))
	return u128{hi, lo}
}

func (x u128) add(y u128) u128 {
	lo, carry := bits.Add64(x.lo, y.lo, 0)
	hi, _ := bits.Add64(x.hi, y.hi, carry)
	return u128{hi, lo}
}

func (x u128) sub(y u128) u128 {
	lo, borrow := bits.Sub64(x.lo, y.lo, 0)
	hi, _ := bits.Sub64(x.hi, y.hi, borrow)
	return u128{hi, lo}
}

func (x u128) less(y u128) bool {
	return x.hi < y.hi || x.hi == y.hi && x.lo < y.lo
}

// div returns the quotient and the remainder of x by y, which is positive. The quotient must be below 1<<63.
func (x u128) div(y int64) (q, r int64) {
	uq, ur := bits.Div64(x.hi, x.lo, uint64(y))
	return int64(uq), int64(ur)
}

// quotient is x/y rounded down, and no more than MaxLimit, for positive y.
func (x u128) quotient(y int64) int64 {
	if !x.less(mul(MaxLimit, y)) {
		return MaxLimit
	}
	q, _ := x.div(y)
	return q
}

// floorDiv is x/y rounded down, for positive y.
func floorDiv(x, y int64) int64 {
	q := x / y
	if x%y < 0 {
		q--
	}
	return q
}
