package ownership

import (
	"slices"
	"time"
)

// This file is about the disk, on which a process keeps the partitions that it holds or backs up, and about the copies
// that it had there when it started. DESIGN.md, "The disk", gives the reasons.
//
// The disk is the follower of the Slot Disk. It gets a log like a process does, and DiskNode stands for it in
// Envelopes. A holder's answers wait for its confirmations, which are Progress with Saved. Nothing waits for those of a
// backup.
//
// A copy that was restored is a copy without a holder (part.restored). Either this process claims the partition from it
// (claim.go), or another process holds the partition. Then bring sends the copy there, in entries with Join: the holder
// joins it with its content (takeJoin), or refuses it because its content has the same origin, and so has all that the
// copy has but what backups do not have (bringRest).

// Saved, in a version, says that the disk must have confirmed it as well as the backup.
const Saved = 1 << 63

// DiskNode stands for the disk of a process, in Envelopes from and to it.
func DiskNode() Node { return Node{Name: "/disk"} } // which is no ring name

// Restored is a copy that the disk had when the process started.
type Restored struct {
	Partition int
	Position  Position
	Origin    Term
}

// RestoreConfig is what a Core needs to know of its disk. The zero value: there is none.
type RestoreConfig struct {
	Disk   bool // there is one
	Copies []Restored
	// Nothing is claimed until all Members have been seen, the cluster's as the disk knows them, or for Wait.
	Members []string
	Wait    time.Duration
}

// restore takes in what the disk had.
func (c *Core) restore() {
	r := &c.cfg.Restore
	c.absent, c.absentUntil = slices.Clone(r.Members), c.t+int64(r.Wait)
	for _, of := range r.Copies {
		pt := &c.parts[of.Partition]
		pt.copy, pt.known, pt.origin, pt.saved, pt.restored = of.Position, of.Position.Term, of.Origin,
			of.Position.Term, true
	}
}

// awaitsMembers reports whether members that the disk knows may still come, with newer copies.
func (c *Core) awaitsMembers() bool { return len(c.absent) > 0 && c.t < c.absentUntil }

// awaitsCopies reports whether the newest copy of a partition may be on the disk of such a member. Others must not
// claim it meanwhile: they may be new and know no members. If a process has held it since this one started, its copy is
// the one that counts.
func (c *Core) awaitsCopies(p int) bool { return c.awaitsMembers() && c.parts[p].holder == (Node{}) }

// save attaches the disk to a partition that is held or backed up.
func (c *Core) save(p int) {
	if f := &c.parts[p].followers[Disk]; c.cfg.Restore.Disk && f.node == (Node{}) {
		c.follow(p, Disk, DiskNode(), false)
		c.attend(p)
	}
}

// resave begins the disk's copy of a partition anew. The disk keeps the former one until the new one is whole.
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
// the changes: the answers wait for this disk. It waits for stall at most, because checks wait, too.
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

// saveBackup has the disk follow a backup's copy, which is whole, from its beginning: the disk's copy gets its position
// when it is whole.
func (c *Core) saveBackup(p int) {
	if c.parts[p].copy.Attachment&backupBit != 0 {
		c.resave(p)
	}
}

// unsaveBackup ends that. The disk forgets the copy, unless it may be the only one to have the partition.
func (c *Core) unsaveBackup(p int) {
	pt := &c.parts[p]
	if pt.followers[Disk].node != (Node{}) {
		c.dropFollower(p, Disk, "")
		c.forgetSaved(p)
	}
}

// forgetSaved has the disk forget a partition that is neither held nor backed up, unless it may be the only one to have
// it.
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

// progressSaved lets answers be given that the disk and the backup have confirmed. Others are told once the disk has
// all of the partition, so that they delete what their disks have of it.
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

// degradeSaved lets the answers be given that wait for the disk and the backup, one of which is not there any more.
func (c *Core) degradeSaved(p int) {
	if c.parts[p].held {
		c.out.Confirmed = append(c.out.Confirmed,
			Progress{Partition: p, Version: versionsDone, Saved: true, Unguarded: true})
	}
}

// diskLost ends the disk: it has failed. Answers that wait for it are given as degraded.
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

// heardHeld notes who holds a partition: a restored copy is brought there. Once the holder's disk has the partition,
// this disk keeps it for a backup only.
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
	c.load(p, &pt.followers[Target], nil, 0, false) // its answer tells whether the copy is needed
}

// bringRest brings a restored copy to a holder whose content has the same origin: of that, only what is kept under a
// durability of None, which the holder lacks if it was the backup. The copy counts as of no origin from then on.
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

// takeJoin takes in an entry of a copy that was restored elsewhere, and joins the copy with the content once it is
// whole.
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
	c.noteBefore("joined", p, e.Term, from, "from its disk")
	return Done
}
