package replica

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"reflect"
	"slices"
	"time"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/varint"
)

// This file has the wire form of the ownership protocol's messages: a byte for the kind, then the fields in the order
// of coder.message. The same functions write and read. Numbers are unsigned varints; bytes follow their length, items
// of a list their number; booleans are the bits of one byte. A node with an empty name is the zero Node.

const (
	// maxWeight bounds the weight (ownership.Weight) of one message. Cores stay below it: lists have an entry for each
	// partition, and chunks are sent in parts.
	maxWeight = 2 << 20
	// maxEntries bounds the entries of a Block, and the refusals of a BlockAck.
	maxEntries = 1 << 15
	// maxItems bounds the items of all lists in one frame, so that a frame of tiny items does not allocate much. Frames
	// of a Messenger stay below it: they have one message, or weigh at most maxFrame, and no item weighs less than 5.
	maxItems = 1 << 16
	// maxWait bounds the durations in a message. Leases last for seconds.
	maxWait = time.Hour
)

// kinds has a nil message of each kind. Its index is the kind's number on the wire.
var kinds = [...]ownership.Message{
	(*ownership.Query)(nil), (*ownership.QueryReply)(nil), (*ownership.Entrust)(nil), (*ownership.Offer)(nil),
	(*ownership.OfferReply)(nil), (*ownership.Block)(nil), (*ownership.BlockAck)(nil), (*ownership.Commit)(nil),
	(*ownership.CommitAck)(nil), (*ownership.Forget)(nil), (*ownership.GrantRequest)(nil), (*ownership.GrantReply)(nil),
	(*ownership.ReadRecords)(nil), (*ownership.Records)(nil),
}

// Append appends the wire form of a message to to. It keeps no reference to m.
func Append(to []byte, m ownership.Message) []byte {
	kind := slices.IndexFunc(kinds[:], func(k ownership.Message) bool { return reflect.TypeOf(k) == reflect.TypeOf(m) })
	c := coder{out: append(to, byte(kind))}
	c.message(m)
	return c.out
}

// Read reads a message in its wire form, as a Messenger of a cluster with so many partitions does. Chunks are parts of
// data.
func Read(data []byte, partitions int) (ownership.Message, error) {
	c := coder{reading: true, partitions: partitions, items: maxItems}
	return c.read(data)
}

// coder writes or reads messages. A reader checks that partitions and outcomes exist and that lists and texts are no
// longer than an honest peer makes them. The core checks everything else.
type coder struct {
	out []byte // what is written

	reading    bool
	in         varint.Reader[[]byte]
	partitions int
	items      int   // that the lists of the frame may still have
	err        error // the first one

	before ownership.Term // of the last entry
}

func (c *coder) read(data []byte) (ownership.Message, error) {
	c.in, c.err = varint.Of(data), nil
	kind := int(c.in.Byte())
	if kind >= len(kinds) {
		return nil, fmt.Errorf("kind: %d is unknown", kind)
	}
	m := reflect.New(reflect.TypeOf(kinds[kind]).Elem()).Interface().(ownership.Message)
	c.message(m)
	if c.in.Failed() || len(c.in.Rest) > 0 {
		c.fail("length", "%d bytes are too many or too few", len(data))
	}
	if c.err != nil {
		return nil, fmt.Errorf("%s: %w", reflect.TypeOf(m).Elem().Name(), c.err)
	}
	return m, nil
}

func (c *coder) fail(field, problem string, args ...any) {
	if c.err == nil {
		c.err = fmt.Errorf("%s: %s", field, fmt.Sprintf(problem, args...))
	}
	c.in.Fail()
}

// message names the fields of each kind of message.
func (c *coder) message(m ownership.Message) {
	switch m := m.(type) {
	case *ownership.Query:
		c.numbers(&m.ID)
		list(c, "partitions", &m.Partitions, c.partitions, (*coder).partition)
	case *ownership.QueryReply:
		c.numbers(&m.ID)
		list(c, "infos", &m.Infos, c.partitions, (*coder).info)
	case *ownership.Entrust:
		c.of(&m.Partition, &m.Term)
	case *ownership.Offer:
		c.of(&m.Partition, &m.Term)
	case *ownership.OfferReply:
		c.of(&m.Partition, &m.Term)
		number(c, "verdict", &m.Verdict, ownership.Accepted, ownership.Refused)
	case *ownership.Block:
		c.numbers(&m.Log, &m.Position, &m.Heard)
		number(c, "sum", &m.Sum, 0, math.MaxUint32)
		c.before = ownership.Term{}
		list(c, "entries", &m.Entries, maxEntries, (*coder).entry)
	case *ownership.BlockAck:
		c.numbers(&m.Log, &m.Position)
		c.flags(&m.Lost)
		list(c, "refusals", &m.Refusals, maxEntries, (*coder).refusal)
	case *ownership.Commit:
		c.of(&m.Partition, &m.Term)
		c.numbers(&m.Attachment)
		c.chunk(&m.Chunk)
		number(c, "sum", &m.Sum, 0, math.MaxUint32)
		c.term(&m.Known)
		c.flags(&m.Merge, &m.Granted)
	case *ownership.CommitAck:
		c.of(&m.Partition, &m.Term)
		number(c, "outcome", &m.Outcome, ownership.Done, ownership.Full)
		c.term(&m.New)
		c.flags(&m.Keep)
		c.numbers(&m.Attachment)
		c.term(&m.Known)
	case *ownership.Forget:
		c.of(&m.Partition, &m.Term)
	case *ownership.GrantRequest:
		c.numbers(&m.ID)
		list(c, "items", &m.Items, c.partitions, (*coder).grantItem)
	case *ownership.GrantReply:
		c.numbers(&m.ID, &m.Epoch)
		list(c, "items", &m.Items, c.partitions, (*coder).grantAnswer)
	case *ownership.ReadRecords:
		c.numbers(&m.ID)
	case *ownership.Records:
		c.numbers(&m.ID, &m.Epoch)
		c.flags(&m.Read, &m.Fresh)
		// two of a partition when one has replaced another
		list(c, "records", &m.Records, 2*c.partitions, (*coder).record)
	}
}

