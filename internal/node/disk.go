package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/weirlimit/weir/cluster"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/cluster/runner"
	"github.com/weirlimit/weir/internal/disk"
	"github.com/weirlimit/weir/internal/observe"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/store"
)

// openStates makes the store. If a policy is persistent, it opens the disk and loads its counters. The node is no
// member yet then, because other nodes ask a member at once for what it has.
func (n *Node) openStates() error {
	cfg := &n.cfg
	n.inbox = runner.NewInbox(ring.Partitions)
	n.clock, n.bootClock = clocks()
	n.states = limiter.NewStore(store.Config{
		MaxKeys: max(cfg.MaxKeys, 0), MaxBytes: max(cfg.MaxMemory, 0), MaxRequestIDs: cfg.MaxRequestIDs,
		Urgent:  n.inbox.Urgent,
		Changed: n.inbox.Changed, MaxReservations: cfg.MaxReservations, MaxKeyReservations: cfg.MaxKeyReservations,
		Copies: cfg.GossipPort != PortOff,
	}, false)
	if cfg.DataDir == "" || len(n.effective().NeedDirectory()) == 0 {
		return nil
	}
	if err := n.openDisk(); err != nil {
		return fmt.Errorf("data-dir: %w", err)
	}
	return nil
}

func (n *Node) openDisk() (err error) {
	alone := n.cfg.GossipPort == PortOff && n.cfg.Security.ClusterSecretFile == ""
	of := fmt.Sprintf("%016x", n.settings)
	if alone {
		of = "none" // without a cluster the disk keeps the hash key
	}
	n.disk, err = disk.Open(disk.Config{Dir: n.cfg.DataDir, Cluster: of, Name: n.cfg.Name, Boot: hostBoot(),
		Now: n.bootClock, Logger: n.log})
	if err != nil {
		return err
	}
	n.closing(func(context.Context) {
		if err := n.disk.Close(); err != nil {
			n.log.Warn("counters not closed", "error", err)
		}
	})
	if alone {
		key, err := n.disk.Key(n.hashKey.Bytes())
		if err != nil {
			return err
		}
		if n.hashKey, err = ring.ParseHashKey(key); err != nil {
			return err
		}
		n.settings = ring.SettingsFingerprint(n.hashKey)
	}
	n.restore = ownership.RestoreConfig{Disk: true, Members: n.disk.Members(), Wait: n.cfg.RestoreWait}
	if err := n.disk.Restore(n.load); err != nil {
		return err
	}
	n.log.Info("counters read", "partitions", len(n.restore.Copies), "keys", n.states.Stats().Keys, "members",
		n.restore.Members)
	n.disk.Start(func(a *ownership.BlockAck) {
		n.inbox.Receive([]ownership.Envelope{{From: ownership.DiskNode(), Message: a}})
	})
	return nil
}

// load puts a partition's copy on disk into the store.
func (n *Node) load(of disk.Copy) error {
	if of.Partition >= ring.Partitions {
		return disk.Damaged(fmt.Errorf("there are %d partitions, and none is %d", ring.Partitions, of.Partition))
	}
	for _, c := range of.Chunks {
		at := n.clock()
		at.Mono -= c.Age
		if err := n.states.Apply(of.Partition, false, at, c.Data); errors.Is(err, store.ErrFull) {
			return fmt.Errorf("the counters need more memory than max-memory and max-keys allow: raise these, or remove this folder to start without: %w", err)
		} else if err != nil {
			return fmt.Errorf("partition %d: %w", of.Partition, disk.Damaged(err))
		}
	}
	n.states.DropIdle(of.Partition, n.clock())
	n.restore.Copies = append(n.restore.Copies, of.Restored)
	return nil
}

// hostBoot returns the id of the host's boot, or "" if it is not known.
func hostBoot() string {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(id))
}

