package replica

import (
	"encoding/binary"
	"math"
	"math/bits"
	"slices"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/varint"
)

// The entries of a block follow their number. Each has a byte of the flags below; its partition; with entryTerm, where the
// term is not that of the entry before, epoch and n; its attachment, turned left by one bit; its chunk after the length.
// The term before the first entry is zero. Numbers are unsigned varints.
const (
	entryTerm = 1 << iota
	entryBegin
	entryComplete
	entryMore
	entryFlags = 1<<iota - 1
)

// leastEntry is the fewest bytes that an entry takes, so that the length bounds what is made room for.
const leastEntry = 4

func appendEntries(to []byte, entries []ownership.Entry) []byte {
	to = binary.AppendUvarint(to, uint64(len(entries)))
	var before ownership.Term
	for i := range entries {
		e := &entries[i]
		var flags byte
		for bit, set := range [...]bool{e.Term != before, e.Begin, e.Complete, e.More} {
			if set {
				flags |= 1 << bit
			}
		}
		to = binary.AppendUvarint(append(to, flags), uint64(e.Partition))
		if e.Term != before {
			before = e.Term
			to = binary.AppendUvarint(binary.AppendUvarint(to, e.Term.Epoch), e.Term.N)
		}
		// The highest bit says which follower it is, above a small number.
		to = binary.AppendUvarint(to, bits.RotateLeft64(e.Attachment, 1))
		to = varint.AppendText(to, e.Chunk)
	}
	return to
}

// entries reads what appendEntries has written, none as nil. The chunks are parts of data.
func (r *messageReader) entries(data []byte) (list []ownership.Entry) {
	in := varint.Of(data)
	n := in.Uint(maxEntries)
	if in.Failed() || n*leastEntry > uint64(len(in.Rest)) {
		r.fail("block.entries", "are too many, or too few bytes")
		return nil
	}
	if n > 0 {
		list = make([]ownership.Entry, n)
	}
	var before ownership.Term
	for i := range list {
		e, flags := &list[i], in.Byte()
		e.Partition = r.partition("block.partition", uint32(in.Uint(math.MaxUint32)))
		if flags&entryTerm != 0 {
			before = ownership.Term{Epoch: in.Uvarint(), N: in.Uvarint()}
		}
		e.Term, e.Begin, e.Complete, e.More = before, flags&entryBegin != 0, flags&entryComplete != 0, flags&entryMore != 0
		e.Attachment = bits.RotateLeft64(in.Uvarint(), -1)
		if chunk := in.Text(maxWeight); len(chunk) > 0 {
			e.Chunk = slices.Clip(chunk)
		}
		if flags&^entryFlags != 0 {
			in.Fail()
		}
	}
	if in.Failed() || len(in.Rest) > 0 {
		r.fail("block.entries", "are malformed")
		return nil
	}
	return list
}
