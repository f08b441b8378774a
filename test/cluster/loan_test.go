package clustertest

import (
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/test/checker"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

var longLoans = flag.Bool("loans", false,
	"run the tests of loans several times over, with more faults, on a machine that does nothing else")

// Loans in real processes. What is judged is what borrowers have admitted, by when they did. That clocks' rates differ
// is not seen here: processes of one machine read one clock, whose rate cannot be changed for one of them; package
// simulation has clocks that are off by 0.1 %.

const (
	lentLimit = 400
	// A brief window, and a long one: a borrower that is away for longer than the one has been forgotten; the other is
	// longer than it takes to get over the loss of an owner.
	briefWindow = 2 * time.Second
	longWindow  = 10 * time.Second
)

// lentPolicies are of a window and of every durability, and of more than a sliding log.
func lentPolicies(prefix string, window time.Duration) []checker.Policy {
	list := everyDurability(lentLimit, window,
		checker.Policy{Name: "strict-sync", Kind: checker.Window, Durability: checker.Sync, Strict: true})
	for i := range list {
		list[i].Name, list[i].Lent = prefix+list[i].Name, min(window/8, time.Second)
	}
	return list
}

// lending is a fleet and its borrowers.
type lending struct {
	*load     // without a load of its own: what it records is what borrowers were answered
	origin    int64
	borrowers []*borrower
	faults    faults
	starved   func() bool
}

// lend starts the members of a fleet.
func lend(f *fleet, policies []checker.Policy) *lending {
	f.start(f.members...)
	f.calm(f.members...)
	f.decided(f.members[0], "probe-strict")
	l := &lending{load: &load{t: f.t, f: f, policies: policies, start: time.Now(), quit: make(chan struct{})},
		starved: watchStarving(f.t)}
	l.origin = monotonic() - l.now()
	return l
}

// borrow starts one more borrower of some policies.
func (l *lending) borrow(wrapper []string, plan borrowerPlan, policies []checker.Policy) *borrower {
	l.t.Helper()
	var addresses []string
	for _, m := range l.f.members {
		addresses = append(addresses, m.ip+":"+fleetGRPC)
	}
	plan.Address, plan.Origin = strings.Join(addresses, ","), l.origin
	for _, p := range policies {
		plan.Policies = append(plan.Policies, p.Name)
	}
	b := startBorrower(l.t, wrapper, plan)
	l.borrowers = append(l.borrowers, b)
	return b
}

// spent is how many units borrowers have reported to the nodes that run.
func (l *lending) spent() (n float64) {
	for _, m := range l.f.members {
		select {
		case <-m.done:
		default:
			n += m.metrics().value("weir_loan_units_total")
		}
	}
	return n
}

// goesOn waits until so many more units have been spent of loans.
func (l *lending) goesOn(more float64) {
	l.t.Helper()
	from := l.spent()
	eventually(l.t, 3*waitTimeout, "units on loan are spent", func() bool { return l.spent() >= from+more })
}

// judge has the checker look at what was admitted. What was refused it does not see: faults of borrowers hold back what
// they had on loan. A machine that kept processes waiting may have left time for too few checks to fill a key.
func (l *lending) judge() {
	l.t.Helper()
	h := l.history(l.faults)
	var all []checker.Operation
	for _, b := range l.borrowers {
		all = append(all, b.operations(l.origin)...)
	}
	counts := resultsOf(all)
	h.Operations = append(h.Operations,
		slices.DeleteFunc(all, func(op checker.Operation) bool { return op.Result != checker.Admitted })...)
	report := checker.Check(h)
	for _, p := range l.policies {
		c := counts[p.Name]
		l.t.Logf("%-13s admitted %5d, refused %5d, failed %4d; of one key at most %d beyond the limit of %d", p.Name,
			c.admitted, c.refused, c.failed, report.Excess[p.Name], p.Limit)
		expect.True(l.t, c.admitted >= lentLimit && c.refused != 0 || l.starved(),
			"%s: too little was asked to tell anything", p.Name)
	}
	tellViolations(l.t, report.Violations)
}

// TestBorrowers has borrowers killed, stopped for longer than their loans and what they were charged as last, and cut
// off, and then an owner killed: nothing is admitted beyond what the loss of the owner costs under each durability.
func TestBorrowers(t *testing.T) {
	needsTime(t)
	plainOnly(t)
	var cut *network
	if syscall.Geteuid() == 0 {
		cut = newNetwork(t, 4)
	}
	brief, long := lentPolicies("brief-", briefWindow)[1:], lentPolicies("", longWindow)
	f := newFleet(t, 3, policiesFile(slices.Concat(brief, long)), cut)
	l := lend(f, slices.Concat(brief, long))
	var near, far []string
	if cut != nil {
		near, far = cut.hub.enter(), cut.inside(3)
	}
	// Keys come up one after another, and are asked about until what was first admitted of them has long expired: more
	// than twice as often as they allow.
	briefly := borrowerPlan{Clients: 1, Rate: 2400, Every: int64(time.Second), Keys: 5, Newest: 40}
	stopped := l.borrow(near, briefly, brief)
	apart := l.borrow(far, briefly, brief)
	l.borrow(near, briefly, brief)
	for range 3 {
		l.borrow(near, borrowerPlan{Clients: 1, Rate: 3000, Every: int64(time.Second), Keys: 13, Newest: 35}, long)
	}
	away := briefWindow + briefWindow/2
	rounds := 1
	if *longLoans {
		rounds = 5
	}
	for range rounds {
		victim := l.borrow(near, briefly, brief)
		l.goesOn(500)
		victim.kill()
		l.goesOn(500)

		t.Log(l.clock(l.now()), "a borrower stops")
		stopped.signal(syscall.SIGSTOP)
		time.Sleep(away)
		stopped.signal(syscall.SIGCONT)
		t.Log(l.clock(l.now()), "and goes on")
		l.goesOn(500)

		if cut != nil {
			t.Log(l.clock(l.now()), "a borrower is cut off")
			cut.cut([]int{3}, []int{0, 1, 2})
			cut.cut([]int{0, 1, 2}, []int{3})
			time.Sleep(away)
			cut.heal()
			t.Log(l.clock(l.now()), "and is reached again")
			l.goesOn(500)
		} else {
			t.Log("no borrower is cut off: run this test as root to see that")
		}

		owner, rest := f.members[2], f.members[:2]
		alive := l.gone(owner)
		at := l.kill(owner)
		t.Log(l.clock(at), owner.name, "is killed")
		l.faults.crashes = append(l.faults.crashes, checker.Crash{At: at, Node: owner.name, Copied: true})
		l.tellDecided(rest[0])
		t.Logf("calm after %v", f.calm(rest...).Round(time.Millisecond))
		l.goesOn(500)
		if *longLoans {
			f.start(owner)
			t.Logf("%s is back: calm after %v", owner.name, f.calm(f.members...).Round(time.Millisecond))
		}
		alive()
	}
	time.Sleep(longWindow / 2) // in which what was forgotten is used
	apart.end()
	l.judge()
}

// TestRestartsUnderLoans restarts a fleet node by node, in good order, while twenty clients borrow of keys that fill up
// meanwhile: each admits as much as its limit says, none is refused before that, and none of keys with room for all.
func TestRestartsUnderLoans(t *testing.T) {
	needsTime(t)
	plainOnly(t)
	const filled = 40_000
	policies := []checker.Policy{
		{Name: "async", Kind: checker.Window, Durability: checker.Async, Limit: filled, Window: time.Hour},
		{Name: "sync", Kind: checker.Window, Durability: checker.Sync, Limit: filled, Window: time.Hour},
		{Name: "roomy", Kind: checker.Window, Durability: checker.Async, Limit: 300 * filled, Window: time.Hour},
	}
	f := newFleet(t, 3, policiesFile(policies), nil)
	l := lend(f, policies)
	for range 4 {
		l.borrow(nil, borrowerPlan{Clients: 5, Rate: 600, Keys: 1}, policies)
	}
	l.goesOn(1000)
	rounds := 1
	if *longLoans {
		rounds = 3
	}
	var expired, unanswered float64
	// note is called before a node stops, and its counts with it.
	note := func(m *member) {
		page := m.metrics()
		expired += page.value(expiredUnits)
		unanswered += page.value("weir_loan_recalls_total", "result", "unanswered")
	}
	for range rounds {
		for _, m := range f.members {
			note(m)
			left := f.leave(m)
			began := time.Now()
			f.start(m)
			t.Logf("%s: left within %v, ready again after %v", m.name, left.Round(time.Millisecond),
				time.Since(began).Round(time.Millisecond))
		}
	}
	t.Logf("calm after %v", f.calm(f.members...).Round(time.Millisecond))
	full := func(name string) bool {
		ctx := testkit.Within(t, startTimeout)
		d, err := f.members[0].checkGRPC(ctx, name, keyNamed(0))
		l.records = append(l.records, record{Operation: checker.Operation{Policy: name, Key: keyNamed(0), Cost: 1,
			Answered: l.now(), Result: checker.Failed}})
		r := &l.records[len(l.records)-1]
		if err == nil && !d.FailedClosed {
			if r.Result = checker.Refused; d.Allowed {
				r.Result = checker.Admitted
			}
		}
		return r.Result == checker.Refused
	}
	for _, name := range []string{"async", "sync"} {
		eventually(t, 6*waitTimeout, name+" is full", func() bool { return full(name) })
	}
	for _, b := range l.borrowers {
		b.end()
	}
	for _, m := range f.members {
		note(m)
	}
	t.Logf("%.0f units on loan were charged when their loans ended, %.0f recalls were not answered in time", expired,
		unanswered)
	if !l.starved() {
		expired = 0
	}
	all := make([]checker.Operation, 0, 4*filled)
	for _, r := range l.records {
		all = append(all, r.Operation)
	}
	for _, b := range l.borrowers {
		all = append(all, b.operations(l.origin)...)
	}
	slices.SortFunc(all, func(a, b checker.Operation) int { return cmp.Compare(a.Sent, b.Sent) })
	for _, p := range policies {
		var admitted, failed, refused, hasty int64
		var first checker.Operation
		for _, op := range all {
			if op.Policy != p.Name {
				continue
			}
			switch op.Result {
			case checker.Admitted:
				admitted++
			case checker.Failed:
				failed++
			default:
				refused++
			}
		}
		// What was sent before a refusal was answered may have been charged before it.
		var charged []int64
		for _, op := range all {
			if op.Policy == p.Name && op.Result != checker.Refused {
				charged = append(charged, op.Sent)
			}
		}
		for _, op := range all {
			if op.Policy != p.Name || op.Result != checker.Refused {
				continue
			}
			if n, _ := slices.BinarySearch(charged, op.Answered+1); int64(n)+int64(expired) < p.Limit {
				if hasty++; hasty == 1 {
					first = op
				}
			}
		}
		t.Logf("%-6s admitted %6d of %d, refused %6d, failed %d", p.Name, admitted, p.Limit, refused, failed)
		switch {
		case admitted > p.Limit:
			t.Errorf("%s: %d were admitted, of a limit of %d", p.Name, admitted, p.Limit)
		case p.Limit == filled && admitted+failed+int64(expired) < p.Limit:
			t.Errorf("%s: %d were admitted and %d failed, of a limit of %d", p.Name, admitted, failed, p.Limit)
		}
		if hasty > 0 {
			t.Logf("%s: %d were refused though there was room, the first at %s", p.Name, hasty, l.clock(first.Answered))
			expect.True(t, unanswered != 0,
				"with nobody to blame for it") // by borrowers that got no processor for 50 ms
		}
	}
}

// A borrower is a process of its own, this test's binary, whose Go clients ask about keys all the time and borrow units
// of those that they ask about often. What it asked and what came of it is in a file that it shares with the test, so
// that nothing of that is lost when it is killed. Instants are those of the machine's monotonic clock, which all
// processes read alike.

// borrowerCommand is the argument that makes this binary a borrower.
const borrowerCommand = "borrow"

// borrowerPlan says what a borrower asks.
type borrowerPlan struct {
	Address  string
	Policies []string
	Clients  int   // of one process, each a borrower to the nodes
	Rate     int   // questions of each client in a second
	Origin   int64 // when key 0 came up
	Every    int64 // after which time the next key comes up; 0: all of Keys are there from the beginning
	Keys     int   // how many are asked about, the newest ones
	Newest   int   // the share of the questions that are about the newest one, in percent
	Records  string
}

// maxQuestions is how many questions of a borrower are recorded; it ends before it asks more.
const maxQuestions = 1 << 19

// question is a record in the file. Sent is written before the question is asked, the rest when it has been answered.
type question struct {
	Sent, Answered int64
	Policy, Key    uint16
	Result         uint8
	Degraded       bool
	_              [2]byte
}

const questionSize = int(unsafe.Sizeof(question{}))

// monotonic reads the machine's monotonic clock.
func monotonic() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		panic(err) // there is no Linux without it
	}
	return t.Nano()
}

