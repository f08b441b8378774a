package ownership

import (
	"maps"
	"math"
	"slices"
	"time"

	"github.com/weirlimit/weir/algo"
)

// This file has the settings and the state of a Core, its entry points, and the loop over partitions (work). One other
// file each does what happens to a partition:
//
//	claim.go   takes a partition that no process hands over
//	move.go    hands a partition over, and merges one that both processes hold
//	follow.go  keeps the copies of a held partition up to date; log.go carries them
//	grant.go   the holder's side of grants, under which strict rules are decided; vote.go is the voter's side
//	leave.go   what a leaving node waits for
//	disk.go    the disk, and the copies that it had when the process started
//
// The path of an event:
//
//  1. The runner calls SetView, Receive, Urgent or Tick, with a reading of the clocks (Now).
//  2. SetView ends what lost processes took part in (review). Receive calls the handler of the message. Tick and
//     SetView call work.
//  3. work looks at all partitions (lookAtAll), in each tick while one is busy. tend takes what is in progress in a held
//     partition one step further. flush sends pending changes to followers. resend and requestGrants repeat unanswered
//     messages.
//  4. All of these add to Core.out. The runner calls Take, and carries out the Effects.
//
// Words:
//
//	holder, owner  the holder of a partition decides on it, under a term. The ring gives a partition to its owner
//	content        the states that the holder decides on
//	follower       a process that gets a copy of the content: the backup, which claims the partition if the holder is
//	               lost, or the target, the receiver of a move. The disk of this process is a follower too
//	caught         of a follower: it has acknowledged a whole copy
//	pending        of a change: it is not in the log to the follower yet
//	busy           of a held partition: each tick may take it further
//	t              boot time. Leases and resends read it
//	awake          a clock that advances by at most awakeMost between two ticks. It measures how long another process
//	               has not answered, because the answers wait unread while this process does not run
//
// Other files must keep: what changes a Route calls publish; after SetView, no follower, move or log is that of a lost
// process.

// Now is one reading of a node's clocks.
type Now struct {
	algo.Instant // the clock of decisions
	// Boot is in nanoseconds, on a clock that goes on through a suspend (CLOCK_BOOTTIME). Leases and time-outs read it.
	Boot int64
}

// Config is what a Core needs.
type Config struct {
	Self       Node
	Partitions int
	Data       Data
	Voters     []string // ring names of the fixed voters: none, 1, 3 or 5
	// Flush is how often followers get the changes that no answer waits for, 40 ms by default. With a Tick every 10 ms,
	// a change is sent within 50 ms.
	Flush   time.Duration
	Restore RestoreConfig
}

// Time-outs of the protocol.
const (
	// After these, this node tries again.

	// A log repeats its unanswered blocks after resendAfter, then after twice as long each time, up to resendMost.
	resendAfter = int64(100 * time.Millisecond)
	resendMost  = int64(time.Second)
	commitAgain = int64(30 * time.Millisecond)  // repeats a Commit; short, because checks of the partition wait
	askAgain    = int64(time.Second)            // asks again about a partition that another process holds
	retryAfter  = int64(200 * time.Millisecond) // tries most other things again
	fullAgain   = int64(4 * time.Second)        // begins a copy again at a process that had no memory for one
	lookEvery   = int64(100 * time.Millisecond) // looks at all partitions
	restEvery   = int64(time.Second)            // the same while the node rests

	// After these, this node goes on without an answer.

	confirmMost = int64(20 * time.Millisecond) // the last confirmation of a backup that is replaced
	stall       = int64(time.Second)           // a backup is dropped; a move does not wait for the disk any more
	idleAfter   = int64(3 * time.Second)       // an accepted offer whose giver is silent ends
	patience    = int64(5 * time.Second)       // a round of queries ends without the members that are silent
)

// awakeMost is the most by which Core.awake advances from one tick to the next.
const awakeMost = int64(200 * time.Millisecond)

