package ownership

import (
	"encoding/json"
	"slices"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/test/must"
)

// alone is one core, m, whose peers are played by the test: what each rule does is seen without the others that would
// hide it. There is one partition.
type alone struct {
	t         *testing.T
	core      *Core
	data      *notebook
	now       int64
	mail      []Envelope
	confirmed []Progress
	sent      map[Node]*Block // the last one that entries has told of
	given     map[Node]uint64 // position of the last block from a process
}

// The processes.
var (
	self                   = Node{"m", 1}
	peerA                  = Node{"a", 2}
	peerB                  = Node{"b", 3}
	peerX                  = Node{"x", 4}
	peerY                  = Node{"y", 5}
	voter1, voter2, voter3 = Node{"v1", 6}, Node{"v2", 7}, Node{"v3", 8}
)

func newAlone(t *testing.T, voters ...string) *alone {
	return newAloneWith(t, Config{Partitions: 1, Voters: voters})
}

func newAloneWith(t *testing.T, cfg Config) *alone {
	l := &alone{t: t, now: int64(time.Hour), data: newNotebook(cfg.Partitions), sent: make(map[Node]*Block),
		given: make(map[Node]uint64)}
	cfg.Self, cfg.Data = self, l.data
	l.core = New(cfg, l.time())
	return l
}

func (l *alone) time() Now { return Now{Instant: algo.Instant{Mono: l.now, Wall: l.now}, Boot: l.now} }

func (l *alone) take() {
	out := l.core.Take()
	l.mail = append(l.mail, out.Messages...)
	l.confirmed = append(l.confirmed, out.Confirmed...)
}

// see gives it a view: of members, the first of which owns the partition; backup is who has the copy.
func (l *alone) see(owner, backup Node, others ...Node) {
	l.view(View{Settled: true}, owner, backup, others...)
}

func (l *alone) view(v View, owner, backup Node, others ...Node) {
	members := append([]Node{self}, others...)
	for _, n := range members {
		v.Members = append(v.Members, Member{Node: n, Active: n != self || !v.Leaving})
	}
	v.Owners = []int32{int32(slices.Index(members, owner))}
	v.Backups = []int32{int32(slices.Index(members, backup))}
	l.core.SetView(l.time(), v)
	l.take()
}

func (l *alone) get(from Node, m Message) {
	l.core.Receive(l.time(), Envelope{From: from, To: self, Message: m})
	l.take()
}

// wait lets time pass.
func (l *alone) wait(d time.Duration) {
	for end := l.now + int64(d); l.now < end; {
		l.now += int64(10 * time.Millisecond)
		l.core.Tick(l.time())
		l.take()
	}
}

// said returns the messages of a kind that were sent to a process since last asked for; to nobody in particular: to
// any.
func said[M Message](l *alone, to Node) (all []M) {
	l.mail = slices.DeleteFunc(l.mail, func(e Envelope) bool {
		m, ok := e.Message.(M)
		if ok && (to == e.To || to == Node{}) {
			all = append(all, m)
			return true
		}
		return false
	})
	return all
}

// last is the last of them, which there must be.
func last[M Message](l *alone, to Node) M {
	l.t.Helper()
	all := said[M](l, to)
	if len(all) == 0 {
		var m M
		l.t.Fatalf("no %T was sent to %s", m, to.Name)
	}
	return all[len(all)-1]
}

func (l *alone) route() Route { return l.core.Route(0) }

func (l *alone) owned(want bool) {
	l.t.Helper()
	if got := l.route().Standing == Owned; got != want {
		l.t.Fatalf("owned: %v, want %v: %+v", got, want, l.route())
	}
}

// claims has it take the partition, of which nobody knows.
func (l *alone) claims(owner, backup Node, others ...Node) {
	l.t.Helper()
	l.see(self, backup, others...)
	l.wait(150 * time.Millisecond)
	l.answer(func(n Node) Info { return Info{} })
	l.owned(true)
	l.see(owner, backup, others...)
}

// claimed is a node that has claimed, before its view names an owner and a backup.
func claimed(t *testing.T, owner, backup Node, others ...Node) *alone {
	t.Helper()
	l := newAlone(t)
	l.claims(owner, backup, others...)
	return l
}

// admits has it admit something, and lets time pass.
func (l *alone) admits(id int, d time.Duration) { l.data.admit(0, id); l.wait(d) }

// seeing is a node with a view.
func seeing(t *testing.T, owner, backup Node, others ...Node) *alone {
	l := newAlone(t)
	l.see(owner, backup, others...)
	return l
}

// asks is a node that has asked the others about the partition, and has no answer yet.
func asks(t *testing.T, others ...Node) *alone {
	t.Helper()
	l := seeing(t, self, Node{}, others...)
	l.wait(150 * time.Millisecond)
	return l
}

