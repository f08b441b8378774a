package ownership

import (
	"cmp"
	"fmt"
)

// Term orders the holders of a partition: each new one has a higher term than all before it, and none is used twice.
// The zero Term is below all that are ever held: nobody has claimed yet.
type Term struct {
	Epoch uint64 // rises when a cluster cannot learn the terms that were in use before
	// N rises within an epoch. Its lower 16 bits are of the process that took it: a holder may have raised its term and been
	// lost before anybody heard of it, and whoever claims next must not take the same.
	N uint64
}

const termTag = 16

// after returns a term above t for a process.
func (t Term) after(boot uint64) Term {
	return Term{Epoch: t.Epoch, N: (t.N>>termTag+1)<<termTag | boot&(1<<termTag-1)}
}

// Compare returns -1 when t is below u, 0 when they are equal and 1 when t is above u.
func (t Term) Compare(u Term) int {
	if c := cmp.Compare(t.Epoch, u.Epoch); c != 0 {
		return c
	}
	return cmp.Compare(t.N, u.N)
}

// Less reports whether t is below u.
func (t Term) Less(u Term) bool { return t.Compare(u) < 0 }

// String returns the term as "epoch.n/process".
func (t Term) String() string {
	return fmt.Sprintf("%d.%d/%04x", t.Epoch, t.N>>termTag, t.N&(1<<termTag-1))
}
