package lend

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// play is borrowers and an owner of one key in virtual time. Messages take their time and are not lost.
type play struct {
	t      *testing.T
	owner  *owner
	node   actor // that the owner is in
	now    int64
	events testkit.Timeline
	way    time.Duration // of a message
	copied time.Duration // how long the owner waits before it answers what it has lent

	borrowers         []*borrower
	checks, reports   int // messages
	loans             int // reported
	recalls, admitted int
	asked             int      // units, one by one
	waited            int      // for an answer to a report
	round             []func() // checks that wait for what is called back; nil: nothing is
	out               map[algo.LoanID]bool
	stalls            *rand.Rand // draws when borrowers stand still; nil: never
}

func newPlay(t *testing.T, l algo.Limit) *play {
	o := &owner{t: t, ls: algo.Limits{l}, a: algo.NewArena(nil)}
	o.s = make(algo.State, o.ls.Words())
	o.ls.Init(o.s, algo.Instant{})
	return &play{t: t, owner: o, now: int64(time.Hour)}
}

func (p *play) after(d time.Duration, do func()) { p.events.At(p.now+int64(d), do) }

// actor is a process, which may stand still now and then: what it would do meanwhile it does afterwards.
type actor struct{ stalled int64 }

// at has an actor do something after a time.
func (p *play) at(a *actor, d time.Duration, do func()) {
	p.after(d, func() {
		if left := a.stalled - p.now; left > 0 {
			p.at(a, time.Duration(left), do)
			return
		}
		do()
	})
}

// stall has an actor stand still again and again, for up to most each time.
func (p *play) stall(a *actor, every, most time.Duration) {
	p.after(time.Duration(p.stalls.ExpFloat64()*float64(every)), func() {
		a.stalled = p.now + p.stalls.Int64N(int64(most))
		p.stall(a, every, most)
	})
}

func (p *play) run(until int64) {
	p.events.Run(until, func(now int64) { p.now = max(p.now, now) })
}

// borrower is one, who reports as clients do.
type borrower struct {
	actor
	p        *play
	id       uint64
	book     *Book[string, int]
	reported int64         // when last
	turn     int           // of what is due
	waiting  []func() bool // callers who wait for an answer; each reports whether it goes on
	queue    []func(admitted bool)
	asking   bool
}

func (p *play) borrower() *borrower {
	b := &borrower{p: p, id: uint64(len(p.borrowers) + 1)}
	b.book = newBook(func() { b.due(0) })
	p.borrowers = append(p.borrowers, b)
	if p.stalls != nil {
		p.stall(&b.actor, 50*time.Millisecond, 30*time.Millisecond)
	}
	return b
}

// due has a borrower report after a time.
func (b *borrower) due(after time.Duration) {
	b.turn++
	turn := b.turn
	b.p.at(&b.actor, max(after, time.Duration(b.reported-b.p.now)+time.Millisecond), func() {
		if b.turn == turn {
			b.report()
		}
	})
}

func (b *borrower) report() {
	p := b.p
	reports, next := b.book.Report(p.now)
	b.reported = p.now
	if next > 0 {
		b.due(next)
	}
	if len(reports) == 0 {
		return
	}
	p.reports++
	p.loans += len(reports)
	sent := p.now
	p.at(&p.node, p.way, func() {
		wait := p.way
		var answers []Answer[int]
		for _, r := range reports {
			if p.round != nil {
				r.Want = 0
			}
			a := p.owner.lend(p.now, b.id, r)
			if a.Term > 0 {
				wait = p.way + p.copied
			}
			if loan, ok := p.owner.u.Get(algo.LoanID{Borrower: b.id, Number: r.Number}); !ok || loan.Ended ||
				loan.Left() == 0 {
				p.returned(algo.LoanID{Borrower: b.id, Number: r.Number})
			}
			a.From = 1
			answers = append(answers, a)
		}
		p.at(&b.actor, wait, func() {
			b.book.Answered(sent, p.now, answers)
			b.goOn()
		})
	})
}

// goOn has those go on who need not wait any more.
func (b *borrower) goOn() {
	waiting := b.waiting
	b.waiting = nil
	for _, w := range waiting {
		if !w() {
			b.waiting = append(b.waiting, w)
		}
	}
}

// ask asks for n units, and then calls next.
func (b *borrower) ask(n int64, next func(admitted bool)) {
	p := b.p
	if _, _, ok := b.book.Take("k", n, func() int64 { return p.now }); ok {
		p.admitted += int(n)
		next(true)
		return
	}
	coming := b.book.Pending("k", n, p.now)
	if coming == nil {
		b.askOwner(n, next)
		return
	}
	p.waited++
	gone := false
	b.waiting = append(b.waiting, func() bool {
		if gone {
			return true
		}
		select {
		case <-coming:
			gone = true
			b.ask(n, next)
		default:
		}
		return gone
	})
	p.at(&b.actor, Patience, func() {
		if !gone {
			gone = true
			b.askOwner(n, next)
		}
	})
}

