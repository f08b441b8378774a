package runner

import (
	"log/slog"
	"slices"
	"time"

	"github.com/weirlimit/weir/cluster/ownership"
)

// holdNotes is how long the journal gathers notes. A node that joins or leaves moves some thousand partitions within a
// second, one message at a time. That makes a line or two, because a line for each partition would take processor time
// from the moves.
const holdNotes = time.Second

// journal gathers notes for the log. Its zero value is ready for use.
type journal struct {
	since int64 // when the first note came, by Config.Now
	lines []journalLine
}

// journalLine is the first note of those that say the same of several partitions, with the highest term of them.
type journalLine struct {
	ownership.Note
	count int
}

func (j *journal) add(n ownership.Note, now int64) {
	if len(j.lines) == 0 {
		j.since = now
	}
	i := slices.IndexFunc(j.lines, func(l journalLine) bool {
		return l.What == n.What && l.Other.Name == n.Other.Name && l.Detail == n.Detail
	})
	if i < 0 {
		i = len(j.lines)
		j.lines = append(j.lines, journalLine{Note: n})
	}
	l := &j.lines[i]
	l.count++
	if l.Term.Less(n.Term) {
		l.Term = n.Term
	}
}

// write logs the lines once they have been held for holdNotes, or at once (all).
func (j *journal) write(log *slog.Logger, now int64, all bool) {
	if !all && now-j.since < int64(holdNotes) {
		return
	}
	for _, l := range j.lines {
		args := []any{"event", l.What, "count", l.count, "partition", l.Partition, "term", l.Term.String()}
		if l.Other.Name != "" {
			args = append(args, "other", l.Other.Name)
		}
		if l.Detail != "" {
			args = append(args, "detail", l.Detail)
		}
		log.Info("ownership changed", args...)
	}
	j.lines = nil
}
