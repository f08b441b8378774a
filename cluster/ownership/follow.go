package ownership

import "errors"

// This file keeps the copies of a partition up to date: the backup's, the target's and the disk's. log.go carries what
// it sends.
//
// The path of a change, from the holder to a follower:
//
//  1. follow attaches the follower. Then the whole content is pending for it.
//  2. pump, at a flush or when an answer waits, calls drain, which takes a chunk of pending changes. load adds the
//     chunk to the log of the follower's process, as entries of at most pieceBytes. One chunk of a partition is in
//     flight to a follower; further changes stay pending until it is acknowledged.
//  3. At the follower, onEntry checks sender and term. takeIn applies the chunk to the copy, or to the staging area
//     while the whole copy is not complete. If it cannot, the holder begins the copy anew (Again).
//  4. At the holder, acknowledged calls Data.Confirm and adds a Progress, so that the answers are given that wait for
//     the backup. onRefusal ends an attachment that the follower refuses.
//
// Words:
//
//	attachment  the time from follow to dropFollower, and its number. Of two attachments of one holder and term, the
//	            better copy's has the higher number (attach)
//	whole copy  the entries from the one with Begin to the one with Complete; later entries change the copy
//	in flight   of a chunk: it is in the log, and not acknowledged
//	complete    of a follower: the whole copy is in the log. caught: the whole copy is acknowledged
//	clean       of a chunk: no change is pending after it, and, of a backup's, resolve has run before it
//	named       of a backup: it has acknowledged a clean chunk, so requests for grants name it (grant.go)
//
// Other files must keep: the log keeps the order of an attachment's entries, without a gap.

// follower is what a holder knows of a follower of a partition. A process with a restored copy has one as well, the
// Target that it brings the copy to, and so has a backup: its disk.
type follower struct {
	node       Node
	log        *outlog // to node
	attachment uint64
	last       uint64 // position in log of the last entry; 0: none yet
	version    uint64 // that the acknowledgement of last confirms
	all        bool   // keys under a durability of none are not left out
	complete   bool
	caught     bool
	relabel    bool // the copy must learn of a new term, even if nothing else has changed
	clean      bool // the chunk in flight is
	named      bool
	urgent     bool // an answer waits for changes that are not in flight
}

// inFlight reports whether an entry is in flight.
func (f *follower) inFlight() bool { return f.log != nil && f.last > f.log.acked }

// follow attaches a follower that has nothing yet.
func (c *Core) follow(p int, s Slot, n Node, all bool) {
	pt := &c.parts[p]
	pt.followers[s] = follower{node: n, log: c.logTo(n), all: all, attachment: pt.attach(s)}
	c.data.Attach(p, s, all)
}

// backupBit and holderBit order attachments, see attach.
const (
	backupBit = 1 << 63
	holderBit = 1 << 62
)

// attach returns the number of a new attachment. Of the copies of one term, the backup's is the best when the holder is
// lost: answers wait for it, and it has the keys that are not persistent. The second best is the holder's disk, for
// which answers wait too. A backup's disk comes after both, with the number of the backup's attachment, so that of two
// such disks that of the later backup is the better one.
func (pt *part) attach(s Slot) uint64 {
	pt.attached++
	switch {
	case s == Backup:
		return pt.attached | backupBit
	case s == Disk && pt.held:
		return pt.attached | holderBit
	case s == Disk:
		return pt.copy.Attachment &^ backupBit
	}
	return pt.attached
}

// followCurrent attaches the giver of a partition as its backup. The giver has exactly the content that it handed over.
func (c *Core) followCurrent(p int, n Node) {
	pt := &c.parts[p]
	pt.followers[Backup] = follower{
		node: n, log: c.logTo(n), attachment: pt.attach(Backup), complete: true, caught: true,
	}
	c.data.AttachCurrent(p, Backup, false)
	c.data.Unguarded(p, false)
	c.data.Caught(p, Backup)
}

