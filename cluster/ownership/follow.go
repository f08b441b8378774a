package ownership

import "errors"

// This file keeps copies up to date. One Replicate per partition and follower is in flight; the next is sent when it is acknowledged.
//
// At the holder: follow attaches a follower, for which the whole content is then pending. pump sends the next message: drain takes pending
// changes as a chunk, load cuts it into messages of pieceBytes. acknowledged passes confirmations on to the store (Data.Confirm), which
// lets answers go that wait for the copy. Answers wait for a copy where their durability says so and the backup is caught.
//
// At the follower: onReplicate checks sender and sequence; takeIn stages a whole copy, or applies a chunk to the copy. A gap, a wrong
// checksum or a missing piece makes the holder begin the copy anew (Again).
//
// Invariants: sequences of two attachments never overlap. A copy's Position names the last message that it has. A backup's sequences are
// above a target's, so that the better of two copies has the higher Position.

// follower is what a holder knows of a process that has, or is getting, a copy of a partition.
type follower struct {
	node     Node
	unacked  *Replicate // sent and not acknowledged
	sequence uint64     // of the last message
	version  uint64     // confirmed with the last message of the chunk
	sent     int64      // when unacked was last sent
	first    int64      // when unacked was first sent, by Core.awake
	tries    int32
	all      bool
	begun    bool         // the first message of the whole copy is made
	complete bool         // the last message of the whole copy is made
	caught   bool         // the last message of the whole copy is acknowledged
	relabel  bool         // the copy must learn of a new term, even if nothing else has changed
	clean    bool         // the chunk in flight leaves nothing out, strict keys that start full included
	named    bool         // a clean chunk has been confirmed: the voters may record this backup
	urgent   bool         // an answer waits for changes that are not in unacked
	rest     []*Replicate // messages of the same chunk that are not sent yet
}

// follow attaches a follower that has nothing yet.
func (c *Core) follow(p int, s Slot, n Node, all bool) {
	pt := &c.parts[p]
	pt.attached++
	pt.followers[s] = follower{node: n, all: all, sequence: pt.sequence(s)}
	c.data.Attach(p, s, all)
}

// sequence is the number before a new follower's first message. No two attachments share a number, so that a late message of an earlier
// attachment is recognized. A backup's numbers are above a target's: answers wait for the backup's copy, so it is the better one when the
// holder is lost.
func (pt *part) sequence(s Slot) uint64 {
	n := pt.attached << 32
	if s == Backup {
		n |= 1 << 63
	}
	return n
}

// attachment is the part of a sequence that all messages of an attachment share.
func attachment(sequence uint64) uint64 { return sequence << 1 >> 33 }

// followCurrent attaches the giver of a partition that was just handed over as its backup: it has exactly this content.
func (c *Core) followCurrent(p int, n Node) {
	pt := &c.parts[p]
	pt.attached++
	pt.followers[Backup] = follower{
		node: n, sequence: pt.sequence(Backup), begun: true, complete: true, caught: true,
	}
	c.data.AttachCurrent(p, Backup, false)
	c.data.Unguarded(p, false)
	c.data.Caught(p, Backup)
}

// wantBackup attaches the process that should be the backup of a held partition, in place of another one. A backup that is replaced under
// a live grant first confirms what strict rules have admitted (confirmFirst).
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
	if want == (Node{}) || want == c.cfg.Self || !c.lives(want) || c.t < pt.strict.followAt || c.copying >= maxCopying || !c.mayHaveRoom(want) {
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
	if s != Backup {
		return
	}
	pt.strict.followAt, pt.strict.closed = c.t+retryAfter, nil
	if caught && why != "" {
		c.note("backup dropped", p, n, why)
	}
	c.out.Confirmed = append(c.out.Confirmed, Progress{Partition: p, Version: versionsDone, Unguarded: true})
	c.evaluate(p)
	c.unguard(p)
}

// pump sends a follower the next message, or repeats the one in flight when its answer is late.
func (c *Core) pump(p int, s Slot) {
	pt := &c.parts[p]
	f := &pt.followers[s]
	switch {
	case f.node == (Node{}):
	case f.unacked != nil:
		if c.awake-f.first >= stall && f.caught && s == Backup && pt.standing != Frozen {
			c.dropFollower(p, s, "no answer")
		} else if c.t-f.sent >= min(resendAfter<<min(f.tries, 8), resendMost) {
			f.tries++
			f.sent = c.t
			c.sendAgain(f.node, f.unacked)
		}
	case pt.standing == Frozen: // commit sends the rest
	case len(f.rest) == 0 && f.complete && !f.relabel && c.data.Pending(p, s) == 0:
	case len(f.rest) == 0:
		c.drain(p, s)
	default:
		c.sendRest(p, s)
	}
}

// drain takes a chunk of pending changes and sends its first message.
func (c *Core) drain(p int, s Slot) {
	pt := &c.parts[p]
	f := &pt.followers[s]
	chunk, version, more := c.data.Drain(p, s, c.now.Instant, chunkBytes)
	c.drained += len(chunk)
	f.clean = !more && c.grants.voters > 0 && pt.strict.whole
	c.sendFlight(p, s, c.load(f, chunk, version, !more))
}

