package policy

import (
	"crypto/sha256"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"
)

// WatchConfig says how a file is watched and who is told. Its zero value is ready for use.
type WatchConfig struct {
	// Check may refuse policies that are right by themselves, such as for what this process lacks: what it returns is
	// handled as mistakes in the file are. It may be called several times for one content. May be nil.
	Check func(*Set) error
	// OnChange is called with the new policies after they are in force, when the content of the file has changed. It is
	// not called for what Watch itself loads. May be nil.
	OnChange func(*Set)
	// OnError is called when the file cannot be read (an error that wraps the operating system's), has mistakes in it
	// (Errors) or is refused by Check, once for as long as it stays the same. The policies in force stay. May be nil.
	OnError func(error)
	// Settle is how long the content must stay the same before it is taken, so that a file that is just being written
	// is not: 0 stands for 50 ms. An empty file, which may be one that was truncated to be written anew, has to stay
	// for ten times as long.
	Settle time.Duration
	// Poll is how often the file is read although nothing announced a change, for file systems that announce none: 0
	// stands for 2 s, or for 250 ms when the system has no events to offer.
	Poll time.Duration
}

const (
	defaultSettle = 50 * time.Millisecond
	defaultPoll   = 2 * time.Second
	quickPoll     = 250 * time.Millisecond
	// emptySettle is how many times longer an empty file has to stay.
	emptySettle = 10
)

// Watcher keeps the policies of a file up to date. One goroutine, which Close waits for, reads the file and makes the
// calls of WatchConfig, one at a time; these must therefore not call Close.
type Watcher struct {
	file   string
	cfg    WatchConfig
	set    atomic.Pointer[Set]
	failed atomic.Pointer[error] // why the file is not in force, nil when it is

	reload chan struct{} // holds a request for a reload
	stop   chan struct{}
	once   sync.Once // closes stop
	done   chan struct{}

	// What follows is only touched by Watch and then by the goroutine.
	events  *fsnotify.Watcher // nil when the system offers none
	dirs    []string          // watched by events
	taken   seen              // the content of the set
	handled seen              // what was last taken or reported
	pending seen              // what was found since, and must be found again
	again   int               // how often pending has been found again
}

// seen is what a look at the file found.
type seen struct {
	sum  [sha256.Size]byte // of the content
	fail string            // why there is none
}

// Watch loads a file and keeps watching it until Close. The file must be without mistakes now; later it may have some,
// be replaced, disappear and come back.
func Watch(file string, cfg WatchConfig) (*Watcher, error) {
	// Systems run out of watches, and some have none: reading the file often does the same, only dearer.
	events, err := fsnotify.NewWatcher()
	if err != nil {
		events = nil
	}
	w, err := newWatcher(file, cfg, events)
	if err != nil {
		return nil, err
	}
	go w.run()
	return w, nil
}

// newWatcher loads the file. Without events, which become the Watcher's, the file is polled. The goroutine does not run
// yet.
func newWatcher(file string, cfg WatchConfig, events *fsnotify.Watcher) (*Watcher, error) {
	w := &Watcher{
		file: file, cfg: cfg, events: events,
		reload: make(chan struct{}, 1), stop: make(chan struct{}), done: make(chan struct{}),
	}
	// Watched before it is read, so that no change falls in between.
	w.follow()
	if w.cfg.Settle <= 0 {
		w.cfg.Settle = defaultSettle
	}
	if w.cfg.Poll <= 0 {
		w.cfg.Poll = defaultPoll
		if len(w.dirs) == 0 {
			w.cfg.Poll = quickPoll
		}
	}
	found, data, err := w.look()
	var set *Set
	if err == nil {
		set, err = w.parse(data)
	}
	if err != nil {
		_ = w.closeEvents() // err is what matters
		return nil, err
	}
	w.set.Store(set)
	w.taken, w.handled = found, found
	return w, nil
}

// Current returns the policies in force.
func (w *Watcher) Current() *Set { return w.set.Load() }

// Err returns why the file, as it is now, is not in force: what OnError was last told. It is nil when it is in force.
func (w *Watcher) Err() error {
	if err := w.failed.Load(); err != nil {
		return *err
	}
	return nil
}

