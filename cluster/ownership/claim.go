package ownership

import (
	"maps"
	"slices"
	"time"
)

// This file takes partitions that no process hands over: the holder is lost or silent, the receiver of a move was lost,
// or there never was a holder. It also tells members what this node holds (announce).
//
// The path of a claim:
//
//  1. lookAtAll (core.go) finds the partitions that this node may ask about (mayAsk): the ring gives them to it, it
//     does not hold them, and it knows of no reason to wait. ask sends one Query about all of them to every member.
//  2. Each member answers with an Info for each partition: whether it holds the partition, whether this node should
//     wait (Info.Claiming), the highest term that it knows and the holder under it, and the position of its copy.
//  3. When all live members have answered, or after patience, conclude calls decideClaim for each partition.
//  4. decideClaim asks again later if a member holds the partition (that member will move it here), if a member has
//     asked this node to wait, or if the last known holder may still hold it. Otherwise the node with the newest copy
//     claims, even if the ring gives the partition to another one: this node (claim), or a member that this node asks
//     to claim (Entrust). If no node has a copy, this node claims.
//  5. claim takes a term above every known one, opens the content, and asks for grants and a backup.
//
// review (core.go) calls claim as well, for a partition whose receiver was lost after the Commit.
//
// What makes two claims of one partition rare:
//
//   - Only the ring's owner asks. If views of the ring differ, two nodes may ask, and each sees Info.Claiming of the
//     other. The node with the lower name asks again after retryAfter/2, the other after retryAfter. So the node with
//     the lower name has claimed when the other asks again, if its round takes less than retryAfter/2.
//   - If there are copies, only a node with the newest one claims. An Entrust below a known term is dropped.
//   - A process that this node does not see as a member yet may report that it holds the partition, or a member that
//     sees the process may name it. This node waits strangerFor for such a stranger before it claims.
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
//	holder, owner  the holder of a partition decides on it; the owner is the node that the ring gives it to (mine), and
//	               should become the holder
//	part.known     the highest term of the partition that this node has heard of; learn (core.go) replaces it
//	part.holder    the last known holder: the process that held the partition under known. The zero Node: this node has
//	               not heard which process it was
//	copy           what this node has of a partition that another process holds. part.copy is its Position, and zero
//	               until the copy is complete. Of two copies the one of the higher term is newer; of one term, that of
//	               the higher attachment: a holder numbers the copies that it sends (follow.go)
//	part.incoming  the copy that this node receives. incoming.from is set while a move to this node is in progress
//	part.askAt     this node does not ask about the partition before this time
//	View.Settled   this node has joined, and its view has not changed for some time
//	alive          the processes of this node's view; lives looks one up
//	Info.Claiming  the sender wants other nodes to wait: it is asking about the partition as well, or a member that has
//	               yet to join may have the newest copy on its disk (awaitsCopies, disk.go)
//
// Other files must keep: only next makes terms, each above every known one; pt.copy is zero until the copy is complete.

// round is one Query to all members, and what they have answered.
type round struct {
	id      uint64
	parts   []int            // sorted
	answers map[int][]answer // by partition
	missing map[Node]bool    // members that were asked, are alive and have not answered
	begun   int64            // by Core.awake
	sent    int64
}

// answer is an Info and the member that has sent it.
type answer struct {
	Info
	from Node
}

// mayAsk reports whether this node should ask about a partition now, to claim it. It should not while members that are
// recorded on this node's disk may still join with newer copies (awaitsMembers, disk.go), while a move brings the
// partition here, or while the last known holder is a stranger.
func (c *Core) mayAsk(p int) bool {
	pt := &c.parts[p]
	return !pt.held && c.mine(p) && !c.awaitsMembers() && c.view.Settled && !c.view.Leaving &&
		pt.incoming.from == (Node{}) && c.t >= pt.askAt && !c.strange(pt.holder)
}

// strangerFor is how long this node waits for a process that holds a partition to become a member in its own view.
const strangerFor = 2 * int64(time.Second)

// strange reports whether this node waits for a process to come into its view (noteStranger). Of two nodes that start
// at the same time, one may hear of the other's claims before gossip tells it of the other. The other's partitions are
// not lost: this node must not claim them.
func (c *Core) strange(n Node) bool { return c.awake < c.strangers[n] }

// noteStranger notes a process that holds a partition and is not in this node's view yet, as the process itself or a
// member that sees it has reported. While the process is in strangers, further reports do not start the wait again:
// this node may never see a process that members see, and then it must claim. onQueryReply makes an exception for the
// process's own reports during the wait.
func (c *Core) noteStranger(n Node) {
	if _, met := c.strangers[n]; n != (Node{}) && !met && !c.lives(n) {
		c.strangers[n] = c.awake + strangerFor
	}
}

