package mutants

// What notices a mutant.
const (
	seeds     = "./test/simulation -run TestSeeds$ -most 1 -weather "
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

var mutants = []mutant{
	{
		"ownership: decide without a token", core,
		[]edit{{"	case owner == c.cfg.Self || owner == (Node{}):\n		return Route{Standing: Unclaimed}", "	case owner == c.cfg.Self:\n		return Route{Standing: Owned}\n	case owner == (Node{}):\n		return Route{Standing: Unclaimed}"}},
		seeds + "fair,moving,crashing", "decided without being the owner",
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
		[]edit{{"m.whole || lacks(&m.base, &m.add, i)", "false"}},
		scenario + "split$", "forgotten in a merge",
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
			{"ans.by == p.holder() && p.host", "false && p.host"},
		},
		scenario + "late_answer", "an answer used past its lease",
	},
	{
		"limiter, in the simulator: an answer does not wait for the copy", service,
		[]edit{{"dec.Ticket <= p.copied[part] {", "part >= 0 {"}},
		scenario + "ticket", "admitted beyond the limit",
	},
}
