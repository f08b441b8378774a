package simulation

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/rpc/replica"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/checker"
)

// state is what a process says of itself in the gossip.
type state uint8

const (
	joining state = iota
	active
	leaving
)

// process is one start of a node: an ownership.Core over a store, the little of the membership that a Core must be
// told, and, in service_test.go, what hands checks on.
type process struct {
	w     *world
	host  *host
	self  ownership.Node
	core  *ownership.Core
	data  *data
	begun int64

	ended   bool
	paused  bool
	backlog []func() // what happened while it was paused
	// flushing: what the core wants done is being carried out; urged: and it wants more since.
	flushing, urged bool

	state   state
	stateAt int64
	left    bool // it said goodbye
	sights  []*sight
	view    ownership.View
	settled bool
	changed int64 // when the view changed last
	joined  bool

	held   []ownership.Term // by partition; zero when it does not decide
	hidden []bool           // by partition: claimed as new out of its owner's sight, and not granted since
	// granted has, by partition, the processes that this one, as a voter, has granted, or has heard to have a grant.
	granted [][]ownership.Node
	labels  []ownership.Term // by partition: under which the copy elsewhere is known to be
	blocks  []sentBlock      // that are not answered
	waiting [][]waiter
	foreign []*ask   // from other processes, that may not be answered yet
	copied  []uint64 // by partition: the version up to which a copy has confirmed
	parked  [][]*ask
	syncing []int // the array that sync uses

	lender lender
	disk   *hostDisk // nil: it has none
}

// sight is what a process believes of another.
type sight struct {
	of        *process
	alive     bool
	state     state
	reachable bool
	since     int64 // when reachable changed
	delay     int64 // until alive follows
	gossip    int64 // until a state is heard of
	doubted   int64 // not to be heard, although it could be, until then
}

// start starts a process on a host.
func (w *world) start(h *host) *process {
	w.boots++
	p := &process{w: w, host: h, self: ownership.Node{Name: h.name, Boot: w.boots}, begun: w.now, changed: w.now}
	p.held, p.labels = make([]ownership.Term, w.partitions), make([]ownership.Term, w.partitions)
	p.hidden, p.granted = make([]bool, w.partitions), make([][]ownership.Node, w.partitions)
	p.waiting = make([][]waiter, w.partitions)
	p.copied = make([]uint64, w.partitions)
	p.parked = make([][]*ask, w.partitions)
	p.data = newData(p)
	var voters []string
	for i := range w.voters {
		voters = append(voters, w.hosts[i].name)
	}
	cfg := ownership.Config{
		Self: p.self, Partitions: w.partitions, Data: p.data, Voters: voters, Flush: w.flush,
	}
	if w.disks {
		cfg.Restore = p.openDisk()
	}
	p.core = ownership.New(cfg, h.clock())
	h.proc = p
	p.look()
	p.later(w.rng.Int64N(w.tick), p.tick)
	p.later(w.rng.Int64N(50*millisecond), p.poll)
	p.later(int64(h.index+1)*700*millisecond, p.sweep)
	return p
}

// do runs something in the process, now or when it goes on.
func (p *process) do(f func()) {
	switch {
	case p.ended:
	case p.paused:
		p.backlog = append(p.backlog, f)
	default:
		f()
	}
}

// clock reads the host's clocks for the process. A process that is paused must not read them: it does nothing, and
// where its host is suspended, what the clock of decisions would say in the meantime is taken back when it goes on.
func (p *process) clock() ownership.Now {
	if p.paused {
		p.w.proto.Violations = append(p.w.proto.Violations, checker.Violation{
			Rule: "a paused process reads its clock", Text: fmt.Sprintf("%v: %s", time.Duration(p.w.now), p.self.Name),
		})
	}
	return p.host.clock()
}

// later runs something in the process after a while.
func (p *process) later(d int64, f func()) { p.w.after(d, func() { p.do(f) }) }

func (p *process) sweep() {
	p.data.Sweep(p.clock().Instant, 1)
	p.later(5*second, p.sweep)
}

func (p *process) tick() {
	p.core.Tick(p.clock())
	p.flush()
	p.later(p.w.tick, p.tick)
}

