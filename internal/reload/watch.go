// Package reload keeps what is made of files up to date with them: any value, by a [Watcher], and [Certs], the certificate, key and
// authorities that TLS uses. It also reads small files with a bound on their size and on the time, and replaces files.
//
// A Watcher reads its files twice a second, and when it is told to, and puts a new value in force only if their content is valid: the
// content is compared, so that it does not matter which file system they are on, and how a new content is put in place. It does not promise
// to see every content that a file has had, nor that several files belong together: the reader must check that, and reject them.
//
// A file system may never answer, such as a mount whose server is gone, and a call that waits for it cannot be interrupted. One goroutine
// of a Watcher at most waits for it, and nothing else does: the delay is reported, the value in force stays, and the files are read again
// when the file system answers. Functions that have a time leave such a call behind.
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

// Config says what files hold and who is told.
type Config[T any] struct {
	// Parse makes a value of what the files hold, in their order. It may be called several times for one content, and must
	// not keep it. Required.
	Parse func(contents [][]byte) (T, error)
	// Read returns the first limit bytes of a file. Nil stands for ReadPrefix. Another one may read what is no single file, such as all
	// of a directory.
	Read func(name string, limit int64) ([]byte, error)
	// OnChange is called with the new value after it is in force, when the content of a file has changed. It is not called
	// for what Open loads. May be nil.
	OnChange func(T)
	// OnError is called when a file cannot be read (an error that wraps the operating system's, ErrNotRegular or
	// ErrTimeout) or Parse rejects what the files hold, once for as long as they stay the same. The value in force
	// stays. May be nil.
	OnError func(error)
	// MaxSize bounds the bytes of each file: 0 stands for 1 MiB.
	MaxSize int64

	poll    time.Duration // how often the files are read: 0 stands for 500 ms
	timeout time.Duration // how long that may take before it is reported: 0 stands for Timeout
}

const (
	defaultPoll = 500 * time.Millisecond
	defaultSize = 1 << 20
)

// Watcher keeps a value up to date with files. A content is taken when two reads in a row have found it, so that a file that is just being
// written, or was emptied for that, is not. One goroutine, which Close waits for, makes the calls of Config, one at a time; these must
// therefore not call Close. Another reads the files, one read at a time: Close does not wait for a read that is in progress, which ends by
// itself when the file system answers.
type Watcher[T any] struct {
	files    []string
	cfg      Config[T]
	value    atomic.Pointer[T]
	failed   atomic.Pointer[error] // why the files are not in force, nil when they are
	timeouts atomic.Uint64         // reads that took longer than Config.timeout

	reload fifo.Signal // asks for a reload
	stop   chan struct{}
	once   sync.Once // closes stop
	work   sync.WaitGroup

	// What follows is only touched by Open and then by the goroutine that makes the calls.
	looks   chan look // holds the outcome of the read in progress
	busy    bool      // a read is in progress
	late    bool      // and has timed out
	taken   seen      // the content of the value
	handled seen      // what was last taken or reported
	last    seen      // what was found last
}

// look is the outcome of a read of the files.
type look struct {
	found    seen
	contents [][]byte
	err      error
}

// seen is what a look at the files found.
type seen struct {
	sum  [sha256.Size]byte // of the contents
	fail string            // why there are none
}

// Start loads files and keeps watching them until Close: it is Open and Watch.
func Start[T any](files []string, cfg Config[T]) (*Watcher[T], error) {
	w, err := Open(files, cfg)
	if err == nil {
		w.Watch()
	}
	return w, err
}

// Open loads files, which are watched from Watch on. They must be right now; later they may be wrong, be replaced, disappear and come
// back.
func Open[T any](files []string, cfg Config[T]) (*Watcher[T], error) {
	w := &Watcher[T]{files: files, cfg: cfg, looks: make(chan look, 1), reload: fifo.NewSignal(), stop: make(chan struct{})}
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

// names are those of the files, for an error about all of them.
func (w *Watcher[T]) names() string { return strings.Join(w.files, ", ") }

// Watch has the files watched until Close. Of what has changed since they were loaded, it is told of too. It is called once, and not
// after Close.
func (w *Watcher[T]) Watch() { w.work.Go(w.run) }

// Current returns the value in force.
func (w *Watcher[T]) Current() T { return *w.value.Load() }

// Err returns why the files, as they are now, are not in force: what OnError was last told. It is nil when they are.
func (w *Watcher[T]) Err() error {
	if err := w.failed.Load(); err != nil {
		return *err
	}
	return nil
}

// Timeouts returns how many reads have taken too long.
func (w *Watcher[T]) Timeouts() uint64 { return w.timeouts.Load() }

// Reload looks at the files at once, without waiting for the next poll, and reports what is wrong with them even if that has been
// reported. It does not wait for that to be done.
func (w *Watcher[T]) Reload() { w.reload.Set() }

// Close ends the watch and waits until no call of Config is in progress. Current and Err keep their last values.
func (w *Watcher[T]) Close() {
	w.once.Do(func() { close(w.stop) })
	w.work.Wait()
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
		poll.Reset(w.cfg.poll) // two looks in a row are that far apart
	}
}

// look reads the files, unless a read is still in progress, and handles what is found.
func (w *Watcher[T]) look(asked bool) {
	patience := w.cfg.timeout
	if !w.busy {
		w.busy, w.late = true, false
		go func() { w.looks <- w.read() }()
	} else {
		patience = 0 // it is late
	}
	select {
	case <-w.stop:
	case l := <-w.looks:
		w.busy = false
		w.handle(l, asked)
	case <-time.After(patience):
		if !w.late {
			w.timeouts.Add(1)
		}
		if !w.late || asked {
			w.fail(TimeoutError(w.names(), w.cfg.timeout))
		}
		w.late, w.handled, w.last = true, seen{}, seen{}
	}
}

// fail reports why the files are not in force.
func (w *Watcher[T]) fail(err error) {
	w.failed.Store(&err)
	if w.cfg.OnError != nil {
		w.cfg.OnError(err)
	}
}

// handle acts on what was found when it is new, as everything is when it was asked for, and was found twice.
func (w *Watcher[T]) handle(l look, asked bool) {
	before := w.last
	if w.last = l.found; asked {
		w.handled, before = seen{}, seen{} // the look before may have been a moment ago
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
