// Package reload keeps values that are made of files up to date: any value, by a [Watcher], and certificates, keys and
// authorities for TLS, by [Certs]. It also reads small files with bounds on their size and on the time, and replaces
// files.
//
// A Watcher reads its files twice a second, and when Reload is called. It puts a new value into force only if the
// content is valid. It compares contents, so that the kind of file system, and the way in which a file is replaced, do
// not matter. It may miss a content that a file had for a short time. If several files must belong together, Parse must
// check that, and reject them otherwise.
//
// A file system may never answer, such as a mount whose server is gone, and a call that waits for it cannot be
// interrupted. Only the goroutine of a Watcher waits for it. The Watcher reports the delay, the value in force stays,
// and the files are read again when the file system answers. Functions with a timeout leave such a call in its
// goroutine.
package reload

import (
	"cmp"
	"crypto/sha256"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weirlimit/weir/internal/fifo"
)

// Config configures a Watcher.
type Config[T any] struct {
	// Parse makes a value of the contents of the files, in the order of their names. It may be called several times for
	// one content, and must not keep it. Required.
	Parse func(contents [][]byte) (T, error)
	// Read returns the first limit bytes of a file. Nil stands for ReadPrefix. Another function may read something else
	// than a single file, such as all files of a directory.
	Read func(name string, limit int64) ([]byte, error)
	// OnChange, if set, is called with a new value after it is in force. It is not called for the value that Open
	// loads.
	OnChange func(T)
	// OnError, if set, is called when a file cannot be read (an error that wraps the operating system's, ErrNotRegular
	// or ErrTimeout), or when Parse rejects the contents. It is called once while the contents stay the same. The value
	// in force stays.
	OnError func(error)
	// MaxSize bounds the bytes of each file. 0 stands for 1 MiB.
	MaxSize int64

	poll    time.Duration // time between two reads; 0 stands for 500 ms
	timeout time.Duration // time after which a read is reported; 0 stands for Timeout
}

const (
	defaultPoll = 500 * time.Millisecond
	defaultSize = 1 << 20
)

// Watcher keeps a value up to date with files. It takes a content when two reads in a row have found it, so that it
// does not take a file that is being written, or was emptied for that. One goroutine reads the files. The calls of
// Config are made one at a time, and Close waits for the one in progress; so these calls must not call Close. Close
// does not wait for a read in progress, which ends when the file system answers.
type Watcher[T any] struct {
	files    []string
	cfg      Config[T]
	value    atomic.Pointer[T]
	failed   atomic.Pointer[error] // why the files are not in force; nil: they are
	timeouts atomic.Uint64         // reads that took longer than Config.timeout

	reload fifo.Signal // asks for a reload
	stop   chan struct{}

	mu      sync.Mutex // held during the calls of Config
	closed  bool
	taken   seen // the content of the value in force
	handled seen // the content that was last taken or reported
	last    seen // the content that the last read found
}

// look is the result of a read of the files.
type look struct {
	found    seen
	contents [][]byte
	err      error
}

// seen identifies what a read found.
type seen struct {
	sum  [sha256.Size]byte // of the contents, if they could be read
	fail string            // the text of the error
}

// Start loads files and watches them until Close: it is Open and Watch.
func Start[T any](files []string, cfg Config[T]) (*Watcher[T], error) {
	w, err := Open(files, cfg)
	if err == nil {
		w.Watch()
	}
	return w, err
}

// Open loads files. They must be valid now; while they are watched they may become invalid, be replaced, disappear and
// come back.
func Open[T any](files []string, cfg Config[T]) (*Watcher[T], error) {
	w := &Watcher[T]{files: files, cfg: cfg, reload: fifo.NewSignal(), stop: make(chan struct{})}
	w.cfg.MaxSize, w.cfg.poll = cmp.Or(cfg.MaxSize, defaultSize), cmp.Or(cfg.poll, defaultPoll)
	w.cfg.timeout = cmp.Or(cfg.timeout, Timeout)
	if cfg.Read == nil {
		w.cfg.Read = ReadPrefix
	}
	first, err := within(w.names(), w.cfg.timeout, func() (look, error) {
		l := w.read()
		return l, l.err
	})
	if err != nil {
		return nil, err
	}
	value, err := w.cfg.Parse(first.contents)
	if err != nil {
		return nil, err
	}
	w.value.Store(&value)
	w.taken, w.handled, w.last = first.found, first.found, first.found
	return w, nil
}

