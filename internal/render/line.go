package render

import (
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/term"
)

// Line is a line on a terminal that is written again and again while a command works. It is used by one goroutine at a time.
type Line struct {
	w     io.Writer // nil: not a terminal
	shown bool
}

// NewLine returns a line that is only written where w is a terminal.
func NewLine(w io.Writer) Line {
	if f, ok := w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		return Line{w: w}
	}
	return Line{}
}

// Show writes the line in the place of the one before.
func (l *Line) Show(format string, args ...any) {
	if l.w != nil {
		l.shown = true
		fmt.Fprintf(l.w, "\r"+format+"\x1b[K", args...)
	}
}

// Clear takes the line away.
func (l *Line) Clear() {
	if l.shown {
		fmt.Fprint(l.w, "\r\x1b[K")
	}
}

// Bar is as much of a bar of 30 characters as part is of a positive whole.
func Bar(part, whole int64) string {
	const length = 30
	done := int(min(part*length/whole, length))
	return strings.Repeat("=", done) + strings.Repeat(" ", length-done)
}
