package disk

import (
	"encoding/binary"
	"errors"
	"strings"

	"github.com/cockroachdb/pebble/v2"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/varint"
)

// An entry's key has its partition and its number; numbers rise. Its value is a byte of flags; then, as varints, the
// entry's position (term and attachment), its instant by the disk's clock and, with flagBegin, the origin of the
// content; then the chunk.
const (
	flagMore     = 1 << iota // the chunk goes on in the next entry
	flagBegin                // the first entry of a whole copy
	flagComplete             // the last entry of a whole copy
)

// A log must begin anew when its changes have more bytes than twice its copy and slack.
const slack = 64 << 10

var (
	headKey  = []byte("head")
	clockKey = []byte("clock")
)

func entryKey(p int, number uint64) []byte {
	key := binary.BigEndian.AppendUint16([]byte{'p'}, uint16(p))
	return binary.BigEndian.AppendUint64(key, number)
}

// Write writes blocks with one sync, and returns the confirmation; nil: nothing is confirmed. run calls it, and so do
// tests that have a clock of their own.
func (d *Disk) Write(blocks []*ownership.Block) *ownership.BlockAck {
	batch := d.db.NewBatch()
	defer func() { _ = batch.Close() }() // it has been applied, or the disk has failed
	now := d.cfg.Now()
	ack := &ownership.BlockAck{}
	for _, b := range blocks {
		if b.Log != d.log {
			d.log, d.position = b.Log, 0
		}
		if b.Position == d.position+1 { // otherwise the core repeats a block, because its confirmation was lost
			d.position++
			for i := range b.Entries {
				if e := &b.Entries[i]; !d.add(batch, e, now+d.head.Offset) {
					ack.Refusals = append(ack.Refusals, ownership.Refusal{
						Position: b.Position, Partition: e.Partition, Attachment: e.Attachment,
						Outcome: ownership.Again,
					})
				}
			}
		}
	}
	d.set(batch, clockKey, binary.BigEndian.AppendUint64(nil, uint64(now+d.head.Offset)))
	if head := d.changedHead(); head != nil {
		d.set(batch, headKey, head)
	}
	if err := d.db.Apply(batch, pebble.Sync); err != nil {
		d.fail(err)
	}
	if d.Err() != nil || len(blocks) == 0 {
		return nil
	}
	d.synced.Store(d.cfg.Now())
	ack.Log, ack.Position = d.log, d.position
	return ack
}

func (d *Disk) set(batch *pebble.Batch, key, value []byte) {
	if err := batch.Set(key, value, nil); err != nil {
		d.fail(err)
	}
}

// add adds an entry to the log of its partition. It returns false if the log must begin anew.
func (d *Disk) add(batch *pebble.Batch, e *ownership.Entry, at int64) bool {
	l := d.logs[e.Partition]
	if e.Begin && e.Complete && e.Term == (ownership.Term{}) {
		if l != nil {
			d.cut(batch, e.Partition, l.first, d.next)
			delete(d.logs, e.Partition)
		}
		return true
	}
	begins := e.Begin && (l == nil || !l.torn)
	if l == nil && !begins {
		return false
	}
	if l == nil {
		l = &diskLog{first: d.next}
		d.logs[e.Partition] = l
	}
	if begins {
		l.begin, l.building, l.tail = d.next, true, 0
	}
	value := appendEntry(nil, e, begins, at)
	d.set(batch, entryKey(e.Partition, d.next), value)
	d.next++
	l.torn = e.More
	l.tail += len(value)
	if e.Complete && !e.More {
		d.cut(batch, e.Partition, l.first, l.begin)
		l.first, l.building, l.base, l.tail = l.begin, false, l.tail, 0
	}
	return l.building || l.torn || l.tail <= 2*l.base+slack
}

// cut deletes a partition's entries with numbers from from to before to.
func (d *Disk) cut(batch *pebble.Batch, p int, from, to uint64) {
	if from == to {
		return
	}
	if err := batch.DeleteRange(entryKey(p, from), entryKey(p, to), nil); err != nil {
		d.fail(err)
	}
}

func appendEntry(to []byte, e *ownership.Entry, begins bool, at int64) []byte {
	var flags byte
	if e.More {
		flags |= flagMore
	}
	if begins {
		flags |= flagBegin
	}
	if e.Complete && !e.More {
		flags |= flagComplete
	}
	to = append(to, flags)
	for _, n := range [...]uint64{e.Term.Epoch, e.Term.N, e.Attachment, uint64(at)} {
		to = binary.AppendUvarint(to, n)
	}
	if begins {
		to = binary.AppendUvarint(binary.AppendUvarint(to, e.Origin.Epoch), e.Origin.N)
	}
	return append(to, e.Chunk...)
}

