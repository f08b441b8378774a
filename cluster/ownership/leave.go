package ownership

// A node that leaves may have the only copy of a partition whose holder is lost, and membership takes a second or two to notice
// that it is. So a node that leaves asks the holders of the partitions that it has copies of, and counts on those only that it
// has heard just now: the copies of all others are Stranded, and the node stays.

// wordFor is how long it counts that a process was heard.
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
	asked := make(map[Node]bool)
	for p := range c.parts {
		pt := &c.parts[p]
		if n := pt.copyFrom; !pt.held && pt.copy != (Position{}) && c.lives(n) && !asked[n] {
			asked[n] = true
			c.queries++
			c.send(n, &Query{ID: c.queries, Partitions: []int{p}}) // of no round: it is only to be answered
		}
	}
}
