package reload

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/weirlimit/weir/test/testkit"
)

// patience is how long a test waits for what it is sure to see.
const patience = testkit.Patience

// prefix is ReadPrefix, for tests whose own files go by that name.
var prefix = ReadPrefix

// content is what the tests' parse makes n of.
func content(n int) string { return fmt.Sprintf("number %d\n", n) }

// parse reads content, of one file or the sum of several. An empty one is 0.
func parse(contents [][]byte) (int, error) {
	sum := 0
	for _, c := range contents {
		if len(c) == 0 {
			continue
		}
		n := 0
		if _, err := fmt.Sscanf(string(c), "number %d\n", &n); err != nil {
			return 0, fmt.Errorf("mistake in %q", c)
		}
		sum += n
	}
	return sum, nil
}

func write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// watched is a Watcher under test and what it reported.
type watched struct {
	*Watcher[int]
	t       *testing.T
	changes chan int
	errs    chan error
}

// watch begins to watch a file, with the given events or none, and ends that with the test.
func watch(t *testing.T, name string, cfg Config[int], events *fsnotify.Watcher) *watched {
	t.Helper()
	return watchBy(t, name, cfg, events, prefix)
}

// watchBy is watch with another way to read a file.
func watchBy(t *testing.T, name string, cfg Config[int], events *fsnotify.Watcher, read func(string, int64) ([]byte, error)) *watched {
	t.Helper()
	w := &watched{t: t, changes: make(chan int, 100), errs: make(chan error, 100)}
	cfg.Parse, cfg.Read = parse, read
	cfg.OnChange = func(s int) { w.changes <- s }
	cfg.OnError = func(err error) { w.errs <- err }
	var err error
	w.Watcher, err = load([]string{name}, cfg, events)
	must(t, err)
	w.Watch()
	t.Cleanup(func() { must(t, w.Close()) })
	return w
}

func newEvents(t *testing.T) *fsnotify.Watcher {
	t.Helper()
	events, err := fsnotify.NewWatcher()
	must(t, err)
	return events
}

// change waits for the next change, which must be to the content of n. That no error comes before is checked too.
func (w *watched) change(n int) {
	w.t.Helper()
	select {
	case s := <-w.changes:
		if got := s; got != n {
			w.t.Fatalf("changed to %d, want %d", got, n)
		}
		if err := w.Err(); err != nil {
			w.t.Fatalf("in force, and yet: %v", err)
		}
	case err := <-w.errs:
		w.t.Fatalf("got an error, want the change to %d: %v", n, err)
	case <-time.After(patience):
		w.t.Fatalf("no change to %d", n)
	}
	if got := w.Current(); got != n {
		w.t.Fatalf("current is %d, want %d", got, n)
	}
}

// failure waits for the next error, before which nothing may change.
func (w *watched) failure(part string) error {
	w.t.Helper()
	select {
	case err := <-w.errs:
		if !strings.Contains(err.Error(), part) {
			w.t.Fatalf("got %v, want %s", err, part)
		}
		if w.Err() == nil {
			w.t.Fatal("reported, and yet Err is nil")
		}
		return err
	case s := <-w.changes:
		w.t.Fatalf("changed to %d, want an error with %s", s, part)
	case <-time.After(patience):
		w.t.Fatalf("no error with %s", part)
	}
	return nil
}

// eventually waits for a condition that nothing announces.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	end := time.After(patience)
	for !ok() {
		select {
		case <-tick.C:
		case <-end:
			t.Fatal("never came: " + what)
		}
	}
}

func TestWatchEdits(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	write(t, file, content(1))
	w := watch(t, file, Config[int]{}, newEvents(t))
	if got := w.Current(); got != 1 {
		t.Fatalf("begins with %d", got)
	}
	write(t, file, content(2))
	w.change(2)

	// Written beside and renamed, as most editors and deployment tools do.
	write(t, file+".new", content(3))
	must(t, os.Rename(file+".new", file))
	w.change(3)

	// Renamed away and written anew, as vim does with its backup.
	must(t, os.Rename(file, file+"~"))
	write(t, file, content(4))
	must(t, os.Remove(file+"~"))
	w.change(4)

	// The same content, whoever writes it, is no change: the next one reported is the other.
	write(t, file, content(4))
	write(t, file+".new", content(4))
	must(t, os.Rename(file+".new", file))
	w.Reload()
	write(t, file, content(5))
	w.change(5)
}

