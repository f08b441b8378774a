package simulation

import (
	"cmp"
	"flag"
	"fmt"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/checker"
	"github.com/weirlimit/weir/test/must"
)

var (
	oneSeed = flag.Int64("seed", -1, "run this seed only; with -v its whole trace is shown")
	only    = flag.String("weather", "",
		"run seeds of these kinds of weather only, such as moving,crashing; of TestCallSeeds, of trouble, such as losing,dying")
	firstOf  = flag.Uint64("first", 0, "the first seed to run")
	budget   = flag.Duration("for", 0, "run seeds for so long, in place of a number of them")
	once     = flag.Bool("once", false, "run each seed once only, and show of none that it repeats itself")
	allSeeds = flag.Int("seeds", 240,
		"how many seeds to run, a third of them of loans and of stops; a tenth of them under the race detector")
	callSeeds = flag.Int("calls", 5, "how many seeds of TestCallSeeds to run; a tenth of them under the race detector")
	twice     = flag.Bool("twice", false, "run each seed of TestCallSeeds twice, and tell how many repeat themselves")
	most      = flag.Int("most", 10, "how many seeds may fail before the rest is left out")
)

// weather is the kind of thing that goes wrong in a run.
type weather uint8

const (
	fair     weather = iota // nothing
	moving                  // nodes join and leave
	crashing                // one node at a time, with the copies made again in between
	cutting                 // the network falls into two parts
	oneWay                  // one part does not hear the other
	pausing                 // nodes stand still, for longer than a lease or not
	doubting                // a node is taken to be gone that is not
	voting                  // voters restart
	stormy                  // all of it at once
	weathers
)

func (x weather) String() string {
	return [...]string{"fair", "moving", "crashing", "cutting", "oneWay", "pausing", "doubting", "voting", "stormy"}[x]
}

// run is a seed's run.
type run struct {
	*world
	weather weather
	climate climate
	until   int64 // when faults and traffic end
	over    bool  // faults are
	took    int64 // the longest that it took until everything was where it should be
}

// newRun draws from a seed what a run is like. Half of those of each weather lend, half of these to borrowers in haste.
func newRun(seed uint64, verbose bool) *run {
	r := drawRun(seed, verbose)
	switch seed / uint64(weathers) % 4 {
	case 0:
		r.lend(20 * millisecond)
	case 2:
		r.lend(100 * millisecond)
	}
	return r
}

// drawRun draws all but who borrows.
func drawRun(seed uint64, verbose bool) *run {
	rng := rand.New(rand.NewPCG(seed, 1))
	s := calm(seed)
	r := &run{weather: weather(seed % uint64(weathers))}
	s.hosts = 1 + rng.IntN(5)
	if rng.IntN(8) == 0 {
		s.hosts = 6 + rng.IntN(4)
	}
	if r.weather >= moving {
		s.hosts = max(s.hosts, 2)
	}
	s.partitions = 3 + rng.IntN(9)
	s.voters = []int{0, 1, 3, 3, 5}[rng.IntN(5)]
	if r.weather == voting {
		s.voters = []int{1, 3, 5}[rng.IntN(3)]
		s.hosts = max(s.hosts, s.voters)
	}
	for s.voters > s.hosts {
		s.voters = max(s.voters-2, 0)
	}
	s.tick = []int64{5, 10, 10, 20}[rng.IntN(4)] * millisecond
	s.delay = rng.Int64N(millisecond)
	s.jitter = []int64{0, millisecond, 5 * millisecond, 20 * millisecond}[rng.IntN(4)]
	s.internal = 200_000
	s.detect = [2]int64{second, 3 * second}
	s.discover = [2]int64{50 * millisecond, 500 * millisecond}
	s.settle = 300*millisecond + rng.Int64N(second)
	r.climate = temperate()
	harsh := r.weather != fair && rng.IntN(2) == 0
	if harsh {
		r.climate = drawClimate(rng, r.weather)
		drawNetwork(rng, &s)
	}
	if r.weather <= crashing || r.weather == voting || r.weather == stormy && !r.climate.parts() {
		// Nobody holds what another one holds as long as a view only settles once everybody has been seen.
		s.settle = max(s.settle, s.discover[1]+100*millisecond)
	}
	s.oneSided = rng.IntN(3) == 0
	s.spread = 100 * int64(time.Hour)
	s.rates = []int64{0, 1_000_000, 1_000_000}[rng.IntN(3)]
	if !harsh && (rng.IntN(3) == 0 || r.weather == stormy) {
		s.tail = 0.02
		s.loss = []float64{0, 0.01, 0.05, 0.1}[rng.IntN(4)]
		s.repeat = []float64{0, 0.02, 0.1}[rng.IntN(3)]
	}
	s.policies = drawPolicies(rng, s.partitions, s.voters > 0)
	if !harsh && rng.IntN(3) > 0 { // a slow network has no time for so many
		s.chunk = 1 << (7 + rng.IntN(5)) // so few changes fill a chunk, as with long keys many do
	}
	r.world = newWorld(s)
	r.verbose = verbose
	r.proto.Sole = r.weather <= crashing
	if s.loss > 0 || s.tail > 0 {
		r.history.Late = 5 * time.Second
	}
	if harsh {
		r.history.Late = 10 * time.Second
		r.history.Claim += time.Duration(s.detect[1] + s.settle + 20*(s.delay+s.jitter))
	}
	for _, h := range r.hosts {
		h.lag = rng.Int64N(r.climate.lag + 1)
		h.skew = rng.Int64N(2*int64(wallError)) - int64(wallError)
	}
	return r
}

