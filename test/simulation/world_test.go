package simulation

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/test/checker"
)

const (
	millisecond = int64(time.Millisecond)
	second      = int64(time.Second)
	never       = int64(1) << 62
)

// wallError is the largest error of a host's wall clock.
const wallError = 200 * time.Millisecond

// settings are what a run is made of, besides what happens in it.
type settings struct {
	seed       uint64
	hosts      int
	partitions int
	voters     int
	tick       int64
	policies   []*policy

	delay    int64   // the shortest way of a message
	jitter   int64   // and how much longer it may take
	tail     float64 // the share of messages that are much later
	late     int64   // by up to so much
	loss     float64
	repeat   float64
	detect   [2]int64 // how long it takes to see that a node is gone, from and to
	discover [2]int64 // and that it is there
	settle   int64    // how long a view has not changed when it is taken to be settled
	oneSided bool     // a node is seen as long as it is heard, whether or not it hears
	internal int64    // how long a process may take between deciding and sending the answer
	rates    int64    // the largest error of a clock's rate, in parts per billion
	spread   int64    // by how much clocks differ
	flush    time.Duration
	lonely   int64 // how long a node whose seeds are silent waits before it goes on alone
	leaveFor int64 // how long SIGTERM waits
	chunk    int   // bytes of a chunk at most; 0: as many as the protocol allows
	disks    bool  // hosts have disks (disk_test.go)
}

func calm(seed uint64) settings {
	return settings{
		seed: seed, hosts: 3, partitions: 4, tick: 10 * millisecond,
		delay: millisecond, detect: [2]int64{2 * second, 2 * second},
		discover: [2]int64{100 * millisecond, 100 * millisecond},
		late:     300 * millisecond, settle: 500 * millisecond, lonely: 5 * second, leaveFor: 10 * second,
	}
}

// event is something that is to happen at an instant of true time.
type event struct {
	at  int64
	seq uint64
	do  func()
}

// world is everything there is in a run.
type world struct {
	settings
	rng    *rand.Rand
	now    int64 // true time, which no node can read
	events []event
	seq    uint64

	hosts  []*host
	links  [][]link // by host index, from and to
	traps  []*trap
	boots  uint64
	ops    []*op
	splits int // index+1 of the first split that is not over

	lending *lending // nil: nothing is lent

	disturbed bool // a fault is going on
	proto     checker.Protocol
	history   checker.History
	seen      int // violations of proto that have been said
	sent      volume

	hash    uint64
	verbose bool
	lines   []string
}

// host is a machine: a name, clocks, and the process that runs on it.
type host struct {
	w      *world
	index  int
	name   string
	offset int64 // of the boot clock
	rate   int64 // its error in parts per billion
	asleep int64 // how long it has been suspended, on its own clock
	skew   int64 // the error of its wall clock
	lag    int64 // how much later than others it hears of who is there
	drive  drive
	kept   []kept // by partition, when its process stopped
	left   bool   // its last process has said goodbye
	proc   *process
}

// link is the way from one host to another.
type link struct {
	cut   bool
	extra int64 // by how much it takes longer
}

func newWorld(s settings) *world {
	w := &world{settings: s, rng: rand.New(rand.NewPCG(s.seed, s.seed^0x5eed)), hash: 14695981039346656037}
	w.history.Drift, w.history.Skew = 1000, wallError
	w.history.Flush = 100 * time.Millisecond
	w.history.Late = 300 * time.Millisecond
	w.history.Claim = 8 * time.Second
	for _, p := range s.policies {
		w.history.Policies = append(w.history.Policies, p.Policy)
	}
	for i := range s.hosts {
		w.addHost(i)
	}
	w.after(0, w.memory)
	return w
}

func (w *world) addHost(i int) *host {
	h := &host{w: w, index: i, name: string(rune('a' + i))}
	if w.spread > 0 {
		h.offset = w.rng.Int64N(w.spread)
	}
	if w.rates > 0 {
		h.rate = w.rng.Int64N(2*w.rates+1) - w.rates
		if w.chance(0.3) {
			h.rate = w.rates // the ends are where it hurts
		} else if w.chance(0.3) {
			h.rate = -w.rates
		}
	}
	w.hosts = append(w.hosts, h)
	for a := range w.links {
		w.links[a] = append(w.links[a], link{})
	}
	w.links = append(w.links, make([]link, len(w.hosts)))
	return h
}

func (w *world) chance(p float64) bool { return p > 0 && w.rng.Float64() < p }

