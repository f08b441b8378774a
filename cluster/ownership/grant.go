package ownership

import "slices"

// This file is the holder's side of grants. A holder decides on a partition's strict rules only under a grant: a
// majority of the voters have recorded this process as the holder under exactly its term, and the backup that it names.
// vote.go is the voter's side. DESIGN.md says why each rule is needed.
//
// The path of a grant:
//
//  1. requestGrants sends a GrantRequest to every voter: each third of a lease about all held partitions, and at once
//     about partitions that wait for a grant.
//  2. onGrantReply notes the support of the voter. It lasts for a lease from the instant the request was sent.
//  3. evaluate makes a lease of the support of a majority, and passes it to Data.Lease. A voter's support counts only
//     while the backup that the voter may have recorded is the caught one, or none.
//  4. At the first grant under a term, resolve finds out whether the content has every strict charge so far. If not,
//     every key under a strict rule starts full (Data.ColdStrict).
//
// Before the holder or the backup changes, closeStrict stops decisions under strict rules. confirmFirst waits until the
// present backup has confirmed the earlier ones.
//
// Words:
//
//	support    of a voter: it has recorded this process under its present term; until when
//	noted      of a voter: the backups that it may have recorded
//	whole      of a content: resolve has run, so it has every strict charge so far, or its strict keys start full
//	named      of a follower: the requests name it as the backup (follow.go)
//	unguarded  a majority has recorded that there is no backup, so strict answers do not wait for one
//	cold       strict keys start full
//
// Other files must keep: a partition that waits for a grant sets grants.urgent; a new term of the same process calls
// strictness.raised; what drops the backup or sets its caught calls evaluate, unless the term is new.

const (
	maxVoters = 5   // bounds the number of voters
	manyItems = 128 // a voter takes long to answer a request with more items
)

// grants is what a holder knows of the voters.
type grants struct {
	voters int
	epoch  uint64           // the highest that a voter has named
	urgent bool             // some partitions cannot wait for the next renewal
	hasty  [maxVoters]bool  // by voter: the voter has not been asked about these partitions yet
	soonAt [maxVoters]int64 // by voter: no question about these partitions before
	due    [maxVoters]int64 // by voter: when to ask about all held partitions again
	id     uint64           // of the last request
	sent   []asked          // the requests that may still be answered
}

// asked is a GrantRequest that may still be answered.
type asked struct {
	id    uint64
	at    int64 // when it was sent
	to    Node
	voter int  // index into Config.Voters
	full  bool // it is about all held partitions
	items []GrantItem
}

// strictness is what a holder knows of a partition's grant.
type strictness struct {
	until   int64            // boot-clock instant of the lease's end; 0: none
	support [maxVoters]int64 // by voter: until when it supports this term
	// noted is, by voter, what the voter may have recorded as the backup under this term: one Node (the zero Node: no
	// backup), or several while its answer has not come. It is empty before the voter was asked.
	noted [maxVoters][]Node
	asked [maxVoters]uint64 // by voter: the ID of the last request
	whole bool              // set by resolve at the first grant under this term

	// How the partition came to this process; resolve reads it.
	since        int64    // by Core.awake: when this process began to hold it, or raised its term
	earlier      bool     // a process is known to have held it before this one, or this one has had a grant
	copy         Position // of the copy that it was claimed from
	from         Node     // the holder that sent that copy
	release      Release  // of the Commit with which it was handed over or merged
	releaseWhole bool     // the giver's content was whole
	wholeUnder   Term     // the last term of this process under which resolve has run
	// replaced is, by voter that supports this term, the record of another process that this process's record has
	// replaced.
	replaced [maxVoters]Record

	unguarded bool
	followAt  int64   // no backup is attached before
	closed    *closed // nil: strict rules are decided, under a grant
}