const (
	leaseFor = int64(3 * time.Second) // how long a grant lasts
	drift    = 1000                   // the allowed error of clock rates in parts per million

	maxMoves = 16 // bounds the partitions that this node gives away at a time; it accepts four times as many
	// mostBuffered bounds the bytes of incomplete chunks from all senders. A chunk above pieceBytes comes in pieces; only
	// a key with a large state makes one. A chunk that does not fit is refused, so a partition with such a key never
	// moves here.
	mostBuffered = 512 << 20

	chunkBytes = 192 << 10 // one Drain takes about this much
	flushBytes = 512 << 10 // one tick drains about this much; then messages are received
	pieceBytes = 256 << 10 // the longest chunk in one entry of a log
	// maxCopying bounds the backups that get their first whole copy at a time, so that the changes of other partitions
	// are sent soon.
	maxCopying   = 64
	freezeBelow  = 256            // a move freezes its partition when at most so many keys are pending
	versionsDone = math.MaxUint64 // in Progress.Version: all answers
)

// View is the members and the owners of partitions as this node sees them. Its slices must not change any more.
type View struct {
	Members []Member // all that are alive, this node included
	Owners  []int32  // by partition: index into Members of its owner by the ring; -1: none
	Backups []int32  // by partition: index of the owner by a ring without this node; -1, or beyond the slice: none
	Settled bool     // this node has joined, and the view has not changed for some time
	Leaving bool     // this node gives all its partitions away
}

// Member is one of a View.
type Member struct {
	Node
	Active bool // in the ring
}

// Standing is what a node may do with a check of a partition.
type Standing uint8

// The standings.
const (
	Unclaimed Standing = 0 // no holder is known; this node is about to find the holder or to claim: wait
	Owned     Standing = 1 // this node decides
	Frozen    Standing = 2 // the last step of a move: wait shortly
	Elsewhere Standing = 3 // another node decides
)

// Route says where a partition's checks are decided, as far as this node knows.
type Route struct {
	Standing Standing
	Node     Node // with Elsewhere the holder, with Frozen the receiver of the move
	Term     Term // with Owned and Elsewhere; zero where Node is only the ring's owner
	// Heard and HeardTerm are set where Node is only the ring's owner: the live process that this node heard of last as
	// the holder, and its term. The zero Node: none. See Handed.
	Heard     Node
	HeardTerm Term
}

// Handed is the Route of a check that another node has sent here. When members leave or join shortly after each other,
// rings differ until gossip has spread. The sender's ring names this node, and this node's ring may name a third one
// that does not hold the partition either. So the check goes to the process that this node heard of last as the holder.
// The limiter follows a hint only if its term is above those that it has followed for this check, so forwarding ends.
func (r *Route) Handed() *Route {
	if r.Heard == (Node{}) {
		return r
	}
	return &Route{Standing: Elsewhere, Node: r.Heard, Term: r.HeardTerm}
}

// Effects are what the caller must do for a Core, in the order of the fields.
type Effects struct {
	Routes    []int      // partitions whose Route may have changed
	Confirmed []Progress // answers that may be given now
	Messages  []Envelope
	Notes     []Note // for the log
}

// Progress says that a partition's answers may be given, up to a version.
type Progress struct {
	Partition int
	Version   uint64
	// Unguarded: there is no backup, or its confirmation does not count (vouched). The answers are given as degraded;
	// strict answers only with StrictToo.
	Unguarded bool
	StrictToo bool
	// Saved: this is about the answers that wait for the disk and the backup. With Unguarded, the disk or the backup is
	// detached.
	Saved bool
}

// Note is something that an operator may want to know.
type Note struct {
	What      string // such as "claimed"
	Partition int
	Term      Term
	Other     Node   // the other process involved, if any
	Detail    string // one of a few constants; empty: none
}

