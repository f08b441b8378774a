package ownership

import (
	"maps"
	"slices"
	"time"
)

// This file takes partitions that no process hands over: their holder is lost or silent, the receiver of a move was
// lost, or they never had a holder. It also tells members what this node has begun to hold (tell, tellNew), so that
// they do not claim it.
//
// The path of a claim:
//
//  1. lookAtAll finds partitions that the ring gives to this node and that it does not hold (mayAsk). ask sends one
//     Query about all of them to every member.
//  2. Each member answers with an Info per partition: whether it holds it, whether it is about to claim it as well, the
//     highest term that it knows, and the position of its copy.
//  3. When all live members have answered, or after patience, conclude calls decideClaim for each partition.
//  4. If a member holds the partition, that member will move it here. Otherwise the member with the newest copy claims
//     the partition, even if the ring gives it to another one: this node (claim), or a member that this node asks to
//     claim (Entrust). If no member has a copy, this node claims.
//  5. claim takes a term above every known one, opens the content, and asks for grants and a backup.
//
// What makes two claims of one partition rare:
//
//   - Only the ring's owner asks. If views of the ring differ, two nodes may ask, and each sees Info.Claiming of the
//     other. The node with the lower name asks again after retryAfter/2, the other after retryAfter. So the node with
//     the lower name has claimed when the other asks again, if its round takes less than retryAfter/2.
//   - Only the member with the newest copy claims, and an Entrust below a known term is dropped.
//   - A process that this node does not see as a member yet may report that it holds the partition, or a member that
//     sees it may name it. This node does not claim from such a stranger for strangerFor; after that it may.
//
// Two processes may still hold the partition: if members cannot reach each other, or if the holder is alive and silent
// for longer than patience. They hold it under different terms, until one hears of the other; then one gives its
// content to the other, which joins the two (move.go). A process decides under strict rules only with grants of a
// majority of voters (grant.go), which at most one process can have.
//
// Words (core.go has the types, the time-outs and the two clocks, t and awake):
//
//	process        a Node: a ring name, and a boot id that differs at each start. A restarted process is another Node of
//	               the same name
//	holder, owner  the holder of a partition decides on it; the owner is the node that the ring gives it to, and should
//	               become the holder
//	known, holder  (of part) the highest term of a partition that this node has heard of, and the process that held it;
//	               learn replaces both
//	copy           this node's copy of a partition that another process holds: its Position, or zero if it is not
//	               complete. Of two copies the one of the higher term is newer; of one term, that of the later
//	               attachment
//	incoming       a move of the partition to this node that is in progress
//	askAt          the time before which this node does not ask about the partition again
//	settled        this node has joined, and its view has not changed for some time (View.Settled)
//	alive          the processes of this node's view; lives looks one up
//	mine           the ring gives the partition to this node
//
// Other files must keep: only next makes terms, each above every known one; pt.copy is zero until the copy is complete.

// round is one Query to all members, and what they have answered.
type round struct {
	id      uint64
	parts   []int
	answers map[int][]answer // by partition
	missing map[Node]bool    // members that have not answered
	begun   int64            // by Core.awake
	sent    int64
}

// answer is an Info and the member that has sent it.
type answer struct {
	Info
	from Node
}

// mayAsk reports whether this node should ask after a partition now, to claim it. It should not while members that are
// recorded on this node's disk may still join with newer copies (awaitsMembers, disk.go).
func (c *Core) mayAsk(p int) bool {
	pt := &c.parts[p]
	return !pt.held && c.mine(p) && !c.awaitsMembers() && c.view.Settled && !c.view.Leaving &&
		pt.incoming.from == (Node{}) && c.t >= pt.askAt &&
		!c.strange(pt.holder)
}

// strangerFor is how long this node waits for a process that holds a partition to become a member in its own view.
const strangerFor = 2 * int64(time.Second)

// strange reports whether a process holds a partition and is not in this node's view yet (noteStranger). Of two nodes
// that start at the same time, one may hear of the other's claims before gossip tells it of the other. The other's
// partitions are not lost: this node must not claim them.
func (c *Core) strange(n Node) bool { return c.awake < c.strangers[n] }

// noteStranger notes a process that holds a partition and is not in this node's view yet. The process itself or a
// member that sees it has reported this. Reports of members do not extend strangerFor: this node may never see a
// process that they see, and then it must claim.
func (c *Core) noteStranger(n Node) {
	if _, met := c.strangers[n]; n != (Node{}) && !met && !c.lives(n) {
		c.strangers[n] = c.awake + strangerFor
	}
}

// noteDeparted updates strangers for a new view. Processes that have left the view stay in it for strangerFor, so that
// late reports do not make them strangers.
func (c *Core) noteDeparted(before map[Node]int32) {
	for n := range before {
		if !c.lives(n) {
			c.strangers[n] = c.awake
		}
	}
	maps.DeleteFunc(c.strangers, func(n Node, until int64) bool { return c.lives(n) || c.awake-until > strangerFor })
}

