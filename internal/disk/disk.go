// Package disk keeps the counters of persistent policies on disk. To the ownership core, a Disk is a follower, like the
// process with a copy: it takes the blocks of the core's log (ownership.Block), writes them, and confirms them once
// they are synced.
//
// The path of a block: Send queues it → run takes the queue → Write (log.go) writes its entries with one sync, and
// returns the confirmation → deliver. Restore (log.go) reads everything back when the node starts.
//
// Each partition has a log on the disk: a whole copy, and the changes after it. When the changes outgrow the copy, the
// disk refuses an entry, so that the core sends a new copy. The batch that completes the new copy deletes the old log.
// So what the disk has of a partition is always a prefix of what was sent, and contains a whole copy.
package disk

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/internal/fifo"
)

// Folder is the folder of the counters in the data directory.
const Folder = "counters"

// format is the version of the format on disk, chunks included. A directory with another format is rejected.
const format = 2

// Config configures a Disk.
type Config struct {
	Dir     string // the data directory; the counters are in its Folder
	Cluster string // identifies the cluster's secret and the settings of its ring
	Name    string // the node's name
	Boot    string // identifies the boot of the host; empty: not known
	// Now reads, in nanoseconds, a clock that goes on while the host is suspended and that starts anew with each boot.
	Now func() int64
	// Failed, if set, is called once when the disk cannot be written any more. The disk confirms nothing after that.
	Failed func(error)
	FS     vfs.FS // nil: the host's
	Logger *slog.Logger
}

// head is the description of a directory, which the directory itself has.
type head struct {
	Format  int
	Cluster string
	Name    string
	Boot    string   // of the host when the directory was last opened
	Offset  int64    // the disk's clock minus the clock of that boot
	Members []string // of the cluster, from the last SetMembers
	Key     []byte   // see Disk.Key
}

// Disk is an open directory of counters. Its methods are safe for concurrent use, except Restore, which must be called
// first.
//
// The disk's clock dates entries. While the host stays booted it runs with the boot clock, whether or not a node runs.
// From one boot to the next it stands still, because wall clocks are not compared. So an entry never seems older than
// it is, and seems younger by the time between the boots.
type Disk struct {
	cfg  Config
	db   *pebble.DB
	logs map[int]*diskLog // by partition; only for the writer
	next uint64           // number of the next entry; only for the writer

	headMu      sync.Mutex
	head        head
	headChanged bool // since it was written

	wake     fifo.Signal
	mu       sync.Mutex
	queue    []*ownership.Block
	deliver  func(*ownership.BlockAck)
	failOnce sync.Once
	failed   atomic.Pointer[error]
	lost     chan struct{} // closed once the disk has failed
	stop     chan struct{}
	work     sync.WaitGroup

	log, position uint64       // of the core, last written; only for the writer
	synced        atomic.Int64 // by Config.Now; 0: never
	began         int64        // by the disk's clock, when the disk was opened
}

// diskLog is the state of one partition's log on disk.
type diskLog struct {
	first    uint64 // number of the oldest entry
	begin    uint64 // number of the first entry of the copy that is being written, or was written last
	building bool   // that copy is not complete
	torn     bool   // the chunk of the last entry goes on in the next entry
	base     int    // bytes of the last whole copy
	tail     int    // bytes since; while building, of the new copy
}