// wantBackup attaches the backup that the view names for a held partition, in place of another one. A backup that is
// replaced under a live grant first confirms what was decided under strict rules (confirmFirst). During an accepted
// move the backup is not replaced.
func (c *Core) wantBackup(p int) {
	pt := &c.parts[p]
	want := c.member(c.view.Backups, p)
	f := &pt.followers[Backup]
	if pt.standing == Frozen {
		return
	}
	if f.node == want && want != (Node{}) || pt.move != nil && pt.move.accepted {
		if pt.strict.closed != nil {
			c.openStrict(p) // the present backup is the wanted one again
		}
		return
	}
	if f.node != (Node{}) {
		if f.caught && pt.strict.until > c.t {
			c.closeStrict(p)
		}
		if c.confirmFirst(p) {
			return
		}
		c.send(f.node, &Forget{Partition: p, Term: pt.term})
		c.dropFollower(p, Backup, "")
	}
	if want == (Node{}) || want == c.cfg.Self || !c.lives(want) || c.t < pt.strict.followAt ||
		c.copying >= maxCopying || !c.mayHaveRoom(want) {
		if want != (Node{}) {
			c.lookSoon() // to try again
		}
		c.unguard(p)
		return
	}
	c.copying++
	c.follow(p, Backup, want, false)
	c.pump(p, Backup)
}

// dropFollower detaches a follower. The answers that wait for a dropped backup may be given, as degraded; strict ones
// only after setUnguarded.
func (c *Core) dropFollower(p int, s Slot, why string) {
	pt := &c.parts[p]
	f := &pt.followers[s]
	n, caught := f.node, f.caught
	*f = follower{}
	c.data.Detach(p, s)
	c.lookSoon()
	if s != Backup {
		return
	}
	pt.strict.followAt, pt.strict.closed = c.t+retryAfter, nil
	if caught && why != "" {
		c.note("backup dropped", p, n, why)
	}
	c.out.Confirmed = append(c.out.Confirmed, Progress{Partition: p, Version: versionsDone, Unguarded: true})
	c.degradeSaved(p)
	c.evaluate(p)
	c.unguard(p)
}

// pump adds pending changes of a follower to its log, unless others are in flight, or the log is full and no answer
// waits. A later tick tries again (flush). pump drops a backup that does not answer.
func (c *Core) pump(p int, s Slot) {
	pt := &c.parts[p]
	f := &pt.followers[s]
	switch {
	case f.node == (Node{}) || pt.standing == Frozen: // commit, confirmFirst and saveFirst send what a frozen one needs
	case s == Backup && f.caught && c.stalled(f.log) && (f.inFlight() || c.data.Pending(p, s) > 0):
		c.dropFollower(p, s, "no answer")
	case f.inFlight() || f.complete && !f.relabel && c.data.Pending(p, s) == 0:
	case !f.log.full() || f.urgent:
		c.drain(p, s)
	}
}

// drain takes a chunk of pending changes, and adds it to the follower's log. The chunk is empty if the follower only
// has to learn of a new term.
func (c *Core) drain(p int, s Slot) {
	pt := &c.parts[p]
	f := &pt.followers[s]
	chunk, version, more := c.data.Drain(p, s, c.now.Instant, chunkBytes)
	c.drained += len(chunk)
	f.clean = !more && (s == Disk || c.grants.voters > 0 && pt.strict.whole)
	c.load(p, f, chunk, version, !more)
}

// load adds a chunk to a follower's log, as one entry or several. last says that no other change is pending.
func (c *Core) load(p int, f *follower, chunk []byte, version uint64, last bool) {
	pt := &c.parts[p]
	f.version, f.relabel, f.urgent = version, false, false
	begin := f.last == 0 && !f.complete
	for more := true; more; {
		piece := chunk[:min(len(chunk), pieceBytes)]
		chunk = chunk[len(piece):]
		more = len(chunk) > 0
		e := Entry{
			Partition: p, Term: pt.term, Attachment: f.attachment, Chunk: piece,
			Begin: begin, Complete: last && !f.complete && !more, More: more,
		}
		if begin {
			e.Origin = pt.origin
		}
		if !pt.held {
			e.Term, e.Join = pt.copy.Term, pt.restored
		}
		f.last = f.log.add(e)
	}
	f.complete = f.complete || last
}

