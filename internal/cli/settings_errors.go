package cli

import (
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// flagged is an error's text, in which lines that begin with the names of settings begin with their flags: libraries know settings, and
// flags have their names.
func flagged(flags *pflag.FlagSet, err error) string {
	var b strings.Builder
	for line := range strings.Lines(err.Error()) {
		names, rest, _ := strings.Cut(line, ": ")
		list := strings.Split(names, ", ")
		if names == "duration" {
			list[0] = "for" // of weir load, which is called like this in a sentence
		}
		if rest != "" && !slices.ContainsFunc(list, func(name string) bool { return flags.Lookup(name) == nil }) {
			line = "--" + strings.Join(list, ", --") + ": " + rest
		}
		b.WriteString(line)
	}
	return b.String()
}