// Open opens the counters of a data directory, and makes them if necessary. Its errors name the directory.
func Open(cfg Config) (_ *Disk, err error) {
	d := &Disk{cfg: cfg, logs: make(map[int]*diskLog), wake: fifo.NewSignal(), stop: make(chan struct{}),
		lost: make(chan struct{})}
	dir := filepath.Join(cfg.Dir, Folder)
	cache := pebble.NewCache(8 << 20)
	defer cache.Unref()
	options := func() *pebble.Options {
		return &pebble.Options{
			FS: cfg.FS, Cache: cache, MemTableSize: 16 << 20, MaxOpenFiles: 256,
			FormatMajorVersion: pebble.FormatWALSyncChunks,
			Logger:             engineLog{d}, EventListener: &pebble.EventListener{
				BackgroundError: d.fail, DataCorruption: func(i pebble.DataCorruptionInfo) { d.fail(i.Details) },
			},
		}
	}
	fresh := false
	if d.db, err = d.engine(dir, options()); err == nil {
		fresh, err = d.identify()
	}
	if err == nil && cfg.FS == nil {
		// A reservation's id is enough to end it, and the engine makes files that all users may read.
		err = os.Chmod(dir, 0o700)
	}
	// The engine gives the first log of a new directory an older format, in which it takes damage for the end of the
	// log. Opened again, it uses the newer one.
	if fresh && err == nil {
		if err = d.db.Close(); err == nil {
			d.db, err = d.engine(dir, options())
		}
	}
	if err == nil {
		err = d.Err()
	}
	if err == nil {
		return d, nil
	}
	if d.db != nil && d.Err() == nil {
		err = errors.Join(err, d.db.Close())
	}
	if pebble.IsCorruptionError(err) {
		err = Damaged(err)
	}
	return nil, d.named(err)
}

// named returns an error with the name of the directory; nil for nil.
func (d *Disk) named(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", filepath.Join(d.cfg.Dir, Folder), err)
}

// engine opens the engine. On a full disk the engine repeats a write of its log without end; then engine returns, and
// leaves the engine to it.
func (d *Disk) engine(dir string, options *pebble.Options) (*pebble.DB, error) {
	type result struct {
		db  *pebble.DB
		err error
	}
	opened := make(chan result, 1)
	go func() {
		db, err := pebble.Open(dir, options)
		opened <- result{db, err}
	}()
	select {
	case r := <-opened:
		return r.db, r.err
	case <-d.lost:
		return nil, d.Err()
	}
}

// identify checks that the directory is this node's, and sets the disk's clock. fresh means that the directory is new.
func (d *Disk) identify() (fresh bool, err error) {
	now, last := d.cfg.Now(), int64(0)
	text, err := d.get(headKey)
	if err != nil {
		return false, err
	}
	was := head{Format: format, Cluster: d.cfg.Cluster, Name: d.cfg.Name}
	if text != nil {
		if err := json.Unmarshal(text, &was); err != nil {
			return false, Damaged(err)
		}
		clock, err := d.get(clockKey)
		if err != nil {
			return false, err
		}
		if len(clock) == 8 {
			last = int64(binary.BigEndian.Uint64(clock))
		}
	}
	switch {
	case was.Format > format:
		return false, fmt.Errorf("has format %d of a later version of weir; this one writes %d", was.Format, format)
	case was.Format < format:
		return false, fmt.Errorf("has format %d of an earlier version of weir, and this one reads %d: "+
			"remove this folder to start without the counters", was.Format, format)
	case was.Cluster != d.cfg.Cluster:
		return false, errors.New("is of another cluster, or of another secret")
	case was.Name != d.cfg.Name:
		return false, fmt.Errorf("is of the node %s, and this is %s", was.Name, d.cfg.Name)
	}
	if was.Boot != d.cfg.Boot || was.Boot == "" || now+was.Offset < last {
		was.Boot, was.Offset = d.cfg.Boot, last-now
	}
	d.head, d.began = was, now+was.Offset
	return text == nil, d.save()
}

// get returns the value of a key; nil: there is none.
func (d *Disk) get(key []byte) ([]byte, error) {
	value, closer, err := d.db.Get(key)
	if errors.Is(err, pebble.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, Damaged(err)
	}
	return slices.Clone(value), closer.Close()
}

// save writes the head.
func (d *Disk) save() error {
	text, err := json.Marshal(d.head)
	if err != nil {
		return err
	}
	return errors.Join(d.db.Set(headKey, text, pebble.Sync), d.Err())
}

// Members returns the names of the last SetMembers.
func (d *Disk) Members() []string {
	d.headMu.Lock()
	defer d.headMu.Unlock()
	return d.head.Members
}

