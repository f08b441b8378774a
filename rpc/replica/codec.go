package replica

import (
	"fmt"
	"math"
	"time"

	"github.com/weirlimit/weir/cluster/ownership"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	"github.com/weirlimit/weir/rpc/transport"
)

const (
	// maxWeight bounds one message between cores, as ownership.Weight counts it. Lists have an entry for each partition at most, and
	// chunks come in parts.
	maxWeight = 2 << 20
	// maxParts bounds the messages that make up a chunk.
	maxParts = 4096
	// maxWait bounds the durations that a core is told. Leases last for seconds.
	maxWait = time.Hour
)

// protoMessages are the messages of a frame, of which those that can be are packed together; room is where to, and comes back
// larger if need be.
func protoMessages(msgs []ownership.Message, room []byte) (frame []*peerv1.Message, _ []byte) {
	for i := 0; i < len(msgs); {
		end := i
		for end < len(msgs) && packable(msgs[end]) {
			end++
		}
		if end == i {
			frame = append(frame, protoMessage(msgs[i]))
			i++
			continue
		}
		begin := len(room)
		room = appendPacked(room, msgs[i:end])
		frame = append(frame, &peerv1.Message{Body: &peerv1.Message_Packed{Packed: room[begin:len(room):len(room)]}})
		i = end
	}
	return frame, room
}

// protoMessage returns nil for a type of message that it does not know.
func protoMessage(m ownership.Message) *peerv1.Message {
	switch m := m.(type) {
	case *ownership.Query:
		q := &peerv1.Query{Id: m.ID, Partitions: protoList(m.Partitions, func(p int) uint32 { return uint32(p) })}
		return &peerv1.Message{Body: &peerv1.Message_Query{Query: q}}
	case *ownership.QueryReply:
		r := &peerv1.QueryReply{Id: m.ID, Infos: protoList(m.Infos, protoInfo)}
		return &peerv1.Message{Body: &peerv1.Message_QueryReply{QueryReply: r}}
	case *ownership.Entrust:
		e := &peerv1.Entrust{Partition: uint32(m.Partition), Term: transport.ProtoTerm(m.Term)}
		return &peerv1.Message{Body: &peerv1.Message_Entrust{Entrust: e}}
	case *ownership.Offer:
		o := &peerv1.Offer{Partition: uint32(m.Partition), Term: transport.ProtoTerm(m.Term)}
		return &peerv1.Message{Body: &peerv1.Message_Offer{Offer: o}}
	case *ownership.OfferReply:
		r := &peerv1.OfferReply{Partition: uint32(m.Partition), Term: transport.ProtoTerm(m.Term), Verdict: peerv1.Verdict(m.Verdict)}
		return &peerv1.Message{Body: &peerv1.Message_OfferReply{OfferReply: r}}
	case *ownership.Replicate:
		return &peerv1.Message{Body: &peerv1.Message_Replicate{Replicate: protoReplicate(m)}}
	case *ownership.ReplicateAck:
		a := &peerv1.ReplicateAck{
			Partition: uint32(m.Partition), Term: transport.ProtoTerm(m.Term), Sequence: m.Sequence,
			Outcome: peerv1.Outcome(m.Outcome), Known: transport.ProtoTerm(m.Known), Holder: protoNode(m.Holder),
		}
		return &peerv1.Message{Body: &peerv1.Message_ReplicateAck{ReplicateAck: a}}
	case *ownership.Commit:
		c := &peerv1.Commit{
			Changes: protoReplicate(&m.Replicate), Known: transport.ProtoTerm(m.Known), Release: protoNode(m.Release),
			Merge: m.Merge, Granted: m.Granted,
		}
		return &peerv1.Message{Body: &peerv1.Message_Commit{Commit: c}}
	case *ownership.CommitAck:
		a := &peerv1.CommitAck{
			Partition: uint32(m.Partition), Term: transport.ProtoTerm(m.Term), Outcome: peerv1.Outcome(m.Outcome),
			New: transport.ProtoTerm(m.New), Keep: m.Keep, Sequence: m.Sequence, Known: transport.ProtoTerm(m.Known), Holder: protoNode(m.Holder),
		}
		return &peerv1.Message{Body: &peerv1.Message_CommitAck{CommitAck: a}}
	case *ownership.Forget:
		f := &peerv1.Forget{Partition: uint32(m.Partition), Term: transport.ProtoTerm(m.Term)}
		return &peerv1.Message{Body: &peerv1.Message_Forget{Forget: f}}
	case *ownership.GrantRequest:
		r := &peerv1.GrantRequest{Id: m.ID, Items: protoList(m.Items, protoGrantItem)}
		return &peerv1.Message{Body: &peerv1.Message_GrantRequest{GrantRequest: r}}
	case *ownership.GrantReply:
		r := &peerv1.GrantReply{Id: m.ID, Epoch: m.Epoch, Items: protoList(m.Items, protoGrantAnswer)}
		return &peerv1.Message{Body: &peerv1.Message_GrantReply{GrantReply: r}}
	case *ownership.ReadRecords:
		return &peerv1.Message{Body: &peerv1.Message_ReadRecords{ReadRecords: &peerv1.ReadRecords{Id: m.ID}}}
	case *ownership.Records:
		r := &peerv1.Records{Id: m.ID, Read: m.Read, Epoch: m.Epoch, Fresh: m.Fresh, Records: protoList(m.Records, protoRecord)}
		return &peerv1.Message{Body: &peerv1.Message_Records{Records: r}}
	}
	return nil
}

