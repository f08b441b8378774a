package ownership

import (
	"hash/crc32"
	"slices"
)

// This file is the log that carries copies: one for each ordered pair of processes, in which all copies that the one
// keeps at the other share blocks, acknowledgements, the repetition of lost blocks and the bound on what is in flight.
//
// At the sender: add appends an entry to the open block. Take closes the block and sends it, while less than window is
// in flight. What finds the log full waits (outlog.waiting) until a BlockAck makes room. resend repeats everything in
// flight when no BlockAck comes.
//
// At the receiver: onBlock takes in blocks in order, without a gap. Its BlockAck confirms everything up to a position.
// An entry that is refused ends its attachment alone. A BlockAck repeats each refusal until the sender has said that it
// knows it (Block.Heard): otherwise a lost BlockAck and a later one would confirm what was refused.
//
// The log ends where either end takes the other for gone. A receiver that has forgotten it says so (Lost), also when it
// knows less of it than the sender has heard confirmed.

const (
	blockBytes = pieceBytes + entryBytes // in one block
	// window bounds what is in flight to one process: what a network of 1 Gbit/s carries in 4 ms. An urgent change is
	// added to a full log, and waits for that much.
	window = 2 * blockBytes
	// maxEarly bounds the blocks that wait at the receiver for one that they have overtaken.
	maxEarly = 8
	// maxRefusals bounds what a receiver keeps of them, but for those of one block: as many as a BlockAck has room for.
	// About as many entries are in flight.
	maxRefusals = 1 << 13
)

// outlog is the log to one process.
type outlog struct {
	to      Node
	number  uint64
	acked   uint64       // position up to which the receiver has answered
	blocks  []heavyBlock // after that
	sent    int          // how many of blocks have been sent
	flying  int          // their weight
	open    *Block       // takes entries; it follows blocks
	weight  int          // of it
	queued  int          // the weight of all that is not acknowledged
	at      int64        // when blocks[0] was last sent
	since   int64        // by Core.awake: when the receiver last moved on, or blocks[0] was first sent
	tries   int32
	waiting []int // partitions that have found the log full
}

// heavyBlock is a Block and what counts of it in a window.
type heavyBlock struct {
	*Block
	weight int
}

func (l *outlog) full() bool    { return l.queued >= window }
func (l *outlog) pending() bool { return l.queued > 0 }

// late reports whether the receiver has not answered for longer than is usual, and stalled whether that is too long.
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

// transmit sends what has been added to the logs, as far as windows allow.
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

// resend repeats what a process has not answered in time.
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
		if l.acked > 0 { // otherwise a later block has overtaken the first
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
	for len(l.waiting) > 0 && !l.full() {
		p := l.waiting[0]
		l.waiting = l.waiting[1:]
		for s := range c.parts[p].followers {
			if f := &c.parts[p].followers[s]; f.log == l && f.waits {
				f.waits = false
				c.pump(p, Slot(s))
			}
		}
	}
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
	position uint64 // of the last block that was taken in
	refusals []Refusal
	pieces   []byte           // of an incomplete chunk
	torn     bool             // there was no room for one of them
	early    [maxEarly]*Block // by position modulo maxEarly: blocks that have overtaken others
}

// buffered is the bytes of incomplete chunks.
func (c *Core) buffered() (bytes int) {
	for _, in := range c.received {
		bytes += len(in.pieces)
	}
	return bytes
}

func (c *Core) onBlock(from Node, b *Block) {
	in := c.received[from]
	switch {
	case in != nil && b.Log < in.number:
		return
	case (in == nil || b.Log > in.number) && b.Position != 1, in != nil && b.Log == in.number && b.Heard > in.position:
		// In the second case this log was forgotten, and a late copy of its first block has begun it anew.
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
			in.torn = in.torn || c.buffered()+len(e.Chunk) > c.cfg.MaxBuffered
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
