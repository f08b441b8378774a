// Package disk keeps the counters of persistent policies on disk. It is a follower of the ownership core, like the process with a copy: it
// takes the blocks of a log (ownership.Block), writes them, and confirms them once they are synced.
//
// Each partition has a log of its own on the disk: a whole copy, and the changes since. When the changes outgrow the copy, the disk refuses
// an entry, so that the core begins a new copy; the old log is deleted in the batch that completes the new one. What a log has on the disk
// is therefore always a prefix of what was sent, with a whole copy in it.
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

// Folder is the folder of the counters in a data directory.
const Folder = "counters"

// format is the version of what is written here. A directory of a later one is rejected.
const format = 1

// Config is what a Disk needs.
type Config struct {
	Dir     string // the data directory; the counters are in its Folder
	Cluster string // what stands for the cluster's secret and the settings of its ring
	Name    string // of this node
	Boot    string // names the boot of the host
	// Now reads a clock that goes on through a suspend and means nothing after another boot, in nanoseconds.
	Now func() int64
	// Failed is called once when the disk cannot be written any more. Nothing is confirmed from then on.
	Failed func(error)
	FS     vfs.FS // nil: the host's
	Logger *slog.Logger
}

// head is what a directory says of itself.
type head struct {
	Format  int
	Cluster string
	Name    string
	Boot    string   // of the host, when the directory was opened last
	Offset  int64    // what the clock of that boot lacks to the disk's clock
	Members []string // of the cluster, when they were told last
	Key     []byte   // see Disk.Key
}

// Disk is an open directory of counters. Its methods are safe for concurrent use, but Restore, which comes before all others.
//
// The disk's clock dates entries. It goes on with the boot clock while the host stays booted, whether a node runs or not. Over another boot it
// stands still: wall clocks are not compared, so entries become older than they are by nothing, and younger by the time in between.
type Disk struct {
	cfg  Config
	db   *pebble.DB
	logs map[int]*diskLog // by partition; the writer's
	next uint64           // number of the next entry; the writer's

	headMu      sync.Mutex
	head        head
	headChanged bool // since it was written

	wake     fifo.Signal
	mu       sync.Mutex
	queue    []*ownership.Block
	deliver  func(*ownership.BlockAck)
	failOnce sync.Once
	failed   atomic.Pointer[error]
	lost     chan struct{} // closed after it has failed
	stop     chan struct{}
	work     sync.WaitGroup

	log, position uint64       // that was written last; the writer's
	synced        atomic.Int64 // by Config.Now; 0: never
	began         int64        // by the disk's clock
}

// diskLog is what the disk knows of one partition's log.
type diskLog struct {
	first    uint64 // its oldest entry
	begin    uint64 // of the copy that is being written, or was written last
	building bool   // that copy is not whole yet
	torn     bool   // the last entry goes on in the next one
	base     int    // bytes of the last whole copy
	tail     int    // bytes since; while building, of the new copy
}

// Open opens the counters of a data directory, which it makes if need be. The errors say what is wrong with it.
func Open(cfg Config) (_ *Disk, err error) {
	d := &Disk{cfg: cfg, logs: make(map[int]*diskLog), wake: fifo.NewSignal(), stop: make(chan struct{}), lost: make(chan struct{})}
	dir := filepath.Join(cfg.Dir, Folder)
	cache := pebble.NewCache(8 << 20)
	defer cache.Unref()
	options := func() *pebble.Options {
		return &pebble.Options{
			FS: cfg.FS, Cache: cache, MemTableSize: 16 << 20, MaxOpenFiles: 256, FormatMajorVersion: pebble.FormatWALSyncChunks,
			Logger: engineLog{d}, EventListener: &pebble.EventListener{
				BackgroundError: d.fail, DataCorruption: func(i pebble.DataCorruptionInfo) { d.fail(i.Details) },
			},
		}
	}
	fresh := false
	if d.db, err = d.engine(dir, options()); err == nil {
		fresh, err = d.identify()
	}
	if err == nil && cfg.FS == nil {
		// Whoever knows a reservation's id can end it, and the engine makes files that everybody may read.
		err = os.Chmod(dir, 0o700)
	}
	// The engine's first log of a directory is of an older format, in which it takes damage for the end of the log.
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
	return nil, fmt.Errorf("%s: %w", dir, err)
}

// engine opens the engine. On a full disk the engine tries again and again to write what was in its log: it is left to that.
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

// identify checks whose directory this is, and sets the disk's clock. fresh says that it is new.
func (d *Disk) identify() (fresh bool, err error) {
	now, last := d.cfg.Now(), int64(0)
	text, err := d.get(headKey)
	if err != nil {
		return false, err
	}
	was := head{Format: format, Cluster: d.cfg.Cluster, Name: d.cfg.Name}
	if text != nil {
		if err := json.Unmarshal(text, &was); err != nil {
			return false, fmt.Errorf("is damaged: %w", err)
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

// get returns what is under a key; nil: nothing.
func (d *Disk) get(key []byte) ([]byte, error) {
	value, closer, err := d.db.Get(key)
	if errors.Is(err, pebble.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("is damaged: %w", err)
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

// Members are the names of the cluster's members as they were told last.
func (d *Disk) Members() []string {
	d.headMu.Lock()
	defer d.headMu.Unlock()
	return d.head.Members
}

// SetMembers keeps the names of the cluster's members. They are written with what is written next.
func (d *Disk) SetMembers(names []string) {
	d.headMu.Lock()
	defer d.headMu.Unlock()
	if !slices.Equal(names, d.head.Members) {
		d.head.Members, d.headChanged = slices.Clone(names), true
		d.wake.Set()
	}
}

// changedHead is the head if it is to be written, or nil.
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

// Key keeps a key for a node alone, which has no secret: the first that it was called with.
func (d *Disk) Key(fresh []byte) ([]byte, error) {
	d.headMu.Lock()
	defer d.headMu.Unlock()
	if d.head.Key != nil {
		return d.head.Key, nil
	}
	d.head.Key = fresh
	return fresh, d.save()
}

// Start has the disk write what Send is given, and deliver the confirmations, until Close.
func (d *Disk) Start(deliver func(*ownership.BlockAck)) {
	d.deliver = deliver
	d.work.Go(d.run)
}

// Send takes blocks of the core's log, in order. It does not block.
func (d *Disk) Send(b *ownership.Block) {
	d.mu.Lock()
	d.queue = append(d.queue, b)
	d.mu.Unlock()
	d.wake.Set()
}

// clockEvery is how often the disk's clock is written if nothing else is. After a boot it goes on from there.
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

// Close ends the disk. It writes nothing more.
func (d *Disk) Close() error {
	close(d.stop)
	if d.Err() != nil {
		return nil // after an error the engine may not return from anything
	}
	d.work.Wait()
	return d.db.Close()
}

// Err says why the disk cannot be written any more; nil while it can.
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
		d.cfg.Logger.Error("counters not written any more", "error", err.Error(), "hint", "a full stop loses what is counted from now on; mend the disk and restart the node")
		if d.cfg.Failed != nil {
			d.cfg.Failed(err)
		}
	})
}

// Stats is what a Disk tells of itself.
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

// engineLog takes what the engine logs. Fatalf returns: where the engine would end the process, the disk ends.
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
