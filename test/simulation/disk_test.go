package simulation

import (
	"fmt"
	"log/slog"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/disk"
	"github.com/weirlimit/weir/test/checker"
)

const restoreWait = 10 * second

// drive is what is left of a host's disk when a process ends.
type drive struct {
	fs   *vfs.MemFS // what was synced, and perhaps a part of what was not
	boot int        // of the host
}

// hostDisk is the disk of a running process: a disk.Disk over files in memory, each of whose writes takes a while. What
// was sent and is not written yet when the process crashes is lost.
type hostDisk struct {
	p       *process
	fs      *vfs.MemFS
	disk    *disk.Disk
	queue   []*ownership.Block
	writing bool
	members map[string]bool // see names
	settled bool            // the process has been
	saved   []uint64        // by partition: the version up to which everything is confirmed
}

// openDisk opens the host's disk, and puts what is there into the store.
func (p *process) openDisk() ownership.RestoreConfig {
	w, h := p.w, p.host
	if h.drive.fs == nil {
		h.drive.fs = vfs.NewCrashableMem()
	}
	d := &hostDisk{p: p, fs: h.drive.fs, saved: make([]uint64, w.partitions)}
	p.disk = d
	fail := func(err error) {
		w.proto.Violations = append(w.proto.Violations,
			checker.Violation{Rule: "a disk that does not open", Text: h.name + ": " + err.Error()})
	}
	var err error
	d.disk, err = disk.Open(disk.Config{
		Dir: "data", Cluster: "c", Name: h.name, Boot: fmt.Sprint(h.drive.boot), FS: d.fs,
		Logger: slog.New(slog.DiscardHandler),
		Now:    func() int64 { return h.clock().Boot },
	})
	if err != nil {
		fail(err)
		return ownership.RestoreConfig{}
	}
	r := ownership.RestoreConfig{Disk: true, Members: d.disk.Members(), Wait: time.Duration(restoreWait)}
	err = d.disk.Restore(func(of disk.Copy) error {
		for _, c := range of.Chunks {
			at := h.clock().Instant
			at.Mono -= c.Age
			if err := p.data.Apply(of.Partition, false, at, c.Data); err != nil {
				return err
			}
		}
		p.data.DropIdle(of.Partition, h.clock().Instant)
		p.data.parts[of.Partition].there = true
		r.Copies = append(r.Copies, of.Restored)
		return nil
	})
	if err != nil {
		fail(err)
	}
	p.later(200*millisecond, d.keepMembers)
	w.say("%s has %d partitions on disk, and knew %v", h.name, len(r.Copies), r.Members)
	return r
}

func (d *hostDisk) send(b *ownership.Block) {
	if b != nil {
		d.queue = append(d.queue, b)
	}
	if !d.writing {
		d.writing = true
		d.p.later(d.p.w.rng.Int64N(20*millisecond), d.write)
	}
}

func (d *hostDisk) write() {
	p := d.p
	d.writing = false
	blocks := d.queue
	d.queue = nil
	d.disk.SetMembers(d.names())
	if ack := d.disk.Write(blocks); ack != nil {
		p.core.Receive(p.clock(), ownership.Envelope{From: ownership.DiskNode(), To: p.self, Message: ack})
		p.flush()
	}
}

// keepMembers writes the names of members as they change.
func (d *hostDisk) keepMembers() {
	if names := d.names(); !slices.Equal(names, d.disk.Members()) {
		d.disk.SetMembers(names)
		d.send(nil)
	}
	d.p.later(200*millisecond, d.keepMembers)
}

// names are the members that are to be waited for at the next start, as in internal/node: those that are seen, and
// those that are lost, unless they have left; until this process is settled also those that the disk knew.
func (d *hostDisk) names() []string {
	p := d.p
	if settled := p.state == active && p.core.Settled(); d.members == nil || settled && !d.settled {
		d.members, d.settled = make(map[string]bool), settled
		if !settled {
			for _, name := range d.disk.Members() {
				d.members[name] = true
			}
		}
	}
	for _, m := range p.view.Members {
		d.members[m.Name] = true
	}
	for _, h := range p.w.hosts {
		if h.proc == nil && h.left &&
			!slices.ContainsFunc(p.view.Members, func(m ownership.Member) bool { return m.Name == h.name }) {
			delete(d.members, h.name)
		}
	}
	return slices.Sorted(maps.Keys(d.members))
}

// has says whether the disk, and the copy, are known to have what a ticket stands for.
func (d *hostDisk) has(part int, ticket uint64) bool {
	return d != nil && ticket&ownership.Saved != 0 && ticket&^ownership.Saved <= d.saved[part]
}

func (d *hostDisk) confirmed(c ownership.Progress) {
	if c.Version != math.MaxUint64 && !c.Unguarded {
		d.saved[c.Partition] = max(d.saved[c.Partition], c.Version)
	}
}

// crash leaves what was synced on the host's drive, and perhaps a part of the rest.
func (d *hostDisk) crash() {
	if d == nil || d.disk == nil {
		return
	}
	w, h := d.p.w, d.p.host
	// Of its own: in which order it draws for files is not the seed's to say.
	rng := rand.New(rand.NewPCG(w.seed, uint64(w.now)))
	h.drive.fs = d.fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 50, RNG: rng})
	_ = d.disk.Close() // of the files that are not there any more
}

// needless says whether the disks of others have what this one has, of a process that leaves until then at the latest.
func (d *hostDisk) needless(until int64) bool {
	return d == nil || d.p.core.Status(d.p.clock()).Kept == 0 || d.p.alone() || d.p.w.now > until-d.p.w.leaveFor/2
}
