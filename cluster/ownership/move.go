package ownership

import (
	"hash/crc32"
	"slices"
)

// move is a hand-over in progress, at the one who gives away.
type move struct {
	to       Node
	slot     Slot
	accepted bool
	merge    bool
	sent     int64
	commit   *Commit // not nil: frozen, and this is what is repeated until it is answered
}

// commitment is what a partition was taken over by, kept so that a repeated Commit gets the same answer: also when it has been
// handed on since, for the giver would otherwise go on as if nobody had taken it.
type commitment struct {
	from Node
	term Term
	ack  *CommitAck
}

// incoming is a hand-over or replication in progress, at the one who receives.
type incoming struct {
	sender   Node // of the stream that is being received
	last     uint64
	part     int32
	staged   bool // into the staging area
	complete bool // the staging area holds a whole copy (only when merging; otherwise it has become the content)
	merge    bool
	pieces   []byte
	heard    int64 // when the last piece came, by Core.awake
	from     Node  // of an accepted offer; nobody when there is none. Another may send a copy meanwhile
	word     int64 // when it last offered, or sent a piece, by Core.awake
}

// considerMove starts giving away a partition that another member should hold.
func (c *Core) considerMove(p int) {
	pt := &c.parts[p]
	to := c.owner(p)
	if to == (Node{}) || to == c.cfg.Self || !c.lives(to) || !c.view.Settled && !c.view.Leaving ||
		c.moving >= c.cfg.Moves || c.t < pt.askAt || pt.incoming.from != (Node{}) || c.unresolved(p) && !c.view.Leaving {
		return
	}
	c.moving++
	pt.move = &move{to: to}
	c.offer(p)
}

func (c *Core) offer(p int) {
	pt := &c.parts[p]
	pt.move.sent = c.t
	c.send(pt.move.to, &Offer{Partition: p, Term: pt.term})
}

func (c *Core) onOffer(from Node, o *Offer) {
	p := o.Partition
	pt := &c.parts[p]
	verdict := Accepted
	switch {
	case !c.mine(p) || c.view.Leaving || !c.lives(from):
		verdict = Refused
	case !pt.held && o.Term.Less(pt.known) && pt.holder != from && c.lives(pt.holder):
		verdict = Refused // whoever has the higher term comes first: this one's is to be merged into that
	case pt.incoming.from == from:
		// Asked again: the answer was lost, or it is another attempt.
		if pt.held {
			verdict = Merging
		}
	case pt.incoming.from != (Node{}) || c.arriving >= 4*c.cfg.Moves:
		verdict = Refused
	case pt.held && (pt.standing == Frozen || pt.move != nil):
		verdict = Refused
	case pt.held:
		verdict = Merging
	}
	if !pt.held {
		c.learn(p, o.Term, from)
	} else if pt.known.Less(o.Term) {
		pt.known = o.Term // whatever comes of it, this node's next term is to be above
	}
	if verdict != Refused {
		if pt.incoming.from == (Node{}) {
			c.arriving++
		}
		pt.incoming.from, pt.incoming.merge, pt.incoming.word = from, pt.held, c.awake
	}
	c.send(from, &OfferReply{Partition: p, Term: o.Term, Verdict: verdict})
}

func (c *Core) endIncoming(p int) {
	in := &c.parts[p].incoming
	c.buffered -= len(in.pieces)
	if in.from != (Node{}) {
		c.arriving--
	}
	*in = incoming{}
}

// endOffer forgets an accepted offer. What it was to be merged with goes too; a copy stays and goes on, for another process may send
// it, or the same one as to its backup.
func (c *Core) endOffer(p int) {
	in := &c.parts[p].incoming
	if c.parts[p].held {
		c.endIncoming(p)
	} else if in.from != (Node{}) {
		c.arriving--
		in.from, in.merge = Node{}, false
	}
}

func (c *Core) onOfferReply(from Node, r *OfferReply) {
	pt := &c.parts[r.Partition]
	m := pt.move
	if m == nil || m.to != from || m.accepted || r.Term != pt.term {
		return
	}
	if r.Verdict == Refused {
		c.endMove(r.Partition)
		pt.askAt = c.t + retryAfter
		return
	}
	m.accepted, m.merge = true, r.Verdict == Merging
	f := &pt.followers[Backup]
	switch {
	case m.merge && f.node == from:
		c.dropFollower(r.Partition, Backup, "it holds the partition too")
		fallthrough
	case f.node != from:
		m.slot = Target
		c.follow(r.Partition, Target, from, true)
	default:
		m.slot = Backup
		f.all = true
		c.data.Widen(r.Partition, Backup)
	}
	c.pump(r.Partition, m.slot)
	c.tendMove(r.Partition)
}