// Core is one node's part in the protocol. It knows the holder of every partition and the position of this node's copy;
// on a voter it has the records too. It acts only in its methods, by the Now that they get. Its methods must not be
// called at the same time.
type Core struct {
	cfg  Config
	data Data
	now  Now
	t    int64 // now.Boot
	// ran and ticked are awake and t at the last tick.
	awake, ran, ticked int64

	view      View
	alive     map[Node]int32  // the processes of view: index into view.Members
	named     map[string]Node // the live process of a ring name
	strangers map[Node]int64  // processes that are not in the view, and until when they may come. See strange
	full      map[Node]int64  // processes that had no memory for a copy, and when to begin a copy there again
	parts     []part
	out       Effects
	taken     Effects   // by the last Take; the next Take uses its arrays again
	loop      []Message // to this node itself

	logs     []*outlog       // to the followers of this node's partitions
	begun    uint64          // the number of logs so far
	received map[Node]*inlog // from other processes
	room     int             // for incomplete chunks, mostBuffered except in tests

	moving   int // partitions that this node is giving away
	arriving int // accepted offers
	copying  int // backups that are getting their first whole copy

	round   *round // the queries of claims; nil: none is in progress
	queries uint64 // the ID of the last Query
	gained  []int  // partitions that members have yet to be told of (tell)
	tellAt  int64  // no tell before

	flushAt int64 // when the next flush begins
	dirty   []int // partitions that had pending changes when the last flush began, and may still have some
	drained int   // the number of bytes drained so far
	lookAt  int64 // when all partitions are looked at next
	stir    bool  // the next work looks at all partitions
	busy    bool  // the same: a partition is busy
	settled bool  // what Settled says, as of the last look at all partitions
	leftAt  int64 // when this node began to leave, by Core.awake
	askedAt int64 // when a leaving node last asked what other disks have
	grants  grants
	voter   *voter // nil: this node is not a voter

	absent      []string // members that the disk knows and that have not been seen
	absentUntil int64    // boot time until which claims wait for them
}

// part is what a Core knows of one partition.
type part struct {
	standing  Standing // of a held partition: Owned or Frozen
	held      bool
	dirty     bool  // in Core.dirty
	term      Term  // while held
	move      *move // by which this node gives the partition away; nil: none
	strict    *strictness
	followers [3]follower // by Slot
	attached  uint64      // the number of attachments so far

	committed map[Node]*CommitAck // the answers to the last Commits that this node has taken, by giver (remember)
	askAt     int64               // no question, move or bringing of a restored copy before

	// known is the highest term that is known to have been held, or that the next term must be above. holder is its
	// holder; the zero Node: not known.
	known  Term
	holder Node
	// copyFrom has sent this node's copy of a partition that another process holds. copy is its position, zero unless
	// the copy is complete.
	copyFrom Node
	copy     Position
	incoming incoming
	origin   Term // of the content or the copy: the term that its history began with
	// saved is the term under which this process held the partition when its disk last had all of it. Zero: the disk
	// has none, or the disk of a later holder has it.
	saved    Term
	restored bool // the copy was on the disk when this process started, and no holder has it yet
	bringTo  Node // the process that said last that it holds the partition, while restored
}

// New returns the Core of a node that has just started.
func New(cfg Config, now Now) *Core {
	if cfg.Flush == 0 {
		cfg.Flush = 40 * time.Millisecond
	}
	c := &Core{
		cfg: cfg, data: cfg.Data, parts: make([]part, cfg.Partitions), room: mostBuffered,
		strangers: make(map[Node]int64), full: make(map[Node]int64), received: make(map[Node]*inlog),
	}
	// Not within parts, because they are large and most of work does not read them.
	stricts := make([]strictness, cfg.Partitions)
	for p := range c.parts {
		c.parts[p].strict = &stricts[p]
	}
	c.ticked = now.Boot
	c.at(now)
	c.restore()
	c.grants.voters = len(cfg.Voters)
	if slices.Contains(cfg.Voters, cfg.Self.Name) {
		c.voter = newVoter(c)
	}
	return c
}

func (c *Core) at(now Now) {
	c.now, c.t = now, now.Boot
	c.awake = c.ran + min(c.t-c.ticked, awakeMost)
}

