package lend

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestTakeAll takes of two loans at once, from many goroutines, and more often in vain than not, while others take of
// one of them and reports are made and answered: what is reported spent never becomes less, and is in the end what was
// admitted, of both the same but for those others.
func TestTakeAll(t *testing.T) {
	b := newBook(func() {})
	var clock atomic.Int64
	clock.Store(int64(time.Hour))
	now := clock.Load
	miss(b, now(), "a", "b")
	must.True(t, !b.TakeAll([]Part[string, int]{{Key: "a", Units: 1}, {Key: "none", Units: 1}}, now) &&
		!b.TakeAll(nil, now), "took of a loan that there is not")
	var stop atomic.Bool
	var both, alone atomic.Int64
	var taking sync.WaitGroup
	for i := range 4 {
		taking.Go(func() {
			r := rand.New(rand.NewPCG(uint64(i), 1))
			for !stop.Load() {
				n := 1 + r.Int64N(3)
				parts := []Part[string, int]{{Key: "a", Units: n}, {Key: "b", Units: 1}, {Key: "b", Units: n}}
				if b.TakeAll(parts, now) {
					both.Add(n)
					expect.True(t, parts[0].Terms != nil && parts[1].Left >= parts[2].Left+n, "%+v", parts)
					alone.Add(1) // the third part
				}
				if _, _, ok := b.Take("b", 1, now); ok {
					alone.Add(1)
				}
			}
		})
	}
	spent, granted := make(map[string]int64), make(map[string]int64)
	report := func() {
		clock.Add(int64(time.Millisecond))
		at := now()
		var answers []Answer[int]
		for _, r := range due(b, at) {
			expect.True(t, r.Totals.Spent >= spent[r.Key] && r.Totals.Checks <= r.Totals.Spent && r.Number <= 2,
				"%s: %+v after %d were spent", r.Key, r, spent[r.Key])
			spent[r.Key] = r.Totals.Spent
			// Of b there is less: most is taken in vain.
			if more := map[string]int64{"a": 40, "b": 10}[r.Key]; r.Totals.Left() < more {
				granted[r.Key] += more
			}
			answers = append(answers, Answer[int]{Number: r.Number,
				Lent: limit.Lent{Granted: granted[r.Key], Spent: r.Totals.Spent, Term: algo.LoanTerm}})
		}
		b.Answered(at, now(), answers)
	}
	for both.Load() < 300 && !t.Failed() {
		report()
		b.Missed("a", 1, now, nil) // somebody still wants some
		b.Missed("b", 1, now, nil)
	}
	stop.Store(true)
	taking.Wait()
	clock.Add(int64(time.Second / 2)) // idle: what is left is returned
	report()
	expect.True(t, spent["a"] == both.Load() && spent["b"] == both.Load()+alone.Load(),
		"%d of a and %d of b are reported spent, %d of both and %d of b alone were admitted", spent["a"], spent["b"],
		both.Load(), alone.Load())
	clock.Add(int64(2 * algo.LoanTerm))
	expect.True(t, !b.TakeAll([]Part[string, int]{{Key: "a", Units: 1}}, now), "took of a loan that has ended")
}

// lentBoth returns a book with loans of 16 units of a and b; that of b is for a term.
func lentBoth(now int64, term time.Duration) *Book[string, int] {
	b := newBook(func() {})
	miss(b, now, "a", "b")
	terms := map[string]time.Duration{"a": algo.LoanTerm, "b": term}
	var answers []Answer[int]
	for _, r := range due(b, now) {
		answers = append(answers, Answer[int]{Number: r.Number, Lent: limit.Lent{Granted: 16, Term: terms[r.Key]}})
	}
	b.Answered(now, now, answers)
	return b
}

// TestTakeAllEnds: a loan that is over when its units are taken admits nothing, and takes nothing of the others.
func TestTakeAllEnds(t *testing.T) {
	now := int64(time.Hour)
	b := lentBoth(now, 20*time.Millisecond)
	parts := func() []Part[string, int] { return []Part[string, int]{{Key: "a", Units: 1}, {Key: "b", Units: 1}} }
	must.True(t, b.TakeAll(parts(), func() int64 { return now + int64(19*time.Millisecond) }),
		"nothing was admitted in time")
	expect.True(t, !b.TakeAll(parts(), func() int64 { return now + int64(20*time.Millisecond) }),
		"a unit was admitted after its term")
	_, left, ok := b.Take("a", 1, func() int64 { return now })
	expect.True(t, ok && left == 14, "%d are left of the loan that goes on, %v", left, ok)
}

// A clock goes on while the machine is suspended, and whatever is done to the wall clock it never runs slower than the
// monotonic one.
func TestClock(t *testing.T) {
	const ms = int64(time.Millisecond)
	c := NewClock(5*ms, 1000*ms)
	for _, s := range []struct {
		what             string
		mono, wall, want int64
	}{
		{"running", 6 * ms, 1001 * ms, 6 * ms},
		{"slewed", 106 * ms, 1101*ms + ms/2, 106 * ms},
		{"suspended for 3 s", 107 * ms, 4102 * ms, 107*ms + 3000*ms},
		{"running again", 108 * ms, 4103 * ms, 108*ms + 3000*ms},
		{"set back by 2 s", 109 * ms, 2104 * ms, 109*ms + 3000*ms},
		{"running again", 110 * ms, 2105 * ms, 110*ms + 3000*ms},
		{"suspended for 1 s", 111 * ms, 3106 * ms, 111*ms + 4000*ms},
	} {
		got := c.Read(s.mono, s.wall)
		expect.True(t, got == s.want || s.what == "suspended for 3 s" && got > s.want-ms && got <= s.want,
			"%s: %v, want %v", s.what, time.Duration(got), time.Duration(s.want))
	}
}