func (w *world) between(r [2]int64) int64 {
	if r[1] <= r[0] {
		return r[0]
	}
	return r[0] + w.rng.Int64N(r[1]-r[0])
}

// at has something done at an instant of true time.
func (w *world) at(t int64, do func()) {
	w.seq++
	e := event{max(t, w.now), w.seq, do}
	w.events = append(w.events, e)
	for i := len(w.events) - 1; i > 0; {
		up := (i - 1) / 2
		if !w.events[i].before(&w.events[up]) {
			break
		}
		w.events[i], w.events[up] = w.events[up], w.events[i]
		i = up
	}
}

func (e *event) before(f *event) bool { return e.at < f.at || e.at == f.at && e.seq < f.seq }

func (w *world) after(d int64, do func()) { w.at(w.now+d, do) }

// step lets the next event happen.
func (w *world) step() {
	e := w.events[0]
	last := len(w.events) - 1
	w.events[0] = w.events[last]
	w.events[last] = event{}
	w.events = w.events[:last]
	for i := 0; ; {
		down := 2*i + 1
		if down >= last {
			break
		}
		if down+1 < last && w.events[down+1].before(&w.events[down]) {
			down++
		}
		if !w.events[down].before(&w.events[i]) {
			break
		}
		w.events[i], w.events[down] = w.events[down], w.events[i]
		i = down
	}
	w.now = e.at
	e.do()
	for ; w.seen < len(w.proto.Violations); w.seen++ {
		w.say("VIOLATION: %v", w.proto.Violations[w.seen])
	}
}

// run lets everything happen until an instant.
func (w *world) run(until int64) {
	for len(w.events) > 0 && w.events[0].at <= until {
		w.step()
	}
	w.now = until
}

// until lets everything happen until a condition holds, which is looked at every so often, or the time is over.
func (w *world) until(limit int64, cond func() bool) bool {
	for end := w.now + limit; !cond(); {
		if w.now >= end {
			return false
		}
		w.run(w.now + 20*millisecond)
	}
	return true
}

// mix makes what happens part of the run's fingerprint.
func (w *world) mix(values ...uint64) {
	for _, v := range values {
		w.hash = (w.hash ^ v) * 1099511628211
		w.hash ^= w.hash >> 29
	}
}

// say puts a line into the trace, and trace one that is only worth reading when something is wrong.
func (w *world) say(format string, args ...any) {
	w.lines = append(w.lines, fmt.Sprintf("%8.3f ", float64(w.now)/1e9)+fmt.Sprintf(format, args...))
}

func (w *world) trace(format string, args ...any) {
	if w.verbose {
		w.say("    "+format, args...)
	}
}

// violations are all that have been found up to now.
func (w *world) violations() []checker.Violation {
	w.record()
	return append(slices.Clone(w.proto.Violations), checker.Check(&w.history).Violations...)
}

// clock reads a host's clocks.
func (h *host) clock() ownership.Now {
	boot := h.offset + h.elapsed()
	var now ownership.Now
	now.Boot = boot
	now.Mono = boot - h.asleep + int64(h.index+1)*int64(7*time.Hour)
	now.Wall = h.w.now + h.skew
	return now
}

// elapsed is how far the host's clock says the run has come.
func (h *host) elapsed() int64 {
	q, r := h.w.now/second, h.w.now%second
	return h.w.now + q*h.rate + r*h.rate/second
}

// truth is the instant of true time at which the boot clock reads t.
func (h *host) truth(t int64) int64 {
	local := t - h.offset
	x := local - int64(float64(local)*float64(h.rate)/(1e9+float64(h.rate)))
	return x
}

// link looks up the way between two hosts.
func (w *world) link(from, to *host) *link { return &w.links[from.index][to.index] }

// trap takes messages out of the network, for scenarios.
type trap struct {
	kind     string
	from, to string // any when empty
	left     int
	said     bool
	crash    string       // a node that crashes at that moment
	hold     func() int64 // not lost, but held until that instant of true time
}

func (t *trap) catches(from, to *host, kind string) bool {
	return t.left > 0 && strings.EqualFold(t.kind, kind) && (t.from == "" || t.from == from.name) &&
		(t.to == "" || t.to == to.name)
}

