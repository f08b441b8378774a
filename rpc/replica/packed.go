package replica

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/varint"
)

// Keeping copies takes a Replicate and a ReplicateAck for each partition in which something has changed: with many keys
// nearly one of each for every check. So these two, where they are as they nearly always are, travel packed: many in one
// Message, in some twelve bytes each besides the chunk, and read without an object for each part of each. All others,
// large chunks and answers other than Done among them, are messages of their own, and the order is kept.
//
// A run begins with the number of its Replicates and that of its ReplicateAcks. Then comes for each message, in order, a byte
// of the flags below; the partition; where the term is not that of the message before, its epoch and n; of the sequence
// the upper half, turned left by one bit, and the lower half. A Replicate goes on with part and parts where there is more
// than one, and the chunk after its length; its sum ends it, in four bytes, the lowest first. The term before the first
// message is zero. Numbers are unsigned varints where nothing else is said.
const (
	packedAck      = 1 << iota // a ReplicateAck: Done, and nothing known of another holder
	packedTerm                 // the term is told
	packedBegin                // of a Replicate, like the rest
	packedComplete             //
	packedParts                // part and parts are told; otherwise it is 0 of 1
	packedFlags    = 1<<iota - 1
)

// The fewest bytes that a packed message takes, so that a run's length bounds what is made room for.
const (
	leastAck       = 4
	leastReplicate = leastAck + 1 + 4
)

// packable says whether a message can be part of a run.
func packable(m ownership.Message) bool {
	switch m := m.(type) {
	case *ownership.Replicate:
		return len(m.Chunk) <= ownership.LightChunk
	case *ownership.ReplicateAck:
		return m.Outcome == ownership.Done && m.Known == (ownership.Term{}) && m.Holder == (ownership.Node{})
	}
	return false
}

// appendPacked appends a run of messages that are all packable.
func appendPacked(to []byte, run []ownership.Message) []byte {
	var acks uint64
	for _, m := range run {
		if _, ok := m.(*ownership.ReplicateAck); ok {
			acks++
		}
	}
	to = binary.AppendUvarint(to, uint64(len(run))-acks)
	to = binary.AppendUvarint(to, acks)
	var before ownership.Term
	for _, m := range run {
		switch m := m.(type) {
		case *ownership.Replicate:
			var flags byte
			if m.Begin {
				flags |= packedBegin
			}
			if m.Complete {
				flags |= packedComplete
			}
			alone := m.Part == 0 && m.Parts == 1
			if !alone {
				flags |= packedParts
			}
			to = appendPackedHead(to, flags, m.Partition, &before, m.Term, m.Sequence)
			if !alone {
				to = binary.AppendUvarint(to, uint64(m.Part))
				to = binary.AppendUvarint(to, uint64(m.Parts))
			}
			to = varint.AppendText(to, m.Chunk)
			to = binary.LittleEndian.AppendUint32(to, m.Sum)
		case *ownership.ReplicateAck:
			to = appendPackedHead(to, packedAck, m.Partition, &before, m.Term, m.Sequence)
		}
	}
	return to
}

func appendPackedHead(to []byte, flags byte, partition int, before *ownership.Term, t ownership.Term, sequence uint64) []byte {
	if t != *before {
		flags |= packedTerm
	}
	to = append(to, flags)
	to = binary.AppendUvarint(to, uint64(partition))
	if t != *before {
		to = binary.AppendUvarint(to, t.Epoch)
		to = binary.AppendUvarint(to, t.N)
		*before = t
	}
	// The upper half counts attachments, which are few, below a bit that says which follower it is.
	to = binary.AppendUvarint(to, uint64(bits.RotateLeft32(uint32(sequence>>32), 1)))
	return binary.AppendUvarint(to, uint64(uint32(sequence)))
}

// errPacked ends reading a run: after a malformed message it is not known where the next one begins.
var errPacked = errors.New("packed: malformed")

// unpack calls add with the messages of a run, of which there may be so many at most. They and their chunks are parts of a
// few arrays, data among them, which must not change any more. What one message names and does not exist does not concern
// the others: it is rejected, like a malformed one, but with that the rest is. err is the first mistake and names the field.
func (r *messageReader) unpack(data []byte, most int, add func(ownership.Message)) (refused int, err error) {
	run := packedReader{Reader: varint.Of(data)}
	replicates, acks := run.Uint(math.MaxInt32), run.Uint(math.MaxInt32)
	switch {
	case run.Failed():
		return 1, errPacked
	case replicates+acks > uint64(most):
		return 1, fmt.Errorf("packed: %d messages, more than a frame holds", replicates+acks)
	case replicates*leastReplicate+acks*leastAck > uint64(len(run.Rest)):
		return 1, fmt.Errorf("%w: %d bytes are too few for %d messages", errPacked, len(run.Rest), replicates+acks)
	}
	run.replicates, run.acks = make([]ownership.Replicate, 0, replicates), make([]ownership.ReplicateAck, 0, acks)
	for range replicates + acks {
		r.err = nil
		m := run.message(r)
		if run.Failed() {
			return refused + 1, cmp.Or(err, errPacked)
		}
		if r.err != nil {
			refused++
			err = cmp.Or(err, r.err)
			continue
		}
		add(m)
	}
	if len(run.Rest) > 0 {
		refused++
		err = cmp.Or(err, fmt.Errorf("%w: %d bytes after the last message", errPacked, len(run.Rest)))
	}
	return refused, err
}

// packedReader takes a run apart.
type packedReader struct {
	varint.Reader[[]byte]
	before     ownership.Term // of the message before
	replicates []ownership.Replicate
	acks       []ownership.ReplicateAck
}

// message reads the next message, r says whether what it names exists.
func (p *packedReader) message(r *messageReader) ownership.Message {
	flags := p.Byte()
	if flags&packedFlags != flags || flags&packedAck != 0 && flags&^(packedAck|packedTerm) != 0 {
		p.Fail()
	}
	partition := p.Uint(math.MaxUint32)
	if flags&packedTerm != 0 {
		p.before = ownership.Term{Epoch: p.Uvarint(), N: p.Uvarint()}
	}
	upper, lower := p.Uint(math.MaxUint32), p.Uint(math.MaxUint32)
	sequence := uint64(bits.RotateLeft32(uint32(upper), -1))<<32 | lower
	if flags&packedAck != 0 {
		if len(p.acks) == cap(p.acks) { // more than were announced
			p.Fail()
			return nil
		}
		p.acks = append(p.acks, ownership.ReplicateAck{
			Partition: r.partition("replicate_ack.partition", uint32(partition)), Term: p.before, Sequence: sequence, Outcome: ownership.Done,
		})
		return &p.acks[len(p.acks)-1]
	}
	if len(p.replicates) == cap(p.replicates) {
		p.Fail()
		return nil
	}
	part, parts := uint64(0), uint64(1)
	if flags&packedParts != 0 {
		part, parts = p.Uint(math.MaxUint32), p.Uint(math.MaxUint32)
	}
	chunk := slices.Clip(p.Text(ownership.LightChunk))
	if len(chunk) == 0 {
		chunk = nil
	}
	sum := p.Fixed32()
	r.pieces(part, parts)
	p.replicates = append(p.replicates, ownership.Replicate{
		Partition: r.partition("replicate.partition", uint32(partition)), Term: p.before, Sequence: sequence,
		Begin: flags&packedBegin != 0, Complete: flags&packedComplete != 0, Part: int(part), Parts: int(parts), Chunk: chunk, Sum: sum,
	})
	return &p.replicates[len(p.replicates)-1]
}
