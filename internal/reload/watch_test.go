package reload

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// patience is how long a test waits for what it is sure to see.
const patience = testkit.Patience

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
	must.NoError(t, os.WriteFile(file, []byte(text), 0o600))
}

// watched is a Watcher under test and what it reported.
type watched struct {
	*Watcher[int]
	t       *testing.T
	changes chan int
	errs    chan error
}

// watch begins to watch a file, which it reads every 100 ms unless cfg says otherwise, and ends that with the test.
func watch(t *testing.T, name string, cfg Config[int]) *watched {
	t.Helper()
	w := &watched{t: t, changes: make(chan int, 100), errs: make(chan error, 100)}
	cfg.Parse, cfg.poll = parse, cmp.Or(cfg.poll, 100*time.Millisecond)
	cfg.OnChange = func(s int) { w.changes <- s }
	cfg.OnError = func(err error) { w.errs <- err }
	w.Watcher = must.Value(Start([]string{name}, cfg))(t)
	t.Cleanup(w.Close)
	return w
}

// change waits for the next change, which must be to the content of n. That no error comes before is checked too.
func (w *watched) change(n int) {
	w.t.Helper()
	select {
	case s := <-w.changes:
		must.Equal(w.t, s, n, "changed to")
		must.NoError(w.t, w.Err(), "in force, and yet")
	case err := <-w.errs:
		w.t.Fatalf("got an error, want the change to %d: %v", n, err)
	case <-time.After(patience):
		w.t.Fatalf("no change to %d", n)
	}
	must.Equal(w.t, w.Current(), n, "current")
}

// failure waits for the next error, before which nothing may change.
func (w *watched) failure(part string) error {
	w.t.Helper()
	select {
	case err := <-w.errs:
		must.True(w.t, strings.Contains(err.Error(), part), "got %v, want %s", err, part)
		must.True(w.t, w.Err() != nil, "reported, and yet Err is nil")
		return err
	case s := <-w.changes:
		w.t.Fatalf("changed to %d, want an error with %s", s, part)
	case <-time.After(patience):
		w.t.Fatalf("no error with %s", part)
	}
	return nil
}

func TestWatchEdits(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	write(t, file, content(1))
	w := watch(t, file, Config[int]{})
	must.Equal(t, w.Current(), 1, "begins with")
	write(t, file, content(2))
	w.change(2)

	// Written beside and renamed, as most editors and deployment tools do.
	write(t, file+".new", content(3))
	must.NoError(t, os.Rename(file+".new", file))
	w.change(3)

	// Renamed away and written anew, as vim does with its backup.
	must.NoError(t, os.Rename(file, file+"~"))
	write(t, file, content(4))
	must.NoError(t, os.Remove(file+"~"))
	w.change(4)

	// The same content, whoever writes it, is no change: the next one reported is the other.
	write(t, file, content(4))
	write(t, file+".new", content(4))
	must.NoError(t, os.Rename(file+".new", file))
	w.Reload()
	write(t, file, content(5))
	w.change(5)
}

