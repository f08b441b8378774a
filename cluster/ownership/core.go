package ownership

import (
	"math"
	"slices"
	"time"

	"github.com/weirlimit/weir/algo"
)

// Now is one reading of a node's clocks.
type Now struct {
	algo.Instant       // the clock of decisions
	Boot         int64 // nanoseconds on a clock that goes on through a suspend (CLOCK_BOOTTIME); leases and time-outs read it
}

// Config is what a Core needs. All durations have defaults.
type Config struct {
	Self       Node
	Partitions int
	Data       Data
	Voters     []string // ring names of the fixed voters: none, 1, 3 or 5
	// Lease is how long a grant lasts, 3 s by default. Drift is the error of clock rates that is allowed for, as parts per
	// million; 1000 by default.
	Lease time.Duration
	Drift int64
	// Flush is how often changes are sent to followers that nobody waits for, 40 ms by default: with a Tick every 10 ms
	// none waits for more than 50.
	Flush time.Duration
	// Moves bounds the partitions that are moved away at a time, 16 by default; four times as many are accepted.
	Moves int
	// MaxBuffered bounds the bytes of incomplete chunks from all senders, 512 MiB by default. Only a key whose state is larger than a
	// message comes in several pieces: one that does not fit never moves here.
	MaxBuffered int
}

// Time-outs of the protocol. None of them decides anything but when something is tried again, except patience and stall,
// which say what is done without a process that membership takes to be alive and that does not answer.
const (
	resendAfter = int64(100 * time.Millisecond) // a message without an answer; twice as long each time, up to resendMost
	resendMost  = int64(time.Second)
	confirmMost = int64(20 * time.Millisecond) // for which a backup's last confirmation is waited for
	commitAgain = int64(30 * time.Millisecond) // a Commit without an answer, while checks are parked
	askAgain    = int64(time.Second)           // who holds a partition that should be this node's and is somebody else's
	retryAfter  = int64(200 * time.Millisecond)
	patience    = int64(5 * time.Second) // a claim goes on without a member that does not answer
	fullAgain   = int64(time.Second)     // a process that had no room for a copy; twice as long each time, up to fullMost
	fullMost    = int64(8 * time.Second)
	stall       = int64(time.Second) // a follower that does not answer is not waited for any longer
	idleAfter   = int64(3 * time.Second)
	lookEvery   = int64(100 * time.Millisecond) // at all partitions, for what is due by time alone
)

// awakeMost is how much of the time from one tick to the next counts when others are judged by what they have not answered: a node that has
// not run meanwhile has not read their answers either. Leases, and what a voter waits for before it votes, end by the time that has passed.
const awakeMost = int64(200 * time.Millisecond)

const (
	chunkBytes   = 192 << 10 // drained at a time
	flushBytes   = 256 << 10 // drained before what has arrived has its turn: some milliseconds
	pieceBytes   = 256 << 10 // carried by one message
	maxPieces    = 4096      // of one chunk: a log of 16 Mi entries has 256
	maxCopying   = 64        // backups that get their first whole copy at a time; what changes meanwhile goes before
	freezeBelow  = 256       // keys left to send when a move freezes its partition
	versionsDone = math.MaxUint64
)

// View is who is there, and who should hold what, as this node sees it. Its slices must not change any more.
type View struct {
	Members []Member // all that are alive, this node included
	Owners  []int32  // by partition: index into Members of the one that should hold it; -1: nobody
	Backups []int32  // by partition: of the one that should when this node is gone; -1, and those that it does not have: nobody
	Settled bool     // this node has joined, and the view has not changed for a moment
	Leaving bool     // this node is to give everything away
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
	Unclaimed Standing = 0 // nobody is known to decide, and this node is about to find out or to claim: wait
	Owned     Standing = 1 // this node decides
	Frozen    Standing = 2 // the last instants of a hand-over: wait, for 50 ms at most
	Elsewhere Standing = 3 // another node does
)

// Route says where a partition's checks are decided, as far as this node knows.
type Route struct {
	Standing Standing
	Node     Node // with Elsewhere; with Frozen the one who is about to decide
	Term     Term // with Owned and Elsewhere: zero where it is only the ring that says so
	// Heard and HeardTerm are, where it is only the ring that says so, the live process that was heard to hold the partition last and its
	// term. The zero Node: none. See Handed.
	Heard     Node
	HeardTerm Term
}