// ask begins a round about the given partitions, which must be sorted, because asking searches them. There is one round
// at a time: while one is in progress, ask continues it and ignores parts.
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
		id: c.queries, parts: parts, answers: make(map[int][]answer), missing: make(map[Node]bool), begun: c.awake,
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
	for _, m := range c.view.Members { // in the order of the view, so that a simulation repeats itself
		if r.missing[m.Node] {
			c.send(m.Node, &Query{ID: r.id, Partitions: r.parts})
		}
	}
}

// asking reports whether this node is asking after a partition, and so may be about to claim it.
func (c *Core) asking(p int) bool {
	if c.round == nil || !c.mayAsk(p) {
		return false
	}
	_, asked := slices.BinarySearch(c.round.parts, p)
	return asked
}

// onQuery answers a Query. It sets Info.Claiming if this node is asking about the partition as well, or if the newest
// copy may be on the disk of a member that has yet to join (awaitsCopies, disk.go).
func (c *Core) onQuery(from Node, q *Query) {
	reply := &QueryReply{ID: q.ID, Infos: make([]Info, 0, len(q.Partitions))}
	for _, p := range q.Partitions {
		pt := &c.parts[p]
		info := Info{Partition: p, Claiming: c.asking(p) || c.awaitsCopies(p), Term: pt.known, Copy: pt.copy}
		if c.lives(pt.holder) {
			info.Holder = pt.holder
		}
		if pt.held {
			// pt.known may be another process's term; the receiver would take it for this node's.
			info.Held, info.Term, info.Holder, info.Copy = true, pt.term, c.cfg.Self, Position{Term: pt.saved}
		}
		reply.Infos = append(reply.Infos, info)
	}
	c.send(from, reply)
}

// tellEvery is the least time between two messages that tell all members of newly held partitions.
const tellEvery = 500 * int64(time.Millisecond)

// tell tells all members which partitions this node has begun to hold. If later a holder and all copies are lost, the
// member that claims knows that there was a holder, and calls Data.Cold: new keys then start without units left, where
// their policy asks for that.
func (c *Core) tell() {
	if len(c.gained) == 0 || c.t < c.tellAt {
		return
	}
	c.tellAt = c.t + tellEvery
	slices.Sort(c.gained) // a partition that got several terms is in the list several times, and is told of once
	news := c.holdings(slices.Compact(c.gained))
	c.gained = c.gained[:0]
	for _, m := range c.view.Members {
		if m.Node != c.cfg.Self && len(news.Infos) > 0 {
			c.send(m.Node, news)
		}
	}
}

// tellNew sends everything that this node holds to the members that were not in the view before.
func (c *Core) tellNew(before map[Node]int32) {
	var held []int
	for p := range c.parts {
		if c.parts[p].held {
			held = append(held, p)
		}
	}
	news := c.holdings(held)
	for _, m := range c.view.Members {
		if _, old := before[m.Node]; !old && m.Node != c.cfg.Self && len(held) > 0 {
			c.send(m.Node, news)
		}
	}
}

// holdings is a QueryReply that answers no Query: an Info for each of the given partitions that this node holds.
func (c *Core) holdings(partitions []int) *QueryReply {
	news := &QueryReply{}
	for _, p := range partitions {
		if pt := &c.parts[p]; pt.held {
			news.Infos = append(news.Infos,
				Info{Partition: p, Held: true, Term: pt.term, Holder: c.cfg.Self, Copy: Position{Term: pt.saved}})
		}
	}
	return news
}

func (c *Core) onQueryReply(from Node, q *QueryReply) {
	for i := range q.Infos {
		c.heardHeld(from, &q.Infos[i])
	}
	if q.ID == 0 {
		if c.strange(from) {
			delete(c.strangers, from) // strangerFor begins anew, because the process itself reports what it holds
		}
		c.noteStranger(from)
		for i := range q.Infos {
			if info := &q.Infos[i]; !c.parts[info.Partition].held {
				c.learn(info.Partition, info.Term, from)
			}
		}
		return
	}
	r := c.round
	if r == nil || q.ID != r.id || !r.missing[from] {
		return
	}
	delete(r.missing, from)
	for _, i := range q.Infos {
		r.answers[i.Partition] = append(r.answers[i.Partition], answer{i, from})
	}
	if len(r.missing) == 0 {
		c.conclude()
	}
}

// conclude ends the round and decides about each of its partitions.
func (c *Core) conclude() {
	r := c.round
	c.round = nil
	for _, p := range r.parts {
		if c.mayAsk(p) {
			c.decideClaim(p, r)
		}
	}
}

