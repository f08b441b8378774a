package algo

import (
	"sort"
	"time"
)

// Return says when units can be used again, if nothing else is admitted until then. After is 0 or more.
type Return struct {
	Units int64
	After time.Duration
}

// Returns lists when the units in use under the i-th limit can be used again, in order of time, with at most most
// elements. For a log these are the instants at which admissions leave the window. Units that come back at one instant
// are one element. The list is nil when nothing is in use, when the limit is Unlimited, and for Concurrency, whose
// units come back when they are released. s changes as by a Decide that charges nothing.
func (ls Limits) Returns(a *Arena, s State, now Instant, i, most int) (list []Return) {
	now = s.tick(now)
	ls.walk(a, s, now, func(at int, c counter, t []uint64) {
		l := &ls[at]
		if at != i || l.Algorithm == Concurrency {
			return
		}
		holds := l.holds()
		for n := l.room(c, a, t, now); n < holds && len(list) < most; {
			after := l.wait(c, a, t, now, n+1)
			// How many come back by then: most often one or all, so that a search is short from either end.
			more := int64(1)
			for n+more < holds && l.wait(c, a, t, now, min(n+2*more, holds)) <= after {
				more = min(2*more, holds-n)
			}
			if n+more < holds {
				more += int64(sort.Search(int(min(more, holds-n-more)),
					func(k int) bool { return l.wait(c, a, t, now, n+more+int64(k)+1) > after }))
			}
			list = append(list, Return{more, after})
			n += more
		}
	})
	return list
}
