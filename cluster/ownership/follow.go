package ownership

import "errors"

// This file keeps copies up to date. log.go carries what it sends.
//
// At the holder: follow attaches a follower, for which the whole content is then pending. pump adds pending changes to
// the log of its process: drain takes a chunk, load cuts it into entries of pieceBytes. One chunk of a partition is in
// flight to a follower; changes gather meanwhile. acknowledged passes confirmations on to the store (Data.Confirm),
// which lets answers go that wait for the copy. Answers wait for a copy where their durability says so and the backup
// is caught.
//
// At the follower: onEntry checks sender, term and attachment; takeIn stages a whole copy, or applies a chunk to the
// copy. A chunk that cannot be taken in, or of a copy that is gone, makes the holder begin the copy anew (Again).
//
// Invariants: the log keeps the order of an attachment's entries, without a gap. A backup's attachments are above a
// target's, so that the better of two copies has the higher Position.

// follower is what a holder knows of a process that has, or is getting, a copy of a partition.
type follower struct {
	node       Node
	log        *outlog // to node
	attachment uint64
	last       uint64 // position in log of the last entry; 0: none yet
	version    uint64 // confirmed with that entry
	all        bool
	complete   bool // the last entry of the whole copy is in the log
	caught     bool // the last entry of the whole copy is acknowledged
	relabel    bool // the copy must learn of a new term, even if nothing else has changed
	clean      bool // the chunk in flight leaves nothing out, strict keys that start full included
	named      bool // a clean chunk has been confirmed: the voters may record this backup
	urgent     bool // an answer waits for changes that are not in flight
	waits      bool // in log.waiting
}

// inFlight reports whether an entry is not acknowledged.
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

// attach returns the number of a new attachment. Of copies under one term, a backup's is the best when the holder is
// lost: answers wait for it, and it has what is not persistent. Then comes the holder's disk, for which answers wait
// too, then all others. A backup's disk keeps the order of the backups.
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

// followCurrent attaches the giver of a partition that was just handed over as its backup: it has exactly this content.
func (c *Core) followCurrent(p int, n Node) {
	pt := &c.parts[p]
	pt.followers[Backup] = follower{
		node: n, log: c.logTo(n), attachment: pt.attach(Backup), complete: true, caught: true,
	}
	c.data.AttachCurrent(p, Backup, false)
	c.data.Unguarded(p, false)
	c.data.Caught(p, Backup)
}

// wantBackup attaches the process that should be the backup of a held partition, in place of another one. A backup that
// is replaced under a live grant first confirms what strict rules have admitted (confirmFirst).
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
		if want != (Node{}) {
			c.send(f.node, &Forget{Partition: p, Term: pt.term})
		}
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

// dropFollower detaches a follower. Answers that wait for a dropped backup are given as unguarded.
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

// pump adds pending changes of a follower to its log, unless others are in flight. It drops a backup that does not
// answer.
func (c *Core) pump(p int, s Slot) {
	pt := &c.parts[p]
	f := &pt.followers[s]
	switch {
	case f.node == (Node{}) || pt.standing == Frozen: // commit sends the rest
	case s == Backup && f.caught && c.stalled(f.log) && (f.inFlight() || c.data.Pending(p, s) > 0):
		c.dropFollower(p, s, "no answer")
	case f.inFlight() || f.complete && !f.relabel && c.data.Pending(p, s) == 0:
	case !f.log.full() || f.urgent:
		c.drain(p, s)
	case !f.waits:
		f.waits = true
		f.log.waiting = append(f.log.waiting, p)
	}
}

// drain takes a chunk of pending changes.
func (c *Core) drain(p int, s Slot) {
	pt := &c.parts[p]
	f := &pt.followers[s]
	chunk, version, more := c.data.Drain(p, s, c.now.Instant, chunkBytes)
	c.drained += len(chunk)
	f.clean = !more && (s == Disk || c.grants.voters > 0 && pt.strict.whole)
	c.load(p, f, chunk, version, !more)
}

// load adds a chunk to a follower's log. last says that no other change is pending.
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

// takeIn adds the next entry to a copy, or to the staging area while the whole copy is not complete.
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

// spoil drops a copy that cannot be brought up to date any more.
func (c *Core) spoil(p int) Outcome {
	pt := &c.parts[p]
	in := &pt.incoming
	if !in.staged && !pt.held {
		c.dropCopy(p)
	}
	in.sender, in.attachment, in.staged, in.complete = Node{}, 0, false, false
	return Again
}

// onRefusal ends an attachment that a process refuses.
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
				// The process with that term is gone, or it was this one: no other holder is left.
				c.raise(p)
			}
		}
		c.proceed(p)
		return
	}
}

// proceed takes the next step of what waits for a follower's answer.
func (c *Core) proceed(p int) {
	pt := &c.parts[p]
	if pt.move != nil {
		c.tendMove(p)
	}
	if pt.strict.closed != nil {
		c.wantBackup(p)
	}
}

// mayHaveRoom reports whether a copy may be begun at a process. At a process that had no room one copy at a time is
// tried, until it has taken a whole one.
func (c *Core) mayHaveRoom(n Node) bool {
	until, full := c.full[n]
	if full && c.t >= until {
		c.full[n] = c.t + fullAgain
	}
	return !full || c.t >= until
}

// noRoom drops a follower that has no room. A copy is tried again later.
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
		c.dropFollower(p, s, "its copy has a gap") // the receiver may have taken over by now
		return
	}
	if pt.standing == Frozen {
		c.abandon(p) // the move has to begin anew as well, and checks must not wait for that long
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
	// A confirmation that does not count for strict answers yet is passed on now: the partition may not change again.
	// Where there is a disk, Safe counts on all of them.
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

// vouched reports whether the backup's confirmations count for answers under strict rules. They do while the voters'
// records of the backup are right: see evaluate.
func (c *Core) vouched(p int) bool {
	s := c.parts[p].strict
	return c.grants.voters == 0 || s.until > c.t || s.closed != nil && s.closed.until > c.t
}

func (c *Core) onForget(from Node, f *Forget) {
	pt := &c.parts[f.Partition]
	if !pt.held && pt.copyFrom == from && !f.Term.Less(pt.copy.Term) && pt.incoming.from == (Node{}) {
		c.endIncoming(f.Partition)
		c.dropCopy(f.Partition)
	}
}
