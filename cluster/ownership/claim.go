package ownership

import (
	"slices"
	"time"
)

// A partition that should be this node's and is not is asked after among all members, many partitions at a time. When one
// of them holds it, it will be moved here; when none does, the one with the newest copy claims it, at a term above all
// that anybody knows of.

// round is one round of questions.
type round struct {
	id      uint64
	parts   []int
	infos   map[int][]Info
	sources map[int][]Node // of infos
	missing map[Node]bool
	begun   int64 // by Core.awake
	sent    int64
}

// mayClaim says whether it is time to ask after a partition.
func (c *Core) mayClaim(p int) bool {
	pt := &c.parts[p]
	return !pt.held && c.mine(p) && c.view.Settled && !c.view.Leaving && pt.incoming.from == (Node{}) && c.t >= pt.askAt &&
		!c.strange(pt.holder)
}

// strangerFor is how long a process that has told of what it holds is expected to come into view.
const strangerFor = 2 * int64(time.Second)

// strange says whether a process is there that this node's view does not have yet. Of two that start at the same time one may
// hear of what the other has claimed before it hears of the other: what that one holds is not lost.
func (c *Core) strange(n Node) bool {
	at, ok := c.strangers[n]
	return ok && c.awake-at < strangerFor
}

// newcomerFor is how long a process that has come into the ring is taken not to know yet who holds what it should: it hears of
// that from each holder that has heard of it.
const newcomerFor = strangerFor

// newcomer says whether a process has come into the ring just now. Until it has told that it holds a partition, the one who was
// heard to hold it last is asked in its place: it would have to let the question wait until it knows itself.
func (c *Core) newcomer(n Node) bool {
	_, ok := c.newcomers[n]
	return ok
}

// welcome notes who comes into the ring with a view. Nobody does with the first: this node is the one that has come.
func (c *Core) welcome(v View) {
	if c.views == 0 {
		return
	}
	for _, m := range v.Members {
		if at, ok := c.alive[m.Node]; m.Active && m.Node != c.cfg.Self && (!ok || !c.view.Members[at].Active) {
			c.newcomers[m.Node] = c.awake
		}
	}
}

// getUsedTo ends the time of newcomers.
func (c *Core) getUsedTo() {
	ended := false
	for n, at := range c.newcomers {
		if c.awake-at > newcomerFor {
			delete(c.newcomers, n)
			ended = true
		}
	}
	for p := 0; ended && p < len(c.parts); p++ {
		c.publish(p)
	}
}

// acquaint brings what is known of strangers in line with a new view.
func (c *Core) acquaint(before map[Node]int32) {
	for n := range before {
		if _, ok := c.alive[n]; !ok {
			c.departed[n] = c.awake
		}
	}
	for n, at := range c.departed {
		if c.awake-at > strangerFor {
			delete(c.departed, n)
		}
	}
	for n, at := range c.strangers {
		if _, ok := c.alive[n]; ok || c.awake-at > strangerFor {
			delete(c.strangers, n)
		}
	}
}

// ask begins a round of questions, or goes on with the one in progress.
func (c *Core) ask(parts []int) {
	if r := c.round; r != nil {
		for n := range r.missing {
			if !c.lives(n) {
				delete(r.missing, n)
			}
		}
		switch {
		case len(r.missing) == 0 || c.awake-r.begun > patience:
			c.conclude()
		case c.t-r.sent > resendAfter:
			c.sendRound()
		}
		return
	}
	if len(parts) == 0 {
		return
	}
	c.queries++
	r := &round{
		id: c.queries, parts: parts, infos: make(map[int][]Info), sources: make(map[int][]Node),
		missing: make(map[Node]bool), begun: c.awake,
	}
	for n := range c.alive {
		if n != c.cfg.Self {
			r.missing[n] = true
		}
	}
	c.round = r
	if len(r.missing) == 0 {
		c.conclude()
		return
	}
	c.sendRound()
}

func (c *Core) sendRound() {
	r := c.round
	r.sent = c.t
	for _, m := range c.view.Members { // in order, so that a simulation repeats itself
		if r.missing[m.Node] {
			c.send(m.Node, &Query{ID: r.id, Partitions: r.parts})
		}
	}
}

func (c *Core) asking(p int) bool {
	return c.round != nil && c.mayClaim(p) && contains(c.round.parts, p)
}

// contains looks for p in a rising list.
func contains(rising []int, p int) bool {
	low, high := 0, len(rising)
	for low < high {
		mid := (low + high) / 2
		if rising[mid] < p {
			low = mid + 1
		} else {
			high = mid
		}
	}
	return low < len(rising) && rising[low] == p
}

func (c *Core) onQuery(from Node, q *Query) {
	reply := &QueryReply{ID: q.ID, Infos: make([]Info, 0, len(q.Partitions))}
	for _, p := range q.Partitions {
		pt := &c.parts[p]
		info := Info{Partition: p, Claiming: c.asking(p), Term: pt.known, Holder: pt.holder, Copy: pt.copy}
		if pt.held {
			// Not the highest term that is known: that may be somebody else's, and would be taken for this node's.
			info.Held, info.Term, info.Holder = true, pt.term, c.cfg.Self
		}
		reply.Infos = append(reply.Infos, info)
	}
	c.send(from, reply)
}

// tellEvery is how long what was taken is gathered before all others are told of it.
const tellEvery = 500 * int64(time.Millisecond)

