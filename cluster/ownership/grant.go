package ownership

import "slices"

// This file is the holder's side of grants. A partition's strict rules are decided only under a grant: a majority of
// the voters have recorded this process as the holder under exactly its term, and the backup that it names. vote.go is
// the voter's side; DESIGN.md says why each rule is needed.
//
//   - requestGrants asks every voter each third of a lease about everything that is held, and at once about new
//     partitions.
//   - onGrantReply counts the support of each voter, from the instant its question was sent. evaluate makes a lease of
//     it: the end of the support of a majority. A voter's support counts only while the backup that it may have
//     recorded is the caught one, or none.
//   - resolve finds out, at the first grant under a term, whether the content has every strict admission so far.
//     Otherwise every key under a strict rule starts full (Data.ColdStrict).
//   - closeStrict stops deciding strict rules before the holder or the backup changes. confirmFirst waits until the
//     present backup has confirmed what they have admitted.

const (
	maxVoters = 5   // bounds the number of voters
	manyItems = 128 // in a request: more take their time
)

// grants is what a holder knows of the voters.
type grants struct {
	voters int
	epoch  uint64           // the highest that a voter has named
	urgent bool             // there are partitions that cannot wait for the next renewal
	hasty  [maxVoters]bool  // by voter: it has not been asked about them yet
	soonAt [maxVoters]int64 // by voter: no question about them before
	due    [maxVoters]int64 // by voter: when to ask about everything again
	id     uint64
	sent   []asked
}

// asked is a GrantRequest that may be answered yet.
type asked struct {
	id    uint64
	at    int64
	to    Node
	voter int
	full  bool
	items []GrantItem
}

// strictness is what a holder knows of a partition's grant.
type strictness struct {
	until   int64 // boot-clock instant of the lease's end; 0: none
	support [maxVoters]int64
	// noted is what each voter may have recorded as the backup under this term: one Node (the zero Node: no backup), or
	// several while its answer has not come; empty before it has recorded anything.
	noted [maxVoters][]Node
	asked [maxVoters]uint64 // the last request to each voter
	// whole says that the content has everything that was admitted under strict rules before this holder. resolve sets
	// it at the first grant, by the fields below, which say how the partition came here.
	whole        bool
	since        int64    // by Core.awake: when this process began to hold it, or raised its term
	earlier      bool     // a process is known to have held it before this one, or this one has had a grant
	copy         Position // of the copy that it was claimed from
	from         Node     // the holder that sent that copy
	release      Release  // with which it was handed over
	releaseWhole bool     // the giver had it whole
	wholeUnder   Term     // the last term of this process under which it was whole
	// replaced is, by voter that supports this term, the record of another process that the voter has given up for it.
	replaced [maxVoters]Record

	unguarded bool  // a majority has recorded that there is no backup to wait for
	followAt  int64 // no backup is attached before
	closed    *closed
}

// closed says since when nothing is decided under strict rules, because the partition is about to have another holder
// or backup. The present backup confirms first what was decided before: those answers wait for it, and no later backup
// can confirm them.
type closed struct {
	at        int64
	until     int64  // the lease's end, as it was
	position  uint64 // in the backup's log, of the last block that may lack a part of it
	confirmed bool   // a later block is acknowledged
}

// raised prepares for a higher term of the same process: no grant counts any more.
func (s *strictness) raised() {
	s.whole, s.until, s.unguarded, s.closed = false, 0, false, nil
	s.support, s.noted, s.asked = [maxVoters]int64{}, [maxVoters][]Node{}, [maxVoters]uint64{}
	s.replaced = [maxVoters]Record{}
}

func (g *grants) majority() int { return g.voters/2 + 1 }

// unresolved reports whether the first grant, which finds out whether a partition is whole for strict rules, is still
// expected. The partition stays here until then.
func (c *Core) unresolved(p int) bool {
	s := c.parts[p].strict
	return c.grants.voters > 0 && !s.whole && c.awake < s.since+2*int64(c.cfg.Lease)
}

