package model

import (
	"flag"
	"strings"
	"sync"
	"testing"

	"github.com/weirlimit/weir/test/must"
)

var wide = flag.Bool("wide", false, "explore wider bounds: 25 million states, five minutes, two gigabytes")

// The bounds that are explored. Each is small enough for all its states to be visited, and between them they cover
// what can go together: one that had everything could not be exhausted.
func bounds() map[string]model {
	copies := model{Nodes: 3, Admissions: 2, Guarded: true, Claims: 1, Moves: 1, Crashes: 1, Gens: 2, Attaches: 1}
	escrow := copies
	escrow.Escrow = true
	return map[string]model{
		// Without voters: hand-over and copies, message by message.
		"copies": copies,
		"escrow": escrow,
		"twice":  {Nodes: 2, Admissions: 2, Guarded: true, Claims: 1, Moves: 2, Crashes: 2, Gens: 2, Attaches: 3},
		// With one voter: what a claimant takes for whole.
		"grant": {Nodes: 2, Voters: 1, Admissions: 1, Lease: 1, Guarded: true, AtomicCopies: true, Claims: 1,
			Moves: 1, Crashes: 1, Gens: 1, Attaches: 1, Requests: 3},
		"release": {Nodes: 2, Voters: 1, Admissions: 1, Lease: 1, AtomicCopies: true, Claims: 2, Moves: 1, Attaches: 1,
			Requests: 3},
		"backup": {Nodes: 3, Voters: 1, Admissions: 1, Lease: 1, Guarded: true, AtomicCopies: true, Claims: 1,
			Moves: 1, Attaches: 1, Requests: 2},
		"newcomer": {Nodes: 2, Voters: 1, Admissions: 1, Lease: 1, Guarded: true, AtomicCopies: true, Claims: 2,
			Crashes: 1, Gens: 1, Attaches: 1, Requests: 2},
		"hole": {Nodes: 2, Voters: 1, Admissions: 1, Lease: 1, Guarded: true, AtomicCopies: true, Claims: 2,
			Moves: 1, Crashes: 1, Attaches: 1, Requests: 2},
		"answer": {Nodes: 1, Voters: 1, Lease: 2, Requests: 1, Forwarding: true},
		"spend": {Nodes: 2, Voters: 1, Admissions: 2, Lease: 1, Guarded: true, Escrow: true, AtomicCopies: true,
			Claims: 1, Moves: 1, Gens: 1, Requests: 2},
		"alone": {Nodes: 2, Voters: 1, Admissions: 1, Lease: 1, Guarded: true, AtomicCopies: true, Claims: 2,
			Restarts: 2, Requests: 2},
		// With loans.
		"loans": {Nodes: 3, Admissions: 2, Guarded: true, Claims: 1, Moves: 1, Crashes: 1, Gens: 1, Attaches: 1,
			AtomicCopies: true, Loans: true},
		"loans, grant": {Nodes: 2, Voters: 1, Admissions: 1, Lease: 1, Guarded: true, AtomicCopies: true, Claims: 1,
			Moves: 1, Crashes: 1, Gens: 1, Attaches: 1, Requests: 2, Loans: true},
		// With three voters: who votes for whom, and what a voter forgets.
		"voters": {Nodes: 2, Voters: 3, Admissions: 1, Lease: 1, Guarded: true, AtomicCopies: true, Claims: 1,
			Restarts: 1, Gens: 1, Requests: 2},
		"hidden": {Nodes: 2, Voters: 3, Admissions: 1, Lease: 1, AtomicCopies: true, Claims: 3, Requests: 2},
		"epochs": {Nodes: 2, Voters: 3, Admissions: 1, Lease: 1, Guarded: true, AtomicCopies: true, Claims: 1,
			Restarts: 2, Requests: 2},
		"clocks": {Nodes: 2, Voters: 3, Admissions: 1, Lease: 2, AtomicCopies: true, LateReplies: true, Claims: 1,
			Requests: 2},
	}
}

