package checker

import (
	"fmt"
	"maps"
	"slices"
	"time"
)

// Holder is a process that holds a partition.
type Holder struct {
	Node string
	Boot uint64
}

func (h Holder) String() string { return fmt.Sprintf("%s/%d", h.Node, h.Boot) }

// Term orders the holders of a partition.
type Term struct{ Epoch, N uint64 }

func (t Term) String() string { return fmt.Sprintf("%d.%d", t.Epoch, t.N) }

// The rules of Protocol.
const (
	OneGrant   = "two grants at a time"
	OneDecider = "two deciders at a time"
	NoToken    = "decided without being the owner"
	TermReused = "a term used twice"
	TooManyHop = "too many hops"
	PastLease  = "an answer used past its lease"
	TwoTables  = "two tables for one set of members"
	Misplaced  = "not where the ring wants it"
)

// MaxHops is how often a check may be handed on.
const MaxHops = 3

// Protocol holds what nodes do to the rules of who may decide. It is told of each step at once, in order, and of
// instants on one true clock that no node can read.
type Protocol struct {
	// Sole says that nothing in this run excuses two processes that hold a partition at the same time: no split, no
	// false suspicion, no pause.
	Sole bool

	Violations []Violation

	parts  map[int]*partition
	tables map[string]table
}

type partition struct {
	holders map[Holder]Term  // that hold it now
	grants  map[Holder]int64 // until when strict rules may be decided
	tenures map[tenure]bool  // that were begun, ever
	granted map[Term]Holder  // that held a term under a grant, ever
}

type tenure struct {
	Holder
	Term
}

type table struct {
	owners string
	by     string
}

func (m *Protocol) fail(rule string, at int64, format string, args ...any) {
	m.Violations = append(m.Violations,
		Violation{rule, fmt.Sprintf("%v: ", time.Duration(at)) + fmt.Sprintf(format, args...)})
}

func (m *Protocol) at(p int) *partition {
	if m.parts == nil {
		m.parts = make(map[int]*partition)
	}
	if m.parts[p] == nil {
		m.parts[p] = &partition{make(map[Holder]Term), make(map[Holder]int64), make(map[tenure]bool),
			make(map[Term]Holder)}
	}
	return m.parts[p]
}

// Hold says that a process holds a partition from now on, under a term.
func (m *Protocol) Hold(at int64, p int, by Holder, term Term) {
	part := m.at(p)
	if t, ok := part.holders[by]; ok && t == term {
		return
	}
	if part.tenures[tenure{by, term}] {
		m.fail(TermReused, at, "partition %d: %v takes up term %v again", p, by, term)
	}
	part.tenures[tenure{by, term}] = true
	part.holders[by] = term
	if m.Sole {
		for _, other := range sorted(part.holders) {
			if other != by {
				m.fail(OneDecider, at, "partition %d: %v holds it at %v, %v at %v", p, by, term, other,
					part.holders[other])
			}
		}
		for t := range part.tenures {
			if t.Term == term && t.Holder != by {
				m.fail(TermReused, at, "partition %d: %v takes up term %v, which was %v's", p, by, term, t.Holder)
			}
		}
	}
}

// Yield says that a process does not hold a partition any more.
func (m *Protocol) Yield(p int, by Holder) {
	part := m.at(p)
	delete(part.holders, by)
	delete(part.grants, by)
}

// Gone says that a process has ended.
func (m *Protocol) Gone(by Holder) {
	for p := range m.parts {
		m.Yield(p, by)
	}
}

// Grant says that a process that holds a partition may decide strict rules until an instant of the true clock.
func (m *Protocol) Grant(at int64, p int, by Holder, until int64) {
	part := m.at(p)
	part.grants[by] = until
	if until <= at {
		return
	}
	term, holds := part.holders[by]
	if !holds {
		return // it cannot decide: Hold comes first
	}
	for _, other := range sorted(part.grants) {
		if end := part.grants[other]; other != by && end > at {
			if _, holds := part.holders[other]; holds {
				m.fail(OneGrant, at, "partition %d: %v is granted it while %v's grant runs for %v more", p, by, other,
					time.Duration(end-at))
			}
		}
	}
	if first, ok := part.granted[term]; ok && first != by {
		m.fail(TermReused, at, "partition %d: %v and %v are both granted it at %v", p, first, by, term)
	}
	part.granted[term] = by
}

// Decide says that a process has decided a check after so many hops.
func (m *Protocol) Decide(at int64, p int, by Holder, owned bool, hops int) {
	if _, holds := m.at(p).holders[by]; !owned || !holds {
		m.fail(NoToken, at, "partition %d: %v", p, by)
	}
	if hops > MaxHops {
		m.fail(TooManyHop, at, "partition %d: %v decides after %d", p, by, hops)
	}
}

// Use says that the answer to a strict check was used, and when, on the true clock, the lease under which it was
// decided ends.
func (m *Protocol) Use(at int64, p int, by Holder, end int64) {
	if at >= end {
		m.fail(PastLease, at, "partition %d: %v's, by %v", p, by, time.Duration(at-end))
	}
}

// Table says what a node takes a set of members to own.
func (m *Protocol) Table(at int64, by, members, owners string) {
	if m.tables == nil {
		m.tables = make(map[string]table)
	}
	first, ok := m.tables[members]
	if !ok {
		m.tables[members] = table{owners, by}
	} else if first.owners != owners {
		m.fail(TwoTables, at, "members %s: %s has %s, %s has %s", members, first.by, first.owners, by, owners)
	}
}

// Placed says, when faults have been over for long enough, who should hold a partition and who does.
func (m *Protocol) Placed(at int64, p int, target Holder, holders ...Holder) {
	if len(holders) != 1 || holders[0] != target {
		m.fail(Misplaced, at, "partition %d should be %v's, is held by %v", p, target, holders)
	}
}

func sorted[V any](m map[Holder]V) []Holder {
	return slices.SortedFunc(maps.Keys(m), func(a, b Holder) int {
		if a.Node != b.Node {
			if a.Node < b.Node {
				return -1
			}
			return 1
		}
		return int(a.Boot) - int(b.Boot)
	})
}
