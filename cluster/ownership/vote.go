package ownership

import (
	"slices"
	"time"
)

// voter records the holder of every partition. It keeps nothing on disk. After a restart it abstains for longer than
// any grant that it may have given before lasts, and then reads the other voters' records. The order matters: an answer
// from before the restart may make a majority with an answer that another voter is yet to give, and records that were
// read earlier would not show that one.
type voter struct {
	c       *Core
	at      int // among the voters
	records []record
	last    map[Node]uint64 // by sender: the highest request taken in; a late older one must not undo it
	epoch   uint64          // terms of a lower epoch are not recorded
	seen    uint64          // the highest epoch that any process has named

	votesAt int64  // when it stops abstaining
	read    bool   // it has the other voters' records
	began   bool   // this voter began its epoch
	told    Node   // the first voter that has read so from it
	spread  bool   // another voter has read so as well
	askAt   int64  // no question to the other voters before
	asks    uint64 // questions to the other voters
	asked   int64  // when the first was sent, by Core.awake
	replies map[string]reading
}

// record is a Record, when it ends, and the record of another process that it has replaced.
type record struct {
	Record
	ends     int64
	replaced Record
}

// reading is what another voter has answered.
type reading struct {
	from Node
	*Records
}

// epochTurn is how long after its first question each voter waits for those before it to begin a new epoch, so that
// voters that start together share one.
const epochTurn = int64(500 * time.Millisecond)

func newVoter(c *Core) *voter {
	v := &voter{
		c: c, at: slices.Index(c.cfg.Voters, c.cfg.Self.Name), records: make([]record, c.cfg.Partitions),
		last: make(map[Node]uint64), replies: make(map[string]reading),
	}
	v.votesAt = c.t + v.life()
	return v
}

// life is how long a record is kept, on this voter's clock from the arrival of a request. It is longer than the
// holder's lease, which counts from the sending of the request, even if this clock is fast and the holder's is slow by
// the allowed Drift. With both off by ρ the ratio is (1+ρ)/(1-ρ), which is above 1+2ρ and below 1+3ρ.
func (v *voter) life() int64 {
	lease := int64(v.c.cfg.Lease)
	return lease + lease/1_000_000*3*v.c.cfg.Drift
}

// ready reports whether it grants.
func (v *voter) ready() bool { return v.read && v.c.t >= v.votesAt }

func (v *voter) tick() {
	if v.read || v.c.t < v.votesAt {
		return
	}
	if v.c.t >= v.askAt {
		v.askAt = v.c.t + retryAfter
		if v.asks++; v.asks == 1 {
			v.asked = v.c.awake
		}
		for _, name := range v.c.cfg.Voters {
			if n, ok := v.c.named[name]; ok && n != v.c.cfg.Self {
				v.c.send(n, &ReadRecords{ID: v.asks})
			}
		}
	}
	v.consider()
}

// consider ends the reading when enough voters have answered.
func (v *voter) consider() {
	c := v.c
	majority := c.grants.majority()
	answered, read := 0, 0
	var fresh *reading
	for _, name := range c.cfg.Voters {
		r, ok := v.replies[name]
		if !ok || name == c.cfg.Self.Name {
			continue
		}
		answered++
		v.seen = max(v.seen, r.Epoch)
		if r.Read {
			read++
			if r.Fresh {
				fresh = &r
			}
		}
	}
	silent := len(c.cfg.Voters) - 1 - answered
	switch {
	case read >= majority:
		v.adopt(v.seen)
	case read+silent >= majority:
		// A majority may know the records.
	case fresh != nil && fresh.Epoch == v.seen:
		// A voter has begun an epoch in which no majority can have recorded anything yet.
		v.adopt(v.seen)
	case v.asks > 0 && answered+1 >= majority && c.awake >= v.asked+int64(v.at)*epochTurn:
		// So many voters have restarted that no voter may know a grant. All grants have ended: this voter has
		// abstained, and without it there was no majority. So a new epoch begins. Its number must be above all earlier
		// ones, which no voter may know either, so it is taken from the time of day. Nothing else here reads that.
		v.began = true
		v.adopt(max(v.seen+1, uint64(max(c.now.Wall, 0))/uint64(time.Second)))
		c.out.Notes = append(c.out.Notes, Note{What: "new epoch", Partition: -1, Term: Term{Epoch: v.epoch}})
	}
}