// decideClaim uses the answers about a partition to do one of these: leave the partition to its holder, ask again
// later, entrust the member with the newest copy, or claim.
func (c *Core) decideClaim(p int, r *round) {
	pt, answers := &c.parts[p], r.answers[p]
	best, from := pt.copy, c.cfg.Self
	var held *Info
	wait := int64(0)
	for i := range answers {
		info, source := &answers[i].Info, answers[i].from
		switch {
		case info.Held:
			if held == nil || held.Term.Less(info.Term) {
				held = info
			}
			continue
		case info.Claiming && source.Name < c.cfg.Self.Name:
			wait = retryAfter
		case info.Claiming:
			// The node with the higher name waits only if it has heard that this node claims. So this node waits as
			// well, for a shorter time.
			wait = max(wait, retryAfter/2)
		}
		c.learn(p, info.Term, info.Holder)
		// A holder whose name a later process has is no stranger: it was replaced, and the member may not see that yet.
		if _, replaced := c.named[info.Holder.Name]; !replaced {
			c.noteStranger(info.Holder)
		}
		if best.before(info.Copy) && c.lives(source) {
			best, from = info.Copy, source
		}
	}
	// The last known holder may still hold the partition if it is alive and was not asked, because it became a member
	// after the others were asked, or if it has claimed the partition after it had answered. A holder that was asked
	// and is silent does not count.
	mayHold := pt.holder != c.cfg.Self && c.lives(pt.holder) && !r.missing[pt.holder]
	for _, a := range answers {
		mayHold = mayHold && (a.from != pt.holder || a.Term.Less(pt.known))
	}
	switch {
	case held != nil:
		c.learn(p, held.Term, held.Holder)
		pt.askAt = c.t + askAgain
	case wait > 0:
		pt.askAt = c.t + wait
	case mayHold || c.strange(pt.holder):
		pt.askAt = c.t + retryAfter
	case from != c.cfg.Self:
		pt.askAt = c.t + retryAfter
		c.send(from, &Entrust{Partition: p, Term: pt.known})
	default:
		c.claim(p)
	}
}

// before reports whether copy a is older than copy b: by term, then by attachment.
func (a Position) before(b Position) bool {
	if a.Term != b.Term {
		return a.Term.Less(b.Term)
	}
	return a.Attachment < b.Attachment
}

// onEntrust claims a partition because this node has the newest copy of it, whatever the ring says. If it cannot, the
// member that has sent the Entrust asks again after retryAfter.
func (c *Core) onEntrust(_ Node, e *Entrust) {
	pt := &c.parts[e.Partition]
	if e.Term.Less(pt.known) {
		return // another process has held it since
	}
	c.learn(e.Partition, e.Term, Node{})
	// A leaving node claims as well: no other process has this copy. It hands the partition over afterwards.
	if !pt.held && pt.copy != (Position{}) && (c.view.Settled || c.view.Leaving) && pt.incoming.from == (Node{}) {
		c.claim(e.Partition)
	}
}

// claim makes this node the holder of a partition that no process hands over, under a term above every known one. Its
// content is this node's copy. The copy is current if this node still holds the partition, or if the copy has the
// highest known term: then nothing of an earlier holder is missing beyond what its durability allows. If the copy is
// not current and the partition had a holder, claim calls Data.Cold: what that holder counted is lost.
func (c *Core) claim(p int) {
	pt := &c.parts[p]
	was := pt.known
	earlier := was != (Term{}) // the partition had a holder
	frozen := pt.held          // for a move, and the receiver was lost
	current := frozen || pt.copy != (Position{}) && !pt.copy.Term.Less(was)
	if !frozen && pt.copy == (Position{}) {
		c.data.Discard(p) // a copy that was never complete
	}
	c.endIncoming(p)
	t := c.next(p)
	c.data.TakeOver(p, c.now.Instant)
	restored := pt.restored
	c.endRestored(p)
	if !current || restored && len(c.absent) > 0 || pt.origin == (Term{}) {
		// The origin is the term that the history of a content began with. A copy from a disk that comes later is
		// joined with this content if its origin is another one, and dropped as an older state of this content if it is
		// the same (takeJoin).
		pt.origin = t
	}
	// strictness.earlier is false for a current copy from the disk: if then no voter knows an earlier holder, the
	// voters have been restarted as well, and resolve accepts the copy as complete. If it were true, resolve would
	// leave no units to any key of strict rules.
	*pt.strict = strictness{earlier: earlier && !(restored && current), copy: pt.copy, from: pt.copyFrom}
	if earlier && !current {
		c.data.Cold(p, c.now.Instant)
	}
	c.hold(p, t)
	c.open(p)
	c.grants.urgent = true
	switch {
	case !earlier:
		c.note("claimed", p, Node{}, "new")
	case restored:
		c.note("claimed", p, Node{}, "from the disk")
	case current:
		c.note("claimed", p, Node{}, "from a copy")
	default:
		c.note("claimed", p, Node{}, "without a current copy")
	}
	c.wantBackup(p)
}