// Handed is the Route of a check that another node has sent here. That node went by its ring, and this node's ring names a third one: where
// members leave or join one shortly after the other, rings differ for as long as gossip takes, and each ring may name a node that does
// not hold the partition. So the check goes to the process that was heard to hold it, under a term, which ends the going round.
func (r *Route) Handed() *Route {
	if r.Heard == (Node{}) {
		return r
	}
	return &Route{Standing: Elsewhere, Node: r.Heard, Term: r.HeardTerm}
}

// Effects is what a Core wants done. They are to be carried out in the order of the fields.
type Effects struct {
	Routes    []int      // partitions whose Route may have changed
	Confirmed []Progress // answers that need not wait any longer
	Messages  []Envelope
	Notes     []Note // for the log
}

// Progress says up to which of its versions a partition's answers may be given.
type Progress struct {
	Partition int
	Version   uint64
	// Unguarded: no backup is there to wait for. Answers are given as degraded, and those of strict rules only if
	// StrictToo.
	Unguarded bool
	StrictToo bool
}

// Note is something that an operator may want to know.
type Note struct {
	What      string // such as "claimed"
	Partition int
	Term      Term
	Before    Term   // that of a lost holder, or of the content that was merged; zero if there is none
	Other     Node   // the other process involved, if any
	Detail    string // one of a few constants, empty when there is nothing to add
}

// Core is one node's part in the protocol: for every partition who holds it, what a copy of it has, and, on a voter, what
// is recorded. It has no goroutine, clock or socket: everything it does, it does in a call and by the time it is given,
// so that a simulator runs the same code as a node. Its methods must not be called at the same time.
type Core struct {
	cfg  Config
	data Data
	now  Now
	t    int64 // now.Boot
	// awake is a clock that stands still when this node does: by it others are judged who have not answered. At the last tick it was ran,
	// and t was ticked.
	awake, ran, ticked int64

	view  View
	views int             // how many there have been
	alive map[Node]int32  // index into view.Members
	heard Node            // who was looked for in it last, and lives; nobody when the view has changed since
	named map[string]Node // the live process of a ring name
	// Processes that have told of what they hold and are not in a view yet, and when they did; those that have been in a view
	// and are no longer, and since when. See strange.
	strangers, departed map[Node]int64
	// Processes that have come into the ring less than newcomerFor ago, and when. See newcomer.
	newcomers map[Node]int64
	full      map[Node]*fullness // processes that had no room for a copy
	parts     []part
	out       Effects
	taken     Effects   // by the last Take; its arrays are used again after the next
	loop      []Message // to this node itself
	// Room for the messages that are sent most. It stays for as long as one of them is used.
	replicates []Replicate
	acks       []ReplicateAck

	moving   int // partitions on their way to another node
	arriving int // partitions on their way to this one
	copying  int // followers that are getting their first whole copy
	buffered int // bytes of incomplete chunks

	round   *round // of queries, nil when none is in progress
	queries uint64
	gained  []int // partitions that have come to be held, or got a higher term, since the others were told
	tellAt  int64

	flushAt int64
	dirty   []int // partitions in which something was pending when the last flush began
	flushed int   // how many of them it has come through
	pending []int // those of them in which something was pending after that
	drained int   // bytes, ever
	lookAt  int64
	stir    bool             // all partitions are to be looked at
	settled bool             // as of when they were
	words   map[Node]int64   // when each process was asked that has answered; only of a node that leaves
	asked   map[uint64]int64 // its questions that are not answered, and when each was sent
	askedAt int64            // when the last was
	busy    []int            // those where something may be in progress
	tended  []int            // the array that busy is to have next
	grants  grants
	voter   *voter // nil: not one
}

// part is what a Core knows of one partition. There are thousands of them, so what keeping a copy reads lies together: at
// the one who holds the partition what comes first, at the one who has the copy what comes last.
type part struct {
	standing        Standing // Owned and Frozen: held; otherwise only a note of what was last published
	held            bool
	dirty, attended bool // in Core.dirty, in Core.busy
	term            Term // while held
	move            *move
	strict          *strictness
	followers       [2]follower
	attached        uint64 // how often a follower was; upper half of the sequences

	committed []commitment // by which it came to be held, the last of each process that lives
	askAt     int64        // not to be asked about, or claimed, before
	hintView  int          // the view in which known and holder were learned
	_         [24]byte     // so that what follows begins a cache line

	// The highest term that anybody is known to have held, and who did.
	known  Term
	holder Node
	// A copy that somebody else's partition has here. copyFrom is its sender; its position is zero unless it is complete.
	copyFrom Node
	copy     Position
	incoming incoming
}

