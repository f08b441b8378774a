package ownership

import (
	"hash/crc32"
	"slices"
)

// This file is the log that carries copies. There is one log for each ordered pair of processes. All copies that the
// sender keeps at the receiver share its blocks, its acknowledgements, its repetition of lost blocks and its window.
//
// The path of an entry:
//
//  1. At the sender, add appends the entry to the open block. Take closes the block (transmit) and sends it, while less
//     than window is in flight. A partition that finds the log full tries again in a later tick.
//  2. At the receiver, onBlock takes blocks in by their positions, without a gap. takeBlock puts the pieces of a chunk
//     together and calls onEntry (follow.go).
//  3. The BlockAck acknowledges everything up to a position. It lists the entries that were refused, each of which ends
//     its attachment only. It lists each refusal until the sender has said that it knows the refusal (Block.Heard).
//     Otherwise, after a lost BlockAck, the next one would confirm what was refused.
//  4. onBlockAck calls onRefusal for each refusal, and acknowledged for each partition whose last entry is confirmed.
//     Without a BlockAck, resend repeats all blocks in flight.
//
// The log ends when either end drops the other from its view. If the receiver has forgotten a log of which the sender
// has a BlockAck, it answers Lost. Then the sender begins all copies anew, in another log (renew).
//
// Words:
//
//	position   of a block: its number in the log, from 1 on
//	in flight  of a block: it is sent, and not acknowledged
//	full       of a log: at least a window is queued, which is everything that is not acknowledged
//	early      of a block: it has overtaken an earlier one
//
// Other files must keep: an attachment's entries are added in order; at most one chunk of an attachment is in the log.

const (
	blockBytes = pieceBytes + entryBytes // in one block
	// window bounds what is in flight to one process. A network of 1 Gbit/s carries it in 4 ms. An urgent change is
	// added to a full log, and waits for that long.
	window = 2 * blockBytes
	// maxEarly bounds the blocks that wait at the receiver for one that they have overtaken.
	maxEarly = 8
	// maxRefusals bounds the refusals that a receiver keeps, except those of the last block: as many as fit into a
	// BlockAck. About as many entries are in flight.
	maxRefusals = 1 << 13
)

// outlog is the log to one process.
type outlog struct {
	to     Node
	number uint64
	acked  uint64       // the receiver has acknowledged the blocks up to this position
	blocks []heavyBlock // the closed blocks after acked
	sent   int          // how many of blocks have been sent
	flying int          // the weight of these
	open   *Block       // takes entries; it follows blocks
	weight int          // of open
	queued int          // the weight of everything that is not acknowledged
	at     int64        // when blocks[0] was last sent, or the receiver last acknowledged a block
	since  int64        // by Core.awake: when the receiver last acknowledged a block, or blocks[0] was first sent
	tries  int32        // how often resend has repeated blocks since
}

// heavyBlock is a Block and its weight in the window.
type heavyBlock struct {
	*Block
	weight int
}

func (l *outlog) full() bool    { return l.queued >= window }
func (l *outlog) pending() bool { return l.queued > 0 }

// late reports whether the receiver has not acknowledged a block for resendAfter, stalled whether for stall.
func (c *Core) late(l *outlog) bool    { return l.sent > 0 && c.awake-l.since >= resendAfter }
func (c *Core) stalled(l *outlog) bool { return l.sent > 0 && c.awake-l.since >= stall }

// logTo returns the log to a process.
func (c *Core) logTo(n Node) *outlog {
	for _, l := range c.logs {
		if l.to == n {
			return l
		}
	}
	c.begun++
	l := &outlog{to: n, number: c.begun}
	c.logs = append(c.logs, l)
	return l
}

// add appends an entry and returns the position of its block.
func (l *outlog) add(e Entry) uint64 {
	w := entryBytes + len(e.Chunk)
	if l.open != nil && l.weight+w > blockBytes {
		l.closeBlock()
	}
	if l.open == nil {
		l.open, l.weight = &Block{Log: l.number, Position: l.acked + uint64(len(l.blocks)) + 1}, 0
	}
	l.open.Entries = append(l.open.Entries, e)
	l.weight += w
	l.queued += w
	return l.open.Position
}

func (l *outlog) closeBlock() {
	l.open.Sum = l.open.sum()
	l.blocks = append(l.blocks, heavyBlock{l.open, l.weight})
	l.open = nil
}

// transmit sends the blocks that have not been sent, as far as the windows allow. The first block may always be sent.
func (c *Core) transmit() {
	for _, l := range c.logs {
		if l.open != nil {
			l.closeBlock()
		}
		for ; l.sent < len(l.blocks); l.sent++ {
			b := l.blocks[l.sent]
			if l.sent == 0 {
				l.at, l.since, l.tries = c.t, c.awake, 0
			} else if l.flying+b.weight > window {
				break
			}
			l.flying += b.weight
			b.Heard = l.acked
			c.send(l.to, b.Block)
		}
	}
}

