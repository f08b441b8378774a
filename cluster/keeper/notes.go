package keeper

import (
	"slices"
	"strconv"

	"github.com/weirlimit/weir/cluster/ownership"
)

// noteGroup is a note that is true of several partitions.
type noteGroup struct {
	note       ownership.Note // of the first of them
	partitions []int
}

// group puts together what happened to several partitions at once and in the same way: a cluster that starts claims all
// of its partitions in one go, and that is one line in the log.
func group(notes []ownership.Note) []noteGroup {
	var groups []noteGroup
	at := make(map[ownership.Note]int)
	for _, n := range notes {
		key := n
		key.Partition = 0
		i, ok := at[key]
		if !ok {
			i = len(groups)
			at[key] = i
			groups = append(groups, noteGroup{note: n})
		}
		groups[i].partitions = append(groups[i].partitions, n.Partition)
	}
	return groups
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
