package cli

import (
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/term"
)

// progressLine is a line on a terminal that is written again and again while a command works. It is used by one goroutine at a time.
type progressLine struct {
	w     io.Writer // nil: not a terminal
	shown bool
}

// newProgressLine returns a line that is only written where w is a terminal.
func newProgressLine(w io.Writer) progressLine {
	if f, ok := w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		return progressLine{w: w}
	}
	return progressLine{}
}

// Show writes the line in the place of the one before.
func (l *progressLine) Show(format string, args ...any) {
	if l.w != nil {
		l.shown = true
		fmt.Fprintf(l.w, "\r"+format+"\x1b[K", args...)
	}
}

// Clear takes the line away.
func (l *progressLine) Clear() {
	if l.shown {
		fmt.Fprint(l.w, "\r\x1b[K")
	}
}

// bar is as much of a bar of 30 characters as part is of a positive whole.
func bar(part, whole int64) string {
	const length = 30
	done := int(min(part*length/whole, length))
	return strings.Repeat("=", done) + strings.Repeat(" ", length-done)
}