// tendMove takes a move its next step.
func (c *Core) tendMove(p int) {
	pt := &c.parts[p]
	m := pt.move
	switch {
	case m.commit != nil:
		if c.t-m.sent >= commitAgain {
			m.sent = c.t
			c.sendAgain(m.to, m.commit)
		}
	case !m.accepted:
		if c.owner(p) != m.to {
			c.endMove(p)
		} else if c.t-m.sent >= retryAfter {
			c.offer(p)
		}
	case pt.followers[m.slot].node != m.to, pt.standing == Owned && c.owner(p) != m.to:
		// It was lost as a follower, or is no longer the one who should have it.
		frozen := pt.standing == Frozen
		c.endMove(p)
		if frozen {
			c.raise(p) // nothing was committed, and nobody else decides
		}
	case pt.standing == Owned:
		if c.upToDate(p) {
			c.freeze(p)
		}
	case pt.followers[m.slot].unacked == nil && (m.slot == Backup || !c.confirmFirst(p)):
		c.commit(p)
	}
}

// upToDate says whether so little is left to send of a partition on its way that it can be frozen.
func (c *Core) upToDate(p int) bool {
	pt := &c.parts[p]
	m := pt.move
	if m == nil || !m.accepted || pt.standing != Owned || c.owner(p) != m.to {
		return false
	}
	f := &pt.followers[m.slot]
	return f.node == m.to && f.caught && f.unacked == nil && c.data.Pending(p, m.slot) <= freezeBelow
}

// freeze ends deciding. From here on the partition is either handed over or, when the receiver says that it has not
// taken it, held under a new term.
func (c *Core) freeze(p int) {
	pt := &c.parts[p]
	c.data.Shut(p)
	c.closeStrict(p)
	pt.standing = Frozen
	c.publish(p)
	c.tendMove(p)
}

// commit sends what is left, the last of it together with the proof of release.
func (c *Core) commit(p int) {
	pt := &c.parts[p]
	m, f := pt.move, &pt.followers[pt.move.slot]
	chunk, version, more := c.data.Drain(p, m.slot, c.now.Instant, chunkBytes)
	if more || len(chunk) > pieceBytes {
		f.clean = false
		c.sendFlight(p, m.slot, c.load(f, chunk, version, false))
		return
	}
	f.sequence++
	m.commit = &Commit{
		Replicate: Replicate{
			Partition: p, Term: pt.term, Sequence: f.sequence, Part: 0, Parts: 1, Chunk: chunk, Sum: sum(chunk),
		},
		Known: pt.known, Release: c.cfg.Self, Merge: m.merge, Granted: pt.strict.whole,
	}
	// Whatever term the receiver takes: should it be lost at once, this node's next claim is to be above.
	pt.known = c.next(p)
	m.sent = c.t
	c.send(m.to, m.commit)
}

func sum(chunk []byte) uint32 { return crc32.Checksum(chunk, crc32.MakeTable(crc32.Castagnoli)) }

// endMove forgets a move.
func (c *Core) endMove(p int) {
	pt := &c.parts[p]
	if pt.move == nil {
		return
	}
	c.moving--
	c.stir = true
	pt.move = nil
	if pt.followers[Target].node != (Node{}) {
		c.dropFollower(p, Target, "")
	}
}

// onCommit takes a partition over.
func (c *Core) onCommit(from Node, m *Commit) {
	p := m.Partition
	pt := &c.parts[p]
	if ack := pt.answered(from, m.Term); ack != nil {
		if ack.Keep && !(pt.held && pt.followers[Backup].node == from) {
			late := *ack
			late.Keep = false // its copy is not followed up any more
			c.send(from, &late)
		} else {
			c.sendAgain(from, ack)
		}
		return
	}
	in := &pt.incoming
	ack := &CommitAck{Partition: p, Term: m.Term}
	fits := in.sender == from && m.Sequence == in.last+1 && len(in.pieces) == 0 && m.Sum == sum(m.Chunk)
	switch {
	case pt.held && !(in.from == from && in.merge && m.Merge):
		ack.Outcome, ack.Known, ack.Holder = Conflict, pt.term, c.cfg.Self
	case pt.held && (pt.standing == Frozen || !in.complete || !fits):
		ack.Outcome = Again
	case pt.held:
		ack.Outcome = c.absorb(p, from, m)
	case m.Term.Less(pt.known) && m.Known.Less(pt.known):
		// The sender could not tell which term this node is about to take.
		ack.Outcome, ack.Known, ack.Holder = Superseded, pt.known, pt.holder
	case !fits || pt.copyFrom != from || pt.copy == (Position{}) || m.Merge:
		ack.Outcome = Again
	case len(m.Chunk) > 0 && c.data.Apply(p, false, c.now.Instant, m.Chunk) != nil:
		ack.Outcome = Again
		c.dropCopy(p)
	default:
		ack.Outcome = Done
		*pt.strict = strictness{earlier: true, release: Release{Node: m.Release, Term: m.Term}, releaseWhole: m.Granted}
		c.learn(p, m.Known, Node{})
		c.learn(p, m.Term, from)
		c.endIncoming(p)
		c.hold(p, c.next(p))
		c.note("took over", p, from, "")
	}
	if ack.Outcome == Again {
		c.endIncoming(p)
	}
	if ack.Outcome == Done {
		ack.New = pt.term
		c.grants.urgent = true
		if f := &pt.followers[Backup]; f.node == (Node{}) && c.member(c.view.Backups, p) == from && !m.Merge {
			// The one who gave it away has exactly this content.
			c.followCurrent(p, from)
			ack.Keep, ack.Sequence = true, f.sequence
		}
		c.open(p)
		c.wantBackup(p)
	}
	if ack.Outcome == Done {
		c.remember(p, commitment{from: from, term: m.Term, ack: ack})
	}
	c.send(from, ack)
}