// askOwner sends a check, together with what else has gathered while the last message was under way.
func (b *borrower) askOwner(n int64, next func(admitted bool)) {
	b.p.asked += int(n)
	b.queue = append(b.queue, func(admitted bool) {
		if admitted {
			b.p.admitted += int(n)
			b.book.Missed("k", n, at(b.p.now), nil)
		}
		next(admitted)
	})
	if !b.asking {
		b.send()
	}
}

func (b *borrower) send() {
	p := b.p
	if b.asking = len(b.queue) > 0; !b.asking {
		return
	}
	p.checks++
	queue := b.queue
	b.queue = nil
	left := len(queue)
	p.at(&p.node, p.way, func() {
		for _, answer := range queue {
			p.decide(func(admitted bool) {
				p.at(&b.actor, p.way, func() {
					answer(admitted)
					if left--; left == 0 {
						b.send()
					}
				})
			})
		}
	})
}

// decide decides for one unit, after what is on loan has been called back if need be.
func (p *play) decide(answer func(admitted bool)) {
	o := p.owner
	if o.check(p.now, 1) {
		answer(true)
		return
	}
	at := algo.Instant{Mono: p.now, Wall: p.now}
	if o.u.OnLoan() == 0 || o.ls.Room(o.a, o.s, at) < 1 {
		answer(false)
		return
	}
	again := func() { p.decide(answer) }
	if p.round != nil {
		p.round = append(p.round, again)
		return
	}
	o.u.Recall()
	p.round, p.out = []func(){again}, make(map[algo.LoanID]bool)
	for _, l := range o.u.Most() {
		p.recalls++
		p.out[l.ID] = true
		b := p.borrowers[l.ID.Borrower-1]
		p.at(&b.actor, p.way, func() {
			b.book.Recalled(l.ID.Number, l.Granted, p.now)
			b.goOn()
		})
	}
}

// returned notes that nothing of a loan is held any more.
func (p *play) returned(id algo.LoanID) {
	if p.round == nil || !p.out[id] {
		return
	}
	if delete(p.out, id); len(p.out) == 0 {
		round := p.round
		p.round = nil
		for _, again := range round {
			again()
		}
	}
}

// fill has ten borrowers use up a limit of a million, each with eight callers who ask for as much as they get, each
// time after so long.
func (p *play) fill(each time.Duration) {
	const callers, borrowers = 8, 10
	calling := 0
	for range borrowers {
		b := p.borrower()
		for range callers {
			calling++
			var ask func(bool)
			ask = func(admitted bool) {
				if !admitted {
					calling--
					return
				}
				p.at(&b.actor, each, func() { b.ask(1, ask) })
			}
			ask(true)
		}
	}
	for began := p.now; calling > 0 && p.now < began+int64(time.Hour); {
		p.run(p.now + int64(10*time.Millisecond))
	}
}

// TestFill has a limit of a million used up, at the speeds of a machine and a network and at those that seeds draw,
// where processes stand still now and then: exactly that is admitted, in no more messages than that takes.
func TestFill(t *testing.T) {
	const limit, most = 1_000_000, 500
	fill := func(name string, way, each time.Duration, stalls *rand.Rand) {
		p := newPlay(t, algo.Limit{Algorithm: algo.FixedWindow, Limit: limit, Window: 24 * time.Hour})
		p.way, p.stalls = way, stalls
		if stalls != nil {
			p.stall(&p.node, 20*time.Millisecond, 10*time.Millisecond)
		}
		began := p.now
		p.fill(each)
		what := fmt.Sprintf("%s: way %v, %v apart: %d admitted in %v; %d messages with checks, %d with reports; %d asked, %d recalled",
			name, way, each, p.admitted, time.Duration(p.now-began), p.checks, p.reports, p.asked, p.recalls)
		t.Log(what)
		expect.True(t, p.admitted == limit && p.checks+p.reports <= most,
			"%s: not %d in %d messages", what, limit, most)
	}
	fill("machine", 50*time.Microsecond, 20*time.Microsecond, nil)
	fill("network", 3*time.Millisecond, time.Microsecond, nil)
	for seed := range uint64(2) {
		r := rand.New(rand.NewPCG(seed, 9))
		way, each := 20e3*math.Pow(200, r.Float64()), 200*math.Pow(100, r.Float64())
		fill(fmt.Sprint("seed ", seed), time.Duration(way), time.Duration(each), r)
	}
}

// TestSteady has a borrower ask for a key at a steady rate: all is admitted from loans, though the owner waits before
// it answers, and reported a few times in each term.
func TestSteady(t *testing.T) {
	const span = 10
	for _, rate := range []int64{200, 2000, 50_000} {
		p := newPlay(t, algo.Limit{Algorithm: algo.TokenBucket, Limit: 1_000_000_000, Window: time.Minute})
		p.way, p.copied = 300*time.Microsecond, 20*time.Millisecond
		b := p.borrower()
		var ask func()
		ask = func() {
			p.after(time.Second/time.Duration(rate), ask)
			b.ask(1, func(admitted bool) { expect.True(t, admitted, "refused") })
		}
		ask()
		p.run(p.now + int64(2*time.Second))
		p.admitted, p.asked, p.loans, p.waited = 0, 0, 0, 0
		p.run(p.now + span*int64(time.Second))
		expect.True(t, p.asked <= 0 && p.waited <= 0 && p.loans <= span*(perTerm+1) && p.admitted >= span*int(rate)-1,
			"%d a second: %d admitted, %d asked, %d waited, %d reports", rate, p.admitted, p.asked, p.waited, p.loans)
	}
}