// flush carries out what the core wants done. A check that it lets go on may want more of the core: that is carried out
// afterwards, so that messages leave in order, and because effects are valid until the core is asked for the next ones.
func (p *process) flush() {
	if p.flushing {
		p.urged = true
		return
	}
	p.flushing = true
	for again := true; again; {
		p.carryOut(p.core.Take())
		again = p.urged
		p.urged = false
	}
	p.flushing = false
}

func (p *process) carryOut(eff ownership.Effects) {
	w := p.w
	p.sync(eff.Routes)
	for _, n := range eff.Notes {
		p.note(n)
	}
	for _, part := range eff.Routes {
		p.unpark(part)
	}
	for _, c := range eff.Confirmed {
		p.confirmed(c)
	}
	for _, e := range p.carried(eff.Messages) {
		if e.To == ownership.DiskNode() {
			p.disk.send(e.Message.(*ownership.Block))
			continue
		}
		to := w.host(e.To.Name)
		kind := kindOf(e.Message)
		// it may be the answer again
		if a, ok := e.Message.(*ownership.CommitAck); ok && a.Keep && p.labels[a.Partition].Less(a.New) {
			p.labels[a.Partition] = a.New
		}
		if b, ok := e.Message.(*ownership.Block); ok {
			p.blocks = append(p.blocks, sentBlock{e.To, b})
		}
		if g, ok := e.Message.(*ownership.GrantReply); ok {
			for i := range g.Items {
				if g.Items[i].Granted {
					p.remember(g.Items[i].Partition, e.To)
				}
			}
		}
		w.mix(uint64(w.now), uint64(p.host.index), uint64(to.index), uint64(len(kind)))
		if w.verbose {
			w.trace("%s>%s %s", e.From.Name, e.To.Name, describe(e.Message))
		}
		w.transmit(p.host, to, kind, false, func() {
			if q := to.proc; q != nil {
				q.do(func() { q.receive(e) })
			}
		})
	}
}

// carried are messages as they arrive: through the codec, as in a Messenger.
func (p *process) carried(list []ownership.Envelope) []ownership.Envelope {
	w := p.w
	list = slices.Clone(list)
	for i := range list {
		if list[i].To == ownership.DiskNode() {
			continue
		}
		data := replica.Append(nil, list[i].Message)
		w.sent.messages++
		w.sent.bytes += len(data)
		read, err := replica.Read(data, w.partitions)
		if err != nil {
			w.proto.Violations = append(w.proto.Violations, checker.Violation{
				Rule: "a message that its reader refuses",
				Text: fmt.Sprintf("%v: %T: %v", time.Duration(w.now), list[i].Message, err),
			})
			continue
		}
		list[i].Message = read
	}
	return list
}

func (p *process) receive(e ownership.Envelope) {
	if e.To != p.self {
		return // the connection was to another process
	}
	if a, ok := e.Message.(*ownership.BlockAck); ok {
		p.label(e.From, a)
	}
	if r, ok := e.Message.(*ownership.Records); ok {
		for i := range r.Records {
			p.remember(r.Records[i].Partition, r.Records[i].Node)
		}
	}
	p.core.Receive(p.clock(), e)
	p.flush()
}

// sentBlock is a Block on its way to a process.
type sentBlock struct {
	to ownership.Node
	*ownership.Block
}

// label notes the terms of what another process has taken in.
func (p *process) label(from ownership.Node, a *ownership.BlockAck) {
	p.blocks = slices.DeleteFunc(p.blocks, func(b sentBlock) bool {
		if b.to != from || b.Log > a.Log || b.Log == a.Log && b.Position > a.Position {
			return false
		}
		for _, e := range b.Entries {
			refused := slices.ContainsFunc(a.Refusals, func(r ownership.Refusal) bool {
				return r.Partition == e.Partition && r.Attachment == e.Attachment
			})
			if b.Log == a.Log && !refused && !e.More && p.labels[e.Partition].Less(e.Term) {
				p.labels[e.Partition] = e.Term
			}
		}
		return true
	})
}