// transmit has something arrive at another host, or not.
func (w *world) transmit(from, to *host, kind string, ordered bool, arrive func()) {
	least := int64(0)
	for _, t := range w.traps {
		if t.catches(from, to, kind) {
			if t.hold != nil {
				least = t.hold() - w.now
				continue
			}
			t.left--
			if !t.said {
				w.say("a %s from %s to %s is lost", kind, from.name, to.name)
			}
			t.said = t.left > 10 // it is enough to say so once
			if p := w.host(t.crash); p != nil && p.proc != nil {
				w.say("%s crashes", t.crash)
				p.proc.crash()
			}
			return
		}
	}
	copies := 1
	if w.chance(w.loss) {
		w.trace("lost: %s %s>%s", kind, from.name, to.name)
		copies = 0
	} else if !ordered && w.chance(w.repeat) {
		copies = 2
	}
	for range copies {
		d := w.delay + w.link(from, to).extra
		if w.jitter > 0 {
			d += w.rng.Int64N(w.jitter)
		}
		if w.chance(w.tail) {
			d += w.rng.Int64N(w.late)
		}
		w.after(max(d, least), func() {
			if w.link(from, to).cut {
				return
			}
			arrive()
		})
	}
}

// cut takes a way out of the network, or puts it back.
func (w *world) cut(from, to *host, cut bool) { w.link(from, to).cut = cut }

func (w *world) host(name string) *host {
	for _, h := range w.hosts {
		if h.name == name {
			return h
		}
	}
	return nil
}

// running are the processes that have not ended.
func (w *world) running() []*process {
	var all []*process
	for _, h := range w.hosts {
		if h.proc != nil {
			all = append(all, h.proc)
		}
	}
	return all
}

// quiet says whether everything is where it should be: all views agree, every partition is held by its target, has a
// current copy where there is a node for it, and a grant where there are voters, who know of the copy.
func (w *world) quiet() bool {
	all := w.running()
	for _, p := range all {
		if p.paused || !p.settled || len(p.view.Members) != len(all) || p.state != active || !p.core.Settled() {
			return false
		}
	}
	for part := range w.partitions {
		found := false
		for _, p := range all {
			if p.owns(part) {
				if found || w.target(part) != p {
					return false
				}
				d := &p.data.parts[part]
				// A copy that is of an earlier term than its holder's is not believed to be current.
				found = len(all) == 1 || d.caught && p.labels[part] == p.held[part]
				if w.voters > 0 {
					// With each renewal, once in a second, the voters hear who has the copy.
					found = found && d.lease > p.clock().Boot && (len(all) == 1 || w.now-d.caughtAt > 1500*millisecond)
				}
			}
		}
		if !found {
			return false
		}
	}
	return true
}

// target is who should hold a partition in the end.
func (w *world) target(part int) *process {
	var best *process
	for _, p := range w.running() {
		if p.state == active && (best == nil || weight(p.self.Name, part) > weight(best.self.Name, part)) {
			best = p
		}
	}
	return best
}

// whole says that no fault is going on, everything is where it should be, and more than one process runs, so that a
// crash now costs what the policies say.
func (w *world) whole() bool {
	return !w.disturbed && w.splits == len(w.history.Splits) && len(w.running()) > 1 && w.quiet() && w.recorded()
}

// recorded says that the voters have heard who has the copies. The first grant under a term names nobody, because it
// tells the holder whether its content is whole; the next request, at once, does.
func (w *world) recorded() bool {
	for _, p := range w.running() {
		for part := range w.partitions {
			if w.voters > 0 && p.owns(part) && w.now-p.data.parts[part].leasedAt <= 500*millisecond {
				return false
			}
		}
	}
	return true
}

// memory looks, every so often, whether a majority of the voters has been up for long enough to know what was granted.
func (w *world) memory() {
	if w.voters > 0 {
		w.memorize()
		w.after(100*millisecond, w.memory)
	}
}

func (w *world) memorize() {
	if w.voters == 0 {
		return
	}
	knowing := 0
	for _, h := range w.hosts[:w.voters] {
		if p := h.proc; p != nil && !p.paused && w.now-p.begun > 5*second && p.core.Status(h.clock()).Voting {
			knowing++
		}
	}
	all := w.history.QuorumLosses
	switch open := len(all) > 0 && all[len(all)-1].To == never; {
	case knowing <= w.voters/2 && !open:
		w.history.QuorumLosses = append(all, checker.QuorumLoss{From: w.now, To: never})
	case knowing > w.voters/2 && open:
		all[len(all)-1].To = w.now
	}
}

// calmed notes that what was split has merged.
func (w *world) calmed() {
	for ; w.splits < len(w.history.Splits); w.splits++ {
		w.history.Splits[w.splits].To = w.now
	}
}

// split notes that nodes may take each other for gone from now on, until calmed.
func (w *world) split(sides int) {
	w.history.Splits = append(w.history.Splits, checker.Split{From: w.now, To: never, Sides: sides})
}