func drawPolicies(rng *rand.Rand, partitions int, strict bool) []*policy {
	algorithms := []algo.Algorithm{
		algo.SlidingLog, algo.SlidingLog, algo.SlidingLog, algo.TokenBucket, algo.FixedWindow, algo.SlidingWindow,
		algo.SlidingCounter, algo.LeakyBucket, algo.Concurrency,
	}
	var all []*policy
	wide := false
	add := func(a algo.Algorithm, d checker.Durability, strict, closed bool) {
		if a == algo.Concurrency && d == checker.Escrow {
			a = algo.SlidingLog // nobody could release what is charged for an escrow
		}
		limit := algo.Limit{Algorithm: a, Limit: 2 + rng.Int64N(12),
			Window: time.Duration(1000+rng.Int64N(5000)) * time.Millisecond}
		if wide {
			// What is in use adds up to less than the limit, so that whatever is forgotten of it shows.
			limit.Limit, limit.Window = 100+rng.Int64N(200), time.Duration(20+rng.Int64N(40))*time.Second
			if kinds[a] == checker.Bucket {
				limit.Window *= 5 // or it would be full at most times
			}
		}
		all = append(all, newPolicy(fmt.Sprintf("p%d", len(all)), limit, d, strict, closed, 1+rng.IntN(2), partitions))
	}
	for d := checker.None; d <= checker.Sync; d++ {
		add(algo.SlidingLog, d, false, false)
		add(algorithms[rng.IntN(len(algorithms))], d, false, rng.IntN(2) == 0)
		if strict && d >= checker.Escrow {
			add(algo.SlidingLog, d, true, false)
			add(algorithms[rng.IntN(len(algorithms))], d, true, false)
		}
	}
	calendar := algo.Limit{Algorithm: algo.FixedWindow, Period: algo.Epoch, Limit: 2 + rng.Int64N(12),
		Window: time.Duration(1+rng.Int64N(5)) * time.Second}
	d := checker.Durability(rng.IntN(4))
	all = append(all, newPolicy(fmt.Sprintf("p%d", len(all)), calendar, d, strict && d >= checker.Escrow, false, 2,
		partitions))
	wide = true
	for _, d := range []checker.Durability{checker.Sync, checker.Sync, checker.Escrow} {
		add(algorithms[rng.IntN(len(algorithms))], d, false, false)
	}
	return all
}

// kinds says what the algorithms promise, as the checker knows it. What a leaky bucket lets into its queue is what a
// token bucket admits.
var kinds = map[algo.Algorithm]checker.Kind{
	algo.SlidingLog: checker.Window, algo.SlidingWindow: checker.Window, algo.Concurrency: checker.Leases,
	algo.FixedWindow: checker.Fixed, algo.SlidingCounter: checker.Fixed,
	algo.TokenBucket: checker.Bucket, algo.LeakyBucket: checker.Bucket,
}