// checkReload is checkPolicies for a changed file. A file may not make the first policy persistent: the disk is opened
// at the start only.
func (n *Node) checkReload(set *policy.Set) error {
	if err := n.cfg.checkPolicies(set); err != nil {
		return err
	}
	first := set.NeedDirectory()
	if n.states == nil || n.disk != nil || n.cfg.DataDir == "" || len(first) == 0 {
		return nil
	}
	for i := range first {
		first[i].Message = "true is new, and takes a restart: this node has not opened its counters, since no policy was persistent when it started"
	}
	return first
}

// keepMembers writes the names of the members to the disk. A node that is not settled may not see all members yet, so
// it only adds names. It adds members at once, because a holder that it sees may give it a copy.
func (n *Node) keepMembers() {
	states := make(map[string]cluster.State)
	for _, name := range n.disk.Members() {
		states[name] = cluster.Active
	}
	settled := n.Settled()
	for n.ctx.Err() == nil {
		v := n.cluster.View()
		n.disk.SetMembers(toAwait(states, v))
		select {
		case <-settled:
			settled = nil
			clear(states)
		case <-v.Replaced():
		case <-n.ctx.Done():
		}
	}
}

// toAwait updates the last known states of members from a view, and returns the names of the members to wait for at the
// next start. These include lost members, whose disks may have the only counters. A member that has left has handed its
// counters over, unless this node is leaving as well: then no member may have been left to take them.
func toAwait(states map[string]cluster.State, v *cluster.View) []string {
	maps.DeleteFunc(states, func(name string, last cluster.State) bool {
		return last == cluster.Leaving && v.Member(name) == nil && v.Self.State != cluster.Leaving
	})
	for i := range v.Members {
		states[v.Members[i].Name] = v.Members[i].State
	}
	return slices.Sorted(maps.Keys(states))
}

// awaitSaved waits, on a leaving node, until the disks of other nodes have what its own disk has.
func (n *Node) awaitSaved(ctx context.Context) {
	if n.disk == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, agreeFor)
	defer cancel()
	if st := n.await(ctx, func(st runner.Status) bool { return st.Held > 0 || st.Kept == 0 }); st.Held == 0 &&
		st.Kept > 0 {
		n.log.Warn("counters may be on this disk alone", "partitions", st.Kept)
	}
}

// saveAll waits until the disk has everything that this node holds or backs up. The servers have ended, so no check is
// decided any more.
func (n *Node) saveAll(ctx context.Context) {
	st := n.await(ctx, func(st runner.Status) bool { return st.Unsaved == 0 || n.disk.Err() != nil })
	switch {
	case st.Unsaved > 0 || n.disk.Err() != nil:
		n.log.Warn("counters not saved", "partitions", st.Unsaved)
	case st.Held > 0:
		n.log.Info("counters saved", "partitions", st.Held)
	}
}

// await waits until done returns true, ctx ends, or the runner is closed. It returns the last status, or the zero
// Status of a closed runner.
func (n *Node) await(ctx context.Context, done func(runner.Status) bool) (st runner.Status) {
	for ok := true; ok; {
		if st, ok = n.runner.Status(); ok {
			ok = !done(st) && pause(ctx)
		}
	}
	return st
}

// readDisk writes the metrics of the disk, if there is one.
func (n *Node) readDisk(to observe.Lines) {
	if n.disk == nil {
		return
	}
	disk := n.disk.Stats()
	is, _ := n.runner.Status()
	to.Gauge("weir_disk_bytes", "Bytes on disk of the counters of persistent policies.", float64(disk.Bytes))
	to.Gauge("weir_disk_synced_seconds", "Time since the disk last confirmed a write.", disk.Synced.Seconds())
	to.Gauge("weir_disk_failed", "1 when counters cannot be written to disk any more.", observe.Truth(disk.Err != nil))
	to.Gauge("weir_disk_unsaved_partitions", "Partitions with changes that the disk has not confirmed.",
		float64(is.Unsaved))
	to.Gauge("weir_disk_restored_partitions", "Partitions from the disk that no node has taken in yet.",
		float64(is.Restored))
}
