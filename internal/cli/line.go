package cli

import (
	"fmt"
	"io"
	"os"

	"golang.org/x/term"
)

// progressLine is a line on a terminal that is rewritten while a command works. One goroutine at a time may use it.
type progressLine struct {
	w     io.Writer // nil: not a terminal
	shown bool
}

// newProgressLine returns a line that is written only if w is a terminal.
func newProgressLine(w io.Writer) progressLine {
	if f, ok := w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		return progressLine{w: w}
	}
	return progressLine{}
}

// Show writes the line over the last one.
func (l *progressLine) Show(format string, args ...any) {
	if l.w != nil {
		l.shown = true
		fmt.Fprintf(l.w, "\r"+format+"\x1b[K", args...)
	}
}

// Clear removes the line.
func (l *progressLine) Clear() {
	if l.shown {
		fmt.Fprint(l.w, "\r\x1b[K")
	}
}