// load cuts a chunk into messages and returns the first; the others go to f.rest. last says that no other change is pending.
func (c *Core) load(f *follower, chunk []byte, version uint64, last bool) (first *Replicate) {
	f.version = version
	parts := max((len(chunk)+pieceBytes-1)/pieceBytes, 1)
	for i := range parts {
		piece := chunk[i*pieceBytes : min((i+1)*pieceBytes, len(chunk))]
		f.sequence++
		m := c.replicate()
		*m = Replicate{
			Sequence: f.sequence, Begin: !f.begun, Complete: last && !f.complete && i == parts-1,
			Part: i, Parts: parts, Chunk: piece, Sum: sum(piece),
		}
		f.begun = true
		if i == 0 {
			first = m
		} else {
			f.rest = append(f.rest, m)
		}
	}
	f.complete = f.complete || last
	return first
}

// roomFor is how many messages are allocated in one block. One message that is still in use keeps the whole block alive.
const roomFor = 64

func (c *Core) replicate() *Replicate {
	if len(c.replicates) == 0 {
		c.replicates = make([]Replicate, roomFor)
	}
	m := &c.replicates[0]
	c.replicates = c.replicates[1:]
	return m
}

func (c *Core) ack() *ReplicateAck {
	if len(c.acks) == 0 {
		c.acks = make([]ReplicateAck, roomFor)
	}
	a := &c.acks[0]
	c.acks = c.acks[1:]
	return a
}

func (c *Core) sendFlight(p int, s Slot, m *Replicate) {
	pt := &c.parts[p]
	f := &pt.followers[s]
	f.unacked = m
	f.relabel = false
	f.unacked.Partition = p
	f.unacked.Term = pt.term
	f.sent, f.first, f.tries = c.t, c.awake, 0
	c.attend(p)
	c.send(f.node, f.unacked)
}

// sendRest sends the next message of a chunk in flight.
func (c *Core) sendRest(p int, s Slot) {
	f := &c.parts[p].followers[s]
	next := f.rest[0]
	if f.rest = f.rest[1:]; len(f.rest) == 0 {
		f.rest = nil
	}
	c.sendFlight(p, s, next)
}

// onReplicate receives a message of a copy and answers it.
func (c *Core) onReplicate(from Node, m *Replicate) {
	p := m.Partition
	pt := &c.parts[p]
	in := &pt.incoming
	ack := c.ack()
	*ack = ReplicateAck{Partition: p, Term: m.Term, Sequence: m.Sequence, Outcome: Done}
	if mv := pt.move; pt.held && mv != nil && mv.commit != nil && mv.to == from && pt.term.Less(m.Term) && !m.Begin {
		// The receiver of this node's commit has taken the partition and uses this node as its backup. Only its CommitAck has not come
		// yet.
		c.released(p, &CommitAck{New: m.Term, Keep: true, Sequence: m.Sequence - 1})
	}
	switch {
	case pt.held && !(in.from == from && in.merge):
		ack.Outcome, ack.Known, ack.Holder = Conflict, pt.term, c.cfg.Self
	case !pt.held && m.Term.Less(pt.known):
		ack.Outcome, ack.Known, ack.Holder = Superseded, pt.known, pt.holder
		if in.from == from {
			c.endOffer(p) // another process may offer now
		}
	case in.sender == from && attachment(m.Sequence) < attachment(in.last):
		return // of an earlier attachment
	case in.sender == from && attachment(m.Sequence) == attachment(in.last) && m.Sequence <= in.last:
		// A repeat: the answer was lost.
	default:
		ack.Outcome = c.takeIn(p, from, m)
	}
	c.send(from, ack)
}

