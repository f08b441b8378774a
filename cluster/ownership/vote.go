package ownership

import (
	"slices"
	"time"
)

// voter records, for every partition, who holds it. It keeps nothing on disk: one that has restarted abstains for longer
// than anything it may have granted before lasts, and then reads what the others have. In this order: an answer given
// before the restart may make a majority with one that another voter is only about to give, and what is read before that
// has run out would not show it.
type voter struct {
	c       *Core
	at      int // among the voters
	records []record
	last    map[Node]uint64 // by sender: the highest request taken in; an older one that comes late must not undo it
	epoch   uint64          // terms of a lower one are not recorded
	seen    uint64          // the highest epoch that anybody has told of

	votesAt int64 // when the time of abstaining is over
	read    bool
	began   bool // this voter began its epoch
	told    Node // whom it has told so, if only one
	spread  bool // it has told more than one
	askAt   int64
	asks    uint64
	asked   int64 // when the others were asked first, by Core.awake
	replies map[string]reading
}

// record is a Record, when it ends, and which other process's it has replaced.
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

// lateAnswers is how many questions later the answer to one is still taken: all are asked after the time of abstaining, each retryAfter after
// the one before, and a voter that is far away, or short of CPU, answers each of them later than that.
const lateAnswers = 5

func newVoter(c *Core) *voter {
	v := &voter{
		c: c, at: slices.Index(c.cfg.Voters, c.cfg.Self.Name), records: make([]record, c.cfg.Partitions),
		last: make(map[Node]uint64), replies: make(map[string]reading),
	}
	v.votesAt = c.t + v.life()
	return v
}

// life is how long a record is kept, counted on this voter's clock from the arrival of a request: longer than the holder
// counts its lease from sending it, even if this clock is fast and the holder's slow by as much as is allowed for. With
// both off by ρ the ratio is (1+ρ)/(1-ρ), which is above 1+2ρ and below 1+3ρ.
func (v *voter) life() int64 {
	lease := int64(v.c.cfg.Lease)
	return lease + lease/1_000_000*3*v.c.cfg.Drift
}

// ready says whether it grants.
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

// consider ends the reading when enough is known.
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
		// There may be a majority that knows.
	case fresh != nil && fresh.Epoch == v.seen:
		// A voter has begun an epoch in which no majority can have recorded anything yet.
		v.adopt(v.seen)
	case v.asks > 0 && answered+1 >= majority && c.awake >= v.asked+int64(v.at)*epochTurn:
		// So many have forgotten that a grant may be known to nobody. All of them have run out, for this voter has abstained
		// and without it there was no majority: a new epoch begins. Its number is to be above every one that ever was, which
		// nobody may remember either: hence the time of day, of which nothing else here makes use.
		v.began = true
		v.adopt(max(v.seen+1, uint64(max(c.now.Wall, 0))/uint64(time.Second)))
		c.out.Notes = append(c.out.Notes, Note{What: "new epoch", Partition: -1, Term: Term{Epoch: v.epoch}})
	}
}

// adopt takes over what the others have recorded: of each partition the highest term, and the highest of other processes
// that it has, or has had, to replace.
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

// add takes in what another voter has recorded.
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

func (v *voter) onRecords(from Node, m *Records) {
	if v.read || m.ID == 0 || m.ID > v.asks || v.asks-m.ID > lateAnswers || !slices.Contains(v.c.cfg.Voters, from.Name) {
		return
	}
	if r, ok := v.replies[from.Name]; ok && m.ID < r.ID {
		return
	}
	v.replies[from.Name] = reading{from, m}
	v.consider()
}

// onRequest records who asks, where nothing stands against it.
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
		// The same process under the same or a higher term: what it has replaced is still what it has to know of.
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