// protoList converts a list, none to none.
func protoList[T, P any](list []T, convert func(T) P) []P {
	if len(list) == 0 {
		return nil
	}
	to := make([]P, len(list))
	for i, item := range list {
		to[i] = convert(item)
	}
	return to
}

func protoNode(n ownership.Node) *peerv1.Node {
	if n == (ownership.Node{}) {
		return nil
	}
	return &peerv1.Node{Name: n.Name, Boot: n.Boot}
}

func protoInfo(i ownership.Info) *peerv1.Info {
	to := &peerv1.Info{
		Partition: uint32(i.Partition), Held: i.Held, Claiming: i.Claiming, Term: transport.ProtoTerm(i.Term), Holder: protoNode(i.Holder),
	}
	if i.Copy != (ownership.Position{}) {
		to.Copy = &peerv1.Position{Term: transport.ProtoTerm(i.Copy.Term), Sequence: i.Copy.Sequence}
	}
	return to
}

func protoReplicate(m *ownership.Replicate) *peerv1.Replicate {
	return &peerv1.Replicate{
		Partition: uint32(m.Partition), Term: transport.ProtoTerm(m.Term), Sequence: m.Sequence, Begin: m.Begin, Complete: m.Complete,
		Part: uint32(m.Part), Parts: uint32(m.Parts), Chunk: m.Chunk, Sum: m.Sum,
	}
}

func protoGrantItem(i ownership.GrantItem) *peerv1.GrantItem {
	to := &peerv1.GrantItem{Partition: uint32(i.Partition), Term: transport.ProtoTerm(i.Term), Backup: protoNode(i.Backup)}
	if i.Release != (ownership.Release{}) {
		to.Release = &peerv1.Release{Node: protoNode(i.Release.Node), Term: transport.ProtoTerm(i.Release.Term)}
	}
	return to
}

func protoGrantAnswer(a ownership.GrantAnswer) *peerv1.GrantAnswer {
	to := &peerv1.GrantAnswer{
		Partition: uint32(a.Partition), Term: transport.ProtoTerm(a.Term), Granted: a.Granted, WaitNs: uint64(max(0, a.Wait)),
	}
	if a.Recorded != (ownership.Record{}) {
		to.Recorded = protoRecord(a.Recorded)
	}
	return to
}

func protoRecord(r ownership.Record) *peerv1.Record {
	return &peerv1.Record{
		Partition: uint32(r.Partition), Term: transport.ProtoTerm(r.Term), Node: protoNode(r.Node), Backup: protoNode(r.Backup),
		Request: r.ID,
	}
}

// messageReader converts what a peer sent and checks it: what a core is given names partitions and outcomes that exist,
// and is no longer than an honest peer would make it. Whether it makes sense is for the core to say.
type messageReader struct {
	partitions int
	err        error // the first mistake
}

