package testkit

import (
	"slices"
	"sort"
)

// Timeline has the events of virtual time. Events of one instant happen in the order in which they were added. The zero
// value is empty.
type Timeline struct{ list []moment }

type moment struct {
	at int64
	do func()
}

// At adds an event at an instant.
func (l *Timeline) At(at int64, do func()) {
	i := sort.Search(len(l.list), func(i int) bool { return l.list[i].at > at })
	l.list = slices.Insert(l.list, i, moment{at, do})
}

// Run runs the events up to the instant until. It calls now with the instant of each event before it, and at the end
// with until.
func (l *Timeline) Run(until int64, now func(int64)) {
	for len(l.list) > 0 && l.list[0].at <= until {
		next := l.list[0]
		l.list = l.list[1:]
		now(next.at)
		next.do()
	}
	now(until)
}