// noteDeparted updates strangers for a new view. A process that has left the view stays in strangers for strangerFor,
// without a wait, so that late reports do not start one. So does a process whose wait has ended. After that, a report
// starts a new wait.
func (c *Core) noteDeparted(before map[Node]int32) {
	for n := range before {
		if !c.lives(n) {
			c.strangers[n] = c.awake
		}
	}
	maps.DeleteFunc(c.strangers, func(n Node, until int64) bool { return c.lives(n) || c.awake-until > strangerFor })
}

// ask begins a round about the given partitions. parts must be sorted: the function asking does a binary search in it.
// There is one round at a time: while one is in progress, ask continues it and ignores parts.
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

// asking reports whether this node is asking about a partition, and so may be about to claim it.
func (c *Core) asking(p int) bool {
	if c.round == nil || !c.mayAsk(p) {
		return false
	}
	_, asked := slices.BinarySearch(c.round.parts, p)
	return asked
}

// onQuery answers a Query. Receive's caller has checked the partition numbers, here and in replies.
func (c *Core) onQuery(from Node, q *Query) {
	reply := &QueryReply{ID: q.ID, Infos: make([]Info, 0, len(q.Partitions))}
	for _, p := range q.Partitions {
		pt := &c.parts[p]
		info := Info{Partition: p, Claiming: c.asking(p) || c.awaitsCopies(p), Term: pt.known, Copy: pt.copy}
		if c.lives(pt.holder) {
			info.Holder = pt.holder // only if this node sees it: otherwise the receiver would wait for a lost process
		}
		if pt.held {
			// pt.known may be another process's term; the receiver would take it for this node's. A holder has no copy:
			// Copy says what its disk has.
			info.Held, info.Term, info.Holder, info.Copy = true, pt.term, c.cfg.Self, Position{Term: pt.saved}
		}
		reply.Infos = append(reply.Infos, info)
	}
	c.send(from, reply)
}

// tellEvery is the least time between two messages that tell all members of newly held partitions.
const tellEvery = 500 * int64(time.Millisecond)

// tell tells all members of the partitions that this node has begun to hold, and again when its disk has all of one
// (progressSaved, disk.go).
func (c *Core) tell() {
	if len(c.gained) == 0 || c.t < c.tellAt {
		return
	}
	c.tellAt = c.t + tellEvery
	slices.Sort(c.gained) // a partition that got several terms is in the list several times, and is told of once
	c.announce(slices.Compact(c.gained), func(Node) bool { return true })
	c.gained = c.gained[:0]
}

// tellNew tells the members that were not in the view before of everything that this node holds.
func (c *Core) tellNew(before map[Node]int32) {
	var held []int
	for p := range c.parts {
		if c.parts[p].held {
			held = append(held, p)
		}
	}
	c.announce(held, func(n Node) bool { _, old := before[n]; return !old })
}

// announce tells members which of the given partitions this node holds, by a QueryReply that answers no Query. The
// members need this for four purposes:
//
//   - They send checks to this node (Route).
//   - They do not claim the partition while they do not see this node as a member yet (noteStranger).
//   - They know that the partition had a holder. If later this holder and all copies are lost, the member that claims
//     calls Data.Cold: new keys then start without units left, where their policy asks for that.
//   - They bring what their disks have of the partition, or delete it (heardHeld, disk.go).
func (c *Core) announce(partitions []int, to func(Node) bool) {
	news := &QueryReply{}
	for _, p := range partitions {
		if pt := &c.parts[p]; pt.held {
			news.Infos = append(news.Infos, // Copy is as in onQuery
				Info{Partition: p, Held: true, Term: pt.term, Holder: c.cfg.Self, Copy: Position{Term: pt.saved}})
		}
	}
	if len(news.Infos) == 0 {
		return
	}
	for _, m := range c.view.Members {
		if m.Node != c.cfg.Self && to(m.Node) {
			c.send(m.Node, news)
		}
	}
}