func (c *coder) info(i *ownership.Info) {
	c.of(&i.Partition, &i.Term)
	c.flags(&i.Held, &i.Claiming)
	c.node(&i.Holder)
	c.term(&i.Copy.Term)
	c.numbers(&i.Copy.Attachment)
}

func (c *coder) refusal(r *ownership.Refusal) {
	c.numbers(&r.Position)
	c.of(&r.Partition, &r.Known)
	c.numbers(&r.Attachment)
	number(c, "outcome", &r.Outcome, ownership.Done, ownership.Full)
	c.node(&r.Holder)
}

func (c *coder) grantItem(i *ownership.GrantItem) {
	c.of(&i.Partition, &i.Term)
	c.node(&i.Backup)
	c.node(&i.Release.Node)
	c.term(&i.Release.Term)
}

func (c *coder) grantAnswer(a *ownership.GrantAnswer) {
	c.of(&a.Partition, &a.Term)
	c.flags(&a.Granted)
	c.record(&a.Recorded)
	number(c, "wait", &a.Wait, 0, maxWait)
}

func (c *coder) record(r *ownership.Record) {
	c.of(&r.Partition, &r.Term)
	c.node(&r.Node)
	c.node(&r.Backup)
	c.numbers(&r.ID)
}

// entry leaves out a term that equals that of the entry before. It moves an attachment's highest bit, which says which
// follower it is of, to the lowest place, so that the varint stays short.
func (c *coder) entry(e *ownership.Entry) {
	same, attachment := e.Term == c.before, bits.RotateLeft64(e.Attachment, 1)
	origin := e.Origin != ownership.Term{}
	c.flags(&same, &e.Begin, &e.Complete, &e.More, &e.Join, &origin)
	c.partition(&e.Partition)
	if !same {
		c.term(&e.Term)
		c.before = e.Term
	}
	if origin {
		c.term(&e.Origin)
	}
	c.numbers(&attachment)
	c.chunk(&e.Chunk)
	if c.reading {
		e.Term, e.Attachment = c.before, bits.RotateLeft64(attachment, -1)
	}
}

// number writes a number, or reads one and checks that it is between least and most.
func number[T ~int | ~int64 | ~uint8 | ~uint32 | ~uint64](c *coder, field string, v *T, least, most T) {
	if !c.reading {
		c.out = binary.AppendUvarint(c.out, uint64(*v))
		return
	}
	n := c.in.Uvarint()
	if *v = T(n); (n < uint64(least) || n > uint64(most)) && !c.in.Failed() {
		c.fail(field, "%d is not one of %d to %d", n, least, most)
	}
}

// list writes or reads a list. Reading makes nil of an empty one.
func list[T any](c *coder, field string, l *[]T, most int, item func(*coder, *T)) {
	n := len(*l)
	number(c, field, &n, 0, most)
	if c.reading && n > min(c.items, len(c.in.Rest)) {
		c.fail(field, "%d items are too many for the frame", n)
	}
	if c.reading && n > 0 && c.err == nil {
		c.items -= n
		*l = make([]T, n)
	}
	for i := range *l {
		item(c, &(*l)[i])
	}
}

func (c *coder) numbers(list ...*uint64) {
	for _, v := range list {
		number(c, "", v, 0, math.MaxUint64)
	}
}

func (c *coder) partition(p *int) { number(c, "partition", p, 0, c.partitions-1) }

func (c *coder) term(t *ownership.Term) { c.numbers(&t.Epoch, &t.N) }

func (c *coder) of(p *int, t *ownership.Term) {
	c.partition(p)
	c.term(t)
}

func (c *coder) flags(flags ...*bool) {
	var set byte
	for i, f := range flags {
		if *f {
			set |= 1 << i
		}
	}
	number(c, "flags", &set, 0, 1<<len(flags)-1)
	for i, f := range flags {
		if c.reading {
			*f = set>>i&1 != 0
		}
	}
}

func (c *coder) node(n *ownership.Node) {
	length := len(n.Name)
	number(c, "name", &length, 0, ownership.MaxName)
	switch {
	case length == 0 || c.err != nil:
		return
	case c.reading:
		n.Name = string(c.in.Take(uint64(length)))
	default:
		c.out = append(c.out, n.Name...)
	}
	c.numbers(&n.Boot)
}

func (c *coder) chunk(chunk *[]byte) {
	if !c.reading {
		c.out = varint.AppendText(c.out, *chunk)
	} else if b := c.in.Text(maxWeight); len(b) > 0 {
		*chunk = slices.Clip(b)
	}
}
