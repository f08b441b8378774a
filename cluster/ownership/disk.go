package ownership

import (
	"slices"
	"time"
)

// This file is about the disk, on which a process keeps the partitions that it holds or backs up, and about the copies
// that were there when the process started. DESIGN.md, "The disk", gives the reasons.
//
// The disk is the follower of the Slot Disk. It gets a log like a process does, and DiskNode stands for it in
// Envelopes. A holder's answers of persistent policies wait for the disk's confirmations, which are Progress with
// Saved. No answer waits for the disk of a backup.
//
// The path of a copy that was on the disk when the process started:
//
//  1. restore notes its position (part.restored). Nothing is claimed while members that the disk knows have not been
//     seen (awaitsMembers).
//  2. If no process holds the partition, the copy takes part in a claim like other copies (claim.go).
//  3. If another process holds the partition, tendRestored asks it whether it needs the copy: it sends an entry with
//     Join and the copy's origin.
//  4. A holder whose content has another origin takes the entry. Then the whole copy follows, and takeJoin joins it
//     with the content.
//  5. A holder whose content has the same origin, and a term that is not lower, answers Superseded: its content has all
//     that the copy has, except the keys that backups lack. bringRest sends those.
//  6. forgetRestored drops the copy. The disk keeps it until the holder says that its own disk has the partition
//     (heardHeld).
//
// Words:
//
//	restored  of a copy: it was on the disk when this process started, and no holder has it yet
//	origin    the term that the history of a content began with. Contents of one origin are states of one history
//	absent    members that the disk knows, and that this node has not seen since it started
//	saved     (of part) the term under which this process held the partition when its disk last had all of it
//	unsaved   of a partition: it has changes that its disk has not confirmed
//
// Other files must keep: what completes a copy calls saveBackup, and what drops a copy calls unsaveBackup; the position
// of the disk's copy is never ahead of its content (hold, saveBackup).

// Saved, in a version, says that the disk must have confirmed it as well as the backup.
const Saved = 1 << 63

// DiskNode stands for the disk of a process, in Envelopes from and to it. Its name is no ring name.
func DiskNode() Node { return Node{Name: "/disk"} }

// Restored is a copy that the disk had when the process started.
type Restored struct {
	Partition int
	Position  Position
	Origin    Term
}

// RestoreConfig is what a Core needs to know of its disk. The zero value: there is no disk.
type RestoreConfig struct {
	Disk   bool // there is a disk
	Copies []Restored
	// Members are the members of the cluster that the disk knows. Nothing is claimed until all of them have been seen,
	// or Wait is over.
	Members []string
	Wait    time.Duration
}

// restore notes the copies and the members that the disk had.
func (c *Core) restore() {
	r := &c.cfg.Restore
	c.absent, c.absentUntil = slices.Clone(r.Members), c.t+int64(r.Wait)
	for _, of := range r.Copies {
		pt := &c.parts[of.Partition]
		pt.copy, pt.known, pt.origin, pt.saved, pt.restored = of.Position, of.Position.Term, of.Origin,
			of.Position.Term, true
	}
}

// awaitsMembers reports whether members that the disk knows may still join with newer copies.
func (c *Core) awaitsMembers() bool { return len(c.absent) > 0 && c.t < c.absentUntil }

// awaitsCopies reports whether the newest copy of a partition may be on the disk of such a member. Meanwhile this node
// keeps other nodes from claiming the partition (Info.Claiming), because they may be new and know no members. If a
// process has held the partition since this node started, that process's copy is the newest.
func (c *Core) awaitsCopies(p int) bool { return c.awaitsMembers() && c.parts[p].holder == (Node{}) }

// save attaches the disk to a partition that is held or backed up, if there is a disk and it is not attached.
func (c *Core) save(p int) {
	if f := &c.parts[p].followers[Disk]; c.cfg.Restore.Disk && f.node == (Node{}) {
		c.follow(p, Disk, DiskNode(), false)
		c.busy = true
	}
}