func TestWatchBadContent(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	write(t, file, content(1))
	w := watch(t, file, Config[int]{}, newEvents(t))
	write(t, file, "bad 1\n")
	w.failure("bad 1")
	if got := w.Current(); got != 1 {
		t.Errorf("current is %d", got)
	}
	// The same again is not reported again: the next one is the other.
	write(t, file+".new", "bad 1\n")
	must(t, os.Rename(file+".new", file))
	write(t, file, "bad 2\n")
	w.failure("bad 2")
	write(t, file, content(2))
	w.change(2)
	// Reported again after it was right in between.
	write(t, file, "bad 2\n")
	w.failure("bad 2")
	// Back to what is in force: no change, but no error any more either.
	write(t, file, content(2))
	eventually(t, "the error's end", func() bool { return w.Err() == nil })
	write(t, file, content(3))
	w.change(3)
}

func TestWatchDeleted(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	write(t, file, content(1))
	w := watch(t, file, Config[int]{}, newEvents(t))
	must(t, os.Remove(file))
	if err := w.failure(file); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v", err)
	}
	write(t, file, content(1))
	eventually(t, "the error's end", func() bool { return w.Err() == nil })
	must(t, os.Remove(file))
	w.failure(file)
	write(t, file, content(2))
	w.change(2)
}

// TestWatchConfigMap makes and updates a volume as Kubernetes does: the file is a link through ..data, which is a link
// to a directory of the version, and is replaced as a whole.
func TestWatchConfigMap(t *testing.T) {
	for _, poll := range []time.Duration{0, time.Hour} { // with the hour, only events can tell
		t.Run(fmt.Sprint(poll), func(t *testing.T) {
			dir := t.TempDir()
			version := func(n int) string { return fmt.Sprintf("..2024_%d", n) }
			mount := func(n int, text string) {
				must(t, os.Mkdir(filepath.Join(dir, version(n)), 0o700))
				write(t, filepath.Join(dir, version(n), "file"), text)
				must(t, os.Symlink(version(n), filepath.Join(dir, "..data_tmp")))
				must(t, os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
				if n > 1 {
					must(t, os.RemoveAll(filepath.Join(dir, version(n-1))))
				}
			}
			mount(1, content(1))
			file := filepath.Join(dir, "file")
			must(t, os.Symlink(filepath.Join("..data", "file"), file))
			w := watch(t, file, Config[int]{Poll: poll}, newEvents(t))
			for n := 2; n < 5; n++ {
				mount(n, content(n))
				w.change(n)
			}
			mount(5, "bad 3")
			w.failure("bad 3")
			mount(6, content(6))
			w.change(6)
		})
	}
}

// TestWatchLink: a link to a file in another directory, which is edited there, and then leads elsewhere.
func TestWatchLink(t *testing.T) {
	here, there, elsewhere := t.TempDir(), t.TempDir(), t.TempDir()
	write(t, filepath.Join(there, "a"), content(1))
	write(t, filepath.Join(elsewhere, "b"), content(3))
	file := filepath.Join(here, "file")
	must(t, os.Symlink(filepath.Join(there, "a"), file))
	w := watch(t, file, Config[int]{Poll: time.Hour}, newEvents(t))
	write(t, filepath.Join(there, "a"), content(2))
	w.change(2)
	must(t, os.Symlink(filepath.Join(elsewhere, "b"), file+".new"))
	must(t, os.Rename(file+".new", file))
	w.change(3)
	write(t, filepath.Join(elsewhere, "b"), content(4))
	w.change(4)
}

// TestWatchDirectoryReplaced: the directory disappears and comes back. Its watch went with it; the poll finds the new.
func TestWatchDirectoryReplaced(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "conf")
	file := filepath.Join(dir, "file")
	must(t, os.Mkdir(dir, 0o700))
	write(t, file, content(1))
	w := watch(t, file, Config[int]{Poll: 20 * time.Millisecond}, newEvents(t))
	must(t, os.RemoveAll(dir))
	w.failure(file)
	must(t, os.Mkdir(dir, 0o700))
	write(t, file, content(2))
	w.change(2)
}

