package ownership

import (
	"cmp"
	"fmt"
)

// Term orders the holders of a partition: each new holder has a higher term than all before it, and no term is used
// twice. The zero Term is below every held one: the partition was never claimed.
type Term struct {
	Epoch uint64 // rises when a cluster cannot learn the terms that were in use before
	// N rises within an epoch. Its lower 16 bits are from the boot id of the process that took it: a holder may raise
	// its term and be lost before another process hears of it, and the next claimant must not take the same term.
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
