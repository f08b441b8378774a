package node

import (
	"context"
	"slices"
	"strings"

	"github.com/weirlimit/weir/internal/observe"
)

// followed follows files: a reload.Watcher or a reload.Certs.
type followed interface {
	Reload()
	Err() error
	Timeouts() uint64
	Close()
}

// followedFile is one file, or several that belong together.
type followedFile struct {
	followed
	name string // in metrics
	what string // in a sentence
}

// files returns the files that the node reads again when they change.
func (n *Node) files() []followedFile { return slices.Concat(n.ownFiles, n.security.files) }

// follows adds files of authentication or encryption to s.files.
func (s *security) follows(f followed, name string) {
	s.files = append(s.files, followedFile{f, name, "file of the " + strings.ReplaceAll(name, "_", " ")})
}

// closeFiles ends the watches of ownFiles. Their last contents stay in use.
func (n *Node) closeFiles(context.Context) { closeFiles(n.ownFiles) }

func closeFiles(files []followedFile) {
	for _, f := range files {
		f.Close()
	}
}

// fileStates returns the states of the files, for metrics.
func (n *Node) fileStates() []observe.WatchedFile {
	var all []observe.WatchedFile
	for _, f := range n.files() {
		all = append(all, observe.WatchedFile{Name: f.name, Valid: f.Err() == nil, Timeouts: f.Timeouts()})
	}
	return all
}