func newPolicy(name string, limit algo.Limit, d checker.Durability, strict, closed bool, keys, partitions int) *policy {
	p := &policy{}
	p.Policy = checker.Policy{
		Name: name, Kind: kinds[limit.Algorithm], Limit: limit.Limit, Capacity: limit.Limit, Window: limit.Window,
		Durability: d, Strict: strict, ColdClosed: closed,
	}
	switch limit.Algorithm {
	case algo.FixedWindow:
		if p.Aligned, p.Opens = limit.Period != 0, limit.Period == 0; p.Aligned {
			p.Coarse = 2 * wallError
		}
	case algo.SlidingWindow:
		p.Coarse = limit.Window / 10
	case algo.SlidingCounter:
		p.Coarse = limit.Window // what the window before counts for is an estimate
	}
	p.rule = &store.Rule{
		Scope: name, Limits: algo.Limits{limit}, Strict: strict, ColdClosed: closed,
		Durability: map[checker.Durability]store.Durability{
			checker.None: store.None, checker.Async: store.Async, checker.Escrow: store.Escrow,
			checker.Sync: store.Sync,
		}[d],
	}
	for i := range keys {
		key := fmt.Sprintf("%s/%d", name, i)
		p.addKey(key, int(hash(key)%uint64(partitions)))
	}
	return p
}

func (p *policy) addKey(key string, partition int) {
	p.keys = append(p.keys, store.Key{Hash: hash(key), Partition: partition, Key: key})
}

func hash(key string) uint64 {
	h := uint64(14695981039346656037)
	for _, c := range []byte(key) {
		h = (h ^ uint64(c)) * 1099511628211
	}
	h ^= h >> 32
	h *= 0x9e3779b97f4a7c15
	return h ^ h>>29
}

// life is the whole run.
func (r *run) life() {
	w := r.world
	w.say("seed %d, %v%v: %d nodes, %d partitions, %d voters, delay %v+%v, loss %v, repeated %v, tick %v, one-sided %v",
		w.seed, r.weather, r.climate,
		len(w.hosts), w.partitions, w.voters, time.Duration(w.delay), time.Duration(w.jitter), w.loss, w.repeat,
		time.Duration(w.tick), w.oneSided)
	for _, p := range w.policies {
		w.trace("%s: %v %d in %v, durability %d, strict %v, cold start closed %v", p.Name, p.rule.Limits[0].Algorithm,
			p.Limit, p.Window,
			p.Durability, p.Strict, p.ColdClosed)
	}
	spare := 0
	if r.weather == moving && len(w.hosts) > 2 && w.voters < len(w.hosts) {
		spare = 1 + w.rng.IntN(len(w.hosts)-max(w.voters, 2)+1)
		spare = min(spare, len(w.hosts)-max(w.voters, 1))
	}
	for _, h := range w.hosts[:len(w.hosts)-spare] {
		w.after(w.rng.Int64N(second), func() { w.start(h) })
	}
	loss, tail := w.loss, w.tail
	if r.climate.harsh {
		w.loss, w.tail = 0, 0 // with half of all messages lost a copy is given up again and again
	}
	early := r.early()
	if early {
		w.split(len(w.hosts))
	}
	w.run(second)
	r.converge("at the start")
	w.loss, w.tail = loss, tail
	if !early || r.weather != stormy {
		w.calmed()
	}
	r.until = w.now + 5*second + w.rng.Int64N(r.climate.lasts)
	w.after(0, r.traffic)
	w.after(w.rng.Int64N(second), r.fault)
	w.run(r.until)
	for _, h := range w.hosts {
		for _, g := range w.hosts {
			w.cut(h, g, false)
		}
		if p := h.proc; p != nil {
			for _, s := range p.sights {
				s.doubted = 0
			}
		}
	}
	r.over = true
	w.until(w.leaveFor+second, func() bool {
		return !slices.ContainsFunc(w.running(), func(p *process) bool { return p.state == leaving })
	})
	for _, h := range w.hosts[:w.voters] {
		w.after(w.rng.Int64N(second), func() { r.open(h) }) // without a majority of them there are no grants
	}
	if len(w.running()) == 0 {
		r.open(w.hosts[0]) // the last one crashed a moment ago: there has to be somebody for anything to be settled
	}
	w.loss, w.repeat, w.tail = 0, 0, 0
	w.say("faults are over")
	w.run(w.now + second)
	// Pauses that began before the end may last longer than all the rest takes, also those of voters that leave.
	w.until(r.climate.halt[1], func() bool {
		return !slices.ContainsFunc(w.running(), func(p *process) bool { return p.paused || p.state == leaving })
	})
	for _, h := range w.hosts[:w.voters] {
		r.open(h)
	}
	r.converge("after the faults")
	w.disturbed = false
	w.calmed()
	w.run(w.now + second)
	if w.voters > 0 {
		w.run(w.now + 3*second) // grants that are there may end: voters that started a moment ago abstain
	}
	r.probe()
	r.until = w.now + 2*second
	w.after(0, r.traffic)
	if l := w.lending; l != nil {
		for _, d := range l.debtors {
			w.after(0, d.live)
		}
		w.run(r.until + int64(algo.LoanTerm) + 200*millisecond)
		l.returned()
	}
	w.run(r.until + 2*second)
	w.record()
}