// tell tells all others what has been taken, so that whoever claims a partition whose holder and copy are both lost knows
// at least that it was held: the keys that are to start full then do.
func (c *Core) tell() {
	if len(c.gained) == 0 || c.t < c.tellAt {
		return
	}
	c.tellAt = c.t + tellEvery
	slices.Sort(c.gained) // a partition may have got several terms, and is told of once: more than there are would not be read
	news := c.holdings(slices.Compact(c.gained))
	c.gained = c.gained[:0]
	for _, m := range c.view.Members {
		if m.Node != c.cfg.Self && len(news.Infos) > 0 {
			c.send(m.Node, news)
		}
	}
}

// tellNew tells those who were not there before everything that is held.
func (c *Core) tellNew(before map[Node]int32) {
	var news *QueryReply
	for _, m := range c.view.Members {
		if _, old := before[m.Node]; old || m.Node == c.cfg.Self {
			continue
		}
		if news == nil {
			all := make([]int, len(c.parts))
			for p := range all {
				all[p] = p
			}
			news = c.holdings(all)
		}
		if len(news.Infos) > 0 {
			c.send(m.Node, news)
		}
	}
}

// holdings is an answer that nobody asked for: of those of the partitions that are held.
func (c *Core) holdings(partitions []int) *QueryReply {
	news := &QueryReply{}
	for _, p := range partitions {
		if pt := &c.parts[p]; pt.held {
			news.Infos = append(news.Infos, Info{Partition: p, Held: true, Term: pt.term, Holder: c.cfg.Self})
		}
	}
	return news
}

func (c *Core) onQueryReply(from Node, q *QueryReply) {
	if q.ID == 0 {
		if _, ok := c.departed[from]; !ok && !c.lives(from) {
			c.strangers[from] = c.awake
		}
		for _, i := range q.Infos {
			if !c.parts[i.Partition].held {
				c.learn(i.Partition, i.Term, from)
			}
		}
		return
	}
	c.onWord(from, q.ID)
	r := c.round
	if r == nil || q.ID != r.id || !r.missing[from] {
		return
	}
	delete(r.missing, from)
	for _, i := range q.Infos {
		r.infos[i.Partition] = append(r.infos[i.Partition], i)
		r.sources[i.Partition] = append(r.sources[i.Partition], from)
	}
	if len(r.missing) == 0 {
		c.conclude()
	}
}

// conclude acts on what a round has told.
func (c *Core) conclude() {
	r := c.round
	c.round = nil
	for _, p := range r.parts {
		if c.mayClaim(p) {
			c.decideClaim(p, r.infos[p], r.sources[p])
		}
	}
}

func (c *Core) decideClaim(p int, infos []Info, sources []Node) {
	pt := &c.parts[p]
	best, from := pt.copy, c.cfg.Self
	var held *Info
	yield := int64(0)
	for i := range infos {
		info, source := &infos[i], sources[i]
		switch {
		case info.Held:
			if held == nil || held.Term.Less(info.Term) {
				held = info
			}
			continue
		case info.Claiming && source.Name < c.cfg.Self.Name:
			yield = retryAfter
		case info.Claiming:
			// It yields if it has heard that this node claims, which it may not have: both ask again, this node first.
			yield = max(yield, retryAfter/2)
		}
		c.learn(p, info.Term, info.Holder)
		if best.before(info.Copy) && c.lives(source) {
			best, from = info.Copy, source
		}
	}
	// Who is said to hold the partition may have taken it since it answered that it does not: entrusted with it in an earlier round.
	late := false
	for i := range infos {
		late = late || sources[i] == pt.holder && infos[i].Term.Less(pt.known) && c.lives(pt.holder)
	}
	switch {
	case held != nil:
		c.learn(p, held.Term, held.Holder)
		pt.askAt = c.t + askAgain
	case yield > 0:
		pt.askAt = c.t + yield
	case late:
		pt.askAt = c.t + retryAfter
	case from != c.cfg.Self:
		pt.askAt = c.t + retryAfter
		c.send(from, &Entrust{Partition: p, Term: pt.known})
	default:
		c.claim(p)
	}
}

// before orders positions.
func (a Position) before(b Position) bool {
	if a.Term != b.Term {
		return a.Term.Less(b.Term)
	}
	return a.Sequence < b.Sequence
}

func (c *Core) onEntrust(_ Node, e *Entrust) {
	pt := &c.parts[e.Partition]
	if e.Term.Less(pt.known) {
		return // late: somebody has held it since
	}
	c.learn(e.Partition, e.Term, Node{})
	// Also when this node is leaving: what it claims it hands over, and nobody else has the copy.
	if !pt.held && pt.copy != (Position{}) && (c.view.Settled || c.view.Leaving) && pt.incoming.from == (Node{}) {
		c.claim(e.Partition)
	}
}

// claim takes a partition that nobody hands over: its holder is lost, or there never was one.
func (c *Core) claim(p int) {
	pt := &c.parts[p]
	earlier := pt.known != (Term{})
	again := pt.held // a partition that was frozen and whose receiver was lost
	fresh := again || pt.copy != (Position{}) && !pt.copy.Term.Less(pt.known)
	was := pt.known
	if !again && pt.copy == (Position{}) {
		c.data.Discard(p) // what is left of a copy that never became whole
	}
	c.endIncoming(p)
	t := c.next(p)
	c.data.TakeOver(p, c.now.Instant)
	*pt.strict = strictness{earlier: earlier, virgin: !earlier, copy: pt.copy, from: pt.copyFrom}
	if earlier && !fresh {
		c.data.Cold(p, c.now.Instant)
	}
	c.hold(p, t)
	c.open(p)
	c.grants.urgent = true
	switch {
	case !earlier:
		c.note("claimed", p, Node{}, "new")
	case fresh:
		c.noteBefore("claimed", p, was, Node{}, "from a copy")
	default:
		c.noteBefore("claimed", p, was, Node{}, "without a copy")
	}
	c.wantBackup(p)
}
