package main

import (
	"fmt"
	"io"
	"os"

	"golang.org/x/term"
)

// terminalLine is a line on a terminal that is written again and again while a command works. It is used by one goroutine at a time.
type terminalLine struct {
	w     io.Writer // nil: not a terminal
	shown bool
}

func newTerminalLine(w io.Writer) terminalLine {
	if f, ok := w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		return terminalLine{w: w}
	}
	return terminalLine{}
}

// show writes the line in the place of the one before.
func (l *terminalLine) show(format string, args ...any) {
	if l.w != nil {
		l.shown = true
		fmt.Fprintf(l.w, "\r"+format+"\x1b[K", args...)
	}
}

// clear takes the line away.
func (l *terminalLine) clear() {
	if l.shown {
		fmt.Fprint(l.w, "\r\x1b[K")
	}
}

// bar is as much of a bar of 30 characters as part is of a positive whole.
func bar(part, whole int64) string {
	const length = 30
	done := min(part*length/whole, length)
	b := make([]byte, length)
	for i := range b {
		if b[i] = ' '; int64(i) < done {
			b[i] = '='
		}
	}
	return string(b)
}