// answered is the answer that a Commit has got before; nil when there is none.
func (pt *part) answered(from Node, term Term) *CommitAck {
	for i := range pt.committed {
		if e := &pt.committed[i]; e.from == from && e.term == term {
			return e.ack
		}
	}
	return nil
}

// remember keeps the answer to a Commit for as long as that may be repeated: until the same process, which has to have had an
// answer, sends another, or is lost.
func (c *Core) remember(p int, e commitment) {
	pt := &c.parts[p]
	pt.committed = slices.DeleteFunc(pt.committed, func(old commitment) bool { return old.from == e.from || !c.lives(old.from) })
	pt.committed = append(pt.committed, e)
}

// absorb merges a staged copy, brought up to its holder's last change, into a partition that is held here as well.
func (c *Core) absorb(p int, from Node, m *Commit) Outcome {
	pt := &c.parts[p]
	if len(m.Chunk) > 0 && c.data.Apply(p, true, c.now.Instant, m.Chunk) != nil || c.data.Merge(p, c.now.Instant) != nil {
		return Again
	}
	c.endIncoming(p)
	if pt.known.Less(m.Known) {
		pt.known = m.Known
	}
	c.raise(p)
	pt.strict.release, pt.strict.releaseWhole = Release{Node: m.Release, Term: m.Term}, m.Granted
	c.noteBefore("merged", p, m.Term, from, "")
	return Done
}

func (c *Core) onCommitAck(from Node, a *CommitAck) {
	p := a.Partition
	pt := &c.parts[p]
	m := pt.move
	if m == nil || m.commit == nil || m.to != from || a.Term != pt.term {
		return
	}
	switch a.Outcome {
	case Done:
		c.released(p, a)
	case Again, Superseded, Conflict:
		// It has not taken the partition. A message of this attempt that is still on its way must not make it do so later:
		// the new term sees to that.
		if pt.known.Less(a.Known) {
			pt.known = a.Known
		}
		slot := m.slot
		c.endMove(p)
		if slot == Backup {
			c.dropFollower(p, Backup, "it could not take over")
		}
		pt.askAt = c.t + retryAfter
		c.raise(p)
		c.note("move failed, going on", p, from, "")
	}
}

// released ends holding a partition that another process has taken over.
func (c *Core) released(p int, a *CommitAck) {
	pt := &c.parts[p]
	to := pt.move.to
	// Everything that was admitted is in the receiver's content. But should the receiver be lost before it has a grant, it is
	// the backup that the voters have recorded who is believed: strict answers that it has not confirmed are not given.
	b := &pt.followers[Backup]
	strict := c.grants.voters == 0 || b.named && b.node == to
	c.out.Confirmed = append(c.out.Confirmed, Progress{Partition: p, Version: versionsDone, Unguarded: !strict})
	c.endMove(p)
	for s := range pt.followers {
		if f := &pt.followers[s]; f.node != (Node{}) {
			if f.node != to {
				c.send(f.node, &Forget{Partition: p, Term: pt.term})
			}
			c.data.Detach(p, Slot(s))
			*f = follower{}
		}
	}
	pt.held, pt.standing = false, Elsewhere
	*pt.strict = strictness{}
	pt.known, pt.holder, pt.hintView = a.New, to, c.views
	if a.Keep {
		pt.copy, pt.copyFrom = Position{Term: a.New, Sequence: a.Sequence}, to
		c.endIncoming(p)
		pt.incoming.sender, pt.incoming.last = to, a.Sequence
	} else {
		c.dropCopy(p)
	}
	c.publish(p)
	c.out.Notes = append(c.out.Notes, Note{What: "handed over", Partition: p, Term: a.New, Other: to})
}

// dropCopy gives up what this node has of a partition that it does not hold.
func (c *Core) dropCopy(p int) {
	pt := &c.parts[p]
	pt.copy, pt.copyFrom = Position{}, Node{}
	c.data.Discard(p)
}
