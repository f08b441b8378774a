package mutants

// What notices a mutant.
const (
	seeds     = "./test/simulation -run TestSeeds$ -most 1 -weather "
	loans     = "./test/simulation -run TestLoanSeeds$ -most 1"
	calls     = "./test/simulation -run TestCallSeeds$ -most 1 -calls 30 -weather "
	scenario  = "./test/simulation -run TestScenarios/"
	ownership = "./cluster/ownership -run "
)

const (
	core    = "cluster/ownership/core.go"
	claim   = "cluster/ownership/claim.go"
	follow  = "cluster/ownership/follow.go"
	grant   = "cluster/ownership/grant.go"
	move    = "cluster/ownership/move.go"
	vote    = "cluster/ownership/vote.go"
	service = "test/simulation/service_test.go" // what the simulator has in the place of limiter
)

// mutants are in the order of the protocol, and then by package. Not in it, because nothing would change:
//
//   - A commit or cancel that does not forget the refusal remembered of its key (limiter's givesBack without OpSettle). While a
//     reservation is pending no refusal is remembered, and what was refused before it was made had no more room than there is
//     once it is taken back.
//   - A settlement that takes every charge for one that followers have been told of (store's toldOf, and with it who knows the rule): the
//     state is told as a whole once more.
//   - Deltas left beside a new state that stands for them (store's enter), or of the claim that it stands for added in a merge (run): each
//     of the two leaves nothing for the other.
//   - A state that is filled because what was before it is lost, and stands for its delta (store's enter): a merge adds what it was
//     filled with as well, which refuses more.
//   - A content without claims that is not taken for one made under claims unknown (store's TakeOver): whoever holds a partition has
//     claimed it, and copies name that claim.
//   - An answer that is an error and is remembered (limiter's remember): it does not say for how long, and so is not kept.
//   - A refusal answered from memory while nobody decides (limiter's direct and begin): it is as true as a moment before.
//   - An operation that is handed on once too often (limiter's handOn): Receive has looked at its hops before.
//   - The pauses before a holder is asked again, and how often a parked operation looks (limiter's forward and decideSoon): who waits
//     longer, or is told to ask elsewhere, is decided all the same.
//   - A voter that is ready as soon as it has read (voter.ready): it asks, and so reads, only after it has abstained. For the same reason an
//     answer to an earlier question of the same process (Records.ID) is as good as one to the last.
//   - A new epoch that is begun without a majority of answers (voter.consider): where fewer have read or are silent than a majority, the
//     others and this voter are one.
//   - A reading that takes in what voters say who have not read, or are none (voter.adopt, onRecords): the former say nothing, the latter are
//     not asked for. Likewise the epoch of a voter that has not read (onRequest): it is 0.
//   - A reading that does not compare what a record has replaced with the record (record.add): that is always lower, and another process's.
//   - What voters have replaced, or were asked, outliving the term (strictness.raised): it counts beside support only, of which there is
//     none until a voter has answered anew.
//   - The receiver's second look at who is there (onOffer, onCommit): receive drops what others send, and review what they have sent.
//   - A commit whose sender does not send the copy, or whose copy is not whole, of the two one (onCommit): the other is noticed.
//   - A target's confirmation while strict rules are closed (acknowledged): its numbers are below every backup's.
//   - What is known of the grant of a partition that was handed over (released): whoever takes it again begins anew.
var mutants = []mutant{
	{
		"ownership: decide without a token", core,
		[]edit{{"	case owner == c.cfg.Self || owner == (Node{}):\n		return Route{Standing: Unclaimed}", "	case owner == c.cfg.Self:\n		return Route{Standing: Owned}\n	case owner == (Node{}):\n		return Route{Standing: Unclaimed}"}},
		seeds + "fair,moving,crashing", "decided without being the owner",
	},
	{
		"ownership: nodes whose rings differ send a check back and forth", core,
		[]edit{{"	if r.Heard == (Node{}) {", "	if true {"}},
		"./test/simulation -run TestTwoLeave/800ms-2", "or a check waits for",
	},
	{
		"ownership: a move drops what changed last", move,
		[]edit{{"	f.sequence++\n	m.commit = &Commit{", "	chunk = nil\n	f.sequence++\n	m.commit = &Commit{"}},
		seeds + "moving", "admitted beyond the limit",
	},
	{
		"ownership: a term is used twice", core,
		[]edit{{"	t := pt.known.after(c.cfg.Self.Boot)\n", "	if pt.known != (Term{}) {\n		return pt.known\n	}\n	t := pt.known.after(c.cfg.Self.Boot)\n"}},
		seeds + "moving,crashing,voting", "a term used twice",
	},
	{
		"ownership: a lease counts from receipt", grant,
		[]edit{{"	ends := a.at + int64(c.cfg.Lease)", "	ends := c.t + int64(c.cfg.Lease)"}},
		scenario + "lease_end", "two grants at a time",
	},
	{
		"vote: a record is kept for 1+2ρ", vote,
		[]edit{{"lease/1_000_000*3*v.c.cfg.Drift", "lease/1_000_000*2*v.c.cfg.Drift"}},
		scenario + "record_end", "two grants at a time",
	},
	{
		"ownership: rule 1, any support counts", grant,
		[]edit{{"	for i := range r.Items {\n		item, answer", `	for i := range r.Items {
		if !r.Items[i].Granted {
			continue
		}
		for p := range c.parts {
			if pt := &c.parts[p]; pt.held && pt.standing == Owned {
				pt.strict.support[a.voter] = ends
				c.evaluate(p)
			}
		}
	}
	for i := range r.Items {
		item, answer`}},
		seeds + "cutting,pausing,doubting", "two grants at a time",
	},
	{
		"vote: rule 2, renewals are not checked", vote,
		[]edit{{"	case !r.Term.Less(i.Term):\n", "	case i.Release == (Release{}):\n		a.Granted = true\n		return a\n	case !r.Term.Less(i.Term):\n"}},
		seeds + "cutting,pausing,doubting", "two grants at a time",
	},
	{
		"vote: rule 3, any proof of release will do", vote,
		[]edit{{"i.Release == (Release{r.Node, r.Term}):", "i.Release != (Release{}):"}},
		scenario + "release", "two grants at a time",
	},
	{
		"vote: rule 4, voters forget terms", vote,
		[]edit{{"	v.votesAt = c.t + v.life()\n", "	v.votesAt = c.t + v.life()\n	v.read, v.epoch = true, 1\n"}},
		scenario + "voter_forgets", "admitted beyond the limit",
	},
	{
		"vote: rule 5, voters do not abstain", vote,
		[]edit{{"	v.votesAt = c.t + v.life()\n", "	v.votesAt = c.t\n"}},
		scenario + "voters_at_once", "two grants at a time",
	},
	{
		"ownership: no copy, and the voters do not know", grant,
		[]edit{
			{"	c.grants.urgent = true\n}\n", "	c.setUnguarded(p)\n}\n"},
			{"if n != (Node{}) {\n				bare = false\n", "if n != (Node{}) {\n				bare = false\n				continue\n"},
		},
		seeds + "cutting,oneWay,pausing,doubting", "admitted beyond the limit",
	},
	{
		"store: a merge adds nothing", "store/merge.go",
		[]edit{{"\tif !idle {\n", "\tif false {\n"}},
		"./store -run TestMergeAny$", "party",
	},
	{
		"store: an escrow is dated at its grant", "store/content.go",
		[]edit{{"r.state, now, o.advanced", "r.state, algo.Instant{Mono: now.Mono - int64(r.spec.rule.Limits[0].Window), Wall: now.Wall}, o.advanced"}},
		scenario + "escrow_dated", "admitted beyond the limit",
	},
	{
		"limiter, in the simulator: an answer is used past its lease", service,
		[]edit{
			{"ans.left >= 0 && ans.failed == \"\" && ans.admitted {", "false {"},
			{"ans.by == p.holder() && p.clock", "false && p.clock"},
		},
		scenario + "late_answer", "an answer used past its lease",
	},
	{
		"limiter, in the simulator: an answer does not wait for the copy", service,
		[]edit{{"dec.Ticket <= p.copied[part] {", "part >= 0 {"}},
		scenario + "ticket", "admitted beyond the limit",
	},
	{
		"ownership: a stale commit is accepted", move,
		[]edit{{"case m.Term.Less(pt.known) && m.Known.Less(pt.known):", "case false:"}},
		ownership + "TestStaleCommit", "a stale commit is answered",
	},
	{
		"ownership: a failed move goes on under the same term", move,
		[]edit{{"		pt.askAt = c.t + retryAfter\n		c.raise(p)\n", "		pt.askAt = c.t + retryAfter\n		pt.standing = Owned\n		c.open(p)\n"}},
		ownership + "TestFailedMove", "after a move that failed",
	},
	{
		"ownership: an error of Apply is ignored in a copy", follow,
		[]edit{{"} else if err != nil {\n			return c.spoil(p)", "} else if err != nil && false {\n			return c.spoil(p)"}},
		ownership + "TestBrokenChunk", "a broken chunk is answered",
	},
	{
		"ownership: an error of Apply is ignored in a commit", move,
		[]edit{{"c.data.Apply(p, false, c.now.Instant, m.Chunk) != nil", "c.data.Apply(p, false, c.now.Instant, m.Chunk) != nil && false"}},
		ownership + "TestBrokenChunk", "a broken commit is answered",
	},
	{
		"ownership: an error of Apply is ignored in a merge", move,
		[]edit{{"c.data.Apply(p, true, c.now.Instant, m.Chunk) != nil ||", "c.data.Apply(p, true, c.now.Instant, m.Chunk) != nil && false ||"}},
		ownership + "TestBrokenChunk", "a broken merge is answered",
	},
	{
		"ownership: an error of Merge is ignored", move,
		[]edit{{"|| c.data.Merge(p, c.now.Instant) != nil", "|| c.data.Merge(p, c.now.Instant) != nil && false"}},
		ownership + "TestBrokenChunk", "a broken merge is answered",
	},
	{
		"ownership: a copy without room is begun anew at once", follow,
		[]edit{{"			c.noRoom(p, Slot(s))\n", "			c.restart(p, Slot(s))\n"}},
		ownership + "TestNoRoom", "attempts: ",
	},
	{
		"store: new keys take the room of copies", "store/shard.go",
		[]edit{{"if bounded && s.cfg.Copies {", "if false && bounded {"}},
		"./test/simulation -run TestFloodLeavesCopies", "have no copy",
	},
	{
		"ownership: earlier pieces of a chunk are dropped", follow,
		[]edit{{"chunk = append(in.pieces, m.Chunk...)", "chunk = m.Chunk"}},
		ownership + "TestPieces", "piece 2 is answered",
	},
	{
		"ownership: messages of an earlier attachment are taken in", follow,
		[]edit{{"case in.sender == from && attachment(m.Sequence) < attachment(in.last):\n		return", "case false:\n		return"}},
		ownership + "TestAttachments", "the copy has",
	},
	{
		"ownership: messages of a later attachment are taken for repeated", follow,
		[]edit{{"attachment(m.Sequence) == attachment(in.last) && m.Sequence <= in.last", "m.Sequence <= in.last"}},
		ownership + "TestAttachments", "the copy has",
	},
	{
		"ownership: anybody's copy will do for strict keys", grant,
		[]edit{{"certain && old.Backup == c.cfg.Self && s.from == old.Node && ", "certain && old.Backup == c.cfg.Self && "}},
		ownership + "TestResolve", "somebody_else's_copy",
	},
	{
		"ownership: any copy will do for strict keys, recorded as the backup's or not", grant,
		[]edit{{"certain && old.Backup == c.cfg.Self && ", "certain && "}},
		ownership + "TestResolve", "another_backup",
	},
	{
		"ownership: an earlier copy will do for strict keys", grant,
		[]edit{{"s.from == old.Node && !s.copy.Term.Less(old.Term)", "s.from == old.Node"}},
		ownership + "TestResolve", "an_earlier_copy",
	},
	{
		"ownership: voters that differ are believed", grant,
		[]edit{{"case certain && old", "case (certain || true) && old"}},
		ownership + "TestResolve", "voters_that_differ",
	},
	{
		"ownership: what is confirmed under a lapsed grant counts", follow,
		[]edit{{"s.until > c.t || s.closed", "true || s.closed"}},
		ownership + "TestLapsed", "lapsed true: confirmed",
	},
	{
		"ownership: the sequence that the giver is told is off by one", move,
		[]edit{{"ack.Keep, ack.Sequence = true, f.sequence", "ack.Keep, ack.Sequence = true, f.sequence+1"}},
		ownership + "TestKeep", "the first message is",
	},
	{
		"ownership: the sequence that the giver goes on from is off by one", follow,
		[]edit{{"Keep: true, Sequence: m.Sequence - 1", "Keep: true, Sequence: m.Sequence"}},
		ownership + "TestKeep", "the copy has",
	},
	{
		"ownership: Forget ignores the term", follow,
		[]edit{{" && !f.Term.Less(pt.copy.Term)", ""}},
		ownership + "TestForget", "a late Forget is obeyed",
	},
	{
		"ownership: support counts whose backup has no current copy", grant,
		[]edit{{"if !f.caught || n != f.node {", "if n != f.node {"}},
		ownership + "TestNewCopy", "strict rules are decided while",
	},
	{
		"ownership: what was noted of voters outlives the term", grant,
		[]edit{{"	s.support, s.noted, s.asked = [maxVoters]int64{}, [maxVoters][]Node{}, [maxVoters]uint64{}", "	s.support, s.asked = [maxVoters]int64{}, [maxVoters]uint64{}"}},
		ownership + "TestRaised", "no lease from two voters",
	},
	{
		"ownership: support outlives the term", grant,
		[]edit{{"	s.support, s.noted, s.asked = [maxVoters]int64{}, [maxVoters][]Node{}, [maxVoters]uint64{}", "	s.noted, s.asked = [maxVoters][]Node{}, [maxVoters]uint64{}"}},
		ownership + "TestRaised", "the support for the lower term counts",
	},
	{
		"ownership: a partition that was handed over stays unguarded", follow,
		[]edit{{"	c.data.AttachCurrent(p, Backup, false)\n	c.data.Unguarded(p, false)\n", "	c.data.AttachCurrent(p, Backup, false)\n"}},
		ownership + "TestKeep", "decided without a copy",
	},
	{
		"ownership: a backup's sequence is not above a receiver's", follow,
		[]edit{{"	if s == Backup {\n		n |= 1 << 63\n	}\n", ""}},
		ownership + "TestAttachments", "is not above a move's receiver's",
	},
	{
		"ownership: a flush is of all that is pending", core,
		[]edit{{"c.drained + flushBytes", "math.MaxInt"}},
		ownership + "TestFlushInParts", "8 partitions are flushed at once",
	},
	{
		"ownership: the rest of a flush waits for the next one", core,
		[]edit{{"c.t >= c.flushAt || c.Behind()", "c.t >= c.flushAt"}},
		ownership + "TestFlushInParts", "are flushed at once",
	},
	{
		"ownership: others are judged by the time in which this node did not run", core,
		[]edit{{"min(c.t-c.ticked, awakeMost)", "max(c.t-c.ticked, 0)"}},
		ownership + "TestStandstill", "a backup whose answer may have come meanwhile is dropped",
	},
	{
		"ownership: a voter that did not run begins an epoch before it has heard of another's", vote,
		[]edit{{"c.awake >= v.asked+int64(v.at)*epochTurn", "c.t >= v.votesAt+int64(v.at)*epochTurn"}},
		ownership + "TestStandstill", "though another voter had begun epoch 1",
	},
	{
		"ownership: a voter takes no answer to an earlier question", vote,
		[]edit{{"v.asks-m.ID > lateAnswers", "m.ID != v.asks"}},
		ownership + "TestLateRecords", "does not read what is answered 400 ms later",
	},
	{
		"ownership: what a voter has answered undoes what it answered later", vote,
		[]edit{{"ok && m.ID < r.ID", "ok && m.ID < 0*r.ID"}},
		ownership + "TestLateRecords", "an answer undoes a later one",
	},
	{
		"ownership: a node with slow ticks keeps for long what it has no grant for", core,
		[]edit{{"const awakeMost = int64(200 * time.Millisecond)", "const awakeMost = int64(50 * time.Millisecond)"}},
		ownership + "TestStandstill", "keeps for longer than two leases",
	},
	{
		"ownership: whatever a node that leaves receives counts as sent just now", core,
		[]edit{{"	c.receive(e.From, e.Message)\n	c.deliverOwn()\n}\n\nfunc (c *Core) receive", "	c.words[e.From] = c.t\n	c.receive(e.From, e.Message)\n	c.deliverOwn()\n}\n\nfunc (c *Core) receive"}},
		ownership + "TestStandstill", "may have waited for long",
	},
	{
		"ownership: a node that leaves counts an answer from its arrival", "cluster/ownership/leave.go",
		[]edit{{"max(c.words[from], at)", "max(c.t, at)"}},
		ownership + "TestStandstill", "may have waited for long",
	},
	{
		"ownership: a node that runs now and then waits without end", core,
		[]edit{{"	c.ran, c.ticked = c.awake, c.t\n", "	if c.t-c.ticked <= awakeMost {\n		c.ran = c.awake\n	}\n	c.ticked = c.t\n"}},
		ownership + "TestStandstill", "waits for a backup without end",
	},
	{
		"ownership: an idle transfer is not ended", core,
		[]edit{{"c.awake-in.word > idleAfter", "false"}},
		ownership + "TestIdleOffer$", "while another sends nothing",
	},
	{
		"ownership: a node that leaves does not stay for what it claims", core,
		[]edit{{"	c.settled = c.settled && c.mine(p) //", "	//"}},
		ownership + "TestEntrustedWhileLeaving", "settled with a partition that it has just claimed",
	},
	{
		"ownership: a copy ends with another's idle offer", core,
		[]edit{{"			c.endOffer(p) // whoever", "			c.endIncoming(p) // whoever"}},
		ownership + "TestIdleOfferBesideCopy", "after the other's offer has ended is answered",
	},
	{
		"ownership: a copy's messages make another's offer last", follow,
		[]edit{{"	if in.from == from {\n		in.word = c.awake", "	if true {\n		in.word = c.awake"}},
		ownership + "TestIdleOfferBesideCopy", "while another sends nothing",
	},
	{
		"ownership: pieces of a lost sender are kept", core,
		[]edit{{"c.awake-in.heard > idleAfter", "false"}},
		ownership + "TestIdlePieces", "still take",
	},
	{
		"ownership: strict answers are given at a release to one who is not on record", move,
		[]edit{{"b.named && b.node == to", "b.node == to"}},
		ownership + "TestReleaseUnnamed", "named false",
	},
	{
		"ownership: a backup that is replaced is not told to forget", follow,
		[]edit{{"			c.send(f.node, &Forget{Partition: p, Term: pt.term})\n", "			_ = 0\n"}},
		ownership + "TestOldBackups", "no *ownership.Forget was sent",
	},
	{
		"ownership: the backup of what was handed over is not told to forget", move,
		[]edit{{"				c.send(f.node, &Forget{Partition: p, Term: pt.term})\n", "				_ = 0\n"}},
		ownership + "TestOldBackups", "no *ownership.Forget was sent",
	},
	{
		"ownership: nobody yields to a claimant of a lower name", claim,
		[]edit{{"			yield = retryAfter\n", ""}, {"yield = max(yield, retryAfter/2)", "_ = yield"}},
		ownership + "TestYield", "owned: true, want false",
	},
	{
		"vote: a request that comes again is voted on again", vote,
		[]edit{{"	if m.ID <= v.last[from] {\n		return\n	}\n", ""}},
		ownership + "TestLateRequest", "is answered again",
	},
	{
		"vote: an older request undoes a newer", vote,
		[]edit{{"a.Granted = r.ID < id", "a.Granted = true"}},
		ownership + "TestLateRequest", "a late request is answered",
	},
	{
		"vote: what was replaced is forgotten on renewal", vote,
		[]edit{{"		fresh.replaced = r.replaced\n", "		fresh.replaced = Record{}\n"}},
		ownership + "TestReplaced", "request 2 is answered",
	},
	{
		"vote: a renewal replaces the process itself", vote,
		[]edit{{"		fresh.replaced = r.replaced\n", "		_ = 0\n"}},
		ownership + "TestReplaced", "request 2 is answered",
	},
	{
		"vote: who reads is not told what was replaced", vote,
		[]edit{{"				if old := v.records[p].replaced; old.Node != (Node{}) {", "				if old := v.records[p].replaced; false {"}},
		ownership + "TestReplaced", "who reads is told",
	},
	{
		"vote: a record's end is not begun anew by a reading", vote,
		[]edit{{"add(rec, v.c.t+v.life())", "add(rec, v.c.t)"}},
		ownership + "TestReading", "another process is answered",
	},
	{
		"vote: a reading takes any request of a process for its last", vote,
		[]edit{{"		if r.ID < other.ID {\n			r.Record = other\n		}\n", ""}},
		ownership + "TestReading", "recorded:",
	},
	{
		"vote: a reading drops what was replaced", vote,
		[]edit{{"	case other.Node != r.Node && r.replaced.Term.Less(other.Term):\n		r.replaced = other\n", ""}},
		ownership + "TestReading", "recorded:",
	},
	{
		"vote: a reading takes any request of a replaced process for its last", vote,
		[]edit{{"	case other.Node == r.replaced.Node && other.Term == r.replaced.Term && other.ID > r.replaced.ID:\n		r.replaced = other\n", ""}},
		ownership + "TestReading", "recorded:",
	},
	{
		"ownership: a commit that comes again is not known once the partition is handed on", move,
		[]edit{{"	*pt.strict = strictness{}\n", "	*pt.strict, pt.committed = strictness{}, nil\n"}},
		ownership + "TestLateCommit", "the commit of x is answered",
	},
	{
		"ownership: a voter is not asked about what is new for a while", grant,
		[]edit{{"	g.soonAt[a.voter] = c.t // it keeps up\n", ""}},
		"./test/simulation -run TestPlannedMoves", "nobody decides, or a check waits, for up to",
	},
	{
		"ownership: who has just joined is asked by all before it knows who holds what", core,
		[]edit{{" || c.newcomer(owner)):", "):"}},
		"./test/simulation -run TestPlannedMoves", "nobody decides, or a check waits, for up to",
	},
	{
		"ownership: a partition that got several terms is told of several times", claim,
		[]edit{{"slices.Compact(c.gained)", "c.gained"}},
		ownership + "TestNewsOnce", "told: [",
	},
	{
		"ownership: who claims does not wait for one of a higher name who says that it does too", claim,
		[]edit{{"yield = max(yield, retryAfter/2)", "_ = yield"}},
		ownership + "TestYield", "owned: true, want false",
	},
	{
		"ownership: who has been entrusted with a partition in an earlier round is not asked again", claim,
		[]edit{{"infos[i].Term.Less(pt.known) && c.lives(pt.holder)", "false"}},
		ownership + "TestLateClaim", "owned: true, want false",
	},
	{
		"vote: a voter takes over an epoch below one that it has heard of", vote,
		[]edit{{"fresh != nil && fresh.Epoch == v.seen:", "fresh != nil:"}},
		ownership + "TestNewEpoch$", "the epoch is",
	},
	{
		"vote: a new epoch is not above what others have told of", vote,
		[]edit{{"max(v.seen+1, uint64(", "max(v.seen, uint64("}},
		ownership + "TestNewEpoch$", "the epoch is",
	},
	{
		"vote: a voter that has not read tells nobody of epochs", vote,
		[]edit{{"Epoch: max(v.epoch, v.seen)}", "Epoch: v.epoch}"}},
		ownership + "TestEpochsHeardOf$", "who reads is told",
	},
	{
		"vote: an epoch is fresh for everybody", vote,
		[]edit{{"\t\tv.spread = v.spread || v.told != (Node{}) && v.told != from\n", ""}},
		ownership + "TestFresh$", "]}, want fresh false",
	},
	{
		"vote: an epoch that two were told of is fresh for the last of them", vote,
		[]edit{{"v.spread || v.told != (Node{}) && v.told != from", "v.told != (Node{}) && v.told != from"}},
		ownership + "TestFresh$", "]}, want fresh false",
	},
	{
		"vote: a voter does not hear of epochs from requests", vote,
		[]edit{{"\t\tv.seen = max(v.seen, i.Term.Epoch)\n", "\t\t_ = i\n"}},
		ownership + "TestNewEpoch$", "the epoch is",
	},
	{
		"vote: what a process of this voter's name has recorded counts as another voter's", vote,
		[]edit{{"if !ok || name == c.cfg.Self.Name {", "if !ok {"}},
		ownership + "TestReadingOfNamesake$", "a voter of three has read the records of one other",
	},
	{
		"ownership: a content is not whole any more after two higher terms", grant,
		[]edit{{"s.selfWhole = s.selfWhole || s.whole", "s.selfWhole = s.whole"}},
		ownership + "TestRaisedAgain$", "s, strict keys start full: true",
	},
	{
		"ownership: a backup is named before it has everything", grant,
		[]edit{{"\t\tif f.named {\n\t\t\ti.Backup", "\t\tif f.caught {\n\t\t\ti.Backup"}},
		ownership + "TestUnheardBackup$", "x is named before it has everything",
	},
	{
		"ownership: anybody answers for a voter", grant,
		[]edit{{"return a.id == r.ID && a.to == from", "return a.id == r.ID"}},
		ownership + "TestLateGrants$", "the answer of one who was not asked counts",
	},
	{
		"ownership: a grant for an earlier term counts", grant,
		[]edit{{" || pt.standing != Owned || pt.term != item.Term ||", " || pt.standing != Owned ||"}},
		ownership + "TestLateGrants$", "support for an earlier term counts",
	},
	{
		"ownership: a refusal has a frozen partition decided on", grant,
		[]edit{{"\t\tif !pt.held || pt.standing != Owned || pt.term", "\t\tif !pt.held || pt.term"}},
		ownership + "TestRefusedWhileFrozen$", "a partition that may have been taken over is",
	},
	{
		"ownership: a late answer of a voter tells of its record", grant,
		[]edit{{"if s.asked[a.voter] == a.id {", "{"}},
		ownership + "TestUnheardBackup$", "late true: strict rules are decided while two voters may have recorded a backup that is lost",
	},
	{
		"ownership: a higher term is taken before a record runs out", grant,
		[]edit{{"if a.Wait <= 0 && !c.lives(a.Recorded.Node) {", "if !c.lives(a.Recorded.Node) {"}},
		ownership + "TestRefusedGrant$", "gone, and not run out: held at",
	},
	{
		"ownership: a higher term is taken against a process that lives", grant,
		[]edit{{"if a.Wait <= 0 && !c.lives(a.Recorded.Node) {", "if a.Wait <= 0 {"}},
		ownership + "TestRefusedGrant$", "after the refusal",
	},
	{
		"ownership: the term of a refusal is forgotten", grant,
		[]edit{{"\t\tif pt.known.Less(a.Recorded.Term) {\n\t\t\tpt.known = a.Recorded.Term\n\t\t}\n\t\tif a.Wait", "\t\tif a.Wait"}},
		ownership + "TestRefusedGrant$", "gone: the next term is",
	},
	{
		"ownership: a voter has recorded what it answered last", grant,
		[]edit{{"if !slices.Contains(s.noted[voter], backup) {", "if len(s.noted[voter]) == 0 {"}},
		ownership + "TestUnheardBackup$", "late false: strict rules are decided while two voters may have recorded a backup that is lost",
	},
	{
		"ownership: a grant has strict rules decided while the backup is replaced", grant,
		[]edit{{"pt.standing != Owned || s.closed != nil {", "pt.standing != Owned {"}},
		ownership + "TestAnotherBackup$", "a grant has strict rules decided while the backup is being replaced",
	},
	{
		"ownership: strict rules stay closed when the backup stays", grant,
		[]edit{{"\t\ts.closed = &closed{at: c.t, until: s.until, sequence: pt.followers[Backup].sequence}\n\t\ts.until = 0\n", "\t\ts.closed = &closed{at: c.t, until: s.until, sequence: pt.followers[Backup].sequence}\n"}},
		ownership + "TestAnotherBackup$", "strict rules are not decided when the backup stays",
	},
	{
		"ownership: strict rules are decided while the backup is replaced", grant,
		[]edit{{"\tc.data.Lease(p, 0)\n}\n\n// openStrict", "\t_ = c.data\n}\n\n// openStrict"}},
		ownership + "TestAnotherBackup$", "strict rules are decided while the backup is being replaced",
	},
	{
		"ownership: the message in flight confirms what was decided after it", grant,
		[]edit{{", sequence: pt.followers[Backup].sequence}", "}"}},
		ownership + "TestAnotherBackup$", "the backup was told to forget before it had everything",
	},
	{
		"ownership: the last changes are not sent to a backup that is replaced", grant,
		[]edit{{"if f.unacked == nil && c.data.Pending(p, Backup) > 0 {", "if false {"}},
		ownership + "TestAnotherBackup$", "the backup was told to forget before it had everything",
	},
	{
		"ownership: voters that differ about an earlier term are not believed about a later", grant,
		[]edit{{"old, certain = r, true", "old = r"}},
		ownership + "TestWhole$", "strict keys start full: true, what the lost holder may have admitted is charged: false",
	},
	{
		"ownership: what was merged incomplete is whole", grant,
		[]edit{{" || !s.releaseWhole) {", ") {"}},
		ownership + "TestWhole$", "strict keys start full: false, what the lost holder may have admitted is charged: false",
	},
	{
		"ownership: a record of an earlier epoch is believed", grant,
		[]edit{{"\tcase old.Term.Epoch != epoch:\n\t\tcold = \"the voters have begun a new epoch since\"\n", ""}},
		ownership + "TestWhole$", "strict keys start full: false, what the lost holder may have admitted is charged: false",
	},
	{
		"ownership: what was handed over incomplete is whole", grant,
		[]edit{{"\t\tif !s.releaseWhole {\n", "\t\tif false {\n"}},
		ownership + "TestWhole$", "strict keys start full: false, what the lost holder may have admitted is charged: false",
	},
	{
		"ownership: a backup is not told what was taken over", grant,
		[]edit{{"\t\ttakenOver = true\n", "\t\ttakenOver = false\n"}},
		ownership + "TestWhole$", "the backup is told of what has changed: false",
	},
	{
		"ownership: a backup is not told that strict keys start full", grant,
		[]edit{{"cold != \"\" || takenOver || !f.named", "takenOver || !f.named"}},
		ownership + "TestWhole$", "the backup is told of what has changed: false",
	},
	{
		"ownership: an offer under a lower term than a living holder's is accepted", move,
		[]edit{{"!pt.held && o.Term.Less(pt.known) && pt.holder != from && c.lives(pt.holder):", "false:"}},
		ownership + "TestArriving$", "an offer under a lower term than another's is answered",
	},
	{
		"ownership: a partition that is frozen is offered to", move,
		[]edit{{"case pt.held && (pt.standing == Frozen || pt.move != nil):", "case pt.held && pt.move != nil && pt.standing != Frozen:"}},
		ownership + "TestFrozen$", "an offer is answered",
	},
	{
		"ownership: the term of an offer is forgotten", move,
		[]edit{{"\t\tpt.known = o.Term // whatever", "\t\t_ = o.Term // whatever"}},
		ownership + "TestGivenTerm$", "after an offer under a higher term the next is",
	},
	{
		"ownership: an offer that comes again counts twice", move,
		[]edit{{"\t\tif pt.incoming.from == (Node{}) {\n\t\t\tc.arriving++\n\t\t}\n", "\t\tc.arriving++\n"}},
		ownership + "TestArriving$", "are on their way, want",
	},
	{
		"ownership: an offer ends at once", move,
		[]edit{{"pt.incoming.from, pt.incoming.merge, pt.incoming.word = from, pt.held, c.awake", "pt.incoming.from, pt.incoming.merge = from, pt.held"}},
		ownership + "TestArriving$", "are on their way, want",
	},
	{
		"ownership: an answer to an offer counts twice", move,
		[]edit{{"m.to != from || m.accepted || r.Term != pt.term", "m.to != from || r.Term != pt.term"}},
		ownership + "TestMoveEnds$", "an answer that came twice began",
	},
	{
		"ownership: an answer to an earlier offer counts", move,
		[]edit{{"m.accepted || r.Term != pt.term {", "m.accepted {"}},
		ownership + "TestMoveEnds$", "an answer to an earlier offer is taken for one to the last",
	},
	{
		"ownership: who takes a partition over is not sent everything", move,
		[]edit{{"c.follow(r.Partition, Target, from, true)", "c.follow(r.Partition, Target, from, false)"}},
		ownership + "TestLateCommit$", "y takes the partition over and is not sent everything",
	},
	{
		"ownership: who takes a partition over is not sent everything the second time", move,
		[]edit{{"\t\tf.all = true\n", ""}},
		ownership + "TestMoveEnds$", "who is to have it is sent anew",
	},
	{
		"ownership: who holds the partition as well is kept as backup", move,
		[]edit{{"\t\tc.dropFollower(r.Partition, Backup, \"it holds the partition too\")\n\t\tfallthrough", "\t\tfallthrough"}},
		ownership + "TestMoveEnds$", "who holds the partition as well is taken for a backup",
	},
	{
		"ownership: a move goes on though another is to have the partition", move,
		[]edit{{", pt.standing == Owned && c.owner(p) != m.to:", ":"}},
		ownership + "TestMoveEnds$", "unacked:<nil> sequence",
	},
	{
		"ownership: a partition is given away before its backup has confirmed", move,
		[]edit{{"unacked == nil && (m.slot == Backup || !c.confirmFirst(p)):", "unacked == nil:"}},
		ownership + "TestMoveConfirmsFirst$", "and given away before the backup has confirmed what was decided",
	},
	{
		"ownership: a partition is given away before the copy is whole", move,
		[]edit{{"f.node == m.to && f.caught && f.unacked == nil &&", "f.node == m.to && f.unacked == nil &&"}},
		ownership + "TestLastChanges$", "owned: false, want true",
	},
	{
		"ownership: strict rules are not closed by a freeze", move,
		[]edit{{"\tc.data.Shut(p)\n\tc.closeStrict(p)\n", "\tc.data.Shut(p)\n"}},
		ownership + "TestMoveConfirmsFirst$", "and given away before the backup has confirmed what was decided",
	},
	{
		"ownership: a commit drops what does not fit into it", move,
		[]edit{{"\tif more || len(chunk) > pieceBytes {", "\tif more && false || len(chunk) > pieceBytes {"}},
		ownership + "TestLastChanges$", "admissions were sent",
	},
	{
		"ownership: what is handed over is always whole", move,
		[]edit{{"Granted: pt.strict.whole,", "Granted: true,"}},
		ownership + "TestRefusedWhileFrozen$", "a content that was never under a grant is handed over as whole",
	},
	{
		"ownership: a commit does not tell the highest term", move,
		[]edit{{"Known: pt.known, Release", "Known: pt.term, Release"}},
		ownership + "TestGivenTerm$", "and afterwards",
	},
	{
		"ownership: a commit is taken in the middle of a chunk", move,
		[]edit{{" && len(in.pieces) == 0 && m.Sum", " && m.Sum"}},
		ownership + "TestUnfitCommit$", "owned: true, want false",
	},
	{
		"ownership: a commit is taken after a gap", move,
		[]edit{{"in.sender == from && m.Sequence == in.last+1 &&", "in.sender == from && m.Sequence > in.last &&"}},
		ownership + "TestUnfitCommit$", "owned: true, want false",
	},
	{
		"ownership: a commit is merged that is none to be merged", move,
		[]edit{{"!(in.from == from && in.merge && m.Merge):", "!(in.from == from && in.merge):"}},
		ownership + "TestUnfitCommit$", "merged, not to be merged",
	},
	{
		"ownership: an unfinished copy is merged", move,
		[]edit{{"(pt.standing == Frozen || !in.complete || !fits)", "(pt.standing == Frozen || !fits)"}},
		ownership + "TestUnfitCommit$", "merged, unfinished",
	},
	{
		"ownership: a commit is taken for another process's copy", move,
		[]edit{{"case !fits || pt.copyFrom != from || pt.copy == (Position{}) || m.Merge:", "case !fits || pt.copy == (Position{}) || m.Merge:"}},
		ownership + "TestUnfitCommit$", "owned: true, want false",
	},
	{
		"ownership: a commit to be merged is taken over", move,
		[]edit{{" || pt.copy == (Position{}) || m.Merge:", " || pt.copy == (Position{}):"}},
		ownership + "TestUnfitCommit$", "owned: true, want false",
	},
	{
		"ownership: a copy that lacks a commit's changes is kept", move,
		[]edit{{"\t\tack.Outcome = Again\n\t\tc.dropCopy(p)\n", "\t\tack.Outcome = Again\n"}},
		ownership + "TestBrokenChunk$", "a copy that lacks a commit's changes is at",
	},
	{
		"ownership: what was taken over is always whole", move,
		[]edit{{"releaseWhole: m.Granted}", "releaseWhole: true}"}},
		ownership + "TestGivenTerm$", "merge false: what was not whole is taken over as",
	},
	{
		"ownership: a taken over partition's term is not above what the giver knew of", move,
		[]edit{{"\t\tc.learn(p, m.Known, Node{})\n", ""}},
		ownership + "TestGivenTerm$", "merge false",
	},
	{
		"ownership: a giver that is not the backup keeps its copy", move,
		[]edit{{"f.node == (Node{}) && c.member(c.view.Backups, p) == from &&", "f.node == (Node{}) &&"}},
		ownership + "TestUnfitCommit$", "who is not the backup is told",
	},
	{
		"ownership: every commit is remembered", move,
		[]edit{{"old.from == e.from || !c.lives(old.from)", "old.from == e.from && !c.lives(old.from)"}},
		ownership + "TestLateCommit$", "commits of two processes are remembered",
	},
	{
		"ownership: a merged partition's term is not above what the giver knew of", move,
		[]edit{{"\tif pt.known.Less(m.Known) {\n\t\tpt.known = m.Known\n\t}\n\tc.raise(p)\n\tpt.strict.release, pt", "\tc.raise(p)\n\tpt.strict.release, pt"}},
		ownership + "TestGivenTerm$", "merge true",
	},
	{
		"ownership: what was merged is always whole", move,
		[]edit{{"pt.strict.releaseWhole = Release{Node: m.Release, Term: m.Term}, m.Granted", "pt.strict.releaseWhole = Release{Node: m.Release, Term: m.Term}, true"}},
		ownership + "TestGivenTerm$", "merge true: what was not whole is taken over as",
	},
	{
		"ownership: an answer to an earlier commit counts", move,
		[]edit{{" || m.to != from || a.Term != pt.term {", " || m.to != from {"}},
		ownership + "TestFrozen$", "an answer to an earlier commit",
	},
	{
		"ownership: the term of a commit's answer is forgotten", move,
		[]edit{{"\t\tif pt.known.Less(a.Known) {\n\t\t\tpt.known = a.Known\n\t\t}\n\t\tslot", "\t\tslot"}},
		ownership + "TestFailedCommit$", "held at",
	},
	{
		"ownership: who could not take a partition over is still current", move,
		[]edit{{"\t\tif slot == Backup {\n\t\t\tc.dropFollower(p, Backup, \"it could not take over\")\n\t\t}\n", "\t\t_ = slot\n"}},
		ownership + "TestFailedCommit$", "it is sent",
	},
	{
		"ownership: a move that has ended leaves its follower behind", move,
		[]edit{{"\tif pt.followers[Target].node != (Node{}) {\n\t\tc.dropFollower(p, Target, \"\")\n\t}\n", ""}},
		ownership + "TestMoveEnds$", "unacked:<nil> sequence",
	},
	{
		"ownership: a commit that was not taken is still on its way", move,
		[]edit{{"\tif ack.Outcome == Again {\n\t\tc.endIncoming(p)\n\t}\n", ""}},
		ownership + "TestUnfitCommit$", "are still on their way",
	},
	{
		"ownership: two copies share numbers", follow,
		[]edit{{"\tpt.attached++\n\tpt.followers[s]", "\tpt.followers[s]"}},
		ownership + "TestAnotherAttachment$", "the first copy begins with",
	},
	{
		"ownership: a giver's copy shares numbers with an earlier one", follow,
		[]edit{{"\tpt.attached++\n\tpt.followers[Backup]", "\tpt.followers[Backup]"}},
		ownership + "TestAnotherAttachment$", "after attachment",
	},
	{
		"ownership: a frozen partition looks for a backup", follow,
		[]edit{{"\tif pt.standing == Frozen {\n\t\treturn\n\t}\n\tif f.node == want", "\tif f.node == want"}},
		ownership + "TestMoveConfirmsFirst$", "and given away before the backup has confirmed what was decided",
	},
	{
		"ownership: who takes a partition over is replaced as backup", follow,
		[]edit{{"pt.move != nil && pt.move.accepted {", "false {"}},
		ownership + "TestMoveEnds$", "who is to have it is replaced as backup by",
	},
	{
		"ownership: strict rules stay closed until the next grant", follow,
		[]edit{{"\t\tif pt.strict.closed != nil {\n\t\t\tc.openStrict(p) // the", "\t\tif false {\n\t\t\tc.openStrict(p) // the"}},
		ownership + "TestAnotherBackup$", "strict rules are not decided when the backup stays",
	},
	{
		"ownership: a lease outlives the backup on record", follow,
		[]edit{{"\tc.evaluate(p)\n\tc.unguard(p)\n", "\tc.unguard(p)\n"}},
		ownership + "TestUnheardBackup$", "late false: strict rules are decided while two voters may have recorded a backup that is lost",
	},
	{
		"ownership: a backup is named with the first chunk", follow,
		[]edit{{"f.clean = !more && c.grants", "f.clean = c.grants"}},
		ownership + "TestLostBackup$", "a backup that has the first chunk",
	},
	{
		"ownership: every piece of a chunk completes a copy", follow,
		[]edit{{"Complete: last && !f.complete && i == parts-1,", "Complete: last && !f.complete,"}},
		ownership + "TestLargeChunk$", "begins true, completes true",
	},
	{
		"ownership: a copy is completed a second time", follow,
		[]edit{{"f.complete = f.complete || last", "f.complete = last"}},
		ownership + "TestAcknowledged$", "a backup that is current gets",
	},
	{
		"ownership: anybody's message ends a hand-over", follow,
		[]edit{{"mv.commit != nil && mv.to == from &&", "mv.commit != nil &&"}},
		ownership + "TestFrozen$", "another one's message",
	},
	{
		"ownership: an earlier message ends a hand-over", follow,
		[]edit{{"mv.to == from && pt.term.Less(m.Term) && !m.Begin", "mv.to == from && !m.Begin"}},
		ownership + "TestFrozen$", "an earlier message",
	},
	{
		"ownership: a whole copy ends a hand-over", follow,
		[]edit{{"pt.term.Less(m.Term) && !m.Begin", "pt.term.Less(m.Term)"}},
		ownership + "TestFrozen$", "a whole copy",
	},
	{
		"ownership: an earlier holder's message is taken in", follow,
		[]edit{{"case !pt.held && m.Term.Less(pt.known):", "case false:"}},
		ownership + "TestCopyInOrder$", "an earlier term's: answered",
	},
	{
		"ownership: a superseded offer is still on its way", follow,
		[]edit{{"\t\tif in.from == from {\n\t\t\tc.endOffer(p) // it is", "\t\tif false {\n\t\t\tc.endOffer(p) // it is"}},
		ownership + "TestArriving$", "are on their way, want",
	},
	{
		"ownership: a gap in a copy is not seen", follow,
		[]edit{{"case in.sender != from || m.Sequence != in.last+1:", "case in.sender != from:"}},
		ownership + "TestCopyInOrder$", "one is missing: answered",
	},
	{
		"ownership: damage to a copy is not seen", follow,
		[]edit{{"m.Sum != sum(m.Chunk) || m.Part", "m.Part"}},
		ownership + "TestCopyInOrder$", "damaged: answered",
	},
	{
		"ownership: a missing piece of a chunk is not seen", follow,
		[]edit{{" || m.Part != int(in.part) ||", " ||"}},
		ownership + "TestCopyInOrder$", "a piece is missing: answered",
	},
	{
		"ownership: a long transfer is taken for an idle one", follow,
		[]edit{{"\tif in.from == from {\n\t\tin.word = c.awake\n\t}\n", ""}},
		ownership + "TestArriving$", "are on their way, want",
	},
	{
		"ownership: the room of a whole chunk is kept", follow,
		[]edit{{"\t\tc.buffered -= len(in.pieces)\n\t\tchunk = append", "\t\tchunk = append"}},
		ownership + "TestBuffered$", "bytes are kept",
	},
	{
		"ownership: the room of a chunk is kept when the copy begins anew", follow,
		[]edit{{"\t\tc.buffered -= len(in.pieces)\n\t\tin.sender", "\t\tin.sender"}},
		ownership + "TestBuffered$", "bytes are kept",
	},
	{
		"ownership: the room of a damaged chunk is kept", follow,
		[]edit{{"\tc.buffered -= len(in.pieces)\n\tin.sender, in.last, in.pieces", "\tin.sender, in.last, in.pieces"}},
		ownership + "TestBuffered$", "bytes are kept",
	},
	{
		"ownership: an unfinished copy is told of", follow,
		[]edit{{"\tif !pt.held && !in.staged {\n\t\tpt.copy", "\tif !pt.held {\n\t\tpt.copy"}},
		ownership + "TestUnfinishedCopy$", "an unfinished copy is at",
	},
	{
		"ownership: a broken new copy ends the old one", follow,
		[]edit{{"\tif !in.staged && !pt.held {\n\t\tc.dropCopy(p)", "\tif !pt.held {\n\t\tc.dropCopy(p)"}},
		ownership + "TestUnfinishedCopy$", "when a new copy is broken, the old one is at",
	},
	{
		"ownership: any confirmation of a follower confirms the message in flight", follow,
		[]edit{{"f.unacked == nil || f.unacked.Sequence != a.Sequence {", "f.unacked == nil {"}},
		ownership + "TestAcknowledged$", "confirmed without the backup",
	},
	{
		"ownership: anybody confirms the message in flight", follow,
		[]edit{{"if f.node != from || f.unacked", "if f.unacked"}},
		ownership + "TestAcknowledged$", "confirmed without the backup",
	},
	{
		"ownership: the term of a superseded holder is forgotten", follow,
		[]edit{{"\t\t\tif pt.known.Less(a.Known) {\n\t\t\t\tpt.known = a.Known\n\t\t\t}\n", ""}},
		ownership + "TestSupersededHolder$", "of b: held at",
	},
	{
		"ownership: a superseded holder goes on though the other lives", follow,
		[]edit{{"pt.term.Less(pt.known) && (!c.lives(a.Holder) || a.Holder == c.cfg.Self) {", "pt.term.Less(pt.known) {"}},
		ownership + "TestSupersededHolder$", "of y: held at",
	},
	{
		"ownership: a superseded holder does not go on after itself", follow,
		[]edit{{"(!c.lives(a.Holder) || a.Holder == c.cfg.Self) {", "!c.lives(a.Holder) {"}},
		ownership + "TestSupersededHolder$", "of m: held at",
	},
	{
		"ownership: a gap in the backup's copy ends a hand-over", follow,
		[]edit{{"if pt.move != nil && pt.move.commit != nil {\n\t\tc.dropFollower", "if false {\n\t\tc.dropFollower"}},
		ownership + "TestFrozen$", "a gap in the backup's copy",
	},
	{
		"ownership: the message in flight confirms what is decided until it is", follow,
		[]edit{{"done.Sequence > closed.sequence {", "done.Sequence >= closed.sequence {"}},
		ownership + "TestAnotherBackup$", "the backup was told to forget before it had everything",
	},
	{
		"ownership: answers do not wait for a new backup", follow,
		[]edit{{"\t\t\tc.data.Unguarded(p, false)\n\t\t\tpt.strict.unguarded = false\n", "\t\t\tpt.strict.unguarded = false\n"}},
		ownership + "TestUnheardBackup$", "late true: answers do not wait while two voters may have recorded a backup",
	},
	{
		"ownership: answers wait for a backup that was lost again", follow,
		[]edit{{"\t\t\tc.data.Unguarded(p, false)\n\t\t\tpt.strict.unguarded = false\n", "\t\t\tc.data.Unguarded(p, false)\n"}},
		ownership + "TestLostBackup$", "s, and answers wait: true, when the voters have recorded that there is no backup",
	},
	{
		"ownership: the first piece of a chunk confirms it", follow,
		[]edit{{"\tif len(f.rest) > 0 {\n\t\tc.sendRest(p, s)\n\t\treturn\n\t}\n", "\tif len(f.rest) > 0 {\n\t\tc.sendRest(p, s)\n\t}\n"}},
		ownership + "TestLargeChunk$", "confirmed before message",
	},
	{
		"ownership: what is confirmed while strict rules are closed does not count", follow,
		[]edit{{" || s.closed != nil && s.closed.until > c.t", ""}},
		ownership + "TestAnotherBackup$", "what the backup has is not confirmed",
	},
	{
		"ownership: what is confirmed after the lease that strict rules were closed under counts", follow,
		[]edit{{"s.closed != nil && s.closed.until > c.t", "s.closed != nil"}},
		ownership + "TestLateConfirmation$", "after the lease's end: true",
	},
	{
		"ownership: a copy on its way is forgotten", follow,
		[]edit{{" && pt.incoming.from == (Node{}) {\n\t\tc.endIncoming(f.Partition)", " {\n\t\tc.endIncoming(f.Partition)"}},
		ownership + "TestArriving$", "a copy that is on its way to become the partition is forgotten",
	},
	{
		"ownership: a process that has room again is spared", follow,
		[]edit{{"delete(c.full, f.node)", "_ = c.full"}},
		ownership + "TestNoRoom$", "when there is room",
	},
	{
		"ownership: a backup that has confirmed everything is waited for", follow,
		[]edit{{"\tif pt.strict.closed != nil {\n\t\tc.wantBackup(p)\n\t}\n", ""}},
		ownership + "TestAnotherBackup$", "no *ownership.Replicate was sent to x",
	},
	{
		"ownership: a partition on its way is asked after", claim,
		[]edit{{"c.view.Settled && !c.view.Leaving && pt.incoming.from == (Node{}) && c.t", "c.view.Settled && !c.view.Leaving && c.t"}},
		ownership + "TestArriving$", "a partition that is on its way is asked after",
	},
	{
		"ownership: who is lost is waited for", claim,
		[]edit{{"\t\t\tif !c.lives(n) {\n\t\t\t\tdelete(r.missing, n)", "\t\t\tif false {\n\t\t\t\tdelete(r.missing, n)"}},
		ownership + "TestClaimFrom$", "owned: false, want true",
	},
	{
		"ownership: a holder tells another's term as its own", claim,
		[]edit{{"info.Held, info.Term, info.Holder = true, pt.term, c.cfg.Self", "info.Held, info.Holder = true, c.cfg.Self"}},
		ownership + "TestToldOfHolder$", "Name:m Boot",
	},
	{
		"ownership: an answer to another question counts", claim,
		[]edit{{"r == nil || q.ID != r.id || !r.missing[from]", "r == nil || !r.missing[from]"}},
		ownership + "TestClaimFrom$", "owned: true, want false",
	},
	{
		"ownership: what another is to have meanwhile is claimed", claim,
		[]edit{{"\t\tif c.mayClaim(p) {\n\t\t\tc.decideClaim", "\t\tif !c.parts[p].held {\n\t\t\tc.decideClaim"}},
		ownership + "TestClaimFrom$", "owned: true, want false",
	},
	{
		"ownership: of two holders the lower term counts", claim,
		[]edit{{"held == nil || held.Term.Less(info.Term)", "held == nil || info.Term.Less(held.Term)"}},
		ownership + "TestClaimFrom$", "held by two, it is asked at",
	},
	{
		"ownership: a lost process is entrusted", claim,
		[]edit{{"best.before(info.Copy) && c.lives(source)", "best.before(info.Copy)"}},
		ownership + "TestClaimFrom$", "owned: false, want true",
	},
	{
		"ownership: a copy of an earlier term is the newer one", claim,
		[]edit{{"\tif a.Term != b.Term {\n\t\treturn a.Term.Less(b.Term)\n\t}\n", ""}},
		ownership + "TestClaimFrom$", "owned: true, want false",
	},
	{
		"ownership: the older copy is the newer one", claim,
		[]edit{{"return a.Sequence < b.Sequence", "return a.Sequence > b.Sequence"}},
		ownership + "TestClaimFrom$", "owned: true, want false",
	},
	{
		"ownership: who is entrusted late claims", claim,
		[]edit{{"\tif e.Term.Less(pt.known) {\n\t\treturn", "\tif false {\n\t\treturn"}},
		ownership + "TestEntrusted$", "owned: true, want false",
	},
	{
		"ownership: the term of what is entrusted is forgotten", claim,
		[]edit{{"\tc.learn(e.Partition, e.Term, Node{})\n", ""}},
		ownership + "TestEntrusted$", "claimed at",
	},
	{
		"ownership: what is on its way is claimed", claim,
		[]edit{{"(c.view.Settled || c.view.Leaving) && pt.incoming.from == (Node{}) {", "(c.view.Settled || c.view.Leaving) {"}},
		ownership + "TestEntrusted$", "owned: true, want false",
	},
	{
		"ownership: an old copy is fresh", claim,
		[]edit{{"again || pt.copy != (Position{}) && !pt.copy.Term.Less(pt.known)", "again || pt.copy != (Position{})"}},
		ownership + "TestClaimWithout$", "an old copy: starts full: false, and has map",
	},
	{
		"ownership: part of a copy is claimed", claim,
		[]edit{{"\t\tc.data.Discard(p) // what is left of", "\t\t_ = c.data // what is left of"}},
		ownership + "TestClaimWithout$", "part of a copy: starts full: true, and has map",
	},
	{
		"ownership: who does not answer is waited for without end", claim,
		[]edit{{"len(r.missing) == 0 || c.awake-r.begun > patience", "len(r.missing) == 0"}},
		ownership + "TestClaimFrom$", "owned: false, want true",
	},
	{
		"ownership: a lost holder is asked", core,
		[]edit{{"pt.holder != c.cfg.Self && c.lives(pt.holder) &&\n", "pt.holder != c.cfg.Self &&\n"}},
		ownership + "TestClaimFrom$", "whose holder is lost, and that is this node's, it is",
	},
	{
		"ownership: a holder tells of a copy", core,
		[]edit{{"\tpt.copy, pt.copyFrom = Position{}, Node{}\n\tpt.strict.since", "\tpt.strict.since"}},
		ownership + "TestClaimFrom$", "an earlier term: who holds it tells of a copy",
	},
	{
		"ownership: a lease outlives its term", core,
		[]edit{{"\tc.data.Lease(p, 0)\n}", "\t_ = c.data\n}"}},
		ownership + "TestRaisedAgain$", "under a higher term: a lease for",
	},
	{
		"ownership: a backup stays named under a higher term", core,
		[]edit{{"pt.followers[s].relabel, pt.followers[s].named, pt.followers[s].clean = true, false, false", "pt.followers[s].relabel, pt.followers[s].clean = true, false"}},
		ownership + "TestRaisedAgain$", "under a higher term: a lease for -",
	},
	{
		"ownership: a message of an earlier term has a backup named", core,
		[]edit{{"pt.followers[s].relabel, pt.followers[s].named, pt.followers[s].clean = true, false, false", "pt.followers[s].relabel, pt.followers[s].named = true, false"}},
		ownership + "TestRaisedAgain$", "under a higher term: a lease for -",
	},
	{
		"store: an escrow is sized by the largest limit", "store/escrow.go",
		[]edit{{"least := algo.MaxLimit", "least := int64(0)"}, {"least = min(least, l.Limit)", "least = max(least, l.Limit)"}},
		"./store -run TestAllowance$", "were admitted ahead, want 10",
	},
	{
		"store: a record that is gone leaves its allowance with the holder", "store/store.go",
		[]edit{{"				sh.endAdvance(part, r.hash(), r.id())\n", ""}},
		"./store -run TestAllowanceOfGone", "more are by who takes over",
	},
	{
		"store: a reset leaves the allowance with the holder", "store/decide.go",
		[]edit{{"			sh.endAdvance(part, k.Hash, of)\n", ""}},
		"./store -run TestAllowanceOfReset", "more are by who takes over",
	},
	{
		"store: a record that is gone leaves its allowance with the copy", "store/escrow.go",
		[]edit{{"		f.keys.push(turn{hash: hash}, &sh.budget)\n", ""}},
		"./store -run TestGivenBackWithRecord", "nothing is pending",
	},
	{
		"store: a merge keeps strict ids that nobody was answered", "store/merge.go",
		[]edit{{"	add.forgetUnshared(m.strict, base)\n", ""}},
		"./store -run TestMergeForgetsStrictIDs", "units in use after the repetitions",
	},
	{
		"store: a merge drops request ids", "store/merge.go",
		[]edit{{"	base.unite(add, m.now.Mono, m.sh.store.answerBounds(), &m.sh.budget)\n", ""}},
		"./store -run TestMergeRequestIDs", "want it to be known",
	},
	{
		"gateway/grpc: a panic in a stream that has ended for its caller passes unnoticed", "gateway/grpc/unread.go",
		[]edit{{"		case <-gone:\n			s.endedLate(info.FullMethod, err)\n", "		case <-gone:\n"}},
		"./gateway/grpc -run TestPanicsBesideHandlers", "0 panics are told, want 1",
	},
	{
		"gateway/grpc: a panic while a loan's answer waits for a copy is told only to a borrower that reports again", "gateway/grpc/borrow.go",
		[]edit{{"			ended = crashed // however the stream has ended\n", "			_ = crashed\n"}},
		"./gateway/grpc -run TestPanicsBesideHandlers", "0 panics are told, want 1",
	},
	{
		"algo: a sliding counter that is filled forgets its windows", "algo/charge.go",
		[]edit{{"			c.meet(t, start) //", "			_, _ = c, start //"}},
		"./algo -run TestFillKeepsWindows", "in use",
	},
	{
		"store: a copy knows of no reservations", "store/apply.go",
		[]edit{{"		side.reservations.put(of, e, algo.Hold{}, b)", "		_ = of"}},
		seeds + "moving", "a reservation forgotten",
	},
	{
		"store: a copy keeps a reservation that is over for the holder", "store/apply.go",
		[]edit{{"	for range others {\n		all.remove(p, len(p.list)-1, &a.sh.budget)\n	}\n", ""}},
		"./store -run TestReservationEndsWithHolders", "cancelled after its end",
	},
	{
		"store: a reservation gives back units of a state that was converted", "store/shard.go",
		[]edit{{"		part.lose(sh.record(part.ref(slot)))\n", ""}},
		"./store -run TestUndoAcrossStores", "Returned",
	},
	{
		"store: a bucket's low is not lowered before a charge", "store/reservation.go",
		[]edit{{"		limits.Lower(state, now, p.holds)\n", "		_ = p\n"}},
		"./store -run TestUndoAcrossStores", "has room for",
	},
	{
		"algo: a bucket gives back more than it has owed since", "algo/hold.go",
		[]edit{{"low := hs[i].marks[k].owed(l); low.less(back)", "low := hs[i].marks[k].owed(l); low.less(back) && i == 0"}},
		"./algo -run TestGiveBack", "panic",
	},
	{
		"algo: a hold that ends takes its low along", "algo/hold.go",
		[]edit{{"				before.marks[k].lower(m.n, m.rest)\n", "				_, _ = k, before\n"}},
		"./algo -run TestGiveBack", "are in use of",
	},
	{
		"store: a commit gives back all", "store/decide.go",
		[]edit{{"held.holds, i, n, part", "held.holds, i, held.list[i].units, part"}},
		seeds + "fair", "admitted beyond the limit",
	},
	{
		"store: a cancel leaves a unit behind", "store/decide.go",
		[]edit{{"held.holds, i, n, part", "held.holds, i, max(n-1, 0), part"}},
		seeds + "fair", "refused without need",
	},
	{
		"algo: a renewal does not prolong a lease", "algo/concurrency.go",
		[]edit{{"c.setExpiry(a, s, slot, now.Mono+int64(ttl))", "_ = slot"}},
		seeds + "fair", "admitted beyond the limit",
	},
	{
		"store: a release keeps the lease", "store/decide.go",
		[]edit{{"			ok = rule.Limits.Release(sh.arena, r.state, now, lease)\n", "			ok = r.has(^uint64(0)) || true\n"}},
		seeds + "fair", "refused without need",
	},
	{
		"store: versions begin anew with another content", "store/content.go",
		[]edit{{"		role.floor = max(role.floor, part.extras.version)\n", "		_ = role\n"}},
		"./store -run TestVersionsRise", "after a ticket of",
	},
	{
		"store: the last chunk of a partition that is shut keeps allowances", "store/chunk.go",
		[]edit{{"		d.spent()\n", ""}},
		"./store -run TestAllowanceAtShut", "are left of 100 after 12",
	},
	{
		"limiter: late strict answers are used", "limiter/route.go",
		[]edit{{"op.Outcome.until != 0 && end.bootTime() >= op.Outcome.until", "false"}},
		"./limiter -run TestAnswersUnderLease", "1.001s back",
	},
	{
		"limiter: a lease is not shortened by the error of clocks", "limiter/route.go",
		[]edit{{"sent + int64(limit.Shortened(out.Lease))", "sent + int64(out.Lease)"}},
		"./limiter -run TestAnswersUnderLease", "999ms back",
	},
	{
		"limiter: a lease counts from receipt", "limiter/route.go",
		[]edit{{"sent + int64(limit.Shortened(out.Lease))", "l.cfg.BootClock() + int64(limit.Shortened(out.Lease)) + sent*0"}},
		"./limiter -run TestAnswersUnderLease", "300ms back",
	},
	{
		"limiter: what gives back does not forget the refusal", "limiter/route.go",
		[]edit{{"		l.refusals.Forget(op.hash) // whatever", "		// whatever"}},
		"./limiter -run TestARefusalInFlightIsForgotten", "was remembered",
	},
	{
		"limiter: a peer is told nothing of leases", "limiter/route.go",
		[]edit{{"if out := &op.Outcome; out.until != 0 {", "if out := &op.Outcome; false {"}},
		"./limiter -run TestAnswersUnderLease", "300ms back",
	},
	{
		"refusal: a refusal answers larger costs", "internal/refusal/refusal.go",
		[]edit{{"e.hash == hash && e.Cost == cost && e.key == k {", "e.hash == hash && e.Cost <= cost && e.key == k {"}},
		calls + "calmly", "although it was to pass",
	},
	{
		"refusal: a refusal answers after its end", "internal/refusal/refusal.go",
		[]edit{{"		if now < e.Until {", "		if now < e.Until+20_000_000 {"}},
		calls + "calmly", "although it was to pass",
	},
	{
		"refusal: an answer on its way is remembered although units came back", "internal/refusal/refusal.go",
		[]edit{{"	s.mark++\n", ""}},
		calls + "calmly", "came back through it",
	},
	{
		"limiter: a charge does not forget what was refused more", "limiter/refusals.go",
		[]edit{{"		l.refusals.Admitted(op.hash)\n		return", "		return"}},
		calls + "calmly", "although it was to pass",
	},
	{
		"limiter: a refusal is remembered from its arrival", "limiter/refusals.go",
		[]edit{{"Until: op.asked.sent + int64(limit.Remembered(d.RememberFor)),", "Until: l.clock().Mono + int64(limit.Remembered(d.RememberFor)),"}},
		calls + "calmly", "refused without need",
	},
	{
		"limiter: nobody is waited for where nobody can be asked", "limiter/loan.go",
		[]edit{{"	if len(r.asked) == 0 && len(r.unasked) == 0 {", "	if len(r.asked) == 0 {"}},
		"./limiter -run TestBorrowerComesToARecall", "late false: refused before all on loan was asked for",
	},
	{
		"limiter: who was away is taken for silent when he is back", "limiter/loan.go",
		[]edit{{"	maps.DeleteFunc(all.silent, func(loan algo.LoanID, _ int64) bool { return loan.Borrower == id })\n", "	_ = maps.DeleteFunc[map[int]int]\n"}},
		"./limiter -run TestBorrowerComesToARecall", "late true: refused before all on loan was asked for",
	},
	{
		"limiter: units of a Quota are waited for", "limiter/loan.go",
		[]edit{{"len(to) == 0 && loan.Wants == 0 {", "len(to) == 0 {"}},
		"./limiter -run TestQuotaIsNotRecalled", "after 50ms",
	},
	{
		"limiter: a recall ends with the time of one caller", "limiter/loan.go",
		[]edit{{"			case <-ctx.Done():\n				over = true\n", "			case <-ctx.Done():\n				over = true\n				l.loans.giveUp(w.of, w.round, l.clock().Mono)\n"}},
		"./limiter -run TestHastyCaller", "alone false: refused before all on loan was asked for",
	},
	{
		"limiter: a recall that begins late ends with the time of who began it", "limiter/loan.go",
		[]edit{{"			case <-late.C:\n				over = true\n", "			case <-late.C:\n				over = true\n				l.loans.giveUp(w.of, w.round, l.clock().Mono)\n"}},
		"./limiter -run TestALaterRecall", "refused before all on loan was asked for",
	},
	{
		"limiter: a recall that nobody waits for goes on", "limiter/loan.go",
		[]edit{{"time.AfterFunc(recallMost,", "time.AfterFunc(time.Hour,"}},
		"./limiter -run TestHastyCaller", "a recall that nobody waits for goes on",
	},
	{
		"limiter: who was away is waited for each time", "limiter/loan.go",
		[]edit{{"	for i := range r.unasked {\n		ls.silent[r.unasked[i].ID] = now + int64(silentFor)\n	}\n", ""}},
		"./limiter -run TestBorrowerComesToARecall", "check 1 waits for 50ms",
	},
	{
		"limiter: a part of a limit is all of it", "limiter/part.go",
		[]edit{{"	own := divided(limits, n)", "	own := divided(limits, 1)"}},
		calls + "losing", "by its part: admitted beyond the limit",
	},
	{
		"limiter: what a part has admitted is forgotten", "limiter/part.go",
		[]edit{{"	if known.limits.Idle(p.arena, known.state, now) {\n		known.limits.Free(p.arena, known.state)\n		delete(p.states, k)\n	}\n	if err", "	known.limits.Free(p.arena, known.state)\n	delete(p.states, k)\n	if err"}},
		calls + "losing", "by its part: admitted beyond the limit",
	},
	{
		"runner: messages are posted before routes and confirmations", "cluster/runner/runner.go",
		[]edit{{"	out := k.core.Take()\n", "	out := k.core.Take()\n	if len(out.Messages) > 0 {\n		k.cfg.Sender.Send(out.Messages)\n		out.Messages = nil\n	}\n"}},
		"./cluster/runner -run TestMessagesComeLast", "route and confirmation are published: false",
	},
	{
		"runner: a core that is behind waits for a tick", "cluster/runner/runner.go",
		[]edit{{"	due := k.core.Behind()\n", "	due := false\n"}},
		"./cluster/runner -run TestBehind", "is not told that time passes",
	},
	{
		"runner: a tick comes before what has arrived", "cluster/runner/runner.go",
		[]edit{{"	k.turn()\n	if due {\n		k.tick()\n	}\n", "	if due {\n		k.tick()\n	}\n	k.turn()\n"}},
		"./cluster/runner -run TestMailComesBeforeTicks", "was received after [1] ticks",
	},
	{
		"runner: messages are received before views", "cluster/runner/runner.go",
		[]edit{{"	if view == nil && leaving && k.viewed", "	for _, e := range k.batch {\n		k.core.Receive(k.now(), e)\n		k.carryOut()\n	}\n	k.batch = k.batch[:0]\n	if view == nil && leaving && k.viewed"}},
		"./cluster/runner -run TestViewsComeFirst", "received in the order [message view]",
	},
	{
		"node: the backups are the owners", "internal/node/ownership.go",
		[]edit{{"fill(out.Backups, backups, at)", "fill(out.Backups, v.Ring, at)"}},
		"./internal/node -run TestOwnershipView", "is the owner where a is not",
	},
	{
		"node: the core is not told that it leaves", "internal/node/ownership.go",
		[]edit{{"v.Self.State == cluster.Leaving", "false"}},
		"./internal/node -run TestOwnershipView", "a node that leaves: false",
	},
	{
		"limiter: nobody waits for the last instants of a hand-over", "limiter/route.go",
		[]edit{{"context.WithTimeout(ctx, frozenMost)", "context.WithTimeout(ctx, 0)"}},
		"./limiter -run TestNobodyDecides", "after 0s",
	},
	{
		"node: leases are counted on the clock of decisions", "internal/node/ownership.go",
		[]edit{{"	return limiter.ProcessClock(), runner.BootTime\n", "	clock := limiter.ProcessClock()\n	_ = runner.BootTime\n	return clock, func() int64 { return clock().Mono }\n"}},
		"./internal/node -run TestClocks", "the clock of leases reads",
	},
	{
		"node: views are settled at once", "internal/node/ownership.go",
		[]edit{{"set(ownershipView(v, backups, false))", "set(ownershipView(v, backups, true))"}},
		"./internal/node -run TestSteer", "as settled",
	},
	{
		"node: other policies of a member unsettle the view", "internal/node/ownership.go",
		[]edit{{"return a.Self.State == b.Self.State &&", "return a == b &&"}},
		"./internal/node -run TestSteerThroughReloads", "after another reload",
	},
	{
		"node: views of a node that is not active settle", "internal/node/ownership.go",
		[]edit{{"v.Self.State == cluster.Active))", "true))"}},
		"./internal/node -run TestSteer", "joining: then",
	},
	{
		"node: a voter is ready before it votes", "internal/node/node.go",
		[]edit{{"return !ok || st.Voting || present", "return !ok || st.Voting || true || present"}},
		"./internal/node -run TestReadyOnceVoting", "ready, and voting: false",
	},
	{
		"loan: what is on loan is free", "algo/limits.go",
		[]edit{{"return max(room-r.Held, 0)", "return room"}},
		"./algo -run TestLoans$", "are more than the limit",
	},
	{
		"loan: what is on loan of a bucket is free", "algo/bucket.go",
		[]edit{{"	if r.Held > 0 {", "	if false {"}},
		"./algo -run TestLoans$", "are more than the limit",
	},
	{
		"loan: an end charges nothing", "algo/loan.go",
		[]edit{{"ls.Charge(a, s, at, n)", "ls.Charge(a, s, at, 0)"}},
		"./algo -run TestLoans$", "were admitted in one window",
	},
	{
		"loan: an end is dated at the grant", "algo/loan.go",
		[]edit{{"	at := Instant{Mono: l.Until, Wall: now.Wall - (now.Mono - l.Until)}", "	at := Instant{Mono: l.Until - owned(LoanTerm), Wall: now.Wall}\n	s[0] = uint64(min(int64(s[0]), at.Mono))"}},
		"./algo -run TestLoans$", "FAIL",
	},
	{
		"loan: a report is charged before it came", "algo/loan.go",
		[]edit{{"	charged, err := ls.chargeLent(a, s, now, n)", "	charged, err := ls.chargeLent(a, s, now, 0)"}},
		"./algo -run TestLoans$", "were admitted in one window",
	},
	{
		"loan: reports are taken for what is new", "algo/loan.go",
		[]edit{{"n = max(t.Spent-had.Spent, 0)", "n = t.Spent"}},
		"./algo -run TestLoans$", "are more than the limit",
	},
	{
		"loan: the owner's term is the borrower's", "algo/loan.go",
		[]edit{{"return int64(term) + 3*int64(term)/loanDrift", "return int64(term)"}},
		"./algo -run TestLoans$", "a borrower may spend",
	},
	{
		"loan: one that has ended is forgotten at once", "algo/loan.go",
		[]edit{{"true, at+int64(loanGrace)", "true, at"}},
		"./algo -run TestLoans$", "FAIL",
	},
	{
		"store: a chunk drops bans", "store/chunk.go",
		[]edit{{"uint64(r.banLeft(d.now))", "0"}},
		"./test/simulation -run TestBans$", "admitted during a ban",
	},
	{
		"store: a merge gives back the units of reservations of keys that both sides know", "store/merge.go",
		[]edit{{"\t\town.holds.Lose()\n", "\t\t_ = own\n"}},
		"./store -run TestMergeOfReservations$", "were given back, want 0",
	},
	{
		"algo: a joined bucket owes the smaller debt", "algo/bucket.go",
		[]edit{{"if c.owed(l, s, now).less(c.owed(l, t, now)) {", "if !c.owed(l, s, now).less(c.owed(l, t, now)) {"}},
		"./algo -run TestJoinBounds$", "after the join",
	},
	{
		"algo: a joined log is the sum of both", "algo/sliding_log.go",
		[]edit{{"before := min(x.instant(), y.instant()), max(mine, other)", "before := min(x.instant(), y.instant()), mine+other"}, {"n := before - max(mine, other)", "n := before - (mine + other)"}},
		"./algo -run TestJoinLattice$", "not idempotent",
	},
	{
		"algo: a joined fixed window ends with the earlier one", "algo/fixed_window.go",
		[]edit{{"uint64(max(int64(s[0]), int64(t[0]))), max(s[1], t[1])", "uint64(min(int64(s[0]), int64(t[0]))), max(s[1], t[1])"}},
		"./algo -run TestJoinWindows$", "want the larger count",
	},
	{
		"store: a merge drops bans", "store/merge.go",
		[]edit{{"return m.ban(slot, r)", "return nil"}},
		"./store -run TestBanMerged", "FAIL",
	},
	{
		"store: a ban begins beside loans", "store/ban.go",
		[]edit{{"|| request.Held > 0 ", ""}},
		"./store -run TestBanBesideLoans", "before what is on loan is back",
	},
	{
		"store: a ban is swept", "store/store.go",
		[]edit{{"|| r.banLeft(now) > 0 ", ""}},
		"./store -run TestBan$", "FAIL",
	},
	{
		"loan: copies know of none", "store/chunk.go",
		[]edit{{"	if l := d.part.lentOf(r); l != nil {", "	if l := d.part.lentOf(r); l != nil && false {"}},
		"./store -run TestLoanMoves", "FAIL",
	},
	{
		"loan: copies know of none, in the simulator", "store/chunk.go",
		[]edit{{"	if l := d.part.lentOf(r); l != nil {", "	if l := d.part.lentOf(r); l != nil && false {"}},
		loans, "admitted beyond the limit",
	},
	{
		"loan: copies drop what they are told of them", "store/apply.go",
		[]edit{{"	l.Loans = loans\n", "	_ = loans\n"}},
		loans, "admitted beyond the limit",
	},
	{
		"loan: who takes over a partition forgets them", "store/content.go",
		[]edit{{"func (s *Store) TakeOver(p int, now algo.Instant) {\n", "func (s *Store) TakeOver(p int, now algo.Instant) {\n	s.with(p, func(sh *shard, part *partition) {\n		if part.extras != nil {\n			for of := range part.extras.lent {\n				part.dropLent(of, &sh.budget)\n			}\n		}\n	})\n"}},
		loans, "admitted beyond the limit",
	},
	{
		"loan: what is on loan is free, in the simulator", "algo/limits.go",
		[]edit{{"return max(room-r.Held, 0)", "return room"}},
		loans, "units in use and held beyond the limit",
	},
	{
		"loan: what is on loan when a window turns is free in the next one", "algo/limits.go",
		[]edit{{"		rooms[i] = r.spare(c.room(l, a, t, now))\n", "		rooms[i] = r.spare(c.room(l, a, t, now))\n		if l.Algorithm == FixedWindow && t[1] == 0 {\n			rooms[i] = l.Limit\n		}\n"}},
		"./algo -run TestLoans$/fixed_window", "are more than the limit",
	},
	{
		"loan: the owner's term counts from before the report", "algo/loan.go",
		[]edit{{"	l.Until = max(l.Until, now.Mono+owned(term))\n	answer", "	l.Until = max(l.Until, now.Mono+owned(term)-int64(term)/2)\n	answer"}},
		loans, "units on loan that their owner does not hold",
	},
	{
		"loan: an older report undoes a newer", "algo/loan.go",
		[]edit{{"	return Totals{max(t.Granted, v.Granted), max(t.Spent, v.Spent), max(t.Returned, v.Returned), max(t.Checks, v.Checks)}", "	return Totals{max(t.Granted, v.Granted), v.Spent, v.Returned, v.Checks}"}},
		loans, "totals of a loan that fell",
	},
	{
		"loan: more is returned than there was", "algo/loan.go",
		[]edit{{"	more.Totals = had.unite(t)\n", "	more.Totals = had.unite(t)\n	more.Returned += t.Returned / 2\n"}},
		loans, "totals of a loan that fell",
	},
	{
		"loan: refused without recall", service,
		[]edit{{"	if dec.OnLoan > 0 && !a.recalled {", "	if false {"}},
		loans, "refused before all on loan was asked for",
	},
	{
		"loan: a refusal does not say that units are on loan", "store/loan.go",
		[]edit{{"	return request.Held, request.HeldFor\n", "	return 0, 0\n"}},
		loans, "refused before all on loan was asked for",
	},
	{
		"loan: they end late", "algo/loan.go",
		[]edit{{"l.Until <= now.Mono && !l.Ended &&", "l.Until+int64(loanGrace) <= now.Mono && !l.Ended &&"}},
		loans, "on loan after the load",
	},
	{
		"loan: what a bucket has on loan is repaid", "algo/bucket.go",
		[]edit{{"		full = mul(max(capacity-r.Held, 0), window)", "		full = mul(max(capacity-r.Held/2, 0), window)"}},
		"./algo -run TestLoans$/token_bucket", "FAIL",
	},
	{
		"loan: a merge forgets those of one side", "store/merge.go",
		[]edit{{"	m.uniteLent()\n", ""}},
		"./store -run TestLoansMerge", "FAIL",
	},
	{
		"loan: the borrower has it before the copy", "store/loan.go",
		[]edit{{"	if a.Term > 0 && rule.Durability >= Escrow {", "	if false {"}},
		"./store -run TestLoanCrash", "were admitted in a window",
	},
	{
		"loan: it is renewed before the copy knows", "store/loan.go",
		[]edit{{"	if a.Term > 0 && rule.Durability >= Escrow {", "	if a.Term > 0 && rule.Durability >= Escrow && a.Granted != before.Granted {"}},
		"./store -run TestLendOnlyWhatIsCopied", "renewed before the copy knows",
	},
	{
		"loan: nobody is asked before a refusal", "limiter/decide.go",
		[]edit{{"	if got.OnLoan > 0 && !op.recalled {", "	if false {"}},
		"./limiter -run TestRecallBeforeRefusal", "13 of 16 on loan are back",
	},
	{
		"loan: nobody is asked before a refusal, of whole nodes", "limiter/decide.go",
		[]edit{{"	if got.OnLoan > 0 && !op.recalled {", "	if false {"}},
		calls + "calmly", "refused without need",
	},
	{
		"loan: a borrower keeps what it gives back", "internal/borrow/borrow.go",
		[]edit{{"max(l.left.Swap(0), 0)", "max(l.left.Load(), 0)"}},
		calls + "calmly", "FAIL",
	},
	{
		"loan: the borrower's deadline counts from the answer", "internal/borrow/borrow.go",
		[]edit{{"sent+int64(a.Term), now)", "now+int64(a.Term), now)"}},
		"./internal/borrow -run TestDeadline", "at 501",
	},
	{
		"loan: the clock is read before units are taken", "internal/borrow/borrow.go",
		[]edit{{"	if left, ok = l.take(n); !ok {\n		return nil, 0, false\n	}\n	if now() >= l", "	at := now()\n	if left, ok = l.take(n); !ok {\n		return nil, 0, false\n	}\n	if at >= l"}},
		"./internal/borrow -run TestClockIsReadLast$", "admitted at the end of the loan",
	},
	{
		"loan: what was reported spent is taken for confirmed", "internal/borrow/borrow.go",
		[]edit{{"max(l.known, min(a.Spent, l.granted-l.returned))", "max(l.known, l.said.Spent)"}},
		"./internal/borrow -run TestKnownIsWhatAnswersConfirm$", "Known:7",
	},
	{
		"loan: a loan that is long over keeps its number", "internal/borrow/borrow.go",
		[]edit{{"if l.granted > 0 && now >= l.ends+int64(algo.LoanTerm) {", "if false {"}},
		"./internal/borrow -run TestLoanLongOver$", "after the end",
	},
	{
		"loan: a borrower takes more than it has asked for", "internal/borrow/borrow.go",
		[]edit{{"taken := min(more, l.asked)", "taken := more"}},
		"./limiter -run TestBorrowingInANodesName$", "were admitted of 2000",
	},
	{
		"loan: a caller borrows under any id", "gateway/grpc/borrow.go",
		[]edit{{"in.Borrower, s.borrowerOf(stream.Context(), in.Borrower)", "in.Borrower, in.Borrower"}},
		"./gateway/grpc -run TestBorrowersAreTheirCallersOwn$", "and reports as",
	},
	{
		"loan: a node that stops returns nothing", "limiter/borrow.go",
		[]edit{{"	b.book.Return(ctx)\n", ""}},
		"./limiter -run TestNodeBorrows", "are on loan after the node has stopped",
	},
	{
		"loan: what a node admits is counted by the owner as well", "limiter/loan.go",
		[]edit{{"	if !b.Counted {", "	if true {"}},
		"./limiter -run TestLoanDecisionsAreCounted", "decisions were counted",
	},
	{
		"limiter: the delay of an atomic check is that of its last part", "limiter/atomic.go",
		[]edit{{"out.Delay = max(out.Delay, d.Delay)", "out.Delay = d.Delay"}},
		"./limiter -run TestAtomicDelayIsTheLargest$", "the other way round",
	},
	{
		"limiter: work that cost nothing is learned of", "limiter/reserve.go",
		[]edit{{"if cost > 0 { // what costs", "if cost >= 0 { // what costs"}},
		"./limiter -run TestPricesAndEstimates$", "learned of work that cost nothing",
	},
	{
		"limiter: a check behind one of the operator's is taken for one", "limiter/batch.go",
		[]edit{{"c.Namespace != before.Namespace || c.Configured != before.Configured ||", "c.Namespace != before.Namespace ||"}},
		"./limiter -run TestReservedNamespaces$", "checks[1].namespace",
	},
	{
		"limiter: parts are swept for each key that finds no room", "limiter/part.go",
		[]edit{{"\tp.swept = now.Mono\n", ""}},
		"./limiter -run TestPartsAreBounded$", "looked at twice in a second",
	},
	{
		"limiter: a refusal answered from memory is remembered again", "limiter/refusals.go",
		[]edit{{"\t\top.asked = question{}\n\tcase ended", "\t\t_ = ended\n\tcase ended"}},
		"./limiter -run TestSeveralLimitsAreRememberedTogether$", "1 messages, want 0",
	},
	{
		"limiter: another's answer is waited for as long as there is time", "limiter/route.go",
		[]edit{{"context.WithTimeout(ctx, left/2)", "context.WithTimeout(ctx, left)"}},
		"./limiter -run TestWhoAsksForAllMayGetNoAnswer$", "was waited for 80ms",
	},
	{
		"limiter: what nobody waits for any more is decided", "limiter/route.go",
		[]edit{{"\t\tif l.expired(ctx, len(ops)) != nil {", "\t\tif l.expired(ctx, len(ops)) != nil && false {"}},
		"./limiter -run TestReceivedLate$", "decided when nobody waits for it",
	},
	{
		"limiter: who was turned away has others wait for the rest of its batch", "limiter/shed.go",
		[]edit{{"\t\t\tl.conclude(op, &end) // at once", "\t\t\t_ = end // at once"}},
		"./limiter -run TestTurnedAwayLeaderOfABatch$", "after 500ms",
	},
	{
		"loan: a report ends a round whatever its borrower keeps", "limiter/loan.go",
		[]edit{{"if r == nil || !returned {", "if r == nil {"}},
		"./limiter -run TestReportDuringARecall$", "asked, and unanswered",
	},
	{
		"loan: a borrower that has been heard is silent still", "limiter/loan.go",
		[]edit{{"\tdelete(ls.silent, id)\n\tr := ls.rounds[of]", "\tr := ls.rounds[of]"}},
		"./limiter -run TestSilentBorrowerIsHeard$", "one that has been heard since",
	},
	{
		"loan: two end one round", "limiter/loan.go",
		[]edit{{"\tif ls.rounds[of] != r {\n\t\treturn // it has ended\n\t}\n", "\tif ls.rounds[of] != r {\n\t\t_ = r\n\t}\n"}},
		"./limiter -run TestSilentBorrowerIsHeard$", "close of closed channel",
	},
	{
		"loan: borrowers are asked when the time for that is over", "limiter/loan.go",
		[]edit{{"w.op.Outcome, w.op.recalled = Outcome{}, over || w.round == nil", "w.op.Outcome, w.op.recalled = Outcome{}, w.round == nil"}},
		"./limiter -run TestAskedNext$", "want 1 asked",
	},
	{
		"loan: nobody is asked after the first round", "limiter/loan.go",
		[]edit{{"w.op.Outcome, w.op.recalled = Outcome{}, over || w.round == nil", "w.op.Outcome, w.op.recalled = Outcome{}, true"}},
		"./limiter -run TestAskedNext$", "want 2 asked",
	},
	{
		"loan: a strict rule lends without a lease", "limiter/loan.go",
		[]edit{{"\t\tcall.Boot = now.bootTime()\n", "\t\t_ = now\n"}},
		"./limiter -run TestLoansWaitForTheirCopy$", "with a lease until 500ms",
	},
	{
		"loan: of two ends that are known the earlier counts", "algo/loan.go",
		[]edit{{"k.Until = max(k.Until, l.Until)", "k.Until = min(k.Until, l.Until)"}},
		"./algo -run TestLoanEnds", "of both sides",
	},
	{
		"loan: more granted than known does not put off the end", "algo/loan.go",
		[]edit{{"more.Until = max(more.Until, now.Mono+owned(LoanTerm))", "_ = now"}},
		"./algo -run TestLoanEnds", "it ends a term after",
	},
	{
		"loan: units are held until the first of several ends", "algo/loan.go",
		[]edit{{"			last = max(last, l.Until)\n", "			last = l.Until\n			break\n"}},
		"./algo -run TestLoanEnds", "units are held until",
	},
	{
		"loan: what was on loan becomes leases", "algo/loan.go",
		[]edit{{"	if ls[0].Algorithm == Concurrency {\n		return 0, nil", "	if false {\n		return 0, nil"}},
		"./store -run TestLoanBecomesConcurrency", "of which nobody has one",
	},
	{
		"loan: a charge asks nobody for what is on loan", "store/decide.go",
		[]edit{{"return (c.Partial || c.Always) && c.Cost", "return c.Partial && c.Cost"}},
		"./limiter -run TestRecallBeforeCharge", "charge:",
	},
	{
		"loan: a commit asks nobody for what is on loan", "limiter/reserve.go",
		[]edit{{"Whole: !op.recalled,", ""}},
		"./limiter -run TestRecallBeforeCharge", "commit:",
	},
	{
		"loan: a strict loan outlives the grant that it was made under", "store/loan.go",
		[]edit{{"left, quota = time.Duration(may.Until-b.Boot), algo.Quota{}", "quota = algo.Quota{}"}},
		"./test/simulation -run TestStrictLoans/cut,quota=false", "admitted beyond the limit",
	},
	{
		"loan: a strict key is divided among data planes", "store/loan.go",
		[]edit{{"left, quota = time.Duration(may.Until-b.Boot), algo.Quota{}", "left = time.Duration(may.Until - b.Boot)"}},
		"./test/simulation -run TestStrictLoans/killed,quota=true", "admitted beyond the limit",
	},
	{
		"loan: a loan under a strict rule waits as any", "limiter/loan.go",
		[]edit{{"ticket: lent.Ticket, strict: rule.Strict,", "ticket: lent.Ticket,"}},
		"./limiter -run TestLoansWaitForTheirCopy$", "0 of them under a strict rule",
	},
	{
		"loan: what no copy has confirmed is lent", "limiter/loan.go",
		[]edit{{"without: limit.Lent{Granted: b.Totals.Granted, Spent", "without: limit.Lent{Granted: lent.Granted, Spent"}},
		"./limiter -run TestLoansWaitForTheirCopy$", "a copy that does not answer: {Granted:16",
	},
	{
		"loan: units are lent where there is no copy any more", "limiter/loan.go",
		[]edit{{"degraded || !ok {\n\t\t*u.answer", "degraded && !ok || !ok {\n\t\t*u.answer"}},
		"./limiter -run TestLoansWaitForTheirCopy$", "no copy any more: {Granted:16",
	},
	{
		"loan: a loan waits for no copy", "limiter/loan.go",
		[]edit{{"\tif lent.Ticket != 0 {\n", "\tif false {\n"}},
		"./limiter -run TestLoansWaitForTheirCopy$", "0 waited",
	},
	{
		"loan: units are lent while those on loan are called back", "limiter/loan.go",
		[]edit{{"else if l.loans.recalling(state{rule.Scope, b.Key}) {", "else if false {"}},
		"./limiter -run TestLentAfterRecall$", "while somebody is about to decide",
	},
	{
		"loan: what a node has admitted is counted again when it is recalled", "limiter/borrow.go",
		[]edit{{"loans[i].ID, 0, true\n", "loans[i].ID, 0, false\n"}},
		"./limiter -run TestNodeIsRecalled$", "checks are counted",
	},
	{
		"loan: exchanges with a node are not bounded", "limiter/borrow.go",
		[]edit{{"\t\tif under >= maxExchanges {", "\t\tif false {"}},
		"./limiter -run TestReportsToANodeThatIsCutOff$", "exchanges were under way at once",
	},
	{
		"loan: a loan whose holder cannot be reached is given up", "limiter/borrow.go",
		[]edit{{"\t\tcase out.Unreachable:\n\t\t\tlent.Unheard = true\n", ""}},
		"./limiter -run TestReportsToANodeThatIsCutOff$", "nothing is left of what is on loan",
	},
	{
		"loan: a holder of old is told of a loan", "limiter/borrow.go",
		[]edit{{"h.Node.Name != \"\" && !h.Term.Less(r.to.route.Term) {", "h.Node.Name != \"\" {"}},
		"./limiter -run TestOldHoldersAreNotBelieved$", "of a holder under term 4",
	},
	{
		"loan: a holder lends to itself", "limiter/borrow.go",
		[]edit{{"\t\t\top.Loan.Report.Want = 0\n\t\t\tl.decide", "\t\t\tl.decide"}},
		"./limiter -run TestLoanedPartitionMoves$", "on loan to who decides",
	},
	{
		"node: one of three voters waits until it votes", "internal/node/node.go",
		[]edit{{"st.Voting || present <= len(n.cfg.Voters)/2", "st.Voting || present < len(n.cfg.Voters)/2"}},
		"./internal/node -run TestReadyOnceVoting$", "one of three has nothing to wait for",
	},
	{
		"node: who is no voter waits until it votes", "internal/node/node.go",
		[]edit{{" || !slices.Contains(n.cfg.Voters, n.cfg.Name) {", " {"}},
		"./internal/node -run TestReadyOnceVoting$", "one that is no voter has nothing to wait for",
	},
	{
		"node: members that do not answer are in step", "internal/node/node.go",
		[]edit{{"if answer.response == nil || answer.response.Ring != want {", "if answer.response != nil && answer.response.Ring != want {"}},
		"./internal/node -run TestInStep$", "in step with a member that is not there",
	},
	{
		"node: a node is in step by a ring of old", "internal/node/node.go",
		[]edit{{"return n.view().Ring.Fingerprint() == want", "return true"}},
		"./internal/node -run TestInStep$", "in step by a ring",
	},
	{
		"node: a process is the one that has come back under its name", "internal/node/node.go",
		[]edit{{"m != nil && m.Boot == p.Boot {", "m != nil {"}},
		"./internal/node -run TestProcess$", "{b 1}",
	},
	{
		"node: members that are no part of the ring share its partitions", "internal/node/node.go",
		[]edit{{"max(len(v.Ring.Members()), 1)", "max(len(v.Members), 1)"}},
		"./internal/node -run TestReadyOnceVoting$", "nodes share the partitions",
	},
	{
		"node: who stops is not told that not all was handed over", "internal/node/node.go",
		[]edit{{"\t\terr = errors.Join(err, n.handOver(ctx))\n", "\t\t_ = n.handOver(ctx)\n"}},
		"./internal/node -run TestReadyOnceVoting$", "stopped at once",
	},
	{
		"cluster: a process is said to be at this one's endpoint", "cluster/verifier.go",
		[]edit{{"\tcase c.addr == v.self.addr || c.endpoint() == v.self.endpoint():", "\tcase c.addr == v.self.addr:"}},
		"./cluster -run TestVerifier$", "where this process is",
	},
	{
		"cluster: two members are at one endpoint", "cluster/verifier.go",
		[]edit{{"(m.endpoint() == c.endpoint() || m.name", "(m.name"}},
		"./cluster -run TestVerifierSuccessors$", "two are at one endpoint",
	},
	{
		"cluster: a member on other ports finds no room", "cluster/verifier.go",
		[]edit{{"v.members[c.identity] == nil && v.live >= v.max-1", "v.live >= v.max-1"}},
		"./cluster -run TestVerifierSuccessors$", "among as many as there may be",
	},
	{
		"cluster: another process in a member's place is asked again", "cluster/verifier.go",
		[]edit{{"(what == mistaken || k.failures >= maxFailures)", "k.failures >= maxFailures"}},
		"./cluster -run TestVerifierFlaps$", "is another",
	},
	{
		"cluster: who is back is not asked", "cluster/verifier.go",
		[]edit{{"k != nil && !k.doubted.IsZero() {\n\t\tdelete", "k != nil {\n\t\tdelete"}},
		"./cluster -run TestVerifierFlaps$", "answers: is not asked",
	},
	{
		"cluster: who is taken for dead while it is asked has three tries", "cluster/verifier.go",
		[]edit{{"\t\tk.doubted = now // by", "\t\t_ = now // by"}},
		"./cluster -run TestVerifierFlaps$", "is dead",
	},
	{
		"cluster: who leaves is asked whether it has", "cluster/prober.go",
		[]edit{{"leaves := p.listed[id].state == Leaving\n\tdelete(p.listed, id)", "delete(p.listed, id)\n\tleaves := p.listed[id].state == Leaving"}},
		"./cluster -run TestProberDown$", "leaving: counts true",
	},
	{
		"cluster: any process of a name answers for it", "cluster/prober.go",
		[]edit{{"id.Name != c.name || id.Boot != c.boot", "id.Name != c.name"}},
		"./cluster -run TestProberDown$", "another boot",
	},
	{
		"weir: the least memory is not enough", "config.go",
		[]edit{{"c.Memory != 0 && usable < minMemory", "c.Memory != 0 && usable <= minMemory"}},
		". -run TestValidate$", "the least memory",
	},
	{
		"weir: a node that cannot go on is waited for", "weir.go",
		[]edit{{"\tcase <-r.Failed():\n\t\treturn r.Err()\n", ""}},
		". -run TestStartErrors$", "awaited with other voters",
	},
	{
		"weir: a node has all its time to stop", "weir.go",
		[]edit{{"return r.StopWithin(ctx)", "return r.StopWithin(context.Background())"}},
		". -run TestCluster$", "stopped without time",
	},
	{
		"node: copies of others' partitions have no room of their own", "internal/node/node.go",
		[]edit{{", Copies: n.cluster != nil,", ","}},
		"./internal/node -run TestRoomForCopies$", "new keys of 1600 are kept",
	},
	{
		"weir: a node takes half of what the process may use", "config.go",
		[]edit{{"memory.Own().Usable / 4", "memory.Own().Usable / 2"}},
		". -run TestMemoryByDefault$", "bytes",
	},
	{
		"weir: the directory for overrides is not used", "config.go",
		[]edit{{"PolicyFile: c.PolicyFile, DataDir: c.DataDir,", "PolicyFile: c.PolicyFile,"}},
		". -run TestStartErrors$", "want DataDir",
	},
	{
		"overrides: of too many deletions the newest are forgotten", "internal/overrides/book.go",
		[]edit{{"cmp.Compare(b.Counter, a.Counter), strings.Compare(b.Node, a.Node)", "cmp.Compare(a.Counter, b.Counter), strings.Compare(b.Node, a.Node)"}},
		"./internal/overrides -run TestOldDeletionsAreForgotten$", "and newer ones are forgotten",
	},
	{
		"overrides: a comparison that failed counts", "internal/overrides/replicator.go",
		[]edit{{"o.met = o.met || err == nil", "o.met = true"}},
		"./internal/overrides -run TestChangeBeforeBooksAreCompared$", "of whom one cannot be reached",
	},
	{
		"overrides: a change is made before books are compared", "internal/overrides/service.go",
		[]edit{{"if !s.cfg.Replicator.awaitMet(ctx) {", "if false {"}},
		"./internal/overrides -run TestChangeBeforeBooksAreCompared$", "a change by a node that has met nobody",
	},
	{
		"overrides: a member answers before a change is in force", "internal/overrides/replicator.go",
		[]edit{{"		r.cfg.Apply()\n", "		defer r.cfg.Apply()\n"}},
		"./internal/overrides -run TestInForceWhenAnswered$", "a book is shown that is not in force",
	},
	{
		"overrides: a change that lost is said to be in force", "internal/overrides/replicator.go",
		[]edit{{"if m == r.cfg.Self || now != nil && now.newer(e) {", "if m == r.cfg.Self {"}},
		"./internal/overrides -run TestTwoOperatorsAtOnce$", "the change that lost is answered",
	},
	{
		"overrides: a write that failed is not repeated", "internal/overrides/replicator.go",
		[]edit{{"err := r.cfg.Book.Retry(); err != nil", "err := error(nil); err != nil"}},
		"./internal/overrides -run TestWrittenAgain$", "the file was not written again",
	},
	{
		"overrides: each change is put into force by itself", "internal/overrides/replicator.go",
		[]edit{{"ended.Add(max(commitPace, restFactor*ended.Sub(began)))", "ended.Add(time.Millisecond)"}},
		"./internal/overrides -run TestChangesAreCoalesced$", "changes were put into force in",
	},
	{
		"loan: a check that has waited for a recall never does again", "limiter/loan.go",
		[]edit{{"\t\t\tw.op.recalled = false\n", ""}},
		"./limiter -run TestAskedAnew$", "loan_test.go",
	},
	{
		"loan: who is asked for what it has is lent more", "limiter/borrow.go",
		[]edit{{"loans[i].ID, 0, true\n", "loans[i].ID, report.Want, true\n"}},
		"./limiter -run TestRecallsLendNothing$", "want 12",
	},
	{
		"limiter: a charge under a ban stands without its copy", "limiter/op.go",
		[]edit{{"op.asks() && !op.Always && op.Outcome.Decision.Banned", "op.asks() && op.Outcome.Decision.Banned"}},
		"./limiter -run TestAnswersWaitForTheirCopy$", "charge 1 of which the copy does not hear",
	},
	{
		"limiter: a peer settles a part of a reservation", "limiter/op.go",
		[]edit{{"if op.Reservation != op.Reservation.Whole() || op.Reservation ==", "if op.Reservation =="}},
		"./limiter -run TestReceiveChecksWhatItGets$", "nil pointer",
	},
	{
		"loan: reports go to who held the key first", "limiter/borrow.go",
		[]edit{
			{"	exchanges map[ownership.Node]int // that are in flight\n", "	exchanges map[ownership.Node]int\n	first     map[int]ownership.Node\n"},
			{"			by[to.node] = append(by[to.node], report{op, to})\n", `			if b.first == nil {
				b.first = make(map[int]ownership.Node)
			}
			if _, ok := b.first[op.partition]; !ok {
				b.first[op.partition] = to.node
			}
			first := b.first[op.partition]
			by[first] = append(by[first], report{op, to})
`},
		},
		"./limiter -run TestLoanedPartitionMoves", "are on loan",
	},
	{
		"loan: a node borrows in whatever name it says", "rpc/peer/server.go",
		[]edit{{"			op.Loan.Report.ID.Borrower = from // no node borrows in another's name\n", "			_ = from\n"}},
		"./rpc/peer -run TestLoansCross", "arrives, want",
	},
	{
		"replica: a voter tells no more records than there are partitions", "rpc/replica/codec.go",
		[]edit{{"2*r.partitions, r.record", "r.partitions, r.record"}},
		"./rpc/replica -run TestMostRecords$", "records of 7 partitions",
	},
	{
		"replica: who has no room for a copy says nothing", "rpc/replica/codec.go",
		[]edit{{"o > peerv1.Outcome_OUTCOME_FULL", "o > peerv1.Outcome_OUTCOME_CONFLICT"}},
		"./rpc/replica -run TestMostRecords$", "outcome 5",
	},
	{
		"peer: a batch is handed on for as long as its last operation is waited for", "rpc/peer/server.go",
		[]edit{{"w.longest = max(w.longest, op.Left)", "w.longest = op.Left"}},
		"./rpc/peer -run TestLongestLeft$", "2s, ",
	},
	{
		"peer: an acknowledgement after a gap does not cover its batch", "rpc/peer/server.go",
		[]edit{{"func(seq uint64, _ *answer) bool { return seq <= up }", "func(seq uint64, _ *answer) bool { return seq < up }"}},
		"./rpc/peer -run TestAcknowledgedAfterGap$", "up to 5, and known are",
	},
	{
		"envoyquota: others have what is taken from a data plane before that has taken effect", "gateway/envoyquota/plane.go",
		[]edit{{"if now >= end+int64(Delivery) ||", "if now >= end ||"}},
		"./gateway/envoyquota -run TestAttribute$", "as it stands after Delivery",
	},
	{
		"envoyquota: what a data plane has is returned when its stream ends", "gateway/envoyquota/session.go",
		[]edit{{"	for _, e := range s.buckets {\n		s.service.cfg.Kept.Give(e.bytes)\n	}\n	s.service.count", `	for _, e := range s.buckets {
		for _, l := range e.loans {
			if l.sent > 0 && !l.over {
				l.over = true
				q := e.quota(l, s.service.cfg.Now(), false)
				_ = s.service.cfg.Quotas.Quota(context.Background(), []limit.Quota{q}, make([]limit.QuotaLent, 1))
			}
		}
		s.service.cfg.Kept.Give(e.bytes)
	}
	s.service.count`}},
		"./gateway/envoyquota -run TestBounds", "admissions in",
	},
	{
		"envoyquota: an assignment replaces another without DENY_ALL", "gateway/envoyquota/service.go",
		[]edit{{"		assignment(blanket(typev3.RateLimitStrategy_DENY_ALL))\n		assignment(tokenBucket", "		assignment(tokenBucket"}},
		"./gateway/envoyquota -run TestUse", "of what they could have",
	},
	{
		"envoyquota: the owner's loan ends before its data plane stops", "gateway/envoyquota/plane.go",
		[]edit{{"term = askMost + Delivery + Life + time.Second", "term = askMost + Life"}},
		"./gateway/envoyquota -run TestTerm", "at most 1200 may be",
	},
	{
		"algo: of a borrower's rates the newest counts", "algo/quota.go",
		[]edit{{"p.rate, p.cost = max(p.rate, l.Rate), max(p.cost, l.cost())", "p.rate, p.cost = l.Rate, l.cost()"}},
		"./algo -run TestQuotaRate", "more than",
	},
	{
		"algo: a rate that is lent is not charged", "algo/quota.go",
		[]edit{{"		n += came\n", "		n += 0 * came\n"}},
		"./algo -run TestQuotaRate", "more than",
	},
	{
		"envoyquota: a policy that is not lent any more is divided further", "limiter/quota.go",
		[]edit{{"	} else if e != nil && e.Divisible() != nil {", "	} else if false {"}},
		"./gateway/envoyquota -run TestReload$", "were admitted",
	},
	{
		"loan: less is granted in part than there is", "store/decide.go",
		[]edit{{"		if call.Whole && request.Held > 0 && call", "		if call.Always && request.Held > 0 && call"}},
		"./limiter -run TestPartialRecalls", "on loan:",
	},
	{
		"loan: what is put back was reported spent", "internal/borrow/all.go",
		[]edit{{"	b.mu.Lock() // reports are made under it\n	defer b.mu.Unlock()\n", ""}},
		"./internal/borrow -run TestTakeAllIsUntold$", "were spent",
	},
	{
		"store: a copy is told request ids before their charges", "store/answers.go",
		[]edit{{"return e.key.kind != answerCharge && e.excess == 0", "return true"}},
		"./store -run TestBurstOfIDs$", "of 1000 were admitted",
	},
	{
		"store: a copy is told refunds before their request ids", "store/answers.go",
		[]edit{{"return e.key.kind != answerCharge && e.excess == 0", "return false"}},
		"./store -run TestIDsOverACrash$", "are in use, want at least",
	},
	{
		"store: a charge with a request id does not wait under escrow", "store/decide.go",
		[]edit{{"if rule.Durability == Sync || call.RequestID != \"\" ||", "if rule.Durability == Sync ||"}},
		"./store -run TestIDsOverACrash$", "again, want at most",
	},
	{
		"store: a repeated request does not wait under escrow", "store/decide.go",
		[]edit{{"	if rule.Durability >= Escrow {\n		// The first answer", "	if rule.Durability > Escrow {\n		// The first answer"}},
		"./store -run TestRepeatWaitsToo$", "tickets 2 and 0",
	},
	{
		"store: what is admitted again is the ban's", "store/decide.go",
		[]edit{{"a.RetryAfter, a.Banned = 0, false", "a.RetryAfter = 0"}},
		"./store -run TestRepeatDuringBan$", "Allowed:true",
	},
	{
		"store: what is refused whatever is on loan does not depend on that", "store/loan.go",
		[]edit{{"d.RetryAfter == algo.Never ||", "d.RetryAfter > request.HeldFor ||"}},
		"./limiter -run TestWhoObeysIsAdmittedBesideLoans$", "refused again",
	},
	{
		"limiter: an admission from a loan does not forget what was refused more", "limiter/borrow.go",
		[]edit{{"	l.refusals.Admitted(s.hash) // who", "	// who"}},
		"./limiter -run TestWhoObeysIsAdmittedBesideLoans$", "refused again",
	},
	{
		"store: a late confirmation takes back a later one", "store/follower.go",
		[]edit{{"f.confirmed = max(f.confirmed, version)", "f.confirmed = version"}},
		"./store -run TestLateConfirm$", "repeated once the copy has it",
	},
	{
		"store: the last chunk of a partition that is shut ends what a holder before may have admitted", "store/apply.go",
		[]edit{{"			o.advanced = 0\n			a.owe(of, o)", "			o.advanced, o.inherited = 0, 0\n			a.owe(of, o)"}},
		"./store -run TestInheritedAtShut$", "are left, want 89",
	},
	{
		"store: a ban counts from an instant before the newest", "store/decide.go",
		[]edit{{"r.ban(int64(r.state[0]) + int64(rule.Ban))", "r.ban(now.Mono + int64(rule.Ban))"}},
		"./store -run TestBanCountsFromTheNewestInstant$", "banned for 4m59.5s",
	},
	{
		"store: a repeated answer has no delay", "store/decide.go",
		[]edit{{"over: !d.Allowed, delay: d.Delay, lease", "over: !d.Allowed, lease"}},
		"./store -run TestRepeatedAnswers$", "repeated",
	},
	{
		"store: a charge beyond the limit is within it when it is repeated", "store/decide.go",
		[]edit{{"granted: d.Granted, over: !d.Allowed,", "granted: d.Granted,"}},
		"./store -run TestRepeatedAnswers$", "repeated",
	},
	{
		"store: a charge that was made says that units on loan stand in its way", "store/decide.go",
		[]edit{{"if request.Held > 0 && !d.Allowed && !call.Always {", "if request.Held > 0 && !d.Allowed {"}},
		"./limiter -run TestAlwaysWhereThereIsRoomBesideLoans$", "Remaining:0",
	},
	{
		"refusal: an admission forgets what is on its way", "internal/refusal/refusal.go",
		[]edit{{"	defer s.mu.Unlock()\n	s.forget(hash)", "	defer s.mu.Unlock()\n	s.mark++\n	s.forget(hash)"}},
		"./internal/refusal -run TestAdmittedKeepsWhatIsInFlight$", "is not remembered",
	},
	{
		"limiter: a refusal under a request id has no mark", "limiter/refusals.go",
		[]edit{{"		op.asked.mark = l.refusals.Mark(op.hash)\n", ""}},
		"./limiter -run TestARefusalUnderARequestIDIsRemembered$", "1 messages, want 0",
	},
	{
		"limiter: a refusal is remembered with its request id", "limiter/refusals.go",
		[]edit{{"	kept.RequestID = \"\"\n", ""}},
		"./limiter -run TestARefusalUnderARequestIDIsRemembered$", "RequestID:r",
	},
	{
		"limiter: what failed closed has charged nothing", "limiter/refusals.go",
		[]edit{{"if d.Allowed || d.FailedClosed || op.Always {", "if d.Allowed || op.Always {"}},
		"./limiter -run TestWhatMayBeChargedForgets$", "after a charge whose answer is lost",
	},
	{
		"limiter: what was charged beyond the limit has charged nothing", "limiter/refusals.go",
		[]edit{{"if d.Allowed || d.FailedClosed || op.Always {", "if d.Allowed || d.FailedClosed {"}},
		"./limiter -run TestWhatMayBeChargedForgets$", "after a charge beyond the limit",
	},
	{
		"limiter: a remembered refusal ages from its question", "limiter/refusals.go",
		[]edit{{"Came: l.clock().Mono, Until:", "Came: op.asked.sent, Until:"}},
		"./limiter -run TestARefusalFromMemoryCountsFromItsDecision$", "and 100 ms later",
	},
	{
		"limiter: a report for which there is no room is confirmed", "limiter/loan.go",
		[]edit{{"return limit.Lent{Granted: b.Totals.Granted, Spent: b.Known, Again: again}, copied", "return limit.Lent{Spent: b.Totals.Spent, Granted: b.Totals.Granted, Again: again}, copied"}},
		"./limiter -run TestReportWithoutRoom$", "Spent:9",
	},
	{
		"limiter: nothing is granted in part once what is on loan does not come back", "limiter/decide.go",
		[]edit{{"Whole:     !op.recalled,", "Whole:     true,"}},
		"./limiter -run TestPartialBesideSilentBorrower$", "want 4 granted",
	},
	{
		"limiter: a lease is renewed under a strict rule without one", "limiter/decide.go",
		[]edit{{"		if rule.Strict {\n			boot = now.bootTime()\n		}\n", ""}},
		"./limiter -run TestRenewalsUnderLease$", "was carried out",
	},
	{
		"limiter: a late renewal is used", "limiter/decide.go",
		[]edit{{"op.Outcome.ExpiresIn, op.Outcome.ticket, op.Outcome.until = lease.Left, lease.Ticket, lease.Until", "op.Outcome.ExpiresIn, op.Outcome.ticket = lease.Left, lease.Ticket"}},
		"./limiter -run TestRenewalsUnderLease$", "want kind",
	},
	{
		"limiter: a renewal does not wait for the copy", "limiter/decide.go",
		[]edit{{"op.Outcome.ExpiresIn, op.Outcome.ticket, op.Outcome.until = lease.Left, lease.Ticket, lease.Until", "op.Outcome.ExpiresIn, op.Outcome.until = lease.Left, lease.Until"}},
		"./limiter -run TestAnswersWaitForTheirCopy$", "a renewal: 0 answers waited",
	},
	{
		"limiter: an excess is charged under a strict rule without a lease", "limiter/reserve.go",
		[]edit{{"		how.Boot = now.bootTime()\n", "		_ = now\n"}},
		"./limiter -run TestRenewalsUnderLease$", "was carried out",
	},
	{
		"limiter: a late answer to an excess is used", "limiter/reserve.go",
		[]edit{{"op.Outcome.ticket, op.Outcome.until = got.Ticket, got.Until", "op.Outcome.ticket = got.Ticket"}},
		"./limiter -run TestRenewalsUnderLease$", "want kind",
	},
	{
		"limiter: an excess does not wait for the copy", "limiter/reserve.go",
		[]edit{{"op.Outcome.ticket, op.Outcome.until = got.Ticket, got.Until", "op.Outcome.until = got.Until"}},
		"./limiter -run TestAnswersWaitForTheirCopy$", "a commit of more than was reserved: 0 answers waited",
	},
	{
		"limiter: atomic checks take the places of a key's reservations", "limiter/decide.go",
		[]edit{{"= op.Reservation, op.TTL, op.Atomic", "= op.Reservation, op.TTL, false"}},
		"./limiter -run TestAtomicTakesNoPlaces$", "[k l] with",
	},
	{
		"limiter: an atomic check of one state reserves", "limiter/atomic.go",
		[]edit{{"	if len(all.ops) == 1 {\n		return all, nil //", "	if len(all.ops) == 0 {\n		return all, nil //"}},
		"./limiter -run TestAtomicTakesNoPlaces$", "[k k] with",
	},
	{
		"store: a check of a negative cost gives back without a lease", "store/decide.go",
		[]edit{{"	if rule.Guarded() {\n		// What is given back", "	if false {\n		// What is given back"}},
		"./store -run TestStrict$", "of which nothing is to be given back",
	},
	{
		"store: a renewal does not wait under escrow", "store/decide.go",
		[]edit{{"if n.Alive && rule.Durability >= Escrow {", "if n.Alive && rule.Durability > Escrow {"}},
		"./store -run TestOtherAnswersWait$", "renewed",
	},
	{
		"store: a commit that is repeated does not wait", "store/decide.go",
		[]edit{{"if m.excess > 0 && rule.Durability >= Escrow {", "if false {"}},
		"./store -run TestOtherAnswersWait$", "repeated",
	},
	{
		"store: the copy is not told that a reservation was prolonged", "store/decide.go",
		[]edit{{"				part.noteReservation(reservationKey{p.of, p.list[i].id}, &sh.budget)\n			}\n		}\n		answer.Reservation", "			}\n		}\n		answer.Reservation"}},
		"./store -run TestExtensionIsCopied$", "Known:false",
	},
	{
		"store: what came of reservations of atomic checks is remembered", "store/decide.go",
		[]edit{{"		once = once || held.list[i].once\n", ""}},
		"./store -run TestSettledOnce$", "once true: known true",
	},
	{
		"store: an excess is a check under a ban", "store/decide.go",
		[]edit{{"Boot: how.Boot, Spent: true, Whole", "Boot: how.Boot, Whole"}},
		"./store -run TestExcessAndBan$", "during a ban",
	},
	{
		"limiter: a part of another size is converted each time", "limiter/part.go",
		[]edit{{"		known.limits, known.state = own, state\n", "		known.state = state\n"}},
		"./limiter -run TestPartsOfOtherSizes$", "are left of 9",
	},
	{
		"limiter: an answer without a copy says nothing of that", "limiter/route.go",
		[]edit{{"out.Decision.Degraded = out.Decision.Degraded || degraded", "out.Decision.Degraded = out.Decision.Degraded && degraded"}},
		"./limiter -run TestAnswersSayHowTheyWaited$", "sync:",
	},
	{
		"limiter: strict answers are given without a copy", "limiter/route.go",
		[]edit{{"out.ticket, out.until != 0)", "out.ticket, false)"}},
		"./limiter -run TestAnswersSayHowTheyWaited$", "strict:",
	},
	{
		"limiter: a rate of which no copy knows is lent", "limiter/route.go",
		[]edit{{"op.Quota.Lent.Granted, op.Quota.Lent.Rate = 0, 0", "op.Quota.Lent.Granted = 0"}},
		"./limiter -run TestAnswersSayHowTheyWaited$", "Rate:7200",
	},
	{
		"limiter: an answer is used at the end of its lease", "limiter/route.go",
		[]edit{{"end.bootTime() >= op.Outcome.until {", "end.bootTime() > op.Outcome.until {"}},
		"./limiter -run TestAnswerAtTheEndOfALease$", "an answer until 7",
	},
	{
		"limiter: a lease that has ended is for ever to a peer", "limiter/route.go",
		[]edit{{"out.Lease <= 0 {", "out.Lease < 0 {"}},
		"./limiter -run TestAnswerAtTheEndOfALease$", "a peer is told of an answer until 7",
	},
	{
		"limiter: an atomic check that cannot be reserved is an error", "limiter/decide.go",
		[]edit{{"case errors.Is(err, store.ErrReservations) && !op.Atomic:", "case errors.Is(err, store.ErrReservations):"}},
		"./limiter -run TestAtomicWithoutPlaces$", "checks[0]",
	},
	{
		"limiter: a reservation of one state twice is held as long as the last says", "limiter/atomic.go",
		[]edit{{"sum.TTL = max(sum.TTL, op.TTL)", "sum.TTL = op.TTL"}},
		"./limiter -run TestReservationsOutliveTheirCall$", "TTL:1s",
	},
	{
		"limiter: reservations of an atomic check end before they are settled", "limiter/atomic.go",
		[]edit{{"min(2*l.cfg.Timeout+time.Second, limit.MaxReservation)", "min(l.cfg.Timeout+0*time.Second, limit.MaxReservation)"}},
		"./limiter -run TestReservationsOutliveTheirCall$", "TTL:",
	},
	{
		"limiter: units are lent beside a candidate", "limiter/borrow.go",
		[]edit{{"!s.entry.NoLend && !s.entry.Shadow && s.entry.candidate == nil", "!s.entry.NoLend && !s.entry.Shadow"}},
		"./limiter -run TestWhatIsNotLent$", "of \"tried\"",
	},
	{
		"store: of two losses the earlier counts", "store/decide.go",
		[]edit{{"a.coldStrict.at.Mono > lost.at.Mono)", "a.coldStrict.at.Mono < lost.at.Mono)"}},
		"./store -run TestCold$", "both at 1m1s",
	},
	{
		"store: a loss for strict rules alone is none for those that begin full", "store/decide.go",
		[]edit{{"(!lost.is || a.coldStrict.at.Mono", "(lost.is && a.coldStrict.at.Mono"}},
		"./store -run TestCold$", "both after a loss",
	},
	{
		"store: answers wait for a history that is not sent by itself", "store/gate.go",
		[]edit{{"	case part.pending[ownership.Backup].Load() > 0:\n", "	case f.left(part.extras) > 0:\n"}},
		"./store -run TestRepeatAfterMove$", "nothing is going to be sent",
	},
	{
		"store: nobody waits for what is on its way to the copy", "store/gate.go",
		[]edit{{"	case f.confirmed < f.contained:\n		return f.contained\n", ""}},
		"./store -run TestRepeatWaitsToo$", "told and not confirmed",
	},
	{
		"store: a copy keeps the loans of a key that was reset", "store/apply.go",
		[]edit{{"\t\ta.to.dropLent(of, b)\n\tcase", "\tcase"}},
		"./store -run TestResetBesideLoanIsCopied$", "bytes are counted",
	},
	{
		"store: followers are not told what a reset leaves on loan", "store/decide.go",
		[]edit{{"\t\t\tsh.note(part, r, 0)\n\t\t}\n\t})\n\treturn err", "\t\t}\n\t})\n\treturn err"}},
		"./store -run TestResetBesideLoanIsCopied$", "0 are held on the copy",
	},
	{
		"store: a copy keeps what is owed on a record that is gone", "store/apply.go",
		[]edit{{"\t\tdelete(a.to.extras.owed, r.id())\n", ""}},
		"./store -run TestNothingOwedOnGone$", "89 are left of 100",
	},
	{
		"store: a record on which nothing is owed any more is not swept", "store/apply.go",
		[]edit{{"\t\t\tr.clear(owedFlag)\n\t\t} else", "\t\t\t_ = r\n\t\t} else"}},
		"./store -run TestNothingOwedIsSwept$", "on which nothing is owed",
	},
	{
		"store: a sweep drops what is owed", "store/store.go",
		[]edit{{"if r.has(owedFlag|lentFlag) ||", "if r.has(lentFlag) ||"}},
		"./store -run TestNothingOwedIsSwept$", "on one of which something is owed",
	},
	{
		"store: a copy undoes charges of a record that is gone", "store/apply.go",
		[]edit{{"\t\ta.to.lose(r)\n", ""}},
		"./store -run TestSweptStateIsLost$", "copied true",
	},
	{
		"store: charges of a record that was swept are undone", "store/store.go",
		[]edit{{"\t\t\tpart.lose(r)\n", ""}},
		"./store -run TestSweptStateIsLost$", "copied false",
	},
	{
		"store: a copied ban lasts for as long as the chunk says", "store/apply.go",
		[]edit{{"min(banned, int64(rule.rule.Ban))", "banned"}},
		"./store -run TestCopiedBanIsBounded$", "banned for 100h0m0s",
	},
	{
		"store: a copy keeps where the units of reservations are that it does not have", "store/apply.go",
		[]edit{{"\t\t\tholds = holds.Remove(len(list))\n", ""}},
		"./store -run TestReservationsBeyondTheCopysBound$", "95 are left of 100 beside none",
	},
	{
		"store: a copy drops a record that has no room to grow", "store/apply.go",
		[]edit{{"\tif found {\n\t\treturn ErrCopyFull\n\t}\n", ""}},
		"./store -run TestCopyWithoutRoomForChanges$", "all was copied",
	},
	{
		"store: a chunk is added to what is open", "store/apply.go",
		[]edit{{"\tcase a.part.open:\n\t\treturn ErrHeld\n\t}", "\t}"}},
		"./store -run TestApplyToWhatIsOpen$", "want store: partition is open",
	},
	{
		"store: a counted refusal of a key that begins full is forgotten", "store/decide.go",
		[]edit{{"(filled && !denied || sh.idle(r, now))", "(filled || sh.idle(r, now))"}},
		"./store -run TestCountedRefusalWhereTheCountIsLost$", "a counted refusal is forgotten",
	},
	{
		"store: a reset leaves the ban of a key with loans", "store/decide.go",
		[]edit{{"\t\t\tr.clear(owedFlag)\n\t\t\tr.lift()\n\t\t\tsh.counted", "\t\t\tr.clear(owedFlag)\n\t\t\tsh.counted"}},
		"./store -run TestResetOfABanBesideLoans$", "want 3 left of 20",
	},
	{
		"store: a reset leaves a key with loans marked as owing", "store/decide.go",
		[]edit{{"\t\t\tr.clear(owedFlag)\n\t\t\tr.lift()\n\t\t\tsh.counted", "\t\t\tr.lift()\n\t\t\tsh.counted"}},
		"./store -run TestResetOfWhatIsOwed$", "are left when all is over",
	},
	{
		"store: a reset leaves what is owed", "store/decide.go",
		[]edit{{"\t\t\tif r.has(owedFlag) {\n\t\t\t\tdelete(part.extras.owed, of)\n\t\t\t}\n\t\t\tsh.endAdvance", "\t\t\tsh.endAdvance"}},
		"./store -run TestResetOfWhatIsOwed$", "89 are left of 100 after 1",
	},
	{
		"store: a ban lasts as it did where the limits change with it", "store/shard.go",
		[]edit{{"\t\tfresh.ban(r.banEnd())\n\t\tfresh.changeBan(before, now)", "\t\tfresh.ban(r.banEnd())"}},
		"./store -run TestBanUnderOtherLimits$", "want banned for 9 minutes more",
	},
	{
		"store: states that grow take the room of copies", "store/shard.go",
		[]edit{{"(b.fresh || b.acting != 0)", "b.fresh"}},
		"./store -run TestMaxBytesBesideCopies$", "when the log can grow no more",
	},
	{
		"store: the fast path charges beside reservations", "store/store.go",
		[]edit{{"(part.extras == nil || part.extras.reservations.count == 0) {", "true {"}},
		"./store -run TestDecideKnown$", "beside reservations is decided",
	},
	{
		"store: the fast path refuses without a ban", "store/store.go",
		[]edit{{"return err == nil && (d.Allowed || rule.Ban == 0)", "return err == nil"}},
		"./store -run TestDecideKnown$", "a refusal that begins a ban is decided",
	},
	{
		"store: the fast path tells no follower", "store/store.go",
		[]edit{{"if part.open && !part.followed && (", "if part.open && ("}},
		"./store -run TestDecideKnown$", "a partition that is followed is decided",
	},
	{
		"store: the fast path decides in a partition that is shut", "store/store.go",
		[]edit{{"if part.open && !part.followed && (", "if !part.followed && ("}},
		"./store -run TestDecideKnown$", "a partition that is shut is decided",
	},
	{
		"store: a reload converts copies", "store/store.go",
		[]edit{{"if !part.open {\n\t\t\t\treturn false // a copy", "if false {\n\t\t\t\treturn false // a copy"}},
		"./store -run TestReconcileOfCopies$", "a copy, reconciled",
	},
	{
		"store: rules of the same limits but another ban are the same to a copy", "store/apply.go",
		[]edit{{"old.Strict != rule.Strict || old.Ban != rule.Ban {", "old.Strict != rule.Strict {"}},
		"./store -run TestCopiedRuleOfAnotherBan$", "1h0m0s: the copy holds",
	},
	{
		"store: what was told as a whole is told so again", "store/chunk.go",
		[]edit{{"r.clear((pendingFlag | wholeFlag) << d.slot)\n\td.sh", "r.clear(pendingFlag << d.slot)\n\td.sh"}},
		"./store -run TestChangesAreSmall$", "bytes for one unit",
	},
	{
		"store: an allowance takes the place of what is owed", "store/chunk.go",
		[]edit{{"o.advanced += d.part.allow(r, d.now)", "o.advanced = d.part.allow(r, d.now)"}},
		"./store -run TestAllowanceBesideWhatIsOwed$", "82 are left",
	},
	{
		"store: the receiver of a move is told of allowances", "store/chunk.go",
		[]edit{{"\t\tif d.slot == ownership.Backup {\n\t\t\to.advanced", "\t\tif true {\n\t\t\to.advanced"}},
		"./store -run TestNoAllowanceOfOthers$", "at the receiver of a move",
	},
	{
		"store: records are copied under the last caller", "store/chunk.go",
		[]edit{{"told.rule != rule || told.caller != caller {", "told.rule != rule {"}},
		"./store -run TestCallersAreCopied$", "record 1 counts to",
	},
	{
		"store: changes that are sent give no allowance back", "store/chunk.go",
		[]edit{{"\t\t\tsh.giveBack(part, now)\n", "\t\t\t_ = now\n"}},
		"./store -run TestNothingOwedIsSwept$", "on which nothing is owed",
	},
	{
		"store: resets beyond a chunk are forgotten", "store/chunk.go",
		[]edit{{"\t\tif f.resets = f.resets[1:]; len(f.resets) == 0 {\n\t\t\tf.resets = nil\n\t\t}", "\t\tf.resets = nil"}},
		"./store -run TestSmallChunks$", "all: the copy holds",
	},
	{
		"store: the first answer of a chunk is left out", "store/answers.go",
		[]edit{{"for e.older != nil && e.older.turn >= turn {", "for e.older != nil && e.older.turn > turn {"}},
		"./store -run TestSmallChunks$", "the copy holds",
	},
	{
		"store: followers are not told of a loss", "store/content.go",
		[]edit{{"cold = coldness{true, now}\n\t\tpart.noteCold()", "cold = coldness{true, now}"}},
		"./store -run TestLossIsCopied$", "nothing is pending after a loss",
	},
	{
		"store: a reservation gives back of what is taken for used up", "store/content.go",
		[]edit{{"\t\t\t\tpart.lose(r)\n\t\t\t\tif r.has", "\t\t\t\tif r.has"}},
		"./store -run TestLossIsCopied$", "were given back of what is taken for used up",
	},
	{
		"store: what is owed is charged to keys that are taken for used up", "store/content.go",
		[]edit{{"\t\t\t\t\tr.clear(owedFlag)\n\t\t\t\t\tdelete(part.extras.owed, r.id())\n", ""}},
		"./store -run TestNothingOwedAfterALoss$", "90 are left of 100 when all is over",
	},
	{
		"store: a follower that has everything was told of no reservations", "store/follower.go",
		[]edit{{"part.tellReservations(slot, true)", "part.tellReservations(slot, false)"}},
		"./store -run TestFollowerThatHadReservations$", "a cancel and another charge: the copy holds",
	},
	{
		"store: a follower of what was promoted begins below former versions", "store/follower.go",
		[]edit{{"\tpart.raise()\n\ta := part.ensureExtras()", "\ta := part.ensureExtras()"}},
		"./store -run TestVersionOfEachChange$", "Attach to what was promoted: version",
	},
	{
		"store: a follower makes no version", "store/follower.go",
		[]edit{{"\ta.version++\n\tf := &follower", "\tf := &follower"}},
		"./store -run TestVersionOfEachChange$", "AttachCurrent: version",
	},
	{
		"store: a follower that is told of everything makes no version", "store/follower.go",
		[]edit{{"\tpart.extras.version++\n\tpart.recount()\n}\n\n// Widen", "\tpart.recount()\n}\n\n// Widen"}},
		"./store -run TestVersionOfEachChange$", "Widen: version",
	},
	{
		"store: a move ends allowances", "store/follower.go",
		[]edit{{"\tif slot == ownership.Backup {\n\t\tpart.role.advances.free", "\tif true {\n\t\tpart.role.advances.free"}},
		"./store -run TestAllowanceLater$", "0 were admitted ahead",
	},
	{
		"store: a follower that goes makes no version", "store/follower.go",
		[]edit{{"\tif part.open {\n\t\tpart.extras.bump() // see Open\n\t}\n", ""}},
		"./store -run TestVersionOfEachChange$", "Detach: version",
	},
	{
		"store: a reset makes no version", "store/follower.go",
		[]edit{{"\tp.extras.bump()\n\tfor _, f", "\tfor _, f"}},
		"./store -run TestVersionOfEachChange$", "Reset: version",
	},
	{
		"store: a merge makes no version", "store/merge.go",
		[]edit{{"\t\tpart.raise()\n\t\tpart.extras.version++\n", "\t\tpart.raise()\n"}},
		"./store -run TestVersionOfEachChange$", "Merge: version",
	},
	{
		"store: allowances of a bucket are a part of its limit", "store/escrow.go",
		[]edit{{"\t\t\t\tleast = min(least, l.Capacity)\n", "\t\t\t\t_ = l\n"}},
		"./store -run TestAllowanceIsOfTheCapacity$", "told in chunks of 5",
	},
	{
		"store: allowances end a second after the process began", "store/escrow.go",
		[]edit{{"\ta.last = now.Mono\n", ""}},
		"./store -run TestAllowanceLater$", "0 were admitted ahead",
	},
	{
		"store: keys under another durability have allowances", "store/escrow.go",
		[]edit{{" && r.spec.rule.Durability == Escrow {", " {"}},
		"./store -run TestNoAllowanceOfOthers$", "of which none was admitted ahead",
	},
	{
		"store: a reservation ends with the first that was made", "store/reservation.go",
		[]edit{{"if r.count == 0 || e.until < r.first {", "if r.count == 0 {"}},
		"./store -run TestReservationsExpire$", "reservations are pending at",
	},
	{
		"store: reservations end when the last one does", "store/reservation.go",
		[]edit{{"first = min(first, p.list[i].until)", "first = p.list[i].until"}},
		"./store -run TestReservationsExpire$", "reservations are pending at",
	},
	{
		"store: reservations of atomic checks are bounded by the key", "store/reservation.go",
		[]edit{{"sh.store.cfg.MaxKeyReservations && !call.ReserveOnce {", "sh.store.cfg.MaxKeyReservations {"}},
		"./store -run TestAtomicBeyondTheKeysBound$", "1: {Decision",
	},
	{
		"store: charges of a record that is gone stay undoable", "store/reservation.go",
		[]edit{{"\t\tp.holds.Lose()\n", "\t\t_ = p\n"}},
		"./store -run TestSweptStateIsLost$", "of another charge were given back",
	},
	{
		"store: answers are kept for the window", "store/answers.go",
		[]edit{{"longest := time.Minute\n", "longest := time.Duration(0)\n"}},
		"./store -run TestAnswersAreKept$", "window 1s, repeated",
	},
	{
		"store: answers of long windows are kept for long", "store/answers.go",
		[]edit{{"return min(longest, 5*time.Minute)", "return longest"}},
		"./store -run TestAnswersAreKept$", "window 1h0m0s, repeated 5m0s later",
	},
	{
		"store: answers are repeated when they have ended", "store/answers.go",
		[]edit{{"if e := m.by[k]; e != nil && now < e.until {", "if e := m.by[k]; e != nil && now <= e.until {"}},
		"./store -run TestAnswersAreKept$", "repeated 1m0s later",
	},
	{
		"store: an answer that has ended takes a later one with it", "store/answers.go",
		[]edit{{"\tif m.by[e.key] == e {\n\t\tdelete", "\t{\n\t\tdelete"}},
		"./store -run TestAnswersOfOneID$", "after the end of the first",
	},
	{
		"store: of two answers to a request the merged one counts", "store/answers.go",
		[]edit{{"if m.by[e.key] == nil && other.by[e.key] == e {", "if other.by[e.key] == e {"}},
		"./store -run TestAnswersOfOneID$", "merged: ",
	},
	{
		"store: an answer that was replaced is merged", "store/answers.go",
		[]edit{{"if m.by[e.key] == nil && other.by[e.key] == e {", "if m.by[e.key] == nil {"}},
		"./store -run TestAnswersOfOneID$", "merged into nothing",
	},
	{
		"store: followers are not told of answers after all others have ended", "store/answers.go",
		[]edit{{"\tm.leave(of, b)\n\tif m.n == 0 {\n\t\t*m = answers{end: m.end}\n\t}", "\tm.leave(of, b)\n\tif m.n == 0 {\n\t\t*m = answers{}\n\t}"}},
		"./store -run TestAnswersAfterAllHaveEnded$", "c: the copy holds",
	},
	{
		"store: a known key is banned where the count is lost", "store/ban.go",
		[]edit{{" || part.lostOf(rule, now).is {", " {"}},
		"./store -run TestNoBan$", "what was counted is lost, of a known key",
	},
	{
		"store: a merged ban lasts as it did", "store/ban.go",
		[]edit{{"left = min(left, to.spec.rule.Ban); to.banLeft", "to.spec.rule.Ban > 0 && to.banLeft"}},
		"./store -run TestBanMergedIsBounded$", "banned for 1h0m0s",
	},
	{
		"store: copies end loans", "store/loan.go",
		[]edit{{"if !part.open || len(part.extras.lent) == 0 {", "if len(part.extras.lent) == 0 {"}},
		"./store -run TestEndedLoansOnCopies$", "0 are held on the copy",
	},
	{
		"store: a recall ends no loan", "store/loan.go",
		[]edit{{"\t\t\tl.Recall()\n", ""}},
		"./store -run TestRecallEndsRenewal$", "renewed for 1s; called back: true",
	},
	{
		"store: a partition opens below former versions", "store/gate.go",
		[]edit{{"\t\tpart.raise()\n\t\t// Changes", "\t\t// Changes"}},
		"./store -run TestVersionOfEachChange$", "Open of what was promoted: version",
	},
	{
		"store: opening makes no version", "store/gate.go",
		[]edit{{"\t\tpart.extras.bump()\n\t\tpart.open", "\t\tpart.open"}},
		"./store -run TestVersionOfEachChange$", "Open: version",
	},
	{
		"store: an answer that is pending alone is not drained", "store/follower.go",
		[]edit{{"\tif a.answers.pending(min(f.answers, f.refunds)) {\n\t\tn++\n\t}\n", ""}},
		"./store -run TestAnswersAfterAllHaveEnded$", "nothing is pending after answer 1",
	},
	{
		"store: the newest answer is not pending", "store/answers.go",
		[]edit{{"m.newest.turn >= turn }", "m.newest.turn > turn }"}},
		"./store -run TestAnswersAfterAllHaveEnded$", "nothing is pending after answer 1",
	},
	{
		"store: of two losses for strict rules the earlier counts after a merge", "store/merge.go",
		[]edit{{"other.at.Mono > m.base.extras.coldStrict.at.Mono", "other.at.Mono < m.base.extras.coldStrict.at.Mono"}},
		"./store -run TestMergeOfLosses$", "strict at 1m1s: 100 are left",
	},
	{
		"store: followers are not told which reservations a merge has added", "store/merge.go",
		[]edit{{"\t\t\tf.reservations = append(f.reservations, k)\n", "\t\t\t_ = k\n"}},
		"./store -run TestMergeFollowers$", "the copy has",
	},
	{
		"store: a record on which something is owed after a merge is not marked", "store/merge.go",
		[]edit{{"\t\tm.sh.record(m.base.ref(slot)).set(owedFlag)\n", "\t\t_ = slot\n"}},
		"./store -run TestMergeOfWhatIsOwed$", "the record is not marked",
	},
	{
		"store: what the other side's holder may have admitted is not owed after a merge", "store/merge.go",
		[]edit{{"max(was.advanced, o.advanced)", "was.advanced"}},
		"./store -run TestMergeOfWhatIsOwed$", "that are owed",
	},
	{
		"store: what the other side has inherited is not owed after a merge", "store/merge.go",
		[]edit{{"max(was.inherited, o.inherited)", "was.inherited"}},
		"./store -run TestMergeOfWhatIsOwed$", "that are owed",
	},
	{
		"store: a key of which nothing could be lent stays", "store/loan.go",
		[]edit{{"\tif !found && !known && a.Charged == 0 {\n\t\tsh.drop(&part.table, slot)\n\t}\n", ""}},
		"./store -run TestLendToAnUnknownKey$", "1 keys are left where nothing could be lent",
	},
	{
		"runner: a node leaves before it has a view", "cluster/runner/runner.go",
		[]edit{{"leaving && k.viewed && !k.seen.Leaving {", "leaving && !k.seen.Leaving {"}},
		"./cluster/runner -run TestDrain$", "the core was given a view that nobody has",
	},
	{
		"runner: a route that has come back to what it was is waited for", "cluster/runner/runner.go",
		[]edit{{"\tif &r.Route != old {\n", "\tif r.Route != *old {\n"}},
		"./cluster/runner -run TestRoutes$", "a route that is out of date is waited for",
	},
	{
		"cluster: the ring stays when as many others take the places of its members", "cluster/view.go",
		[]edit{{"if table == nil || !slices.Equal(table.Members(), names) {", "if table == nil || len(table.Members()) != len(names) {"}},
		"./cluster -run TestView$", "after as many others have taken their place",
	},
	{
		"cluster: a node is refused although others are there", "cluster/roster.go",
		[]edit{{"r.self.state != Joining || len(r.others) > 0 {", "r.self.state != Joining {"}},
		"./cluster -run TestRefusedAmongOthers$", "refused although another member is there",
	},
	{
		"replica: messages to two processes of a name are sent to the first", "rpc/replica/messenger.go",
		[]edit{{"envelopes[n].To == to {", "envelopes[n].To.Name == to.Name {"}},
		"./rpc/replica -run TestMessengerToldApart$", "messages wait for",
	},
	{
		"peer: what is handed on ends with the stream it came by", "rpc/peer/server.go",
		[]edit{{"context.WithTimeout(context.WithoutCancel(ctx), w.longest)", "context.WithTimeout(ctx, w.longest)"}},
		"./rpc/peer -run TestHandedOnBeyondTheStream$", "ends with the stream it came by",
	},
	{
		"limiter: what is heard by those who waited for another's question is not remembered", "limiter/route.go",
		[]edit{{"op.asked = question{charges: true, table: t, mark: mark, sent: now.Mono}", "op.asked = question{table: t, mark: mark, sent: now.Mono}"}},
		"./limiter -run TestOneAsksForAll$", "what was heard last, asked once more",
	},
	{
		"limiter: a reservation is a check where units are on loan", "limiter/route.go",
		[]edit{{"if op.Kind == OpCheck && l.borrowed(", "if l.borrowed("}},
		"./limiter -run TestReservationsBesideLoans$", "with 2 reserved",
	},
	{
		"refusal: one takes the place of another key's with the same hash", "internal/refusal/refusal.go",
		[]edit{{"set[i].hash == hash && set[i].Cost == refusal.Cost && set[i].key == k {", "set[i].hash == hash && set[i].Cost == refusal.Cost {"}},
		"./internal/refusal -run TestEqualHashes$", "key 0: ",
	},
	{
		"refusal: it is not said when one has ended", "internal/refusal/refusal.go",
		[]edit{{"\t\t\tfound.Until = e.Until\n", "\t\t\t_ = e\n"}},
		"./internal/refusal -run TestEqualHashes$", "which has ended",
	},
	{
		"transport: a link that has ended is kept", "rpc/transport/links.go",
		[]edit{{"\t\t\tl.stop()\n\t\t\tdelete(ls.links, node)", "\t\t\tl.stop()"}},
		"./rpc/replica -run TestMessengerFindsRestartedPeer$", "is sent what nobody takes",
	},
	{
		"node: partitions without an owner are the first member's", "internal/node/ownership.go",
		[]edit{{"\t\towners[p] = -1\n", ""}},
		"./internal/node -run TestOwnershipView$", "nobody is active, and has partitions",
	},
	{
		"client: recalls are ignored", "client/loans.go",
		[]edit{{"\t\t\tbook.Recalled(r.GetNumber(), r.GetGranted(), now)\n", "\t\t\t_ = r\n"}},
		"./client -run TestRecall$", "all of it to be returned",
	},
	{
		"client: a recall's granted is ignored", "client/loans.go",
		[]edit{{"book.Recalled(r.GetNumber(), r.GetGranted(), now)", "book.Recalled(r.GetNumber(), 0, now)"}},
		"./client -run TestRecall$", "all of it to be returned",
	},
	{
		"client: reports do not say what is known", "client/loans.go",
		[]edit{{"Totals: r.Totals, Known: r.Known, Want: r.Want,", "Totals: r.Totals, Want: r.Want,"}},
		"./client -run TestKnown$", "a report of what is known",
	},
	{
		"client: the clock of loans stands still while the machine is suspended", "client/loans.go",
		[]edit{{"return clock.Read(read())", "_ = clock; mono, _ := read(); return mono"}},
		"./client -run TestLoanOverASuspension$", "while the machine was suspended",
	},
}