// resend repeats the blocks that a process has not acknowledged in time.
func (c *Core) resend() {
	for _, l := range c.logs {
		if l.sent > 0 && c.t-l.at >= min(resendAfter<<min(l.tries, 8), resendMost) {
			l.at = c.t
			l.tries++
			for _, b := range l.blocks[:l.sent] {
				c.send(l.to, b.Block)
			}
		}
	}
}

func (c *Core) onBlockAck(from Node, a *BlockAck) {
	if a.Lost && from == DiskNode() {
		c.diskLost()
		return
	}
	at := slices.IndexFunc(c.logs, func(l *outlog) bool { return l.to == from && l.number == a.Log })
	if at < 0 {
		return
	}
	l := c.logs[at]
	if a.Lost {
		if l.acked > 0 { // otherwise a later block has overtaken the first, and resend repeats both
			c.renew(l)
		}
		return
	}
	for i := range a.Refusals {
		c.onRefusal(l, &a.Refusals[i])
	}
	if a.Position <= l.acked || a.Position-l.acked > uint64(l.sent) {
		return
	}
	n := int(a.Position - l.acked)
	done := l.blocks[:n]
	l.acked, l.blocks, l.sent = a.Position, l.blocks[n:], l.sent-n
	l.at, l.since, l.tries = c.t, c.awake, 0
	for _, b := range done {
		l.queued -= b.weight
		l.flying -= b.weight
		for i := range b.Entries {
			e := &b.Entries[i]
			for s := range c.parts[e.Partition].followers {
				if f := &c.parts[e.Partition].followers[s]; f.log == l && f.attachment == e.Attachment &&
					f.last == b.Position && !e.More {
					c.acknowledged(e.Partition, Slot(s))
					break
				}
			}
		}
	}
	clear(done) // the array lives on
}

// renew begins all copies at a process anew, in another log.
func (c *Core) renew(l *outlog) {
	c.logs = slices.DeleteFunc(c.logs, func(of *outlog) bool { return of == l })
	for p := range c.parts {
		for s := range c.parts[p].followers {
			if c.parts[p].followers[s].log == l {
				c.restart(p, Slot(s))
			}
		}
	}
}

// inlog is the log from another process.
type inlog struct {
	number   uint64
	position uint64           // of the last block that was taken in
	refusals []Refusal        // that the sender has not said it knows
	pieces   []byte           // of an incomplete chunk
	torn     bool             // a piece of the chunk was dropped, because there was no room
	early    [maxEarly]*Block // by position modulo maxEarly: blocks that are not taken in yet
}

// buffered is the number of bytes of incomplete chunks, from all processes.
func (c *Core) buffered() (bytes int) {
	for _, in := range c.received {
		bytes += len(in.pieces)
	}
	return bytes
}

// onBlock takes in a block, and the early ones that follow it, and acknowledges them.
func (c *Core) onBlock(from Node, b *Block) {
	in := c.received[from]
	switch {
	case in != nil && b.Log < in.number:
		return
	case (in == nil || b.Log > in.number) && b.Position != 1, in != nil && b.Log == in.number && b.Heard > in.position:
		// In the second case this node has forgotten the log, and a late copy of the first block has begun it anew.
		c.send(from, &BlockAck{Log: b.Log, Lost: true})
		return
	case in == nil || b.Log > in.number:
		in = &inlog{number: b.Log}
		c.received[from] = in
	}
	if b.Position > in.position && b.Position <= in.position+maxEarly && b.Sum == b.sum() {
		in.early[b.Position%maxEarly] = b
	}
	for len(in.refusals) < maxRefusals {
		next := &in.early[(in.position+1)%maxEarly]
		if *next == nil {
			break
		}
		c.takeBlock(from, in, *next)
		*next = nil
	}
	c.send(from, &BlockAck{Log: b.Log, Position: in.position, Refusals: slices.Clone(in.refusals)})
}

// takeBlock takes in the next block of a log.
func (c *Core) takeBlock(from Node, in *inlog, b *Block) {
	in.position++
	in.refusals = slices.DeleteFunc(in.refusals, func(r Refusal) bool { return r.Position <= b.Heard })
	for _, e := range b.Entries {
		if e.More {
			in.torn = in.torn || c.buffered()+len(e.Chunk) > c.room
			if in.pieces = append(in.pieces, e.Chunk...); in.torn {
				in.pieces = nil
			}
			continue
		}
		o := Again
		if len(in.pieces) > 0 {
			e.Chunk = append(in.pieces, e.Chunk...)
		}
		if !in.torn {
			o = c.onEntry(from, &e)
		}
		if in.pieces, in.torn = nil, false; o != Done {
			in.refusals = append(in.refusals, c.refusal(in.position, &e, o))
		}
	}
}

func sum(chunk []byte) uint32 { return crc32.Checksum(chunk, crc32.MakeTable(crc32.Castagnoli)) }

func (b *Block) sum() (sum uint32) {
	table := crc32.MakeTable(crc32.Castagnoli)
	for i := range b.Entries {
		sum = crc32.Update(sum, table, b.Entries[i].Chunk)
	}
	return sum
}