// sync tells the checker's Protocol what has changed in partitions, and of leases.
func (p *process) sync(parts []int) {
	w := p.w
	me := p.holder()
	parts = append(p.syncing[:0], parts...)
	parts = append(parts, p.data.leased...)
	slices.Sort(parts)
	parts = slices.Compact(parts)
	p.syncing, p.data.leased = parts, p.data.leased[:0]
	for _, part := range parts {
		r := p.core.Route(part)
		if r.Standing != ownership.Owned {
			r.Term = ownership.Term{}
			p.hidden[part] = false
			if p.held[part] != (ownership.Term{}) {
				w.proto.Yield(part, me)
			}
		} else if p.held[part] != r.Term {
			w.proto.Hold(w.now, part, me, checker.Term(r.Term))
		}
		if p.held[part] != r.Term {
			w.mix(uint64(w.now), uint64(p.host.index), uint64(part), r.Term.Epoch, r.Term.N)
			p.held[part] = r.Term
		}
		if d := &p.data.parts[part]; d.leaseChanged && r.Standing == ownership.Owned {
			d.leaseChanged = false
			w.proto.Grant(w.now, part, me, p.host.truth(d.lease))
			if d.lease != 0 {
				p.begins(part)
			}
		}
	}
}

func (p *process) holder() checker.Holder {
	return checker.Holder{Node: p.self.Name, Boot: p.self.Boot}
}

func (p *process) owns(part int) bool { return p.core.Route(part).Standing == ownership.Owned }

// watches says whether q is in p's view.
func (p *process) watches(q *process) bool {
	return slices.ContainsFunc(p.view.Members, func(m ownership.Member) bool { return m.Node == q.self })
}

func (p *process) note(n ownership.Note) {
	if n.What == "joined" { // of which reservations give nothing back
		p.w.lose(func(*policy, *store.Key) int64 { return p.w.now })
	}
	if n.What == "claimed" {
		p.w.claimed(p, n.Partition, n.Detail == "new")
	}
	if l := p.w.lending; l != nil && n.What == "strict keys start full" {
		l.startsFull(p, n.Partition)
	}
	text := p.self.Name + " " + n.What + " " + strconv.Itoa(n.Partition)
	if n.Term != (ownership.Term{}) {
		text += " at " + n.Term.String()
	}
	if n.Other.Name != "" {
		text += " (" + n.Other.Name + ")"
	}
	if n.Detail != "" {
		text += ": " + n.Detail
	}
	p.w.say("%s", text)
}

// claimed notes a partition that was claimed as new out of its owner's sight.
func (w *world) claimed(by *process, part int, asNew bool) {
	by.hidden[part] = asNew && slices.ContainsFunc(w.running(),
		func(q *process) bool { return q != by && q.owns(part) && !by.watches(q) })
}

// remember notes that a voter knows of a grant.
func (p *process) remember(part int, of ownership.Node) {
	if !slices.Contains(p.granted[part], of) {
		p.granted[part] = append(p.granted[part], of)
	}
}

// begins tells the checker of a first grant, where the partition was claimed as new out of its owner's sight, and no
// majority of the voters remembers another process.
func (p *process) begins(part int) {
	w := p.w
	knowing := 0
	another := func(n ownership.Node) bool { return n != p.self }
	for _, h := range w.hosts[:w.voters] {
		if h.proc != nil && slices.ContainsFunc(h.proc.granted[part], another) {
			knowing++
		}
	}
	hidden := p.hidden[part]
	if p.hidden[part] = false; p.host.index < w.voters {
		p.remember(part, p.self)
	}
	if !hidden || knowing > w.voters/2 {
		return
	}
	h := checker.Hidden{At: w.now, Keys: make(map[string]bool)}
	for _, pol := range w.policies {
		for i := range pol.keys {
			if k := &pol.keys[i]; k.Partition == part {
				h.Keys[k.Key] = true
			}
		}
	}
	w.history.Hidden = append(w.history.Hidden, h)
}

