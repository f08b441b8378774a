package node

import (
	"log/slog"
	"strings"

	"github.com/weirlimit/weir/internal/metrics"
)

// followed is what follows files: a filewatch.Watcher or a certs.Source.
type followed interface {
	Reload()
	Err() error
	Timeouts() uint64
	Close() error
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
	var all []followedFile
	if n.watcher != nil {
		all = append(all, followedFile{n.watcher, "policies"})
	}
	if n.envoy.files != nil {
		all = append(all, followedFile{n.envoy.files, "envoy_configuration"})
	}
	if n.security != nil {
		all = append(all, n.security.files()...)
	}
	return all
}

// files are those of them that access depends on.
func (s *security) files() []followedFile {
	var all []followedFile
	if s.callers != nil {
		all = append(all, followedFile{s.callers, "certificates"})
	}
	if s.peers != nil {
		all = append(all, followedFile{s.peers, "peer_certificates"})
	}
	if s.access != nil {
		all = append(all, followedFile{s.access, "access"})
	}
	if s.gossipKeys != nil {
		all = append(all, followedFile{s.gossipKeys, "gossip_keys"})
	}
	return all
}

func (s *security) close() { closeFiles(s.files(), s.log) }

// closeFiles ends the watches. What they held stays in use.
func closeFiles(files []followedFile, log *slog.Logger) {
	for _, f := range files {
		if err := f.Close(); err != nil {
			log.Warn("file watch not closed", "what", f.name, "error", err)
		}
	}
}

// fileStates describes the files for metrics.
func (n *Node) fileStates() []metrics.File {
	var all []metrics.File
	for _, f := range n.files() {
		all = append(all, metrics.File{Name: f.name, Valid: f.Err() == nil, Timeouts: f.Timeouts()})
	}
	return all
}