// onEntry takes in an entry of another process's log.
func (c *Core) onEntry(from Node, e *Entry) Outcome {
	p := e.Partition
	pt := &c.parts[p]
	in := &pt.incoming
	if mv := pt.move; pt.held && mv != nil && mv.commit != nil && mv.to == from && pt.term.Less(e.Term) && !e.Begin {
		// The receiver of this node's commit has taken the partition and uses this node as its backup. Only its
		// CommitAck has not come yet.
		c.released(p, &CommitAck{New: e.Term, Keep: true, Attachment: e.Attachment})
	}
	if pt.restored && e.Begin && !e.Join && e.Origin == pt.origin && !e.Term.Less(pt.known) {
		c.bringRest(p, from)
	}
	switch {
	case e.Join:
		return c.takeJoin(p, from, e)
	case pt.restored, pt.held && in.from != from:
		return Conflict
	case !pt.held && e.Term.Less(pt.known):
		if in.from == from {
			c.endOffer(p) // another process may offer now
		}
		return Superseded
	}
	return c.takeIn(p, from, e)
}

// refusal answers an entry that was not taken in.
func (c *Core) refusal(position uint64, e *Entry, o Outcome) Refusal {
	pt := &c.parts[e.Partition]
	r := Refusal{Position: position, Partition: e.Partition, Attachment: e.Attachment, Outcome: o}
	switch o {
	case Conflict:
		r.Known, r.Holder = pt.term, c.cfg.Self
	case Superseded:
		r.Known, r.Holder = pt.known, pt.holder
	}
	return r
}

// takeIn adds the next entry to a copy, or to the staging area while the whole copy is not complete. With Complete, the
// staging area becomes the copy; in a merge it stays, for absorb.
func (c *Core) takeIn(p int, from Node, e *Entry) Outcome {
	pt := &c.parts[p]
	in := &pt.incoming
	switch {
	case e.Begin:
		in.sender, in.attachment, in.origin, in.staged, in.complete = from, e.Attachment, e.Origin, true, false
		c.data.Stage(p)
	case in.sender != from || in.attachment != e.Attachment:
		return Again
	}
	if in.from == from {
		in.word = c.awake
	}
	if len(e.Chunk) > 0 {
		if err := c.data.Apply(p, in.staged, c.now.Instant, e.Chunk); errors.Is(err, ErrFull) {
			c.spoil(p)
			return Full
		} else if err != nil {
			return c.spoil(p)
		}
	}
	if e.Complete {
		in.complete = true
		if !pt.held {
			c.data.Promote(p)
			in.staged, in.complete = false, false
			pt.copyFrom, pt.origin = from, in.origin
		}
	}
	if !pt.held && !in.staged {
		fresh := e.Complete || pt.copy.Term != e.Term
		pt.copy = Position{Term: e.Term, Attachment: e.Attachment}
		c.learn(p, e.Term, from)
		if fresh {
			c.saveBackup(p)
		}
	}
	return Done
}

// spoil ends the receiving of a copy that an entry was not added to. It drops the copy, unless the entry was staged.
func (c *Core) spoil(p int) Outcome {
	pt := &c.parts[p]
	in := &pt.incoming
	if !in.staged && !pt.held {
		c.dropCopy(p)
	}
	in.sender, in.attachment, in.staged, in.complete = Node{}, 0, false, false
	return Again
}

// onRefusal acts on a follower's refusal of an entry, which ends the attachment. It begins a copy with a gap anew at
// once, and others later.
func (c *Core) onRefusal(l *outlog, r *Refusal) {
	p := r.Partition
	pt := &c.parts[p]
	for s := range pt.followers {
		if f := &pt.followers[s]; f.log != l || f.attachment != r.Attachment {
			continue
		}
		if pt.restored {
			c.onRestoredRefusal(p, r.Outcome)
			return
		}
		switch r.Outcome {
		case Again:
			c.restart(p, Slot(s))
		case Full:
			c.noRoom(p, Slot(s))
		case Conflict:
			c.dropFollower(p, Slot(s), "it holds the partition too")
			pt.strict.followAt = c.t + askAgain
		case Superseded:
			pt.exceed(r.Known)
			c.dropFollower(p, Slot(s), "a higher term is known")
			pt.strict.followAt = c.t + askAgain
			if pt.standing == Owned && pt.term.Less(pt.known) && (!c.lives(r.Holder) || r.Holder == c.cfg.Self) {
				// The holder under the higher term is lost, or was this process. So no other process is the holder.
				c.raise(p)
			}
		}
		c.proceed(p)
		return
	}
}