// names returns the names of the files, for an error about all of them.
func (w *Watcher[T]) names() string { return strings.Join(w.files, ", ") }

// Watch watches the files until Close. OnChange is also called for a change since Open. Call Watch once, and not after
// Close.
func (w *Watcher[T]) Watch() { go w.run() }

// Current returns the value in force.
func (w *Watcher[T]) Current() T { return *w.value.Load() }

// Err returns why the present files are not in force: the last error of OnError. It is nil if they are.
func (w *Watcher[T]) Err() error {
	if err := w.failed.Load(); err != nil {
		return *err
	}
	return nil
}

// Timeouts returns how many reads have taken longer than the timeout.
func (w *Watcher[T]) Timeouts() uint64 { return w.timeouts.Load() }

// Reload has the files read at once, or after the read in progress. An error is reported even if it was reported
// before. Reload does not wait for the read.
func (w *Watcher[T]) Reload() { w.reload.Set() }

// Close ends the watch, and waits until no call of Config is in progress. Current and Err keep their last values.
func (w *Watcher[T]) Close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.closed {
		w.closed = true
		close(w.stop)
	}
}

func (w *Watcher[T]) run() {
	poll := time.NewTicker(w.cfg.poll)
	defer poll.Stop()
	for {
		select {
		case <-w.stop:
			return
		case <-poll.C:
			w.look(false)
		case <-w.reload:
			w.look(true)
		}
		poll.Reset(w.cfg.poll) // so that two reads in a row are that far apart
	}
}

// look reads the files, and handles the result. If the read takes longer than the timeout, look reports that meanwhile.
func (w *Watcher[T]) look(asked bool) {
	reading := true // guarded by mu
	late := time.AfterFunc(w.cfg.timeout, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if reading && !w.closed {
			w.timeouts.Add(1)
			w.handled, w.last = seen{}, seen{}
			w.fail(TimeoutError(w.names(), w.cfg.timeout))
		}
	})
	l := w.read()
	w.mu.Lock()
	defer w.mu.Unlock()
	reading = false
	if late.Stop(); !w.closed {
		w.handle(l, asked)
	}
}

// fail notes and reports why the files are not in force.
func (w *Watcher[T]) fail(err error) {
	w.failed.Store(&err)
	if w.cfg.OnError != nil {
		w.cfg.OnError(err)
	}
}

// handle acts on the result of a read if it is new and was found twice. After Reload, every result is new.
func (w *Watcher[T]) handle(l look, asked bool) {
	before := w.last
	if w.last = l.found; asked {
		w.handled, before = seen{}, seen{} // the last read may have been a moment ago
	}
	if l.found == w.handled || l.found != before {
		return
	}
	w.handled = l.found
	var value T
	if l.err == nil {
		value, l.err = w.cfg.Parse(l.contents)
	}
	if l.err != nil {
		w.fail(l.err)
		return
	}
	w.failed.Store(nil)
	if l.found != w.taken {
		w.taken = l.found
		w.value.Store(&value)
		if w.cfg.OnChange != nil {
			w.cfg.OnChange(value)
		}
	}
}

// read reads the files.
func (w *Watcher[T]) read() look {
	all := sha256.New()
	contents := make([][]byte, len(w.files))
	for i, name := range w.files {
		content, err := w.cfg.Read(name, w.cfg.MaxSize+1)
		if err == nil && int64(len(content)) > w.cfg.MaxSize {
			err = SizeError(name, w.cfg.MaxSize)
		}
		if err != nil {
			return look{found: seen{fail: err.Error()}, err: err}
		}
		contents[i] = content
		sum := sha256.Sum256(content)
		all.Write(sum[:])
	}
	return look{found: seen{sum: [sha256.Size]byte(all.Sum(nil))}, contents: contents}
}