// TestWatchBusyDirectory: what happens to other files all the time does not keep the file from being read.
func TestWatchBusyDirectory(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	write(t, file, content(1))
	w := watch(t, file, Config[int]{Poll: time.Hour}, newEvents(t))
	stop := make(chan struct{})
	var busy sync.WaitGroup
	busy.Go(func() {
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				if err := os.WriteFile(filepath.Join(dir, "log"), []byte("x"), 0o600); err != nil {
					t.Error(err)
					return
				}
			}
		}
	})
	defer busy.Wait()
	defer close(stop)
	write(t, file, content(2))
	w.change(2)
}

func TestWatchWithoutEvents(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	write(t, file, content(1))
	w := watch(t, file, Config[int]{}, nil)
	if w.cfg.Poll != quickPoll {
		t.Errorf("polls every %v", w.cfg.Poll)
	}
	write(t, file, content(2))
	w.change(2)
}

// TestReload: a reload needs no event and no poll, and says again what is wrong.
func TestReload(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	write(t, file, content(1))
	w := watch(t, file, Config[int]{Poll: time.Hour}, nil)
	write(t, file, content(2))
	w.Reload()
	w.change(2)
	write(t, file, "bad 1")
	for range 3 {
		w.Reload()
		w.failure("bad 1")
	}
	// What is in force already is no change.
	write(t, file, content(2))
	w.Reload()
	eventually(t, "the error's end", func() bool { return w.Err() == nil })
	write(t, file, content(3))
	w.Reload()
	w.change(3)
}

// TestSettling takes the goroutine's place, so that each look at the file comes at a known moment.
func TestSettling(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	write(t, file, content(1))
	var reported []error
	w, err := load([]string{file}, Config[int]{Parse: parse, Read: prefix, OnError: func(err error) { reported = append(reported, err) }}, nil)
	must(t, err)
	step := func(wantMore bool, want, wantErrors int) {
		t.Helper()
		if more := w.handle(w.readAll()); more != wantMore || w.Current() != want || len(reported) != wantErrors {
			t.Fatalf("more %t, value %d, errors %d; want %t, %d, %d", more, w.Current(), len(reported), wantMore, want, wantErrors)
		}
	}
	step(false, 1, 0)

	// A write that is seen in pieces: broken, valid with another value, whole.
	write(t, file, "numb")
	step(true, 1, 0)
	write(t, file, content(0))
	step(true, 1, 0)
	write(t, file, content(2))
	step(true, 1, 0)
	step(false, 2, 0)
	step(false, 2, 0)

	// One that returns to what is in force before it settled.
	write(t, file, "x")
	step(true, 2, 0)
	write(t, file, content(2))
	step(false, 2, 0)
	// The broken content has to settle from the beginning then.
	write(t, file, "x")
	step(true, 2, 0)
	step(false, 2, 1)
	step(false, 2, 1)

	// Emptied, which may be the first half of a slow write.
	write(t, file, "")
	for range emptySettle {
		step(true, 2, 1)
	}
	step(false, 0, 1)

	// A file that is away for a moment, while it is replaced.
	must(t, os.Remove(file))
	step(true, 0, 1)
	write(t, file, content(3))
	step(true, 0, 1)
	step(false, 3, 1)
}

