package ownership

import "maps"

// This file hands a partition over to another process, and merges one that both processes hold after a split.
//
// The path of a move, giver on the left:
//
//	considerMove: Offer         -> onOffer: Accepted, Merging (the receiver holds the partition too) or Refused
//	entries (follow.go)         -> a copy, or with Merging a staging area, that is brought up to date
//	freeze: few keys are left; the giver stops deciding
//	commit: Commit, with the    -> onCommit: takes the last changes, holds the partition under a higher term, decides
//	last changes and the release
//	onCommitAck: released       <- CommitAck
//
// The giver repeats the Commit until it is answered, and the receiver remembers its answer (committed). Only an answer
// other than Done, or the loss of the receiver, lets the giver decide again, each under a new term: a late copy of the
// Commit then has a term that is too low. So no instant has two holders of one move.

// move is a hand-over in progress, at the giver.
type move struct {
	to       Node
	slot     Slot
	accepted bool
	merge    bool
	sent     int64
	commit   *Commit // nil until the partition is frozen and everything else is sent; repeated until it is answered
}

// incoming is a move or a copy in progress, at the receiver.
type incoming struct {
	sender     Node   // of the entries that are being received
	attachment uint64 // of these entries
	staged     bool   // entries go into the staging area
	origin     Term   // of the content of these entries
	// The staging area holds a whole copy, of a merge; in other moves the whole copy becomes the content.
	complete bool
	// Of an accepted offer; the zero Node: none. Another process may send a copy meanwhile. A holder merges.
	from Node
	word int64 // when from last offered, or sent an entry, by Core.awake
}

// considerMove begins to give away a partition that another member should hold.
func (c *Core) considerMove(p int) {
	pt := &c.parts[p]
	to := c.owner(p)
	if to == (Node{}) || to == c.cfg.Self || !c.lives(to) || !c.view.Settled && !c.view.Leaving ||
		c.moving >= c.cfg.Moves || c.t < pt.askAt || pt.incoming.from != (Node{}) ||
		c.unresolved(p) && !c.view.Leaving {
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
	case !c.mine(p) || pt.restored || c.view.Leaving || !c.lives(from):
		verdict = Refused
	case !pt.held && o.Term.Less(pt.known) && pt.holder != from && c.lives(pt.holder):
		verdict = Refused // the live holder of the higher term comes first; this content is merged into that one's
	case pt.incoming.from == from:
		// A repeat: the answer was lost, or the giver tries again.
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
	} else {
		pt.exceed(o.Term)
	}
	if verdict != Refused {
		if pt.incoming.from == (Node{}) {
			c.arriving++
		}
		pt.incoming.from, pt.incoming.word = from, c.awake
	}
	c.send(from, &OfferReply{Partition: p, Term: o.Term, Verdict: verdict})
}

// endIncoming forgets the move or copy that is being received.
func (c *Core) endIncoming(p int) {
	in := &c.parts[p].incoming
	if in.from != (Node{}) {
		c.arriving--
	}
	*in = incoming{}
}