// read returns an error that names the field which is wrong.
func (r *messageReader) read(from *peerv1.Message) (ownership.Message, error) {
	r.err = nil
	var m ownership.Message
	switch b := from.GetBody().(type) {
	case *peerv1.Message_Query:
		m = &ownership.Query{ID: b.Query.GetId(), Partitions: readList(r, "query.partitions", b.Query.GetPartitions(), r.asked)}
	case *peerv1.Message_QueryReply:
		m = &ownership.QueryReply{ID: b.QueryReply.GetId(), Infos: readList(r, "query_reply.infos", b.QueryReply.GetInfos(), r.info)}
	case *peerv1.Message_Entrust:
		m = &ownership.Entrust{Partition: r.partition("entrust.partition", b.Entrust.GetPartition()), Term: transport.Term(b.Entrust.GetTerm())}
	case *peerv1.Message_Offer:
		m = &ownership.Offer{Partition: r.partition("offer.partition", b.Offer.GetPartition()), Term: transport.Term(b.Offer.GetTerm())}
	case *peerv1.Message_OfferReply:
		o := b.OfferReply
		m = &ownership.OfferReply{
			Partition: r.partition("offer_reply.partition", o.GetPartition()), Term: transport.Term(o.GetTerm()),
			Verdict: r.verdict("offer_reply.verdict", o.GetVerdict()),
		}
	case *peerv1.Message_Replicate:
		c := r.replicate(b.Replicate)
		m = &c
	case *peerv1.Message_ReplicateAck:
		a := b.ReplicateAck
		m = &ownership.ReplicateAck{
			Partition: r.partition("replicate_ack.partition", a.GetPartition()), Term: transport.Term(a.GetTerm()), Sequence: a.GetSequence(),
			Outcome: r.outcome("replicate_ack.outcome", a.GetOutcome()), Known: transport.Term(a.GetKnown()),
			Holder: r.node("replicate_ack.holder", a.GetHolder()),
		}
	case *peerv1.Message_Commit:
		c := b.Commit
		m = &ownership.Commit{
			Replicate: r.replicate(c.GetChanges()), Known: transport.Term(c.GetKnown()),
			Release: r.node("commit.release", c.GetRelease()), Merge: c.GetMerge(), Granted: c.GetGranted(),
		}
	case *peerv1.Message_CommitAck:
		a := b.CommitAck
		m = &ownership.CommitAck{
			Partition: r.partition("commit_ack.partition", a.GetPartition()), Term: transport.Term(a.GetTerm()),
			Outcome: r.outcome("commit_ack.outcome", a.GetOutcome()), New: transport.Term(a.GetNew()), Keep: a.GetKeep(),
			Sequence: a.GetSequence(), Known: transport.Term(a.GetKnown()), Holder: r.node("commit_ack.holder", a.GetHolder()),
		}
	case *peerv1.Message_Forget:
		m = &ownership.Forget{Partition: r.partition("forget.partition", b.Forget.GetPartition()), Term: transport.Term(b.Forget.GetTerm())}
	case *peerv1.Message_GrantRequest:
		m = &ownership.GrantRequest{ID: b.GrantRequest.GetId(), Items: readList(r, "grant_request.items", b.GrantRequest.GetItems(), r.grantItem)}
	case *peerv1.Message_GrantReply:
		g := b.GrantReply
		m = &ownership.GrantReply{ID: g.GetId(), Epoch: g.GetEpoch(), Items: readList(r, "grant_reply.items", g.GetItems(), r.grantAnswer)}
	case *peerv1.Message_ReadRecords:
		m = &ownership.ReadRecords{ID: b.ReadRecords.GetId()}
	case *peerv1.Message_Records:
		l := b.Records
		m = &ownership.Records{
			ID: l.GetId(), Read: l.GetRead(), Epoch: l.GetEpoch(), Fresh: l.GetFresh(),
			// Of each partition two: the record, and the one that it has replaced.
			Records: readLong(r, "records.records", l.GetRecords(), 2*r.partitions, r.record),
		}
	default:
		r.fail("body", "is missing or of a kind that this node does not know")
	}
	if r.err != nil {
		return nil, r.err
	}
	return m, nil
}

func (r *messageReader) fail(field, problem string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("%s: %s", field, fmt.Sprintf(problem, args...))
	}
}

// readList converts a list, none to none, of as many items as there are partitions at most. It stops at a mistake.
func readList[P, T any](r *messageReader, field string, from []P, convert func(P) T) []T {
	return readLong(r, field, from, r.partitions, convert)
}

// readLong is readList with another bound.
func readLong[P, T any](r *messageReader, field string, from []P, most int, convert func(P) T) []T {
	if len(from) > most {
		r.fail(field, "%d items for %d partitions", len(from), r.partitions)
	}
	if len(from) == 0 || r.err != nil {
		return nil
	}
	list := make([]T, len(from))
	for i, item := range from {
		if list[i] = convert(item); r.err != nil {
			return nil
		}
	}
	return list
}

func (r *messageReader) partition(field string, p uint32) int {
	if uint64(p) >= uint64(r.partitions) {
		r.fail(field, "%d is not one of %d partitions", p, r.partitions)
		return 0
	}
	return int(p)
}