func TestStartRefuses(t *testing.T) {
	dir := t.TempDir()
	bad := filepath.Join(dir, "bad")
	write(t, bad, "x")
	if _, err := Start([]string{bad}, Config[int]{Parse: parse}); err == nil || !strings.Contains(err.Error(), "mistake") {
		t.Errorf("bad: %v", err)
	}
	for _, file := range []string{filepath.Join(dir, "none"), filepath.Join(dir, "none", "file")} {
		if _, err := Start([]string{file}, Config[int]{Parse: parse}); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v", file, err)
		}
	}
}

// TestSize: of a file that is too large one byte more is read than allowed, so that Parse can tell.
func TestSize(t *testing.T) {
	file := filepath.Join(t.TempDir(), "large")
	write(t, file, strings.Repeat("x", 100))
	length := 0
	cfg := Config[int]{MaxSize: 10, Parse: func(contents [][]byte) (int, error) { length = len(contents[0]); return 0, nil }}
	w, err := Start([]string{file}, cfg)
	must(t, err)
	must(t, w.Close())
	if length != 11 {
		t.Errorf("%d bytes were read", length)
	}
}

// TestDefaultSize: without a size of its own, a file that is too large is refused and not cut.
func TestDefaultSize(t *testing.T) {
	file := filepath.Join(t.TempDir(), "large")
	write(t, file, strings.Repeat("x", defaultSize+1))
	_, err := Start([]string{file}, Config[int]{Parse: func([][]byte) (int, error) { return 0, nil }})
	if err == nil || !strings.Contains(err.Error(), "too large") {
		t.Errorf("got %v", err)
	}
}

// TestPipe: a file that is replaced by a pipe, which nobody writes to, is reported like any other mistake, and the file
// that comes in its place is taken. The pipe is not waited for, with events and without.
func TestPipe(t *testing.T) {
	for _, events := range []*fsnotify.Watcher{newEvents(t), nil} {
		file := filepath.Join(t.TempDir(), "file")
		write(t, file, content(1))
		w := watch(t, file, Config[int]{Poll: 10 * time.Millisecond}, events)
		must(t, os.Remove(file))
		must(t, syscall.Mkfifo(file, 0o600))
		if err := w.failure("pipe"); errors.Is(err, os.ErrNotExist) {
			w.failure("pipe") // the moment between the two was seen
		}
		w.Reload()
		w.failure("pipe") // again, because it was asked for
		must(t, os.Remove(file))
		write(t, file, content(2))
		w.change(2)
		if n := w.Timeouts(); n != 0 {
			t.Errorf("%d reads have timed out", n)
		}
	}
}

// hang stands for a file system that can be made to answer no more, and to answer again.
type hang struct {
	mu   sync.Mutex
	free chan struct{} // nil: it answers
	held int           // reads that wait now
	most int
}

func (h *hang) read(name string, limit int64) ([]byte, error) {
	h.mu.Lock()
	free := h.free
	h.held++
	h.most = max(h.most, h.held)
	h.mu.Unlock()
	defer func() { h.mu.Lock(); h.held--; h.mu.Unlock() }()
	if free != nil {
		<-free
	}
	return ReadPrefix(name, limit)
}

// peak is the most reads that there were at a time.
func (h *hang) peak() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.most
}

func (h *hang) begin() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.free = make(chan struct{})
}

func (h *hang) end() {
	h.mu.Lock()
	defer h.mu.Unlock()
	close(h.free)
	h.free = nil
}

// TestWatchHang: a file system that does not answer holds one read and nothing else. What is in force stays, a reload that is
// asked for is answered, and the content is taken when the file system is back.
func TestWatchHang(t *testing.T) {
	name := filepath.Join(t.TempDir(), "file")
	write(t, name, content(1))
	var fs hang
	w := watchBy(t, name, Config[int]{Poll: time.Millisecond, Timeout: 20 * time.Millisecond, Settle: time.Millisecond}, nil, fs.read)
	fs.begin()
	write(t, name, content(2))
	if err := w.failure(name); !errors.Is(err, ErrTimeout) {
		t.Fatalf("got %v", err)
	}
	for range 3 {
		w.Reload()
		w.failure("does not answer")
	}
	if w.Current() != 1 || w.Timeouts() != 1 {
		t.Errorf("value %d, %d timeouts", w.Current(), w.Timeouts())
	}
	fs.end()
	w.change(2)
	if n := fs.peak(); n != 1 {
		t.Errorf("%d reads at a time", n)
	}

	// The same content again is in force again, although nothing changes.
	fs.begin()
	w.failure("does not answer")
	fs.end()
	eventually(t, "the end of the error", func() bool { return w.Err() == nil })
	if n := w.Timeouts(); n != 2 {
		t.Errorf("%d timeouts", n)
	}
}