// questions maps a file of records into memory, until unmap is called.
func questions(file *os.File) (records []question, unmap func(), err error) {
	data, err := unix.Mmap(int(file.Fd()), 0, maxQuestions*questionSize, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED)
	if err != nil {
		return nil, nil, err
	}
	unmap = func() { _ = unix.Munmap(data) } // which it is
	return unsafe.Slice((*question)(unsafe.Pointer(&data[0])), maxQuestions), unmap, nil
}

// runBorrower is the borrower's process. It ends in good order when its standard input does.
func runBorrower(text string) error {
	var plan borrowerPlan
	if err := json.Unmarshal([]byte(text), &plan); err != nil {
		return err
	}
	file, err := os.OpenFile(plan.Records, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	records, _, err := questions(file) // until the process ends
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var next atomic.Int64
	var asking sync.WaitGroup
	for range plan.Clients {
		c, err := client.Dial(ctx, plan.Address, client.WithOnError(client.FailClosed),
			client.WithTimeout(2*time.Second))
		if err != nil {
			return err
		}
		defer c.Close()
		if err := c.Ready(ctx); err != nil {
			return err
		}
		limiters := make([]*client.Limiter, len(plan.Policies))
		for i, name := range plan.Policies {
			limiters[i] = c.Policy(name)
		}
		const askers = 4
		for range askers {
			asking.Go(func() {
				const pause = 2 * time.Millisecond
				tick := time.NewTicker(pause)
				defer tick.Stop()
				each := float64(plan.Rate) / askers * pause.Seconds()
				for due := rand.Float64(); ; due += each {
					select {
					case <-tick.C:
					case <-ctx.Done():
						return
					}
					for ; due >= 1; due-- {
						at := next.Add(1) - 1
						if at >= maxQuestions {
							return
						}
						plan.ask(ctx, limiters, &records[at])
					}
				}
			})
		}
	}
	fmt.Println("ready")
	_, err = io.Copy(io.Discard, os.Stdin)
	cancel()
	asking.Wait()
	return err
}

// ask asks one question and records it.
func (plan *borrowerPlan) ask(ctx context.Context, limiters []*client.Limiter, q *question) {
	which, key := rand.IntN(len(limiters)), rand.IntN(plan.Keys)
	if plan.Every > 0 {
		if key = 0; rand.IntN(100) >= plan.Newest {
			key = rand.IntN(plan.Keys)
		}
		key = max(int((monotonic()-plan.Origin)/plan.Every)-key, 0)
	}
	q.Policy, q.Key = uint16(which), uint16(key)
	atomic.StoreInt64(&q.Sent, monotonic())
	d, err := limiters[which].Allow(ctx, keyNamed(key))
	switch {
	case err != nil || d.FailedClosed || d.FailedOpen:
		q.Result = uint8(checker.Failed)
	case d.Allowed:
		q.Result = uint8(checker.Admitted)
	default:
		q.Result = uint8(checker.Refused)
	}
	q.Degraded = d.Degraded
	atomic.StoreInt64(&q.Answered, monotonic())
}

// borrower is a borrower's process as the test sees it.
type borrower struct {
	*process
	plan    borrowerPlan
	records []question
}

// startBorrower starts one and waits until its clients are ready.
func startBorrower(t *testing.T, wrapper []string, plan borrowerPlan) *borrower {
	t.Helper()
	plan.Records = filepath.Join(t.TempDir(), "records")
	file := must.Value(os.Create(plan.Records))(t)
	defer file.Close()
	must.NoError(t, file.Truncate(int64(maxQuestions*questionSize)))
	records, unmap, err := questions(file)
	must.NoError(t, err)
	t.Cleanup(unmap)
	text := string(must.Value(json.Marshal(plan))(t))
	p := launchWith(t, wrapper, must.Value(os.Executable())(t), borrowerCommand, text)
	p.eventually(startTimeout, "a borrower is ready",
		func() bool { return strings.Contains(p.stdout.String(), "ready") })
	return &borrower{p, plan, records}
}

// end ends it in good order.
func (b *borrower) end() {
	b.t.Helper()
	b.stdin.Close()
	expect.Equal(b.t, b.exit(stopTimeout), 0, "a borrower's exit status")
}

// operations are what it has been answered, on the clock of origin. What it was not answered it has not admitted.
func (b *borrower) operations(origin int64) (all []checker.Operation) {
	for i := range b.records {
		q := &b.records[i]
		if atomic.LoadInt64(&q.Answered) == 0 {
			continue
		}
		all = append(all, checker.Operation{
			Policy: b.plan.Policies[q.Policy], Key: keyNamed(int(q.Key)), Cost: 1, Sent: q.Sent - origin,
			Answered: q.Answered - origin,
			Result:   checker.Result(q.Result), Degraded: q.Degraded,
		})
	}
	return all
}
