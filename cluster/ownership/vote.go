package ownership

import (
	"slices"
	"time"
)

// This file is the voter's side of grants. A voter records the holder of every partition, and its backup. A holder
// decides under strict rules while a majority of the voters have it on record (grant.go). DESIGN.md says why each rule
// is needed.
//
// The path of a vote: onRequest takes a GrantRequest. vote decides on each of its partitions. The GrantReply has a
// grant, or the record that stands against it.
//
// A voter keeps nothing on disk. The path of a restart:
//
//  1. The voter abstains for longer than any grant that it may have given before lasts (votesAt).
//  2. tick asks the other voters for their records (ReadRecords), again every retryAfter.
//  3. onRecords collects their answers. When enough have answered, consider takes over their records (adopt). If too few
//     voters have records, it begins a new epoch.
//
// The reading comes after the abstention. A grant from before the restart may make a majority with a grant that another
// voter gives during the abstention. Records that were read earlier would not show the other grant.
//
// Words:
//
//	record    the holder of a partition, its term and its backup; it stands until it ends, unless it is released
//	replaced  the highest record of another process that the present record has replaced; a grant tells it, so that
//	          the new holder knows who may have charged last (resolve)
//	epoch     the upper part of terms. A voter does not record terms of a lower epoch than its own
//
// Other files must keep: a process numbers its GrantRequests upwards.

// voter is one voter's records, and its restart.
type voter struct {
	c       *Core
	at      int             // index of this voter in Config.Voters
	records []record        // by partition
	last    map[Node]uint64 // by sender: the highest request taken in; a late older one must not undo it
	epoch   uint64          // terms of a lower epoch are not recorded
	seen    uint64          // the highest epoch that any process has named

	votesAt  int64              // when it stops abstaining
	read     bool               // it has read the other voters' records, or has begun an epoch
	founders []Node             // the voters that were there when this voter began its epoch
	askAt    int64              // no question to the other voters before
	asks     uint64             // the number of questions to the other voters
	asked    int64              // when the first was sent, by Core.awake
	replies  map[string]reading // by ring name of the voter
}

// record is what a voter has recorded for a partition.
type record struct {
	Record
	ends     int64 // in boot time
	replaced Record
}

// reading is another voter's answer to a ReadRecords.
type reading struct {
	from Node
	*Records
}

// epochTurn times the index of a voter is how long the voter waits, from its first question, before it begins a new
// epoch. So voters that start together share the epoch of the first of them.
const epochTurn = int64(500 * time.Millisecond)

func newVoter(c *Core) *voter {
	v := &voter{
		c: c, at: slices.Index(c.cfg.Voters, c.cfg.Self.Name), records: make([]record, c.cfg.Partitions),
		last: make(map[Node]uint64), replies: make(map[string]reading),
	}
	v.votesAt = c.t + v.life()
	return v
}

// life is how long a record stands, on this voter's clock from the arrival of the request. It is longer than the
// holder's lease, which counts from the sending of the request, even if this clock is fast and the holder's is slow by
// the allowed Drift. If both are off by ρ, their rates have the ratio (1+ρ)/(1-ρ), which is above 1+2ρ and below 1+3ρ.
func (v *voter) life() int64 {
	return leaseFor + leaseFor/1_000_000*3*drift
}

// ready reports whether the voter grants.
func (v *voter) ready() bool { return v.read && v.c.t >= v.votesAt }

// tick asks the other voters for their records, from the end of the abstention until the reading has ended.
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
	answered, read := 0, 0 // other voters that have answered; of them, those that have records
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
	case fresh != nil && fresh.Epoch == v.seen:
		// A voter has begun an epoch in which this one cannot have forgotten a record.
		v.adopt(v.seen)
	case read+silent >= majority:
		// A majority may know the records. Wait for it.
	case v.asks > 0 && answered+1 >= majority && c.awake >= v.asked+int64(v.at)*epochTurn:
		// So many voters have restarted that no voter may know a grant. All grants have ended: this voter has
		// abstained, and without it there was no majority. So a new epoch begins. Its number must be above all earlier
		// ones. No voter may know those either, so the number is the time of day in seconds. Nothing else in this
		// package reads the time of day.
		for _, name := range c.cfg.Voters {
			v.founders = append(v.founders, c.named[name])
		}
		v.adopt(max(v.seen+1, uint64(max(c.now.Wall, 0))/uint64(time.Second)))
		c.out.Notes = append(c.out.Notes, Note{What: "new epoch", Partition: -1, Term: Term{Epoch: v.epoch}})
	}
}

// adopt ends the reading. It takes over the other voters' records: of each partition that of the highest term, and the
// highest one of another process as replaced.
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

// onRead tells another voter all records. Records.Fresh says that this voter began its epoch when the asking process was
// there already. A process that asks has not granted anything yet, so no voter of its name has recorded anything in the
// epoch. It needs no other voter's records then: any two majorities have a voter in common, and that one knows its own.
func (v *voter) onRead(from Node, m *ReadRecords) {
	r := &Records{ID: m.ID, Read: v.read, Epoch: max(v.epoch, v.seen)}
	if v.read {
		r.Fresh = slices.Contains(v.founders, from)
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

// onRecords takes in an answer to any question of this reading. Every question was sent after the abstention, so every
// answer is recent enough.
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

// onRequest answers a GrantRequest. It ignores a request that has arrived after a later one of the same sender.
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

// vote records the sender as the holder of a partition, or refuses. The term must be of the voter's epoch or a higher
// one. It grants a renewal, which has the recorded term and process. It also grants a higher term than the recorded
// one, if nothing is recorded, or the record has ended, is the sender's, or was released.
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
		// The same process, under the same or a higher term. Every grant tells the record that it replaced first,
		// because the answer to the first request may have been lost.
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
