package ownership

import "maps"

// This file moves a partition from its holder, the giver, to the node that the ring gives it to, the receiver. If the
// receiver holds the partition as well, as after a split, the move merges the two contents.
//
// The path of a move, giver on the left:
//
//	considerMove: Offer          -> onOffer: Accepted, Merging (the receiver holds the partition too) or Refused
//	entries (follow.go)          -> takeIn: a copy; with Merging a staging area
//	freeze, at freezeBelow pending keys: the giver stops deciding
//	commit: Commit, which has    -> onCommit: takes the last changes, holds the partition under a higher term, decides
//	the last changes
//	onCommitAck, released        <- CommitAck
//
// What keeps a move from having two holders: The giver repeats the Commit until the receiver answers it. The receiver
// repeats its answer (remember). The giver decides again only if the answer is not Done, or if the receiver is lost. It
// then raises its term, so that the term of a late copy of the Commit is too low.
//
// Words:
//
//	slot       the giver's follower that the receiver is: Backup if it is the backup already, otherwise Target
//	frozen     of a partition: the giver holds it and does not decide, because the Commit is about to have the content
//	committed  the Commit has been sent. Before that, the giver can abandon the move
//	release    the giver's node and term, from a Commit. It proves to voters that the giver has given up the term
//
// Other files must keep: only commit drains the receiver's changes of a frozen partition; a partition does not stay
// frozen without a move.

// move is a move in progress, at the giver.
type move struct {
	to       Node
	slot     Slot // with accepted
	accepted bool
	merge    bool    // the receiver holds the partition too
	sent     int64   // when the last Offer or Commit was sent
	commit   *Commit // nil until the partition is frozen and everything else is acknowledged
}

// incoming is the copy that this node receives, and the offer that it has accepted.
type incoming struct {
	sender     Node   // of the entries of the copy; the zero Node: none are received
	attachment uint64 // of these entries
	staged     bool   // entries go into the staging area
	origin     Term   // of the content that these entries copy
	complete   bool   // of a merge: the staging area has a whole copy
	from       Node   // the giver of the accepted offer; the zero Node: none. sender may be another process
	word       int64  // when from last offered, or sent an entry, by Core.awake
}

// considerMove begins to give away a partition that the ring gives to another member.
func (c *Core) considerMove(p int) {
	pt := &c.parts[p]
	to := c.owner(p)
	if to == (Node{}) || to == c.cfg.Self || !c.lives(to) || !c.view.Settled && !c.view.Leaving ||
		c.moving >= maxMoves || c.t < pt.askAt || pt.incoming.from != (Node{}) ||
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
		verdict = Refused // the live holder of the higher term must offer first; the giver's content is merged later
	case pt.incoming.from == from:
		// A repeat: the answer was lost, or the giver tries again.
		if pt.held {
			verdict = Merging
		}
	case pt.incoming.from != (Node{}) || c.arriving >= 4*maxMoves:
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

// endIncoming forgets the accepted offer and the copy that this node receives.
func (c *Core) endIncoming(p int) {
	in := &c.parts[p].incoming
	if in.from != (Node{}) {
		c.arriving--
	}
	*in = incoming{}
}

// endOffer forgets an accepted offer. At a holder, it forgets what has been received for the merge too. Otherwise the
// copy is continued: another process may send it, or the giver, which may keep this node as its backup.
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

// tendMove takes a move one step further: it repeats the Offer, ends the move, freezes, commits, or repeats the Commit.
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

// upToDate reports whether a partition can be frozen for its move: the receiver has a whole copy, nothing is in flight,
// and at most freezeBelow keys are pending.
func (c *Core) upToDate(p int) bool {
	pt := &c.parts[p]
	m := pt.move
	if m == nil || !m.accepted || pt.standing != Owned || c.owner(p) != m.to {
		return false
	}
	f := &pt.followers[m.slot]
	return f.node == m.to && f.caught && !f.inFlight() && c.data.Pending(p, m.slot) <= freezeBelow
}

// freeze stops deciding on a partition, for the last step of a move.
func (c *Core) freeze(p int) {
	pt := &c.parts[p]
	c.data.Shut(p)
	c.closeStrict(p)
	pt.standing = Frozen
	c.publish(p)
	c.tendMove(p)
}

// commit sends the last changes of a frozen partition. If they fit into one piece, they go in the Commit; otherwise
// they go into the log, and commit is called again when they are acknowledged. So nothing else of the partition is in
// flight to the receiver when the Commit is sent, and the order of Commit and log does not matter.
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
	// The receiver takes the next term. If it is lost after that, this node must claim under a higher one.
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

// abandon ends a move that is not committed. If the partition is frozen, this node decides again, under a higher term.
func (c *Core) abandon(p int) {
	frozen := c.parts[p].standing == Frozen
	if c.endMove(p); frozen {
		c.raise(p)
	}
}

// onCommit takes a partition over, or merges the giver's content into this node's.
func (c *Core) onCommit(from Node, m *Commit) {
	p := m.Partition
	pt := &c.parts[p]
	if ack := pt.committed[from]; ack != nil && ack.Term == m.Term {
		if ack.Keep && !(pt.held && pt.followers[Backup].node == from) {
			late := *ack
			late.Keep = false // this node sends the giver no changes for its copy any more
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
		// The giver does not know pt.known. If this node took a term above pt.known and were lost, the giver might
		// claim under a lower term.
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
			c.followCurrent(p, from)
			ack.Keep, ack.Attachment = true, f.attachment
		}
		c.open(p)
		c.wantBackup(p)
		c.remember(p, from, ack)
	}
	c.send(from, ack)
}

// remember keeps the answer to a Commit until the giver sends another Commit or is lost. Until then the giver may
// repeat the Commit. It gets the same answer, even after this node has handed the partition on: with another answer the
// giver would decide again.
func (c *Core) remember(p int, giver Node, ack *CommitAck) {
	pt := &c.parts[p]
	maps.DeleteFunc(pt.committed, func(n Node, _ *CommitAck) bool { return !c.lives(n) })
	if pt.committed == nil {
		pt.committed = make(map[Node]*CommitAck)
	}
	pt.committed[giver] = ack
}

// absorb merges the giver's content into that of a partition that this node holds as well. The staging area has the
// giver's copy, and the Commit has its last changes.
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
	c.note("merged", p, from, "")
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
		// The receiver has not taken the partition. A copy of the Commit may still be on its way. The new term keeps
		// the receiver from taking the partition by that copy.
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

// released ends the holding of a partition that the receiver of a move has taken over.
func (c *Core) released(p int, a *CommitAck) {
	pt := &c.parts[p]
	to := pt.move.to
	// The receiver's content has everything that was allowed, so the answers that wait may be given. Strict ones may be
	// given only if the receiver is the backup that the voters have recorded: if the receiver is lost before it has a
	// grant, the voters believe that backup, which may lack what those answers charged.
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
	pt.known, pt.holder = a.New, to
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