// New returns the Core of a node that has just started.
func New(cfg Config, now Now) *Core {
	if cfg.Lease == 0 {
		cfg.Lease = 3 * time.Second
	}
	if cfg.Drift == 0 {
		cfg.Drift = 1000
	}
	if cfg.Flush == 0 {
		cfg.Flush = 40 * time.Millisecond
	}
	if cfg.MaxBuffered == 0 {
		cfg.MaxBuffered = 512 << 20
	}
	if cfg.Moves == 0 {
		cfg.Moves = 16
	}
	c := &Core{
		cfg: cfg, data: cfg.Data, parts: make([]part, cfg.Partitions),
		strangers: make(map[Node]int64), departed: make(map[Node]int64), newcomers: make(map[Node]int64), words: make(map[Node]int64),
		asked: make(map[uint64]int64), full: make(map[Node]*fullness),
	}
	// Not part of part: they are large, most of what is done needs none of it, and memory is slow.
	stricts := make([]strictness, cfg.Partitions)
	for p := range c.parts {
		c.parts[p].strict = &stricts[p]
	}
	c.ticked = now.Boot
	c.at(now)
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

// SetView tells who is there now.
func (c *Core) SetView(now Now, v View) {
	c.at(now)
	before := c.alive
	c.welcome(v)
	c.view = v
	c.views++
	c.stir = true
	c.heard = Node{}
	c.alive, c.named = make(map[Node]int32, len(v.Members)), make(map[string]Node, len(v.Members))
	for i, m := range v.Members {
		c.alive[m.Node] = int32(i)
		c.named[m.Name] = m.Node
	}
	for n := range c.full {
		if _, ok := c.alive[n]; !ok {
			delete(c.full, n)
		}
	}
	c.acquaint(before)
	for p := range c.parts {
		c.review(p)
		c.publish(p)
	}
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
		return
	}
	if m := pt.move; m != nil && !c.lives(m.to) {
		if pt.standing == Frozen && m.commit == nil {
			c.endMove(p)
			c.raise(p)
		} else if pt.standing == Frozen {
			// It may have taken the partition and admitted on it before it was lost: from here on this is an unplanned claim.
			c.note("receiver of a committed move was lost", p, m.to, "")
			c.endMove(p)
			c.claim(p)
		} else {
			c.endMove(p)
		}
	}
	for s := range pt.followers {
		if f := &pt.followers[s]; f.node != (Node{}) && !c.lives(f.node) {
			c.dropFollower(p, Slot(s), "lost")
		}
	}
	c.wantBackup(p)
}

// Tick lets time pass. It is to be called every 10 ms or so, and again while it is Behind.
func (c *Core) Tick(now Now) {
	c.at(now)
	c.ran, c.ticked = c.awake, c.t
	c.work()
}

// Urgent says that answers are waiting for changes of the partition to reach its backup.
func (c *Core) Urgent(now Now, p int) {
	c.at(now)
	if pt := &c.parts[p]; pt.held {
		if f := &pt.followers[Backup]; f.unacked != nil {
			f.urgent = true
		} else {
			c.pump(p, Backup)
		}
	}
	c.deliverOwn()
}

// Receive takes a message in. What it says about partitions has been checked to be within their number.
func (c *Core) Receive(now Now, e Envelope) {
	c.at(now)
	c.receive(e.From, e.Message)
	c.deliverOwn()
}