// adopt takes over the other voters' records: of each partition the highest term, and the highest record of another
// process that this one replaces.
func (v *voter) adopt(epoch uint64) {
	v.read, v.epoch = true, epoch
	for _, name := range v.c.cfg.Voters {
		r, ok := v.replies[name]
		if !ok || !r.Read {
			continue
		}
		for _, rec := range r.Records.Records {
			if rec.Partition >= 0 && rec.Partition < len(v.records) {
				v.records[rec.Partition].add(rec, v.c.t+v.life())
			}
		}
	}
	clear(v.replies)
}

// add takes in another voter's record.
func (r *record) add(other Record, ends int64) {
	switch {
	case r.Term.Less(other.Term):
		if r.Node != other.Node && r.replaced.Term.Less(r.Term) {
			r.replaced = r.Record
		}
		r.Record, r.ends = other, ends
		if r.replaced.Node == r.Node {
			r.replaced = Record{}
		}
	case r.Term == other.Term && r.Node == other.Node:
		if r.ID < other.ID {
			r.Record = other
		}
	case other.Node != r.Node && r.replaced.Term.Less(other.Term):
		r.replaced = other
	case other.Node == r.replaced.Node && other.Term == r.replaced.Term && other.ID > r.replaced.ID:
		r.replaced = other
	}
}

func (v *voter) onRead(from Node, m *ReadRecords) {
	r := &Records{ID: m.ID, Read: v.read, Epoch: max(v.epoch, v.seen)}
	if v.read {
		v.spread = v.spread || v.told != (Node{}) && v.told != from
		v.told = from
		r.Fresh = v.began && !v.spread
		for p := range v.records {
			if v.records[p].Node != (Node{}) {
				r.Records = append(r.Records, v.records[p].Record)
				if old := v.records[p].replaced; old.Node != (Node{}) {
					r.Records = append(r.Records, old)
				}
			}
		}
	}
	v.c.send(from, r)
}

// onRecords takes in an answer to any question: all were sent after the abstention, so each answer is recent enough.
func (v *voter) onRecords(from Node, m *Records) {
	if v.read || m.ID == 0 || m.ID > v.asks || !slices.Contains(v.c.cfg.Voters, from.Name) {
		return
	}
	if r, ok := v.replies[from.Name]; ok && m.ID < r.ID {
		return
	}
	v.replies[from.Name] = reading{from, m}
	v.consider()
}

// onRequest records the sender as the holder of each partition that no other record stands against.
func (v *voter) onRequest(from Node, m *GrantRequest) {
	for _, i := range m.Items {
		v.seen = max(v.seen, i.Term.Epoch)
	}
	if m.ID <= v.last[from] {
		return
	}
	v.last[from] = m.ID
	reply := &GrantReply{ID: m.ID, Items: make([]GrantAnswer, len(m.Items))}
	if v.read {
		reply.Epoch = v.epoch
	}
	for n := range m.Items {
		reply.Items[n] = v.vote(from, m.ID, &m.Items[n])
	}
	v.c.send(from, reply)
}

// vote grants if the term is of this epoch and above the recorded one, and the recorded process has ended, released
// that term, or is the sender. A request for the recorded term and process is a renewal.
func (v *voter) vote(from Node, id uint64, i *GrantItem) GrantAnswer {
	a := GrantAnswer{Partition: i.Partition, Term: i.Term}
	if !v.ready() {
		a.Wait = time.Duration(max(v.votesAt-v.c.t, 0))
		return a
	}
	r := &v.records[i.Partition]
	fresh := record{
		Record:   Record{Partition: i.Partition, Term: i.Term, Node: from, Backup: i.Backup, ID: id},
		ends:     v.c.t + v.life(),
		replaced: r.Record,
	}
	if r.Node == from {
		// The same process, under the same or a higher term: it still has to know of the record that it replaced first.
		fresh.replaced = r.replaced
	}
	switch {
	case i.Term.Epoch < v.epoch:
	case r.Term == i.Term && r.Node == from:
		a.Granted = r.ID < id
	case !r.Term.Less(i.Term):
	case r.Node == (Node{}) || r.ends <= v.c.t || r.Node == from || i.Release == (Release{r.Node, r.Term}):
		a.Granted = true
	}
	if !a.Granted {
		a.Recorded, a.Wait = r.Record, time.Duration(max(r.ends-v.c.t, 0))
		return a
	}
	*r = fresh
	a.Recorded = r.replaced
	return a
}