// hold has a process say that it holds the partition.
func (l *alone) hold(n Node, t Term) {
	l.get(n, &QueryReply{Infos: []Info{{Held: true, Term: t, Holder: n}}})
}

// offers has a process offer the partition, and send a whole copy of it.
func (l *alone) offers(n Node, t Term) {
	l.t.Helper()
	l.get(n, &Offer{Term: t})
	l.give(n, wholeCopy(t, 10, ids(1)))
}

// accepts has a process accept the last offer.
func (l *alone) accepts(n Node) {
	l.t.Helper()
	l.get(n, &OfferReply{Term: last[*Offer](l, n).Term, Verdict: Accepted})
}

// answer answers what was asked last.
func (l *alone) answer(info func(Node) Info) {
	for _, e := range slices.Clone(l.mail) {
		if q, ok := e.Message.(*Query); ok {
			i := info(e.To)
			l.get(e.To, &QueryReply{ID: q.ID, Infos: []Info{i}})
		}
	}
	said[*Query](l, Node{})
}

// entries are the entries of blocks that were sent to a process since last asked for.
func (l *alone) entries(n Node) (all []*Entry) {
	for _, b := range said[*Block](l, n) {
		l.sent[n] = b
		for i := range b.Entries {
			all = append(all, &b.Entries[i])
		}
	}
	return all
}

// entry is the last of them, which there must be.
func (l *alone) entry(n Node) *Entry {
	l.t.Helper()
	all := l.entries(n)
	must.True(l.t, len(all) != 0, "no entry was sent to %s", n.Name)
	return all[len(all)-1]
}

// ack has a process take in all blocks that entries and entry have told of.
func (l *alone) ack(n Node) {
	l.get(n, &BlockAck{Log: l.sent[n].Log, Position: l.sent[n].Position})
}

// refuse has it refuse an entry.
func (l *alone) refuse(n Node, e *Entry, o Outcome) {
	b := l.sent[n]
	l.get(n, &BlockAck{Log: b.Log, Position: b.Position,
		Refusals: []Refusal{{Partition: e.Partition, Attachment: e.Attachment, Outcome: o}}})
}

// acks has a process, or each, take in every block that was sent to it, and those that follow.
func (l *alone) acks(n Node) {
	for {
		to := slices.IndexFunc(l.mail, func(e Envelope) bool {
			_, ok := e.Message.(*Block)
			return ok && (n == e.To || n == Node{})
		})
		if to < 0 {
			return
		}
		of := l.mail[to].To
		l.entries(of)
		l.ack(of)
	}
}

// grants has voters answer what they were asked last.
func (l *alone) grants(old Record, by ...Node) {
	for _, n := range by {
		if all := said[*GrantRequest](l, n); len(all) > 0 {
			l.vote(n, all[len(all)-1], old)
		}
	}
}

func (l *alone) vote(n Node, q *GrantRequest, old Record) {
	r := &GrantReply{ID: q.ID, Epoch: 0}
	for _, i := range q.Items {
		r.Items = append(r.Items, GrantAnswer{Term: i.Term, Granted: true, Recorded: old})
	}
	l.get(n, r)
}

func ids(n ...int) []byte {
	b, _ := json.Marshal(n)
	return b
}

// give sends it an entry, and returns what it answers; 0 for nothing.
func (l *alone) give(from Node, e *Entry) Outcome {
	l.t.Helper()
	l.given[from]++
	b := &Block{Log: 1, Position: l.given[from], Heard: l.given[from] - 1, Entries: []Entry{*e}}
	b.Sum = b.sum()
	l.get(from, b)
	all := said[*BlockAck](l, from)
	if len(all) == 0 {
		return 0
	}
	switch a := all[len(all)-1]; {
	case a.Position != b.Position || a.Lost || len(a.Refusals) > 1:
		l.t.Fatalf("block %d of %s is answered %+v", b.Position, from.Name, a)
	case len(a.Refusals) == 1:
		return a.Refusals[0].Outcome
	}
	return Done
}

func wholeCopy(term Term, attachment uint64, chunk []byte) *Entry {
	return &Entry{Term: term, Attachment: attachment, Begin: true, Complete: true, Chunk: chunk}
}

func update(term Term, attachment uint64, chunk []byte) *Entry {
	return &Entry{Term: term, Attachment: attachment, Chunk: chunk}
}

// commits is a Commit with the last changes of a copy; the highest known term is the giver's.
func commits(from Node, term Term, attachment uint64, chunk []byte) *Commit {
	return &Commit{Term: term, Attachment: attachment, Chunk: chunk, Sum: sum(chunk), Known: term}
}

// has says what it would tell of its copy.
func (l *alone) info(from Node) Info {
	l.get(from, &Query{ID: 77, Partitions: []int{0}})
	return last[*QueryReply](l, from).Infos[0]
}

func term(n uint64) Term { return Term{N: n << termTag} }
