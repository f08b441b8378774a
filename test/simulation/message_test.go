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
	replicate := func(r *ownership.Replicate) string {
		flags := ""
		if r.Begin {
			flags += " begin"
		}
		if r.Complete {
			flags += " complete"
		}
		return fmt.Sprintf("%d at %v #%x%s %d/%d %d bytes", r.Partition, r.Term, r.Sequence, flags, r.Part, r.Parts, len(r.Chunk))
	}
	text := ""
	switch m := m.(type) {
	case *ownership.Replicate:
		text = replicate(m)
	case *ownership.Commit:
		text = fmt.Sprintf("%s, known %v, released %v, merge %v, granted %v", replicate(&m.Replicate), m.Known, m.Release, m.Merge, m.Granted)
	default:
		text = strings.TrimPrefix(fmt.Sprintf("%+v", m), "&")
	}
	return kindOf(m) + " " + text
}