func (c *Core) receive(from Node, m Message) {
	switch m.(type) {
	case *Offer, *Replicate, *Commit:
		if !c.lives(from) {
			return // from before it was lost: what it had may have been claimed since
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
	case *Replicate:
		c.onReplicate(from, m)
	case *ReplicateAck:
		c.onReplicateAck(from, m)
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

// work does everything that is due. It looks at every partition when something has changed for many, or moves have ended
// and others may begin, or from time to time; otherwise at those only where something is in progress or, at each flush,
// pending: there are thousands, and looking at all takes 0.1 ms.
func (c *Core) work() {
	if c.voter != nil {
		c.voter.tick()
	}
	if c.stir || c.t >= c.lookAt {
		c.lookAtAll()
	} else {
		c.tendBusy()
		if c.round != nil {
			c.ask(nil)
		}
	}
	if c.t >= c.flushAt || c.Behind() {
		c.flush()
	}
	c.requestGrants()
	c.askForWords()
	c.tell()
	c.deliverOwn()
}

// attend has a partition tended as long as something is in progress there.
func (c *Core) attend(p int) {
	if pt := &c.parts[p]; !pt.attended {
		pt.attended = true
		c.busy = append(c.busy, p)
	}
}

func (c *Core) tendBusy() {
	busy := c.busy
	c.busy = c.tended[:0]
	for _, p := range busy {
		pt := &c.parts[p]
		pt.attended = false
		if pt.held && pt.busy() {
			c.attend(p)
			c.tend(p)
		}
	}
	c.tended = busy
}

// Behind says that the last Tick has left something to do: another should come as soon as what has arrived meanwhile is received.
func (c *Core) Behind() bool { return c.flushed < len(c.dirty) }

// flush sends followers what is pending and nobody waits for, or a part of it: where very much is, as when the limits of all keys have
// changed, what has arrived is not to wait for all of it.
func (c *Core) flush() {
	if !c.Behind() {
		c.flushAt = c.t + int64(c.cfg.Flush)
		c.dirty, c.pending, c.flushed = c.pending, c.dirty[:0], 0
		c.data.Changed(func(p int) {
			if pt := &c.parts[p]; !pt.dirty {
				pt.dirty = true
				c.dirty = append(c.dirty, p)
			}
		})
	}
	for most := c.drained + flushBytes; c.Behind() && c.drained < most; c.flushed++ {
		p := c.dirty[c.flushed]
		pt := &c.parts[p]
		pt.dirty = false
		for s := range pt.followers {
			if pt.held && pt.followers[s].node != (Node{}) {
				c.pump(p, Slot(s))
				pt.dirty = pt.dirty || c.data.Pending(p, Slot(s)) > 0
			}
		}
		if pt.dirty {
			c.pending = append(c.pending, p)
		}
	}
}

func (c *Core) lookAtAll() {
	c.lookAt = c.t + lookEvery
	c.stir, c.settled = false, true
	c.copying = 0
	c.getUsedTo()
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
			c.endOffer(p) // whoever was to send it has thought better of it, and another may be waiting
		}
		if len(in.pieces) > 0 && c.awake-in.heard > idleAfter {
			c.dropPieces(p) // the sender may be lost, and there is room for so many of them
		}
		if pt.held != c.mine(p) || pt.held && pt.standing == Frozen {
			c.settled = false
		}
		if pt.held {
			c.tend(p)
			if pt.busy() {
				c.attend(p)
			}
			continue
		}
		if c.mayClaim(p) {
			ask = append(ask, p)
		}
	}
	c.ask(ask)
}

// busy says whether something is in progress that may have to be repeated.
func (pt *part) busy() bool {
	if pt.move != nil {
		return true
	}
	for s := range pt.followers {
		if f := &pt.followers[s]; f.node != (Node{}) && (f.unacked != nil || !f.complete || f.relabel) {
			return true
		}
	}
	return false
}

// tend does what is due for a partition that is held.
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
		if f.node != (Node{}) && (f.unacked != nil || !f.complete || f.relabel || pt.move != nil) {
			c.pump(p, Slot(s))
		}
	}
}

// deliverOwn has the messages that this node sent to itself received.
func (c *Core) deliverOwn() {
	for len(c.loop) > 0 {
		m := c.loop[0]
		c.loop = c.loop[1:]
		c.receive(c.cfg.Self, m)
	}
}