// TestKeepsToWhatItWasTold holds a Cache to a list that keeps everything.
func TestKeepsToWhatItWasTold(t *testing.T) {
	type entry struct {
		key string
		Refusal[int]
	}
	keys := []string{"a", "b", "c", "d", "e", "f", "g"}
	// Few hashes, all in one set, so that keys share hashes and drive one another out.
	hash := func(key string) uint64 { return uint64(key[0]) % 5 * shardCount * sets }
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 1))
		var r Refusals[string, int]
		var known []entry // what may be found
		marks := map[string]uint64{}
		now := int64(1)
		for step := range 200 {
			key := keys[random.IntN(len(keys))]
			h := hash(key)
			switch random.IntN(5) {
			case 0, 1:
				cost := 1 + random.Int64N(4)
				got, ok := r.Find(h, key, cost, now)
				marks[key] = r.Mark(h)
				must.True(t, !ok || slices.ContainsFunc(known, func(e entry) bool {
					return e.key == key && e.Refusal == got && e.Cost == cost && now < e.Until
				}), "seed %d: %s, cost %d at %d: found %+v, known are %+v", seed, key, cost, now, got, known)
			case 2:
				mark := marks[key]
				cost := 1 + random.Int64N(3)
				e := entry{key, Refusal[int]{step, cost, now, now + random.Int64N(10)}}
				r.Remember(h, key, mark, e.Refusal)
				keep := mark == r.Mark(h) && e.Until > now
				got, ok := r.Find(h, key, cost, now)
				must.True(t, (!keep || ok && got == e.Refusal) && (keep || !ok || got != e.Refusal),
					"seed %d: %+v: found %v %+v, though it was to be kept: %v", seed, e, ok, got, keep)
				if keep {
					known = slices.DeleteFunc(known, func(o entry) bool { return o.key == key && o.Cost == cost })
					known = append(known, e)
				}
			case 3:
				if random.IntN(2) == 0 {
					r.Admitted(h)
				} else {
					r.Forget(h)
				}
				known = slices.DeleteFunc(known, func(e entry) bool { return hash(e.key) == h })
			case 4:
				now += random.Int64N(4)
			}
		}
	}
}

func TestReplacesWhatEndsFirst(t *testing.T) {
	var r Refusals[int, int]
	const set = shardCount * sets // hashes that far apart fall into one set
	for i := range ways {
		r.Remember(uint64(i*set), i, 0, Refusal[int]{i, 1, 0, int64(100 - i)})
	}
	r.Remember(uint64(ways*set), ways, 0, Refusal[int]{9, 1, 0, 50})
	for i := range ways + 1 {
		_, ok := r.Find(uint64(i*set), i, 1, 1)
		want := i != ways-1
		expect.Equal(t, ok, want, "%d is remembered", i)
	}
}

// TestEqualHashes: keys with one hash have a place each.
func TestEqualHashes(t *testing.T) {
	var r Refusals[int, int]
	for key := range 2 {
		r.Remember(1, key, 0, Refusal[int]{key, 1, 0, int64(100 + key)})
	}
	for key := range 2 {
		got, ok := r.Find(1, key, 1, 99)
		expect.True(t, ok && got.Decision == key, "key %d: %+v, %v", key, got, ok)
		got, ok = r.Find(1, key, 1, 101)
		expect.True(t, !ok, "key %d, which has ended: %+v", key, got)
	}
}

// TestAdmittedKeepsWhatIsInFlight: a refusal that is on its way while something is admitted is no less true for that.
func TestAdmittedKeepsWhatIsInFlight(t *testing.T) {
	var r Refusals[int, int]
	mark := r.Mark(1)
	r.Remember(1, 1, mark, Refusal[int]{1, 9, 0, 100}) // of another cost, so that there is something to forget
	r.Admitted(1)
	r.Remember(1, 1, mark, Refusal[int]{1, 1, 0, 100})
	_, ok := r.Find(1, 1, 1, 1)
	expect.True(t, ok, "what came after an admission is not remembered")
	r.Forget(1)
	r.Remember(1, 1, mark, Refusal[int]{1, 1, 0, 100})
	_, ok = r.Find(1, 1, 1, 1)
	expect.True(t, !ok, "what was asked before something was given back is remembered")
}

func TestFindAllocatesNothing(t *testing.T) {
	var r Refusals[string, [30]int64]
	const k = "k"
	r.Remember(1, k, 0, Refusal[[30]int64]{Cost: 2, Until: 100})
	allocs := testing.AllocsPerRun(100, func() {
		_, ok := r.Find(1, k, 2, 50)
		expect.True(t, ok, "forgotten")
	})
	expect.Equal(t, allocs, 0, "allocations")
}