// takeIn adds the next message to a copy, or to the staging area while the whole copy is not complete.
func (c *Core) takeIn(p int, from Node, m *Replicate) Outcome {
	pt := &c.parts[p]
	in := &pt.incoming
	switch {
	case m.Begin && m.Part == 0:
		c.buffered -= len(in.pieces)
		in.sender, in.last, in.staged, in.complete, in.pieces, in.part = from, m.Sequence-1, true, false, nil, 0
		c.data.Stage(p)
	case in.sender != from || m.Sequence != in.last+1:
		return Again
	}
	if m.Sum != sum(m.Chunk) || m.Part != int(in.part) || m.Parts < 1 || m.Parts > maxPieces || c.buffered+len(m.Chunk) > c.cfg.MaxBuffered {
		return c.spoil(p)
	}
	in.heard = c.awake
	if in.from == from {
		in.word = c.awake
	}
	in.last = m.Sequence
	if m.Part < m.Parts-1 {
		in.pieces = append(in.pieces, m.Chunk...)
		in.part++
		c.buffered += len(m.Chunk)
		return Done
	}
	chunk := m.Chunk
	if len(in.pieces) > 0 {
		c.buffered -= len(in.pieces)
		chunk = append(in.pieces, m.Chunk...)
	}
	in.pieces, in.part = nil, 0
	if len(chunk) > 0 {
		if err := c.data.Apply(p, in.staged, c.now.Instant, chunk); errors.Is(err, ErrFull) {
			c.spoil(p)
			return Full
		} else if err != nil {
			return c.spoil(p)
		}
	}
	if m.Complete {
		in.complete = true
		if !pt.held {
			c.data.Promote(p)
			in.staged, in.complete = false, false
			pt.copyFrom = from
		}
	}
	if !pt.held && !in.staged {
		pt.copy = Position{Term: m.Term, Sequence: m.Sequence}
		c.learn(p, m.Term, from)
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
	c.dropPieces(p)
	in.staged, in.complete = false, false
	return Again
}

// dropPieces drops the pieces of an incomplete chunk. The copy stays as it is, and the sender has to begin anew.
func (c *Core) dropPieces(p int) {
	in := &c.parts[p].incoming
	c.buffered -= len(in.pieces)
	in.sender, in.last, in.pieces, in.part = Node{}, 0, nil, 0
}

func (c *Core) onReplicateAck(from Node, a *ReplicateAck) {
	p := a.Partition
	pt := &c.parts[p]
	if !pt.held {
		return
	}
	for s := range pt.followers {
		f := &pt.followers[s]
		if f.node != from || f.unacked == nil || f.unacked.Sequence != a.Sequence {
			continue
		}
		switch a.Outcome {
		case Done:
			c.acknowledged(p, Slot(s))
		case Again:
			c.restart(p, Slot(s))
		case Full:
			c.noRoom(p, Slot(s))
		case Conflict:
			c.dropFollower(p, Slot(s), "it holds the partition too")
			pt.strict.followAt = c.t + askAgain
		case Superseded:
			if pt.known.Less(a.Known) {
				pt.known = a.Known
			}
			c.dropFollower(p, Slot(s), "a higher term is known")
			pt.strict.followAt = c.t + askAgain
			if pt.standing == Owned && pt.term.Less(pt.known) && (!c.lives(a.Holder) || a.Holder == c.cfg.Self) {
				// The process with that term is gone, or it was this one: no other holder is left.
				c.raise(p)
			}
		}
		break
	}
	if pt.move != nil {
		c.tendMove(p)
	}
	if pt.strict.closed != nil {
		c.wantBackup(p)
	}
}

// fullness says when to try again at a process that had no room for a copy.
type fullness struct {
	until int64 // no copy is begun there before
	wait  int64 // between two attempts; doubles up to fullMost
	tried bool  // a copy was begun since until was set
}

// mayHaveRoom reports whether a copy may be begun at a process. At a process that had no room one copy at a time is tried, until it has
// taken a whole one.
func (c *Core) mayHaveRoom(n Node) bool {
	r := c.full[n]
	if r == nil {
		return true
	}
	if c.t < r.until {
		return false
	}
	r.until, r.tried = c.t+r.wait, true
	return true
}

// noRoom drops a follower that has no room. A copy is tried again later.
func (c *Core) noRoom(p int, s Slot) {
	pt := &c.parts[p]
	n := pt.followers[s].node
	r := c.full[n]
	switch {
	case r == nil:
		r = &fullness{wait: fullAgain}
		c.full[n] = r
		c.note("no room for copies", p, n, "")
	case r.tried:
		r.wait = min(2*r.wait, fullMost)
	}
	r.until, r.tried = c.t+r.wait, false
	if pt.move != nil && pt.move.commit == nil && pt.move.slot == s {
		frozen := pt.standing == Frozen
		c.endMove(p)
		pt.askAt = c.t + r.wait
		if frozen {
			c.raise(p)
		}
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
	if pt.move != nil && pt.move.commit != nil {
		c.dropFollower(p, s, "its copy has a gap") // the receiver may have taken over by now
		return
	}
	if pt.standing == Frozen {
		// The move has to begin anew as well, and checks must not wait for that long. Nothing was committed yet.
		c.endMove(p)
		c.raise(p)
	}
	c.dropFollower(p, s, "its copy has a gap")
	if pt.move != nil || s == Backup {
		c.follow(p, s, n, all)
		c.pump(p, s)
	}
}

// acknowledged continues after a follower has taken a message in.
func (c *Core) acknowledged(p int, s Slot) {
	pt := &c.parts[p]
	f := &pt.followers[s]
	done := f.unacked
	f.unacked = nil
	if len(f.rest) > 0 {
		c.sendRest(p, s)
		return
	}
	closed := pt.strict.closed
	if closed != nil && s == Backup && done.Sequence > closed.sequence {
		closed.confirmed = true
	}
	// A confirmation that does not count for strict answers yet is passed on now: the partition may not change again.
	if s == Backup && !c.vouched(p) || c.data.Awaited(p) {
		c.data.Confirm(p, s, f.version)
	}
	if done.Complete {
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
	if c.upToDate(p) {
		c.freeze(p)
		return
	}
	if !f.complete || f.urgent || pt.move != nil && pt.move.slot == s {
		f.urgent = false
		c.pump(p, s)
	}
}

// vouched reports whether the backup's confirmations count for answers under strict rules. They do while the voters' records of the backup
// are right: see evaluate.
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
