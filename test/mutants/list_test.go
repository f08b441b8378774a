package mutants

// What notices a mutant.
const (
	seeds     = "./test/simulation -run TestSeeds$ -seeds 300 -most 1 -weather "
	loans     = "./test/simulation -run TestSeeds$ -seeds 300 -most 1"
	calls     = "./test/simulation -run TestCallSeeds$ -most 1 -calls 30 -weather "
	scenario  = "./test/simulation -run TestScenarios/"
	stops     = "./test/simulation -run TestStopSeeds$ -seeds 900"
	ownership = "./cluster/ownership -run "
)

const (
	core    = "cluster/ownership/core.go"
	claim   = "cluster/ownership/claim.go"
	follow  = "cluster/ownership/follow.go"
	logs    = "cluster/ownership/log.go"
	grant   = "cluster/ownership/grant.go"
	move    = "cluster/ownership/move.go"
	vote    = "cluster/ownership/vote.go"
	disk    = "cluster/ownership/disk.go"
	service = "test/simulation/service_test.go" // what the simulator has in the place of limiter
)

// mutants are the rules of ownership, votes, gates, loans and undo, in the order of the protocol, and then by package.
// A mutation tool does the rest, outside CI. Not in it, because nothing would change:
//
//   - A voter that is ready as soon as it has read (voter.ready): it asks, and so reads, only after it has abstained.
//     For the same reason an answer to an earlier question of the same process (Records.ID) is as good as one to the
//     last.
//   - A new epoch that is begun without a majority of answers (voter.consider): where fewer have read or are silent
//     than a majority, the others and this voter are one.
//   - A reading that takes in what voters say who have not read, or are none (voter.adopt, onRecords): the former say
//     nothing, the latter are not asked for. Likewise the epoch of a voter that has not read (onRequest): it is 0.
//   - A reading that does not compare what a record has replaced with the record (record.add): that is always lower,
//     and another process's.
//   - What voters have replaced, or were asked, outliving the term (strictness.raised): it counts beside support only,
//     of which there is none until a voter has answered anew.
//   - The receiver's second look at who is there (onOffer, onCommit): receive drops what others send, and review what
//     they have sent.
//   - A commit whose sender does not send the copy, or whose copy is not whole, of the two one (onCommit): the other is
//     noticed.
//   - A target's confirmation while strict rules are closed (acknowledged): its numbers are below every backup's.
//   - What is known of the grant of a partition that was handed over (released): whoever takes it again begins anew.
var mutants = []mutant{
	{
		"ownership: decide without a token", core,
		[]edit{{"	case owner == c.cfg.Self || owner == (Node{}):\n		return Route{Standing: Unclaimed}",
			"	case owner == c.cfg.Self:\n		return Route{Standing: Owned}\n	case owner == (Node{}):\n		return Route{Standing: Unclaimed}"}},
		seeds + "fair,moving,crashing", "decided without being the owner",
	},
	{
		"ownership: nodes whose rings differ send a check back and forth", core,
		[]edit{{"	if r.Heard == (Node{}) {", "	if true {"}},
		"./test/simulation -run TestTwoLeave/800ms-2", "or a check waits for",
	},
	{
		"ownership: a move drops what changed last", move,
		[]edit{{"	m.commit = &Commit{", "	chunk = nil\n	m.commit = &Commit{"}},
		seeds + "moving", "admitted beyond the limit",
	},
	{
		"ownership: a term is used twice", core,
		[]edit{{"	t := pt.known.after(c.cfg.Self.Boot)\n",
			"	if pt.known != (Term{}) {\n		return pt.known\n	}\n	t := pt.known.after(c.cfg.Self.Boot)\n"}},
		seeds + "moving,crashing,voting", "a term used twice",
	},
	{
		"ownership: a lease counts from receipt", grant,
		[]edit{{"	ends := a.at + leaseFor", "	ends := c.t + leaseFor"}},
		scenario + "lease_end", "two grants at a time",
	},
	{
		"vote: a record is kept for 1+2ρ", vote,
		[]edit{{"leaseFor/1_000_000*3*drift", "leaseFor/1_000_000*2*drift"}},
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
		[]edit{{"	case !r.Term.Less(i.Term):\n",
			"	case i.Release == (Release{}):\n		a.Granted = true\n		return a\n	case !r.Term.Less(i.Term):\n"}},
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
			{"if n != (Node{}) {\n				bare = false\n",
				"if n != (Node{}) {\n				bare = false\n				continue\n"},
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
		[]edit{{"r.state, now, o.units",
			"r.state, algo.Instant{Mono: now.Mono - int64(r.spec.rule.Limits[0].Window), Wall: now.Wall}, o.units"}},
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
		[]edit{{"dec.Ticket <= p.copied[part] || p.disk.has(part, dec.Ticket) {", "part >= 0 {"}},
		scenario + "ticket", "admitted beyond the limit",
	},
	{
		"ownership: a stale commit is accepted", move,
		[]edit{{"case m.Term.Less(pt.known) && m.Known.Less(pt.known):", "case false:"}},
		ownership + "TestStaleCommit", "a stale commit is answered",
	},
	{
		"ownership: a failed move goes on under the same term", move,
		[]edit{{"		pt.askAt = c.t + retryAfter\n		c.raise(p)\n",
			"		pt.askAt = c.t + retryAfter\n		pt.standing = Owned\n		c.open(p)\n"}},
		ownership + "TestFailedMove", "after a move that failed",
	},
	{
		"ownership: an error of Merge is ignored", move,
		[]edit{{"c.data.Merge(p, c.now.Instant) != nil {", "c.data.Merge(p, c.now.Instant) != nil && false {"}},
		ownership + "TestBrokenChunk", "a broken merge is answered",
	},
	{
		"ownership: anybody's copy will do for strict keys", grant,
		[]edit{{"certain && old.Backup == c.cfg.Self && s.from == old.Node && ",
			"certain && old.Backup == c.cfg.Self && "}},
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
		"ownership: support counts whose backup has no current copy", grant,
		[]edit{{"if !f.caught || n != f.node {", "if n != f.node {"}},
		ownership + "TestNewCopy", "strict rules are decided while",
	},
	{
		"ownership: what was noted of voters outlives the term", grant,
		[]edit{{"	s.support, s.noted, s.asked = [maxVoters]int64{}, [maxVoters][]Node{}, [maxVoters]uint64{}",
			"	s.support, s.asked = [maxVoters]int64{}, [maxVoters]uint64{}"}},
		ownership + "TestRaised", "no lease from two voters",
	},
	{
		"ownership: support outlives the term", grant,
		[]edit{{"	s.support, s.noted, s.asked = [maxVoters]int64{}, [maxVoters][]Node{}, [maxVoters]uint64{}",
			"	s.noted, s.asked = [maxVoters][]Node{}, [maxVoters]uint64{}"}},
		ownership + "TestRaised", "the support for the lower term counts",
	},
	{
		"ownership: a backup's attachment is not above a receiver's", follow,
		[]edit{{"	case s == Backup:\n		return pt.attached | backupBit\n", ""}},
		ownership + "TestAttachments", "is not above a move's receiver's",
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
		"ownership: what a voter has answered undoes what it answered later", vote,
		[]edit{{"ok && m.ID < r.ID", "ok && m.ID < 0*r.ID"}},
		ownership + "TestLateRecords", "an answer undoes a later one",
	},
	{
		"ownership: a node that leaves trusts its view", "cluster/ownership/leave.go",
		[]edit{{"return c.view.Leaving && c.awake-c.leftAt < lossSeen || ", "return "}},
		ownership + "TestStandstill", "a leaving node trusts its view",
	},
	{
		"ownership: nobody yields to a claimant of a lower name", claim,
		[]edit{{"			wait = retryAfter\n", ""}, {"wait = max(wait, retryAfter/2)", "_ = wait"}},
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
		"vote: who reads is not told what was replaced", vote,
		[]edit{{"				if old := v.records[p].replaced; old.Node != (Node{}) {",
			"				if old := v.records[p].replaced; false {"}},
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
		"vote: a voter takes over an epoch below one that it has heard of", vote,
		[]edit{{"fresh != nil && fresh.Epoch == v.seen:", "fresh != nil:"}},
		ownership + "TestNewEpoch$", "the epoch: got",
	},
	{
		"vote: a new epoch is not above what others have told of", vote,
		[]edit{{"max(v.seen+1, uint64(", "max(v.seen, uint64("}},
		ownership + "TestNewEpoch$", "the epoch: got",
	},
	{
		"vote: an epoch is fresh for everybody", vote,
		[]edit{{"slices.Contains(v.founders, from)", "len(v.founders) > 0"}},
		ownership + "TestFresh$", "]}, want fresh false",
	},
	{
		"vote: a voter does not hear of epochs from requests", vote,
		[]edit{{"\t\tv.seen = max(v.seen, i.Term.Epoch)\n", "\t\t_ = i\n"}},
		ownership + "TestNewEpoch$", "the epoch: got",
	},
	{
		"vote: what a process of this voter's name has recorded counts as another voter's", vote,
		[]edit{{"if !ok || name == c.cfg.Self.Name {", "if !ok {"}},
		ownership + "TestReadingOfNamesake$", "a voter of three has read the records of one other",
	},
	{
		"ownership: a content is not whole any more after two higher terms", grant,
		[]edit{{"	s.whole, s.until, s.unguarded, s.closed = false, 0, false, nil\n",
			"	if !s.whole {\n		s.wholeUnder = Term{}\n	}\n	s.whole, s.until, s.unguarded, s.closed = false, 0, false, nil\n"}},
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
		ownership + "TestUnheardBackup$",
		"late true: strict rules are decided while two voters may have recorded a backup that is lost",
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
		"ownership: a grant has strict rules decided while the backup is replaced", grant,
		[]edit{{"pt.standing != Owned || s.closed != nil {", "pt.standing != Owned {"}},
		ownership + "TestAnotherBackup$", "a grant has strict rules decided while the backup is being replaced",
	},
	{
		"ownership: the message in flight confirms what was decided after it", grant,
		[]edit{{", position: pt.followers[Backup].last}", "}"}},
		ownership + "TestAnotherBackup$", "the backup was told to forget before it had everything",
	},
	{
		"ownership: voters that differ about an earlier term are not believed about a later", grant,
		[]edit{{"old, certain = r, true", "old = r"}},
		ownership + "TestWhole$",
		"strict keys start full: true, what the lost holder may have admitted is charged: false",
	},
	{
		"ownership: what was merged incomplete is whole", grant,
		[]edit{{" || !s.releaseWhole) {", ") {"}},
		ownership + "TestWhole$",
		"strict keys start full: false, what the lost holder may have admitted is charged: false",
	},
	{
		"ownership: a record of an earlier epoch is believed", grant,
		[]edit{{"\tcase old.Term.Epoch != epoch:\n\t\tcold = \"the voters have begun a new epoch since\"\n", ""}},
		ownership + "TestWhole$",
		"strict keys start full: false, what the lost holder may have admitted is charged: false",
	},
	{
		"ownership: a backup is not told what was taken over", grant,
		[]edit{{"\t\ttakenOver = true\n", "\t\ttakenOver = false\n"}},
		ownership + "TestWhole$", "the backup is told of what has changed: got false",
	},
	{
		"ownership: an offer under a lower term than a living holder's is accepted", move,
		[]edit{{"!pt.held && o.Term.Less(pt.known) && pt.holder != from && c.lives(pt.holder):", "false:"}},
		ownership + "TestArriving$", "an offer under a lower term than another's is answered",
	},
	{
		"ownership: a partition is given away before its backup has confirmed", move,
		[]edit{{"inFlight() && (m.slot == Backup || !c.confirmFirst(p)) &&", "inFlight() &&"}},
		ownership + "TestMoveConfirmsFirst$", "and given away before the backup has confirmed what was decided",
	},
	{
		"ownership: a partition is given away before the copy is whole", move,
		[]edit{{"f.node == m.to && f.caught && !f.inFlight() &&", "f.node == m.to && !f.inFlight() &&"}},
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
		"ownership: a commit is taken for another attachment's copy", move,
		[]edit{{"in.sender == from && m.Attachment == in.attachment &&", "in.sender == from &&"}},
		ownership + "TestUnfitCommit$", "owned: true, want false",
	},
	{
		"ownership: a taken over partition's term is not above what the giver knew of", move,
		[]edit{{"\t\tc.learn(p, m.Known, Node{})\n", ""}},
		ownership + "TestGivenTerm$", "merge false",
	},
	{
		"ownership: two copies share numbers", follow,
		[]edit{{"\tpt.attached++\n", ""}},
		ownership + "TestAnotherAttachment$", "the first copy begins with",
	},
	{
		"ownership: a lease outlives the backup on record", follow,
		[]edit{{"\tc.evaluate(p)\n\tc.unguard(p)\n", "\tc.unguard(p)\n"}},
		ownership + "TestUnheardBackup$",
		"late false: strict rules are decided while two voters may have recorded a backup that is lost",
	},
	{
		"ownership: every piece of a chunk completes a copy", follow,
		[]edit{{"Complete: last && !f.complete && !more,", "Complete: last && !f.complete,"}},
		ownership + "TestLargeChunk$", "completes true",
	},
	{
		"ownership: a change is made to another attachment's copy", follow,
		[]edit{{"case in.sender != from || in.attachment != e.Attachment:", "case in.sender != from:"}},
		ownership + "TestCopyOf$", "of another attachment: answered",
	},
	{
		"ownership: a gap in a log is not seen", logs,
		[]edit{{"next := &in.early[(in.position+1)%maxEarly]", "next := &in.early[b.Position%maxEarly]"}},
		ownership + "TestBlockOrder$", "block 3: answered",
	},
	{
		"ownership: a late answer of another log confirms blocks", logs,
		[]edit{{"return l.to == from && l.number == a.Log", "return l.to == from"}},
		ownership + "TestAcknowledged$", "confirmed without the backup",
	},
	{
		"ownership: the message in flight confirms what is decided until it is", follow,
		[]edit{{"f.last > closed.position {", "f.last >= closed.position {"}},
		ownership + "TestAnotherBackup$", "the backup was told to forget before it had everything",
	},
	{
		"ownership: answers do not wait for a new backup", follow,
		[]edit{{"\t\t\tc.data.Unguarded(p, false)\n\t\t\tpt.strict.unguarded = false\n",
			"\t\t\tpt.strict.unguarded = false\n"}},
		ownership + "TestUnheardBackup$", "late true: answers do not wait while two voters may have recorded a backup",
	},
	{
		"ownership: of two holders the lower term counts", claim,
		[]edit{{"held == nil || held.Term.Less(info.Term)", "held == nil || info.Term.Less(held.Term)"}},
		ownership + "TestClaimFrom$", "held by two, it is asked at",
	},
	{
		"ownership: a copy of an earlier term is the newer one", claim,
		[]edit{{"\tif a.Term != b.Term {\n\t\treturn a.Term.Less(b.Term)\n\t}\n", ""}},
		ownership + "TestClaimFrom$", "owned: true, want false",
	},
	{
		"ownership: who is entrusted late claims", claim,
		[]edit{{"\tif e.Term.Less(pt.known) {\n\t\treturn", "\tif false {\n\t\treturn"}},
		ownership + "TestEntrusted$", "owned: true, want false",
	},
	{
		"ownership: part of a copy is claimed", claim,
		[]edit{{"\t\tc.data.Discard(p) // a copy", "\t\t_ = c.data // a copy"}},
		ownership + "TestClaimWithout$", "part of a copy: starts full: true, and has map",
	},
	{
		"ownership: what a process holds that only members see is claimed", claim,
		[]edit{{"	case c.mayHold(p, r) || c.strange(pt.holder):", "	case c.mayHold(p, r):"}},
		ownership + "TestUnseenHolder", "owned: true, want false",
	},
	{
		"ownership: a backup stays named under a higher term", core,
		[]edit{{"pt.followers[s].relabel, pt.followers[s].named, pt.followers[s].clean = true, false, false",
			"pt.followers[s].relabel, pt.followers[s].clean = true, false"}},
		ownership + "TestRaisedAgain$", "under a higher term: a lease for -",
	},
	{
		"store: a merge keeps strict ids that nobody was answered", "store/merge.go",
		[]edit{{"	add.forgetUnshared(base)\n", ""}},
		"./store -run TestMergeForgetsStrictIDs", "units in use after the repetitions",
	},
	{
		"store: a merge drops request ids", "store/merge.go",
		[]edit{{"	base.unite(add, m.now.Mono, m.sh.store.answerBounds(), &m.sh.budget)\n", ""}},
		"./store -run TestMergeRequestIDs", "want it to be known",
	},
	{
		"store: a copy knows of no reservations", "store/apply.go",
		[]edit{{"		all.put(of, r.hash(), e.reservation, e.caller, holds[i], b)\n", "		_, _, _ = of, i, e\n"}},
		seeds + "moving", "a reservation forgotten",
	},
	{
		"store: a copy ends what its holder has not released", "store/reservation.go",
		[]edit{{"		case e.until > now.Mono, e.release && !part.open:", "		case e.until > now.Mono:"}},
		"./store -run TestReleaseByTheHolder", "the copy has 0 reservations, want 1",
	},
	{
		"store: a copy keeps a reservation that is over for the holder", "store/apply.go",
		[]edit{{"	all.forget(of, b)\n", ""}},
		"./store -run TestReservationEndsWithHolders", "cancelled after its end",
	},
	{
		"store: a reservation gives back units of a state that was converted", "store/shard.go",
		[]edit{{"		c.lose(r)\n", ""}},
		"./store -run TestUndoAcrossStores", "Returned",
	},
	{
		"store: a bucket's low is not lowered before a charge", "store/reservation.go",
		[]edit{{"		r.spec.rule.Limits.Lower(r.state, now, p.holds)\n", "		_ = p\n"}},
		"./store -run TestUndoAcrossStores", ", want [{",
	},
	{
		"store: a commit gives back all", "store/settle.go",
		[]edit{{"reserved.holds, i, n)", "reserved.holds, i, reserved.list[i].units)"}},
		seeds + "fair", "admitted beyond the limit",
	},
	{
		"store: a cancel leaves a unit behind", "store/settle.go",
		[]edit{{"reserved.holds, i, n)", "reserved.holds, i, max(n-1, 0))"}},
		seeds + "fair", "refused without need",
	},
	{
		"limiter: late strict answers are used", "limiter/before.go",
		[]edit{{"out.until != 0 && out.Lease <= 0;", "false;"}},
		"./limiter -run TestAnswersUnderLease", "1.001s back",
	},
	{
		"limiter: a lease is not shortened by the error of clocks", "limiter/route.go",
		[]edit{{"boot + int64(limit.Shortened(out.Lease))", "boot + int64(out.Lease+0*limit.Shortened(out.Lease))"}},
		"./limiter -run TestAnswersUnderLease", "999ms back",
	},
	{
		"limiter: a lease counts from receipt", "limiter/route.go",
		[]edit{{"boot + int64(limit.Shortened(out.Lease))",
			"l.cfg.BootClock() + int64(limit.Shortened(out.Lease)) + boot*0"}},
		"./limiter -run TestAnswersUnderLease", "300ms back",
	},
	{
		"loan: what is on loan is free", "algo/decide.go",
		[]edit{{"return max(room-r.OnLoan, 0)", "return room"}},
		"./algo -run TestLoans$", "are more than the limit",
	},
	{
		"loan: what is on loan of a bucket is free", "algo/bucket.go",
		[]edit{{"	if r.OnLoan > 0 {", "	if false {"}},
		"./algo -run TestLoans$", "are more than the limit",
	},
	{
		"loan: an end charges nothing", "algo/loan.go",
		[]edit{{"ls.Charge(a, s, at, n)", "ls.Charge(a, s, at, 0)"}},
		"./algo -run TestLoans$", "were admitted in one window",
	},
	{
		"loan: an end is dated at the grant", "algo/loan.go",
		[]edit{{"	at := Instant{Mono: l.Until, Wall: now.Wall - (now.Mono - l.Until)}",
			"	at := Instant{Mono: l.Until - owned(LoanTerm), Wall: now.Wall}\n	s[0] = uint64(min(int64(s[0]), at.Mono))"}},
		"./algo -run TestLoans$", "FAIL",
	},
	{
		"loan: a report is charged before it came", "algo/loan.go",
		[]edit{{"	if n, err = ls.chargeLent(a, s, now, n)", "	if n, err = ls.chargeLent(a, s, now, 0)"}},
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
		"loan: copies know of none", "store/chunk.go",
		[]edit{{"	if l := d.part.loansOf(r); l != nil {", "	if l := d.part.loansOf(r); l != nil && false {"}},
		"./store -run TestLoanMoves", "FAIL",
	},
	{
		"loan: copies drop what they are told of them", "store/apply.go",
		[]edit{{"	l.Loans = loans\n", "	_ = loans\n"}},
		loans, "units on loan that their owner does not hold",
	},
	{
		"loan: who takes over a partition forgets them", "store/content.go",
		[]edit{{"func (s *Store) TakeOver(p int, now algo.Instant) {\n",
			"func (s *Store) TakeOver(p int, now algo.Instant) {\n	s.with(p, func(sh *shard, part *partition) {\n		if part.extras != nil {\n			for of := range part.extras.lent {\n				part.dropLent(of, &sh.budget)\n			}\n		}\n	})\n"}},
		"./store -run TestLoanCrash$", "FAIL",
	},
	{
		"loan: an older report undoes a newer", "algo/loan.go",
		[]edit{{"max(t.Spent, v.Spent), max(t.Returned, v.Returned),\n\t\tmax(t.Checks, v.Checks)}", "v.Spent, v.Returned,\n\t\tv.Checks}"}},
		loans, "totals of a loan that fell",
	},
	{
		"loan: more is returned than there was", "algo/loan.go",
		[]edit{{"	l.Totals = had.unite(t)\n", "	l.Totals = had.unite(t)\n	l.Returned += t.Returned / 2\n"}},
		loans, "totals of a loan that fell",
	},
	{
		"loan: a refusal does not say that units are on loan", "store/loan.go",
		[]edit{{"answer.OnLoanFor = p.request.OnLoan, p.request.OnLoanFor\n", "answer.OnLoanFor = 0, 0\n"}},
		loans, "refused before all on loan was asked for",
	},
	{
		"loan: they end late", "algo/loan.go",
		[]edit{{"l.Until <= now.Mono && !l.Ended &&", "l.Until+int64(loanGrace) <= now.Mono && !l.Ended &&"}},
		loans, "on loan after the load",
	},
	{
		"loan: what a bucket has on loan is repaid", "algo/bucket.go",
		[]edit{{"		full = mul(max(capacity-r.OnLoan, 0), window)",
			"		full = mul(max(capacity-r.OnLoan/2, 0), window)"}},
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
		[]edit{{"	if a.Term > 0 && rule.Durability >= Escrow {",
			"	if a.Term > 0 && rule.Durability >= Escrow && a.Granted != before.Granted {"}},
		"./store -run TestLendOnlyWhatIsCopied", "renewed before the copy knows",
	},
	{
		"loan: nobody is asked before a refusal", "limiter/decide.go",
		[]edit{{"	if got.OnLoan > 0 && !op.recalled {", "	if false {"}},
		"./limiter -run TestRecallBeforeRefusal", "13 of 16 on loan are back",
	},
	{
		"loan: a borrower keeps what it gives back", "internal/lend/borrow.go",
		[]edit{{"max(l.left.Swap(0), 0)", "max(l.left.Load(), 0)"}},
		calls + "calmly", "FAIL",
	},
	{
		"loan: the borrower's deadline counts from the answer", "internal/lend/borrow.go",
		[]edit{{"sent+int64(a.Term), now)", "now+int64(a.Term), now)"}},
		"./internal/lend -run TestDeadline", "at 501",
	},
	{
		"loan: the clock is read before units are taken", "internal/lend/borrow.go",
		[]edit{{"	if left, ok = l.take(n); !ok {\n		return nil, 0, false\n	}\n	if now() >= l",
			"	at := now()\n	if left, ok = l.take(n); !ok {\n		return nil, 0, false\n	}\n	if at >= l"}},
		"./internal/lend -run TestClockIsReadLast$", "admitted at the end of the loan",
	},
	{
		"loan: what was reported spent is taken for confirmed", "internal/lend/borrow.go",
		[]edit{{"max(l.known, min(a.Spent, l.granted-l.returned))", "max(l.known, l.said.Spent)"}},
		"./internal/lend -run TestKnownIsWhatAnswersConfirm$", "Known:7",
	},
	{
		"loan: a borrower takes more than it has asked for", "internal/lend/borrow.go",
		[]edit{{"taken := min(more, l.asked)", "taken := more"}},
		"./limiter -run TestBorrowingInANodesName$", "were admitted of 2000",
	},
	{
		"loan: a caller borrows under any id", "gateway/grpc/borrow.go",
		[]edit{{"id: c.server.borrowerOf(c.stream.Context(), in.Borrower)", "id: in.Borrower"}},
		"./gateway/grpc -run TestBorrowersAreTheirCallersOwn$", "and reports as",
	},
	{
		"loan: a report ends a round whatever its borrower keeps", "limiter/loan.go",
		[]edit{{"if r == nil || !returned {", "if r == nil {"}},
		"./limiter -run TestReportDuringARecall$", "asked, and unanswered",
	},
	{
		"loan: nobody is asked after the first round", "limiter/loan.go",
		[]edit{{"op.recalled = over || rounds[i] == nil", "op.recalled = i >= 0"}},
		"./limiter -run TestAskedNext$", "want 2 asked",
	},
	{
		"loan: a strict rule lends without a lease", "limiter/loan.go",
		[]edit{{"Caller: op.Caller, Boot: r.boot(now)}", "Caller: op.Caller}"}},
		"./limiter -run TestLoansWaitForTheirCopy$", "with a lease until 500ms",
	},
	{
		"loan: of two ends that are known the earlier counts", "algo/loan.go",
		[]edit{{"k.Until = max(k.Until, l.Until)", "k.Until = min(k.Until, l.Until)"}},
		"./algo -run TestLoanEnds", "of both sides",
	},
	{
		"loan: more granted than known does not put off the end", "algo/loan.go",
		[]edit{{"l.Until = max(l.Until, now.Mono+owned(LoanTerm))", "_ = now"}},
		"./algo -run TestLoanEnds", "it ends a term after",
	},
	{
		"loan: what was on loan becomes leases", "algo/loan.go",
		[]edit{{"	if ls[0].Algorithm == Concurrency {\n		return 0, nil",
			"	if false {\n		return 0, nil"}},
		"./store -run TestLoanBecomesConcurrency", "of which nobody has one",
	},
	{
		"loan: a strict loan outlives the grant that it was made under", "store/loan.go",
		[]edit{{"left, quota = time.Duration(may.Until-b.Boot), algo.Quota{}", "quota = algo.Quota{}"}},
		"./test/simulation -run TestStrictLoans/cut,quota=false", "admitted beyond the limit",
	},
	{
		"loan: a strict key is divided among data planes", "store/loan.go",
		[]edit{{"left, quota = time.Duration(may.Until-b.Boot), algo.Quota{}",
			"left = time.Duration(may.Until - b.Boot)"}},
		"./test/simulation -run TestStrictLoans/killed,quota=true", "admitted beyond the limit",
	},
	{
		"loan: what no copy has confirmed is lent", "limiter/loan.go",
		[]edit{{"	a.Spent = lent.Spent\n", "	a.Granted, a.Spent = lent.Granted, lent.Spent\n"}},
		"./limiter -run TestLoansWaitForTheirCopy$", "a copy that does not answer: {Granted:16",
	},
	{
		"loan: a loan waits for no copy", "limiter/loan.go",
		[]edit{{"op.Outcome.ticket = *a, lent.Ticket\n", "op.Outcome.ticket = *a, 0\n"}},
		"./limiter -run TestLoansWaitForTheirCopy$", "0 waited",
	},
	{
		"loan: units are lent while those on loan are called back", "limiter/loan.go",
		[]edit{{" || l.loans.recalling(key):", ":"}},
		"./limiter -run TestLentAfterRecall$", "while somebody is about to decide",
	},
	{
		"loan: a node borrows in whatever name it says", "rpc/peer/server.go",
		[]edit{{"			op.Loan.Report.ID.Borrower = from // no node borrows in another's name\n",
			"			_ = from\n"}},
		"./rpc/peer -run TestLoansCross", "arrives, want",
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
		"store: a charge with a request id does not wait under escrow", "store/escrow.go",
		[]edit{{"p.rule.Persist || p.has(concernID) ||", "p.rule.Persist ||"}},
		"./store -run TestIDsOverACrash$", "again, want at most",
	},
	{
		"store: a repeated request does not wait under escrow", "store/answers.go",
		[]edit{{"	if p.rule.Durability >= Escrow {\n		// The first answer",
			"	if p.rule.Durability > Escrow {\n		// The first answer"}},
		"./store -run TestRepeatWaitsToo$", "tickets 3 and 0",
	},
	{
		"limiter: a lease is renewed under a strict rule without one", "limiter/decide.go",
		[]edit{{"op.lease, op.TTL, r.boot(now))", "op.lease, op.TTL, 0)"}},
		"./limiter -run TestRenewalsUnderLease$", "was carried out",
	},
	{
		"limiter: an excess is charged under a strict rule without a lease", "limiter/reserve.go",
		[]edit{{"		Boot: op.rule.boot(now),\n", ""}},
		"./limiter -run TestRenewalsUnderLease$", "was carried out",
	},
	{
		"limiter: strict answers are given without a copy", "limiter/route.go",
		[]edit{{"out.ticket, op.rule.Strict)", "out.ticket, false)"}},
		"./limiter -run TestAnswersSayHowTheyWaited$", "strict:",
	},
	{
		"limiter: an answer is used at the end of its lease", "limiter/before.go",
		[]edit{{"out.until != 0 && out.Lease <= 0;", "out.until != 0 && out.Lease < 0;"}},
		"./limiter -run TestAnswerAtTheEndOfALease$", "an answer until 7",
	},
	{
		"store: a loss for strict rules alone is none for those that begin full", "store/cold.go",
		[]edit{{"(!c.is || other.at.Mono", "(c.is && other.at.Mono"}},
		"./store -run TestCold$", "both after a loss",
	},
	{
		"store: the fast path decides in a partition that is shut", "store/store.go",
		[]edit{{"return part.open && part.concernsOf", "return part.concernsOf"}},
		"./store -run TestDecideKnown$", "a partition that is shut is decided",
	},
	{
		"store: a partition opens below former versions", "store/gate.go",
		[]edit{{"\t\tpart.raise()\n\t\t// Changes", "\t\t// Changes"}},
		"./store -run TestVersionOfEachChange$", "Open of what was promoted: version",
	},
	{
		"client: recalls are ignored", "client/loans.go",
		[]edit{{"\t\tl.book.Recalled(r.GetNumber(), r.GetGranted(), now)\n", "\t\t_ = r\n"}},
		"./client -run TestRecall$", "all of it to be returned",
	},
	{
		"store: an answer does not wait for the disk", "store/saved.go",
		[]edit{{"	if part.safe() == version {", "	if true {"}},
		stops, "admitted beyond the limit",
	},
	{
		"disk: entries are dated by the time since the process began", "internal/disk/disk.go",
		[]edit{{"	if was.Boot != d.cfg.Boot || was.Boot == \"\" || now+was.Offset < last {", "	if false {"}},
		"./internal/disk -run TestRestore$", "want 3 3/7: new@1m0s",
	},
	{
		"ownership: the disk forgets a partition before the next holder's disk has it", disk,
		[]edit{{" && pt.saved.Less(i.Copy.Term) {", " {"}},
		"./cluster/ownership -run TestBring$", "the holder's disk has the partition at",
	},
	{
		"ownership: a restored copy takes the place of the holder's content", disk,
		[]edit{{"	if c.data.Merge(p, c.now.Instant) != nil {\n		return Conflict\n	}\n",
			"	c.data.Shut(p)\n	c.data.Promote(p)\n	pt.followers = [3]follower{}\n"}},
		"./cluster/ownership -run TestJoin$", "joined",
	},
	{
		"ownership: the disk keeps a partition of which another process has joined the copy", disk,
		[]edit{{"	case e.Begin && e.Origin == pt.origin && !pt.term.Less(e.Term):\n		return Superseded\n", ""}},
		"./cluster/ownership -run TestOlderCopy$", "joined",
	},
	{
		"ownership: a disk forgets what it has brought before the holder's disk has it", disk,
		[]edit{{"	pt.saved = Term{} // the disk does not", "	// the disk does not"}},
		"./cluster/ownership -run TestJoin$", "others may delete",
	},
	{
		"ownership: an owner that comes back does not bring what its backup lacked", disk,
		[]edit{{"	if c.data.Pending(p, Target) == 0 {", "	if true {"}},
		"./test/simulation -run TestOwnerKilledBefore$", "got 10, want 3",
	},
	{
		"ownership: a backup's disk has a term before it has the content", follow,
		[]edit{{"fresh := e.Complete || pt.copy.Term != e.Term", "fresh := e.Complete"}},
		"./cluster/ownership -run TestSavedBackup$", "Begin:false",
	},
	{
		"ownership: a backup's disk comes before the holder's", follow,
		[]edit{{"return pt.attached | holderBit", "return pt.attached"}},
		"./cluster/ownership -run TestPositionsOfDisks$", "is not below",
	},
	{
		"store: the disk is not told what a copy takes in", "store/apply.go",
		[]edit{{"		a.sh.note(a.part, rec, 0)\n", ""}},
		"./store -run TestCopyEquals$", "on the disk",
	},
}
