package ownership

import "maps"

// A node that leaves may have the only copy of a partition whose holder is lost, and membership takes a second or two to notice
// that it is. So a node that leaves asks the holders of the partitions that it has copies of, and counts on those only that have
// answered what it asked just now: the copies of all others are Stranded, and the node stays. Whatever else it receives may have waited
// while it did not run.

// wordFor is how long it counts that a process has answered, from the question on.
const wordFor = 5 * resendAfter

// present says whether a process is there for certain.
func (c *Core) present(n Node) bool {
	if !c.lives(n) {
		return false
	}
	at, heard := c.words[n]
	return !c.view.Leaving || n == c.cfg.Self || heard && c.t-at < wordFor
}

// askForWords has a node that leaves hear from the holders of what it has copies of.
func (c *Core) askForWords() {
	if !c.view.Leaving || c.t-c.askedAt < resendAfter {
		return
	}
	c.askedAt = c.t
	maps.DeleteFunc(c.asked, func(_ uint64, at int64) bool { return c.t-at >= wordFor })
	asked := make(map[Node]bool)
	for p := range c.parts {
		pt := &c.parts[p]
		if pt.held || pt.copy == (Position{}) {
			continue
		}
		for _, n := range [...]Node{pt.copyFrom, pt.holder} {
			if c.lives(n) && n != c.cfg.Self && !asked[n] {
				asked[n] = true
				c.queries++
				c.asked[c.queries] = c.t
				c.send(n, &Query{ID: c.queries, Partitions: []int{p}}) // of no round: it is only to be answered
			}
		}
	}
}

// onWord notes that a process has answered, if what it answers is a question of askForWords.
func (c *Core) onWord(from Node, id uint64) {
	if at, ok := c.asked[id]; ok {
		c.words[from] = max(c.words[from], at)
		delete(c.asked, id)
	}
}