// SetView gives the Core a new view.
func (c *Core) SetView(now Now, v View) {
	c.at(now)
	before := c.alive
	if v.Leaving && !c.view.Leaving {
		c.leftAt = c.awake
	}
	c.view = v
	c.stir = true
	c.alive, c.named = make(map[Node]int32, len(v.Members)), make(map[string]Node, len(v.Members))
	for i, m := range v.Members {
		c.alive[m.Node] = int32(i)
		c.named[m.Name] = m.Node
	}
	c.absent = slices.DeleteFunc(c.absent, func(name string) bool { return c.named[name] != (Node{}) })
	maps.DeleteFunc(c.full, func(n Node, _ int64) bool { return !c.lives(n) })
	maps.DeleteFunc(c.received, func(n Node, _ *inlog) bool { return !c.lives(n) })
	c.noteDeparted(before)
	for p := range c.parts {
		c.review(p)
		c.publish(p)
	}
	c.logs = slices.DeleteFunc(c.logs, func(l *outlog) bool { return !c.lives(l.to) })
	c.tellNew(before)
	c.work()
}

// review brings one partition in line with a new view.
func (c *Core) review(p int) {
	pt := &c.parts[p]
	if in := &pt.incoming; in.from != (Node{}) && !c.lives(in.from) {
		c.endOffer(p)
	}
	if !pt.held {
		if f := &pt.followers[Target]; f.node != (Node{}) && !c.lives(f.node) {
			c.dropFollower(p, Target, "")
		}
		return
	}
	switch m := pt.move; {
	case m == nil || c.lives(m.to):
	case m.commit == nil:
		c.abandon(p)
	default:
		// The receiver may have taken the partition and allowed checks before it was lost. So this is an unplanned
		// claim.
		c.note("receiver of a committed move was lost", p, m.to, "")
		c.endMove(p)
		c.claim(p)
	}
	for s := range pt.followers {
		if f := &pt.followers[s]; f.node != (Node{}) && !c.lives(f.node) {
			c.dropFollower(p, Slot(s), "lost")
		}
	}
	c.wantBackup(p)
}

// Tick does what the clocks ask for. Call it every 10 ms.
func (c *Core) Tick(now Now) {
	c.at(now)
	c.ran, c.ticked = c.awake, c.t
	c.work()
}

// Urgent says that answers wait until the partition's backup and disk have its changes.
func (c *Core) Urgent(now Now, p int) {
	c.at(now)
	if pt := &c.parts[p]; pt.held {
		for _, s := range [...]Slot{Backup, Disk} {
			pt.followers[s].urgent = true
			c.pump(p, s)
		}
	}
	c.deliverOwn()
}

// Receive takes a message in. The caller has checked that its partition numbers are within Config.Partitions.
func (c *Core) Receive(now Now, e Envelope) {
	c.at(now)
	c.receive(e.From, e.Message)
	c.deliverOwn()
}

func (c *Core) receive(from Node, m Message) {
	switch m.(type) {
	case *Offer, *Block, *Commit:
		if !c.lives(from) {
			return // sent before the sender was lost; another process may have claimed its partitions since
		}
	}
	switch m := m.(type) {
	case *Query:
		c.onQuery(from, m)
	case *QueryReply:
		c.onQueryReply(from, m)
	case *Entrust:
		c.onEntrust(from, m)
	case *Offer:
		c.onOffer(from, m)
	case *OfferReply:
		c.onOfferReply(from, m)
	case *Block:
		c.onBlock(from, m)
	case *BlockAck:
		c.onBlockAck(from, m)
	case *Commit:
		c.onCommit(from, m)
	case *CommitAck:
		c.onCommitAck(from, m)
	case *Forget:
		c.onForget(from, m)
	case *GrantRequest:
		if c.voter != nil {
			c.voter.onRequest(from, m)
		}
	case *GrantReply:
		c.onGrantReply(from, m)
	case *ReadRecords:
		if c.voter != nil {
			c.voter.onRead(from, m)
		}
	case *Records:
		if c.voter != nil {
			c.voter.onRecords(from, m)
		}
	}
}

// work does what the clocks ask for. It looks at all partitions, which takes 0.3 ms, when stir or busy is set, and every
// lookEvery, or restEvery while the node rests. In a flush it looks at those with pending changes.
func (c *Core) work() {
	if c.voter != nil {
		c.voter.tick()
	}
	if c.stir || c.busy || c.t >= c.lookAt {
		c.lookAtAll()
	} else if c.round != nil {
		c.ask(nil)
	}
	c.flush()
	c.resend()
	c.requestGrants()
	c.askForSaved()
	c.tell()
	c.deliverOwn()
	if !c.rests() {
		c.lookSoon()
	}
}