// early says whether views may settle before they have everybody: nodes that start then take others to be gone that are
// not.
func (r *run) early() bool {
	return r.settle <= r.discover[1] || r.weather > crashing && r.settle <= r.discover[1]+r.climate.lag+100*millisecond
}

// settling is how long it may take, once nothing goes wrong and nobody stands still any more, until every partition is
// held by its target: until the dead are seen to be, views settle, leases run out, voters have abstained and what there
// is has been moved.
//
// The longest is after a split with all voters restarted: they abstain for 3 s and the last of five begins an epoch 2 s
// later; views settle meanwhile. A side that got no grant is given away two leases of 3 s after it has got its term in
// that epoch, as it could not tell whether it is whole. The backup that was a holder until then, and said so a moment
// before, is tried again after 1 s, and the voters have to hear of it: 1.5 s, see quiet. The rest of the 15 s is for
// ticks, looks and repeats.
func (r *run) settling() int64 {
	d := 15 * second
	if r.climate.harsh { // all of that takes as long as it was drawn to
		d += 2*(r.detect[1]+r.discover[1]+r.settle+r.climate.lag) + 100*(r.delay+r.jitter) + 50*r.tick
	}
	return d
}

// converge waits for that.
func (r *run) converge(when string) {
	w := r.world
	begun := w.now
	if w.until(r.settling(), w.quiet) {
		r.took = max(r.took, w.now-begun)
		w.say("all is settled %s, after %v", when, time.Duration(w.now-begun).Round(time.Millisecond))
		return
	}
	w.say("all is not settled %s", when)
	for part := range w.partitions {
		var holders []checker.Holder
		for _, p := range w.running() {
			if p.owns(part) {
				holders = append(holders, p.holder())
			}
		}
		if t := w.target(part); t != nil {
			w.proto.Placed(w.now, part, t.holder(), holders...)
		}
	}
	for _, p := range w.running() {
		w.say("%s/%d: state %d, paused %v, view settled %v, core settled %v, %d members", p.self.Name, p.self.Boot,
			p.state, p.paused, p.settled, p.core.Settled(), len(p.view.Members))
		for part := range w.partitions {
			w.say("  %d: %+v, copy at its backup: %v", part, p.core.Route(part), p.data.parts[part].caught)
		}
	}
	if w.seen == len(w.proto.Violations) {
		w.proto.Violations = append(w.proto.Violations,
			checker.Violation{Rule: checker.Misplaced, Text: "not settled " + when})
	}
}