func (r *messageReader) asked(p uint32) int { return r.partition("query.partitions", p) }

func (r *messageReader) node(field string, n *peerv1.Node) ownership.Node {
	if n == nil {
		return ownership.Node{}
	}
	if len(n.Name) == 0 || len(n.Name) > ownership.MaxName {
		r.fail(field, "a name has 1 to %d bytes, not %d", ownership.MaxName, len(n.Name))
		return ownership.Node{}
	}
	return ownership.Node{Name: n.Name, Boot: n.Boot}
}

func (r *messageReader) verdict(field string, v peerv1.Verdict) ownership.Verdict {
	if v < peerv1.Verdict_VERDICT_ACCEPTED || v > peerv1.Verdict_VERDICT_REFUSED {
		r.fail(field, "%d is none", v)
		return 0
	}
	return ownership.Verdict(v)
}

func (r *messageReader) outcome(field string, o peerv1.Outcome) ownership.Outcome {
	if o < peerv1.Outcome_OUTCOME_DONE || o > peerv1.Outcome_OUTCOME_FULL {
		r.fail(field, "%d is none", o)
		return 0
	}
	return ownership.Outcome(o)
}

func (r *messageReader) info(i *peerv1.Info) ownership.Info {
	return ownership.Info{
		Partition: r.partition("info.partition", i.GetPartition()), Held: i.GetHeld(), Claiming: i.GetClaiming(),
		Term: transport.Term(i.GetTerm()), Holder: r.node("info.holder", i.GetHolder()),
		Copy: ownership.Position{Term: transport.Term(i.GetCopy().GetTerm()), Sequence: i.GetCopy().GetSequence()},
	}
}

func (r *messageReader) replicate(m *peerv1.Replicate) ownership.Replicate {
	if !r.pieces(uint64(m.GetPart()), uint64(m.GetParts())) {
		return ownership.Replicate{}
	}
	if len(m.GetChunk()) > maxWeight {
		r.fail("replicate.chunk", "holds %d bytes, more than %d", len(m.GetChunk()), maxWeight)
		return ownership.Replicate{}
	}
	return ownership.Replicate{
		Partition: r.partition("replicate.partition", m.GetPartition()), Term: transport.Term(m.GetTerm()), Sequence: m.GetSequence(),
		Begin: m.GetBegin(), Complete: m.GetComplete(), Part: int(m.GetPart()), Parts: int(m.GetParts()), Chunk: m.GetChunk(), Sum: m.GetSum(),
	}
}

// pieces says whether a message can be one of those that make up a chunk.
func (r *messageReader) pieces(part, parts uint64) bool {
	switch {
	case parts < 1 || parts > maxParts:
		r.fail("replicate.parts", "must be 1 to %d, not %d", maxParts, parts)
	case part >= parts:
		r.fail("replicate.part", "%d is not one of %d", part, parts)
	default:
		return true
	}
	return false
}

func (r *messageReader) grantItem(i *peerv1.GrantItem) ownership.GrantItem {
	return ownership.GrantItem{
		Partition: r.partition("grant_item.partition", i.GetPartition()), Term: transport.Term(i.GetTerm()),
		Backup: r.node("grant_item.backup", i.GetBackup()),
		Release: ownership.Release{
			Node: r.node("grant_item.release.node", i.GetRelease().GetNode()), Term: transport.Term(i.GetRelease().GetTerm()),
		},
	}
}

func (r *messageReader) grantAnswer(a *peerv1.GrantAnswer) ownership.GrantAnswer {
	if a.GetWaitNs() > uint64(maxWait) {
		r.fail("grant_answer.wait_ns", "%v is more than %v", time.Duration(min(a.GetWaitNs(), math.MaxInt64)), maxWait)
		return ownership.GrantAnswer{}
	}
	return ownership.GrantAnswer{
		Partition: r.partition("grant_answer.partition", a.GetPartition()), Term: transport.Term(a.GetTerm()), Granted: a.GetGranted(),
		Recorded: r.record(a.GetRecorded()), Wait: time.Duration(a.GetWaitNs()),
	}
}

func (r *messageReader) record(e *peerv1.Record) ownership.Record {
	return ownership.Record{
		Partition: r.partition("record.partition", e.GetPartition()), Term: transport.Term(e.GetTerm()),
		Node: r.node("record.node", e.GetNode()), Backup: r.node("record.backup", e.GetBackup()),
		ID: e.GetRequest(),
	}
}