// resave begins the disk's copy of a partition anew. The disk keeps the former copy until the new one is whole. If the
// disk was caught, answers go on waiting for it.
func (c *Core) resave(p int) {
	caught := c.parts[p].followers[Disk].caught
	c.dropFollower(p, Disk, "")
	c.save(p)
	if caught {
		c.data.Caught(p, Disk)
	}
	c.pump(p, Disk)
}

// saveFirst reports whether the disk has yet to confirm what was decided before a partition was frozen, and sends it
// the changes. Those answers wait for this disk. saveFirst reports this for stall at most, because checks wait too.
func (c *Core) saveFirst(p int) bool {
	pt := &c.parts[p]
	f := &pt.followers[Disk]
	if f.node == (Node{}) || pt.strict.closed == nil || c.t-pt.strict.closed.at >= stall {
		return false
	}
	if !f.inFlight() && c.data.Pending(p, Disk) > 0 {
		c.drain(p, Disk)
	}
	return f.inFlight()
}

// saveBackup makes the disk follow this node's copy, which is complete, if this node is the backup. The disk's copy
// begins anew, so that it gets its position only when it is whole.
func (c *Core) saveBackup(p int) {
	if c.parts[p].copy.Attachment&backupBit != 0 {
		c.resave(p)
	}
}

// unsaveBackup detaches the disk from a copy that is dropped.
func (c *Core) unsaveBackup(p int) {
	pt := &c.parts[p]
	if pt.followers[Disk].node != (Node{}) {
		c.dropFollower(p, Disk, "")
		c.forgetSaved(p)
	}
}

// forgetSaved makes the disk forget a partition that is neither held nor backed up, unless this disk may be the only
// one that has the partition (part.saved).
func (c *Core) forgetSaved(p int) {
	if pt := &c.parts[p]; pt.saved == (Term{}) && pt.followers[Disk].node == (Node{}) && c.cfg.Restore.Disk {
		c.logTo(DiskNode()).add(Entry{Partition: p, Begin: true, Complete: true})
	}
}

// unsaved reports whether a partition has changes that the disk has not confirmed.
func (c *Core) unsaved(p int) bool {
	f := &c.parts[p].followers[Disk]
	return f.node != (Node{}) && (!f.caught || f.inFlight() || c.data.Pending(p, Disk) > 0)
}

// progressSaved lets the answers be given that the disk and the backup have confirmed. Once the disk has all of the
// partition, the members are told (tell), so that they delete what their disks have of the partition.
func (c *Core) progressSaved(p int) {
	pt := &c.parts[p]
	f := &pt.followers[Disk]
	if !pt.held || f.node == (Node{}) {
		return
	}
	if f.caught && f.clean && !f.relabel && !f.inFlight() && pt.saved != pt.term {
		pt.saved = pt.term
		c.gained = append(c.gained, p)
	}
	c.out.Confirmed = append(c.out.Confirmed, Progress{Partition: p, Version: c.data.Safe(p), Saved: true})
}

// degradeSaved lets the answers be given, as degraded, that wait for the disk and the backup, because one of the two is
// detached.
func (c *Core) degradeSaved(p int) {
	if c.parts[p].held {
		c.out.Confirmed = append(c.out.Confirmed,
			Progress{Partition: p, Version: versionsDone, Saved: true, Unguarded: true})
	}
}

// diskLost detaches the disk from all partitions, because the disk has failed. The answers that wait for it are given
// as degraded.
func (c *Core) diskLost() {
	c.cfg.Restore.Disk = false
	for p := range c.parts {
		if pt := &c.parts[p]; pt.followers[Disk].node != (Node{}) {
			c.dropFollower(p, Disk, "")
			c.degradeSaved(p)
			c.proceed(p)
		}
	}
	c.logs = slices.DeleteFunc(c.logs, func(l *outlog) bool { return l.to == DiskNode() })
}

// heardHeld takes in what another process says about a partition that it holds: a restored copy is brought there. Once
// the holder's disk has the partition, this disk need not keep it, unless this node is a backup.
func (c *Core) heardHeld(from Node, i *Info) {
	pt := &c.parts[i.Partition]
	if i.Held && pt.restored {
		pt.bringTo = from
	}
	if i.Held && !pt.held && !pt.restored && pt.saved != (Term{}) && pt.saved.Less(i.Copy.Term) {
		pt.saved = Term{}
		c.forgetSaved(i.Partition)
	}
}