// crash ends the process and all it knows.
func (p *process) crash() {
	w := p.w
	f := checker.Crash{At: w.now, Node: p.self.Name, Copied: w.whole(), Flushed: make(map[string]int64)}
	for _, pol := range w.policies {
		for i := range pol.keys {
			k := &pol.keys[i]
			d := &p.data.parts[k.Partition]
			if f.Flushed[k.Key] = d.flushed; w.disks {
				f.Flushed[k.Key] = min(d.flushed, d.saved) // the copy may be lost as well, before it is claimed
			}
		}
	}
	w.history.Crashes = append(w.history.Crashes, f)
	w.mix(uint64(w.now), uint64(p.host.index), 0xdead)
	p.end()
	p.host.left = false
	w.memorize()
}

func (p *process) end() {
	p.ended = true
	p.host.proc, p.host.left = nil, p.left
	p.disk.crash()
	p.w.proto.Gone(p.holder())
}

// leave has the process give away all it has, and end.
func (p *process) leave() {
	p.do(func() {
		if p.state == leaving {
			return
		}
		p.state, p.stateAt = leaving, p.w.now
		p.look()
		until := p.w.now + p.w.leaveFor
		var wait func()
		wait = func() {
			switch {
			case !p.agreed() && p.w.now < p.stateAt+agreeFor:
				p.later(20*millisecond, wait)
			case p.core.Settled() && p.settled && !p.handling() &&
				(p.core.Status(p.clock()).Stranded == 0 || p.alone()) && p.disk.needless(until):
				p.w.say("%s has left", p.self.Name)
				p.left = true
				p.end()
			case p.w.now >= until:
				p.w.say("%s ends without having given away all it has", p.self.Name)
				p.left = true
				p.crash()
			default:
				p.later(20*millisecond, wait)
			}
		}
		p.later(20*millisecond, wait)
	})
}

// agreeFor bounds how long a process that leaves stays because others have not heard of that, as in internal/node.
const agreeFor = 3 * second

// agreed says whether all other active processes have the ring of this one.
func (p *process) agreed() bool {
	ring := func(q *process) []ownership.Node {
		var active []ownership.Node
		for _, m := range q.view.Members {
			if m.Active {
				active = append(active, m.Node)
			}
		}
		return active
	}
	mine := ring(p)
	return !slices.ContainsFunc(p.w.running(), func(q *process) bool {
		return q != p && q.state == active && slices.Contains(mine, q.self) && !slices.Equal(ring(q), mine)
	})
}

// alone says whether there is nobody to give anything to.
func (p *process) alone() bool {
	return !slices.ContainsFunc(p.view.Members, func(m ownership.Member) bool { return m.Active && m.Node != p.self })
}

// pause stops the process for a while. suspend stops its host's clock of decisions as well.
func (p *process) pause(d int64, suspend bool) {
	if p.ended || p.paused {
		return
	}
	p.paused = true
	w := p.w
	began := p.host.elapsed()
	w.after(d, func() {
		if p.ended {
			return
		}
		if suspend {
			p.host.asleep += p.host.elapsed() - began
		}
		w.say("%s goes on", p.self.Name)
		p.paused = false
		backlog := p.backlog
		p.backlog = nil
		for _, f := range backlog {
			p.do(f)
		}
	})
}