// lookSoon makes work look at all partitions within lookEvery.
func (c *Core) lookSoon() { c.lookAt = min(c.lookAt, c.t+lookEvery) }

// Idle reports whether the last Tick has found nothing in progress and nothing to send. Then the next Tick may come
// after 100 ms, unless Receive, SetView or Urgent is called, or a content changes, before that.
func (c *Core) Idle() bool {
	g := &c.grants
	return c.flushAt == c.t+int64(c.cfg.Flush) && c.rests() && len(c.dirty)+len(c.gained) == 0 &&
		c.round == nil &&
		!slices.ContainsFunc(c.logs, (*outlog).pending) &&
		(g.voters == 0 || !g.urgent && g.hasty == [maxVoters]bool{}) &&
		(c.voter == nil || c.voter.ready())
}

// rests reports whether a look at all partitions would find nothing to do.
func (c *Core) rests() bool {
	return c.Settled() && !c.view.Leaving && !c.busy && c.arriving == 0 &&
		!slices.ContainsFunc(c.logs, c.late)
}

// flush sends followers the pending changes that no answer waits for, about flushBytes in one tick. After a reload that
// changes the limits of all keys, much more is pending, and the next ticks go on with it.
func (c *Core) flush() {
	if c.t >= c.flushAt {
		c.flushAt = c.t + int64(c.cfg.Flush)
		c.data.Changed(func(p int) {
			if pt := &c.parts[p]; !pt.dirty {
				pt.dirty = true
				c.dirty = append(c.dirty, p)
			}
		})
	}
	most := c.drained + flushBytes
	for n := len(c.dirty); n > 0 && c.drained < most; n-- {
		p := c.dirty[0]
		c.dirty = c.dirty[1:]
		pt := &c.parts[p]
		pt.dirty = false
		for s := range pt.followers {
			if pt.followers[s].node != (Node{}) {
				c.pump(p, Slot(s))
				pt.dirty = pt.dirty || c.data.Pending(p, Slot(s)) > 0
			}
		}
		if pt.dirty {
			c.dirty = append(c.dirty, p)
		}
	}
}

func (c *Core) lookAtAll() {
	c.lookAt = c.t + restEvery
	c.stir, c.busy, c.settled = false, false, true
	c.copying = 0
	for p := range c.parts {
		if f := &c.parts[p].followers[Backup]; f.node != (Node{}) && !f.caught {
			c.copying++
		}
	}
	var ask []int
	for p := range c.parts {
		pt := &c.parts[p]
		in := &pt.incoming
		if in.from != (Node{}) && c.awake-in.word > idleAfter {
			c.endOffer(p) // the giver has stopped, and another process may wait to send
		}
		if pt.held != c.mine(p) || pt.held && pt.standing == Frozen {
			c.settled = false
		}
		if pt.held {
			c.tend(p)
			c.busy = c.busy || pt.busy()
			continue
		}
		c.tendRestored(p)
		if c.mayAsk(p) {
			ask = append(ask, p)
		}
	}
	c.ask(ask)
}

// busy reports whether something is in progress in a held partition that each tick may take further.
func (pt *part) busy() bool {
	if pt.move != nil || pt.strict.closed != nil {
		return true
	}
	for s := range pt.followers {
		if f := &pt.followers[s]; f.node != (Node{}) && (!f.complete || f.relabel) {
			return true
		}
	}
	return false
}

// tend takes everything that is in progress in a held partition one step further.
func (c *Core) tend(p int) {
	pt := &c.parts[p]
	if pt.move == nil && pt.standing == Owned {
		c.considerMove(p)
	}
	if pt.move != nil {
		c.tendMove(p)
	}
	c.wantBackup(p)
	for s := range pt.followers {
		f := &pt.followers[s]
		if f.node != (Node{}) && (!f.complete || f.relabel || pt.move != nil || c.stalled(f.log)) {
			c.pump(p, Slot(s))
		}
	}
}