// traffic sends checks until the time is over.
func (r *run) traffic() {
	w := r.world
	if w.now >= r.until {
		return
	}
	if all := w.running(); len(all) > 0 {
		pol := w.policies[w.rng.IntN(len(w.policies))]
		if n := len(pol.keys); n < 6 && w.chance(0.02) {
			name := fmt.Sprintf("%s/%d", pol.Name, n) // that nobody has asked about
			pol.addKey(name, int(hash(name)%uint64(w.partitions)))
		}
		key := &pol.keys[w.rng.IntN(len(pol.keys))]
		cost := int64(1)
		if w.chance(0.1) {
			cost += w.rng.Int64N(3)
		}
		o := &op{policy: pol, key: key, cost: cost}
		p := all[w.rng.IntN(len(all))]
		switch {
		case w.chance(0.05):
			r.together(p)
		case w.chance(0.1):
			r.identified(p, o)
		case w.chance(0.02):
			for range 10 { // so that not all of it is in one chunk
				r.identified(p, &op{policy: pol, key: key, cost: 1})
			}
		default:
			r.begin(p, o)
		}
	}
	w.after(w.rng.Int64N(r.climate.between), r.traffic)
}

// identified sends a check under a request id, and repeats it later.
func (r *run) identified(p *process, o *op) {
	w := r.world
	o.request = strconv.FormatUint(w.rng.Uint64(), 36)
	w.ask(p, o)
	w.after(w.rng.Int64N(2*second), func() { r.again(o) })
}

// again repeats a check that was admitted, or was not answered in time, under its request id: it is not charged twice.
// That the id of an answered check is known is promised as long as nothing is lost, and under escrow and sync after a
// crash.
func (r *run) again(o *op) {
	w := r.world
	p := r.any()
	if p == nil || !o.over || o.result == checker.Refused {
		return
	}
	w.resend(p, o, func(q *op) {
		forgotten := q.result == checker.Refused || q.fresh ||
			q.result == checker.Failed && r.weather == fair && !o.policy.Strict
		if o.result == checker.Admitted && forgotten && r.kept(o) {
			r.lost("a request id forgotten", q, fmt.Sprintf("charged again %v, %s", q.fresh, q.why))
		}
		if q.result == checker.Failed && w.now < r.until {
			w.after(w.rng.Int64N(second), func() { r.again(o) })
		}
	})
}

// probe looks how much room every key has, where its holder is.
func (r *run) probe() {
	w := r.world
	for _, pol := range w.policies {
		for i := range pol.keys {
			key := &pol.keys[i]
			if p := w.target(key.Partition); p != nil {
				w.submit(p, pol, key, 0, func(o *op) {
					if o.result != checker.Failed {
						w.history.Usages = append(w.history.Usages, checker.Usage{
							Policy: pol.Name, Key: key.Key, At: o.at, Remaining: o.remaining,
						})
					} else if pol.Strict {
						w.proto.Violations = append(w.proto.Violations,
							checker.Violation{Rule: "never answered again", Text: o.key.Key + ": " + o.why})
					}
				})
			}
		}
	}
}

// fault lets something go wrong, and then the next thing.
func (r *run) fault() {
	w := r.world
	if w.now >= r.until || r.over || r.weather == fair {
		return
	}
	kind := r.weather
	if kind == stormy {
		kind = r.climate.kinds[w.rng.IntN(len(r.climate.kinds))]
	}
	pause := w.between(r.climate.pause)
	switch kind {
	case moving:
		r.move()
	case crashing:
		if r.weather == crashing && !w.quiet() {
			pause = 50 * millisecond
			break
		}
		r.crash()
	case cutting, oneWay:
		r.cutNetwork(kind == oneWay)
	case pausing:
		r.pauseOne()
	case doubting:
		r.doubt()
	case voting:
		r.restartVoters()
	}
	w.after(pause, r.fault)
}

func (r *run) any() *process {
	all := r.running()
	if len(all) == 0 {
		return nil
	}
	return all[r.rng.IntN(len(all))]
}

// sides is into how many groups the nodes may have fallen.
func (r *run) sides() int {
	if r.weather == stormy || r.weather == voting {
		return len(r.hosts)
	}
	return 2
}

func (r *run) move() {
	w := r.world
	h := w.hosts[w.rng.IntN(len(w.hosts))]
	switch p := h.proc; {
	case p == nil:
		w.say("%s joins", h.name)
		w.start(h)
	case p.state == active && !p.paused &&
		slices.ContainsFunc(w.running(), func(q *process) bool { return q != p && q.state == active }):
		w.say("%s is to leave", h.name)
		p.leave()
		if w.chance(0.5) {
			w.after(w.between(r.climate.absent), func() { r.join(h) })
		}
	}
}

