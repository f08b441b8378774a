package ownership

import (
	"slices"
	"time"
)

// voter records, for every partition, who holds it. It keeps nothing on disk: one that has restarted reads what the others
// have, and abstains for longer than anything it may have granted before lasts.
type voter struct {
	c       *Core
	records []record
	last    map[Node]uint64 // by sender: the highest request taken in; an older one that comes late must not undo it
	epoch   uint64          // terms of a lower one are not recorded
	seen    uint64          // the highest epoch among the terms that holders have asked with

	votesAt int64 // when the time of abstaining is over
	read    bool
	askAt   int64
	asks    uint64
	replies map[string]reading
}

// record is a Record and when it ends.
type record struct {
	Record
	ends int64
}

// reading is what another voter has answered.
type reading struct {
	from Node
	*Records
}

func newVoter(c *Core) *voter {
	v := &voter{c: c, records: make([]record, c.cfg.Partitions), last: make(map[Node]uint64), replies: make(map[string]reading)}
	v.votesAt = c.t + v.life()
	switch c.cfg.Mutation {
	case VoteAtOnce:
		v.votesAt = c.t
	case ForgetTerms:
		v.read, v.epoch = true, 1
	}
	return v
}

// life is how long a record is kept, counted on this voter's clock from the arrival of a request: longer than the holder
// counts its lease from sending it, even if this clock is fast and the holder's slow by as much as is allowed for. With
// both off by ρ the ratio is (1+ρ)/(1-ρ), which is above 1+2ρ and below 1+3ρ.
func (v *voter) life() int64 {
	lease := int64(v.c.cfg.Lease)
	if v.c.cfg.Mutation == ShortRecord {
		return lease + lease/1_000_000*2*v.c.cfg.Drift
	}
	return lease + lease/1_000_000*3*v.c.cfg.Drift
}

// ready says whether it grants.
func (v *voter) ready() bool { return v.read && v.c.t >= v.votesAt }

func (v *voter) tick() {
	if v.read {
		return
	}
	if v.c.t >= v.askAt {
		v.askAt = v.c.t + retryAfter
		v.asks++
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
	epoch := v.seen
	for _, name := range c.cfg.Voters {
		r, ok := v.replies[name]
		if !ok || name == c.cfg.Self.Name {
			continue
		}
		answered++
		epoch = max(epoch, r.Epoch)
		if r.Read {
			read++
		}
	}
	silent := len(c.cfg.Voters) - 1 - answered
	switch {
	case read >= majority:
		v.adopt(epoch)
	case c.t >= v.votesAt && answered+1 >= majority && read+silent < majority:
		// So many have forgotten that a grant may be known to nobody. All of them have run out, for this voter has abstained
		// and without it there was no majority: a new epoch begins.
		v.adopt(epoch + 1)
		c.out.Notes = append(c.out.Notes, Note{What: "new epoch", Partition: -1, Term: Term{Epoch: v.epoch}})
	}
}

// adopt takes over what the others have recorded.
func (v *voter) adopt(epoch uint64) {
	v.read, v.epoch = true, epoch
	for _, name := range v.c.cfg.Voters {
		r, ok := v.replies[name]
		if !ok || !r.Read {
			continue
		}
		for _, rec := range r.Records.Records {
			if p := rec.Partition; p >= 0 && p < len(v.records) {
				v.records[p] = record{Record: later(v.records[p].Record, rec), ends: v.c.t + v.life()}
			}
		}
	}
	clear(v.replies)
}

func (v *voter) onRead(from Node, m *ReadRecords) {
	r := &Records{ID: m.ID, Read: v.read, Epoch: max(v.epoch, v.seen)}
	if v.read {
		for p := range v.records {
			if v.records[p].Node != (Node{}) {
				rec := v.records[p].Record
				rec.Partition = p
				r.Records = append(r.Records, rec)
			}
		}
	}
	v.c.send(from, r)
}

func (v *voter) onRecords(from Node, m *Records) {
	if v.read || m.ID != v.asks || !slices.Contains(v.c.cfg.Voters, from.Name) {
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
		reply.Items[n] = v.vote(from, &m.Items[n])
	}
	v.c.send(from, reply)
}

func (v *voter) vote(from Node, i *GrantItem) GrantAnswer {
	a := GrantAnswer{Partition: i.Partition, Term: i.Term}
	r := &v.records[i.Partition]
	if !v.ready() {
		if v.read && r.Node == from && r.Term == i.Term {
			// It does not count, but should the holder be lost, this is who has its copy.
			r.Backup, r.ends = i.Backup, v.c.t+v.life()
		}
		a.Wait = time.Duration(max(v.votesAt-v.c.t, 0))
		return a
	}
	mutation := v.c.cfg.Mutation
	switch {
	case i.Term.Epoch < v.epoch:
	case r.Term == i.Term && r.Node == from:
		a.Granted = true
	case mutation == RenewUnchecked && i.Release == (Release{}):
		a.Granted = true
		return a
	case !r.Term.Less(i.Term):
	case r.Node == (Node{}) || r.ends <= v.c.t || r.Node == from || i.Release == (Release{r.Node, r.Term}),
		mutation == AcceptAnyRelease && i.Release != (Release{}):
		a.Granted = true
		a.Recorded = r.Record
	}
	if !a.Granted {
		a.Recorded, a.Wait = r.Record, time.Duration(max(r.ends-v.c.t, 0))
		return a
	}
	*r = record{Record: Record{Partition: i.Partition, Term: i.Term, Node: from, Backup: i.Backup}, ends: v.c.t + v.life()}
	return a
}
