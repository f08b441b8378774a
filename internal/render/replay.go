package render

import (
	"io"

	"github.com/dustin/go-humanize"
)

// Replay is a line on a terminal that tells how far a replay is.
type Replay struct {
	Line
	Total int64 // bytes of the input; 0: unknown
	read  int64
	last  int64
}

// progressEvery is how many events pass between two updates of the line.
const progressEvery = 200_000

// Events notes how many events there were so far.
func (p *Replay) Events(n int64) {
	if n-p.last < progressEvery {
		return
	}
	p.last = n
	if p.Total > 0 {
		p.Show("[%s] %3d %%  %s events", Bar(p.read, p.Total), min(p.read*100/p.Total, 100), humanize.Comma(n))
		return
	}
	p.Show("%s events", humanize.Comma(n))
}

// Reading returns a reader of the input that tells how much of it was read. Both are used by one goroutine.
func (p *Replay) Reading(input io.Reader) io.Reader { return &countingReader{input, p} }

type countingReader struct {
	io.Reader
	replay *Replay
}

func (c *countingReader) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.replay.read += int64(n)
	return n, err
}
