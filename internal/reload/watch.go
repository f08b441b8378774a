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
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weirlimit/weir/internal/fifo"
)

// Config says what files hold, how they are watched and who is told.
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
	// Timeout is how long reading the files may take before it is reported: 0 stands for 5 s.
	Timeout time.Duration
	// MaxSize bounds what is read of each file, in bytes: Parse sees one byte more of a larger one, and rejects it. 0 stands
	// for 1 MiB, and has larger files rejected without Parse.
	MaxSize int64
	// Settle is how long the content must stay the same before it is taken, so that a file that is just being written
	// is not: 0 stands for 50 ms. An empty file, which may be one that was truncated to be written anew, has to stay
	// for ten times as long.
	Settle time.Duration
	// Poll is how often the files are read: 0 stands for 500 ms.
	Poll time.Duration
}

const (
	defaultSettle = 50 * time.Millisecond
	defaultPoll   = 500 * time.Millisecond
	// emptySettle is how many times longer an empty file has to stay.
	emptySettle = 10
	defaultSize = 1 << 20
)

// Watcher keeps a value up to date with files. One goroutine, which Close waits for, makes the calls of Config, one at a
// time; these must therefore not call Close. Another reads the files, one read at a time: Close does not wait for a read
// that has timed out or is still in progress, which ends by itself when the file system answers.
type Watcher[T any] struct {
	files    []string
	cfg      Config[T]
	value    atomic.Pointer[T]
	failed   atomic.Pointer[error] // why the files are not in force, nil when they are
	timeouts atomic.Uint64         // reads that took longer than Config.Timeout

	reload fifo.Signal // asks for a reload
	stop   chan struct{}
	once   sync.Once // closes stop
	work   sync.WaitGroup

	reading atomic.Pointer[string] // the file that is being read

	// What follows is only touched by Open and then by the goroutine that makes the calls.
	looks   chan look // holds the outcome of the read in progress
	busy    bool      // a read is in progress
	late    bool      // and has timed out
	taken   seen      // the content of the value
	handled seen      // what was last taken or reported
	pending seen      // what was found since, and must be found again
	again   int       // how often pending has been found again
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
	w.cfg.Settle, w.cfg.Timeout, w.cfg.Poll = cmp.Or(cfg.Settle, defaultSettle), cmp.Or(cfg.Timeout, Timeout), cmp.Or(cfg.Poll, defaultPoll)
	if cfg.Read == nil {
		w.cfg.Read = ReadPrefix
	}
	w.look()
	var l look
	select {
	case l = <-w.looks:
		w.busy = false
	case <-time.After(w.cfg.Timeout):
		l.err = w.timeout()
	}
	var value T
	if l.err == nil {
		value, l.err = w.cfg.Parse(l.contents)
	}
	if l.err != nil {
		return nil, l.err
	}
	w.value.Store(&value)
	w.taken, w.handled = l.found, l.found
	return w, nil
}

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

// Timeouts returns how many reads have taken longer than Config.Timeout.
func (w *Watcher[T]) Timeouts() uint64 { return w.timeouts.Load() }

// Reload looks at the files at once, without waiting for the next poll, and reports what is wrong with
// them even if that has been reported. It does not wait for that to be done.
func (w *Watcher[T]) Reload() { w.reload.Set() }

// Close ends the watch and waits until no call of Config is in progress. Current and Err keep their last values.
func (w *Watcher[T]) Close() {
	w.once.Do(func() { close(w.stop) })
	w.work.Wait()
}

func (w *Watcher[T]) run() {
	next := time.NewTimer(w.cfg.Poll) // of the next look; while one is in progress it does not run
	defer next.Stop()
	var timeout <-chan time.Time // of the look in progress
	for {
		select {
		case <-w.stop:
			return
		case <-next.C:
			w.look()
			timeout = time.After(w.cfg.Timeout)
		case l := <-w.looks:
			timeout = nil
			// What a late look read is as old as that. The next one is at what there is now.
			if w.late || w.handle(l) {
				next.Reset(w.cfg.Settle)
			} else {
				next.Reset(w.cfg.Poll)
			}
			w.busy, w.late = false, false
		case <-timeout:
			w.late = true
			err := w.timeout()
			w.handled, w.pending = seen{fail: err.Error()}, seen{}
			w.fail(err)
		case <-w.reload:
			if w.late {
				w.fail(*w.failed.Load())
				continue
			}
			// As if it had never been looked at, so that a mistake that stayed is reported again.
			w.handled = seen{}
			if !w.busy {
				next.Reset(0)
			}
		}
	}
}

// timeout counts a read that takes too long, and returns the error for it.
func (w *Watcher[T]) timeout() error {
	w.timeouts.Add(1)
	return TimeoutError(*w.reading.Load(), w.cfg.Timeout)
}

// fail reports why the files are not in force.
func (w *Watcher[T]) fail(err error) {
	w.failed.Store(&err)
	if w.cfg.OnError != nil {
		w.cfg.OnError(err)
	}
}

// handle takes in what was found, and acts on it when the same has been found often enough. It reports whether to look
// again after the time to settle.
func (w *Watcher[T]) handle(l look) (more bool) {
	if l.found == w.handled {
		w.pending = seen{}
		return false
	}
	if l.found != w.pending {
		w.pending, w.again = l.found, 0
		return true
	}
	w.again++
	empty := func(b []byte) bool { return len(b) == 0 }
	if l.err == nil && slices.ContainsFunc(l.contents, empty) && w.again < emptySettle {
		return true
	}
	w.handled, w.pending = l.found, seen{}
	var value T
	if l.err == nil {
		value, l.err = w.cfg.Parse(l.contents)
	}
	if l.err != nil {
		w.fail(l.err)
		return false
	}
	w.failed.Store(nil)
	if l.found != w.taken {
		w.taken = l.found
		w.value.Store(&value)
		if w.cfg.OnChange != nil {
			w.cfg.OnChange(value)
		}
	}
	return false
}

// look begins to read the files, in a goroutine that ends when the file system has answered.
func (w *Watcher[T]) look() {
	w.busy = true
	w.reading.Store(&w.files[0])
	go func() { w.looks <- w.readAll() }()
}

func (w *Watcher[T]) readAll() look {
	all := sha256.New()
	contents := make([][]byte, len(w.files))
	for i, name := range w.files {
		w.reading.Store(&w.files[i])
		content, err := w.readOne(name)
		if err != nil {
			return look{found: seen{fail: err.Error()}, err: err}
		}
		contents[i] = content
		sum := sha256.Sum256(content)
		all.Write(sum[:])
	}
	return look{found: seen{sum: [sha256.Size]byte(all.Sum(nil))}, contents: contents}
}

func (w *Watcher[T]) readOne(name string) ([]byte, error) {
	content, err := w.cfg.Read(name, cmp.Or(w.cfg.MaxSize, defaultSize)+1)
	if err == nil && w.cfg.MaxSize == 0 && len(content) > defaultSize {
		return nil, SizeError(name, defaultSize)
	}
	return content, err
}