// wideBounds take too long for every day.
func wideBounds() map[string]model {
	all := bounds()
	widen := func(name, from string, change func(*model)) {
		m := all[from]
		change(&m)
		all[name] = m
	}
	widen("copies", "copies", func(m *model) { m.Claims, m.Moves, m.Attaches = 2, 2, 2 })
	widen("escrow", "escrow", func(m *model) { m.Claims, m.Moves, m.Attaches = 2, 2, 2 })
	widen("grant, messages", "grant", func(m *model) { m.AtomicCopies, m.Requests = false, 2 })
	widen("grant, restart", "grant", func(m *model) { m.Restarts, m.Crashes, m.Requests = 1, 0, 2 })
	widen("release, restart", "release", func(m *model) { m.Restarts = 1 })
	widen("backup", "backup", func(m *model) { m.Gens = 1 })
	widen("newcomer", "newcomer", func(m *model) { m.Claims = 3 })
	widen("spend", "spend", func(m *model) { m.Claims, m.Attaches = 2, 1 })
	widen("alone", "alone", func(m *model) { m.Gens, m.Attaches = 2, 1 })
	widen("voters, claims", "voters", func(m *model) { m.Claims = 2 })
	widen("voters, moves", "voters", func(m *model) { m.Claims, m.Moves, m.Attaches, m.Restarts = 2, 1, 1, 0 })
	widen("voters, move and restart", "voters", func(m *model) { m.Moves, m.Gens = 1, 0 })
	widen("voters, newcomer", "newcomer", func(m *model) { m.Voters, m.Gens = 3, 0 })
	widen("epochs", "epochs", func(m *model) { m.Gens = 1 })
	widen("clocks, restart", "voters", func(m *model) { m.Lease, m.LateReplies, m.Gens = 2, true, 0 })
	return all
}

// TestExhaust visits every state within the bounds, with all rules kept.
func TestExhaust(t *testing.T) {
	if underRace {
		t.Skip("explorations share nothing, so there is nothing to find, and they would take minutes")
	}
	all := bounds()
	limit := 1_000_000
	if *wide {
		all, limit = wideBounds(), 20_000_000
	}
	var mu sync.Mutex
	seen := make(map[[2]string]bool)
	t.Run("bounds", func(t *testing.T) {
		for name, m := range all {
			t.Run(name, func(t *testing.T) {
				if !*wide { // these would need all the memory there is
					t.Parallel()
				}
				r := m.explore(limit)
				must.True(t, r.exhausted, "%v", r)
				t.Logf("%s: %v", name, r)
				mu.Lock()
				defer mu.Unlock()
				for what := range r.seen {
					seen[what] = true
				}
			})
		}
	})
	if *wide {
		return
	}
	// A model in which nothing happens breaks nothing: what it is about has to happen somewhere.
	for _, what := range [][2]string{
		{"settle", ": every key starts full"},
		{"settle", ", in a new epoch: every key starts full"},
		{"settle", ": its content is whole, it was the last holder itself"},
		{"settle", ": its content is whole, the last holder released it"},
		{"settle", ": its content is whole, it was the last holder's backup"},
		{"vote", ": granted"}, {"vote", ": granted, the reply is lost"}, {"vote", ": granted, the reply is late"},
		{"vote", ": refused, the epoch is over"}, {"vote", ": refused, a record stands against it"},
		{"claim", ""}, {"claim", ", believing that the receiver of its commit is gone"},
		{"read", " and votes again"}, {"read", ", which knows nothing itself"}, {"epoch", ""},
		{"decide", ""}, {"decide", " and answers"}, {"give", ""}, {"lend", ""}, {"hand", ""}, {"spend", ""},
		{"guard", ""}, {"unguard", ""},
		{"copy", ", the confirmation is lost"}, {"replicate", ""}, {"apply", ""}, {"ack", ""},
		{"commit", ""}, {"takeOver", ""}, {"released", ""}, {"crash", ""}, {"voterRestart", ""}, {"useAnswer", ""},
	} {
		if !seen[what] {
			t.Errorf("%s%s: that never happened", what[0], what[1])
		}
	}
}