// proceed continues a move, or the replacement of a backup, that may have waited for a follower's answer.
func (c *Core) proceed(p int) {
	pt := &c.parts[p]
	if pt.move != nil {
		c.tendMove(p)
	}
	if pt.strict.closed != nil {
		c.wantBackup(p)
	}
}

// mayHaveRoom reports whether a copy may be begun at a process. At a process that had no memory for a copy, it allows
// one attempt each fullAgain, until the process has acknowledged a whole copy.
func (c *Core) mayHaveRoom(n Node) bool {
	until, full := c.full[n]
	if full && c.t >= until {
		c.full[n] = c.t + fullAgain
	}
	return !full || c.t >= until
}

// noRoom drops a follower whose process has no memory for the copy. A copy is begun again after fullAgain.
func (c *Core) noRoom(p int, s Slot) {
	pt := &c.parts[p]
	n := pt.followers[s].node
	if _, full := c.full[n]; !full {
		c.note("no room for copies", p, n, "")
	}
	c.full[n] = c.t + fullAgain
	if pt.move != nil && pt.move.commit == nil && pt.move.slot == s {
		pt.askAt = c.t + fullAgain
		c.abandon(p)
	}
	if pt.followers[s].node == n {
		c.dropFollower(p, s, "no room")
	}
}

// restart begins a follower's copy anew after a gap.
func (c *Core) restart(p int, s Slot) {
	pt := &c.parts[p]
	f := &pt.followers[s]
	n, all := f.node, f.all
	if s == Disk {
		c.resave(p)
		return
	}
	if pt.move != nil && pt.move.commit != nil {
		c.dropFollower(p, s, "its copy has a gap") // the move goes on: the receiver may have taken the Commit
		return
	}
	if pt.standing == Frozen {
		c.abandon(p) // a new copy takes long, and checks would wait
	}
	c.dropFollower(p, s, "its copy has a gap")
	if pt.move != nil || s == Backup {
		c.follow(p, s, n, all)
		c.pump(p, s)
	}
}

// acknowledged continues after a follower has taken a chunk in.
func (c *Core) acknowledged(p int, s Slot) {
	pt := &c.parts[p]
	f := &pt.followers[s]
	closed := pt.strict.closed
	if closed != nil && s == Backup && f.last > closed.position {
		closed.confirmed = true
	}
	if pt.restored && f.complete {
		c.forgetRestored(p)
		return
	}
	// Data.Confirm may be left out if no answer waits, because the next one covers it. But it must not be left out if
	// the confirmation does not count for strict answers yet, because there may be no next one, nor where there is a
	// disk, because Safe counts on every confirmation.
	if s == Backup && !c.vouched(p) || pt.followers[Disk].node != (Node{}) || c.data.Awaited(p) {
		c.data.Confirm(p, s, f.version)
	}
	if f.complete && !f.caught {
		f.caught = true
		c.stir = true // another whole copy may begin
		delete(c.full, f.node)
		if s == Backup {
			c.data.Unguarded(p, false)
			pt.strict.unguarded = false
			c.evaluate(p)
		}
		c.data.Caught(p, s)
	}
	if s == Backup {
		c.out.Confirmed = append(c.out.Confirmed, Progress{Partition: p, Version: f.version, Unguarded: !c.vouched(p)})
		if f.clean && !f.named {
			f.named = true
			c.grants.urgent = true
		}
	}
	if s != Target {
		c.progressSaved(p)
	}
	switch {
	case c.upToDate(p):
		c.freeze(p)
	case !f.complete || f.urgent || pt.move != nil && pt.move.slot == s:
		c.pump(p, s)
	}
	c.proceed(p)
}

// vouched reports whether the backup's confirmations count for answers under strict rules. They do under a lease,
// because evaluate makes a lease only while the voters' records of the backup are right.
func (c *Core) vouched(p int) bool {
	s := c.parts[p].strict
	return c.grants.voters == 0 || s.until > c.t || s.closed != nil && s.closed.until > c.t
}

// onForget drops the copy of a partition, if the holder that has sent it keeps this node as a follower no more.
func (c *Core) onForget(from Node, f *Forget) {
	pt := &c.parts[f.Partition]
	if !pt.held && pt.copyFrom == from && !f.Term.Less(pt.copy.Term) && pt.incoming.from == (Node{}) {
		c.endIncoming(f.Partition)
		c.dropCopy(f.Partition)
	}
}
