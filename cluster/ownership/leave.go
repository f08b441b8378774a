package ownership

import "maps"

// A leaving node may have the only copy of a partition whose holder is lost, and membership notices a loss after a
// second or two. So the leaving node asks the holders of the partitions that it has copies of. A holder is present only
// if it has answered a question of the last wordFor; copies of all others count as Stranded, and the node stays. Other
// messages do not count: they may have waited in a queue while this process did not run.

// wordFor is how long an answer counts, from the instant its question was sent.
const wordFor = 5 * resendAfter

// present reports whether a process is certainly alive. On a node that does not leave, membership's word is enough.
func (c *Core) present(n Node) bool {
	if !c.lives(n) {
		return false
	}
	at, heard := c.words[n]
	return !c.view.Leaving || n == c.cfg.Self || heard && c.t-at < wordFor
}

// askForWords makes a leaving node ask the holders of the partitions that it has copies of, and of all that only its
// disk may have.
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