// closed is about a partition whose strict rules are not decided, because it is about to have another holder or backup.
// The present backup first confirms what was decided before: those answers wait for this backup, and no later backup
// can confirm them.
type closed struct {
	at        int64  // since when
	until     int64  // the lease's end, as it was
	position  uint64 // of the last block of the backup's log that may lack some of the earlier decisions
	confirmed bool   // the backup has acknowledged a later block
}

// raised drops what was granted under the term before, because this process takes a higher term.
func (s *strictness) raised() {
	s.whole, s.until, s.unguarded, s.closed = false, 0, false, nil
	s.support, s.noted, s.asked = [maxVoters]int64{}, [maxVoters][]Node{}, [maxVoters]uint64{}
	s.replaced = [maxVoters]Record{}
}

func (g *grants) majority() int { return g.voters/2 + 1 }

// unresolved reports whether resolve has yet to run under the present term and its grant is still expected, for two
// leases at most. Until then this node does not begin a move of the partition.
func (c *Core) unresolved(p int) bool {
	s := c.parts[p].strict
	return c.grants.voters > 0 && !s.whole && c.awake < s.since+2*leaseFor
}

// requestGrants asks the voters to record this node as the holder, or to renew their records: each third of a lease
// about all held partitions, and at once, if urgent, about those that wait for a grant.
func (c *Core) requestGrants() {
	g := &c.grants
	if g.voters == 0 {
		return
	}
	if g.urgent {
		g.urgent = false
		for v := range g.hasty {
			g.hasty[v] = true
		}
	}
	g.sent = slices.DeleteFunc(g.sent, func(a asked) bool { return c.t-a.at > leaseFor })
	for v, name := range c.cfg.Voters {
		n, ok := c.named[name]
		full := c.t >= g.due[v]
		if !ok || !full && (!g.hasty[v] || c.t < g.soonAt[v]) {
			continue
		}
		items := c.grantItems(full)
		g.soonAt[v] = c.t + resendAfter/2
		if len(items) > manyItems && c.awaits(v, n) {
			if full {
				g.due[v] = g.soonAt[v]
			}
			continue
		}
		g.hasty[v] = false
		if full {
			g.due[v] = c.t + retryAfter // onGrantReply sets a later time
		}
		if len(items) == 0 {
			continue
		}
		g.id++
		for i := range items {
			c.parts[items[i].Partition].strict.expect(v, g.id, items[i].Backup)
		}
		g.sent = append(g.sent, asked{id: g.id, at: c.t, to: n, voter: v, full: full, items: items})
		c.send(n, &GrantRequest{ID: g.id, Items: items})
	}
}

// awaits reports whether a voter may still answer a request about many partitions. At most one such request is
// unanswered at a time: otherwise a slow voter would get more work the slower it is, and never catch up.
func (c *Core) awaits(voter int, n Node) bool {
	return slices.ContainsFunc(c.grants.sent, func(a asked) bool {
		return a.voter == voter && a.to == n && len(a.items) > manyItems && c.t-a.at < leaseFor/3
	})
}

// unnamed reports whether some voter has not recorded the named backup yet.
func (c *Core) unnamed(s *strictness, f *follower) bool {
	if !f.named {
		return false
	}
	for v := range c.grants.voters {
		if n := s.noted[v]; len(n) != 1 || n[0] != f.node {
			return true
		}
	}
	return false
}

// grantItems lists all held partitions that are not frozen, or only those of them that wait for a grant, or for their
// backup to be recorded.
func (c *Core) grantItems(all bool) []GrantItem {
	var items []GrantItem
	for p := range c.parts {
		pt := &c.parts[p]
		f, s := &pt.followers[Backup], pt.strict
		if !pt.held || pt.standing != Owned || !all && s.until != 0 && (s.unguarded || f.caught) && !c.unnamed(s, f) {
			continue
		}
		i := GrantItem{Partition: p, Term: pt.term, Release: s.release}
		if f.named {
			i.Backup = f.node
		}
		items = append(items, i)
	}
	return items
}