// TestWatchConfigMap makes and updates a volume as Kubernetes does: the file is a link through ..data, which is a link
// to a directory of the version, and is replaced as a whole.
func TestWatchConfigMap(t *testing.T) {
	dir := t.TempDir()
	version := func(n int) string { return fmt.Sprintf("..2024_%d", n) }
	mount := func(n int, text string) {
		must.NoError(t, os.Mkdir(filepath.Join(dir, version(n)), 0o700))
		write(t, filepath.Join(dir, version(n), "file"), text)
		must.NoError(t, os.Symlink(version(n), filepath.Join(dir, "..data_tmp")))
		must.NoError(t, os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
		if n > 1 {
			must.NoError(t, os.RemoveAll(filepath.Join(dir, version(n-1))))
		}
	}
	mount(1, content(1))
	file := filepath.Join(dir, "file")
	must.NoError(t, os.Symlink(filepath.Join("..data", "file"), file))
	w := watch(t, file, Config[int]{})
	for n := 2; n < 5; n++ {
		mount(n, content(n))
		w.change(n)
	}
	mount(5, "bad 3")
	w.failure("bad 3")
	mount(6, content(6))
	w.change(6)
}

// TestSettling takes the goroutine's place, so that each look at the file comes at a known moment.
func TestSettling(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	write(t, file, content(1))
	var reported []error
	w := must.Value(Open([]string{file},
		Config[int]{Parse: parse, OnError: func(err error) { reported = append(reported, err) }}))(t)
	step := func(text string, want, wantErrors int) {
		t.Helper()
		write(t, file, text)
		w.handle(w.read(), false)
		must.True(t, w.Current() == want && len(reported) == wantErrors, "value %d, errors %d", w.Current(),
			len(reported))
	}
	step(content(1), 1, 0)

	// A write that is seen in pieces: broken, emptied, valid with another value, whole.
	step("numb", 1, 0)
	step("", 1, 0)
	step(content(0), 1, 0)
	step(content(2), 1, 0)
	step(content(2), 2, 0)

	// One that returns to what is in force before it settled. The broken content has to settle from the beginning then.
	step("x", 2, 0)
	step(content(2), 2, 0)
	step("x", 2, 0)
	step("x", 2, 1)
	step("x", 2, 1)

	// A file that is away for a moment, while it is replaced.
	must.NoError(t, os.Remove(file))
	w.handle(w.read(), false)
	step(content(3), 2, 1)
	step(content(3), 3, 1)

	// What is asked for is reported again.
	step("x", 3, 1)
	step("x", 3, 2)
	w.handle(w.read(), true)
	step("x", 3, 3)
	step("x", 3, 3)

	// Nor is it taken at once: it may have been written a moment ago.
	step("", 3, 3)
	w.handle(w.read(), true)
	expect.Equal(t, w.Current(), 3, "an empty file that was asked for is taken")
	step("", 0, 3)
}

func TestStartRefuses(t *testing.T) {
	dir := t.TempDir()
	bad := filepath.Join(dir, "bad")
	write(t, bad, "x")
	_, err := Start([]string{bad}, Config[int]{Parse: parse})
	expect.ErrorContains(t, err, "mistake", "bad")
	for _, file := range []string{filepath.Join(dir, "none"), filepath.Join(dir, "none", "file")} {
		_, err := Start([]string{file}, Config[int]{Parse: parse})
		expect.ErrorIs(t, err, os.ErrNotExist, "%s", file)
	}
}

// TestSize: a file that is too large is refused and not cut.
func TestSize(t *testing.T) {
	file := filepath.Join(t.TempDir(), "large")
	for size, cfg := range map[int]Config[int]{10: {MaxSize: 10}, defaultSize: {}} {
		cfg.Parse = func([][]byte) (int, error) { return 0, nil }
		write(t, file, strings.Repeat("x", size))
		_, err := Open([]string{file}, cfg)
		expect.NoError(t, err, "%d bytes", size)
		write(t, file, strings.Repeat("x", size+1))
		_, err = Open([]string{file}, cfg)
		expect.ErrorContains(t, err, "too large", "%d bytes more", size)
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

// TestWatchHang: a file system that does not answer holds one read and nothing else. What is in force stays, and the
// content is taken when the file system is back.
func TestWatchHang(t *testing.T) {
	name := filepath.Join(t.TempDir(), "file")
	write(t, name, content(1))
	var fs hang
	w := watch(t, name, Config[int]{Read: fs.read, poll: time.Millisecond, timeout: 20 * time.Millisecond})
	fs.begin()
	write(t, name, content(2))
	must.ErrorIs(t, w.failure(name), ErrTimeout)
	w.Reload()
	expect.True(t, w.Current() == 1 && w.Timeouts() == 1, "value %d, %d timeouts", w.Current(), w.Timeouts())
	fs.end()
	w.change(2)
	expect.Equal(t, fs.peak(), 1, "reads at a time")

	// The same content again is in force again, although nothing changes.
	fs.begin()
	w.failure("does not answer")
	fs.end()
	testkit.Eventually(t, "the end of the error", func() bool { return w.Err() == nil })
	expect.Equal(t, w.Timeouts(), 2, "timeouts")
}

// TestCloseHanging: Close does not wait for the file system, and what it leaves behind ends when that answers.
func TestCloseHanging(t *testing.T) {
	before := runtime.NumGoroutine()
	name := filepath.Join(t.TempDir(), "file")
	write(t, name, content(1))
	var fs hang
	failed := make(chan error, 1)
	w := must.Value(Open([]string{name}, Config[int]{
		Parse: parse, Read: fs.read, poll: time.Millisecond, timeout: 100 * time.Millisecond,
		OnError: func(err error) { failed <- err },
	}))(t)
	fs.begin()
	w.Watch()
	<-failed
	for range 2 {
		w.Close()
	}
	fs.end()
	testkit.Eventually(t, "the end of every goroutine", func() bool { return runtime.NumGoroutine() <= before })
}

// TestStartHanging: nor does Start.
func TestStartHanging(t *testing.T) {
	var fs hang
	fs.begin()
	_, err := Open([]string{"file"}, Config[int]{Parse: parse, Read: fs.read, timeout: time.Millisecond})
	expect.True(t, errors.Is(err, ErrTimeout) && strings.Contains(err.Error(), "file"), "got %v", err)
	fs.end()
}

// TestSeveral: a value that is made of files in several directories follows each of them.
func TestSeveral(t *testing.T) {
	a, b := filepath.Join(t.TempDir(), "a"), filepath.Join(t.TempDir(), "b")
	write(t, a, content(1))
	write(t, b, content(10))
	changes := make(chan int, 10)
	w, err := Start([]string{a, b},
		Config[int]{Parse: parse, poll: 20 * time.Millisecond, OnChange: func(n int) { changes <- n }})
	must.NoError(t, err)
	write(t, a, content(2))
	expect.Equal(t, <-changes, 12, "a changed")
	write(t, b, content(20))
	expect.Equal(t, <-changes, 22, "b changed")
	// Contents that change places are a change.
	write(t, a, content(2)+" ")
	n := <-changes
	expect.True(t, n == 22 && w.Current() == 22, "%d, %d", n, w.Current())
	w.Close()
}

func TestClose(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	write(t, file, content(1))
	before := runtime.NumGoroutine()
	entered, leave := make(chan struct{}), make(chan struct{})
	w, err := Start([]string{file}, Config[int]{Parse: parse, OnChange: func(int) { close(entered); <-leave }})
	must.NoError(t, err)
	write(t, file, content(2))
	<-entered
	closed := make(chan struct{})
	for range 2 {
		go func() { w.Close(); closed <- struct{}{} }()
	}
	select {
	case <-closed:
		t.Error("did not wait for the call in flight")
	case <-time.After(20 * time.Millisecond):
	}
	close(leave)
	<-closed
	<-closed
	w.Close()
	w.Reload()
	expect.Equal(t, w.Current(), 2, "current")
	testkit.Eventually(t, "the end of every goroutine", func() bool { return runtime.NumGoroutine() <= before })
}