// tendRestored begins to bring a restored copy to the process that holds its partition.
func (c *Core) tendRestored(p int) {
	pt := &c.parts[p]
	if !pt.restored {
		return
	}
	c.lookSoon() // to try again
	to := pt.bringTo
	for _, other := range [...]Node{pt.holder, c.owner(p)} {
		if !c.lives(to) || to == c.cfg.Self {
			to = other
		}
	}
	if pt.followers[Target].node != (Node{}) || !c.view.Settled || c.t < pt.askAt || to == c.cfg.Self || !c.lives(to) ||
		c.awaitsMembers() {
		return
	}
	pt.askAt = c.t + askAgain
	if pt.origin == (Term{}) {
		c.bringRest(p, to)
		return
	}
	c.follow(p, Target, to, true)
	c.load(p, &pt.followers[Target], nil, 0, false) // the answer to this empty entry tells whether the copy is needed
}

// bringRest brings a part of a restored copy to a holder whose content has the same origin: the keys under a durability
// of none, which the holder lacks if it was the backup. It clears the origin, so that takeJoin does not refuse the
// part.
func (c *Core) bringRest(p int, to Node) {
	pt := &c.parts[p]
	pt.origin = Term{}
	pt.followers[Target] = follower{node: to, log: c.logTo(to), attachment: pt.attach(Target)}
	c.data.AttachCurrent(p, Target, false)
	c.data.Widen(p, Target)
	if c.data.Pending(p, Target) == 0 {
		c.forgetRestored(p)
		return
	}
	c.pump(p, Target)
}

// forgetRestored drops a restored copy, all of which the holder has. The disk keeps it until the holder's disk has it.
func (c *Core) forgetRestored(p int) {
	c.endRestored(p)
	c.dropCopy(p)
}

// endRestored ends the bringing of a restored copy: it is an ordinary copy from now on.
func (c *Core) endRestored(p int) {
	pt := &c.parts[p]
	if pt.followers[Target].node != (Node{}) {
		c.dropFollower(p, Target, "")
	}
	pt.restored = false
}

// onRestoredRefusal acts on the answer of a process that a restored copy was brought to.
func (c *Core) onRestoredRefusal(p int, o Outcome) {
	pt := &c.parts[p]
	to := pt.followers[Target].node
	c.dropFollower(p, Target, "")
	pt.askAt = c.t + askAgain
	if o == Superseded {
		c.bringRest(p, to)
	}
}

// takeJoin takes in an entry of a copy that was restored elsewhere. When the copy is whole, takeJoin joins it with the
// content of the partition that this node holds. It answers Conflict if it cannot do so now; the sender tries again.
func (c *Core) takeJoin(p int, from Node, e *Entry) Outcome {
	pt := &c.parts[p]
	in := &pt.incoming
	switch {
	case !pt.held || pt.standing == Frozen || in.from != (Node{}) ||
		!e.Begin && (in.sender != from || in.attachment != e.Attachment):
		return Conflict
	case e.Begin && e.Origin == pt.origin && !pt.term.Less(e.Term):
		return Superseded
	case e.Begin:
		in.sender, in.attachment, in.staged = from, e.Attachment, true
		c.data.Stage(p)
	}
	if len(e.Chunk) > 0 && c.data.Apply(p, true, c.now.Instant, e.Chunk) != nil {
		c.endIncoming(p)
		return Conflict
	}
	if !e.Complete {
		return Done
	}
	c.endIncoming(p)
	if c.data.Merge(p, c.now.Instant) != nil {
		return Conflict
	}
	if pt.known.Less(e.Term) {
		pt.known = e.Term
	}
	pt.saved = Term{} // the disk does not have what the copy has: the sender's disk must keep it
	c.raise(p)
	c.note("joined", p, from, "from its disk")
	return Done
}