func (r *run) join(h *host) {
	if !r.over {
		r.open(h)
	}
}

func (r *run) open(h *host) {
	if h.proc == nil {
		r.say("%s joins", h.name)
		r.start(h)
		if r.weather == voting && r.early() && r.splits == len(r.history.Splits) {
			r.split(r.sides())
			r.disturbed = true
			r.recover()
		}
	}
}

func (r *run) crash() {
	w := r.world
	p := r.any()
	if p == nil || r.weather == crashing && len(w.running()) < 2 {
		return
	}
	p.crash()
	w.say("%s crashes; copies complete: %v", p.self.Name, w.history.Crashes[len(w.history.Crashes)-1].Copied)
	w.after(w.between(r.climate.down), func() { r.join(p.host) })
}

// cutNetwork cuts hosts into two groups for a while.
func (r *run) cutNetwork(oneWay bool) {
	w := r.world
	if w.splits < len(w.history.Splits) {
		return // one at a time, except in a storm
	}
	side := make([]bool, len(w.hosts))
	var left, right []string
	alone := w.lending.strictHosts()
	for i := range side {
		side[i] = w.chance(0.5)
		if alone != nil {
			side[i] = slices.Contains(alone, w.hosts[i])
		}
		if side[i] {
			left = append(left, w.hosts[i].name)
		} else {
			right = append(right, w.hosts[i].name)
		}
	}
	if len(left) == 0 || len(right) == 0 {
		return
	}
	arrow := "|"
	if oneWay {
		arrow = "is not heard by"
	}
	w.say("cut: %s %s %s", strings.Join(left, ""), arrow, strings.Join(right, ""))
	w.split(r.sides())
	w.disturbed = true
	set := func(cut bool) {
		for i, a := range w.hosts {
			for j, b := range w.hosts {
				if side[i] && !side[j] {
					w.cut(a, b, cut)
					if !oneWay {
						w.cut(b, a, cut)
					}
				}
			}
		}
	}
	set(true)
	w.after(w.between(r.climate.cut), func() {
		w.say("the network is whole")
		set(false)
		r.recover()
	})
}

// recover ends the time of a fault once everything is where it should be.
func (r *run) recover() {
	w := r.world
	if r.weather == stormy {
		return // it all counts as one, until the end
	}
	var wait func()
	wait = func() {
		if w.quiet() {
			w.say("all is settled")
			w.disturbed = false
			w.calmed()
			return
		}
		w.after(50*millisecond, wait)
	}
	wait()
}

func (r *run) pauseOne() {
	w := r.world
	if r.weather == pausing && w.splits < len(w.history.Splits) {
		return
	}
	p := r.any()
	if p == nil || p.paused {
		return
	}
	d := w.between(r.climate.stop)
	if w.chance(0.7) {
		d = w.between(r.climate.halt)
	}
	suspend := w.chance(r.climate.suspend)
	w.say("%s pauses for %v, suspended: %v", p.self.Name, time.Duration(d).Round(time.Millisecond), suspend)
	w.split(r.sides())
	w.disturbed = true
	p.pause(d, suspend)
	w.after(d, r.recover)
}

func (r *run) doubt() {
	w := r.world
	if r.weather == doubting && w.splits < len(w.history.Splits) {
		return
	}
	q := r.any()
	if q == nil || len(w.running()) < 2 {
		return
	}
	until := w.now + w.between(r.climate.doubt)
	var by []string
	for _, p := range w.running() {
		if s := p.sight(q); s != nil && w.chance(r.climate.spread) {
			s.doubted = until
			by = append(by, p.self.Name)
		}
	}
	if len(by) == 0 {
		return
	}
	w.say("%s is taken to be gone by %s", q.self.Name, strings.Join(by, ""))
	w.split(r.sides())
	w.disturbed = true
	w.at(until, r.recover)
}

