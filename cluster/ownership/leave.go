package ownership

import "time"

// This file says what a leaving node waits for besides the partitions that it holds.
//
// Its copies: it may have the only copy of a partition whose holder is lost, and membership notices a loss only after
// some seconds. A live holder that sees the node leave sends Forget (wantBackup). So a copy that is still there may be
// needed, until lossSeen has passed and the view shows that its holder is alive (Status.Stranded).
//
// Its disk: it asks the holders of the partitions that only its disk may have whether their disks have them.

// lossSeen is how long after the beginning of its leave a node does not trust its view to say which holders are alive.
const lossSeen = 5 * int64(time.Second)

// stranded reports whether this node has the copy of a partition whose holder is lost, or may be.
func (c *Core) stranded(p int) bool {
	pt := &c.parts[p]
	if pt.held || pt.restored || pt.copy == (Position{}) {
		return false
	}
	return c.view.Leaving && c.awake-c.leftAt < lossSeen || !c.lives(pt.copyFrom) && !c.lives(pt.holder)
}

// askForSaved makes a leaving node ask the holders of the partitions that only its disk may have (saved), each about all
// of them. Their answers say whether the disk may forget the partitions (heardHeld).
func (c *Core) askForSaved() {
	if !c.view.Leaving || c.t-c.askedAt < resendAfter {
		return
	}
	c.askedAt = c.t
	kept := make(map[Node][]int)
	for p := range c.parts {
		if pt := &c.parts[p]; !pt.held && pt.saved != (Term{}) && c.lives(pt.holder) {
			kept[pt.holder] = append(kept[pt.holder], p)
		}
	}
	for _, m := range c.view.Members {
		if parts := kept[m.Node]; len(parts) > 0 {
			c.queries++
			c.send(m.Node, &Query{ID: c.queries, Partitions: parts}) // of no round: only its answer counts
		}
	}
}