// Reload looks at the file at once, without waiting for an event or the next poll, and reports what is wrong with it
// even if that has been reported. It does not wait for that to be done.
func (w *Watcher) Reload() {
	select {
	case w.reload <- struct{}{}:
	default: // One that has not begun is as good.
	}
}

// Close ends the watch and waits until no call of WatchConfig is under way. Current and Err keep their last values.
func (w *Watcher) Close() error {
	w.once.Do(func() { close(w.stop) })
	<-w.done
	return w.closeEvents()
}

func (w *Watcher) closeEvents() error {
	if w.events == nil {
		return nil
	}
	return w.events.Close()
}

func (w *Watcher) run() {
	defer close(w.done)
	var events chan fsnotify.Event
	var problems chan error
	if w.events != nil {
		events, problems = w.events.Events, w.events.Errors
	}
	poll := time.NewTicker(w.cfg.Poll)
	defer poll.Stop()
	settle := time.NewTimer(w.cfg.Settle)
	defer settle.Stop()
	settle.Stop()
	armed := false // settle runs
	arm := func(d time.Duration) {
		// Never put off: in a directory in which something changes all the time, that would be for ever.
		if !armed {
			settle.Reset(d)
			armed = true
		}
	}
	for {
		select {
		case <-w.stop:
			return
		case <-events:
			arm(w.cfg.Settle)
		case <-problems:
			// Events were lost: there may have been one for the file.
			arm(w.cfg.Settle)
		case <-poll.C:
			arm(0)
		case <-settle.C:
			armed = false
			if w.check() {
				arm(w.cfg.Settle)
			}
		case <-w.reload:
			// As if it had never been looked at, so that a mistake that stayed is reported again.
			w.handled = seen{}
			arm(0)
		}
	}
}

// check looks at the file, and handles what it finds when it has found the same often enough. It reports whether to
// look again after the time to settle.
func (w *Watcher) check() (more bool) {
	w.follow()
	found, data, err := w.look()
	if found == w.handled {
		w.pending = seen{}
		return false
	}
	if found != w.pending {
		w.pending, w.again = found, 0
		return true
	}
	w.again++
	if err == nil && len(data) == 0 && w.again < emptySettle {
		return true
	}
	w.handled, w.pending = found, seen{}
	var set *Set
	if err == nil {
		set, err = w.parse(data)
	}
	if err != nil {
		w.failed.Store(&err)
		if w.cfg.OnError != nil {
			w.cfg.OnError(err)
		}
		return false
	}
	w.failed.Store(nil)
	if found != w.taken {
		w.taken = found
		w.set.Store(set)
		if w.cfg.OnChange != nil {
			w.cfg.OnChange(set)
		}
	}
	return false
}

// parse returns what the file may put in force.
func (w *Watcher) parse(data []byte) (*Set, error) {
	set, err := Parse(w.file, data)
	if err == nil && w.cfg.Check != nil {
		err = w.cfg.Check(set)
	}
	return set, err
}

func (w *Watcher) look() (seen, []byte, error) {
	data, err := read(w.file)
	if err != nil {
		return seen{fail: err.Error()}, nil, err
	}
	return seen{sum: sha256.Sum256(data)}, data, nil
}

// follow watches the directory of the file and, where the file is a symbolic link, that of what it leads to now.
// Directories and not files: editors and Kubernetes put a new file, or a new link, in the place of the old. All are
// asked for again each time, because a directory may have been replaced by another of its name, too.
func (w *Watcher) follow() {
	if w.events == nil {
		return
	}
	want := []string{filepath.Dir(w.file)}
	if target, err := filepath.EvalSymlinks(w.file); err == nil {
		if dir := filepath.Dir(target); dir != want[0] {
			want = append(want, dir)
		}
	}
	var watched []string
	for _, dir := range want {
		// A directory that is away, or one too many, is left to the poll.
		if w.events.Add(dir) == nil {
			watched = append(watched, dir)
		}
	}
	w.drop(watched)
	w.dirs = watched
}

// drop ends the watches that are not among those to keep. That one is gone already is no matter.
func (w *Watcher) drop(keep []string) {
	for _, dir := range w.dirs {
		if !slices.Contains(keep, dir) {
			_ = w.events.Remove(dir)
		}
	}
}