func (c *Core) onGrantReply(from Node, r *GrantReply) {
	g := &c.grants
	at := slices.IndexFunc(g.sent, func(a asked) bool { return a.id == r.ID && a.to == from })
	if at < 0 {
		return
	}
	a := g.sent[at]
	g.sent = slices.Delete(g.sent, at, at+1)
	g.soonAt[a.voter] = c.t // it keeps up
	if len(r.Items) != len(a.items) {
		return
	}
	if a.full {
		g.due[a.voter] = a.at + leaseFor/3
	}
	g.epoch = max(g.epoch, r.Epoch)
	ends := a.at + leaseFor
	for i := range r.Items {
		item, answer := &a.items[i], &r.Items[i]
		pt := &c.parts[item.Partition]
		if !pt.held || pt.standing != Owned || pt.term != item.Term || answer.Partition != item.Partition {
			continue
		}
		if !answer.Granted {
			c.refused(item.Partition, r.Epoch, answer)
			continue
		}
		s := pt.strict
		s.support[a.voter] = max(s.support[a.voter], ends)
		if s.asked[a.voter] == a.id {
			s.noted[a.voter] = append(s.noted[a.voter][:0], item.Backup)
		}
		s.replaced[a.voter] = answer.Recorded
		c.evaluate(item.Partition)
	}
}

// refused acts on a voter's refusal. It raises the term if the term is of an old epoch, or if the recorded process is
// lost and its record has ended.
func (c *Core) refused(p int, epoch uint64, a *GrantAnswer) {
	pt := &c.parts[p]
	switch {
	case pt.term.Epoch < epoch:
		c.raise(p)
	case a.Recorded.Node != (Node{}) && a.Recorded.Node != c.cfg.Self && !a.Recorded.Term.Less(pt.term):
		pt.exceed(a.Recorded.Term)
		if a.Wait <= 0 && !c.lives(a.Recorded.Node) {
			c.raise(p)
		}
	}
}

// expect notes a backup that a voter may record, because a request names it.
func (s *strictness) expect(voter int, id uint64, backup Node) {
	s.asked[voter] = id
	if !slices.Contains(s.noted[voter], backup) {
		s.noted[voter] = append(s.noted[voter], backup)
	}
}

// evaluate makes a lease of the voters' support. A voter's support counts only while every backup that the voter may
// have recorded is the caught one, or none. Otherwise the voter might have recorded a process that lacks the last
// charges. That process could claim the partition, and the voters would believe that its content is whole.
func (c *Core) evaluate(p int) {
	pt := &c.parts[p]
	s := pt.strict
	if c.grants.voters == 0 || !pt.held || pt.standing != Owned || s.closed != nil {
		return
	}
	f := &pt.followers[Backup]
	support := s.support // the support that counts
	none := 0            // the voters that have recorded no backup
	for v := range support {
		bare := len(s.noted[v]) > 0
		for _, n := range s.noted[v] {
			if n != (Node{}) {
				bare = false
				if !f.caught || n != f.node {
					support[v] = 0
				}
			}
		}
		if bare && support[v] > c.t {
			none++
		}
	}
	counted := support
	slices.Sort(support[:])
	lease := support[maxVoters-c.grants.majority()]
	if lease <= c.t {
		lease = 0
	} else if !s.whole {
		c.resolve(p, counted)
	}
	if lease != s.until {
		s.until = lease
		c.data.Lease(p, lease)
	}
	if none >= c.grants.majority() && !f.caught && !s.unguarded {
		c.setUnguarded(p)
	}
}

// closeStrict stops decisions under strict rules, until openStrict, dropFollower of the backup, or another term.
func (c *Core) closeStrict(p int) {
	pt := &c.parts[p]
	s := pt.strict
	if s.closed == nil {
		s.closed = &closed{at: c.t, until: s.until, position: pt.followers[Backup].last}
		s.until = 0
		c.busy = true
	}
	c.data.Lease(p, 0)
}

// openStrict lets strict rules be decided again, under the grant.
func (c *Core) openStrict(p int) {
	c.parts[p].strict.closed = nil
	c.evaluate(p)
}

