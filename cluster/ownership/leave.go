package ownership

import "maps"

// This file says which copies of a leaving node are still needed. The node may have the only copy of a partition whose
// holder is lost, and membership notices a loss after a second or two. So the node must not trust its view.
//
//  1. askForWords asks the holders of the partitions that the leaving node has copies of, every resendAfter.
//  2. onWord notes an answer. It counts for wordFor from the instant its question was sent. Other messages do not
//     count, because they may have waited in a queue while this process did not run.
//  3. present says that a holder is alive if an answer of the holder counts. Status counts a copy as Stranded if
//     neither its holder nor the process that sent it is present. The node stays while it has such copies.

// wordFor is how long an answer counts, from the instant its question was sent.
const wordFor = 5 * resendAfter

// present reports whether a process is certainly alive. On a node that does not leave, the view is enough.
func (c *Core) present(n Node) bool {
	if !c.lives(n) {
		return false
	}
	at, heard := c.words[n]
	return !c.view.Leaving || n == c.cfg.Self || heard && c.t-at < wordFor
}

// askForWords makes a leaving node ask the holders of the partitions that it has copies of. It also asks the holders of
// the partitions that only its disk may have (saved), each about all of them. Their answers say whether the disk may
// forget the partitions (heardHeld).
func (c *Core) askForWords() {
	if !c.view.Leaving || c.t-c.askedAt < resendAfter {
		return
	}
	c.askedAt = c.t
	maps.DeleteFunc(c.asked, func(_ uint64, at int64) bool { return c.t-at >= wordFor })
	asked, kept := make(map[Node]bool), make(map[Node][]int)
	for p := range c.parts {
		pt := &c.parts[p]
		if pt.held || pt.copy == (Position{}) && pt.saved == (Term{}) {
			continue
		}
		if pt.saved != (Term{}) && c.lives(pt.holder) {
			kept[pt.holder] = append(kept[pt.holder], p)
		}
		for _, n := range [...]Node{pt.copyFrom, pt.holder} {
			if c.lives(n) && n != c.cfg.Self && !asked[n] {
				asked[n] = true
				c.queries++
				c.asked[c.queries] = c.t
				c.send(n, &Query{ID: c.queries, Partitions: []int{p}}) // of no round: only its answer counts
			}
		}
	}
	for _, m := range c.view.Members {
		if parts := kept[m.Node]; len(parts) > 0 {
			c.queries++
			c.send(m.Node, &Query{ID: c.queries, Partitions: parts})
		}
	}
}

// onWord notes that a process has answered a question of askForWords.
func (c *Core) onWord(from Node, id uint64) {
	if at, ok := c.asked[id]; ok {
		c.words[from] = max(c.words[from], at)
		delete(c.asked, id)
	}
}