// TestRules leaves out one rule at a time. Each is needed: without it something breaks, and the shortest way there is
// shown.
func TestRules(t *testing.T) {
	if underRace {
		t.Skip("explorations share nothing, so there is nothing to find, and they would take minutes")
	}
	const (
		lost  = "without an admission that was acknowledged"
		two   = "both hold a valid grant"
		reuse = "one term was granted to two processes"
		late  = "an answer was used past its lease"
	)
	all := bounds()
	with := func(name string, change func(*model)) model {
		m := all[name]
		change(&m)
		return m
	}
	oneRequest := func(m *model) { m.Requests = 1 }
	for _, c := range []struct {
		name   string
		rule   rule
		bounds model
		breaks string
	}{
		{"rule 1 countPerTerm", countPerTerm, all["grant"], two},
		{"rule 2 checkRenewals", checkRenewals, all["grant"], two},
		{"rule 3 exactRelease", exactRelease, all["release"], two},
		{"rule 4 readRecords", readRecords, with("voters", oneRequest), lost},
		{"rule 4 risingTerms", risingTerms, all["copies"], reuse},
		{"rule 5 abstain", abstain, with("voters", oneRequest), two},
		{"leaseFromSending", leaseFromSending, all["grant"], two},
		{"longRecord", longRecord, all["clocks"], two},
		{"boundFromQuestion", boundFromQuestion, all["answer"], late},
		{"abstainFirst", abstainFirst, with("voters", oneRequest), lost},
		{"coldEpoch", coldEpoch, with("epochs", func(m *model) { m.Gens, m.Requests = 1, 1 }), lost},
		{"clockEpochs", clockEpochs, with("epochs", oneRequest), lost},
		{"guardRecorded", guardRecorded, all["grant"], lost},
		{"guardAfterGrant", guardAfterGrant, all["newcomer"], lost},
		{"marksTravel", marksTravel, all["newcomer"], lost},
		{"orderedGens", orderedGens, all["voters"], lost},
		{"readGens", readGens, all["voters"], lost},
		{"repeatReplaced", repeatReplaced, with("voters", oneRequest), lost},
		{"copyIdentity", copyIdentity, all["newcomer"], lost},
		{"wholeRelease", wholeRelease, all["hole"], lost},
		{"holeKnown", holeKnown, all["hidden"], lost},
		{"freeze", freeze, all["copies"], lost},
		{"freeze, under a grant", freeze, all["grant"], lost},
		{"finalDrain", finalDrain, all["copies"], lost},
		{"finalDrain, under a grant", finalDrain, all["grant"], lost},
		{"stageCopies", stageCopies, all["copies"], lost},
		{"ackAfterApply", ackAfterApply, all["copies"], lost},
		{"chargeEscrow", chargeEscrow, all["escrow"], lost},
		{"chargeEscrow, under a grant", chargeEscrow, all["spend"], lost},
		{"backupConfirms", backupConfirms, all["backup"], lost},
		{"commitTerm", commitTerm, all["copies"], reuse},
		{"commonVersion", commonVersion, all["copies"], lost},
		{"commonVersion, of escrow", commonVersion, all["escrow"], lost},
		{"risingSequence", risingSequence, all["twice"], lost},
		{"promiseOnQuery", promiseOnQuery, all["copies"], reuse},
		{"lendAfterCopy", lendAfterCopy, all["loans"], lost},
		{"lendAfterCopy, under a grant", lendAfterCopy, all["loans, grant"], lost},
		{"loansTravel", loansTravel, all["loans"], lost},
		{"loansTravel, under a grant", loansTravel, all["loans, grant"], lost},
		{"endCharges", endCharges, all["loans"], lost},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			m := c.bounds
			m.Without = c.rule
			r := m.explore(1_000_000)
			must.True(t, strings.Contains(r.broken, c.breaks), "expected %q: %v", c.breaks, r)
			t.Logf("without %s: %v", c.name, r)
		})
	}
}

// TestPack reads states back as they were written.
func TestPack(t *testing.T) {
	m := bounds()["voters"]
	level := []state{m.initial()}
	for range 4 {
		var next []state
		for _, s := range level {
			if got := unpack(s.pack(nil)); got != s {
				t.Fatalf("unpacked differently: %v", raw(&got))
			}
			m.successors(&s, func(_ action, to *state) { next = append(next, *to) })
		}
		level = next
	}
}