// requestGrants asks the voters to record this node as the holder, or to renew their records: each third of a lease
// about everything, and at once about new partitions.
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
	g.sent = slices.DeleteFunc(g.sent, func(a asked) bool { return c.t-a.at > int64(c.cfg.Lease) })
	var all, fresh []GrantItem
	for v, name := range c.cfg.Voters {
		n, ok := c.named[name]
		full := c.t >= g.due[v]
		if !ok || !full && (!g.hasty[v] || c.t < g.soonAt[v]) {
			continue
		}
		items := &fresh
		if full {
			items = &all
		}
		if *items == nil {
			*items = c.grantItems(full)
		}
		g.soonAt[v] = c.t + resendAfter/2
		if len(*items) > manyItems && c.awaits(v, n) {
			if full {
				g.due[v] = g.soonAt[v]
			}
			continue
		}
		g.hasty[v] = false
		if full {
			g.due[v] = c.t + retryAfter // unless it answers
		}
		if len(*items) == 0 {
			continue
		}
		g.id++
		for i := range *items {
			c.parts[(*items)[i].Partition].strict.expect(v, g.id, (*items)[i].Backup)
		}
		g.sent = append(g.sent, asked{id: g.id, at: c.t, to: n, voter: v, full: full, items: *items})
		c.send(n, &GrantRequest{ID: g.id, Items: *items})
	}
}

// awaits reports whether a voter may still answer a question about many partitions. Only one such question is on its
// way at a time: otherwise a slow voter would get more work the slower it is, and never catch up.
func (c *Core) awaits(voter int, n Node) bool {
	return slices.ContainsFunc(c.grants.sent, func(a asked) bool {
		return a.voter == voter && a.to == n && len(a.items) > manyItems && c.t-a.at < int64(c.cfg.Lease)/3
	})
}

// unnamed reports whether a voter has not recorded the named backup yet.
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

// grantItems lists all held partitions, or only those that wait for a grant.
func (c *Core) grantItems(all bool) []GrantItem {
	items := []GrantItem{}
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
		g.due[a.voter] = a.at + int64(c.cfg.Lease)/3
	}
	g.epoch = max(g.epoch, r.Epoch)
	ends := a.at + int64(c.cfg.Lease)
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

// refused acts on a voter's refusal. A higher term helps where this term is of an old epoch, and where the recorded
// process is lost and its record has ended.
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

// expect notes the backup that a voter is about to record.
func (s *strictness) expect(voter int, id uint64, backup Node) {
	s.asked[voter] = id
	if !slices.Contains(s.noted[voter], backup) {
		s.noted[voter] = append(s.noted[voter], backup)
	}
}

// evaluate makes a lease of the voters' support. A voter's support counts only while the backup that it has recorded,
// or may have recorded, is right: otherwise a process that lacks the last admissions could claim the partition as its
// backup, and be believed.
func (c *Core) evaluate(p int) {
	pt := &c.parts[p]
	s := pt.strict
	if c.grants.voters == 0 || !pt.held || pt.standing != Owned || s.closed != nil {
		return
	}
	f := &pt.followers[Backup]
	support := s.support // what of it counts
	none := 0
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

// closeStrict stops deciding under strict rules.
func (c *Core) closeStrict(p int) {
	pt := &c.parts[p]
	s := pt.strict
	if s.closed == nil {
		s.closed = &closed{at: c.t, until: s.until, position: pt.followers[Backup].last}
		s.until = 0
		c.attend(p)
	}
	c.data.Lease(p, 0)
}

// openStrict decides under strict rules again, while there is a grant.
func (c *Core) openStrict(p int) {
	c.parts[p].strict.closed = nil
	c.evaluate(p)
}

// confirmFirst reports whether the backup has yet to confirm what was decided under strict rules before they were
// closed, and sends it the changes. It waits for confirmMost at most: callers wait, and the backup may be lost. The
// voters' records stay right until the lease that stood ends.
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

// setUnguarded lets answers under strict rules be given that no backup has confirmed.
func (c *Core) setUnguarded(p int) {
	c.parts[p].strict.unguarded = true
	c.data.Unguarded(p, true)
	c.out.Confirmed = append(c.out.Confirmed,
		Progress{Partition: p, Version: versionsDone, Unguarded: true, StrictToo: true})
}

// resolve finds out, at the first grant under a term, whether the content has every strict admission so far. old is the
// highest record of another process that the supporting voters have replaced: that process may have admitted last. The
// content is whole if old released the partition to this process, or if this process is old's recorded backup and
// claimed from old's copy. Otherwise every key under a strict rule starts full.
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
		c.attend(p)
	}
}

// unguard makes the voters record that a partition has no backup. Only then may answers under strict rules be given
// that no backup has confirmed. Otherwise a dropped backup that is alive could claim the partition, get the next grant,
// and lack the last admissions.
func (c *Core) unguard(p int) {
	pt := &c.parts[p]
	if c.grants.voters == 0 || pt.strict.unguarded {
		return
	}
	c.lookSoon() // to try again
	c.grants.urgent = true
}
