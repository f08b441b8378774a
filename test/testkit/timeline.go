package testkit

import (
	"slices"
	"sort"
)

// Timeline is what happens when, in virtual time. Of what happens at one instant, what was added first comes first. The zero value is empty.
type Timeline struct{ list []moment }

type moment struct {
	at int64
	do func()
}

// At adds what happens at an instant.
func (l *Timeline) At(at int64, do func()) {
	i := sort.Search(len(l.list), func(i int) bool { return l.list[i].at > at })
	l.list = slices.Insert(l.list, i, moment{at, do})
}

// Run does what happens up to an instant. It tells now each instant, and the last one in the end.
func (l *Timeline) Run(until int64, now func(int64)) {
	for len(l.list) > 0 && l.list[0].at <= until {
		next := l.list[0]
		l.list = l.list[1:]
		now(next.at)
		next.do()
	}
	now(until)
}