// SetMembers sets the names of the cluster's members. They are written with the next write.
func (d *Disk) SetMembers(names []string) {
	d.headMu.Lock()
	defer d.headMu.Unlock()
	if !slices.Equal(names, d.head.Members) {
		d.head.Members, d.headChanged = slices.Clone(names), true
		d.wake.Set()
	}
}

// changedHead returns the head if it must be written, or nil.
func (d *Disk) changedHead() []byte {
	d.headMu.Lock()
	defer d.headMu.Unlock()
	if !d.headChanged {
		return nil
	}
	d.headChanged = false
	text, err := json.Marshal(d.head)
	if err != nil {
		d.fail(err)
	}
	return text
}

// Key returns the hash key of a node without a cluster's secret: the fresh of its first call, which the disk keeps.
func (d *Disk) Key(fresh []byte) ([]byte, error) {
	d.headMu.Lock()
	defer d.headMu.Unlock()
	if d.head.Key != nil {
		return d.head.Key, nil
	}
	d.head.Key = fresh
	return fresh, d.save()
}

// Start has the disk write the blocks of Send and call deliver with the confirmations, until Close.
func (d *Disk) Start(deliver func(*ownership.BlockAck)) {
	d.deliver = deliver
	d.work.Go(d.run)
}

// Send queues blocks of the core's log, in order. It does not block.
func (d *Disk) Send(b *ownership.Block) {
	d.mu.Lock()
	d.queue = append(d.queue, b)
	d.mu.Unlock()
	d.wake.Set()
}

// clockEvery is how often the disk's clock is written if nothing else is. After a boot the clock goes on from the last
// written value.
const clockEvery = 10 * time.Second

func (d *Disk) run() {
	idle := time.NewTicker(clockEvery)
	defer idle.Stop()
	for d.Err() == nil {
		select {
		case <-d.wake:
		case <-idle.C:
		case <-d.stop:
			return
		}
		d.mu.Lock()
		blocks := d.queue
		d.queue = nil
		d.mu.Unlock()
		if ack := d.Write(blocks); ack != nil && d.Err() == nil {
			d.deliver(ack)
		}
	}
}

// Close closes the disk. Blocks in the queue are not written.
func (d *Disk) Close() error {
	close(d.stop)
	if d.Err() != nil {
		return nil // after an error, calls of the engine may not return
	}
	d.work.Wait()
	return d.db.Close()
}

// Err returns why the disk cannot be written any more, or nil while it can.
func (d *Disk) Err() error {
	if err := d.failed.Load(); err != nil {
		return *err
	}
	return nil
}

func (d *Disk) fail(err error) {
	d.failOnce.Do(func() {
		d.failed.Store(&err)
		close(d.lost)
		d.cfg.Logger.Error("counters not written any more", "error", err.Error(), "hint",
			"a full stop loses what is counted from now on; mend the disk and restart the node")
		if d.cfg.Failed != nil {
			d.cfg.Failed(err)
		}
	})
}

// Stats has the numbers of a Disk.
type Stats struct {
	Bytes  uint64        // on the disk
	Synced time.Duration // since the last sync; 0 before the first
	Err    error
}

// Stats returns the present numbers.
func (d *Disk) Stats() (s Stats) {
	if s.Err = d.Err(); s.Err == nil {
		s.Bytes = d.db.Metrics().DiskSpaceUsage()
	}
	if at := d.synced.Load(); at != 0 {
		s.Synced = time.Duration(d.cfg.Now() - at)
	}
	return s
}

// engineLog gets the engine's log. Fatalf returns: the engine would end the process, and fail ends only the disk.
type engineLog struct{ d *Disk }

func (l engineLog) Infof(string, ...any) {}

func (l engineLog) Errorf(format string, args ...any) {
	l.d.cfg.Logger.Warn("counters not flushed", "error", fmt.Sprintf(format, args...))
}

func (l engineLog) Fatalf(format string, args ...any) {
	err := fmt.Errorf(format, args...)
	for _, arg := range args {
		if cause, ok := arg.(error); ok {
			err = cause
		}
	}
	l.d.fail(err)
}