// poll keeps up what the process believes of the others.
func (p *process) poll() {
	w := p.w
	change := false
	for _, h := range w.hosts {
		if q := h.proc; q != nil && q != p && p.sight(q) == nil && p.hears(q) {
			met := p.meet(q)
			if !p.joined && q.joined { // what q knows comes with it
				met.alive, met.state, change = true, q.state, true
				for _, s := range q.sights {
					if s.alive && s.of != p && p.sight(s.of) == nil {
						t := p.meet(s.of)
						t.alive, t.state = true, s.state
						change = true
					}
				}
			}
		}
	}
	for _, s := range p.sights {
		reachable := !s.of.ended && s.doubted <= w.now && p.hears(s.of)
		if reachable != s.reachable {
			s.reachable, s.since = reachable, w.now
			switch {
			case reachable:
				s.delay = w.between(w.discover)
			case s.of.left || s.doubted > w.now:
				s.delay = w.between(w.discover)
			default:
				s.delay = w.between(w.detect)
			}
			s.delay += p.host.lag
		}
		if s.reachable != s.alive && w.now-s.since >= s.delay {
			s.alive = s.reachable
			change = true
			w.mix(uint64(w.now), uint64(p.host.index), s.of.self.Boot)
			if w.verbose {
				w.trace("%s sees %s/%d: %v", p.self.Name, s.of.self.Name, s.of.self.Boot, s.alive)
			}
		}
		if s.alive && s.reachable && s.state != s.of.state && w.now-s.of.stateAt >= s.gossip+p.host.lag {
			s.state = s.of.state
			change = true
		}
	}
	p.sights = slices.DeleteFunc(p.sights, func(s *sight) bool { return s.of.ended && !s.alive })
	if !p.joined && (p.others() > 0 || len(w.hosts) == 1 || w.now-p.begun >= w.lonely) {
		p.joined, change = true, true
	}
	if p.state == joining && p.joined &&
		!slices.ContainsFunc(p.sights, func(s *sight) bool { return s.alive && s.of.self.Name == p.self.Name }) {
		p.state, p.stateAt, change = active, w.now, true
	}
	if change {
		p.look()
	} else if !p.settled && p.joined && w.now-p.changed >= w.settle {
		p.settled = true
		p.see()
	}
	p.later(40*millisecond+w.rng.Int64N(20*millisecond), p.poll)
}

func (p *process) others() int {
	n := 0
	for _, s := range p.sights {
		if s.alive {
			n++
		}
	}
	return n
}

func (p *process) sight(q *process) *sight {
	for _, s := range p.sights {
		if s.of == q {
			return s
		}
	}
	return nil
}

func (p *process) meet(q *process) *sight {
	s := &sight{of: q, since: p.w.now, gossip: p.w.between(p.w.discover)}
	p.sights = append(p.sights, s)
	return s
}

// hears says whether word of q reaches p.
func (p *process) hears(q *process) bool {
	if q.paused || p.w.link(q.host, p.host).cut {
		return false
	}
	return p.w.oneSided || !p.w.link(p.host, q.host).cut
}

// look makes a new view of what has changed, which has to settle first.
func (p *process) look() {
	p.changed = p.w.now
	p.settled = false
	p.see()
}

// see hands the view on.
func (p *process) see() {
	w := p.w
	v := ownership.View{Settled: p.settled, Leaving: p.state == leaving}
	v.Members = append(v.Members, ownership.Member{Node: p.self, Active: p.state == active})
	for _, s := range p.sights {
		if s.alive {
			v.Members = append(v.Members, ownership.Member{Node: s.of.self, Active: s.state == active})
		}
	}
	slices.SortFunc(v.Members, func(a, b ownership.Member) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), cmp.Compare(a.Boot, b.Boot))
	})
	v.Owners, v.Backups = make([]int32, w.partitions), make([]int32, w.partitions)
	var names, owners strings.Builder
	for i := range v.Members {
		if v.Members[i].Active {
			names.WriteString(v.Members[i].Name)
		}
	}
	for part := range w.partitions {
		v.Owners[part] = pick(v.Members, part, "")
		v.Backups[part] = pick(v.Members, part, p.self.Name)
		if o := v.Owners[part]; o >= 0 {
			owners.WriteString(v.Members[o].Name)
		}
	}
	if w.verbose {
		w.trace("%s sees %s, settled %v", p.self.Name, names.String(), p.settled)
	}
	w.proto.Table(w.now, p.self.Name, names.String(), owners.String())
	p.view = v
	p.core.SetView(p.clock(), v)
	p.flush()
}

// pick is a little ring: of the active members the one with the most weight for the partition. Of two processes of one
// name it is the later one.
func pick(members []ownership.Member, part int, without string) int32 {
	best := int32(-1)
	for i, m := range members {
		if m.Active && m.Name != without && (best < 0 || weight(m.Name, part) >= weight(members[best].Name, part)) {
			best = int32(i)
		}
	}
	return best
}

func weight(name string, part int) uint32 {
	h := fnv.New32a()
	h.Write([]byte{byte(part), byte(part >> 8)})
	h.Write([]byte(name))
	x := h.Sum32() * 0x9e3779b1
	return x ^ x>>15
}
