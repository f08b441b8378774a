package cli

import (
	"io"

	"github.com/dustin/go-humanize"
)

// printedReplay is a line on a terminal that tells how far a replay is.
type printedReplay struct {
	progressLine
	Total int64 // bytes of the input; 0: unknown
	read  byteCount
	last  int64
}

// progressEvery is how many events pass between two updates of the line.
const progressEvery = 200_000

// Events notes how many events there were so far.
func (p *printedReplay) Events(n int64) {
	if n-p.last < progressEvery {
		return
	}
	p.last = n
	if p.Total > 0 {
		p.Show("[%s] %3d %%  %s events", bar(int64(p.read), p.Total), min(int64(p.read)*100/p.Total, 100), humanize.Comma(n))
		return
	}
	p.Show("%s events", humanize.Comma(n))
}

// Reading returns a reader of the input that tells how much of it was read. Both are used by one goroutine.
func (p *printedReplay) Reading(input io.Reader) io.Reader { return io.TeeReader(input, &p.read) }

type byteCount int64

// Write implements io.Writer.
func (c *byteCount) Write(p []byte) (int, error) {
	*c += byteCount(len(p))
	return len(p), nil
}