// onQueryReply takes in an announcement (ID 0), or an answer of the round in progress. Other answers tell heardHeld
// what the sender holds, and nothing else; leave.go asks for that.
func (c *Core) onQueryReply(from Node, q *QueryReply) {
	for i := range q.Infos {
		c.heardHeld(from, &q.Infos[i])
	}
	if q.ID == 0 {
		if c.strange(from) {
			delete(c.strangers, from) // the wait starts again, because the process itself reports what it holds
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
	best, from := pt.copy, c.cfg.Self // the newest copy, and the node that has it
	var held *Info                    // of the holder; of several, of the one under the highest term
	wait := int64(0)                  // for a member that claims as well
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
			// This node has the lower name. The other one waits only if it has heard that this node claims. So this
			// node waits as well, for a shorter time.
			wait = max(wait, retryAfter/2)
		}
		c.learn(p, info.Term, info.Holder) // may replace pt.known and pt.holder
		// A holder is no stranger if this node sees another process of its name. Usually this other process has
		// replaced the holder, and the member does not see that yet. If it is the earlier process, and the holder has
		// replaced it, this node may claim what the holder has; later the two contents are joined (move.go).
		if _, replaced := c.named[info.Holder.Name]; !replaced {
			c.noteStranger(info.Holder)
		}
		if best.before(info.Copy) && c.lives(source) {
			best, from = info.Copy, source
		}
	}
	switch {
	case held != nil:
		c.learn(p, held.Term, held.Holder)
		pt.askAt = c.t + askAgain
	case wait > 0:
		pt.askAt = c.t + wait
	case c.mayHold(p, r) || c.strange(pt.holder):
		pt.askAt = c.t + retryAfter
	case from != c.cfg.Self:
		pt.askAt = c.t + retryAfter
		c.send(from, &Entrust{Partition: p, Term: pt.known})
	default:
		c.claim(p)
	}
}

// mayHold reports whether the last known holder may hold a partition although no answer of the round says that a
// process does. This is so if it is alive, and:
//
//   - it was not asked, because it became a member after the round had begun; or
//   - it has answered that it knows only lower terms than known: it may have claimed the partition after that.
//
// A holder that was asked and is silent does not count.
func (c *Core) mayHold(p int, r *round) bool {
	pt := &c.parts[p]
	if pt.holder == c.cfg.Self || !c.lives(pt.holder) || r.missing[pt.holder] {
		return false
	}
	denies := func(a answer) bool { return a.from == pt.holder && !a.Term.Less(pt.known) }
	return !slices.ContainsFunc(r.answers[p], denies)
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
	c.learn(e.Partition, e.Term, Node{}) // if the term is new to this node, it does not know the holder
	// A leaving node claims as well: no other process has this copy. It hands the partition over afterwards.
	if !pt.held && pt.copy != (Position{}) && (c.view.Settled || c.view.Leaving) && pt.incoming.from == (Node{}) {
		c.claim(e.Partition)
	}
}

// claim makes this node the holder of a partition that no process hands over, under a term above every known one. Its
// content is this node's copy, or what this node still holds. If nothing of an earlier holder is missing in it beyond
// what durability allows, it is current. If it is not current and the partition had a holder, claim calls Data.Cold:
// what that holder counted is lost.
func (c *Core) claim(p int) {
	pt := &c.parts[p]
	hadHolder := pt.known != (Term{})
	frozen := pt.held // for a move, and the receiver was lost
	current := frozen || pt.copy != (Position{}) && !pt.copy.Term.Less(pt.known)
	restored := pt.restored // the copy was on the disk when this process started; it may be current or not
	if !frozen && pt.copy == (Position{}) {
		c.data.Discard(p) // a copy that was never complete
	}
	c.endIncoming(p)
	t := c.next(p)
	c.data.TakeOver(p, c.now.Instant)
	c.endRestored(p)
	// The origin is the term that the history of a content began with. A copy from a disk that comes later is joined
	// with this content if its origin is another one, and dropped as an older state of this content if it is the same
	// (takeJoin). So the content gets a new origin if such a copy may have what it lacks: it is not current, or it is
	// from this node's disk and members are absent whose disks may have a newer copy.
	if !current || (restored && len(c.absent) > 0) || pt.origin == (Term{}) {
		pt.origin = t
	}
	// strictness.earlier lets resolve (grant.go) leave no units to the keys of strict rules, if no voter knows an
	// earlier holder. A current copy from the disk does not set it: if no voter knows an earlier holder of it, the
	// voters were restarted as well, and resolve accepts the copy as complete.
	earlier := hadHolder && !(restored && current)
	*pt.strict = strictness{earlier: earlier, copy: pt.copy, from: pt.copyFrom}
	if hadHolder && !current {
		c.data.Cold(p, c.now.Instant)
	}
	c.hold(p, t)
	c.open(p)
	c.grants.urgent = true
	switch {
	case !hadHolder:
		c.note("claimed", p, Node{}, "new")
	case restored:
		c.note("claimed", p, Node{}, "from the disk") // even if the copy was not current
	case current:
		c.note("claimed", p, Node{}, "from a copy")
	default:
		c.note("claimed", p, Node{}, "without a current copy")
	}
	c.wantBackup(p)
}