// deliverOwn receives the messages that this node has sent to itself, as a voter sends.
func (c *Core) deliverOwn() {
	for len(c.loop) > 0 {
		m := c.loop[0]
		c.loop = c.loop[1:]
		c.receive(c.cfg.Self, m)
	}
}

// Take returns the effects since the last call. They are valid until the next call. The changes that have been drained
// since the last call, of all partitions, share Blocks, as many as fit.
func (c *Core) Take() Effects {
	c.transmit()
	out := c.out
	clear(c.taken.Messages) // only the array is used again
	c.out = Effects{
		Routes: c.taken.Routes[:0], Confirmed: c.taken.Confirmed[:0], Messages: c.taken.Messages[:0],
		Notes: c.taken.Notes[:0],
	}
	c.taken = out
	return out
}

func (c *Core) send(to Node, m Message) {
	if to == c.cfg.Self {
		c.loop = append(c.loop, m)
		return
	}
	c.out.Messages = append(c.out.Messages, Envelope{From: c.cfg.Self, To: to, Message: m})
}

func (c *Core) note(what string, p int, other Node, detail string) {
	c.out.Notes = append(c.out.Notes,
		Note{What: what, Partition: p, Term: c.parts[p].term, Other: other, Detail: detail})
}

func (c *Core) lives(n Node) bool {
	_, ok := c.alive[n]
	return ok || n == DiskNode()
}

// active reports whether a process is in the ring.
func (c *Core) active(n Node) bool {
	at, ok := c.alive[n]
	return ok && c.view.Members[at].Active
}

// owner is the process that the ring gives a partition to; the zero Node where the view names none.
func (c *Core) owner(p int) Node { return c.member(c.view.Owners, p) }

// member is the process that View.Owners or View.Backups names for a partition.
func (c *Core) member(by []int32, p int) Node {
	if p >= len(by) || by[p] < 0 {
		return Node{}
	}
	return c.view.Members[by[p]].Node
}

// mine reports whether the ring gives a partition to this node.
func (c *Core) mine(p int) bool { return c.owner(p) == c.cfg.Self }

// learn notes that a process has held a partition under a term. It replaces known and holder if the term is higher, or
// if the term is the same and the noted holder is lost.
func (c *Core) learn(p int, t Term, by Node) {
	pt := &c.parts[p]
	if pt.known.Less(t) || pt.known == t && by != (Node{}) && pt.holder != by && !c.lives(pt.holder) {
		pt.known, pt.holder = t, by
		c.publish(p)
	}
}

// exceed makes the next term that this node takes be above t.
func (pt *part) exceed(t Term) {
	if pt.known.Less(t) {
		pt.known = t
	}
}

// publish makes the caller read the partition's Route again.
func (c *Core) publish(p int) { c.out.Routes = append(c.out.Routes, p) }

// Route says where checks of a partition are decided, as far as this node knows. It names the process that this node
// heard of last as the holder, if that process is in the ring, or if it is alive and the ring's owner is this node.
// Otherwise it names the ring's owner: a process that leaves has ended soon after it has handed its partitions over.
func (c *Core) Route(p int) Route {
	pt := &c.parts[p]
	owner := c.owner(p)
	switch {
	case pt.held && pt.standing == Frozen:
		return Route{Standing: Frozen, Node: pt.move.to, Term: pt.term}
	case pt.held:
		return Route{Standing: Owned, Term: pt.term}
	case pt.holder != c.cfg.Self && (owner == c.cfg.Self && c.lives(pt.holder) || c.active(pt.holder)):
		return Route{Standing: Elsewhere, Node: pt.holder, Term: pt.known}
	case owner == c.cfg.Self || owner == (Node{}):
		return Route{Standing: Unclaimed}
	}
	r := Route{Standing: Elsewhere, Node: owner}
	if pt.holder != c.cfg.Self && c.lives(pt.holder) {
		r.Heard, r.HeardTerm = pt.holder, pt.known
	}
	return r
}

