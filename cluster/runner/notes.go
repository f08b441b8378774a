package runner

import (
	"log/slog"
	"slices"
	"strconv"
	"time"

	"github.com/weirlimit/weir/cluster/ownership"
)

// holdNotes is how long notes wait for others that say the same: a node that joins or leaves moves some thousand
// partitions one message at a time, within a second, and that is a line or two in the log and not one for each, which
// would take processor time from the moves, here and in whatever collects the log.
const holdNotes = time.Second

// noteKind is what notes that make one line have in common.
type noteKind struct {
	what, other, detail string
}

// noteGroup is what happened to several partitions in the same way.
type noteGroup struct {
	kind       noteKind
	since      int64 // when the first came, by Config.Now
	partitions []int
	term       span
	before     span
}

// span is the terms from one to another.
type span struct{ low, high ownership.Term }

// add has the span reach to a term. none says that it is empty.
func (s *span) add(t ownership.Term, none bool) {
	if none || t.Less(s.low) {
		s.low = t
	}
	if none || s.high.Less(t) {
		s.high = t
	}
}

func (s span) String() string {
	if s.low == s.high {
		return s.low.String()
	}
	return s.low.String() + " to " + s.high.String()
}

// journal gathers notes for the log. Its zero value is ready for use.
type journal struct {
	groups []*noteGroup // in the order in which they began
}

func (j *journal) empty() bool { return len(j.groups) == 0 }

func (j *journal) add(n ownership.Note, now int64) {
	kind := noteKind{n.What, n.Other.Name, n.Detail}
	i := slices.IndexFunc(j.groups, func(g *noteGroup) bool { return g.kind == kind })
	if i < 0 {
		i = len(j.groups)
		j.groups = append(j.groups, &noteGroup{kind: kind, since: now})
	}
	g := j.groups[i]
	g.term.add(n.Term, len(g.partitions) == 0)
	g.before.add(n.Before, len(g.partitions) == 0)
	g.partitions = append(g.partitions, n.Partition)
}

// write logs the groups that have been held for long enough, or all of them.
func (j *journal) write(log *slog.Logger, now int64, all bool) {
	j.groups = slices.DeleteFunc(j.groups, func(g *noteGroup) bool {
		if !all && now-g.since < int64(holdNotes) {
			return false
		}
		args := []any{"event", g.kind.what, "count", len(g.partitions), "partitions", ranges(g.partitions), "term",
			g.term.String()}
		if g.before != (span{}) {
			args = append(args, "before", g.before.String())
		}
		if g.kind.other != "" {
			args = append(args, "other", g.kind.other)
		}
		if g.kind.detail != "" {
			args = append(args, "detail", g.kind.detail)
		}
		log.Info("ownership changed", args...)
		return true
	})
}

// maxRanges bounds what ranges writes: a line of a log is to be read.
const maxRanges = 100

// ranges writes partitions as 1,3-5,9, and the first of them only where there are very many. It sorts them in place.
func ranges(partitions []int) string {
	slices.Sort(partitions)
	var out []byte
	for i := 0; i < len(partitions); {
		if len(out) > maxRanges {
			return string(out) + " and more"
		}
		end := i
		for end+1 < len(partitions) && partitions[end+1] <= partitions[end]+1 {
			end++
		}
		if len(out) > 0 {
			out = append(out, ',')
		}
		out = strconv.AppendInt(out, int64(partitions[i]), 10)
		if partitions[end] > partitions[i] {
			out = append(out, '-')
			out = strconv.AppendInt(out, int64(partitions[end]), 10)
		}
		i = end + 1
	}
	return string(out)
}