// Take returns the effects that have accumulated since it was last called. They may be read until it is called again.
func (c *Core) Take() Effects {
	out := c.out
	clear(c.taken.Messages) // the array lives on, the messages need not
	c.out = Effects{
		Routes: c.taken.Routes[:0], Confirmed: c.taken.Confirmed[:0], Messages: c.taken.Messages[:0], Notes: c.taken.Notes[:0],
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

// sendAgain repeats a message that was not answered in time.
func (c *Core) sendAgain(to Node, m Message) {
	c.send(to, m)
	if n := len(c.out.Messages); to != c.cfg.Self {
		c.out.Messages[n-1].Again = true
	}
}

func (c *Core) note(what string, p int, other Node, detail string) {
	c.noteBefore(what, p, Term{}, other, detail)
}

func (c *Core) noteBefore(what string, p int, before Term, other Node, detail string) {
	c.out.Notes = append(c.out.Notes, Note{What: what, Partition: p, Term: c.parts[p].term, Before: before, Other: other, Detail: detail})
}

func (c *Core) lives(n Node) bool {
	if n == c.heard && n != (Node{}) {
		return true
	}
	_, ok := c.alive[n]
	if ok {
		c.heard = n
	}
	return ok
}

// owner is who should hold a partition; nobody when there is no telling.
func (c *Core) owner(p int) Node { return c.member(c.view.Owners, p) }

func (c *Core) member(by []int32, p int) Node {
	if p >= len(by) || by[p] < 0 {
		return Node{}
	}
	return c.view.Members[by[p]].Node
}

// mine says whether this node should hold a partition.
func (c *Core) mine(p int) bool { return c.owner(p) == c.cfg.Self }

// learn notes that somebody has held a partition under a term.
func (c *Core) learn(p int, t Term, by Node) {
	pt := &c.parts[p]
	if pt.known.Less(t) || pt.known == t && by != (Node{}) && pt.holder != by && !c.lives(pt.holder) {
		pt.known, pt.holder, pt.hintView = t, by, c.views
		c.publish(p)
	}
}

// publish has the outside look at the partition's Route.
func (c *Core) publish(p int) { c.out.Routes = append(c.out.Routes, p) }

// Route tells where checks of a partition are decided, as far as this node knows.
func (c *Core) Route(p int) Route {
	pt := &c.parts[p]
	owner := c.owner(p)
	switch {
	case pt.held && pt.standing == Frozen:
		return Route{Standing: Frozen, Node: pt.move.to, Term: pt.term}
	case pt.held:
		return Route{Standing: Owned, Term: pt.term}
	case pt.holder != (Node{}) && pt.holder != c.cfg.Self && c.lives(pt.holder) &&
		(owner == c.cfg.Self || owner == pt.holder || pt.hintView == c.views || c.newcomer(owner)):
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

// hold makes this node the holder under a term, and open lets it decide. What is to be known of every decision, as the
// followers that have the content already, stands in between: decisions begin at once, while this goes on.
func (c *Core) hold(p int, t Term) {
	pt := &c.parts[p]
	pt.held, pt.standing, pt.term = true, Owned, t
	pt.known, pt.holder, pt.hintView = t, c.cfg.Self, c.views
	pt.copy, pt.copyFrom = Position{}, Node{}
	pt.strict.since = c.awake
	c.settled = c.settled && c.mine(p) // a node that leaves may have looked a moment ago, and must not be gone the next
	c.gained = append(c.gained, p)
	c.data.Lease(p, 0)
}

func (c *Core) open(p int) {
	c.data.Open(p)
	c.publish(p)
}

// raise puts a partition that is held under a higher term.
func (c *Core) raise(p int) {
	pt := &c.parts[p]
	pt.strict.raised()
	c.hold(p, c.next(p))
	c.open(p)
	c.grants.urgent = true
	for s := range pt.followers {
		pt.followers[s].relabel, pt.followers[s].named, pt.followers[s].clean = true, false, false
	}
	c.attend(p)
}

// next is a term above all that are known.
func (c *Core) next(p int) Term {
	pt := &c.parts[p]
	t := pt.known.after(c.cfg.Self.Boot)
	t.Epoch = max(t.Epoch, c.grants.epoch)
	return t
}

// Settled reports whether everything is where the view wants it: this node holds what it should and nothing else. It is
// as of the last look at all partitions, which is at most 100 ms ago, but for what it has got since and should not hold.
func (c *Core) Settled() bool { return c.view.Settled && c.settled && !c.stir }

// Status is a summary of what a Core holds and does.
type Status struct {
	Held     int  // partitions
	Moving   int  // of them: on their way to another node
	Frozen   int  // of them: in the last instants of that
	Awaited  int  // partitions that this node should hold and does not
	Arriving int  // partitions on their way to this node
	Copies   int  // complete copies of others' partitions
	Stranded int  // complete copies whose holder is lost, or may be, and that nobody is known to have claimed yet
	Degraded int  // held partitions without a current copy elsewhere
	NoRoom   int  // of them: because the process that should have the copy has no room for it
	Pending  int  // keys whose changes have not been sent to a backup yet
	Granted  int  // held partitions under a live grant; 0 without voters
	Highest  Term // held
	Voter    bool // this node is a voter
	Voting   bool // and past the time in which it abstains
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
				if c.full[c.member(c.view.Backups, p)] != nil {
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
		if !pt.held && pt.copy != (Position{}) && !c.present(pt.copyFrom) && !c.present(pt.holder) {
			st.Stranded++
		}
	}
	return st
}
