package node

import (
	"context"
	"strings"

	"github.com/weirlimit/weir/internal/observe"
)

// followed is what follows files: a reload.Watcher or a reload.Certs.
type followed interface {
	Reload()
	Err() error
	Timeouts() uint64
	Close()
}

// followedFile is one file, or several that belong together, by its name in metrics and in the log.
type followedFile struct {
	followed
	name string
}

// what names it in a sentence.
func (f followedFile) what() string {
	switch f.name {
	case "policies":
		return "policy file"
	case "envoy_configuration":
		return "envoy configuration"
	}
	return "file of the " + strings.ReplaceAll(f.name, "_", " ")
}

// files are those that the node reads again when they change.
func (n *Node) files() []followedFile {
	return append(n.ownFiles(), n.security.files()...)
}

// ownFiles are those of them that decide.
func (n *Node) ownFiles() []followedFile {
	return opened(opened(nil, n.watcher, "policies"), n.envoy.files, "envoy_configuration")
}

// files are those of them that access depends on.
func (s *security) files() []followedFile {
	all := opened(opened(nil, s.callers, "certificates"), s.peers, "peer_certificates")
	return opened(opened(all, s.access, "access"), s.gossipKeys, "gossip_keys")
}

// opened adds what follows files, unless it is nil.
func opened[F interface {
	comparable
	followed
}](all []followedFile, f F, name string) []followedFile {
	var none F
	if f == none {
		return all
	}
	return append(all, followedFile{f, name})
}

func (s *security) close() { closeFiles(s.files()) }

// closeFiles ends the watches of the files that decide. What they held stays in use.
func (n *Node) closeFiles(context.Context) { closeFiles(n.ownFiles()) }

func closeFiles(files []followedFile) {
	for _, f := range files {
		f.Close()
	}
}

// fileStates describes the files for metrics.
func (n *Node) fileStates() []observe.WatchedFile {
	var all []observe.WatchedFile
	for _, f := range n.files() {
		all = append(all, observe.WatchedFile{Name: f.name, Valid: f.Err() == nil, Timeouts: f.Timeouts()})
	}
	return all
}