// TestCloseHanging: Close does not wait for the file system, and what it leaves behind ends when that answers.
func TestCloseHanging(t *testing.T) {
	before := runtime.NumGoroutine()
	name := filepath.Join(t.TempDir(), "file")
	write(t, name, content(1))
	var fs hang
	failed := make(chan error, 1)
	w, err := load([]string{name}, Config[int]{
		Parse: parse, Read: fs.read, Poll: time.Millisecond, Timeout: time.Millisecond, OnError: func(err error) { failed <- err },
	}, newEvents(t))
	must(t, err)
	fs.begin()
	w.Watch()
	<-failed
	for range 2 {
		must(t, w.Close())
	}
	fs.end()
	eventually(t, "the end of every goroutine", func() bool { return runtime.NumGoroutine() <= before })
}

// TestStartHanging: nor does Start.
func TestStartHanging(t *testing.T) {
	var fs hang
	fs.begin()
	_, err := load([]string{"file"}, Config[int]{Parse: parse, Read: fs.read, Timeout: time.Millisecond}, newEvents(t))
	if !errors.Is(err, ErrTimeout) || !strings.Contains(err.Error(), "file") {
		t.Errorf("got %v", err)
	}
	fs.end()
}

// TestSeveral: a value that is made of files in several directories follows each of them.
func TestSeveral(t *testing.T) {
	a, b := filepath.Join(t.TempDir(), "a"), filepath.Join(t.TempDir(), "b")
	write(t, a, content(1))
	write(t, b, content(10))
	changes := make(chan int, 10)
	w, err := Start([]string{a, b}, Config[int]{Parse: parse, Poll: time.Hour, OnChange: func(n int) { changes <- n }})
	must(t, err)
	write(t, a, content(2))
	if n := <-changes; n != 12 {
		t.Errorf("a changed: %d", n)
	}
	write(t, b, content(20))
	if n := <-changes; n != 22 {
		t.Errorf("b changed: %d", n)
	}
	// Contents that change places are a change.
	write(t, a, content(2)+" ")
	if n := <-changes; n != 22 || w.Current() != 22 {
		t.Errorf("%d, %d", n, w.Current())
	}
	must(t, w.Close())
}

func TestClose(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	write(t, file, content(1))
	before := runtime.NumGoroutine()
	entered, leave := make(chan struct{}), make(chan struct{})
	w, err := Start([]string{file}, Config[int]{Parse: parse, OnChange: func(int) { close(entered); <-leave }})
	must(t, err)
	write(t, file, content(2))
	<-entered
	closed := make(chan error)
	for range 2 {
		go func() { closed <- w.Close() }()
	}
	<-w.stop
	select {
	case <-closed:
		t.Error("did not wait for the call in flight")
	default:
	}
	close(leave)
	must(t, <-closed)
	must(t, <-closed)
	must(t, w.Close())
	w.Reload()
	if got := w.Current(); got != 2 {
		t.Errorf("current is %d", got)
	}
	eventually(t, "the end of every goroutine", func() bool { return runtime.NumGoroutine() <= before })
}

// TestLostEvents: when the system says that it has lost events, the file is looked at.
func TestLostEvents(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	write(t, file, content(1))
	events := newEvents(t)
	w := watch(t, file, Config[int]{Poll: time.Hour}, events)
	must(t, events.Remove(filepath.Dir(file)))
	write(t, file, content(2))
	events.Errors <- fsnotify.ErrEventOverflow
	w.change(2)
}