// hold makes this node the holder of a partition under a term. open then lets it decide. Between the two, callers
// attach followers that already have the content, because decisions begin inside open.
func (c *Core) hold(p int, t Term) {
	pt := &c.parts[p]
	if f := &pt.followers[Disk]; f.node != (Node{}) && (!pt.held || !f.caught) {
		// The disk followed this process as a backup, or does not have the whole content yet. Its copy would keep its
		// former position, and must not be taken for the holder's.
		c.dropFollower(p, Disk, "")
	}
	pt.held, pt.standing, pt.term = true, Owned, t
	pt.known, pt.holder = t, c.cfg.Self
	pt.copy, pt.copyFrom = Position{}, Node{}
	pt.strict.since = c.awake
	c.settled = c.settled && c.mine(p) // otherwise a leaving node could end with this partition before the next look
	c.gained = append(c.gained, p)
	c.data.Lease(p, 0)
}

func (c *Core) open(p int) {
	c.save(p)
	c.data.Open(p)
	c.pump(p, Disk)
	c.publish(p)
}

// raise gives a held partition a higher term. Its followers learn the term with their next entries (follower.relabel).
func (c *Core) raise(p int) {
	pt := &c.parts[p]
	pt.strict.raised()
	c.hold(p, c.next(p))
	c.open(p)
	c.grants.urgent = true
	for s := range pt.followers {
		pt.followers[s].relabel, pt.followers[s].named, pt.followers[s].clean = true, false, false
	}
	c.busy = true
}

// next is a term above every known one, of the highest epoch that a voter has named.
func (c *Core) next(p int) Term {
	pt := &c.parts[p]
	t := pt.known.after(c.cfg.Self.Boot)
	t.Epoch = max(t.Epoch, c.grants.epoch)
	return t
}

// Settled reports whether this node holds exactly the partitions that the view gives it, none of them Frozen, as of the
// last look at all partitions. A partition that it has begun to hold since and that the view gives to another node
// makes Settled false at once.
func (c *Core) Settled() bool { return c.view.Settled && c.settled && !c.stir }

// Status is a summary of what a Core holds and does.
type Status struct {
	Held     int  // partitions
	Moving   int  // held partitions that this node is giving away
	Frozen   int  // of Moving: in the last step
	Awaited  int  // partitions that the ring gives to this node and that it does not hold
	Arriving int  // offers of partitions that this node has accepted
	Copies   int  // complete copies of partitions that other processes hold, the partitions of Awaited left out
	Stranded int  // complete copies whose holder is lost, or may be, with no known claimant (leave.go)
	Degraded int  // held partitions without a caught backup
	NoRoom   int  // of Degraded: because the backup has no memory for the copy
	Pending  int  // keys with changes that have not been sent to a backup yet
	Unsaved  int  // partitions, held or backed up, with changes that the disk has not confirmed
	Restored int  // copies from the disk that no process has taken in yet
	Kept     int  // partitions that the disk has and other processes hold, whose disks may not have them
	Granted  int  // held partitions under a live grant; 0 without voters
	Highest  Term // the highest of held partitions
	Voter    bool // this node is a voter
	Voting   bool // this node is a voter and does not abstain any more
}

// Status summarises what this node holds and does.
func (c *Core) Status(now Now) Status {
	c.at(now)
	st := Status{Arriving: c.arriving, Voter: c.voter != nil, Voting: c.voter != nil && c.voter.ready()}
	for p := range c.parts {
		pt := &c.parts[p]
		switch {
		case pt.held:
			st.Held++
			if pt.standing == Frozen {
				st.Frozen++
			}
			if pt.move != nil {
				st.Moving++
			}
			if !pt.followers[Backup].caught {
				st.Degraded++
				if _, full := c.full[c.member(c.view.Backups, p)]; full {
					st.NoRoom++
				}
			}
			st.Pending += c.data.Pending(p, Backup)
			if pt.strict.until > c.t {
				st.Granted++
			}
			if st.Highest.Less(pt.term) {
				st.Highest = pt.term
			}
		case c.mine(p):
			st.Awaited++
		case pt.copy != (Position{}):
			st.Copies++
		}
		if c.unsaved(p) {
			st.Unsaved++
		}
		if pt.restored {
			st.Restored++
		}
		if !pt.held && pt.saved != (Term{}) {
			st.Kept++
		}
		if c.stranded(p) {
			st.Stranded++
		}
	}
	return st
}
