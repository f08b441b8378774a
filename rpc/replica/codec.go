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
	// maxEntries bounds the entries in a block, and the refusals in an answer to one.
	maxEntries = 1 << 15
	// maxWait bounds the durations that a core is told. Leases last for seconds.
	maxWait = time.Hour
)

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
	case *ownership.Block:
		b := &peerv1.Block{Log: m.Log, Position: m.Position, Heard: m.Heard, Entries: appendEntries(make([]byte, 0, ownership.Weight(m)), m.Entries), Sum: m.Sum}
		return &peerv1.Message{Body: &peerv1.Message_Block{Block: b}}
	case *ownership.BlockAck:
		a := &peerv1.BlockAck{Log: m.Log, Position: m.Position, Lost: m.Lost, Refusals: protoList(m.Refusals, protoRefusal)}
		return &peerv1.Message{Body: &peerv1.Message_BlockAck{BlockAck: a}}
	case *ownership.Commit:
		c := &peerv1.Commit{
			Partition: uint32(m.Partition), Term: transport.ProtoTerm(m.Term), Attachment: m.Attachment, Chunk: m.Chunk, Sum: m.Sum,
			Known: transport.ProtoTerm(m.Known), Release: protoNode(m.Release), Merge: m.Merge, Granted: m.Granted,
		}
		return &peerv1.Message{Body: &peerv1.Message_Commit{Commit: c}}
	case *ownership.CommitAck:
		a := &peerv1.CommitAck{
			Partition: uint32(m.Partition), Term: transport.ProtoTerm(m.Term), Outcome: peerv1.Outcome(m.Outcome),
			New: transport.ProtoTerm(m.New), Keep: m.Keep, Attachment: m.Attachment, Known: transport.ProtoTerm(m.Known), Holder: protoNode(m.Holder),
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
		to.Copy = &peerv1.Position{Term: transport.ProtoTerm(i.Copy.Term), Attachment: i.Copy.Attachment}
	}
	return to
}

func protoRefusal(r ownership.Refusal) *peerv1.Refusal {
	return &peerv1.Refusal{
		Position: r.Position, Partition: uint32(r.Partition), Attachment: r.Attachment, Outcome: peerv1.Outcome(r.Outcome), Known: transport.ProtoTerm(r.Known),
		Holder: protoNode(r.Holder),
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
	case *peerv1.Message_Block:
		c := b.Block
		m = &ownership.Block{
			Log: c.GetLog(), Position: c.GetPosition(), Heard: c.GetHeard(), Entries: r.entries(c.GetEntries()), Sum: c.GetSum(),
		}
	case *peerv1.Message_BlockAck:
		a := b.BlockAck
		m = &ownership.BlockAck{
			Log: a.GetLog(), Position: a.GetPosition(), Lost: a.GetLost(),
			Refusals: readLong(r, "block_ack.refusals", a.GetRefusals(), maxEntries, r.refusal),
		}
	case *peerv1.Message_Commit:
		m = r.commit(b.Commit)
	case *peerv1.Message_CommitAck:
		a := b.CommitAck
		m = &ownership.CommitAck{
			Partition: r.partition("commit_ack.partition", a.GetPartition()), Term: transport.Term(a.GetTerm()),
			Outcome: r.outcome("commit_ack.outcome", a.GetOutcome()), New: transport.Term(a.GetNew()), Keep: a.GetKeep(),
			Attachment: a.GetAttachment(), Known: transport.Term(a.GetKnown()), Holder: r.node("commit_ack.holder", a.GetHolder()),
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
		Copy: ownership.Position{Term: transport.Term(i.GetCopy().GetTerm()), Attachment: i.GetCopy().GetAttachment()},
	}
}

func (r *messageReader) commit(c *peerv1.Commit) *ownership.Commit {
	if len(c.GetChunk()) > maxWeight {
		r.fail("commit.chunk", "holds %d bytes, more than %d", len(c.GetChunk()), maxWeight)
	}
	return &ownership.Commit{
		Partition: r.partition("commit.partition", c.GetPartition()), Term: transport.Term(c.GetTerm()),
		Attachment: c.GetAttachment(), Chunk: c.GetChunk(), Sum: c.GetSum(), Known: transport.Term(c.GetKnown()),
		Release: r.node("commit.release", c.GetRelease()), Merge: c.GetMerge(), Granted: c.GetGranted(),
	}
}

func (r *messageReader) refusal(f *peerv1.Refusal) ownership.Refusal {
	return ownership.Refusal{
		Position: f.GetPosition(), Partition: r.partition("refusal.partition", f.GetPartition()), Attachment: f.GetAttachment(),
		Outcome: r.outcome("refusal.outcome", f.GetOutcome()), Known: transport.Term(f.GetKnown()),
		Holder: r.node("refusal.holder", f.GetHolder()),
	}
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