// Chunk is a part of a partition's content.
type Chunk struct {
	Age  int64 // nanoseconds since it was written
	Data []byte
}

// Copy is a partition's content on disk. Its chunks must be applied in order. take may keep them.
type Copy struct {
	ownership.Restored
	Chunks []Chunk
}

// Restore calls take with the content of each partition. It fails with take's error, or if the disk is damaged. Its
// errors name the directory.
func (d *Disk) Restore(take func(Copy) error) error {
	it, err := d.db.NewIter(&pebble.IterOptions{LowerBound: []byte{'p'}, UpperBound: []byte{'p' + 1}})
	if err != nil {
		return d.named(Damaged(err))
	}
	var r restoring
	for ok := it.First(); ok && err == nil; ok = it.Next() {
		key := it.Key()
		if len(key) != 11 {
			err = Damaged(errors.New("a key is too short"))
			break
		}
		if p := int(binary.BigEndian.Uint16(key[1:])); r.log == nil || p != r.partition {
			err = d.end(&r, take)
			r = restoring{partition: p, log: &diskLog{first: binary.BigEndian.Uint64(key[3:])}}
		}
		if err == nil {
			err = r.add(binary.BigEndian.Uint64(key[3:]), it.Value(), d.began)
		}
		d.next = max(d.next, binary.BigEndian.Uint64(key[3:])+1)
	}
	if bad := it.Error(); bad != nil && err == nil {
		err = Damaged(bad)
	}
	if err == nil {
		err = d.end(&r, take)
	}
	if closed := errors.Join(it.Close(), d.Err()); err == nil {
		err = closed // after damage the engine says the same once more
	}
	return d.named(err)
}

// Damaged returns the error for a directory with invalid content, in one line.
func Damaged(err error) error {
	text, _, _ := strings.Cut(err.Error(), "\n")
	return errors.New("the counters are damaged; remove this folder to start without them: " + text)
}

// end calls take with what was read of one partition, unless no copy of it was ever complete.
func (d *Disk) end(r *restoring, take func(Copy) error) error {
	if r.log == nil {
		return nil
	}
	d.logs[r.partition] = r.log
	r.log.torn = false // the next entry begins a chunk
	if r.at == (ownership.Position{}) {
		return nil
	}
	return take(Copy{ownership.Restored{Partition: r.partition, Position: r.at, Origin: r.origin}, r.chunks})
}

// restoring is the log of one partition while it is read.
//
// The node may have stopped while a new copy was written. The entries of the new copy have whole states, which are
// newer than those of the old log, so they are applied on top of it. The position stays that of the old log, because
// the new copy is not complete.
type restoring struct {
	partition int
	log       *diskLog
	at        ownership.Position
	origin    ownership.Term
	begun     ownership.Term // the origin of the copy that began last
	chunks    []Chunk
	open      []byte // the beginning of a chunk that goes on
}

func (r *restoring) add(number uint64, value []byte, now int64) error {
	in := varint.Of(value)
	flags := in.Byte()
	term := ownership.Term{Epoch: in.Uvarint(), N: in.Uvarint()}
	attachment, at := in.Uvarint(), in.Uvarint()
	if flags&flagBegin != 0 {
		r.begun = ownership.Term{Epoch: in.Uvarint(), N: in.Uvarint()}
	}
	if in.Failed() {
		return Damaged(errors.New("an entry is too short"))
	}
	l := r.log
	if flags&flagBegin != 0 {
		l.begin, l.building, l.tail, r.open = number, true, 0, nil
	} else if number == l.first {
		return Damaged(errors.New("the beginning of a log is not there"))
	}
	l.tail += len(value)
	r.open = append(r.open, in.Rest...)
	if flags&flagMore != 0 {
		return nil
	}
	if flags&flagComplete != 0 {
		l.building, l.base, l.tail = false, l.tail, 0
		r.origin = r.begun
	}
	if !l.building {
		r.at = ownership.Position{Term: term, Attachment: attachment}
	}
	if len(r.open) > 0 {
		r.chunks = append(r.chunks, Chunk{Age: max(now-int64(at), 0), Data: r.open})
	}
	r.open = nil
	return nil
}