// endOffer forgets an accepted offer. The staging area of a merge goes with it. A copy stays and is continued: another
// process may send it, or the same one to its backup.
func (c *Core) endOffer(p int) {
	in := &c.parts[p].incoming
	if c.parts[p].held {
		c.endIncoming(p)
	} else if in.from != (Node{}) {
		c.arriving--
		in.from = Node{}
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

// tendMove takes a move its next step: offer again, give up, freeze, commit, or repeat the commit.
func (c *Core) tendMove(p int) {
	pt := &c.parts[p]
	m := pt.move
	switch {
	case m.commit != nil:
		if c.t-m.sent >= commitAgain {
			m.sent = c.t
			c.send(m.to, m.commit)
		}
	case !m.accepted:
		if c.owner(p) != m.to {
			c.endMove(p)
		} else if c.t-m.sent >= retryAfter {
			c.offer(p)
		}
	case pt.followers[m.slot].node != m.to, pt.standing == Owned && c.owner(p) != m.to:
		// The receiver was dropped as a follower, or the ring does not name it any more.
		c.abandon(p)
	case pt.standing == Owned:
		if c.upToDate(p) {
			c.freeze(p)
		}
	case !pt.followers[m.slot].inFlight() && (m.slot == Backup || !c.confirmFirst(p)) && !c.saveFirst(p):
		c.commit(p)
	}
}

// upToDate reports whether so few changes of a moving partition are left to send that it can be frozen.
func (c *Core) upToDate(p int) bool {
	pt := &c.parts[p]
	m := pt.move
	if m == nil || !m.accepted || pt.standing != Owned || c.owner(p) != m.to {
		return false
	}
	f := &pt.followers[m.slot]
	return f.node == m.to && f.caught && !f.inFlight() && c.data.Pending(p, m.slot) <= freezeBelow
}

// freeze stops deciding for a partition. Afterwards it is handed over, or this node holds it on under a new term.
func (c *Core) freeze(p int) {
	pt := &c.parts[p]
	c.data.Shut(p)
	c.closeStrict(p)
	pt.standing = Frozen
	c.publish(p)
	c.tendMove(p)
}

// commit sends the last changes; the last message is the Commit, with the proof of release. Nothing else of the
// partition is in flight then, so the order of Commit and log does not matter.
func (c *Core) commit(p int) {
	pt := &c.parts[p]
	m, f := pt.move, &pt.followers[pt.move.slot]
	chunk, version, more := c.data.Drain(p, m.slot, c.now.Instant, chunkBytes)
	if more || len(chunk) > pieceBytes {
		f.clean = false
		c.load(p, f, chunk, version, false)
		return
	}
	m.commit = &Commit{
		Partition: p, Term: pt.term, Attachment: f.attachment, Chunk: chunk, Sum: sum(chunk),
		Known: pt.known, Merge: m.merge, Granted: pt.strict.whole,
	}
	// If the receiver is lost at once, this node's next claim must be above the term that it took.
	pt.known = c.next(p)
	m.sent = c.t
	c.send(m.to, m.commit)
}

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

// abandon ends a move of which nothing was committed, so that no other process decides.
func (c *Core) abandon(p int) {
	frozen := c.parts[p].standing == Frozen
	if c.endMove(p); frozen {
		c.raise(p)
	}
}

// onCommit takes a partition over.
func (c *Core) onCommit(from Node, m *Commit) {
	p := m.Partition
	pt := &c.parts[p]
	if ack := pt.committed[from]; ack != nil && ack.Term == m.Term {
		if ack.Keep && !(pt.held && pt.followers[Backup].node == from) {
			late := *ack
			late.Keep = false // its copy is not followed up any more
			c.send(from, &late)
		} else {
			c.send(from, ack)
		}
		return
	}
	in := &pt.incoming
	ack := &CommitAck{Partition: p, Term: m.Term}
	fits := in.sender == from && m.Attachment == in.attachment && m.Sum == sum(m.Chunk)
	switch {
	case pt.held && !(in.from == from && m.Merge):
		ack.Outcome, ack.Known = Conflict, pt.term
	case pt.held && (pt.standing == Frozen || !in.complete || !fits):
		ack.Outcome = Again
	case pt.held:
		ack.Outcome = c.absorb(p, from, m)
	case m.Term.Less(pt.known) && m.Known.Less(pt.known):
		// The giver does not know of the highest term, so it could not tell which term this node would take.
		ack.Outcome, ack.Known = Superseded, pt.known
	case !fits || pt.copyFrom != from || pt.copy == (Position{}) || m.Merge:
		ack.Outcome = Again
	case len(m.Chunk) > 0 && c.data.Apply(p, false, c.now.Instant, m.Chunk) != nil:
		ack.Outcome = Again
		c.dropCopy(p)
	default:
		ack.Outcome = Done
		*pt.strict = strictness{earlier: true, release: Release{Node: from, Term: m.Term}, releaseWhole: m.Granted}
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
			// The giver has exactly this content.
			c.followCurrent(p, from)
			ack.Keep, ack.Attachment = true, f.attachment
		}
		c.open(p)
		c.wantBackup(p)
		c.remember(p, from, ack)
	}
	c.send(from, ack)
}

// remember keeps the answer to a Commit while it may be repeated: until its giver sends another Commit, which it does
// only after an answer, or is lost. A repeated Commit gets the same answer, even after the partition has been handed
// on: otherwise the giver would decide again.
func (c *Core) remember(p int, giver Node, ack *CommitAck) {
	pt := &c.parts[p]
	maps.DeleteFunc(pt.committed, func(n Node, _ *CommitAck) bool { return !c.lives(n) })
	if pt.committed == nil {
		pt.committed = make(map[Node]*CommitAck)
	}
	pt.committed[giver] = ack
}

// absorb merges a staged copy, which the Commit brings up to its holder's last change, into a partition that this node
// holds as well.
func (c *Core) absorb(p int, from Node, m *Commit) Outcome {
	pt := &c.parts[p]
	if len(m.Chunk) > 0 && c.data.Apply(p, true, c.now.Instant, m.Chunk) != nil ||
		c.data.Merge(p, c.now.Instant) != nil {
		return Again
	}
	c.endIncoming(p)
	pt.exceed(m.Known)
	c.raise(p)
	pt.strict.release, pt.strict.releaseWhole = Release{Node: from, Term: m.Term}, m.Granted
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
		// The receiver has not taken the partition. A message of this attempt may still be on its way; the new term
		// keeps the receiver from taking the partition by it later.
		pt.exceed(a.Known)
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

// released stops holding a partition that another process has taken over.
func (c *Core) released(p int, a *CommitAck) {
	pt := &c.parts[p]
	to := pt.move.to
	// The receiver's content has everything that was admitted. But if the receiver is lost before it has a grant, the
	// voters believe the backup that they have recorded. So strict answers that this backup has not confirmed are not
	// given.
	b := &pt.followers[Backup]
	strict := c.grants.voters == 0 || b.named && b.node == to
	c.out.Confirmed = append(c.out.Confirmed, Progress{Partition: p, Version: versionsDone, Unguarded: !strict})
	if pt.followers[Disk].node != (Node{}) {
		c.out.Confirmed = append(c.out.Confirmed,
			Progress{Partition: p, Version: versionsDone, Saved: true, Unguarded: c.unsaved(p)})
	}
	c.endMove(p)
	for s := range pt.followers {
		if f := &pt.followers[s]; f.node != (Node{}) {
			if f.node != to && Slot(s) != Disk {
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
		pt.copy, pt.copyFrom = Position{Term: a.New, Attachment: a.Attachment}, to
		c.endIncoming(p)
		pt.incoming.sender, pt.incoming.attachment = to, a.Attachment
		c.saveBackup(p)
	} else {
		c.dropCopy(p)
	}
	c.publish(p)
	c.out.Notes = append(c.out.Notes, Note{What: "handed over", Partition: p, Term: a.New, Other: to})
}

// dropCopy drops the copy of a partition that this node does not hold.
func (c *Core) dropCopy(p int) {
	pt := &c.parts[p]
	pt.copy, pt.copyFrom = Position{}, Node{}
	c.data.Discard(p)
	c.unsaveBackup(p)
}
