package simulation

import (
	"fmt"
	"strings"

	"github.com/weirlimit/weir/cluster/ownership"
)

// kindOf is the name of a message's type.
func kindOf(m ownership.Message) string {
	return strings.TrimPrefix(fmt.Sprintf("%T", m), "*ownership.")
}

// describe writes a message for the trace.
func describe(m ownership.Message) string {
	text := ""
	switch m := m.(type) {
	case *ownership.Block:
		text = fmt.Sprintf("%d of log %d:", m.Position, m.Log)
		for _, e := range m.Entries {
			text += fmt.Sprintf(" %d at %v #%x", e.Partition, e.Term, e.Attachment)
			for _, flag := range []struct {
				is   bool
				text string
			}{{e.Begin, "begin"}, {e.Complete, "complete"}, {e.More, "more"}} {
				if flag.is {
					text += " " + flag.text
				}
			}
			text += fmt.Sprintf(" %d bytes;", len(e.Chunk))
		}
	case *ownership.Commit:
		text = fmt.Sprintf("%d at %v #%x %d bytes, known %v, merge %v, granted %v",
			m.Partition, m.Term, m.Attachment, len(m.Chunk), m.Known, m.Merge, m.Granted)
	default:
		text = strings.TrimPrefix(fmt.Sprintf("%+v", m), "&")
	}
	return kindOf(m) + " " + text
}
