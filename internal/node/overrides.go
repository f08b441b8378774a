package node

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/weirlimit/weir/internal/control"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/policy"
)

// overriding is the node's part for overrides that operators set.
type overriding struct {
	book       *control.Book
	replicator *control.Replicator
	service    *control.Overrides

	mu       sync.Mutex  // held while policies are put into force, so that the newest stay
	file     *policy.Set // the policies of the file
	inactive int         // number of overrides that are not in force
}

// openOverrides reads the overrides of the data directory, which take precedence over the policies of the file.
func (n *Node) openOverrides(file *policy.Set) error {
	name := ""
	if n.cfg.DataDir != "" {
		directory, err := control.OpenDirectory(n.cfg.DataDir)
		if err != nil {
			return fmt.Errorf("data-dir: %w", err)
		}
		n.closing(func(context.Context) {
			if err := directory.Close(); err != nil {
				n.log.Warn("data directory not closed", "error", err)
			}
		})
		name = filepath.Join(n.cfg.DataDir, control.OverridesFile)
	}
	book, err := control.OpenBook(name)
	if err != nil {
		return fmt.Errorf("data-dir: %w", err)
	}
	n.closing(func(context.Context) { n.work.Wait() }) // before the data directory closes: the replicator writes to it
	n.overrides.book, n.overrides.file = book, file
	if st := book.Stats(); st.Overrides > 0 {
		n.log.Info("overrides read", "file", name, "overrides", st.Overrides)
	}
	return nil
}

// effective returns the policies with the overrides, for the start of the node.
func (n *Node) effective() *policy.Set {
	n.overrides.mu.Lock()
	defer n.overrides.mu.Unlock()
	return n.policiesLocked(nil)
}

// openReplicator makes the part that exchanges overrides with other members, and the service for operators.
func (n *Node) openReplicator() {
	n.overrides.replicator = control.NewReplicator(control.ReplicatorConfig{
		Self: n.self(), Book: n.overrides.book, Peers: n.peers, Apply: n.applyOverrides, Now: time.Now, Logger: n.log,
		Members: n.memberNodes,
	})
	n.overrides.service = control.NewOverrides(control.OverridesConfig{
		Book: n.overrides.book, Replicator: n.overrides.replicator, Policies: n.filePolicies,
		Record: n.security.audit.Record, Now: time.Now,
		Ready: func() (bool, string) { return n.readiness.Ready() },
		Auth:  n.security.auth,
	})
}

// filePolicies returns the policies without the overrides that operators have set.
func (n *Node) filePolicies() *policy.Set {
	n.overrides.mu.Lock()
	defer n.overrides.mu.Unlock()
	return n.overrides.file
}

// setPolicies puts the policies of a changed file into force, with the overrides.
func (n *Node) setPolicies(file *policy.Set) {
	n.overrides.mu.Lock()
	n.overrides.file = file
	n.overrides.mu.Unlock()
	n.applyOverrides()
}

// applyOverrides puts changed overrides or policies into force.
func (n *Node) applyOverrides() {
	n.overrides.mu.Lock()
	defer n.overrides.mu.Unlock()
	n.limiter.SetPolicies(n.policiesLocked(n.limiter.Policies()))
}

// policiesLocked returns the policies of the file with the overrides. It logs how many overrides are not in force if
// that number has changed. before are the policies in force, or nil.
func (n *Node) policiesLocked(before *policy.Set) *policy.Set {
	list := n.overrides.book.Overrides()
	set, refused := n.overrides.file.WithOverrides(list, before)
	first := slices.IndexFunc(refused, func(err *limit.Error) bool { return err != nil })
	inactive := 0
	for _, err := range refused {
		if err != nil {
			inactive++
		}
	}
	if inactive != n.overrides.inactive && inactive > 0 {
		n.log.Warn("overrides not in force", "count", inactive, "first_policy", list[first].Policy, "first_reason",
			refused[first].Error())
	}
	n.overrides.inactive = inactive
	return set
}

// inactiveOverrides returns the number of overrides that are not in force.
func (n *Node) inactiveOverrides() int {
	n.overrides.mu.Lock()
	defer n.overrides.mu.Unlock()
	return n.overrides.inactive
}