// confirmFirst reports whether the backup has yet to confirm what was decided before closeStrict, and sends it the
// changes. It reports this for confirmMost at most, because checks wait and the backup may be lost, and not beyond the
// end of the lease, because the confirmation counts only under the lease (vouched).
func (c *Core) confirmFirst(p int) bool {
	pt := &c.parts[p]
	s, f := pt.strict.closed, &pt.followers[Backup]
	if s == nil || s.confirmed || s.until <= c.t || !f.caught || c.t-s.at >= confirmMost || !c.data.Awaited(p) {
		return false
	}
	if !f.inFlight() && c.data.Pending(p, Backup) > 0 {
		c.drain(p, Backup)
	}
	return f.inFlight()
}

// setUnguarded lets answers under strict rules be given without a backup's confirmation.
func (c *Core) setUnguarded(p int) {
	c.parts[p].strict.unguarded = true
	c.data.Unguarded(p, true)
	c.out.Confirmed = append(c.out.Confirmed,
		Progress{Partition: p, Version: versionsDone, Unguarded: true, StrictToo: true})
}

// resolve finds out, at the first grant under a term, whether the content has every strict charge so far. old is the
// highest record of another process that the supporting voters have replaced: that process may have charged last. The
// content is whole if one of these holds:
//
//   - resolve has run under an earlier term of this process in this epoch, and old has not held the partition since, or
//     has released its whole content to this process.
//   - The voters have no record of another process, and strictness.earlier is false.
//   - old has released its whole content to this process, in this epoch.
//   - This process is old's recorded backup in this epoch, and claimed from the copy that old had sent.
//
// Otherwise every key under a strict rule starts full.
func (c *Core) resolve(p int, support [maxVoters]int64) {
	s := c.parts[p].strict
	var old Record
	certain := true
	for v := range support {
		if support[v] <= c.t {
			continue
		}
		switch r := s.replaced[v]; {
		case r.Node == (Node{}):
		case old.Term.Less(r.Term):
			old, certain = r, true
		case old.Term == r.Term && old.Backup != r.Backup:
			certain = false // the voters name different backups: none is believed
		}
	}
	epoch := c.parts[p].term.Epoch
	cold, takenOver := "", false
	switch {
	case s.wholeUnder != (Term{}) && s.wholeUnder.Epoch == epoch:
		if old.Node != (Node{}) && s.wholeUnder.Less(old.Term) &&
			(s.release != Release{old.Node, old.Term} || !s.releaseWhole) {
			cold = "another process held it since"
		}
	case old.Node == (Node{}):
		if s.earlier {
			cold = "the voters have no record of who held it"
		}
	case old.Term.Epoch != epoch:
		cold = "the voters have begun a new epoch since"
	case s.release == Release{old.Node, old.Term}:
		if !s.releaseWhole {
			cold = "it was handed over incomplete"
		}
	case certain && old.Backup == c.cfg.Self && s.from == old.Node && !s.copy.Term.Less(old.Term):
		c.data.TakeOverStrict(p, c.now.Instant)
		takenOver = true
	default:
		cold = "another process held it and its copy is not here"
	}
	if cold != "" {
		c.data.ColdStrict(p, c.now.Instant)
		c.note("strict keys start full", p, old.Node, cold)
	}
	s.whole, s.earlier, s.wholeUnder = true, true, c.parts[p].term
	if f := &c.parts[p].followers[Backup]; cold != "" || takenOver || !f.named {
		f.relabel = true // the backup must have this change before the voters record it
		c.busy = true
	}
}

// unguard makes the voters record that a partition has no backup. Only after that may answers under strict rules be
// given without a backup's confirmation (setUnguarded). Otherwise a dropped backup that is alive could claim the
// partition and get the next grant, although it lacks the last charges.
func (c *Core) unguard(p int) {
	pt := &c.parts[p]
	if c.grants.voters == 0 || pt.strict.unguarded {
		return
	}
	c.lookSoon() // to try again
	c.grants.urgent = true
}