// restartVoters has voters crash and start again, some or all at once.
func (r *run) restartVoters() {
	w := r.world
	if w.voters == 0 {
		return
	}
	whole := w.chance(r.climate.together)
	for _, h := range w.hosts[:w.voters] {
		if h.proc == nil || !whole && !w.chance(r.climate.each) {
			continue
		}
		h.proc.crash()
		w.say("voter %s crashes", h.name)
		w.after(w.between(r.climate.voterDown), func() { r.join(h) })
	}
}

// play runs a seed.
func play(seed uint64, verbose bool) *run {
	r := newRun(seed, verbose)
	r.life()
	return r
}

// outcome is what a seed that failed has come to.
type outcome struct {
	seed        uint64
	weather     weather
	violations  []checker.Violation
	hash, again uint64 // the two runs' fingerprints
}

// repeats reports whether a seed is run twice, to show that it repeats itself: every fourth of each weather, or the
// only one.
func repeats(seed uint64) bool {
	return !*once && (*oneSeed >= 0 || seed/uint64(weathers)%4 == 0)
}

func TestSeeds(t *testing.T) {
	wanted := func(uint64) bool { return true }
	if *only != "" {
		names := strings.Split(*only, ",")
		for _, name := range names {
			must.True(t, slices.ContainsFunc(allWeather(), func(x weather) bool { return x.String() == name }),
				"-weather: there is no %q", name)
		}
		wanted = func(seed uint64) bool { return slices.Contains(names, weather(seed%uint64(weathers)).String()) }
	}
	from, count := *firstOf, uint64(*allSeeds)
	if raceEnabled {
		count /= 10
	}
	if *oneSeed >= 0 {
		from, count = uint64(*oneSeed), 1
	}
	defer debug.SetGCPercent(debug.SetGCPercent(400)) // a third less time, and a run takes little memory
	begun := time.Now()
	verbose := *oneSeed >= 0 && testing.Verbose()
	var mu sync.Mutex
	var outcomes []outcome
	var failed int
	// more takes the next seed.
	next := from
	more := func() (seed uint64, ok bool) {
		mu.Lock()
		defer mu.Unlock()
		for !wanted(next) && *oneSeed < 0 {
			next++
		}
		next++
		if *budget > 0 && *oneSeed < 0 {
			ok = time.Since(begun) < *budget
		} else {
			ok = next-from <= count
		}
		return next - 1, ok && failed < *most
	}
	var done int
	var slowest, took int64
	var work sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		work.Go(func() {
			for seed, ok := more(); ok; seed, ok = more() {
				r := play(seed, verbose)
				o := outcome{seed: seed, weather: r.weather, violations: r.violations(), hash: r.hash, again: r.hash}
				if repeats(seed) {
					o.again = play(seed, false).hash
				}
				if verbose {
					fmt.Println(strings.Join(r.lines, "\n"))
				}
				mu.Lock()
				done++
				if r.took > took {
					slowest, took = int64(seed), r.took
				}
				if len(o.violations) > 0 || o.again != o.hash {
					failed++
					outcomes = append(outcomes, o)
				}
				mu.Unlock()
			}
		})
	}
	work.Wait()
	slices.SortFunc(outcomes, func(a, b outcome) int { return cmp.Compare(a.seed, b.seed) })
	for _, o := range outcomes {
		if o.again != o.hash {
			t.Errorf("seed %d: two runs of it differ: %x and %x%s", o.seed, o.hash, o.again, replay(t, o.seed))
		}
		if vs := o.violations; len(vs) > 0 {
			text := ""
			for _, v := range vs[:min(len(vs), 8)] {
				text += "\n\t" + v.String()
			}
			t.Errorf("seed %d (%v): %d violations:%s%s", o.seed, o.weather, len(vs), text, replay(t, o.seed))
		}
	}
	t.Logf("%d seeds; the longest until all was settled took %v, in seed %d", done, time.Duration(took), slowest)
}

// replay is the command that runs one seed of a test again, on a line of its own.
func replay(t *testing.T, seed uint64) string {
	return fmt.Sprintf("\n\tgo test ./test/simulation -run '^%s$' -seed %d -v", t.Name(), seed)
}

func allWeather() (all []weather) {
	for x := range weathers {
		all = append(all, x)
	}
	return all
}
